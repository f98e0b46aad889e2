"""Execution of cells: engine, device, number of workers, and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Any

from ada_loss.lab.devices import device_problem, require_device_name
from fpsim.checks import is_finite_number, is_number, is_whole, shown

__all__ = ["Execution"]

MOST_WORKERS = 10_000
# The least memory of a worker, in bytes. With less memory no worker starts.
LEAST_MEMORY = 2**20
ADDRESS_FORMS = "tcp://HOST:PORT or tls://HOST:PORT"
ENGINES = ("here", "local", ADDRESS_FORMS, "a concurrent.futures.Executor")
ADDRESS = re.compile(r"(tcp|tls)://(\[[^\]]+\]|[^\s:/@]+):(?P<port>[0-9]+)")


@dataclass(frozen=True)
class Execution:
    """How a sweep's cells are executed. This is not part of a cell's identity: results do not depend on it.

    workers: the number of processes of a local engine; for an executor of unknown size, the number of cells in flight.
    engine: the engine that computes the cells: "here": this process, one cell at a time; "local": as many processes of
        this machine as there are workers; "tcp://HOST:PORT" or "tls://HOST:PORT": the workers of a Dask scheduler; an
        executor of concurrent.futures; None: "here" for one worker without a time limit, else "local".
    device: where a cell computes, "cpu", "cuda" or one GPU such as "cuda:1".
    time_limit: the seconds that one cell may take; None for no limit.
    memory_limit: the memory beyond which a local worker is replaced: "auto" divides the machine's memory among the
        workers; otherwise a number of bytes such as "4 GiB", or 0 for no limit.
    resources: the Dask resources that a cell requires of its worker, such as {"GPU": 1}; each local worker has them.
    engine_timeout: the seconds to wait for a scheduler, and for its first worker.
    retry_failed: whether cells that failed run again.
    keep_states: whether the folder keeps the training states at which formats change, so that cells that are added
        later begin from them; each state is as large as a checkpoint.
    keep_old: whether to continue a folder whose cells have the numbers of another version of this library; see
        `fpsim.BITS`.
    Raises ValueError for an invalid value, and, if cells compute on this machine, for a device that it lacks.

    >>> Execution(workers=2).chosen_engine
    'local'
    """

    workers: int = 1
    engine: str | Executor | None = None
    device: str = "cpu"
    time_limit: float | None = None
    memory_limit: str | int = "auto"
    resources: Mapping[str, float] | None = None
    engine_timeout: float = 30
    retry_failed: bool = False
    keep_states: bool = False
    keep_old: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.workers, least=1):
            raise ValueError(f"workers={shown(self.workers)} computes nothing. Expected: 1 or more.")
        if self.workers > MOST_WORKERS:
            raise ValueError(f"workers={shown(self.workers)} is too many. Expected: 1 to {MOST_WORKERS:,}.")
        for name in ("time_limit", "engine_timeout"):
            seconds = getattr(self, name)
            is_left_out = name == "time_limit" and seconds is None
            if not is_left_out and not (is_finite_number(seconds) and 0 < seconds <= TIMEOUT_MAX):
                raise ValueError(
                    f"{name}={shown(seconds)} is invalid. Expected: seconds, above 0 and up to {TIMEOUT_MAX:g}."
                )
        if self.resources is not None and not _are_resources(self.resources):
            raise ValueError(
                f"resources={shown(self.resources)} is invalid. Expected: what a cell takes, such as {{'GPU': 1}}."
            )
        require_device_name(self.device)
        if self.engine is not None:
            _require_engine(self.engine)
        if self.is_on_this_machine and (problem := device_problem(self.device)):
            raise ValueError(problem)
        if not _is_memory(self.memory_limit):
            raise ValueError(
                f"memory_limit={shown(self.memory_limit)} is invalid. Expected: 'auto', a number of bytes such as "
                f"'4 GiB' and no less than 1 MiB, a share of the machine's such as 0.25, or 0 for "
                f"no limit. Omit it to divide the machine's memory among the workers."
            )
        for name in ("retry_failed", "keep_states", "keep_old"):
            # A flag may come from a file: YAML 1.2 reads `no` as a string, which would count as true.
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={shown(getattr(self, name))} is invalid. Expected: true or false.")

    @property
    def chosen_engine(self) -> str | Executor:
        """Return the engine, or the default. With a time limit the default is "local", whose processes can be ended."""
        return self.engine or ("here" if self.workers == 1 and self.time_limit is None else "local")

    @property
    def words(self) -> str:
        """Return a description of the start, for the first line of the progress.

        >>> Execution(workers=2).words, Execution().words
        ('starting 2 workers', 'one at a time in this process')
        """
        if self.chosen_engine == "here":
            return "one at a time in this process"
        if self.chosen_engine == "local":
            return f"starting {self.workers} worker{'s' * (self.workers > 1)}"
        return f"on {self.engine}" if isinstance(self.engine, str) else f"in a {type(self.engine).__name__}"

    @property
    def is_on_this_machine(self) -> bool:
        """True if cells certainly compute on this machine; an executor of another kind may compute elsewhere."""
        return self.chosen_engine in ("here", "local") or type(self.engine) in (ThreadPoolExecutor, ProcessPoolExecutor)


def _are_resources(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_number(amount) and amount > 0 for name, amount in value.items()
    )


def _require_engine(engine: object) -> None:
    if isinstance(engine, Executor) or (isinstance(engine, str) and engine in ("here", "local")):
        return
    if not isinstance(engine, str) or not engine.startswith(("tcp://", "tls://")):
        raise ValueError(f"Unknown engine {shown(engine)}. Expected: {', '.join(ENGINES)}. Omit it for the default.")
    match = ADDRESS.fullmatch(engine)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ValueError(
            f"The engine {shown(engine)} is not an address. Expected: {ADDRESS_FORMS}, where PORT is a number from 1 "
            f"to {2**16 - 1}. Take what `dask scheduler` prints."
        )


def _is_memory(value: object) -> bool:
    try:
        is_auto = isinstance(value, str) and value == "auto"
        if value is None or is_auto:
            return True
        size = _bytes(value)
        return (isinstance(value, str) or is_number(value)) and (0 <= size <= 1 or LEAST_MEMORY <= size < math.inf)
    # RuntimeError is raised for a tensor with several elements.
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _bytes(value: Any) -> float:
    """Return a memory limit in bytes, as Dask reads it: numbers up to 1 are a share of the machine's memory."""
    with suppress(ValueError):
        if not isinstance(value, bool):
            return float(value)
    if not isinstance(value, str) or not any(map(str.isdigit, value)):
        raise TypeError
    try:
        from dask.utils import parse_bytes
    except ImportError:
        # Without Dask no local worker starts, which raises a separate error later.
        return 0.0
    return float(parse_bytes(value))
