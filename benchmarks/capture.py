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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from eaglet import filling, layers, store
from eaglet.engines import Answer, Engine
from eaglet.engines.sglang import SGLangEngine
from eaglet.engines.transformers import TransformersEngine
from eaglet.errors import EagletError
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
    | {"hidden_size": 7168, "num_hidden_layers": 7, "num_attention_heads": 56, "num_key_value_heads": 8}
    | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "vocab_size": 32768}
    | {"intermediate_size": 2048},
}


def main() -> None:
    """Start all servers at once, then measure one geometry after the other and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", nargs="+", choices=list(GEOMETRIES))
    parser.add_argument("--python", default=".venv-sglang/bin/python", help="that runs SGLang")
    parser.add_argument("--args", default="", help="further arguments of sglang.launch_server")
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=256, help="prompts answered; 0 leaves answering out")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()), help="where models are made")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where shards are written")
    chosen = parser.parse_args()
    chosen.python = str(Path(chosen.python).absolute()) if "/" in chosen.python else chosen.python
    targets = {name: make_target(name, chosen.models) for name in chosen.geometries}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    work = Path(tempfile.mkdtemp(dir=chosen.folder))
    (work / ".store").mkdir()
    try:
        with contextlib.chdir(work):  # the store lies relative to the working directory
            with contextlib.ExitStack() as opened:
                pairs = {name: Pair(chosen, target) for name, target in targets.items()}
                for pair in pairs.values():
                    opened.callback(pair.close)
                with ThreadPoolExecutor(2 * len(pairs)) as pool:
                    starts = {name: [pool.submit(start) for start in pair.starts()] for name, pair in pairs.items()}
                for name, pair in pairs.items():
                    try:
                        for start in starts[name]:
                            start.result()
                        print_table(chosen, name, pair.measure(), "prefill")
                    except EagletError as error:
                        print(f"{name}: {error}", flush=True)
            if chosen.answers:
                for name, target in targets.items():
                    print_table(chosen, name, answering(chosen, target), "answering")
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


class Pair:
    """A server that captures and one that does not, of one target, started alike."""

    def __init__(self, chosen: argparse.Namespace, target: Target) -> None:
        self._chosen = chosen
        self._target = target
        self._streams = layers.streams(layers.choose("auto", target.fingerprint.num_layers))
        self._capturing = SGLangEngine(engine_params(chosen), target)
        self._bare = SGLangEngine(engine_params(chosen, "--disable-radix-cache", "--disable-cuda-graph"), target)

    def starts(self) -> list[Callable[[], int]]:
        """What starts each server and warms it up."""
        rows = random_rows(self._target, 64, self._chosen.tokens, seed=0)
        return [lambda: self.capture(rows), lambda: self.bare(rows)]

    def close(self) -> None:
        """Stop both."""
        self._bare.close()
        self._capturing.close()

    def bare(self, rows: list[list[int]]) -> int:
        """Prefill alone; the rows done."""
        return sum(isinstance(answer, Answer) for _, answer in self._bare.answer(rows, generate_params(1)))

    def capture(self, rows: list[list[int]]) -> int:
        """Hidden states come here, and are let go."""
        found = self._capturing.prefill(rows, self._streams, lambda index, states: None)
        return sum(outcome is None for _, outcome in found)

    def pack(self, rows: list[list[int]], engine: Engine | None = None) -> int:
        """What the extract stage does with rows, up to shards that are synced."""
        made = [
            Row(str(k), "", False, True, np.array(row, np.int32), np.zeros(len(row), np.bool_), [])
            for k, row in enumerate(rows)
        ]
        engine = engine or self._capturing
        states = store.Store(
            store.Kind("benchmark", engine.numerics, "rebase-zstd", self._target.fingerprint.hidden_size), self._streams
        )
        groups = store.group_rows(made, 16_384)  # small shards: the end of so short a run is not all writing
        done = filling.compute(states.work(groups), {row.sample: row for row in made}, engine, states)
        return done.computed // len(self._streams) if not states.work(groups) else 0

    def measure(self) -> list[tuple[str, float, float]]:
        """(what, tokens a second, bytes of hidden states a second) of each kind of run."""
        kinds = {
            "SGLang, bare": self.bare,
            "SGLang, captured": self.capture,
            "SGLang, packed shards on disk": self.pack,
        }
        # Enough for several processes, so that what they are forked from has started.
        seconds: dict[str, list[float]] = {what: [] for what in kinds}
        self.timed(self.pack, 128, seed=-1)
        for number in range(1, self._chosen.rounds + 1):
            for what, run in kinds.items():
                seconds[what].append(self.timed(run, self._chosen.rows, number))
        results = [
            (what, self._chosen.rows * self._chosen.tokens / statistics.median(some)) for what, some in seconds.items()
        ]
        results.append(("Transformers, packed shards on disk", self.peer()))
        row_bytes = len(self._streams) * self._target.fingerprint.hidden_size * 2
        return [(what, rate, 0 if "bare" in what else rate * row_bytes) for what, rate in results]

    def peer(self) -> float:
        """Tokens a second of the Transformers engine, packed."""
        engine = TransformersEngine(engine_params(self._chosen), self._target)
        run = partial(self.pack, engine=engine)
        self.timed(run, 2, seed=-2)
        count = min(self._chosen.rows, 32)
        rate = count * self._chosen.tokens / self.timed(run, count, seed=-3)
        del engine, run  # the model leaves the GPU to the next geometry
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return rate

    def timed(self, run: Callable[[list[list[int]]], int], count: int, seed: int) -> float:
        """Seconds that a run over `count` new rows takes."""
        rows = random_rows(self._target, count, self._chosen.tokens, seed)
        began = time.monotonic()
        done = run(rows)
        taken = time.monotonic() - began
        shutil.rmtree(Path(".store/states"), ignore_errors=True)
        if done != count:
            raise SystemExit(f"{done} of {count} rows")
        return taken


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


def print_table(chosen: argparse.Namespace, geometry: str, found: list[tuple[str, float, float]], title: str) -> None:
    """As docs/benchmarks.md holds it; the ratios are to the first line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    ranks = f", tp {chosen.tp}, dp {chosen.dp}" if chosen.tp * chosen.dp > 1 else ""
    print(f"\n{title}, {geometry}, {date.today()}, {device}, {os.cpu_count()} cores{ranks}\n")
    print(f"| {title} | tok/s | ratio | GB/s |\n| --- | ---: | ---: | ---: |")
    for what, rate, size in found:
        print(f"| {what} | {rate:,.0f} | {rate / found[0][1]:.3f} | {f'{size / 1e9:.2f}' if size else ''} |")
    print(flush=True)


if __name__ == "__main__":
    main()
