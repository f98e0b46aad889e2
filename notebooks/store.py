"""Executes notebooks and stores what they show: `python notebooks/store.py [NOTEBOOK ...]`, all of them without a name.

With `--check` nothing is written, and the exit status is 1 where a notebook shows something else than it stores.
Words are the same everywhere, and so are numbers, digit by digit, unless a tag of the cell says how they are compared.
Another processor adds in another order, which changes the last digits of a sum, and a training carries them on.

- `sums`: computed in float32, by a step or two. Numbers within a tenth.
- `factor=2`: of a few steps of a training, the extreme of many values, as a kurtosis. Within that factor or 0.1.
- `errors`: relative errors of gradients, which may explode. Within a factor of ten, or nothing is left (1) in both.
- `seeds=3`: means and deviations of trainings over so many seeds, "91.2 ± 1.4". The means by Student's t, below.
- `deviation=0.01`: single trainings; the deviation is that of another seed, from a sweep: of digits in e4m3fn 0.064, as
  docs/first-sweep.md says. Within what two of them may differ by.

Under the last two, a number without a decimal point is a count or a name, and is compared exactly.
"""

from __future__ import annotations

import argparse
import difflib
import math
import operator
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from scipy import stats

HERE = Path(__file__).parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
TEMPORARY = re.compile(r"[\w/]*/tmp\w+")  # a folder of Python's tempfile: it differs from run to run
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")  # not the digits of a name, as in e4m3fn
MEAN = re.compile(rf"({NUMBER.pattern}) ± ({NUMBER.pattern})")
NEAR = 0.1  # of a number, that a sum in another order may make of it: rounding to few bits makes more of its last digit
FALSE_ALARMS = 1e-3  # of a cell whose trainings draw their digits anew, if all of it is chance
# tqdm warns where ipywidgets is not installed; fpsim writes a line where no machine code is on disk yet
OF_THE_MACHINE = "IProgress not found", "fpsim compiles its loops"
Near = Callable[[str, str], bool]


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel, in a folder of its own and on one thread.

    Raises nbclient's CellExecutionError, which shows the cell, for an exception in a cell.
    """
    notebook = nbformat.read(path, as_version=4)
    # threads change the order of sums, and with it the last digits of a training
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
        client = NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options)
        client.execute(env=environment)
    for cell in notebook.cells:
        shown = cell.get("outputs", [])
        shown[:] = [output for output in shown if not any(words in output.get("text", "") for words in OF_THE_MACHINE)]
    notebook.metadata = {"language_info": {"name": "python"}}  # not the versions of the machine that stored it
    return notebook


def texts(cell: NotebookNode) -> Iterator[str]:
    """What a cell shows, line by line: words as they are, pictures by their kind."""
    for output in cell.outputs:
        shown = {output.name: output.text} if output.output_type == "stream" else output.data
        for kind, content in sorted(shown.items()):
            yield kind
            if kind.partition("/")[0] != "image":
                yield from TEMPORARY.sub("/tmp/...", content).splitlines()


def within_a_tenth(a: str, b: str) -> bool:
    return abs(float(a) - float(b)) <= NEAR * max(abs(float(a)), abs(float(b)), 1)


def within_a_factor(factor: float, a: str, b: str) -> bool:
    less, more = sorted((float(a), float(b)), key=abs)
    return abs(more - less) <= max(NEAR, (factor - 1) * abs(less))


def as_errors(a: str, b: str) -> bool:
    less, more = sorted(min(abs(float(x)), 1) for x in (a, b))
    return more <= 10 * less


def as_trained(deviation: float, count: int, a: str, b: str) -> bool:
    """Whether two numbers, one of `count` of a cell, differ by no more than two draws of one normal distribution do."""
    bound = stats.norm.isf(FALSE_ALARMS / (2 * count)) * math.sqrt(2) * deviation
    return a == b or ("." in a + b and abs(float(a) - float(b)) <= bound + last_digit(a))


def last_digit(number: str) -> float:
    """One in the last decimal: what two numbers that were rounded to it differ by more than before."""
    return float(10.0 ** -len(number.partition(".")[2]))


def agree(stored: str, executed: str, near: Near) -> bool:
    """Whether two lines have the same words, in columns of any width, and numbers that are near one another."""
    words = [" ".join(NUMBER.sub("0", line).replace("-", " ").split()) for line in (stored, executed)]
    return words[0] == words[1] and all(map(near, NUMBER.findall(stored), NUMBER.findall(executed)))


def means_agree(stored: list[str], executed: list[str], seeds: int) -> list[bool]:
    """Line by line, whether the words and counts are the same and the means those of the same trainings.

    The difference of two means over n seeds has the variance 2 s^2 / n, where s^2 is pooled over the cells of both
    tables: with two seeds, one cell alone knows nothing of it. Where the own deviation of a cell is larger, it is taken
    instead. Bonferroni's bound over the cells.
    """
    found = [MEAN.findall("\n".join(lines)) for lines in (stored, executed)]
    variance = statistics.fmean([float(s) ** 2 for side in found for _, s in side])
    degrees = sum(map(len, found)) * (seeds - 1)
    wide = stats.t.isf(FALSE_ALARMS / len(found[0]) / 2, degrees) * math.sqrt(2 / seeds)

    def near(a: tuple[str, str], b: tuple[str, str]) -> bool:
        deviation = max(math.sqrt(variance), float(a[1]), float(b[1]))
        return abs(float(a[0]) - float(b[0])) <= wide * deviation + last_digit(a[0])

    return [
        MEAN.sub("0 ± 0", a) == MEAN.sub("0 ± 0", b) and all(map(near, MEAN.findall(a), MEAN.findall(b)))
        for a, b in zip(stored, executed, strict=True)
    ]


def alike(stored: list[str], executed: list[str], tags: Sequence[str]) -> list[bool]:
    """Line by line, whether two outputs of a cell show the same, compared as its tags say."""
    near: Near = operator.eq
    for tag in tags:
        name, _, value = tag.partition("=")
        if name == "seeds":
            return means_agree(stored, executed, int(value))
        if name == "deviation":
            count = len([x for line in stored for x in NUMBER.findall(line) if "." in x])
            near = partial(as_trained, float(value), count)
        elif name == "factor":
            near = partial(within_a_factor, float(value))
        else:
            near = {"sums": within_a_tenth, "errors": as_errors}[name]
    return [a == b or (near is not operator.eq and agree(a, b, near)) for a, b in zip(stored, executed, strict=True)]


def difference(stored: NotebookNode, executed: NotebookNode) -> str:
    """What an execution shows otherwise than the stored notebook, as a diff of lines; empty if nothing."""
    before, after = [], []
    for old, new in zip(stored.cells, executed.cells, strict=True):
        if old.cell_type == "code":
            a, b = [*texts(old)], [*texts(new)]
            if len(a) == len(b):
                same = alike(a, b, old.metadata.get("tags", []))
                b = [x if ok else y for x, y, ok in zip(a, b, same, strict=True)]
            before += [f"cell {old.id}", *a]
            after += [f"cell {old.id}", *b]
    return "\n".join(difflib.unified_diff(before, after, "stored", "executed", "", "", 2, ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="write nothing, and print what is shown otherwise")
    arguments = parser.parse_args()
    status = 0
    for path in arguments.notebooks:
        executed = execute(path)
        if not arguments.check:
            nbformat.write(executed, path)
        elif changes := difference(nbformat.read(path, as_version=4), executed):
            print(f"{path}:\n{changes}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
