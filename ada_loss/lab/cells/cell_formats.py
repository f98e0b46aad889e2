"""Formats of cells: their canonical form, their label, and the policy of a training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

import fpsim
from ada_loss.lab.cells.cell_updates import UPDATE, canonical_update, format_words, split, update_label
from ada_loss.lab.tasks import imported
from ada_loss.lab.training.format_schedule import SCHEDULE, FormatSchedule, Stage, as_schedule
from ada_loss.lab.training.methods import fits_few_bits
from ada_loss.lab.training.native import canonical_native, is_native, native_label, require_native
from ada_loss.lab.training.rollouts import ROLLOUT, WEIGHTS_KEY, Rollout, as_rollout
from fpsim import ROLES, Operand, Policy, Products
from fpsim.checks import shown
from fpsim.scaling import FEW_BITS, gradients_have_scales

__all__ = [
    "BASELINE",
    "STOCHASTIC_GRADIENTS",
    "ImportedOperand",
    "canonical_format",
    "has_own_rounding",
    "label",
    "needs_no_scaling",
    "operand_functions",
    "policy_of",
    "rollout_of",
    "rollout_words",
    "usual_rounding",
]

BASELINE = "fp32"  # the format with which all others are compared
# The rounding of a cell in which only gradients are rounded stochastically, and all other tensors to nearest.
STOCHASTIC_GRADIENTS = "stochastic_gradients"
CACHED = ("k", "v")  # the tensors in a policy's cache
# More bits than any format has, so that all gradients are rounded stochastically.
ANY_BITS = 64
# The fields of `Products` and `Attention` that are not operands.
WORDS = ("accumulator", "backward", "attention", "block_kv", "p_scale")


def label(value: Any) -> str:
    """Return the label of a format or a scaling method, for tables.

    >>> label(1024.0), label({"error": "e5m2", "weight_grad": "fp16"})
    ('1024', 'error=e5m2 weight_grad=fp16')
    >>> label({"native": "fp16"})
    'fp16 native'
    >>> label({"products": {"x": "mxfp4", "w": "mxfp4", "dy": "e5m2 per 32"}})
    'x,w=mxfp4 dy=e5m2 per 32'
    >>> label({"error": "e5m2", "overrides": {"stem": None, "head": None}})
    'error=e5m2 stem,head=float32'
    >>> label({"activation": "bf16", "cache": {"k": "e4m3fn", "v": "e4m3fn"}})
    'activation=bf16 k,v=e4m3fn'
    >>> label({"schedule": {0: {"error": "e5m2"}, 0.8: "recipe:bf16"}})
    'error=e5m2 then recipe:bf16 from 0.8'
    >>> label({"format": "e5m2", "update": "bf16_sr"})
    'e5m2, update bf16_sr'
    >>> label({"format": "bf16", "rollout": {"format": "recipe:fp8_tile", "weights": "token"}})
    'bf16, rollouts recipe:fp8_tile, weights token'
    """
    if isinstance(value, float):
        return f"{value:.12g}"
    if not isinstance(value, Mapping):
        return _spoken(value)
    if is_native(value):
        return native_label(value)
    if ROLLOUT in value:
        own = {name: inner for name, inner in value.items() if name != ROLLOUT}
        return f"{label(own if UPDATE in own else own.get('format'))}, {rollout_words(value[ROLLOUT], label)}"
    if UPDATE in value:
        return f"{label(value.get('format'))}, update {update_label(value[UPDATE])}"
    if SCHEDULE in value:
        # A foreign ledger may hold anything under this key. If it is not a schedule, the fields are listed below.
        with suppress(TypeError, ValueError):
            return str(
                FormatSchedule(tuple(stage._replace(fmt=label(stage.fmt)) for stage in as_schedule(value).stages))
            )
    return " ".join(_operands_label(v) if isinstance(v, Mapping) else f"{k}={_spoken(v)}" for k, v in value.items())


def rollout_words(rollout: Any, name: Callable[[Any], str]) -> str:
    """Return the label of a rollout in canonical form. name: a function that returns the name of a format."""
    fmt, weights = (rollout.get("format"), rollout.get(WEIGHTS_KEY)) if isinstance(rollout, Mapping) else (rollout, "")
    words = [f"rollouts {name(fmt)}" if fmt is not None else "", f"weights {weights}" if weights else ""]
    return ", ".join(filter(None, words))


def _spoken(value: Any) -> str:
    """Return a readable text of a value. A code book without a name is shown by its digest, not its values."""
    return str(fpsim.as_format(value)) if isinstance(value, str) and "Codebook(" in value else str(value)


def _operands_label(value: Mapping[str, Any]) -> str:
    """Return the label of a mapping from operands to formats. Operands with the same format are listed together."""
    names: dict[str, list[str]] = {}
    for name, fmt in value.items():
        if isinstance(fmt, Mapping):  # the operands of an attention
            fmt = f"({_operands_label(fmt)})"
        names.setdefault("float32" if fmt is None else _spoken(fmt), []).append(name)
    return " ".join(f"{','.join(map(str, together))}={fmt}" for fmt, together in names.items())


def _is_recipe(fmt: Any) -> bool:
    """True if a format is the name of a recipe. A recipe sets its own roundings."""
    return isinstance(fmt, str) and fmt.startswith(fpsim.RECIPE_PREFIX)


def canonical_format(fmt: Any) -> Any:
    """Return the canonical form of a format, as JSON: equal formats have equal forms. A cell's id hashes this form.

    Raises ValueError for anything but a format.

    >>> canonical_format("half"), canonical_format({"error": "half", "weight": None})
    ('fp16', {'error': 'fp16'})
    >>> canonical_format({"cache": "half"}), canonical_format({"cache": {"v": "fp16", "k": "fp16"}})
    ({'cache': {'k': 'fp16', 'v': 'fp16'}}, {'cache': {'k': 'fp16', 'v': 'fp16'}})
    >>> canonical_format({"schedule": {0.8: "bf16", 0: "half", 0.5: "fp16"}})
    {'schedule': [[0, 'fp16'], [0.8, 'bf16']]}
    >>> canonical_format({"format": "half", "update": {"weight": "bf16"}})
    {'format': 'fp16', 'update': {'weight': 'bf16'}}
    >>> canonical_format({"format": "half", "rollout": "bfloat16"}), canonical_format({"rollout": "fp32"})
    ({'format': 'fp16', 'rollout': {'format': 'bf16'}}, 'fp32')
    """
    if isinstance(fmt, Mapping) and fmt.keys() & {UPDATE, ROLLOUT}:
        inner, update = split(fmt)
        own = canonical_format(inner)
        parts = {UPDATE: canonical_update(update), ROLLOUT: _canonical_rollout(own, fmt.get(ROLLOUT))}
        if is_native(own):
            require_native(None, {}, parts[UPDATE])
        given = {name: part for name, part in parts.items() if part is not None}
        return {"format": own, **given} if given else own
    if _is_recipe(fmt):
        name = fmt.removeprefix(fpsim.RECIPE_PREFIX).strip()
        fpsim.recipe(name)
        return fpsim.RECIPE_PREFIX + name
    if is_native(fmt):
        return canonical_native(fmt)
    if isinstance(fmt, Mapping):
        schedule = as_schedule(fmt)
        return _canonical_schedule(schedule) if SCHEDULE in fmt else _canonical_policy(fmt)
    if isinstance(fmt, str):
        # This call only checks the name. Unlike the error of `as_format`, its error says that a recipe's name lacks the
        # prefix.
        fpsim.as_policy(fmt)
    return format_words(fmt)


def _canonical_rollout(own: Any, given: Any) -> dict[str, str] | None:
    """Return the canonical form of a rollout, given its trainer's format; None for a rollout that changes nothing."""
    rollout = as_rollout(given)
    canonical: dict[str, Any] = {}
    if rollout.fmt is not None:
        if isinstance(rollout.fmt, Mapping) and rollout.fmt.keys() & {UPDATE, ROLLOUT}:
            raise ValueError(f"The format of a rollout is {shown(dict(rollout.fmt))}. Expected: a format alone.")
        fmt = canonical_format(rollout.fmt)
        if is_native(fmt) or is_native(own):
            raise ValueError(
                f"A rollout was given with {shown(fmt if is_native(fmt) else own)}, which emulates nothing. Use fp16 "
                f"for both, or leave the rollout's format out: it is the trainer's then."
            )
        # The trainer's format is the default format of a rollout. It is left out, so that both spellings are the same
        # cell.
        canonical |= {} if fmt == own else {"format": fmt}
    if rollout.weights != Rollout.weights:
        canonical[WEIGHTS_KEY] = rollout.weights
    return canonical or None


def rollout_of(fmt: Any) -> Rollout | None:
    """Return the rollout of a cell's format, or None. A rollout rounds to nearest unless its format says otherwise."""
    if not isinstance(fmt, Mapping) or ROLLOUT not in fmt:
        return None
    rollout = as_rollout(fmt[ROLLOUT])
    return rollout if rollout.fmt is None else replace(rollout, fmt=policy_of(rollout.fmt, "nearest_even"))


def _canonical_schedule(schedule: FormatSchedule) -> Any:
    """Return a schedule as pairs of start and format, without starts that change nothing.

    If only one format is left, that format is returned instead.
    """
    stages: list[list[Any]] = []
    for stage in schedule.stages:
        fmt = canonical_format(stage.fmt)
        if not stages or stages[-1][1] != fmt:
            stages.append([stage.start, fmt])
    return {SCHEDULE: stages} if len(stages) > 1 else stages[0][1]


def _canonical_policy(fmt: Mapping[str, Any]) -> dict[str, Any]:
    if "rounding" in fmt:
        raise ValueError("A format has 'rounding' in it. The sweep varies it: give roundings=[...].")
    try:
        _policy(fmt)
        # None and variant "A" are defaults: a policy with these values equals a policy without these fields.
        given = {k: v for k, v in fmt.items() if v is not None and (k, v) != ("variant", "A")}
        canonical = {k: word for k, v in given.items() if (word := _canonical(k, v)) is not None}
        # A value that JSON cannot hold has no identity. The error is raised here, where its message can name the
        # format.
        json.dumps(canonical)
    except TypeError as error:
        raise ValueError(
            f"The format {shown(dict(fmt))} is not a policy: {error}. Expected: a name, or the fields of fpsim.Policy "
            f"in numbers and words. Use {{'error': 'e5m2'}}, for instance."
        ) from None
    return canonical


def _canonical(field: str, value: Any) -> Any:
    """Return the canonical form of a policy's field: one spelling for all values with the same meaning."""
    if field == "products" and isinstance(value, Mapping):
        defaults = (("backward", "original"), ("attention", False))
        return {k: _canonical_of_products(k, v) for k, v in value.items() if v is not None and (k, v) not in defaults}
    if field == "cache":
        stored = value if isinstance(value, Mapping) else dict.fromkeys(CACHED, value)
        return {name: _operands(stored[name]) for name in CACHED if stored.get(name) is not None} or None
    return format_words(value) if field in ROLES else value


def _canonical_of_products(field: str, value: Any) -> Any:
    if field == "accumulator":
        return _accumulator(value)
    if field == "attention" and isinstance(value, Mapping):
        return {k: _canonical_of_products(k, v) for k, v in value.items() if v is not None}
    return value if field in WORDS else _operands(value)


def _accumulator(value: Any) -> Any:
    if isinstance(value, list | tuple):  # an accumulator for each of the three products
        return [None if v is None else _accumulator(v) for v in value]
    if isinstance(value, fpsim.Accumulator):
        return str(value)
    with suppress(ValueError):  # raised for a name that is only an accumulator's, such as "hopper_fp8"
        return format_words(value)
    return value


def _operands(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_operands(v) for v in value]
    value = _operand_word(value)
    if _is_path(value):
        return value
    return format_words(value) if isinstance(value, str | fpsim.Codebook | fpsim.BlockFormat) else value


def _policy(fields: Mapping[str, Any]) -> Policy:
    """Return a policy from the fields of a cell's format."""
    if (cache := fields.get("cache")) is not None:
        pairs = cache.items() if isinstance(cache, Mapping) else [(name, cache) for name in CACHED]
        fields = {**fields, "cache": {name: _as_operand(v) for name, v in pairs}}
    products = fields.get("products")
    if not isinstance(products, Mapping):
        return Policy(**fields)
    make = Products.by_operand if {"x", "w", "dy"} & set(products) else Products
    given = _operands_of(products)
    if isinstance(points := products.get("attention"), Mapping):
        given["attention"] = fpsim.Attention(**_operands_of(points))
    return Policy(**{**fields, "products": make(**given)})


def _operands_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if k in WORDS else _as_operand(v) for k, v in fields.items()}


def needs_no_scaling(fmt: Any) -> bool:
    """True if scaling changes nothing, because no gradient is rounded, or each gradient has its own scale already."""
    return all(_has_nothing_to_scale(stage.fmt) for stage in as_schedule(split(fmt)[0]).stages)


def _has_nothing_to_scale(fmt: Any) -> bool:
    if fmt == BASELINE:
        return True
    if is_native(fmt):
        return False
    if _is_recipe(fmt):
        return gradients_have_scales(fpsim.recipe(fmt.removeprefix(fpsim.RECIPE_PREFIX).strip()))
    if not isinstance(fmt, Mapping):
        return isinstance(fpsim.as_format(fmt), fpsim.BlockFormat)
    return gradients_have_scales(_policy(fmt))


def has_own_rounding(fmt: Any) -> bool:
    """True if a cell's rounding changes nothing, because its formats are only recipes, or recipes and float32."""
    formats = [stage.fmt for stage in as_schedule(split(fmt)[0]).stages]
    return any(map(_is_recipe, formats)) and all(_is_recipe(inner) or inner == BASELINE for inner in formats)


def usual_rounding(fmt: Any, method: str | float) -> str:
    """Return the default rounding of a cell: to nearest, except for scaled gradients in formats of few bits.

    >>> usual_rounding("e2m1fn", "adaptive"), usual_rounding("e2m1fn", "torch"), usual_rounding("fp16", "adaptive")
    ('stochastic_gradients', 'nearest_even', 'nearest_even')
    """
    if is_native(fmt):
        return "nearest_even"
    formats = [stage.fmt for stage in as_schedule(split(fmt)[0]).stages if not _is_recipe(stage.fmt)]
    policies = [_as_policy(inner) for inner in formats]
    has_few_bits = any(policy.with_stochastic_gradients(FEW_BITS) is not policy for policy in policies)
    return STOCHASTIC_GRADIENTS if has_few_bits and fits_few_bits(method) else "nearest_even"


def policy_of(fmt: Any, rounding: str) -> FormatSchedule:
    """Return the formats of a cell as `train` takes them, without its update; recipes keep their own roundings.

    Raises ValueError for an unknown rounding, and for a rounding that a native format does not have.
    """
    if is_native(fmt):
        require_native(rounding, {})
        return FormatSchedule((Stage(0, fmt),))
    # "stochastic_gradients" is written into each policy by role, so that the stage itself has no rounding.
    is_mixed = rounding == STOCHASTIC_GRADIENTS
    return FormatSchedule(
        tuple(
            Stage(start, _policy_of(inner, rounding), None if _is_recipe(inner) or is_mixed else rounding)
            for start, inner, _ in as_schedule(split(fmt)[0]).stages
        )
    )


def _as_policy(fmt: Any) -> Policy:
    return _policy(fmt) if isinstance(fmt, Mapping) else fpsim.as_policy(fmt)


def _policy_of(fmt: Any, rounding: str) -> Any:
    if rounding == STOCHASTIC_GRADIENTS:
        return fmt if _is_recipe(fmt) else _as_policy(fmt).with_stochastic_gradients(ANY_BITS)
    policy = _policy(fmt) if isinstance(fmt, Mapping) else fmt
    if isinstance(policy, Policy):
        # This call only checks the policy: during planning, it refuses random bits and variants that the rounding
        # cannot use.
        policy.with_rounding(rounding)
    is_name = isinstance(fmt, str) and not _is_recipe(fmt)
    # This call, too, only checks: it refuses an unknown rounding.
    fpsim.as_policy(policy if is_name else None, rounding)
    return policy


EXPECTED = "Expected: a function of a module on Python's path, as 'module:function'."


@dataclass(frozen=True)
class ImportedOperand:
    """A function of a tensor and an axis, by its import path. It is imported when called, not when a ledger is read.

    A call raises ValueError if there is no function at the path.
    """

    path: str

    def __call__(self, x: Tensor, axis: int) -> Any:
        return self.function(x, axis)

    @property
    def function(self) -> Callable[[Tensor, int], Any]:
        """Import the function and return it."""
        found = imported("operand", self.path)
        if not callable(found):
            raise ValueError(f"The operand {shown(self.path)} is a {type(found).__name__}. {EXPECTED}")
        return found  # type: ignore[no-any-return]


def _is_path(value: object) -> bool:
    """True if a value has the form of a function's import path.

    >>> _is_path("mine:rounded"), _is_path("recipe:"), _is_path("e5m2 per tensor")
    (True, False, False)
    """
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and all(word.isidentifier() for word in (*module.split("."), name))


def _operand_word(value: Any) -> Any:
    """Return an operand as a configuration holds it: a function as its import path, and anything else unchanged.

    Raises ValueError for a function that cannot be imported by its name.
    """
    if not callable(value) or isinstance(value, type | Operand):
        return value
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    module = sys.modules.get(path.partition(":")[0])
    if path.startswith("__main__:") or not _is_path(path) or getattr(module, path.partition(":")[2], None) is not value:
        raise ValueError(
            f"The operand {shown(value)} is a function that a worker cannot import: a lambda, one of a notebook or a "
            f"script, or one inside of another. {EXPECTED}"
        )
    return path


def _as_operand(value: Any) -> Any:
    """Return an operand of a configuration as `Products` takes it."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_operand, value))
    word = _operand_word(value)
    return Operand(ImportedOperand(word), name=word) if _is_path(word) else value


def operand_functions(fmt: Any) -> Iterator[str]:
    """Yield the import paths of all operands anywhere in the format of a cell."""
    if isinstance(fmt, Mapping):
        for key, value in fmt.items():
            if key in ("products", "cache"):
                yield from _paths([*value.values()] if isinstance(value, Mapping) else value)
            else:
                yield from operand_functions(value)
    elif isinstance(fmt, list | tuple):
        for value in fmt:
            yield from operand_functions(value)


def _paths(value: Any) -> Iterator[str]:
    value = [*value.values()] if isinstance(value, Mapping) else value
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, list | tuple | Mapping):
            yield from _paths(each)
        elif _is_path(each):
            yield each
