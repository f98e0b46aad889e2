"""Adaptive gradient scaling: each layer's gradient is rounded at its own scale."""

from __future__ import annotations

from ada_loss.layerwise.engine import Observed
from ada_loss.layerwise.scaled import AdaLossScaled

__all__ = ["AdaLossScaled", "Observed"]
