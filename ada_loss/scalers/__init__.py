"""Scalers of the whole loss.

grad_scaler: GradScaler, any rule behind the methods of `torch.amp.GradScaler`.
verbs: the implementations of these methods, for an enabled and for a disabled scaler.
gradients: operations on the gradients of an optimizer.
updater: Updater, a whole training step with retries.
"""

from __future__ import annotations

from ada_loss.scalers.grad_scaler import GradScaler, NoScaler
from ada_loss.scalers.updater import Updater

__all__ = ["GradScaler", "NoScaler", "Updater"]
