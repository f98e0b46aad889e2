"""What a forward asks for in float32 is in float32, and what it asks for in the model's dtype is in the format.

The patterns are in dtype_patterns.py. What each asks for is what native code makes of it.
"""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from dtype_patterns import model_of, patterns
from programs import NATIVE, differs
from torch import Tensor, nn

import fpsim

PATTERNS = patterns()
FORMATS = pytest.mark.parametrize("fmt", NATIVE)
MOST_THAT_WARN = 10
# Patterns that may be read both ways. The emulation warns, says where, and what to write instead.
WARN: frozenset[str] = frozenset()


def natively(source: str, fmt: str) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A pattern's module, its inputs, and what it gives natively: the result, and what computes on with it."""
    torch.manual_seed(0)
    module = model_of(source).to(NATIVE[fmt])
    inputs = [torch.randn(4, 4).to(NATIVE[fmt]) for _ in range(2)]
    return module, inputs, [*module(*inputs)]


def both_ways(source: str, fmt: str) -> tuple[list[bool], list[str]]:
    """Whether the result of a pattern differs, and what computes on with it; and what the emulation warned of."""
    module, inputs, native = natively(source, fmt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        emulated = [*fpsim.quantize(module.float(), fmt)(*(x.float() for x in inputs))]
    wrong = [differs(a, b, fmt, is_rounded=False) for a, b in zip(native, emulated, strict=True)]
    return wrong, [str(warning.message) for warning in caught]


@FORMATS
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in WARN])
def test_a_pattern_asks_for_what_it_asks_natively_and_warns_of_nothing(name: str, fmt: str) -> None:
    assert both_ways(PATTERNS[name], fmt) == ([False, False], [])


@FORMATS
@pytest.mark.parametrize("name", sorted(WARN))
def test_a_pattern_that_can_be_read_both_ways_warns_once_and_says_where(name: str, fmt: str) -> None:
    _, warned = both_ways(PATTERNS[name], fmt)
    assert len(warned) == 1
    assert "<program" in warned[0]
    assert "line" in warned[0]


def test_few_patterns_can_be_read_both_ways() -> None:
    assert len(WARN) <= MOST_THAT_WARN
    assert set(PATTERNS) >= WARN


@FORMATS
def test_the_patterns_ask_for_both(fmt: str) -> None:
    asked = Counter(natively(source, fmt)[2][0].dtype for source in PATTERNS.values())
    assert asked[torch.float32] + asked[torch.float64] >= 79
    assert asked[NATIVE[fmt]] >= 26


@pytest.mark.parametrize("norm", [True, False])
def test_a_float64_model_casts_back_to_the_format_as_one_of_float32_does(norm: bool) -> None:
    """There `x.dtype` is float64, which is the container; float64 in words is no cast to the format."""

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not norm:
                return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)
            y = x.to(torch.float32)
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    class Wide(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1, dtype=torch.float32).to(torch.float64)

    def result(block: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), block).to(dtype)
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(4))
        return fpsim.quantize(model, "bf16")(torch.tensor([[0.1, 1.0, -2.0, 0.7]], dtype=dtype)).detach()

    found = result(Block(), torch.float64)
    assert found.dtype is torch.float64
    assert torch.equal(found, result(Block(), torch.float32).double())
    assert torch.equal(found, found.bfloat16().double())
    wide = result(Wide(), torch.float64)
    assert not torch.equal(wide, wide.bfloat16().double())
