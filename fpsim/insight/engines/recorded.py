"""Tokens and the rows of recorded tensors that are of them: whole batches, decoding steps, and flattened tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Entry", "Step", "Steps", "Value", "batched_steps", "flat_steps", "placed"]


class Entry(NamedTuple):
    """A tensor of a dump. read: gives it; None where the dump has statistics alone, which are in `statistics`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor] | None
    statistics: dict[str, float] | None = None


class Step(NamedTuple):
    """The tokens of one call of a model.

    places: of each token in the batch, sequence * length + position. ends: places of the last token of each sequence.
    shape: (batch, time) of the call; None for tokens in one row.
    """

    places: Tensor
    ends: Tensor
    shape: tuple[int, int] | None


class Steps(NamedTuple):
    """The tokens of a run. tokens, mask: (batch, time). positions: as the engine numbered them, or None."""

    tokens: Tensor
    mask: Tensor
    steps: list[Step]
    positions: Tensor | None


def batched_steps(ids: Sequence[Tensor], mask: Tensor | None = None, positions: Sequence[Tensor | None] = ()) -> Steps:
    """Calls with ids (batch, time) each, one after the other in time."""
    tokens = torch.cat([*ids], 1)
    batch, length = tokens.shape
    steps, begin = [], 0
    for x in ids:
        time = x.shape[1]
        places = torch.arange(batch)[:, None] * length + torch.arange(begin, begin + time)
        steps.append(Step(places.reshape(-1), places[:, -1], (batch, time)))
        begin += time
    kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None or mask.shape != tokens.shape else mask.bool()
    known = [x.expand(batch, -1) for x in positions if x is not None and x.dim() == 2]
    whole = torch.cat(known, 1) if known else None
    return Steps(tokens, kept, steps, whole if whole is not None and whole.shape == tokens.shape else None)


def flat_steps(ids: Sequence[Tensor], positions: Sequence[Tensor | None]) -> Steps | None:
    """Calls with the tokens of all sequences in one row, told apart by their positions, as vLLM and SGLang have them.

    A position 0 begins a sequence; another one goes on with the first sequence that is so long. None where positions
    fit no sequence, as with a cache of prefixes that an earlier request has filled.
    """
    sequences: list[list[int]] = []
    calls: list[list[tuple[int, int]]] = []
    for x, where in zip(ids, positions, strict=True):
        numbers = (
            where.tolist() if where is not None else range(sum(map(len, sequences)), sum(map(len, sequences)) + len(x))
        )
        rows: list[tuple[int, int]] = []
        used: set[int] = set()
        current = -1
        for token, position in zip(x.tolist(), numbers, strict=True):
            if position == 0:
                sequences.append([])
                current = len(sequences) - 1
            elif current < 0 or len(sequences[current]) != position:
                fitting = [i for i, s in enumerate(sequences) if len(s) == position and i not in used]
                if not fitting:
                    return None
                current = fitting[0]
            used.add(current)
            sequences[current].append(token)
            rows.append((current, position))
        calls.append(rows)
    length = max(map(len, sequences), default=0)
    if not length:
        return None
    tokens = torch.tensor([s + [0] * (length - len(s)) for s in sequences])
    mask = torch.tensor([[True] * len(s) + [False] * (length - len(s)) for s in sequences])
    steps = []
    for rows in calls:
        places = torch.tensor([s * length + t for s, t in rows])
        last = [i for i, (s, _) in enumerate(rows) if i + 1 == len(rows) or rows[i + 1][0] != s]
        steps.append(Step(places, places[last], None))
    numbered = torch.arange(length).expand(len(sequences), -1)
    return Steps(tokens, mask, steps, numbered)


@dataclass
class Value:
    """A recorded tensor with its tokens in rows.

    rows: (batch * time, ...); present: which of them were recorded. raw: the tensor as it is, where it has no such
    rows.
    """

    name: str
    rows: Tensor | None
    present: Tensor | None
    raw: Tensor | None

    def like(self, x: Tensor, tokens: tuple[int, int]) -> tuple[Tensor, Tensor | None] | None:
        """The recorded numbers in the shape of a model's tensor, and the rows that they have; None if they do not fit.

        The rows are None for a tensor that has none for tokens, of which everything is compared.
        """
        n = tokens[0] * tokens[1]
        if self.rows is not None and is_of_rows(x, tokens):
            rest = x.shape[2:] if x.shape[:2] == tokens else x.shape[1:]
            if self.rows.shape[1:] == rest:
                return self.rows.reshape(x.shape), self.present
            if self.rows[0].numel() == rest.numel():  # heads apart, or together
                return self.rows.reshape(n, *rest).reshape(x.shape), self.present
        if self.raw is not None and self.raw.shape == x.shape:
            return self.raw, None
        return None

    @property
    def words(self) -> str:
        """Its shape, for a report."""
        if self.rows is not None:
            return f"it has {tuple(self.rows.shape[1:])} for each token"
        return "it has other shapes in each step" if self.raw is None else f"it is {tuple(self.raw.shape)}"

    def part(self, begin: int, size: int) -> Value:
        """Some of the last axis, as of products that an engine has fused."""
        assert self.rows is not None
        return Value(self.name, self.rows[..., begin : begin + size], self.present, None)


def is_of_rows(x: Tensor, tokens: tuple[int, int]) -> bool:
    """Whether a model's tensor has a row for each token."""
    return x.shape[:2] == tokens or x.shape[:1] == (tokens[0] * tokens[1],)


def placed(name: str, calls: Sequence[tuple[Step, Tensor]], steps: Steps) -> Value:
    """Tensors of one path of a module, with the step of each, put where their tokens are."""
    batch, length = steps.tokens.shape
    raw = calls[0][1] if len(calls) == 1 else None
    found = [_rows(step, x, steps) for step, x in calls]
    if any(part is None for part in found):
        return Value(name, None, None, raw)
    parts: list[Any] = [part for part in found if part is not None]
    rest = parts[0][1].shape[1:]
    if any(x.shape[1:] != rest for _, x in parts):
        return Value(name, None, None, raw)
    rows = parts[0][1].new_zeros((batch * length, *rest))
    present = torch.zeros(batch * length, dtype=torch.bool)
    for places, x in parts:
        rows[places] = x
        present[places] = True
    return Value(name, rows, present, raw)


def _rows(step: Step, x: Tensor, steps: Steps) -> tuple[Tensor, Tensor] | None:
    """The places and the rows of a tensor of one call; None where its axes are not of tokens."""
    n, shape = len(step.places), step.shape
    if shape is not None and x.dim() >= 2:
        if tuple(x.shape[:2]) == shape:
            return step.places, x.reshape(n, *x.shape[2:])
        if x.shape[0] == shape[0] and x.shape[1] < shape[1] and x.dim() == 3:  # of the last tokens, as logits are
            return step.places.view(shape)[:, -x.shape[1] :].reshape(-1), x.reshape(-1, *x.shape[2:])
        if x.shape[0] == 1 and x.shape[1] == shape[1]:  # one for all sequences, as angles of positions
            return step.places, x.expand(*shape, *x.shape[2:]).reshape(n, *x.shape[2:])
    if x.shape[:1] == (n,):
        return step.places, x
    if x.dim() >= 2 and x.shape[:2] == (1, n) and shape is None:
        return step.places, x[0]
    valid = steps.mask.reshape(-1)
    if len(steps.steps) == 1 and x.shape[:1] == (int(valid.sum()),):  # flattened, without padding
        return valid.nonzero().squeeze(1), x
    if x.shape[:1] == (len(step.ends),) and x.dim() == 2:
        return step.ends, x
    return None
