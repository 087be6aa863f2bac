"""extract: the hidden states of every row that has none yet, in one prefill pass, into shards."""

import shutil
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from eaglet import audit, files, layers, rows, shard, store, target
from eaglet.codec import Run
from eaglet.dvc_cache import PastOutput, recorded_stages
from eaglet.engines import Engine, Refusal, open_engine
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, ROWS, STATES, STORE
from eaglet.progress import Progress, progress
from eaglet.rows import Row
from eaglet.store import Group, Store, Work

_WRITERS = 8  # shards written at a time: each waits for its disk as long as it hashes
EXPECTED_RATIO = 1.4  # raw over packed: a little below what real states give, so that the estimate is safe


def run(params: Params) -> None:
    """Write data/states and metrics/extract.json."""
    model = target.load(params.target)
    wanted = rows.read(ROWS)
    chosen = layers.choose(params.extract.layers, model.fingerprint.num_layers)
    groups = store.group_rows(wanted, params.extract.shard_tokens)
    with store.lock(), closing(open_engine(params.engine, model)) as engine:
        states = open_store(params, model, engine)
        if states.kind.engine != engine.numerics:
            print(f"extract: the states of {states.kind.engine} passed their audit and are kept")
        for path in states.drop_damaged(groups):
            print(f"extract: {path} was damaged and is computed again", file=sys.stderr)
        states.adopt(PastOutput(STATES), groups)
        work = states.work(groups)
        check_disk(work, wanted, states)
        computed, written = compute(work, {row.sample: row for row in wanted}, engine, states)
        manifest = states.publish(groups, chosen)
    write_metrics(manifest, wanted, model.fingerprint.hidden_size)
    total = len(wanted) * len(states.streams)
    print(
        f"extract: {computed} of {total} rows × streams computed, {total - computed} reused, "
        f"{files.human_bytes(written)} written → {STATES}"
    )


def open_store(params: Params, model: target.Target, engine: Engine) -> Store:
    """The store of these states: target, arithmetic, codec and streams."""
    kind = store.Kind(
        model=model.fingerprint.states,
        engine=engine.numerics,
        codec=params.extract.codec,
        hidden_size=model.fingerprint.hidden_size,
    )
    if params.extract.reuse_across_engines:
        kind = replace(kind, engine=audited_engine(kind))
    chosen = layers.choose(params.extract.layers, model.fingerprint.num_layers)
    return Store(kind, layers.streams(chosen))


def audited_engine(kind: store.Kind) -> str:
    """The engine under whose key this run's states are kept: that of the last run, if its audit proved its states.

    Raises:
        EagletError: the last run's states came from another engine, and no audit of them against Transformers passed.
    """
    past = store.past_manifest(PastOutput(STATES))
    if past is None:
        return kind.engine
    old = store.Kind.of(past)
    if replace(old, engine=kind.engine) != kind or old.engine.split("/")[1] != kind.engine.split("/")[1]:
        return kind.engine  # other states altogether: nothing of them is reused
    if old.engine != kind.engine and not audit_passed():
        raise EagletError(
            f"extract.reuse_across_engines: the last run's states are {old.engine}'s, and no audit of them with "
            "reference rows has passed: set engine.name back and run `dvc repro audit`, or set this key to false"
        )
    return old.engine


def audit_passed() -> bool:
    """Whether an audit of the states that dvc.lock names has passed, with rows compared: DVC records no failures."""
    stages = recorded_stages()
    states = [out["md5"] for out in stages.get("extract", {}).get("outs", []) if out["path"] == STATES.as_posix()]
    audit = stages.get("audit", {})
    audited = [dep["md5"] for dep in audit.get("deps", []) if dep["path"] == STATES.as_posix()]
    bounds = audit.get("params", {}).get("params.yaml", {}).get("audit", {})
    return bool(states) and audited == states and bounds.get("reference_rows", 0) > 0


def raw_bytes(work: Sequence[Work], states: Store) -> int:
    """bfloat16 bytes of all shards to be written, copies included."""
    return sum(item.group.tokens for item in work) * states.kind.hidden_size * 2


def check_disk(work: Sequence[Work], wanted: Sequence[Row], states: Store) -> None:
    """Refuse a run that cannot fit, before it starts."""
    need, free = raw_bytes(work, states) / EXPECTED_RATIO, shutil.disk_usage(STORE).free
    if need > free:
        raise EagletError(
            f"{len(wanted)} rows need about {files.human_bytes(need)} more in {STORE}, and {files.human_bytes(free)} "
            "are free: free some, or lower prompts.files.limit in params.yaml"
        )


@dataclass
class Job:
    """A group's missing shards, and the samples that must be computed for them first."""

    group: Group
    items: list[Work]
    missing: set[str]
    runs: dict[tuple[str, str], Run] = field(default_factory=dict)


def compute(work: Sequence[Work], by_sample: dict[str, Row], engine: Engine, states: Store) -> tuple[int, int]:
    """Fill the store: one pass over the rows; a group is written as soon as all its samples are there.

    A row that fails its checks is left out and named at the end. Whatever ends the pass, what was computed is written.

    Returns:
        (rows × streams computed, bytes written).

    Raises:
        EagletError: rows whose states are wrong, or an engine that cannot go on. All others are kept.
    """
    jobs = [
        Job(group, members, {sample for item in members for sample in item.compute})
        for group, members in ((group, list(items)) for group, items in groupby(work, key=lambda item: item.group))
    ]
    of_sample = {sample: job for job in jobs for sample in job.missing}
    # In the jobs' order, so that few of them are open at a time; as all streams come from one pass, all are asked for.
    samples = [sample for job in jobs for sample, _ in job.group.samples if sample in job.missing]
    needed = {sample: [i.stream for i in of_sample[sample].items if sample in i.compute] for sample in samples}
    streams = [name for name in states.streams if any(name in names for names in needed.values())]
    computed = 0
    failed: dict[str, list[str]] = {}

    def check_and_pack(index: int, values: dict[str, torch.Tensor]) -> list[str] | dict[tuple[str, str], Run]:
        sample = samples[index]
        wanted = {name: values[name] for name in needed[sample]}
        return audit.faults(wanted, len(by_sample[sample].input_ids)) or {
            (name, sample): shard.pack(stream, states.kind.codec) for name, stream in wanted.items()
        }

    tokens = sum(len(by_sample[sample].input_ids) for sample in samples)
    with progress("extract", tokens, len(samples), engine.status) as shown, Writer(states, shown) as writer:
        try:
            for job in jobs:
                if not job.missing:
                    writer.put(job)
            rows_ids = (by_sample[sample].input_ids.tolist() for sample in samples)
            for index, outcome in engine.prefill(rows_ids, streams, check_and_pack) if samples else ():
                sample = samples[index]
                job = of_sample[sample]
                job.missing.discard(sample)
                if isinstance(outcome, dict):
                    job.runs |= outcome
                    computed += len(outcome)
                else:
                    failed[sample] = [outcome.reason] if isinstance(outcome, Refusal) else outcome
                shown.add(rows=1, tokens=len(by_sample[sample].input_ids))
                if not job.missing:
                    writer.put(job)
        finally:
            for job in jobs:
                if job.missing:
                    writer.put(job)
    if failed:
        sample, reasons = next(iter(failed.items()))
        row = by_sample[sample]
        raise EagletError(
            f"{len(failed)} rows gave no hidden states or wrong ones and were not stored, all others were; "
            f"first: row {row.id} (sample {sample[:12]}, {len(row.input_ids)} tokens): {'; '.join(reasons)}"
        )
    return computed, writer.written


class Writer:
    """Writes jobs' shards beside the computing; a context that ends when all are on disk."""

    def __init__(self, states: Store, shown: Progress) -> None:
        self._states = states
        self._shown = shown
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="writer")
        self._running: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self.written = 0

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._running:
                self._running.popleft().result()
        finally:
            self._pool.shutdown()
            self._states.remember()

    def put(self, job: Job) -> None:
        """Write what there is of a job: a group with a failed row is kept without it, and found at the next run."""
        for item in job.items:
            while len(self._running) > _WRITERS:
                self._running.popleft().result()
            runs = {sample: run for (stream, sample), run in job.runs.items() if stream == item.stream}
            self._running.append(self._pool.submit(self._write, item, runs))
        job.runs.clear()

    def _write(self, item: Work, runs: dict[str, Run]) -> None:
        for sample, path in item.copies.items():  # packed samples of other shards, byte for byte
            with shard.Shard.open(path) as opened:
                runs[sample] = opened.run(sample)
        there = tuple(part for part in item.group.samples if part[0] in runs)
        if there:
            size = self._states.write(item.stream, Group(there), [runs[sample] for sample, _ in there])
            with self._lock:
                self.written += size
                self._shown.add(size=size)


def write_metrics(manifest: dict[str, Any], wanted: Sequence[Row], hidden_size: int) -> None:
    """Sizes, per stream and in all."""
    tokens = sum(len(row.input_ids) for row in wanted)
    raw = tokens * hidden_size * 2
    sizes = {name: sum(entry["files"][name]["bytes"] for entry in manifest["shards"]) for name in manifest["streams"]}
    numbers = {
        "rows": len(wanted),
        "tokens": tokens,
        "streams": len(sizes),
        "shards": len(manifest["shards"]) * len(sizes),
        "raw_bytes": raw * len(sizes),
        "bytes": sum(sizes.values()),
        "ratio": round(raw * len(sizes) / sum(sizes.values()), 4),
        "ratio_by_stream": {name: round(raw / size, 4) for name, size in sizes.items()},
    }
    files.write_json(METRICS / "extract.json", numbers)
