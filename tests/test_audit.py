"""Each kind of wrong hidden state is found and named."""

import pytest
import tiny
import torch

from eaglet import audit

LENGTH = 24


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def truth(request: pytest.FixtureRequest) -> audit.Reference:
    return audit.reference(tiny.model(request.param), tiny.rows(2, LENGTH)[1])


def looks(name: str, values: torch.Tensor, truth: audit.Reference) -> str | None:
    return audit.compare(name, values, truth, max_error=0.05, min_neighbour_ratio=3).looks_like


def test_right_states_pass(truth: audit.Reference) -> None:
    assert looks("L02", truth.outputs[2].bfloat16(), truth) is None
    assert looks("L00", truth.outputs[0].bfloat16(), truth) is None
    assert looks("final", truth.final.bfloat16(), truth) is None


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("L02", lambda t: t.outputs[1], "output of layer 1 "),
        ("L02", lambda t: t.outputs[3], "output of layer 3 "),
        ("final", lambda t: t.outputs[-1], "norm"),
        ("final", lambda t: t.final_twice, "final norm applied twice"),
        ("L05", lambda t: t.final, "after the final norm"),
        ("L02", lambda t: torch.cat([t.outputs[2][:1], t.outputs[2][:-1]]), "one position late"),
        ("L02", lambda t: torch.cat([t.outputs[2][1:], t.outputs[2][-1:]]), "one position early"),
        ("L02", lambda t: t.outputs[2][5:], "prefix rows missing"),
        ("L02", lambda t: t.outputs[2].flip(0), "another sample"),
    ],
)
def test_wrong_states_are_named(truth: audit.Reference, name: str, make: object, expected: str) -> None:
    assert expected in (looks(name, make(truth), truth) or "")  # type: ignore[operator]


def test_the_last_layer_has_one_neighbour(truth: audit.Reference) -> None:
    seen = audit.compare("L05", truth.outputs[5], truth, 0.05, 3)
    assert seen.looks_like is None
    assert list(seen.neighbours) == ["output of layer 4"]


def spoil(states: dict[str, torch.Tensor], name: str, **values: object) -> dict[str, torch.Tensor]:
    spoiled = states[name].clone()
    for place, value in values.values():  # type: ignore[misc]
        spoiled[place] = value
    return {**states, name: spoiled}


def test_faults_of_single_rows() -> None:
    torch.manual_seed(0)
    good = {name: torch.randn(LENGTH, 8).bfloat16() for name in ("L01", "L02", "final")}
    assert audit.faults(good, LENGTH) == []
    assert audit.faults({name: values[:1] for name, values in good.items()}, 1) == [], "one token is a row too"
    for value in (float("nan"), float("inf"), float("-inf")):
        assert audit.faults(spoil(good, "L02", a=((7, 3), value)), LENGTH) == [
            "L02: NaN or infinity at 1 tokens, first at 7"
        ]
    assert audit.faults(spoil(good, "final", a=(5, 0.0), b=(9, 0.0)), LENGTH) == [
        "final: all zero at 2 tokens, first at 5"
    ]
    constant = {**good, "L01": good["L01"][:1].repeat(LENGTH, 1)}
    assert audit.faults(constant, LENGTH) == ["L01: the same values at every token"]
    assert audit.faults({**good, "L02": good["L01"]}, LENGTH) == [
        "L01 and L02 hold the same values: one layer was stored twice"
    ]
    short = {**good, "L02": good["L02"][4:]}
    assert audit.faults(short, LENGTH) == ["L02: 20 rows for 24 tokens (prefix rows missing?)"]


def test_choices_are_the_heads_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.eye(4)  # the state of token i says i is next
    said = torch.tensor([1, 2, 0, 3, 0])
    final = torch.nn.functional.one_hot(said, 4).bfloat16()
    for rows in (1, 2, 5, 9):
        monkeypatch.setattr(audit, "_ROWS_AT_ONCE", rows)
        assert torch.equal(audit.choices(final, head), said)
    assert audit.choices(final[:0], head).tolist() == []


def test_moments_by_hand() -> None:
    moments = audit.Moments()
    moments.add(torch.tensor([[1.0, 2.0]]))
    moments.add(torch.tensor([[3.0, -2.0]]))
    summary = moments.summary()
    assert (summary["min"], summary["max"], summary["mean"]) == (-2, 3, 1)
    assert summary["std"] == pytest.approx(torch.tensor([1.0, 2, 3, -2]).std(correction=0).item())


def test_relative_error_weighs_tokens_alike() -> None:
    base = torch.ones(4, 8)
    base[0] *= 1e4  # an attention sink
    wrong = base.clone()
    wrong[1] = -1
    assert audit.relative_error(wrong, base) == pytest.approx(2 / 4)
