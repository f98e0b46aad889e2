"""Swamping: a long sum in 16 bits stops growing, and one of chunks goes on, Wang et al. 2018."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import torch

import fpsim
from ada_loss.lab.results.figures import DASHES, colour
from ada_loss.lab.studies.classics.frame import Classic, Rows, of, spread
from fpsim.insight.pictures import new_picture

FORMAT = fpsim.FloatFormat(6, 9)  # the paper's FP16, (1, 6, 9)
JUDGED = 2**14  # terms
HALF_WIDTH = math.sqrt(3)  # of a uniform distribution with the deviation 1
ACCUMULATORS = {
    "term by term": fpsim.Accumulator(FORMAT),
    "chunks of 8": fpsim.Accumulator(FORMAT, chunk=8),
    "chunks of 64": fpsim.Accumulator(FORMAT, chunk=64),
    "stochastic": fpsim.Accumulator(FORMAT, rounding="stochastic"),
    "fp32": fpsim.as_accumulator("fp32"),
}


def settings(quick: bool) -> list[dict[str, Any]]:
    return [{"length": 2**k, "sum": name} for k in range(6, 15 if quick else 19) for name in ACCUMULATORS]


def measure(setting: dict[str, Any], seed: int, device: str) -> Rows:
    """One sum of numbers with the mean 1 and the deviation 1, beside that in float64."""
    draw = torch.Generator().manual_seed(seed)  # of two lengths the shorter is the beginning of the longer
    x = 1 + HALF_WIDTH * (2 * torch.rand(setting["length"], 1, generator=draw) - 1).to(device)
    found = fpsim.matmul(torch.ones(1, len(x), device=device), x, ACCUMULATORS[setting["sum"]])
    exact = float(x.double().sum())
    return [{"value": float(found), "exact": exact, "error": float(found) / exact - 1}]


def stall() -> float:
    """The power of two from which on half of the spacing is more than the largest number, so that nothing is added."""
    return 2.0 ** math.ceil(math.log2(1 + HALF_WIDTH) + 1 + FORMAT.mantissa_bits)


def holds(rows: Rows) -> bool:
    """At 2^14 terms the sum stands where the format says, less than half; chunks of 64 are right to 2 %."""
    (single,), (chunked,) = (of(rows, length=JUDGED, sum=name) for name in ("term by term", "chunks of 64"))
    return single["value"] == stall() and single["error"] < -0.5 and abs(chunked["error"]) < 0.02


def _errors(rows: Rows, length: int) -> dict[str, str]:
    return {
        name: f"{spread([100 * row['error'] for row in of(rows, sum=name, length=length)], '+.1f')} %"
        for name in ACCUMULATORS
    }


def says(rows: Rows) -> str:
    end = mean(row["value"] for row in of(rows, sum="term by term", length=JUDGED))
    errors, longest = _errors(rows, JUDGED), max(row["length"] for row in rows)
    words = (
        f"{JUDGED:,} numbers of mean 1, added term by term, give {end:,.0f}, an error of {errors['term by term']}: "
        f"from {stall():,.0f} on, half of the spacing is more than the largest term. In chunks of 64 the error is "
        f"{errors['chunks of 64']}, in chunks of 8 {errors['chunks of 8']}, of stochastic rounding "
        f"{errors['stochastic']}, of float32 {errors['fp32']}."
    )
    if longest > JUDGED:
        errors = _errors(rows, longest)
        words += (
            f" Chunks move the limit and do not remove it: at {longest:,} numbers the error of chunks of 8 is "
            f"{errors['chunks of 8']}, of 64 {errors['chunks of 64']}, of stochastic rounding {errors['stochastic']}."
        )
    return words


def draw(rows: Rows) -> Any:
    picture = new_picture(7.2, 4.2)
    axes = picture.subplots()
    for i, name in enumerate(ACCUMULATORS):
        lengths = sorted({row["length"] for row in rows})
        values = [mean(row["value"] for row in of(rows, sum=name, length=length)) for length in lengths]
        axes.plot(lengths, values, linestyle=DASHES[i], color=colour(i), label=name, marker=".", linewidth=1.3)
    axes.axhline(stall(), color="0.5", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="numbers of mean 1 that are added", ylabel="their sum, mean over the seeds")
    axes.set_title("sums in 6 exponent and 9 mantissa bits", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return picture


CLASSIC = Classic(
    claim="In 16 bits (1 sign, 6 exponent, 9 mantissa) a long sum swamps: once it is large enough, what is added is "
    "rounded away. Adding up chunks of 64 first, or rounding stochastically, repairs it.",
    limits="A training. Whether its sums swamp depends on how long they are and how their signs mix; here numbers of "
    "mean 1 are added, as in the paper's own figure, and nothing is trained.",
    settings=settings,
    measure=measure,
    holds=holds,
    says=says,
    draw=draw,
)
