"""The real SGLang server on a CPU, with the capture plugin, against plain Transformers and SGLang's own return.

One server serves as many tests as it can: a start takes half a minute. Tests run in order.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import ROOT
from test_capture import engine_params
from test_engine_answers import params as generate_params

from eaglet import audit, files, filling, layers, server, spool, store, target
from eaglet.engines import Answer, Refusal
from eaglet.engines.sglang import SGLangEngine, is_normed
from eaglet.engines.transformers import TransformersEngine
from eaglet.errors import EagletError
from eaglet.params import LaunchParams, UrlParams
from eaglet.rows import Row
from eaglet.shard import Shard

NAMES = ["L01", "L14", "L26", "final"]
CHUNKED = ("--chunked-prefill-size", "256")
MakeTarget = Callable[[str], target.Target]


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs and the like lie relative to the working directory."""
    with contextlib.chdir(tmp_path_factory.mktemp("sglang")):
        yield


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> list[list[int]]:
    """Real text: lengths from 1 to beyond two chunks, shared prefixes, exact repeats."""
    text = tokenizer((ROOT / "docs/design.md").read_text() + (ROOT / "README.md").read_text())["input_ids"]
    found = [text[at : at + length] for at, length in ((0, 1), (5, 9), (40, 33), (90, 128), (300, 257), (700, 640))]
    found += [found[3], found[4], found[3][:100], found[3][:50] + found[2], found[5][:300]]
    return found


@pytest.fixture(scope="module")
def references(rows: list[list[int]], smollm2_target: MakeTarget) -> list[audit.Reference]:
    network = smollm2_target("bfloat16").model()
    return [audit.reference(network, row) for row in rows]


def launch_params(python: str, *args: str, tp: int = 1) -> LaunchParams:
    return LaunchParams(python, tp, 1, None, ["--max-total-tokens", "16384", *args])


def copied(index: int, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in states.items()}


@pytest.fixture(scope="module")
def capturing(sglang_python: str, smollm2_target: MakeTarget) -> Iterator[SGLangEngine]:
    launch = launch_params(sglang_python, *CHUNKED)
    engine = SGLangEngine(engine_params(name="sglang", launch=launch), smollm2_target("bfloat16"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def captured(capturing: SGLangEngine, rows: list[list[int]]) -> dict[int, Any]:
    """All rows in one pass, between them three that cannot be computed."""
    bad = [[5] * 9000, [5, 99999999, 5], [5, -1]]
    return dict(capturing.prefill(iter([*rows, *bad]), NAMES, copied))


def test_bfloat16_is_the_right_layer_and_not_its_neighbours(
    rows: list[list[int]], captured: dict[int, Any], references: list[audit.Reference]
) -> None:
    for index, row in enumerate(rows):
        for name in NAMES:
            # A first token is an attention sink: its huge norm hardly changes from layer to layer, and what is left
            # of it behind the final norm is mostly rounding. float32 (below) is exact there too.
            bounds = (0.03, 5.0) if len(row) > 8 else (0.1, 1.0)
            seen = audit.compare(name, captured[index][name], references[index], *bounds)
            assert captured[index][name].dtype == torch.bfloat16
            assert seen.looks_like is None, (index, len(row), name, seen)


def test_repeats_and_prefixes_are_whole_and_agree(rows: list[list[int]], captured: dict[int, Any]) -> None:
    for one, other in ((3, 6), (4, 7), (3, 8), (5, 10)):
        length = min(len(rows[one]), len(rows[other]))
        for name in NAMES:
            assert audit.relative_error(captured[one][name][:length], captured[other][name][:length]) < 0.03


def test_both_engines_agree(rows: list[list[int]], captured: dict[int, Any], smollm2_target: MakeTarget) -> None:
    engine = TransformersEngine(engine_params(), smollm2_target("bfloat16"))
    for index, states in engine.prefill(rows, NAMES, copied):
        assert not isinstance(states, Refusal)
        for name in NAMES:
            bound = 0.03 if len(rows[index]) > 8 else 0.1
            assert audit.relative_error(captured[index][name], states[name]) < bound, (index, name)


def test_rows_that_cannot_be_computed_are_refused_and_hurt_no_other(
    rows: list[list[int]], captured: dict[int, Any]
) -> None:
    long, outside, negative = (captured[len(rows) + k] for k in range(3))
    assert isinstance(long, Refusal) and "9000 tokens" in long.reason and "context length" in long.reason
    for refused in (outside, negative):
        assert isinstance(refused, Refusal) and "vocabulary of 49,152" in refused.reason


def test_a_row_larger_than_the_spool_is_refused(
    rows: list[list[int]], captured: dict[int, Any], capturing: SGLangEngine, smollm2_target: MakeTarget
) -> None:
    proven = capturing._proven
    assert proven is not None and captured
    small = SGLangEngine(engine_params(), smollm2_target("bfloat16"), spool_of(proven, 200 * 4 * 576 * 2))
    found = dict(small.prefill([rows[2], rows[5], rows[3]], NAMES, copied))
    refused = found[1]
    assert isinstance(refused, Refusal) and "raise engine.spool_gib" in refused.reason
    assert audit.relative_error(found[0]["final"], captured[2]["final"]) < 0.03
    assert not list(proven.spool.glob("*.safetensors")), "what was taken is freed"


def spool_of(proven: Any, max_bytes: int) -> Any:
    return type(proven)(**{**vars(proven), "max_bytes": max_bytes})


def rows_of(ids: list[list[int]]) -> list[Row]:
    return [
        Row(str(k), "", False, True, np.array(row, np.int32), np.zeros(len(row), np.bool_), [])
        for k, row in enumerate(ids)
    ]


def test_several_processes_fill_the_store(
    rows: list[list[int]],
    captured: dict[int, Any],
    capturing: SGLangEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eaglet.engines.sglang._PROCESS_TOKENS", 200)
    made = rows_of([row for index, row in enumerate(rows) if index not in (6, 7)])  # a sample is stored once
    assert len(capturing.split(NAMES, 2000, 640)) == 2 or os.cpu_count() != 2
    states = store.Store(store.Kind("m", capturing.numerics, "rebase-zstd", 576), NAMES)
    groups = store.group_rows(made, 100)
    assert len(groups) > 3
    work = states.work(groups)
    done = filling.compute(work, {row.sample: row for row in made}, capturing, states)
    assert (done.rows, done.computed, done.failed) == (len(made), 4 * len(made), {})
    assert len(done.hashes) == len(work) and not states.work(groups)
    for group in groups:
        for name in NAMES:
            with Shard.open(states.path(name, group)) as opened:
                assert files.file_sha256(opened.path) == done.hashes[opened.path]
                for sample, _ in group.samples:
                    index = rows.index(next(row for row in made if row.sample == sample).input_ids.tolist())
                    bound = 0.03 if len(rows[index]) > 8 else 0.1
                    assert audit.relative_error(opened.read(sample), captured[index][name]) < bound


def test_sglangs_own_return_gives_the_same_values(
    rows: list[list[int]], captured: dict[int, Any], sglang_python: str, smollm2: Path
) -> None:
    """0.5.23 returns these streams itself, as JSON: the same kernels, none of the plugin."""
    command = [sglang_python, "-m", "sglang.launch_server", "--model-path", str(smollm2), "--skip-tokenizer-init"]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "none", "--disable-radix-cache", "--max-total-tokens", "8192"]
    command += ["--dtype", "bfloat16", "--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    command += ["--return-aux-hidden-state-layer-ids", "1", "14", "26"]
    command += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    with running(command) as url:
        for index in (1, 3, 4):
            body = {
                "input_ids": rows[index],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_hidden_states": True,
            }
            answer = post(url, body)
            found = torch.tensor(answer["meta_info"]["hidden_states"][0])
            for place, name in enumerate(NAMES[:3]):
                theirs = found[: len(rows[index]), place * 576 : (place + 1) * 576]
                assert audit.relative_error(captured[index][name], theirs) < 0.02, (index, name)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[str]:
    """A server started by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path("by-hand.log").absolute()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert child.poll() is None, log.read_bytes()[-3000:].decode(errors="replace")
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
                break
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_a_server_killed_on_the_way_ends_the_pass_in_one_line(
    rows: list[list[int]], captured: dict[int, Any], capturing: SGLangEngine
) -> None:
    assert capturing._proven is not None and capturing._proven.watched is not None
    many = [row for _ in range(20) for row in rows]
    seen = 0
    with pytest.raises(EagletError, match="the SGLang server died") as caught:
        for index, states in capturing.prefill(many, NAMES, copied):
            seen += 1
            assert audit.relative_error(states["final"], captured[index % len(rows)]["final"]) < 0.03  # type: ignore[index]
            if seen == 5:
                os.killpg(capturing._proven.watched.pid, signal.SIGKILL)
    assert "\n" not in str(caught.value) and "dvc repro" in str(caught.value)
    assert 5 <= seen < len(many)


def test_float32_is_exact(rows: list[list[int]], sglang_python: str, smollm2_target: MakeTarget) -> None:
    """The server's own float32, before it is stored as bfloat16: rounding is no excuse here."""
    compare_float32(rows, NAMES, smollm2_target("float32"), launch_params(sglang_python, *CHUNKED))


def test_float32_is_exact_over_two_ranks(rows: list[list[int]], sglang_python: str, small: target.Target) -> None:
    """TP = 2: SmolLM2 has nine heads, which two ranks cannot share; the small model has four."""
    model = target.Target(small.folder, small.fingerprint, "float32")
    short = [row[:400] for row in rows]  # it reads 512 positions
    compare_float32(short, ["L01", "L03", "L06", "final"], model, launch_params(sglang_python, *CHUNKED, tp=2))


def compare_float32(rows: list[list[int]], names: list[str], model: target.Target, launch: LaunchParams) -> None:
    """Concurrent requests in chunks, against Transformers: 1e-4 at the right layer."""
    network = model.model()
    captured_layers = [layers.layer_of(name) for name in names if name != "final"]
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(spool.own_folder(Path.cwd() / "spool"))
        environment = {
            "EAGLET_CAPTURE_SPOOL": str(folder),
            "EAGLET_CAPTURE_LAYERS": ",".join(map(str, captured_layers)),
        }
        serving = server.launch(launch, model, environment)
        opened.callback(serving.stop)
        serving.start()
        room = spool.Spool(folder, 1 << 30)

        def put(numbered: tuple[int, list[int]]) -> spool.Captured:
            rid = f"eaglet-{numbered[0]}"
            body = {"input_ids": numbered[1], "rid": rid, "return_hidden_states": True}
            serving.post("/generate", body | {"sampling_params": {"max_new_tokens": 1}})
            return room.take(rid)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(put, enumerate(rows)))
        for row, one in zip(rows, found, strict=True):
            truth = audit.reference(network, row)
            assert one.fault(row) is None
            assert one.final.dtype == torch.float32
            assert one.layers == captured_layers
            for name, values in one.streams(names).items():
                right = truth.final if name == "final" else truth.outputs[layers.layer_of(name)]
                assert audit.relative_error(values, right) < 1e-4, (len(row), name)


@pytest.fixture(scope="module")
def answering(sglang_python: str, smollm2_target: MakeTarget) -> Iterator[SGLangEngine]:
    launch = launch_params(sglang_python)
    engine = SGLangEngine(engine_params(name="sglang", launch=launch), smollm2_target("bfloat16"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def contexts(tokenizer: Any) -> list[list[int]]:
    asked = ["What is 2 + 2?", "Say hello.", "Name three colours.", "Write a haiku about rain.", "Who wrote Hamlet?"]
    found = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in asked
    ]
    return [list(ids) for ids in found]


def test_greedy_answers_are_the_targets_and_keep_their_end(
    answering: SGLangEngine, contexts: list[list[int]], smollm2_target: MakeTarget
) -> None:
    model = smollm2_target("bfloat16")
    network, limit = model.model(), 24
    found = dict(answering.answer(contexts, generate_params(max_new_tokens=limit)))
    assert sorted(found) == list(range(len(contexts)))
    hits = total = 0
    reasons = set()
    for index, answer in found.items():
        assert isinstance(answer, Answer)
        reasons.add(answer.finish_reason)
        ends = [token in model.end_ids for token in answer.answer_ids]
        if answer.finish_reason == "stop":
            assert ends[-1] and not any(ends[:-1])
        else:
            assert len(answer.answer_ids) == limit and not any(ends)
        with torch.inference_mode():
            logits = network(torch.tensor([contexts[index] + answer.answer_ids])).logits[0]
        best = logits[len(contexts[index]) - 1 : -1].argmax(1)
        hits += int((best == torch.tensor(answer.answer_ids)).sum())
        total += len(answer.answer_ids)
    assert reasons == {"stop", "length"}, "the prompts are chosen for both"
    assert hits >= 0.95 * total, "the two best logits tie at more than 1 % of positions in bfloat16"


def test_sampled_answers_follow_their_seed(answering: SGLangEngine, contexts: list[list[int]]) -> None:
    def sampled(seed: int) -> dict[int, Answer | Refusal]:
        return dict(answering.answer(contexts, generate_params(max_new_tokens=12, temperature=1.0, seed=seed)))

    one = sampled(1)
    assert one != sampled(2)
    assert all(isinstance(answer, Answer) for answer in one.values())


def test_a_prompt_too_long_is_refused(answering: SGLangEngine, contexts: list[list[int]]) -> None:
    found = dict(answering.answer([[5] * 9000, contexts[0]], generate_params(max_new_tokens=4)))
    refused = found[0]
    assert isinstance(refused, Refusal) and "9000 tokens" in refused.reason
    assert isinstance(found[1], Answer)


def test_a_server_that_does_not_capture_is_named(
    answering: SGLangEngine, contexts: list[list[int]], smollm2_target: MakeTarget, tmp_path: Path
) -> None:
    assert list(answering.answer(contexts[:1], generate_params(max_new_tokens=2)))
    serving = answering._answering
    assert serving is not None
    engine = by_url(serving.url, tmp_path, smollm2_target("bfloat16"))
    with pytest.raises(EagletError, match=r"does not capture hidden states into .*patches/README.md"):
        list(engine.prefill([[5, 6]], NAMES, copied))


def test_a_server_killed_while_it_answers_is_started_anew(
    answering: SGLangEngine, contexts: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    serving = answering._answering
    assert serving is not None and serving.watched is not None
    threading.Timer(1.0, os.killpg, (serving.watched.pid, signal.SIGKILL)).start()
    asked = [[*context, extra] for context in contexts for extra in range(100, 140)]
    found = dict(answering.answer(asked, generate_params(max_new_tokens=16)))
    assert len(found) == len(asked) and all(isinstance(answer, Answer) for answer in found.values())
    assert serving.generation == 1
    assert "starting it anew" in capfd.readouterr().err


def test_a_server_killed_under_several_processes_keeps_what_is_written(
    sglang_python: str, small: target.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eaglet.engines.sglang._PROCESS_TOKENS", 200)
    made = rows_of([[5 + k, *range(6, 6 + k % 60)] for k in range(400)])
    names = ["L01", "L03", "final"]
    states = store.Store(store.Kind("m", "sglang/bfloat16", "rebase-zstd", 64), names)
    groups = store.group_rows(made, 300)
    engine = SGLangEngine(engine_params(name="sglang", launch=launch_params(sglang_python)), small)
    watched = engine._prove(names).watched
    assert watched is not None
    shards = tmp_path / ".store/states"

    def kill() -> None:
        while len(list(shards.glob("*/*.safetensors"))) < 6:
            time.sleep(0.01)
        os.killpg(watched.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    before = states.work(groups)
    with pytest.raises(EagletError, match="the SGLang server died") as caught:
        filling.compute(before, {row.sample: row for row in made}, engine, states)
    assert "\n" not in str(caught.value)
    engine.close()
    left = states.work(groups)
    assert 0 < len(left) < len(before), "whole groups are kept"
    for path in shards.glob("*/*.safetensors"):
        with Shard.open(path) as opened:
            opened.verify()
    again = SGLangEngine(engine_params(name="sglang", launch=launch_params(sglang_python)), small)
    with contextlib.closing(again):
        done = filling.compute(left, {row.sample: row for row in made}, again, states)
    assert not states.work(groups) and done.computed < 3 * len(made)


def by_url(url: str, folder: Path, model: target.Target) -> SGLangEngine:
    return SGLangEngine(
        engine_params(name="sglang", url=UrlParams(generate=url, extract=url), spool=str(folder)), model
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> target.Target:
    folder = tiny.save_target(tmp_path_factory.mktemp("small") / "small", tokenizer)
    return target.Target(folder, target.fingerprint(folder), "bfloat16")


def test_the_last_layer_cannot_be_captured_and_the_start_says_so(sglang_python: str, small: target.Target) -> None:
    engine = SGLangEngine(engine_params(name="sglang", launch=launch_params(sglang_python)), small)
    with pytest.raises(EagletError, match=r"gives 1 of 2 streams.*layers \[1, 7\]") as caught:
        list(engine.prefill([[5, 6]], ["L01", "L07"], copied))
    assert "\n" not in str(caught.value)
    engine.close()


@pytest.fixture(scope="module")
def other(sglang_python: str, small: target.Target) -> Iterator[SGLangEngine]:
    """A server of another model."""
    engine = SGLangEngine(engine_params(name="sglang", launch=launch_params(sglang_python)), small)
    assert list(engine.prefill([[5, 6]], ["L01", "L03", "final"], copied))
    yield engine
    engine.close()


def test_another_model_behind_the_url_is_named(
    other: SGLangEngine, small: target.Target, smollm2_target: MakeTarget
) -> None:
    proven = other._proven
    assert proven is not None
    real = smollm2_target("bfloat16")
    with pytest.raises(EagletError, match=r"serves .*small.*not the target SmolLM2-135M-Instruct"):
        list(by_url(proven.url, proven.spool, real).answer([[5, 6]], generate_params()))
    with pytest.raises(EagletError, match=r"serves .*small.*not the target"):
        list(by_url(proven.url, proven.spool, real).prefill([[5, 6]], ["L01", "final"], copied))


def test_another_model_under_the_same_name_is_known_by_its_weights(
    other: SGLangEngine, small: target.Target, tokenizer: Any, tmp_path: Path
) -> None:
    proven = other._proven
    assert proven is not None
    network = tiny.model("llama", torch.bfloat16, vocab_size=len(tokenizer), num_hidden_layers=8)
    with torch.no_grad():
        network.model.norm.weight[0] += 1
    network.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    twin = target.Target(tmp_path / "small", target.fingerprint(tmp_path / "small"), "bfloat16")
    with pytest.raises(EagletError, match=r"weights are not those of the target small \(norm\)"):
        list(by_url(proven.url, proven.spool, twin).prefill([[5, 6]], ["L01", "final"], copied))


def test_layers_and_arithmetic_behind_the_url_are_named(other: SGLangEngine, small: target.Target) -> None:
    proven = other._proven
    assert proven is not None
    with pytest.raises(EagletError, match=r"captures the layers \[1, 3\], not \[2\].*LAYERS=1,2,3"):
        list(by_url(proven.url, proven.spool, small).prefill([[5, 6]], ["L02", "final"], copied))
    single = target.Target(small.folder, small.fingerprint, "float32")
    with pytest.raises(EagletError, match=r"dtype bfloat16.*own in float32"):
        list(by_url(proven.url, proven.spool, single).prefill([[5, 6]], ["L01", "final"], copied))


def test_a_spool_elsewhere_or_gone_is_named(other: SGLangEngine, small: target.Target, tmp_path: Path) -> None:
    proven = other._proven
    assert proven is not None
    assert dict(by_url(proven.url, proven.spool, small).prefill([[5, 6]], ["L01", "final"], copied))
    with pytest.raises(EagletError, match=r"engine.spool .* is not a folder"):
        list(by_url(proven.url, tmp_path / "none", small).prefill([[5, 6]], ["L01"], copied))
    with pytest.raises(EagletError, match=r"spool .* is gone.*dvc repro"):
        for number, _ in enumerate(other.prefill([[5, 6, 7 + k] for k in range(200)], ["L01"], copied)):
            if number == 3:
                shutil.rmtree(proven.spool)


def test_nothing_listens(small: target.Target, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for engine, run in (
        (by_url(url, tmp_path, small), lambda e: e.prefill([[5]], ["L01"], copied)),
        (by_url(url, tmp_path, small), lambda e: e.answer([[5]], generate_params())),
    ):
        with pytest.raises(EagletError, match=r"no SGLang server answers at http.*Connection refused") as caught:
            list(run(engine))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "launch", "message"),
    [
        ('["0.5.20", "0.1.0", 0]', {}, r"is SGLang 0.5.20; eaglet supports 0.5.17 and 0.5.23"),
        ("[null, null, 0]", {}, r"has no SGLang: run `make sglang`"),
        ('["0.5.23", null, 0]', {}, r"lacks the capture plugin: .*pip install --no-deps ./patches/capture"),
        ('["0.5.23", "0.1.0", 1]', {"tp": 2}, r"tp 2 × dp 1 need as many GPUs; this machine has 1"),
    ],
)
def test_an_environment_that_will_not_do_is_named(
    facts: str, launch: dict[str, Any], message: str, small: target.Target, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{facts}'\n")
    python.chmod(0o755)
    chosen = launch_params(str(python), **launch)
    with pytest.raises(EagletError, match=message):
        server.launch(chosen, small, {"EAGLET_CAPTURE_SPOOL": str(tmp_path)})
    with pytest.raises(EagletError, match=r"does not run \(.*No such file|it is not there"):
        server.launch(launch_params(str(tmp_path / "none")), small, None)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "is not a folder"),
        ({"EAGLET_CAPTURE_LAYERS": "3,1"}, "rising ids"),
        ({"EAGLET_CAPTURE_LAYERS": "1", "EAGLET_CAPTURE_MAX_BYTES": "many"}, "number of bytes"),
    ],
)
def test_the_plugin_stops_a_server_that_is_told_wrong(
    environment: dict[str, str], message: str, sglang_python: str, tmp_path: Path
) -> None:
    spool_folder = tmp_path if environment else tmp_path / "none"
    done = subprocess.run(
        [sglang_python, "-c", "import eaglet_capture; eaglet_capture.register()"],
        env={**os.environ, "EAGLET_CAPTURE_SPOOL": str(spool_folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_plugin_refuses_other_releases_and_servers_that_lose_rows(sglang_python: str, tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m; m.version = lambda name: '0.5.20'; "
        "import eaglet_capture; eaglet_capture.register()"
    )
    done = subprocess.run(
        [sglang_python, "-c", code],
        env={**os.environ, "EAGLET_CAPTURE_SPOOL": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "supports SGLang 0.5.17 and 0.5.23; this is 0.5.20" in done.stderr
    fields = {
        "disable_radix_cache": True,
        "enable_return_hidden_states": True,
        "pp_size": 1,
        "enable_two_batch_overlap": False,
        "speculative_algorithm": None,
    }
    wrong = {"disable_radix_cache": False, "pp_size": 2, "enable_two_batch_overlap": True}
    code = (
        "import json, sys; from types import SimpleNamespace as N; from eaglet_capture.hooks import unfit; "
        "print(json.dumps([unfit(N(**fields)) for fields in json.loads(sys.argv[1])]))"
    )
    given = [fields, *({**fields, name: value} for name, value in wrong.items())]
    done = subprocess.run([sglang_python, "-c", code, json.dumps(given)], capture_output=True, text=True, check=True)
    fit, *unfit = json.loads(done.stdout.splitlines()[-1])
    assert fit is None
    for text, word in zip(unfit, ("radix cache", "pipeline", "two-batch"), strict=True):
        assert re.search(word, text)


def test_a_final_state_is_normed_once() -> None:
    torch.manual_seed(0)
    raw, weight = torch.randn(7, 64) * 5, torch.rand(64) + 0.5
    unit = raw / raw.square().mean(1, keepdim=True).sqrt()
    assert is_normed(unit * weight, weight)
    assert is_normed(unit * (1 + weight), weight), "as Gemma's"
    assert not is_normed(raw, weight)
    twice = unit * weight
    twice = twice / twice.square().mean(1, keepdim=True).sqrt() * weight * 1.3
    assert not is_normed(twice, weight)
