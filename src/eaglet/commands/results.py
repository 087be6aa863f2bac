"""results: the table of the last run."""

from pathlib import Path
from typing import Any

from eaglet import files
from eaglet.paths import DRAFTER, METRICS


def run() -> None:
    """Print the numbers that the stages wrote."""
    generate, tokenize = _metrics("generate"), _metrics("tokenize")
    extract, audit, vocab = _metrics("extract"), _metrics("audit"), _metrics("vocab")
    train, evaluate = _metrics("train"), _metrics("evaluate")
    heldout = train["heldout"]
    lines = [
        (
            "prompts",
            f"{generate['rows_read']:,} read, {generate['duplicates']} duplicates, {generate['refused']} refused",
        ),
        (
            "answers",
            f"{generate['turns']:,} turns, {generate['finish_reasons'].get('length', 0):,} cut at the limit",
        ),
        ("rows", f"{tokenize['rows']:,}, {tokenize['heldout_rows']:,} of them held out"),
        ("tokens", f"{tokenize['tokens']:,}, {tokenize['answer_tokens']:,} of them answers"),
        (
            "hidden states",
            f"{files.human_bytes(extract['bytes'])} stored, {files.human_bytes(extract['raw_bytes'])} raw, "
            f"ratio {extract['ratio']:.3f}",
        ),
        ("audit", f"next-token agreement {audit['agreement']:.4f}, {_worst(audit)}"),
        (
            "draft vocabulary",
            f"{vocab['size']:,}: covers {vocab['coverage']:.3f} of the answers, "
            f"{_share(vocab['heldout_coverage'])} of the held-out ones",
        ),
        (
            "training loss",
            f"{train['first_loss']:.3f} → {train['last_loss']:.3f} in {train['steps']:,} steps",
        ),
    ]
    if heldout is not None:
        accuracy = ", ".join(f"{value:.3f}" for value in heldout["acc"])
        lines.append(("held-out loss", f"{heldout['loss']:.3f}, accuracy by TTT step {accuracy}"))
    lines.append(
        (
            "acceptance length",
            f"{evaluate['acceptance_length']:.3f} tokens a cycle of {evaluate['draft_steps']} drafted "
            f"({evaluate['prompts']} held-out prompts), "
            f"output {'equal to' if evaluate['equal'] else 'NOT equal to'} the target's own",
        )
    )
    lines += [(f"  {source}", f"{value:.3f}") for source, value in evaluate["by_source"].items()]
    lines.append(("drafter", f"{DRAFTER.resolve()}"))
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:{width}}  {value}" for name, value in lines))


def _metrics(stage: str) -> Any:
    return files.read_json(Path(METRICS) / f"{stage}.json", stage)


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _worst(audit: Any) -> str:
    errors = audit["relative_error"]
    if not errors:
        return "no reference rows"
    name = max(errors, key=lambda stream: errors[stream])
    return f"relative error at most {errors[name]:.4f} ({name})"
