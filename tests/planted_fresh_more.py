"""More steps of models that this project has not seen, with what first goes wrong: see `planted_fresh.py`."""

from __future__ import annotations

from typing import Any

import torch
from planted_fresh import Fresh, fresh, labels, wrong
from planted_step import Of, linear, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fpsim

__all__ = ["Root"]


@wrong("branch.gamma", "weight", "underflow")
def a_layer_scale_that_e5m2_does_not_hold() -> Fresh:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return x + self.gamma * self.mlp(x)

    mlp = nn.Sequential(linear(8, 16), nn.GELU(), linear(16, 8))
    plain = nn.Sequential()
    plain.add_module("stem", linear(6, 8))
    plain.add_module("branch", Of(scaled, mlp=mlp, gamma=nn.Parameter(torch.full((8,), 1e-6))))
    plain.add_module("head", linear(8, 3))
    model, x = fpsim.quantize(plain, "e5m2"), seeded(5, 6)
    return fresh(model, lambda: F.cross_entropy(model(x), labels(5, 3)) * 64)


@wrong("act:square", "activation", "saturation")
def a_squared_rectifier_in_eight_bits() -> Fresh:
    plain = nn.Sequential()
    plain.add_module("up", linear(8, 32, 20.0))
    plain.add_module("act", Of(lambda self, x: x.relu().square()))
    plain.add_module("down", linear(32, 4, 0.1))
    model, x = fpsim.quantize(plain, "e4m3fn"), seeded(16, 8)
    return fresh(model, lambda: F.cross_entropy(model(x), labels(16, 4)) * 64)


class Root(torch.autograd.Function):
    """A root with a slope of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad / (2 * y)


@wrong(r"1:sqrt", "error", "infinite slope")
def a_function_with_a_slope_of_its_own() -> Fresh:
    model = nn.Sequential(linear(6, 12), Of(lambda self, x: Root.apply(x.square())), linear(12, 3))
    model[0].weight.data[4] = 0.0
    x = seeded(5, 6)
    return fresh(model, lambda: F.cross_entropy(model(x), labels(5, 3)))


@wrong(":log", "activation", "logarithm of zero")
def an_actor_at_the_end_of_its_range() -> Fresh:
    """log(1 - tanh(u)^2 + 1e-8), in half."""
    model = nn.Sequential(linear(6, 16), nn.ReLU(), linear(16, 2, 12.0)).half()
    x = seeded(5, 6).half()

    def loss() -> Tensor:
        u = model(x)
        action = u.tanh()
        return (-0.5 * u.square().sum(-1) - torch.log(1 - action * action + 1e-8).sum(-1)).float().mean()

    return fresh(model, loss)


@wrong(":atanh", "activation", "outside of its domain")
def an_action_that_is_taken_back() -> Fresh:
    """atanh(tanh(6)), in the emulated bf16."""

    def forward(self: Any, x: Tensor) -> Tensor:
        action = self.net(x).tanh()
        return torch.atanh(action).square().mean()

    plain = Of(forward, net=linear(6, 2))
    plain.net.bias.data.fill_(8.0)
    model, x = fpsim.quantize(plain, "bf16"), seeded(5, 6)
    return fresh(model, lambda: model(x))


@wrong("1:linear", "activation", "overflow")
def a_distribution_that_refuses_nan() -> Fresh:
    """Categorical raises a ValueError long after the overflow."""
    model = nn.Sequential(linear(6, 16, 100.0), linear(16, 16, 300.0), nn.LayerNorm(16), linear(16, 5)).half()
    x = (seeded(5, 6) * 5).half()

    def loss() -> Tensor:
        policy = torch.distributions.Categorical(logits=model(x).float())
        return -policy.log_prob(labels(5, 5)).mean()

    return fresh(model, loss)


@wrong("1:batch_norm", "activation", "root of a negative number")
def a_variance_below_zero() -> Fresh:
    """Statistics of averaged checkpoints: one variance is negative."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), linear(16, 2)).eval()
    model.get_buffer("1.running_var")[2] = -0.3
    return fresh(model, lambda: F.cross_entropy(model(seeded(4, 3, 4, 4)), labels(4, 2)))


@wrong("pool:einsum", "activation", "overflow")
def a_bilinear_pooling_under_autocast() -> Fresh:
    def pool(self: Any, x: Tensor) -> Tensor:
        both = torch.einsum("bsi,bsj->bij", x, x).flatten(1).float()
        return F.normalize(both.sign() * (both.abs() + 1e-5).sqrt(), dim=-1)

    model = nn.Sequential()
    model.add_module("stem", linear(6, 8, 40.0))
    model.add_module("pool", Of(pool))
    model.add_module("head", linear(64, 3))
    x = seeded(4, 36, 6)
    return fresh(model, lambda: F.cross_entropy(model(x), labels(4, 3)), auto=torch.float16)


@wrong("gather:index_add_", "activation", "overflow")
def a_hub_of_a_graph() -> Fresh:
    """Messages of 900 neighbours, added up in half."""

    def gather(self: Any, x: Tensor) -> Tensor:
        source = torch.arange(900) % len(x)
        return torch.zeros_like(x).index_add_(0, torch.zeros(900, dtype=torch.long), x[source])

    model = nn.Sequential()
    model.add_module("embed", linear(6, 8, 0.1))
    model.add_module("gather", Of(gather))
    model.add_module("norm", nn.LayerNorm(8))
    model.add_module("head", linear(8, 3))
    model.embed.bias.data.fill_(100.0)  # type: ignore[union-attr, operator]
    model.half()
    x = seeded(30, 6).half()
    return fresh(model, lambda: F.cross_entropy(model(x).float(), labels(30, 3)))


@wrong(":sum_1", "activation", "overflow")
def a_count_of_many_tokens() -> Fresh:
    """The mask is counted in half: the loss is 0, and nothing is learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), linear(4, 20)).half()
    ids = torch.randint(0, 20, (70000,))
    mask = torch.ones(70000, dtype=torch.float16)

    def loss() -> Tensor:
        each = F.cross_entropy(model(ids).float(), ids, reduction="none")
        return (each * mask).sum() / mask.sum()

    return fresh(model, loss)


@wrong("operand 2 of :sub", "input", "NaN came in")
def labels_that_are_missing() -> Fresh:
    """NaN where nobody measured, left out after the square: its slope is 0 * NaN."""
    model = nn.Sequential(linear(6, 12), linear(12, 3)).bfloat16()
    x, y = seeded(8, 6).bfloat16(), seeded(8, 3).bfloat16()
    y[2, 1] = torch.nan
    return fresh(model, lambda: ((model(x) - y) ** 2)[~y.isnan()].float().mean())


@wrong(":linalg_eigh", "error", "infinite slope")
def eigenvectors_of_equal_eigenvalues() -> Fresh:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.map(x)
        _, vectors = torch.linalg.eigh(z.T @ z)
        return z @ vectors

    model = Of(forward, map=nn.Linear(4, 4, bias=False))
    nn.init.eye_(model.map.weight)
    x = torch.eye(4).repeat(2, 1)
    return fresh(model, lambda: F.mse_loss(model(x), seeded(8, 4)))


@wrong("words.weight", "update", "division by zero")
def an_adam_without_eps() -> Fresh:
    """Rows of words that did not occur: 0 / 0."""
    torch.manual_seed(0)
    words = nn.Embedding(30, 8)
    model = nn.Sequential()
    model.add_module("words", words)
    model.add_module("out", linear(8, 30))
    ids = torch.arange(12)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=0.0)
    return fresh(model, lambda: F.cross_entropy(model(ids), ids), optimizer)


@wrong(":cross_entropy", "activation", "mean of nothing")
def classes_that_weigh_nothing() -> Fresh:
    model = nn.Sequential(linear(6, 12), nn.Hardswish(), linear(12, 4))
    weights = torch.tensor([0.0, 0.0, 1.0, 2.0])
    return fresh(model, lambda: F.cross_entropy(model(seeded(6, 6)), labels(6, 2), weight=weights))


@wrong(":cross_entropy", "activation", "logarithm of zero")
def smoothed_labels_of_forbidden_words() -> Fresh:
    """What is forbidden gets a share of the smoothing: 0.1 / 9 of -inf."""

    def forward(self: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8)
        for i in range(x.shape[1]):
            state = self.cell(x[:, i], state)
        return self.out(state)

    torch.manual_seed(0)
    model = Of(forward, cell=nn.GRUCell(6, 8), out=linear(8, 9))

    def loss() -> Tensor:
        scores = model(seeded(4, 3, 6)).masked_fill(torch.arange(9) > 6, -torch.inf)
        return F.cross_entropy(scores, labels(4, 4), label_smoothing=0.1)

    return fresh(model, loss)


@wrong(":div", "activation", "division by zero")
def a_flow_at_its_end() -> Fresh:
    """t = 0.999 is 1 in bfloat16, and 1 / (1 - t) inf."""

    def forward(self: Any, x: Tensor, t: Tensor) -> Tensor:
        return (self.net(torch.cat([x, t], -1)) - x) / (1 - t)

    model = Of(forward, net=nn.Sequential(linear(7, 16), nn.SiLU(), linear(16, 6))).bfloat16()
    x, t = seeded(4, 6).bfloat16(), torch.tensor([0.1, 0.5, 0.9, 0.999])[:, None]
    return fresh(model, lambda: F.mse_loss(model(x, t.bfloat16()).float(), seeded(4, 6, seed=3)))


@wrong(r"2\.mlp\.2:linear", "activation", "overflow")
def a_block_that_is_checkpointed() -> Fresh:
    def block(self: Any, x: Tensor) -> Tensor:
        return x + checkpoint(self.mlp, x, use_reentrant=False)

    blocks = [Of(block, mlp=nn.Sequential(linear(8, 32), nn.GELU(), linear(32, 8))) for _ in range(3)]
    blocks[2].mlp[2].weight.data.mul_(1e5)
    model = nn.Sequential(*blocks, nn.LayerNorm(8), linear(8, 3)).half()
    return fresh(model, lambda: F.cross_entropy(model(seeded(5, 8).half()).float(), labels(5, 3)))


@wrong("attend:exp_", "activation", "overflow")
def an_attention_in_place() -> Fresh:
    """exp_() without the maximum, then /= the sum."""

    def attend(self: Any, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores.exp_()
        scores = scores / scores.sum(-1, keepdim=True)
        return x + scores @ self.v(x)

    inside = Of(attend, q=linear(8, 8, 3.0), k=linear(8, 8, 3.0), v=linear(8, 8))
    model = nn.Sequential()
    model.add_module("attend", inside)
    model.add_module("head", linear(8, 3))
    model.half()
    return fresh(model, lambda: F.cross_entropy(model(seeded(2, 6, 8).half()).mean(1).float(), labels(2, 3)))


@wrong(":rdiv", "activation", "division by zero")
def gradients_of_examples_that_are_clipped() -> Fresh:
    """DP-SGD whose clipping normalises: 1 / |g|, and one example has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))
    x, y = seeded(5, 6), seeded(5, 1)
    x[3] = 0.0

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(model, parameters, (x,)) - y).square().sum()

    def step() -> Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(parameters, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        for name, p in model.named_parameters():
            p.grad = torch.einsum("b,b...->...", 1.0 / norms, each[name])
        return (model(x) - y).square().mean()

    return Fresh(model, step, torch.optim.SGD(model.parameters(), 0.1))


@wrong("2:linear", "error", "gradient lost")
def a_mean_over_many_in_eight_bits() -> Fresh:
    plain = nn.Sequential(linear(8, 16), nn.GELU(), linear(16, 16))
    model, x = fpsim.quantize(plain, "e4m3fn"), seeded(512, 8)
    return fresh(model, lambda: F.mse_loss(model(x), seeded(512, 16, seed=1)))
