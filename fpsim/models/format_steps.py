"""Steps of SGD and Adam in a small format: each operation is rounded to it, and so is each coefficient.

The operations are those of torch's own single-tensor loops, in their order. torch's bfloat16 kernels on the CPU round
the coefficient of a sum to bfloat16, and keep those of products, quotients, `lerp`, `addcmul` and `addcdiv` in float32;
those on a card keep all in float32. `arithmetic="torch"` does so, `arithmetic="format"` rounds all of them. What comes
of torch's vectors on the CPU is not repeated: `a.add(b, alpha=c)` rounds once, but the product too in the last
`numel % 32` elements, which its vectors leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fpsim.models.parameter_store import COMPENSATION, SECOND, ParameterStore
from fpsim.models.storing import local_part
from fpsim.tensors.launch import round_memory_, rounded
from fpsim.tensors.spec import RoundingSpec

__all__ = ["has_format_step", "require_format_step", "run_format_step"]


Wanted = Callable[[], Tensor]  # the update of a step, as a tensor of its own


class Arithmetic:
    """Numbers of one format. An operation computes in float32 and is rounded once.

    as_torch: coefficients as torch's kernels on the CPU have them, or on a card if `is_on_card`.
    """

    def __init__(self, spec: RoundingSpec, as_torch: bool, is_on_card: bool) -> None:
        self.spec = spec
        in_format: Callable[[float], float] = cache(self._rounded)
        self.summed = float if as_torch and is_on_card else in_format  # the coefficient of a sum
        self.factor = float if as_torch else in_format  # of anything else

    def _rounded(self, x: float) -> float:
        """A coefficient in the format."""
        return float(rounded(torch.tensor(x, dtype=torch.float32, device="cpu"), self.spec))

    def keep(self, x: Tensor) -> Tensor:
        """The result of an operation, rounded in place."""
        round_memory_(x, self.spec)
        return x


def has_format_step(optimizer: Optimizer) -> bool:
    """Whether the step of this optimizer is among those here; of a subclass it may be another one."""
    return type(optimizer) in _STEPS


def require_format_step(optimizer: Optimizer, arithmetic: str) -> None:
    """Raise ValueError for an optimizer whose step cannot be computed in a format."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for name in ("fused", "capturable", "differentiable"):
            if group.get(name):
                raise ValueError(
                    f"arithmetic={arithmetic!r} was given for {kind}({name}=True), whose step is not made of single "
                    f"operations. Use {name}=False."
                )


@torch.no_grad()
def run_format_step(
    optimizer: Optimizer, group: dict[str, Any], store: ParameterStore, wants_update: bool = False
) -> Tensor | None:
    """Step one parameter that has a gradient.

    group: the parameter group that it is in.
    wants_update: whether to return the update that the optimizer computed, before it was added to the weight.
    """
    p = store.parameter
    if p.grad is None:
        raise AssertionError("a parameter without a gradient has no step")
    if p.grad.is_sparse:
        raise RuntimeError(
            f"arithmetic={store.update.arithmetic!r} got a sparse gradient of {store.name}. Use an embedding with "
            f"sparse=False, or arithmetic='float32'."
        )
    assert store.weight is not None
    assert isinstance(store.weight.spec, RoundingSpec)
    a = _arithmetic(store.weight.spec, store.update.arithmetic == "torch", p.is_cuda)
    weight, gradient = local_part(p.detach()), local_part(p.grad.detach())
    gradient = rounded(-gradient if group["maximize"] else gradient, a.spec)
    before = weight.clone() if wants_update else weight
    u = _STEPS[type(optimizer)](a, store, weight, gradient, optimizer.state[p], group)
    if not wants_update:
        return None
    decays_before = group.get("decoupled_weight_decay", False) and not store.update.decays_inside
    return u() - before * (float(group["lr"]) * float(group["weight_decay"])) if decays_before else u().clone()


@cache
def _arithmetic(spec: RoundingSpec, as_torch: bool, is_on_card: bool) -> Arithmetic:
    return Arithmetic(spec, as_torch, is_on_card)


def _sgd(a: Arithmetic, store: ParameterStore, p: Tensor, g: Tensor, state: Any, group: dict[str, Any]) -> Wanted:
    """torch.optim.sgd._single_tensor_sgd."""
    keep, summed, factor = a.keep, a.summed, a.factor
    if group["weight_decay"]:
        g = keep(g.add(p, alpha=summed(float(group["weight_decay"]))))
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = g.clone()
        else:
            keep(buffer.mul_(factor(group["momentum"])))
            keep(buffer.add_(g, alpha=summed(1 - group["dampening"])))
        g = keep(g.add(buffer, alpha=summed(group["momentum"]))) if group["nesterov"] else buffer
    lr = float(group["lr"])
    return _apply(a, store, p, lambda x: x.add_(g, alpha=-summed(lr)), lambda: keep(g * -factor(lr)))


def _adam(a: Arithmetic, store: ParameterStore, p: Tensor, g: Tensor, state: Any, group: dict[str, Any]) -> Wanted:
    """torch.optim.adam._single_tensor_adam."""
    keep, summed, factor = a.keep, a.summed, a.factor
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]
        state.update({name: torch.zeros_like(store.parameter.detach()) for name in names})
    state["step"] += 1
    step, (beta1, beta2), lr = float(state["step"]), map(float, group["betas"]), float(group["lr"])
    decay, decoupled = float(group["weight_decay"]), bool(group["decoupled_weight_decay"])
    m, v = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
    if decay and not decoupled:
        g = keep(g.add(p, alpha=summed(decay)))
    keep(m.lerp_(g, factor(1 - beta1)))
    keep(v.mul_(factor(beta2)))
    keep(v.addcmul_(g, g, value=factor(1 - beta2)))
    if group["amsgrad"]:
        v = torch.maximum(local_part(state["max_exp_avg_sq"]), v, out=local_part(state["max_exp_avg_sq"]))
    step_size = factor(lr / (1 - beta1**step))
    denominator = keep(keep(v.sqrt()).div_(factor((1 - beta2**step) ** 0.5)))
    denominator = keep(denominator.add_(summed(eps))) if (eps := float(group["eps"])) else denominator
    inside = decay and decoupled and store.update.decays_inside

    def wanted() -> Tensor:
        """-step_size * m / denominator - lr * decay * p, as Collage's AdamW writes it."""
        u = keep(keep(m * -step_size).div_(denominator))
        return keep(u.sub_(keep(p * factor(lr * decay)))) if inside else u

    if inside:
        u = wanted()
        return _apply(a, store, p, lambda x: x.add_(u), lambda: u)
    if decay and decoupled:
        keep(p.mul_(factor(1 - lr * decay)))
    return _apply(a, store, p, lambda x: x.addcdiv_(m, denominator, value=-step_size), wanted)


def _apply(a: Arithmetic, store: ParameterStore, p: Tensor, add: Callable[[Tensor], Tensor], update: Wanted) -> Wanted:
    """Add an update to the weight, and keep what that loses where there is a compensation.

    add: adds the update to a tensor, in one operation.
    update: gives the update as a tensor of its own.
    """
    keep = a.keep
    if COMPENSATION in store.kept:  # torch-optimi, and AnyPrecisionAdamW of torchdistx
        k, old = local_part(store.kept[COMPENSATION]), p.clone()
        keep(add(k))
        keep(p.add_(k))
        keep(k.add_(keep(old.sub_(p))))
    elif SECOND in store.kept:  # Collage, "Grow": Fast2Sum, and again to bring the pair in order
        rest, old, u = local_part(store.kept[SECOND]), p.clone(), update()
        whole = keep(p + u)
        keep(rest.add_(keep(u - keep(whole - old))))
        p.copy_(keep(whole + rest))
        keep(rest.sub_(keep(p - whole)))
    else:
        keep(add(p))
    return update


_STEPS: dict[type, Callable[..., Wanted]] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}
