"""Token ids and loss masks of all rows: one Parquet file, read and written whole."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eaglet.errors import EagletError
from eaglet.files import atomic

_COLUMNS = ("sample", "id", "source", "heldout", "greedy", "input_ids", "loss_mask", "turn_starts")


@dataclass(frozen=True)
class Row:
    """One sample.

    Attributes:
        input_ids: int32 [T].
        loss_mask: bool [T], true where the assistant wrote the token, its end-of-turn included.
        turn_starts: where each answer begins: two answers may touch with nothing between them.
        greedy: the target wrote the answers greedily, so head(final) must predict them.
    """

    id: str
    source: str
    heldout: bool
    greedy: bool
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    turn_starts: list[int]

    @property
    def sample(self) -> str:
        """The name of the row's hidden states: they follow from its token ids."""
        return hashlib.sha256(self.input_ids.astype("<i4").tobytes()).hexdigest()[:32]

    @property
    def span_ids(self) -> npt.NDArray[np.int64]:
        """int64 [T]: 0 outside the answers, else the number of the answer, from 1."""
        starts = np.zeros(len(self.input_ids), dtype=np.int64)
        starts[self.turn_starts] = 1
        return np.where(self.loss_mask, np.cumsum(starts), 0)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, in order."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table(
        {
            "sample": pa.array([row.sample for row in rows], pa.string()),
            "id": pa.array([row.id for row in rows], pa.string()),
            "source": pa.array([row.source for row in rows], pa.string()),
            "heldout": pa.array([row.heldout for row in rows], pa.bool_()),
            "greedy": pa.array([row.greedy for row in rows], pa.bool_()),
            "input_ids": pa.array([row.input_ids for row in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array([row.loss_mask for row in rows], pa.list_(pa.bool_())),
            "turn_starts": pa.array([row.turn_starts for row in rows], pa.list_(pa.int32())),
        }
    )
    with atomic(path) as file:
        pa.parquet.write_table(table, file, compression="zstd")


def read(path: Path) -> list[Row]:
    """Read the rows.

    Raises:
        EagletError: missing, not such a file, or a row whose columns do not fit together.
    """
    import pyarrow as pa
    import pyarrow.parquet

    if not path.is_file():
        raise EagletError(f"{path} is missing: run `dvc repro tokenize`, or `dvc pull`")
    try:
        table = pa.parquet.read_table(path, columns=list(_COLUMNS))
    except (pa.ArrowException, OSError) as error:
        raise EagletError(f"{path} cannot be read ({error}): run `dvc repro --force tokenize`") from None
    columns = [table[name] for name in _COLUMNS]
    rows = []
    for number in range(table.num_rows):
        sample, name, source, heldout, greedy = (columns[place][number].as_py() for place in range(5))
        ids, mask, starts = (columns[place][number].values.to_numpy(zero_copy_only=False) for place in range(5, 8))
        row = Row(name, source, heldout, greedy, ids.copy(), mask.copy(), starts.tolist())  # Arrow's are read-only
        if len(ids) != len(mask) or row.sample != sample:
            raise EagletError(f"{path}: row {number + 1} ({name}) is damaged: run `dvc repro --force tokenize`")
        rows.append(row)
    return rows
