"""float8 blocks against torch's own conversions: every code, every corner, and the way back."""

from __future__ import annotations

import pytest
import torch

from moerl.models import fp8


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request, monkeypatch):
    """Both ways to the same bits."""
    if request.param == "torch":
        monkeypatch.setattr(fp8, "_compiled", lambda: None)
    elif fp8._compiled() is None:
        pytest.skip("moerl/models/fp8.c is not built (no C compiler at installation)")


CORNERS = [((256, 384), (0, 0)), ((130, 300), (5, 77)), ((33, 129), (128, 256)), ((300, 1), (127, 127))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "corner"), CORNERS)
def test_values_are_the_float32_product_rounded_once(dtype, shape, corner):
    weight = torch.randint(-128, 128, shape, dtype=torch.int8).view(torch.float8_e4m3fn)
    scale = torch.rand(8, 8) * 10.0 ** torch.randint(-30, 3, (8, 8))
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (weight.float() * whole[corner[0] :, corner[1] :][: shape[0], : shape[1]]).to(dtype)
    found = fp8.dequantize(weight, scale, corner=corner, dtype=dtype)
    assert found.dtype == dtype and torch.equal(found.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(found.view(bits)[~found.isnan()], expected.view(bits)[~expected.isnan()])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_single_nan_of_either_sign_is_found(code):
    weight = torch.zeros(200, 200, dtype=torch.uint8)
    weight[150, 3] = code
    found = fp8.dequantize(weight.view(torch.float8_e4m3fn), torch.ones(2, 2), dtype=torch.bfloat16)
    assert found.isnan().nonzero().tolist() == [[150, 3]]


@pytest.mark.parametrize("shape", [(256, 256), (130, 300), (1, 5)])
def test_largest_of_every_block_becomes_448(shape):
    values = torch.randn(shape)
    values[:128, :128] = 0 if shape == (256, 256) else values[:128, :128]
    values.view(-1)[-1] = -9.0
    numbers, scale = fp8.quantize(values)
    back = fp8.dequantize(numbers, scale)
    assert torch.allclose(back, values, rtol=1 / 16, atol=float(scale.max()) * 2**-9)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            largest = values[block].abs().max()
            assert scale[row, column] == (largest / 448 if largest else 1.0)
            assert numbers[block].float().abs().max() == (448 if largest else 0)
