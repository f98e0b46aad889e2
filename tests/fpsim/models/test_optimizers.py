"""`quantize_optimizer` around any optimizer: what is stored is rounded once, and nothing else changes.

The expected numbers are those of the plain optimizer, whose weights and states are rounded by hand after each step,
with torch's own casts or with fractions.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from fractions import Fraction

import oracle
import pytest
import tiers
import torch
from torch import Tensor, nn

import fpsim
from fpsim import Update, quantize_optimizer
from fpsim.models.storing import noise_key

SHAPES = [(7, 33), (1,), (130,), (0, 3), (), (3, 5, 2)]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def parameters(seed: int = 0, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, -0 and NaN too."""
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in params for _, x in sorted(optimizer.state[p].items()) if isinstance(x, Tensor)]
    return [p.detach() for p in params] + states


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_an_update_in_float32_changes_no_bit(make):
    plain, ours = parameters(), parameters()
    a, b = make(plain), make(ours)
    quantize_optimizer(b, Update(weight="fp32"))
    for step in range(5):
        give_gradients(plain, step), give_gradients(ours, step)
        a.step(), b.step()
    assert all(map(equal, tensors_of(a), tensors_of(b)))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_weights_and_states_are_rounded_once_after_a_float32_step(make):
    plain, ours = parameters(), parameters()
    a, b = make(plain), make(ours)
    quantize_optimizer(b, Update(weight="bf16", states="bf16"))
    for p in plain:
        p.data = bf16(p.data)
    for step in range(5):
        give_gradients(plain, step), give_gradients(ours, step)
        a.step(), b.step()
        for p in plain:
            p.data = bf16(p.data)
            for name, x in a.state[p].items():
                if name != "step":
                    x.copy_(bf16(x))
    assert all(map(equal, tensors_of(a), tensors_of(b)))


def test_a_state_that_is_named_has_its_own_format_and_others_stay_float32():
    plain, ours = parameters(), parameters()
    a, b = torch.optim.AdamW(plain), torch.optim.AdamW(ours)
    quantize_optimizer(b, Update(states={"exp_avg": "fp16"}))
    for step in range(3):
        give_gradients(plain, step), give_gradients(ours, step)
        a.step(), b.step()
        for p in plain:
            a.state[p]["exp_avg"].copy_(a.state[p]["exp_avg"].half().float())
    assert all(map(equal, tensors_of(a), tensors_of(b)))


def test_states_of_few_elements_stay_float32():
    ours = parameters(shapes=[(16,), (15,)])
    optimizer = torch.optim.SGD(ours, lr=1.0, momentum=0.9)
    quantize_optimizer(optimizer, Update(states="bf16", min_size=16))
    give_gradients(ours, 0)
    optimizer.step()
    first, second = (optimizer.state[p]["momentum_buffer"] for p in ours)
    assert equal(first, bf16(ours[0].grad))
    assert equal(second, ours[1].grad)


# Stochastic rounding


def test_random_bits_are_those_of_seed_step_parameter_and_element():
    ours = [nn.Parameter(torch.linspace(1, 2, 300)) for _ in range(2)]
    optimizer = torch.optim.SGD(ours, lr=1.0)
    quantize_optimizer(optimizer, Update(weight="bf16", rounding="stochastic"), seed=5)
    fmt = oracle.make(8, 7, 127)
    for step, (index, p) in itertools.product(range(2), enumerate(ours)):
        if index == 0:
            before = [x.detach().clone() for x in ours]
            for x in ours:
                x.grad = torch.full_like(x, 2.0**-11)
            optimizer.step()
        key = int(noise_key(5, step, index, "weight"))
        for element, (old, new) in enumerate(zip(before[index], p.detach(), strict=True)):
            exact = float(old) - 2.0**-11
            low, high, _, _ = oracle.between(fmt, exact)
            noise = oracle.noise_word(element, key % 2**64) >> 16
            share = Fraction(exact - low) / Fraction(high - low)
            wanted = high if share * 2**16 + noise >= 2**16 else low
            assert float(new) == wanted


def test_stochastic_rounding_is_unbiased():
    """An update of 1/16 of a spacing moves that share of the weights, within five standard deviations."""
    p = nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.SGD([p], lr=1.0)
    quantize_optimizer(optimizer, Update(weight="bf16", rounding="stochastic"))
    p.grad = torch.full_like(p, -(2.0**-11))  # the spacing above 1 is 2**-7
    optimizer.step()
    moved = int((p > 1).sum())
    assert abs(moved - 100_000 / 16) < 5 * math.sqrt(100_000 / 16 * 15 / 16)
    assert set(p.tolist()) == {1.0, 1 + 2.0**-7}


def test_two_seeds_two_steps_and_two_parameters_have_other_bits():
    keys = {int(noise_key(*words)) for words in itertools.product((0, 1), (0, 1), (0, 1), ("weight", "exp_avg"))}
    assert len(keys) == 16


# Blocks and their scales


def fp8(value: float) -> float:
    return oracle.round_to(oracle.make(4, 3, 7, "fn"), value, "nearest_even", "saturate")


def test_scales_that_are_powers_of_two_are_the_largest_under_which_nothing_saturates():
    p = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    quantize_optimizer(optimizer, Update(states={"momentum_buffer": "e4m3fn per tensor"}, scale="power_of_two"))
    for amax in (448.0, 448.0000305, 3.0, 1e-20, 7e10):
        optimizer.state.clear()
        p.grad = torch.linspace(-amax, amax, 1000)
        optimizer.step()
        power = next(k for k in range(200, -200, -1) if Fraction(float(p.grad.max())) * Fraction(2) ** k <= 448)
        wanted = [
            float(Fraction(fp8(float(Fraction(x) * Fraction(2) ** power))) / Fraction(2) ** power)
            for x in p.grad.tolist()
        ]
        assert optimizer.state[p]["momentum_buffer"].tolist() == wanted


@pytest.mark.parametrize("shape", [(1000,), (40, 25), (3, 512)], ids=str)
def test_blocks_run_through_the_memory_of_a_state_and_a_ragged_one_is_shorter(shape):
    p = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    quantize_optimizer(optimizer, Update(states="e4m3fn per 256 fp32", scale="amax_torchao"))
    give_gradients([p], 0)
    optimizer.step()
    for start in range(0, p.numel(), 256):
        block = p.grad.flatten()[start : start + 256]
        scale = block.abs().max() / 448
        wanted = [torch.tensor(fp8(float(x / scale))) * scale for x in block]
        assert equal(optimizer.state[p]["momentum_buffer"].flatten()[start : start + 256], torch.stack(wanted))


def test_rows_are_those_of_the_tensor():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    quantize_optimizer(optimizer, Update(weight="int8 per row fp32"))
    p.grad = -torch.tensor([[127.0, 1.4, 0.6], [12.7, 1.44, -0.06]])
    optimizer.step()
    # 12.7 / 127 is not 0.1 in float32, and neither is what comes back: within an ulp
    assert torch.allclose(p, torch.tensor([[127.0, 1.0, 1.0], [12.7, 1.4, -0.1]]), rtol=2**-22, atol=0)


# Copies that the model does not see


def test_the_optimizer_updates_the_master_copy_and_the_model_sees_it_rounded():
    plain, ours = parameters(), parameters()
    for p in plain:
        p.data = bf16(p.data)
    a, b = OPTIMIZERS["AdamW"](plain), OPTIMIZERS["AdamW"](ours)
    quantize_optimizer(b, Update(weight="bf16", master="fp32"))
    for step in range(5):
        give_gradients(plain, step), give_gradients(ours, step)
        a.step(), b.step()
        assert all(equal(bf16(x.detach()), y) for x, y in zip(plain, ours, strict=True))


@tiers.parametrize(
    ("update", "shape"),  # no two tests have tensors of one shape: a thread may keep an earlier test's for a while
    [
        (Update(weight="bf16", master="fp32"), (37, 53)),
        (Update(weight="bf16", compensation="kahan"), (37, 59)),
    ],
    ids=["master", "kahan"],
    keep=lambda update, _: update.master is not None,
)
def test_a_step_keeps_no_copy_of_a_weight_but_what_is_stored(update, shape):
    p = nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.SGD([p], lr=2.0**-10)
    quantize_optimizer(optimizer, update)
    p.grad = torch.ones_like(p)
    optimizer.step()
    gc.collect()
    kept = {x.data_ptr() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.shape == p.shape}
    assert len(kept) == 3  # the weight, its gradient, and the master copy or the compensation


def test_a_weight_that_is_written_to_begins_its_master_copy_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=2.0**-10)
    quantize_optimizer(optimizer, Update(weight="bf16", master="fp32"))
    p.grad = torch.ones(3)
    optimizer.step()
    with torch.no_grad():
        p.fill_(4.0)
    for _ in range(9):
        optimizer.step()
    assert p.tolist() == [4 - 2.0**-6] * 3  # 4 - 2**-7 is a tie, which the ninth step breaks


def test_kahan_keeps_what_rounding_took():
    """1 - 16 * 2**-11: each update is lost by itself, the sum is one spacing below 1."""
    p = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([p], lr=1.0)
    quantize_optimizer(optimizer, Update(weight="bf16", compensation="kahan"))
    seen = []
    for _ in range(16):
        p.grad = torch.full_like(p, 2.0**-11)
        optimizer.step()
        seen.append(float(p.detach()[0]))
    exact = [1 - (i + 1) * 2.0**-11 for i in range(16)]
    assert seen == [float(torch.tensor(x).bfloat16()) for x in exact]


@pytest.mark.parametrize("compensation", ["kahan", "pair"])
def test_weight_and_compensation_are_the_sum_within_an_ulp_of_the_compensation(compensation):
    p = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([p], lr=1.0)
    quantize_optimizer(optimizer, Update(weight="bf16", compensation=compensation))
    exact = torch.ones(1000, dtype=torch.float64)
    for step in range(50):
        give_gradients([p], step)
        p.grad *= 2.0**-12
        exact -= p.grad.double()
        optimizer.step()
    # the rest is below 2**-8 and rounded to 8 bits in each step: at most 2**-17 each, and float32's own 2**-24
    kept = next(iter(optimizer.state_dict()["state"][0].values()))
    assert float((exact - p.detach().double() - kept.double()).abs().max()) <= 50 * (2.0**-17 + 2.0**-24)
    # half a spacing of the weight, which is below 2, and what the compensation has lost
    assert float((exact - p.detach().double()).abs().max()) <= 2.0**-8 + 50 * (2.0**-17 + 2.0**-24)


def test_remainder16_is_float32_and_the_weight_rounds_ties_away():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    quantize_optimizer(optimizer, Update(weight="bf16", compensation="remainder16"))
    p.grad = torch.tensor([-(2.0**-8), 2.0**-20])  # a tie between 1 and 1 + 2**-7, and what bfloat16 never sees
    optimizer.step()
    assert p.tolist() == [1 + 2.0**-7, 1.0]
    assert optimizer.state_dict()["state"][0]["fpsim_master"].tolist() == [1 + 2.0**-8, 1 - 2.0**-20]


# Which steps, which parameters


@pytest.mark.parametrize(
    "update", [Update(weight="bf16"), Update(weight="bf16", master="fp16"), Update(weight="int8 per row fp32")], ids=str
)
def test_a_step_that_a_grad_scaler_skips_changes_nothing(update):
    for fused in (False, True):
        params = parameters(shapes=[(7, 33)])
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=fused)
        quantized = quantize_optimizer(optimizer, update)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            before = [x.clone() for x in tensors_of(optimizer)]
            scaler.scale((params[0] * torch.randn(7, 33)).sum() * (math.inf if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 1:
                assert all(map(equal, before, tensors_of(optimizer)))
        assert quantized.steps == 2


def test_a_parameter_without_a_gradient_stays_as_it_is():
    ours = parameters(shapes=[(9, 3), (9, 3)])
    optimizer = torch.optim.AdamW(ours, lr=0.1)
    quantize_optimizer(optimizer, Update(weight="int8 per row fp32", master="fp16 per tensor fp32"))
    before = ours[1].detach().clone()
    give_gradients(ours[:1], 0)
    optimizer.step()
    assert equal(ours[1], before)
    assert not optimizer.state[ours[1]]


def test_a_closure_sees_the_weights_as_they_are_stored():
    p = nn.Parameter(torch.tensor([1.3, -0.7, 2.9]))
    target = torch.tensor([0.11, 0.52, -1.7])
    optimizer = torch.optim.LBFGS([p], lr=0.3, max_iter=6)
    quantize_optimizer(optimizer, Update(weight="bf16"))
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(p.detach().clone())
        loss = ((p - target) ** 2).sum() + (p**4).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(seen) > 6
    assert all(equal(x, bf16(x)) for x in seen)
    assert equal(p, bf16(p.detach()))


@pytest.mark.parametrize(
    "update", [Update(weight="bf16", master="fp32"), Update(weight="bf16", compensation="pair")], ids=str
)
def test_a_closure_of_adam_sees_the_weight_and_the_step_is_that_without_one(update):
    results = []
    for has_closure in (False, True):
        ours = parameters()
        optimizer = torch.optim.AdamW(ours, lr=0.01)
        quantize_optimizer(optimizer, update)
        for step in range(3):
            give_gradients(ours, step)

            def closure(ours=ours) -> float:
                assert all(equal(p, bf16(p.detach())) for p in ours)
                return 1.0

            assert optimizer.step(*[closure] * has_closure) == (1.0 if has_closure else None)
        results.append([p.detach() for p in ours])
    assert all(map(equal, *results))


def test_tied_parameters_are_rounded_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantize_optimizer(optimizer, Update(weight="bf16", rounding="stochastic"), model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model[0].weight is model[1].weight
    assert equal(model[0].weight, bf16(model[0].weight.detach()))


def test_sparse_gradients_work_where_the_optimizer_takes_them():
    for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)):
        results = []
        for quantized in (False, True):
            torch.manual_seed(0)
            model = nn.Embedding(10, 4, sparse=True)
            model.weight.data = bf16(model.weight.data)
            optimizer = make(list(model.parameters()))
            if quantized:
                quantize_optimizer(optimizer, Update(weight="bf16"))
            for step in range(3):
                optimizer.zero_grad()
                model(torch.tensor([1, 1, 7 - step])).square().sum().backward()
                assert model.weight.grad.is_sparse
                optimizer.step()
                if not quantized:
                    model.weight.data = bf16(model.weight.data)
            results.append(model.weight.detach())
        assert equal(*results)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_go_where_the_float32_step_takes_them(bad):
    plain, ours = parameters(shapes=[(6,)]), parameters(shapes=[(6,)])
    a, b = torch.optim.AdamW(plain, lr=0.1), torch.optim.AdamW(ours, lr=0.1)
    quantize_optimizer(b, Update(weight="bf16", states="bf16"))
    plain[0].data = bf16(plain[0].data)
    for x in (plain[0], ours[0]):
        x.grad = torch.tensor([1.0, bad, 0.0, -2.0, 1e30, -0.0])
    a.step(), b.step()
    wanted = [bf16(x) if x.dim() else x for x in tensors_of(a)]
    for x, y in zip(wanted, tensors_of(b), strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_what_a_training_does_around_a_step_goes_on_working():
    """Accumulation, clipping, a schedule, a learning rate as a tensor, an average, groups that differ."""

    def train(by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        groups = [{"params": model[0].parameters(), "lr": torch.tensor(0.02)}, {"params": model[2].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.05), weight_decay=0.3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        average = torch.optim.swa_utils.AveragedModel(model)
        rounded = [*model[0].parameters()]
        if by_hand:
            for p in rounded:
                p.data = bf16(p.data)
        else:
            quantize_optimizer(optimizer, [Update(weight="bf16"), None])
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(3, 6)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if by_hand:
                for p in rounded:
                    p.data = bf16(p.data)
            schedule.step()
            average.update_parameters(model)
        return [x.detach() for x in (*model.parameters(), *average.parameters())]

    assert all(map(equal, train(True), train(False)))


def test_a_group_that_is_added_later_is_stored_in_the_same_formats():
    first, second = parameters(shapes=[(5,), (5,)])
    optimizer = torch.optim.SGD([first], lr=0.1)
    quantize_optimizer(optimizer, Update(weight="bf16"))
    optimizer.add_param_group({"params": [second]})
    give_gradients([first, second], 0)
    optimizer.step()
    assert equal(second, bf16(second.detach()))


def test_names_are_those_of_the_model_of_the_optimizer_or_of_the_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    update = Update(weight="bf16", overrides={"1": None})
    for optimizer, named in (
        (torch.optim.SGD(model.parameters(), lr=0.1), model),
        (torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()),
        (torch.optim.SGD(model.named_parameters(), lr=0.1), None),
    ):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1 + 2.0**-10)
        quantize_optimizer(optimizer, update, named)
        assert [float(p.detach().flatten()[0]) for p in model.parameters()] == [1.0, 1.0, 1 + 2.0**-10, 1 + 2.0**-10]
    with pytest.raises(ValueError, match=r"'1' matches no parameter.*model=model"):
        quantize_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), update)


def test_detach_leaves_a_plain_optimizer():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=2.0**-20)
    quantized = quantize_optimizer(optimizer, "bf16_sr")
    quantized.detach()
    quantized.detach()
    p.grad = torch.ones(2)
    optimizer.step()
    assert p.tolist() == [1 - 2.0**-20] * 2
    assert "fpsim_update" not in optimizer.state_dict()["param_groups"][0]
    quantize_optimizer(optimizer, "bf16_sr")


# What is refused


def test_an_optimizer_is_quantised_once():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    quantize_optimizer(optimizer, "bf16_sr")
    with pytest.raises(ValueError, match=r"This SGD is quantised already.*detach"):
        quantize_optimizer(optimizer, "bf16_sr")


def test_a_state_that_the_optimizer_does_not_have_is_an_error_after_the_first_step():
    ours = parameters()
    optimizer = torch.optim.SGD(ours, lr=0.1, momentum=0.9)
    quantize_optimizer(optimizer, Update(states={"exp_avg": "bf16"}))
    give_gradients(ours, 0)
    with pytest.raises(ValueError, match=r"the state 'exp_avg', which SGD does not have\. Its states: momentum_buffer"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_other_dtypes_are_refused_unless_they_are_left_out(dtype):
    model = nn.Linear(2, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"The parameter weight is .*model\.float\(\)"):
        quantize_optimizer(optimizer, "bf16_sr", model)
    quantize_optimizer(optimizer, Update(weight="bf16", overrides={"weight": None, "bias": None}), model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sgd", "bf16_sr"), TypeError, "optimizer is 'sgd'"),
        ((None, 3), TypeError, "update is 3"),
        ((None, ["bf16_sr"] * 2), ValueError, "update has 2 entries, and the optimizer has 1"),
        ((None, "bf16_sr", 3), TypeError, "model is 3"),
        ((None, "bf16_sr", [3]), TypeError, r"model is \[3\]"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        quantize_optimizer(optimizer if arguments[0] is None else arguments[0], *arguments[1:])


def test_the_handle_is_neither_copied_nor_pickled_and_a_copy_of_the_optimizer_is_plain():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=2.0**-20)
    quantized = quantize_optimizer(optimizer, "bf16_sr")
    with pytest.raises(TypeError, match="belongs to its optimizer"):
        copy.copy(quantized)
    other = copy.deepcopy(optimizer)
    q = other.param_groups[0]["params"][0]
    q.grad = torch.ones(2)
    other.step()
    assert q.tolist() == [1 - 2.0**-20] * 2
    assert fpsim.QuantizedOptimizer is type(quantized)


# Who else runs steps


def test_a_compiled_step_stores_the_same():
    results = []
    for compiled in (False, True):
        ours = parameters(shapes=[(7, 33)])
        optimizer = torch.optim.SGD(ours, lr=torch.tensor(0.1), momentum=0.9)
        quantize_optimizer(optimizer, Update(weight="bf16", rounding="stochastic", states="bf16"))
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for i in range(3):
            give_gradients(ours, i)
            step()
        results.append(tensors_of(optimizer))
    assert all(map(equal, *results))
    torch.compiler.reset()


def test_the_optimizer_that_accelerate_wraps_is_quantised():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = nn.Linear(3, 3)
    accelerator = accelerate.Accelerator(cpu=True)
    model, wrapped = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-12))
    quantize_optimizer(wrapped, Update(weight="bf16"), model)
    before = [p.detach().clone() for p in model.parameters()]
    accelerator.backward(model(torch.ones(1, 3)).sum() * 2.0**-6)
    wrapped.step()
    assert all(map(equal, before, model.parameters()))
    assert all(equal(p, bf16(p.detach())) for p in model.parameters())


class Breaking(torch.optim.SGD):
    """Steps the first of its groups, then raises."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("schedule", ["none", "before", "after"])
@pytest.mark.parametrize("name", ["te_fp16_master", "bf16_remainder", "bf16_kahan float32", "bf16_sr", "bf16_collage"])
def test_after_a_step_that_raises_weights_are_as_they_are_stored(name, schedule):
    """A step that was not stored is undone where there is a copy, and rounded where the weight is the only one."""
    updates = {
        "bf16_kahan float32": Update(weight="bf16", compensation="kahan"),
        "bf16_collage": Update(weight="bf16", compensation="pair"),
    }
    a, b = (torch.nn.Parameter(torch.tensor(x)) for x in ([1.0, 3.0], [2.0, 5.0]))
    optimizer = Breaking([{"params": [a]}, {"params": [b]}], lr=2.0**-12)
    if schedule == "before":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    quantized = quantize_optimizer(optimizer, updates.get(name, name if name in fpsim.UPDATES else None))
    if schedule == "after":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    a.grad, b.grad = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        assert torch.equal(a.detach(), torch.tensor([1.0, 3.0]))  # 2**-12 is below half a spacing, too
        assert torch.equal(b.detach(), torch.tensor([2.0, 5.0]))
    assert quantized.steps == 0
    quantized.detach()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert torch.equal(a.detach(), torch.tensor([1.0, 3.0]) - 2.0**-12)


def test_gradients_come_back_after_a_step_that_raises():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("w", p)], lr=0.5)
    quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="format"))

    def closure():
        p.grad = torch.ones(2)
        raise KeyError("stop")

    p.grad = torch.full((2,), 3.0)
    with pytest.raises(KeyError, match="stop"):
        optimizer.step(closure)
    assert torch.equal(p.grad, torch.ones(2))
    assert torch.equal(p.detach(), torch.ones(2))


def test_a_step_keeps_no_gradient():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("w", p)], lr=0.5)
    quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="format"))
    p.grad = torch.ones(2)
    optimizer.step()
    gradient = weakref.ref(p.grad)
    p.grad = None
    assert gradient() is None


def test_a_detached_optimizer_has_its_own_step_again():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    quantize_optimizer(optimizer, "bf16").detach()
    assert "step" not in vars(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    own = optimizer.step
    quantize_optimizer(optimizer, "bf16").detach()
    assert optimizer.step is own


def test_a_step_does_not_keep_its_optimizer_and_says_so():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    quantize_optimizer(optimizer, "bf16")
    step = optimizer.step
    del optimizer
    with pytest.raises(ReferenceError, match="Keep the optimizer itself"):
        step()


class Inherits(torch.optim.SGD):
    """torch calls the hooks around both: this step, and the one that it inherits."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    "update",
    [
        Update(weight="bf16", compensation="kahan"),
        Update(weight="bf16", master="fp32"),
        Update(weight="bf16", rounding="stochastic"),
        Update(weight="bf16", arithmetic="format"),
    ],
    ids=str,
)
def test_a_step_that_calls_the_one_it_inherits_is_one_step(update):
    weights = []
    for kind in (torch.optim.SGD, Inherits):
        params = parameters()
        optimizer = kind(params, lr=0.05, momentum=0.9)
        quantized = quantize_optimizer(optimizer, update, seed=0)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        assert quantized.steps == 3
        weights.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
