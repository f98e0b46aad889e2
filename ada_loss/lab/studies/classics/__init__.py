"""Classics: published effects of small formats, each reproduced in minutes by `ada-loss reproduce NAME`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ada_loss.lab.studies.classics.papers import CLASSICS, Paper

if TYPE_CHECKING:
    from ada_loss.lab.studies.classics.frame import Reproduction

__all__ = ["CLASSICS", "Paper", "reproduce_classic"]


def reproduce_classic(name: str, **options: Any) -> Reproduction:
    """Reproduce a classic.

    Args:
        name: a key of CLASSICS.
        options: the options of `frame.reproduce`: seeds, device, out, quick, progress.

    Raises:
        ValueError: for an unknown name, and for invalid options.

    >>> reproduce_classic("swampin")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Unknown classic 'swampin'. Did you mean 'swamping'? Known: swamping, bf16-updates, ...
    """
    # These imports are inside the function, because they load torch, which is not needed to list the names.
    from fpsim.checks import did_you_mean, shown

    if name not in CLASSICS:
        raise ValueError(f"Unknown classic {shown(name)}.{did_you_mean(name, CLASSICS)} Known: {', '.join(CLASSICS)}.")
    from ada_loss.lab.studies.classics.frame import reproduce

    classic = import_module(f"{__name__}.{name.replace('-', '_')}").CLASSIC
    return reproduce(name, classic, CLASSICS[name], **options)
