"""Treatment of each torch function by the emulation: a table by name, and the fields of its entries.

To pass a function through untouched, add its name to PASS; to treat it as one that moves values, add it to MOVE. The
operands and the result of a function in neither table are rounded. `Action` explains each treatment.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fpsim.emulation import recurrent
from fpsim.emulation.casts import CAST_NAMES, FACTORIES, FACTORIES_LIKE
from fpsim.emulation.forms import is_contracted
from fpsim.emulation.marks import note_inference_write
from fpsim.emulation.operations import TABLE, Kind, Number, spelling_of
from fpsim.emulation.scope import active
from fpsim.torch_internals import written_arguments
from fpsim.torch_modes import body_of

__all__ = [
    "LOOK_UPS",
    "NARROWING",
    "QUOTIENT_OF_NUMBER",
    "REFUSE",
    "SHAPE_OF_OTHERS",
    "WRITTEN_TO",
    "Action",
    "Call",
    "call_of",
    "in_order",
    "known_calls",
    "only_multiplies",
]


class Action(Enum):
    """Treatment of a call."""

    PASS = "it computes nothing in the format: metadata, random numbers, autograd's controls"
    DTYPE = "it asks a tensor for its dtype"
    READ = "it reads values and returns none of the format: comparisons, indices, numbers of Python"
    SET_DATA = "it puts other memory into a tensor, which takes the other's dtype"
    FOREACH = "it does what a method of one name does, with each tensor of a list"
    FACTORY = "it makes a tensor of nothing but sizes and numbers"
    LIKE = "it makes a tensor like another one"
    FILL = "it writes new numbers over all of a tensor, which keeps its format"
    STEP = "it returns the next number of the format"
    CAST = "it may move values between float32 and the format"
    MOVE = "the values that come out are values that went in, or their negatives: views, copies, selections"
    SET_ITEM = "it moves values into a tensor"
    REFUSE = "it hides several operations in one, and there is no emulation of its inside"
    DECOMPOSE = "it hides several operations in one, and they are emulated one by one"
    COMPUTE = "its operands are brought into the format, and its result is rounded"


PASS = frozenset(
    """
    __set__ __delete__ __hash__ __len__ __index__ __repr__ __str__ __format__
    __dir__ __reduce__ __reduce_ex__ __setstate__ __deepcopy__ __array__ __dlpack__ __dlpack_device__
    size stride dim ndimension numel nelement element_size storage_offset data_ptr is_contiguous is_pinned
    storage untyped_storage get_device is_floating_point is_complex is_signed is_inference is_same_size
    is_set_to is_shared has_names requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward
    grad numpy detach_
    promote_types can_cast is_tensor is_storage record_stream pin_memory share_memory_
    resize_ randint randperm randint_like from_numpy
    tril_indices triu_indices one_hot manual_seed seed initial_seed _assert _assert_async _is_view
    set_default_dtype get_default_dtype set_grad_enabled is_grad_enabled
    """.split()
)
# In-place comparisons write zeros and ones. Every format of activations has both: only e8m0, for scales, has no zero.
COMPARISONS = frozenset(
    form
    for row in TABLE.values()
    if row.kind is Kind.COMPARISON
    for name in (row.name, *row.spellings)
    for form in (name, f"__{name}__")
)
# Functions of lists that compare tensors with a number. The same functions of single tensors take no number.
_FOREACH_THRESHOLDS = frozenset("_foreach_maximum _foreach_minimum _foreach_maximum_ _foreach_minimum_".split())
READ = COMPARISONS | frozenset(
    """
    item tolist __bool__ __int__ __float__ __contains__ is_nonzero allclose equal isclose isfinite isnan isinf isneginf
    isposinf argmax argmin argsort nonzero argwhere logical_and logical_or logical_not logical_xor signbit searchsorted
    bucketize bincount count_nonzero multinomial
    """.split()
)
# Functions that write new numbers over all of a tensor.
FILL = frozenset("fill_ zero_ normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_".split())
# Functions that move values. The result may share memory with an argument: a write to it then writes to the argument.
VIEWS = frozenset(
    """
    data detach alias T mT H mH real imag view_as_real view_as_complex values _values view view_as reshape reshape_as
    flatten unflatten squeeze unsqueeze squeeze_ unsqueeze_ transpose transpose_ t t_ permute swapaxes swapdims movedim
    moveaxis adjoint expand expand_as broadcast_to broadcast_tensors contiguous narrow select diagonal unfold as_strided
    chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind meshgrid atleast_1d atleast_2d atleast_3d
    __getitem__ ravel positive resolve_conj resolve_neg __iter__ cpu cuda
    """.split()
)
# Functions that move values, and relu, max and abs. Their results are numbers of their operands, the negatives of such
# numbers, or zeros: rounding changes none of these.
MOVE = VIEWS | frozenset(
    """
    complex clone cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag
    index_select gather take take_along_dim masked_select flip fliplr flipud roll rot90 tile repeat repeat_interleave
    unique unique_consecutive tril triu diag diag_embed sort topk kthvalue median mode
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d pixel_shuffle pixel_unshuffle channel_shuffle
    relu relu_ max min amax amin maximum minimum abs neg negative __neg__ __abs__ cummax cummin embedding
    _pack_padded_sequence __reversed__
    """.split()
)
# Functions that accept a dtype as a positional argument.
TAKES_DTYPE = frozenset(
    """
    softmax log_softmax softmin sum nansum mean nanmean prod cumsum cumprod norm linalg_norm linalg_vector_norm
    linalg_matrix_norm vector_norm matrix_norm randint randint_like randperm view one_hot
    """.split()
)
REFUSE = {
    "_transformer_encoder_layer_fwd": "call nn.TransformerEncoderLayer with a gradient or in training mode",
    "_native_multi_head_attention": "call nn.MultiheadAttention with a gradient or in training mode",
    **dict.fromkeys(("quantized_lstm", "quantized_gru"), "quantise the float32 module instead"),
}
# Arguments that are statistics or masks, not operands: (positions, names), by the function or by its name.
_STATISTICS = ("running_mean", "running_var")
_OPERATORS = """
    batch_norm instance_norm native_batch_norm cudnn_batch_norm
    _native_batch_norm_legit _native_batch_norm_legit_no_training
    """
NOT_OPERANDS: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {
    **dict.fromkeys((F.batch_norm, F.instance_norm), ((1, 2), _STATISTICS)),
    **dict.fromkeys(_OPERATORS.split(), ((3, 4), _STATISTICS)),  # torch's operators have the weight and the bias first
}
# Arguments that take no part in type promotion, by function: they are only compared, or multiplied into the result.
ONLY_COMPARED = {
    **dict.fromkeys(
        (F.binary_cross_entropy_with_logits, torch.binary_cross_entropy_with_logits),
        ((0, 2), ("input", "weight", "pos_weight")),
    ),
    F.cosine_embedding_loss: ((2,), ("target",)),
    F.hinge_embedding_loss: ((1,), ("target",)),
}
# Functions that torch implements as two operations, of which the first one may return float32.
_IN_TWO = (torch.ldexp, Tensor.ldexp, Tensor.ldexp_)
QUOTIENT_OF_NUMBER = Tensor.__rtruediv__  # 3.0 / x, which torch computes as x.reciprocal() * 3.0
# Functions that always return float64.
_FLOAT64 = ("float_power",)
# Functions of several steps whose backward pass searches for the result among the candidates: the result has to stay
# unrounded, and a copy of it is rounded.
CHOOSE_INSIDE = ("linalg_matrix_norm", "matrix_norm", "linalg_norm", "norm", "linalg_cond", "cond")
# Rows looked up in a weight are activations. Their gradient, which is summed into the weight's gradient, is an error.
LOOK_UPS = ("embedding",)
# Functions that move each of several tensors, which keep their dtypes.
EACH = frozenset("broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d".split())
# Functions whose result has the dtype of their first argument. Of the other arguments they take the shape, or numbers
# to copy.
SHAPE_OF_OTHERS = ("view_as", "expand_as", "reshape_as")
STORED_AS_FIRST = ("huber_loss", "soft_margin_loss")  # computed with all, and stored in the dtype of the first one
COPIES_INTO_FIRST = ("diagonal_scatter", "select_scatter", "slice_scatter", "as_strided_scatter")
# Functions that return their argument itself if they drop nothing, and whether they drop by default.
DROPS = {
    **dict.fromkeys("dropout dropout2d dropout3d feature_dropout".split(), True),
    **dict.fromkeys("alpha_dropout feature_alpha_dropout".split(), False),
}
# Operations that bring their operands into the format, as autocast does, unless all of them are float32 on purpose. All
# others follow torch's type promotion: if one operand is float32 on purpose, the result is, too.
NARROWING = frozenset(
    """
    linear matmul mm bmm mv dot addmm addmm_ addbmm addbmm_ baddbmm baddbmm_ addmv addmv_ addr inner vdot
    rmatmul linalg_matmul linalg_multi_dot linalg_vecdot chain_matmul einsum tensordot bilinear inner_product
    conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    layer_norm group_norm batch_norm instance_norm rms_norm native_layer_norm native_group_norm native_batch_norm
    scaled_dot_product_attention multi_head_attention_forward
    """.split()
)

NO_OPERANDS = ("alpha", "value", "out")  # names of their arguments that are numbers, or are written to
# Functions that bring integers into the dtype of the other operands, although their row has no `Number`. In any other
# function without a `Number`, integers are indices, labels or counts.
PROMOTING = frozenset(
    """
    cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag max min diff
    outer ger kron addr addr_ inner einsum
    mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss gaussian_nll_loss kl_div soft_margin_loss
    binary_cross_entropy_with_logits margin_ranking_loss cosine_similarity trapezoid trapz cumulative_trapezoid
    """.split()
)
# Functions that first expand a 0-dimensional tensor to the shape of the other one: it then takes part in promotion.
EXPANDING = frozenset(
    """
    mse_loss l1_loss smooth_l1_loss kron einsum hstack vstack dstack column_stack row_stack
    cosine_similarity trapezoid trapz cumulative_trapezoid
    """.split()
)

# Names of operands. The operands of each operation are in this order.
_OPERANDS = "input input1 query mat mat1 batch1 input2 key weight other mat2 vec vec2 tensor batch2 value".split()
_RANKS = {name: rank for rank, name in enumerate(_OPERANDS)}


def in_order(named: dict[str, Any]) -> list[Any]:
    """Return the operands that were given by name, in the order of torch's own parameters."""
    if len(named) < 2:
        return [*named.values()]
    return [named[name] for name in sorted(named, key=lambda name: _RANKS.get(name, len(_RANKS)))]


_MAY_MULTIPLY = frozenset("einsum inner addr addr_".split())  # of `NARROWING`


def only_multiplies(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of one of `NARROWING` sums no products: torch then promotes its operands as it does for `*`."""
    if name not in _MAY_MULTIPLY:
        return False
    if name == "einsum":
        return not is_contracted(args)
    if name == "inner":
        return any(isinstance(x, Tensor) and not x.dim() for x in (*args, *kwargs.values()))
    return True


_CONVERTING = (Action.STEP, Action.FILL, Action.FACTORY, Action.LIKE, Action.CAST, Action.SET_DATA, Action.FOREACH)


class Call:
    """Treatment of one torch function.

    name: the function's name without torch's underscores.
    action: its treatment.
    in_place: whether it writes to its first argument.
    has_threshold: whether a Python number next to a tensor is cast to the tensor's dtype.
    threshold: where torch's kernels cast such a number: "always", or "on card".
    number: torch's treatment of a float32 tensor without dimensions next to one of low precision.
    promotes: whether integers next to numbers of the format are cast to it; else they are indices or counts.
    expands: whether a tensor without dimensions takes part in type promotion.
    copies: whether it writes another argument to the first one, unchanged.
    has_pole: whether it may return minus infinity for finite arguments. This saturates in a format without infinities;
        minus infinity from any other function is a mask.
    is_quotient: whether `has_pole` depends on the second operand.
    is_view: whether its result may lie in the memory of its first argument.
    is_comparison: whether it compares numbers.
    is_squared_difference: whether it is `mse_loss`, which is two operations if it does not reduce.
    is_special: whether it is not a single operation on numbers, and needs a rare treatment.
    converts: whether it makes a tensor, or decides a tensor's dtype.
    may_multiply: whether there are arguments with which it sums no products.
    narrows: whether its operands are brought into the format even if they are float32 on purpose.
    chooses_inside: whether its backward pass searches for its result among the candidates.
    takes_dtype: whether it accepts a dtype as a positional argument.
    only_compared: positions and names of the arguments that take no part in type promotion.
    scales: whether it multiplies or divides a tensor by a number, if it is given one.
    has_dtype_of_first: whether the first argument alone decides the result's dtype.
    is_of_each: whether it moves each of several tensors, which keep their dtypes.
    drops: whether it drops numbers by default; None for a function that never does.
    inplace_at: the position of the argument `inplace`; None without one.
    may_write: whether there are arguments with which it writes to its first one.
    may_renormalise: whether it changes a weight first, if it is given a `max_norm`.
    gives_float64: whether it always returns float64.
    body: the Python definition of a function that takes functions, such as torch.cond; None for any other function.
    only_computes: whether it needs no treatment except the rounding of its operands and results.
    writes: positions and names of the arguments that it writes to, as its schema says, except `out`.
    skip_positions, skip_names: positions and names of arguments that are no operands, or that the function writes to:
        these must not be replaced by copies.
    """

    __slots__ = (
        "action", "body", "chooses_inside", "converts", "copies", "drops", "expands", "gives_float64",
        "has_dtype_of_first", "has_pole", "has_threshold", "in_place", "inplace_at", "is_comparison", "is_of_each",
        "is_quotient", "is_special", "is_squared_difference", "is_view", "may_multiply", "may_renormalise", "may_write",
        "name", "narrows", "number", "only_compared", "only_computes", "promotes", "scales", "skip_names",
        "skip_positions", "takes_dtype", "threshold", "writes",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", None) or type(function).__name__
        name = name.partition(".")[0]  # torch.ops.aten.add_.Tensor
        # The function reads a property of tensors, whose name is that of the descriptor.
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", name)
            action = Action.DTYPE if name == "dtype" else Action.PASS
            self.action = Action.MOVE if name in MOVE else action
        elif name == "__set__" and getattr(getattr(function, "__self__", None), "__name__", "") == "data":
            self.action = Action.SET_DATA
        else:
            self.action = _action_of(function, name)
        self.body = body_of(function)
        if self.body is not None:
            self.action = Action.DECOMPOSE
        self.converts = self.action in _CONVERTING
        self.chooses_inside = name in CHOOSE_INSIDE
        self.is_view, self.is_comparison = name in VIEWS, name in COMPARISONS
        self.is_squared_difference = function is F.mse_loss
        self.is_special = self.is_squared_difference or self.action in (Action.DTYPE, Action.REFUSE, Action.DECOMPOSE)
        self.takes_dtype = name in TAKES_DTYPE or self.action in (Action.CAST, Action.FACTORY, Action.LIKE)
        self.has_dtype_of_first = name in (*SHAPE_OF_OTHERS, *COPIES_INTO_FIRST, *STORED_AS_FIRST)
        self.is_of_each, self.drops = name in EACH, DROPS.get(name)
        self.only_compared = ONLY_COMPARED.get(function)
        self.name = name.strip("_") if name.startswith("__") else name
        spelling = spelling_of(self.name)
        row, is_swapped = spelling.row, spelling.is_swapped
        self.threshold = "always" if name in _FOREACH_THRESHOLDS else row.threshold
        self.has_threshold = self.threshold != ""
        # The functions of lists are emulated tensor by tensor, and have no operands of their own.
        has_operands = self.action is not Action.FOREACH
        self.scales = has_operands and row.scales and not is_swapped
        # SECOND is about a one-element tensor as the second operand. If operands are swapped, this tensor is the first.
        is_exact = not has_operands or (is_swapped and row.number is Number.SECOND)
        self.number = Number.EXACT if is_exact else row.number
        is_number = row.number is not Number.EXACT or self.is_comparison or self.action is Action.SET_ITEM
        self.promotes = has_operands and (is_number or self.name in PROMOTING)
        self.expands = self.name in EXPANDING
        self.copies = self.action is Action.SET_ITEM or self.name == "copy_"
        self.may_multiply = self.name in _MAY_MULTIPLY
        self.narrows = self.name in NARROWING or name in COPIES_INTO_FIRST or self.action is Action.SET_ITEM
        self.has_pole = has_operands and row.makes_minus_infinity
        self.is_quotient = self.has_pole and row.divides == 1 and not is_swapped
        inner = name[2:] if name.startswith("__i") and name.endswith("__") else ""
        is_augmented = inner != "" and name not in ("__invert__", "__index__", "__int__", "__iter__")
        self.in_place = is_augmented or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        code = getattr(function, "__code__", None)
        names = code.co_varnames[: code.co_argcount] if code is not None else ()
        self.inplace_at = names.index("inplace") if "inplace" in names else None
        self.may_write = self.in_place or self.inplace_at is not None
        self.may_renormalise, self.gives_float64 = self.name.startswith("embedding"), self.name in _FLOAT64
        # One flag, so that the mode makes a single check for a common call.
        self.only_computes = self.action is Action.COMPUTE and not (
            self.may_write
            or self.is_view
            or self.is_of_each
            or self.drops is not None
            or self.copies
            or self.has_threshold
        )
        skips = NOT_OPERANDS.get(function) or NOT_OPERANDS.get(name, ((), ()))
        self.writes = written = written_arguments(function)
        self.skip_positions, self.skip_names = written[0].union(skips[0]), written[1].union(skips[1])

    def writes_to_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call with these arguments writes to the first one."""
        at = self.inplace_at
        return self.in_place or (at is not None and bool(args[at] if at < len(args) else kwargs.get("inplace")))

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that a call with these arguments writes to: tensors, or lists of them."""
        positions, names = self.writes
        found = [args[i] for i in positions if i < len(args)]
        found += [kwargs[name] for name in (*names, "out") if kwargs.get(name) is not None]
        if self.writes_to_first(args, kwargs):
            found.append(args[0] if args else kwargs.get("input"))  # "self" in the schema
        return found

    def drops_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a dropout with these arguments returns its input itself."""
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        named = kwargs.get("training", kwargs.get("train", self.drops))
        return not (args[2] if len(args) > 2 else named) or p == 0

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function itself."""
        # In inference mode tensors have no version counter: writes are counted here instead.
        if (self.in_place or "out" in kwargs or self.inplace_at is not None) and torch.is_inference_mode_enabled():
            note_inference_write()
        return function(*args, **kwargs)


# The order matters: a name in several tables gets the treatment of the first table. COMPUTE is the default, so that a
# function that a new version of torch adds is rounded, and not overlooked.
def _action_of(function: Callable[..., Any], name: str) -> Action:
    if name in PASS or name.startswith(("_fused_", "_amp_", "_use_", "_is_", "__dlpack")):
        return Action.PASS
    if name.startswith("_foreach_"):
        return Action.FOREACH
    if name == "result_type":
        return Action.DTYPE
    if name in READ:
        return Action.READ
    if name == "set_":
        return Action.SET_DATA
    if getattr(function, "__module__", "") == "torch.nn.init":
        return Action.FILL
    if name in FACTORIES:
        return Action.FACTORY
    if name in FACTORIES_LIKE:
        return Action.LIKE
    if name in FILL:
        return Action.FILL
    if name in CAST_NAMES:
        return Action.CAST
    if name == "__setitem__":
        return Action.SET_ITEM
    if name in ("nextafter", "nextafter_"):
        return Action.STEP
    if name in REFUSE:
        return Action.REFUSE
    in_steps = (F.multi_head_attention_forward, QUOTIENT_OF_NUMBER, *_IN_TWO)
    if function in in_steps or name in recurrent.OPERATIONS:
        return Action.DECOMPOSE
    return Action.MOVE if name in MOVE else Action.COMPUTE


class _BackwardCall(Call):
    """Function that runs a backward pass, with the emulation off."""

    __slots__ = ()

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The emulation is off during the call: a checkpoint may run modules again, which enter a new mode.
        emulation, active.emulation = active.emulation, None
        try:
            return super().__call__(function, args, kwargs)
        finally:
            active.emulation = emulation


# The cache of `call_of`. Functions that run a backward pass get a class of their own, whatever their names.
known_calls: dict[Any, Call] = {
    f: _BackwardCall(f) for f in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def call_of(function: Callable[..., Any]) -> Call:
    """Return the treatment of this torch function, which is looked up once and cached."""
    # `setdefault`: two threads that make an entry both get the same one.
    call = known_calls.get(function)
    return known_calls.setdefault(function, Call(function)) if call is None else call


class _Border:
    """Stand-in for a Call, for a tensor that is rounded elsewhere than in a function's result; named for its site."""

    def __init__(self, name: str) -> None:
        self.name, self.has_pole, self.chooses_inside = name, False, False


WRITTEN_TO: Any = _Border("activation")
