"""Generation in batches: the target's own answers, whatever stands beside them."""

import pytest
import tiny
import torch
from test_capture import FixedTarget, engine_params

from eaglet.acceptance import greedy
from eaglet.engines import Answer, Refusal
from eaglet.engines.transformers import TransformersEngine
from eaglet.params import GenerateParams

LIMIT = 12


class GenerativeTarget(FixedTarget):
    """A target with an end-of-turn id that a random model does write now and then."""

    def __init__(self, network: object, ends: frozenset[int]) -> None:
        super().__init__(network)
        self.end_ids = ends
        self.config = network.config  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def network() -> object:
    return tiny.model("llama")


@pytest.fixture(scope="module")
def contexts() -> list[list[int]]:
    rows = tiny.rows(11, 30)
    return [*rows, rows[3], rows[1][:9]]  # an exact repeat and a shared prefix


def params(**changes: object) -> GenerateParams:
    values = {"regenerate": True, "max_new_tokens": LIMIT, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    return GenerateParams(**{**values, **changes})  # type: ignore[arg-type]


def answers(
    network: object, rows: list[list[int]], batch_rows: int, ends: frozenset[int], **changes: object
) -> list[Answer]:
    engine = TransformersEngine(
        engine_params(batch_rows=batch_rows),
        GenerativeTarget(network, ends),  # type: ignore[arg-type]
    )
    found = dict(engine.answer(rows, params(**changes)))
    assert sorted(found) == list(range(len(rows)))
    return [found[index] for index in range(len(rows))]


def test_greedy_answers_are_the_targets_own_and_end_where_they_end(network: object, contexts: list[list[int]]) -> None:
    plain = [greedy(network, row, LIMIT, set()) for row in contexts]
    end = plain[1][4]  # a token that some answers hold: their end
    ends = frozenset({end})
    for index, answer in enumerate(answers(network, contexts, 4, ends)):
        expected = plain[index]
        if end in expected:
            assert answer == Answer(expected[: expected.index(end) + 1], "stop")
        else:
            assert answer == Answer(expected, "length")
    assert answers(network, contexts, 1, ends) == answers(network, contexts, 13, ends)


def test_samples_do_not_depend_on_their_batch(network: object, contexts: list[list[int]]) -> None:
    ends = frozenset({319})
    one = answers(network, contexts, 1, ends, temperature=0.8, seed=5)
    assert one == answers(network, contexts, 13, ends, temperature=0.8, seed=5)
    assert one[3] == one[11], "the same context, the same sample"
    assert one != answers(network, contexts, 13, ends, temperature=0.8, seed=6)
    assert one != answers(network, contexts, 13, ends)


def test_one_choice_is_greedy(network: object, contexts: list[list[int]]) -> None:
    ends = frozenset({319})
    assert answers(network, contexts, 5, ends, temperature=1.0, top_k=1) == answers(network, contexts, 5, ends)
    assert answers(network, contexts, 5, ends, temperature=1.0, top_p=1e-6) == answers(network, contexts, 5, ends)


def test_samples_follow_the_softmax(network: object) -> None:
    """First tokens of one context under 600 seeds against the model's own probabilities."""
    context = tiny.rows(2, 12)[1]
    with torch.inference_mode():
        logits = network(torch.tensor([context])).logits[0, -1]  # type: ignore[operator]
    expected = (logits / 0.7).softmax(0)
    ends = frozenset({319})
    drawn = torch.zeros_like(expected)
    for seed in range(600):
        drawn[answers(network, [context], 1, ends, temperature=0.7, seed=seed, max_new_tokens=1)[0].answer_ids[0]] += 1
    top = expected.topk(8).indices
    error = (drawn[top] / 600 - expected[top]).abs()
    assert (error < 4 * (expected[top] * (1 - expected[top]) / 600).sqrt() + 1e-3).all()


def test_a_prompt_beyond_the_context_is_refused(network: object) -> None:
    refused, answered = answers(network, [[5] * 505, [5] * 5], 1, frozenset({319}))
    assert isinstance(refused, Refusal)
    assert "context of 512" in refused.reason
    assert isinstance(answered, Answer)
