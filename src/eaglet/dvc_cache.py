"""Outputs of the last run, after DVC has removed them from the workspace: from its cache or its remote.

DVC deletes a stage's outputs before it runs the stage, and a fresh clone has no store. dvc.lock still names the
old outputs, so that what they hold need not be computed again.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from eaglet.files import file_md5, sync_folder
from eaglet.paths import DVC_LOCK


class PastOutput:
    """A file or folder as dvc.lock records it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recorded = path in recorded_outputs()
        self._filesystem: Any = None
        self._warned = False

    def _open(self) -> Any:
        if self._filesystem is None:
            from dvc.api import DVCFileSystem

            self._filesystem = DVCFileSystem(os.curdir)
        return self._filesystem

    def fetch(self, name: str, to: Path) -> bool:
        """Bring one file of the output (`name` "" is the output itself) to `to`, by hard link where it can.

        Returns:
            False where neither cache nor remote has it; nothing is left half-written.
        """
        if not self._recorded:
            return False
        source = (self.path / name).as_posix()
        to.parent.mkdir(parents=True, exist_ok=True)
        scratch = to.with_name(f".{to.name}.{os.getpid()}.tmp")
        scratch.unlink(missing_ok=True)
        try:
            self._take(source, scratch)
            scratch.replace(to)
        except Exception as error:
            # Any remote (S3, SSH, HDFS, …) brings its own errors; a file that cannot be had is computed again.
            if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _REMOTE_PACKAGES:
                raise
            if not self._warned:
                self._warned = True
                reason = " ".join(str(error).split())[:200]
                print(f"cannot fetch {source} of the last run ({reason}): computing it again", file=sys.stderr)
            return False
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(to.parent)
        return True

    def _take(self, source: str, to: Path) -> None:
        """A hard link to the cached file, or a copy where the cache lies on another device or lacks it."""
        cached = _cached_object(self._open(), self._open().info(source))
        if cached is not None:
            try:
                os.link(cached, to)
                return
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
        self._open().get_file(source, str(to))
        with to.open("rb") as file:
            os.fsync(file.fileno())
        to.chmod(0o444)


_REMOTE_PACKAGES = (
    "dvc",
    "dvc_data",
    "dvc_objects",
    "dvc_s3",
    "botocore",
    "s3fs",
    "aiobotocore",
    "aiohttp",
    "fsspec",
)


def _cached_object(filesystem: Any, info: dict[str, Any]) -> Path | None:
    """The file in DVC's local cache, if it is there."""
    md5 = (info.get("dvc_info") or {}).get("md5") or info.get("md5")
    return _existing(filesystem.repo, md5) if md5 else None


def _existing(repo: Any, md5: str) -> Path | None:
    path = Path(repo.cache.local.oid_to_path(md5))
    return path if path.is_file() else None


def cache_path(md5: str) -> Path | None:
    """The file of DVC's local cache that holds an object, if it is there."""
    from dvc.repo import Repo

    with Repo(os.curdir) as repo:
        return _existing(repo, md5)


def folder_md5(folder: Path) -> str:
    """What DVC calls a folder with these files: the md5 of its listing, and ".dir"."""
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    tree = Tree()  # type: ignore[no-untyped-call]
    for path in folder.rglob("*"):
        if path.is_file():
            tree.add(path.relative_to(folder).parts, None, HashInfo("md5", file_md5(path)))
    tree.digest()
    return str(tree.hash_info.value)


def recorded_stages() -> dict[str, Any]:
    """dvc.lock's stages, by name; none before the first run."""
    if not DVC_LOCK.is_file():
        return {}
    lock = yaml.safe_load(DVC_LOCK.read_text()) or {}
    return lock.get("stages") or {}


def recorded_outputs() -> dict[Path, str]:
    """{path: md5} of every output that dvc.lock names; a folder's md5 ends in ".dir"."""
    return {
        Path(out["path"]): out["md5"]
        for stage in recorded_stages().values()
        for out in stage.get("outs", [])
        if "md5" in out
    }
