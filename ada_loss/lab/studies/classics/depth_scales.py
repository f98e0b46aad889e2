"""One scale for each layer of a deep network, compared with one scale for the whole loss, Zhao et al. 2020."""

from __future__ import annotations

import torch

import fpsim
from ada_loss.lab.studies.classics.frame import Classic, Setting, trained
from ada_loss.lab.studies.classics.telling import Picture, Row, Rows, Sentences, label, level, levels, lines, panels
from ada_loss.lab.studies.depth import layer_errors, relu_network
from ada_loss.lab.tasks import deep_digits

# The gain of a layer, by format. Through 24 layers a gradient's norm shrinks by the factor (gain / 2)^12: 2^-24 at the
# gain 0.5, and 2^-52 at the gain 0.1. The range of e5m2 with its subnormals, 2^32, holds such gradients. The ranges of
# e4m3fn, 2^18, and of fp16, 2^40, do not.
CASES = {"e5m2": 0.5, "e4m3fn": 0.5, "fp16": 0.1}
JUDGED, TRAINED, PER_LAYER = ("e4m3fn", "fp16"), "e4m3fn", "per layer"
WIDTH, SMALLEST = 128, 2.0**-10  # the gradient that comes in is as small as those of a mean loss
LOST, KEPT, NEAR = 0.9, 0.3, 3.0  # relative errors; points of accuracy


def settings(quick: bool) -> list[Setting]:
    accuracy = {"what": "accuracy", "format": TRAINED, "epochs": 12 if quick else 20}
    ways = ("float32", *((0, 12) if quick else range(0, 25, 4)), PER_LAYER)
    gradients = [{"what": "gradient", "format": fmt, "gain": gain} for fmt, gain in CASES.items()]
    rows = [{**one, "scale": scale} for one in gradients for scale in (*range(0, 41, 2), PER_LAYER)]
    return [*rows, *({**accuracy, "scale": scale} for scale in ways)]


def measure(setting: Setting, seed: int, device: str) -> list[Row]:
    """Return the error of the worst layer's weight gradient in one backward pass, or the accuracy of one training."""
    fmt, scale, ways = setting["format"], setting["scale"], {PER_LAYER: "adaptive", "float32": "none"}
    if setting["what"] == "accuracy":
        policy = None if scale == "float32" else fpsim.Policy(error=fmt, weight_grad=fmt)
        options = {"scaling": ways.get(scale) or 2.0**scale, "epochs": setting["epochs"], "record_every": 0}
        return [{"value": 100 * trained(deep_digits, seed, device, policy, **options).metrics["accuracy"]}]
    network = relu_network(setting["gain"], width=WIDTH, seed=seed).to(device)
    x, gradient = (torch.randn(64, WIDTH).to(device) * size for size in (1.0, SMALLEST))
    errors = torch.tensor(layer_errors(network, x, gradient, fmt, None if scale == PER_LAYER else 2.0**scale))
    # An overflow counts as the error 10. A gradient that is lost entirely has the error 1.
    return [{"value": errors.nan_to_num(10.0, 10.0).max().item()}]


def holds(rows: Rows) -> bool:
    """Return True if every single scale loses some layer, and a scale per layer loses none.

    The scale per layer must also train as well as the best single scale, up to 3 points of accuracy.
    """
    errors = [rows.apart("scale", "value", what="gradient", format=fmt) for fmt in JUDGED]
    single, reached = rows.apart("scale", "value", what="accuracy")
    is_kept = all(min(one.values()) >= LOST and words[PER_LAYER] <= KEPT for one, words in errors)
    return is_kept and reached[PER_LAYER] > max(single.values()) - NEAR


def says(rows: Rows) -> Sentences:
    for fmt, gain in CASES.items():
        errors, own = rows.apart("scale", "value", what="gradient", format=fmt)
        error, best = min((error, scale) for scale, error in errors.items())
        yield f"""24 layers at the gain {gain:g} in {fmt}: the error of the worst layer's weight gradient is {error:.2g}
            of its norm at the best single scale, 2^{best}, and {own[PER_LAYER]:.2g} with a scale for each layer."""
    single, words = rows.apart("scale", "value", what="accuracy")
    best, failed = max(single, key=single.__getitem__), sum(x < words["float32"] - 10 for x in single.values())
    ends = rows.told("scale", "value", ".1f", what="accuracy")
    yield f"""The ten layers of deep_digits in {TRAINED} need no more than one scale, if it is the right one: float32
        reaches {ends["float32"]} %. The best of {len(single)} constants, 2^{best}, reaches {ends[best]} %, and {failed}
        of them end 10 points or more below float32. Scales per layer, which nobody had to find, reach
        {ends[PER_LAYER]} %."""


def draw(rows: Rows) -> Picture:
    picture, (errors, accuracy) = panels(2, 8.8, 3.8)
    names = {"accuracy": "a single scale"} | {fmt: f"{fmt}, gain {gain:g}" for fmt, gain in CASES.items()}
    look, x = Row(names=names, linestyle="-", marker="."), "log2 of the single scale"
    lines(errors, rows.of(what="gradient").with_numbers("scale"), "format", "scale", "value", **look)
    levels(errors, rows.of(what="gradient", scale=PER_LAYER), "format", "value")
    title = "24 layers; dashed: a scale for each layer; 10: overflow"
    label(errors, x, "error of the worst layer's weight gradient", title, (0.02, 0.15), yscale="log")
    lines(accuracy, rows.of(what="accuracy").with_numbers("scale"), "what", "scale", "value", first=1, **look)
    for name, i in ((PER_LAYER, 1), ("float32", None)):
        level(accuracy, rows.averages("scale", "value", what="accuracy")[name], i, label=name)
    label(accuracy, x, "test accuracy in %", f"deep_digits, gradients in {TRAINED}", "best", ylim=(0, 102))
    return picture


CLASSIC = Classic(settings, measure, holds, says, draw)
