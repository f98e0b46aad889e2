"""summary(model): what each module of a quantised model rounds to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any, NamedTuple, overload

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fpsim.border import require_module
from fpsim.emulation.scope import NO_SPECS
from fpsim.insight.rows import Rows, text_table
from fpsim.insight.stored_bytes import stored_bytes
from fpsim.models.installed import emulated_forward
from fpsim.models.optimizers import QuantizedOptimizer
from fpsim.policies.policy import RoleSpecs
from fpsim.policies.products import Products
from fpsim.torch_internals import is_compiled_wrapper

__all__ = ["Summary", "SummaryRow", "summary"]


class SummaryRow(NamedTuple):
    """What one module rounds."""

    module: str
    type: str
    weight: str
    activation: str
    error: str
    weight_grad: str
    products: str = ""
    wide: str = ""


class Summary(list[SummaryRow]):
    """Rows of what is rounded where; prints as a table."""

    def to_frame(self) -> Any:
        """A pandas.DataFrame. Raises ImportError without pandas."""
        return Rows(row._asdict() for row in self).to_frame()

    def __str__(self) -> str:
        heads = tuple("float32 on purpose" if name == "wide" else name for name in SummaryRow._fields)
        used = [name not in ("products", "wide") or any(getattr(r, name) for r in self) for name in SummaryRow._fields]
        return text_table([*compress(heads, used)], [[*compress(row, used)] for row in self])

    __repr__ = __str__


@overload
def summary(model: nn.Module) -> Summary: ...


@overload
def summary(model: QuantizedOptimizer) -> Rows: ...


def summary(model: nn.Module | QuantizedOptimizer) -> Summary | Rows:
    """What each module of a quantised model rounds to, by role; prints as a table.

    Modules without operations of their own pass their formats on. Those that were added later run under the formats
    around them; parametrizations, which compute weights, in float32. One column more says how operands of products are
    quantised, if they are anywhere, and one names the operations that ran in float32 on purpose when the model was last
    called, such as `x.float().pow(2)`, if there were any.

    Of what `quantize_optimizer` returned: the bytes of each parameter in its formats, of the weight, its copies, the
    states that there are, and their scales, with the bytes that float32 takes.

    Args:
        model: from `quantize`, or what `quantize_optimizer` returned.

    Raises:
        ValueError: for a model that is not quantised.

    >>> from fpsim import quantize
    >>> print(summary(quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "bf16")))
    module   type        weight             activation         error              weight_grad
    -------  ----------  -----------------  -----------------  -----------------  -----------------
    (model)  Sequential  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    0        Linear      bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    1        ReLU        bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    >>> import torch
    >>> from fpsim import quantize_optimizer
    >>> layer = nn.Linear(64, 64, bias=False)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> quantized = quantize_optimizer(optimizer, "adam8bit", layer)
    >>> layer(torch.ones(1, 64)).sum().backward()
    >>> optimizer.step()
    >>> print(summary(quantized))
    parameter  elements  weight  copies  states  scales  bytes  float32
    ---------  --------  ------  ------  ------  ------  -----  -------
    weight     4096      16384   0       8192    128     24704  49152
    (all)      4096      16384   0       8192    128     24704  49152
    """
    if isinstance(model, QuantizedOptimizer):
        return stored_bytes(model)
    require_module(model)
    rows = Summary()
    for name, module, specs, products in _under(model, "", None, None, set()):
        words = [str(spec) if spec else "float32" for spec in specs]
        forward = emulated_forward(module)
        wide = "" if forward is None else ", ".join(forward.wide)
        operands = "" if products is None else str(products)
        rows.append(SummaryRow(name or "(model)", type(module).__name__, *words, products=operands, wide=wide))  # type: ignore[misc]
    if not rows:
        raise ValueError(f"{type(model).__name__} is not quantised. Call fpsim.quantize(model, fmt) first.")
    return rows


def _under(
    module: nn.Module, name: str, around: RoleSpecs | None, products: Products | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, RoleSpecs, Products | None]]:
    """The name, module, formats and products of what runs emulated.

    name: as sites are named, even where another library has put the module elsewhere.
    around: the formats of the module around; None where that is not quantised.
    products: those of the module around.
    """
    if module in seen:
        return
    seen.add(module)
    forward = emulated_forward(module)
    if forward is not None:
        name, around, products = forward.name, forward.specs, forward.products
    elif isinstance(module, ParametrizationList):
        around, products = around and NO_SPECS, None
    if around is not None and not is_compiled_wrapper(module):
        yield name, module, around, products
    for child_name, child in module.named_children():
        yield from _under(child, f"{name}.{child_name}" if name else child_name, around, products, seen)
