"""What processes that tests start have in common."""

from __future__ import annotations

import os
import signal
import sys


def environment() -> dict[str, str]:
    """The environment of this process, with its path of imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def heed_ctrl_c() -> None:
    """For `preexec_fn`: in a shell's background, where tests may run, children are started ignoring SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
