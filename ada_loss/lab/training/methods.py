"""The scaling methods of a training, by name."""

from __future__ import annotations

from torch import nn

from ada_loss.lab.training.native import NativeScaler, refused_with_native
from ada_loss.layerwise import AdaLossScaled
from ada_loss.layerwise.native import NativeScaling, native_rule
from ada_loss.rules import LAYER_RULES, SYSTEMS, LossRule, layer_rule, loss_rule
from ada_loss.scalers import GradScaler
from fpsim.checks import did_you_mean, number_of, shown

__all__ = [
    "fits_few_bits",
    "make_native_scaling",
    "make_scaling",
    "require_method",
    "require_native_method",
    "scales_by_layer",
]

# jmp is left out, because its first scale has no default.
DYNAMIC = tuple(name for name, rule in SYSTEMS.items() if rule.dynamic and name != "jmp")


def scales_by_layer(method: str | float) -> bool:
    """Return True if a scaling method gives each layer its own scale."""
    return isinstance(method, str) and method.partition(" ")[0] in ("adaptive", *LAYER_RULES)


def fits_few_bits(method: str | float) -> bool:
    """Return True if a method suits gradients in formats of few bits, which are then rounded stochastically."""
    return scales_by_layer(method) and layer_rule(_rule_of(str(method))).fits_few_bits


def _rule_of(method: str) -> str:
    """Return the layer rule of a method: "exact" of "exact normal"."""
    name = method.partition(" ")[0]
    return "approx_range" if name == "adaptive" else name


def _u_min_of(method: str) -> str:
    """Return the lower limit of a method's gradients, `u_min`; the same in emulated and native trainings."""
    return method.partition(" ")[2] or "smallest"


def require_method(method: str | float) -> None:
    """Raise ValueError for an unknown scaling method, and for a constant that is not a scale."""
    if not isinstance(method, str):
        _constant(method)
    elif method != "none" and method not in DYNAMIC:
        if not scales_by_layer(method) or method.partition(" ")[2] not in ("", "normal"):
            names = ["adaptive", *LAYER_RULES, *DYNAMIC]
            known = ", ".join(["none", "a number", *names])
            hint = did_you_mean(method, ["none", *names])
            if _is_number(method):
                hint = f" Write {method.strip()} without quotes."
            raise ValueError(f"Unknown scaling method {shown(method)}.{hint} Known: {known}.")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def make_scaling(
    method: str | float, model: nn.Module, kind: type[GradScaler] = GradScaler
) -> tuple[GradScaler, AdaLossScaled | None]:
    """Return the loss scaler of a method, and the adaptive scaling that was attached to the model, if any.

    Every method skips a step with a gradient that is not finite, so that methods compare on equal terms.

    method: one of
        "none": no scaling.
        a number: a constant loss scale.
        a loss rule's name ("torch", "nnabla", ...): the dynamic loss scale of this system, with the system's defaults.
        "adaptive" or a layer rule's name ("approx_range", "exact", ...): a scale for each layer; with " normal"
        appended, a scale that keeps gradients above the smallest normal number.
    model: a quantised model.
    kind: the class of the scaler.
    Raises ValueError for an unknown method.
    """
    require_method(method)
    if not isinstance(method, str):
        return kind(_constant(method)), None
    if method in DYNAMIC:
        return kind(method), None
    adaptive = None
    if method != "none":
        adaptive = AdaLossScaled(model, rule=_rule_of(method), u_min=_u_min_of(method))
    return kind(_constant(1.0)), adaptive


def require_native_method(method: str | float) -> None:
    """Raise ValueError for a known method that a training in real float16 cannot have."""
    if scales_by_layer(method):
        try:
            native_rule(_rule_of(str(method)))
        except ValueError as error:
            words = f"Omit {shown(method)}, or give the native format in a grid of its own, under `also`"
            raise refused_with_native(f"The scaling {shown(method)}", str(error), words) from None


def make_native_scaling(method: str | float, model: nn.Module) -> NativeScaler:
    """Return the loss scaler of a method for a model in real float16; scales of layers are in the scaler's `layers`.

    The methods are named as for `make_scaling`: "adaptive" keeps gradients above the smallest number, and "adaptive
    normal" above the smallest normal number. "adaptive normal" is the default of `ada_loss.GradScaler(layers=model)`.

    model: a model that is not quantised.
    Raises ValueError for an unknown method, and for a method that needs the emulation.
    """
    require_method(method)
    require_native_method(method)
    if not isinstance(method, str):
        return NativeScaler(_constant(method))
    if method in DYNAMIC:
        return NativeScaler(method)
    layers = None if method == "none" else NativeScaling(model, rule=_rule_of(method), u_min=_u_min_of(method))
    return NativeScaler(_constant(1.0), layers=layers)


def _constant(scale: float) -> LossRule:
    """Return the rule of a constant scale; it skips steps that overflow, as dynamic rules do."""
    return loss_rule("static", scale=number_of("scaling", scale), skip_overflow=True)
