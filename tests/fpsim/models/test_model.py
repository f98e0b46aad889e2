"""quantize, dequantize, summary and policies: what stays as it was, what is refused."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpsim
from fpsim import Policy, dequantize, quantize, round_to, summary


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attn(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 6)


def h(x: Tensor) -> Tensor:
    return x.detach().half().float()


def test_names_class_and_weights_stay_and_the_original_is_untouched(net: Net, x: Tensor) -> None:
    before = net(x)
    model = quantize(net, "e5m2")
    assert type(model) is Net
    assert list(model.state_dict()) == list(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net.parameters(), strict=True))
    assert torch.equal(net(x), before)
    assert not torch.equal(model(x), before)
    assert quantize(net, "e5m2", inplace=True) is net


def test_copies_pickles_and_files_of_a_quantised_model_are_quantised(net: Net, x: Tensor) -> None:
    model = quantize(net, Policy("e4m3fn", "fp16", "e5m2", "fp16", overrides={"lm_head": None}))
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded, copy.copy(model)):
        assert torch.equal(other(x), expected)
        assert str(other) == str(model)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        duplicate.lm_head.weight.zero_()
    assert torch.equal(model(x), expected)
    assert not torch.equal(duplicate(x), expected)


def test_state_dicts_travel_between_plain_and_quantised_models(net: Net, x: Tensor, tmp_path: object) -> None:
    model = quantize(Net(), "fp16")
    torch.save(net.state_dict(), f"{tmp_path}/w.pt")
    model.load_state_dict(torch.load(f"{tmp_path}/w.pt", weights_only=True))
    assert torch.equal(model(x), quantize(net, "fp16")(x))
    net.load_state_dict(model.state_dict())


def test_an_optimizer_updates_the_float32_weights(net: Net, x: Tensor) -> None:
    model = quantize(net, "e5m2")
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)
    model(x).sum().backward()
    optimizer.step()
    assert model.lm_head.weight.grad is not None
    assert torch.equal(model.lm_head.weight.detach(), before - 2.0**-20 * model.lm_head.weight.grad)


def test_dequantize_gives_back_float32(net: Net, x: Tensor) -> None:
    model = quantize(net, "e4m3fn")
    plain = dequantize(model)
    assert torch.equal(plain(x), net(x))
    for a, b in zip(plain.modules(), net.modules(), strict=True):
        assert vars(a).keys() == vars(b).keys()
    assert str(plain) == str(net)
    assert not torch.equal(model(x), net(x))
    assert dequantize(model, inplace=True) is model
    assert torch.equal(model(x), net(x))
    with pytest.raises(ValueError, match="is not quantised"):
        dequantize(model)


def test_a_submodule_called_alone_is_emulated(net: Net, x: Tensor) -> None:
    model = quantize(net, "fp16")
    layer = net.blocks[0].attn
    expected = h(nn.functional.linear(h(x), h(layer.weight), h(layer.bias)))
    assert torch.equal(model.blocks[0].attn(x), expected)


def test_hooks_of_the_user_see_rounded_values(net: Net, x: Tensor) -> None:
    seen: list[Tensor] = []
    net.blocks[0].attn.register_forward_hook(lambda m, i, out: seen.append(out))
    model = quantize(net, "fp16")
    model.blocks[1].register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    model(x)
    assert len(seen) == 2
    assert all(torch.equal(v, h(v)) for v in seen)


def test_a_quantised_model_inside_another_keeps_its_own_format(x: Tensor) -> None:
    inner, outer = nn.Linear(6, 6), nn.Linear(6, 6)
    mixed = nn.Sequential(quantize(inner, "e4m3fn"), outer)
    middle = quantize(inner, "e4m3fn")(x)
    assert torch.equal(mixed(x), outer(middle))  # the rest of a plain model stays plain
    with fpsim.emulate("bf16"):
        result = mixed(x)
    w, b = (p.detach().bfloat16().float() for p in outer.parameters())
    assert torch.equal(result, nn.functional.linear(middle.bfloat16().float(), w, b).bfloat16().float())
    with pytest.raises(ValueError, match="quantised already"):
        quantize(mixed, "fp16")


def test_a_forward_that_a_library_put_there_is_run_and_given_back(x: Tensor) -> None:
    layer = nn.Linear(6, 6)
    layer.forward = functools.partial(nn.functional.linear, weight=layer.weight)  # type: ignore[method-assign]
    model = quantize(layer, "fp16")  # without the bias
    assert torch.equal(model(x), h(nn.functional.linear(h(x), h(layer.weight))))
    assert torch.equal(dequantize(model)(x), nn.functional.linear(x, layer.weight))


def test_a_forward_has_the_signature_it_had(net: Net) -> None:
    model = quantize(net, "fp16")
    for kept in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert inspect.signature(kept.forward) == inspect.signature(net.forward)


def test_a_forward_may_be_static(x: Tensor) -> None:
    class Square(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * x

    assert torch.equal(quantize(Square(), "fp16")(x), h(h(x) * h(x)))


class ForInstances:
    """Binds as a method does; it wants to be told the class, and has nothing for the class itself, as some of C."""

    def __get__(self, module: nn.Module | None, owner: type) -> Callable[[Tensor], Tensor]:
        if module is None:
            raise AttributeError(f"{owner.__name__} has a forward in its instances only")
        return functools.partial(cubed, module)


def cubed(module: nn.Module, x: Tensor) -> Tensor:
    return x * x * x


class WhatClassSays(type):
    """A class that gives its own attributes otherwise than its instances find them."""

    def __getattribute__(cls, name: str) -> Any:
        return Square.__dict__["forward"] if name == "forward" else super().__getattribute__(name)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@pytest.mark.parametrize(
    "forward",
    [cubed, ForInstances(), functools.partialmethod(cubed), staticmethod(functools.partial(cubed, nn.ReLU()))],
    ids=["function", "descriptor", "partialmethod", "static"],
)
@pytest.mark.parametrize("kind", [type, WhatClassSays])
def test_a_forward_that_its_class_got_later_is_run(kind: type, forward: Any, x: Tensor) -> None:
    own = kind("Own", (Square,), {"forward": Square.forward})
    model = quantize(own(), "fp16")
    assert torch.equal(model(x), h(h(x) * h(x)))
    own.forward = forward
    for kept in (model, copy.deepcopy(model), quantize(own(), "fp16")):
        assert torch.equal(kept(x), h(h(h(x) * h(x)) * h(x)))


def test_a_class_without_the_forward_of_its_base_is_not_run_by_that(x: Tensor) -> None:
    without = type("Without", (Square,), {"forward": None})
    changed = quantize(Square(), "fp16")
    changed.__class__ = without
    for model in (without(), quantize(without(), "fp16"), changed):
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            model(x)


class Doubling(nn.Module):
    @property
    def forward(self) -> Callable[[Tensor], Tensor]:
        return lambda x: x * 2


@pytest.mark.parametrize("inplace", [False, True])
def test_a_forward_that_is_a_property_is_refused_before_anything_is_changed(inplace: bool, x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Doubling())
    with pytest.raises(TypeError, match=r"1 \(Doubling\) has a property for its forward, which cannot be intercepted"):
        quantize(model, "fp16", inplace=inplace)
    assert "fpsim" not in repr(model)
    expected = quantize(nn.Sequential(model[0]), Policy(weight="fp16"))(x) * 2
    model = quantize(model, Policy(weight="fp16", overrides={"1": None}), inplace=inplace)
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore")  # torch's, that TorchScript is old
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(6))], ids=["script", "trace"]
)
def test_a_part_in_torchscript_stays_in_float32(compiled: Callable[[nn.Module], Any], inplace: bool, x: Tensor) -> None:
    layers, policy = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)], Policy(weight="fp16", overrides={"1": None})
    expected = quantize(nn.Sequential(*layers), policy)(x)
    layers[1] = compiled(layers[1])
    whole = nn.Sequential(*layers)
    before = whole(x)
    model = quantize(whole, policy, inplace=inplace)
    for _ in range(2):
        assert torch.equal(model(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        with pytest.raises(TypeError, match=r"1 \(.*TorchScript.*overrides=\{name: None\}"):
            fpsim.set_policy(model, "fp16")
        fpsim.set_policy(model, policy)
    assert torch.equal(dequantize(model)(x), before)


def test_a_module_added_later_takes_the_format_around_it(net: Net, x: Tensor) -> None:
    model = quantize(net, "fp16")
    model.lm_head = nn.Linear(6, 3)
    assert torch.equal(model(x), h(model(x)))


def test_a_shared_module_is_quantised_once(x: Tensor) -> None:
    layer = nn.Linear(6, 6)
    model = quantize(nn.Sequential(layer, nn.ReLU(), layer), "fp16")
    assert model[0] is model[2]
    assert torch.equal(dequantize(model)(x), nn.Sequential(layer, nn.ReLU(), layer)(x))


def test_training_and_evaluation_switch_as_ever(x: Tensor) -> None:
    model = quantize(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), "fp16").eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_a_block_named_after_its_norm_is_rounded_inside(x: Tensor) -> None:
    class LinearLayerNormExp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6, bias=False), nn.LayerNorm(6)

        def forward(self, v: Tensor) -> Tensor:
            return torch.exp(self.norm(self.linear(v))) * 0.1

    block = LinearLayerNormExp()
    expected = h(nn.functional.layer_norm(h(nn.functional.linear(h(x), h(block.linear.weight))), (6,)))
    assert torch.equal(quantize(block, "fp16")(x), h(h(torch.exp(expected)) * 0.1))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_computes_the_same(net: Net, x: Tensor) -> None:
    model = quantize(net, "fp16")
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    out, expected = compiled(x), model(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_an_exported_model_computes_the_same(net: Net, x: Tensor, inside: bool) -> None:
    model = quantize(net, "fp16")
    exported = torch.export.export(nn.Sequential(model) if inside else model, (x,))
    assert torch.equal(exported.module()(x), model(x))


# Policies


def test_overrides_choose_by_name_wildcard_and_class_and_the_last_wins(net: Net) -> None:
    model = quantize(
        net,
        Policy(
            *["fp16"] * 4,
            overrides={"blocks.*": "bf16", "blocks.1": "e5m2", nn.LayerNorm: None, "lm_head": Policy(weight="e4m3fn")},
        ),
    )
    rows = {row.module: row for row in summary(model)}
    assert rows["(model)"].weight == "fp16 nearest_even"
    assert rows["blocks.0"].weight == rows["blocks.0.attn"].error == "bf16 nearest_even"
    assert rows["blocks.1.attn"].activation == "e5m2 nearest_even"
    assert rows["blocks.0.norm"].weight == rows["blocks.1.norm"].activation == "float32"
    assert (rows["lm_head"].weight, rows["lm_head"].error) == ("e4m3fn nearest_even", "float32")


def test_a_float32_module_computes_in_float32(net: Net, x: Tensor) -> None:
    model = quantize(net, Policy(*["fp16"] * 4, overrides={"lm_head": None}))
    inputs: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda m, i: inputs.append(i[0]))
    out = model(x)
    assert torch.equal(out, net.lm_head(inputs[0]))


def test_formats_meet_at_the_border_of_modules(x: Tensor) -> None:
    a, b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    model = quantize(nn.Sequential(a, b), Policy(*["fp16"] * 4, overrides={"1": "e4m3fn"}))
    middle = h(nn.functional.linear(h(x), h(a.weight)))
    expected = round_to(
        nn.functional.linear(round_to(middle, "e4m3fn"), round_to(b.weight.detach(), "e4m3fn")), "e4m3fn"
    )
    assert torch.equal(model(x), expected)


def test_a_pattern_holds_for_what_is_inside_and_not_for_a_longer_name() -> None:
    model = nn.ModuleDict({"head": nn.Sequential(nn.Linear(2, 2)), "head2": nn.Linear(2, 2)})
    policies = Policy(*["fp16"] * 4, overrides={"head": None}).for_modules(model)
    assert [name for name, policy in policies.items() if policy.weight is None] == ["head", "head.0"]
    with pytest.raises(ValueError, match="ModuleDict matches no module"):  # the model itself has the policy's formats
        Policy(overrides={nn.ModuleDict: None}).for_modules(model)


def test_an_override_takes_the_rounding_and_leaves_the_overflow() -> None:
    rounding = {"error": "stochastic", "weight": "up"}
    policy = Policy(*["fp16"] * 4, rounding=rounding, random_bits=8, overflow="inf", overrides={"0": "e4m3fn"})
    assert [str(s) for s in policy.for_modules(nn.Sequential(nn.Linear(2, 2)))["0"].specs()] == [
        "e4m3fn up",
        "e4m3fn nearest_even",
        "e4m3fn stochastic 8 random bits",
        "e4m3fn nearest_even",
    ]


@pytest.mark.parametrize("name", ["softmax", "add_", "iadd", "layer_norm", "vector_norm", "round"])
def test_operations_are_named_as_torch_names_them(name: str) -> None:
    assert Policy(float32=[name]).float32 == (name,)  # type: ignore[arg-type]


def test_roundings_may_differ_by_role() -> None:
    policy = Policy(*["e5m2"] * 4, rounding={"error": "stochastic", "weight": "toward_zero"})
    assert [str(s) for s in policy.specs()] == [
        "e5m2 toward_zero",
        "e5m2 nearest_even",
        "e5m2 stochastic",
        "e5m2 nearest_even",
    ]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Policy(weight="fp61"), ValueError, "Unknown format"),
        (lambda: Policy(weight="fp16", rounding="nearest"), ValueError, "Unknown rounding"),
        (
            lambda: Policy(weight="fp16", rounding={"weights": "up"}),
            ValueError,
            "not a role.*weight.*Known: weight, act",
        ),
        (lambda: Policy(weight="e4m3fn", overflow="inf"), ValueError, "is invalid"),
        (lambda: Policy(float32="softmax"), TypeError, r"Write a tuple of names: \('softmax',\)"),
        (lambda: Policy(float32=("sofmax",)), ValueError, "'sofmax', which is not an operation of torch"),
        (lambda: Policy(float32=(3,)), ValueError, "float32 names 3, which is not an operation of torch"),
        (lambda: Policy(float32=("\udcff",)), ValueError, "which is not an operation of torch"),
        (lambda: Policy(float32=None), TypeError, r"float32 is None\. Expected: a tuple of names.*\(\) for none"),
        (lambda: Policy(float32=torch.tensor(3)), TypeError, r"float32 is tensor\(3\)\. Expected: a tuple of names"),
        (lambda: Policy(overrides=None), TypeError, r"overrides is None\. Expected: a mapping from patterns"),
        (lambda: Policy(overrides=["lm_head"]), TypeError, "Expected: a mapping from patterns"),
        (lambda: Policy(weight="fp16", overflow=[]), ValueError, r"Unknown overflow \[\]"),
        (lambda: Policy(weight="fp16", rounding="none"), ValueError, "Unknown rounding .none"),
        (lambda: Policy(overrides={3: None}), TypeError, "neither a module name"),
        (lambda: Policy(overrides={"a": Policy(overrides={"b": None})}), ValueError, "overrides of its own"),
        (lambda: Policy(overrides={"a": "fp61"}), ValueError, "Unknown format"),
        (lambda: quantize(Net(), Policy(overrides={"lm_haed": None})), ValueError, "matches no module.*lm_head"),
        (lambda: quantize(Net(), Policy(overrides={"blocks.*.mlp": "fp16"})), ValueError, "matches no module"),
        (
            lambda: quantize(Net(), Policy(overrides={nn.Conv2d: None})),
            ValueError,
            "Conv2d matches no module.*LayerNorm",
        ),
        (
            lambda: quantize(nn.Linear(2, 2), Policy(overrides={nn.Linear: None})),
            ValueError,
            r"Linear matches no module.*\(none: the model has no submodules\); the model itself",
        ),
        (lambda: quantize(lambda x: x, "fp16"), TypeError, r"function.*torch\.nn\.Module.*emulate"),
        (lambda: quantize(Net(), 16), TypeError, "Expected a format, got"),
        (lambda: quantize(Net(), {"error": "e5m2"}), TypeError, r"is the mapping .* fpsim\.Policy\(\*\*mapping\)"),
        (lambda: quantize(Net(), fpsim.Products.all("mxfp4")), TypeError, r"Use fpsim\.Policy\(products=\.\.\.\)"),
        (lambda: quantize(Net(), "fp9"), ValueError, "Unknown format 'fp9'"),
        (lambda: quantize(quantize(Net(), "fp16"), "fp16"), ValueError, r"quantised already. Call dequantize"),
        (lambda: summary(Net()), ValueError, r"Call fpsim\.quantize"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(TypeError, match="compiled by TorchScript"):
        quantize(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "fp16")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_is_refused(net: Net, x: Tensor) -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace reached emulated code"):
        torch.jit.trace(quantize(net, "fp16"), (x,))


@pytest.mark.parametrize("bits", ["8", 0, 33, 1.5, {"error": "8"}])
def test_random_bits_are_checked_where_nothing_is_stochastic_too(bits: object) -> None:
    with pytest.raises(ValueError, match=r"random_bits=.*Expected: 1 to 32"):
        Policy(weight="fp16", random_bits=bits)  # type: ignore[arg-type]


def test_a_layer_with_two_names_is_summarised_once() -> None:
    layer = nn.Linear(2, 2)
    model = quantize(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)), "fp16")
    assert [row.module for row in fpsim.summary(model)] == ["(model)", "0", "0.0", "1"]
