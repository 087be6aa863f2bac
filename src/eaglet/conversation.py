"""From chat messages to token ids and the loss mask, by token position.

A turn is the context the target sees (`render` + `encode`, just as a server does) and the answer's own ids. The
mask is never searched for in the text: it is where the answer's ids are. Turns whose contexts continue one
another token for token share a row; where a template rewrites the history (drops earlier thinking, say) or the
tokenizer merges across the seam, the later turn starts a row of its own, so that each row is what a server saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from eaglet.prompts import Conversation

_PROBE = "eagletprobe"
# What a template can raise over one row's messages, besides its own errors.
_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class CannotMask(Exception):
    """A conversation whose answers cannot be located with certainty: refused by row, counted, never guessed."""


@dataclass(frozen=True)
class Turn:
    """One answer of the target.

    `finish_reason` is "stop", "length" (cut off) or "given" (it stood in the prompt file).
    """

    context_ids: list[int]
    answer_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class MaskedIds:
    """One training row: ids [T], the half-open spans that the assistant wrote, and how each answer ended."""

    input_ids: list[int]
    spans: list[tuple[int, int]]
    finish_reasons: list[str]


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, generation_prompt: bool) -> str:
    """The chat template's text.

    Raises:
        CannotMask: the template refuses these messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
    except (jinja2.TemplateError, *_REFUSALS) as error:
        raise CannotMask(f"the chat template refuses it: {' '.join(str(error).split())}") from None
    return str(text)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text: the template has written the special tokens, so none are added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def context_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any) -> list[int]:
    """What the target is given to answer `messages`: ids that end with the generation prompt."""
    return encode(tokenizer, render(tokenizer, messages, tools, generation_prompt=True))


def given_turns(tokenizer: Any, conversation: Conversation, end_ids: frozenset[int]) -> list[Turn]:
    """The turns of a conversation whose assistant messages are used as they are.

    Context and answer are encoded apart, as at serving, where the answer is generated behind the whole context:
    an answer that starts with a newline must not merge with the header's.

    Raises:
        CannotMask: no assistant message, or one whose place or end is not certain.
    """
    turns = []
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before = conversation.messages[:index]
        whole = render(tokenizer, conversation.messages[: index + 1], conversation.tools, generation_prompt=False)
        context = _context_text(tokenizer, before, message, conversation.tools, whole)
        answer = encode(tokenizer, whole[len(context) :])
        ends = [position for position, token in enumerate(answer) if token in end_ids]
        if not ends:
            raise CannotMask("the chat template ends no assistant message with an end-of-turn token")
        if ends != list(range(ends[0], ends[-1] + 1)):
            raise CannotMask("the answer holds an end-of-turn token in its middle, where a server would have stopped")
        asked = encode(tokenizer, context)
        if tokenizer.decode(asked + answer) != tokenizer.decode(encode(tokenizer, whole)):
            raise CannotMask("the tokenizer writes the answer differently when it stands alone")
        turns.append(Turn(asked, answer[: ends[0] + 1], "given"))
    if not turns:
        raise CannotMask("it holds no assistant message; set generate.regenerate: true to have it answered")
    return turns


def _context_text(
    tokenizer: Any, before: Sequence[dict[str, Any]], message: dict[str, Any], tools: Any, whole: str
) -> str:
    """The part of `whole` that stands before the assistant's own text."""
    if before:
        context = render(tokenizer, before, tools, generation_prompt=True)
        if whole.startswith(context):
            return context
        raise CannotMask("the template's generation prompt is not how it writes the assistant's message")
    # The assistant speaks first: nothing to prompt with, so a probe shows where its text begins.
    probed = render(tokenizer, [{**message, "content": _PROBE}], tools, generation_prompt=False)
    context = probed[: probed.find(_PROBE)]
    user = [{"role": "user", "content": _PROBE}]
    header = render(tokenizer, user, tools, True)[len(render(tokenizer, user, tools, False)) :]
    if _PROBE in probed and header and context.endswith(header) and whole.startswith(context):
        return context
    raise CannotMask("it starts with an assistant message, which the template does not write in a plain way")


def merge(turns: Sequence[Turn]) -> list[MaskedIds]:
    """Rows of a conversation: a turn continues the row before it exactly where its context does, id for id."""
    rows: list[MaskedIds] = []
    for turn in turns:
        start = len(turn.context_ids)
        span = (start, start + len(turn.answer_ids))
        ids = turn.context_ids + turn.answer_ids
        last = rows[-1] if rows else None
        if last is not None and turn.context_ids[: len(last.input_ids)] == last.input_ids:
            rows[-1] = MaskedIds(ids, [*last.spans, span], [*last.finish_reasons, turn.finish_reason])
        else:
            rows.append(MaskedIds(ids, [span], [turn.finish_reason]))
    return rows
