"""bfloat16 states to bytes and back, bit for bit: the blocks of a shard (docs/format.md).

A bf16 is one sign bit, eight exponent bits and seven mantissa bits. Sign and mantissa are noise and are kept
as they are; the exponents, taken relative to their channel's usual one, are what compresses. Only bits
(uint16 arrays) pass through here: no arithmetic is done on the values, so NaN payloads survive.
"""

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

REBASE_ZSTD = "rebase-zstd"
RAW = "raw"
CODECS = (REBASE_ZSTD, RAW)

PLANE_BYTES = 256 << 10  # of one plane of a block: it stays in the L2 cache between the passes over it
BASE_ROWS = 128  # rows that a sample's base is taken from, at most

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Block = bytes | memoryview


@dataclass(frozen=True)
class Run:
    """One encoded sample: what it takes to put it into any shard of its hidden size and codec.

    Attributes:
        base: uint8 [H], subtracted from each channel's exponents; [0] for the codec "raw".
        blocks: the bytes of each block, in token order.
        exponents: the length in bytes of each block's zstd part; 0 for the codec "raw".
        crcs: the crc32 of each block.
        length: tokens (rows).
    """

    base: Bytes
    blocks: Sequence[Block]
    exponents: Sequence[int]
    crcs: Sequence[int]
    length: int


class _PerThread(threading.local):
    """A compressor must not be shared between threads; scratch arrays must not either."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            # Matching is as good as off: there are no repeats to find, the Huffman stage does the work.
            strategy=zstandard.STRATEGY_FAST,
            target_length=0,
            min_match=7,
            hash_log=6,
            chain_log=6,
            search_log=1,
            window_log=17,
            write_content_size=True,
            write_checksum=True,
            write_dict_id=False,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()
        self._words = np.empty((2, 0), np.uint16)
        self._bytes = np.empty(0, np.uint8)

    def scratch(self, rows: int, hidden: int) -> tuple[Bits, Bits, Bytes]:
        """Two uint16 arrays and one of uint8, each [rows, hidden], contiguous, with anything in them."""
        size = rows * hidden
        if self._words.shape[1] < size:
            self._words = np.empty((2, size), np.uint16)
            self._bytes = np.empty(size, np.uint8)
        shape = (rows, hidden)
        return (
            self._words[0, :size].reshape(shape),
            self._words[1, :size].reshape(shape),
            self._bytes[:size].reshape(shape),
        )


_local = _PerThread()


def rows_per_block(hidden: int) -> int:
    """Token rows in a block of states of `hidden` channels; a sample's last block may hold fewer.

    Raises:
        ValueError: `hidden` is below 1.
    """
    if hidden < 1:
        raise ValueError(f"hidden size {hidden}")
    return max(1, PLANE_BYTES // hidden)


def encode(states: Bits, codec: str) -> Run:
    """Encode one sample. Equal states give equal bytes, in any thread and next to any neighbours.

    Args:
        states: uint16 [T, H], the bit patterns of bf16 values; T and H at least 1.
        codec: one of `CODECS`.

    Raises:
        ValueError: another shape, dtype or codec.
    """
    if states.dtype != np.uint16 or states.ndim != 2 or 0 in states.shape:
        raise ValueError(
            f"states must be uint16 [T, H] with at least one row and channel: {states.dtype} {states.shape}"
        )
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: one of {', '.join(CODECS)}")
    length, hidden = states.shape
    step = rows_per_block(hidden)
    # One piece of memory for all blocks: many small ones would cost more page faults than the copying costs.
    blocks, exponents = [], []
    size = 2 * length * hidden
    if codec == RAW:
        base = np.empty(0, np.uint8)
        stored = np.array(states, "<u2", order="C").reshape(-1).view(np.uint8).data
    else:
        base = _base(states)
        bound = size + (size >> 9) + 64 * -(-length // step)  # zstd's own, for planes that do not compress
        stored = np.empty(bound, np.uint8).data
    at = 0
    for start in range(0, length, step):
        part = states[start : start + step]
        frame = 0 if codec == RAW else _write_frame(part, base, stored[at:])
        end = at + (frame + part.size if frame else 2 * part.size)
        blocks.append(stored[at:end])
        exponents.append(frame)
        at = end
    return Run(base, blocks, exponents, [zlib.crc32(block) for block in blocks], length)


def _base(states: Bits) -> Bytes:
    """Each channel's lower median exponent over up to 128 evenly spaced rows: uint8 [H].

    Found bit by bit, as the largest value that at most half the rows lie below: a few passes over bytes,
    where sorting would cost as much as the rest of the encoder.
    """
    length, hidden = states.shape
    count = min(length, BASE_ROWS)
    rows = states[np.arange(count) * length // count]
    rows >>= 7
    exponents = rows.astype(np.uint8)
    median = np.zeros(hidden, np.uint8)
    for bit in range(7, -1, -1):
        candidate = median | np.uint8(1 << bit)
        below = np.add.reduce((exponents < candidate).view(np.uint8), axis=0, dtype=np.uint8)
        np.copyto(median, candidate, where=below <= (count - 1) // 2)
    return median


def _write_frame(part: Bits, base: Bytes, out: memoryview) -> int:
    """Write a block to the start of `out`; returns the length of its zstd frame."""
    turned, low, exponents = _local.scratch(*part.shape)
    # One bit to the left: exponent in the high byte, mantissa and then the sign in the low one.
    np.left_shift(part, 1, out=turned)
    np.right_shift(part, 15, out=low)
    np.bitwise_or(turned, low, out=turned)
    np.right_shift(turned, 8, out=low)
    exponents[:] = low
    np.subtract(exponents, base, out=exponents)
    frame = _local.compressor.compress(exponents.data)
    out[: len(frame)] = frame
    np.frombuffer(out, np.uint8, part.size, len(frame)).reshape(part.shape)[:] = turned
    return len(frame)


def decode_block(block: Block, exponents: int, base: Bytes, rows: int, out: Bits, *, first: int = 0) -> None:
    """Decode rows `first` to `first + len(out)` of a block into `out`.

    Nothing larger than the block's known size is ever allocated, whatever the frame claims.

    Args:
        block: the block's bytes.
        exponents: the length of its zstd part; 0 for the codec "raw".
        base: uint8 [H]; not looked at for the codec "raw".
        rows: token rows in the block.
        out: uint16 [n, H], C-contiguous, filled with bit patterns of bf16 values.
        first: the row of the block that `out` starts with.

    Raises:
        ValueError: the bytes are not those of such a block.
    """
    count, hidden = out.shape
    if not 0 <= first <= first + count <= rows:
        raise ValueError(f"rows {first} to {first + count} of a block of {rows}")
    size = rows * hidden
    if len(block) != (exponents + size if exponents else 2 * size):
        raise ValueError(f"{len(block)} bytes for {rows} rows of {hidden} channels")
    if not exponents:
        np.copyto(out, np.frombuffer(block, "<u2", count * hidden, 2 * first * hidden).reshape(count, hidden))
        return
    plane = np.frombuffer(_decompress(memoryview(block)[:exponents], size), np.uint8)
    plane = plane[first * hidden : (first + count) * hidden].reshape(count, hidden)
    rest = np.frombuffer(block, np.uint8, count * hidden, exponents + first * hidden).reshape(count, hidden)
    turned, low, scratch = _local.scratch(count, hidden)
    np.add(plane, base, out=scratch)
    turned[:] = scratch
    np.left_shift(turned, 8, out=turned)
    low[:] = rest
    np.bitwise_or(turned, low, out=turned)
    np.right_shift(turned, 1, out=low)
    np.left_shift(turned, 15, out=turned)
    np.bitwise_or(turned, low, out=out)


def _decompress(frame: memoryview, size: int) -> bytes:
    """The content of one zstd frame that must hold exactly `size` bytes."""
    try:
        claims = zstandard.get_frame_parameters(frame)
        if claims.content_size != size or not claims.has_checksum:
            raise ValueError(
                f"its zstd frame claims {claims.content_size} bytes, checksum {claims.has_checksum}, "
                f"instead of {size} bytes with a checksum"
            )
        return _local.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd frame does not decode ({error})") from None
