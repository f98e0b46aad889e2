"""Products whose sums are made in an accumulator: each of the three, against fpsim.matmul of matrices by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from product_cases import Calls, by_hand, gradients
from torch import Tensor, nn

import fpsim
from fpsim import Accumulator, Hadamard, Operand, Policy, Products, quantize

ACCUMULATORS = ["fp16", "bf16_chunk32", "hopper_fp8"]
FMT = "mxfp8_e4m3"


def policy(accumulator: str) -> Policy:
    return Policy(products=Products.all(FMT, accumulator=accumulator))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_a_linear_layer_adds_up_in_the_accumulator(accumulator: str) -> None:
    model = quantize(nn.Linear(96, 20), policy(accumulator))
    x, dy, w = torch.randn(40, 96), torch.randn(40, 20), model.weight.detach()
    y, dx, grads = gradients(model, x, dy)

    def q(t: Tensor, axis: int) -> Tensor:
        return by_hand(t, FMT, axis)

    bias = model.bias.detach()
    assert torch.equal(y, fpsim.matmul(q(x, 1), q(w, 1).T, accumulator, bias=bias))
    assert torch.equal(dx, fpsim.matmul(q(dy, 1), q(w, 0), accumulator))
    assert torch.equal(grads["weight"], fpsim.matmul(q(dy, 0).T, q(x, 0), accumulator))
    assert torch.equal(grads["bias"], dy.sum(0))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_a_convolution_adds_up_over_channels_and_positions_of_the_kernel(accumulator: str) -> None:
    model = quantize(nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), policy(accumulator))
    x, w = torch.randn(5, 6, 9, 7), model.weight.detach()
    dy = torch.randn_like(model(x))
    y, _, grads = gradients(model, x, dy)

    def patches(t: Tensor) -> Tensor:
        return F.unfold(t, 3, stride=2, padding=1)  # (batch, channels and kernel, positions)

    columns = patches(by_hand(x, FMT, 1)).movedim(0, 1).flatten(1)
    expected = fpsim.matmul(columns.T, by_hand(w, FMT, 1).flatten(1).T, accumulator)
    assert torch.equal(y, expected.T.unflatten(1, (5, 5, 4)).movedim(0, 1))
    of_x = patches(by_hand(x, FMT, 0)).movedim(0, 1).flatten(1)
    errors = by_hand(dy, FMT, 0).movedim(0, 1).flatten(1)
    assert torch.equal(grads["weight"].flatten(1), fpsim.matmul(errors, of_x.T, accumulator))


def test_a_batched_product_adds_up_in_the_accumulator() -> None:
    model = quantize(Calls(torch.matmul, torch.ones(3, 4096, 2)), Policy(products=Products(accumulator="fp16")))
    y, dx, grads = gradients(model, torch.ones(2, 1, 2100, 4096), torch.ones(2, 3, 2100, 2))
    assert y.unique().tolist() == [2048.0]  # where sums of ones stall
    assert dx.unique().tolist() == [6.0]
    assert grads["w"].unique().tolist() == [2 * 2048.0]  # two of the batch, which torch adds


def test_float32_is_torchs_own_product() -> None:
    layer, x = nn.Linear(300, 20), torch.randn(7, 300)
    assert torch.equal(quantize(layer, Policy(products=Products(accumulator="fp32")))(x), layer(x))


def test_accumulators_are_part_of_the_value_and_of_the_text() -> None:
    products = Products(accumulator="cb16_chunk64")
    assert eval(repr(products)) == products != Products()
    assert "accumulator=cb16_chunk64" in str(products)
    assert products.accumulator == Accumulator("cb16", chunk=64)
    with pytest.raises(ValueError, match="Unknown accumulator 'fp9'"):
        Products(accumulator="fp9")


def test_a_product_that_is_none_of_matrices_is_refused() -> None:
    model = quantize(Calls(lambda x, w: torch.conv_tbc(x, w, w[0, 0], 0), torch.randn(1, 3, 4)), policy("fp16"))
    with pytest.raises(NotImplementedError, match="not known as a product of matrices"):
        model(torch.randn(7, 2, 3))


@pytest.mark.parametrize("layer", [nn.Linear(24, 20), nn.Conv2d(6, 8, 3)], ids=["linear", "convolution"])
def test_operands_are_padded_and_transformed_before_they_are_added_up(layer: nn.Module) -> None:
    operand = Operand("e4m3fn", hadamard=Hadamard(16, "fixed"))
    x = torch.randn(5, 24) if isinstance(layer, nn.Linear) else torch.randn(5, 6, 7, 7)
    dy = torch.randn_like(layer(x))
    results = []
    for accumulator in (None, Accumulator("fp32")):
        y, dx, grads = gradients(
            quantize(layer, Policy(products=Products.all(operand, accumulator=accumulator))), x, dy
        )
        results.append([y, dx, grads["weight"]])
    for torchs, ours in zip(*results, strict=True):
        # two orders of at most 500 float32 sums: 500 ulps of a sum of magnitudes, which is below 40 here
        assert (torchs - ours).abs().max() < 500 * 2.0**-24 * 40
