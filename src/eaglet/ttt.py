"""Training-time test: the drafter unrolled over its own features, its loss and its metrics.

Mathematics: eagle3.md, "Training-time test (TTT)" (Li et al. 2025, arXiv 2503.01840, section 3.2).
Row t at step k reads token x_{t+1+k}; its teacher is the target's distribution at position t+1+k; it predicts the
token at t+2+k.

Which rows count (the serving-exact mask): those with x_{t+1} … x_{t+2+k} in one answer of the assistant. A row that
counts at step k counts at every earlier one, so nothing is ever computed on the others but their step-0 keys.

Two denominators. `rows` are all counted rows: acc_k is over them, and where the target's choice is not in the draft
vocabulary the drafter cannot be right, at serving as here: a miss. `loss_rows` are those the loss averages over: with
out_of_vocab "mask" only the counted rows whose choice is in the draft vocabulary. So acc_k of the two settings compare.

Shapes: B documents, one a row, padded on the right to T; K steps; H hidden size; V and Vd vocabularies; P counted
rows of step 0 over the whole batch, in order of document and position.
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
        span_ids: int64 [B, T], 0 where the assistant did not write the token, else the number of its answer: two
            answers that touch have different numbers.
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
    choices = [(part @ head_weight.T).argmax(-1) for part in final.split(chunk)]
    return torch.cat(choices) if choices else torch.zeros(0, dtype=torch.int64, device=final.device)


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
    drafter: Drafter, batch: Batch, draft_head: Tensor, vocab: DraftVocabulary, steps: int, out_of_vocab: OutOfVocab
) -> Sums:
    """Loss and metrics of a batch, not yet divided.

    The teacher's logits over the draft vocabulary are computed once per position and reused, shifted, by every step:
    the teacher of the r-th counted row at step k is that of row r+k at step 0, the next positions of its answer.

    Args:
        draft_head: the target head's rows of the draft vocabulary, [Vd, H].
        vocab: on the batch's device.
    """
    valid, in_vocab = counted(batch.span_ids, batch.choice, vocab.t2d, steps)
    document, position = valid[:, 0].nonzero(as_tuple=True)  # [P] each
    hits_per_step: list[Tensor] = []
    loss_per_step: list[Tensor] = []
    if len(position):
        rows, real = _rows(valid[:, 0])
        features = forward(drafter, batch.input_ids, batch.aux, rows, steps)
        final = batch.final[document, position + 1]  # [P, H]
        teacher = final.to(draft_head.dtype) @ draft_head.T  # [P, Vd]
        choice = batch.choice[document, position + 1]  # [P]
    for k in range(steps):
        index = valid[document, k, position].nonzero().squeeze(1)  # rows of P that count at step k
        if len(index) == 0:
            loss_per_step.append(torch.zeros((), device=batch.aux.device))
            hits_per_step.append(torch.zeros((), dtype=torch.int64, device=batch.aux.device))
            continue
        weight = in_vocab[document, k, position][index] if out_of_vocab == "mask" else torch.ones_like(index)
        # The head's logits are recomputed in the backward pass: [P, Vd] of each step would not fit in memory.
        loss, drafted = checkpoint(
            _row_losses, drafter, features[k][real][index], teacher[index + k], weight, use_reentrant=False
        )
        loss_per_step.append(loss)
        hits_per_step.append((vocab.target_ids[drafted] == choice[index + k]).sum())
    rows_per_step = valid.sum((0, 2))
    return Sums(
        loss=torch.stack(loss_per_step),
        loss_rows=in_vocab.sum((0, 2)) if out_of_vocab == "mask" else rows_per_step,
        rows=rows_per_step,
        hits=torch.stack(hits_per_step),
    )
