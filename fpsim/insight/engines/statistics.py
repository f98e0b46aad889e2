"""A model beside a dump of statistics: extremes, means and norms of what modules give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.checks import few
from fpsim.insight.engines.against_dump import KERNELS, Beside
from fpsim.insight.engines.dumped_names import mapped
from fpsim.insight.engines.dumps import Dump, outputs_of
from fpsim.insight.engines.msprobe import STATISTICS
from fpsim.insight.engines.places import MARGIN
from fpsim.insight.engines.reordered import Permuted
from fpsim.insight.engines.sides import Door, Pair
from fpsim.tensors.noise import keep_random_numbers
from fpsim.torch_modes import without_torch_function
from fpsim.undoing import Undo, undone

__all__ = ["compare_with_statistics"]

Found = dict[tuple[str, int, str], dict[str, float]]


def statistics_of(x: Tensor) -> dict[str, float]:
    """Of a tensor as msprobe has them, and the root of the mean square, to which differences are relative."""
    wide = x.detach().float()
    size = max(wide.numel(), 1)
    norm = float(wide.norm())
    return {
        "Max": float(wide.max()),
        "Min": float(wide.min()),
        "Mean": float(wide.mean()),
        "Norm": norm,
        "scale": norm / math.sqrt(size),
    }


def apart(own: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The largest difference of two statistics: of norms relative to the norm, of others to the root mean square."""
    worst = 0.0
    for name in STATISTICS:
        if name in other and own["Norm"] and math.isfinite(other[name]) and math.isfinite(own[name]):
            worst = max(worst, abs(own[name] - other[name]) / (own["Norm"] if name == "Norm" else own["scale"]))
        elif name in other and math.isfinite(own[name]) and not math.isfinite(other[name]):
            return math.inf
    return worst


class _Statistics:
    """A visitor that keeps the statistics of what each module gives."""

    def __init__(self) -> None:
        self.found: Found = {}
        self.shapes: dict[tuple[str, int, str], tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._calls: dict[str, int] = {}

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = door.run(*args, **kwargs)
        call = self._calls.get(door.name, 0)
        self._calls[door.name] = call + 1
        with without_torch_function():
            for path, x in outputs_of(out):
                if x.is_floating_point() and x.numel():
                    self.found[door.name, call, path] = statistics_of(x)
                    self.shapes[door.name, call, path] = tuple(x.shape)
                    self.dtypes.setdefault(door.name, x.dtype)
        return out


def compare_with_statistics(
    model: nn.Module, dump: Dump, batch: Any, names: Mapping[str, str | tuple[str, ...]], seed: int,
    progress: Callable[[], object] | None, is_a: bool,
) -> Beside:  # fmt: skip
    """Compare. The batch is what the engine ran: statistics do not tell their tokens."""
    if batch is None:
        raise ValueError(
            f"{dump.path.name} has statistics alone, which do not tell the tokens. Expected: batch=..., what the "
            f"engine ran."
        )
    return undone(partial(_found, model, dump, batch, names, seed, progress, is_a))


def _found(
    model: nn.Module, dump: Dump, batch: Any, names: Any, seed: int, progress: Any, is_a: bool, undo: Undo
) -> Beside:
    keep_random_numbers(undo)
    pair = Pair(model, nn.Identity(), {}, seed, undo)
    sources, alone = mapped(dump.modules, pair.doors["a"], names, dump.engine)
    visitors = [_Statistics(), _Statistics()]
    for visitor, mode in zip(visitors, (None, Permuted)):
        pair.run(batch, "a", visitor, mode)
        if progress is not None:
            progress()
    own, again = visitors
    result = Beside(dump, is_a, alone={"dump": [name for name in alone if name]})
    result.alone["model"] = [n for n in own.dtypes if n and n not in sources]
    far: dict[str, list[float]] = {}
    for (name, call, path), mine in own.found.items():
        source = sources.get(name)
        if source is None:
            continue
        if source.is_part:
            result.unlike.setdefault(name, f"it is part of {source.module}, and statistics have no parts")
            continue
        entries = {(k.call, k.path): entry for k, entry in dump.of(source.module).items()}
        entry = entries.get((call, path))
        if entry is None or not entry.statistics:
            continue
        if math.prod(entry.shape) != math.prod(own.shapes[name, call, path]):
            result.unlike[name] = f"the dump has it of shape {entry.shape}, not {own.shapes[name, call, path]}"
            continue
        floor = max(MARGIN * apart(mine, again.found[name, call, path]), KERNELS.get(own.dtypes[name], 2.0**-13))
        known = far.setdefault(name, [0.0, 0.0])
        known[0], known[1] = max(known[0], apart(mine, entry.statistics)), max(known[1], floor)
    if not far:
        raise ValueError(
            f"No module of {dump.path.name} ({few(dump.modules, 3)}) has the name and the size of one of the model "
            f"({few([*own.dtypes], 3)}). Expected: the engine's batch, and names={{beginning in the dump: beginning in "
            f"the model}}."
        )
    result.grown = [(name, apart_, floor) for name, (apart_, floor) in far.items()]
    beyond = [row for row in result.grown if row[1] > row[2]]
    if beyond:
        result.first, result.last = beyond[0], beyond[-1]
    result.judged, result.passes = len(far), pair.passes
    return result
