"""What bfloat16 weights lose of their updates, and two repairs, Zamirai et al. 2020."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import torch

import fpsim
from ada_loss.lab.results.figures import DASHES, colour
from ada_loss.lab.studies.classics.frame import Classic, Rows, data_of, of, spread
from ada_loss.lab.tasks.chars import bits_per_character, chars
from fpsim.insight.pictures import new_picture

UPDATES = {
    "float32": fpsim.Update(),
    "nearest": fpsim.Update(weight="bf16"),
    "stochastic": fpsim.Update(weight="bf16", rounding="stochastic"),
    "Kahan": fpsim.Update(weight="bf16", compensation="kahan"),
}
WARM, LAST = 20, 0.1  # steps of warm-up; the last rate over the largest
SMALL = 3e-4  # the rate that is judged


def settings(quick: bool) -> list[dict[str, Any]]:
    rates, steps = ((SMALL,), 60) if quick else ((SMALL, 3e-3), 200)
    return [{"rate": rate, "steps": steps, "update": name} for rate in rates for name in UPDATES]


def measure(setting: dict[str, Any], seed: int, device: str) -> Rows:
    """One training of the small GPT with AdamW; only what the optimizer stores is rounded."""
    task, steps = chars(seed), setting["steps"]
    model = task.model.to(device)
    (inputs, targets), test = data_of(task, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting["rate"], weight_decay=0.01)
    quantized = fpsim.quantize_optimizer(optimizer, UPDATES[setting["update"]], model, seed=seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARM, 1) * (LAST + (1 - LAST) * (1 + math.cos(math.pi * i / steps)) / 2)
    )
    losses = []
    with fpsim.lost_updates(quantized, every=10) as lost:
        for _ in range(steps):
            batch = torch.randint(len(inputs), (32,))
            optimizer.zero_grad()
            loss = task.loss(model(inputs[batch]), targets[batch])
            losses.append(loss.item() / math.log(2))
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        bits = bits_per_character(model(test[0]), test[1])
    named = [(name, p) for name, p in model.named_parameters() if "norm" in name and name.endswith("weight")]
    still = torch.cat([p.detach().flatten() == 1 for _, p in named]).float().mean()
    rows: Rows = [{"what": "loss", "step": i, "value": loss} for i, loss in enumerate(losses)]
    rows += [{"what": "lost", "step": r["step"], "value": r["lost"]} for r in lost.steps() if r["lost"] is not None]
    end = {"bits": bits, "all lost": lost.share or 0.0, "norm weights still 1": float(still)}
    return rows + [{"what": what, "step": steps, "value": value} for what, value in end.items()]


def _by_update(rows: Rows, what: str, **wanted: Any) -> dict[str, list[float]]:
    return {name: [row["value"] for row in of(rows, update=name, what=what, **wanted)] for name in UPDATES}


def holds(rows: Rows) -> bool:
    """At the small rate nearest is 0.05 bits or more behind float32, the repairs less than a third of that."""
    ends = {name: values[0] for name, values in _by_update(rows, "bits", rate=SMALL).items()}
    behind = {name: bits - ends["float32"] for name, bits in ends.items()}
    return behind["nearest"] > 0.05 and max(behind["stochastic"], behind["Kahan"]) < behind["nearest"] / 3


def says(rows: Rows) -> str:
    words = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        ends = _by_update(rows, "bits", rate=rate)
        lost, still = (_by_update(rows, what, rate=rate) for what in ("all lost", "norm weights still 1"))
        behind = {
            name: spread([b - a for a, b in zip(ends["float32"], bits, strict=True)], "+.3f")
            for name, bits in ends.items()
        }
        words.append(
            f"At the rate {rate:g}, after {rows[-1]['steps']} steps, float32 has {spread(ends['float32'], '.3f')} bits "
            f"per character. bf16 to nearest is {behind['nearest']} bits from that, stochastic rounding "
            f"{behind['stochastic']}, Kahan's sum {behind['Kahan']}. To nearest {100 * mean(lost['nearest']):.0f} % of "
            f"the updates change nothing and {100 * mean(still['nearest']):.0f} % of the norms' weights are still 1; "
            f"with stochastic rounding {100 * mean(still['stochastic']):.0f} % are."
        )
    return " ".join(words)


def draw(rows: Rows) -> Any:
    rates = [*dict.fromkeys(row["rate"] for row in rows)]
    picture = new_picture(4.2 * (len(rates) + 1), 3.4)
    *panels, lost = picture.subplots(1, len(rates) + 1)
    for i, name in enumerate(UPDATES):
        look: dict[str, Any] = {"color": colour(i), "linestyle": DASHES[i], "linewidth": 1.3, "label": name}
        for rate, axes in zip(rates, panels, strict=True):
            steps, values = _curve(of(rows, update=name, rate=rate, what="loss"))
            axes.plot(steps, [mean(values[max(j - 9, 0) : j + 1]) for j in range(len(values))], **look)
            axes.set(xlabel="step", ylabel="loss in bits, mean of 10 steps", title=f"AdamW at {rate:g}")
        lost.plot(*_curve(of(rows, update=name, rate=SMALL, what="lost"), 100), **look)
    lost.set(xlabel="step", ylabel="updates lost in %", ylim=(-2, 102), title=f"updates that change nothing, {SMALL:g}")
    for axes in (*panels, lost):
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=8, frameon=False)
    return picture


def _curve(rows: Rows, factor: float = 1) -> tuple[list[int], list[float]]:
    """Steps, and the mean over the seeds at each."""
    by_step: dict[int, list[float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(factor * row["value"])
    return [*by_step], [mean(values) for values in by_step.values()]


CLASSIC = Classic(
    claim="What makes training with bfloat16 weights worse than float32 is that updates are rounded to nearest, which "
    "turns small ones into nothing. Stochastic rounding of the update, or Kahan's sum, closes the gap.",
    limits="Long trainings and large models: this is a GPT of 0.1 million weights in its first steps. Activations and "
    "gradients stay float32, so that only the update is at work; the paper computes in bfloat16 as well.",
    settings=settings,
    measure=measure,
    holds=holds,
    says=says,
    draw=draw,
)
