"""The drafter's attention: one softmax over the step-0 keys of a row's document and the row's own later keys.

It equals a dense [T, (k+1)·T] mask that is causal in its first block and diagonal in the others, and never makes
one. The step-0 part is ordinary causal attention, documents side by side without padding. It yields its output o₀
and the logarithm of its softmax's denominator; the own keys' scores join that denominator afterwards. The backward
pass of such a kernel needs no more than the output and the denominator it was normalised by: given those of the
*whole* softmax, it gives the exact gradients of its part (as in ring attention, Liu et al. 2023, arXiv 2310.01889).

Shapes: R rows, S step-0 keys, k own keys a row; n key heads, each for g query heads; d head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class KeyValues(NamedTuple):
    """Keys (rotated) and values: [S, n, d] of step 0, or [R, k, n, d] for rows' own."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Segments:
    """Which keys which rows see: segment by segment, rows and keys lie in order, and the last row sees every key.

    Attributes:
        rows: int32 [segments + 1], where each segment's rows begin; then R.
        keys: int32 [segments + 1], the same for its keys. A segment has at least as many keys as rows.
        longest: the most rows and the most keys of a segment.
        row_starts, key_starts: the same as `rows` and `keys`, as numbers.
    """

    rows: Tensor
    keys: Tensor
    longest: tuple[int, int]
    row_starts: tuple[int, ...]
    key_starts: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[int], keys: Sequence[int]) -> "Segments":
        """Segments with these numbers of rows and of keys."""
        starts = [(0, *torch.tensor(counts).cumsum(0).tolist()) for counts in (rows, keys)]
        tensors = [torch.tensor(values, dtype=torch.int32) for values in starts]
        return cls(tensors[0], tensors[1], (max(rows), max(keys)), starts[0], starts[1])

    def to(self, device: torch.device, non_blocking: bool = False) -> "Segments":
        """On another device."""
        rows, keys = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.rows, self.keys))
        return Segments(rows, keys, self.longest, self.row_starts, self.key_starts)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Rows and keys of each segment."""
        for place in range(len(self.row_starts) - 1):
            yield slice(*self.row_starts[place : place + 2]), slice(*self.key_starts[place : place + 2])


def attention(q: Tensor, context: KeyValues, own: KeyValues | None, segments: Segments) -> Tensor:
    """One softmax over the keys of a row's segment up to the row, and its own; scale 1/√d.

    Args:
        q: [R, n·g, d], rotated; query head h uses key head h // g.
        context: of step 0, [S, n, d], as `segments` orders them.
        own: of steps 1 … k, [R, k, n, d]; None at step 0.

    Returns:
        [R, n·g·d].
    """
    keys, values = (None, None) if own is None else own
    mixed: Tensor = _Attention.apply(q, context.keys, context.values, keys, values, segments)  # type: ignore[no-untyped-call]
    return mixed.flatten(1)


class _Attention(torch.autograd.Function):
    """q, step-0 keys and values, own keys and values (or None) → [R, n·g, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        own_keys, own_values, segments = rest
        kernel = _flash if _has_flash(q) else _plain
        mixed, total, state = kernel(q, keys, values, segments)  # [R, n·g, d], [n·g, R]
        if own_keys is not None:
            scores = _own_scores(q, own_keys)  # [R, n·g, k]
            first = total.T[..., None]
            both = torch.cat([first, scores], -1).logsumexp(-1, keepdim=True)  # [R, n·g, 1]
            mixed = mixed * (first - both).exp().to(q.dtype) + _weigh((scores - both).exp(), own_values)
            total = both[..., 0].T.contiguous()
        ctx.save_for_backward(q, keys, values, own_keys, own_values, mixed, total, *state)
        ctx.segments = segments
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_keys, own_values, mixed, total, *state = ctx.saved_tensors
        grad = grads[0].contiguous()
        kernel = _flash_backward if state else _plain_backward
        dq, dkeys, dvalues = kernel(grad, q, keys, values, mixed, total, ctx.segments, state)
        if own_keys is None:
            return dq, dkeys, dvalues, None, None, None
        scale, heads = q.shape[-1] ** -0.5, own_keys.shape[2]
        weights = (_own_scores(q, own_keys) - total.T[..., None]).exp()  # [R, n·g, k]
        delta = (grad * mixed).sum(-1, dtype=total.dtype)[..., None]
        dscores = weights * (_own_products(grad, own_values) - delta) * scale
        dq = dq + _weigh(dscores, own_keys)
        dscores, weights = (_grouped(x, heads).to(q.dtype) for x in (dscores, weights))
        down_keys = torch.einsum("rngk,rngd->rknd", dscores, _grouped(q, heads))
        down_values = torch.einsum("rngk,rngd->rknd", weights, _grouped(grad, heads))
        return dq, dkeys, dvalues, down_keys, down_values, None


def _own_products(x: Tensor, own: Tensor) -> Tensor:
    """Each row's head vectors [R, n·g, d] times its own [R, k, n, d]: [R, n·g, k], float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    products: Tensor = torch.einsum("rngd,rknd->rngk", _grouped(x, own.shape[2]), own)
    return products.flatten(1, 2).to(wide)


def _own_scores(q: Tensor, own_keys: Tensor) -> Tensor:
    scores: Tensor = _own_products(q, own_keys) * q.shape[-1] ** -0.5
    return scores


def _weigh(weights: Tensor, own: Tensor) -> Tensor:
    """Σ_k weights [R, n·g, k] · own [R, k, n, d]: [R, n·g, d]."""
    mixed: Tensor = torch.einsum("rngk,rknd->rngd", _grouped(weights, own.shape[2]).to(own.dtype), own)
    return mixed.flatten(1, 2)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[R, n·g, …] to [R, n, g, …]."""
    return x.reshape(len(x), heads, -1, x.shape[-1])


def _has_flash(q: Tensor) -> bool:
    """Whether FlashAttention, as PyTorch brings it, computes this: on a GPU, in half precision."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _flash(q: Tensor, keys: Tensor, values: Tensor, segments: Segments) -> tuple[Tensor, Tensor, list[Tensor]]:
    """[R, n·g, d] and the log of the softmax's denominator, float32 [n·g, R]; causal from a segment's end."""
    mixed, total, *state, _ = torch.ops.aten._flash_attention_forward(
        q, keys, values, segments.rows, segments.keys, *segments.longest, 0.0, True, False
    )
    return mixed, total, state


def _flash_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, mixed: Tensor, total: Tensor, segments: Segments, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, keys, values, mixed, total, segments.rows, segments.keys, *segments.longest, 0.0, True, *state
    )
    return gradients


def _plain(q: Tensor, keys: Tensor, values: Tensor, segments: Segments) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same as `_flash`, written out; a segment at a time."""
    mixed, total = [], []
    for rows, seen in segments.slices():
        scores = _scores(q[rows], keys[seen])
        total.append(scores.logsumexp(-1))  # [n, g, r]
        weights = (scores - total[-1][..., None]).exp().to(q.dtype)
        mixed.append(torch.einsum("ngrs,snd->rngd", weights, values[seen]).flatten(1, 2))
    return torch.cat(mixed), torch.cat(total, -1).flatten(0, 1), []


def _plain_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, mixed: Tensor, total: Tensor, segments: Segments, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """With p = exp(score − total): dv = pᵀ·do, ds = p·(do·vᵀ − do·o), dq = ds·k/√d, dk = dsᵀ·q/√d."""
    dq, dkeys, dvalues = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)
    heads, scale = keys.shape[1], q.shape[-1] ** -0.5
    for rows, seen in segments.slices():
        grouped, down = (_grouped(x[rows], heads) for x in (q, grad))  # [r, n, g, d]
        weights = (_scores(q[rows], keys[seen]) - total[:, rows].reshape(heads, -1, len(grouped), 1)).exp()
        delta = (grad[rows] * mixed[rows]).sum(-1, dtype=total.dtype).T.reshape(heads, -1, len(grouped), 1)
        dscores = weights * (torch.einsum("rngd,snd->ngrs", down, values[seen]).to(total.dtype) - delta) * scale
        dscores, weights = dscores.to(q.dtype), weights.to(q.dtype)
        dq[rows] = torch.einsum("ngrs,snd->rngd", dscores, keys[seen]).flatten(1, 2)
        dkeys[seen] = torch.einsum("ngrs,rngd->snd", dscores, grouped)
        dvalues[seen] = torch.einsum("ngrs,rngd->snd", weights, down)
    return dq, dkeys, dvalues


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Of one segment, [n, g, r, s], float32 or wider; −∞ for keys behind the row."""
    count, seen = len(q), len(keys)
    products = torch.einsum("rngd,snd->ngrs", _grouped(q, keys.shape[1]), keys)
    later = torch.ones(count, seen, dtype=torch.bool, device=q.device).triu(seen - count + 1)
    scores = products.to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    masked: Tensor = scores.masked_fill(later, -torch.inf)
    return masked
