"""Cells of a sweep. A cell is one training; its id is the hash of its configuration."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ada_loss.lab.cells.cell_formats import (
    BASELINE,
    canonical_format,
    has_own_rounding,
    label,
    needs_no_scaling,
    policy_of,
    rollout_of,
    usual_rounding,
)
from ada_loss.lab.cells.cell_updates import require_update, split, with_updates
from ada_loss.lab.cells.identity import MakeTask, TrainFunction, is_own, own_training, task_of
from ada_loss.lab.cells.names import require_different, short_name, unnamed
from ada_loss.lab.tasks import find_task, is_of_library
from ada_loss.lab.terminal import say
from ada_loss.lab.training.format_schedule import as_schedule
from ada_loss.lab.training.methods import require_method, require_native_method
from ada_loss.lab.training.native import is_native, refused_with_native, require_native
from ada_loss.lab.training.options import TrainOptions, hint, is_allowed, possible
from fpsim.checks import SHOWN, is_number, is_whole, refuse, shown

__all__ = [
    "AXES",
    "OPTIONS",
    "Cell",
    "digest",
    "is_configuration",
    "is_intact",
    "plan",
    "plan_all",
    "stored_cell",
]

# The largest number of cells in a grid. Each cell takes a kilobyte of memory.
MOST_CELLS = 1_000_000
# Planning at least this many cells takes a second or more, and is therefore announced.
MANY_CELLS = 50_000
AXES = ("task", "format", "rounding", "scaling", "seed")
# Fields of `TrainOptions` that are not options of a cell: scaling and seed are axes, and a cell's identity does not
# depend on the device.
SET_BY_THE_SWEEP = ("scaling", "seed", "device")
OPTIONS = {name: default for name, default in asdict(TrainOptions()).items() if name not in SET_BY_THE_SWEEP}


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the hash of a value's JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """One training of a sweep.

    config: the complete configuration in canonical form: "task", "format", "rounding", "scaling", "seed" and "options",
        the options of `train`. Equal trainings have equal configurations, even if they were written differently.
    name: the name of the format in the sweep; it is not part of the configuration.

    >>> a, b = plan("digits", ["fp16"], [1024]), plan("digits", ["half"], [2.0**10], options={"epochs": 12})
    >>> a[0].id == b[0].id
    True
    """

    config: dict[str, Any]
    name: str = field(default="", compare=False)

    @cached_property
    def id(self) -> str:
        """Return 16 hexadecimal digits of the hash of the configuration."""
        return digest(self.config)

    def __str__(self) -> str:
        name = self.name or short_name(self.config["format"])
        words = (name, self.config["rounding"], label(self.config["scaling"]))
        return f"{' '.join(words)} seed {self.config['seed']}"


def plan(
    task: str | MakeTask | None,
    formats: Sequence[Any],
    scaling: Sequence[str | float],
    *,
    roundings: Sequence[str] | None = None,
    seeds: int | Sequence[int] = 1,
    options: Mapping[str, Any] | None = None,
    train: str | TrainFunction | None = None,
    updates: Sequence[Any] | None = None,
) -> list[Cell]:
    """Create a cell for every combination, formats first. Invalid values and combinations are rejected here.

    float32, the baseline, is trained once for each seed, because it has nothing to round or scale. A recipe has its own
    roundings. If a recipe also scales each gradient that enters a product, loss scaling has no effect, and only the
    cell without scaling remains. Therefore only the recipes of fp16 and bf16 are combined with scaling methods.

    task: a name, "module:function", or a function from a seed to a Task.
    formats: names, recipes ("recipe:nvfp4"), or mappings with the fields of `fpsim.Policy`. The field "products" is
        itself a mapping: either from "x", "w" and "dy" to the formats of operands, or with the fields of
        `fpsim.Products`. The key "name" names a format: {"name": "mine", "format": "mxfp4"}. {"schedule": {start:
        format}} has several formats one after the other; the first start is 0, and the others are either fractions of
        all steps, 0.8, or steps, 500. Trainings with the same first formats share one training until their formats
        differ. {"native": "fp16"} does not emulate: the model trains in real float16, under torch.autocast.
    scaling: the scaling methods; see `make_scaling`.
    roundings: names of rounding rules, each for all roles; "stochastic_gradients" rounds only gradients stochastically.
        None is nearest-even, or "stochastic_gradients" if adaptive or current scaling fits gradients to a format of at
        most 6 bits.
    seeds: the number of seeds, or a list of seeds.
    options: the options of `TrainOptions`, without scaling, seed and device.
    train: a training function of the user instead of a task; its options are any mapping of numbers and words.
    updates: how the optimizer stores weights and states: names of `fpsim.UPDATES`, or mappings with the fields of
        `fpsim.Update`, which may have a "name" like a format. "float32" leaves the optimizer unchanged; None does this
        for all cells. The format and the update together are the cell's format: {"format": "fp32", "update":
        "bf16_sr"}.
    Raises ValueError for an unknown task, format, method, rounding or option, for an empty grid, and for combinations
    that are the same training; TypeError for an axis that is not a list, and for seeds that are not integers.

    >>> [str(cell) for cell in plan("digits", ["fp32", "fp16"], ["none", "torch"])]
    ['fp32 nearest_even none seed 0', 'fp16 nearest_even none seed 0', 'fp16 nearest_even torch seed 0']
    """
    seeds = _seeds(seeds)
    given: Sequence[str | None] = (None,) if roundings is None else roundings
    grid = {"formats": formats, "scaling": scaling, "roundings": given, "seeds": seeds}
    for name, values in grid.items():
        if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
            raise TypeError(f"{name} is {shown(values)}. Expected: a list. Write [{shown(values)}].")
        if not values:
            raise ValueError(f"{name} is empty ({shown(values)}), so there is no cell to run. Give at least one.")
    for rounding in () if roundings is None else roundings:
        if not isinstance(rounding, str):
            raise TypeError(
                f"The rounding {shown(rounding)} is not a name. Expected: a list of names, each for all roles."
            )
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"task_options is {shown(options)}. Expected: a mapping, {{'epochs': 3}} for instance.")
    task_name, full = _task_and_options(task, train, options or {})
    entries = [unnamed(entry) for entry in with_updates(formats, updates)]
    canonical = [canonical_format(fmt) for fmt, _ in entries]
    names = {label(fmt): name for fmt, (_, name) in zip(canonical, entries, strict=True) if name}
    require_different(names)
    for fmt in canonical:
        _require_rollouts(fmt, task, train)
        for named in given:
            policy_of(fmt, named or "nearest_even")
        if train is None:
            require_update(fmt, full)
            if full["steps"]:
                # This call only checks the schedule: it raises an error if two starts round to the same step, so that
                # a format has no steps.
                as_schedule(split(fmt)[0]).steps(full["steps"])
    methods = [_method(method) for method in scaling]
    if any(map(is_native, canonical)):
        _require_native(methods, full, train)
    # This check comes before any cell is created, because a grid can have more cells than fit into memory.
    count = math.prod(map(len, (canonical, given, methods, seeds)))
    if count > MOST_CELLS:
        raise ValueError(f"The grid has more than {MOST_CELLS:,} cells. Give fewer formats, scaling methods or seeds.")
    if count >= MANY_CELLS:
        say(f"Planning {count:,} cells.")
    cells = []
    for fmt, named, method, seed in itertools.product(canonical, given, methods, seeds):
        # If an axis changes nothing for a format, all values of the axis would lead to equal trainings. The format then
        # has only one cell, with the first value.
        if has_own_rounding(fmt) and named != given[0]:
            continue
        if needs_no_scaling(fmt):
            if method != methods[0] or (split(fmt)[0] == BASELINE and named != given[0]):
                continue
            method = "none"
        rounding = usual_rounding(fmt, method) if named is None else named
        words = {"task": task_name, "format": fmt, "rounding": rounding, "scaling": method, "seed": seed}
        cells.append(Cell({**words, "options": full}, names.get(label(fmt), "")))
    _require_different(cells)
    return cells


def plan_all(grid: Mapping[str, Any], also: Sequence[Mapping[str, Any]] = (), baseline: bool = False) -> list[Cell]:
    """Create the cells of a grid and of further grids, each of which is given by its differences from the first grid.

    grid: the arguments of `plan`, with "task_options" for its options.
    also: mappings with the same keys. A mapping without task_options inherits the first grid's task_options, unless it
        has another task.
    baseline: whether each grid gets float32 cells too, with its task, options and seeds. Cells that a grid has already
        are not added again.
    Raises the errors of `plan`; TypeError if `also` is not a list of mappings, and if one of several tasks is a
    function; ValueError for an unknown key, and if two grids share a cell.

    >>> grid = {"task": "digits", "formats": ["fp32"], "scaling": ["none"], "task_options": None}
    >>> [str(cell) for cell in plan_all(grid, [{"formats": ["e5m2"], "scaling": ["torch"]}])]
    ['fp32 nearest_even none seed 0', 'e5m2 nearest_even torch seed 0']
    """
    if (
        isinstance(also, str | Mapping)
        or not isinstance(also, Sequence)
        or not all(isinstance(g, Mapping) for g in also)
    ):
        raise TypeError(f"also is {shown(also)}. Expected: a list of mappings, [{{'formats': ['fp16']}}] for instance.")
    # `train` is not among the names, because one function trains the cells of all grids.
    known_names = [name for name in grid if name != "train"]
    grids = [dict(grid)]
    for changes in also:
        for name in changes:
            if name not in known_names:
                raise ValueError(refuse(f"Unknown key also.{str(name)[:SHOWN]}", known_names, word=name))
        if "task" in changes and not (isinstance(changes["task"], str) and isinstance(grid["task"], str)):
            raise TypeError("also was given with a task that is not a name. Give both as 'module:function'.")
        other_task = changes.get("task", grid["task"]) != grid["task"]
        grids.append({**grid, **({"task_options": None} if other_task else {}), **changes})
    # The flag may come from a file: YAML 1.2 reads `no` as a string, which would count as true.
    if not isinstance(baseline, bool):
        raise ValueError(f"baseline={shown(baseline)} is invalid. Expected: true or false.")
    asked = [_planned(one) for one in grids]
    planned = [cell for cells in asked for cell in cells]
    _require_different(planned)
    require_different({label(cell.config["format"]): cell.name for cell in planned if cell.name})
    # A float32 cell that a grid already has is not added again.
    known = {cell.id for cells in asked for cell in cells}
    all_cells: list[Cell] = []
    for one, cells in zip(grids, asked, strict=True):
        added = (
            [c for c in _planned({**one, "formats": [BASELINE], "updates": None}) if c.id not in known]
            if baseline
            else []
        )
        known |= {cell.id for cell in added}
        all_cells += added + cells
    _warn_of_idle_scaling(grids, all_cells)
    return all_cells


def _warn_of_idle_scaling(grids: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> None:
    """Warn if scaling methods were given, but no cell uses any of them."""
    asked = [method for grid in grids for method in grid["scaling"] if _method(method) != "none"]
    if asked and all(cell.config["scaling"] == "none" for cell in cells):
        formats = [fmt for grid in grids for fmt in grid["formats"]]
        warnings.warn(
            f"No format of this sweep takes a scaling of gradients, so that scaling={shown(asked)} trains nothing of "
            f"its own: all cells have 'none'. Formats: {shown(formats)}. Use one whose gradients are rounded at a "
            f"scale, such as 'fp16' or 'e5m2', or omit scaling.",
            stacklevel=3,
        )


def _planned(grid: Mapping[str, Any]) -> list[Cell]:
    return plan(**{k: v for k, v in grid.items() if k != "task_options"}, options=grid["task_options"])


def _task_and_options(
    task: str | MakeTask | None, train: str | TrainFunction | None, options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the name of the task, or of the training function, and all options."""
    if train is not None:
        if task is not None:
            raise ValueError(
                f"task={shown(task)} was given with train={shown(train)}. Give a task, or a training function of your "
                f"own as train=, and not both."
            )
        return own_training(train), _own_options(options)
    if callable(task):
        _require_task(task)
    name = task_of(task)  # type: ignore[arg-type]  # it refuses None
    function = find_task(task) if isinstance(task, str) else task
    return name, _options({**getattr(function, "options", {}), **options})


def _require_rollouts(fmt: Any, task: str | MakeTask | None, train: object) -> None:
    """Raise ValueError for a rollout if there is a training function, or a task of the library that draws no samples.

    A user's task raises this error only when it runs.
    """
    # `rollout_of` also raises an error for an invalid rollout.
    if rollout_of(fmt) is None:
        return
    if train is not None:
        raise ValueError(
            f"The format {shown(label(fmt))} has a rollout, and a training function draws its own. Omit the rollout, "
            f"and quantise a second model in the function."
        )
    function = find_task(task) if isinstance(task, str) else task
    if isinstance(task, str) and is_of_library(task) and not getattr(function, "plays", False):
        raise ValueError(f"The format {shown(label(fmt))} has a rollout, and the task {task!r} draws none. Use 'rl'.")


def _require_native(methods: Sequence[str | float], options: Mapping[str, Any], train: object) -> None:
    """Raise ValueError for settings that a grid with a native format cannot have."""
    if train is not None:
        raise refused_with_native(
            "train",
            "The lab's own loop trains natively; what a function of your own computes in, it says itself.",
            "Use a task, or the format fp32 with torch.autocast and ada_loss.GradScaler(layers=model) in that function",
        )
    require_native(None, options)
    for method in methods:
        require_native_method(method)


def _require_task(function: Any) -> None:
    """Raise TypeError if the function given as a task is a training function: its first parameter is a job."""
    try:
        # The parameter is recognized by its name or annotation. Without this check the function would be called with a
        # seed, and fail late, in a worker.
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return
    if first is not None and (first.name == "job" or str(first.annotation).rpartition(".")[2].rstrip("'>") == "Job"):
        name = getattr(function, "__name__", "f")
        raise TypeError(f"{name} takes a job: it is a training function. Give it as train={name}, and no task.")


def _other_name(value: Any) -> Any:
    """Return the first name in nested mappings that is not a string; None if all names are strings."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                return name
            if (other := _other_name(inner)) is not None:
                return other
    elif isinstance(value, list | tuple):
        return next((other for inner in value if (other := _other_name(inner)) is not None), None)
    return None


def _own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a training function, which are part of a cell's identity."""
    # JSON would turn a name of another type into a string, and the function would not find its option.
    if (name := _other_name(options)) is not None:
        raise TypeError(
            f"task_options is {shown(dict(options))}, with {shown(name)} as a name. Expected: strings as names."
        )
    try:
        # The options are converted to JSON and back, so that tuples become lists. A cell then has the same id when its
        # options are read from the ledger.
        own: dict[str, Any] = json.loads(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"task_options is {shown(dict(options))}: {error}. Expected for a training function: numbers, words, "
            f"true, false, and lists and mappings of them."
        ) from None
    for name in own:
        if name in AXES:
            raise ValueError(f"task_options names {shown(name)}, which the sweep sets. Give it another name.")
    return own


def is_configuration(config: object) -> bool:
    """True if a value has the keys of a cell's configuration, with values of the right types.

    The values of "format" and "scaling" may have any type.
    """
    if not isinstance(config, dict) or config.keys() != {*AXES, "options"}:
        return False
    words = isinstance(config["task"], str) and isinstance(config["rounding"], str)
    return words and is_whole(config["seed"]) and isinstance(config["options"], dict)


def is_intact(cell: str, config: dict[str, Any]) -> bool:
    """True if an id is the hash of this configuration."""
    try:
        return Cell(config).id == cell
    # JSON refuses NaN, and no configuration holds NaN.
    except ValueError:
        return False


def stored_cell(cell: str, config: dict[str, Any]) -> Cell:
    """Restore a cell of a ledger. Its settings are checked like those of a YAML file, but its task is not looked up.

    cell, config: the id and the configuration of the cell in the ledger.
    Raises ValueError, with the id, if the configuration does not match the id or does not describe a cell.
    """
    problem = "its configuration is not the one of which the id was made."
    if is_configuration(config) and is_intact(cell, config):
        checked = ("task", "format", "rounding", "scaling", "options")
        # The settings are passed as text without the seed, so that the cache below serves all seeds of a setting.
        problem = _problem_of(json.dumps({name: config[name] for name in checked}))
    if problem:
        raise ValueError(
            f"The cell {shown(cell)} of the ledger is damaged, or not of this library: {problem} "
            f"Call sweep(...) with the arguments of that sweep: it repairs what is its own."
        )
    return Cell(config)


@lru_cache(maxsize=1024)
def _problem_of(text: str) -> str:
    """Return the problem in the settings of a cell, which are given as JSON; "" if they are valid."""
    settings = json.loads(text)
    try:
        policy_of(canonical_format(settings["format"]), settings["rounding"])
        _method(settings["scaling"])
        (_own_options if is_own(settings["task"]) else _options)(settings["options"])
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _require_different(cells: Sequence[Cell]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.id in seen:
            raise ValueError(
                f"The cell '{cell}' was given twice: two entries of formats, scaling, roundings, seeds, also are one. "
                f"Every training is run once. Leave one of them out."
            )
        seen.add(cell.id)


def _seeds(seeds: int | Sequence[int]) -> Sequence[int]:
    if is_whole(seeds):
        if seeds < 0:  # type: ignore[operator]
            words = "is not a number of seeds. Expected: 1 or more, or a list of integers."
            raise ValueError(f"seeds={shown(seeds)} {words}")
        if seeds > MOST_CELLS:  # type: ignore[operator]
            raise ValueError(f"seeds is {shown(seeds)}. Expected: at most {MOST_CELLS:,}, or a list of integers.")
        return range(int(seeds))  # type: ignore[arg-type]
    if isinstance(seeds, str | bytes | bytearray) or not isinstance(seeds, Sequence):
        raise TypeError(f"seeds is {shown(seeds)}. Expected: how many, or a list of integers.")
    for seed in seeds:
        if not is_whole(seed):
            words = "is not an integer. Expected: how many seeds, or a list of integers."
            raise TypeError(f"The seed {shown(seed)} {words}")
    return [int(seed) for seed in seeds]  # JSON cannot hold NumPy's integers


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in OPTIONS:
            raise ValueError(refuse(f"Unknown key task_options.{str(name)[:SHOWN]}", OPTIONS, word=name))
        if not is_allowed(name, value):
            raise ValueError(
                f"task_options.{name} is {shown(value)}.{hint(name, value)} Expected: {possible(name)}. "
                f"Omit it for {OPTIONS[name]!r}."
            )
    full = asdict(TrainOptions(**given))
    return {name: full[name] for name in OPTIONS}


def _method(method: Any) -> str | float:
    if not isinstance(method, str) and not is_number(method):
        raise TypeError(
            f"The scaling method {shown(method)} is a {type(method).__name__}. Expected: a name or a number."
        )
    require_method(method)
    return method if isinstance(method, str) else float(method)
