"""Real decoding: target and drafter together, as a server runs a greedy EAGLE-3 chain, one request at a time.

A cycle drafts K tokens, verifies them in one forward of the target, keeps the longest prefix that the target
would have written and the target's own next token, and gives the drafter the target's streams of what was
kept. What comes out is the target's greedy answer, token for token (up to ties in its arithmetic).
"""

import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglet import capture as hooks
from eaglet.attention import KeyValues, Segments
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter
from eaglet.layers import FINAL, stream, streams

# Transformers 5.24 renames `past_key_values` to `cache`; 5.17 knows the old name alone.
warnings.filterwarnings("ignore", message=".*`past_key_values` is deprecated", category=FutureWarning)

# (model, input_ids int64 [n], cache) → the chosen layers' outputs side by side [n, 3H], logits [n, V]
Capture = Callable[[Any, Tensor, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Chain:
    """An answer and how it came about.

    Attributes:
        output_ids: the answer, its end token included.
        accepted: tokens that each verify cycle added to the answer, the target's own one among them. The
            first token comes from prefill, so 1 + Σ accepted is the answer's length: what an end token or the
            limit cuts off the last cycle is not counted.
        hits: [K], cycles in which drafted tokens 0 … j all went into the answer.
    """

    output_ids: list[int]
    accepted: list[int]
    hits: list[int]


def acceptance_length(chains: Sequence[Chain]) -> float:
    """Tokens that verify cycles emitted / verify cycles, over all answers; 0 where there was no cycle."""
    cycles = sum(len(chain.accepted) for chain in chains)
    return sum(sum(chain.accepted) for chain in chains) / max(1, cycles)


def capture_with_hooks(layers: Sequence[int]) -> Capture:
    """Capture the outputs of `layers` (0-based) by forward hooks on a Transformers model.

    The output of layer k is `hidden_states[k + 1]` of `output_hidden_states=True`, but for the last layer.
    """

    @torch.inference_mode()
    def capture(model: Any, input_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        kept, _ = hooks.forward(
            model, streams(list(layers)), input_ids=input_ids[None], past_key_values=cache, use_cache=True
        )
        aux = torch.cat([kept[stream(layer)] for layer in layers], dim=-1)
        return aux[0], model.get_output_embeddings()(kept[FINAL])[0]

    return capture


@torch.inference_mode()
def draft(
    drafter: Drafter, vocab: DraftVocabulary, feature: Tensor, token: int, context: KeyValues, *, steps: int
) -> tuple[list[int], list[Tensor]]:
    """Draft a chain of tokens from the last row of the context, the features fed back.

    Args:
        feature: g⁰ of that row, [1, H].
        token: the last token of the answer, which is the row's next.

    Returns:
        K target ids, and gᵏ⁺¹ [1, H] of each step.
    """
    seen = len(context.keys)
    position, segments = torch.tensor([seen - 1], device=feature.device), Segments.of([1], [seen]).to(feature.device)
    own: KeyValues | None = None
    drafted: list[int] = []
    features: list[Tensor] = []
    for k in range(steps):
        tokens = torch.tensor([token], device=feature.device)
        feature, own = drafter.step(k, feature, tokens, position, context, segments, own)
        draft_id = int(drafter.logits(feature).argmax())
        token = draft_id + int(vocab.d2t[draft_id])
        drafted.append(token)
        features.append(feature)
    return drafted, features


@torch.inference_mode()
def decode(
    target_model: Any,
    drafter: Drafter,
    vocab: DraftVocabulary,
    prompt_ids: Sequence[int],
    *,
    capture: Capture,
    steps: int,
    max_new_tokens: int,
    eos_ids: Set[int],
) -> Chain:
    """The target's greedy answer, drafted `steps` tokens at a time.

    Args:
        target_model: a Transformers causal language model in evaluation mode, on the drafter's device.
        capture: gives the streams that the drafter was trained on; see `capture_with_hooks`.
        eos_ids: tokens that end the answer.
    """
    from transformers import DynamicCache

    device = drafter.fc.weight.device
    cache = DynamicCache(config=target_model.config)
    aux, logits = capture(target_model, torch.tensor(prompt_ids, device=device), cache)
    cache.activate_past_recording()  # so that sliding-window layers can take rejected tokens back
    output = [int(logits[-1].argmax())]
    # The drafter's row t needs the token at t + 1: with the first new one, all of the prompt's rows have it.
    new_tokens = [*prompt_ids[1:], output[0]]
    context: KeyValues | None = None
    accepted: list[int] = []
    hits = [0] * steps
    while len(output) < max_new_tokens and output[-1] not in eos_ids:
        features = drafter.fuse(aux)  # g⁰ of the new rows, [n, H]
        context = _extend(drafter, context, features, new_tokens)
        drafted, _ = draft(drafter, vocab, features[-1:], output[-1], context, steps=steps)
        aux, logits = capture(target_model, torch.tensor([output[-1], *drafted], device=device), cache)
        choices = logits.argmax(-1).tolist()  # [K + 1], the target's token behind each
        right = _matching_prefix(drafted, choices)
        cache.crop(right - steps)
        aux = aux[: right + 1]
        new_tokens = choices[: right + 1]
        kept = _until_end(new_tokens, max_new_tokens - len(output), eos_ids)
        output += kept
        accepted.append(len(kept))
        hits = [count + (place < min(right, len(kept))) for place, count in enumerate(hits)]
    return Chain(output, accepted, hits)


@torch.inference_mode()
def greedy(target_model: Any, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Set[int]) -> list[int]:
    """The target's greedy answer without a drafter, token by token; its end token included."""
    from transformers import DynamicCache

    cache = DynamicCache(config=target_model.config)
    ids, output = list(prompt_ids), list[int]()
    while len(output) < max_new_tokens and not (output and output[-1] in eos_ids):
        inputs = torch.tensor([ids], device=target_model.device)
        logits = target_model(input_ids=inputs, past_key_values=cache, use_cache=True).logits
        ids = [int(logits[0, -1].argmax())]
        output += ids
    return output


def _extend(drafter: Drafter, context: KeyValues | None, features: Tensor, next_tokens: Sequence[int]) -> KeyValues:
    """The context with the step-0 keys of new rows, made from the target's streams."""
    tokens = torch.tensor(list(next_tokens), device=features.device)
    start = 0 if context is None else len(context.keys)
    new = drafter.context(features, tokens, torch.arange(start, start + len(tokens), device=features.device))
    return new if context is None else KeyValues(*(torch.cat(both) for both in zip(context, new, strict=True)))


def _matching_prefix(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """How many of the first tokens agree."""
    right = 0
    while right < len(drafted) and drafted[right] == choices[right]:
        right += 1
    return right


def _until_end(tokens: list[int], room: int, eos_ids: Set[int]) -> list[int]:
    """At most `room` of the tokens, none behind an end token."""
    ends = [place + 1 for place, token in enumerate(tokens) if token in eos_ids]
    return tokens[: min([room, *ends])]
