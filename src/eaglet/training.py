"""The optimisation loop: documents in, a trained drafter and a record per step out.

Weights are float32; a step computes in `dtype` with copies of them (bfloat16 on a GPU), and their gradients arrive
as float32 sums. A step's batch is so many tokens of documents. It is computed in micro-batches, over all ranks, and
every row is divided by the one number of counted rows of the whole batch: neither the size of a micro-batch nor the
number of ranks changes what is learnt. The recipe behind the defaults: docs/benchmarks.md.

A run lives in a folder. It saves itself every few minutes and after each epoch; killed at any time, the next one goes
on from there and makes the same numbers as one that was never killed.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eaglet import checkpoint, loader, ttt
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter
from eaglet.errors import EagletError
from eaglet.loader import Example, Loader
from eaglet.params import TrainParams

_SAVE_EVERY = 300.0  # seconds
_BEST = "best.safetensors"
_RECORDS = "records.jsonl"


@dataclass(frozen=True)
class Record:
    """One optimiser step: its loss and acc per TTT step on the batch, before the update.

    `epoch` is from 1; `validation` is `evaluate`'s at the last step of an epoch, else None. What follows it is about
    this machine, not about the run's result: tokens/s, the share of the time spent waiting for data, matrix
    operations/s.
    """

    step: int
    epoch: int
    tokens: int
    learning_rate: float
    loss: float
    acc: list[float]
    grad_norm: float
    validation: dict[str, Any] | None
    tokens_per_second: float
    waited: float
    flops: float


@dataclass
class _State:
    """What a checkpoint holds besides tensors."""

    step: int = 0  # steps done
    best: tuple[float, int] | None = None  # simulated acceptance length, and the epoch

    @classmethod
    def of(cls, raw: dict[str, Any]) -> "_State":
        return cls(raw["step"], None if raw["best"] is None else (raw["best"][0], raw["best"][1]))


class _Sums(nn.Module):
    """`ttt.sums` as a module, so that it runs with copies of the weights in another type."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, batch: ttt.Batch, draft_head: Tensor, vocab: DraftVocabulary, weights: Tensor, sharpen: float
    ) -> ttt.Sums:
        return ttt.sums(self.drafter, batch, draft_head, vocab, weights, sharpen)


class Scorer:
    """What a drafter's rows are scored against: the target's choices and probabilities, in `dtype`."""

    def __init__(
        self, drafter: Drafter, head_weight: Tensor, vocab: DraftVocabulary, params: TrainParams, dtype: torch.dtype
    ) -> None:
        """On the drafter's device; `head_weight` is the target's head, [V, H]."""
        self.device = drafter.fc.weight.device
        self.params = params
        self.loader = Loader(vocab.t2d, params.ttt_steps, params.out_of_vocab, self.device)
        self._drafter, self._dtype = drafter, dtype
        self._vocab = DraftVocabulary(vocab.d2t.to(self.device), vocab.t2d.to(self.device))
        self._draft_head = head_weight[vocab.target_ids].to(self.device, dtype)
        self._sums = _Sums(drafter)

    def sums(self, micro: ttt.Batch, weights: Tensor) -> ttt.Sums:
        """See `ttt.sums`; with copies of the weights in `dtype`, whose gradients the weights get."""
        copies = {f"drafter.{name}": p.to(self._dtype) for name, p in self._drafter.named_parameters()}
        arguments = (micro, self._draft_head, self._vocab, weights, self.params.sharpen)
        part: ttt.Sums = torch.func.functional_call(self._sums, copies, arguments)
        return part

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Loss and simulated acceptance of the drafter as it is, over all ranks.

        Returns:
            {"loss", "acc": [K], "rows": [K] counted, "simulated_acceptance_length", "acceptance_length": of
            `ttt.chain`}.

        Raises:
            EagletError: no counted row.
        """
        chosen = [example for example in examples if example.rows[0] > 0]
        if not chosen:
            raise EagletError("no row to evaluate on has two answer tokens in a row")
        lengths = [example.length for example in chosen]
        rows, loss_rows = (torch.stack([getattr(one, name) for one in chosen]).sum(0) for name in ("rows", "loss_rows"))
        weights = ttt.loss_weights(loss_rows, self.params.loss_decay).to(self.device)
        mine = loader.share(range(len(chosen)), lengths, _ranks())[_rank()]
        groups = loader.fill(mine, lengths, self.params.micro_batch_tokens)
        losses, hits = self.zeros()
        emitted = torch.zeros(2, dtype=torch.int64, device=self.device)
        for micro in self.loader.batches([chosen[index] for index in group] for group in groups):
            part = self.sums(micro, weights)
            losses += part.losses
            hits += part.right.sum(1)
            emitted += torch.tensor(ttt.chain(part.right, micro.layout.segments), device=self.device)
        for total in (losses, hits, emitted):
            _sum_over_ranks(total)
        tokens, cycles = emitted.tolist()
        acc = ttt.accuracy(hits.cpu(), rows)
        return {
            "loss": float((losses * weights).sum()),
            "acc": acc,
            "rows": rows.tolist(),
            "simulated_acceptance_length": ttt.simulated_acceptance_length(acc),
            "acceptance_length": tokens / cycles,
        }

    def zeros(self) -> tuple[Tensor, Tensor]:
        """Sums of nothing: losses [K] and hits, int64 [K]."""
        steps = self.params.ttt_steps
        return torch.zeros(steps, device=self.device), torch.zeros(steps, dtype=torch.int64, device=self.device)


@dataclass
class Run:
    """A training run: what it learns from, and where it stands.

    Attributes:
        drafter: float32, on the device that computes; training sets its head first, as params.head_init says.
        examples: with at least one row in the loss each.
        validation: measured after each epoch; the epoch where its simulated acceptance length is greatest is the
            one that is kept. May be empty; then the last epoch is.
        head_weight: the target's head, [V, H].
        folder: where the run saves itself; this run's alone.
        dtype: of the arithmetic.
    """

    drafter: Drafter
    examples: Sequence[Example]
    validation: Sequence[Example]
    head_weight: Tensor
    vocab: DraftVocabulary
    params: TrainParams
    folder: Path
    dtype: torch.dtype = torch.float32
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises EagletError where the examples do not fill a batch."""
        self.scorer = Scorer(self.drafter, self.head_weight, self.vocab, self.params, self.dtype)
        self._loader = self.scorer.loader
        self._optimizers = optimizers(self.drafter, self.params)
        self._average = {name: p.detach().clone() for name, p in self.drafter.named_parameters()}
        self._state = _State()
        lengths = [example.length for example in self.examples]
        self._lengths = lengths
        if sum(lengths) < self.params.batch_tokens:
            raise EagletError(
                f"the {len(lengths)} rows to train on hold {sum(lengths):,} tokens, fewer than one batch of "
                f"train.batch_tokens {self.params.batch_tokens:,}: lower it, or add prompts"
            )
        self._plan = [
            (epoch, batch)
            for epoch in range(1, self.params.epochs + 1)
            for batch in loader.plan_epoch(lengths, self.params.batch_tokens, self.params.seed, epoch)
        ]

    @property
    def steps(self) -> int:
        """Optimiser steps in all."""
        return len(self._plan)

    @property
    def best(self) -> tuple[float, int] | None:
        """The greatest simulated acceptance length in validation, and its epoch."""
        return self._state.best

    def train(self, on_step: Callable[[Record], None]) -> None:
        """Train to the end, from where the folder says that the run stands; leaves the best weights in the drafter.

        Args:
            on_step: called with each record, those of before too.

        Raises:
            EagletError: a loss or gradient that is not finite; the last checkpoint is good.
        """
        self._resume()
        for record in self.records:
            on_step(record)
        saved = began = time.monotonic()
        batches = self._loader.batches(self._micro_batches(self._state.step))
        for step in range(self._state.step, self.steps):
            epoch, batch = self._plan[step]
            found = self._step(step, epoch, batch, batches)
            last = step + 1 == self.steps or self._plan[step + 1][0] != epoch
            measured = self._measure(epoch) if last and self.validation else None
            now = time.monotonic()
            record = Record(**found, validation=measured, **self._speed(found["tokens"], now - began))
            began = now
            self._state.step = step + 1
            self._write(record)
            on_step(record)
            if last or now - saved > _SAVE_EVERY:
                self._save()
                saved = time.monotonic()
        self._load_best()

    def _micro_batches(self, start: int) -> Iterator[list[Example]]:
        """This rank's, of all steps from `start` on."""
        for _, batch in self._plan[start:]:
            for group in self._mine(batch):
                yield [self.examples[index] for index in group]

    def _mine(self, batch: Sequence[int]) -> list[list[int]]:
        mine = loader.share(batch, self._lengths, _ranks())[_rank()]
        return loader.fill(mine, self._lengths, self.params.micro_batch_tokens)

    def _step(self, step: int, epoch: int, batch: list[int], batches: Iterator[ttt.Batch]) -> dict[str, Any]:
        """One update of the weights."""
        counts = torch.stack([self.examples[index].loss_rows for index in batch]).sum(0)
        weights = ttt.loss_weights(counts, self.params.loss_decay).to(self.scorer.device)
        rate = learning_rate(step, self.steps, self.params)
        self._loader.waited, self._flops = 0.0, 0.0
        losses, hits = self.scorer.zeros()
        for place, _ in enumerate(self._mine(batch)):
            micro = next(batches)
            if self.params.dropout:
                _drop(micro.aux, self.params.dropout, f"{self.params.seed}/{step}/{_rank()}/{place}")
            part = self.scorer.sums(micro, weights)
            part.loss.backward()  # type: ignore[no-untyped-call]
            losses += part.losses.detach()
            hits += part.right.sum(1)
            self._flops += 3 * operations(self.drafter, micro)
        parameters = list(self.drafter.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _sum_over_ranks(parameter.grad)
        _sum_over_ranks(losses)
        _sum_over_ranks(hits)
        norm = float(nn.utils.clip_grad_norm_(parameters, self.params.grad_clip))
        loss = float((losses * weights).sum())
        if not math.isfinite(loss) or not math.isfinite(norm):
            names = ", ".join(self.examples[index].name for index in batch[:20])
            more = f" and {len(batch) - 20} more" if len(batch) > 20 else ""
            raise EagletError(
                f"train: step {step} has loss {loss} and gradient norm {norm}; its rows are {names}{more}. Lower "
                f"train.learning_rate, or look at those rows; what was learnt before is kept in {self.folder}"
            )
        for optimizer, scale in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        # A young average would be mostly the random start.
        decay = min(self.params.average, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._average.values()), [p.detach() for p in parameters], 1 - decay)
        rows = torch.stack([self.examples[index].rows for index in batch]).sum(0)
        return {
            "step": step,
            "epoch": epoch,
            "tokens": sum(self._lengths[index] for index in batch),
            "learning_rate": rate,
            "loss": loss,
            "acc": ttt.accuracy(hits.cpu(), rows),
            "grad_norm": norm,
        }

    def _speed(self, tokens: int, seconds: float) -> dict[str, Any]:
        return {
            "tokens_per_second": tokens / seconds,
            "waited": self._loader.waited / seconds,
            "flops": self._flops * _ranks() / seconds,
        }

    def _measure(self, epoch: int) -> dict[str, Any]:
        """Validate the averaged weights, and keep them if they are the best."""
        with self._averaged():
            measured = self.scorer.evaluate(self.validation)
        score = measured["simulated_acceptance_length"]
        if self._state.best is None or score > self._state.best[0]:
            self._state.best = (score, epoch)
            if _rank() == 0:
                checkpoint.save(self.folder / _BEST, self._average, {"epoch": epoch})
        return measured

    def _averaged(self) -> "_Averaged":
        return _Averaged(self.drafter, self._average)

    def _load_best(self) -> None:
        """The weights to export into the drafter."""
        _wait_for_ranks()
        found = checkpoint.load(self.folder / _BEST) if self.validation else None
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(self._average[name] if found is None else found[0][name])

    def _write(self, record: Record) -> None:
        self.records.append(record)
        if _rank() == 0:
            with (self.folder / _RECORDS).open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def _save(self) -> None:
        if _rank() > 0:
            return
        tensors: dict[str, Tensor] = {f"drafter.{name}": p for name, p in self.drafter.named_parameters()}
        tensors |= {f"average.{name}": average for name, average in self._average.items()}
        for place, (optimizer, _) in enumerate(self._optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{place}.{index}.{name}": value for name, value in values.items()}
        checkpoint.save_step(self.folder, self._state.step, tensors, asdict(self._state))

    def _resume(self) -> None:
        """Go on from the folder's last checkpoint, with the records up to it; or begin."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = checkpoint.load_last(self.folder)
        if found is None and self.params.head_init == "target":
            self.drafter.init_from_target(self.head_weight, self.vocab)
            self._average["lm_head.weight"].copy_(self.drafter.lm_head.weight.detach())
        if found is not None:
            tensors, raw = found
            self._state = _State.of(raw)
            with torch.no_grad():
                for name, parameter in self.drafter.named_parameters():
                    parameter.copy_(tensors[f"drafter.{name}"])
                    self._average[name].copy_(tensors[f"average.{name}"])
            for place, (optimizer, _) in enumerate(self._optimizers):
                state: dict[int, dict[str, Tensor]] = {}
                for name, tensor in tensors.items():
                    if name.startswith(f"optimizer.{place}."):
                        _, _, index, key = name.split(".")
                        state.setdefault(int(index), {})[key] = tensor
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        _wait_for_ranks()  # rank 0 rewrites what all read
        path = self.folder / _RECORDS
        lines = path.read_text().splitlines()[: self._state.step] if path.exists() else []
        self.records = [Record(**json.loads(line)) for line in lines]
        _wait_for_ranks()
        if _rank() == 0:
            path.write_text("".join(line + "\n" for line in lines))


class _Averaged:
    """The drafter with other weights, for a while."""

    def __init__(self, drafter: Drafter, weights: dict[str, Tensor]) -> None:
        self._parameters, self._weights = dict(drafter.named_parameters()), weights

    def __enter__(self) -> None:
        self._own = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._copy(self._weights)

    def __exit__(self, *_: object) -> None:
        self._copy(self._own)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(source[name])


def learning_rate(step: int, total: int, params: TrainParams) -> float:
    """Of step 0 … total-1: linear up to the full rate at the warm-up's last step, then cosine towards 0."""
    warmup = round(params.warmup_ratio * total)
    if step < warmup:
        return params.learning_rate * ((step + 1) / warmup)
    return params.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def optimizers(drafter: Drafter, params: TrainParams) -> list[tuple[torch.optim.Optimizer, float]]:
    """Those that update the weights, each with its factor on the learning rate.

    With "muon" the matrices of the layer are Muon's (Jordan et al. 2024), as PyTorch has it, at a rate matched to
    AdamW's; the head and the norms stay with AdamW.
    """
    fused = drafter.fc.weight.is_cuda
    named = dict(drafter.named_parameters())
    inner = [p for name, p in named.items() if p.dim() == 2 and name != "lm_head.weight"]
    if params.optimizer == "adamw":
        inner = []
    rest = [p for p in named.values() if not any(p is one for one in inner)]
    decayed = [{"params": [p for p in rest if p.dim() == 2], "weight_decay": params.weight_decay}]
    decayed += [{"params": [p for p in rest if p.dim() != 2], "weight_decay": 0.0}]
    found: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.AdamW(decayed, lr=params.learning_rate, fused=fused), 1.0)
    ]
    if inner:
        muon = torch.optim.Muon(
            inner, lr=params.learning_rate, weight_decay=params.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        found.append((muon, 1.0))
    return found


def _drop(aux: Tensor, share: float, seed: str) -> None:
    """Dropout in place; the seed alone says what is dropped, so that a run that goes on drops the same."""
    generator = torch.Generator(aux.device).manual_seed(random.Random(seed).getrandbits(63))
    aux.mul_(torch.empty_like(aux).bernoulli_(1 - share, generator=generator)).div_(1 - share)


def operations(drafter: Drafter, batch: ttt.Batch) -> float:
    """Floating-point operations of the matrix products in one forward pass; the backward pass takes twice as many.

    Attention's own products are left out: at 4,096 tokens they are a few per cent.
    """
    layer = drafter.midlayer

    def size(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters() if p.dim() == 2)

    positions, rows, steps = len(batch.aux), len(batch.layout.rows), len(batch.layout.row_ids)
    keys = size(layer.self_attn.k_proj, layer.self_attn.v_proj)
    total = positions * (size(drafter.fc) + keys)
    total += rows * (steps * (size(layer.self_attn, layer.mlp) - keys) + (steps - 1) * keys)
    total += len(batch.labels) * size(drafter.lm_head)
    return 2.0 * total


@contextmanager
def ranks() -> Iterator[tuple[int, torch.device]]:
    """This process's rank and device; with torchrun's environment, among the others that it started."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" not in os.environ:
        yield 0, device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), device
    finally:
        dist.destroy_process_group()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum_over_ranks(tensor: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(tensor)


def _wait_for_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()
