"""Per-layer scaling in real float16: which scales it chooses, what it trains, and how it ends an overflow."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ada_loss
import fpsim
from ada_loss.layerwise.native import NativeScaling
from ada_loss.layerwise.native_graph import Factor
from ada_loss.layerwise.native_hooks import NativePass
from ada_loss.rules.layer import ApproxRange, Fixed
from fpsim.scaling import listeners
from tests import tiers


def deep(depth: int = 8, width: int = 16, gain: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(gain)
    return model


def backward(model: nn.Module, x: Tensor, size: float, scale: Any = lambda loss: loss) -> list[Tensor]:
    model.zero_grad()
    scale(model(x).float().square().mean() * size).backward()
    return [p.grad.clone() for p in model.parameters()]


def inputs() -> Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


@tiers.parametrize("gain", [1.0, 0.7, 0.5, 0.3], keep={0.5})
@pytest.mark.parametrize("size", [1.0, 2.0**-20])
def test_scales_are_those_of_the_emulation_with_the_same_bound(gain: float, size: float) -> None:
    native = deep(gain=gain).half()
    scaling = NativeScaling(native, ApproxRange(bound="worst_case"))
    emulated = fpsim.quantize(copy.deepcopy(native).float(), "fp16")
    backward(native, inputs().half(), size, scaling.scale)
    with ada_loss.AdaLossScaled(emulated, rule=ApproxRange(bound="worst_case"), u_min="normal") as scaled:
        backward(emulated, inputs().half().float(), size)
        theirs = scaled.log2_scales()
    ours = {site: k for site, k in scaling.log2_scales().items() if site != ":ToCopy"}
    assert ours == theirs
    assert len(set(ours.values())) > 2  # guards the test: layers differ


@tiers.parametrize("gain", [1.0, 0.7, 0.5, 0.3], keep={0.5})
@pytest.mark.parametrize("size", [2.0**-10, 2.0**-20])
def test_a_recorder_sees_what_the_emulation_loses_to_the_last_digit(gain: float, size: float) -> None:
    native = deep(gain=gain).half()
    scaling = NativeScaling(native, ApproxRange(bound="worst_case"))
    scaling.observer = ours = ada_loss.Recorder()
    emulated = fpsim.quantize(copy.deepcopy(native).float(), "fp16")
    plain = backward(native, inputs().half(), size, NativeScaling(native, ApproxRange(bound="worst_case")).scale)
    assert all(map(torch.equal, plain, backward(native, inputs().half(), size, scaling.scale)))
    with ada_loss.AdaLossScaled(emulated, rule=ApproxRange(bound="worst_case"), u_min="normal") as scaled:
        scaled.observer = theirs = ada_loss.Recorder()
        backward(emulated, inputs().half().float(), size)
    # what layer 7 sends on arrives at layer 6; the first that is told of is the cast, whose gradient arrives at layer 7
    shares = ("log2_scale", "elements", "zeros", "underflow", "underflow_unscaled", "overflow")
    arrived = [[row[name] for name in shares] for row in theirs.rows() if row["role"] == "error"]
    rows = ours.rows()
    assert [row["site"] for row in rows] == [":ToCopy", *(f"{i}:linear" for i in range(7, 0, -1))]
    assert [[row[name] for name in shares] for row in rows] == arrived
    assert sum(row["underflow_unscaled"] for row in rows) > 1  # guards the test


def test_a_recorder_is_told_what_each_kind_of_product_sends_on() -> None:
    torch.manual_seed(0)
    conv, up = nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2), nn.ConvTranspose2d(4, 2, 2)
    linear, left, gate = nn.Linear(5, 6, bias=False), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(6))
    model = nn.ModuleDict({"conv": conv, "up": up, "linear": linear})
    told: dict[str, Tensor] = {}

    class Told(ada_loss.Recorder):
        def __call__(self, step: int, site: str, role: str, spec: Any, gradient: Tensor, *rest: Any) -> None:
            told[site] = gradient

    scaling = NativeScaling(model, Fixed(2.0))
    scaling._pass.needs_half = False
    scaling._pass.half = torch.float32  # nothing is rounded: what is recomputed is what the plain pass sends
    scaling.observer = Told()
    seen: dict[str, Tensor] = {}

    def arrives(name: str, y: Tensor) -> Tensor:
        y.register_hook(lambda g: seen.setdefault(name, g))
        return y

    def loss() -> Tensor:
        y = arrives("conv:convolution", torch.ones(2, 2, 7, 7, requires_grad=True) * 1.5)
        y = arrives("up:convolution", conv(y))
        y = arrives("linear:linear", up(y).flatten(1)[:, :20].reshape(8, 5))
        y = arrives(":mul", linear(y)[:4])
        y = arrives(":linear", y * gate)
        return (left @ y).sin().sum()

    loss().backward()
    plain, seen = seen, {}
    for p in (*model.parameters(), left, gate):
        p.grad = None
    scaling.scale(loss()).backward()
    assert set(plain) <= set(told)  # with float32 for half every node narrows, and is a site
    for site, wanted in plain.items():
        # sums of at most 36 terms in another order
        assert torch.allclose(told[site], wanted, rtol=0, atol=36 * 2.0**-24 * float(wanted.abs().max())), site


@tiers.parametrize("gain", [1.0, 0.7, 0.5, 0.3], keep={0.5})
@pytest.mark.parametrize("size", [1.0, 2.0**-20])
def test_gradients_of_a_half_training_are_those_of_the_emulation_at_the_same_scales(gain: float, size: float) -> None:
    native = deep(gain=gain).half()
    arrives: dict[str, int] = {}
    leaves: dict[str, int] = {}

    def choose(factor: Factor, came: list[Tensor], log2: int) -> int:
        amax = float(came[0].abs().max())
        k = 3 - math.frexp(amax)[1] if amax else 0
        arrives[factor.site], leaves[factor.site] = log2, log2 + k
        return k

    names = {id(p): name for name, p in native.named_parameters()}
    ours = backward(native, inputs().half(), size, NativePass(names, choose).scale)

    def scale_at(site: str, role: str, spec: Any, operation: str, operands: Any, out: Tensor) -> Any:
        module = f"{site.partition(':')[0]}:linear"
        # an operand's gradient is what the product sends on, and so is that of a weight: one node computes both
        is_dy = role == "error" and operation == "linear"
        log2 = torch.tensor([(arrives if is_dy else leaves)[module]])
        return lambda gradient, is_ours: log2

    emulated = fpsim.quantize(copy.deepcopy(native).float(), "fp16")
    for group in listeners(emulated):
        group.scaling = scale_at
    # the scales are looked up as the forward pass makes its sites
    theirs = backward(emulated, inputs().half().float(), size)
    # Both add 16 exact products in float32, in orders that may differ: by 2**-20 of the sum at most. That rounds to the
    # other side, one unit of 2**-10, where the sum is so near the middle of two numbers 2**-11 apart: one in 2**8. If a
    # result of the forward pass does (it is one unit off), so may any gradient that it enters, of which there are many.
    mine, other = (torch.cat([g.flatten() for g in found[::2]]) for found in (ours, theirs))
    differs = mine != other
    assert (mine - other).norm() <= 2.0**-11 * mine.norm()
    if torch.equal(native(inputs().half()).float(), emulated(inputs().half().float())):
        assert differs.sum() <= 2.0**-8 * len(mine)
        assert ((mine - other).abs() <= 2.0**-10 * mine.abs())[differs].all()


@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_small_gradients_of_a_half_training_are_kept(way: str) -> None:
    model, x, size = deep(gain=0.5), inputs(), 2.0**-24
    true = backward(model, x, size)
    if way == "weights":
        model, x = model.half(), x.half()
    with torch.autocast("cpu", torch.float16, enabled=way == "autocast"):
        plain = backward(model, x, size)
        ours = backward(model, x, size, NativeScaling(model).scale)
    total = sum(g.numel() for g in true)
    assert sum(int((g == 0).sum()) for g in plain) > 0.5 * total
    assert sum(int((g == 0).sum()) for g in ours) <= 0.001 * total
    for ours_of, true_of in zip(ours, true, strict=True):
        assert ours_of.dtype is torch.float32
        # eight products in float16, each with a relative error of 2**-11 and sums of 16 terms of it
        assert (ours_of - true_of).norm() <= 2.0**-7 * true_of.norm()


def test_a_float32_gradient_beyond_the_half_range_is_scaled_down_as_it_enters() -> None:
    model, x, size = deep(), inputs(), 2.0**28
    true = backward(model, x, size)
    with torch.autocast("cpu", torch.float16):
        assert not all(g.isfinite().all() for g in backward(model, x, size))
        scaling = NativeScaling(model)
        ours = backward(model, x, size, scaling.scale)  # so that sums of it over the batch, for biases, fit too
    assert min(scaling.log2_scales().values()) < 0
    for ours_of, true_of in zip(ours, true, strict=True):
        assert (ours_of - true_of).norm() <= 2.0**-7 * true_of.norm()  # as above


def test_an_overflow_limits_the_site_where_it_began_and_the_one_before() -> None:
    model, x, size = deep(4), inputs(), 2.0**8
    with torch.no_grad():
        for layer in model:
            layer.bias.mul_(
                2.0**12
            )  # inputs of the next layer, by which the weight's gradient is large; no rule sees them
    true = backward(model, x, size)
    with torch.autocast("cpu", torch.float16):
        scaling = NativeScaling(model)
        assert not all(g.isfinite().all() for g in backward(model, x, size, scaling.scale))
        scaling.overflowed()
        first = set(scaling.limits)
        for _ in range(10):
            ours = backward(model, x, size, scaling.scale)
            if all(g.isfinite().all() for g in ours):
                break
            scaling.overflowed()
    assert first == {":ToCopy", "3:linear"}
    for ours_of, true_of in zip(ours, true, strict=True):
        assert (ours_of - true_of).norm() <= 2.0**-7 * true_of.norm()  # as above


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_bias_whose_gradient_is_a_sum_over_a_batch_does_not_overflow(kind: str) -> None:
    torch.manual_seed(0)
    make = nn.Linear if kind == "linear" else lambda *size: nn.Conv1d(*size, 1)
    model, x = nn.Sequential(make(16, 16), make(16, 16)), torch.randn(512, 16) * 2.0**-6
    x = x if kind == "linear" else x.view(128, 4, 16).transpose(1, 2)
    with torch.no_grad():
        model[1].weight.mul_(2.0**-14)  # sends on little, so that the rule asks for a large factor

    def loss() -> Tensor:
        return model(x).float().sum() * 2.0**3  # all of one sign, so that the sum is as large as it may be

    true = torch.autograd.grad(loss(), [*model.parameters()])
    with torch.autocast("cpu", torch.float16):
        ours = torch.autograd.grad(NativeScaling(model).scale(loss()), [*model.parameters()])
    for ours_of, true_of in zip(ours, true, strict=True):
        assert ours_of.isfinite().all()
        if ours_of.dim() == 1:  # weights' sums cancel
            assert (ours_of - true_of).norm() <= 2.0**-7 * true_of.norm()  # as above


def test_a_product_may_bring_a_float32_gradient_into_the_half_range_by_itself() -> None:
    torch.manual_seed(0)
    linear, gate = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 1e-6))
    model = nn.ModuleDict({"linear": linear})
    scaling = NativeScaling(model)
    with torch.autocast("cpu", torch.float16):
        loss = (linear(inputs()) * gate).sum() * 2.0**30
    scaling.scale(loss).backward()
    # 2**30 would overflow, but what leaves the gate is 2**30 * 1e-6, about 2**10
    assert scaling.log2_scales()["linear:linear"] == 0
    assert linear.bias.grad is not None
    assert (linear.bias.grad / (16 * 2.0**30 * 1e-6) - 1).abs().max() <= 2.0**-10


class Language(nn.Module):
    """A small decoder with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.tokens, self.places = nn.Embedding(64, 32), nn.Parameter(torch.randn(16, 32) / 50)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.full((16, 16), -math.inf).triu(1)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places, mask=mask, is_causal=True)))


@pytest.mark.parametrize("size", [1.0, 2.0**-20])
def test_a_language_model_has_the_gradients_of_the_best_constant_at_any_size_of_its_loss(size: float) -> None:
    torch.manual_seed(0)
    model, tokens = Language(), torch.randint(0, 64, (8, 17))

    def found(scale: Any, *, is_half: bool = True) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=is_half):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) * size
        scale(loss).backward()
        return [p.grad.clone() for p in model.parameters()]

    true = found(lambda loss: loss, is_half=False)

    def error(gradients: list[Tensor], scale: float = 1.0) -> float:
        errors = [float((g / scale - t).norm() / t.norm()) for g, t in zip(gradients, true, strict=True)]
        return statistics.median(math.inf if math.isnan(e) else e for e in errors)

    ours = found(NativeScaling(model).scale)
    constants = [2.0**k for k in range(0, 25, 4)]
    best = min(error(found(lambda loss, scale=scale: loss * scale), scale) for scale in constants)
    assert error(ours) <= 1.1 * best
    lost = sum(int(((g == 0) & (t != 0)).sum()) for g, t in zip(ours, true, strict=True))
    assert lost <= 0.001 * sum(t.numel() for t in true)


class Reads(TorchDispatchMode):
    """Counts the copies of a number to the host, and all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.operations = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        self.operations += 1
        return function(*args, **(kwargs or {}))


def steps_of(model: nn.Module, scale: Any, sizes: list[float]) -> list[list[Tensor]]:
    """The gradients of a language model in float16, in passes of losses of these sizes."""
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for size in sizes:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) * size
        scale(loss).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


SIZES = [1.0, 2.0**-10, 2.0**-20, 1.0, 2.0**-20, 2.0**-24, 2.0**-24]


@pytest.mark.parametrize("update_every", [1, 3, 100])
def test_powers_that_stay_on_the_device_are_those_of_the_host_and_are_never_read(
    update_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Language()
    with torch.no_grad():
        for layer in model.blocks.layers:  # branches that carry other powers than what they meet
            layer.self_attn.out_proj.weight.mul_(1e-4)
            layer.linear2.weight.mul_(1e-3)
    first = NativeScaling(model, update_every=update_every)
    on_host, again = (steps_of(model, s.scale, SIZES) for s in (first, NativeScaling(model, update_every=update_every)))
    monkeypatch.setattr(NativeScaling, "keeps_on_device", True)
    scaling = NativeScaling(model, update_every=update_every)
    with Reads() as seen:
        on_device = steps_of(model, scaling.scale, SIZES)
        assert seen.reads == 0
        float(torch.ones(1))
        assert seen.reads == 1  # guards the test
    for ours, theirs, those in zip(on_host, on_device, again, strict=True):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, theirs, those, strict=True))
    assert first.log2_scales() == scaling.log2_scales()
    assert len(set(first.log2_scales().values())) > 4  # guards the test


def test_factors_of_one_add_no_operation_and_change_no_bit() -> None:
    torch.manual_seed(0)
    model = Language()
    scaling = NativeScaling(model, Fixed(1.0), update_every=10)
    plain = steps_of(model, lambda loss: loss, [2.0**-4])
    assert all(torch.equal(a, b) for a, b in zip(steps_of(model, scaling.scale, [2.0**-4])[0], plain[0], strict=True))
    with Reads() as without:
        steps_of(model, lambda loss: loss, [2.0**-4])
    with Reads() as with_ones:
        steps_of(model, scaling.scale, [2.0**-4])
    assert with_ones.operations == without.operations + 1  # a copy of the loss, whose backward passes the gradient on
    assert scaling.schedule.step == 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.b = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def train_two_heads(scaler: Any, model: nn.Module, steps: int) -> tuple[float, int]:
    """The second head's mean squared error at the end, and how many steps were skipped."""
    generator = torch.Generator().manual_seed(5)
    # Adam divides by the gradient's size, so 1e-12 times a loss trains as that loss does if nothing is lost
    optimizer, skipped, last = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-30), 0, 0.0
    for _ in range(steps):
        x = torch.randn(64, 8, generator=generator)
        with torch.autocast("cpu", torch.float16):
            a, b = model(x)
        target = (x[:, :1] - x[:, 1:2]) / 2
        errors = [(out.float() - target).square().mean() for out in (a, b)]
        scaler.scale(errors[0] + 1e-12 * errors[1]).backward()
        scaler.unscale_(optimizer)
        skipped += any(not bool(p.grad.isfinite().all()) for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        last = float(errors[1].detach())
    return last, skipped


@tiers.parametrize("seed", [0, 1, 2], keep={0})
def test_a_head_whose_loss_is_tiny_trains_with_layers_alone(seed: int) -> None:
    ends: dict[str, tuple[float, int]] = {}
    for name in ("layers", "torch"):
        torch.manual_seed(seed)
        model = TwoHeads()
        scaler = ada_loss.GradScaler(layers=model) if name == "layers" else torch.amp.GradScaler("cpu")
        ends[name] = train_two_heads(scaler, model, 300)
    assert ends["torch"][0] > 0.1  # the error of a head that answers 0 is 0.5
    assert ends["layers"][0] < 0.01
    assert ends["layers"][1] == 0


@pytest.mark.parametrize("clips", [False, True], ids=["as it is", "clipped"])
def test_an_overflow_ends_although_the_rule_asks_for_more(clips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped() -> int:
        model = deep(4)
        layers = NativeScaling(model, Fixed(2.0**12))  # whatever arrives: beyond float16 at the second product
        scaler = ada_loss.GradScaler(layers=layers)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        count = 0
        for _ in range(40):
            with torch.autocast("cpu", torch.float16):
                loss = model(inputs()).float().square().mean()
            scaler.scale(loss).backward()
            before = model[0].weight.detach().clone()
            if clips:  # one NaN makes all of them NaN
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            count += torch.equal(before, model[0].weight)
            scaler.update()
            optimizer.zero_grad()
        return count

    assert skipped() <= 20
    monkeypatch.setattr(NativeScaling, "overflowed", lambda self: None)
    assert skipped() == 40  # the rule undoes what is taken back


def test_what_a_rule_chose_is_held_between_updates_and_a_zero_gradient_chooses_nothing() -> None:
    model = deep(4).half()
    scaling = NativeScaling(model, update_every=3)
    found = []
    for size in (2.0**-10, 2.0**-16, 2.0**-16, 2.0**-16, 0.0):
        backward(model, inputs().half(), size, scaling.scale)
        found.append(scaling.log2_scales())
    assert found[0] == found[1] == found[2] != found[3] == found[4]


def test_a_training_goes_on_from_its_state_bit_for_bit() -> None:
    def steps(scaler: ada_loss.GradScaler, model: nn.Module, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(count):
            with torch.autocast("cpu", torch.float16):
                loss = model(inputs()).float().square().mean() * 2.0**-16
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def scaler_of(model: nn.Module) -> ada_loss.GradScaler:
        return ada_loss.GradScaler(layers=NativeScaling(model, update_every=4))

    model = deep(4)
    scaler = scaler_of(model)
    steps(scaler, model, 2)
    assert scaler.layers is not None
    scaler.layers.limits["1:linear"] = 3  # as an overflow leaves one
    other = copy.deepcopy(model)
    resumed = scaler_of(other)
    resumed.load_state_dict(copy.deepcopy(scaler.state_dict()))
    steps(scaler, model, 5)
    steps(resumed, other, 5)
    assert scaler.state_dict() == resumed.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert scaler.layers.log2_scales()["0:linear"] <= 3
    with pytest.warns(UserWarning, match="no scales of layers"):
        resumed.load_state_dict(ada_loss.GradScaler("static", scale=1.0, skip_overflow=True).state_dict())
    emulated = ada_loss.AdaLossScaled(fpsim.quantize(deep(4), "fp16"), update_every=4, u_min="normal")
    with pytest.raises(ValueError, match="real float16"):
        emulated.load_state_dict(scaler.layers.state_dict())
    with pytest.raises(ValueError, match="update_every"):
        ada_loss.GradScaler(layers=deep(4)).load_state_dict(scaler.state_dict())


def test_a_torch_that_lacks_what_hooks_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    with pytest.raises(NotImplementedError, match=r"_will_engine_execute_node, which scaling layers in real float16"):
        ada_loss.GradScaler(layers=deep(2))


def test_what_has_nothing_to_scale_is_refused() -> None:
    model, x = deep(2), inputs()
    scaling = NativeScaling(model)
    with pytest.raises(TypeError, match="float32 and bfloat16 have nothing to scale"):
        scaling.scale(model(x).sum())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="nothing to scale"):
        scaling.scale(model(x).sum())
    with pytest.raises(TypeError, match="requires no gradient"):
        scaling.scale(model(x).sum().detach())
    with pytest.raises(ValueError, match="is quantised"):
        ada_loss.GradScaler(layers=fpsim.quantize(deep(2), "fp16"))
    with pytest.raises(TypeError, match=r"Expected: a torch\.nn\.Module"):
        ada_loss.GradScaler(layers="model")  # type: ignore[arg-type]
    for rule in ("exact", "current", "mse", "amax_history", "element_wise_range"):
        with pytest.raises(ValueError, match="has rounded"):
            NativeScaling(model, rule)
    with pytest.raises(ValueError, match="scaler that is off"):
        ada_loss.GradScaler("off", layers=model)
    loss = model(x).sum()
    assert ada_loss.GradScaler(layers=model, enabled=False).scale(loss) is loss
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(scaling)
    # nothing is left hooked
    assert all(torch.equal(a, b) for a, b in zip(backward(model, x, 1.0), backward(deep(2), x, 1.0), strict=True))


def test_numbers_stand_for_the_limits_of_float16() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scales = {}
    for name, options in {
        "normal": {"u_min": "normal"},
        "2**-14": {"u_min": 2.0**-14},
        "2**-9": {"u_min": 2.0**-9},
        "low": {"u_min": 2.0**-9, "u_max": 2.0**-5},
    }.items():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        for layer in model:
            layer.weight.data.fill_(2.0**-6)
        layers = NativeScaling(model, rule=ApproxRange(bound="worst_case"), **options)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().sum() * 2.0**-20
        layers.scale(loss).backward()
        scales[name] = layers.log2_scales()
    assert scales["2**-14"] == scales["normal"]
    linear = [site for site in scales["normal"] if "linear" in site]
    assert len(linear) == 3
    # u_min is 2**5 times as large: so is the first factor, and the layers keep the size of the gradient
    assert all(scales["2**-9"][site] == scales["normal"][site] + 5 for site in linear)
    # the gradient is 2**-20 everywhere: 2**15 times that is u_max, and no scale may be larger
    assert all(scales["low"][site] == 15 for site in linear)
    with pytest.raises(ValueError, match=r"u_max=70000\.0 was given, and a gradient is rounded to fp16"):
        NativeScaling(nn.Linear(2, 2), u_max=70000.0)
