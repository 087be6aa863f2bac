"""What makes hidden states right or wrong, row by row, and what a wrong one looks like."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from eaglet import capture
from eaglet.layers import FINAL, layer_of

_MAGNITUDE = np.int16(0x7FFF)  # a bfloat16 without its sign
_INFINITY = np.int16(0x7F80)  # and above it, NaN
_ROWS_AT_ONCE = 512  # of logits: [512, V] in fp32 is 300 MB at V = 152k


def faults(states: dict[str, torch.Tensor], length: int) -> list[str]:
    """Everything that is wrong with a row's states {stream: bfloat16 [T, H]} and can be seen without the target.

    Kinds: a length other than the ids', NaN or infinity, rows of zeros, all rows the same, two streams equal.
    Looked for in the bits, in few passes and one thread: every row of a run goes through here.
    """
    found = []
    bits = {name: values.to(torch.bfloat16).view(torch.int16).numpy() for name, values in states.items()}
    for name, values in bits.items():
        if len(values) != length:
            found.append(f"{name}: {len(values)} rows for {length} tokens (prefix rows missing?)")
            continue
        largest = (values & _MAGNITUDE).max(axis=1)
        bad, zero = largest >= _INFINITY, largest == 0
        if bad.any():
            found.append(f"{name}: NaN or infinity at {int(bad.sum())} tokens, first at {int(bad.argmax())}")
        if zero.any():
            found.append(f"{name}: all zero at {int(zero.sum())} tokens, first at {int(zero.argmax())}")
        elif length > 2 and (values[1] == values[2]).all() and (values[1:] == values[1]).all():
            found.append(f"{name}: the same values at every token")
    for one, other in combinations(bits, 2):
        first, second = bits[one], bits[other]
        if first.shape == second.shape and (first[:1] == second[:1]).all() and (first == second).all():
            found.append(f"{one} and {other} hold the same values: one layer was stored twice")
    return found


@dataclass
class Moments:
    """Statistics of a stream over all rows."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, values: torch.Tensor) -> None:
        """Count [T, H] values."""
        wide = values.float()
        self.count += wide.numel()
        self.total += float(wide.sum(dtype=torch.float64))
        self.squares += float(wide.square().sum(dtype=torch.float64))
        self.low = min(self.low, float(wide.min()))
        self.high = max(self.high, float(wide.max()))

    def summary(self) -> dict[str, float]:
        """min, max, mean and standard deviation."""
        mean = self.total / self.count
        deviation = max(self.squares / self.count - mean * mean, 0.0) ** 0.5
        return {"min": self.low, "max": self.high, "mean": mean, "std": deviation}


def choices(final: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The target's full-vocabulary argmax after each state, in float32, some states at a time.

    On greedy answers it is the next token nearly, not quite, always: in bfloat16 the two best logits tie at more than
    1 % of positions.

    Args:
        final: post-norm states [N, H].
        head: float32 [V, H], on the device that computes.

    Returns:
        int64 [N], on the CPU.
    """
    found = [torch.zeros(0, dtype=torch.int64)]
    for some in torch.split(final, _ROWS_AT_ONCE):
        found.append((some.to(head.device, torch.float32) @ head.T).argmax(dim=1).cpu())
    return torch.cat(found)


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean over tokens of |a − b| / |b| (L2): every token counts alike, an attention sink's huge norm too."""
    wide, base = values.float(), reference.float()
    return float(((wide - base).norm(dim=1) / base.norm(dim=1).clamp_min(1e-12)).mean())


@dataclass(frozen=True)
class Reference:
    """What plain Transformers computes for one row.

    Attributes:
        outputs: of every layer, [T, H] each; the last one before the final norm.
        final: after the final norm.
        final_twice: with the final norm applied once more.
    """

    outputs: list[torch.Tensor]
    final: torch.Tensor
    final_twice: torch.Tensor


def reference(model: Any, input_ids: Sequence[int]) -> Reference:
    """Run one row alone through Transformers with `output_hidden_states=True`."""
    ids = torch.tensor([list(input_ids)], device=model.device)
    before_norm: list[torch.Tensor] = []
    norm = capture.decoder(model).norm
    hook = norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    with torch.inference_mode():
        states = capture.decoder(model)(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        hook.remove()
        twice = norm(states[-1])
    # hidden_states[k] enters layer k; the last one has been through the norm.
    outputs = [state[0].cpu() for state in states[1:-1]] + [before_norm[0][0].cpu()]
    return Reference(outputs, states[-1][0].cpu(), twice[0].cpu())


@dataclass(frozen=True)
class Comparison:
    """A stored stream against the reference of its row."""

    error: float
    neighbours: dict[str, float]
    looks_like: str | None


def compare(
    name: str, values: torch.Tensor, truth: Reference, max_error: float, min_neighbour_ratio: float
) -> Comparison:
    """Relative error at the right place and its neighbours; where it is out of bounds, what it looks like.

    `looks_like` is None where the error is within `max_error` and the neighbours at least `min_neighbour_ratio`
    times worse.
    """
    right = truth.final if name == FINAL else truth.outputs[layer_of(name)]
    if name == FINAL:
        beside = {"before the final norm": truth.outputs[-1], "final norm applied twice": truth.final_twice}
    else:
        layer = layer_of(name)
        near = [other for other in (layer - 1, layer + 1) if 0 <= other < len(truth.outputs)]
        beside = {f"output of layer {other}": truth.outputs[other] for other in near}
    if len(values) != len(right):
        return Comparison(float("inf"), {}, f"{len(values)} rows for {len(right)} tokens: prefix rows missing?")
    error = relative_error(values, right)
    neighbours = {what: relative_error(values, other) for what, other in beside.items()}
    if error <= max_error and all(other >= min_neighbour_ratio * error for other in neighbours.values()):
        return Comparison(error, neighbours, None)
    return Comparison(error, neighbours, _diagnose(values, right, truth))


def _diagnose(values: torch.Tensor, right: torch.Tensor, truth: Reference) -> str:
    """The known mistake that explains the values best."""
    candidates = {f"the output of layer {layer} (layer off?)": other for layer, other in enumerate(truth.outputs[:-1])}
    candidates[f"the output of layer {len(truth.outputs) - 1}, before the final norm (norm missing?)"] = truth.outputs[
        -1
    ]
    candidates["the state after the final norm"] = truth.final
    candidates["the final norm applied twice"] = truth.final_twice
    errors = {what: relative_error(values, other) for what, other in candidates.items()}
    if len(values) > 1:
        errors["rows one position late"] = relative_error(values[1:], right[:-1])
        errors["rows one position early"] = relative_error(values[:-1], right[1:])
    best = min(errors, key=lambda what: errors[what])
    if errors[best] > 0.2:
        return "nothing of this row: another sample's rows, or another model?"
    return f"{best}, relative error {errors[best]:.3f}"
