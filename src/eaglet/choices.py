"""The target's choice at each position that an answer's token follows: found once, by the audit, for all of training.

One file for all rows, in order: int32 ids of the full vocabulary, and a hash of the rows' names.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors_torch

from eaglet.errors import EagletError
from eaglet.files import atomic, digest
from eaglet.rows import Row


def places(row: Row) -> npt.NDArray[np.int64]:
    """The positions of a row that an answer's token follows."""
    return np.flatnonzero(row.loss_mask[1:])


def save(path: Path, rows: Sequence[Row], choices: Sequence[torch.Tensor]) -> None:
    """Write the choices of rows, int64 [places] each."""
    together = torch.cat([torch.zeros(0, dtype=torch.int32), *(one.to(torch.int32) for one in choices)])
    with atomic(path) as file:
        file.write(safetensors_torch.save({"choices": together}, metadata={"rows": _names(rows)}))


def load(path: Path, rows: Sequence[Row]) -> list[torch.Tensor]:
    """The choices of each row, int32 [places].

    Raises:
        EagletError: no file, a damaged one, or one of other rows.
    """
    again = "run `dvc repro audit`"
    try:
        with safe_open(path, framework="pt") as file:
            of, together = file.metadata()["rows"], file.get_tensor("choices")
    except FileNotFoundError:
        raise EagletError(f"{path} is missing: {again}, or `dvc pull`") from None
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise EagletError(f"{path} cannot be read ({error}): {again}") from None
    counts = [len(places(row)) for row in rows]
    if of != _names(rows) or len(together) != sum(counts):
        raise EagletError(f"{path} holds the choices of other rows than data/rows.parquet: {again}")
    return list(together.split(counts))


def spread(row: Row, choices: torch.Tensor) -> torch.Tensor:
    """int64 [T]: a row's choices at their positions, 0 elsewhere."""
    found = torch.zeros(len(row.input_ids), dtype=torch.int64)
    found[torch.from_numpy(places(row))] = choices.long()
    return found


def _names(rows: Sequence[Row]) -> str:
    return digest([row.sample for row in rows])
