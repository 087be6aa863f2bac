"""The optimisation loop on a tiny world: a random Llama, its greedy answers and their hidden states."""

import contextlib
import copy
import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from eaglet.loader import Example
from eaglet.params import TrainParams
from eaglet.training import Record, Run

torch.set_num_threads(1)  # tiny matrices: a second thread only waits

V, H, STEPS, LAYERS = 64, 32, 3, [0, 1, 2]
PROMPT, ANSWER = 4, 28

PARAMS = TrainParams(
    ttt_steps=STEPS,
    epochs=300,
    batch_tokens=8 * (PROMPT + ANSWER),
    micro_batch_tokens=10**6,
    optimizer="adamw",
    learning_rate=1e-2,
    weight_decay=0.0,
    warmup_ratio=0.05,
    loss_decay=0.8,
    grad_clip=0.5,
    sharpen=0.0,
    dropout=0.0,
    average=0.0,
    out_of_vocab="mask",
    head_init="target",
    validation=0.0,
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

    def read(self) -> tuple[Sequence[Tensor], Tensor]:
        self.reads += 1
        return self.aux.chunk(3, 1), self.final

    def example(self, head: Tensor, vocab: DraftVocabulary, params: TrainParams) -> Example:
        choice = ttt.teacher_choice(self.final, head)
        return Example.of(
            self.sample,
            self.span_ids,
            choice,
            lambda: ttt.Document(self.input_ids, self.span_ids, choice, *self.read()),
            t2d=vocab.t2d,
            steps=params.ttt_steps,
            out_of_vocab=params.out_of_vocab,
        )


def new_run(
    drafter: Drafter,
    documents: Sequence[Tiny],
    head: Tensor,
    vocab: DraftVocabulary,
    params: TrainParams = PARAMS,
    validation: Sequence[Tiny] = (),
    folder: Path | None = None,
) -> Run:
    """A run over documents in memory."""
    given, checked = (
        [one.example(head.float(), vocab, params) for one in some if one.span_ids.any()]
        for some in (documents, validation)
    )
    where = folder or Path(tempfile.mkdtemp(prefix="eaglet-run-"))
    return Run(drafter, given, checked, head, vocab, params, where, dtype=drafter.fc.weight.dtype)


def train(*args: Any, **kwargs: Any) -> list[Record]:
    """A run to its end; its records."""
    run = new_run(*args, **kwargs)
    run.train(lambda record: None)
    return run.records


def evaluate(
    drafter: Drafter, documents: Sequence[Tiny], head: Tensor, vocab: DraftVocabulary, params: TrainParams = PARAMS
) -> dict[str, Any]:
    """A drafter's measures on documents in memory."""
    scorer = training.Scorer(drafter, head, vocab, params, torch.float32)
    return scorer.evaluate([one.example(head, vocab, params) for one in documents])


def results(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What follows from the data, without what is this machine's."""
    machine = ("tokens_per_second", "waited", "flops")
    return [{name: value for name, value in asdict(one).items() if name not in machine} for one in records]


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
    records: list[Record]


_WORLDS: list[World] = []


def world(learnt: bool = True) -> World:
    """Made once, for the tests of acceptance too."""
    if not _WORLDS:
        model = target_model()
        documents = [document(model, number) for number in range(8)]
        others = [document(model, number) for number in range(100, 108)]
        vocab = vocabulary(documents, V)
        head = model.get_output_embeddings().weight.detach()
        drafter = new_drafter(model, vocab)
        records = train(drafter, documents, head, vocab) if learnt else []
        _WORLDS.append(World(model, documents, others, vocab, head, drafter, records))
    return _WORLDS[0]


def test_a_tiny_set_is_learnt() -> None:
    w = world()
    measured = evaluate(w.trained, w.documents, w.head, w.vocab)
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

    def read(self) -> tuple[Sequence[Tensor], Tensor]:
        self.reads += 1
        generator = torch.Generator().manual_seed(1000 * int(self.sample) + self.reads)
        return self.aux[torch.randperm(len(self.aux), generator=generator)].chunk(3, 1), self.final


def test_unseen_documents_are_drafted_from_the_right_states_alone() -> None:
    vocab = draft_vocab.choose(torch.ones(16, dtype=torch.int64), 16, set())
    config = DrafterConfig.from_target(LlamaConfig(**{**world().model.config.to_dict(), "vocab_size": 16}), 16)
    params = replace(PARAMS, epochs=40, batch_tokens=8 * 24, head_init="random")
    documents, unseen = (
        [telling(number) for number in range(24)],
        [telling(number) for number in range(100, 108)],
    )
    lengths = []
    for kind in (Tiny, Shuffled):
        drafter = Drafter(config, torch.randn(16, H, generator=torch.Generator().manual_seed(5)))
        given = [kind(**vars(one)) for one in documents]
        run = new_run(drafter, given, torch.eye(16, H), vocab, params, unseen)
        run.train(lambda record: None)
        measured = run.records[-1].validation
        assert measured is not None
        lengths.append(measured["simulated_acceptance_length"])
    assert lengths[0] > 2.5
    assert lengths[1] < 1.25  # chance is 1 + 1/16 + 1/256 + …


def test_records() -> None:
    w = world()
    assert [record.step for record in w.records] == list(range(300))
    assert [record.epoch for record in w.records] == list(range(1, 301))
    assert all(record.tokens == 8 * (PROMPT + ANSWER) for record in w.records)
    assert max(record.learning_rate for record in w.records) == PARAMS.learning_rate
    assert all(len(record.acc) == STEPS and record.grad_norm > 0 for record in w.records)
    assert all(0 <= record.waited <= 1 and record.flops > 0 for record in w.records)


def test_the_best_epoch_is_kept() -> None:
    """A rate that rises until it spoils what was learnt before: the last epoch is not the best."""
    w = world()
    params = replace(PARAMS, epochs=12, batch_tokens=64, learning_rate=0.5, warmup_ratio=1.0)
    params = replace(params, head_init="random")
    run = new_run(copy.deepcopy(w.trained), w.documents, w.head, w.vocab, params, w.documents)
    run.train(lambda record: None)
    scores = [one.validation["simulated_acceptance_length"] for one in run.records if one.validation]
    assert len(scores) == 12 and max(scores) > scores[-1]
    assert run.best == (max(scores), scores.index(max(scores)) + 1)
    kept = evaluate(run.drafter, w.documents, w.head, w.vocab)
    assert kept["simulated_acceptance_length"] == max(scores)


def test_the_average_lags_behind_and_is_what_is_kept() -> None:
    w = world()
    plain, averaged = new_drafter(w.model, w.vocab), new_drafter(w.model, w.vocab)
    train(plain, w.documents, w.head, w.vocab, replace(PARAMS, epochs=3))
    run = new_run(averaged, w.documents, w.head, w.vocab, replace(PARAMS, epochs=3, average=0.9))
    start = averaged.fc.weight.detach().clone()
    weights = []
    run.train(lambda record: weights.append(averaged.fc.weight.detach().clone()))
    wanted = start
    for step, after in enumerate(weights):
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * after
    torch.testing.assert_close(averaged.fc.weight.detach(), wanted)
    assert torch.equal(weights[-1], plain.fc.weight), "the weights that learn are those of a run without an average"


def test_learning_rate_by_hand() -> None:
    params = replace(PARAMS, learning_rate=1.0, warmup_ratio=0.2)
    rates = [training.learning_rate(step, 10, params) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert training.learning_rate(0, 10, replace(params, warmup_ratio=0.0)) == 1.0


def cut(documents: Sequence[Tiny]) -> list[Tiny]:
    """Documents of several lengths."""
    return [
        replace(one, **{name: getattr(one, name)[:length] for name in ("input_ids", "span_ids", "aux", "final")})
        for one, length in zip(documents, (32, 9, 20, 31, 7, 8, 12, 32), strict=True)
    ]


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_micro_batches_do_not_change_the_training(mode: ttt.OutOfVocab) -> None:
    """Documents of several lengths and a small draft vocabulary; a step of one batch is a step of eight."""
    w = world()
    vocab = vocabulary(w.documents, 20)
    trained = []
    for tokens in (10**6, 64, 1):
        params = replace(
            PARAMS, epochs=2, batch_tokens=100, micro_batch_tokens=tokens, out_of_vocab=mode, head_init="random"
        )
        drafter = new_drafter(w.model, vocab).double()
        trained.append((train(drafter, cut(w.documents), w.head.double(), vocab, params), list(drafter.parameters())))
    for records, parameters in trained[1:]:
        for one, two in zip(records, trained[0][0], strict=True):
            assert one.loss == pytest.approx(two.loss)
            assert one.acc == two.acc
        for left, right in zip(parameters, trained[0][1], strict=True):
            torch.testing.assert_close(left, right)


def train_as_rank(rank: int, ranks: int, folder: str) -> None:
    """One process of several: trains, and leaves its records and weights."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    w = world(learnt=False)
    params = replace(PARAMS, epochs=3, batch_tokens=100, micro_batch_tokens=40, average=0.5)
    drafter = new_drafter(w.model, w.vocab)
    run = new_run(drafter, cut(w.documents), w.head, w.vocab, params, w.others, Path(folder) / "run")
    run.train(lambda record: None)
    torch.save([results(run.records), run.best, drafter.state_dict()], f"{folder}/rank-{ranks}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_make_the_numbers_of_one(tmp_path: Path) -> None:
    """By gloo; the same global batches, and documents of several lengths, so that the shares differ."""
    spawned = multiprocessing.get_context("spawn")
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        processes = [spawned.Process(target=train_as_rank, args=(rank, ranks, str(folder))) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        found[ranks] = [torch.load(folder / f"rank-{ranks}-{rank}.pt", weights_only=True) for rank in range(ranks)]
    (alone,), both = found[1], found[2]
    assert len(alone[0]) == len(both[0][0]) == 6
    for name, weight in both[0][2].items():
        assert torch.equal(weight, both[1][2][name]), "ranks that drift apart"
        torch.testing.assert_close(weight, alone[2][name], rtol=1e-4, atol=1e-5)
    for one, two in zip(alone[0], both[0][0], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["acc"] == two["acc"] and one["tokens"] == two["tokens"]
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    assert both[0][1] == both[1][1] == alone[1]


def resumable(folder: Path) -> Run:
    """A run whose every part matters: two optimisers, an average, dropout, validation, several epochs."""
    w = world(learnt=False)
    params = replace(
        PARAMS,
        epochs=3,
        batch_tokens=64,
        micro_batch_tokens=40,
        optimizer="muon",
        weight_decay=0.1,
        dropout=0.1,
        average=0.9,
    )
    return new_run(new_drafter(w.model, w.vocab), cut(w.documents), w.head, w.vocab, params, w.others, folder)


def die_at(step: int, folder: str, save_every: float) -> None:
    """Train until a step, then be killed."""
    torch.set_num_threads(1)
    training._SAVE_EVERY = save_every

    def kill(record: Record) -> None:
        if record.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    resumable(Path(folder)).train(kill)


@pytest.mark.parametrize("save_every", [0.0, 1e9])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, save_every: float) -> None:
    """Killed twice, in the middle of epochs; with a checkpoint a step, and with those of the epochs alone."""
    spawned = multiprocessing.get_context("spawn")
    for step in (1, 5):
        process = spawned.Process(target=die_at, args=(step, str(tmp_path / "killed"), save_every))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    again, whole = resumable(tmp_path / "killed"), resumable(tmp_path / "whole")
    again.train(lambda record: None)
    whole.train(lambda record: None)
    assert whole.steps == 9
    assert results(again.records) == results(whole.records)
    assert again.best == whole.best
    for one, two in zip(again.drafter.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.equal(one, two)
    lines = (tmp_path / "killed/records.jsonl").read_text().splitlines()
    assert len(lines) == 9, "no step stands there twice"
    assert len(list((tmp_path / "killed").glob("step-*"))) == 2


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    whole = resumable(tmp_path)
    whole.train(lambda record: None)
    last = max(tmp_path.glob("step-*"))
    last.write_bytes(last.read_bytes()[:1000])
    again = resumable(tmp_path)
    shown: list[Record] = []
    again.train(shown.append)
    assert results(shown) == results(whole.records)
    for one, two in zip(again.drafter.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.equal(one, two)


def test_states_are_read_once_an_epoch_and_not_before() -> None:
    w = world()
    documents = [replace(one, reads=0) for one in w.documents]
    run = new_run(new_drafter(w.model, w.vocab), documents, w.head, w.vocab, replace(PARAMS, epochs=2, batch_tokens=64))
    assert all(one.reads == 0 for one in documents)
    run.train(lambda record: None)
    assert all(one.reads == 2 for one in documents)


def test_the_run_follows_from_the_seed() -> None:
    w = world()
    params = replace(PARAMS, epochs=2, batch_tokens=96)
    runs = []
    for seed in (0, 0, 1):
        records = train(new_drafter(w.model, w.vocab), w.documents, w.head, w.vocab, replace(params, seed=seed))
        assert [record.epoch for record in records] == [1, 1, 1, 2, 2, 2]
        runs.append(results(records))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_head_init() -> None:
    w = world()
    nothing = replace(PARAMS, epochs=1, learning_rate=0.0)
    for kind in ("target", "random"):
        drafter = new_drafter(w.model, w.vocab)
        before = drafter.lm_head.weight.detach().clone()
        train(drafter, w.documents, w.head, w.vocab, replace(nothing, head_init=kind))  # type: ignore[arg-type]
        assert torch.equal(drafter.lm_head.weight, w.head[w.vocab.target_ids] if kind == "target" else before)


def test_muon_is_for_the_layers_matrices() -> None:
    w = world()
    drafter = new_drafter(w.model, w.vocab)
    (adamw, _), (muon, _) = training.optimizers(drafter, replace(PARAMS, optimizer="muon", weight_decay=0.1))
    names = {id(p): name for name, p in drafter.named_parameters()}
    inner = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert inner == {name for name, p in drafter.named_parameters() if p.dim() == 2} - {"lm_head.weight"}
    decayed = {names[id(p)]: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decayed["lm_head.weight"] == 0.1 and decayed["norm.weight"] == 0.0
    assert set(decayed) | inner == set(names.values()) and not set(decayed) & inner
    records = train(drafter, w.documents, w.head, w.vocab, replace(PARAMS, epochs=60, optimizer="muon"))
    assert records[-1].loss < 0.7 * records[0].loss


def test_too_few_rows_for_a_batch() -> None:
    w = world()
    with pytest.raises(EagletError, match=r"the 8 rows .* 256 tokens, fewer .* train.batch_tokens 257"):
        new_run(w.trained, w.documents, w.head, w.vocab, replace(PARAMS, batch_tokens=257))
    with pytest.raises(EagletError, match="two answer tokens"):
        evaluate(w.trained, [], w.head, w.vocab)


def test_a_loss_that_is_not_finite_names_the_rows_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    w = world()
    params = replace(PARAMS, epochs=2, batch_tokens=128, head_init="random")
    run = new_run(new_drafter(w.model, w.vocab), w.documents, w.head, w.vocab, params, folder=tmp_path)
    spoilt = copy.deepcopy(w.documents)
    place = 2  # in the second epoch, on a row that is read then
    second = [index for epoch, batch in run._plan if epoch == 2 for index in batch]

    def spoil(record: Record) -> None:
        if record.step == 1:
            spoilt[second[-1]].aux[5, 3] = float("nan")

    run = new_run(new_drafter(w.model, w.vocab), spoilt, w.head, w.vocab, params, folder=tmp_path)
    with (
        contextlib.ExitStack() as patched,
        pytest.raises(EagletError, match=rf"step 3 has loss nan.*sample-{second[-1]}.*kept in") as caught,
    ):
        patched.enter_context(pytest.MonkeyPatch.context()).setattr("eaglet.loader._AHEAD", 1)
        run.train(spoil)
    assert "\n" not in str(caught.value)
    assert [one.name for one in tmp_path.glob("step-*")] == [f"step-{place:09d}.safetensors"]
    assert all(torch.isfinite(p).all() for p in run.drafter.parameters())


def test_bfloat16_learns_with_float32_masters() -> None:
    w = world()
    drafter = new_drafter(w.model, w.vocab)
    run = new_run(drafter, w.documents, w.head, w.vocab, replace(PARAMS, epochs=100))
    half = Run(drafter, run.examples, [], w.head, w.vocab, run.params, run.folder, dtype=torch.bfloat16)
    half.train(lambda record: None)
    assert drafter.fc.weight.dtype == torch.float32
    assert half.records[-1].loss < 0.5 * half.records[0].loss
    assert half.records[-1].loss == pytest.approx(w.records[99].loss, rel=0.5)
