"""On a card the emulation computes what torch computes there in bfloat16 and float16, whose kernels are not the CPU's.

Where a kernel of torch has a number of Python in the tensor's dtype, and where in float32, was read off a card.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpsim

pytestmark = pytest.mark.gpu
NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = pytest.mark.parametrize("fmt", NATIVE)
NUMBERS = [0.3, 1.1, 0.7, 2.3, 0.01, 3.3]  # none is a number of either format


def in_a_list(write: Callable[..., None], x: Tensor, s: object) -> Tensor:
    written = [x * 1.0]
    write(written, s)
    return written[0]


WITH_A_NUMBER: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "x + s": lambda x, y, s: x + s,
    "s - x": lambda x, y, s: s - x,
    "x * s": lambda x, y, s: x * s,
    "s / x": lambda x, y, s: s / x,
    "x // s": lambda x, y, s: x // s,
    "add alpha": lambda x, y, s: torch.add(x, y, alpha=s),
    "add_ alpha": lambda x, y, s: (x * 1.0).add_(y, alpha=s),
    "addcmul": lambda x, y, s: torch.addcmul(x, y, y, value=s),
    "addcdiv": lambda x, y, s: torch.addcdiv(x, y, y, value=s),
    "lerp": lambda x, y, s: torch.lerp(x, y, s),
    "clamp": lambda x, y, s: x.clamp(-s, s),
    "hardshrink": lambda x, y, s: F.hardshrink(x, s),
    "softshrink": lambda x, y, s: F.softshrink(x, s),
    "threshold": lambda x, y, s: F.threshold(x, s, 0.1),
    "threshold_": lambda x, y, s: F.threshold_(x * 1.0, s, 0.1),
    "elu": lambda x, y, s: F.elu(x, s),
    "leaky_relu": lambda x, y, s: F.leaky_relu(x, s),
    "x % s": lambda x, y, s: x % s,
    "fmod": lambda x, y, s: torch.fmod(x, s),
    "where": lambda x, y, s: torch.where(x > s, x, s),
    "equal": lambda x, y, s: torch.where(x == s, x, y),
    "foreach add_": lambda x, y, s: in_a_list(torch._foreach_add_, x, s),
    "foreach mul_": lambda x, y, s: in_a_list(torch._foreach_mul_, x, s),
    "foreach div_": lambda x, y, s: in_a_list(torch._foreach_div_, x, s),
}
WITH_A_TENSOR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + t": lambda x, t: x + t,
    "t - x": lambda x, t: t - x,
    "x * t": lambda x, t: x * t,
    "x / t": lambda x, t: x / t,
    "x *= t": lambda x, t: (x * 1.0).mul_(t),
    "maximum": torch.maximum,
    "pow": lambda x, t: x.abs() ** t,
    "addcmul": lambda x, t: torch.addcmul(x, x, t),
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "where": lambda x, t: torch.where(x > t, x, t),
}


class Calls(nn.Module):
    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)


def hold(run: Callable[[Tensor, Tensor], Tensor], fmt: str, number: float) -> None:
    torch.manual_seed(1)
    near = torch.tensor(number).to(NATIVE[fmt]).item()
    ties = torch.tensor([near, -near, 2 * near, 3 * near])
    x = torch.cat([torch.randn(252), ties]).to("cuda", NATIVE[fmt])
    y = torch.randn(256).to("cuda", NATIVE[fmt])
    emulated = fpsim.quantize(Calls(run), fmt)(x.float(), y.float())
    assert torch.equal(run(x, y).double().nan_to_num(77.0), emulated.double().nan_to_num(77.0))


@FORMATS
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", WITH_A_NUMBER)
def test_a_number_of_python_is_what_it_is_to_torchs_kernel(name: str, number: float, fmt: str) -> None:
    hold(lambda x, y: WITH_A_NUMBER[name](x, y, number), fmt, number)


@FORMATS
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", WITH_A_TENSOR)
def test_a_float32_tensor_without_dimensions_is_cast_before_torch_computes(name: str, number: float, fmt: str) -> None:
    hold(lambda x, y: WITH_A_TENSOR[name](x, torch.tensor(number, device=x.device)), fmt, number)


@FORMATS
def test_types_of_tensors_have_the_names_of_a_cards(fmt: str) -> None:
    named = []

    def run(x: Tensor, y: Tensor) -> Tensor:
        named.append(((x * 1.1).type(), x.float().type()))
        return (x * 1.1).type(x.type()) * 1.1 + x.float().type((y * 1.0).type()) * 1.1

    hold(run, fmt, 0.3)
    assert named[0] == named[1]
    hold(lambda x, y: x.abs().float().type(x.double().type()) * 1.0123, fmt, 0.3)


@FORMATS
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_is_that_of_torchs_own_kernels(kind: type[torch.optim.Optimizer], foreach: bool, fmt: str) -> None:
    torch.manual_seed(0)
    native = [nn.Parameter(torch.randn(8, 9, device="cuda").to(NATIVE[fmt])) for _ in range(3)]
    ours = [nn.Parameter(p.detach().float()) for p in native]
    optimizers = [kind(p, lr=0.03, foreach=foreach) for p in (native, ours)]
    fpsim.quantize_optimizer(optimizers[1], fpsim.Update(weight=fmt, arithmetic="torch"))
    for _ in range(4):
        for p, q in zip(native, ours, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(native, ours, strict=True):
            assert torch.equal(p.float(), q)


@FORMATS
@pytest.mark.parametrize("seed", [0, 1000, 2000])
def test_random_programs_equal_native_ones(seed: int, fmt: str) -> None:
    options = ["--count", "300", "--seed", str(seed), "--format", fmt, "--device", "cuda"]
    command = [sys.executable, str(Path(programs.__file__)), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\n0 of 300 programs differ" in "\n" + done.stdout, done.stdout[-4000:]
