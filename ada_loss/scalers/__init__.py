"""Scalers of the whole loss: any rule behind the verbs of `torch.amp.GradScaler`, and NNabla's whole step."""

from __future__ import annotations

from ada_loss.scalers.grad_scaler import GradScaler, NoScaler
from ada_loss.scalers.updater import Updater

__all__ = ["GradScaler", "NoScaler", "Updater"]
