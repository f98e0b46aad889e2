"""Hardware by name: its formats of training, the accumulators of its products, and the numbers that it flushes.

A preset is data: lines with a source each, and a list of the effects that it does not model. Its name has a version,
`h100@1`: if a source changes, the preset gets the next version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

import fpsim
from fpsim import BlockFormat, Delayed, FloatFormat, Operand, Policy, Products
from fpsim.checks import refuse, shown

__all__ = ["PRESETS", "Line", "Preset", "described", "preset", "presets_in"]


class Line(NamedTuple):
    """One property that a preset models, and its source."""

    what: str
    source: str


@dataclass(frozen=True)
class Preset:
    """The arithmetic of a model on some hardware.

    Args:
        name, version: the name and the version of the preset; together they are its full name.
        hardware: the hardware in words.
        make: a function from a model, or None, to the policy. If its second argument is True, it returns the policy of
            a step whose scales have settled: scales that would depend on earlier steps are computed from the tensor
            itself.
        scaling: the loss scaling that the hardware needs, a system of `GradScaler`; None if it needs no loss scaling.
        lines: the effects that are modelled, each with its source.
        missing: the effects that are not modelled.
    """

    name: str
    version: int
    hardware: str
    make: Callable[[nn.Module | None, bool], Policy]
    lines: tuple[Line, ...]
    missing: tuple[str, ...]
    scaling: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.version}"

    def __str__(self) -> str:
        lines = [f"{self.full_name}: {self.hardware}"]
        lines += [f"  {line.what}\n    [{line.source}]" for line in self.lines]
        lines += [f"  loss scaling: {self.scaling}"] if self.scaling else []
        return "\n".join([*lines, *(f"  not modelled: {words}" for words in self.missing)])

    def policy(self, model: nn.Module | None = None, *, settled: bool = False, sums: bool = True) -> Policy:
        """Return the policy for a model. sums: False leaves sums of products to torch, in float32, which is faster."""
        policy = self.make(model, settled)
        if sums or policy.products is None:
            return policy
        return replace(policy, products=replace(policy.products, accumulator=None))


def preset(name: str) -> Preset:
    """Return the preset of a name, `h100` (its newest version) or `h100@1`. Raises ValueError for an unknown name.

    >>> preset("h100").full_name
    'h100@1'
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"The hardware is {shown(name)}. Expected: a name, one of {', '.join(PRESETS)}.")
    word, at, version = name.strip().lower().partition("@")
    if word not in PRESETS:
        raise ValueError(refuse(f"Unknown hardware {shown(word)}", PRESETS, word=word))
    found = PRESETS[word]
    if at and version != str(found.version):
        raise ValueError(f"There is no {shown(name)}. Expected: {found.full_name}, the version of this release.")
    return found


def presets_in(names: str | Sequence[str]) -> list[Preset]:
    """Return the presets of comma-separated names, each preset once.

    >>> [one.full_name for one in presets_in("h100, tpu,h100")]
    ['h100@1', 'tpu@1']
    """
    words = names.split(",") if isinstance(names, str) else [*names]
    return list(dict.fromkeys(preset(word) for word in words))


def described(one: Preset) -> dict[str, Any]:
    """Return a preset as plain values, for JSON."""
    lines = [line._asdict() for line in one.lines]
    return {"name": one.full_name, "hardware": one.hardware, "scaling": one.scaling, "lines": lines} | {
        "missing": [*one.missing]
    }


def _hybrid(forward: str, gradient: str, scale: str) -> dict[str, Any]:
    """Return the operands of the three products, in a forward and a gradient format with a float32 scale per tensor.

    Overflows saturate, as they do in casts.
    """
    rule = Delayed() if scale == "delayed" else "amax"
    f, g = (
        Operand(BlockFormat(e, "tensor", "fp32", rule, nonfinite="saturate"), overflow="saturate")  # type: ignore[arg-type]
        for e in (forward, gradient)
    )
    return {"fprop": (f, f), "dgrad": (g, f), "wgrad": (g, f)}


def _h100(model: nn.Module | None, settled: bool) -> Policy:
    # Only the sums in products of gradients are promoted to float32 every 128 terms; see the lines of the preset.
    slow = "hopper_fp8_chunk128"
    return fpsim.recipe("fp8_current", model, accumulator=("hopper_fp8", slow, slow))


def _b200(model: nn.Module | None, settled: bool) -> Policy:
    return fpsim.recipe("mxfp8", model, accumulator="blackwell_fp8")


def _b200_fp4(model: nn.Module | None, settled: bool) -> Policy:
    return fpsim.recipe("nvfp4", model)


def _mi250(model: nn.Module | None, settled: bool) -> Policy:
    return fpsim.recipe("fp16_gfx90a", model)


def _mi300(model: nn.Module | None, settled: bool) -> Policy:
    return fpsim.recipe("fp8_current", model, **_hybrid("e4m3fnuz", "e5m2fnuz", "current"))


def _tpu(model: nn.Module | None, settled: bool) -> Policy:
    return Policy(products=Products.all(FloatFormat(8, 7, subnormals=False), attention=True))


def _gaudi(model: nn.Module | None, settled: bool) -> Policy:
    # A single step has no history of amaxes, so settled scales are computed from the tensor itself.
    return fpsim.recipe("fp8_delayed", model, **_hybrid("e4m3", "e5m2", "current" if settled else "delayed"))


def _cerebras(model: nn.Module | None, settled: bool) -> Policy:
    return Policy(weight="cb16", activation="cb16", error="cb16")


ATTENTION = "the roundings inside attention kernels: attention's two products are in the recipe's wide format"
WIDE_SUMS = "the order and the truncation of sums of products, which are torch's in float32"

PRESETS: dict[str, Preset] = {
    one.name: one
    for one in (
        Preset(
            "h100",
            1,
            "NVIDIA H100, FP8 with a scale for each tensor",
            _h100,
            (
                Line(
                    "operands e4m3fn, gradients e5m2, a float32 scale of the tensor's own amax; all else bf16",
                    "NVIDIA TransformerEngine, Float8CurrentScaling(fp8_format=HYBRID)",
                ),
                Line(
                    "sums of the forward product in the tensor core: 32 products aligned, 13 fraction bits, truncated",
                    "arXiv 2412.19437, 3.5.2; arXiv 2511.10909 (MMA-Sim)",
                ),
                Line(
                    "sums of both gradients promoted to float32 every 128 terms",
                    "TransformerEngine, use_split_accumulator of dgrad and wgrad; the 128 of arXiv 2412.19437, 3.3.2",
                ),
            ),
            ("sums of products that stay in bf16", ATTENTION),
        ),
        Preset(
            "b200",
            1,
            "NVIDIA B200, MXFP8",
            _b200,
            (
                Line(
                    "operands e4m3fn, a power-of-two scale for 32, rounded up; embeddings, norms and the head bf16",
                    "NVIDIA TransformerEngine, MXFP8BlockScaling; arXiv 2506.08027",
                ),
                Line("sums: 32 products aligned, 25 fraction bits, truncated to float32", "arXiv 2511.10909 (MMA-Sim)"),
            ),
            ("sums of products that stay in bf16", ATTENTION),
        ),
        Preset(
            "b200_fp4",
            1,
            "NVIDIA B200, NVFP4",
            _b200_fp4,
            (
                Line(
                    "operands nvfp4, gradients stochastic, a Hadamard transform for the weight gradient; the last 15 % "
                    "of the layers bf16",
                    "arXiv 2509.25149; NVIDIA TransformerEngine, NVFP4BlockScaling",
                ),
            ),
            ("sums in the tensor core: 64 products in four exact groups (arXiv 2511.10909)", ATTENTION),
        ),
        Preset(
            "mi250",
            1,
            "AMD MI250, fp16",
            _mi250,
            (
                Line("fp16 everywhere, with torch's loss scaling", "arXiv 1710.03740"),
                Line(
                    "subnormal operands of the backward pass are zero",
                    "AMD MIOpen, MI200 MFMA behavior specifics; pytorch#182952",
                ),
            ),
            (
                "the backward pass in bfloat16 of rocBLAS and MIOpen, where it is switched on",
                "flushed results, and sums in pairs",
                ATTENTION,
            ),
            "torch",
        ),
        Preset(
            "mi300",
            1,
            "AMD MI300X, FP8 with a scale for each tensor",
            _mi300,
            (
                Line(
                    "operands e4m3fnuz (largest 240), gradients e5m2fnuz: gfx942 has no other FP8",
                    "AMD ROCm, HIP FP8 numbers, supported devices",
                ),
                Line(
                    "a float32 scale of the tensor's own amax; all else bf16",
                    "TransformerEngine, Float8CurrentScaling(fp8_format=HYBRID), which AMD ships for ROCm",
                ),
            ),
            ("sums in the matrix core, whose alignment truncates toward minus infinity (arXiv 2511.10909)", ATTENTION),
        ),
        Preset(
            "tpu",
            1,
            "Google TPU, a float32 model",
            _tpu,
            (
                Line(
                    "operands of products bf16, to nearest even; sums and all else float32",
                    "Google Cloud TPU, Improve your model's performance with bfloat16",
                ),
                Line("no subnormals of bf16", "Google Cloud TPU, the same page: flushed in the conversion"),
            ),
            (
                "subnormals of float32, which are kept here",
                "numbers between half the least normal number and the least normal number are rounded up to it here, "
                "and flushed to zero there",
                WIDE_SUMS,
            ),
        ),
        Preset(
            "gaudi",
            1,
            "Intel Gaudi 2, FP8 with delayed scaling",
            _gaudi,
            (
                Line(
                    "operands e4m3 with IEEE's specials (largest 240), gradients e5m2",
                    "Gaudi 2's default exponent bias 7: SqueezeBits, Intel Gaudi #4 (FP8 Quantization); vllm-gaudi, "
                    "EXP_BIAS_SETS",
                ),
                Line(
                    "a scale for each tensor from the amaxes of earlier steps; all else bf16",
                    "Intel Gaudi, FP8 Training with Intel Gaudi Transformer Engine, recipe.DelayedScaling",
                ),
            ),
            (
                "the length of its history, which is not documented there: TransformerEngine's 1,024 is taken",
                WIDE_SUMS,
                ATTENTION,
            ),
        ),
        Preset(
            "cerebras",
            1,
            "Cerebras CS, CB16",
            _cerebras,
            (
                Line(
                    "16-bit numbers of 6 exponent and 9 mantissa bits everywhere; sums of products float32",
                    "Cerebras, docs.cerebras.net, Data Formats (CB16 half-precision; FP32 accumulations)",
                ),
                Line("dynamic loss scaling of its own", "cerebras.pytorch.amp.GradScaler"),
            ),
            (WIDE_SUMS, ATTENTION),
            "cerebras",
        ),
    )
}
