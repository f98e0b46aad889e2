"""A scale for each layer in deep networks, beside each single one, Zhao et al. 2020."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from ada_loss.lab.results.figures import DASHES, colour
from ada_loss.lab.studies.classics.frame import Classic, Rows, of, spread
from ada_loss.lab.studies.depth import relu_network
from ada_loss.lab.tasks import deep_digits
from ada_loss.lab.training import train
from ada_loss.layerwise import AdaLossScaled
from fpsim.insight.pictures import new_picture

# Format and gain of a layer: through 24 layers a gradient's norm shrinks by (gain / 2)^12, 2^24 at 0.5 and 2^52 at 0.1.
# The range of e5m2, 2^32 with its subnormals, holds the first; 2^18 of e4m3fn and 2^40 of fp16 do not hold the others.
CASES = (("e5m2", 0.5), ("e4m3fn", 0.5), ("fp16", 0.1))
JUDGED = CASES[1:]
WIDTH = 128
PER_LAYER = "per layer"
TRAINED = "e4m3fn"
SMALLEST = 2.0**-10  # of the gradient that comes in: as small as those of a mean loss
LOST, KEPT, NEAR = 0.9, 0.3, 3.0  # relative errors; points of accuracy


def settings(quick: bool) -> list[dict[str, Any]]:
    shared = {"epochs": 12 if quick else 20}
    exponents, trained = range(0, 41, 2), ((0, 12) if quick else range(0, 25, 4))
    rows = [
        {"what": "gradient", "format": fmt, "gain": gain, "scale": scale}
        for fmt, gain in CASES
        for scale in (*exponents, PER_LAYER)
    ]
    ways = ("float32", *trained, PER_LAYER)
    return [*rows, *({"what": "accuracy", "format": TRAINED, "scale": scale, **shared} for scale in ways)]


def measure(setting: dict[str, Any], seed: int, device: str) -> Rows:
    """The error of the worst layer's weight gradient in one backward pass, or the accuracy of one training."""
    if setting["what"] == "accuracy":
        return [{"value": _accuracy(setting, seed, device)}]
    network = relu_network(setting["gain"], width=WIDTH, seed=seed).to(device)
    x, gradient = (torch.randn(64, WIDTH).to(device) * size for size in (1.0, SMALLEST))
    exact = _weight_gradients(network, x, gradient)
    model = fpsim.quantize(network, fpsim.Policy(error=setting["format"]))
    if setting["scale"] == PER_LAYER:
        with AdaLossScaled(model):
            found = _weight_gradients(model, x, gradient)
    else:
        scale = 2.0 ** setting["scale"]
        found = [part / scale for part in _weight_gradients(model, x, gradient * scale)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    # an overflow is no smaller an error than a loss of everything
    return [{"value": max(error if math.isfinite(error) else 10.0 for error in errors)}]


def _weight_gradients(model: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward(gradient)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _accuracy(setting: dict[str, Any], seed: int, device: str) -> float:
    scale, fmt = setting["scale"], setting["format"]
    scaling = {PER_LAYER: "adaptive", "float32": "none"}[scale] if isinstance(scale, str) else 2.0**scale
    policy = None if scale == "float32" else fpsim.Policy(error=fmt, weight_grad=fmt)
    shared = {**deep_digits.options, "epochs": setting["epochs"]}  # type: ignore[attr-defined]
    run = train(deep_digits(seed), policy, scaling=scaling, seed=seed, device=device, record_every=0, **shared)
    return 100 * run.metrics["accuracy"]


def _by_scale(rows: Rows, **wanted: Any) -> dict[int | str, float]:
    """The mean over the seeds, by scale."""
    chosen = of(rows, **wanted)
    return {
        scale: mean(row["value"] for row in of(chosen, scale=scale))
        for scale in dict.fromkeys(row["scale"] for row in chosen)
    }


def _single(values: dict[int | str, float]) -> dict[int, float]:
    return {scale: value for scale, value in values.items() if isinstance(scale, int)}


def holds(rows: Rows) -> bool:
    """Where gradients span more than the format, every single scale loses a layer and a scale for each keeps all.

    In the training one scale for each layer is as good as the best single one, to 3 points.
    """
    for fmt, gain in JUDGED:
        errors = _by_scale(rows, what="gradient", format=fmt, gain=gain)
        if min(_single(errors).values()) < LOST or errors[PER_LAYER] > KEPT:
            return False
    reached = _by_scale(rows, what="accuracy")
    return reached[PER_LAYER] > max(_single(reached).values()) - NEAR


def says(rows: Rows) -> str:
    words = []
    for fmt, gain in CASES:
        errors = _by_scale(rows, what="gradient", format=fmt, gain=gain)
        best = min(_single(errors), key=lambda k: errors[k])
        words.append(
            f"24 layers at the gain {gain:g} in {fmt}: the error of the worst layer's weight gradient is "
            f"{errors[best]:.2g} of its norm at the best single scale, 2^{best}, and {errors[PER_LAYER]:.2g} with a "
            f"scale for each layer."
        )
    reached = _by_scale(rows, what="accuracy")
    best = max(_single(reached), key=lambda k: reached[k])
    ends = [
        spread([row["value"] for row in of(rows, what="accuracy", scale=scale)], ".1f")
        for scale in ("float32", best, PER_LAYER)
    ]
    failed = sum(value < reached["float32"] - 10 for value in _single(reached).values())
    words.append(
        f"The ten layers of deep_digits in {TRAINED} need no more than one scale, if it is the right one: float32 "
        f"reaches {ends[0]} %, the best of {len(_single(reached))} constants, 2^{best}, {ends[1]} %, and scales per "
        f"layer {ends[2]} %, which nobody had to find; {failed} of the constants end 10 points or more below float32."
    )
    return " ".join(words)


def draw(rows: Rows) -> Any:
    picture = new_picture(8.8, 3.8)
    errors, accuracy = picture.subplots(1, 2)
    for i, (fmt, gain) in enumerate(CASES):
        values = _by_scale(rows, what="gradient", format=fmt, gain=gain)
        single = _single(values)
        errors.plot(
            [*single], [*single.values()], color=colour(i), marker=".", linewidth=1.3, label=f"{fmt}, gain {gain:g}"
        )
        errors.axhline(values[PER_LAYER], color=colour(i), linewidth=1.1, linestyle=DASHES[1])
    errors.set(yscale="log", xlabel="log2 of the single scale", ylabel="error of the worst layer's weight gradient")
    errors.set_title("24 layers; dashed: a scale for each layer; 10: overflow", fontsize=9)
    errors.legend(fontsize=8, frameon=False, loc=(0.02, 0.15))
    values = _by_scale(rows, what="accuracy")
    single = _single(values)
    accuracy.plot([*single], [*single.values()], color=colour(1), marker=".", linewidth=1.3, label="a single scale")
    accuracy.axhline(values[PER_LAYER], color=colour(1), linewidth=1.1, linestyle=DASHES[1], label=PER_LAYER)
    accuracy.axhline(values["float32"], color="0.5", linewidth=0.8, linestyle=":", label="float32")
    accuracy.set(xlabel="log2 of the single scale", ylabel="test accuracy in %", ylim=(0, 102))
    accuracy.set_title(f"deep_digits, gradients in {TRAINED}", fontsize=9)
    accuracy.legend(fontsize=8, frameon=False)
    for axes in (errors, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    return picture


CLASSIC = Classic(
    claim="In a deep network gradients shrink from layer to layer, and no single scale of the loss fits all of them. A "
    "scale for each layer, computed from statistics, does, and nobody has to look for it.",
    limits="A training that needs more than one scale. The networks whose gradients span more than a format are not "
    "trained, float32 itself would hardly train them; the one that is trained does with the best constant.",
    settings=settings,
    measure=measure,
    holds=holds,
    says=says,
    draw=draw,
)
