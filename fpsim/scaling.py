"""Interface for packages that scale gradients: the methods that a scaling has, and the functions that it may call.

`ada_loss` takes part in a backward pass through these names alone.
"""

from __future__ import annotations

from fpsim.border import require_optimizer, require_seed
from fpsim.emulation.marks import is_rounded_at, is_view_of_weight, mark_rounded
from fpsim.emulation.scope import BACKWARD, Scaling
from fpsim.formats.blocks import BlockFormat
from fpsim.kernels.statistics import (
    AMAX,
    AMIN,
    COUNT,
    LOG_MEAN,
    LOG_MEAN_SQUARE,
    MAXIMUM,
    MEAN,
    MEAN_SQUARE,
    MINIMUM,
    NONZERO,
    Moments,
)
from fpsim.models.quantize import listeners
from fpsim.policies.policy import FEW_BITS, Policy
from fpsim.policies.recipes import as_policy
from fpsim.policies.update import as_update
from fpsim.tensors.autograd import round_differentiably
from fpsim.tensors.launch import round_fitting_, round_memory_, rounded, to_float64
from fpsim.tensors.moments import amax_of, binades, keep_memory_of, memory_of, moments_of, on_device
from fpsim.tensors.spec import ContainerError, RoundingSpec, log2_scale_limits
from fpsim.tensors.tally import UpdateCounts, lost_between
from fpsim.torch_internals import base_of, current_graph_task, version_of
from fpsim.torch_nodes import (
    call_at_the_end_of_backward,
    calls_of_backward,
    convolution_of,
    current_node,
    edge_of,
    graph_tasks_so_far,
    is_python_function,
    key_of,
    names_in_graphs,
    require_hooks_of_nodes,
    slot_dtypes,
    slot_shapes,
    sum_sent_by_convolution,
    take_float32_gradients,
    will_run,
)
from fpsim.undoing import Exit

__all__ = [
    "AMAX",
    "AMIN",
    "BACKWARD",
    "COUNT",
    "FEW_BITS",
    "LOG_MEAN",
    "LOG_MEAN_SQUARE",
    "MAXIMUM",
    "MEAN",
    "MEAN_SQUARE",
    "MINIMUM",
    "NONZERO",
    "ContainerError",
    "Exit",
    "Moments",
    "RoundingSpec",
    "Scaling",
    "UpdateCounts",
    "amax_of",
    "as_policy",
    "as_update",
    "base_of",
    "binades",
    "call_at_the_end_of_backward",
    "calls_of_backward",
    "convolution_of",
    "current_graph_task",
    "current_node",
    "edge_of",
    "gradients_have_scales",
    "graph_tasks_so_far",
    "is_python_function",
    "is_rounded_at",
    "is_view_of_weight",
    "keep_memory_of",
    "key_of",
    "listeners",
    "log2_scale_limits",
    "lost_between",
    "mark_rounded",
    "memory_of",
    "moments_of",
    "names_in_graphs",
    "on_device",
    "require_hooks_of_nodes",
    "require_optimizer",
    "require_seed",
    "round_differentiably",
    "round_fitting_",
    "round_memory_",
    "rounded",
    "slot_dtypes",
    "slot_shapes",
    "sum_sent_by_convolution",
    "take_float32_gradients",
    "to_float64",
    "version_of",
    "will_run",
]


def gradients_have_scales(policy: Policy) -> bool:
    """True if each gradient that enters a product in a smaller format gets a separate scale there.

    A loss scale, or a scale for each layer, then changes nothing. Returns False if a role rounds gradients to a format
    whose least exponent is above that of float32, and for a policy with overrides, which may contain such a role.

    >>> from fpsim import recipe
    >>> [gradients_have_scales(recipe(name)) for name in ("mxfp8", "bf16", "fp16")]
    [True, False, False]
    """
    if policy.products is None or policy.overrides:
        return False
    specs = policy.specs()
    # -126: the least exponent of a normal float32.
    by_role = all(spec is None or spec.fmt.min_exponent <= -126 for spec in (specs.error, specs.weight_grad))
    gradients = (policy.products.specs.dgrad[0], policy.products.specs.wgrad[0])
    return by_role and all(g is None or isinstance(g.fmt, BlockFormat) for g in gradients)
