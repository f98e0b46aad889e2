"""Formats of cells: what stands for one, in canonical form, as a label, and as the policy of a training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

import fpsim
from fpsim import ROLES, Policy, Products
from fpsim.checks import shown
from fpsim.scaling import gradients_have_scales

__all__ = ["BASELINE", "canonical_format", "is_recipe", "label", "needs_no_scaling", "policy_of"]

BASELINE = "fp32"  # the format that the others are compared with


def label(value: Any) -> str:
    """A format or a scaling method as a word for a table.

    >>> label(1024.0), label({"error": "e5m2", "weight_grad": "fp16"})
    ('1024', 'error=e5m2 weight_grad=fp16')
    >>> label({"products": {"x": "mxfp4", "w": "mxfp4", "dy": "e5m2 per 32"}})
    'x,w=mxfp4 dy=e5m2 per 32'
    """
    if isinstance(value, float):
        return f"{value:.12g}"
    if not isinstance(value, Mapping):
        return str(value)
    return " ".join(_operands_label(v) if isinstance(v, Mapping) else f"{k}={v}" for k, v in value.items())


def _operands_label(value: Mapping[str, Any]) -> str:
    """Operands, or products, with those in one format together."""
    names: dict[str, list[str]] = {}
    for name, fmt in value.items():
        names.setdefault(str(fmt), []).append(name)
    return " ".join(f"{','.join(together)}={fmt}" for fmt, together in names.items())


def is_recipe(fmt: Any) -> bool:
    """Whether a format is the name of a recipe, which has roundings of its own."""
    return isinstance(fmt, str) and fmt.startswith(fpsim.RECIPE_PREFIX)


def canonical_format(fmt: Any) -> Any:
    """What stands for a format, in the words that stand for all that mean the same: JSON, and hashed into a cell's id.

    Raises ValueError for what is no format.

    >>> canonical_format("half"), canonical_format({"error": "half", "weight": None})
    ('fp16', {'error': 'fp16'})
    """
    if is_recipe(fmt):
        name = fmt.removeprefix(fpsim.RECIPE_PREFIX).strip()
        fpsim.recipe(name)
        return fpsim.RECIPE_PREFIX + name
    if isinstance(fmt, Mapping):
        if "rounding" in fmt:
            raise ValueError("A format came with 'rounding' in it. The sweep varies it: give roundings=[...].")
        try:
            _policy(fmt)
            found = {k: _canonical(k, v) for k, v in fmt.items() if v is not None}
            json.dumps(found)
        except TypeError as error:
            raise ValueError(
                f"The format {shown(dict(fmt))} is no policy: {error}. Possible: a name, or the fields of fpsim.Policy "
                f"in numbers and words. Take {{'error': 'e5m2'}}, for instance."
            ) from None
        return found
    if isinstance(fmt, str):
        fpsim.quantize(torch.nn.Linear(1, 1), fmt)  # a recipe without its prefix has an error of its own
    return str(fpsim.as_format(fmt))


def _canonical(field: str, value: Any) -> Any:
    """A field of a policy, in the words that stand for all that mean the same."""
    if field == "products" and isinstance(value, Mapping):
        return {k: _operands(v) for k, v in value.items() if v is not None}
    return str(fpsim.as_format(value)) if field in ROLES else value


def _operands(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_operands(v) for v in value]
    return str(fpsim.as_format(value)) if isinstance(value, str) else value


def _policy(fields: Mapping[str, Any]) -> Policy:
    """A policy from the fields of a cell's format."""
    products = fields.get("products")
    if not isinstance(products, Mapping):
        return Policy(**fields)
    make = Products.by_operand if {"x", "w", "dy"} & set(products) else Products
    return Policy(**{**fields, "products": make(**products)})


def needs_no_scaling(fmt: Any) -> bool:
    """Whether a scale of gradients changes nothing: there is nothing to round, or every gradient has its own scale."""
    if fmt == BASELINE:
        return True
    if is_recipe(fmt):
        return gradients_have_scales(fpsim.recipe(fmt.removeprefix(fpsim.RECIPE_PREFIX).strip()))
    if not isinstance(fmt, Mapping):
        return isinstance(fpsim.as_format(fmt), fpsim.BlockFormat)
    return gradients_have_scales(_policy(fmt))


def policy_of(fmt: Any, rounding: str) -> Any:
    """The format of a cell as `train` takes it: a name or a Policy. Raises ValueError for an unknown rounding."""
    policy = _policy(fmt) if isinstance(fmt, Mapping) else fmt
    is_name = isinstance(fmt, str) and not is_recipe(fmt)
    fpsim.quantize(torch.nn.Linear(1, 1), policy if is_name else None, rounding=rounding)
    return policy
