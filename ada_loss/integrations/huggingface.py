"""Use a loss scaler of this library in Accelerate's loop, and thereby in transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ada_loss.scalers import GradScaler
from fpsim.checks import shown
from fpsim.scaling import listeners

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError:
    raise ImportError("This needs Accelerate: pip install accelerate.") from None

__all__ = ["tell", "use_scaler"]

NEEDS_NO_SCALE = "mixed_precision='bf16' computes in bfloat16, which has float32's exponents and needs no loss scale"


def use_scaler(loop: Any, scaler: GradScaler) -> None:
    """Make an Accelerator or a transformers.Trainer use a scaler of this library; no subclass is needed.

    From then on `accelerator.backward(loss)` scales, its optimizers unscale, skip steps that are not finite and update
    the scale, and `accelerator.clip_grad_norm_` (`max_grad_norm` of the Trainer) clips unscaled gradients.

    With mixed_precision="fp16" (the Trainer's fp16=True) the model is trained in real float16, and must not be
    quantised. With "bf16" the model must be quantised: its format is emulated inside of bfloat16 tensors, which hold
    formats of up to 8 bits.

    Args:
        loop: an Accelerator before `prepare`, or a Trainer before `train`.
        scaler: a GradScaler with any rule. In float16 it may have `layers`, made from the model before `prepare`.

    Raises:
        TypeError: for another object.
        ValueError: for an Accelerator that has prepared its optimizers, for DeepSpeed and Megatron, for bfloat16 with
            `layers`, for float16 if the loop does not cast to it; and later, when the model is prepared, for a
            quantised model in float16, and for a model that is not quantised in bfloat16.
    """
    accelerator = getattr(loop, "accelerator", loop)  # a Trainer has created its own Accelerator
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"The loop is {shown(loop)}. Expected: an accelerate.Accelerator, a transformers.Trainer.")
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{accelerator.distributed_type.value} scales losses itself, and calls no scaler. Expected: FSDP, DDP, or "
            f"one process."
        )
    if accelerator.mixed_precision not in ("no", "fp16", "bf16"):
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} scales its tensors itself. Expected here: 'no', 'bf16' "
            f"for a quantised model, or 'fp16' for one that is not quantised."
        )
    is_bfloat16 = accelerator.mixed_precision == "bf16"
    if is_bfloat16 and scaler.layers is not None:
        raise ValueError(
            f"{NEEDS_NO_SCALE}, and GradScaler(layers=...) scales float16. Expected: mixed_precision='fp16' on a GPU, "
            f"or 'no'. Leave bf16= of the Trainer out."
        )
    is_half = accelerator.mixed_precision == "fp16"
    if is_half and not accelerator.native_amp:
        raise ValueError(
            f"mixed_precision='fp16' casts nothing on {accelerator.device.type}: Accelerate does so on a GPU alone. "
            f"Expected here: 'no' (leave fp16= of the Trainer out), and torch.autocast in the model's own forward."
        )
    if accelerator._optimizers:
        raise ValueError("The Accelerator has prepared its optimizers. Call use_scaler before accelerator.prepare.")

    def unscale_gradients(optimizer: Any = None) -> None:
        given = accelerator._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, list | tuple) else [given]:
            scaler.unscale_(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def prepare_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_bfloat16 and not is_quantised(model):
            raise ValueError(
                f"{NEEDS_NO_SCALE}, and {type(model).__name__} is not quantised. Leave use_scaler out; or, for another "
                f"format's gradients, quantise the model first. mixed_precision='fp16' on a GPU needs a scaler."
            )
        if is_half and is_quantised(model):
            raise ValueError(
                f"{type(model).__name__} is quantised, and mixed_precision='fp16' would cast its tensors to float16, "
                f"where small gradients are lost before they are rounded. Expected: mixed_precision='no'."
            )
        return prepare(model, *args, **kwargs)

    # The model can be checked only when it is prepared, and a Trainer prepares it at the beginning of the training.
    prepare = accelerator.prepare_model
    if is_half or is_bfloat16:
        accelerator.prepare_model = prepare_model
    accelerator.scaler = scaler
    # Accelerate's own method does nothing unless Accelerate itself casts to float16.
    accelerator.unscale_gradients = unscale_gradients


def is_quantised(model: Any) -> bool:
    """Return True if `fpsim.quantize` made the model."""
    try:
        return bool(listeners(model))
    except ValueError:
        return False


def tell(log: Callable[..., None]) -> Any:
    """Create a `TrainerCallback` that passes every number that a transformers.Trainer logs to a function.

    Args:
        log: a function that is called as log(step, **numbers), such as the method of a `Job`; steps count from 0.
    """
    from transformers import TrainerCallback  # here, because Accelerate alone needs no transformers

    class Tell(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            log(max(state.global_step - 1, 0), **numbers)

    return Tell()
