"""Divisions by zero: an eps that the format has not, a sum that underflowed, a count of nothing."""

from __future__ import annotations

from typing import Any

import torch
from planted_grid import (
    ALL,
    ANY,
    CAME_IN,
    EVERY,
    NARROW,
    at_point,
    cause,
    zero_row,
)
from planted_models import Planted
from planted_nets import (
    IMAGES,
    NOISE,
    Graph,
    Mamba,
    UNet,
    graph_step,
    language_step,
    net,
    reader,
)
from planted_steps import (
    Of,
    Step,
    around,
    case,
    ids,
    in_training,
    labels,
    linear,
    mean_square,
    plant,
    seeded,
    step_of,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fpsim

# Planted in each model and format


@at_point("division by zero", "div", ALL, NARROW)
def eps_is_lost_in_a_norm(x: Tensor) -> Tensor:
    x = zero_row(x)
    return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()


@at_point("division by zero", "div", ALL, NARROW)
def square_underflows_below_a_root(x: Tensor) -> Tensor:
    small = x.abs().clamp(0.5, 1) * 1e-4
    return x + small / small.square() * 1e-6


@at_point("division by zero", "reciprocal", ALL, NARROW)
def reciprocal_of_what_underflowed(x: Tensor) -> Tensor:
    return x + (x.abs().clamp(0.5, 1) * 1e-9).reciprocal() * 1e-12


@at_point("division by zero", "div", ALL, ANY)
def a_count_is_zero(x: Tensor) -> Tensor:
    return x + (x * 0).sum(-1, keepdim=True) / (x.shape[0] * torch.zeros((), dtype=torch.int64))


@cause("division by zero", ":div", "activation", EVERY, CAME_IN)
def count_of_targets_is_zero(planted: Planted) -> None:
    planted.loss = lambda out, y: (out.float() * 0).sum() / (y > 100).sum()


# Whole steps


@case("division by zero", ":rsqrt", told="own")
def rsqrt_of_zero() -> Step:
    return net(None, lambda x: x * (x * 0).square().mean(-1, keepdim=True).rsqrt())


@case("division by zero", ":rsqrt", told="own")
def lost_eps_below_rsqrt() -> Step:
    return net(torch.float16, lambda x: x * ((x * 1e-5).square().mean(-1, keepdim=True) + 1e-9).rsqrt())


@case("division by zero", ":div", told="own")
def divided_by_its_own_maximum() -> Step:
    return net(torch.bfloat16, lambda x: x * 0 / (x * 0).amax(-1, keepdim=True))


@case("division by zero", ":div", told="own")
def a_mean_over_no_tokens() -> Step:
    model, ids = reader()
    return Step(model, lambda: (model(ids).sum() * 0 / (ids > 50).sum()).backward())


@case("division by zero", "0", told="forum")
def the_std_of_a_constant_column() -> Step:
    """Statistics of the data as buffers; one column never varied."""
    std = torch.ones(8)
    std[5] = 0
    normalise = Of(lambda m, x: (x - m.mean) / m.std, mean=torch.zeros(8), std=std)
    model = nn.Sequential(normalise, linear(8, 4))
    return plant(model, "fp16", seeded(4, 8), mean_square)


@case("division by zero", "1", told="forum")
def rms_norm_with_an_eps_that_half_has_not() -> Step:
    norm = lambda m, x: x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()
    x = seeded(4, 8)
    x[1] = 0
    return plant(around(norm), "half", x, mean_square)


@case("division by zero", "0", told="forum")
def variance_as_a_difference_of_squares() -> Step:
    """E[x^2] - E[x]^2 of a constant far from zero is negative after rounding; its root is NaN."""

    def norm(m: nn.Module, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (
            x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        ).sqrt()

    model = nn.Sequential(Of(norm), linear(8, 4))
    x = 37.3 + 0.01 * seeded(16, 8)
    return plant(model, "bf16", x, mean_square)


@case("division by zero", "1", told="forum")
def weight_standardisation_of_a_zero_layer() -> Step:
    layer = nn.Parameter(torch.zeros(8, 8))

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return x @ ((m.weight - m.weight.mean(1, keepdim=True)) / m.weight.std(1, keepdim=True))

    model = around(forward, weight=layer)
    return plant(model, "bfloat16", seeded(4, 8), mean_square)


@case("division by zero", "", told="forum")
def a_mean_over_a_mask_of_none() -> Step:
    mask = torch.zeros(4)
    loss = lambda y: (y.square().mean(-1) * mask).sum() / mask.sum()
    return plant(nn.Sequential(linear(8, 4)), "fp16", seeded(4, 8), loss)


@case("division by zero", "0", told="post")
def one_black_image() -> Step:
    def standardized(self: nn.Module, x: Tensor) -> Tensor:
        return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)

    torch.manual_seed(0)
    model = nn.Sequential(Of(standardized), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 4))
    x, y = seeded(4, 3, 6, 6), torch.arange(4)
    x[1] = 0

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Step(model, step_of(model, loss, optimizer))


@case("division by zero", "schedule", told="post")
def the_noise_of_a_diffusion_in_half() -> Step:
    """1 - alpha_bar of the first steps is 0 in half."""

    def noise(self: nn.Module, x: Tensor, clean: Tensor, t: Tensor) -> Tensor:
        bar = self.bar[t][:, None]  # type: ignore[index]
        return (x - bar.sqrt() * clean) / (1 - bar).sqrt()

    def forward(self: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        return self.schedule(x, self.net(x), t)  # type: ignore[operator, no-any-return]

    torch.manual_seed(0)
    schedule = Of(noise, bar=torch.cumprod(1 - torch.linspace(1e-5, 0.02, 100), 0))
    model = Of(forward, schedule=schedule, net=nn.Linear(8, 8)).half()
    x, y, t = seeded(16, 8).half(), seeded(16, 8, seed=1), torch.arange(16)
    loss = step_of(model, lambda: (model(x, t).float() - y).square().mean())
    return Step(model, loss)


@case("division by zero", "", told="post")
def a_policy_that_is_sure() -> Step:
    """The variance of a normal distribution underflows; it is outside of the model."""

    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).relu()  # type: ignore[operator]
        return self.mu(h), self.log_std(h).clamp(-20, 2)  # type: ignore[operator]

    torch.manual_seed(0)
    model = Of(forward, trunk=nn.Linear(6, 32), mu=nn.Linear(32, 2), log_std=nn.Linear(32, 2)).half()  # type: ignore[arg-type]
    with torch.no_grad():
        model.log_std.bias.fill_(-10.0)  # type: ignore[operator, union-attr]
    seen, actions = seeded(16, 6).half(), seeded(16, 2).half()

    def loss() -> Tensor:
        mu, log_std = model(seen)
        normal = torch.distributions.Normal(mu, log_std.exp(), validate_args=False)
        return -normal.log_prob(actions).float().sum(-1).mean()  # type: ignore[no-untyped-call, no-any-return]

    return Step(model, step_of(model, loss))


@case("division by zero", "1", told="post")
def a_node_without_neighbours() -> Step:
    def mean(self: nn.Module, x: Tensor) -> Tensor:
        source, target = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 4, 5, 6])
        total = torch.zeros_like(x).index_add(0, target, x[source])
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(6))
        return x + total / degree[:, None]

    torch.manual_seed(0)
    model = fpsim.quantize(
        nn.Sequential(nn.Linear(6, 16), Of(mean), nn.Linear(16, 16), Of(mean), nn.Linear(16, 3)), "e5m2"
    )
    x, y = seeded(10, 6), torch.arange(10) % 3
    step = step_of(model, lambda: F.cross_entropy(model(x).float(), y))
    return Step(model, step)


@case("division by zero", "", told="loop")
def min_snr_at_the_last_time() -> Step:
    """alpha_bar is zero at the end of a schedule whose terminal SNR is zero: min(snr, 5) / snr is 0 / 0."""
    model = UNet(factor=10.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    bar = torch.linspace(1.0, 0.0, 100) * 0.999
    t = torch.tensor([3, 40, 70, 99])

    def loss() -> Tensor:
        snr = bar[t] / (1 - bar[t])
        weight = torch.minimum(snr, torch.tensor(5.0)) / snr
        noisy = bar[t].sqrt()[:, None, None, None] * IMAGES + (1 - bar[t]).sqrt()[:, None, None, None] * NOISE
        return ((model(noisy, t / 100) - NOISE).square().mean((1, 2, 3)) * weight).mean()

    return Step(model, step_of(model, loss, optimizer))


@case("division by zero", "", told="loop")
def dice_of_an_empty_picture() -> Step:
    """Nothing is to be found, the network is sure, and its sigmoid is 0 in half: 2 * 0 / 0."""
    model = UNet(factor=10.0)
    with torch.no_grad():
        model.out.bias.fill_(-30.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    target = torch.zeros(4, 3, 8, 8)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            p = model(IMAGES, torch.full((4,), 0.5)).sigmoid()
            loss = 1 - 2 * (p * target).sum() / (p + target).sum()
        loss.backward()
        optimizer.step()
        return loss

    return Step(model, step)


@case("division by zero", "", told="loop")
def a_scan_by_sums_in_half() -> Step:
    """exp of the cumulated decay is 0 after some ten steps, and is divided by."""
    model = Mamba(by_sums=True, rate=1.0).half()
    step = language_step(model, ids(2, 25, below=32), torch.optim.SGD(model.parameters(), 1e-3))
    return Step(model, step)


class LstmClassifier(nn.Module):
    """least: that a sum over words is divided by."""

    def __init__(self, least: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.least = least
        self.words = nn.Embedding(32, 16, padding_idx=0)
        self.lstm, self.out = nn.LSTM(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        h, _ = self.lstm(self.words(tokens))
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        return self.out((h * mask[..., None]).sum(1) / lengths.clamp(min=self.least)[:, None])  # type: ignore[no-any-return]


@case("division by zero", "", told="loop")
def a_sentence_without_words(least: int = 0) -> Step:
    model = fpsim.quantize(LstmClassifier(least), "bf16")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tokens, lengths, y = ids(4, 9, below=32), torch.tensor([9, 4, 0, 7]), torch.arange(4)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens, lengths).float(), y)

    return Step(model, step_of(model, loss, optimizer))


@case("division by zero", r"convs\.1", told="loop")
def a_softmax_of_edges_with_one_maximum_for_all() -> Step:
    """Nodes whose edges lie far below the largest of the graph have only zeros to divide by."""
    model = Graph("all")
    with torch.no_grad():
        model.convs[1].d.weight.mul_(300)  # type: ignore[union-attr, operator]
    model = fpsim.quantize(model, "fp16")
    return Step(model, graph_step(model))


@case("division by zero", "", told="loop")
def a_plan_of_transport_that_underflows() -> Step:
    """exp(-cost / 0.05) is 0 in half for whole rows, and the scaling of rows divides by it."""

    class Sinkhorn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            cost = (self.left(x)[:, None] - self.right(y)[None]).square().sum(-1)
            kernel = torch.exp(-cost / 0.05)
            v = torch.ones_like(kernel[0])
            for _ in range(5):
                u = 1 / (kernel @ v)
                v = 1 / (kernel.mT @ u)
            return (u[:, None] * kernel * v * cost).sum()

    model = Sinkhorn().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, y = seeded(6, 4).half(), (seeded(6, 4, seed=1) + 1).half()

    def loss() -> Tensor:
        return model(x, y).float()

    return Step(model, step_of(model, loss, optimizer))


@case("division by zero", "norm:group_norm", told="unseen")
def a_group_of_constant_channels() -> Step:
    """A picture of one colour, and no eps."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).relu().mean((2, 3)))

    torch.manual_seed(0)
    model = Of(forward, stem=nn.Conv2d(3, 8, 1), norm=nn.GroupNorm(8, 8, eps=0.0), head=linear(8, 3))
    x = seeded(3, 3, 4, 4)
    x[1] = 0.0
    return in_training(model, lambda: F.cross_entropy(model(x), labels(3, 3)))


@case("division by zero", r"2\.parametrizations\.weight\.0:div", told="unseen")
def a_spectral_norm_of_zeros() -> Step:
    """A head that begins with zeros has no singular value to divide by."""
    torch.manual_seed(0)
    head = nn.Linear(12, 3)
    nn.init.zeros_(head.weight)
    model = nn.Sequential(linear(6, 12), nn.SiLU(), parametrizations.spectral_norm(head)).bfloat16()
    x = seeded(5, 6).bfloat16()
    return in_training(model, lambda: F.cross_entropy(model(x).float(), labels(5, 3)))


@case("division by zero", r"2\.parametrizations\.weight\.0:_weight_norm", told="unseen")
def a_weight_norm_of_zeros() -> Step:
    torch.manual_seed(0)
    head = parametrizations.weight_norm(nn.Linear(12, 3))
    head.parametrizations.weight.original1.data[1] = 0.0  # type: ignore[union-attr, index]
    model = nn.Sequential(linear(6, 12), nn.SiLU(), head)
    x = seeded(5, 6)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(5, 3)), auto=torch.bfloat16)


@case("division by zero", ":cosine_similarity", told="unseen")
def a_similarity_to_nothing() -> Step:
    """Its eps of 1e-8 is 0 in half."""
    model = nn.Sequential(linear(6, 8), nn.ReLU(), linear(8, 4)).half()
    x, y = seeded(5, 6).half(), seeded(5, 4).half()
    x[3] = 0.0
    return in_training(model, lambda: 1 - F.cosine_similarity(model(x), y).float().mean())


@case("division by zero", ":div", told="unseen")
def a_flow_at_its_end() -> Step:
    """t = 0.999 is 1 in bfloat16, and 1 / (1 - t) inf."""

    def forward(self: Any, x: Tensor, t: Tensor) -> Tensor:
        return (self.net(torch.cat([x, t], -1)) - x) / (1 - t)

    model = Of(forward, net=nn.Sequential(linear(7, 16), nn.SiLU(), linear(16, 6))).bfloat16()
    x, t = seeded(4, 6).bfloat16(), torch.tensor([0.1, 0.5, 0.9, 0.999])[:, None]
    return in_training(model, lambda: F.mse_loss(model(x, t.bfloat16()).float(), seeded(4, 6, seed=3)))


@case("division by zero", ":rdiv", told="unseen")
def gradients_of_examples_that_are_clipped() -> Step:
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

    return Step(model, step, torch.optim.SGD(model.parameters(), 0.1))


@case("division by zero", ":div", told="unseen")
def a_weight_of_positives_that_are_not_there() -> Step:
    model, y = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 1)), torch.zeros(6, 1)

    def loss() -> Tensor:
        weight = (y == 0).sum() / (y == 1).sum()
        return F.binary_cross_entropy_with_logits(model(seeded(6, 4)), y, pos_weight=weight)

    return in_training(model, loss)
