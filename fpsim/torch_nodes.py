"""Private names of torch for the nodes of autograd's graph, whose hooks change gradients, and for its forward mode.

`tests/fpsim/test_torch_nodes.py` checks the assumed meaning of each name against the installed torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "call_at_the_end_of_backward",
    "calls_of_backward",
    "convolution_of",
    "current_node",
    "edge_of",
    "graph_tasks_so_far",
    "in_forward_mode",
    "is_python_function",
    "is_view_of_function",
    "key_of",
    "names_in_graphs",
    "require_hooks_of_nodes",
    "sends_sums_by_moving",
    "slot_dtypes",
    "slot_shapes",
    "sum_sent_by_convolution",
    "take_float32_gradients",
    "will_run",
]

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
ENGINE: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


def require_hooks_of_nodes() -> None:
    """Raise NotImplementedError if this torch lacks a needed name, so that no change is lost silently."""
    node: Any = torch.zeros(1, device="cpu").requires_grad_().view_as(torch.zeros(1, device="cpu")).grad_fn
    needed = {
        "torch._C._will_engine_execute_node": (torch._C, "_will_engine_execute_node"),
        "torch._C._current_graph_task_id": (torch._C, "_current_graph_task_id"),
        "torch._C._current_autograd_node": (torch._C, "_current_autograd_node"),
        "torch.autograd.graph._engine_run_backward": (torch.autograd.graph, "_engine_run_backward"),
        "queue_callback of autograd's engine": (ENGINE, "queue_callback"),
        "_input_metadata of a node": (node, "_input_metadata"),
        "_sequence_nr of a node": (node, "_sequence_nr"),
        "register_prehook of a node": (node, "register_prehook"),
    }
    missing = [name for name, (owner, attribute) in needed.items() if not hasattr(owner, attribute)]
    if missing:
        raise NotImplementedError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which scaling layers in real float16 needs. "
            f"Expected: torch 2.13, with which it is tested; or one scale for all layers, ada_loss.GradScaler()."
        )


def in_forward_mode() -> bool:
    """True if forward-mode differentiation is on, by dual numbers or a transform; torch.compile calls it at tracing."""
    return forward_ad._current_level >= 0


in_forward_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as fpsim.torch_internals has it


def slot_dtypes(node: Any) -> list[torch.dtype]:
    """Return the dtypes of the gradients that arrive at a node of autograd's graph, one for each output."""
    return [slot.dtype for slot in node._input_metadata]


def slot_shapes(node: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients that arrive at a node; those of nested tensors have no meaning."""
    return [tuple(slot.shape) for slot in node._input_metadata]


def key_of(node: Any) -> tuple[str, int]:
    """Return a key of a node, the same in each call. Leaves have no key.

    Two nodes share a key only if two threads made them, each at the same place in its own sequence of nodes.
    """
    # `id(node)` is no such key: torch makes a new Python object for a node when the old one is gone.
    return node.name(), node._sequence_nr()


def edge_of(x: Any) -> tuple[Any, int]:
    """Return the node and the slot where the gradient of a tensor or GradientEdge arrives; no node for a leaf."""
    if isinstance(x, Tensor):
        return x.grad_fn, x.output_nr
    return x.node, x.output_nr


# Nodes of operations that move values. Those in _ADDING add up numbers of the gradient where a value was moved twice.
_ADDING = """
    Expand Repeat Index IndexSelect Gather Take AsStrided Unfold Cummax Cummin MaxPool2DWithIndices MaxPool3DWithIndices
    AdaptiveMaxPool2D AdaptiveMaxPool3D MaskedSelect Maximum Minimum
    """
_MOVING = f"""
    {_ADDING} View UnsafeView ReshapeAlias Alias Clone ToCopy T Transpose Permute Squeeze Unsqueeze Slice Select Split
    SplitWithSizes Unbind Diagonal DiagEmbed BlockDiag Flip Roll Rot90 PixelShuffle PixelUnshuffle ChannelShuffle Cat
    Stack Tril Triu Sort Topk Kthvalue Median Nanmedian Mode Max Min Amax Amin Abs Neg Relu
    """
# torch numbers the nodes of an operation's overloads, from 0.
_ADDS, _MOVES = (
    frozenset(f"{name}Backward{i}" for name in names.split() for i in range(4)) for names in (_ADDING, _MOVING)
)


def sends_sums_by_moving(x: Tensor) -> bool:
    """True if numbers of a tensor's gradient are added up before they reach an operation that computes."""
    # They are added up if values were moved to several places: by an index, or by joining a tensor with itself.
    try:
        waiting: list[Any] = [x.grad_fn]
    # autograd raises for some views whose base was written to.
    except RuntimeError:
        return False
    if waiting[0] is None:
        return False
    seen: set[tuple[Any, int]] = set()
    while waiting:
        at = waiting.pop()
        name = at.name().removesuffix("_copy")
        if name in _ADDS:
            return True
        if name not in _MOVES:
            continue
        for edge in at.next_functions:
            if edge[0] is None:
                continue
            # A second path leads to one input: the gradient of the input is the sum over both paths.
            if edge in seen:
                return True
            seen.add(edge)
            waiting.append(edge[0])
    return False


def is_python_function(node: Any) -> bool:
    """True if the node's backward is Python code, of a `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_view_of_function(x: Tensor) -> bool:
    """True if `x` is a view returned by an autograd Function, or a view of one: torch refuses writes to it."""
    meta = torch._C._autograd
    return x._is_view() and meta._get_creation_meta(x) == meta.CreationMeta.IN_CUSTOM_FUNCTION


def calls_of_backward() -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Yield the outputs and inputs of the running call of `torch.autograd.backward` or `grad`; called in its hooks.

    Yields nothing for a pass that C++ began.
    """
    # They are read from the frame of torch's function, because the engine does not expose them. Nodes on a card run in
    # another thread than the call, so the frames of all threads are searched.
    code: Any = torch.autograd.graph._engine_run_backward.__code__
    own = sys._getframe(1)
    for last in (own, *(frame for frame in sys._current_frames().values() if frame is not own)):
        frame: Any = last
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None:
            found = frame.f_locals
            yield found["t_outputs"], found["args"][3]
            if last is own:
                return


def graph_tasks_so_far() -> int:
    """Return the number of backward passes begun in this process."""
    # Each pass gets the next number, and only hooks of a pass can read it. So a pass without work is run.
    found: list[int] = []
    with torch.enable_grad():
        node = torch.zeros(1, device="cpu", requires_grad=True).sum().grad_fn
    assert node is not None
    node.register_prehook(lambda gradients: found.append(torch._C._current_graph_task_id()))
    torch.autograd.backward([torch.autograd.graph.GradientEdge(node, 0)], [torch.zeros((), device="cpu")])
    return found[0]


def names_in_graphs(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters by the ids of the leaves in graphs of the model."""
    # FSDP2 computes with separate parameters, which replace the shards temporarily.
    found = {id(p): name for name, p in model.named_parameters()}
    modules = [*model.named_modules()]
    sharded = [module for _, module in modules if hasattr(type(module), "_get_fsdp_state")]
    names = {id(module): name for name, module in modules} if sharded else {}
    for module in sharded:
        state: Any = module
        for group in getattr(state._get_fsdp_state(), "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                info, whole = parameter._module_info, getattr(parameter, "_unsharded_param", None)
                if whole is not None and id(info.module) in names:
                    found[id(whole)] = f"{names[id(info.module)]}.{info.param_name}".removeprefix(".")
    return found


def convolution_of(node: Any) -> tuple[int, bool]:
    """Return the groups of the convolution that a ConvolutionBackward0 belongs to, and whether it is transposed."""
    return node._saved_groups, node._saved_transposed


def sum_sent_by_convolution(node: Any, shape: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes the gradient that a ConvolutionBackward0 would send to its input.

    shape: the shape of the input. The function takes the gradient that arrives, and the weight.
    """
    # Only the settings are kept: the node would keep its saved tensors alive.
    settings = node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed
    rest = node._saved_output_padding, node._saved_groups, [True, False, False]

    def sent(g: Tensor, weight: Tensor) -> Tensor:
        # The operator reads only the shape of x.
        x = torch.empty((), dtype=g.dtype, device=g.device).expand(shape)
        return torch.ops.aten.convolution_backward(g, x, weight, None, *settings, *rest)[0]

    return sent


def take_float32_gradients(leaf: Tensor) -> None:
    """Let a leaf of any dtype receive float32 gradients: the engine casts them before hooks of the last node run.

    Raises NotImplementedError if this torch cannot.
    """
    if not HAS_GRAD_DTYPE:
        raise NotImplementedError(
            f"torch {torch.__version__} gives a {leaf.dtype} parameter no float32 gradient, and small ones would be "
            f"lost. Expected: torch 2.13, or float32 parameters under torch.autocast."
        )
    leaf.grad_dtype = torch.float32  # type: ignore[attr-defined]


# Each is None in a torch without the name; `require_hooks_of_nodes` refuses such a torch.
# Whether the running backward pass will call a node of the graph, or has called it; to be used within the pass.
will_run: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", None)  # type: ignore[assignment]
# Calls a function once the running backward pass has computed all gradients; `backward` raises its errors.
call_at_the_end_of_backward: Callable[..., None] = getattr(ENGINE, "queue_callback", None)  # type: ignore[assignment]
# The node that the running backward pass executes; to be used within its hooks.
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", None)  # type: ignore[assignment]
