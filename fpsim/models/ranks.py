"""Data parallelism in one process: each rank's gradients apart, then summed as a collective sums them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_module
from fpsim.checks import is_finite_number, require_flag, shown
from fpsim.formats.blocks import as_format
from fpsim.models.lockstep import Meeting, in_turns
from fpsim.policies.policy import matches, no_match
from fpsim.tensors.reductions import all_reduce

__all__ = ["Ranks"]

MIB = 1 << 20  # of DDP's first bucket
MOST_RANKS = 1024  # each is a thread


class Ranks:
    """Gradients of several ranks, computed one after the other in one process and summed as a collective sums them.

    Each rank has its own batch, dropout and batch statistics. DDP broadcasts buffers from rank 0: so every rank begins
    with the same ones, and those of rank 0 are kept. Gradients lie in buckets, each a flat tensor that `all_reduce`
    sums. The result has the bits of DDP over gloo from its second step on.

    Batch norms that ranks synchronise, `nn.SyncBatchNorm` and those named in `synchronised`, have the mean and variance
    of all ranks' batches, and their gradient: the ranks have to meet there, and `run` has them take turns.

    Args:
        model: the module whose parameters' `.grad` are reduced. The sum is added to gradients that are there already.
        fmt, order, rounding: as in `fpsim.all_reduce`. In "bf16" it is DDP's `bf16_compress_hook`.
        averages: whether each rank's gradient is divided by the number of ranks before it is sent: in float32, as DDP
            does, or after the cast to another format, as its hooks do.
        buckets: lists of parameters, each in the order of its flat tensor. None takes DDP's buckets of its second step:
            in the order in which the gradients of rank 0 arrive, 1 MiB in the first, `bucket_cap_mb` in the others.
        bucket_cap_mb: the size of a bucket if `buckets` is None, in MiB.
        synchronised: batch norms whose statistics are those of all ranks: patterns as in `Policy(overrides=...)`.

    Raises:
        TypeError: if `model` is no module, a bucket holds no parameter of it, or one twice, or what is to be
            synchronised is no batch norm with running statistics.
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
        all_reduce([torch.zeros(1)], fmt, order, rounding)  # which raises for what it does not take
        self._model, self._words, self._averages = model, (fmt, order, rounding), averages
        self._is_float32 = as_format(fmt) == as_format("fp32")
        self._buckets = None if buckets is None else _checked(buckets, model)
        self._synchronised = _batch_norms(model, synchronised)
        self._gradients: list[dict[nn.Parameter, Tensor | None]] = []
        self._arrived: list[nn.Parameter] = []  # parameters in the order in which rank 0's gradients were there

    @contextmanager
    def rank(self) -> Iterator[int]:
        """Run the forward and backward passes of one rank; yields its number. A rank that raises is not counted.

        Raises RuntimeError if batch norms are synchronised: their statistics need the other ranks' batches, and `run`.
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
        """Run the passes of all ranks: `step(batch)` once for each of the batches, in a thread of its own each.

        One rank runs at a time, in their order, up to the next batch norm that is synchronised. Each has the CPU's
        random numbers to itself: a seed that a step sets is that of its rank.

        step: runs forward and backward passes, as `model(batch).sum().backward()`.
        Returns what `step` returned, in the order of ranks. `reduce` then sums the gradients.
        Raises RuntimeError if ranks ran that were not reduced, or if ranks meet at different batch norms; and what a
        step raises. Gradients and buffers are then those of before.

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
        """Add the sum over the ranks to each `.grad`, and forget the ranks. Returns how many there were.

        Raises RuntimeError if no rank ran, TypeError if a parameter with a gradient is in no bucket; the ranks stay.
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
        """A bucket ends with the parameter that fills it."""
        buckets: list[list[nn.Parameter]] = [[]]
        size, limit = 0, float(MIB)
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
        for of in ranks:  # a parameter that a rank did not use has a gradient of zeros there, as in DDP
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
        if self._is_float32:
            return gradients * (1.0 / ranks)  # DDP multiplies, and its hooks divide: a last bit of three ranks
        return all_reduce([gradients], *self._words) / ranks


def _batch_norms(model: nn.Module, patterns: Any) -> dict[str, nn.Module]:
    """The modules that are synchronised, by name."""
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
