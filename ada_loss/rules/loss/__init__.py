"""When a loss scale grows and when it backs off: each system's rule as a frozen value, pure arithmetic.

`rule.scale` is the scale of the coming step, `rule.adjust(ok)` the rule after it; no rule changes in place.
Parameters bear the names their system gives them, with its defaults.
"""

from __future__ import annotations

from ada_loss.rules.loss.base import LossRule, trajectory
from ada_loss.rules.loss.catalogue import SYSTEMS, as_loss_rule, loss_rule

__all__ = ["SYSTEMS", "LossRule", "as_loss_rule", "loss_rule", "trajectory"]
