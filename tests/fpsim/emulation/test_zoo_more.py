"""Sixty-seven more architectures: native code and the emulation beside float32, float32 itself, checkpoints and caches.

Five of them run by default, all with `-m slow`.
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import pytest
import torch
from test_zoo import _tensors_in, run
from torch import Tensor, nn
from zoo import Inputs, Kind
from zoo_more import DECODERS, MORE

import fpsim

pytestmark = pytest.mark.filterwarnings("ignore")

# Latent attention with experts, a convolution in a cache, a state space, an encoder with a decoder, shifted windows.
BY_DEFAULT = ("deepseek-v3", "lfm2", "mamba2", "whisper", "swin")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEEDS = (7, 8, 9)
# Of the errors' ratios the median of three seeds; single ones lie between 0.5 and 1.4, of a loss anywhere.
BOUND = 1.5
WITHOUT_NATIVE = {
    "fnet": "torch has no Fourier transform in these dtypes on the CPU",
    "nystromformer": "its inverse is computed in float32, and multiplied with another dtype",
}
NAN_IN_NATIVE_FP16 = {"longt5": "its mask of -1e10 becomes -inf, and a fully masked row NaN, in the emulation too"}
# ProphetNet itself refuses the positions that `generate` gives it.
GENERATING = [*DECODERS, *(name for name, kind in MORE.items() if kind.model.endswith("ConditionalGeneration"))]
GENERATING.remove("prophetnet")


def choices(*names: str) -> Any:
    """Each of the models; all but some are slow."""
    marked = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


def error(x: Tensor, exact: Tensor) -> float:
    x, exact = x.detach().double(), exact.detach().double()
    return float((x - exact).norm() / exact.norm())


def inputs_as(dtype: torch.dtype, inputs: Inputs) -> Inputs:
    return {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}


def errors(kind: Kind, fmt: str, seed: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """How far output and gradients of native code and of the emulation are from float32.

    Of gradients the root of the mean square over parameters, each relative to its norm. Left out are those that
    native code gives as NaN, which its kernels do in float16 now and then, and those that are zero.
    """
    plain = kind.make(seed).eval()
    native, model, inputs = copy.deepcopy(plain).to(DTYPES[fmt]), fpsim.quantize(plain, fmt), kind.inputs("left")
    (out, exact), (theirs, of_theirs), (ours, of_ours) = (
        run(m, i) for m, i in ((plain, inputs), (native, inputs_as(DTYPES[fmt], inputs)), (model, inputs))
    )
    last = list(_tensors_in(dict(out)))[1]  # the first is the loss
    found = [
        (error(g, exact[name]), error(of_ours[name], exact[name]))
        for name, g in of_theirs.items()
        if g.isfinite().all() and exact[name].norm() > 1e-9
    ]
    assert len(found) > 0.8 * len(exact)
    of_native, of_model = (sum(e**2 for e in each) ** 0.5 for each in zip(*found, strict=True))
    output, their_output = list(_tensors_in(dict(ours)))[1], list(_tensors_in(dict(theirs)))[1]
    return (error(their_output, last), error(output, last)), (of_native, of_model)


@pytest.mark.parametrize("fmt", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@choices(*(name for name in MORE if name not in WITHOUT_NATIVE))
def test_the_emulation_is_no_further_from_float32_than_native_code(name: str, fmt: str) -> None:
    if fmt == "fp16" and name in NAN_IN_NATIVE_FP16:
        with pytest.raises(AssertionError):
            errors(MORE[name], fmt, SEEDS[0])
        return
    found = [errors(MORE[name], fmt, seed) for seed in SEEDS]
    of_outputs, of_gradients = (median(ours / native for native, ours in each) for each in zip(*found, strict=True))
    assert of_outputs < BOUND
    assert of_gradients < BOUND


@choices(*MORE)
def test_float32_as_the_format_is_the_model_itself_bit_for_bit(name: str) -> None:
    kind = MORE[name]
    expected, gradients = run(kind.make(), kind.inputs("left"))
    out, found = run(fpsim.quantize(kind.make(), "fp32"), kind.inputs("left"))
    for x, y in zip(_tensors_in(dict(expected)), _tensors_in(dict(out)), strict=True):
        assert torch.equal(x, y)
    assert gradients.keys() == found.keys()
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, found[parameter]), parameter


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@choices(*MORE)
def test_checkpoints_that_are_not_reentrant_change_no_gradient(name: str, fmt: str) -> None:
    kind = MORE[name]

    def gradients(is_checkpointed: bool) -> dict[str, Tensor]:
        model: nn.Module = fpsim.quantize(kind.make(), fmt)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.use_cache = False  # as a checkpoint does; the keys' strides differ with it
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return run(model, kind.inputs("left"))[1]

    if not kind.make().supports_gradient_checkpointing:
        pytest.skip("the model has no checkpoints")
    expected, found = gradients(False), gradients(True)
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(gradient, found[parameter]), parameter


@choices(*GENERATING)
def test_float32_generates_the_models_own_tokens_with_caches(name: str) -> None:
    kind = MORE[name]
    inputs = {k: x for k, x in kind.inputs("left").items() if k != "labels"}
    plain = kind.make().eval()
    model = fpsim.quantize(plain, "fp32")
    words: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = plain.generate(**inputs, **words)
    assert torch.equal(model.generate(**inputs, **words), expected)
