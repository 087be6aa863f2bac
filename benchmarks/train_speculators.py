"""speculators' own EAGLE-3 model and loss, for train.py: `python train_speculators.py JSON` prints JSON.

Trained as its trainer does on one GPU: float32 weights, autocast to bfloat16, its default attention and loss; on a
CPU in float32, with those that it has there.
"""

import json
import sys
import time
from typing import Any

import torch
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig

order = json.loads(sys.argv[1])
steps, tokens, rows = (order.pop(name) for name in ("ttt_steps", "tokens", "rows"))
draft_vocab = order.pop("draft_vocab_size")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
layer = LlamaConfig(**order, num_hidden_layers=1)
more: dict[str, Any] = {}
if device.type == "cpu":  # what it has for a CPU
    from speculators.losses.eager import kl_div_loss

    layer._attn_implementation = "eager"
    more["loss_config"] = {"kl_div": (kl_div_loss, 1.0)}
torch.manual_seed(0)
config = Eagle3SpeculatorConfig(
    transformer_layer_config=layer, draft_vocab_size=draft_vocab, norm_before_residual=False, norm_before_fc=False
)
model = Eagle3DraftModel(config)
with torch.no_grad():
    for weight in model.parameters():
        weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
    drafted = torch.arange(order["vocab_size"]) < draft_vocab
    model.load_state_dict({"t2d": drafted, "d2t": torch.zeros(draft_vocab, dtype=torch.int64)}, strict=False)
model.to(device).train()
for name, weight in model.named_parameters():
    weight.requires_grad_("verifier" not in name and "embed" not in name)
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=device.type == "cuda")
hidden = order["hidden_size"]
rates = []
for seed in range(rows):
    torch.manual_seed(seed)
    batch = {
        "hidden_states": torch.randn(1, tokens, 3 * hidden, device=device, dtype=dtype),
        "verifier_last_hidden_states": torch.randn(1, tokens, hidden, device=device, dtype=dtype),
        "input_ids": torch.randint(order["vocab_size"], (1, tokens), device=device),
        "document_ids": torch.zeros(1, tokens, dtype=torch.int64, device=device),
        "loss_mask": (torch.arange(tokens, device=device) >= tokens // 8)[None],
        "position_ids": torch.arange(1, tokens + 1, device=device)[None],
    }
    began = time.monotonic()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        _, loss, _ = model(**batch, ttt_steps=steps, ttt_step_loss_decay=0.8, **more)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    float(loss.detach())
    if device.type == "cuda":
        torch.cuda.synchronize()
    rates.append(tokens / (time.monotonic() - began))
memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
print(json.dumps({"tokens_per_second": rates, "memory": memory}))
