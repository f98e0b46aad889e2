"""The examples of README and of the documents print what these say they print."""

from __future__ import annotations

import subprocess
import sys

import pytest
from readme_blocks import ROOT, examples

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = [
    pytest.param(code, output, id=f"{page.name}-{i}")
    for page in PAGES
    for i, (code, output) in enumerate(examples(page), 1)
]


def test_there_are_examples() -> None:
    assert len(examples(ROOT / "README.md")) == 2
    assert len(EXAMPLES) > 10


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_the_example_prints_what_it_says(code: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
