"""evaluate --controls: the drafter on held-out rows whose states are wrong on purpose, beside the right ones."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from eaglet import audit, drafter, files, rows, target, ttt
from eaglet.audit import Reference
from eaglet.controls import FAULTS
from eaglet.errors import EagletError
from eaglet.layers import FINAL, stream
from eaglet.loader import Example
from eaglet.params import AuditParams, Params
from eaglet.paths import DRAFTER, METRICS, ROWS
from eaglet.progress import progress
from eaglet.rows import Row
from eaglet.stages.evaluate import spread
from eaglet.training import Scorer


def run(params: Params) -> None:
    """Write metrics/controls.json and print the table; the states come from a fresh pass of plain Transformers.

    Raises:
        EagletError: fewer than two held-out rows.
    """
    model = target.load(params.target)
    chosen = spread([row for row in rows.read(ROWS) if row.heldout], params.evaluate.prompts)
    if len(chosen) < 2:
        raise EagletError("controls need two held-out rows: raise evaluate.prompts, or a file's heldout")
    layers = drafter.read_layers(DRAFTER)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draft, vocab = drafter.load(DRAFTER, model.embedding().to(device))
    scorer = Scorer(draft, model.head(), vocab, params.train, torch.float32)
    network, head, truths = model.model(), model.head().float().to(device), list[Reference]()
    with progress("controls", sum(len(row.input_ids) for row in chosen), len(chosen)) as shown:
        for row in chosen:
            truths.append(audit.reference(network, row.input_ids.tolist()))
            shown.add(rows=1, tokens=len(row.input_ids))
    found = {}
    for name in FAULTS:
        documents = list(wrong(name, layers, chosen, truths, head))
        examples = [
            Example.of(
                row.id,
                document.span_ids,
                document.choice,
                partial(_same, document),
                t2d=vocab.t2d,
                steps=params.train.ttt_steps,
                out_of_vocab=params.train.out_of_vocab,
            )
            for row, document in zip(chosen, documents, strict=True)
        ]
        measured = scorer.evaluate(examples)
        found[name] = {
            "simulated_acceptance_length": measured["simulated_acceptance_length"],
            "acc": measured["acc"],
            "audit": audited(documents[0], layers, truths[0], params.audit),
        }
    files.write_json(METRICS / "controls.json", {"rows": len(chosen), "faults": found})
    show(found)


def wrong(
    fault: str, layers: Sequence[int], chosen: Sequence[Row], truths: Sequence[Reference], head: torch.Tensor
) -> Iterator[ttt.Document]:
    """The rows with a fault in their states; the row before is the other one. `head` is float32 [V, H]."""
    features, final = FAULTS[fault]
    for place, (row, truth) in enumerate(zip(chosen, truths, strict=True)):
        states = final(truth)
        yield ttt.Document(
            input_ids=torch.from_numpy(row.input_ids).long(),
            span_ids=torch.from_numpy(row.span_ids),
            choice=audit.choices(states, head),
            streams=features(layers, truth, truths[place - 1]),
            final=states,
        )


def audited(document: ttt.Document, layers: Sequence[int], truth: Reference, bounds: AuditParams) -> str | None:
    """The audit's word on a row: the first thing that it finds wrong, None where it finds nothing."""
    states = dict(zip(map(stream, layers), document.streams, strict=True)) | {FINAL: document.final}
    for name, values in states.items():
        seen = audit.compare(name, values, truth, bounds.max_relative_error, bounds.min_neighbour_ratio)
        if seen.looks_like is not None:
            return f"{name} looks like {seen.looks_like}"
    return None


def show(found: dict[str, dict[str, Any]]) -> None:
    """The table."""
    right = found["right"]["simulated_acceptance_length"]
    print(f"{'states':30}{'simulated':>10}{'':8}{'acc₀':>7}  what the audit says")
    for name, one in found.items():
        length = one["simulated_acceptance_length"]
        change = f"{length / right - 1:+8.1%}" if name != "right" else " " * 8
        print(f"{name:30}{length:10.3f}{change}{one['acc'][0]:7.3f}  {one['audit'] or 'right'}")


def _same(document: ttt.Document) -> ttt.Document:
    return document
