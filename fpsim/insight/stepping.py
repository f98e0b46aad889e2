"""Run the step of a tool, a function without arguments or a batch, and restore the state that it changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fpsim.border import require_initialised
from fpsim.checks import require_callable, required_arguments, shown
from fpsim.emulation.scope import Listeners, Observer
from fpsim.emulation.tracing import Edit, Operation, Trace, Visitor
from fpsim.models.installed import emulated_forwards
from fpsim.models.optimizers import quantized_optimizer_of
from fpsim.models.quantize import dequantize, install_policies, listeners, policies_of, quantize, try_policy
from fpsim.models.storing import states_in
from fpsim.policies.policy import FormatLike
from fpsim.tensors.noise import keep_random_numbers
from fpsim.torch_modes import hook_steps, unhook_steps
from fpsim.undoing import Undo

__all__ = [
    "Kept",
    "as_step",
    "called",
    "is_function",
    "loss_of",
    "nothing_ran",
    "preserve",
    "require_unrecorded",
    "switching",
    "traced",
]


def is_function(value: object) -> bool:
    """True if a value is a function to call rather than a batch. Modules are callable, but a module is not a step."""
    return callable(value) and not isinstance(value, Tensor | nn.Module)


def as_step(
    model: nn.Module, step: Any, loss: Callable[[Any], Tensor] | None, verb: str, arguments: int = 0
) -> Callable[..., Any]:
    """Return a function that runs a step.

    step: a function, or a batch. With a batch, the model's output has a `.loss`, or `loss` computes it.
    arguments: how many arguments the function takes.
    verb: the public function that runs the step, for error messages.
    Raises TypeError for anything else, and for `loss` with a function; ValueError for a lazy model that never ran.
    """
    require_initialised(model)
    example = f"fpsim.{verb}(model, lambda: loss(model(x)).backward())"
    if is_function(step):
        needed = required_arguments(step)
        if needed > arguments:
            wanted = "one of the batch number" if arguments else "one without arguments"
            raise TypeError(
                f"Got a function that needs {needed} argument{'s' * (needed > 1)} as the step of fpsim.{verb}. "
                f"Expected {wanted}: {example}."
            )
        if loss is not None:
            raise TypeError(
                f"Got loss={shown(loss)} with a step that is a function. Expected it with a batch: {example}."
            )
        return step  # type: ignore[no-any-return]
    if not isinstance(step, Tensor | tuple | list | Mapping):
        raise TypeError(
            f"Got {shown(step)}, of type {type(step).__name__}, as the step of fpsim.{verb}. Expected a function "
            f"without arguments, or a batch: {example}."
        )
    if loss is not None:
        require_callable("loss", loss, "lambda output: output.mean()")

    def run() -> Tensor:
        total = loss_of(called(model, step), loss)
        if total is None:
            raise TypeError(
                f"Got a batch, and the output of {type(model).__name__} for it has no `loss`. "
                f"Expected loss=lambda output: ..., or a step: {example}."
            )
        # torch refuses a backward pass if the model is frozen, or under no_grad.
        if total.requires_grad:
            total.backward()
        return total

    return run


def nothing_ran(model: nn.Module, verb: str) -> ValueError:
    """Return the error for a step in which a tool saw no operation."""
    return ValueError(
        f"fpsim.{verb} saw no operation of {type(model).__name__} in the step. Expected: a step that calls this model, "
        f"and not a copy of it or its compiled form: fpsim.{verb}(model, lambda: loss(model(x)).backward())."
    )


def called(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a tensor, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """Return the loss of an output; None if it has none. Raises TypeError for a loss that is not one element."""
    total = loss(output) if loss is not None else getattr(output, "loss", None)
    if total is not None and (not isinstance(total, Tensor) or total.numel() != 1):
        raise TypeError(f"loss returned {shown(total)}. Expected: a tensor of one element.")
    return total


def preserve(model: nn.Module, undo: Undo) -> None:
    """Let `undo` restore a model (see `Kept`), the optimizers that step it until then, and random numbers."""
    kept = Kept(model)
    undo.by(kept.restore)

    # The optimizers of a step are in its closure. They become known only when they step.
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kept.know(optimizer)

    undo.by(partial(unhook_steps, None, before, _nothing))
    hook_steps(None, before, _nothing)
    keep_random_numbers(undo)


def _nothing(*_: Any) -> None:
    pass


@runtime_checkable
class WatchingVisitor(Visitor, Observer, Protocol):
    """A visitor of a trace that also observes the emulation's roundings, and reads the arguments of calls."""

    trace: Trace | None

    def keeps(self, x: Tensor) -> bool:
        """True if a tensor must be copied before a call writes to it."""

    def cast(self, operation: Operation, integers: Tensor) -> None:
        """Visit the integers to which a call casts the result of an operation."""


def traced(model: nn.Module, visitor: Visitor, verb: str, undo: Undo, edit: Edit | None = None) -> Trace:
    """Show this thread's operations of `model` to a visitor, until `undo` runs.

    The calls of the model are traced from here on; `run` of the returned trace runs a step, and traces its calls
    outside of the model too.

    verb: the public function that runs the step, for error messages.
    Raises RuntimeError if another thread runs a step of this model, ValueError if the visitor watches and the model is
    being recorded.
    """
    is_emulated = any(emulated_forwards(model))
    keeps = visitor.keeps if isinstance(visitor, WatchingVisitor) else None
    trace = Trace(model, visitor, is_emulated, verb=verb, edit=edit, keeps=keeps)
    undo.by(trace.remove)
    trace.install_alone()
    if isinstance(visitor, WatchingVisitor):
        visitor.trace, trace.on_integers = trace, visitor.cast
        # A model has only one observer: the visitor would replace the observer of a recording.
        registered = listeners(model) if is_emulated else []
        require_unrecorded(registered)
        undo.by(partial(_observe, registered, None))
        _observe(registered, visitor)
    return trace


def require_unrecorded(registered: Iterable[Listeners]) -> None:
    if any(listener.observer is not None for listener in registered):
        raise ValueError("This model is being recorded. Leave the `with fpsim.record(...)` block first.")


def _observe(registered: Iterable[Listeners], observer: Observer | None) -> None:
    for listener in registered:
        listener.observer = observer


def switching(model: nn.Module, undo: Undo) -> Callable[[FormatLike], None]:
    """Return a function that switches the formats of `model` itself, until `undo` runs.

    A step runs the model in its closure, so a copy of the model in other formats would not be run.
    """
    if any(emulated_forwards(model)):
        undo.by(partial(install_policies, model, policies_of(model)))
    else:
        # Only a quantised model has formats to switch. With format None the model computes as before.
        undo.by(partial(_plain_again, model))
        quantize(model, None, inplace=True)
    return partial(try_policy, model)


def _plain_again(model: nn.Module) -> None:
    # The undo may run twice, or after an interrupt of `quantize`. Then the model is plain, and `dequantize` refuses it.
    if any(emulated_forwards(model)):
        dequantize(model, inplace=True)


class Kept:
    """The kept state of a model, its optimizers and a scaler; `restore` puts it back.

    The model's state is its parameters, buffers, gradients, the history of delayed scales, and which modules are in
    training mode. A quantised optimizer's state includes its copies of weights.

    optimizers: the optimizers whose states are kept.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> None:
        self.model, self.scaler = model, scaler
        self.optimizers: list[torch.optim.Optimizer] = []
        self._states: list[tuple[list[dict[str, Any]], dict[Any, _KeptState]]] = []
        self._quantized: list[Callable[[], None]] = []
        self._modules = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
        ]
        self.tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self.gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        histories = [listener.histories for listener in listeners(model)] if any(emulated_forwards(model)) else []
        self._histories = [(history, history.state_dict()) for history in histories]
        # The `state_dict` lacks the stage of each optimizer, such as whether its gradients are unscaled.
        self._scaler_state = copy.deepcopy(vars(scaler)) if isinstance(scaler, torch.amp.GradScaler) else None
        if optimizer is not None:
            self.know(optimizer)

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state of an optimizer too, if it has parameters of the model and is not kept yet."""
        # Hooks see the steps of all optimizers in the process, including those of other models.
        own = {id(p) for p in self.model.parameters()}
        is_own = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if not is_own or any(optimizer is known for known in self.optimizers):
            return
        if (quantized := quantized_optimizer_of(optimizer)) is not None:
            self._quantized.append(quantized.keeping())
        groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        states = {p: _KeptState(state) for p, state in optimizer.state.items()}
        self.optimizers.append(optimizer)
        self._states.append((groups, states))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state of an optimizer, and pause records of its lost updates until `restore`."""
        self.know(optimizer)
        quantized = quantized_optimizer_of(optimizer)
        # The records count the steps of the training only, and not those of a tool.
        if quantized is not None and any(optimizer is known for known in self.optimizers):
            quantized.observers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all that was kept."""
        for module, training in self._modules:
            module.training = training
        # A forward may assign a new tensor to a buffer rather than write into it.
        for module, name, buffer in self._buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        # Equal tensors are not written to: a write raises their version, and breaks graphs that have saved them.
        for tensor, value in self.tensors:
            if not _same(tensor, value):
                tensor.copy_(value)
        for parameter, gradient, held in self.gradients:
            if gradient is not None and held is not None and not _same(gradient, held):
                gradient.copy_(held)
            parameter.grad = gradient
        for history, saved in self._histories:
            history.load_state_dict(saved)
        for optimizer, (groups, states) in zip(self.optimizers, self._states, strict=True):
            _restore_optimizer(optimizer, groups, states)
        for put_back in self._quantized:
            put_back()
        if self._scaler_state is not None:
            vars(self.scaler).clear()
            vars(self.scaler).update(copy.deepcopy(self._scaler_state))


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], states: dict[Any, _KeptState]
) -> None:
    # A step may have added a parameter group, such as one for layers that it begins to train.
    del optimizer.param_groups[len(groups) :]
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = _copied(value)
    # A state that did not exist before the step is removed, so that the next step initialises it again.
    for parameter in [p for p in optimizer.state if p not in states]:
        del optimizer.state[parameter]
    for parameter, saved_state in states.items():
        saved_state.restore(optimizer.state[parameter])


class _KeptState:
    """Optimizer state of one parameter: its tensors at any depth, copies of their numbers, and their containers."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.tensors = [(found.x, found.x.detach().clone()) for found in states_in(state)]
        self.held = _copied_but_tensors(state)

    def restore(self, state: dict[Any, Any]) -> None:
        """Restore the state, in place in the same tensors."""
        for x, value in self.tensors:
            if not _same(x, value):
                x.copy_(value)
        state.clear()
        state.update(_copied_but_tensors(self.held))


def _copied_but_tensors(value: Any) -> Any:
    """Copy the containers of a state, with the original tensors in them."""
    # Only exact types are copied: subclasses may need other arguments than their items, as named tuples do.
    if type(value) is dict:
        return {key: _copied_but_tensors(x) for key, x in value.items()}
    if type(value) is list:
        return [_copied_but_tensors(x) for x in value]
    if type(value) is tuple:
        return tuple(_copied_but_tensors(x) for x in value)
    return value if isinstance(value, Tensor) else copy.copy(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.layout is torch.strided and torch.equal(a, b)
