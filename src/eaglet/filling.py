"""Fills the store: rows through the engine, checked, packed and written, in this process or in several.

One process packs about 1.5 GB of hidden states a second, however many threads it has: the interpreter's lock is what
they wait for. So an engine that can be shared is, and each process writes whole shards of its own.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eaglet import audit, hashes, shard
from eaglet.codec import Run
from eaglet.engines import Engine, Refusal
from eaglet.errors import EagletError
from eaglet.progress import progress
from eaglet.rows import Row
from eaglet.store import Group, Store, Work

_WRITERS = 8  # shards that a process writes at a time: each waits for its disk as long as it hashes
_POLL = 0.5  # seconds between two looks at the processes


@dataclass
class Job:
    """A group's missing shards, and the token ids of the samples that must be computed for them: int32 [T] each."""

    group: Group
    items: list[Work]
    ids: dict[str, npt.NDArray[np.int32]]


@dataclass
class Done:
    """What was finished: rows and their tokens, rows × streams computed, bytes and hashes of the shards written."""

    rows: int = 0
    tokens: int = 0
    computed: int = 0
    written: int = 0
    hashes: dict[Path, str] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: "Done") -> None:
        """Count what `other` counts."""
        self.rows += other.rows
        self.tokens += other.tokens
        self.computed += other.computed
        self.written += other.written
        self.hashes |= other.hashes
        self.failed |= other.failed


Report = Callable[[Done], None]


def compute(work: Sequence[Work], by_sample: dict[str, Row], engine: Engine, states: Store) -> Done:
    """Fill the store: one pass over the rows; a group is written as soon as all its samples are there.

    A row that fails its checks is left out, and named in what is returned. Whatever ends the pass, what was computed
    is written.

    Raises:
        EagletError: an engine that cannot go on.
    """
    jobs = [job(list(items), by_sample) for _, items in groupby(work, key=lambda item: item.group)]
    lengths = [len(ids) for job in jobs for ids in job.ids.values()]
    # All streams come from one pass: those that any row lacks are asked of all.
    needed = {item.stream for item in work if item.compute}
    streams = [name for name in states.streams if name in needed]
    total = Done()
    lock = threading.Lock()
    with progress("extract", sum(lengths), len(lengths), engine.status) as shown:

        def report(done: Done) -> None:
            with lock:
                total.add(done)
                shown.add(done.rows, done.tokens, done.written)

        try:
            if openers := engine.split(streams, sum(lengths), max(lengths)) if streams else []:
                fill_apart(jobs, streams, openers, states, report)
            else:
                fill(jobs, streams, engine, states, report)
        finally:
            hashes.remember(total.hashes)
    return total


def job(items: list[Work], by_sample: dict[str, Row]) -> Job:
    """The job of a group's missing shards, its samples in the group's order."""
    group = items[0].group
    missing = {sample for item in items for sample in item.compute}
    return Job(group, items, {s: by_sample[s].input_ids for s, _ in group.samples if s in missing})


class _Open:
    """A job on its way: the samples still missing, and those packed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.missing = set(job.ids)
        self.runs: dict[tuple[str, str], Run] = {}

    def streams(self, sample: str) -> list[str]:
        """Those that the sample lacks."""
        return [item.stream for item in self.job.items if sample in item.compute]


def fill(jobs: Iterable[Job], streams: Sequence[str], engine: Engine, states: Store, report: Report) -> None:
    """Do the jobs in this process; each is pulled when the engine has room for its rows."""
    opened: dict[int, _Open] = {}
    places: dict[int, tuple[int, str]] = {}  # row → job and sample

    def rows() -> Iterator[list[int]]:
        count = 0
        for number, one in enumerate(jobs):
            opened[number] = _Open(one)
            if not one.ids:  # all of it is copied
                writer.put(opened.pop(number))
            for sample, ids in one.ids.items():
                places[count] = number, sample
                count += 1
                yield ids.tolist()

    def check_and_pack(index: int, values: dict[str, torch.Tensor]) -> list[str] | dict[tuple[str, str], Run]:
        number, sample = places[index]
        wanted = {name: values[name] for name in opened[number].streams(sample)}
        return audit.faults(wanted, len(opened[number].job.ids[sample])) or {
            (name, sample): shard.pack(stream, states.kind.codec) for name, stream in wanted.items()
        }

    with Writer(states, report) as writer:
        try:
            if not streams:
                deque(rows(), maxlen=0)
                return
            for index, outcome in engine.prefill(rows(), streams, check_and_pack):
                number, sample = places.pop(index)
                one = opened[number]
                done = Done(rows=1, tokens=len(one.job.ids[sample]))
                if isinstance(outcome, dict):
                    one.runs |= outcome
                    done.computed = len(outcome)
                else:
                    done.failed[sample] = [outcome.reason] if isinstance(outcome, Refusal) else outcome
                report(done)
                one.missing.discard(sample)
                if not one.missing:
                    writer.put(opened.pop(number))
        finally:
            for one in opened.values():
                writer.put(one)


class Writer:
    """Writes jobs' shards beside the computing; a context that ends when all are on disk."""

    def __init__(self, states: Store, report: Report) -> None:
        self._states = states
        self._report = report
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="writer")
        self._running: deque[Future[None]] = deque()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while self._running:
                self._running.popleft().result()
        finally:
            self._pool.shutdown()

    def put(self, one: _Open) -> None:
        """Write what there is of a job: a group with a failed row is kept without it, and found at the next run."""
        for item in one.job.items:
            while len(self._running) > _WRITERS:
                self._running.popleft().result()
            runs = {sample: run for (stream, sample), run in one.runs.items() if stream == item.stream}
            self._running.append(self._pool.submit(self._write, item, runs))
        one.runs.clear()

    def _write(self, item: Work, runs: dict[str, Run]) -> None:
        for sample, path in item.copies.items():  # packed samples of other shards, byte for byte
            with shard.Shard.open(path) as other:
                runs[sample] = other.run(sample)
        there = tuple(part for part in item.group.samples if part[0] in runs)
        if there:
            group = Group(there)
            size, sha256 = self._states.write(item.stream, group, [runs[sample] for sample, _ in there])
            self._report(Done(written=size, hashes={self._states.path(item.stream, group): sha256}))


def fill_apart(
    jobs: Sequence[Job], streams: Sequence[str], openers: Sequence[Callable[[], Engine]], states: Store, report: Report
) -> None:
    """Do the jobs in a process for each of `openers`; each takes the next job when it has room.

    Raises:
        EagletError: one of them cannot go on; what all have computed is written.
    """
    # From a server that has no threads and has the imports done: quick to start, and nothing is forked half-way.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    inbox = context.Queue(2 * len(openers))
    outbox = context.Queue()
    workers = [
        context.Process(target=_work, args=(opener, list(streams), states, inbox, outbox), daemon=True)
        for opener in openers
    ]
    for worker in workers:
        worker.start()
    waiting: deque[Job | None] = deque([*jobs, *[None] * len(workers)])
    running = len(workers)
    try:
        while running:
            while waiting and not inbox.full():
                inbox.put(waiting.popleft())
            try:
                told = outbox.get(timeout=_POLL)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise EagletError("a process that packs was killed: out of memory?") from None
                continue
            if isinstance(told, Done):
                report(told)
            elif told is None:
                running -= 1
            else:
                raise told
    finally:
        _stop(workers, outbox, report)


def _stop(workers: Sequence[Any], outbox: Any, report: Report) -> None:
    """End processes that are not needed or cannot go on; each writes what it has, and tells of it."""
    for worker in workers:
        worker.terminate()
    while any(worker.is_alive() for worker in workers):
        with contextlib.suppress(queue.Empty):
            told = outbox.get(timeout=_POLL)
            if isinstance(told, Done):
                report(told)


def _leave(*_: object) -> None:
    raise SystemExit


def _work(opener: Callable[[], Engine], streams: list[str], states: Store, inbox: Any, outbox: Any) -> None:
    """A process's share: jobs out of `inbox` until None; tells of what is done, then None, or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)
    parent = os.getppid()

    def jobs() -> Iterator[Job]:
        while os.getppid() == parent:
            try:
                one = inbox.get(timeout=_POLL)
            except queue.Empty:
                continue
            if one is None:
                return
            yield one

    engine = opener()
    try:
        fill(jobs(), streams, engine, states, outbox.put)
    except EagletError as error:
        outbox.put(error)
    except Exception as error:
        outbox.put(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
    else:
        outbox.put(None)
    finally:
        engine.close()
