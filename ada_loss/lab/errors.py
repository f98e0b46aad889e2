"""Errors that the command line catches by class; this file imports nothing, so that it can do so without torch."""

from __future__ import annotations

__all__ = ["SweepStopped", "UnreadableLedger"]


class SweepStopped(RuntimeError):
    """A sweep could not go on. The cells that are done are kept."""


class UnreadableLedger(ValueError):
    """The ledger of a sweep is damaged, or cannot be read for another reason."""
