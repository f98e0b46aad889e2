"""docs/sweeps.md is true: each of its files is a sweep, and its table has every option with the default that counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ada_loss.lab.cells.cells import plan, plan_all
from ada_loss.lab.sweep.config import KEYS, read_sweep
from ada_loss.lab.tasks import TASKS

PAGE = (Path(__file__).parents[1] / "docs" / "sweeps.md").read_text()
FILES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def cells(content: dict[str, Any]) -> list[Any]:
    grid = {"scaling": ["none"], **content}
    return plan_all(
        {k: v for k, v in grid.items() if k != "also"} | {"task_options": grid.get("task_options")},
        grid.get("also", ()),
    )


@pytest.mark.parametrize("text", FILES, ids=[f"{i}" for i in range(len(FILES))])
def test_every_file_of_the_page_plans_what_it_says(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "your_module.py"
    module.write_text("def function(x, axis):\n    return x.sign()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    planned = cells(read_sweep(file))
    assert planned
    if "also" in text:
        settings = {
            (c.config["task"], str(c.config["format"]), c.config["scaling"], c.config["options"]["epochs"])
            for c in planned
        }
        assert ("digits", "e5m2", "none", 3) in settings
        assert {fmt for task, fmt, scaling, _ in settings if scaling == 1024} == {"{'products': {'dy': 'e4m3fn'}}"}
        assert ("chars", "e4m3fn per tensor fp32", "none", 1) in settings  # which has its own scales


def test_every_form_of_a_format_in_words_is_one() -> None:
    section = PAGE.partition("## Formats")[2].partition("### products")[0]
    forms = [
        YAML(typ="safe", pure=True).load(form) for form in re.findall(r"`(\{.*?\}|\"[^`]*\"|[a-z0-9_ ]+)`", section)
    ]
    forms = [form for form in forms if form != "formats"]
    assert len(forms) >= 8
    for form in forms:
        task = "rl" if "rollout" in form else "digits"  # which draws none
        assert plan(task, [form], ["none"], options={"steps": 100})


def test_the_table_has_every_option_with_its_default() -> None:
    rows = {n: (d, p) for n, d, p in re.findall(r"^\| `(\w+)` \| .*? \| `([^`]*)` \| ([^|]*) \|$", PAGE, re.MULTILINE)}
    (cell,) = plan("digits", ["fp32"], ["none"])  # a task without options of its own
    assert {name: default for name, (default, _) in rows.items()} == {
        name: str(value) for name, value in cell.config["options"].items()
    }
    keys = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Options of the training")[0], re.MULTILINE)
    assert sorted(keys) == sorted(KEYS)


def test_the_table_of_tasks_has_their_own_options() -> None:
    section = PAGE.partition("its own options |")[2].partition("<!-- end")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows.keys() <= TASKS.keys()
    (cell,) = plan("chars", ["fp32"], ["none"])
    assert {k: str(cell.config["options"][k]) for k in ("optimizer", "learning_rate")} == {
        k: dict(pair.split(": ") for pair in rows["chars"].split(", "))[k] for k in ("optimizer", "learning_rate")
    }
