"""The examples of README and of the documents print what these say they print."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import tiers
import torch
from readme_blocks import ROOT, examples

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = [
    pytest.param(code, output, id=f"{page.name}-{i}")
    for page in PAGES
    for i, (code, output) in enumerate(examples(page), 1)
]
FIRST = [example for example in EXAMPLES if example.id.endswith("-1") or example.id.startswith("README")]  # of a page
SEED = torch.Generator().initial_seed()  # of torch's stream in a new process


def test_there_are_examples() -> None:
    assert len(examples(ROOT / "README.md")) == 2
    assert len(EXAMPLES) > 10


@tiers.parametrize(("code", "output"), EXAMPLES, keep=[code for code, _ in examples(ROOT / "README.md")])
def test_the_example_prints_what_it_says(code: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the four seconds in which a new one imports torch are most of an example's time."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(SEED)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == output


@tiers.parametrize(("code", "output"), FIRST, keep={EXAMPLES[0].values[0]})
def test_the_example_prints_it_in_a_process_of_its_own(code: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
