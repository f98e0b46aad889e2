"""ada_loss: gradient scaling for small number formats, by the rules of many systems."""

from ada_loss.rules import LossRule, loss_rule, trajectory

__all__ = ["LossRule", "loss_rule", "trajectory"]
