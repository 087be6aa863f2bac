"""The draft vocabulary, by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eaglet import draft_vocab
from eaglet.errors import EagletError


def test_count() -> None:
    counts = draft_vocab.count(torch.tensor([3, 1, 3, 3, 0]), 5)
    assert counts.tolist() == [1, 1, 0, 3, 0]
    assert counts.dtype == torch.int64
    assert draft_vocab.count(torch.tensor([], dtype=torch.int64), 2).tolist() == [0, 0]


@pytest.mark.parametrize("token", [5, -1])
def test_count_refuses_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(EagletError, match=f"token id {token} "):
        draft_vocab.count(torch.tensor([1, token]), 5)


def test_d2t_holds_offsets() -> None:
    vocab = draft_vocab.choose(torch.tensor([0, 9, 0, 7, 0, 8]), 3, set())
    assert vocab.target_ids.tolist() == [1, 3, 5]
    assert vocab.d2t.tolist() == [1, 2, 3]  # 1-0, 3-1, 5-2, not [1, 3, 5]
    assert vocab.t2d.tolist() == [False, True, False, True, False, True]
    assert vocab.draft_ids.tolist() == [-1, 0, -1, 1, -1, 2]
    assert vocab.draft_ids[vocab.target_ids].tolist() == [0, 1, 2]


def test_ties_go_to_the_lowest_id() -> None:
    assert draft_vocab.choose(torch.tensor([2, 5, 2, 2]), 2, set()).target_ids.tolist() == [0, 1]


def test_specials_are_kept_and_take_room() -> None:
    assert draft_vocab.choose(torch.tensor([4, 3, 2, 1, 0]), 3, {4}).target_ids.tolist() == [0, 1, 4]


def test_few_distinct_tokens_are_filled_with_the_lowest_unused_ids() -> None:
    assert draft_vocab.choose(torch.tensor([0, 0, 0, 0, 6]), 3, set()).target_ids.tolist() == [0, 1, 4]


def test_whole_vocabulary() -> None:
    vocab = draft_vocab.choose(torch.tensor([1, 2, 3]), 3, set())
    assert vocab.d2t.tolist() == [0, 0, 0]
    assert vocab.t2d.all()


@pytest.mark.parametrize(("size", "always"), [(0, set()), (4, set()), (1, {0, 1}), (2, {3}), (2, {-1})])
def test_choose_refuses(size: int, always: set[int]) -> None:
    with pytest.raises(EagletError):
        draft_vocab.choose(torch.tensor([1, 1, 1]), size, always)


def test_coverage() -> None:
    counts = torch.tensor([6, 3, 1])
    assert draft_vocab.coverage(counts, torch.tensor([True, False, True])) == 0.7
    curve = draft_vocab.coverage_curve(counts, torch.tensor([0, 4, 4]), [1, 2], set())
    assert curve == [{"size": 1, "train": 0.6, "heldout": 0.0}, {"size": 2, "train": 0.9, "heldout": 0.5}]
    assert draft_vocab.coverage_curve(counts, torch.zeros(3, dtype=torch.int64), [3], {2}) == [
        {"size": 3, "train": 1.0, "heldout": None}
    ]
    with pytest.raises(EagletError, match="no tokens"):
        draft_vocab.coverage(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "vocab.safetensors"
    vocab = draft_vocab.choose(torch.tensor([0, 9, 0, 7, 0, 8]), 3, set())
    draft_vocab.save(path, vocab)
    read = draft_vocab.load(path)
    assert torch.equal(read.d2t, vocab.d2t)
    assert torch.equal(read.t2d, vocab.t2d)


T2D = torch.tensor([False, True, False, True])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": torch.tensor([1, 3]), "t2d": T2D}, "different tokens"),  # absolute ids
        ({"d2t": torch.tensor([1, 2, 3]), "t2d": T2D}, "different tokens"),
        ({"d2t": torch.tensor([1, 2], dtype=torch.int32), "t2d": T2D}, "int64"),
        ({"d2t": torch.tensor([1, 2]), "t2d": T2D.long()}, "bool"),
        ({"d2t": torch.tensor([[1, 2]]), "t2d": T2D}, "int64"),
        ({"d2t": torch.tensor([1, 2])}, "expected"),
    ],
)
def test_load_refuses(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    path = tmp_path / "vocab.safetensors"
    save_file(tensors, path)
    with pytest.raises(EagletError, match=message):
        draft_vocab.load(path)


def test_load_refuses_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(EagletError, match="missing"):
        draft_vocab.load(tmp_path / "vocab.safetensors")
    (tmp_path / "vocab.safetensors").write_bytes(b"nonsense")
    with pytest.raises(EagletError, match="cannot be read"):
        draft_vocab.load(tmp_path / "vocab.safetensors")
