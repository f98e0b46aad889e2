"""Everything that is returned prints as a table, has a length, becomes a DataFrame, and plots into pyplot's figure."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import tiers
import torch
from matplotlib.image import imread
from matplotlib.text import Text
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, Recorder, Results
from ada_loss.lab.results.figures import in_the_dark
from ada_loss.lab.studies.search import search
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.tasks import digits
from ada_loss.lab.training import train


@pytest.fixture(autouse=True)
def _pyplot() -> Iterator[None]:
    before = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    formats = ["fp16", {"name": "my fp8", "format": "e4m3fn per tensor fp32"}, "e5m2"]
    options: Any = {"task_options": {"epochs": 2, "record_every": 1}, "show_progress": False}
    return sweep("sweep_tasks:tiny", formats, ["none", "torch"], seeds=3, out=tmp_path_factory.mktemp("s"), **options)


def trained() -> tuple[fpsim.Recording, Recorder]:
    torch.manual_seed(0)
    model = fpsim.quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), fpsim.Policy(error="e4m3fn"))
    scaled = AdaLossScaled(model)
    scaled.observer = recorder = Recorder()
    with fpsim.record(model) as recording:
        for _ in range(2):
            nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)).backward()
    scaled.detach()
    return recording, recorder


def found(results: Results, tmp: Path) -> Any:
    return search("sweep_tasks:sorts", roles=["activation"], seeds=1, trials=2, out=tmp, show_progress=False)


THINGS: dict[str, tuple[Callable[[Results, Path], Any], str]] = {
    "results": (lambda r, _: r, "| my fp8 |"),
    "table": (lambda r, _: r.table(), "| my fp8 |"),
    "verdict": (lambda r, _: r.verdicts()[0], "float32 gives accuracy"),
    "comparison": (lambda r, _: r.compare("my fp8", "fp32"), "my fp8 against fp32: accuracy"),
    "curves": (lambda r, _: r.curves("loss"), "loss, lower is better\nformat"),
    "recording": (lambda *_: trained()[0], "site      role   format  rounding"),
    "recorder": (lambda *_: trained()[1], "those of which most was lost, at their worst"),
    "run": (lambda *_: train(digits(), "bf16", steps=2), "accuracy  steps  skipped"),
    "search": (found, "Smallest found: activation"),
}


@tiers.parametrize("thing", [*THINGS], keep={"curves", "recording", "run", "search"})
def test_it_prints_has_a_length_converts_and_plots(results: Results, tmp_path: Path, thing: str) -> None:
    make, words = THINGS[thing]
    it = make(results, tmp_path)
    assert words in repr(it)
    assert len(it) > 0
    assert it
    frame = it.to_frame()
    assert len(frame) > 0
    assert len(frame.columns) > 1
    figure = it.plot()
    assert plt.gcf() is figure
    content = io.BytesIO()
    plt.savefig(content, format="png")
    image = imread(io.BytesIO(content.getvalue()))
    assert len(np.unique(image[..., :3].reshape(-1, 3), axis=0)) > 20  # not the white of an empty figure
    assert figure.axes[0].get_xlabel() or figure.get_supxlabel()


def test_a_share_is_called_underflow_everywhere_and_counts_are_called_counts() -> None:
    model = fpsim.quantize(nn.Linear(2, 2, bias=False), fpsim.Policy(error="fp16"))
    with fpsim.record(model) as recording:
        model(torch.ones(1, 2)).backward(torch.tensor([[1e-9, 1.0]]))
    (row,) = (row for row in recording.rows() if row["site"] == ":linear" and row["role"] == "error")
    assert (row["underflow"], row["underflow_count"], row["nonzero"], row["overflow"]) == (0.5, 1, 2, 0.0)
    with fpsim.watch(nn.Linear(2, 2)) as watching:
        pass
    assert watching.rows() == []


@pytest.mark.full
def test_without_pyplot_a_figure_is_nobodys_and_a_report_never_is() -> None:
    code = "import sys, fpsim.insight.pictures as p; p.new_picture(2, 2); print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    before = plt.get_fignums()
    with in_the_dark():
        trained()[0].plot()
    assert plt.get_fignums() == before


def test_the_report_leaves_pyplots_figures_alone(results: Results, tmp_path: Path) -> None:
    mine = plt.figure()
    results.report(tmp_path / "report.html")
    assert plt.get_fignums() == [mine.number]
    assert plt.gcf() is mine


def test_a_notebook_shows_a_figure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    monkeypatch.setattr(plt, "get_backend", lambda: "module://matplotlib_inline.backend_inline")
    figure = trained()[0].plot()
    assert plt.get_fignums() == [figure.number]
    figure._ipython_display_()
    assert [sorted(data) for data in shown] == [["image/png", "text/plain"]]
    assert plt.get_fignums() == []  # which the end of the cell would show again


def test_what_broke_first_is_named_on_the_axis_of_a_deep_model() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
    with torch.no_grad():
        for layer in deep:
            layer.weight.copy_(torch.eye(4))
        deep[100].weight.mul_(300)
        deep[101].weight.mul_(300)  # 300 * 300 is beyond 65504
    model = fpsim.quantize(deep, "fp16")
    found = fpsim.diagnose(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert found.cause["site"] == "101:linear"
    (axes,) = found.plot().axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) < 90
    assert "101:linear" in names
    assert "101:linear" in axes.get_title()


def test_the_names_of_a_sweep_stand_everywhere(results: Results, tmp_path: Path) -> None:
    assert results.legend["my fp8"] == "e4m3fn per tensor fp32"
    assert {row["format"] for row in results.rows()} == {"fp32", "fp16", "my fp8", "e5m2"}
    assert "my fp8" in str(results.verdicts()[0])
    table = results.table()
    assert table.mean("e4m3fn per tensor fp32", "none") == table.mean("my fp8", "none") > 0
    assert table.text("e4m3fn per tensor fp32", "none") == table.text("my fp8", "none")
    figure = results.plot()
    words = [text for axes in figure.axes for text in (axes.get_title(), *map(Text.get_text, axes.get_yticklabels()))]
    assert any("my fp8" in text for text in words)
    assert results.chosen_rows({"format": "e4m3fn per tensor fp32"}) == results.chosen_rows({"format": "my fp8"})
    text = results.report(tmp_path / "report.html").read_text()
    assert text.count("e4m3fn per tensor fp32</span>") == 1  # the legend
    unnamed = Results(results.out)
    (results.out / "names.json").rename(tmp_path / "names.json")
    try:
        assert "FP8, a scale per tensor" in {row["format"] for row in Results(results.out).rows()}
    finally:
        (tmp_path / "names.json").rename(results.out / "names.json")
    assert unnamed.names == results.names
