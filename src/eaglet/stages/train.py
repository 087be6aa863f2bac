"""train: the drafter, from the stored hidden states that the audit passed."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from eaglet import draft_vocab, files, rows, target, training
from eaglet.drafter import Drafter, DrafterConfig, save
from eaglet.errors import EagletError
from eaglet.layers import FINAL, streams
from eaglet.params import Params
from eaglet.paths import DRAFTER, METRICS, PLOTS, ROWS, VOCAB
from eaglet.progress import progress
from eaglet.rows import Row
from eaglet.store import States
from eaglet.training import StepRecord, TrainSettings


@dataclass(frozen=True)
class StoredDocument:
    """A row with its hidden states in data/states, read when they are needed."""

    row: Row
    store: States

    @property
    def sample(self) -> str:
        """The row's name for messages."""
        return self.row.id

    @property
    def input_ids(self) -> Tensor:
        """int64 [T]."""
        return torch.from_numpy(self.row.input_ids).long()

    @property
    def span_ids(self) -> Tensor:
        """int64 [T]."""
        return torch.from_numpy(self.row.span_ids)

    def states(self) -> tuple[Tensor, Tensor]:
        """Float32 [T, 3H] of the layers, low to high, and [T, H] after the final norm."""
        stored = self.store.read(self.row.sample)
        aux = torch.cat([stored[name] for name in streams(self.store.layers) if name != FINAL], dim=1)
        return aux.float(), stored[FINAL].float()


def run(params: Params) -> None:
    """Write data/drafter, metrics/train.json, plots/loss.csv and plots/accuracy.csv."""
    model = target.load(params.target)
    vocab = draft_vocab.load(VOCAB)
    states = States()
    if states.manifest["model"] != model.fingerprint.states:
        raise EagletError("data/states are another target's hidden states: run `dvc repro extract`")
    documents = [StoredDocument(row, states) for row in rows.read(ROWS)]
    training_rows = [document for document in documents if not document.row.heldout]
    heldout = [document for document in documents if document.row.heldout]
    settings = TrainSettings(**asdict(params.train))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = DrafterConfig.from_target(model.config, len(vocab.d2t))
    drafter = Drafter(config, model.embedding(), seed=settings.seed).to(device)

    # Documents without a counted row are left out of the batches, so the last steps may come a little early.
    batches = settings.epochs * math.ceil(len(training_rows) / settings.batch_documents)
    with progress("train", batches, batches) as shown:
        records = training.train(
            drafter,
            training_rows,
            heldout,
            model.head(),
            vocab,
            settings=settings,
            on_step=lambda record: shown.add(rows=1, tokens=1),
        )
    save(DRAFTER, drafter, vocab, states.layers, model.config)
    write_metrics(records, training_rows, heldout)
    print(
        f"train: {len(records)} steps, loss {records[0].loss:.3f} → {records[-1].loss:.3f} → {DRAFTER}",
    )


def write_metrics(
    records: Sequence[StepRecord], training_rows: Sequence[StoredDocument], heldout: Sequence[StoredDocument]
) -> None:
    """The curves, and the numbers at their ends."""
    last = records[-1]
    numbers = {
        "rows": len(training_rows),
        "heldout_rows": len(heldout),
        "steps": len(records),
        "first_loss": records[0].loss,
        "last_loss": last.loss,
        "last_acc": last.acc,
        "heldout": last.heldout,
    }
    files.write_json(METRICS / "train.json", numbers)
    losses = [(r.step, "batch", r.loss) for r in records]
    losses += [(r.step, "held out", r.heldout["loss"]) for r in records if r.heldout is not None]
    files.write_csv(PLOTS / "loss.csv", ["step", "series", "loss"], losses)
    accuracies = [(r.step, f"batch, step {k}", acc) for r in records for k, acc in enumerate(r.acc)]
    accuracies += [
        (r.step, f"held out, step {k}", acc)
        for r in records
        if r.heldout is not None
        for k, acc in enumerate(r.heldout["acc"])
    ]
    files.write_csv(PLOTS / "accuracy.csv", ["step", "series", "acc"], accuracies)
