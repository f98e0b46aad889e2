"""Statistics of every product of a gradient's element and a weight's, for the rule element_wise_range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fpsim.scaling import AMAX, AMIN, Moments

__all__ = ["product_moments"]

MOST_PRODUCTS = 1 << 27  # 1 GiB in float64


def product_moments(gradient: Tensor, other: Tensor, channel: tuple[int, int], share: float | None) -> Tensor:
    """AMIN and AMAX of all products of an element of `gradient` and one of `other` in the same channel, as `Moments`.

    gradient: of the operation's output, any shape.
    other: the other operand, any shape.
    channel: the dimension of `gradient` and the one of `other` along which only equal indices are multiplied.
    share: the share of the products, largest first, of which AMIN is the smallest; None for all, without forming them.
    Raises ValueError where a share was given with more than 2**27 products.
    """
    moments = torch.zeros(len(Moments._fields), dtype=torch.float64, device=gradient.device)
    if gradient.numel() == 0 or other.numel() == 0:
        return moments
    g, w = (  # by channel; a vector has one element in each
        x.detach().abs().double().movedim(dimension, 0).unsqueeze(-1).flatten(1)
        for x, dimension in ((gradient, channel[0]), (other, channel[1]))
    )
    if share is None:
        amin = torch.stack([t.masked_fill(~(t > 0), math.inf).amin(1) for t in (g, w)]).prod(0).amin()
        amax = (g.amax(1) * w.amax(1)).amax()
        amin = torch.where(amin < math.inf, amin, 0.0)
    else:
        count = g.numel() * w.shape[1]
        if count > MOST_PRODUCTS:
            raise ValueError(
                f"max_rescue_ratio was given for a layer of {count} products. Expected: up to {MOST_PRODUCTS}. Choose "
                f"smaller layers with transforms=, or leave max_rescue_ratio out."
            )
        products = (g[:, :, None] * w[:, None, :]).flatten().sort(descending=True).values
        kept = (products.count_nonzero().double() * share).ceil().clamp(min=1)
        amax, amin = products[0], products.take(kept.long() - 1)
    moments[AMAX], moments[AMIN] = amax, amin
    return moments
