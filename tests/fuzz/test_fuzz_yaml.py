"""Sweeps in YAML files, mistyped and made up: what cannot be planned is refused in words, by a documented error."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from fuzzing import documented, fuzz
from hypothesis import strategies as st

from ada_loss.lab.cells.cells import plan_all
from ada_loss.lab.sweep.config import KEYS, SHIPPED, read_sweep
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.tasks import TASKS

SNIPPETS = ("[", "]", "{", "}", ": ", "\n", "- ", "&a ", "*a", "!!binary ", "!!float ", "? ", "| ", "> ", "#", "'", '"')
SNIPPETS += (
    "null",
    "true",
    "1e999",
    "-0",
    ".nan",
    "2001-01-01",
    "2001-13-45",
    "<<: ",
    "---\n",
    "...\n",
    "\t",
    "%YAML 9.9\n",
)
SNIPPETS += ("\x00", "\ud7ff", "\u2028", "0x", "0o9", "1" * 5000, "fp16", "e5m2", "[" * 500, "{a: " * 300)


@st.composite
def edited(draw: st.DrawFn) -> str:
    """A sweep that comes with the library, with some edits."""
    text = SHIPPED[draw(st.sampled_from(sorted(SHIPPED)))].read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.sampled_from([0, 0, 1, 2, 8, 60]))
        text = text[:at] + draw(st.sampled_from(SNIPPETS) | st.text(max_size=3)) + text[at + length :]
    return text


WORDS = [
    "fp16",
    "e5m2",
    "e4m3fn",
    "fp61",
    "none",
    "torch",
    "adaptive",
    "exact normal",
    "stochastic",
    "nearest_even",
    "up",
]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=8)
NAMES = ["weight", "error", "activation", "overflow", "epochs", "steps", "GPU", "rounding"]
KEY = st.sampled_from(NAMES) | st.text(max_size=4)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3), max_leaves=8
)


@st.composite
def made_up(draw: st.DrawFn) -> str:
    """Keys of a sweep with values of any kind; JSON is YAML."""
    keys = draw(st.lists(st.sampled_from([key for key in KEYS if key != "task"]), unique=True, max_size=6))
    content: dict[str, Any] = {"task": draw(st.sampled_from(sorted(TASKS)) | VALUES), "formats": draw(VALUES)}
    content |= {key: draw(VALUES) for key in keys}
    if draw(st.booleans()):
        content["formats"] = draw(st.lists(st.sampled_from(WORDS), max_size=3))
    return json.dumps(content)


def plan_of(text: str) -> None:
    """What `sweep` does with a file before any work."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        read = read_sweep(path)
    Execution(**{field.name: read[field.name] for field in fields(Execution) if field.name in read})
    defaults = {"scaling": ("none",), "roundings": ("nearest_even",), "seeds": 1, "task_options": None}
    grid = {name: read.get(name, default) for name, default in defaults.items()}
    grid |= {"task": read["task"], "formats": read["formats"]}
    plan_all(grid, read.get("also", ()), read.get("baseline", True))


@fuzz(300, text=edited() | made_up())
def test_fuzz_a_file_is_planned_or_refused_in_words(text: str) -> None:
    with documented(ValueError, TypeError, FileNotFoundError):
        plan_of(text)
