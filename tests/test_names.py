"""What `dir` and tab completion offer, and the version."""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from public_names import PACKAGES, is_private, private_names_in
from torch import nn

import ada_loss
import fpsim

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import reference  # noqa: E402

LONGER = reference.LONGER["fpsim"] | reference.LONGER["ada_loss"]
# Where a number was measured: a place in the sources, which nobody is told to import.
ORIGINS = {"ada_loss.lab.studies.depth"}
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if path.stem != "architecture"]


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


def test_a_name_of_another_library_leads_to_what_takes_its_place_here() -> None:
    package: ModuleType = fpsim
    with pytest.raises(AttributeError, match=r"'OptimLP', .* Use fpsim\.quantize_optimizer\("):
        _ = package.OptimLP
    with pytest.raises(ImportError, match=r"'float_quantize', .* Use fpsim\.round_to\("):
        exec("from fpsim import float_quantize")
    assert not hasattr(package, "OptimLP")  # a program may ask
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from fpsim import no_such_name")


@pytest.mark.parametrize("theirs", fpsim._NAMES_OF_OTHERS)
def test_what_takes_the_place_of_anothers_name_exists_and_can_be_called_so(theirs: str) -> None:
    assert not hasattr(fpsim, theirs)
    calls = re.findall(r"\b(fpsim|ada_loss)\.(\w+)\(", fpsim._NAMES_OF_OTHERS[theirs])
    assert calls
    for package, name in calls:
        assert name in {"fpsim": fpsim, "ada_loss": ada_loss}[package].__all__
    if "..." not in fpsim._NAMES_OF_OTHERS[theirs]:
        weight = nn.Parameter(torch.zeros(2, 32))
        given = {"fpsim": fpsim, "x": torch.ones(2, 32), "model": nn.Linear(2, 2)}
        eval(fpsim._NAMES_OF_OTHERS[theirs], given | {"optimizer": torch.optim.Adam([weight])})


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


PRIVATE = {
    "import ada_loss\nfrom ada_loss import Task as T\nada_loss.sweep()\nT.goals": [],
    "import fpsim as f\nf.formats.floats": ["fpsim.formats.floats"],
    "from ada_loss.lab.training import train": ["ada_loss.lab.training.train"],
    "import ada_loss.lab.tasks as tasks\ntasks.digits(0)": ["ada_loss.lab.tasks", "ada_loss.lab.tasks.digits"],
    "from fpsim import Policy\nPolicy._roles": ["fpsim.Policy._roles"],
    "import torch\ntorch._C, fpsim.nothing, ada_loss": [],  # what is not imported is not the package
    "import fpsim\nfpsim.__version__, fpsim.round_to(x).mean()": [],
}


@pytest.mark.parametrize("code", PRIVATE)
def test_a_private_name_is_found_however_it_is_imported(code: str) -> None:
    assert private_names_in(code) == PRIVATE[code]


def test_a_longer_path_is_public_for_its_names_alone() -> None:
    code = "from ada_loss.lab.tasks import digits, find_task\nimport ada_loss.lab.tasks as t\nt.chars, t.chars_of"
    assert private_names_in(code, LONGER) == ["ada_loss.lab.tasks.chars_of", "ada_loss.lab.tasks.find_task"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_and_words_of_a_page_name_public_things_only(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n((?:(?!```).)*)```", text, re.DOTALL):
        try:
            found = private_names_in(code, LONGER)
        except SyntaxError:  # a signature of the reference
            continue
        assert found == []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    named = re.findall(r"`((?:fpsim|ada_loss)(?:\.\w+)+)(?![\w/*])", prose)
    paths = {name for name in named if not name.endswith((".md", ".py", ".png"))}
    assert {name for name in paths if is_private(name, LONGER)} <= ORIGINS


def test_names_of_a_longer_path_are_those_of_their_modules_and_stand_in_the_reference() -> None:
    for package in PACKAGES:
        page = (ROOT / "docs" / f"{package}.md").read_text(encoding="utf-8")
        assert "## By a longer path" in page
        for module, names in reference.LONGER[package].items():
            home = pytest.importorskip(module, exc_type=ImportError)
            for name in names:
                assert hasattr(home, name)
                assert f"### `{module}.{name}`\n" in page
