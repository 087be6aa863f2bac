"""Layer ids in SGLang: whatever a class means by one, the plugin captures the layer that was asked for."""

import contextlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import ROOT
from test_capture import engine_params, states_of
from test_sglang import launch_params

from eaglet import audit, layers, target
from eaglet.engines.sglang import SGLangEngine

CHOICES = [[1, 2, 4], [0, 2, 4], [2, 3, 4], [0, 1, 6]]  # conditional classes look at whether the first is 1
FAMILIES = tiny.FAMILIES | {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


def test_every_class_ends_at_the_streams_asked_for(sglang_python: str) -> None:
    """SGLang's own classes: Llama and Qwen add 1; DeepSeek, GLM-4 lite and gpt-oss at times; Qwen-MoE sets flags."""
    done = subprocess.run(
        [sglang_python, str(ROOT / "tests/sglang_streams.py"), json.dumps([*CHOICES, [1, 3, 7]])],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    for name, results in found.items():
        assert results[: len(CHOICES)] == [[layer + 1 for layer in chosen] for chosen in CHOICES], name
        # Of 8 layers the last: a stream that enters no layer. Where it is not refused here, the server's first pass is.
        assert results[-1] == [2, 4, 8] or re.search("cannot (capture|be captured)", results[-1]), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_a_real_server_gives_the_layers_asked_for(family: str, sglang_python: str, tmp_path: Path) -> None:
    """Of the classes that run without a GPU and that test_sglang.py has not: attention of DeepSeek's kind (MLA) and of
    gpt-oss has no such backend in SGLang."""
    network = tiny.random_model(FAMILIES[family])
    network.save_pretrained(tmp_path / family)
    model = target.Target(tmp_path / family, fingerprint(tmp_path / family), "float32")
    rows = tiny.rows(6, 60)
    with contextlib.chdir(tmp_path):
        engine = SGLangEngine(engine_params(name="sglang", launch=launch_params(sglang_python)), model)
        try:
            found: dict[int, Any] = states_of(engine, rows, ["L00", "L02", "L04", "final"])
        finally:
            engine.close()
    for index, row in enumerate(rows):
        truth = audit.reference(network, row)
        for name, values in found[index].items():
            right = truth.final if name == "final" else truth.outputs[layers.layer_of(name)]
            error = audit.relative_error(values, right)
            assert error < 0.004, (name, len(row), error)  # stored as bfloat16: 8 bits of mantissa
            if name != "final" and len(row) > 8:
                layer = layers.layer_of(name)
                beside = [truth.outputs[layer + 1], *([truth.outputs[layer - 1]] if layer else [])]
                assert all(audit.relative_error(values, wrong) > 5 * error for wrong in beside), (name, len(row))


def fingerprint(folder: Path) -> target.Fingerprint:
    with contextlib.chdir(folder.parent):
        return target.fingerprint(folder)
