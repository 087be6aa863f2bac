"""Hidden states out of a Transformers model: hooks on the chosen layers and the final norm.

Hooks, not `output_hidden_states=True`: only the chosen streams are held, and the last layer's output is there
before the final norm too. The audit and the tests compare against `output_hidden_states`.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from eaglet.errors import EagletError
from eaglet.layers import FINAL, layer_of


def decoder(model: Any) -> Any:
    """The stack of decoder layers of a causal language model (the text part of a multi-modal one).

    Raises:
        EagletError: the model's modules are not named as Transformers names them.
    """
    found = model.get_decoder()
    found = getattr(found, "language_model", found)
    if not hasattr(found, "layers") or not hasattr(found, "norm"):
        raise EagletError(f"{type(model).__name__} has no decoder with `layers` and `norm`: it cannot be captured")
    return found


def forward(model: Any, streams: Sequence[str], **inputs: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Run the decoder (not the head) and keep the named streams.

    Args:
        model: a Transformers causal language model.
        streams: "L07" is the output of layer 7, "final" the output of the final norm.
        inputs: what the decoder takes: `input_ids` [B, T], `attention_mask`, `past_key_values`, …

    Returns:
        {stream: [B, T, H] in the model's dtype}, and the decoder's own output.
    """
    stack = decoder(model)
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept[name] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as hooks, torch.inference_mode():
        for name in streams:
            module = stack.norm if name == FINAL else stack.layers[layer_of(name)]
            hooks.callback(module.register_forward_hook(keep(name)).remove)
        output = stack(**inputs)
    return kept, output
