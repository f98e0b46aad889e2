"""Remedies for a mismatch: change the rollout's policy, and run it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fpsim.formats.blocks import as_format
from fpsim.insight.engines.sides import is_beginning
from fpsim.models.installed import emulated_forwards
from fpsim.policies.policy import ROLES, Policy
from fpsim.policies.products import Products

__all__ = ["Tried", "Truncated", "changed_policies", "fields_of", "largest_share", "remedies_for", "truncated"]

Change = Callable[[str, Policy], Policy]


class Tried(NamedTuple):
    """A change of an engine, and the mean |dlogp| and KL with it."""

    what: str
    mean_dlogp: float
    kl: float


class Truncated(NamedTuple):
    """Statistics of importance weights p / q that are truncated at a limit; nothing is trained with them.

    share: the share of weights beyond the limit. mean: the mean of the weights once they are truncated.
    effective: the effective sample size over the sample size, 0 to 1.
    """

    limit: float
    share: float
    mean: float
    effective: float


def truncated(change: Tensor, limit: float = 2.0) -> Truncated:
    """Return statistics of the truncated importance weights. change: log p - log q of the chosen tokens."""
    weights = change.exp()
    cut = weights.clamp(max=limit)
    n = max(weights.numel(), 1)
    effective = float(cut.sum() ** 2 / (cut**2).sum() / n) if weights.numel() else 1.0
    return Truncated(limit, float((weights > limit).double().sum()) / n, float(cut.mean()), effective)


def largest_share(row: Mapping[str, Any]) -> float:
    """Return a sort key for a row: rows with the largest share come first, and rows without a finite share last."""
    shares = (row["put_back"], row["added"])
    return -max((x for x in shares if x is not None and math.isfinite(x)), default=-math.inf)


@contextmanager
def changed_policies(model: nn.Module, change: Change) -> Iterator[bool]:
    """Change the policies of a model's modules inside of the block; yield whether any of them has changed."""
    before = [(emulated, emulated.policy) for _, emulated in emulated_forwards(model)]
    is_other = False
    try:
        for emulated, policy in before:
            assert policy is not None
            other = change(emulated.name, policy)
            if other != policy:
                is_other = True
                emulated.renew(emulated.name, other, emulated.listeners)
        yield is_other
    finally:
        for emulated, policy in before:
            if emulated.policy != policy:
                emulated.renew(emulated.name, policy, emulated.listeners)


def remedies_for(
    a: nn.Module, head: str | None, routers: set[str], halving: list[str], names: Callable[[str], str]
) -> list[tuple[str, Change]]:
    """Return the remedies to try: descriptions with changes of the modules' policies. names: maps b's names to a's."""
    of_a = {emulated.name: emulated.policy for _, emulated in emulated_forwards(a)}

    def wide(chosen: Callable[[str], bool]) -> Change:
        return lambda name, policy: Policy() if chosen(names(name)) else policy

    found: list[tuple[str, Change]] = []
    if head is not None:
        found.append((f"the head, {head}, in float32", wide(lambda name: name == head)))
    if routers:
        found.append(
            (
                f"routers ({', '.join(sorted(routers)[:2])}{' ...' if len(routers) > 2 else ''}) in float32",
                wide(lambda name: any(is_beginning(r, name) for r in routers)),
            )
        )
    found.append(("fp16 in the place of bf16", lambda name, policy: _in_fp16(policy)))
    found.append(("the cache as wide as activations", lambda name, policy: replace(policy, cache=None)))

    def attention_of_a(name: str, policy: Policy) -> Policy:
        mine = of_a.get(names(name))
        if policy.products is None or not policy.products.attention:
            return policy
        attention: Any = False if mine is None or mine.products is None else mine.products.attention
        return replace(policy, products=replace(policy.products, attention=attention))

    found.append(("attention as in a", attention_of_a))
    if halving not in ([], [head]):  # the head alone has already been tried
        found.append((f"{', '.join(halving)} in float32", wide(lambda name: name in halving)))
    return found


def _in_fp16(policy: Policy) -> Policy:
    bf16 = as_format("bf16")
    roles = {r: "fp16" for r in ROLES if getattr(policy, r) is not None and as_format(getattr(policy, r)) == bf16}
    products = policy.products
    if products is not None and products.output is not None and as_format(products.output.fmt) == bf16:  # type: ignore[union-attr,arg-type]
        products = replace(products, output="fp16")
    return replace(policy, **roles, products=products)  # type: ignore[arg-type]


def fields_of(a: Policy, b: Policy) -> list[tuple[str, Policy]]:
    """Return the fields in which b's policy differs from a's, each with b's policy after it takes the field from a."""
    found: list[tuple[str, Policy]] = []
    p, q = a.products or Products(), b.products or Products()
    # `activation` and `output` both round results of products, and a policy can have only one of them. If a has one
    # and b the other, both are exchanged together.
    are_one = None not in (a.activation, q.output) or None not in (b.activation, p.output)
    for role in ("weight", "activation"):
        if getattr(a, role) != getattr(b, role) and not (are_one and role == "activation"):
            found.append((role, replace(b, **{role: getattr(a, role)})))
    if are_one:
        results = replace(q, output=p.output)
        found.append(("activation and output", replace(b, activation=a.activation, products=results)))
    for i, name in enumerate(("x", "w")):
        if p.fprop[i] != q.fprop[i]:
            pair = (p.fprop[0], q.fprop[1]) if i == 0 else (q.fprop[0], p.fprop[1])
            found.append((f"operand {name}", replace(b, products=replace(q, fprop=pair))))
    for name in ("output", "accumulator", "attention"):
        if getattr(p, name) != getattr(q, name) and not (are_one and name == "output"):
            found.append((name, replace(b, products=replace(q, **{name: getattr(p, name)}))))
    if a.cache != b.cache:
        found.append(("cache", replace(b, cache=a.cache)))
    if a.fused != b.fused:
        found.append(("one rounding", replace(b, fused=a.fused)))
    if a.kernels != b.kernels:
        found.append(("kernels", replace(b, kernels=a.kernels)))
    return found
