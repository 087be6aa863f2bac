"""Which documents make which step, and their states, read by threads before the step needs them.

A plan is a matter of lengths and a seed alone, so any process, and any later run, makes the same one: a run that
goes on begins at the step where the last one stopped, and reads nothing that came before.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglet import ttt

_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = _THREADS + 2  # micro-batches held ready


@dataclass(frozen=True)
class Example:
    """A row of the data, read when it is needed.

    Attributes:
        name: for messages.
        length: tokens.
        rows: int64 [K], counted rows of each step.
        loss_rows: int64 [K], those of them in the loss.
        load: reads it, with the target's states.
    """

    name: str
    length: int
    rows: Tensor
    loss_rows: Tensor
    load: Callable[[], ttt.Document]

    @classmethod
    def of(
        cls,
        name: str,
        span_ids: Tensor,
        choice: Tensor,
        load: Callable[[], ttt.Document],
        *,
        t2d: Tensor,
        steps: int,
        out_of_vocab: ttt.OutOfVocab,
    ) -> "Example":
        """With its rows counted; `span_ids` and `choice` are the document's."""
        valid, known = ttt.counted(span_ids, choice, t2d, steps)
        in_loss = known if out_of_vocab == "mask" else valid
        return cls(name, len(span_ids), valid.sum(1), in_loss.sum(1), load)


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The documents of each batch: all of them, shuffled; a batch is full where the next would not fit.

    A document longer than `batch_tokens` is a batch of its own.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return fill(order, lengths, batch_tokens)


def fill(order: Iterable[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Documents in order, cut where the next one would make a part longer than `tokens`."""
    parts: list[list[int]] = []
    held = 0
    for index in order:
        if not parts or held + lengths[index] > tokens:
            parts.append([])
            held = 0
        parts[-1].append(index)
        held += lengths[index]
    return parts


def share(batch: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """A batch's documents over ranks, the longest first, each to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for index in sorted(batch, key=lambda index: (-lengths[index], index)):
        rank = held.index(min(held))
        shares[rank].append(index)
        held[rank] += lengths[index]
    return shares


class Loader:
    """Packs micro-batches in threads, some ahead of their use; counts the seconds that their user waited."""

    def __init__(self, t2d: Tensor, steps: int, out_of_vocab: ttt.OutOfVocab, device: torch.device) -> None:
        self._t2d, self._steps, self._out_of_vocab = t2d, steps, out_of_vocab
        self._device = device
        self.waited = 0.0

    def batches(self, groups: Iterable[Sequence[Example]]) -> Iterator[ttt.Batch]:
        """One batch a group, on the device, in order.

        Raises:
            EagletError: what reading a row's states raises.
        """
        waiting: deque[Future[ttt.Batch]] = deque()
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="loader")
        source = iter(groups)
        try:
            while True:
                while len(waiting) < _AHEAD and (group := next(source, None)) is not None:
                    waiting.append(pool.submit(self._pack, group))
                if not waiting:
                    return
                began = time.monotonic()
                batch = waiting.popleft().result()
                self.waited += time.monotonic() - began
                yield batch.to(self._device)
        finally:
            pool.shutdown(cancel_futures=True)

    def _pack(self, group: Sequence[Example]) -> ttt.Batch:
        documents = [example.load() for example in group]
        pinned = self._device.type == "cuda"
        return ttt.pack(documents, self._t2d, steps=self._steps, out_of_vocab=self._out_of_vocab, pinned=pinned)
