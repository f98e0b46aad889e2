"""What each module costs in the small formats, recomputed with torch's casts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim
from fpsim.insight.pictures import plot_costs
from fpsim.insight.sensitivity import Sensitivity, _find_pair

X = torch.linspace(-1, 1, 48).reshape(8, 6)


def three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 2, bias=False))


def loss(model: nn.Module) -> Tensor:
    return model(X).square().sum()


def by_hand(model: nn.Sequential, inside: set[int]) -> float:
    """The loss with these layers in bfloat16, operands and results."""
    x = X
    for i, layer in enumerate(model):
        if i in inside:
            x = F.linear(x.bfloat16().float(), layer.weight.detach().bfloat16().float()).bfloat16().float()
        else:
            x = F.linear(x, layer.weight.detach())
    return float(x.square().sum())


def test_each_module_alone_in_and_alone_out_has_the_loss_of_torchs_casts() -> None:
    model = three()
    found = fpsim.sensitivity(model, loss, "bf16")
    assert found.float32 == pytest.approx(by_hand(model, set()), rel=1e-6)
    assert found.quantised == pytest.approx(by_hand(model, {0, 1, 2}), rel=1e-6)
    assert {row["module"] for row in found} == {"0", "1", "2"}
    for row in found:
        i = int(row["module"])
        assert row["loss_alone"] == pytest.approx(by_hand(model, {i}), rel=1e-6)
        assert row["loss_without"] == pytest.approx(by_hand(model, {0, 1, 2} - {i}), rel=1e-6)
        assert row["alone"] == row["loss_alone"] - found.float32
        assert row["without"] == found.quantised - row["loss_without"]
        assert row["cost"] == max(row["alone"], row["without"])
    costs = [row["cost"] for row in found]
    assert costs == sorted(costs, reverse=True)


def test_the_layer_that_breaks_is_first_and_the_policy_keeps_it_wide() -> None:
    model = three()
    with torch.no_grad():
        model[1].weight *= 1e6
    found = fpsim.sensitivity(model, loss, fpsim.Policy("fp16", "fp16", "fp16", "fp16", overrides={"2": "bf16"}))
    assert found[0]["module"] == "1"
    assert found[0]["alone"] == math.inf
    policy = found.policy(1)
    assert dict(policy.overrides) == {"2": "bf16", "1": None}
    assert math.isfinite(loss(fpsim.quantize(model, policy)).item())
    assert found.policy(0) == fpsim.Policy("fp16", "fp16", "fp16", "fp16", overrides={"2": "bf16"})
    assert "loss" in str(found)
    with pytest.raises(ValueError, match="k=4"):
        found.policy(4)


def test_the_model_stays_and_dropout_is_the_same_in_each_run() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    found = fpsim.sensitivity(model, loss, None)
    assert [row["cost"] for row in found] == [0.0, 0.0]
    assert found.float32 == found.quantised
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def drawn(figure: object) -> dict[str, list[tuple[float, float]]]:
    """The places of the markers, by the words of the legend."""
    lines = figure.axes[0].lines  # type: ignore[attr-defined]
    return {line.get_label(): [*map(tuple, line.get_xydata())] for line in lines if line.get_label()[0] != "_"}


def test_the_picture_shows_what_each_module_adds_the_worst_at_the_top() -> None:
    model = three()
    found = fpsim.sensitivity(model, loss, "bf16")
    figure = found.plot()
    axes, marks = figure.axes[0], drawn(figure)
    assert [text.get_text() for text in axes.get_yticklabels()] == [row["module"] for row in found]
    assert axes.yaxis_inverted()
    for i, row in enumerate(found):
        assert marks["alone in the formats"][i] == pytest.approx((row["alone"], i - 0.12))
        assert marks["beside all others"][i] == pytest.approx((row["without"], i + 0.12))
    assert {x for x, _ in marks["all modules together"]} == {found.quantised - found.float32}
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_what_is_not_finite_stands_at_the_edges_of_the_picture() -> None:
    rows = [
        {"module": "a", "alone": math.inf, "without": 0.5},
        {"module": "b$", "alone": 1.0, "without": -math.inf},
    ]
    figure = plot_costs(rows, math.inf)
    left, right = figure.axes[0].get_xlim()
    marks = drawn(figure)
    assert marks["alone in the formats"] == [(1.0, 0.88)]
    assert marks["alone in the formats: inf"] == [(right, -0.12)]
    assert marks["beside all others: -inf"] == [(left, 1.12)]
    assert "all modules together" not in marks
    assert left <= 0.0 < 1.0 <= right
    figure.draw_without_rendering()


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no module inside"):
        fpsim.sensitivity(nn.Linear(2, 2), lambda m: m(torch.ones(1, 2)).sum(), "fp16")


def test_a_loss_that_is_not_finite_in_float32_ranks_nothing() -> None:
    with pytest.raises(ValueError, match="loss of Sequential is nan in float32"):
        fpsim.sensitivity(nn.Sequential(nn.Linear(2, 2)), lambda m: m(torch.ones(1, 2)).sum() * math.nan, "fp16")


class Attention(nn.Module):
    """The product of queries and keys is the module's own operation."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.query(x) @ self.key(x).mT / 1e3).softmax(-1) @ x)


def growing(n: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *(Attention() for _ in range(n)), nn.Linear(6, 2))
    with torch.no_grad():
        for block in model[1:-1]:
            block.query.weight *= 2e3
            block.key.weight *= 2e3
    return model


def test_a_containers_own_operations_have_a_row_and_the_policy_leaves_its_children_in_the_format() -> None:
    model = growing(1)
    found = fpsim.sensitivity(model, loss, "fp16")
    assert not math.isfinite(found.quantised)
    first = found[0]
    assert (first["module"], first["type"], first["own"]) == ("1", "Attention", True)
    assert (first["alone"], first["without"]) == (math.inf, math.inf)
    policies = found.policy(1).for_modules(model)
    assert policies["1"].activation is None
    assert str(policies["1.query"].activation) == str(policies["2"].activation) == "fp16"
    assert math.isfinite(loss(fpsim.quantize(model, found.policy(1))).item())
    others = {row["module"]: row["without"] for row in found[1:]}
    assert all(math.isnan(x) for x in others.values())  # NaN minus NaN: no other repairs it
    assert "fpsim.why(model, step) names the operation" in str(found)


def test_where_no_module_repairs_the_loss_alone_a_pair_that_does_is_found() -> None:
    model = growing(2)
    found = fpsim.sensitivity(model, loss, "fp16")
    assert not any(math.isfinite(row["loss_without"]) for row in found)
    assert set(found.pair or ()) == {"1", "2"}
    assert {row["module"] for row in found[:2]} == {"1", "2"}
    assert math.isfinite(loss(fpsim.quantize(model, found.policy(2))).item())
    assert "No module repairs it alone; " in str(found)


@pytest.mark.parametrize(("modules", "tried"), [(12, 66), (13, 66)])
def test_of_pairs_that_may_repair_a_loss_those_of_twelve_modules_are_tried(modules: int, tried: int) -> None:
    """66 = 12 * 11 / 2; 13 modules have 78 pairs."""
    policies: list[fpsim.Policy] = []
    ranking = Sensitivity(fpsim.Policy(weight="fp16"))
    ranking.extend({"module": str(i)} for i in range(modules))

    class Broken:
        def under(self, policy: fpsim.Policy) -> float:
            policies.append(policy)
            return math.inf

    _find_pair(ranking, Broken())  # type: ignore[arg-type]
    assert len({str(policy) for policy in policies}) == len(policies) == tried
    assert ranking.pair is None


def test_a_module_without_parameters_that_breaks_is_found() -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() * 1e-6

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Exp(), nn.Linear(6, 2))
    nn.init.constant_(model[0].bias, 14.0)
    found = fpsim.sensitivity(model, loss, "fp16")
    assert [row["module"] for row in found if math.isfinite(row["loss_without"])] == ["1"]


def rising(*bare: nn.Module) -> nn.Sequential:
    """In e3m1, up to 12 and infinite from 14 on, the weight 1.2 is 1: in float32 its layer gives 14.4, not 12."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), *bare, nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.2)
        model[-2].weight.copy_(torch.tensor([[0.6], [0.6]]))
        model[-1].weight.copy_(torch.tensor([[1.0, -1.0]]))
    return model


@pytest.mark.parametrize("bare", [(nn.ReLU(),), (nn.ReLU(), nn.Hardtanh(-100, 100)), ()], ids=["relu", "two", "none"])
def test_no_policy_breaks_what_is_finite_with_all_modules_in_the_format(bare: tuple[nn.Module, ...]) -> None:
    """What stays in float32 is larger than what the format made of it, and its reader has no such number."""
    model = rising(*bare)
    x = torch.full((1, 1), 12.0)

    def total(model: nn.Module) -> Tensor:
        return model(x).square().sum()

    assert math.isfinite(total(fpsim.quantize(model, "e3m1")).item())
    first = fpsim.Policy("e3m1", "e3m1", "e3m1", "e3m1", overrides={"0": None})
    assert not math.isfinite(total(fpsim.quantize(model, first)).item())
    found = fpsim.sensitivity(model, total, "e3m1")
    assert len(found) == 3
    for k in range(4):
        policy = found.policy(k)
        assert math.isfinite(total(fpsim.quantize(model, policy)).item())
        own = policy.for_modules(model)
        assert sum(own[row["module"]].weight is None for row in found) == k


def test_a_step_runs_the_model_itself_and_leaves_it_as_it_was() -> None:
    model = three()
    model[0].weight.grad = torch.ones(6, 6)

    def step() -> Tensor:
        total = loss(model)
        total.backward()
        return total

    old, found = fpsim.sensitivity(model, loss, "bf16"), fpsim.sensitivity(model, step, "bf16")
    assert list(found) == list(old)
    assert model[0].weight.grad.equal(torch.ones(6, 6))
    assert model[1].weight.grad is None
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="is not quantised"):
        fpsim.summary(model)


def test_the_seed_is_0_unless_it_is_given() -> None:
    policy = fpsim.Policy(weight="e4m3fn", rounding="stochastic")
    default, zero, one = (fpsim.sensitivity(three(), loss, policy, **seed) for seed in ({}, {"seed": 0}, {"seed": 1}))
    assert list(default) == list(zero)
    assert default.quantised != one.quantised
