"""The draft vocabulary: which of the target's tokens the drafter may propose, and the mapping between both.

Rules: eagle3.md, "Vocabulary mapping". V is the target's vocabulary size, Vd the draft vocabulary's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from eaglet.errors import EagletError
from eaglet.files import atomic


@dataclass(frozen=True)
class DraftVocabulary:
    """Which target tokens the draft ids stand for.

    Attributes:
        d2t: int64 [Vd], an *offset*: draft id i is target id i + d2t[i].
        t2d: bool [V], true where the target id is in the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    @cached_property
    def target_ids(self) -> Tensor:
        """int64 [Vd], rising: the target id of each draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @cached_property
    def draft_ids(self) -> Tensor:
        """int64 [V]: the draft id of each target id, -1 where it has none."""
        return torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)


def count(token_ids: Tensor, vocab_size: int) -> Tensor:
    """How often each token occurs: int64 [N] of target ids to int64 [V].

    Raises:
        EagletError: an id outside the target's vocabulary.
    """
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        worst = int(token_ids.min()) if int(token_ids.min()) < 0 else int(token_ids.max())
        raise EagletError(f"token id {worst} lies outside the target's vocabulary of {vocab_size}")
    return torch.bincount(token_ids, minlength=vocab_size)


def choose(counts: Tensor, size: int, always: set[int]) -> DraftVocabulary:
    """The `size` most frequent tokens, those in `always` first of all; ties go to the lowest id.

    Tokens that never occur tie at zero: where few distinct ones do, the lowest unused ids fill up the rest.

    Args:
        counts: int64 [V].
        size: Vd.
        always: target ids that are kept whatever their count (the chat template's special tokens).

    Raises:
        EagletError: `size` is not between the number of `always` and V, or an id of `always` is not in V.
    """
    vocab_size = len(counts)
    kept = torch.tensor(sorted(always), dtype=torch.int64)
    if len(kept) and not 0 <= int(kept[0]) <= int(kept[-1]) < vocab_size:
        raise EagletError(f"special token ids {sorted(always)} exceed the target's vocabulary of {vocab_size}")
    if not max(1, len(kept)) <= size <= vocab_size:
        raise EagletError(
            f"a draft vocabulary of {size} tokens must hold the {len(kept)} special ones "
            f"and fit in the target's {vocab_size}"
        )
    rank = counts.clone()
    rank[kept] = int(counts.max()) + 1
    chosen = rank.argsort(descending=True, stable=True)[:size].sort().values  # [Vd]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return DraftVocabulary(d2t=chosen - torch.arange(size), t2d=t2d)


def coverage(counts: Tensor, t2d: Tensor) -> float:
    """The share, 0 to 1, of counted occurrences (int64 [V]) that the draft vocabulary (bool [V]) holds.

    Raises:
        EagletError: nothing was counted.
    """
    total = int(counts.sum())
    if total == 0:
        raise EagletError("no tokens were counted: there is no coverage of nothing")
    return int(counts[t2d].sum()) / total


def coverage_curve(
    train_counts: Tensor, heldout_counts: Tensor, sizes: Sequence[int], always: set[int]
) -> list[dict[str, Any]]:
    """Coverage of draft vocabularies of several sizes, each chosen from the training text.

    Args:
        train_counts, heldout_counts: int64 [V].

    Returns:
        A record per size: {"size", "train", "heldout"}; "heldout" is None where nothing was held out.
    """
    curve = []
    for size in sizes:
        t2d = choose(train_counts, size, always).t2d
        heldout = coverage(heldout_counts, t2d) if int(heldout_counts.sum()) else None
        curve.append({"size": size, "train": coverage(train_counts, t2d), "heldout": heldout})
    return curve


def check(d2t: Tensor, t2d: Tensor, where: str) -> DraftVocabulary:
    """The vocabulary of two tensors that were read from `where`.

    Raises:
        EagletError: wrong types or shapes, or the two name different tokens (as when d2t holds absolute ids).
    """
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or d2t.dim() != 1 or t2d.dim() != 1:
        raise EagletError(f"{where}: d2t must be int64 [Vd] and t2d bool [V], not {_kind(d2t)} and {_kind(t2d)}")
    target_ids = torch.arange(len(d2t)) + d2t
    if not torch.equal(target_ids, t2d.nonzero().squeeze(1)):
        raise EagletError(f"{where}: d2t (offsets: target id = i + d2t[i]) and t2d name different tokens")
    return DraftVocabulary(d2t, t2d)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def save(path: Path, vocab: DraftVocabulary) -> None:
    """Write {d2t, t2d} as safetensors."""
    with atomic(path) as file:
        file.write(safetensors_torch.save({"d2t": vocab.d2t, "t2d": vocab.t2d}))


def load(path: Path) -> DraftVocabulary:
    """Read what `save` wrote.

    Raises:
        EagletError: missing, not such a file, or its two tensors do not fit together.
    """
    try:
        tensors = safetensors_torch.load_file(path)
    except FileNotFoundError:
        raise EagletError(f"{path} is missing: run `dvc repro vocab`, or `dvc pull`") from None
    except (SafetensorError, OSError) as error:
        raise EagletError(f"{path} cannot be read ({error}): run `dvc repro --force vocab`") from None
    if set(tensors) != {"d2t", "t2d"}:
        raise EagletError(f"{path} holds {', '.join(sorted(tensors)) or 'nothing'} where d2t and t2d are expected")
    return check(tensors["d2t"], tensors["t2d"], str(path))
