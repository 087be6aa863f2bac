"""Independent oracle: speculators' own EAGLE-3 training forward, on the CPU in fp32.

`python speculators_eagle3.py IN.safetensors OUT.safetensors [eager|sdpa]`, in a venv made from the
requirements.txt beside this file. It shares no code with the project: the model, the shift of the batch, the
collation, the training-time test and the loss are those of the published package. Its default attention,
flex, has no backward on the CPU, and its default loss is a Triton kernel; their eager twins, also its own,
are used.

IN: the drafter under SGLang's names (`fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`,
`t2d`), `embed_tokens.weight [V,H]`, `input_ids [T]`, `aux [T,3H]`, `loss_mask [T]`, the teacher as
`teacher_logits [T,V]` or as `final [T,H]` with `head.weight [V,H]` (`final` is after the norm; before it if
`final_norm.weight [H]` is given), optionally `lengths [n]` (documents packed in one row; sum T), and the JSON
metadata key `config`: hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim,
rope_theta, rms_norm_eps, vocab_size, draft_vocab_size, ttt_steps, optionally rope_scaling and loss_decay
(default 1).

OUT, in the project's rows (row t, step k: feature of position t, input token x_{t+1+k}):
- `logits [K,T,Vd]`, `features [K,T,H]` (g^{k+1}, before the norm), `valid [K,T]`: x_{t+1+k} is in t's
  document. Compare valid rows only: the others are computed with a later document's token or token 0, and the
  last row of a document, which speculators drops, is NaN.
- `target_probs [K,T,Vd]`, `kl [K,T]`: what its loss compared with what, and KL(target || draft), per row.
- `counted [K,T]`: rows in the loss of the step: loss_mask[t+1+k]; with `lengths` also rows not `valid`.
- `loss_steps [K]` (times loss_decay^k), `loss []`, and `grad.NAME`: its gradient for each trained tensor.
- `full_acc [K]`: its metric "right at this and every earlier step" over the counted rows of the step (rows
  with loss_mask[t+1] = 0 never count as right), argmax of both sides within the draft vocabulary.
"""

import json
import os
import sys
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU in sight the package compiles its forward
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.losses.eager import kl_div_loss
from speculators.models.eagle3 import shift_batch
from speculators.train.data import CollateFn
from torch import Tensor
from transformers import LlamaConfig

DRAFT = ("fc.", "midlayer.", "norm.", "lm_head.")


def build(cfg: dict[str, Any], data: dict[str, Tensor], attention: str) -> Eagle3DraftModel:
    """speculators' drafter with the weights of IN; strict, so no tensor is left at its initial value."""
    same = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    rope = {"rope_type": "default", "rope_theta": cfg["rope_theta"], **(cfg.get("rope_scaling") or {})}
    sizes = {name: cfg[name] for name in [*same.split(), "vocab_size"]}
    layer = LlamaConfig(**sizes, num_hidden_layers=1, rope_parameters=rope)
    layer._attn_implementation = attention
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=cfg["draft_vocab_size"],
            norm_before_residual=False,
            norm_before_fc=False,
        )
    )
    state = {k.replace("midlayer.", "layers.0."): v.float() for k, v in data.items() if k.startswith(DRAFT)}
    state["embed_tokens.weight"] = data["embed_tokens.weight"].float()
    if model.use_draft_vocab:
        state |= {"t2d": data["t2d"].bool(), "d2t": data["d2t"]}
    if "final_norm.weight" in data:
        state["verifier_norm.weight"] = data["final_norm.weight"].float()
    else:
        model.add_module("verifier_norm", torch.nn.Identity())
    if "teacher_logits" in data:
        model.add_module("verifier_lm_head", torch.nn.Identity())
    else:
        state["verifier_lm_head.weight"] = data["head.weight"][data["t2d"].bool()].float()
    model.load_state_dict(state, strict=True)
    model.lm_head.weight.requires_grad_(True)  # the package freezes it
    return model


def batch_of(data: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Its own shift and collation of the documents, and the row t that each of its rows is."""
    total = len(data["input_ids"])
    lengths: list[int] = data.get("lengths", torch.tensor([total])).tolist()
    teacher = data["teacher_logits"][:, data["t2d"].bool()] if "teacher_logits" in data else data["final"]
    columns = {
        "input_ids": data["input_ids"],
        "hidden_states": data["aux"],
        "verifier_last_hidden_states": teacher,
        "loss_mask": data["loss_mask"].bool(),
        "row": torch.arange(total),
    }
    split = {name: torch.split(column, lengths) for name, column in columns.items()}
    documents = [
        {name: parts[i] for name, parts in split.items()}
        | {"lengths": torch.tensor([n]), "position_ids": torch.arange(n)}
        for i, n in enumerate(lengths)
    ]
    rows = torch.cat([document.pop("row")[:-1] for document in documents])
    width = data["aux"].shape[1] // 3
    batch = CollateFn(total - len(lengths), width, dtype=torch.float32, preprocess=shift_batch)(documents)
    batch.pop("error_records")
    return batch, rows


def run(cfg: dict[str, Any], data: dict[str, Tensor], attention: str) -> dict[str, Tensor]:
    """The package's forward and backward, seen through hooks and its replaceable row loss."""
    model = build(cfg, data, attention)
    batch, rows = batch_of(data)
    steps, total = cfg["ttt_steps"], len(data["input_ids"])
    logits: list[Tensor] = []
    features: list[Tensor] = []
    compared: list[tuple[Tensor, Tensor]] = []

    def row_loss(draft: Tensor, target: Tensor) -> Tensor:
        kl: Tensor = kl_div_loss(draft, target)
        compared.append((target.detach()[0].softmax(-1), kl.detach()[0]))
        return kl

    model.norm.register_forward_hook(lambda _, inputs, __: features.append(inputs[0].detach()[0]))
    model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output.detach()[0]))
    _, loss, metrics = model(
        **batch,
        ttt_steps=steps,
        ttt_step_loss_decay=cfg.get("loss_decay", 1.0),
        loss_config={"kl_div": (row_loss, 1.0)},
    )
    loss.backward()

    def place(parts: list[Tensor], fill: float | bool = float("nan")) -> Tensor:
        """[K, T, ...] in the project's rows, from one tensor a step over the package's first rows."""
        out = torch.full((steps, total, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
        for k, part in enumerate(parts):
            out[k, rows[: len(part)]] = part
        return out

    document = batch["document_ids"][0]
    inside = [document[: len(rows) - k] == document[k:] for k in range(steps)]
    counted = [batch["loss_mask"][0, k:] for k in range(steps)]
    m = metrics.get
    weights = {k.replace("layers.0.", "midlayer."): v for k, v in model.named_parameters()}
    return {
        "logits": place(logits),
        "features": place(features),
        "valid": place(inside, False),
        "counted": place(counted, False),
        "target_probs": place([probabilities for probabilities, _ in compared]),
        "kl": place([kl for _, kl in compared]),
        "loss_steps": torch.stack([m(f"loss_{k}_sum") for k in range(steps)]),
        "full_acc": torch.stack([m(f"full_acc_{k}_sum") / m(f"full_acc_{k}_total") for k in range(steps)]),
        "loss": loss.detach(),
    } | {f"grad.{name}": weight.grad for name, weight in weights.items() if weight.grad is not None}


def main(source: str, out: str, attention: str = "eager") -> None:
    with safe_open(source, framework="pt") as file:
        cfg = json.loads(file.metadata()["config"])
    result = run(cfg, load_file(source), attention)
    save_file({name: tensor.contiguous().clone() for name, tensor in result.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
