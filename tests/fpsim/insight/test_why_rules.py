"""One rule of `why` in each test: which of two kinds it is, what is left alone, which remedy is tried."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import tiers
import torch
from planted_cases import step_named
from planted_steps import Of, around, linear, plant, seeded
from planted_sums import average_step, copied
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import fpsim


def test_a_row_is_masked_wholly_in_the_dimension_that_softmax_sums_over() -> None:
    def pool(self: nn.Module, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(8) == 3, -torch.inf).softmax(0)  # a column, and no row

    found = why_of(around(pool))
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("1:softmax", "row masked wholly")
    assert [remedy["remedy"] for remedy in found.tried] == ["mask"]


def why_of(model: nn.Module, fmt: str = "float32") -> fpsim.Why:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    return plant(model, fmt, x, lambda y: y.float().square().mean()).why()


@pytest.mark.parametrize("fmt", ["float32", "fp16"])
def test_a_nan_that_a_rectifier_lets_not_back_is_no_overflow_of_what_it_reads(fmt: str) -> None:
    """The gradient behind it is 0 * inf where it is shut, and numbers are so many that their sum might overflow."""

    def guarded(self: nn.Module, x: Tensor) -> Tensor:
        d = (x.sigmoid() - 0.4).relu()
        return x + torch.where(d > 0, 2 / d, torch.zeros_like(d)).clamp(max=40) * 0.01

    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    found = plant(around(guarded), fmt, x, lambda y: y.float().square().mean()).why()
    assert found.cause is None, str(found)


@pytest.mark.parametrize(("at", "kind"), [(1.0, "outside of its domain"), (0.0, "logarithm of zero")])
def test_logit_has_two_borders(at: float, kind: str) -> None:
    found = why_of(around(lambda self, x: (x * 0 + at).logit()))
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("1:logit", kind)


def test_log1p_of_zeros_and_a_minus_one_is_a_logarithm_of_zero() -> None:
    found = why_of(around(lambda self, x: (-(x > 0).to(x.dtype) * x.sign().detach() + 0 * x).log1p()))
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("1:log1p", "logarithm of zero")


def test_an_operation_in_place_read_what_was_there_before() -> None:
    found = why_of(around(lambda self, x: (x * 0 + 12.5).exp_().reciprocal() + x), "half")
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("1:exp_", "overflow")
    assert found.read[0] == {"what": "1:add", "range": "12.5"}


def test_remedies_of_a_lost_eps_and_of_a_logarithm_are_found() -> None:
    """The eps was compared with tensors, which raised; log1p was clamped to 1e-12, which is 0 to it."""
    assert [remedy["remedy"] for remedy in step_named("a_similarity_to_nothing")().why().tried][:1] == ["eps"]
    found = why_of(around(lambda self, x: x + x.clamp(min=-1).log1p()))
    assert "inside its domain" in found.tried[0]["what"]


def test_a_cast_to_float32_of_what_is_float32_loses_nothing() -> None:
    found = step_named("a_bilinear_pooling_under_autocast")().why()
    assert found.tried[0]["sites"] == ["pool:einsum"]


def test_float32_that_overflows_where_it_is_read_is_no_remedy() -> None:
    """The loss was 0 with the count in float32, for the division read it in half."""
    found = step_named("a_count_of_many_tokens")().why()
    assert found.tried[0]["sites"] == [":sum_1", ":div"]
    assert found.tried[0]["loss"] == pytest.approx(found.float32, rel=1e-3)


def test_a_norm_of_zero_is_no_count() -> None:
    assert "count" not in str(step_named("a_spectral_norm_of_zeros")().why())


def test_a_parameter_that_is_not_read_hides_nothing_that_breaks() -> None:
    planted = step_named("a_head_that_nobody_has_filled")()
    planted.model.body.weight.data.fill_(3e4)  # type: ignore[union-attr, operator]
    found = planted.why()
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("body:linear", "overflow")
    assert "heads.1.weight holds numbers that are not finite" in "\n".join(found.checked)


def test_a_parameter_that_is_read_where_nobody_looks_is_named() -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    nn.init.constant_(model.weight, torch.nan)

    def step() -> Tensor:
        return torch.func.vmap(model)(x).sum() + model.bias.sum() * 0

    found = fpsim.why(model, step)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("weight", "NaN came in")


def test_singular_vectors_are_told_of_equal_singular_values() -> None:
    def turn(self: nn.Module, x: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(torch.eye(8) + 0 * x.mean(), full_matrices=False)
        return x @ (u * s) @ v

    found = why_of(around(turn))
    assert found.cause is not None
    assert (found.cause["role"], found.cause["kind"]) == ("error", "infinite slope")
    assert "two singular values are equal" in str(found)


def test_a_gradient_times_an_infinity_is_no_overflow() -> None:
    def hide(self: nn.Module, x: Tensor) -> Tensor:
        shut = torch.full((8,), torch.inf)
        return x + torch.where(torch.arange(8) > 8, x * shut, 0.0)

    found = why_of(around(hide))
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("1:mul", "zero times infinity")


def test_an_input_that_breaks_a_buffer_is_not_left_out() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.seen(x)
            return self.head(x.nan_to_num())

    model, x = Watched(), torch.ones(3, 4)
    x[1, 2] = torch.nan
    found = fpsim.why(model, lambda: model(x).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("x", "NaN came in")


def test_a_slope_that_broke_the_first_of_two_gradients_is_named() -> None:
    """The second backward pass is finite, the loop steps over what is not, and forgets it."""
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for x in (torch.zeros(3, 4), torch.ones(3, 4)):
            model(x).square().sum(-1).sqrt().mean().backward()
        if bool(model.weight.grad.isfinite().all()):  # type: ignore[union-attr]
            optimizer.step()
        optimizer.zero_grad()

    found = fpsim.why(model, step)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == (":sqrt", "infinite slope")


class Own(torch.optim.Optimizer):
    """SGD of one's own, which keeps nothing, and may round stochastically to bfloat16."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, is_stochastic: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "is_stochastic": is_stochastic})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                new = p.float() - group["lr"] * p.grad.float()
                if group["is_stochastic"] and p.dtype is torch.bfloat16:
                    bits = new.view(torch.int32) + torch.randint(0, 2**16, new.shape, dtype=torch.int32)
                    new = (bits & -(2**16)).view(torch.float32)
                p.copy_(new)


def updated(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> fpsim.Why:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).float().sum()
        loss.backward()
        optimizer.step()
        return loss

    return fpsim.why(model, step)


def one_row(x: Tensor) -> nn.Module:
    model = nn.Linear(x.shape[-1], 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    return model


def test_a_few_large_updates_do_not_hide_that_the_others_are_lost() -> None:
    x = torch.full((1, 100), 0.01).bfloat16()
    x[:, :4] = 100.0
    model = one_row(x)
    found = updated(model, x, Own(model.parameters(), 1e-3))
    assert found.cause is not None
    assert found.cause["kind"] == "update lost"


@pytest.mark.parametrize("seed", range(4))
def test_stochastic_rounding_of_ones_own_loses_no_update(seed: int) -> None:
    torch.manual_seed(seed)
    x = (torch.rand(1, 50) ** 4).bfloat16()
    model = one_row(x)
    found = updated(model, x, Own(model.parameters(), 3e-5, is_stochastic=True))
    assert found.cause is None, str(found)


@pytest.mark.parametrize("is_stochastic", [False, True])
def test_random_numbers_are_put_back_where_an_optimizer_is_tried(is_stochastic: bool) -> None:
    x = torch.full((1, 50), 0.5).bfloat16()
    model = one_row(x)
    before = torch.get_rng_state()
    updated(model, x, Own(model.parameters(), 3e-5, is_stochastic))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_of_ones_own_may_hold_integers() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("codes", nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    assert updated(model, torch.ones(4, 3), Own(model.parameters(), 0.1)).cause is None


OUTSIDE = torch.full((8,), 300.0).half()
SCALES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a constant": lambda self, x: x * 1.0 * 300.0 * 300.0,
    "a tensor from outside": lambda self, x: x * OUTSIDE * OUTSIDE,
    "a small divisor": lambda self, x: x / 3e-3 / 3e-3,
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_gradient_that_is_multiplied_beyond_the_format_overflows(
    scale: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Though each number that was read is small, as with a loss scale of one's own."""
    model = around(scale)
    for p in model[0].parameters():  # type: ignore[index]
        p.data.mul_(3e-6)
    model.half()
    x = torch.ones(2, 8).half()
    found = fpsim.why(model, lambda: (4 * model(x)).sum().backward())
    assert found.cause is not None
    assert (found.cause["role"], found.cause["kind"]) == ("error", "overflow")
    assert [remedy["remedy"] for remedy in found.tried][:1] == ["scale"]


def test_a_variance_of_many_numbers_is_told_of_by_what_broke_it() -> None:
    spread = why_of(around(lambda self, x: x / (300 * x.sign()).var(0)), "half")
    assert spread.cause is not None
    assert (spread.cause["place"], spread.cause["kind"]) == ("1:var", "overflow")
    masked = why_of(around(lambda self, x: x / x.masked_fill(torch.arange(8) == 3, -torch.inf).var(1, keepdim=True)))
    assert masked.cause is not None
    assert (masked.cause["place"], masked.cause["kind"]) == ("1:var", "infinity minus infinity")


@pytest.mark.parametrize("other", [0.5, -0.5])
def test_minus_infinity_that_reaches_the_loss_is_no_slope(other: float) -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    y = torch.tensor([-torch.inf, other])
    found = fpsim.why(model, lambda: (model(x) - y).square().mean().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("operand 2 of :sub", "-inf came in")


def test_a_number_of_python_that_a_parameter_gave_is_traced_to_it() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    gain = nn.Parameter(torch.tensor(torch.nan))
    model.register_parameter("gain", gain)
    found = fpsim.why(model, lambda: (model(x) * gain.item()).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("gain", "NaN came in")


def test_random_numbers_that_differ_between_samples_are_looked_past() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)

    def step() -> None:
        noisy = torch.func.vmap(lambda row: model(row) + torch.randn(2), randomness="different")
        noisy(x).sum().backward()

    assert fpsim.why(model, step).cause is None


def test_float32_whose_overflow_is_only_moved_is_no_remedy_below_zero_either() -> None:
    model, x = nn.Linear(3, 2).half(), torch.ones(4, 3).half()
    found = fpsim.why(model, lambda: (model(x).sum() / torch.full((70000,), -1.0).half().sum()).backward())
    assert [remedy["sites"] for remedy in found.tried][:1] == [[":sum_1", ":div"]]


def test_a_share_of_the_target_that_is_masked_is_a_logarithm_of_zero() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    scores = lambda: model(x).masked_fill(torch.arange(2) == 0, -torch.inf)
    found = fpsim.why(model, lambda: F.cross_entropy(scores(), torch.full((4, 2), 0.5)).backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == (":cross_entropy", "logarithm of zero")


def test_minus_infinity_that_a_softmax_masks_is_not_blamed_for_an_update() -> None:
    model, x, bias = nn.Linear(3, 3), torch.ones(4, 3), torch.tensor([1.0, 2.0, -torch.inf])
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), 6e4)

    def step() -> None:
        optimizer.zero_grad()
        (4 * (model(x.half()) + bias.half()).softmax(-1)[:, 0].sum()).backward()
        optimizer.step()

    found = fpsim.why(model, step)
    assert found.cause is not None
    assert (found.cause["role"], found.cause["kind"]) == ("update", "overflow")


def test_a_metric_that_a_step_returns_is_told_of_by_what_came_in() -> None:
    model, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.tensor([1.0, torch.nan])

    def step() -> Tensor:
        model(x).sum().backward()
        return y.mean()

    found = fpsim.why(model, step)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("operand 1 of :mean", "NaN came in")


def test_singular_matrices_are_counted_without_those_of_a_negative_determinant() -> None:
    turned = torch.stack([torch.zeros(8, 8), torch.eye(8).flip(1)[[1, 0, *range(2, 8)]]])
    found = why_of(around(lambda self, x: (turned + 0 * x.mean()).logdet()[:, None] + 0 * x[:2]))
    assert "The determinant of 1 of 2 matrices is 0: it is singular." in str(found)


def test_positions_that_a_mask_of_multihead_attention_lets_see_nobody_are_named() -> None:
    model, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.ones(2, 3, 4)
    nobody = torch.ones(3, 3, dtype=torch.bool).triu()
    found = fpsim.why(model, lambda: model(x, x, x, attn_mask=nobody)[0].sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == (":multi_head_attention_forward", "row masked wholly")
    assert [remedy["remedy"] for remedy in found.tried] == ["mask"]


def test_hooks_of_all_optimizers_are_called_for_the_steps_of_the_model_only() -> None:
    x, stepped = torch.full((1, 50), 0.5).bfloat16(), []
    model = one_row(x)
    optimizer = Own(model.parameters(), 3e-5)
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: stepped.append(optimizer))
    try:
        updated(model, x, optimizer)
    finally:
        hook.remove()
    assert stepped
    assert all(seen is optimizer for seen in stepped)


@pytest.mark.parametrize(("bias", "factor", "words"), [(6.0, 1.0, ", above its"), (0.0, 1e-9, ": below its")])
def test_a_lost_gradient_is_below_the_least_number_only_where_it_is(bias: float, factor: float, words: str) -> None:
    """Where tanh is 1 in half its slope is 0, however large the gradient: 1 / cosh(6)^2 is 2.5e-5."""
    model, x = nn.Linear(4, 4).half(), torch.full((2, 4), 0.01).half()
    nn.init.constant_(model.bias, bias)
    found = fpsim.why(model, lambda: (model(x).tanh().float() * factor).sum().backward())
    assert found.cause is not None
    assert found.cause["kind"] == "gradient lost"
    assert f"{words} least number 5.96e-08" in found.cause["why"], found.cause["why"]


def test_gradients_that_are_lost_in_bfloat16_have_no_scale_that_float32_holds() -> None:
    """Its least number lies among float32's subnormals: a block of it has no room for a scale."""
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.bias, 5.0)  # of which tanh is 1 in bf16
    model, x = fpsim.quantize(nn.Sequential(layer, nn.Tanh()), "bf16"), torch.full((2, 4), 0.01)
    found = fpsim.why(model, lambda: model(x).sum().backward())
    assert found.cause is not None
    assert (found.cause["kind"], found.cause["format"]) == ("gradient lost", "bf16")
    assert not [remedy for remedy in found.tried if remedy["remedy"] == "format"]


# What a `where` leaves out: NaN that reaches no loss and no gradient of a parameter

SEGMENTS = torch.tensor([0, 0, 2, 2, 2, 0, 2, 0])
SAFE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where": lambda s, n: torch.where(n > 0, s / n, torch.zeros_like(s)),
    "integers": lambda s, n: torch.where(n > 0, s / n.long(), torch.zeros_like(s)),
    "masked_fill": lambda s, n: (s / n).masked_fill(n == 0, 0.0),
    "nan_to_num": lambda s, n: (s / n).nan_to_num(),
    "a root": lambda s, n: torch.where(n > 0, s / n.sqrt(), torch.zeros_like(s)),
    "a reciprocal": lambda s, n: torch.where(n > 0, s * n.reciprocal(), torch.zeros_like(s)),
    "a power": lambda s, n: torch.where(n > 0, s * n**-0.5, torch.zeros_like(s)),
    "in place": lambda s, n: torch.where(n > 0, (s * 1).div_(n), torch.zeros_like(s)),
}


def of_segments(
    mean: Callable[[Tensor, Tensor], Tensor], fmt: str, enters: bool
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A mean over segments, one of which is empty. enters: whether the sum of that one is of parameters too."""
    torch.manual_seed(0)
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(fmt, torch.float32)
    x, n = torch.randn(8, 4).to(dtype), torch.tensor([4.0, 0.0, 4.0]).to(dtype)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        sums = torch.zeros(3, dtype=dtype).index_add(0, SEGMENTS, self.body(x)[:, 0])  # type: ignore[operator]
        return mean(sums + self.body.bias if enters else sums, n)  # type: ignore[union-attr, operator]

    plain = Of(forward, body=nn.Linear(4, 1)).to(dtype)
    model = fpsim.quantize(plain, fmt) if fmt in ("fp16", "bf16") else plain

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).float().square().sum()
        loss.backward()
        return loss

    return model, step


@tiers.parametrize("fmt", ["float32", "half", "bfloat16", "fp16", "bf16"], keep=["float32", "half"])
@tiers.parametrize("name", SAFE, keep=["where", "integers", "in place"])
def test_a_mean_of_nothing_that_is_left_out_is_not_named(name: str, fmt: str) -> None:
    model, step = of_segments(SAFE[name], fmt, enters=False)
    assert step().isfinite()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    found = fpsim.why(model, step)
    assert found.cause is None, str(found)


@tiers.parametrize("name", [name for name in SAFE if name != "nan_to_num"], keep=["where", "masked_fill"])
def test_a_mean_of_nothing_whose_gradient_reaches_a_parameter_is_named(name: str) -> None:
    """0 * (1 / 0) is NaN, whatever the `where` takes."""
    model, step = of_segments(SAFE[name], "float32", enters=True)
    assert step().isfinite()
    assert not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    found = fpsim.why(model, step)
    assert found.cause is not None
    assert found.cause["kind"] in ("division by zero", "zero times infinity"), str(found)
    assert "overflow" not in str(found)


# Which format is at fault, and by how much it may be wrong


def attended(fmt: object) -> fpsim.Why:
    """Values of which the largest has no weight: a scale for the tensor leaves little of the others."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        values = self.values(x)  # type: ignore[operator]
        weights = torch.cat([x[:, :1] * 0, x[:, :4] * 0 + 0.25], 1)
        return weights @ torch.cat([values[:1] * 0 + 3e5, values])

    model = fpsim.quantize(nn.Sequential(linear(8, 8), Of(forward, values=linear(8, 8))), fmt)
    x = seeded(4, 8)
    return fpsim.why(model, lambda: model(x).square().mean().backward())


def test_the_format_that_is_named_is_the_one_at_fault_and_not_that_of_the_result() -> None:
    scaled = "e4m3fn per tensor fp32"
    found = attended(fpsim.Policy("bf16", "bf16", products=fpsim.Products.all(scaled, attention=True)))
    assert found.cause is not None
    assert found.cause["place"] == "1:matmul"
    assert found.cause["format"] == scaled
    assert f", in {scaled}." in str(found).splitlines()[0]
    assert attended(fpsim.Policy("bf16", "bf16")).cause is None


# Casts


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": Tensor.float,
    "to a dtype": lambda x: x.to(torch.float32),
    "to a device and a dtype": lambda x: x.to("cpu", torch.float32),
    "to what another has": lambda x: x.to(torch.zeros(1)),
    "type": lambda x: x.type(torch.float32),
    "twice": lambda x: x.float().float(),
    "after one that does nothing": lambda x: x.half().float(),
    "by a dtype that was read": lambda x: x.float().softmax(-1).to(x.dtype).float(),
}


@tiers.parametrize("name", CASTS, keep=["float", "after one that does nothing", "by a dtype that was read"])
def test_casts_are_compared_with_the_same_casts_in_float32(name: str) -> None:
    """The first cast of this step does nothing where all is float32, and the second would be taken for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).half()
    x, y, cast = torch.randn(16, 8).half(), torch.randn(16, 4).half(), CASTS[name]

    def step() -> Tensor:
        model.zero_grad()
        loss = (cast(model(x)) - cast(y)).square().mean()
        loss.backward()
        return loss

    found = fpsim.why(model, step)
    assert found.cause is None, str(found)
    wide = copy.deepcopy(model).float()
    errors = [
        (a.float() - b).norm() / b.norm() for a, b in zip(layers_of(model, x), layers_of(wide, x.float()), strict=True)
    ]
    said = re.search(r"largest relative error of a result is ([0-9.e-]+)\.", found.checked[-1])
    assert said is not None
    # no less than a layer's, and no more than what a difference and a square of such numbers make of it
    assert 0.99 * float(max(errors)) <= float(said[1]) <= 16 * float(max(errors))


def layers_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    results = []
    for layer in model.children():
        results.append(x := layer(x).detach())
    return results


@pytest.mark.parametrize(("role", "steps"), [("parameter", False), ("parameter", True), ("buffer", True)])
@pytest.mark.parametrize("fmt", [None, "half", "bfloat16"])
def test_a_number_that_a_cast_made_infinite_is_not_blamed_on_an_update(role: str, steps: bool, fmt: str | None) -> None:
    model = Of(lambda self, x: self.body(x) * self.gain, body=nn.Linear(2, 2))
    gain = torch.full((2,), 3.4e38)  # beyond the end of either
    if role == "parameter":
        model.register_parameter("gain", nn.Parameter(gain))
    else:
        model.register_buffer("gain", gain)
    gain[0] = torch.inf if fmt is None else gain[0]
    model = model if fmt is None else getattr(model, fmt)()
    x = torch.ones(1, 2, dtype=next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if steps else None
    found = fpsim.why(model, lambda: model(x).float().sum().backward(), optimizer)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("gain", "inf came in")
    first, line = str(found).splitlines()[0], str(found).splitlines()[2]
    if fmt is None:
        assert "oad an earlier checkpoint" in line
        assert "cast" not in line
    else:
        largest = torch.finfo(getattr(torch, {"half": "float16"}.get(fmt, fmt))).max
        assert f"A cast such as .{fmt}() turns numbers beyond {largest:.6g} into inf" in line
        assert ("checkpoint" in line) is (role == "parameter" and steps)  # no update writes to a buffer
        assert first.endswith(f"in {str(next(model.parameters()).dtype).removeprefix('torch.')}.")


@pytest.mark.parametrize(
    ("function", "place", "kind", "number"),
    [
        (lambda x: x * 0.0 * torch.inf, "1:mul_1", "zero times infinity", "inf"),
        (lambda x: x - torch.inf, "1:sub", "infinity", "inf"),
        (lambda x: x * torch.nan, "1:mul", "NaN", "nan"),
    ],
)
def test_a_number_of_python_that_is_not_finite_is_told_of(
    function: Callable[[Tensor], Tensor], place: str, kind: str, number: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Of(lambda self, x: function(x)))
    found = fpsim.why(model, lambda: model(torch.ones(3, 2)).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == (place, kind)
    assert f"{number} is among the arguments of the call" in found.cause["why"]


def test_an_input_of_a_part_that_a_step_calls_has_a_name() -> None:
    model = nn.ModuleDict({"g": nn.Sequential(nn.Linear(2, 2)), "d": nn.Linear(2, 1)})
    x = torch.tensor([[1.0, torch.nan]])
    found = fpsim.why(model, lambda: model["d"](model["g"](x)).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("g.input", "NaN came in")


# A quantised optimizer: what is lost is lost in the format that it stores


def stored(update: object, rate: float, kind: Any = torch.optim.SGD) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=rate)
    model.quantized = fpsim.quantize_optimizer(optimizer, update, model)  # type: ignore[assignment, arg-type]
    x = seeded(16, 8)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, step


@tiers.parametrize(
    ("update", "kind", "rate", "fmt"),
    [
        ("bf16", torch.optim.AdamW, 1e-6, "bf16"),
        (fpsim.Update(weight="bf16"), torch.optim.SGD, 1e-5, "bf16"),
        (fpsim.Update(weight="e4m3fn"), torch.optim.Adam, 1e-6, "e4m3fn"),
        (fpsim.Update(weight="fp16"), torch.optim.RMSprop, 1e-7, "fp16"),
        (fpsim.Update(weight="bf16", master="fp16"), torch.optim.AdamW, 1e-6, "fp16"),
    ],
    keep=lambda update, kind, rate, fmt: kind is not torch.optim.RMSprop,
)
def test_updates_that_a_quantised_optimizer_loses_are_told_of_in_its_format(
    update: Any, kind: Any, rate: float, fmt: str
) -> None:
    model, step = stored(update, rate, kind)
    found = fpsim.why(model, step)
    assert found.cause is not None, str(found)
    assert (found.cause["kind"], found.cause["format"]) == ("update lost", fmt)
    assert f"is below half an ulp in {fmt}." in found.cause["why"]
    assert "float32 master parameters" in str(found)
    assert "float64" not in str(found)
    before = [p.detach().clone() for p in model.parameters()]
    step()
    moved = sum(int((p != b).sum()) for p, b in zip(model.parameters(), before, strict=True))
    made = found.cause["of"] - found.cause["count"]
    assert moved == made or (moved < made and update.master is not None)  # a model sees its weights in fewer bits yet


@tiers.parametrize(
    ("update", "rate"),
    [
        ("bf16_sr", 1e-4),
        ("bf16_sr", 1e-6),
        (fpsim.Update(weight="e4m3fn", rounding="stochastic"), 1e-3),
        ("bf16_kahan", 1e-4),
        ("bf16_collage", 1e-4),
        ("bf16_remainder", 1e-6),
        (fpsim.Update(weight="bf16", master="fp32"), 1e-6),
        ("bf16", 0.1),
        ("adam8bit", 1e-4),
        (None, 1e-4),
    ],
    keep=lambda update, rate: update in ("bf16_sr", "bf16_kahan", "adam8bit"),
)
def test_a_quantised_optimizer_that_keeps_its_updates_is_no_alarm(update: Any, rate: float) -> None:
    """Stochastic rounding loses single updates on purpose, and is right on average."""
    model, step = stored(update, rate, torch.optim.AdamW)
    found = fpsim.why(model, step)
    assert found.cause is None, str(found)


@pytest.mark.parametrize(("size", "is_named"), [(0.2, True), (2.0, False)])
def test_a_first_layer_is_named_where_its_format_does_not_hold_its_weights(size: float, is_named: bool) -> None:
    """Weights of 0.2 are between the numbers 0 and 0.5 of e2m1fn; in its range it is wrong by a sixth of any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Tanh(), nn.Linear(32, 4))
    nn.init.normal_(model[0].weight, 0.0, size)  # type: ignore[arg-type]
    x, target = torch.randn(64, 64) * 0.1 / size, torch.arange(64) % 4
    wide = fpsim.Policy("bf16", "bf16", "bf16", "bf16")
    policy = replace(wide, overrides={"0": replace(wide, weight="e2m1fn")})
    quantised = fpsim.quantize(model, policy)
    found = fpsim.why(quantised, lambda: F.cross_entropy(quantised(x), target).backward())
    assert (found.cause is not None) is is_named, str(found)
    if found.cause is not None:
        assert (found.cause["place"], found.cause["format"]) == ("0:linear", "e2m1fn")
        assert found.cause["kind"] == "error grows"


@pytest.mark.parametrize(("terms", "is_named"), [(8, False), (10, True)])
def test_a_sum_is_named_from_eight_half_ulps_on(terms: int, is_named: bool) -> None:
    """Half an ulp of bfloat16 is 1 from 256 on: 0.8984375 is lost, eight times (7.2 half ulps) and ten times (9)."""
    model = nn.Linear(1, 1).bfloat16()
    term = torch.tensor(0.8984375, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        total = model(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * 0 + 256
        for _ in range(terms):
            total = total + term
        total.backward()
        return total

    found = fpsim.why(model, step)
    assert (found.cause is not None) is is_named
    if found.cause is not None:
        assert (found.cause["place"], found.cause["kind"]) == (f":add_{terms}", "swamping")
        assert f"is 256 in bfloat16, and {256 + terms * 0.8984375:.6g} if" in found.cause["why"]
        assert found.tried[0]["loss"] == pytest.approx(256 + terms * 0.8984375, rel=2**-9)  # one rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_average_that_is_named_stays_as_many_numbers_as_it_says(dtype: torch.dtype) -> None:
    """In float32 the same step moves them all."""
    moved = {}
    for fmt in ({torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype], "float32"):
        planted = average_step(copied, fmt, 2e-4, "buffer", 0.25)
        average: torch.Tensor = planted.model.average  # type: ignore[assignment]
        before, found = average.clone(), planted.why()
        planted.step()
        moved[average.dtype] = int((average != before).sum())
        assert (found.cause["count"] if found.cause is not None else 0) == (64 if fmt != "float32" else 0)
    assert moved == {dtype: 0, torch.float32: 64}
