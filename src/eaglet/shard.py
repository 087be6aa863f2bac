"""A shard: one layer's hidden states for a group of samples, in one safetensors file (docs/format.md).

The bytes are a pure function of the header fields and the states. Nothing that is read is trusted: the header
must be, byte for byte, the one that its own fields and the file's size call for, and every stored byte stands
under a crc32 that is compared before the byte is used.
"""

import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from eaglet import codec, files
from eaglet.codec import Bits, Run
from eaglet.errors import EagletError

FORMAT = 1
MAX_HEADER = 64 << 20  # bytes

Counts = npt.NDArray[np.int64]

_REMEDY = "run `eaglet verify`, then `dvc repro extract`"
_TEXTS = ("codec", "layer", "model", "engine")
_FIELDS = {"format", "hidden_size", "lengths", "rows_per_block", "samples", *_TEXTS}


class ShardError(EagletError):
    """A shard that is not what it should be: one line with the file, the sample and the remedy."""


@dataclass(frozen=True)
class ShardMeta:
    """What a shard's header says, but for the lengths, which are the runs'.

    Attributes:
        layer: the stream, such as "L14" or "final".
        hidden_size: channels (H).
        codec: one of `codec.CODECS`.
        model: the target's fingerprint.
        engine: what computed the states, with its numerics.
        samples: the samples' ids, in the order of their runs.
    """

    layer: str
    hidden_size: int
    codec: str
    model: str
    engine: str
    samples: tuple[str, ...]


def pack(states: torch.Tensor, codec_name: str) -> Run:
    """Encode one sample's states.

    Args:
        states: bfloat16 [T, H], on any device; T and H at least 1.
        codec_name: one of `codec.CODECS`.

    Raises:
        ValueError: another shape, dtype or codec.
    """
    if states.dtype != torch.bfloat16:
        raise ValueError(f"states must be bfloat16, not {states.dtype}")
    # A view, also of columns of something wider: a copy by torch would start its threads in each of the caller's.
    return codec.encode(_bits(states.detach().cpu()), codec_name)


def write(path: Path, meta: ShardMeta, runs: Sequence[Run]) -> tuple[int, str]:
    """Write a shard, read-only, complete or not at all. The blocks are streamed, never gathered.

    Args:
        path: the file; replaced if it is there.
        meta: the header's fields.
        runs: one for each of `meta.samples`, from `pack` or `Shard.run`.

    Returns:
        The file's size in bytes and its sha256 in hex.

    Raises:
        ValueError: the runs are not of this hidden size and codec, or the fields are not fit for a header.
        ShardError: too many samples for one header.
    """
    fields = {
        "format": FORMAT,
        "codec": meta.codec,
        "layer": meta.layer,
        "hidden_size": meta.hidden_size,
        "model": meta.model,
        "engine": meta.engine,
        "samples": list(meta.samples),
        "lengths": [run.length for run in runs],
        "rows_per_block": codec.rows_per_block(meta.hidden_size),
    }
    if problem := _fault(fields):
        raise ValueError(f"{path}: {problem}")
    layout = _Layout(fields)
    for sample, run in zip(meta.samples, runs, strict=True):
        blocks = -(-run.length // layout.step)
        found = (len(run.blocks), len(run.exponents), len(run.crcs), run.base.size)
        if found != (blocks, blocks, blocks, layout.channels):
            raise ValueError(f"{path}: sample {sample!r}: its run is not of {meta.codec}, {meta.hidden_size} channels")
    ends = np.cumsum([len(block) for run in runs for block in run.blocks], dtype="<u8")
    exponents = np.array([count for run in runs for count in run.exponents], "<u4")
    if fault := layout.fault(ends, exponents, int(ends[-1])):
        raise ValueError(f"{path}: {fault}")
    index = {
        "ends": ends.tobytes(),
        "crc32": np.array([crc for run in runs for crc in run.crcs], "<u4").tobytes(),
        "exponents": exponents.tobytes(),
        "base": b"".join(run.base.tobytes() for run in runs),
    }
    header = layout.header(int(ends[-1]))
    if len(header) > 8 + MAX_HEADER:
        raise ShardError(f"{path}: {len(meta.samples)} samples are too many for a shard: lower extract.shard_tokens")
    check = zlib.crc32(b"".join((header, *index.values())))
    index["check"] = struct.pack("<I", check)
    state = hashlib.sha256()
    size = 0
    with files.atomic(path, mode=0o444) as file:
        for part in (
            header,
            *(index[name] for name in layout.sizes),
            *(block for run in runs for block in run.blocks),
        ):
            file.write(part)
            state.update(part)
            size += len(part)
    return size, state.hexdigest()


class Shard:
    """A shard that is open for reading; close it, or use it as a context manager. Threads may share it.

    Attributes:
        path: the file.
        samples: the samples' ids, in the file's order.
        lengths: tokens of each sample, in the same order.
        layer, hidden_size, codec, model, engine: as in `ShardMeta`.
        raw_bytes: what the states take as plain bfloat16.
        stored_bytes: what the file takes.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; see `open`."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ShardError(f"{path} is missing: run `dvc repro extract`, or `dvc pull`") from None
        except OSError as error:
            raise self._error(f"cannot be opened ({error.strerror})") from None
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a shard and check its header, its index and every offset in it.

        Raises:
            ShardError: it is missing, of another format, cut short or damaged.
        """
        return cls(path)

    def close(self) -> None:
        """Close the file; more than once is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def __contains__(self, sample: object) -> bool:
        return sample in self._places

    @property
    def meta(self) -> ShardMeta:
        """The header's fields, as `write` takes them."""
        return ShardMeta(self.layer, self.hidden_size, self.codec, self.model, self.engine, self.samples)

    def read(self, sample: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A sample's states, or some of its rows; only their blocks are read, and those are verified.

        Args:
            sample: its id.
            start: the first row.
            stop: the row after the last one; None for the sample's length.

        Returns:
            bfloat16 [stop - start, H], on the CPU.

        Raises:
            ShardError: the shard has no such sample or rows, or a block is damaged.
        """
        place = self._place(sample)
        length = self.lengths[place]
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise self._error(f"has no rows {start} to {stop}: it has {length}", sample)
        states = torch.empty(stop - start, self.hidden_size, dtype=torch.bfloat16)
        self._decode(place, start, _bits(states))
        return states

    def run(self, sample: str) -> Run:
        """A sample as it is stored, each block compared with its crc32: to be written into another shard.

        Raises:
            ShardError: the shard has no such sample, or a block is damaged.
        """
        place = self._place(sample)
        blocks = self._blocks_of(place)
        return Run(
            base=self._base[place],
            blocks=[self._block(place, block) for block in blocks],
            exponents=self._exponents[blocks.start : blocks.stop].tolist(),
            crcs=self._crcs[blocks.start : blocks.stop].tolist(),
            length=self.lengths[place],
        )

    def verify(self) -> None:
        """Read and decode every block.

        Raises:
            ShardError: one is damaged.
        """
        step = self._layout.step
        out = np.empty((min(step, max(self.lengths)), self.hidden_size), np.uint16)
        for place, length in enumerate(self.lengths):
            for start in range(0, length, step):
                self._decode(place, start, out[: min(step, length - start)])

    def _load(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._error("is not a file")
        self.stored_bytes = status.st_size
        (header_size,) = struct.unpack("<Q", self._pread(8, 0))
        if header_size > MAX_HEADER:
            raise self._error(f"claims a header of {header_size} bytes, above the limit of {MAX_HEADER}")
        header = self._pread(8 + header_size, 0)
        fields = self._fields(header[8:])
        layout = self._layout = _Layout(fields)
        data_start = len(header) + sum(layout.sizes.values())
        data_bytes = self.stored_bytes - data_start
        # Compared before anything is made of these sizes: the file holds at least a byte for each value.
        if data_bytes < layout.least or header != layout.header(data_bytes):
            raise self._error(
                f"is cut short, too long or has a damaged header: at {self.stored_bytes} bytes, its fields "
                "call for another"
            )
        index = self._pread(data_start - len(header), len(header))
        parts = {}
        at = 0
        for name, size in layout.sizes.items():
            parts[name] = index[at : at + size]
            at += size
        check = zlib.crc32(b"".join((header, *(part for name, part in parts.items() if name != "check"))))
        if struct.pack("<I", check) != parts["check"]:
            raise self._error("has a damaged header or index: its check differs")
        self.samples: tuple[str, ...] = tuple(fields["samples"])
        self.lengths: tuple[int, ...] = tuple(fields["lengths"])
        self.layer: str = fields["layer"]
        self.hidden_size: int = fields["hidden_size"]
        self.codec: str = fields["codec"]
        self.model: str = fields["model"]
        self.engine: str = fields["engine"]
        self.raw_bytes = 2 * self.hidden_size * sum(self.lengths)
        self._places = {sample: place for place, sample in enumerate(self.samples)}
        ends = np.frombuffer(parts["ends"], "<u8")
        self._crcs = np.frombuffer(parts["crc32"], "<u4")
        self._exponents = np.frombuffer(parts["exponents"], "<u4")
        self._base = np.frombuffer(parts["base"], np.uint8).reshape(len(self.samples), -1)
        if fault := layout.fault(ends, self._exponents, data_bytes):
            raise self._error(fault)
        self._bounds = np.concatenate(([0], ends.astype(np.int64))) + data_start

    def _fields(self, text: bytes) -> dict[str, Any]:
        """The fields in the header, each of its type and range."""
        try:
            inner = json.loads(text)["__metadata__"]["eaglet"]
            fields = json.loads(inner)
            canonical = files.canonical_json(fields).encode() == inner.encode()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._error(f"has no header of a shard ({type(error).__name__})") from None
        if not canonical:
            raise self._error("has a header that is not canonical JSON")
        if problem := _fault(fields):
            raise self._error(problem)
        return fields  # type: ignore[no-any-return]

    def _place(self, sample: str) -> int:
        place = self._places.get(sample)
        if place is None:
            raise ShardError(f"{self.path}: sample {sample!r} is not in this shard: run `dvc repro extract`")
        return place

    def _blocks_of(self, place: int) -> range:
        return range(int(self._layout.first[place]), int(self._layout.first[place + 1]))

    def _decode(self, place: int, start: int, out: Bits) -> None:
        """Decode rows of a sample, from `start` on, into `out` (uint16 [n, H])."""
        step = self._layout.step
        first_block = self._blocks_of(place).start
        done = 0
        while done < len(out):
            within, skip = divmod(start + done, step)
            block = first_block + within
            rows = min(step, self.lengths[place] - within * step)
            count = min(rows - skip, len(out) - done)
            data = self._block(place, block)
            try:
                codec.decode_block(
                    data,
                    int(self._exponents[block]),
                    self._base[place],
                    rows,
                    out[done : done + count],
                    first=skip,
                )
            except ValueError as error:
                raise self._error(f"block {within} is damaged: {error}", self.samples[place]) from None
            done += count

    def _block(self, place: int, block: int) -> bytes:
        """A block's bytes, compared with its crc32."""
        start, end = self._bounds[block : block + 2].tolist()
        data = self._pread(end - start, start, self.samples[place])
        if zlib.crc32(data) != self._crcs[block]:
            within = block - self._blocks_of(place).start
            raise self._error(f"block {within} is damaged: its crc32 differs", self.samples[place])
        return data

    def _pread(self, size: int, offset: int, sample: str | None = None) -> bytes:
        """Exactly these bytes. Not a memory map: a file that shrinks meanwhile must not kill the process."""
        if self._fd < 0:
            raise ValueError(f"{self.path}: read after close")
        try:
            parts = list(_pread(self._fd, size, offset))
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})", sample) from None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(data) != size:
            raise self._error(f"is cut short: {size} bytes at {offset} are not there", sample)
        return data

    def _error(self, problem: str, sample: str | None = None) -> ShardError:
        where = f"{self.path}" if sample is None else f"{self.path}: sample {sample!r}"
        return ShardError(f"{where}: {problem}: {_REMEDY}")


class _Layout:
    """Where everything lies in a shard of these fields, given the bytes of its blocks."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.step: int = fields["rows_per_block"]
        self.hidden: int = fields["hidden_size"]
        self._raw = fields["codec"] == codec.RAW
        self.channels = 0 if self._raw else self.hidden  # of a sample's base
        self.blocks = sum(-(-length // self.step) for length in fields["lengths"])
        samples = len(fields["lengths"])
        # In the file's order: falling alignment, the header being a multiple of 8 bytes.
        self._tensors: dict[str, tuple[str, list[int]]] = {
            "ends": ("U64", [self.blocks]),
            "check": ("U32", [1]),
            "crc32": ("U32", [self.blocks]),
            "exponents": ("U32", [self.blocks]),
            "base": ("U8", [samples, self.channels]),
        }
        widths = {"U64": 8, "U32": 4, "U8": 1}
        self.sizes = {
            name: widths[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
            for name, (dtype, shape) in self._tensors.items()
        }
        # Bytes of blocks, at least.
        self.least = sum(fields["lengths"]) * self.hidden * (2 if self._raw else 1)

    @cached_property
    def first(self) -> Counts:
        """Each sample's first block, and the number of blocks: int64 [samples + 1]."""
        lengths = np.array(self._fields["lengths"], np.int64)
        return np.concatenate(([0], np.cumsum(-(-lengths // self.step))))

    def header(self, data_bytes: int) -> bytes:
        """The length word and the JSON header of the file."""
        entries: dict[str, Any] = {"__metadata__": {"eaglet": files.canonical_json(self._fields)}}
        at = 0
        for name, (dtype, shape) in (*self._tensors.items(), ("data", ("U8", [data_bytes]))):
            size = self.sizes.get(name, data_bytes)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = files.canonical_json(entries).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def fault(self, ends: npt.NDArray[np.uint64], exponents: npt.NDArray[np.uint32], data_bytes: int) -> str | None:
        """What is wrong with the blocks' offsets (uint64 and uint32, [blocks] each), if anything is."""
        rows = np.full(self.blocks, self.step, np.int64)
        lengths = np.array(self._fields["lengths"], np.int64)
        rows[self.first[1:] - 1] = lengths - (np.diff(self.first) - 1) * self.step
        zstd = exponents.astype(np.int64)
        expected = rows * self.hidden * (2 if self._raw else 1) + zstd
        wrong = (zstd != 0) if self._raw else (zstd == 0)
        wrong |= ends != np.cumsum(expected).astype(np.uint64)
        if wrong.any():
            block = int(np.argmax(wrong))
            place = int(np.searchsorted(self.first, block, side="right")) - 1
            return (
                f"sample {self._fields['samples'][place]!r}: block {block - int(self.first[place])} "
                f"does not end where its {rows[block]} rows do"
            )
        if int(ends[-1]) != data_bytes:
            return f"the blocks take {int(ends[-1])} bytes of {data_bytes}"
        return None


def _fault(fields: Any) -> str | None:
    """What is wrong with a header's fields, if anything is."""
    if not isinstance(fields, dict) or "format" not in fields:
        return "has no fields of a shard in its header"
    if type(fields["format"]) is not int or fields["format"] != FORMAT:
        return f"is of format {short(fields['format'])}, and this eaglet reads {FORMAT}"
    if set(fields) != _FIELDS:
        return f"has missing or unknown header fields: {short(set(fields) ^ _FIELDS)}"
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            return f"has a header field {name!r} that is not a text"
    if fields["codec"] not in codec.CODECS:
        return f"has an unknown codec {short(fields['codec'])}: one of {', '.join(codec.CODECS)}"
    samples, lengths, hidden = fields["samples"], fields["lengths"], fields["hidden_size"]
    if not _is_count(hidden):
        return f"has a hidden size of {short(hidden)}"
    if type(fields["rows_per_block"]) is not int or fields["rows_per_block"] != codec.rows_per_block(hidden):
        return f"has blocks of {short(fields['rows_per_block'])} rows instead of {codec.rows_per_block(hidden)}"
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, str) for sample in samples):
        return "has no list of sample ids"
    if len(set(samples)) != len(samples):
        return "names a sample twice"
    if not isinstance(lengths, list) or len(lengths) != len(samples) or not all(map(_is_count, lengths)):
        return "has no length of at least 1 for each sample"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _bits(states: torch.Tensor) -> Bits:
    """The bit patterns of a bfloat16 CPU tensor, in the same memory."""
    return states.view(torch.int16).numpy().view(np.uint16)


def _pread(fd: int, size: int, offset: int) -> Iterator[bytes]:
    """The bytes from `offset` on, fewer than `size` if the file ends; one read call returns at most 2 GiB."""
    while True:
        part = os.pread(fd, size, offset)
        yield part
        size -= len(part)
        offset += len(part)
        if not size or not part:
            return
