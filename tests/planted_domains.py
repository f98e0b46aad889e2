"""Outside of what an operation is defined on: logarithms and roots, and means and deviations of too few numbers."""

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
    Light,
    Net,
    light_step,
    net,
    reader,
)
from planted_steps import (
    Of,
    Step,
    around,
    case,
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

import fpsim

# Planted in each model and format


@at_point("logarithm of zero", "log", ALL, NARROW)
def logarithm_of_a_softmax_that_underflows(x: Tensor) -> Tensor:
    return x - (x * 100).softmax(-1).log() * 1e-3


@at_point("root of a negative number", "sqrt", ALL, ANY)
def root_of_a_negative_number(x: Tensor) -> Tensor:
    return x + (x.square().mean(-1, keepdim=True) - 100).sqrt()


@at_point("logarithm of a negative number", "log", ALL, ANY)
def logarithm_of_a_negative_number(x: Tensor) -> Tensor:
    return x + (x.abs() + 0.1).neg().log()


@at_point("outside of its domain", "acos", ALL, ANY)
def arc_cosine_beyond_one(x: Tensor) -> Tensor:
    return x + (x * 0 + 1.5).acos()


@at_point("mean of nothing", "mean", ALL, ANY)
def mean_of_nothing(x: Tensor) -> Tensor:
    return x + x[x > 1e4].mean()


@at_point("variance of one number", "std", ALL, ANY)
def deviation_of_one_number(x: Tensor) -> Tensor:
    return x + x[..., :1].std(-1, keepdim=True)


@at_point("logarithm of zero", "log", ALL, ("float32", "fp16"))
def where_hides_a_logarithm(x: Tensor) -> Tensor:
    y = zero_row(x).abs()  # not relu: it would let no gradient through, and NaN would come to nothing
    return x + torch.where(y > 0, y.log(), torch.zeros_like(y))


@cause("mean of nothing", ":cross_entropy", "activation", EVERY, CAME_IN)
def all_targets_ignored(planted: Planted) -> None:
    planted.y.fill_(-100)


# Whole steps


@case("logarithm of zero", ":logsumexp", told="own", missed="overflow is what it calls the -inf of a sum of nothing")
def log_of_an_empty_sum() -> Step:
    return net(None, lambda x: x + x[:, :0].logsumexp(-1, keepdim=True))


@case("logarithm of zero", ":log2", told="own")
def log2_of_zero() -> Step:
    return net(None, lambda x: x + x.relu().log2())


@case("outside of its domain", ":asin", told="own")
def asin_of_two() -> Step:
    return net(None, lambda x: (x * 0 + 2).asin())


@case("root of a negative number", ":pow", told="own")
def fractional_power() -> Step:
    return net(None, lambda x: x**0.3)


@case("variance of one number", ":var", told="own")
def variance_of_one() -> Step:
    return net("bf16", lambda x: x + x[:, :1].var(-1, keepdim=True))


@case("mean of nothing", ":nll_loss", told="own")
def no_target_is_left() -> Step:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6)
    return Step(model, lambda: F.nll_loss(model(x).log_softmax(-1), torch.full((4,), -100)).backward())


@case("mean of nothing", ":mean", told="own")
def a_mean_over_a_selection() -> Step:
    model, ids = reader(torch.bfloat16)
    return Step(model, lambda: model(ids)[ids[:, 0] > 50].float().mean().backward())


@case("logarithm of zero", "1", told="forum")
def gumbel_of_an_underflowed_uniform() -> Step:
    u = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    u[1, 1] = 1e-9
    noise = lambda m, x: (x - torch.log(-torch.log(u.to(x.dtype)))).softmax(-1)
    model = around(noise)
    return plant(model, "half", seeded(4, 8), mean_square)


@case("variance of one number", "1", told="forum")
def std_over_a_batch_of_one() -> Step:
    norm = lambda m, x: (x - x.mean(0)) / (x.std(0) + 1e-5)
    return plant(around(norm), "autocast", seeded(1, 8), mean_square)


@case("logarithm of zero", "", told="forum")
def a_sigmoid_and_its_log() -> Step:
    target = torch.zeros(4, 4)

    def loss(y: Tensor) -> Tensor:
        p = torch.sigmoid(y)
        return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()

    x = seeded(4, 8) * 40
    return plant(nn.Sequential(linear(8, 4)), "half", x, loss)


@case("logarithm of zero", "", told="forum")
def log_of_a_softmax_that_underflows() -> Step:
    target = torch.tensor([0, 1, 2, 3])
    loss = lambda y: -torch.log(y.softmax(-1))[torch.arange(4), target].mean()
    return plant(nn.Sequential(linear(8, 4, 40.0)), "half", seeded(4, 8), loss)


@case("mean of nothing", "", told="forum")
def all_labels_ignored() -> Step:
    target = torch.full((4,), -100)
    loss = lambda y: F.cross_entropy(y.float(), target)
    return plant(nn.Sequential(linear(8, 4)), "bfloat16", seeded(4, 8), loss)


@case("mean of nothing", "", told="forum")
def a_mean_over_no_selection() -> Step:
    """A router sent no token to an expert, whose loss is the mean of nothing."""
    loss = lambda y: y[y > 1e4].mean() + y.square().mean()
    return plant(nn.Sequential(linear(8, 4)), "bf16", seeded(4, 8), loss)


@case("root of a negative number", "1", told="forum")
def where_does_not_guard_a_root() -> Step:
    guard = lambda m, x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x))
    return plant(around(guard), "bf16", seeded(4, 8), mean_square)


@case("target longer than its input", "", told="post")
def a_transcript_longer_than_its_recording() -> Step:
    torch.manual_seed(0)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.conv(x).mT.relu())[0]).log_softmax(-1)  # type: ignore[operator, no-any-return]

    parts = {"conv": nn.Conv1d(8, 16, 3, stride=2), "rnn": nn.GRU(16, 16, batch_first=True), "out": nn.Linear(16, 10)}
    model = fpsim.quantize(Of(forward, **parts), "fp16")
    x, targets = seeded(3, 8, 21), torch.arange(36).reshape(3, 12) % 9 + 1
    frames, labels, ctc = torch.tensor([10, 10, 10]), torch.tensor([4, 12, 5]), nn.CTCLoss()
    step = step_of(model, lambda: ctc(model(x).transpose(0, 1), targets, frames, labels))
    return Step(model, step)


@case("logarithm of zero", "", told="loop")
def a_wall_that_light_does_not_pass() -> Step:
    """1 - alpha is 0 in half, and so is its eps: log(0)."""
    model = Light()
    with torch.no_grad():
        model.net[2].bias[0] = 20.0  # type: ignore[index]
    model = model.half()
    return Step(model, light_step(model, torch.float16))


@case("logarithm of zero", ":log1p", told="unseen")
def a_fake_that_the_critic_is_sure_of() -> Step:
    """log(1 - D(G(z))), where D is 1 in bfloat16."""
    critic = nn.Sequential(linear(8, 16), nn.LeakyReLU(0.2), linear(16, 1, 0.1), nn.Sigmoid())
    critic[2].bias.data.fill_(8.0)
    critic.bfloat16()
    fake, real = seeded(5, 8).bfloat16(), seeded(5, 8, seed=1).bfloat16()
    return in_training(critic, lambda: -(critic(real).log().mean() + torch.log1p(-critic(fake)).mean()))


@case("outside of its domain", ":lgamma_1", told="unseen")
def a_size_of_zero() -> Step:
    """lgamma(0) is inf."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        r = self.size(x).relu()
        return (torch.lgamma(y + r + 1) - torch.lgamma(r)).mean()

    model = Of(forward, size=linear(6, 1))
    x = seeded(7, 6)
    return in_training(model, lambda: model(x, torch.ones(7, 1)))


@case("logarithm of zero", ":logdet", told="unseen")
def a_covariance_with_a_dead_feature() -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.body(x).relu()

    model = Of(forward, body=linear(8, 4))
    model.body.weight.data[2] = 0.0
    x = seeded(32, 8)

    def loss() -> Tensor:
        z = model(x)
        return z.square().mean() - torch.logdet(z.T @ z / len(z))

    return in_training(model, loss)


@case("logarithm of zero", ":log", told="unseen")
def an_actor_at_the_end_of_its_range() -> Step:
    """log(1 - tanh(u)^2 + 1e-8), in half."""
    model = nn.Sequential(linear(6, 16), nn.ReLU(), linear(16, 2, 12.0)).half()
    x = seeded(5, 6).half()

    def loss() -> Tensor:
        u = model(x)
        action = u.tanh()
        return (-0.5 * u.square().sum(-1) - torch.log(1 - action * action + 1e-8).sum(-1)).float().mean()

    return in_training(model, loss)


@case("outside of its domain", ":atanh", told="unseen")
def an_action_that_is_taken_back() -> Step:
    """atanh(tanh(6)), in the emulated bf16."""

    def forward(self: Any, x: Tensor) -> Tensor:
        action = self.net(x).tanh()
        return torch.atanh(action).square().mean()

    plain = Of(forward, net=linear(6, 2))
    plain.net.bias.data.fill_(8.0)
    model, x = fpsim.quantize(plain, "bf16"), seeded(5, 6)
    return in_training(model, lambda: model(x))


@case("root of a negative number", "1:batch_norm", told="unseen")
def a_variance_below_zero() -> Step:
    """Statistics of averaged checkpoints: one variance is negative."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), linear(16, 2)).eval()
    model.get_buffer("1.running_var")[2] = -0.3
    return in_training(model, lambda: F.cross_entropy(model(seeded(4, 3, 4, 4)), labels(4, 2)))


@case("mean of nothing", ":cross_entropy", told="unseen")
def classes_that_weigh_nothing() -> Step:
    model = nn.Sequential(linear(6, 12), nn.Hardswish(), linear(12, 4))
    weights = torch.tensor([0.0, 0.0, 1.0, 2.0])
    return in_training(model, lambda: F.cross_entropy(model(seeded(6, 6)), labels(6, 2), weight=weights))


@case("logarithm of zero", ":cross_entropy", told="unseen")
def smoothed_labels_of_forbidden_words() -> Step:
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

    return in_training(model, loss)


@case("logarithm of zero", ":log", told="unseen")
def a_survival_of_forty_years() -> Step:
    model, x = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 40)).half(), seeded(6, 4).half()
    return in_training(model, lambda: -model(x).sigmoid().cumprod(-1).log().float().mean())


@case("outside of its domain", ":erfinv", told="unseen")
def a_quantile_of_one() -> Step:
    model = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 1)).bfloat16()
    model[2].bias.data.fill_(9.0)
    return in_training(model, lambda: torch.erfinv(model(seeded(6, 4).bfloat16()).tanh()).float().square().mean())
