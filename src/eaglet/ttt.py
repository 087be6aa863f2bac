"""Training-time test: the drafter unrolled over its own features, its loss and its metrics.

Mathematics: eagle3.md, "Training-time test (TTT)" (Li et al. 2025, arXiv 2503.01840, section 3.2).
Row t at step k reads token x_{t+1+k}; its teacher is the target's distribution at position t+1+k; it predicts
the token at t+2+k.

Which rows count (the serving-exact mask): those with x_{t+1} … x_{t+2+k} in one answer of the assistant. A
row that counts at step k counts at every earlier one, so of the others only the step-0 keys are computed. The rows
that count lie side by side, an answer after the other, and so each answer is a segment of the attention: its rows
see the step-0 keys of its document up to themselves.

Two denominators. `rows` are all counted rows: acc_k is over them, and where the target's choice is not in the
draft vocabulary the drafter cannot be right, at serving as here: a miss. `loss_rows` are those that the loss
averages over: with out_of_vocab "mask" only the counted rows whose choice is in the draft vocabulary. So
acc_k means the same under both settings.

Shapes: N tokens of documents that lie one behind the other; T of one document; K steps; H hidden size; V and Vd
vocabularies; P rows that count at step 0, in order; S step-0 keys; n rows of all steps in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from eaglet.attention import KeyValues, Segments
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter
from eaglet.loss import soft_cross_entropy

OutOfVocab = Literal["mask", "renormalise"]
_CHUNK_ELEMENTS = 1 << 25  # of full-vocabulary logits held at a time: 128 MiB in float32


@dataclass(frozen=True)
class Document:
    """A row of the data with its states.

    Attributes:
        input_ids: int64 [T].
        span_ids: int64 [T], see `valid_rows`.
        choice: int64 [T], the target's full-vocabulary argmax at each position that an answer's token follows.
        streams: of the target, low, mid, high, [T, H] each.
        final: after the target's final norm, [T, H].
    """

    input_ids: Tensor
    span_ids: Tensor
    choice: Tensor
    streams: Sequence[Tensor]
    final: Tensor


def valid_rows(span_ids: Tensor, steps: int) -> Tensor:
    """The serving-exact mask.

    Args:
        span_ids: int64 [T], 0 where the assistant did not write the token, else the number of its answer:
            two answers that touch have different numbers.
        steps: K.

    Returns:
        bool [K, T]: row t counts at step k, that is x_{t+1} … x_{t+2+k} all lie in one answer.
    """
    length = len(span_ids)
    padded = torch.nn.functional.pad(span_ids, (0, steps + 2))
    # goes_on[p]: positions p and p+1 are in the same answer
    goes_on = (padded[:-1] > 0) & (padded[:-1] == padded[1:])  # [T + K + 1]
    return torch.stack([goes_on[1 + k : 1 + k + length] for k in range(steps)]).cummin(0).values


def counted(span_ids: Tensor, choice: Tensor, t2d: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Counted rows, and those whose label is in the draft vocabulary.

    Args:
        span_ids: int64 [T].
        choice: int64 [T], the target's argmax.
        t2d: bool [V].

    Returns:
        Two bool [K, T]: `valid_rows`, and of these the rows t at step k with t2d[choice[t+1+k]].
    """
    valid = valid_rows(span_ids, steps)
    known = torch.nn.functional.pad(t2d[choice], (0, steps))  # [T + K]
    length = len(span_ids)
    return valid, valid & torch.stack([known[1 + k : 1 + k + length] for k in range(steps)])


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
class Layout:
    """Documents one behind the other, and the rows that are computed.

    Attributes:
        next_ids: int64 [N], x_{t+1} of each position.
        positions: int64 [N], t within the document.
        rows: int64 [P], places among the N.
        row_ids: int64 [K, P], x_{t+1+k} of each row.
        keys: int64 [S], the places whose step-0 keys the rows see, as `segments` orders them.
    """

    next_ids: Tensor
    positions: Tensor
    rows: Tensor
    row_ids: Tensor
    keys: Tensor
    segments: Segments

    @classmethod
    def of(cls, input_ids: Sequence[Tensor], wanted: Sequence[Tensor], steps: int) -> "Layout":
        """Of documents int64 [T] and the rows wanted of each, bool [T], at least one in all."""
        ids = torch.nn.functional.pad(torch.cat(list(input_ids)), (0, steps + 1))
        rows, keys, counts, start = [], [], list[tuple[int, int]](), 0
        for document, mask in zip(input_ids, wanted, strict=True):
            places = mask.nonzero().flatten()
            for run in torch.tensor_split(places, (places.diff() != 1).nonzero().flatten() + 1):
                if len(run):
                    rows.append(start + run)
                    keys.append(start + torch.arange(int(run[-1]) + 1))
                    counts.append((len(rows[-1]), len(keys[-1])))
            start += len(document)
        row = torch.cat(rows)
        return cls(
            next_ids=ids[1 : 1 + start],
            positions=torch.cat([torch.arange(len(document)) for document in input_ids]),
            rows=row,
            row_ids=torch.stack([ids[row + 1 + k] for k in range(steps)]),
            keys=torch.cat(keys),
            segments=Segments.of(*zip(*counts, strict=True)),
        )

    def to(self, device: torch.device) -> "Layout":
        """On another device."""
        return _moved(self, device)


@dataclass(frozen=True)
class Batch:
    """Documents one behind the other, with what their rows are taught.

    Attributes:
        aux: the streams low, mid, high, [N, 3H].
        final: what the target's head reads for the teacher of each row at step 0, that is at t + 1, [P, H]. The
            teacher of row r at step k is that of row r + k at step 0: the next positions of the same answer.
        loss_step, loss_row: int64 [n], step and row of all that is in the loss, step by step.
        labels: int64 [n], the target's choices there.
    """

    layout: Layout
    aux: Tensor
    final: Tensor
    loss_step: Tensor
    loss_row: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Batch":
        """On another device; from pinned memory without a wait."""
        return _moved(self, device)


_Parts = TypeVar("_Parts", Layout, Batch)


def _moved(value: _Parts, device: torch.device) -> _Parts:
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    moved: dict[str, Any] = {
        name: part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device)
        for name, part in parts.items()
    }
    return replace(value, **moved)


def pack(
    documents: Sequence[Document], t2d: Tensor, *, steps: int, out_of_vocab: OutOfVocab, pinned: bool = False
) -> Batch:
    """Documents as a batch, nothing padded. At least one row must count.

    Args:
        t2d: bool [V].
        pinned: put the states where a GPU can fetch them by itself.
    """
    masks = [counted(one.span_ids, one.choice, t2d, steps) for one in documents]
    layout = Layout.of([one.input_ids for one in documents], [valid[0] for valid, _ in masks], steps)
    in_loss = torch.cat([known if out_of_vocab == "mask" else valid for valid, known in masks], 1)
    step, row = in_loss[:, layout.rows].nonzero(as_tuple=True)
    choice = torch.cat([one.choice for one in documents])
    hidden, dtype = documents[0].final.shape[1], documents[0].final.dtype
    aux = torch.empty(len(choice), 3 * hidden, dtype=dtype, pin_memory=pinned)
    final = torch.empty(len(layout.rows), hidden, dtype=dtype, pin_memory=pinned)
    start = first = 0
    for one, (valid, _) in zip(documents, masks, strict=True):
        for place, stream in enumerate(one.streams):
            aux[start : start + len(stream), place * hidden : (place + 1) * hidden] = stream
        taught = one.final[valid[0].nonzero().flatten() + 1]
        final[first : first + len(taught)] = taught
        start, first = start + len(one.input_ids), first + len(taught)
    return Batch(layout, aux, final, step, row, choice[layout.rows + 1][row + step])


def forward(drafter: Drafter, layout: Layout, aux: Tensor) -> list[Tensor]:
    """The features of each step, teacher-forced: K tensors gᵏ⁺¹ [P, H], before the norm.

    Args:
        aux: [N, 3H].
    """
    features = drafter.fuse(aux)  # g⁰ [N, H]
    everywhere = drafter.context(features, layout.next_ids, layout.positions)
    context = KeyValues(*(x.index_select(0, layout.keys) for x in everywhere))
    features, positions = features.index_select(0, layout.rows), layout.positions[layout.rows]
    outputs: list[Tensor] = []
    own: KeyValues | None = None
    for k, tokens in enumerate(layout.row_ids):
        features, own = drafter.step(k, features, tokens, positions, context, layout.segments, own)
        outputs.append(features)
    return outputs


def logits(drafter: Drafter, input_ids: Tensor, aux: Tensor, steps: int) -> Tensor:
    """Draft logits of all rows of one document: [K, T, Vd].

    Rows whose token x_{t+1+k} lies beyond the document are computed with token 0.

    Args:
        input_ids: int64 [T].
        aux: [T, 3H].
    """
    layout = Layout.of([input_ids], [torch.ones_like(input_ids, dtype=torch.bool)], steps)
    return torch.stack([drafter.logits(features) for features in forward(drafter, layout, aux)])


@dataclass(frozen=True)
class Sums:
    """What a batch adds to the global batch's loss and metrics.

    Attributes:
        loss: Σ over loss rows of weight · (−Σ p log q), a number; carries the gradient.
        losses: [K], Σ over loss rows of −Σ p log q.
        right: bool [K, P], where the draft's argmax is the target's. Rows out of the loss are misses.
    """

    loss: Tensor
    losses: Tensor
    right: Tensor


def sums(
    drafter: Drafter, batch: Batch, draft_head: Tensor, vocab: DraftVocabulary, weights: Tensor, sharpen: float = 0.0
) -> Sums:
    """Loss and metrics of a batch.

    Args:
        draft_head: the target head's rows of the draft vocabulary, [Vd, H].
        vocab: on the batch's device.
        weights: [K], what a row of each step counts, see `loss_weights`.
        sharpen: see `loss.soft_cross_entropy`.
    """
    teacher = batch.final.to(draft_head.dtype) @ draft_head.T  # [P, Vd]
    stacked = torch.stack(forward(drafter, batch.layout, batch.aux))  # [K, P, H]
    features = drafter.norm(stacked[batch.loss_step, batch.loss_row])
    at, each = batch.loss_row + batch.loss_step, weights[batch.loss_step]
    loss, losses, chosen = soft_cross_entropy(features, drafter.lm_head.weight, teacher, at, each, sharpen)
    steps = torch.zeros(len(stacked), dtype=losses.dtype, device=losses.device)
    right = torch.zeros(stacked.shape[:2], dtype=torch.bool, device=losses.device)
    right[batch.loss_step, batch.loss_row] = vocab.target_ids[chosen] == batch.labels
    return Sums(loss, steps.index_add(0, batch.loss_step, losses), right)


def loss_weights(loss_rows: Tensor, decay: float) -> Tensor:
    """decayᵏ / the loss rows of step k over the whole global batch; int64 [K] to float32 [K]."""
    return decay ** torch.arange(len(loss_rows)) / loss_rows.clamp(min=1)


def accuracy(hits: Tensor, rows: Tensor) -> list[float]:
    """acc_k: hits over counted rows, both int64 [K]; 0 for a step without rows."""
    return (hits / rows.clamp(min=1)).tolist()


def chain(right: Tensor, segments: Segments) -> tuple[int, int]:
    """What greedy chains of K drafted tokens would emit in the answers of a batch: tokens, and verify cycles.

    A cycle at row t accepts the steps up to the first that is wrong, emits one token more, and the next cycle is
    behind them. As long as every step was right, what the drafter reads is what it wrote itself: where the answers
    are the target's greedy ones, teacher-forced rows give what `acceptance.decode` gives, tokens cut off by an
    answer's end not counted.

    Args:
        right: bool [K, P], see `Sums`.
    """
    accepted = right.long().cumprod(0).sum(0).tolist()  # [P]
    tokens = cycles = 0
    for rows, _ in segments.slices():
        place = rows.start
        while place < rows.stop:
            place += accepted[place] + 1
            cycles += 1
        tokens += rows.stop - rows.start
    return tokens, cycles


def simulated_acceptance_length(acc: Sequence[float]) -> float:
    """Tokens a verify cycle would emit if steps failed independently: 1 + Σ_k Π_{j≤k} acc_j."""
    length = alive = 1.0
    for share in acc:
        alive *= share
        length += alive
    return length
