"""The reference: each public name with signature, first sentence and arguments; for the site Sphinx's directives."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from functools import cached_property
from importlib import import_module

from ada_loss.lab.tasks import TASKS

# Public by a longer path: `import ada_loss` needs none of the libraries that these stand for, and no task.
LONGER: dict[str, dict[str, tuple[str, ...]]] = {
    "fpsim": {"fpsim.tensors.golden": ("FILE", "STREAM")},
    "ada_loss": {
        "ada_loss.integrations.huggingface": ("tell", "use_scaler"),
        "ada_loss.integrations.lightning": ("ScaledPrecision", "Tell"),
        "ada_loss.lab.results.trackers": ("MLflow", "TensorBoard", "TrackerOfRuns", "WandB"),
        "ada_loss.lab.tasks": tuple(TASKS),
        "ada_loss.layerwise.native": ("NativeScaling",),
    },
}
# Sentences for data, which has no docstring.
DATA = {
    "BITS": "The version of the numbers that models compute; a release in which they change counts it up.",
    "BLOCKS": "The formats whose numbers share scales, by name.",
    "CATALOGUE": "The floating-point formats, by name.",
    "CODEBOOKS": "The code books, by name.",
    "RECIPE_PREFIX": "Prefix of a recipe's name where a format is expected, `recipe:`.",
    "ROLES": "The roles of tensors: weight, activation, error and weight_grad.",
    "UPDATES": "The ways to store weights and optimizer states, by name.",
    "FILE": "The path of the golden vectors, `golden.json`.",
    "STREAM": "The version of the noise of stochastic rounding.",
    "FormatLike": "Type of an argument that names a format: a name, a format, or a policy.",
}
WIDTH = 100  # beyond it each argument of a signature has a line of its own
_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_ARGUMENT = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


class _Bare:
    """An annotation or a default that `inspect.Signature` prints as the source has it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _written(annotation: object) -> object:
    # as a string: that is how `from __future__ import annotations` keeps it, and quotes tell a reader nothing
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def signature(value: object) -> str:
    """The arguments in brackets, each on its own line where they are many; "" where there are none to know."""
    try:
        known = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = []
    for p in known.parameters.values():
        if p.name in ("self", "cls"):
            continue
        # a default that Python prints with its address would be another one in each process
        by_address = p.default is not p.empty and re.search(r" at 0x|^<", repr(p.default)) is not None
        default = _Bare("...") if by_address else p.default
        parameters.append(p.replace(annotation=_written(p.annotation), default=default))
    returned = _written(known.return_annotation)
    if isinstance(value, type):
        returned = known.empty
    whole = str(known.replace(parameters=parameters, return_annotation=returned))
    if len(whole) <= WIDTH:
        return whole
    names = [str(known.replace(parameters=[p], return_annotation=known.empty))[1:-1] for p in parameters]
    kinds = [p.kind for p in parameters]
    first = next((i for i, kind in enumerate(kinds) if kind is inspect.Parameter.KEYWORD_ONLY), None)
    names = [name.removeprefix("*, ") for name in names]
    if first is not None and inspect.Parameter.VAR_POSITIONAL not in kinds:
        names.insert(first, "*")
    lines = "".join(f"    {name},\n" for name in names)
    return f"(\n{lines}){'' if returned is known.empty else f' -> {returned}'}"


def escaped(text: str) -> str:
    """Plain text in Markdown: `code` stays, and `2**16 ... 2**32` does not become bold."""
    last, parts = 0, []
    for code in _CODE.finditer(text):
        parts += [re.sub(r"([*<])", r"\\\1", text[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, re.sub(r"([*<])", r"\\\1", text[last:])])


def first_sentence(text: str) -> str:
    """The first paragraph of a docstring up to its first full stop, on one line."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    found = re.match(r".*?(?<!e\.g)(?<!i\.e)[.:](?= [A-Z`]|$)", paragraph)
    return escaped(found[0] if found else paragraph)


def arguments(text: str) -> list[str]:
    """The entries of the docstring's `Args:`, each a line of a list."""
    _, mark, after = text.partition("\nArgs:\n")
    if not mark:
        return []
    entries: list[list[str]] = []
    for line in after.splitlines():
        if line and not line.startswith(" "):
            break
        if line.startswith("    ") and not line.startswith("     "):
            entries.append([line.strip()])
        elif line.strip() and entries:
            entries[-1].append(line.strip())
    items = []
    for entry in entries:
        found = _ARGUMENT.fullmatch(" ".join(entry))
        items.append(f"- `{found[1]}`: {escaped(found[2])}" if found else f"- {escaped(' '.join(entry))}")
    return items


def _members(kind: type) -> Iterable[tuple[str, object]]:
    """The public methods and properties with a docstring that a class of ours defines or inherits from ours."""
    seen: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in ("fpsim", "ada_loss"):
            seen |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in seen.items():
        is_member = isinstance(value, property | cached_property | classmethod | staticmethod)
        if (is_member or inspect.isfunction(value)) and value.__doc__:
            yield name, value


def _member(name: str, value: object) -> list[str]:
    if isinstance(value, property | cached_property):
        return [f"- `.{name}`: {first_sentence(inspect.getdoc(value) or '')}"]
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    text = inspect.getdoc(function) or ""
    shown = " ".join(signature(function).split()).replace("( ", "(").replace(", )", ")")
    lines = [f"- `.{name}{shown}`: {first_sentence(text)}".rstrip(": ")]
    return lines + [f"  {line}" for line in arguments(text)]


def _class_doc(value: type) -> str:
    """The docstring, and that of `__init__` behind it, where the arguments of some classes stand."""
    own = value.__dict__.get("__init__")
    return "\n\n".join(inspect.cleandoc(text) for text in (value.__doc__, own and own.__doc__) if text)


def entry(package: str, name: str) -> str:
    """One public name; that of a longer path has the path in its heading, for `Tell` and `tell` would be one link."""
    value = getattr(import_module(package), name)
    parts = [f"### `{package}.{name}`" if "." in package else f"### `{name}`"]
    if name in DATA:
        return "\n\n".join([*parts, DATA[name]])
    text = _class_doc(value) if isinstance(value, type) else inspect.getdoc(value) or ""
    shown = signature(value)
    parts += [f"```python\n{package}.{name}{shown}\n```"] if shown else []
    parts += [first_sentence(text), "\n".join(arguments(text))]
    if isinstance(value, type):
        members = "\n".join(line for member in _members(value) for line in _member(*member))
        parts += ["Methods and properties:", members] if members else []
    return "\n\n".join(part for part in parts if part)


def by_kind(package: str) -> dict[str, list[str]]:
    """The public names under their headings, in the order of the alphabet."""
    names = sorted(sys.modules[package].__all__, key=str.lower)
    classes = [name for name in names if isinstance(getattr(sys.modules[package], name), type)]
    return {"Classes": classes, "Functions and data": [name for name in names if name not in classes]}


def markdown(package: str) -> str:
    """Every public name of a package, as a forge shows it."""
    parts = []
    for title, names in by_kind(package).items():
        links = " · ".join(f"[{name}](#{name.lower()})" for name in names)
        parts += [f"## {title}", links, *(entry(package, name) for name in names)]
    parts.append("## By a longer path")
    for module, names in LONGER[package].items():
        parts += [entry(module, name) for name in names]
    return "\n\n".join(parts)


def _directive(package: str, name: str) -> str:
    value = getattr(import_module(package), name)
    if name in DATA:
        return f".. py:data:: {package}.{name}\n\n   {DATA[name]}"
    return (
        f".. autoclass:: {package}.{name}\n   :members:"
        if isinstance(value, type)
        else f".. autofunction:: {package}.{name}"
    )


def directives(package: str) -> str:
    """Every public name of a package, as Sphinx reads its docstring whole."""
    parts = []
    for title, names in by_kind(package).items():
        shown = "\n\n".join(_directive(package, name) for name in names)
        parts.append(f"## {title}\n\n```{{eval-rst}}\n{shown}\n```")
    # members of these are those of the libraries that they derive from
    longer = [_directive(module, name) for module, names in LONGER[package].items() for name in names]
    shown = "\n\n".join(directive.removesuffix("\n   :members:") for directive in longer)
    parts.append(f"## By a longer path\n\n```{{eval-rst}}\n{shown}\n```")
    return "\n\n".join(parts)
