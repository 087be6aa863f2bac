"""The command line: errors are one line that names the remedy, exit 1, no traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from eaglet.cli import main

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["model", "generate", "tokenize", "extract", "audit", "vocab", "train", "evaluate"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [*STAGES, "plan", "show", "verify", "results"])
def test_every_command_has_help(command: str) -> None:
    done = CliRunner().invoke(main, [command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("generate", "data/model.json is missing: run `dvc repro model`"),
        ("tokenize", "data/responses.jsonl is missing: run `dvc repro generate`"),
        ("extract", "data/model.json is missing"),
        ("vocab", "data/model.json is missing"),
        ("train", "data/model.json is missing"),
        ("evaluate", "data/model.json is missing"),
        ("show", "data/states/manifest.json is missing: run `dvc repro extract`"),
        ("verify", "dvc.lock names no outputs: run `dvc repro` first"),
        ("results", "metrics/generate.json is missing: run `dvc repro generate`"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(folder: Path, command: str, expected: str) -> None:
    done = CliRunner().invoke(main, [command])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ") and expected in done.output
    assert done.output.count("\n") == 1


def test_outside_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["model"])
    assert done.exit_code == 1
    assert done.output == "Error: params.yaml not found: run eaglet in the project's folder\n"


def test_only_the_cli_knows_click_and_only_params_reads_the_file() -> None:
    for path in (ROOT / "src/eaglet").rglob("*.py"):
        text = path.read_text()
        assert path.name == "cli.py" or "import click" not in text, path
        assert path.name == "params.py" or 'Path("params.yaml")' not in text, path
        if path.parent.name not in ("stages", "commands") and path.name != "cli.py":
            assert not re.search(r"from eaglet\.?(stages|commands)? ?import .*\b(stages|commands)\b", text), path
            assert "eaglet.stages" not in text, path


def test_no_pickle_is_loaded() -> None:
    for path in (ROOT / "src/eaglet").rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in re.sub(r'""".*?"""|#.*|".*?"', "", text, flags=re.S), path
        assert "torch.load(" not in text or "weights_only=True" in text, path


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for word in ("repro", "test", "push", "pull", "plan", "evaluate"):
        assert re.search(rf"\b{word}\b", done.stdout), done.stdout


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "eaglet.cli", "--version"], capture_output=True, text=True, check=True)
    assert re.search(r"\d+\.\d+\.\d+", done.stdout)
