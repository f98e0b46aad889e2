"""Cells: their identity, and what is refused before anything runs."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import operator
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweep_tasks
import torch
from torch import nn

import fpsim
from ada_loss.lab.cells.cell_formats import canonical_format, label, policy_of
from ada_loss.lab.cells.cells import Cell, plan, plan_all
from ada_loss.lab.cells.identity import task_of
from ada_loss.lab.cells.names import names_of, short_name
from ada_loss.lab.cells.telemetry import telemetry
from ada_loss.lab.sweep.config import read_sweep
from ada_loss.lab.sweep.work import run_cell
from ada_loss.lab.tasks import digits
from ada_loss.lab.training.loop import train


def ids(*arguments: Any, **options: Any) -> list[str]:
    return [cell.id for cell in plan(*arguments, **options)]


def test_a_grid_has_every_combination_once() -> None:
    cells = plan("digits", ["fp16", "e5m2"], ["none", 8], roundings=["nearest_even", "stochastic"], seeds=[3, 5])
    words = {tuple(cell.config[k] for k in ("format", "scaling", "rounding", "seed")) for cell in cells}
    assert len(cells) == len(words) == 2 * 2 * 2 * 2
    assert len({cell.id for cell in cells}) == 16


def test_a_grid_is_planned_without_a_model_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantised(*_: object, **__: object) -> None:
        raise AssertionError("a model was quantised to check a word")

    monkeypatch.setattr(fpsim, "quantize", quantised)
    assert (
        len(plan("digits", ["fp16", "recipe:fp8_current", {"error": "e5m2"}], ["none"], roundings=["stochastic"])) == 3
    )
    with pytest.raises(ValueError, match=r"Unknown rounding 'nearest'"):
        plan("digits", ["fp16"], ["none"], roundings=["nearest"])


def test_equal_trainings_are_one_cell_and_any_change_makes_another() -> None:
    one = ids("digits", ["fp16"], [1024])
    assert one == ids("digits", ["half"], [1024.0], options={"epochs": 12, "learning_rate": 0.05})
    assert one == [Cell(json.loads(json.dumps(plan("digits", ["fp16"], [1024])[0].config))).id]
    policy = ids("digits", [{"error": "fp16", "weight": "bf16"}], ["none"])
    assert policy == ids("digits", [{"weight": "bfloat16", "error": "half", "activation": None}], ["none"])
    few = {"error": "fp16", "random_bits": 4}
    assert ids("digits", [few], ["none"]) == ids("digits", [{**few, "variant": "A"}], ["none"])
    assert ids("digits", [few], ["none"]) != ids("digits", [{**few, "variant": "C"}], ["none"])
    others = [
        ids("deep_digits", ["fp16"], [1024]),
        ids("digits", ["bf16"], [1024]),
        ids("digits", ["fp16"], [1025]),
        ids("digits", ["fp16"], [1024], seeds=[1]),
        ids("digits", ["fp16"], [1024], roundings=["stochastic"]),
        ids("digits", ["fp16"], [1024], options={"epochs": 11}),
        ids("digits", [{"error": "fp16"}], [1024]),
    ]
    assert len({*one, *(cell for found in others for cell in found)}) == 8


GRID: dict[str, Any] = {"task": "digits", "formats": ["fp16"], "scaling": ["none", 8], "seeds": 2}
GRID |= {"roundings": ["nearest_even"], "task_options": {"epochs": 3}}


def test_grids_that_come_also_differ_in_what_they_say() -> None:
    both = plan_all(GRID, [{"formats": ["e5m2"], "scaling": ["torch"]}, {"task": "chars", "seeds": [7]}])
    first = plan("digits", ["fp16"], ["none", 8], seeds=2, options={"epochs": 3})
    second = plan("digits", ["e5m2"], ["torch"], seeds=2, options={"epochs": 3})
    third = plan("chars", ["fp16"], ["none", 8], seeds=[7])  # the options are another task's
    assert [cell.id for cell in both] == [cell.id for cell in (*first, *second, *third)]


def test_float32_is_added_once_for_each_task_and_its_options() -> None:
    also = [
        {"formats": ["e5m2"], "scaling": ["torch"]},
        {"task": "chars", "seeds": [7]},
        {"formats": ["fp32"], "seeds": [1]},
    ]
    found = plan_all(GRID, also, baseline=True)
    float32 = [(c.config["task"], c.config["seed"]) for c in found if c.config["format"] == "fp32"]
    assert float32 == [("digits", 0), ("chars", 7), ("digits", 1)]
    assert [c.id for c in found if c.config["format"] != "fp32"] == [c.id for c in plan_all(GRID, also[:2])]


def test_a_task_and_a_training_function_are_not_given_together() -> None:
    with pytest.raises(ValueError, match=r"task='digits' was given with train='own:train'.*and not both"):
        plan("digits", ["fp16"], ["none"], train="own:train")


@pytest.mark.parametrize(
    ("also", "words"),
    [
        ({"formats": ["e5m2"]}, "also is {'formats': ['e5m2']}. Expected: a list of mappings"),
        (["e5m2"], "Expected: a list of mappings"),
        (None, "also is None"),
        ([{"format": ["e5m2"]}], "Unknown key also.format. Did you mean 'formats'? Known: task, formats, scaling,"),
        ([{"out": "elsewhere"}], "Unknown key also.out."),
        ([{"scaling": ["torch", 8]}], "The cell 'fp16 nearest_even 8 seed 0' was given twice"),
        ([{"formats": ["fp61"]}], "Unknown format 'fp61'"),
        ([{"task": digits}], "Give both as 'module:function'"),
    ],
)
def test_what_cannot_come_also_is_refused_in_words(also: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        plan_all(GRID, also)
    assert words in str(caught.value)


def test_operands_in_one_format_are_named_together() -> None:
    assert label({"products": {"x": "mxfp4", "w": "mxfp4", "dy": "nvfp4"}}) == "x,w=mxfp4 dy=nvfp4"
    assert label({"products": {"x": "mxfp4", "w": "nvfp4", "dy": "mxfp4"}}) == "x,dy=mxfp4 w=nvfp4"
    pairs = {"products": {"dgrad": ["nvfp4", None], "wgrad": ["nvfp4", None]}, "error": "bf16"}
    assert label(pairs) == "dgrad,wgrad=['nvfp4', None] error=bf16"


def test_ten_thousand_cells_have_as_many_ids() -> None:
    assert len(set(ids("digits", ["fp16", "e5m2"], ["none", 8, "torch", "adaptive"], seeds=1250))) == 10_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "digts"}, "Unknown task 'digts'. Did you mean 'digits'?"),
        ({"task": "sweep_tasks:tony"}, "Did you mean 'tiny'?"),
        ({"task": "no_such_module:f"}, "cannot be imported"),
        ({"task": "sweep_tasks:math"}, "is a module. It must be a function"),
        ({"formats": ["fp61"]}, "Unknown format 'fp61'"),
        ({"formats": [{"eror": "fp16"}]}, "'eror'"),
        ({"formats": [{"error": "fp16", "rounding": "stochastic"}]}, "give roundings="),
        ({"formats": []}, "formats is empty"),
        ({"formats": ["fp16", "half"]}, "The cell 'fp16 nearest_even none seed 0' was given twice"),
        ({"scaling": ["tourch"]}, "Unknown scaling method 'tourch'. Did you mean 'torch'? Known: none, a number"),
        ({"scaling": [1024, 1024.0]}, "was given twice"),
        ({"scaling": [-1.0]}, "-1.0"),
        ({"scaling": []}, "scaling is empty"),
        ({"roundings": ["neerest"]}, "neerest"),
        ({"formats": [{"error": "fp16", "variant": "D"}]}, "Unknown variant 'D'. Known: A, B, C"),
        (
            {"formats": [{"error": "fp16", "variant": "C"}], "roundings": ["stochastic"]},
            "variant='C' without random_bits",
        ),
        ({"formats": [{"error": "fp16", "random_bits": 99}], "roundings": ["stochastic"]}, "random_bits=99"),
        ({"scaling": ["1024"]}, "Unknown scaling method '1024'. Write 1024 without quotes."),
        ({"seeds": 0}, "seeds is empty"),
        ({"seeds": -1}, "seeds=-1 is not a number of seeds. Expected: 1 or more, or a list of integers."),
        (
            {"options": {"epochs": 2**70}},
            "epochs is 1180591620717411303424. That is more than 2**53.",
        ),
        ({"seeds": [1, 1]}, "was given twice"),
        ({"options": {"epoch": 1}}, "Unknown key task_options.epoch. Did you mean 'epochs'?"),
        ({"options": {"epochs": "many"}}, "task_options.epochs is 'many'. Expected: an integer, 1 or more."),
        (
            {"options": {"epochs": 0}},
            "epochs is 0. Expected: an integer, 1 or more. Omit it for 12.",
        ),
        ({"options": {"epochs": True}}, "task_options.epochs is True"),
        ({"options": {"epochs": 2.0}}, "task_options.epochs is 2.0"),
        ({"options": {"optimizer": 3}}, "task_options.optimizer is 3. Expected: sgd, adam, adamw"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_before_anything_runs(change: dict[str, Any], words: str) -> None:
    arguments = {"task": "digits", "formats": ["fp16"], "scaling": ["none"], **change}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": [0.5]},
        {"seeds": "12"},
        {"seeds": True},
        {"formats": "fp16"},
        {"roundings": [None]},
        {"roundings": [{"error": "stochastic"}]},
        {"options": ["epochs"]},
    ],
    ids=str,
)
def test_wrong_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Expected"):
        plan(**{"task": "digits", "formats": ["fp16"], "scaling": ["none"], **change})


def test_a_function_that_is_changed_is_another_task() -> None:
    def one(seed: int) -> object:
        return sweep_tasks.tiny(seed)

    first = ids(one, ["fp16"], ["none"])

    def one(seed: int) -> object:  # type: ignore[no-redef]
        return sweep_tasks.tiny(seed + 1)

    assert first != ids(one, ["fp16"], ["none"])
    assert ids(sweep_tasks.tiny, ["fp16"], ["none"]) == ids("sweep_tasks:tiny", ["fp16"], ["none"])


def shifted(by: int, word: str = "") -> Any:
    class Model:
        def make(self, seed: int) -> object:
            return sweep_tasks.tiny(seed + by)

    def mine(seed: int) -> object:
        return word, Model().make(seed)

    return mine


def test_what_a_function_takes_from_around_it_is_part_of_the_task() -> None:
    one = ids(shifted(1), ["fp16"], ["none"])
    assert one == ids(shifted(1), ["fp16"], ["none"])
    assert one != ids(shifted(1, "other"), ["fp16"], ["none"])
    assert one != ids(shifted(2), ["fp16"], ["none"])  # in the method of a class


DATA = {
    "tensor": torch.tensor([1.0, 2.0]),
    "of another number": torch.tensor([1.0, 3.0]),
    "of another type": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "of another shape": torch.tensor([[1.0, 2.0]]),
    "of no dimension": torch.tensor(1.0),
    "array": np.array([1.0, 2.0], dtype=np.float32),
    "of another byte order": np.array([1.0, 2.0], dtype=">f4"),
    "of numbers' bits": np.array([1.0, 2.0], dtype=np.float32).view(np.int32),
    "of objects": np.array([1.0, "a"], dtype=object),
    "of other objects": np.array([1.0, "b"], dtype=object),
    "scalar": np.float32(1),
    "list": [torch.tensor([1.0, 2.0]), object],
    "longer list": [torch.tensor([1.0, 2.0]), object, np.array(3)],
    "mapping": {"x": torch.tensor([1.0, 2.0])},
    "of mappings": ({"x": [torch.tensor([1.0, 2.0])]},),
    "with another key": ({"y": [torch.tensor([1.0, 2.0])]},),
}


def closed_over(data: Any) -> Any:
    return lambda seed: (data, sweep_tasks.tiny(seed))


def by_default(data: Any) -> Any:
    def mine(seed: int, *, points: Any = data) -> object:
        return points, sweep_tasks.tiny(seed)

    return mine


def inside(data: Any) -> Any:
    class Points:
        held = data

    return lambda seed: (Points, sweep_tasks.tiny(seed))


@pytest.mark.parametrize("make", [closed_over, by_default, inside])
def test_tensors_and_arrays_are_part_of_the_task(make: Any) -> None:
    first = {name: ids(make(data), ["fp16"], ["none"])[0] for name, data in DATA.items()}
    assert first == {name: ids(make(copy.deepcopy(data)), ["fp16"], ["none"])[0] for name, data in DATA.items()}
    assert len({*first.values()}) == len(DATA)


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(1).expand(5),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.ones(2)),
        torch.empty(0, 3),
        torch.empty(2, device="meta"),
        np.arange(6.0).reshape(2, 3).T[:, ::-1],
    ],
    ids=["transposed", "expanded", "conjugated", "sparse", "parameter", "empty", "meta", "strided"],
)
def test_a_tensor_is_known_by_its_values_however_it_lies(data: Any) -> None:
    plain = data.detach().to_dense().resolve_conj().contiguous() if isinstance(data, torch.Tensor) else data.copy()
    assert ids(closed_over(data), ["fp16"], ["none"]) == ids(closed_over(plain), ["fp16"], ["none"])


def identities(folder: Path, texts: Sequence[str], hash_seed: int) -> list[str]:
    """What a process of its own prints of these scripts, each run as `python mine.py` would."""
    files = [folder / str(number) / "mine.py" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            text + "from ada_loss.lab.cells.cells import plan\nprint(plan(mine, ['fp16'], ['none'])[0].id)\n"
        )
    code = "import runpy, sys\nfor file in sys.argv[1:]: runpy.run_path(file, run_name='__main__')"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.full
def test_the_identity_of_a_task_with_data_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = "import numpy as np, torch\nx, z = torch.arange(3.0), np.ones(2)\n"
    code += "y = {'a': [np.arange(3)], 'b': {'u', 'v'}}\n"
    code += "def mine(seed, *, x=x):\n    def loss():\n        return z\n    return y, loss\n"
    changes = {"arange(3.0)": "arange(1.0, 4.0)", "[np.arange(3)]": "[-np.arange(3)]", "ones": "zeros"}
    assert all(old in code for old in changes)
    texts = [code, *(code.replace(old, new) for old, new in changes.items())]
    told = identities(tmp_path, texts, hash_seed=1)
    assert told == identities(tmp_path, texts, hash_seed=2)
    assert len({*told}) == 4


def test_a_class_of_a_notebook_that_is_changed_makes_another_task(tmp_path: Path) -> None:
    code = "things = [object()]\nclass Net:\n    width = 3\ndef mine(seed):\n    return Net.width, things\n"
    first, second, changed = identities(tmp_path, [code, code, code.replace("3", "4")], hash_seed=0)
    assert first == second != changed


@pytest.mark.parametrize(
    "task",
    [functools.partial(shifted, 3), types.MethodType(shifted, 3), operator.itemgetter(0)],
    ids=["partial", "method", "object"],
)
def test_what_has_arguments_of_its_own_is_no_task(task: Any) -> None:
    with pytest.raises(TypeError, match=r"Write one around it: def mine"):
        ids(task, ["fp16"], ["none"])


def test_a_cell_gives_what_training_gives() -> None:
    options = {"epochs": 1, "record_every": 4}
    (cell,) = plan("digits", ["e5m2"], [8], seeds=[3], options=options)
    result, content = run_cell(cell.config)
    run = train(digits(3), "e5m2", scaling=8, seed=3, epochs=1, record_every=4)
    arrays = np.load(io.BytesIO(content))
    assert result["metrics"] == run.metrics
    assert (result["diverged"], result["skipped"]) == (False, run.skipped)
    assert arrays["losses"].tolist() == run.losses
    assert arrays["scales"].tolist() == run.scales == [8.0] * 22
    assert arrays["sites.underflow"].tolist() == [row["underflow_count"] for row in run.rows]
    biases = [math.nan if row["row_bias"] is None else row["row_bias"] for row in run.rows]
    assert np.array_equal(arrays["sites.row_bias"], biases, equal_nan=True)
    assert np.isfinite(biases).tolist() == [row["role"] == "error" for row in run.rows]
    assert arrays["history.steps"].tolist() == [20, 22]
    assert arrays["history.underflow"][-1].tolist() == arrays["sites.underflow"].tolist()
    assert (np.diff(arrays["history.nonzero"], axis=0) >= 0).all()
    assert telemetry(train(digits(3), "e5m2", epochs=1, record_every=0)).keys() == {"losses", "scales", "skipped"}


def test_the_same_cell_gives_the_same_bytes() -> None:
    (cell,) = plan("sweep_tasks:tiny", ["e5m2"], [8], options={"epochs": 2, "record_every": 1})
    assert run_cell(cell.config)[1] == run_cell(cell.config)[1]


def test_a_diverged_training_is_a_result() -> None:
    (cell,) = plan("sweep_tasks:diverges", ["e5m2"], ["none"], options={"epochs": 1})
    result, content = run_cell(cell.config)
    assert result["diverged"]
    assert not np.isfinite(np.load(io.BytesIO(content))["losses"]).any()
    # fairseq stops by an exception once its scale has fallen below 1e-4
    (cell,) = plan("sweep_tasks:diverges", ["e5m2"], ["fairseq"], options={"epochs": 40})
    result, _ = run_cell(cell.config)
    assert result["diverged"]
    assert "scale" in result["error"]


def test_float32_is_trained_once_for_each_seed() -> None:
    cells = plan("digits", ["fp32", "fp16"], [8, "torch"], roundings=["up", "down"], seeds=2)
    found = [tuple(cell.config[name] for name in ("rounding", "scaling", "seed")) for cell in cells[:2]]
    assert found == [("up", "none", 0), ("up", "none", 1)]
    assert len(cells) == 2 + 2 * 2 * 2
    assert all(cell.config["format"] == "fp16" for cell in cells[2:])


def test_a_recipe_has_its_own_roundings_and_no_loss_scale_where_gradients_have_their_own() -> None:
    formats = ["recipe:fp16", "recipe:nvfp4", "nvfp4"]
    cells = plan("digits", formats, [8, "torch"], roundings=["nearest_even", "down"], seeds=2)
    found = [cell.config["format"] for cell in cells]
    assert found == ["recipe:fp16"] * 4 + ["recipe:nvfp4"] * 2 + ["nvfp4"] * 4
    assert {cell.config["rounding"] for cell in cells[:6]} == {"nearest_even"}
    assert [cell.config["scaling"] for cell in cells[:4]] == [8.0, 8.0, "torch", "torch"]
    assert {cell.config["scaling"] for cell in cells[4:]} == {"none"}
    assert len({cell.id for cell in cells}) == len(cells)
    for name in ("recipe:nvfp5", "fp8_current"):
        with pytest.raises(ValueError, match=r"Unknown recipe 'nvfp5'\. Did you mean 'nvfp4|'fp8_current' is a recipe"):
            plan("digits", [name], ["none"])
    (cell,) = plan("digits", ["recipe:mxfp8"], ["none"], options={"steps": 3, "record_every": 0})
    result, _ = run_cell(cell.config)
    task = digits(0)
    policy = fpsim.recipe("mxfp8", task.model)
    assert policy.overrides
    assert result["metrics"] == train(task, policy, steps=3, record_every=0).metrics


def test_a_loss_scale_is_tried_only_where_it_can_change_something() -> None:
    own = [
        {"products": {"dy": "e5m2 per 32"}},
        "mxfp4",
        {"products": {"dgrad": ["nvfp4", None], "wgrad": ["mxfp4", None]}},
    ]
    for fmt in own:
        assert [cell.config["scaling"] for cell in plan("digits", [fmt], [8, "torch"])] == ["none"]
    for fmt in ("e5m2", {"products": {"dy": "e5m2"}}, {"products": {"dy": "mxfp4"}, "error": "e5m2"}):
        assert len(plan("digits", [fmt], [8, "torch"])) == 2


def test_products_are_equal_however_their_formats_are_written() -> None:
    (a,) = plan("digits", [{"products": {"dy": "e5m2 per 32", "x": None}}], ["none"])
    (b,) = plan("digits", [{"products": {"dy": "mxfp8_e5m2"}}], ["none"])
    assert a.id == b.id
    assert str(a) == "MXFP8 e5m2 gradients nearest_even none seed 0"
    with pytest.raises(ValueError, match="e5m99"):
        plan("digits", [{"products": {"dy": "e5m99"}}], ["none"])


def test_pairs_of_operands_are_equal_however_their_formats_are_written() -> None:
    (a,) = plan("digits", [{"products": {"fprop": ["e4m3fn per 32", None]}}], ["none"])
    (b,) = plan("digits", [{"products": {"fprop": ("mxfp8_e4m3", None)}}], ["none"])
    assert a.id == b.id


def test_a_function_that_calls_itself_is_a_task() -> None:
    def task(seed: int) -> Any:
        return task(seed - 1) if seed else other(seed)

    def other(seed: int) -> Any:
        return task(seed)

    assert task_of(task) == task_of(task)


def test_a_meta_tensor_is_part_of_the_task_by_its_shape() -> None:
    def made(shape: tuple[int, ...]) -> Any:
        like = torch.empty(shape, device="meta")

        def task(seed: int) -> Any:
            return like

        return task

    assert task_of(made((2, 3))) == task_of(made((2, 3))) != task_of(made((2, 4)))


def test_a_dtype_of_another_library_makes_the_same_cells() -> None:
    expected = ids("digits", ["fp16", "e4m3fn", {"error": "e5m2"}], ["none"])
    assert ids("digits", [torch.float16, torch.float8_e4m3fn, {"error": torch.float8_e5m2}], ["none"]) == expected


def test_the_ids_of_cells_stay_what_they_were() -> None:
    # the ledger of every sweep that was made before knows its cells by them
    known = {
        ("fp16", "none"): "115a081b55c76ee1",
        ("e5m2", "adaptive"): "a1e5289c339eb286",
        ("fp32", "none"): "8104ab9123f58ac5",
    }
    for (fmt, method), found in known.items():
        assert ids("digits", [fmt], [method]) == [found]


def test_a_scaling_that_no_format_takes_warns() -> None:
    def grid(*formats: str, scaling: str = "torch") -> dict[str, Any]:
        return {"task": "digits", "formats": [*formats], "scaling": [scaling], "task_options": None}

    with pytest.warns(UserWarning, match="No format of this sweep takes a scaling of gradients, so that scaling="):
        cells = plan_all(grid("fp32", "mxfp8_e4m3"))
    assert {cell.config["scaling"] for cell in cells} == {"none"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_all(grid("fp32", "fp16"))
        plan_all(grid("fp32", "mxfp8_e4m3", scaling="none"))
        plan_all(grid("mxfp8_e4m3"), [{"formats": ["e5m2"]}])


SPOKEN = {  # names that can be said in a talk, and the format that each stands for
    "bf16": "recipe:bf16",
    "FP8, gradients by method": {
        "products": {"x": "e4m3fn per tensor fp32", "w": "e4m3fn per tensor fp32", "dy": "e4m3fn"}
    },
    "FP8, a scale per tensor": "e4m3fn per tensor fp32",
    "MXFP8": "mxfp8_e4m3",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "FP4, gradients by method": {
        "products": {"x": "e2m1fn per tensor fp32", "w": "e2m1fn per tensor fp32", "dy": "e2m1fn"}
    },
    "FP4, a scale per tensor": "e2m1fn per tensor fp32",
    "e5m2": "e5m2",
    "error=e5m2 head=float32": {"error": "e5m2", "overrides": {"head": None}},
}


@pytest.mark.parametrize("spoken", [*SPOKEN])
def test_a_format_without_a_name_has_one_that_can_be_spoken(spoken: str) -> None:
    (cell,) = plan("digits", [SPOKEN[spoken]], ["none"])
    assert str(cell) == f"{spoken} nearest_even none seed 0"


def test_formats_of_the_sweep_that_comes_along_have_different_names() -> None:
    read = read_sweep("granularity")
    formats = [canonical_format(f) for f in [*read["formats"], *(f for also in read["also"] for f in also["formats"])]]
    names = names_of(formats)
    assert len({name.lower() for name in names.values()}) == len(names) == len({*map(label, formats)})


def test_a_format_that_is_an_object_is_named_as_its_words() -> None:
    assert short_name(fpsim.as_format("fp16")) == "fp16"
    assert short_name(None) == label(None)


def test_operands_in_tiles_of_two_kinds_are_named_together() -> None:
    x, w = "e4m3fn per 1x128 ceil", "e4m3fn per 128x128 ceil"
    assert short_name({"products": {"x": x, "w": w, "dy": x}}) == "FP8, a scale per tile"


def test_a_name_changes_no_cell() -> None:
    named = [{"name": "mine", "format": "mxfp4"}, {"name": "errors alone", "error": "e5m2"}]
    plain = plan("digits", ["mxfp4", {"error": "e5m2"}], ["none"])
    cells = plan("digits", named, ["none"])
    assert [cell.id for cell in cells] == [cell.id for cell in plain]
    assert [cell.config for cell in cells] == [cell.config for cell in plain]
    assert [str(cell) for cell in cells] == [
        "mine nearest_even none seed 0",
        "errors alone nearest_even none seed 0",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"e5m2": "fp16"},
        {"e5m2": "mine", "fp16": "mine"},
        {"e5m2": "recipe:fp16"},
        {"e5m2": "FP16", "recipe:fp16": "e5m2"},
        {"mxfp4": "recipe:fp16"},
    ],
)
def test_no_two_formats_of_a_sweep_have_one_name(given: dict[str, str]) -> None:
    names = names_of(["fp16", "recipe:fp16", "e5m2", "mxfp4"], given)  # as a changed names.json may have them
    assert len({name.lower() for name in names.values()}) == 4


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ([{"name": "", "format": "fp16"}], "Got the name '' of a format. Use text of 1 to 60 letters, in one line."),
        ([{"name": 3, "format": "fp16"}], "Got the name 3 of a format."),
        ([{"name": "a\nb", "format": "fp16"}], "in one line"),
        ([{"name": "a"}], "Got the name 'a' with nothing. Use {name: ..., format: ...}"),
        ([{"name": "a", "format": "fp16", "error": "e5m2"}], "Got the name 'a' with format, error."),
        ([{"name": "float32", "format": "fp16"}], "It is that of the baseline."),
        ([{"name": "a", "format": "fp16"}, {"name": "A", "format": "bf16"}], "is that of two formats, fp16 and bf16"),
    ],
)
def test_what_is_not_a_name_is_refused_in_words(formats: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plan("digits", formats, ["none"])


def test_gradients_of_few_bits_that_are_fitted_are_rounded_stochastically_unless_a_rounding_is_named() -> None:
    formats = ["e2m1fn", {"products": {"dy": "e3m2fn", "x": "e4m3fn"}}, {"error": "e4m3fn"}, "mxfp4", "recipe:fp16"]
    found = {str(cell) for cell in plan("digits", formats, ["adaptive", "current", "exact", 1024])}
    stochastic = {cell for cell in found if "stochastic_gradients" in cell}
    assert stochastic == {
        f"{fmt} stochastic_gradients {scaling} seed 0"
        for fmt in ("e2m1fn", "dy=e3m2fn x=e4m3fn")
        for scaling in ("adaptive", "current")
    }
    named = plan("digits", formats, ["adaptive"], roundings=["nearest_even"])
    assert {cell.config["rounding"] for cell in named} == {"nearest_even"}
    both = plan("digits", ["e4m3fn"], ["torch"], roundings=["nearest_even", "stochastic_gradients"])
    assert len({cell.id for cell in both}) == 2


def test_a_cell_of_stochastic_gradients_rounds_all_else_to_the_nearest() -> None:
    (stage,) = policy_of({"products": {"dy": "e2m1fn", "w": "e4m3fn"}}, "stochastic_gradients").stages
    assert str(stage.fmt) == (
        "products: fprop=(as it is, e4m3fn nearest_even), dgrad=(e2m1fn stochastic, e4m3fn nearest_even), "
        "wgrad=(e2m1fn stochastic, as it is)"
    )
    (stage,) = policy_of("e4m3fn", "stochastic_gradients").stages
    specs = stage.fmt.specs()
    assert [spec.rounding for spec in specs] == ["nearest_even", "nearest_even", "stochastic", "stochastic"]


@pytest.mark.parametrize(
    ("products", "canonical"),
    [
        ({"w": "mxfp4", "backward": "dequantized"}, {"w": "mxfp4", "backward": "dequantized"}),
        ({"x": "mxfp4", "backward": "original"}, {"x": "mxfp4"}),
        ({"x": "half", "accumulator": "half"}, {"x": "fp16", "accumulator": "fp16"}),
        (
            {"fprop": ["e4m3fn", None], "accumulator": "hopper_fp8"},
            {"fprop": ["e4m3fn", None], "accumulator": "hopper_fp8"},
        ),
        ({"x": "bf16", "accumulator": "cb16_chunk64"}, {"x": "bf16", "accumulator": "cb16_chunk64"}),
        (
            {"w": "mxfp4", "accumulator": (fpsim.Accumulator("fp16", splits=2, split_format="bf16"), None, "half")},
            {
                "w": "mxfp4",
                "accumulator": ["Accumulator('fp16', splits=2, split_format='bf16')", None, "fp16"],
            },
        ),
    ],
    ids=str,
)
def test_words_of_products_are_not_taken_for_formats(products: dict[str, Any], canonical: dict[str, Any]) -> None:
    assert canonical_format({"products": products}) == {"products": canonical}
    make = fpsim.Products if "fprop" in products else fpsim.Products.by_operand
    (stage,) = policy_of({"products": canonical}, "nearest_even").stages
    assert stage.fmt.products.with_rounding("nearest_even") == make(**products).with_rounding("nearest_even")


def test_points_of_an_attention_are_a_mapping_in_a_cell() -> None:
    points = {"q": "half", "k": None, "p": "e4m3fn", "p_scale": 256, "block_kv": 128, "accumulator": "hopper_fp8"}
    canonical = {k: v for k, v in points.items() if v is not None} | {"q": "fp16"}
    assert canonical_format({"products": {"x": "half", "attention": points}}) == {
        "products": {"x": "fp16", "attention": canonical}
    }
    assert canonical_format({"products": {"x": "half", "attention": False}}) == {"products": {"x": "fp16"}}
    (stage,) = policy_of({"products": {"x": "fp16", "attention": canonical}}, "nearest_even").stages
    found, expected = stage.fmt.products.attention, fpsim.Attention(**points)
    assert found.with_rounding("nearest_even") == expected.with_rounding("nearest_even")
    assert label({"products": {"x": "fp16", "attention": {"q": "fp16", "k": "fp16", "block_kv": 4}}}) == (
        "x=fp16 attention=(q,k=fp16 block_kv=4)"
    )
    with pytest.raises(ValueError, match="p_scale"):
        canonical_format({"products": {"attention": {"p": "e4m3fn", "p_scale": 3}}})


@pytest.mark.parametrize("products", [{"w": "mxfp4", "backward": "dequant"}, {"x": "bf16", "accumulator": "hoper_fp8"}])
def test_a_word_of_products_that_is_not_known_is_refused_while_planning(products: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Did you mean"):
        canonical_format({"products": products})
