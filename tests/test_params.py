"""params.yaml is read strictly, and dvc.yaml names what is in it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from eaglet import params
from eaglet.errors import EagletError

SHIPPED = yaml.safe_load((ROOT / "params.yaml").read_text())
# What changes only how fast the engine runs: no stage is run again for it.
SPEED_ONLY = {
    "engine.batch_tokens",
    "engine.batch_rows",
    "engine.concurrency",
    "engine.spool",
    "engine.spool_gib",
    "engine.url.generate",
    "engine.url.extract",
    "engine.launch.python",
    "engine.launch.tp",
    "engine.launch.dp",
    "engine.launch.mem_fraction",
    "engine.launch.args",
}


def changed(key: str, value: Any = None, *, drop: bool = False) -> dict[str, Any]:
    """The shipped parameters with one key set, added or dropped."""
    raw = copy.deepcopy(SHIPPED)
    *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    section = raw
    for part in path:
        section = section[part]
    if drop:
        del section[last]
    else:
        section[last] = value
    return raw


def load(folder: Path, raw: Any) -> params.Params:
    path = folder / "params.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw))
    return params.load(path)


def refusal(folder: Path, raw: Any) -> str:
    """The message without the file's name, which must lead it."""
    with pytest.raises(EagletError) as caught:
        load(folder, raw)
    message = str(caught.value)
    assert message.startswith(str(folder / "params.yaml")) and "\n" not in message
    return message.removeprefix(f"{folder / 'params.yaml'}").removeprefix(": ")


def test_the_shipped_file_loads() -> None:
    loaded = params.load(ROOT / "params.yaml")
    assert (loaded.target.model, loaded.target.dtype) == ("smollm2", "bfloat16")
    assert loaded.prompts.files[-1] == params.PromptFile("heldout.jsonl", limit=None, heldout=1.0)
    assert isinstance(loaded.prompts.files[0].heldout, float), "an int is a float"
    assert loaded.extract.layers == "auto"


def test_a_union_takes_each_of_its_types(tmp_path: Path) -> None:
    assert load(tmp_path, changed("extract.layers", [1, 14])).extract.layers == [1, 14]
    assert load(tmp_path, changed("prompts.files.0.limit", 5)).prompts.files[0].limit == 5
    assert load(tmp_path, changed("target.revision", "abc")).target.revision == "abc"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trane", {}, "unknown key trane; did you mean train?"),
        ("generate.temprature", 1, "unknown key generate.temprature; did you mean generate.temperature?"),
        ("prompts.files.0.limits", 1, "unknown key prompts.files.limits; did you mean prompts.files.limit?"),
        ("generate", 3, "generate must have the keys regenerate, max_new_tokens, temperature, top_p,"),
        ("prompts.files", None, "prompts.files is None; it must be a list of sections"),
        ("prompts.files.0", "a.jsonl", "prompts.files must have the keys file, limit, heldout"),
        ("prompts.files.0.file", 3, "prompts.files.file is 3; it must be text"),
        ("target.dtype", "fp16", "target.dtype is 'fp16'; it must be 'bfloat16' or 'float32'"),
        ("target.revision", 12, "target.revision is 12; it must be text or null"),
        ("generate.regenerate", 1, "generate.regenerate is 1; it must be true or false"),
        ("generate.seed", True, "generate.seed is True; it must be a whole number"),
        ("generate.top_k", 1.0, "generate.top_k is 1.0; it must be a whole number"),
        ("generate.temperature", False, "generate.temperature is False; it must be a number"),
        ("train.learning_rate", "1e-3", "train.learning_rate is '1e-3'; it must be a number"),
        ("extract.layers", "all", "extract.layers is 'all'; it must be 'auto' or a list of a whole number"),
        ("extract.layers", [1, True], "extract.layers is [1, True]; it must be 'auto' or a list"),
        ("extract.layers", [-1], "extract.layers is [-1]; it must be"),
        ("prompts.files.0.limit", 0, "prompts.files.limit is 0; it must be"),
        ("prompts.files.0.heldout", 1.5, "prompts.files.heldout is 1.5; it must lie between 0 and 1"),
        ("generate.top_p", 0, "generate.top_p is 0; it must lie between 1e-06 and 1"),
        ("generate.max_new_tokens", 0, "generate.max_new_tokens is 0; it must lie between 1 and inf"),
        ("tokenize.max_length", 1, "tokenize.max_length is 1; it must lie between 2 and inf"),
        ("generate.temperature", -0.1, "generate.temperature is -0.1; it must lie between 0 and inf"),
        ("generate.temperature", float("nan"), "generate.temperature is nan; it must lie between 0 and inf"),
        ("generate.temperature", float("inf"), "generate.temperature is inf; it must lie between 0 and inf"),
        (
            "generate.temperature",
            10**400,
            f"generate.temperature is {10**400}; it must lie between 0 and inf",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, key: str, value: Any, message: str) -> None:
    assert refusal(tmp_path, changed(key, value)).startswith(message)


@pytest.mark.parametrize("key", ["train", "generate.seed", "prompts.files.0.heldout"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    assert refusal(tmp_path, changed(key, drop=True)) == f"{key.replace('.0', '')} is missing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", " is not valid YAML: while parsing a flow sequence"),
        ("", "the file must have the keys target, prompts, engine"),
        ("- target", "the file must have the keys target, prompts, engine"),
    ],
)
def test_not_a_parameter_file(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


def test_no_file_and_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(EagletError, match=r"params\.yaml not found: run eaglet in the project's folder"):
        params.load(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_bytes(b"target: \xff")
    with pytest.raises(EagletError, match=r"params\.yaml is not valid YAML"):
        params.load(tmp_path / "params.yaml")


def leaves(value: Any, key: str = "") -> set[str]:
    """Keys of the values that are no sections: a list counts whole, as DVC compares it."""
    if isinstance(value, dict):
        return set().union(*(leaves(item, f"{key}.{name}" if key else name) for name, item in value.items()))
    return {key}


def test_dvc_runs_a_stage_again_for_every_parameter_that_shapes_the_result() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    named = {key for stage in stages.values() for key in stage.get("params", [])}
    keys = leaves(SHIPPED)
    covered = {key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in named)}
    assert keys - covered == SPEED_ONLY
    unknown = {name for name in named if not any(f"{key}.".startswith(f"{name}.") for key in keys)}
    assert unknown == set()
