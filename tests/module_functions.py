"""Blocks without parameters, from which `random_modules` draws: autograd Functions, float64, writes, random numbers.

Each is a function of one tensor, (..., WIDTH), that gives one of the same shape and dtype. All stand at the top of the
file, as pickle wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

Through = Callable[[Tensor], Tensor]
WIDTH = 8
FUNCTIONS: dict[str, Through] = {}  # that go through an autograd Function
DETOURS: dict[str, Through] = {}  # that compute in float64 in between
FORMS: dict[str, Through] = {}  # what else a forward does with a tensor
RANDOM: dict[str, Through] = {}  # that draw random numbers


def listed_in(table: dict[str, Through]) -> Callable[[Through], Through]:
    def add(function: Through) -> Through:
        table[function.__name__] = function
        return function

    return add


# Functions that give back their input, or a view of it


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.neg()


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : WIDTH // 2], x[..., WIDTH // 2 :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.cat(gradients, -1)


class Turned(torch.autograd.Function):
    """In the newer form, which transforms of torch.func take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.transpose(-1, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.transpose(-1, -2)


class FirstOfTwo(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return first + second * y, second * x


# Functions that compute


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 2


class Product(torch.autograd.Function):
    """A linear layer, as kernels of LoRA and layers of Megatron are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class KeptOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class Unsaved(torch.autograd.Function):
    """Keeps its input as an attribute, as much code does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.x.abs() <= 1)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class AddedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(0.3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class WithIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(-1, places, gradient)


class WithGrad(torch.autograd.Function):
    """Computes its gradient in its own forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = torch.tanh(inner * 0.7)
            (ctx.slope,) = torch.autograd.grad(y.sum(), inner)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.slope


@listed_in(FUNCTIONS)
def reversal(x: Tensor) -> Tensor:
    return Reversal.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def reversal_and_itself(x: Tensor) -> Tensor:
    return Reversal.apply(x) * 0.25 + x


@listed_in(FUNCTIONS)
def same(x: Tensor) -> Tensor:
    return Same.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def itself_and_same(x: Tensor) -> Tensor:
    return x * 0.75 + Same.apply(x)


@listed_in(FUNCTIONS)
def detached(x: Tensor) -> Tensor:
    return Detached.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def halves(x: Tensor) -> Tensor:
    first, second = Halves.apply(x)
    return torch.cat([second, first * 0.9], -1)


@listed_in(FUNCTIONS)
def one_half(x: Tensor) -> Tensor:
    return Halves.apply(x)[1].repeat_interleave(2, -1)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def turned(x: Tensor) -> Tensor:
    return Turned.apply(Turned.apply(x) * 1.1)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def first_of_two(x: Tensor) -> Tensor:
    first, second = FirstOfTwo.apply(x, x.tanh())
    return first + second * 0.5  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def first_of_itself_twice(x: Tensor) -> Tensor:
    return FirstOfTwo.apply(x, x)[0]  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def square(x: Tensor) -> Tensor:
    return Square.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def kept_output(x: Tensor) -> Tensor:
    return KeptOutput.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def unsaved(x: Tensor) -> Tensor:
    return Unsaved.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def straight_through(x: Tensor) -> Tensor:
    return StraightThrough.apply(x)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def added_in_place(x: Tensor) -> Tensor:
    return AddedInPlace.apply(x * 0.9)  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def with_indices(x: Tensor) -> Tensor:
    values, places = WithIndices.apply(x)
    return values + places.to(x.dtype) * 0.01  # type: ignore[no-any-return]


@listed_in(FUNCTIONS)
def with_grad(x: Tensor) -> Tensor:
    return WithGrad.apply(x)  # type: ignore[no-any-return]


# float64 in between. FAR is what float32 cannot take off again: a variance in float32 is noise then.

FAR = 1e4


@listed_in(DETOURS)
def variance_by_double(x: Tensor) -> Tensor:
    d = x.double() + FAR
    return x * (d.pow(2).mean() - d.mean().pow(2)).to(x.dtype)


@listed_in(DETOURS)
def variance_by_to(x: Tensor) -> Tensor:
    d = x.to(torch.float64).add(FAR)
    return (d.square() - FAR**2).div(2 * FAR).to(x.dtype)


@listed_in(DETOURS)
def variance_by_type(x: Tensor) -> Tensor:
    d = x.type(torch.float64) + FAR
    return (d - d.mean(-1, keepdim=True)).type(x.dtype)


@listed_in(DETOURS)
def double_of_an_expression(x: Tensor) -> Tensor:
    return ((x * 1.1).double() + FAR).sub(FAR).to(x)


@listed_in(DETOURS)
def double_by_promotion(x: Tensor) -> Tensor:
    far = torch.full((WIDTH,), FAR, dtype=torch.float64)
    return (x + far - far).to(x.dtype)


@listed_in(DETOURS)
def double_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        d = x.double() + FAR
        scale = (d.pow(2).mean() - d.mean().pow(2)).to(x.dtype)
    return x / (scale + 1)


@listed_in(DETOURS)
def double_in_place(x: Tensor) -> Tensor:
    d = x.double().clone()
    d.add_(FAR)
    return (d * d).sub_(FAR**2).div_(2 * FAR).to(x.dtype)


@listed_in(DETOURS)
def double_copied(x: Tensor) -> Tensor:
    d = torch.zeros(x.shape, dtype=torch.float64)
    d.copy_(x)
    return ((d + FAR) - FAR).to(x.dtype)


@listed_in(DETOURS)
def double_sum(x: Tensor) -> Tensor:
    total = (x + 1000).sum(-1, keepdim=True, dtype=torch.float64)
    return x + (total - 1000 * WIDTH).to(x.dtype) * 0.1


@listed_in(DETOURS)
def double_product(x: Tensor) -> Tensor:
    d = x.double()
    return (d + (d @ d.transpose(-1, -2) + FAR - FAR) @ d * 0.1).to(x.dtype)


# What else a forward does


@listed_in(FORMS)
def over_a_norm_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        n = x.norm()
    return x / n


@listed_in(FORMS)
def over_a_norm_of_what_is_detached(x: Tensor) -> Tensor:
    return x / (x.detach() * 1.5).abs().amax().clamp(min=0.1)


@listed_in(FORMS)
def over_a_norm(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@listed_in(FORMS)
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@listed_in(FORMS)
def elu_in_place(x: Tensor) -> Tensor:
    return F.elu(x * 1.1, inplace=True)


@listed_in(FORMS)
def tanh_in_place(x: Tensor) -> Tensor:
    return (x * 1.1).tanh_()


@listed_in(FORMS)
def sigmoid_in_place_of_a_part(x: Tensor) -> Tensor:
    h = x * 1.1
    h[..., :3].sigmoid_()
    return h


@listed_in(FORMS)
def relu_in_place(x: Tensor) -> Tensor:
    return F.relu(x + 0.3, inplace=True)


@listed_in(FORMS)
def data_in_place(x: Tensor) -> Tensor:
    h = x * 1.1
    h.data.mul_(0.9)
    return h


@listed_in(FORMS)
def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.roll(1, -2), x * 0.7)


@listed_in(FORMS)
def attention_written_out(x: Tensor) -> Tensor:
    weights = F.softmax((x @ x.transpose(-1, -2)).float() / WIDTH**0.5, dim=-1).to(x.dtype)
    return weights @ x


@listed_in(FORMS)
def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


@listed_in(FORMS)
def chunks(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([b * a, a], -1)


@listed_in(FORMS)
def flattened(x: Tensor) -> Tensor:
    return (x.flatten() * 0.9).view(x.shape)


@listed_in(FORMS)
def unchanged(x: Tensor) -> Tensor:
    return x


@listed_in(FORMS)
def moved(x: Tensor) -> Tensor:
    return x.flatten()[None].view(x.shape)


@listed_in(FORMS)
def detour_in_float32(x: Tensor) -> Tensor:
    wide = x.float() * 1.003
    return (wide * wide.abs().mean()).to(x.dtype)


@listed_in(FORMS)
def einsum(x: Tensor) -> Tensor:
    return torch.einsum("...ij,...kj->...ik", x, x) @ x * 0.1


@listed_in(FORMS)
def inner_gradient(x: Tensor) -> Tensor:
    """As energy models do, and gradient penalties."""
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((inner * inner).sum(), inner)
    return x * 0.5 + slope * 0.25


@listed_in(FORMS)
def hooked(x: Tensor) -> Tensor:
    h = x * 0.9
    if h.requires_grad:
        h.register_hook(torch.neg)
    return h + x


@listed_in(FORMS)
def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


@listed_in(FORMS)
def attention_with_a_lower_right_mask(x: Tensor) -> Tensor:
    mask = causal_lower_right(x.shape[-2], x.shape[-2])
    return F.scaled_dot_product_attention(x, x, x * 0.7, attn_mask=mask)


@listed_in(FORMS)
def cumulative(x: Tensor) -> Tensor:
    return x.cumsum(-1) * 0.5


@listed_in(FORMS)
def gathered(x: Tensor) -> Tensor:
    places = x.detach().argsort(-1)
    return x.gather(-1, places) + torch.zeros_like(x).scatter_add(-1, places, x * 0.5)


@listed_in(FORMS)
def written_row_by_row(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for i in range(x.shape[-2]):
        out[..., i, :] = x[..., i, :] * (i + 1) * 0.3
    return out


# Random numbers


@listed_in(RANDOM)
def noise_of_a_generator(x: Tensor) -> Tensor:
    return x * torch.rand(WIDTH, generator=torch.Generator().manual_seed(5))


@listed_in(RANDOM)
def noise_of_a_seed(x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x * torch.rand(WIDTH)


@listed_in(RANDOM)
def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) * 0.1


@listed_in(RANDOM)
def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.25, training=True)


@listed_in(RANDOM)
def masked(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full((WIDTH,), 0.75))
