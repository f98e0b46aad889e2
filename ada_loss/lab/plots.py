"""The pictures: matplotlib figures for a paper, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import fpsim

__all__ = ["figure_bytes", "plot_comparison", "plot_spacing", "plot_underflow", "plot_values"]

# Okabe and Ito 2008
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


def figure_bytes(figure: Figure, kind: str = "png") -> bytes:
    """A figure as the content of a file: "png", "svg" or "pdf"."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    return content.getvalue()


def _layers(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Underflow of the error role by module, in the order of the forward pass."""
    nonzero: dict[str, int] = {}
    underflow: dict[str, int] = {}
    for row in rows:
        if row["role"] == "activation":
            nonzero.setdefault(row["site"].split(":")[0] or "(model)", 0)
        if row["role"] == "error":
            layer = row["site"].split(":")[0] or "(model)"
            nonzero[layer] = nonzero.get(layer, 0) + row["nonzero"]
            underflow[layer] = underflow.get(layer, 0) + row["underflow"]
    return {layer: underflow[layer] / n for layer, n in nonzero.items() if n and layer in underflow}


def plot_comparison(results: Sequence[dict[str, Any]]) -> Figure:
    """Test accuracy by format and rounding, and the underflow of activation gradients by layer."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    formats = list(dict.fromkeys(row["format"] for row in results))
    roundings = list(dict.fromkeys(row["rounding"] for row in results))
    width = 0.8 / len(roundings)
    for r, rounding in enumerate(roundings):
        chosen = [row for row in results if row["rounding"] == rounding]
        positions = [formats.index(row["format"]) + (r - (len(roundings) - 1) / 2) * width for row in chosen]
        heights = [100 * row["accuracy"] for row in chosen]
        words = rounding.replace("_", " ")
        bars = left.bar(
            positions, heights, width * 0.92, color=COLOURS[r], label=words, hatch="/" * 3 * (r % 2), edgecolor="white"
        )
        left.bar_label(bars, [f"{h:.1f}" for h in heights], fontsize=7, padding=1)
    left.set_xticks(range(len(formats)), formats)
    left.set_ylim(0, 105)
    left.set_ylabel("test accuracy in %")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False, fontsize=8)
    nearest = [row for row in results if row["rounding"] == roundings[0] and _layers(row["sites"])]
    layers = list(dict.fromkeys(layer for row in nearest for layer in _layers(row["sites"])))
    for row, colour, marker in zip(nearest, (*COLOURS[1:], *COLOURS), "osD^vP*X" * 3, strict=False):
        shares = _layers(row["sites"])
        y = [100 * shares.get(layer, np.nan) for layer in layers]
        right.plot(range(len(layers)), y, marker=marker, markersize=4, color=colour, label=row["format"], linewidth=1.4)
    right.set_xticks(range(len(layers)), layers, rotation=35, ha="right", fontsize=8)
    right.set_ylabel("activation gradients lost to underflow in %")
    right.set_xlabel("layer, from input to output")
    right.set_yscale("symlog", linthresh=0.01)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    title = f"{roundings[0].replace('_', ' ')}; no marker where no gradient arrived"
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=7, frameon=False, fontsize=8, title=title)
    right.get_legend().get_title().set_fontsize(8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
    return figure


def plot_values(formats: Sequence[str], largest: float = 8.0) -> Figure:
    """Every value of small formats between -largest and largest, on a line each."""
    figure = Figure(figsize=(9, 0.55 * len(formats) + 0.9), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(formats):
        values = [v for v in fpsim.as_format(name).values() if abs(v) <= largest]
        axes.plot(values, [-i] * len(values), "|", markersize=16, color=COLOURS[i % len(COLOURS)])
    axes.set_yticks([-i for i in range(len(formats))], formats)
    axes.set_ylim(0.6 - len(formats), 0.6)
    axes.set_xlabel("value")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def plot_spacing(formats: Sequence[str]) -> Figure:
    """The relative spacing of values over the range of each format: the staircase of precision, and where it ends."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(formats):
        fmt = fpsim.as_format(name)
        low = int(np.floor(np.log2(fmt.smallest)))
        exponents = np.arange(low, int(np.floor(np.log2(fmt.largest))) + 1)
        ulp = np.maximum(exponents, fmt.min_exponent) - fmt.mantissa_bits
        axes.step(exponents, ulp - exponents, where="post", color=COLOURS[i % len(COLOURS)], label=name, linewidth=1.6)
        axes.plot(exponents[[0, -1]], (ulp - exponents)[[0, -1]], "o", markersize=4, color=COLOURS[i % len(COLOURS)])
    axes.set_xlabel("log2 of the magnitude")
    axes.set_ylabel("log2 of spacing / magnitude")
    axes.legend(ncols=2, fontsize=8)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_underflow(rows: Sequence[dict[str, Any]]) -> Figure:
    """Activation gradients lost to underflow by layer, of one recording."""
    shares = _layers(rows)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(list(shares), [100 * v for v in shares.values()], color=COLOURS[0])
    axes.bar_label(bars, [f"{100 * v:.2g}" for v in shares.values()], fontsize=8)
    axes.tick_params(axis="x", rotation=35)
    axes.set_ylabel("gradients lost in %")
    axes.set_xlabel("layer, from input to output")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
