"""Run by SGLang's Python: which streams `choose_streams` sets on SGLang's own classes; prints JSON.

The classes' own methods on objects that have what those read: no weights, no device.
"""

import importlib
import json
import sys
from types import SimpleNamespace

import torch
from eaglet_capture.hooks import choose_streams

LAYERS = 8
# Name, module, the class that a server loads, and the class of the decoder within.
CLASSES = [
    ("llama", "llama", "LlamaForCausalLM", "LlamaModel"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM", "Qwen2Model"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM", "Qwen3Model"),
    ("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    ("gemma3", "gemma3_causal", "Gemma3ForCausalLM", "Gemma3TextModel"),
    ("glm4_moe_lite", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    ("gpt_oss", "gpt_oss", "GptOssForCausalLM", "GptOssModel"),
    ("deepseek_v2", "deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2Model"),
    ("deepseek_v3", "deepseek_v2", "DeepseekV3ForCausalLM", "DeepseekV2Model"),
]


def bare(kind: type) -> torch.nn.Module:
    """An object of a module class whose own constructor did not run."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


def model(module: str, outer: str, inner: str) -> torch.nn.Module:
    """A model of these classes with LAYERS empty layers."""
    found = importlib.import_module(f"sglang.srt.models.{module}")
    made = bare(getattr(found, outer))
    made.config = SimpleNamespace(num_hidden_layers=LAYERS)
    made.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    made.model = bare(getattr(found, inner))
    made.model.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS))
    made.model.layers_to_capture = []
    return made


def main() -> None:
    """For each class and each choice of layers in argv[1]: the streams, or the error."""
    results: dict[str, list[object]] = {}
    for layers in json.loads(sys.argv[1]):
        for name, *classes in CLASSES:
            made = model(*classes)
            results.setdefault(name, []).append(outcome(made, layers))
        wrapper = bare(importlib.import_module("sglang.srt.models.kimi_k25").KimiK25ForConditionalGeneration)
        wrapper.language_model = model("deepseek_v2", "DeepseekV3ForCausalLM", "DeepseekV2Model")
        results.setdefault("kimi_k25", []).append(outcome(wrapper, layers))
    print(json.dumps(results))


def outcome(made: torch.nn.Module, layers: list[int]) -> object:
    """The streams that are set, and what SGLang alone would have set."""
    try:
        return choose_streams(made, layers)
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    main()
