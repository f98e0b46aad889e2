"""Profiles of engines: policies by name, for the places at which a bfloat16 model is rounded in an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpsim.border import require_module
from fpsim.checks import refuse, shown
from fpsim.formats.blocks import as_format
from fpsim.policies.cpu_kernels import CPU_KERNELS
from fpsim.policies.operand import Operand
from fpsim.policies.policy import Policy, policy_of_modules
from fpsim.policies.products import Products
from fpsim.policies.recipes import is_gate, is_layer, is_norm, layers_in

__all__ = ["ProfileRow", "profile", "profiles"]

Policies = dict[str, Policy]
Kernels = dict[str, Callable[..., Any]]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}  # activation functions of gates

_BF16 = Policy(weight="bf16", activation="bf16", error="bf16")
_SATURATING = Operand(as_format("e4m3fn"), overflow="saturate")  # as casts on cards do


class ProfileRow(NamedTuple):
    """One profile in words.

    name: the profile's name, for `profile`.
    description: the places at which it rounds.
    source: the engine or the formula that computes in this way.
    """

    name: str
    description: str
    source: str


@dataclass(frozen=True)
class _Profile:
    """The description of a profile, and the function `change`, which changes the policies of a model's modules.

    `change` returns the number of modules that it has changed; None for all.

    of: a description of the modules that `change` changes, for errors.
    buffers: the dtype of buffers, if the profile sets it.
    """

    description: str
    source: str
    change: Callable[[Policies, nn.Module], int | None]
    of: str = ""
    buffers: str = ""


def profile(names: str | Sequence[str], model: nn.Module) -> Policy:
    """Return the policy with which a model computes as an engine does in bfloat16, for `fpsim.quantize`.

    `fpsim.profiles()` lists the profiles; `docs/mismatch.md` tells the accuracy of each. A profile is bfloat16, rounded
    after each of the model's own operations, except for the differences in its description. Several profiles stand for
    one engine that has all of these differences.

    Args:
        names: the name of one profile, or the names of several.
        model: a causal language model of transformers, or a model with modules of the same structure.

    Returns:
        A Policy with overrides for the modules of this model.

    Raises:
        ValueError: for an unknown name, a model without the modules that a profile changes, and two profiles that
            contradict each other about the same operation.
        TypeError: for a value that is no name, or no module.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 8))
    >>> print(profile(("fused_norm", "logits_fp32"), model))
    weight=bf16 nearest_even, activation=bf16 nearest_even, error=bf16 nearest_even, weight_grad=float32; \
1: weight=bf16 nearest_even, activation=bf16 nearest_even, error=bf16 nearest_even, weight_grad=float32, rounded once; \
2: weight=bf16 nearest_even, activation=bf16 nearest_even, error=bf16 nearest_even, weight_grad=float32, kernels: linear
    """
    require_module(model)
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, Sequence) or not given or not all(isinstance(name, str) for name in given):
        raise TypeError(f"names={shown(names)}. Expected: the name of a profile, or several: {', '.join(_PROFILES)}.")
    for name in given:
        if name not in _PROFILES:
            raise ValueError(refuse(f"names has {shown(name)}, which is no profile", _PROFILES, word=name))
    of_buffers = {_PROFILES[name].buffers: name for name in given if _PROFILES[name].buffers}
    if len(of_buffers) > 1:
        words = " and ".join(f"{dtype} ({name})" for dtype, name in of_buffers.items())
        raise ValueError(f"Two of the profiles say what buffers are: {words}. Expected: one of them.")
    # Profiles change single modules, so each module first has its own policy. Overrides by name are made at the end.
    policies = dict.fromkeys((name for name, _ in model.named_modules()), _BF16)
    for name in dict.fromkeys(given):
        entry = _PROFILES[name]
        if entry.change(policies, model) == 0:
            raise ValueError(
                f"The profile {name!r} is about {entry.of}, and {type(model).__name__} has none that is found by its "
                f"build. Expected: a model of transformers that has one, or no such profile."
            )
    return policy_of_modules(policies)


def profiles() -> list[ProfileRow]:
    """Return all profiles, with the places at which they round, and the engine that computes in this way.

    >>> [row.name for row in profiles()][:2]
    ['hf_bf16', 'hf_eager_bf16']
    """
    return [ProfileRow(name, entry.description, entry.source) for name, entry in _PROFILES.items()]


def _with_kernels(policies: Policies, names: Sequence[str], kernels: Kernels) -> int:
    for name in names:
        before = policies[name].kernels
        for operation, kernel in kernels.items():
            if before.get(operation, kernel) != kernel:
                raise ValueError(
                    f"Two of the profiles say what {operation} is in {name or 'the model'}. Expected: one of them."
                )
        policies[name] = replace(policies[name], kernels={**before, **kernels})
    return len(names)


# torch's own kernels


def _on_the_cpu(policies: Policies, model: nn.Module) -> None:
    _with_kernels(policies, [*policies], CPU_KERNELS)


def _floating_buffers(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the floating-point buffers that each module holds itself, by the module's name."""
    found = {n: [b for b in m.buffers(recurse=False) if b.is_floating_point()] for n, m in model.named_modules()}
    return {name: buffers for name, buffers in found.items() if buffers}


@dataclass(frozen=True)
class _RowsOfBuffers:
    """Kernel that indexes a buffer in float32, as from_pretrained leaves it, so that results are float32 too.

    A buffer is recognised by its shape, because `quantize` copies the model. The kernel is an object that compares by
    value, so that layers with the same structure have equal policies, and that can be pickled.
    """

    shapes: frozenset[torch.Size]

    def __call__(self, x: Tensor, index: Any) -> Any:
        return x.float()[index] if x.shape in self.shapes and isinstance(index, Tensor) else NotImplemented


def _with_wide_buffers(policies: Policies, model: nn.Module) -> None:
    _on_the_cpu(policies, model)
    for name, buffers in _floating_buffers(model).items():
        _with_kernels(policies, [name], {"getitem": _RowsOfBuffers(frozenset(b.shape for b in buffers))})


def _stored(x: Tensor) -> bool:
    """Return True for a tensor in bfloat16, and False for a tensor that the code made float32 on purpose."""
    return x.dtype == torch.bfloat16


def _to_of_buffer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return x.to(torch.bfloat16).to(*args, **kwargs) if _stored(x) else NotImplemented


def _float_of_buffer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return x.to(torch.bfloat16).float() if _stored(x) else NotImplemented


def _cast_as_a_whole(policies: Policies, model: nn.Module) -> None:
    _on_the_cpu(policies, model)
    _with_kernels(policies, [*_floating_buffers(model)], {"to": _to_of_buffer, "float": _float_of_buffer})


# Norms and residuals


def _norms(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if is_norm(module))


def _fuse_norms(policies: Policies, model: nn.Module) -> int:
    names = [*_norms(model)]
    for name in names:
        policies[name] = replace(policies[name], fused=True)
    return len(names)


def _sum_of_residual(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the float32 sum of two tensors that are stored in bfloat16.

    A norm reads this sum before it is rounded, and the next sum reads it after it is rounded.
    """
    if args or kwargs or not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.shape != y.shape:
        return NotImplemented
    if not (x.is_floating_point() and y.is_floating_point()):
        return NotImplemented
    return x.to(torch.bfloat16).float() + y.to(torch.bfloat16).float()


def _fuse_residuals(policies: Policies, model: nn.Module) -> int:
    layers = [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and any(is_norm(child) for child in module.children())
    ]
    return _with_kernels(policies, layers, {"add": _sum_of_residual}) and _fuse_norms(policies, model)


# Gates, rotary codes, logits


def _wide_silu(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return F.silu(x.float(), *args, **kwargs)


def _wide_gelu(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return F.gelu(x.float(), *args, **kwargs)


def _is_gated(module: nn.Module) -> bool:
    own = [name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))]
    return any(name.startswith("gate") or name == "w1" for name in own)


def _fuse_gates(policies: Policies, model: nn.Module) -> int:
    names = [
        f"{around}.{name}" if around else name
        for around, module in model.named_modules()
        if _is_gated(module)
        for name, child in module.named_children()
        if any(word in type(child).__name__.lower() for word in ("silu", "gelu"))
    ]
    return _with_kernels(policies, names, {"silu": _wide_silu, "gelu": _wide_gelu})


def _kept_wide(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Leave a float32 tensor alone: products with it are float32 too."""
    return x if x.dtype == torch.float32 else NotImplemented


def _sum_of_turned(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Round the sum of two float32 tensors, the last operation of a rotary embedding in attention."""
    is_wide = all(isinstance(z, Tensor) and z.dtype == torch.float32 for z in (x, y))
    return (x + y).to(torch.bfloat16) if is_wide and not (args or kwargs) else NotImplemented


def _rotate_in_float32(policies: Policies, model: nn.Module) -> int:
    classes = {name: type(module).__name__.lower() for name, module in model.named_modules()}
    _with_kernels(policies, [name for name, word in classes.items() if "attention" in word], {"add": _sum_of_turned})
    return _with_kernels(policies, [name for name, word in classes.items() if "rotary" in word], {"to": _kept_wide})


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    x, weight = (y.to(torch.bfloat16).float() for y in (x, weight))
    return F.linear(x, weight, None if bias is None else bias.to(torch.bfloat16).float())


def _keep_logits(policies: Policies, model: nn.Module) -> int:
    return _with_kernels(policies, layers_in(model)[-1:], {"linear": _wide_linear})


# FP8


def _multiplying(model: nn.Module) -> list[str]:
    """Return the layers whose weights an engine stores in FP8: all but the head and the routers of experts."""
    # Experts in one tensor (experts, out, in) are layers too, although none of them is an nn.Linear.
    head = layers_in(model)[-1:]
    experts = [n for n, m in model.named_modules() if n and any(p.dim() == 3 for p in m.parameters(recurse=False))]
    names = [n for n in (*layers_in(model), *experts) if n not in head and not is_gate(model, n)]
    return [name for name in dict.fromkeys(names) if is_layer(model.get_submodule(name)) or name in experts]


def _in_fp8(x: str, w: str) -> Callable[[Policies, nn.Module], int]:
    def change(policies: Policies, model: nn.Module) -> int:
        names, products = _multiplying(model), Products(fprop=(x, w))
        for name in names:
            if policies[name].products is not None:
                raise ValueError(f"Two of the profiles say how {name} is quantised. Expected: one of them.")
            policies[name] = replace(policies[name], products=products)
        return len(names)

    return change


def _cache_in_fp8(policies: Policies, model: nn.Module) -> None:
    for name, policy in policies.items():
        policies[name] = replace(policy, cache={"k": _SATURATING, "v": _SATURATING})


_PROFILES = {
    "hf_bf16": _Profile(
        "the model's own operations in bf16, each rounded once, with two exceptions: powers may round more than once, "
        "and the exponentials of attention are approximated, and rounded before their product with the values; buffers "
        "are float32",
        "transformers, from_pretrained(dtype=torch.bfloat16), with torch's kernels for the CPU",
        _with_wide_buffers,
        buffers="float32",
    ),
    "hf_eager_bf16": _Profile(
        "as hf_bf16, with buffers, such as the frequencies of rotary codes, in bf16",
        "transformers, model.to(torch.bfloat16), with torch's kernels for the CPU",
        _cast_as_a_whole,
        buffers="bf16",
    ),
    "fused_norm": _Profile(
        "a norm computes in float32 and rounds once, its weight included",
        "the formula of torch's rms_norm and layer_norm, and of FlashInfer's rmsnorm",
        _fuse_norms,
        "norms",
    ),
    "fused_residual_norm": _Profile(
        "as fused_norm, and the norm reads the sum with the residual before this sum is rounded to be stored",
        "the formula of FlashInfer's fused_add_rmsnorm",
        _fuse_residuals,
        "layers with norms",
    ),
    "fused_silu_mul": _Profile(
        "the activation of a gate and its product with the other half are rounded once",
        "the formula of FlashInfer's silu_and_mul and gelu_and_mul",
        _fuse_gates,
        "gates with SiLU or GELU",
    ),
    "rope_fp32": _Profile(
        "rotary codes stay float32, and the queries and keys that they rotate are rounded once",
        "the formula of FlashInfer's apply_rope, whose cosines and sines are float32",
        _rotate_in_float32,
        "rotary codes",
    ),
    "logits_fp32": _Profile(
        "the head's sums are not rounded, and what follows is float32",
        "a product with bf16 operands and a float32 result",
        _keep_logits,
        "a head",
    ),
    "fp8_w8a8": _Profile(
        "operands of linear layers, except the head and routers, in e4m3fn with a float32 scale for each token, and "
        "for each row of a weight",
        "the formula of compressed-tensors' FP8_DYNAMIC: elements divided by amax / 448",
        _in_fp8("e4m3fn per row absmax", "e4m3fn per row absmax"),
        "linear layers",
    ),
    "fp8_block": _Profile(
        "operands of linear layers, except the head and routers, in e4m3fn with a float32 scale for 1 x 128 of "
        "activations, and for 128 x 128 of weights",
        "DeepSeek-V3 (arXiv 2412.19437, 3.3; inference/kernel.py)",
        _in_fp8("e4m3fn per 128 absmax", "e4m3fn per 128x128 absmax"),
        "linear layers",
    ),
    "kv_fp8": _Profile(
        "keys and values are stored in e4m3fn without a scale, and saturate",
        "vLLM's kv_cache_dtype='fp8', without calibrated scales",
        _cache_in_fp8,
    ),
}
