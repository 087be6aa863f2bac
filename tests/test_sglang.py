"""The real SGLang server on a CPU, with the capture plugin, against plain Transformers and SGLang's own return.

One server serves as many tests as it can, and ends before the next one starts: a start takes 20 s, and an idle server
keeps a core busy. Tests run in order.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
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

from eaglet import audit, files, filling, layers, server, store, target
from eaglet.acceptance import greedy
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
    return [*found, text[2:3], text[7:9], text[1500:2200]]


@pytest.fixture(scope="module")
def network(smollm2_target: MakeTarget) -> Any:
    """SmolLM2 in float32: in bfloat16, Transformers' own rounding moves a row of one token by 3 %."""
    return smollm2_target("float32").model()


@pytest.fixture(scope="module")
def references(rows: list[list[int]], network: Any) -> list[audit.Reference]:
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
    """All rows in one pass, with three that cannot be computed."""
    bad = [[5] * 9000, [5, 99999999, 5], [5, -1]]
    return dict(capturing.prefill(iter([*rows, *bad]), NAMES, copied))


@pytest.fixture(scope="module")
def alone(capturing: SGLangEngine, captured: dict[int, Any], rows: list[list[int]]) -> dict[int, Any]:
    """The same rows, one at a time."""
    assert captured
    one = SGLangEngine(engine_params(concurrency=1), capturing._target, capturing._proven)
    return dict(one.prefill(iter(rows), NAMES, copied))


def test_bfloat16_is_the_right_layer_and_not_its_neighbours(
    rows: list[list[int]], captured: dict[int, Any], references: list[audit.Reference]
) -> None:
    for index, row in enumerate(rows):
        for name in NAMES:
            # A first token is an attention sink: its huge norm hardly changes from layer to layer, so that a row of
            # few tokens is near its neighbours too. float32 (below) tells them apart.
            ratio = 5.0 if len(row) >= 8 else 0.0
            seen = audit.compare(name, captured[index][name], references[index], 0.03, ratio)
            assert captured[index][name].dtype == torch.bfloat16
            assert seen.looks_like is None, (index, len(row), name, seen)


def test_repeats_and_prefixes_are_whole_and_agree(rows: list[list[int]], captured: dict[int, Any]) -> None:
    for one, other in ((3, 6), (4, 7), (3, 8), (5, 10)):
        length = min(len(rows[one]), len(rows[other]))
        for name in NAMES:
            assert audit.relative_error(captured[one][name][:length], captured[other][name][:length]) < 0.02


def test_both_engines_agree(rows: list[list[int]], captured: dict[int, Any], smollm2_target: MakeTarget) -> None:
    engine = TransformersEngine(engine_params(), smollm2_target("bfloat16"))
    for index, states in engine.prefill(rows, NAMES, copied):
        assert not isinstance(states, Refusal)
        for name in NAMES:
            bound = 0.03 if len(rows[index]) >= 8 else 0.1  # rounding of both, see `network`
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
                    bound = 0.03 if len(rows[index]) >= 8 else 0.1
                    assert audit.relative_error(opened.read(sample), captured[index][name]) < bound


def test_a_server_killed_on_the_way_ends_the_pass_in_one_line(
    rows: list[list[int]], captured: dict[int, Any], alone: dict[int, Any], capturing: SGLangEngine
) -> None:
    assert len(alone) == len(rows)  # the next test's, while this server lives
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


def test_sglangs_own_return_gives_the_same_values(
    rows: list[list[int]], alone: dict[int, Any], sglang_python: str, smollm2: Path
) -> None:
    """0.5.23 returns these streams itself, as JSON: the same kernels on the same batches, none of the plugin.

    So a row that is alone in its batches has the same bits. Of a row in chunks SGLang returns the last one only.
    """
    command = [sglang_python, "-m", "sglang.launch_server", "--model-path", str(smollm2), "--skip-tokenizer-init"]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "none", "--disable-radix-cache", "--max-total-tokens", "16384", *CHUNKED]
    command += ["--dtype", "bfloat16", "--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    command += ["--return-aux-hidden-state-layer-ids", "1", "14", "26"]
    command += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    with running(command) as url:
        for index, row in enumerate(rows):
            body = {"input_ids": row, "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": True}
            found = torch.tensor(post(url, body)["meta_info"]["hidden_states"][0])
            assert len(found) == (len(row) - 1) % 256 + 1
            for place, name in enumerate(NAMES[:3]):
                theirs = found[:, place * 576 : (place + 1) * 576]
                ours = alone[index][name][-len(found) :]
                assert torch.equal(ours.float(), theirs), (index, name, audit.relative_error(ours, theirs))


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


def test_float32_is_exact(
    rows: list[list[int]], references: list[audit.Reference], sglang_python: str, smollm2_target: MakeTarget
) -> None:
    """The server's own float32, before it is stored as bfloat16: rounding is no excuse here."""
    launch = launch_params(sglang_python, *CHUNKED)
    engine = SGLangEngine(engine_params(name="sglang", launch=launch), smollm2_target("float32"))
    compare_raw(engine, NAMES, rows, references, 1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_two_ranks_give_whole_rows(
    dtype: str, bound: float, rows: list[list[int]], sglang_python: str, small: target.Target
) -> None:
    """TP = 2: SmolLM2 has nine heads, which two ranks cannot share; the small model has four."""
    launch = launch_params(sglang_python, *CHUNKED, tp=2)
    model = target.Target(small.folder, small.fingerprint, dtype)
    short = [row[:400] for row in rows]  # it reads 512 positions
    exact = target.Target(small.folder, small.fingerprint, "float32").model()
    references = [audit.reference(exact, row) for row in short]
    engine = SGLangEngine(engine_params(name="sglang", launch=launch), model)
    compare_raw(engine, ["L01", "L03", "L06", "final"], short, references, bound)


def compare_raw(
    engine: SGLangEngine, names: list[str], rows: list[list[int]], references: list[audit.Reference], bound: float
) -> None:
    """Concurrent requests in chunks, as the server wrote them, against Transformers in float32."""
    with contextlib.closing(engine):
        serving, room = engine._serve_capture(names)
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda row: engine._capture(serving, room, row)[1], rows))
        for row, one, truth in zip(rows, found, references, strict=True):
            assert one.fault(row) is None
            assert str(one.final.dtype) == f"torch.{engine._target.dtype}"
            assert one.layers == [layers.layer_of(name) for name in names[:-1]]
            for name, values in one.streams(names).items():
                seen = audit.compare(name, values, truth, bound, 5.0 if len(row) >= 8 else 1.0)
                assert seen.looks_like is None, (len(row), name, seen)


@pytest.fixture(scope="module")
def answering(sglang_python: str, smollm2_target: MakeTarget) -> Iterator[SGLangEngine]:
    launch = launch_params(sglang_python)
    engine = SGLangEngine(engine_params(name="sglang", launch=launch), smollm2_target("float32"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def contexts(tokenizer: Any) -> list[list[int]]:
    asked = ["What is 2 + 2?", "Say hello.", "Name three colours.", "Write a haiku about rain.", "Who wrote Hamlet?"]
    asked += ["Reply with one word: yes or no?"]
    found = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in asked
    ]
    return [list(ids) for ids in found]


def test_greedy_answers_are_the_targets_and_keep_their_end(
    answering: SGLangEngine, contexts: list[list[int]], network: Any
) -> None:
    """In float32 the two best logits of these prompts are 0.02 apart at least: no ties."""
    ends, limit = answering._target.end_ids, 16
    found = dict(answering.answer(contexts, generate_params(max_new_tokens=limit)))
    for index, context in enumerate(contexts):
        with torch.inference_mode():
            own = greedy(network, context, limit, ends)
        assert found[index] == Answer(own, "stop" if own[-1] in ends else "length")
    reasons = [answer.finish_reason for answer in found.values() if isinstance(answer, Answer)]
    assert set(reasons) == {"stop", "length"}, "the prompts are chosen for both"


def test_special_tokens_are_kept(answering: SGLangEngine, tokenizer: Any) -> None:
    """A control token within an answer, as <think> is on other targets: it goes on behind it."""
    context = tokenizer("x<|im_start|>" * 8)["input_ids"]
    answer = dict(answering.answer([context], generate_params(max_new_tokens=16)))[0]
    assert isinstance(answer, Answer)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in answer.answer_ids[:-1]
    assert len(answer.answer_ids) == 16


def test_samples_follow_the_softmax(answering: SGLangEngine, contexts: list[list[int]], network: Any) -> None:
    """First tokens of one context under 150 seeds against the model's own probabilities; one choice is greedy."""
    with torch.inference_mode():
        expected = (network(torch.tensor(contexts[:1])).logits[0, -1] / 1.5).softmax(0)
    drawn = torch.zeros_like(expected)
    for seed in range(150):
        sampling = generate_params(max_new_tokens=1, temperature=1.5, seed=seed)
        answer = dict(answering.answer(contexts[:1], sampling))[0]
        assert isinstance(answer, Answer)
        drawn[answer.answer_ids[0]] += 1
    top = expected.topk(5).indices
    error = (drawn[top] / 150 - expected[top]).abs()
    assert (error < 4.5 * (expected[top] * (1 - expected[top]) / 150).sqrt() + 1e-3).all()
    plain = dict(answering.answer(contexts, generate_params(max_new_tokens=8)))
    for one_choice in ({"top_k": 1}, {"top_p": 1e-6}):
        sampling = generate_params(max_new_tokens=8, temperature=1.0, **one_choice)
        assert dict(answering.answer(contexts, sampling)) == plain


@pytest.mark.xfail(
    strict=True,
    reason="SGLang reads sampling_seed only with --enable-deterministic-inference, which has no attention on a CPU",
)
def test_a_seed_gives_the_same_samples(answering: SGLangEngine, contexts: list[list[int]]) -> None:
    sampling = generate_params(max_new_tokens=16, temperature=0.8, seed=1)
    assert dict(answering.answer(contexts, sampling)) == dict(answering.answer(contexts, sampling))


def test_a_prompt_too_long_is_refused(answering: SGLangEngine, contexts: list[list[int]]) -> None:
    found = dict(answering.answer([[5] * 9000, contexts[0], [5] * 8190], generate_params(max_new_tokens=4)))
    long, full = found[0], found[2]
    assert isinstance(long, Refusal) and "9000 tokens" in long.reason
    assert isinstance(full, Refusal) and "8192" in full.reason, "no room for the answer"
    assert isinstance(found[1], Answer)


def test_a_server_that_does_not_capture_is_named(
    answering: SGLangEngine, contexts: list[list[int]], smollm2_target: MakeTarget, tmp_path: Path
) -> None:
    assert list(answering.answer(contexts[:1], generate_params(max_new_tokens=2)))
    serving = answering._answering
    assert serving is not None
    engine = by_url(serving.url, tmp_path, smollm2_target("float32"))
    with pytest.raises(EagletError, match=r"does not capture hidden states into .*patches/README.md"):
        list(engine.prefill([[5, 6]], NAMES, copied))


def test_a_server_killed_while_it_answers_is_started_anew(
    answering: SGLangEngine, contexts: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [[*context, extra] for context in contexts for extra in range(100, 108)]
    found = {}
    for index, answer in answering.answer(asked, generate_params(max_new_tokens=16)):
        serving = answering._answering
        assert serving is not None and serving.watched is not None
        if not found:
            os.killpg(serving.watched.pid, signal.SIGKILL)
        found[index] = answer
    assert len(found) == len(asked) and all(isinstance(answer, Answer) for answer in found.values())
    assert serving.generation == 1
    assert "starting it anew" in capfd.readouterr().err
    answering.close()  # the last test of this server


def test_a_server_that_always_dies_is_given_up(
    small: target.Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in that starts, and dies of each request."""
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable}
import http.server, os, sys
if sys.argv[1] == "-c":
    print('["0.5.23", "0.1.0", 0]')
    sys.exit()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("RuntimeError: no memory", flush=True)
        os._exit(1)
open({str(tmp_path / "starts")!r}, "a").write("x")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
""")
    python.chmod(0o755)
    engine = SGLangEngine(engine_params(name="sglang", launch=launch_params(str(python))), small)
    # Where another thread's request meets the new server before its start is seen, that start has failed.
    message = r"died: RuntimeError: no memory .*it was started anew 3 times already|did not start: RuntimeError: no mem"
    with contextlib.closing(engine), pytest.raises(EagletError, match=message) as caught:
        list(engine.answer([[5, 6 + k] for k in range(20)], generate_params()))
    assert "\n" not in str(caught.value)
    starts = len((tmp_path / "starts").read_text())
    assert 2 <= starts <= 4 and capfd.readouterr().err.count("starting it anew") == starts - 1


@pytest.mark.parametrize("names", [["L01", "L07"], ["L07", "final"]])
def test_the_last_layer_is_refused_before_a_server_starts(names: list[str], small: target.Target) -> None:
    engine = SGLangEngine(engine_params(name="sglang", launch=launch_params("no-such-python")), small)
    with pytest.raises(EagletError, match=r"extract.layers: .*nothing follows layer 7, the last: name 6 at most"):
        list(engine.prefill([[5, 6]], names, copied))


def test_a_server_with_the_radix_cache_does_not_start(sglang_python: str, small: target.Target, tmp_path: Path) -> None:
    """Nothing in launch.args turns it on: the option is taken out by hand."""
    environment = {"EAGLET_CAPTURE_SPOOL": str(tmp_path), "EAGLET_CAPTURE_LAYERS": "1,3"}
    serving = server.launch(launch_params(sglang_python), small, environment)
    assert serving._process is not None
    serving._process.command = [word for word in serving._process.command if word != "--disable-radix-cache"]
    with contextlib.ExitStack() as stopped, pytest.raises(EagletError) as caught:
        stopped.callback(serving.stop)
        serving.start()
    assert re.search(r"did not start: RuntimeError: eaglet-capture: the radix cache is on.*log:", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_server_killed_under_several_processes_keeps_what_is_written(
    sglang_python: str,
    small: target.Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
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
    again = request.getfixturevalue("other")
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
    altered = tiny.model("llama", torch.bfloat16, vocab_size=len(tokenizer), num_hidden_layers=8)
    with torch.no_grad():
        altered.model.norm.weight[0] += 1
    altered.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    twin = target.Target(tmp_path / "small", target.fingerprint(tmp_path / "small"), "bfloat16")
    with pytest.raises(EagletError, match=r"weights are not those of the target small \(norm\)"):
        list(by_url(proven.url, proven.spool, twin).prefill([[5, 6]], ["L01", "final"], copied))


@pytest.fixture
def namesake(smollm2: Path, smollm2_target: MakeTarget, tmp_path: Path) -> target.Target:
    """SmolLM2 in a folder that is named as the small model's: the same class, too."""
    (tmp_path / "small").symlink_to(smollm2)
    return target.Target(
        tmp_path / "small", dataclasses.replace(smollm2_target("bfloat16").fingerprint, name="small"), "bfloat16"
    )


def test_a_namesake_behind_the_url_is_known_by_its_size(other: SGLangEngine, namesake: target.Target) -> None:
    proven = other._proven
    assert proven is not None
    with pytest.raises(EagletError, match="its hidden size is 64, the target's 576"):
        list(by_url(proven.url, proven.spool, namesake).prefill([[5, 6]], ["L01", "final"], copied))


@pytest.mark.xfail(strict=True, reason="a server that only answers is known by its name and class alone")
def test_a_namesake_behind_the_url_does_not_answer(other: SGLangEngine, namesake: target.Target) -> None:
    proven = other._proven
    assert proven is not None
    with pytest.raises(EagletError, match="not the target"):
        list(by_url(proven.url, proven.spool, namesake).answer([[5, 6]], generate_params(max_new_tokens=1)))


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
        began = time.monotonic()
        with pytest.raises(EagletError, match=r"no SGLang server answers at http.*Connection refused") as caught:
            list(run(engine))
        assert "\n" not in str(caught.value) and "leave its address out" in str(caught.value)
        assert time.monotonic() - began < 5, "what never ran is not waited for"


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
