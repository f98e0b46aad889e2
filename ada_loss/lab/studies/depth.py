"""A controlled trial of scaling methods, on deep networks whose gradients shrink or grow towards the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from ada_loss.lab.training.run import underflow_share
from ada_loss.layerwise import AdaLossScaled
from ada_loss.rules import LAYER_RULES, layer_rule, loss_rule

__all__ = ["GAINS", "METHODS", "depth_trial", "layer_errors", "relu_network"]

GAINS = (3.0, 1.2, 0.8, 0.5, 0.2)
# A number is a constant scale. A loss rule's name runs that rule for STEPS steps on the same batch, from the rule's
# initial scale. The other names are rules of AdaLossScaled; "approx_range 16/1024" has the bounds of the original
# implementation.
METHODS = (
    *("none", 2.0**7, 2.0**15, "torch", "nnabla", "cerebras"),
    *("approx_range 16/1024", "approx_range", "abs_range", "exact", "current"),
)
STEPS = 60


def relu_network(gain: float, depth: int = 24, width: int = 128, seed: int = 0) -> nn.Sequential:
    """Return a network of ReLUs and linear layers without bias, with normally distributed weights.

    gain: the variance of the weights times the width; with 2, gradients keep their size.
    depth: the number of linear layers.
    width: the width of every layer.
    seed: the seed of the weights.

    >>> len(relu_network(2.0, depth=3))
    6
    """
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(depth):
            linear = nn.Linear(width, width, bias=False)
            nn.init.normal_(linear.weight, std=math.sqrt(gain / width))
            layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def depth_trial(
    formats: Sequence[str] = ("fp16", "e5m2", "e4m3fn"),
    gains: Sequence[float] = GAINS,
    methods: Sequence[str | float] = METHODS,
    *,
    depth: int = 24,
    width: int = 128,
    batch: int = 64,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[dict[str, Any]]:
    """Run a backward pass of each network for each format and method, and measure its gradients.

    Only the gradients of activations are rounded to the format. A row holds:
        format, gain, method.
        underflow: the share of the non-zero gradients that became zero.
        overflow: the number of gradients that left the range.
        error: the norm of the difference between the first layer's weight gradient and its float32 gradient, divided by
            the norm of the float32 gradient.
        log2_scale: log2 of the scale of the loss, or of the first layer.

    formats, gains, methods: the formats, gains and methods to try; see METHODS.
    depth, width, batch: the sizes of the networks and of the data.
    seed: the seed of the weights and of the data.
    progress: a function that is called with 1 after each row.

    >>> (row,) = depth_trial(["fp16"], [0.5], ["none"], depth=4, width=16, batch=8)
    >>> sorted(row)
    ['error', 'format', 'gain', 'log2_scale', 'method', 'overflow', 'underflow']
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, width, generator=generator)
    # The gradient is as small as the gradients of a mean loss.
    gradient = torch.randn(batch, width, generator=generator) * 2.0**-10
    rows = []
    for gain in gains:
        network = relu_network(gain, depth, width, seed)
        network(x).backward(gradient)
        reference = _first_gradient(network)
        for fmt in formats:
            # Only gradients are rounded, so that the forward pass is the same for all methods.
            model = fpsim.quantize(network, fpsim.Policy(error=fmt))
            for method in methods:
                rows.append(
                    {"format": fmt, "gain": gain, "method": str(method), **_run(model, method, x, gradient, reference)}
                )
                if progress is not None:
                    progress(1)
    return rows


def layer_errors(network: nn.Module, x: Tensor, gradient: Tensor, fmt: str, scale: float | None = None) -> list[float]:
    """Return the relative error of each layer's weight gradient in one backward pass.

    The relative error is the norm of the error, divided by the norm of the float32 gradient.

    network, x: the network, in plain float32, and its input.
    gradient: the gradient of the network's output, from which the backward pass begins.
    fmt: the format of the gradients of activations; nothing else is rounded.
    scale: the scale of the loss; None for a separate scale for each layer.

    >>> x = torch.ones(4, 8)
    >>> layer_errors(relu_network(2.0, depth=2, width=8), x, x, "fp16", 2.0**40)
    [nan, nan]
    """
    exact, model = _gradients(network, x, gradient), fpsim.quantize(network, fpsim.Policy(error=fmt))
    factor = 1.0 if scale is None else scale
    with AdaLossScaled(model) if scale is None else nullcontext():
        found = _gradients(model, x, gradient * factor)
    return [float((a / factor - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def _gradients(model: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward(gradient)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _first_gradient(model: nn.Sequential) -> Tensor:
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    return weight.grad.clone()


def _run(model: nn.Sequential, method: str | float, x: Tensor, gradient: Tensor, reference: Tensor) -> dict[str, Any]:
    scale, scaled = 1.0, None
    if isinstance(method, str) and method != "none":
        name, _, bounds = method.partition(" ")
        if name in LAYER_RULES:
            low, high = map(float, bounds.split("/")) if bounds else (None, None)
            # A method with the original's bounds also has the authors' limit on the factor; by default there is none.
            rule = layer_rule(name, **({"bound": "worst_case"} if name == "approx_range" and bounds else {}))
            scaled = AdaLossScaled(model, rule=rule, scale_upper_bound=low, accum_upper_bound=high)
        else:
            scale = _settled(model, name, x, gradient)
    elif not isinstance(method, str):
        scale = float(method)
    with scaled or nullcontext():
        with fpsim.record(model) as recording:
            weight_gradient = _backward(model, x, gradient * scale) / scale
        log2_scale = math.log2(scale) if scaled is None else float(scaled.last_log2_scale("0:linear"))
    rows = recording.rows()
    return {
        "underflow": underflow_share(rows),
        "overflow": sum(row["overflow_count"] for row in rows if row["role"] == "error"),
        "error": float((weight_gradient - reference).norm() / reference.norm()),
        "log2_scale": log2_scale,
    }


def _backward(model: nn.Sequential, x: Tensor, gradient: Tensor) -> Tensor:
    model.zero_grad()
    model(x).backward(gradient)
    return _first_gradient(model)


def _settled(model: nn.Sequential, system: str, x: Tensor, gradient: Tensor) -> float:
    """Return the scale that a loss rule reaches in at most STEPS steps on one batch."""
    rule = loss_rule(system)
    for _ in range(STEPS):
        _backward(model, x, gradient * rule.scale)
        largest = torch.stack([p.grad.abs().amax() for p in model.parameters() if p.grad is not None]).amax().item()
        ok = math.isfinite(largest)
        try:
            # Some rules need the largest unscaled gradient, which is unknown after an overflow.
            rule = rule.adjust(ok, largest / rule.scale if ok else None)
        # The rule raises FloatingPointError if its scale can fall no further.
        except FloatingPointError:
            break
    return rule.scale
