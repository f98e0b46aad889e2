"""Names of formats: the name given in a sweep, otherwise a short name. Names are not part of a cell's identity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fpsim
from ada_loss.files import mapping_in, strict_json, write_atomically
from ada_loss.lab.cells.cell_formats import BASELINE, canonical_format, label, rollout_words
from ada_loss.lab.cells.cell_updates import UPDATE, update_label
from ada_loss.lab.training.format_schedule import SCHEDULE, FormatSchedule, as_schedule
from ada_loss.lab.training.rollouts import ROLLOUT
from fpsim.checks import shown

__all__ = ["file_name", "keep_names", "names_of", "read_names", "require_different", "short_name", "unnamed"]

FILE = "names.json"  # the name of the file in the folder of a sweep
LONGEST = 60  # the largest number of letters in a name
ELEMENTS = {"e4m3fn": "FP8", "e5m2": "FP8 e5m2", "e2m3fn": "FP6 e2m3", "e3m2fn": "FP6 e3m2", "e2m1fn": "FP4"}
BLOCKS = {"mxfp8_e4m3": "MXFP8", "mxfp8_e5m2": "MXFP8 e5m2", "mxfp6_e2m3": "MXFP6 e2m3", "mxfp6_e3m2": "MXFP6 e3m2"}
OPERANDS = ("x", "w", "dy")
TILES = ("per 1x128 ceil", "per 128x128 ceil")


def unnamed(entry: Any) -> tuple[Any, str]:
    """Split an entry of a sweep's formats into the format and its name, which is "" if it has none.

    entry: a format, {"name": ..., "format": a format}, or a format as a mapping that has the key "name" too.
    Raises ValueError for an invalid name, and for a name without a format.

    >>> unnamed({"name": "mine", "error": "e5m2"}), unnamed({"name": "mine", "format": "mxfp4"}), unnamed("fp16")
    (({'error': 'e5m2'}, 'mine'), ('mxfp4', 'mine'), ('fp16', ''))
    """
    if not isinstance(entry, Mapping) or "name" not in entry:
        return entry, ""
    name, rest = entry["name"], {key: value for key, value in entry.items() if key != "name"}
    if not _is_name(name):
        raise ValueError(f"Got the name {shown(name)} of a format. Use text of 1 to {LONGEST} letters, in one line.")
    if not rest or ("format" in rest and not {*rest} <= {"format", UPDATE, ROLLOUT}):
        raise ValueError(
            f"Got the name {shown(name)} with {', '.join(map(str, rest)) or 'nothing'}. "
            f"Use {{name: ..., format: ...}}, or a name with the fields of fpsim.Policy."
        )
    # If there is an update or a rollout, the mapping itself is the format; see `cell_formats`.
    fmt = rest if {UPDATE, ROLLOUT} & {*rest} else rest.get("format", rest)
    is_baseline = name.lower() in (BASELINE, "float32")
    if is_baseline and canonical_format(fmt) != BASELINE:
        raise ValueError(f"Got the name {shown(name)} of another format. It is that of the baseline. Use another name.")
    return fmt, name


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and 0 < len(name.strip()) <= LONGEST


def short_name(fmt: Any) -> str:
    """Return a short name of a canonical format; its `label` if it has no short name.

    >>> [short_name(fmt) for fmt in ("fp16", "recipe:bf16", "recipe:fp8_current", "mxfp4", "e4m3fn per tensor fp32")]
    ['fp16', 'bf16', 'fp8_current recipe', 'MXFP4', 'FP8, a scale per tensor']
    >>> short_name({"products": {"x": "e2m1fn per tensor fp32", "w": "e2m1fn per tensor fp32", "dy": "e2m1fn"}})
    'FP4, gradients by method'
    >>> short_name({"products": {"dy": "e5m2 per row fp32"}}), short_name({"error": "e5m2", "weight_grad": "e5m2"})
    ('FP8 e5m2 gradients, a scale per row', 'e5m2 gradients')
    >>> short_name({"format": "fp32", "update": "bf16_sr"}), short_name({"format": "mxfp4", "update": "bf16_sr"})
    ('bf16_sr', 'MXFP4, bf16_sr')
    >>> short_name({"format": "recipe:bf16", "rollout": {"format": "recipe:fp8_tile", "weights": "token"}})
    'bf16, rollouts fp8_tile recipe, weights token'
    """
    if isinstance(fmt, str):
        return _of_word(fmt)
    if not isinstance(fmt, Mapping):
        return label(fmt)
    if ROLLOUT in fmt:
        own = {name: inner for name, inner in fmt.items() if name != ROLLOUT}
        return f"{short_name(own if UPDATE in own else own.get('format'))}, {rollout_words(fmt[ROLLOUT], short_name)}"
    if UPDATE in fmt:
        words = update_label(fmt[UPDATE])
        return words if fmt.get("format") == BASELINE else f"{short_name(fmt.get('format'))}, {words}"
    if SCHEDULE in fmt:
        try:
            stages = tuple(stage._replace(fmt=short_name(stage.fmt)) for stage in as_schedule(fmt).stages)
        # A foreign ledger may hold anything under this key.
        except (TypeError, ValueError):
            return label(fmt)
        return str(FormatSchedule(stages))
    products = fmt.get("products")
    if fmt.keys() == {"products"} and isinstance(products, Mapping) and {*products} <= {*OPERANDS}:
        return _of_operands({k: str(v) for k, v in products.items()}) or label(fmt)
    if {"error", "weight_grad"} <= fmt.keys() <= {"error", "weight_grad", "overflow"}:
        if fmt["error"] == fmt["weight_grad"]:
            overflow = f", overflow to {fmt['overflow']}" if isinstance(fmt.get("overflow"), str) else ""
            if overflow or "overflow" not in fmt:
                return f"{fmt['error']} gradients{overflow}"
    return label(fmt)


def _of_word(fmt: str) -> str:
    if fmt.startswith(fpsim.RECIPE_PREFIX):
        name = fmt.removeprefix(fpsim.RECIPE_PREFIX)
        return name if name in ("bf16", "fp16") else f"{name} recipe"
    if fmt in fpsim.BLOCKS:
        return BLOCKS.get(fmt, fmt.upper())
    element, scale = _parts(fmt)
    return f"{element}, {scale}" if scale else fmt


def _parts(fmt: str) -> tuple[str, str]:
    """Return the element of a format and its scale, both in words; "" for the scale of a format without scales.

    >>> _parts("e4m3fn per row fp32"), _parts("e2m1fn per tensor fp32 delayed"), _parts("e5m2")
    (('FP8', 'a scale per row'), ('FP4', 'a delayed scale per tensor'), ('FP8 e5m2', ''))
    """
    element, per, rest = fmt.partition(" per ")
    if not per:
        return ELEMENTS.get(fmt, fmt), ""
    block, *others = rest.split()
    kind = "a delayed scale" if "delayed" in others else "a scale"
    more = " ".join(word for word in others if word not in ("fp32", "delayed"))
    return ELEMENTS.get(element, element), f"{kind} per {block}{f' ({more})' if more else ''}"


def _of_operands(products: Mapping[str, str]) -> str:
    """Return a name for the formats of operands; "" if they have no common name."""
    if {*products} == {"dy"}:
        fmt = products["dy"]
        element, scale = (_of_word(fmt), "") if fmt in fpsim.BLOCKS else _parts(fmt)
        return f"{element} gradients, {scale}" if scale else f"{element} gradients"
    if {*products} != {*OPERANDS}:
        return ""
    parts = {name: _parts(fmt) for name, fmt in products.items()}
    elements = {element for element, _ in parts.values()}
    # The names of block formats do not separate element and scale.
    if len(elements) > 1 or any(fmt in fpsim.BLOCKS for fmt in products.values()):
        return ""
    (element,) = elements
    # If the format of the gradient has no scale, the cell's scaling method scales the gradient.
    if not parts["dy"][1]:
        return f"{element}, gradients by method" if parts["x"][1] == parts["w"][1] else ""
    if all(fmt.endswith(TILES) for fmt in products.values()) and len({*products.values()}) > 1:
        return f"{element}, a scale per tile"
    return f"{element}, {parts['x'][1]}" if len({*products.values()}) == 1 else ""


def names_of(formats: Iterable[Any], given: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the names of a sweep's formats, by `label`: the given name, else a short name, else the label itself.

    A name that is also the name or the label of another format is not used; both formats keep their labels.

    >>> names_of(["recipe:fp16", "mxfp4"], {"mxfp4": "mine"})
    {'recipe:fp16': 'fp16', 'mxfp4': 'mine'}
    >>> names_of(["recipe:fp16", "fp16"])
    {'recipe:fp16': 'recipe:fp16', 'fp16': 'fp16'}
    """
    names = {label(fmt): short_name(fmt) for fmt in formats}
    names |= {words: name for words, name in given.items() if words in names}
    # Names are compared without case, because `where={"format": ...}` ignores the case of names too.
    used = Counter(word for words, name in names.items() for word in {words.lower(), name.lower()})
    return {words: name if used[name.lower()] == 1 else words for words, name in names.items()}


def read_names(folder: Path) -> dict[str, str]:
    """Read the stored names of a sweep's folder, {label: name}; invalid entries are skipped."""
    return {words: name for words, name in mapping_in(folder / FILE).items() if _is_name(name)}


def keep_names(folder: Path, given: Mapping[str, str]) -> None:
    """Store names of formats in the folder of a sweep, in addition to those already there.

    Raises ValueError if two formats have the same name.
    """
    kept = read_names(folder)
    together = {**kept, **given}
    require_different(together)
    if together != kept:
        write_atomically(folder / FILE, strict_json(together).encode())


def require_different(names: Mapping[str, str]) -> None:
    """Raise ValueError if two formats, by their labels, have the same name."""
    seen: dict[str, str] = {}
    for words, name in names.items():
        other = seen.setdefault(name.lower(), words)
        if other != words:
            raise ValueError(f"The name {shown(name)} is that of two formats, {other} and {words}. Give each its own.")


def file_name(words: str) -> str:
    """Return a file name made of words: characters that a file system may refuse become underscores.

    >>> file_name("FP8, a scale per 1x128 (ceil) torch seed 0"), file_name("a/b:c")
    ('FP8, a scale per 1x128 (ceil) torch seed 0', 'a_b_c')
    """
    return re.sub(r"[^\w ,.=()+-]|^\.", "_", words)[:120].strip()
