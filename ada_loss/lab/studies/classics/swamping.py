"""Swamping: a long sum in 16 bits stops growing, and a sum in chunks goes on, Wang et al. 2018."""

from __future__ import annotations

import math

import torch

import fpsim
from ada_loss.lab.studies.classics.frame import Classic, Setting
from ada_loss.lab.studies.classics.telling import Picture, Row, Rows, Sentences, label, level, lines, panels

FORMAT = fpsim.FloatFormat(6, 9)  # the paper's FP16, (1, 6, 9)
JUDGED = 2**14  # terms
HALF_WIDTH = math.sqrt(3)  # half the width of a uniform distribution with the deviation 1
# From this power of two on, half of the format's spacing exceeds the largest term, so that every term is rounded away.
STALL = 2.0 ** math.ceil(math.log2(1 + HALF_WIDTH) + 1 + FORMAT.mantissa_bits)
ACCUMULATORS = {
    "term by term": fpsim.Accumulator(FORMAT),
    "chunks of 8": fpsim.Accumulator(FORMAT, chunk=8),
    "chunks of 64": fpsim.Accumulator(FORMAT, chunk=64),
    "stochastic": fpsim.Accumulator(FORMAT, rounding="stochastic"),
    "fp32": fpsim.as_accumulator("fp32"),
}


def settings(quick: bool) -> list[Setting]:
    return [{"length": 2**k, "sum": name} for k in range(6, 15 if quick else 19) for name in ACCUMULATORS]


def measure(setting: Setting, seed: int, device: str) -> list[Row]:
    """Return one sum of numbers with the mean 1 and the deviation 1, and the same sum in float64."""
    # The numbers of all lengths come from one stream, so that a shorter sum is the beginning of a longer sum.
    draw = torch.Generator().manual_seed(seed)
    x = 1 + HALF_WIDTH * (2 * torch.rand(setting["length"], 1, generator=draw) - 1).to(device)
    found = fpsim.matmul(torch.ones(1, len(x), device=device), x, ACCUMULATORS[setting["sum"]])
    exact = float(x.double().sum())
    return [{"value": float(found), "exact": exact, "error": float(found) / exact - 1}]


def holds(rows: Rows) -> bool:
    """Return True if, at 2^14 terms, the sum term by term has stalled, and chunks of 64 have an error below 2 %.

    The stalled sum is exactly STALL, which is less than half of the exact sum.
    """
    (single,), (chunked,) = (rows.of(length=JUDGED, sum=name) for name in ("term by term", "chunks of 64"))
    return single["value"] == STALL and single["error"] < -0.5 and abs(chunked["error"]) < 0.02


def says(rows: Rows) -> Sentences:
    ends = rows.averages("length", "value", sum="term by term")
    error, last = (rows.told("sum", "error", "+.1f", 100, length=length) for length in (JUDGED, max(ends)))
    yield f"""{JUDGED:,} numbers of mean 1, added term by term, give {ends[JUDGED]:,.0f}, an error of
        {error["term by term"]} %: from {STALL:,.0f} on, half of the spacing is more than the largest term. The error is
        {error["chunks of 64"]} % in chunks of 64, {error["chunks of 8"]} % in chunks of 8, {error["stochastic"]} % with
        stochastic rounding, and {error["fp32"]} % in float32."""
    if max(ends) > JUDGED:
        yield f"""Chunks move the limit and do not remove it: at {max(ends):,} numbers the error is
            {last["chunks of 8"]} % in chunks of 8, {last["chunks of 64"]} % in chunks of 64, and {last["stochastic"]} %
            with stochastic rounding."""


def draw(rows: Rows) -> Picture:
    picture, (axes,) = panels(1, 7.2, 4.2)
    lines(axes, rows, "sum", "length", "value", marker=".")
    level(axes, STALL)
    axes.loglog(base=2)
    label(axes, "numbers of mean 1 that are added", "their sum, mean over the seeds", legend="best")
    axes.set_title("sums in 6 exponent and 9 mantissa bits", fontsize=9)
    return picture


CLASSIC = Classic(settings, measure, holds, says, draw)
