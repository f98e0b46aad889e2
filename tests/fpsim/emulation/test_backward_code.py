"""The model's own code in the backward pass: autograd Functions and hooks compute in the format, as operations do.

The same layer written plainly is the oracle, or native code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_functions import KeptOutput, Product
from tiers import parametrize
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.utils.checkpoint import checkpoint

import fpsim
from ada_loss import AdaLossScaled
from fpsim import Policy, Products, quantize, round_to
from fpsim.emulation.scope import active
from fpsim.torch_modes import any_mode

FORMATS = ("bf16", "fp16", "e4m3fn", "mxfp8_e4m3", "mxfp4", "nvfp4", "recipe:fp8_current", "recipe:mxfp8")
FEW = {"bf16", "mxfp8_e4m3", "recipe:fp8_current"}
MIXED = Policy(weight="e4m3fn", activation="e5m2", error="bf16", weight_grad="fp16")


class TransposedProduct(torch.autograd.Function):
    """`Product` with its gradients written the other way round, and in the newer form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return torch.matmul(g, w), torch.einsum("ti,to->oi", x, g)


class KeepsWeight(torch.autograd.Function):
    """What is kept as an attribute, once differentiable, under the amp decorators that do nothing here."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        ctx.save_for_backward(x)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g.mm(ctx.w), g.t().mm(x)


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.conv2d(x.view(8, 2, 4, 4), w.view(4, 2, 2, 2)).view(8, -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        x, w, g = x.view(8, 2, 4, 4), w.view(4, 2, 2, 2), g.view(8, 4, 3, 3)
        return conv2d_input(x.shape, w, g).view(8, 32), conv2d_weight(x, w.shape, g).view(1, 32)


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.view(8, 2, 4, 4), w.view(4, 2, 2, 2)).view(8, -1)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


class Chain(torch.autograd.Function):
    """Several operations, with each step of the gradient written as torch's own formula has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = x * w
        b = torch.tanh(a)
        return b * 1.1, a, b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        x, w, b = ctx.saved_tensors
        g = torch.ops.aten.tanh_backward(g * 1.1, b)
        return g * w, g * x


def chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w) * 1.1


Layer = Callable[[Tensor, Tensor], Tensor]
# Each Function with what it is when it is written plainly, and the shape of its weight.
TWINS: dict[str, tuple[Layer, Layer, tuple[int, ...]]] = {
    "product": (Product.apply, product, (16, 32)),
    "the other way round": (TransposedProduct.apply, F.linear, (16, 32)),
    "keeps its weight": (KeepsWeight.apply, product, (16, 32)),
    "convolution": (Convolution.apply, convolution, (1, 32)),
    "chain": (lambda x, w: Chain.apply(x, w)[0], chain, (8, 32)),
    "of a view": (lambda x, w: Product.apply(x, w.view(4, 4, 32).flatten(0, 1)), product, (16, 32)),
    "checkpoint": (lambda x, w: checkpoint(Product.apply, x, w, use_reentrant=False), product, (16, 32)),
    "reentrant": (lambda x, w: checkpoint(Product.apply, x, w, use_reentrant=True), product, (16, 32)),
}


class Model(nn.Module):
    def __init__(self, layer: Layer, shape: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(shape, generator=generator))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * 0.7, self.w)) * 1.3


def twins(name: str) -> tuple[Model, Model]:
    by_function, plainly, shape = TWINS[name]
    return Model(by_function, shape), Model(plainly, shape)


def randn(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def gradients(model: nn.Module, scale: float = 1.0, times: int = 1) -> list[Tensor]:
    x = randn(8, 32).requires_grad_()
    y = model(x)
    for i in range(times):
        y.backward(randn(*y.shape, seed=2, scale=scale), retain_graph=i + 1 < times)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@parametrize("name", TWINS, keep=lambda name: name != "reentrant")
@parametrize("fmt", [*FORMATS, MIXED], keep=lambda fmt: isinstance(fmt, Policy) or fmt in FEW)
def test_a_function_has_the_gradients_of_the_same_layer_written_plainly(name: str, fmt: Any) -> None:
    by_function, plainly = twins(name)
    assert_equal(gradients(quantize(by_function, fmt)), gradients(quantize(plainly, fmt)))


# Scales, sites and what observers see

MEASURING = ("exact", "current")
RULES = ("approx_range", "abs_range", "fixed", *MEASURING)


@parametrize(
    ("rule", "name"),
    [
        *((rule, name) for rule in RULES for name in ("product", "the other way round", "convolution")),
        *((rule, "chain") for rule in MEASURING),  # of a Function others know the operation that gives its result alone
    ],
    keep=lambda rule, name: rule in ("approx_range", "exact") and name in ("product", "chain"),
)
def test_a_function_loses_what_the_same_layer_written_plainly_loses_under_a_scaling(rule: str, name: str) -> None:
    policy, found = Policy(activation="bf16", weight="bf16", error="e5m2", weight_grad="fp16"), []
    for model in twins(name):
        q = quantize(model, policy)
        with AdaLossScaled(q, rule=rule, init_scale=2.0**8 if rule == "fixed" else 1):
            found.append([x for _ in range(2) for x in gradients(q, scale=2.0**-16)])
    assert_equal(*found)
    assert found[0][2].any()


def test_dy_enters_the_products_of_a_function_at_the_scale_that_the_layer_written_plainly_has() -> None:
    policy, found = Policy(products=Products.by_operand("e4m3fn", "e4m3fn", "e5m2")), []
    for model in twins("product"):
        q = quantize(model, policy)
        with AdaLossScaled(q, rule="exact"):
            found.append(gradients(q, scale=2.0**-20))
    assert_equal(*found)
    assert found[0][2].any()


def test_products_in_a_function_have_rows_of_their_kinds() -> None:
    model = quantize(Model(Product.apply, (16, 32)), "mxfp8_e4m3")
    with fpsim.record(model) as recording:
        gradients(model)
    rows = {(row["site"], row["role"]) for row in recording.rows()}
    assert {(":Product.matmul", "dgrad.dy"), (":Product.matmul", "dgrad.w")} <= rows
    assert {(":Product.matmul_1", "wgrad.dy"), (":Product.matmul_1", "wgrad.x")} <= rows


def test_what_a_function_computes_of_the_gradient_is_an_error_and_of_what_it_saved_an_activation() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            kept[:] = [x, x * 1.1, g * 1.1, (g * 1.1).t(), torch.cat([g[:1], x[1:]]) * 1.1]
            return g

    kept: list[Tensor] = []
    policy = Policy(activation="e4m3fn", error="e5m2", weight="bf16", weight_grad="bf16")
    x, g = randn(8, 8).requires_grad_(), randn(8, 8, seed=2)

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Both.apply(x)  # type: ignore[no-any-return]

    quantize(Once(), policy)(x).backward(g)
    saved, error = round_to(x.detach(), "e4m3fn"), round_to(g, "e5m2")
    assert torch.equal(kept[0], saved)
    assert torch.equal(kept[1], round_to(saved * 1.1, "e4m3fn"))
    assert torch.equal(kept[2], round_to(error * 1.1, "e5m2"))
    assert torch.equal(kept[3], kept[2].t())
    mixed = torch.cat([error[:1], saved[1:]])
    assert torch.equal(kept[4][:1], round_to(mixed * 1.1, "e5m2")[:1])
    assert torch.equal(x.grad, error)  # type: ignore[arg-type]


def test_scales_of_earlier_steps_are_kept_for_the_products_of_a_function() -> None:
    found = []
    for model in twins("product"):
        q = quantize(model, "recipe:fp8_delayed")
        found.append([x for i in range(4) for x in gradients(q, scale=4.0**i)])
    assert_equal(*found)


# The mode is entered and left in the thread that runs the backward pass


class Stops(torch.autograd.Function):
    """Its backward raises, once."""

    error: BaseException | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = g @ w
        error, Stops.error = Stops.error, None
        if error is not None:
            raise error
        return dx, g.t() @ x


@parametrize("error", [ValueError("stop"), KeyboardInterrupt()], keep=lambda _: True, ids=["error", "Ctrl-C"])
def test_nothing_hangs_on_after_a_backward_that_raised(error: BaseException) -> None:
    model, plainly = quantize(Model(Stops.apply, (16, 32)), "bf16"), quantize(Model(product, (16, 32)), "bf16")
    Stops.error = error
    with pytest.raises(type(error)):
        gradients(model)
    assert active.emulation is None
    assert not any_mode()
    assert torch.is_grad_enabled()
    model.zero_grad()
    assert_equal(gradients(model), gradients(plainly))


def test_a_backward_pass_in_another_thread_and_one_that_is_run_twice() -> None:
    by_function, plainly = (quantize(model, "bf16") for model in twins("product"))
    expected, found = gradients(plainly), []
    thread = threading.Thread(target=lambda: found.append(gradients(by_function)))
    thread.start()
    thread.join()
    assert_equal(found[0], expected)
    for model in (by_function, plainly):
        model.zero_grad()
    assert_equal(gradients(by_function, times=2), gradients(plainly, times=2))
    assert active.emulation is None


BY_LAYER = Policy(weight="bf16", activation="bf16", overrides={"inner.0": Policy(weight="e4m3fn", activation="bf16")})


@parametrize("asks_for", ["parameters", "saved", "unpacked", "kept"], keep=lambda _: True)
@parametrize("fmt", ["bf16", "e4m3fn", "mxfp8_e4m3", BY_LAYER], keep=lambda _: True)
def test_a_function_that_runs_a_module_again_has_the_gradients_of_the_module(fmt: Any, asks_for: str) -> None:
    class Again(torch.autograd.Function):
        """As adjoint methods do it. What it asks for the gradients of is what it was given, wherever it kept that."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
            ctx.module, ctx.parameters = module, parameters if asks_for == "kept" else [*module.parameters()]
            ctx.save_for_backward(x, *(parameters if asks_for in ("saved", "unpacked") else ()))
            return module(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, *parameters = ctx.saved_tensors
            x = x.detach().requires_grad_()
            ctx.module(x)  # without a graph
            with torch.enable_grad():
                y = ctx.module(x)
            dx, *rest = torch.autograd.grad(y, (x, *(parameters or ctx.parameters)), g, allow_unused=True)
            return dx, None, *rest

    class Outer(nn.Module):
        def __init__(self, is_again: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.is_again = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8)), is_again

        def forward(self, x: Tensor) -> Tensor:
            x = x * 0.7
            if not self.is_again:
                return self.inner(x) * 1.1  # type: ignore[no-any-return]
            return Again.apply(x, self.inner, *self.inner.parameters()) * 1.1  # type: ignore[no-any-return]

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
    with hooks if asks_for == "unpacked" else nullcontext():
        found, expected = (gradients(quantize(Outer(is_again), fmt)) for is_again in (True, False))
    assert_equal(found, expected)


def test_a_checkpoint_around_what_a_function_saves_runs_again_in_its_own_scope() -> None:
    class Whole(nn.Module):
        def __init__(self, layer: Layer, is_kept: bool) -> None:
            super().__init__()
            self.model, self.is_kept = Model(layer, (16, 32)), is_kept

        def forward(self, x: Tensor) -> Tensor:
            if self.is_kept:
                return self.model(x)  # type: ignore[no-any-return]
            return checkpoint(self.model, x, use_reentrant=False)  # type: ignore[no-any-return]

    for fmt in ("bf16", "e4m3fn", "mxfp8_e4m3"):
        models = (Whole(layer, is_kept) for layer in (Product.apply, product) for is_kept in (True, False))
        first, *others = (gradients(quantize(model, fmt)) for model in models)
        for other in others:
            assert_equal(other, first)


# Transforms, double backward, compilers


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x


@parametrize("name", ["the other way round", "chain"], keep=lambda _: True)
def test_a_function_under_vmap_and_grad_is_the_one_that_runs_plainly(name: str) -> None:
    by_function, plainly = (quantize(model, "bf16") for model in twins(name))
    x = randn(3, 8, 32)

    def loss(model: nn.Module, w: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"w": w}, x).square().sum()  # type: ignore[no-any-return]

    found = []
    for model in (by_function, plainly):
        with torch.no_grad():
            batched = torch.func.vmap(model)(x)
        w = model.w.detach()
        per_sample = torch.func.vmap(lambda w, x, m=model: torch.func.grad(loss, 1)(m, w, x), (None, 0))(w, x)
        found.append([batched, torch.func.grad(loss, 1)(model, w, x[0]), per_sample])
    assert_equal(*found)


def test_a_function_that_is_differentiated_twice() -> None:
    found = []
    for layer in (Times.apply, torch.mul):
        q, x = quantize(Model(layer, (8, 32)), "bf16"), randn(8, 32).requires_grad_()
        (first,) = torch.autograd.grad(q(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append([first.detach(), x.grad, q.w.grad])
    assert_equal(*found)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "fmt"), [("product", "bf16"), ("chain", "e4m3fn"), ("keeps its weight", "mxfp8_e4m3")]
)
def test_a_compiled_model_has_the_gradients_of_the_one_that_is_not(name: str, fmt: str) -> None:
    model, _ = twins(name)
    expected = gradients(quantize(model, fmt))
    q = quantize(model, fmt)
    compiled = torch.compile(q, backend="aot_eager", fullgraph=True)
    x = randn(8, 32).requires_grad_()
    y = compiled(x)
    y.backward(randn(*y.shape, seed=2))
    assert_equal([y.detach(), x.grad, q.w.grad], expected)  # type: ignore[list-item]


# Beside native code


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g * 3e4) * 1e-4


class Wide(torch.autograd.Function):
    """Computes in float32 on purpose, forward and backward, as a fused normalisation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float() * 1.003 + 0.1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert g.dtype == x.dtype
        return (g.float() * 1.003 * x.float()).to(g.dtype) * 1.1


class InPlace(torch.autograd.Function):
    """Writes to its gradient, to a buffer and to an argument of `main_grad`'s kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        seen += 1
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g = g.clone()
        g[0] = x[0]
        g.mul_(1.1).add_(x)
        w.main_grad.add_((g * x).float())
        out = torch.empty_like(g)
        torch.mul(g, w, out=out)
        return out, None, None


class OfFunction(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.w = nn.Parameter(randn(4, 4, seed=3).bfloat16().float())
        self.w.main_grad = torch.zeros(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.w
        if self.kind == "scale":
            return Scale.apply(h)  # type: ignore[no-any-return]
        if self.kind == "hook":
            h.register_hook(lambda g: (g * 3e4) * 1e-4)
            return h * 1
        if self.kind == "wide":
            return Wide.apply(h) * 1.1  # type: ignore[no-any-return]
        if self.kind == "keeps wide":
            return KeptOutput.apply(h.float() * 1.003).to(h.dtype)  # type: ignore[no-any-return]
        return InPlace.apply(h, self.w, self.seen) * 1.1  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["scale", "hook", "wide", "keeps wide", "in place"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_own_code_has_the_gradients_of_native_code(kind: str, dtype: torch.dtype) -> None:
    found = []
    for is_native in (True, False):
        model = OfFunction(kind)
        main_grad = model.w.main_grad
        model = model.to(dtype) if is_native else quantize(model, {torch.bfloat16: "bf16"}.get(dtype, "fp16"))
        model.w.main_grad = main_grad
        cast = dtype if is_native else torch.float32
        x = randn(4, 4).to(dtype).to(cast).requires_grad_()
        y = model(x)
        y.backward(torch.full((4, 4), 4.0, dtype=cast))
        found.append([v.float() for v in (y, x.grad, model.w.grad, main_grad, model.seen)])
    for native, ours in zip(*found, strict=True):
        assert torch.equal(native, ours)
    assert not found[1][1].isfinite().all() or kind not in ("scale", "hook") or dtype is torch.bfloat16


def test_a_parameters_attribute_and_a_buffer_are_those_of_the_model() -> None:
    model = quantize(OfFunction("in place"), "bf16")
    model.w.main_grad = torch.zeros(4, 4)
    model(randn(4, 4).requires_grad_()).sum().backward()
    assert model.seen == 1
    assert model.w.main_grad.any()


def test_fp32_is_plain_and_a_function_outside_of_a_model_is_left_alone() -> None:
    by_function, _ = twins("product")
    assert_equal(gradients(quantize(by_function, "fp32")), gradients(by_function))
    x = randn(8, 32).requires_grad_()
    y = Product.apply(x, by_function.w)
    assert type(y.grad_fn).__mro__[1].__name__ == "BackwardCFunction"


def test_a_function_inside_of_another_operation_is_told_of_once() -> None:
    class Inside(torch.autograd.Function):
        forward, backward = Scale.forward, Scale.backward

    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def operation(x: Tensor) -> Tensor:
        return Inside.apply(x)  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operation(x * 1.1)  # type: ignore[no-any-return]

    q, x = quantize(Outer(), "bf16"), randn(4, 4).requires_grad_()
    with pytest.warns(UserWarning, match="autograd Function Inside was applied inside of another operation"):
        q(x).sum().backward()
    q(x)


class KeepsSlope(torch.autograd.Function):
    """A slope that the forward takes, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (ctx.slope,) = torch.autograd.grad((inner * 1.37).sum(), inner)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.slope


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gradient_that_a_forward_keeps_is_no_error_in_the_backward(is_compiled: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return KeepsSlope.apply(x)  # type: ignore[no-any-return]

    x = torch.linspace(0.3, 1.7, 24, requires_grad=True)
    model: Any = quantize(Model(), MIXED)
    out = torch.compile(model, backend="aot_eager")(x) if is_compiled else model(x)
    g = torch.linspace(-1, 1, 24)
    out.backward(g)
    slope = round_to(round_to(torch.tensor(1.37), "bf16"), "e5m2")  # made as an error, kept as an activation
    assert torch.equal(x.grad, round_to(round_to(g, "bf16") * slope, "bf16"))


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(
    "given", [lambda w: w, lambda w: w[:], lambda w: w.t().t()], ids=["itself", "a slice", "turned"]
)
def test_a_weight_that_has_no_format_is_saved_as_one(given: Callable[[Tensor], Tensor], way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, given(self.w))  # type: ignore[no-any-return]

    model: Any = quantize(Model(), Policy(activation="e5m2", error="bf16"))
    x, g = torch.randn(4, 6).requires_grad_(), torch.randn(4, 6)
    run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    run(x).backward(g)
    errors = round_to(g, "bf16")
    assert torch.equal(x.grad, round_to(errors @ model.w.detach(), "bf16"))
    assert torch.equal(model.w.grad, errors.t() @ round_to(x.detach(), "e5m2"))
