"""The loss mask covers the assistant's tokens with their end-of-turn, and nothing else, under every template.

Rows are shown as text: what the mask covers stands in ⟦ ⟧.
"""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from eaglet.conversation import CannotMask, MaskedIds, Turn, context_ids, encode, given_turns, merge, render
from eaglet.prompts import Conversation
from eaglet.stages import generate

CHATML = r"""
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

MARKED = r"""
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' }}
  {%- if m.role == 'assistant' -%}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
  {%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}
  {{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

TOOLS = r"""
{%- if tools -%}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
  {%- for call in m.tool_calls or [] -%}
    {{ '<call>' + call.function.name }}
    {%- for name, value in call.function.arguments | items -%}{{ ' ' + name + '=' + value }}{%- endfor -%}
    {{ '</call>' }}
  {%- endfor -%}
  {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

LLAMA3 = r"""{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
  {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""

QWEN3 = r"""
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
  {%- set text = m.content -%}
  {%- if m.role == 'assistant' and loop.index0 < ns.last -%}
    {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

GEMMA = r"""{{- '<bos>' -}}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('Roles must alternate:\nuser/assistant') }}
  {%- endif -%}
  {%- set role = 'model' if m.role == 'assistant' else m.role -%}
  {{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

MISTRAL = r"""{{- '<s>' -}}
{%- for m in messages -%}
  {{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '</s>' }}
{%- endfor -%}"""

DEEPSEEK = r"""{{- '<s>' -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ '<|User|>' + m.content }}
  {%- else -%}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '</s>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|Assistant|><think>\n' }}{%- endif -%}"""

# name → (template, its end of turn)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "marked": (MARKED, "<|im_end|>"),
    "tools": (TOOLS, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
    "deepseek": (DEEPSEEK, "</s>"),
    "deepseek_kept": (DEEPSEEK.replace(".split('</think>')[-1]", ""), "</s>"),
}
SPECIAL = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
]
SPECIAL += ["<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "<|User|>", "<|Assistant|>"]

# What SmolLM2's template puts before a conversation without a system message.
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def bot(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def other(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def calling(arguments: Any) -> dict[str, Any]:
    return bot(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """name → what `given_turns` needs of a target with that template; "smollm2" is the real one."""
    extended = copy.deepcopy(tokenizer)
    extended.add_special_tokens({"additional_special_tokens": SPECIAL})
    models = {"smollm2": SimpleNamespace(tokenizer=tokenizer, end_ids=frozenset({tokenizer.eos_token_id}))}
    for name, (template, end) in TEMPLATES.items():
        own = with_template(extended, template)
        models[name] = SimpleNamespace(tokenizer=own, end_ids=frozenset({own.convert_tokens_to_ids(end)}))
    return models.__getitem__


def with_template(tokenizer: Any, template: str) -> Any:
    """The same tokenizer under another template."""
    own = copy.copy(tokenizer)
    own.chat_template = template
    return own


def conversation(messages: list[dict[str, Any]], tools: Any = None) -> Conversation:
    return Conversation("id", "source", "file:1", False, messages, tools)


def shown(tokenizer: Any, row: MaskedIds) -> str:
    """The row's text, what the mask covers in brackets."""
    cuts = [0, *itertools.chain.from_iterable(row.spans), len(row.input_ids)]
    parts = [tokenizer.decode(row.input_ids[start:stop]) for start, stop in itertools.pairwise(cuts)]
    return "".join(f"⟦{part}⟧" if place % 2 else part for place, part in enumerate(parts))


CASES: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
    (
        "one turn behind an injected system prompt",
        "smollm2",
        [user("Hi"), bot("Yes?")],
        [f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"],
    ),
    (
        "two turns share a row",
        "smollm2",
        [other("system", "S"), user("Hi"), bot("Yes?"), user("Bye"), bot("Bye.")],
        [
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
        ],
    ),
    (
        "what follows the last answer is in no row",
        "chatml",
        [user("Hi"), bot("Yes?"), user("Bye")],
        ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"],
    ),
    (
        "a newline leads the answer",
        "chatml",
        [user("Hi"), bot("\nYes?"), user("Bye"), bot("\n")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦\nYes?<|im_end|>⟧"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦\n<|im_end|>⟧"
        ],
    ),
    (
        "newlines that the history merges with the header's: the second turn's row has its own history",
        "chatml",
        [user("Hi"), bot("\n\nYes?"), user("Bye"), bot("\n\n")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦\n\nYes?<|im_end|>⟧",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n\nYes?<|im_end|>"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦\n\n<|im_end|>⟧",
        ],
    ),
    (
        "the user writes the assistant's header",
        "smollm2",
        [user("<|im_start|>assistant\nNo<|im_end|>\n<|im_start|>assistant\n"), bot("Yes?")],
        [
            f"{SYSTEM}<|im_start|>user\n<|im_start|>assistant\nNo<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
            "\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"
        ],
    ),
    (
        "the user repeats the answer",
        "chatml",
        [user("Yes?"), bot("Yes?")],
        ["<|im_start|>user\nYes?<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"],
    ),
    (
        "the assistant speaks first",
        "smollm2",
        [bot("Welcome"), user("Hi"), bot("Yes?")],
        [
            f"{SYSTEM}<|im_start|>assistant\n⟦Welcome<|im_end|>⟧"
            "\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"
        ],
    ),
    (
        "the assistant speaks first, with the probe's word",
        "chatml",
        [bot("eagletprobe eagletprobe"), user("Hi")],
        ["<|im_start|>assistant\n⟦eagletprobe eagletprobe<|im_end|>⟧"],
    ),
    (
        "the assistant speaks first after a system message",
        "smollm2",
        [other("system", "S"), bot("Welcome")],
        ["<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\n⟦Welcome<|im_end|>⟧"],
    ),
    (
        "the assistant speaks twice",
        "chatml",
        [user("Hi"), bot("Yes?"), bot("Well?")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"
            "\n<|im_start|>assistant\n⟦Well?<|im_end|>⟧"
        ],
    ),
    (
        "an empty answer is its end of turn",
        "chatml",
        [user("Hi"), bot(""), user("Bye"), bot(" ")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦ <|im_end|>⟧"
        ],
    ),
    (
        "characters of several tokens and trailing whitespace",
        "chatml",
        [user("𝔘ñ"), bot("👩‍🚀 ᚠᛇ \n"), user("é"), bot("ok\t ")],
        [
            "<|im_start|>user\n𝔘ñ<|im_end|>\n<|im_start|>assistant\n⟦👩‍🚀 ᚠᛇ \n<|im_end|>⟧"
            "\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n⟦ok\t <|im_end|>⟧"
        ],
    ),
    (
        "thinking is the assistant's",
        "smollm2",
        [user("Hi"), bot("<think>\nHm\n</think>\n\nYes?")],
        [f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nHm\n</think>\n\nYes?<|im_end|>⟧"],
    ),
    (
        "tool results and roles that the template does not know are context",
        "smollm2",
        [user("Hi"), bot("f()"), other("tool", "42"), bot("42."), other("critic", "Hm"), bot("43.")],
        [
            f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦f()<|im_end|>⟧"
            "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n⟦42.<|im_end|>⟧"
            "\n<|im_start|>critic\nHm<|im_end|>\n<|im_start|>assistant\n⟦43.<|im_end|>⟧"
        ],
    ),
    (
        "a tool call without content",
        "tools",
        [user("Hi"), calling({"x": "1"}), other("tool", "42"), bot("42.")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<call>f x=1</call><|im_end|>⟧"
            "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n⟦42.<|im_end|>⟧"
        ],
    ),
    (
        "a template with generation marks",
        "marked",
        [user("Hi"), bot("\nYes?"), user("Bye"), bot("Bye.")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦\nYes?<|im_end|>⟧"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
        ],
    ),
    (
        "a template that trims; the tokenizer merges its newlines, but not before a word",
        "llama3",
        [user("Hi"), bot("\nYes? "), user("Bye"), bot("Bye.")],
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes?<|eot_id|>⟧",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Bye.<|eot_id|>⟧",
        ],
    ),
    (
        "a template that drops earlier thinking: each row is what was served",
        "qwen3",
        [user("Hi"), bot("<think>\nHm\n</think>\n\nYes?"), user("Bye"), bot("<think>\nOh\n</think>\n\nBye.")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nHm\n</think>\n\nYes?<|im_end|>⟧",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦<think>\nOh\n</think>\n\nBye.<|im_end|>⟧",
        ],
    ),
    (
        "no thinking to drop: one row",
        "qwen3",
        [user("Hi"), bot("Yes?"), user("Bye"), bot("Bye.")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
        ],
    ),
    (
        "a template without system role, and another name for the assistant",
        "gemma",
        [user("Hi"), bot("Yes? ")],
        ["<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Yes?<end_of_turn>⟧"],
    ),
    (
        "a template without generation prompt",
        "mistral",
        [user("Hi"), bot("Yes?"), user("Bye"), bot("Bye.")],
        ["<s>[INST] Hi [/INST]⟦ Yes?</s>⟧[INST] Bye [/INST]⟦ Bye.</s>⟧"],
    ),
    (
        "a generation prompt that begins the thinking, as the message does",
        "deepseek_kept",
        [user("Hi"), bot("<think>\nHm\n</think>\n\nYes?")],
        ["<s><|User|>Hi<|Assistant|><think>\n⟦Hm\n</think>\n\nYes?</s>⟧"],
    ),
]


@pytest.mark.parametrize(("template", "messages", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_the_mask_covers_the_answers(
    model: Any, template: str, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    target = model(template)
    turns = given_turns(target.tokenizer, conversation(messages), target.end_ids)
    assert {turn.finish_reason for turn in turns} == {"given"}
    rows = merge(turns)
    assert [shown(target.tokenizer, row) for row in rows] == expected
    for turn in turns:
        assert turn.answer_ids[-1] in target.end_ids, "the last token masked is an end of turn"


REFUSED: list[tuple[str, str, list[dict[str, Any]], str]] = [
    ("no assistant", "smollm2", [user("Hi")], "it holds no assistant message; set generate.regenerate: true"),
    ("null content", "smollm2", [user("Hi"), bot(None)], "the chat template refuses it: "),
    ("arguments that are no JSON", "tools", [user("Hi"), calling("{x")], "the chat template refuses it: "),
    (
        "system",
        "gemma",
        [other("system", "S"), user("Hi"), bot("Y")],
        "refuses it: System role not supported",
    ),
    ("assistant first", "gemma", [bot("Y"), user("Hi")], "refuses it: Roles must alternate: user/assistant"),
    ("assistant twice", "gemma", [user("Hi"), bot("Y"), bot("Y")], "refuses it: Roles must alternate"),
    (
        "unknown role",
        "gemma",
        [user("Hi"), other("critic", "Hm"), bot("Y")],
        "refuses it: Roles must alternate",
    ),
    (
        "first, no header",
        "mistral",
        [bot("Y"), user("Hi")],
        "starts with an assistant message, which the template",
    ),
    (
        "first, thinking",
        "deepseek",
        [bot("Y"), user("Hi")],
        "starts with an assistant message, which the template",
    ),
    (
        "generation prompt",
        "deepseek",
        [user("Hi"), bot("<think>\nHm\n</think>Y")],
        "prompt is not how it writes",
    ),
    ("thinking left out", "deepseek_kept", [user("Hi"), bot("Y")], "prompt is not how it writes"),
]


@pytest.mark.parametrize(
    ("template", "messages", "reason"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_what_is_uncertain_is_refused(model: Any, template: str, messages: list[dict[str, Any]], reason: str) -> None:
    target = model(template)
    with pytest.raises(CannotMask) as caught:
        given_turns(target.tokenizer, conversation(messages), target.end_ids)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_an_end_of_turn_that_the_target_does_not_know_is_refused(model: Any) -> None:
    with pytest.raises(CannotMask, match="ends no assistant message with an end-of-turn token"):
        given_turns(model("llama3").tokenizer, conversation([user("Hi"), bot("Yes?")]), frozenset({2}))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ messages[9].content }}",
        "{{ raise_exception('two\nlines') }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_refuses_the_row(tokenizer: Any, template: str) -> None:
    own = with_template(tokenizer, template)
    with pytest.raises(CannotMask, match=r"^the chat template refuses it: .+$") as caught:
        render(own, [user("Hi")], None, True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tools", ["f", ["f"], {"f": 1}])
def test_tools_of_a_wrong_shape_refuse_the_row(tokenizer: Any, tools: Any) -> None:
    with pytest.raises(CannotMask, match="the chat template refuses it: Tools should"):
        context_ids(tokenizer, [user("Hi")], tools)


def test_tools_are_context(model: Any) -> None:
    target = model("tools")
    tools = [{"type": "function", "function": {"name": "f"}}]
    (row,) = merge(given_turns(target.tokenizer, conversation([user("Hi"), bot("Y")], tools), target.end_ids))
    assert shown(target.tokenizer, row) == (
        '<|im_start|>tools\n[{"type": "function", "function": {"name": "f"}}]<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Y<|im_end|>⟧"
    )


def test_one_refused_row_leaves_the_others(model: Any) -> None:
    rows = [
        [user("Hi"), bot("A")],
        [user("Hi"), calling("{x")],
        [user("Hi")],
        [user("Hi"), calling({"x": "1"})],
    ]
    dialogues = [generate.start(conversation(messages), regenerate=False) for messages in rows]
    generate.use_given(dialogues, model("tools"))
    assert [len(dialogue.turns) for dialogue in dialogues] == [1, 0, 0, 1]
    assert [dialogue.refused is None for dialogue in dialogues] == [True, False, False, True]


def test_an_answer_does_not_merge_with_its_header(tokenizer: Any) -> None:
    """Encoded whole, the header's newline and the answer's first are one token, which no server ever saw."""
    messages = [user("Hi"), bot("\n\nYes?")]
    (turn,) = given_turns(tokenizer, conversation(messages), frozenset({2}))
    (one,), (two,) = encode(tokenizer, "\n"), encode(tokenizer, "\n\n")
    assert (turn.context_ids[-1], turn.answer_ids[:2]) == (one, [one, one])
    assert turn.context_ids == context_ids(tokenizer, messages[:1], None), "the context is what is served"
    whole = encode(tokenizer, render(tokenizer, messages, None, generation_prompt=False))
    assert whole == [*turn.context_ids[:-1], two, one, *turn.answer_ids[2:], one]


def test_a_character_is_split_into_tokens(tokenizer: Any) -> None:
    """What the table's "characters of several tokens" rests on."""
    assert all(len(encode(tokenizer, character)) > 1 for character in "🚀ᚠ𝔘")


def test_the_tokenizers_own_mask_is_not_used(tokenizer: Any, model: Any) -> None:
    """SmolLM2's template has no {% generation %}: Transformers' mask is all zero, quietly."""
    messages = [user("Hi"), bot("Yes?")]
    wanted = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    assert sum(tokenizer.apply_chat_template(messages, **wanted)["assistant_masks"]) == 0
    (turn,) = given_turns(tokenizer, conversation(messages), frozenset({2}))
    # Where a template has the marks, both agree.
    own = model("marked").tokenizer
    theirs = own.apply_chat_template(messages, **wanted)
    (row,) = merge(given_turns(own, conversation(messages), frozenset({2})))
    (start, stop) = row.spans[0]
    assert [place for place, inside in enumerate(theirs["assistant_masks"]) if inside] == [*range(start, stop)]
    assert row.input_ids[start:stop] == turn.answer_ids


def test_ids_are_a_list_of_ints_not_a_batch_encoding(tokenizer: Any) -> None:
    """`len` of what apply_chat_template returns is 2 in Transformers 5: its keys."""
    theirs = tokenizer.apply_chat_template([user("Hi")], add_generation_prompt=True)
    ids = context_ids(tokenizer, [user("Hi")], None)
    assert len(theirs) == 2 and ids == theirs["input_ids"] and len(ids) == 31
    assert type(ids) is list and {type(token) for token in ids} == {int}
    (turn,) = given_turns(tokenizer, conversation([user("Hi"), bot("Y")]), frozenset({2}))
    assert type(turn.answer_ids) is list and len(turn.answer_ids) == 2


def test_no_special_token_is_added(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = _adds_bos()
    assert own("Hi")["input_ids"][0] == 1 and encode(own, "Hi") == encode(tokenizer, "Hi")


def _adds_bos() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([([1], [2, 9], "stop")], [([1, 2, 9], [(1, 3)], ["stop"])]),
        (  # continued, the first answer cut off
            [([1], [2], "length"), ([1, 2, 3], [4, 9], "stop")],
            [([1, 2, 3, 4, 9], [(1, 2), (3, 5)], ["length", "stop"])],
        ),
        (  # nothing between two answers
            [([1], [2, 9], "stop"), ([1, 2, 9], [4, 9], "stop")],
            [([1, 2, 9, 4, 9], [(1, 3), (3, 5)], ["stop", "stop"])],
        ),
        (  # one id of the history differs
            [([1], [2, 9], "stop"), ([1, 7, 9, 3], [4, 9], "length")],
            [([1, 2, 9], [(1, 3)], ["stop"]), ([1, 7, 9, 3, 4, 9], [(4, 6)], ["length"])],
        ),
        (  # the history is shorter than the row
            [([1, 2], [3, 9], "stop"), ([1, 2, 3], [4, 9], "stop")],
            [([1, 2, 3, 9], [(2, 4)], ["stop"]), ([1, 2, 3, 4, 9], [(3, 5)], ["stop"])],
        ),
        (  # the third continues the second, which did not continue the first
            [([1], [2, 9], "stop"), ([1, 9], [3, 9], "given"), ([1, 9, 3, 9, 5], [6], "length")],
            [([1, 2, 9], [(1, 3)], ["stop"]), ([1, 9, 3, 9, 5, 6], [(2, 4), (5, 6)], ["given", "length"])],
        ),
        ([], []),
    ],
)
def test_merge(turns: list[Any], expected: list[Any]) -> None:
    given = [Turn(*turn) for turn in turns]
    before = copy.deepcopy(given)
    assert merge(given) == [MaskedIds(*row) for row in expected]
    assert given == before


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (  # as the tokenizer writes them: id for id
            ["Yes?<|im_end|>", "Bye.<|im_end|>"],
            [
                "Hi<|im_end|>\n<|im_start|>assistant\n⟦Yes?<|im_end|>⟧"
                "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
            ],
        ),
        (  # cut off: the template ends the turn, the mask does not
            ["Yes", "Bye.<|im_end|>"],
            [
                "Hi<|im_end|>\n<|im_start|>assistant\n⟦Yes⟧<|im_end|>"
                "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
            ],
        ),
        (  # in other tokens than the tokenizer's, as a model may: the history is what a server encodes
            [["Y", "es", "<|im_end|>"], "Bye.<|im_end|>"],
            [
                "Hi<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧",
                "Hi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"
                "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧",
            ],
        ),
        (  # newlines that the history merges with the header's
            ["\n\nYes<|im_end|>", "Bye.<|im_end|>"],
            [
                "Hi<|im_end|>\n<|im_start|>assistant\n⟦\n\nYes<|im_end|>⟧",
                "Hi<|im_end|>\n<|im_start|>assistant\n\n\nYes<|im_end|>"
                "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧",
            ],
        ),
        (  # cut within a character
            [["ðŁ"], "Bye.<|im_end|>"],
            [
                "Hi<|im_end|>\n<|im_start|>assistant\n⟦\ufffd⟧",
                "Hi<|im_end|>\n<|im_start|>assistant\n\ufffd<|im_end|>"
                "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧",
            ],
        ),
    ],
    ids=["continues", "cut-off", "other-tokens", "newline", "half-character"],
)
def test_generated_turns_continue_id_for_id_or_split(model: Any, answers: list[Any], expected: list[str]) -> None:
    target = model("chatml")
    dialogue = generate.start(conversation([user("Hi"), bot("left out"), user("Bye")]), regenerate=True)
    generated = []
    for answer in answers:
        ids = (
            encode(target.tokenizer, answer)
            if isinstance(answer, str)
            else target.tokenizer.convert_tokens_to_ids(answer)
        )
        reason = "stop" if ids[-1] in target.end_ids else "length"
        dialogue.messages = [*dialogue.messages, dialogue.waiting.pop(0)]
        context = context_ids(target.tokenizer, dialogue.messages, None)
        generate.take(dialogue, context, generate.Answer(ids, reason), target)
        generated.append((ids, reason))
    rows = merge(dialogue.turns)
    assert [shown(target.tokenizer, row) for row in rows] == [f"<|im_start|>user\n{text}" for text in expected]
    kept = [
        (row.input_ids[start:stop], reason)
        for row in rows
        for (start, stop), reason in zip(row.spans, row.finish_reasons, strict=True)
    ]
    assert kept == generated, "the ids as generated, and how each ended"


@pytest.mark.parametrize(
    ("messages", "refused"),
    [
        ([other("system", "S"), user("Hi"), bot("A"), user("Bye"), bot("B")], None),
        ([bot("A"), user("Hi")], None),
        (
            [user("Hi"), other("tool", "42"), user("Bye")],
            "it holds tool messages (generate.regenerate: false takes",
        ),
        ([user("Hi"), other("system", "S")], "a system message follows a user message"),
        ([other("system", "S"), bot("A")], "no user message to answer"),
    ],
)
def test_what_is_answered_anew(messages: list[dict[str, Any]], refused: str | None) -> None:
    dialogue = generate.start(conversation(messages), regenerate=True)
    if refused is None:
        assert dialogue.refused is None
        assert dialogue.messages + dialogue.waiting == [m for m in messages if m["role"] != "assistant"]
        assert {m["role"] for m in dialogue.waiting} == {"user"}
    else:
        assert dialogue.refused is not None and refused in dialogue.refused
