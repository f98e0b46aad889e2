"""watch(model): measure the effect of formats on the tensors of a model in training, without changing any result."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_initialised, require_memory, require_module, require_optimizer
from fpsim.checks import require_iterable, require_whole, require_word, shown
from fpsim.emulation.tracing import Operation, Trace
from fpsim.formats.blocks import Format
from fpsim.insight.lost_updates import LostUpdates, unrecorded
from fpsim.insight.masks import masked_in
from fpsim.insight.ranges import binades_in
from fpsim.insight.rows import Rows, largest_of
from fpsim.insight.stepping import as_step, nothing_ran, preserve
from fpsim.insight.suggesting import (
    Called,
    Limits,
    Suggestion,
    does,
    in_lines,
    output_tensors,
    planned,
    suggested,
    worst_of,
)
from fpsim.models.installed import emulated_forwards
from fpsim.models.optimizers import quantized_optimizer_of
from fpsim.models.storing import states_in
from fpsim.policies.policy import Policy
from fpsim.tensors.cuts import Cut
from fpsim.tensors.launch import rounded
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import BlockSpec, Spec, any_spec, holds_numbers
from fpsim.tensors.tally import Accumulator, Tally, row_of, wanted_and_lost
from fpsim.torch_internals import is_compiled_wrapper, version_of
from fpsim.torch_modes import hook_steps, is_stand_in, keeps_grad_mode, unhook_steps
from fpsim.undoing import Exit, Undo, undone

__all__ = ["Watch", "watch"]

FORMATS = ("e4m3fn", "e5m2", "fp16", "bf16")
EVERY = 1000  # a watched step takes up to 18 plain ones, see `benchmarks/report.py --only watching`
# Limits within which a format suffices: shares of the numbers, and a ratio in dB. Within its range, e5m2 has 25 dB and
# e4m3fn 31 dB.
UNDERFLOW, OVERFLOW, SQNR_DB = 0.01, 0.0, 20.0
OPERANDS = ("activation", "error", "weight")  # the roles of tensors that enter products
MOST_NAMED = 8  # how many parameters a line names
Key = tuple[int, str, str, Spec]


@keeps_grad_mode
def watch(
    model: nn.Module,
    step: Any = None,
    formats: Iterable[str | Format] = FORMATS,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    every: int = EVERY,
    optimizer: torch.optim.Optimizer | None = None,
) -> Watch:
    """Watch a float32, bfloat16 or autocast model train, and measure the effect of each format on its tensors.

    No bit of the run changes. Each `every`-th call of the model in training, from the first one on, is watched: the
    results of its operations (role "activation"), their gradients ("error"), the parameters ("weight"), their gradients
    ("weight_grad"); with an optimizer also its tensors ("state") and the change of the parameters in a step ("update").
    Gradients are measured as they are in the backward pass, including the scale of a GradScaler. Recomputation in a
    checkpoint and operations outside of the model are not seen. With DistributedDataParallel, watch the wrapped module.
    If several threads run the model, only the first one to call it is watched; copies of the model are not. The watch
    also ends when its result is garbage-collected. If you compile the model with `model.compile()`, watch it after
    compiling; calls of torch's own containers under `torch.compile` are not seen.

    There are two forms: `with watch(model, formats) as watching:` around a training, and `watch(model, step)`, which
    runs the step once, restores the state from before, and ends.

    Args:
        model: a model that is not quantised; `fpsim.record` records quantised models.
        step: a function without arguments, or a batch. With a batch, the model's output has a `.loss`, or `loss`
            computes it. The formats may be the second argument instead of a step.
        loss: a function from the model's output to a scalar, for a batch.
        formats: the candidates, with rounding to nearest. A format whose numbers share scales has its blocks along the
            last axis.
        every: the calls 1, 1 + every, and so on are watched.
        optimizer: the optimizer whose states and updates are watched. If it is quantised, `updates` has the lost
            updates; see `fpsim.lost_updates`.

    Raises:
        ValueError: for a model that is quantised or compiled, for a step of a model in eval mode, and for invalid
            numbers and formats.

    >>> model = nn.Linear(2, 1)
    >>> with watch(model, ["e4m3fn"], every=1) as watching:
    ...     (model(torch.ones(1, 2)) * 1e-5).sum().backward()
    >>> [row["underflow"] for row in watching.rows() if row["role"] == "error"]
    [1.0]
    """
    if step is None or isinstance(step, str | Format) or _are_formats(step):
        return Watch(model, formats if step is None else step, every, optimizer)
    watching = Watch(model, formats, 1, optimizer)
    with watching:
        run = as_step(model, step, loss, "watch")
        require_memory(model)
        if not model.training:
            raise ValueError(
                f"Got a step of {type(model).__name__} in eval mode. watch sees calls in training: model.train()."
            )

        def once(undo: Undo) -> None:
            preserve(model, undo)
            watching._trace.run(run, sees_outside=False)

        undone(once)
        if not watching.steps:
            raise nothing_ran(model, "watch")
    return watching


def _are_formats(value: object) -> bool:
    """True if the second argument of `watch` is the formats rather than a step or a batch."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(isinstance(item, str | Format) for item in value)
    # A value that can be neither a step nor a batch, such as a generator or a number, is checked as formats are.
    return not callable(value) and not isinstance(value, Tensor | Mapping)


class Watch:
    """Statistics of a model in training; see `watch`. As a context manager it detaches itself at the end."""

    def __init__(
        self, model: nn.Module, formats: Iterable[str | Format], every: int, optimizer: torch.optim.Optimizer | None
    ) -> None:
        require_module(model)
        require_initialised(model)
        if any(emulated_forwards(model)):
            raise ValueError("This model is quantised. Expected: `with fpsim.record(model):`, or the original.")
        if any(is_compiled_wrapper(m) for m in model.modules()):
            raise ValueError("A compiled model reached watch(). Expected: the module that was given to torch.compile.")
        require_whole("every", every, 1)
        if isinstance(formats, str | Format):
            raise TypeError(f"formats is {shown(formats)}. Expected: a list of formats, [{shown(formats)}].")
        self.specs = [any_spec(fmt, "nearest_even") for fmt in require_iterable("formats", formats, "['fp16']")]
        if not self.specs:
            raise ValueError(f"formats={shown(formats)} is empty. Expected: at least one format, such as ['fp16'].")
        if optimizer is not None:
            require_optimizer(optimizer)
            # Accelerate's wrapper does not pass hooks on to the wrapped optimizer.
            while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
                optimizer = inner
        self.every, self.steps, self._watched = every, 0, 0  # `steps` counts calls in training
        self._is_watching = self._was_without_numbers = False
        self.is_inside = False  # whether a block of this context manager is running
        self._rows = Rows()
        self._sums: dict[Key, Accumulator] = {}
        self._parameters = dict(model.named_parameters())
        self._lost: dict[Key, tuple[int, int]] = {}  # updates that would change nothing, and all updates
        self._called: Called | None = None  # the last watched call
        self._hidden: dict[str, str] = {}  # by format: where it would turn an infinity into a number
        self._broken: set[int] = set()  # the steps whose output is not finite
        self._optimizer = optimizer
        self._steps = _WatchedSteps(optimizer, every)
        self._versions = self._all_versions()
        self._eye = eye = _Eye(self)
        self._trace = Trace(
            model,
            eye,
            emulated=False,
            verb="watch",
            is_due=eye.begin_step,
            on_call=eye.called,
            needs_numbers=False,
            is_part_due=eye.begin_part,
        )
        try:
            self._trace.install()
            if optimizer is not None:
                hook_steps(optimizer, eye.before_step, eye.after_step)
        # BaseException includes Ctrl-C, which must not leave hooks behind either.
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Stop watching, even during a call; the statistics stay."""
        self._is_watching = False
        self._trace.remove()
        if self._optimizer is not None:
            unhook_steps(self._optimizer, self._eye.before_step, self._eye.after_step)
            self._optimizer = None
        self._steps.detach()

    def __del__(self) -> None:
        # Python also calls this if `__init__` refused its arguments.
        if "_trace" in vars(self):
            self.detach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "A Watch belongs to the model that it watches, and is neither copied nor pickled. Keep its rows(). A copy "
            "of the model is not watched."
        )

    def __enter__(self) -> Watch:
        self.is_inside = True
        return self

    __exit__ = Exit()

    def leave(self) -> None:
        """Detach at the end of the block."""
        self.detach()

    def _all_versions(self) -> int:
        """Return the number of writes to the parameters so far."""
        # An inference tensor has no version counter.
        return sum(version_of(p) for p in self._parameters.values() if not p.is_inference())

    # Called by the model and the optimizer

    def _begin_step(self) -> bool:
        if not (torch.is_grad_enabled() and self._trace.model.training and self._trace.claim()):
            return False
        # Gradients that reach parameters from here on belong to another step.
        if self._is_watching:
            self._trace.clear()
        self._is_watching = self.steps % self.every == 0
        self.steps += 1
        if self._is_watching:
            # The sums of the last watched step are tensors. They become rows of numbers before they are dropped.
            self._rows, self._sums, self._lost, self._watched = self.rows(), {}, {}, self.steps
            # The parameters are read again, because they may have been replaced since the last step.
            self._parameters = dict(self._trace.model.named_parameters())
            for name, parameter in self._parameters.items():
                self._add(name, "weight", parameter)
        return self._is_watching

    def _begin_part(self) -> bool:
        """Begin a part of the model that a step calls directly; return whether it is watched."""
        # All parts that a watched step calls are watched.
        return torch.is_grad_enabled() and self._trace.claim() if self._is_watching else self._begin_step()

    def _keep_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Keep a call's inputs and, once computed, its outputs' gradients: a suggested policy is tried on them."""
        self._called = called = Called(self.steps, args, kwargs)
        outputs = output_tensors(out)
        if not outputs or any(map(_is_broken, outputs)):
            self._broken.add(self.steps)
        for i, x in enumerate(outputs):
            if x.requires_grad:
                self._trace.hook(x, partial(called.keep_gradient, i))

    def _forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        values, options = self._trace.arguments
        # Masks are noted for views too, which compute nothing: a mask may reach its softmax through views.
        operation.notes["masked"] = masked = masked_in(operation, operands, (*values, *options.values()), result)
        if operation.computes:
            self._add(operation.site, "activation", result if masked is None else result.masked_fill(masked, 0.0))

    def _backward(self, operation: Operation, gradient: Tensor) -> None:
        if operation.name == "parameter":
            self._add(operation.site, "weight_grad", gradient)
        elif operation.computes:
            self._add(operation.site, "error", gradient)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_watching and self._trace.claim():
            self._steps.begin(optimizer, self._parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._trace.claim(and_warn=False):
            return
        for name, before, parameter in self._steps.end(self._parameters, self._watched):
            self._add(name, "update", parameter.detach() - before)
            self._add_lost(name, before, parameter.detach())
            for state in states_in(optimizer.state.get(parameter, {})):
                if state.x.is_floating_point() and state.x.dim():
                    self._add(f"{name} {state.name}", "state", state.x)

    def _add(self, site: str, role: str, x: Tensor) -> None:
        x = x.detach()
        if x.layout is not torch.strided or not x.numel() or not holds_numbers(x):
            self._was_without_numbers |= is_stand_in(x)
            return
        # The lowest number of a dtype is a mask. If it counted as a number, it would be the amax.
        if role == "activation" and bool((least := torch.finfo(x.dtype).min) == x.amin()):
            x = x.masked_fill(x == least, 0.0)
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        for spec in self.specs:
            key = self._watched, site, role, spec
            if key not in self._sums:
                self._sums[key] = Accumulator(spec, x.device)
            # A block format that saturates turns an infinity into a number, so its statistics would look good.
            hides = isinstance(spec, BlockSpec) and spec.fmt.nonfinite == "saturate" and role in OPERANDS
            if hides and bool(x.isinf().any()):
                self._hidden.setdefault(str(spec.fmt), f"in step {self._watched} at {site} ({role})")
            row, cut = row_of(site) if role == "error" else None, Cut() if isinstance(spec, BlockSpec) else None
            self._sums[key].add(x, _rounded(x, spec), cut, row)

    def _add_lost(self, name: str, before: Tensor, after: Tensor) -> None:
        """Count, for each format, the updates that would change nothing if the parameters were stored in it."""
        if not holds_numbers(before):
            return
        for spec in self.specs:
            old, new = (_rounded(x.float(), spec) for x in (before, after))
            wanted, lost = wanted_and_lost(old, new, before != after)
            key = self._watched, name, "update", spec
            known = self._lost.get(key, (0, 0))
            self._lost[key] = known[0] + lost, known[1] + wanted

    # Results

    def rows(self) -> Rows:
        """Return a row for each watched step, site, role and format.

        underflow: share of the non-zero numbers that would become zero. overflow: share of all numbers that would
        saturate or become inf. sqnr_db: signal to quantisation noise. amax: the largest finite magnitude. spread: the
        number of binades that hold 99 % of the non-zero numbers. nonfinite: share of inf and NaN, without masks. lost:
        share of the updates that would change nothing if the parameters were stored in the format. row_bias, kurtosis:
        for "error", see `Tally`.
        """
        if self._trace.is_replaced:
            warnings.warn(
                "model.compile() was called after fpsim.watch(model), which has seen no call since. Watch the model "
                "after compiling it.",
                stacklevel=2,
            )
        if not self.steps and self._all_versions() != self._versions:
            warnings.warn(
                "The parameters have been written to since fpsim.watch(model), and no call of the model in training "
                "was seen. If it was trained: calls of torch's own containers under torch.compile are not seen, nor "
                "are those of a copy. Watch it without torch.compile, or inside of a module with its own forward.",
                stacklevel=2,
            )
        if self._was_without_numbers:
            warnings.warn(
                "Tensors on device meta, or of a FakeTensorMode, hold no numbers. fpsim.watch(model) has left them "
                "out. Watch a model that trains on cpu or cuda.",
                stacklevel=2,
            )
        new = (_watched_row(*key, sums.result(), self._lost.get(key)) for key, sums in [*self._sums.items()])
        return Rows([*self._rows, *new])

    def to_frame(self) -> Any:
        """Return the rows as a pandas.DataFrame."""
        return self.rows().to_frame()

    def table(self, underflow: float = UNDERFLOW, overflow: float = OVERFLOW, sqnr_db: float = SQNR_DB) -> Rows:
        """Count the sites at which each format suffices: a row for each role and format, with the worst values.

        do: the number of the `sites` at which the format suffices in every watched step. It does not suffice if numbers
            are not finite, or if more than half of the updates would change nothing (`lost`).
        underflow, overflow: the largest share that is allowed. sqnr_db: the least signal-to-noise ratio.
        """
        limits = Limits(underflow, overflow, sqnr_db)
        worst, table = worst_of(self.rows()), Rows()
        for role in dict.fromkeys(role for _, role, _ in worst):
            for spec in self.specs:
                rows = [row for (_, r, fmt), row in worst.items() if (r, fmt) == (role, str(spec.fmt))]
                table.append(
                    {
                        "role": role,
                        "format": str(spec.fmt),
                        "sites": len(rows),
                        "do": sum(does(row, limits) for row in rows),
                        "underflow": largest_of(rows, "underflow"),
                        "overflow": largest_of(rows, "overflow"),
                        "sqnr_db": min((row["sqnr_db"] for row in rows if row["sqnr_db"] is not None), default=None),
                        "lost": largest_of(rows, "lost"),
                        "nonfinite": largest_of(rows, "nonfinite"),
                        **{name: largest_of(rows, name) for name in ("row_bias", "kurtosis")},
                    }
                )
        return table

    def policy(self, underflow: float = UNDERFLOW, overflow: float = OVERFLOW, sqnr_db: float = SQNR_DB) -> Policy:
        """Return a policy that the statistics suggest, without scaling of gradients.

        A role gets the smallest of the formats that suffice at 90 % of its sites, or float32. If a site of a module
        needs more, the module gets the smallest format that suffices at all its sites. Formats whose numbers share
        scales are left out, because a role cannot have one. The policy is then tried on the last watched call, with the
        same inputs and gradients and the current parameters; sites with inf, NaN or saturation stay float32. Warns if
        the policy could not be tried.

        underflow, overflow, sqnr_db: as in `table`.
        """
        suggestion = self.suggest(underflow, overflow, sqnr_db)
        if not suggestion.is_tried:
            warnings.warn(f"This policy was {suggestion.words}.", stacklevel=2)
        return suggestion.policy

    def suggest(self, underflow: float = UNDERFLOW, overflow: float = OVERFLOW, sqnr_db: float = SQNR_DB) -> Suggestion:
        """Return the policy of `policy()`, whether it was tried, and on which step; copies the model."""
        limits = Limits(underflow, overflow, sqnr_db)
        plan = planned(worst_of(self.rows()), self.specs, limits)
        return suggested(self._trace.model, plan, self._called)

    def never_moved(self) -> list[str]:
        """Return the names of parameters that had a non-zero gradient, and that no watched step changed at all."""
        return self._steps.never_moved()

    @property
    def updates(self) -> list[LostUpdates]:
        """Return the lost updates of a quantised optimizer, unless `lost_updates` records them."""
        return self._steps.updates

    def plot(self, role: str = "error", value: str = "underflow", fmt: str | Format | None = None) -> Any:
        """Plot a value of the rows by site and step; needs matplotlib.

        role: the role whose rows are plotted. value: the column. fmt: one of the formats; None takes the first.
        """
        if not isinstance(role, str):
            raise TypeError(f"role={shown(role)} is not a string. Expected: the role of a row, such as 'error'.")
        spec = self.specs[0] if fmt is None else any_spec(fmt, "nearest_even")
        rows = [row for row in self.rows() if (row["role"], row["format"]) == (role, str(spec.fmt))]
        if not rows:
            raise ValueError(f"No row has role {shown(role)} and format {spec.fmt}. See rows().")
        require_word("value", value, [name for name, entry in rows[0].items() if not isinstance(entry, str)])
        from fpsim.insight.pictures import plot_watch

        # Gradients arrive from output to input.
        if role in ("error", "weight_grad"):
            rows.reverse()
        return plot_watch(rows, value, f"{value} in {spec.fmt}, role {role}")

    def __str__(self) -> str:
        suggestion = self.suggest()
        lines = [str(self.table()), "", *_breaks(self.rows(), self._broken, self._hidden)]
        lines += [f"Suggested, {suggestion.words}:", *in_lines(suggestion.policy)]
        if found := self._steps.lines():
            lines += ["", *found]
        return "\n".join(lines)

    __repr__ = __str__


class _Eye:
    """Hooks of a Watch on the model and the optimizer."""

    def __init__(self, watching: Watch) -> None:
        self.begin_step, self.begin_part = _weakly(watching._begin_step), _weakly(watching._begin_part)
        self.forward, self.backward = _weakly(watching._forward), _weakly(watching._backward)
        self.called = _weakly(watching._keep_call)
        self.before_step, self.after_step = _weakly(watching._before_step), _weakly(watching._after_step)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method if its object is still alive, and returns None otherwise."""
    # A hook with a reference to the Watch would keep it alive, but a Watch must end when it is garbage-collected.
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (method := weak()) is None else method(*args)

    return call


class _WatchedSteps:
    """The steps of an optimizer that follow watched calls of a model.

    updates: the lost updates of a quantised optimizer, unless they are recorded already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, every: int) -> None:
        self._before: dict[str, Tensor] = {}
        self._moved: dict[str, bool] = {}  # whether a step changed it, for parameters that had a gradient
        self._left: dict[int, tuple[int, int]] = {}  # by step: unchanged weights with a gradient, and all of these
        quantized = None if optimizer is None else quantized_optimizer_of(optimizer)
        self.updates = [LostUpdates(q, every) for q in unrecorded([] if quantized is None else [quantized])]

    def detach(self) -> None:
        """Stop recording lost updates."""
        for lost in self.updates:
            lost.detach()

    def begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the parameters before a step, as the model sees them."""
        quantized = quantized_optimizer_of(optimizer)
        for name, p in parameters.items():
            self._before[name] = (p if quantized is None else quantized.seen_by_the_model(p)).detach().clone()

    def end(self, parameters: Mapping[str, nn.Parameter], step: int) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """Yield (name, value before the step, parameter) for each kept parameter; count what the step has changed.

        step: the number of the watched call before the optimizer's step.
        """
        kept, self._before = self._before, {}
        if not kept:
            return
        left = of = 0
        for name, before in kept.items():
            parameter = parameters[name]
            yield name, before, parameter
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or not holds_numbers(before):
                continue
            after = parameter.detach()
            had, same = wanted_and_lost(before, after, gradient)
            of, left = of + had, left + same
            if had:
                self._moved[name] = self._moved.get(name, False) or not bool((before == after).all())
        self._left[step] = left, of

    def never_moved(self) -> list[str]:
        """Return the names of parameters that had a non-zero gradient, and that no step changed at all."""
        return [name for name, has_moved in self._moved.items() if not has_moved]

    def lines(self) -> list[str]:
        """Describe the findings."""
        lines = []
        for step, (left, of) in self._left.items():
            if left:
                lines.append(
                    f"Step {step} left {100 * left / of:.3g} % of the weights that had a gradient as they were."
                )
        if still := self.never_moved():
            more = f" and {len(still) - MOST_NAMED} more" if len(still) > MOST_NAMED else ""
            lines.append(f"No watched step has changed {', '.join(still[:MOST_NAMED])}{more}.")
        for lost in self.updates:
            if lost.share is not None:
                lines.append(f"{100 * lost.share:.3g} % of the updates were lost, stored as {lost.words}.")
        return lines


def _rounded(x: Tensor, spec: Spec) -> Tensor:
    return rounded_blocks(x, spec, -1) if isinstance(spec, BlockSpec) else rounded(x, spec)


def _watched_row(step: int, site: str, role: str, spec: Spec, t: Tally, lost: tuple[int, int] | None) -> dict[str, Any]:
    """Return the row of a step, site, role and format: the effect of the format on the tensors."""
    return {
        "step": step,
        "site": site,
        "role": role,
        "format": str(spec.fmt),
        "underflow": t.underflow_fraction,
        "overflow": t.overflow_fraction,
        "sqnr_db": t.sqnr_db if t.signal else None,
        "amax": t.amax,
        "spread": binades_in(t.exponents),
        "nonfinite": t.nonfinite / t.count,
        "lost": lost[0] / lost[1] if lost is not None and lost[1] else None,
        "row_bias": t.row_bias,
        "kurtosis": t.kurtosis,
    }


def _is_broken(x: Tensor) -> bool:
    """True if a tensor holds NaN or inf."""
    is_seen = x.is_floating_point() and x.layout is torch.strided and holds_numbers(x)
    # Minus infinity may be a mask.
    return is_seen and bool((x.isnan() | (x == torch.inf)).any())


def _breaks(rows: Rows, broken: set[int], hidden: Mapping[str, str]) -> list[str]:
    """Name the first operation that each format would break, and the first operation that breaks without a format.

    broken: the steps whose output is not finite.
    hidden: by format, the place where it would turn an infinity into a number.
    """
    lines = []
    for fmt in dict.fromkeys(row["format"] for row in rows):
        first = next((r for r in rows if r["format"] == fmt and r["role"] == "activation" and r["overflow"]), None)
        if first is not None:
            lines.append(f"{fmt} would overflow from step {first['step']} on, first at {first['site']}.")
        if fmt in hidden:
            lines.append(f"{fmt} would hide an infinity {hidden[fmt]}: a finite number follows, which no scaler sees.")
    nonfinite = [row for row in rows if row["nonfinite"] and row["role"] not in ("error", "weight_grad")]
    # If the output is finite, a non-finite activation had no effect on it, for example because of a `where`.
    bad = next((row for row in nonfinite if row["role"] != "activation" or row["step"] in broken), None)
    if bad is not None:
        lines.append(
            f"Step {bad['step']} is not finite without any format, at {bad['site']} ({bad['role']}): "
            f"fpsim.why(model, step) says why."
        )
    return [*lines, ""] if lines else []
