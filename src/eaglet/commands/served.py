"""evaluate --server: the held-out prompts through SGLang, with the drafter and without."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from eaglet import drafter, files, rows, server, serving, target
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import DRAFTER, METRICS, ROWS
from eaglet.progress import Progress, progress
from eaglet.rows import Row
from eaglet.server import Drafting, Server
from eaglet.serving import Pass

BATCHES = (1, 8, 32)


def run(params: Params, url: str | None) -> None:
    """Write metrics/served.json and print the table.

    Args:
        url: a server that runs already, with a drafter. Without one, a server is started with the drafter in
            data/drafter, and after it another without.

    Raises:
        EagletError: no GPU, a server that cannot be used, or a target whose streams SGLang gives otherwise.
    """
    model = target.load(params.target)
    if model.fingerprint.architecture.startswith("Gemma3"):
        raise EagletError(
            "SGLang gives a drafter of Gemma 3 what a layer adds, without the residual, and not the streams that it "
            "was trained on: it cannot be served there"
        )
    chosen = rows.heldout(ROWS, params.evaluate.prompts)
    drafter.read(DRAFTER)
    drafting = Drafting(DRAFTER.absolute(), params.evaluate.draft_steps)
    if url is None:
        with_drafter = _started(params, model, drafting, chosen)
        without: list[Pass] | None = _started(params, model, None, chosen)
    else:
        running = Server(url)
        drafting = check_drafting(running, server.check_target(running, model))
        with_drafter = _passes(running, model, params, chosen)
        plain = params.engine.url.generate
        without = _passes(_plain(plain, model), model, params, chosen) if plain else None
    numbers = summary(chosen, drafting.steps, with_drafter, without)
    numbers["predicted"] = _predicted(drafting.steps)
    files.write_json(METRICS / "served.json", numbers)
    show(numbers)


def check_drafting(running: Server, args: dict[str, Any]) -> Drafting:
    """What a running server drafts with.

    Raises:
        EagletError: nothing, or other than in a chain.
    """
    if args.get("speculative_algorithm") != "EAGLE3":
        raise EagletError(
            f"the server at {running.url} does not draft with EAGLE-3 (speculative_algorithm "
            f"{args.get('speculative_algorithm')}): start it as `eaglet export drafter` says"
        )
    if args.get("speculative_eagle_topk") != 1:
        raise EagletError(f"the server at {running.url} drafts a tree: start it with --speculative-eagle-topk 1")
    return Drafting(Path(args["speculative_draft_model_path"]), args["speculative_num_steps"])


def _plain(url: str, model: target.Target) -> Server:
    """The server that answers without a drafter."""
    found = Server(url)
    if server.check_target(found, model).get("speculative_algorithm") is not None:
        raise EagletError(f"engine.url.generate {url} drafts too: name one without, or null")
    return found


def _started(params: Params, model: target.Target, drafting: Drafting | None, chosen: Sequence[Row]) -> list[Pass]:
    """The passes of a server that is started for them. Nothing is cached: a prompt that comes twice costs twice."""
    launch = params.engine.launch
    launch = replace(launch, args=["--disable-radix-cache", *launch.args])
    found = server.launch(launch, model, None, drafting)
    try:
        found.start()
        return _passes(found, model, params, chosen)
    finally:
        found.stop()


def _passes(found: Server, model: target.Target, params: Params, chosen: Sequence[Row]) -> list[Pass]:
    """One for each of BATCHES: batch 1 over every prompt once, the others over enough requests to stay full."""
    prompts = [row.prompt_ids for row in chosen]
    limit, passes = params.evaluate.max_new_tokens, list[Pass]()
    for batch in BATCHES:
        full = prompts if batch == 1 else list(islice(cycle(prompts), max(len(prompts), 3 * batch)))
        with progress(f"batch {batch}", len(full) * limit, len(full)) as shown:

            def on_answer(one: serving.Served, shown: Progress = shown) -> None:
                shown.add(rows=1, tokens=len(one.output_ids))

            passes.append(serving.measure(found, full, batch, limit, model.end_ids, on_answer))
    return passes


def summary(
    chosen: Sequence[Row], steps: int, with_drafter: Sequence[Pass], without: Sequence[Pass] | None
) -> dict[str, Any]:
    """The numbers, those of a server without a drafter null where there was none.

    `changed` counts the answers that are not the same with the drafter; `batch_noise` those that the server without
    it writes otherwise at this batch than at batch 1.
    """
    by_source: dict[str, list[serving.Served]] = {}
    for row, one in zip(chosen, with_drafter[0].served, strict=True):
        by_source.setdefault(row.source, []).append(one)
    batches = []
    for place, drafted in enumerate(with_drafter):
        plain = without[place] if without else None
        alone = without and islice(cycle(without[0].served), len(drafted.served))
        batches.append(
            {
                "batch": drafted.batch,
                "requests": len(drafted.served),
                "acceptance_length": serving.acceptance_length(drafted.served),
                "tokens_per_second": drafted.tokens_per_second,
                "plain_tokens_per_second": plain and plain.tokens_per_second,
                "speed_up": plain and drafted.tokens_per_second / plain.tokens_per_second,
                "changed": plain and serving.differing(drafted, plain),
                "batch_noise": plain and alone and serving.differing(plain, Pass(1, list(alone), 0.0)),
            }
        )
    return {
        "prompts": len(chosen),
        "draft_steps": steps,
        "acceptance_length": serving.acceptance_length(with_drafter[0].served),
        "emitted_per_cycle": serving.emitted_per_cycle(with_drafter[0].served),
        "by_source": {name: serving.acceptance_length(found) for name, found in sorted(by_source.items())},
        "batches": batches,
    }


def _predicted(steps: int) -> float | None:
    """What `evaluate` measured with as many tokens drafted, if it has."""
    path = METRICS / "evaluate.json"
    found = files.read_json(path, "evaluate") if path.exists() else {}
    return found["acceptance_length"] if found.get("draft_steps") == steps else None


def show(numbers: dict[str, Any]) -> None:
    """The table."""
    predicted = numbers["predicted"]
    print(
        f"served: acceptance length {numbers['acceptance_length']:.3f} ({numbers['emitted_per_cycle']:.3f} without "
        f"each answer's first token; evaluate: {'not run' if predicted is None else f'{predicted:.3f}'}), "
        f"{numbers['draft_steps']} drafted, {numbers['prompts']} held-out prompts"
    )
    for name, value in numbers["by_source"].items():
        print(f"  {name:20} {value:.3f}")
    print(
        f"{'batch':>5}{'requests':>10}{'acceptance':>12}{'tok/s':>9}{'plain':>9}{'speed-up':>10}{'changed':>9}{'noise':>7}"
    )
    for one in numbers["batches"]:
        line = f"{one['batch']:5}{one['requests']:10}{one['acceptance_length']:12.3f}{one['tokens_per_second']:9,.0f}"
        if one["speed_up"] is not None:
            line += (
                f"{one['plain_tokens_per_second']:9,.0f}{one['speed_up']:10.2f}{one['changed']:9}{one['batch_noise']:7}"
            )
        print(line)
    if numbers["batches"][0]["speed_up"] is None:
        print("no speed-up: name a server without a drafter in params.yaml engine.url.generate")
