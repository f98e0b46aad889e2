"""Lines on the terminal, above a bar where there is one."""

from __future__ import annotations

import sys
import warnings

from ada_loss.lab.errors import printable
from fpsim.checks import pip_install

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # without widgets a notebook gets a bar of letters
        from tqdm.auto import tqdm
except ImportError as error:
    raise ImportError(f"A sweep needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["say", "tqdm"]


def say(words: str) -> None:
    """Print a line on stderr, above a bar if there is one; control characters are escaped."""
    tqdm.write(printable(words), file=sys.stderr)
