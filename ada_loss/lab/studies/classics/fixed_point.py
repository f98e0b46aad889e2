"""Training in 16-bit fixed point, with stochastic rounding and with rounding to nearest, Gupta et al. 2015."""

from __future__ import annotations

from statistics import mean

import torch

import fpsim
from ada_loss.lab.studies.classics.frame import ByHand, Classic, Setting, perceptron
from ada_loss.lab.studies.classics.telling import Picture, Row, Rows, Sentences, below, label, level, lines, panels
from ada_loss.lab.tasks import mnist5k

WORD, FRACTIONS = 16, (8, 10, 12)  # bits
# The numbers of fraction bits that are judged, because their range holds all numbers of the training; and the number of
# fraction bits with which gradients also get another rounding than everything else.
JUDGED, APART = (8, 10), 10
ALIKE = 4.0  # points within which two shares of wrong answers count as alike
NEAREST, RANDOM = "nearest_even", "stochastic"
# Pairs of roundings: the second one is for the gradients of activations, and the first one for everything else. In
# ALIKE_ROUNDED both are equal.
ALIKE_ROUNDED = {"to nearest": (NEAREST, NEAREST), "stochastic": (RANDOM, RANDOM)}
ROUNDINGS = {**ALIKE_ROUNDED, "gradients to nearest": (RANDOM, NEAREST), "gradients stochastic": (NEAREST, RANDOM)}


def settings(quick: bool) -> list[Setting]:
    epochs, fractions = (12, JUDGED[:1]) if quick else (40, FRACTIONS)
    pairs = [(f, r) for f in fractions for r in list(ROUNDINGS)[: 4 if f == APART else 2]]
    return [{"epochs": epochs, "fraction": f, "rounding": r} for f, r in [(0, "float32"), *pairs]]


def measure(setting: Setting, seed: int, device: str) -> list[Row]:
    """Return the share of wrong answers after each epoch of one training, with SGD at 0.1 and batches of 100.

    Weights, activations, gradients and updates are in the format.
    """
    model, update, wrong = perceptron(784, 200, 200, 10).to(device), fpsim.Update(), list[float]()
    if setting["rounding"] != "float32":
        fmt, (rest, error) = fpsim.FixedPoint(WORD, setting["fraction"]), ROUNDINGS[setting["rounding"]]
        by_role = {role: error if role == "error" else rest for role in fpsim.ROLES}
        model = fpsim.quantize(model, fpsim.Policy(fmt, fmt, fmt, fmt, rounding=by_role, float32=("cross_entropy",)))
        update = fpsim.Update(weight=fmt, rounding=rest)
    fit, optimizer = ByHand(mnist5k(seed), device, model), torch.optim.SGD(model.parameters(), lr=0.1)
    fpsim.quantize_optimizer(optimizer, update, model, seed=seed)
    for _ in range(setting["epochs"]):
        fit.steps(optimizer, torch.randperm(fit.size).split(100))
        wrong.append(100 * (1 - fit.metric()))
    return [{"epoch": i, "wrong": share} for i, share in enumerate(wrong, 1)]


def holds(rows: Rows) -> bool:
    """Return True if, with rounding to nearest, more than half of the answers are wrong.

    With stochastic rounding, less than 4 points more of the answers must be wrong than in float32.
    """
    wrong = {(row["fraction"], row["rounding"]): row["wrong"] for row in rows.of(epoch=rows[-1]["epoch"])}
    tried = [(wrong[k, "to nearest"], wrong[k, "stochastic"]) for k in JUDGED if (k, "stochastic") in wrong]
    return all(nearest > 50 and random < wrong[0, "float32"] + ALIKE for nearest, random in tried)


def says(rows: Rows) -> Sentences:
    ends = rows.of(epoch=rows[-1]["epoch"])
    plain, start = ends.averages("fraction", "wrong")[0], ends.told("fraction", "wrong", ".1f")[0]
    yield f"After {rows[-1]['epoch']} epochs float32 is wrong for {start} % of 1,000 digits."
    for k in rows.distinct("fraction")[1:]:
        words, tried = ends.told("rounding", "wrong", ".1f", fraction=k), rows.of(fraction=k, rounding="to nearest")
        best = mean(min(tried.column("wrong", seed=seed)) for seed in rows.distinct("seed"))
        yield f"""With {k} of 16 bits behind the point, rounding to nearest is wrong for {words["to nearest"]} % (at its
            best epoch {best:.1f} %), and stochastic rounding for {words["stochastic"]} %."""
        if ends.averages("rounding", "wrong", fraction=k)["stochastic"] > plain + ALIKE:
            yield f"""There stochastic rounding does not reach float32: the format has no number beyond
                {fpsim.FixedPoint(WORD, k).largest:.3g}."""
    if alone := [*ends.told("rounding", "wrong", ".1f", fraction=APART).values()][2:]:
        yield f"""With {APART} bits, {alone[0]} % are wrong if the gradients of activations are rounded to nearest and
            all else stochastically, and {alone[1]} % if it is the other way round."""


def draw(rows: Rows) -> Picture:
    fractions = rows.distinct("fraction")[1:]
    picture, row = panels(len(fractions), 3.2 * len(fractions) + 0.8, 3.4, sharey=True)
    for fraction, axes, y in zip(fractions, row, ("wrong answers in %", "", ""), strict=False):
        lines(axes, Rows(rows.of(fraction=0) + rows.of(fraction=fraction)), "rounding", "epoch", "wrong")
        level(axes, 90)  # by chance, of ten digits
        label(axes, "epoch", y, f"{WORD - fraction} bits before, {fraction} behind the point", ylim=(0, 100))
    below(picture, row)
    return picture


CLASSIC = Classic(settings, measure, holds, says, draw)
