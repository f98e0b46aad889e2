"""Scope of the emulation: the running module, its formats, and the observers and scalings of its tensors."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fpsim.emulation.kept_weights import KeptWeights
from fpsim.emulation.marks import OF_A_WEIGHT, ByIdentity, writes_to
from fpsim.policies.delayed import Histories
from fpsim.policies.operand import Operand
from fpsim.policies.policy import Policy, RoleSpecs
from fpsim.policies.products import Products
from fpsim.tensors.cuts import Cut
from fpsim.tensors.spec import RoundingSpec, Spec

__all__ = [
    "BACKWARD",
    "NO_SPECS",
    "Attended",
    "Listeners",
    "Observer",
    "Scaling",
    "Scope",
    "Weights",
    "active",
    "in_backward",
    "make_scope",
]

NO_SPECS = RoleSpecs()
BACKWARD = "backward"  # the operation of an error that the model's own code computes
# Weak references to tensors, by id. Strong ones would make a cycle: a hook refers to its scope, and a computed
# weight to its hook.
Weights = Mapping[int, weakref.ref[Tensor]]
_NO_WEIGHTS: Weights = {}


class Scaling(Protocol):
    """Protocol of an object that decides at which scale a gradient is rounded; `ada_loss` implements it.

    The object is called in the forward pass, once for each tensor whose gradient will be rounded. It returns a
    function, which the backward pass calls with the unrounded gradient, and with True if nobody else holds this
    gradient. The function returns log2 of the scale, an int64 tensor of one element on the gradient's device and within
    `scaling.log2_scale_limits`, or None for a scale of 1. Gradients are passed on unscaled: rounding at a scale means
    rounding `gradient * scale` and dividing by the scale again. If nobody else holds the gradient, the function may
    round the gradient in place at once, and then calls `mark_rounded`.

    site: the site's name, "layer1.conv1:conv2d".
    role: "error" or "weight_grad". The operand dy of a product is rounded when it enters the product, with the role
        "error". If the weight gradient's product has another format, the second copy of dy has the role "wgrad.dy".
    spec: the rounding.
    operation: the name of the torch function that made the tensor; "weight" or "activation" for the rounded copy of an
        operand; "output" for the result of a product whose gradient is rounded as the result's and as an operand;
        "wgrad" for a second copy of dy; "returned" for an output that the model moved last; "function" for the result
        of an autograd Function, unless a single operation in the Function made it; BACKWARD for an error that the
        model's own code computes in the running backward pass. For BACKWARD, the returned function is called at once.
    operands: the arguments of the operation in the order of torch's own parameters, however they were passed; tensors
        are rounded. For a rounded copy, its original. For BACKWARD, log2 of the scale of the gradient from which the
        error was computed, or None.
    out: the tensor whose gradient is meant.
    """

    def __call__(
        self, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...], out: Tensor
    ) -> Callable[[Tensor, bool], Tensor | None]: ...


class Observer(Protocol):
    """Receives tensors before and after they are rounded."""

    def wants(self, site: str, role: str) -> bool:
        """Return whether to observe this call of the site; called once a call, before anything is copied."""
        ...

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, cut: Cut | None = None) -> None:
        """Receive one rounding. cut: how the tensor was cut into blocks, in a format whose numbers share scales."""
        ...


class Attended(NamedTuple):
    """State tracked for a tensor that was computed from q k^T.

    scores: the input of softmax, if the tensor holds softmax's weights, changed by dropout at most; else None.
    keep: the factors by which dropout multiplied the weights; None without dropout.
    writes: the number of writes to the scores when the tensor was tracked.
    is_turned: whether keys lie along the last axis but one.
    own: the number of writes to the tensor itself when it was tracked.
    """

    scores: Tensor | None
    keep: Tensor | None
    writes: int = 0
    is_turned: bool = False
    own: int = 0

    def of(self, x: Tensor) -> Attended:
        """Return the same state for the tensor `x`, valid until `x` is written to."""
        return self._replace(own=0 if x.is_inference() else writes_to(x))

    def is_still(self, x: Tensor) -> bool:
        """True if nobody has written to the tensor since it was tracked, directly or through a view."""
        return x.is_inference() or self.own == writes_to(x)

    def moved(self, move: Callable[[Tensor], Tensor], is_turned: bool | None = None) -> Attended:
        """Return the state of weights after `move`. is_turned: its new value; None keeps the old one."""
        if self.scores is None:
            return self
        scores, keep = move(self.scores), None if self.keep is None else move(self.keep)
        # Moved scores may be a copy with another version counter: the difference of the counts keeps earlier writes.
        writes = self.writes + writes_to(scores) - writes_to(self.scores)
        return Attended(scores, keep, writes, self.is_turned if is_turned is None else is_turned)


class Listeners:
    """The observer, the scaling and the amax histories of one quantised model, shared by its modules.

    Copies and pickles contain the histories, but not the observer, scaling, kept weights and attended tensors.

    has_names: whether torch's dtype of a format's name may stand for the format. It may not if modules compute in
        several formats, because the least number of one format, used as a mask, is an ordinary number in another.
    needs_cache: whether a call of the model that stores no keys and values is an error.
    rounds_few_bits_stochastically: whether the scaling fits each gradient to its format, and needs gradients of few
        bits rounded stochastically if no rounding was named.
    """

    def __init__(self, histories: Histories | None = None, has_names: bool = True, needs_cache: bool = False) -> None:
        self.has_names, self.needs_cache = has_names, needs_cache
        self.observer: Observer | None = None
        self.scaling: Scaling | None = None
        self.kept_weights: KeptWeights | None = None  # while the model is frozen
        self.attended: ByIdentity[Attended] = ByIdentity()  # of tensors behind q k^T, if an attention has points
        self.rounds_few_bits_stochastically = False
        self.histories = Histories() if histories is None else histories

    def watching(self, site: str, role: str) -> Observer | None:
        """Return the observer, if there is one and it wants this call."""
        return self.observer if self.observer is not None and self.observer.wants(site, role) else None

    def __deepcopy__(self, memo: Any) -> Listeners:
        return Listeners(copy.deepcopy(self.histories, memo), self.has_names, self.needs_cache)

    def __reduce__(self) -> Any:
        return Listeners, (self.histories, self.has_names, self.needs_cache)


class Plans(dict[Any, Any]):
    """Cache of each function's treatment. A copy begins empty, and fills again.

    backward: the specs, the mark and the plans for the model's own code in the backward pass: of activations (False)
        and of errors (True). Each backward pass makes new scopes, which share these entries.
    kernels: the policy's functions that replace operations, by operation name. They are stored here, because each call
        makes a new scope.
    border: the scope in which a fused module rounds its output; None for any other module.
    """

    __slots__ = ("backward", "border", "kernels")

    def __init__(self, kernels: Mapping[str, Callable[..., Any]] | None = None, border: Scope | None = None) -> None:
        super().__init__()
        self.backward: dict[bool, tuple[RoleSpecs, str | None, Plans]] = {}
        self.kernels, self.border = kernels or {}, border

    def __deepcopy__(self, memo: Any) -> Plans:
        return Plans(self.kernels, copy.deepcopy(self.border, memo))

    def __reduce__(self) -> Any:
        return Plans, (self.kernels, self.border)


class Scope:
    """The running module: its name, its formats, and the operations counted so far.

    name: as in model.named_modules().
    specs: the roundings by role.
    float32: operations whose results are not rounded.
    listeners: the listeners of the model.
    weights: the tensors that stand in for parameters, of this model and of models around it.
    wide: collects the operations whose results were float32 on purpose, in the order of their calls.
    products: how operands of products are quantised; None if they are not.
    cache: how keys and values are rounded when a cache stores them; None if they are not.
    dtype: torch's dtype with the name of the activations' format; None if torch has none.
    activation: the mark of a tensor in the activations' format; None if they have none.
    weight: the mark of a weight's rounded copy; empty if weights are not rounded.
    plans: treatment of each function that was called, shared by all calls of the module.
    rounds_nothing: whether every role has float32, and no operand is quantised.
    is_float32: whether every role has float32, and the model is not float64: float64 tensors then stay as they are.
    is_float64: whether the model's own parameters are float64: the dtype float64 then does not mean float32 on purpose.
    write: function that takes a parameter and a function `run`, and calls `run()`, which writes to the parameter; None
        if parameters take any number.
    errors: the mode that knows which tensors depend on the incoming gradient, in the backward pass of a model's own
        code; else None.
    is_in_step: whether a step is recorded although gradients are off, as within the forward of an autograd Function.
    made: within such a forward, the operation and the operands of each result, if there is a scaling; else None.
    has_kernels: whether `plans` has kernels of the policy; torch.compile cannot guard a look-up in `plans` itself.
    """

    __slots__ = (
        "activation", "cache", "counts", "dtype", "errors", "float32", "has_kernels", "is_float32", "is_float64",
        "is_in_step", "listeners", "made", "name", "plans", "products", "rounds_nothing", "specs", "weight", "weights",
        "wide", "write",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        specs: RoleSpecs,
        float32: tuple[str, ...],
        listeners: Listeners,
        weights: Weights = _NO_WEIGHTS,
        wide: dict[str, None] | None = None,
        products: Products | None = None,
        cache: Mapping[str, Operand] | None = None,
    ) -> None:
        self.name, self.specs, self.float32, self.listeners, self.weights = name, specs, float32, listeners, weights
        self.wide: dict[str, None] = {} if wide is None else wide
        self.products, self.cache = products, cache
        self.dtype = None if specs.activation is None else specs.activation.dtype
        self.activation = None if specs.activation is None else specs.activation.text
        self.weight = "" if specs.weight is None else specs.weight.text
        if self.weight and self.weight != self.activation:
            self.weight += OF_A_WEIGHT
        self.plans = Plans()
        self.counts: dict[str, int] = {}
        self.rounds_nothing = products is None and all(spec is None or spec.is_float32 for spec in specs)
        self.is_float32, self.is_float64 = False, False  # set by `again`, which knows the model
        self.write: Callable[[Tensor, Callable[[], Any]], Any] | None = None
        self.errors: Any = None
        self.is_in_step = False
        self.made: Any = None
        self.has_kernels = False

    def by_kernel(self, emulation: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the policy's function for an operation under emulation; return NotImplemented if there is none."""
        if emulation.is_in_kernel or call.name not in self.plans.kernels:
            return NotImplemented
        emulation.is_in_kernel = True
        # Inside of a fused module nothing is rounded, so that the function runs in the scope of the module's border.
        emulation.scope = self.plans.border or self
        try:
            with emulation:
                return self.plans.kernels[call.name](*args, **kwargs)
        finally:
            emulation.scope, emulation.is_in_kernel = self, False

    def again(self, weights: Weights, wide: dict[str, None], is_float64: bool, kind: type[Scope] | None = None) -> Any:
        """Return the scope of another call of the module, with no operation counted yet. kind: a subclass, or None."""
        # `__init__` is skipped: each call of each module makes a scope, and all that follows from the policy is known.
        scope = object.__new__(kind or Scope)
        scope.name, scope.specs, scope.float32, scope.listeners = self.name, self.specs, self.float32, self.listeners
        scope.products, scope.dtype, scope.plans, scope.cache = self.products, self.dtype, self.plans, self.cache
        scope.activation, scope.weight, scope.rounds_nothing = self.activation, self.weight, self.rounds_nothing
        scope.is_float32, scope.is_float64 = self.rounds_nothing and not is_float64, is_float64
        scope.weights, scope.wide, scope.counts, scope.write = weights, wide, {}, self.write
        scope.errors, scope.made, scope.is_in_step, scope.has_kernels = None, None, False, self.has_kernels
        return scope

    def of_block(self, listeners: Listeners) -> Scope:
        """Return the scope of a block of `emulate` with the same formats and plans, and with listeners of its own."""
        scope: Scope = self.again(_NO_WEIGHTS, {}, False)
        scope.listeners, scope.is_float32 = listeners, False
        return scope

    def stands_in(self, x: Tensor) -> bool:
        """True if `x` stands in for a parameter. Callers on hot paths first look up the id of `x` in `weights`."""
        # The id may have belonged to a tensor that was freed.
        reference = self.weights.get(id(x))
        return reference is not None and reference() is x

    def site(self, operation: str) -> str:
        """Return the site of the next call of `operation`: 'layer1.conv1:conv2d', then 'layer1.conv1:conv2d_1'."""
        seen = self.counts.get(operation, 0)
        self.counts[operation] = seen + 1
        return f"{self.name}:{operation}_{seen}" if seen else f"{self.name}:{operation}"

    def repeated(self, times: int) -> Iterator[int]:
        """Yield the passes of a loop, each with the sites of the first."""
        # A recurrent layer has one site for all time steps, however long the sequence is.
        before = dict(self.counts)
        for i in range(times):
            self.counts = dict(before)
            yield i


class BackwardScope(Scope):
    """Scope of the model's own code in a backward pass; the names of its sites also contain the code's name.

    Results are activations, whose gradients are rounded as in the forward pass, or errors. In the scope of errors,
    `specs.activation` is the rounding of errors.
    """

    __slots__ = ("label",)
    label: str

    def site(self, operation: str) -> str:
        return super().site(f"{self.label}.{operation}")


def in_backward(scope: Scope, label: str, errors: Any, is_of_errors: bool) -> BackwardScope:
    """Return the scope for a model's own code in the backward pass, made from the forward pass's scope.

    label: the name of the code.
    errors: as in `Scope`.
    is_of_errors: whether results are errors; else they are activations.
    """
    made: BackwardScope = scope.again(scope.weights, {}, scope.is_float64, BackwardScope)
    made.has_kernels = False
    made.label, made.errors, made.is_in_step, made.is_float32 = label, errors, True, scope.is_float32
    known = scope.plans.backward.get(is_of_errors)
    if known is None:
        known = scope.plans.backward[is_of_errors] = (*_formats_in_backward(scope, is_of_errors), Plans())
    made.specs, made.activation, made.plans = known
    return made


def _formats_in_backward(scope: Scope, is_of_errors: bool) -> tuple[RoleSpecs, str | None]:
    """Return the specs, and the mark of tensors in the activations' format."""
    if not is_of_errors:
        return scope.specs, scope.activation
    specs = scope.specs._replace(activation=scope.specs.error, error=None)
    # If activations and errors differ in format, no mark counts: an activation next to an error is rounded like errors.
    is_one = specs.activation is not None and specs.activation.text == scope.activation
    return NO_SPECS if specs == NO_SPECS else specs, scope.activation if is_one else None


def make_scope(name: str, policy: Policy, listeners: Listeners) -> Scope:
    """Return the scope of a module under its policy."""
    specs, border = policy.specs(), None
    # A fused module computes in float32 inside; its output is rounded in a second scope, when the module returns.
    if policy.fused:
        border = make_scope(name, replace(policy, fused=False), listeners)
        specs = specs._replace(activation=None, error=None)
    specs = NO_SPECS if specs == NO_SPECS else specs
    scope = Scope(name, specs, policy.float32, listeners, products=policy.products, cache=policy.cached)
    scope.plans, scope.has_kernels = Plans(policy.kernels, border), bool(policy.kernels)
    return scope


class _Active(threading.local):
    emulation: Any = None  # the mode that is entered in this thread
    stand_ins: Mapping[int, Tensor] | None = None  # by the id of the tensor that each replaces, while a program is made


active = _Active()
