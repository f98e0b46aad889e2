"""Suggest a policy from the statistics of a run, and try it on a watched step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.checks import require_number
from fpsim.formats.blocks import BlockFormat
from fpsim.insight.diagnose import Diagnosis, diagnose
from fpsim.models.quantize import quantize, try_policy
from fpsim.policies.policy import ROLES, Policy, policy_of_modules
from fpsim.tensors.spec import Spec
from fpsim.torch_internals import map_leaves, tensors_of

__all__ = [
    "Called",
    "Limits",
    "Plan",
    "Suggestion",
    "does",
    "in_lines",
    "output_tensors",
    "planned",
    "suggested",
    "worst_of",
]

ENOUGH_SITES = 0.9  # the share of a role's sites at which a format must suffice to become the role's format
UPDATES_LOST = 0.5  # the largest share of updates that may change nothing in parameters of a format
NOISE = 2.0**-20  # a bias's gradients are rounding noise if they are smaller than this times its weight's gradients
TRIALS = 24
SHOWN = 4  # how many names of modules a line has
Worst = dict[tuple[str, str, str], dict[str, Any]]


@dataclass(frozen=True)
class Limits:
    """Limits for a format: the largest shares of underflow and overflow, and the least signal-to-noise ratio."""

    underflow: float
    overflow: float
    sqnr_db: float

    def __post_init__(self) -> None:
        require_number("underflow", self.underflow, 0, 1)
        require_number("overflow", self.overflow, 0, 1)
        require_number("sqnr_db", self.sqnr_db)


@dataclass
class Called:
    """A watched call of the model: its detached inputs, and the gradients that reached its outputs."""

    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by the position of the output's tensor

    def __post_init__(self) -> None:
        self.args, self.kwargs = map_leaves(_detached, (self.args, self.kwargs))

    def keep_gradient(self, position: int, gradient: Tensor) -> None:
        """Keep the gradient of the output's tensor at this position."""
        self.gradients[position] = gradient.detach().clone()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Suggestion:
    """A policy, and the outcome of its trial.

    policy: the suggested policy. is_tried: whether it was run on a watched step, and nothing broke.
    words: the outcome of the trial, or the reason why there was none.
    """

    policy: Policy
    is_tried: bool
    words: str


def worst_of(rows: Iterable[Mapping[str, Any]]) -> Worst:
    """Return the worst values of all steps, by site, role and format."""
    worst: Worst = {}
    for row in rows:
        key = row["site"], row["role"], row["format"]
        known = worst.setdefault(key, dict(row))
        for name in ("underflow", "overflow", "amax"):
            known[name] = max(known[name], row[name])
        for name, better in (("sqnr_db", min), ("lost", max), ("row_bias", max), ("kurtosis", max)):
            known[name] = better((r[name] for r in (known, row) if r[name] is not None), default=None)
        # A GradScaler skips the steps whose gradients are not finite, so for gradients the best step counts.
        pick = min if row["role"] in ("error", "weight_grad") else max
        known["nonfinite"] = pick(known["nonfinite"], row["nonfinite"])
    return worst


def does(row: Mapping[str, Any], limits: Limits) -> bool:
    """True if a format would suffice. Every format suffices for zeros, and no format for non-finite numbers."""
    is_clear = row["sqnr_db"] is None or row["sqnr_db"] >= limits.sqnr_db
    is_moved = row["lost"] is None or row["lost"] <= UPDATES_LOST
    fits = row["underflow"] <= limits.underflow and row["overflow"] <= limits.overflow
    return fits and is_clear and is_moved and not row["nonfinite"]


@dataclass
class Plan:
    """A policy under construction: the default format of each role, and the formats of each module."""

    base: dict[str, Any]
    modules: dict[str, dict[str, Any]]

    def policy(self) -> Policy:
        """Return the policy. Outside of all overrides it has the formats of the model's own operations."""
        root = self.modules.get("", self.base)
        # Parents come first, as `policy_of_modules` expects.
        names = sorted((name for name in self.modules if name), key=lambda name: name.count("."))
        # Modules without statistics get the default formats, even if the model's own operations have other formats.
        around = {} if root == self.base else {name.partition(".")[0]: self.base for name in names}
        formats = {"": root, **around, **{name: self.modules[name] for name in names}}
        return policy_of_modules({name: Policy(**own) for name, own in formats.items()})

    def widen(self, diagnosis: Diagnosis) -> bool:
        """Leave a few more roles of modules in float32; return False if no role is left to widen."""
        # First widen the places that broke; then all roles of the module of the cause; then all roles of the modules
        # whose results the module of the cause reads.
        changed = [
            self._widen(_module_of(row["site"]), row["role"] if row["role"] in ROLES else "activation")
            for row in diagnosis
        ]
        if any(changed) or diagnosis.cause is None:
            return any(changed)
        module = _module_of(diagnosis.cause["site"])
        sources = [_module_of(str(row["what"]).removeprefix("gradient of ")) for row in diagnosis.operands]
        changed = [self._widen(module, role) for role in ROLES]
        if not any(changed):
            changed = [self._widen(name, role) for name in sources if name in self.modules for role in ROLES]
        return any(changed)

    def _widen(self, module: str, role: str) -> bool:
        formats = self.modules.setdefault(module, dict(self.base))
        if formats.get(role) is None:
            return False
        formats[role] = None
        return True


def _module_of(site: str) -> str:
    """Return the module of a site, which is an operation, "fc:linear", or a parameter, "fc.weight"."""
    return site.rpartition(":")[0] if ":" in site else site.rpartition(".")[0]


def planned(worst: Worst, specs: Iterable[Spec], limits: Limits) -> Plan:
    """Return the plan that the statistics suggest: the smallest formats that suffice, by role and by module."""
    # Formats whose numbers share scales are for operands of products, and not for roles.
    formats = [spec.fmt for spec in specs if not isinstance(spec.fmt, BlockFormat)]
    # The sort is stable: among formats of equal size the user's order decides.
    formats.sort(key=lambda fmt: fmt.bits)
    did: dict[str, dict[str, dict[str, list[bool]]]] = {}  # by module, role, format: is it enough at each site?
    for (site, role, fmt), row in worst.items():
        if role in ROLES and not _is_noise(worst, row):
            by_format = did.setdefault(_module_of(site), {}).setdefault(role, {})
            by_format.setdefault(fmt, []).append(does(row, limits))
    base: dict[str, Any] = {}
    for role in ROLES:
        sites = {str(f): [d for roles in did.values() for d in roles.get(role, {}).get(str(f), [])] for f in formats}
        base[role] = next((f for f in formats if _share(sites[str(f)]) >= ENOUGH_SITES), None)
    modules = {
        module: {role: _first(roles.get(role), base[role], formats) for role in ROLES} for module, roles in did.items()
    }
    return Plan(base, modules)


def _is_noise(worst: Worst, row: Mapping[str, Any]) -> bool:
    """True if a bias's gradients are zero in theory and noise in practice, such as the bias of an attention's keys."""
    module, _, name = row["site"].rpartition(".")
    of_weight = worst.get((f"{module}.weight", "weight_grad", row["format"]))
    is_bias = row["role"] == "weight_grad" and name == "bias" and of_weight is not None
    return is_bias and of_weight is not None and row["amax"] < NOISE * of_weight["amax"]


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _first(by_format: Mapping[str, list[bool]] | None, base: Any, formats: list[Any]) -> Any:
    """Return a role's format in a module: its default if that suffices there, else the first format that suffices."""
    if by_format is None or (base is not None and all(by_format[str(base)])):
        return base
    return next((fmt for fmt in formats if all(by_format[str(fmt)])), None)


def suggested(model: nn.Module, plan: Plan, called: Called | None) -> Suggestion:
    """Return the policy of a plan, run on a watched step and widened until nothing breaks there."""
    if called is None:
        return Suggestion(plan.policy(), False, "not tried: no call of the model was watched")
    try:
        # The step runs in float32 first: a step that breaks in float32 says nothing about formats.
        copy = quantize(model, None).float()
        run = _again(copy, called)
        if (diagnosis := diagnose(copy, run)).cause is not None:
            where = f"{diagnosis.cause['kind']} at {diagnosis.cause['site']}"
            return Suggestion(plan.policy(), False, f"not tried: step {called.step} breaks in float32 too, {where}")
        for trial in range(1, TRIALS + 1):
            policy = plan.policy()
            try_policy(copy, policy)
            if (diagnosis := diagnose(copy, run)).cause is None:
                times = "once" if trial == 1 else f"{trial} times, each wider than the one before"
                return Suggestion(policy, True, f"tried on step {called.step} ({times}): all is finite, none saturates")
            if not plan.widen(diagnosis):
                break
    # The suggestion is valid without its trial: `words` reports an error of the model, or too little memory for its
    # copy.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return Suggestion(plan.policy(), False, f"not tried: {type(error).__name__}: {reason}")
    where = "" if diagnosis.cause is None else f", {diagnosis.cause['kind']} at {diagnosis.cause['site']}"
    return Suggestion(plan.policy(), False, f"tried on step {called.step}, and it breaks{where}")


def _again(model: nn.Module, called: Called) -> Callable[[], None]:
    """Return a step that repeats the watched call: forward, and backward with the same gradients."""
    args, kwargs = map_leaves(_widened, (called.args, called.kwargs))

    def step() -> None:
        outputs = output_tensors(model(*args, **kwargs))
        pairs = [(outputs[i], g.to(outputs[i].dtype)) for i, g in called.gradients.items() if i < len(outputs)]
        # The watched call had other random numbers, so the outputs may differ: only gradients that fit are used.
        pairs = [(out, g) for out, g in pairs if out.requires_grad and out.shape == g.shape]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])

    return step


def output_tensors(out: Any) -> list[Tensor]:
    """Return the tensors among a model's outputs: in tuples, lists and mappings."""
    return tensors_of(dict(out) if isinstance(out, Mapping) else out)


def _widened(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_low else value


def in_lines(policy: Policy) -> list[str]:
    """Describe a policy: a line for each set of formats, with the names of the modules that have it."""
    names: dict[str, list[str]] = {}
    for pattern, inner in policy.overrides.items():
        formats = {role: fmt for role in ROLES if (fmt := getattr(inner, role)) is not None}
        words = ", ".join(f"{role}={fmt}" for role, fmt in formats.items()) or "float32"
        names.setdefault(words, []).append(str(pattern))
    base = ", ".join(f"{role}={getattr(policy, role) or 'float32'}" for role in ROLES)
    lines = [f"  {base}"]
    for words, modules in names.items():
        more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
        lines.append(f"  {words}: {', '.join(modules[:SHOWN])}{more}")
    return lines
