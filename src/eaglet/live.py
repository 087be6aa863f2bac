"""Live metrics of a training run: DVCLive's files, which `dvc plots` draws, and TensorBoard or W&B where installed."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from eaglet import ttt
from eaglet.training import Record, Run


def numbers(record: Record, rate: float | None) -> dict[str, float]:
    """What is logged of a step: name → value; `rate` is the machine's, in matrix operations/s."""
    found: dict[str, float] = {
        "loss": record.loss,
        **{f"acc/{k}": acc for k, acc in enumerate(record.acc)},
        "simulated_acceptance_length": ttt.simulated_acceptance_length(record.acc),
        "learning_rate": record.learning_rate,
        "grad_norm": record.grad_norm,
        "tokens_per_second": record.tokens_per_second,
        "data_wait_share": record.waited,
    }
    if rate:
        found["mfu"] = record.flops / rate
    if torch.cuda.is_available():
        found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if record.validation is not None:
        found["validation/loss"] = record.validation["loss"]
        found |= {f"validation/acc/{k}": acc for k, acc in enumerate(record.validation["acc"])}
        found["validation/simulated_acceptance_length"] = record.validation["simulated_acceptance_length"]
    return found


@contextmanager
def metrics(folder: Path, run: Run, rank: int) -> Iterator[Callable[[Record], None]]:
    """A function that logs a record; on rank 0 alone. A run that goes on logs its earlier records again first."""
    if rank > 0:
        yield lambda record: None
        return
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvclive import Live  # type: ignore[attr-defined]

    rate = matrix_rate(run.drafter.fc.weight.device, run.dtype)
    with (
        Live(str(folder), dvcyaml=None, save_dvc_exp=False, report=None) as shown,
        _tensorboard(run.folder) as tensorboard,
        _wandb(run) as wandb,
    ):

        def log(record: Record) -> None:
            found = numbers(record, rate)
            for name, value in found.items():
                shown.log_metric(name, value)
            shown.next_step()
            if tensorboard is not None:
                for name, value in found.items():
                    tensorboard.add_scalar(name, value, record.step)
            if wandb is not None:
                wandb.log(found, step=record.step)

        yield log


def _tensorboard(folder: Path) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return nullcontext()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))


def _wandb(run: Run) -> Any:
    """Offline unless WANDB_MODE says otherwise: nothing is sent that nobody asked to send."""
    if importlib.util.find_spec("wandb") is None:
        return nullcontext()
    import wandb  # type: ignore[import-not-found]

    os.environ.setdefault("WANDB_MODE", "offline")
    return wandb.init(project="eaglet", dir=str(run.folder), config=vars(run.params))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """The best rate of a large matrix product here, in operations/s; None without a GPU."""
    if device.type != "cuda":
        return None
    size, rounds = 8192, 10
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(3):
        one @ other
    start.record()
    for _ in range(rounds):
        one @ other
    end.record()
    torch.cuda.synchronize()
    return float(2 * size**3 * rounds / (start.elapsed_time(end) / 1000))
