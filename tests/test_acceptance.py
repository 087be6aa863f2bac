"""Decoding with target and drafter together, against the target alone and against the training-time test."""

from typing import Any

import pytest
import torch
from test_training import LAYERS, STEPS, H, V, new_drafter, prompt, world
from torch import Tensor
from transformers import DynamicCache

from eaglet import acceptance, ttt
from eaglet.acceptance import Chain
from eaglet.draft_vocab import DraftVocabulary

CAPTURE = acceptance.capture_with_hooks(LAYERS)
NEW = 28


def decode(drafter: Any, number: int, vocab: DraftVocabulary | None = None, **changes: Any) -> Chain:
    w = world()
    settings = {"capture": CAPTURE, "steps": STEPS, "max_new_tokens": NEW, "eos_ids": frozenset()} | changes
    return acceptance.decode(w.model, drafter, vocab or w.vocab, prompt(number), **settings)


def test_hooks_give_what_output_hidden_states_gives() -> None:
    w = world()
    ids = torch.tensor(prompt(0))
    aux, logits = CAPTURE(w.model, ids, DynamicCache(config=w.model.config))
    with torch.no_grad():
        plain = w.model(ids[None], output_hidden_states=True)
    torch.testing.assert_close(aux, torch.cat([plain.hidden_states[layer + 1][0] for layer in LAYERS], -1))
    torch.testing.assert_close(logits, plain.logits[0])
    assert aux.shape == (len(ids), 3 * H)


@pytest.mark.parametrize("number", [0, 1, 2, 100, 101])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_answer_is_the_targets_own(number: int, steps: int) -> None:
    """Token for token, whatever the drafter proposes."""
    w = world()
    alone = acceptance.greedy(w.model, prompt(number), NEW, set())
    assert len(alone) == NEW
    for drafter in (w.trained, new_drafter(w.model, w.vocab)):
        chain = decode(drafter, number, steps=steps)
        assert chain.output_ids == alone
        assert 1 + sum(chain.accepted) == NEW
        assert all(1 <= count <= steps + 1 for count in chain.accepted)
        assert sum(chain.hits) >= sum(chain.accepted) - len(chain.accepted)
        assert chain.hits == sorted(chain.hits, reverse=True)
        assert chain.hits[0] <= len(chain.accepted)


def test_a_drafter_that_has_learnt_is_accepted() -> None:
    w = world()
    random = new_drafter(w.model, w.vocab)
    lengths = [
        acceptance.acceptance_length([decode(drafter, number) for number in range(8)])
        for drafter in (w.trained, random)
    ]
    assert lengths[0] >= 0.8 * (STEPS + 1)
    assert lengths[1] < 2


def test_a_draft_vocabulary_is_mapped_by_offsets() -> None:
    """Ids above a gap; the head's bias-free rows are those of the trained drafter."""
    w = world()
    t2d = torch.ones(V, dtype=torch.bool)
    t2d[[3, 10]] = False
    kept = t2d.nonzero().squeeze(1)
    small = DraftVocabulary(kept - torch.arange(len(kept)), t2d)
    drafter = new_drafter(w.model, small)
    state = w.trained.state_dict()
    drafter.load_state_dict(state | {"lm_head.weight": state["lm_head.weight"][kept]})
    chain = decode(drafter, 0, small)
    assert chain.output_ids == acceptance.greedy(w.model, prompt(0), NEW, set())
    assert acceptance.acceptance_length([chain]) > 1.5


def test_end_tokens_and_the_limit_cut_the_answer() -> None:
    w = world()
    alone = acceptance.greedy(w.model, prompt(0), NEW, set())
    for place in range(NEW):
        end = {alone[place]}
        wanted = alone[: alone.index(alone[place]) + 1]
        assert acceptance.greedy(w.model, prompt(0), NEW, end) == wanted
        chain = decode(w.trained, 0, eos_ids=end)
        assert chain.output_ids == wanted
        assert 1 + sum(chain.accepted) == len(wanted)
        limited = decode(w.trained, 0, max_new_tokens=place + 1)
        assert limited.output_ids == alone[: place + 1]
        assert 1 + sum(limited.accepted) == place + 1
    assert decode(w.trained, 0, max_new_tokens=1) == Chain(alone[:1], [], [0] * STEPS)


def test_cycles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that counts up by one, and three chains of drafts; 13 ends the answer."""
    w = world()
    chains = [[7, 8, 0], [0, 11, 12], [11, 12, 13]]  # two right, none right, all right
    monkeypatch.setattr(acceptance, "draft", lambda *args, **kwargs: (chains.pop(0), []))

    def counting(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(ids), 3 * H), torch.eye(V)[ids + 1]

    chain = acceptance.decode(
        w.model, w.trained, w.vocab, [4, 5], capture=counting, steps=3, max_new_tokens=20, eos_ids={13}
    )
    assert chain.output_ids == [6, 7, 8, 9, 10, 11, 12, 13]
    assert chain.accepted == [3, 1, 3]  # the last cycle's own token, 14, stands behind the end
    assert chain.hits == [2, 2, 1]


def test_acceptance_by_hand() -> None:
    assert acceptance._matching_prefix([4, 5, 6], [4, 5, 9, 7]) == 2
    assert acceptance._matching_prefix([4], [5, 6]) == 0
    assert acceptance._until_end([4, 5, 6], 9, {5}) == [4, 5]
    assert acceptance._until_end([4, 5, 6], 1, {5}) == [4]
    assert acceptance._until_end([4, 5, 6], 9, set()) == [4, 5, 6]
    chains = [Chain([1, 2, 3, 4], [1, 2], [1, 0]), Chain([1, 2, 3, 4], [3], [1, 1]), Chain([1], [], [0, 0])]
    assert acceptance.acceptance_length(chains) == 2.0
    assert acceptance.acceptance_length(chains[2:]) == 0.0


def test_decoding_is_what_training_unrolled() -> None:
    """The features of each drafted step are TTT's at the same row, when TTT is given the drafted tokens."""
    w = world()
    drafter = w.trained
    ids = w.others[0].input_ids.tolist()
    aux = w.others[0].aux
    for last in (5, 14, 22):
        features = drafter.fuse(aux[: last + 1])
        context = acceptance._extend(drafter, None, features[:3], ids[1:4])  # in two pieces, as when decoding
        context = acceptance._extend(drafter, context, features[3:], ids[4 : last + 2])
        drafted, served = acceptance.draft(drafter, w.vocab, features[-1:], ids[last + 1], context, steps=STEPS)
        taught = torch.tensor(ids[: last + 2] + drafted)
        padded = torch.cat([aux[: last + 1], torch.zeros(len(taught) - last - 1, 3 * H)])
        layout = ttt.Layout.of([taught], [torch.arange(len(taught)) == last], STEPS)
        for one, two in zip(served, ttt.forward(drafter, layout, padded), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        logits: Tensor = ttt.logits(drafter, taught, padded, STEPS)
        assert w.vocab.target_ids[logits[:, last].argmax(-1)].tolist() == drafted


@pytest.mark.parametrize("trained", [True, False])
def test_teacher_forced_rows_give_the_same_chains(trained: bool) -> None:
    """Tokens and cycles of decoded greedy answers, from one pass over them."""
    w = world()
    drafter = w.trained if trained else new_drafter(w.model, w.vocab)
    head = w.model.lm_head.weight.detach()
    documents, decoded = [], []
    for number in (0, 1, 100, 101):
        decoded.append(decode(drafter, number))
        given, written = prompt(number), decoded[-1].output_ids
        ids = torch.tensor(given + written)
        with torch.no_grad():
            states = w.model(ids[None], output_hidden_states=True).hidden_states
        final = states[-1][0]
        spans = torch.tensor([0] * len(given) + [1] * len(written))
        streams = [states[layer + 1][0] for layer in LAYERS]
        documents.append(ttt.Document(ids, spans, ttt.teacher_choice(final, head), streams, final))
    batch = ttt.pack(documents, w.vocab.t2d, steps=STEPS, out_of_vocab="mask")
    found = ttt.sums(drafter, batch, head[w.vocab.target_ids], w.vocab, torch.ones(STEPS))
    accepted = [count for chain in decoded for count in chain.accepted]
    assert ttt.chain(found.right, batch.layout.segments) == (sum(accepted), len(accepted))
