"""Loss-scale rules: when a system grows its loss scale and when it backs off. Pure arithmetic.

A rule is a frozen value. `rule.scale` is the scale of the coming step, `rule.adjust(ok)` is the rule after that step.
Parameters have the names and defaults of their system. Each family of systems has a file:

base: no scaling, or a constant scale.
counting: growth after a number of good steps, a smaller scale after every overflow, or after some.
tolerance: a smaller scale only when the share of overflows is too large.
every_step: a new scale at every step.

A new system is a class in the file of its family and a line in catalogue.py.
"""

from __future__ import annotations

from ada_loss.rules.loss.base import LossRule, trajectory
from ada_loss.rules.loss.catalogue import SYSTEMS, as_loss_rule, loss_rule

__all__ = ["SYSTEMS", "LossRule", "as_loss_rule", "loss_rule", "trajectory"]
