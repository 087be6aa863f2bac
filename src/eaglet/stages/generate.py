"""generate: the target answers the prompts; what it answered before is not asked again."""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglet import files, prompts, responses, target
from eaglet.conversation import CannotMask, Turn, context_ids, given_turns
from eaglet.dvc_cache import PastOutput
from eaglet.engines import Answer, Engine, Refusal, open_engine
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import METRICS, RESPONSES, STORE
from eaglet.progress import progress
from eaglet.prompts import Conversation


@dataclass
class Dialogue:
    """A conversation on its way: the messages so far, the user turns still to be put, the turns answered."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    refused: str | None = None


@dataclass
class Counts:
    """What was computed and what was there."""

    computed: int = 0
    reused: int = 0


def run(params: Params) -> None:
    """Write data/responses.jsonl and metrics/generate.json."""
    model = target.load(params.target)
    read = prompts.read(params.prompts)
    dialogues = [start(conversation, params.generate.regenerate) for conversation in read.conversations]
    request = responses.request_key(model.fingerprint, model.dtype, params.generate)
    counts = Counts()
    if params.generate.regenerate:
        with responses.Answers(request) as answers, closing(open_engine(params.engine, model)) as engine:
            adopt_past(answers)
            answer_all(dialogues, answers, engine, model, params, counts)
    else:
        use_given(dialogues, model)
    write(
        dialogues,
        request,
        read,
        counts,
        greedy=params.generate.regenerate and params.generate.temperature == 0,
    )


def start(conversation: Conversation, regenerate: bool) -> Dialogue:
    """The dialogue before its first answer: leading system messages, then user turns in order.

    When answers are generated, assistant messages in the file are left out: the target gives its own.
    """
    if not regenerate:
        return Dialogue(conversation, list(conversation.messages), [])
    spoken = [message for message in conversation.messages if message["role"] != "assistant"]
    system = [message for message in spoken if message["role"] == "system"]
    users = [message for message in spoken if message["role"] == "user"]
    dialogue = Dialogue(conversation, system, users)
    if spoken != system + users:
        roles = sorted({message["role"] for message in spoken} - {"system", "user"})
        what = f"it holds {roles[0]} messages" if roles else "a system message follows a user message"
        dialogue.refused = f"cannot be answered anew: {what} (generate.regenerate: false takes it as it is)"
    elif not users:
        dialogue.refused = "no user message to answer"
    return dialogue


def adopt_past(answers: responses.Answers) -> None:
    """Take over what the last run answered, where the store does not have it (a fresh clone after `dvc pull`)."""
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        past = Path(folder) / RESPONSES.name
        if PastOutput(RESPONSES).fetch("", past):
            answers.add(answers.unknown(responses.read(past)))


def answer_all(
    dialogues: Sequence[Dialogue],
    answers: responses.Answers,
    engine: Engine,
    model: target.Target,
    params: Params,
    counts: Counts,
) -> None:
    """Answer turn by turn: all first turns together, then all second ones, …

    Raises:
        EagletError: prompts that the engine cannot answer; all others were answered, and are kept.
    """
    rejected: list[str] = []
    while asking := [dialogue for dialogue in dialogues if dialogue.waiting and dialogue.refused is None]:
        contexts: list[list[int]] = []
        open_dialogues: list[Dialogue] = []
        for dialogue in asking:
            dialogue.messages = [*dialogue.messages, dialogue.waiting.pop(0)]
            try:
                context = context_ids(model.tokenizer, dialogue.messages, dialogue.conversation.tools)
            except CannotMask as error:
                dialogue.refused = str(error)
                continue
            known = answers.get(context)
            if known is None:
                contexts.append(context)
                open_dialogues.append(dialogue)
            else:
                counts.reused += 1
                take(dialogue, context, known, model)
        counts.computed += len(contexts)
        most = len(contexts) * params.generate.max_new_tokens
        with progress("generate", most, len(contexts), engine.status) as shown:
            for index, answer in engine.answer(contexts, params.generate):
                if isinstance(answer, Refusal):
                    rejected.append(f"{open_dialogues[index].conversation.where}: {answer.reason}")
                    open_dialogues[index].waiting.clear()
                    continue
                answers.add([(contexts[index], answer)])
                take(open_dialogues[index], contexts[index], answer, model)
                shown.add(rows=1, tokens=len(answer.answer_ids))
    if rejected:
        raise EagletError(
            f"{len(rejected)} prompts cannot be answered, all others were and are kept; first: {sorted(rejected)[0]}"
        )


def take(dialogue: Dialogue, context: list[int], answer: Answer, model: target.Target) -> None:
    """Put an answer into its dialogue: the ids as generated, the text for the history of the next turn."""
    dialogue.turns.append(Turn(context, answer.answer_ids, answer.finish_reason))
    ids = answer.answer_ids[:-1] if answer.answer_ids[-1] in model.end_ids else answer.answer_ids
    text = model.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    dialogue.messages = [*dialogue.messages, {"role": "assistant", "content": text}]


def use_given(dialogues: Sequence[Dialogue], model: target.Target) -> None:
    """Take the assistant messages of the prompt files as the answers."""
    for dialogue in dialogues:
        try:
            dialogue.turns = given_turns(model.tokenizer, dialogue.conversation, model.end_ids)
        except CannotMask as error:
            dialogue.refused = str(error)


def record(dialogue: Dialogue, request: str, greedy: bool) -> dict[str, Any]:
    """A line of data/responses.jsonl."""
    return {
        "id": dialogue.conversation.id,
        "source": dialogue.conversation.source,
        "heldout": dialogue.conversation.heldout,
        "request": request,
        "greedy": greedy,
        "messages": dialogue.messages,
        "turns": [vars(turn) for turn in dialogue.turns],
    }


def write(dialogues: Sequence[Dialogue], request: str, read: prompts.Prompts, counts: Counts, greedy: bool) -> None:
    """Write the answers in the order of the prompts, and the numbers."""
    kept = [dialogue for dialogue in dialogues if dialogue.refused is None]
    files.write_jsonl(RESPONSES, (record(dialogue, request, greedy) for dialogue in kept))
    turns = [turn for dialogue in kept for turn in dialogue.turns]
    for dialogue in dialogues:
        if dialogue.refused is not None:
            print(f"generate: refused {dialogue.conversation.where}: {dialogue.refused}", file=sys.stderr)
    numbers = {
        "rows_read": read.rows_read,
        "duplicates": read.duplicates,
        "refused": sum(dialogue.refused is not None for dialogue in dialogues),
        "conversations": len(kept),
        "heldout": sum(dialogue.conversation.heldout for dialogue in kept),
        "turns": len(turns),
        "answer_tokens": sum(len(turn.answer_ids) for turn in turns),
        "finish_reasons": dict(sorted(Counter(turn.finish_reason for turn in turns).items())),
    }
    files.write_json(METRICS / "generate.json", numbers)
    print(
        f"generate: {counts.computed} turns answered, {counts.reused} reused; {len(kept)} conversations, "
        f"{numbers['answer_tokens']:,} answer tokens → {RESPONSES}"
    )
