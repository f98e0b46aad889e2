"""Products as values, and policies that have them."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from torch import nn

import fpsim
from fpsim import Operand, Policy, Products, as_policy, quantize
from fpsim.formats.blocks import BlockFormat, Delayed, FixedPoint  # noqa: F401  # names in a repr
from fpsim.formats.floats import FloatFormat  # noqa: F401

HYBRID = Products(("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), (Operand("e5m2", "stochastic", random_bits=8), "e4m3fn"))
VALUES = [
    Products(),
    HYBRID,
    Products.all("mxfp4", "stochastic", output="bf16", attention=True),
    Products.all("nvfp4", fprop=(None, "nvfp4")),
    Products.all("e4m3fn per tensor delayed"),
    Products.all("int8 per row"),
]


@pytest.mark.parametrize("products", VALUES, ids=str)
def test_products_are_values(products: Products) -> None:
    again = eval(repr(products))
    assert again == products
    assert hash(again) == hash(products)
    assert pickle.loads(pickle.dumps(products)) == products


def test_operands_are_given_as_formats_names_operands_or_none() -> None:
    fmt = fpsim.as_format("e5m2")
    assert Products(fprop=("e5m2", fmt)).fprop == (Operand("e5m2"), Operand(fmt))
    assert Products(dgrad=[None, Operand("e5m2")]).dgrad == (None, Operand("e5m2"))  # type: ignore[arg-type]


def test_all_operands_get_one_format_but_for_products_that_differ() -> None:
    products = Products.all("mxfp4", "stochastic", wgrad=("e5m2", None))
    four = Operand("mxfp4", "stochastic")
    assert (products.fprop, products.dgrad) == ((four, four), (four, four))
    assert products.wgrad == (Operand("e5m2"), None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Products(fprop="e4m3fn"), r"fprop='e4m3fn' is not a pair of operands. Expected: \(x, w\)"),
        (lambda: Products(wgrad=("e4m3fn",)), r"is not a pair of operands. Expected: \(dy, x\)"),
        (lambda: Products(dgrad=("mxfp9", None)), "dgrad: dy='mxfp9' is not an operand. Unknown format"),
        (lambda: Products(output="mxfp4"), "a format of single numbers is expected"),
        (lambda: Products(attention=1), "attention=1 is invalid. Expected: True, False"),  # type: ignore[arg-type]
        (lambda: Operand("e5m2", "nearest"), "Unknown rounding 'nearest'"),
        (lambda: Operand("e5m2", random_bits=8), "only 'stochastic' uses it"),
        (lambda: Policy(activation="mxfp4"), re.escape("activation='mxfp4' is a format whose numbers share scales")),
        (lambda: Policy(error="mxfp4"), re.escape("products=fpsim.Products.all('mxfp4')")),
        (lambda: Policy(products="mxfp4"), "products is 'mxfp4'. Expected: a fpsim.Products"),
        (lambda: Policy(activation="bf16", products=Products(output="bf16")), "Give one of them"),
    ],
)
def test_what_is_no_operand_is_refused(make: object, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()  # type: ignore[operator]


def test_a_block_format_stands_for_all_operands_and_leaves_roles_in_float32() -> None:
    policy = as_policy("mxfp8_e4m3")
    assert policy == Policy(products=Products.all("mxfp8_e4m3"))
    assert not any(policy.specs())
    assert as_policy(fpsim.as_format("mxfp8_e4m3")) == policy


def test_overrides_switch_products_off_and_change_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    policy = Policy(
        "bf16",
        "bf16",
        products=Products.all("mxfp4"),
        overrides={"1": None, "2": "mxfp8_e4m3", "3": Policy(activation="fp16")},
    )
    found = policy.for_modules(model)
    assert found["0"] is policy
    assert found["1"].products is None
    assert found["2"] == Policy(products=Products.all("mxfp8_e4m3"))
    assert found["3"].products is None


def test_a_rounding_for_a_block_format_is_that_of_its_operands() -> None:
    x = torch.randn(4, 32)
    torch.manual_seed(0)
    model = quantize(nn.Linear(32, 8), "mxfp4", rounding="stochastic")
    assert "products: mxfp4 stochastic" in str(model)
    assert not torch.equal(model(x), model(x))
    policy = Policy(activation="bf16", products=Products.all("mxfp4"))
    assert policy.with_rounding("stochastic").products == policy.products
    with pytest.raises(ValueError, match="roles are all float32"):
        quantize(nn.Linear(2, 2), "mxfp4", rounding={"error": "stochastic"})


def test_texts_name_the_products() -> None:
    model = quantize(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), Policy(products=HYBRID, overrides={"2": None})
    )
    text = (
        "fprop=(e4m3fn nearest_even, e4m3fn nearest_even), dgrad=(e5m2 nearest_even, e4m3fn nearest_even), "
        "wgrad=(e5m2 stochastic 8 random bits, e4m3fn nearest_even)"
    )
    rows = fpsim.summary(model)
    assert [row.products for row in rows] == [text, text, text, ""]
    printed = str(rows).splitlines()
    assert f"A: {text}" in " ".join(str(rows).split())  # too long for a line of 100 columns
    assert printed[0].endswith("products")
    assert [line.endswith("  A") for line in printed[2:6]] == [False, True, False, False]  # the linear layer alone
    assert f"products: {text}" in str(model)
    assert str(Policy(products=HYBRID, overrides={"2": None})) == f"products: {text}; 2: float32"
    assert "products" not in str(fpsim.summary(quantize(nn.Linear(2, 2), "bf16")))
