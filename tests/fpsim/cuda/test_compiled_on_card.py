"""What inductor makes of a rounding and of a quantised model for a card: the bits that the kernels give there."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from format_cases import same
from torch import Tensor, nn

import fpsim
from fpsim.formats.blocks import as_element
from fpsim.kernels.core import ROUNDINGS
from fpsim.tensors.expressions import round_traced
from fpsim.tensors.launch import rounded
from fpsim.tensors.spec import rounding_spec
from fpsim.tensors.verify import patterns

pytestmark = pytest.mark.gpu
FORMATS = [*fpsim.CATALOGUE, "uint8", "int4"]


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if r != "stochastic"])
def test_a_compiled_rounding_gives_the_bits_of_the_cpu(rounding: str) -> None:
    x = patterns()
    specs = [rounding_spec(as_element(fmt), rounding) for fmt in FORMATS]

    @torch._dynamo.nonstrict_trace  # as the emulation itself is traced
    def each(x: Tensor) -> list[Tensor]:
        return [round_traced(x, spec, True) for spec in specs]

    found = torch.compile(lambda x: each(x), fullgraph=True, dynamic=False)(x.cuda())
    for spec, got in zip(specs, found, strict=True):
        assert same(got.cpu(), rounded(x, spec, keep_masks=True)), spec


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "e4m3fn", "int8"])
def test_compiled_noise_rounds_up_as_often_as_it_should(fmt: str) -> None:
    low, high = (fpsim.round_to(torch.tensor(1.3), fmt, rule).item() for rule in ("toward_zero", "up"))
    x = torch.full((1 << 16,), 1.3, device="cuda")
    program = torch.compile(lambda x: fpsim.round_to(x, fmt, "stochastic"), fullgraph=True)
    first, second = program(x), program(x)
    assert not torch.equal(first, second)
    share, expected = (first == high).double().mean().item(), (torch.tensor(1.3).item() - low) / (high - low)
    assert set(first.tolist()) == {low, high}
    assert abs(share - expected) < 5 * math.sqrt(0.25 / x.numel())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.outer(nn.functional.gelu(self.inner(x))))


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "e4m3fn", "recipe:fp8_current", "recipe:mxfp8", "recipe:nvfp4"])
def test_a_compiled_step_differs_from_the_eager_one_by_less_than_half_of_what_rounding_changes(fmt: str) -> None:
    torch.manual_seed(0)
    plain, x = Small().cuda(), torch.randn(32, 64, device="cuda")
    model = fpsim.quantize(plain, fmt)
    results = []
    for run in (model, torch.compile(copy.deepcopy(model), fullgraph=True), plain):
        fpsim.manual_seed(1)
        out = run(x)
        (out * torch.linspace(-1, 1, 64, device="cuda")).sum().backward()
        results.append([out.detach(), *(p.grad for p in run.parameters())])
    for eager, compiled, exact in zip(*results, strict=True):
        assert (eager - compiled).norm() < 0.5 * (eager - exact).norm()
