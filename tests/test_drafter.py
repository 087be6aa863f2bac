"""The draft model against plain formulas, and its checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eaglet import draft_vocab, layers
from eaglet import drafter as drafters
from eaglet.attention import Segments
from eaglet.drafter import Drafter, DrafterConfig
from eaglet.errors import EagletError

TARGET = LlamaConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,  # not hidden / heads
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)
VOCAB = draft_vocab.choose(torch.arange(20), 9, {0})


def make(seed: int = 0, target: Any = TARGET) -> Drafter:
    embedding = torch.randn(20, 16, generator=torch.Generator().manual_seed(9))
    return Drafter(DrafterConfig.from_target(target, 9), embedding, seed)


def test_config_from_target() -> None:
    assert DrafterConfig.from_target(TARGET, 9) == DrafterConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        vocab_size=20,
        draft_vocab_size=9,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )


def test_config_refuses_rope_that_moves_with_the_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(EagletError, match="dynamic"):
        DrafterConfig.from_target(LlamaConfig(rope_parameters=rope), 9)


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = make(3)
    torch.manual_seed(2)
    two = make(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, make(4).fc.weight)
    assert one.fc.weight.abs().max() <= 48**-0.5


def test_embedding_is_neither_trained_nor_saved() -> None:
    drafter = make()
    assert "embedding" not in drafter.state_dict()
    assert "embedding" not in dict(drafter.named_parameters())
    with pytest.raises(EagletError, match="another target"):
        Drafter(drafter.config, torch.zeros(20, 8))


def test_head_starts_from_the_targets_rows() -> None:
    drafter = make()
    head = torch.randn(20, 16)
    drafter.init_from_target(head, VOCAB)
    assert torch.equal(drafter.lm_head.weight, head[VOCAB.t2d])
    assert drafter.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_is_transformers(rope: dict[str, Any]) -> None:
    target = LlamaConfig(**{**TARGET.to_dict(), "rope_parameters": dict(rope)})
    drafter = make(target=target)
    x = torch.randn(2, 4, 5, 6)
    positions = torch.tensor([[0, 3, 9, 40, 63], [1, 1, 2, 30, 31]])
    cos, sin = LlamaRotaryEmbedding(target)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    for one, places, wanted in zip(x.transpose(1, 2), positions, expected.transpose(1, 2), strict=True):
        torch.testing.assert_close(drafter._rotate(one, places), wanted)
    kept = drafter.to(torch.bfloat16)
    assert kept.frequencies.dtype == torch.float32


def test_step_is_the_formula() -> None:
    """Step 0 of one row at position 0: attention over one key is its value."""
    drafter = make()
    layer = drafter.midlayer
    aux, token, position = torch.randn(1, 48), torch.tensor([7]), torch.tensor([0])

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    g = aux @ drafter.fc.weight.T
    u = torch.cat([rms(drafter.embedding[7])[None], rms(g)], -1)
    value = (u @ layer.self_attn.v_proj.weight.T).view(2, 6)
    mixed = value.repeat_interleave(2, 0).view(1, 24)  # query heads 0, 1 use key head 0; 2, 3 head 1
    y = g + mixed @ layer.self_attn.o_proj.weight.T
    n = rms(y)
    gate, up = n @ layer.mlp.gate_proj.weight.T, n @ layer.mlp.up_proj.weight.T
    expected = y + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T

    features = drafter.fuse(aux)
    context = drafter.context(features, token, position)
    actual, own = drafter.step(0, features, token, position, context, Segments.of([1], [1]))
    torch.testing.assert_close(actual, expected)
    assert own is None
    torch.testing.assert_close(drafter.logits(actual), rms(expected) @ drafter.lm_head.weight.T)


def test_context_grows_in_pieces() -> None:
    drafter = make()
    features, tokens, places = torch.randn(5, 16), torch.tensor([1, 2, 3, 4, 5]), torch.arange(5)
    whole = drafter.context(features, tokens, places)
    parts = [drafter.context(features[some], tokens[some], places[some]) for some in (slice(0, 2), slice(2, 5))]
    for all_at_once, one, two in zip(whole, *parts, strict=True):
        torch.testing.assert_close(all_at_once, torch.cat([one, two]))


def test_checkpoint_is_what_sglang_reads(tmp_path: Path) -> None:
    drafter = make()
    drafters.save(tmp_path, drafter, VOCAB, [1, 2, 4], TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "use_aux_hidden_state": True,
    }
    assert (config["num_hidden_layers"], config["vocab_size"], config["draft_vocab_size"]) == (1, 20, 9)
    assert (config["rope_theta"], config["rope_scaling"]) == (5000.0, None)
    assert config["tie_word_embeddings"] is False
    assert config["torch_dtype"] == "bfloat16"
    parsed = LlamaConfig(**config)
    assert parsed.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [16, 48],
        "midlayer.input_layernorm.weight": [16],
        "midlayer.hidden_norm.weight": [16],
        "midlayer.post_attention_layernorm.weight": [16],
        "midlayer.self_attn.q_proj.weight": [24, 32],
        "midlayer.self_attn.k_proj.weight": [12, 32],
        "midlayer.self_attn.v_proj.weight": [12, 32],
        "midlayer.self_attn.o_proj.weight": [16, 24],
        "midlayer.mlp.gate_proj.weight": [24, 16],
        "midlayer.mlp.up_proj.weight": [24, 16],
        "midlayer.mlp.down_proj.weight": [16, 24],
        "norm.weight": [16],
        "lm_head.weight": [9, 16],
        "d2t": [9],
        "t2d": [20],
    }
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors["d2t"], VOCAB.d2t)


def test_load_gives_back_the_rounded_drafter(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    drafter = make(target=LlamaConfig(**{**TARGET.to_dict(), "rope_parameters": rope}))
    drafters.save(tmp_path, drafter, VOCAB, [1, 2, 4], TARGET)
    loaded, vocab = drafters.load(tmp_path, drafter.embedding)
    assert loaded.config == drafter.config
    assert torch.equal(vocab.t2d, VOCAB.t2d)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(loaded.state_dict()[name], parameter.bfloat16().float())
    half, _ = drafters.load(tmp_path, drafter.embedding.bfloat16())
    assert half.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "lacks the tensors norm.weight"),
        ({"extra.weight": torch.zeros(1)}, "unknown tensors extra.weight"),
        ({"fc.weight": torch.zeros(16, 32, dtype=torch.bfloat16)}, "fc.weight is"),
        ({"fc.weight": torch.zeros(16, 48)}, "float32"),
        ({"d2t": torch.tensor([0, 11, 12, 13, 14, 15, 16, 17, 18])}, "different tokens"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "d2t"],
)
def test_load_refuses(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    drafter = make()
    drafters.save(tmp_path, drafter, VOCAB, [1, 2, 4], TARGET)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(EagletError, match=message):
        drafters.load(tmp_path, drafter.embedding)


def test_load_refuses_another_folder_or_target(tmp_path: Path) -> None:
    drafter = make()
    with pytest.raises(EagletError, match="missing"):
        drafters.load(tmp_path, drafter.embedding)
    drafters.save(tmp_path, drafter, VOCAB, [1, 2, 4], TARGET)
    with pytest.raises(EagletError, match="another target"):
        drafters.load(tmp_path, torch.zeros(21, 16))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(EagletError, match="architectures"):
        drafters.load(tmp_path, drafter.embedding)


def test_save_refuses(tmp_path: Path) -> None:
    with pytest.raises(EagletError, match="d2t is"):
        drafters.save(tmp_path, make(), draft_vocab.choose(torch.arange(20), 8, set()), [1, 2, 4], TARGET)
    with pytest.raises(EagletError, match="three rising"):
        drafters.save(tmp_path, make(), VOCAB, [1, 2, 6], TARGET)


def test_sglang_layer_ids() -> None:
    assert layers.to_sglang([2, 30, 58], "llama") == [2, 30, 58]
    assert layers.to_sglang([2, 30, 58], "deepseek_v3") == [3, 31, 59]
    assert layers.to_sglang([1, 29, 57], "deepseek_v3") == [1, 29, 57]
    with pytest.raises(EagletError, match="cannot capture"):
        layers.to_sglang([0, 29, 57], "deepseek_v3")
