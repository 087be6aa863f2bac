"""The target answers nothing twice, and a crash costs only the answer that was being written."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

from eaglet import params, responses
from eaglet.engines import Answer
from eaglet.errors import EagletError
from eaglet.params import GenerateParams
from eaglet.prompts import Conversation
from eaglet.responses import Answers
from eaglet.stages import generate
from eaglet.target import Fingerprint

GREEDY = GenerateParams(regenerate=True, max_new_tokens=8, temperature=0.0, top_p=1.0, top_k=0, seed=0)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
MODEL = Fingerprint("name", "states", "text", "Llama", 64, 4, 320, 1000, {})
KEPT = [
    ([1, 2], Answer([3, 9], "stop")),
    ([1, 2, 3], Answer([4], "length")),
    ([1], Answer([5, 6, 9], "stop")),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the store lies relative to it


def written(*answered: tuple[list[int], Answer]) -> Path:
    with Answers("request") as answers:
        answers.add(answered)
    return Path(".store/responses/request.jsonl")


def known(contexts: Sequence[list[int]] = [context for context, _ in KEPT]) -> list[Answer | None]:
    answers = Answers("request")
    return [answers.get(context) for context in contexts]


def test_answers_are_kept() -> None:
    path = written(*KEPT[:2])
    written(KEPT[2])
    assert known() == [answer for _, answer in KEPT]
    assert known([[2, 1], [1, 2, 3, 4], []]) == [None, None, None]
    assert len(path.read_text().splitlines()) == 3
    assert [json.loads(line)[1:] for line in path.read_text().splitlines()][1] == [[4], "length"]


def test_other_requests_know_nothing() -> None:
    written(*KEPT)
    assert Answers("another").get([1]) is None


def test_learned_answers_are_not_kept() -> None:
    with Answers("request") as answers:
        answers.learn(KEPT)
        assert answers.get([1]) == KEPT[2][1]
    assert known() == [None, None, None]


def test_an_answer_is_on_disk_once_add_returns() -> None:
    with Answers("request") as answers:
        for count, one in enumerate(KEPT, start=1):
            answers.add([one])
            assert len(Path(".store/responses/request.jsonl").read_bytes().splitlines()) == count


def test_a_log_cut_anywhere_keeps_the_earlier_answers() -> None:
    path = written(*KEPT)
    whole = path.read_bytes()
    last = len(b"".join(whole.splitlines(keepends=True)[:-1]))
    new = ([7], Answer([8, 9], "stop"))
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        assert known() == [KEPT[0][1], KEPT[1][1], None], size
        written(new)
        assert known([[1, 2], [1, 2, 3], [1], [7]]) == [KEPT[0][1], KEPT[1][1], None, new[1]]
        assert all(len(json.loads(line)) == 3 for line in path.read_text().splitlines()), "no line is torn"
        written(KEPT[2])
        assert known() == [answer for _, answer in KEPT]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"states": "other weights"}, False),
        ({"text": "other template"}, False),
        ({"name": "moved", "files": {"a": "b"}}, True),
        ({"dtype": "float32"}, False),
        ({"max_new_tokens": 9}, False),
        ({"temperature": 0.7}, False),
        ({"regenerate": False}, True),
        ({"seed": 1}, None),
        ({"top_p": 0.9}, None),
        ({"top_k": 5}, None),
    ],
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_request_key_follows_what_answers_follow_from(
    change: dict[str, Any], same: bool | None, sampling: GenerateParams
) -> None:
    """None: only sampled answers depend on it."""

    def part(of: Any) -> dict[str, Any]:
        return {key: value for key, value in change.items() if hasattr(of, key)}

    before = responses.request_key(MODEL, "bfloat16", sampling)
    after = responses.request_key(
        dataclasses.replace(MODEL, **part(MODEL)),
        change.get("dtype", "bfloat16"),
        dataclasses.replace(sampling, **part(sampling)),
    )
    assert (after == before) == (sampling is GREEDY if same is None else same)


def test_past_records_are_adopted_only_under_their_request() -> None:
    names = ("context_ids", "answer_ids", "finish_reason")

    def record(request: str, *turns: tuple[list[int], list[int], str]) -> dict[str, Any]:
        return {"request": request, "turns": [dict(zip(names, turn, strict=True)) for turn in turns]}

    records = [
        record("request", ([1, 2], [0], "stop"), ([4], [5, 9], "length")),  # the first is known already
        record("other", ([6], [7, 9], "stop")),
        record("request", ([8], [9], "given")),
    ]
    written(KEPT[0])
    with Answers("request") as answers:
        assert answers.unknown(records) == [([4], Answer([5, 9], "length"))]
        answers.add(answers.unknown(records))
        assert answers.unknown(records) == []
    assert known([[1, 2], [4], [6], [8]]) == [KEPT[0][1], Answer([5, 9], "length"), None, None]


class Scripted:
    """An engine that says what it was told to, the last asked first, and counts."""

    def __init__(self, tokenizer: Any, script: dict[str, str]) -> None:
        self._tokenizer, self._script = tokenizer, script
        self.asked: list[str] = []

    def status(self) -> str:
        return ""

    def answer(self, contexts: Sequence[list[int]], _: GenerateParams) -> Iterator[tuple[int, Answer]]:
        for index in reversed(range(len(contexts))):
            text = self._tokenizer.decode(contexts[index])
            question = text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
            self.asked.append(question)
            if question not in self._script:
                raise ConnectionError(question)
            ids = self._tokenizer(self._script[question])["input_ids"]
            yield index, Answer(ids, "stop" if ids[-1] == 2 else "length")


def answered(tokenizer: Any, script: dict[str, str], *conversations: list[str]) -> tuple[Any, Scripted, Any]:
    """What `generate` makes of conversations, given as their user turns."""
    engine = Scripted(tokenizer, script)
    counts = generate.Counts()
    dialogues = [
        generate.start(
            Conversation(
                str(place), "s", f"file:{place}", False, [{"role": "user", "content": t} for t in turns], None
            ),
            regenerate=True,
        )
        for place, turns in enumerate(conversations)
    ]
    model: Any = SimpleNamespace(tokenizer=tokenizer, end_ids=frozenset({2}))
    with Answers("request") as answers:
        generate.answer_all(dialogues, answers, engine, model, params.load(ROOT / "params.yaml"), counts)
    return dialogues, engine, counts


def test_answers_reach_their_own_conversation_and_are_asked_for_once(tokenizer: Any) -> None:
    script = {"A": "a<|im_end|>", "B": "b", "A2": "a2<|im_end|>", "C": "c<|im_end|>"}
    asked = [["A", "A2"], ["B"], ["C", "A2"]]
    first, engine, counts = answered(tokenizer, script, *asked)
    assert engine.asked == ["C", "B", "A", "A2", "A2"]
    assert (counts.computed, counts.reused) == (5, 0)
    said = [[m["content"] for m in dialogue.messages if m["role"] == "assistant"] for dialogue in first]
    assert said == [["a", "a2"], ["b"], ["c", "a2"]]
    assert [[t.finish_reason for t in d.turns] for d in first] == [
        ["stop", "stop"],
        ["length"],
        ["stop", "stop"],
    ]

    again, engine, counts = answered(tokenizer, {"D": "d<|im_end|>"}, *asked, ["D"])
    assert (engine.asked, counts.computed, counts.reused) == (["D"], 1, 5)
    assert [dialogue.turns for dialogue in again[:3]] == [dialogue.turns for dialogue in first]


def test_what_was_answered_before_a_crash_is_reused(tokenizer: Any) -> None:
    with pytest.raises(ConnectionError):
        answered(tokenizer, {"B": "b<|im_end|>"}, ["A"], ["B"])
    _, engine, counts = answered(tokenizer, {"A": "a<|im_end|>"}, ["A"], ["B"])
    assert (engine.asked, counts.computed, counts.reused) == (["A"], 1, 1)


def test_records_are_read_back_or_refused_by_line() -> None:
    path = Path("responses.jsonl")
    with pytest.raises(EagletError, match=r"^responses.jsonl is missing: run `dvc repro generate`, or `dvc pull`$"):
        list(responses.read(path))
    path.write_text('{"id": "ü\u2028"}\n{"id"\n', encoding="utf-8")
    found = responses.read(path)
    assert next(found) == {"id": "ü\u2028"}
    with pytest.raises(EagletError, match=r"^responses.jsonl:2: not JSON \(.*\): `dvc checkout` brings it back$"):
        next(found)
