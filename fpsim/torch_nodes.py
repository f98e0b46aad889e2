"""Private names of torch at the nodes of autograd's graph, for hooks that change gradients, and of its forward mode.

`tests/fpsim/test_torch_nodes.py` holds what each is believed to mean against the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "call_at_the_end_of_backward",
    "convolution_of",
    "in_forward_mode",
    "require_hooks_of_nodes",
    "slot_dtypes",
    "slot_shapes",
    "sum_sent_by_convolution",
    "take_float32_gradients",
    "will_run",
]

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
ENGINE: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


def require_hooks_of_nodes() -> None:
    """Raise NotImplementedError where this torch lacks a name that is needed, so that nothing is lost in silence."""
    node: Any = torch.zeros(1, device="cpu").requires_grad_().view_as(torch.zeros(1, device="cpu")).grad_fn
    needed = {
        "torch._C._will_engine_execute_node": (torch._C, "_will_engine_execute_node"),
        "torch._C._current_graph_task_id": (torch._C, "_current_graph_task_id"),
        "queue_callback of autograd's engine": (ENGINE, "queue_callback"),
        "_input_metadata of a node": (node, "_input_metadata"),
        "register_prehook of a node": (node, "register_prehook"),
    }
    missing = [name for name, (owner, attribute) in needed.items() if not hasattr(owner, attribute)]
    if missing:
        raise NotImplementedError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which scaling layers in real float16 needs. "
            f"Expected: torch 2.13, with which it is tested; or one scale for all layers, ada_loss.GradScaler()."
        )


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on, by dual numbers or a transform; torch.compile asks as it traces."""
    return forward_ad._current_level >= 0


in_forward_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as fpsim.torch_internals has it


def slot_dtypes(node: Any) -> list[torch.dtype]:
    """The dtypes of the gradients that arrive at a node of autograd's graph: those of the outputs of its operation."""
    return [slot.dtype for slot in node._input_metadata]


def slot_shapes(node: Any) -> list[tuple[int, ...]]:
    """The shapes of the gradients that arrive at a node, of nested tensors without meaning."""
    return [tuple(slot.shape) for slot in node._input_metadata]


def convolution_of(node: Any) -> tuple[int, bool]:
    """The groups of the convolution that a ConvolutionBackward0 belongs to, and whether it is transposed."""
    return node._saved_groups, node._saved_transposed


def sum_sent_by_convolution(node: Any, g: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient that a ConvolutionBackward0 sends to its input of this shape, of other numbers than it has saved."""
    settings = node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed
    rest = node._saved_output_padding, node._saved_groups, [True, False, False]
    x = torch.empty((), dtype=g.dtype, device=g.device).expand(shape)  # only its shape is looked at
    return torch.ops.aten.convolution_backward(g, x, weight, None, *settings, *rest)[0]


def take_float32_gradients(leaf: Tensor) -> None:
    """Give a leaf of any dtype float32 gradients: the engine casts what arrives before hooks of the last node see it.

    Raises NotImplementedError where this torch cannot.
    """
    if not HAS_GRAD_DTYPE:
        raise NotImplementedError(
            f"torch {torch.__version__} gives a {leaf.dtype} parameter no float32 gradient, and small ones would be "
            f"lost. Expected: torch 2.13, or float32 parameters under torch.autocast."
        )
    leaf.grad_dtype = torch.float32  # type: ignore[attr-defined]


# Both are None where torch has no such name, which `require_hooks_of_nodes` refuses.
# Whether the running backward pass will call a node of the graph, or has; asked within it.
will_run: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", None)  # type: ignore[assignment]
# Calls a function once the running backward pass has given all gradients; what it raises, `backward` raises.
call_at_the_end_of_backward: Callable[..., None] = getattr(ENGINE, "queue_callback", None)  # type: ignore[assignment]
