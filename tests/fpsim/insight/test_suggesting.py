"""A policy that watch suggests was tried on the watched step: what it breaks there stays in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import tiers
import torch
from torch import Tensor, nn

import fpsim
from fpsim.insight.suggesting import Called, _again

X = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    """A forward as a function of the module and what comes in, over named children."""

    def __init__(self, function: Callable[..., Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def layers(n: int, **ends: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))


def watched(model: nn.Module, formats: list[str], x: Tensor = X, **options: object) -> fpsim.Watch:
    with fpsim.watch(model, formats, every=1, **options) as watching:
        model(x).square().mean().backward()
    return watching


def breaks(model: nn.Module, policy: fpsim.Policy, x: Tensor = X) -> dict | None:
    """What another tool finds in a step under the policy."""
    quantised = fpsim.quantize(model, policy)
    return fpsim.diagnose(quantised, lambda: quantised(x).square().mean().backward()).cause


def norm(_: nn.Module, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()


def test_an_eps_that_the_format_loses_under_a_division_is_found_by_the_trial() -> None:
    model, x = nn.Sequential(*layers(4), Of(norm), *layers(4)), X.clone()
    for layer in (*model[:4], *model[5:]):
        nn.init.zeros_(layer.bias)
    x[5] = 0.0  # one row in 128: 0.8 % of the numbers are lost
    watching = watched(model, ["fp16"], x)
    row = next(row for row in watching.rows() if row["site"] == "4:add" and row["role"] == "activation")
    assert 0 < row["underflow"] <= 0.01  # by the statistics fp16 would do
    found = watching.suggest()
    assert found.is_tried
    assert found.policy.overrides["4"].activation is None
    assert found.policy.activation is not None
    assert breaks(model, found.policy, x) is None
    assert "tried on step 1 (2 times" in str(watching)


def test_operations_of_the_model_itself_stay_wide_where_they_break() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (self.body(x) * 1e4).sum() * 1e-4

    model = Of(forward, body=layers(30))
    with torch.no_grad():
        for layer in model.body:
            nn.init.orthogonal_(layer.weight)
            layer.bias.fill_(0.02)
    watching = watched(model, ["fp16"])
    overflow = [r["site"] for r in watching.rows() if r["role"] == "activation" and r["overflow"]]
    assert overflow == [":sum"]  # one site of 33
    policy = watching.policy()
    assert str(policy.overrides["body"].activation) == "fp16"
    assert breaks(model, policy) is None
    assert f"fp16 would overflow from step 1 on, first at {overflow[0]}." in str(watching)


def test_an_operand_that_saturates_where_it_is_read_is_found_by_the_trial() -> None:
    model = nn.Sequential(*layers(10), nn.Linear(8, 8), nn.Linear(8, 8), *layers(10))
    with torch.no_grad():
        for layer in model:
            nn.init.orthogonal_(layer.weight)
        model[10].weight *= 400  # its results are beyond 448, and the next layer reads them
        model[11].weight /= 400
    watching = watched(model, ["e4m3fn"])
    found = watching.suggest()
    assert breaks(model, found.policy) is None
    assert found.is_tried
    assert found.policy.overrides["11"].activation is None


def test_updates_that_would_change_nothing_are_counted_against_the_parameters() -> None:
    model = layers(3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    with fpsim.watch(model, ["bf16", "fp32"], every=1, optimizer=optimizer) as watching:
        model(X).square().mean().backward()
        optimizer.step()
    rows = {r["site"]: r for r in watching.rows() if (r["role"], r["format"]) == ("update", "bf16")}
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        wanted = p.detach() != old
        lost = (p.detach().bfloat16() == old.bfloat16()) & wanted
        assert rows[name]["lost"] == pytest.approx(int(lost.sum()) / int(wanted.sum()))
    table = {r["format"]: r for r in watching.table() if r["role"] == "update"}
    assert table["bf16"]["do"] == 0
    assert table["fp32"]["do"] == table["fp32"]["sites"] == 6


def test_where_numbers_are_not_finite_no_format_does_and_the_text_says_so() -> None:
    model, x = layers(3), X.clone()
    x[3, 3] = torch.nan
    watching = watched(model, ["fp16"], x)
    table = {r["role"]: r for r in watching.table()}
    assert table["activation"]["do"] == 0
    assert table["activation"]["nonfinite"] > 0
    with pytest.warns(UserWarning, match="not tried: step 1 breaks in float32 too"):
        watching.policy()
    text = str(watching)
    assert "Step 1 is not finite without any format, at 0:linear (activation): fpsim.why" in text


def test_a_gradient_that_a_scaler_skips_once_does_not_decide() -> None:
    model = layers(2)
    with fpsim.watch(model, ["bf16"], every=1) as watching:
        for scale in (torch.inf, 1.0):
            (model(X).square().mean() * scale).backward()
    rows = {r["role"]: r for r in watching.table()}
    assert rows["error"]["do"] == rows["error"]["sites"]


@pytest.mark.parametrize("fill", [-1e9, -1e4, -torch.inf])
def test_a_mask_is_no_number_that_overflows(fill: float) -> None:
    def attend(_: nn.Module, x: Tensor) -> Tensor:
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        return ((x @ x.mT) / 8).masked_fill(~seen, fill).softmax(-1) @ x

    watching = watched(nn.Sequential(nn.Linear(8, 8), Of(attend)), ["e4m3fn"])
    rows = [r for r in watching.rows() if r["site"] == "1:masked_fill" and r["role"] == "activation"]
    assert [(r["overflow"], r["nonfinite"]) for r in rows] == [(0.0, 0.0)]


SEEN = torch.ones(128, 128, dtype=torch.bool).tril()
SHUT = torch.full((200, 200), -torch.inf).triu(1)
WHOLE = SHUT[:128, :128].clone()
ADDED: dict[str, Callable[[], Tensor]] = {
    "from outside": lambda: WHOLE,
    "a part of it": lambda: SHUT[:128, :128],
    "made": lambda: torch.full((128, 128), -torch.inf).triu(1),
    "filled": lambda: torch.zeros(128, 128).masked_fill(~SEEN, -torch.inf),
    "chosen": lambda: torch.where(SEEN, 0.0, -torch.inf),
    "of two": lambda: torch.full((128, 128), -torch.inf).triu(1) + torch.zeros(128).masked_fill(~SEEN[2], -1e4),
    "broadcast": lambda: torch.full((128, 128), -torch.inf).triu(1)[None],
    "large": lambda: torch.full((128, 128), -1e9).triu(1),
}


@tiers.parametrize("name", ADDED, keep=["from outside", "a part of it", "made"])
def test_a_mask_that_is_added_is_no_number_either(name: str) -> None:
    def attend(_: nn.Module, x: Tensor) -> Tensor:
        return ((x @ x.mT) / 8 + ADDED[name]()).softmax(-1).flatten(0, -2) @ x

    watching = watched(nn.Sequential(nn.Linear(8, 8), Of(attend)), ["bf16"])
    sums = [r for r in watching.rows() if r["site"].startswith("1:add") and r["role"] == "activation"]
    assert {(r["overflow"], r["nonfinite"]) for r in sums} == {(0.0, 0.0)}
    assert "not finite" not in str(watching)
    policy = watching.policy()
    assert str(policy.activation) == "bf16"
    assert not policy.overrides


def test_what_is_not_finite_and_left_out_is_not_said_to_break_the_step() -> None:
    """The mean of nothing behind a `where`, and the same without it."""

    def mean(self: nn.Module, x: Tensor) -> Tensor:
        sums, count = x[:4], torch.tensor([1.0, 0.0, 2.0, 0.0])[:, None]
        means = sums * 0 / count
        return torch.where(count > 0, means, 0.0) if self.leaves_out else means  # type: ignore[no-any-return]

    for leaves_out in (True, False):
        model = nn.Sequential(nn.Linear(8, 8), Of(mean))
        model[1].leaves_out = leaves_out
        text = str(watched(model, ["bf16"]))
        assert ("Step 1 is not finite without any format, at 1:div (activation)" in text) is not leaves_out


def test_the_bias_of_a_key_whose_gradients_are_noise_asks_for_nothing() -> None:
    def attend(self: nn.Module, x: Tensor) -> Tensor:
        return ((self.query(x) @ self.key(x).mT) / 8).softmax(-1) @ x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Of(attend, query=nn.Linear(8, 8), key=nn.Linear(8, 8)))
    watching = watched(model, ["fp16"])
    amax = {r["site"]: r["amax"] for r in watching.rows() if r["role"] == "weight_grad"}
    assert amax["1.key.bias"] < 1e-6 * amax["1.key.weight"]
    formats = {name: inner.weight_grad for name, inner in watching.policy().overrides.items()}
    assert str(formats["1.key"]) == str(formats["1.query"]) == "fp16"


def test_what_could_not_be_tried_is_said_with_the_reason() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("once only")
            return self.inner(x)

    watching = watched(Counting(), ["fp16"])
    found = watching.suggest()
    assert not found.is_tried
    assert found.words == "not tried: RuntimeError: once only"
    with pytest.warns(UserWarning, match="once only"):
        watching.policy()


def test_a_model_that_gives_a_mapping_and_one_in_bfloat16_are_tried() -> None:
    class Mapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
            return {"out": self.inner(x) * scale}

    model = Mapping().bfloat16()
    with fpsim.watch(model, ["e5m2"], every=1) as watching:
        model(X.bfloat16(), scale=2.0)["out"].float().square().mean().backward()
    assert watching.suggest().is_tried
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watching.policy()


class Named(nn.Module):
    """A product of what it is given by name, in a mapping; where it is told so, beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gives_two = nn.Linear(2, 2), True

    def forward(self, *, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        out = self.inner(batch["x"])
        return (out, out * 2) if self.gives_two else (out,)


def test_a_call_runs_again_in_float32_also_where_it_gives_fewer_tensors_then() -> None:
    model = Named()
    gradients = {0: torch.ones(1, 2), 1: torch.ones(1, 2)}
    step = _again(model, Called(0, (), {"batch": {"x": torch.ones(1, 2).half()}}, gradients))
    step()
    assert model.inner.bias.grad.tolist() == [3.0, 3.0]  # 1 of the first, 2 of the second
    model.zero_grad()
    model.gives_two = False
    step()
    assert model.inner.bias.grad.tolist() == [1.0, 1.0]
