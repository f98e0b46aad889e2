"""The arrows between files point down, and each dependency enters where the design says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ada_loss
import fpsim

ROOT = Path(__file__).parents[1]
# The floors of the house, the ground first: a file may import files of lower floors only. A new file gets a place here.
FLOORS = (
    "fpsim.checks fpsim.statistics fpsim.torch_modes fpsim.deferred fpsim.undoing",
    "fpsim.rows fpsim.pictures fpsim.border fpsim.torch_internals fpsim.variants",
    "fpsim.ranges",
    "fpsim.formats",
    "fpsim.fixed_point fpsim.foreign",
    "fpsim.blocks fpsim.rounding fpsim.kernels fpsim.kernels.sources fpsim.reference",
    "fpsim.accumulators fpsim.kernels.threefry fpsim.kernels.compile fpsim.kernels.kept",
    "fpsim.kernels.card fpsim.kernels.native fpsim.kernels.blocks",
    "fpsim.kernels.containers",
    "fpsim.kernels.round fpsim.kernels.tally fpsim.kernels.moments fpsim.kernels.sums fpsim.spec fpsim.noise",
    "fpsim.kernels.hadamard fpsim.kernels.block_loops fpsim.kernels.accumulate fpsim.launch",
    "fpsim.kernels.block_tally",
    "fpsim.kernels.block_teams",
    "fpsim.shared_scales fpsim.autograd fpsim.gemm fpsim.moments fpsim.emulation.callers fpsim.emulation.module_calls",
    "fpsim.block_tally fpsim.verify fpsim.expressions",
    "fpsim.hadamard fpsim.delayed fpsim.tally",
    "fpsim.block_autograd",
    "fpsim.products",
    "fpsim.ops fpsim.warm fpsim.policy fpsim.emulation.recurrent fpsim.emulation.casts fpsim.emulation.marks",
    "fpsim.recipes",
    "fpsim.codes fpsim.emulation.arguments fpsim.emulation.operands fpsim.emulation.scope fpsim.emulation.forms "
    "fpsim.emulation.einsum fpsim.emulation.scaled_masks",
    "fpsim.emulation.accumulated",
    "fpsim.emulation.checkpoints fpsim.emulation.calls fpsim.emulation.backward fpsim.emulation.packing "
    "fpsim.emulation.steps",
    "fpsim.emulation.products fpsim.emulation.aliases",
    "fpsim.emulation.conversions",
    "fpsim.emulation.product_calls fpsim.emulation.roundings",
    "fpsim.emulation.mode",
    "fpsim.emulation.entering",
    "fpsim.emulation.tracing",
    "fpsim.emulation fpsim.computed_weights fpsim.opened fpsim.masks",
    "fpsim.forwards",
    "fpsim.model fpsim.summary fpsim.seen",
    "fpsim.stepping",
    "fpsim.scaling_state fpsim.recording fpsim.scaling fpsim.compare fpsim.diagnose",
    "fpsim.suggesting",
    "fpsim.watch fpsim.sensitivity fpsim.last_layers",
    "fpsim.reasons fpsim.reasons.kept fpsim.reasons.widening fpsim.reasons.event fpsim.reasons.numbers",
    "fpsim.reasons.dying",
    "fpsim.reasons.explaining fpsim.reasons.slopes fpsim.reasons.updates",
    "fpsim.reasons.masks",
    "fpsim.reasons.timeline",
    "fpsim.reasons.against fpsim.reasons.trials",
    "fpsim.reasons.attempts",
    "fpsim.reasons.edits",
    "fpsim.reasons.remedies",
    "fpsim.reasons.update_remedies",
    "fpsim.reasons.finding",
    "fpsim.why",
    "fpsim.__main__ fpsim",
    "ada_loss.checks ada_loss.files ada_loss.layerwise.saved",
    "ada_loss.rules.loss.base",
    "ada_loss.rules.loss.fixed ada_loss.rules.loss.counting ada_loss.rules.loss.every_step",
    "ada_loss.rules.loss.hysteresis ada_loss.rules.loss.tolerance",
    "ada_loss.rules.loss.catalogue",
    "ada_loss.rules.loss ada_loss.rules.formulas",
    "ada_loss.rules.layer",
    "ada_loss.rules ada_loss.record ada_loss.scalers.gradients",
    "ada_loss.scalers.verbs ada_loss.transforms",
    "ada_loss.scalers.grad_scaler ada_loss.layerwise.scale_kernels ada_loss.layerwise.product_moments "
    "ada_loss.layerwise.options ada_loss.layerwise.dead",
    "ada_loss.scalers.updater ada_loss.layerwise.sites ada_loss.layerwise.constants",
    "ada_loss.scalers ada_loss.layerwise.graph ada_loss.layerwise.schedule ada_loss.layerwise.chooser",
    "ada_loss.layerwise.forks ada_loss.integrations.huggingface ada_loss.integrations.lightning",
    "ada_loss.layerwise.engine ada_loss.integrations",
    "ada_loss.layerwise.scaled",
    "ada_loss.layerwise",
    "ada_loss.lab.errors ada_loss.lab.environment ada_loss.lab.devices ada_loss.lab.directions",
    "ada_loss.lab.tasks.task ada_loss.lab.tasks.scenes ada_loss.lab.tasks.spread "
    "ada_loss.lab.training.run ada_loss.lab.training.methods "
    "ada_loss.lab.training.format_schedule "
    "ada_loss.lab.training.generators ada_loss.lab.sweep.limits "
    "ada_loss.lab.sweep.lock ada_loss.lab.sweep.trust ada_loss.lab.sweep.execution ada_loss.lab.sweep.progress "
    "ada_loss.lab.results.judgement",
    "ada_loss.lab.results.figures",
    "ada_loss.lab.results.table ada_loss.lab.results.heat ada_loss.lab.results.charts "
    "ada_loss.lab.training.checkpoints ada_loss.lab.sweep.missing ada_loss.lab.studies.space",
    "ada_loss.lab.studies.study",
    "ada_loss.lab.sweep.ledger",
    "ada_loss.lab.tasks.digits ada_loss.lab.tasks.chars ada_loss.lab.tasks.pictures ada_loss.lab.tasks.own_data "
    "ada_loss.lab.tasks.image_files ada_loss.lab.tasks.phonemes "
    "ada_loss.lab.training.options "
    "ada_loss.lab.training.job ada_loss.lab.training.batches ada_loss.lab.sweep.engines",
    "ada_loss.lab.tasks.detection ada_loss.lab.tasks.segmentation",
    "ada_loss.lab.tasks",
    "ada_loss.lab.training.steps ada_loss.lab.sweep.identity ada_loss.lab.sweep.telemetry "
    "ada_loss.lab.sweep.cell_formats",
    "ada_loss.lab.sweep.names ada_loss.lab.sweep.live",
    "ada_loss.lab.results.trackers",
    "ada_loss.lab.training.loop ada_loss.lab.sweep.cells",
    "ada_loss.lab.training ada_loss.lab.sweep.branches ada_loss.lab.sweep.work ada_loss.lab.sweep.prepare "
    "ada_loss.lab.results.results ada_loss.lab.results.notifier",
    "ada_loss.lab.results.comparison ada_loss.lab.results.curves ada_loss.lab.results.sections "
    "ada_loss.lab.results.cell_pages",
    "ada_loss.lab.results.statements",
    "ada_loss.lab.results.verdict",
    "ada_loss.lab.results.drawings ada_loss.lab.results.overview",
    "ada_loss.lab.results.pictures",
    "ada_loss.lab.results.report",
    "ada_loss.lab.results",
    "ada_loss.lab.sweep.explained",
    "ada_loss.lab.sweep.driver",
    "ada_loss.lab.sweep.config ada_loss.lab.sweep ada_loss.lab.studies.depth ada_loss.lab.studies.describe "
    "ada_loss.lab.studies.search",
    "ada_loss.lab.studies ada_loss.lab.train ada_loss.lab.plots ada_loss.lab.depth",
    "ada_loss.lab",
    "ada_loss",
    "ada_loss.__main__",
)
RANKS = {name: rank for rank, floor in enumerate(FLOORS) for name in floor.split()}
# A package enters in these files and in no other.
ENTERS = {
    "numba": {"fpsim.deferred", "fpsim.rounding", "fpsim.kernels"},
    "numba.core": {"fpsim.deferred", "fpsim.kernels.compile"},
    "llvmlite": {"fpsim.rounding", "fpsim.kernels.compile", "fpsim.kernels.native", "fpsim.kernels.card"},
    "cuda": {"fpsim.kernels.card"},
    "numba.cuda": {"fpsim.kernels.compile"},
    "numba_cuda": {"fpsim.kernels.compile"},
    "matplotlib": {"ada_loss.lab.results.figures", "ada_loss.lab.results.heat", "fpsim.pictures"},
    "scipy": {"ada_loss.lab.results.comparison", "ada_loss.lab.results.judgement"},
    "PIL": {"ada_loss.lab.tasks.image_files"},
    "sklearn": {"ada_loss.lab.tasks.digits", "ada_loss.lab.tasks.pictures"},
    "sqlite3": {"ada_loss.lab.sweep.ledger"},
    "distributed": {"ada_loss.lab.sweep.engines"},
    "jinja2": {"ada_loss.lab.results.report"},
    "mlflow": {"ada_loss.lab.results.trackers"},
    "optuna": {"ada_loss.lab.studies.study"},
    "ruamel": {"ada_loss.lab.sweep.config"},
    "tqdm": {"ada_loss.lab.sweep.progress", "ada_loss.__main__"},
    "accelerate": {"ada_loss.integrations.huggingface"},
    "transformers": {"ada_loss.integrations.huggingface"},
    "lightning": {"ada_loss.integrations.lightning"},
    "wandb": {"ada_loss.lab.results.trackers"},
    "typer": {"ada_loss.__main__"},
    "qtorch": set(),
}
WITHOUT_TORCH = (
    "fpsim.checks",
    "fpsim.statistics",
    "fpsim.formats",
    "fpsim.foreign",
    "fpsim.deferred",
    "fpsim.undoing",
    "fpsim.accumulators",
    "fpsim.rounding",
    "fpsim.kernels",
    "ada_loss.checks",
    "ada_loss.rules.loss",
    "ada_loss.rules.layer",
    "ada_loss.layerwise.scale_kernels",
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


OPEN = ("fpsim.scaling", "fpsim.checks", "fpsim.pictures", "fpsim.rows")


def is_open_to_ada_loss(imported: str) -> bool:
    public = {f"fpsim.{name}" for name in fpsim.__all__}
    return imported == "fpsim" or imported in public or any(is_within(imported, module) for module in OPEN)


def broken_laws(name: str, imported: set[str]) -> list[str]:
    laws = [f"{name} imports {other}, which is not below it" for other in imported if rank(other) >= RANKS[name]]
    for package, files in ENTERS.items():
        if not any(is_within(name, file) for file in files) and any(is_within(other, package) for other in imported):
            laws.append(f"{name} imports {package}, which enters only in {sorted(files) or 'tests'}")
    if any(is_within(name, file) for file in WITHOUT_TORCH) and any(is_within(other, "torch") for other in imported):
        laws.append(f"{name} imports torch, and is pure arithmetic")
    if is_within(name, "fpsim") and any(is_within(other, "ada_loss") for other in imported):
        laws.append(f"{name} imports ada_loss, and fpsim knows nothing of it")
    for other in sorted(imported):
        if is_within(name, "ada_loss") and is_within(other, "fpsim") and not is_open_to_ada_loss(other):
            laws.append(f"{name} imports {other}: ada_loss takes fpsim's public names, {' and '.join(OPEN)} alone")
    return laws


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_down(name: str) -> None:
    assert name in RANKS, f"{name} has no floor: give it one in {Path(__file__).name}, and so a place in the house"
    assert broken_laws(name, imports_of(MODULES[name].read_text())) == []


@pytest.mark.parametrize(
    ("name", "source", "law"),
    [
        ("fpsim.ops", "from fpsim import model", "not below"),
        ("fpsim.ops", "from fpsim import round_to", "not below"),
        ("fpsim.spec", "from fpsim.launch import launch", "not below"),
        ("ada_loss.rules", "import ada_loss.record", "not below"),
        ("ada_loss.scalers", "from ada_loss import layerwise", "not below"),
        ("ada_loss.layerwise", "import ada_loss.lab.a_file_without_a_rank", "not below"),
        ("fpsim.ops", "def f():\n    import ada_loss.rules", "fpsim knows nothing of it"),
        ("fpsim.ops", "if True:\n    from numba import njit", "imports numba,"),
        ("fpsim.rounding", "from numba import cuda", r"imports numba\.cuda,"),
        ("fpsim.ops", "import numba_cuda", "imports numba_cuda,"),
        ("fpsim.kernels.round", "from torch import Tensor", "pure arithmetic"),
        ("fpsim.kernels.round", "from numba.core import caching", r"imports numba\.core,"),
        ("ada_loss.record", "from fpsim.ops import round_to", "public names"),
        ("ada_loss.record", "from fpsim import ops", "public names"),
        ("ada_loss.rules.loss", "import torch.nn as nn", "pure arithmetic"),
        ("ada_loss.lab.training.loop", "import matplotlib.pyplot", "imports matplotlib,"),
        ("fpsim.model", "from qtorch.quant import Quantizer", "imports qtorch,"),
    ],
)
def test_a_broken_law_is_found(name: str, source: str, law: str) -> None:
    assert re.search(law, "; ".join(broken_laws(name, imports_of(source))))


def test_a_kept_law_is_not_reported() -> None:
    assert broken_laws("fpsim.ops", imports_of("import torch\nfrom fpsim import launch\nimport numbagg")) == []
    assert (
        broken_laws("ada_loss.lab.training.loop", imports_of("import fpsim\nfrom ada_loss.layerwise import scale"))
        == []
    )
    assert broken_laws("fpsim.kernels.compile", imports_of("import numba_cuda\nfrom numba import cuda, njit")) == []


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="written in full"):
        imports_of("from . import formats")


def imported_at_once(source: str) -> set[str]:
    """What a file imports when it is imported itself: not in a function, and not for its types alone."""
    found: set[str] = set()
    for statement in ast.parse(source).body:
        is_for_types = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found |= imports_of(ast.unparse(statement))
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name != "fpsim.kernels.card"])
def test_numba_is_not_imported_with_a_module(name: str) -> None:
    # a process whose loops are on disk needs none of it; CUDA's kernels do
    imported = imported_at_once(MODULES[name].read_text())
    heavy = [o for o in imported if any(is_within(o, p) for p in ("numba", "numba_cuda", "fpsim.kernels.card"))]
    assert heavy == []


def test_an_import_of_numba_with_a_module_is_found() -> None:
    assert imported_at_once("def f():\n    import numba\nif TYPE_CHECKING:\n    import numba") == set()
    assert imported_at_once("if True:\n    from numba import njit") == {"numba.njit"}


# An underscore name is used in the file that defines it. What belongs to others is excepted, with the reason.
OTHERS_NAMES = {
    "_replace": "a named tuple's",
    "_asdict": "a named tuple's",
    "_fields": "a named tuple's",
    "_make": "a named tuple's",
    "_foreach_": "torch.amp.GradScaler's own contract",
    "_amp_": "torch.amp.GradScaler's own contract",
    "_step_supports_amp_scaling": "torch.amp.GradScaler's own contract",
    "_after_closure": "the contract of a precision plugin of Lightning",
    "_optimizers": "those that Accelerate has prepared: no public name tells whether there are any",
}
# The files in which the private names of another library stand.
HOMES_OF_PRIVATE_NAMES = ("fpsim.torch_internals", "fpsim.torch_modes", "fpsim.kernels.compile")


def foreign_names(source: str) -> list[str]:
    """The underscore names that a source reaches for, as an attribute or by an import, and does not define itself."""
    tree = ast.parse(source)
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)  # __slots__
    found = []
    for node in ast.walk(tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        for name in names:
            is_private = name.startswith("_") and not name.endswith("__")
            if is_private and name not in own and not name.startswith(tuple(OTHERS_NAMES)):
                found.append(name)
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name not in HOMES_OF_PRIVATE_NAMES])
def test_no_file_reaches_for_the_underscore_name_of_another(name: str) -> None:
    assert foreign_names(MODULES[name].read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["from fpsim.ops import _launch", "torch._C._is_tracing()", "x._version", "from torch._inductor import config"],
)
def test_a_private_name_of_another_file_is_found(source: str) -> None:
    assert foreign_names(source) != []


def test_own_private_names_are_not_reported() -> None:
    source = "class A:\n    __slots__ = ('_a',)\n    def _b(self):\n        return self._a\nA()._b()"
    assert foreign_names(source) == []
    assert foreign_names("pair._replace(x=1); torch._foreach_norm(g)") == []


LONGEST_FUNCTION, LONGEST_FILE = 70, 450


@pytest.mark.parametrize("name", MODULES)
def test_a_file_and_its_functions_are_short_enough_to_read(name: str) -> None:
    source = MODULES[name].read_text()
    assert len(source.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            docstring = len((ast.get_docstring(node, clean=False) or "").splitlines())
            is_factory = (name, node.name) == ("fpsim.rounding", "make_round")
            assert is_factory or length - docstring <= LONGEST_FUNCTION, f"{node.name} has {length - docstring} lines"


def test_the_folders_of_the_tests_are_no_packages_that_could_hide_the_real_ones() -> None:
    # tests/ is on the path of imports, and has folders of the packages' names: Python passes over one without __init__
    tests = Path(__file__).parent
    assert [*tests.rglob("__init__.py")] == []
    for package in (fpsim, ada_loss):
        assert (tests / package.__name__).is_dir()
        assert Path(package.__file__ or "").parent != tests / package.__name__
        assert list(package.__path__) == [str(Path(package.__file__ or "").parent)]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("fpsim")])
def test_no_tensor_is_kept_for_a_device(name: str) -> None:
    """It would be filled on the stream of the first call, and read on another's before that is done."""
    tree = ast.parse(MODULES[name].read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.returns is not None:
            keeps = any("cache" in ast.unparse(decorator) for decorator in function.decorator_list)
            assert not (keeps and "Tensor" in ast.unparse(function.returns)), f"{name}: {function.name}"
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and "device" in ast.unparse(statement.annotation):
            assert "Tensor" not in ast.unparse(statement.annotation), f"{name}: {ast.unparse(statement.target)}"
