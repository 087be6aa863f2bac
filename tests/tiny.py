"""Tiny models of several families with random weights, and rows for them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}


def model(family: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of a family with random weights."""
    return random_model({**FAMILIES[family], **more}, dtype)


def random_model(family: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, norms included: a norm of ones would hide a forgotten one."""
    torch.manual_seed(0)
    values = {**SIZES, **family}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
            elif weight.dim() > 1:
                weight.normal_(std=0.08)
    return network.eval()


def rows(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Token ids of many lengths, 1 and `longest` among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (count - 2,), generator=generator).tolist()]
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def save_target(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama of 8 layers in a folder, with a real tokenizer: what `target.model` may name."""
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "num_hidden_layers": 8}
    network = model("llama", torch.bfloat16, **sizes)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
