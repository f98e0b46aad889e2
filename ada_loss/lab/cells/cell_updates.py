"""Updates of cells (the formats in which an optimizer stores its tensors): canonical form, label, and `fpsim.Update`.

If the optimizer of a cell stores float32, the cell names only its format, as if there were no updates. With an update,
{"format": format, "update": update} replaces the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

import fpsim
from ada_loss.lab.training.loop import make_optimizer
from ada_loss.lab.training.options import TrainOptions
from ada_loss.lab.training.rollouts import ROLLOUT
from fpsim import UPDATES, Update
from fpsim.checks import did_you_mean, shown

__all__ = [
    "UPDATE",
    "canonical_update",
    "format_words",
    "require_update",
    "split",
    "update_label",
    "update_of",
    "with_updates",
]

# The key of the update in a mapping that replaces a format. The key of the format itself is "format".
UPDATE = "update"
FORMAT = "format"
FLOAT32 = "float32"  # the name of an update that rounds nothing
FIELDS = {field.name: field for field in fields(Update)}


def split(fmt: Any) -> tuple[Any, Any]:
    """Split a cell's format into the trainer's format and the update, which is None if the optimizer stores float32.

    >>> split("fp16"), split({"format": "fp32", "update": "bf16_sr"})
    (('fp16', None), ('fp32', 'bf16_sr'))
    """
    if not isinstance(fmt, Mapping) or not fmt.keys() & {UPDATE, ROLLOUT}:
        return fmt, None
    others = [key for key in fmt if key not in (FORMAT, UPDATE, ROLLOUT)]
    if others:
        kind = "an update" if UPDATE in fmt else "a rollout"
        raise ValueError(
            f"A format with {kind} has {', '.join(map(shown, others))}, too. Use {{'format': ..., "
            f"'{UPDATE if UPDATE in fmt else ROLLOUT}': ...}}; the format may be a mapping."
        )
    return fmt.get(FORMAT, "fp32"), fmt.get(UPDATE)


def with_updates(formats: Sequence[Any], updates: Sequence[Any] | None) -> list[Any]:
    """Return the entries of formats that combine each format of a sweep with each update.

    >>> with_updates(["fp16"], ["float32", "bf16_sr"])
    ['fp16', {'format': 'fp16', 'update': 'bf16_sr'}]
    >>> with_updates(["fp16"], [{"name": "mine", "weight": "bf16"}])
    [{'name': 'fp16, mine', 'format': 'fp16', 'update': {'weight': 'bf16'}}]
    """
    if updates is None:
        return [*formats]
    if isinstance(updates, str | bytes | bytearray | Mapping | Update) or not isinstance(updates, Sequence):
        raise TypeError(f"updates is {shown(updates)}. Expected: a list, such as ['float32', 'bf16_sr'].")
    if not updates:
        raise ValueError("updates is empty, so there is no cell to run. Give at least one, such as 'float32'.")
    return [_joined(fmt, update) for fmt in formats for update in updates]


def _joined(entry: Any, given: Any) -> Any:
    """Return the entry of formats that combines a format with an update, both given as entries of a sweep."""
    update, name = given, ""
    if isinstance(given, Mapping) and "name" in given:
        name, rest = given["name"], {key: value for key, value in given.items() if key != "name"}
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"Got the name {shown(name)} of an update. Use text, such as 'stochastic'.")
        update = rest[UPDATE] if {*rest} == {UPDATE} else rest
    if isinstance(entry, Mapping) and UPDATE in entry:
        raise ValueError(f"The format {shown(dict(entry))} has an update of its own. Give it in formats or in updates.")
    # A cell without an update must have the same identity in a sweep with `updates` as in one without.
    if canonical_update(update) is None:
        return entry
    own = entry if isinstance(entry, Mapping) and "name" in entry else None
    fmt = entry if own is None else own.get(FORMAT, {key: value for key, value in own.items() if key != "name"})
    joined = {FORMAT: fmt, UPDATE: update}
    if isinstance(entry, Mapping) and ROLLOUT in entry:
        fmt = split({key: value for key, value in entry.items() if key != "name"})[0]
        # In the canonical form the rollout is on the same level as the format and the update.
        joined = {FORMAT: fmt, UPDATE: update, ROLLOUT: entry[ROLLOUT]}
    if not name and own is None:
        return joined
    words = [own["name"] if own is not None else fmt if isinstance(fmt, str) else "", name or update_label(update)]
    return {"name": ", ".join(str(word) for word in words if word and word != "fp32"), **joined}


def canonical_update(update: Any) -> Any:
    """Return the canonical form of an update: a name of `fpsim.UPDATES`, or fields as JSON; None if it rounds nothing.

    Raises:
        ValueError: for an unknown name or field, and for values that `fpsim.Update` refuses.
        TypeError: for anything but an update.

    >>> canonical_update({"weight": "bf16", "rounding": "stochastic", "states": "bf16"}), canonical_update("float32")
    ('bf16_sr', None)
    >>> canonical_update({"weight": "bfloat16", "compensation": None})
    {'weight': 'bf16'}
    """
    parsed = _update(update)
    if parsed.is_float32:
        return None
    fields = _as_json(parsed)
    # Fields of a known update become its name, because both spellings are one cell.
    return next((name for name, known in UPDATES.items() if _as_json(known) == fields), fields)


def _update(update: Any) -> Update:
    if update is None or update == FLOAT32:
        return Update()
    if isinstance(update, str):
        if update not in UPDATES:
            raise ValueError(
                f"Unknown update {shown(update)}.{did_you_mean(update, UPDATES)} Known: float32, {', '.join(UPDATES)}, "
                f"or the fields of fpsim.Update: {{weight: bf16, rounding: stochastic}}."
            )
        return UPDATES[update]
    if isinstance(update, Update):
        return update
    if not isinstance(update, Mapping):
        raise TypeError(
            f"One of the updates is {shown(update)}. Expected: a name such as 'bf16_sr', or fields of fpsim.Update."
        )
    for name in update:
        if name not in FIELDS:
            raise ValueError(
                f"The update {shown(dict(update))} has {shown(name)}.{did_you_mean(name, FIELDS)} Known: "
                f"{', '.join(FIELDS)}."
            )
    inner = update.get("overrides", {})
    if isinstance(inner, Mapping):
        update = {**update, "overrides": {pattern: _update(one) for pattern, one in inner.items()}}
    return Update(**update)


def _as_json(update: Update) -> dict[str, Any]:
    """Return the fields of an update that differ from the default, in words that `Update` reads."""
    changed: dict[str, Any] = {}
    plain = Update()
    for name in FIELDS:
        value = getattr(update, name)
        if value == getattr(plain, name):
            continue
        if name in ("weight", "master"):
            value = format_words(value)
        elif name == "states":
            patterns = update.state_patterns.items()
            value = {state: None if fmt is None else format_words(fmt) for state, fmt in patterns}
            value = value["*"] if {*value} == {"*"} else value
        elif name == "overrides":
            if wrong := [pattern for pattern in value if not isinstance(pattern, str)]:
                raise ValueError(
                    f"overrides has the class {wrong[0].__name__}, which no ledger keeps. Use the names of modules, "
                    f"with * for parts."
                )
            value = {pattern: canonical_update(inner) for pattern, inner in value.items()}
        elif isinstance(value, Mapping):
            value = dict(value)
        changed[name] = value
    json.dumps(changed)
    return changed


def format_words(fmt: Any) -> str:
    """Return words that `as_format` reads: a format's name, or the values of a code book that has no name.

    >>> format_words("half"), format_words("mxfp4"), format_words(fpsim.Codebook((-1.0, 0.0, 1.0)))
    ('fp16', 'mxfp4', "Codebook(values=(-1.0, 0.0, 1.0), ties='even', borders=None)")
    """
    parsed = fpsim.as_format(fmt)
    element = parsed.element if isinstance(parsed, fpsim.BlockFormat) else parsed
    has_name = not isinstance(element, fpsim.Codebook) or str(element) in fpsim.CODEBOOKS
    return str(parsed) if has_name else repr(parsed)


def update_label(update: Any) -> str:
    """Return the label of an update, for tables.

    >>> update_label("bf16_sr"), update_label({"weight": "bf16", "compensation": "kahan"}), update_label(None)
    ('bf16_sr', 'weight=bf16 compensation=kahan', 'float32')
    """
    if update is None:
        return FLOAT32
    return " ".join(_spoken(update)) if isinstance(update, Mapping) else str(update)


def _spoken(fields: Mapping[str, Any]) -> Iterable[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from (
                f"{key}={update_label(inner) if isinstance(inner, Mapping) else inner}" for key, inner in value.items()
            )
        else:
            yield f"{name}={value}"


def update_of(fmt: Any) -> Update | None:
    """Return the update of a cell's format; None if the optimizer stores float32."""
    _, update = split(fmt)
    return None if update is None else _update(update)


def require_update(fmt: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an update that the optimizer of these options does not support.

    The check runs one step of a tiny model. It leaves out overrides, because they name modules of the real model.
    """
    update = update_of(fmt)
    if update is None:
        return
    for name, wrong in (("accumulation", "float64"), ("master_weights", "none")):
        if options[name] == wrong:
            raise ValueError(
                f"task_options.{name}={wrong!r} was given with the update {update_label(split(fmt)[1])}. An update "
                f"stores the float32 weights of its optimizer: omit {name}, or the update."
            )
    model = torch.nn.Linear(1, 1)
    optimizer = make_optimizer(TrainOptions(**options), model)
    # One step of a tiny model is needed, because states have names only after a step. Overrides are left out, because
    # they name modules of the real model, and `min_size`, because it would exempt a weight of two elements.
    fpsim.quantize_optimizer(optimizer, replace(update, overrides={}, min_size=0))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
