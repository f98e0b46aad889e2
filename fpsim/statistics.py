"""What a format does to a tensor: underflow, overflow, SQNR, the exponents; for one tensor, or all of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpsim import kernels, ops
from fpsim.formats import FloatFormat
from fpsim.model import listeners
from fpsim.ops import RoundingSpec, rounding_spec

__all__ = ["Recording", "Tally", "record", "tally"]

# What is counted, in the order of an accumulator's integers.
COUNTS = ("count", "nonzero", "underflow", "subnormal", "overflow", "nonfinite", "exact")
EXPONENT_BIAS = 1023  # the histogram goes by the exponent field of a float64


@dataclass(frozen=True)
class Tally:
    """What rounding to `fmt` did to some numbers.

    count: elements. nonzero: finite and not zero. underflow: not zero, and zero once rounded. subnormal: rounded to a
    subnormal value. overflow: finite, and rounded to inf or NaN, or saturated by at least half an ulp. nonfinite: inf
    or NaN before. exact: finite and unchanged. amax: the largest finite magnitude. signal, noise: sums of squares of
    the values and of their changes, over elements finite before and after. exponents: {floor(log2|x|): elements}.
    """

    fmt: FloatFormat
    count: int
    nonzero: int
    underflow: int
    subnormal: int
    overflow: int
    nonfinite: int
    exact: int
    amax: float
    signal: float
    noise: float
    exponents: dict[int, int]

    @property
    def underflow_fraction(self) -> float:
        """Share of the non-zero elements that became zero; 0 where there are none."""
        return self.underflow / self.nonzero if self.nonzero else 0.0

    @property
    def overflow_fraction(self) -> float:
        """Share of all elements that overflowed or saturated; 0 where there are none."""
        return self.overflow / self.count if self.count else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise in dB, 10 log10(signal / noise); inf without noise, NaN without signal."""
        if self.signal == 0:
            return math.nan
        return 10 * math.log10(self.signal / self.noise) if self.noise else math.inf


class _Accumulator:
    """The sums behind a Tally, on the device of the tensors it is given; nothing goes to the host before `result`."""

    def __init__(self, fmt: FloatFormat, device: torch.device) -> None:
        self.fmt, self.calls = fmt, 0
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # signal, noise, amax
        self.exponents = torch.zeros(2048, dtype=torch.int64, device=device)
        self.limits = _limits(fmt)

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count what happened between `before` and `after`: same shape, any floating dtype."""
        self.calls += 1
        if before.device.type == "cpu":
            x = before.detach().to(torch.float64 if before.dtype is torch.float64 else torch.float32).contiguous()
            r = after.detach().to(x.dtype).contiguous()
            state = (t.data_ptr() for t in (self.counts, self.sums, self.exponents))
            kernels.tally_loop(x.element_size())(x.data_ptr(), r.data_ptr(), x.numel(), *state, *self.limits)
        else:
            self._add_on_device(before.detach(), after.detach())

    def _add_on_device(self, before: Tensor, after: Tensor) -> None:
        """The same as the CPU loop, in torch's own operations: no copy to the host, several passes."""
        smallest_normal, saturated_from, largest = self.limits
        x, r = before.double().flatten(), after.double().flatten()
        finite, magnitude, rounded = x.isfinite(), x.abs(), r.abs()
        nonzero = finite & (x != 0)
        overflow = finite & (~r.isfinite() | ((rounded == largest) & (magnitude >= saturated_from)))
        masks = (
            torch.ones_like(finite),
            nonzero,
            nonzero & (r == 0),
            finite & (rounded > 0) & (rounded < smallest_normal),
            overflow,
            ~finite,
            finite & (x == r),
        )
        self.counts += torch.stack([mask.sum() for mask in masks])
        both = finite & r.isfinite()
        self.sums[0] += torch.where(both, x * x, 0.0).sum()
        self.sums[1] += torch.where(both, (r - x) ** 2, 0.0).sum()
        if x.numel():
            self.sums[2] = torch.maximum(self.sums[2], torch.where(finite, magnitude, 0.0).amax())
        fields = (magnitude.view(torch.int64) >> 52).clamp(max=2047)
        self.exponents.index_add_(0, fields, nonzero.to(torch.int64))

    def result(self) -> Tally:
        exponents = self.exponents.cpu()
        present = exponents.nonzero().flatten().tolist()
        signal, noise, amax = self.sums.tolist()
        counts = dict(zip(COUNTS, self.counts.tolist(), strict=True))
        histogram = {field - EXPONENT_BIAS: int(exponents[field]) for field in present}
        return Tally(self.fmt, amax=amax, signal=signal, noise=noise, exponents=histogram, **counts)


@cache
def _limits(fmt: FloatFormat) -> tuple[float, float, float]:
    """Smallest normal, the magnitude from which saturation is counted, and the largest value."""
    half_ulp = math.ldexp(0.5, math.frexp(fmt.largest)[1] - 1 - fmt.mantissa_bits)
    return fmt.smallest_normal, fmt.largest + half_ulp, fmt.largest


def tally(
    x: Tensor | np.ndarray[Any, Any],
    fmt: str | FloatFormat,
    log2_scale: int = 0,
    rounding: str = "nearest_even",
    overflow: str | None = None,
) -> Tally:
    """Count what rounding `x`, scaled by `2**log2_scale`, to `fmt` would do; `x` itself stays.

    x: any shape and strides. The tally's amax, signal, noise and exponents are those of the scaled numbers.
    Raises as `round_to` does, and TypeError for a scale that is no integer.

    >>> t = tally(torch.tensor([1.0, 1e-9, 1e6, 0.0]), "fp16")
    >>> t.underflow, t.overflow, t.exact, t.exponents
    (1, 1, 2, {-30: 1, 0: 1, 19: 1})
    >>> tally(torch.tensor([1e-9]), "fp16", log2_scale=10).underflow
    0
    """
    if isinstance(log2_scale, bool) or not isinstance(log2_scale, int):
        raise TypeError(f"log2_scale is {log2_scale!r}. Possible: an integer, the exponent of a power of two.")
    spec = rounding_spec(fmt, rounding, overflow)
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(np.array(x, order="C"))
    ops._require_floating(x)
    x = x.detach()
    if log2_scale:
        x = torch.ldexp(x.double(), torch.tensor(log2_scale, device=x.device))  # exact: float64 has exponents to spare
    sums = _Accumulator(spec.fmt, x.device)
    sums.add(x, ops._rounded(x.double() if x.dtype in (torch.float16, torch.bfloat16) else x, spec))
    return sums.result()


def lost_between(before: Tensor, after: Tensor, largest: float, log2_scale: Tensor) -> Tensor:
    """What was lost when `before` was rounded to `after`, as three int64 on their device, nothing copied to the host.

    Zeros before; other elements that became zero; elements that were finite and are not, or whose magnitude was above
    `largest * 2**-log2_scale`, where a format that saturates loses them. before, after: same shape and floating dtype,
    any strides. log2_scale: one integer on their device.

    >>> x, r = torch.tensor([0.0, 1e-9, 1.0, 5.0]), torch.tensor([0.0, 0.0, 1.0, 4.0])
    >>> lost_between(x, r, 4.0, torch.tensor([0])).tolist()
    [1, 1, 1]
    """
    if before.device.type != "cpu":
        return _lost_on_device(before, after, largest, log2_scale)
    wide = torch.float64 if before.dtype is torch.float64 else torch.float32
    x, r = (t.detach().to(wide).contiguous() for t in (before, after))
    parts = ops.parts_of(x.numel())
    counts = torch.zeros((len(parts), 3), dtype=torch.int64, device=x.device)
    limit, size, row = math.ldexp(largest, -int(log2_scale)), x.element_size(), counts.data_ptr()
    places = [(first * size, length, row + 24 * i) for i, (first, length) in enumerate(parts)]
    calls = [(x.data_ptr() + at, r.data_ptr() + at, length, limit, to) for at, length, to in places]
    ops.run_parts(kernels.lost_loop(size), calls, x, r, counts)
    return counts.sum(0)


def _lost_on_device(before: Tensor, after: Tensor, largest: float, log2_scale: Tensor) -> Tensor:
    """The same as the CPU loop, in torch's own operations."""
    magnitude, rounded = before.detach().abs().double(), after.detach().abs()
    limit = torch.ldexp(torch.full_like(log2_scale, largest, dtype=torch.float64), -log2_scale)
    overflow = magnitude.isfinite() & (~rounded.isfinite() | (magnitude > limit))
    return torch.stack([m.sum() for m in (magnitude == 0, (magnitude != 0) & (rounded == 0), overflow)])


class Recording:
    """Tallies per site and role of a model that runs; see `record`."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._seen: Counter[tuple[str, str]] = Counter()
        self._sums: dict[tuple[str, str, RoundingSpec], _Accumulator] = {}

    def wants(self, site: str, role: str) -> bool:
        """Whether this call of a site is one of those that are tallied."""
        self._seen[site, role] += 1
        return (self._seen[site, role] - 1) % self._every == 0

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: RoundingSpec) -> None:
        """The observer: called by the emulation for each tensor that it wants, before and after it is rounded."""
        key = (site, role, spec)
        if key not in self._sums:
            self._sums[key] = _Accumulator(spec.fmt, before.device)
        self._sums[key].add(before, after)

    def continue_from(self, other: Recording) -> None:
        """Go on where another recording is, for instance one that was saved and loaded."""
        self._every, self._seen, self._sums = other._every, other._seen, other._sums

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._seen.clear()
        self._sums.clear()

    def tallies(self) -> dict[tuple[str, str, str], Tally]:
        """{(site, role, rounding): Tally}, in the order in which the sites were first met."""
        return {(site, role, str(spec)): sums.result() for (site, role, spec), sums in self._sums.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One row per site and role, ready for a DataFrame; here the numbers come to the host."""
        rows = []
        for (site, role, spec), sums in self._sums.items():
            t = sums.result()
            row: dict[str, Any] = {"site": site, "role": role, "format": str(spec.fmt), "rounding": spec.rounding}
            row["calls"] = sums.calls
            row.update({name: getattr(t, name) for name in (*COUNTS, "amax", "sqnr_db")})
            rows.append(row)
        return rows


@contextmanager
def record(model: nn.Module, every: int = 1, into: Recording | None = None) -> Iterator[Recording]:
    """Tally what rounding does at every site of a quantised model, while the block runs it forward and backward.

    A site is a module's name and the operation in it ("layer1.conv1:conv2d"); a role is "weight", "activation",
    "error" or "weight_grad". every: tally each n-th call of a site. into: a recording that goes on, with its own
    `every`. Recording changes no result.
    Raises ValueError for a model that is not quantised.

    >>> import fpsim
    >>> model = fpsim.quantize(nn.Linear(3, 1, bias=False), "fp16")
    >>> with record(model) as recording:
    ...     (model(torch.ones(2, 3)) * 1e-8).sum().backward()
    >>> [(row["site"], row["underflow"]) for row in recording.rows() if row["role"] == "error"]
    [(':linear', 2)]
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} is impossible. Possible: 1 for every call of a site, n for each n-th.")
    recording = Recording(every) if into is None else into
    registered = listeners(model)
    busy = [listener for listener in registered if listener.observer is not None]
    if busy:
        raise ValueError("This model is being recorded already. Leave the other `with fpsim.record(...)` block first.")
    for listener in registered:
        listener.observer = recording
    try:
        yield recording
    finally:
        for listener in registered:
            listener.observer = None
