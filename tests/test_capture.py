"""Captured streams against Transformers' own `output_hidden_states`."""

import pytest
import tiny
import torch

from eaglet import audit, capture, layers
from eaglet.engines import Engine, Refusal
from eaglet.engines.transformers import TransformersEngine, batches_by_length
from eaglet.params import EngineParams, LaunchParams, UrlParams


class FixedTarget:
    """A target whose model is already here."""

    def __init__(self, network: object) -> None:
        self._network = network
        self.dtype = "float32"

    def model(self) -> object:
        return self._network


def engine_params(**changes: object) -> EngineParams:
    values = {
        "name": "transformers",
        "batch_tokens": 4096,
        "batch_rows": 8,
        "concurrency": 16,
        "spool": "/dev/shm/eaglet-test",
        "spool_gib": 0.5,
        "url": UrlParams(None, None),
        "launch": LaunchParams(".venv-sglang/bin/python", 1, 1, None, []),
    }
    return EngineParams(**{**values, **changes})  # type: ignore[arg-type]


def engine(network: object, batch_tokens: int = 4096) -> TransformersEngine:
    return TransformersEngine(engine_params(batch_tokens=batch_tokens), FixedTarget(network))  # type: ignore[arg-type]


def states_of(engine: Engine, rows: list[list[int]], names: list[str]) -> dict[int, dict[str, torch.Tensor]]:
    """{row: {stream: [T, H]}}, copied while the engine holds them."""

    def copied(index: int, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: values.clone() for name, values in states.items()}

    found = dict(engine.prefill(rows, names, copied))
    assert not [outcome for outcome in found.values() if isinstance(outcome, Refusal)]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_streams_equal_output_hidden_states(family: str) -> None:
    network = tiny.model(family)
    ids = torch.tensor(tiny.rows(3, 40)[1:2])
    names = [*map(layers.stream, range(6)), layers.FINAL]
    kept, _ = capture.forward(network, names, input_ids=ids, use_cache=False)
    with torch.inference_mode():
        output = network(input_ids=ids, output_hidden_states=True, use_cache=False)
    for layer in range(5):  # HF's hidden_states[k] enters layer k
        torch.testing.assert_close(kept[layers.stream(layer)], output.hidden_states[layer + 1])
    torch.testing.assert_close(kept["final"], output.hidden_states[6])
    assert not torch.allclose(kept["L05"], output.hidden_states[6]), "the last output is before the norm"
    with torch.inference_mode():
        torch.testing.assert_close(network.lm_head(kept["final"]), output.logits)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_do_not_depend_on_their_batch(family: str) -> None:
    network = tiny.model(family)
    rows = tiny.rows(9, 60)
    rows += [rows[1], rows[1][:20]]  # an exact repeat and a shared prefix
    names = ["L01", "L04", "final"]
    together = states_of(engine(network), rows, names)
    assert set(together) == set(range(len(rows)))
    for index, row in enumerate(rows):
        alone = audit.reference(network, row)
        for name in names:
            assert together[index][name].shape == (len(row), 64)
            right = alone.final if name == "final" else alone.outputs[layers.layer_of(name)]
            # Stored as bfloat16: 8 bits of mantissa.
            assert audit.relative_error(together[index][name], right) < 0.004, (name, index)


def test_real_model_in_bfloat16(smollm2, tokenizer) -> None:  # type: ignore[no-untyped-def]
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    texts = [
        "The capital of France is",
        "def add(a, b):\n    return a + b\n\n" * 8,
        "1, 2, 3",
        "Once upon a time " * 20,
    ]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    together = states_of(engine(network), rows, ["L01", "L14", "L26", "final"])
    for index, row in enumerate(rows):
        truth = audit.reference(network, row)
        for name, values in together[index].items():
            seen = audit.compare(name, values, truth, max_error=0.03, min_neighbour_ratio=5)
            assert seen.looks_like is None, (name, seen)


def test_batches_hold_every_row_once_within_the_bound() -> None:
    lengths = [len(row) for row in tiny.rows(50, 64)] + [500]
    batches = batches_by_length(lengths, 256)
    assert sorted(index for batch in batches for index in batch) == list(range(51))
    assert [50] in batches, "a row longer than the bound goes alone"
    assert all(len(b) * max(lengths[i] for i in b) <= 256 for b in batches if b != [50])
