"""Counts the mutants that the tests find, tier by tier: `python tests/mutants.py record`, then `run`, then `show`.

A mutant is a copy of the checkout with one comparison, constant, operator or branch changed, in a line drawn at random.
It is run against the tests of the default tier that execute that line; if none of them fails, against the full tier
of the files in which those tests stand. Where no test is known to execute the line, both are those of the folder that
mirrors its own. Of the mutants that both tiers together find, the default tier must find nine in ten: what it misses
lacks a representative there.

    python tests/mutants.py record                  # once for a checkout: the default tier, under coverage
    python tests/mutants.py run --seed 7            # ten mutants for each of eight folders, two at a time; resumes
    python tests/mutants.py show                    # the table, and what survived

What Numba compiles is not recorded: lines of `fpsim/kernels` are run against the tests of kernels, of tensors and of
CUDA. Nor is what an import executes, or a child process (a sweep's workers, the command line).
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiers

ROOT = Path(__file__).parents[1]
FOLDERS = (  # of which as many mutants are drawn
    "fpsim/formats",
    "fpsim/kernels",
    "fpsim/tensors",
    "fpsim/policies",
    "fpsim/emulation",
    "fpsim/models",
    "fpsim/insight",
    "ada_loss",
)
TESTS_OF_KERNELS = ("tests/fpsim/kernels", "tests/fpsim/tensors", "tests/fpsim/cuda")
TIERS = ("default", "full")
LIMIT = 1800  # seconds that a mutant's tests of one tier may take; one that hangs is found by pytest-timeout
GOAL = 0.9

# Mutants that change nothing that could be observed, looked at by hand: "file: before -> after", and why.
EQUIVALENT: Mapping[str, str] = {
    "fpsim/formats/codebook.py: 0.0 -> (1.0)": "the step between the values of a scale that has one value",
    "fpsim/insight/rows.py: True -> (False)": "zip's strict, of rows that are all as long as the heads",
}

SWAPS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


class Mutation(NamedTuple):
    """One change: `before`, found at a place of a file, becomes `after`."""

    file: str
    line: int
    start: int  # bytes from the beginning of the file
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The expression with one thing changed, each way that there is."""
    new: Any = copy.deepcopy(node)
    match new:
        case ast.Compare():
            for place, operator in enumerate(new.ops):
                other = copy.deepcopy(new)
                other.ops[place] = SWAPS[type(operator)]()
                yield other
        case ast.BoolOp() | ast.BinOp() if type(new.op) in SWAPS:
            new.op = SWAPS[type(new.op)]()
            yield new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield new.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not new.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(new.value + 1)


def statements_of(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements in the bodies of functions: defaults of arguments and decorators run at import."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
                        yield node


def expressions_of(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions that a statement itself evaluates, not those of the statements within it."""

    def inside(node: ast.AST) -> Iterator[ast.expr]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "msg", "exc"):  # neither types nor the words of an error
                continue
            for child in value if isinstance(value, list) else [value]:
                # an f-string's parts have no places of their own before Python 3.12
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.JoinedStr):
                    if isinstance(child, ast.expr):
                        yield child
                    yield from inside(child)

    yield from inside(statement)


def mutations_of(file: str, source: bytes) -> list[Mutation]:
    """All mutations of a file, in its order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[Mutation, None] = {}
    for statement in statements_of(ast.parse(source)):
        conditions = {statement.test} if isinstance(statement, ast.If | ast.While) else set()
        for node in expressions_of(statement):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = source[start:end].decode()
            others = [ast.unparse(other) for other in changed(node)]
            if node in conditions:
                others.append(f"not ({before})")
            for other in others:
                found[Mutation(file, node.lineno, start, end, before, f"({other})")] = None
    return sorted(found)


# Which tests execute which lines


def contexts_file(folder: Path) -> Path:
    return folder / "lines.json"


class Recorder:
    """A plugin of pytest: of each test the lines of the packages that it executes."""

    def __init__(self, data: Path) -> None:
        import coverage

        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._failed = data / f"failed.{worker}"
        packages = [str(ROOT / package) for package in ("fpsim", "ada_loss")]
        self._coverage = coverage.Coverage(data_file=str(data / f"coverage.{worker}"), source=packages, messages=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._failed.open("a") as out:
                out.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    """Record, where this file is loaded as a plugin by `record`."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and (folder := os.environ.get("MUTANTS_RECORD")):
        config.pluginmanager.register(Recorder(Path(folder)))


def record(folder: Path, arguments: Sequence[str]) -> None:
    """Run the default tier under coverage, and keep which tests execute which lines."""
    import coverage

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MUTANTS_RECORD": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment)
    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(folder.glob("coverage.*")):
        data = coverage.CoverageData(str(file))
        data.read()
        for path in data.measured_files():
            for line, contexts in data.contexts_by_lineno(path).items():
                lines[str(Path(path).relative_to(ROOT))][line] += sorted(filter(None, contexts))
    contexts_file(folder).write_text(json.dumps(lines))
    tests = {context for of_file in lines.values() for contexts in of_file.values() for context in contexts}
    print(f"{len(tests)} tests execute {sum(map(len, lines.values()))} lines of {len(lines)} files.")


# Mutants


def is_of_kernels(file: str) -> bool:
    return file.startswith("fpsim/kernels/")


def drawn(each: int, seed: int) -> list[Mutation]:
    """So many mutations of each folder: a line drawn from those that have some, then one of its mutations."""
    chance, found = random.Random(seed), []
    for folder in FOLDERS:
        by_line: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for mutation in mutations_of(file, path.read_bytes()):
                by_line[file, mutation.line].append(mutation)
        for place in chance.sample(sorted(by_line), each):
            found.append(chance.choice(by_line[place]))
    return found


def failed_without_a_change(folder: Path) -> list[str]:
    """The tests that failed when they were recorded: under coverage, or on this machine. They find no mutant."""
    return sorted({test for file in folder.glob("failed.*") for test in file.read_text().splitlines()})


def run_tests(checkout: Path, tests: Sequence[str], tier: str, folder: Path) -> str | None:
    """What failed first of these tests; None if all passed, or if the time was up."""
    listed = checkout / "tests-to-run"
    listed.write_text("\n".join(tests))
    left_out = [f"--deselect={test}" for test in failed_without_a_change(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        # one cache for all: machine code is kept under a name that covers the sources that are compiled in
        "NUMBA_CACHE_DIR": str(folder / "loops"),
        "PYTEST_ADDOPTS": "",
    }
    selection = {"default": "not full and not slow", "full": "full and not slow"}[tier]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=line"]
    try:
        done = subprocess.run(
            [*command, *left_out, "-m", selection, f"@{listed}"],
            cwd=checkout,
            env=environment,
            timeout=LIMIT,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode in (0, 5):  # 5: no test of this tier
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else (done.stdout + done.stderr).strip()[-300:]


def tests_against(mutation: Mutation, executing: Sequence[str]) -> dict[str, list[str]]:
    """What is run against a mutant in each tier, quick tests first, if these tests of the default tier execute it.

    A line that none executes may be one of an import, or of a child process.
    """
    if is_of_kernels(mutation.file):
        return {tier: [*TESTS_OF_KERNELS] for tier in TIERS}
    tests = sorted(executing, key=lambda test: seconds_of_a_case("default").get(tiers.file_of(test), 0.0))
    files = sorted({*map(tiers.file_of, tests)}, key=lambda file: seconds_of_a_case("full").get(file, 0.0))
    folder = [folder_of_tests(mutation)]
    return {"default": tests or folder, "full": files or folder}


def folder_of_tests(mutation: Mutation) -> str:
    """The tests' folder that mirrors the mutant's, or the nearest one above it that there is."""
    folder = Path("tests", mutation.file).parent
    while not (ROOT / folder).exists():
        folder = folder.parent
    return str(folder)


def judged(mutation: Mutation, executing: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one mutant in a copy of the checkout."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=folder) as place:
        checkout = Path(place) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "build"))
        path = checkout / mutation.file
        path.write_bytes(mutation.applied_to(path.read_bytes()))
        outcome: dict[str, Any] = {"name": mutation.name, "line": mutation.line, "found by": None}
        for tier, tests in tests_against(mutation, executing).items():
            if tests and (first := run_tests(checkout, tests, tier, folder)):
                outcome |= {"found by": tier, "first": first}
                break
        return outcome | {"seconds": round(time.monotonic() - began, 1)}


@cache
def seconds_of_a_case(tier: str) -> dict[str, float]:
    """Processor seconds of a case, by file, where they are recorded."""
    return {file: seconds / max(1, cases) for file, (cases, seconds) in tiers.recorded(tier).items()}


def run(folder: Path, each: int, seed: int, at_once: int) -> None:
    """Draw mutants and judge those that are not judged yet."""
    lines = json.loads(contexts_file(folder).read_text())
    results = folder / f"results-{seed}.jsonl"
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(outcome["name"], outcome["line"]) for outcome in known}
    print(f"seed {seed}")
    waiting = [mutation for mutation in drawn(each, seed) if (mutation.name, mutation.line) not in done]
    with ThreadPoolExecutor(at_once) as pool, results.open("a") as out:
        executing = [lines.get(m.file, {}).get(str(m.line), []) for m in waiting]
        for outcome in pool.map(lambda pair: judged(*pair, folder), zip(waiting, executing)):
            print(f"{outcome['found by'] or 'SURVIVED':8} {outcome['seconds']:7.1f} s  {outcome['name']}", flush=True)
            out.write(json.dumps(outcome) + "\n")
            out.flush()


def share(outcomes: Sequence[Mapping[str, Any]]) -> float:
    """Of the mutants that both tiers together find, how many the default tier finds; 1 where none is found."""
    found = [outcome["found by"] for outcome in outcomes if outcome["found by"]]
    return found.count("default") / len(found) if found else 1.0


def show(folder: Path) -> int:
    """Print the table and the survivors. The status is 1 if the default tier misses its goal."""
    texts = [line for file in sorted(folder.glob("results-*.jsonl")) for line in file.read_text().splitlines()]
    outcomes = [outcome for outcome in map(json.loads, texts) if outcome["name"] not in EQUIVALENT]
    print("| folder | mutants | default tier | full tier only | survived |\n| --- | ---: | ---: | ---: | ---: |")
    for where in (*FOLDERS, ""):
        of_folder = [outcome["found by"] for outcome in outcomes if outcome["name"].startswith(where)]
        counts = " | ".join(str(of_folder.count(tier)) for tier in (*TIERS, None))
        print(f"| {where or 'all'} | {len(of_folder)} | {counts} |")
    for outcome in outcomes:
        if outcome["found by"] != "default":
            print(f"{outcome['found by'] or 'survived'}: {outcome['name']} (line {outcome['line']})")
    print(f"The default tier finds {share(outcomes):.1%} of what both tiers find. Goal: {GOAL:.0%}.")
    return int(share(outcomes) < GOAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["record", "run", "show"])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants", help="what is kept lies here")
    parser.add_argument("--each", type=int, default=10, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=None, help="which mutants are drawn; printed")
    parser.add_argument("--at-once", type=int, default=2)
    options, rest = parser.parse_known_args()
    folder = options.folder.resolve()
    if options.work == "record":
        record(folder, rest)
    elif options.work == "run":
        run(folder, options.each, random.randrange(10**6) if options.seed is None else options.seed, options.at_once)
    else:
        return show(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
