"""Causes to plant, each with the models and formats in which it can occur, and what must be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from planted_models import WIDTH, Planted, parts_of
from torch import Tensor
from torch.nn import functional as F

import fpsim

ALL = ("gpt", "conv", "encoder", "decoder")
ATTENDING = ("gpt", "encoder", "decoder")
FP16 = ("half", "autocast", "fp16")
NARROW = ("half", "fp16")
ANY = ("float32", "half", "fp16", "bf16", "mxfp4")
CAME_IN = (*ANY, "autocast", "e4m3fn")
NOT_IN = {("sum overflows", "resnet")}  # whose last axis is three pixels long
LIBRARY = ("bert", "llama", "resnet")  # in which what an operation computes is planted too
EVERY = (*ALL, *LIBRARY)
POINT = "blocks.1.point:"


@dataclass(frozen=True)
class Cause:
    """plant: what is planted. place: how the site or name ends. role, kind: what must be said.

    `place_in` is for one model, where "{up}" and the like are names of its modules.
    """

    plant: Callable[[Planted], None]
    models: tuple[str, ...]
    formats: tuple[str, ...]
    place: str
    role: str
    kind: str

    def place_in(self, model: str) -> str:
        return self.place.format(**parts_of(model))


CAUSES: dict[str, Cause] = {}


def cause(
    models: tuple[str, ...], formats: tuple[str, ...], place: str, role: str, kind: str
) -> Callable[[Callable[[Planted], None]], Callable[[Planted], None]]:
    def registered(plant: Callable[[Planted], None]) -> Callable[[Planted], None]:
        CAUSES[plant.__name__] = Cause(plant, models, formats, place, role, kind)
        return plant

    return registered


def at_point(
    name: str, models: tuple[str, ...], formats: tuple[str, ...], place: str, kind: str, role: str = "activation"
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Register an operation to be planted in a block."""

    def registered(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def plant(planted: Planted) -> None:
            planted.point.plant = function

        CAUSES[name] = Cause(plant, models, formats, f"{POINT}{place}", role, kind)
        return function

    return registered


def zero_row(x: Tensor) -> Tensor:
    """The first token, or the first pixel row, is zero."""
    keep = torch.ones_like(x)
    keep[:, :1] = 0
    return x * keep


# What an operation computes


@at_point("square overflows", ALL, FP16[:1] + FP16[2:], "square", "overflow")
def _(x: Tensor) -> Tensor:
    return x + (x * 400).square() / 1e6


@at_point("sum overflows", ALL, NARROW, "sum", "overflow")
def _(x: Tensor) -> Tensor:
    return x + (x.abs() * 2000 + 12000).sum(-1, keepdim=True) / 1e6


@at_point("exp overflows", ALL, NARROW, "exp", "overflow")
def _(x: Tensor) -> Tensor:
    e = (x + 12).exp()
    return x + e / e.sum(-1, keepdim=True)


@at_point("power overflows", ALL, ("half", "fp16", "e5m2"), "pow", "overflow")
def _(x: Tensor) -> Tensor:
    return x + (x * 60).pow(3) / 1e6


@at_point("product overflows", ALL, NARROW, "matmul", "overflow")
def _(x: Tensor) -> Tensor:
    return x + ((x * 300) @ (x * 300).mT).tanh().sum(-1, keepdim=True) * 0.01


@at_point("cumulative sum overflows", ("gpt", "encoder", "conv"), NARROW, "cumsum", "overflow")
def _(x: Tensor) -> Tensor:
    return x + (x.abs() * 1000 + 9000).cumsum(-1) / 1e6


@at_point("eps is lost in a norm", ALL, NARROW, "div", "division by zero")
def _(x: Tensor) -> Tensor:
    x = zero_row(x)
    return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()


@at_point("square underflows below a root", ALL, NARROW, "div", "division by zero")
def _(x: Tensor) -> Tensor:
    small = x.abs().clamp(0.5, 1) * 1e-4
    return x + small / small.square() * 1e-6


@at_point("reciprocal of what underflowed", ALL, NARROW, "reciprocal", "division by zero")
def _(x: Tensor) -> Tensor:
    return x + (x.abs().clamp(0.5, 1) * 1e-9).reciprocal() * 1e-12


@at_point("eps of normalize is lost", ("gpt", "encoder", "conv"), ("half",), "normalize", "division by zero")
def _(x: Tensor) -> Tensor:
    return F.normalize(zero_row(x), dim=-1)


@at_point("a count is zero", ALL, ANY, "div", "division by zero")
def _(x: Tensor) -> Tensor:
    return x + (x * 0).sum(-1, keepdim=True) / (x.shape[0] * torch.zeros((), dtype=torch.int64))


@at_point("logarithm of a softmax that underflows", ALL, NARROW, "log", "logarithm of zero")
def _(x: Tensor) -> Tensor:
    return x - (x * 100).softmax(-1).log() * 1e-3


@at_point("root of a negative number", ALL, ANY, "sqrt", "root of a negative number")
def _(x: Tensor) -> Tensor:
    return x + (x.square().mean(-1, keepdim=True) - 100).sqrt()


@at_point("logarithm of a negative number", ALL, ANY, "log", "logarithm of a negative number")
def _(x: Tensor) -> Tensor:
    return x + (x.abs() + 0.1).neg().log()


@at_point("arc cosine beyond one", ALL, ANY, "acos", "outside of its domain")
def _(x: Tensor) -> Tensor:
    return x + (x * 0 + 1.5).acos()


@at_point("mean of nothing", ALL, ANY, "mean", "mean of nothing")
def _(x: Tensor) -> Tensor:
    return x + x[x > 1e4].mean()


@at_point("deviation of one number", ALL, ANY, "std", "variance of one number")
def _(x: Tensor) -> Tensor:
    return x + x[..., :1].std(-1, keepdim=True)


@at_point("zero times infinity", ALL, ANY, "mul", "zero times infinity")
def _(x: Tensor) -> Tensor:
    shut = torch.zeros(x.shape[-1], dtype=x.dtype)
    shut[-1] = 1
    return x + (shut * torch.full_like(shut, -torch.inf)).exp()


@at_point("a row is masked wholly", ALL, ANY, "softmax", "row masked wholly")
def _(x: Tensor) -> Tensor:
    shut = torch.zeros(x.shape, dtype=torch.bool)
    shut[0, 0] = True
    return x + x.masked_fill(shut, -torch.inf).softmax(-1)


@at_point("root at zero has no slope", ALL, ("float32", "fp16"), "sqrt", "infinite slope", "error")
def _(x: Tensor) -> Tensor:
    return x + zero_row(x).abs().sqrt()


@at_point("norm of zero has no slope", ("gpt", "encoder"), ("float32", "bf16"), "sqrt", "infinite slope", "error")
def _(x: Tensor) -> Tensor:
    return x + zero_row(x).square().sum(-1, keepdim=True).sqrt()


@at_point("where hides a logarithm", ALL, ("float32", "fp16"), "log", "logarithm of zero")
def _(x: Tensor) -> Tensor:
    y = zero_row(x).abs()  # not relu: it would let no gradient through, and NaN would come to nothing
    return x + torch.where(y > 0, y.log(), torch.zeros_like(y))


@at_point("branch behind a small gate", ALL, ("half", "fp16"), "sigmoid", "gradient lost", "error")
def _(x: Tensor) -> Tensor:
    return x + x.sigmoid() * 1e-6


@at_point("product underflows", ALL, ("half", "fp16", "e5m2"), "mul", "underflow")
def _(x: Tensor) -> Tensor:
    return x.detach() * 1e-9 * 1e9 + x


@at_point("difference of large numbers", ALL, ("half", "bfloat16", "fp16", "bf16"), "sub", "cancellation")
def _(x: Tensor) -> Tensor:
    return (x * 0.01 + 4096.0) - 4096.0 + x * 1e-3


# What comes in


def first_floating(planted: Planted) -> Tensor:
    return planted.part("up").weight  # type: ignore[no-any-return]


def embedded(planted: Planted) -> None:
    """Numbers in the place of words, as of an image in a model of language."""
    if not planted.x.is_floating_point():
        planted.x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))


@cause(EVERY, CAME_IN, "{up}.weight", "parameter", "NaN came in")
def nan_in_a_parameter(planted: Planted) -> None:
    planted.late = lambda p: first_floating(p).data.view(-1)[7].fill_(torch.nan)


@cause(EVERY, CAME_IN, "{up}.weight", "parameter", "inf came in")
def inf_in_a_parameter(planted: Planted) -> None:
    planted.late = lambda p: first_floating(p).data.view(-1)[7].fill_(torch.inf)


@cause((*ALL, "bert"), ("float32", "half", "autocast", "fp16"), "{up}.bias", "parameter", "-inf came in")
def minus_inf_in_a_parameter(planted: Planted) -> None:
    planted.late = lambda p: p.part("up").bias.data[3].fill_(-torch.inf)


@cause(("conv", "encoder", *LIBRARY), CAME_IN, "x", "input", "NaN came in")
def nan_in_the_input(planted: Planted) -> None:
    embedded(planted)
    planted.late = lambda p: p.x.view(-1)[5].fill_(torch.nan)


@cause(("conv", "encoder", *LIBRARY), CAME_IN, "x", "input", "inf came in")
def inf_in_the_input(planted: Planted) -> None:
    embedded(planted)
    planted.late = lambda p: p.x.view(-1)[5].fill_(torch.inf)


@cause(EVERY, CAME_IN, "scales", "buffer", "NaN came in")
def nan_in_a_buffer(planted: Planted) -> None:
    planted.late = lambda p: p.model.scales.view(-1)[5].fill_(torch.nan)


@cause(("conv", "resnet"), ("float32", "half", "fp16"), "{bn}.running_mean", "buffer", "-inf came in")
def minus_inf_in_running_mean(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.model.eval()
        p.part("bn").running_mean[2] = -torch.inf

    planted.late = late


@cause(("conv", "resnet"), ("float32", "half", "fp16"), "{bn}.running_var", "buffer", "inf came in")
def inf_in_running_var(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.model.eval()
        p.part("bn").running_var[2] = torch.inf

    planted.late = late


@cause(("gpt", "conv", *LIBRARY), ("float32", "half", "autocast", "fp16"), "{up}.weight", "gradient", "inf came in")
def inf_in_a_gradient(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.clears = False
        weight = first_floating(p)
        weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1)[3] = torch.inf

    planted.late = late


@cause(
    ("gpt", "conv", *LIBRARY),
    ("float32", "bfloat16", "autocast", "fp16"),
    "{up}.weight exp_avg",
    "optimizer state",
    "NaN came in",
)
def nan_in_a_state(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-4)
        p.step()
        p.optimizer.step()
        p.optimizer.state[first_floating(p)]["exp_avg"].view(-1)[2] = torch.nan

    planted.late = late


# What does not fit


@cause(ATTENDING, FP16, "blocks.1.attention:matmul", "activation", "overflow")
def logits_grow(planted: Planted) -> None:
    with torch.no_grad():
        planted.model.blocks[1].attention.query.weight.mul_(2e3)
        planted.model.blocks[1].attention.key.weight.mul_(2e3)


@cause(("bert",), FP16, "blocks.1.attention.self:matmul", "activation", "overflow")
def logits_of_bert_grow(planted: Planted) -> None:
    with torch.no_grad():
        for layer in (planted.model.blocks[1].attention.self.query, planted.model.blocks[1].attention.self.key):
            layer.weight.mul_(3e4)


@cause(("llama",), FP16, "blocks.1.self_attn:matmul", "activation", "overflow")
def logits_of_llama_grow(planted: Planted) -> None:
    with torch.no_grad():
        for layer in (planted.model.blocks[1].self_attn.q_proj, planted.model.blocks[1].self_attn.k_proj):
            layer.weight.mul_(3e4)


@cause(EVERY, ("fp16", "e5m2"), "{up}.weight", "weight", "overflow")
def weight_too_large(planted: Planted) -> None:
    with torch.no_grad():
        first_floating(planted).view(-1)[7] = 1e6


@cause(EVERY, ("e4m3fn",), "{down}:", "activation", "saturation")
def result_saturates(planted: Planted) -> None:
    with torch.no_grad():
        if planted.part("up").bias is None:
            for name, weight in planted.model.named_parameters():  # as of a trained one: a random Llama is lost below
                weight.mul_(8 if "proj" in name else 1)
            planted.part("up").weight.mul_(30 if planted.name == "llama" else 1)
            planted.part("down").weight.mul_(100 if planted.name == "llama" else 1e4)
            return
        planted.part("up").bias.fill_(5)
        planted.part("down").weight.mul_(1e3 if planted.name in ALL else 1e4)


@cause(ATTENDING, ("e2m3fn",), "blocks.0.attention:softmax", "activation", "mask leaks")
def mask_leaks(planted: Planted) -> None:
    fmt = "e2m3fn"
    planted.policy = fpsim.Policy(fmt, fmt, fmt, fmt, float32=("softmax",))
    for block in planted.model.blocks:
        block.attention.fill = -1e4


@cause(EVERY, ("half", "autocast"), "", "error", "overflow")
def scale_too_large(planted: Planted) -> None:
    planted.scale = 2.0**24


# What an optimizer does


@cause(EVERY, ("half",), "", "update", "division by zero")
def eps_of_adam_is_lost(planted: Planted) -> None:
    planted.scale = 1e-2

    def late(p: Planted) -> None:
        p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-3, foreach=p.name != "conv")

    planted.late = late


@cause(EVERY, ("bfloat16", "half"), "", "update", "update lost")
def updates_are_lost(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.optimizer = torch.optim.SGD(p.model.parameters(), 1e-6)

    planted.late = late


@cause(("gpt", "conv", *LIBRARY), ("half",), "exp_avg_sq", "optimizer state", "overflow")
def squared_gradient_overflows(planted: Planted) -> None:
    planted.scale = 2.0**13

    def late(p: Planted) -> None:
        p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-3, betas=(0.9, 0.1), eps=1e-4)

    planted.late = late


@cause(EVERY, ("half",), "", "update", "overflow")
def rate_too_large(planted: Planted) -> None:
    planted.scale = 2.0**7

    def late(p: Planted) -> None:
        p.optimizer = torch.optim.SGD(p.model.parameters(), 6e4)

    planted.late = late


@cause(EVERY, ("half",), "{up}.weight", "gradient", "overflow")
def gradients_are_not_cleared(planted: Planted) -> None:
    planted.scale = 2.0**15 if planted.name == "llama" else 2.0**12

    def late(p: Planted) -> None:
        p.step()
        p.clears = False
        gradient = first_floating(p).grad
        assert gradient is not None
        gradient.copy_(gradient.sign() * 65504)

    planted.late = late


@cause(EVERY, ("half",), "{up}.weight", "gradient", "overflow")
def sum_of_passes_overflows(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.passes = 1
        p.step()
        p.passes, weight = 8, first_floating(p)
        assert weight.grad is not None
        gain = 2e4 / float(weight.grad.abs().max())
        weight.register_hook(lambda gradient: (gradient.float() * gain).half())

    planted.late = late


@cause(EVERY, ("float32", "half", "autocast", "fp16"), "", "update", "rate is NaN")
def rate_is_nan(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), torch.nan))


@cause(EVERY, ("float32", "half", "autocast", "fp16"), "", "update", "rate is infinite")
def rate_is_infinite(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), torch.inf))


@cause(EVERY, ("fp16", "bf16", "e4m3fn"), "", "update", "update lost")
def updates_are_rounded_away(planted: Planted) -> None:
    if planted.fmt == "e4m3fn":
        planted.scale = 2.0**9  # so that no gradient is lost

    def late(p: Planted) -> None:
        fpsim.round_parameters_(p.model)
        p.optimizer = torch.optim.SGD(p.model.parameters(), 1e-5)

        def update(_: Planted) -> None:
            p.optimizer.step()
            fpsim.round_parameters_(p.model)

        p.after_backward = update

    planted.late = late


@cause(("conv", "resnet"), ("half",), "{bn}.running_var", "buffer", "overflow")
def running_var_overflows(planted: Planted) -> None:
    with torch.no_grad():
        planted.part("conv").weight.mul_(3e3)


@cause(EVERY, ("bf16",), "{up}:", "activation", "error grows")
def one_layer_too_narrow(planted: Planted) -> None:
    with torch.no_grad():
        first_floating(planted).mul_({"bert": 20, "llama": 20, "resnet": 6}.get(planted.name, 2))
    fmt = "bf16"
    planted.policy = fpsim.Policy(
        fmt, fmt, fmt, fmt, overrides={parts_of(planted.name)["up"]: fpsim.Policy("e2m1fn", "e2m1fn", fmt, fmt)}
    )


@cause(EVERY, CAME_IN, ":cross_entropy", "activation", "mean of nothing")
def all_targets_ignored(planted: Planted) -> None:
    planted.y.fill_(-100)


@cause(EVERY, CAME_IN, ":div", "activation", "division by zero")
def count_of_targets_is_zero(planted: Planted) -> None:
    planted.loss = lambda out, y: (out.float() * 0).sum() / (y > 100).sum()


def cases() -> Iterator[tuple[str, str, str]]:
    """Name, model and format of each case."""
    for name, found in CAUSES.items():
        is_operation = found.models == ALL and found.place.startswith(POINT)
        library = (
            [] if found.models != ALL else [model for model in LIBRARY if is_operation and (name, model) not in NOT_IN]
        )
        for model in (*found.models, *library):
            for fmt in found.formats[: 2 if model in library else None]:
                yield name, model, fmt
