"""Devices by name, checks whether this machine has them, and full float32 on a GPU."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fpsim.checks import shown

__all__ = ["device_problem", "float32_in_full", "require_device_name"]

DEVICE = re.compile(r"(cpu|cuda)(:[0-9]{1,4})?")


def require_device_name(device: object) -> None:
    """Raise ValueError for anything but the name of a device."""
    if not isinstance(device, str) or not DEVICE.fullmatch(device):
        raise ValueError(f"device={shown(device)} is invalid. Expected: 'cpu', 'cuda', or one GPU such as 'cuda:1'.")


def device_problem(device: str) -> str:
    """Return the reason why this machine cannot compute on a device, as a sentence; "" if it can.

    >>> device_problem("cpu")
    ''
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ""
    # torch is imported late, because the check of a device's name must not wait for it.
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reason = "torch finds none" if torch.version.cuda else "this torch was built without CUDA"
        return f"device={shown(device)} needs a GPU, and {reason}. Expected here: 'cpu'."
    if int(index or 0) >= count:
        return f"device={shown(device)} is not there. Expected here: 'cpu', 'cuda', 'cuda:0' to 'cuda:{count - 1}'."
    return ""


_full = threading.Lock()
# The list has one entry for each training that now runs on a GPU. Each entry holds the settings before the first
# training. Trainings may run in several threads and end in any order. The last training to end restores the settings.
_inside: list[tuple[Any, ...]] = []


@contextmanager
def float32_in_full(device: str) -> Iterator[None]:
    """Compute float32 convolutions and recurrent layers on a GPU with 24 significand bits. The default, TF32, has 11.

    The settings are global to the process. They are restored when the last training in this context ends.
    """
    if not device.startswith("cuda"):
        yield
        return
    with _full:
        _inside.append(_inside[0] if _inside else _settings())
        _set(False, "ieee", "ieee")
    try:
        yield
    finally:
        with _full:
            before = _inside.pop()
            if not _inside:
                _set(*before)


def _cudnn() -> Any:
    # torch is imported late here too.
    from torch.backends import cudnn

    return cudnn


def _settings() -> tuple[bool | None, str, str]:
    cudnn = _cudnn()
    try:
        both: bool | None = cudnn.allow_tf32
    # If the two settings below differ, torch raises an error, because `allow_tf32` covers both.
    except RuntimeError:
        both = None
    return both, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision


def _set(both: bool | None, convolutions: str, recurrent: str) -> None:
    cudnn = _cudnn()
    # The older interface also writes the settings of the newer one, so it is set first.
    if both is not None:
        cudnn.allow_tf32 = both
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = convolutions, recurrent
