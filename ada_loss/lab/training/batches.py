"""Batches of a training, from two tensors, or from a DataLoader or another iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ada_loss.lab.tasks.task import is_pair, types_of_pair
from ada_loss.lab.training.generators import generator_states, restore_generators
from fpsim.checks import shown

__all__ = ["Batches", "LoadedBatches", "TensorBatches", "batches_of", "placed"]

Pair = tuple[Tensor, Tensor]


class TensorBatches:
    """Batches of inputs and targets, in random order.

    length: the number of batches of an epoch.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, seed: int) -> None:
        self.inputs, self.targets, self.size = inputs, targets, size
        # The batches have a separate generator, because their order must not depend on how many random numbers the
        # stochastic rounding of a format draws.
        self.generator = torch.Generator().manual_seed(seed)
        self.length: int | None = -(-len(inputs) // size)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The data, for the identity of a checkpoint."""
        return {"inputs": self.inputs, "targets": self.targets}

    def order(self) -> Tensor:
        """Return the state of the generator; the next epoch is drawn from this state."""
        return self.generator.get_state()

    def restore(self, order: Tensor) -> None:
        """Set the generator to its state at the beginning of an epoch."""
        self.generator.set_state(order)

    def epoch(self, done: int) -> Iterator[Pair]:
        """Yield the batches of an epoch, except the first `done`."""
        for batch in torch.randperm(len(self.inputs), generator=self.generator).split(self.size)[done:]:
            yield self.inputs[batch], self.targets[batch]


class LoadedBatches:
    """Batches of an iterable. If the iterable draws random numbers from torch, the training's seed determines them.

    To resume an interrupted epoch, torch's generator and a DataLoader's own generators are set to their states at the
    beginning of the epoch, the iterable starts again, and the finished batches are skipped. Then the generators of
    torch, NumPy and Python are set to the states at which the epoch was interrupted.

    length: the length of the iterable; None if it has no length.
    """

    def __init__(self, loader: Iterable[Any], device: str, container: torch.dtype) -> None:
        self.loader, self.device, self.container = loader, device, container
        self._begun: Tensor | None = None
        self._generators = _generators_of(loader)
        # No tensors are part of the checkpoint's identity, because reading them would draw an epoch.
        self.tensors: dict[str, Tensor] = {}
        try:
            self.length: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.length = None

    def order(self) -> Tensor:
        """Return the states of torch's and the loader's generators; the next epoch is drawn from these states."""
        begun = torch.get_rng_state() if self._begun is None else self._begun
        return torch.cat([begun, *(generator.get_state() for generator in self._generators)])

    def restore(self, order: Tensor) -> None:
        """Set the generators to their states at the beginning of an epoch; torch's is set when the epoch begins."""
        self._begun, *own = (state.clone() for state in order.split(len(torch.get_rng_state())))
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)

    def epoch(self, done: int) -> Iterator[Pair]:
        now = generator_states(())
        if self._begun is not None:
            torch.set_rng_state(self._begun)
        batches = iter(self.loader)
        for _ in range(done):
            next(batches, None)
        if self._begun is not None:
            restore_generators(now, ())  # the skipped batches drew from them a second time
        self._begun = None
        is_empty = not done
        for batch in batches:
            is_empty = False
            yield placed(batch, self.device, self.container)
        if is_empty:
            raise ValueError(
                f"The training data {shown(self.loader)} gave no batch. Expected: what begins again each time."
            )


def _generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that the user gave a DataLoader; torch.manual_seed does not seed these generators."""
    if not isinstance(loader, DataLoader):
        return []
    sampler, batches = loader.sampler, loader.batch_sampler
    # If the DataLoader creates the sampler, both have the same generator. A user's sampler may have another generator.
    holders = (loader, sampler, batches, getattr(batches, "sampler", None))
    by_id = {id(own): own for holder in holders if (own := getattr(holder, "generator", None)) is not None}
    return [generator for generator in by_id.values() if isinstance(generator, torch.Generator)]


Batches = TensorBatches | LoadedBatches


def batches_of(data: Any, size: int, seed: int, device: str, container: torch.dtype) -> Batches:
    """Return the batches of a task's data, on a device.

    data: two tensors, or an iterable of batches.
    size, seed: the size and the seed of batches of two tensors; an iterable determines its own batches.
    """
    if is_pair(data):
        return TensorBatches(*placed(data, device, container), size, seed)
    return LoadedBatches(data, device, container)


def placed(batch: Any, device: str, container: torch.dtype) -> Pair:
    """Return inputs and targets on a device, floating-point tensors in the dtype `container`.

    Raises TypeError unless both are tensors.
    """
    if not is_pair(batch):
        raise TypeError(
            f"A batch is {types_of_pair(batch)}. Expected: two tensors, inputs and targets. For batches of "
            f"another kind, train in a function of your own: ada_loss.sweep(train=...)."
        )
    x, y = (part.to(device, container if part.is_floating_point() else part.dtype) for part in batch)
    return x, y
