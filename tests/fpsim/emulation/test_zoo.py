"""Twenty architectures of transformers, looked at from outside, with the model itself and with padding.

Five of them and bfloat16 run by default, all twenty and more formats with `-m slow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, Inputs, Kind

import fpsim

pytestmark = pytest.mark.filterwarnings("ignore")

# A rotary code and grouped heads, masks in Python, a state space, an encoder with a decoder, and convolutions.
BY_DEFAULT = ("llama", "gpt2", "mamba", "t5", "wav2vec2")


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
