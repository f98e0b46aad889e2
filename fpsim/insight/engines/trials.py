"""Small changes of a model, tried on the places at which a dump differs: which one gives what was recorded?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fpsim.insight.engines.kinds import FORMAT, FORMULA, ROUNDING, STATE
from fpsim.insight.engines.remedies import changed_policies
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import dequantize, quantize
from fpsim.policies.policy import Policy
from fpsim.policies.products import Products

__all__ = ["Trial", "tried_on"]

Locals = Callable[[nn.Module, bool], dict[str, float]]
EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
NAMES_OF_EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "layer_norm_epsilon")
FAR = 4.0  # times closer: what a trial has to leave at most
CLOSE = 1.5  # times the best: an earlier trial, which is simpler, is taken


class Trial(NamedTuple):
    """A change that was tried at a place. left: how far it is apart with it."""

    kind: str
    words: str
    left: float


def _roles(fmt: str) -> dict[str, Any]:
    return {"weight": fmt, "activation": fmt}


def _products(x: str | None, w: str | None) -> dict[str, Any]:
    return {"products": Products(fprop=(x, w))}


# In the order of how simple they are.
POLICIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (ROUNDING, "results of products in bfloat16", {"products": Products(output="bf16")}),
    (ROUNDING, "bfloat16", _roles("bf16")),
    (ROUNDING, "float16", _roles("fp16")),
    (FORMAT, "weights in E4M3, a scale for each tensor", _products(None, "e4m3fn per tensor fp32")),
    (FORMAT, "weights in E4M3, a scale for each channel", _products(None, "e4m3fn per row fp32")),
    (FORMAT, "weights in E4M3 without a scale", _products(None, "e4m3fn")),
    (FORMAT, "weights in INT8, a scale for each channel", _products(None, "int8 per row fp32")),
    (FORMAT, "weights in INT4, a scale for each 32", _products(None, "int4 per 32 fp32")),
    (FORMAT, "weights in NVFP4", _products(None, "nvfp4")),
    (FORMAT, "weights in MXFP4", _products(None, "mxfp4")),
    (FORMAT, "E4M3 without scales", _products("e4m3fn", "e4m3fn")),
    (FORMAT, "E4M3, a scale for each tensor", _products("e4m3fn per tensor fp32", "e4m3fn per tensor fp32")),
    (FORMAT, "E4M3, a scale for each token and channel", _products("e4m3fn per row fp32", "e4m3fn per row fp32")),
    (FORMAT, "E4M3 in tiles of 1 x 128 and 128 x 128", _products("e4m3fn per 1x128 fp32", "e4m3fn per 128x128 fp32")),
    (FORMAT, "INT8, a scale for each token and channel", _products("int8 per row fp32", "int8 per row fp32")),
    (FORMAT, "MXFP8", _products("mxfp8_e4m3", "mxfp8_e4m3")),
    (FORMAT, "NVFP4", _products("nvfp4", "nvfp4")),
    (FORMAT, "MXFP4", _products("mxfp4", "mxfp4")),
    (STATE, "keys and values in E4M3", {"cache": "e4m3fn"}),
    (STATE, "keys and values in E4M3, a scale for each token and head", {"cache": "e4m3fn per row fp32"}),
    (STATE, "keys and values in E5M2", {"cache": "e5m2"}),
    (STATE, "keys and values in INT8, a scale for each token and head", {"cache": "int8 per row fp32"}),
    (STATE, "keys and values in bfloat16", {"cache": "bf16"}),
)


def tried_on(
    model: nn.Module, before: Mapping[str, float], enough: Mapping[str, float], locals_of: Locals
) -> dict[str, Trial]:
    """The change that explains each place, where one does.

    before: how far each place is apart. enough: from where on it is another order of sums, or another kernel.
    locals_of: how far the places are apart with a model; also whether it is the model itself, changed for the moment.
    """
    found: dict[str, list[Trial]] = {name: [] for name in before}
    for kind, words, left in _trials(model, before, locals_of, found, enough):
        for name, now in left.items():
            if now < before[name] / FAR:
                found[name].append(Trial(kind, words, now))
    chosen: dict[str, Trial] = {}
    for name, trials in found.items():
        best = min((trial.left for trial in trials), default=0.0)
        first = next((t for t in trials if t.left <= max(CLOSE * best, enough[name])), None)
        if first is not None:
            chosen[name] = first
    return chosen


def _trials(
    model: nn.Module, before: Mapping[str, float], locals_of: Locals, found: Mapping[str, list[Trial]],
    enough: Mapping[str, float],
) -> Iterator[tuple[str, str, dict[str, float]]]:  # fmt: skip
    """Changes that can be made of a model, each with what is left; as long as a place is not explained."""

    def is_done() -> bool:
        return all(any(t.left <= enough[name] for t in found[name]) for name in before)

    for kind, words, changed in _of_code(model, before):
        with suppress(Exception):  # a change that a model's code does not take explains nothing
            yield kind, words, locals_of(changed, False)
        if is_done():
            return
    is_emulated = any(True for _ in emulated_forwards(model))
    for kind, words, fields in POLICIES:
        with suppress(Exception):
            if is_emulated:
                with changed_policies(model, lambda name, policy, fields=fields: replace(policy, **fields)):
                    left = locals_of(model, True)
            else:
                left = locals_of(quantize(model, Policy(**fields)), False)
            yield kind, words, left
        if is_done():
            return


def _of_code(model: nn.Module, places: Iterable[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Copies of a model in other dtypes, and with other epsilons in its norms."""
    known = dict(model.named_modules())
    is_emulated = any(True for _ in emulated_forwards(model))
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if is_emulated:
        yield ROUNDING, "float32", dequantize(copy.deepcopy(model))
    else:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype not in dtypes:
                word = str(dtype).removeprefix("torch.")
                yield ROUNDING, word, copy.deepcopy(model).to(dtype)
    mine = {name: (known[name], word) for name in places for word in NAMES_OF_EPSILONS if _number(known[name], word)}
    for eps in EPSILONS if mine else ():
        changed = copy.deepcopy(model)
        inside = dict(changed.named_modules())
        is_other = False
        for name, (module, word) in mine.items():
            if getattr(module, word) != eps:
                setattr(inside[name], word, eps)
                is_other = True
        if is_other:
            yield FORMULA, f"an epsilon of {eps:g}", changed


def _number(module: nn.Module, word: str) -> bool:
    return isinstance(vars(module).get(word), float)
