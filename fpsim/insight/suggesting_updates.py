"""An Update from a run: which formats do for each state of its optimizer, and for weights, tried on a watched step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer

from fpsim.formats.blocks import BlockFormat, Format, as_format
from fpsim.formats.floats import FloatFormat
from fpsim.insight.suggesting import UPDATES_LOST, Limits, Worst, does
from fpsim.models.optimizers import quantize_optimizer
from fpsim.policies.update import Storage, Update
from fpsim.tensors.spec import Spec, any_spec

__all__ = ["Stepped", "UpdateSuggestion", "suggested_update"]

STEPS = 2  # of a trial: the second begins from states that a step has stored
BLOCK = 256  # elements that share an amax, as in torchao and bitsandbytes
LEAST_STOCHASTIC_DIGITS = 8  # significant bits, of bfloat16: each step adds noise of the weight's spacing


@dataclass
class Stepped:
    """A step of an optimizer that was watched.

    step: the number of the call of the model before it.
    optimizer: as it was left.
    gradients: of the step.
    """

    step: int
    optimizer: Optimizer
    gradients: Mapping[Tensor, Tensor]


@dataclass(frozen=True)
class UpdateSuggestion:
    """An Update, and what became of it when it was tried.

    update: what is suggested.
    is_tried: whether it was run on a watched step, and kept what the optimizer does.
    words: what was tried, or why nothing was.
    """

    update: Update
    is_tried: bool
    words: str


def suggested_update(stepped: Stepped | None, worst: Worst, specs: Iterable[Spec], limits: Limits) -> UpdateSuggestion:
    """The update with the fewest bits whose steps are those of float32, to `limits.sqnr_db`.

    Each state is tried alone: steps from what it would store, beside the same steps in float32. So are the weights,
    and then all together. The optimizer, its parameters and its states are copied for each trial.

    Args:
        stepped: the last step that was watched.
        worst: the statistics, for the weights.
        specs: the formats that are tried; of states also with an amax for each 256 elements.
        limits: what is allowed.
    """
    if stepped is None:
        return UpdateSuggestion(Update(), False, "not tried: no step of the optimizer was watched")
    names = sorted(
        {
            name
            for p, state in stepped.optimizer.state.items()
            for name, x in state.items()
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape == p.shape and x.dim()
        }
    )
    formats = [spec.fmt for spec in specs]
    try:
        trial = _Trial(stepped, limits.sqnr_db)
        if not trial.moves:
            return UpdateSuggestion(Update(), False, f"not tried: the step after call {stepped.step} changes nothing")
        states = {name: trial.first_state(name, formats) for name in names}
        update = Update(states={name: fmt for name, fmt in states.items() if fmt is not None})
        weights = [replace(update, weight=fmt, rounding=how) for fmt, how in _of_weights(worst, formats, limits)]
        for candidate in [*weights, update]:
            if trial.keeps(candidate):
                words = f"tried on the step after call {stepped.step}: {trial.words(candidate)}"
                return UpdateSuggestion(candidate, True, words)
    except Exception as error:  # of the optimizer, in a step that only a trial runs: it is told
        reason = (str(error).splitlines() or [""])[0]
        return UpdateSuggestion(Update(), False, f"not tried: {type(error).__name__}: {reason}")
    return UpdateSuggestion(Update(), True, f"tried on the step after call {stepped.step}: states do together in none")


def _of_weights(worst: Worst, formats: Iterable[Format], limits: Limits) -> list[tuple[Format, str]]:
    """The formats in which weights would do, from the smallest, each with its rounding."""
    suitable: list[tuple[Format, str]] = []
    for fmt in sorted((f for f in formats if not isinstance(f, BlockFormat)), key=_bits):
        weights = [row for (_, role, name), row in worst.items() if (role, name) == ("weight", str(fmt))]
        updates = [row for (_, role, name), row in worst.items() if (role, name) == ("update", str(fmt))]
        if not weights or not all(does(row, limits) for row in weights):
            continue
        if all(row["lost"] is None or row["lost"] <= UPDATES_LOST for row in updates):
            suitable.append((fmt, "nearest_even"))
        elif isinstance(fmt, FloatFormat) and fmt.mantissa_bits + 1 >= LEAST_STOCHASTIC_DIGITS:
            suitable.append((fmt, "stochastic"))
    return suitable


def _may_share(fmt: Format) -> bool:
    """Whether libraries have blocks of such a format: of at most 8 bits, with a range that needs a scale."""
    return isinstance(fmt, FloatFormat) and fmt.bits <= 8 and fmt.exponent_bits <= 5


def _bits(fmt: Format) -> float:
    return Storage(any_spec(fmt)).bits


class _Trial:
    """Steps of copies of an optimizer, plain and quantised."""

    def __init__(self, stepped: Stepped, least_db: float) -> None:
        self._stepped, self._least_db = stepped, least_db
        self._by_words: dict[str, float] = {}
        self._plain = self._moved(None)
        self.moves = any(bool(x.any()) for x in self._plain)

    def first_state(self, name: str, formats: Iterable[Format]) -> Format | None:
        """The smallest format that does for this state alone."""
        candidates = [fmt for fmt in formats if not (isinstance(fmt, BlockFormat) and fmt.is_delayed)]
        candidates += [as_format(f"{fmt} per {BLOCK} fp32") for fmt in candidates if _may_share(fmt)]
        by_bits = sorted(dict.fromkeys(fmt for fmt in candidates if _bits(fmt) < 32), key=_bits)
        return next((fmt for fmt in by_bits if self._decibels(Update(states={name: fmt})) >= self._least_db), None)

    def keeps(self, update: Update) -> bool:
        """Whether the states of an update do, and whatever it stores stays finite."""
        if any(not bool(x.isfinite().all()) for x in self._moved(update)):
            return False
        return self._decibels(replace(update, weight=None, rounding="nearest_even")) >= self._least_db

    def words(self, update: Update) -> str:
        """What the trial of an update has shown."""
        ratio = self._decibels(replace(update, weight=None, rounding="nearest_even"))
        return "what it adds to weights is that of float32" + (f", to {ratio:.0f} dB" if ratio < math.inf else "")

    def _decibels(self, update: Update) -> float:
        """How near the sum of the updates is to that of float32: the least signal to noise of all parameters."""
        key = str(update)
        if key not in self._by_words:
            pairs = zip(self._plain, self._moved(update), strict=True)
            self._by_words[key] = min((_ratio(wanted, got) for wanted, got in pairs), default=math.inf)
        return self._by_words[key]

    def _moved(self, update: Update | None) -> list[Tensor]:
        """What the steps add to each parameter."""
        optimizer = copy.deepcopy(self._stepped.optimizer)
        pairs = [
            (mine, its)
            for own, other in zip(optimizer.param_groups, self._stepped.optimizer.param_groups, strict=True)
            for mine, its in zip(own["params"], other["params"], strict=True)
        ]
        if update is not None:
            quantize_optimizer(optimizer, update)
        before = [mine.detach().clone() for mine, _ in pairs]
        for _ in range(STEPS):
            for mine, its in pairs:
                gradient = self._stepped.gradients.get(its)
                mine.grad = None if gradient is None else gradient.clone()
            optimizer.step()
        return [mine.detach() - old for (mine, _), old in zip(pairs, before, strict=True)]


def _ratio(wanted: Tensor, got: Tensor) -> float:
    """Signal to noise in dB; inf where both are the same, -inf where the second is not finite."""
    noise = float((got.double() - wanted.double()).square().sum())
    if noise == 0:
        return math.inf
    signal = float(wanted.double().square().sum())
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf
