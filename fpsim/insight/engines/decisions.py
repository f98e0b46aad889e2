"""Decisions: which experts and tokens engines choose, at which margin the choices differ, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Choices", "Decision", "Replayed", "compared_choices"]

_TOPK = (torch.topk, Tensor.topk)
_ARGMAX = (torch.argmax, Tensor.argmax)


class Decision:
    """One call of topk or argmax over the last axis: (rows, k) indices, and by how much the last was ahead."""

    def __init__(self, indices: Tensor, margin: Tensor) -> None:
        self.indices, self.margin, self.module = indices, margin, ""


class Choices(TorchFunctionMode):
    """Notes the decisions of a run, in their order."""

    def __init__(self, made: list[Decision], where: Callable[[], str]) -> None:
        super().__init__()
        self._made, self._where = made, where

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK or func in _ARGMAX:
            found = _decision(func, args, kwargs or {}, out)
            if found is not None:
                found.module = self._where()
                self._made.append(found)
        return out


def _decision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Decision | None:
    x = args[0]
    named = dict(zip(("input", "k", "dim") if func in _TOPK else ("input", "dim"), args)) | kwargs
    dim = named.get("dim", -1 if func in _TOPK else None)
    if dim is None or not x.dim() or dim % x.dim() != x.dim() - 1:
        return None
    k = int(named.get("k", 1)) if func in _TOPK else 1
    if k >= x.shape[-1]:
        return None
    rows = x.detach().double().reshape(-1, x.shape[-1])
    ahead = rows.topk(k + 1, -1).values
    indices = (out[1] if func in _TOPK else out).detach().reshape(len(rows), -1)
    return Decision(indices.clone(), ahead[:, k - 1] - ahead[:, k])


class Replayed(TorchFunctionMode):
    """Gives the choices of another run, with this one's values at them."""

    def __init__(self, made: Iterator[Decision]) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (func not in _TOPK and func not in _ARGMAX) or _decision(func, args, kwargs or {}, out) is None:
            return out
        decision = next(self._made, None)
        if decision is None:
            return out
        made = decision.indices
        own = out[1] if func in _TOPK else out
        if made.numel() != own.numel():
            return out
        indices = made.view(own.shape).to(own.device)
        return torch.return_types.topk((args[0].gather(-1, indices), indices)) if func in _TOPK else indices


def compared_choices(a: list[Decision], b: list[Decision]) -> list[dict[str, Any]]:
    """A row for each decision of both runs: the share of rows that differ, and the margins in a of those and of all."""
    rows = []
    for x, y in zip(a, b):
        if x.indices.shape != y.indices.shape:
            continue
        differs = (x.indices.sort(-1).values != y.indices.sort(-1).values).any(-1)
        margin = float(x.margin[differs].median()) if bool(differs.any()) else None
        rows.append(
            {
                "module": x.module,
                "rows": len(differs),
                "flips": float(differs.double().mean()),
                "margin_of_flips": margin,
                "margin": float(x.margin.median()),
            }
        )
    return rows
