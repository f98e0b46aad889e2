"""Ways to ask for float32 in a forward, and ways that look so and do not: each the body of a method, as it is written.

`x` and `y` are in the model's dtype, and `wide` is `x.float() * 1.1`. HEAD has the globals, attributes and functions
that a body may use. What a pattern asks for is not written here: native code says it.
"""

from __future__ import annotations

from typing import Any

from programs import space_of
from torch import nn

HEAD = """\
import dataclasses
import enum
import functools
import operator
import typing

import torch
import torch.nn.functional as F
from torch import Tensor, float32, nn

DTYPE = torch.float32
TABLE = {"high": torch.float32, "highest": torch.float64}
UPCAST = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
NEXT = {torch.float32: torch.float64}


class Precision(enum.Enum):
    HIGH = torch.float32


@dataclasses.dataclass
class Settings:
    dtype: torch.dtype = torch.float32


class Pair(typing.NamedTuple):
    inner: torch.dtype
    outer: torch.dtype


def wide_dtype():
    return torch.float32


@functools.lru_cache
def dtype_named(name):
    return getattr(torch, name)


def cast(t, dtype=torch.float32):
    return t.to(dtype)


def cast_by_name(t, *, dtype=None):
    return t.to(dtype or torch.float32)


def cast_back(t, like, dtype=None):
    return t.to(dtype or like.dtype)


def cast_all(*tensors, dtype):
    return [t.to(dtype) for t in tensors]


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.target = dtype

    def forward(self, t):
        return t.to(self.target)


class Model(nn.Module):
    on, off, name = True, False, "float32"
    compute_dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("b", torch.randn(4, 4))
        self.cast, self.settings, self.options = Cast(torch.float32), Settings(), {"dtype": torch.float32}

    @property
    def wide_dtype(self):
        return torch.float32

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, x, y):
        found = self.pattern(x, y, x.float() * 1.1)
        return found, (found + 0.25) * 1.0123
"""

EXPRESSIONS = """
    x.float()
    x.to(torch.float32)
    x.to(torch.float)
    x.to(dtype=torch.float32)
    x.to("cpu", torch.float32)
    x.to(x.device, torch.float32)
    x.to(device=x.device, dtype=torch.float32)
    x.to(torch.float32, copy=True)
    x.to(torch.float32, non_blocking=True)
    x.type(torch.float32)
    x.type(dtype=torch.float32)
    x.type(torch.FloatTensor)
    x.type("torch.FloatTensor")
    x.double().float()
    x.double()
    x.to(torch.float64).to(torch.float32)
    x.to(float32)
    x.to(DTYPE)
    x.to(wide.dtype)
    x.to(wide)
    x.type_as(wide)
    x.type(wide.dtype)
    x.to(dtype=wide.dtype)
    x.to(self.compute_dtype)
    x.to(self.settings.dtype)
    x.to(getattr(self.settings, "dtype", None))
    x.to(self.wide_dtype)
    x.to(vars(self)["settings"].dtype)
    x.to(self.options["dtype"])
    x.to(**self.options)
    x.to(TABLE["high"])
    x.to(TABLE.get("highest", x.dtype))
    x.to(Precision.HIGH.value)
    x.to(Pair(torch.float32, x.dtype).inner)
    x.to(getattr(torch, "float32"))
    x.to(getattr(torch, self.name))
    x.to(wide_dtype())
    x.to(dtype_named("float32"))
    x.to(eval("torch.float32"))
    x.to(torch.promote_types(x.dtype, torch.float32))
    x.to(torch.promote_types(torch.float32, y.dtype))
    x.to(torch.promote_types(x.dtype, wide.dtype))
    x.to(torch.result_type(x, wide))
    x.to(torch.get_default_dtype())
    x.to(torch.empty(0).dtype)
    x.to(torch.tensor(0.0).dtype)
    x.to(**dict(dtype=torch.float32))
    x.to(*(torch.float32,))
    x.to(*[x.device, torch.float32])
    functools.partial(Tensor.to, dtype=torch.float32)(x)
    functools.partial(F.softmax, dim=-1, dtype=torch.float32)(x)
    operator.methodcaller("float")(x)
    operator.methodcaller("to", torch.float32)(x)
    Tensor.float(x)
    Tensor.to(x, torch.float32)
    x.to(torch.float32 if self.on else x.dtype)
    x.to(x.dtype if self.off else torch.float32)
    x.to([torch.float32, x.dtype][0])
    x.to((x.dtype, torch.float32)[1])
    x.to(None or torch.float32)
    x.to(self.on and torch.float32)
    x.to(UPCAST.get(x.dtype, x.dtype))
    x.to(torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype)
    x.to(torch.float32 if torch.finfo(x.dtype).bits < 32 else x.dtype)
    cast(x)
    cast(x, torch.float32)
    cast(x, dtype=torch.float32)
    cast(x, DTYPE)
    cast(x, wide.dtype)
    cast_by_name(x)
    cast_by_name(x, dtype=torch.float32)
    cast_back(x, wide)
    cast_all(x, y, dtype=torch.float32)[0]
    self.cast(x)
    (lambda t, d: t.to(d))(x, torch.float32)
    [t.to(torch.float32) for t in (x, y)][0]
    next(t.to(torch.float32) for t in (x, y))
    list(map(lambda t: t.float(), (x, y)))[1]
    torch.softmax(x, -1, torch.float32)
    torch.softmax(x, dim=-1, dtype=torch.float32)
    x.softmax(-1, torch.float32)
    F.softmax(x, -1, dtype=torch.float32)
    F.softmax(x, -1, 3, torch.float32)
    F.softmax(x, -1, dtype=self.compute_dtype)
    F.softmax(x, -1, dtype=wide.dtype)
    F.softmax(x, -1, dtype=torch.float32 if self.on else x.dtype)
    torch.log_softmax(x, -1, torch.float32)
    F.log_softmax(x, -1, dtype=torch.float32)
    x.amax(-1).to(torch.float32)
    x.sum(-1, dtype=torch.float32)
    torch.mean(x, -1, dtype=torch.float32)
    torch.cumsum(x, -1, dtype=torch.float32)
    x.cumsum(0, dtype=DTYPE)
    torch.zeros(4, 4) + x
    torch.zeros(4, 4, dtype=torch.float32) + x
    torch.full((4, 4), 0.3)
    torch.full((4, 4), 0.3, dtype=wide.dtype)
    torch.full((4, 4), 0.3, dtype=self.compute_dtype)
    torch.full((4, 4), 0.3, dtype=torch.float32 if self.on else x.dtype)
    torch.full_like(x, 0.3, dtype=torch.float32)
    torch.full_like(wide, 0.3)
    x.new_full((4, 4), 0.3, dtype=torch.float32)
    wide.new_full((4, 4), 0.3)
    torch.empty_like(x, dtype=torch.float32).copy_(x)
    torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DTYPE)
    torch.as_tensor(x, dtype=torch.float32)
    torch.arange(4) / 7 * x
    torch.arange(4, dtype=torch.float32) / 7
    torch.linspace(0, 1, 4)
    torch.eye(4) * 0.3
    torch.empty(4, 4).fill_(0.3)
    x + wide
    torch.cat([x, wide])
    torch.where(x > 0, x, wide)
    x.to(x.dtype)
    x.to(y.dtype) * 1.1
    wide.to(x.dtype)
    wide.to(dtype=y.dtype)
    wide.to(x)
    wide.type_as(x)
    wide.type(x.dtype)
    wide.type(x.type())
    wide.to(x.device, x.dtype)
    wide.to(self.p.dtype)
    wide.to(self.b.dtype)
    wide.to(self.dtype)
    wide.to(next(self.parameters()).dtype)
    wide.to((x * 1.1).dtype)
    wide.to(x.mT.dtype)
    wide.to(torch.float32 if self.off else x.dtype)
    (x * 1).to(torch.float32 if self.off else x.dtype)
    wide.to(x.dtype if self.on else torch.float32)
    wide.to([torch.float32, x.dtype][1])
    wide.to(Pair(torch.float32, x.dtype).outer)
    wide.to(x.dtype or torch.float32)
    wide.to(TABLE.get("low", x.dtype))
    wide.to(NEXT.get(x.dtype, x.dtype))
    wide.to(torch.promote_types(x.dtype, y.dtype))
    wide.to(torch.result_type(x, y))
    wide.to(*(x.dtype,))
    wide.to(**dict(dtype=x.dtype))
    functools.partial(Tensor.to, dtype=x.dtype)(wide)
    operator.methodcaller("to", x.dtype)(wide)
    operator.attrgetter("dtype")(x) and wide.to(operator.attrgetter("dtype")(x))
    wide.to(getattr(x, "dtype"))
    wide.to({"d": x.dtype}["d"])
    cast(wide, x.dtype)
    cast(wide, dtype=x.dtype)
    cast_by_name(wide, dtype=x.dtype)
    cast_back(wide, x)
    cast_all(wide, y, dtype=x.dtype)[0]
    Cast(x.dtype)(wide)
    (lambda t, d: t.to(d))(wide, x.dtype)
    [t.to(x.dtype) for t in (wide, y)][0]
    F.softmax(x, -1, dtype=torch.float32).to(x.dtype)
    F.softmax(x, -1, dtype=torch.float32 if self.off else x.dtype)
    F.softmax(wide, -1, dtype=x.dtype)
    torch.softmax(wide, -1, x.dtype)
    wide.amax(-1).to(y.dtype)
    torch.full((4, 4), 0.3, dtype=x.dtype)
    torch.full((4, 4), 0.3, dtype=torch.float32 if self.off else x.dtype)
    torch.full((4, 4), 0.3, dtype=x.dtype or torch.float32)
    torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=x.dtype)
    torch.full_like(x, 0.3)
    torch.full_like(wide, 0.3, dtype=x.dtype)
    x.new_full((4, 4), 0.3)
    wide.new_full((4, 4), 0.3, dtype=x.dtype)
    torch.where(x > 0, x, 0.3)
    x * torch.tensor(0.3)
    wide if x.dtype == torch.float32 else wide.to(x.dtype)
    wide if x.dtype == wide.dtype else wide.to(x.dtype)
    x.masked_fill(x > 0, torch.finfo(x.dtype).min)
"""

BODIES = """
    d = torch.float32
    return x.to(d)
    ---
    d = wide.dtype
    return x.to(d)
    ---
    d: torch.dtype = DTYPE
    return x.to(d)
    ---
    d, e = torch.float32, x.dtype
    return x.to(d)
    ---
    d, e = torch.float32, x.dtype
    return wide.to(e)
    ---
    (d, e), f = (x.dtype, torch.float32), 1
    return x.to(e)
    ---
    d = torch.float32 if self.on else x.dtype
    return x.to(d)
    ---
    d = torch.float32 if self.off else x.dtype
    return wide.to(d)
    ---
    d = x.dtype
    if self.on:
        d = torch.float32
    return x.to(d)
    ---
    d = x.dtype
    if self.off:
        d = torch.float32
    return wide.to(d)
    ---
    d = torch.float32
    d = x.dtype
    return wide.to(d)
    ---
    d = x.dtype
    d = torch.float32
    return x.to(d)
    ---
    d = None
    d = d or torch.float32
    return x.to(d)
    ---
    before = x.dtype
    x = x.to(torch.float32) * 1.1
    return x.to(before)
    ---
    before, x = x.dtype, x.float()
    return (x * 1.1).to(before)
    ---
    if x.dtype != torch.float32:
        x = x.to(torch.float32)
    return x * 1.1
    ---
    if x.dtype == torch.float32:
        return wide
    return wide.to(x.dtype)
    ---
    if (d := torch.float32) is not x.dtype:
        return x.to(d)
    return y
    ---
    d = torch.float32

    def inner(t):
        return t.to(d)

    return inner(x)
    ---
    d = x.dtype

    def inner(t):
        return t.to(d)

    return inner(wide)
    ---
    for d in (torch.float32, x.dtype):
        x = x.to(d) * 1.1
    return x
    ---
    for d in (x.dtype, torch.float32):
        x = x.to(d) * 1.1
    return x
    ---
    options = {"dtype": torch.float32}
    return F.softmax(x, -1, **options)
    ---
    options = {"dtype": x.dtype}
    return F.softmax(wide, -1, **options)
    ---
    options = dict(size=(4, 4), fill_value=0.3)
    return torch.full(**options, dtype=torch.float32)
    ---
    options = dict(size=(4, 4), fill_value=0.3, dtype=x.dtype)
    return torch.full(**options)
    ---
    self.seen = x.dtype
    return wide.to(self.seen)
    ---
    self.seen = torch.float32
    return x.to(self.seen)
    ---
    self.like = x
    return wide.type_as(self.like)
    ---
    d = [t.dtype for t in (x, wide)]
    return x.to(d[1])
    ---
    d = [t.dtype for t in (x, wide)]
    return wide.to(d[0])
    ---
    match self.name:
        case "float32":
            d = torch.float32
        case _:
            d = x.dtype
    return x.to(d)
    ---
    try:
        d = getattr(torch, "no such dtype")
    except AttributeError:
        d = torch.float32
    return x.to(d)
    ---
    to = x.to
    return to(torch.float32)
    ---
    to = wide.to
    return to(x.dtype)
    ---
    with torch.autocast("cpu", enabled=False):
        return x.float() * 1.1
    ---
    mask = torch.full((4, 4), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    return x + mask
    ---
    mask = torch.zeros(4, 4, dtype=x.dtype).masked_fill(x > 0, torch.finfo(x.dtype).min)
    return torch.softmax(x + mask, -1) * y
"""
_space: dict[str, Any] = {}


def patterns() -> dict[str, str]:
    """The source of a class for each pattern, by the pattern."""
    found = {line.strip(): f"return {line.strip()}" for line in EXPRESSIONS.strip().splitlines()}
    for body in BODIES.strip("\n").split("\n    ---\n"):
        lines = [line[4:] for line in body.splitlines()]
        found["; ".join(line.strip() for line in lines if line)] = "\n".join(lines)
    start = "class Pattern(Model):\n    def pattern(self, x, y, wide):\n"
    return {name: start + "\n".join(f"        {line}" for line in body.splitlines()) for name, body in found.items()}


def model_of(source: str) -> nn.Module:
    """The module of a pattern, in a namespace of its own like that of a file."""
    if not _space:
        _space.update(space_of(HEAD))
    model: nn.Module = space_of(source, _space)["Pattern"]()
    return model
