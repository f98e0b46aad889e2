"""Noise keys: the 64 bits that name one stochastic rounding, and the streams they are drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Noise keys. By default they are drawn from torch's own CPU generator, so that torch.manual_seed, fork_rng,
# get_rng_state and activation checkpointing reach the noise as they reach dropout.
_generator: torch.Generator | None = None


def manual_seed(seed: int | None) -> None:
    """Give the noise of stochastic rounding a stream of its own, seeded with `seed`.

    Without a call the noise follows `torch.manual_seed`; `manual_seed(None)` returns to that. Code under
    `torch.compile` always follows `torch.manual_seed`.

    >>> from fpsim import round_to
    >>> x = torch.full((4,), 1.5)
    >>> manual_seed(0); first = round_to(x, "e5m0", "stochastic")
    >>> manual_seed(0); torch.equal(first, round_to(x, "e5m0", "stochastic"))
    True
    >>> manual_seed(None)
    """
    global _generator
    _generator = None if seed is None else torch.Generator().manual_seed(seed)


@contextmanager
def noise_of_torch() -> Iterator[None]:
    """Inside, noise follows `torch.manual_seed`; the stream of `manual_seed`, if there is one, goes on afterwards."""
    global _generator
    own, _generator = _generator, None
    try:
        yield
    finally:
        _generator = own


def noise_state() -> Tensor | None:
    """Where the stream of `manual_seed` is; None if there is none."""
    return None if _generator is None else _generator.get_state()


@contextmanager
def replayed_noise(state: Tensor | None) -> Iterator[None]:
    """Inside, the stream of `manual_seed` goes on from `state`; afterwards it goes on from where it is now."""
    now = noise_state()
    if now is None or state is None:
        yield  # torch's stream, which whoever runs something again has to replay
        return
    assert _generator is not None
    _generator.set_state(state)
    try:
        yield
    finally:
        _generator.set_state(now)


def new_key() -> Tensor:
    """64 bits that name one call, on the CPU."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_generator)


def new_traceable_key() -> Tensor:
    """The same by one operation that returns, as tracers and transforms want it."""
    own: dict[str, Any] = {} if _generator is None or torch.compiler.is_compiling() else {"generator": _generator}
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu", **own)
