"""Delayed scaling: scales follow from the amaxes of earlier steps. As a script, one of two ranks."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import Delayed, FormatLike
from fpsim.emulation.scope import Listeners
from fpsim.models.quantize import keeps_history, listeners, policies_of
from fpsim.policies.delayed import AmaxHistory, Histories

CPU = torch.device("cpu")
# what was recorded in each of 20 steps; None: the operand was not there
STEPS = [
    1.0, 3.5, None, 0.0, 1e-3, torch.inf, 2.0, 1e-3, torch.nan, None,
    0.0, 0.0, 448.0, 1e30, 5.0, None, 1e-42, 7.0, 0.1, 2.0**-149,
]  # fmt: skip
RULES = [
    Delayed(),
    Delayed(history=1),
    Delayed(history=3),
    Delayed(history=3, margin=2),
    Delayed(history=2, margin=-1),
    Delayed(history=5, amax="most_recent"),
]


class Naive:
    """The definition in NumPy's float32, one number after the other."""

    def __init__(self, rule: Delayed, largest: float) -> None:
        self.rule, self.largest, self.amaxes, self.scale = rule, np.float32(largest), [], np.float32(1)

    def step(self, amax: float | None) -> None:
        if amax is None:
            return
        self.amaxes.append(np.float32(amax))
        last = self.amaxes[-self.rule.history :]
        chosen = last[-1] if self.rule.amax == "most_recent" else max(last, key=lambda a: np.inf if a != a else a)
        if chosen > 0 and np.isfinite(chosen):
            with np.errstate(over="ignore"):
                scale = self.largest / chosen / np.float32(2.0**self.rule.margin)
            info = np.finfo(np.float32)
            self.scale = min(max(scale, info.tiny), info.max)


def history(histories: Histories, rule: Delayed, largest: float = 448.0, name: str = "a:linear") -> AmaxHistory:
    return histories.of(name, "fprop.x", rule, largest, CPU)


@pytest.mark.parametrize("largest", [448.0, 57344.0, 6.0])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_scales_are_those_of_the_formula(rule: Delayed, largest: float) -> None:
    histories, naive = Histories(), Naive(rule, largest)
    for amax in STEPS:
        histories.begin_step()
        found = history(histories, rule, largest)
        assert found.scale().dtype is torch.float32
        assert found.scale().shape == ()
        assert found.scale().item() == naive.scale
        if amax is not None:
            found.record(torch.tensor(amax))
        assert found.scale().item() == naive.scale  # this step's amax is not among them
        naive.step(amax)


def test_histories_of_other_operands_go_on_by_themselves() -> None:
    histories = Histories()
    naive = {(rule, i): Naive(rule, 6.0) for rule in RULES for i in range(3)}
    for step in range(20):
        histories.begin_step()
        for (rule, i), expected in naive.items():
            found = history(histories, rule, 6.0, f"{RULES.index(rule)}{i}:linear")
            assert found.scale().item() == expected.scale
            amax = STEPS[(step * (i + 1)) % 20]
            if amax is not None:
                found.record(torch.tensor(amax, dtype=torch.float64))
            expected.step(amax)


def test_the_largest_amax_of_a_step_counts() -> None:
    histories = Histories()
    for amax in (2.0, 7.0, 3.0):
        history(histories, Delayed()).record(torch.tensor([amax]))
    histories.begin_step()
    assert history(histories, Delayed()).scale() == torch.tensor(64.0)
    histories.begin_step()  # nothing was recorded: no step for this operand
    assert history(histories, Delayed()).scale() == torch.tensor(64.0)


def test_a_scale_that_was_given_stays_as_it_is() -> None:
    histories = Histories()
    first = history(histories, Delayed()).scale()
    history(histories, Delayed()).record(torch.tensor(7.0))
    histories.begin_step()
    second = history(histories, Delayed()).scale()
    history(histories, Delayed(), name="another").record(torch.tensor(14.0))
    history(histories, Delayed()).record(torch.tensor(14.0))
    histories.begin_step()
    histories.load_state_dict({})
    assert [first.item(), second.item()] == [1.0, 64.0]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_history_that_is_saved_and_restored_goes_on_to_the_same_bits(rule: Delayed, tmp_path: Path) -> None:
    for stop in (1, 6, 13):
        histories, naive = Histories(), Naive(rule, 448.0)
        for step, amax in enumerate(STEPS):
            histories.begin_step()
            found = history(histories, rule)
            assert found.scale().item() == naive.scale
            if amax is not None:
                found.record(torch.tensor(amax))
            naive.step(amax)
            if step == stop:  # with this step's amax still to become history
                torch.save(histories.state_dict(), tmp_path / "state.pt")
                histories = Histories()
                history(histories, rule, name="gone").record(torch.tensor(1.0))
                histories.load_state_dict(torch.load(tmp_path / "state.pt"))
                assert len(histories) == 1
            if step == stop + 2:
                histories = copy.deepcopy(histories)
            if step == stop + 4:
                histories = pickle.loads(pickle.dumps(histories))


def test_a_copy_goes_its_own_way() -> None:
    histories = Histories()
    history(histories, Delayed()).record(torch.tensor(7.0))
    duplicate = copy.deepcopy(histories)
    history(duplicate, Delayed()).record(torch.tensor(28.0))
    for each in (histories, duplicate):
        each.begin_step()
    assert [history(h, Delayed()).scale().item() for h in (histories, duplicate)] == [64.0, 16.0]


def test_what_is_first_called_under_inference_can_be_trained() -> None:
    histories = Histories()
    with torch.inference_mode():
        assert history(histories, Delayed()).scale().item() == 1
    history(histories, Delayed()).record(torch.tensor(7.0, requires_grad=True))
    histories.begin_step()
    scale = history(histories, Delayed()).scale()
    assert (scale.item(), scale.requires_grad) == (64.0, False)


def test_an_emulation_around_does_not_round_amaxes() -> None:
    histories = Histories()
    with fpsim.emulate("e2m1fn"):
        found = history(histories, Delayed())
        found.record(torch.tensor(7.0))
        histories.begin_step()
        scale = history(histories, Delayed()).scale()
    assert scale.item() == 64.0


# When a step begins


class Records(nn.Module):
    """A module that records its input as a product would."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.found: list[Listeners] = []

    def forward(self, x: Tensor) -> Tensor:
        scales = self.found[0].histories
        history(scales, Delayed(history=1)).record(x.detach().abs().max())
        return self.a(x)


def scale_of(model: nn.Module) -> float:
    return history(listeners(model)[0].histories, Delayed(history=1)).scale().item()


# The policy that asks for the history which a Records keeps; nothing else is rounded.
X_DELAYED = fpsim.Policy(
    products=fpsim.Products(
        fprop=(fpsim.BlockFormat("e4m3fn", "tensor", fpsim.as_format("fp32"), Delayed(history=1)), None)
    )
)


def quantised(fmt: FormatLike = "fp32") -> Records:
    model = fpsim.quantize(Records(), fmt)
    model.found.append(listeners(model)[0])
    return model


def test_a_step_begins_with_a_call_of_the_outermost_module_that_keeps_gradients() -> None:
    model = quantised()
    model(torch.full((2,), 7.0))
    assert scale_of(model) == 1.0
    with torch.no_grad():
        model(torch.full((2,), 1.0))
    assert scale_of(model) == 1.0
    model(torch.full((2,), 14.0))  # the inner module's call, inside of this one, begins no step
    assert scale_of(model) == 64.0
    model(torch.full((2,), 14.0))
    assert scale_of(model) == 32.0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_runs_again_begins_no_step(use_reentrant: bool) -> None:
    model = quantised()
    x = torch.full((2,), 7.0, requires_grad=True)
    model(x)
    y = checkpoint(model, 2 * x, use_reentrant=use_reentrant)
    before = scale_of(model)
    y.sum().backward()
    assert scale_of(model) == before
    model(x)
    assert scale_of(model) == 32.0


def test_the_state_of_a_model_is_no_part_of_its_state_dict() -> None:
    model = quantised(X_DELAYED)
    keys = [*model.state_dict()]
    for amax in (3.5, 7.0):
        model(torch.full((2,), amax))
    assert [*model.state_dict()] == keys
    state = fpsim.scaling_state(model)
    assert [*state] == ["a:linear fprop.x"]
    assert state["a:linear fprop.x"]["scale"] == 128.0
    duplicate = copy.deepcopy(model)
    fresh = quantised(X_DELAYED)
    fpsim.load_scaling_state(fresh, state)
    for each in (model, duplicate, fresh):
        each.found[:] = listeners(each)
        each(torch.full((2,), 1.0))
        assert scale_of(each) == 64.0
    fpsim.load_scaling_state(model, {})
    assert fpsim.scaling_state(model) == {}


def test_several_quantised_models_inside_of_one_keep_their_states_apart() -> None:
    whole = nn.ModuleDict({"a": quantised(X_DELAYED), "b": nn.Sequential(quantised(X_DELAYED))})
    for model, amax in ((whole["a"], 7.0), (whole["b"][0], 28.0)):
        for _ in range(2):
            model(torch.full((2,), amax))
    state = fpsim.scaling_state(whole)
    assert {name: entry["scale"].item() for name, entry in state.items()} == {
        "a.a:linear fprop.x": 64.0,
        "b.0.a:linear fprop.x": 16.0,
    }
    fpsim.load_scaling_state(whole, {})
    fpsim.load_scaling_state(whole, state)
    assert [scale_of(whole["a"]), scale_of(whole["b"][0])] == [64.0, 16.0]
    with pytest.raises(
        ValueError, match=r"The state names 'c\.a:linear fprop\.x'\. Expected: names that begin with a\., b\.0\."
    ):
        fpsim.load_scaling_state(whole, {"c.a:linear fprop.x": {}})


# Errors


def test_a_history_is_kept_for_one_rule_and_format() -> None:
    histories = Histories()
    history(histories, Delayed())
    for rule, largest in ((Delayed(margin=1), 448.0), (Delayed(), 6.0)):
        with pytest.raises(ValueError, match=r"history of a:linear fprop\.x was kept for Delayed.*448.*same policy"):
            history(histories, rule, largest)


def test_what_is_no_state_is_refused() -> None:
    histories = Histories()
    history(histories, Delayed(history=4))
    state = histories.state_dict()
    for change in ({"scale": 1.0}, {"rule": {"past": 3}}, {"largest": None}):
        with pytest.raises(ValueError, match=r"The state of 'a:linear fprop\.x' is not a state of delayed scaling"):
            histories.load_state_dict({"a:linear fprop.x": {**state["a:linear fprop.x"], **change}})
    with pytest.raises(ValueError, match=r"is not a state of delayed scaling"):
        histories.load_state_dict({"a:linear fprop.x": {}})
    with pytest.raises(ValueError, match=r"shapes \[\(3,\), \(\), \(\)\]\. Expected: 4 amaxes"):
        histories.load_state_dict({"x y": {**state["a:linear fprop.x"], "amaxes": torch.zeros(3)}})
    assert [*histories.state_dict()] == ["a:linear fprop.x"]  # what was there stays
    with pytest.raises(ValueError, match="is not quantised"):
        fpsim.scaling_state(nn.Linear(1, 1))


def test_transforms_and_tracers_are_refused() -> None:
    histories = Histories()

    def scaled(x: Tensor) -> Tensor:
        return x * history(histories, Delayed()).scale()

    with pytest.raises(NotImplementedError, match=r"Delayed scaling reached a:linear under .*scale_rule='amax'"):
        torch.func.vmap(scaled)(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"Delayed scaling reached a:linear under"):
        torch.func.grad(lambda x: scaled(x).sum())(torch.ones(3))


@pytest.mark.parametrize("has_stepped", [False, True], ids=["at once", "after a step"])
def test_a_model_with_delayed_scaling_is_not_transformed_or_exported(has_stepped: bool) -> None:
    model, x = fpsim.quantize(nn.Linear(6, 5), fpsim.recipe("fp8_delayed")), torch.ones(4, 6)
    if has_stepped:
        model(x).sum().backward()
    for call in (
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.grad(lambda t: model(t).sum())(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.export.export(model, (x,)),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.export, a transform of torch\.func.*Expected: "):
            call()


# Ranks


def as_rank(rank: int, store: str) -> list[float]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    histories, scales = Histories(), []
    for step in range(6):
        histories.begin_step()
        for i, rule in enumerate(RULES):
            found = history(histories, rule, 448.0, f"{i}:linear")
            scales.append(found.scale().item())
            if step + rank != 3:  # each rank leaves one step out
                found.record(torch.tensor(amax_of(rank, step, i)))
    history(histories, RULES[-1], 448.0, f"on rank {rank} alone")
    with pytest.raises(RuntimeError, match=r"have different histories: 7 and 7, 'on rank 0 alone fprop\.x' where the"):
        histories.begin_step()
    alone = Histories()
    groups = [dist.new_group([0]), dist.new_group([1])]
    alone.group = groups[rank]
    history(alone, Delayed()).record(torch.tensor(7.0 * 2**rank))
    alone.begin_step()
    dist.destroy_process_group()
    assert history(alone, Delayed()).scale().item() == 64.0 / 2**rank
    return scales


def amax_of(rank: int, step: int, i: int) -> float:
    return [1.0, 300.0, torch.inf, 0.0, 5.5, 1e-4][(step + i) % 6] * (1 + 3 * ((rank + step) % 2))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
def test_two_ranks_have_the_scales_of_the_larger_amax(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, rank, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in ("0", "1")
    ]
    try:
        found = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    expected, naive = [], [Naive(rule, 448.0) for rule in RULES]
    for step in range(6):
        for i, each in enumerate(naive):
            expected.append(float(each.scale))
            recorded = [amax_of(rank, step, i) for rank in (0, 1) if step + rank != 3]
            each.step(max(recorded, key=lambda a: math.inf if math.isnan(a) else a))
    assert found[0] == found[1] == expected


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(as_rank(int(sys.argv[1]), sys.argv[2])))


def test_no_step_begins_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fpsim.quantize(nn.Linear(4, 4), "e4m3fn per tensor delayed")
    model(torch.ones(2, 4)).sum().backward()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="while a CUDA graph was captured"):
        model(torch.ones(2, 4))


def test_a_history_is_kept_where_the_same_operand_has_the_same_rule() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 32))
    model = fpsim.quantize(net, fpsim.recipe("fp8_delayed", net))
    model(torch.ones(2, 32))
    (name, entry), *_ = listeners(model)[0].histories.state_dict().items()
    same = policies_of(model)
    assert keeps_history(name, entry, same)
    for other in ("mxfp8_e4m3", "fp16"):
        assert not keeps_history(name, entry, policies_of(fpsim.quantize(net, other)))
    assert not keeps_history(name, entry, {})
