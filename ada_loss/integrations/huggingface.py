"""A loss scaler of this library in Accelerate's loop, and in that of transformers' Trainer, which is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ada_loss.scalers import GradScaler
from fpsim.checks import shown

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError:
    raise ImportError("This needs Accelerate: pip install accelerate.") from None

__all__ = ["tell", "use_scaler"]


def use_scaler(loop: Any, scaler: GradScaler) -> None:
    """Scale the losses of an Accelerator, or of a transformers.Trainer, and step with it. No subclass is needed.

    From here `accelerator.backward(loss)` scales, its optimizers unscale, skip steps that are not finite and update
    the scale, and `accelerator.clip_grad_norm_` (`max_grad_norm` of the Trainer) clips what is unscaled.

    loop: an Accelerator before `prepare`, or a Trainer before `train`.
    Raises TypeError for another object; ValueError for mixed precision, which would cast the emulated model's tensors,
    and for an Accelerator that has prepared its optimizers.
    """
    accelerator = getattr(loop, "accelerator", loop)
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"The loop is {shown(loop)}. Expected: an accelerate.Accelerator, a transformers.Trainer.")
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} casts tensors itself, besides the emulated format. "
            f"Expected here: 'no'. Leave fp16= and bf16= of the Trainer out."
        )
    if accelerator._optimizers:
        raise ValueError("The Accelerator has prepared its optimizers. Call use_scaler before accelerator.prepare.")

    def unscale_gradients(optimizer: Any = None) -> None:
        given = accelerator._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, list | tuple) else [given]:
            scaler.unscale_(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    accelerator.scaler = scaler
    accelerator.unscale_gradients = unscale_gradients  # its own does nothing but under autocast in float16


def tell(log: Callable[..., None]) -> Any:
    """A `TrainerCallback` that hands every number that a transformers.Trainer logs to a function.

    log: called as log(step, **numbers), such as the method of a `Job`; steps count from 0.
    """
    from transformers import TrainerCallback

    class Tell(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            log(max(state.global_step - 1, 0), **numbers)

    return Tell()
