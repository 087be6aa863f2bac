"""Hidden states that are wrong on purpose: what each fault does to a drafter, and that the audit names it.

Faults of the features leave the teacher's state right, and the other way round. Shapes: T tokens, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from eaglet.audit import Reference

# (the layers asked for, the row as it is, another row) → the layers' states as they would be found, [T, H] each
FeatureFault = Callable[[Sequence[int], Reference, Reference], list[Tensor]]


def _right(layers: Sequence[int], row: Reference, other: Reference) -> list[Tensor]:
    return [row.outputs[layer] for layer in layers]


def _lower(layers: Sequence[int], row: Reference, other: Reference) -> list[Tensor]:
    return [row.outputs[layer - 1 if layer else 1] for layer in layers]


def _higher(layers: Sequence[int], row: Reference, other: Reference) -> list[Tensor]:
    last = len(row.outputs) - 1
    return [row.outputs[layer + 1 if layer < last else last - 1] for layer in layers]


def _other_row(layers: Sequence[int], row: Reference, other: Reference) -> list[Tensor]:
    places = torch.arange(len(row.final)) % len(other.final)
    return [other.outputs[layer][places] for layer in layers]


def _moved(by: int) -> FeatureFault:
    def moved(layers: Sequence[int], row: Reference, other: Reference) -> list[Tensor]:
        places = (torch.arange(len(row.final)) - by).clamp(0, len(row.final) - 1)
        return [row.outputs[layer][places] for layer in layers]

    return moved


def _final(row: Reference) -> Tensor:
    return row.final


# name → the features, and the state after the target's final norm
FAULTS: Mapping[str, tuple[FeatureFault, Callable[[Reference], Tensor]]] = {
    "right": (_right, _final),
    "layers one lower": (_lower, _final),
    "layers one higher": (_higher, _final),
    "another row's features": (_other_row, _final),
    "features one position late": (_moved(1), _final),
    "features one position early": (_moved(-1), _final),
    "final norm missing": (_right, lambda row: row.outputs[-1]),
    "final norm twice": (_right, lambda row: row.final_twice),
}
