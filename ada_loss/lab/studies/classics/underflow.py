"""Gradients that underflow in fp16, and the constants that keep them in its range, Micikevicius et al. 2017."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import fpsim
from ada_loss.lab.results.figures import DASHES, colour
from ada_loss.lab.studies.classics.frame import Classic, Rows, of, spread
from ada_loss.lab.tasks import deep_digits, segmentation
from ada_loss.lab.training import train, underflow_share
from fpsim.insight.pictures import new_picture

TASKS = {
    "deep network": (deep_digits, {"epochs": 12}),
    "segmentation": (segmentation, {"steps": 96}),
}
JUDGED = "deep network"
NAMES = {"deep network": "accuracy", "segmentation": "mean_iou"}
GRADIENTS = fpsim.Policy(error="fp16", weight_grad="fp16")
NEAR, GONE = 5.0, 50.0  # points below float32 that count as the same; the accuracy below which nothing is learnt


def settings(quick: bool) -> list[dict[str, Any]]:
    tasks, exponents = ((JUDGED,), (-28, -8, 0, 8, 28)) if quick else (TASKS, range(-28, 29, 4))
    return [{"task": task, "log2_scale": k} for task in tasks for k in ("float32", *exponents)]


def measure(setting: dict[str, Any], seed: int, device: str) -> Rows:
    """One training with all gradients in fp16 at one scale of the loss; steps with inf are skipped."""
    make, own = TASKS[setting["task"]]
    scale = setting["log2_scale"]
    options = {**make.options, **own, "seed": seed, "device": device, "record_every": 20}  # type: ignore[attr-defined]
    if scale == "float32":
        run = train(make(seed), **options)
    else:
        run = train(make(seed), GRADIENTS, scaling=2.0**scale, **options)
    share = 0.0 if scale == "float32" else underflow_share(run.rows)
    metric = 100 * run.metrics[NAMES[setting["task"]]]
    return [{"metric": metric, "underflow": share, "skipped": run.skipped / len(run)}]


def _plain(rows: Rows) -> float:
    return mean(row["metric"] for row in of(rows, log2_scale="float32"))


def window(rows: Rows) -> list[int]:
    """The exponents of the scales that reach float32, of the rows of one task, in the mean over the seeds."""
    exponents = sorted({row["log2_scale"] for row in rows} - {"float32"})
    reached = {k: mean(row["metric"] for row in of(rows, log2_scale=k)) for k in exponents}
    return [k for k, metric in reached.items() if metric > _plain(rows) - NEAR]


def holds(rows: Rows) -> bool:
    """Too small a scale learns nothing and loses gradients, too large a one skips its steps, and some between fit."""
    rows = of(rows, task=JUDGED)
    scaled = [row for row in rows if row["log2_scale"] != "float32"]
    low, high = (pick(scaled, key=lambda row: row["log2_scale"]) for pick in (min, max))
    lost = low["metric"] < GONE and low["underflow"] > 0.3
    return bool(window(rows)) and lost and high["metric"] < GONE and high["skipped"] > 0.5


def says(rows: Rows) -> str:
    words = []
    for task in dict.fromkeys(row["task"] for row in rows):
        one = of(rows, task=task)
        fits, exponents = window(one), sorted({row["log2_scale"] for row in one} - {"float32"})
        at_one, low, high = (of(one, log2_scale=k) for k in (0, exponents[0], exponents[-1]))
        plain = spread([row["metric"] for row in of(one, log2_scale="float32")], ".1f")
        ends = [spread([row["metric"] for row in part], ".1f") for part in (at_one, low, high)]
        words.append(
            f"{task.capitalize()}: {plain} % in float32. "
            + _repair(fits, exponents)
            + f"Without a scale {100 * mean(row['underflow'] for row in at_one):.1f} % of the gradients become zero, "
            f"and it is {ends[0]} %: so small a network {'does not need' if 0 in fits else 'needs'} one. Gradients "
            f"{2 ** -exponents[0]:,} times smaller underflow: {100 * mean(row['underflow'] for row in low):.0f} % of "
            f"them, and {ends[1]} %. At 2^{exponents[-1]} {100 * mean(row['skipped'] for row in high):.0f} % of the "
            f"steps overflow, and it is {ends[2]} %."
        )
    return " ".join(words)


def _repair(fits: Sequence[int], exponents: Sequence[int]) -> str:
    """Which scales fit, and which constants repair a loss that is too small: to scale by powers of two is to shift."""
    if not fits:
        return "No scale reaches that. "
    words = f"Scales from 2^{fits[0]} to 2^{fits[-1]} reach that"
    lost = [k for k in exponents if k < fits[0]]
    if lost:
        words += f"; a loss 2^{-lost[-1]} times smaller does not, "
        words += f"and a constant from 2^{fits[0] - lost[-1]} to 2^{fits[-1] - lost[-1]} repairs it"
    return f"{words}. "


def draw(rows: Rows) -> Any:
    picture = new_picture(8.4, 3.6)
    learnt, lost = picture.subplots(1, 2)
    for i, task in enumerate(dict.fromkeys(row["task"] for row in rows)):
        one = of(rows, task=task)
        exponents = sorted({row["log2_scale"] for row in one} - {"float32"})
        look: dict[str, Any] = {"color": colour(i), "marker": "o", "markersize": 3.5, "linewidth": 1.3}
        for axes, name, factor in ((learnt, "metric", 1), (lost, "underflow", 100)):
            values = [factor * mean(row[name] for row in of(one, log2_scale=k)) for k in exponents]
            axes.plot(exponents, values, label=f"{task}, {NAMES[task].replace('_', ' ')}", **look)
        learnt.axhline(_plain(one), color=colour(i), linewidth=0.9, linestyle=DASHES[1])
    for axes in (learnt, lost):
        axes.axvline(0, color="0.5", linewidth=0.8, linestyle=":")
        axes.set(xlabel="log2 of the scale of the loss; 0: none", ylim=(-2, 102))
        axes.spines[["top", "right"]].set_visible(False)
    learnt.set_ylabel("metric in %; dashed: float32")
    lost.set_ylabel("gradients that become zero, in %")
    lost.legend(fontsize=8, frameon=False, loc="upper right")
    return picture


CLASSIC = Classic(
    claim="In fp16, small gradients become zero, and some networks do not train for that reason (Multibox SSD). A loss "
    "scaled by a constant moves all gradients up, into the range that fp16 leaves unused, and repairs it.",
    limits="SSD on 300 x 300 pictures, whose gradients are too small for fp16 by themselves. Scales below 1 stand for "
    "that here: they make the gradients as small as a loss that is a mean over so many more numbers would.",
    settings=settings,
    measure=measure,
    holds=holds,
    says=says,
    draw=draw,
)
