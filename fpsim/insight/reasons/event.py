"""Event: a failure at one place of a step, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fpsim.emulation.tracing import Operation

__all__ = ["Event"]


@dataclass
class Event:
    """A failure at one place of a step.

    stage: "state", "forward", "backward", "accumulation", "optimizer", "buffers", "float32" or "loss".
    kind: in words, such as "overflow" or "division by zero".
    place: a site, or the name of a parameter, buffer or input.
    role: "activation", "error", "weight", "weight_grad", "input", "parameter", "buffer", "gradient", "state",
        "optimizer state", "update", "loss", or another role of a rounding, such as "fprop.x" or "output".
    count, of: the number of elements that fail, and the number of all elements.
    why: an explanation in sentences, with the numbers to check.
    operation: the operation that failed; None for inputs, and for operations of an optimizer.
    origin: the first operation for which float32 would help; `operation` unless an earlier operation is the cause.
    constant: the constant that `origin` lost, such as an eps, if that is the cause.
    read: the operands at `place`, as pairs of a name and a range.
    readers: the operations that read a failed input.
    stretch: the operations along which a gradient is lost gradually, from the first one on.
    largest: the largest magnitude before a rounding; for lost gradients, the largest magnitude in the reference.
    """

    stage: str
    kind: str
    place: str
    role: str
    count: int = 0
    of: int = 0
    why: list[str] = field(default_factory=list)
    operation: Operation | None = None
    origin: Operation | None = None
    constant: float | None = None
    read: list[tuple[str, str]] = field(default_factory=list)
    fmt: str = ""
    batch: int | None = None
    remedy: str = ""  # the kind of remedy to try, or to advise if nothing can be tried
    ends: Any = None
    readers: list[Operation] = field(default_factory=list)
    stretch: list[Operation] = field(default_factory=list)
    largest: float = 0.0

    def beyond(self, end: str, largest: float, first: str) -> str:
        """Describe numbers beyond the largest number of a format. first: the index of the first of them."""
        return f"{self.count} of {self.of} are beyond {largest:.6g}, the end of {end} (first at {first or '0'})"

    def reads_of(self, operation: Operation) -> None:
        """Set `read` to the operands of an operation."""
        self.read = [(p.site, str(p.notes["result"])) for p in operation.parents if "result" in p.notes]

    def row(self) -> dict[str, Any]:
        """Return the row of `Why`."""
        call = self.operation.call if self.operation is not None else 0
        return {
            "stage": self.stage,
            "place": self.place,
            "role": self.role,
            "kind": self.kind,
            "count": self.count,
            "of": self.of,
            "format": self.fmt,
            "call": call,
            "batch": self.batch,
            "why": " ".join(self.why),
        }
