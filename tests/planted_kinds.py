"""What is drawn: kinds of causes that end in inf or NaN, forward and backward, each with its benign sister.

A kind changes a `Bench` and returns what must be said of it. Kinds that stay finite are in `planted_losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from planted_bench import BODIES, Bench, Trial
from torch import Tensor
from torch.nn import functional as F

NARROW = ("half", "fp16")
LOW = ("half", "fp16", "bfloat16", "bf16")
ANY = ("float32", "half", "bfloat16", "autocast", "autocast_bf16", "fp16", "bf16")


@dataclass(frozen=True)
class Answer:
    """What must be said. kind: a pattern of it. place: one of places, with names of stages in braces; or "lossy" for
    any place in the layers of which the reference's gradients are lost, in part or wholly.

    never: a pattern of words that are false of this case; must: one of words that are to be there.
    """

    kind: str
    place: str
    never: str = ""
    must: str = ""


Plant = Callable[[Bench], Answer]


@dataclass(frozen=True)
class Kind:
    """harm: what is wrong of a planted case, as measured beside the reference, before it counts.

    "inf" (not finite, and the reference is), "intrinsic" (not finite in any format), "wrong" (not finite, or another
    gradient or loss), "lost" (a parameter's gradient is wholly zero), "update" (see `after`).
    row: of the table that it belongs to. depth, gain: of the body, if not its own. is_back: of gradients.
    """

    name: str
    plant: Plant
    row: str
    formats: tuple[str, ...]
    harm: str
    bodies: tuple[str, ...] = BODIES
    is_back: bool = False
    depth: tuple[int, int] | None = None
    gain: float = 1.0
    cosine: float = 0.97  # of the benign sister, at least
    has_sister: bool = True
    out_of_reach: tuple[str, ...] = ()  # remedies that cannot be applied from outside
    # the share of what the optimizer's step changes, or the error of what is not a gradient
    after: Callable[[Trial], float] | None = None


KINDS: dict[str, Kind] = {}


def kind(row: str, formats: tuple[str, ...], harm: str, **options: Any) -> Callable[[Plant], Plant]:
    def registered(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        KINDS[name] = Kind(name, plant, row, formats, harm, **options)
        return plant

    return registered


def at_point(
    name: str,
    answer: str,
    ops: str,
    row: str,
    formats: tuple[str, ...],
    function: Callable[[Tensor, Any], Tensor],
    bad: Any,
    good: Any,
    harm: str = "inf",
    never: str = "",
    **options: Any,
) -> None:
    """Register a function between two stages, with a bad and a good constant."""

    def plant(b: Bench) -> Answer:
        value = b.pick(bad, good)
        b.point(lambda x: function(x, value))
        return Answer(answer, f"{{point}}:({ops})", never)

    KINDS[name] = Kind(name, plant, row, formats, harm, **options)


def zero_rows(x: Tensor) -> Tensor:
    """The first example is zero."""
    keep = torch.ones_like(x)
    keep[0] = 0
    return x * keep


def constant_column(x: Tensor) -> Tensor:
    keep = torch.ones_like(x)
    keep[..., 0] = 0
    return x * keep


# Overflow forward

OVERFLOW = "overflow forward"


def squares(x: Tensor, v: float) -> Tensor:
    return x + (x * v).square() / v


def norm_by_hand(x: Tensor, v: float) -> Tensor:
    y = x * v
    return y / (y.square().sum(-1, keepdim=True) + 1e-2).sqrt()


def variance_by_hand(x: Tensor, v: float) -> Tensor:
    y = (x + x.sigmoid()) * v
    y = y - y.mean(-1, keepdim=True)
    return y / (y.square().mean(-1, keepdim=True) + 1e-2).sqrt()


def softmax_by_hand(x: Tensor, v: float) -> Tensor:
    e = (x.sigmoid() * v).exp()
    return x + e / e.sum(-1, keepdim=True)


def sum_of_exponentials(x: Tensor, v: float) -> Tensor:
    e = (x.tanh() * 0.1 + v).exp()
    return x + e / e.sum(-1, keepdim=True) * 20


def gram(x: Tensor, v: float) -> Tensor:
    y = x.flatten(1).tanh() * 0.1 + 1
    y = y * v
    scores = y @ y.mT
    return x + (scores / (v * v)).mean()


for _row in (
    ("square overflows", "square|pow|mul", squares, 3e3, 1.0),
    ("sum overflows", "sum", lambda x, v: x + (x.sigmoid() * v).sum(-1, keepdim=True) / v, 4e4, 1.0),
    ("exp overflows", "exp", lambda x, v: x + (x.sigmoid() * v).exp() * 1e-3, 40.0, 1.0),
    ("softmax by hand overflows", "exp|sum", softmax_by_hand, 40.0, 1.0),
    ("sum of exponentials overflows", "sum", sum_of_exponentials, 10.8, 1.0),
    ("power overflows", "pow", lambda x, v: x + (x.sigmoid() * v) ** 4 * 1e-3, 60.0, 1.0),
    ("product overflows", "mul", lambda x, v: x + (x.sigmoid() * v) * ((1 - x.sigmoid()) * v) / v, 3e3, 1.0),
    ("gram matrix overflows", "matmul", gram, 300.0, 1.0),
    ("cumulative sum overflows", "cumsum", lambda x, v: x + (x.sigmoid() * v).cumsum(-1) / v * 0.1, 4e4, 1.0),
    ("norm by hand overflows", "square|pow|sum", norm_by_hand, 3e3, 1.0),
    ("variance by hand overflows", "square|pow|mean", variance_by_hand, 3e3, 1.0),
    ("cosh overflows", "cosh", lambda x, v: x + (x.sigmoid() * v).cosh() * 1e-3, 40.0, 1.0),
    ("expm1 overflows", "expm1", lambda x, v: x + (x.sigmoid() * v).expm1() * 1e-3, 40.0, 1.0),
):
    _name, _ops, _function, _bad, _good = _row
    at_point(_name, "overflow", _ops, OVERFLOW, NARROW, _function, _bad, _good, "wrong")
at_point(
    "exp overflows in float32",
    "overflow",
    "exp",
    OVERFLOW,
    ("float32", "bfloat16", "bf16", "autocast_bf16"),
    lambda x, v: x + (x.sigmoid() * v).exp() * 1e-3,
    300.0,
    1.0,
)


@kind(OVERFLOW, (*NARROW, "autocast"), "wrong")
def a_weight_too_large(b: Bench) -> Answer:
    module, place = b.layer()
    with torch.no_grad():
        module.weight.mul_(b.pick(3e5, 1.0)).clamp_(-6e4, 6e4)
    return Answer("overflow", f"{place}:(linear|conv2d)|{b.before(place)}")


@kind(OVERFLOW, (*NARROW, "autocast"), "inf", bodies=("former",))
def attention_logits_grow(b: Bench) -> Answer:
    blocks = [name for name in b.stages if name.startswith("part")]
    name = b.random.choice(blocks)
    block: Any = b.stages[name]
    with torch.no_grad():
        block.q.weight.mul_(b.pick(500.0, 1.0))
        block.k.weight.mul_(b.pick(500.0, 1.0))
    return Answer("overflow", f"{{{name}}}:matmul")


@kind(OVERFLOW, ("half",), "inf")
def a_loss_in_half_overflows(b: Bench) -> Answer:
    v = b.pick(2e3, 1.0)
    b.loss = lambda out, y: ((out + 1) * v).square().mean() / v
    b.scale = 1.0
    return Answer("overflow", ":(square|pow|mean)")


@kind(OVERFLOW, (*NARROW, "autocast"), "wrong")
def a_large_input(b: Bench) -> Answer:
    b.x = b.x.clamp(-3, 3) * b.pick(2e4, 1.0)
    with torch.no_grad():
        first: Any = b.stages["stem"]
        getattr(first, "fc", getattr(first, "conv", None)).weight.mul_(4.0)
    return Answer("overflow", "{stem}.(fc:linear|conv:conv2d)")


# Divisions

DIVISION = "division by zero, eps"


def scaled_to_one(x: Tensor, v: float) -> Tensor:
    x = zero_rows(x)
    return x / (x.square().mean(-1, keepdim=True) + v).sqrt()


def by_rsqrt(x: Tensor, v: float) -> Tensor:
    x = zero_rows(x)
    return x * (x.square().mean(-1, keepdim=True) + v).rsqrt()


def by_root_of_squares(x: Tensor, v: float) -> Tensor:
    y = (x.sigmoid() + 0.5) * v
    return x + y / y.square().mean(-1, keepdim=True).sqrt()


def over_count(x: Tensor, v: int) -> Tensor:
    return x + (x * 0.1).sum(-1, keepdim=True) / torch.tensor(v)


def standardised(x: Tensor, v: float) -> Tensor:
    y = constant_column(x)
    return (y - y.mean(0)) / (y.std(0) + v)


for _row2 in (
    ("eps is lost in a norm", "div", NARROW, scaled_to_one, 1e-8, 1e-1, "inf"),
    ("eps is lost below rsqrt", "rsqrt", NARROW, by_rsqrt, 1e-8, 1e-1, "inf"),
    ("square underflows below a root", "div", NARROW, by_root_of_squares, 1e-5, 1.0, "inf"),
    (
        "reciprocal of what underflowed",
        "reciprocal",
        NARROW,
        lambda x, v: x + ((x.sigmoid() + 0.5) * v).reciprocal() * v,
        1e-9,
        1.0,
        "inf",
    ),
    ("a count is zero", "div", ANY, over_count, 0, 3, "intrinsic"),
    (
        "eps of normalize is lost",
        "normalize|div",
        ("half",),
        lambda x, v: F.normalize(zero_rows(x), dim=-1, eps=v),
        1e-12,
        1e-2,
        "inf",
    ),
    ("a constant column is standardised", "div", ANY, standardised, 0.0, 0.1, "intrinsic"),
):
    _name, _ops, _formats, _function, _bad, _good, _harm = _row2
    at_point(_name, "division by zero", _ops, DIVISION, _formats, _function, _bad, _good, _harm)
at_point(
    "a tiny divisor",
    "overflow|division by zero",
    "div|rdiv|reciprocal|mul",
    DIVISION,
    NARROW,
    lambda x, v: x + x / ((x.sigmoid() + 0.5) * v) * v,
    1e-6,
    1.0,
)


# Logarithms, roots, domains

DOMAIN = "logarithm, root, domain"


def log_of_the_rest(x: Tensor, v: float) -> Tensor:
    return x - (1 - (x.tanh() + v).sigmoid()).log() * 0.1


for _row3 in (
    (
        "logarithm of an underflowed softmax",
        "logarithm of zero",
        "log",
        NARROW,
        lambda x, v: x - (x.tanh() * v).softmax(-1).log() * 1e-2,
        60.0,
        1.0,
        "inf",
    ),
    (
        "logarithm of a negative number",
        "logarithm of a negative number",
        "log",
        ANY,
        lambda x, v: x + (v - x.sigmoid()).log() * 0.1,
        -0.1,
        2.0,
        "intrinsic",
    ),
    (
        "logarithm of zero",
        "logarithm of zero",
        "log",
        ANY,
        lambda x, v: x + (zero_rows(x.sigmoid()) + v).log() * 0.1,
        0.0,
        0.2,
        "intrinsic",
    ),
    ("logarithm of a sure rest", "logarithm of zero", "log", LOW, log_of_the_rest, 12.0, 0.0, "inf"),
    (
        "root of a negative number",
        "root of a negative number",
        "sqrt",
        ANY,
        lambda x, v: x + (x.sigmoid() + v).sqrt(),
        -5.0,
        1.0,
        "intrinsic",
    ),
    (
        "arc cosine beyond one",
        "outside of its domain",
        "acos",
        ANY,
        lambda x, v: x + (x.tanh() * 0.4 + v).acos() * 0.1,
        1.5,
        0.0,
        "intrinsic",
    ),
    (
        "atanh of a tanh that is one",
        "outside of its domain|infinite slope|division by zero|.*domain.*|.*pole.*",
        "atanh",
        LOW,
        lambda x, v: x + (x.tanh() * 0.1 + v).tanh().atanh() * 0.1,
        5.0,
        0.0,
        "inf",
    ),
    (
        "fractional power of a negative number",
        "root of a negative number",
        "pow",
        ANY,
        lambda x, v: x + (x.sigmoid() + v) ** 2.7 * 0.1,
        -3.0,
        1.0,
        "intrinsic",
    ),
    (
        "a tensor for a fractional exponent",
        "root of a negative number|outside of its domain",
        "pow",
        ANY,
        lambda x, v: x + (x.sigmoid() + v).pow(torch.tensor(2.7, dtype=x.dtype)) * 0.1,
        -3.0,
        1.0,
        "intrinsic",
    ),
    ("mean of nothing", "mean of nothing", "mean", ANY, lambda x, v: x + x[x > v].mean(), 1e4, -1e4, "intrinsic"),
    (
        "deviation of one number",
        "variance of one number",
        "std",
        ANY,
        lambda x, v: x + (x[..., :v] + torch.linspace(0, 1, v).to(x.dtype)).std(-1, keepdim=True),
        1,
        4,
        "intrinsic",
    ),
    (
        "zero times infinity",
        "zero times infinity",
        "mul",
        ANY,
        lambda x, v: x + (x.sigmoid() * 0.0) * v,
        torch.inf,
        1.0,
        "intrinsic",
    ),
):
    _name, _answer, _ops, _formats, _function, _bad, _good, _harm = _row3
    at_point(_name, _answer, _ops, DOMAIN, _formats, _function, _bad, _good, _harm)


@kind(DOMAIN, ANY, "intrinsic")
def all_targets_are_ignored(b: Bench) -> Answer:
    if b.is_planted:
        b.y = torch.full_like(b.y, -100)
    return Answer("mean of nothing", ":(cross_entropy|nll_loss)")


# Slopes without end

SLOPE = "infinite slopes, where"


def hidden_logarithm(x: Tensor, v: float) -> Tensor:
    y = zero_rows(x.sigmoid())
    return x + torch.where(y > 0, (y + v).log(), torch.zeros_like(y)) * 0.1


def hidden_division(x: Tensor, v: float) -> Tensor:
    y = zero_rows(x.sigmoid() + 0.5)
    return x + torch.where(y > 0, 1 / (y + v), torch.zeros_like(y)) * 0.1


SLOPED = ("float32", "bfloat16", "fp16", "bf16", "autocast_bf16")
for _name, _answer, _ops, _function, _bad, _good in (
    (
        "root at zero",
        "infinite slope",
        "sqrt",
        lambda x, v: x + (zero_rows(x.sigmoid()) + v).sqrt(),
        0.0,
        0.1,
    ),
    (
        "norm of zero",
        "infinite slope",
        "sqrt",
        lambda x, v: x + (zero_rows(x.sigmoid()).square().sum(-1, keepdim=True) + v).sqrt(),
        0.0,
        0.1,
    ),
    ("power at zero", "infinite slope", "pow", lambda x, v: x + (zero_rows(x.sigmoid()) + v) ** 0.5, 0.0, 0.1),
    (
        "arc cosine at one",
        "infinite slope",
        "acos",
        lambda x, v: x + ((1 - zero_rows(x.sigmoid()) * 0.5) * v).acos(),
        1.0,
        0.5,
    ),
    ("where hides a logarithm", "logarithm of zero|infinite slope", "log", hidden_logarithm, 0.0, 0.1),
    (
        "where hides a division",
        "division by zero|infinite slope",
        "div|rdiv|reciprocal|mul",
        hidden_division,
        0.0,
        0.1,
    ),
):
    at_point(_name, _answer, _ops, SLOPE, SLOPED, _function, _bad, _good, "intrinsic", is_back=True)
