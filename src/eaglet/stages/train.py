"""train: the drafter, from the stored hidden states that the audit passed."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglet import checkpoint, choices, draft_vocab, files, live, rows, target, training, ttt
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter, DrafterConfig, save
from eaglet.errors import EagletError
from eaglet.layers import FINAL, streams
from eaglet.loader import Example
from eaglet.params import Params, TrainParams
from eaglet.paths import CHOICES, DRAFTER, LIVE, METRICS, ROWS, STATES, STORE, VOCAB
from eaglet.progress import progress
from eaglet.rows import Row
from eaglet.store import MANIFEST, States
from eaglet.training import Run

# What the numbers of a run follow from besides its data: a run that other code began is not gone on with.
_CODE = ("attention.py", "drafter.py", "loader.py", "loss.py", "training.py", "ttt.py")


@dataclass(frozen=True)
class StoredDocument:
    """A row with its hidden states in data/states."""

    row: Row
    choices: Tensor
    store: States

    def load(self) -> ttt.Document:
        """Read the states."""
        stored = self.store.read(self.row.sample)
        return ttt.Document(
            input_ids=torch.from_numpy(self.row.input_ids).long(),
            span_ids=torch.from_numpy(self.row.span_ids),
            choice=choices.spread(self.row, self.choices),
            streams=[stored[name] for name in streams(self.store.layers) if name != FINAL],
            final=stored[FINAL],
        )

    def example(self, vocab: DraftVocabulary, params: TrainParams) -> Example:
        """Its rows counted; its states not read."""
        return Example.of(
            self.row.id,
            torch.from_numpy(self.row.span_ids),
            choices.spread(self.row, self.choices),
            self.load,
            t2d=vocab.t2d,
            steps=params.ttt_steps,
            out_of_vocab=params.out_of_vocab,
        )


def run(params: Params) -> None:
    """Write data/drafter, metrics/train.json and plots/train/; on each of several GPUs, a process of torchrun's."""
    if torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        sys.stdout.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
        os.execv(sys.executable, [*command, "-m", "eaglet", "train"])
    with training.ranks() as (rank, device):
        found, heldout = prepare(params, device)
        with progress("train", found.steps, found.steps) as shown, live.metrics(LIVE, found, rank) as log:

            def on_step(record: training.Record) -> None:
                log(record)
                shown.add(rows=1, tokens=1)

            found.train(on_step)
        # Once, and after the best epoch was chosen without them.
        measured = found.scorer.evaluate(heldout) if heldout else None
        if rank == 0:
            finish(params, found, measured)


def prepare(params: Params, device: torch.device) -> tuple[Run, list[Example]]:
    """The run that the parameters and the data stand for, which may have begun already; and the held-out rows.

    Raises:
        EagletError: the data are another target's or another's tokenizer's, or nothing can be learnt from them.
    """
    model = target.load(params.target)
    vocab = draft_vocab.load(VOCAB)
    if len(vocab.t2d) != model.fingerprint.vocab_size:
        raise EagletError(
            f"{VOCAB} maps {len(vocab.t2d):,} tokens, the target has {model.fingerprint.vocab_size:,}: it is another "
            "tokenizer's; run `dvc repro vocab`"
        )
    states = States()
    if states.manifest["model"] != model.fingerprint.states:
        raise EagletError("data/states are another target's hidden states: run `dvc repro extract`")
    all_rows = rows.read(ROWS)
    training_rows: list[Example] = []
    validation: list[Example] = []
    heldout: list[Example] = []
    for row, chosen in zip(all_rows, choices.load(CHOICES, all_rows), strict=True):
        example = StoredDocument(row, chosen, states).example(vocab, params.train)
        if row.heldout and example.rows[0] > 0:
            heldout.append(example)
        elif not row.heldout and example.loss_rows[0] > 0:
            (validation if for_validation(row.sample, params.train.validation) else training_rows).append(example)
    if not training_rows:
        raise EagletError("no row to train on has two answer tokens in a row that the draft vocabulary can teach")
    config = DrafterConfig.from_target(model.config, len(vocab.d2t))
    found = Run(
        Drafter(config, model.embedding(), seed=params.train.seed).to(device),
        training_rows,
        validation,
        model.head(),
        vocab,
        params.train,
        run_folder(params, model.fingerprint.states),
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    return found, heldout


def for_validation(sample: str, share: float) -> bool:
    """Whether a training row is set aside to choose the best epoch: the held-out rows are for the final word."""
    return int(sample[-8:], 16) < share * 2**32


def run_folder(params: Params, model: str) -> Path:
    """Where this run saves itself: named by all that its numbers follow from."""
    data = [files.file_sha256(path) for path in (VOCAB, ROWS, CHOICES, STATES / MANIFEST)]
    code = [files.file_sha256(Path(training.__file__).with_name(name)) for name in _CODE]
    return STORE / "train" / files.digest([asdict(params.train), model, data, code])[:32]


def finish(params: Params, found: Run, heldout: dict[str, Any] | None) -> None:
    """Export the best weights, and write the numbers."""
    store = States()
    save(DRAFTER, found.drafter, found.vocab, store.layers, target.load(params.target).config)
    records, last = found.records, found.records[-1]
    validated = [record.validation for record in records if record.validation is not None]
    best = found.best
    numbers = {
        "rows": len(found.examples),
        "validation_rows": len(found.validation),
        "left_out_rows": count_left_out(found),
        "steps": len(records),
        "tokens": sum(record.tokens for record in records),
        "first_loss": records[0].loss,
        "last_loss": last.loss,
        "last_acc": last.acc,
        "best_epoch": best[1] if best else last.epoch,
        "validation": validated[best[1] - 1] if best else None,
        "heldout": heldout,
    }
    files.write_json(METRICS / "train.json", numbers)
    checkpoint.remove(found.folder)
    what = f", simulated acceptance length {best[0]:.3f} in epoch {best[1]}" if best else ""
    print(f"train: {len(records)} steps, loss {records[0].loss:.3f} → {last.loss:.3f}{what} → {DRAFTER}")


def count_left_out(found: Run) -> int:
    """Rows to train on that teach nothing: fewer than two answer tokens in a row, or none in the draft vocabulary."""
    wanted: Sequence[Row] = [row for row in rows.read(ROWS) if not row.heldout]
    return len(wanted) - len(found.examples) - len(found.validation)
