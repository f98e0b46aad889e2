"""The global generators of random numbers that a training draws from: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import fpsim

__all__ = ["generator_states", "kept_generators", "restore_generators", "seed_generators"]


@contextmanager
def kept_generators(cuda_devices: Sequence[str] = ()) -> Iterator[None]:
    """Restore the generators at the end of the block. Within the block, fpsim's noise follows torch's generator.

    cuda_devices: the devices whose generators are restored, in addition to the CPU's.
    """
    others = _states_beside_torch()
    with torch.random.fork_rng(devices=[*cuda_devices]), fpsim.noise_of_torch():
        try:
            yield
        finally:
            _restore_beside_torch(others)


def seed_generators(seed: int) -> None:
    """Seed all global generators.

    seed: an integer that torch takes; NumPy's generator gets it modulo 2**32.
    """
    seed = int(seed)  # Python's generator takes no NumPy integer
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the global one is what data sets draw from
    random.seed(seed)


def generator_states(cuda_devices: Sequence[str]) -> dict[str, Any]:
    """Return the generators' states as tensors, numbers and strings; the entry "noise" lists torch's, by device."""
    noise = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda_devices)]
    return {"noise": noise, **_states_beside_torch()}


def restore_generators(states: Mapping[str, Any], cuda_devices: Sequence[str]) -> None:
    """Set the generators to saved states."""
    noise, *noises = states["noise"]
    torch.set_rng_state(noise)
    for device, noise in zip(cuda_devices, noises, strict=True):
        torch.cuda.set_rng_state(noise, device)
    _restore_beside_torch(states)


def _states_beside_torch() -> dict[str, Any]:
    return {"numpy": _packed(np.random.get_state(legacy=False)), "python": random.getstate()}  # noqa: NPY002


def _restore_beside_torch(states: Mapping[str, Any]) -> None:
    np.random.set_state(_unpacked(states["numpy"]))  # noqa: NPY002
    random.setstate(states["python"])


def _packed(state: Any) -> Any:
    """Replace the arrays in a state of NumPy's by tensors."""
    # torch.load(weights_only=True) refuses NumPy's arrays.
    if isinstance(state, Mapping):
        return {name: _packed(value) for name, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def _unpacked(state: Any) -> Any:
    """Undo `_packed`."""
    if isinstance(state, Mapping):
        return {name: _unpacked(value) for name, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state
