"""Steps of models that this project has not seen, in which nothing is wrong: infinities, zeros and lost bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from planted_fresh import Fresh, fresh, labels
from planted_fresh_more import Root
from planted_step import Of, linear, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fpsim

FINE: list[Callable[[], Fresh]] = []


def fine(make: Callable[[], Fresh]) -> Callable[[], Fresh]:
    FINE.append(make)
    return make


@fine
def a_transcript_that_is_left_out() -> Fresh:
    """CTC of a recording that is too short, with zero_infinity."""
    model = nn.Sequential(linear(6, 16), nn.GELU(), linear(16, 5))

    def loss() -> Tensor:
        scores = model(seeded(4, 3, 6)).log_softmax(-1)
        targets = torch.tensor([[1, 2, 3], [1, 1, 1], [2, 3, 4]])
        return F.ctc_loss(scores, targets, (4, 4, 2), (3, 3, 3), zero_infinity=True)

    return fresh(model, loss)


class Kahan(torch.optim.Optimizer):
    """SGD whose rounding errors are kept, and come in later."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "lost" not in state:
                    state["lost"] = torch.zeros_like(p)
                state["lost"].add_(p.grad, alpha=-group["lr"])
                before = p.clone()
                p.add_(state["lost"])
                state["lost"].add_(before - p)


@fine
def sums_of_kahan_in_bfloat16() -> Fresh:
    model = nn.Sequential(linear(8, 16), nn.SiLU(), linear(16, 4)).bfloat16()
    for p in model.parameters():
        p.data.add_(0.5)
    x = seeded(8, 8).bfloat16()
    loss = lambda: F.cross_entropy(model(x).float(), labels(8, 4))
    return fresh(model, loss, Kahan(model.parameters(), 3e-4))


class Masters(torch.optim.Optimizer):
    """Adam on float32 copies, which are rounded into the parameters."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["square"] = torch.zeros_like(state["master"])
                gradient = p.grad.float()
                state["square"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                state["master"].addcdiv_(gradient, state["square"].sqrt().add_(1e-8), value=-group["lr"])
                p.copy_(state["master"])


@fine
def masters_of_ones_own_in_bfloat16() -> Fresh:
    model = nn.Sequential(linear(8, 16), nn.SiLU(), linear(16, 4)).bfloat16()
    for p in model.parameters():
        p.data.add_(0.5)
    x = seeded(8, 8).bfloat16()
    loss = lambda: F.cross_entropy(model(x).float(), labels(8, 4))
    return fresh(model, loss, Masters(model.parameters(), 1e-6))


@fine
def a_bag_without_words() -> Fresh:
    def forward(self: Any, ids: Tensor, starts: Tensor) -> Tensor:
        return self.head(F.normalize(self.bag(ids, starts), dim=-1))

    torch.manual_seed(0)
    model = Of(forward, bag=nn.EmbeddingBag(20, 8, mode="mean"), head=linear(8, 3))
    ids, starts = torch.arange(10), torch.tensor([0, 4, 4, 7])
    return fresh(model, lambda: F.cross_entropy(model(ids, starts), labels(4, 3)))


@fine
def a_triplet_of_the_same_points() -> Fresh:
    """The distance of a point to itself is 0, and its slope is 0 by torch's choice."""
    model = nn.Sequential(linear(6, 12), nn.ReLU(), linear(12, 4))
    x = seeded(6, 6)
    x[3] = x[1]

    def loss() -> Tensor:
        z = model(x)
        gaps = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
        return (gaps[:3, :3].mean() - gaps[:3, 3:].mean() + 1).relu()

    return fresh(model, loss)


@fine
def a_feature_that_has_collapsed() -> Fresh:
    """VICReg, whose deviation of a constant is 0."""
    model = nn.Sequential(linear(6, 12), nn.ReLU(), linear(12, 8)).bfloat16()
    model[2].weight.data[3] = 0.0
    x = seeded(16, 6).bfloat16()

    def loss() -> Tensor:
        z = model(x).float()
        z = z - z.mean(0)
        covariance = z.T @ z / 15
        return (1 - z.std(0)).relu().mean() + covariance.triu(1).square().sum() / 8

    return fresh(model, loss)


@fine
def a_softmax_of_nothing_that_is_mended() -> Fresh:
    """NaN in a row that may see nobody, replaced by zeros; its gradient ends at the mask."""

    def attend(self: Any, x: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        mask[2] = True
        scores = (self.q(x) @ self.k(x).transpose(-1, -2) / 8**0.5).masked_fill(mask, -torch.inf)
        return x + torch.nan_to_num(scores.softmax(-1)) @ self.v(x)

    model = nn.Sequential(Of(attend, q=linear(8, 8), k=linear(8, 8), v=linear(8, 8)), linear(8, 3))
    return fresh(model, lambda: F.cross_entropy(model(seeded(2, 5, 8)).mean(1), labels(2, 3)))


@fine
def a_head_that_nobody_has_filled() -> Fresh:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.heads[0](self.body(x).relu())

    model = Of(forward, body=linear(6, 12), heads=nn.ModuleList([linear(12, 3), linear(12, 3)])).half()
    model.heads[1].weight.data.fill_(torch.nan)
    x = seeded(5, 6).half()
    loss = lambda: F.cross_entropy(model(x).float(), labels(5, 3))
    return fresh(model, loss, torch.optim.SGD(model.parameters(), 0.1))


@fine
def infinities_where_there_is_padding() -> Fresh:
    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        seen = self.body(x.masked_fill(padding[..., None], 0.0)).relu()
        return self.head(seen.masked_fill(padding[..., None], -torch.inf).amax(1))

    model = Of(forward, body=linear(6, 12), head=linear(12, 3))
    x, padding = seeded(3, 5, 6), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    x[padding] = torch.inf
    return fresh(model, lambda: F.cross_entropy(model(x, padding), labels(3, 3)), auto=torch.float16)


@fine
def missing_labels_left_out_in_time() -> Fresh:
    model = nn.Sequential(linear(6, 12), nn.Mish(), linear(12, 3)).bfloat16()
    x, y = seeded(8, 6).bfloat16(), seeded(8, 3)
    y[2, 1] = torch.nan
    known = ~y.isnan()
    return fresh(model, lambda: F.smooth_l1_loss(model(x).float()[known], y[known]))


@fine
def probabilities_of_zero_and_one() -> Fresh:
    """binary_cross_entropy bounds its logarithms."""
    model = nn.Sequential(linear(6, 12), nn.ReLU(), linear(12, 2, 300.0), nn.Sigmoid())
    return fresh(model, lambda: F.binary_cross_entropy(model(seeded(8, 6)), (seeded(8, 2, seed=2) > 0).float()))


@fine
def gates_that_are_shut() -> Fresh:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8, dtype=x.dtype)
        for i in range(x.shape[1]):
            state = self.cell(x[:, i], state)
        return self.out(state)

    torch.manual_seed(0)
    model = Of(forward, cell=nn.GRUCell(6, 8), out=linear(8, 3)).half()
    model.cell.bias_ih.data[8:10] = 40.0
    x = seeded(4, 3, 6).half()
    return fresh(model, lambda: F.cross_entropy(model(x).float(), labels(4, 3)))


@fine
def an_or_of_impossible_causes() -> Fresh:
    """A product with zeros, whose slope torch has."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return 1 - (1 - F.hardsigmoid(self.causes(x))).prod(-1)

    model = Of(forward, causes=linear(6, 5, 6.0))
    return fresh(model, lambda: F.mse_loss(model(seeded(8, 6)), torch.full((8,), 0.5)))


@fine
def a_gamma_of_black_pixels() -> Fresh:
    """0 ** gamma: the picture needs no slope, and that of gamma is 0."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head((x**self.gamma).flatten(1))

    model = fpsim.quantize(Of(forward, head=linear(16, 3), gamma=nn.Parameter(torch.tensor(0.45))), "fp16")
    x = seeded(4, 4, 4).relu()
    return fresh(model, lambda: F.cross_entropy(model(x), labels(4, 3)))


@fine
def a_step_of_lbfgs() -> Fresh:
    model = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 1))
    x, y = seeded(16, 6), seeded(16, 1, seed=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return Fresh(model, lambda: optimizer.step(closure))


@fine
def gradients_of_examples() -> Fresh:
    """DP-SGD as the manual of torch.func has it."""
    model = nn.Sequential(linear(6, 8), nn.ELU(), linear(8, 1))
    x, y = seeded(5, 6), seeded(5, 1)

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(model, parameters, (x,)) - y).square().sum()

    def step() -> Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(parameters, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()  # type: ignore[union-attr]
        for name, p in model.named_parameters():
            p.grad = torch.einsum("b,b...->...", (1 / (norms + 1e-6)).clamp(max=1), each[name])
        return (model(x) - y).square().mean()

    return Fresh(model, step, torch.optim.SGD(model.parameters(), 0.1))


@fine
def large_numbers_in_blocks() -> Fresh:
    plain = nn.Sequential(linear(32, 32, 1e4), nn.RMSNorm(32), linear(32, 4))
    model, x = fpsim.quantize(plain, "mxfp8_e4m3"), seeded(8, 32)
    return fresh(model, lambda: F.cross_entropy(model(x), labels(8, 4)))


@fine
def margins_that_are_kept() -> Fresh:
    """A hinge loss of 0, and gradients of 0."""
    critic = nn.Sequential(linear(6, 12), nn.LeakyReLU(0.2), linear(12, 1)).half()
    critic[2].weight.data.zero_()
    critic[2].bias.data.fill_(3.0)
    x = seeded(5, 6).half()
    return fresh(critic, lambda: (1 - critic(x)).relu().float().mean())


@fine
def slopes_of_alibi() -> Fresh:
    """Attention with ALiBi, queries and keys that are normalised, -inf, weight norm, and a target without gradients."""

    def attend(self: Any, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        distance = (position[:, None] - position).float()
        bias = (-0.5 * distance).masked_fill(distance < 0, -torch.inf)
        q, k = F.normalize(self.q(x), dim=-1), F.normalize(self.k(x), dim=-1)
        return x + (8 * q @ k.transpose(-1, -2) + bias).softmax(-1) @ self.v(x)

    torch.manual_seed(0)
    inside = Of(attend, q=linear(8, 8), k=linear(8, 8), v=linear(8, 8))
    plain = nn.Sequential(inside, parametrizations.weight_norm(nn.Linear(8, 4)))
    model, x = fpsim.quantize(plain, "bf16"), seeded(2, 12, 8)
    return fresh(model, lambda: -F.cosine_similarity(model(x), model(x.flip(1)).detach(), dim=-1).mean())


@fine
def a_chain_with_forbidden_transitions() -> Fresh:
    """The logsumexp of a CRF: each state is reached from some, not from all."""

    def forward(self: Any, x: Tensor) -> Tensor:
        forbidden = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)
        steps = self.steps.masked_fill(forbidden, -torch.inf)
        scores = self.emit(x)
        alpha = scores[0]
        for now in scores[1:]:
            alpha = (alpha[:, None] + steps).logsumexp(0) + now
        return alpha.logsumexp(0) - scores[:, 0].sum()

    model = Of(forward, emit=linear(6, 3), steps=nn.Parameter(seeded(3, 3)))
    return fresh(model, lambda: model(seeded(5, 6)))


@fine
def straight_through_a_choice() -> Fresh:
    """Gumbel-softmax that is hard, at a temperature of 0.05, in the emulated fp16."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scores = (self.choose(x) + self.noise) / 0.05
        soft = scores.softmax(-1)
        hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
        return self.out(hard - soft.detach() + soft)

    plain = Of(forward, choose=linear(6, 8), out=linear(8, 3), noise=-torch.log(-torch.log(torch.rand(8) * 0.9 + 0.05)))
    model, x = fpsim.quantize(plain, "fp16"), seeded(6, 6)
    return fresh(model, lambda: F.cross_entropy(model(x), labels(6, 3)))


@fine
def a_logarithm_behind_a_rectifier() -> Fresh:
    """`where` lets 0 * inf through, and the rectifier does not."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.body(x).relu()
        return self.head(torch.where(y > 0, y.log(), torch.zeros_like(y)))

    model = Of(forward, body=linear(6, 12), head=linear(12, 3))
    return fresh(model, lambda: F.cross_entropy(model(seeded(5, 6)), labels(5, 3)))


@fine
def a_mixture_in_blocks_of_eight_bits() -> Fresh:
    """Weights of 1e-8 that are not in the blocks' products."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.experts(x).softmax(-1).log()

    plain = Of(forward, experts=linear(8, 32, 6.0))
    model, x = fpsim.quantize(plain, "mxfp8_e4m3"), seeded(6, 8)
    return fresh(model, lambda: F.nll_loss(model(x), labels(6, 32)))


@fine
def a_slope_that_ends_at_a_rectifier() -> Fresh:
    """1 / 0 where the rectifier is shut, which lets no gradient through."""
    model = nn.Sequential(linear(6, 12), Of(lambda self, x: Root.apply(x.relu())), linear(12, 3))
    return fresh(model, lambda: F.cross_entropy(model(seeded(5, 6)), labels(5, 3)))
