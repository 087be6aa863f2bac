"""extract: the hidden states of every row that has none yet, in one prefill pass, into shards."""

import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from eaglet import files, filling, layers, rows, store, target
from eaglet.dvc_cache import PastOutput, recorded_stages
from eaglet.engines import Engine, open_engine
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, ROWS, STATES, STORE
from eaglet.rows import Row
from eaglet.store import Store, Work

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
        by_sample = {row.sample: row for row in wanted}
        done = filling.compute(work, by_sample, engine, states)
        if done.failed:
            raise EagletError(failure(done.failed, by_sample))
        manifest = states.publish(groups, chosen)
    write_metrics(manifest, wanted, model.fingerprint.hidden_size)
    total = len(wanted) * len(states.streams)
    print(
        f"extract: {done.computed} of {total} rows × streams computed, {total - done.computed} reused, "
        f"{files.human_bytes(done.written)} written → {STATES}"
    )


def failure(failed: dict[str, list[str]], by_sample: dict[str, Row]) -> str:
    """One line about rows that have no states."""
    sample, reasons = next(iter(failed.items()))
    row = by_sample[sample]
    return (
        f"{len(failed)} rows gave no hidden states or wrong ones and were not stored, all others were; "
        f"first: row {row.id} (sample {sample[:12]}, {len(row.input_ids)} tokens): {'; '.join(reasons)}"
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
