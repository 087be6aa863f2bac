"""verify: read every byte that was stored and compare its checksum."""

from collections.abc import Iterator
from pathlib import Path

from eaglet import files
from eaglet.dvc_cache import cache_path, folder_md5, recorded_outputs
from eaglet.errors import EagletError
from eaglet.paths import STATES, STORE
from eaglet.progress import progress
from eaglet.shard import Shard, ShardError
from eaglet.store import MANIFEST, read_manifest


def run() -> None:
    """Check data/ against dvc.lock and the manifest; name all that is bad.

    Raises:
        EagletError: something is bad or missing, or there is nothing to check.
    """
    bad = [*bad_outputs(), *bad_shards()]
    for line in bad:
        print(line)
    if bad:
        raise EagletError(f"{len(bad)} files are bad: delete every path named above, then run `dvc repro`")
    print("verify: every checksum holds")


def bad_outputs() -> Iterator[str]:
    """Single files that dvc.lock records by md5."""
    recorded = recorded_outputs()
    if not recorded:
        raise EagletError("dvc.lock names no outputs: run `dvc repro` first")
    for path, md5 in recorded.items():
        if md5.endswith(".dir"):
            if path != STATES:
                yield from _bad_folder(path, md5)
        elif not path.is_file():
            yield f"{path}: missing (run `dvc checkout` or `dvc pull`)"
        elif files.file_md5(path) != md5:
            yield f"{path}: not the bytes that dvc.lock names{_cached(md5)}"


def _bad_folder(path: Path, md5: str) -> Iterator[str]:
    listing = cache_path(md5)
    if listing is None:  # one that git keeps, or one whose cache is not here
        if not path.is_dir():
            yield f"{path}: missing (run `dvc checkout` or `dvc pull`)"
        elif folder_md5(path) != md5:
            yield f"{path}: not the bytes that dvc.lock names"
        return
    for entry in files.read_json(listing, "train"):
        member = path / entry["relpath"]
        if not member.is_file():
            yield f"{member}: missing (run `dvc checkout` or `dvc pull`)"
        elif files.file_md5(member) != entry["md5"]:
            yield f"{member}: not the bytes that dvc.lock names{_cached(entry['md5'])}"


def bad_shards() -> Iterator[str]:
    """Every shard: its sha256 in the manifest, its own checksums, and what it says it holds."""
    if not (STATES / MANIFEST).is_file():
        yield f"{STATES / MANIFEST}: missing (run `dvc checkout` or `dvc pull`)"
        return
    manifest = read_manifest()
    entries = manifest["shards"]
    tokens = sum(sum(entry["lengths"]) for entry in entries)
    with progress("verify", tokens, sum(len(entry["samples"]) for entry in entries)) as shown:
        for entry in entries:
            for stream, file in entry["files"].items():
                path = STATES / stream / file["name"]
                if not path.is_file():
                    yield f"{path}: missing (run `dvc checkout` or `dvc pull`)"
                    continue
                if files.file_sha256(path) != file["sha256"]:
                    yield f"{path}: not the bytes that the manifest names{_cached_like(path)}"
                    continue
                try:
                    with Shard.open(path) as opened:
                        opened.verify()
                        told = (opened.layer, list(opened.samples), list(opened.lengths))
                except ShardError as error:
                    yield f"{error}{_cached_like(path)}"
                    continue
                if told != (stream, entry["samples"], entry["lengths"]):
                    yield f"{path}: holds other samples or another stream than the manifest says"
                shown.add(size=file["bytes"])
            shown.add(rows=len(entry["samples"]), tokens=sum(entry["lengths"]))


def _cached(md5: str) -> str:
    """Where DVC's cache holds the same damage, which it would bring back."""
    path = cache_path(md5)
    return f"\n  also {path}" if path is not None and files.file_md5(path) != md5 else ""


def _cached_like(path: Path) -> str:
    """The store's and the cache's names of the same damaged inode."""
    inode = path.stat().st_ino
    roots = (STORE / "states", Path(".dvc/cache/files"))
    twins = [str(twin) for root in roots for twin in root.rglob("*") if twin.stat().st_ino == inode]
    return "".join(f"\n  also {twin}" for twin in twins)
