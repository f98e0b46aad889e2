"""An infinity, NaN or a mask in a block: as the standard has it, and as TransformerEngine, which hides an infinity."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
import torch
from format_cases import same
from infinities import INPUTS, SATURATING, STANDARD
from torch import Tensor, nn

import ada_loss
import fpsim
from fpsim import BlockFormat, Operand, Policy, Products, as_format, encode, quantize, round_to, scales_of
from fpsim.tensors.noise import new_key
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import any_spec

INF, NAN, MASK = torch.inf, torch.nan, torch.finfo(torch.float32).max
ALIKE = {"e4m3fn per row fp32", "mxfp8_e4m3", "nvfp4", "dynamic8 per 256 fp32"}


def test_what_the_two_rules_make_of_an_infinity() -> None:
    x = torch.tensor([[INF, 1.0, -2.0, 0.0]])
    assert round_to(x, "mxfp8_e4m3").isnan().all()
    assert round_to(x, "e4m3fn per row fp32").isnan().all()
    assert round_to(x, "e4m3fn per tensor fp32 saturate").tolist() == [[448.0, 1.0, -2.0, 0.0]]
    assert round_to(x, "e4m3fn per 128 ceil saturate").tolist() == [[448.0, 1.0, -2.0, 0.0]]
    assert round_to(x, "e4m3fn per 32 ceil saturate").tolist() == [[INF, 0.0, -0.0, 0.0]]  # 448 * 2**127, code 0xFE
    assert round_to(x, "e2m1fn per 16 e4m3fn fp32 saturate").tolist() == [[6 * 448.0, 0.0, -0.0, 0.0]]


@tiers.parametrize("name", STANDARD, keep=ALIKE)
def test_the_standards_rule_is_that_of_microxcaling_torchao_and_bitsandbytes(name: str) -> None:
    for case, x in INPUTS.items():
        rounded = round_to(torch.from_numpy(x), name)
        with np.errstate(all="ignore"):
            for library in STANDARD[name]:
                assert same(rounded, torch.from_numpy(library(x))), case


@tiers.parametrize("name", SATURATING, keep={"e5m2 per tensor fp32 saturate", "e4m3fn per 32 ceil saturate"})
def test_the_other_rule_is_that_of_transformer_engine(name: str) -> None:
    for case, x in INPUTS.items():
        with np.errstate(all="ignore"):
            expected = np.where(np.abs(x) == MASK, x, SATURATING[name](x))  # a mask is none there
        assert same(round_to(torch.from_numpy(x), name), torch.from_numpy(expected)), case
    usual = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3  # the transcription is more than its cases
    assert same(round_to(usual, name), torch.from_numpy(SATURATING[name](usual.numpy())))
    assert torch.equal(round_to(usual, name), round_to(usual, name.removesuffix(" saturate")))


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@tiers.parametrize(
    ("name", "axis", "own"),
    [
        ("mxfp4", 1, (2, slice(32, 64))),
        ("mxfp8_e5m2", 0, (slice(0, 32), 40)),
        ("e4m3fn per row fp32", 1, (2, slice(None))),
        ("e4m3fn per row ceil", 0, (slice(None), 40)),
        ("e4m3fn per 16x16 fp32", 1, (slice(0, 16), slice(32, 48))),
        ("nf4 per 64 fp32", 1, (2, slice(0, 64))),
        ("dynamic8 per 32", 0, (slice(0, 32), 40)),
        ("e2m1fn per 32 at 0.75", 1, (2, slice(32, 64))),
        ("e2m1fn per 16 e4m3fn", 1, (2, slice(32, 48))),
        ("int8 per 16", 0, (slice(0, 16), 40)),
    ],
    keep={"mxfp8_e5m2", "e4m3fn per 16x16 fp32"},
)
def test_only_the_own_block_becomes_nan(name: str, axis: int, own: tuple[int | slice, ...], rounding: str) -> None:
    x = torch.randn(70, 100, generator=torch.Generator().manual_seed(0))
    spec, key = any_spec(name, rounding), new_key()
    usual = rounded_blocks(x, spec, axis, None, key)  # type: ignore[arg-type]
    for value in (INF, -INF, NAN):
        x[2, 40] = value
        rounded = rounded_blocks(x, spec, axis, None, key)  # type: ignore[arg-type]
        assert rounded[own].isnan().all()
        rounded[own] = usual[own]
        assert torch.equal(rounded, usual)


def test_a_scale_of_the_tensor_is_nan_for_all() -> None:
    x = torch.randn(70, 100)
    x[69, 99] = INF
    for name in ("nvfp4", "e4m3fn per tensor fp32", "e4m3fn per tensor"):
        assert round_to(x, name).isnan().all()
        assert scales_of(x, name).isnan().all()


@pytest.mark.parametrize("axis", [1, 0])
@tiers.parametrize(
    "name",
    [
        "mxfp8_e4m3",
        "mxint8",
        "nvfp4",
        "e4m3fn per row fp32",
        "e4m3fn per tensor fp32",
        "e4m3fn per 8x8",
        "nf4 per 64 fp32",
    ],
    keep={"mxfp8_e4m3", "e4m3fn per tensor fp32"},
)
def test_a_mask_stays_and_no_scale_follows_from_it(name: str, axis: int) -> None:
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0))
    zeros, at = x.clone(), ([0, 3, 3, 3, 39], [0, 5, 6, 7, 69])
    x[at], zeros[at] = torch.tensor([MASK, -MASK, MASK, -MASK, MASK]), 0.0
    x[7], zeros[7] = MASK, 0.0
    expected = round_to(zeros, name, axis=axis)
    expected[at], expected[7] = x[at], MASK
    assert torch.equal(round_to(x, name, axis=axis), expected)
    assert torch.equal(scales_of(x, name, axis=axis), scales_of(zeros, name, axis=axis))


def test_the_number_below_a_mask_is_a_number() -> None:
    x = torch.tensor([MASK]).nextafter(torch.zeros(1))
    assert round_to(x, "mxfp8_e4m3") == 448 * 2.0**119  # at the largest scale at which a float32 holds every element


def test_a_mask_beside_an_infinity_is_nan_as_the_standard_has_it() -> None:
    x = torch.tensor([[MASK, INF, -MASK, 1.0]])
    assert round_to(x, "mxfp4").isnan().all()
    assert round_to(x, "e4m3fn per row fp32 saturate").tolist() == [[MASK, 448.0, -MASK, 1.0]]


def test_nan_stays_alone_where_an_infinity_saturates() -> None:
    x = torch.tensor([[NAN, 1.0, -2.0, 96.0]])
    for name in ("e4m3fn per row fp32", "mxfp4", "nvfp4", "int8 per tensor fp32", "nf4 per 64 fp32"):
        f = as_format(name)
        saturating = BlockFormat(f.element, f.block, f.scale, f.scale_rule, f.tensor_scale, nonfinite="saturate")  # type: ignore[union-attr]
        rounded = round_to(x, saturating)
        assert rounded[0, 0].isnan()
        assert torch.equal(rounded[0, 1:], round_to(torch.tensor([[0.0, 1.0, -2.0, 96.0]]), name)[0, 1:])


def test_codes_of_a_block_that_is_nan() -> None:
    x = torch.tensor([[INF, 1.0, -2.0, 0.0]])
    scale = scales_of(x, "mxfp8_e4m3")
    assert encode(scale, "e8m0fnu").tolist() == [[0xFF]]
    assert encode(scales_of(x, "e2m1fn per 4 e4m3fn"), "e4m3fn").tolist() == [[0x7F]]
    assert scales_of(x, "e4m3fn per row fp32").isnan().all()
    assert encode((x / scale).nan_to_num(0.0), "e2m1fn").tolist() == [[0] * 4]
    assert encode(scales_of(x, "e4m3fn per 32 ceil saturate"), "e8m0fnu").tolist() == [[0xFE]]


DELAYED = [  # rounded at a scale of 2
    ("e4m3fn per tensor fp32 delayed", None, [NAN, NAN, NAN, MASK, 224.0, 2.0]),
    ("e5m2 per tensor fp32 delayed", None, [NAN, NAN, NAN, MASK, 28672.0, 2.0]),
    ("e5m2 per tensor fp32 delayed", "inf", [INF, -INF, NAN, MASK, INF, 2.0]),
    ("e2m1fn per tensor fp32 delayed", None, [3.0, -3.0, NAN, MASK, 3.0, 2.0]),
    ("e4m3fn per tensor fp32 delayed saturate", None, [224.0, -224.0, NAN, MASK, 224.0, 2.0]),
]


def test_under_delayed_scaling_each_element_is_on_its_own() -> None:
    x = torch.tensor([INF, -INF, NAN, MASK, 1e9, 2.0])
    for name, overflow, expected in DELAYED:
        spec = any_spec(name, overflow=overflow)
        for many in (x, x.repeat(20_000)):  # on one thread and on several
            rounded = rounded_blocks(many, spec, scale=torch.tensor(2.0))  # type: ignore[arg-type]
            assert same(rounded, torch.tensor(expected).repeat(len(many) // len(x)))


def test_an_amax_of_delayed_scaling_knows_no_mask_and_keeps_its_rule() -> None:
    model = quantize(nn.Linear(4, 1, bias=False), Policy(products=Products(fprop=("e4m3fn per tensor delayed", None))))
    for largest in (-MASK, 8.0, INF):
        model(torch.tensor([[1.0, 2.0, -4.0, largest]]))
    amaxes = fpsim.scaling_state(model)[":linear fprop.x"]
    assert amaxes["amaxes"][-2:].tolist() == [4.0, 8.0]
    assert amaxes["pending"] == INF
    assert amaxes["scale"] == 448 / 8


def test_it_is_the_same_under_autograd_vmap_and_the_compiler() -> None:
    x = torch.randn(3, 4, 40)
    x[0, 1, 2], x[1, 3, 39], x[2, 0, 0] = INF, NAN, -MASK
    for name in ("mxfp8_e4m3", "e4m3fn per row fp32", "e4m3fn per 128 ceil saturate"):
        expected = round_to(x, name)
        assert same(torch.func.vmap(lambda s, name=name: round_to(s, name))(x), expected)
        compiled = torch.compile(lambda t, name=name: round_to(t, name) + 0, backend="eager", fullgraph=True)
        assert same(compiled(x), expected + 0)
        leaf = x.clone().requires_grad_()
        rounded = round_to(leaf, name)
        rounded.backward(torch.ones_like(x))
        assert same(rounded.detach(), expected)
        assert torch.equal(leaf.grad, torch.ones_like(x))  # type: ignore[arg-type]


def test_threads_change_nothing() -> None:
    x = torch.randn(700, 700, generator=torch.Generator().manual_seed(0))
    x[699, 699], x[0, 0] = -MASK, 40.0
    infinite = x.index_fill(1, torch.tensor([650]), INF)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            rounded, all_nan = (round_to(t, "e4m3fn per tensor fp32") for t in (x, infinite))
        finally:
            torch.set_num_threads(before)
        assert rounded[699, 699] == -MASK
        assert rounded[0, 0] == 40.0  # 448 / 40 and back
        assert all_nan.isnan().all()


# In a model


def loss_scale_after_an_overflow(fmt: str | Policy, steps: int = 3) -> tuple[float, list[bool]]:
    """The loss scale after steps that begin at 2**26, and whether each changed the weights. The model has no bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    policy = fmt
    if isinstance(fmt, str):
        policy = Policy(weight="fp16", activation="fp16", error="fp16", products=Products.all(fmt))
    model = quantize(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    scaler = ada_loss.GradScaler(init_scale=2.0**26)
    moved = []
    for _ in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(32, 64)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)))
    return scaler.get_scale(), moved


@tiers.parametrize(
    "name",
    [
        "mxfp8_e4m3",
        "mxfp4",
        "nvfp4",
        "e4m3fn per tensor fp32",
        "e4m3fn per row fp32",
        "e4m3fn per 16x16",
        "int8 per 32",
    ],
    keep={"mxfp8_e4m3", "nvfp4", "e4m3fn per tensor fp32"},
)
def test_a_loss_scale_that_overflows_is_lowered(name: str) -> None:
    assert loss_scale_after_an_overflow(name) == (2.0**23, [False] * 3)


def test_fp16_alone_lowers_it_as_much() -> None:
    assert loss_scale_after_an_overflow(Policy(weight="fp16", activation="fp16", error="fp16")) == (
        2.0**23,
        [False] * 3,
    )


def test_where_an_infinity_saturates_the_overflow_is_hidden() -> None:
    """As in TransformerEngine: recipes with a scale of 1."""
    assert loss_scale_after_an_overflow("e5m2 per tensor fp32 saturate")[0] == 2.0**26


def test_a_recipe_has_the_rule_of_its_library() -> None:
    rules = {
        row.name: {
            operand.fmt.nonfinite
            for pair in (products.fprop, products.dgrad, products.wgrad)
            for operand in pair
            if operand is not None and isinstance(operand.fmt, BlockFormat)
        }
        for row in fpsim.recipes()
        if (products := fpsim.recipe(row.name).products) is not None
    }
    of_te = {name: {"saturate"} for name in ("fp8_delayed", "fp8_current", "fp8_tile", "mxfp8", "nvfp4")}
    of_standard = {name: {"nan"} for name in ("fp8_row", "mxfp4_sr", "qat_mxfp4", "qat_nvfp4", "qat_int4")}
    # functions, and operands without shared scales
    assert rules == {**of_te, **of_standard, "bitnet_b158": set(), "fp16_gfx90a": set()}
    sources = {row.name for row in fpsim.recipes() if "TransformerEngine" in row.source}
    assert sources == {*of_te}


# What is told of it


def test_a_tally_counts_what_was_lost_with_it() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = INF
    tally = fpsim.tally(x, "mxfp8_e4m3")
    assert (tally.nonfinite, tally.overflow, tally.blocks, tally.zero_blocks) == (1, 31, 2, 0)
    assert fpsim.tally(x, "nvfp4").overflow == 63
    hidden = fpsim.tally(x, "e4m3fn per tensor fp32 saturate")
    assert (hidden.nonfinite, hidden.overflow, hidden.underflow) == (1, 0, 0)
    mx = fpsim.tally(x, "e4m3fn per 32 ceil saturate")
    assert (mx.nonfinite, mx.underflow, mx.scale_overflow) == (1, 31, 1)


def test_a_tally_counts_a_mask_for_nothing() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = -MASK
    for name in ("mxfp8_e4m3", "nvfp4", "e4m3fn per tensor fp32"):
        tally = fpsim.tally(x, name)
        assert (tally.overflow, tally.underflow, tally.nonfinite, tally.exact) == (0, 0, 0, 32)
    assert fpsim.tally(torch.full((1, 32), MASK), "mxfp4").zero_blocks == 1


class Overflowing(nn.Module):
    """Two layers around an exponential that overflows float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.exp(self.up(x) * 200))


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "recipe:fp8_current"])
def test_diagnose_why_and_a_recording_name_what_a_block_makes_nan_or_hides(fmt: str) -> None:
    torch.manual_seed(0)
    model, x = quantize(Overflowing(), fmt), torch.randn(8, 32)

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert bool(step().isfinite()) == (fmt == "recipe:fp8_current")
    broken = fpsim.diagnose(model, step)
    assert (broken.cause["site"], broken.cause["kind"]) == (":exp", "inf")
    roles = {row["role"] for row in broken if row["site"] == "down:linear"}
    # at a scale of 1 the finite numbers saturate too; that a block becomes NaN is no event of its own
    assert roles == {"activation", "error"} if fmt == "mxfp8_e4m3" else "fprop.x" in roles
    assert str(fpsim.why(model, step)).startswith("Overflow at :exp, activation")
    with fpsim.record(model) as recording:
        step()
    rows = {row["role"]: row for row in recording.rows() if row["site"] == "down:linear"}
    assert rows["fprop.x"]["nonfinite"] > 0


# Names


def test_a_format_of_the_other_rule_has_a_name() -> None:
    more = "e4m3fn per tensor fp32 delayed saturate", "e2m1fn per 32 saturate at 0.75", "nf4 per 64 fp32 saturate"
    for name in (*SATURATING, *more, "int8 per row fp32 saturate"):
        f = as_format(name)
        assert isinstance(f, BlockFormat)
        assert f.nonfinite == "saturate"
        assert str(f) == name
        assert as_format(str(f)) == as_format(repr(f)) == f
        assert f != as_format(name.replace(" saturate", ""))


def test_the_words_of_a_format_of_the_standards_rule_are_what_they_were() -> None:
    assert "nonfinite" not in repr(as_format("mxfp4"))
    assert "saturate" not in str(Operand("nvfp4"))


def test_an_unknown_rule_is_refused() -> None:
    for value in ("inf", "", None, True):
        with pytest.raises(ValueError, match=r"Unknown nonfinite .* Known: nan, saturate"):
            BlockFormat("e4m3fn", 32, nonfinite=value)  # type: ignore[arg-type]
