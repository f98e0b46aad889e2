"""sensitivity(model, loss, policy): rank the modules by the cost of small formats.

`last_layers` names the modules whose product reaches the loss without another product in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_memory, require_module, require_seed
from fpsim.checks import number_of, require_whole, required_arguments, shown
from fpsim.emulation.calls import LOOK_UPS
from fpsim.emulation.product_calls import CALLS
from fpsim.emulation.recurrent import OPERATIONS
from fpsim.emulation.scope import active
from fpsim.emulation.tracing import Operation, Trace
from fpsim.insight.rows import Rows
from fpsim.insight.stepping import as_step, is_function, nothing_ran, preserve, switching, traced
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import dequantize, quantize, try_policy
from fpsim.policies.policy import FormatLike, Policy, policy_of_modules
from fpsim.policies.recipes import as_policy
from fpsim.tensors.noise import seed_here
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["Sensitivity", "last_layers", "sensitivity"]

MOST_PAIRS = 66  # how many pairs are tried if no module repairs the loss alone: as many as 12 modules have
MOST_TRIED = 12  # how many modules are tried instead of one whose float32 result breaks its readers


class Sensitivity(Rows):
    """A row for each module, from the largest cost to the smallest; see `sensitivity`.

    float32, quantised: the loss of the whole model in float32, and under the policy.
    pair: two modules that together repair a loss that is not finite, if no module repairs it alone; else None.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        if not isinstance(policy, Policy):
            raise TypeError(f"policy is {shown(policy)}. Expected: a fpsim.Policy.")
        self._policy = policy
        self._by_module: dict[str, Policy] = {}
        self._instead: dict[tuple[str, ...], list[str] | None] = {}
        self.float32, self.quantised = 0.0, 0.0
        self.pair: tuple[str, str] | None = None

    def policy(self, k: int) -> Policy:
        """Return the policy under which the k modules with the largest costs stay in float32.

        A module's float32 result may be too large for the format of its reader, even if the loss is finite with all
        modules in the formats. Then modules without parameters, such as a relu, are left in float32 too, if that
        repairs the loss. Otherwise the next module in the ranking replaces this module.

        Raises ValueError for more modules than there are, and if no k modules that were tried leave the loss finite.
        """
        require_whole("k", k, 0, len(self))
        names = [row["module"] for row in self[:k]]
        wide = self._instead.get(tuple(names), names)
        if wide is None:
            raise ValueError(
                f"With k={k} modules in float32, no choice that was tried leaves a finite loss; all in the formats do "
                f"({self.quantised:.6g}). Use another k."
            )
        return self._leaving(wide)

    def _leaving(self, names: list[str]) -> Policy:
        """Return the policy with these modules in float32; for a module with others inside, only its own operations."""
        whole = [name for name in names if not _has_inside(name, self._by_module)]
        # The user's policy with a few additional lines is easier to read than a policy that names each module.
        if len(whole) == len(names):
            return replace(self._policy, overrides={**self._policy.overrides, **dict.fromkeys(names)})
        wanted = {name: Policy() if name in names else own for name, own in self._by_module.items()}
        return policy_of_modules(wanted)

    def __str__(self) -> str:
        lines = [f"loss {self.float32:.6g} in float32, {self.quantised:.6g} under the policy"]
        if not math.isfinite(self.quantised):
            if self.pair is not None:
                lines.append(f"No module repairs it alone; {self.pair[0]} and {self.pair[1]} in float32 do: policy(2).")
            elif not any(math.isfinite(row["loss_without"]) for row in self):
                lines.append("No module repairs it alone, and no pair that was tried.")
            lines.append("fpsim.why(model, step) names the operation.")
        else:
            lines.append("fpsim.compare says where the errors begin and grow.")
        return "\n".join([*lines, super().__str__()])

    __repr__ = __str__

    def plot(self) -> Any:
        """Plot the cost of each module, alone and together with all others; needs matplotlib."""
        from fpsim.insight.pictures import plot_costs

        return plot_costs(self, _excess(self.quantised, self.float32))


@keeps_grad_mode
def sensitivity(model: nn.Module, loss: Any, policy: FormatLike, *, seed: int = 0) -> Sensitivity:
    """Rank modules by cost: the loss with only this module in the small formats, and with only this one in float32.

    A row stands for a module that has parameters and no modules inside, or for the own operations of a module with
    others inside, such as the products of an attention. If none of these repairs a loss that is not finite, modules
    without parameters have rows too. Each row has:

    - module, type: the name, "" for the model's own operations, and the class.
    - cost: the larger of `alone` and `without`.
    - alone: the loss if only this module is quantised, minus the loss in float32. It finds modules that break alone.
    - without: the loss under the policy, minus the loss if only this module is in float32. It finds modules that break
      others.
    - loss_alone, loss_without: these two losses.
    - own: whether the row stands for the own operations of a module with others inside.

    If a loss is not finite, the cost is inf; the difference of two such losses is NaN. There are 2 runs for each
    module, and 2 more; `loss` decides how much data a run takes. If the loss with all modules in the formats is finite,
    one more run for each `policy(k)` makes sure that its loss is finite too. If no module alone repairs a loss that is
    not finite, at most 66 pairs are tried.

    With a function of the model, `model` stays as it is: a copy is run, with the same dropout and noise each time. A
    step runs the model itself, whose formats, parameters, buffers and gradients are restored.

    Args:
        model: any module, quantised or not.
        loss: a function from a model to its loss, on data of your choice. It is called under torch.no_grad(), unless it
            enables gradients itself. Or, as in the other tools, a step: a function without arguments that returns the
            loss, or a batch for a model whose output has a `.loss`.
        policy: the small formats, as for `quantize`.
        seed: the seed of dropout and noise.

    Raises:
        ValueError: for a model without modules that have parameters, for a model whose loss is not finite in float32,
            and as in `quantize`.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> with torch.no_grad():
    ...     _ = net[1].weight.mul_(1e6)
    >>> ranking = sensitivity(net, lambda m: m(torch.ones(1, 4)).abs().mean(), "fp16")
    >>> ranking[0]["module"], ranking[0]["alone"], list(ranking.policy(1).overrides)
    ('1', inf, ['1'])
    """
    require_module(model)
    require_memory(model)
    require_seed(seed)
    plain = dequantize(model) if any(emulated_forwards(model)) else model
    wanted = as_policy(policy, model=plain)
    if not any(name and _has_numbers(module) for name, module in plain.named_modules()):
        raise ValueError(
            f"{type(model).__name__} has no module inside that has parameters. Expected: a model of several layers."
        )
    ranking = Sensitivity(wanted)
    ranking._by_module = {name: replace(own, overrides={}) for name, own in wanted.for_modules(plain).items()}

    def ranked(undo: Undo) -> None:
        _rank(ranking, _Losses(model, plain, loss, seed, undo), plain, wanted)

    undone(ranked)
    return ranking


class _Losses:
    """The losses under different policies. calls: the modules whose own operations have computed something."""

    def __init__(self, model: nn.Module, plain: nn.Module, loss: Any, seed: int, undo: Undo) -> None:
        self.seed, self.calls = seed, set[str]()
        self._is_of_model = is_function(loss) and required_arguments(loss) == 1
        # There is only one copy, and its formats are switched for each run.
        if self._is_of_model:
            self.model = quantize(plain, None)
            self._set: Callable[[FormatLike], None] = partial(try_policy, self.model)
            self._loss: Callable[[], Any] = partial(loss, self.model)
        else:
            self.model = model
            self._loss = as_step(model, loss, None, "sensitivity")
            preserve(model, undo)
            self._set = switching(model, undo)
        self._state = {name: x.clone() for name, x in self.model.state_dict().items()}

    def under(self, policy: Policy) -> float:
        self._set(policy)

        def seeded(undo: Undo) -> float:
            seed_here(undo, self.seed, self.seed)
            undo.by(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
            torch.set_grad_enabled(not self._is_of_model)
            total = self._loss()
            total = total.detach() if isinstance(total, Tensor) else total
            return number_of("loss(model)" if self._is_of_model else "step()", total)

        value = undone(seeded)
        # A run in training mode changes running statistics, but each run must begin with the same ones.
        self.model.load_state_dict(self._state)
        return value

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        if operation.computes:
            self.calls.add(operation.module)

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        pass

    def noted(self, policy: Policy) -> float:
        """Return the loss under a policy, and note the modules whose own operations ran."""

        def run(undo: Undo) -> float:
            traced(self.model, self, "sensitivity", undo)
            return self.under(policy)

        return undone(run)


def _rank(ranking: Sensitivity, losses: _Losses, plain: nn.Module, wanted: Policy) -> None:
    modules = dict(plain.named_modules())
    ranking.float32 = losses.noted(Policy())
    if not math.isfinite(ranking.float32):
        raise ValueError(
            f"The loss of {type(plain).__name__} is {ranking.float32} in float32, and no format can be blamed for "
            f"that. Expected: a model and data with a finite loss; fpsim.why(model, step) says where it breaks."
        )
    ranking.quantised = losses.under(wanted)
    if not losses.calls and ranking.quantised == ranking.float32:
        raise nothing_ran(plain, "sensitivity")

    def add(names: list[str]) -> None:
        for name in names:
            alone = {other: own if other == name else Policy() for other, own in ranking._by_module.items()}
            only, but = losses.under(policy_of_modules(alone)), losses.under(ranking._leaving([name]))
            row: dict[str, Any] = {"module": name, "type": type(modules[name]).__name__, "cost": 0.0}
            row |= {"alone": _excess(only, ranking.float32), "without": _excess(ranking.quantised, but)}
            # Comparisons with NaN are false, so with a NaN the order of the rows would be left to chance.
            row["cost"] = max((x for x in (row["alone"], row["without"]) if not math.isnan(x)), default=0.0)
            row |= {"loss_alone": only, "loss_without": but}
            ranking.append({**row, "own": _has_inside(name, modules)})

    layers = [n for n, m in modules.items() if n and not any(m.children()) and _has_numbers(m)]
    containers = [n for n, m in modules.items() if any(m.children()) and n in losses.calls]
    add([n for n in modules if n in layers or n in containers])
    # Modules without parameters cost two runs each, so they are tried only if no other module repairs the loss.
    if _is_broken(ranking):
        add([n for n in modules if n in losses.calls and n not in layers and n not in containers])
    ranking.sort(key=lambda row: -row["cost"])
    if _is_broken(ranking):
        _find_pair(ranking, losses)
    elif math.isfinite(ranking.quantised):
        names = {row["module"] for row in ranking}
        _keep_finite(ranking, losses, [name for name in modules if name not in names])


def _is_broken(ranking: Sensitivity) -> bool:
    """True if the loss is not finite under the policy, and no module repairs it alone."""
    return not math.isfinite(ranking.quantised) and not any(math.isfinite(row["loss_without"]) for row in ranking)


def _find_pair(ranking: Sensitivity, losses: _Losses) -> None:
    """Try pairs of modules in float32; a pair that repairs the loss is ranked first."""
    names = [row["module"] for row in ranking]
    # Rows are sorted by cost, so a pair with a small sum of indices has a large cost.
    pairs = sorted(combinations(range(len(names)), 2), key=sum)
    for i, j in pairs[:MOST_PAIRS]:
        if math.isfinite(losses.under(ranking._leaving([names[i], names[j]]))):
            ranking.pair = names[i], names[j]
            # The sort is stable: the pair comes first, and all others keep their order.
            ranking.sort(key=lambda row: row["module"] not in (names[i], names[j]))
            return


def _keep_finite(ranking: Sensitivity, losses: _Losses, bare: list[str]) -> None:
    """Note which modules replace the k most costly modules, if the loss is not finite with these in float32.

    bare: the modules without a row, such as relus. They round their results too.
    """
    names = [row["module"] for row in ranking]
    without = {row["module"]: row["loss_without"] for row in ranking}

    def is_finite(wide: list[str]) -> bool:
        return math.isfinite(without[wide[0]] if len(wide) == 1 else losses.under(ranking._leaving(wide)))

    def repaired(wide: list[str]) -> list[str] | None:
        """Return these modules, plus the bare ones that a finite loss needs; None if all bare ones are not enough."""
        if is_finite(wide):
            return wide
        if not bare or not is_finite([*wide, *bare]):
            return None
        # One bare module may not be enough. So start with all of them, and drop each one that is not needed.
        beside = [*bare]
        for name in bare:
            fewer = [other for other in beside if other != name]
            if is_finite([*wide, *fewer]):
                beside = fewer
        return [*wide, *beside]

    taken: list[str] = []
    for k in range(1, len(names) + 1):
        others = [name for name in names if name not in taken]
        found = None
        for name in others[:MOST_TRIED]:
            found = repaired([*taken, name])
            if found is not None:
                taken = [*taken, name]
                break
        # With a larger k the loss may be finite again, because of the additional modules.
        if found is None:
            taken = names[:k]
        if found != names[:k]:
            ranking._instead[tuple(names[:k])] = found


def _has_numbers(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_inside(name: str, names: Iterable[str]) -> bool:
    """True if a module has others inside. All modules are inside of the model itself, which is named ""."""
    return any(other != name and (not name or other.startswith(f"{name}.")) for other in names)


def _excess(a: float, b: float) -> float:
    """Return the excess of a loss over another. A loss that is not finite is larger than any finite one."""
    if math.isfinite(a) and math.isfinite(b):
        return a - b
    if math.isfinite(a) == math.isfinite(b):
        return math.nan
    return math.inf if math.isfinite(b) else -math.inf


_PRODUCTS = {*CALLS, *OPERATIONS}


@keeps_grad_mode
def last_layers(model: nn.Module, step: Any, *, loss: Callable[[Any], Tensor] | None = None) -> list[str]:
    """Name the layers whose product with a weight reaches the loss without another such product.

    For a classifier or a language model this is the head, for a detector each head. If the head shares the embedding's
    weight, the module that multiplies by this weight is named. The gradient of the loss, which
    arrives at these layers, has a few large elements, and many small ones whose sum is as large. If it is rounded to
    nearest in 4 bits, the small elements are lost, and sums are wrong at any scale. A model that keeps these layers in
    a wider format trains:

        policy = fpsim.Policy(error="e2m1fn", overrides=dict.fromkeys(fpsim.last_layers(model, step), "bf16"))

    The step runs once, in float32. Parameters, buffers, gradients and random numbers are restored afterwards.

    Args:
        model: any module, quantised or not.
        step: a function without arguments that returns the loss, or a batch. With a batch, the model's output has a
            `.loss`, or `loss` computes it.
        loss: a function from the model's output to the loss, for a batch.

    Returns:
        The names, as in `model.named_modules()`, in the order of the calls; "" for operations of the model itself.

    Raises:
        TypeError: for a step that does not return a tensor.
        ValueError: if no product leads to the loss.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> last_layers(net, lambda: net(torch.ones(1, 4)).square().mean())
    ['2']
    """
    require_module(model)
    require_memory(model)
    run = as_step(model, step, loss, "last_layers")

    def last(undo: Undo) -> list[str]:
        preserve(model, undo)
        switching(model, undo)(None)
        trace = traced(model, _Listed(), "last_layers", undo)
        total = trace.run(run)
        if not isinstance(total, Tensor):
            raise TypeError(
                f"Got {shown(total)}, of type {type(total).__name__}, from the step. Expected: the loss, a tensor: "
                f"fpsim.last_layers(model, lambda: loss(model(x)))."
            )
        return _last(trace, total)

    return undone(last)


class _Listed:
    """Visitor that notes the operations with a computed weight, as with torch's pruning and parametrizations."""

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        scope = None if active.emulation is None else active.emulation.scope
        operation.notes["has_weight"] = scope is not None and any(map(scope.stands_in, operands))

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        pass


def _last(trace: Trace, total: Tensor) -> list[str]:
    layers: dict[int, str] = {}
    known, waiting = set[int](), [trace.results.get(total)]
    while waiting:
        operation = waiting.pop()
        if operation is None or id(operation) in known:
            continue
        known.add(id(operation))
        # The search stops at a product: all operations before it reach the loss through it.
        has_weight = operation.notes.get("has_weight") or any(map(_is_of_parameters, operation.sources))
        if operation.name in _PRODUCTS and has_weight:
            layers[operation.index] = operation.module
        else:
            waiting += operation.parents
    if not layers:
        raise ValueError(
            f"No product with a parameter of {type(trace.model).__name__} leads to what the step returned. Expected: "
            f"a step that calls the model and returns the loss of its output."
        )
    return [*dict.fromkeys(module for _, module in sorted(layers.items()))]


def _is_of_parameters(operation: Operation | None) -> bool:
    """True if a tensor depends only on parameters: a weight, a view of a weight, or a result computed from weights."""
    # A row of an embedding also depends on its indices, which are data.
    if operation is None or operation.name in LOOK_UPS:
        return False
    return operation.name == "parameter" or (bool(operation.sources) and all(map(_is_of_parameters, operation.sources)))
