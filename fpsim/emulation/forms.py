"""The forms of a product: over which axes it sums, and how its two gradients follow from its operands.

A product is linear in each of x and w. Its gradients are therefore products of the same kind, whose operands may be
quantised again: `dx = vjp(f, at=w)(dy)`. `ByVjp` does this for any such function; the other forms are written by hand.
`contraction` turns an einsum formula into a batched product of two matrices. `in_matrices` writes a form as products of
matrices, for accumulators that torch does not have.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fpsim.tensors.accumulators import Accumulator

__all__ = [
    "Batched",
    "ByVjp",
    "Contraction",
    "Convolution",
    "Form",
    "Linear",
    "Side",
    "contraction",
    "in_matrices",
    "in_order",
    "is_contracted",
    "simplified",
]


class Side(NamedTuple):
    """Layout of an operand in a product: the axis that is summed over, and the axis along which tiles have rows."""

    axis: int
    across: int


Sides = tuple[Side, Side]
_ROWS, _COLUMNS = Side(1, 0), Side(0, 1)


class Form(Protocol):
    """One bilinear operation. Its operands have the layout that `arrange` returns."""

    fprop: Sides  # of x and w
    dgrad: Sides  # of dy and w
    wgrad: Sides  # of dy and x
    groups: int  # how many sums lie one behind the other along the axes of fprop and dgrad

    def arrange(self, x: Tensor) -> Tensor:
        """Return x or dy in the layout that the sides describe; w already has its layout."""
        ...

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, as torch computes it."""
        ...

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        """Return dx, in the shape of the given x."""
        ...

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return dw, in the shape of w."""
        ...

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of the bias: dy summed over all axes except that of the features."""
        ...


class Linear:
    """y = x w^T. x: (..., in), w: (out, in), bias: (out,). All leading axes of x are tokens, flattened in order."""

    fprop, dgrad, wgrad = (_ROWS, _ROWS), (_ROWS, _COLUMNS), (_COLUMNS, _COLUMNS)
    groups = 1

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.leading = x.shape[:-1]

    def arrange(self, x: Tensor) -> Tensor:
        # An empty tensor has no unique size for -1.
        return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        # Not `(x @ w.t()).view(...)`: autograd forbids in-place changes of a view that a Function returns.
        y = x.new_empty(*self.leading, w.shape[0])
        rows = y.view(x.shape[0], w.shape[0])
        torch.mm(x, w.t(), out=rows) if bias is None else torch.addmm(bias, x, w.t(), out=rows)
        return y

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return torch.mm(dy, w).view(*self.leading, w.shape[1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.mm(dy.t(), x)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        return self.arrange(dy).sum(0)


class Batched:
    """y = x w. x: (..., rows, inner), w: (..., inner, columns); leading axes are broadcast. There is no bias."""

    fprop = Side(-1, -2), Side(-2, -1)
    dgrad = Side(-1, -2), Side(-1, -2)
    wgrad = Side(-2, -1), Side(-2, -1)
    groups = 1

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.shapes = x.shape, w.shape

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(x, w)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(dy, w.mT).sum_to_size(self.shapes[0])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.matmul(x.mT, dy).sum_to_size(self.shapes[1])

    def bias_gradient(self, dy: Tensor) -> Tensor:
        raise AssertionError("a batched product has no bias")


class ConvolutionSettings(NamedTuple):
    """The arguments of torch.convolution other than tensors."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class Convolution:
    """A convolution of any kind. x: (batch, in, ...), w: (out, in / groups, ...), transposed: (in, out / groups, ...).

    Blocks run along channels, and along the batch for the weight gradient, as in microxcaling.
    """

    def __init__(self, x: Tensor, w: Tensor, settings: ConvolutionSettings) -> None:
        self.shapes, self.settings, self.groups = (x.shape, w.shape), settings, settings.groups
        inner, outer = (_COLUMNS, _ROWS) if settings.transposed else (_ROWS, _COLUMNS)
        self.fprop, self.dgrad, self.wgrad = (_ROWS, inner), (_ROWS, outer), (_COLUMNS, _COLUMNS)

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, w, bias, *self.settings)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        # The operator reads only the shape of x here: one expanded number replaces the memory of x.
        like_x = dy.new_empty(1).expand(self.shapes[0])
        return self._backward(dy, like_x, w, [True, False, False])[0]

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        like_w = dy.new_empty(1).expand(self.shapes[1])
        return self._backward(dy, x, like_w, [False, True, False])[1]

    def bias_gradient(self, dy: Tensor) -> Tensor:
        return dy.sum([0, *range(2, dy.dim())])

    def _backward(self, dy: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(dy, x, w, None, *self.settings, wanted)


class ByVjp:
    """Any function f(x, w) that is linear in x and in w; its gradients are vjps of f at the given operands."""

    groups = 1

    def __init__(self, x: Tensor, w: Tensor, f: Callable[[Tensor, Tensor], Tensor], sides: tuple[Sides, Sides, Sides]):
        self.shapes, self._f = (x.shape, w.shape), f
        self.fprop, self.dgrad, self.wgrad = sides

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return self._f(x, w)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            # f is linear in x, so that its gradient is the same at any x: zeros are used.
            x = dy.new_zeros(self.shapes[0]).requires_grad_()
            return torch.autograd.grad(self._f(x, w), x, dy)[0]

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            w = dy.new_zeros(self.shapes[1]).requires_grad_()
            return torch.autograd.grad(self._f(x, w), w, dy)[0]

    def bias_gradient(self, dy: Tensor) -> Tensor:
        raise AssertionError("a bias is added outside")


# The same forms, as products of matrices


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (n, i, k) by (n, k, j), and the addend: (n, i, j)
Multiplies = tuple[Multiply, ...]  # of fprop, dgrad and wgrad


def in_matrices(form: Form, multiply: Sequence[Multiply | None]) -> Form:
    """Return the same product, with the sums of fprop, dgrad and wgrad computed by `multiply`; None means by torch.

    Raises NotImplementedError for a form that is not known as a product of matrices.
    """
    for kind, made in ((Linear, _Linear), (Batched, _Batched), (Convolution, _Convolution)):
        if isinstance(form, kind):
            matrices = made(form, tuple(own or _torchs for own in multiply))  # type: ignore[arg-type]
            # The method is set on the instance, so that a product without an accumulator keeps the form's own method.
            for name, own in zip(("forward", "data_gradient", "weight_gradient"), multiply, strict=True):
                if own is None:
                    setattr(matrices, name, getattr(form, name))
            return matrices
    raise NotImplementedError(
        "This product is not known as a product of matrices, and cannot be added up in an accumulator of its own. "
        "Expected: linear layers, matrix products and convolutions; Products(accumulator=None)."
    )


def in_order(form: Form, accumulators: Sequence[Accumulator]) -> Sequence[Accumulator]:
    """Return the accumulators of the three products, with operands in the order in which `in_matrices` passes them."""
    # These forms multiply x by dy for the weight gradient. An accumulator with a format per operand expects dy first.
    is_turned = form.settings.transposed if isinstance(form, Convolution) else isinstance(form, Batched)
    return (*accumulators[:2], accumulators[2].turned) if is_turned else accumulators


def _torchs(*_: Any) -> Tensor:
    raise AssertionError("this product is torch's own")


class _Linear(Linear):
    def __init__(self, form: Linear, multiply: Multiplies) -> None:
        self.leading, self._multiply = form.leading, multiply

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        added = None if bias is None else bias.expand(1, x.shape[0], w.shape[0])
        return self._multiply[0](x[None], w.t()[None], added).reshape(*self.leading, w.shape[0])

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return self._multiply[1](dy[None], w[None], None).view(*self.leading, w.shape[1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._multiply[2](dy.t()[None], x[None], None)[0]


class _Batched(Batched):
    def __init__(self, form: Batched, multiply: Multiplies) -> None:
        self.shapes, self._multiply = form.shapes, multiply

    def _product(self, multiply: Multiply, a: Tensor, b: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        flat = [x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b)]
        return multiply(flat[0], flat[1], None).view(*batch, a.shape[-2], b.shape[-1])

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(self._multiply[0], x, w)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return self._product(self._multiply[1], dy, w.mT).sum_to_size(self.shapes[0])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._product(self._multiply[2], x.mT, dy).sum_to_size(self.shapes[1])


class _Convolution(Convolution):
    """Convolution whose outputs are sums over channels, and in each channel over the kernel's positions in order."""

    def __init__(self, form: Convolution, multiply: Multiplies) -> None:
        self.shapes, self.settings, self.groups = form.shapes, form.settings, form.groups
        self.fprop, self.dgrad, self.wgrad = form.fprop, form.dgrad, form.wgrad
        self._multiply = multiply

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if self.settings.transposed:
            return self._transposed(self._multiply[0], x, w, _transposed_size(x.shape, w.shape, self.settings), bias)
        return self._plain(self._multiply[0], x, w, bias)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        if self.settings.transposed:
            return self._plain(self._multiply[1], dy, w, None)
        return self._transposed(self._multiply[1], dy, w, self.shapes[0], None)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        outer, inner = (x, dy) if self.settings.transposed else (dy, x)
        groups, w = self.settings.groups, self.shapes[1]
        rows = outer.unflatten(1, (groups, -1)).movedim(0, 2).flatten(2)  # (groups, out, batch and positions)
        patches = _patches(inner, w[2:], self.settings, outer.shape[2:])
        return self._multiply[2](rows, patches, None).reshape(w)

    def _plain(self, multiply: Multiply, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        s = self.settings
        out = [
            (size + 2 * p - d * (k - 1) - 1) // step + 1
            for size, p, d, k, step in zip(x.shape[2:], s.padding, s.dilation, w.shape[2:], s.stride, strict=True)
        ]
        columns = w.unflatten(0, (s.groups, -1)).flatten(2).mT  # (groups, in and positions of the kernel, out)
        y = multiply(_patches(x, w.shape[2:], s, out), columns, _rows_of(bias, s.groups, x.shape[0], out))
        return _from_rows(y, x.shape[0], out)

    def _transposed(self, multiply: Multiply, x: Tensor, w: Tensor, size: Sequence[int], bias: Tensor | None) -> Tensor:
        """Insert zeros between the elements of x, and convolve the result with the flipped kernel."""
        s, n = self.settings, len(w.shape) - 2
        spread = x.new_zeros(*x.shape[:2], *((length - 1) * step + 1 for length, step in zip(x.shape[2:], s.stride)))
        places: tuple[Any, ...] = (..., *(slice(None, None, step) for step in s.stride))
        spread[places] = x
        pads = []
        for i in reversed(range(n)):
            before = s.dilation[i] * (w.shape[2 + i] - 1) - s.padding[i]
            behind = size[2 + i] + s.dilation[i] * (w.shape[2 + i] - 1) - before - spread.shape[2 + i]
            pads += [before, behind]
        spread = F.pad(spread, pads)
        turned = w.flip([*range(2, n + 2)]).unflatten(0, (s.groups, -1)).transpose(1, 2)  # (groups, out, in, ...)
        one = [1] * n
        plain = ConvolutionSettings(one, [0] * n, s.dilation, False, [0] * n, s.groups)
        out = list(size[2:])
        y = multiply(
            _patches(spread, w.shape[2:], plain, out), turned.flatten(2).mT, _rows_of(bias, s.groups, x.shape[0], out)
        )
        return _from_rows(y, x.shape[0], out)


def _transposed_size(x: torch.Size, w: torch.Size, s: ConvolutionSettings) -> list[int]:
    lists = zip(x[2:], s.stride, s.padding, s.dilation, w[2:], s.output_padding, strict=True)
    return [x[0], w[1] * s.groups, *((n - 1) * step - 2 * p + d * (k - 1) + o + 1 for n, step, p, d, k, o in lists)]


def _patches(x: Tensor, kernel: Sequence[int], s: ConvolutionSettings, out: Sequence[int]) -> Tensor:
    """Return the inputs of each output: (groups, batch and output positions, channels and positions of the kernel)."""
    n = len(kernel)
    x = F.pad(x, [p for pad in reversed(s.padding) for p in (pad, pad)])
    for i in range(n):
        x = x.unfold(2 + i, s.dilation[i] * (kernel[i] - 1) + 1, s.stride[i])[..., :: s.dilation[i]]
        # With a stride, the last inputs may belong to no output: the weight gradient has fewer positions.
        x = x.narrow(2 + i, 0, out[i])
    x = x.unflatten(1, (s.groups, -1)).movedim(2, n + 2)  # (batch, groups, positions, channels, kernel)
    return x.transpose(0, 1).reshape(s.groups, x.shape[0] * math.prod(out), x.shape[n + 2] * math.prod(kernel))


def _rows_of(bias: Tensor | None, groups: int, batch: int, out: Sequence[int]) -> Tensor | None:
    if bias is None:
        return None
    per_group = bias.view(groups, 1, -1)
    return per_group.expand(groups, batch * math.prod(out), per_group.shape[2])


def _from_rows(y: Tensor, batch: int, out: Sequence[int]) -> Tensor:
    """Rearrange (groups, batch and positions, channels) as (batch, groups and channels, positions)."""
    return y.unflatten(1, (batch, *out)).movedim(-1, 1).movedim(2, 0).flatten(1, 2).contiguous()


# Formulas of einsum


_LETTERS = string.ascii_letters


def simplified(args: tuple[Any, ...]) -> tuple[list[str], list[Tensor], str] | None:
    """Return terms, operands and result of torch.einsum's arguments, without ellipses, each letter once in a term.

    Letters of a single operand are summed, repeated letters are read along the diagonal, and axes of length 1 that are
    broadcast are dropped. Returns None for arguments that torch refuses.
    """
    read = _read(args)
    if read is None:
        return None
    terms, operands, out = read
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    simple = [
        _simple_term(term, x, sizes, set(out).union(*(t for j, t in enumerate(terms) if j != i)))
        for i, (term, x) in enumerate(zip(terms, operands, strict=True))
    ]
    terms = [term for term, _ in simple]
    if set(out) - set("".join(terms)) or len(set(out)) != len(out):
        return None
    return terms, [x for _, x in simple], out


def is_contracted(args: tuple[Any, ...]) -> bool:
    """True if torch.einsum, given these arguments, sums products of several operands, or refuses them."""
    read = _read(args)
    if read is None:
        return True
    terms, operands, out = read
    found: set[str] = set()  # letters of the operands before, if their axes are longer than 1
    for term, x in zip(terms, operands, strict=True):
        letters = {letter for letter, size in zip(term, x.shape, strict=True) if size != 1}
        if (letters & found) - set(out):
            return True
        found |= letters
    return False


def _read(args: tuple[Any, ...]) -> tuple[list[str], list[Tensor], str] | None:
    """Return the terms without an ellipsis, the operands and the result; None for arguments that torch refuses."""
    if isinstance(args[0], str):
        rest = args[1:]
        operands = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
        left, arrow, right = args[0].replace(" ", "").partition("->")
        terms, out = left.split(","), right if arrow else None
    # In the other form of arguments, each operand is followed by a list of the numbers of its axes.
    else:
        operands, lists = list(args[0 : len(args) // 2 * 2 : 2]), list(args[1::2])
        terms = [_from_numbers(numbers) for numbers in lists]
        out = _from_numbers(args[-1]) if len(args) % 2 else None
    if len(terms) != len(operands) or not all(isinstance(x, Tensor) for x in operands):
        return None
    expanded = _without_ellipses(terms, operands, out)
    return None if expanded is None else (expanded[0], operands, expanded[1])


def _from_numbers(numbers: Any) -> str:
    return "".join("..." if n is Ellipsis else _LETTERS[n] for n in numbers)


def _without_ellipses(terms: list[str], operands: list[Tensor], out: str | None) -> tuple[list[str], str] | None:
    """Return the terms and the result with letters for every axis; None if the numbers of axes do not fit."""
    unused = [c for c in _LETTERS if c not in "".join([*terms, out or ""])]
    hidden = [x.dim() - len(t.replace("...", "")) if "..." in t else 0 for t, x in zip(terms, operands, strict=True)]
    most = max(hidden, default=0)
    names = "".join(unused[:most])
    # The last names are used: ellipses of different lengths are aligned at the right, as broadcasting aligns axes.
    full = [t.replace("...", names[most - n :]) for t, n in zip(terms, hidden, strict=True)]
    if any(n < 0 for n in hidden) or any(len(t) != x.dim() for t, x in zip(full, operands, strict=True)):
        return None
    # Without an arrow, the result has the ellipsis first, then the letters that appear once, in alphabetical order.
    if out is None:
        together = "".join(terms).replace("...", "")
        return full, names + "".join(sorted(c for c in set(together) if together.count(c) == 1))
    return full, out.replace("...", names)


def _simple_term(term: str, x: Tensor, sizes: dict[str, int], wanted: set[str]) -> tuple[str, Tensor]:
    """Return a term and its operand without repeated letters, unwanted letters and broadcast axes.

    wanted: the letters of the other terms and of the result.
    """
    letters = "".join(dict.fromkeys(term))
    kept = "".join(c for c in letters if c in wanted)
    if kept != term:
        x = torch.einsum(f"{term}->{kept}", x)
    broadcast = [i for i, c in enumerate(kept) if x.shape[i] == 1 != sizes[c]]
    if broadcast:
        x = x.squeeze(broadcast)
        kept = "".join(c for i, c in enumerate(kept) if i not in broadcast)
    return kept, x


@dataclass(frozen=True)
class Contraction:
    """Contraction of two operands, described by the letters of their axes.

    equation: the formula that torch.einsum takes.
    batch: letters of both operands and the result.
    inner: letters of both operands, which are summed over.
    rows: letters of the first operand and the result.
    columns: letters of the second operand and the result.
    """

    equation: str
    batch: str
    inner: str
    rows: str
    columns: str

    @property
    def _terms(self) -> tuple[str, str, str]:
        left, _, out = self.equation.partition("->")
        a, b = left.split(",")
        return a, b, out

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return (batch, rows, inner) and (batch, inner, columns); without the batch if the operands have none."""
        of_a, of_b, _ = self._terms
        return (
            _grouped(a, of_a, self.batch, self.rows, self.inner),
            _grouped(b, of_b, self.batch, self.inner, self.columns),
        )

    def result(self, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Rearrange (batch, rows, columns) to the letters of the result."""
        of_a, of_b, out = self._terms
        sizes = dict(zip(of_a + of_b, (*a.shape, *b.shape), strict=True))
        letters = self.batch + self.rows + self.columns
        y = y.reshape([sizes[c] for c in letters])
        return y.permute([letters.index(c) for c in out])


def contraction(a: str, b: str, out: str) -> Contraction:
    """Return the contraction of two `simplified` terms; the result has every letter that only one operand has."""
    batch = "".join(c for c in a if c in b and c in out)
    inner = "".join(c for c in a if c in b and c not in out)
    rows, columns = ("".join(c for c in t if c not in other) for t, other in ((a, b), (b, a)))
    return Contraction(f"{a},{b}->{out}", batch, inner, rows, columns)


def _grouped(x: Tensor, term: str, batch: str, first: str, second: str) -> Tensor:
    x = x.permute([term.index(c) for c in batch + first + second])
    shape = [math.prod(x.shape[: len(batch)])] if batch else []
    middle = len(batch) + len(first)
    return x.reshape(*shape, math.prod(x.shape[len(batch) : middle]), math.prod(x.shape[middle:]))
