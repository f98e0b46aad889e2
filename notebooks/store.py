"""Executes notebooks and stores what they show: `python notebooks/store.py [NOTEBOOK ...]`, all five without a name.

With `--check` nothing is written, and the exit status is 1 where a notebook shows something else than it stores.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
TEMPORARY = re.compile(r"[\w/]*/tmp\w+")  # a folder of Python's tempfile: all that may differ from run to run
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
NEAR = 0.1  # of a number, that another processor may make of it: its sums come in another order, and training goes on


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
    for cell in notebook.cells:  # tqdm warns where ipywidgets is not installed, and nowhere else
        shown = cell.get("outputs", [])
        shown[:] = [output for output in shown if "IProgress not found" not in output.get("text", "")]
    notebook.metadata = {"language_info": {"name": "python"}}  # not the versions of the machine that stored it
    return notebook


def texts(notebook: NotebookNode) -> Iterator[str]:
    """What the cells show, line by line: words as they are, pictures by their kind."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        yield f"cell {cell.id}"
        for output in cell.outputs:
            shown = {output.name: output.text} if output.output_type == "stream" else output.data
            for kind, content in sorted(shown.items()):
                yield kind
                if kind.partition("/")[0] != "image":
                    yield from TEMPORARY.sub("/tmp/...", content).splitlines()


def agree(stored: str, executed: str) -> bool:
    """Whether two lines have the same words, and numbers that differ by a tenth at most."""
    words = [" ".join(NUMBER.sub("0", line).replace("-", " ").split()) for line in (stored, executed)]
    numbers = [[float(x) for x in NUMBER.findall(line)] for line in (stored, executed)]
    return words[0] == words[1] and all(
        abs(a - b) <= NEAR * max(abs(a), abs(b), 1) for a, b in zip(*numbers, strict=True)
    )


def difference(stored: NotebookNode, executed: NotebookNode) -> str:
    """What an execution shows otherwise than the stored notebook, as a diff of lines; empty if nothing."""
    before, after = [*texts(stored)], [*texts(executed)]
    if len(before) == len(after):
        after = [x if agree(x, y) else y for x, y in zip(before, after, strict=True)]
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
