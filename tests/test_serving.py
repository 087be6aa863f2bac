"""Acceptance as a server counts it."""

from pathlib import Path
from typing import Any

import pytest

from eaglet import serving
from eaglet.commands import served
from eaglet.errors import EagletError
from eaglet.server import Drafting, Server
from eaglet.serving import Pass, Served


def test_a_chains_arguments() -> None:
    assert Drafting(Path("/d"), 5).arguments() == [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d"),
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"),
    ]


def test_lengths_by_hand() -> None:
    # 7 tokens in 3 cycles, of which prefill wrote one; 4 in 1.
    answers = [Served([1] * 7, 3), Served([1] * 4, 1)]
    assert serving.acceptance_length(answers) == pytest.approx(11 / 4)
    assert serving.emitted_per_cycle(answers) == pytest.approx(9 / 4)
    assert serving.acceptance_length([Served([1], 0)]) == 1.0, "an answer of one token took no cycle"


def test_what_differs() -> None:
    one = Pass(1, [Served([1, 2], 1), Served([3], 1)], 2.0)
    other = Pass(8, [Served([1, 2], 2), Served([4], 1)], 1.0)
    assert serving.differing(one, other) == 1
    assert (one.tokens_per_second, other.tokens_per_second) == (1.5, 3.0)


def test_a_reply() -> None:
    meta = {"completion_tokens": 3, "spec_verify_ct": 2}
    assert serving.served({"output_ids": [5, 6, 7], "meta_info": meta}) == Served([5, 6, 7], 2)
    assert serving.served({"output_ids": [5], "meta_info": {"completion_tokens": 1}}).cycles == 0
    with pytest.raises(EagletError, match="counts 3 tokens of an answer that has 2"):
        serving.served({"output_ids": [5, 6], "meta_info": meta})


def test_summary_by_hand() -> None:
    rows: list[Any] = [type("R", (), {"source": name}) for name in ("code", "tasks")]
    drafted = Pass(1, [Served([1, 2, 3, 4], 2), Served([5, 6], 1)], 1.0)
    full = Pass(8, [Served([1, 2, 3, 4], 2), Served([5, 6], 1), Served([1, 2, 3, 9], 2)], 0.5)
    plain = Pass(1, [Served([1, 2, 3, 4], 0), Served([5, 6], 0)], 3.0)
    plain_full = Pass(8, [Served([1, 2, 3, 4], 0), Served([5, 7], 0), Served([1, 2, 3, 4], 0)], 1.0)
    numbers = served.summary(rows, 5, [drafted, full], [plain, plain_full])
    assert numbers["acceptance_length"] == 2.0 and numbers["emitted_per_cycle"] == pytest.approx(4 / 3)
    assert numbers["by_source"] == {"code": 2.0, "tasks": 2.0}
    first, second = numbers["batches"]
    assert (first["speed_up"], first["changed"], first["batch_noise"]) == (3.0, 0, 0)
    assert (second["speed_up"], second["changed"], second["batch_noise"]) == (2.0, 2, 1)
    alone = served.summary(rows, 5, [drafted], None)
    assert alone["batches"][0]["speed_up"] is None and alone["batches"][0]["changed"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"speculative_algorithm": None}, "does not draft with EAGLE-3"),
        ({"speculative_algorithm": "NGRAM"}, "does not draft with EAGLE-3"),
        ({"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4}, "drafts a tree"),
    ],
)
def test_a_server_that_does_not_draft_a_chain_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(EagletError, match=message):
        served.check_drafting(Server("http://127.0.0.1:1"), args)


def test_a_server_that_drafts_a_chain() -> None:
    args = {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1,
        "speculative_draft_model_path": "/d",
        "speculative_num_steps": 4,
    }
    assert served.check_drafting(Server("http://127.0.0.1:1"), args) == Drafting(Path("/d"), 4)
