"""Rounding as a compiler sees it gives the bits of the kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import torch
from inductor import needs_inductor
from torch import Tensor, nn

import fpsim
from fpsim.formats.blocks import as_element
from fpsim.formats.floats import CATALOGUE
from fpsim.kernels.codebooks import any_plan
from fpsim.kernels.core import ROUNDINGS
from fpsim.tensors.expressions import round_by_expression, round_traced
from fpsim.tensors.launch import rounded
from fpsim.tensors.spec import rounding_spec


def patterns(fmt: str) -> Tensor:
    """Random patterns, and each binade's borders and ties at every place of the significand."""
    generator = torch.Generator().manual_seed(len(fmt))
    fractions = {0, 1 << 22, (1 << 22) + 1, (1 << 23) - 1} | {
        (odd << k) + d for k in range(22) for odd in (1, 3) for d in (-1, 0, 1)
    }
    borders = torch.arange(256)[:, None] * (1 << 23) + torch.tensor(sorted(fractions))
    borders = borders.flatten().int()
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).int()
    return torch.cat([random, borders, borders | -(1 << 31)]).view(torch.float32)


FORMATS = [*CATALOGUE, "e3m0", "e4m12", "uint8", "int4"]


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if r != "stochastic"])
@tiers.parametrize("fmt", FORMATS, keep=tiers.every(3))
def test_each_pattern_becomes_what_the_kernels_make_of_it(fmt: str, rounding: str) -> None:
    x = patterns(fmt)
    for overflow in ("inf", "nan", "saturate"):
        try:
            spec = rounding_spec(as_element(fmt), rounding, overflow)
        except ValueError:  # the format has no such value
            continue
        found, expected = round_traced(x, spec), rounded(x, spec)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_containers_too(dtype: torch.dtype) -> None:
    x = patterns("e4m3fn").to(dtype)
    spec = rounding_spec("e4m3fn")
    found, expected = round_traced(x, spec), rounded(x, spec)
    assert torch.equal(found.nan_to_num(77.0), expected.nan_to_num(77.0))
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("fmt", ["e4m3fn", "fp16", "e2m1"])
def test_masks_stay(fmt: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, -math.inf, math.inf, 1.06, -0.0])
    spec = rounding_spec(fmt)
    for keep_infinity in (False, True):
        found = round_traced(x, spec, True, keep_infinity)
        assert torch.equal(found, rounded(x, spec, keep_masks=True, keep_infinity=keep_infinity))
        assert found[:2].tolist() == [largest, -largest]


@tiers.parametrize("fmt", ["bf16", "fp16", "e4m3fn", "int8"], keep={"fp16"})
def test_noise_rounds_up_as_often_as_it_should(fmt: str) -> None:
    spec = rounding_spec(fmt, "stochastic")
    low = rounded(torch.tensor(1.3), rounding_spec(fmt, "toward_zero")).item()
    high = rounded(torch.tensor(1.3), rounding_spec(fmt, "up")).item()
    torch.manual_seed(0)
    n = 1 << 16
    plan = any_plan(spec.fmt, spec.rounding, spec.overflow, spec.random_bits, 32, spec.variant)
    found = round_by_expression(torch.full((n,), 1.3), plan, None)  # as on a card
    assert set(found.unique().tolist()) == {low, high}
    share, expected = (found == high).double().mean().item(), (torch.tensor(1.3).item() - low) / (high - low)
    assert abs(share - expected) < 5 * math.sqrt(0.25 / n)  # five standard deviations of a mean of n, at most


def test_noise_on_the_cpu_is_that_of_the_kernels() -> None:
    x, spec = torch.randn(1000), rounding_spec("e4m3fn", "stochastic")
    torch.manual_seed(0)
    found = round_traced(x, spec, keep_masks=True)
    torch.manual_seed(0)
    assert torch.equal(found, rounded(x, spec, keep_masks=True))


def test_what_has_no_expression_is_rounded_by_the_kernels() -> None:
    x = patterns("e8m0")
    spec = rounding_spec("e8m0fnu", "down")
    found, expected = round_traced(x, spec), rounded(x, spec)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.full
def test_inductor_writes_the_same_bits() -> None:
    """All shapes of formats, in one program: its C++ is compiled once."""
    specs = [
        rounding_spec(fmt, rounding)
        for fmt, rounding in (
            ("bf16", "nearest_even"), ("fp16", "nearest_even"), ("e4m3fn", "nearest_away"), ("e5m2", "up"),
            ("e4m3fnuz", "down"), ("e2m1", "to_odd"), ("uint8", "nearest_even"), ("tf32", "toward_zero"),
        )
    ]  # fmt: skip
    x = patterns("inductor")

    @torch._dynamo.nonstrict_trace  # as the emulation itself is traced
    def each(x: Tensor) -> list[Tensor]:
        return [round_traced(x, spec, True) for spec in specs] + [round_traced(x * 1.1, spec) for spec in specs[:2]]

    program = torch.compile(lambda x: each(x), fullgraph=True, dynamic=False)
    found = program(x)
    for spec, got in zip(specs, found, strict=False):
        expected = rounded(x, spec, keep_masks=True)
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), spec
    for spec, got in zip(specs, found[len(specs) :], strict=False):  # no product is taken into the rounding
        expected = rounded(x * 1.1, spec)
        assert torch.equal(got.nan_to_num(77.0), expected.nan_to_num(77.0)), spec


@needs_inductor
@pytest.mark.parametrize("size", [1, 7, 16, 1000], ids=str)
def test_inductor_keeps_the_casts_of_float16(size: int) -> None:
    """Inductor drops casts to a smaller dtype where it may compute in float32; what is left of a vector is a loop."""
    spec = rounding_spec("fp16")

    @torch._dynamo.nonstrict_trace
    def each(x: Tensor) -> list[Tensor]:
        twice = round_traced(round_traced(x, spec, True) * 1.5, spec)
        return [round_traced(x, spec, True), round_traced(x, spec), twice, round_traced(x.half(), spec).float()]

    program = torch.compile(lambda x: each(x), fullgraph=True, dynamic=False)
    borders = [3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan, 65519.99, 65520.0, 2.0**-25, 2.0**-24, -0.0]
    x = torch.cat([torch.tensor(borders), patterns("fp16")])[:size]
    expected = [
        rounded(x, spec, keep_masks=True),
        rounded(x, spec),
        rounded(rounded(x, spec, keep_masks=True) * 1.5, spec),
        x.half().float(),
    ]
    for found, wanted in zip(program(x), expected, strict=True):
        assert torch.equal(found.nan_to_num(77.0), wanted.nan_to_num(77.0))
    for found, wanted in zip(program(x)[:2], expected, strict=False):
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))  # payloads of NaN too


@needs_inductor
def test_a_cast_of_the_program_itself_leaves_the_rounding_in_it() -> None:
    """Where inductor has seen another cast of the same number, it takes the number for what the cast gives back."""
    spec = rounding_spec("fp16")
    each = torch._dynamo.nonstrict_trace(lambda x: round_traced(x, spec))
    program = torch.compile(lambda x: (x.half(), each(x), x.half() + 1), fullgraph=True, dynamic=False)
    x = patterns("fp16")[:1003]
    for found in program(x)[:2]:
        assert torch.equal(found.float().nan_to_num(77.0), x.half().float().nan_to_num(77.0))


@needs_inductor
def test_the_gradient_of_a_cast_is_that_of_a_rounding() -> None:
    torch.manual_seed(0)
    model = fpsim.quantize(nn.Sequential(nn.Linear(9, 17), nn.GELU(), nn.Linear(17, 3)), "fp16")
    x = torch.randn(5, 9) * 100
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager"), torch.compile(model, fullgraph=True)):
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        for found, wanted in zip(other, gradients[0], strict=True):
            assert torch.equal(found, wanted)


OTHER_VECTORS = """
import torch
from fpsim.tensors.expressions import round_traced
from fpsim.tensors.launch import rounded
from fpsim.tensors.spec import rounding_spec

specs = [rounding_spec(f, r) for f in ("bf16", "e4m3fn", "e5m7", "e4m3fnuz") for r in RULES]
specs += [rounding_spec(f, "nearest_even") for f in ("cb16", "int8", "e2m1fn", "dlfloat16")]
ties = torch.arange(4096) / 2048
x = torch.cat([torch.randn(4096), ties + 1, -ties, torch.tensor([65520.0, 464])])


@torch._dynamo.nonstrict_trace
def each(x):
    return [round_traced(x, spec) for spec in specs]


for spec, found in zip(specs, torch.compile(lambda x: each(x), fullgraph=True)(x)):
    print(spec, int((found != rounded(x, spec)).sum()))
"""


@needs_inductor
@pytest.mark.full
def test_inductor_has_the_bits_of_the_kernels_on_other_processors(tmp_path: Path) -> None:
    """With AVX2 alone, as most have it: inductor writes other code for it, and has a cache of its own here."""
    rules = "nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    code = OTHER_VECTORS.replace("RULES", repr(rules))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 * len(rules) + 4
    assert not [line for line in lines if not line.endswith(" 0")]
