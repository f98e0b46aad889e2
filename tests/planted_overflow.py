"""Results, weights and statistics beyond the largest number of their format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planted_grid import (
    ALL,
    ATTENDING,
    EVERY,
    FP16,
    NARROW,
    at_point,
    cause,
    first_floating,
)
from planted_models import Planted
from planted_nets import (
    IMAGES,
    NOISE,
    Clip,
    Experts,
    Flow,
    Net,
    Rwkv,
    UNet,
    contrast_step,
    experts_step,
    flow_step,
    language_step,
    net,
)
from planted_steps import (
    Of,
    Step,
    around,
    attention,
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
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration

import fpsim

# Planted in each model and format


@at_point("overflow", "square", ALL, NARROW)
def square_overflows(x: Tensor) -> Tensor:
    return x + (x * 400).square() / 1e6


@at_point("overflow", "sum", ALL, NARROW)
def sum_overflows(x: Tensor) -> Tensor:
    return x + (x.abs() * 2000 + 12000).sum(-1, keepdim=True) / 1e6


@at_point("overflow", "exp", ALL, NARROW)
def exp_overflows(x: Tensor) -> Tensor:
    e = (x + 12).exp()
    return x + e / e.sum(-1, keepdim=True)


@at_point("overflow", "pow", ALL, ("half", "fp16", "e5m2"))
def power_overflows(x: Tensor) -> Tensor:
    return x + (x * 60).pow(3) / 1e6


@at_point("overflow", "matmul", ALL, NARROW)
def product_overflows(x: Tensor) -> Tensor:
    return x + ((x * 300) @ (x * 300).mT).tanh().sum(-1, keepdim=True) * 0.01


@cause("overflow", "blocks.1.attention:matmul", "activation", ATTENDING, FP16)
def logits_grow(planted: Planted) -> None:
    with torch.no_grad():
        planted.model.blocks[1].attention.query.weight.mul_(2e3)
        planted.model.blocks[1].attention.key.weight.mul_(2e3)


@cause("overflow", "blocks.1.attention.self:matmul", "activation", ("bert",), FP16)
def logits_of_bert_grow(planted: Planted) -> None:
    with torch.no_grad():
        for layer in (planted.model.blocks[1].attention.self.query, planted.model.blocks[1].attention.self.key):
            layer.weight.mul_(3e4)


@cause("overflow", "blocks.1.self_attn:matmul", "activation", ("llama",), FP16)
def logits_of_llama_grow(planted: Planted) -> None:
    with torch.no_grad():
        for layer in (planted.model.blocks[1].self_attn.q_proj, planted.model.blocks[1].self_attn.k_proj):
            layer.weight.mul_(3e4)


@cause("overflow", "{up}.weight", "weight", EVERY, ("fp16", "e5m2"))
def weight_too_large(planted: Planted) -> None:
    with torch.no_grad():
        first_floating(planted).view(-1)[7] = 1e6


@cause("overflow", "{bn}.running_var", "buffer", ("conv", "resnet"), ("half",))
def running_var_overflows(planted: Planted) -> None:
    with torch.no_grad():
        planted.part("conv").weight.mul_(3e3)


# Whole steps


@case("overflow", ":sinh", told="own")
def sinh_in_half() -> Step:
    return net(torch.float16, lambda x: (x * 0 + 12.5).sinh().reciprocal() + x)


@case("overflow", ":prod", told="own")
def product_of_many_in_fp16() -> Step:
    return net("fp16", lambda x: x + (x.abs() + 4).prod(-1, keepdim=True) * 1e-6)


@case("overflow", ":expm1", told="own")
def expm1_in_half() -> Step:
    return net(torch.float16, lambda x: (x * 0 + 11.5).expm1().log1p() + x)


@case("overflow", ":half", told="own")
def an_input_that_half_does_not_hold() -> Step:
    torch.manual_seed(0)
    model, x = Net().half(), torch.full((2, 6), 1e5)
    return Step(model, lambda: model(x.half()).float().sum().backward())


@case("overflow", "first.weight", "weight", told="own")
def a_weight_that_e5m2_does_not_hold() -> Step:
    torch.manual_seed(0)
    plain = Net()
    plain.first.weight.data[0, 0] = 3e5
    model, x = fpsim.quantize(plain, "e5m2"), torch.ones(2, 6)
    return Step(model, lambda: model(x).sum().backward())


@case("overflow", "first:linear", told="own")
def a_layer_that_overflows_under_autocast() -> Step:
    torch.manual_seed(0)
    model, x = Net(), torch.ones(2, 6)
    model.first.weight.data.fill_(3e4)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        out.float().sum().backward()

    return Step(model, step)


@case("overflow", "2.running_var", "buffer", told="own")
def statistics_that_overflow() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.BatchNorm1d(4), nn.Linear(4, 2)).half()
    x = torch.randn(8, 4).half() * 3e3
    return Step(model, lambda: model(x).float().square().mean().backward())


@case("overflow", "1", told="forum")
def scores_without_a_scale() -> Step:
    model = attention(gain=90.0)
    return plant(model, "half", seeded(2, 6, 16), mean_square)


@case("overflow", "1", told="forum")
def one_minus_mask_times_a_large_number() -> Step:
    """(1 - mask) * -1e9 in half: the number is -inf, and zero times it is NaN."""
    keep = torch.ones(6, 6).tril()
    fill = torch.tensor(-1e9)
    model = attention(0.25, lambda s: s + (1 - keep.to(s.dtype)) * fill.to(s.dtype))
    return plant(model, "half", seeded(2, 6, 16), mean_square)


@case("overflow", "1", told="forum")
def the_square_of_a_norm_overflows() -> Step:
    norm = lambda m, x: x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt()
    return plant(around(norm), "fp16", seeded(4, 8) * 300, mean_square)


@case("overflow", "1.running_var", "buffer", told="forum")
def running_variance_beyond_half() -> Step:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(linear(8, 8, 2000.0), norm, linear(8, 4))
    return plant(model, "half", seeded(32, 8), mean_square)


@case("overflow", "1", told="forum")
def squared_relu_beyond_half() -> Step:
    squared = lambda m, x: x.relu() ** 2
    return plant(around(squared), "half", seeded(4, 8) * 300, mean_square)


@case("overflow", "0", told="forum")
def sigmoid_by_hand() -> Step:
    """1 / (1 + exp(-x)) at -12: the exponential is inf, its gradient NaN."""
    x = seeded(4, 8)
    x[0, 0] = -30
    model = nn.Sequential(
        Of(lambda m, x: 1 / (1 + torch.exp(-x * m.gate)), gate=nn.Parameter(torch.ones(8))), linear(8, 4)
    )
    return plant(model, "half", x, mean_square)


@case("overflow", "1", told="forum")
def softplus_as_log_of_exp() -> Step:
    x = seeded(4, 8) * 16
    return plant(around(lambda m, x: torch.log(1 + torch.exp(x))), "fp16", x, mean_square)


@case("overflow", "1", told="forum")
def gated_product_overflows() -> Step:
    gated = lambda m, x: m.wo(F.gelu(m.a(x)) * m.b(x))
    model = around(gated, a=linear(8, 16, 150.0), b=linear(8, 16, 300.0), wo=linear(16, 8))
    return plant(model, "autocast", seeded(4, 8) * 3, mean_square)


@case("overflow", r"\d+(\.fc)?", told="forum")
def a_residual_stream_that_grows() -> Step:
    block = lambda: Of(lambda m, x: x + m.fc(x.relu()), fc=linear(8, 8, 6.0))
    model = nn.Sequential(*(block() for _ in range(12)))
    return plant(model, "half", seeded(4, 8), mean_square)


@case("overflow", "again", told="forum")
def recurrent_weights_above_one() -> Step:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = (m.inside(x[:, t]) + m.again(state)).relu()
        return m.head(state)

    model = Of(forward, inside=linear(8, 8), again=linear(8, 8, 4.0), head=linear(8, 4))
    return plant(model, "fp16", seeded(4, 24, 8), mean_square)


@case("overflow", "1", told="forum")
def sum_pooling_of_a_long_sequence() -> Step:
    model = nn.Sequential(linear(8, 8), Of(lambda m, x: x.sum(1)), linear(8, 4))
    return plant(model, "half", 20 + seeded(2, 8192, 8), mean_square)


@case("overflow", "", told="forum")
def targets_that_were_not_normalised() -> Step:
    target = torch.full((4, 4), 400.0)
    loss = lambda y: F.mse_loss(y, target.to(y.dtype))
    return plant(nn.Sequential(linear(8, 4)), "half", seeded(4, 8), loss)


@case("overflow", "1", told="forum")
def the_kl_of_a_variational_encoder() -> Step:
    encoder = Of(lambda m, x: m.log_variance(x).exp(), log_variance=linear(8, 8, 20.0))
    return plant(nn.Sequential(linear(8, 8), encoder), "half", seeded(4, 8), mean_square)


@case("overflow", "1", told="forum")
def a_temperature_that_was_learned_too_far() -> Step:
    """CLIP's logit_scale, which was not clamped: exp(12)."""
    clip = Of(lambda m, x: x * m.logit_scale.exp(), logit_scale=nn.Parameter(torch.tensor(12.0)))
    model = nn.Sequential(linear(8, 8), clip)
    return plant(model, "half", seeded(4, 8), lambda y: F.cross_entropy(y.float(), torch.arange(4)))


@case("overflow", "", told="forum")
def a_static_scale_that_the_loss_does_not_stand() -> Step:
    target = seeded(4, 4, seed=1)
    loss = lambda y: (y - target.half()).square().mean() * 65536.0
    return plant(nn.Sequential(linear(8, 4)), "half", seeded(4, 8) * 2, loss)


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def t5_step(model: nn.Module) -> Callable[[], Tensor]:
    ids, labels = (torch.randint(1, 64, (4, n), generator=torch.Generator().manual_seed(n)) for n in (12, 6))
    return step_of(model, lambda: model(input_ids=ids, labels=labels).loss)


@case("overflow", r"encoder\.block\.1\.layer\.1\.DenseReluDense\.act", told="post")
def a_t5_in_half() -> Step:
    """Its gelu has a cube, and is written with a power."""
    model = t5()
    dense = model.encoder.block[1].layer[1].DenseReluDense  # type: ignore[union-attr, index]
    with torch.no_grad():
        for layer in (dense.wi_0, dense.wi_1):  # type: ignore[union-attr]
            layer.weight.mul_(60)  # type: ignore[operator, union-attr]
    model.half()
    return Step(model, t5_step(model))


@case("overflow", "", told="post")
def a_penalty_on_gradients_in_half() -> Step:
    """R1: its sum of squares ends at 65504. It is outside of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)).half()
    with torch.no_grad():
        for layer, gain in ((model[0], 20), (model[2], 40)):
            layer.get_parameter("weight").mul_(gain)
    real = seeded(8, 16).half()

    def loss() -> Tensor:
        x = real.clone().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.softplus(-score.float()).mean() + 5 * slope.square().sum(1).mean().float()

    return Step(model, step_of(model, loss))


@case("overflow", "1", told="post")
def positions_beyond_half() -> Step:
    def rope(self: nn.Module, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).to(x.dtype)
        angle = places[:, None] * (1.0 / 10000 ** (torch.arange(0, x.shape[-1], 2).to(x.dtype) / x.shape[-1]))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Of(rope), nn.Linear(4, 2)).half()
    x = seeded(1, 70_000, 4).half()
    return Step(model, step_of(model, lambda: model(x).float().square().mean()))


@case("overflow", "time", told="loop")
def a_time_code_of_thousands_in_half() -> Step:
    """Time runs to 1, and is multiplied by 100,000 as in a paper whose code is in float32."""
    model = UNet(factor=1e5).half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    t = torch.tensor([0.1, 0.4, 0.7, 1.0]).half()

    def loss() -> Tensor:
        return F.mse_loss(model(IMAGES.half(), t).float(), NOISE)

    return Step(model, step_of(model, loss, optimizer))


@case("overflow", "", told="loop")
def a_recurrence_without_its_maximum() -> Step:
    model = Rwkv(with_maximum=False)
    with torch.no_grad():
        model.k.bias[3] = 11.0
    model = fpsim.quantize(model, "fp16")
    step = language_step(model, ids(2, 13, below=32), torch.optim.SGD(model.parameters(), 1e-2))
    return Step(model, step)


@case("overflow", "", told="loop")
def a_logit_scale_that_nobody_clamped() -> Step:
    model = Clip(11.5).half()
    return Step(model, contrast_step(model, torch.float16))


@case("overflow", "", told="loop")
def a_z_loss_beyond_half() -> Step:
    model = Experts(800.0).half()
    return Step(model, experts_step(model, torch.float16))


@case("overflow", r"steps\.3", told="loop")
def a_flow_whose_scales_have_no_bound() -> Step:
    model = Flow(bounded=False)
    with torch.no_grad():
        model.steps[3].net[2].bias[:4] = 12.0  # type: ignore[union-attr, index]
    model = fpsim.quantize(model, "fp16")
    return Step(model, flow_step(model))


@case("overflow", ":exp", told="unseen")
def a_variance_of_a_vae() -> Step:
    """Its log-variance of 12 is no trouble for the decoder, which takes the root: but for the KL."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.elu(self.body(x))
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        return self.decoder(mean + (0.5 * log_var).exp() * seeded(*mean.shape).half()), mean, log_var

    model = Of(forward, body=linear(8, 16), mean=linear(16, 4), log_var=linear(16, 4, 0.1), decoder=linear(4, 8, 0.01))
    model.log_var.bias.data.fill_(12)
    model.half()
    x = seeded(6, 8).half()

    def loss() -> Tensor:
        out, mean, log_var = model(x)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1)
        return F.mse_loss(out, x).float() + kl.float().mean()

    return in_training(model, loss)


@case("overflow", ":mul", told="unseen")
def a_temperature_squared() -> Step:
    """The T^2 of a distillation, after the sum, in half."""
    student = nn.Sequential(linear(8, 16), nn.GELU(), linear(16, 10)).half()
    x, teacher = seeded(64, 8).half(), (seeded(64, 10, seed=2) * 20).half()
    return in_training(student, lambda: F.mse_loss(student(x) / 8, teacher / 8, reduction="sum") * 8**2)


@case("overflow", ":.*norm.*", told="unseen")
def a_norm_that_clips_all() -> Step:
    """Each gradient fits in half, their norm does not: all are multiplied by 1 / inf."""
    model = nn.Sequential(linear(8, 64), nn.Tanh(), linear(64, 4)).half()
    x, target = seeded(32, 8).half(), torch.full((32, 4), 200.0)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def loss() -> Tensor:
        return F.mse_loss(model(x).float(), target) * 500

    return in_training(model, loss, torch.optim.SGD(model.parameters(), 0.1), after=clip)


@case("overflow", ":poisson_nll_loss", told="unseen")
def a_rate_of_counts() -> Step:
    model = nn.Sequential(linear(6, 12), nn.Softplus(), linear(12, 1, 0.1))
    model[2].bias.data.fill_(12.0)
    model.half()
    x, counts = seeded(9, 6).half(), torch.full((9, 1), 3.0).half()
    return in_training(model, lambda: F.poisson_nll_loss(model(x), counts))


@case("overflow", ":lgamma", told="unseen")
def counts_of_a_negative_binomial() -> Step:
    """lgamma(12001) is 100726: in the emulated fp16 that is no number."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        r, logits = F.softplus(self.size(x)) + 1, self.logits(x)
        likelihood = torch.lgamma(y + r) - torch.lgamma(y + 1) - torch.lgamma(r)
        return (likelihood + r * F.logsigmoid(-logits) + y * 1e-4 * F.logsigmoid(logits)).mean()

    model = fpsim.quantize(Of(forward, size=linear(6, 1, 0.1), logits=linear(6, 1)), "fp16")
    x, y = seeded(7, 6), torch.tensor([1.0, 5.0, 12000.0, 0.0, 3.0, 40.0, 7.0])[:, None]
    return in_training(model, lambda: -model(x, y))


@case("overflow", "1:linear", told="unseen")
def a_distribution_that_refuses_nan() -> Step:
    """Categorical raises a ValueError long after the overflow."""
    model = nn.Sequential(linear(6, 16, 100.0), linear(16, 16, 300.0), nn.LayerNorm(16), linear(16, 5)).half()
    x = (seeded(5, 6) * 5).half()

    def loss() -> Tensor:
        policy = torch.distributions.Categorical(logits=model(x).float())
        return -policy.log_prob(labels(5, 5)).mean()

    return in_training(model, loss)


@case("overflow", "pool:einsum", told="unseen")
def a_bilinear_pooling_under_autocast() -> Step:
    def pool(self: Any, x: Tensor) -> Tensor:
        both = torch.einsum("bsi,bsj->bij", x, x).flatten(1).float()
        return F.normalize(both.sign() * (both.abs() + 1e-5).sqrt(), dim=-1)

    model = nn.Sequential()
    model.add_module("stem", linear(6, 8, 40.0))
    model.add_module("pool", Of(pool))
    model.add_module("head", linear(64, 3))
    x = seeded(4, 36, 6)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(4, 3)), auto=torch.float16)


@case("overflow", "gather:index_add_", told="unseen")
def a_hub_of_a_graph() -> Step:
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
    return in_training(model, lambda: F.cross_entropy(model(x).float(), labels(30, 3)))


@case("overflow", ":sum_1", told="unseen")
def a_count_of_many_tokens() -> Step:
    """The mask is counted in half: the loss is 0, and nothing is learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), linear(4, 20)).half()
    ids = torch.randint(0, 20, (70000,))
    mask = torch.ones(70000, dtype=torch.float16)

    def loss() -> Tensor:
        each = F.cross_entropy(model(ids).float(), ids, reduction="none")
        return (each * mask).sum() / mask.sum()

    return in_training(model, loss)


@case("overflow", r"2\.mlp\.2:linear", told="unseen")
def a_block_that_is_checkpointed() -> Step:
    def block(self: Any, x: Tensor) -> Tensor:
        return x + checkpoint(self.mlp, x, use_reentrant=False)

    blocks = [Of(block, mlp=nn.Sequential(linear(8, 32), nn.GELU(), linear(32, 8))) for _ in range(3)]
    blocks[2].mlp[2].weight.data.mul_(1e5)
    model = nn.Sequential(*blocks, nn.LayerNorm(8), linear(8, 3)).half()
    return in_training(model, lambda: F.cross_entropy(model(seeded(5, 8).half()).float(), labels(5, 3)))


@case("overflow", "attend:exp_", told="unseen")
def an_attention_in_place() -> Step:
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
    return in_training(model, lambda: F.cross_entropy(model(seeded(2, 6, 8).half()).mean(1).float(), labels(2, 3)))


@case("overflow", ":exp", told="unseen")
def a_ratio_of_policies() -> Step:
    """PPO in half, long after the old policy."""
    model, x = nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 3, 8.0)).half(), seeded(6, 4).half()
    old, advantage = torch.full((6,), -40.0).half(), seeded(6).half()

    def loss() -> Tensor:
        ratio = (model(x).log_softmax(-1)[:, 0] - old).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).float().mean()

    return in_training(model, loss)
