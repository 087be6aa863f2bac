"""vocab: the draft vocabulary, the most frequent tokens of the answers."""

from collections.abc import Sequence

import numpy as np
import torch

from eaglet import draft_vocab, files, rows, target
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, PLOTS, ROWS, VOCAB
from eaglet.rows import Row


def run(params: Params) -> None:
    """Write data/vocab.safetensors, metrics/vocab.json and plots/coverage.csv."""
    model = target.load(params.target)
    all_rows = rows.read(ROWS)
    vocab_size = model.fingerprint.vocab_size
    train = count_answers([row for row in all_rows if not row.heldout], vocab_size)
    heldout = count_answers([row for row in all_rows if row.heldout], vocab_size)
    if not train.any():
        raise EagletError("every row is held out and none is left to train on: lower heldout under prompts.files")
    always = template_tokens(model)
    chosen = draft_vocab.choose(train, params.vocab.size, always)
    draft_vocab.save(VOCAB, chosen)
    sizes = sorted(
        {size for power in range(8, 20) if len(always) <= (size := 2**power) < vocab_size} | {params.vocab.size}
    )
    curve = draft_vocab.coverage_curve(train, heldout, sizes, always)
    files.write_csv(
        PLOTS / "coverage.csv",
        ["size", "series", "coverage"],
        [
            (point["size"], split, point[split])
            for point in curve
            for split in ("train", "heldout")
            if point[split] is not None
        ],
    )
    numbers = {
        "size": params.vocab.size,
        "distinct": int((train > 0).sum()),
        "always_kept": len(always),
        "coverage": draft_vocab.coverage(train, chosen.t2d),
        "heldout_coverage": draft_vocab.coverage(heldout, chosen.t2d) if heldout.any() else None,
    }
    files.write_json(METRICS / "vocab.json", numbers)
    print(f"vocab: {params.vocab.size:,} tokens cover {numbers['coverage']:.4f} of the answers → {VOCAB}")


def count_answers(some: Sequence[Row], vocab_size: int) -> torch.Tensor:
    """Occurrences of each token in the answers, int64 [V]."""
    answers = [row.input_ids[row.loss_mask] for row in some]
    ids = np.concatenate(answers) if answers else np.zeros(0)
    return draft_vocab.count(torch.from_numpy(ids.astype(np.int64)), vocab_size)


def template_tokens(model: target.Target) -> set[int]:
    """Special tokens that the chat template writes or an answer ends with: always in the draft vocabulary."""
    template = model.tokenizer.chat_template
    text = template if isinstance(template, str) else "".join(template.values())
    added = model.tokenizer.added_tokens_decoder
    return {index for index, token in added.items() if token.content in text} | set(model.end_ids)
