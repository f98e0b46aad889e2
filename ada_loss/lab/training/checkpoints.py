"""Checkpoints: where an interrupted training goes on, to the same bits."""

from __future__ import annotations

import hashlib
import io
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ada_loss.lab.files import write_atomically

__all__ = ["Checkpoints"]

DIGEST = hashlib.sha256().digest_size


class Checkpoints:
    """The file of one training: the states of its machines, what it has gathered, and where its random numbers are.

    machines: what has `state_dict` and `load_state_dict`, by name. settings: words and numbers; the file of a training
    with other ones is left aside with a warning, and so is one that cannot be read. cards: CUDA devices that draw
    random numbers beside the CPU. The file is a pickle: load none that you do not trust.
    """

    def __init__(
        self, path: Path, machines: Mapping[str, Any], settings: Sequence[Any], seconds: float, cards: Sequence[str]
    ) -> None:
        self.path, self.machines, self.settings, self.seconds = path, machines, [*settings], seconds
        self.cards = cards
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last one is old enough."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, *gathered: Any) -> None:
        """Write all of it, whole or not at all."""
        content = io.BytesIO()
        states = {name: machine.state_dict() for name, machine in self.machines.items()}
        noise = [torch.get_rng_state(), *(torch.cuda.get_rng_state(card) for card in self.cards)]
        torch.save({"settings": self.settings, "states": states, "noise": noise, "gathered": gathered}, content)
        packed = content.getvalue()
        write_atomically(self.path, hashlib.sha256(packed).digest() + packed)
        self._last = time.monotonic()

    def load(self) -> tuple[Any, ...] | None:
        """Put the machines and the random numbers where they were, and give what was gathered; None without a file."""
        if not self.path.exists():
            return None
        try:
            saved = self._read()
            settings = saved["settings"]
        except Exception as error:  # a pickle of another version may raise anything
            warnings.warn(f"The checkpoint {self.path} cannot be read ({error}). Training begins anew.", stacklevel=3)
            return None
        if settings != self.settings:
            warnings.warn(f"The checkpoint {self.path} is of another training. This one begins anew.", stacklevel=3)
            return None
        for name, machine in self.machines.items():
            machine.load_state_dict(saved["states"][name])
        noise, *noises = saved["noise"]
        torch.set_rng_state(noise)
        for card, noise in zip(self.cards, noises, strict=True):
            torch.cuda.set_rng_state(noise, card)
        return saved["gathered"]  # type: ignore[no-any-return]

    def _read(self) -> Any:
        content = self.path.read_bytes()
        digest, packed = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(packed).digest() != digest:  # torch.load would take a weight with a flipped bit as it is
            raise ValueError("it is damaged")
        return torch.load(io.BytesIO(packed), weights_only=False)

    def remove(self) -> None:
        """The training is done."""
        self.path.unlink(missing_ok=True)
