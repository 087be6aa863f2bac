"""Files written whole or not at all, and the hashes that name them."""

import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from eaglet.errors import EagletError

_CHUNK = 8 << 20


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A binary file that appears under its name complete, or not at all.

    Temp file in the same folder, fsync, chmod, rename, fsync of the folder: a crash at any point leaves the old
    file or the new one. Never writes through an existing inode, which may be a hard link into the DVC cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: keys sorted, no spaces, UTF-8 kept. NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write `value` for people and Git to read: indented, key order kept, newline at the end."""
    with atomic(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path, made_by: str) -> Any:
    """Read a file that stage `made_by` writes.

    Raises:
        EagletError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EagletError(f"{path} is missing: run `dvc repro {made_by}`, or `dvc pull`") from None
    except ValueError as error:
        raise EagletError(f"{path} is not JSON ({error}): run `dvc repro --force {made_by}`") from None


def write_csv(path: Path, header: Sequence[str], records: Iterable[Sequence[Any]]) -> None:
    """Write a table for DVC to plot."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(records)
    with atomic(path) as file:
        file.write(text.getvalue().encode())


def write_jsonl(path: Path, records: Iterable[Any]) -> None:
    """One canonical JSON value a line."""
    with atomic(path) as file:
        for record in records:
            file.write((canonical_json(record) + "\n").encode())


def digest(value: Any) -> str:
    """sha256, in hex, of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256, in hex, of a file's bytes."""
    return _file_hash(path, "sha256")


def file_md5(path: Path) -> str:
    """md5, in hex, of a file's bytes, as DVC names files."""
    return _file_hash(path, "md5")


def _file_hash(path: Path, name: str) -> str:
    state = hashlib.new(name, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def human_bytes(count: float) -> str:
    """`count` bytes with a binary unit, as in "12.3 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
