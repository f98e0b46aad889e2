"""Training in 16-bit fixed point, with stochastic rounding and with rounding to nearest, Gupta et al. 2015."""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from torch import nn

import fpsim
from ada_loss.lab.results.figures import DASHES, colour
from ada_loss.lab.studies.classics.frame import Classic, Rows, data_of, of, spread
from ada_loss.lab.tasks import accuracy, mnist5k
from fpsim.insight.pictures import new_picture

WORD = 16  # bits
FRACTIONS = (8, 10, 12)
JUDGED = (8, 10)  # those whose range holds what the training computes
FLOAT = "float32"
ALIKE = 4.0  # points, in which two shares of wrong answers count as alike
CHANCE = 90.0  # % of wrong answers among ten digits
# How everything else and how the gradients of activations are rounded.
ROUNDINGS: dict[str, tuple[str, str]] = {
    "to nearest": ("nearest_even", "nearest_even"),
    "stochastic": ("stochastic", "stochastic"),
    "gradients to nearest": ("stochastic", "nearest_even"),
    "gradients stochastic": ("nearest_even", "stochastic"),
}
APART = 10  # the fraction with which the gradients are rounded apart


def settings(quick: bool) -> list[dict[str, Any]]:
    epochs, fractions = (12, JUDGED[:1]) if quick else (40, FRACTIONS)
    small = [
        {"epochs": epochs, "fraction": fraction, "rounding": rounding}
        for fraction in fractions
        for rounding in list(ROUNDINGS)[: 4 if fraction == APART else 2]
    ]
    return [{"epochs": epochs, "fraction": 0, "rounding": FLOAT}, *small]


def perceptron() -> nn.Sequential:
    """The paper's network: 784 - 200 - 200 - 10, ReLU."""
    layers = [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def measure(setting: dict[str, Any], seed: int, device: str) -> Rows:
    """One training: SGD at 0.1, batches of 100; weights, activations, gradients and updates in the format."""
    task, model = mnist5k(seed), perceptron().to(device)
    (inputs, targets), test = data_of(task, device)
    fmt, is_float = fpsim.FixedPoint(WORD, setting["fraction"]), setting["rounding"] == FLOAT
    rest, error = ROUNDINGS.get(setting["rounding"], ("", ""))
    if not is_float:
        by_role = {role: error if role == "error" else rest for role in fpsim.ROLES}
        model = fpsim.quantize(model, fpsim.Policy(fmt, fmt, fmt, fmt, rounding=by_role, float32=("cross_entropy",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not is_float:
        fpsim.quantize_optimizer(optimizer, fpsim.Update(weight=fmt, rounding=rest), model, seed=seed)
    rows: Rows = []
    for epoch in range(setting["epochs"]):
        for batch in torch.randperm(len(inputs)).split(100):
            optimizer.zero_grad()
            task.loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            rows.append({"epoch": epoch + 1, "wrong": 100 * (1 - accuracy(model(test[0]), test[1]))})
    return rows


def _ends(rows: Rows, fraction: int, rounding: str) -> list[float]:
    last = max(row["epoch"] for row in rows)
    return [row["wrong"] for row in of(rows, fraction=fraction, rounding=rounding, epoch=last)]


def holds(rows: Rows) -> bool:
    """To nearest half of the answers or more are wrong; stochastically less than 4 points more than in float32."""
    (plain,) = _ends(rows, 0, FLOAT)
    tried = [fraction for fraction in JUDGED if of(rows, fraction=fraction)]
    return all(
        _ends(rows, fraction, "to nearest")[0] > 50 and _ends(rows, fraction, "stochastic")[0] < plain + ALIKE
        for fraction in tried
    )


def _best(rows: Rows, fraction: int, rounding: str) -> float:
    """The best epoch's share of wrong answers, mean over the seeds."""
    tried = of(rows, fraction=fraction, rounding=rounding)
    return mean(min(row["wrong"] for row in of(tried, seed=seed)) for seed in {row["seed"] for row in tried})


def says(rows: Rows) -> str:
    last, plain = max(row["epoch"] for row in rows), _ends(rows, 0, FLOAT)
    words = [f"After {last} epochs float32 is wrong for {spread(plain, '.1f')} % of 1,000 digits."]
    for fraction in sorted({row["fraction"] for row in rows} - {0}):
        nearest, random = (_ends(rows, fraction, rounding) for rounding in ("to nearest", "stochastic"))
        words.append(
            f"With {fraction} of 16 bits behind the point, to nearest {spread(nearest, '.1f')} % (at its best epoch "
            f"{_best(rows, fraction, 'to nearest'):.1f} %), stochastically {spread(random, '.1f')} %."
        )
        if mean(random) > mean(plain) + ALIKE:
            largest = fpsim.FixedPoint(WORD, fraction).largest
            words.append(f"There stochastic rounding does not reach float32; no number beyond {largest:.3g} is left.")
    if of(rows, fraction=APART, rounding="gradients to nearest"):
        alone, rest = (_ends(rows, APART, f"gradients {rounding}") for rounding in ("to nearest", "stochastic"))
        words.append(
            f"With {APART} bits, if the gradients of activations alone are rounded to nearest, "
            f"{spread(alone, '.1f')} % are wrong; if they alone are rounded stochastically, {spread(rest, '.1f')} %."
        )
    return " ".join(words)


def draw(rows: Rows) -> Any:
    fractions = sorted({row["fraction"] for row in rows} - {0})
    picture = new_picture(3.2 * len(fractions) + 0.8, 3.4)
    for fraction, axes in zip(
        fractions, picture.subplots(1, len(fractions), sharey=True, squeeze=False)[0], strict=True
    ):
        for i, rounding in enumerate((FLOAT, *ROUNDINGS)):
            one = of(rows, fraction=0 if rounding == FLOAT else fraction, rounding=rounding)
            epochs = sorted({row["epoch"] for row in one})
            values = [mean(row["wrong"] for row in of(one, epoch=epoch)) for epoch in epochs]
            if one:
                axes.plot(epochs, values, color=colour(i), linestyle=DASHES[i], linewidth=1.3, label=rounding)
        axes.axhline(CHANCE, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_title(f"{WORD - fraction} bits before, {fraction} behind the point", fontsize=9)
        axes.set(xlabel="epoch", ylim=(0, 100))
        axes.spines[["top", "right"]].set_visible(False)
    picture.axes[0].set_ylabel("wrong answers in %")
    most = max(picture.axes, key=lambda axes: len(axes.lines))
    picture.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return picture


CLASSIC = Classic(
    claim="A network whose weights, activations, gradients and updates are 16-bit fixed point trains as in float32 if "
    "rounding is stochastic, and hardly or not at all if it is to nearest.",
    limits="The paper's full MNIST and CIFAR-10: these are 4,000 digits for the training and 1,000 for the test, so "
    "that a point is ten digits. Sums within products are float32; the paper's are fixed point, wide enough not to "
    "matter.",
    settings=settings,
    measure=measure,
    holds=holds,
    says=says,
    draw=draw,
)
