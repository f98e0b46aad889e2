"""A step of any optimizer in a small format: its own code runs, and each of its operations is rounded.

`format_steps.py` has the steps of SGD and Adam, which keep compensations as well; what runs here is the optimizer as it
is, emulated as a model would be. With `arithmetic="format"` each number of Python is rounded to the format first, with
"torch" those that are added or are exponents, as in torch's kernels on the CPU, and on a card exponents alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from fpsim.models.format_steps import has_format_step, require_format_step
from fpsim.models.parameter_store import ParameterStore
from fpsim.models.storing import states_in
from fpsim.policies.policy import Policy
from fpsim.tensors.launch import round_memory_, rounded
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import version_of
from fpsim.torch_modes import push_mode, take_off
from fpsim.undoing import Undo

__all__ = ["EmulatedStep", "emulated_step_of"]


class EmulatedStep:
    """The emulation around each step of one optimizer.

    spec: of weights, states, gradients and every result.
    as_torch: whether only those numbers of Python are rounded that torch's kernels round.
    """

    def __init__(self, spec: RoundingSpec, as_torch: bool) -> None:
        self._spec, self._as_torch, self._undo = spec, as_torch, Undo()
        self._wanted: dict[Tensor, Tensor] = {}  # by observed parameter, without the last rounding
        # by parameter: the user's gradient, what the step is given in its place, and the writes to that so far
        self._gradients: dict[Tensor, tuple[Tensor, Tensor, int]] = {}

    def begin(self, optimizer: Optimizer, observed: Mapping[Tensor, Any]) -> None:
        """Enter, until `end`; until then gradients are rounded ones."""
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
        for group in optimizer.param_groups:  # a learning rate, for instance
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
        """Leave; may be called again. Returns what the observed parameters' steps would have added.

        Gradients are those of before, but for those that the step has written to, put in another's place or dropped.
        """
        self._undo()
        for p, (gradient, given, writes) in self._gradients.items():
            if has_raised or (p.grad is given and version_of(given) == writes):
                p.grad = gradient
        wanted, self._wanted, self._gradients = self._wanted, {}, {}
        return wanted

    def _know_state(self, name: str, x: Tensor) -> None:
        """A state of an earlier step has the dtype that it was made in.

        Of a checkpoint's nobody knows: a number without axes, such as "step", is float32 as in torch's optimizers.
        """
        if not is_made_here(x) and (name == "step" or not x.dim()):
            active.emulation.mark_wide(x)
        elif not is_marked_wide(x) and format_of(x) != self._spec.text:
            round_memory_(x, self._spec)
            mark(x, self._spec.text)

    def _write(self, p: Tensor, run: Callable[[], Any]) -> Any:
        """A write to a parameter, which is rounded as any result."""
        before = p.detach().clone() if p in self._wanted else None
        out = run()
        if before is not None:
            self._wanted[p] += p.detach() - before
        round_memory_(p.detach(), self._spec)
        return out


# Functions of which torch's kernels have a number of Python in the tensor's dtype, on the CPU and on a card.
_ROUNDED_BY_TORCH = frozenset(
    "add sub subtract rsub radd iadd isub pow ipow foreach_add foreach_sub foreach_pow".split()
)
_ROUNDED_ON_CARD = frozenset("pow ipow".split())


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")


class _NumbersInFormat(TorchFunctionMode):
    """Numbers of Python beside tensors of the format are numbers of it.

    as_torch: only where torch's kernels of bfloat16 on the tensors' device have them so.
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
        is_meant = not self._as_torch or _name_of(func) in rounded
        if is_meant and not self.has_ended and any(not is_marked_wide(x) for x in tensors):
            args = tuple(numbers_in_format(x, self._fmt) for x in args)
            kwargs = {name: numbers_in_format(x, self._fmt) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _leave(numbers: _NumbersInFormat) -> None:
    numbers.has_ended = True
    take_off(numbers)


def emulated_step_of(optimizer: Optimizer, stores: Sequence[ParameterStore]) -> EmulatedStep | None:
    """What rounds each operation of an optimizer's own code; None where nobody asked, or `format_steps` has its step.

    Raises ValueError for an update that neither can compute.
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
