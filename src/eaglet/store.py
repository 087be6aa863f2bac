"""The hidden states on disk: a local store by key, and the view of it that DVC owns.

`.store/states/<stream key>/<shard name>` holds every shard ever computed here. `data/states/<stream>/` is rebuilt
at each run as hard links of the shards that the rows need, with a manifest that is written last. A name says what
determines a shard's content, so a name that is there is a result that is there (docs/design.md).
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglet import files, hashes, shard
from eaglet.codec import Run
from eaglet.dvc_cache import PastOutput
from eaglet.errors import EagletError
from eaglet.layers import FINAL_KIND
from eaglet.paths import STATES, STORE
from eaglet.rows import Row
from eaglet.shard import Shard

FORMAT = 1
MANIFEST = "manifest.json"
_CAP = 4  # a group holds at most this many times the mean tokens


@dataclass(frozen=True)
class Group:
    """Samples that share a shard in each stream: (sample, tokens) in the rows' order."""

    samples: tuple[tuple[str, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(length for _, length in self.samples)


@dataclass(frozen=True)
class Kind:
    """What all shards of a run share: the rest of a shard's key is its stream and its samples."""

    model: str
    engine: str
    codec: str
    hidden_size: int

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> "Kind":
        """What the shards of a manifest share."""
        return cls(manifest["model"], manifest["engine"], manifest["codec"], manifest["hidden_size"])

    def stream_key(self, stream: str) -> str:
        """What a stream's states follow from, besides token ids."""
        return files.digest([FORMAT, self.model, self.engine, self.codec, stream, FINAL_KIND])[:32]


@dataclass(frozen=True)
class Work:
    """A shard that is not in the store: what can be copied from other shards, and what must be computed."""

    group: Group
    stream: str
    copies: dict[str, Path]
    compute: list[str]


def group_rows(rows: Sequence[Row], shard_tokens: int) -> list[Group]:
    """Cut the rows into groups by content.

    A group ends behind a sample whose own hash says so, with a probability that gives `shard_tokens` a group on
    average, or at a cap. So a row put in or taken out changes its own group and not those behind it.
    """
    groups: list[Group] = []
    samples: list[tuple[str, int]] = []
    tokens = 0
    for row in rows:
        sample, length = row.sample, len(row.input_ids)
        if samples and tokens + length > _CAP * shard_tokens:
            groups.append(Group(tuple(samples)))
            samples, tokens = [], 0
        samples.append((sample, length))
        tokens += length
        if int(sample[:8], 16) < length / shard_tokens * 2**32:
            groups.append(Group(tuple(samples)))
            samples, tokens = [], 0
    if samples:
        groups.append(Group(tuple(samples)))
    return groups


class Store:
    """Shards of one kind, by stream and group."""

    def __init__(self, kind: Kind, streams: Sequence[str]) -> None:
        self.kind = kind
        self.streams = list(streams)
        self._folders = {stream: STORE / "states" / kind.stream_key(stream) for stream in streams}

    def name(self, stream: str, group: Group) -> str:
        """A shard's file name: the hash of all that determines it."""
        return (
            files.digest([self.kind.stream_key(stream), [sample for sample, _ in group.samples]])[:32] + ".safetensors"
        )

    def path(self, stream: str, group: Group) -> Path:
        """Where a shard lies in the store."""
        return self._folders[stream] / self.name(stream, group)

    def work(self, groups: Sequence[Group]) -> list[Work]:
        """Every shard that is missing, group by group, with the samples that other shards already hold."""
        found = []
        for stream in self.streams:
            missing = [group for group in groups if not self.path(stream, group).is_file()]
            elsewhere = self._find({sample for group in missing for sample, _ in group.samples}, stream)
            for group in missing:
                names = [sample for sample, _ in group.samples]
                copies = {sample: elsewhere[sample] for sample in names if sample in elsewhere}
                found.append(Work(group, stream, copies, [sample for sample in names if sample not in copies]))
        order = {group: place for place, group in enumerate(groups)}
        return sorted(found, key=lambda work: order[work.group])

    def _find(self, wanted: set[str], stream: str) -> dict[str, Path]:
        """Which shard of a stream holds a sample, for those wanted; a damaged shard is passed over."""
        found: dict[str, Path] = {}
        if not wanted or not self._folders[stream].is_dir():
            return found
        for path in sorted(self._folders[stream].glob("*.safetensors")):
            try:
                with Shard.open(path) as opened:
                    found |= {sample: path for sample in opened.samples if sample in wanted}
            except shard.ShardError:
                continue
        broken = set(damaged(sorted(set(found.values()))))
        return {sample: path for sample, path in found.items() if path not in broken}

    def write(self, stream: str, group: Group, runs: Sequence[Run]) -> tuple[int, str]:
        """Write one shard; its size in bytes and its sha256."""
        return shard.write(
            self.path(stream, group),
            shard.ShardMeta(
                codec=self.kind.codec,
                layer=stream,
                hidden_size=self.kind.hidden_size,
                model=self.kind.model,
                engine=self.kind.engine,
                samples=tuple(sample for sample, _ in group.samples),
            ),
            runs,
        )

    def drop_damaged(self, groups: Sequence[Group]) -> list[Path]:
        """Remove shards that are not what was written, so that they are computed again and never published."""
        paths = [self.path(stream, group) for group in groups for stream in self.streams]
        broken = damaged([path for path in paths if path.is_file()])
        for path in broken:
            path.unlink()
        return broken

    def adopt(self, past: PastOutput, groups: Sequence[Group]) -> int:
        """Bring what the last run's output holds and the store lacks, from DVC's cache or remote.

        Returns:
            The number of shards brought.
        """
        missing = [(s, g) for g in groups for s in self.streams if not self.path(s, g).is_file()]
        manifest = past_manifest(past) if missing else None
        if manifest is None:
            return 0
        old = Kind.of(manifest)
        wanted = {
            stream: {sample for s, g in missing if s == stream for sample, _ in g.samples} for stream in self.streams
        }
        brought = 0
        for entry in manifest["shards"]:
            for stream, file in entry["files"].items():
                if stream not in wanted or old.stream_key(stream) != self.kind.stream_key(stream):
                    continue
                to = self._folders[stream] / file["name"]
                if to.is_file() or wanted[stream].isdisjoint(entry["samples"]):
                    continue
                if past.fetch(f"{stream}/{file['name']}", to):
                    if files.file_sha256(to) == file["sha256"] and not damaged([to]):
                        brought += 1
                    else:  # a damaged copy is no copy: computed again
                        to.unlink()
        return brought

    def publish(self, groups: Sequence[Group], layers: Sequence[int]) -> dict[str, Any]:
        """Rebuild data/states from the store and write its manifest, last.

        Returns:
            The manifest.

        Raises:
            EagletError: the store and data/ lie on two devices, so that no hard link can join them.
        """
        paths = [self.path(stream, group) for group in groups for stream in self.streams]
        sha256 = hashes.sha256(paths)
        shutil.rmtree(STATES, ignore_errors=True)
        entries = []
        for group in groups:
            entry: dict[str, Any] = {
                "samples": [sample for sample, _ in group.samples],
                "lengths": [length for _, length in group.samples],
                "files": {},
            }
            for stream in self.streams:
                path = self.path(stream, group)
                _link(path, STATES / stream / path.name)
                entry["files"][stream] = {
                    "name": path.name,
                    "bytes": path.stat().st_size,
                    "sha256": sha256[path],
                }
            entries.append(entry)
        manifest = {
            "format": FORMAT,
            "model": self.kind.model,
            "engine": self.kind.engine,
            "codec": self.kind.codec,
            "hidden_size": self.kind.hidden_size,
            "layers": list(layers),
            "final": FINAL_KIND,
            "streams": self.streams,
            "shards": entries,
        }
        files.write_json(STATES / MANIFEST, manifest)
        return manifest


def past_manifest(past: PastOutput) -> dict[str, Any] | None:
    """The manifest of the last run's output, if DVC's cache or remote has it."""
    scratch = STORE / f"past-{MANIFEST}"
    if not past.fetch(MANIFEST, scratch):
        return None
    manifest: dict[str, Any] = files.read_json(scratch, "extract")
    scratch.unlink()
    return manifest


def damaged(paths: Sequence[Path]) -> list[Path]:
    """Shards that are broken: every block is read of those that are not the files last seen under their names."""
    found = []
    for path in hashes.changed(paths):
        try:
            with Shard.open(path) as opened:
                opened.verify()
        except shard.ShardError:
            found.append(path)
    whole = set(paths) - set(found)
    hashes.sha256(sorted(whole))
    return found


def _link(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except OSError as error:
        raise EagletError(
            f"cannot hard-link {path} to {to} ({error.strerror}): {STORE}, data/ and DVC's cache must lie on one device"
        ) from None


@contextmanager
def lock() -> Iterator[None]:
    """Hold the store alone: DVC's own lock is gone when DVC is killed and its stage runs on.

    Raises:
        EagletError: another process holds it.
    """
    STORE.mkdir(exist_ok=True)
    with (STORE / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EagletError(f"another eaglet process is writing to {STORE}: wait for it, or stop it") from None
        yield


def read_manifest() -> dict[str, Any]:
    """The manifest of data/states.

    Raises:
        EagletError: missing, or of a format this version does not know.
    """
    manifest: dict[str, Any] = files.read_json(STATES / MANIFEST, "extract")
    if manifest.get("format") != FORMAT:
        raise EagletError(f"{STATES / MANIFEST} has format {manifest.get('format')!r}; this eaglet reads {FORMAT}")
    return manifest


class States:
    """Hidden states by sample, out of data/states."""

    def __init__(self) -> None:
        self.manifest = read_manifest()
        self.streams: list[str] = self.manifest["streams"]
        self.layers: list[int] = self.manifest["layers"]
        self._entries = {sample: entry for entry in self.manifest["shards"] for sample in entry["samples"]}

    def __contains__(self, sample: str) -> bool:
        return sample in self._entries

    def samples(self) -> list[str]:
        """All samples, in order."""
        return list(self._entries)

    def path(self, sample: str, stream: str) -> Path:
        """The shard that holds a sample's stream."""
        name: str = self._entries[sample]["files"][stream]["name"]
        return STATES / stream / name

    def read(self, sample: str, streams: Sequence[str] | None = None) -> dict[str, Any]:
        """{stream: bfloat16 [T, H]} of one sample, every byte of it checked.

        Raises:
            EagletError: the sample is not there, or a shard is damaged.
        """
        if sample not in self._entries:
            raise EagletError(f"{STATES} holds no sample {sample}: run `dvc repro extract`")
        found = {}
        for stream in streams or self.streams:
            with Shard.open(self.path(sample, stream)) as opened:
                found[stream] = opened.read(sample)
        return found
