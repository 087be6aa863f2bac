"""Training tokens a second, from memory and from packed shards, against speculators' own model and loss.

    python benchmarks/train.py --peer .venv-oracle/bin/python

Weights and states are random, of a real geometry; each row has a prompt of an eighth and an answer. Ours is the whole
of the train stage's loop: loader, packing, forward, backward, optimiser. The peer's (train_speculators.py) is its
published model and loss with the same optimiser, its inputs on the device already. Medians of the steps after warm-up.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch

from eaglet import draft_vocab, live, shard, ttt
from eaglet.drafter import Drafter, DrafterConfig
from eaglet.layers import FINAL
from eaglet.loader import Example
from eaglet.params import load as load_params
from eaglet.shard import Shard, ShardMeta
from eaglet.training import Record, Run

PEER = Path(__file__).with_name("train_speculators.py")
STREAMS = ("low", "mid", "high", FINAL)
WARM = 3  # steps


def main() -> None:
    """Measure each kind of run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row, and of a micro-batch")
    parser.add_argument("--rows", type=int, default=16, help="a step each")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where shards are written")
    parser.add_argument("--peer", help="a Python that has speculators")
    chosen = parser.parse_args()
    config = DrafterConfig(
        hidden_size=chosen.hidden,
        intermediate_size=chosen.inner,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.kv_heads,
        head_dim=chosen.hidden // chosen.heads,
        rms_norm_eps=1e-5,
        vocab_size=chosen.vocab,
        draft_vocab_size=chosen.draft_vocab,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    found: list[tuple[str, list[Record] | list[dict[str, float]], float]] = []
    if chosen.peer:
        found.append(("speculators, from memory", *peer(chosen, config)))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for what, make in {"from memory": in_memory, "from packed shards": partial(packed, Path(folder))}.items():
            records, peak = ours(chosen, config, make, Path(folder) / what.replace(" ", "-"))
            found.append((f"eaglet, {what}", records, peak))
    print_table(chosen, found)


Make = Callable[[argparse.Namespace, int], Callable[[], ttt.Document]]


def in_memory(chosen: argparse.Namespace, seed: int) -> Callable[[], ttt.Document]:
    """A row that is there already."""
    generator = torch.Generator().manual_seed(seed)
    length, prompt = chosen.tokens, chosen.tokens // 8
    states = [torch.randn(length, chosen.hidden, generator=generator).bfloat16() for _ in STREAMS]
    document = ttt.Document(
        input_ids=torch.randint(chosen.vocab, (length,), generator=generator),
        span_ids=(torch.arange(length) >= prompt).long(),
        choice=torch.randint(chosen.draft_vocab, (length,), generator=generator),  # the vocabulary's first are drafted
        streams=states[:3],
        final=states[3],
    )
    return lambda: document


def packed(folder: Path, chosen: argparse.Namespace, seed: int) -> Callable[[], ttt.Document]:
    """A row whose states lie in shards, one a stream."""
    known = in_memory(chosen, seed)()
    name = f"{seed:064x}"
    for stream, states in zip(STREAMS, [*known.streams, known.final], strict=True):
        meta = ShardMeta(
            layer=stream,
            codec="rebase-zstd",
            hidden_size=chosen.hidden,
            model="random",
            engine="benchmark",
            samples=(name,),
        )
        shard.write(folder / f"{seed}-{stream}", meta, [shard.pack(states, "rebase-zstd")])

    def load() -> ttt.Document:
        found = []
        for stream in STREAMS:
            with Shard.open(folder / f"{seed}-{stream}") as opened:
                found.append(opened.read(name))
        return ttt.Document(known.input_ids, known.span_ids, known.choice, found[:3], found[3])

    return load


def ours(chosen: argparse.Namespace, config: DrafterConfig, make: Make, folder: Path) -> tuple[list[Record], float]:
    """A record a step, and the peak of GPU memory in bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocab = draft_vocab.choose(torch.zeros(config.vocab_size, dtype=torch.int64), config.draft_vocab_size, set())
    params = replace(
        load_params(Path(__file__).parents[1] / "params.yaml").train,
        ttt_steps=chosen.ttt_steps,
        epochs=1,
        batch_tokens=chosen.tokens,
        micro_batch_tokens=chosen.tokens,
        validation=0.0,
    )
    examples = []
    for seed in range(chosen.rows):
        load = make(chosen, seed)
        known = load()
        examples.append(
            Example.of(
                f"row {seed}",
                known.span_ids,
                known.choice,
                load,
                t2d=vocab.t2d,
                steps=params.ttt_steps,
                out_of_vocab=params.out_of_vocab,
            )
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator(device).manual_seed(0)
    size = (config.vocab_size, config.hidden_size)
    embedding, head = (torch.randn(size, generator=generator, device=device).mul_(0.02) for _ in range(2))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = Drafter(config, embedding).to(device)
    run = Run(drafter, examples, [], head, vocab, params, folder, dtype=dtype)
    records: list[Record] = []
    run.train(records.append)
    return records, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0.0


def peer(chosen: argparse.Namespace, config: DrafterConfig) -> tuple[list[dict[str, float]], float]:
    """The same of speculators, in a process of its own."""
    order = {**asdict(config), "ttt_steps": chosen.ttt_steps, "tokens": chosen.tokens, "rows": chosen.rows}
    done = subprocess.run([chosen.peer, PEER, json.dumps(order)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print("speculators did not run: its error stands above", flush=True)
        return [], 0.0
    answer = json.loads(done.stdout.splitlines()[-1])
    return [{"tokens_per_second": rate} for rate in answer["tokens_per_second"]], answer["memory"]


def print_table(
    chosen: argparse.Namespace, found: list[tuple[str, list[Record] | list[dict[str, float]], float]]
) -> None:
    """As docs/benchmarks.md holds it; the ratios are to the first line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    rate = live.matrix_rate(device, torch.bfloat16)
    print(f"\ntraining, H {chosen.hidden}, TTT {chosen.ttt_steps}, rows of {chosen.tokens}, {date.today()}, {name}")
    print(
        f"{os.cpu_count()} cores; a large matrix product: {f'{rate / 1e12:.0f} Tflop/s' if rate else 'not measured'}\n"
    )
    print("| training | tok/s | ratio | MFU | peak GiB | waited for data |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    first = None
    for what, records, peak in found:
        if not records:
            continue
        warm = [one if isinstance(one, dict) else asdict(one) for one in records][WARM:]
        speed = statistics.median(one["tokens_per_second"] for one in warm)
        first = first or speed
        extra = ["", ""]
        if "flops" in warm[0]:
            flops, waited = (statistics.median(one[key] for one in warm) for key in ("flops", "waited"))
            extra = [f"{flops / rate:.1%}" if rate else "", f"{waited:.1%}"]
        memory = f"{peak / 2**30:.1f}" if peak else ""
        print(f"| {what} | {speed:,.0f} | {speed / first:.2f} | {extra[0]} | {memory} | {extra[1]} |")
    print(flush=True)


if __name__ == "__main__":
    main()
