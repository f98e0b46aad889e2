"""The emulation of a model: the mode that sees every torch call, forward and backward."""

from fpsim.emulation.entering import emulate

__all__ = ["emulate"]
