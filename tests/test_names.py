"""What `dir` and tab completion offer, and the version."""

from __future__ import annotations

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
