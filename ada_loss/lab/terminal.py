"""Lines on the terminal, above a progress bar if there is one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ada_loss.lab.errors import printable
from fpsim.checks import pip_install

try:
    with warnings.catch_warnings():
        # Without widgets a notebook gets a bar of letters. The user sees this, so the warning is suppressed.
        warnings.filterwarnings("ignore", "IProgress not found")
        from tqdm.auto import tqdm
except ImportError as error:
    raise ImportError(f"A sweep needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["offer", "say", "tqdm", "without_offers"]


def say(words: str) -> None:
    """Print a line on stderr, above a progress bar if there is one; control characters are escaped."""
    tqdm.write(printable(words), file=sys.stderr)


# The flag is in a list, so that the functions below can change it without `global`.
_is_offering = [True]


def offer(words: str) -> None:
    """Suggest the next step to a caller in Python. The command line takes that step itself, so it suggests nothing."""
    if _is_offering[0]:
        say(words)


@contextmanager
def without_offers() -> Iterator[None]:
    """Suppress `offer` inside the block."""
    before, _is_offering[0] = _is_offering[0], False
    try:
        yield
    finally:
        _is_offering[0] = before
