"""Noise keys: the 64 bits that identify one stochastic rounding, and the streams from which keys are drawn."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpsim.border import require_seed
from fpsim.undoing import Block, Undo

# Noise keys. By default they are drawn from torch's own CPU generator, so that torch.manual_seed, fork_rng,
# get_rng_state and activation checkpointing affect the noise as they affect dropout.
_generator: torch.Generator | None = None


class _Block:
    """A block of `noise_of_torch`, and the thread that entered it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


_inside: list[_Block] = []


class _Source:
    """The stream from which a block draws keys; None stands for torch's stream."""

    def __init__(self, stream: torch.Generator | None) -> None:
        self.stream = stream


class _Here(threading.local):
    """Streams of the blocks that this thread has entered; the innermost is last."""

    def __init__(self) -> None:
        self.streams: list[_Source] = []


_here = _Here()


def manual_seed(seed: int | None) -> None:
    """Give the noise of stochastic rounding a stream of its own, seeded with `seed`; all threads draw from it.

    Without a call, the noise follows `torch.manual_seed`; `manual_seed(None)` returns to that. Code under
    `torch.compile` always follows `torch.manual_seed`, and so do CUDA graphs.

    A forked process goes on with a copy of the stream, so that two forked processes draw equal noise, as they do from
    torch's stream. DataLoader seeds each of its workers for torch's stream only: for this stream, give it
    `worker_init_fn=lambda worker: fpsim.manual_seed(torch.initial_seed())`. A spawned process follows torch.

    Args:
        seed: an integer of 64 bits, or None.

    >>> from fpsim import round_to
    >>> x = torch.full((4,), 1.5)
    >>> manual_seed(0); first = round_to(x, "e5m0", "stochastic")
    >>> manual_seed(0); torch.equal(first, round_to(x, "e5m0", "stochastic"))
    True
    >>> manual_seed(None)
    """
    global _generator
    if seed is not None:
        require_seed(seed)
    _generator = None if seed is None else torch.Generator().manual_seed(seed)


def noise_of_torch() -> AbstractContextManager[None]:
    """Let noise follow `torch.manual_seed` inside; afterwards the stream of `manual_seed`, if there is one, continues.

    This holds for the whole process while any of its threads is inside, because a backward pass rounds in autograd's
    own threads. A call of `manual_seed` inside has no effect: the stream from before continues.
    """
    return Block(_follow_torch)


def _follow_torch(undo: Undo) -> None:
    block, source, before = _Block(), _Source(None), _generator
    # The undo is registered before the block is entered, so that an interrupt in between leaves nothing behind.
    undo.by(partial(_leave, block, source, before))
    _inside.append(block)
    _here.streams.append(source)


def _leave(block: _Block, source: _Source, before: torch.Generator | None) -> None:
    global _generator
    _generator = before
    _forget(_inside, block)
    _forget(_here.streams, source)


def _forget(entries: list[Any], entry: object) -> None:
    if entry in entries:
        entries.remove(entry)


# A forked process has only the thread that forked. In this process, the blocks of other threads would never be left.
def _forget_other_threads() -> None:
    thread = threading.get_ident()
    _inside[:] = [block for block in _inside if block.thread == thread]


# `register_at_fork` does not exist on Windows, where nothing forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def _stream() -> torch.Generator | None:
    """Return the stream from which keys are drawn at present; None for torch's."""
    if _here.streams:
        return _here.streams[-1].stream
    return None if _inside else _generator


def noise_state() -> Tensor | None:
    """Return the state of the stream of `manual_seed`; None if noise follows torch."""
    stream = _stream()
    return None if stream is None else stream.get_state()


def replayed_noise(state: Tensor | None) -> AbstractContextManager[None]:
    """Let this thread draw again the keys that follow `state`; the stream of `manual_seed` does not advance.

    state: a result of `noise_state`; None draws from torch's stream, which the caller has to replay.
    """
    return Block(partial(replay_noise, state))


def replay_noise(state: Tensor | None, undo: Undo) -> None:
    """Let this thread draw again the keys that follow `state`, until `undo` ends it; see `replayed_noise`."""
    stream = None
    if state is not None:
        stream = torch.Generator()
        stream.set_state(state)
    _draw_here(stream, undo)


def _draw_here(stream: torch.Generator | None, undo: Undo) -> None:
    """Let this thread draw keys from a stream, until it is undone. None stands for torch's stream."""
    source = _Source(stream)
    undo.by(partial(_forget, _here.streams, source))
    _here.streams.append(source)


def keep_random_numbers(undo: Undo) -> None:
    """Restore torch's random number states of the CPU and of the current card."""
    undo.by(partial(torch.set_rng_state, torch.get_rng_state()))
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        undo.by(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))


def seed_here(undo: Undo, seed: int, noise: int) -> None:
    """Seed torch's random numbers and this thread's noise; undoing this restores the earlier states."""
    keep_random_numbers(undo)
    _draw_here(torch.Generator().manual_seed(noise), undo)
    torch.manual_seed(seed)


def new_key() -> Tensor:
    """Draw a key on the CPU: the 64 bits that identify one call."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_stream())


def is_captured(x: Tensor) -> bool:
    """Return whether operations on `x` are being captured for a CUDA graph, on the current stream of its device."""
    if not x.is_cuda:
        return False
    if x.get_device() == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    # torch looks only at the stream of the current device.
    with torch.cuda.device(x.get_device()):
        return torch.cuda.is_current_stream_capturing()


def new_key_for(x: Tensor) -> Tensor:
    """Return a key for a rounding of `x`: `new_key`, or an int64 on its card while a CUDA graph is captured.

    A graph repeats captured operations: a number from the host would be the same in every replay. An operation with
    torch's generator on the card draws again in every replay, so that the noise follows `torch.manual_seed` there.
    """
    if is_captured(x):
        return torch.empty((), dtype=torch.int64, device=x.device).random_()
    return new_key()


def new_traceable_key(x: Tensor) -> Tensor:
    """Return a key as `new_key_for` does, by an operation that is not in place, as tracers and transforms need."""
    if not torch.compiler.is_compiling() and is_captured(x):
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=x.device)
    # Compiled code always follows torch.manual_seed, whatever stream was chosen.
    stream = None if torch.compiler.is_compiling() else _stream()
    chosen: dict[str, Any] = {} if stream is None else {"generator": stream}
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu", **chosen)


def new_compiled_key() -> Tensor:
    """Return a CPU key inside a compiled program, by the operation of `new_key`, which compilers leave to torch."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_()
