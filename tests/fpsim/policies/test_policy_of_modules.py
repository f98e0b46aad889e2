"""One policy from those of modules: each module has its own again, and no override is written in vain."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from torch import nn

from fpsim import Policy
from fpsim.policies.policy import policy_of_modules

PARENTS = {"a": "", "a.b": "a", "a.b.c": "a.b", "ab": ""}
MODEL = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.ModuleDict({"c": nn.Linear(1, 1)})}), "ab": nn.Linear(1, 1)})
POLICIES = (Policy(), Policy(weight="fp16", float32=("softmax",)), Policy(error="e5m2"))


def test_each_module_has_its_own_policy_and_an_override_only_where_its_parent_has_another() -> None:
    for chosen in product(POLICIES, repeat=1 + len(PARENTS)):
        wanted = dict(zip(("", *PARENTS), chosen, strict=True))
        policy = policy_of_modules(wanted)
        found = policy.for_modules(MODEL)
        assert {name: replace(own, overrides={}) for name, own in found.items()} == wanted
        assert [*policy.overrides] == [name for name, parent in PARENTS.items() if wanted[name] != wanted[parent]]


def test_a_module_without_a_policy_has_that_of_the_module_around_it_whose_own_overrides_are_ignored() -> None:
    outer = replace(POLICIES[1], overrides={"b": "bf16"})
    policy = policy_of_modules({"a": outer, "a.b.c": POLICIES[1]})
    assert policy == Policy(overrides={"a": POLICIES[1]})
    assert policy_of_modules({}) == Policy()
