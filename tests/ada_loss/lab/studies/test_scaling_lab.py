"""The two comparisons of scaling methods: a controlled one in depth, and one on real images."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from ada_loss.lab.results.figures import figure_bytes, plot_depth, plot_scales
from ada_loss.lab.studies.depth import GAINS, depth_trial, relu_network
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.tasks import deep_digits
from ada_loss.lab.training.loop import train
from ada_loss.lab.training.methods import make_scaling
from ada_loss.scalers import GradScaler
from fpsim import Policy, quantize

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))
from depth import depth_table

ADAPTIVE = ("approx_range", "abs_range", "exact", "current")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    methods = ("none", 2.0**7, 2.0**15, "approx_range 16/1024", *ADAPTIVE)
    return depth_trial(methods=methods)


def errors(rows: list[dict[str, object]], fmt: str, method: str) -> list[float]:
    found = [row for row in rows if (row["format"], row["method"]) == (fmt, method)]
    assert [row["gain"] for row in found] == list(GAINS)
    return [float(row["error"]) for row in found]  # type: ignore[arg-type]


# Half an ulp is 2**-p of a number at most; 24 layers of it, as independent errors, add up to sqrt(24) times that
@pytest.mark.parametrize(("fmt", "precision"), [("fp16", 11), ("e5m2", 3), ("e4m3fn", 4)])
def test_adaptive_scaling_alone_is_good_at_every_depth(rows: list[dict[str, object]], fmt: str, precision: int) -> None:
    bound = math.sqrt(24) * 2.0**-precision
    for method in ADAPTIVE:
        share = 1.5 if fmt == "fp16" and method in ("exact", "approx_range") else 1.0  # a thousandth may underflow
        assert max(errors(rows, fmt, method)) < bound * share, method
    for method in ("none", "128.0", "32768.0", "approx_range 16/1024"):
        assert max(errors(rows, fmt, method)) > 0.9, method


def test_the_tolerated_share_is_kept(rows: list[dict[str, object]]) -> None:
    for row in rows:
        if row["method"] in ("exact", "approx_range", "abs_range", "current"):
            assert row["underflow"] <= 1.05e-3  # type: ignore[operator]
            assert row["overflow"] == 0
    none = {(r["format"], r["gain"]): r["underflow"] for r in rows if r["method"] == "none"}
    assert none["fp16", 0.5] > 0.1  # type: ignore[operator]  # 15.6 % in the study


def test_networks_have_the_gain_they_are_asked_for() -> None:
    for layer in relu_network(0.5, depth=2, width=512)[::2]:
        assert layer.weight.var().item() * 512 == pytest.approx(0.5, rel=0.02)  # 512**2 samples: 0.3 % each


def test_a_network_whose_gradients_are_zero_in_float32_too_has_none_to_lose() -> None:
    (row,) = depth_trial(["fp16"], [2.0**-100], ["none"], depth=8, width=16, batch=4)
    assert (row["underflow"], row["overflow"]) == (0.0, 0)


def test_a_rule_that_looks_at_the_largest_gradient_is_tried_too() -> None:
    (row,) = depth_trial(["fp16"], [2.0], ["logmax"], depth=2, width=16, batch=4)
    assert row["log2_scale"] == 14  # its ceiling: these gradients are far below 2**(16 - 14)


def test_the_trials_table_and_picture(rows: list[dict[str, object]]) -> None:
    lines = depth_table(rows).splitlines()
    assert lines[0] == "| format | method | gain 3 | gain 1.2 | gain 0.8 | gain 0.5 | gain 0.2 |"
    assert len(lines) == 2 + 3 * 8
    assert figure_bytes(plot_depth(rows))[:4] == b"\x89PNG"


@pytest.mark.full
def test_without_scaling_e4m3fn_learns_nothing_and_adaptive_scaling_needs_no_tuning(tmp_path: Path) -> None:
    policy = {"error": "e4m3fn", "weight_grad": "e4m3fn"}
    options = {"epochs": 12, "optimizer": "adam", "learning_rate": 1e-3}
    methods = ["none", "torch", "adaptive"]
    results = sweep("deep_digits", ["fp32", policy], methods, task_options=options, out=tmp_path, show_progress=False)
    table, row = results.table(), "error=e4m3fn weight_grad=e4m3fn"
    assert table.mean(row, "none") < 0.2
    assert table.mean(row, "torch") < 0.2  # it saturates: nothing tells torch that its first scale is too large
    assert table.mean(row, "adaptive") > table.mean("fp32", "none") - 0.15 > 0.5


def test_many_constants_are_a_line_beside_the_methods_that_choose(tmp_path: Path) -> None:
    constants = [2.0**k for k in range(6)]
    results = sweep(
        "sweep_tasks:tiny", ["fp32", "fp16"], [*constants, "torch"], seeds=2, out=tmp_path, show_progress=False
    )
    (panel,) = results.plot_accuracy().axes
    assert panel.get_title() == "fp16"
    line = next(line for line in panel.lines if len(line.get_xdata()) == 6)
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    assert panel.get_ylabel() == "accuracy in %; the band is float32"
    title = results.plot_accuracy("underflow").axes[0].get_ylabel()
    assert title == "underflow in %, lower is better; the band is float32"


def test_constants_alone_are_a_line_in_the_picture_and_in_the_report(tmp_path: Path) -> None:
    constants = [2.0**k for k in range(6)]
    options = {"epochs": 1}
    results = sweep(
        "sweep_tasks:tiny", ["fp16"], constants, task_options=options, out=tmp_path, baseline=False, show_progress=False
    )
    (panel,) = results.plot_accuracy().axes
    (line,) = (line for line in panel.lines if len(line.get_xdata()) == 6)
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    assert results.report().exists()


def test_a_run_is_the_same_for_a_seed_and_tells_its_scales() -> None:
    policy = Policy(error="e5m2", weight_grad="e5m2")
    options = {"optimizer": "adam", "learning_rate": 1e-3, "epochs": 2, "scaling": "torch"}
    a, b = (train(deep_digits(3), policy, **options) for _ in range(2))  # type: ignore[arg-type]
    assert (a.losses, a.scales, a.skipped, a.metrics) == (b.losses, b.scales, b.skipped, b.metrics)
    assert a.scales[0] == 65536
    assert a.scales[-1] == 65536 * 0.5 ** (a.skipped - (a.scales[-1] != a.scales[-2])) or a.skipped == 0


def test_methods_become_scalers() -> None:
    model = quantize(deep_digits().model, "fp16")
    scaler, adaptive = make_scaling("none", model)
    assert (scaler.get_scale(), scaler.rule.skips, adaptive) == (1.0, True, None)
    scaler, adaptive = make_scaling(1024, model)
    assert (scaler.get_scale(), scaler.rule.skips, adaptive) == (1024.0, True, None)
    scaler, adaptive = make_scaling("nnabla", model)
    assert (scaler.rule.system, adaptive) == ("nnabla", None)
    for word, name in (("adaptive", "approx_range"), ("exact", "exact")):
        scaler, adaptive = make_scaling(word, model)
        assert isinstance(scaler, GradScaler)
        assert scaler.rule.skips
        assert adaptive is not None
        assert adaptive.rule.name == name
        adaptive.detach()
    with pytest.raises(ValueError, match=r"Unknown scaling method 'magic'\. Known: none, a number, adaptive, approx"):
        make_scaling("magic", model)
    with pytest.raises(ValueError, match=r"Unknown optimizer 'lamb'\. Known: sgd, adam, adamw\."):
        train(deep_digits(), optimizer="lamb", epochs=1)


@pytest.mark.parametrize("method", ["magic", "off", "static", "jmp"])
def test_every_method_that_an_error_names_is_possible(method: str) -> None:
    model = quantize(deep_digits().model, "fp16")
    with pytest.raises(ValueError, match=f"Unknown scaling method '{method}'") as error:
        make_scaling(method, model)
    none, number, *names = str(error.value).split("Known: ")[1].rstrip(".").split(", ")
    assert (none, number) == ("none", "a number")
    for name in names:
        _, adaptive = make_scaling(name, model)
        if adaptive is not None:
            adaptive.detach()


def test_adaptive_training_leaves_the_task_as_it_was() -> None:
    task = deep_digits(1)
    before = {name: p.clone() for name, p in task.model.state_dict().items()}
    train(task, "e5m2", scaling="adaptive", optimizer="adam", epochs=1)
    assert all(torch.equal(before[name], p) for name, p in task.model.state_dict().items())


def test_scales_are_drawn_with_the_overflows() -> None:
    figure = plot_scales({"torch": [4.0, 4.0, 2.0], "nnabla": [8.0, 4.0, 4.0]}, overflows=[1])
    assert figure_bytes(figure)[:4] == b"\x89PNG"
