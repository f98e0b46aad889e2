"""Classics: published effects of small formats, each reproduced in minutes by `ada-loss reproduce NAME`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ada_loss.lab.studies.classics.frame import Reproduction

__all__ = ["CLASSICS", "reproduce_classic"]

# The paper of each. The file of a classic has its name, with _ for -, and is imported on use: a list needs no torch.
CLASSICS = {
    "swamping": "Wang et al. 2018, arXiv 1812.08011: long sums in 16 bits stop growing, chunks repair it",
    "bf16-updates": "Zamirai et al. 2020, arXiv 2010.06192: updates that bf16 weights lose, and two repairs",
    "fixed-point": "Gupta et al. 2015, arXiv 1502.02551: stochastic rounding trains in 16-bit fixed point",
    "underflow": "Micikevicius et al. 2017, arXiv 1710.03740: fp16 gradients underflow, a constant repairs it",
    "depth-scales": "Zhao et al. 2020, IJCAI: in depth a scale for each layer does what no single one does",
    "rollouts": "Qi et al. 2025, arXiv 2510.26788: two engines part in bf16, and far less in fp16",
}


def reproduce_classic(name: str, **options: Any) -> Reproduction:
    """Reproduce a classic.

    Args:
        name: a key of CLASSICS.
        options: those of `frame.reproduce`: seeds, device, out, quick, progress.

    Raises:
        ValueError: for an unknown name, and for options that cannot be.

    >>> reproduce_classic("swampin")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Unknown classic 'swampin'. Did you mean 'swamping'? Known: swamping, bf16-updates, ...
    """
    from fpsim.checks import did_you_mean, shown  # it comes with torch, and a list of the names needs none

    if name not in CLASSICS:
        raise ValueError(f"Unknown classic {shown(name)}.{did_you_mean(name, CLASSICS)} Known: {', '.join(CLASSICS)}.")
    from ada_loss.lab.studies.classics.frame import reproduce

    classic = import_module(f"{__name__}.{name.replace('-', '_')}").CLASSIC
    return reproduce(name, classic, CLASSICS[name], **options)
