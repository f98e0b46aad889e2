"""Kinds that are drawn of causes outside of what a model computes: in its tensors, its scale, its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from planted_bench import Bench, Block, Trial
from planted_kinds import ANY, KINDS, Answer, Kind, at_point, kind
from planted_steps import Of
from torch import Tensor, nn

import fpsim

RECIPED = (*ANY, "recipe:mxfp8", "recipe:nvfp4", "mxfp8_e4m3")

# What came in

CAME = "NaN, inf, mask rows that came in"


def in_parameter(name: str, value: float, words: str) -> None:
    def plant(b: Bench) -> Answer:
        module, place = b.layer()
        if b.is_planted:
            with torch.no_grad():
                module.weight.view(-1)[7] = value
        return Answer(words, f"{place}.weight")

    KINDS[name] = Kind(name, plant, CAME, RECIPED, "intrinsic", has_sister=False)


in_parameter("nan in a parameter", torch.nan, "NaN came in")
in_parameter("inf in a parameter", torch.inf, "inf came in")
in_parameter("minus inf in a parameter", -torch.inf, "-inf came in")


def in_buffer(name: str, value: float, words: str) -> None:
    def plant(b: Bench) -> Answer:
        b.insert(Of(lambda self, x: x * self.scales, scales=torch.full((1,), b.pick(value, 1.0))))
        return Answer(words, "{point}.scales")

    KINDS[name] = Kind(name, plant, CAME, RECIPED, "intrinsic", has_sister=False)


in_buffer("nan in a buffer", torch.nan, "NaN came in")
in_buffer("inf in a buffer", torch.inf, "inf came in")


@kind(CAME, ANY, "intrinsic", has_sister=False)
def nan_in_the_input(b: Bench) -> Answer:
    if b.is_planted:
        b.x.view(-1)[5] = torch.nan
    return Answer("NaN came in|NaN", r"(.*[:.])?(x|input|batch|args?)([\[.].*)?|{stem}.*")


@kind(CAME, ("half",), "intrinsic", has_sister=False)
def inf_made_by_half_in_a_parameter(b: Bench) -> Answer:
    """1e5 is inf in half: no earlier step is to blame."""
    module, place = b.layer()
    if b.is_planted:
        with torch.no_grad():
            module.weight.view(-1)[7] = 1e5
    return Answer("inf came in|overflow", f"{place}.weight", never="earlier checkpoint|step before it")


@kind(CAME, ("half",), "intrinsic", has_sister=False)
def inf_made_by_half_in_a_buffer(b: Bench) -> Answer:
    b.insert(Of(lambda self, x: x * (self.limits / self.limits), limits=torch.full((1,), b.pick(1e5, 1.0))))
    return Answer("inf came in|overflow", "{point}.limits", never="earlier checkpoint|step before it")


@kind(CAME, ("float32", "half", "bfloat16", "autocast", "fp16"), "intrinsic", is_back=True, has_sister=False)
def inf_in_a_gradient(b: Bench) -> Answer:
    _, place = b.layer()
    b.clears = False

    def late(t: Trial) -> None:
        t.step()
        p = t.model.get_parameter(f"{place.format(**t.paths)}.weight")
        if b.is_planted and p.grad is not None:
            p.grad.view(-1)[3] = torch.inf
        if not b.is_planted:
            b.clears = True

    b.late.append(late)
    return Answer("inf came in", f"({place}.weight.*|.*{place}.weight)")


def masked_row(x: Tensor, v: bool) -> Tensor:
    shut = torch.zeros(x.shape, dtype=torch.bool)
    shut[0] = v
    shut[..., 0] = True
    return x + x.masked_fill(shut, -torch.inf).softmax(-1)


def added_row(x: Tensor, v: bool) -> Tensor:
    mask = torch.zeros(x.shape, dtype=x.dtype)
    mask[..., 0] = -torch.inf
    if v:
        mask[0] = -torch.inf
    return x + (x + mask).softmax(-1)


at_point("a row is masked wholly", "row masked wholly", "softmax", CAME, ANY, masked_row, True, False, "intrinsic")
at_point(
    "a row is masked wholly by addition", "row masked wholly", "softmax", CAME, ANY, added_row, True, False, "intrinsic"
)


@kind(CAME, ANY, "intrinsic", bodies=("former",))
def a_token_may_see_nobody(b: Bench) -> Answer:
    name = b.random.choice([name for name in b.stages if name.startswith("part")])
    block: Any = b.stages[name]
    assert isinstance(block, Block)
    block.mask = b.random.choice(("fill", "add"))
    if b.is_planted:
        block.hidden = torch.zeros(8, 8, dtype=torch.bool)
        block.hidden[2] = True
    return Answer("row masked wholly", f"{{{name}}}:softmax")


# The scale of the loss

SCALE = "loss scale"


@kind(SCALE, ("half", "autocast"), "inf", is_back=True)
def a_scale_too_large(b: Bench) -> Answer:
    b.scale = b.pick(2.0**26, b.scale)
    return Answer("overflow", "(:.*|{head}[:.].*)")


@kind(SCALE, ("autocast",), "inf", is_back=True)
def a_scaler_that_begins_too_high(b: Bench) -> Answer:
    b.scaler = lambda: torch.amp.GradScaler("cpu", init_scale=b.pick(2.0**32, 64.0))
    return Answer("overflow", "(:.*|{head}[:.].*)")


@kind(SCALE, ("grad_e5m2",), "inf", is_back=True)
def a_scale_too_large_for_e5m2(b: Bench) -> Answer:
    b.scale = b.pick(2.0**34, b.scale)
    return Answer("overflow", "(:.*|{head}[:.].*)")


@kind(SCALE, ("grad_e4m3fn",), "wrong", is_back=True, cosine=0.9)
def a_scale_that_saturates_e4m3(b: Bench) -> Answer:
    b.scale = b.pick(2.0**26, b.scale)
    return Answer("saturation|overflow", "(:.*|{head}[:.].*)")


@kind(SCALE, ("half",), "inf", is_back=True)
def gradients_are_not_cleared(b: Bench) -> Answer:
    _, place = b.layer()

    def late(t: Trial) -> None:
        t.step()
        if not b.is_planted or b.is_reference:
            return
        p = t.model.get_parameter(f"{place.format(**t.paths)}.weight")
        if p.grad is not None:
            p.grad.copy_(p.grad.sign() * 65504)
        b.clears = False
        t.by = 2.0**14

    b.late.append(late)
    return Answer("overflow", f"{place}.weight")


# Optimizers

OPTIMIZER = "optimizer, clipping, decay, average"


def steps(b: Bench, make: Any) -> None:
    b.optimizer = make
    b.scale = 1.0


def share_that_moves(t: Trial) -> float:
    """Of the weights whose gradient is not zero, what the optimizer's step changes."""
    t.step()
    before = {name: p.detach().clone() for name, p in t.model.named_parameters()}
    t.optimizer.step()
    pairs = [(p, before[name]) for name, p in t.model.named_parameters() if p.grad is not None and bool(p.grad.any())]
    if not all(bool(p.isfinite().all()) for p, _ in pairs):
        return float("nan")
    if any(not bool(x.isfinite().all()) for s in t.optimizer.state.values() for x in s.values() if torch.is_tensor(x)):
        return float("nan")
    return sum(int((p != was).sum()) for p, was in pairs) / max(1, sum(int(p.grad.count_nonzero()) for p, _ in pairs))  # type: ignore[union-attr]


@kind(OPTIMIZER, ("bfloat16", "half"), "update", after=share_that_moves)
def updates_are_lost(b: Bench) -> Answer:
    rate, momentum = b.pick(1e-7, 30.0), b.random.choice((0.0, 0.9))
    steps(b, lambda m: torch.optim.SGD(m.parameters(), rate, momentum=momentum))
    return Answer("update lost", ".*")


@kind(OPTIMIZER, ("bfloat16",), "update", after=share_that_moves)
def updates_of_adam_are_lost(b: Bench) -> Answer:
    rate = b.pick(1e-7, 3e-2)
    steps(b, lambda m: torch.optim.AdamW(m.parameters(), rate, eps=1e-6, weight_decay=0.0))
    return Answer("update lost", ".*")


@kind(OPTIMIZER, ("float32",), "update", after=share_that_moves)
def updates_of_a_quantised_optimizer_are_lost(b: Bench) -> Answer:
    """Weights are stored in bf16; they are float32 tensors, and float32 is not to blame."""
    rate = b.pick(1e-7, 3e-2)

    def make(m: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(m.parameters(), rate, eps=1e-6, weight_decay=0.0)
        if not b.is_reference:
            fpsim.quantize_optimizer(optimizer, fpsim.Update(weight="bf16"), m)
        return optimizer

    steps(b, make)
    return Answer("update lost", ".*", never="lost in float32|in float32|float64 masters|3.7e-0?9", must="bf16")


@kind(OPTIMIZER, ("half",), "update", after=share_that_moves)
def eps_of_the_optimizer_is_lost(b: Bench) -> Answer:
    eps, which = b.pick(1e-8, 1e-3), b.random.choice((torch.optim.Adam, torch.optim.RMSprop))
    steps(b, lambda m: which(m.parameters(), 1e-2, eps=eps))
    b.scale = b.pick(1e-2, 1.0)
    return Answer("division by zero", ".*")


@kind(OPTIMIZER, ("half",), "update", after=share_that_moves)
def the_square_of_a_gradient_overflows(b: Bench) -> Answer:
    steps(b, lambda m: torch.optim.Adam(m.parameters(), 3e-2, betas=(0.9, 0.1), eps=1e-4))
    b.scale = b.pick(2.0**15, 1.0)
    return Answer("overflow", r".*exp_avg_sq.*")


@kind(OPTIMIZER, ("half",), "lost")
def clipping_by_a_norm_that_overflows(b: Bench) -> Answer:
    """Each gradient fits, their norm does not: all are multiplied by 1 / inf."""
    b.scale = b.pick(2.0**17, 64.0)

    def after(t: Trial) -> None:
        nn.utils.clip_grad_norm_(t.model.parameters(), 1e5)

    b.after = after
    return Answer("overflow|gradient lost|.*clip.*|.*norm.*", ".*")


@kind(OPTIMIZER, ("float32", "half", "autocast", "fp16"), "update", after=share_that_moves)
def a_rate_that_is_no_number(b: Bench) -> Answer:
    rate = b.random.choice((torch.nan, torch.inf))
    words = "rate is NaN" if rate != rate else "rate is infinite"
    rate = b.pick(rate, 1.0)
    steps(b, lambda m: torch.optim.SGD(m.parameters(), rate))
    return Answer(words, ".*")


@kind(OPTIMIZER, ("half",), "update", after=share_that_moves)
def a_rate_too_large(b: Bench) -> Answer:
    rate = b.pick(6e4, 1.0)
    steps(b, lambda m: torch.optim.SGD(m.parameters(), rate))
    b.scale = b.pick(2.0**9, 1.0)
    return Answer("overflow", ".*")
