"""The mode that intercepts every torch call of a model and rounds what goes in and what comes out."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim import ops, recurrent
from fpsim.ops import RoundingSpec
from fpsim.policy import FormatLike, Policy, RoleSpecs, as_policy

__all__ = ["Emulation", "Observer", "Scope", "emulate"]


class Scaling(Protocol):
    """Who answers, at each place of the backward pass: at which scale is this gradient rounded?

    Asked once in the forward pass, when the place is made: the site's name, the role ("error" or "weight_grad"), the
    rounding, the operation with its operands (tensors rounded already, and the call's other arguments, in the order of
    torch's own parameters however they were named), and what came out. Returns what to call in the backward pass with
    the gradient, before it is rounded: log2 of the scale as an int64 tensor of one element on the gradient's device,
    within `ops.log2_scale_limits`, or None for 1. A gradient itself always has its true size;
    `is_rounded_at(gradient, log2_scale, spec)` tells how it was rounded a moment ago. The second argument tells whether
    nobody else holds the gradient: then it may be rounded at once, in place, with `mark_rounded`.
    """

    def __call__(
        self, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...], out: Tensor
    ) -> Callable[[Tensor, bool], Tensor | None]: ...


class Observer(Protocol):
    """Who is told of tensors before and after they are rounded: a site's name, a role, both tensors, the rounding."""

    def wants(self, site: str, role: str) -> bool:
        """Whether it is to be told of this call; asked once for each, and what it does not want costs nothing."""
        ...

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: RoundingSpec) -> None: ...


class Listeners:
    """Who is told and who is asked, shared by all modules of one quantised model. Not copied or pickled with it."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.scaling: Scaling | None = None

    def watching(self, site: str, role: str) -> Observer | None:
        """The observer, if there is one and it wants this call."""
        return self.observer if self.observer is not None and self.observer.wants(site, role) else None

    def __deepcopy__(self, memo: Any) -> Listeners:
        return Listeners()

    def __reduce__(self) -> Any:
        return Listeners, ()


class Scope:
    """The module whose forward runs: its name, its formats, and the operations counted so far."""

    __slots__ = ("counts", "float32", "listeners", "name", "specs", "weights")

    def __init__(
        self,
        name: str,
        specs: RoleSpecs,
        float32: tuple[str, ...],
        listeners: Listeners,
        weights: Collection[int] = (),
    ) -> None:
        self.name, self.specs, self.float32, self.listeners = name, specs, float32, listeners
        self.weights = weights  # the id of each tensor that stands in for a parameter
        self.counts: dict[str, int] = {}

    def site(self, operation: str) -> str:
        """A name for the next call of `operation`: 'layer1.conv1:conv2d', the second one ':conv2d_1'."""
        seen = self.counts.get(operation, 0)
        self.counts[operation] = seen + 1
        return f"{self.name}:{operation}_{seen}" if seen else f"{self.name}:{operation}"

    def repeated(self, times: int) -> Iterator[int]:
        """The passes of a loop, each with the sites of the first."""
        before = dict(self.counts)
        for i in range(times):
            self.counts = dict(before)
            yield i


# What to do with a torch function, by name.
#
# PASS: nothing is computed in the format: metadata, comparisons, random and constant tensors, autograd's controls.
# MOVE: values that come out are values that went in, or their negatives: views, copies, selections.
# REFUSE: one call hides several operations, and there is no emulation of its inside. DECOMPOSE: there is.
# The rest computes: operands are brought into the format, the result is rounded.

PASS = frozenset(
    """
    __set__ __delete__ __hash__ __len__ __bool__ __int__ __float__ __index__ __repr__ __str__ __format__
    __contains__ __dir__ __reduce__ __reduce_ex__ __setstate__ __deepcopy__ __array__ __dlpack__ __dlpack_device__
    size stride dim ndimension numel nelement element_size storage_offset data_ptr is_contiguous is_pinned
    storage untyped_storage get_device is_floating_point is_complex is_signed is_inference is_same_size
    is_set_to is_shared has_names requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward
    grad item tolist numpy detach_ is_nonzero allclose equal isfinite isnan isinf isneginf isposinf isclose
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ argmax argmin argsort nonzero argwhere
    logical_and logical_or logical_not logical_xor signbit searchsorted bucketize histc bincount unique
    unique_consecutive result_type promote_types can_cast is_tensor is_storage record_stream pin_memory share_memory_
    resize_ set_ multinomial bernoulli normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_
    rand randn randint randperm rand_like randn_like randint_like normal poisson zeros ones full empty eye arange
    linspace logspace range zeros_like ones_like full_like empty_like empty_strided empty_permuted new_zeros new_ones
    new_full new_empty new_empty_strided new_tensor tensor as_tensor from_numpy asarray scalar_tensor complex
    tril_indices triu_indices zero_ fill_ one_hot manual_seed seed initial_seed _assert _assert_async _is_view
    set_default_dtype get_default_dtype set_grad_enabled is_grad_enabled
    """.split()
)
MOVE = frozenset(
    """
    T mT H mH real imag view_as_real view_as_complex values _values view view_as reshape reshape_as flatten unflatten
    squeeze unsqueeze squeeze_ unsqueeze_ transpose transpose_ t t_ permute swapaxes swapdims movedim moveaxis adjoint
    expand expand_as broadcast_to broadcast_tensors contiguous clone detach alias
    to cpu cuda type type_as float double half bfloat16 positive narrow select diagonal unfold
    as_strided chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind meshgrid
    atleast_1d atleast_2d atleast_3d cat concat concatenate stack hstack vstack dstack column_stack row_stack
    block_diag index_select gather take take_along_dim masked_select __getitem__ flip fliplr flipud roll rot90 tile
    repeat repeat_interleave tril triu ravel diag diag_embed sort topk kthvalue median mode
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d pixel_shuffle pixel_unshuffle channel_shuffle
    relu relu_ max min amax amin maximum minimum abs neg negative __neg__ __abs__ cummax cummin embedding
    _pack_padded_sequence resolve_conj resolve_neg __iter__ __reversed__
    """.split()
)
REFUSE = {
    "_transformer_encoder_layer_fwd": "call nn.TransformerEncoderLayer with a gradient or in training mode",
    "_native_multi_head_attention": "call nn.MultiheadAttention with a gradient or in training mode",
    **dict.fromkeys(("quantized_lstm", "quantized_gru"), "quantise the float32 module instead"),
}
# Operands that are statistics or masks, not numbers of the computation: (positions, names). By function, or by name.
_STATISTICS = ("running_mean", "running_var")
_BELOW = """
    batch_norm instance_norm native_batch_norm cudnn_batch_norm
    _native_batch_norm_legit _native_batch_norm_legit_no_training
    """
NOT_OPERANDS: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {
    **dict.fromkeys((F.batch_norm, F.instance_norm), ((1, 2), _STATISTICS)),
    **dict.fromkeys(_BELOW.split(), ((3, 4), _STATISTICS)),  # torch's operators have the weight and the bias first
    "scaled_dot_product_attention": ((3,), ("attn_mask",)),
}
# What is looked up in a weight is an activation, and its gradient, which is summed into the weight, an error.
LOOK_UPS = ("embedding",)

# Operands that may be given by name, in the order in which any operation has those that it takes.
_OPERANDS = "input input1 query mat mat1 batch1 input2 key weight other mat2 vec vec2 tensor batch2 value".split()
_RANKS = {name: rank for rank, name in enumerate(_OPERANDS)}


def _in_order(named: dict[str, Any]) -> list[Any]:
    return [named[name] for name in sorted(named, key=lambda name: _RANKS.get(name, len(_RANKS)))]


_PASS, _MOVE, _COMPUTE, _REFUSE, _DECOMPOSE, _SET_ITEM = range(6)


class _Call:
    """How one torch function is treated."""

    __slots__ = ("action", "in_place", "name", "skip_names", "skip_positions")

    def __init__(self, func: Callable[..., Any]) -> None:
        name = (getattr(func, "__name__", None) or type(func).__name__).partition(".")[0]  # torch.ops.aten.add_.Tensor
        if name == "__get__":  # a property: its own name is the descriptor's
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            self.action = _MOVE if name in MOVE else _PASS
        elif name in PASS or name.startswith(("_foreach_", "_fused_", "_amp_", "_use_", "_is_", "__dlpack")):
            self.action = _PASS
        elif name == "__setitem__":
            self.action = _SET_ITEM
        elif name in REFUSE:
            self.action = _REFUSE
        elif func is F.multi_head_attention_forward or name in recurrent.OPERATIONS:
            self.action = _DECOMPOSE
        else:
            self.action = _MOVE if name in MOVE else _COMPUTE
        self.name = name.strip("_") if name.startswith("__") else name
        inner = name[2:] if name.startswith("__i") and name.endswith("__") else ""
        is_augmented = inner != "" and name not in ("__invert__", "__index__", "__int__", "__iter__")
        self.in_place = is_augmented or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        self.skip_positions, self.skip_names = NOT_OPERANDS.get(func) or NOT_OPERANDS.get(name, ((), ()))

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (self.in_place or "out" in kwargs or "inplace" in kwargs) and torch.is_inference_mode_enabled():
            _note_inference_write()
        return func(*args, **kwargs)


class _BackwardCall(_Call):
    """A backward pass may run modules again, of a checkpoint: they enter a mode of their own, for this one is off."""

    __slots__ = ()

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        emulation, _current.emulation = _current.emulation, None
        try:
            return super().__call__(func, args, kwargs)
        finally:
            _current.emulation = emulation


_BACKWARD_PASSES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_calls: dict[Any, _Call] = {f: _BackwardCall(f) for f in _BACKWARD_PASSES}


def _without_override_check(func: types.FunctionType) -> Callable[..., Any]:
    """The same Python body, blind to modes: its inner calls are intercepted one by one."""
    blind = {**func.__globals__, "has_torch_function": lambda *args: False}
    copy = types.FunctionType(func.__code__, blind, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_decomposed: dict[Any, Callable[..., Any]] = {
    f: _without_override_check(cast(types.FunctionType, f)) for f in (F.multi_head_attention_forward,)
}


# A tensor whose values are known to be in a format carries a mark: the format, the tensor's version then, the scale of
# a gradient, and whether it required a gradient. One that does so later has no place yet where that is rounded.
# A weight's mark says so: in another module its format may be that of weights, and an activation still has to fit.
_OF_A_WEIGHT = " of a weight"


def _is_roundable(x: Tensor) -> bool:
    return x.dtype in ops.FLOATING and x.layout is torch.strided


# Inference tensors count no versions: for all of them, minus the number of writes that one of them may have seen.
_inference_writes = itertools.count(1)
_inference_version = 0


def _note_inference_write() -> None:
    global _inference_version
    _inference_version = -next(_inference_writes)


def _version(x: Tensor) -> int:
    return _inference_version if x.is_inference() else x._version


class _MarkAtScale(tuple[Any, ...]):
    """The mark of a gradient rounded at a scale, which is known by identity: nothing is known of its copies."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return torch.Size, ((),)  # nothing that torch.load(weights_only=True) would refuse


def _mark(x: Tensor, text: str, log2_scale: Tensor | None = None) -> None:
    mark = (text, _version(x), log2_scale, x.requires_grad)
    x._fpsim = mark if log2_scale is None else _MarkAtScale(mark)  # type: ignore[attr-defined]  # survives torch.save


def _mark_of(x: Tensor) -> tuple[str, int, Tensor | None, bool] | None:
    """The mark of a tensor that has not changed since."""
    mark = getattr(x, "_fpsim", None)
    return mark if mark and mark[1] == _version(x) and mark[3] >= x.requires_grad else None


def _marked(x: Tensor) -> str | None:
    """The format that a tensor is in: none where a gradient, rounded at a scale, may lie between its values."""
    mark = _mark_of(x)
    return mark[0] if mark is not None and mark[2] is None else None


def is_rounded_at(gradient: Tensor, log2_scale: Tensor | None, spec: RoundingSpec) -> bool:
    """Whether this very tensor was rounded so at this very scale, on the other side of an addition or a view."""
    mark = _mark_of(gradient)
    return mark is not None and mark[0] == spec.text and mark[2] is log2_scale


def mark_rounded(gradient: Tensor, log2_scale: Tensor | None, spec: RoundingSpec) -> None:
    """Note that this very tensor has been rounded so."""
    _mark(gradient, spec.text, log2_scale)


class _BackwardRounding:
    """A tensor hook: rounds the gradient that arrives, in place where nobody else holds it."""

    __slots__ = ("role", "scale", "scope", "site", "spec")

    def __init__(
        self,
        scope: Scope,
        site: str,
        role: str,
        spec: RoundingSpec,
        scale: Callable[[Tensor, bool], Tensor | None] | None,
    ) -> None:
        self.scope, self.site, self.role, self.spec, self.scale = scope, site, role, spec, scale

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # an output that nobody used, beside one that somebody did
            return None
        if gradient.is_sparse:  # of an embedding: its rows are summed, then rounded
            gradient = gradient.coalesce()
            values = gradient.values()
            rounded = self(values)
            values, indices = values if rounded is None else rounded, gradient.indices()
            return torch.sparse_coo_tensor(indices, values, gradient.shape, is_coalesced=True, check_invariants=False)
        spec, listeners = self.spec, self.scope.listeners
        is_plain = not torch.is_grad_enabled() and ops._is_plain(gradient)  # no double backward, no transform
        log2_scale, observer, seen, may_round = None, None, None, False
        if self.scale is not None:
            may_round = is_plain and _mark_of(gradient) is None and _is_exclusive(gradient)
            if may_round:
                observer = listeners.watching(self.site, self.role)
                seen = None if observer is None else gradient.detach().clone()  # before it may be rounded
            log2_scale = self.scale(gradient, may_round)
        if is_rounded_at(gradient, log2_scale, spec):
            if observer is not None and seen is not None:  # it was rounded at once
                self._tell(observer, seen, gradient, log2_scale)
            return None
        if not is_plain:
            return ops._round_differentiably(gradient, spec, log2_scale)
        if not may_round:
            observer = listeners.watching(self.site, self.role)
        if observer is None and _is_exclusive(gradient):
            ops.round_memory_(gradient, spec, None, log2_scale)
            mark_rounded(gradient, log2_scale, spec)
            return None
        rounded = ops._rounded(gradient, spec, None, log2_scale)
        mark_rounded(rounded, log2_scale, spec)
        if observer is not None:
            self._tell(observer, gradient if seen is None else seen, rounded, log2_scale)
        return rounded

    def _tell(self, observer: Observer, before: Tensor, after: Tensor, log2_scale: Tensor | None) -> None:
        if log2_scale is not None:  # what the format sees; exact, for float64 has exponents to spare
            before, after = (torch.ldexp(x.double(), log2_scale) for x in (before, after))
        observer(self.site, self.role, before, after, self.spec)


@cache
def _references_in_a_hook() -> tuple[int, int, int]:
    """What `_is_exclusive` reads of a gradient that Python knows by its hook alone, of its base and of its storage.

    Measured, for the versions of Python and of torch differ.
    """
    found = []

    class Hook:
        def __call__(self, gradient: Tensor) -> None:
            found.append(_references(gradient))

    def _references(gradient: Tensor) -> tuple[int, int, int]:
        own, base, storage = sys.getrefcount(gradient), gradient._base, gradient.untyped_storage()
        return own, sys.getrefcount(base), sys.getrefcount(storage)

    with torch.enable_grad():
        x = torch.zeros(2, device="cpu", requires_grad=True) * 2
        x.register_hook(Hook())
        (x.view(1, 2) * 2).sum().backward()
    return found[0]


def _is_exclusive(gradient: Tensor) -> bool:
    """Whether the autograd engine alone holds this tensor and its storage.

    A tensor in a hook is held twice, by the engine and by Python's argument; so is its base, by the view and by the
    name here. A storage is held by its tensors and by Python's name for it. A hook of the user's may have kept it.
    """
    if not ops._has_no_holes(gradient):
        return False  # an expanded tensor, whose elements share memory with one another, or a slice
    references, references_of_base, references_of_storage = _references_in_a_hook()
    if sys.getrefcount(gradient) > references:
        return False
    base, tensors = gradient._base, 1
    if base is not None:
        tensors = 2
        if sys.getrefcount(base) > references_of_base:
            return False
        if base._use_count() > 2 or not ops._has_no_holes(base):  # type: ignore[attr-defined]
            return False
    if gradient._use_count() > 2:  # type: ignore[attr-defined]
        return False
    storage = gradient.untyped_storage()
    if sys.getrefcount(storage) > references_of_storage or not storage.resizable():
        return False  # the latter is memory that torch did not allocate, such as numpy's
    return torch._C._storage_Use_Count(storage._cdata) <= tensors + 1  # type: ignore[no-any-return]


class Emulation(TorchFunctionMode):
    """The emulated twin of `torch.autocast`: one per thread, with the scope of the module that runs."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        # {original: {(its format, its gradient's): (version, rounded copy)}}: it does not keep the originals alive
        self._operands = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = _calls.get(func)
        if call is None:
            call = _calls.setdefault(func, _Call(func))
        action, scope = call.action, self.scope
        specs = scope.specs
        if action == _PASS or specs is NO_SPECS or call.name in scope.float32:
            return call(func, args, kwargs)
        if action == _REFUSE:
            raise NotImplementedError(
                f"{resolve_name(func) or call.name} at {scope.name or 'the top'} hides several operations in one call "
                f"and cannot be emulated. To do: {REFUSE[call.name]}."
            )
        if action == _DECOMPOSE:
            inner = _decomposed.get(func) or partial(recurrent.OPERATIONS[call.name], scope.repeated)
            with self:
                return inner(*args, **kwargs)
        if call.in_place and args and isinstance(args[0], nn.Parameter):
            return call(func, args, kwargs)  # an update or an initialisation, not a step of the computation
        return self._compute(func, call, args, kwargs)

    def _compute(self, func: Callable[..., Any], call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.name.startswith("embedding") and kwargs.get("max_norm") is not None:
            # it changes the weight itself, not the rounded copy
            torch.embedding_renorm_(args[1].detach(), args[0].contiguous(), kwargs["max_norm"], kwargs["norm_type"])
            kwargs = {**kwargs, "max_norm": None}
        keeps_first = call.in_place or kwargs.get("inplace") is True
        moves = call.action == _MOVE
        floats: list[Tensor] = []

        new_args = tuple(
            x if (i == 0 and keeps_first) or i in call.skip_positions else self._prepared(x, moves, floats)
            for i, x in enumerate(args)
        )
        new_kwargs = {
            name: x if name in call.skip_names or name == "out" else self._prepared(x, moves, floats)
            for name, x in kwargs.items()
        }
        operands = (*new_args, *_in_order(new_kwargs)) if new_kwargs else new_args
        first = args[0] if keeps_first and args else None
        if isinstance(first, Tensor) and not moves and call.action != _SET_ITEM:
            self._prepare_target(first)
        was_marked = _marked(first) if isinstance(first, Tensor) else None
        out = call(func, new_args, new_kwargs)
        if call.action == _SET_ITEM:
            if was_marked and isinstance(first, Tensor):
                self._round_result(first, call, operands, floats, first)
            return out
        if moves:
            self._carry_marks(out, floats, first, was_marked)
            if call.name not in LOOK_UPS or not isinstance(out, Tensor):
                return out
            activation = self.scope.specs.activation
            if activation is None or _marked(out) == activation.text:
                if out.requires_grad:
                    self._hook(out, self.scope.site(call.name), call.name, operands)
                return out
        return self._round_results(out, call, operands, floats, kwargs.get("out", first))

    def _prepared(self, x: Any, weights_only: bool, floats: list[Tensor]) -> Any:
        """An argument with its tensors in their formats, which are appended to `floats`."""
        # a method, not a closure: one that calls itself is a cycle, and kept every tensor until a collection
        if isinstance(x, Tensor):
            if not _is_roundable(x):
                return x
            x = self._operand(x, weights_only)
            floats.append(x)
        elif type(x) in (list, tuple) and any(isinstance(item, Tensor) for item in x):
            return type(x)([self._prepared(item, weights_only, floats) for item in x])
        return x

    def _prepare_target(self, x: Tensor) -> None:
        """What a call changes in place is an operand too, and is brought into its format where it is."""
        if not self._is_in_format(x, self.scope.specs.activation) and not (x.is_leaf and x.requires_grad):
            self._round_result(x, _TARGET, (x,), [], x)

    def _is_in_format(self, x: Tensor, spec: RoundingSpec | None) -> bool:
        mark, weight = _marked(x), self.scope.specs.weight
        if mark is None or spec is None or mark == spec.text:
            return mark is not None
        return weight is not None and mark == weight.text + _OF_A_WEIGHT

    def _operand(self, x: Tensor, weights_only: bool) -> Tensor:
        """`x` in its format: a parameter in the weights', anything else in the activations'."""
        specs = self.scope.specs
        is_weight = isinstance(x, nn.Parameter) or id(x) in self.scope.weights
        spec, backward = (specs.weight, specs.weight_grad) if is_weight else (specs.activation, specs.error)
        if (spec is None and backward is None) or (weights_only and not is_weight):
            return x
        if self._is_in_format(x, spec):
            return x
        copies: dict[Any, tuple[int, Tensor]] = self._operands.setdefault(x, {})
        key, needs_grad = (spec and spec.text, backward and backward.text), x.requires_grad and torch.is_grad_enabled()
        version, rounded = copies.get(key, (None, x))
        if version != _version(x) or rounded.requires_grad != needs_grad:
            rounded = self._rounded_operand(x, spec, backward, "weight" if is_weight else "activation")
            copies[key] = _version(x), rounded
        return rounded

    def _rounded_operand(
        self, x: Tensor, spec: RoundingSpec | None, backward: RoundingSpec | None, role: str
    ) -> Tensor:
        site = self.scope.site(role)
        if not ops._is_plain(x):
            return self._straight_through(x, spec, backward)
        rounded = x.clone()
        if spec is not None:
            ops.round_memory_(rounded, spec)
            activation = self.scope.specs.activation
            is_activation = role == "activation" or (activation is not None and activation.text == spec.text)
            _mark(rounded, spec.text if is_activation else spec.text + _OF_A_WEIGHT)
            observer = self.scope.listeners.watching(site, role)
            if observer is not None:
                observer(site, role, x.detach(), rounded.detach(), spec)
        if backward is not None and rounded.requires_grad:
            gradient_role = "weight_grad" if role == "weight" else "error"
            self._register(rounded, site, gradient_role, backward, role, (x,))
        return rounded

    def _carry_marks(self, out: Any, floats: list[Tensor], first: Any, first_mark: str | None) -> None:
        marks = {_marked(x) for x in floats}
        if isinstance(first, Tensor):
            marks.add(first_mark)
        if len(marks) == 1 and (mark := marks.pop()) is not None:
            for x in _tensors(out):
                if x.is_floating_point():
                    _mark(x, mark)

    def _straight_through(self, x: Tensor, spec: RoundingSpec | None, backward: RoundingSpec | None) -> Tensor:
        """Round under a transform or a tracer."""
        if self.scope.listeners.scaling is not None and backward is not None:
            raise NotImplementedError(
                f"A gradient at {self.scope.name or 'the top'} is to be rounded at its own scale, under torch.compile "
                f"or a transform of torch.func. Possible: loss.backward() and torch.autograd.grad. Detach the scaling "
                f"first, or leave the transform away."
            )
        return ops._straight_through(x, spec, backward)

    def _round_results(
        self, out: Any, call: _Call, operands: tuple[Any, ...], floats: list[Tensor], target: Any
    ) -> Any:
        """`out` with its tensors rounded; target: what the call was told to write to, if anything."""
        if isinstance(out, Tensor):
            return self._round_result(out, call, operands, floats, target)
        if isinstance(out, tuple | list):
            results = [
                self._round_result(x, call, operands, floats, target) if isinstance(x, Tensor) else x for x in out
            ]
            if all(a is b for a, b in zip(out, results, strict=True)):
                return out
            return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)
        return out

    def _round_result(
        self, out: Tensor, call: _Call, operands: tuple[Any, ...], floats: list[Tensor], target: Any
    ) -> Tensor:
        specs = self.scope.specs
        if not _is_roundable(out):
            return out
        is_plain, is_target = ops._is_plain(out), any(out is x for x in _tensors(target))
        is_same = torch._C._is_alias_of if is_plain else operator.is_  # type: ignore[attr-defined]
        if not is_target and any(is_same(out, x) for x in floats):
            self._carry_marks(out, floats, None, None)
            return out  # it moved: dropout in evaluation gives back its input, einsum may give a view of it
        site = self.scope.site(call.name)
        spec, error = specs.activation, specs.error
        if not is_plain:
            rounded = self._straight_through(out, spec, error)
            return out.copy_(rounded) if is_target else rounded
        if spec is not None:
            observer = self.scope.listeners.watching(site, "activation")
            before = None if observer is None else out.detach().clone()
            # below autograd: what the operation saved for its backward is the rounded value, as on hardware
            ops.round_memory_(out, spec)
            if observer is not None and before is not None:
                observer(site, "activation", before, out.detach(), spec)
            _mark(out, spec.text)
        elif error is not None:
            _mark(out, "float32")  # its gradient has its place
        if error is not None and out.requires_grad:
            self._hook(out, site, call.name, operands)
        return out

    def _hook(self, out: Tensor, site: str, operation: str, operands: tuple[Any, ...]) -> None:
        error = self.scope.specs.error
        if error is not None:
            self._register(out, site, "error", error, operation, operands)

    def _register(
        self, out: Tensor, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...]
    ) -> None:
        scaling = self.scope.listeners.scaling
        scale = None if scaling is None else scaling(site, role, spec, operation, operands, out)
        _references_in_a_hook()  # known from here on: it takes a backward pass, and none should run in another
        out.register_hook(_BackwardRounding(self.scope, site, role, spec, scale))

    def bring_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Round what enters a module that computes in float32 inside."""
        with torch._C.DisableTorchFunction():
            named = {name: self._prepared(x, False, []) for name, x in kwargs.items()}
            return tuple(self._prepared(x, False, []) for x in args), named

    def bring_out(self, out: Any) -> Any:
        """Round what leaves a module that computed in float32 inside."""
        with torch._C.DisableTorchFunction():
            return self._round_results(out, _BORDER, (), [], None)


class _Place:
    """Where something is rounded that is no torch function's result."""

    def __init__(self, name: str) -> None:
        self.name = name


_BORDER: Any = _Place("output")
_TARGET: Any = _Place("activation")
NO_SPECS = RoleSpecs()


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for item in out:
            yield from _tensors(item)


class _Current(threading.local):
    emulation: Emulation | None = None


_current = _Current()


@contextmanager
def entered(scope: Scope) -> Iterator[Emulation]:
    """Run under `scope`: in the mode that is active in this thread, or in a new one."""
    emulation = _current.emulation
    if emulation is not None:
        previous, emulation.scope = emulation.scope, scope
        try:
            yield emulation
        finally:
            emulation.scope = previous
        return
    if torch._C._is_tracing():
        raise NotImplementedError(
            "torch.jit.trace came to emulated code, and would see no rounding. Possible: torch.compile and "
            "torch.export. Trace the model that fpsim.dequantize(model) gives, or export the quantised one."
        )
    emulation = Emulation(scope)
    _note_inference_write()  # what happened outside was not seen
    _current.emulation = emulation
    try:
        with emulation:
            yield emulation
    finally:
        _current.emulation = None


def make_scope(name: str, policy: Policy, listeners: Listeners) -> Scope:
    specs = policy.specs()
    return Scope(name, NO_SPECS if specs == NO_SPECS else specs, policy.float32, listeners)


@contextmanager
def emulate(fmt: FormatLike, rounding: str | Mapping[str, str] | None = None) -> Iterator[None]:
    """Compute every torch call of the block as hardware with format `fmt` would, forward and backward.

    The twin of `torch.autocast`: put the forward pass and the loss inside, the backward pass and the optimizer's step
    outside. Operands that come from outside are rounded, each result is rounded once, and gradients on their way back.
    `fmt` is a format for every role or a Policy (without overrides: there are no modules here).

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> with emulate("e4m3fn"):
    ...     y = x / 3
    >>> y
    tensor([0.3438, 0.6875, 1.0000])
    """
    policy = as_policy(fmt)
    if policy.overrides:
        raise ValueError("emulate() knows no modules, and the policy has overrides. Use quantize(model, policy).")
    if rounding is not None:
        policy = replace(policy, rounding=rounding)
    with entered(make_scope("", policy, Listeners())):
        yield
