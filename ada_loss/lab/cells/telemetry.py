"""Telemetry of a cell: the course of its training, as arrays in an .npz file, and line by line while it trains."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ada_loss.files import append_to, content_of, opened, write_atomically
from ada_loss.lab.errors import printable
from ada_loss.lab.training.run import Run, is_of_role

__all__ = [
    "Curves",
    "LiveFile",
    "LiveReader",
    "Numbers",
    "arrays_of",
    "curves_of",
    "is_of_curve",
    "is_whole",
    "live_path",
    "npz",
    "read_telemetry",
    "telemetry",
    "telemetry_content",
    "telemetry_digest",
    "telemetry_path",
]

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Curves = dict[str, tuple[Numbers, Numbers]]  # {name: (steps, values)}
NAMES = {"loss": "losses", "scale": "scales"}  # the arrays of every training
# The largest allowed file, packed or unpacked: losses and scales of ten million steps take 160 MB.
MOST_BYTES = 1 << 29
HEADS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
OF_CURVES = {"losses", "scales", "sites.role", "history.steps", "history.underflow", "history.nonzero"}
ROLES = ("error", "weight_grad", "activation", "weight")
COUNTED = {"elements": "count", "nonzero": "nonzero", "underflow": "underflow_count", "overflow": "overflow_count"}


def telemetry(run: Run) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a training.

    Always:
        losses, scales: (steps,), the loss of each step and the loss scale before the step.
        skipped: the steps that were skipped because a gradient was not finite.
    If the training is evaluated in between:
        evaluations.steps, evaluations.METRIC: (evaluations,).
    If a user's training function trains:
        curves.NAME: (2, numbers), the steps and values that the function logged.
    If tallies are recorded, for sites in the order of the forward pass:
        sites.COLUMN: (sites,), each column of the tallies; NaN where a role has no value.
        history.steps: (points,).
        history.elements, .nonzero, .underflow, .overflow: (points, sites), the counts up to those steps.
    If tallies are recorded and scaling is adaptive:
        layers.steps: (points,); layers.site: (layers,).
        layers.log2_scale: (points, layers), NaN where a layer had no gradient.
    If the optimizer stores weights in few bits:
        updates.steps, .lost, .edq: (points,), the recorded steps, counted from 0, the share of lost updates, and the
            ratio of the effective to the intended update.
        parameters.name, .lost, .at_first: (parameters,), values at the end of the training; see
            `fpsim.LostUpdates.table`.
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
    if run.updates:
        arrays["updates.steps"] = np.array([row["step"] for row in run.updates])
        arrays |= {
            f"updates.{name}": _column(row[name] for row in run.updates).astype(float) for name in ("lost", "edq")
        }
    if run.parameters:
        arrays["parameters.name"] = np.array([row["parameter"] for row in run.parameters])
        arrays |= {
            f"parameters.{name}": _column(row[name] for row in run.parameters).astype(float)
            for name in ("lost", "at_first")
        }
    if run.rows:
        # In files "underflow" has always been a count. In the rows it is a share, and "underflow_count" is the count.
        for name in run.rows[0]:
            if not name.endswith("_count"):
                key = f"{name}_count" if f"{name}_count" in run.rows[0] else name
                arrays[f"sites.{name}"] = _column(row[key] for row in run.rows)
        arrays["history.steps"] = np.array([step for step, _ in run.history])
        columns = {(row["site"], row["role"], row["rounding"], row["format"]): i for i, row in enumerate(run.rows)}
        for name, key in COUNTED.items():
            counts = np.zeros((len(run.history), len(run.rows)), dtype=np.int64)
            for i, (_, rows) in enumerate(run.history):
                for row in rows:
                    counts[i, columns[row["site"], row["role"], row["rounding"], row["format"]]] = row[key]
            arrays[f"history.{name}"] = counts
    return arrays


def _column(values: Iterable[Any]) -> np.ndarray[Any, Any]:
    return np.array([math.nan if value is None else value for value in values])


def curves_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Curves:
    """Return the curves of a training, {name: (steps, values)}.

    The curves are: "loss" and "scale" of every step, counted from 0; logged values at their steps (a logged "loss"
    replaces the other one); metrics that were computed during the training; "underflow/ROLE", the share of a role's
    numbers that underflowed up to a step (for "error", the gradients that enter products count too); "updates/lost"
    and "updates/edq". Other arrays are ignored.
    """
    curves: Curves = {}
    for name, key in NAMES.items():
        steps = np.arange(len(arrays[key])) if key in arrays and arrays[key].ndim == 1 else None
        _add(curves, name, steps, arrays.get(key))
    for key, values in arrays.items():
        kind, _, name = key.partition(".")
        if kind == "evaluations" and name != "steps":
            _add(curves, name, arrays.get("evaluations.steps"), values)
    # A second pass, so that a logged curve replaces a computed one of the same name.
    for key, values in arrays.items():
        kind, _, name = key.partition(".")
        if kind == "curves" and values.ndim == 2 and len(values) == 2:
            _add(curves, name, *values)
    for name in ("lost", "edq"):
        _add(curves, f"updates/{name}", arrays.get("updates.steps"), arrays.get(f"updates.{name}"))
    if {"history.steps", "history.underflow", "history.nonzero", "sites.role"} <= arrays.keys():
        roles = [str(name) for name in arrays["sites.role"]]
        for role in ROLES:
            chosen = [i for i, name in enumerate(roles) if is_of_role(name, role)]
            if chosen and arrays["history.underflow"].shape == arrays["history.nonzero"].shape:
                lost, nonzero = (arrays[f"history.{name}"][:, chosen].sum(1) for name in ("underflow", "nonzero"))
                _add(curves, f"underflow/{role}", arrays["history.steps"], lost / np.maximum(nonzero, 1))
    return curves


def _add(curves: Curves, name: str, steps: Any, values: Any) -> None:
    """Add a curve if its arrays are numeric and equally long. It replaces an earlier curve of the same name."""
    if steps is None or values is None or steps.ndim != 1 or steps.shape != values.shape or not len(steps):
        return
    if all(np.issubdtype(part.dtype, np.number) and part.dtype.kind != "c" for part in (steps, values)):
        curves[name] = steps.astype(float), values.astype(float)


def npz(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Return the content of a compressed .npz file; equal arrays give equal bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def telemetry_path(out: Path, cell: str) -> Path:
    """Return the path of a cell's telemetry in the folder of a sweep, by the cell's id."""
    return out / "telemetry" / f"{cell}.npz"


def telemetry_digest(content: bytes) -> str:
    """Return the digest of a file's content, as the ledger stores it."""
    return hashlib.sha256(content).hexdigest()


def is_whole(content: bytes, size: int | None, digest: str | None) -> bool:
    """True if a file has the size and the digest that the ledger stores."""
    return len(content) == size and digest == telemetry_digest(content)


def is_of_curve(array: str) -> bool:
    """True if `curves_of` reads the array of this name. Most of a file is data of sites that it does not read."""
    return array in OF_CURVES or array.partition(".")[0] in ("evaluations", "curves", "updates")


def read_telemetry(
    out: Path, cell: str, digest: str | None = None, is_wanted: Callable[[str], bool] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a cell's file. Raises ValueError for a file that is missing or damaged.

    digest: the digest that the ledger stores; None if it stores none.
    is_wanted: a function that returns whether to read an array, by its name; None to read all arrays.
    """
    path = telemetry_path(out, cell)
    try:
        content = telemetry_content(out, cell)
        if digest not in (None, telemetry_digest(content)):
            raise ValueError("it has not the digest that the ledger has")
        return arrays_of(content, is_wanted)
    # All exceptions are caught: without a digest, an archive with a flipped bit may raise anything.
    except Exception as error:
        raise ValueError(
            f"The telemetry {path} is missing or damaged ({printable(error)}). Run the sweep again: it repeats that "
            f"cell."
        ) from None


def telemetry_content(out: Path, cell: str) -> bytes:
    """Return the bytes of a cell's file. Raises OSError and ValueError as `content_of` does."""
    return content_of(telemetry_path(out, cell), MOST_BYTES)


def arrays_of(content: bytes, is_wanted: Callable[[str], bool] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an .npz file, which may be untrusted: 2 MB can unpack to 2 GB.

    Raises ValueError and other errors for an invalid file, and for one that unpacks to more than `MOST_BYTES`.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    left = MOST_BYTES
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if is_wanted is not None and not is_wanted(name):
                continue
            left -= entry.file_size
            if left < 0:
                raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
            # zipfile unpacks no more than file_size, whatever the archive holds.
            with archive.open(entry) as packed:
                arrays[name] = _array(packed.read())
    return arrays


def _array(content: bytes) -> np.ndarray[Any, Any]:
    """Return the array of an .npy file. Raises ValueError if the number of bytes does not match the header."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in HEADS:
        raise ValueError(f"it has an array in version {version}")
    shape, is_fortran, dtype = HEADS[version](file)
    # NumPy would allocate an array of any shape before reading it, and loop forever if the elements have size 0.
    if dtype.hasobject or math.prod(shape) * max(dtype.itemsize, 1) != len(content) - file.tell():
        raise ValueError(f"it has an array of {shape} elements in {len(content)} bytes")
    values = np.frombuffer(content, dtype, offset=file.tell()) if math.prod(shape) else np.empty(0, dtype)
    return values.reshape(shape, order="F" if is_fortran else "C").copy("K")


MOST_AT_ONCE = 1 << 25  # bytes read at once from the lines of a training
EVERY = 1.0  # the least number of seconds between two writes
# After a write a worker waits this many times as long as the write took, so that writes take at most 2 % of its time.
LEISURE = 50


def live_path(checkpoint: Path) -> Path:
    """Return the path of the file next to a cell's checkpoint that holds the cell's curves so far."""
    return checkpoint.with_suffix(".live")


class LiveFile:
    """Progress callback that appends the new values of the curves to a file from time to time.

    If the file cannot be written, nothing is appended: the driver gets the complete curves at the end.

    path: the path of the file, which is emptied first.
    run: a function that returns the current state of the training.
    """

    def __init__(self, path: Path, run: Callable[[], Run]) -> None:
        self.path, self._run, self._told = path, run, dict[str, int]()
        self._next = time.monotonic() + EVERY
        with suppress(OSError):
            write_atomically(path, b"", is_kept=False, is_own=True)

    def __call__(self, steps: int) -> None:
        began = time.monotonic()
        if began < self._next:
            return
        self.write()
        ended = time.monotonic()
        self._next = ended + max(EVERY, LEISURE * (ended - began))

    def write(self) -> None:
        """Append the new values."""
        lines = []
        for name, (steps, values) in curves_of(telemetry(self._run())).items():
            told = self._told.get(name, 0)
            if len(steps) > told:
                lines.append(json.dumps([name, told, steps[told:].tolist(), values[told:].tolist()]) + "\n")
                self._told[name] = len(steps)
        with suppress(OSError, ValueError):
            append_to(self.path, "".join(lines).encode())


class LiveReader:
    """Read the lines that a worker appends to its file. A restarted worker writes the same lines again from the start.

    path: the path of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._at, self.told = path, 0, dict[str, int]()

    def read(self) -> Curves:
        """Return the new values since the last call, {name: (steps, values)}."""
        try:
            with opened(self.path) as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                file.seek(self._at)
                content = file.read(MOST_AT_ONCE)
        # The file does not exist yet, or no longer exists, or no worker wrote it.
        except (OSError, ValueError):
            return {}
        whole = content[: content.rfind(b"\n") + 1]
        # No worker writes a line as long as the buffer. A full buffer without a newline is therefore skipped; otherwise
        # the reader would never advance.
        self._at += len(whole) or len(content) // MOST_AT_ONCE * MOST_AT_ONCE
        gained: Curves = {}
        for line in whole.splitlines():
            try:
                name, first, steps, values = json.loads(line)
                new = self._new(name, first, np.array(steps, float), np.array(values, float))
            # A line is cut off if the worker was restarted while writing it.
            except (ValueError, TypeError, OverflowError, RecursionError):
                continue
            if len(new[0]):
                before = gained.get(name, (np.empty(0), np.empty(0)))
                gained[name] = np.concatenate([before[0], new[0]]), np.concatenate([before[1], new[1]])
        return gained

    def rest(self, curves: Curves) -> Curves:
        """Return the part of the complete curves that has not been read yet."""
        unread = {name: self._new(name, 0, *points) for name, points in curves.items()}
        return {name: points for name, points in unread.items() if len(points[0])}

    def _new(self, name: str, first: int, steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
        told = self.told.get(name, 0)
        skip = max(told - first, 0)
        # A line before this one is lost. `rest`, which gets the complete curves, will return all values after the gap.
        if first > told:
            return steps[:0], values[:0]
        self.told[name] = max(told, first + len(steps))
        return steps[skip:], values[skip:]
