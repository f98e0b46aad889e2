"""ada_loss: what gradient scaling does to training in a small number format, and the lab that compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ada_loss.rules import LossRule, loss_rule, trajectory
    from ada_loss.scalers import GradScaler, Updater

__all__ = ["GradScaler", "LossRule", "Updater", "loss_rule", "trajectory"]


def __getattr__(name: str) -> Any:
    # on first use: the command line answers --help without importing torch
    if name not in __all__:
        raise AttributeError(f"module 'ada_loss' has no attribute {name!r}. Known: {', '.join(__all__)}.")
    from ada_loss import rules, scalers

    return getattr(rules, name, None) or getattr(scalers, name)
