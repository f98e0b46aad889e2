"""Whole tensors in files: against casts of torch, and read by the safetensors package."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import fpsim


def net() -> nn.Module:
    torch.manual_seed(0)
    return fpsim.quantize(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "fp16")


def step(model: nn.Module, size: float = 1e-6) -> None:
    model(torch.ones(2, 4)).backward(torch.tensor([[1.0, 2.0], [3.0, 0.0]]) * size)


def test_a_file_holds_the_tensor_and_what_rounding_made_of_it(tmp_path: Path) -> None:
    model = net()
    with fpsim.snapshots(model, tmp_path / "a" / "b", sites="2:linear") as kept:
        step(model)
    assert [file.name for file in kept.files] == ["2%3Alinear.error.000001.safetensors"]
    given = torch.tensor([[1.0, 2.0], [3.0, 0.0]]) * 1e-6
    with safetensors.safe_open(kept.files[0], "pt") as file:
        assert torch.equal(file.get_tensor("before"), given)
        assert torch.equal(file.get_tensor("after"), given.half().float())
        words = {"site": "2:linear", "role": "error", "rounding": "nearest_even", "call": "1"}
        assert file.metadata() | words == file.metadata()
        assert fpsim.as_format(file.metadata()["format"]) == fpsim.as_format("fp16")
    found = fpsim.Snapshot.load(kept.files[0])
    assert (found.site, found.role, found.rounding, found.call) == ("2:linear", "error", "nearest_even", 1)
    assert torch.equal(found.before, given)
    assert torch.equal(found.after, given.half().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    from fpsim.insight.snapshots import Snapshots
    from fpsim.tensors.spec import any_spec

    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = Snapshots(tmp_path, ("*",), ("error",), 1)
    assert kept.wants("a/b:c", "error")
    turned = tensor.T if tensor.dim() == 2 else tensor
    kept("a/b:c", "error", turned, turned, any_spec("e4m3fn", "stochastic", None, 8))
    found = fpsim.Snapshot.load(kept.files[0])
    assert found.before.dtype is dtype
    assert torch.equal(found.before, turned)
    assert kept.files[0].parent == tmp_path  # a slash in a name makes no folder


def test_each_nth_call_of_chosen_sites_and_roles_is_kept_and_nothing_changes(tmp_path: Path) -> None:
    model, alone = net(), net()
    with fpsim.snapshots(model, tmp_path, ["0:*", "2:weight"], ("error", "weight"), every=2) as kept:
        for _ in range(5):
            step(model)
    for _ in range(5):
        step(alone)
    places = {fpsim.Snapshot.load(file)[:2] for file in kept.files}
    assert places == {("0:linear", "error"), ("0:weight", "weight"), ("0:weight_1", "weight"), ("2:weight", "weight")}
    calls = [snapshot.call for snapshot in map(fpsim.Snapshot.load, kept.files) if snapshot.site == "0:linear"]
    assert calls == [1, 3, 5]
    assert sorted(kept.files) == sorted(tmp_path.iterdir())
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, its.grad)


def test_what_matches_nothing_is_said_at_the_end(tmp_path: Path) -> None:
    model = net()
    with (
        pytest.warns(
            UserWarning, match=r"No snapshot was written: sites=\['3:\*'\].* 0:linear activation, 0:linear e"
        ) as told,
        fpsim.snapshots(model, tmp_path / "none", "3:*"),
    ):
        step(model)
    assert told[0].filename == __file__  # the block's end, and not fpsim's own
    assert not (tmp_path / "none").exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    with fpsim.snapshots(model, tmp_path, "2:linear") as kept:
        step(model, 1.0)
    before = kept.files[0].read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with fpsim.snapshots(model, tmp_path, "2:linear"), pytest.raises(OSError, match="No space"):
        step(model, 2.0)
    assert list(tmp_path.iterdir()) == [kept.files[0]]
    assert kept.files[0].read_bytes() == before


@pytest.mark.parametrize("spoilt", ["cut", "empty", "length", "text"])
def test_what_is_no_snapshot_is_refused(spoilt: str, tmp_path: Path) -> None:
    model = net()
    with fpsim.snapshots(model, tmp_path, "2:linear") as kept:
        step(model)
    content = kept.files[0].read_bytes()
    content = {"cut": content[:-1], "empty": b"", "length": b"\xff" * 8 + content[8:], "text": b"no tensors here"}[
        spoilt
    ]
    kept.files[0].write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a snapshot .*Expected: a file that fpsim\.snapshots has written"):
        fpsim.Snapshot.load(kept.files[0])


def test_tensors_of_another_library_are_no_snapshot(tmp_path: Path) -> None:
    safetensors.torch.save_file({"before": torch.ones(2)}, tmp_path / "half")
    safetensors.torch.save_file({"before": torch.ones(2), "after": torch.zeros(2)}, tmp_path / "without words")
    for name in ("half", "without words", "missing"):
        with pytest.raises(ValueError, match=r"is not a snapshot .*Expected: a file that fpsim"):
            fpsim.Snapshot.load(tmp_path / name)


def test_without_safetensors_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"Snapshots and dumps need safetensors, which .*: pip install .*export"):
        fpsim.snapshots(net(), tmp_path).__enter__()
    with pytest.raises(ImportError, match="Snapshots and dumps need safetensors"):
        fpsim.Snapshot.load(tmp_path / "any")


def test_a_model_is_observed_by_one(tmp_path: Path) -> None:
    model = net()
    with fpsim.record(model), pytest.raises(ValueError, match=r"being recorded already\. Leave the other"):
        fpsim.snapshots(model, tmp_path).__enter__()
    with fpsim.snapshots(model, tmp_path), pytest.raises(ValueError, match="being recorded already"):
        fpsim.record(model).__enter__()
    with fpsim.record(model):  # both have left
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": 3}, "folder is 3"),
        ({"sites": []}, r"sites=\[\] names nothing"),
        ({"sites": [3]}, "sites holds 3"),
        ({"roles": ""}, "roles='' names nothing"),
        ({"every": 0}, "every=0"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fpsim.snapshots(net(), **{"folder": tmp_path, **options}).__enter__()


def test_the_histogram_counts_powers_of_two_and_what_became_zero(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    x = torch.tensor([2.0**-30, -(2.0**-27), 1.5 * 2.0**-27, 2.0**-24, 3.0, -2.0, 0.0, math.inf])
    found = fpsim.Snapshot("a:b", "error", "fp16", "nearest_even", 1, x, x.half().float())
    (axes,) = found.plot().axes
    counts, lost = ({bar.get_x(): bar.get_height() for bar in bars if bar.get_height()} for bars in axes.containers)
    mantissas, exponents = np.frexp(np.abs(x[:6].double().numpy()))
    assert (mantissas >= 0.5).all()
    expected = {int(k) - 1: int((exponents == k).sum()) for k in set(exponents.tolist())}
    assert counts == expected == {-30: 1, -27: 2, -24: 1, 1: 2}
    assert lost == {-30: 1, -27: 2}
    assert [line.get_xdata()[0] for line in axes.lines] == [-24, pytest.approx(math.log2(65504))]
    fpsim.Snapshot("a:b", "error", "e2m1fn per 32", "nearest_even", 1, x, x).plot()
    zeros: Tensor = torch.zeros(3)
    fpsim.Snapshot("a:b", "error", "fp16", "nearest_even", 1, zeros, zeros).plot()
