"""The spool, seen from where it is read: a folder in which the capture plugin leaves one file a request."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from eaglet.errors import EagletError
from eaglet.files import human_bytes
from eaglet.layers import FINAL, FINAL_KIND, stream

if TYPE_CHECKING:
    import torch

PREFIX = "eaglet-"  # of the ids of requests that the plugin captures
_PATIENCE = 30.0  # seconds that a file may come after its answer: a writer's queue is a second long at most


class SpoolError(Exception):
    """A request's file is not there, and will not be."""


@dataclass(frozen=True)
class Captured:
    """One request's file.

    Attributes:
        aux: [T, n·H], the streams side by side, in the server's dtype.
        final: [T, H], after the final norm.
        metadata: what the plugin says of them.
    """

    aux: "torch.Tensor"
    final: "torch.Tensor"
    metadata: dict[str, str]

    @property
    def layers(self) -> list[int]:
        """The layers whose outputs `aux` holds: the server counts streams by the layer that they enter."""
        return [index - 1 for index in json.loads(self.metadata["streams"])]

    def streams(self, names: Sequence[str]) -> dict[str, "torch.Tensor"]:
        """{stream: [T, H]} of those named."""
        width = self.final.shape[1]
        found = {stream(layer): self.aux[:, k * width : (k + 1) * width] for k, layer in enumerate(self.layers)}
        return {name: self.final if name == FINAL else found[name] for name in names}

    def fault(self, ids: Sequence[int]) -> str | None:
        """Why this is not what a request of these ids must give, or None."""
        if self.metadata["ids"] != ids_hash(ids):
            return "the server computed other ids than those it was sent"
        if self.metadata["final"] != FINAL_KIND:
            return f"the final state is {self.metadata['final']}, not {FINAL_KIND}"
        if self.aux.shape != (len(ids), len(self.layers) * self.final.shape[1]):
            return f"the server gave {list(self.aux.shape)} for {len(ids)} tokens and layers {self.layers}"
        return None


def ids_hash(ids: Sequence[int]) -> str:
    """As the plugin names token ids: sha256 of them as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


class Spool:
    """A spool's folder, and how much of it is in use. Threads may share it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Bound the rows on their way to `max_bytes`, and to what the folder's file system has free.

        Raises:
            EagletError: there is no such folder.
        """
        if not folder.is_dir():
            raise EagletError(f"params.yaml: engine.spool {folder} is not a folder: make it, or name another")
        self.folder = folder
        self.max_bytes = min(max_bytes, int(shutil.disk_usage(folder).free * 0.9))
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold `size` bytes of the bound while a row is on its way; waits for room.

        Raises:
            SpoolError: it can never fit.
        """
        if size > self.max_bytes:
            raise SpoolError(
                f"it takes {human_bytes(size)} of the spool, which may hold {human_bytes(self.max_bytes)}: "
                "raise engine.spool_gib, or name a folder with more room in engine.spool"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._used + size <= self.max_bytes)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()

    def take(self, rid: str) -> Captured:
        """A request's file, once its answer has come. The tensors map it: `discard` when they are done with.

        Raises:
            SpoolError: the plugin says why there is none, or there is none.
        """
        path, note = self._path(rid), self.folder / f"{rid}.error"
        deadline = time.monotonic() + _PATIENCE
        while not path.is_file():
            if note.is_file():
                raise SpoolError(note.read_text(encoding="utf-8"))
            if not self.folder.is_dir():
                raise SpoolError(f"the spool {self.folder} is gone")
            if time.monotonic() > deadline:
                raise SpoolError(f"the server answered, and left no file in {self.folder}")
            time.sleep(0.002)
        try:
            return read(path)
        except (OSError, SafetensorError) as error:
            raise SpoolError(f"{path} cannot be read ({error})") from None

    def discard(self, rid: str) -> None:
        """Free what a request holds. The server takes this for the sign that the row is safe."""
        for path in (self._path(rid), self.folder / f"{rid}.error"):
            path.unlink(missing_ok=True)

    def _path(self, rid: str) -> Path:
        return self.folder / f"{rid}.safetensors"

    def status(self) -> str:
        """How full it is, for the progress line."""
        stored = 0
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                stored += path.stat().st_size
        return f"spool {stored / self.max_bytes:.0%}"


def read(path: Path) -> Captured:
    """A file of the spool, mapped into memory."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, Any] = file.metadata()
        return Captured(file.get_tensor("aux"), file.get_tensor("final"), metadata)


@contextlib.contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder for a server that is started here, gone afterwards; those of killed runs are removed.

    Raises:
        EagletError: `parent` cannot be written to.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob("run-*"):
            if not Path(f"/proc/{other.name.split('-')[1]}").exists():
                shutil.rmtree(other, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"run-{os.getpid()}-"))
    except OSError as error:
        raise EagletError(f"params.yaml: engine.spool {parent}: {error.strerror}: name a folder on tmpfs") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
