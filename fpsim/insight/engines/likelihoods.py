"""Compare two engines on the same tokens: log-probabilities, divergences, intervals, and choices of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.checks import shown

__all__ = [
    "Choices",
    "Decision",
    "Figures",
    "Likelihoods",
    "NotNumbersError",
    "Replayed",
    "batches_of",
    "change_of",
    "compared",
    "compared_choices",
    "has_known_parts",
    "ids_told",
    "interval",
    "likelihoods",
    "read_batch",
    "require_vocabulary",
]

BOOTSTRAPS = 1000
MOST_EXPONENT = 709.0  # above it, exp is beyond float64


class NotNumbersError(ValueError):
    """Raised if logits are NaN."""


class Likelihoods(NamedTuple):
    """Log-probabilities of one engine.

    chosen: the log-probabilities of the next tokens in the batch, (batch, time - 1) float64.
    all: the log-probabilities of the whole vocabulary at the places of `valid`, (places, vocabulary) float64.
    valid: places where neither the token nor the next one is padding, (batch, time - 1) bool.
    top: the likeliest token at each place of `valid`.
    """

    chosen: Tensor
    all: Tensor
    valid: Tensor
    top: Tensor


class Figures(NamedTuple):
    """Distances of one engine's log-probabilities from another's, over all places with a next token.

    The probability of the chosen token is p in a (the trainer) and q in b (the rollout), and r = p / q.

    mean_dlogp, largest_dlogp: the mean and the largest |log p - log q|.
    k1, k3: the estimators of KL(q | p) from tokens that q has sampled: the means of -log r and of r - 1 - log r
        (Schulman 2020).
    kl: the mean of KL(p | q) over the whole vocabulary, in nats.
    outside: the share of places whose r is outside of 1 - eps to 1 + eps.
    perplexities: the perplexity of a, and that of b.
    flips: the share of places whose likeliest token differs.
    by_sequence: the sum of the KL of each sequence, and the number of its places: (batch, 2).
    by_position: the mean |log p - log q| at each position; NaN where all tokens are padding.
    at_position: the number of places at each position.
    """

    mean_dlogp: float
    largest_dlogp: float
    k1: float
    k3: float
    kl: float
    outside: float
    perplexities: tuple[float, float]
    flips: float
    by_sequence: np.ndarray[Any, Any]
    by_position: np.ndarray[Any, Any]
    at_position: np.ndarray[Any, Any]


def batches_of(batch: Any) -> list[Any]:
    """Return the batches, each as the arguments of one call of a model."""
    if isinstance(batch, Tensor | tuple | list | Mapping):
        return [batch]
    if not isinstance(batch, Iterable):
        raise TypeError(f"batch={shown(batch)}. Expected: ids, a tuple, a mapping, or an iterable of such.")
    found = [*batch]
    if not found:
        raise ValueError("The iterable of batches is empty. Expected: at least one batch.")
    return found


def read_batch(batch: Any, tokens: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Return the ids of a batch, and a bool mask that is true where they are no padding, (batch, time) each.

    tokens, mask: functions of the batch. None takes `input_ids` and `attention_mask` of a mapping. For any other batch,
        None takes the first argument as ids, without padding.
    Raises TypeError for a batch without ids, ValueError for shapes that do not fit.
    """
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    named = batch if isinstance(batch, Mapping) else {}
    ids = tokens(batch) if tokens is not None else named.get("input_ids", first)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dim() != 2:
        raise TypeError(
            f"The batch {shown(batch)} has no ids of tokens. Expected: an integer tensor (batch, time), a mapping with "
            f"'input_ids', or tokens=lambda batch: ..., which returns one."
        )
    kept = mask(batch) if mask is not None else named.get("attention_mask")
    try:
        valid = torch.ones_like(ids, dtype=torch.bool) if kept is None else torch.as_tensor(kept).bool()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"The mask is {shown(kept)}. Expected: a tensor (batch, time), True where a token is no padding."
        ) from None
    if valid.shape != ids.shape:
        raise ValueError(
            f"The mask has shape {tuple(valid.shape)}, and the ids {tuple(ids.shape)}. Expected: one for each token, "
            f"True where it is no padding."
        )
    if not bool((valid[:, :-1] & valid[:, 1:]).any()):
        raise ValueError(
            f"The batch has ids of shape {tuple(ids.shape)}, and no token behind another that is no padding: nothing "
            f"is predicted. Expected: sequences of at least two tokens."
        )
    return ids, valid


@contextmanager
def ids_told(model: nn.Module, ids: Tensor, side: str) -> Iterator[None]:
    """Turn the IndexError of an embedding that has no row for some of the ids into a ValueError that says so."""
    try:
        yield
    except IndexError as error:
        low, high = int(ids.min()), int(ids.max())
        # The embedding of tokens is taken to be the largest one. Ids below its size have not caused the error.
        rows = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=high + 1)
        if low >= 0 and high < rows:
            raise
        raise ValueError(
            f"The ids go from {low} to {high}, and the embedding of {side} has {rows} rows. Expected: ids from 0 to "
            f"{rows - 1}, as this model's own tokenizer gives them."
        ) from error


def has_known_parts(batch: Any, ids: Tensor) -> bool:
    """Return True if it is known which of a batch's numbers belong to which sequence.

    It is not known for a cache of keys and values, nor for a tensor of one axis, such as positions, in a batch with as
    many sequences as tokens in a sequence.
    """
    if not isinstance(batch, Mapping):
        return isinstance(batch, Tensor)
    is_square = len(ids) == ids.shape[1]
    return all(
        not (is_square and x.dim() == 1 and len(x) == len(ids))
        if isinstance(x, Tensor)
        else x is None or isinstance(x, bool | int | float | str)
        for x in batch.values()
    )


def likelihoods(
    output: Any, ids: Tensor, valid: Tensor, logits: Callable[[Any], Tensor] | None, side: str
) -> Likelihoods:
    """Return the log-probabilities of a model's output. Raises ValueError for logits of another shape, and for NaN."""
    named = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
    found = logits(output) if logits is not None else named
    found = found[0] if isinstance(found, tuple | list) and found else found
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != ids.shape or found.shape[-1] < 2:
        what = tuple(found.shape) if isinstance(found, Tensor) else shown(found)
        raise ValueError(
            f"The output of {side} has logits {what}. Expected: (batch, time, vocabulary) = {tuple(ids.shape)} + "
            f"(vocabulary,), in output.logits, as the output itself, or by logits=lambda output: ..."
        )
    both = valid[:, :-1] & valid[:, 1:]
    # Logarithms are in float64: the KL of two engines at the floor is about 1e-12, which float32 does not resolve.
    wide = found[:, :-1].double()
    if bool(wide[both].isnan().any()):
        raise NotNumbersError(
            f"The logits of {side} have NaN at places that are no padding. Expected: numbers. fpsim.why(model, step) "
            f"or fpsim.diagnose says where a model becomes NaN."
        )
    logs = wide.log_softmax(-1)
    # Padding may have ids outside of the vocabulary, such as -100. It counts nowhere.
    following = ids[:, 1:].masked_fill(~both, 0)
    if int(following.max()) >= wide.shape[-1] or int(following.min()) < 0:
        raise ValueError(
            f"The ids go from {int(following.min())} to {int(following.max())}, and the logits of {side} are of "
            f"{wide.shape[-1]} tokens. Expected: ids of the vocabulary that logits=lambda output: ... leaves."
        )
    chosen = logs.gather(-1, following.unsqueeze(-1).to(logs.device)).squeeze(-1)
    return Likelihoods(chosen, logs[both], both, wide[both].argmax(-1))


def require_vocabulary(a: Likelihoods, b: Likelihoods) -> None:
    """Raise ValueError for two engines with vocabularies of different sizes."""
    sizes = [x.all.shape[-1] for x in (a, b)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"a has logits of {sizes[0]} tokens, and b of {sizes[1]}. Expected: one vocabulary. If one of them is "
            f"padded, cut it off: logits=lambda output: output.logits[..., :{min(sizes)}]."
        )


def change_of(a: Likelihoods, b: Likelihoods) -> Tensor:
    """Return log p - log q of the chosen tokens, at the places of a's `valid`."""
    return torch.where(a.chosen == b.chosen, 0.0, a.chosen - b.chosen)[a.valid]  # -inf in both is no difference


def compared(a: Likelihoods, b: Likelihoods, eps: float) -> Figures:
    """Return the figures of b compared with a."""
    valid = a.valid
    change = change_of(a, b)
    ratio = change.exp()
    p = a.all.exp()
    kl = torch.where(p > 0, p * (a.all - b.all), 0.0).sum(-1)
    places = torch.zeros(valid.shape, dtype=torch.float64)
    places[valid] = kl
    counts = valid.double()
    distance = torch.zeros_like(places)
    distance[valid] = change.abs()
    n = max(int(valid.sum()), 1)
    return Figures(
        mean_dlogp=float(change.abs().sum()) / n,
        largest_dlogp=float(change.abs().max()) if change.numel() else 0.0,
        k1=float(-change.sum()) / n,
        k3=float((ratio - 1 - change).sum()) / n,
        kl=float(kl.sum()) / n,
        outside=float(((ratio - 1).abs() > eps).double().sum()) / n,
        perplexities=tuple(_exp(-float(x.chosen[valid].sum()) / n) for x in (a, b)),  # type: ignore[arg-type]
        flips=float((a.top != b.top).double().sum()) / n,
        by_sequence=torch.stack([places.sum(1), counts.sum(1)], 1).numpy(),
        by_position=(distance.sum(0) / counts.sum(0)).numpy(),
        at_position=counts.sum(0).numpy(),
    )


def _exp(x: float) -> float:
    return math.exp(x) if x < MOST_EXPONENT else math.inf


def joined(parts: list[Figures]) -> Figures:
    """Return the figures of several batches together, weighted by their places."""
    if len(parts) == 1:
        return parts[0]
    weights = np.array([max(part.by_sequence[:, 1].sum(), 1) for part in parts])

    def mean(of: Callable[[Figures], float]) -> float:
        return float(np.average([of(part) for part in parts], weights=weights))

    length = max(len(part.by_position) for part in parts)
    sums, counts = np.zeros(length), np.zeros(length)
    for part in parts:
        sums[: len(part.by_position)] += np.where(part.at_position > 0, part.by_position * part.at_position, 0.0)
        counts[: len(part.at_position)] += part.at_position
    return Figures(
        mean_dlogp=mean(lambda f: f.mean_dlogp),
        largest_dlogp=max(part.largest_dlogp for part in parts),
        k1=mean(lambda f: f.k1),
        k3=mean(lambda f: f.k3),
        kl=mean(lambda f: f.kl),
        outside=mean(lambda f: f.outside),
        perplexities=tuple(_exp(mean(lambda f, i=i: math.log(f.perplexities[i]))) for i in (0, 1)),  # type: ignore[arg-type,misc]
        flips=mean(lambda f: f.flips),
        by_sequence=np.concatenate([part.by_sequence for part in parts]),
        by_position=np.divide(sums, counts, out=np.full(length, np.nan), where=counts > 0),
        at_position=counts,
    )


def interval(part: np.ndarray[Any, Any], whole: np.ndarray[Any, Any], seed: int) -> tuple[float, float]:
    """Return the central 95 % of sum(part) / sum(whole) over sequences drawn with replacement.

    part, whole: sums by sequence.
    """
    n = len(part)
    if n < 2 or bool(np.isnan(part).any()):  # NaN comes from a hybrid of two engines that computes NaN
        return math.nan, math.nan
    # Sequences are drawn rather than tokens, because the errors of tokens in one sequence depend on one another.
    drawn = np.random.default_rng(seed).integers(0, n, (BOOTSTRAPS, n))
    totals = whole[drawn].sum(1)
    shares = part[drawn].sum(1) / np.where(totals == 0, np.nan, totals)
    low, high = np.nanquantile(shares, [0.025, 0.975])
    return float(low), float(high)


_TOPK = (torch.topk, Tensor.topk)
_ARGMAX = (torch.argmax, Tensor.argmax)


class Decision:
    """One call of topk or argmax over the last axis: its indices (rows, k), and the margin of the kth to the next."""

    def __init__(self, indices: Tensor, margin: Tensor) -> None:
        self.indices, self.margin, self.module = indices, margin, ""


class Choices(TorchFunctionMode):
    """Records the decisions of a run, in order."""

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
    """Replaces the chosen indices of this run by those of another run; the values at these indices are this run's."""

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
    """Return a row for each decision: the share of rows that differ, and a's median margin in these and in all rows."""
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
