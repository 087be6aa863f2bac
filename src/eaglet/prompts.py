"""Prompt files of every usual shape, read into conversations."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from eaglet import files
from eaglet.errors import EagletError
from eaglet.params import PromptFile, PromptsParams

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_SHAPES = "one of `prompt`, `messages`, `turns`, `conversations`"


@dataclass(frozen=True)
class Conversation:
    """One row of a prompt file: chat messages as Transformers' templates take them."""

    id: str
    source: str
    where: str  # file:row, for messages to the user
    heldout: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    @property
    def key(self) -> str:
        """What the row says, whatever it is called or where it stands."""
        return files.digest({"messages": self.messages, "tools": self.tools})


@dataclass(frozen=True)
class Prompts:
    """All conversations, in order, each once."""

    conversations: list[Conversation]
    rows_read: int
    duplicates: int


def read(params: PromptsParams) -> Prompts:
    """Read every file, up to its limit, and keep each conversation once.

    A conversation that is held out in any file is held out: a duplicate never brings it back into training.

    Raises:
        EagletError: a file or row that cannot be read, with its name, row number and remedy.
    """
    kept: dict[str, Conversation] = {}
    rows_read = 0
    for file in params.files:
        for conversation in _read_file(Path(params.folder) / file.file, file):
            rows_read += 1
            first = kept.setdefault(conversation.key, conversation)
            if conversation.heldout and not first.heldout:
                kept[conversation.key] = replace(first, heldout=True)
    if not kept:
        raise EagletError(f"no prompts in {params.folder}: name files with rows under prompts.files in params.yaml")
    return Prompts(list(kept.values()), rows_read, rows_read - len(kept))


def _read_file(path: Path, file: PromptFile) -> Iterator[Conversation]:
    if Path(file.file).is_absolute() or ".." in Path(file.file).parts:
        raise EagletError(f"params.yaml: prompts.files {file.file!r} must lie inside prompts.folder, which DVC hashes")
    if not path.is_file():
        raise EagletError(f"{path} is missing, but params.yaml names it under prompts.files")
    readers = {".jsonl": _jsonl, ".json": _json_array, ".parquet": _parquet}
    if path.suffix not in readers:
        raise EagletError(f"{path}: a prompt file must be .jsonl, .json (an array) or .parquet")
    for number, row in islice(readers[path.suffix](path), file.limit):
        yield _conversation(row, path, number, file.heldout)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise EagletError(f"{path}:{number}: not UTF-8 ({error.reason}): convert the file") from None
            if not text.strip():
                continue
            try:
                yield number, json.loads(text)
            except (ValueError, RecursionError) as error:
                raise EagletError(f"{path}:{number}: not JSON ({error}): mend or remove the line") from None


def _json_array(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise EagletError(f"{path}: not JSON ({error})") from None
    if not isinstance(rows, list):
        raise EagletError(f"{path}: must hold a JSON array of rows; for one object a line name it .jsonl")
    yield from enumerate(rows, start=1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                # Parquet fills what a row lacks with nulls; a chat template must not see them.
                yield number, _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise EagletError(f"{path}: not a Parquet file, or damaged behind row {number} ({error})") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _conversation(row: Any, path: Path, number: int, heldout_share: float) -> Conversation:
    where = f"{path}:{number}"
    if not isinstance(row, dict):
        raise EagletError(f"{where}: a row must be an object with {_SHAPES}")
    messages = _messages(row, where)
    tools = row.get("tools") or None
    try:
        key = files.digest({"messages": messages, "tools": tools})
    except (TypeError, ValueError) as error:  # a date in Parquet, NaN, half a surrogate pair
        raise EagletError(f"{where}: its messages are not plain JSON ({error}): mend the row") from None
    return Conversation(
        id=str(where if row.get("id") is None else row["id"]),
        source=str(row.get("source") or path.stem),
        where=where,
        # The share is taken by hash: adding a row moves no other row between training and held-out.
        heldout=int(key[:8], 16) < heldout_share * 2**32,
        messages=messages,
        tools=tools,
    )


def _messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if "messages" in row:
        messages = row["messages"]
    elif "conversations" in row:
        messages = [_from_sharegpt(turn, where) for turn in _list(row["conversations"], "conversations", where)]
    elif "turns" in row:
        messages = [{"role": "user", "content": turn} for turn in _list(row["turns"], "turns", where)]
    elif "prompt" in row:
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise EagletError(f"{where}: the row has no {_SHAPES}; it has {', '.join(map(str, row)) or 'nothing'}")
    return [_message(message, where) for message in _list(messages, "messages", where)]


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise EagletError(f"{where}: `{name}` must be a list with at least one entry")
    return value


def _from_sharegpt(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        raise EagletError(f"{where}: each entry of `conversations` needs `from` and `value`")
    role = _SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        raise EagletError(f"{where}: unknown `from` {turn['from']!r}; known: {', '.join(_SHAREGPT_ROLES)}")
    return {"role": role, "content": turn["value"]}


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise EagletError(f"{where}: each message needs a `role` and a `content`")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined_text(content, where)
    if not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise EagletError(f"{where}: the {message['role']} message's `content` must be text, not {content!r:.60}")
    return {**message, "content": content}


def _joined_text(parts: list[Any], where: str) -> str:
    """Content given as a list of text parts, as OpenAI's API takes it: most templates want one string."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise EagletError(f"{where}: `content` holds a part that is not text; only text can be answered")
    return "".join(part["text"] for part in parts)
