"""evaluate --controls: the drafter on held-out rows whose states are wrong on purpose, beside the right ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaglet import audit, drafter, files, rows, target, ttt
from eaglet.audit import Reference
from eaglet.controls import FAULTS
from eaglet.draft_vocab import DraftVocabulary
from eaglet.errors import EagletError
from eaglet.layers import FINAL, stream
from eaglet.loader import Example
from eaglet.params import AuditParams, Params, TrainParams
from eaglet.paths import DRAFTER, METRICS, ROWS
from eaglet.progress import progress
from eaglet.rows import Row
from eaglet.training import Scorer


def run(params: Params) -> None:
    """Write metrics/controls.json and print the table; the states come from a fresh pass of plain Transformers.

    Raises:
        EagletError: fewer than two held-out rows.
    """
    model = target.load(params.target)
    chosen = rows.heldout(ROWS, params.evaluate.prompts)
    if len(chosen) < 2:
        raise EagletError("controls need two held-out rows: raise evaluate.prompts, or a file's heldout")
    layers = drafter.read_layers(DRAFTER)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draft, vocab = drafter.load(DRAFTER, model.embedding().to(device))
    head = model.head().to(device)
    scorer = Scorer(draft, head, vocab, params.train, torch.float32)
    network, truths = model.model(), list[Reference]()
    with progress("controls", sum(len(row.input_ids) for row in chosen), len(chosen)) as shown:
        for row in chosen:
            truths.append(audit.reference(network, row.input_ids.tolist()))
            shown.add(rows=1, tokens=len(row.input_ids))
    # Most faults leave the final state right: what the target chooses after it is computed once for them.
    choices = {final: [audit.choices(final(truth), head) for truth in truths] for _, final in FAULTS.values()}
    found = {}
    for name, (_, final) in FAULTS.items():
        documents = wrong(name, layers, chosen, truths, choices[final])
        measured = scorer.evaluate(
            [example(row, document, vocab, params.train) for row, document in zip(chosen, documents, strict=True)]
        )
        found[name] = {
            "simulated_acceptance_length": measured["simulated_acceptance_length"],
            "acc": measured["acc"],
            "audit": audited(documents[0], layers, truths[0], params.audit),
        }
    files.write_json(METRICS / "controls.json", {"rows": len(chosen), "faults": found})
    show(found)


def wrong(
    fault: str, layers: Sequence[int], chosen: Sequence[Row], truths: Sequence[Reference], choices: Sequence[Tensor]
) -> list[ttt.Document]:
    """The rows with a fault in their states, of which `choices` are the target's; the row before is the other one."""
    features, final = FAULTS[fault]
    return [
        ttt.Document(
            input_ids=torch.from_numpy(row.input_ids).long(),
            span_ids=torch.from_numpy(row.span_ids),
            choice=choices[place],
            streams=features(layers, truth, truths[place - 1]),
            final=final(truth),
        )
        for place, (row, truth) in enumerate(zip(chosen, truths, strict=True))
    ]


def example(row: Row, document: ttt.Document, vocab: DraftVocabulary, params: TrainParams) -> Example:
    """A row that is there already, counted."""
    return Example.of(
        row.id,
        document.span_ids,
        document.choice,
        lambda: document,
        t2d=vocab.t2d,
        steps=params.ttt_steps,
        out_of_vocab=params.out_of_vocab,
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
