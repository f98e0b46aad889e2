"""Which module of a model a dump's module is: names that are mapped, and products that an engine has fused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fpsim.checks import shown
from fpsim.insight.engines.sides import renamed

__all__ = ["Source", "mapped", "require_dump_names"]

# What vLLM and SGLang fuse along the last axis, and what runs in the place of the head. They hold where the model has
# no module of the fused name itself, as Phi-3 of transformers has.
FUSED: dict[str, str | tuple[str, ...]] = {
    "*.qkv_proj": ("*.q_proj", "*.k_proj", "*.v_proj"),
    "*.gate_up_proj": ("*.gate_proj", "*.up_proj"),
    "logits_processor": "lm_head",
}
ENGINES = ("vllm", "sglang")


class Source(NamedTuple):
    """Where the tensors of a module are: a module of the dump, and which part of the last axis of its results.

    before: the modules whose results come first on that axis.
    """

    module: str
    before: tuple[str, ...] = ()
    is_part: bool = False


def require_dump_names(names: Any) -> dict[str, str | tuple[str, ...]]:
    """The mapping of a dump's names. Raises TypeError for another one.

    >>> require_dump_names({"*.qkv_proj": ["*.q_proj", "*.k_proj", "*.v_proj"]})
    {'*.qkv_proj': ('*.q_proj', '*.k_proj', '*.v_proj')}
    """
    found: dict[str, str | tuple[str, ...]] = {}
    for key, value in names.items() if isinstance(names, Mapping) else [] if names is None else [(names, None)]:
        parts = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not isinstance(key, str) or not parts or not all(isinstance(part, str) for part in parts):
            raise TypeError(
                f"names={shown(names)}. Expected for a dump: a mapping from its names, their beginnings or endings, to "
                f"the model's: {{'transformer.h': 'model.layers', '*.qkv_proj': ('*.q_proj', '*.k_proj', '*.v_proj')}}."
            )
        found[key] = value if isinstance(value, str) else parts
    return found


def mapped(
    modules: Iterable[str], known: Iterable[str], names: Mapping[str, str | tuple[str, ...]], engine: str | None
) -> tuple[dict[str, Source], list[str]]:
    """The source of each of a model's modules that a dump has, and the dump's modules that the model has not.

    modules: of the dump; known: of the model.
    """
    there = {*known}
    is_known_engine = engine is not None and any(word in engine.lower() for word in ENGINES)
    found: dict[str, Source] = {}
    alone: list[str] = []
    for module in modules:
        targets = _targets(module, names)
        if not all(target in there for target in targets) and is_known_engine:
            targets = _targets(targets[0], FUSED) if len(targets) == 1 else targets
        if not all(target in there for target in targets):
            alone.append(module)
            continue
        for i, target in enumerate(targets):
            found[target] = Source(module, targets[:i], len(targets) > 1)
    return found, alone


def _targets(module: str, names: Mapping[str, str | tuple[str, ...]]) -> tuple[str, ...]:
    """A dump's module in the model's names: by a whole name or an ending, else by the longest beginning."""
    beginnings = {key: value for key, value in names.items() if isinstance(value, str) and not key.startswith("*.")}
    for key, value in names.items():
        parts = (value,) if isinstance(value, str) else value
        if key == module:
            return parts
        if key.startswith("*.") and module.endswith(key[1:]):
            before = renamed(module[: -len(key[1:])], beginnings)
            return tuple(f"{before}{part[1:]}" if part.startswith("*.") else part for part in parts)
    return (renamed(module, beginnings),)
