"""Methods of a quantised model other than `forward`: their modules are emulated, and a warning says what is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
import zoo
from emulated_cases import randn
from torch import Tensor, nn

import fpsim
from fpsim import emulate, quantize


def new_coder() -> Any:
    """Of a class of its own, for which nothing has warned."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.back = nn.Sequential(nn.Linear(8, 4), nn.GELU()), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.back(self.encode(x))

        def encode(self, x: Tensor) -> Tensor:
            return self.front(x).mul(1.1).softmax(-1)

        @torch.no_grad()
        def embed(self, x: Tensor) -> Tensor:
            def run(layers: Any) -> Tensor:
                return layers(x) * 1.1

            return run(self.front)

        def decode(self, x: Tensor) -> Tensor:
            return type(self).forward(self, x * 1.1)  # is not the call of a module

        def generate(self, x: Tensor) -> Tensor:
            return self(x) * 1.1

    return Coder()


class Outer(nn.Module):
    def __init__(self, coder: Any) -> None:
        super().__init__()
        self.coder: Any = coder

    def forward(self, x: Tensor) -> Tensor:
        return self.coder.encode(x)


METHODS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "encode": lambda m, x: m.encode(x),
    "embed": lambda m, x: m.embed(x),
    "decode": lambda m, x: m.decode(x),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fmt", ["bf16", "recipe:mxfp8"])
def test_a_method_that_calls_modules_warns_once_for_its_class_and_is_named(method: str, fmt: str) -> None:
    coder, x, name = new_coder(), randn(2, 8), {"decode": "encode"}.get(method, method)
    model = quantize(coder, fmt)
    with pytest.warns(UserWarning, match=rf"^Coder\.{name} calls front outside .*not.*fpsim\.emulate") as told:
        METHODS[method](model, x)
    assert len(told) == 1
    assert told[0].filename.endswith(("test_other_methods.py", "_contextlib.py"))  # the latter is torch.no_grad's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[method](model, x)
        METHODS[method](quantize(coder, fmt), x)


def test_the_method_of_a_module_inside_warns_as_well() -> None:
    with pytest.warns(UserWarning, match=r"^Coder\.encode calls coder\.front outside"):
        quantize(Outer(new_coder()), "bf16").coder.encode(randn(2, 8))


def test_a_method_warns_in_a_copy_and_where_a_class_below_inherits_it() -> None:
    coder, x = new_coder(), randn(2, 8)
    coder.__class__ = type("Inheriting", (type(coder),), {})
    with pytest.warns(UserWarning, match=r"^Inheriting\.encode calls front outside"):
        copy.deepcopy(quantize(coder, "bf16")).encode(x)


def test_what_the_warning_names_is_emulated_where_it_says() -> None:
    """In a block of `emulate`, and from a forward: as native code, in which a method is as any other."""
    model, x = new_coder(), randn(2, 8)
    native = copy.deepcopy(model).bfloat16().encode(x.bfloat16()).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate("bf16"):
            assert torch.equal(quantize(model, "bf16").encode(x), native)
        assert torch.equal(quantize(Outer(model), "bf16")(x), native)


def test_other_calls_of_modules_say_nothing() -> None:
    x = randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = quantize(new_coder(), "bf16")
        model.generate(x)  # its forward is emulated, and what follows is not the model's
        model.front(x)
        model.front[0](x)
        model(x).sum().backward()
        new_coder().encode(x)
        quantize(new_coder(), "fp32").encode(x)
        fpsim.dequantize(model).encode(x)
        nn.Sequential(inner := quantize(new_coder(), "bf16"))
        inner.front(x)


class Writer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner: Any = inner

    def write(self, ids: Tensor, **options: Any) -> Tensor:
        return self.inner.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5, "temperature": 0.7},
    "beams": {"num_beams": 2},
}


@tiers.parametrize("way", WAYS, keep=["beams"])
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_generating_tokens_says_nothing(kind: str, way: str) -> None:
    """transformers compute logits in float32 there, natively too; a T5 calls its encoder alone."""
    model = quantize(Writer(zoo.ZOO[kind].make().eval()), "bf16")
    ids = torch.tensor([[5, 6, 7]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.write(ids, max_new_tokens=3, **WAYS[way])
        Writer(quantize(fpsim.dequantize(model).inner, "bf16")).write(ids, max_new_tokens=3, **WAYS[way])
