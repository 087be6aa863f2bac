"""sha256 of large files, remembered by path, size, time and inode, so that nothing is hashed twice."""

import json
from collections.abc import Sequence
from pathlib import Path

from eaglet import files
from eaglet.paths import STORE

_MEMORY = STORE / "hashes.json"


def sha256(paths: Sequence[Path]) -> dict[Path, str]:
    """sha256 of each file; a file is read only where it is not the one last seen under its name.

    A fast answer for files that nobody tampers with; `eaglet verify` reads every byte.
    """
    memory = json.loads(_MEMORY.read_text()) if _MEMORY.is_file() else {}
    found, changed = {}, False
    for path in paths:
        name, seen = str(path.resolve()), _identity(path)
        known = memory.get(name)
        if known is None or known[0] != seen:
            memory[name] = known = [seen, files.file_sha256(path)]
            changed = True
        found[path] = known[1]
    if changed:
        files.write_json(_MEMORY, memory)
    return found


def changed(paths: Sequence[Path]) -> list[Path]:
    """Those of the files that are not the ones last seen under their names."""
    memory = json.loads(_MEMORY.read_text()) if _MEMORY.is_file() else {}
    return [path for path in paths if memory.get(str(path.resolve()), [None])[0] != _identity(path)]


def remember(hashes: dict[Path, str]) -> None:
    """Record hashes that were computed while the files were written."""
    if hashes:
        memory = json.loads(_MEMORY.read_text()) if _MEMORY.is_file() else {}
        memory |= {str(path.resolve()): [_identity(path), value] for path, value in hashes.items()}
        files.write_json(_MEMORY, memory)


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
