"""A loss scaler of this library in Lightning's loop: a precision plugin, and a callback that tells how it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
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

    `lightning.Trainer(plugins=[...])` takes it.

    scaler: a `GradScaler`, or that of a job. With `layers`, those of the LightningModule.
    precision: "32-true" casts nothing: quantise the networks inside of the LightningModule. "16-mixed" is training in
        real float16 on a GPU, under torch.autocast, of networks that are not quantised.
    Raises ValueError for another precision, for a loss that "16-mixed" finds on a CPU, and for LBFGS.
    """

    def __init__(self, scaler: GradScaler, precision: str = "32-true") -> None:
        if precision not in ("32-true", "16-mixed"):
            raise ValueError(f"precision={precision!r} is invalid. Expected: '32-true', '16-mixed'.")
        self.scaler, self.precision = scaler, precision  # type: ignore[assignment]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        is_half = self.precision == "16-mixed"
        with torch.autocast("cuda", torch.float16, cache_enabled=False) if is_half else super().forward_context():
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
