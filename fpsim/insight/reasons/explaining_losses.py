"""Explain inf or NaN from a softmax, a mean, a loss, a normalisation, a determinant or a gamma function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.operations import Kind, row_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Glance, first_index
from fpsim.insight.reasons.event import Event

__all__ = [
    "Look",
    "classes_of",
    "of_alignment",
    "of_determinant",
    "of_emptiness",
    "of_normalisation",
    "of_poles",
    "of_softmax",
    "of_target",
]


@dataclass(frozen=True)
class Look:
    """An operation whose result is not finite, for the functions that explain it.

    Each of these functions is called with an event and a look. A function that knows the reason writes kind, words and
    remedy into the event, and returns True.

    operands: the tensors of floating-point numbers among the arguments, in the order of `operation.sources`.
    values, options: the positional and keyword arguments of the call.
    no_number: a mask of the elements that are not finite. numbers: a glance at the result.
    """

    operation: Operation
    operands: list[Tensor]
    values: tuple[Any, ...]
    options: dict[str, Any]
    no_number: Tensor
    numbers: Glance

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.values, *self.options.values())

    @property
    def read(self) -> Iterator[tuple[Operation | None, Tensor]]:
        """Yield pairs: the operation that computed an operand, and the operand."""
        return zip(self.operation.sources, self.operands, strict=False)


def classes_of(name: str, x: Tensor, arguments: tuple[Any, ...], options: Any) -> int:
    """Return the dimension over which a softmax or a cross entropy sums."""
    if row_of(name).kind is Kind.CROSS_ENTROPY:
        return 1 if x.dim() > 1 else 0
    dim = options.get("dim", arguments[1] if len(arguments) > 1 else None)
    return dim if isinstance(dim, int) and not isinstance(dim, bool) and name.endswith("softmax") else -1


def of_softmax(event: Event, look: Look) -> bool:
    """Explain the NaN of a softmax or an attention by fully masked rows."""
    if look.name == "multi_head_attention_forward":
        return _of_masks(event, look.options)
    if look.name not in ("softmax", "log_softmax", "scaled_dot_product_attention") or not look.operands:
        return False
    x = look.operands[0]
    # The mask of an attention is its fourth argument; the scores that a softmax reads are already masked.
    if look.name == "scaled_dot_product_attention":
        mask = look.options.get("attn_mask", look.arguments[3] if len(look.arguments) > 3 else None)
        if not isinstance(mask, Tensor):
            return False
        # True shows a position here; in multi_head_attention_forward True hides it.
        shut = ~mask if mask.dtype is torch.bool else mask == -torch.inf
    else:
        shut = x == -torch.inf
    rows = shut.all(classes_of(look.name, x, look.arguments, look.options))
    if not bool(rows.any()):
        return False
    event.kind, n = "row masked wholly", int(rows.sum())
    event.why.append(
        f"{n} of {rows.numel()} rows hold nothing but -inf (first at {first_index(rows) or '0'}); their softmax is NaN."
    )
    event.remedy = "mask"
    return True


def _of_masks(event: Event, options: Any) -> bool:
    """Explain NaN by sequences that are only padding, or by positions that may attend to no position."""
    for name, words in (("key_padding_mask", "sequences are padding only"), ("attn_mask", "positions may see none")):
        mask = options.get(name)
        if not isinstance(mask, Tensor):
            continue
        rows = (mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1)
        if bool(rows.any()):
            event.kind, event.remedy, n = "row masked wholly", "mask", int(rows.sum())
            event.why.append(f"{n} of {rows.numel()} {words}, by {name} (first at {first_index(rows) or '0'}).")
            return True
    return False


def of_emptiness(event: Event, look: Look) -> bool:
    """Explain the NaN of a mean, a deviation or a cross entropy of no numbers, or of a single number."""
    kind = row_of(look.name).kind
    if kind is Kind.MEAN and look.operands and look.operands[0].numel() == 0:
        event.kind = "mean of nothing"
        event.why.append(f"It read a tensor without elements, of shape {tuple(look.operands[0].shape)}.")
        event.remedy = "skip"
        return True
    # If there are as many results as numbers in the operand, each deviation is that of a single number.
    if kind is Kind.DEVIATION and look.operands and look.operands[0].numel() == look.no_number.numel():
        event.kind = "variance of one number"
        event.why.append(
            f"It read a shape of {tuple(look.operands[0].shape)}, and divides by the count less one, which is 0."
        )
        event.remedy = "correction"
        return True
    # Targets that are probabilities have no ignored index.
    targets = [a for a in look.arguments if isinstance(a, Tensor) and not a.is_floating_point()]
    if kind is Kind.CROSS_ENTROPY and targets:
        ignored = look.options.get("ignore_index", -100)
        if bool((targets[0] == ignored).all()):
            event.kind = "mean of nothing"
            event.why.append(f"All {targets[0].numel()} targets are {ignored}, which is ignored: 0 / 0.")
            event.read.append(("targets", f"{targets[0].numel()} of {targets[0].numel()} ignored"))
            event.remedy = "skip"
            return True
    return False


def of_target(event: Event, look: Look) -> bool:
    """Explain the NaN or inf of a cross entropy by a mask that forbids the target, or by classes of weight 0."""
    if (
        row_of(look.name).kind is not Kind.CROSS_ENTROPY
        or len(look.arguments) < 2
        or not isinstance(look.arguments[1], Tensor)
    ):
        return False
    scores, targets, weight = look.arguments[0], look.arguments[1], look.options.get("weight")
    shut, classes = scores == -torch.inf, classes_of(look.name, scores, (), {})
    is_index = not targets.is_floating_point()
    counted = (
        targets != look.options.get("ignore_index", -100) if is_index else torch.ones_like(targets, dtype=torch.bool)
    )
    if is_index and isinstance(weight, Tensor) and not bool(weight[targets[counted]].any()):
        event.kind, event.remedy = "mean of nothing", "skip"
        event.why.append(f"The classes of all {int(counted.sum())} targets have weight 0: 0 / 0.")
        event.read.append(("weight", f"{int((weight == 0).sum())} of {weight.numel()} zero"))
        return True
    rows = shut.all(classes)
    if look.name.startswith("cross_entropy") and bool(rows.any()):
        event.kind, event.remedy, n = "row masked wholly", "mask", int(rows.sum())
        event.why.append(f"{n} of {rows.numel()} rows hold nothing but -inf (first at {first_index(rows) or '0'}).")
        return True
    if not bool(shut.any()):
        return False
    if is_index:
        # gather refuses an ignored index such as -100.
        asked = shut.gather(classes, targets.where(counted, 0).unsqueeze(classes)).squeeze(classes) & counted
    else:
        asked = (shut & (targets != 0)).any(classes)
    smoothing = look.options.get("label_smoothing", 0.0)
    if bool(asked.any()):
        event.why.append(f"The target is masked with -inf in {int(asked.sum())} of {asked.numel()} rows.")
    elif smoothing:
        event.why.append(
            f"{int(shut.sum())} of {shut.numel()} scores are -inf, and label_smoothing={smoothing:g} takes a share of "
            f"the logarithm of each."
        )
    else:
        return False
    event.kind, event.remedy = "logarithm of zero", "target"
    return True


def of_alignment(event: Event, look: Look) -> bool:
    """Explain the inf of a CTC loss by a target that has more labels than its input has frames."""
    if look.name != "ctc_loss" or len(look.arguments) < 4:
        return False
    frames, lengths = (torch.as_tensor(a).flatten().tolist() for a in look.arguments[2:4])
    targets = _split(torch.as_tensor(look.arguments[1]), lengths)
    # Between two equal labels CTC needs a blank, which is one more frame; else it would merge them.
    needed = [len(t) + sum(a == b for a, b in pairwise(t)) for t in targets]
    short = [i for i, (n, f) in enumerate(zip(needed, frames, strict=True)) if n > f]
    if not short:
        return False
    event.kind, event.remedy, i = "target longer than its input", "alignment", short[0]
    event.why.append(
        f"{len(short)} of {len(needed)} samples have no alignment, and a loss of inf: sample {i} has {frames[i]} "
        f"frames and {lengths[i]} labels, which need {needed[i]} (one more for each repeated label)."
    )
    event.read.append(("frames", f"{min(frames)} to {max(frames)}"))
    event.read.append(("labels", f"{min(lengths)} to {max(lengths)}"))
    return True


def _split(targets: Tensor, lengths: list[int]) -> list[list[int]]:
    """Return the labels of each sample, from padded rows or from one row with all labels."""
    if targets.dim() == 1:
        return [part.tolist() for part in targets[: sum(lengths)].split(lengths)]
    return [row[:n].tolist() for row, n in zip(targets, lengths, strict=True)]


def of_normalisation(event: Event, look: Look) -> bool:
    """Explain the NaN of a normalisation by a division by a deviation of 0, or by a negative variance."""
    if not all(bool(x.isfinite().all()) for x in look.operands):
        return False
    row = row_of(look.name)
    if row.name == "weight_norm" and len(look.arguments) > 2:
        v, dim = look.arguments[0], look.arguments[2]
        zeros = (v == 0).all(dim=[i for i in range(v.dim()) if i != dim]) if dim >= 0 else (v == 0).all()
        if not bool(zeros.any()):
            return False
        event.kind = "division by zero"
        event.why.append(f"{int(zeros.sum())} of {zeros.numel()} directions are 0, and so is their norm: 0 / 0.")
        return True
    if row.kind is not Kind.NORMALISATION or not row.adds:
        return False
    eps, variance = look.options.get("eps"), look.arguments[2] if len(look.arguments) > 2 else None
    # Running statistics are used in eval mode only.
    if row.name != "batch_norm" or look.options.get("training") or not isinstance(variance, Tensor):
        variance = None
    if variance is not None and bool((variance + (eps or 0.0) < 0).any()):
        event.kind = "root of a negative number"
        n, low = int((variance < 0).sum()), float(variance.min())
        event.why.append(f"{n} of {variance.numel()} running variances are negative, down to {low:.3g}.")
        return True
    if eps != 0 or not look.numbers.nan:
        return False
    event.kind, event.constant, event.remedy = "division by zero", 0.0, "eps"
    event.why.append(f"{event.count} of {event.of} are divided by a deviation of 0, and eps, which is added, is 0.")
    return True


def of_determinant(event: Event, look: Look) -> bool:
    """Explain the logarithm of a determinant that is 0, or negative."""
    if (
        row_of(look.name).kind is not Kind.LOG_DETERMINANT
        or not look.operands
        or not bool(look.operands[0].isfinite().all())
    ):
        return False
    # logdet returns -inf for a determinant of 0, and NaN for a negative one.
    singular = look.numbers.minus
    event.kind = "logarithm of zero" if singular else "logarithm of a negative number"
    which = "0: it is singular" if singular else "negative"
    event.why.append(f"The determinant of {singular or event.count} of {event.of} matrices is {which}.")
    return True


def of_poles(event: Event, look: Look) -> bool:
    """Explain the inf or NaN of a gamma function, which has no value at 0, -1, -2, ..."""
    if row_of(look.name).kind is not Kind.GAMMA or not look.operands:
        return False
    x, row = look.operands[-1], row_of(look.name)
    degree = next((int(a) for a in look.arguments if isinstance(a, int)), 1) if row.name == "mvlgamma" else 1
    # A multivariate gamma function is a product of gamma functions at x, x - 1/2, x - 1, ...
    shifted = torch.stack([x - i / 2 for i in range(degree)])
    poles = ((shifted <= 0) & (shifted == shifted.floor()) & shifted.isfinite()).any(0)
    if not bool(poles.any()):
        return False
    event.kind = "outside of its domain"
    event.why.append(f"{int(poles.sum())} of {x.numel()} numbers that it read are 0 or negative whole ones: a pole.")
    return True
