"""Prefill tokens a second: SGLang bare, with capture, with packed shards on disk; then answering, against Transformers.

    python benchmarks/capture.py llama-8b --python .venv-sglang/bin/python

Models have random weights of a real geometry; rows have random ids, so nothing is cached. The servers run side by
side, the kinds of run take turns, and the medians are printed. What is written is removed again.
"""

import argparse
import contextlib
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
import transformers

from eaglet import filling, layers, store
from eaglet.engines import Answer, Engine
from eaglet.engines.sglang import SGLangEngine
from eaglet.engines.transformers import TransformersEngine
from eaglet.params import EngineParams, GenerateParams, LaunchParams, UrlParams
from eaglet.rows import Row
from eaglet.target import Fingerprint, Target

LLAMA = {"model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
GEOMETRIES = {
    "tiny": LLAMA
    | {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 512, "vocab_size": 4096},
    "smollm2": LLAMA
    | {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"intermediate_size": 1536, "vocab_size": 49152},
    "llama-8b": LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"intermediate_size": 14336, "vocab_size": 128256},
    # As wide as DeepSeek-V3 and Kimi-K2, a mixture of experts, few layers.
    "wide-moe": {"model_type": "qwen3_moe", "max_position_embeddings": 8192, "head_dim": 128}
    | {"hidden_size": 7168, "num_hidden_layers": 8, "num_attention_heads": 56, "num_key_value_heads": 8}
    | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "vocab_size": 32768}
    | {"intermediate_size": 2048},
}


def main() -> None:
    """Measure one geometry and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=list(GEOMETRIES))
    parser.add_argument("--python", default=".venv-sglang/bin/python", help="that runs SGLang")
    parser.add_argument("--args", default="", help="further arguments of sglang.launch_server")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=256, help="prompts answered; 0 leaves answering out")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()), help="where the model is made")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where shards are written")
    chosen = parser.parse_args()
    chosen.python = str(Path(chosen.python).absolute()) if "/" in chosen.python else chosen.python
    target = make_target(chosen.geometry, chosen.models)
    work = Path(tempfile.mkdtemp(dir=chosen.folder))
    (work / ".store").mkdir()
    try:
        with contextlib.chdir(work):  # the store lies relative to the working directory
            print_table(chosen, prefill(chosen, target), "prefill")
            if chosen.answers:
                print_table(chosen, answering(chosen, target), "answering")
    finally:
        shutil.rmtree(work)


def make_target(geometry: str, folder: Path) -> Target:
    """A model of that geometry with random weights, saved once."""
    config = transformers.AutoConfig.for_model(**GEOMETRIES[geometry])
    path = folder / f"benchmark-{geometry}"
    if not (path / "config.json").is_file():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
        model.save_pretrained(path)
        del model
    fingerprint = Fingerprint(
        name=path.name,
        states=geometry,
        text=geometry,
        architecture=config.architectures[0] if config.architectures else "",
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        parameters_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        files={},
    )
    target = Target(path, fingerprint, "bfloat16")
    target.__dict__["end_ids"] = frozenset({2})  # a random model has no tokenizer to ask
    return target


def engine_params(chosen: argparse.Namespace, *args: str, batch_rows: int = 32) -> EngineParams:
    """Of the SGLang engine, and of Transformers with a batch of `batch_rows`."""
    launch = LaunchParams(chosen.python, chosen.tp, chosen.dp, None, [*chosen.args.split(), *args])
    return EngineParams(
        name="sglang",
        batch_tokens=16384,
        batch_rows=batch_rows,
        concurrency=chosen.concurrency,
        spool="/dev/shm/eaglet-benchmark",
        spool_gib=16,
        url=UrlParams(None, None),
        launch=launch,
    )


def generate_params(tokens: int) -> GenerateParams:
    """Greedy answers of at most `tokens` tokens."""
    return GenerateParams(True, max_new_tokens=tokens, temperature=0.0, top_p=1.0, top_k=0, seed=0)


def random_rows(target: Target, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Ids that no cache has seen."""
    source = random.Random(seed)
    return [[source.randrange(3, target.fingerprint.vocab_size) for _ in range(tokens)] for _ in range(count)]


def prefill(chosen: argparse.Namespace, target: Target) -> list[tuple[str, float, float]]:
    """(what, tokens a second, bytes of hidden states a second) of each kind of run."""
    memory = [] if "mem-fraction" in chosen.args else ["--mem-fraction-static", "0.42"]  # two servers on one GPU
    capturing = SGLangEngine(engine_params(chosen, *memory), target)
    # Bare, and otherwise as the capturing server is started.
    bare_args = ["--disable-radix-cache", "--disable-cuda-graph"]
    bare = SGLangEngine(engine_params(chosen, *memory, *bare_args), target)
    streams = layers.streams(layers.choose("auto", target.fingerprint.num_layers))
    row_bytes = len(streams) * target.fingerprint.hidden_size * 2

    def answer_one(rows: list[list[int]]) -> int:
        return sum(isinstance(answer, Answer) for _, answer in bare.answer(rows, generate_params(1)))

    def capture(rows: list[list[int]]) -> int:
        return sum(outcome is None for _, outcome in capturing.prefill(rows, streams, lambda index, states: None))

    def pack(rows: list[list[int]]) -> int:
        return packed(rows, target, capturing, streams)

    kinds: dict[str, Callable[[list[list[int]]], int]] = {
        "SGLang, bare": answer_one,
        "SGLang, captured": capture,
        "SGLang, packed shards on disk": pack,
    }
    seconds: dict[str, list[float]] = {what: [] for what in kinds}
    try:
        for number in range(chosen.rounds + 1):
            for what, run in kinds.items():
                count = chosen.rows if number else min(chosen.rows, 16)  # round 0 warms up
                rows = random_rows(target, count, chosen.tokens, seed=number)
                began = time.monotonic()
                done = run(rows)
                if done != count:
                    raise SystemExit(f"{what}: {done} of {count} rows")
                if number:
                    seconds[what].append(time.monotonic() - began)
    finally:
        bare.close()
        capturing.close()
    count = min(chosen.rows, 64)
    peer = TransformersEngine(engine_params(chosen), target)
    packed(random_rows(target, 2, chosen.tokens, seed=98), target, peer, streams)
    began = time.monotonic()
    packed(random_rows(target, count, chosen.tokens, seed=99), target, peer, streams)
    results = [(what, chosen.rows * chosen.tokens / statistics.median(some)) for what, some in seconds.items()]
    results.append(("Transformers, packed shards on disk", count * chosen.tokens / (time.monotonic() - began)))
    return [(what, rate, 0 if "bare" in what else rate * row_bytes) for what, rate in results]


def packed(ids: list[list[int]], target: Target, engine: Engine, streams: list[str]) -> int:
    """What the extract stage does with rows, up to shards that are synced; the rows done."""
    rows = [
        Row(str(k), "", False, True, np.array(row, np.int32), np.zeros(len(row), np.bool_), [])
        for k, row in enumerate(ids)
    ]
    kind = store.Kind("benchmark", engine.numerics, "rebase-zstd", target.fingerprint.hidden_size)
    states = store.Store(kind, streams)
    groups = store.group_rows(rows, 16_384)  # small shards: the end of so short a run is not all writing
    done = filling.compute(states.work(groups), {row.sample: row for row in rows}, engine, states)
    left = len(states.work(groups))
    shutil.rmtree(Path(".store/states"))
    return done.computed // len(streams) if not left else 0


def answering(chosen: argparse.Namespace, target: Target) -> list[tuple[str, float, float]]:
    """(what, answer tokens a second, 0) of both engines."""
    tokens = 128
    prompts = random_rows(target, chosen.answers, 128, seed=7)
    found = []
    for what, engine, count in engines(chosen, target):
        with contextlib.closing(engine):
            for _ in engine.answer(random_rows(target, 8, 128, seed=8), generate_params(8)):
                pass  # warm
            began = time.monotonic()
            answers = [answer for _, answer in engine.answer(prompts[:count], generate_params(tokens))]
            total = sum(len(answer.answer_ids) for answer in answers if isinstance(answer, Answer))
            found.append((what, total / (time.monotonic() - began), 0.0))
    return found


def engines(chosen: argparse.Namespace, target: Target) -> Iterator[tuple[str, Engine, int]]:
    """The engines that answer, the peer first, and how many prompts each is given."""
    for batch in (32, 128):
        params = engine_params(chosen, batch_rows=batch)
        yield f"Transformers, batches of {batch}", TransformersEngine(params, target), min(chosen.answers, batch)
    params = replace(engine_params(chosen), concurrency=min(chosen.answers, 256))
    yield f"SGLang, {params.concurrency} at a time", SGLangEngine(params, target), chosen.answers


def print_table(chosen: argparse.Namespace, found: list[tuple[str, float, float]], title: str) -> None:
    """As docs/benchmarks.md holds it; the ratios are to the first line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    ranks = f", tp {chosen.tp}, dp {chosen.dp}" if chosen.tp * chosen.dp > 1 else ""
    print(f"\n{title}, {chosen.geometry}, {date.today()}, {device}, {os.cpu_count()} cores{ranks}\n")
    print(f"| {title} | tok/s | ratio | GB/s |\n| --- | ---: | ---: | ---: |")
    for what, rate, size in found:
        print(f"| {what} | {rate:,.0f} | {rate / found[0][1]:.3f} | {f'{size / 1e9:.2f}' if size else ''} |")
    print(flush=True)


if __name__ == "__main__":
    main()
