"""The options of a training: their names, defaults and possible values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ada_loss.lab.training.methods import require_method
from fpsim.checks import did_you_mean, is_finite_number, is_whole, known_arguments, shown

__all__ = ["TrainOptions", "hint", "is_allowed", "possible"]

MOST = 2**53  # the largest integer option: up to this number float64, and therefore JSON, holds every integer


def _word(default: str, *others: str) -> Any:
    return field(default=default, metadata={"choices": (default, *others)})


def _number(default: float, least: int = 0) -> Any:
    return field(default=default, metadata={"least": least})


@known_arguments()
@dataclass(frozen=True)
class TrainOptions:
    """Options of a training. Equal options, with the same task and format, lead to the same training, bit for bit.

    scaling: the scaling method of the gradients; see `make_scaling`.
    optimizer: "sgd" (with momentum), "adam" or "adamw".
    epochs: the number of passes over the training data.
    steps: the number of steps; 0 to train for `epochs`.
    batch_size: the number of samples in a step.
    micro_batches: the number of parts of a batch over which gradients are accumulated.
    learning_rate: the peak learning rate.
    schedule: the learning rate after the warmup: "cosine" or "linear" decay to zero, or "constant".
    warmup: the number of steps in which the learning rate rises linearly to its peak.
    momentum: the momentum of "sgd".
    weight_decay: as torch's optimizers define it.
    max_gradient_norm: the global norm to which gradients are clipped; 0 for no limit.
    master_weights: "float32", or "none" to round parameters to their format after each step.
    accumulation: the dtype in which an operation accumulates before it rounds, "float32" or "float64".
    seed: the seed of the order of the batches and of the noise of stochastic rounding.
    record_every: the interval of calls that are tallied at every site; 0 records nothing.
    evaluate_every: the interval, in epochs, at which the test metrics are computed; 0 to compute them only at the end.
    device: where the training runs, "cpu" or "cuda".
    Raises ValueError for an unknown word or scaling method and for a number out of range; TypeError for an unknown
    option.

    >>> TrainOptions(learning_rate=1) == TrainOptions(learning_rate=1.0)
    True
    >>> TrainOptions(optimizer="sdg")
    Traceback (most recent call last):
    ValueError: Unknown optimizer 'sdg'. Did you mean 'sgd'? Known: sgd, adam, adamw.
    """

    scaling: str | float = "none"
    optimizer: str = _word("sgd", "adam", "adamw")
    epochs: int = _number(12, least=1)
    steps: int = _number(0)
    batch_size: int = _number(64, least=1)
    micro_batches: int = _number(1, least=1)
    learning_rate: float = _number(0.05)
    schedule: str = _word("cosine", "linear", "constant")
    warmup: int = _number(0)
    momentum: float = _number(0.9)
    weight_decay: float = _number(0.0)
    max_gradient_norm: float = _number(0.0)
    master_weights: str = _word("float32", "none")
    accumulation: str = _word("float32", "float64")
    seed: int = 0
    record_every: int = _number(100)
    evaluate_every: int = _number(0)
    device: str = "cpu"

    def __post_init__(self) -> None:
        for option in CHECKED.values():
            value = getattr(self, option.name)
            if not is_allowed(option.name, value):
                if "choices" in option.metadata:
                    words = f"Unknown {option.name} {shown(value)}.{hint(option.name, value)}"
                    raise ValueError(f"{words} Known: {possible(option.name)}.")
                words = f"{option.name} is {shown(value)}.{hint(option.name, value)}"
                raise ValueError(f"{words} Expected: {possible(option.name)}.")
            # The options are part of a cell's identity, in which 1 and 1.0 must be the same learning rate.
            kind: Any = type(option.default)
            object.__setattr__(self, option.name, kind(value))
        require_method(self.scaling)


CHECKED = {option.name: option for option in fields(TrainOptions) if option.metadata}


def is_allowed(name: str, value: object) -> bool:
    """Return True if an option with choices or a least value may have this value."""
    option = CHECKED[name]
    if "choices" in option.metadata:
        return value in option.metadata["choices"]
    if isinstance(option.default, int):
        return is_whole(value, option.metadata["least"]) and value <= MOST  # type: ignore[operator]
    return is_finite_number(value) and value >= option.metadata["least"]  # type: ignore[operator]


def possible(name: str) -> str:
    """Return the possible values of an option with choices or a least value, for an error message.

    >>> possible("epochs"), possible("momentum"), possible("optimizer")
    ('an integer, 1 or more', 'a finite number, 0 or more', 'sgd, adam, adamw')
    """
    option = CHECKED[name]
    if "choices" in option.metadata:
        return ", ".join(option.metadata["choices"])
    kind = "an integer" if isinstance(option.default, int) else "a finite number"
    return f"{kind}, {option.metadata['least']} or more"


def hint(name: str, value: object) -> str:
    """Return a hint at the value that was probably meant, for an error message; "" if there is no such value.

    >>> hint("optimizer", "sdg")
    " Did you mean 'sgd'?"
    """
    if name == "schedule" and isinstance(value, Mapping):
        return (
            " It is that of the learning rate. Formats in turn stand where a format may stand, as "
            "{'schedule': {0: 'fp16', 0.8: 'bf16'}}."
        )
    if is_whole(value, MOST + 1):
        return " That is more than 2**53."
    return did_you_mean(value, CHECKED[name].metadata.get("choices", ()))
