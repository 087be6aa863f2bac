"""The draft head and its loss, a chunk of rows at a time: [rows, Vd] never lies in memory whole in float32.

The loss of a row is its soft cross-entropy −Σ p log q over the draft vocabulary, p being the target's softmax
renormalised over it (eagle3.md, "Training-time test"). Its gradient by the logits is q − p, known as soon as the
logits are: so the gradients of the features and of the head are made in the forward pass, and no logits are kept or
computed twice.

Shapes: n rows, P teachers, Vd draft vocabulary, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 26  # of logits held at a time: 256 MiB in float32, a few times over


def soft_cross_entropy(
    features: Tensor, head: Tensor, teacher: Tensor, at: Tensor, weights: Tensor, sharpen: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss of rows, and each row's loss and choice.

    Args:
        features: after the drafter's norm, [n, H].
        head: the draft head, [Vd, H].
        teacher: the target's logits over the draft vocabulary, [P, Vd].
        at: int64 [n], the teacher of each row.
        weights: [n], what each row counts.
        sharpen: s of p ← (1 − s)·p + s·onehot(argmax p): greedy verification accepts the target's choice alone.

    Returns:
        Σ weight · loss, a number with gradients for `features` and `head`; the loss of each row, [n]; and the
        drafter's argmax, int64 [n]. Numbers are float32, or float64 where the features are.
    """
    total, losses, chosen = _SoftCrossEntropy.apply(features, head, teacher, at, weights, sharpen)  # type: ignore[no-untyped-call]
    return total, losses, chosen


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, head: Tensor, teacher: Tensor, at: Tensor, weights: Tensor, sharpen: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(features.dtype, torch.float32)
        wanted = any(ctx.needs_input_grad[:2])
        losses = torch.zeros(len(features), dtype=wide, device=features.device)
        chosen = torch.zeros_like(at)
        dfeatures = torch.empty_like(features) if wanted else None
        dhead = torch.zeros_like(head, dtype=wide) if wanted else None
        chunk = max(1, _CHUNK_ELEMENTS // len(head))
        for start in range(0, len(features), chunk):
            some = slice(start, start + chunk)
            logits = (features[some] @ head.T).to(wide)
            chosen[some] = logits.argmax(-1)
            log_q = logits.log_softmax(-1)
            p = teacher[at[some]].to(wide).softmax(-1)
            if sharpen:
                best = p.argmax(-1, keepdim=True)
                p.mul_(1 - sharpen).scatter_add_(1, best, torch.full_like(best, sharpen, dtype=wide))
            losses[some] = -torch.linalg.vecdot(p, log_q)
            if dfeatures is not None and dhead is not None:
                gradient = (log_q.exp_().sub_(p)).mul_(weights[some, None]).to(features.dtype)
                dfeatures[some] = gradient @ head
                _add_product(dhead, gradient.T, features[some])
        ctx.save_for_backward(dfeatures, dhead)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(losses, chosen)
        return torch.linalg.vecdot(weights.to(wide), losses), losses, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dfeatures, dhead = ctx.saved_tensors
        return dfeatures * grads[0], (dhead * grads[0]).to(ctx.head_dtype), None, None, None, None


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other; a half-precision product is summed and added in float32."""
    if one.dtype == total.dtype:
        total.addmm_(one, other)
    elif one.is_cuda:
        total += torch.mm(one, other, out_dtype=total.dtype)
    else:
        total += (one @ other).to(total.dtype)
