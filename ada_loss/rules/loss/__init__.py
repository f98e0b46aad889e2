"""Loss-scale rules: when a system grows its loss scale and when it backs off. Pure arithmetic.

A rule is a frozen value. `rule.scale` is the scale of the coming step, `rule.adjust(ok)` is the rule after that step.
Parameters have the names and defaults of their system. Each family of systems has a file:

base: no scaling, or a constant scale.
counting: growth after a number of good steps, and a smaller scale after every overflow, or after several.
tolerance: a smaller scale only when the share of overflows is too large.
every_step: a new scale at every step.

A new system is a class in the file of its family and a line in `SYSTEMS`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from ada_loss.rules.loss.base import LossRule, Off, Static, trajectory
from ada_loss.rules.loss.counting import (
    Apex,
    ApexHysteresis,
    DeepSpeed,
    Flax,
    Jmp,
    Keras,
    Megatron,
    Nnabla,
    OpenSeq2Seq,
    Tensorflow,
    Torch,
)
from ada_loss.rules.loss.every_step import Chainer, LogMax
from ada_loss.rules.loss.tolerance import Cerebras, CerebrasTensorflow, Fairseq, Metaseq
from fpsim.checks import did_you_mean, is_number, shown

__all__ = ["SYSTEMS", "LossRule", "as_loss_rule", "loss_rule", "trajectory"]

SYSTEMS: dict[str, type[LossRule]] = {
    rule.system: rule
    for rule in (
        Off,
        Static,
        Torch,
        Nnabla,
        Cerebras,
        CerebrasTensorflow,
        DeepSpeed,
        Megatron,
        Apex,
        ApexHysteresis,
        Fairseq,
        Metaseq,
        Jmp,
        Keras,
        Tensorflow,
        Flax,
        Chainer,
        OpenSeq2Seq,
        LogMax,
    )
}
SYSTEMS["none"] = Off


def loss_rule(system: str, **params: Any) -> LossRule:
    """Create the loss-scale rule of a system.

    Args:
        system: the name of the system: "torch", "nnabla", ...; "static" for a constant scale; "off" for no scaling.
        params: parameters under the system's own names. As in the systems themselves, a number for `loss_scale` of
            cerebras and apex, or for `scale` of chainer, fixes the scale.

    Raises:
        ValueError: for an unknown system or an invalid value.
        TypeError: for an unknown or missing parameter.

    >>> loss_rule("torch", init_scale=4.0, growth_interval=1).adjust(ok=True).scale
    8.0
    >>> loss_rule("torch", growth=2.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: The rule 'torch' has no parameter 'growth'. Did you mean 'growth_factor'? It has: ...
    """
    rule = SYSTEMS.get(system) if isinstance(system, str) else None
    if rule is None:
        near = did_you_mean(system, SYSTEMS, most=3)
        raise ValueError(f"Unknown system {shown(system)}.{near} Known: {', '.join(SYSTEMS)}.")
    # The system has this parameter, but the rule class does not: a number here replaces the dynamic scale.
    fixed = params.pop(rule.fixed_by, None) if rule.fixed_by else None
    known = {f.name: f.default for f in sorted(fields(rule), key=lambda f: bool(f.kw_only))}
    for name in params:
        if name not in known:
            near = did_you_mean(name, known, most=3)
            its = ", ".join([*known, rule.fixed_by or ""]).rstrip(", ")
            raise TypeError(f"The rule {system!r} has no parameter {name!r}.{near} It has: {its}.")
    for name, default in known.items():
        if default is MISSING and name not in params:
            raise TypeError(
                f"The rule {system!r} was given without {name!r}, which has no default. "
                f"It is a scale, a finite number above 0. Give it: loss_rule({system!r}, {name}=2.0**15)."
            )
    # The rule is created even if the scale is fixed, so that the other parameters are checked in this case too.
    dynamic = rule(**params)
    return dynamic if fixed is None or fixed == "dynamic" else Static(fixed)


def as_loss_rule(rule: LossRule | str | float) -> LossRule:
    """Convert a rule, a system's name or a number (a constant scale) to a rule.

    >>> as_loss_rule(128)
    Static(scale=128.0, skip_overflow=False)
    """
    if isinstance(rule, LossRule):
        return rule
    return Static(rule) if is_number(rule) else loss_rule(rule)  # type: ignore[arg-type]
