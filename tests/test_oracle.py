"""The drafter's forward pass, loss and gradients against speculators 0.9.0, in an environment of its own.

Where the rules agree (docs/eagle3.md): logits of every row and step; loss and gradients on a document whose counted
rows are the same under both masks. speculators' loss is a KL divergence: ours less the teacher's entropy.
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglet import draft_vocab, ttt
from eaglet.drafter import Drafter, DrafterConfig

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-oracle/bin/python"
SCRIPT = ROOT / "tests/oracle/speculators_eagle3.py"
STEPS, LENGTH, HIDDEN, VOCAB, DRAFT = 3, 23, 64, 320, 96

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make oracle` installs speculators for this test")

CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Random weights and inputs, and what speculators computes from them."""
    folder = tmp_path_factory.mktemp("oracle")
    torch.manual_seed(0)
    drafter = Drafter(CONFIG, torch.randn(VOCAB, HIDDEN), seed=1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.1))
    vocab = draft_vocab.choose(torch.randint(0, 50, (VOCAB,)), DRAFT, {0})
    ids = torch.randint(0, VOCAB, (LENGTH,))
    mask = torch.ones(LENGTH, dtype=torch.int64)
    mask[-1] = 0
    inputs = {
        **{name: weight.detach().clone() for name, weight in drafter.named_parameters()},
        "d2t": vocab.d2t,
        "t2d": vocab.t2d,
        "embed_tokens.weight": drafter.embedding.clone(),
        "input_ids": ids,
        "aux": torch.randn(LENGTH, 3 * HIDDEN),
        "final": torch.randn(LENGTH, HIDDEN),
        "head.weight": torch.randn(VOCAB, HIDDEN) * 0.3,
        "loss_mask": mask,
    }
    config = {
        name: getattr(CONFIG, name)
        for name in CONFIG.__dataclass_fields__
        if name not in ("rope_parameters", "max_position_embeddings")
    }
    metadata = {"config": json.dumps({**config, "rope_theta": 10000.0, "ttt_steps": STEPS})}
    save_file(inputs, folder / "in.safetensors", metadata)
    command = [PYTHON, SCRIPT, folder / "in.safetensors", folder / "out.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {
        **inputs,
        **{f"their {name}": value for name, value in load_file(folder / "out.safetensors").items()},
    }


@pytest.fixture
def drafter(case: dict[str, torch.Tensor]) -> Drafter:
    ours = Drafter(CONFIG, case["embed_tokens.weight"])
    ours.load_state_dict({name: case[name] for name in ours.state_dict()})
    return ours


def test_logits_of_every_row_and_step(case: dict[str, torch.Tensor], drafter: Drafter) -> None:
    ours = ttt.logits(drafter, case["input_ids"], case["aux"], STEPS)
    valid = case["their valid"].bool()
    assert valid.sum(1).tolist() == [LENGTH - 1 - k for k in range(STEPS)]
    torch.testing.assert_close(ours[valid], case["their logits"][valid], atol=1e-4, rtol=1e-4)


def test_loss_and_gradients(case: dict[str, torch.Tensor], drafter: Drafter) -> None:
    vocab = draft_vocab.DraftVocabulary(case["d2t"], case["t2d"])
    document = ttt.Document(
        input_ids=case["input_ids"],
        span_ids=torch.ones(LENGTH, dtype=torch.int64),
        choice=ttt.teacher_choice(case["final"], case["head.weight"]),
        streams=case["aux"].chunk(3, 1),
        final=case["final"],
    )
    batch = ttt.pack([document], case["t2d"], steps=STEPS, out_of_vocab="renormalise")
    loss_rows = torch.bincount(batch.loss_step)
    sums = ttt.sums(drafter, batch, case["head.weight"][vocab.target_ids], vocab, ttt.loss_weights(loss_rows, 1.0))
    counted = case["their counted"].bool()
    assert loss_rows.tolist() == counted.sum(1).tolist() == [LENGTH - 2 - k for k in range(STEPS)]
    probabilities = case["their target_probs"]
    entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum(-1)
    for k in range(STEPS):
        theirs = case["their kl"][k][counted[k]].sum() + entropy[k][counted[k]].sum()
        torch.testing.assert_close(sums.losses[k].detach(), theirs, rtol=1e-5, atol=1e-4)
    sums.loss.backward()
    for name, weight in drafter.named_parameters():
        theirs = case[f"their grad.{name}"]
        assert weight.grad is not None
        error = (weight.grad - theirs).norm() / theirs.norm()
        assert error < 1e-4, (name, float(error))
