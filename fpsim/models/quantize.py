"""quantize, set_policy, dequantize, frozen: emulate a whole model, module by module."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fpsim.border import require_module
from fpsim.checks import known_arguments, require_flag, shown
from fpsim.emulation.entering import take_off_leftovers
from fpsim.emulation.kept_weights import KeptWeights
from fpsim.emulation.scope import NO_SPECS, Listeners
from fpsim.formats.blocks import BlockFormat, Delayed, as_format
from fpsim.models.computed_weights import modules_that_compute, sources
from fpsim.models.copying import carry_over
from fpsim.models.forwards import EmulatedForward
from fpsim.models.installed import bound_elsewhere, emulated_forward, emulated_forwards, install, uninstall
from fpsim.policies.policy import ROLES, FormatLike, Policy
from fpsim.policies.products import PRODUCTS
from fpsim.policies.recipes import as_policy, layers_in
from fpsim.tensors.launch import round_memory_
from fpsim.torch_internals import is_compiled_wrapper
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Block, Undo

__all__ = [
    "dequantize",
    "frozen",
    "install_policies",
    "listeners",
    "policies_of",
    "quantize",
    "round_parameters_",
    "set_policy",
    "try_policy",
]

Model = TypeVar("Model", bound=nn.Module)
# A last layer's gradient in so few bits draws a warning: in 6 and more, rounding to nearest keeps enough of it.
FEW_BITS = 4


def _of_a_policy(name: str) -> str:
    """Return a hint for an argument that belongs to Policy, for `known_arguments`."""
    known = inspect.signature(Policy).parameters
    return f" It is an argument of Policy: quantize(model, fpsim.Policy(..., {name}=...))." if name in known else ""


@known_arguments(_of_a_policy)
def quantize(
    model: Model,
    fmt: FormatLike,
    *,
    rounding: str | Mapping[str, str] | None = None,
    overflow: str | Mapping[str, str | None] | None = None,
    inplace: bool = False,
) -> Model:
    """Return a copy of `model` that computes, forward and backward, as hardware with format `fmt` would.

    Parameter names, `state_dict` keys and the class stay as they are, parameters stay float32 (a master copy that
    optimizers update), and `deepcopy`, `pickle` and `torch.save` work. Any of its submodules may be called alone.

    The model's own autograd Functions compute in the format in both passes, and so do hooks of modules, and hooks that
    a forward registers on tensors. Hooks of parameters see float32.

    Boolean, complex, sparse and float8 tensors are not rounded. Integers are rounded only in operations with tensors of
    the format. Four things are not emulated: recomputation by a checkpoint outside of any module, methods of the model
    other than the forwards of its modules, the output of `torch.fx.symbolic_trace`, which reads the class of the model,
    and copies of a `torch.fx.GraphModule`, which regenerate their forward.

    A weight that is computed, by `torch.nn.utils.parametrize` or by a hook of `torch.nn.utils` (weight_norm,
    spectral_norm, prune), has the role of a weight. Its computation runs in float32, even if the policy has formats for
    the parametrization's modules.

    The copies of parameters keep their attributes and the hooks on their gradients, which `copy.deepcopy` drops.
    `quantize` warns of hooks that would still use the original model, and of a last layer whose gradient is rounded to
    nearest in at most 4 bits.

    Args:
        model: any module; a copy of it is changed.
        fmt: a format for every role, by name or as FloatFormat, or a Policy that names formats by role and module. A
            format whose numbers share scales ("mxfp8_e4m3") is used for all operands of matrix products; everything
            else stays float32. "recipe:" before the name of a recipe stands for `fpsim.recipe(name, model)`.
        rounding: the rounding of every role; by default nearest-even, or the policy's own. For a format without roles,
            it is the rounding of all operands.
        overflow: the result for numbers beyond the largest value in every role: "inf", "nan" or "saturate". By default
            it is the format's own (`round_to`), or the policy's.
        inplace: change `model` itself and return it.

    Raises:
        TypeError: for a value that is not an nn.Module, or one that cannot be emulated.
        ValueError: for a pattern that matches no module, and for a model that is quantised already.

    >>> model = quantize(nn.Linear(2, 2), fmt="fp16")
    >>> print(model)
    Linear(in_features=2, out_features=2, bias=True, fpsim: fp16 nearest_even)
    >>> print(quantize(nn.Linear(2, 2), "mxfp8_e4m3"))
    Linear(in_features=2, out_features=2, bias=True, fpsim: products: mxfp8_e4m3 nearest_even)
    """
    require_module(model, remedy=" For functions use `with fpsim.emulate(fmt):`.")
    require_flag("inplace", inplace)
    policies = _policies(model, fmt, rounding, overflow)
    for name, module in model.named_modules():
        _require_emulable(name, module, policies[name])
    _warn_of_a_head_in_few_bits(model, policies)
    if not inplace:
        model = _copy_of(model, "quantize(model, fmt")
    _install_all(model, policies, Listeners())
    _warn_of_a_cache(model, policies, stacklevel=4)
    return model


def set_policy(
    model: nn.Module,
    fmt: FormatLike,
    *,
    rounding: str | Mapping[str, str] | None = None,
    overflow: str | Mapping[str, str | None] | None = None,
) -> None:
    """Change the formats of a quantised model, effective from its next call.

    The parameters, the optimizer's state, a recording and a scaling of `ada_loss` stay as they are. Delayed scaling
    keeps the history of the operands whose format and rule stay the same, and restarts for the others. Modules that
    were added since are quantised too. Call it between two steps: the gradients of an earlier call are still rounded as
    that call's policy said.

    Args:
        model: from `fpsim.quantize`, or a wrapper of one, such as DistributedDataParallel's.
        fmt, rounding, overflow: as in `quantize`.

    Raises:
        ValueError: for a model that is not quantised, or only in parts, and for what `quantize` raises.

    >>> model = quantize(nn.Linear(1, 1, bias=False), "e5m2")
    >>> set_policy(model, "bf16")
    >>> print(model)
    Linear(in_features=1, out_features=1, bias=False, fpsim: bf16 nearest_even)
    """
    whole, shared = _whole(model)
    policies = _policies(whole, fmt, rounding, overflow)
    _change(whole, policies, shared)
    _warn_of_a_cache(whole, policies, stacklevel=3)


def try_policy(model: nn.Module, fmt: FormatLike) -> None:
    """Change formats as `set_policy` does, without its warning about caches.

    A tool that tries single modules may leave out the modules that store keys and values.
    """
    whole, shared = _whole(model)
    _change(whole, _policies(whole, fmt, None, None), shared)


def _whole(model: nn.Module) -> tuple[nn.Module, Listeners]:
    """Return the quantised model itself, which may be inside wrappers, and its listeners."""
    shared = listeners(model)
    whole = [module for module, forward in emulated_forwards(model) if not forward.name]
    if len(shared) > 1 or not whole:
        raise ValueError(
            f"{type(model).__name__} is not one quantised model: it is a part of one, or has several inside. Expected: "
            f"the model that fpsim.quantize returned, each by itself."
        )
    return whole[0], shared[0]


def _change(model: nn.Module, policies: Mapping[str, Policy], shared: Listeners) -> None:
    for name, module in model.named_modules():
        # Check all modules before the first module changes, so that an error leaves the old policy whole.
        _require_interceptable(name, module, policies[name])
    _install_all(model, policies, shared)
    histories = shared.histories
    # A history of another format or rule would yield scales that do not fit: those operands start again at scale 1.
    kept = {name: e for name, e in histories.state_dict().items() if keeps_history(name, e, policies)}
    histories.load_state_dict(kept)


def _policies(model: nn.Module, fmt: FormatLike, rounding: Any, overflow: Any) -> dict[str, Policy]:
    """Return the policy of every module, by the module's name."""
    take_off_leftovers()
    policy = as_policy(fmt, rounding, overflow=overflow, model=model)
    policies = policy.for_modules(model)
    _warn_of_idle_bits(policy, policies.values())
    return policies


def _warn_of_idle_bits(policy: Policy, policies: Iterable[Policy]) -> None:
    """Warn if a number of random bits was given that no rounding uses."""
    given = policy.random_bits
    roles = [role for role, bits in given.items() if bits is not None] if isinstance(given, Mapping) else list(ROLES)
    if given is None or not roles:
        return
    used = [spec for p in policies for spec in p.specs() if spec is not None]
    if not any(spec.rounding == "stochastic" for spec in used):
        warnings.warn(
            f"random_bits={shown(given)} changes nothing: stochastic rounding alone uses random bits, and no role has "
            f"it. Use rounding='stochastic', or omit random_bits.",
            stacklevel=4,
        )


def _warn_of_a_head_in_few_bits(model: nn.Module, policies: Mapping[str, Policy]) -> None:
    """Warn if the gradient of a model's last layer has 4 bits or fewer, rounded to nearest."""
    *others, last = layers_in(model) or [""]
    # A rounding that was not named is stochastic under adaptive scaling, and passes without a warning.
    policy = policies[last].with_stochastic_gradients(FEW_BITS)
    operands = () if policy.products is None else (policy.products.specs.dgrad[0], policy.products.specs.wgrad[0])
    for spec in (policy.specs().error, *operands):
        if not others or spec is None or str(spec.rounding) == "stochastic":
            continue
        fmt = as_format(spec.fmt)
        if (fmt.element if isinstance(fmt, BlockFormat) else fmt).bits <= FEW_BITS:
            warnings.warn(
                f"The gradient of {last} is rounded to nearest in {fmt}. If the loss reads this layer, most of "
                f"that gradient becomes zero and its rows no longer sum to zero, which costs accuracy at any scale. "
                f"Use fpsim.Policy(..., overrides={{{last!r}: 'bf16'}}) (fpsim.last_layers(model, step) names such "
                f"layers), or stochastic rounding of gradients.",
                stacklevel=4,
            )
            return


def _install_all(model: nn.Module, policies: Mapping[str, Policy], listeners: Listeners) -> None:
    apart = modules_that_compute(model)
    listeners.has_names = _have_one_format(policies.values())
    for name, module in model.named_modules():
        if module not in apart and not is_compiled_wrapper(module) and _hindrance(module) is None:
            install(module, name, policies[name], listeners)
    listeners.needs_cache = _needs_cache(model)


def _have_one_format(policies: Iterable[Policy]) -> bool:
    """Return whether activations that are rounded are all in one format."""
    return len({spec.fmt for policy in policies if (spec := policy.specs().activation) is not None}) < 2


def _storing(model: nn.Module) -> list[EmulatedForward]:
    """Return the modules that store keys and values in a cache of transformers, as far as their code shows it."""
    return [forward for _, forward in emulated_forwards(model) if forward.cache_use and forward.cache_use.stores]


def _needs_cache(model: nn.Module) -> bool:
    """Return whether a call of the model is supposed to store rounded keys and values."""
    # All modules are considered if none stores: a tool that tries single modules may leave out the modules that store.
    forwards = _storing(model) or [forward for _, forward in emulated_forwards(model)]
    return any(forward.policy is not None and forward.policy.cached is not None for forward in forwards)


def _warn_of_a_cache(model: nn.Module, policies: Mapping[str, Policy], stacklevel: int) -> None:
    """Warn of scales that span tokens, and of a `cache` that no module uses, because overrides leave it out."""
    stored = {name: o for p in policies.values() for name, o in (p.cached or {}).items() if _spans_tokens(o.fmt)}
    for name, operand in stored.items():
        warnings.warn(
            f"cache has {name}={operand.fmt}, with a scale for all tokens that come together: one at a time in "
            f"generate, all at once in a training, which reads other numbers then. Use a scale for each token, such as "
            f"'nvfp4_row', 'e4m3fn per row fp32' or 'mxfp8_e4m3', if a training is to replay what was generated.",
            stacklevel=stacklevel,
        )
    if _needs_cache(model) or all(policy.cached is None for policy in policies.values()):
        return
    names = ", ".join(forward.name for forward in _storing(model)[:3])
    warnings.warn(
        f"cache= changes nothing: each module that stores keys and values, such as {names}, is inside of an override "
        f"without one. Use overrides={{pattern: fpsim.Policy(..., cache=...)}}, or omit cache=.",
        stacklevel=stacklevel,
    )


def _spans_tokens(fmt: Any) -> bool:
    """Return whether numbers of several tokens share a scale, in blocks along the last axis."""
    if not isinstance(fmt, BlockFormat):
        return False
    return fmt.block == "tensor" or fmt.tile[0] != 1 or fmt.tensor_scale is True


def policies_of(model: nn.Module) -> dict[str, Policy]:
    """Return the policy of each module of a quantised model by name, with overrides resolved."""
    return {forward.name: forward.policy or Policy() for _, forward in emulated_forwards(model)}


def install_policies(model: nn.Module, policies: Mapping[str, Policy]) -> None:
    """Let the modules of a quantised model compute under these policies, by name; other modules stay as they are."""
    for module, forward in list(emulated_forwards(model)):
        if forward.name in policies:
            install(module, forward.name, policies[forward.name], forward.listeners)
    for shared in listeners(model):
        shared.has_names = _have_one_format(policies_of(model).values())
        shared.needs_cache = _needs_cache(model)


def keeps_history(name: str, entry: Mapping[str, Any], policies: Mapping[str, Policy]) -> bool:
    """Return whether these policies scale an operand, "blocks.0.widen:linear fprop.x", by a history of this rule."""
    site, _, role = name.rpartition(" ")
    policy = policies.get(site.rpartition(":")[0])
    if policy is None or policy.products is None:
        return False
    product, _, operand = role.partition(".")
    if operand not in PRODUCTS.get(product, ()):
        return False
    wanted = getattr(policy.products.specs, product)[PRODUCTS[product].index(operand)]
    if wanted is None or not wanted.is_delayed:
        return False
    fmt = wanted.spec().fmt
    assert isinstance(fmt, BlockFormat)
    assert isinstance(fmt.scale_rule, Delayed)
    return asdict(fmt.scale_rule) == entry["rule"] and fmt.largest == entry["largest"]


def _require_emulable(name: str, module: nn.Module, policy: Policy) -> None:
    if emulated_forward(module) is not None:
        where = f"{name or 'the model'} ({type(module).__name__})"
        raise ValueError(f"{where} is quantised already. Call dequantize(model) first, or quantise the original.")
    _require_interceptable(name, module, policy)


def _require_interceptable(name: str, module: nn.Module, policy: Policy) -> None:
    """Raise TypeError for a module that is to be rounded and cannot be intercepted."""
    hindrance = _hindrance(module)
    # Without a format, such a module may be part of a model, and then computes in float32.
    if hindrance is not None and (policy.specs() != NO_SPECS or policy.products is not None):
        raise TypeError(
            f"{name or 'the model'} ({type(module).__name__}) {hindrance}, which cannot be intercepted. Quantise a "
            f"module whose forward is a method, or leave this one in float32: Policy(overrides={{name: None}})."
        )


def _hindrance(module: nn.Module) -> str | None:
    """Say why a module's forward cannot be replaced; None if it can be."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by TorchScript"
    is_property = isinstance(inspect.getattr_static(type(module), "forward", None), property)
    return "has a property for its forward" if is_property else None


def dequantize(model: Model, *, inplace: bool = False) -> Model:
    """Return a copy of a quantised model that computes in float32 again.

    Args:
        model: from `quantize`.
        inplace: change `model` itself and return it.

    Raises:
        ValueError: for a model that was not quantised.
    """
    require_flag("inplace", inplace)
    if not any(True for _ in emulated_forwards(model)):
        raise ValueError(
            f"{type(model).__name__} is not quantised: there is nothing to undo. See quantize(model, fmt)."
        )
    if not inplace:
        model = _copy_of(model, "dequantize(model")
    for module, _ in list(emulated_forwards(model)):
        uninstall(module)
    return model


@keeps_grad_mode
def _copy_of(model: Model, verb: str) -> Model:
    """Return a deep copy. Raises TypeError with the reason for a model that cannot be copied."""
    remedy = f"Expected: a model that copy.deepcopy can copy. Change this one itself: {verb}, inplace=True)."
    try:
        memo: dict[int, Any] = {}
        duplicate = copy.deepcopy(model, memo)
        left_behind = carry_over(model, memo)
    # The error may be of any type: `__deepcopy__` of any attribute may raise it.
    except Exception as error:
        why = _computed_tensors(model) or f"copy.deepcopy says: {error}"
        raise TypeError(f"{type(model).__name__} cannot be copied, {why}. {remedy}") from error
    # deepcopy keeps functions as they are: in the copy, a wrapper that closes over the original would run the original.
    stale = bound_elsewhere(duplicate, model.modules())
    if stale is not None:
        raise TypeError(
            f"The forward of {stale} was replaced by a function that runs the original, also in a copy. {remedy}"
        )
    if left_behind:
        shown_names = ", ".join(left_behind[:5]) + ", ..." * (len(left_behind) > 5)
        warnings.warn(
            f"Got hooks on the gradients of {shown_names} that use the original model or an optimizer of it. Copies of "
            f"these parameters do not have them. Register them on the copy, or keep them: {verb}, inplace=True).",
            stacklevel=5,
        )
    return duplicate


def _computed_tensors(model: nn.Module) -> str:
    """Name the tensors of a model that prevent a copy."""
    names = [
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    if not names:
        return ""
    return (
        f"for it keeps tensors that were computed and carry a gradient: {', '.join(names[:5])}. The older "
        f"torch.nn.utils.weight_norm and spectral_norm keep their weights so (torch.nn.utils.parametrizations do not), "
        f"and so do models that keep a state"
    )


def round_parameters_(model: nn.Module) -> None:
    """Round each parameter of a quantised model, in place, to the format in which its module uses it.

    This is how hardware without a float32 master copy keeps parameters: an update below half an ulp is lost. Parameters
    that are used in float32, or to compute a weight, stay as they are. A parameter that several modules share is
    rounded as the first of them uses it. Warns if all parameters stay as they are although something else is rounded.

    Args:
        model: from `quantize`.

    >>> model = quantize(nn.Linear(1, 1, bias=False), "e5m2")
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.01)
    >>> round_parameters_(model)
    >>> model.weight.item()
    1.0
    """
    done: set[int] = set()
    for module, forward in emulated_forwards(model):
        kept = sources(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name in kept or forward.specs.weight is None:
                continue
            if id(parameter) not in done and parameter.is_floating_point():
                done.add(id(parameter))
                round_memory_(parameter.detach(), forward.specs.weight)
                # Count the write, so that autograd refuses a backward pass that saved the old values, as after any
                # in-place write.
                torch.autograd.graph.increment_version(parameter)
    rounds = any(any(forward.specs) or forward.products is not None for _, forward in emulated_forwards(model))
    if not any(True for _ in emulated_forwards(model)) and any(True for _ in model.parameters()):
        warnings.warn(
            f"round_parameters_ changed nothing: this {type(model).__name__} is not quantised. Give it what "
            f"fpsim.quantize(model, fmt) returns.",
            stacklevel=2,
        )
    if not done and rounds and any(True for _ in model.parameters()):
        warnings.warn(
            f"round_parameters_ changed nothing: no parameter of {type(model).__name__} is used in a format, for the "
            f"policy has none for weights. Use one that has, such as fpsim.Policy(weight='bf16').",
            stacklevel=2,
        )


def listeners(model: nn.Module) -> list[Listeners]:
    """Return the listeners to which observers of a quantised model register; several for nested quantised models."""
    by_id = {id(f.listeners): f.listeners for _, f in emulated_forwards(model)}
    if not by_id:
        raise ValueError(f"{type(model).__name__} is not quantised. Call fpsim.quantize(model, fmt) first.")
    return list(by_id.values())


def frozen(model: nn.Module) -> AbstractContextManager[None]:
    """Round each weight of a quantised model once inside the block: at the first call that uses it.

    This serves generation token by token, and evaluation: the results are the same, bit for bit. The weights are cached
    in the formats of their roles and, if they are operands of products, in the formats of the forward product. Some
    weights are still rounded at each call: weights whose rounding is stochastic or whose scale is delayed, weights
    whose gradient is recorded (use `torch.no_grad()`), and all weights while the model is recorded or watched.

    Weights must not be written to inside the block. A call that meets a weight to which an operation of torch has
    written raises RuntimeError. A write that torch does not count (`w.data`, NumPy) is seen when the block ends, which
    then raises.

    Args:
        model: from `quantize`.

    Raises:
        TypeError: for anything but a module.
        ValueError: for a model that is not quantised.
        RuntimeError: for a weight that was written to inside the block.

    >>> import torch, fpsim
    >>> model = fpsim.quantize(torch.nn.Linear(4, 4), "e4m3fn")
    >>> x = torch.ones(1, 4)
    >>> with torch.no_grad(), fpsim.frozen(model):
    ...     tokens = [model(x) for _ in range(3)]  # the weight and the bias are rounded at the first one
    """
    found = {id(f.listeners): f.listeners for _, f in emulated_forwards(model)}
    if not found:
        raise ValueError(
            f"This {type(model).__name__} is not quantised, and rounds no weights. "
            f"Use fpsim.quantize(model, fmt) first."
        )
    return Block(partial(_freeze, model, [*found.values()]))


def _freeze(model: nn.Module, listeners: list[Listeners], undo: Undo) -> None:
    kept = KeptWeights(partial(_name_of, model))
    # The check is registered first, so that it runs last: it may raise, and by then everything has been put back.
    undo.by(kept.require_unchanged)
    for each in listeners:
        undo.by(partial(setattr, each, "kept_weights", each.kept_weights))
        each.kept_weights = kept


def _name_of(model: nn.Module, x: Tensor) -> str:
    name = next((name for name, p in model.named_parameters() if p is x), None)
    return "A weight" if name is None else f"The weight {name!r}"
