"""Answers already given, by prompt × model × parameters: the target answers nothing twice."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eaglet import files
from eaglet.engines import Answer
from eaglet.errors import EagletError
from eaglet.params import GenerateParams
from eaglet.paths import STORE
from eaglet.target import Fingerprint


def request_key(model: Fingerprint, dtype: str, params: GenerateParams) -> str:
    """What an answer follows from besides its context. Not the engine: each gives answers of the same target."""
    sampling = {"max_new_tokens": params.max_new_tokens, "temperature": params.temperature}
    if params.temperature > 0:  # greedy answers do not depend on the rest
        sampling |= {"top_p": params.top_p, "top_k": params.top_k, "seed": params.seed}
    return files.digest({"model": model.states, "text": model.text, "dtype": dtype, "sampling": sampling})


class Answers:
    """An append-only log of answers under one request key, each durable once `add` returns."""

    def __init__(self, request: str) -> None:
        self.request = request
        self._path = STORE / "responses" / f"{request}.jsonl"
        self._known: dict[str, Answer] = {}
        complete = 0
        if self._path.is_file():
            for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), start=1):
                if not line.endswith(b"\n"):  # cut off by a crash: written again
                    break
                try:
                    context, *answer = json.loads(line)
                except ValueError as error:
                    raise EagletError(f"{self._path}:{number}: damaged ({error}): delete the line") from None
                self._known[context] = Answer(*answer)
                complete += len(line)
        self._complete = complete

    def __enter__(self) -> "Answers":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        self._file.truncate(self._complete)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def get(self, context_ids: Sequence[int]) -> Answer | None:
        """The answer to a context, if it was ever given."""
        return self._known.get(_context_key(context_ids))

    def learn(self, answered: Sequence[tuple[list[int], Answer]]) -> None:
        """Know answers for now, without keeping them."""
        for context, answer in answered:
            self._known[_context_key(context)] = answer

    def add(self, answered: Sequence[tuple[list[int], Answer]]) -> None:
        """Keep answers: written, flushed and synced."""
        self.learn(answered)
        for context, answer in answered:
            line = files.canonical_json([_context_key(context), answer.answer_ids, answer.finish_reason])
            self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def unknown(self, records: Iterable[dict[str, Any]]) -> list[tuple[list[int], Answer]]:
        """Answers of an earlier run's records that have the same request key and are not known here."""
        return [
            (turn["context_ids"], Answer(turn["answer_ids"], turn["finish_reason"]))
            for record in records
            if record["request"] == self.request
            for turn in record["turns"]
            if turn["finish_reason"] != "given" and self.get(turn["context_ids"]) is None
        ]


def _context_key(context_ids: Sequence[int]) -> str:
    return files.digest(list(context_ids))[:32]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Records of data/responses.jsonl: id, source, heldout, messages, turns, request.

    Raises:
        EagletError: missing, or a line that is not JSON.
    """
    if not path.is_file():
        raise EagletError(f"{path} is missing: run `dvc repro generate`, or `dvc pull`")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise EagletError(f"{path}:{number}: not JSON ({error}): `dvc checkout` brings it back") from None
