"""The page for users of other libraries: the pairs that need a library are run where it is installed.

Those that need none are examples with an output, which `test_readme.py` runs.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import ada_loss
import fpsim
from ada_loss.rules import LAYER_RULES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
NEEDS = re.findall(r"<!-- needs (\w+) -->\n```python\n((?:(?!```).)*)```", PAGE, re.DOTALL)


def test_every_library_has_a_section_with_a_table_and_an_example() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 8
    for section in sections:
        assert "| --- | --- |" in section, section.splitlines()[0]
        assert "```python" in section, section.splitlines()[0]


@pytest.mark.parametrize(("library", "code"), NEEDS, ids=[library for library, _ in NEEDS])
def test_the_pair_is_equal_where_the_library_is_installed(library: str, code: str) -> None:
    pytest.importorskip(library, exc_type=ImportError)
    if shutil.which("c++") is None:
        pytest.skip("qtorch compiles its loops with a C++ compiler")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_names_in_the_tables_are_names_of_this_library() -> None:
    assert {*re.findall(r'"recipe:(\w+)"', PAGE)} <= {row.name for row in fpsim.recipes()}
    updates = re.findall(r'quantize_optimizer\([^`]*?, "(\w+)"\)', PAGE) + ["adam4bit", "adam_fp8", "bf16_sr"]
    assert len(updates) > 4
    assert {*updates} <= fpsim.UPDATES.keys()
    for name in re.findall(r'"(mx\w+|nvfp4|e\dm\d\w* per \w+(?: fp32)?)"', PAGE):
        assert fpsim.as_format(name)


def test_chainers_names_in_the_table_are_those_of_this_library() -> None:
    section = PAGE.split("## Chainer's ada-loss\n")[1].split("```")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    here = {name for _, ours in rows for name in re.findall(r"AdaLoss\w+|Recorder", ours)}
    assert here >= {"AdaLossTransformConv2d", "AdaLossTransformBatchNorm", "AdaLossTransformBottleneck", "Recorder"}
    assert here <= set(ada_loss.__all__)
    options = {name for _, ours in rows for name in re.findall(r"`(\w+)=", ours)}
    known = {*inspect.signature(ada_loss.AdaLossScaled).parameters, *inspect.signature(ada_loss.Recorder).parameters}
    rules = {field.name for rule in LAYER_RULES.values() for field in fields(rule)}
    assert options >= {"rule", "u_min", "u_max", "n_uf_threshold", "update_every"}
    assert options <= known | rules
