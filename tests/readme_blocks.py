"""The examples of README and of the documents: blocks of Python that are followed by a block of what they print."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCKS = re.compile(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", re.DOTALL)


def examples(path: Path) -> list[tuple[str, str]]:
    """(code, output) of each example of a page."""
    return _BLOCKS.findall(path.read_text())
