"""What is drawn: kinds of causes that stay finite: gradients and updates that are lost, and numbers that are wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
from planted_bench import ROWS, WIDTH, Bench, Dense, Recurrent, Trial, wide
from planted_kinds import LOW, NARROW, Answer, at_point, kind
from planted_steps import Of
from torch import Tensor, nn
from torch.nn import functional as F

import ada_loss
import fpsim

# Gradients that underflow little by little

DEEP = "gradient lost over depth or time"
LOST = "gradient lost"


@kind(DEEP, ("grad_e5m2", "e5m2"), "lost", bodies=("mlp",), is_back=True, depth=(9, 15), gain=0.4, cosine=0.85)
def depth_in_e5m2(b: Bench) -> Answer:
    b.scale = b.pick(b.random.choice((1.0, 0.25)), 2.0**16)
    return Answer(LOST, "lossy")


@kind(DEEP, ("grad_e4m3fn", "e4m3fn"), "lost", bodies=("mlp",), is_back=True, depth=(10, 15), gain=0.7, cosine=0.85)
def depth_in_e4m3(b: Bench) -> Answer:
    b.scale = b.pick(b.random.choice((1.0, 0.5)), 2.0**10)
    return Answer(LOST, "lossy")


@kind(DEEP, ("half", "fp16", "autocast"), "lost", bodies=("mlp",), is_back=True, depth=(11, 16), gain=0.3)
def depth_in_half(b: Bench) -> Answer:
    b.scale = b.pick(b.random.choice((1.0, 0.1)), 2.0**16)
    return Answer(LOST, "lossy")


@kind(DEEP, ("half", "fp16", "autocast"), "lost", bodies=("mlp",), is_back=True, depth=(6, 9), gain=1.0)
def depth_with_a_small_loss(b: Bench) -> Answer:
    """Layers hold the size of gradients, but for a decay in the middle."""
    b.scale = b.pick(b.random.choice((3e-5, 1e-5, 3e-6)), 64.0)
    for i, name in enumerate(name for name in b.stages if name.startswith("part")):
        stage: Any = b.stages[name]
        with torch.no_grad():
            stage.fc.weight.mul_(0.5 if i % 2 else 0.7)
    return Answer(LOST, "lossy")


@kind(DEEP, ("half", "grad_e5m2"), "lost", bodies=("conv",), is_back=True, depth=(6, 9), gain=0.3, cosine=0.85)
def depth_of_convolutions(b: Bench) -> Answer:
    for name in b.stages:
        stage: Any = b.stages[name]
        if name != "head":
            stage.bn = nn.Identity()
    b.scale = b.pick(0.1 if b.fmt == "half" else 1.0, 2.0**16)
    return Answer(LOST, "lossy")


def remembered(b: Bench, steps: int, gain: float) -> None:
    """What came in at the first step of a loop counts alone."""
    cell = Recurrent("tanh", steps=steps, gain=gain)
    b.x = torch.randn(ROWS, 8)
    b.stages = {"stem": Dense(8, torch.tanh), "loop": cell, "head": b.stages["head"]}


@kind(DEEP, ("half", "autocast", "fp16"), "lost", bodies=("mlp",), is_back=True)
def time_in_half(b: Bench) -> Answer:
    remembered(b, b.random.randint(11, 15), 0.28)
    b.scale = b.pick(1.0, 2.0**16)
    return Answer(LOST, "lossy")


@kind(DEEP, ("grad_e5m2", "grad_e4m3fn"), "lost", bodies=("mlp",), is_back=True, cosine=0.85)
def time_in_eight_bits(b: Bench) -> Answer:
    is_e4m3 = b.fmt == "grad_e4m3fn"
    remembered(b, b.random.randint(6, 8) if is_e4m3 else b.random.randint(10, 14), 0.4)
    b.scale = b.pick(1.0, 2.0**10 if is_e4m3 else 2.0**16)
    return Answer(LOST, "lossy")


@kind(DEEP, ("autocast",), "lost", bodies=("mlp",), is_back=True)
def time_with_a_scaler_that_begins_low(b: Bench) -> Answer:
    remembered(b, b.random.randint(11, 14), 0.28)
    start = b.random.choice((1.0, 2.0, 4.0))
    b.scaler = lambda: torch.amp.GradScaler("cpu", init_scale=b.pick(start, 2.0**16))
    return Answer(LOST, "lossy")


RULES = ("torch", "nnabla", "cerebras", "apex", "deepspeed", "megatron", "fairseq", "keras", "chainer", "logmax")


@kind(DEEP, ("autocast",), "lost", bodies=("mlp",), is_back=True)
def time_under_a_rule_of_loss_scale(b: Bench) -> Answer:
    """A scale that a rule has brought down, or not yet up."""
    remembered(b, b.random.randint(12, 15), 0.25)
    rule, scale = b.random.choice(RULES), b.pick(b.random.choice((2.0, 8.0)), 2.0**16)

    def scaler() -> ada_loss.GradScaler:
        made = ada_loss.GradScaler(rule)
        made.scale(torch.zeros(()))  # no scale is taken before there was a loss
        made.update(new_scale=scale)
        return made

    b.scaler = scaler
    return Answer(LOST, "lossy")


# Gradients that are lost in a layer

LAYER = "gradient lost in a layer"


def gated(b: Bench, gate: Any) -> Answer:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + gate(self, x) * self.inner(x).tanh()  # type: ignore[no-any-return]

    b.insert(Of(forward, inner=b.unit()))
    return Answer(LOST, r"{point}(\.inner)?[:.].*")


@kind(LAYER, (*NARROW, "autocast"), "lost", is_back=True)
def a_gate_that_is_a_number(b: Bench) -> Answer:
    v = b.pick(1e-7, 0.5)
    b.scale = 1.0
    return gated(b, lambda self, x: v)


@kind(LAYER, NARROW, "lost", is_back=True)
def a_gate_that_is_shut(b: Bench) -> Answer:
    v = b.pick(-17.0, 0.0)
    b.scale = 1.0
    return gated(b, lambda self, x: (x * 0.01 + v).sigmoid())


@kind(LAYER, (*NARROW, "autocast"), "lost", is_back=True)
def a_layer_scale_that_is_small(b: Bench) -> Answer:
    b.scale = 1.0
    found = gated(b, lambda self, x: self.gain)
    b.stages["point"].gain = nn.Parameter(torch.full((1,), b.pick(1e-7, 0.5)))
    return found


@kind(LAYER, NARROW, "lost", is_back=True)
def an_expert_that_is_not_chosen(b: Bench) -> Answer:
    v = b.pick(17.0, 0.0)
    b.scale = 1.0

    def gate(self: Any, x: Tensor) -> Tensor:
        two = torch.stack([x.sigmoid(), x.tanh() * 0.1 - v], -1)
        return two.softmax(-1)[..., 1]

    return gated(b, gate)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.by * gradient, None


# A mode of torch casts in the forward of a Function, which autograd does not see.
@kind(LAYER, ("half", "autocast"), "lost", is_back=True, out_of_reach=("float32",))
def a_gradient_that_is_turned(b: Bench) -> Answer:
    v = b.pick(1e-8, 0.3)
    b.scale = 1.0
    b.point(lambda x: Turned.apply(x * 1, v))
    return Answer(LOST, "lossy")


@kind(LAYER, ("half",), "lost", is_back=True)
def a_small_loss(b: Bench) -> Answer:
    b.scale = b.pick(1e-9, 64.0)
    return Answer(LOST, "lossy")


@kind(LAYER, ("grad_e4m3fn",), "lost", is_back=True)
def a_temperature_in_e4m3(b: Bench) -> Answer:
    v = b.pick(200.0, 1.0)
    b.loss = lambda out, y: F.cross_entropy(wide(out) / v, y)
    b.scale = b.pick(1.0, b.scale)
    return Answer(LOST, "lossy")


@kind(LAYER, ("grad_e4m3fn",), "lost", bodies=("mlp",), is_back=True)
def a_mean_over_many_in_e4m3(b: Bench) -> Answer:
    b.x, b.y = torch.randn(768, 8), torch.randint(0, 3, (768,))
    b.scale = b.pick(1.0, 2.0**9)
    return Answer(LOST, "lossy")


at_point(
    "a tanh that is one in half",
    LOST,
    ".*",
    LAYER,
    LOW,
    lambda x, v: (x.sigmoid() + v).tanh(),
    6.0,
    0.0,
    "lost",
    never="below its least number",
    is_back=True,
)

# Finite and wrong

WRONG = "finite and wrong"
ROUGH = "cancellation|error.*|.*swamp.*|.*absorb.*|.*too large.*"


for _name, _answer, _formats, _function, _bad, _good in (
    ("a product underflows", "underflow", NARROW, lambda x, v: x + (x.detach() * v) / v, 1e-9, 1.0),
    ("difference of large numbers", "cancellation", LOW, lambda x, v: (x + v) - v, 8192.0, 1.0),
    (
        "deviation from a large mean",
        "cancellation",
        LOW,
        lambda x, v: (x + v) - (x + v).mean(-1, keepdim=True),
        8192.0,
        1.0,
    ),
    ("a sine of large numbers", ROUGH, ("bfloat16", "bf16"), lambda x, v: x + (x * v).sin(), 400.0, 1.0),
):
    at_point(_name, _answer, ".*", WRONG, _formats, _function, _bad, _good, "wrong")


@kind(WRONG, ("bfloat16", "bf16"), "wrong")
def a_variance_in_one_pass(b: Bench) -> Answer:
    v = b.pick(60.0, 0.0)

    def function(x: Tensor) -> Tensor:
        y = x.tanh() + v
        mean = y.mean(-1, keepdim=True)
        return (y - mean) * torch.rsqrt(((y * y).mean(-1, keepdim=True) - mean * mean).clamp(min=0) + 1e-3)

    b.point(function)
    return Answer(f"division by zero|{ROUGH}", "{point}:.*")


@kind(WRONG, ("bfloat16",), "wrong")
def outputs_around_a_thousand(b: Bench) -> Answer:
    v, head = b.pick(1000.0, 0.0), b.stages["head"]
    with torch.no_grad():
        head.fc.bias.add_(v)  # type: ignore[union-attr, operator]
    b.loss = lambda out, y: wide(out - v).square().mean()
    return Answer("cancellation", "(:sub|{head}.fc:linear)")


@kind(WRONG, ("bfloat16",), "wrong")
def a_sine_of_long_positions(b: Bench) -> Answer:
    v = b.pick(3000, 0)

    def function(x: Tensor) -> Tensor:
        places = (torch.arange(len(x)) + v).to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        return x + 3 * (places * 0.7).sin()

    b.point(function)
    return Answer(ROUGH, "{point}:.*")


@kind(WRONG, ("e4m3fn",), "wrong", bodies=("mlp", "conv", "resnet"), cosine=0.8)
def a_layer_that_saturates(b: Bench) -> Answer:
    module, place = b.layer()
    with torch.no_grad():
        module.weight.clamp_(-0.9, 0.9).mul_(b.pick(400.0 if place != "{head}.fc" else 300.0, 1.0))
        module.weight.add_(b.pick(100.0, 0.0))
    return Answer("saturation", f"{place}:.*|{b.before(place)}")


@kind(WRONG, ("bf16",), "wrong", bodies=("mlp", "conv"), cosine=0.9)
def one_layer_too_narrow(b: Bench) -> Answer:
    _, place = b.layer(has_head=False)
    narrow = "e2m1fn" if b.is_planted else "bf16"

    def policy(paths: dict[str, str], model: nn.Module) -> Any:
        inside = fpsim.Policy(narrow, narrow, "bf16", "bf16")
        return fpsim.Policy("bf16", "bf16", "bf16", "bf16", overrides={place.format(**paths): inside})

    b.policy = policy
    return Answer("error grows|error.*|underflow|saturation", f"{place.partition('.')[0]}[:.].*")


@kind(WRONG, ("recipe:fp8_current",), "wrong", bodies=("mlp", "rnn", "gru", "lstm", "former"), cosine=0.9)
def an_outlier_among_keys(b: Bench) -> Answer:
    """One number takes the scale of the whole tensor: e4m3 is at fault, not the result's bf16."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scores = (x * self.seen) @ self.keys.mT
        return x + (scores.softmax(-1) @ self.values)  # type: ignore[no-any-return]

    keys, seen = torch.randn(10, WIDTH), torch.ones(WIDTH)
    keys[5, 3], seen[3] = b.pick(1e6, 1.0), 0.0
    b.insert(Of(forward, keys=keys, values=2 * torch.randn(10, WIDTH), seen=seen))
    b.policy = lambda paths, model: fpsim.recipe("fp8_current", model, attention=True)
    return Answer("error.*|underflow|saturation", "{point}:matmul", must="e4m3")


@kind(WRONG, ("recipe:fp8_delayed",), "wrong", bodies=("mlp", "conv"), cosine=0.9, gain=0.9)
def a_delayed_scale_after_a_spike(b: Bench) -> Answer:
    factor = b.pick(1e6, 1.0)
    b.late.append(lambda t: _step_at(b, t, factor))
    first = "{stem}." + ("conv:conv2d" if b.drawn.body == "conv" else "fc:linear")
    return Answer("underflow|gradient lost", first, never="beyond 0[ ,]")


@kind(WRONG, ("recipe:fp8_delayed",), "wrong", bodies=("mlp",), cosine=0.9, gain=0.9)
def a_delayed_scale_before_growth(b: Bench) -> Answer:
    factor = b.pick(1e-3, 1.0)
    b.late.append(lambda t: _step_at(b, t, factor))
    return Answer("saturation", "{stem}.fc:linear")


def _step_at(b: Bench, t: Trial, factor: float) -> None:
    """A step before, with inputs of another size."""
    if b.is_reference:
        return
    state = copy.deepcopy(t.model.state_dict())
    b.x.mul_(factor)
    t.step()
    b.x.div_(factor)
    with torch.no_grad():
        for name, buffer in t.model.named_buffers():
            if "running" in name or "num_batches" in name:
                buffer.copy_(state[name])


# Slow swamping

SLOW = "slow swamping"
SWAMPED = ".*swamp.*|.*absorb.*|error.*|.*sum.*|cancellation|.*round.*|.*lost.*|.*accumul.*"


@kind(SLOW, ("bfloat16", "autocast_bf16", "float32"), "wrong", bodies=("mlp",))
def losses_added_up_in_bf16(b: Bench) -> Answer:
    count = b.pick(b.random.randint(500, 700), b.random.randint(16, 60))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(wide(out), y, reduction="none")
        total = b.low(torch.zeros((), dtype=each.dtype), torch.bfloat16)
        for i in range(count):
            total = total + b.low(each[i % len(each)], torch.bfloat16)
        return total / count

    b.loss = loss
    return Answer(SWAMPED, "(.*:add.*|:iadd.*)")


@kind(SLOW, ("bfloat16", "bf16"), "wrong", bodies=("mlp", "rnn", "gru", "former"))
def a_state_that_adds_up(b: Bench) -> Answer:
    count = b.pick(b.random.randint(500, 700), b.random.randint(16, 60))

    def function(x: Tensor) -> Tensor:
        term = x.sigmoid()
        total = torch.zeros_like(x)
        for _ in range(count):
            total = total + term
        return x + 4 * total / count

    b.point(function)
    return Answer(SWAMPED, "{point}:add.*")


@kind(SLOW, ("float32",), "wrong", bodies=("mlp",))
def an_accumulator_in_bf16(b: Bench) -> Answer:
    wide_sum = Of(lambda self, x: x + self.fc(x.sigmoid().repeat(1, 192)), fc=nn.Linear(192 * WIDTH, 1))
    with torch.no_grad():
        wide_sum.fc.weight.abs_().mul_(10.0 / WIDTH)  # type: ignore[union-attr, operator]
    b.insert(wide_sum)
    b.fmt = "products"
    accumulator = b.pick(b.random.choice(("bf16", "cb16")), "fp32")
    b.policy = lambda paths, model: fpsim.Policy(products=fpsim.Products(accumulator=accumulator))
    return Answer(SWAMPED, "{point}.fc:linear")


def looked_up(b: Bench, dtype: torch.dtype, start: int) -> Answer:
    table = nn.Embedding(4200, WIDTH)

    def forward(self: Any, x: Tensor) -> Tensor:
        ids = b.low((torch.arange(len(x)) + start).float(), dtype).long().clamp(max=4199)
        found = self.table(ids)
        if x.dim() == 4:
            return x + found[:, :, None, None]  # type: ignore[no-any-return]
        return x + (found if x.dim() == 2 else found[:, None])  # type: ignore[no-any-return]

    b.insert(Of(forward, table=table))
    kinds = f"{SWAMPED}|.*exact.*|.*integer.*|.*precision.*|.*index.*|.*cast.*|.*ids?\\b.*"
    return Answer(kinds, r"{point}(\.table)?:(half|bfloat16|to|type|long|embedding)(_\d+)?")


@kind(SLOW, ("float32", "half", "autocast", "fp16"), "wrong")
def ids_through_half(b: Bench) -> Answer:
    return looked_up(b, torch.float16, b.pick(b.random.randint(2049, 4000), 5))


@kind(SLOW, ("float32", "bfloat16", "bf16"), "wrong")
def places_through_bfloat16(b: Bench) -> Answer:
    return looked_up(b, torch.bfloat16, b.pick(b.random.randint(257, 4000), 5))


@kind(SLOW, ("bfloat16",), "wrong")
def places_by_a_cumulative_sum(b: Bench) -> Answer:
    start = b.pick(b.random.randint(600, 3000), 0)

    def function(x: Tensor) -> Tensor:
        places = torch.ones(start + len(x), dtype=x.dtype).cumsum(0)[-len(x) :].view(-1, *[1] * (x.dim() - 1))
        return x + 3 * (places * 0.7).sin()

    b.point(function)
    return Answer(f"{SWAMPED}|{ROUGH}", "{point}:.*")


def moved(of: str) -> Any:
    def share(t: Trial) -> float:
        before, after = t.kept
        return float((before != after).double().mean())

    share.__name__ = of
    return share


@kind(SLOW, ("bfloat16",), "update", after=moved("average"))
def an_average_that_does_not_move(b: Bench) -> Answer:
    decay = b.pick(0.9999, 0.5)
    b.insert(Of(lambda self, x: x, average=torch.ones(256)))

    def after(t: Trial) -> None:
        average = t.model.get_buffer(f"{t.paths['point']}.average")
        before = average.clone()
        average.mul_(decay).add_(torch.full_like(average, 0.9), alpha=1 - decay)
        t.kept = [before, average.clone()]

    b.after = after
    return Answer("update lost|.*average.*|.*moves?.*|.*swamp.*|error.*", r"(.*{point}\.average.*|:(mul|add|lerp).*)")
