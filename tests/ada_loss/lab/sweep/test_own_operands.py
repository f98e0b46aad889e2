"""Operands of a sweep's cells that are functions of a module: their identity, their trust, and who imports them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import sweep_tasks
import torch

import fpsim
from ada_loss import resume, sweep
from ada_loss.lab.cells.cell_formats import canonical_format, label, operand_functions, policy_of
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.results import Results

WORD = "sweep_tasks:in_steps"
FORMATS: list[Any] = [{"products": {"w": WORD}}, {"products": {"fprop": [WORD, "e5m2"]}, "error": "e5m2"}]


def run(out: Path, formats: list[Any] = FORMATS, **rest: Any) -> Results:
    return sweep(
        "sweep_tasks:tiny",
        formats,
        ["none"],
        seeds=rest.pop("seeds", 2),
        out=out,
        engine="here",
        show_progress=False,
        **rest,
    )


def test_a_function_of_a_module_is_an_operand_and_its_path_its_identity(tmp_path: Path) -> None:
    results = run(tmp_path)
    assert not results.failures()
    assert {row["format"] for row in results.rows()} >= {f"w={WORD}", f"fprop=['{WORD}', 'e5m2'] error=e5m2"}
    by_function = [
        {"products": {"w": sweep_tasks.in_steps}},
        {"products": {"fprop": [sweep_tasks.in_steps, "e5m2"]}, "error": "e5m2"},
    ]
    words, functions = (plan("sweep_tasks:tiny", f, ["none"], seeds=2) for f in (FORMATS, by_function))
    assert [cell.id for cell in words] == [cell.id for cell in functions]
    assert label(canonical_format(by_function[0])) == f"w={WORD}"
    # what such a cell trains with is the function itself
    policy = policy_of(FORMATS[0], "nearest_even").stages[0].fmt
    own = fpsim.Policy(products=fpsim.Products.by_operand(w=sweep_tasks.in_steps))
    layer, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    assert torch.equal(fpsim.quantize(layer, policy)(x), fpsim.quantize(layer, own)(x))
    assert not torch.equal(fpsim.quantize(layer, policy)(x), layer(x))


def test_keys_and_values_have_canonical_forms_and_functions_by_their_paths() -> None:
    given = {"cache": {"v": sweep_tasks.in_steps, "k": "half"}}
    canonical = canonical_format(given)
    assert canonical == {"cache": {"k": "fp16", "v": WORD}} == canonical_format(canonical)
    assert list(canonical["cache"]) == ["k", "v"]
    assert [*operand_functions(canonical)] == [*operand_functions({"cache": WORD})] == [WORD]
    assert label(canonical) == f"k=fp16 v={WORD}"
    assert canonical_format({"cache": "half"}) == canonical_format({"cache": {"k": "fp16", "v": "fp16"}})
    assert canonical_format({"error": "e5m2", "cache": {"k": None}}) == {"error": "e5m2"}
    stored = policy_of(canonical, "nearest_even").stages[0].fmt.cache
    x = torch.randn(2, 5)
    assert stored["v"].fmt.function(x, 1).equal(sweep_tasks.in_steps(x, 1))
    assert stored["k"] == fpsim.Operand("fp16")
    with pytest.raises(ValueError, match="cache names 'q', which no cache stores"):
        canonical_format({"cache": {"q": "fp16"}})


def test_a_folder_goes_on_where_its_user_ran_it_and_elsewhere_with_trust_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ada_loss.lab.sweep.driver._Driver.run", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert len(resume(tmp_path, engine="here", show_progress=False).rows()) == 6
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(ValueError, match=r"names the task 'sweep_tasks:tiny'"):
        resume(tmp_path, show_progress=False)
    from ada_loss.lab.sweep.driver import remember

    remember(tmp_path, ["sweep_tasks:tiny"])
    with pytest.raises(ValueError, match=rf"names the operand '{WORD}', which is code from outside"):
        resume(tmp_path, show_progress=False)
    assert len(resume(tmp_path, trust=True, engine="here", show_progress=False).rows()) == 6


def test_who_reads_a_folder_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "an_operand_of_mine.py"
    module.write_text("def f(x, axis):\n    return x * 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "sweep"
    run(out, [{"products": {"w": "an_operand_of_mine:f"}}], seeds=1)
    monkeypatch.delitem(sys.modules, "an_operand_of_mine")
    module.write_text("raise AssertionError('imported')")
    results = Results(out)
    assert "w=an_operand_of_mine:f" in str(results)
    results.report()
    assert "an_operand_of_mine" not in sys.modules


@pytest.mark.parametrize(
    ("operand", "words"),
    [
        ("no_module_of_this_name:f", r"'no_module_of_this_name:f' cannot be imported: No module named"),
        ("sweep_tasks:in_step", r"has no attribute 'in_step'\. Did you mean 'in_steps'"),
        ("sweep_tasks:no_operand", r"'sweep_tasks:no_operand' is a int\. Expected: a function of a module"),
        (lambda x, axis: x, r"is a function that a worker cannot import: a lambda"),
        ("sweep_tasks:", r"Unknown format 'sweep_tasks:'"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_any_work(tmp_path: Path, operand: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "sweep", [{"products": {"w": operand}}])
    assert not (tmp_path / "sweep").exists()
