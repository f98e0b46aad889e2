"""Use a loss scaler of this library in Lightning's loop: a precision plugin, and a callback that reports progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ada_loss.scalers import GradScaler
from fpsim.scaling import listeners

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import Precision
except ImportError:
    raise ImportError("This needs Lightning: pip install lightning.") from None

__all__ = ["ScaledPrecision", "Tell"]

NEEDS_NO_SCALE = "precision='bf16-mixed' computes in bfloat16, which has float32's exponents and needs no loss scale"


class ScaledPrecision(Precision):  # type: ignore[misc]
    """Precision plugin: scale the loss, unscale before Lightning clips, and skip steps that are not finite.

    Pass it as `lightning.Trainer(plugins=[...])`.

    Args:
        scaler: a `GradScaler`, or the scaler of a job. Its `layers`, if any, must be those of the LightningModule.
        precision: "32-true" casts nothing: quantise the networks inside of the LightningModule. "16-mixed" is training
            in real float16 on a GPU, under torch.autocast, of networks that are not quantised. "bf16-mixed" is
            torch.autocast in bfloat16, of quantised networks: their format is emulated inside of bfloat16 tensors,
            which hold formats of up to 8 bits.

    Raises:
        ValueError: for another precision, for "bf16-mixed" with `layers` or without a quantised network, for
            "16-mixed" with a loss on a CPU, and for LBFGS.
    """

    def __init__(self, scaler: GradScaler, precision: str = "32-true") -> None:
        if precision not in ("32-true", "16-mixed", "bf16-mixed"):
            raise ValueError(f"precision={precision!r} is invalid. Expected: '32-true', '16-mixed', 'bf16-mixed'.")
        if precision == "bf16-mixed" and scaler.layers is not None:
            raise ValueError(f"{NEEDS_NO_SCALE}, and GradScaler(layers=...) scales float16. Expected: '16-mixed'.")
        self.scaler, self.precision = scaler, precision  # type: ignore[assignment]

    def convert_module(self, module: Any) -> Any:
        if self.precision == "bf16-mixed":  # type: ignore[comparison-overlap]
            try:
                listeners(module)
            except ValueError:
                raise ValueError(
                    f"{NEEDS_NO_SCALE}, and nothing in {type(module).__name__} is quantised. Leave ScaledPrecision "
                    f"out, and give the Trainer precision='bf16-mixed'; or quantise the networks inside of it first."
                ) from None
        return super().convert_module(module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # autocast's cache of cast weights is off, as in Lightning's own plugin for mixed precision.
        with ExitStack() as stack:
            if self.precision == "16-mixed":
                stack.enter_context(torch.autocast("cuda", torch.float16, cache_enabled=False))
            elif self.precision == "bf16-mixed":  # type: ignore[comparison-overlap]
                # The batch may be on either device. autocast is entered only for devices that exist, because autocast
                # warns of missing devices.
                for device in ("cpu", "cuda"):
                    if device == "cpu" or torch.cuda.is_available():
                        stack.enter_context(torch.autocast(device, torch.bfloat16, cache_enabled=False))
            else:
                stack.enter_context(super().forward_context())
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        if self.precision == "16-mixed" and not tensor.is_cuda:
            raise ValueError(
                f"The loss is on {tensor.device}, where precision='16-mixed' casts nothing. Expected: a GPU; or "
                f"precision='32-true', and torch.autocast in the module's own steps."
            )
        return super().pre_backward(self.scaler.scale(tensor), module)  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS calls its closure several times in a step, and a loss scaler unscales once. Expected: another "
                "optimizer, or Lightning's own precision."
            )
        result = closure()
        # If `training_step` returned None, Lightning skips the batch, and there is no gradient to unscale. As in
        # Lightning's own precision plugins, the hooks that come before a step are called even then.
        is_skipped = result is None and model.automatic_optimization
        if not is_skipped:
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if is_skipped:
            return result
        stepped = self.scaler.step(optimizer, **options)
        self.scaler.update()
        return stepped

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)


class Tell(Callback):  # type: ignore[misc]
    """Pass the loss of every batch, and the numbers that the module logs, to a function.

    log: a function that is called as log(step, **numbers), such as the method of a `Job`; steps count from 0.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self.log_numbers, self._batch = log, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        numbers = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.log_numbers(self._batch, **{**numbers, **({} if loss is None else {"loss": loss})})
        self._batch += 1
