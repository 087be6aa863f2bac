"""The optimisation loop: documents in, a trained drafter and a record per step out.

The recipe is SpecForge's (eagle3.md, "Optimiser"): AdamW without weight decay, linear warm-up, cosine to 0,
clipped gradients; weights and arithmetic in float32. A batch is N documents; it is computed in micro-batches
of similar length, all divided by the one number of counted rows of the whole batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglet import ttt
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter
from eaglet.errors import EagletError


class Document(Protocol):
    """One row of the data."""

    @property
    def sample(self) -> str:
        """Its name, for error messages."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [T]."""

    @property
    def span_ids(self) -> Tensor:
        """int64 [T], 0 where the assistant did not write the token, else the number of its answer."""

    def states(self) -> tuple[Tensor, Tensor]:
        """Read the target's states: streams low, mid, high [T, 3H], and after the final norm [T, H]."""


@dataclass(frozen=True)
class TrainSettings:
    """How the drafter is trained: params.yaml's section `train`, and the tokens of a micro-batch, padded."""

    ttt_steps: int
    epochs: int
    batch_documents: int
    learning_rate: float
    warmup_ratio: float
    loss_decay: float
    grad_clip: float
    out_of_vocab: ttt.OutOfVocab
    head_init: Literal["target", "random"]
    seed: int
    micro_batch_tokens: int = 4096


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step: its loss and acc per TTT step on the batch, before the update.

    `epoch` is from 1; `heldout` is `evaluate`'s record at the last step of an epoch, else None.
    """

    step: int
    epoch: int
    learning_rate: float
    loss: float
    acc: list[float]
    grad_norm: float
    heldout: dict[str, Any] | None


@dataclass(frozen=True)
class _Prepared:
    """A document, the target's choices int64 [T], and its counted rows and loss rows, int64 [K] each."""

    document: Document
    choice: Tensor
    rows: Tensor
    loss_rows: Tensor


def train(
    drafter: Drafter,
    documents: Sequence[Document],
    heldout: Sequence[Document],
    head_weight: Tensor,
    vocab: DraftVocabulary,
    *,
    settings: TrainSettings,
    on_step: Callable[[StepRecord], None],
) -> list[StepRecord]:
    """Train the drafter in place, on its device.

    Documents without a row in the loss are left out. States are read once to find the target's choices (which
    fixes the denominators), then once per epoch; never more than a micro-batch of them is held.

    Args:
        drafter: float32; its head is set first, as settings.head_init says.
        heldout: measured after each epoch; may be empty.
        head_weight: the target's head, [V, H].
        on_step: called with each record as it is made.

    Raises:
        EagletError: nothing to train on, states that are not finite, or a loss that is not.
    """
    if settings.head_init == "target":
        drafter.init_from_target(head_weight, vocab)
    vocab, head_weight = _on_device(drafter, vocab, head_weight)
    draft_head = head_weight[vocab.target_ids]
    prepared = [_prepare(document, head_weight, vocab, settings) for document in documents]
    prepared = [one for one in prepared if one.loss_rows[0] > 0]
    if not prepared:
        raise EagletError("no document has two answer tokens in a row that the draft vocabulary can teach")
    held = [_prepare(document, head_weight, vocab, settings) for document in heldout]
    steps_per_epoch = math.ceil(len(prepared) / settings.batch_documents)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(settings.seed)
    records: list[StepRecord] = []
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(len(prepared), generator=generator).tolist()
        for start in range(0, len(order), settings.batch_documents):
            batch = [prepared[index] for index in order[start : start + settings.batch_documents]]
            lr = learning_rate(len(records), settings.epochs * steps_per_epoch, settings)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss, acc = _backward(drafter, batch, draft_head, vocab, settings)
            norm = float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), settings.grad_clip))
            if not math.isfinite(loss) or not math.isfinite(norm):
                names = ", ".join(one.document.sample for one in batch)
                raise EagletError(f"step {len(records)}: loss {loss}, gradient {norm}, with the samples {names}")
            optimizer.step()
            optimizer.zero_grad()
            last = start + settings.batch_documents >= len(order)
            measured = _evaluate(drafter, held, draft_head, vocab, settings) if last and held else None
            records.append(StepRecord(len(records), epoch, lr, loss, acc, norm, measured))
            on_step(records[-1])
    return records


def evaluate(
    drafter: Drafter,
    documents: Sequence[Document],
    head_weight: Tensor,
    vocab: DraftVocabulary,
    settings: TrainSettings,
) -> dict[str, Any]:
    """Loss and simulated acceptance on stored states.

    Returns:
        {"loss", "acc": [K], "rows": [K] counted, "simulated_acceptance_length"}.

    Raises:
        EagletError: no counted row, or states that are not finite.
    """
    vocab, head_weight = _on_device(drafter, vocab, head_weight)
    prepared = [_prepare(document, head_weight, vocab, settings) for document in documents]
    if not any(one.rows[0] > 0 for one in prepared):
        raise EagletError("no document to evaluate on has two answer tokens in a row")
    return _evaluate(drafter, prepared, head_weight[vocab.target_ids], vocab, settings)


def learning_rate(step: int, total: int, settings: TrainSettings) -> float:
    """Of step 0 … total-1: linear up to the full rate at the warm-up's last step, then cosine towards 0."""
    warmup = round(settings.warmup_ratio * total)
    if step < warmup:
        return settings.learning_rate * ((step + 1) / warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def _on_device(drafter: Drafter, vocab: DraftVocabulary, head_weight: Tensor) -> tuple[DraftVocabulary, Tensor]:
    device = drafter.fc.weight.device
    return DraftVocabulary(vocab.d2t.to(device), vocab.t2d.to(device)), head_weight.to(device)


def _prepare(document: Document, head_weight: Tensor, vocab: DraftVocabulary, settings: TrainSettings) -> _Prepared:
    """The target's choices, once and for all epochs, and with them the number of counted rows.

    Only where a label can be: the other positions' choices are left at 0.
    """
    aux, final = document.states()
    if not (torch.isfinite(aux).all() and torch.isfinite(final).all()):
        raise EagletError(f"the hidden states of sample {document.sample} hold NaN or infinity")
    taught = torch.nn.functional.pad(ttt.valid_rows(document.span_ids[None], 1)[0, 0], (1, 0))[:-1]  # t + 1
    choice = torch.zeros_like(document.input_ids)
    choice[taught] = ttt.teacher_choice(final[taught].to(head_weight.device), head_weight).to(choice.device)
    t2d = vocab.t2d.to(choice.device)
    valid, in_vocab = ttt.counted(document.span_ids[None], choice[None], t2d, settings.ttt_steps)
    in_loss = in_vocab if settings.out_of_vocab == "mask" else valid
    return _Prepared(document, choice, valid.sum((0, 2)), in_loss.sum((0, 2)))


def _micro_batches(batch: Sequence[_Prepared], tokens: int, device: torch.device) -> Iterator[ttt.Batch]:
    """Documents of similar length together, at most `tokens` with the padding (a longer one stands alone)."""
    ordered = sorted(batch, key=lambda one: len(one.document.input_ids))
    while ordered:
        size = 1
        while size < len(ordered) and (size + 1) * len(ordered[size].document.input_ids) <= tokens:
            size += 1
        yield _collate(ordered[:size], device)
        ordered = ordered[size:]


def _collate(group: Sequence[_Prepared], device: torch.device) -> ttt.Batch:
    states = [one.document.states() for one in group]
    columns = (
        [one.document.input_ids for one in group],
        [one.document.span_ids for one in group],
        [aux for aux, _ in states],
        [final for _, final in states],
        [one.choice for one in group],
    )
    return ttt.Batch(*(pad_sequence(column, batch_first=True).to(device) for column in columns))


def _backward(
    drafter: Drafter,
    batch: Sequence[_Prepared],
    draft_head: Tensor,
    vocab: DraftVocabulary,
    settings: TrainSettings,
) -> tuple[float, list[float]]:
    """Accumulate the gradient of the batch's loss; returns the loss and acc."""
    device = draft_head.device
    loss_rows = torch.stack([one.loss_rows for one in batch]).sum(0).to(device)  # [K]
    total, hits = torch.zeros((), device=device), torch.zeros_like(loss_rows)
    for micro in _micro_batches(batch, settings.micro_batch_tokens, device):
        part = _sums(drafter, micro, draft_head, vocab, settings)
        loss = ttt.loss(part.loss, loss_rows, settings.loss_decay)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        hits += part.hits
    return float(total), ttt.accuracy(hits, torch.stack([one.rows for one in batch]).sum(0).to(device))


@torch.no_grad()
def _evaluate(
    drafter: Drafter,
    documents: Sequence[_Prepared],
    draft_head: Tensor,
    vocab: DraftVocabulary,
    settings: TrainSettings,
) -> dict[str, Any]:
    micros = _micro_batches(documents, settings.micro_batch_tokens, draft_head.device)
    parts = [_sums(drafter, micro, draft_head, vocab, settings) for micro in micros]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    acc = ttt.accuracy(whole.hits, whole.rows)
    return {
        "loss": float(ttt.loss(whole.loss, whole.loss_rows, settings.loss_decay)),
        "acc": acc,
        "rows": whole.rows.tolist(),
        "simulated_acceptance_length": ttt.simulated_acceptance_length(acc),
    }


def _sums(
    drafter: Drafter, micro: ttt.Batch, draft_head: Tensor, vocab: DraftVocabulary, settings: TrainSettings
) -> ttt.Sums:
    steps, out_of_vocab = settings.ttt_steps, settings.out_of_vocab
    return ttt.sums(drafter, micro, draft_head, vocab, steps=steps, out_of_vocab=out_of_vocab)
