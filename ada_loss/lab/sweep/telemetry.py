"""The telemetry of a cell: how its training went, as arrays in an .npz file."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ada_loss.lab.training.run import Run

__all__ = ["is_whole", "npz", "read_telemetry", "telemetry", "telemetry_digest", "telemetry_path"]


def telemetry(run: Run) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a training.

    Always:
        losses, scales: (steps,), the loss of each step and the loss scale before it.
        skipped: the steps that were skipped because a gradient was not finite.
    With evaluations on the way:
        evaluations.steps, evaluations.METRIC: (evaluations,).
    With a training function of the user's own:
        curves.NAME: (2, numbers), steps and values of what it logged.
    With a recording, whose sites come in the order of the forward pass:
        sites.COLUMN: (sites,), each column of the tallies.
        history.steps: (points,).
        history.elements, .nonzero, .underflow, .overflow: (points, sites), the counts up to those steps.
    With adaptive scaling and a recording:
        layers.steps: (points,); layers.site: (layers,).
        layers.log2_scale: (points, layers), NaN where a layer had no gradient.
    """
    arrays = {"losses": np.array(run.losses), "scales": np.array(run.scales), "skipped": np.array(run.skipped_steps)}
    if run.evaluations:
        arrays["evaluations.steps"] = np.array([step for step, _ in run.evaluations])
        for name in run.metrics:
            arrays[f"evaluations.{name}"] = np.array([metrics[name] for _, metrics in run.evaluations])
    arrays |= {f"curves.{name}": np.array(points, dtype=float).T for name, points in run.curves.items()}
    if run.layer_scales:
        sites = [*dict.fromkeys(site for _, scales in run.layer_scales for site in scales)]
        arrays["layers.steps"] = np.array([step for step, _ in run.layer_scales])
        arrays["layers.site"] = np.array(sites)
        grid = [[scales.get(site, math.nan) for site in sites] for _, scales in run.layer_scales]
        arrays["layers.log2_scale"] = np.array(grid)
    if run.rows:
        arrays |= {f"sites.{name}": np.array([row[name] for row in run.rows]) for name in run.rows[0]}
        arrays["history.steps"] = np.array([step for step, _ in run.history])
        columns = {(row["site"], row["role"], row["rounding"], row["format"]): i for i, row in enumerate(run.rows)}
        for name in ("count", "nonzero", "underflow", "overflow"):
            counts = np.zeros((len(run.history), len(run.rows)), dtype=np.int64)
            for i, (_, rows) in enumerate(run.history):
                for row in rows:
                    counts[i, columns[row["site"], row["role"], row["rounding"], row["format"]]] = row[name]
            arrays[f"history.{'elements' if name == 'count' else name}"] = counts
    return arrays


def npz(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Arrays as the content of a compressed .npz file; the same arrays give the same bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def telemetry_path(out: Path, cell: str) -> Path:
    """The file of a cell, by its id, in the folder of a sweep."""
    return out / "telemetry" / f"{cell}.npz"


def telemetry_digest(content: bytes) -> str:
    """The digest of a file, as the ledger keeps it."""
    return hashlib.sha256(content).hexdigest()


def is_whole(content: bytes, size: int | None, digest: str | None) -> bool:
    """Whether a file is the one of the ledger. digest: None in ledgers of version 1, where only the size is known."""
    return len(content) == size and digest in (None, telemetry_digest(content))


def read_telemetry(out: Path, cell: str, digest: str | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a cell's file. Raises ValueError for a file that is missing or damaged.

    digest: that of the ledger; None where it has none.
    """
    path = telemetry_path(out, cell)
    try:
        content = path.read_bytes()
        if digest not in (None, telemetry_digest(content)):
            raise ValueError("it has not the digest that the ledger has")
        with np.load(io.BytesIO(content)) as arrays:
            return dict(arrays)
    except Exception as error:  # without a digest: an archive with a flipped bit may raise anything
        raise ValueError(
            f"The telemetry {path} is missing or damaged ({error}). Run the sweep again: it repeats that cell."
        ) from None
