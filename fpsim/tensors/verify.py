"""Verify that the kernels of this machine round correctly: `python -m fpsim verify`.

On any device, bits are compared with `reference.py`, a second definition of rounding. On a card there are more checks:
all block formats, compared with the CPU; two streams at once; replays of a captured graph; the
speed relative to a copy; and the cost of a launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.formats.blocks import BLOCKS
from fpsim.formats.codebook import CODEBOOKS, Codebook
from fpsim.formats.floats import CATALOGUE, FloatFormat
from fpsim.kernels.core import ROUNDINGS, VARIANTS
from fpsim.tensors.launch import rounded
from fpsim.tensors.moments import moments_of
from fpsim.tensors.reference import noise_of, rounded_in_blocks, rounded_in_float64, rounded_to_codebook
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import BlockSpec, RoundingSpec, any_spec, rounding_spec

__all__ = ["FULL_FORMATS", "Row", "milliseconds", "on_card", "patterns", "verify"]

# The formats of the full check: at least one for each shape of the kernels.
FULL_FORMATS = ("fp16", "bf16", "tf32", "e4m3fn", "e5m2", "dlfloat16")
# Block formats with scales that are powers of two, which `reference.py` covers, under both rules for inf and NaN.
BLOCKS_OF_POWERS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "e4m3fn per 32 ceil saturate", "e4m3fn per row ceil")
KEY = 0x9E3779B97F4A7C15 >> 1  # the key of the noise; a key has 63 bits
FEW_BITS = 4  # random bits of the variants
_CHUNK = 1 << 22


class Row(NamedTuple):
    """One line of the table. ok: None for a measurement without a verdict."""

    check: str
    ok: bool | None
    detail: str


def patterns() -> Tensor:
    """Return float32 numbers: 2**16 random patterns, and patterns around the values and ties of every significand
    length in every binade.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).int()
    fractions = {0, 1 << 22, (1 << 22) + 1, (1 << 23) - 1} | {
        (odd << k) + d for k in range(22) for odd in (1, 3) for d in (-1, 0, 1)
    }
    borders = (torch.arange(256)[:, None] * (1 << 23) + torch.tensor(sorted(fractions))).flatten().int()
    return torch.cat([random, borders, borders | -(1 << 31)]).view(torch.float32)


def all_patterns() -> Iterator[Tensor]:
    """Yield all 2**32 float32 numbers, in parts."""
    for start in range(-(1 << 31), 1 << 31, _CHUNK):
        yield torch.arange(start, start + _CHUNK, dtype=torch.int64).int().view(torch.float32)


def mismatches(x: Tensor, spec: RoundingSpec, device: str) -> tuple[int, str]:
    """Return how many elements a device rounds differently from the reference, and the first of them."""
    noise = noise_of(x.numel(), KEY) if spec.rounding == "stochastic" else None
    if isinstance(spec.fmt, Codebook):
        expected = rounded_to_codebook(x.numpy(), spec.fmt, spec.rounding)
    else:
        assert isinstance(spec.fmt, FloatFormat)
        expected = rounded_in_float64(x.numpy(), spec.fmt, spec.rounding, noise, spec.random_bits, spec.variant)
    key = torch.tensor(KEY) if noise is not None else None
    result = rounded(x.to(device), spec, key).cpu().double().numpy()
    both_nan = np.isnan(expected) & np.isnan(result)
    wrong = ~(both_nan | ((expected == result) & (np.signbit(expected) == np.signbit(result))))
    if not wrong.any():
        return 0, ""
    i = int(np.flatnonzero(wrong)[0])
    return int(wrong.sum()), f"{float(x[i])!r} gives {float(result[i])!r}, not {float(expected[i])!r}"


def _compare(spec: RoundingSpec, device: str, parts: Iterable[Tensor]) -> Row:
    count, wrong, first = 0, 0, ""
    for x in parts:
        n, example = mismatches(x, spec, device)
        count, wrong, first = count + x.numel(), wrong + n, first or example
    detail = f"{wrong} of {count:,} numbers differ: {first}" if wrong else f"{count:,} numbers"
    return Row(str(spec), not wrong, detail)


def _compare_blocks(spec: BlockSpec, device: str) -> Row:
    """Compare blocks of all magnitudes, with an infinity, a NaN and masks (float32's largest number)."""
    generator, mask = torch.Generator().manual_seed(0), torch.finfo(torch.float32).max
    x = torch.randn(600, 96, generator=generator) * torch.exp2(torch.linspace(-150, 126, 600))[:, None]
    x[::7, 3], x[::11, 40], x[::13, 90], x[::5, 8], x[::17, 70] = torch.inf, torch.nan, -torch.inf, mask, -mask
    expected = rounded_in_blocks(x.numpy(), spec.fmt)
    result = rounded_blocks(x.to(device), spec).cpu().double().numpy()
    is_wrong = ~((expected == result) | (np.isnan(expected) & np.isnan(result)))
    if not is_wrong.any():
        return Row(str(spec), True, f"{x.numel():,} numbers")
    at = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    first = f"{float(x[at])!r} gives {float(result[at])!r}, not {float(expected[at])!r}"
    return Row(str(spec), False, f"{is_wrong.sum()} of {x.numel():,} numbers differ: {first}")


def _specs(fmt: str) -> list[RoundingSpec]:
    """Return each rounding of a format, and each variant with a few random bits."""
    few = [rounding_spec(CATALOGUE[fmt], "stochastic", None, FEW_BITS, variant) for variant in VARIANTS]
    return [*(rounding_spec(CATALOGUE[fmt], rounding) for rounding in ROUNDINGS), *few]


def verify(device: str, full: bool) -> Iterator[Row]:
    """Yield the rows of the table, each as soon as it is known.

    device: "cpu" or "cuda".
    full: whether to check all 2**32 inputs of six formats in each rounding too, which takes hours on a CPU.
    """
    x = patterns()
    for fmt in CATALOGUE:
        for spec in _specs(fmt):
            yield _compare(spec, device, [x])
    for book in CODEBOOKS.values():
        at = torch.tensor([*book.finite, *book.midpoints]).float()
        ends = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        for rounding in ("nearest_even", "toward_zero", "up", "down"):
            yield _compare(rounding_spec(book, rounding), device, [x, at, *(at.nextafter(end) for end in ends)])
    for name in BLOCKS_OF_POWERS:
        yield _compare_blocks(_block_spec(name), device)
    if full:
        for fmt in FULL_FORMATS:
            for spec in _specs(fmt):
                yield _compare(spec, device, all_patterns())
    if device == "cuda":
        yield from on_card()


# On a card


def on_card() -> Iterator[Row]:
    """Yield the rows that only a card can show."""
    yield from _blocks()
    yield _two_streams()
    yield from _graph_replays()
    yield from _speeds()


def _block_spec(name: str, rounding: str = "nearest_even") -> BlockSpec:
    spec = any_spec(name, rounding)
    assert isinstance(spec, BlockSpec)
    return spec


def _blocks() -> Iterator[Row]:
    """Compare each block format along each axis, with blocks that are ragged at the end, and with whole blocks."""
    generator = torch.Generator().manual_seed(0)
    binades = torch.randint(-20, 20, (301, 1, 83), generator=generator).float()
    x = torch.randn(301, 37, 83, generator=generator) * torch.exp2(binades)
    x[0, 0, 0], x[1, 2, 3], x[4] = torch.inf, torch.nan, 0.0
    key = torch.tensor(KEY)
    for name in (*BLOCKS, "e4m3fn per row fp32", "e4m3fn per 128x128 fp32"):
        for rounding in ("nearest_even", "stochastic"):
            spec, wrong, first = _block_spec(name, rounding), 0, ""
            # An infinity makes the second scale of a tensor NaN, and with it all numbers.
            numbers = x.nan_to_num(0.0, 9.0) if spec.fmt.tensor_scale else x
            for cut, axis in ((numbers, 0), (numbers, 1), (numbers, 2), (numbers[..., :64].contiguous(), 2)):
                expected = rounded_blocks(cut, spec, axis, None, key)
                result = rounded_blocks(cut.cuda(), spec, axis, None, key).cpu()
                is_wrong = result.view(torch.int32) != expected.view(torch.int32)
                places = (is_wrong & ~(result.isnan() & expected.isnan())).nonzero().tolist()
                wrong += len(places)
                if places and not first:
                    at = tuple(places[0])
                    values = f"{float(cut[at])!r} gives {float(result[at])!r}, not {float(expected[at])!r}"
                    first = f"along axis {axis} of {tuple(cut.shape)} at {at} {values}"
            count = f"{3 * x.numel() + x[..., :64].numel():,} numbers"
            yield Row(f"{name} {rounding}", not wrong, f"{wrong} of {count} differ: {first}" if wrong else count)


def _two_streams(times: int = 200) -> Row:
    """Round on two streams at once, each to another format."""
    inputs = [torch.randn(1 << 18, device="cuda") * 4.0**i for i in range(2)]
    specs = [rounding_spec("e3m4"), rounding_spec("e4m3fn")]
    expected = [rounded(x.cpu(), spec) for x, spec in zip(inputs, specs, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(times):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(rounded(inputs[i], specs[i]))
    torch.cuda.synchronize()
    wrong = sum(not torch.equal(y.cpu(), expected[i]) for i in range(2) for y in results[i])
    return Row("two streams", not wrong, f"{wrong} of {2 * times} results differ")


def _graph_replays() -> Iterator[Row]:
    """Replay a captured rounding on other numbers, and report whether its noise repeats."""
    for rounding in ("nearest_even", "stochastic"):
        spec, x = rounding_spec("e4m3fn", rounding), torch.randn(1 << 18, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # This call compiles and loads the kernel: neither is possible during the capture.
            rounded(x, spec)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = rounded(x, spec)
        if rounding == "nearest_even":
            wrong = 0
            for i in range(20):
                x.copy_(torch.randn(1 << 18) * 2.0**i)
                graph.replay()
                wrong += not torch.equal(y.cpu(), rounded(x.cpu(), spec))
            yield Row("graph replay", not wrong, f"{wrong} of 20 replays differ from the CPU")
        else:
            graph.replay()
            first = y.clone()
            graph.replay()
            yield Row("noise of replays", None, "repeats" if torch.equal(first, y) else "is new in each replay")


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Return the time of one call on the card, measured by events around many calls."""
    # The first call compiles and loads, and is not measured.
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def _speeds() -> Iterator[Row]:
    """Measure the bytes read and written per second, relative to a copy of the tensor, and a call's cost in Python."""
    x = torch.randn(1 << 27, device="cuda")
    out = torch.empty_like(x)
    moved = 2 * x.numel() * x.element_size() / 1e6
    copy = moved / milliseconds(lambda: out.copy_(x), 20)
    yield Row("copy", None, f"{copy:,.0f} GB/s")
    calls: dict[str, Callable[[], Tensor]] = {
        f"e4m3fn {rule}": partial(rounded, x, rounding_spec("e4m3fn", rule)) for rule in ("nearest_even", "stochastic")
    }
    rows = x.view(1 << 13, 1 << 14)
    for name in ("mxfp8_e4m3", "nvfp4", "e4m3fn per row fp32"):
        for axis in (0, 1):
            calls[f"{name} along axis {axis}"] = partial(rounded_blocks, rows, _block_spec(name), axis)
    calls["moments"] = partial(moments_of, x)
    for name, call in calls.items():
        moves = moved / 2 if name == "moments" else moved  # because moments only read
        speed = moves / milliseconds(call, 20)
        yield Row(name, None, f"{speed:,.0f} GB/s, {speed / copy:.0%} of a copy")
    few, spec = torch.randn(16, device="cuda"), rounding_spec("e4m3fn")
    for name, launched in (("torch.relu", lambda: torch.relu(few)), ("rounding", lambda: rounded(few, spec))):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(1000):
            launched()
        took = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        yield Row(f"launch of {name}", None, f"{took:.1f} us")
