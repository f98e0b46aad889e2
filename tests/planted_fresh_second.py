"""A second round of steps of other models, after what the first one found was mended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from planted_fresh import Fresh, fresh, labels, wrong
from planted_fresh_fine import fine
from planted_step import Of, linear, seeded
from torch import Tensor, nn
from torch.nn import functional as F


@wrong(":hypot", "error", "infinite slope")
def a_length_of_nothing() -> Fresh:
    model, x = nn.Sequential(linear(4, 8), nn.ReLU(), linear(8, 2)), seeded(5, 4)
    x[2] = 0.0

    def loss() -> Tensor:
        z = model(x)
        return torch.hypot(z[:, 1], z[:, 0]).mean()

    return fresh(model, loss)


@wrong(":exp", "activation", "overflow")
def a_ratio_of_policies() -> Fresh:
    """PPO in half, long after the old policy."""
    model, x = nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 3, 8.0)).half(), seeded(6, 4).half()
    old, advantage = torch.full((6,), -40.0).half(), seeded(6).half()

    def loss() -> Tensor:
        ratio = (model(x).log_softmax(-1)[:, 0] - old).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).float().mean()

    return fresh(model, loss)


@wrong(":div", "activation", "division by zero")
def a_weight_of_positives_that_are_not_there() -> Fresh:
    model, y = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 1)), torch.zeros(6, 1)

    def loss() -> Tensor:
        weight = (y == 0).sum() / (y == 1).sum()
        return F.binary_cross_entropy_with_logits(model(seeded(6, 4)), y, pos_weight=weight)

    return fresh(model, loss)


@wrong(":log", "activation", "logarithm of zero")
def a_survival_of_forty_years() -> Fresh:
    model, x = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 40)).half(), seeded(6, 4).half()
    return fresh(model, lambda: -model(x).sigmoid().cumprod(-1).log().float().mean())


@wrong(":special_xlogy", "error", "infinite slope")
def an_entropy_of_the_certain() -> Fresh:
    """x log x is 0 at 0, and has no slope there."""
    model = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 3, 400.0))

    def loss() -> Tensor:
        p = model(seeded(6, 4)).softmax(-1)
        return -torch.special.xlogy(p, p).sum(-1).mean()

    return fresh(model, loss)


@wrong(":special_entr", "error", "infinite slope")
def another_entropy_of_the_certain() -> Fresh:
    model = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 3, 400.0))
    return fresh(model, lambda: torch.special.entr(model(seeded(6, 4)).softmax(-1)).sum(-1).mean())


@wrong("heads:multi_head_attention_forward", "activation", "row masked wholly")
def a_sequence_of_padding() -> Fresh:
    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.heads(x, x, x, key_padding_mask=padding)[0].mean(1))

    torch.manual_seed(0)
    model = Of(forward, heads=nn.MultiheadAttention(8, 2, batch_first=True), out=linear(8, 3))
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    return fresh(model, lambda: F.cross_entropy(model(seeded(3, 5, 8), padding), labels(3, 3)))


@wrong(":erfinv", "activation", "outside of its domain")
def a_quantile_of_one() -> Fresh:
    model = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 1)).bfloat16()
    model[2].bias.data.fill_(9.0)
    return fresh(model, lambda: torch.erfinv(model(seeded(6, 4).bfloat16()).tanh()).float().square().mean())


@wrong("input 2", "input", "NaN came in")
def a_state_that_is_broken() -> Fresh:
    def forward(self: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(self.cells(x, state)[0][:, -1])

    torch.manual_seed(0)
    model = Of(forward, cells=nn.LSTM(4, 8, batch_first=True), out=linear(8, 3))
    state = torch.zeros(1, 3, 8)
    state[0, 1, 2] = torch.nan
    return fresh(model, lambda: F.cross_entropy(model(seeded(3, 5, 4), (state, torch.zeros(1, 3, 8))), labels(3, 3)))


class Sharpness(torch.optim.Optimizer):
    """SAM: a step up, the gradient there, and a step down from where it began."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, radius: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        group = self.param_groups[0]
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        climbs = [p.grad * (group["radius"] / norm) for p in group["params"]]
        for p, climb in zip(group["params"], climbs, strict=True):
            p.add_(climb)
        with torch.enable_grad():
            closure()
        for p, climb in zip(group["params"], climbs, strict=True):
            p.sub_(climb).sub_(group["lr"] * p.grad)
        return loss


def sharpness(model: nn.Module) -> Fresh:
    optimizer = Sharpness(model.parameters(), 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (1 - model(seeded(6, 4))).relu().mean()
        loss.backward()
        return loss

    return Fresh(model, lambda: optimizer.step(closure))


@wrong("0.weight", "update", "NaN")
def a_climb_without_a_gradient() -> Fresh:
    """All margins are kept: 0.05 / 0."""
    model = nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 1))
    model[2].weight.data.zero_()
    model[2].bias.data.fill_(5.0)
    return sharpness(model)


@fine
def a_climb() -> Fresh:
    return sharpness(nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 1)))


@fine
def sequences_with_padding_and_dropout() -> Fresh:
    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.layers(x, src_key_padding_mask=padding)[:, 0])

    torch.manual_seed(0)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2)
    model, padding = Of(forward, layers=layers, out=linear(8, 3)), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    return fresh(model, lambda: F.cross_entropy(model(seeded(3, 5, 8), padding), labels(3, 3)))


@fine
def everything_is_dropped() -> Fresh:
    model = nn.Sequential(linear(4, 8), nn.Dropout(1.0), linear(8, 3))
    return fresh(model, lambda: F.cross_entropy(model(seeded(6, 4)), labels(6, 3)))


@fine
def an_equation_of_second_order() -> Fresh:
    model = nn.Sequential(linear(1, 8), nn.Tanh(), linear(8, 1))

    def loss() -> Tensor:
        x = torch.linspace(-1, 1, 9)[:, None].requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curve + u).square().mean()

    return fresh(model, loss)


@fine
def a_step_within_a_step() -> Fresh:
    """MAML."""
    model = nn.Sequential(linear(3, 8), nn.Tanh(), linear(8, 1))

    def loss() -> Tensor:
        slow = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, slow, (seeded(6, 3),)), seeded(6, 1))
        gradients = torch.autograd.grad(inner, [*slow.values()], create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, fast, (seeded(6, 3, seed=2),)), seeded(6, 1, seed=2))

    return fresh(model, loss)


@fine
def groups_without_a_member() -> Fresh:
    """Their mean is 0, and their maximum -inf, which is masked."""
    model = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3))
    group = torch.tensor([0, 0, 2, 2, 2, 4])[:, None].expand(-1, 3)

    def loss() -> Tensor:
        z = model(seeded(6, 4))
        mean = torch.zeros(5, 3).scatter_reduce(0, group, z, "mean", include_self=False)
        most = torch.full((5, 3), -torch.inf).scatter_reduce(0, group, z, "amax")
        return mean.square().mean() + most.masked_fill(most == -torch.inf, 0).square().mean()

    return fresh(model, loss)


@fine
def a_sparse_adam() -> Fresh:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True))
    optimizer = torch.optim.SparseAdam([*model.parameters()], 1e-2)
    return fresh(model, lambda: model(torch.arange(6)).square().mean(), optimizer)


@fine
def a_fused_adam_in_bfloat16() -> Fresh:
    torch.manual_seed(0)
    model = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    x = seeded(6, 4).bfloat16()
    return fresh(model, lambda: F.cross_entropy(model(x).float(), labels(6, 3)), optimizer)


@fine
def thresholds_without_end() -> Fresh:
    """An ordinal regression, whose first and last class are open."""
    model, y = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 1)), labels(6, 4)
    ends = torch.tensor([-torch.inf, -1.0, 0.0, 1.0, torch.inf])

    def loss() -> Tensor:
        below = (ends - model(seeded(6, 4))).sigmoid()
        p = below.gather(1, y[:, None] + 1) - below.gather(1, y[:, None])
        return -p.clamp_min(1e-6).log().mean()

    return fresh(model, loss)


@fine
def what_is_missing_is_replaced() -> Fresh:
    model, x = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3)), seeded(6, 4)
    x[0, 0] = torch.nan
    return fresh(model, lambda: F.cross_entropy(model(torch.where(x.isnan(), x.nanmean(0), x)), labels(6, 3)))
