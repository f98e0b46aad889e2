"""Updates that bfloat16 weights lose, and two repairs, Zamirai et al. 2020."""

from __future__ import annotations

import math

import torch

import fpsim
from ada_loss.lab.studies.classics.frame import ByHand, Classic, Setting
from ada_loss.lab.studies.classics.telling import Picture, Row, Rows, Sentences, label, lines, panels, spread
from ada_loss.lab.tasks import chars

UPDATES = {
    "float32": fpsim.Update(),
    "nearest": fpsim.Update(weight="bf16"),
    "stochastic": fpsim.Update(weight="bf16", rounding="stochastic"),
    "Kahan": fpsim.Update(weight="bf16", compensation="kahan"),
}
SMALL = 3e-4  # the rate that is judged
WARM, LAST = 20, 0.1  # steps of warm-up; the last rate over the largest


def settings(quick: bool) -> list[Setting]:
    rates, steps = ((SMALL,), 60) if quick else ((SMALL, 3e-3), 200)
    return [{"rate": rate, "steps": steps, "update": name} for rate in rates for name in UPDATES]


def measure(setting: Setting, seed: int, device: str) -> list[Row]:
    """Return the rows of one training of the small GPT with AdamW. Only the stored weights are rounded."""
    fit, steps, rows = ByHand(chars(seed), device), setting["steps"], list[Row]()
    optimizer = torch.optim.AdamW(fit.model.parameters(), lr=setting["rate"], weight_decay=0.01)
    quantized = fpsim.quantize_optimizer(optimizer, UPDATES[setting["update"]], fit.model, seed=seed)
    # The rate has a warm-up, and then follows half a cosine down to a tenth of its peak.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARM, 1) * (LAST + (1 - LAST) * (1 + math.cos(math.pi * i / steps)) / 2)
    )
    with fpsim.lost_updates(quantized, every=10) as lost:
        for i in range(steps):
            loss = fit.step(optimizer, torch.randint(fit.size, (32,)))
            rows.append({"what": "loss", "step": i, "value": loss / math.log(2)})
            schedule.step()
    rows += [{"what": "lost", "step": r["step"], "value": r["lost"]} for r in lost.steps() if r["lost"] is not None]
    norms = [p.detach() for name, p in fit.model.named_parameters() if "norm" in name and name.endswith("weight")]
    still = float((torch.cat(norms) == 1).float().mean())
    end = {"bits": fit.metric(), "all lost": lost.share or 0.0, "norm weights still 1": still}
    return rows + [{"what": what, "step": steps, "value": value} for what, value in end.items()]


def holds(rows: Rows) -> bool:
    """Return True if, at the small rate, rounding to nearest is more than 0.05 bits behind float32.

    Each of the two repairs must be less than a third of that behind float32.
    """
    behind = rows.against("update", "value", "float32", what="bits", rate=SMALL)
    (nearest,), *repairs = (behind[name] for name in ("nearest", "stochastic", "Kahan"))
    return nearest > 0.05 and all(bits < nearest / 3 for (bits,) in repairs)


def says(rows: Rows) -> Sentences:
    for rate in rows.distinct("rate"):
        plain = rows.told("update", "value", ".3f", what="bits", rate=rate)["float32"]
        behind = rows.against("update", "value", "float32", what="bits", rate=rate)
        nearest, stochastic, kahan = (spread(behind[name], "+.3f") for name in ("nearest", "stochastic", "Kahan"))
        lost = rows.averages("update", "value", 100, what="all lost", rate=rate)
        still = rows.averages("update", "value", 100, what="norm weights still 1", rate=rate)
        yield f"""At the rate {rate:g}, after {rows[-1]["steps"]} steps, float32 has {plain} bits per character. bf16 to
            nearest is {nearest} bits from that, stochastic rounding {stochastic}, Kahan's sum {kahan}. With
            rounding to nearest, {lost["nearest"]:.0f} % of the updates change nothing, and {still["nearest"]:.0f} % of
            the norms' weights are still 1; with stochastic rounding {still["stochastic"]:.0f} % of them are."""


def draw(rows: Rows) -> Picture:
    rates = rows.distinct("rate")
    picture, (*losses, lost) = panels(len(rates) + 1, 4.2 * (len(rates) + 1), 3.4)
    for rate, axes, legend in zip(rates, losses, ("best", None), strict=False):
        lines(axes, rows.of(rate=rate, what="loss"), "update", "step", "value", last=10)
        label(axes, "step", "loss in bits, mean of 10 steps", f"AdamW at {rate:g}", legend)
    # The first line has the second colour, as in the panels of the loss: float32 loses no updates and has no line.
    lines(lost, rows.of(rate=SMALL, what="lost"), "update", "step", "value", factor=100, first=1)
    label(lost, "step", "updates lost in %", f"updates that change nothing, {SMALL:g}", ylim=(-2, 102))
    return picture


CLASSIC = Classic(settings, measure, holds, says, draw)
