"""Behaviour of a model on other hardware: failures, errors by site, a short training, and memory traffic."""

from __future__ import annotations

import copy
import importlib.util
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fpsim
from ada_loss.lab.results.judgement import LEAST_SEEDS, Judgement, judge_sweep, smallest_step
from ada_loss.lab.results.verdict import default_tolerance
from ada_loss.lab.studies.hardware import Preset, presets_in
from ada_loss.lab.tasks import imported
from ada_loss.scalers import GradScaler
from fpsim import Operand, Policy
from fpsim.checks import require_number, require_whole, required_arguments, shown

__all__ = ["On", "OnRow", "function_at", "on", "runs"]

# The final loss of a training is the mean over its last fifth, because the loss of one step depends on the batch.
LAST = 5
FLOAT32 = 32  # bits
# A relative error of a gradient. If the float32 gradient has a larger error than this, the error in a format says
# nothing about the format.
NOISE = 0.01
WIDTH = 110  # the number of letters in a printed line
WORST = 3  # the number of sites that are printed

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class OnRow:
    """Behaviour of a model on one kind of hardware.

    preset, hardware: the full name of the preset, and the hardware in words.
    failure: the first lines of `fpsim.why` on one step; "" if it finds nothing.
    losses: the loss of one step, in float32 and with the preset.
    results, gradients: the results of operations, and the gradients of parameters, with the largest relative errors.
    breaks: the site where a result or a gradient becomes inf or vanishes entirely; "" if there is none.
    trained: the final loss of each seed; inf for a seed that diverged.
    float32: the final losses in float32.
    verdict: the verdict in words; "" if nothing was trained.
    weight_bits: the mean number of bits per element of weights that are operands of products.
    moved, moved_float32: the bytes that the products of a step read and write, with the preset and in float32.
    missing: the effects that the preset does not model.
    choices: the share of rows whose `topk` or `argmax` differs from float32, such as tokens that are routed to other
        experts.
    """

    preset: str
    hardware: str
    failure: str
    losses: tuple[float, float] | None
    results: tuple[tuple[str, float], ...]
    gradients: tuple[tuple[str, float], ...]
    breaks: str
    trained: tuple[float, ...]
    float32: tuple[float, ...]
    verdict: str
    weight_bits: float
    moved: float
    moved_float32: float
    missing: tuple[str, ...]
    choices: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.preset}: {self.hardware}"]
        lines.append(
            f"  fails: {self.failure.replace(chr(10), ' ') or 'nothing that fpsim.why looks for, in one step'}"
        )
        words = [f"loss {self.losses[1]:.6g}, {self.losses[0]:.6g} in float32"] if self.losses else []
        for name, worst in (("results", self.results), ("gradients", self.gradients)):
            words += [f"{name} {', '.join(f'{site} {error:.2%}' for site, error in worst)}"] if worst else []
        lines.append(f"  error of one step: {'; '.join(words)}")
        if self.choices:
            lines.append(
                f"  choices: {self.choices:.1%} of the rows of topk and argmax differ from float32's: these tokens go "
                f"to other experts, whose results are the errors above"
            )
        if self.breaks:
            lines.append(f"  breaks: {self.breaks}")
        if self.verdict:
            lines.append(f"  trains: {self.verdict}")
        share = self.moved / self.moved_float32 if self.moved_float32 else 1.0
        lines.append(
            f"  bits: weights in {self.weight_bits:.3g} a number; products move {self.moved / 1e6:.3g} MB a step, "
            f"{share:.0%} of float32's"
        )
        lines.append(f"  not modelled: {'; '.join(self.missing)}")
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in lines)


@dataclass(frozen=True)
class On:
    """A row for each hardware; it is printed in words."""

    rows: list[OnRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the rows as plain values, for JSON."""
        return {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        foot = "Sources of each line: ada-loss on --list. The presets are models of documents, not measurements."
        return "\n\n".join([*map(str, self.rows), foot])


def on(
    hardware: str | Sequence[str],
    make: Callable[..., nn.Module],
    batch: Callable[..., Any],
    *,
    loss: Loss | None = None,
    steps: int = 40,
    seeds: int = 3,
    learning_rate: float = 1e-3,
    sums: bool = True,
    progress: Callable[[], object] | None = None,
) -> On:
    """Run a model with the arithmetic of each hardware, and in float32.

    Args:
        hardware: names of presets, in a list or with commas between.
        make: a function that returns the model; it is called with a seed if it needs an argument.
        batch: a function that returns the input of the model: a tensor, a tuple of arguments, or a mapping of named
            arguments; it is called with the number of a step if it needs an argument. If `loss` takes two arguments,
            `batch` returns a pair: input and target.
        loss: a function from the model's output, or from output and target, to a scalar. None takes the output's
            `loss`, or an output that is a single number.
        steps, seeds, learning_rate: the numbers of steps and seeds, and the learning rate, of the trainings with AdamW.
            With 0 seeds nothing is trained.
        sums: whether sums of products are emulated; False leaves them to torch, which is faster.
        progress: a function that is called after each training and after each row, `runs` times in all.

    Raises:
        ValueError: for an unknown name, and for numbers out of range.
        TypeError: for functions that return something else.

    >>> def batch(): return torch.ones(4, 8), torch.zeros(4, 2)
    >>> found = on("tpu", lambda: nn.Linear(8, 2), batch, loss=nn.functional.mse_loss, seeds=0)
    >>> found.rows[0].preset, found.rows[0].weight_bits
    ('tpu@1', 16.0)
    """
    chosen = presets_in(hardware)
    require_whole("steps", steps, 1)
    require_whole("seeds", seeds, 0)
    if 0 < seeds < LEAST_SEEDS:
        raise ValueError(f"seeds={seeds} decide nothing. Expected: {LEAST_SEEDS} or more, or 0 for no training.")
    require_number("learning_rate", learning_rate, 0)
    subject = _Subject(make, batch, loss)
    told = progress or (lambda: None)

    def trained(one: Preset | None) -> list[float]:
        ends = []
        for seed in range(seeds):
            ends.append(subject.trained(one, seed, steps, learning_rate, sums))
            told()
        return ends

    float32 = trained(None)
    ends = {one: trained(one) for one in (chosen if all(map(math.isfinite, float32)) else ())}
    verdicts = _verdicts(chosen, ends, float32, steps)
    rows = []
    for one in chosen:
        rows.append(_row(subject, one, sums, ends.get(one, []), float32, verdicts.get(one, "")))
        told()
    return On(rows)


def runs(hardware: str | Sequence[str], seeds: int) -> int:
    """Return how often `on` calls `progress`, if no training of float32 diverges.

    >>> runs("h100,tpu", 3)
    11
    """
    return seeds + len(presets_in(hardware)) * (seeds + 1)


class _Subject:
    """The model, its data and its loss."""

    def __init__(self, make: Callable[..., nn.Module], batch: Callable[..., Any], loss: Loss | None) -> None:
        self.make, self.batch, self.loss = make, batch, loss
        self.takes_target = loss is not None and required_arguments(loss) > 1

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        found = self.make(seed) if required_arguments(self.make) else self.make()
        if not isinstance(found, nn.Module):
            raise TypeError(f"The function of the model gave {shown(found)}. Expected: a torch.nn.Module.")
        return found

    def data(self, step: int) -> Any:
        torch.manual_seed(step)
        return self.batch(step) if required_arguments(self.batch) else self.batch()

    def total(self, model: nn.Module, given: Any) -> Tensor:
        """Return the loss of a batch."""
        target: tuple[Any, ...] = ()
        if self.takes_target:
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise TypeError(f"The batch is {shown(given)}. Expected for a loss of two arguments: a pair.")
            given, target = given[0], (given[1],)
        if isinstance(given, Mapping):
            output = model(**given)
        else:
            output = model(*given) if isinstance(given, tuple | list) else model(given)
        if self.loss is not None:
            found: Any = self.loss(output, *target)
        else:
            found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise TypeError(
                f"{type(model).__name__} gave no loss for the batch. Expected: an output with a `loss`, or a function "
                f"of the output, or of output and target, by loss= (--loss FILE:function)."
            )
        return found

    def trained(self, one: Preset | None, seed: int, steps: int, learning_rate: float, sums: bool = True) -> float:
        """Return the final loss of a short training; inf if it diverged."""
        model = self.model(seed).train()
        if one is not None:
            model = fpsim.quantize(model, one.policy(model, sums=sums), inplace=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        scaler = GradScaler(one.scaling) if one is not None and one.scaling else None
        losses: list[float] = []
        for step in range(steps):
            given = self.data(step)
            # Dropout draws different numbers in each step, but the same numbers as in the float32 training.
            torch.manual_seed(steps * seed + step)
            total = self.total(model, given)
            losses.append(float(total.detach()))
            if not math.isfinite(losses[-1]):
                return math.inf
            optimizer.zero_grad()
            if scaler is None:
                total.backward()
                optimizer.step()
            else:
                scaler.scale(total).backward()
                scaler.step(optimizer)
                scaler.update()
        return statistics.fmean(losses[-max(1, steps // LAST) :])


def _in_dtype(given: Any, dtype: torch.dtype) -> Any:
    """Return a batch whose floating tensors are cast to a dtype."""
    if isinstance(given, Mapping):
        return {name: _in_dtype(x, dtype) for name, x in given.items()}
    if isinstance(given, tuple | list):
        return [_in_dtype(x, dtype) for x in given]
    return given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given


def _row(subject: _Subject, one: Preset, sums: bool, trained: list[float], float32: list[float], verdict: str) -> OnRow:
    model, given = subject.model(0).train(), subject.data(0)
    policy = one.policy(model, settled=True, sums=sums)
    scaler = GradScaler(one.scaling) if one.scaling else None

    def step_of(run: nn.Module) -> Callable[[], Tensor]:
        def step() -> Tensor:
            total = subject.total(run, given)
            (total if scaler is None else scaler.scale(total)).backward()
            return total

        return step

    quantised = fpsim.quantize(model, policy)
    reason = fpsim.why(quantised, step_of(quantised), scaler=scaler)
    failure = "" if reason.cause is None else "\n".join(str(reason).splitlines()[:2])
    rows = fpsim.compare(model, step_of(model), None, policy)
    choices = _choices(subject, (model, quantised), given)
    roles = ("activation", "error")
    # If choices differ, experts get other tokens. An expert's gradient may then be entirely different, or zero, though
    # nothing is lost. Only inf counts as a break then.
    if choices:
        is_inf = [row for row in rows if row["relative"] == math.inf and row["amax_a"] and row["role"] in roles]
        breaks = min(is_inf, key=lambda row: roles.index(row["role"]), default=None)
    else:
        breaks = next((row for role in roles if (row := rows.breaks(role)) is not None), None)
    weight_bits, moved, moved_float32 = _traffic(subject, model, given, policy)
    return OnRow(
        preset=one.full_name,
        hardware=one.hardware,
        failure=failure,
        losses=rows.losses,
        results=_worst(rows, "activation"),
        gradients=_worst(rows, "weight_grad", _noise(subject, model, given)),
        breaks="" if breaks is None else f"{breaks['site']} ({breaks['role']})",
        trained=tuple(trained),
        float32=tuple(float32),
        verdict=verdict,
        weight_bits=weight_bits,
        moved=moved,
        moved_float32=moved_float32,
        missing=one.missing,
        choices=choices,
    )


class _Choosing(TorchFunctionMode):
    """Record the choices of `topk` and `argmax`, which routers of experts use."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            # The choices are sorted, because the same experts in another order are the same choice.
            self.chosen.append(out[1].sort(-1).values)
        elif func in (torch.argmax, Tensor.argmax):
            self.chosen.append(out[..., None])
        return out


def _choices(subject: _Subject, models: tuple[nn.Module, nn.Module], given: Any) -> float:
    """Return the share of rows whose choice differs in the second model; 0.0 if there are no choices."""
    runs = []
    for model in models:
        torch.manual_seed(0)  # for dropout
        with torch.no_grad(), _Choosing() as choosing:
            subject.total(model, given)
        runs.append(choosing.chosen)
    pairs = [(a, b) for a, b in zip(*runs, strict=False) if a.shape == b.shape]
    rows = sum(a[..., 0].numel() for a, _ in pairs)
    return sum(int((a != b).any(-1).sum()) for a, b in pairs) / rows if rows else 0.0


def _worst(
    rows: Sequence[Mapping[str, Any]], role: str, noise: Mapping[str, float] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return a role's sites with the largest errors, largest first. Sites that are noise in float32 are left out.

    The gradient of a bias before a normalisation, for example, is zero except for rounding.
    noise: the noise of parameters, as `_noise` returns it.
    """
    known = noise or {}
    found = [
        (row["site"], row["relative"])
        for row in rows
        if row["role"] == role and row["relative"] is not None and known.get(row["site"], 0.0) < NOISE
    ]
    return tuple(sorted(found, key=lambda pair: -pair[1])[:WORST])


def _noise(subject: _Subject, model: nn.Module, given: Any) -> dict[str, float]:
    """Return the largest error of each parameter's float32 gradient, relative to the gradient's largest element.

    The reference is the float64 gradient. The result is empty for a model that runs only in float32, and for a model
    that draws other random numbers in float64.
    """
    losses, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        run = copy.deepcopy(model).to(dtype)
        data = _in_dtype(given, dtype)
        torch.manual_seed(0)  # for dropout
        try:
            total = subject.total(run, data)
            total.backward()
        # The model's forward pass creates float32 tensors, which do not mix with float64.
        except (RuntimeError, TypeError):
            return {}
        losses.append(float(total.detach()))
        gradients.append({name: p.grad for name, p in run.named_parameters() if p.grad is not None})
    # If the losses differ, the model drew other random numbers in float64, and the gradients are not comparable.
    if not math.isclose(*losses, rel_tol=1e-3):
        return {}
    narrow, wide = gradients
    return {
        name: float((narrow[name] - wide[name]).abs().max() / narrow[name].abs().max())
        for name in {*narrow} & {*wide}
        if narrow[name].any()
    }


def _traffic(subject: _Subject, model: nn.Module, given: Any, policy: Policy) -> tuple[float, float, float]:
    """Return the bits per weight, and the bytes that products move in a step: with the policy, and in float32.

    Only products of modules with a weight count.
    """
    # Each of the three products, y = x w^T, dx = dy w and dw = dy^T x, moves tensors with the sizes of x, w and y.
    of_modules = policy.for_modules(model)
    sizes: list[tuple[str, int, int, int]] = []

    def hook(name: str, weight: Tensor) -> Callable[..., None]:
        def count(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
                sizes.append((name, inputs[0].numel(), weight.numel(), output.numel()))

        return count

    handles = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            handles.append(module.register_forward_hook(hook(name, weight)))
    try:
        with torch.no_grad():
            subject.total(model, given)
    finally:
        for handle in handles:
            handle.remove()
    moved = weight_bits = numbers = 0.0
    for name, x, w, y in sizes:
        own = of_modules[name]
        wide = {role: _bits_of(getattr(own, role)) for role in fpsim.ROLES}
        found = own.products
        pairs = ((None, None),) * 3 if found is None else (found.fprop, found.dgrad, found.wgrad)
        (fx, fw), (ddy, dw), (wdy, wx) = pairs
        in_fprop = _operand_bits(fw, wide["weight"])
        moved += x * _operand_bits(fx, wide["activation"]) + w * in_fprop + y * wide["activation"]
        moved += y * _operand_bits(ddy, wide["error"]) + w * _operand_bits(dw, wide["weight"]) + x * wide["error"]
        moved += y * _operand_bits(wdy, wide["error"]) + x * _operand_bits(wx, wide["activation"])
        moved += w * wide["weight_grad"]
        weight_bits, numbers = weight_bits + w * in_fprop, numbers + w
    everything = sum(3 * (x + w + y) for _, x, w, y in sizes) * FLOAT32
    return weight_bits / numbers if numbers else FLOAT32, moved / 8, everything / 8


def _bits_of(fmt: Any) -> float:
    if fmt is None:
        return FLOAT32
    found = fpsim.as_format(fmt)
    return found.bits_per_value if isinstance(found, fpsim.BlockFormat) else found.bits


def _operand_bits(operand: Any, wide: float) -> float:
    """Return the bits per number of an operand; `wide` if it has no format, or is rounded by a user's function."""
    if not isinstance(operand, Operand) or operand.is_own or operand.fmt is None:
        return wide
    return _bits_of(operand.fmt)


def _verdicts(
    chosen: list[Preset], trained: dict[Preset, list[float]], float32: list[float], steps: int
) -> dict[Preset, str]:
    """Return the verdict on the trainings for each hardware, in words."""
    if not float32:
        return {}
    if not all(map(math.isfinite, float32)):
        return dict.fromkeys(chosen, "float32 diverged, and nothing can be compared with it. Lower --lr.")
    beside = f"{_mean(float32)} in float32, after {steps} steps with {len(float32)} seeds"
    tolerance = default_tolerance("loss", float32)
    words = {}
    for one in chosen:
        lost = sum(not math.isfinite(x) for x in trained[one])
        words[one] = f"{lost} of {len(float32)} seeds diverged" if lost else f"loss {_mean(trained[one])}"
        words[one] += f", {beside}"
    # Hardware with a diverged seed already has a statement, and is not tested.
    whole = [one for one in chosen if all(map(math.isfinite, trained[one]))]
    if tolerance is None:
        return {one: f"{text}. Too near to 0 for a verdict" if one in whole else text for one, text in words.items()}
    differences = [[a - b for a, b in zip(float32, trained[one], strict=True)] for one in whole]
    values = [*float32, *(x for one in whole for x in trained[one])]
    judged = judge_sweep(differences, float32, tolerance, step=smallest_step(values)) if whole else []
    return words | {
        one: f"{words[one]}: {_in_words(found, tolerance)}" for one, found in zip(whole, judged, strict=True)
    }


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g} ± {statistics.stdev(values):.2g}"


def _in_words(found: Judgement, tolerance: float) -> str:
    margin = f"{tolerance:.2g} (1 %)"
    if found.outcome == "undecided":
        more = f"about {found.seeds} seeds would decide" if found.seeds <= 100 else "more seeds than 100 would"
        return f"open whether it is worse by more than {margin}; {more}"
    return {
        "match": f"worse by no more than {margin}",
        "short": f"worse by more than {margin}",
        "worse": f"worse by more than {margin} with every seed",
        "collapsed": f"{len(found.low)} of the seeds collapsed",
    }[found.outcome]


def function_at(word: str, what: str) -> Callable[..., Any]:
    """Return the function at "file.py:name" or "package.module:name". what: its purpose, for the error message.

    Raises ValueError if it cannot be found.
    """
    place, colon, name = word.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"The {what} is {shown(word)}. Expected: FILE:function, such as 'mine.py:make'.")
    if not place.endswith(".py"):
        found = imported(what, word)
    else:
        module = _module_of(Path(place), what)
        if not hasattr(module, name):
            raise ValueError(f"{place} has no {name!r}. Expected: a function of the {what}.")
        found = getattr(module, name)
    if not callable(found):
        raise ValueError(f"{shown(word)} is a {type(found).__name__}. Expected: a function of the {what}.")
    return found  # type: ignore[no-any-return]


_MODULES: dict[Path, Any] = {}


def _module_of(path: Path, what: str) -> Any:
    """Return the module of a file. Each file runs only once, so that `make` and `batch` share its state."""
    place = path.resolve()
    if place in _MODULES:
        return _MODULES[place]
    if not place.is_file():
        raise ValueError(f"There is no file {shown(str(path))} for the {what}. Expected: FILE:function.")
    spec = importlib.util.spec_from_file_location(f"ada_loss_on_{place.stem}_{len(_MODULES)}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The module is put into sys.modules before it runs: dataclasses look there for names in annotations, and pickle
    # looks there for classes. The file's folder comes first on the path, because the file may import its neighbours.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(place.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        sys.path.remove(str(place.parent))
    _MODULES[place] = module
    return module
