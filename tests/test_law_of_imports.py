"""The arrows between files point down, and each dependency enters where the design says."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
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
        "checks undoing torch_modes torch_nodes",
        "changes",
        "border torch_internals",
    ),
    (
        "fpsim.formats",
        "__init__ floats",
        "codebook fixed_point foreign",
        "blocks",
    ),
    (
        "fpsim.compiling",
        "__init__ deferred sources",
        "compile kept",
        "card native",
    ),
    (
        "fpsim.kernels",
        "__init__ statistics",
        "containers",
        "core threefry",
        "codebooks",
        "blocks moments round sums tally",
        "accumulate block_loops hadamard",
        "block_choice block_tally",
        "block_dense block_teams",
    ),
    (
        "fpsim.tensors",
        "__init__ accumulators cuts noise reference spec",
        "launch own",
        "autograd moments reductions shared_scales",
        "block_autograd block_tally expressions gemm hadamard verify",
        "ops tally",
        "warm codes",
        "golden",
    ),
    (
        "fpsim.policies",
        "__init__ delayed operand",
        "attention",
        "cpu_kernels products",
        "policy",
        "recipes update",
        "profiles",
    ),
    (
        "fpsim.emulation",
        "forms marks operations recurrent",
        "kept_weights",
        "scope",
        "backward caches casts checkpoints operands steps",
        "arguments calls",
        "aliases decomposed lineage products promotion",
        "attended conversions",
        "product_calls roundings",
        "without_graph",
        "short_way",
        "mode",
        "backward_code",
        "own_functions",
        "entering",
        "__init__ tracing",
    ),
    (
        "fpsim.models",
        "__init__ computed_weights copying storing",
        "compiled_forwards parameter_store ranks",
        "forwards",
        "installed",
        "format_steps quantize",
        "optimizers scaling_state",
    ),
    (
        "fpsim",
        "scaling",
    ),
    (
        "fpsim.insight",
        "__init__ pictures rows stepping reasons.__init__ reasons.event reasons.widening engines.__init__",
        "compare lost_updates ranges sensitivity",
        "masks recording summary",
        "snapshots",
        "engines.likelihoods engines.sides",
        "engines.places engines.recorded engines.remedies",
        "engines.msprobe",
        "engines.dumps engines.kinds",
        "engines.forced",
        "engines.against_dump",
        "mismatch",
        "reasons.explaining_losses reasons.swamping",
        "reasons.explaining reasons.gradient_sums",
        "reasons.timeline",
        "diagnose reasons.against",
        "reasons.trials",
        "suggesting reasons.edits reasons.updates",
        "watch reasons.remedies",
        "reasons.finding",
        "why",
    ),
    (
        "fpsim",
        "exporting warming",
        "__init__ __main__",
    ),
    (
        "ada_loss",
        "checks files",
        "rules.loss.base",
        "rules.loss.counting rules.loss.every_step",
        "rules.loss.tolerance",
        "rules.loss.__init__ rules.formulas",
        "rules.layer",
        "rules.__init__ record scalers.gradients",
        "scalers.verbs transforms",
        "layerwise.scale_kernels layerwise.options",
        "layerwise.constants layerwise.native_powers",
        "layerwise.sites layerwise.native_graph",
        "layerwise.chooser",
        "layerwise.engine layerwise.native_hooks",
        "layerwise.scaled layerwise.native",
        "scalers.grad_scaler",
        "scalers.updater",
        "layerwise.__init__ scalers.__init__",
        "integrations.huggingface integrations.lightning",
        "integrations.__init__",
        "lab.errors lab.environment lab.devices lab.directions",
        "lab.printed lab.terminal",
    ),
    (
        "ada_loss.lab.tasks",
        "boxes networks policy_gradient scenes task",
        "chars digits image_files images phonemes",
        "camvid rl voc",
        "detection segmentation",
        "__init__",
    ),
    (
        "ada_loss.lab.training",
        "generators native run stored_weights",
        "format_schedule methods",
        "batches checkpoints options rollouts",
        "job",
        "loop",
        "__init__",
    ),
    (
        "ada_loss.lab.cells",
        "__init__ cell_updates identity stored_text telemetry",
        "cell_formats missing",
        "ledger names",
        "cells",
    ),
    (
        "ada_loss.lab.results",
        "figures judgement trackers",
        "table",
        "deciding results",
        "cell_pages comparison curves",
        "pictures statements",
        "verdict",
        "drawings",
        "report",
        "__init__",
    ),
    (
        "ada_loss.lab.sweep",
        "__init__ execution prepare progress",
        "engines",
        "work",
        "explained",
        "driver",
        "config",
    ),
    (
        "ada_loss.lab.studies",
        "classics.papers classics.telling depth describe hardware space",
        "classics.frame on search",
        "classics.bf16_updates classics.depth_scales classics.fixed_point classics.rollouts classics.swamping "
        "classics.underflow",
        "classics.__init__",
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
    "numba.core": {"fpsim.compiling.deferred", "fpsim.compiling.compile"},
    "llvmlite": {
        "fpsim.kernels.containers",
        "fpsim.compiling.compile",
        "fpsim.compiling.native",
        "fpsim.compiling.card",
    },
    "cuda": {"fpsim.compiling.card"},
    "numba.cuda": {"fpsim.compiling.compile"},
    "numba_cuda": {"fpsim.compiling.compile"},
    "matplotlib": {"ada_loss.lab.results.figures", "fpsim.insight.pictures"},
    "scipy": {"ada_loss.lab.results.comparison", "ada_loss.lab.results.judgement"},
    "PIL": {"ada_loss.lab.results.figures", "ada_loss.lab.tasks.image_files"},
    "torchvision": {"ada_loss.lab.tasks.image_files"},
    "sklearn": {"ada_loss.lab.tasks.digits", "ada_loss.lab.tasks.images"},
    "sqlite3": {"ada_loss.lab.cells.ledger"},
    "distributed": {"ada_loss.lab.sweep.engines"},
    "jinja2": {"ada_loss.lab.results.report"},
    "mlflow": {"ada_loss.lab.results.trackers"},
    "optuna": {"ada_loss.lab.studies.search"},
    "ruamel": {"ada_loss.lab.sweep.config"},
    "tqdm": {"ada_loss.lab.terminal", "ada_loss.__main__"},
    "accelerate": {"ada_loss.integrations.huggingface"},
    "transformers": {"ada_loss.integrations.huggingface"},
    "lightning": {"ada_loss.integrations.lightning"},
    "wandb": {"ada_loss.lab.results.trackers"},
    "typer": {"ada_loss.__main__"},
    "safetensors": {"fpsim.exporting", "fpsim.insight.snapshots"},
    "rich": {"ada_loss.lab.printed"},
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


@dataclass(frozen=True)
class Source:
    """A file, read and parsed once for all laws. nodes: of its whole tree; imports: full names, with their lines."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @cached_property
    def imports(self) -> dict[str, int]:
        return imports_of(self.nodes)

    def at(self, line: int) -> str:
        return f"{self.path}:{line}:"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def house() -> list[Source]:
    paths = [path for package in ("fpsim", "ada_loss") for path in sorted((ROOT / package).rglob("*.py"))]
    return [Source(module_name(path), str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def imports_of(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """Full names of what is imported anywhere, and the line of the first; `from a import b` is `a.b`, module or not."""
    found: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            found.setdefault(name, node.lineno)
    return found


@cache
def is_within(imported: str, package: str) -> bool:
    return f"{imported}.".startswith(f"{package}.")


@cache
def rank(imported: str) -> int:
    """That of the file a name comes from; everything from elsewhere is below the house."""
    return max(((len(name), RANKS[name]) for name in RANKS if is_within(imported, name)), default=(0, -2))[1]


@cache
def folders_in_order() -> list[str]:
    """The folders that have floors of their own, each once, the lowest first."""
    folders = [folder for folder, *_ in FLOORS if folder not in ("fpsim", "ada_loss")]
    assert len(folders) == len(set(folders)), "the floors of a folder stand together"
    return folders


# The laws. Each gives the offences of a file, with their lines.


def a_file_has_a_floor(file: Source) -> Iterator[str]:
    if file.name not in RANKS:
        yield f"{file.at(1)} no floor: give it one in {Path(__file__).name}, and so a place in the house"


def imports_are_written_in_full(file: Source) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{file.at(node.lineno)} {ast.unparse(node)}"


def arrows_point_down(file: Source) -> Iterator[str]:
    own = RANKS.get(file.name, len(RANKS))
    for other, line in file.imports.items():
        if rank(other) >= own:
            yield f"{file.at(line)} {other} is not below it"


def a_folder_imports_only_folders_before_it(file: Source) -> Iterator[str]:
    folders = folders_in_order()
    own = next((i for i, folder in enumerate(folders) if is_within(file.name, folder)), len(folders))
    for other, line in file.imports.items():
        if any(is_within(other, folder) for folder in folders[own + 1 :]):
            yield f"{file.at(line)} {other} is of a folder above {folders[own]}"


def a_dependency_enters_where_the_design_says(file: Source) -> Iterator[str]:
    for package, files in ENTERS.items():
        if not any(is_within(file.name, entry) for entry in files):
            for other, line in file.imports.items():
                if is_within(other, package):
                    yield f"{file.at(line)} {package} enters only in {sorted(files) or 'tests'}"


def pure_arithmetic_imports_no_torch(file: Source) -> Iterator[str]:
    if any(is_within(file.name, pure) for pure in WITHOUT_TORCH):
        for other, line in file.imports.items():
            if is_within(other, "torch"):
                yield f"{file.at(line)} {other} in pure arithmetic"


def fpsim_knows_nothing_of_ada_loss(file: Source) -> Iterator[str]:
    if is_within(file.name, "fpsim"):
        for other, line in file.imports.items():
            if is_within(other, "ada_loss"):
                yield f"{file.at(line)} {other}"


OPEN = ("fpsim.scaling", "fpsim.checks", "fpsim.insight.pictures", "fpsim.insight.rows")
PUBLIC = {"fpsim", *(f"fpsim.{name}" for name in fpsim.__all__)}


def ada_loss_takes_public_names_of_fpsim(file: Source) -> Iterator[str]:
    if is_within(file.name, "ada_loss"):
        for other, line in file.imports.items():
            is_open = other in PUBLIC or any(is_within(other, module) for module in OPEN)
            if is_within(other, "fpsim") and not is_open:
                yield f"{file.at(line)} {other}; it takes fpsim's public names, {' and '.join(OPEN)} alone"


def numba_is_not_imported_with_a_module(file: Source) -> Iterator[str]:
    # A process whose loops are on disk needs none of it; CUDA's kernels do.
    if file.name == "fpsim.compiling.card":
        return
    for statement in file.tree.body:
        is_for_types = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            for other, line in imports_of(ast.walk(statement)).items():
                if any(is_within(other, heavy) for heavy in ("numba", "numba_cuda", "fpsim.compiling.card")):
                    yield f"{file.at(line)} {other} outside of a function"


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
    "fpsim.torch_nodes",
    "fpsim.compiling.compile",
    "fpsim.compiling.deferred",
)


def no_file_reaches_for_the_underscore_name_of_another(file: Source) -> Iterator[str]:
    if file.name in HOMES_OF_PRIVATE_NAMES:
        return
    own: set[str] = set()
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)  # __slots__
    for node in file.nodes:
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        else:
            continue
        for name in names:
            is_private = name.startswith("_") and not name.endswith("__")
            if is_private and name not in own and not name.startswith(tuple(OTHERS_NAMES)):
                yield f"{file.at(node.lineno)} {name}"


LONGEST_FUNCTION, LONGEST_FILE = 70, 600
FACTORY = ("fpsim.kernels.core", "make_round")  # one function, because Numba compiles what it encloses


def a_file_and_its_functions_are_short_enough_to_read(file: Source) -> Iterator[str]:
    length = len(file.text.splitlines())
    if length > LONGEST_FILE:
        yield f"{file.at(length)} {length} lines, of at most {LONGEST_FILE}"
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and (file.name, node.name) != FACTORY:
            length = (node.end_lineno or 0) - node.lineno + 1
            length -= len((ast.get_docstring(node, clean=False) or "").splitlines())
            if length > LONGEST_FUNCTION:
                yield f"{file.at(node.lineno)} {node.name} has {length} lines, of at most {LONGEST_FUNCTION}"


def no_tensor_is_kept_for_a_device(file: Source) -> Iterator[str]:
    # It would be filled on the stream of the first call, and read on another's before that is done.
    if not is_within(file.name, "fpsim"):
        return
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            is_cached = any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
            if is_cached and "Tensor" in ast.unparse(node.returns):
                yield f"{file.at(node.lineno)} {node.name} is cached"
    for statement in file.tree.body:
        if isinstance(statement, ast.AnnAssign):
            kind = ast.unparse(statement.annotation)
            if "device" in kind and "Tensor" in kind:
                yield f"{file.at(statement.lineno)} {ast.unparse(statement.target)}"


LAWS: tuple[Callable[[Source], Iterator[str]], ...] = (
    a_file_has_a_floor,
    imports_are_written_in_full,
    arrows_point_down,
    a_folder_imports_only_folders_before_it,
    a_dependency_enters_where_the_design_says,
    pure_arithmetic_imports_no_torch,
    fpsim_knows_nothing_of_ada_loss,
    ada_loss_takes_public_names_of_fpsim,
    numba_is_not_imported_with_a_module,
    no_file_reaches_for_the_underscore_name_of_another,
    a_file_and_its_functions_are_short_enough_to_read,
    no_tensor_is_kept_for_a_device,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_file_keeps(law: Callable[[Source], Iterator[str]]) -> None:
    offences = [offence for file in house() for offence in law(file)]
    assert not offences, "\n".join(["", *offences])


def lines(count: int) -> str:
    return "\n".join(["x = 1"] * count)


def function(name: str, count: int) -> str:
    """A function with a docstring of two lines and `count` others."""
    return f'def {name}():\n    """What it\n    does."""\n' + "    x = 1\n" * (count - 1)


# A source that offends each law, as if it stood in the file of that name, and the line.
OFFENCES = [
    (a_file_has_a_floor, "fpsim.tensors.a_file_without_a_floor", "", 1),
    (imports_are_written_in_full, "fpsim.tensors.ops", "from . import formats", 1),
    (arrows_point_down, "fpsim.tensors.ops", "import re\nfrom fpsim.models import quantize", 2),
    (arrows_point_down, "fpsim.tensors.ops", "from fpsim import round_to", 1),
    (arrows_point_down, "fpsim.tensors.spec", "from fpsim.tensors.launch import launch", 1),
    (arrows_point_down, "ada_loss.rules", "import ada_loss.record", 1),
    (arrows_point_down, "ada_loss.scalers", "from ada_loss import layerwise", 1),
    (arrows_point_down, "ada_loss.layerwise", "import ada_loss.lab.a_file_without_a_rank", 1),
    (arrows_point_down, "ada_loss.lab.cells.ledger", "from ada_loss.lab.sweep.progress import Progress", 1),
    (arrows_point_down, "ada_loss.lab.results.results", "from ada_loss.lab.sweep.driver import sweep", 1),
    (a_folder_imports_only_folders_before_it, "fpsim.policies.policy", "import fpsim.emulation.mode", 1),
    (fpsim_knows_nothing_of_ada_loss, "fpsim.tensors.ops", "def f():\n    import ada_loss.rules", 2),
    (a_dependency_enters_where_the_design_says, "fpsim.tensors.ops", "if True:\n    from numba import njit", 2),
    (a_dependency_enters_where_the_design_says, "fpsim.kernels.core", "from numba import cuda", 1),
    (a_dependency_enters_where_the_design_says, "fpsim.tensors.ops", "import numba_cuda", 1),
    (a_dependency_enters_where_the_design_says, "fpsim.kernels.round", "from numba.core import caching", 1),
    (a_dependency_enters_where_the_design_says, "ada_loss.lab.training.loop", "import matplotlib.pyplot", 1),
    (a_dependency_enters_where_the_design_says, "fpsim.models.quantize", "from qtorch.quant import Quantizer", 1),
    (pure_arithmetic_imports_no_torch, "fpsim.kernels.round", "from torch import Tensor", 1),
    (pure_arithmetic_imports_no_torch, "ada_loss.rules.loss", "import torch.nn as nn", 1),
    (ada_loss_takes_public_names_of_fpsim, "ada_loss.record", "from fpsim.tensors.ops import round_to", 1),
    (ada_loss_takes_public_names_of_fpsim, "ada_loss.record", "from fpsim.tensors import ops", 1),
    (numba_is_not_imported_with_a_module, "fpsim.kernels.core", "if True:\n    from numba import njit", 2),
    (no_file_reaches_for_the_underscore_name_of_another, "fpsim.models.quantize", "from fpsim.tensors import _ops", 1),
    (no_file_reaches_for_the_underscore_name_of_another, "fpsim.models.quantize", "\ntorch._C._is_tracing()", 2),
    (no_file_reaches_for_the_underscore_name_of_another, "fpsim.models.quantize", "x._version", 1),
    (no_file_reaches_for_the_underscore_name_of_another, "fpsim.models.quantize", "from torch._inductor import a", 1),
    (a_file_and_its_functions_are_short_enough_to_read, "fpsim.tensors.ops", lines(LONGEST_FILE + 1), LONGEST_FILE + 1),
    (a_file_and_its_functions_are_short_enough_to_read, "fpsim.tensors.ops", "\n" + function("f", 71), 2),
    (no_tensor_is_kept_for_a_device, "fpsim.tensors.ops", "@cache\ndef zero(device) -> Tensor: ...", 2),
    (no_tensor_is_kept_for_a_device, "fpsim.tensors.ops", "_kept: dict[torch.device, Tensor] = {}", 1),
]


def test_an_offence_against_each_law_is_found() -> None:
    assert {law for law, *_ in OFFENCES} == {*LAWS}
    missed = [
        (law.__name__, name, source)
        for law, name, source, line in OFFENCES
        if not any(found.startswith(f"{name}.py:{line}: ") for found in law(Source(name, f"{name}.py", source)))
    ]
    assert missed == []


# Sources that keep every law.
KEPT = [
    ("fpsim.tensors.ops", "import torch\nfrom fpsim.tensors import launch\nimport numbagg"),
    (
        "fpsim.tensors.ops",
        "def f():\n    import re\nif TYPE_CHECKING:\n    from fpsim.compiling.card import CudaKernel",
    ),
    ("ada_loss.lab.training.loop", "import fpsim\nfrom ada_loss.layerwise import scale"),
    ("fpsim.compiling.compile", "def f():\n    import numba_cuda\n    from numba import cuda, njit"),
    ("fpsim.models.quantize", "class A:\n    __slots__ = ('_a',)\n    def _b(self):\n        self._a\nA()._b()"),
    ("fpsim.models.quantize", "pair._replace(x=1); torch._foreach_norm(g)"),
    ("fpsim.models.quantize", lines(LONGEST_FILE)),
    ("fpsim.models.quantize", function("f", LONGEST_FUNCTION)),
    ("fpsim.kernels.core", function("make_round", 200)),
    ("fpsim.models.quantize", "def zero(device) -> Tensor: ...\n@cache\ndef bits(device) -> int: ..."),
]


def test_what_keeps_the_laws_is_not_reported() -> None:
    found = [offence for name, source in KEPT for law in LAWS for offence in law(Source(name, f"{name}.py", source))]
    assert found == []


def test_every_folder_of_the_lab_and_of_fpsim_has_floors_of_its_own() -> None:
    drawn = {
        module_name(p.parent / "__init__.py")
        for folder in ("fpsim", "ada_loss/lab")
        for p in (ROOT / folder).glob("*/*.py")
    }
    assert drawn == set(folders_in_order())


def test_the_folders_of_the_tests_are_no_packages_that_could_hide_the_real_ones() -> None:
    # tests/ is on the path of imports, and has folders of the packages' names: Python passes over one without __init__
    tests = Path(__file__).parent
    assert [*tests.rglob("__init__.py")] == []
    for package in (fpsim, ada_loss):
        assert (tests / package.__name__).is_dir()
        assert Path(package.__file__ or "").parent != tests / package.__name__
        assert list(package.__path__) == [str(Path(package.__file__ or "").parent)]
