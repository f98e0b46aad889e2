"""The scaling methods of a training, by name."""

from __future__ import annotations

from torch import nn

from ada_loss.layerwise import AdaLossScaled
from ada_loss.rules import LAYER_RULES, SYSTEMS, loss_rule
from ada_loss.scalers import GradScaler

__all__ = ["make_scaling", "scales_by_layer"]

DYNAMIC = tuple(name for name, rule in SYSTEMS.items() if rule.dynamic and name != "jmp")  # jmp has no first scale


def scales_by_layer(method: str | float) -> bool:
    """Whether a method, in the words of `make_scaling`, gives each layer a scale of its own."""
    return isinstance(method, str) and method.partition(" ")[0] in ("adaptive", *LAYER_RULES)


def make_scaling(method: str | float, model: nn.Module) -> tuple[GradScaler, AdaLossScaled | None]:
    """A loss scaler, and adaptive scaling attached to the quantised model where the method asks for it.

    method: "none"; a number, that scale throughout; a loss rule's name ("torch", "nnabla", ...) with its system's
    defaults; "adaptive", or a layer rule's name ("approx_range", "exact", ...), with " normal" behind it to keep
    gradients above the smallest normal number. A step with a gradient that is not finite is skipped under each of
    them, so that they are compared on one footing.
    """
    constant = 1.0
    adaptive = None
    if isinstance(method, str):
        if method in DYNAMIC:
            return GradScaler(method), None
        name, _, u_min = method.partition(" ")
        if method != "none":
            if not scales_by_layer(method) or u_min not in ("", "normal"):
                known = ", ".join(["none", "a number", "adaptive", *LAYER_RULES, *DYNAMIC])
                raise ValueError(f"Unknown scaling method {method!r}. Known: {known}.")
            rule = "approx_range" if name == "adaptive" else name
            adaptive = AdaLossScaled(model, rule=rule, u_min=u_min or "smallest")
    else:
        constant = float(method)
    return GradScaler(loss_rule("static", scale=constant, skip_overflow=True)), adaptive
