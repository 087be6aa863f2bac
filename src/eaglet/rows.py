"""Token ids and loss masks of all rows: one Parquet file, read and written whole."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eaglet.errors import EagletError
from eaglet.files import atomic


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
    def prompt_ids(self) -> list[int]:
        """What stands before the first answer."""
        ids: list[int] = self.input_ids[: self.turn_starts[0]].tolist()
        return ids

    @property
    def span_ids(self) -> npt.NDArray[np.int64]:
        """int64 [T]: 0 outside the answers, else the number of the answer, from 1."""
        starts = np.zeros(len(self.input_ids), dtype=np.int64)
        starts[self.turn_starts] = 1
        return np.where(self.loss_mask, np.cumsum(starts), 0)


def _schema() -> Any:
    import pyarrow as pa

    def listed(kind: Any) -> Any:
        return pa.list_(pa.field("element", kind))  # the name that Parquet gives it

    return pa.schema(
        {
            "sample": pa.string(),
            "id": pa.string(),
            "source": pa.string(),
            "heldout": pa.bool_(),
            "greedy": pa.bool_(),
            "input_ids": listed(pa.int32()),
            "loss_mask": listed(pa.bool_()),
            "turn_starts": listed(pa.int32()),
        }
    )


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, in order."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table([[getattr(row, name) for row in rows] for name in _schema().names], schema=_schema())
    with atomic(path) as file:
        pa.parquet.write_table(table, file, compression="zstd", write_page_checksum=True)


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
        table = pa.parquet.read_table(path, columns=_schema().names, page_checksum_verification=True).cast(_schema())
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EagletError(f"{path} cannot be read ({reason}): run `dvc repro --force tokenize`") from None
    columns = table.columns
    rows = []
    for number in range(table.num_rows):
        sample, name, source, heldout, greedy = (columns[place][number].as_py() for place in range(5))
        ids, mask, starts = (columns[place][number].values.to_numpy(zero_copy_only=False) for place in range(5, 8))
        row = Row(name, source, heldout, greedy, ids.copy(), mask.copy(), starts.tolist())  # Arrow's are read-only
        if len(ids) != len(mask) or row.sample != sample:
            raise EagletError(f"{path}: row {number + 1} ({name}) is damaged: run `dvc repro --force tokenize`")
        rows.append(row)
    return rows


def heldout(path: Path, count: int) -> list[Row]:
    """Up to `count` held-out rows, one source after the other in turn.

    Raises:
        EagletError: none is held out; or as `read`.
    """
    by_source: dict[str, list[Row]] = {}
    for row in read(path):
        if row.heldout:
            by_source.setdefault(row.source, []).append(row)
    if not by_source:
        raise EagletError("no prompts are held out: give a file of params.yaml prompts.files a heldout above 0")
    turns = zip_longest(*by_source.values())
    return [row for turn in turns for row in turn if row is not None][:count]
