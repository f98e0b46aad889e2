"""Gradients: slopes without end, what overflows on the way back or where it is added up, what is lost."""

from __future__ import annotations

from typing import Any

import torch
from planted_grid import (
    ALL,
    EVERY,
    NARROW,
    at_point,
    cause,
    first_floating,
    zero_row,
)
from planted_models import Planted
from planted_nets import (
    GateClassifier,
    Net,
    Root,
    Seq2seq,
    net,
    translation_step,
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

import fpsim

# Planted in each model and format


@at_point("infinite slope", "sqrt", ALL, ("float32", "fp16"), role="error")
def root_at_zero_has_no_slope(x: Tensor) -> Tensor:
    return x + zero_row(x).abs().sqrt()


@at_point("infinite slope", "sqrt", ("gpt", "encoder"), ("float32", "bf16"), role="error")
def norm_of_zero_has_no_slope(x: Tensor) -> Tensor:
    return x + zero_row(x).square().sum(-1, keepdim=True).sqrt()


@at_point("gradient lost", "sigmoid", ALL, NARROW, role="error")
def branch_behind_a_small_gate(x: Tensor) -> Tensor:
    return x + x.sigmoid() * 1e-6


@cause("overflow", "", "error", EVERY, ("half", "autocast"))
def scale_too_large(planted: Planted) -> None:
    planted.scale = 2.0**24


@cause("overflow", "{up}.weight", "gradient", EVERY, ("half",))
def gradients_are_not_cleared(planted: Planted) -> None:
    planted.scale = 2.0**15 if planted.name == "llama" else 2.0**12

    def late(p: Planted) -> None:
        p.step()
        p.clears = False
        gradient = first_floating(p).grad
        assert gradient is not None
        gradient.copy_(gradient.sign() * 65504)

    planted.late = late


@cause("overflow", "{up}.weight", "gradient", EVERY, ("half",))
def sum_of_passes_overflows(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.passes = 1
        p.step()
        p.passes, weight = 8, first_floating(p)
        assert weight.grad is not None
        gain = 2e4 / float(weight.grad.abs().max())
        weight.register_hook(lambda gradient: (gradient.float() * gain).half())

    planted.late = late


# Whole steps


@case(
    "infinite slope",
    ":linalg_vector_norm",
    "error",
    told="own",
    missed="the root after the norm has no slope at zero either, and comes first backward",
)
def slope_of_a_norm_of_zeros() -> Step:
    return net(None, lambda x: x + torch.linalg.vector_norm(x * 0, ord=2, dim=-1, keepdim=True).sqrt())


@case("infinite slope", ":pow", "error", told="own")
def slope_of_a_power() -> Step:
    return net(None, lambda x: x + (x - x.amin(-1, keepdim=True)) ** 0.5)


@case("gradient lost", "first:linear", "error", told="own")
def a_gradient_lost_below_a_small_factor() -> Step:
    return net("e5m2", lambda x: torch.ones_like(x) + x * 1e-7)


@case("gradient lost", "second:linear", "error", told="own")
def a_loss_of_a_small_size() -> Step:
    return net(torch.float16, gain=1e-9)


@case("overflow", "second:linear", "error", told="own")
def a_loss_of_a_large_size() -> Step:
    return net(torch.float16, gain=1e7)


@case("overflow", "second.bias", "gradient", told="own")
def a_sum_over_batches() -> Step:
    torch.manual_seed(0)
    model, x = Net().half(), torch.ones(1, 6).half()

    def step() -> None:
        model.zero_grad()
        for _ in range(3):
            (model(x).float().sum() * 3e4).backward()

    return Step(model, step)


@case("infinite slope", "1", "error", told="forum")
def generalised_mean_pooling() -> Step:
    """x.clamp(1e-6)**3 underflows to zero; the cube root has an infinite gradient there."""
    pool = lambda m, x: x.clamp(min=1e-6).pow(3).mean(-1, keepdim=True).pow(1 / 3) * x
    model = around(pool)
    x = -seeded(4, 8).abs()
    with torch.no_grad():
        model[0].weight.abs_()
    return plant(model, "half", x, mean_square)


@case("infinite slope", "", "error", told="forum")
def the_root_of_a_zero_distance() -> Step:
    """Finite forward; the gradient of a root at zero is inf, times zero NaN."""
    loss = lambda y: (y[0] - y[1]).square().sum().sqrt()
    x = seeded(1, 8).expand(2, 8).clone()
    return plant(nn.Sequential(linear(8, 4)), "autocast", x, loss)


@case("gradient lost", "2", "error", told="forum")
def no_scaler_and_a_small_loss() -> Step:
    """Native half: every gradient is below 2^-24."""
    loss = lambda y: (y.float() * 1e-5).square().mean()
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 4))
    return plant(model, "half", seeded(4, 8), loss)


@case("overflow", r"2\.bias", "gradient", told="post")
def passes_that_are_accumulated_in_half() -> Step:
    """Each gradient fits, their sum does not; a division follows, as of who unscales by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).half()
    batches, y = [seeded(8, 16, seed=i).half() for i in range(64)], torch.ones(8, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x in batches:
            loss = F.cross_entropy(model(x).float(), y)
            (loss * 4096.0).backward()
            total += loss.item()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(4096.0)
        optimizer.step()
        return total

    return Step(model, step)  # type: ignore[arg-type]


@case("infinite slope", "criterion", "error", told="post")
def a_focal_loss_of_the_certain() -> Step:
    def focal(self: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        logp = logits.log_softmax(-1).gather(1, y[:, None]).squeeze(1)
        return (-((1 - logp.exp()) ** 0.5) * logp).mean()

    def forward(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.body(x), y)  # type: ignore[operator, no-any-return]

    torch.manual_seed(0)
    body = nn.Linear(8, 3)
    with torch.no_grad():
        body.bias.copy_(torch.tensor([60.0, 0.0, 0.0]))
    model = fpsim.quantize(Of(forward, body=body, criterion=Of(focal)), "bf16")
    x, y = seeded(8, 8), torch.zeros(8, dtype=torch.long)
    return Step(model, step_of(model, lambda: model(x, y)))


@case("overflow", r"out(\..*)?", "error|weight_grad", told="loop")
def a_scaler_that_begins_too_high() -> Step:
    """A recurrence under autocast in float16, with GradScaler as in the manual, whose first scale is 2^40."""
    model, scaler = GateClassifier(), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tokens, lengths, y = ids(4, 9, below=32), torch.tensor([9, 4, 3, 7]), torch.arange(4)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(tokens, lengths), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Step(model, step, scaler=scaler)


@case("overflow", r"mix(\.weight|\.bias)?", "weight_grad|gradient|error", told="loop")
def a_loss_summed_over_all_tokens() -> Step:
    """At a fixed scale that a mean would stand."""
    model = Seq2seq().half()
    step = translation_step(model, torch.optim.SGD(model.parameters(), 1e-4), 2.0**14, sums=True)
    return Step(model, step)


@case("infinite slope", "", "error", told="loop")
def a_critic_without_a_slope() -> Step:
    """A gradient penalty whose norm is the root of a sum that is 0, where all rectifiers are shut."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer, between = torch.optim.Adam(critic.parameters(), 1e-4), seeded(8, 6)
    with torch.no_grad():
        critic[0].bias.fill_(-50.0)

    def loss() -> Tensor:
        x = between.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        penalty = ((slope.square().sum(-1).sqrt() - 1) ** 2).mean()
        return critic(between).mean() + 10 * penalty

    return Step(critic, step_of(critic, loss, optimizer))


@case("infinite slope", "", "error", told="loop")
def a_pose_that_is_right() -> Step:
    """The angle between a rotation and itself: the slope of acos at 1 has no bound."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
        model.bias.zero_()
    q = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.6, 0.8, 0, 0]])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def loss() -> Tensor:
        return 2 * torch.acos((F.normalize(model(q[:2]), dim=-1) * q[:2]).sum(-1)).mean()

    return Step(model, step_of(model, loss, optimizer))


@case("infinite slope", ":sqrt", "error", told="unseen")
def a_spectrogram_of_silence() -> Step:
    """The magnitude as a root of squares."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1)).squeeze(1)

    torch.manual_seed(0)
    model = Of(forward, net=nn.Conv1d(1, 1, 5, padding=2, bias=False))
    sound = seeded(2, 128)
    sound[1] = 0.0

    def magnitude(x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, window=torch.hann_window(32), return_complex=True)
        return torch.view_as_real(spectrum).square().sum(-1).sqrt()

    return in_training(model, lambda: F.l1_loss(magnitude(model(sound)), magnitude(sound)))


@case("infinity minus infinity", ":logaddexp_1", "error", told="unseen")
def a_forward_algorithm_with_states_out_of_reach() -> Step:
    """logaddexp(-inf, -inf) is -inf, and has no slope."""

    def forward(self: Any, x: Tensor) -> Tensor:
        emit = self.emit(x).log_softmax(-1)  # (time, states)
        alpha = torch.cat([emit[0, :1], torch.full((3,), -torch.inf)])
        for now in emit[1:]:
            alpha = torch.logaddexp(alpha, F.pad(alpha[:-1], (1, 0), value=-torch.inf)) + now
        return -alpha[-1]

    model = Of(forward, emit=linear(6, 4))
    return in_training(model, lambda: model(seeded(6, 6)))


@case("infinite slope", ":acosh", "error", told="unseen")
def a_hyperbolic_distance_to_itself() -> Step:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        u, v = 0.5 * self.map(x).tanh() / 3, 0.5 * self.map(y).tanh() / 3
        gap = (u - v).square().sum(-1)
        return torch.acosh(1 + 2 * gap / ((1 - u.square().sum(-1)) * (1 - v.square().sum(-1))))

    model = Of(forward, map=linear(6, 3))
    x, y = seeded(5, 6), seeded(5, 6, seed=1)
    y[2] = x[2]
    return in_training(model, lambda: model(x, y).mean())


@case("infinite slope", "1:sqrt", "error", told="unseen")
def a_function_with_a_slope_of_its_own() -> Step:
    model = nn.Sequential(linear(6, 12), Of(lambda self, x: Root.apply(x.square())), linear(12, 3))
    model[0].weight.data[4] = 0.0
    x = seeded(5, 6)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(5, 3)))


@case("infinite slope", ":linalg_eigh", "error", told="unseen")
def eigenvectors_of_equal_eigenvalues() -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.map(x)
        _, vectors = torch.linalg.eigh(z.T @ z)
        return z @ vectors

    model = Of(forward, map=nn.Linear(4, 4, bias=False))
    nn.init.eye_(model.map.weight)
    x = torch.eye(4).repeat(2, 1)
    return in_training(model, lambda: F.mse_loss(model(x), seeded(8, 4)))


@case("gradient lost", "2:linear", "error", told="unseen")
def a_mean_over_many_in_eight_bits() -> Step:
    plain = nn.Sequential(linear(8, 16), nn.GELU(), linear(16, 16))
    model, x = fpsim.quantize(plain, "e4m3fn"), seeded(512, 8)
    return in_training(model, lambda: F.mse_loss(model(x), seeded(512, 16, seed=1)))


@case("infinite slope", ":hypot", "error", told="unseen")
def a_length_of_nothing() -> Step:
    model, x = nn.Sequential(linear(4, 8), nn.ReLU(), linear(8, 2)), seeded(5, 4)
    x[2] = 0.0

    def loss() -> Tensor:
        z = model(x)
        return torch.hypot(z[:, 1], z[:, 0]).mean()

    return in_training(model, loss)


@case("infinite slope", ":special_xlogy", "error", told="unseen")
def an_entropy_of_the_certain() -> Step:
    """x log x is 0 at 0, and has no slope there."""
    model = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 3, 400.0))

    def loss() -> Tensor:
        p = model(seeded(6, 4)).softmax(-1)
        return -torch.special.xlogy(p, p).sum(-1).mean()

    return in_training(model, loss)


@case("infinite slope", ":special_entr", "error", told="unseen")
def another_entropy_of_the_certain() -> Step:
    model = nn.Sequential(linear(4, 8), nn.SiLU(), linear(8, 3, 400.0))
    return in_training(model, lambda: torch.special.entr(model(seeded(6, 4)).softmax(-1)).sum(-1).mean())
