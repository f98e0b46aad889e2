"""Compile the loops of common formats, recipes and updates ahead of time: for `python -m fpsim warm` and for wheels."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context

import torch
from torch import nn

from fpsim.compiling.kept import silence
from fpsim.formats.blocks import BLOCKS
from fpsim.formats.codebook import CODEBOOKS
from fpsim.formats.floats import CATALOGUE
from fpsim.insight.recording import record
from fpsim.insight.watch import watch
from fpsim.models.optimizers import quantize_optimizer
from fpsim.models.quantize import quantize
from fpsim.policies.recipes import recipes
from fpsim.policies.update import UPDATES
from fpsim.tensors.gemm import matmul
from fpsim.tensors.warm import warm_up

__all__ = ["STEPS", "compile_steps"]

_ROUNDINGS = "nearest_even", "stochastic"
_PROCESSES = 2  # a third would find little to do: the recipes share their loops, and each process imports torch


def _small(device: str) -> nn.Module:
    """Make a model with an inner layer."""
    # Recipes leave out the first layer and the last.
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)


def _step(model: nn.Module, device: str, update: str | None = None) -> None:
    """Run a training step, with weights and states stored in few bits if `update` is given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if update:
        quantize_optimizer(optimizer, update)
    model(torch.randn(64, 64, device=device)).square().mean().backward()
    optimizer.step()


def _recipe(name: str, device: str) -> None:
    _step(quantize(_small(device), fmt=f"recipe:{name}"), device)


def _update(name: str, device: str) -> None:
    _step(_small(device), device, name)


def _observed(fmt: str, device: str) -> None:
    model = _small(device)
    with watch(model, [fmt]):
        _step(model, device)
    model = quantize(model, fmt=fmt)
    with record(model):
        _step(model, device)


def _product(device: str) -> None:
    for word in ("fp32", "fp16"):
        matmul(torch.randn(8, 64, device=device), torch.randn(64, 8, device=device), word)


def _formats(formats: list[str], rounding: str, device: str) -> None:
    warm_up(device, formats, [rounding])


# Functions of a device, by name. The longest ones are first, so that both processes end at nearly the same time.
STEPS: dict[str, Callable[[str], None]] = {
    "recipe:nvfp4": partial(_recipe, "nvfp4"),
    **{
        f"{kind}, {rounding}": partial(_formats, formats, rounding)
        for rounding in _ROUNDINGS
        for kind, formats in (("blocks", list(BLOCKS)), ("floats", list(CATALOGUE)), ("code books", list(CODEBOOKS)))
    },
    **{f"recipe:{row.name}": partial(_recipe, row.name) for row in recipes() if row.name != "nvfp4"},
    **{f"watch {fmt}": partial(_observed, fmt) for fmt in ("fp16", "e4m3fn")},
    # Muon runs the loops of the other updates, and takes another optimizer.
    **{f"update {name}": partial(_update, name) for name in UPDATES if not name.startswith("muon")},
    "products in an accumulator": _product,
}


def _begin() -> None:
    """Begin a worker."""
    # The parent process shows the progress, and handles Ctrl-C.
    silence()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _run(name: str, device: str) -> None:
    STEPS[name](device)


def compile_steps(device: str) -> Iterator[str]:
    """Run all STEPS, which fills this user's cache of machine code, and yield the name of each step that is done.

    For the CPU of a machine with two or more cores, two other processes share the steps. They draw no random numbers of
    this process.
    """
    if device != "cpu" or (os.cpu_count() or 1) < _PROCESSES:
        silence()
        for name, step in STEPS.items():
            step(device)
            yield name
        return
    # Processes are spawned: in a fork of a process whose torch has threads, a lock may be held that no thread releases.
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn"), _begin) as pool:
        try:
            waiting = {pool.submit(_run, name, device): name for name in STEPS}
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
