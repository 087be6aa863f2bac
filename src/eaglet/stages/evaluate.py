"""evaluate: held-out prompts decoded by drafter and target together, as a server would."""

from collections.abc import Sequence
from dataclasses import dataclass

from eaglet import drafter, files, rows, target
from eaglet.acceptance import Chain, acceptance_length, capture_with_hooks, decode, greedy
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import DRAFTER, METRICS, PLOTS, ROWS
from eaglet.progress import progress
from eaglet.rows import Row


@dataclass(frozen=True)
class Decoded:
    """One prompt's answer with the drafter, and the target's own."""

    row: Row
    chain: Chain
    own: list[int]


def run(params: Params) -> None:
    """Write metrics/evaluate.json, plots/acceptance.csv and plots/positions.csv.

    In float32, where ties do not blur it: the output must be the target's own, token for token.
    """
    model = target.load(params.target)
    chosen = rows.heldout(ROWS, params.evaluate.prompts)
    network = model.model("float32")
    draft, vocab = drafter.load(DRAFTER, model.embedding().to(network.device))
    capture = capture_with_hooks(drafter.read_layers(DRAFTER))
    decoded = []
    limit = params.evaluate.max_new_tokens
    with progress("evaluate", len(chosen) * limit, len(chosen)) as shown:
        for row in chosen:
            chain = decode(
                network,
                draft,
                vocab,
                row.prompt_ids,
                capture=capture,
                steps=params.evaluate.draft_steps,
                max_new_tokens=limit,
                eos_ids=model.end_ids,
            )
            decoded.append(Decoded(row, chain, greedy(network, row.prompt_ids, limit, model.end_ids)))
            shown.add(rows=1, tokens=len(chain.output_ids))
    write_metrics(decoded, params.evaluate.draft_steps)
    different = [one.row.id for one in decoded if one.chain.output_ids != one.own]
    if different:
        raise EagletError(
            f"with the drafter, the output of {len(different)} of {len(decoded)} prompts is not the target's own, "
            f"first {different[0]}: the verification is wrong, or two logits tie in float32"
        )
    print(
        f"evaluate: acceptance length {acceptance_length([one.chain for one in decoded]):.3f} on {len(decoded)} prompts"
    )


def write_metrics(decoded: Sequence[Decoded], steps: int) -> None:
    """Acceptance in all, by source and by drafted position."""
    chains = [one.chain for one in decoded]
    sources = sorted({one.row.source for one in decoded})
    by_source = {
        source: acceptance_length([one.chain for one in decoded if one.row.source == source]) for source in sources
    }
    cycles = sum(len(chain.accepted) for chain in chains)
    rates = [sum(chain.hits[place] for chain in chains) / max(1, cycles) for place in range(steps)]
    numbers = {
        "prompts": len(decoded),
        "draft_steps": steps,
        "tokens": sum(len(chain.output_ids) for chain in chains),
        "cycles": cycles,
        "acceptance_length": acceptance_length(chains),
        "rate_by_position": rates,
        "by_source": by_source,
        "equal": all(one.chain.output_ids == one.own for one in decoded),
    }
    files.write_json(METRICS / "evaluate.json", numbers)
    files.write_csv(PLOTS / "acceptance.csv", ["source", "acceptance_length"], list(by_source.items()))
    files.write_csv(PLOTS / "positions.csv", ["position", "rate"], list(enumerate(rates, start=1)))
