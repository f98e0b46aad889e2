"""Noise keys: the 64 bits that name one stochastic rounding, and the streams they are drawn from."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Noise keys. By default they are drawn from torch's own CPU generator, so that torch.manual_seed, fork_rng,
# get_rng_state and activation checkpointing reach the noise as they reach dropout.
_generator: torch.Generator | None = None
_inside: list[int] = []  # the threads that are in blocks of `noise_of_torch`, one entry for each block


class _Here(threading.local):
    """What the blocks that this thread is in draw from, the innermost last; None is torch's stream."""

    def __init__(self) -> None:
        self.streams: list[torch.Generator | None] = []


_here = _Here()


def manual_seed(seed: int | None) -> None:
    """Give the noise of stochastic rounding a stream of its own, seeded with `seed`; all threads draw from it.

    Without a call the noise follows `torch.manual_seed`; `manual_seed(None)` returns to that. Code under
    `torch.compile` always follows `torch.manual_seed`, and so does what a CUDA graph captures.

    A forked process goes on with a copy of the stream, so that two of them draw equal noise, as they do from torch's.
    DataLoader gives each of its workers a seed of torch's stream, and knows nothing of this one: give it
    `worker_init_fn=lambda worker: fpsim.manual_seed(torch.initial_seed())`. A spawned process follows torch.

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
    """Inside, noise follows `torch.manual_seed`; the stream of `manual_seed`, if there is one, goes on afterwards.

    This holds for the process while any of its threads is inside: a backward pass rounds in threads of autograd's own.
    A call of `manual_seed` inside has no effect: the stream that goes on is the one from before.
    """
    global _generator
    thread, before = threading.get_ident(), _generator
    _inside.append(thread)
    try:
        with _drawing_from(None):
            yield
    finally:
        _inside.remove(thread)
        _generator = before


def _forget_other_threads() -> None:
    thread = threading.get_ident()
    _inside[:] = [t for t in _inside if t == thread]


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_forget_other_threads)


@contextmanager
def _drawing_from(stream: torch.Generator | None) -> Iterator[None]:
    _here.streams.append(stream)
    try:
        yield
    finally:
        _here.streams.pop()


def _stream() -> torch.Generator | None:
    """What keys are drawn from here and now; None for torch's stream."""
    if _here.streams:
        return _here.streams[-1]
    return None if _inside else _generator


def noise_state() -> Tensor | None:
    """Where the stream of `manual_seed` is; None where noise follows torch."""
    stream = _stream()
    return None if stream is None else stream.get_state()


@contextmanager
def replayed_noise(state: Tensor | None) -> Iterator[None]:
    """Inside, this thread draws again what it drew from `state` on; the stream of `manual_seed` stays where it is.

    state: from `noise_state`; None draws from torch's stream, which whoever runs something again has to replay.
    """
    stream = None
    if state is not None:
        stream = torch.Generator()
        stream.set_state(state)
    with _drawing_from(stream):
        yield


def new_key() -> Tensor:
    """64 bits that name one call, on the CPU."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_stream())


def new_key_for(x: Tensor) -> Tensor:
    """A key for a rounding of `x`: `new_key`, or an int64 on its card while a CUDA graph is captured.

    A graph repeats what was captured: a number would be the same in every replay. What torch's own generator of the
    card draws in a captured operation is drawn anew in each, so that the noise follows `torch.manual_seed` there.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.empty((), dtype=torch.int64, device=x.device).random_()
    return new_key()


def new_traceable_key(x: Tensor) -> Tensor:
    """The same by one operation that returns, as tracers and transforms want it."""
    if not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=x.device)
    stream = None if torch.compiler.is_compiling() else _stream()
    chosen: dict[str, Any] = {} if stream is None else {"generator": stream}
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu", **chosen)
