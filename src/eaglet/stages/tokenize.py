"""tokenize: turns to rows of input ids and loss mask, each row once."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eaglet import files, responses, rows
from eaglet.conversation import MaskedIds, Turn, merge
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, RESPONSES, ROWS
from eaglet.rows import Row


@dataclass
class Counts:
    """Where the rows went."""

    conversations: int = 0
    split: int = 0  # rows beyond a conversation's first: its history was not continued token for token
    truncated: int = 0
    tokens_cut: int = 0
    without_answer: int = 0  # dropped: the cut left no answer token
    duplicates: int = 0  # dropped: the same ids as an earlier row


def run(params: Params) -> None:
    """Write data/rows.parquet and metrics/tokenize.json."""
    kept, counts = collect(responses.read(RESPONSES), params.tokenize.max_length)
    if not kept:
        raise EagletError(
            f"no row of {RESPONSES} holds an answer within tokenize.max_length {params.tokenize.max_length}"
        )
    rows.write(ROWS, kept)
    tokens = sum(len(row.input_ids) for row in kept)
    numbers = {
        "rows": len(kept),
        "heldout_rows": sum(row.heldout for row in kept),
        "tokens": tokens,
        "answer_tokens": int(sum(row.loss_mask.sum() for row in kept)),
        "longest": max(len(row.input_ids) for row in kept),
        **vars(counts),
    }
    files.write_json(METRICS / "tokenize.json", numbers)
    print(f"tokenize: {len(kept)} rows, {tokens:,} tokens, {numbers['answer_tokens']:,} of them answers → {ROWS}")
    dropped = counts.without_answer + counts.duplicates
    if counts.truncated or dropped:
        print(
            f"tokenize: {counts.truncated} rows cut at max_length, {dropped} dropped: {counts}",
            file=sys.stderr,
        )


def collect(records: Iterable[dict[str, Any]], max_length: int) -> tuple[list[Row], Counts]:
    """Rows of all conversations, in order, and where the others went.

    A held-out duplicate wins over a training one: held-out text is never trained on.
    """
    counts = Counts()
    kept: dict[str, Row] = {}
    for record in records:
        counts.conversations += 1
        merged = merge([Turn(**turn) for turn in record["turns"]])
        counts.split += len(merged) - 1
        for masked in merged:
            row = to_row(masked, record, max_length)
            if len(masked.input_ids) > max_length:
                counts.truncated += 1
                counts.tokens_cut += len(masked.input_ids) - max_length
            if not row.loss_mask.any():
                counts.without_answer += 1
                continue
            known = kept.get(row.sample)
            counts.duplicates += known is not None
            if known is None or (row.heldout and not known.heldout):
                kept[row.sample] = row
    return list(kept.values()), counts


def to_row(masked: MaskedIds, record: dict[str, Any], max_length: int) -> Row:
    """The row of merged turns, cut at `max_length`."""
    ids = np.array(masked.input_ids[:max_length], dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, stop in masked.spans:
        mask[start:stop] = True
    return Row(
        id=record["id"],
        source=record["source"],
        heldout=record["heldout"],
        greedy=record["greedy"],
        input_ids=ids,
        loss_mask=mask,
        turn_starts=[start for start, _ in masked.spans if start < len(ids)],
    )
