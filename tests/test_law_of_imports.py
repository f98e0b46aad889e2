"""The arrows between files point down, and each dependency enters where the design says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A file may import files of a lower rank only. A new file gets a rank here, and so a place in the house.
# Some of these are planned and not yet written.
RANKS = {
    "fpsim.checks": -1,
    "fpsim.formats": 0,
    "fpsim.rounding": 1,
    "fpsim.kernels": 2,
    "fpsim.ops": 3,
    "fpsim.policy": 4,
    "fpsim.moments": 4,
    "fpsim.matmul": 4,
    "fpsim.blocks": 4,
    "fpsim.recurrent": 4,
    "fpsim.emulation": 5,
    "fpsim.model": 6,
    "fpsim.statistics": 7,
    "fpsim.scaling": 8,
    "fpsim.optim": 7,
    "fpsim.compat.qtorch": 8,
    "fpsim.compat": 9,
    "fpsim": 9,
    "ada_loss.rules.loss": 10,
    "ada_loss.rules.layer": 10,
    "ada_loss.rules": 11,
    "ada_loss.record": 11,
    "ada_loss.decisions": 12,
    "ada_loss.scalers": 12,
    "ada_loss.transforms": 12,
    "ada_loss.places": 13,
    "ada_loss.branches": 14,
    "ada_loss.layerwise": 15,
    "ada_loss.lab.errors": 15,
    "ada_loss.lab.files": 15,
    "ada_loss.lab.environment": 15,
    "ada_loss.lab.tasks.task": 16,
    "ada_loss.lab.tasks.digits": 17,
    "ada_loss.lab.tasks.chars": 17,
    "ada_loss.lab.tasks.pictures": 17,
    "ada_loss.lab.tasks": 18,
    "ada_loss.lab.training.run": 16,
    "ada_loss.lab.training.methods": 16,
    "ada_loss.lab.training.checkpoints": 16,
    "ada_loss.lab.training.options": 17,
    "ada_loss.lab.training.steps": 19,
    "ada_loss.lab.training.loop": 20,
    "ada_loss.lab.training": 21,
    "ada_loss.lab.sweep.ledger": 16,
    "ada_loss.lab.sweep.limits": 16,
    "ada_loss.lab.sweep.execution": 16,
    "ada_loss.lab.sweep.engines": 17,
    "ada_loss.lab.sweep.identity": 19,
    "ada_loss.lab.sweep.telemetry": 19,
    "ada_loss.lab.sweep.cells": 20,
    "ada_loss.lab.sweep.work": 21,
    "ada_loss.lab.results.figures": 16,
    "ada_loss.lab.results.table": 16,
    "ada_loss.lab.results.results": 21,
    "ada_loss.lab.results.pictures": 22,
    "ada_loss.lab.results.report": 23,
    "ada_loss.lab.results.trackers": 21,
    "ada_loss.lab.results": 24,
    "ada_loss.lab.sweep.driver": 25,
    "ada_loss.lab.sweep.config": 26,
    "ada_loss.lab.sweep": 26,
    "ada_loss.lab.studies.depth": 26,
    "ada_loss.lab.studies.describe": 26,
    "ada_loss.lab.studies.search": 26,
    "ada_loss.lab.studies": 27,
    "ada_loss.lab.train": 27,
    "ada_loss.lab.plots": 27,
    "ada_loss.lab.depth": 27,
    "ada_loss.lab": 28,
    "ada_loss": 29,
    "ada_loss.__main__": 30,
}
# A package enters in these files and in no other.
ENTERS = {
    "numba": {"fpsim.rounding", "fpsim.kernels"},
    "llvmlite": {"fpsim.rounding", "fpsim.kernels"},
    "numba.cuda": {"fpsim.kernels"},
    "numba_cuda": {"fpsim.kernels"},
    "matplotlib": {"ada_loss.lab.results.figures"},
    "sklearn": {"ada_loss.lab.tasks.digits", "ada_loss.lab.tasks.pictures"},
    "sqlite3": {"ada_loss.lab.sweep.ledger"},
    "distributed": {"ada_loss.lab.sweep.engines"},
    "jinja2": {"ada_loss.lab.results.report"},
    "mlflow": {"ada_loss.lab.results.trackers"},
    "optuna": {"ada_loss.lab.studies.search"},
    "ruamel": {"ada_loss.lab.sweep.config"},
    "typer": {"ada_loss.__main__"},
    "qtorch": {"fpsim.compat.qtorch"},
}
WITHOUT_TORCH = (
    "fpsim.formats",
    "fpsim.rounding",
    "fpsim.kernels",
    "ada_loss.rules.loss",
    "ada_loss.rules.layer",
    "ada_loss.decisions",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for package in ("fpsim", "ada_loss") for p in sorted((ROOT / package).rglob("*.py"))}


def imports_of(source: str) -> set[str]:
    """Full names of what a source imports, anywhere in it; `from a import b` is `a.b`, module or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(imported: str, package: str) -> bool:
    return f"{imported}.".startswith(f"{package}.")


def rank(imported: str) -> int:
    """That of the file a name comes from; everything from elsewhere is below the house."""
    return max(((len(name), RANKS[name]) for name in RANKS if is_within(imported, name)), default=(0, -2))[1]


def broken_laws(name: str, imported: set[str]) -> list[str]:
    laws = [f"{name} imports {other}, which is not below it" for other in imported if rank(other) >= RANKS[name]]
    for package, files in ENTERS.items():
        if name not in files and any(is_within(other, package) for other in imported):
            laws.append(f"{name} imports {package}, which enters only in {sorted(files) or 'tests'}")
    if name in WITHOUT_TORCH and any(is_within(other, "torch") for other in imported):
        laws.append(f"{name} imports torch, and is pure arithmetic")
    if is_within(name, "fpsim") and any(is_within(other, "ada_loss") for other in imported):
        laws.append(f"{name} imports ada_loss, and fpsim knows nothing of it")
    return laws


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_down(name: str) -> None:
    assert name in RANKS, f"{name} has no rank: give it one in {Path(__file__).name}, and so a place in the house"
    assert broken_laws(name, imports_of(MODULES[name].read_text())) == []


@pytest.mark.parametrize(
    ("name", "source", "law"),
    [
        ("fpsim.ops", "from fpsim import model", "not below"),
        ("fpsim.ops", "from fpsim import round_to", "not below"),
        ("fpsim.policy", "from fpsim.blocks import share", "not below"),
        ("ada_loss.rules", "import ada_loss.record", "not below"),
        ("ada_loss.scalers", "from ada_loss import layerwise", "not below"),
        ("ada_loss.layerwise", "import ada_loss.lab.a_file_without_a_rank", "not below"),
        ("fpsim.ops", "def f():\n    import ada_loss.rules", "fpsim knows nothing of it"),
        ("fpsim.ops", "if True:\n    from numba import njit", "imports numba,"),
        ("fpsim.rounding", "from numba import cuda", r"imports numba\.cuda,"),
        ("fpsim.ops", "import numba_cuda", "imports numba_cuda,"),
        ("fpsim.kernels", "from torch import Tensor", "pure arithmetic"),
        ("ada_loss.rules.loss", "import torch.nn as nn", "pure arithmetic"),
        ("ada_loss.lab.training.loop", "import matplotlib.pyplot", "imports matplotlib,"),
        ("fpsim.model", "from qtorch.quant import Quantizer", "imports qtorch,"),
    ],
)
def test_a_broken_law_is_found(name: str, source: str, law: str) -> None:
    assert re.search(law, "; ".join(broken_laws(name, imports_of(source))))


def test_a_kept_law_is_not_reported() -> None:
    assert broken_laws("fpsim.ops", imports_of("import torch\nfrom fpsim import kernels\nimport numbagg")) == []
    assert (
        broken_laws("ada_loss.lab.training.loop", imports_of("import fpsim\nfrom ada_loss.layerwise import scale"))
        == []
    )
    assert broken_laws("fpsim.kernels", imports_of("import numba_cuda\nfrom numba import cuda, njit")) == []


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="written in full"):
        imports_of("from . import formats")
