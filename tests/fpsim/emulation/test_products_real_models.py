"""Real models with quantised products, against the same models with every product written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from product_cases import Kept, by_hand
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight
from transformers.pytorch_utils import Conv1D

import fpsim
from fpsim import quantize

FMT = "mxfp8_e4m3"
SPACING = 2.0**-3  # of e4m3, relative to its numbers
# Sums of up to 256 terms in another order: 256 * 2^-24 of their terms apart, at most, and that share of a spacing tips.
TIPPED = 256 * 2.0**-24 / SPACING


class ByHand(torch.autograd.Function):
    """y = x w^T with each operand of each product quantised in NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return by_hand(x, FMT, -1) @ by_hand(w, FMT, 1).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        tokens, errors = x.flatten(0, -2), dy.flatten(0, -2)
        return by_hand(dy, FMT, -1) @ by_hand(w, FMT, 0), by_hand(errors, FMT, 0).T @ by_hand(tokens, FMT, 0)


class ConvolutionByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, settings: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.settings = settings
        return F.conv2d(by_hand(x, FMT, 1), by_hand(w, FMT, 1), **settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        dx = conv2d_input(x.shape, by_hand(w, FMT, 0), by_hand(dy, FMT, 1), **ctx.settings)
        return dx, conv2d_weight(by_hand(x, FMT, 0), w.shape, by_hand(dy, FMT, 0), **ctx.settings), None


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    y: Tensor = ByHand.apply(x, w)
    return y if b is None else y + b


def write_by_hand(model: nn.Module) -> None:
    """Give every linear layer and convolution of a model a forward that is written by hand."""
    for module in model.modules():
        if isinstance(module, Conv1D):
            module.forward = lambda x, m=module: linear(x, m.weight.t(), m.bias)
        elif isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: linear(x, m.weight, m.bias)
        elif isinstance(module, nn.Conv2d):
            settings = {"stride": module.stride, "padding": module.padding, "groups": module.groups}
            module.forward = lambda x, m=module, s=settings: ConvolutionByHand.apply(x, m.weight, s)


def assert_trains_alike(model: nn.Module, expected: nn.Module, *inputs: Tensor) -> None:
    outputs = []
    for m in (model, expected):
        out = m(*inputs)
        out = out.logits if hasattr(out, "logits") else out[0] if isinstance(out, tuple) else out
        (out * torch.arange(out.shape[-1])).sum().backward()
        outputs.append(out.detach())
    assert_near(outputs[0], outputs[1])
    for (name, p), (_, q) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert_near(p.grad, q.grad)


def assert_near(got: Tensor, expected: Tensor | None) -> None:
    """Equal, or as far as operands that another order of summation tipped to their neighbour can move a product."""
    assert expected is not None
    error = (got - expected).norm() / expected.norm().clamp(min=1e-12)
    # a share TIPPED of the operands moves by SPACING. A wrong axis moves all: by 0.5 % and more. Measured: 0.
    assert float(error) <= SPACING * TIPPED**0.5


def test_gpt2_whose_layers_are_addmm() -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=70, n_positions=32)
    torch.manual_seed(0)
    expected = transformers.GPT2LMHeadModel(config).eval()
    model = quantize(expected, FMT)
    kept = Kept(model)
    write_by_hand(expected)
    assert_trains_alike(model, expected, torch.randint(0, 70, (3, 20)))
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    sites = {f"transformer.h.{i}.{name}:addmm" for i in range(2) for name in layers} | {"lm_head:linear"}
    assert {site for site, _ in kept.after} == sites  # attention's products are not among them
    assert len(kept.after) == 6 * len(sites)


class BasicBlock(nn.Module):
    """A block of a residual network that halves the resolution, as torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(40, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48)
        self.conv2, self.bn2 = nn.Conv2d(48, 48, 3, padding=1, groups=3, bias=False), nn.BatchNorm2d(48)
        self.downsample = nn.Sequential(nn.Conv2d(40, 48, 1, stride=2, bias=False), nn.BatchNorm2d(48))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


def test_a_residual_block() -> None:
    torch.manual_seed(0)
    expected = BasicBlock()
    model = quantize(expected, FMT)
    write_by_hand(expected)
    assert_trains_alike(model, expected, torch.randn(34, 40, 8, 8))


def test_multi_head_attention() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(64, 2, batch_first=True)
    model = quantize(layer, FMT)

    class Expected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)  # as inside of the layer: tokens are in the order of (time, batch)
            q, k, v = linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
            heads = [t.unflatten(-1, (2, 32)).permute(1, 2, 0, 3) for t in (q, k, v)]
            out = F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)
            return linear(out, layer.out_proj.weight, layer.out_proj.bias).transpose(0, 1)

    x = torch.randn(3, 20, 64)

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, x, x, need_weights=False)[0]

    with fpsim.record(model) as recording:
        assert_trains_alike(Self(), Expected(), x)
    assert {row["site"] for row in recording.rows()} == {":linear", ":linear_1"}


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_layer_is_its_linear_layers(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(40, 36) if kind == "lstm" else nn.GRU(40, 36)
    model = quantize(layer, FMT)

    class Expected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            m, outputs = layer, []
            h, c = torch.zeros(3, 36), torch.zeros(3, 36)
            of_input = linear(x.flatten(0, 1), m.weight_ih_l0, m.bias_ih_l0).unflatten(0, x.shape[:2])
            for gates in of_input:
                of_hidden = linear(h, m.weight_hh_l0, m.bias_hh_l0)
                if kind == "lstm":
                    i, f, g, o = (of_hidden + gates).chunk(4, -1)
                    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                    h = torch.sigmoid(o) * torch.tanh(c)
                else:
                    r, z, n = gates.chunk(3, -1)
                    hr, hz, hn = of_hidden.chunk(3, -1)
                    n = torch.tanh(n + torch.sigmoid(hr + r) * hn)
                    z = torch.sigmoid(hz + z)
                    h = n + z * (h - n)
                outputs.append(h)
            return torch.stack(outputs)

    assert_trains_alike(model, Expected(), torch.randn(5, 3, 40))
