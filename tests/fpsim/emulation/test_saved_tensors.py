"""What an operation saves for its backward pass is the rounded value, whoever packs it and whenever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fpsim
from fpsim import emulate, quantize, round_to

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "exp": torch.exp,
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
    "cumprod": lambda x: torch.cumprod(1 + x / 16, -1),
    "elu": F.elu,
    "added to what it came from": lambda x: x + x.tanh(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "in place": lambda x: (x * 1.0).tanh_(),
    "relu": F.relu,
    "a product": lambda x: x @ x.T,
}
FORMATS = ["bf16", "fp16", "e4m3fn", "recipe:mxfp8"]


class Model(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor], run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last, self.run = nn.Linear(16, 16), last, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(lambda x: self.last(self.linear(x)), x)


def gradients(model: nn.Module) -> list[Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model(x).square().sum().backward()
    return [p.grad for p in (*model.parameters(), x) if p.grad is not None]


def plainly(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return f(x)


def offloaded(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return f(x)


def selectively(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def choose(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keeps = op in (torch.ops.aten.addmm.default, torch.ops.aten.tanh.default)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)
    return checkpoint(f, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[..., Tensor]] = {
    "checkpointed": partial(checkpoint, use_reentrant=False),
    "checkpointed within a checkpoint": lambda f, x: checkpoint(
        lambda x: checkpoint(f, x, use_reentrant=False), x, use_reentrant=False
    ),
    "checkpointed without early stop": partial(checkpoint, use_reentrant=False, early_stop=False),
    "offloaded": offloaded,
    "checkpointed selectively": selectively,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_without(name: str, fmt: str, way: str) -> None:
    if way == "checkpointed selectively" and fmt.startswith("recipe"):
        pytest.skip("products with quantised operands are refused under a dispatch mode")
    plain = gradients(quantize(Model(OPERATIONS[name], plainly), fmt))
    found = gradients(quantize(Model(OPERATIONS[name], WAYS[way]), fmt))
    assert all(map(torch.equal, found, plain))


def test_hooks_pack_each_tensor_once_in_the_order_in_which_it_is_saved() -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    x = round_to(torch.randn(5), "e4m3fn").requires_grad_()
    with emulate("e4m3fn"), saved_tensors_hooks(pack, lambda i: packed[i]):
        y = x.tanh().exp()
    y.sum().backward()
    assert all(torch.equal(p, round_to(p, "e4m3fn")) for p in packed)
    assert torch.equal(packed[-1], y.detach())


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn"])
@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softmax", "exp", "rsqrt", "a product"])
def test_gradients_of_torch_func_are_those_of_backward(name: str, fmt: str) -> None:
    model = quantize(Model(OPERATIONS[name], plainly), fmt)
    expected = gradients(copy.deepcopy(model))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found, of_input = torch.func.grad(loss, argnums=(0, 1))(dict(model.named_parameters()), x)
    assert all(map(torch.equal, (*found.values(), of_input), expected))


def test_float32_is_bit_for_bit_where_what_is_float32_on_purpose_enters_products() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            p = torch.softmax(x, -1, dtype=torch.float32)
            return F.linear(p, self.w) + p.log() + F.linear(p, self.w.T) * p

    plain = M()
    assert all(map(torch.equal, gradients(fpsim.quantize(plain, "fp32")), gradients(plain)[-1:] and _again(plain)))


def _again(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    return gradients(model)
