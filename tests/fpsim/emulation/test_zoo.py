"""Twenty architectures of transformers, looked at from outside: torch's own casts, the model itself, checkpoints,
a cache and padding.

Five of them and bfloat16 run by default, all twenty and more formats with `-m slow`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, Inputs, Kind

import fpsim

pytestmark = pytest.mark.filterwarnings("ignore")

# A rotary code and grouped heads, masks in Python, a state space, an encoder with a decoder, and convolutions.
BY_DEFAULT = ("llama", "gpt2", "mamba", "t5", "wav2vec2")
CASTS = {"bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}
LARGEST = torch.finfo(torch.float32).max

# What is float32 on purpose where native code has bfloat16, by model: patterns of names, and why.
WIDE_ON_PURPOSE: dict[str, dict[str, str]] = {
    "t5": {
        r"output \d of .*layer_norm": "T5LayerNorm casts back only where its weight's dtype says bfloat16 or float16",
        r"output 0 of (en|de)coder": "it gives what its last T5LayerNorm gave",
        r"output 1 of (en|de)coder\.dropout": "it stands behind the last T5LayerNorm",
        r"output 2 of ": "the encoder's output, beside the loss and the logits",
        r"gradient of output 0 of .*final_layer_norm": "the gradient of what is float32",
    },
    "wav2vec2": {
        r"output 0 of .*conv\.parametrizations\.weight\.0": "a parametrisation computes the weight in float32",
        r"gradient of .*conv\.parametrizations\.weight\.original[01]": "these are float32 master values",
    },
}
# What these nodes of autograd make was moved, not computed: its gradient is rounded where its numbers were computed.
MOVED = ("ViewBackward0", "UnsqueezeBackward0", "SliceBackward0", "IndexBackward0", "ReluBackward0")
# Several reentrant checkpoints take the encoder's output, and each sums its own share of the gradient: another order of
# one sum, for what comes before. The gradients of native float32 differ too.
SUMMED_IN_ANOTHER_ORDER = {"t5": ("encoder.", "shared."), "bart": ("model.encoder.", "model.shared.")}


def choices(*formats: str) -> Any:
    """Each model in each format; all but the first format of some models is slow."""
    return pytest.mark.parametrize(
        ("name", "fmt"),
        [
            pytest.param(name, fmt, marks=() if name in BY_DEFAULT and fmt == formats[0] else pytest.mark.slow)
            for name in ZOO
            for fmt in formats
        ],
    )


MODELS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in ZOO]
)


def run(model: nn.Module, inputs: Inputs) -> tuple[Any, dict[str, Tensor]]:
    """The outputs and the gradients of one step of training, with the same dropout each time."""
    torch.manual_seed(11)
    out = model(**inputs)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _tensors_in(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    elif isinstance(out, dict):
        yield from _tensors_in(list(out.values()))
    elif isinstance(out, list | tuple):
        for item in out:
            yield from _tensors_in(item)


class Seen(NamedTuple):
    """The floating tensors that the modules of a model gave, and their gradients, by what they are."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def watch(model: nn.Module) -> Seen:
    """What will be seen of `model`. Of gradients only those of tensors that were computed, not moved."""
    seen = Seen({}, {})

    def hook(name: str) -> Callable[..., None]:
        calls: list[int] = []

        def see(module: nn.Module, args: Any, out: Any) -> None:
            for x in _tensors_in(out):
                what = f"output {len(calls)} of {name}"
                calls.append(1)
                seen.values[what] = x.detach().clone()
                if x.requires_grad and type(x.grad_fn).__name__ not in MOVED:
                    x.register_hook(lambda g, what=what: seen.gradients.update({f"gradient of {what}": g.clone()}))

        return see

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    return seen


def is_in_format(x: Tensor, fmt: str) -> bool:
    """Whether torch's own cast leaves each number as it is; masks aside, which have float32's largest magnitude."""
    x = x[x.abs() != LARGEST]
    return torch.equal(x.to(CASTS[fmt]).float(), x)


@choices("bf16", "e5m2")
def test_what_native_code_has_in_its_dtype_is_in_the_format(name: str, fmt: str) -> None:
    kind = ZOO[name]
    plain, inputs = kind.make(), kind.inputs("left")
    native, model = copy.deepcopy(plain).to(torch.bfloat16), fpsim.quantize(plain, fmt)
    of_native, found = watch(native), watch(model)
    run(native, {k: x.to(torch.bfloat16) if k in ("pixel_values", "input_values") else x for k, x in inputs.items()})
    _, gradients = run(model, inputs)
    assert found.values.keys() == of_native.values.keys()
    seen = {k: x for k, x in found.values.items() if of_native.values[k].dtype is torch.bfloat16}
    seen |= {k: x for k, x in found.gradients.items() if of_native.gradients[k].dtype is torch.bfloat16}
    seen |= {f"gradient of {parameter}": x for parameter, x in gradients.items()}
    assert len(seen) > 40
    outside = {k for k, x in seen.items() if not is_in_format(x, fmt)}
    patterns = {} if (name, fmt) == ("t5", "bf16") else WIDE_ON_PURPOSE.get(name, {})
    assert not {k for k in outside if not any(re.fullmatch(pattern, k) for pattern in patterns)}
    for pattern, reason in patterns.items():
        assert any(re.fullmatch(pattern, k) for k in outside), f"no longer so: {reason}"


@MODELS
def test_float32_as_the_format_is_the_model_itself_bit_for_bit(name: str) -> None:
    kind = ZOO[name]
    model, inputs = kind.make(), kind.inputs("left")
    expected, gradients = run(model, inputs)
    out, found = run(fpsim.quantize(kind.make(), "fp32"), inputs)
    for x, y in zip(_tensors_in(dict(expected)), _tensors_in(dict(out)), strict=True):
        assert torch.equal(x, y)
    assert gradients.keys() == found.keys()
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, found[parameter]), parameter


@pytest.mark.parametrize("is_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@choices("bf16", "e5m2")
def test_checkpoints_change_no_gradient(name: str, fmt: str, is_reentrant: bool) -> None:
    kind = ZOO[name]
    others = SUMMED_IN_ANOTHER_ORDER.get(name, ()) if is_reentrant else ()

    def step(fmt: str | None, is_checkpointed: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model = kind.make() if fmt is None else fpsim.quantize(kind.make(), fmt)
        for module in model.modules():
            if hasattr(module, "config"):  # T5's decoder has its own
                module.config.use_cache = False  # as a checkpoint does; the keys' strides differ with it
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        out, gradients = run(model, kind.inputs("left"))
        return out.loss, gradients

    for which in (None, fmt):
        (loss, gradients), (again, found) = step(which, False), step(which, True)
        assert torch.equal(loss, again)
        assert gradients.keys() == found.keys()
        different = {parameter for parameter, g in gradients.items() if not torch.equal(g, found[parameter])}
        assert not {parameter for parameter in different if not parameter.startswith(others)}
        if which is None:
            assert bool(different) == bool(others)  # the reason holds


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "mixtral"])
def test_a_cache_of_keys_changes_no_gradient(name: str) -> None:
    found = {}
    for fmt in (None, "fp32", "bf16"):
        for has_cache in (False, True):
            model = ZOO[name].make() if fmt is None else fpsim.quantize(ZOO[name].make(), fmt)
            model.config.use_cache = has_cache
            found[fmt, has_cache] = run(model, ZOO[name].inputs("left"))[1]
    for parameter, without in found[None, False].items():
        for has_cache in (False, True):
            assert torch.equal(found["fp32", has_cache][parameter], found[None, has_cache][parameter]), parameter
        # on some processors native float32 adds up in another order where keys have other strides, as they have then
        bound = 0.0 if torch.equal(without, found[None, True][parameter]) else 2.0**-8
        bf16 = found["bf16", False][parameter]
        assert (found["bf16", True][parameter] - bf16).norm() <= bound * bf16.norm(), parameter


@pytest.mark.parametrize("side", ["left", "right"])
@choices("bf16", "fp16", "e5m2")
def test_padding_on_either_side_leaves_the_loss_and_real_tokens_finite(name: str, fmt: str, side: str) -> None:
    kind: Kind = ZOO[name]
    if not kind.takes_padding:
        pytest.skip("takes no tokens")
    inputs = kind.inputs(side)
    out, gradients = run(fpsim.quantize(kind.make(), fmt), inputs)
    assert out.loss.isfinite()
    logits = out.logits if "logits" in out else out.logits_per_image
    is_real = inputs["attention_mask"] > 0
    assert logits[is_real if logits.shape[:2] == is_real.shape else ...].isfinite().all()
    for parameter, gradient in gradients.items():
        assert gradient.isfinite().all(), parameter
