"""Each row of the table of layer ids."""

import pytest

from eaglet import layers
from eaglet.errors import EagletError


def test_auto_is_specforges_default() -> None:
    assert layers.choose("auto", 30) == [1, 14, 26]
    assert layers.choose("auto", 61) == [1, 29, 57]


def test_sglang_hf_vllm_default_as_outputs() -> None:
    # [2, L//2, L-3] counts streams entering a layer: Llama-3.1-8B has 32 layers, [2, 16, 29].
    assert layers.sglang_default(32) == [1, 15, 28]
    assert layers.to_entering(layers.sglang_default(32)) == [2, 16, 29]


def test_kimi_outputs_are_what_sglang_sees_one_higher() -> None:
    assert layers.to_entering([2, 30, 58]) == [3, 31, 59]
    assert layers.from_entering([3, 31, 59]) == [2, 30, 58]
    assert layers.to_output([2, 30, 58]) == [2, 30, 58], "SpecForge, ModelOpt, SGLang with ids given"


def test_the_embedding_is_no_layers_output() -> None:
    with pytest.raises(EagletError, match="embedding"):
        layers.from_entering([0, 16, 29])


@pytest.mark.parametrize("chosen", [[1, 2], [1, 2, 30], [3, 2, 1], [1, 1, 2], [-1, 2, 3], []])
def test_impossible_layers_are_refused(chosen: list[int]) -> None:
    with pytest.raises(EagletError, match=r"extract\.layers"):
        layers.choose(chosen, 30)


def test_stream_names() -> None:
    assert layers.streams([1, 14, 126]) == ["L01", "L14", "L126", "final"]
    assert [layers.layer_of(layers.stream(k)) for k in (0, 7, 126)] == [0, 7, 126]
