"""`AdaLossScaled`: adaptive gradient scaling of a quantised model, layer by layer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ada_loss.layerwise.engine import Engine, Observed
from ada_loss.layerwise.options import Options, check_progress, check_sites
from ada_loss.rules.layer import LayerRule, as_layer_rule
from ada_loss.transforms import AdaLossTransform, AdaLossTransformCast
from fpsim.checks import require_iterable, require_mapping, require_word, shown
from fpsim.scaling import Exit, listeners

__all__ = ["AdaLossScaled"]


class AdaLossScaled:
    """Adaptive gradient scaling of a quantised model: each layer's gradient is rounded at its own scale.

    Attaches to `model`, which is trained as before: gradients keep their true size, so the optimizer, clipping and a
    loss scaler are unaffected. `detach()`, or the end of a `with` block, restores the model. A copy of the model is not
    scaled.

    The method is that of Zhao, Vogel, Ahmed, Luk, IJCAI 2020. At a matrix product the incoming gradient, rounded at
    scale S, and the other operand determine the power of two by which the outgoing gradient is scaled, so that few
    elements underflow and none overflows. `x * parameter` (a layer scale, the weight of a normalisation that is written
    by hand) is a product of one term. Other operations pass S on unchanged, and parameters' gradients are rounded at S.
    Therefore a branch multiplied by a number such as 1e-6, or by a gate that the model computes, needs `rule="current"`
    or an `init_scale` instead of the default; if every gradient of a result underflows in the first step, a warning
    says so. In every step a scale at which a gradient would overflow is lowered until the gradient fits. A gradient
    that holds inf or NaN is passed through at scale 1; if that may happen, guard the step with a scaler
    (`GradScaler("static", ...)`).

    Gradients in formats of at most 6 bits are rounded stochastically under "approx_range" and "current", unless the
    policy names a rounding: with rounding to nearest, most of their elements would become zero at any scale. Blocks
    that share scales, and gradients in wider formats, keep the policy's rounding.

    Differences from the original: any format, any operation and any model (the original is for fp16 and for a list of
    layers); factors at gates; scales without bounds (`approx_range` with `bound="worst_case"` has the original's bound
    on sums of products); optional bounds on every rule that predicts and on casts (the original bounds "approx_range"
    only); `branches="exact"`; lowering a scale until the gradient fits, also between updates; for a gradient that
    enters the format, the second moment instead of the original's standard deviation (`stats="grad"` takes the latter);
    and the rules that measure.

    Args:
        model: a model from `fpsim.quantize`, with any format and policy. Formats with float32's exponents do not need
            scaling. The model's tensors may be bfloat16 (torch.autocast, a checkpoint's dtype); a product's gradient is
            then rounded to bfloat16 first. A float16 gradient has lost numbers before it could be scaled, and raises
            TypeError (RuntimeError in an operator).
        transforms: the modules whose products are scaled, `[AdaLossTransformLinear(), ...]`. None for every product,
            and for the cast of float32 gradients at the model's outputs.
        init_scale: the scale of gradients that enter the model, a power of two. With a rule that measures, a value
            other than 1 needs `transforms`, and applies to the modules that they leave out.
        rule: how a scale is chosen: a `LayerRule`, or a name: "approx_range", "abs_range", "element_wise_range" and
            "fixed" predict a product's result; "exact", "current", "amax_history" and "mse" measure each tensor where
            it is rounded.
        update_every: scales are chosen in every n-th step, where a step is a backward pass. In between, each site holds
            its own scale. If a gradient is zero or not finite, the last scale stays; if there is none yet, the next
            step chooses it. A gradient that overflows between updates, more than 16 times as large as in the step
            before, may have been rounded once already when its scale is lowered. A rule that measures does this in
            every step, so it allows only 1.
        scale_upper_bound: the largest factor of one product or cast, None for no bound (the original: 16). For rules
            that predict.
        accum_upper_bound: the largest scale that the product of factors, or a rule that measures, may reach, None for
            no bound (the original: 1024). Bounds are rounded down to powers of two.
        branches: how the gradients of several consumers are added. "exact" rounds their sum once, at the largest of
            their scales, which is lowered until the sum fits. "original" rounds each gradient at its own scale, and the
            sum at the scale that the original chooses; between updates it reuses factors, not scales. For rules that
            predict.
        u_min: the lower limit of gradients: "smallest", the format's smallest magnitude; "flush", half of that
            magnitude, up to which rounding flushes to zero; "normal", the smallest normal number, which suits 8-bit
            formats; or a number that every format of a gradient holds (the original: 6e-8). "exact", which counts
            powers of two, rounds that number up to one.
        u_max: the upper limit of gradients: None, the largest magnitude of each format, or a number that every
            format holds (the original: 60000, then 65504). Scales are lowered until no gradient exceeds it.
        power_of_two: only True is allowed. The original has an option for other factors. Here a gradient is rounded at
            its scale and divided by it, which is exact only for powers of two.

    >>> import fpsim
    >>> model = fpsim.quantize(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), "fp16")
    >>> x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    >>> (model(x).sum() * 1e-7).backward()
    >>> float((model[0].weight.grad == 0).float().mean()) > 0.9
    True
    >>> model.zero_grad()
    >>> with AdaLossScaled(model):
    ...     (model(x).sum() * 1e-7).backward()
    >>> float((model[0].weight.grad == 0).float().mean()) < 0.6
    True
    """

    def __init__(
        self,
        model: nn.Module,
        transforms: Iterable[AdaLossTransform | AdaLossTransformCast] | None = None,
        init_scale: float = 1.0,
        rule: LayerRule | str = "approx_range",
        update_every: int = 1,
        scale_upper_bound: float | None = None,
        accum_upper_bound: float | None = None,
        branches: str = "exact",
        u_min: str | float = "smallest",
        u_max: float | None = None,
        power_of_two: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is {shown(model)}, of type {type(model).__name__}. Expected: what fpsim.quantize returns."
            )
        try:
            self._listeners = listeners(model)
        except ValueError:
            raise ValueError(
                f"{type(model).__name__} is not quantised: nothing rounds its gradients to a format, at no scale. "
                f"Call fpsim.quantize(model, fmt) first and scale what it returns. For a training in real float16 use "
                f"ada_loss.GradScaler(layers=model)."
            ) from None
        _require_unscaled(self._listeners)
        if power_of_two is not True:
            raise ValueError(
                f"power_of_two={shown(power_of_two)} is refused. A gradient is divided by its scale after it is "
                f"rounded, which is exact only for powers of two: any other scale rounds every number again. "
                f"Expected: power_of_two=True. Omit it."
            )
        self._options = Options(
            as_layer_rule(rule),
            init_scale,
            update_every,
            scale_upper_bound,
            accum_upper_bound,
            branches,
            u_min,
            u_max,
            *_selected(model, transforms),
        )
        self.model = model
        # The engine holds a weak reference to this object, because the model's hooks hold the engine. The engine can
        # then tell that the user dropped this object, and the next AdaLossScaled may take over the model.
        self._engine = Engine(self._options, weakref.ref(self))
        self.is_inside = False  # whether a `with` block is running; fpsim's Exit resets it
        try:
            for group in self._listeners:
                group.scaling = self._engine.make_site
                group.rounds_few_bits_stochastically = self.rule.fits_few_bits
        except BaseException:
            self.detach()
            raise

    @property
    def rule(self) -> LayerRule:
        """The rule that chooses scales."""
        return self._options.rule

    @property
    def init_scale(self) -> float:
        """The scale of gradients that enter the model."""
        return float(self._options.init_scale)

    @property
    def update_every(self) -> int:
        """The interval, in steps, at which scales are chosen."""
        return self._options.update_every

    @property
    def scale_upper_bound(self) -> float | None:
        """The largest factor of one product."""
        return self._options.scale_upper_bound

    @property
    def accum_upper_bound(self) -> float | None:
        """The largest scale that factors may add up to."""
        return self._options.accum_upper_bound

    @property
    def branches(self) -> str:
        """The mode of adding the gradients of several consumers, "exact" or "original"."""
        return self._options.branches

    @property
    def u_min(self) -> str | float:
        """The lower limit of gradients, "smallest", "flush", "normal" or a number."""
        return self._options.u_min

    @property
    def u_max(self) -> float | None:
        """The upper limit of gradients, None for each format's largest magnitude."""
        return self._options.u_max

    @property
    def step(self) -> int:
        """Number of backward passes so far."""
        return self._engine.schedule.step

    @property
    def observer(self) -> Observed | None:
        """The observer of gradients and their scales, such as a `Recorder`, or None."""
        return self._engine.observer

    @observer.setter
    def observer(self, observer: Observed | None) -> None:
        self._engine.observer = observer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> AdaLossScaled:
        self.is_inside = True
        return self

    __exit__ = Exit()

    def leave(self) -> None:
        """Detach at the end of the `with` block."""
        self.detach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "An AdaLossScaled belongs to the model that it is attached to, and is neither copied nor pickled. Copy or "
            "save its .model and its state_dict(), and give them to a new one."
        )

    def __repr__(self) -> str:
        words = [repr(self.rule), f"update_every={self.update_every}", f"branches={self.branches!r}"]
        return f"AdaLossScaled({type(self.model).__name__}, {', '.join(words)}, step={self.step})"

    def detach(self) -> nn.Module:
        """Restore the model and return it. Graphs that were recorded before keep their scales."""
        for group in self._listeners:
            if group.scaling == self._engine.make_site:
                _release(group)
        return self.model

    @staticmethod
    def detach_from(model: nn.Module) -> None:
        """Detach whichever AdaLossScaled is attached to a model, without a reference to it.

        Ctrl-C between construction and `with` leaves an AdaLossScaled that only a traceback references.

        Raises TypeError for anything but a module, ValueError for a model that is not quantised.
        """
        for group in listeners(model):
            if _engine_of(group) is not None:
                _release(group)

    def last_log2_scale(self, site: str, role: str = "error") -> int:
        """Return log2 of the scale at which a site's gradient was rounded last; copies it to the host.

        site: the site's name, such as "layer1.conv1:conv2d".
        role: "error" or "weight_grad".
        Raises KeyError for a site where no gradient was rounded yet.
        """
        scales = self._last_scales(role)
        if not isinstance(site, str):
            raise TypeError(f"site={shown(site)} is not a string. Expected: a site's name, 'layer1.conv1:conv2d'.")
        if site not in scales:
            known = ", ".join(sorted(scales)) or "none yet"
            raise KeyError(f"No gradient was rounded at {shown(site)} as {role}. Sites: {known}.")
        return int(scales[site])

    def log2_scales(self, role: str = "error") -> dict[str, int]:
        """Return log2 of the scales at which gradients were rounded last, by site, from input to output.

        role: "error" or "weight_grad"; or "wgrad.dy" for the second copy of dy, if the weight gradient's product has
            another format.
        Copies the scales to the host.
        """
        return {site: int(log2_scale) for site, log2_scale in reversed(self._last_scales(role).items())}

    def _last_scales(self, role: str) -> dict[str, torch.Tensor]:
        require_word("role", role, ("error", "weight_grad", "wgrad.dy"))
        states = self._engine.states
        return {site: s.log2_scale for (site, r), s in states.items() if r == role and s.log2_scale is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return all settings, the step, and the state of each site, as plain values; copies numbers to the host."""
        schedule, states = self._engine.schedule, self._engine.states
        return {
            **self._options.as_plain(),
            "step": schedule.step,
            "updated": schedule.last_update,
            "sites": [{"site": site, "role": role, **state.as_plain()} for (site, role), state in states.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        The whole state is checked first: a refused state changes nothing.

        Raises TypeError for anything but a mapping; ValueError for the state of other settings or of another model, for
        an invalid value, and for missing settings, because an older version saved only the rule.
        """
        require_mapping("state", state, "what state_dict() returns")
        if state.get("native"):
            raise ValueError(
                "The state is of a training in real float16, whose layers ada_loss.GradScaler(layers=...) scales. Load "
                "it there, or start without the state."
            )
        settings = self._options.as_plain()
        needed = [*settings, "step", "updated", "sites"]
        missing = [name for name in needed if name not in state]
        if missing:
            raise ValueError(
                f"The state has {shown(sorted(map(str, state)))}, and lacks {', '.join(missing)}. Expected: a "
                f"state_dict() of this version, which keeps all settings; older ones kept the rule alone. Start "
                f"without the state: scales are chosen again in the next step."
            )
        other = [name for name in settings if state[name] != settings[name]]
        if other:
            raise ValueError(
                f"The state is of other settings: {', '.join(f'{name}={_short(state[name])}' for name in other)}. This "
                f"has {', '.join(f'{name}={_short(settings[name])}' for name in other)}. Make an AdaLossScaled with "
                f"the state's settings, or start without the state."
            )
        # Nothing is loaded before the whole state is checked: after loading half of it, the training would continue
        # with mixed scales.
        check_progress(state)
        modules = {name for m in self.model.modules() for name, _ in m.named_modules()}
        length = getattr(self.rule, "length", None)
        check_sites(state["sites"], state["step"], modules, length)
        self._engine.load(int(state["step"]), int(state["updated"]), state["sites"])


def _release(listener: Any) -> None:
    listener.scaling, listener.rounds_few_bits_stochastically = None, False


def _engine_of(listener: Any) -> Engine | None:
    """Return the engine that scales a model's gradients; None if another object scales them, or none does."""
    engine = getattr(listener.scaling, "__self__", None)
    return engine if isinstance(engine, Engine) else None


def _require_unscaled(registered: list[Any]) -> None:
    """Raise ValueError if the model is scaled already; detach an AdaLossScaled without a reference, with a warning."""
    busy = [group for group in registered if group.scaling is not None]
    engines = [_engine_of(group) for group in busy]
    if any(engine is None or engine.owner() is not None for engine in engines):
        raise ValueError(
            "This model is scaled already. Call detach() on the other AdaLossScaled first, or "
            "AdaLossScaled.detach_from(model) where that is out of reach, as after Ctrl-C."
        )
    for group in busy:
        _release(group)
    if busy:
        warnings.warn(
            "This model was scaled by an AdaLossScaled that nothing holds any longer, as after Ctrl-C. It is detached.",
            stacklevel=3,
        )


def _short(setting: Any) -> str:
    """Return a setting as text for an error message, with a long list of modules shortened."""
    text = repr(setting)
    return text if len(text) <= 80 else f"{text[:38]} ... {text[-38:]}"


def _selected(
    model: nn.Module, transforms: Iterable[AdaLossTransform | AdaLossTransformCast] | None
) -> tuple[frozenset[str] | None, bool]:
    """Return the names of the modules whose products are scaled (None for all), and whether casts are scaled."""
    if transforms is None:
        return None, True
    given = require_iterable("transforms", transforms, "[AdaLossTransformLinear()]")
    if not given:
        raise ValueError(
            f"transforms={shown(transforms)} is empty, and nothing would be scaled. Expected: at least one. Omit it to "
            f"scale every product."
        )
    modules, selected, scales_casts = dict(model.named_modules()), set[str](), False
    for transform in given:
        if isinstance(transform, AdaLossTransformCast):
            scales_casts = True
            continue
        if not isinstance(transform, AdaLossTransform):
            raise TypeError(
                f"A transform is {shown(transform)}. Expected: AdaLossTransformLinear(), "
                f"AdaLossTransformConv2d(), ..., or AdaLossTransform(YourModule)."
            )
        matched = [name for name, module in modules.items() if transform.matches(module)]
        if not matched:
            kinds = sorted({type(m).__name__ for m in modules.values()})
            raise ValueError(
                f"The transform {transform} matches no module. Classes in the model: {', '.join(kinds)}. "
                f"Leave it out, or leave out transforms= to scale every product."
            )
        selected |= {m for m in modules for name in matched if m == name or m.startswith(f"{name}.") or not name}
    return frozenset(selected), scales_casts
