"""extract: the hidden states of every row that has none yet, in one prefill pass, into shards."""

import shutil
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from eaglet import audit, files, layers, rows, shard, store, target
from eaglet.codec import Run
from eaglet.dvc_cache import PastOutput
from eaglet.engines import Engine, Refusal, open_engine
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, ROWS, STATES, STORE
from eaglet.progress import Progress, progress
from eaglet.rows import Row
from eaglet.store import Group, Store, Work

_WRITERS = 4  # shards written at a time: a core each for their sha256
EXPECTED_RATIO = 1.4  # raw over packed: a little below what real states give, so that the estimate is safe


def run(params: Params) -> None:
    """Write data/states and metrics/extract.json."""
    model = target.load(params.target)
    wanted = rows.read(ROWS)
    chosen = layers.choose(params.extract.layers, model.fingerprint.num_layers)
    groups = store.group_rows(wanted, params.extract.shard_tokens)
    with store.lock(), closing(open_engine(params.engine, model)) as engine:
        states = open_store(params, model, engine)
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
    chosen = layers.choose(params.extract.layers, model.fingerprint.num_layers)
    return Store(kind, layers.streams(chosen))


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
        while len(self._running) > _WRITERS:
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._write, job))

    def _write(self, job: Job) -> None:
        runs = copied_runs(job.items) | job.runs
        for item in job.items:
            there = tuple(part for part in job.group.samples if (item.stream, part[0]) in runs)
            if there:
                size = self._states.write(item.stream, Group(there), [runs[item.stream, sample] for sample, _ in there])
                with self._lock:
                    self.written += size
                    self._shown.add(size=size)
        job.runs.clear()


def copied_runs(items: Sequence[Work]) -> dict[tuple[str, str], Run]:
    """Packed samples out of other shards, byte for byte."""
    runs: dict[tuple[str, str], Run] = {}
    for item in items:
        for sample, path in item.copies.items():
            with shard.Shard.open(path) as opened:
                runs[item.stream, sample] = opened.run(sample)
    return runs


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
