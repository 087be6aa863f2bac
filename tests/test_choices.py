"""The file of the target's choices."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eaglet import choices
from eaglet.errors import EagletError
from eaglet.rows import Row


def row(name: str, mask: str) -> Row:
    loss_mask = np.array([letter == "x" for letter in mask])
    starts = [place for place in range(len(mask)) if loss_mask[place] and (place == 0 or not loss_mask[place - 1])]
    ids = np.arange(len(mask), dtype=np.int32) + len(name)
    return Row(name, "here", False, True, ids, loss_mask, starts)


ROWS = [row("a", "..xxx.x"), row("bb", "x"), row("ccc", "xx.")]
# The mask's first token has no state before it.
PLACES = [[1, 2, 3, 5], [], [0]]


def test_a_choice_for_each_state_before_an_answers_token(tmp_path: Path) -> None:
    assert [choices.places(one).tolist() for one in ROWS] == PLACES
    given = [torch.tensor(places, dtype=torch.int64) + 100 for places in PLACES]
    choices.save(tmp_path / "c", ROWS, given)
    found = choices.load(tmp_path / "c", ROWS)
    assert [one.tolist() for one in found] == [one.tolist() for one in given]
    assert choices.spread(ROWS[0], found[0]).tolist() == [0, 101, 102, 103, 0, 105, 0]
    assert choices.spread(ROWS[1], found[1]).tolist() == [0]


def test_a_file_that_is_not_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(EagletError, match=r"c is missing: run `dvc repro audit`"):
        choices.load(path, ROWS)
    choices.save(path, ROWS, [torch.zeros(len(places), dtype=torch.int64) for places in PLACES])
    with pytest.raises(EagletError, match="other rows"):
        choices.load(path, [ROWS[0], ROWS[2], ROWS[1]])
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(EagletError, match="cannot be read"):
        choices.load(path, ROWS)
