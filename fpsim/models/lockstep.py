"""Ranks that meet in the middle of a pass: batch statistics over the batches of all ranks, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fpsim.emulation.casts import autocast_here
from fpsim.emulation.scope import active
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
    if active.emulation is not None:
        raise RuntimeError("Ranks run in threads, which fpsim.emulate around them does not reach. Use it in the step.")
    results: list[Any] = [None] * ranks
    shared, own, autocast = _Shared(meeting, modules), torch.batch_norm, autocast_here()
    before, buffers = [p.grad for p in meeting.parameters], [b.clone() for b in meeting.buffers]

    def run(rank: int) -> None:
        try:
            meeting.begin(rank)
            # in the thread of the rank: a card's own thread would wait for its next task
            shared.threads.add(threading.get_ident())
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                for enter in autocast:
                    stack.enter_context(enter())
                results[rank] = step(rank)
        except BaseException as error:
            meeting.error = meeting.error or error
        finally:
            meeting.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)]
    torch.batch_norm = shared  # type: ignore[assignment]
    try:
        for thread in threads:
            thread.start()
        meeting.turns[0].release()
        for thread in threads:
            thread.join()
        if meeting.error is None:
            shared.require_met(modules)
    except BaseException as error:
        meeting.error = meeting.error or error
    finally:
        torch.batch_norm = own
    kept = buffers if meeting.error is not None else meeting.final_buffers[0]
    meeting.put(before, kept)
    if meeting.error is not None:
        raise meeting.error
    return results


class _Shared:
    """Stands in for `torch.batch_norm` while ranks run: known batch norms have the statistics of all ranks.

    There, and not in a mode of functions: an emulation has brought the operands into their formats when it calls this,
    and rounds the result; and a checkpoint that computes again in the backward pass comes here too, where torch has
    taken all modes off. A batch norm is known by its running mean. Other threads are given torch's own.
    """

    def __init__(self, meeting: Meeting, modules: Mapping[str, nn.Module]) -> None:
        self._meeting, self._own = meeting, torch.batch_norm
        self._names = {id(module.running_mean): name for name, module in modules.items()}
        self.met: set[str] = set()
        self.threads: set[int] = set()

    def __call__(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
    ) -> Tensor:  # fmt: skip
        name = self._names.get(id(running_mean))
        if name is None or running_mean is None or running_var is None or threading.get_ident() not in self.threads:
            return self._own(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
        self.met.add(name)
        if not training:
            return self._own(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
        y, mean, variance, count = _BatchNorm.apply(self._meeting, name, input, weight, bias, eps)
        with torch.no_grad():
            for running, new in ((running_mean, mean), (running_var, variance * count / (count - 1))):
                running.lerp_(new.to(running.dtype), momentum)
        return y  # type: ignore[no-any-return]

    def require_met(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise RuntimeError for a module in training mode whose statistics nobody has asked for here."""
        missing = [name for name, module in modules.items() if module.training and name not in self.met]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} to have the statistics of all ranks, "
                f"and no rank called F.batch_norm there. Expected: modules that the step calls, whose forward is that "
                f"of torch's batch norms."
            )


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
        variance, mean = torch.var_mean(wide, axes, correction=0) if wide.numel() else wide.new_zeros(2, x.shape[1])
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
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
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
