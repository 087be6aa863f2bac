"""Shards: what goes in comes out, in the same bytes each time, and no damage or lie is read as states."""

import copy
import hashlib
import json
import os
import random
import re
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors import safe_open

from eaglet import codec, files
from eaglet.codec import CODECS
from eaglet.shard import MAX_HEADER, Shard, ShardError, ShardMeta, _Layout, pack, write

PAGE = Path(__file__).parents[1] / "docs" / "format.md"


def any_states(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (rows, hidden), np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def meta_of(name: str, hidden: int, *samples: str) -> ShardMeta:
    return ShardMeta("L14", hidden, name, "model-é", "engine", samples)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself, and -0 is not 0."""
    return left.dtype == right.dtype == torch.bfloat16 and torch.equal(left.view(torch.int16), right.view(torch.int16))


def store(path: Path, name: str, states: dict[str, torch.Tensor]) -> bytes:
    hidden = next(iter(states.values())).shape[1]
    write(path, meta_of(name, hidden, *states), [pack(value, name) for value in states.values()])
    return path.read_bytes()


def check_whole(path: Path) -> None:
    with Shard.open(path) as shard:
        shard.verify()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PLANE_BYTES", 16)


@pytest.fixture(params=CODECS)
def small(request: pytest.FixtureRequest, tmp_path: Path, small_blocks: None) -> tuple[Path, bytes]:
    """A shard of two samples of 3 and 1 blocks (4 channels, 4 rows a block)."""
    path = tmp_path / "small.safetensors"
    return path, store(path, request.param, {"a": any_states(9, 4), "b": any_states(2, 4, 1)})


def put(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def split(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A file's header and tensors, these in the file's order."""
    at = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:at])
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return header, {
        name: data[at + start : at + end] for name, (start, end) in sorted(ends.items(), key=lambda item: item[1])
    }


def seal(header: str, tensors: dict[str, bytes]) -> bytes:
    """A file whose check is right, whatever else it says."""
    text = header.encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    index = b"".join(part for name, part in tensors.items() if name not in ("check", "data"))
    tensors = {**tensors, "check": struct.pack("<I", zlib.crc32(head + index))}
    return head + b"".join(tensors.values())


def reseal(data: bytes, edit: Callable[[dict[str, Any], dict[str, bytes]], None]) -> bytes:
    """Edit the fields and tensors of a file, and make header, crc32 and check consistent with the edit."""
    header, tensors = split(data)
    fields = json.loads(header["__metadata__"]["eaglet"])
    edit(fields, tensors)
    header["__metadata__"]["eaglet"] = files.canonical_json(fields)
    at = 0
    for name, part in tensors.items():
        width = {"U64": 8, "U32": 4, "U8": 1}[header[name]["dtype"]]
        header[name]["data_offsets"] = [at, at + len(part)]
        if name != "base":
            header[name]["shape"] = [len(part) // width]
        at += len(part)
    return seal(files.canonical_json(header), tensors)


def test_round_trip(tmp_path: Path) -> None:
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 9.2e-41, -1.5, 3.3e38]])
    for name in CODECS:
        states = {"x": any_states(70, 4096), "y": any_states(1, 4096, 1), "ż\n": any_states(128, 4096, 2)}
        path = tmp_path / name / "s.safetensors"
        runs = [pack(value, name) for value in states.values()]
        size, sha = write(path, meta_of(name, 4096, *states), runs)
        assert (size, sha) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        assert path.stat().st_mode & 0o777 == 0o444
        with Shard.open(path) as shard:
            shard.verify()
            assert shard.samples == tuple(states)
            assert shard.lengths == (70, 1, 128)
            assert (shard.layer, shard.hidden_size, shard.codec) == ("L14", 4096, name)
            assert (shard.model, shard.engine) == ("model-é", "engine")
            assert shard.meta == meta_of(name, 4096, *states)
            assert (shard.raw_bytes, shard.stored_bytes) == (199 * 4096 * 2, size)
            assert "x" in shard
            assert "z" not in shard
            for sample, value in states.items():
                assert same(shard.read(sample), value)
        for value in (
            special.to(torch.bfloat16),
            torch.ones(1, 1, dtype=torch.bfloat16),
            any_states(3, 300_000),
        ):
            store(path, name, {"one": value})
            with Shard.open(path) as shard:
                assert same(shard.read("one"), value)


def test_strided_states_are_stored_as_they_read(tmp_path: Path) -> None:
    states = any_states(8, 12).T[::2]
    store(tmp_path / "s", "rebase-zstd", {"a": states})
    with Shard.open(tmp_path / "s") as shard:
        assert same(shard.read("a"), states)


def test_slices_equal_the_whole(small: tuple[Path, bytes]) -> None:
    whole = any_states(9, 4)
    with Shard.open(small[0]) as shard:
        for start in range(10):
            assert same(shard.read("a", start), whole[start:])
            for stop in range(start, 10):
                assert same(shard.read("a", start, stop), whole[start:stop])
        for start, stop in ((-1, 3), (0, 10), (5, 4), (10, 10)):
            with pytest.raises(ShardError, match=rf"'a': has no rows {start} to {stop}: it has 9: run"):
                shard.read("a", start, stop)


def test_threads_share_a_shard_and_write_the_same_bytes(tmp_path: Path) -> None:
    states = {str(seed): any_states(150, 4096, seed) for seed in range(3)}
    expected = store(tmp_path / "s", "rebase-zstd", states)
    with Shard.open(tmp_path / "s") as shard, ThreadPoolExecutor(4) as pool:
        reads = pool.map(lambda turn: same(shard.read(str(turn % 3)), states[str(turn % 3)]), range(24))
        assert all(reads)
        written = pool.map(lambda turn: store(tmp_path / f"t{turn}", "rebase-zstd", states), range(8))
        assert set(written) == {expected}


def test_a_copied_run_gives_the_bytes_of_a_packed_one(tmp_path: Path, small_blocks: None) -> None:
    for name in CODECS:
        a, b, c = (any_states(9, 4, seed) for seed in range(3))
        store(tmp_path / "old", name, {"a": a, "b": b})
        fresh = store(tmp_path / "fresh", name, {"b": b, "c": c})
        with Shard.open(tmp_path / "old") as shard:
            write(tmp_path / "copy", meta_of(name, 4, "b", "c"), [shard.run("b"), pack(c, name)])
        assert (tmp_path / "copy").read_bytes() == fresh


def test_safetensors_opens_a_shard(small: tuple[Path, bytes]) -> None:
    with safe_open(small[0], framework="numpy") as file:
        names = {"ends", "check", "crc32", "exponents", "base", "data"}
        assert set(file.keys()) == names
        assert list(file.metadata()) == ["eaglet"]
        fields = json.loads(file.metadata()["eaglet"])
        ends, data = file.get_tensor("ends"), file.get_tensor("data")
        assert (ends.dtype, ends.shape, int(ends[-1])) == (np.uint64, (4,), data.nbytes)
        assert file.get_tensor("crc32")[0] == zlib.crc32(data[: int(ends[0])].tobytes())
        assert file.get_tensor("base").shape == (2, 0 if fields["codec"] == "raw" else 4)
    with safe_open(small[0], framework="pt") as file:
        assert {name: len(file.get_tensor(name)) for name in names}["exponents"] == 4
    assert fields == {
        "format": 1,
        "codec": fields["codec"],
        "layer": "L14",
        "hidden_size": 4,
        "model": "model-é",
        "engine": "engine",
        "samples": ["a", "b"],
        "lengths": [9, 2],
        "rows_per_block": 4,
    }


def test_every_flipped_byte_is_detected(small: tuple[Path, bytes]) -> None:
    path, data = small
    for at in range(len(data)):
        for mask in (1 << at % 8, 255):
            put(path, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            with pytest.raises(ShardError):
                check_whole(path)


def test_every_truncation_and_a_longer_file_are_detected(small: tuple[Path, bytes]) -> None:
    path, data = small
    for size in range(len(data)):
        put(path, data[:size])
        with pytest.raises(ShardError, match=r"^[^\n]*small.safetensors: [^\n]+: run `eaglet verify`[^\n]*$"):
            Shard.open(path)
    for more in (b"\0", data):
        put(path, data + more)
        with pytest.raises(ShardError, match="too long"):
            Shard.open(path)


def test_a_file_that_is_cut_while_it_is_open_is_an_error_and_no_crash(small: tuple[Path, bytes]) -> None:
    path, data = small
    path.chmod(0o644)
    with Shard.open(path) as shard:
        os.truncate(path, len(data) - 1)
        assert same(shard.read("a"), any_states(9, 4))
        with pytest.raises(ShardError, match="sample 'b': is cut short"):
            shard.read("b")
    with pytest.raises(ValueError, match="after close"):
        shard.read("a")


def test_damage_is_met_where_it_is_and_nowhere_else(small: tuple[Path, bytes]) -> None:
    path, data = small
    _, tensors = split(data)
    first_end = int.from_bytes(tensors["ends"][:8], "little")
    at = len(data) - len(tensors["data"]) + first_end  # first byte of block 1 of sample a: rows 4 to 7
    put(path, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    with Shard.open(path) as shard:
        assert same(shard.read("a", 0, 4), any_states(9, 4)[:4])
        assert same(shard.read("a", 8), any_states(9, 4)[8:])
        assert same(shard.read("b"), any_states(2, 4, 1))
        for call in (lambda: shard.read("a", 3, 5), lambda: shard.run("a"), shard.verify):
            with pytest.raises(ShardError) as error:
                call()
            assert str(error.value) == (
                f"{path}: sample 'a': block 1 is damaged: its crc32 differs: "
                "run `eaglet verify`, then `dvc repro extract`"
            )


def test_swapped_blocks_are_detected(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "s"
    data = store(path, "raw", {"a": any_states(12, 4)})
    put(path, data[:-96] + data[-64:-32] + data[-96:-64] + data[-32:])
    with pytest.raises(ShardError, match="block 0 is damaged"):
        check_whole(path)


def test_a_missing_sample_names_file_sample_and_remedy(small: tuple[Path, bytes]) -> None:
    with Shard.open(small[0]) as shard:
        for call in (shard.read, shard.run):
            with pytest.raises(ShardError, match=r"small.safetensors: sample 'q' is not in this shard: run `dvc"):
                call("q")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no is missing: run `dvc repro extract`, or `dvc pull`"):
        Shard.open(tmp_path / "no")
    with pytest.raises(ShardError, match="is not a file"):
        Shard.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ShardError, match="is not a file"):
        Shard.open(tmp_path / "fifo")


def test_lies_under_a_right_check_are_refused(small: tuple[Path, bytes]) -> None:
    path, data = small
    _, tensors = split(data)
    put(path, reseal(data, lambda fields, tensors: None))
    assert path.read_bytes() == data  # the forger is as good as the writer

    def ends(*values: int) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
        return lambda fields, tensors: tensors.update(ends=np.array(values, "<u8").tobytes())

    last = len(tensors["data"])
    real = np.frombuffer(tensors["ends"], "<u8").tolist()
    lies: list[tuple[Callable[[dict[str, Any], dict[str, bytes]], Any], str]] = [
        (lambda fields, _: fields.update(format=2), "is of format 2, and this eaglet reads 1"),
        (lambda fields, _: fields.update(format=True), "is of format True"),
        (lambda fields, _: fields.update(format=1.0), "is of format 1.0"),
        (lambda fields, _: fields.update(model="\ud800"), "has no header of a shard"),
        (lambda fields, _: fields.update(codec="lzma"), "unknown codec 'lzma'"),
        (lambda fields, _: fields.update(codec=[]), "'codec' that is not a text"),
        (lambda fields, _: fields.update(extra=0), "unknown header fields: {'extra'}"),
        (lambda fields, _: fields.pop("layer"), "missing or unknown header fields: {'layer'}"),
        (lambda fields, _: fields.update(hidden_size=0), "hidden size of 0"),
        (lambda fields, _: fields.update(hidden_size=4.0), "hidden size of 4.0"),
        (lambda fields, _: fields.update(hidden_size=1 << 62, rows_per_block=1), "call for another"),
        (lambda fields, _: fields.update(hidden_size=3, rows_per_block=5), "call for another|does not end"),
        (lambda fields, _: fields.update(rows_per_block=8), "blocks of 8 rows"),
        (lambda fields, _: fields.update(lengths=[9, 1 << 62]), "call for another"),
        (lambda fields, _: fields.update(lengths=[9, 10**4000]), "call for another"),
        (lambda fields, _: fields.update(lengths=[9, 0]), "no length of at least 1"),
        (lambda fields, _: fields.update(lengths=[9]), "no length of at least 1"),
        (lambda fields, _: fields.update(lengths=[9, True]), "no length of at least 1"),
        (
            lambda fields, _: fields.update(lengths=[9, 1]),
            "sample 'b': block 0 does not end where its 1 rows do",
        ),
        (
            lambda fields, _: fields.update(lengths=[10, 2]),
            "sample 'a': block 2 does not end|call for another",
        ),
        (lambda fields, _: fields.update(samples=["a", "a"]), "names a sample twice"),
        (lambda fields, _: fields.update(samples=["a", 1]), "no list of sample ids"),
        (lambda fields, _: fields.update(samples=[], lengths=[]), "no list of sample ids"),
        (ends(0, *real[1:]), "sample 'a': block 0 does not end"),
        (ends(real[1], real[0], *real[2:]), "sample 'a': block 0 does not end"),
        (ends(*real[:3], last + 1), "sample 'b': block 0 does not end"),
        (ends(*real[:3], (1 << 64) - 1), "sample 'b': block 0 does not end"),
        (lambda _, tensors: tensors.update(exponents=b"\xff" * 16), "sample 'a': block 0 does not end"),
        (lambda _, tensors: tensors.update(data=tensors["data"] + b"\0"), f"take {last} bytes of {last + 1}"),
        (
            lambda _, tensors: tensors.update(data=tensors["data"][:-1]),
            f"take {last} bytes of {last - 1}|call for another",
        ),
        (
            lambda _, tensors: tensors.update(crc32=b"\0" * 16),
            "sample 'a': block 0 is damaged: its crc32 differs",
        ),
    ]
    for edit, message in lies:
        put(path, reseal(data, edit))
        with pytest.raises(ShardError, match=message) as error:
            check_whole(path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400 + len(str(path))


def test_a_zstd_block_without_a_frame_is_refused(tmp_path: Path) -> None:
    data = store(tmp_path / "s", "rebase-zstd", {"a": any_states(4, 4)})

    def edit(fields: dict[str, Any], tensors: dict[str, bytes]) -> None:
        tensors["data"] = tensors["data"][-16:]
        tensors["ends"] = struct.pack("<Q", 16)
        tensors["exponents"] = struct.pack("<I", 0)
        tensors["crc32"] = struct.pack("<I", zlib.crc32(tensors["data"]))

    put(tmp_path / "s", reseal(data, edit))
    with pytest.raises(ShardError, match="sample 'a': block 0 does not end where its 4 rows do"):
        Shard.open(tmp_path / "s")


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, 1 << 62, 1 << 80])
def test_lengths_beyond_the_file_are_refused_before_memory_is_taken(tmp_path: Path, length: int) -> None:
    """Even where the header agrees with them, for which its tensors' sizes must be negative."""
    data = store(tmp_path / "s", "raw", {"a": any_states(4, 4)})
    fields = {**json.loads(split(data)[0]["__metadata__"]["eaglet"]), "lengths": [length]}
    layout = _Layout(fields)
    header = layout.header(100 - sum(layout.sizes.values()))
    put(tmp_path / "s", header + bytes(100))
    with pytest.raises(ShardError, match="call for another"):
        Shard.open(tmp_path / "s")


def test_frames_that_lie_are_refused_under_right_checksums(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "s"
    data = store(path, "rebase-zstd", {"a": any_states(4, 4)})
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    for frame, message in (
        (compressor.compress(bytes(1 << 28)), "claims 268435456 bytes"),
        (compressor.compress(bytes(15)), "claims 15 bytes"),
        (compressor.compress(bytes(16)) + b"x", "does not decode"),
        (b"no frame", "does not decode"),
    ):
        block = frame + data[-16:]

        def edit(fields: dict[str, Any], tensors: dict[str, bytes], frame: bytes = frame, block: bytes = block) -> None:
            tensors["data"] = block
            tensors["ends"] = struct.pack("<Q", len(block))
            tensors["exponents"] = struct.pack("<I", len(frame))
            tensors["crc32"] = struct.pack("<I", zlib.crc32(block))

        put(path, reseal(data, edit))
        with Shard.open(path) as shard:
            for call in (shard.verify, lambda: shard.read("a", 0, 1)):
                with pytest.raises(ShardError, match=rf"sample 'a': block 0 is damaged: its zstd frame {message}"):
                    call()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        '{"__metadata__":{"eaglet":NaN}}',
        '{"__metadata__":{"eaglet":"NaN"}}',
        '{"__metadata__":{"eaglet":"{\\"format\\":NaN}"}}',
        '{"__metadata__":{"eaglet":"{\\"format\\":1e999}"}}',
        '{"__metadata__":{"eaglet":"' + "[" * 100_000 + '"}}',
        '{"__metadata__":{"eaglet":"\\"\\\\ud800\\""}}',
        '{"__metadata__":{"eaglet":"\\"\ud800\\""}}',
        '{"__metadata__":{"eaglet":"' + "9" * 5000 + '"}}',
        '{"__metadata__":["eaglet"]}',
        "\0" * 64,
    ],
)
def test_headers_of_no_shard_are_refused(tmp_path: Path, header: str) -> None:
    put(tmp_path / "s", seal(header, {"data": bytes(64)}))
    with pytest.raises(ShardError, match=r"has no header of a shard|not canonical|no fields"):
        Shard.open(tmp_path / "s")


def test_metadata_spelt_another_way_is_refused(small: tuple[Path, bytes]) -> None:
    path, data = small
    header, tensors = split(data)
    text = header["__metadata__"]["eaglet"]
    for other in (text.replace(":1,", ": 1,"), text.replace("é", "\\u00e9"), text[:-1] + ',"format":1}'):
        assert other != text
        header["__metadata__"]["eaglet"] = other
        put(path, seal(files.canonical_json(header), tensors))
        with pytest.raises(ShardError, match="not canonical"):
            Shard.open(path)


def test_a_header_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    for size in (MAX_HEADER + 8, (1 << 64) - 1):
        put(tmp_path / "s", struct.pack("<Q", size) + bytes(64))
        with pytest.raises(ShardError, match=f"claims a header of {size} bytes, above the limit"):
            Shard.open(tmp_path / "s")


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3.5,
    1 << 63,
    1 << 64,
    10**30,
    "",
    "U8",
    "F64",
    "raw",
    "rebase-zstd",
    [],
    [1],
    {},
]


def mutated(value: Any, draw: random.Random) -> Any:
    """`value` with one place in it changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        value = dict(value)
        key = draw.choice(list(value))
        act = draw.randrange(8)
        if act == 0:
            del value[key]
        elif act == 1:
            value[draw.choice(["x", "data", "eaglet", ""])] = draw.choice(VALUES)
        else:
            value[key] = mutated(value[key], draw)
        return value
    if isinstance(value, list) and value and draw.random() < 0.9:
        value = list(value)
        at = draw.randrange(len(value))
        act = draw.randrange(6)
        if act == 0:
            del value[at]
        elif act == 1:
            value.insert(at, draw.choice(VALUES))
        else:
            value[at] = mutated(value[at], draw)
        return value
    if type(value) is int and draw.random() < 0.7:
        return value + draw.choice([-8, -4, -1, 1, 4, 8, 1 << 32])
    return draw.choice(VALUES)


def test_mutated_headers_raise_nothing_else(small: tuple[Path, bytes]) -> None:
    path, data = small
    header, tensors = split(data)
    fields = json.loads(header["__metadata__"]["eaglet"])
    draw = random.Random(0)
    for turn in range(600):
        changed = copy.deepcopy(header)
        if turn % 2:
            changed = mutated(changed, draw)
        else:
            changed["__metadata__"]["eaglet"] = files.canonical_json(mutated(fields, draw))
        text = json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if text == files.canonical_json(header):
            continue
        put(path, seal(text, tensors))
        try:
            check_whole(path)
        except ShardError as error:
            assert "\n" not in str(error)
            continue
        # Only another text in a field that holds any text is a shard too.
        now = json.loads(changed["__metadata__"]["eaglet"])
        assert {name for name in fields if now[name] != fields[name]} <= {
            "layer",
            "model",
            "engine",
            "samples",
        }


def test_random_bytes_under_a_right_check_raise_nothing_else(small: tuple[Path, bytes]) -> None:
    path, data = small
    draw = random.Random(1)
    for _ in range(400):
        name = draw.choice(["ends", "exponents", "crc32", "data"])

        def edit(fields: dict[str, Any], tensors: dict[str, bytes], name: str = name) -> None:
            part = bytearray(tensors[name])
            part[draw.randrange(len(part))] ^= draw.randrange(1, 256)
            tensors[name] = bytes(part)
            if name == "data":  # with right crcs: the decoder meets the damage
                ends = [0, *np.frombuffer(tensors["ends"], "<u8").tolist()]
                crcs = [zlib.crc32(part[start:end]) for start, end in pairwise(ends)]
                tensors["crc32"] = np.array(crcs, "<u4").tobytes()

        put(path, reseal(data, edit))
        try:
            check_whole(path)
        except ShardError:
            continue
        assert name == "data"  # another value, properly signed


def test_pack_refuses_what_is_not_a_sample() -> None:
    for states in (
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(2, 4, dtype=torch.float16),
        torch.zeros(2, 4),
    ):
        with pytest.raises(ValueError, match="states must be"):
            pack(states, "raw")


def test_write_refuses_runs_that_are_not_the_headers(tmp_path: Path, small_blocks: None) -> None:
    run = pack(any_states(9, 4), "rebase-zstd")
    meta = meta_of("rebase-zstd", 4, "a")
    for other_meta, runs in (
        (meta, []),
        (meta, [run, run]),
        (meta, [pack(any_states(9, 4), "raw")]),
        (meta, [pack(any_states(9, 8), "rebase-zstd")]),
        (meta, [replace(run, length=8)]),
        (meta, [replace(run, length=10)]),
        (meta, [replace(run, crcs=run.crcs[:-1])]),
        (meta, [replace(run, blocks=[*run.blocks[:-1], bytes(run.blocks[-1]) + b"x"])]),
        (replace(meta, codec="raw"), [run]),
        (replace(meta, codec="zip"), [run]),
        (replace(meta, hidden_size=0), [run]),
        (replace(meta, samples=("a", "a")), [run, run]),
        (ShardMeta(**{**vars(meta), "layer": 14}), [run]),
        (replace(meta, model="\ud800"), [run]),
    ):
        with pytest.raises(ValueError):
            write(tmp_path / "s", other_meta, runs)
        assert list(tmp_path.iterdir()) == []


def test_a_header_that_would_be_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eaglet.shard.MAX_HEADER", 512)
    with pytest.raises(ShardError, match=r"1 samples are too many for a shard: lower extract.shard_tokens"):
        store(tmp_path / "s", "raw", {"a": any_states(1, 4)})


def page_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_pages_example_is_what_is_written(tmp_path: Path) -> None:
    inputs, tensors = (
        dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines()) for text in page_blocks("text")
    )
    fields = json.loads(page_blocks("json")[0])

    def states(text: str) -> torch.Tensor:
        bits = np.array([[int(word, 16) for word in row.split()] for row in text.split(" / ")], np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)

    assert states(inputs["a"]).tolist() == [[1, -2, 0.5, 0], [1.5, -4, 0.75, 0]]
    assert states(inputs["b"]).tolist() == [[3, 1, -1, 100]]
    meta = ShardMeta(
        **{name: fields[name] for name in ("layer", "hidden_size", "codec", "model", "engine")},
        samples=tuple(fields["samples"]),
    )
    runs = [pack(states(inputs[sample]), meta.codec) for sample in meta.samples]
    size, _ = write(tmp_path / "s", meta, runs)
    header, found = split((tmp_path / "s").read_bytes())
    assert header["__metadata__"]["eaglet"] + "\n" == page_blocks("json")[0]
    assert {name: part.hex(" ") for name, part in found.items()} == tensors
    assert list(found) == list(tensors)
    start = size - sum(map(len, found.values()))
    assert f"The file takes {size} bytes. Its header takes 8 + {start - 8} of them" in PAGE.read_text()
    frame = runs[0].blocks[0][: runs[0].exponents[0]]
    assert runs[0].base.tobytes().hex(" ") == inputs["base of a"]
    assert f"{zstandard.decompress(frame).hex(' ')} in the frame of a's one block" == inputs["exponents"]
    assert f"{runs[0].blocks[0][len(frame) :].hex(' ')} after the frame" == inputs["plane"]


def test_the_pages_reader_reads_a_shard(tmp_path: Path, small_blocks: None) -> None:
    source = page_blocks("python")[0]
    assert len([line for line in source.partition("def ")[2].splitlines()[1:] if line.strip()]) <= 12
    scope: dict[str, Any] = {}
    exec(source, scope)
    states = {"a": any_states(9, 4), "b": any_states(1, 4, 1), "c": any_states(8, 4, 2)}
    store(tmp_path / "s", "rebase-zstd", states)
    for sample, value in states.items():
        assert same(torch.from_numpy(scope["read"](tmp_path / "s", sample)).view(torch.bfloat16), value)
