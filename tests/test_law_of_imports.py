"""The arrows between files point down, and each dependency enters where the design says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ada_loss
import fpsim

ROOT = Path(__file__).parents[1]
# The floors of the house, the ground first: a file may import files of lower floors only. Each folder of fpsim and of
# ada_loss/lab has floors of its own, above all of those of the folder before it. A new file gets a place here.
FLOORS = (
    (
        "fpsim",
        "checks undoing torch_modes",
        "border torch_internals",
    ),
    (
        "fpsim.formats",
        "__init__ floats",
        "codebook fixed_point foreign",
        "codebooks",
        "blocks",
    ),
    (
        "fpsim.compiling",
        "__init__ callees sources",
        "deferred shipped",
        "compile kept",
        "card native",
    ),
    (
        "fpsim.kernels",
        "__init__ statistics variants",
        "bits",
        "core",
        "codebooks threefry",
        "codebook_tables containers",
        "blocks moments round sums tally",
        "accumulate block_loops hadamard",
        "block_tally",
        "block_amax block_dense block_teams",
    ),
    (
        "fpsim.tensors",
        "__init__ accumulators noise reference spec",
        "launch",
        "autograd gemm moments shared_scales",
        "block_autograd block_tally expressions hadamard verify",
        "ops tally",
        "codes golden warm",
    ),
    (
        "fpsim.policies",
        "__init__ delayed products",
        "policy",
        "recipes update",
        "update_overrides",
    ),
    (
        "fpsim.emulation",
        "by_identity callers einsum forms marks module_calls packing recurrent",
        "kept_weights",
        "scope",
        "accumulated arguments backward casts checkpoints operands steps",
        "calls scaled_masks",
        "aliases products",
        "conversions product_calls roundings",
        "short_way",
        "mode",
        "entering",
        "__init__ tracing",
    ),
    (
        "fpsim.models",
        "__init__ computed_weights opened storing",
        "compiled_forwards parameter_store",
        "forwards",
        "wrappers",
        "installed",
        "format_steps frozen optimizer_state quantize",
        "emulated_steps",
        "optimizers scaling_state",
    ),
    (
        "fpsim",
        "scaling",
    ),
    (
        "fpsim.insight",
        "__init__ masks pictures rows stepping reasons.__init__ reasons.event reasons.kept reasons.widening",
        "compare last_layers lost_updates ranges sensitivity stored_bytes",
        "recording seen summary reasons.numbers",
        "reasons.dying reasons.explaining_losses reasons.explaining_norms",
        "diagnose reasons.explaining reasons.masks reasons.slopes reasons.updates",
        "suggesting reasons.timeline",
        "suggesting_updates",
        "watched_rows watched_steps",
        "watch reasons.against reasons.trials",
        "reasons.attempts",
        "reasons.edits reasons.update_remedies",
        "reasons.remedies",
        "reasons.finding",
        "why",
    ),
    (
        "fpsim",
        "__init__ __main__",
    ),
    (
        "ada_loss",
        "checks files layerwise.saved",
        "rules.loss.base",
        "rules.loss.fixed rules.loss.counting rules.loss.every_step",
        "rules.loss.hysteresis rules.loss.tolerance",
        "rules.loss.catalogue",
        "rules.loss.__init__ rules.formulas",
        "rules.layer",
        "rules.__init__ record scalers.gradients",
        "scalers.verbs transforms",
        "scalers.grad_scaler layerwise.scale_kernels layerwise.product_moments layerwise.options layerwise.dead",
        "scalers.updater layerwise.sites layerwise.constants",
        "scalers.__init__ layerwise.graph layerwise.schedule layerwise.chooser",
        "layerwise.forks integrations.huggingface integrations.lightning",
        "layerwise.engine integrations.__init__",
        "layerwise.scaled",
        "layerwise.__init__",
        "lab.errors lab.environment lab.devices lab.directions",
        "lab.terminal",
    ),
    (
        "ada_loss.lab.tasks",
        "scenes spread task",
        "chars detection digits image_files images own_data phonemes segmentation",
        "__init__",
    ),
    (
        "ada_loss.lab.training",
        "format_schedule generators methods run stored_weights",
        "batches checkpoints options",
        "job steps",
        "loop",
        "__init__",
    ),
    (
        "ada_loss.lab.cells",
        "__init__ cell_updates identity lock telemetry",
        "cell_formats live missing",
        "ledger names",
        "cells",
    ),
    (
        "ada_loss.lab.results",
        "figures judgement trackers",
        "charts heat notifier table",
        "deciding results sections",
        "cell_pages comparison curves",
        "pictures statements",
        "overview verdict",
        "drawings",
        "report",
        "__init__",
    ),
    (
        "ada_loss.lab.sweep",
        "__init__ branches execution limits prepare progress trust",
        "engines",
        "work",
        "explained",
        "driver",
        "config",
    ),
    (
        "ada_loss.lab.studies",
        "depth describe space",
        "study",
        "search",
        "__init__",
    ),
    (
        "ada_loss",
        "lab.__init__",
        "__init__",
        "completions",
        "__main__",
    ),
)
RANKS: dict[str, int] = {}
for _folder, *_floors in FLOORS:
    for _floor in _floors:
        _rank = len(set(RANKS.values()))
        RANKS |= {f"{_folder}.{name}".removesuffix(".__init__"): _rank for name in _floor.split()}
# A package enters in these files and in no other.
ENTERS = {
    "numba": {"fpsim.compiling", "fpsim.kernels"},
    "numba.core": {"fpsim.compiling.deferred", "fpsim.compiling.compile", "fpsim.compiling.callees"},
    "llvmlite": {
        "fpsim.kernels.bits",
        "fpsim.compiling.compile",
        "fpsim.compiling.native",
        "fpsim.compiling.shipped",
        "fpsim.compiling.card",
    },
    "cuda": {"fpsim.compiling.card"},
    "numba.cuda": {"fpsim.compiling.compile"},
    "numba_cuda": {"fpsim.compiling.compile"},
    "matplotlib": {"ada_loss.lab.results.figures", "ada_loss.lab.results.heat", "fpsim.insight.pictures"},
    "scipy": {"ada_loss.lab.results.comparison", "ada_loss.lab.results.judgement"},
    "PIL": {"ada_loss.lab.tasks.image_files"},
    "sklearn": {"ada_loss.lab.tasks.digits", "ada_loss.lab.tasks.images"},
    "sqlite3": {"ada_loss.lab.cells.ledger"},
    "distributed": {"ada_loss.lab.sweep.engines"},
    "jinja2": {"ada_loss.lab.results.report"},
    "mlflow": {"ada_loss.lab.results.trackers"},
    "optuna": {"ada_loss.lab.studies.study"},
    "ruamel": {"ada_loss.lab.sweep.config"},
    "tqdm": {"ada_loss.lab.terminal", "ada_loss.__main__"},
    "accelerate": {"ada_loss.integrations.huggingface"},
    "transformers": {"ada_loss.integrations.huggingface"},
    "lightning": {"ada_loss.integrations.lightning"},
    "wandb": {"ada_loss.lab.results.trackers"},
    "typer": {"ada_loss.__main__"},
    "qtorch": set(),
}
WITHOUT_TORCH = (
    "fpsim.checks",
    "fpsim.formats",
    "fpsim.undoing",
    "fpsim.tensors.accumulators",
    "fpsim.compiling",
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


OPEN = ("fpsim.scaling", "fpsim.checks", "fpsim.insight.pictures", "fpsim.insight.rows")


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
        ("fpsim.tensors.ops", "from fpsim.models import quantize", "not below"),
        ("fpsim.tensors.ops", "from fpsim import round_to", "not below"),
        ("fpsim.tensors.spec", "from fpsim.tensors.launch import launch", "not below"),
        ("ada_loss.rules", "import ada_loss.record", "not below"),
        ("ada_loss.scalers", "from ada_loss import layerwise", "not below"),
        ("ada_loss.layerwise", "import ada_loss.lab.a_file_without_a_rank", "not below"),
        ("ada_loss.lab.cells.ledger", "from ada_loss.lab.sweep.progress import Progress", "not below"),
        ("ada_loss.lab.results.results", "from ada_loss.lab.sweep.driver import sweep", "not below"),
        ("fpsim.tensors.ops", "def f():\n    import ada_loss.rules", "fpsim knows nothing of it"),
        ("fpsim.tensors.ops", "if True:\n    from numba import njit", "imports numba,"),
        ("fpsim.kernels.core", "from numba import cuda", r"imports numba\.cuda,"),
        ("fpsim.tensors.ops", "import numba_cuda", "imports numba_cuda,"),
        ("fpsim.kernels.round", "from torch import Tensor", "pure arithmetic"),
        ("fpsim.kernels.round", "from numba.core import caching", r"imports numba\.core,"),
        ("ada_loss.record", "from fpsim.tensors.ops import round_to", "public names"),
        ("ada_loss.record", "from fpsim.tensors import ops", "public names"),
        ("ada_loss.rules.loss", "import torch.nn as nn", "pure arithmetic"),
        ("ada_loss.lab.training.loop", "import matplotlib.pyplot", "imports matplotlib,"),
        ("fpsim.models.quantize", "from qtorch.quant import Quantizer", "imports qtorch,"),
    ],
)
def test_a_broken_law_is_found(name: str, source: str, law: str) -> None:
    assert re.search(law, "; ".join(broken_laws(name, imports_of(source))))


def test_a_kept_law_is_not_reported() -> None:
    assert (
        broken_laws("fpsim.tensors.ops", imports_of("import torch\nfrom fpsim.tensors import launch\nimport numbagg"))
        == []
    )
    assert (
        broken_laws("ada_loss.lab.training.loop", imports_of("import fpsim\nfrom ada_loss.layerwise import scale"))
        == []
    )
    assert broken_laws("fpsim.compiling.compile", imports_of("import numba_cuda\nfrom numba import cuda, njit")) == []


def folders_in_order() -> list[str]:
    """The folders that have floors of their own, each once, the lowest first."""
    folders = [folder for folder, *_ in FLOORS if folder not in ("fpsim", "ada_loss")]
    assert len(folders) == len(set(folders)), "the floors of a folder stand together"
    return folders


def test_a_folder_imports_only_folders_before_it() -> None:
    folders = folders_in_order()
    for name, path in MODULES.items():
        own = next((i for i, folder in enumerate(folders) if is_within(name, folder)), None)
        if own is not None:
            above = [o for o in imports_of(path.read_text()) for folder in folders[own + 1 :] if is_within(o, folder)]
            assert above == [], name


def test_every_folder_of_the_lab_and_of_fpsim_has_floors_of_its_own() -> None:
    drawn = {
        module_name(p.parent / "__init__.py")
        for house in ("fpsim", "ada_loss/lab")
        for p in (ROOT / house).glob("*/*.py")
    }
    assert drawn == set(folders_in_order())


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


@pytest.mark.parametrize("name", [name for name in MODULES if name != "fpsim.compiling.card"])
def test_numba_is_not_imported_with_a_module(name: str) -> None:
    # a process whose loops are on disk needs none of it; CUDA's kernels do
    imported = imported_at_once(MODULES[name].read_text())
    heavy = [o for o in imported if any(is_within(o, p) for p in ("numba", "numba_cuda", "fpsim.compiling.card"))]
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
HOMES_OF_PRIVATE_NAMES = (
    "fpsim.torch_internals",
    "fpsim.torch_modes",
    "fpsim.compiling.compile",
    "fpsim.compiling.callees",
)


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
    [
        "from fpsim.tensors.ops import _launch",
        "torch._C._is_tracing()",
        "x._version",
        "from torch._inductor import config",
    ],
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
            is_factory = (name, node.name) == ("fpsim.kernels.core", "make_round")
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
