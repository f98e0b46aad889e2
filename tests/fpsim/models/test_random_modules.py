"""Random modules take steps, plain and emulated, called in several ways, and the generator finds what is planted.

python tests/random_modules.py --count 10000
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_modules
import torch
from children import environment
from module_blocks import AROUND, LAYERS
from module_places import BUFFER_USES, PLACES, USES
from random_modules import PLAIN_FUNCTIONS, SIMPLE, Block, Blocks, Examined, Failure, native_difference, runs
from tiers import parametrize
from torch import Tensor, nn

SLICE = 10  # models of one case, in full
ROWS = [
    *(Block("use", use, "Own") for use in USES),
    *(Block("use", "matmul", place) for place in PLACES),
    *(Block("buffer", use, "Own") for use in BUFFER_USES),
    *(Block("function", name) for name in PLAIN_FUNCTIONS),
    *(Block("layer", name) for name in LAYERS),
    *(Block("around", name, inside=(SIMPLE,)) for name in AROUND),
]


@parametrize(
    ("first", "count"),
    [(1, 3), *((first, SLICE) for first in range(0, 4 * SLICE, SLICE))],
    keep=lambda first, count: count < SLICE,
)
def test_random_modules_compute_as_plain_ones_in_each_way_to_call_them(first: int, count: int) -> None:
    """In a process of its own: torch's compiler leaves a reference behind where a graph breaks."""
    command = [sys.executable, str(Path(random_modules.__file__)), "--count", str(count), "--seed", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 of {count} models differ" in done.stdout


def test_each_row_of_the_tables_runs_without_emulation() -> None:
    assert not [str(row) for row in ROWS if not runs(row, "eager")]


def test_a_model_has_the_same_numbers_wherever_its_tensors_lie() -> None:
    """Else the check of places would compare two models."""
    blocks = tuple(Block("use", "linear", place) for place in PLACES)
    deep, flat = (Examined(blocks, "bf16").trace("", is_flat=is_flat) for is_flat in (False, True))
    assert isinstance(deep, dict)
    assert isinstance(flat, dict)
    assert all(random_modules.equal(x, y) for x, y in zip(deep.values(), flat.values(), strict=True))


# Faults that are planted, each with the check that finds it

Fault = Callable[[nn.Module], Any]


def changed_output(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, out: out * (1 + 2**-20))


def lost_gradient(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0].detach(),))


def of_grandchildren(model: nn.Module) -> None:
    """Weights that lie deep are other ones."""
    for name, p in model.named_parameters():
        if name.endswith("a.b.0.w"):
            p.data.mul_(1.01)


def of_functional_calls(model: nn.Module) -> None:
    """Where parameters are replaced, others are used."""
    own = {id(p) for p in model.parameters()}
    model.register_forward_hook(
        lambda module, args, out: out if {id(p) for p in module.parameters()} <= own else out * 1.01
    )


def less_precise(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, out: out + out.detach() * 2**-5)


def refusing(model: nn.Module) -> None:
    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("planted")

    model.register_forward_pre_hook(refuse)


DEEP = (Block("use", "matmul", "OfGrandchild"), Block("function", "gelu"))
PLANTED: dict[str, tuple[Fault, str, Blocks]] = {
    "fp32 is not plain": (changed_output, "eager", (SIMPLE,)),
    "a gradient is lost": (lost_gradient, "eager", (SIMPLE,)),
    "the place in the tree counts": (of_grandchildren, "eager", DEEP[:1]),
    "unlike eager": (of_functional_calls, "functional_call", (SIMPLE,)),
    "farther than native": (less_precise, "eager", (SIMPLE,)),
    "off the grid": (changed_output, "eager", (SIMPLE,)),
    "raises": (refusing, "eager", (SIMPLE,)),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    def quantize(model: nn.Module, fmt: Any) -> nn.Module:
        model = copy.deepcopy(model)
        fault(model)
        return model

    monkeypatch.setattr(random_modules.fpsim, "quantize", quantize)


def differences(blocks: Blocks, check: str, way: str) -> list[random_modules.Difference]:
    found = [*native_difference(blocks, "bf16"), *Examined(blocks, "bf16").differences(way)]
    return [difference for difference in found if difference.check == check]


@parametrize("check", PLANTED, keep={*PLANTED} - {"farther than native"})  # that compares sixty inputs
def test_a_planted_fault_is_found_and_its_smallest_model(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, way, smallest = PLANTED[check]
    blocks = (Block("function", "layer_norm"), Block("around", "Residual", inside=DEEP))
    assert not differences(blocks, check, way)
    plant(monkeypatch, fault)
    found = differences(blocks, check, way)
    assert found
    shrunk = Failure(0, blocks, found[0]).shrunk()
    assert shrunk.blocks in (smallest, DEEP[1:]), shrunk
    assert shrunk.difference.check == check


def test_what_compiled_programs_and_transforms_give_for_no_gradient_is_zeros() -> None:
    assert not random_modules.has(None)
    assert not random_modules.has(torch.zeros(2))
    assert random_modules.has(Tensor([0.0, 1.0]))
