"""The page docs/architecture.md is true: its picture, its stops, and the files and names that it mentions."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import nn

import ada_loss
import fpsim
from fpsim import FloatFormat
from fpsim.kernels.round import cpu_loop

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
rooms = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "rooms.py")))
STOP = re.compile(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", re.MULTILINE)
PAIR = re.compile(r"`([\w/]+/\w+\.py)`: ((?:`[\w.]+`(?:, )?)+)")
Calls = list[tuple[str, str]]


def stops(title: str) -> Calls:
    """The numbered lines of a section, as (file, function)."""
    section = PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]
    return STOP.findall(section)


def defined_in(path: Path) -> set[str]:
    """The functions, classes, methods and module-level names of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}
    return found


def calls_of(work: Callable[[], object]) -> Calls:
    """What a piece of work calls in the two packages, in order, as (file, function)."""
    found: Calls = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith((f"{ROOT}/fpsim/", f"{ROOT}/ada_loss/")):
            found.append((path.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname.partition(".<locals>")[0]))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def is_in_order(wanted: Calls, calls: Calls) -> bool:
    """Whether `wanted` are among the calls, in this order."""
    rest = iter(calls)
    return all(stop in rest for stop in wanted)


def of_each_hook(calls: Calls) -> list[Calls]:
    """The calls of a backward pass, cut before every gradient."""
    starts = [i for i, (_, name) in enumerate(calls) if name == "ScaledBackwardRounding.__call__"]
    return [calls[a:b] for a, b in zip(starts, [*starts[1:], len(calls)], strict=True)]


def backward_calls(update_every: int, steps: int) -> Calls:
    """The calls of a backward pass after some steps, each of one forward and one backward pass."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = fpsim.quantize(net, fpsim.Policy(error="e4m3fn", weight_grad="e4m3fn"))
    x = torch.randn(4, 8)
    with ada_loss.AdaLossScaled(model, update_every=update_every):
        for _ in range(steps):
            model(x).sum().backward()
        return calls_of(model(x).sum().backward)


def test_the_picture_is_that_of_the_imports() -> None:
    assert rooms.BLOCK.findall(PAGE) == [rooms.mermaid()], "run `python docs/rooms.py --write`"


def test_the_script_prints_the_picture() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "rooms.py"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{rooms.mermaid()}\n"


def test_an_arrow_that_others_imply_is_left_out_and_a_cycle_is_kept() -> None:
    assert rooms.without_implied({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert rooms.without_implied({"a": {"b"}, "b": {"a"}}) == {"a": {"b"}, "b": {"a"}}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    named = re.findall(r"`((?:fpsim|ada_loss|benchmarks|docs|tests)/[\w/.]*\w)/?`", (ROOT / page).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [path for path in re.findall(r"\]\(((?!http)[^)#]+)", PAGE) if not (ROOT / "docs" / path).exists()] == []


def test_every_name_is_defined_in_the_file_that_is_said() -> None:
    pairs = [(path, name) for path, names in PAIR.findall(PAGE) for name in re.findall(r"`([\w.]+)`", names)]
    assert len(pairs) > 50
    assert [(path, name) for path, name in pairs if name not in defined_in(ROOT / path)] == []


def test_every_room_is_described() -> None:
    described = {name.strip("/") for name in re.findall(r"`([\w/.]+)`", PAGE.partition("## Who imports whom")[0])}
    for room in rooms.rooms():
        house, _, name = room.rpartition("/")
        if not name.startswith("__"):
            name = name if (ROOT / room).is_dir() else f"{name}.py"
            assert (f"lab/{name}" if house == "ada_loss/lab" else name) in described, room


def test_the_stops_of_round_to() -> None:
    fmt = FloatFormat(4, 6, bias=5)  # one that no other test has rounded to: what is cached is not called
    cpu_loop.cache_clear()  # formats of one shape share a loop
    assert is_in_order(stops("A tensor through `round_to`"), calls_of(lambda: fpsim.round_to(torch.ones(3), fmt)))


def test_the_stops_of_a_forward_call() -> None:
    model = fpsim.quantize(nn.Linear(2, 2), "fp16")
    path = stops("A forward call of a quantised module")
    assert len(path) == 10
    assert is_in_order(path, calls_of(lambda: model(torch.ones(2))))


def test_the_stops_of_a_product() -> None:
    path = stops("A product with quantised operands")
    assert len(path) == 14
    model, x = fpsim.quantize(nn.Linear(2, 2), "mxfp8_e4m3"), torch.ones(2, 2, requires_grad=True)
    results: list[torch.Tensor] = []
    assert is_in_order(path[:8], calls_of(lambda: results.append(model(x))))
    assert is_in_order(path[8:], calls_of(results[0].sum().backward))


def test_the_stops_of_a_gradient() -> None:
    path = stops("A gradient to its scale")
    assert 10 < len(path) <= 12
    assert any(is_in_order(path, calls) for calls in of_each_hook(backward_calls(update_every=1, steps=1)))


def test_the_stops_of_a_gradient_climb_twice() -> None:
    arrows = rooms.imports()
    files = [path.removesuffix(".py").replace("/", ".") for path, _ in stops("A gradient to its scale")]
    climbs = [(a, b) for a, b in pairwise(files) if a != b and b not in rooms.reachable(arrows, a)]
    assert len(climbs) <= 2


def test_the_stops_of_a_gradient_between_updates() -> None:
    path = stops("The same between updates")
    assert len(path) == 7
    assert any(is_in_order(path, calls) for calls in of_each_hook(backward_calls(update_every=1000, steps=2)))


def test_the_stops_of_a_cell(tmp_path: Path) -> None:
    path = stops("A cell of a sweep")
    assert len(path) == 12
    grid = {"formats": ["fp16"], "task_options": {"steps": 1}, "out": tmp_path, "show_progress": False}
    assert is_in_order(path, calls_of(lambda: ada_loss.sweep("sweep_tasks:tiny", **grid)))


def test_stops_in_another_order_are_noticed() -> None:
    path = stops("A gradient to its scale")
    calls = of_each_hook(backward_calls(update_every=1, steps=1))
    assert not any(is_in_order([path[-1], *path[:-1]], c) for c in calls)
