"""Checkpoints of a training run: whole files, the last few kept, none of them a pickle.

A file holds the tensors and, as JSON in its header, the rest. It appears complete or not at all.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors_torch
from torch import Tensor

from eaglet.files import atomic

_KEEP = 2


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write one file."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as file:
        file.write(safetensors_torch.save(on_cpu, metadata={"state": json.dumps(state)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the state of a file; None where there is none, or it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def save_step(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write the checkpoint of a step, and drop all but the last few."""
    save(folder / f"step-{step:09d}.safetensors", tensors, state)
    for old in _steps(folder)[:-_KEEP]:
        old.unlink(missing_ok=True)


def load_last(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The last checkpoint that can be read."""
    for path in reversed(_steps(folder)):
        if found := load(path):
            return found
    return None


def remove(folder: Path) -> None:
    """What a finished run needs no more."""
    for path in folder.glob("*.safetensors"):
        path.unlink()


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"))
