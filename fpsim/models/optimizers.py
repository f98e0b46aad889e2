"""quantize_optimizer: any torch optimizer stores weights and states in few bits, and computes as before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fpsim.border import require_module, require_optimizer, require_seed
from fpsim.checks import known_arguments, shown
from fpsim.models.format_steps import emulated_step_of, run_format_step
from fpsim.models.parameter_store import ParameterStore, check_state, loaded_copies, saved, without_ours
from fpsim.models.storing import local_part, states_in
from fpsim.policies.update import Update, UpdateLike, as_update, updates_of
from fpsim.torch_internals import apart_from_compiler
from fpsim.torch_modes import guard_step, hook_steps, unguard_step, unhook_steps

__all__ = [
    "OptimizerStore",
    "QuantizedOptimizer",
    "UpdateObserver",
    "quantize_optimizer",
    "quantized_optimizer_of",
    "quantized_optimizers",
]


class UpdateObserver(Protocol):
    """Observer that is called with the intended and the stored value of each step."""

    def is_due(self, step: int) -> bool:
        """Return whether a step is observed. step: the number of steps that were stored before this step."""

    def saw(self, step: int, store: ParameterStore, before: Tensor, intended: Tensor, group: Mapping[str, Any]) -> None:
        """Receive the step of one parameter: its value before, and the update in the optimizer's own arithmetic."""


# The stores by optimizer. An optimizer's hooks hold its store, so that both live equally long.
_installed: weakref.WeakKeyDictionary[Optimizer, OptimizerStore] = weakref.WeakKeyDictionary()


@known_arguments()
def quantize_optimizer(
    optimizer: Optimizer,
    update: UpdateLike | Iterable[UpdateLike],
    model: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
    *,
    seed: int = 0,
) -> QuantizedOptimizer:
    """Let an optimizer store weights and states in the formats of `update`.

    The optimizer's class, arguments and methods stay. Before each step, the stored tensors are decoded to float32;
    after the step, they are rounded once. Weights stay float32 tensors that hold numbers of their format; this call
    rounds them to nearest. Tensors that a step leaves unchanged (because a GradScaler skips the step, or a parameter
    has no gradient) are not rounded again.

    A copy or a pickle of the optimizer is a plain optimizer. `optimizer.state_dict()` has everything that a run needs
    to resume with the same bits, and a plain optimizer loads it, too.

    Args:
        optimizer: any torch.optim.Optimizer, also of other libraries, or an optimizer that accelerate wraps.
        update: a fpsim.Update, the name of one ("bf16_sr"), or a list with an update for each parameter group; None
            leaves a group in float32.
        model: the model whose names the overrides use, or the pairs of `model.named_parameters()`.
        seed: the seed of the random bits of stochastic rounding. All ranks of a distributed run need the same seed.

    Returns:
        The same optimizer as a `QuantizedOptimizer`, which adds `detach()` and the stored tensors to its methods. You
        may use either object from here on.

    Raises:
        TypeError: for anything but an optimizer, and for parameters that are not float32.
        ValueError: for an optimizer that is quantised already, and for names that match nothing.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
    >>> quantized = quantize_optimizer(optimizer, Update(weight="bf16"))
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.0)
    >>> model.weight.grad = torch.ones(1, 1)
    >>> _ = optimizer.step()
    >>> model.weight.item()  # 1 - 2**-10 is nearer to 1 than to the next bfloat16
    1.0
    """
    optimizer = _innermost(optimizer)
    require_seed(seed)
    if optimizer in _installed:
        raise ValueError(
            f"This {type(optimizer).__name__} is quantised already, as {_installed[optimizer].update}. Call detach() "
            f"of what quantize_optimizer returned first."
        )
    return QuantizedOptimizer(optimizer, OptimizerStore(optimizer, update, _named(model), seed))


def _innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper, or inside a `QuantizedOptimizer`."""
    require_optimizer(optimizer)
    # Hooks on steps have to be registered on the innermost optimizer, because accelerate's wrapper passes no hooks on.
    while not isinstance(optimizer, Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise TypeError(f"optimizer is a {type(optimizer).__name__}. Expected: a torch.optim.Optimizer.")
        optimizer = inner
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def quantized_optimizer_of(optimizer: Optimizer) -> OptimizerStore | None:
    """Return the store that `quantize_optimizer` attached to this optimizer; None for a plain one."""
    return _installed.get(optimizer.optimizer if isinstance(optimizer, QuantizedOptimizer) else optimizer)


def quantized_optimizers(model: nn.Module) -> list[OptimizerStore]:
    """Return the quantised optimizers that have parameters of a model."""
    parameters = set(model.parameters())
    return [one for one in _installed.values() if any(store.parameter in parameters for store in one.stores)]


def _named(model: Any) -> tuple[dict[Tensor, str], dict[str, list[type]]]:
    """Return the names of parameters, and the classes of the modules that own them."""
    if model is None:
        return {}, {}
    if isinstance(model, nn.Module):
        # These are the names of `named_parameters`: an optimizer's checkpoint has the same names, whatever wraps the
        # model.
        return {p: name for name, p in model.named_parameters()}, {n: [type(m)] for n, m in model.named_modules()}
    pairs = list(model) if isinstance(model, Iterable) and not isinstance(model, str | Tensor) else None
    if pairs is None or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        require_module(model, remedy=" Or the pairs of model.named_parameters().")
        raise TypeError(f"model is {shown(model)}. Expected: a torch.nn.Module, or pairs of names and parameters.")
    return {p: name for name, p in pairs}, {}


class QuantizedOptimizer(Optimizer):
    """The optimizer that `quantize_optimizer` returns, with its own methods and the stored tensors.

    It can be used wherever an optimizer can: by a scheduler, by a GradScaler, or under the same name in a script.

    Args:
        optimizer: the optimizer that was quantised, which this object keeps alive.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=2**-10)
    >>> optimizer = quantize_optimizer(optimizer, Update(weight="bf16"))
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> weight.item(), optimizer.steps, optimizer.param_groups[0]["lr"] == 2**-10
    (1.0, 1, True)
    """

    def __init__(self, optimizer: Optimizer, store: OptimizerStore) -> None:
        # torch's own __init__ would make groups and states again. The attributes are the optimizer's, by __getattr__.
        self.optimizer, self.store = optimizer, store

    def __getattr__(self, name: str) -> Any:
        # With torch's flag for fused steps, a GradScaler would set found_inf here, where the step does not read it;
        # without the flag, the GradScaler looks at the gradients itself.
        if name in ("optimizer", "store", "_step_supports_amp_scaling"):
            raise AttributeError(f"QuantizedOptimizer has no attribute {name!r}.")
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"QuantizedOptimizer({self.update})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "What quantize_optimizer returns belongs to its optimizer, and is neither copied nor pickled. Save "
            "optimizer.state_dict(), and quantize the copy of the optimizer."
        )

    @property
    def update(self) -> Update:
        """Update of the optimizer, or of its first parameter group."""
        return self.store.update

    @property
    def steps(self) -> int:
        """Number of steps that were stored."""
        return self.store.steps

    @property
    def stores(self) -> list[ParameterStore]:
        """Stores of the parameters that are not plain float32."""
        return self.store.stores

    @property
    def seed(self) -> int:
        """Seed of the random bits of stochastic rounding."""
        return self.store.seed

    @property
    def observers(self) -> list[UpdateObserver]:
        """Observers of each step."""
        return self.store.observers

    def stored(self) -> list[tuple[ParameterStore, dict[str, Any]]]:
        """Return each parameter's stored tensors, those in float32 too, and its states as the optimizer has them."""
        return self.store.stored()

    def detach(self) -> None:
        """Let the optimizer store float32 from here on. Weights and states stay as they are, rounded."""
        self.store.detach()

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step as the optimizer does, and store weights and states as its update says."""
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with all that a run needs to resume with the same bits."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, which may be the state of a plain optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the update of the last group."""
        self.optimizer.add_param_group(param_group)


class OptimizerStore:
    """The state that `quantize_optimizer` attaches to an optimizer, which keeps this object alive by its hooks.

    update: the update of the optimizer, or of its first parameter group.
    steps: the number of steps that have been stored.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        update: Any,
        names: tuple[dict[Tensor, str], dict[str, list[type]]],
        seed: int,
    ) -> None:
        self._names, self._classes = names
        self._updates = _for_groups(update, len(optimizer.param_groups))
        self.update, self.seed, self.steps = self._updates[0], seed, 0
        self._optimizer = weakref.ref(optimizer)
        self._stores: dict[Tensor, ParameterStore] = {}
        self.observers: list[UpdateObserver] = []
        self._observed: dict[Tensor, tuple[Tensor, Tensor]] = {}  # before a step: the stored value, and the parameter
        self._intended: dict[Tensor, Tensor] = {}
        self._gradients: list[tuple[Tensor, Tensor]] = []  # gradients hidden from a step
        self._stepping: set[Tensor] = set()  # parameters of which this step has found a gradient
        self._evaluations = 0  # evaluations of the closure in this step
        self._depth = 0  # how many steps are running
        self._has_checked_names = False
        self._loading: Callable[[], None] | None = None
        stores = self._new_stores(optimizer)
        # Check all parameters before the first one is changed, so that an error leaves the optimizer as it was.
        for store in stores:
            _require_parameter(store)
        self._emulated = emulated_step_of(optimizer, stores)
        self._take(stores, optimizer)
        hook_steps(optimizer, self._before, self._after)
        guard_step(optimizer, self._abandon)
        self._handles = [
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._check),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]
        _installed[optimizer] = self

    def detach(self) -> None:
        """Let the optimizer store float32 from here on. Weights and states stay as they are, rounded."""
        optimizer = self._optimizer()
        if optimizer is None or _installed.get(optimizer) is not self:
            return
        unhook_steps(optimizer, self._before, self._after)
        unguard_step(optimizer)
        for handle in self._handles:
            handle.remove()
        del _installed[optimizer]

    # The parameters

    def _new_stores(self, optimizer: Optimizer) -> list[ParameterStore]:
        """Return stores for the parameters without one: at first all parameters, later those of groups added since."""
        parameters = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
        names = [self._name_of(optimizer, i, p) for i, p in parameters]
        updates = {}
        for i in range(len(optimizer.param_groups)):
            update = self._updates[min(i, len(self._updates) - 1)]
            updates[i] = updates_of(update, names, self._classes)
        return [
            ParameterStore(p, name, index, updates[i][index])
            for index, ((i, p), name) in enumerate(zip(parameters, names, strict=True))
            if p not in self._stores
        ]

    def _name_of(self, optimizer: Optimizer, group: int, parameter: Tensor) -> str:
        if parameter in self._names:
            return self._names[parameter]
        entry = optimizer.param_groups[group]
        place = next(i for i, p in enumerate(entry["params"]) if p is parameter)
        # `param_names` exists if the optimizer was given named parameters.
        given = entry.get("param_names")
        return str(given[place]) if given else f"{group}.{place}"

    def _take(self, stores: list[ParameterStore], optimizer: Optimizer) -> None:
        for store in stores:
            self._stores[store.parameter] = store
            store.begin()
            store.store_states(optimizer.state.get(store.parameter, {}), self.seed, self.steps)

    # Around a step

    @apart_from_compiler
    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        # A step within a step is the step of `super().step()`: torch calls the hooks of both.
        if self._depth > 1:
            return None
        # `add_param_group` has no hook: parameters that were added since are found here.
        if sum(len(group["params"]) for group in optimizer.param_groups) != len(self._stores):
            self._take(self._new_stores(optimizer), optimizer)
        self._evaluations = 0
        self._stepping = set()
        # Gradients are noted before the step, because some optimizers drop gradients that they have read.
        self._note_gradients()
        for store in self.stores:
            store.decode()
        self._gradients, self._observed, self._intended = [], {}, {}
        if any(observer.is_due(self.steps) for observer in self.observers):
            for store in self.stores:
                x = local_part(store.parameter.detach())
                self._observed[store.parameter] = local_part(store.value).clone(), x.clone()
        is_closure = [callable(x) and not isinstance(x, Optimizer) for x in args]
        if not any(is_closure) and not callable(kwargs.get("closure")):
            # Without a closure the gradients are final: the step can be rounded operation by operation.
            if self._emulated is None:
                self._step_in_format(optimizer)
            else:
                self._emulated.begin(optimizer, self._observed)
            return None
        if self._emulated is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step got a closure, and its operations are rounded one by one. Compute "
                f"the loss and its gradients first and call step(), or use arithmetic='float32'."
            )
        args = tuple(
            self._seeing_weights(optimizer, x) if wraps else x for x, wraps in zip(args, is_closure, strict=True)
        )
        wrapped = {
            k: self._seeing_weights(optimizer, x) if k == "closure" and callable(x) else x for k, x in kwargs.items()
        }
        return args, wrapped

    @torch.no_grad()
    def _abandon(self) -> None:
        """Clean up after a step that raised: parameters hold their stored values again, and gradients are put back."""
        optimizer, self._depth = self._optimizer(), 0
        if self._emulated is not None:
            self._emulated.end(has_raised=True)
        for p, gradient in self._gradients:
            p.grad = gradient
        self._gradients, self._observed, self._intended = [], {}, {}
        for store in self.stores:
            store.abandon()
            store.store_states(
                {} if optimizer is None else optimizer.state.get(store.parameter, {}), self.seed, self.steps
            )

    @apart_from_compiler
    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        if self._emulated is not None:
            self._intended.update(self._emulated.end())
        for p, gradient in self._gradients:
            p.grad = gradient
        self._gradients = []
        # A skipped step has changed nothing. Rounding again would draw other random bits, so the stored values are put
        # back.
        if _was_skipped(optimizer):
            for store in self.stores:
                store.undo()
            return
        for store in self.stores:
            if not self._has_stepped(store):
                store.undo()
                continue
            if store.parameter in self._observed and store.parameter not in self._intended:
                start = self._observed[store.parameter][1]
                self._intended[store.parameter] = local_part(store.parameter.detach()) - start
            store.store(self.seed, self.steps)
            store.store_states(optimizer.state.get(store.parameter, {}), self.seed, self.steps)
        # Observers come last: they compare the stored values with the wanted ones.
        self._tell(optimizer)
        self._stepping = set()
        self.steps += 1
        if not self._has_checked_names:
            self._check_state_names(optimizer)

    def _note_gradients(self) -> None:
        """Note which parameters have a gradient now: some optimizers drop each one as soon as they have read it."""
        self._stepping.update(p for p in self._stores if p.grad is not None)

    def _has_stepped(self, store: ParameterStore) -> bool:
        """Return whether the step had a gradient of a parameter, or has changed the parameter without one."""
        return store.parameter in self._stepping or store.parameter.grad is not None or store.was_changed

    def _tell(self, optimizer: Optimizer) -> None:
        """Tell the observers how this step has updated the observed parameters."""
        due = [observer for observer in self.observers if observer.is_due(self.steps)] if self._intended else []
        for group in optimizer.param_groups if due else ():
            for p in group["params"]:
                if p in self._intended:
                    for observer in due:
                        observer.saw(self.steps, self._stores[p], self._observed[p][0], self._intended[p], group)
        self._observed, self._intended = {}, {}

    def seen_by_the_model(self, parameter: Tensor) -> Tensor:
        """Return a parameter as the model sees it, even while a step works on another copy."""
        store = self._stores.get(parameter)
        return parameter if store is None or store.visible is None else store.visible

    @property
    def stores(self) -> list[ParameterStore]:
        """Stores of the parameters that are not plain float32."""
        return [store for store in self._stores.values() if not store.is_exact]

    def stored(self) -> list[tuple[ParameterStore, dict[str, Any]]]:
        """Return each parameter's stored tensors, those in float32 too, and its states as the optimizer has them."""
        optimizer = self._optimizer()
        state: Mapping[Tensor, dict[str, Any]] = {} if optimizer is None else optimizer.state
        return [(store, state.get(p, {})) for p, store in self._stores.items()]

    def keeping(self) -> Callable[[], None]:
        """Save copies of weights, the position of random bits and the observers; return a function to restore them."""
        steps, observers = self.steps, self.observers
        stores = [store.keeping() for store in self._stores.values()]

        def put_back() -> None:
            self.steps, self.observers = steps, observers
            for store in stores:
                store()

        return put_back

    def _step_in_format(self, optimizer: Optimizer) -> None:
        """Step the parameters whose operations are rounded one by one, and hide their gradients from the optimizer."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                store = self._stores[p]
                if store.update.is_in_format and p.grad is not None:
                    wanted = run_format_step(optimizer, group, store, p in self._observed)
                    if wanted is not None:
                        self._intended[p] = wanted
                    self._gradients.append((p, p.grad))
        # If there is no gradient, torch's optimizers skip a parameter: its step has been made already.
        for p, _ in self._gradients:
            p.grad = None

    def _seeing_weights(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a step's closure with the weights as stored, not as the optimizer has them."""

        def evaluated(*args: Any, **kwargs: Any) -> Any:
            stores = self.stores
            with torch.no_grad():
                hidden = [(store.parameter.detach().clone(), store.was_written) for store in stores]
                for store in stores:
                    store.show(self.seed, self.steps, self._evaluations)
            self._evaluations += 1
            result = closure(*args, **kwargs)
            self._note_gradients()
            with torch.no_grad():
                self._step_in_format(optimizer)
                for store, (x, was_written) in zip(stores, hidden, strict=True):
                    if not store.update.is_in_format:
                        store.hide(x, was_written)
            return result

        return evaluated

    def _check_state_names(self, optimizer: Optimizer) -> None:
        """Raise ValueError for an update that names states which the optimizer does not have."""
        stepped = [store for store in self.stores if optimizer.state.get(store.parameter)]
        if not stepped:
            return
        self._has_checked_names = True
        found = {state.name for store in stepped for state in states_in(optimizer.state[store.parameter])}
        others = {k for store in stepped for k in optimizer.state[store.parameter] if isinstance(k, str)}
        there = sorted((found | others) - {"step"})
        for pattern in {pattern for store in stepped for pattern in store.update.state_patterns}:
            if not any(fnmatchcase(name, pattern) for name in there):
                raise ValueError(
                    f"The update names the state {shown(pattern)}, which {type(optimizer).__name__} does not have. Its "
                    f"states: {', '.join(there) or '(none)'}."
                )

    # state_dict

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return saved(state, self._in_order(optimizer), self.seed, self.steps)

    def _in_order(self, optimizer: Optimizer) -> list[ParameterStore]:
        """Return the stores in the order of a `state_dict`."""
        return [self._stores[p] for group in optimizer.param_groups for p in group["params"] if p in self._stores]

    def _check(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Raise ValueError for a state of another update, before anything is loaded."""
        # Everything is checked here, and applied in `_load`, which torch calls only if its own loading has not raised.
        stores = self._in_order(optimizer)
        run = check_state(state, stores)
        copies = loaded_copies(state, stores, run)

        def finish() -> None:
            if run is not None:
                self.seed, self.steps = run.seed, run.steps
            for store, kept in zip(stores, copies, strict=True):
                if kept is None:
                    store.begin()
                else:
                    store.kept = kept

        self._loading = finish
        return without_ours(state)

    def _load(self, optimizer: Optimizer) -> None:
        finish, self._loading = self._loading, None
        if finish is not None:
            finish()


def _for_groups(update: Any, groups: int) -> list[Update]:
    """Return the update of each parameter group."""
    if update is None or isinstance(update, str | Update):
        return [as_update(update)]
    if isinstance(update, Mapping) or not isinstance(update, Iterable):
        raise TypeError(
            f"update is {shown(update)}. Expected: a fpsim.Update, a name such as 'bf16_sr', or a list with one for "
            f"each parameter group."
        )
    updates = [as_update(one) for one in update]
    if len(updates) != groups:
        raise ValueError(
            f"update has {len(updates)} entries, and the optimizer has {groups} parameter groups. Give one for each, "
            f"or a single update."
        )
    return updates


def _require_parameter(store: ParameterStore) -> None:
    """Raise TypeError for a parameter whose numbers cannot be stored."""
    p = store.parameter
    if store.is_exact:
        return
    if p.dtype is not torch.float32:
        dtype = str(p.dtype).removeprefix("torch.")
        raise TypeError(
            f"The parameter {store.name} is {dtype}. Weights stay float32 tensors that hold numbers of their format: "
            f"convert the model with model.float(), or leave the parameter out with overrides={{{store.name!r}: None}}."
        )


def _was_skipped(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler has let a fused optimizer skip its step."""
    # GradScaler.step sets the flag on a fused optimizer, whose kernel then leaves everything as it was.
    flag = getattr(optimizer, "found_inf", None)
    return isinstance(flag, Tensor) and bool(flag)
