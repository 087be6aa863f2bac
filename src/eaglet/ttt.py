"""Training-time test: the drafter unrolled over its own features, its loss and its metrics.

Mathematics: eagle3.md, "Training-time test (TTT)" (Li et al. 2025, arXiv 2503.01840, section 3.2).
Row t at step k reads token x_{t+1+k}; its teacher is the target's distribution at position t+1+k; it predicts
the token at t+2+k.

Which rows count (the serving-exact mask): those with x_{t+1} … x_{t+2+k} in one answer of the assistant. A
row that counts at step k counts at every earlier one, so of the others only the step-0 keys are computed.

Two denominators. `rows` are all counted rows: acc_k is over them, and where the target's choice is not in the
draft vocabulary the drafter cannot be right, at serving as here: a miss. `loss_rows` are those that the loss
averages over: with out_of_vocab "mask" only the counted rows whose choice is in the draft vocabulary. So
acc_k means the same under both settings.

Shapes: B documents, one a row, padded on the right to T; K steps; H hidden size; V and Vd vocabularies; P
counted rows of step 0 over the whole batch, in order of document and position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter, KeyValues

OutOfVocab = Literal["mask", "renormalise"]
_CHUNK_ELEMENTS = 1 << 25  # of full-vocabulary logits held at a time: 128 MiB in float32


def valid_rows(span_ids: Tensor, steps: int) -> Tensor:
    """The serving-exact mask.

    Args:
        span_ids: int64 [B, T], 0 where the assistant did not write the token, else the number of its answer:
            two answers that touch have different numbers.
        steps: K.

    Returns:
        bool [B, K, T]: row t counts at step k, that is x_{t+1} … x_{t+2+k} all lie in one answer.
    """
    batch, length = span_ids.shape
    padded = torch.nn.functional.pad(span_ids, (0, steps + 2))
    # goes_on[p]: positions p and p+1 are in the same answer
    goes_on = (padded[:, :-1] > 0) & (padded[:, :-1] == padded[:, 1:])  # [B, T + K + 1]
    valid = torch.empty(batch, steps, length, dtype=torch.bool, device=span_ids.device)
    so_far = torch.ones(batch, length, dtype=torch.bool, device=span_ids.device)
    for k in range(steps):
        so_far = so_far & goes_on[:, 1 + k : 1 + k + length]
        valid[:, k] = so_far
    return valid


def forward(drafter: Drafter, input_ids: Tensor, aux: Tensor, rows: Tensor, steps: int) -> list[Tensor]:
    """The features of each step, teacher-forced.

    Args:
        input_ids: int64 [B, T]; tokens beyond T read as 0.
        aux: the target's streams low, mid, high, [B, T, 3H]; finite in the padding too.
        rows: int64 [B, R], the positions that are computed.
        steps: K.

    Returns:
        K tensors gᵏ⁺¹ [B, R, H], before the norm.
    """
    ids = torch.nn.functional.pad(input_ids, (0, steps))  # [B, T + K]
    features = drafter.fuse(aux)  # g⁰ [B, T, H]
    context = drafter.context(features, ids[:, 1 : 1 + aux.shape[1]])
    features = features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1]))  # [B, R, H]
    outputs: list[Tensor] = []
    own: KeyValues | None = None
    for k in range(steps):
        features, own = drafter.step(k, features, ids.gather(1, rows + 1 + k), rows, context, own=own)
        outputs.append(features)
    return outputs


def logits(drafter: Drafter, input_ids: Tensor, aux: Tensor, steps: int) -> Tensor:
    """Draft logits of all rows of one document: [K, T, Vd].

    Rows whose token x_{t+1+k} lies beyond the document are computed with token 0.

    Args:
        input_ids: int64 [T].
        aux: [T, 3H].
    """
    rows = torch.arange(len(input_ids), device=input_ids.device)[None]
    features = forward(drafter, input_ids[None], aux[None], rows, steps)
    return torch.cat([drafter.logits(feature) for feature in features])


def teacher_choice(final: Tensor, head_weight: Tensor) -> Tensor:
    """The target's full-vocabulary argmax at each position, a chunk of positions at a time.

    Args:
        final: the target's state after its final norm, [N, H].
        head_weight: the target's head, [V, H]; the product is taken in its dtype.

    Returns:
        int64 [N].
    """
    chunk = max(1, _CHUNK_ELEMENTS // len(head_weight))
    final = final.to(head_weight.dtype)
    parts = [final[at : at + chunk] for at in range(0, max(1, len(final)), chunk)]
    return torch.cat([(part @ head_weight.T).argmax(-1) for part in parts])


@dataclass(frozen=True)
class Batch:
    """Documents side by side, padded on the right: with zeros, and span 0.

    Attributes:
        input_ids: int64 [B, T].
        span_ids: int64 [B, T], see `valid_rows`.
        aux: [B, T, 3H].
        final: after the target's final norm, [B, T, H].
        choice: int64 [B, T], the target's full-vocabulary argmax at each position.
    """

    input_ids: Tensor
    span_ids: Tensor
    aux: Tensor
    final: Tensor
    choice: Tensor


@dataclass(frozen=True)
class Sums:
    """Per step, sums over counted rows: added over micro-batches before anything is divided.

    Attributes:
        loss: [K], Σ over loss rows of −Σ p log q; carries the gradient.
        loss_rows: int64 [K], the loss's denominators.
        rows: int64 [K], the denominators of acc.
        hits: int64 [K], rows where the draft's argmax is the target's.
    """

    loss: Tensor
    loss_rows: Tensor
    rows: Tensor
    hits: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.loss + other.loss,
            self.loss_rows + other.loss_rows,
            self.rows + other.rows,
            self.hits + other.hits,
        )


def counted(span_ids: Tensor, choice: Tensor, t2d: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Counted rows, and those whose label is in the draft vocabulary.

    Args:
        span_ids: int64 [B, T].
        choice: int64 [B, T], the target's argmax.
        t2d: bool [V].

    Returns:
        Two bool [B, K, T]: `valid_rows`, and of these the rows t at step k with t2d[choice[t+1+k]].
    """
    valid = valid_rows(span_ids, steps)
    known = torch.nn.functional.pad(t2d[choice], (0, steps))  # [B, T + K]
    length = span_ids.shape[1]
    in_vocab = torch.stack([known[:, 1 + k : 1 + k + length] for k in range(steps)], dim=1)
    return valid, valid & in_vocab


def sums(
    drafter: Drafter,
    batch: Batch,
    draft_head: Tensor,
    vocab: DraftVocabulary,
    *,
    steps: int,
    out_of_vocab: OutOfVocab,
) -> Sums:
    """Loss and metrics of a batch, not yet divided.

    The teacher's logits over the draft vocabulary are computed once per position and reused, shifted, by each
    step: the teacher of the r-th of the P rows at step k is that of row r + k at step 0, for the rows behind
    a counted one are the next positions of the same answer.

    Args:
        draft_head: the target head's rows of the draft vocabulary, [Vd, H].
        vocab: on the batch's device.
    """
    valid, in_vocab = counted(batch.span_ids, batch.choice, vocab.t2d, steps)
    in_loss = in_vocab if out_of_vocab == "mask" else valid
    document, position = valid[:, 0].nonzero(as_tuple=True)  # [P] each
    rows, real = _side_by_side(valid[:, 0])
    teacher = batch.final[document, position + 1].to(draft_head.dtype) @ draft_head.T  # [P, Vd]
    choice = batch.choice[document, position + 1]  # [P]
    losses, hits = [], []
    for k, features in enumerate(forward(drafter, batch.input_ids, batch.aux, rows, steps)):
        # Rows out of the loss are misses: their label is not in the draft vocabulary.
        index = in_loss[document, k, position].nonzero().squeeze(1)
        # The head's logits are recomputed in the backward pass: [P, Vd] of each step would not fit in memory.
        loss, drafted = checkpoint(
            _soft_cross_entropy, drafter, features[real][index], teacher, index + k, use_reentrant=False
        )
        losses.append(loss)
        hits.append((vocab.target_ids[drafted] == choice[index + k]).sum())
    return Sums(torch.stack(losses), in_loss.sum((0, 2)), valid.sum((0, 2)), torch.stack(hits))


def _side_by_side(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The true positions of bool [B, T] moved left, int64 [B, R], 0 behind them; and which are real."""
    number = mask.sum(1)
    rows = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(number.max())]
    real = torch.arange(rows.shape[1], device=mask.device) < number[:, None]
    return rows * real, real


def _soft_cross_entropy(drafter: Drafter, features: Tensor, teacher: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Σ over rows of −Σ p log q, p being the target's softmax renormalised over the draft vocabulary.

    Args:
        features: gᵏ⁺¹, [n, H].
        teacher: the target's logits over the draft vocabulary, [P, Vd].
        at: int64 [n], the rows' teachers.

    Returns:
        The sum, and the draft's argmax, int64 [n].
    """
    draft = drafter.logits(features)  # [n, Vd]
    p = teacher[at].to(draft.dtype).softmax(dim=-1)
    return -(p * draft.log_softmax(dim=-1)).sum(), draft.argmax(dim=-1)


def loss(summed: Tensor, rows: Tensor, decay: float) -> Tensor:
    """Σ_k decayᵏ · (sum over the loss rows of step k / their number); a step without rows adds nothing.

    Args:
        summed: [K], `Sums.loss`, of a micro-batch or of all of them.
        rows: int64 [K], `Sums.loss_rows` over the whole global batch.
    """
    weights = decay ** torch.arange(len(summed), device=summed.device)
    return (weights * summed / rows.clamp(min=1)).sum()


def accuracy(hits: Tensor, rows: Tensor) -> list[float]:
    """acc_k: hits over counted rows, both int64 [K]; 0 for a step without rows."""
    return (hits / rows.clamp(min=1)).tolist()


def simulated_acceptance_length(acc: Sequence[float]) -> float:
    """Tokens a verify cycle would emit if steps failed independently: 1 + Σ_k Π_{j≤k} acc_j."""
    length = alive = 1.0
    for share in acc:
        alive *= share
        length += alive
    return length
