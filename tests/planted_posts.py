"""Twelve steps as people post them, written before `why` was asked: eight were named right at first.

What was missed then: log(0) in the position buckets of a T5 was blamed, which harms nothing; sums of gradients over
many passes were an input; a CTC loss without an alignment was an overflow; the loss of a gradient penalty was taken to
be what the first of two backward passes began at. Two remedies printed as tried were none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from planted_step import Of, Planted, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import fpsim


def step_of(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        value = loss()
        value.backward()
        if optimizer is not None:
            optimizer.step()
        return value

    return step


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


def a_t5_in_half() -> Planted:
    """Its gelu has a cube, and is written with a power."""
    model = t5()
    dense = model.encoder.block[1].layer[1].DenseReluDense  # type: ignore[union-attr, index]
    with torch.no_grad():
        for layer in (dense.wi_0, dense.wi_1):  # type: ignore[union-attr]
            layer.weight.mul_(60)  # type: ignore[operator, union-attr]
    model.half()
    place = r"encoder\.block\.1\.layer\.1\.DenseReluDense\.act"
    return Planted(model, t5_step(model), place, "activation", "overflow")


def one_black_image() -> Planted:
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
    return Planted(model, step_of(model, loss, optimizer), "0", "activation", "division by zero")


def a_penalty_on_gradients_in_half() -> Planted:
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

    return Planted(model, step_of(model, loss), "", "activation", "overflow")


def the_noise_of_a_diffusion_in_half() -> Planted:
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
    return Planted(model, loss, "schedule", "activation", "division by zero")


def a_llama_in_pure_bf16() -> Planted:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Planted(model, step, ".*", "update", "update lost")


def passes_that_are_accumulated_in_half() -> Planted:
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

    return Planted(model, step, r"2\.bias", "gradient", "overflow")  # type: ignore[arg-type]


def a_focal_loss_of_the_certain() -> Planted:
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
    return Planted(model, step_of(model, lambda: model(x, y)), "criterion", "error", "infinite slope")


def a_transcript_longer_than_its_recording() -> Planted:
    torch.manual_seed(0)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.conv(x).mT.relu())[0]).log_softmax(-1)  # type: ignore[operator, no-any-return]

    parts = {"conv": nn.Conv1d(8, 16, 3, stride=2), "rnn": nn.GRU(16, 16, batch_first=True), "out": nn.Linear(16, 10)}
    model = fpsim.quantize(Of(forward, **parts), "fp16")
    x, targets = seeded(3, 8, 21), torch.arange(36).reshape(3, 12) % 9 + 1
    frames, labels, ctc = torch.tensor([10, 10, 10]), torch.tensor([4, 12, 5]), nn.CTCLoss()
    step = step_of(model, lambda: ctc(model(x).transpose(0, 1), targets, frames, labels))
    return Planted(model, step, "", "activation", "target longer than its input")


def a_policy_that_is_sure() -> Planted:
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

    return Planted(model, step_of(model, loss), "", "activation", "division by zero")


def an_outlier_in_eight_bits() -> Planted:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.1,
    )
    plain = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in (plain.model.layers[1].mlp.up_proj, plain.model.layers[1].mlp.gate_proj):
            layer.weight[5] *= 60
    model = fpsim.quantize(plain, fpsim.Policy("e4m3fn", "e4m3fn", "e5m2", "e5m2"))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    step = step_of(model, lambda: model(input_ids=ids, labels=ids).loss * 1024)
    return Planted(model, step, r"model\.layers\.1\.mlp(\.down_proj)?", "activation", "saturation")


def positions_beyond_half() -> Planted:
    def rope(self: nn.Module, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).to(x.dtype)
        angle = places[:, None] * (1.0 / 10000 ** (torch.arange(0, x.shape[-1], 2).to(x.dtype) / x.shape[-1]))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Of(rope), nn.Linear(4, 2)).half()
    x = seeded(1, 70_000, 4).half()
    return Planted(model, step_of(model, lambda: model(x).float().square().mean()), "1", "activation", "overflow")


def a_node_without_neighbours() -> Planted:
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
    return Planted(model, step, "1", "activation", "division by zero")


POSTS: list[Callable[[], Planted]] = [
    a_t5_in_half,
    one_black_image,
    a_penalty_on_gradients_in_half,
    the_noise_of_a_diffusion_in_half,
    a_llama_in_pure_bf16,
    passes_that_are_accumulated_in_half,
    a_focal_loss_of_the_certain,
    a_transcript_longer_than_its_recording,
    a_policy_that_is_sure,
    an_outlier_in_eight_bits,
    positions_beyond_half,
    a_node_without_neighbours,
]
