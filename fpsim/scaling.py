"""The one door through which gradients get scales of their own: what a scaling is asked, and what it may use.

`ada_loss` takes part in a backward pass through these names alone.
"""

from __future__ import annotations

import torch

from fpsim.emulation import Scaling, is_rounded_at, mark_rounded
from fpsim.model import listeners
from fpsim.moments import Moments, amax_of, binades, keep_memory_of, memory_of, moments_of, on_device
from fpsim.ops import RoundingSpec, log2_scale_limits, round_fitting_
from fpsim.ops import _round_differentiably as round_differentiably
from fpsim.ops import _rounded as rounded
from fpsim.statistics import lost_between

__all__ = [
    "AMAX",
    "AMIN",
    "COUNT",
    "LOG_MEAN",
    "LOG_MEAN_SQUARE",
    "MAXIMUM",
    "MEAN",
    "MEAN_SQUARE",
    "MINIMUM",
    "NONZERO",
    "Moments",
    "RoundingSpec",
    "Scaling",
    "amax_of",
    "binades",
    "current_backward_pass",
    "is_rounded_at",
    "keep_memory_of",
    "listeners",
    "log2_scale_limits",
    "lost_between",
    "mark_rounded",
    "memory_of",
    "moments_of",
    "on_device",
    "round_differentiably",
    "round_fitting_",
    "rounded",
]

# The fields of Moments, by number for what is compiled.
COUNT, NONZERO, MEAN, MEAN_SQUARE, MINIMUM, MAXIMUM, AMAX, AMIN, LOG_MEAN, LOG_MEAN_SQUARE = range(len(Moments._fields))


def current_backward_pass() -> int:
    """The number of the backward pass that runs in this thread, -1 outside of one; each has a higher one."""
    return torch._C._current_graph_task_id()
