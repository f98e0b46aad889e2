"""Products whose sums are made in an accumulator: each of the three, against fpsim.matmul of matrices by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from product_cases import Calls, by_hand, gradients
from torch import Tensor, nn

import fpsim
from ada_loss import AdaLossScaled, layer_rule
from fpsim import Accumulator, Hadamard, Operand, Policy, Products, as_accumulator, quantize

ACCUMULATORS = ["fp16", "bf16_chunk32", "hopper_fp8"]
FMT = "mxfp8_e4m3"


def in_leading_bits(accumulator: str) -> Accumulator:
    """As products tell it of operands whose blocks have scales."""
    return replace(as_accumulator(accumulator), operands=None)


def policy(accumulator: str) -> Policy:
    return Policy(products=Products.all(FMT, accumulator=accumulator))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_a_linear_layer_adds_up_in_the_accumulator(accumulator: str) -> None:
    sums = in_leading_bits(accumulator)
    model = quantize(nn.Linear(96, 20), policy(accumulator))
    x, dy, w = torch.randn(40, 96), torch.randn(40, 20), model.weight.detach()
    y, dx, grads = gradients(model, x, dy)

    def q(t: Tensor, axis: int) -> Tensor:
        return by_hand(t, FMT, axis)

    bias = model.bias.detach()
    assert torch.equal(y, fpsim.matmul(q(x, 1), q(w, 1).T, sums, bias=bias))
    assert torch.equal(dx, fpsim.matmul(q(dy, 1), q(w, 0), sums))
    assert torch.equal(grads["weight"], fpsim.matmul(q(dy, 0).T, q(x, 0), sums))
    assert torch.equal(grads["bias"], dy.sum(0))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_a_convolution_adds_up_over_channels_and_positions_of_the_kernel(accumulator: str) -> None:
    sums = in_leading_bits(accumulator)
    model = quantize(nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), policy(accumulator))
    x, w = torch.randn(5, 6, 9, 7), model.weight.detach()
    dy = torch.randn_like(model(x))
    y, _, grads = gradients(model, x, dy)

    def patches(t: Tensor) -> Tensor:
        return F.unfold(t, 3, stride=2, padding=1)  # (batch, channels and kernel, positions)

    columns = patches(by_hand(x, FMT, 1)).movedim(0, 1).flatten(1)
    expected = fpsim.matmul(columns.T, by_hand(w, FMT, 1).flatten(1).T, sums)
    assert torch.equal(y, expected.T.unflatten(1, (5, 5, 4)).movedim(0, 1))
    of_x = patches(by_hand(x, FMT, 0)).movedim(0, 1).flatten(1)
    errors = by_hand(dy, FMT, 0).movedim(0, 1).flatten(1)
    assert torch.equal(grads["weight"].flatten(1), fpsim.matmul(errors, of_x.T, sums))


def test_a_batched_product_adds_up_in_the_accumulator() -> None:
    model = quantize(Calls(torch.matmul, torch.ones(3, 4096, 2)), Policy(products=Products(accumulator="fp16")))
    y, dx, grads = gradients(model, torch.ones(2, 1, 2100, 4096), torch.ones(2, 3, 2100, 2))
    assert y.unique().tolist() == [2048.0]  # where sums of ones stall
    assert dx.unique().tolist() == [6.0]
    assert grads["w"].unique().tolist() == [2 * 2048.0]  # two of the batch, which torch adds


# Operands in formats, whose subnormals count with the format's least exponent

GROUPS = Accumulator("fp32", "toward_zero", group=4, group_bits=6)
MIXED = Products(fprop=("e4m3fn", "e3m2fn"), dgrad=("e5m2", "e3m2fn"), wgrad=("e5m2", "e4m3fn"), accumulator=GROUPS)


def of(*operands: str | None) -> Accumulator:
    return replace(GROUPS, operands=operands)


def small(*shape: int) -> Tensor:
    """Around the subnormals of all three formats."""
    return torch.randn(shape) * torch.exp2(torch.randint(-9, 0, shape).float())


def test_products_know_the_formats_of_their_operands() -> None:
    layer = nn.Linear(40, 12, bias=False)
    layer.weight.data = small(12, 40)
    model, x, dy = quantize(layer, Policy(products=MIXED)), small(30, 40), small(30, 12)
    y, dx, grads = gradients(model, x, dy)
    e4m3, e3m2, e5m2 = (fpsim.round_to(t, f) for t, f in ((x, "e4m3fn"), (layer.weight, "e3m2fn"), (dy, "e5m2")))
    w = e3m2.detach()
    assert torch.equal(y, fpsim.matmul(e4m3, w.T, of("e4m3fn", "e3m2fn")))
    assert torch.equal(dx, fpsim.matmul(e5m2, w, of("e5m2", "e3m2fn")))
    assert torch.equal(grads["weight"], fpsim.matmul(e5m2.T, e4m3, of("e5m2", "e4m3fn")))
    assert not torch.equal(y, fpsim.matmul(e4m3, w.T, GROUPS))  # it is seen here


def test_products_of_any_form_know_which_operand_is_which() -> None:
    transposed, w = nn.ConvTranspose1d(5, 6, 1, bias=False), small(5, 6)
    transposed.weight.data = w[..., None].clone()
    x, dy = small(7, 5, 9), small(7, 6, 9)
    y, dx, grads = gradients(quantize(transposed, Policy(products=MIXED)), x, dy)
    rows, errors = (t.movedim(1, 2).flatten(0, 1) for t in (x, dy))  # (batch and positions, channels)
    rows, errors, wq = fpsim.round_to(rows, "e4m3fn"), fpsim.round_to(errors, "e5m2"), fpsim.round_to(w, "e3m2fn")
    assert torch.equal(y.movedim(1, 2).flatten(0, 1), fpsim.matmul(rows, wq, of("e4m3fn", "e3m2fn")))
    assert torch.equal(dx.movedim(1, 2).flatten(0, 1), fpsim.matmul(errors, wq.T, of("e5m2", "e3m2fn")))
    of_weight = fpsim.matmul(rows.T, errors, of("e4m3fn", "e5m2"))
    assert torch.equal(grads["weight"][..., 0], of_weight)
    _, dx, grads = gradients(
        quantize(Calls(torch.matmul, w), Policy(products=MIXED)), x.mT.flatten(0, 1), dy.mT.flatten(0, 1)
    )
    assert torch.equal(dx, fpsim.matmul(errors, wq.T, of("e5m2", "e3m2fn")))
    assert torch.equal(grads["w"], of_weight)


def test_what_has_scales_or_comes_as_it_is_counts_as_the_accumulator_says() -> None:
    operands = {
        "fprop": ("mxfp8_e4m3", "e4m3fn"),
        "dgrad": (None, Operand(None, source="fprop")),
        "wgrad": ("e5m2", None),
    }
    specs = Products(**operands, accumulator="ampere_fp16").specs
    pairs = [tuple(f and str(f) for f in a.operand_formats) for a in specs.accumulators]
    assert pairs == [(None, "e4m3fn"), ("fp16", "e4m3fn"), ("e5m2", "fp16")]
    pairs = [tuple(f and str(f) for f in a.operand_formats) for a in specs.scaled]
    assert pairs == [(None, "e4m3fn"), (None, "e4m3fn"), (None, "fp16")]
    assert Products.all("e4m3fn", accumulator="fp16").specs.accumulators == (Accumulator("fp16"),) * 3


def test_a_gradient_at_a_scale_counts_with_its_leading_bits() -> None:
    layer, x, dy = nn.Linear(40, 12, bias=False), small(30, 40), small(30, 12) * 2.0**-10  # below e5m2's normal numbers
    layer.weight.data = small(12, 40)
    model = quantize(layer, Policy(products=MIXED))
    with AdaLossScaled(model, init_scale=2.0**16, rule=layer_rule("fixed", fixed_loss_scale=1.0)):
        y, dx, grads = gradients(model, x, dy)
    e4m3, w = fpsim.round_to(x, "e4m3fn"), fpsim.round_to(layer.weight.detach(), "e3m2fn")
    e5m2 = fpsim.round_to(dy * 2.0**16, "e5m2") * 2.0**-16
    assert torch.equal(y, fpsim.matmul(e4m3, w.T, of("e4m3fn", "e3m2fn")))
    assert torch.equal(dx, fpsim.matmul(e5m2, w, of(None, "e3m2fn")))
    assert torch.equal(grads["weight"], fpsim.matmul(e5m2.T, e4m3, of(None, "e4m3fn")))


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
