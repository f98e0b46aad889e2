"""Data parallelism in one process: gradients per rank, which are then summed as a collective sums them.

Ranks run in turns. Ranks that share batch statistics wait for one another in the middle of a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fpsim.border import require_module
from fpsim.checks import is_finite_number, require_flag, shown
from fpsim.emulation.casts import autocast_here
from fpsim.emulation.scope import active
from fpsim.formats.blocks import as_format
from fpsim.policies.policy import matches, no_match
from fpsim.tensors.reductions import all_reduce
from fpsim.torch_modes import PlainFunction

__all__ = ["Ranks"]

MIB = 1 << 20  # the size of DDP's first bucket
MOST_RANKS = 1024  # each rank is a thread


class Ranks:
    """Gradients of several ranks, computed one after the other in one process and summed as a collective sums them.

    Each rank has its own batch, dropout and batch statistics. DDP broadcasts buffers from rank 0: therefore every rank
    begins with the same buffers, and the buffers of rank 0 are kept. Gradients lie in buckets, each of which is a flat
    tensor that `all_reduce` sums. The result has the bits of DDP over gloo from its second step on.

    Some batch norms are synchronised: `nn.SyncBatchNorm`, and the batch norms named in `synchronised`. They have the
    mean and variance of all ranks' batches, and the gradient of both. At such a batch norm, each rank has to wait for
    the others, and `run` lets the ranks take turns.

    Args:
        model: the module whose parameters' `.grad` are reduced. The sum is added to gradients that are there already.
        fmt, order, rounding: as in `fpsim.all_reduce`. With fmt="bf16" this is DDP's `bf16_compress_hook`.
        averages: whether each rank's gradient is divided by the number of ranks before it is sent. The division is in
            float32, as in DDP, or after the cast to another format, as in DDP's hooks.
        buckets: lists of parameters, each in the order of its flat tensor. None takes the buckets that DDP has in its
            second step: in the order in which the gradients of rank 0 arrive, with 1 MiB in the first bucket and
            `bucket_cap_mb` in the others.
        bucket_cap_mb: the size of a bucket in MiB, if `buckets` is None.
        synchronised: batch norms whose statistics are those of all ranks, named by patterns as in
            `Policy(overrides=...)`.

    Raises:
        TypeError: if `model` is not a module; if a bucket holds anything but the model's parameters, or one of them
            twice; or if `synchronised` names a module that is not a batch norm with running statistics.
        ValueError: for an unknown format or order, or a pattern that matches nothing.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> ranks = Ranks(model, "bf16")
    >>> for x in torch.tensor([[[1.0, 256.0]], [[0.0, 2.0]]]):
    ...     with ranks.rank():
    ...         model(x).sum().backward()
    >>> ranks.reduce()  # (1 + 0) / 2, and (256 + 2) / 2
    2
    >>> model.weight.grad
    tensor([[  0.5000, 129.0000]])
    """

    def __init__(
        self,
        model: nn.Module,
        fmt: Any = "fp32",
        order: str = "ring",
        rounding: str = "nearest_even",
        averages: bool = True,
        buckets: Sequence[Sequence[nn.Parameter]] | None = None,
        bucket_cap_mb: float = 25,
        synchronised: Sequence[str | type[nn.Module]] = (),
    ) -> None:
        require_module(model)
        require_flag("averages", averages)
        if not is_finite_number(bucket_cap_mb) or bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={shown(bucket_cap_mb)} is no size. Expected: a number above 0, in MiB.")
        self._cap = bucket_cap_mb * MIB
        # Values that `all_reduce` does not accept raise here, before a rank has run.
        all_reduce([torch.zeros(1)], fmt, order, rounding)
        self._model, self._words, self._averages = model, (fmt, order, rounding), averages
        self._is_float32 = as_format(fmt) == as_format("fp32")
        self._buckets = None if buckets is None else _checked(buckets, model)
        self._synchronised = _batch_norms(model, synchronised)
        self._gradients: list[dict[nn.Parameter, Tensor | None]] = []
        self._arrived: list[nn.Parameter] = []  # parameters in the order in which their gradients on rank 0 arrived

    @contextmanager
    def rank(self) -> Iterator[int]:
        """Run the forward and backward passes of one rank; yields its number. A rank that raises is not counted.

        Raises RuntimeError if batch norms are synchronised, because their statistics need the other ranks' batches: use
        `run`.
        """
        if self._synchronised:
            raise RuntimeError(
                f"{', '.join([*self._synchronised][:3])} have the statistics of all ranks, and rank() knows one batch. "
                f"Expected: ranks.run(step, batches), which runs all ranks together."
            )
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        before = [(p, p.grad) for p in parameters]
        buffers = [(b, b.clone()) for b in self._model.buffers()]
        for p in parameters:
            p.grad = None
        is_done, arrived = False, dict[nn.Parameter, None]()
        hooks = [p.register_post_accumulate_grad_hook(lambda p: arrived.setdefault(p)) for p in parameters]
        try:
            yield len(self._gradients)
            is_done = True
        finally:
            for hook in hooks:
                hook.remove()
            gradients = {p: p.grad for p in parameters}
            for p, grad in before:
                p.grad = grad
            if self._gradients or not is_done:
                _put_back(buffers)
            if is_done:
                self._arrived = self._arrived if self._gradients else [*arrived]
                self._gradients.append(gradients)

    def run(self, step: Callable[[Any], Any], batches: Iterable[Any]) -> list[Any]:
        """Run the passes of all ranks: `step(batch)` once for each of the batches, each in its own thread.

        Ranks run one at a time, in their order, up to the next batch norm that is synchronised. Each rank has the CPU's
        random numbers to itself: a seed that a step sets holds for its rank only.

        An error of a step is raised. After any error, gradients and buffers are restored.

        Args:
            step: a function that runs forward and backward passes, such as `model(batch).sum().backward()`.
            batches: the batch of each rank.

        Returns:
            The results of `step`, in the order of ranks. `reduce` then sums the gradients.

        Raises:
            RuntimeError: if there are ranks that ran and were not reduced, or if ranks meet at different batch norms.

        >>> model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        >>> ranks = Ranks(model, synchronised=["0"])
        >>> _ = ranks.run(lambda x: model(x).sum().backward(), torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]]))
        >>> model[0].running_mean  # 0.1 of the mean of all four
        tensor([0.1500])
        """
        if self._gradients:
            raise RuntimeError(f"{len(self._gradients)} ranks ran before. Expected: ranks.reduce() in between.")
        if not callable(step):
            raise TypeError(f"step={shown(step)} cannot be called. Expected: a function of a batch.")
        if not isinstance(batches, Iterable):
            raise TypeError(f"batches={shown(batches)}. Expected: a list with the batch of each rank.")
        each = [*islice(batches, MOST_RANKS + 1)]
        if not 0 < len(each) <= MOST_RANKS:
            count = f"more than {MOST_RANKS}" if each else "none"
            raise ValueError(
                f"batches={shown(batches)} has {count}. Expected: one for each rank, at most {MOST_RANKS}."
            )
        meeting, arrived = Meeting(len(each), self._model), dict[nn.Parameter, None]()

        # The order in which the gradients of rank 0 arrive decides DDP's buckets.
        def note(p: nn.Parameter) -> None:
            if meeting.rank == 0:
                arrived.setdefault(p)

        hooks = [p.register_post_accumulate_grad_hook(note) for p in meeting.parameters]
        try:
            results = in_turns(meeting, lambda rank: step(each[rank]), self._synchronised)
        finally:
            for hook in hooks:
                hook.remove()
        self._arrived = [*arrived]
        self._gradients = [dict(zip(meeting.parameters, of, strict=True)) for of in meeting.gradients]
        return results

    def reduce(self) -> int:
        """Add the sum over the ranks to each `.grad`, and forget the ranks. Returns how many ranks there were.

        Raises RuntimeError if no rank ran, and TypeError if a parameter with a gradient is in no bucket; the ranks then
        stay.
        """
        ranks = self._gradients
        if not ranks:
            raise RuntimeError("No rank ran. Expected: with ranks.rank(): loss.backward(), once for each rank.")
        used = [p for p in self._model.parameters() if any(of.get(p) is not None for of in ranks)]
        buckets = self._as_ddp(used) if self._buckets is None else self._buckets
        if missing := {id(p) for p in used} - {id(p) for bucket in buckets for p in bucket}:
            raise TypeError(f"{len(missing)} parameters with a gradient are in no bucket. Expected: each in one.")
        for bucket in buckets:
            self._reduce([p for p in bucket if any(of.get(p) is not None for of in ranks)], ranks)
        self._gradients = []
        return len(ranks)

    def _as_ddp(self, used: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Cut parameters into DDP's buckets: a bucket ends with the parameter that fills it."""
        buckets: list[list[nn.Parameter]] = [[]]
        size, limit = 0, float(MIB)
        # Parameters that rank 0 did not use come last, in the model's order.
        for p in dict.fromkeys([*self._arrived, *used]):
            buckets[-1].append(p)
            size += p.numel() * p.element_size()
            if size >= limit:
                size, limit = 0, self._cap
                buckets.append([])
        return buckets

    def _reduce(self, bucket: list[nn.Parameter], ranks: list[dict[nn.Parameter, Tensor | None]]) -> None:
        if not bucket:
            return
        flat = []
        for of in ranks:
            # A parameter that a rank did not use has a gradient of zeros on that rank, as in DDP.
            parts = [torch.zeros_like(p) if (g := of.get(p)) is None else g for p in bucket]
            if any(g.is_sparse for g in parts):
                raise TypeError("A gradient is sparse. Expected: dense ones, as of nn.Embedding(sparse=False).")
            one = torch.cat([g.reshape(-1) for g in parts])
            flat.append(self._averaged(one, len(ranks)) if self._averages else one)
        total = all_reduce(flat, *self._words)
        for p, part in zip(bucket, total.split([p.numel() for p in bucket]), strict=True):
            grad = part.view_as(p)
            p.grad = grad.clone() if p.grad is None else p.grad + grad

    def _averaged(self, gradients: Tensor, ranks: int) -> Tensor:
        # DDP multiplies by the reciprocal, and its hooks divide: with three ranks the last bit differs.
        if self._is_float32:
            return gradients * (1.0 / ranks)
        return all_reduce([gradients], *self._words) / ranks


def _batch_norms(model: nn.Module, patterns: Any) -> dict[str, nn.Module]:
    """Return the modules that are synchronised, by name."""
    if not isinstance(patterns, list | tuple):
        raise TypeError(f"synchronised={shown(patterns)}. Expected: a list of patterns, such as ['bn1', 'body.*.bn'].")
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {name: m for name, m in modules.items() if isinstance(m, nn.SyncBatchNorm)}
    for pattern in patterns:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(f"synchronised has {shown(pattern)}. Expected: names, with * for parts, or module classes.")
        matched = {name: m for name, m in modules.items() if matches(pattern, name, m)}
        if not matched:
            raise ValueError(no_match(pattern, modules))
        found.update(matched)
    for name, module in found.items():
        if getattr(module, "running_mean", None) is None:
            raise TypeError(
                f"synchronised has {name or 'the model'}, {type(module).__name__}. Expected: batch norms with "
                f"running statistics, by which they are known."
            )
    return found


def _checked(buckets: Any, model: nn.Module) -> list[list[nn.Parameter]]:
    is_list = isinstance(buckets, list | tuple) and all(isinstance(bucket, list | tuple) for bucket in buckets)
    if not is_list:
        raise TypeError(f"buckets={shown(buckets)}. Expected: lists of parameters of the model, or None.")
    known = {id(p) for p in model.parameters()}
    for p in (p for bucket in buckets for p in bucket):
        if id(p) not in known:
            raise TypeError(
                f"buckets has {shown(p)}, which is no parameter of the model, or is there twice. Expected: each of its "
                f"parameters in one bucket."
            )
        known.discard(id(p))
    return [[*bucket] for bucket in buckets]


def _put_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


# The longest wait for a turn, in seconds. Without a limit, ranks would wait for ever for a rank whose thread died.
LONGEST_TURN = 3600


class Meeting:
    """Ranks as threads, of which one runs at a time, until it waits for the others.

    Ranks take turns in their order, so that a step is reproducible. Each rank has separate gradients, buffers and CPU
    random numbers, which are put aside while another rank runs. A rank begins with gradients of None, the buffers from
    before the run, and the random numbers that follow those of the rank before it.
    """

    def __init__(self, ranks: int, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [*model.buffers()]
        self.gradients: list[list[Tensor | None]] = [[] for _ in range(ranks)]
        self.final_buffers: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.rank = 0  # the rank that runs
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
        """Store the rank's gradients and buffers, and pass the turn to the next rank for good."""
        self.gradients[rank], self.final_buffers[rank] = self._taken()
        self._has_ended[rank] = True
        if self._parts and self.error is None:
            first = min(self._parts)
            self.error = _apart(f"Rank {rank} ended its step, and rank {first} waits at {self._parts[first][0]}")
        self._next(rank)

    def gather(self, where: str, parts: list[Tensor]) -> list[list[Tensor]]:
        """Wait until all ranks have come to `where`, and return their values, in the order of ranks."""
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
        """Set the gradients of the parameters, and the values of the buffers."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        for buffer, value in zip(self.buffers, buffers, strict=True):
            # The write goes through `.data`, which autograd does not count: a batch norm has saved the buffer, and its
            # backward pass would refuse a counted write.
            buffer.data.copy_(value)

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
    """Return `step(rank)` of each rank, with batch statistics of these modules over all ranks.

    An error of one rank ends the other ranks and is raised; gradients and buffers are then restored.
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
            shared.threads.add(threading.get_ident())
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(grad))
                # Backward passes run in the thread of the rank. On a card, autograd has one thread for the device.
                # While this thread waited in a batch norm, it could not run the pass of another rank.
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
    """Replaces `torch.batch_norm` while ranks run: synchronised batch norms use the statistics of all ranks.

    A batch norm is recognised by its running mean. Threads that are not ranks call torch's own function.
    """

    # This is not a TorchFunctionMode. An emulation calls torch.batch_norm with operands in their formats, and rounds
    # the result. A checkpoint that recomputes in the backward pass comes here too, where torch has taken all modes off.

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
        """Raise RuntimeError for a module in training mode that did not call `torch.batch_norm` in a rank."""
        missing = [name for name, module in modules.items() if module.training and name not in self.met]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} to have the statistics of all ranks, "
                f"and no rank called F.batch_norm there. Expected: modules that the step calls, whose forward is that "
                f"of torch's batch norms."
            )


def _over_ranks(parts: list[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance over all ranks, from the three numbers of each rank (Chan et al. 1983)."""
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
