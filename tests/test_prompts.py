"""Prompt files of every shape are read alike; what cannot be read is refused in one line."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import ROOT

from eaglet import prompts
from eaglet.errors import EagletError
from eaglet.params import PromptFile, PromptsParams

SHARED = ROOT.parent / "shared" / "data" / "prompts"


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED = [message("user", "Hi"), message("assistant", "Yes?"), message("user", "Bye")]


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(*rows: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist(list(rows)), sink)
    return bytes(sink.getvalue())


def read(folder: Path, *written: tuple[str, bytes], limit: int | None = None, **heldout: float) -> prompts.Prompts:
    """Write the files and read them; `heldout` by the file's stem."""
    named = []
    for name, content in written:
        (folder / name).write_bytes(content)
        named.append(PromptFile(name, limit, heldout.get(Path(name).stem, 0.0)))
    return prompts.read(PromptsParams(str(folder), named))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", lines({"prompt": "Hi"}), [message("user", "Hi")]),
        ("a.jsonl", lines({"messages": ASKED}), ASKED),
        ("a.jsonl", lines({"turns": ["Hi", "Bye"]}), [message("user", "Hi"), message("user", "Bye")]),
        (
            "a.json",
            json.dumps(
                [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}]
            ).encode(),
            ASKED[:2],
        ),
        (
            "a.jsonl",
            lines({"conversations": [{"from": word, "value": word} for word in prompts._SHAREGPT_ROLES]}),
            [message(role, word) for word, role in prompts._SHAREGPT_ROLES.items()],
        ),
        (
            "a.jsonl",
            lines({"messages": [message("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}])]}),
            [message("user", "Hi")],
        ),
        (
            "a.jsonl",
            lines({"messages": [message("user", "Hi"), message("assistant", None, tool_calls=[{"id": 1}])]}),
            [message("user", "Hi"), message("assistant", None, tool_calls=[{"id": 1}])],
        ),
        ("a.jsonl", lines({"messages": [message("critic", "Hm")]}), [message("critic", "Hm")]),
        ("a.jsonl", b"\xef\xbb\xbf" + lines({"prompt": "Hi"}), [message("user", "Hi")]),
        ("a.json", b'\xef\xbb\xbf[{"prompt": "Hi"}]', [message("user", "Hi")]),
        ("a.jsonl", b'\r\n{"prompt": "Hi\xe2\x80\xa8"}\r\n\n', [message("user", "Hi\u2028")]),
    ],
    ids=[
        "prompt",
        "messages",
        "turns",
        "sharegpt-array",
        "sharegpt-roles",
        "parts",
        "null-answer",
        "role",
        "bom",
        "bom-array",
        "blank",
    ],
)
def test_shapes(tmp_path: Path, name: str, content: bytes, expected: list[dict[str, Any]]) -> None:
    (conversation,) = read(tmp_path, (name, content)).conversations
    assert conversation.messages == expected
    assert (conversation.source, conversation.tools, conversation.heldout) == ("a", None, False)


def test_parquet_drops_the_nulls_that_fill_its_structs(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": None}}
    call = {"function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"id": 7, "messages": [message("user", "Hi", tool_calls=None)], "tools": None, "source": None},
        {
            "id": None,
            "messages": [message("assistant", None, tool_calls=[call])],
            "tools": [tool],
            "source": "s",
        },
    ]
    first, second = read(tmp_path, ("a.parquet", parquet(*rows))).conversations
    assert (first.id, first.source, first.messages, first.tools) == ("7", "a", [message("user", "Hi")], None)
    assert second.id == second.where == f"{tmp_path / 'a.parquet'}:2"
    assert second.messages == [message("assistant", None, tool_calls=[call])]
    assert second.tools == [{"type": "function", "function": {"name": "f"}}]


def test_a_row_keeps_its_names_or_gets_its_place(tmp_path: Path) -> None:
    rows = [
        {"id": "x", "source": "s", "prompt": "1"},
        {"id": None, "source": None, "prompt": "2"},
        {"prompt": "3"},
    ]
    found = read(tmp_path, ("a.jsonl", b"\n" + lines(*rows))).conversations
    path = tmp_path / "a.jsonl"
    assert [(row.id, row.source, row.where) for row in found] == [
        ("x", "s", f"{path}:2"),
        (f"{path}:3", "a", f"{path}:3"),
        (f"{path}:4", "a", f"{path}:4"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_the_limit_counts_rows_and_reads_no_further(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": str(number)} for number in range(5)]
    content = {
        "a.jsonl": lines(*rows[:3]) + b"\n{broken\n",
        "a.json": json.dumps([*rows[:3], "broken"]).encode(),
        "a.parquet": parquet(*rows),
    }[name]
    assert [row.messages[0]["content"] for row in read(tmp_path, (name, content), limit=3).conversations] == [*"012"]


def test_duplicates_are_counted_across_files_and_held_out_wins(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        ("train.jsonl", lines({"id": "a", "prompt": "same"}, {"prompt": "same"}, {"prompt": "other"})),
        ("held.json", json.dumps([{"id": "b", "messages": [message("user", "same")]}]).encode()),
        ("more.jsonl", lines({"prompt": "same"}, {"prompt": "same", "tools": [{"type": "function"}]})),
        held=1,
    )
    assert (found.rows_read, found.duplicates) == (6, 3)
    assert [(row.id, row.messages[0]["content"], row.heldout) for row in found.conversations] == [
        ("a", "same", True),
        (f"{tmp_path / 'train.jsonl'}:3", "other", False),
        (f"{tmp_path / 'more.jsonl'}:2", "same", False),  # other tools make another conversation
    ]


def test_the_held_out_share_stays_when_rows_come_or_go(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {number}"} for number in range(400)]

    def held(share: float, *rows: dict[str, Any]) -> set[str]:
        found = read(tmp_path, ("a.jsonl", lines(*rows)), a=share).conversations
        return {row.messages[0]["content"] for row in found if row.heldout}

    quarter = held(0.25, *rows)
    assert 70 < len(quarter) < 130
    new = [{"prompt": f"new {number}"} for number in range(50)]
    assert {text for text in held(0.25, *new, *reversed(rows)) if text.startswith("number")} == quarter
    assert held(0, *rows) == set() and len(held(1, *rows)) == 400
    assert quarter < held(0.5, *rows), "a larger share only adds"


@pytest.mark.parametrize(
    ("name", "content", "where", "problem"),
    [
        ("a.jsonl", lines({"prompt": "x"}) + b"\n{broken\n", ":3: ", "not JSON (Expecting property name"),
        (
            "a.jsonl",
            lines({"prompt": "x"}) + b'{"prompt": "\xff"}\n',
            ":2: ",
            "not UTF-8 (invalid start byte)",
        ),
        ("a.jsonl", lines("x"), ":1: ", "a row must be an object with one of `prompt`, `messages`,"),
        ("a.jsonl", lines({"text": 1, "n": 2}), ":1: ", "the row has no one of `prompt`"),
        ("a.jsonl", lines({"text": 1, "n": 2}), ":1: ", "it has text, n"),
        ("a.jsonl", lines({}), ":1: ", "it has nothing"),
        ("a.jsonl", lines({"prompt": 3}), ":1: ", "the user message's `content` must be text, not 3"),
        ("a.jsonl", lines({"turns": []}), ":1: ", "`turns` must be a list with at least one entry"),
        ("a.jsonl", lines({"messages": {"role": "user"}}), ":1: ", "`messages` must be a list"),
        (
            "a.jsonl",
            lines({"messages": [{"content": "x"}]}),
            ":1: ",
            "each message needs a `role` and a `content`",
        ),
        (
            "a.jsonl",
            lines({"messages": [message("user", None)]}),
            ":1: ",
            "the user message's `content` must be text",
        ),
        (
            "a.jsonl",
            lines({"messages": [message("tool", {"a": 1})]}),
            ":1: ",
            "`content` must be text, not {'a': 1}",
        ),
        (
            "a.jsonl",
            lines({"messages": [message("user", [{"type": "image_url", "image_url": "x"}])]}),
            ":1: ",
            "`content` holds a part that is not text",
        ),
        (
            "a.jsonl",
            lines({"messages": [message("user", "x", score=float("nan"))]}),
            ":1: ",
            "are not plain JSON",
        ),
        ("a.jsonl", b'{"prompt": "\\ud800"}', ":1: ", "are not plain JSON"),
        ("a.jsonl", lines({"conversations": [{"from": "human"}]}), ":1: ", "needs `from` and `value`"),
        (
            "a.jsonl",
            lines({"conversations": [{"from": "bard", "value": "x"}]}),
            ":1: ",
            "unknown `from` 'bard'; known",
        ),
        (
            "a.jsonl",
            lines({"conversations": [{"from": ["x"], "value": "x"}]}),
            ":1: ",
            "unknown `from` ['x']",
        ),
        ("a.jsonl", b"[" * 100_000, ":1: ", "not JSON (maximum recursion depth"),
        ("a.json", b'[{"prompt": ]', ": ", "not JSON (Expecting value: line 1 column 13"),
        ("a.json", b'[{"prompt": "\xff"}]', ": ", "not JSON ('utf-8' codec can't decode"),
        (
            "a.json",
            b'{"prompt": "x"}',
            ": ",
            "must hold a JSON array of rows; for one object a line name it .jsonl",
        ),
        ("a.json", b'[{"prompt": "x"}, 3]', ":2: ", "a row must be an object"),
        ("a.parquet", b"PAR1", ": ", "not a Parquet file, or damaged behind row 0 ("),
        ("a.parquet", parquet({"prompt": "x"})[:-9], ": ", "not a Parquet file, or damaged behind row 0 ("),
        ("a.parquet", parquet({"prompt": b"x"}), ":1: ", "`content` must be text, not b'x'"),
        (
            "a.parquet",
            parquet({"messages": [message("user", "x", at=datetime.datetime(2026, 1, 1))]}),
            ":1: ",
            "are not plain JSON",
        ),
        ("a.csv", b"prompt\nx\n", ": ", "a prompt file must be .jsonl, .json (an array) or .parquet"),
    ],
)
def test_errors_name_file_and_row(tmp_path: Path, name: str, content: bytes, where: str, problem: str) -> None:
    with pytest.raises(EagletError) as caught:
        read(tmp_path, (name, content))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / name}{where}") and problem in text and "\n" not in text


def test_a_damaged_parquet_page_is_named(tmp_path: Path) -> None:
    content = parquet(*({"prompt": f"number {number}"} for number in range(500)))
    with pytest.raises(EagletError, match=r"a\.parquet"):
        read(tmp_path, ("a.parquet", content[:40] + b"\xff" * 160 + content[200:]))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gone.jsonl", "gone.jsonl is missing, but params.yaml names it under prompts.files"),
        (
            "/etc/passwd.jsonl",
            "params.yaml: prompts.files '/etc/passwd.jsonl' must lie inside prompts.folder",
        ),
        ("../a.jsonl", "params.yaml: prompts.files '../a.jsonl' must lie inside prompts.folder"),
        ("in/../../a.jsonl", "params.yaml: prompts.files 'in/../../a.jsonl' must lie inside prompts.folder"),
        (".", " is missing, but params.yaml names it"),
    ],
)
def test_files_outside_or_missing(tmp_path: Path, name: str, problem: str) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines({"prompt": "x"}))
    with pytest.raises(EagletError) as caught:
        prompts.read(PromptsParams(str(folder), [PromptFile(name, None, 0)]))
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_to_read(tmp_path: Path) -> None:
    empty = f"no prompts in {tmp_path}: name files with rows under prompts.files in params.yaml"
    for written in [
        (),
        (("a.jsonl", b"\n"),),
        (("a.json", b"[]"),),
        (("a.parquet", parquet({"prompt": "x"})),),
    ]:
        with pytest.raises(EagletError) as caught:
            read(tmp_path, *written, limit=0)
        assert str(caught.value) == empty


@pytest.mark.parametrize(
    ("name", "rows", "conversations", "turns"),
    [
        ("train.jsonl", 2327, 2327, {1}),
        ("eval.jsonl", 240, 240, {1, 2}),
        ("sharegpt_dummy.json", 500, 500, {2, 4, 6}),
    ],
)
def test_the_shared_sets_are_read(name: str, rows: int, conversations: int, turns: set[int]) -> None:
    if not (SHARED / name).is_file():
        pytest.skip(f"{SHARED / name} is not here")
    found = prompts.read(PromptsParams(str(SHARED), [PromptFile(name, None, 0)]))
    assert (found.rows_read, len(found.conversations)) == (rows, conversations)
    assert {len(row.messages) for row in found.conversations} == turns
