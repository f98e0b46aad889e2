"""sensitivity(model, loss, policy): rank the modules by the cost of small formats.

`last_layers` names those whose product the loss reads through no other product.
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

MOST_PAIRS = 66  # pairs that are tried if no module repairs the loss alone: those of 12 modules
MOST_TRIED = 12  # modules that are tried instead of one whose float32 result breaks its readers


class Sensitivity(Rows):
    """A row for each module, the one that costs most first; see `sensitivity`.

    float32, quantised: the loss of the whole model in float32 and under the policy.
    pair: two modules that repair a loss together that is not finite, where none does alone; None elsewhere.
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
        """Return the policy with the k modules that cost most left in float32.

        A module's float32 result may be too large for the format of its reader, although with all modules in the
        formats the loss is finite. Then modules without parameters, such as a relu, are left in float32 too, if that
        repairs the loss; otherwise the next module in the ranking is taken instead.

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
        """Return the policy with these modules in float32; of one with modules inside only its own operations."""
        whole = [name for name in names if not _has_inside(name, self._by_module)]
        # The user's policy with a few lines more is easier to read than one that names each module.
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
        """Plot the cost of each module, alone and beside all others; needs matplotlib."""
        from fpsim.insight.pictures import plot_costs

        return plot_costs(self, _excess(self.quantised, self.float32))


@keeps_grad_mode
def sensitivity(model: nn.Module, loss: Any, policy: FormatLike, *, seed: int = 0) -> Sensitivity:
    """Rank modules by cost: the loss with each alone in the small formats, and with each alone left in float32.

    A module is one without modules inside that has parameters, or the own operations of one with modules inside, such
    as the products of an attention; if none repairs a loss that is not finite, others without parameters too. Each row
    has `module` ("" for the model's own operations); `alone`, the loss with it alone quantised minus float32's;
    `without`, the loss under the policy minus that with this module alone in float32; `cost`, the larger of both; both
    losses; and whether it stands for the `own` operations of a module with others inside. `alone` finds what breaks by
    itself, `without` what breaks the others. A loss that is not finite costs inf, and minus another such one it is NaN.
    That is 2 runs for each module, and 2 more; `loss` decides how much data one takes. If the loss with all modules in
    the formats is finite, one more run for each `policy(k)` makes sure that its own is. If no module alone repairs a
    loss that is not finite, pairs are tried, at most 66.

    `model` stays as it is: a copy is run, with the same dropout and noise each time. A step runs the model itself,
    whose formats, parameters, buffers and gradients are put back.

    Args:
        model: any module, quantised or not.
        loss: from a model to its loss, on the data that is to decide. Called under torch.no_grad(), unless it enables
            gradients itself. Or as of the other tools a step, a function without arguments that returns the loss; or a
            batch, where the output has a `.loss`.
        policy: the small formats; what `quantize` takes.
        seed: of dropout and noise.

    Raises:
        ValueError: for a model none of whose modules has parameters, for one whose loss is not finite in float32, and
            what `quantize` raises.

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
    plain = dequantize(model) if any(True for _ in emulated_forwards(model)) else model
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
    """The loss under one policy after another. calls: the modules whose own operations computed something."""

    def __init__(self, model: nn.Module, plain: nn.Module, loss: Any, seed: int, undo: Undo) -> None:
        self.seed, self.calls = seed, set[str]()
        self._is_of_model = is_function(loss) and required_arguments(loss) == 1
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
        # A run in training mode moves running statistics, and the next one must begin with the same.
        self.model.load_state_dict(self._state)
        return value

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        if operation.computes:
            self.calls.add(operation.module)

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        pass

    def noted(self, policy: Policy) -> float:
        """Return the loss under a policy, and note the modules whose operations computed."""

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
            # NaN compares with nothing: it would leave the order of the rows to chance.
            row["cost"] = max((x for x in (row["alone"], row["without"]) if not math.isnan(x)), default=0.0)
            row |= {"loss_alone": only, "loss_without": but}
            ranking.append({**row, "own": _has_inside(name, modules)})

    layers = [n for n, m in modules.items() if n and not any(m.children()) and _has_numbers(m)]
    containers = [n for n, m in modules.items() if any(m.children()) and n in losses.calls]
    add([n for n in modules if n in layers or n in containers])
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
    # Rows are sorted by cost, so that a small sum of indices is a pair that costs much.
    pairs = sorted(combinations(range(len(names)), 2), key=sum)
    for i, j in pairs[:MOST_PAIRS]:
        if math.isfinite(losses.under(ranking._leaving([names[i], names[j]]))):
            ranking.pair = names[i], names[j]
            # The sort is stable: the pair comes first, and all others keep their order.
            ranking.sort(key=lambda row: row["module"] not in (names[i], names[j]))
            return


def _keep_finite(ranking: Sensitivity, losses: _Losses, bare: list[str]) -> None:
    """Note which modules replace the first k, where these in float32 leave a loss that is not finite.

    bare: the modules without a row, such as relus, which round their results all the same.
    """
    names = [row["module"] for row in ranking]
    without = {row["module"]: row["loss_without"] for row in ranking}

    def is_finite(wide: list[str]) -> bool:
        return math.isfinite(without[wide[0]] if len(wide) == 1 else losses.under(ranking._leaving(wide)))

    def repaired(wide: list[str]) -> list[str] | None:
        """Return these modules, and as few of the bare ones as make the loss finite; None if all do not."""
        if is_finite(wide):
            return wide
        if not bare or not is_finite([*wide, *bare]):
            return None
        # Each of them alone may not be enough, so that all are taken first, and then one after the other is dropped.
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
        # A larger k may be finite again, with the modules that this one lacks.
        if found is None:
            taken = names[:k]
        if found != names[:k]:
            ranking._instead[tuple(names[:k])] = found


def _has_numbers(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_inside(name: str, names: Iterable[str]) -> bool:
    """True if a module has others inside; all are inside of the model itself, which is named ""."""
    return any(other != name and (not name or other.startswith(f"{name}.")) for other in names)


def _excess(a: float, b: float) -> float:
    """Return the excess of a loss over another. One that is not finite is larger than any that is."""
    if math.isfinite(a) and math.isfinite(b):
        return a - b
    if math.isfinite(a) == math.isfinite(b):
        return math.nan
    return math.inf if math.isfinite(b) else -math.inf


_PRODUCTS = {*CALLS, *OPERATIONS}


@keeps_grad_mode
def last_layers(model: nn.Module, step: Any, *, loss: Callable[[Any], Tensor] | None = None) -> list[str]:
    """Name the layers whose product with a weight reaches the loss without another such product.

    Of a classifier or a language model that is its head; of a detector, each of its heads; of a model whose head shares
    the embedding's weight, the module that multiplies by it. The gradient that comes to them is that of the loss:
    a few large elements, and many small ones that add up to as much. Rounded to nearest in 4 bits the small ones are
    lost and the sum is wrong at any scale. A model that keeps these layers in a wider format trains:

        policy = fpsim.Policy(error="e2m1fn", overrides=dict.fromkeys(fpsim.last_layers(model, step), "bf16"))

    The step runs once, in float32. Parameters, buffers, gradients and random numbers are as they were afterwards.

    Args:
        model: any module, quantised or not.
        step: a function without arguments that returns the loss, or a batch, where the output has a `.loss` or with
            `loss`.
        loss: from the output of a batch to its loss.

    Returns:
        Names as in `model.named_modules()`, in the order they were called; "" for operations of the model itself.

    Raises:
        TypeError: for a step that does not return a tensor.
        ValueError: where no product leads to the loss.

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
    """Visitor that notes the operations whose weight is computed, as torch's prune and parametrizations do."""

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
        # Nothing behind a product is looked at: what lies there reaches the loss through it.
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
    """True if a tensor follows from parameters alone: a weight, a view of one, or a result computed from weights."""
    # A row of an embedding depends on its indices, which are data.
    if operation is None or operation.name in LOOK_UPS:
        return False
    return operation.name == "parameter" or (bool(operation.sources) and all(map(_is_of_parameters, operation.sources)))
