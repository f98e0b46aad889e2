"""The telemetry of a cell: arrays in an .npz file."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ada_loss.lab.training.run import Run

__all__ = ["npz", "telemetry"]


def telemetry(run: Run) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a run's file.

    losses, scales: (steps,), the loss of each step and the loss scale before it. skipped: the steps at which a gradient
    was not finite. evaluations.steps, evaluations.NAME: (evaluations,), test metrics on the way. With a recording also,
    for its sites in the order of the forward pass: sites.NAME, (sites,), each column of the tallies; history.steps,
    (points,), and history.NAME, (points, sites): the counts up to those steps of elements, nonzero, underflow and
    overflow. With adaptive scaling then too: layers.steps, (points,), layers.site, (layers,), layers.log2_scale,
    (points, layers), NaN where a layer had no gradient.
    """
    arrays = {"losses": np.array(run.losses), "scales": np.array(run.scales), "skipped": np.array(run.skipped_steps)}
    if run.evaluations:
        arrays["evaluations.steps"] = np.array([step for step, _ in run.evaluations])
        for name in run.metrics:
            arrays[f"evaluations.{name}"] = np.array([metrics[name] for _, metrics in run.evaluations])
    if run.layer_scales:
        sites = [*dict.fromkeys(site for _, scales in run.layer_scales for site in scales)]
        arrays["layers.steps"] = np.array([step for step, _ in run.layer_scales])
        arrays["layers.site"] = np.array(sites)
        grid = [[scales.get(site, math.nan) for site in sites] for _, scales in run.layer_scales]
        arrays["layers.log2_scale"] = np.array(grid)
    if run.rows:
        arrays |= {f"sites.{name}": np.array([row[name] for row in run.rows]) for name in run.rows[0]}
        arrays["history.steps"] = np.array([step for step, _ in run.history])
        places = {(row["site"], row["role"], row["rounding"], row["format"]): i for i, row in enumerate(run.rows)}
        for name in ("count", "nonzero", "underflow", "overflow"):
            counts = np.zeros((len(run.history), len(run.rows)), dtype=np.int64)
            for i, (_, rows) in enumerate(run.history):
                for row in rows:
                    counts[i, places[row["site"], row["role"], row["rounding"], row["format"]]] = row[name]
            arrays[f"history.{'elements' if name == 'count' else name}"] = counts
    return arrays


def npz(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()
