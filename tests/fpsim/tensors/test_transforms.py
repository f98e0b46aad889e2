"""Public functions of tensors under transforms of torch.func: tangents are right, or refused in words.

Rounding passes tangents on as it passes gradients; a Hadamard transform is linear, and its matrix is the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fpsim
from fpsim import Hadamard

X, V, W = (torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3))
KEY = torch.tensor(5)
BLOCKS = ("mxfp8_e4m3", "nvfp4", "e4m3fn per tensor", "e4m3fn per 8x8 ceil")

ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    **{fmt: lambda x, fmt=fmt: fpsim.round_to(x, fmt) for fmt in ("bf16", "nf4", "int8", *BLOCKS)},  # type: ignore[misc]
    **{
        f"{fmt} stochastic": lambda x, fmt=fmt: fpsim.round_to(x, fmt, "stochastic")  # type: ignore[misc]
        for fmt in ("e4m3fn", "mxfp4")
    },
    "in place": lambda x: fpsim.round_to_(x.clone(), "fp16"),
    "a Rounder": lambda x: fpsim.Rounder("bf16", "bf16")(x),
}
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    f"hadamard {signs}": lambda x, signs=signs: fpsim.hadamard(x, Hadamard(16, signs), key=KEY)  # type: ignore[misc]
    for signs in (None, "fixed", "random")
}
LINEAR = {**dict.fromkeys(ROUNDINGS, torch.eye(32)), **{name: f(torch.eye(32)) for name, f in TRANSFORMS.items()}}


def dual(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent


def compiled(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, fullgraph: bool = False) -> Any:
    torch._dynamo.reset()
    program = torch.compile(lambda x, v: torch.func.jvp(f, (x,), (v,))[1], backend="aot_eager", fullgraph=fullgraph)
    return program(x, v)


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Any:
    return torch.func.jacfwd(lambda t: f(x + t * v), randomness="different")(torch.zeros(()))


WAYS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "dual": dual,
    "dual that requires a gradient": lambda f, x, v: dual(f, x.clone().requires_grad_(), v),
    "jacfwd": jacobian,
    "jvp of vmap": lambda f, x, v: torch.func.jvp(torch.vmap(f, randomness="different"), (x[None],), (v[None],))[1][0],
    "forward over reverse": lambda f, x, v: torch.func.jvp(torch.func.grad(lambda x: (f(x) * f(v)).sum()), (x,), (v,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), [*itertools.product(LINEAR, WAYS)])
def test_tangents_are_those_of_the_gradient_that_passes(name: str, way: str) -> None:
    f, linear = {**ROUNDINGS, **TRANSFORMS}[name], LINEAR[name]
    found = WAYS[way](f, X, V)
    if way == "forward over reverse":  # the gradient of a linear map is constant
        found, tangent = found
        assert not tangent.any()
        assert torch.allclose(found, f(V) @ linear.mT, atol=32 * 2**-24 * 32) or "stochastic" in name
        return
    # float32 sums of 16 terms, in another order
    assert torch.allclose(found, V @ linear, rtol=0, atol=16 * 2**-24 * 16)


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_each_sample_are_those_of_a_loop(name: str) -> None:
    f = {**ROUNDINGS, **TRANSFORMS}[name]

    def loss(x: Tensor) -> Tensor:
        return (f(x) * torch.arange(32.0)).sum()

    found = torch.vmap(torch.func.grad(loss), randomness="different")(X[:, None])
    for gradient, x in zip(found, X[:, None], strict=True):
        assert torch.equal(gradient, torch.autograd.grad(loss(leaf := x.clone().requires_grad_()), leaf)[0])


REFUSED: dict[str, Callable[[], Any]] = {
    "matmul of a tangent": lambda: WAYS["jvp"](lambda x: fpsim.matmul(x, W.T, "fp16"), X, V),
    "matmul of a sample's tangent": lambda: WAYS["jvp of vmap"](lambda x: fpsim.matmul(x, W.T, "fp16"), X, V),
    "matmul of the tangents of a jacobian": lambda: torch.func.jacfwd(lambda x: fpsim.matmul(x, W.T, "fp16"))(X),
    "tally of a tangent": lambda: WAYS["jvp"](lambda x: fpsim.tally(x, "fp16"), X, V),
    "tally of a sample": lambda: torch.vmap(lambda x: fpsim.tally(x, "fp16"))(X),
    "scales_of a tangent": lambda: WAYS["jvp"](lambda x: fpsim.scales_of(x, "mxfp4"), X, V),
    "decode of a sample": lambda: torch.vmap(lambda x: fpsim.decode(x, "fp16"))(torch.ones(2, 3, dtype=torch.int32)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_tangent_and_no_sample_is_refused_in_words(what: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{what.split()[0]} was .*(Expected|Call it outside)"):
        REFUSED[what]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bf16", "mxfp8_e4m3", "hadamard fixed"])
def test_a_program_of_forward_mode_is_refused_and_the_function_runs_without_a_compiler(name: str) -> None:
    """The program would have no tangent, which torch takes for zero."""
    f = {**ROUNDINGS, **TRANSFORMS}[name]
    assert torch.equal(compiled(f, X, V), WAYS["jvp"](f, X, V))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compiled in forward mode"):
        compiled(f, X, V, fullgraph=True)
