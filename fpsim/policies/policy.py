"""Policies: the format of each role of tensors, and overrides for modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fpsim.border import require_module
from fpsim.checks import known_arguments, nearest, refuse, require_whole, shown
from fpsim.formats.blocks import BlockFormat, Format, as_element, as_format
from fpsim.kernels.core import require_variant
from fpsim.policies.operand import Operand, OperandLike, as_operand
from fpsim.policies.products import Products
from fpsim.tensors.spec import RoundingSpec, rounding_spec
from fpsim.torch_internals import operation_homes

__all__ = [
    "CACHED",
    "FEW_BITS",
    "ROLES",
    "FormatLike",
    "Policy",
    "RoleSpecs",
    "describe",
    "describe_cached",
    "matches",
    "no_match",
    "policy_of_format",
    "policy_of_modules",
]

RoleFormat = str | Format | torch.dtype | np.dtype[Any] | type[np.generic]
ROLES = ("weight", "activation", "error", "weight_grad")
GRADIENTS = ("error", "weight_grad")
CACHED = ("k", "v")  # the tensors that a cache of keys and values stores
FEW_BITS = 6  # with at most this many bits, rounding to nearest makes most of a gradient zero at any scale
_HOMES_OF_OPERATIONS = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)


class RoleSpecs(NamedTuple):
    """Rounding of each role's tensors in one module; None leaves a role's tensors in float32."""

    weight: RoundingSpec | None = None
    activation: RoundingSpec | None = None
    error: RoundingSpec | None = None
    weight_grad: RoundingSpec | None = None

    def __str__(self) -> str:
        words = {role: str(spec or "float32") for role, spec in zip(ROLES, self, strict=True)}
        if len(set(words.values())) == 1:
            return words["weight"]
        return ", ".join(f"{role}={word}" for role, word in words.items())


def _names_its_role(policy: type[Policy]) -> type[Policy]:
    """Make `Policy("e4m3fn")` warn: it rounds only weights, while `quantize(model, "e4m3fn")` rounds every role."""
    made = policy.__init__

    @wraps(made)
    def checked(self: Policy, *formats: Any, **options: Any) -> None:
        if len(formats) == 1:  # several formats without names are meant as roles in their order
            given = shown(formats[0])
            warnings.warn(
                f"Policy({given}) is a format for weights alone, and an error from 1.0 on. Expected: "
                f"Policy(weight={given}) for weights alone, or fpsim.as_policy({given}) for every role.",
                DeprecationWarning,
                stacklevel=2,
            )
        made(self, *formats, **options)

    policy.__init__ = checked  # type: ignore[method-assign]
    return policy


@_names_its_role
@known_arguments()
@dataclass(frozen=True)
class Policy:
    """A format for each role, and other policies for some modules.

    A role left at None stays float32. Name the roles: a single format without a name applies only to weights, and
    causes a warning.

    Args:
        weight: the format of parameters, rounded where they are used.
        activation: the format of the results of operations.
        error: the format of gradients of activations.
        weight_grad: the format of gradients of parameters, rounded where they arrive.
        rounding: as in `round_to`; one for all roles, or a mapping from role to rounding. None is nearest-even, also
            for a role that the mapping leaves out. There is one exception: without a rounding, gradients in formats of
            at most 6 bits are rounded stochastically while an `ada_loss.AdaLossScaled` chooses their scales by
            "approx_range" or "current".
        overflow: as in `round_to`; one for all roles, or a mapping from role to overflow.
        random_bits: as in `round_to`; one for all roles, or a mapping from role to bits. Only stochastic roles use it.
        overrides: {pattern: format, Policy or None}; None leaves those modules in float32. A pattern is a module's name
            ("lm_head"), a name with wildcards for single parts ("blocks.*.attn"), or a module class (nn.BatchNorm2d).
            It applies to all modules inside too. If several patterns match, the last one wins.
        float32: names of operations ("softmax", "cross_entropy") whose results and gradients are not rounded, and whose
            operands are not quantised.
        products: the quantisation of the operands of matrix products, in addition to the roles: a tensor that its role
            has rounded is then quantised to the operand's format as it enters a product. None leaves products alone.
        variant: as in `round_to`; one for all roles, or a mapping from role to variant. Only stochastic roles use it.
        cache: the formats in which transformers' caches store keys and values: {"k": operand, "v": operand}, each as in
            `Products` (a format, an `Operand`, a function), or one for both. Keys are rounded after the rotary code.
            Each key and value is rounded once, as it enters the cache, and attention reads the stored numbers. Numbers
            that share a scale lie along the last axis, and belong to one token and head. Without a cache, as in
            training, keys and values are rounded at the same place. The gradient passes straight through. The policy
            of the module whose forward calls `update` applies. With a `cache`, a call of the whole model that stores
            no keys and values is an error.
        fused: whether a module is one kernel. Its code, and that of fused modules inside, computes in float32 from
            rounded weights and from inputs as they come; its result is rounded once. `products` and `kernels` apply
            inside too.
        kernels: {name of an operation: function}, for operations that an engine does not compute with torch's single
            rounding. The function is called with the arguments of the call. Its operations are emulated one by one, as
            if they were the model's code; `x.float()` and `x.to(dtype)` choose where it rounds. Operations in it do not
            call kernels again. If it returns NotImplemented, the call is left as it is. Names are as in `float32`; an
            in-place operation has a name of its own, "add_".

    Raises:
        ValueError: for unknown roles, names and invalid roundings.
        TypeError: for a value that is not a pattern, a truth value or a function.

    >>> p = Policy(weight="e4m3fn", activation="e4m3fn", error="e5m2", overrides={"head": None})
    >>> print(p.specs())
    weight=e4m3fn nearest_even, activation=e4m3fn nearest_even, error=e5m2 nearest_even, weight_grad=float32
    >>> print(Policy(products=Products.all("mxfp8_e4m3", output="bf16"), overrides={"head": None}))
    products: mxfp8_e4m3 nearest_even, output=bf16 nearest_even; head: float32
    >>> print(Policy("bf16", "bf16", cache={"k": "e4m3fn", "v": "int4 per row fp32"}))
    weight=bf16 nearest_even, activation=bf16 nearest_even, error=float32, weight_grad=float32, \
cache: k=e4m3fn nearest_even, v=int4 per row fp32 nearest_even
    >>> cube = lambda x, n: x * x * x if n == 3 else NotImplemented
    >>> print(Policy(activation="bf16", kernels={"pow": cube}, fused=True))
    weight=float32, activation=bf16 nearest_even, error=float32, weight_grad=float32, rounded once, kernels: pow
    """

    weight: RoleFormat | None = None
    activation: RoleFormat | None = None
    error: RoleFormat | None = None
    weight_grad: RoleFormat | None = None
    rounding: str | Mapping[str, str] | None = None
    overflow: str | Mapping[str, str | None] | None = None
    random_bits: int | Mapping[str, int | None] | None = None
    overrides: Mapping[str | type[nn.Module], FormatLike] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    products: Products | None = None
    variant: str | Mapping[str, str] = "A"
    cache: Mapping[str, OperandLike] | OperandLike = None
    fused: bool = False
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "float32", _operation_names("float32", self.float32))
        object.__setattr__(self, "kernels", _kernels(self.kernels))
        if not isinstance(self.fused, bool):
            raise TypeError(f"fused={shown(self.fused)}. Expected: True, for modules that round once, or False.")
        for name in ("rounding", "overflow", "random_bits", "variant"):
            value = getattr(self, name)
            unknown = [role for role in value if role not in ROLES] if isinstance(value, Mapping) else []
            if unknown:
                what = f"{name} names {shown(unknown[0])}, which is not a role"
                raise ValueError(refuse(what, ROLES, word=unknown[0]))
        for bits in self.random_bits.values() if isinstance(self.random_bits, Mapping) else (self.random_bits,):
            rounding_spec("fp32", "stochastic", None, bits)  # the bits are checked even if nothing is stochastic
        self._require_products()
        object.__setattr__(self, "cache", _cached(self.cache))
        self.specs()
        if not isinstance(self.overrides, Mapping):
            raise TypeError(
                f"overrides is {shown(self.overrides)}. Expected: a mapping from patterns to formats, policies or "
                f"None; {{}} for none."
            )
        for pattern, inner in self.overrides.items():
            if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
                raise TypeError(
                    f"The pattern {shown(pattern)} is neither a module name, with * for parts, nor a module class."
                )
            if isinstance(inner, Policy) and inner.overrides:
                raise ValueError(
                    f"The policy for {shown(pattern)} has overrides of its own. Put all patterns in one policy."
                )
            self._resolve(inner)

    def _require_products(self) -> None:
        for role in ROLES:
            fmt = getattr(self, role)
            if fmt is not None and isinstance(as_format(fmt), BlockFormat):
                raise ValueError(
                    f"{role}={fmt!r} is a format whose numbers share scales, along the axis that a product sums over; "
                    f"a role has no such axis. Expected: products=fpsim.Products.all({fmt!r}), or quantize(model, "
                    f"{fmt!r}); for a role, a format of single numbers such as 'bf16'."
                )
        if self.products is None:
            return
        if not isinstance(self.products, Products):
            raise TypeError(
                f"products is {shown(self.products)}. Expected: a fpsim.Products, such as Products.all('mxfp8_e4m3'), "
                f"or None."
            )
        if self.products.output is not None and self.activation is not None:
            raise ValueError(
                f"products has output={self.products.output}, and activation={self.activation!r} rounds the results "
                f"of products too. Give one of them."
            )

    @property
    def cached(self) -> dict[str, Operand] | None:
        """The operands by which stored keys ("k") and values ("v") are rounded; None if neither is."""
        return self.cache  # type: ignore[return-value]  # __post_init__ has converted it

    @property
    def has_cache(self) -> bool:
        """True if keys or values are rounded as they are stored, under this policy or an override."""
        policies = [self, *map(self._resolve, self.overrides.values())]
        return any(policy.cache is not None for policy in policies)

    def specs(self) -> RoleSpecs:
        """Return the checked roundings of this policy's roles, without its overrides."""

        def of(option: object, role: str, default: object) -> Any:
            return option.get(role, default) if isinstance(option, Mapping) else option

        specs = []
        for role in ROLES:
            fmt, rounding = getattr(self, role), of(self.rounding, role, None)
            rounding = "nearest_even" if rounding is None else rounding
            is_stochastic = isinstance(rounding, str) and rounding == "stochastic"
            bits = of(self.random_bits, role, None) if is_stochastic else None
            variant = of(self.variant, role, "A")
            require_variant(variant, True, 1)  # the word must exist, even if no role uses it
            variant = variant if is_stochastic else "A"
            overflow = of(self.overflow, role, None) if fmt is not None else None
            spec = rounding_spec("fp32" if fmt is None else fmt, rounding, overflow, bits, variant)
            specs.append(None if fmt is None else spec)
        return RoleSpecs(*specs)

    def _resolve(self, inner: FormatLike) -> Policy:
        """Return the policy of an override: a bare format gets this policy's rounding for every role."""
        if inner is None or isinstance(inner, Policy):
            return policy_of_format(inner)
        policy = policy_of_format(inner)
        if policy.products is not None:
            return policy.with_rounding(self.rounding) if isinstance(self.rounding, str) else policy
        overflow = None  # the format's own overflow: this policy's may not be possible in the override's format
        bits, variant = self.random_bits, self.variant
        return replace(policy, rounding=self.rounding, random_bits=bits, variant=variant, overflow=overflow)

    def with_rounding(self, rounding: str | Mapping[str, str]) -> Policy:
        """Return this policy with another rounding of its roles or, if all are float32, of its products' operands.

        >>> str(policy_of_format("mxfp4").with_rounding("stochastic"))
        'products: mxfp4 stochastic'
        """
        if self.products is None or any(self.specs()):
            return replace(self, rounding=rounding)
        if not isinstance(rounding, str):
            raise ValueError(
                f"rounding={rounding!r} was given with a policy whose roles are all float32. Expected: one rounding "
                f"for all operands of its products, or operands with their own roundings: fpsim.Operand(fmt, rounding)."
            )
        return replace(self, products=self.products.with_rounding(rounding))

    def with_stochastic_gradients(self, most_bits: int) -> Policy:
        """Return this policy with stochastic rounding of gradients in formats of at most `most_bits` bits.

        A rounding that the user has named stays, and so do blocks that share scales: their rounding belongs to the
        format.

        >>> print(Policy(weight="e2m1fn", error="e2m1fn").with_stochastic_gradients(6))
        weight=e2m1fn nearest_even, activation=float32, error=e2m1fn stochastic, weight_grad=float32
        """
        require_whole("most_bits", most_bits, 1)
        named = dict(self.rounding) if isinstance(self.rounding, Mapping) else dict.fromkeys(ROLES, self.rounding)
        formats = {role: getattr(self, role) for role in GRADIENTS if named.get(role) is None}
        few = {role for role, fmt in formats.items() if fmt is not None and as_element(fmt).bits <= most_bits}
        products = self.products and self.products.with_stochastic_gradients(most_bits)
        overrides = {k: self._resolve(v).with_stochastic_gradients(most_bits) for k, v in self.overrides.items()}
        if not few and products is self.products and overrides == self.overrides:
            return self
        rounding = {role: rule for role, rule in named.items() if rule is not None} | dict.fromkeys(few, "stochastic")
        return replace(self, rounding=rounding, products=products, overrides=overrides)

    def __str__(self) -> str:
        words = [self._described()]
        for pattern, inner in self.overrides.items():
            name = pattern if isinstance(pattern, str) else pattern.__name__
            words.append(f"{name}: {self._resolve(inner)._described()}")
        if self.float32:
            words.append(f"float32: {', '.join(self.float32)}")
        return "; ".join(words)

    def _described(self) -> str:
        words = [describe(self.specs(), self.products, self.cached), *(["rounded once"] if self.fused else [])]
        return ", ".join([*words, *([f"kernels: {' '.join(self.kernels)}"] if self.kernels else [])])

    def for_modules(self, model: nn.Module) -> dict[str, Policy]:
        """Return the policy of every module of `model` by name, with overrides resolved.

        Raises ValueError for a pattern that matches no module.
        """
        require_module(model)
        modules = dict(model.named_modules())
        result = dict.fromkeys(modules, self)
        for pattern, inner in self.overrides.items():
            matched = [name for name, module in modules.items() if name and matches(pattern, name, module)]
            if not matched:
                raise ValueError(no_match(pattern, modules))
            policy = self._resolve(inner)
            for name in modules:
                if any(name == m or name.startswith(f"{m}.") for m in matched):
                    result[name] = policy
        return result


def _operation_names(field: str, names: object) -> tuple[str, ...]:
    """Return the checked names of `Policy(float32=...)` or of `kernels`, each an operation of torch."""
    if isinstance(names, str):
        raise TypeError(f"{field} is the string {shown(names)}. Write a tuple of names: ({shown(names)},).")
    try:
        listed: tuple[Any, ...] = tuple(names)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{field} is {shown(names)}. Expected: a tuple of names, such as ('softmax',); () for none."
        ) from None
    homes = (*_HOMES_OF_OPERATIONS, *operation_homes())
    for name in listed:
        # Only valid identifiers are looked up, because torch.ops raises its own errors for other names.
        known = isinstance(name, str) and name.isascii() and name.isidentifier()
        if not known or not any(hasattr(home, n) for home in homes for n in (name, f"__{name}__")):
            raise ValueError(
                f"{field} names {shown(name)}, which is not an operation of torch. Expected: names in torch, "
                f"torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.ops: 'softmax'."
            )
    return listed


def _kernels(value: object) -> dict[str, Callable[..., Any]]:
    """Return the checked `Policy(kernels=...)`: functions by the names of operations."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"kernels is {shown(value)}. Expected: a mapping from names of operations to functions, such as "
            f"{{'pow': f}}; {{}} for none."
        )
    for name, function in value.items():
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"kernels has {shown(name)}: {shown(function)}. Expected: a function that is called with the arguments "
                f"of the operation, and returns what it gives, or NotImplemented."
            )
    return dict(zip(_operation_names("kernels", value), value.values(), strict=True))


FormatLike = RoleFormat | Policy | None


def describe(specs: RoleSpecs, products: Products | None, cached: Mapping[str, Operand] | None = None) -> str:
    """Describe what a policy rounds."""
    words = [str(specs)] if any(specs) or (products is None and not cached) else []
    words += [] if products is None else [f"products: {products}"]
    words += [f"cache: {describe_cached(cached)}"] if cached else []
    return ", ".join(words)


def describe_cached(cached: Mapping[str, Operand]) -> str:
    """Describe how keys and values are stored."""
    return ", ".join(f"{name}={operand}" for name, operand in cached.items())


def _cached(value: object) -> dict[str, Operand] | None:
    """Return `Policy(cache=...)` as operands by name; None if nothing is rounded."""
    if value is None:
        return None
    given = value if isinstance(value, Mapping) else dict.fromkeys(CACHED, value)
    unknown = [name for name in given if name not in CACHED]
    if unknown:
        raise ValueError(
            refuse(f"cache names {shown(unknown[0])}, which no cache stores", CACHED, word=str(unknown[0]))
        )
    cached = {name: as_operand(f"cache: {name}", given[name]) for name in CACHED if given.get(name) is not None}
    for name, operand in cached.items():
        if operand.fmt is None or operand.source != "original" or operand.hadamard is not None or operand.ste != "pass":
            raise ValueError(
                f"cache has {name}={operand}, which is of a product. Expected: a format, a function, or an Operand "
                f"without source, hadamard and ste."
            )
        if operand.is_delayed:
            raise ValueError(
                f"cache has {name}={operand}, whose scale follows from earlier steps, which a cache does not have. "
                f"Expected: a format with a scale of the numbers at hand, such as 'e4m3fn per row fp32', or with none."
            )
    return cached or None


def policy_of_format(fmt: FormatLike) -> Policy:
    """Return the policy of a format (for every role), of a policy, or of None (all float32).

    A format whose numbers share scales applies to all operands of all products, and every role stays float32.

    >>> policy_of_format("fp16").error
    'fp16'
    """
    if isinstance(fmt, Policy):
        return fmt
    if isinstance(fmt, Mapping):
        raise TypeError(
            f"A format is the mapping {shown(fmt)}. Expected: a name, a FloatFormat, a Policy, or None. "
            f"Formats by role are a fpsim.Policy(**mapping)."
        )
    if fmt is not None and isinstance(as_format(fmt), BlockFormat):
        return Policy(products=Products.all(as_format(fmt)))
    return Policy(fmt, fmt, fmt, fmt)


def policy_of_modules(by_module: Mapping[str, Policy]) -> Policy:
    """Return one policy from those of modules by name, parents first: the inverse of `Policy.for_modules`.

    The result has an override only for a module whose policy differs from the policy of the module that contains it. A
    module that `by_module` lacks has the policy of the module that contains it. `by_module[""]` is the policy of the
    model itself, float32 if it is missing. Overrides of the given policies are ignored.

    >>> list(policy_of_modules({"": Policy(weight="bf16"), "body": Policy(weight="bf16"), "head": Policy()}).overrides)
    ['head']
    """
    base = replace(by_module.get("", Policy()), overrides={})
    overrides: dict[str | type[nn.Module], FormatLike] = {}
    for name, policy in by_module.items():
        around = max((n for n in overrides if isinstance(n, str) and name.startswith(f"{n}.")), key=len, default=None)
        own = replace(policy, overrides={})
        if name and own != (base if around is None else overrides[around]):
            overrides[name] = own
    return replace(base, overrides=overrides)


def matches(pattern: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    """Return True if a pattern of overrides matches a module."""
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def no_match(pattern: str | type[nn.Module], modules: Mapping[str, nn.Module]) -> str:
    """Return the error message for a pattern of overrides that matches no module."""
    names = [name for name in modules if name]
    if isinstance(pattern, type):
        kinds = sorted({type(m).__name__ for name, m in modules.items() if name})
        return (
            f"The pattern {pattern.__name__} matches no module. Classes inside the model: "
            f"{', '.join(kinds) or '(none: the model has no submodules)'}; the model itself has the policy's formats."
        )
    near = nearest(pattern, names, most=3, cutoff=0.4) or names[:5]
    return (
        f"The pattern {shown(pattern)} matches no module. Names are those of model.named_modules(), for instance "
        f"{', '.join(near) or '(none: the model has no submodules)'}; * stands for one part of a name."
    )
