"""Gradients that underflow in fp16, and the constants that keep them in its range, Micikevicius et al. 2017."""

from __future__ import annotations

import fpsim
from ada_loss.lab.studies.classics.frame import Classic, Setting, trained
from ada_loss.lab.studies.classics.telling import Picture, Row, Rows, Sentences, label, levels, lines, panels
from ada_loss.lab.tasks import deep_digits, segmentation
from ada_loss.lab.training import underflow_share

JUDGED = "deep network"
TASKS = {
    JUDGED: (deep_digits, {"epochs": 12}, "accuracy"),
    "segmentation": (segmentation, {"steps": 96}, "mean_iou"),
}
NEAR, GONE = 5.0, 50.0  # points below float32 that count as the same; the accuracy below which nothing is learnt


def settings(quick: bool) -> list[Setting]:
    tasks, exponents = ((JUDGED,), (-28, -8, 0, 8, 28)) if quick else (TASKS, range(-28, 29, 4))
    return [{"task": task, "log2_scale": k} for task in tasks for k in ("float32", *exponents)]


def measure(setting: Setting, seed: int, device: str) -> list[Row]:
    """Return the result of one training with all gradients in fp16 at one loss scale; steps with inf are skipped."""
    make, own, metric = TASKS[setting["task"]]
    scale, scaled = setting["log2_scale"], {"fmt": fpsim.Policy(error="fp16", weight_grad="fp16")}
    options = own if scale == "float32" else {**own, **scaled, "scaling": 2.0**scale}
    run = trained(make, seed, device, record_every=20, **options)
    share = 0.0 if scale == "float32" else underflow_share(run.rows)
    return [{"metric": 100 * run.metrics[metric], "underflow": share, "skipped": run.skipped / len(run)}]


def window(rows: Rows) -> list[int]:
    """Return the exponents of the scales that reach float32's metric, in the mean over the seeds.

    rows: the rows of one task.
    """
    reached, words = rows.apart("log2_scale", "metric")
    return [k for k, metric in reached.items() if metric > words["float32"] - NEAR]


def holds(rows: Rows) -> bool:
    """Return True if the smallest and the largest scale learn nothing, and some scale reaches float32.

    With the smallest scale gradients must underflow, and with the largest scale steps must be skipped.
    """
    rows = rows.of(task=JUDGED)
    # The rows are in the order of `settings`: the smallest scale comes first, and the largest scale last.
    low, *_, high = rows.with_numbers("log2_scale")
    lost = low["metric"] < GONE and low["underflow"] > 0.3
    return bool(window(rows)) and lost and high["metric"] < GONE and high["skipped"] > 0.5


def says(rows: Rows) -> Sentences:
    for task in rows.distinct("task"):
        one = rows.of(task=task)
        fits, (_, *exponents), ends = window(one), one.distinct("log2_scale"), one.told("log2_scale", "metric", ".1f")
        zero, skipped = (one.averages("log2_scale", name, 100) for name in ("underflow", "skipped"))
        low, high, lost = exponents[0], exponents[-1], [k for k in exponents if fits and k < fits[0]]
        metric = TASKS[task][2].replace("mean_iou", "mean IoU")
        yield f"{task.capitalize()}: the {metric} is {ends['float32']} % in float32."
        repair = f"Scales from 2^{fits[0]} to 2^{fits[-1]} reach that" if fits else "No scale reaches that"
        # Scaling by powers of two only shifts the window: a loss 2^-k times smaller needs a constant 2^k times larger.
        if lost:
            repair += f""". With a loss that is 2^{-lost[-1]} times smaller, the network does not reach it without a
                scale, but does with a constant from 2^{fits[0] - lost[-1]} to 2^{fits[-1] - lost[-1]}"""
        yield f"""{repair}. With the loss as it is, and without a scale, {zero[0]:.1f} % of the gradients become zero,
            and the metric is {ends[0]} %: so small a network {"does not need" if 0 in fits else "needs"} a scale. If
            the gradients are 2^{-low} times smaller, {zero[low]:.0f} % of them underflow, and the metric is
            {ends[low]} %. With the scale 2^{high}, {skipped[high]:.0f} % of the steps overflow, and the metric is
            {ends[high]} %."""


def draw(rows: Rows) -> Picture:
    picture, (learnt, lost) = panels(2, 8.4, 3.6)
    names = {task: f"{task}, {metric.replace('_', ' ')}" for task, (*_, metric) in TASKS.items()}
    look = Row(names=names, linestyle="-", marker="o", markersize=3.5)
    scaled, x = rows.with_numbers("log2_scale"), "log2 of the scale of the loss; 0: none"
    lines(learnt, scaled, "task", "log2_scale", "metric", **look)
    lines(lost, scaled, "task", "log2_scale", "underflow", factor=100, **look)
    levels(learnt, rows.of(log2_scale="float32"), "task", "metric", linewidth=0.9)
    for axes in (learnt, lost):
        axes.axvline(0, color="0.5", linewidth=0.8, linestyle=":")
    label(learnt, x, "metric in %; dashed: float32", ylim=(-2, 102))
    label(lost, x, "gradients that become zero, in %", "", "upper right", ylim=(-2, 102))
    return picture


CLASSIC = Classic(settings, measure, holds, says, draw)
