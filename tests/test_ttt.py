"""The training-time test: mask, unrolled attention, loss and metrics, by hand or against dense forms."""

import math

import pytest
import torch
from torch import Tensor

from eaglet import draft_vocab, ttt
from eaglet.draft_vocab import DraftVocabulary
from eaglet.drafter import Drafter, DrafterConfig

torch.set_num_threads(1)  # tiny matrices: a second thread only waits

V, VD, H = 12, 5, 8
VOCAB = DraftVocabulary(d2t=torch.tensor([1, 1, 3, 4, 6]), t2d=torch.zeros(V, dtype=torch.bool))
VOCAB.t2d[[1, 2, 5, 7, 10]] = True  # the draft vocabulary: target ids 1, 2, 5, 7, 10


def make(dtype: torch.dtype = torch.float32) -> Drafter:
    config = DrafterConfig(
        hidden_size=H,
        intermediate_size=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-6,
        vocab_size=V,
        draft_vocab_size=VD,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return Drafter(config, torch.randn(V, H, generator=torch.Generator().manual_seed(1))).to(dtype)


def make_batch(span_ids: list[list[int]], seed: int = 0, dtype: torch.dtype = torch.float32) -> ttt.Batch:
    """Random documents; the target's choices are those of a random head (see `head`)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(span_ids), len(span_ids[0]))
    final = torch.randn(*shape, H, generator=generator).to(dtype)
    return ttt.Batch(
        input_ids=torch.randint(V, shape, generator=generator),
        span_ids=torch.tensor(span_ids),
        aux=torch.randn(*shape, 3 * H, generator=generator).to(dtype),
        final=final,
        choice=(final @ head(dtype).T).argmax(-1),
    )


def head(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(2)).to(dtype)


def rows_of(span_ids: list[int], steps: int) -> list[list[int]]:
    valid = ttt.valid_rows(torch.tensor([span_ids]), steps)[0]
    return [step.nonzero().squeeze(1).tolist() for step in valid]


@pytest.mark.parametrize(
    ("span_ids", "rows"),
    [
        # The answer is positions 2 … 5: the first row is 1 = T_start - 1, whose next token begins the answer.
        ([0, 0, 1, 1, 1, 1, 0], [[1, 2, 3], [1, 2], [1]]),
        # At the end of the document.
        ([0, 1, 1, 1], [[0, 1], [0], []]),
        # Two answers that touch are never joined.
        ([0, 1, 1, 1, 2, 2, 2], [[0, 1, 3, 4], [0, 3], []]),
        # One token has no token behind it to learn.
        ([0, 0, 1, 0], [[], [], []]),
        ([0, 1, 1, 0], [[0], [], []]),
        # An answer that starts the document: its first token has no row before it.
        ([1, 1, 1], [[0], [], []]),
        ([0, 0, 0], [[], [], []]),
        # Two answers apart; the gap counts for neither.
        ([0, 1, 1, 0, 2, 2, 2], [[0, 3, 4], [3], []]),
    ],
)
def test_serving_exact_mask(span_ids: list[int], rows: list[list[int]]) -> None:
    assert rows_of(span_ids, 3) == rows


def test_mask_is_its_definition() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        span_ids = torch.randint(0, 3, (1, 9)).sort().values.roll(2)
        for k, rows in enumerate(rows_of(span_ids[0].tolist(), 4)):
            for t in range(9):
                wanted = span_ids[0, t + 1 : t + 3 + k].tolist()
                assert (t in rows) == (len(wanted) == k + 2 and wanted[0] > 0 and len(set(wanted)) == 1)


def dense_logits(drafter: Drafter, input_ids: Tensor, aux: Tensor, steps: int) -> Tensor:
    """The same unrolling with whole [T, K·T] masks and none of the module's code but its weights and RoPE."""
    length, layer, config = len(input_ids), drafter.midlayer, drafter.config
    ids = torch.cat([input_ids, torch.zeros(steps, dtype=torch.int64)])
    causal, diagonal = torch.ones(length, length).tril().bool(), torch.eye(length).bool()
    g = aux @ drafter.fc.weight.T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    for k in range(steps):
        embedded = layer.input_layernorm(drafter.embedding[ids[1 + k : 1 + k + length]])
        u = torch.cat([embedded, layer.hidden_norm(g)], -1)
        positions = (torch.arange(length) + k)[None]

        def heads(weight: Tensor, count: int, u: Tensor = u) -> Tensor:
            return (u @ weight.T).view(1, length, count, config.head_dim).transpose(1, 2)

        q = drafter._rotate(heads(layer.self_attn.q_proj.weight, 4), positions)
        keys.append(drafter._rotate(heads(layer.self_attn.k_proj.weight, 2), positions))
        values.append(heads(layer.self_attn.v_proj.weight, 2))
        mask = torch.cat([causal, *[diagonal] * k], 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, enable_gqa=True
        )
        y = g + mixed.transpose(1, 2).reshape(length, -1) @ layer.self_attn.o_proj.weight.T
        g = y + layer.mlp(layer.post_attention_layernorm(y))
        outputs.append(drafter.norm(g) @ drafter.lm_head.weight.T)
    return torch.stack(outputs)


def test_logits_and_gradients_are_those_of_the_dense_mask() -> None:
    drafter = make(torch.float64)
    batch = make_batch([[1] * 9], dtype=torch.float64)
    weight = torch.randn(4, 9, VD, dtype=torch.float64)
    found = {}
    for name, function in (("sparse", ttt.logits), ("dense", dense_logits)):
        values = function(drafter, batch.input_ids[0], batch.aux[0], 4)
        gradients = torch.autograd.grad((values * weight).sum(), list(drafter.parameters()))
        found[name] = [values, *gradients]
    for sparse, dense in zip(found["sparse"], found["dense"], strict=True):
        torch.testing.assert_close(sparse, dense)


def direct_sums(drafter: Drafter, batch: ttt.Batch, steps: int, mode: ttt.OutOfVocab) -> ttt.Sums:
    """Row by row in Python, from the logits of all rows and the teacher's whole softmax."""
    losses, loss_rows, rows, hits = (torch.zeros(steps) for _ in range(4))
    for b in range(len(batch.input_ids)):
        draft = ttt.logits(drafter, batch.input_ids[b], batch.aux[b], steps)
        target = batch.final[b] @ head(batch.final.dtype).T  # [T, V]
        for k in range(steps):
            for t in ttt.valid_rows(batch.span_ids, steps)[b, k].nonzero().squeeze(1).tolist():
                best = int(target[t + 1 + k].argmax())
                rows[k] += 1
                hits[k] += int([1, 2, 5, 7, 10][int(draft[k, t].argmax())] == best)
                if mode == "renormalise" or best in (1, 2, 5, 7, 10):
                    p = target[t + 1 + k].softmax(-1)[VOCAB.t2d]
                    losses[k] -= float((p / p.sum() * draft[k, t].log_softmax(-1)).sum().detach())
                    loss_rows[k] += 1
    return ttt.Sums(losses, loss_rows.long(), rows.long(), hits.long())


SPANS = [[0, 1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 2, 2, 2, 2, 2, 2], [0] * 10]


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_sums_are_those_of_single_rows(mode: ttt.OutOfVocab) -> None:
    drafter, batch = make(), make_batch(SPANS)
    found = ttt.sums(drafter, batch, head()[VOCAB.t2d], VOCAB, steps=3, out_of_vocab=mode)
    wanted = direct_sums(drafter, batch, 3, mode)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert torch.equal(found.loss_rows, wanted.loss_rows)
    assert torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.hits, wanted.hits)
    assert found.rows.tolist() == [4 + 1 + 1 + 5, 3 + 1 + 4, 2 + 3]
    if mode == "mask":
        assert found.loss_rows[0] < found.rows[0]  # the choices hold some out of vocabulary


def test_masked_and_renormalised_by_hand() -> None:
    """One answer of three tokens: two rows at step 0, the second's teacher choice out of vocabulary."""
    drafter = make()
    batch = make_batch([[0, 1, 1, 1]])
    draft_head = torch.zeros(VD, H)
    draft_head[2, 0] = 1.0  # the teacher's logit of target id 5 is final[..., 0], the others' are 0
    batch.final[0, :, 0] = math.log(6)  # p = 6/10 for id 5, 1/10 for each of the other four
    batch.choice[0] = torch.tensor([0, 5, 3, 0])  # id 3 is not in the draft vocabulary
    drafter.lm_head.weight.data.zero_()  # q is uniform, so −Σ p log q = log 5 whatever p is
    for mode, rows in (("mask", 1), ("renormalise", 2)):
        found = ttt.sums(drafter, batch, draft_head, VOCAB, steps=2, out_of_vocab=mode)
        assert found.loss_rows.tolist() == [rows, 0 if mode == "mask" else 1]
        assert found.rows.tolist() == [2, 1]  # the denominators of acc do not depend on the mode
        assert found.hits.tolist() == [0, 0]
        torch.testing.assert_close(found.loss[0], torch.tensor(rows * math.log(5)))
    # Not uniform: let q be p itself, then the loss is p's entropy.
    entropy = -(0.6 * math.log(0.6) + 4 * 0.1 * math.log(0.1))
    drafter.logits = lambda x: torch.tensor([0, 0, math.log(6), 0, 0]).expand(len(x), VD)  # type: ignore[method-assign]
    found = ttt.sums(drafter, batch, draft_head, VOCAB, steps=1, out_of_vocab="mask")
    torch.testing.assert_close(found.loss[0], torch.tensor(entropy))
    assert found.hits.tolist() == [1]  # draft id 2 is target id 2 + d2t[2] = 5
    found = ttt.sums(drafter, batch, draft_head, VOCAB, steps=1, out_of_vocab="renormalise")
    assert found.hits.tolist() == [1]  # of two rows: the other one is a miss


def test_draft_ids_are_mapped_by_offsets() -> None:
    """d2t read as absolute ids would make draft id 2 the target id 3."""
    drafter, batch = make(), make_batch([[1, 1, 1]])
    drafter.logits = lambda x: torch.eye(VD)[2].expand(len(x), VD)  # type: ignore[method-assign]
    for choice, hits in ((5, 1), (3, 0), (2, 0)):
        batch.choice[:] = choice
        found = ttt.sums(drafter, batch, head()[VOCAB.t2d], VOCAB, steps=1, out_of_vocab="renormalise")
        assert found.hits.tolist() == [hits]


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_batch_is_its_documents_under_one_denominator(mode: ttt.OutOfVocab) -> None:
    drafter, batch = make(torch.float64), make_batch(SPANS, dtype=torch.float64)
    draft_head = head(torch.float64)[VOCAB.t2d]

    def part(documents: slice) -> ttt.Sums:
        fields = {name: value[documents] for name, value in vars(batch).items()}
        return ttt.sums(drafter, ttt.Batch(**fields), draft_head, VOCAB, steps=3, out_of_vocab=mode)

    whole = part(slice(0, 3))
    parts = [part(slice(0, 1)), part(slice(1, 2)), part(slice(2, 3))]
    assert parts[2].rows.tolist() == [0, 0, 0]
    assert parts[2].loss.tolist() == [0, 0, 0]
    added = parts[0] + parts[1] + parts[2]
    rows = added.loss_rows
    assert torch.equal(rows, whole.loss_rows)
    split = sum(ttt.loss(one.loss, rows, 0.8) for one in parts)
    torch.testing.assert_close(split, ttt.loss(whole.loss, rows, 0.8))
    one = torch.autograd.grad(ttt.loss(whole.loss, rows, 0.8), list(drafter.parameters()))
    two = torch.autograd.grad(split, list(drafter.parameters()))
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(left, right)


def test_loss_by_hand() -> None:
    summed, rows = torch.tensor([6.0, 4.0, 9.0]), torch.tensor([3, 2, 0])
    assert float(ttt.loss(summed[:2], rows[:2], 0.8)) == pytest.approx(2 + 0.8 * 2)
    assert float(ttt.loss(torch.tensor([6.0, 4.0, 0.0]), rows, 0.5)) == pytest.approx(2 + 0.5 * 2)


def test_padding_never_changes_values() -> None:
    drafter = make()
    short = make_batch([[0, 1, 1, 1, 1, 1, 1]])
    padded = ttt.Batch(
        *(torch.nn.functional.pad(x, (0, 0, 0, 5) if x.dim() == 3 else (0, 5)) for x in vars(short).values())
    )
    one = ttt.sums(drafter, short, head()[VOCAB.t2d], VOCAB, steps=3, out_of_vocab="mask")
    two = ttt.sums(drafter, padded, head()[VOCAB.t2d], VOCAB, steps=3, out_of_vocab="mask")
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-6, atol=1e-6)
    for name in ("loss_rows", "rows", "hits"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    padded.aux[:, 7:], padded.final[:, 7:], padded.input_ids[:, 7:], padded.choice[:, 7:] = 9.0, 9.0, 3, 5
    three = ttt.sums(drafter, padded, head()[VOCAB.t2d], VOCAB, steps=3, out_of_vocab="mask")
    torch.testing.assert_close(one.loss, three.loss, rtol=1e-6, atol=1e-6)


def test_other_rows_features_matter_only_from_before() -> None:
    """Row t sees features of 0 … t, never those behind it."""
    drafter, batch = make(), make_batch([[1] * 8])
    before = ttt.logits(drafter, batch.input_ids[0], batch.aux[0], 3)
    batch.aux[0, 5] += 1
    after = ttt.logits(drafter, batch.input_ids[0], batch.aux[0], 3)
    changed = (before - after).abs().amax(-1) > 1e-6
    assert not changed[:, :5].any()
    assert changed[:, 5:].all()


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_gradcheck(mode: ttt.OutOfVocab) -> None:
    drafter, batch = make(torch.float64), make_batch([[0, 1, 1, 1, 1, 1]], dtype=torch.float64)
    names = [name for name, _ in drafter.named_parameters()]

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drafter = drafter

        def forward(self) -> Tensor:
            draft_head = head(torch.float64)[VOCAB.t2d]
            found = ttt.sums(self.drafter, batch, draft_head, VOCAB, steps=2, out_of_vocab=mode)
            return ttt.loss(found.loss, found.loss_rows, 0.8)

    def function(*parameters: Tensor) -> Tensor:
        named = {f"drafter.{name}": value for name, value in zip(names, parameters, strict=True)}
        value = torch.func.functional_call(Loss(), named)
        assert isinstance(value, Tensor)
        return value

    inputs = tuple(parameter.detach().clone().requires_grad_() for parameter in drafter.parameters())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_teacher_choice_in_chunks_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    final = torch.randn(7, H)
    plain = (final @ head().T).argmax(-1)
    for rows in (1, 2, 3, 7, 100):
        monkeypatch.setattr(ttt, "_CHUNK_ELEMENTS", rows * V)
        assert torch.equal(ttt.teacher_choice(final, head()), plain)
    assert ttt.teacher_choice(final[:0], head()).tolist() == []


def test_accuracy_and_simulated_acceptance_length_by_hand() -> None:
    assert ttt.accuracy(torch.tensor([3, 1, 0]), torch.tensor([4, 2, 0])) == [0.75, 0.5, 0.0]
    assert ttt.simulated_acceptance_length([0.5, 0.5, 0.2]) == pytest.approx(1 + 0.5 + 0.25 + 0.05)
    assert ttt.simulated_acceptance_length([1.0] * 7) == 8
    assert ttt.simulated_acceptance_length([]) == 1


def test_vocabulary_of_these_tests() -> None:
    checked = draft_vocab.check(VOCAB.d2t, VOCAB.t2d, "here")
    assert checked.target_ids.tolist() == [1, 2, 5, 7, 10]
