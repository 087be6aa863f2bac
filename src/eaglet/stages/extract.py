"""extract: the hidden states of every row that has none yet, in one prefill pass, into shards."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from eaglet import audit, files, layers, rows, shard, store, target
from eaglet.codec import Run
from eaglet.dvc_cache import PastOutput
from eaglet.engines import Engine, open_engine
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, ROWS, STATES, STORE
from eaglet.progress import Progress, progress
from eaglet.rows import Row
from eaglet.store import Group, Store, Work

_WINDOW_TOKENS = 1 << 14  # computed between two rounds of shards written: what a crash can lose
EXPECTED_RATIO = 1.4  # raw over packed: a little below what real states give, so that the estimate is safe


def run(params: Params) -> None:
    """Write data/states and metrics/extract.json."""
    model = target.load(params.target)
    engine = open_engine(params.engine, model)
    wanted = rows.read(ROWS)
    chosen = layers.choose(params.extract.layers, model.fingerprint.num_layers)
    states = open_store(params, model, engine)
    groups = store.group_rows(wanted, params.extract.shard_tokens)
    with store.lock():
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


def compute(work: Sequence[Work], by_sample: dict[str, Row], engine: Engine, states: Store) -> tuple[int, int]:
    """Fill the store, window by window; a row that fails its checks is left out and named at the end.

    Returns:
        (rows × streams computed, bytes written).

    Raises:
        EagletError: rows whose states are wrong. All others are kept.
    """
    samples = {sample for item in work for sample in item.compute}
    tokens = sum(len(by_sample[sample].input_ids) for sample in samples)
    computed = written = 0
    failed: dict[str, list[str]] = {}
    with progress("extract", tokens, len(samples)) as shown:
        for window in windows(work, by_sample):
            runs = copied_runs(window)
            computed += prefill(window, by_sample, engine, states.kind.codec, runs, failed, shown)
            for item in window:
                there = tuple(part for part in item.group.samples if (item.stream, part[0]) in runs)
                if there:  # a group with a failed row is kept without it: found again at the next run
                    packed = [runs[item.stream, sample] for sample, _ in there]
                    size = states.write(item.stream, Group(there), packed)
                    written += size
                    shown.add(size=size)
    if failed:
        sample, reasons = next(iter(failed.items()))
        row = by_sample[sample]
        raise EagletError(
            f"{len(failed)} rows gave wrong hidden states and were not stored, all others were; "
            f"first: row {row.id} (sample {sample[:12]}): {'; '.join(reasons)}"
        )
    return computed, written


def windows(work: Sequence[Work], by_sample: dict[str, Row]) -> Iterator[list[Work]]:
    """Whole groups, as many as hold a window's tokens to compute."""
    window: list[Work] = []
    tokens = 0
    for _, items in groupby(work, key=lambda item: item.group):
        members = list(items)
        window += members
        tokens += sum(len(by_sample[sample].input_ids) for sample in {s for item in members for s in item.compute})
        if tokens >= _WINDOW_TOKENS:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def copied_runs(window: Sequence[Work]) -> dict[tuple[str, str], Run]:
    """Packed samples out of other shards, byte for byte."""
    runs: dict[tuple[str, str], Run] = {}
    for item in window:
        for sample, path in item.copies.items():
            with shard.Shard.open(path) as opened:
                runs[item.stream, sample] = opened.run(sample)
    return runs


def prefill(
    window: Sequence[Work],
    by_sample: dict[str, Row],
    engine: Engine,
    codec: str,
    runs: dict[tuple[str, str], Run],
    failed: dict[str, list[str]],
    shown: Progress,
) -> int:
    """Compute a window's missing samples, check and pack them into `runs`; the rows × streams computed."""
    needed: dict[str, list[str]] = {}
    for item in window:
        for sample in item.compute:
            needed.setdefault(sample, []).append(item.stream)
    computed = 0
    for streams in sorted({tuple(names) for names in needed.values()}):
        samples = [sample for sample, names in needed.items() if tuple(names) == streams]
        ids = [by_sample[sample].input_ids.tolist() for sample in samples]
        for index, states in engine.prefill(ids, streams):
            sample = samples[index]
            wrong = audit.faults(states, len(ids[index]))
            if wrong:
                failed[sample] = wrong
            else:
                runs |= {(name, sample): shard.pack(values, codec) for name, values in states.items()}
                computed += len(states)
            shown.add(rows=1, tokens=len(ids[index]))
    return computed


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
