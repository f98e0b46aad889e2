"""The table of torch's operations: one row for each, and every spelling of an operation leads to its row.

To add an operation, add its name to a group of `_TABLE`, with "=" between names that torch has for the same function.
Forms in place (`div_`), operators (`__itruediv__`, `__rtruediv__`), `torch.special`, `torch.linalg` and
`torch._foreach_*` need no entry: `spelling_of` takes those forms apart. A fact about an operation is a column of `Row`.

>>> canonical("__itruediv__"), canonical("special_gammaln"), canonical("_foreach_div_")
('div', 'lgamma', 'div')
>>> row_of("rsqrt_").divides, row_of("log1p").domain
(0, Domain(low=-1.0, high=inf, holds_low=False, holds_high=True, at=0))
>>> spelling_of("__rpow__").place(0)
1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

__all__ = ["TABLE", "Domain", "Kind", "Number", "Row", "Spelling", "canonical", "row_of", "spelling_of"]


class Kind(Enum):
    """Effect of an operation on numbers."""

    ADDITION = "adds or subtracts, element by element"
    MULTIPLICATION = "multiplies, element by element"
    DIVISION = "divides by one argument, element by element"
    LOGARITHM = "takes a logarithm, element by element"
    ROOT = "takes a square root, element by element"
    POWER = "raises to a power, element by element"
    BOUNDED = "is defined on a part of the numbers, element by element"
    GAMMA = "has poles at 0, -1, -2, ..., element by element"
    GROWING = "may overflow where its arguments are far from the end of the format, element by element"
    SMOOTH = "is defined everywhere and grows no faster than its argument, element by element"
    ROUNDING = "returns whole numbers, or the fractions behind them, element by element"
    CHOICE = "returns one of its arguments, or a bound, element by element"
    BITS = "is for integers or truth values, element by element"
    COMPARISON = "returns a truth value, element by element"
    PRODUCT = "sums products"
    REDUCTION = "sums, multiplies or measures the elements of one tensor"
    MEAN = "divides a sum by a count"
    DEVIATION = "divides a sum of squares by a count less one"
    LOG_SUM = "takes the logarithm of a sum of exponentials"
    SOFTMAX = "divides exponentials by their sum"
    NORMALISATION = "divides by a deviation or a norm"
    CROSS_ENTROPY = "picks the logarithms of the probabilities of targets"
    LOSS = "computes another loss of scores and targets"
    DECOMPOSITION = "returns factors of a matrix"
    LOG_DETERMINANT = "returns the logarithm of a determinant"
    FILL = "puts given numbers into its result"
    CAST = "may change the dtype and nothing else"
    VIEW = "returns the same numbers in another shape"
    SELECTION = "returns some of the numbers, or copies"
    OTHER = "has no row"


class Number(Enum):
    """How torch's kernels treat a Python number or 0-dimensional tensor next to a tensor of low precision."""

    EXACT = "as it is"
    CAST = "in the dtype of the result"
    ON_CARD = "in the dtype of the result; as it is if it is on the CPU and the other one on a card"
    SECOND = "in the dtype of the result; on the CPU as it is if it is the second argument"


@dataclass(frozen=True)
class Domain:
    """The interval of one argument on which the results of an operation are not NaN.

    holds_low, holds_high: whether the result at that border is a number, rather than an infinity.
    at: the argument's position.
    """

    low: float = -math.inf
    high: float = math.inf
    holds_low: bool = True
    holds_high: bool = True
    at: int = 0


_POSITIVE, _NOT_NEGATIVE = Domain(0.0, holds_low=False), Domain(0.0)
_UNIT, _OPEN_UNIT = Domain(-1.0, 1.0), Domain(-1.0, 1.0, holds_low=False, holds_high=False)


@dataclass(frozen=True)
class Row:
    """Facts about an operation, for all of its spellings. Positions are those in the operation's torch function.

    name: the canonical name.
    spellings: other names of the same function.
    arguments: the names of the arguments that a column refers to, in the order of their positions.
    divides: the position of the divisor; None without one.
    domain: the numbers on which it is defined; None for all numbers.
    steep: the points at which its slope is infinite.
    adds: whether it adds numbers, so that infinities of opposite signs give NaN.
    multiplies: whether it multiplies numbers and adds none, so that zero times infinity gives NaN, in gradients too.
    scales: whether it multiplies or divides all of a tensor by one number, if it is given one.
    is_measure: whether its results are measures, not counts, even if they are whole numbers.
    underflows: whether its results may become 0 although its arguments are not 0.
    keeps_mask: whether constants far below zero stay far below zero: a mask then stays a mask.
    passes: whether infinities and NaN pass through; False for an operation that replaces them.
    makes_minus_infinity: whether it may return minus infinity for finite arguments. From any other operation, minus
        infinity is a mask.
    number: treatment of a Python number or 0-dimensional tensor next to a tensor of low precision.
    threshold: where torch casts a number to the tensor's dtype before it compares or divides: "always", "on card", or
        "" for never.
    """

    name: str
    kind: Kind
    spellings: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("input", "other")
    divides: int | None = None
    domain: Domain | None = None
    steep: tuple[float, ...] = ()
    adds: bool = False
    multiplies: bool = False
    scales: bool = False
    is_measure: bool = False
    underflows: bool = False
    keeps_mask: bool = False
    passes: bool = True
    makes_minus_infinity: bool = False
    number: Number = Number.EXACT
    threshold: str = ""


def _rows(kind: Kind, names: str, **columns: Any) -> Iterator[Row]:
    """Yield rows that differ by their names alone. names: "asin=arcsin acos=arccos", the canonical one first."""
    for group in names.split():
        name, *others = group.split("=")
        yield Row(name, kind, tuple(others), **columns)


_TABLE = (
    # Arithmetic
    _rows(Kind.ADDITION, "add sub=subtract", adds=True, keeps_mask=True, number=Number.ON_CARD),
    _rows(
        Kind.MULTIPLICATION,
        "mul=multiply",
        multiplies=True,
        scales=True,
        underflows=True,
        keeps_mask=True,
        number=Number.SECOND,
    ),
    _rows(
        Kind.DIVISION,
        "div=divide=true_divide=truediv",
        divides=1,
        steep=(0.0,),
        multiplies=True,
        scales=True,
        keeps_mask=True,
        makes_minus_infinity=True,
        number=Number.SECOND,
    ),
    _rows(Kind.DIVISION, "floor_divide=floordiv", divides=1, makes_minus_infinity=True, number=Number.SECOND),
    _rows(Kind.DIVISION, "remainder=mod fmod", divides=1, number=Number.CAST, threshold="always"),
    _rows(Kind.DIVISION, "reciprocal", divides=0, steep=(0.0,), makes_minus_infinity=True),
    _rows(
        Kind.DIVISION,
        "addcdiv",
        arguments=("input", "tensor1", "tensor2"),
        divides=2,
        makes_minus_infinity=True,
        number=Number.CAST,
    ),
    _rows(Kind.SMOOTH, "lerp", adds=True, number=Number.CAST),
    _rows(Kind.LOG_SUM, "logaddexp logaddexp2", number=Number.CAST),
    # Functions with a domain
    _rows(Kind.LOGARITHM, "log log2 log10", domain=_POSITIVE, steep=(0.0,), makes_minus_infinity=True),
    _rows(Kind.LOGARITHM, "log1p", domain=Domain(-1.0, holds_low=False), steep=(-1.0,), makes_minus_infinity=True),
    _rows(
        Kind.LOGARITHM,
        "logit",
        domain=Domain(0.0, 1.0, holds_low=False, holds_high=False),
        steep=(0.0, 1.0),
        makes_minus_infinity=True,
    ),
    _rows(
        Kind.LOGARITHM,
        "xlogy",
        domain=Domain(0.0, holds_low=False, at=1),
        steep=(0.0,),
        makes_minus_infinity=True,
        number=Number.CAST,
    ),
    _rows(
        Kind.LOGARITHM,
        "xlog1py",
        domain=Domain(-1.0, holds_low=False, at=1),
        makes_minus_infinity=True,
        number=Number.CAST,
    ),
    _rows(Kind.LOGARITHM, "entr", domain=_NOT_NEGATIVE, steep=(0.0,), makes_minus_infinity=True),
    _rows(Kind.ROOT, "sqrt", domain=_NOT_NEGATIVE, steep=(0.0,), is_measure=True),
    _rows(Kind.ROOT, "rsqrt", divides=0, domain=_NOT_NEGATIVE, steep=(0.0,), makes_minus_infinity=True),
    _rows(
        Kind.POWER,
        "pow",
        arguments=("input", "exponent"),
        steep=(0.0,),
        makes_minus_infinity=True,
        number=Number.CAST,
    ),
    _rows(Kind.POWER, "float_power", arguments=("input", "exponent"), steep=(0.0,), makes_minus_infinity=True),
    _rows(Kind.BOUNDED, "asin=arcsin acos=arccos", domain=_UNIT, steep=(-1.0, 1.0)),
    _rows(Kind.BOUNDED, "atanh=arctanh erfinv", domain=_OPEN_UNIT, steep=(-1.0, 1.0), makes_minus_infinity=True),
    _rows(Kind.BOUNDED, "acosh=arccosh", domain=Domain(1.0), steep=(1.0,)),
    _rows(
        Kind.BOUNDED,
        "ndtri",
        domain=Domain(0.0, 1.0, holds_low=False, holds_high=False),
        steep=(0.0, 1.0),
        makes_minus_infinity=True,
    ),
    _rows(
        Kind.BOUNDED,
        "bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1",
        domain=_POSITIVE,
    ),
    _rows(Kind.BOUNDED, "zeta", domain=Domain(1.0, holds_low=False), number=Number.CAST),
    _rows(Kind.BOUNDED, "igamma=gammainc igammac=gammaincc", domain=Domain(0.0, at=1), number=Number.CAST),
    _rows(Kind.GAMMA, "lgamma=gammaln"),
    _rows(Kind.GAMMA, "digamma=psi polygamma", makes_minus_infinity=True),
    _rows(Kind.GAMMA, "mvlgamma=multigammaln"),
    # Element-wise functions of all numbers
    _rows(Kind.GROWING, "exp exp2", underflows=True),
    _rows(Kind.GROWING, "expm1 cosh square i0 i1 modified_bessel_i0 modified_bessel_i1 erfcx"),
    _rows(Kind.GROWING, "sinh ldexp", makes_minus_infinity=True),
    _rows(
        Kind.GROWING,
        """
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
        legendre_polynomial_p
        """,
    ),
    _rows(Kind.SMOOTH, "sigmoid=expit", underflows=True),
    _rows(Kind.SMOOTH, "log_ndtr", makes_minus_infinity=True),
    _rows(Kind.SMOOTH, "hypot atan2=arctan2", number=Number.CAST),
    _rows(
        Kind.SMOOTH,
        """
        sin cos tan sinc atan=arctan tanh asinh=arcsinh erf erfc ndtr log_sigmoid=logsigmoid softplus gelu
        silu mish elu celu selu softsign tanhshrink angle deg2rad rad2deg i0e i1e airy_ai bessel_j0 bessel_j1
        spherical_bessel_j0
        """,
    ),
    _rows(Kind.ROUNDING, "floor ceil round trunc=fix frac frexp"),
    _rows(Kind.CHOICE, "maximum", keeps_mask=True, number=Number.CAST),
    _rows(Kind.CHOICE, "minimum fmax fmin copysign nextafter", number=Number.CAST),
    _rows(Kind.CHOICE, "clamp=clip", keeps_mask=True, number=Number.CAST, threshold="always"),
    _rows(Kind.CHOICE, "clamp_min clamp_max hardshrink", threshold="always"),
    _rows(Kind.CHOICE, "threshold softshrink", threshold="on card"),
    _rows(
        Kind.CHOICE,
        """
        abs=absolute neg=negative positive relu relu6 leaky_relu prelu rrelu hardtanh hardsigmoid hardswish heaviside
        sign sgn conj conj_physical
        """,
    ),
    _rows(Kind.CHOICE, "nan_to_num", passes=False),
    _rows(
        Kind.BITS,
        """
        bitwise_and=and bitwise_or=or bitwise_xor=xor bitwise_not=invert bitwise_left_shift=lshift
        bitwise_right_shift=rshift gcd lcm logical_and logical_or logical_xor logical_not
        """,
    ),
    _rows(Kind.COMPARISON, "eq lt=less le=less_equal gt=greater ge=greater_equal ne=not_equal"),
    _rows(Kind.BITS, "isfinite isinf isnan isneginf isposinf isreal isclose signbit equal"),
    # Sums of products
    _rows(Kind.PRODUCT, "matmul dot vdot", is_measure=True),
    _rows(Kind.PRODUCT, "addcmul", number=Number.CAST),
    _rows(
        Kind.PRODUCT,
        """
        linear mm bmm einsum addmm baddbmm addbmm addmv addr mv inner vecdot multi_dot=chain_matmul tensordot bilinear
        conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
        scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
        """,
    ),
    _rows(Kind.PRODUCT, "matrix_power matrix_exp det", makes_minus_infinity=True),
    # Reductions
    _rows(Kind.REDUCTION, "sum cumsum", adds=True),
    _rows(Kind.REDUCTION, "nansum", adds=True, passes=False),
    _rows(Kind.MEAN, "mean", adds=True, is_measure=True),
    _rows(Kind.MEAN, "nanmean", adds=True, passes=False),
    _rows(Kind.DEVIATION, "var", adds=True, is_measure=True),
    _rows(Kind.DEVIATION, "std", adds=True, is_measure=True, steep=(0.0,)),
    _rows(Kind.DEVIATION, "std_mean var_mean", adds=True),
    _rows(Kind.REDUCTION, "prod cumprod", multiplies=True, makes_minus_infinity=True),
    _rows(Kind.REDUCTION, "norm vector_norm", is_measure=True, steep=(0.0,)),
    _rows(Kind.REDUCTION, "pairwise_distance cdist", steep=(0.0,)),
    _rows(Kind.REDUCTION, "max", is_measure=True, keeps_mask=True),
    _rows(Kind.REDUCTION, "amax", is_measure=True),
    _rows(Kind.REDUCTION, "amin min"),
    _rows(Kind.LOG_SUM, "logsumexp logcumsumexp"),
    _rows(Kind.SOFTMAX, "softmax softmin", adds=True, underflows=True),
    _rows(Kind.SOFTMAX, "log_softmax", adds=True),
    _rows(
        Kind.NORMALISATION,
        """
        layer_norm=native_layer_norm group_norm=native_group_norm batch_norm=native_batch_norm instance_norm rms_norm
        """,
        adds=True,
    ),
    _rows(Kind.NORMALISATION, "normalize cosine_similarity weight_norm"),
    _rows(Kind.CROSS_ENTROPY, "cross_entropy=cross_entropy_loss nll_loss=nll_loss_nd"),
    _rows(Kind.LOSS, "kl_div binary_cross_entropy binary_cross_entropy_with_logits ctc_loss"),
    # Matrices
    _rows(Kind.DECOMPOSITION, "eigh svd eig"),
    _rows(Kind.LOG_DETERMINANT, "logdet slogdet", makes_minus_infinity=True),
    # Operations that move numbers
    _rows(Kind.FILL, "masked_fill index_fill full full_like new_full fill tensor"),
    _rows(Kind.FILL, "where", number=Number.CAST),
    _rows(Kind.CAST, "to type type_as float double half bfloat16", keeps_mask=True),
    _rows(Kind.VIEW, "view reshape unsqueeze squeeze flatten getitem"),
    _rows(Kind.SELECTION, "contiguous clone", keeps_mask=True),
)
TABLE = {row.name: row for rows in _TABLE for row in rows}

_STEMS = {name: row for row in TABLE.values() for name in (row.name, *row.spellings)}
# Names of operators. The prefix "i" gives the in-place form, and the prefix "r" the form with swapped arguments.
_OPERATORS = frozenset("add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split())
_COMMUTE = frozenset("add mul and or xor".split())
_NAMESPACES = ("foreach_", "special_", "linalg_")


@dataclass(frozen=True)
class Spelling:
    """The operation that a function's name stands for, and the order of its arguments.

    is_swapped: whether the two arguments are swapped, as in `__rtruediv__`.
    """

    row: Row
    is_swapped: bool = False

    def place(self, position: int) -> int:
        """Return the position that an argument of the row has in this spelling."""
        return 1 - position if self.is_swapped and position < 2 else position

    def find(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
        """Return the index or the name by which a call passes an argument of the row; None if it does not pass one."""
        place, names = self.place(position), self.row.arguments
        if place < len(args):
            return place
        name = names[place] if place < len(names) else None
        return name if name in kwargs else "self" if place == 0 and "self" in kwargs else None

    def get(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value that a call passes for an argument of the row; None if it passes none."""
        key = self.find(position, args, kwargs)
        return None if key is None else args[key] if isinstance(key, int) else kwargs[key]


@cache
def spelling_of(name: str) -> Spelling:
    """Return the row for a function's name, and the order of arguments. An unknown name gets a row of kind OTHER."""
    stem = name.strip("_")
    for namespace in _NAMESPACES:
        if stem not in _STEMS and stem.startswith(namespace):
            stem = stem.removeprefix(namespace)
    if stem in _STEMS:
        return Spelling(_STEMS[stem])
    if stem[1:] in _OPERATORS and stem[0] in "ir":
        return Spelling(_STEMS[stem[1:]], is_swapped=stem[0] == "r" and stem[1:] not in _COMMUTE)
    return Spelling(Row(name.strip("_"), Kind.OTHER))


def row_of(name: str) -> Row:
    """Return the facts about the operation that a function of this name computes."""
    return spelling_of(name).row


def canonical(name: str) -> str:
    """Return the name of an operation's row; without a row, the name itself without underscores around it."""
    return spelling_of(name).row.name
