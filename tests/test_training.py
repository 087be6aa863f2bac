"""The optimisation loop on a tiny world: a random Llama, its greedy answers and their hidden states."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eaglet import draft_vocab, training, ttt
from eaglet.acceptance import greedy
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter, DrafterConfig
from eaglet.errors import EagletError
from eaglet.training import StepRecord, TrainSettings

torch.set_num_threads(1)  # tiny matrices: a second thread only waits

V, H, STEPS, LAYERS = 64, 32, 3, [0, 1, 2]
PROMPT, ANSWER = 4, 28

SETTINGS = TrainSettings(
    ttt_steps=STEPS,
    epochs=300,
    batch_documents=8,
    learning_rate=1e-2,
    warmup_ratio=0.05,
    loss_decay=0.8,
    grad_clip=0.5,
    out_of_vocab="mask",
    head_init="target",
    seed=0,
)


@dataclass
class Tiny:
    """A document whose states lie in memory; counts how often they are read."""

    sample: str
    input_ids: Tensor
    span_ids: Tensor
    aux: Tensor
    final: Tensor
    reads: int = 0

    def states(self) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return self.aux, self.final


def target_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= 3  # a target that is sure of its tokens
    return model


def prompt(number: int) -> list[int]:
    return torch.randint(V, (PROMPT,), generator=torch.Generator().manual_seed(number)).tolist()


def document(model: Any, number: int) -> Tiny:
    """A greedy answer with its states by `output_hidden_states`: layer k's output is hidden_states[k + 1]."""
    ids = prompt(number) + greedy(model, prompt(number), ANSWER, set())
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return Tiny(
        sample=f"sample-{number}",
        input_ids=torch.tensor(ids),
        span_ids=torch.tensor([0] * PROMPT + [1] * ANSWER),
        aux=torch.cat([states[layer + 1][0] for layer in LAYERS], -1),
        final=states[-1][0],
    )


def vocabulary(documents: list[Tiny], size: int = 48) -> DraftVocabulary:
    answers = torch.cat([one.input_ids[PROMPT:] for one in documents])
    return draft_vocab.choose(draft_vocab.count(answers, V), size, set())


def new_drafter(model: Any, vocab: DraftVocabulary, seed: int = 0) -> Drafter:
    config = DrafterConfig.from_target(model.config, len(vocab.d2t))
    return Drafter(config, model.get_input_embeddings().weight.detach(), seed)


@dataclass
class World:
    """The target, eight documents to train on, eight others, and a drafter that has learnt the first."""

    model: Any
    documents: list[Tiny]
    others: list[Tiny]
    vocab: DraftVocabulary
    head: Tensor
    trained: Drafter
    records: list[StepRecord]


_WORLDS: list[World] = []


def world() -> World:
    """Made once, for the tests of acceptance too."""
    if not _WORLDS:
        model = target_model()
        documents = [document(model, number) for number in range(8)]
        others = [document(model, number) for number in range(100, 108)]
        vocab = vocabulary(documents, V)
        head = model.get_output_embeddings().weight.detach()
        drafter = new_drafter(model, vocab)
        records = training.train(
            drafter, documents, others, head, vocab, settings=SETTINGS, on_step=lambda record: None
        )
        _WORLDS.append(World(model, documents, others, vocab, head, drafter, records))
    return _WORLDS[0]


def test_a_tiny_set_is_learnt() -> None:
    w = world()
    measured = training.evaluate(w.trained, w.documents, w.head, w.vocab, SETTINGS)
    assert measured["rows"] == [8 * (ANSWER - 1), 8 * (ANSWER - 2), 8 * (ANSWER - 3)]
    assert measured["simulated_acceptance_length"] >= 0.9 * (STEPS + 1)


def telling(number: int) -> Tiny:
    """Random tokens, which tell nothing, under states that tell: aux at t is x_{t+2}, x_{t+3}, x_{t+4}.

    Only a drafter that reads the features of the right row can be right, on unseen documents too.
    """
    ids = torch.randint(16, (24,), generator=torch.Generator().manual_seed(number))
    ahead = torch.eye(16, H)[torch.nn.functional.pad(ids, (0, 4))]
    return Tiny(
        sample=str(number),
        input_ids=ids,
        span_ids=torch.ones_like(ids),
        aux=4 * torch.cat([ahead[shift : shift + 24] for shift in (2, 3, 4)], -1),
        final=8 * ahead[1:25],
    )


class Shuffled(Tiny):
    """Its streams' rows in an order that is new at every read."""

    def states(self) -> tuple[Tensor, Tensor]:
        self.reads += 1
        generator = torch.Generator().manual_seed(1000 * int(self.sample) + self.reads)
        return self.aux[torch.randperm(len(self.aux), generator=generator)], self.final


def test_unseen_documents_are_drafted_from_the_right_states_alone() -> None:
    vocab = draft_vocab.choose(torch.ones(16, dtype=torch.int64), 16, set())
    config = DrafterConfig.from_target(LlamaConfig(**{**world().model.config.to_dict(), "vocab_size": 16}), 16)
    settings = replace(SETTINGS, epochs=40, learning_rate=1e-2, head_init="random")
    documents, unseen = (
        [telling(number) for number in range(24)],
        [telling(number) for number in range(100, 108)],
    )
    lengths = []
    for kind in (Tiny, Shuffled):
        drafter = Drafter(config, torch.randn(16, H, generator=torch.Generator().manual_seed(5)))
        given = [kind(**vars(one)) for one in documents]
        training.train(drafter, given, [], torch.eye(16, H), vocab, settings=settings, on_step=lambda record: None)
        measured = training.evaluate(drafter, unseen, torch.eye(16, H), vocab, settings)
        lengths.append(measured["simulated_acceptance_length"])
    assert lengths[0] > 2.5
    assert lengths[1] < 1.25  # chance is 1 + 1/16 + 1/256 + …


def test_records() -> None:
    w = world()
    assert [record.step for record in w.records] == list(range(300))
    assert [record.epoch for record in w.records] == list(range(1, 301))
    assert all(record.heldout is not None for record in w.records)
    again = training.evaluate(w.trained, w.others, w.head, w.vocab, SETTINGS)
    assert w.records[-1].heldout == again
    assert max(record.learning_rate for record in w.records) == SETTINGS.learning_rate
    assert all(len(record.acc) == STEPS and record.grad_norm > 0 for record in w.records)


def test_learning_rate_by_hand() -> None:
    settings = replace(SETTINGS, learning_rate=1.0, warmup_ratio=0.2)
    rates = [training.learning_rate(step, 10, settings) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert training.learning_rate(0, 10, replace(settings, warmup_ratio=0.0)) == 1.0


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_micro_batches_do_not_change_the_training(mode: ttt.OutOfVocab) -> None:
    """Documents of several lengths and a small draft vocabulary; a step of one batch is a step of four."""
    w = world()
    vocab = vocabulary(w.documents, 20)
    cut = [
        replace(one, **{name: getattr(one, name)[:length] for name in ("input_ids", "span_ids", "aux", "final")})
        for one, length in zip(w.documents, (32, 9, 20, 31, 6, 5, 12, 32), strict=True)
    ]
    trained = []
    for tokens in (10**6, 64, 1):
        settings = replace(
            SETTINGS,
            epochs=2,
            batch_documents=8,
            micro_batch_tokens=tokens,
            out_of_vocab=mode,
            head_init="random",
        )
        drafter = new_drafter(w.model, vocab).double()
        records = training.train(
            drafter, cut, [], w.head.double(), vocab, settings=settings, on_step=lambda record: None
        )
        trained.append((records, list(drafter.parameters())))
    for records, parameters in trained[1:]:
        for one, two in zip(records, trained[0][0], strict=True):
            assert one.loss == pytest.approx(two.loss)
            assert one.acc == two.acc
        for left, right in zip(parameters, trained[0][1], strict=True):
            torch.testing.assert_close(left, right)


def test_micro_batches_are_bounded_and_of_similar_length() -> None:
    lengths = [30, 10, 11, 29, 10, 90]
    prepared = [
        training._Prepared(
            Tiny(
                str(n),
                torch.zeros(n, dtype=torch.int64),
                torch.zeros(n, dtype=torch.int64),
                *torch.zeros(2, n, 1),
            ),
            torch.zeros(n, dtype=torch.int64),
            torch.zeros(1),
            torch.zeros(1),
        )
        for n in lengths
    ]
    shapes = [tuple(b.input_ids.shape) for b in training._micro_batches(prepared, 60, torch.device("cpu"))]
    assert shapes == [(3, 11), (2, 30), (1, 90)]


def test_the_run_follows_from_the_seed() -> None:
    w = world()
    settings = replace(SETTINGS, epochs=2, batch_documents=3)
    runs = []
    for seed in (0, 0, 1):
        records: list[StepRecord] = []
        training.train(
            new_drafter(w.model, w.vocab),
            w.documents,
            [],
            w.head,
            w.vocab,
            settings=replace(settings, seed=seed),
            on_step=records.append,
        )
        runs.append(records)
        assert [record.epoch for record in records] == [1, 1, 1, 2, 2, 2]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_head_init() -> None:
    w = world()
    nothing = replace(SETTINGS, epochs=1, learning_rate=0.0)
    for kind in ("target", "random"):
        drafter = new_drafter(w.model, w.vocab)
        before = drafter.lm_head.weight.detach().clone()
        training.train(
            drafter,
            w.documents,
            [],
            w.head,
            w.vocab,
            settings=replace(nothing, head_init=kind),  # type: ignore[arg-type]
            on_step=lambda record: None,
        )
        assert torch.equal(drafter.lm_head.weight, w.head[w.vocab.target_ids] if kind == "target" else before)


def test_documents_without_a_row_are_left_out() -> None:
    w = world()
    empty = replace(w.documents[0], span_ids=torch.zeros(PROMPT + ANSWER, dtype=torch.int64), sample="empty", reads=0)
    settings = replace(SETTINGS, epochs=1, batch_documents=1)
    records = training.train(
        new_drafter(w.model, w.vocab),
        [empty, w.documents[1]],
        [empty],
        w.head,
        w.vocab,
        settings=settings,
        on_step=lambda record: None,
    )
    assert len(records) == 1
    for documents in ([], [empty]):
        with pytest.raises(EagletError, match="no document"):
            training.train(
                new_drafter(w.model, w.vocab),
                documents,
                [],
                w.head,
                w.vocab,
                settings=settings,
                on_step=print,
            )
        with pytest.raises(EagletError, match="no document"):
            training.evaluate(w.trained, documents, w.head, w.vocab, settings)


def test_nan_names_the_sample() -> None:
    w = world()
    bad = copy.deepcopy(w.documents)
    bad[2].aux[5, 3] = float("nan")
    with pytest.raises(EagletError, match="sample-2"):
        training.train(new_drafter(w.model, w.vocab), bad, [], w.head, w.vocab, settings=SETTINGS, on_step=print)
    drafter = new_drafter(w.model, w.vocab)
    drafter.fc.weight.data[0, 0] = float("inf")
    with pytest.raises(EagletError, match=r"step 0: loss nan.*sample-"):
        training.train(drafter, w.documents, [], w.head, w.vocab, settings=SETTINGS, on_step=print)
