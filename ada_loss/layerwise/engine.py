"""The engine that chooses a scale for each gradient.

In the forward pass, `make_site` records where a tensor's gradient will be rounded. In the backward pass, `scale_at`
returns the scale of this gradient. A step that chooses scales takes the largest scale that the tensor's consumers sent,
lowers it if the gradient would overflow, and sends scales to the sites behind this one (`_choose_scale`). A step
between updates takes the scale that the site holds, and only checks for overflow (`_hold_scale`).

Other modules make the decisions. `rules/formulas.py` has the formulas of the rules, `scale_kernels.py` has the kernels
that apply the formulas, and `transforms.PRODUCTS` lists the torch functions that are products. `docs/architecture.md`
lists the calls from the backward hook to the scale.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ada_loss.layerwise.chooser import ScaleChooser
from ada_loss.layerwise.constants import Constants
from ada_loss.layerwise.options import Options
from ada_loss.layerwise.scale_kernels import (
    HOLD,
    IF_UNKNOWN,
    RECOMPUTE,
    REQUESTED,
    REUSE,
    SiteMode,
    keep_what_is_not_finite,
)
from ada_loss.layerwise.sites import (
    MEASURED,
    UPDATE,
    GradientSite,
    IncomingScale,
    ProductEdge,
    Schedule,
    SiteState,
    link,
    register,
    round_branches,
)
from ada_loss.transforms import PRODUCTS, Product
from fpsim import scaling
from fpsim.scaling import (
    AMAX,
    AMIN,
    BACKWARD,
    ContainerError,
    Moments,
    RoundingSpec,
    current_graph_task,
    is_rounded_at,
    is_view_of_weight,
    mark_rounded,
    moments_of,
    on_device,
    round_memory_,
    rounded,
)

__all__ = ["Dead", "Engine", "Observed", "product_moments"]


class Observed(Protocol):
    """A callback that gets the gradients of some steps, before they are rounded, and the chosen scales."""

    def wants(self, step: int) -> bool:
        """Return True if a step is to be observed; called once per step."""
        ...

    def __call__(
        self, step: int, site: str, role: str, spec: RoundingSpec, gradient: Tensor, log2_scale: Tensor, chosen: Tensor
    ) -> None:
        """Observe one gradient.

        step: the number of the backward pass, from 1.
        site: the site's name, with '#1' and so on for its second and later uses.
        role: "error" or "weight_grad".
        spec: how the gradient is rounded.
        gradient: the gradient in its true size, before rounding.
        log2_scale: log2 of the scale at which the gradient is rounded, (1,) int64 on the gradient's device.
        chosen: the decision, (5,) float64 on the gradient's device: the fields of `scale_kernels.CHOSEN`.
        """
        ...


def _require_no_capture() -> None:
    """Raise NotImplementedError during the capture of a CUDA graph, because replays would never update the scales."""
    if _is_captured():
        raise NotImplementedError(
            "AdaLossScaled with update_every above 1 was used while a CUDA graph was captured, whose replays would "
            "hold the scales of this step for ever. Expected: no graph; or AdaLossScaled(model, update_every=1)."
        )


class Engine:
    """Choose the scale at which each gradient of a model is rounded.

    options: the settings.
    owner: a function that returns the object that attached this engine to the model; None if that object is deleted.
    """

    def __init__(self, options: Options, owner: Callable[[], object]) -> None:
        self.owner = owner
        rule = self._rule = options.rule
        self._options, self._modules = options, options.modules
        self._predicts, self._holds_scales = options.predicts, options.holds_scales
        self._measures_casts = self._predicts and options.scales_casts and not rule.is_constant
        self._product_rule: Any = rule if rule.forms_products else None
        self._is_fixed = rule.is_constant
        # Held scales, constant factors and formed products need the amax in `state.moments`. In these cases its
        # computation must not be skipped.
        self._skips_amax = self._predicts and not (self._holds_scales or self._is_fixed or rule.forms_products)
        self._warns_of_noise = rule.saturates
        self._dead = Dead(self._predicts and not rule.is_constant)
        self.observer: Observed | None = None
        self._told: Observed | None = None  # the observer in a step that it wants, else None
        self.states: defaultdict[tuple[str, str], SiteState] = defaultdict(SiteState)  # by name and role
        # sites of steps between updates, with the function that returns their scale; the next such step reuses both
        self.unlinked: dict[tuple[str, str], tuple[GradientSite, Callable[[Tensor, bool], Tensor]]] = {}
        self.schedule = Schedule(options.update_every, self._holds_scales, self.states)
        self.constants = Constants(options.u_min, options.u_max, options.scale_upper_bound, options.accum_upper_bound)
        self._chooser = ScaleChooser(options, self.constants)

    def load(self, step: int, last_update: int, sites: Iterable[Mapping[str, Any]]) -> None:
        """Resume from a saved step, with the saved state of each site."""
        self.schedule.load(step, last_update)
        self.states.clear()
        for saved in sites:
            state = self.states[saved["site"], saved["role"]]
            state.load_plain(saved)
            if self._holds_scales and saved["kept"] is not None:
                state.held_log2_scale = self.constants.tensor(torch.int64, torch.device("cpu"), saved["kept"])
                state.ceiling = saved["ceiling"]

    # The forward pass: sites and their links.

    def make_site(
        self, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...], out: Tensor
    ) -> Callable[[Tensor, bool], Tensor]:
        """Record where a gradient will be rounded, and return the function that chooses its scale.

        This is the `fpsim.scaling.Scaling` that the emulation calls, once for each tensor of the forward pass.

        site: the site's name.
        role: "error" or "weight_grad".
        spec: how the gradient will be rounded.
        operation: the name of the torch function that made `out`, or a word of `Scaling`, such as "weight".
        operands: the arguments of the operation, whose tensors are already rounded; for a rounded copy, the original
            tensor.
        out: the tensor whose gradient will be rounded.
        """
        if out.dtype is torch.float16 and not spec.is_float32:
            raise ContainerError(
                f"The gradient at {site} is to be scaled, and is float16: what is too small for that is lost before "
                f"it is rounded. Expected: float32, float64 or bfloat16. Leave torch.autocast and .half() out of the "
                f"emulation, which rounds to a format itself; for a training in real float16 give "
                f"ada_loss.GradScaler a model that is not quantised."
            )
        if self._warns_of_noise and spec.rounding == "stochastic":
            self._warns_of_noise = False
            warnings.warn(
                f"The rule {self._rule.name!r} lets the largest elements of a gradient saturate, and the gradient at "
                f"{site} is rounded stochastically: its error then averages to what was cut off, and not to zero. In "
                f"four bits that was better than noise on two tasks of six (docs/scaling.md); else use rule='current', "
                f"or a policy with rounding='nearest_even'.",
                stacklevel=2,
            )
        if self._options.has_range:
            self._options.require_range_of(spec, f"the gradient at {site}")
        graph_task = current_graph_task()
        is_linked = self.schedule.links_sites(graph_task)
        if not is_linked and (earlier := self.unlinked.get((site, role))) is not None:
            used, tell = earlier
            if used.spec is spec and used.dtype is out.dtype and used.made_in == graph_task:
                return tell
        is_selected = self._modules is None or site.split(":")[0] in self._modules
        made = GradientSite(site, role, spec, out.dtype, is_selected, is_linked, graph_task)
        # The method is bound here, so that `sites.py` need not import the engine.
        tell = partial(self.scale_at, made)
        # If code of the model computes an error within a backward pass, that error belongs to no graph. The operand is
        # then the scale of the gradient from which the error was computed.
        if operation == BACKWARD and operands[0] is not None:
            made.receive(graph_task, IncomingScale(operands[0], True, False, made))
        if not is_linked:
            self.unlinked[made.key] = made, tell
        elif out.grad_fn is not None:
            register(made, out)
            # No site lies behind a parameter. The search for sites is skipped then, because every call of every layer
            # would repeat it in vain.
            if operation != "weight" or operands[0].grad_fn is not None:
                edges = link(made, out, self._products(made, operation, operands))
                if self._options.branches == "original":
                    round_branches(made, out, operands, edges, self.constants)
        return tell

    def _products(self, site: GradientSite, operation: str, operands: tuple[Any, ...]) -> list[Product]:
        """Return those products of an operation in which the gradient of an operand gets a factor."""
        find = PRODUCTS.get(operation)
        if find is None or not self._predicts or not site.is_selected:
            return []
        products = [p for p in find(*operands) if not p.is_gate or (p.other is not None and is_view_of_weight(p.other))]
        if self._product_rule is not None and any(p.channel is None and not p.is_gate for p in products):
            raise NotImplementedError(
                f"{operation} at {site.key[0]} is not a linear layer or plain convolution, and element_wise_range "
                f"forms the products of those alone. Choose modules with transforms=, or another rule."
            )
        return products

    # The backward pass.

    def scale_at(self, site: GradientSite, gradient: Tensor, may_round: bool) -> Tensor:
        """Return log2 of the scale at which a gradient is rounded, as an int64 tensor of one element on its device.

        site: the site where the gradient is rounded.
        gradient: the gradient in its true size.
        may_round: whether no other code holds the gradient, so that it may be rounded in place.
        """
        graph_task, schedule = current_graph_task(), self.schedule
        if schedule.enter(graph_task, site.made_in, site.is_linked):
            if self._holds_scales:
                _require_no_capture()
            observer = self.observer
            self._told = observer if observer is not None and observer.wants(schedule.step) else None
            self._dead.begin(schedule.step)
        key, state = self._state_of(site)
        if state.moments.device != gradient.device:
            state.move_to(gradient.device)
        # It must be checked again whether all scales are known: a linked site may compute its factors in this step, and
        # the check includes a site only after its first gradient since the update.
        if site.is_linked or state.last_step < schedule.last_update:
            schedule.is_all_known = None
        state.last_step = schedule.step
        seen = None if self._told is None else gradient.detach()
        if seen is not None and may_round:  # the gradient is rounded in place, but the observer needs it unrounded
            seen = seen.clone()
        something = gradient.any() if self._dead.wants(key[1]) else None
        if site.is_linked or state.held_log2_scale is None:
            log2_scale = self._choose_scale(site, graph_task, gradient, state, may_round)
        else:
            log2_scale = self._hold_scale(site, gradient, state, state.held_log2_scale, may_round)
        state.log2_scale = log2_scale
        if something is not None:
            self._dead.note(key[0], something, gradient, site.spec, log2_scale)
        if self._told is not None and seen is not None:
            self._told(schedule.step, *key, site.spec, seen, log2_scale, state.chosen.clone())
        return log2_scale

    def _state_of(self, site: GradientSite) -> tuple[tuple[str, str], SiteState]:
        """Return the key of a site, with '#1' and so on from the second use in a step, and its state."""
        # Uses are counted in backward order, the last use first, because not every forward pass has a backward pass.
        key = site.key
        state = self.states[key]
        if state.last_step == self.schedule.step:
            key, state.uses = (f"{key[0]}#{state.uses}", key[1]), state.uses + 1
            return key, self.states[key]
        state.uses = 1
        return key, state

    # In a step that chooses scales.

    def _choose_scale(
        self, site: GradientSite, graph_task: int, gradient: Tensor, state: SiteState, may_round: bool
    ) -> Tensor:
        """Return the scale that the consumers request, lowered on overflow, and send scales to the sites behind."""
        chooser = self._chooser
        limits = self.constants.limits_of(site.spec, site.dtype, gradient.device)
        incoming = site.incoming if site.graph_task == graph_task else []
        site.incoming = []
        mode, is_measured = self._mode_of(site, incoming, state)
        if mode is HOLD:
            assert state.held_log2_scale is not None
            requested = state.held_log2_scale
        else:
            requested = chooser.requested_scale(incoming, limits, gradient.device)
            if self._told is not None:  # a site without a product would show the choice of an earlier step
                state.chosen[:REQUESTED] = math.nan
        has_moments = is_measured and mode >= IF_UNKNOWN
        if has_moments:  # moments of the unrounded gradient, as in the authors' cast
            moments_of(gradient, logs=self._rule.logs, out=state.moments)
        if is_measured:
            requested = chooser.scale_by_factor(requested, state.moments, None, 1, limits, mode, state, MEASURED)
        # A gradient that was already rounded at this very scale fits, and its amax is not needed.
        may_skip = incoming and self._skips_amax and not is_measured
        fits = bool(may_skip) and self._told is None and is_rounded_at(gradient, requested, site.spec)
        log2_scale = requested if fits else chooser.fit_scale(site, gradient, requested, state, has_moments)
        if self._holds_scales:
            if mode is not HOLD and site.is_linked:
                state.held_log2_scale = chooser.scale_to_hold(requested, state)
            if state.held_log2_scale is not None:
                state.note_headroom(state.held_log2_scale, limits)
        if mode >= IF_UNKNOWN and site.predicted and not self._is_fixed:
            gradient = self._round_for_products(site, gradient, log2_scale, may_round)
            if self._product_rule is None:
                moments_of(gradient, out=state.rounded_moments)
                if not fits:
                    on_device(keep_what_is_not_finite, state.moments, state.rounded_moments)
        self._send_scales(site, graph_task, gradient, log2_scale, state, mode)
        return log2_scale

    def _round_for_products(self, site: GradientSite, gradient: Tensor, log2_scale: Tensor, may_round: bool) -> Tensor:
        """Return the rounded gradient, from which the factors of its products are computed, as in the authors' code."""
        if is_rounded_at(gradient, log2_scale, site.spec):
            return gradient
        if may_round:
            round_memory_(gradient, site.spec, None, log2_scale)
            mark_rounded(gradient, log2_scale, site.spec)
            return gradient
        # A copy is rounded, because other code holds the gradient too. The copy's noise does not come from the
        # training's generator, which has to draw the same numbers for the gradient itself with any rule.
        return rounded(gradient, site.spec, torch.tensor(self.schedule.step, device="cpu"), log2_scale)

    def _mode_of(self, site: GradientSite, incoming: list[IncomingScale], state: SiteState) -> tuple[SiteMode, bool]:
        """Return the mode of the site in this step, and whether a factor is computed from the gradient itself.

        This factor is needed if the gradient enters the format here, or if a consumer is a product that hides its
        operands.
        """
        is_measured = self._predicts and (
            any(scale.must_measure for scale in incoming) if incoming else self._measures_casts
        )
        factors = [*site.predicted, MEASURED] if is_measured else site.predicted
        if self.schedule.kind is UPDATE:
            return (RECOMPUTE if factors else REUSE), is_measured
        if not state.knows(factors):
            return IF_UNKNOWN, is_measured
        if state.held_log2_scale is None or any(scale.is_new for scale in incoming):
            return REUSE, is_measured
        return HOLD, False

    def _send_scales(
        self,
        site: GradientSite,
        graph_task: int,
        gradient: Tensor,
        log2_scale: Tensor,
        state: SiteState,
        mode: SiteMode,
    ) -> None:
        """Send scales to the sites behind this one: this site's scale, times a factor if a product lies between."""
        is_new = mode is not HOLD
        for target in site.passes_on_to:
            target.receive(graph_task, IncomingScale(log2_scale, is_new, False, site))
        for edge in site.products:
            scale = log2_scale if edge.is_hidden else self._scale_of_operand(edge, gradient, log2_scale, state, mode)
            for target in edge.targets:
                target.receive(graph_task, IncomingScale(scale, is_new, edge.is_hidden, edge))

    def _scale_of_operand(
        self, edge: ProductEdge, gradient: Tensor, log2_scale: Tensor, state: SiteState, mode: SiteMode
    ) -> Tensor:
        """Return the scale of one operand's gradient, from statistics of the incoming gradient and the other operand.

        gradient: the incoming gradient, already rounded if factors are computed.
        """
        gathers, g, w = mode >= IF_UNKNOWN, state.moments if self._is_fixed else state.rounded_moments, None
        if self._product_rule is not None:
            if gathers:
                assert edge.other is not None
                g = product_moments(gradient, edge.other, edge.channel, self._product_rule.max_rescue_ratio)
                on_device(keep_what_is_not_finite, state.moments, g)
        else:
            if gathers and edge.other is not None:
                edge.other_moments = moments_of(edge.other)
            # From here on only the operand's moments are needed, so the backward pass may reuse the operand's memory.
            edge.other = None
            w = edge.other_moments
            if w is None:
                mode = REUSE
        target = edge.targets[0]
        limits = self.constants.limits_of(target.spec, target.dtype, log2_scale.device)
        return self._chooser.scale_by_factor(log2_scale, g, w, edge.terms, limits, mode, state, edge.index)

    # Between updates.

    def _hold_scale(
        self, site: GradientSite, gradient: Tensor, state: SiteState, held: Tensor, may_round: bool
    ) -> Tensor:
        """Return the held scale, or a lower one at which the gradient does not overflow."""
        # On the CPU a single pass over memory finds amax and rounds, if the last gradient left enough headroom. If this
        # gradient does not fit after all, its elements below the ceiling are rounded twice.
        is_rounded = may_round and state.has_headroom() and self._round_if_it_fits(site, gradient, state, held)
        if is_rounded or is_rounded_at(gradient, held, site.spec):  # rounded at this very scale, it fits
            if self._told is not None:
                state.chosen[REQUESTED:] = held  # REQUESTED and FINAL
            return held
        log2_scale = self._chooser.fit_scale(site, gradient, held, state, False)
        state.note_headroom(held, self.constants.limits_of(site.spec, site.dtype, gradient.device))
        return log2_scale

    def _round_if_it_fits(self, site: GradientSite, gradient: Tensor, state: SiteState, log2_scale: Tensor) -> bool:
        """Round in place the elements that do not exceed the ceiling. Returns True if no element exceeds it."""
        amax = scaling.round_fitting_(gradient, site.spec, log2_scale, state.ceiling)
        if amax is None or amax > state.ceiling:
            return False
        state.last_amax = amax
        mark_rounded(gradient, log2_scale, site.spec)
        return True


SHOWN = 3  # the number of sites in the warning


class Dead:
    """Warn once if gradients underflow completely in the first step, with a rule that predicts.

    Such an underflow happens in a branch that is multiplied by a number such as 1e-6.
    """

    def __init__(self, may_look: bool) -> None:
        self.looks = may_look
        self._step: int | None = None
        self._found: list[tuple[str, Tensor]] = []

    def begin(self, step: int) -> None:
        """Begin a step. The first step is checked; at the second, warn of the gradients that were found."""
        # The warning waits for the second step. By then the device has long computed the flags of the first step, and
        # all flags are copied at once.
        if self._step is None:
            self._step = step
        elif self.looks:
            self.looks = False
            self._tell()

    def wants(self, role: str) -> bool:
        # Gradients of parameters may rightly vanish: the gradient of the bias of an attention's key is only noise.
        return self.looks and role == "error" and not _is_captured()

    def note(self, site: str, was_something: Tensor, gradient: Tensor, spec: RoundingSpec, log2_scale: Tensor) -> None:
        """Record whether rounding turns a nonzero gradient to zero; its noise is not from the training's generator."""
        left = rounded(gradient, spec, torch.tensor(0, device="cpu"), log2_scale).any()
        self._found.append((site, was_something & ~left))

    def _tell(self) -> None:
        if not self._found or _is_captured():
            return
        flags = torch.stack([flag.cpu() for _, flag in self._found]).tolist()
        sites = [site for (site, _), flag in zip(self._found, flags, strict=True) if flag]
        self._found = []
        if sites:
            others = f" and {len(sites) - SHOWN} more" if len(sites) > SHOWN else ""
            warnings.warn(
                f"Every gradient of {', '.join(sites[:SHOWN])}{others} underflowed in the first step of AdaLossScaled: "
                f"this rule changes the scale at matrix products and where a parameter multiplies, and passes it on "
                f"through all else, such as a factor of 1e-6 that is a number. Make that an nn.Parameter, which may be "
                f"frozen, or use rule='current'. Where the layers before it have room for that, init_scale=2.0**20 or "
                f"a loss scale will do.",
                stacklevel=2,
            )


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


MOST_PRODUCTS = 1 << 27  # 1 GiB in float64


def product_moments(gradient: Tensor, other: Tensor, channel: tuple[int, int] | None, share: float | None) -> Tensor:
    """Return AMIN and AMAX of all products of an element of `gradient` and an element of `other`.

    The rule element_wise_range needs these moments.

    gradient: the gradient of the operation's output, of any shape.
    other: the other operand, of any shape.
    channel: a dimension of `gradient` and a dimension of `other`; only elements with equal indices along them are
        multiplied. None if elements are multiplied one by one, with `other` broadcast.
    share: AMIN is the smallest of this share of the products, counted from the largest. None for all products, which
        are then not formed one by one.
    Returns `Moments` whose other fields are 0. Raises ValueError for a share with more than 2**27 products.
    """
    moments = torch.zeros(len(Moments._fields), dtype=torch.float64, device=gradient.device)
    if gradient.numel() == 0 or other.numel() == 0:
        return moments
    if channel is None:  # then a product has one element of each, and is formed here
        gradient, other, channel = (gradient.double() * other.detach()).flatten(), other.new_ones(1), (-1, -1)
        other = other.expand(gradient.shape)
    g, w = (  # by channel; a vector has one element in each
        x.detach().abs().double().movedim(dimension, 0).unsqueeze(-1).flatten(1)
        for x, dimension in ((gradient, channel[0]), (other, channel[1]))
    )
    if share is None:
        # The smallest product of a channel is the product of its smallest factors: only this product has to be formed.
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
