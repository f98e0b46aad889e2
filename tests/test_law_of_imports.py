"""The arrows between files point down, and each dependency enters where the design says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A file may import files of a lower rank only. A new file gets a rank here, and so a place in the house.
RANKS = {
    "fpsim.formats": 0,
    "fpsim.rounding": 1,
    "fpsim.kernels": 2,
    "fpsim.ops": 3,
    "fpsim.policy": 4,
    "fpsim.emulation": 5,
    "fpsim.model": 6,
    "fpsim.statistics": 7,
    "fpsim": 9,
    "ada_loss.rules": 10,
    "ada_loss.scalers": 11,
    "ada_loss": 13,
    "ada_loss.lab.tasks": 14,
    "ada_loss.lab.train": 15,
    "ada_loss.lab.plots": 14,
    "ada_loss.lab.compare": 16,
    "ada_loss.lab": 17,
    "ada_loss.__main__": 18,
}
# A package enters in these files and in no other.
ENTERS = {
    "numba": {"fpsim.rounding", "fpsim.kernels"},
    "llvmlite": {"fpsim.rounding", "fpsim.kernels"},
    "numba_cuda": {"fpsim.kernels"},
    "matplotlib": {"ada_loss.lab.plots"},
    "sklearn": {"ada_loss.lab.tasks"},
    "qtorch": set(),
}
WITHOUT_TORCH = ("fpsim.formats", "fpsim.rounding", "fpsim.kernels", "ada_loss.rules")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for package in ("fpsim", "ada_loss") for p in sorted((ROOT / package).rglob("*.py"))}


def imports_of(source: str) -> set[str]:
    """Full names of what a source imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found


def broken_laws(name: str, imported: set[str]) -> list[str]:
    laws = [
        f"{name} imports {other}, which is not below it" for other in imported if RANKS.get(other, -1) >= RANKS[name]
    ]
    for package, files in ENTERS.items():
        if name not in files and any(other.split(".")[0] == package for other in imported):
            laws.append(f"{name} imports {package}, which enters only in {sorted(files) or 'tests'}")
    if name in WITHOUT_TORCH and any(other.split(".")[0] == "torch" for other in imported):
        laws.append(f"{name} imports torch, and is pure arithmetic")
    return laws


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_down(name: str) -> None:
    assert name in RANKS, f"{name} has no rank: give it one in {Path(__file__).name}, and so a place in the house"
    assert broken_laws(name, imports_of(MODULES[name].read_text())) == []


def test_a_broken_law_is_found() -> None:
    assert broken_laws("fpsim.ops", imports_of("from fpsim import model")) != []
    assert broken_laws("fpsim.ops", imports_of("def f():\n    import ada_loss.rules")) != []
    assert broken_laws("fpsim.model", imports_of("import numba.cuda")) != []
    assert broken_laws("fpsim.kernels", imports_of("from torch import Tensor")) != []
    assert broken_laws("fpsim.ops", imports_of("from fpsim import kernels\nimport torch")) == []
