"""Checkpoints: files from which an interrupted training resumes with the same bits as without the interruption."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fpsim
from ada_loss.files import opened, remove_from, write_atomically
from ada_loss.lab.errors import printable
from ada_loss.lab.training.generators import generator_states, restore_generators

__all__ = ["Checkpoints", "DelayedScaling"]

MOST_BYTES = 1 << 36
DIGEST = hashlib.sha256().digest_size


class DelayedScaling:
    """State of a model's delayed scaling, which the model's state_dict does not contain.

    prepare: a function that is called before a state is loaded, to switch the model to the formats of that state.
    """

    def __init__(self, model: nn.Module, prepare: Callable[[], None] | None = None) -> None:
        self.model, self.prepare = model, prepare

    def state_dict(self) -> dict[str, Any]:
        return fpsim.scaling_state(self.model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.prepare is not None:
            self.prepare()
        fpsim.load_scaling_state(self.model, state)


class Checkpoints:
    """The checkpoint file of one training: the state of its objects, and of torch's, NumPy's and Python's generators.

    The file holds only tensors, numbers and strings. It is read by torch's unpickler for these types, so that a forged
    file cannot run code.

    path: the file.
    stateful: the objects with `state_dict` and `load_state_dict`, by name; their states hold only tensors, numbers
        and strings.
    identity: the description of the training, in words and numbers. A file that has another identity or cannot be read
        is ignored with a warning.
    seconds: the time between two checkpoints.
    cuda_devices: the CUDA devices that draw random numbers in addition to the CPU.
    is_own: whether a sweep creates the file's folder, which then must not be a link.
    """

    def __init__(
        self,
        path: Path,
        stateful: Mapping[str, Any],
        identity: Mapping[str, Any],
        seconds: float,
        cuda_devices: Sequence[str],
        is_own: bool = False,
    ) -> None:
        self.path, self.stateful, self.seconds = path, stateful, seconds
        # The two parts of a resumed training must not be computed by releases whose results differ.
        self.identity = {**identity, "bits": fpsim.BITS}
        self.cuda_devices, self.is_own = cuda_devices, is_own
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return True if the last checkpoint is at least `seconds` old."""
        return time.monotonic() - self._last >= self.seconds

    def save(self) -> None:
        """Write a checkpoint, either completely or not at all."""
        content = io.BytesIO()
        states = {name: thing.state_dict() for name, thing in self.stateful.items()}
        torch.save({"identity": self.identity, "states": states, **generator_states(self.cuda_devices)}, content)
        # The digest detects damage: otherwise a weight with a flipped bit would be loaded, and the training would go on
        # unnoticed.
        packed = content.getvalue()
        write_atomically(self.path, hashlib.sha256(packed).digest() + packed, is_own=self.is_own)
        self._last = time.monotonic()

    def load(self) -> bool:
        """Restore the objects and the generators' states. Returns False if there is no usable file.

        Raises ValueError for an undamaged file of this training whose states do not fit, such as an edited file.
        """
        if not self.path.exists():
            return False
        # A checkpoint only saves time. If it is unusable, a warning is printed and the training starts again.
        try:
            saved = self._read()
            identity = saved["identity"]
        except pickle.UnpicklingError:
            words = "it holds more than tensors, numbers and strings, or is of an older version"
            warnings.warn(f"The checkpoint {self.path} cannot be read: {words}. Training starts over.", stacklevel=5)
            return False
        except Exception as error:  # a damaged file may raise anything
            warnings.warn(
                f"The checkpoint {self.path} cannot be read ({printable(error)}). Training starts over.", stacklevel=5
            )
            return False
        if identity != self.identity:
            warnings.warn(f"The checkpoint {self.path} is of another training. This one starts over.", stacklevel=5)
            return False
        try:
            self._restore(saved)
        except Exception as error:  # half of the state may be restored, so the training cannot begin
            raise ValueError(
                f"The checkpoint {self.path} is of this training, but not as this library writes it "
                f"({type(error).__name__}: {error}). Remove it: training starts over."
            ) from error
        return True

    def _restore(self, saved: Mapping[str, Any]) -> None:
        for name, thing in self.stateful.items():
            thing.load_state_dict(saved["states"][name])
        restore_generators(saved, self.cuda_devices)

    def _read(self) -> Any:
        with opened(self.path) as file:
            if (size := file.seek(0, os.SEEK_END)) > MOST_BYTES:
                raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
            file.seek(0)
            # The digest is checked before a byte is unpickled. The check of the size above bounds the memory that a
            # forged file can take.
            if file.read(DIGEST) != hashlib.file_digest(file, "sha256").digest():
                raise ValueError("it is damaged")
            file.seek(DIGEST)
            packed = file.read()
        return torch.load(io.BytesIO(packed), weights_only=True)

    def remove(self) -> None:
        """Delete the file: the training is over."""
        remove_from(self.path.parent, self.path.name.__eq__, is_own=self.is_own)
