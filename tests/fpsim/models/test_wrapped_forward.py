"""A quantised model whose `forward` others wrap, compile, inject into or copy: it is found, run and given back."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fpsim
from ada_loss import AdaLossScaled
from fpsim import Policy, dequantize, quantize, summary
from fpsim.models.installed import _layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        y = self.head(torch.relu(self.layer(x)))
        return y + y if double else y


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


# What Accelerate does, from its documentation and source (1.x): `Accelerator.prepare_model` with mixed precision,
# `extract_model_from_parallel(keep_fp32_wrapper=False)`, and `add_hook_to_module`. autocast is switched off, for the
# numbers are those of the emulation.


class ConvertOutputsToFp32:
    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model_forward(*args, **kwargs).float()


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward


def prepare(model: Any) -> None:
    model._original_forward = model.forward
    context = torch.enable_grad()  # in the place of autocast, which wraps a forward the same way and changes numbers
    if hasattr(model.forward, "__func__"):
        model.forward = MethodType(context(model.forward.__func__), model)
        model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    else:
        model.forward = convert_outputs_to_fp32(context(model.forward))


def extract(model: Any) -> None:
    forward = model.forward
    original = model.__dict__.pop("_original_forward", None)
    if original is not None:
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
            if forward == original:
                break
        model.forward = MethodType(forward, model)


def add_hook(module: Any) -> None:
    module._old_forward = module.forward

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


def remove_hook(module: Any) -> None:
    module.forward = module._old_forward
    del module._old_forward


def wrap(module: Any) -> None:
    """As libraries do with functools.wraps."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    module.forward = forward


def wrap_bare(module: Any) -> None:
    """A closure that says nothing of what it wraps."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)


def wrap_by_method(module: Any) -> None:
    """As many scripts do: the new one calls what was kept as an attribute."""
    module._original_forward = module.forward
    module.forward = MethodType(lambda self, *args, **kwargs: self._original_forward(*args, **kwargs), module)


def compile_forward(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


WRAPPERS: list[Callable[[Any], None]] = [prepare, add_hook, wrap, wrap_bare, wrap_by_method, compile_forward]
ONCE = (add_hook, wrap_by_method)  # a second time they would call themselves, emulated or not
by_name = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda w: w.__name__)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:In CPU autocast", "ignore:The .grad attribute")


@by_name
@pytest.mark.parametrize("order", ["wrapped before", "wrapped after", "both"])
def test_everything_sees_through_a_wrapper(wrapper: Callable[[Any], None], order: str, net: Net, x: Tensor) -> None:
    if order == "both" and wrapper in ONCE:
        pytest.skip("this wrapper lies on a module once")
    plain = net(x)
    expected, rows = quantize(net, "e5m2")(x), summary(quantize(net, "e5m2"))
    if order != "wrapped after":
        wrapper(net)
    model = quantize(net, "e5m2", inplace=True)
    if order != "wrapped before":
        wrapper(model)
    assert torch.equal(model(x), expected)
    assert summary(model) == rows
    assert "fpsim: e5m2" in str(model)
    with pytest.raises(ValueError, match="quantised already"):
        quantize(model, "fp16")
    if wrapper is not compile_forward:  # what is compiled shows nothing to observers, and is not scaled
        with fpsim.record(model) as recording:
            model(x).sum().backward()
        assert {"layer:linear", "head:linear"} <= {row["site"] for row in recording.rows()}
        with AdaLossScaled(model):
            model(x).sum().backward()
    assert dequantize(model, inplace=True) is model
    assert torch.equal(model(x), plain)
    assert "fpsim" not in str(model)
    with pytest.raises(ValueError, match="is not quantised"):
        summary(model)
    assert torch.equal(quantize(model, "e5m2", inplace=True)(x), expected)
    assert summary(model) == rows
    if wrapper is not compile_forward:
        with fpsim.record(model) as recording:
            model(x)
        # its own operations are emulated: what enters the second layer is in the format
        assert "head:activation" not in {row["site"] for row in recording.rows()}


@pytest.mark.parametrize("times", [1, 3])
@by_name
def test_wrappers_lie_on_wrappers(wrapper: Callable[[Any], None], times: int, net: Net, x: Tensor) -> None:
    expected = quantize(net, "e5m2")(x)
    model = quantize(net, "e5m2")
    for _ in range(times):
        wrap(model)
    wrapper(model)
    wrap_bare(model)
    assert torch.equal(model(x), expected)
    assert len(summary(model)) == 3
    dequantize(model, inplace=True)
    assert torch.equal(model(x), net(x))


def test_accelerate_takes_its_wrapper_off_and_the_emulation_stays(net: Net, x: Tensor) -> None:
    expected, rows = quantize(net, "e5m2")(x), summary(quantize(net, "e5m2"))
    model = quantize(net, "e5m2")
    for _ in range(2):  # prepared again, as by a second Trainer
        prepare(model)
        assert isinstance(model.forward.__func__.__wrapped__, ConvertOutputsToFp32)
        extract(model)
        assert not hasattr(model.forward, "__wrapped__")
        assert torch.equal(model(x, double=True), fpsim.round_to(expected + expected, "e5m2"))
        assert inspect.signature(model.forward) == inspect.signature(net.forward)
        assert summary(model) == rows
        assert torch.equal(copy.deepcopy(model)(x), expected)
    dequantize(model, inplace=True)
    assert torch.equal(model(x), net(x))


def test_the_emulation_stays_when_a_wrapper_below_it_is_taken_off(net: Net, x: Tensor) -> None:
    expected = quantize(net, "e5m2")(x)
    prepare(net)
    model = quantize(net, "e5m2", inplace=True)
    extract(model)
    assert torch.equal(model(x), expected)
    assert len(summary(model)) == 3


def test_hooks_are_removed_before_and_after_dequantising(net: Net, x: Tensor) -> None:
    plain, expected = net(x), quantize(net, "e5m2")(x)
    model = quantize(net, "e5m2", inplace=True)
    for module in model.modules():
        add_hook(module)
    assert torch.equal(model(x), expected)
    remove_hook(model.layer)
    assert torch.equal(model(x), expected)
    dequantize(model, inplace=True)
    for module in (model, model.head):
        remove_hook(module)
    assert torch.equal(model(x), plain)
    assert type(model.head.forward) is MethodType


@pytest.mark.parametrize("wrapper", [prepare, add_hook, wrap_by_method], ids=lambda w: w.__name__)
def test_a_copy_of_a_wrapped_model_runs_on_its_own_parameters(
    wrapper: Callable[[Any], None], net: Net, x: Tensor
) -> None:
    model = quantize(net, "e5m2")
    wrapper(model)
    expected = model(x)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(duplicate(x), expected)
    assert len(summary(duplicate)) == 3


@pytest.mark.parametrize("wrapper", [wrap, wrap_bare, compile_forward], ids=lambda w: w.__name__)
def test_a_wrapper_that_would_run_the_original_from_a_copy_is_refused(
    wrapper: Callable[[Any], None], net: Net, x: Tensor
) -> None:
    wrapper(net)
    with pytest.raises(TypeError, match=r"forward of Net was replaced .* runs the original.*inplace=True"):
        quantize(net, "fp16")
    model = quantize(net, "fp16", inplace=True)
    wrapper(model.head)
    with pytest.raises(TypeError, match=r"cannot be copied|inplace=True"):
        dequantize(model)


def test_a_forward_that_was_replaced_is_emulated_no_more(net: Net, x: Tensor) -> None:
    model = quantize(net, "e5m2")
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert [row.module for row in summary(model)] == ["layer", "head"]
    del model.forward
    assert torch.equal(model(x), model.head(torch.relu(model.layer(x))))


# torch.compile


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_part_compiled_in_place_is_emulated(order: str, backend: str, net: Net, x: Tensor) -> None:
    plain, expected = net(x), quantize(net, "e5m2")(x)
    model = net if order == "compiled before" else quantize(net, "e5m2")
    model.layer = torch.compile(model.layer, backend=backend)  # type: ignore[assignment]
    if order == "compiled before":
        assert torch.equal(model(x), plain)
        forward = model.layer.forward
        model = quantize(model, "e5m2", inplace=True)
        assert model.layer.forward is forward  # the compiler's own stays: what it compiles is emulated
    assert torch.equal(model(x), expected)
    assert [row.type for row in summary(model)] == ["Net", "Linear", "Linear"]
    with pytest.raises(ValueError, match="quantised already"):
        quantize(model, "e5m2", inplace=True)
    model(x).sum().backward()
    gradient = model.layer._orig_mod.weight.grad  # type: ignore[union-attr]
    assert torch.equal(gradient, fpsim.round_to(gradient, "e5m2"))
    dequantize(model, inplace=True)
    assert torch.equal(model(x), plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
def test_a_module_compiled_in_place_is_emulated(order: str, net: Net, x: Tensor) -> None:
    plain, expected = net(x), quantize(net, "e5m2")(x)
    if order == "compiled before":
        net.compile(backend="eager")
        assert torch.equal(net(x), plain)
    model = quantize(net, "e5m2", inplace=True)
    if order == "compiled after":
        model.compile(backend="eager")
    assert torch.equal(model(x), expected)
    assert len(summary(model)) == 3
    dequantize(model, inplace=True)
    assert torch.equal(model(x), plain)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_quantised_and_dequantised(net: Net, x: Tensor) -> None:
    compiled = torch.compile(net, backend="eager")
    expected, plain = quantize(net, "e5m2")(x), net(x)
    quantize(compiled, "e5m2", inplace=True)
    assert torch.equal(compiled(x), expected)
    assert len(summary(compiled)) == len(summary(net)) == 3
    dequantize(compiled, inplace=True)
    assert torch.equal(compiled(x), plain)


# Injection


class LoraLinear(nn.Module):
    """As PEFT puts it in the place of a layer."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0  # type: ignore[no-any-return]


def half(x: Tensor) -> Tensor:
    return x.detach().half().float()


def test_an_injected_layer_runs_in_the_format_around_it_and_is_shown(net: Net, x: Tensor) -> None:
    model = quantize(net, Policy(*["fp16"] * 4, overrides={"layer": "bf16"}))
    base = model.layer
    model.layer = LoraLinear(base)  # type: ignore[assignment]
    rows = [(row.module, row.type, row.weight.split()[0]) for row in summary(model)]
    assert rows == [
        ("(model)", "Net", "fp16"),
        ("layer", "LoraLinear", "fp16"),
        ("layer", "Linear", "bf16"),  # by the name of its sites
        ("layer.lora_A", "Linear", "fp16"),
        ("layer.lora_B", "Linear", "fp16"),
        ("head", "Linear", "fp16"),
    ]
    a, b = model.layer.lora_A, model.layer.lora_B
    low = half(half(F.linear(half(F.linear(half(x), half(a.weight))), half(b.weight))) * 2)
    high = F.linear(x.bfloat16().float(), base.weight.bfloat16().float(), base.bias.bfloat16().float())
    middle = torch.relu(half(half(high.bfloat16().float()) + low))
    expected = half(F.linear(middle, half(net.head.weight), half(net.head.bias)))
    assert torch.equal(model(x), expected)
    native = net.head(torch.relu(net.layer(x) + F.linear(F.linear(x, a.weight), b.weight) * 2))
    assert torch.equal(dequantize(model)(x), native)


# Copies


def test_a_shallow_copy_runs_on_what_is_its_own(net: Net, x: Tensor) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((6,), 3.0))
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.factor

    model = quantize(Scaled(), "fp16")
    duplicate = copy.copy(model)
    duplicate.factor = 2.0
    duplicate._parameters = {"weight": nn.Parameter(torch.full((6,), 5.0))}
    duplicate.register_forward_hook(lambda module, args, out: None)  # hooks take another way to forward
    assert torch.equal(model(x), half(half(x) * 3))
    assert torch.equal(duplicate(x), half(half(half(x) * 5) * 2))
    assert len(summary(duplicate)) == 1
    dequantize(duplicate, inplace=True)
    assert torch.equal(duplicate(x), x * 5 * 2)
    assert torch.equal(model(x), half(half(x) * 3))  # the original stays as it is


def test_a_replica_of_data_parallel_runs_on_its_own_weights(x: Tensor) -> None:
    model = quantize(nn.Linear(6, 6), Policy(weight="bf16", activation="fp16"))
    replica = model._replicate_for_data_parallel()  # as torch.nn.parallel.replicate makes them, one on each GPU
    replica._former_parameters = {}
    for name, parameter in model.named_parameters():
        replica._former_parameters[name] = (parameter * 2).detach()
        setattr(replica, name, replica._former_parameters[name])
    weight, bias = ((2 * p.detach()).bfloat16().float() for p in (model.weight, model.bias))
    assert torch.equal(replica(x), half(F.linear(half(x), weight, bias)))


# Models of libraries


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {"pixel_values": image, "labels": torch.tensor([0, 2])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [gpt2, vit])
def test_a_model_of_transformers_is_wrapped_hooked_and_given_back(make: Callable[[], Any]) -> None:
    plain, inputs = make()
    model = quantize(plain, "bf16")
    expected, signature = model(**inputs).logits, inspect.signature(plain.forward)
    before, rows = plain(**inputs).logits, summary(model)
    model.forward, model._original_forward = MethodType(model.forward.__func__, model), model.forward
    for module in model.modules():
        add_hook(module)
    assert torch.equal(model(**inputs).logits, expected)
    assert summary(model) == rows
    assert inspect.signature(model.forward) == signature  # the Trainer reads the names of columns from it
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, expected)
    dequantize(model, inplace=True)
    assert torch.equal(model(**inputs).logits, before)


# What is refused


def test_what_cannot_be_copied_says_why_and_what_to_do(x: Tensor) -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.state = nn.Linear(6, 6), torch.zeros(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.layer(x) + self.state
            return self.state

    model = Stateful()
    model(x)
    with pytest.raises(
        TypeError, match=r"Stateful cannot be copied, .*: state\. .*quantize\(model, fmt, inplace=True\)"
    ):
        quantize(model, "fp16")
    quantize(model, "fp16", inplace=True)(x)
    with pytest.raises(TypeError, match=r"dequantize\(model, inplace=True\)"):
        dequantize(model)
    model.state, model.lock = torch.zeros(5, 6), (value for value in [1])  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"copy\.deepcopy says: cannot pickle 'generator' object"):
        dequantize(model)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_the_older_weight_norm_cannot_be_copied() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)))
    with pytest.raises(TypeError, match=r"0\.weight\. The older torch\.nn\.utils\.weight_norm.*inplace=True"):
        quantize(model, "fp16")
    assert quantize(model, "fp16", inplace=True) is model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_torchscript_is_refused(inside: bool, net: Net) -> None:
    model: nn.Module = quantize(net, "fp16")
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script reached .* torch\.export.*dequantize"):
        torch.jit.script(nn.Sequential(model) if inside else model)
    torch.jit.script(dequantize(model).layer)


def test_a_batch_of_gradients_is_refused(net: Net, x: Tensor) -> None:
    model = quantize(net, "fp16")
    x.requires_grad_()
    out, vectors = model(x), torch.randn(3, 5, 4)
    with pytest.raises(NotImplementedError, match=r"is_grads_batched=True.* torch\.func\.vmap over torch\.func\.vjp"):
        torch.autograd.grad(out, x, vectors, is_grads_batched=True)
    # what the error says to do
    (batched,) = torch.func.vmap(torch.func.vjp(model, x.detach())[1])(vectors)
    one_by_one = [torch.autograd.grad(out, x, vector, retain_graph=True)[0] for vector in vectors]
    assert torch.equal(batched, torch.stack(one_by_one))


def test_a_pickled_model_is_found_too(net: Net, x: Tensor) -> None:
    model = quantize(net, "fp16")
    loaded = pickle.loads(pickle.dumps(model))
    assert summary(loaded) == summary(model)
    assert torch.equal(dequantize(loaded)(x), net(x))


@pytest.mark.filterwarnings("ignore")
def test_a_dtensor_of_tensor_parallelism_is_refused(tmp_path: object, x: Tensor) -> None:
    from torch import distributed
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = quantize(parallelize_module(nn.Linear(6, 4), mesh, ColwiseParallel()), "fp16", inplace=True)
        with pytest.raises(NotImplementedError, match=r"DTensor reached .* Expected: plain tensors.* Policy\("):
            model(x)
    finally:
        distributed.destroy_process_group()


def test_a_function_that_calls_itself_is_looked_into_once() -> None:
    def again(x: object) -> object:
        return again(x)

    def first(x: object) -> object:
        return second(x)

    def second(x: object) -> object:
        return first(x)

    assert [*itertools.islice(_layers(again), 3)] == [again]
    assert [*itertools.islice(_layers(first), 4)] == [first, second]
