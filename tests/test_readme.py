"""The examples of README and of the documents print what these say they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = "".join(path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))
EXAMPLES = re.findall(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", TEXT, re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=lambda text: text.strip().splitlines()[0])
def test_the_example_prints_what_it_says(code: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
