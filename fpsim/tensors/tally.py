"""Tally of a rounding: underflow, overflow, SQNR and exponents of a tensor."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import is_whole, shown
from fpsim.formats.blocks import BlockFormat, Format
from fpsim.formats.codebook import Codebook
from fpsim.formats.fixed_point import FixedPoint
from fpsim.kernels.core import BINARY64
from fpsim.kernels.moments import partial_words
from fpsim.kernels.statistics import (
    AMAX,
    BLOCK_SATURATED,
    BLOCK_SUBNORMAL,
    ELEMENT_COUNTS,
    EXPONENT_BIAS,
    EXPONENT_FIELDS,
    LARGEST_SCALE,
    LOST_COUNTS,
    SMALLEST_SCALE,
    TALLY_ALONG,
    TALLY_AMAX,
    TALLY_COUNTS,
    TALLY_DEAD_ZONE,
    TALLY_NOISE,
    TALLY_OVERFLOW,
    TALLY_SIGNAL,
    TALLY_SPREAD,
    TALLY_SUBNORMAL,
    TALLY_SUMS,
)
from fpsim.kernels.tally import CARD_SUMS, cuda_lost, cuda_tally, lost_loop, tally_loop
from fpsim.tensors.block_tally import blocks_between
from fpsim.tensors.cuts import Cut, axis_pair, require_no_axis
from fpsim.tensors.launch import parts_of, rounded, run_on_card, run_parts, to_float64
from fpsim.tensors.moments import amax_of
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import (
    BlockSpec,
    Spec,
    address_of,
    any_spec,
    require_float32,
    require_floating,
    require_ndarray,
    require_numbers,
    saturated_from,
    under_transform,
)
from fpsim.torch_modes import layers_behind

__all__ = [
    "CHUNK",
    "Accumulator",
    "Tally",
    "UpdateCounts",
    "lost_between",
    "row_of",
    "shape_between",
    "tally",
    "wanted_and_lost",
]

SMALL_EXPONENT = -64
SMALL = 2.0**SMALL_EXPONENT  # a tensor below it is scaled to normal numbers before `shape_between`
# The number of elements of an update that are counted at once on a CPU, so that intermediate tensors stay in its cache.
CHUNK = 2**16


class ErrorShares(NamedTuple):
    """Shares of the parts of a rounding's noise (the sum of squared errors): three numbers whose sum is 1.

    The error of a number x that becomes r is `r - x = b x + (r - (1 + b) x)`, where b is the bias of the scale. The
    noise consists of three sums of squares: of the first term over all numbers, of the second term over the numbers
    that become zero, and of the second term over the others. They add up to the noise, because the first term is
    orthogonal to the second. (The three names are those of arXiv 2605.20402, which measures the first part against a
    scale that is not a power of two. Here the numbers themselves determine this part, so that formats without scales
    have it too.)

    Args:
        scale: the share that arises because all numbers came out too small or too large, as when the largest number of
            each block saturates.
        dead_zone: the share of the numbers that became zero.
        grid: the share of all other numbers, which moved to the nearest number of the format, or to a neighbour.
    """

    scale: float
    dead_zone: float
    grid: float


@dataclass(frozen=True)
class Tally:
    """Counts and sums that describe a rounding of some numbers to `fmt`.

    The counts of blocks and scales are 0 for formats without shared scales. `row_bias` and `kurtosis` are means over
    those gradients of a recording that are not all zero. They are None for tensors that are not gradients.

    Args:
        count: the number of elements.
        nonzero: the number of elements that are finite and not zero.
        underflow: the number of elements that are not zero, and become zero.
        subnormal: the number of elements that become a subnormal value; fixed point has none.
        overflow: the number of finite elements that become inf or NaN, or saturate by at least half an ulp.
        nonfinite: the number of elements that were inf or NaN before.
        exact: the number of finite elements that stay as they were.
        amax: the largest finite magnitude.
        signal: the sum of the squares of the values, over the elements that are finite before and after. Masks
            (float32's largest number) are left out, and a square up to 2**-1022 is taken as 0.
        noise: the sum of the squares of the changes, over the same elements.
        dead_zone: the part of `noise` from elements that become zero.
        along: the sum of the products of a value and its change, over the same elements as `signal`.
        exponents: {floor(log2|x|): elements}.
        blocks: the number of blocks.
        zero_blocks: the number of blocks in which all elements are zeros or masks. The fields below do not count these
            blocks, nor blocks whose scale is NaN because of an infinity or NaN.
        scale_underflow: the number of blocks whose scale would be below the smallest of its format. The scale becomes
            the smallest, or 0 if 0 is nearer, which turns all elements into zeros.
        scale_overflow: the number of blocks whose scale would be beyond the largest of its format (by at least half an
            ulp, unless the largest is a power of two), so that elements saturate.
        log2_scale_spread: log2 of the ratio of the largest scale to the smallest scale above 0, in the tensor where
            this ratio is the largest. Second scales are not counted.
        row_bias: the errors of each row are summed; this is the sum of the magnitudes of these sums, divided by the sum
            of the magnitudes of all elements. It is near 0 where the errors of a row cancel, and 1/2 if all small
            elements of a cross entropy's gradient become zero. Rows lie along the features: along the last dimension,
            or along the channels of a convolution.
        kurtosis: the mean fourth power divided by the square of the mean square, over the elements that are not zero.
            It is 3 for a normal distribution.
    """

    fmt: Format
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
    blocks: int = 0
    zero_blocks: int = 0
    scale_underflow: int = 0
    scale_overflow: int = 0
    log2_scale_spread: float = 0.0
    dead_zone: float = 0.0
    along: float = 0.0
    row_bias: float | None = None
    kurtosis: float | None = None

    @property
    def underflow_fraction(self) -> float:
        """Share of the non-zero elements that became zero; 0 without such elements."""
        return self.underflow / self.nonzero if self.nonzero else 0.0

    @property
    def overflow_fraction(self) -> float:
        """Share of all elements that overflowed or saturated; 0 without elements."""
        return self.overflow / self.count if self.count else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise in dB, 10 log10(signal / noise); inf without noise, NaN without signal."""
        if self.signal == 0:
            return math.nan
        return 10 * math.log10(self.signal / self.noise) if self.noise else math.inf

    @property
    def scale_bias(self) -> float:
        """Relative bias of all magnitudes, above 0 if they came out too large: `along / signal`; 0 without signal.

        It is the b for which `(1 + b) x` is nearest to the rounded numbers. The bias of a product is the sum of the
        biases of its two operands, and a deep model multiplies the factors `1 + b` of its layers. The rest of the error
        is orthogonal to the numbers.
        """
        return self.along / self.signal if self.signal else 0.0

    @property
    def error_shares(self) -> ErrorShares:
        """Noise in three parts: from the bias of the scale, in the dead zone, and on the grid. All are 0 without noise.

        >>> t = tally(torch.tensor([7.5, 1.1, 0.2, 4.0]), "e2m1fn per 4 e8m0")  # to 6, 1, 0, 4
        >>> f"{t.scale_bias:.3f}", [round(share, 3) for share in t.error_shares]
        ('-0.155', [0.769, 0.012, 0.219])
        """
        if not self.noise:
            return ErrorShares(0.0, 0.0, 0.0)
        scale = self.along * self.scale_bias / self.noise
        # For a number that became zero, the second term of the error is -(1 + b) x.
        left = 1 + self.scale_bias
        dead_zone = self.dead_zone * left * left / self.noise
        return ErrorShares(scale, dead_zone, max(1 - scale - dead_zone, 0.0))


class Accumulator:
    """The sums behind a Tally, on the device of the tensors; nothing is copied to the host before `result`."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.calls = spec, 0
        self.counts = torch.zeros(len(TALLY_COUNTS), dtype=torch.int64, device=device)
        self.sums = torch.zeros(len(TALLY_SUMS), dtype=torch.float64, device=device)
        self.exponents = torch.zeros(EXPONENT_FIELDS, dtype=torch.int64, device=device)
        self.shape = torch.zeros(3, dtype=torch.float64, device=device)  # row_bias, kurtosis and count of gradients
        self.limits = _limits(spec.fmt)

    def add(self, before: Tensor, after: Tensor, cut: Cut | None = None, row: int | None = None) -> None:
        """Count the effects of a rounding from `before` to `after`, which have the same shape and any floating dtype.

        cut: the cut of both into blocks, for a format whose numbers share scales.
        row: the dimension along which the rows of a gradient lie. If it is given, `row_bias` and `kurtosis` are
            computed too, which doubles the time.
        """
        self.calls += 1
        # The device differs if a recording was loaded, or if the model was moved.
        if self.counts.device != before.device:
            self._move(before.device)
        if row is not None:
            # The statistics of a gradient that is all zero are NaN here, and are not counted.
            shape = shape_between(before, after, row)
            self.shape += torch.cat([shape, shape.new_ones(1)]).masked_fill(shape.isnan().any(), 0.0)
        x, r = _comparable(before.detach(), after.detach())
        if x.is_cpu:
            state = (t.data_ptr() for t in (self.counts, self.sums, self.exponents))
            tally_loop(x.element_size())(address_of(x), address_of(r), x.numel(), *state, *self.limits)
        elif x.numel():
            self._add_on_card(x, r)
        if isinstance(self.spec, BlockSpec):
            assert cut is not None
            self._add_blocks(blocks_between(before, after, self.spec, cut))

    def _move(self, device: torch.device) -> None:
        self.counts, self.sums = self.counts.to(device), self.sums.to(device)
        self.exponents, self.shape = self.exponents.to(device), self.shape.to(device)

    def _add_blocks(self, row: Tensor) -> None:
        self.counts[ELEMENT_COUNTS:] += row[: len(TALLY_COUNTS) - ELEMENT_COUNTS]
        self.counts[TALLY_SUBNORMAL] += row[BLOCK_SUBNORMAL]
        self.counts[TALLY_OVERFLOW] += row[BLOCK_SATURATED]
        smallest, largest = row[SMALLEST_SCALE].view(torch.float64), row[LARGEST_SCALE].view(torch.float64)
        spread = torch.where(largest > 0, torch.log2(largest / smallest), 0.0)
        self.sums[TALLY_SPREAD] = torch.maximum(self.sums[TALLY_SPREAD], spread)

    def _add_on_card(self, x: Tensor, r: Tensor) -> None:
        from fpsim.compiling.card import array_words

        n, size, blocks = x.numel(), x.element_size(), partial_words(x.numel(), x.element_size())[0]
        sums = torch.zeros((blocks, CARD_SUMS), dtype=torch.float64, device=x.device)
        amax = torch.zeros(1, dtype=torch.int64, device=x.device)
        arrays = (array_words(address_of(t), tuple(t.shape), 8) for t in (self.counts, self.exponents, amax))
        words = (word for array in arrays for word in array)
        limits = map(BINARY64.bits, self.limits)
        arguments = address_of(x), address_of(r), n, *limits, *words, address_of(sums)
        run_on_card(cuda_tally(size), x, blocks, arguments)
        total = sums.sum(0)
        # Slices, because a list of indices would be copied to the card.
        self.sums[TALLY_SIGNAL : TALLY_NOISE + 1] += total[:2]
        self.sums[TALLY_DEAD_ZONE : TALLY_ALONG + 1] += total[2:]
        self.sums[TALLY_AMAX] = torch.maximum(self.sums[TALLY_AMAX], amax.view(torch.float64)[0])

    def result(self) -> Tally:
        """Copy all sums to the host, and return the tally."""
        exponents = self.exponents.cpu()
        present = exponents.nonzero().flatten().tolist()
        sums = dict(zip(TALLY_SUMS, self.sums.tolist(), strict=True))
        counts = dict(zip(TALLY_COUNTS, self.counts.tolist(), strict=True))
        histogram = {field - EXPONENT_BIAS: int(exponents[field]) for field in present}
        *totals, tensors = self.shape.tolist()
        row_bias, kurtosis = (total / tensors for total in totals) if tensors else (None, None)
        return Tally(self.spec.fmt, exponents=histogram, row_bias=row_bias, kurtosis=kurtosis, **sums, **counts)


def _comparable(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors, contiguous, in the wider of their two containers."""
    if torch.float64 in (before.dtype, after.dtype):
        return to_float64(before), to_float64(after)
    return before.float().contiguous(), after.float().contiguous()


@cache
def _limits(fmt: Format) -> tuple[float, float, float]:
    """Return the smallest normal, the magnitude from which saturation is counted, and the largest value."""
    # The limits of an element in a block depend on the block's scale: see blocks_between.
    if isinstance(fmt, BlockFormat):
        return 0.0, math.inf, math.inf
    return 0.0 if isinstance(fmt, FixedPoint | Codebook) else fmt.smallest_normal, saturated_from(fmt), fmt.largest


MOST_LOG2_SCALE = 1022  # 2**-1074 is float64's smallest magnitude, 2**1023 its largest power of two


def tally(
    x: Tensor | np.ndarray[Any, Any],
    fmt: str | Format,
    log2_scale: int = 0,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    axis: int | tuple[int, int] | None = None,
) -> Tally:
    """Count the effects of rounding `x`, scaled by `2**log2_scale`, to `fmt`; `x` itself stays as it is.

    The tally's amax, signal, noise and exponents are those of the scaled numbers.

    Args:
        x: a tensor or ndarray that `round_to` takes, any shape and strides.
        fmt, rounding, overflow, axis: as in `round_to`.
        log2_scale: the exponent of the scale; 0 for a format whose numbers share scales.

    Raises:
        ValueError: as `round_to` does.
        TypeError: as `round_to` does, and for a scale that is not an integer.

    >>> t = tally(torch.tensor([1.0, 1e-9, 1e6, 0.0]), "fp16")
    >>> t.underflow, t.overflow, t.exact, t.exponents
    (1, 1, 2, {-30: 1, 0: 1, 19: 1})
    >>> tally(torch.tensor([1e-9]), "fp16", log2_scale=10).underflow
    0
    >>> t = tally(torch.tensor([[7.5, 1.0], [0.0, 0.0], [0.0, 24.0]]), "mxfp4")
    >>> t.blocks, t.zero_blocks, t.log2_scale_spread, t.overflow
    (3, 1, 2.0, 1)
    """
    if not is_whole(log2_scale):
        raise TypeError(f"log2_scale is {shown(log2_scale)}. Expected: an integer, the exponent of a power of two.")
    if abs(log2_scale) > MOST_LOG2_SCALE:
        raise ValueError(
            f"log2_scale={shown(log2_scale)} is out of range. Expected: -{MOST_LOG2_SCALE} to {MOST_LOG2_SCALE}, "
            f"beyond which float64 loses what is scaled."
        )
    spec = any_spec(fmt, rounding, overflow)
    if isinstance(x, np.ndarray):
        require_ndarray(x)
        x = torch.from_numpy(np.array(x, order="C"))
    require_floating(x)
    if any(True for _ in layers_behind(x)):
        raise under_transform("tally")
    require_numbers(x)
    x = x.detach().resolve_neg()
    sums = Accumulator(spec, x.device)
    if isinstance(spec, BlockSpec):
        if log2_scale:
            raise ValueError(f"log2_scale={log2_scale} was given with {spec.fmt}, which computes its scales. Omit it.")
        require_float32(x)
        cut = Cut(*axis_pair(axis))
        sums.add(x, rounded_blocks(x, spec, cut.axis, cut.across), cut)
        return sums.result()
    require_no_axis(axis, fmt)
    # 16-bit tensors are widened even without a scale: their dtype need not hold the format's values.
    if log2_scale or x.dtype in (torch.float16, torch.bfloat16):
        x = to_float64(x, int(log2_scale))
    sums.add(x, rounded(x, spec))
    return sums.result()


def lost_between(before: Tensor, after: Tensor, largest: float, log2_scale: Tensor) -> Tensor:
    """Count the losses of a rounding from `before` to `after`: return the LOST_COUNTS, without a copy to the host.

    The three counts are: elements that were zero before; other elements that became zero; and elements that were finite
    and overflowed. An element overflows if it is not finite afterwards, or if its magnitude was above `largest *
    2**-log2_scale`, where a saturating format clips it.

    before, after: tensors of the same shape and floating dtype, with any strides.
    largest: the largest value of the format.
    log2_scale: the exponent of the scale of this rounding, one integer on the same device.
    Returns three int64 on the same device.

    >>> x, r = torch.tensor([0.0, 1e-9, 1.0, 5.0]), torch.tensor([0.0, 0.0, 1.0, 4.0])
    >>> lost_between(x, r, 4.0, torch.tensor([0])).tolist()
    [1, 1, 1]
    """
    x, r = _comparable(before.detach(), after.detach())
    if not x.is_cpu:
        return _lost_on_card(x, r, largest, log2_scale)
    parts = parts_of(x.numel())
    counts = torch.zeros((len(parts), len(LOST_COUNTS)), dtype=torch.int64, device=x.device)
    limit, size, row = math.ldexp(largest, -int(log2_scale)), x.element_size(), counts.data_ptr()
    places = [(first * size, length, row + i * 8 * len(LOST_COUNTS)) for i, (first, length) in enumerate(parts)]
    source, rounded = address_of(x), address_of(r)
    calls = [(source + at, rounded + at, length, limit, to) for at, length, to in places]
    run_parts(lost_loop(size), calls, x, r, counts)
    return counts.sum(0)


def _lost_on_card(x: Tensor, r: Tensor, largest: float, log2_scale: Tensor) -> Tensor:
    from fpsim.compiling.card import array_words

    counts = torch.zeros(len(LOST_COUNTS), dtype=torch.int64, device=x.device)
    if n := x.numel():
        scale, out = log2_scale.to(x.device, torch.int64), array_words(address_of(counts), tuple(counts.shape), 8)
        arguments = address_of(x), address_of(r), n, BINARY64.bits(largest), address_of(scale), *out
        run_on_card(cuda_lost(x.element_size()), x, partial_words(n, x.element_size())[0], arguments)
    return counts


def wanted_and_lost(before: Tensor, after: Tensor, intended: Tensor) -> tuple[int, int]:
    """Count the updates that are not zero, and how many of these left their number unchanged.

    intended: the update to be added, or any tensor that is zero where the update is.

    >>> weight = torch.tensor([1.0, 1.0, 2.0**-10])
    >>> update = torch.tensor([0.0, 2.0**-10, 2.0**-10])
    >>> wanted_and_lost(weight, (weight + update).bfloat16().float(), update)
    (2, 1)
    """
    wanted = intended != 0
    return int(torch.count_nonzero(wanted)), int(torch.count_nonzero(wanted & (before == after)))


@dataclass
class UpdateCounts:
    """Counts of updates: `wanted` were not zero, and `lost` of these changed nothing.

    changes, flips: how many numbers changed, and how many of these changed in the direction opposite to their last
        change.
    inner, norm: the inner product <intended, effective update>, and the squared norm of the intended update.
    """

    wanted: int = 0
    lost: int = 0
    changes: int = 0
    flips: int = 0
    inner: float = 0.0
    norm: float = 0.0

    @property
    def share(self) -> float | None:
        """Share of lost updates; None if there were no updates."""
        return self.lost / self.wanted if self.wanted else None

    @property
    def edq(self) -> float | None:
        """Ratio of effective to intended update (Collage, arXiv 2405.03637): 1 if nothing is lost."""
        return self.inner / self.norm if self.norm else None

    def add(self, other: UpdateCounts) -> None:
        """Add the counts of another tensor, or of another step."""
        for name in UpdateCounts.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @classmethod
    def of(cls, before: Tensor, after: Tensor, intended: Tensor, signs: Tensor | None = None) -> UpdateCounts:
        """Count one step of one tensor.

        before, after, intended: tensors of the same shape, dtype and device.
        signs: an int8 tensor with the sign of each number's last change, which this method updates. With None, flips
            are not counted.
        """
        signs = torch.zeros_like(before, dtype=torch.int8) if signs is None else signs
        parts = [x.reshape(-1) for x in (before, after, intended, signs)]
        length = CHUNK if not before.is_cuda else max(before.numel(), 1)
        counts = cls()
        for chunk in zip(*(x.split(length) for x in parts), strict=True):
            counts.add(_counted(*chunk))
        return counts


def _counted(before: Tensor, after: Tensor, intended: Tensor, signs: Tensor) -> UpdateCounts:
    effective, has_changed, wide = after - before, after != before, intended.double()
    new = effective.sign().to(torch.int8)
    flips = int(torch.count_nonzero(new * signs < 0))
    torch.where(has_changed, new, signs, out=signs)
    wanted, lost = wanted_and_lost(before, after, intended)
    inner, norm = float(torch.dot(wide, effective.double())), float(torch.dot(wide, wide))
    return UpdateCounts(wanted, lost, int(torch.count_nonzero(has_changed)), flips, inner, norm)


def shape_between(before: Tensor, after: Tensor, row: int = -1) -> Tensor:
    """Return two statistics of a whole gradient: the bias of its row sums, and its kurtosis.

    row_bias: the errors of each row are summed, and the magnitudes of these sums are added up and divided by the sum of
        all magnitudes. The gradient of a cross entropy has in each row one large element below 0, and many small ones
        above 0 that add up to the same magnitude: if the small ones become zero, row_bias is 1/2. Unbiased rounding
        leaves noise, so that row_bias is not exactly 0.
    kurtosis: the mean fourth power divided by the square of the mean square, over the elements that are not zero. It is
        3 for normal numbers, and 1 for equal magnitudes.

    before, after: tensors of the same shape and floating dtype. Elements that are not finite in either are left out.
    row: the dimension along which a row lies. A tensor of fewer dimensions is one row.
    Returns two float64 on the same device; NaN if all elements are zero.

    >>> g = torch.tensor([[-1.0, 0.25, 0.25, 0.25, 0.25]])
    >>> [round(value, 3) for value in shape_between(g, g.round()).tolist()]
    [0.5, 3.25]
    """
    x, r = (t.detach() if t.dtype == torch.float64 else t.detach().float() for t in (before, after))
    # Small numbers are scaled, because the processor may flush subnormals to zero. Both statistics are the same at any
    # scale.
    if x.is_cpu and x.dtype is torch.float32 and float(amax_of(x)[AMAX]) < SMALL:
        x, r = (to_float64(t, -SMALL_EXPONENT).float() for t in (x, r))
    error = r - x
    both = error.isfinite()
    nonzero = (x.view(torch.int32 if x.dtype is torch.float32 else torch.int64) << 1 != 0) & both
    error, magnitude = torch.where(both, error, 0.0), torch.where(both, x, 0.0).abs()
    largest = magnitude.amax() if x.numel() else magnitude.sum()
    # The numbers are scaled to 1, because a fourth power of 1e-20 would underflow.
    error, magnitude = error / largest, magnitude / largest
    rows = error.sum(row) if -x.dim() <= row < x.dim() else error.sum()
    squares = (magnitude * magnitude).flatten()
    kurtosis = torch.dot(squares, squares).double() * nonzero.count_nonzero() / squares.sum().double() ** 2
    return torch.stack([rows.abs().sum(dtype=torch.float64) / magnitude.sum(dtype=torch.float64), kurtosis])


def row_of(site: str) -> int:
    """Return the dimension of a site's features in a gradient: the channels of a convolution, else the last dimension.

    >>> [row_of(site) for site in ("head:linear", "conv1:conv2d", "up:conv_transpose1d")]
    [-1, -3, -2]
    """
    operation = site.rpartition(":")[2]
    dimensions = re.match(r"conv(?:_transpose)?([123])d", operation)
    return -1 if dimensions is None else -1 - int(dimensions[1])
