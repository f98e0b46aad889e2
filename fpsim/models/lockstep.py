"""Ranks that meet in the middle of a pass: batch statistics over the batches of all ranks, in one process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.torch_modes import PlainFunction

__all__ = ["Meeting", "in_turns"]

LONGEST_TURN = 3600  # seconds: a rank whose thread died would be waited for without end


class Meeting:
    """Ranks as threads of which one runs at a time, until it waits for the others.

    They take turns in their order, so that a step is reproducible. Each has gradients, buffers and the CPU's random
    numbers to itself: they are put aside while another one runs. A rank begins with gradients of None, the buffers of
    before, and the random numbers that the rank before it left.
    """

    def __init__(self, ranks: int, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [*model.buffers()]
        self.gradients: list[list[Tensor | None]] = [[] for _ in range(ranks)]
        self.final_buffers: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.rank = 0  # which runs
        self.error: BaseException | None = None
        self.turns = [threading.Semaphore(0) for _ in range(ranks)]
        self._first = [b.clone() for b in self.buffers]
        self._parts: dict[int, tuple[str, list[Tensor]]] = {}
        self._all: list[list[Tensor]] = []
        self._has_ended = [False] * ranks

    def begin(self, rank: int) -> None:
        """Wait for a rank's first turn."""
        self._wait(rank)
        self.put([None] * len(self.parameters), self._first)

    def end(self, rank: int) -> None:
        """Keep what the rank has computed, and give the turn to the next one for good."""
        self.gradients[rank], self.final_buffers[rank] = self._taken()
        self._has_ended[rank] = True
        if self._parts and self.error is None:
            first = min(self._parts)
            self.error = _apart(f"Rank {rank} ended its step, and rank {first} waits at {self._parts[first][0]}")
        self._next(rank)

    def gather(self, where: str, parts: list[Tensor]) -> list[list[Tensor]]:
        """What each rank brings here, in the order of ranks; waits until all have come."""
        rank = self.rank
        others = {place for place, _ in self._parts.values()} - {where}
        if others or any(self._has_ended):
            other = f"another one to {others.pop()}" if others else "another one has ended its step"
            raise _apart(f"Rank {rank} came to {where}, and {other}")
        self._parts[rank] = where, parts
        if len(self._parts) == len(self.turns):
            self._all, self._parts = [self._parts[r][1] for r in sorted(self._parts)], {}
        mine, state = self._taken(), torch.get_rng_state()
        self._next(rank)
        self._wait(rank)
        torch.set_rng_state(state)
        self.put(*mine)
        return self._all

    def _taken(self) -> tuple[list[Tensor | None], list[Tensor]]:
        return [p.grad for p in self.parameters], [b.clone() for b in self.buffers]

    def put(self, gradients: Sequence[Tensor | None], buffers: Sequence[Tensor]) -> None:
        """Let parameters have these gradients, and buffers these values."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        for buffer, value in zip(self.buffers, buffers, strict=True):
            buffer.data.copy_(value)  # a batch norm has saved it, and its backward pass would see a write

    def _next(self, rank: int) -> None:
        ranks = len(self.turns)
        waiting = [r % ranks for r in range(rank + 1, rank + ranks + 1) if not self._has_ended[r % ranks]]
        if waiting:
            self.turns[waiting[0]].release()

    def _wait(self, rank: int) -> None:
        if not self.turns[rank].acquire(timeout=LONGEST_TURN):
            raise RuntimeError(f"Rank {rank} waited {LONGEST_TURN} seconds for its turn. Expected: shorter steps.")
        self.rank = rank
        if self.error is not None:
            raise self.error


def _apart(what: str) -> RuntimeError:
    return RuntimeError(f"{what}. Expected: ranks that call the same synchronised modules in the same order.")


def in_turns(meeting: Meeting, step: Callable[[int], Any], modules: Mapping[str, nn.Module]) -> list[Any]:
    """What `step(rank)` returns, of each rank, with batch statistics of these modules over all ranks.

    An error of one rank ends the others and is raised; gradients and buffers are then those of before.
    """
    ranks, grad = len(meeting.turns), torch.is_grad_enabled()
    results: list[Any] = [None] * ranks
    before, buffers = [p.grad for p in meeting.parameters], [b.clone() for b in meeting.buffers]

    def run(rank: int) -> None:
        try:
            meeting.begin(rank)
            # in the thread of the rank: a card's own thread would wait for its next task
            in_this_thread = torch.autograd.set_multithreading_enabled(False)
            with torch.set_grad_enabled(grad), in_this_thread, _Statistics(meeting, modules):
                results[rank] = step(rank)
        except BaseException as error:
            meeting.error = meeting.error or error
        finally:
            meeting.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    meeting.turns[0].release()
    for thread in threads:
        thread.join()
    kept = buffers if meeting.error is not None else meeting.final_buffers[0]
    meeting.put(before, kept)
    if meeting.error is not None:
        raise meeting.error
    return results


class _Statistics(TorchFunctionMode):
    """Gives batch norms of some modules, which are known by their running mean, the statistics of all ranks.

    It is around the emulation's mode, which has brought the operands into their formats and rounds the result.
    """

    def __init__(self, meeting: Meeting, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._meeting = meeting
        self._names = {id(module.running_mean): name for name, module in modules.items()}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        call = inspect.signature(F.batch_norm).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        named = call.arguments
        name = self._names.get(id(named["running_mean"]))
        if name is None or not named["training"]:
            return func(*args, **(kwargs or {}))
        x, weight, bias, eps = (named[word] for word in ("input", "weight", "bias", "eps"))
        y, mean, variance, count = _BatchNorm.apply(self._meeting, name, x, weight, bias, eps)
        with torch.no_grad():
            for running, new in ((named["running_mean"], mean), (named["running_var"], variance * count / (count - 1))):
                running.lerp_(new.to(running.dtype), named["momentum"])
        return y


def _over_ranks(parts: list[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance of all ranks' numbers, from theirs (Chan et al. 1983)."""
    counts, means, variances = (torch.stack(each) for each in zip(*parts, strict=True))
    counts = counts.unsqueeze(1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (counts * (variances + (means - mean) ** 2)).sum(0) / count


class _BatchNorm(PlainFunction):
    """A batch norm over the numbers of all ranks; each rank's gradient of weight and bias is that of its own loss."""

    @staticmethod
    def forward(
        ctx: Any, meeting: Meeting, name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        axes = [i for i in range(x.dim()) if i != 1]
        variance, mean = torch.var_mean(wide, axes, correction=0)
        here = torch.tensor(float(x.numel() // x.shape[1]), dtype=wide.dtype, device=x.device)
        count, mean, variance = _over_ranks(meeting.gather(f"the batch norm {name}", [here, mean, variance]))
        if count <= 1:
            raise ValueError(f"The batch norm {name} got one number per channel on all ranks together. Expected: more.")
        ctx.meeting, ctx.name, ctx.axes, ctx.count = meeting, name, axes, count
        ctx.has_bias, ctx.shape = bias is not None, [-1 if i == 1 else 1 for i in range(x.dim())]
        inverse = torch.rsqrt(variance + eps).view(ctx.shape)
        normal = (wide - mean.view(ctx.shape)) * inverse
        ctx.save_for_backward(normal, inverse, weight)
        y = normal if weight is None else normal * weight.to(wide.dtype).view(ctx.shape)
        y = y if bias is None else y + bias.to(wide.dtype).view(ctx.shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype, copy=True), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:  # type: ignore[override]
        normal, inverse, weight = ctx.saved_tensors
        wide = dy.to(normal.dtype)
        sums = [wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)]
        of_ranks = ctx.meeting.gather(f"the backward pass of the batch norm {ctx.name}", sums)
        total, total_normal = (torch.stack(each).sum(0).view(ctx.shape) / ctx.count for each in zip(*of_ranks))
        dx = (wide - total - normal * total_normal) * inverse
        if weight is not None:
            dx = dx * weight.to(normal.dtype).view(ctx.shape)
        of_weight = None if weight is None else sums[1].to(weight.dtype)
        return None, None, dx.to(dy.dtype), of_weight, sums[0].to(dy.dtype) if ctx.has_bias else None, None
