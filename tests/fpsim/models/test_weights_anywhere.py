"""A weight is a weight wherever it lies, however the model is called; a buffer likewise.

Expected is what torch's own casts give: weights in float16, activations in bfloat16, gradients of weights in e5m2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_functions import Same
from tiers import parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fpsim import Policy, emulate, quantize

POLICY = Policy(weight="fp16", activation="bf16", error="bf16", weight_grad="e5m2")


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.register_buffer("scale", torch.full((6,), 0.3))

    def forward(self, i: Tensor) -> Tensor:
        return self.table(i)  # type: ignore[no-any-return]


class Product(nn.Module):
    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        return x @ (self.kept[0] if w is None else w).T


class Model(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.body = nn.Sequential(nn.Sequential(Leaf()))
        self.own = nn.Parameter(torch.randn(5, 6))
        self.list, self.dict = nn.ParameterList([self.own]), nn.ParameterDict({"w": self.own})
        self.product, self.head = Product(), nn.Linear(6, 5, bias=False)
        if place == "tied":  # else it lies nowhere else
            self.head.weight = self.leaf.table.weight
        self.keeps = Product([self.leaf.table.weight])
        self.keeps_list = Product(nn.ParameterList([self.leaf.table.weight] if "ParameterList" in place else []))

    @property
    def leaf(self) -> Any:
        return self.body[0][0]

    def forward(self, x: Tensor) -> Tensor:
        return PLACES[self.place](self, x)


PLACES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "its own": lambda m, x: x @ m.own.T,
    "of a grandchild": lambda m, x: x @ m.leaf.table.weight.T,
    "of a grandchild, by a function": lambda m, x: F.linear(x, m.leaf.table.weight),
    "tied": lambda m, x: m.head(x),
    "an argument": lambda m, x: m.product(x, m.leaf.table.weight),
    "an argument of a checkpoint": lambda m, x: checkpoint(m.product, x, m.leaf.table.weight, use_reentrant=False),
    "a ParameterList of a child": lambda m, x: m.keeps_list(x),
    "a slice of a ParameterList": lambda m, x: m.product(x, next(iter(m.list[:1]))),
    "a ParameterDict": lambda m, x: x @ m.dict["w"].T,
    "a list of the forward": lambda m, x: m.product(x, [m.leaf.table.weight, m.own][0]),
    "a list of a child": lambda m, x: m.keeps(x),
}


Result = tuple[Tensor, dict[str, Any]]  # what the model gives, and the gradients of its parameters


def trained(q: nn.Module, call: Callable[..., Tensor], x: Tensor) -> Result:
    out = call(x)
    out.sum().backward()
    return out, {name: p.grad for name, p in q.named_parameters()}


def eager(q: nn.Module, x: Tensor) -> Result:
    return trained(q, q, x)


def compiled(q: nn.Module, x: Tensor) -> Result:
    torch._dynamo.reset()
    return trained(q, torch.compile(q, backend="aot_eager", fullgraph=True), x)


def functional(q: nn.Module, x: Tensor, call: Any = torch.func.functional_call) -> Result:
    p = {name: p.detach().clone().requires_grad_() for name, p in q.named_parameters()}
    out = call(q, p, (x,))
    out.sum().backward()
    return out, {name: p.grad for name, p in p.items()}


def differentiated(q: nn.Module, x: Tensor) -> Result:
    def loss(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(q, p, (x,))
        return out.sum(), out

    gradients, out = torch.func.grad(loss, has_aux=True)({name: p.detach() for name, p in q.named_parameters()})
    return out, gradients


class Around(nn.Module):
    """Calls a model with tensors in the place of its parameters, as a part of its own forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(self.inner, p, (x,))


def functional_inside(q: nn.Module, x: Tensor) -> Result:
    model = Model(q.place)  # type: ignore[arg-type]
    model.load_state_dict(q.state_dict())
    return functional(q, x, lambda _, p, given: quantize(Around(model), POLICY)(*given, p))


WAYS = {way.__name__: way for way in (eager, compiled, functional, functional_inside, differentiated)}
FUNCTIONAL = ("functional", "functional_inside", "differentiated")
# In torch itself functional_call changes no list of Python, the slice of a ParameterList makes parameters anew of other
# tensors, and torch.func refuses the hooks of a checkpoint.
NOT_OF_TORCH = [(way, place) for way in FUNCTIONAL for place in ("a list of a child", "a slice of a ParameterList")]
NOT_OF_TORCH += [("differentiated", "an argument of a checkpoint")]
OF_OWN = ("its own", "a slice of a ParameterList", "a ParameterDict")
KEPT = ("of a grandchild", "an argument"), ("a slice of a ParameterList", "a list of a child")  # the latter, compiled
CASES = [(way, place) for way in WAYS for place in PLACES if (way, place) not in NOT_OF_TORCH]


@parametrize(("way", "place"), CASES, keep=lambda way, place: way == "eager" or place in KEPT[way == "compiled"])
def test_a_weight_is_rounded_as_one_wherever_it_lies(way: str, place: str) -> None:
    """Products and sums are exact: of small integers, and of weights of thirteen bits that have eleven in float16."""
    q, x = quantize(Model(place), POLICY), torch.randint(-8, 9, (7, 6)).float()
    own, table = (dict(q.named_parameters())[name] for name in ("own", "body.0.0.table.weight"))
    for p in (own, table):
        p.data.copy_(torch.randint(2**12, 2**13, p.shape) / 2**12)
    w = own if place in OF_OWN else table
    out, gradients = WAYS[way](q, x)
    assert torch.equal(out, (x @ w.detach().half().float().T).bfloat16().float())
    expected = (torch.ones(5, 7) @ x).to(torch.float8_e5m2).float()
    for name, p in q.named_parameters():
        if p is w:
            assert torch.equal(gradients[name], expected)
        else:
            assert gradients[name] is None or not gradients[name].any()


@pytest.mark.parametrize("way", ["view", "element", "einsum", "data"])
def test_a_view_of_a_weight_is_one_under_transforms(way: str) -> None:
    """Rounded once, to 11 bits, and not to the 8 of activations; of its gradient the same."""
    views: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "view": lambda w, x: x @ w.T,
        "element": lambda w, x: x * w[2],
        "einsum": lambda w, x: torch.einsum("bi,oi->bo", x, w),
        "data": lambda w, x: x @ w.data.T + w.sum() * 0,
    }

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randint(2**12, 2**13, (5, 6)) / 2**12)

        def forward(self, x: Tensor) -> Tensor:
            return views[way](self.w, x)

    q, x = quantize(Viewing(), POLICY), torch.randint(-8, 9, (7, 6)).float()
    (out, gradients), (expected, of_eager) = differentiated(q, x), eager(q, x)
    assert torch.equal(expected, views[way](q.w.detach().half().float(), x).bfloat16().float())
    assert torch.equal(out, expected)
    assert torch.equal(gradients["w"], of_eager["w"])


@pytest.mark.parametrize("is_functional", [False, True])
def test_a_weight_that_is_given_to_a_reentrant_checkpoint_stays_one_when_it_runs_again(is_functional: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randint(2**12, 2**13, (5, 6)) / 2**12)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x, w: (x @ w.T).square(), x, self.w, use_reentrant=True)  # type: ignore[no-any-return]

    q, x = quantize(Recomputed(), Policy(weight="fp16", activation="bf16")), torch.randint(-8, 9, (7, 6)).float()
    x.requires_grad_()
    _ = functional(q, x) if is_functional else eager(q, x)
    w = q.w.detach().half().float()
    y = (x.detach() @ w.T).bfloat16().float()
    torch.testing.assert_close(x.grad, 2 * y @ w, rtol=5 * 2**-24, atol=2**-14)  # five float32 sums in another order


@pytest.mark.parametrize("is_written", [False, True])
def test_a_buffer_is_one_however_deep_it_lies(is_written: bool) -> None:
    """What is written to it stays as it was computed, and `.float()` reads it as it is."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(Leaf()))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.body[0][0].scale
            return scale.mul_(1.003) if is_written else scale.float()

    q = quantize(Deep(), "e4m3fn")
    out = q(torch.ones(1))
    expected = torch.full((6,), 0.3)
    assert torch.equal(q.body[0][0].scale, expected * 1.003 if is_written else expected)
    assert is_written or torch.equal(out, expected)


def test_a_weight_of_a_module_around_a_compiled_model_is_one() -> None:
    """A plain module gives its own parameter to a quantised one, and the whole is compiled."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.inner = nn.Parameter(torch.randint(2**12, 2**13, (5, 6)) / 2**12), quantize(Product(), POLICY)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.w)  # type: ignore[no-any-return]

    model, x = Gives(), torch.randint(-8, 9, (7, 6)).float()
    out, gradients = compiled(model, x)
    assert torch.equal(out, (x @ model.w.detach().half().float().T).bfloat16().float())
    assert torch.equal(gradients["w"], (torch.ones(5, 7) @ x).to(torch.float8_e5m2).float())


def test_a_block_inside_of_a_forward_knows_the_weights_around_it() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randint(2**12, 2**13, (5, 6)) / 2**12)

        def forward(self, x: Tensor) -> Tensor:
            with emulate(POLICY):
                return x @ self.w.T

    q, x = quantize(Blocks(), "bf16"), torch.randint(-8, 9, (7, 6)).float()
    assert torch.equal(functional(q, x)[0], (x @ q.w.detach().half().float().T).bfloat16().float())


@pytest.mark.parametrize("is_functional", [False, True])
def test_a_weight_in_the_place_of_a_buffer_stays_one(is_functional: bool) -> None:
    """`functional_call` puts it there, where the module has a buffer of that name."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.zeros(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (x.double() @ self.w.double().T).float()

    class Puts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.reads = nn.Parameter(torch.randint(2**12, 2**13, (5, 6)) / 2**12), Reads()

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.reads, {"w": self.w}, (x,))  # type: ignore[no-any-return]

    q, x = quantize(Puts(), POLICY), torch.randint(-8, 9, (7, 6)).float()
    expected = x @ q.w.detach().half().float().T
    for _ in range(2):  # and what it is lasts no longer than the call
        assert torch.equal((functional if is_functional else eager)(q, x)[0], expected)


def test_what_changes_between_two_calls_is_seen_by_the_second() -> None:
    """A layer is added, one is replaced, a weight is tied, one is parametrised and is no longer."""

    class Halved(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w / 2

    q, x = quantize(Model("of a grandchild"), POLICY), torch.randint(-8, 9, (7, 6)).float()

    def weight() -> Tensor:
        w = q.body[0][0].table.weight
        w.data.copy_(torch.randint(2**12, 2**13, w.shape) / 2**12)
        return w.detach()  # type: ignore[no-any-return]

    def expected(w: Tensor) -> Tensor:
        return (x @ w.half().float().T).bfloat16().float()

    w = weight()
    assert torch.equal(q(x), expected(w))
    q.body[0][0] = Leaf()
    w = weight()
    assert torch.equal(functional(q, x)[0], expected(w))
    q.body[0][0].table.weight = q.own
    w = weight()
    assert torch.equal(q(x), expected(w))
    table = q.body[0][0].table = nn.Embedding(5, 6)
    w = weight().clone()
    torch.nn.utils.parametrize.register_parametrization(table, "weight", Halved(), unsafe=True)
    assert torch.equal(q(x), expected(w / 2))
    torch.nn.utils.parametrize.remove_parametrizations(table, "weight", leave_parametrized=False)
    assert torch.equal(q(x), expected(w))


def test_a_program_takes_no_trained_tensor_for_a_constant() -> None:
    outside = torch.randn(6, requires_grad=True)

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * outside

    q, x = quantize(Hidden(), "bf16"), torch.randn(3, 6)
    with pytest.warns(UserWarning, match="requires a gradient and is neither an input nor one of the model's param"):
        torch.compile(q, backend="aot_eager")(x).sum().backward()
    expected = x.bfloat16().float().sum(0).bfloat16().float()
    assert torch.equal(outside.grad, expected)


def in_e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).float()


class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:4], x[4:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.cat(gradients)


class ThroughAFunction(nn.Module):
    def __init__(self, of: str, is_viewed: bool) -> None:
        super().__init__()
        self.of, self.is_viewed = of, is_viewed
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.register_buffer("table", torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = {"parameter": self.weight, "buffer": self.table, "row": self.weight[1:].view(7, 6), "input": x}[self.of]
        y = torch.cat(Viewed.apply(y)) if self.is_viewed else Same.apply(y)
        return x @ y.T + self.weight[0, 0]


VIEWS_OF_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "given back": lambda w: Same.apply(w[1:2]),
    "transposed": lambda w: Same.apply(w.T).T[1:2],
    "two views": lambda w: Viewed.apply(w[:])[0][1:2],
    "two views of rows": lambda w: torch.cat(Viewed.apply(w[1:]))[:1],
    "twice": lambda w: Same.apply(Same.apply(w[:2])[1:]),
}


@pytest.mark.parametrize("view", VIEWS_OF_WEIGHTS)
@pytest.mark.parametrize("policy", [POLICY, "bf16"], ids=["roles", "bf16"])
def test_a_view_of_a_weight_that_a_function_gives_back_is_a_weight_and_leaves_it_as_it_is(
    policy: Any, view: str
) -> None:
    class Row(ThroughAFunction):
        def forward(self, x: Tensor) -> Tensor:
            return x @ VIEWS_OF_WEIGHTS[view](self.weight)

    model: Any = quantize(Row("row", True), policy)
    before, x = model.weight.detach().clone(), torch.randn(3, 1)
    out = model(x)
    assert torch.equal(model.weight, before)
    w = before[1:2].half() if policy is POLICY else before[1:2].bfloat16()
    assert torch.equal(out.detach(), (x.bfloat16().float() @ w.float()).bfloat16().float())  # products of one term


@parametrize(
    ("of", "is_viewed"),
    [(of, is_viewed) for of in ("parameter", "buffer", "row", "input") for is_viewed in (False, True)],
    keep=lambda of, is_viewed: (of, is_viewed) in (("parameter", False), ("row", True)),
)
@pytest.mark.parametrize("policy", [Policy(activation="e5m2", error="bf16"), POLICY], ids=["activations", "all"])
def test_what_a_function_gives_back_keeps_its_role_compiled(of: str, is_viewed: bool, policy: Policy) -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        plain = ThroughAFunction(of, is_viewed)
        model: Any = quantize(plain, policy)
        x = torch.randn(3, 6, requires_grad=True)
        y = (torch.compile(model, backend="aot_eager") if is_compiled else model)(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, model.weight.grad))
        assert torch.equal(model.weight, plain.weight)  # a view of its own memory is not rounded in place
        assert torch.equal(model.table, plain.table)
    for eager, compiled in zip(*found, strict=True):
        assert (eager is None) is (compiled is None)
        assert eager is None or torch.equal(eager, compiled)
    if of == "parameter" and not is_viewed and policy.weight is None:
        x = in_e5m2(x.detach())
        assert torch.equal(found[0][0], in_e5m2(in_e5m2(x @ model.weight.detach().T) + model.weight.detach()[0, 0]))
