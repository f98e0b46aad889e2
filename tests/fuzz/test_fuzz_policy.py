"""`Policy` under drawn arguments: it holds what it was given, or raises an error that is documented."""

from __future__ import annotations

from typing import Any

import fuzz_inputs
from fuzzing import documented, fuzz
from hypothesis import strategies as st
from torch import nn

import fpsim
from fpsim.policies.policy import ROLES

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))

FORMATS = st.none() | st.sampled_from(["fp16", "e4m3fn", "bf16", "e5m2fnuz", "e8m0fnu"]) | fuzz_inputs.formats()
ROUNDINGS = st.sampled_from(fuzz_inputs.ROUNDINGS)
OVERFLOWS = st.sampled_from([None, "saturate"])
BITS = st.none() | st.integers(1, 32)
PATTERNS = st.sampled_from(["0", "1.0", "1.*", "*", "", "1.**", "[", "no.such", nn.Linear, nn.LayerNorm, nn.Conv2d])
OPERATIONS = st.lists(st.sampled_from(["softmax", "add", "layer_norm", "__add__", "iadd"]), max_size=2).map(tuple)


def by_role(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values | st.dictionaries(st.sampled_from(ROLES), values, max_size=4)


VALID = {
    **dict.fromkeys(ROLES, FORMATS),
    "rounding": by_role(ROUNDINGS),
    "overflow": by_role(OVERFLOWS),
    "random_bits": by_role(BITS),
    "overrides": st.dictionaries(PATTERNS, FORMATS, max_size=3),
    "float32": OPERATIONS,
}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """Arguments of a Policy, and whether all of them are possible ones."""
    drawn, is_valid = {}, True
    for name in draw(st.lists(st.sampled_from(list(VALID)), unique=True)):
        if draw(st.integers(0, 5)):
            drawn[name] = draw(VALID[name])
        else:
            drawn[name] = draw(
                fuzz_inputs.JUNK
                | st.dictionaries(st.sampled_from([*ROLES, "weights"]) | PATTERNS, fuzz_inputs.JUNK, max_size=2)
                | st.lists(fuzz_inputs.JUNK, max_size=3)
            )
            is_valid = False
    return drawn, is_valid


@fuzz(600, drawn=arguments())
def test_fuzz_a_policy_holds_what_it_was_given_or_refuses_it_in_words(drawn: tuple[dict[str, Any], bool]) -> None:
    given, is_valid = drawn
    with documented(ValueError, TypeError) as outcome:
        policy = fpsim.Policy(**given)
    if is_valid:
        assert outcome.error is None
    if outcome.error is not None:
        return
    for role, spec in zip(ROLES, policy.specs(), strict=True):
        fmt = given.get(role)
        assert (spec is None) == (fmt is None)
        if spec is not None:
            assert spec.fmt == fpsim.as_format(fmt)
    with documented(ValueError) as outcome:  # of patterns that match no module
        found = policy.for_modules(MODEL)
    if outcome.error is None:
        assert list(found) == [name for name, _ in MODEL.named_modules()]
