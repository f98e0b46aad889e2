"""What `dir` and tab completion offer, and the version."""

from __future__ import annotations

import inspect
import re
from functools import partial
from importlib.metadata import version
from types import ModuleType

import pytest

import ada_loss
import fpsim


@pytest.mark.parametrize("package", [fpsim, ada_loss], ids=["fpsim", "ada_loss"])
def test_dir_offers_the_public_names_and_no_modules(package: ModuleType) -> None:
    names = dir(package)
    assert {name for name in names if not name.startswith("__")} == set(package.__all__)
    assert not any(isinstance(getattr(package, name), ModuleType) for name in names)


@pytest.mark.parametrize("package", [fpsim, ada_loss], ids=["fpsim", "ada_loss"])
def test_the_version_is_that_of_the_distribution(package: ModuleType) -> None:
    assert package.__version__ == version("ada-loss")
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        _ = package.quantise


def documented() -> dict[str, str]:
    """The docstrings of all public functions and classes, up to the first example."""
    found = {}
    for package in (fpsim, ada_loss):
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                found[f"{package.__name__}.{name}"] = (inspect.getdoc(thing) or "").partition("\n>>> ")[0]
    return found


def arguments_of(name: str) -> list[str]:
    package, _, word = name.partition(".")
    thing = getattr({"fpsim": fpsim, "ada_loss": ada_loss}[package], word)
    return [*inspect.signature(thing).parameters] if inspect.isfunction(thing) else []


@pytest.mark.parametrize("name", documented())
def test_arguments_and_errors_of_public_names_stand_under_headings(name: str) -> None:
    text = documented()[name]
    assert text, "a public name without a docstring"
    assert not re.search(r"^(Raises|Returns) ", text, re.MULTILINE)
    unheaded = [a for a in arguments_of(name) if re.search(rf"^(\w+, )*{a}(, \w+)*: ", text, re.MULTILINE)]
    assert unheaded == []
    assert not arguments_of(name) or "\nArgs:\n" in text


@pytest.mark.parametrize("name", ["sweep", "resume", "search"])
def test_help_of_the_lab_names_public_things_only(name: str) -> None:
    """`help(ada_loss.sweep)` is all that a user has: "see `plan`" leads nowhere."""

    def is_known(word: str) -> bool:
        first, *rest = word.split(".")
        homes = [{"fpsim": fpsim, "ada_loss": ada_loss}.get(first), getattr(ada_loss, first, None)]
        return word in arguments or any(home is not None and all(map(partial(hasattr, home), rest)) for home in homes)

    arguments = arguments_of(f"ada_loss.{name}")
    words = re.findall(r"`([A-Za-z_.]+)`", documented()[f"ada_loss.{name}"])
    assert words
    assert [word for word in words if not is_known(word)] == []
    documented_arguments = re.findall(r"^    ((?:\w+, )*\w+): ", documented()[f"ada_loss.{name}"], re.MULTILINE)
    assert name != "sweep" or {a for line in documented_arguments for a in line.split(", ")} >= {*arguments}
