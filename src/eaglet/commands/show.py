"""show: the anatomy of a stored sample, as one would check it by hand."""

from collections.abc import Sequence
from typing import Any

from eaglet import params, rows, target
from eaglet.audit import faults
from eaglet.errors import EagletError
from eaglet.paths import ROWS
from eaglet.rows import Row
from eaglet.store import States

_TEXT_TOKENS = 24  # shown from each end of a longer row


def run(name: str | None) -> None:
    """Print one sample: by (a prefix of) its sample hash, by its row's id, or the first."""
    states = States()
    row = _find(rows.read(ROWS), name)
    if row.sample not in states:
        raise EagletError(f"row {row.id} has no hidden states yet: run `dvc repro extract`")
    stored = states.read(row.sample)
    manifest = states.manifest
    print(f"sample     {row.sample}")
    print(f"row        {row.id}  source {row.source}  {'held out' if row.heldout else 'training'}")
    print(f"model      {manifest['model'][:16]}…  engine {manifest['engine']}  codec {manifest['codec']}")
    print(f"input_ids  int32 [{len(row.input_ids)}]")
    print(
        f"loss_mask  bool [{len(row.loss_mask)}]  {int(row.loss_mask.sum())} answer tokens "
        f"in {len(row.turn_starts)} turns"
    )
    print(f"\n{'stream':8}{'shape':>14}{'dtype':>10}{'min':>10}{'max':>10}{'mean':>10}{'std':>10}  meaning")
    for stream, values in stored.items():
        wide = values.float()
        shape = "×".join(map(str, values.shape))
        meaning = (
            f"after the final norm ({manifest['final']})" if stream == "final" else f"output of layer {int(stream[1:])}"
        )
        numbers = (wide.min(), wide.max(), wide.mean(), wide.std())
        print(f"{stream:8}{shape:>14}{'bfloat16':>10}" + "".join(f"{float(n):10.3f}" for n in numbers) + f"  {meaning}")
    print(f"\n{'position':>8} {'id':>7} mask  token")
    _print_tokens(row, target.load(params.load().target).tokenizer)
    wrong = faults(stored, len(row.input_ids))
    print("\n" + ("; ".join(wrong) if wrong else "finite, non-zero, layers distinct, lengths right"))


def _find(all_rows: Sequence[Row], name: str | None) -> Row:
    if name is None:
        return all_rows[0]
    found = [row for row in all_rows if row.id == name] or [row for row in all_rows if row.sample.startswith(name)]
    if not found:
        raise EagletError(f"no row {name!r} in {ROWS}: give a row's id or the start of its sample hash")
    return found[0]


def _print_tokens(row: Row, tokenizer: Any) -> None:
    length = len(row.input_ids)
    places = list(range(length))
    if length > 2 * _TEXT_TOKENS:
        places = [*places[:_TEXT_TOKENS], -1, *places[-_TEXT_TOKENS:]]
    for place in places:
        if place < 0:
            print(f"{'…':>8}")
            continue
        token = int(row.input_ids[place])
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        print(f"{place:8} {token:7}    {'1' if row.loss_mask[place] else '0'}  {text!r}")
