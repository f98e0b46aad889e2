"""Attention: the points at which softmax(q k^T) v rounds, in the order of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from fpsim.checks import known_arguments, require_whole, require_word, shown
from fpsim.formats.blocks import BlockFormat
from fpsim.formats.floats import FloatFormat
from fpsim.policies.operand import (
    Operand,
    OperandLike,
    ProductSpecs,
    as_operand,
    in_accumulators,
    stochastic,
    with_rounding,
)
from fpsim.tensors.accumulators import ACCUMULATORS, Accumulator, as_accumulator

__all__ = ["Attention", "for_each_query_head", "scaled_and_masked"]

OPERANDS = ("q", "k", "v", "p", "do", "ds")  # operands of the six products
RESULTS = ("s", "diff", "exp", "o", "dp")  # points whose numbers enter no product
IN_BLOCKS = ("p", "v", "do")  # with `block_kv`, the operands of products that run for each block of keys


@known_arguments()
@dataclass(frozen=True)
class Attention:
    """The points at which an attention rounds: `Products(attention=Attention(q="e4m3fn", ...))`.

    The attention computes

        s = q k^T                          dp = do v^T
        diff = s - max(s)                  ds = p (dp - sum(do o))
        exp = exp(diff)                    dq = ds k
        p = exp / sum(exp)                 dk = ds^T q
        o = p v                            dv = p^T do

    and each name is a point. `q`, `k`, `v`, `p`, `do`, `ds` are rounded as they enter their products, so blocks lie
    along the axis over which the product sums; their other uses are float32. `s`, `diff`, `exp`, `o` and `dp` are
    rounded when they are computed, to a format of single numbers. Between `s` and `diff` the scores are scaled and
    masked, in float32, or as in the model's own code; the gradient `ds` has that scale as it enters its products. A
    point left at None rounds nothing. The roles of a policy round the same tensors too, after these points.

    By default all keys are one block, and `p` is divided by the sum before its product, as in torch's unfused code.
    With `block_kv` the order is that of flash-attention (Dao 2023, algorithm 1). For one block of keys after the other,
    the maximum so far is subtracted, and `p` is exp itself. Sums and `o` are multiplied by exp(old maximum - new one)
    in float32, and `o` is divided at the end. The backward pass computes `p` again at the final maximum, divided by the
    sum. `diff` and `exp` are natural logarithms and powers of e.

    The points apply to `scaled_dot_product_attention`, `nn.MultiheadAttention`, and code that calls `matmul`, `bmm`,
    `baddbmm` or `einsum` around `softmax`. Among the products of two activations, `q k^T` is the product whose operands
    come from no softmax and from no product of activations; the other one is `p v`. A softmax of other numbers, such as
    that of a router, is left alone. Dropout between softmax and product is torch's own.

    Args:
        q, k, v, p, do, ds: a format of single numbers or of blocks, its name, an `Operand`, or a function `f(x, axis)`.
        s, diff, exp, o, dp: a format of single numbers, its name, or an `Operand` with one.
        block_kv: the number of keys in a block; the last block may be shorter. None is all keys.
        p_scale: a power of two. `p` is multiplied by it before it is rounded, and the product with `p` is divided by
            it: 256 uses the range of E4M3, whose largest value is 448, for numbers up to 1.
        accumulator: the accumulator of all six products, as in `Products`.

    Raises:
        ValueError: for a value that is no operand, a block format at a point of single numbers, a transform, a source,
            a `p_scale` that is not a power of two or is given without `p`, and, with `block_kv`, delayed scales and
            `ste="clip"` of `p`, `v` and `do`.
        TypeError: as `Operand` does.

    >>> print(Attention(q="e4m3fn", k="e4m3fn", v="e4m3fn", p="e4m3fn", p_scale=256, block_kv=128))
    q=e4m3fn, k=e4m3fn, v=e4m3fn, p=e4m3fn, block_kv=128, p_scale=256
    """

    q: OperandLike = None
    k: OperandLike = None
    v: OperandLike = None
    s: OperandLike = None
    diff: OperandLike = None
    exp: OperandLike = None
    p: OperandLike = None
    o: OperandLike = None
    do: OperandLike = None
    dp: OperandLike = None
    ds: OperandLike = None
    block_kv: int | None = None
    p_scale: float = 1
    accumulator: Accumulator | FloatFormat | str | None = None

    def __post_init__(self) -> None:
        for name in (*OPERANDS, *RESULTS):
            value = getattr(self, name)
            operand = None if value is None else as_operand(name, value)
            if operand is not None:
                self._require(name, operand)
            object.__setattr__(self, name, operand)
        if self.block_kv is not None:
            require_whole("block_kv", self.block_kv, 1)
        self._require_scale()
        if self.accumulator is not None:
            object.__setattr__(self, "accumulator", as_accumulator(self.accumulator))

    def _require(self, name: str, operand: Operand) -> None:
        """Raise ValueError for an operand that this point cannot have."""
        if operand.hadamard is not None or operand.source != "original":
            raise ValueError(
                f"{name}={operand} has a transform or a source. Expected: a format with its rounding. An operand that "
                f"is transformed is a function of your own, f(x, axis)."
            )
        if name in RESULTS and (operand.is_own or isinstance(operand.fmt, BlockFormat) or operand.ste == "clip"):
            raise ValueError(
                f"{name}={operand} was given for a point that enters no product. Expected: a format of single numbers, "
                f"such as 'bf16'."
            )
        if self.block_kv is not None and name in IN_BLOCKS and (operand.is_delayed or operand.ste == "clip"):
            raise ValueError(
                f"{name}={operand} was given with block_kv={self.block_kv}, and each block of keys would have a "
                f"history or a mask of its own. Expected: the scale of the numbers at hand and ste='pass'; or no "
                f"block_kv."
            )

    def _require_scale(self) -> None:
        scale = self.p_scale
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not 0 < scale < math.inf or math.frexp(scale)[0] != 0.5 or not 2**-64 <= scale <= 2**64:
            raise ValueError(
                f"p_scale={shown(scale)} is invalid. Expected: a power of two from 2**-64 to 2**64, such as 256."
            )
        if scale != 1 and self.p is None:
            raise ValueError(f"p_scale={scale} was given without p, and changes nothing. Expected: p='e4m3fn', or 1.")

    @property
    def is_plain(self) -> bool:
        """True if no point is set: torch alone then computes the attention."""
        is_rounded = any(getattr(self, name) is not None for name in (*OPERANDS, *RESULTS))
        return not is_rounded and self.block_kv is None and self.accumulator is None

    @property
    def is_delayed(self) -> bool:
        """True if the scale of any operand depends on earlier steps."""
        return any(o is not None and o.is_delayed for o in self._operands(*OPERANDS))

    def point(self, name: str) -> Operand | None:
        """Return the operand at a point, such as "q". Raises ValueError for any other name."""
        require_word("name", name, (*OPERANDS, *RESULTS))
        return self._operands(name)[0]

    def _operands(self, *names: str) -> list[Operand | None]:
        return [getattr(self, name) for name in names]

    def _specs(self, fprop: str, dgrad: str, wgrad: str, result: str, error: str | None) -> ProductSpecs:
        one, two, three = (tuple(self._operands(*words.split())) for words in (fprop, dgrad, wgrad))
        given = self.accumulator
        assert given is None or isinstance(given, Accumulator)
        own = ACCUMULATORS["fp32"] if given is None else given
        accumulators, scaled = in_accumulators((own, own, own), one, two, three)  # type: ignore[arg-type]
        rounded, of_error = self.point(result), None if error is None else self.point(error)
        return ProductSpecs(one, two, three, None, accumulators, scaled, rounded, of_error)  # type: ignore[arg-type]

    @cached_property
    def qk(self) -> ProductSpecs:
        """The specs of s = q k^T, and of the products of its gradients."""
        return self._specs("q k", "ds k", "ds q", "s", None)

    @cached_property
    def pv(self) -> ProductSpecs:
        """The specs of o = p v, and of the products of its gradients."""
        return self._specs("p v", "do v", "do p", "o", "dp")

    def with_rounding(self, rounding: str) -> Attention:
        """Return the same points, with another rounding of each."""
        names = (*OPERANDS, *RESULTS)
        changed = [with_rounding(o, rounding) for o in self._operands(*names)]
        return replace(self, **dict(zip(names, changed, strict=True)))  # type: ignore[arg-type]

    def with_stochastic_gradients(self, most_bits: int) -> Attention:
        """Return the same points, with do and ds rounded stochastically in formats of at most `most_bits` bits."""
        require_whole("most_bits", most_bits, 1)
        do, ds = (stochastic(o, most_bits) for o in self._operands("do", "ds"))
        return replace(self, do=do, ds=ds)

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={str(value).removesuffix(' nearest_even')}")
        return ", ".join(words)


# The parts of `scaled_dot_product_attention` that all emulations of it have in common


def for_each_query_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the queries, repeated as by `enable_gqa`."""
    repeated = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return next(repeated), next(repeated)


def scaled_and_masked(
    scores: Tensor, head_size: int, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the softmax's operand: the scores times their scale, plus a float mask or with -inf at hidden keys."""
    scores = scores * (1 / math.sqrt(head_size) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
