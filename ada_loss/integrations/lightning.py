"""A loss scaler of this library in Lightning's loop: a precision plugin, and a callback that tells how it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ada_loss.scalers import GradScaler

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import Precision
except ImportError:
    raise ImportError("This needs Lightning: pip install lightning.") from None

__all__ = ["ScaledPrecision", "Tell"]


class ScaledPrecision(Precision):  # type: ignore[misc]
    """Scales the loss, unscales before Lightning clips, and skips steps that are not finite.

    It casts nothing: quantise the networks inside of the LightningModule. `lightning.Trainer(plugins=[...])` takes it.

    scaler: a `GradScaler`, or that of a job.
    """

    precision = "32-true"

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(self.scaler.scale(tensor), module)  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        result = closure()
        if result is None and model.automatic_optimization:  # the step had no loss
            return result
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        stepped = self.scaler.step(optimizer, **options)
        self.scaler.update()
        return stepped

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)


class Tell(Callback):  # type: ignore[misc]
    """Hands the loss of every batch, and what the module logs as numbers, to a function.

    log: called as log(step, **numbers), such as the method of a `Job`; steps count from 0.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self.log_numbers, self._batch = log, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        numbers = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.log_numbers(self._batch, **{**numbers, **({} if loss is None else {"loss": loss})})
        self._batch += 1
