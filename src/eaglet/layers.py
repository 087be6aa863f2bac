"""Layer ids: this project's convention, and what other systems mean by their numbers.

A layer id here is the 0-based id of a decoder layer whose *output* is kept: the residual stream that leaves it.
"""

from typing import Literal

from eaglet.errors import EagletError

FINAL = "final"  # the state after the target's final norm: head(final) gives its logits
FINAL_KIND = "post_norm"

# Where SGLang 0.5.23 adds 1 to the layer ids only if the first is 1 (eagle3.md, "Layer ids").
_SGLANG_CONDITIONAL = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite")


def choose(layers: Literal["auto"] | list[int], num_layers: int) -> list[int]:
    """The layers to keep, low to high; "auto" is [1, L//2-1, L-4] as in SpecForge.

    Raises:
        EagletError: not three distinct ids in rising order within the model.
    """
    chosen = [1, num_layers // 2 - 1, num_layers - 4] if layers == "auto" else layers
    if sorted(set(chosen)) != chosen or len(chosen) != 3 or not 0 <= chosen[0] <= chosen[-1] < num_layers:
        raise EagletError(
            f"params.yaml: extract.layers {chosen} must be three rising ids of layers whose outputs are kept, "
            f"from 0 to {num_layers - 1} for this target"
        )
    return chosen


def stream(layer: int) -> str:
    """The name of a layer's output stream: its folder in data/states."""
    return f"L{layer:02d}"


def layer_of(stream_name: str) -> int:
    """The inverse of `stream`."""
    return int(stream_name.removeprefix("L"))


def streams(layers: list[int]) -> list[str]:
    """All stored streams: the layers', then the final state."""
    return [*map(stream, layers), FINAL]


def to_entering(layers: list[int]) -> list[int]:
    """Ids as HF `hidden_states[k]`, vLLM and speculators ≥ 0.5 count: the stream *entering* layer k."""
    return [layer + 1 for layer in layers]


def from_entering(layers: list[int]) -> list[int]:
    """The inverse of `to_entering`.

    Raises:
        EagletError: 0 is the embedding's output, which no layer puts out.
    """
    if min(layers) < 1:
        raise EagletError(f"layer ids {layers} hold 0, the embedding's output: it is no layer's output")
    return [layer - 1 for layer in layers]


def to_output(layers: list[int]) -> list[int]:
    """Ids as SGLang (given explicitly), SpecForge, ModelOpt and speculators ≤ 0.4 count: *outputs*, as here."""
    return list(layers)


def to_sglang(layers: list[int], model_type: str) -> list[int]:
    """The ids that make SGLang capture the *outputs* of `layers` (eagle3.md, "Layer ids").

    Raises:
        EagletError: no ids do, on a class that adds 1 only where the first id is 1.
    """
    if model_type not in _SGLANG_CONDITIONAL or layers[0] == 1:
        return to_output(layers)
    if layers[0] == 0:
        raise EagletError(f"SGLang cannot capture the outputs of layers {layers} of a {model_type} target")
    return to_entering(layers)


def sglang_default(num_layers: int) -> list[int]:
    """What SGLang, vLLM and speculators ≥ 0.5 take where no ids are given, as outputs: entering [2, L//2, L-3]."""
    return from_entering([2, num_layers // 2, num_layers - 3])
