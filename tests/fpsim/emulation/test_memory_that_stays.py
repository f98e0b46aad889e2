"""Parameters, buffers and inputs: what code writes to them arrives there, and what it reads is in the format."""

from __future__ import annotations

import asyncio
import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import parametrize
from torch import Tensor, nn

from fpsim import Policy, emulate, quantize, round_to

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Written(nn.Module):
    """A module that writes to its parameter before it uses it."""

    def __init__(self, write: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.w, self.write = nn.Parameter(torch.ones(4, 16)), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.w)
        return x * self.w[0] + self.w[2] * self.w[3]


# Each writes numbers that every format below has, through something that lies in the parameter's memory.
WRITES: dict[str, Callable[[Any], Any]] = {
    "an element of it": lambda w: w[2].mul_(0.5),
    "a slice": lambda w: w[1:3].mul_(0.5),
    "select": lambda w: w.select(0, 2).fill_(0.5),
    "narrow": lambda w: w.narrow(0, 2, 1).zero_(),
    "view": lambda w: w.view(-1)[32:].mul_(2),
    "the transposed": lambda w: w.T[3].add_(1),
    "diagonal": lambda w: w.diagonal().fill_(0.25),
    "unbind": lambda w: w.unbind()[2].copy_(torch.full((16,), 0.5)),
    "chunk": lambda w: w.chunk(2)[1].mul_(0.5),
    "detach": lambda w: w.detach().mul_(0.5),
    "a view of detach": lambda w: w.detach()[3].zero_(),
    "detach of a view": lambda w: w[3].detach().zero_(),
    "data": lambda w: w.data.mul_(0.5),
    "a view of data": lambda w: w.data[2:].mul_(0.5),
    "data of a view": lambda w: w[2].data.mul_(0.5),
    "setting an item": lambda w: w.__setitem__((2, slice(None, 8)), 0.5),
    "setting an item of detach": lambda w: w.detach().__setitem__(2, 0.5),
    "itself": lambda w: w.mul_(0.5),
    "a list": lambda w: torch._foreach_mul_([w.data], 0.5),
    "out=": lambda w: torch.mul(w[2], 0.5, out=w.data[2]),
}


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "e4m3fn", "mxfp8_e4m3", "recipe:fp8_current"])
@pytest.mark.parametrize("way", WRITES)
def test_a_write_to_a_parameter_arrives_there(way: str, fmt: str) -> None:
    plain, x = Written(WRITES[way]), torch.ones(8, 16)
    model = quantize(plain, fmt)
    expected = plain(x)
    out = model(x)
    assert torch.equal(model.w, plain.w)
    assert torch.equal(out, expected)


def test_a_write_through_data_rounds_no_master_weight() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.table = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            self.w.data.clamp_(-5, 5)
            self.table.data.index_add_(0, torch.tensor([1]), torch.ones(1, 16))
            return x * self.w + self.table[0]

    plain = M()
    model = quantize(plain, "e4m3fn")
    model(torch.randn(8, 16))
    assert torch.equal(model.w, plain.w)
    assert torch.equal(model.table[[0, 2, 3]], plain.table[[0, 2, 3]])
    assert torch.equal(model.table[1], plain.table[1] + 1)


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn"])
def test_the_next_use_of_a_parameter_sees_what_was_written_through_data(fmt: str) -> None:
    p = nn.Parameter(torch.ones(1))
    with emulate(fmt):
        for _ in range(3):
            loss = (p * 2.0).sum()
            p.data.sub_(0.25)
    assert loss.item() == 1.0
    w, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3)
    with emulate(fmt):
        before = x @ w
        w.data.copy_(torch.zeros(3, 3))
        after = x @ w
    assert (before == 3).all()
    assert (after == 0).all()


def test_an_in_place_change_of_a_view_that_autograd_forbids_is_refused() -> None:
    w = nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        w[0].mul_(2)
    with emulate("bf16"), pytest.raises(RuntimeError, match="leaf Variable"):
        w[0].mul_(2)


@pytest.mark.parametrize("way", ["data", "detach", "data, transposed twice"])
def test_data_of_a_weight_is_a_weight_where_it_is_used(way: str) -> None:
    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(5, 8))
    views = {"data": lambda: w.data.T, "detach": lambda: w.detach().T, "data, transposed twice": lambda: w.data.T.T.T}
    with emulate(Policy(weight="e4m3fn")):
        y = x @ views[way]()
    assert torch.equal(y, x @ round_to(w.detach(), "e4m3fn").T)
    with emulate("mxfp8_e4m3"):
        of_data, of_weight = x @ views[way](), x @ w.T
    assert torch.equal(of_data, of_weight)


def test_a_step_inside_of_emulate_stays_one_in_float32_and_warns() -> None:
    class Older(torch.optim.Optimizer):
        """An optimizer that writes to p.data, as those of before torch.no_grad."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["m"] = state.get("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad.data, alpha=0.1)
                p.data.add_(state["m"], alpha=-0.37)

    for make in (Older, lambda p: torch.optim.Adam(p, foreach=False), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)):
        plain = nn.Linear(8, 8)
        other = copy.deepcopy(plain)
        inside, outside = make(plain.parameters()), make(other.parameters())
        x = torch.randn(3, 8)
        for _ in range(3):
            with emulate("e4m3fn"):
                plain(x).square().mean().backward()
                with pytest.warns(UserWarning, match="stays a float32 step"):
                    inside.step()
                inside.zero_grad()
            with emulate("e4m3fn"):
                loss = other(x).square().mean()
            loss.backward()
            outside.step()
            outside.zero_grad()
        assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_after_a_step_that_raised_the_block_is_emulated() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    p = nn.Parameter(torch.ones(3))
    optimizer = Broken([p], lr=0.1)
    with emulate("e4m3fn"):
        with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="stays"):
            optimizer.step()
        y = torch.full((3,), 0.3, dtype=p.dtype) * p * 1.1
    assert torch.equal(y.detach(), round_to(y.detach(), "e4m3fn"))


def test_the_closure_of_a_step_is_emulated() -> None:
    p, seen = nn.Parameter(torch.tensor([1.0, 3.0])), []
    optimizer = torch.optim.LBFGS([p], max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        y = p / 3
        seen.append(y.detach().clone())
        loss = y.square().sum()
        loss.backward()
        return loss

    with emulate("e4m3fn"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(closure)
    assert all(torch.equal(y, round_to(y, "e4m3fn")) for y in seen)


# Buffers


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("r", torch.zeros(16))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        self.r.mul_(0.99).add_(x.mean(0), alpha=0.01)
        self.r[:4].clamp_(-1, 1)
        return self.norm(x) - self.r


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn", "e2m1fn"])
def test_buffers_take_what_is_computed_and_are_rounded_where_they_are_used(fmt: str) -> None:
    model, expected = quantize(Averaging(), fmt), torch.zeros(16)
    for seed in range(20):
        x = round_to(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) + 0.3, fmt)
        with emulate(fmt):
            mean = x.mean(0)
        expected.mul_(0.99).add_(mean, alpha=0.01)
        out = model(x)
    assert torch.equal(model.r, expected)
    assert not torch.equal(model.r, round_to(model.r, fmt))
    model.eval()
    with emulate(fmt):
        normal = model.norm(x)
        assert torch.equal(normal - round_to(expected, fmt), normal - model.r)
    assert torch.equal(out, round_to(out, fmt))


# Inputs


CHOICES: dict[str, Callable[[Tensor, Any], Any]] = {
    "x * 1 == p": lambda x, p: x * 1 == p,
    "x >= p": lambda x, p: x >= p,
    "x.argmax(-1)": lambda x, p: x.argmax(-1),
    "x.topk(3).values": lambda x, p: x.topk(3).values,
    "x.sort().values": lambda x, p: x.sort().values,
    "x[x > 1]": lambda x, p: x[x > 1],
    "x == 0.1": lambda x, p: x == 0.1,
    "torch.bucketize(x, p.sort().values)": lambda x, p: torch.bucketize(x, p.sort().values),
    "torch.tensor(float(p.detach()[0]))": lambda x, p: torch.tensor(float(p.detach()[0])),
    "torch.tensor(p.tolist())": lambda x, p: torch.tensor(p.tolist()),
    "x": lambda x, p: x,
    "x.relu()": lambda x, p: x.relu(),
    "F.max_pool1d(x, 2)": lambda x, p: F.max_pool1d(x, 2),
    "x.view(-1)[3:]": lambda x, p: x.view(-1)[3:],
    "torch.cat([x, x])": lambda x, p: torch.cat([x, x]),
    "x.float() * 1.1": lambda x, p: x.float() * 1.1,
    "x.view(-1).float() * 1.1": lambda x, p: x.view(-1).float() * 1.1,
    "torch.softmax(x, -1, dtype=torch.float32)": lambda x, p: torch.softmax(x, -1, dtype=torch.float32),
    "torch.softmax(x.relu(), -1, torch.float32)": lambda x, p: torch.softmax(x.relu(), -1, torch.float32),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_chooses_or_moves_sees_numbers_of_the_format(name: str, dtype: torch.dtype) -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.linspace(0.1, 0.9, 8))

        def forward(self, x: Tensor) -> Any:
            return CHOICES[name](x, self.p)

    x, model = torch.randn(4, 8), M()
    x[0] = model.p.detach() * (1 + 2.0**-12)
    expected = copy.deepcopy(model).to(dtype)(x.to(dtype))
    out = quantize(model, "bf16" if dtype is torch.bfloat16 else "fp16")(x)
    assert out.dtype is expected.dtype or out.dtype is torch.float32
    assert torch.equal(out.float(), expected.float())


@pytest.mark.parametrize("bias", ["a parameter", "a tensor"])
def test_a_finite_bias_of_attention_is_an_operand(bias: str) -> None:
    q, b = round_to(torch.randn(2, 5, 8), "bf16"), torch.randn(5, 5)
    mask = nn.Parameter(b) if bias == "a parameter" else b
    with emulate("bf16"):
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    rounded = round_to(b, "bf16").requires_grad_()
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=rounded)
    assert torch.equal(out, round_to(expected, "bf16"))
    if bias == "a parameter":
        out.sum().backward()
        assert mask.grad is not None
        assert torch.equal(mask.grad, round_to(mask.grad, "bf16"))


# Modules made inside


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "e4m3fn", "recipe:nvfp4"])
def test_layers_may_be_made_and_initialised_inside(fmt: str) -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.Sequential(nn.LazyLinear(16), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            made = nn.Linear(16, 16)
            nn.init.xavier_uniform_(made.weight)
            nn.init.normal_(tensor=made.bias, std=0.1)
            return made(self.lazy(x))

    model = quantize(M(), fmt) if fmt != "recipe:nvfp4" else quantize(M(), "mxfp8_e4m3")
    assert model(torch.randn(4, 16)).isfinite().all()
    with emulate(fmt):
        assert nn.init.normal_(torch.empty(300)).std() > 0.5
        assert (nn.init.constant_(torch.empty(3), 0.5) == 0.5).all()


def test_a_forward_that_is_a_generator_is_emulated() -> None:
    class M(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for _ in range(3):
                x = x * 1.1
                yield x
            return x / 3

    x = torch.randn(8)
    model = quantize(M(), "bf16")
    expected = [y.float() for y in M()(x.bfloat16())]
    found = []
    for y in model(x):
        found.append(y)
        assert torch.equal(torch.ones(1) / 3, torch.tensor([1 / 3]))  # what runs between is not emulated
    assert all(map(torch.equal, found, expected))
    closed = model(x)
    next(closed)
    closed.close()


def test_closing_a_forward_that_is_a_generator_closes_the_models_own_at_once() -> None:
    class M(nn.Module):
        def forward(self, x: Tensor) -> Any:
            self.steps = (x * i for i in range(3))
            return self.steps

    model = quantize(M(), "bf16")
    steps = model(torch.ones(2))
    next(steps)
    steps.close()
    assert inspect.getgeneratorstate(model.steps) == inspect.GEN_CLOSED


class Thirds(nn.Module):
    async def forward(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return x / 3


class Awaits(nn.Module):
    """Awaits others in its forward, and a module that is awaited too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Thirds()

    async def forward(self, x: Tensor) -> Tensor:
        y = x * 1.1
        await asyncio.sleep(0)
        return await self.inner(y) * 1.1  # type: ignore[no-any-return]


class Streams(nn.Module):
    async def forward(self, x: Tensor) -> Any:
        while True:
            await asyncio.sleep(0)
            given = yield x * 1.1
            x = x if given is None else given


def test_a_forward_that_is_awaited_is_emulated_and_what_takes_turns_with_it_is_not() -> None:
    x = torch.randn(50)
    models = [quantize(Awaits(), fmt) for fmt in NATIVE]
    between = []

    async def beside() -> None:
        for _ in range(5):
            between.append(torch.ones(1) / 3)
            await asyncio.sleep(0)

    async def together() -> list[Any]:
        return await asyncio.gather(*(model(x) for model in models), beside())

    found = asyncio.run(together())
    for y, dtype in zip(found[:-1], NATIVE.values(), strict=True):
        assert torch.equal(y, asyncio.run(Awaits()(x.to(dtype))).float())
    assert all(torch.equal(y, torch.tensor([1 / 3])) for y in between)


def test_a_forward_that_is_awaited_and_yields_is_emulated() -> None:
    async def drawn(model: nn.Module, x: Tensor) -> list[Tensor]:
        steps = model(x)
        found = [await anext(steps), await steps.asend(x * 0.5), await steps.asend(None)]
        await steps.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(steps)
        return found

    x = torch.randn(50).bfloat16()
    expected = asyncio.run(drawn(Streams(), x))
    found = asyncio.run(drawn(quantize(Streams(), "bf16"), x.float()))
    assert all(torch.equal(a, b.float()) for a, b in zip(found, expected, strict=True))


def test_an_awaited_forward_is_cancelled_where_it_waits() -> None:
    class Waits(nn.Module):
        async def forward(self, x: Tensor) -> Tensor:
            try:
                return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
            finally:
                self.left = x / 3

    async def cancelled(model: nn.Module) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(model(torch.ones(1)), 0.001)

    model = quantize(Waits(), "bf16")
    asyncio.run(cancelled(model))
    assert torch.equal(model.left, (torch.ones(1) / 3).bfloat16().float())
    assert torch.equal(torch.ones(1) / 3, torch.tensor([1 / 3]))


def test_a_policy_for_weights_alone_rounds_no_activation() -> None:
    model = quantize(nn.Linear(8, 8), Policy(weight="e4m3fn"))
    x = torch.randn(3, 8)
    assert torch.equal(
        model(x), F.linear(x, round_to(model.weight.detach(), "e4m3fn"), round_to(model.bias.detach(), "e4m3fn"))
    )


def test_optimizers_outside_move_what_was_viewed_inside() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.w.chunk(3)
            return x @ a.T + (x @ b.T) * c.T.sum(0)

    native, x = M().bfloat16(), torch.randn(5, 4).bfloat16()
    model = quantize(copy.deepcopy(native).float(), "bf16")
    for m, given in ((native, x), (model, x.float())):
        m(given).float().square().sum().backward()
    error = (native.w.grad.float() - model.w.grad).norm() / native.w.grad.float().norm()  # type: ignore[union-attr]
    # sums of products in another order differ before they are rounded, by 2^-9 at most each: two products, their sum,
    # and in the gradient the products with c and with x
    assert error < 5 * 2.0**-9


@pytest.mark.parametrize("fmt", NATIVE)
def test_a_view_that_takes_no_gradient_any_more_can_be_read(fmt: str) -> None:
    def compared(x: Tensor) -> Tensor:
        whole = x * 1.5
        first, second = whole.chunk(2)
        whole[-1].mul_(3.0)
        with pytest.raises(RuntimeError, match="multiple views"):  # torch's own error, natively and emulated
            second + 1.0
        return (second > 0.3) & (second != first)

    x = torch.tensor([[0.1, 0.25], [0.2, 0.15]]).to(NATIVE[fmt])
    outside = x.float().requires_grad_()
    with emulate(fmt):
        emulated = compared(outside)
    assert torch.equal(emulated, compared(x.requires_grad_()))


@pytest.mark.parametrize("way", [lambda x, like: x.type(like.dtype), lambda x, like: x.to(like.dtype)])
@pytest.mark.parametrize("fmt", NATIVE)
def test_a_cast_to_its_own_dtype_is_the_tensor_itself(fmt: str, way: Callable[[Tensor, Tensor], Tensor]) -> None:
    def cast(x: Tensor) -> tuple[Tensor, bool]:
        made = -x
        view = made.data.expand(2, 3)
        same = way(view, made)
        made.neg_()
        return same, same is view

    x = torch.tensor([0.5, 1.5, -2.0]).to(NATIVE[fmt])
    outside = x.float()
    with emulate(fmt):
        emulated, is_same = cast(outside)
    native, is_same_natively = cast(x)
    assert torch.equal(emulated, native.float())
    assert is_same is is_same_natively is True


class WritesToData(torch.optim.Optimizer):
    """Doubles its parameters behind torch's back: a write to `.data` is not counted."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.mul_(2)


def test_after_a_step_inside_weights_are_rounded_again() -> None:
    w = nn.Parameter(torch.tensor([1.1]))
    optimizer = WritesToData([w])
    with emulate("fp16"):
        before = w * 1.0
        with pytest.warns(UserWarning, match=r"An optimizer's step ran inside of fpsim\.emulate"):
            optimizer.step()
        after = w * 1.0
    assert torch.equal(before, torch.tensor([1.1]).half().float())
    assert torch.equal(after, torch.tensor([2.2]).half().float())


@pytest.mark.parametrize(
    "copied",
    [torch.clone, lambda v: torch.cat([v, v])[:2], lambda v: v.expand(2, 2).contiguous()[1]],
    ids=["clone", "cat", "contiguous"],
)
def test_what_is_copied_of_a_view_of_a_weight_is_in_the_weights_format(copied: Callable[[Tensor], Tensor]) -> None:
    w = nn.Parameter(torch.tensor([1.03, 0.3]))
    with emulate(Policy(weight="fp16", activation="e4m3fn")):
        read = copied(w.detach()).tolist()
    assert read == torch.tensor([1.03, 0.3]).half().tolist()


def test_a_view_of_a_weight_has_the_noise_of_the_weight() -> None:
    w = nn.Parameter(torch.full((64,), 0.3))  # each of 64 is rounded up or down by chance
    with emulate("e4m3fn", rounding="stochastic"):
        used = w * 1
        assert torch.equal(used, w.detach() * 1)
        assert torch.equal(used, w.data[:] * 1)


def test_a_view_of_its_input_that_a_module_gives_is_in_the_format() -> None:
    class Rest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 1:]

    x = torch.tensor([[0.3, 1.03, 2.2]])
    assert torch.equal(quantize(Rest(), "bf16")(x), x[:, 1:].bfloat16().float())
    assert torch.equal(x, torch.tensor([[0.3, 1.03, 2.2]]))


def test_a_result_from_outside_may_be_written_to_through_its_view() -> None:
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    x = leaf * 1
    with emulate("fp16"):
        x[:1].add_(1.0)
        y = (x * x).sum()
    y.backward()
    assert torch.equal(x, torch.tensor([2.0, 2.0]))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.tensor([4.0, 4.0]))  # d(x^2) = 2x


def test_a_view_that_is_held_sees_what_is_written_to_the_whole() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True) * 1
    with emulate("fp16"):
        view = x[:1]
        x.add_(1.0)
    assert torch.equal(view, torch.tensor([2.0]))


def test_a_parameter_whose_data_are_replaced_in_the_block_is_rounded_again() -> None:
    w = nn.Parameter(torch.tensor([1.0, 3.0]))
    with emulate("e4m3fn"):
        assert torch.equal(w * 1, torch.tensor([1.0, 3.0]))
        w.data = torch.tensor([2.0, 4.0])
        assert torch.equal(w * 1, torch.tensor([2.0, 4.0]))


def test_results_stored_in_buffers_and_parameters_stay_as_they_were_computed() -> None:
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.zeros(2))
            self.w = nn.Parameter(torch.zeros(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            torch.div(x, 3, out=self.buffer)
            torch.div(x, 3, out=self.w)
            return x

    model, x = quantize(Stores(), "e4m3fn"), torch.tensor([1.0, 5.0])
    model(x)
    assert torch.equal(model.buffer, x / 3)
    assert torch.equal(model.w, x / 3)


class Turned(torch.autograd.Function):
    """Gives back a view of its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return y.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g.t()


# Each writes numbers of bf16 and fp16 to a matrix.
INTO_A_VIEW: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda v: v.mul_(0.5),
    "a slice": lambda v: v[:2].mul_(0.5),
    "an element": lambda v: v.__setitem__((0, 1), 0.5),
    "unsqueeze": lambda v: v[None].neg_(),
    "data": lambda v: v.data.mul_(0.5),
    "out=": lambda v: torch.mul(torch.ones(4, 4, dtype=v.dtype), 0.5, out=v),
    "a slice as out=": lambda v: torch.mul(torch.ones(2, 4, dtype=v.dtype), 0.5, out=v[:2]),
}


@pytest.mark.parametrize("has_gradient", [False, True], ids=["no_grad", "grad"])
@parametrize("what", ["input", "a part of it", "buffer", "parameter"], keep={"a part of it", "parameter"})
@parametrize("way", INTO_A_VIEW, keep={"in place", "data", "a slice as out="})
def test_what_is_written_to_a_view_that_a_function_gave_arrives_where_it_lies(
    way: str, what: str, has_gradient: bool
) -> None:
    """And the next use sees it, and torch refuses what it refuses."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.arange(16.0).view(4, 4))
            self.parameter = nn.Parameter(torch.arange(16.0).view(4, 4))

        def forward(self, x: Tensor) -> Any:
            given = {"input": x, "a part of it": x[1:5]}.get(what)
            given = getattr(self, what) if given is None else given
            view = Turned.apply(x[:4] * 2.0, given)
            seen = view[0] * 1.0
            INTO_A_VIEW[way](view)
            return seen, view * 1.0, given * 1.0

    def results(model: nn.Module, x: Tensor) -> list[Tensor] | str:
        with torch.set_grad_enabled(has_gradient):
            x = x.requires_grad_(has_gradient) * 1
            try:
                out = model(x)
            except RuntimeError as error:
                return str(error).partition(" is ")[0].partition("arguments")[0]
        return [y.detach().float() for y in (*out, x, *model.parameters(), *model.buffers())]

    x = torch.arange(16.0 if what == "input" else 24.0).view(-1, 4)
    expected = results(Model().bfloat16(), x.bfloat16())
    got = results(quantize(Model(), "bf16"), x.clone())
    assert type(got) is type(expected)
    if isinstance(expected, str):
        assert got == expected
    else:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
