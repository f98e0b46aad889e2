"""Compile and load kernels ahead of time, for code in which neither is possible: the capture of a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fpsim.checks import require_iterable, shown
from fpsim.formats.blocks import BLOCKS, Format
from fpsim.formats.codebook import CODEBOOKS
from fpsim.formats.floats import CATALOGUE
from fpsim.kernels.block_dense import SIZES
from fpsim.kernels.core import require_variant
from fpsim.tensors.cuts import Cut
from fpsim.tensors.launch import rounded
from fpsim.tensors.moments import amax_of, binades, moments_of
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import BlockSpec, any_spec
from fpsim.tensors.tally import Accumulator, lost_between

__all__ = ["warm_up"]


def warm_up(
    device: str | torch.device,
    formats: Iterable[str | Format] | None = None,
    roundings: Iterable[str] = ("nearest_even",),
    variants: Iterable[str] = ("A",),
) -> None:
    """Compile and load, on a device, the kernels that round tensors of up to 32 bits to these formats, and tally them.

    While a CUDA graph is captured, nothing can be compiled or loaded: a rounding that still needs this raises
    RuntimeError. Machine code is cached on disk: a process that finds it there loads it in milliseconds. No noise is
    drawn.

    Adaptive scales, products in an accumulator and Hadamard transforms have separate kernels. Run a step of such a
    model once before it is captured, as torch requires too. `python -m fpsim warm` runs steps of all recipes and
    updates, and caches the compiled loops on disk.

    Args:
        device: a CUDA device, or the CPU, whose loops are compiled at their first call too.
        formats: formats or their names; None stands for every named format, which takes the CPU about half a minute.
        roundings: rounding rules, each of which is used for every format.
        variants: variants of stochastic rounding, as in `round_to`. Each has separate kernels, for any number of
            random bits.

    Raises:
        ValueError: for unknown words, and for a CUDA device that this machine does not have.

    >>> warm_up("cpu", ["e4m3fn", "mxfp8_e4m3"], ["nearest_even", "stochastic"])
    """
    try:
        device = torch.device(None if isinstance(device, bytes) else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device={shown(device)} is not a device. Expected: 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={shown(device)} has no kernels. Expected: 'cpu', 'cuda' or 'cuda:1'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device='{device}' is not here: torch finds {torch.cuda.device_count()} CUDA devices. Expected: 'cpu', "
            f"or the device that the tensors are on."
        )
    if formats is None:
        formats = [*CATALOGUE, *BLOCKS, *CODEBOOKS]
    formats = require_iterable("formats", formats, "['fp16']")
    roundings = require_iterable("roundings", roundings, "['nearest_even']")
    variants = require_iterable("variants", variants, "['A']")
    for variant in variants:
        require_variant(variant, True, 1)  # the word must exist, even if it is not used
    # A key is given to each rounding, so that no noise is drawn.
    x, key = torch.zeros(1, device=device), torch.zeros((), dtype=torch.int64)
    # On a card, tensors of whole blocks have separate kernels.
    whole = torch.zeros(SIZES[-1], device=device)
    specs = [
        any_spec(fmt, rounding, None, None if variant == "A" else 8, variant)
        for fmt in formats
        for rounding in roundings
        for variant in (variants if rounding == "stochastic" else ("A",))
    ]
    for spec in specs:
        if isinstance(spec, BlockSpec):
            rounded_blocks(x, spec, -1, None, key)
            rounded_blocks(whole, spec, -1, None, key)
            Accumulator(spec, device).add(x, x, Cut(-1))
            continue
        rounded(x, spec, key)
        Accumulator(spec, device).add(x, x)
        # The roundings of an emulated model keep masks, which needs separate kernels.
        for keep_infinity in (False, True):
            rounded(x, spec, key, None, True, keep_infinity)
    lost_between(x, x, 1.0, torch.zeros(1, dtype=torch.int64, device=device))
    for logs in (False, True):
        moments_of(x, logs)
    amax_of(x)
    binades(x)
