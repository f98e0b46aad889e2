"""The statements of random programs: each draws its operands from what the program has, and writes lines of Python.

Only operations whose native kernel computes in float32 and rounds once are here, so that two interpreters can be
compared bit for bit. Left out, for that reason: adding a scalar that is not in the format (torch's CPU kernel rounds it
first), rsqrt, pow and alpha=, which round inside, and functions such as exp whose float32 value depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

Shape = tuple[int, ...]
T = TypeVar("T")
# What a write may do to a parameter, a buffer or an input: its master is float32, and rounding it commutes with these.
COMMUTING = (".mul_(0.5)", ".neg_()", ".zero_()", ".fill_(0.3)", ".clamp_(-0.5, 0.5)", ".abs_()", ".relu_()")
SCALES = ("1.1", "0.7", "-1.3", "0.3")
TERMS = ("0.25", "1.0", "-2.5")  # in every format, so that x + term is rounded once


@dataclass
class Memory:
    """What several variables may share.

    owner: who owns it, if it outlives the forward.
    uses: how often it was used.
    origin: another memory that this one may be.
    was_cast: whether a cast gave itself, or what is rounded from it. What stays is not written to after that: native
        code changes the result of a cast that did nothing, and a copy of a float32 master cannot follow.
    runs_again: whether a checkpoint will read it again. Nothing is written to it then: that would change the gradient.
    """

    owner: str | None = None
    uses: int = 0
    origin: Memory | None = None
    was_cast: bool = False
    runs_again: bool = False

    @property
    def first(self) -> Memory:
        return self.origin.first if self.origin else self


@dataclass
class Variable:
    name: str
    shape: Shape
    memory: Memory = field(default_factory=Memory)


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape of an element-wise result; None where there is none."""
    length = max(len(a), len(b))
    a, b = (1,) * (length - len(a)) + a, (1,) * (length - len(b)) + b
    if any(i != j and 1 not in (i, j) for i, j in zip(a, b, strict=True)):
        return None
    return tuple(max(i, j) for i, j in zip(a, b, strict=True))


class NothingFits(Exception):
    """No variable of the program can be the operand of this statement, which is left out."""


class Writer:
    """A program while it is drawn.

    format: "bf16" or "fp16".
    kinds_drawn: the kinds of statements, the more often the more often they are in it.
    has_gradients: whether a backward pass follows. Then what it may have saved is not written to behind its back.
    is_tree: whether nothing was used twice, so that no gradient is a sum whose order or rounding may differ.
    """

    def __init__(self, format: str, has_gradients: bool, kinds: Sequence[Callable[[Writer], list[str]]]) -> None:
        self.kinds_drawn = kinds
        self.format, self.has_gradients, self.is_tree = format, has_gradients, True
        self.statements: list[list[str]] = []
        self.kinds: list[str] = []
        owned = {"x": (4, 4), "y": (4, 4), "self.p": (4, 4), "self.w": (4,), "self.b": (4, 4)}
        self.variables = [Variable(name, shape, Memory(name)) for name, shape in reversed(owned.items())]
        self.dtypes: list[str] = []
        self._genes: Iterator[int] = iter(())
        self._names = 0

    def write(self, genes: tuple[int, ...]) -> None:
        """Draw one statement."""
        self._genes = iter(genes)
        kind = self.choose(self.kinds_drawn)
        with suppress(NothingFits):
            self.statements.append(kind(self))
            self.kinds.append(kind.__name__)

    def choose(self, options: Sequence[T]) -> T:
        return options[next(self._genes, 0) % len(options)]

    def new(self, shape: Shape, memory: Memory | None = None) -> str:
        self._names += 1
        name = f"v{self._names}"
        self.variables.append(Variable(name, shape, memory or Memory()))
        return name

    def operand(self, fits: Callable[[Variable], bool] = lambda v: True, is_used: bool = True) -> Variable:
        """A variable, more often a recent one; where gradients are compared, mostly one that nobody has used."""
        found = [v for v in reversed(self.variables) if fits(v)]
        if not found:
            raise NothingFits
        gene = next(self._genes, 0)
        if self.has_gradients and is_used and gene % 8:
            found = [v for v in found if not v.memory.uses] or found
        chosen = found[min(gene % 16 % len(found), gene // 16 % len(found))]
        if is_used:
            self.use(chosen)
        return chosen

    def use(self, v: Variable) -> None:
        v.memory.uses += 1
        self.is_tree = self.is_tree and v.memory.uses == 1

    def second(self, a: Variable) -> Variable:
        """An operand that broadcasts with `a`. The gradient of what is broadcast is a sum of rounded products."""
        b = self.operand(lambda v: broadcast(a.shape, v.shape) is not None)
        self.is_tree = self.is_tree and a.shape == b.shape
        return b

    def source(self, shape: Shape, target: Memory) -> Variable:
        """Numbers to write into what has this shape, from other memory: else the order of torch's loop is seen."""
        return self.operand(lambda v: broadcast(v.shape, shape) == shape and v.memory.first is not target.first)

    def cast_of(self, a: Variable, text: str) -> str:
        """A cast, which may be its operand itself."""
        a.memory.was_cast = True
        memory = a.memory if a.memory.owner else Memory(origin=a.memory)
        return f"{self.new(a.shape, memory)} = {text}"


def arithmetic(w: Writer) -> list[str]:
    a = w.operand()
    b = w.second(a)
    forms = ["{a} * {b}", "{a} + {b}", "{a} - {b}", "torch.mul({a}, {b})", "{a}.add({b})", "torch.maximum({a}, {b})"]
    if not w.has_gradients:  # three roundings in the gradient of what is below
        forms += ["{a} / ({b}.abs() + 0.5)", "torch.div({a}, {b}.abs() + 1.0)"]
    shape = broadcast(a.shape, b.shape) or ()
    return [f"{w.new(shape)} = {w.choose(forms).format(a=a.name, b=b.name)}"]


def one_operand(w: Writer, name: str) -> str:
    """An expression with one operand, that every format has exactly."""
    forms = [f"{name} * {w.choose(SCALES)}", f"{name} + {w.choose(TERMS)}", f"2.5 - {name}", f"-{name}"]
    forms += [f"{name}.abs()", f"F.relu({name})", f"{name} / 3.0", f"torch.neg({name})", f"{name}.mul(1.1)"]
    if w.format == "bf16":  # float32's square root on the CPU has an ulp that fp16 shows
        forms += [f"{name}.abs().sqrt()"] * 2
    return w.choose(forms)


def scaling(w: Writer) -> list[str]:
    a = w.operand()
    return [f"{w.new(a.shape)} = {one_operand(w, a.name)}"]


TO_FLOAT32 = (
    "{a}.float()",
    "{a}.to(torch.float32)",
    "{a}.to(dtype=torch.float32)",
    "{a}.type(torch.float32)",
    "{a}.double().float()",
    "{a}.double()",
    "{a}.to(torch.promote_types({a}.dtype, torch.float32))",
    "{a}.to(x.device, torch.float32)",
)
TO_OTHER = (
    "{a}.to({b}.dtype)",
    "{a}.type_as({b})",
    "{a}.to({b})",
    "{a}.type({b}.dtype)",
    "{a}.to(dtype={b}.dtype)",
    "{a}.to(torch.promote_types({a}.dtype, {b}.dtype))",
    "{a}.to(torch.float32 if self.keeps_float32 else {b}.dtype)",
    "{a}.to({b}.device, {b}.dtype)",
)


def cast_to_float32(w: Writer) -> list[str]:
    a = w.operand()
    return [w.cast_of(a, w.choose(TO_FLOAT32).format(a=a.name))]


def cast_like_another(w: Writer) -> list[str]:
    a, b = w.operand(), w.operand(is_used=False)
    forms = [*TO_OTHER, *(f"{{a}}.to({d})" for d in w.dtypes[-2:])]
    return [w.cast_of(a, w.choose(forms).format(a=a.name, b=b.name))]


def keep_dtype(w: Writer) -> list[str]:
    a = w.operand(is_used=False)
    w.dtypes.append(f"d{len(w.dtypes)}")
    forms = [
        "{a}.dtype",
        "torch.float32",
        "torch.float32 if {a}.dim() > 1 else {a}.dtype",
        "{a}.dtype or torch.float32",
    ]
    return [f"{w.dtypes[-1]} = {w.choose(forms).format(a=a.name)}"]


def factory(w: Writer) -> list[str]:
    a = w.operand(is_used=False)
    size = ", ".join(map(str, a.shape))
    tuple_of = f"({size},)" if size else "()"
    dtypes = ["", ", dtype=torch.float32", f", dtype={a.name}.dtype", *(f", dtype={d}" for d in w.dtypes[-1:])]
    dtype = w.choose(dtypes)
    forms = [f"torch.full({tuple_of}, 0.3{dtype})", f"torch.zeros({tuple_of}{dtype})", f"torch.ones({tuple_of}{dtype})"]
    forms += [f"torch.zeros_like({a.name})", f"{a.name}.new_zeros({tuple_of})", f"{a.name}.new_full({tuple_of}, 0.3)"]
    forms += [f"torch.full_like({a.name}, 0.3)", f"torch.tensor(0.3{dtype}).expand({tuple_of}).clone()"]
    forms += [f"torch.ones_like({a.name}, dtype=torch.float32)", f"{a.name}.new_ones({tuple_of}, dtype=torch.float32)"]
    return [f"{w.new(a.shape)} = {w.choose(forms)}"]


def views_of(name: str, shape: Shape) -> list[tuple[str, Shape]]:
    """Every way to view a variable, with the shape. None is a number: torch adds one as it adds a scalar."""
    found: list[tuple[str, Shape]] = [
        (f"{name}.detach()", shape),
        (f"{name}.data", shape),
        (f"{name}[None]", (1, *shape)),
    ]
    if shape:
        size, rest = shape[0], shape[1:]
        found += [(f"{name}[0]", rest), (f"{name}.select(0, -1)", rest), (f"{name}.unbind()[0]", rest)]
        found += [(f"{name}.unsqueeze(0)", (1, *shape)), (f"next(iter({name}))", rest)]
        count = shape[0]
        for i in rest:
            count *= i
        found += [(f"{name}.view(-1)", (count,))]
        if size == 4:
            found += [(f"{name}[:2]", (2, *rest)), (f"{name}.narrow(0, 1, 2)", (2, *rest))]
            found += [(f"{name}.chunk(2)[1]", (2, *rest)), (f"{name}.split(2)[0]", (2, *rest))]
            found += [(f"{name}[::2]", (2, *rest))]
    if len(shape) == 2:
        found += [(f"{name}.T", shape[::-1]), (f"{name}[:, 0]", shape[:1]), (f"{name}.transpose(0, 1)", shape[::-1])]
        if shape == (4, 4):
            found += [(f"{name}.diagonal()", (4,)), (f"{name}[:, :2]", (4, 2)), (f"{name}[..., 1:3]", (4, 2))]
    return [(text, seen) for text, seen in found if seen]


def view(w: Writer) -> list[str]:
    a = w.operand(lambda v: len(v.shape) < 3, is_used=False)
    text, shape = w.choose(views_of(a.name, a.shape))
    return [f"{w.new(shape, a.memory)} = {text}"]


def two_views(w: Writer) -> list[str]:
    a = w.operand(lambda v: v.shape[:1] == (4,) and len(v.shape) < 3, is_used=False)
    shape = (2, *a.shape[1:])
    first, second = (w.new(shape, a.memory) for _ in range(2))
    return [f"{first}, {second} = {a.name}.chunk(2)"]


def expanded(w: Writer) -> list[str]:
    a = w.operand(lambda v: len(v.shape) < 3)
    w.is_tree = False
    size = ", ".join(map(str, a.shape))
    return [f"{w.new((2, *a.shape), a.memory)} = {a.name}.expand(2, {size})"]


def write(w: Writer) -> list[str]:
    """A write to what the program made: any numbers, through any view."""

    def fits(v: Variable) -> bool:
        return not v.memory.owner and len(v.shape) < 3 and not (w.has_gradients and v.memory.first.runs_again)

    a = w.operand(fits, is_used=False)
    ways = [(a.name, a.shape), *views_of(a.name, a.shape)]
    if w.has_gradients and a.memory.uses:
        ways = [x for x in ways if ".data" not in x[0]]  # saved for the backward pass, and no counter would tell
    target, shape = w.choose(ways)
    source = w.source(shape, a.memory)
    w.is_tree = w.is_tree and source.shape == shape
    b = source.name
    full = b if source.shape == shape else f"{b}.expand({', '.join(map(str, shape))})"
    forms = [f"{target}.mul_({w.choose(SCALES)})", f"{target}.add_({b})", f"{target}.copy_({b})"]
    forms += [
        f"{target}[...] = {b}",
        f"{target}.fill_(0.3)",
        f"{target}.zero_()",
        f"{target}.clamp_(-0.5, 0.5)",
        f"{target}.mul_({b})",
    ]
    forms += [f"{target}.masked_fill_({target} > 0.25, 0.3)", f"torch._foreach_mul_([{target}], 1.01)"]
    forms += [f"torch._foreach_add_([{target}], [{full}])", f"{target}.div_(3.0)", f"F.relu({target}, inplace=True)"]
    forms += [f"F.relu({target}, True)"]
    forms += [f"{target}[...] *= 1.1", f"{target}[...] += {b}", f"{target}.sub_({b})", f"{target}.neg_()"]
    text = w.choose(forms)
    if not w.has_gradients:
        into = [f"torch.mul({full}, 1.1, out={target})", f"torch.add({full}, {full}, out={target})"]
        text = w.choose([text, text, *into])
    return [text]


def write_to_memory_that_stays(w: Writer) -> list[str]:
    """A write to a parameter, a buffer or an input, without a gradient."""

    def fits(v: Variable) -> bool:
        is_saved = w.has_gradients and v.memory.uses
        return bool(v.memory.owner) and len(v.shape) < 3 and not (v.memory.was_cast or is_saved)

    a = w.operand(fits, is_used=False)
    target, shape = w.choose([(a.name, a.shape), *views_of(a.name, a.shape)])
    forms = [target + form for form in COMMUTING] + [f"torch._foreach_mul_([{target}], 0.5)"]
    if a.memory.owner == "self.b":  # is stored as it was computed, and a cast to float32 reads all of it
        forms.remove(f"{target}.fill_(0.3)")
    else:
        source = w.source(shape, a.memory).name
        forms += [f"{target}.copy_({source})", f"{target}[...] = {source}"]
    return ["with torch.no_grad():", f"    {w.choose(forms)}"]


CONDITIONS = (
    "{a}.dtype == torch.float32",
    "{a}.dtype != torch.float32",
    "{a}.dtype in (torch.float16, torch.bfloat16)",
    "{a}.dtype == {b}.dtype",
    "{a}.dtype is torch.float32",
    "{a}.is_floating_point() and {a}.dtype.is_floating_point",
    "torch.finfo({a}.dtype).bits < 32",
    "{a}.dtype == {b}.float().dtype",
)


def condition(w: Writer) -> list[str]:
    a, b, c = w.operand(is_used=False), w.operand(is_used=False), w.operand()
    name = w.new(c.shape)
    text = w.choose(CONDITIONS).format(a=a.name, b=b.name)
    return [f"if {text}:", f"    {name} = {one_operand(w, c.name)}", "else:", f"    {name} = {c.name} * -0.9"]


def limits(w: Writer) -> list[str]:
    a, b = w.operand(), w.operand(is_used=False)
    forms = ["{a} * torch.finfo({b}.dtype).eps", "{a}.masked_fill({a} > 0.25, torch.finfo({b}.dtype).min)"]
    forms += ["{a} * torch.finfo({b}.dtype).tiny", "{a}.clamp(min=torch.finfo({b}.dtype).min)"]
    if w.has_gradients:
        forms = forms[:1]  # what is multiplied by a largest number becomes infinite in the backward pass
    return [f"{w.new(a.shape)} = {w.choose(forms).format(a=a.name, b=b.name)}"]


def checkpointed(w: Writer) -> list[str]:
    a = w.operand()
    b = w.second(a)
    shape = broadcast(a.shape, b.shape) or ()
    a.memory.first.runs_again = b.memory.first.runs_again = True
    block, name = f"block{len(w.statements)}", w.new(shape)
    inner = [w.choose(["c = a * b", "c = a + b", "c = a.float() * b", "c = (a.float() * 1.1).to(a.dtype) * b"])]
    for _ in range(w.choose([1, 2])):
        inner.append(f"c = {one_operand(w, 'c')}")
    inner.append(w.choose(["return c", "return c * 1.1", "return c.to(a.dtype)", "return c.float()"]))
    call = f"{name} = checkpoint({block}, {a.name}, {b.name}, use_reentrant=False)"
    return [f"def {block}(a, b):", *(f"    {line}" for line in inner), call]


def with_a_dtype(w: Writer) -> list[str]:
    a, b = w.operand(lambda v: bool(v.shape)), w.operand(is_used=False)
    dtype = w.choose(["torch.float32", f"{b.name}.dtype", "torch.float32", *w.dtypes[-1:]])
    w.is_tree = False  # it sums, and float32's order is the kernel's
    name = w.new(a.shape)
    forms = [f"F.softmax({a.name}, -1, dtype={dtype})", f"torch.softmax({a.name}, -1, {dtype})"]
    forms += [f"{a.name}.softmax(-1, dtype={dtype})"]
    return [f"{name} = {w.choose(forms)}.round(decimals=0) * {a.name}"]


def selection(w: Writer) -> list[str]:
    a = w.operand()
    b = w.operand(lambda v: v.shape == a.shape)
    forms = ["torch.where({a} > 0, {a}, {b})", "{a}.masked_fill({b} > 0.25, 0.3)", "torch.stack([{a}, {b}]).amax(0)"]
    forms += ["torch.where({b} > {a}, {a}, 0.3)", "{a}.clone()"]
    return [f"{w.new(a.shape)} = {w.choose(forms).format(a=a.name, b=b.name)}"]


def leaf(w: Writer) -> list[str]:
    a = w.operand(lambda v: not v.memory.owner or "." in v.name, is_used=False)
    forms = [f"{a.name}.detach().clone().requires_grad_()", f"{a.name}.detach().float().clone().requires_grad_()"]
    forms += ["torch.zeros(4, 4).requires_grad_()", "torch.full((4, 4), 0.3).requires_grad_(False)"]
    text = w.choose(forms)
    return [f"{w.new((4, 4) if text.startswith('torch') else a.shape)} = {text}"]


# Writes come more often than the rest: they are where a format that is kept in float32 goes wrong.
KINDS: tuple[Callable[[Writer], list[str]], ...] = (
    scaling,
    arithmetic,
    cast_to_float32,
    cast_like_another,
    view,
    write,
    factory,
    write,
    selection,
    write_to_memory_that_stays,
    two_views,
    condition,
    keep_dtype,
    checkpointed,
    write,
    scaling,
    expanded,
    limits,
    leaf,
    arithmetic,
    with_a_dtype,
)
