"""Today's recipes: the formats in which hardware trains, as policies of which every part can be changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.border import require_module
from fpsim.checks import did_you_mean, nearest, shown
from fpsim.formats.blocks import Delayed, as_format
from fpsim.formats.floats import CATALOGUE
from fpsim.policies.operand import Operand
from fpsim.policies.policy import FormatLike, Policy, policy_of_format
from fpsim.policies.products import Products
from fpsim.tensors.hadamard import Hadamard
from fpsim.tensors.ops import round_to

__all__ = [
    "RECIPE_PREFIX",
    "RecipeRow",
    "as_policy",
    "is_gate",
    "is_layer",
    "is_norm",
    "layers_in",
    "recipe",
    "recipes",
]

MOST_USED = ("fp8_current", "fp8_delayed")  # suggested first for an incomplete name
RECIPE_PREFIX = "recipe:"  # stands before a recipe's name in the place of a format


class RecipeRow(NamedTuple):
    """One recipe in words.

    name: the recipe's name, for `recipe`.
    description: the tensors that are quantised, and their formats.
    source: the recipe's origin.
    """

    name: str
    description: str
    source: str


@dataclass(frozen=True)
class _Recipe:
    """A recipe: its words, its policy without a model, and the layers of a model that stay in high precision.

    keeps_last: None keeps no layer in high precision. A number keeps embeddings, norms and the head, and this
        percentage of the other layers, rounded up, counted from the last one.
    keeps_gates: whether the modules that choose among experts stay in high precision too.
    """

    description: str
    source: str
    policy: Policy
    keeps_last: int | None = None
    keeps_gates: bool = False


def recipe(name: str, model: nn.Module | None = None, **changes: Any) -> Policy:
    """Return the policy of a recipe, for `fpsim.quantize`.

    `fpsim.recipes()` lists the recipes; `docs/recipes.md` explains them. Operands of products are quantised as the
    recipe says. Everything else is bf16: results of operations, gradients of activations, weights where they are used.
    Stored weights, their gradients and the optimizer's state stay float32. Attention's two products stay in bf16 unless
    `attention=True`.

    Args:
        name: the recipe's name.
        model: the model in which the recipe keeps layers in bf16 by name: embeddings, norms, the head, the last layers
            and gates of experts, if the recipe keeps any. A layer is a module without modules inside that has a weight
            of two axes or more; the head is the last layer. Without a model every product of every layer is quantised.
        changes: fields of `Policy` or of its `Products` to be replaced. `overrides` are added to the recipe's own.

    Raises:
        ValueError: for an unknown name or field, and as in `Policy` and `Products`.

    >>> p = recipe("fp8_current", dgrad=("e5m2", "e4m3fn"))
    >>> print(p.products.fprop[0], "|", p.products.dgrad[0], "|", p.activation)
    e4m3fn per tensor fp32 saturate nearest_even | e5m2 nearest_even | bf16
    """
    if not isinstance(name, str) or name not in _RECIPES:
        hint = _hint(name)
        raise ValueError(f"Unknown recipe {shown(name)}.{hint} Known: {', '.join(_RECIPES)}.")
    if model is not None:
        require_module(model)
    entry = _RECIPES[name]
    policy, kept = entry.policy, {}
    if model is not None and entry.keeps_last is not None:
        kept = dict.fromkeys(_in_high_precision(model, entry), replace(policy, products=None))
    of_policy = {f.name for f in fields(Policy)}
    of_products = {f.name for f in fields(Products)}
    for field in changes:
        if field not in of_policy | of_products:
            hint = did_you_mean(field, of_policy | of_products, 3)
            if field in {f.name for f in fields(Delayed)}:
                hint = (
                    f" It is one of delayed scaling: use fprop=(fmt, fmt) and so on, with "
                    f"fmt = fpsim.BlockFormat('e4m3fn', 'tensor', 'fp32', fpsim.Delayed({field}=...))."
                )
            raise ValueError(
                f"{shown(field)} is not a field of a recipe.{hint} Of its policy: {', '.join(sorted(of_policy))}; "
                f"of its products: {', '.join(sorted(of_products))}."
            )
    inside = {field: value for field, value in changes.items() if field in of_products}
    around = {field: value for field, value in changes.items() if field not in of_products}
    overrides = {**kept, **around.pop("overrides", {})}
    policy = replace(policy, **around, overrides=overrides)
    return replace(policy, products=replace(policy.products or Products(), **inside)) if inside else policy


def _hint(name: object) -> str:
    """Return a hint with recipes of similar names; only the most used recipes, if `name` is the beginning of one.

    >>> _hint("fp8")
    " Did you mean 'fp8_current' or 'fp8_delayed'?"
    """
    begin = [known for known in MOST_USED if isinstance(name, str) and known.startswith(f"{name.lower()}_")]
    return (
        f" Did you mean {' or '.join(map(repr, begin))}?" if begin else did_you_mean(shown(name).lower(), _RECIPES, 3)
    )


def recipes() -> list[RecipeRow]:
    """Return all recipes, with their descriptions and their sources.

    >>> [row.name for row in recipes()][:3]
    ['fp8_delayed', 'fp8_current', 'fp8_row']
    """
    return [RecipeRow(name, entry.description, entry.source) for name, entry in _RECIPES.items()]


def as_policy(
    fmt: FormatLike,
    rounding: str | Mapping[str, str] | None = None,
    *,
    overflow: str | Mapping[str, str | None] | None = None,
    model: nn.Module | None = None,
) -> Policy:
    """Return the policy that a format stands for in `fpsim.quantize`; an unknown name raises ValueError.

    A format applies to every role. A format whose numbers share scales applies to all operands of matrix products, and
    every role stays float32. A policy is returned as it is, and None is float32.

    Args:
        fmt: a format by name or as an object, a Policy, the name of a recipe after "recipe:", or None.
        rounding: the rounding of every role; if every role is float32, of all operands. None keeps the policy's.
        overflow: the handling of numbers beyond the largest value in every role, as in `round_to`. None keeps the
            policy's.
        model: the model that a recipe is for; some recipes keep its last layers in high precision. Formats need none.

    Returns:
        A Policy.

    Raises:
        ValueError: for an unknown format, recipe or rounding.
        TypeError: for a value that is not a format, or not a module. For a mapping of roles use
            `fpsim.Policy(**mapping)`.

    >>> as_policy("fp16").error
    'fp16'
    >>> print(as_policy("mxfp4", "stochastic"))
    products: mxfp4 stochastic
    >>> as_policy("recipe:bf16").weight_grad is None
    True
    >>> print(as_policy("e3m4", overflow="saturate"))
    e3m4 nearest_even saturate
    """
    if model is not None:
        require_module(model)
    if isinstance(fmt, Products):
        raise TypeError("A format is a fpsim.Products, which is a part of a policy. Use fpsim.Policy(products=...).")
    policy = _policy_named(fmt, model)
    policy = policy if rounding is None else policy.with_rounding(rounding)
    if overflow is None:
        return policy
    if not any(policy.specs()):  # blocks already saturate: OCP MX v1.0, 6.3
        raise ValueError(
            f"overflow={shown(overflow)} was given with {shown(fmt)}, in which every role is float32. Expected: a "
            f"format of single numbers, such as 'e3m4'; for operands of products, fpsim.Operand(fmt, overflow=...)."
        )
    return replace(policy, overflow=overflow)


def _policy_named(fmt: FormatLike, model: nn.Module | None) -> Policy:
    if isinstance(fmt, str) and fmt.startswith(RECIPE_PREFIX):
        return recipe(fmt.removeprefix(RECIPE_PREFIX).strip(), model)
    try:
        return policy_of_format(fmt)
    except ValueError as error:
        if isinstance(fmt, str) and fmt in _RECIPES:
            raise ValueError(f"{fmt!r} is a recipe, not a format. Write '{RECIPE_PREFIX}{fmt}'.") from error
        known = [name for name in _RECIPES if name not in CATALOGUE]
        begin = [name for name in MOST_USED if isinstance(fmt, str) and name.startswith(f"{fmt}_")]
        near = begin or nearest(fmt, known, cutoff=0.7)
        if not near:
            raise
        raise ValueError(f"{error} Near it is a recipe, '{RECIPE_PREFIX}{near[0]}'.") from None


# The layers of a model that a recipe keeps in high precision

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *_CONVOLUTIONS)  # even if inner modules compute their weights


def _in_high_precision(model: nn.Module, entry: _Recipe) -> Iterator[str]:
    """Yield the names of embeddings, norms, the last layers, the head and gates, in the order of the model."""
    assert entry.keeps_last is not None
    named, layers = _named_modules(model), layers_in(model)
    body, head = layers[:-1], layers[-1:]
    kept = {*body[len(body) - -(-entry.keeps_last * len(body) // 100) :], *head}
    if entry.keeps_gates:
        kept |= {name for name, _ in named if is_gate(model, name)}
    return (n for n, module in named if n in kept or isinstance(module, _EMBEDDINGS) or is_norm(module))


def layers_in(model: nn.Module) -> list[str]:
    """Return the names of layers that multiply by a weight, in the order of the model; usually the head is the last."""
    layers: list[str] = []
    for name, module in _named_modules(model):
        if is_layer(module) and not (layers and name.startswith(f"{layers[-1]}.")):
            layers.append(name)
    return layers


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, module) for n, module in model.named_modules() if n and "parametrizations" not in n.split(".")]


def is_gate(model: nn.Module, name: str) -> bool:
    """Return True if a module chooses among experts: it is named "gate" or "router", beside a module "experts"."""
    around, _, own = name.rpartition(".")
    return own in ("gate", "router") and hasattr(model.get_submodule(around), "experts")


def is_layer(module: nn.Module) -> bool:
    """Return True if this module multiplies by a weight of its own."""
    if isinstance(module, _LAYERS):
        return True
    is_leaf = next(module.children(), None) is None
    return is_leaf and not isinstance(module, _EMBEDDINGS) and _has_matrix(module)


def is_norm(module: nn.Module) -> bool:
    """Return True if this module is a norm by its class name, and has neither a matrix nor a module inside."""
    is_leaf = next(module.children(), None) is None
    return "norm" in type(module).__name__.lower() and is_leaf and not _has_matrix(module)


def _has_matrix(module: nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters(recurse=False))


# The recipes. As in TransformerEngine, an infinity saturates in the formats of its recipes.

_BF16 = Policy(weight="bf16", activation="bf16", error="bf16")


def _with(fprop: Any, dgrad: Any, wgrad: Any) -> Policy:
    return replace(_BF16, products=Products(fprop=fprop, dgrad=dgrad, wgrad=wgrad))


def _hybrid(scale: str) -> Policy:
    """Return e4m3fn forward and e5m2 for gradients; numbers too large for a delayed scale saturate, as in casts."""
    forward, gradient = (
        Operand(as_format(f"{e} per tensor {scale} saturate"), overflow="saturate") for e in ("e4m3fn", "e5m2")
    )
    return _with((forward, forward), (gradient, forward), (gradient, forward))


def _everywhere(fmt: str) -> Policy:
    return _with((fmt, fmt), (fmt, fmt), (fmt, fmt))


def _fp8_tile() -> Policy:
    part, tile = "e4m3fn per 128 ceil saturate", "e4m3fn per 128x128 ceil saturate"  # the least power that fits amax
    return _with((part, tile), (part, tile), (part, part))


def _mxfp4_sr() -> Policy:
    operand = Operand(as_format("e2m1fn per 32 at 0.75"), "stochastic", hadamard=Hadamard(64, "random"))
    return _with(("bf16", "bf16"), (operand, operand), (operand, operand))


def _nvfp4() -> Policy:
    part, tile = as_format("e2m1fn per 16 e4m3fn fp32 saturate"), "e2m1fn per 16x16 e4m3fn fp32 saturate"
    transform = Hadamard(16, "fixed")
    gradient = Operand(part, "stochastic", random_bits=8)
    return _with(
        (part, tile), (gradient, tile), (replace(gradient, hadamard=transform), Operand(part, hadamard=transform))
    )


def _aware(x: str | None, w: str) -> Policy:
    """Return quantisation-aware training: operands are rounded, and their gradients pass straight through."""
    return replace(_BF16, products=Products((x, w), backward="dequantized"))


def _ternary(w: Tensor, axis: int) -> Tensor:
    """Round to -1, 0 and 1 times the mean magnitude of the tensor, as BitNet's `weight_quant` does."""
    scale = 1.0 / w.abs().mean().clamp(min=1e-5)
    return (w * scale).round().clamp(-1, 1) / scale


def _token_in_int8(x: Tensor, axis: int) -> Tensor:
    """Round to -128 to 127 times a scale for each row along the summed axis, as BitNet's `activation_quant` does."""
    scale = 127.0 / x.abs().amax(axis, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def _bitnet() -> Policy:
    x, w = Operand(_token_in_int8, name="int8 per row"), Operand(_ternary, name="ternary absmean")
    return replace(_BF16, products=Products((x, w), backward="dequantized"))


def _flushed_fp16(x: Tensor, axis: int) -> Tensor:
    """Round to fp16 without subnormals, as MFMA of AMD's MI200 reads operands: numbers below 2**-14 become zero."""
    rounded = round_to(x, "fp16")
    is_below = rounded.abs() < 2.0**-14  # False for NaN, which stays
    return torch.where(is_below, rounded * 0.0, rounded)


def _gfx90a() -> Policy:
    flushed = Operand(_flushed_fp16, name="fp16 without subnormals")
    products = Products(dgrad=(flushed, flushed), wgrad=(flushed, flushed))
    return Policy(weight="fp16", activation="fp16", error="fp16", products=products)


_RECIPES = {
    "fp8_delayed": _Recipe(
        "e4m3fn forward, e5m2 for gradients; a float32 scale for each tensor, from the amaxes of 1,024 earlier steps",
        "NVIDIA TransformerEngine, DelayedScaling(fp8_format=HYBRID)",
        _hybrid("fp32 delayed"),
    ),
    "fp8_current": _Recipe(
        "e4m3fn forward, e5m2 for gradients; a float32 scale for each tensor, from its own amax",
        "NVIDIA TransformerEngine, Float8CurrentScaling(fp8_format=HYBRID)",
        _hybrid("fp32"),
    ),
    "fp8_row": _Recipe(
        "e4m3fn everywhere; a power-of-two scale for each row along which a product sums, rounded up: nothing "
        "saturates",
        "torchao, Float8LinearConfig.from_recipe_name('rowwise')",  # round_scales_to_power_of_2=True, torchao 0.18
        _everywhere("e4m3fn per row ceil"),
    ),
    "fp8_tile": _Recipe(
        "e4m3fn everywhere; a power-of-two scale for each 1 x 128 of activations and gradients, and each 128 x 128 of "
        "weights",
        "DeepSeek-V3 (arXiv 2412.19437, 3.3); NVIDIA TransformerEngine, Float8BlockScaling",
        _fp8_tile(),
        keeps_last=0,
        keeps_gates=True,  # 3.3.1: embedding, output head, MoE gating, normalisation and attention operators
    ),
    "mxfp8": _Recipe(
        "mxfp8_e4m3 everywhere: a power-of-two scale for each 32, rounded up so that nothing saturates",
        "arXiv 2506.08027; NVIDIA TransformerEngine, MXFP8BlockScaling",
        _everywhere("e4m3fn per 32 ceil saturate"),
        keeps_last=0,
    ),
    "mxfp4_sr": _Recipe(
        "bf16 forward; mxfp4 for both gradients, rounded stochastically at 3/4 of their size, after a Hadamard "
        "transform of 64 with fresh signs",
        "Tseng et al. 2025 (arXiv 2502.20586; amazon-science/mxfp4-llm)",
        _mxfp4_sr(),
        keeps_last=0,
    ),
    "nvfp4": _Recipe(
        "nvfp4 everywhere, 16 x 16 tiles of weights; gradients stochastic with 8 random bits; a Hadamard transform of "
        "16 with fixed signs for the weight gradient",
        "arXiv 2509.25149; NVIDIA TransformerEngine, NVFP4BlockScaling",
        _nvfp4(),
        keeps_last=15,
    ),
    "qat_mxfp4": _Recipe(
        "weights in mxfp4 in the forward product, reused as quantised in the backward pass; everything else bf16",
        "quantisation-aware training of experts as in DeepSeek-V4 (verl#7895) and Kimi K3 (torchtitan#4269)",
        _aware(None, "mxfp4"),
    ),
    "qat_nvfp4": _Recipe(
        "activations and weights in nvfp4 in the forward product, reused as quantised in the backward pass; everything "
        "else bf16",
        "torchao, QATConfig with NVFP4FakeQuantizeConfig for both",
        _aware("nvfp4", "nvfp4"),
    ),
    "qat_int4": _Recipe(
        "weights in int4 (-7 to 7), a float32 scale for each 32, in the forward product, reused as quantised in the "
        "backward pass; everything else bf16",
        "INT4 fake quantisation of Megatron's grouped linear layers (radixark/Megatron-LM#9), as for Kimi K2",
        _aware(None, "int4 per 32 fp32 absmax"),
    ),
    "bitnet_b158": _Recipe(
        "weights -1, 0 or 1 times their mean magnitude, activations in 8 bits with a scale for each row, in the "
        "forward product, reused as quantised in the backward pass; everything else bf16",
        "BitNet b1.58 (arXiv 2402.17764), the code of its training tips; without its normalisation",
        _bitnet(),
        keeps_last=0,
    ),
    "bf16": _Recipe(
        "every result, gradient of an activation and weight in use in bf16; master weights and their gradients float32",
        "torch.autocast(dtype=torch.bfloat16); Kalamkar et al. 2019 (arXiv 1905.12322)",
        _BF16,
    ),
    "fp16": _Recipe(
        "every result, gradient of an activation and weight in use in fp16, which needs a loss scale; master weights "
        "and their gradients float32",
        "Micikevicius et al. 2018 (arXiv 1710.03740)",
        Policy(weight="fp16", activation="fp16", error="fp16"),
    ),
    "fp16_gfx90a": _Recipe(
        "fp16, where the products of the backward pass read subnormal operands as zero",
        "AMD MI200: MFMA_F16 flushes subnormals (MIOpen, MI200 MFMA behavior specifics); pytorch#182952",
        _gfx90a(),
    ),
    "bf16_pure": _Recipe(
        "bf16, and gradients of weights too. With fpsim.round_parameters_ after each step, the weights themselves; the "
        "optimizer's state stays float32",
        "model.to(torch.bfloat16)",
        replace(_BF16, weight_grad="bf16"),
    ),
}
