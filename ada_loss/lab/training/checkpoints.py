"""Checkpoints: an interrupted training goes on from a file, to the same bits."""

from __future__ import annotations

import hashlib
import io
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ada_loss.files import write_atomically

__all__ = ["Checkpoints"]

DIGEST = hashlib.sha256().digest_size


class Checkpoints:
    """The checkpoint file of one training: the state of its objects, its progress, and its random numbers.

    The file is a pickle: load none that you do not trust.

    path: the file.
    stateful: the objects with `state_dict` and `load_state_dict`, by name.
    identity: which training this is, in words and numbers. A file with another identity is ignored with a warning, and
        so is one that cannot be read.
    seconds: the time between two checkpoints.
    cuda_devices: the CUDA devices that draw random numbers beside the CPU.
    """

    def __init__(
        self,
        path: Path,
        stateful: Mapping[str, Any],
        identity: Mapping[str, Any],
        seconds: float,
        cuda_devices: Sequence[str],
    ) -> None:
        self.path, self.stateful, self.identity, self.seconds = path, stateful, dict(identity), seconds
        self.cuda_devices = cuda_devices
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last checkpoint is `seconds` old."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, *progress: Any) -> None:
        """Write a checkpoint, whole or not at all. progress: what `load` is to give back."""
        content = io.BytesIO()
        states = {name: thing.state_dict() for name, thing in self.stateful.items()}
        noise = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.cuda_devices)]
        torch.save({"identity": self.identity, "states": states, "noise": noise, "progress": progress}, content)
        packed = content.getvalue()
        write_atomically(self.path, hashlib.sha256(packed).digest() + packed)
        self._last = time.monotonic()

    def load(self) -> tuple[Any, ...] | None:
        """Restore the objects and the random numbers, and give the progress back; None without a usable file."""
        if not self.path.exists():
            return None
        try:
            saved = self._read()
            identity = saved["identity"]
        except Exception as error:  # a pickle of another version may raise anything
            warnings.warn(f"The checkpoint {self.path} cannot be read ({error}). Training starts over.", stacklevel=5)
            return None
        if identity != self.identity:
            warnings.warn(f"The checkpoint {self.path} is of another training. This one starts over.", stacklevel=5)
            return None
        for name, thing in self.stateful.items():
            thing.load_state_dict(saved["states"][name])
        noise, *noises = saved["noise"]
        torch.set_rng_state(noise)
        for device, noise in zip(self.cuda_devices, noises, strict=True):
            torch.cuda.set_rng_state(noise, device)
        return saved["progress"]  # type: ignore[no-any-return]

    def _read(self) -> Any:
        content = self.path.read_bytes()
        digest, packed = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(packed).digest() != digest:  # torch.load would not notice a flipped bit in a weight
            raise ValueError("it is damaged")
        return torch.load(io.BytesIO(packed), weights_only=False)

    def remove(self) -> None:
        """Delete the file: the training is over."""
        self.path.unlink(missing_ok=True)
