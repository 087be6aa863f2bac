"""audit: read back every row that was stored, check it, and compare a sample with plain Transformers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eaglet import audit, choices, files, rows, target
from eaglet.errors import EagletError
from eaglet.layers import FINAL
from eaglet.params import AuditParams, Params
from eaglet.paths import CHOICES, METRICS, ROWS
from eaglet.progress import progress
from eaglet.rows import Row
from eaglet.store import States

_MIN_ROW_TOKENS = 16  # below this a single row's agreement says little


@dataclass
class Findings:
    """What the audit saw; `problems` is empty where all is well."""

    problems: list[str] = field(default_factory=list)
    moments: dict[str, audit.Moments] = field(default_factory=dict)
    hits: int = 0
    predicted: int = 0
    greedy_hits: int = 0
    greedy_predicted: int = 0
    lowest: tuple[float, str] = (1.0, "")
    errors: dict[str, list[audit.Comparison]] = field(default_factory=dict)
    choices: list[torch.Tensor] = field(default_factory=list)


def run(params: Params) -> None:
    """Write data/choices.safetensors and metrics/audit.json; fail where anything lies outside its bounds."""
    model = target.load(params.target)
    wanted = rows.read(ROWS)
    states = States()
    found = Findings(moments={name: audit.Moments() for name in states.streams})
    head = model.head().float().to("cuda" if torch.cuda.is_available() else "cpu")
    check_rows(wanted, states, head, params.audit, found)
    if not found.problems:  # a row that is broken in itself needs no reference
        check_reference(wanted, states, model, params.audit, found)
    files.write_json(METRICS / "audit.json", summary(found, wanted))
    show(found, states.streams)
    if found.problems:
        more = f" (and {len(found.problems) - 1} more in {METRICS / 'audit.json'})" if len(found.problems) > 1 else ""
        raise EagletError(f"audit failed: {found.problems[0]}{more}")
    choices.save(CHOICES, wanted, found.choices)
    print(f"audit: {len(wanted)} rows × {len(states.streams)} streams are right")


def check_rows(wanted: Sequence[Row], states: States, head: torch.Tensor, bounds: AuditParams, found: Findings) -> None:
    """Every row: what can be seen in it alone, and whether head(final) predicts the answer."""
    with progress("audit", sum(len(row.input_ids) for row in wanted), len(wanted)) as shown:
        for row in wanted:
            stored = states.read(row.sample)
            found.problems += [f"row {row.id}: {what}" for what in audit.faults(stored, len(row.input_ids))]
            if found.problems and len(stored[FINAL]) != len(row.input_ids):
                continue
            for name, values in stored.items():
                found.moments[name].add(values)
            ids, places = torch.from_numpy(row.input_ids), torch.from_numpy(choices.places(row))
            found.choices.append(audit.choices(stored[FINAL][places], head))
            hits, predicted = int((found.choices[-1] == ids[places + 1]).sum()), len(places)
            found.hits += hits
            found.predicted += predicted
            if row.greedy:
                found.greedy_hits += hits
                found.greedy_predicted += predicted
                if predicted >= _MIN_ROW_TOKENS:
                    found.lowest = min(found.lowest, (hits / predicted, row.id))
            shown.add(rows=1, tokens=len(row.input_ids))
    if found.greedy_predicted and found.greedy_hits < bounds.min_agreement * found.greedy_predicted:
        found.problems.append(
            f"head(final) predicts {found.greedy_hits / found.greedy_predicted:.3f} of the greedy answers' tokens, "
            f"fewer than audit.min_agreement {bounds.min_agreement}: wrong norm, rows shifted, or another model?"
        )
    if found.lowest[0] < bounds.min_row_agreement:
        found.problems.append(
            f"row {found.lowest[1]}, final: head(final) predicts only {found.lowest[0]:.3f} of its answer, below "
            f"audit.min_row_agreement {bounds.min_row_agreement}: another row's states?"
        )


def check_reference(
    wanted: Sequence[Row], states: States, model: target.Target, bounds: AuditParams, found: Findings
) -> None:
    """A few rows, recomputed one by one: the stored values must be that layer's and not its neighbours'."""
    if not bounds.reference_rows:
        return
    chosen = random.Random(0).sample(list(wanted), min(bounds.reference_rows, len(wanted)))
    network = model.model()
    for row in chosen:
        truth = audit.reference(network, row.input_ids.tolist())
        for name, values in states.read(row.sample).items():
            seen = audit.compare(name, values, truth, bounds.max_relative_error, bounds.min_neighbour_ratio)
            found.errors.setdefault(name, []).append(seen)
            if seen.looks_like is not None:
                found.problems.append(
                    f"row {row.id}, {name}: relative error {seen.error:.3f} against Transformers; "
                    f"it looks like {seen.looks_like}"
                )


def summary(found: Findings, wanted: Sequence[Row]) -> dict[str, Any]:
    """The metrics: deterministic for the same states."""

    def rounded(value: float) -> float | None:
        return float(f"{value:.6g}") if math.isfinite(value) else None

    return {
        "rows": len(wanted),
        "problems": found.problems,
        "agreement": rounded(found.hits / found.predicted) if found.predicted else None,
        "greedy_agreement": rounded(found.greedy_hits / found.greedy_predicted) if found.greedy_predicted else None,
        "lowest_row_agreement": rounded(found.lowest[0]),
        "streams": {
            name: {key: rounded(value) for key, value in moments.summary().items()}
            for name, moments in found.moments.items()
            if moments.count
        },
        "relative_error": {name: rounded(max(s.error for s in seen)) for name, seen in found.errors.items()},
        "nearest_neighbour": {
            name: rounded(min(value for s in seen for value in s.neighbours.values()))
            for name, seen in found.errors.items()
            if all(s.neighbours for s in seen)
        },
    }


def show(found: Findings, streams: Sequence[str]) -> None:
    """A table for the eye."""
    print(f"{'stream':8}{'min':>10}{'max':>10}{'mean':>10}{'std':>10}{'rel. error':>12}{'neighbour':>11}")
    for name in streams:
        moments, seen = found.moments[name], found.errors.get(name)
        if not moments.count:
            continue
        numbers = moments.summary()
        line = f"{name:8}" + "".join(f"{numbers[key]:10.3f}" for key in ("min", "max", "mean", "std"))
        if seen and all(s.neighbours for s in seen):
            nearest = min(value for s in seen for value in s.neighbours.values())
            line += f"{max(s.error for s in seen):12.4f}{nearest:11.4f}"
        print(line)
    if found.predicted:
        print(f"head(final) predicts {found.hits / found.predicted:.4f} of {found.predicted:,} answer tokens")
