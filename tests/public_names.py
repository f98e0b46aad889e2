"""Which names of fpsim and ada_loss a piece of code reads, and which of these are private."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import ada_loss
import fpsim

PACKAGES = {"fpsim": fpsim, "ada_loss": ada_loss}


def names_in(code: str) -> Iterator[str]:
    """Each name that is imported from the packages, or read from what was imported, by its whole path.

    >>> sorted(names_in("import fpsim as f\\nfrom ada_loss.lab.tasks import digits\\nf.Policy.with_rounding"))
    ['ada_loss.lab.tasks.digits', 'fpsim', 'fpsim.Policy.with_rounding']
    """
    tree = ast.parse(code)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:  # `a.b.c` once, not `a.b` too
            attributes, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                attributes.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id in bound:
                yield ".".join([bound[at.id], *reversed(attributes)])


def is_private(name: str, longer: Mapping[str, tuple[str, ...]] | None = None) -> bool:
    """Whether a path leads to something of the packages that no release promises.

    longer: {module: names} that are public too, for those that import these names by a longer path.

    >>> [is_private(name) for name in ("fpsim.Policy", "fpsim.Policy._roles", "fpsim.formats", "torch._C")]
    [False, True, True, False]
    """
    package, _, rest = name.partition(".")
    if package not in PACKAGES or not rest:
        return False
    for module, known in (longer or {}).items():
        if name == module or (name.startswith(f"{module}.") and name[len(module) + 1 :].partition(".")[0] in known):
            return False
    first, *others = rest.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in others)
    return hidden or (first not in PACKAGES[package].__all__ and not (first.startswith("__") and first.endswith("__")))


def private_names_in(code: str, longer: Mapping[str, tuple[str, ...]] | None = None) -> list[str]:
    """The private names of the packages that a piece of code reads; see `is_private`."""
    return sorted({name for name in names_in(code) if is_private(name, longer)})
