"""quantize(model), dequantize(model), summary(model): emulation of a whole model, module by module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fpsim.emulation.entering import entered
from fpsim.emulation.scope import NO_SPECS, Listeners, Scope, make_scope
from fpsim.launch import round_memory_
from fpsim.policy import FormatLike, Policy, RoleSpecs, as_policy
from fpsim.torch_internals import direct_parameters

__all__ = ["Summary", "dequantize", "quantize", "round_parameters_", "summary"]

Model = TypeVar("Model", bound=nn.Module)


class _EmulatedForward:
    """Stands in for a module's `forward` and runs the true one under the module's scope."""

    def __init__(self, module: nn.Module, name: str, policy: Policy, listeners: Listeners) -> None:
        self.module, self.name, self.policy, self.listeners = module, name, policy, listeners
        self.inner = module.__dict__.get("forward")  # a library may have put its own there
        self._prepare()

    def _prepare(self) -> None:
        forward = self._true_forward()
        functools.update_wrapper(self, forward, updated=())  # bound: its signature has no self
        self.__code__ = getattr(forward, "__code__", None)  # torch.export asks where it is written
        scope = make_scope(self.name, self.policy, self.listeners)
        self._specs, self._float32 = scope.specs, scope.float32
        self._wide: dict[str, None] = {}

    def _true_forward(self) -> Callable[..., Any]:
        """What `module.forward` would be without this: a method, a static one, or what a library put there."""
        if self.inner is not None:
            return self.inner  # type: ignore[no-any-return]
        of_class = next(vars(c)["forward"] for c in type(self.module).__mro__ if "forward" in vars(c))
        return of_class.__get__(self.module) if hasattr(of_class, "__get__") else of_class  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("module", "name", "policy", "listeners", "inner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> _EmulatedForward:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return duplicate

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__ or "_specs" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._prepare()  # after a copy or a load, once the module is whole again
        return getattr(self, name)

    @property
    def wide(self) -> dict[str, None]:
        """The operations whose results were float32 on purpose in the last call."""
        return self._wide  # type: ignore[no-any-return]

    @property
    def specs(self) -> RoleSpecs:
        return self._specs  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        specs = self.specs
        forward = self._true_forward()
        self._wide = {}  # of this call, the last one
        scope = Scope(self.name, specs, self._float32, self.listeners, _replaced_parameters(self.module), self._wide)
        with entered(scope):
            return forward(*args, **kwargs)


def _replaced_parameters(module: nn.Module) -> list[int]:
    """The ids of the plain tensors that torch.func.functional_call put in the place of parameters.

    Of the module and its children: an attention uses the weights of its last layer itself.
    """
    return [
        id(p)
        for m in (module, *module.children())
        for p in direct_parameters(m)
        if type(p) is not nn.Parameter and not isinstance(p, nn.Parameter)
    ]


class _EmulatedRepr:
    """Stands in for a module's `extra_repr` and adds what is rounded."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        own = type(self.module).extra_repr(self.module)
        words = f"fpsim: {self.module.__dict__['forward'].specs}"
        return f"{own}, {words}" if own else words


def quantize(
    model: Model, fmt: FormatLike, *, rounding: str | Mapping[str, str] | None = None, inplace: bool = False
) -> Model:
    """A copy of `model` that computes, forward and backward, as hardware with format `fmt` would.

    Parameter names, `state_dict` keys and the class stay as they are, parameters stay float32 (a master copy that
    optimizers update), and `deepcopy`, `pickle` and `torch.save` work. Any of its submodules may be called alone.

    Integer, boolean, complex, sparse and float8 tensors are not rounded. Code that a checkpoint runs again outside of
    any module, and methods of the model other than the forwards of its modules, are not emulated. Neither is what
    `torch.fx.symbolic_trace` makes, which reads the class of the model, nor the copies of a `torch.fx.GraphModule`,
    which write their forward anew. What `copy.copy` and `nn.DataParallel` make runs on the original's parameters.

    model: any module; a copy of it is changed.
    fmt: a format for every role, by name or as FloatFormat, or a Policy that names formats by role and module.
    rounding: the rounding of every role, if not nearest-even or the policy's own.
    inplace: change `model` itself and return it.
    Raises TypeError for what is no nn.Module or cannot be emulated, ValueError for a pattern that matches no module
    and for a model that is quantised already.

    >>> model = quantize(nn.Linear(2, 2), fmt="fp16")
    >>> print(model)
    Linear(in_features=2, out_features=2, bias=True, fpsim: fp16 nearest_even)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize() came with {type(model).__name__}. Possible: a torch.nn.Module. "
            f"For functions use `with fpsim.emulate(fmt):`."
        )
    policy = as_policy(fmt)
    if rounding is not None:
        policy = replace(policy, rounding=rounding)
    policies = policy.for_modules(model)
    for name, module in model.named_modules():
        _require_emulable(name, module, policies[name])
    if not inplace:
        model = copy.deepcopy(model)
    listeners = Listeners()
    for name, module in model.named_modules():
        module.forward = _EmulatedForward(module, name, policies[name], listeners)  # type: ignore[method-assign]
        module.extra_repr = _EmulatedRepr(module)  # type: ignore[method-assign]
    return model


def _require_emulable(name: str, module: nn.Module, policy: Policy) -> None:
    where = f"{name or 'the model'} ({type(module).__name__})"
    if isinstance(module.__dict__.get("forward"), _EmulatedForward):
        raise ValueError(f"{where} is quantised already. Call dequantize(model) first, or quantise the original.")
    if policy.specs() == NO_SPECS:
        return
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{where} is compiled by TorchScript, which cannot be intercepted. Quantise the Python module.")


def dequantize(model: Model, *, inplace: bool = False) -> Model:
    """A copy of a quantised model that computes in float32 again; `inplace` changes the model itself.

    Raises ValueError for a model that was not quantised.
    """
    if not any(True for _ in _emulated(model)):
        raise ValueError(
            f"{type(model).__name__} is not quantised: there is nothing to undo. See quantize(model, fmt)."
        )
    if not inplace:
        model = copy.deepcopy(model)
    for forward in list(_emulated(model)):
        module = forward.module
        del module.__dict__["forward"], module.__dict__["extra_repr"]
        if forward.inner is not None:
            module.forward = forward.inner  # type: ignore[method-assign]
    return model


def _emulated(model: nn.Module) -> Iterator[_EmulatedForward]:
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, _EmulatedForward):
            yield forward


class SummaryRow(NamedTuple):
    """What one module rounds."""

    module: str
    type: str
    weight: str
    activation: str
    error: str
    weight_grad: str
    wide: str = ""


class Summary(list[SummaryRow]):
    """Rows of what is rounded where; prints as a table."""

    def __str__(self) -> str:
        heads = tuple("float32 on purpose" if name == "wide" else name for name in SummaryRow._fields)
        rows = [heads, *self]
        if not any(row.wide for row in self):
            rows = [row[:-1] for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])

    __repr__ = __str__


def summary(model: nn.Module) -> Summary:
    """What each module of a quantised model rounds to, by role; prints as a table.

    Modules without operations of their own pass their formats on. One column more names the operations that ran in
    float32 on purpose when the model was last called, such as `x.float().pow(2)`, if there were any.
    Raises ValueError for a model that is not quantised.

    >>> print(summary(quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "bf16")))
    module   type        weight             activation         error              weight_grad
    -------  ----------  -----------------  -----------------  -----------------  -----------------
    (model)  Sequential  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    0        Linear      bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    1        ReLU        bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    """
    rows = Summary()
    for forward in _emulated(model):
        words = [str(spec) if spec else "float32" for spec in forward.specs]
        name, kind = forward.name or "(model)", type(forward.module).__name__
        rows.append(SummaryRow(name, kind, *words, wide=", ".join(forward.wide)))  # type: ignore[misc]
    if not rows:
        raise ValueError(f"{type(model).__name__} is not quantised. Call fpsim.quantize(model, fmt) first.")
    return rows


def round_parameters_(model: nn.Module) -> None:
    """Round each parameter of a quantised model, in place, to the format in which its module uses it.

    As hardware without a float32 master copy keeps them: an update below half an ulp is lost. Parameters that are used
    in float32 stay; one that several modules share is rounded as the first of them uses it.

    >>> model = quantize(nn.Linear(1, 1, bias=False), "e5m2")
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.01)
    >>> round_parameters_(model)
    >>> model.weight.item()
    1.0
    """
    done: set[int] = set()
    for forward in _emulated(model):
        for parameter in forward.module.parameters(recurse=False):
            if forward.specs.weight is not None and id(parameter) not in done and parameter.is_floating_point():
                done.add(id(parameter))
                round_memory_(parameter.detach(), forward.specs.weight)
                torch.autograd.graph.increment_version(parameter)


def listeners(model: nn.Module) -> list[Listeners]:
    """Where observers of a quantised model register; more than one if quantised models are nested in it."""
    found = {id(f.listeners): f.listeners for f in _emulated(model)}
    if not found:
        raise ValueError(f"{type(model).__name__} is not quantised. Call fpsim.quantize(model, fmt) first.")
    return list(found.values())
