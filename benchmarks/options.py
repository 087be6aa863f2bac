"""Options of training, each changed alone from params.yaml, on the states of a project that `dvc repro audit` made.

    python benchmarks/options.py --project DIR --processes 6 --base '{"ttt_steps": 7, "epochs": 20}'

Several runs at a time, a process each. `chosen by` is the acceptance length on the rows set aside from those to train
on (the 5 % or more of train.validation): an option is chosen by it; the held-out columns are for the report. Acceptance
lengths are those of greedy chains (`ttt.chain`) of 3 and of 7 drafted tokens, whatever train.ttt_steps is.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from eaglet import choices, draft_vocab, rows, target, ttt
from eaglet import params as params_file
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter, DrafterConfig
from eaglet.loader import Example
from eaglet.params import Params, TrainParams
from eaglet.paths import CHOICES, ROWS
from eaglet.rows import Row
from eaglet.stages.train import StoredDocument, for_validation
from eaglet.stages.vocab import count_answers, template_tokens
from eaglet.store import States
from eaglet.training import Run, Scorer

DRAFTED = (3, 7)  # tokens, where acceptance is measured
USUAL: dict[str, Any] = {"vocab.size": None, "rows": 1, "batch": 1}
# What a run changes: fields of params.yaml's train, vocab.size, and factors on batch_tokens and on the rows.
OPTIONS: dict[str, dict[str, Any]] = {
    "params.yaml": {},
    "TTT 3": {"ttt_steps": 3},
    "TTT 5": {"ttt_steps": 5},
    "TTT 7": {"ttt_steps": 7},
    "head at random": {"head_init": "random"},
    "renormalise": {"out_of_vocab": "renormalise"},
    "loss decay 0.5": {"loss_decay": 0.5},
    "loss decay 1": {"loss_decay": 1.0},
    "lr 5e-4": {"learning_rate": 5e-4},
    "lr 2e-3": {"learning_rate": 2e-3},
    "muon": {"optimizer": "muon"},
    "muon, lr 2e-3": {"optimizer": "muon", "learning_rate": 2e-3},
    "sharpen 0.3": {"sharpen": 0.3},
    "dropout 0.1": {"dropout": 0.1},
    "weight decay 0.1": {"weight_decay": 0.1},
    "average 0.999": {"average": 0.999},
    "half the batch": {"batch": 1 / 2},
    "twice the batch": {"batch": 2},
    "vocabulary 4,096": {"vocab.size": 4096},
    "vocabulary 16,384": {"vocab.size": 16384},
    "half the rows": {"rows": 1 / 2},
}


def main() -> None:
    """Run the options and print the table; or one of them, and print its numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path(), help="the folder of params.yaml and data")
    parser.add_argument("--base", type=json.loads, default={}, help="JSON of what every run changes in params.yaml")
    parser.add_argument("--options", default=";".join(OPTIONS), help="names, or JSON of changes, with ; between them")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        os.chdir(chosen.project)
        print(json.dumps(measure(params_file.load(), chosen.one)))
        return
    names = chosen.options.split(";")
    with ThreadPoolExecutor(chosen.processes) as pool:
        found = pool.map(lambda name: start(chosen.project, name, chosen.base | (OPTIONS.get(name) or {})), names)
        print_table(chosen.base, dict(zip(names, found, strict=True)))


def start(project: Path, name: str, changes: dict[str, Any]) -> dict[str, Any] | None:
    """One run, in a process of its own; None where it failed, its error printed."""
    if name.startswith("{"):
        changes = changes | json.loads(name)
    command = [sys.executable, __file__, "--project", str(project), "--one", json.dumps(changes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else None
    print(json.dumps({name: found}), file=sys.stderr, flush=True)  # a table cut short is not lost
    return found


def measure(params: Params, changes: dict[str, Any]) -> dict[str, Any]:
    """Train, and measure on the rows set aside and on the held-out ones, with 3 and with 7 tokens drafted."""
    torch.set_num_threads(2)
    size, share, batch = (changes.pop(name, usual) for name, usual in USUAL.items())
    train = replace(params.train, **changes)
    train = replace(train, batch_tokens=round(train.batch_tokens * batch))
    model = target.load(params.target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    all_rows = rows.read(ROWS)
    counts = count_answers([row for row in all_rows if not row.heldout], model.fingerprint.vocab_size)
    vocab = draft_vocab.choose(counts, size or params.vocab.size, template_tokens(model))
    documents = read(all_rows)
    heldout = [one for row, one in zip(all_rows, documents, strict=True) if row.heldout]
    rest = [(row, one) for row, one in zip(all_rows, documents, strict=True) if not row.heldout]
    aside = [one for row, one in rest if for_validation(row.sample, train.validation)]
    given = [one for row, one in rest if not for_validation(row.sample, train.validation)]
    given = given[:: round(1 / share)]
    embedding, head = model.embedding(), model.head()
    drafter = Drafter(DrafterConfig.from_target(model.config, len(vocab.d2t)), embedding, seed=train.seed).to(device)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            drafter,
            [one for one in examples(given, vocab, train) if one.loss_rows[0]],
            [one for one in examples(aside, vocab, train) if one.rows[0]],
            head,
            vocab,
            train,
            Path(folder),
            dtype=dtype,
        )
        began = time.monotonic()
        run.train(lambda record: None)
        seconds = time.monotonic() - began
    found: dict[str, Any] = {"steps": run.steps, "seconds": seconds, "best": run.best, "loss": run.records[-1].loss}
    for steps in DRAFTED:
        scored = replace(train, ttt_steps=steps)
        scorer = Scorer(drafter, head, vocab, scored, dtype)
        found[f"aside {steps}"] = scorer.evaluate(examples(aside, vocab, scored))
        found[f"heldout {steps}"] = scorer.evaluate(examples(heldout, vocab, scored))
    return found


def read(all_rows: Sequence[Row]) -> list[tuple[str, ttt.Document]]:
    """Every row's name and document, states and all."""
    states = States()
    stored = [
        StoredDocument(row, chosen, states)
        for row, chosen in zip(all_rows, choices.load(CHOICES, all_rows), strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        return [
            (one.row.id, document) for one, document in zip(stored, pool.map(StoredDocument.load, stored), strict=True)
        ]


def examples(
    documents: Sequence[tuple[str, ttt.Document]], vocab: DraftVocabulary, train: TrainParams
) -> list[Example]:
    """Documents that are there already, counted."""
    return [
        Example.of(
            name,
            document.span_ids,
            document.choice,
            lambda document=document: document,
            t2d=vocab.t2d,
            steps=train.ttt_steps,
            out_of_vocab=train.out_of_vocab,
        )
        for name, document in documents
    ]


def print_table(base: dict[str, Any], found: dict[str, dict[str, Any] | None]) -> None:
    """As docs/benchmarks.md holds it."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"\noptions of training, {date.today()}, {device}; of every run: {json.dumps(base)}\n")
    print("| option | chosen by | held out: 7 drafted | 3 drafted | acc₀ | acc₂ | acc₆ | steps | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, one in found.items():
        if one is None:
            print(f"| {name} | failed | | | | | | | |")
            continue
        short, long = one["heldout 3"], one["heldout 7"]
        lengths = [one["aside 7"]["acceptance_length"], long["acceptance_length"], short["acceptance_length"]]
        numbers = [f"{value:.3f}" for value in (*lengths, *(long["acc"][place] for place in (0, 2, 6)))]
        print(f"| {name} | {' | '.join(numbers)} | {one['steps']} | {one['seconds']:.0f} |")


if __name__ == "__main__":
    main()
