"""The real `dvc` on small real inputs: what runs, what is computed, what a second clone has to do.

The target is a tiny Llama with random weights and SmolLM2's tokenizer; the prompts are the project's own. Tests
run in order and share one project, as a user's day does.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import tiny
import yaml

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["model", "generate", "tokenize", "extract", "audit", "vocab", "train", "evaluate"]
BIN = Path(sys.executable).parent


@dataclass
class Project:
    """A clone that commands run in."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, text=True, capture_output=True, check=False, timeout=600
        )
        output = done.stdout + done.stderr
        assert not check or done.returncode == 0, output
        assert check or done.returncode != 0, output
        return output

    def repro(self, *stages: str) -> str:
        return self.run("dvc", "repro", *stages)

    def params(self, **changes: Any) -> None:
        path = self.folder / "params.yaml"
        values = yaml.safe_load(path.read_text())
        for key, value in changes.items():
            section, name = key.split("__")
            values[section][name] = value
        path.write_text(yaml.safe_dump(values))

    def metrics(self, stage: str) -> Any:
        return json.loads((self.folder / f"metrics/{stage}.json").read_text())


def ran(output: str) -> list[str]:
    """Stages that DVC executed, in order; restored ones are not among them."""
    return list(re.findall(r"Running stage '(\w+)'", output))


def computed(output: str) -> tuple[int, int]:
    """(turns answered, rows × streams computed)."""
    answered = re.search(r"generate: (\d+) turns answered", output)
    extracted = re.search(r"extract: (\d+) of \d+ rows", output)
    return int(answered[1]) if answered else 0, int(extracted[1]) if extracted else 0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Project:
    folder = tmp_path_factory.mktemp("user") / "project"
    folder.mkdir()
    for name in (
        "dvc.yaml",
        "params.yaml",
        ".dvcignore",
        ".gitignore",
        ".dvc/config",
        ".dvc/.gitignore",
        ".dvc/plots/series.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "data/prompts", folder / "data/prompts")
    target = tiny.save_target(folder.parent / "target", tokenizer)
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "DVC_SITE_CACHE_DIR": str(folder.parent / "site"),
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@localhost",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@localhost",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    made = Project(folder, env)
    made.params(
        target__model=str(target),
        generate__max_new_tokens=6,
        audit__reference_rows=2,
        # Random weights repeat a token or two and one bfloat16 tie spoils a six-token row.
        audit__min_row_agreement=0.0,
        vocab__size=256,
        train__epochs=1,
        train__batch_tokens=4096,
        train__ttt_steps=2,
        evaluate__prompts=6,
        evaluate__max_new_tokens=8,
    )
    made.run("git", "init", "-q")
    made.run("git", "add", "-A")
    made.run("git", "commit", "-qm", "start")
    return made


def test_first_repro_runs_every_stage(project: Project) -> None:
    output = project.repro()
    assert ran(output) == STAGES or sorted(ran(output)) == sorted(STAGES), output
    turns = project.metrics("generate")["turns"]
    rows = project.metrics("tokenize")["rows"]
    assert turns > 300 and rows >= 300
    assert computed(output) == (turns, 4 * rows)
    assert project.metrics("evaluate")["equal"] is True
    assert project.metrics("audit")["problems"] == []


def test_store_cache_and_workspace_are_one_inode(project: Project) -> None:
    for path in (project.folder / "data/states").rglob("*.safetensors"):
        assert path.stat().st_nlink == 3, "store, DVC cache, view"


def test_nothing_changed_runs_nothing(project: Project) -> None:
    assert ran(project.repro()) == []


def test_results_show_and_verify_read_the_run(project: Project) -> None:
    table = project.run("eaglet", "results")
    for word in ("tokens", "ratio", "acceptance length", "drafter", "held-out loss"):
        assert word in table
    assert "after the final norm" in project.run("eaglet", "show")
    assert "every checksum holds" in project.run("eaglet", "verify")


def test_the_drafter_is_exported_with_what_is_known_of_it(project: Project) -> None:
    output = project.run("eaglet", "export", "drafter", "--to", "vllm", "served/vllm")
    assert "vllm serve" in output and "eagle3" in output
    card = (project.folder / "served/vllm/README.md").read_text()
    assert f"| {project.metrics('evaluate')['acceptance_length']:.3f} |" in card
    assert re.search(r"\| data \| `sha256:[0-9a-f]{64}` \|", card)
    project.run("eaglet", "export", "drafter", "--to", "sglang", "served/sglang")
    config = json.loads((project.folder / "served/sglang/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert "not exported by eaglet" in project.run(
        "eaglet", "export", "drafter", "--to", "sglang", "data/prompts", check=False
    )
    shutil.rmtree(project.folder / "served")


def test_controls_name_every_fault(project: Project) -> None:
    output = project.run("eaglet", "evaluate", "--controls")
    faults = project.metrics("controls")["faults"]
    assert faults.pop("right")["audit"] is None
    assert {name: one["audit"].split(" looks like ")[1].split(",")[0] for name, one in faults.items()} == {
        "layers one lower": "the output of layer 0 (layer off?)",
        "layers one higher": "the output of layer 2 (layer off?)",
        "another row's features": "nothing of this row: another sample's rows",
        "features one position late": "rows one position late",
        "features one position early": "rows one position early",
        "final norm missing": "the output of layer 7",
        "final norm twice": "the final norm applied twice",
    }
    assert all(name in output for name in faults)
    (project.folder / "metrics/controls.json").unlink()


def test_plan_says_nothing_to_do(project: Project) -> None:
    plan = project.run("eaglet", "plan")
    assert re.findall(r"^(\w+) +yes", plan, re.M) == []
    assert "0 turns to answer" in plan
    assert re.findall(r"(\d+) rows to compute", plan) == ["0"] * 4


def test_changed_layer_computes_that_layer_alone(project: Project) -> None:
    rows = project.metrics("tokenize")["rows"]
    project.params(extract__layers=[1, 3, 5])
    plan = project.run("eaglet", "plan")
    assert re.findall(r"(\w+): (\d+) rows to compute", plan) == [
        ("L01", "0"), ("L03", "0"), ("L05", str(rows)), ("final", "0"),
    ]  # fmt: skip
    before = {path.name for path in (project.folder / "data/states/L01").iterdir()}
    output = project.repro()
    assert sorted(ran(output)) == sorted(["extract", "audit", "train", "evaluate"])
    assert computed(output) == (0, rows)
    assert {path.name for path in (project.folder / "data/states/L01").iterdir()} == before
    assert json.loads((project.folder / "data/drafter/config.json").read_text())["eagle_config"][
        "eagle_aux_hidden_state_layer_ids"
    ] == [1, 3, 5]


def test_layers_changed_back_compute_nothing(project: Project) -> None:
    project.params(extract__layers="auto")
    output = project.repro()
    assert computed(output) == (0, 0)
    assert set(ran(output)) <= {"extract", "audit", "train", "evaluate"}


def test_one_changed_prompt_computes_one_row(project: Project) -> None:
    path = project.folder / "data/prompts/knowledge.jsonl"
    lines = path.read_text().splitlines()
    lines[7] = json.dumps({"id": "changed", "source": "knowledge", "prompt": "Why is the sea salt and the rain not?"})
    path.write_text("\n".join(lines) + "\n")
    plan = project.run("eaglet", "plan")
    assert "1 turns to answer" in plan
    output = project.repro()
    assert computed(output) == (1, 4)


def test_changed_training_parameter_reruns_training_alone(project: Project) -> None:
    project.params(train__learning_rate=0.0005)
    assert ran(project.repro()) == ["train", "evaluate"]


def test_failed_audit_stops_what_stands_behind_it(project: Project) -> None:
    project.params(audit__max_relative_error=0.0)
    output = project.run("dvc", "repro", "train", check=False)
    assert "audit failed: row" in output
    assert "train" not in ran(output)
    project.params(audit__max_relative_error=0.05)
    project.repro()


def test_a_switched_engine_keeps_answers_and_audited_states(project: Project, sglang_python: str) -> None:
    shipped = yaml.safe_load((project.folder / "params.yaml").read_text())
    launch = {**shipped["engine"]["launch"], "python": sglang_python}
    project.params(engine__name="sglang", engine__launch=launch, extract__reuse_across_engines=True)
    output = project.repro()
    assert computed(output) == (0, 0), output
    assert {"generate", "extract"} <= set(ran(output)) and "train" not in ran(output)
    assert "states of transformers/bfloat16 passed their audit" in output
    path = project.folder / "data/prompts/knowledge.jsonl"
    before = path.read_text()
    path.write_text(before + json.dumps({"prompt": "Which river runs through Ulm?"}) + "\n")
    assert computed(project.repro("audit")) == (1, 4), "by the server, and near Transformers"
    plan = project.run("eaglet", "plan")
    assert "L01: 0 rows to compute" in plan
    project.params(extract__reuse_across_engines=False)
    rows = project.metrics("tokenize")["rows"]
    assert f"L01: {rows} rows to compute" in project.run("eaglet", "plan")
    path.write_text(before)
    (project.folder / "params.yaml").write_text(yaml.safe_dump(shipped))
    assert computed(project.repro()) == (0, 0)


def test_states_that_no_audit_passed_are_not_another_engines(project: Project) -> None:
    project.params(audit__reference_rows=0)
    project.repro("audit")
    project.params(engine__name="sglang", extract__reuse_across_engines=True)
    output = project.run("eaglet", "plan", check=False)
    assert "no audit of them with reference rows has passed" in output
    project.params(engine__name="transformers", extract__reuse_across_engines=False, audit__reference_rows=2)
    project.repro()


@pytest.fixture(scope="module")
def s3(project: Project) -> Iterator[str]:
    """A real S3 protocol server on loopback, with a bucket."""
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [BIN / "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            try:
                urlopen(f"{url}/moto-api/", timeout=1)
                break
            except (URLError, OSError):
                time.sleep(0.2)
        boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        ).create_bucket(Bucket="eaglet")
        yield url
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def clone(project: Project, s3: str) -> Project:
    """Another machine: what Git and the remote hold, and nothing else."""
    project.run("dvc", "remote", "add", "-f", "-d", "storage", "s3://eaglet/cache")
    project.run("dvc", "remote", "modify", "storage", "endpointurl", s3)
    project.run("git", "add", "-A")
    project.run("git", "commit", "-qm", "run")
    project.run("dvc", "push")
    folder = project.folder.parent / "clone"
    project.run("git", "clone", "-q", str(project.folder), str(folder))
    return Project(folder, {**project.env, "DVC_SITE_CACHE_DIR": str(folder.parent / "site2")})


def test_a_pulled_clone_runs_nothing(clone: Project) -> None:
    clone.run("dvc", "pull")
    assert ran(clone.repro()) == []
    assert "every checksum holds" in clone.run("eaglet", "verify")


def test_a_pulled_clone_computes_only_what_it_changes(clone: Project) -> None:
    path = clone.folder / "data/prompts/code.jsonl"
    extra = json.dumps({"id": "extra", "source": "code", "prompt": "Write a shell loop that counts to ten."})
    path.write_text(path.read_text() + extra + "\n")
    output = clone.repro("audit")
    assert computed(output) == (1, 4), "answers and states came from DVC's cache"


def test_a_clone_whose_remote_is_empty_computes_again(project: Project, clone: Project) -> None:
    folder = project.folder.parent / "alone"
    project.run("git", "clone", "-q", str(project.folder), str(folder))
    alone = Project(folder, {**project.env, "DVC_SITE_CACHE_DIR": str(folder.parent / "site3")})
    alone.run("dvc", "remote", "add", "-f", "-d", "storage", str(folder.parent / "empty"))
    assert "data/drafter: missing (run `dvc checkout` or `dvc pull`)" in alone.run("eaglet", "verify", check=False)
    output = alone.repro("extract")
    assert computed(output) == (alone.metrics("generate")["turns"], 4 * alone.metrics("tokenize")["rows"])
    assert "of the last run" in output and "computing it again" in output


def test_a_damaged_plot_is_named(clone: Project) -> None:
    path = clone.folder / "plots/train/plots/metrics/loss.tsv"
    good = path.read_bytes()
    path.write_bytes(good + b"1")
    assert "plots/train/plots/metrics: not the bytes" in clone.run("eaglet", "verify", check=False)
    path.write_bytes(good)
    assert "every checksum holds" in clone.run("eaglet", "verify")


def test_a_damaged_shard_is_named(clone: Project) -> None:
    path = next((clone.folder / "data/states/final").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()  # a file of its own: not through the link
    path.write_bytes(bytes(content))
    output = clone.run("eaglet", "verify", check=False)
    assert path.name in output and "not the bytes" in output
    output = clone.run("eaglet", "audit", check=False)
    assert path.name in output and "Traceback" not in output
