"""Optimizer steps in a small format: SGD and Adam written out, and any other optimizer emulated.

The steps of SGD and Adam round each operation and each coefficient. The operations are those of torch's own
single-tensor loops, in the same order. torch's bfloat16 kernels on the CPU round the coefficient of a sum to bfloat16,
but keep the coefficients of products, quotients, `lerp`, `addcmul` and `addcdiv` in float32. CUDA kernels keep all
coefficients in float32. `arithmetic="torch"` does the same as these kernels; `arithmetic="format"` rounds all
coefficients. One effect of torch's vectorised loops on the CPU is not reproduced: `a.add(b, alpha=c)` rounds once, but
in the last `numel % 32` elements it rounds the product as well.

Other optimizers run their own code, which is emulated as a model would be. `arithmetic="format"` rounds each Python
number to the format first. `arithmetic="torch"` rounds only addends and exponents, as torch's CPU kernels do, and on a
card only exponents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.entering import enter
from fpsim.emulation.marks import forget, format_of, is_made_here, is_marked_wide, mark
from fpsim.emulation.promotion import numbers_in_format
from fpsim.emulation.scope import Listeners, active, make_scope
from fpsim.emulation.steps import note_emulated
from fpsim.formats.blocks import Element
from fpsim.models.parameter_store import COMPENSATION, SECOND, ParameterStore
from fpsim.models.storing import local_part, states_in
from fpsim.policies.policy import Policy
from fpsim.tensors.launch import round_memory_, rounded
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import version_of
from fpsim.torch_modes import push_mode, take_off
from fpsim.undoing import Undo

__all__ = ["EmulatedStep", "emulated_step_of", "has_format_step", "require_format_step", "run_format_step"]


Wanted = Callable[[], Tensor]  # returns the update of a step, as a separate tensor


class Arithmetic:
    """Arithmetic in one format: each operation computes in float32 and is rounded once.

    as_torch: whether to round coefficients as torch's CPU kernels do, or as its CUDA kernels do if `is_on_card`.
    """

    def __init__(self, spec: RoundingSpec, as_torch: bool, is_on_card: bool) -> None:
        self.spec = spec
        in_format: Callable[[float], float] = cache(self._rounded)
        self.summed = float if as_torch and is_on_card else in_format  # the coefficient of a sum
        self.factor = float if as_torch else in_format  # any other coefficient

    def _rounded(self, x: float) -> float:
        """Return a coefficient in the format."""
        return float(rounded(torch.tensor(x, dtype=torch.float32, device="cpu"), self.spec))

    def keep(self, x: Tensor) -> Tensor:
        """Round the result of an operation in place, and return it."""
        round_memory_(x, self.spec)
        return x


def has_format_step(optimizer: Optimizer) -> bool:
    """Return whether this module writes out the step of this optimizer."""
    # The class has to be exact, because a subclass may have another step.
    return type(optimizer) in _STEPS


def require_format_step(optimizer: Optimizer, arithmetic: str) -> None:
    """Raise ValueError for an optimizer whose step cannot be computed in a format."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for name in ("fused", "capturable", "differentiable"):
            if group.get(name):
                raise ValueError(
                    f"arithmetic={arithmetic!r} was given for {kind}({name}=True), whose step is not made of single "
                    f"operations. Use {name}=False."
                )


@torch.no_grad()
def run_format_step(
    optimizer: Optimizer, group: dict[str, Any], store: ParameterStore, wants_update: bool = False
) -> Tensor | None:
    """Step one parameter that has a gradient.

    group: the parameter group of this parameter.
    wants_update: whether to return the update that the optimizer computed, before it was added to the weight.
    """
    p = store.parameter
    if p.grad is None:
        raise AssertionError("a parameter without a gradient has no step")
    if p.grad.is_sparse:
        raise RuntimeError(
            f"arithmetic={store.update.arithmetic!r} got a sparse gradient of {store.name}. Use an embedding with "
            f"sparse=False, or arithmetic='float32'."
        )
    assert store.weight is not None
    assert isinstance(store.weight.spec, RoundingSpec)
    a = _arithmetic(store.weight.spec, store.update.arithmetic == "torch", p.is_cuda)
    weight, gradient = local_part(p.detach()), local_part(p.grad.detach())
    gradient = rounded(-gradient if group["maximize"] else gradient, a.spec)
    before = weight.clone() if wants_update else weight
    u = _STEPS[type(optimizer)](a, store, weight, gradient, optimizer.state[p], group)
    if not wants_update:
        return None
    # A decay that shrinks the weight before the step is a part of the update too.
    decays_before = group.get("decoupled_weight_decay", False) and not store.update.decays_inside
    return u() - before * (float(group["lr"]) * float(group["weight_decay"])) if decays_before else u().clone()


_arithmetic = cache(Arithmetic)


def _sgd(a: Arithmetic, store: ParameterStore, p: Tensor, g: Tensor, state: Any, group: dict[str, Any]) -> Wanted:
    """Step as torch.optim.sgd._single_tensor_sgd does."""
    keep, summed, factor = a.keep, a.summed, a.factor
    if group["weight_decay"]:
        g = keep(g.add(p, alpha=summed(float(group["weight_decay"]))))
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = g.clone()
        else:
            keep(buffer.mul_(factor(group["momentum"])))
            keep(buffer.add_(g, alpha=summed(1 - group["dampening"])))
        g = keep(g.add(buffer, alpha=summed(group["momentum"]))) if group["nesterov"] else buffer
    lr = float(group["lr"])
    return _apply(a, store, p, lambda x: x.add_(g, alpha=-summed(lr)), lambda: keep(g * -factor(lr)))


def _adam(a: Arithmetic, store: ParameterStore, p: Tensor, g: Tensor, state: Any, group: dict[str, Any]) -> Wanted:
    """Step as torch.optim.adam._single_tensor_adam does."""
    keep, summed, factor = a.keep, a.summed, a.factor
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]
        state.update({name: torch.zeros_like(store.parameter.detach()) for name in names})
    state["step"] += 1
    step, (beta1, beta2), lr = float(state["step"]), map(float, group["betas"]), float(group["lr"])
    decay, decoupled = float(group["weight_decay"]), bool(group["decoupled_weight_decay"])
    m, v = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
    if decay and not decoupled:
        g = keep(g.add(p, alpha=summed(decay)))
    keep(m.lerp_(g, factor(1 - beta1)))
    keep(v.mul_(factor(beta2)))
    keep(v.addcmul_(g, g, value=factor(1 - beta2)))
    if group["amsgrad"]:
        v = torch.maximum(local_part(state["max_exp_avg_sq"]), v, out=local_part(state["max_exp_avg_sq"]))
    step_size = factor(lr / (1 - beta1**step))
    denominator = keep(keep(v.sqrt()).div_(factor((1 - beta2**step) ** 0.5)))
    denominator = keep(denominator.add_(summed(eps))) if (eps := float(group["eps"])) else denominator
    inside = decay and decoupled and store.update.decays_inside

    def wanted() -> Tensor:
        """Return -step_size * m / denominator - lr * decay * p, as Collage's AdamW computes it."""
        u = keep(keep(m * -step_size).div_(denominator))
        return keep(u.sub_(keep(p * factor(lr * decay)))) if inside else u

    if inside:
        u = wanted()
        return _apply(a, store, p, lambda x: x.add_(u), lambda: u)
    if decay and decoupled:
        keep(p.mul_(factor(1 - lr * decay)))
    return _apply(a, store, p, lambda x: x.addcdiv_(m, denominator, value=-step_size), wanted)


def _apply(a: Arithmetic, store: ParameterStore, p: Tensor, add: Callable[[Tensor], Tensor], update: Wanted) -> Wanted:
    """Add an update to the weight, and store the rounding error if there is a compensation.

    add: adds the update to a tensor, in one operation.
    update: returns the update as a separate tensor.
    """
    keep = a.keep
    # This is Kahan's sum, as in torch-optimi, and in AnyPrecisionAdamW of torchdistx.
    if COMPENSATION in store.kept:
        k, old = local_part(store.kept[COMPENSATION]), p.clone()
        keep(add(k))
        keep(p.add_(k))
        keep(k.add_(keep(old.sub_(p))))
    # This is Collage's "Grow": Fast2Sum, which is repeated to bring the pair in order.
    elif SECOND in store.kept:
        rest, old, u = local_part(store.kept[SECOND]), p.clone(), update()
        whole = keep(p + u)
        keep(rest.add_(keep(u - keep(whole - old))))
        p.copy_(keep(whole + rest))
        keep(rest.sub_(keep(p - whole)))
    else:
        keep(add(p))
    return update


_STEPS: dict[type, Callable[..., Wanted]] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}


class EmulatedStep:
    """The emulation around each step of one optimizer.

    spec: the rounding of weights, states, gradients and every result.
    as_torch: whether to round only those Python numbers that torch's kernels round.
    """

    def __init__(self, spec: RoundingSpec, as_torch: bool) -> None:
        self._spec, self._as_torch, self._undo = spec, as_torch, Undo()
        self._wanted: dict[Tensor, Tensor] = {}  # by observed parameter: its update without the last rounding
        # By parameter: the user's gradient, the tensor that replaces it during the step, and the write count of that
        # tensor.
        self._gradients: dict[Tensor, tuple[Tensor, Tensor, int]] = {}

    def begin(self, optimizer: Optimizer, observed: Mapping[Tensor, Any]) -> None:
        """Enter the emulation, until `end` is called. In between, parameters have rounded gradients."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            if p.grad.is_sparse:
                raise RuntimeError(
                    f"{type(optimizer).__name__} got a sparse gradient, and its step is computed in {self._spec.fmt}. "
                    f"Use an embedding with sparse=False, or arithmetic='float32'."
                )
        self._wanted = {p: torch.zeros_like(p.detach()) for p in parameters if p in observed}
        scope = make_scope("", Policy(weight=self._spec.fmt, activation=self._spec.fmt), Listeners())
        scope.write = self._write
        note_emulated(optimizer)
        enter(scope, self._undo)
        # Tensors among the options, such as a learning rate, stay float32.
        for group in optimizer.param_groups:
            for x in (x for name, x in group.items() if name != "params" and isinstance(x, Tensor)):
                if x.is_floating_point() and not is_made_here(x):
                    self._undo.by(partial(forget, x))
                    active.emulation.mark_wide(x)
        for p in parameters:
            given = rounded(p.grad.detach(), self._spec)
            mark(given, self._spec.text)
            self._gradients[p] = p.grad, given, version_of(given)
            p.grad = given
            for state in states_in(optimizer.state[p]):
                if state.x.is_floating_point():
                    self._know_state(state.name, state.x)
        numbers = _NumbersInFormat(self._spec.fmt, self._as_torch)
        self._undo.by(partial(_leave, numbers))
        push_mode(numbers)

    def end(self, has_raised: bool = False) -> dict[Tensor, Tensor]:
        """Leave the emulation, and return the updates of the observed parameters without the last rounding.

        The method may be called again.
        """
        self._undo()
        # Gradients are put back, except for those that the step itself has written to, replaced or dropped.
        for p, (gradient, given, writes) in self._gradients.items():
            if has_raised or (p.grad is given and version_of(given) == writes):
                p.grad = gradient
        wanted, self._wanted, self._gradients = self._wanted, {}, {}
        return wanted

    def _know_state(self, name: str, x: Tensor) -> None:
        """Mark a state as float32 or as rounded to the format, unless an earlier step has marked it."""
        # A checkpoint does not say whether a state was float32: a number without axes, such as "step", counts as
        # float32, as in torch's optimizers.
        if not is_made_here(x) and (name == "step" or not x.dim()):
            active.emulation.mark_wide(x)
        elif not is_marked_wide(x) and format_of(x) != self._spec.text:
            round_memory_(x, self._spec)
            mark(x, self._spec.text)

    def _write(self, p: Tensor, run: Callable[[], Any]) -> Any:
        """Run a write to a parameter, and round the parameter as any other result."""
        before = p.detach().clone() if p in self._wanted else None
        out = run()
        if before is not None:
            self._wanted[p] += p.detach() - before
        round_memory_(p.detach(), self._spec)
        return out


# Functions whose kernels cast a Python number to the dtype of the tensor: on the CPU, and on a card.
_ROUNDED_BY_TORCH = frozenset(
    "add sub subtract rsub radd iadd isub pow ipow foreach_add foreach_sub foreach_pow".split()
)
_ROUNDED_ON_CARD = frozenset("pow ipow".split())


class _NumbersInFormat(TorchFunctionMode):
    """Round the Python numbers among the arguments of a function that takes tensors of the format to this format.

    as_torch: whether to round only where torch's bfloat16 kernels on the tensors' device round.
    """

    def __init__(self, fmt: Element, as_torch: bool) -> None:
        super().__init__()
        self._fmt, self._as_torch, self.has_ended = fmt, as_torch, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in (*tensors_in(args), *tensors_in(tuple(kwargs.values()))) if x.is_floating_point()]
        rounded = _ROUNDED_ON_CARD if any(x.is_cuda for x in tensors) else _ROUNDED_BY_TORCH
        # The names of in-place, reflected and foreach operations begin or end with underscores.
        is_meant = not self._as_torch or getattr(func, "__name__", "").strip("_") in rounded
        if is_meant and not self.has_ended and any(not is_marked_wide(x) for x in tensors):
            args = tuple(numbers_in_format(x, self._fmt) for x in args)
            kwargs = {name: numbers_in_format(x, self._fmt) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _leave(numbers: _NumbersInFormat) -> None:
    numbers.has_ended = True
    take_off(numbers)


def emulated_step_of(optimizer: Optimizer, stores: Sequence[ParameterStore]) -> EmulatedStep | None:
    """Return the emulation of an optimizer's own code.

    The result is None if no update is computed in a format, or if this module writes out the optimizer's step. Raises
    ValueError for an update that can be computed in neither way.
    """
    asked = [store.update for store in stores if store.update.is_in_format]
    for update in asked:
        require_format_step(optimizer, update.arithmetic)
    if not asked or has_format_step(optimizer):
        return None
    kind, update = type(optimizer).__name__, asked[0]
    if update.compensation is not None:
        raise ValueError(
            f"compensation={update.compensation!r} was given with arithmetic={update.arithmetic!r} for {kind}, whose "
            f"own code runs and knows no compensation. Use SGD, Adam or AdamW, or arithmetic='float32'."
        )
    if len({(store.update.weight, store.update.arithmetic) for store in stores}) > 1:
        raise ValueError(
            f"arithmetic={update.arithmetic!r} was given for some parameters of {kind}, whose code computes all of "
            f"them together. Give all parameters one update, or use an optimizer for each."
        )
    storage = update.weight_storage
    assert storage is not None
    assert isinstance(storage.spec, RoundingSpec)
    return EmulatedStep(storage.spec, update.arithmetic == "torch")
