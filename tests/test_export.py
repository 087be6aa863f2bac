"""The exported drafter: each engine's own form, and that speculators' published loader reads it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from eaglet import draft_vocab, drafter, export, target
from eaglet.drafter import Drafter, DrafterConfig
from eaglet.errors import EagletError
from eaglet.target import Target

ROOT = Path(__file__).resolve().parents[1]
ORACLE = ROOT / ".venv-oracle/bin/python"
LAYERS, DRAFT = [1, 3, 4], 96
METRICS: dict[str, Any] = {
    "train": {"rows": 1234, "steps": 56, "heldout": {"acc": [0.5, 0.25]}},
    "evaluate": {"draft_steps": 5, "acceptance_length": 2.125, "prompts": 18, "by_source": {"code": 2.5}},
    "vocab": {"size": DRAFT, "coverage": 0.9},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Target:
    """A tiny Llama on disk, with a generation configuration."""
    folder = tiny.save_target(tmp_path_factory.mktemp("model") / "tiny-llama", tokenizer)
    assert (folder / "generation_config.json").is_file()
    return Target(folder, target.fingerprint(folder), "bfloat16")


@pytest.fixture(scope="module")
def trained(model: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter as training saves it."""
    folder = tmp_path_factory.mktemp("drafter")
    config = DrafterConfig.from_target(model.config, DRAFT)
    vocab = draft_vocab.choose(torch.arange(config.vocab_size) % 977, DRAFT, {0, 2})
    drafter.save(folder, Drafter(config, model.embedding(), seed=3), vocab, LAYERS, model.config)
    return folder


def put(trained: Path, folder: Path, engine: export.Engine, model: Target) -> dict[str, Any]:
    export.write(trained, folder, engine, model, "someone/tiny-llama", 5, "# the card\n")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_sglangs_form_is_the_trained_one(trained: Path, model: Target, tmp_path: Path) -> None:
    config = put(trained, tmp_path / "out", "sglang", model)
    assert config == json.loads((trained / "config.json").read_text())
    ours, theirs = load_file(trained / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "out/README.md").read_text() == "# the card\n"
    generation = "generation_config.json"
    assert (tmp_path / "out" / generation).read_bytes() == (model.folder / generation).read_bytes()


def test_vllms_form(trained: Path, model: Target, tmp_path: Path) -> None:
    config = put(trained, tmp_path, "vllm", model)
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5], "the stream entering, not the output"
    assert (config["norm_before_residual"], config["norm_before_fc"], config["tie_word_embeddings"]) == (False,) * 3
    assert config["draft_vocab_size"] == DRAFT
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["transformer_layer_config"]["vocab_size"] == model.fingerprint.vocab_size
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/tiny-llama"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    ours, theirs = load_file(trained / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    embedding = theirs.pop("embed_tokens.weight")
    assert torch.equal(embedding, model.embedding().bfloat16())
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in theirs.items()}
    assert "layers.0.self_attn.q_proj.weight" in theirs and renamed.keys() == ours.keys()
    assert all(torch.equal(renamed[name], ours[name]) for name in ours)
    ids = torch.arange(DRAFT) + theirs["d2t"]
    assert torch.equal(ids, theirs["t2d"].nonzero()[:, 0]), "offsets, not ids"


@pytest.mark.skipif(not ORACLE.exists(), reason="`make oracle` installs speculators for this test")
def test_speculators_own_loader_reads_it(trained: Path, model: Target, tmp_path: Path) -> None:
    export.write(trained, tmp_path / "out", "vllm", model, str(model.folder), 5, "")
    script = ROOT / "tests/oracle/speculators_load.py"
    command = [ORACLE, script, tmp_path / "out", tmp_path / "seen.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    sizes = DrafterConfig.from_target(model.config, DRAFT)
    assert found["ids"] == [2, 4, 5]
    assert found["norm_before_residual"] is False
    assert found["rope"]["rope_theta"] == sizes.rope_parameters["rope_theta"]
    names = ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size")
    assert found["sizes"] == [getattr(sizes, name) for name in names]
    assert (found["verifier"], found["tokens"]) == (str(model.folder), 5)
    written, seen = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "seen.safetensors")
    assert written.keys() <= seen.keys()
    for name, tensor in written.items():
        assert torch.equal(seen[name].to(tensor.dtype), tensor), name


def test_a_folder_of_something_else_is_left_alone(trained: Path, model: Target, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(EagletError, match="not empty"):
        put(trained, tmp_path, "sglang", model)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_export_is_written_again(trained: Path, model: Target, tmp_path: Path) -> None:
    put(trained, tmp_path, "vllm", model)
    assert put(trained, tmp_path, "sglang", model)["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_damage_is_refused(trained: Path, model: Target, tmp_path: Path, engine: export.Engine) -> None:
    tensors = load_file(trained / "model.safetensors")
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt/config.json").write_bytes((trained / "config.json").read_bytes())
    wrong = {**tensors, "fc.weight": tensors["fc.weight"][:, :64].contiguous()}
    save_file(wrong, tmp_path / "spoilt/model.safetensors")
    with pytest.raises(EagletError, match=r"fc\.weight"):
        put(tmp_path / "spoilt", tmp_path / "out", engine, model)
    assert not (tmp_path / "out").exists()


def test_another_targets_drafter_is_refused(trained: Path, model: Target, smollm2_target: Any, tmp_path: Path) -> None:
    other = smollm2_target("bfloat16")
    with pytest.raises(EagletError, match="another target's"):
        put(trained, tmp_path / "out", "vllm", other)


def test_the_card() -> None:
    text = export.card("sglang", "someone/tiny", "/d", 5, LAYERS, METRICS, "sha256:ab")
    assert text.startswith("---\nbase_model: someone/tiny\n")
    assert "--speculative-num-steps 5" in text and "--speculative-num-draft-tokens 6" in text
    for line in (
        "| acceptance length, 5 drafted | 2.125 |",
        "| acceptance length, code | 2.500 |",
        "| trained on | 1,234 rows, 56 steps |",
        "| held-out accuracy by step | 0.500, 0.250 |",
        "| data | `sha256:ab` |",
    ):
        assert line in text.splitlines()
    bare = export.card("vllm", "someone/tiny", "/d", 5, LAYERS, {}, "sha256:ab")
    assert "acceptance" not in bare and '"num_speculative_tokens": 5' in bare
