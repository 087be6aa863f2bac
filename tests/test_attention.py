"""The drafter's attention against torch's own with a dense mask: values and gradients."""

import pytest
import torch
from torch import Tensor

from eaglet import attention
from eaglet.attention import KeyValues, Segments

HEADS, KEY_HEADS, SIZE = 4, 2, 16
# Two whole documents, one of which only the last rows are computed, and a single row.
ROWS, KEYS = [5, 3, 1], [5, 9, 4]


def make(k: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, keys, values, own keys, own values."""
    generator = torch.Generator().manual_seed(k)
    shapes = [(sum(ROWS), HEADS, SIZE), *[(sum(KEYS), KEY_HEADS, SIZE)] * 2, *[(sum(ROWS), k, KEY_HEADS, SIZE)] * 2]
    made = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [values.to(device, dtype).requires_grad_() for values in made]


def ours(q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    own = KeyValues(own_keys, own_values) if own_keys.shape[1] else None
    return attention.attention(q, KeyValues(keys, values), own, Segments.of(ROWS, KEYS).to(q.device))


def dense(q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """One mask over all keys of all documents, then all own keys of all rows."""
    rows, k = own_keys.shape[:2]
    mask = torch.zeros(rows, len(keys) + rows * k, dtype=torch.bool, device=q.device)
    row = key = 0
    for count, seen in zip(ROWS, KEYS, strict=True):
        for place in range(count):
            mask[row + place, key : key + seen - count + place + 1] = True
        row, key = row + count, key + seen
    for place in range(rows):
        mask[place, len(keys) + place * k : len(keys) + (place + 1) * k] = True
    both = [torch.cat([one, own.flatten(0, 1)]) for one, own in ((keys, own_keys), (values, own_values))]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, *both)), attn_mask=mask, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("k", [0, 1, 6])
def test_values_and_gradients_are_the_dense_masks(k: int) -> None:
    inputs = make(k, torch.float64)
    weight = torch.randn(sum(ROWS), HEADS * SIZE, dtype=torch.float64)
    found = {}
    for name, function in (("ours", ours), ("dense", dense)):
        mixed = function(*inputs)
        used = inputs if k else inputs[:3]
        found[name] = [mixed, *torch.autograd.grad((mixed * weight).sum(), used)]
    for one, two in zip(found["ours"], found["dense"], strict=True):
        torch.testing.assert_close(one, two)


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(ours, make(2, torch.float64), fast_mode=True)


def test_large_scores_do_not_overflow() -> None:
    inputs = make(3, torch.float32)
    with torch.no_grad():
        inputs[0] *= 1e3
    mixed = ours(*inputs)
    torch.testing.assert_close(mixed, dense(*inputs), rtol=1e-3, atol=1e-3)
    assert all(torch.isfinite(one).all() for one in torch.autograd.grad(mixed.sum(), inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("k", [0, 1, 6])
def test_flash_is_the_dense_mask(k: int) -> None:
    """FlashAttention in bfloat16, merged by its logarithm of the denominator, against float32."""
    inputs = make(k, torch.bfloat16, "cuda")
    wide = [values.detach().float().requires_grad_() for values in inputs]
    weight = torch.randn(sum(ROWS), HEADS * SIZE, device="cuda")
    used = slice(None) if k else slice(3)
    mixed, exact = ours(*inputs), dense(*wide)
    found = [mixed, *torch.autograd.grad((mixed.float() * weight).sum(), inputs[used])]
    wanted = [exact, *torch.autograd.grad((exact * weight).sum(), wide[used])]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), two, rtol=2e-2, atol=2e-2)
