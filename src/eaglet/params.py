"""params.yaml, read strictly: the only place that reads it."""

import difflib
import sys
import types
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from eaglet.errors import EagletError

PATH = Path("params.yaml")


@dataclass(frozen=True)
class TargetParams:
    """Which model is the target, and the arithmetic it runs in."""

    model: str
    revision: str | None
    dtype: Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class PromptFile:
    """One file of prompts: its name in the folder, rows used, share held out of training (0 to 1)."""

    file: str
    limit: int | None
    heldout: float


@dataclass(frozen=True)
class PromptsParams:
    """Where the prompts lie."""

    folder: str
    files: list[PromptFile]


@dataclass(frozen=True)
class UrlParams:
    """SGLang servers that run already; null has one started."""

    generate: str | None
    extract: str | None


@dataclass(frozen=True)
class LaunchParams:
    """The SGLang server that is started: its Python, ranks, share of the GPU's memory and further arguments."""

    python: str
    tp: int
    dp: int
    mem_fraction: float | None
    args: list[str]


@dataclass(frozen=True)
class EngineParams:
    """What runs the target, and how much at a time."""

    name: Literal["transformers", "sglang"]
    batch_tokens: int
    batch_rows: int
    concurrency: int
    spool: str
    spool_gib: float
    url: UrlParams
    launch: LaunchParams


@dataclass(frozen=True)
class GenerateParams:
    """How the target answers."""

    regenerate: bool
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class TokenizeParams:
    """How long a row may be."""

    max_length: int


@dataclass(frozen=True)
class ExtractParams:
    """Which hidden states are kept, and how."""

    layers: Literal["auto"] | list[int]
    codec: Literal["rebase-zstd", "raw"]
    shard_tokens: int
    reuse_across_engines: bool


@dataclass(frozen=True)
class AuditParams:
    """The bounds outside which the audit fails."""

    min_agreement: float
    min_row_agreement: float
    reference_rows: int
    max_relative_error: float
    min_neighbour_ratio: float


@dataclass(frozen=True)
class VocabParams:
    """The draft vocabulary."""

    size: int


@dataclass(frozen=True)
class TrainParams:
    """How the drafter is trained."""

    ttt_steps: int
    epochs: int
    batch_tokens: int
    micro_batch_tokens: int
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    weight_decay: float
    warmup_ratio: float
    loss_decay: float
    grad_clip: float
    sharpen: float
    dropout: float
    average: float
    out_of_vocab: Literal["mask", "renormalise"]
    head_init: Literal["target", "random"]
    validation: float
    seed: int


@dataclass(frozen=True)
class EvaluateParams:
    """How the drafter is measured."""

    prompts: int
    draft_steps: int
    max_new_tokens: int


@dataclass(frozen=True)
class Params:
    """All of params.yaml, a section a stage."""

    target: TargetParams
    prompts: PromptsParams
    engine: EngineParams
    generate: GenerateParams
    tokenize: TokenizeParams
    extract: ExtractParams
    audit: AuditParams
    vocab: VocabParams
    train: TrainParams
    evaluate: EvaluateParams


# Bounds that a wrong value would only meet much later: key → (lowest, highest).
_BOUNDS: dict[str, tuple[float, float]] = {
    "prompts.files.limit": (1, float("inf")),
    "prompts.files.heldout": (0, 1),
    "engine.batch_tokens": (1, float("inf")),
    "engine.batch_rows": (1, float("inf")),
    "engine.concurrency": (1, 4096),
    "engine.spool_gib": (1e-3, float("inf")),
    "engine.launch.tp": (1, float("inf")),
    "engine.launch.dp": (1, float("inf")),
    "engine.launch.mem_fraction": (0.01, 1),
    "generate.max_new_tokens": (1, float("inf")),
    "generate.temperature": (0, float("inf")),
    "generate.top_p": (1e-6, 1),
    "generate.top_k": (0, float("inf")),
    "tokenize.max_length": (2, float("inf")),
    "extract.layers": (0, float("inf")),
    "extract.shard_tokens": (1, float("inf")),
    "audit.min_agreement": (0, 1),
    "audit.min_row_agreement": (0, 1),
    "audit.reference_rows": (0, float("inf")),
    "audit.max_relative_error": (0, float("inf")),
    "audit.min_neighbour_ratio": (1, float("inf")),
    "vocab.size": (1, float("inf")),
    "train.ttt_steps": (1, 32),
    "train.epochs": (1, float("inf")),
    "train.batch_tokens": (1, float("inf")),
    "train.micro_batch_tokens": (1, float("inf")),
    "train.learning_rate": (0, 1),
    "train.weight_decay": (0, 10),
    "train.warmup_ratio": (0, 1),
    "train.loss_decay": (0, 1),
    "train.grad_clip": (1e-9, float("inf")),
    "train.sharpen": (0, 1),
    "train.dropout": (0, 0.9),
    "train.average": (0, 0.9999),
    "train.validation": (0, 0.5),
    "evaluate.prompts": (1, float("inf")),
    "evaluate.draft_steps": (1, 32),
    "evaluate.max_new_tokens": (1, float("inf")),
}


def load(path: Path = PATH) -> Params:
    """Read and check the parameters.

    Raises:
        EagletError: no file, bad YAML, or a key that is unknown, missing, of the wrong type or out of bounds;
            the message names the key and, for an unknown one, the nearest that exists.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EagletError(f"{path} not found: run eaglet in the project's folder") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EagletError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    params: Params = _build(Params, raw, "", path)
    return params


def _build(kind: Any, raw: Any, key: str, path: Path) -> Any:
    """`raw` as a value of type `kind`: a dataclass, list, union, literal or plain type."""
    if is_dataclass(kind):
        return _build_section(kind, raw, key, path)
    origin = get_origin(kind)
    if origin is list and isinstance(raw, list):
        return [_build(get_args(kind)[0], item, key, path) for item in raw]
    if origin in (Union, types.UnionType):
        for option in get_args(kind):
            try:
                return _build(option, raw, key, path)
            except EagletError:
                continue
    elif origin is Literal and raw in get_args(kind):
        return raw
    elif kind is float and type(raw) in (int, float):
        return float(_bounded(raw, key, path))
    elif isinstance(kind, type) and type(raw) is kind:
        return _bounded(raw, key, path) if kind is int else raw
    raise EagletError(f"{path}: {key} is {raw!r}; it must be {_describe(kind)}")


def _build_section(kind: Any, raw: Any, key: str, path: Path) -> Any:
    names = [field.name for field in fields(kind)]
    where = key or "the file"
    if not isinstance(raw, dict):
        raise EagletError(f"{path}: {where} must have the keys {', '.join(names)}")
    prefix = f"{key}." if key else ""
    for name in raw:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0)
            raise EagletError(f"{path}: unknown key {prefix}{name}; did you mean {prefix}{near[0]}?")
    for name in names:
        if name not in raw:
            raise EagletError(f"{path}: {prefix}{name} is missing")
    hints = get_type_hints(kind)
    return kind(**{name: _build(hints[name], raw[name], prefix + name, path) for name in names})


def _bounded(value: Any, key: str, path: Path) -> Any:
    low, high = _BOUNDS.get(key, (-float("inf"), float("inf")))
    if not low <= value <= min(high, sys.float_info.max):  # NaN and infinity too
        raise EagletError(f"{path}: {key} is {value}; it must lie between {low:g} and {high:g}")
    return value


def _describe(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(kind))
    if origin is list:
        return f"a list of {_describe(get_args(kind)[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(kind, "sections")
