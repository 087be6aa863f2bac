"""A trained drafter as an engine loads it: its folder, checked tensor by tensor, and a model card.

SGLang's form is the one that training saves (`drafter.save`). vLLM's is speculators' (eagle3.md, "Exported checkpoint,
vLLM / speculators"): other names, the embedding beside the weights, and layer ids that count the stream *entering*.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from eaglet import drafter, files
from eaglet.drafter import DrafterConfig
from eaglet.errors import EagletError
from eaglet.layers import to_entering
from eaglet.target import Target

Engine = Literal["sglang", "vllm"]
SPECULATORS = "0.9.0"  # whose configuration this is


def write(source: Path, folder: Path, engine: Engine, target: Target, base: str, steps: int, card: str) -> None:
    """Write `folder` for an engine from the drafter that training saved in `source`.

    Args:
        target: whose drafter it is.
        base: its hub id or name.
        steps: tokens drafted a cycle, where the configuration names them.
        card: the text of README.md.

    Raises:
        EagletError: the folder holds something else; the drafter is damaged, or of another target.
    """
    if folder.exists() and any(folder.iterdir()) and "eaglet" not in _config(folder):
        raise EagletError(f"{folder} is not empty and was not exported by eaglet: name another folder")
    tensors, config = drafter.read(source)
    raw = _config(source)
    if config.vocab_size != target.fingerprint.vocab_size or config.hidden_size != target.fingerprint.hidden_size:
        raise EagletError(f"{source} is another target's drafter: run `dvc repro train`")
    if engine == "vllm":
        embedding = target.embedding().to(torch.bfloat16)
        raw = speculators_config(config, raw, target, base, steps)
        tensors = speculators_tensors(tensors, embedding)
        check(tensors, config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    with files.atomic(folder / "model.safetensors") as file:
        file.write(safetensors_torch.save(tensors, metadata={"format": "pt"}))
    if (generation := target.folder / "generation_config.json").is_file():
        shutil.copyfile(generation, folder / "generation_config.json")
    (folder / "README.md").write_text(card, encoding="utf-8")
    files.write_json(folder / "config.json", raw)


def _config(folder: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return raw


def speculators_tensors(tensors: dict[str, Tensor], embedding: Tensor) -> dict[str, Tensor]:
    """The tensors under speculators' names, with the target's embedding [V, H]."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return renamed | {"embed_tokens.weight": embedding.contiguous()}


def check(tensors: dict[str, Tensor], config: DrafterConfig) -> None:
    """Names, shapes and types of speculators' form.

    Raises:
        EagletError: one is missing, unknown, or of another shape or type.
    """
    embedding = tensors["embed_tokens.weight"]
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size) or embedding.dtype != torch.bfloat16:
        raise EagletError(f"the target's embedding is {embedding.dtype} {list(embedding.shape)}")
    rest = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items() if one is not embedding}
    drafter.check_tensors(rest, config, "the export")


def speculators_config(
    config: DrafterConfig, raw: dict[str, Any], target: Target, base: str, steps: int
) -> dict[str, Any]:
    """config.json of speculators' form; `raw` is SGLang's.

    `norm_before_residual` is always written: its default is true in vLLM and false in speculators. RoPE stands there
    in the old and in the new spelling: vLLM reads either, by its release of Transformers.
    """
    layer = {name: raw[name] for name in _LAYER_KEYS} | {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_parameters": config.rope_parameters,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": to_entering(raw["eaglet"]["layers"]),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {
                "name_or_path": base,
                "architectures": [target.fingerprint.architecture],
            },
        },
        "eaglet": raw["eaglet"],
    }


_LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
)


def serve_command(engine: Engine, base: str, folder: str, steps: int) -> str:
    """How to serve the target with the drafter."""
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {base} --speculative-algorithm EAGLE3 \\\n"
            f"  --speculative-draft-model-path {folder} --speculative-num-steps {steps} \\\n"
            f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
        )
    settings = json.dumps({"method": "eagle3", "model": folder, "num_speculative_tokens": steps})
    return f"vllm serve {base} --speculative-config '{settings}'"


def card(
    engine: Engine, base: str, folder: str, steps: int, layers: list[int], metrics: dict[str, Any], data: str
) -> str:
    """The model card.

    Args:
        base: the target, as a hub id or a folder.
        metrics: of the stages, by name; those that have not run are left out.
        data: the hash that names the rows and states it was trained on.
    """
    train, measured, vocab = metrics.get("train"), metrics.get("evaluate"), metrics.get("vocab")
    lines = ["---", f"base_model: {base}", "tags: [eagle3, speculative-decoding]", "---", ""]
    lines += [f"# EAGLE-3 drafter for {base}", ""]
    lines += [f"One decoder layer that reads the outputs of the target's layers {layers} (0-based). Serve it:", ""]
    lines += ["```sh", serve_command(engine, base, folder, steps), "```", ""]
    table = []
    if measured:
        table.append((f"acceptance length, {measured['draft_steps']} drafted", f"{measured['acceptance_length']:.3f}"))
        table.append(("on held-out prompts", f"{measured['prompts']}, greedy"))
        table += [(f"acceptance length, {name}", f"{value:.3f}") for name, value in measured["by_source"].items()]
    if train:
        table.append(("trained on", f"{train['rows']:,} rows, {train['steps']:,} steps"))
        if train["heldout"]:
            accuracies = ", ".join(f"{value:.3f}" for value in train["heldout"]["acc"])
            table.append(("held-out accuracy by step", accuracies))
    if vocab:
        table.append(("draft vocabulary", f"{vocab['size']:,}, covers {vocab['coverage']:.3f} of the answers"))
    table.append(("data", f"`{data}`"))
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in table), ""]
    return "\n".join([*lines, "Made with eaglet.", ""])
