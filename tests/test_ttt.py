"""The training-time test: mask, unrolled attention, loss and metrics, by hand or against dense forms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eaglet import draft_vocab, loss, ttt
from eaglet.attention import Segments
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


def make_documents(span_ids: list[list[int]], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[ttt.Document]:
    """Random documents; the target's choices are those of a random head (see `head`)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for spans in span_ids:
        final = torch.randn(len(spans), H, generator=generator).to(dtype)
        found.append(
            ttt.Document(
                input_ids=torch.randint(V, (len(spans),), generator=generator),
                span_ids=torch.tensor(spans),
                choice=(final @ head(dtype).T).argmax(-1),
                streams=[torch.randn(len(spans), H, generator=generator).to(dtype) for _ in range(3)],
                final=final,
            )
        )
    return found


def pack(documents: list[ttt.Document], steps: int, mode: ttt.OutOfVocab = "mask") -> ttt.Batch:
    return ttt.pack(documents, VOCAB.t2d, steps=steps, out_of_vocab=mode)


def sums(
    drafter: Drafter, documents: list[ttt.Document], steps: int, mode: ttt.OutOfVocab = "mask", draft_head: Any = None
) -> ttt.Sums:
    """With every row counting 1."""
    batch = pack(documents, steps, mode)
    chosen = head(batch.final.dtype)[VOCAB.t2d] if draft_head is None else draft_head
    return ttt.sums(drafter, batch, chosen, VOCAB, torch.ones(steps))


def head(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(2)).to(dtype)


def rows_of(span_ids: list[int], steps: int) -> list[list[int]]:
    valid = ttt.valid_rows(torch.tensor(span_ids), steps)
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
        positions = torch.arange(length) + k

        def heads(weight: Tensor, count: int, u: Tensor = u) -> Tensor:
            return (u @ weight.T).view(length, count, config.head_dim)

        q = drafter._rotate(heads(layer.self_attn.q_proj.weight, 4), positions)
        keys.append(drafter._rotate(heads(layer.self_attn.k_proj.weight, 2), positions))
        values.append(heads(layer.self_attn.v_proj.weight, 2))
        mask = torch.cat([causal, *[diagonal] * k], 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, torch.cat(keys), torch.cat(values))), attn_mask=mask, enable_gqa=True
        )
        y = g + mixed[0].transpose(0, 1).reshape(length, -1) @ layer.self_attn.o_proj.weight.T
        g = y + layer.mlp(layer.post_attention_layernorm(y))
        outputs.append(drafter.norm(g) @ drafter.lm_head.weight.T)
    return torch.stack(outputs)


def aux_of(document: ttt.Document) -> Tensor:
    return torch.cat(list(document.streams), 1)


def test_logits_and_gradients_are_those_of_the_dense_mask() -> None:
    drafter = make(torch.float64)
    document = make_documents([[1] * 9], dtype=torch.float64)[0]
    weight = torch.randn(4, 9, VD, dtype=torch.float64)
    found = {}
    for name, function in (("sparse", ttt.logits), ("dense", dense_logits)):
        values = function(drafter, document.input_ids, aux_of(document), 4)
        gradients = torch.autograd.grad((values * weight).sum(), list(drafter.parameters()))
        found[name] = [values, *gradients]
    for sparse, dense in zip(found["sparse"], found["dense"], strict=True):
        torch.testing.assert_close(sparse, dense)


def direct_sums(
    drafter: Drafter, documents: list[ttt.Document], steps: int, mode: ttt.OutOfVocab
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row by row in Python, from the dense logits of all rows and the teacher's whole softmax."""
    losses, loss_rows, rows, hits = (torch.zeros(steps) for _ in range(4))
    for document in documents:
        draft = dense_logits(drafter, document.input_ids, aux_of(document), steps)
        target = document.final @ head(document.final.dtype).T  # [T, V]
        for k in range(steps):
            for t in ttt.valid_rows(document.span_ids, steps)[k].nonzero().squeeze(1).tolist():
                best = int(target[t + 1 + k].argmax())
                rows[k] += 1
                hits[k] += int([1, 2, 5, 7, 10][int(draft[k, t].argmax())] == best)
                if mode == "renormalise" or best in (1, 2, 5, 7, 10):
                    p = target[t + 1 + k].softmax(-1)[VOCAB.t2d]
                    losses[k] -= float((p / p.sum() * draft[k, t].log_softmax(-1)).sum().detach())
                    loss_rows[k] += 1
    return losses, loss_rows, rows, hits


SPANS = [[0, 1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 2, 2, 2, 2, 2, 2], [0] * 4, [1, 1, 1, 1], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_sums_are_those_of_single_rows(mode: ttt.OutOfVocab) -> None:
    """Documents side by side, two answers in one, answers that touch, and one without any."""
    drafter, documents = make(), make_documents(SPANS)
    found = sums(drafter, documents, 3, mode)
    losses, loss_rows, rows, hits = direct_sums(drafter, documents, 3, mode)
    torch.testing.assert_close(found.losses, losses)
    torch.testing.assert_close(found.loss.detach(), losses.sum())
    assert found.right.sum(1).tolist() == hits.tolist()
    batch = pack(documents, 3, mode)
    assert torch.bincount(batch.loss_step, minlength=3).tolist() == loss_rows.tolist()
    assert rows.tolist() == [4 + 1 + 1 + 5 + 2 + 2, 3 + 1 + 4 + 1 + 1, 2 + 3]
    counts = [ttt.counted(one.span_ids, one.choice, VOCAB.t2d, 3) for one in documents]
    assert sum(valid.sum(1) for valid, _ in counts).tolist() == rows.tolist()  # type: ignore[union-attr]
    if mode == "mask":
        assert loss_rows[0] < rows[0]  # the choices hold some out of vocabulary


def test_masked_and_renormalised_by_hand() -> None:
    """One answer of three tokens: two rows at step 0, the second's teacher choice out of vocabulary."""
    drafter = make()
    document = make_documents([[0, 1, 1, 1]])[0]
    draft_head = torch.zeros(VD, H)
    draft_head[2, 0] = 1.0  # the teacher's logit of target id 5 is final[..., 0], the others' are 0
    document.final[:, 0] = math.log(6)  # p = 6/10 for id 5, 1/10 for each of the other four
    document.choice[:] = torch.tensor([0, 5, 3, 0])  # id 3 is not in the draft vocabulary
    drafter.lm_head.weight.data.zero_()  # q is uniform, so −Σ p log q = log 5 whatever p is
    for mode, rows in (("mask", 1), ("renormalise", 2)):
        found = sums(drafter, [document], 2, mode, draft_head)  # type: ignore[arg-type]
        later = 0.0 if mode == "mask" else math.log(5)
        torch.testing.assert_close(found.losses, torch.tensor([rows * math.log(5), later]))
        assert found.right.sum(1).tolist() == [0, 0]  # the argmax of equal logits is draft id 0, which is target id 1
    # Sharpened, q being uniform still: p changes, Σ p = 1 does not.
    batch = pack([document], 1)
    sharp = ttt.sums(drafter, batch, draft_head, VOCAB, torch.ones(1), sharpen=0.7)
    torch.testing.assert_close(sharp.losses, torch.tensor([math.log(5)]))


def test_loss_and_gradient_of_a_row_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's own soft cross-entropy, in chunks of every size, sharpened and not."""
    torch.manual_seed(0)
    features, draft_head = torch.randn(7, H, dtype=torch.float64), torch.randn(VD, H, dtype=torch.float64)
    teacher, at = torch.randn(4, VD, dtype=torch.float64), torch.tensor([0, 1, 3, 3, 2, 0, 1])
    weights = torch.rand(7, dtype=torch.float64)
    for sharpen in (0.0, 0.3):
        inputs = [features.clone().requires_grad_(), draft_head.clone().requires_grad_()]
        p = teacher[at].softmax(-1)
        p = (1 - sharpen) * p + sharpen * torch.nn.functional.one_hot(p.argmax(-1), VD)
        each = torch.nn.functional.cross_entropy(inputs[0] @ inputs[1].T, p, reduction="none")
        wanted = torch.autograd.grad(3 * (each * weights).sum(), inputs)
        for rows in (1, 2, 3, 7, 100):
            monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", rows * VD)
            inputs = [features.clone().requires_grad_(), draft_head.clone().requires_grad_()]
            total, losses, chosen = loss.soft_cross_entropy(*inputs, teacher, at, weights, sharpen)
            torch.testing.assert_close(losses, each.detach())
            torch.testing.assert_close(total.detach(), (each * weights).sum().detach())
            assert torch.equal(chosen, (features @ draft_head.T).argmax(-1))
            for one, two in zip(torch.autograd.grad(3 * total, inputs), wanted, strict=True):
                torch.testing.assert_close(one, two)


def test_draft_ids_are_mapped_by_offsets() -> None:
    """d2t read as absolute ids would make draft id 2 the target id 3."""
    drafter, document = make(), make_documents([[1, 1, 1]])[0]
    drafter.lm_head.weight.data.zero_()
    with torch.no_grad():  # draft id 2 for this document's one row, whatever its features are
        features = drafter.norm(ttt.forward(drafter, pack([document], 1, "renormalise").layout, aux_of(document))[0])
        drafter.lm_head.weight[2] = features[0]
    for choice, hits in ((5, 1), (3, 0), (2, 0)):
        document.choice[:] = choice
        assert sums(drafter, [document], 1, "renormalise").right.sum(1).tolist() == [hits]


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_batch_is_its_documents_under_one_denominator(mode: ttt.OutOfVocab) -> None:
    drafter = make(torch.float64)
    documents = [one for one in make_documents(SPANS, dtype=torch.float64) if one.span_ids.any()]
    draft_head = head(torch.float64)[VOCAB.t2d]
    counts = torch.bincount(pack(documents, 3, mode).loss_step, minlength=3)
    weights = ttt.loss_weights(counts, 0.8)

    def part(chosen: list[ttt.Document]) -> Tensor:
        return ttt.sums(drafter, pack(chosen, 3, mode), draft_head, VOCAB, weights).loss

    split = sum(part([one]) for one in documents)
    assert isinstance(split, Tensor)
    whole = part(documents)
    torch.testing.assert_close(split, whole)
    one = torch.autograd.grad(whole, list(drafter.parameters()))
    two = torch.autograd.grad(split, list(drafter.parameters()))
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(left, right)


def test_loss_weights_by_hand() -> None:
    found = ttt.loss_weights(torch.tensor([3, 2, 0]), 0.8)
    torch.testing.assert_close(found, torch.tensor([1 / 3, 0.8 / 2, 0.64]))


def test_other_rows_features_matter_only_from_before() -> None:
    """Row t sees features of 0 … t, never those behind it."""
    drafter, document = make(), make_documents([[1] * 8])[0]
    before = ttt.logits(drafter, document.input_ids, aux_of(document), 3)
    document.streams[1][5] += 1
    after = ttt.logits(drafter, document.input_ids, aux_of(document), 3)
    changed = (before - after).abs().amax(-1) > 1e-6
    assert not changed[:, :5].any()
    assert changed[:, 5:].all()


def test_a_document_never_sees_its_neighbours() -> None:
    drafter = make()
    documents = make_documents([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    others = make_documents([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], seed=5)
    alone = sums(drafter, documents[1:], 3).losses
    for beside in (documents[0], others[0]):
        together = sums(drafter, [beside, documents[1]], 3).losses
        torch.testing.assert_close(together - sums(drafter, [beside], 3).losses, alone)


@pytest.mark.parametrize("mode", ["mask", "renormalise"])
def test_gradcheck(mode: ttt.OutOfVocab) -> None:
    drafter = make(torch.float64)
    batch = pack(make_documents([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1]], dtype=torch.float64), 3, mode)
    names = [name for name, _ in drafter.named_parameters()]

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drafter = drafter

        def forward(self) -> Tensor:
            weights = ttt.loss_weights(torch.tensor([5, 3, 1]), 0.8)
            return ttt.sums(self.drafter, batch, head(torch.float64)[VOCAB.t2d], VOCAB, weights).loss

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


def test_a_chain_by_hand() -> None:
    """Two answers: of six rows, accepting 2, -, -, 0, 1, -, and of two rows, accepting 0 and 0."""
    right = torch.tensor(
        [
            [1, 1, 0, 0, 1, 1, 0, 0],
            [1, 0, 1, 1, 0, 0, 1, 0],  # a later step that is right behind a wrong one is not accepted
        ],
        dtype=torch.bool,
    )
    segments = Segments.of([6, 2], [9, 12])
    assert ttt.chain(right, segments) == (8, 5)
    assert ttt.chain(right[:1], segments) == (8, 6)
    assert ttt.chain(torch.zeros_like(right), segments) == (8, 8)
