"""What is true of a drawn case, whatever `why` says: what the step loses beside float64, and whether a remedy cures it.

A remedy is applied to the model, by other means than `why`'s own. It cures by the rule of docs/diagnose.md.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from planted_bench import AUTOCAST, NATIVE, Bench, Drawn, Trial
from planted_kinds import KINDS, Answer, Kind
from planted_remedies import OF_DTYPES, OF_OPTIMIZER, AtSites, _changes, dtypes_of, is_cured_update
from torch import Tensor

import fpsim

NEGLIGIBLE = 1e-4  # of the largest gradient of its module: what a sum leaves that cancels
FAR, NEAR, ROUNDED = 0.5, 0.75, 0.05
CONTROL_COSINE = 0.99


@dataclass(frozen=True)
class Measured:
    """The loss of a step, and the gradients of parameters, without the scale."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in self.gradients.values())


def measure(trial: Trial) -> Measured:
    loss = trial.step()
    named = trial.model.named_parameters()
    gradients = {name: p.grad.double() / trial.scale for name, p in named if p.grad is not None}
    return Measured(float(loss.detach()), gradients)


Gradients = dict[str, Tensor]


def there(reference: Measured) -> Gradients:
    """The gradients of a step that are more than what a sum leaves that cancels."""
    largest: dict[str, float] = {}
    for name, g in reference.gradients.items():
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), float(g.norm()))
    named = reference.gradients.items()
    return {name: g for name, g in named if float(g.norm()) > NEGLIGIBLE * largest[name.rpartition(".")[0]]}


def lost(measured: Measured, truth: Gradients) -> list[str]:
    """Parameters that have a gradient in truth, and none here."""
    found = measured.gradients
    return [name for name in truth if name not in found or not bool(found[name].any())]


def cosine(measured: Measured, reference: Measured) -> float:
    names = [name for name in reference.gradients if name in measured.gradients]
    a = torch.cat([measured.gradients[name].flatten() for name in names])
    b = torch.cat([reference.gradients[name].flatten() for name in names])
    return float(a @ b / (a.norm() * b.norm())) if bool(a.any()) and bool(b.any()) else 0.0


def error(measured: Measured, reference: Measured, name: str) -> float:
    if name not in measured.gradients:
        return 1.0
    wanted = reference.gradients[name]
    found = float((measured.gradients[name] - wanted).norm() / wanted.norm())
    return found if found == found else math.inf


@dataclass(frozen=True)
class Examined:
    """A case that was drawn: its steps, each made anew, and what they give."""

    drawn: Drawn

    @property
    def kind(self) -> Kind:
        return KINDS[self.drawn.kind]

    def bench(self, is_planted: bool, reference: torch.dtype | None = None) -> tuple[Bench, Answer]:
        bench = Bench(self.drawn, is_planted, reference, self.kind.depth, self.kind.gain)
        return bench, self.kind.plant(bench)

    def trial(self, is_planted: bool = True, reference: torch.dtype | None = None) -> Trial:
        return self.bench(is_planted, reference)[0].trial()

    @cached_property
    def answer(self) -> Answer:
        return self.bench(True)[1]

    @cached_property
    def planted(self) -> Measured:
        return measure(self.trial())

    @cached_property
    def reference(self) -> Measured:
        return measure(self.trial(reference=torch.float64))

    @cached_property
    def truth(self) -> Gradients:
        return self._truth(True, self.reference)

    @cached_property
    def control(self) -> Measured:
        return measure(self.trial(False))

    @cached_property
    def control_reference(self) -> Measured:
        return measure(self.trial(False, torch.float64))

    def _truth(self, is_planted: bool, reference: Measured) -> Gradients:
        """What float64 gives, but for what float32 loses too."""
        truth, float32 = there(reference), measure(self.trial(is_planted, torch.float32))
        return {name: truth[name] for name in truth if not float32.is_finite or bool(float32.gradients[name].any())}

    @cached_property
    def control_cosine(self) -> float:
        """0 where the control is no healthy step."""
        both = self.control, self.control_reference
        if not all(one.is_finite for one in both) or lost(self.control, self._truth(False, self.control_reference)):
            return 0.0
        return cosine(*both)

    def is_healthy(self) -> bool:
        """Whether the case without its cause is a control."""
        if self.kind.after is not None and self.kind.harm == "update" and not self._updates(False) > 0.5:
            return False
        return self.control_cosine > CONTROL_COSINE

    def _updates(self, is_planted: bool) -> float:
        trial = self.trial(is_planted)
        if self.kind.after is None:
            return 1.0
        trial.step()
        return self.kind.after(trial)

    def is_harmed(self) -> bool:
        """Whether the planted case has the harm of its kind, and the case without its cause has not."""
        harm, found = self.kind.harm, self.planted
        if harm == "intrinsic":
            return not found.is_finite and (not self.kind.has_sister or self.control.is_finite)
        if harm == "update":
            with_it, without = self._updates(True), self._updates(False)
            return not with_it >= 0.1 and without > 0.5
        reference = self.reference
        if not reference.is_finite or not self.control_cosine > self.kind.cosine:
            return False
        if harm == "inf":
            return not found.is_finite
        if harm == "lost":
            return found.is_finite and bool(lost(found, self.truth))
        if not found.is_finite:
            return True
        away = abs(found.loss - reference.loss) > 0.05 * abs(reference.loss)
        turned = cosine(found, reference) < min(0.97, self.control_cosine - 0.05)
        return away or turned or bool(lost(found, self.truth))

    def lossy(self, paths: dict[str, str]) -> list[str]:
        """The stages that lose gradients, and the one before each on the way back."""
        truth, names, stages = self.truth, [*paths], set[str]()
        for at, stage in enumerate(names):
            for name in (name for name in truth if name.startswith(f"{paths[stage]}.")):
                wanted, found = truth[name] != 0, self.planted.gradients.get(name)
                share = 1.0 if found is None else float(((found == 0) & wanted).sum() / wanted.sum())
                if share >= 0.01:
                    stages.update(names[at : at + 3 if "point" in names[at : at + 2] else at + 2])
        return [name for name in names if name in stages]

    def place(self, paths: dict[str, str]) -> str:
        """A pattern of the places that are right."""
        if self.answer.place == "lossy":
            stages = self.lossy(paths)
            inside = "|".join(re.escape(paths[stage]) for stage in stages)
            return f"({inside})[:.].*" + ("|:.*" if "head" in stages else "")
        return rf"({self.answer.place.format(**{name: re.escape(path) for name, path in paths.items()})})(_\d+)?"

    def verdict(self, found: fpsim.Why, paths: dict[str, str]) -> str:
        """What is right or wrong of an answer."""
        if found.cause is None:
            return "nothing"
        lines = str(found).splitlines()
        kind, place = str(found.cause["kind"]), str(found.cause["place"])
        is_kind = bool(re.fullmatch(self.answer.kind, kind)) and kind.lower() in lines[0].lower()
        is_place = bool(re.fullmatch(self.place(paths), place)) and place.lower() in lines[0].lower()
        if not (is_kind and is_place):
            return "wrong place" if is_kind else "wrong kind" if is_place else "both wrong"
        is_false = self.answer.never and re.search(self.answer.never, str(found))
        is_missing = self.answer.must and not re.search(self.answer.must, "\n".join(lines[:2]))
        return "false words" if is_false or is_missing else "right"

    # Remedies

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return dtypes_of(self.trial())

    def cures(self, found: fpsim.Why, which: int) -> str:
        """Why a remedy that is printed as tried does not cure, or is "not applied: ..."; empty where it cures."""
        remedy, trial = found.tried[which], self.trial()
        buffers = [name for name, _ in trial.model.named_buffers() if name in remedy["what"]]
        if remedy["remedy"] == "master" and buffers:
            for name in buffers:
                module, _, attribute = name.rpartition(".")
                setattr(trial.model.get_submodule(module), attribute, trial.model.get_buffer(name).float())
            trial.step()
            assert self.kind.after is not None
            return "" if self.kind.after(trial) > 0.5 else "the average is as before"
        if remedy["remedy"] in self.kind.out_of_reach:
            return f"not applied: {remedy['remedy']}: out of reach"
        if remedy["remedy"] in (*OF_OPTIMIZER, "clear"):
            trial.fmt = "bf16" if trial.fmt == "float32" else trial.fmt
            return "" if is_cured_update(trial, remedy) else "the updates are as before"  # type: ignore[arg-type]
        try:
            mode = applied(trial, found, which, self._dtypes)
        except (KeyError, AttributeError, ValueError, NotImplementedError) as problem:
            return f"not applied: {remedy['remedy']}: {problem}"
        with mode:
            after = measure(trial)
        if isinstance(mode, AtSites) and mode.missed:
            return f"not applied: no operation is at {', '.join(sorted(mode.missed)[:3])}"
        return self.by_the_rule(after, remedy["remedy"])

    def by_the_rule(self, after: Measured, remedy: str) -> str:
        before, reference = self.planted, self.reference
        if not after.is_finite:
            return "not finite"
        if not reference.is_finite:
            empty = lost(after, there(self.control))
            return f"no gradient for {', '.join(empty[:3])}" if empty else ""
        none = lost(after, self.truth)
        if none:
            return f"no gradient for {', '.join(none[:3])} ({len(none)})"
        far = {name: error(before, reference, name) for name in self.truth if not error(before, reference, name) < FAR}
        for name, was in far.items():
            now = error(after, reference, name)
            bound = NEAR if not before.is_finite else max(min(was, 1.0) / 4, 2 * self._error_of_control(name))
            if not now <= bound:
                return f"{name} is off by {now:.3g}, {was:.3g} before"
        gap, was_gap = abs(after.loss - reference.loss), abs(before.loss - reference.loss)
        bound = 0.02 * abs(reference.loss) + 1e-6
        if math.isfinite(was_gap):
            bound = max(bound, was_gap / 4)
        elif remedy not in OF_DTYPES:
            bound = max(bound, NEAR * abs(reference.loss))
        if gap > bound:
            return f"the loss is {after.loss:.4g}, {before.loss:.4g} before, {reference.loss:.4g} in float64"
        if far or not before.is_finite:
            return ""
        whole, was_whole = (1 - cosine(one, reference) for one in (after, before))
        if whole > max(was_whole / 4, 1 - self.control_cosine, ROUNDED**2 / 2):
            return f"the gradient's cosine is {1 - whole:.4f}, {1 - was_whole:.4f} before"
        return ""

    def _error_of_control(self, name: str) -> float:
        both = self.control, self.control_reference
        return error(*both, name) if name in both[1].gradients and name in both[0].gradients else ROUNDED


def applied(trial: Trial, found: fpsim.Why, which: int, before: dict[str, torch.dtype]) -> Any:
    """Change the model of the trial as a remedy says; the step is then run inside of what is returned.

    before: the dtypes of results at sites in the step without a remedy.
    """
    remedy = found.tried[which]
    name, value = remedy["remedy"], remedy["value"]
    is_native = trial.fmt in ("float32", *NATIVE, *AUTOCAST)
    if name == "scale":
        if isinstance(trial.scaler, torch.amp.GradScaler):
            trial.scaler._init_scale = value
        elif trial.scaler is not None:
            trial.scaler.update(new_scale=value)
        else:
            trial.factor = value
        return nullcontext()
    if name in OF_DTYPES:
        if not is_native:
            policies = [i for i, row in enumerate(found.tried) if row["remedy"] in OF_DTYPES]
            policy = found.policy() if which == policies[0] else found._remedies[which].policy
            fpsim.set_policy(trial.model, policy)
            return nullcontext()
        return AtSites(trial.model, remedy["sites"], {}, OF_DTYPES[name], before)
    known = ("eps", "clamp", "fill", "divisor", "infinity", "mask", "slope")
    if name not in known:
        raise NotImplementedError("unknown")
    rounds = trial.fmt in ("fp16", "bf16")
    return AtSites(trial.model, [], _changes(found, remedy, trial.fmt if rounds else "fp32"))
