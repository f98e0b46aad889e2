"""compare(model, a, b, batch): run one batch under two policies, and find where their results diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from fpsim.border import MOST_SEED, require_memory, require_module, require_seed
from fpsim.checks import require_callable, require_number, require_whole, require_word, shown
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.tracing import Operation
from fpsim.insight.rows import Rows, number, text_table
from fpsim.insight.stepping import as_step, called, is_function, loss_of, nothing_ran, preserve, switching, traced
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import dequantize, quantize
from fpsim.policies.policy import FormatLike
from fpsim.policies.recipes import as_policy
from fpsim.tensors.noise import seed_here
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["Comparison", "Errors", "compare", "key_of", "nothing_is_left"]

T = TypeVar("T")
Key = tuple[str, int, int, str]  # site, call, batch and role: the same in each run of a step
GONE = 0.9  # from this relative error on, nothing of a result is left
GROWTH = 2.0  # from this factor on, an error counts as grown
SHOWN = 12  # how many rows the printed table has
ROLES = ("activation", "error", "weight_grad")  # the roles of rows
COLUMNS = ("site", "role", "relative", "entering", "growth", "cosine", "amax_a", "amax_b")
MOST_DRAWS = 1_000_000


class Comparison(Rows):
    """Comparison of two runs of one batch: a row for each result and gradient in the order of the run; see `compare`.

    losses: the loss of `a`, and the mean loss of `b` over the draws; None without a loss.
    kl: mean Kullback-Leibler divergence of b's outputs from a's in nats, with the last axis as logits; None if no
        output has such an axis.
    """

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        self.losses: tuple[float, float] | None = None
        self.kl: float | None = None

    def begins(self, role: str = "activation") -> dict[str, Any] | None:
        """Return the first row of a role with any error; None if both runs are equal."""
        require_word("role", role, ROLES)
        return next((row for row in self if row["role"] == role and row["relative"] != 0), None)

    def grows(self, role: str = "activation", by: float = GROWTH) -> dict[str, Any] | None:
        """Return the first row of a role whose error is at least `by` times both the entering and the first error.

        Returns None if there is no such row.
        """
        require_number("by", by, 1)
        # The first error comes from rounding one tensor to the format. At many operations an error of this size follows
        # a far smaller entering error. Such growth says nothing about the operation.
        first = self.begins(role)
        least = math.inf if first is None else by * first["relative"]
        return next((r for r in self if r["role"] == role and _growth_of(r) >= by and r["relative"] >= least), None)

    def breaks(self, role: str = "activation") -> dict[str, Any] | None:
        """Return the first row of a role that became inf; else the first row of which nothing is left; else None.

        Nothing is left of a result whose relative error is at least 0.9, if the entering error is below 0.45.
        """
        require_word("role", role, ROLES)
        rows = [row for row in self if row["role"] == role]
        lost = (r for r in rows if nothing_is_left(r["relative"], r["entering"]))
        return next((r for r in rows if r["relative"] == math.inf), next(lost, None))

    def __str__(self) -> str:
        lines = [f"a: {self.names[0]}", f"b: {self.names[1]}"]
        if self.losses is not None:
            lines.append(f"loss {self.losses[0]:.6g} in a, {self.losses[1]:.6g} in b")
        if self.kl is not None:
            lines.append(f"KL divergence of the outputs {self.kl:.3g} nats")
        for role, words in (("activation", "forward"), ("error", "backward")):
            first, grown, broken = self.begins(role), self.grows(role), self.breaks(role)
            if broken is not None:
                what = "it becomes inf" if broken["relative"] == math.inf else "nothing is left of it"
                change = f"{number(broken['entering'])} -> {number(broken['relative'])}"
                lines.append(f"{words}: {what} at {broken['site']} ({change})")
            if first is not None:
                lines.append(f"{words}: the error begins at {first['site']} with {number(first['relative'])}")
            if grown is not None:
                change = f"{number(grown['entering'])} -> {number(grown['relative'])}"
                lines.append(f"{words}: it first grows by {GROWTH:g} at {grown['site']} ({change})")
        # The rows whose errors grew most are printed in the order of the run.
        grown_most = sorted(range(len(self)), key=lambda i: -_growth_of(self[i]))[:SHOWN]
        cells = [[number(self[i][name]) for name in COLUMNS] for i in sorted(grown_most)]
        lines.append("fpsim.sensitivity says which modules cost most; fpsim.why, what makes a step fail.")
        return "\n".join([*lines, text_table(COLUMNS, cells)])

    __repr__ = __str__

    def plot(self) -> Any:
        """Plot the relative error along the run, forward and backward; needs matplotlib."""
        from fpsim.insight.pictures import plot_errors

        return plot_errors(self)


def nothing_is_left(relative: float, entering: float) -> bool:
    """True if an operation lost its result: its relative error is at least 0.9, and the entering error below 0.45."""
    return relative >= GONE and entering < GONE / 2


def _growth_of(row: Mapping[str, Any]) -> float:
    return -1.0 if row["growth"] is None else row["growth"]


@overload
def compare(
    model: nn.Module,
    a: FormatLike,
    b: FormatLike,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    draws: int = 1,
    seed: int = 0,
) -> Comparison: ...


@overload
def compare(
    model: nn.Module,
    a: Any,
    b: FormatLike,
    batch: FormatLike,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    draws: int = 1,
    seed: int = 0,
) -> Comparison: ...


@keeps_grad_mode
def compare(
    model: nn.Module,
    a: Any,
    b: FormatLike,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    draws: int = 1,
    seed: int = 0,
) -> Comparison:
    """Run one batch under two policies, and measure where their results diverge.

    Each row is of one result (role "activation"), its gradient ("error") or a parameter's gradient ("weight_grad"):

    - relative: |b - a| / |a|, with Euclidean norms; for several draws, the root mean square over the draws. It is inf
      if a is finite and b is not.
    - cosine: the cosine of the angle between a and b, averaged over the draws.
    - bias: |mean of b - a| / |a|. For pure noise it tends to relative / sqrt(draws). None for one draw.
    - snr: |mean of b| / the standard deviation over the draws, the gradient-to-noise ratio. None for one draw.
    - amax_a, amax_b: the largest finite magnitudes.
    - entering: the largest relative error among the operation's operands; for a gradient, among the gradients from
      which it is computed.
    - growth: relative / entering; None if no error entered.

    There are two forms: `compare(model, a, b, batch)`, and, as in the other tools, `compare(model, step, a, b)`. A step
    is a function without arguments that runs `model`, or a batch.

    With a batch, `model` stays as it is: both runs are on copies, with the same dropout. A step function runs the model
    itself, whose formats, parameters, buffers and gradients are restored; the loss is the number that the function
    returns, if any. All results and gradients of `a` are kept until the end. Views and copies of a result have no rows.
    A fused operation, such as an LSTM, has one row.

    Args:
        model: any module, quantised or not.
        a, b: formats or policies, as for `quantize`; None is float32.
        batch: the arguments of the model: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        loss: a function from the model's output to a scalar. None takes the output's `loss`; if the output has none,
            only the forward pass runs.
        draws: how often `b` is run, each time with other noise of stochastic rounding.
        seed: the seed of dropout and noise.

    Raises:
        ValueError: as in `quantize`; for invalid draws; and if neither loss is finite.
        TypeError: as in `quantize`.

    >>> comparison = compare(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), None, "e4m3fn", torch.ones(2, 4))
    >>> [(row["site"], row["role"]) for row in comparison]
    [('0:linear', 'activation'), ('1:tanh', 'activation')]
    """
    require_module(model)
    # Accept the form of the other tools: model, step, a, b.
    if _is_step(a) and not _is_step(batch):
        a, b, batch = b, batch, a
    require_memory(model)
    require_whole("draws", draws, 1, MOST_DRAWS)
    require_seed(seed)
    if seed + draws - 1 > MOST_SEED:
        raise ValueError(f"seed={shown(seed)} leaves no seeds for draws={draws}. Expected: a smaller one.")
    if loss is not None:
        require_callable("loss", loss, "lambda output: output.mean()")
    # A value that is not a format raises an error before anything is run.
    for fmt in (a, b):
        as_policy(fmt, model=model)
    run = _run_of(model, batch, loss)
    result = Comparison(("float32" if a is None else str(a), "float32" if b is None else str(b)))
    kept = _Kept()
    output, loss_a = run(a, seed, seed, kept)
    if not kept.tensors and is_function(batch):
        raise nothing_ran(model, "compare")
    if loss_a is None and output is not None and output.numel() and not bool(output.isfinite().any()):
        raise ValueError(
            f"No number in the output of {type(model).__name__} is finite in a, and b cannot be compared with it. Use "
            f"a model and a batch with finite outputs in a; fpsim.why(model, step) says where it breaks."
        )
    # Only the first run keeps its tensors. The tensors of the draws are measured as they appear, so memory does not
    # grow with the number of draws.
    errors = _Measured(kept.tensors, draws)
    outputs, losses = [], []
    for draw in range(draws):
        errors.order, errors.operations = [], {}
        # Dropout has the same seed in each run, so only the rounding differs between the runs.
        other, loss_b = run(b, seed, seed + draw, errors)
        outputs.append(_divergence(output, other))
        losses.append(loss_b)
    if loss_a is not None and not math.isfinite(loss_a) and not any(map(math.isfinite, losses)):  # type: ignore[arg-type]
        raise ValueError(
            f"The loss of {type(model).__name__} is {loss_a} in a and {losses[0]} in b, which cannot be "
            f"compared. Use a model and data with a finite loss in a; fpsim.why(model, step) says where it breaks."
        )
    result.extend(errors.rows())
    if loss_a is not None:
        result.losses = loss_a, sum(losses) / draws  # type: ignore[arg-type]
    result.kl = None if outputs[0] is None else sum(outputs) / draws  # type: ignore[arg-type]
    return result


def _is_step(value: object) -> bool:
    """True if a value is a step or a batch rather than a format."""
    # dtypes of NumPy and ml_dtypes are formats, but they are classes, and so callable too.
    return isinstance(value, Tensor | tuple | list | Mapping) or (is_function(value) and not isinstance(value, type))


Run = Callable[[FormatLike, int, int, Any], tuple[Tensor | None, float | None]]


def _run_of(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> Run:
    """Return a function that sets the seeds, runs the model in a format with a visitor, and returns output and loss."""
    if is_function(batch):
        return partial(_run_step, model, as_step(model, batch, loss, "compare"))
    # `_run_batch` quantises a copy for each run, and `quantize` needs a plain model.
    plain = dequantize(model) if any(emulated_forwards(model)) else model
    return partial(_run_batch, plain, batch, loss)


def _run_step(
    model: nn.Module, step: Callable[[], Any], fmt: FormatLike, seed: int, noise: int, visitor: Any
) -> tuple[None, float | None]:
    """Run a step once and return its loss. The step calls `model` itself, so the formats of `model` are switched."""

    def run(undo: Undo) -> Any:
        preserve(model, undo)
        switching(model, undo)(fmt)
        return _seeded(model, visitor, step, seed, noise, undo)

    returned = undone(run)
    loss = returned.detach() if isinstance(returned, Tensor) else returned
    is_loss = isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1)
    return None, float(loss) if is_loss else None


def _run_batch(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None,
    fmt: FormatLike,
    seed: int,
    noise: int,
    visitor: Any,
) -> tuple[Tensor | None, float | None]:
    """Run a copy forward, and backward if there is a loss; return the outputs and the loss."""
    # The copy has the gradients of the model. The gradients of this run must not be added to them.
    copy = quantize(model, fmt)
    copy.zero_grad()

    def step() -> tuple[Any, Tensor | None]:
        out = called(copy, batch)
        total = loss_of(out, loss)
        if total is not None:
            total.backward()
        return out, total

    out, total = undone(partial(_seeded, copy, visitor, step, seed, noise))
    logits = getattr(out, "logits", None)
    result = logits if isinstance(logits, Tensor) else next((x for x in tensors_in(out) if x.is_floating_point()), None)
    return None if result is None else result.detach(), None if total is None else float(total.detach())


def _seeded(model: nn.Module, visitor: Any, step: Callable[[], T], seed: int, noise: int, undo: Undo) -> T:
    trace = traced(model, visitor, "compare", undo)
    seed_here(undo, seed, noise)
    # Gradients are compared even if the caller is under no_grad.
    undo.by(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
    torch.set_grad_enabled(True)
    return trace.run(step)


def _divergence(a: Tensor | None, b: Tensor | None) -> float | None:
    """Return the mean KL(a | b) over all axes but the last, in nats."""
    if a is None or b is None or a.dim() < 2 or a.shape[-1] < 2 or a.shape != b.shape:
        return None
    p, q = (x.double().log_softmax(-1) for x in (a, b))
    # A class that `a` masks adds 0, which is the limit of p log p. Computed directly, it would be 0 * inf.
    return float(torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1).mean())


class _Kept:
    """Visitor of the first run that keeps each result and gradient."""

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor] = {}

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        self.tensors[key_of(operation, "activation")] = result.detach().clone()

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        self.tensors[key_of(operation, _role_of(operation))] = gradient.clone()


def _role_of(operation: Operation) -> str:
    return "weight_grad" if operation.name == "parameter" else "error"


def key_of(operation: Operation, role: str) -> Key:
    """Return the key of a result or gradient, which is the same in each run of a step."""
    return operation.site, operation.call, operation.notes.get("batch") or 0, role


class Errors:
    """Relative errors of the results and gradients of a step, compared with another run of the step.

    draws: how many runs are measured; their squared errors are averaged.
    """

    def __init__(self, draws: int = 1) -> None:
        self.draws = draws
        self._norms: dict[Key, float] = {}
        self._squares: dict[Key, float] = {}

    def add(self, key: Key, a: Tensor, b: Tensor, numbers: Tensor) -> None:
        """Measure how far `b` is from `a`.

        a, b: float64. numbers: the elements that are measured, all finite in `a`; the others are masks, or not finite.
        """
        change = (b - a)[numbers].square().sum()
        self._norms[key] = float(a[numbers].norm())
        # A NaN in `b` is an infinite error; a comparison with NaN would not find it.
        self._squares[key] = self._squares.get(key, 0.0) + float(change.nan_to_num(nan=math.inf, posinf=math.inf))

    def relative(self, key: Key) -> float | None:
        """Return the relative error; None if it was not measured.

        It is inf if the other run is not finite, or if the first run has only zeros and the other run does not.
        """
        if key not in self._norms:
            return None
        change, norm = math.sqrt(self._squares[key] / self.draws), self._norms[key]
        return change / norm if norm else (math.inf if change else 0.0)

    def entering(self, operation: Operation, role: str = "activation") -> float:
        """Return the largest error among an operation's operands; for a gradient, among the gradients it comes from."""
        is_forward = role == "activation"
        near, its_role = (operation.parents, role) if is_forward else (operation.children, "error")
        return max((self.relative(key_of(o, its_role)) or 0.0 for o in near), default=0.0)


class _Measured(Errors):
    """Visitor of the other runs that measures the distance of each result and gradient from the first run's."""

    def __init__(self, tensors: dict[Key, Tensor], draws: int) -> None:
        super().__init__(draws)
        self.tensors = tensors
        self.sums: dict[Key, dict[str, Any]] = {}
        self.order: list[Key] = []
        self.operations: dict[Key, Operation] = {}

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        self._add(operation, "activation", result)

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        self._add(operation, _role_of(operation), gradient)

    def _add(self, operation: Operation, role: str, b: Tensor) -> None:
        key = key_of(operation, role)
        a = self.tensors.get(key)
        if a is None or a.shape != b.shape:
            return
        x, y = a.detach().double(), b.detach().double()
        # The largest number of the dtype is a mask: it would hide the size of all other numbers.
        finite = x.isfinite() & (x.abs() != torch.finfo(a.dtype).max)
        self.add(key, x, y, finite)
        x, known = torch.where(finite, x, 0.0), torch.where(y.isfinite(), y, 0.0)
        sums = self.sums.setdefault(key, {"cosine": 0.0, "mean": 0.0, "squares": 0.0, "amax_b": 0.0})
        sums["norm"], sums["amax_a"] = float(x.norm()), _largest(x)
        sums["cosine"] += float(nn.functional.cosine_similarity(x.flatten(), known.flatten(), 0)) / self.draws
        sums["amax_b"] = max(sums["amax_b"], _largest(known))
        if self.draws > 1:
            sums["mean"] = sums["mean"] + known / self.draws
            sums["squares"] += float((known**2).sum()) / self.draws
            sums["a"] = x
        self.order.append(key)
        self.operations[key] = operation

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each result and gradient of the last run, in its order."""
        for key in self.order:
            operation, role = self.operations[key], key[-1]
            # A view repeats the error of its operand, and has no row. A parameter computes nothing either, but its
            # gradient has a row.
            if not operation.computes and role != "weight_grad":
                continue
            relative, sums = self.relative(key), self.sums[key]
            assert relative is not None
            entering = self.entering(operation, role)
            yield {
                "site": operation.site,
                "call": operation.call,
                "role": role,
                "relative": relative,
                "entering": entering,
                "growth": relative / entering if 0 < entering < math.inf else None,
                "cosine": sums["cosine"],
                "amax_a": sums["amax_a"],
                "amax_b": sums["amax_b"],
                **self._over_draws(sums),
            }

    def _over_draws(self, sums: Mapping[str, Any]) -> dict[str, float | None]:
        if self.draws == 1:
            return {"bias": None, "snr": None}
        mean = float(sums["mean"].norm())
        # If all draws are equal, rounding of the sums may make the difference negative.
        deviation = math.sqrt(max(sums["squares"] - mean * mean, 0.0))
        bias = float((sums["mean"] - sums["a"]).norm())
        return {
            "bias": bias / sums["norm"] if sums["norm"] else (math.inf if bias else 0.0),
            "snr": mean / deviation if deviation else math.inf,
        }


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
