"""Per-layer gradient scaling in real float16 training: hooks apply the rule's factors in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ada_loss.layerwise.constants import Constants
from ada_loss.layerwise.native_graph import Factor
from ada_loss.layerwise.native_hooks import Leaves, NativePass
from ada_loss.layerwise.native_powers import HALF, HEADROOM, Power, from_to, on, times
from ada_loss.layerwise.options import Options, check_progress, check_sites
from ada_loss.layerwise.scale_kernels import CHOSEN, FINAL, IF_UNKNOWN, RECOMPUTE, REUSE, carried_factor_kernel
from ada_loss.layerwise.sites import UPDATE, Schedule, SiteState
from ada_loss.record import Recorder
from ada_loss.rules.formulas import NEVER
from ada_loss.rules.layer import ApproxRange, LayerRule, as_layer_rule
from fpsim.checks import is_whole, require_mapping, shown
from fpsim.scaling import (
    Moments,
    RoundingSpec,
    as_policy,
    current_graph_task,
    listeners,
    memory_of,
    moments_of,
    names_in_graphs,
    on_device,
    require_hooks_of_nodes,
)

__all__ = ["NativeScaling", "native_rule"]

CPU = torch.device("cpu")
NOTHING = (0.0,) * len(Moments._fields)  # moments that stand for a missing operand
# The number of powers of two by which an overflow lowers the scale of a site, and the number of steps after which the
# limit of this scale doubles.
BACKOFF = 4
RECOVERY = 200


class NativeScaling:
    """Scale the gradients of each layer of a model that trains in real float16.

    `scale(loss).backward()` computes the true gradient of every parameter. Within the backward pass the gradient that
    arrives at a product is multiplied by a power of two. The rule chooses this power of two so that the gradient of the
    product's input does not underflow. The model is not changed.

    Args:
        model: a module that is not quantised; its parameters name the sites.
        rule: a rule that predicts: "approx_range", "abs_range" or "fixed".
        update_every: the interval of backward passes in which factors are chosen; in between they are held.
        scale_upper_bound: the largest factor of one product, None for no bound.
        accum_upper_bound: the largest scale that factors may add up to, None for no bound.
        u_min: the lower limit of gradients, "smallest", "flush", "normal" or a number. Subnormal numbers lose
            digits, and attention's gradients have heavier tails than the rule's normal distribution, so the default is
            "normal".
        u_max: the upper limit of gradients and sums of products, None for 65504, float16's largest number.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    >>> layers = NativeScaling(model)
    >>> with torch.autocast("cpu", dtype=torch.float16):
    ...     loss = model(x).float().sum() * 1e-7
    >>> loss.backward(retain_graph=True)
    >>> float((model[0].weight.grad == 0).float().mean()) > 0.9
    True
    >>> model.zero_grad()
    >>> layers.scale(loss).backward()
    >>> float((model[0].weight.grad == 0).float().mean()) < 0.6
    True
    """

    keeps_on_device = False  # tests set it to True, to take the path of a GPU on the CPU

    def __init__(
        self,
        model: nn.Module,
        rule: LayerRule | str = "approx_range",
        update_every: int = 1,
        scale_upper_bound: float | None = None,
        accum_upper_bound: float | None = None,
        u_min: str | float = "normal",
        u_max: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"layers is {shown(model)}, of type {type(model).__name__}. Expected: a torch.nn.Module.")
        try:
            listeners(model)
        except ValueError:
            pass
        else:
            raise ValueError(
                f"{type(model).__name__} is quantised: its gradients are rounded in float32, not in float16. Use "
                f"AdaLossScaled(model), or give the model that fpsim.quantize was given."
            )
        require_hooks_of_nodes()
        rule = native_rule(rule)
        bounds = scale_upper_bound, accum_upper_bound
        self.options = Options(rule, 1.0, update_every, *bounds, "exact", u_min, u_max, None, True)
        self._spec = _error_spec()
        if self.options.has_range:
            self.options.require_range_of(self._spec, "a gradient")
        self.model = model
        self.states: dict[tuple[str, str], SiteState] = {}
        self.limits: dict[str, int] = {}  # log2 of the largest scale of a site where numbers overflowed
        self.schedule = Schedule(update_every, True, self.states)
        self._constants = Constants(self.options.u_min, self.options.u_max, *bounds)
        predicting = rule
        if isinstance(rule, ApproxRange):
            # An overflow in native code is found only after it has happened, so the kernel itself bounds each factor by
            # the worst case.
            predicting = replace(rule, bound="measured")
        self._kernel, self._parameters = carried_factor_kernel(predicting.core()), predicting.parameters()
        # The limit of a product's results; 0 for no limit. A constant factor has no limit, because the user has chosen
        # this factor.
        self._largest = 0.0 if rule.is_constant else self.options.u_max or torch.finfo(HALF).max
        self._weights: dict[int, Tensor] = {}  # moments of parameters in this update, by id
        self._events: dict[torch.device, Any] = {}  # events after which the factors of the last update are on the host
        self._order: list[str] = []  # sites in the order of the last backward pass
        self._leaves: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._is_lowered = True  # whether limits are set for the last backward pass, or there was none
        # The observer, such as a Recorder, is called with the input gradient of each product, gate and cast, under the
        # site of this operation.
        self.observer: Recorder | None = None
        self.has_scaled = False  # whether a loss was scaled since the last update of the scaler
        self._pass = NativePass({}, self._choose, HALF, self._begin, needs_half=True)
        self._pass.checks.parameters = model.parameters

    def __reduce__(self) -> Any:
        raise TypeError(
            "A NativeScaling belongs to the model that it was given, and is neither copied nor pickled. Save its "
            "state_dict(), and load it into a new one."
        )

    def scale(self, loss: Tensor) -> Tensor:
        """Return a copy of `loss` whose backward pass is scaled layer by layer.

        Raises TypeError if no gradient of the pass is float16, and the errors of `NativePass.scale`.
        """
        # The names are collected again for each loss, because there may be new parameters, as with LoRA.
        self._pass.names = names_in_graphs(self.model)
        self.has_scaled = True
        step, observer = self.schedule.step + 1, self.observer
        if observer is None or not observer.wants(step):
            return self._pass.scale(loss, self._ones())

        def tell(factor: Factor, sent: Tensor, log2: Power) -> None:
            true = times(sent, from_to(log2, 0, sent.device))
            chosen = self.states[factor.site, "error"].chosen
            observer(step, factor.site, "error", self._spec, true, on(log2, sent.device), chosen.clone())

        return self._pass.scale(loss, observe=tell)

    def _ones(self) -> frozenset[str]:
        """Return the sites whose factor is known to be 1 in the next backward pass, so that they need no hook."""
        step, last = self.schedule.step + 1, self.schedule.last_update
        if step - last >= self.options.update_every or not self._may_read(step):
            return frozenset()
        return frozenset(
            site
            for (site, _), state in self.states.items()
            if site not in self.limits and state.knows((0,)) and memory_of(state.factors_on_host[0])[0] == 1.0
        )

    def _may_read(self, step: int) -> bool:
        """Return True if held factors can be read on the host without waiting."""
        # Factors are read in a fixed step after the update, not as soon as a copy has arrived, because a repeated run
        # must take the same path.
        if not (self._events or self.keeps_on_device):
            return True
        if step < self.schedule.last_update + 2:
            return False
        for event in self._events.values():
            event.synchronize()  # the event was recorded two steps ago
        return True

    def log2_scales(self) -> dict[str, int]:
        """Return log2 of the scale with which each site's last gradient arrived, from input to output.

        As in emulated training, a product then multiplies the arriving gradient by one more factor.
        """
        found = {site: s.log2_scale for (site, _), s in self.states.items()}
        return {site: int(k) for site, k in reversed(found.items()) if k is not None}

    def true_grad(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return the true gradient of a hidden tensor, as in a plain backward pass, in float32 or in a wider dtype.

        tensor: the tensor to which the gradient belongs. The gradient may come from its hooks, `retain_grad` or
            `torch.autograd.grad` in the last scaled backward pass. A parameter's gradient is already true.
        gradient: the gradient to unscale.
        Raises ValueError for a tensor without a gradient in that pass.

        >>> layer = nn.Linear(8, 8)
        >>> layers = NativeScaling(layer)
        >>> with torch.autocast("cpu", dtype=torch.float16):
        ...     h = layer(torch.ones(1, 8))
        ...     h.retain_grad()
        ...     loss = h.float().sum() * 2.0**-30
        >>> layers.scale(loss).backward()
        >>> bool((layers.true_grad(h, h.grad) == 2.0**-30).all())
        True
        """
        log2 = self._pass.power_at(tensor)
        if log2 is None:
            raise ValueError(
                "Got a tensor to which the last scaled backward pass brought no gradient. Expected: one of its graph, "
                "after the pass or in a hook of that tensor."
            )
        wide = gradient.float() if gradient.dtype is HALF else gradient
        return times(wide, from_to(log2, 0, gradient.device))

    def overflowed(self) -> None:
        """Lower the scales where gradients overflowed. Call this when a step was skipped because of an overflow.

        Otherwise the rule would undo the backoff of a loss scaler, and every step would be skipped. Two sites are
        limited to a sixteenth of their scales: the first site in the backward pass whose parameters' gradients are not
        finite, and the site before it. The host waits for the gradients, as it already did to skip the step.
        """
        if self._is_lowered:
            return
        self._is_lowered = True
        bad: set[str] = set()
        for leaf, sites in self._leaves.values():
            if sites - bad and leaf.grad is not None and not bool(leaf.grad.isfinite().all()):
                bad |= sites
        hit = next((i for i, site in enumerate(self._order) if site in bad), None)
        # If FSDP2 has already taken the gradients from the leaves of the graph, no such site is found. All sites are
        # lowered then.
        for site in self._order if hit is None else self._order[max(hit - 1, 0) : hit + 1]:
            state = self.states.get((site, "error"))
            passed_on = math.nan if state is None else float(state.chosen[FINAL])
            self.limits[site] = (0 if math.isnan(passed_on) else int(passed_on)) - BACKOFF
        # The next step becomes an update, because the held factors were chosen before the limits.
        self.schedule.last_update = self.schedule.step - self.options.update_every

    def state_dict(self) -> dict[str, Any]:
        """Return all settings, the step, limits, and the state of each site, as plain values."""
        return {
            **self.options.as_plain(),
            "native": True,
            "step": self.schedule.step,
            "updated": self.schedule.last_update,
            "limits": dict(self.limits),
            "sites": [{"site": site, "role": role, **state.as_plain()} for (site, role), state in self.states.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; a refused state changes nothing.

        Raises TypeError for anything but a mapping, ValueError for a state of other settings or of another model.
        """
        require_mapping("state", state, "what state_dict() returns")
        mine = {**self.options.as_plain(), "native": True}
        other = [name for name in mine if name not in state or state[name] != mine[name]]
        missing = [name for name in ("step", "updated", "limits", "sites") if name not in state]
        if other or missing:
            raise ValueError(
                f"The state has other values of {', '.join(other + missing)}, or lacks them. Expected: the "
                f"state_dict() of native scaling with {', '.join(f'{n}={shown(mine[n])}' for n in other) or 'them'}."
            )
        check_progress(state)
        check_sites(state["sites"], state["step"], {name for name, _ in self.model.named_modules()}, None)
        limits = state["limits"]
        if not isinstance(limits, Mapping) or not all(isinstance(s, str) and is_whole(k) for s, k in limits.items()):
            raise ValueError(f"The state has limits={shown(limits)}. Expected: exponents of scales by site.")
        self.states.clear()
        for saved in state["sites"]:
            self.states[saved["site"], saved["role"]] = new = SiteState()
            new.load_plain(saved)
        self.limits = {site: int(k) for site, k in limits.items()}
        self.schedule.load(int(state["step"]), int(state["updated"]))

    def _begin(self, sites: list[str], leaves: Leaves, is_whole: bool) -> None:
        schedule = self.schedule
        schedule.enter(current_graph_task(), -1, is_whole)
        if schedule.kind is UPDATE:
            self._weights.clear()
        if schedule.step % RECOVERY == 0:
            self.limits = {site: k + 1 for site, k in self.limits.items()}
        self._order, self._is_lowered = sites, False  # for `overflowed`, which comes after the pass
        if is_whole:  # otherwise sites have no hooks, and the leaves do not name these sites
            self._leaves = {id(leaf): (leaf, names) for leaf, names in leaves}

    def _choose(self, factor: Factor, came: list[Tensor], log2: Power) -> Power:
        """Return log2 of a site's factor; the last factor if the gradients are all zero or not finite."""
        schedule, constants = self.schedule, self._constants
        state = self.states.setdefault((factor.site, "error"), SiteState())
        state.last_step = schedule.step
        state.log2_scale = log2 if isinstance(log2, Tensor) else constants.tensor(torch.int64, CPU, log2)
        some = [g.detach() for g in came if g.numel()]
        if not some:
            return 0
        device, mode = some[0].device, REUSE
        if state.moments.device != device:
            state.move_to(device)
        if schedule.kind is UPDATE or not state.knows((0,)):
            mode = RECOMPUTE if schedule.kind is UPDATE else IF_UNKNOWN
            # A node with several gradients, such as an RNN's, has one factor for all of them.
            g = some[0] if len(some) == 1 else torch.cat([g.flatten() for g in some])
            moments_of(g, out=state.moments)
        # A held factor whose copy has surely arrived is read on the host, without a kernel launch on the GPU.
        is_read = not self.keeps_on_device if device.type == "cpu" else False
        if mode is REUSE and isinstance(log2, int) and not is_read and self._may_read(schedule.step):
            is_read, device = True, CPU
        chosen = state.chosen if device == state.chosen.device else torch.empty(len(CHOSEN), dtype=torch.float64)
        kept = state.factor(0, device) if device == state.moments.device else state.factors_on_host[0]
        out = constants.new_scale(device) if is_read else torch.empty(1, dtype=torch.int64, device=device)
        limit = self.limits.get(factor.site, NEVER)
        rows = min(factor.rows, 2**HEADROOM)  # larger sums of one sign are rarer than small gradients
        on_device(
            self._kernel,
            constants.tensor(torch.int64, device, log2) if isinstance(log2, int) else on(log2, device),
            state.moments if mode is not REUSE else constants.tensor(torch.float64, device, *NOTHING),
            self._weight(factor, device) if mode is not REUSE else constants.tensor(torch.float64, device, *NOTHING),
            constants.tensor(torch.int64, device, factor.terms),
            constants.limits_of(self._spec, torch.float32, device),
            constants.tensor(torch.float64, device, *self._parameters),
            constants.tensor(torch.int64, device, mode),
            constants.tensor(torch.float64, device, self._largest, float(not factor.is_wide), limit, float(rows)),
            kept,
            out,
            chosen,
        )
        if mode is not REUSE:  # in a later step `_may_read` waits for the event
            state.copy_to_host(0)
            if device.type == "cuda":
                event = self._events[device] = self._events.get(device) or torch.cuda.Event()
                event.record()
        return memory_of(out)[0] if is_read else out

    def _weight(self, factor: Factor, device: torch.device) -> Tensor:
        parameter = factor.parameter
        if parameter is None:
            return self._constants.tensor(torch.float64, device, *NOTHING)
        moments = self._weights.get(id(parameter))
        if moments is None:
            moments = self._weights[id(parameter)] = moments_of(parameter.detach())
        return moments


def native_rule(rule: LayerRule | str) -> LayerRule:
    """Return the rule of a native training. Raises ValueError for a rule that measures gradients before rounding."""
    rule = as_layer_rule(rule)
    if not rule.predicts or rule.forms_products:
        raise ValueError(
            f"The rule {rule.name!r} measures gradients before they are rounded, and a native product has rounded "
            f"them already. Expected: 'approx_range', 'abs_range' or 'fixed'."
        )
    return rule


def _error_spec() -> RoundingSpec:
    spec = as_policy("fp16").specs().error
    assert spec is not None
    return spec
