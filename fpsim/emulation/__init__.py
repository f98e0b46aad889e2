"""One torch call under emulation: the mode that sees every call, forward and backward."""

from fpsim.emulation.entering import emulate

__all__ = ["emulate"]
