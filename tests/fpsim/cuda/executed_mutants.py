"""Whether a wrong instruction would be found: kernels with one instruction changed, run as the right ones are.

A few changes nobody can find, because no input shows them: of a comparison with what never occurs, or of an operation
on bits that are cut off later. Run by test_executed_others.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from card_inputs import borders, everywhere, patterns
from emulated_card import EmulatedCard, bind, ptx_of
from executed_kernels import counted, gathered, numbers
from executed_rounding import ends, on_card, specs_of
from kernel_cases import MASK, block_spec, densely_rounded_by
from ptx_machine import Fault, Program

from fpsim import FloatFormat, as_format
from fpsim.compiling.card import CudaKernel
from fpsim.kernels import block_dense, moments
from fpsim.kernels.core import ROUNDINGS
from fpsim.kernels.round import ALIGNED, HAS_KEY, NO_MASKS, cuda_loop
from fpsim.tensors.spec import rounding_spec

MUTANTS, MAY_PASS = 10, 2
INSTEAD = [
    (r"(?<![.\w])add\.", "sub."),
    (r"(?<![.\w])sub\.", "add."),
    (r"\band\.b", "or.b"),
    (r"\bor\.b", "xor.b"),
    (r"\bxor\.b", "and.b"),
    (r"\bshl\.b", "shr.u"),
    (r"\bshr\.u", "shl.b"),
    (r"\bshr\.s", "shr.u"),
    (r"(?<![.\w])min\.", "max."),
    (r"(?<![.\w])max\.", "min."),
    (r"setp\.(?:lt|gt)\.", "setp.eq."),
    (r"setp\.eq\.", "setp.ne."),
    (r"setp\.ne\.", "setp.eq."),
    (r"setp\.(?:ge|le)\.", "setp.lt."),
    (r"shf\.l\.", "shf.r."),
    (r"\bmul\.lo\.", "add."),
    (r"@(%p\d+)", r"@!\1"),
    (r"bar\.sync.*", ""),
]
IMMEDIATE = re.compile(r"(?<=, )-?\d+(?=[;,])")
CHOICES = re.compile(r"(selp\.\w+\s+%\w+, )([^,]+), ([^,]+),")


def changes_of(line: str) -> list[str]:
    """The line with another opcode, another number, or its choices exchanged."""
    found = [re.sub(old, new, line) for old, new in INSTEAD if re.search(old, line)]
    found += [IMMEDIATE.sub(lambda match: str(int(match.group()) + 1), line)] if IMMEDIATE.search(line) else []
    return found + ([CHOICES.sub(r"\1\3, \2,", line)] if CHOICES.search(line) else [])


def mutants(text: str, count: int) -> list[str]:
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("{"))
    places = [(i, change) for i in range(begin, len(lines)) for change in changes_of(lines[i])]
    return ["\n".join([*lines[:i], change, *lines[i + 1 :]]) for i, change in random.Random(0).sample(places, count)]


def roundings(rule: int, shape: int) -> list[np.ndarray]:
    """Results of a kernel for all its formats, at scales, where the memory is aligned and where not."""
    found, generator = [], np.random.default_rng(0)
    for spec in specs_of(rule, shape, 32)[:6]:
        assert isinstance(spec.fmt, FloatFormat)
        for overflow, scale, flags in (("inf", 0, ALIGNED), ("saturate", 7, HAS_KEY), (None, -130, ALIGNED)):
            x = np.concatenate([everywhere(borders(spec.fmt, 32)), patterns(spec.fmt, 32, 30_000, generator)])
            try:
                other = rounding_spec(spec.fmt, ROUNDINGS[rule], overflow)
            except ValueError:  # not of every format
                other = spec
            found += [on_card(part, other, scale, flags=flags) for part in (x, *ends(x))]
    return found


def moments_found() -> list[np.ndarray]:
    x = numbers(40_001, torch.float32)
    some = torch.tensor([1.0, -1, 0, -0.0, 2.0**-149, -(2.0**-130), 2.0**120, -(2.0**100), 3])
    parts = [
        x,
        x[1:],
        x[4:600],
        x.abs()[:3],
        -x.abs()[8:9],
        0 * x,
        some.repeat(300),
        torch.tensor([1.0, torch.nan]),
    ]
    found = [gathered(part).numpy() for part in (*parts, *some[:, None])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "MOMENTS_BLOCKS", 270)  # more than the last block has threads to join them
        return [*found, gathered(x.repeat(8)).numpy()]


def counts_found() -> list[np.ndarray]:
    words = patterns(as_format("fp16"), 64, 40_001, np.random.default_rng(0))
    infinity, one = 0x7FF << 52, 0x3FF << 52
    edges = everywhere(np.array([0, 1 << 63, 1, infinity - 1, infinity, infinity + 1, one, (1 << 52) - 1], np.uint64))
    parts = (words, words[1:], words[:3], edges, edges[:1])
    return [counted(part, False).numpy() for part in parts]


def blocks_found() -> list[np.ndarray]:
    found, spec = [], block_spec("nvfp4")
    for offset in (0, 1):
        x = numbers(32 * 300, torch.float32, offset)
        x *= torch.exp2(-torch.linspace(0, 30, 600)).repeat_interleave(16)  # scales of all sizes beneath the tensor's
        x.clamp_(-300, 300)
        x[::97], x[5 * 32 : 7 * 32] = torch.tensor([-MASK, -1.0, MASK])[torch.arange(99) % 3], 0.0
        x[7] = 1.0
        for values in (x.clone(), ties(), torch.full_like(x, torch.inf)):
            rounded = densely_rounded_by(EmulatedCard(), x.copy_(values), spec, has_key=False)
            found += [rounded.y.numpy(), rounded.scales.numpy()]
    return found


def ties() -> torch.Tensor:
    """600 blocks for nvfp4: the largest element and what is halfway between two, each at each place of a block."""
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    block = torch.cat([halfway, -halfway, torch.tensor([6.0, 0.5])])
    scales = torch.exp2(torch.arange(600) % 14 - 5.0)
    scales[0] = 448  # of the largest number of all, so that the tensor's scale is 1
    return torch.stack([block.roll(i) * scale for i, scale in enumerate(scales)]).flatten()


# made as the launch makes them, which keeps one kernel for each of these words
CASES: dict[str, tuple[Callable[[], CudaKernel], Callable[[], list[np.ndarray]]]] = {
    "nearest_even": (lambda: cuda_loop(0, 1, 32, NO_MASKS), lambda: roundings(0, 1)),
    "stochastic": (lambda: cuda_loop(6, 4, 32, NO_MASKS), lambda: roundings(6, 4)),
    "moments": (lambda: moments.cuda_moments(4, False, False), moments_found),
    "blocks": (lambda: block_dense.cuda_rounding(0, 1, 1, 3, 16), blocks_found),
    "binades": (lambda: moments.cuda_exponents(8, False), counts_found),
}


def survivors(name: str, count: int) -> list[str]:
    make, run = CASES[name]
    kernel, found = make(), []
    text = ptx_of(kernel)
    bind(kernel, Program(text))
    wanted = [array.tobytes() for array in run()]
    for mutant in mutants(text, count):
        bind(kernel, Program(mutant))
        try:
            if [array.tobytes() for array in run()] == wanted:
                pairs = zip(text.splitlines(), mutant.splitlines(), strict=True)
                found.append(next(f"{a.strip()} -> {b.strip()}" for a, b in pairs if a != b))
        except Fault:
            pass
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_one_instruction_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "MOMENTS_BLOCKS", 3)  # few, so that each thread goes round its loops
    assert len(survivors(name, MUTANTS)) <= MAY_PASS
