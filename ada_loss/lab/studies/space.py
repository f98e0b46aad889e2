"""The space of a search: exponent and mantissa bits of each role, and modules that stay in float32."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

import fpsim
from fpsim import ROLES, Policy
from fpsim.checks import is_whole, shown

__all__ = ["STATES", "Point", "Space", "update_of"]

FLOAT32_BITS = 32
# The word for the optimizer's states, which are searched like a role of the model. Each state has one scale.
STATES = "states"


def update_of(states: str) -> dict[str, Any]:
    """Return the fields of a `fpsim.Update` that stores states in a format, as `Space.formats` names it.

    States in a format "per tensor" have the largest scale with which nothing saturates.

    >>> update_of("e4m3 per tensor"), update_of("e8m7")
    ({'states': 'e4m3 per tensor', 'scale': 'power_of_two'}, {'states': 'e8m7'})
    """
    return {"states": states, **({"scale": "power_of_two"} if states.endswith(" per tensor") else {})}


class Point(NamedTuple):
    """A point of a search: exponent and mantissa bits per role, and the modules kept in float32."""

    bits: tuple[tuple[int, int], ...]
    wide: tuple[str, ...] = ()


@dataclass(frozen=True)
class Space:
    """The points of a search.

    roles: the roles that have bits, in order; "states" are the optimizer's states.
    exponent_bits, mantissa_bits: the least and the largest number of bits.
    modules: the modules that may stay in float32.
    ranked: whether the modules are in the order of their costs, the largest first.
    Raises ValueError for unknown roles, for invalid numbers of bits, for modules that are not names, and for modules
    together with states.

    >>> space = Space(["weight"], (4, 4), (3, 3), ("stem", "head"))
    >>> space.size(Point(((4, 3),))), space.size(Point(((4, 3),), ("stem",)))
    (8, 20.0)
    """

    roles: Sequence[str]
    exponent_bits: tuple[int, int]
    mantissa_bits: tuple[int, int]
    modules: Sequence[str] = ()
    ranked: bool = False

    def __post_init__(self) -> None:
        roles, words = self.roles, isinstance(self.roles, Sequence) and not isinstance(self.roles, str)
        if (
            not words
            or not roles
            or not all(role in (*ROLES, STATES) for role in roles)
            or len(set(roles)) < len(roles)
        ):
            raise ValueError(
                f"roles={shown(roles)} is invalid. Expected: some of {', '.join((*ROLES, STATES))}, each once."
            )
        for name, least, most in (("exponent_bits", 1, 8), ("mantissa_bits", 0, 23)):
            span = getattr(self, name)
            fits = (
                isinstance(span, Sequence)
                and not isinstance(span, str | bytes)
                and len(span) == 2
                and all(map(is_whole, span))
            )
            if not fits or not least <= span[0] <= span[1] <= most:
                raise ValueError(
                    f"{name}={shown(span)} is invalid. Expected: least and most, within {least} and {most}."
                )
        for e, m in itertools.product(self.exponent_bits, self.mantissa_bits):
            # This call is only for its error: not every format fits into float32.
            fpsim.as_format(f"e{e}m{m}")
        names = self.modules
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
            raise ValueError(
                f"modules is {shown(names)}. Expected: a list of the names of modules, or what "
                f"fpsim.sensitivity found of the model."
            )

        if names and STATES in roles:
            raise ValueError("Got modules with 'states' among the roles. Search one after the other.")

    def require_modules(self, model: nn.Module) -> None:
        """Raise ValueError if a name matches no module of the model, or if two names match the same module."""
        seen: dict[str, str] = {}
        for pattern in self.modules:
            policies = Policy(weight="fp16", overrides={pattern: None}).for_modules(model)
            for name in (name for name, policy in policies.items() if policy.weight is None):
                if name in seen:
                    raise ValueError(
                        f"modules names {shown(seen[name])} and {shown(pattern)}, and {name!r} is in both. Name each "
                        f"module once."
                    )
                seen[name] = pattern

    def formats(self, point: Point) -> dict[str, str]:
        names = {role: f"e{e}m{m}" for role, (e, m) in zip(self.roles, point.bits)}
        # With 8 exponent bits states have float32's range, so they need no scale.
        has_scale = STATES in names and not names[STATES].startswith("e8")
        return {**names, STATES: f"{names[STATES]} per tensor"} if has_scale else names

    def numbers(self, point: Point) -> dict[str, int]:
        """Return a point as named numbers: the bits of each role, and which modules are in float32."""
        bits = {f"{role} exponent": e for role, (e, _) in zip(self.roles, point.bits)}
        bits |= {f"{role} mantissa": m for role, (_, m) in zip(self.roles, point.bits)}
        return bits | {f"{name} in float32": int(name in point.wide) for name in self.modules}

    def spans(self, point: Point) -> dict[str, tuple[int, int]]:
        """Return the least and the largest value of each number that `numbers` returns."""
        spans = {"exponent": self.exponent_bits, "mantissa": self.mantissa_bits}
        return {name: tuple(spans.get(name.rpartition(" ")[2], (0, 1))) for name in self.numbers(point)}  # type: ignore[misc]

    def fields(self, point: Point) -> dict[str, Any]:
        """Return a point as an entry of a sweep's formats: the fields of a Policy, with an update for states."""
        overrides = {"overrides": dict.fromkeys(point.wide)} if point.wide else {}
        formats = self.formats(point)
        states = formats.pop(STATES, None)
        policy = {**formats, **overrides}
        if states is None:
            return policy
        return {"format": policy or "fp32", "update": update_of(states)}

    def size(self, point: Point) -> float:
        """Return the bits per number, summed over the roles; the mean over the modules if some are in float32."""
        small, count = sum(1 + e + m for e, m in point.bits), len(point.wide)
        if not count:
            return small
        return small + (FLOAT32_BITS * len(self.roles) - small) * count / len(self.modules)

    def proposal(self, trial: Any, most: int) -> Point:
        """Return a point that Optuna proposes. If modules are ranked, only the `most` costliest may be in float32."""
        bits = tuple(
            (
                trial.suggest_int(f"{role} exponent", *self.exponent_bits),
                trial.suggest_int(f"{role} mantissa", *self.mantissa_bits),
            )
            for role in self.roles
        )
        if self.ranked:
            return Point(bits, tuple(self.modules[: trial.suggest_int("modules in float32", 0, most)]))
        wide = [name for name in self.modules if trial.suggest_categorical(f"{name} in float32", [False, True])]
        return Point(bits, tuple(wide))

    def widest(self) -> list[Point]:
        """Return points with the widest formats, from no module in float32 to all modules."""
        bits = tuple((self.exponent_bits[1], self.mantissa_bits[1]) for _ in self.roles)
        count = len(self.modules)
        # The number of modules is doubled, so that the necessary number is found in few trainings.
        doubled = [2**k for k in range(count.bit_length()) if 2**k < count] if self.ranked else []
        return [Point(bits, tuple(self.modules[:k])) for k in dict.fromkeys([0, *doubled, count])]

    def smaller(self, point: Point) -> list[list[Point]]:
        """Return lists of points with one bit less, or one module less in float32, in the order in which to try them.

        A list is tried only if no point of the previous list keeps the metric. Together the lists contain every point
        that is one step smaller: if none of these points keeps the metric, `point` is a local minimum.
        """
        reduced = []
        for i, (e, m) in enumerate(point.bits):
            for e2, m2 in ((e, m - 1), (e - 1, m)):
                # e1m0 has only zero and infinity, and cannot hold a rounded float32.
                if e2 >= self.exponent_bits[0] and m2 >= self.mantissa_bits[0] and (e2, m2) != (1, 0):
                    reduced.append(point._replace(bits=(*point.bits[:i], (e2, m2), *point.bits[i + 1 :])))
        taken = [point._replace(wide=tuple(n for n in point.wide if n != name)) for name in point.wide]
        if self.ranked and len(taken) > 1:
            return [[*reduced, taken[-1]], taken[:-1]]
        return [[*reduced, *taken]]

    def most_trials(self, point: Point) -> int:
        """Return the largest number of trials in the descent from a point."""
        steps = sum(e - self.exponent_bits[0] + m - self.mantissa_bits[0] for e, m in point.bits) + len(point.wide)
        return steps * (2 * len(point.bits) + len(point.wide))
