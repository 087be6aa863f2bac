"""From recorded turns to rows: cut, counted, each once; and the file that keeps them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import ROOT

from eaglet import files, params, rows
from eaglet.errors import EagletError
from eaglet.rows import Row
from eaglet.stages import tokenize


def record(name: str, *turns: tuple[list[int], list[int]], heldout: bool = False, reason: str = "stop") -> Any:
    """A line of data/responses.jsonl."""
    named = [{"context_ids": ids, "answer_ids": answer, "finish_reason": reason} for ids, answer in turns]
    return {"id": name, "source": "s", "heldout": heldout, "greedy": True, "turns": named}


def row(ids: list[int], mask: str, starts: list[int], name: str = "a", **more: Any) -> Row:
    """A row whose mask is written as "..xx"."""
    of = {"source": "s", "heldout": False, "greedy": True} | more
    masked = np.array([letter == "x" for letter in mask], dtype=np.bool_)
    return Row(name, input_ids=np.array(ids, dtype=np.int32), loss_mask=masked, turn_starts=starts, **of)


def plain(found: list[Row]) -> list[Any]:
    """Rows as values that compare."""
    masks = ["".join("x" if inside else "." for inside in one.loss_mask) for one in found]
    return [
        (one.id, one.heldout, one.input_ids.tolist(), mask, one.turn_starts)
        for one, mask in zip(found, masks, strict=True)
    ]


TWO = ([1, 2], [3, 9]), ([1, 2, 3, 9, 4], [5, 6, 9])  # a conversation of eight tokens
APART = ([1, 2], [3, 9]), ([1, 8, 9, 4], [5, 9])  # the history was not continued


@pytest.mark.parametrize(
    ("records", "limit", "expected", "counts"),
    [
        ([record("a", *TWO)], 8, [("a", False, [1, 2, 3, 9, 4, 5, 6, 9], "..xx.xxx", [2, 5])], {}),
        (
            [record("a", *TWO, reason="length")],
            7,
            [("a", False, [1, 2, 3, 9, 4, 5, 6], "..xx.xx", [2, 5])],
            {"truncated": 1, "tokens_cut": 1},
        ),
        (
            [record("a", *TWO)],
            5,
            [("a", False, [1, 2, 3, 9, 4], "..xx.", [2])],
            {"truncated": 1, "tokens_cut": 3},
        ),
        ([record("a", *TWO)], 3, [("a", False, [1, 2, 3], "..x", [2])], {"truncated": 1, "tokens_cut": 5}),
        ([record("a", *TWO)], 2, [], {"truncated": 1, "tokens_cut": 6, "without_answer": 1}),
        (
            [record("a", *APART)],
            8,
            [("a", False, [1, 2, 3, 9], "..xx", [2]), ("a", False, [1, 8, 9, 4, 5, 9], "....xx", [4])],
            {"split": 1},
        ),
        (
            [record("a", *APART)],
            4,
            [("a", False, [1, 2, 3, 9], "..xx", [2])],
            {"split": 1, "truncated": 1, "tokens_cut": 2, "without_answer": 1},
        ),
        (
            [record("a", ([1], [2, 9]), ([1, 2, 9], [3, 9]))],
            8,
            [("a", False, [1, 2, 9, 3, 9], ".xxxx", [1, 3])],
            {},
        ),
        (
            [record("a", TWO[0]), record("b", TWO[0]), record("c", ([1], [3, 9]))],
            8,
            [("a", False, [1, 2, 3, 9], "..xx", [2]), ("c", False, [1, 3, 9], ".xx", [1])],
            {"duplicates": 1},
        ),
        (  # the cut makes them alike
            [record("a", ([1], [2, 3, 9])), record("b", ([1], [2, 3, 4, 9]))],
            3,
            [("a", False, [1, 2, 3], ".xx", [1])],
            {"truncated": 2, "tokens_cut": 3, "duplicates": 1},
        ),
        (
            [
                record("a", TWO[0]),
                record("c", ([1], [3, 9])),
                record("b", TWO[0], heldout=True),
                record("d", TWO[0]),
            ],
            8,
            [("b", True, [1, 2, 3, 9], "..xx", [2]), ("c", False, [1, 3, 9], ".xx", [1])],
            {"duplicates": 2},
        ),
        (
            [record("a", TWO[0], heldout=True), record("b", TWO[0], heldout=True)],
            8,
            [("a", True, [1, 2, 3, 9], "..xx", [2])],
            {"duplicates": 1},
        ),
    ],
    ids=[
        "whole",
        "length",
        "cut-between",
        "cut-within",
        "no-answer",
        "split",
        "split-cut",
        "touching",
        "duplicate",
        "cut-alike",
        "held-out",
        "held-out-twice",
    ],
)
def test_collect(records: list[Any], limit: int, expected: list[Any], counts: dict[str, int]) -> None:
    kept, counted = tokenize.collect(records, limit)
    assert plain(kept) == expected
    assert vars(counted) == vars(tokenize.Counts(conversations=len(records), **counts))


def test_the_stage_writes_rows_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = params.load(ROOT / "params.yaml")
    files.write_jsonl(tokenize.RESPONSES, [record("a", *TWO), record("b", TWO[0], heldout=True), record("c", TWO[0])])
    tokenize.run(shipped)
    assert plain(rows.read(tokenize.ROWS)) == [
        ("a", False, [1, 2, 3, 9, 4, 5, 6, 9], "..xx.xxx", [2, 5]),
        ("b", True, [1, 2, 3, 9], "..xx", [2]),
    ]
    assert files.read_json(Path("metrics/tokenize.json"), "tokenize") == {
        "rows": 2,
        "heldout_rows": 1,
        "tokens": 12,
        "answer_tokens": 7,
        "longest": 8,
        "conversations": 3,
        "split": 0,
        "truncated": 0,
        "tokens_cut": 0,
        "without_answer": 0,
        "duplicates": 1,
    }
    output = capsys.readouterr()
    assert output.out == "tokenize: 2 rows, 12 tokens, 7 of them answers → data/rows.parquet\n"
    assert output.err.startswith("tokenize: 0 rows cut at max_length, 1 dropped: ")


def test_no_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = params.load(ROOT / "params.yaml")
    with pytest.raises(EagletError, match=r"^data/responses.jsonl is missing: run `dvc repro generate`"):
        tokenize.run(shipped)
    files.write_jsonl(tokenize.RESPONSES, [record("a", ([*range(3000)], [9]))])
    with pytest.raises(EagletError, match=r"no row of data/responses.jsonl holds an answer within tokenize.max_len"):
        tokenize.run(shipped)
    tokenize.RESPONSES.write_text('{"turns": [')
    with pytest.raises(EagletError, match=r"^data/responses.jsonl:1: not JSON .*: `dvc checkout` brings it back$"):
        tokenize.run(shipped)


ROWS = [
    row([1, 2, 3, 9, 4, 5, 6, 9], "..xx.xxx", [2, 5], heldout=True),
    row([2**31 - 1, 0, 7], ".xx", [1, 2], name="ünï/7", source="", greedy=False),
    row([5], "x", [0], name=""),
]


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows.write(tmp_path / "rows.parquet", ROWS)
    found = rows.read(tmp_path / "rows.parquet")
    assert plain(found) == plain(ROWS)
    for one, written in zip(found, ROWS, strict=True):
        assert (one.source, one.greedy, one.sample) == (written.source, written.greedy, written.sample)
        assert (one.input_ids.dtype, one.loss_mask.dtype, one.span_ids.dtype) == (
            np.int32,
            np.bool_,
            np.int64,
        )
    rows.write(tmp_path / "again.parquet", found)
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()
    rows.write(tmp_path / "none.parquet", [])
    assert rows.read(tmp_path / "none.parquet") == []


def test_the_sample_is_the_hash_of_the_ids() -> None:
    # printf '\1\0\0\0\2\0\0\0' | sha256sum
    assert row([1, 2], ".x", [1]).sample == "34fb5c825de7ca4aea6e712f19d439c1"
    assert row([1, 2], "x.", [0], name="b", heldout=True).sample == row([1, 2], ".x", [1]).sample
    assert row([2, 1], ".x", [1]).sample != row([1, 2], ".x", [1]).sample


@pytest.mark.parametrize(
    ("mask", "starts", "spans"),
    [
        ("..xx.xxx", [2, 5], [0, 0, 1, 1, 0, 2, 2, 2]),
        (".xxxx", [1, 3], [0, 1, 1, 2, 2]),  # the answers touch
        ("xx", [0, 1], [1, 2]),
        ("...", [], [0, 0, 0]),
    ],
)
def test_span_ids(mask: str, starts: list[int], spans: list[int]) -> None:
    assert row([*range(len(mask))], mask, starts).span_ids.tolist() == spans


def column(name: str, values: list[Any], kind: Any) -> Any:
    def spoil(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, pa.array(values, kind))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (column("input_ids", [[1, 2, 4]], pa.list_(pa.int32())), ": row 1 (a) is damaged: run"),
        (column("loss_mask", [[True, True]], pa.list_(pa.bool_())), ": row 1 (a) is damaged: run"),
        (column("sample", ["00"], pa.string()), ": row 1 (a) is damaged: run"),
        (lambda table: table.drop_columns(["loss_mask"]), " cannot be read ("),
    ],
    ids=["ids", "mask", "sample", "column"],
)
def test_a_row_that_does_not_fit_together_is_named(tmp_path: Path, spoil: Any, message: str) -> None:
    path = tmp_path / "rows.parquet"
    rows.write(path, [row([1, 2, 3], ".xx", [1])])
    pa.parquet.write_table(spoil(pa.parquet.read_table(path)), path)
    with pytest.raises(EagletError) as caught:
        rows.read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}{message}") and text.endswith("run `dvc repro --force tokenize`")


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(EagletError, match=r"rows.parquet is missing: run `dvc repro tokenize`, or `dvc pull`"):
        rows.read(path)
    rows.write(path, ROWS)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(EagletError, match=r"cannot be read \(.*run `dvc repro --force tokenize`"):
            rows.read(path)


def test_no_flipped_byte_is_read_quietly(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows.write(path, ROWS)
    whole = path.read_bytes()
    wrong = []
    for place in range(0, len(whole), 4):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            found = plain(rows.read(path))
        except EagletError:
            continue
        except Exception as error:
            found = [error]
        if found != plain(ROWS):
            wrong.append((place, found))
    assert wrong == []
