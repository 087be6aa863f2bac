"""The spool: a folder of files, one a request, each in the safetensors format and complete once it has its name."""

import json
import logging
import os
import queue
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_THREADS = 4
_PENDING_BYTES = 1 << 30  # of host memory that waits for a writer; then the scheduler waits
_PATIENCE = 60.0  # seconds that a full spool is waited for: below SGLang's own watchdog of 300


class SpoolError(Exception):
    """A request's states could not be written."""


@dataclass
class Request:
    """One request's file on its way.

    Attributes:
        rid: the request's id, and the file's name.
        length: its tokens (rows).
        size: of the file, in bytes.
        starts: where each tensor's first byte lies in the file.
        seen: rows handed over so far.
        left: bytes not written yet.
    """

    rid: str
    length: int
    path: Path
    fd: int
    size: int
    starts: dict[str, int]
    left: int
    seen: int = 0
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Spool:
    """Writes rows of requests with a few threads, within a bound of bytes."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Use `folder`, which must exist: whoever reads the states makes it."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._open_bytes = 0
        self._pending = 0
        self._free = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[Request, int, torch.Tensor]] = queue.SimpleQueue()
        for _ in range(_THREADS):
            threading.Thread(target=self._work, daemon=True, name="eaglet-spool").start()

    def start(
        self, rid: str, length: int, widths: Mapping[str, int], dtype: torch.dtype, metadata: Mapping[str, str]
    ) -> Request:
        """Begin a request's file: tensors of [length, width] each. Waits while the spool is full.

        Raises:
            SpoolError: the spool is gone, stays full, or can never hold it.
        """
        header, starts, size = _header(length, widths, dtype, metadata)
        self._wait_for_space(size)
        path = self._folder / f".{rid}.tmp"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.pwrite(fd, header, 0)
        except OSError as error:
            raise SpoolError(f"cannot write to the spool {self._folder}: {error.strerror}") from None
        with self._free:
            self._open_bytes += size
        return Request(rid, length, path, fd, size, starts, size - len(header))

    def write(self, request: Request, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hand over the next rows of each tensor, on the CPU. The file gets its name when all are written.

        The tensors must not change afterwards. Waits while the writers have too much to do.
        """
        rows = len(next(iter(tensors.values())))
        first, request.seen = request.seen, request.seen + rows
        if request.seen > request.length:
            self.fail(request, f"{request.seen} rows came for {request.length} tokens")
            return
        for name, values in tensors.items():
            flat = values.contiguous()
            size = flat.numel() * flat.element_size()
            with self._free:
                self._free.wait_for(lambda size=size: not self._pending or self._pending + size <= _PENDING_BYTES)
                self._pending += size
            self._queue.put((request, request.starts[name] + first * size // max(rows, 1), flat))

    def fail(self, request: Request, why: str) -> None:
        """Give a request up, and say why where its reader looks."""
        self.drop(request)
        self.report(request.rid, why)

    def drop(self, request: Request) -> None:
        """Forget a request's rows (it was retracted and will be prefilled again, or has failed)."""
        with request.lock:
            if not request.closed:
                self._close(request)
                request.path.unlink(missing_ok=True)

    def report(self, rid: str, why: str) -> None:
        """Leave a note for the reader of a request that has no file."""
        logger.error("eaglet-capture: request %s: %s", rid, why)
        try:
            scratch = self._folder / f".{rid}.note"
            scratch.write_text(why, encoding="utf-8")
            scratch.replace(self._folder / f"{rid}.error")
        except OSError:  # the spool itself is gone: the reader sees that
            pass

    def _wait_for_space(self, size: int) -> None:
        if size > self._max_bytes:
            raise SpoolError(f"it needs {size:,} bytes, and the spool may hold {self._max_bytes:,}")
        deadline = time.monotonic() + _PATIENCE
        while self._stored() + self._open_bytes + size > self._max_bytes:
            if time.monotonic() > deadline:
                raise SpoolError(f"the spool {self._folder} stayed full ({self._max_bytes:,} bytes): is it read?")
            time.sleep(0.02)

    def _stored(self) -> int:
        """Bytes of complete files that the reader has not taken yet."""
        total = 0
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        try:
                            total += entry.stat().st_size
                        except FileNotFoundError:  # taken meanwhile
                            continue
        except OSError as error:
            raise SpoolError(f"the spool {self._folder} is gone: {error.strerror}") from None
        return total

    def _work(self) -> None:
        while True:
            request, offset, values = self._queue.get()
            data = memoryview(values.view(torch.uint8).numpy()).cast("B")
            try:
                self._put(request, data, offset)
            except OSError as error:
                self.fail(request, f"cannot write to the spool {self._folder}: {error.strerror}")
            finally:
                with self._free:
                    self._pending -= len(data)
                    self._free.notify()

    def _put(self, request: Request, data: memoryview, offset: int) -> None:
        with request.lock:  # held while writing: a descriptor that is closed meanwhile may be another file's
            if request.closed:
                return
            done = 0
            while done < len(data):
                done += os.pwrite(request.fd, data[done:], offset + done)
            request.left -= len(data)
            if not request.left:
                self._close(request)
                request.path.replace(self._folder / f"{request.rid}.safetensors")

    def _close(self, request: Request) -> None:
        request.closed = True
        os.close(request.fd)
        with self._free:
            self._open_bytes -= request.size


def _header(
    length: int, widths: Mapping[str, int], dtype: torch.dtype, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The header of a safetensors file, each tensor's first byte, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, at = {}, 0
    for name, width in widths.items():
        size = length * width * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": [length, width], "data_offsets": [at, at + size]}
        starts[name] = at
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + at
