"""Steps in a small format. The oracle is torch's own bfloat16 on the CPU: its optimizers, and its operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from processors import NEEDS_VECTORS
from torch import Tensor, nn

from fpsim import Update, quantize_optimizer

SHAPES = [(7, 33), (1,), (130,), (0, 3), (), (3, 5, 2)]
WHOLE = [(8, 33, 4), (32,), (4096,), (0, 3)]  # multiples of 32, see test_a_sum_of_torch_rounds_twice_behind_its_vectors
ADAMS = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True, "betas": (0.5, 0.9)},
    "maximize": {"maximize": True, "eps": 1e-3},
    "lr tensor": {"lr": torch.tensor(0.03)},
}
SGDS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.87, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "momentum": 0.5},
}


def has_sum(kind, options):
    """Whether a step adds with alpha."""
    return kind is torch.optim.SGD or (kind is torch.optim.Adam and "weight_decay" in options)


CASES = [
    *((torch.optim.AdamW, name, {"lr": 0.013, **options}) for name, options in ADAMS.items()),
    *((torch.optim.Adam, name, {"lr": 0.013, **options}) for name, options in ADAMS.items()),
    *((torch.optim.SGD, name, {"lr": 0.13, **options}) for name, options in SGDS.items()),
]
PARAMETERS = [
    pytest.param(*case, id=f"{case[0].__name__} {case[1]}", marks=[NEEDS_VECTORS] if has_sum(case[0], case[2]) else [])
    for case in CASES
]


def pairs(seed: int = 0, shapes: list[tuple[int, ...]] = SHAPES) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters in torch's bfloat16 and in float32."""
    generator = torch.Generator().manual_seed(seed)
    native = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
    return native, [nn.Parameter(p.detach().float()) for p in native]


def give_gradients(native: list[nn.Parameter], ours: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p, q in zip(native, ours, strict=True):
        q.grad = torch.randn(q.shape, generator=generator) * 10.0 ** (seed % 3 - 1)
        p.grad = q.grad.bfloat16()


def equal(native: Tensor, ours: Tensor) -> bool:
    return torch.equal(native.detach().float(), ours.detach())


@pytest.mark.parametrize(("kind", "name", "options"), PARAMETERS)
def test_the_arithmetic_of_torch_equals_its_own_bfloat16(kind, name, options):
    native, ours = pairs(shapes=WHOLE if has_sum(kind, options) else SHAPES)
    a, b = kind(native, foreach=False, **options), kind(ours, **options)
    quantize_optimizer(b, "bf16")
    for step in range(7):
        give_gradients(native, ours, step)
        a.step(), b.step()
        for p, q in zip(native, ours, strict=True):
            assert equal(p, q)
            assert a.state[p].keys() == b.state[q].keys()
            assert all(equal(a.state[p][key], b.state[q][key]) for key in a.state[p])


@NEEDS_VECTORS
def test_a_sum_of_torch_rounds_twice_behind_its_vectors():
    """Why SGD is compared in sizes of whole vectors: `add` with alpha depends on where in a tensor a number is."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(33, 1000, generator=generator).bfloat16().T.contiguous() for _ in range(2))
    alpha = float(torch.tensor(0.13).bfloat16())
    found = torch.stack([x.add(y, alpha=alpha) for x, y in zip(a, b, strict=True)])
    once = (a.float() + alpha * b.float()).bfloat16()
    twice = (a.float() + (alpha * b.float()).bfloat16().float()).bfloat16()
    assert torch.equal(found[:, :32], once[:, :32])
    assert torch.equal(found[:, 32:], twice[:, 32:])
    assert not torch.equal(once[:, 32:], twice[:, 32:])


def coefficients(step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> dict[str, float]:
    """All that AdamW computes in Python, each rounded to bfloat16."""
    found = {
        "step_size": lr / (1 - beta1**step),
        "root": (1 - beta2**step) ** 0.5,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "eps": eps,
        "decay": 1 - lr * decay,
        "lr_decay": lr * decay,
    }
    return {name: float(torch.tensor(value, dtype=torch.bfloat16)) for name, value in found.items()}


def adamw_by_hand(p: Tensor, g: Tensor, m: Tensor, v: Tensor, c: dict[str, float]) -> None:
    """AdamW in torch's bfloat16 operations, whose scalars were cast before."""
    p.mul_(c["decay"])
    m.lerp_(g, c["one_minus_beta1"])
    v.mul_(c["beta2"]).addcmul_(g, g, value=c["one_minus_beta2"])
    p.addcdiv_(m, (v.sqrt() / c["root"]).add_(c["eps"]), value=-c["step_size"])


@pytest.mark.parametrize("seed", range(3))
def test_the_arithmetic_of_a_format_rounds_the_scalars_too(seed):
    native, ours = pairs(seed)
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in native]
    optimizer = torch.optim.AdamW(ours, lr=0.013, weight_decay=0.3)
    quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="format"))
    for step in range(1, 8):
        give_gradients(native, ours, step)
        optimizer.step()
        c = coefficients(step, 0.013, 0.9, 0.999, 1e-8, 0.3)
        for p, (m, v), q in zip(native, states, ours, strict=True):
            adamw_by_hand(p.detach(), p.grad, m, v, c)
            assert equal(p, q)
            assert equal(m, optimizer.state[q]["exp_avg"])
            assert equal(v, optimizer.state[q]["exp_avg_sq"])


def test_in_bfloat16_the_second_moment_of_a_beta_of_0_999_never_decays():
    """Collage, arXiv 2405.03637: 0.999 is 1 in bfloat16. In float32 it is lost all the same: half a spacing is more."""
    for arithmetic in ("format", "torch"):
        p = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([p], lr=0.0)
        quantize_optimizer(optimizer, Update(weight="bf16", arithmetic=arithmetic))
        p.grad = torch.full((1,), 8.0)
        optimizer.step()
        before = optimizer.state[p]["exp_avg_sq"].clone()
        p.grad = torch.zeros(1)
        for _ in range(1000):
            optimizer.step()
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], before)
        assert float(before) == float(torch.tensor(64 * 0.001).bfloat16())


def kahan_by_hand(p: Tensor, k: Tensor, m: Tensor, denominator: Tensor, value: float) -> None:
    """Kahan's sum as torch-optimi and AnyPrecisionAdamW write it."""
    k.addcdiv_(m, denominator, value=value)
    old = p.clone()
    p.add_(k)
    k.add_(old.sub_(p))


def grow_by_hand(p: Tensor, rest: Tensor, u: Tensor) -> None:
    """Collage's Grow_Exp_ (amazon-science/collage, monitor_metrics.py)."""
    whole = p + u
    rest.add_(u - (whole - p))
    p.copy_(whole + rest)
    rest.sub_(p - whole)


@pytest.mark.parametrize(
    ("compensation", "decay"), [*itertools.product(["kahan", "pair"], ["inside", "before_uncompensated"])]
)
@pytest.mark.parametrize("arithmetic", ["torch", "format"])
def test_compensations_equal_torchs_bfloat16_operation_by_operation(compensation, decay, arithmetic):
    native, ours = pairs()
    states = [[torch.zeros_like(p) for _ in range(3)] for p in native]
    optimizer = torch.optim.AdamW(ours, lr=0.013, weight_decay=0.3)
    quantize_optimizer(optimizer, Update("bf16", compensation=compensation, arithmetic=arithmetic, decay=decay))
    for step in range(1, 8):
        give_gradients(native, ours, step)
        optimizer.step()
        c = coefficients(step, 0.013, 0.9, 0.999, 1e-8, 0.3)
        if arithmetic == "torch":  # what torch does with Python's numbers is its own matter here
            exact = {"step_size": 0.013 / (1 - 0.9**step), "root": (1 - 0.999**step) ** 0.5, "one_minus_beta1": 1 - 0.9}
            c = exact | {"beta2": 0.999, "one_minus_beta2": 1 - 0.999, "eps": 1e-8}
            c |= {"decay": 1 - 0.013 * 0.3, "lr_decay": 0.013 * 0.3}
        for p, (m, v, k), q in zip(native, states, ours, strict=True):
            p, g = p.detach(), p.grad
            m.lerp_(g, c["one_minus_beta1"])
            v.mul_(c["beta2"]).addcmul_(g, g, value=c["one_minus_beta2"])
            denominator = (v.sqrt() / c["root"]).add_(c["eps"])
            u = -c["step_size"] * m / denominator
            if decay == "inside":
                u = u - c["lr_decay"] * p
            else:
                p.mul_(c["decay"])
            if compensation == "pair":
                grow_by_hand(p, k, u)
            elif decay == "inside":
                kahan_of_update(p, k, u)
            else:
                kahan_by_hand(p, k, m, denominator, -c["step_size"])
            assert equal(p, q)
            kept = optimizer.state_dict()["state"][
                ours.index(q) if False else next(i for i, x in enumerate(ours) if x is q)
            ]
            assert equal(k, kept["fpsim_second" if compensation == "pair" else "fpsim_compensation"])


def kahan_of_update(p: Tensor, k: Tensor, u: Tensor) -> None:
    k.add_(u)
    old = p.clone()
    p.add_(k)
    k.add_(old.sub_(p))


def test_fp8_is_rounded_operation_by_operation():
    """One SGD step in e4m3fn by hand: 1 - 0.1 * 0.3 = 0.97, where 0.1 and 0.3 are 0.1015625 and 0.3125."""
    p = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=0.5)
    quantize_optimizer(optimizer, Update(weight="e4m3fn", arithmetic="format"))
    p.grad = torch.tensor([0.3, 2.0])
    optimizer.step()
    # 0.3125 + 0.5 = 0.8125 and 1 - 0.0825 = 0.9175 to 0.9375; 2.5 and 1 - 0.2539 = 0.7461 to 0.75
    assert p.tolist() == [0.9375, 0.75]
    assert p.grad.tolist() == [torch.tensor(0.3).item(), 2.0]


def test_a_closure_is_evaluated_once_and_the_gradients_come_back():
    native, ours = pairs()
    a, b = torch.optim.AdamW(native, lr=0.01, foreach=False), torch.optim.AdamW(ours, lr=0.01)
    quantize_optimizer(b, "bf16")
    for step in range(3):
        calls = []

        def closure(step=step, calls=calls) -> float:
            calls.append(1)
            give_gradients(native, ours, step)
            return 2.5

        assert b.step(closure) == 2.5
        assert calls == [1]
        assert all(q.grad is not None for q in ours)
        a.step()
        assert all(equal(p, q) for p, q in zip(native, ours, strict=True))


def test_parameters_that_are_left_out_have_torchs_own_step():
    _, ours = pairs()
    twin = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer, plain = torch.optim.AdamW(ours, lr=0.01), torch.optim.AdamW(twin, lr=0.01)
    update = Update(weight="bf16", arithmetic="format", overrides={"odd": None})
    quantize_optimizer(optimizer, update, [(f"{'odd' if i % 2 else 'even'}.{i}", p) for i, p in enumerate(ours)])
    for p, q in zip(ours, twin, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optimizer.step(), plain.step()
    assert all(torch.equal(p, q) for p, q in zip(ours[1::2], twin[1::2], strict=True))
    assert not torch.equal(ours[0], twin[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p, capturable=True), r"RMSprop\(capturable=True\).*Use capturable=False"),
        (lambda p: torch.optim.AdamW(p, fused=True), r"AdamW\(fused=True\).*Use fused=False"),
    ],
)
def test_other_steps_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        quantize_optimizer(make(pairs()[1]), "bf16")


def test_sparse_gradients_are_refused_and_change_nothing():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantize_optimizer(optimizer, "bf16", model)
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"a sparse gradient of weight.*sparse=False"):
        optimizer.step()
    assert torch.equal(model.weight, before)
