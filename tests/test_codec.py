"""Codec: bit-exact, deterministic, and no frame can make it allocate or return anything else."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from eaglet import codec
from eaglet.codec import CODECS, Bits, Run


def any_bits(rows: int, hidden: int, seed: int = 0) -> Bits:
    """Every kind of bf16: NaN with payload, infinities, zeros of both signs, subnormals, numbers."""
    return np.random.default_rng(seed).integers(0, 1 << 16, (rows, hidden), np.uint16)


def state_like(rows: int, hidden: int, seed: int = 0) -> Bits:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, hidden)) * np.exp2(rng.integers(-8, 8, hidden))
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def decode(run: Run, hidden: int) -> Bits:
    out = np.zeros((run.length, hidden), np.uint16)
    step = codec.rows_per_block(hidden)
    for number, (block, exponents) in enumerate(zip(run.blocks, run.exponents, strict=True)):
        part = out[number * step : (number + 1) * step]
        codec.decode_block(block, exponents, run.base, len(part), part)
    return out


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("rows", "hidden", "blocks"),
    [
        (1, 1, 1),
        (1, 576, 1),
        (3, 7, 1),
        (500, 1, 1),
        (65, 4096, 2),
        (64, 4096, 1),
        (5, 200_000, 5),
        (2, 5_000_000, 2),
        (2, 262_145, 2),
    ],
)
def test_round_trip_is_bit_exact(name: str, rows: int, hidden: int, blocks: int) -> None:
    states = any_bits(rows, hidden)
    run = codec.encode(states, name)
    assert (len(run.blocks), run.length) == (blocks, rows)
    np.testing.assert_array_equal(decode(run, hidden), states)


@pytest.mark.parametrize("name", CODECS)
def test_every_bit_pattern_survives(name: str) -> None:
    states = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    np.testing.assert_array_equal(decode(codec.encode(states, name), 256), states)
    columns = np.ascontiguousarray(states.T)
    np.testing.assert_array_equal(decode(codec.encode(columns, name), 256), columns)


def test_strided_states_give_the_bytes_of_contiguous_ones() -> None:
    wide = any_bits(9, 20)
    for name in CODECS:
        strided = codec.encode(wide[::2, ::2], name)
        assert strided.blocks == codec.encode(np.ascontiguousarray(wide[::2, ::2]), name).blocks


def test_encode_leaves_its_input_alone() -> None:
    states = any_bits(300, 16)
    before = states.copy()
    codec.encode(states, "rebase-zstd")
    np.testing.assert_array_equal(states, before)


@pytest.mark.parametrize("rows", [1, 2, 3, 127, 128, 129, 1000])
def test_base_is_the_lower_median_exponent_of_evenly_spaced_rows(rows: int) -> None:
    states = any_bits(rows, 50, seed=rows)
    count = min(rows, 128)
    picked = states[[i * rows // count for i in range(count)]] >> 7 & 255
    expected = np.sort(picked, axis=0)[(count - 1) // 2]
    np.testing.assert_array_equal(codec.encode(states, "rebase-zstd").base, expected)


def test_blocks_are_frames_with_size_and_checksum_then_the_plane() -> None:
    states = state_like(3, 32)
    run = codec.encode(states, "rebase-zstd")
    frame, plane = run.blocks[0][: run.exponents[0]], run.blocks[0][run.exponents[0] :]
    claims = zstandard.get_frame_parameters(frame)
    assert (claims.content_size, claims.has_checksum, claims.dict_id) == (96, True, 0)
    exponents = np.frombuffer(zstandard.decompress(frame), np.uint8).reshape(3, 32) + run.base
    np.testing.assert_array_equal(exponents, states >> 7 & 255)
    np.testing.assert_array_equal(np.frombuffer(plane, np.uint8).reshape(3, 32), (states << 1 | states >> 15) & 255)


def test_part_of_a_block_equals_part_of_the_whole() -> None:
    states = any_bits(10, 6)
    for name in CODECS:
        run = codec.encode(states, name)
        for first in range(10):
            for stop in range(first, 11):
                out = np.zeros((stop - first, 6), np.uint16)
                codec.decode_block(run.blocks[0], run.exponents[0], run.base, 10, out, first=first)
                np.testing.assert_array_equal(out, states[first:stop])


def test_states_like_real_ones_shrink_to_two_thirds() -> None:
    states = state_like(512, 2048)
    run = codec.encode(states, "rebase-zstd")
    assert states.nbytes / (sum(map(len, run.blocks)) + run.base.nbytes) >= 1.45
    raw = codec.encode(states, "raw")
    assert sum(map(len, raw.blocks)) == states.nbytes
    assert (raw.base.size, set(raw.exponents)) == (0, {0})


def test_threads_give_the_same_bytes() -> None:
    inputs = [state_like(200, 2048, seed) for seed in range(4)] * 6
    expected = [codec.encode(states, "rebase-zstd").blocks for states in inputs[:4]] * 6
    with ThreadPoolExecutor(4) as pool:
        assert [run.blocks for run in pool.map(lambda x: codec.encode(x, "rebase-zstd"), inputs)] == expected


@pytest.mark.parametrize(
    "states",
    [
        np.zeros((0, 4), np.uint16),
        np.zeros((4, 0), np.uint16),
        np.zeros(4, np.uint16),
        np.zeros((1, 2, 3), np.uint16),
        np.zeros((4, 4), np.int16),
        np.zeros((4, 4), np.float32),
    ],
)
def test_other_shapes_and_dtypes_are_refused(states: Bits) -> None:
    for name in CODECS:
        with pytest.raises(ValueError, match="at least one row"):
            codec.encode(states, name)


def test_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown codec 'lzma'"):
        codec.encode(any_bits(1, 1), "lzma")


def frame_of(data: bytes, write_checksum: bool = True, write_content_size: bool = True) -> bytes:
    compressor = zstandard.ZstdCompressor(write_checksum=write_checksum, write_content_size=write_content_size)
    return compressor.compress(data)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (frame_of(bytes(1 << 30)), "claims 1073741824 bytes"),
        (frame_of(bytes(7)), "claims 7 bytes"),
        (frame_of(bytes(8), write_content_size=False), "instead of 8 bytes"),
        (frame_of(bytes(8), write_checksum=False), "checksum False"),
        (frame_of(bytes(8)) + frame_of(bytes(8)), "does not decode"),
        (frame_of(bytes(8)) + b"x", "does not decode"),
        (frame_of(bytes(8))[:-1], "does not decode"),
        (frame_of(bytes(8))[:-1] + b"\0", "does not decode"),
        (b"no frame", "does not decode"),
    ],
)
def test_frames_that_are_not_of_the_block_are_refused(frame: bytes, message: str) -> None:
    out = np.zeros((2, 4), np.uint16)
    with pytest.raises(ValueError, match=message):
        codec.decode_block(frame + bytes(8), len(frame), np.zeros(4, np.uint8), 2, out)


def test_blocks_of_another_size_are_refused() -> None:
    out = np.zeros((2, 4), np.uint16)
    for block, exponents in ((bytes(15), 0), (bytes(17), 0), (bytes(17), 10), (b"", 3)):
        with pytest.raises(ValueError, match="for 2 rows of 4 channels"):
            codec.decode_block(block, exponents, np.zeros(4, np.uint8), 2, out)
    for first in (-1, 1):
        with pytest.raises(ValueError, match="of a block of 2"):
            codec.decode_block(bytes(16), 0, np.zeros(0, np.uint8), 2, out, first=first)
