"""Choose one gradient's scale: run a rule's kernels, and prepare their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ada_loss.layerwise.constants import Constants
from ada_loss.layerwise.options import Options
from ada_loss.layerwise.scale_kernels import (
    IF_UNKNOWN,
    SiteMode,
    delayed_scaling,
    factor_kernel,
    least_error_scale,
    meeting_scale,
    pass_scale_on,
    retain_last_informative,
    scale_to_max,
    smallest_sufficient_scale,
)
from ada_loss.layerwise.sites import GradientSite, IncomingScale, SiteState
from fpsim.scaling import Moments, RoundingSpec, amax_of, binades, log2_scale_limits, memory_of, on_device, rounded

__all__ = ["ScaleChooser"]

CANDIDATES = 4  # the number of scales among which Mse chooses
NO_OPERAND = (0.0,) * len(Moments._fields)  # moments that stand for a missing operand


class ScaleChooser:
    """Run the kernels of one rule.

    options: the settings, with the rule.
    constants: the cache of constant tensors.
    """

    def __init__(self, options: Options, constants: Constants) -> None:
        self._rule, self._constants = options.rule, constants
        self._predicts, self._init_log2_scale = options.predicts, options.init_log2_scale
        self._reuses_factors = options.update_every > 1
        if self._predicts:
            self._factor_kernel, self._parameters = factor_kernel(options.rule.core()), options.rule.parameters()

    def requested_scale(self, incoming: Sequence[IncomingScale], limits: Tensor, device: torch.device) -> Tensor:
        """Return the scale that a tensor's consumers request: the largest of their scales.

        With branches="original", different scales are combined as by Zhao et al. instead.

        incoming: the scales sent by the consumers; empty where the gradient enters the model.
        limits: the limits of the tensor's site.
        device: the device of the tensor's gradient.
        """
        if not incoming:
            return self._constants.tensor(torch.int64, device, self._init_log2_scale)
        # Consumers may have run on other streams. The allocator must not reuse the memory of their scales before the
        # scales are read here.
        for a in incoming:
            for sent in (a.log2_scale,) if a.amax is None else (a.log2_scale, a.amax):
                if sent.is_cuda:
                    sent.record_stream(torch.cuda.current_stream(sent.device))
        if any(a.log2_scale.device != device for a in incoming):  # a model over several GPUs
            # A copy to the CPU must not be asynchronous, because the scales are read at once.
            moved = partial(torch.Tensor.to, device=device, non_blocking=device.type != "cpu")
            incoming = [
                a._replace(log2_scale=moved(a.log2_scale), amax=None if a.amax is None else moved(a.amax))
                for a in incoming
            ]
        if len(incoming) == 1:
            return incoming[0].log2_scale
        # Scales are compared by identity: `Constants` represents equal scales by one tensor, and comparing values on a
        # GPU would make the host wait.
        scales = list({id(a.log2_scale): a.log2_scale for a in incoming}.values())
        if len(scales) == 1:
            return scales[0]
        rounded = [a for a in incoming if a.amax is not None]
        if rounded:  # branches="original": the amaxima decide at which of the branches' scales the sum fits
            out = self._constants.new_scale(device)
            amaxima = torch.cat([a.amax for a in rounded if a.amax is not None])
            on_device(meeting_scale, amaxima, torch.cat([a.log2_scale for a in rounded]), limits, out)
            return self._constants.written(out)
        if device.type == "cpu":
            return max(scales, key=lambda scale: memory_of(scale)[0])  # type: ignore[no-any-return]
        return torch.cat(scales).amax(0, keepdim=True)

    def scale_by_factor(
        self,
        log2_scale: Tensor,
        g: Tensor,
        w: Tensor | None,
        terms: int,
        limits: Tensor,
        mode: SiteMode,
        state: SiteState,
        index: int,
    ) -> Tensor:
        """Multiply a scale by the factor of one product. The factor is computed first if the mode requires it.

        log2_scale: the scale of the gradient.
        g: moments of the gradient as it enters the product.
        w: moments of the product's other operand, or None.
        terms: how many products add up to one element of the result.
        limits: the limits of the site where the result is rounded.
        mode: the mode of the gradient's site in this step.
        state: the state of the gradient's site, which caches the factor.
        index: the key of the cached factor.
        """
        constants, device = self._constants, log2_scale.device
        out = constants.new_scale(device)
        on_device(
            self._factor_kernel,
            log2_scale,
            g,
            constants.tensor(torch.float64, device, *NO_OPERAND) if w is None else w,
            constants.tensor(torch.int64, device, terms),
            limits,
            constants.tensor(torch.float64, device, *self._parameters),
            constants.tensor(torch.int64, device, mode),
            state.factor(index, device),
            out,
            state.chosen,
        )
        if mode >= IF_UNKNOWN and self._reuses_factors:
            state.copy_to_host(index)
        return constants.written(out)

    def fit_scale(
        self, site: GradientSite, gradient: Tensor, requested: Tensor, state: SiteState, has_amax: bool
    ) -> Tensor:
        """Return the scale at which a gradient is rounded, lowered until the gradient does not overflow.

        site: the site where the gradient is rounded.
        gradient: the gradient in its true size, before rounding.
        requested: the scale with which the gradient arrives, or the scale that the site holds.
        state: the state of the site.
        has_amax: whether the state's moments already contain the gradient's amax; if not, the amax is computed.
        """
        if not has_amax:
            amax_of(gradient, out=state.moments)
        limits = self._constants.limits_of(site.spec, site.dtype, gradient.device)
        out = self._constants.new_scale(gradient.device)
        if self._predicts or not site.is_selected:
            on_device(pass_scale_on, requested, state.moments, limits, out, state.chosen)
        else:
            self._measure_scale(Measured(site, gradient, requested, limits, state, out))
        return self._constants.written(out)

    def _measure_scale(self, measured: Measured) -> None:
        """Choose a scale by a rule that measures the gradient; the requested scale counts only for zero gradients."""
        MEASURES[self._rule.measures](self._rule, self._constants, measured)

    def scale_to_hold(self, requested: Tensor, state: SiteState) -> Tensor:
        """Return the scale to hold until the next update.

        This is the requested scale; but if the gradient is all zero or not finite, a scale that is held stays.
        """
        held = state.held_log2_scale
        if held is None:
            return requested
        out = self._constants.new_scale(requested.device)
        on_device(retain_last_informative, requested, held, state.moments, out)
        return self._constants.written(out)


class Measured(NamedTuple):
    """One gradient whose scale a rule measures.

    site: the site where the gradient is rounded.
    gradient: the gradient in its true size, before rounding.
    requested: the scale with which the gradient arrives.
    limits: the limits of the site.
    state: the state of the site.
    out: the tensor to which the chosen scale is written.
    """

    site: GradientSite
    gradient: Tensor
    requested: Tensor
    limits: Tensor
    state: SiteState
    out: Tensor

    def run(self, kernel: Any, *tensors: Tensor) -> None:
        """Run a kernel of a rule that measures."""
        on_device(kernel, self.requested, self.state.moments, self.limits, *tensors, self.out, self.state.chosen)


def _measure_amax(rule: Any, constants: Constants, m: Measured) -> None:
    m.run(scale_to_max, constants.tensor(torch.int64, m.gradient.device, rule.margin))


def _measure_last_amaxes(rule: Any, constants: Constants, m: Measured) -> None:
    device, state = m.gradient.device, m.state
    if state.history is None:
        state.history = torch.zeros(rule.length, dtype=torch.float64, device=device)
    m.run(delayed_scaling, constants.tensor(torch.int64, device, rule.margin), state.history)


def _measure_squared_error(_: Any, constants: Constants, m: Measured) -> None:
    spec = m.site.spec
    _, highest = log2_scale_limits(spec, m.site.dtype)
    # The kernel writes the scale of `current` without a margin to `out`. This is the first candidate.
    m.run(scale_to_max, constants.tensor(torch.int64, m.gradient.device, 0))
    tried = [(m.out + i).clamp_(max=highest) for i in range(CANDIDATES)]
    m.run(least_error_scale, torch.stack([_squared_error(m.gradient, spec, scale) for scale in tried]))


def _measure_underflow(rule: Any, constants: Constants, m: Measured) -> None:
    device = m.gradient.device
    # If rounding loses elements that lie exactly at the threshold, a power of two is counted in the binade below it.
    # Otherwise it is counted in the binade above it.
    bins, first = binades(m.gradient, power_begins=not constants.loses_ties(m.site.spec))
    share = constants.tensor(torch.float64, device, rule.n_uf_threshold)
    m.run(smallest_sufficient_scale, bins, constants.tensor(torch.int64, device, first), share)


def _squared_error(gradient: Tensor, spec: RoundingSpec, log2_scale: Tensor) -> Tensor:
    """Return the sum of squared errors of rounding at a scale, 0-d float64."""
    error = rounded(gradient, spec, None, log2_scale).sub_(gradient)
    return error.to(torch.float64).square_().sum()


# Functions that measure a statistic and choose a scale, by the names in `LayerRule.measures`.
MEASURES: dict[str, Callable[[Any, Constants, Measured], None]] = {
    "amax": _measure_amax,
    "amax of the last steps": _measure_last_amaxes,
    "squared error": _measure_squared_error,
    "share of underflow": _measure_underflow,
}
