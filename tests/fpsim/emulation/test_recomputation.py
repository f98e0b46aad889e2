"""What a checkpoint runs again gives the gradients of a pass without checkpoints, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from ada_loss import AdaLossScaled

Wrap = Callable[..., Any]


def plain(function: Wrap, *args: Any) -> Any:
    return function(*args)


def reentrant(function: Wrap, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def non_reentrant(function: Wrap, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


WAYS = pytest.mark.parametrize("way", [reentrant, non_reentrant], ids=lambda way: way.__name__)
FORMATS = pytest.mark.parametrize("fmt", ["bf16", "e5m2"])
ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])


class Block(nn.Module):
    """A body that is a function, with an island of float32 and a residual stream."""

    def __init__(self, wrap: Wrap, is_nested: bool) -> None:
        super().__init__()
        self.wrap, self.is_nested = wrap, is_nested
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def body(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.norm(x))) * 1.1
        h = self.wrap(self.inner, h) if self.is_nested else self.inner(h)
        return x + h  # two gradients meet at x: of three, a reentrant checkpoint changes the order of the sum

    def inner(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.second(x) + (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.wrap(self.body, x * 0.9))


class Net(nn.Sequential):
    def __init__(self, wrap: Wrap, is_nested: bool = False) -> None:
        super().__init__(Block(wrap, is_nested), Block(wrap, is_nested), nn.Linear(6, 3))


def gradients_of(model: nn.Module, x: Tensor, own_stream: bool = False) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    fpsim.manual_seed(3 if own_stream else None)
    model(x).square().sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}  # type: ignore[dict-item]


def nets(way: Wrap, fmt: str, rounding: str, is_nested: bool = False) -> tuple[nn.Module, nn.Module]:
    made = []
    for wrap in (plain, way):
        torch.manual_seed(0)
        made.append(fpsim.quantize(Net(wrap, is_nested), fmt, rounding=rounding))
    return made[0], made[1]


def assert_equal(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name in expected:
        assert torch.equal(expected[name], got[name]), name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of an inner one, in the outer's first run
@WAYS
@FORMATS
@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "nested"])
def test_a_body_that_is_run_again_gives_the_same_gradients(way: Wrap, fmt: str, is_nested: bool) -> None:
    once, again = nets(way, fmt, "nearest_even", is_nested)
    x = torch.randn(5, 6)
    assert_equal(gradients_of(once, x), gradients_of(again, x))


class InFloat32(nn.Module):
    """A checkpoint, or one in another, where autocast is switched off: float32 is asked for."""

    def __init__(self, wrap: Wrap, is_nested: bool) -> None:
        super().__init__()
        self.wrap, self.is_nested, self.weight = wrap, is_nested, nn.Parameter(torch.randn(6, 6))

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * 1.1

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.wrap((lambda x: self.wrap(self.inner, x)) if self.is_nested else self.inner, x.float())
        return y @ self.weight


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@WAYS
@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("policy", ["e5m2", fpsim.Policy(weight="e5m2")], ids=["e5m2", "weights in e5m2"])
def test_a_checkpoint_where_autocast_is_switched_off_is_run_again_in_float32(
    way: Wrap, is_nested: bool, policy: Any
) -> None:
    found = []
    for wrap in (plain, way):
        torch.manual_seed(0)
        model = fpsim.quantize(InFloat32(wrap, is_nested), policy)
        found.append(gradients_of(model, torch.randn(5, 6)))
    assert_equal(*found)


@WAYS
@pytest.mark.parametrize("own_stream", [False, True], ids=["noise of torch", "own noise"])
def test_noise_of_the_forward_pass_is_the_same_when_it_is_run_again(way: Wrap, own_stream: bool) -> None:
    policy = fpsim.Policy("e4m3fn", "e4m3fn", rounding="stochastic")  # backward's own noise: see the next test
    made = []
    for wrap in (plain, way):
        torch.manual_seed(0)
        made.append(fpsim.quantize(Net(wrap), policy))
    x = torch.randn(5, 6)
    assert_equal(gradients_of(made[0], x, own_stream), gradients_of(made[1], x, own_stream))


@WAYS
@FORMATS
def test_stochastic_gradients_are_the_same_too(way: Wrap, fmt: str) -> None:
    once, again = nets(way, fmt, "stochastic")
    x = torch.randn(5, 6)
    assert_equal(gradients_of(once, x), gradients_of(again, x))


class AfterTransform(nn.Module):
    """What a transform has shown lives on, in a list of the user's or until Python collects it, when a body is run."""

    def __init__(self, wrap: Wrap, kept: str, is_used: bool, transform: str) -> None:
        super().__init__()
        self.wrap, self.kept, self.is_used, self.transform = wrap, kept, is_used, transform
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        start = x * 1.1

        def inner(shown: Tensor) -> Tensor:
            constant = start.detach() * self.weight.detach()
            product = shown * constant * 1.1
            kept.extend({"shown": [shown], "constant": [constant], "product": [product]}.get(self.kept, []))
            return product.sum()

        if self.transform == "vmap":
            slope = start.detach() + torch.func.vmap(inner)(start.detach())
        else:
            slope = getattr(torch.func, self.transform)(inner)(start.detach())
        out = self.wrap(lambda a, b: a * b * 1.1, slope, start * 0.9)
        for y in kept if self.is_used else ():
            out = out + y * 0.5
        return out


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@WAYS
@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("kept", ["nothing", "shown", "constant", "product"])
def test_what_a_transform_that_has_ended_has_shown_is_no_hindrance(way: Wrap, transform: str, kept: str) -> None:
    def run(wrap: Wrap, fmt: str | None, has_gradients: bool) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(0)
        model = AfterTransform(wrap, kept, is_used=transform != "vmap", transform=transform)
        x = torch.randn(4, 4)
        if fmt is None:
            model, x = model.bfloat16(), x.bfloat16()
        else:
            model = fpsim.quantize(model, fmt)
        x.requires_grad_(has_gradients)
        with torch.set_grad_enabled(has_gradients):
            out = model(x)
        if has_gradients:
            out.sum().backward()
        return out.detach().float(), x.grad

    native, _ = run(plain, None, False)
    assert torch.equal(run(way, "bf16", False)[0], native)
    out, gradient = run(way, "bf16", True)
    assert torch.equal(out, native)
    assert gradient is not None
    assert torch.equal(gradient, run(plain, "bf16", True)[1])  # type: ignore[arg-type]


@WAYS
def test_sites_are_those_of_the_first_run(way: Wrap) -> None:
    once, again = nets(way, "e4m3fn", "nearest_even")
    x, found = torch.randn(5, 6), []
    for model in (once, again):
        with AdaLossScaled(model) as scaled:
            gradients_of(model, x)
            found.append(scaled.log2_scales())
    if way is reentrant:  # scales do not pass into the graph that its backward pass makes
        assert found[0].keys() == found[1].keys()
    else:
        assert found[0] == found[1]


@WAYS
@FORMATS
@ROUNDINGS
def test_gpt2_and_llama_of_transformers(way: Wrap, fmt: str, rounding: str) -> None:
    small = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(
        n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **small
    )
    llama = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0, **small
    )
    for kind, config in ((transformers.GPT2LMHeadModel, gpt2), (transformers.LlamaForCausalLM, llama)):
        ids, found = torch.randint(0, 40, (2, 12)), []
        for checkpointed in (False, True):
            torch.manual_seed(1)
            model = fpsim.quantize(kind(config), fmt, rounding=rounding).train()
            if checkpointed:
                enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
                enable({"use_reentrant": way is reentrant})
                model.enable_input_require_grads()
            torch.manual_seed(3)
            model(ids, labels=ids).loss.backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        if rounding == "nearest_even":
            assert_equal(*found)
        else:  # the order in which a backward pass meets its places may change with checkpoints, and the noise with it
            assert found[0].keys() == found[1].keys()


def test_a_checkpoint_outside_of_an_emulation_is_left_alone() -> None:
    net = Net(reentrant)
    x = torch.randn(5, 6)
    torch.manual_seed(0)
    same = Net(plain)
    same.load_state_dict(net.state_dict())
    assert_equal(gradients_of(same, x), gradients_of(net, x))


@WAYS
def test_what_was_rounded_before_a_checkpoint_keeps_its_noise_inside(way: Wrap) -> None:
    """The input and a weight are used before it, inside, and where it runs again: one value each."""

    class Model(nn.Module):
        def __init__(self, wrap: Wrap) -> None:
            super().__init__()
            self.wrap, self.linear = wrap, nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            before = self.linear(x).detach() + x * 2
            return self.wrap(lambda a: torch.tanh(self.linear(a)) * a, x) + before  # type: ignore[no-any-return]

    policy = fpsim.Policy(weight="e4m3fn", activation="e4m3fn").with_rounding("stochastic")
    results = []
    for wrap in (plain, way):
        torch.manual_seed(0)
        q, x = fpsim.quantize(Model(wrap), policy), torch.randn(4, 6, requires_grad=True)
        out = q(x)
        out.sum().backward()
        results.append((out, q.linear.weight.grad, q.linear.bias.grad, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
