"""plan: what `dvc repro` would compute and what it would reuse, before anything runs."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaglet import files, prompts, responses, store, target
from eaglet.conversation import CannotMask, context_ids, given_turns
from eaglet.dvc_cache import recorded_stages
from eaglet.engines import open_engine
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, MODEL, RESPONSES, STATES
from eaglet.rows import Row
from eaglet.stages import extract, generate, tokenize
from eaglet.store import Store


def run(params: Params) -> None:
    """Print the plan, by stage, row and layer, and its bytes against the free disk."""
    model = find_target(params)
    engine = open_engine(params.engine, model)
    changed = changed_stages()
    print(f"{'stage':10} {'runs':5} what")
    print(f"{'model':10} {_mark('model', changed)} {model.fingerprint.name}")
    rows, missing, longest = plan_generate(params, model, changed)
    print(f"{'tokenize':10} {_mark('tokenize', changed)} {len(rows)} rows known now")
    states = extract.open_store(params, model, engine)
    need = plan_extract(rows, states, params, changed)
    for stage in ("audit", "vocab", "train", "evaluate"):
        why = changed.get(stage)
        print(f"{stage:10} {_mark(stage, changed)} {why or 'up to date'}")
    unanswered = longest * len(states.streams) * states.kind.hidden_size * 2
    print(
        f"\ndisk: {need:,} bytes raw ({files.human_bytes(need / expected_ratio())} packed) of states to write",
        end="",
    )
    if missing:
        print(f", and at most {unanswered:,} raw for the {missing} turns that are not answered yet", end="")
    print(f"; {files.human_bytes(shutil.disk_usage(Path()).free)} free")
    packed = (need + unanswered) / expected_ratio()
    if packed > shutil.disk_usage(Path()).free:
        raise EagletError(f"the run needs about {files.human_bytes(packed)} and does not fit: free some disk first")


def find_target(params: Params) -> target.Target:
    """The target, even before the model stage ran; a hub model is not downloaded for a plan."""
    if MODEL.is_file():
        return target.load(params.target)
    if params.target.model != target.PACKAGED and not Path(params.target.model).expanduser().is_dir():
        raise EagletError("the plan needs the target's tokenizer: run `dvc repro model` first, it downloads the target")
    folder = target.resolve(params.target)
    return target.Target(folder, target.fingerprint(folder), params.target.dtype)


def changed_stages() -> dict[str, str]:
    """{stage: why} for each stage that DVC would run, or run if those before it change their outputs."""
    from dvc.repo import Repo

    with Repo() as repo:
        status = repo.status()
        order = {stage.name: [dep.def_path for dep in stage.deps] for stage in repo.index.stages}
        makes = {out.def_path: stage.name for stage in repo.index.stages for out in stage.outs}
    known = recorded_stages()
    changed = {name: _reason(reasons) if name in known else "has not run here yet" for name, reasons in status.items()}
    grew = True
    while grew:
        grew = False
        for name, deps in order.items():
            before = [makes[dep] for dep in deps if makes.get(dep) in changed]
            if name not in changed and before:
                changed[name] = f"if the outcome of {', '.join(dict.fromkeys(before))} changes"
                grew = True
    return changed


def _reason(reasons: Sequence[Any]) -> str:
    parts = []
    for reason in reasons:
        if isinstance(reason, str):
            parts.append(reason)
            continue
        for kind, items in reason.items():
            names = items if isinstance(items, dict) else {items: ""}
            for name, state in names.items():
                what = ", ".join(state) if isinstance(state, dict) else str(state)
                parts.append(f"{kind.removeprefix('changed ')}: {name} {what}".strip())
    return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


def _mark(stage: str, changed: dict[str, str]) -> str:
    if stage not in changed:
        return "no   "
    return "maybe" if changed[stage].startswith("if ") else "yes  "


def plan_generate(params: Params, model: target.Target, changed: dict[str, str]) -> tuple[list[Row], int, int]:
    """Look up every turn among the answers.

    Returns:
        Rows whose answers are all known, turns not answered yet, and the most tokens these can come to.
    """
    read = prompts.read(params.prompts)
    answers = responses.Answers(responses.request_key(model.fingerprint, model.dtype, params.generate))
    if RESPONSES.is_file():
        answers.learn(answers.unknown(responses.read(RESPONSES)))
    records, reused, missing, longest, refused = [], 0, 0, 0, 0
    for conversation in read.conversations:
        dialogue = generate.start(conversation, params.generate.regenerate)
        try:
            if dialogue.refused is None and not params.generate.regenerate:
                dialogue.turns = given_turns(model.tokenizer, conversation, model.end_ids)
            while dialogue.waiting and dialogue.refused is None:
                dialogue.messages = [*dialogue.messages, dialogue.waiting[0]]
                context = context_ids(model.tokenizer, dialogue.messages, conversation.tools)
                known = answers.get(context)
                if known is None:
                    missing += len(dialogue.waiting)
                    rest = context_ids(model.tokenizer, [*dialogue.messages, *dialogue.waiting[1:]], conversation.tools)
                    longest += len(rest) + len(dialogue.waiting) * params.generate.max_new_tokens
                    break
                dialogue.waiting.pop(0)
                reused += 1
                generate.take(dialogue, context, known, model)
        except CannotMask as error:
            dialogue.refused = str(error)
        refused += dialogue.refused is not None
        if dialogue.refused is None and not dialogue.waiting:
            records.append(generate.record(dialogue, answers.request, greedy=True))
    rows, _ = tokenize.collect(records, params.tokenize.max_length)
    line = f"{missing} turns to answer, {reused} reused"
    line += f"; {read.duplicates} duplicates, {refused} refused" if read.duplicates or refused else ""
    print(f"{'generate':10} {_mark('generate', changed)} {line}")
    return rows, missing, longest


def plan_extract(rows: Sequence[Row], states: Store, params: Params, changed: dict[str, str]) -> int:
    """Print, by stream, rows to compute and reuse.

    Returns:
        bfloat16 bytes of all states to compute and store.
    """
    groups = store.group_rows(rows, params.extract.shard_tokens)
    lengths = {row.sample: len(row.input_ids) for row in rows}
    work = states.work(groups)
    past = past_samples(states)
    print(f"{'extract':10} {_mark('extract', changed)} {changed.get('extract', 'up to date')}")
    total = 0
    for stream in states.streams:
        compute = {s for item in work if item.stream == stream for s in item.compute} - past[stream]
        tokens = sum(lengths[sample] for sample in compute)
        size = tokens * states.kind.hidden_size * 2
        total += size
        print(
            f"{'':10}       {stream}: {len(compute)} rows to compute ({tokens:,} tokens, "
            f"{files.human_bytes(size)} raw), {len(rows) - len(compute)} reused"
        )
    return total


def past_samples(states: Store) -> dict[str, set[str]]:
    """Samples that the last run's output holds under the same keys: adopted at the next run."""
    if not (STATES / store.MANIFEST).is_file():
        return {stream: set() for stream in states.streams}
    manifest = store.read_manifest()
    old = store.Kind.of(manifest)
    samples = {sample for entry in manifest["shards"] for sample in entry["samples"]}
    return {
        stream: samples
        if stream in manifest["streams"] and old.stream_key(stream) == states.kind.stream_key(stream)
        else set()
        for stream in states.streams
    }


def expected_ratio() -> float:
    """Raw over packed bytes: as the last run measured it."""
    path = METRICS / "extract.json"
    return float(files.read_json(path, "extract")["ratio"]) if path.is_file() else extract.EXPECTED_RATIO
