"""Rules that choose a scale by pure arithmetic: `loss` for the whole loss, `layer` for one layer."""

from __future__ import annotations

from ada_loss.rules.layer import LAYER_RULES, LayerRule, as_layer_rule, layer_rule
from ada_loss.rules.loss import SYSTEMS, LossRule, as_loss_rule, loss_rule, trajectory

__all__ = [
    "LAYER_RULES",
    "SYSTEMS",
    "LayerRule",
    "LossRule",
    "as_layer_rule",
    "as_loss_rule",
    "layer_rule",
    "loss_rule",
    "trajectory",
]
