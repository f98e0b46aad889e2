"""Steps of whole models in which nothing is wrong: infinities, zeros and lost bits that come to nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted_nets import (
    IMAGES,
    LEGAL,
    NOISE,
    Agent,
    Clip,
    Experts,
    Flow,
    GateClassifier,
    Graph,
    Light,
    Mamba,
    Root,
    Rwkv,
    Seq2seq,
    UNet,
    contrast_step,
    experts_step,
    flow_step,
    graph_step,
    language_step,
    light_step,
    sharpness,
    translation_step,
)
from planted_steps import (
    Of,
    Own,
    Step,
    healthy,
    ids,
    in_training,
    labels,
    linear,
    seeded,
    step_of,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fpsim


@healthy("loop")
def a_unet_with_a_scaler() -> Step:
    model, scaler = UNet(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    t = torch.tensor([0.1, 0.4, 0.7, 1.0])

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(IMAGES, t).float(), NOISE)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Step(model, step)


@healthy("loop")
def dice_with_a_smooth_one() -> Step:
    model = UNet(factor=10.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    target = torch.zeros(4, 3, 8, 8)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            p = model(IMAGES, torch.full((4,), 0.5)).sigmoid()
            loss = 1 - (2 * (p * target).sum() + 1) / ((p + target).sum() + 1)
        loss.backward()
        optimizer.step()
        return loss

    return Step(model, step)


@healthy("loop")
def a_scan_in_bf16() -> Step:
    model = fpsim.quantize(Mamba(by_sums=False), "bf16")
    return Step(model, language_step(model, ids(2, 17, below=32), torch.optim.AdamW(model.parameters(), 1e-3)))


@healthy("loop")
def a_recurrence_with_its_maximum() -> Step:
    """Its state begins with -1e38, on purpose."""
    model = fpsim.quantize(Rwkv(with_maximum=True), "bf16")
    return Step(model, language_step(model, ids(2, 13, below=32), torch.optim.SGD(model.parameters(), 1e-2)))


@healthy("loop")
def a_recurrence_in_bfloat16() -> Step:
    model = Rwkv(with_maximum=True).bfloat16()
    return Step(model, language_step(model, ids(2, 13, below=32), torch.optim.SGD(model.parameters(), 1e-1)))


@healthy("loop")
def an_lstm_under_autocast() -> Step:
    model = GateClassifier()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tokens, lengths, y = ids(4, 9, below=32), torch.tensor([9, 4, 3, 7]), torch.arange(4)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(tokens, lengths), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Step(model, step)


@healthy("loop")
def a_translation_in_bf16() -> Step:
    model = fpsim.quantize(Seq2seq(), "bf16")
    return Step(model, translation_step(model, torch.optim.Adam(model.parameters(), 1e-3), 1.0, sums=False))


@healthy("loop")
def a_softmax_of_edges() -> Step:
    model = fpsim.quantize(Graph("each"), "fp16")
    return Step(model, graph_step(model))


@healthy("loop")
def a_logit_scale_of_a_hundred() -> Step:
    model = fpsim.quantize(Clip(math.log(100)), "fp16")
    return Step(model, contrast_step(model, torch.float32))


@healthy("loop")
def experts_without_a_token() -> Step:
    model = fpsim.quantize(Experts(1.0), "bf16")
    return Step(model, experts_step(model, torch.float32))


@healthy("loop")
def a_flow_whose_scales_have_a_bound() -> Step:
    model = fpsim.quantize(Flow(bounded=True), "fp16")
    return Step(model, flow_step(model))


@healthy("loop")
def a_fog_that_light_passes() -> Step:
    model = fpsim.quantize(Light(), "bf16")
    return Step(model, light_step(model, torch.float32))


@healthy("loop")
def an_agent_with_a_target_network() -> Step:
    model = nn.ModuleDict({"online": fpsim.quantize(Agent(), "bf16"), "target": fpsim.quantize(Agent(), "bf16")})
    optimizer, seen, after = torch.optim.Adam(model["online"].parameters(), 1e-3), seeded(4, 6), seeded(4, 6, seed=1)
    least = torch.finfo(torch.float32).min

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            best = model["target"](after).masked_fill(~LEGAL, least).max(-1).values
            target = 1 + 0.99 * torch.where(LEGAL.any(-1), best, 0.0)
        loss = F.smooth_l1_loss(model["online"](seen)[:, 0], target)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
                a.lerp_(b, 0.005)
        return loss

    return Step(model, step)


@healthy("loop")
def a_critic_and_a_generator() -> Step:
    torch.manual_seed(0)
    both = nn.ModuleDict({"g": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)), "d": nn.Linear(6, 1)})
    optimizers = {name: torch.optim.Adam(part.parameters(), 1e-3) for name, part in both.items()}
    real, noise = seeded(8, 6), seeded(8, 4)

    def step() -> Tensor:
        optimizers["d"].zero_grad()
        fake = both["g"](noise)
        d_loss = F.softplus(both["d"](fake.detach())).mean() + F.softplus(-both["d"](real)).mean()
        d_loss.backward()
        optimizers["d"].step()
        optimizers["g"].zero_grad()
        g_loss = F.softplus(-both["d"](fake)).mean()
        g_loss.backward()
        optimizers["g"].step()
        return d_loss + g_loss

    return Step(both, step)


@healthy("loop")
def a_sequence_that_is_all_padding() -> Step:
    """torch's attention gives zeros for it, and its output is masked."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-4), seeded(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([5, 3, 0])[:, None]

    def loss() -> Tensor:
        out = model(x, src_key_padding_mask=padding)
        return out.masked_fill(padding[..., None], 0.0).square().mean()

    return Step(model, step_of(model, loss, optimizer))


@healthy("loop")
def sequences_with_padding() -> Step:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = fpsim.quantize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "bf16")
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-4), seeded(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]

    def loss() -> Tensor:
        return model(x, src_key_padding_mask=padding).float().masked_fill(padding[..., None], 0.0).square().mean()

    return Step(model, step_of(model, loss, optimizer))


@healthy("loop")
def a_codebook_of_which_little_is_used() -> Step:
    """Straight through the nearest code, with dead codes and a commitment."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.enter, self.codes, self.out = nn.Linear(8, 4), nn.Embedding(64, 4), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            z = self.enter(x)
            nearest = torch.cdist(z.detach().float(), self.codes.weight.detach().float()).argmin(-1)
            code = self.codes(nearest)
            kept = (z - code.detach()).square().mean() * 0.25 + (z.detach() - code).square().mean()
            return (self.out(z + (code - z).detach()) - x).square().mean() + kept

    model = Codes().bfloat16()
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), seeded(16, 8).bfloat16()

    def loss() -> Tensor:
        return model(x)

    return Step(model, step_of(model, loss, optimizer))


@healthy("loop")
def whole_branches_dropped() -> Step:
    """Stochastic depth, and a branch that begins with zeros."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(8)])
            self.head = nn.Linear(16, 4)
            nn.init.zeros_(self.blocks[3][1].weight)  # type: ignore[index]

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if torch.rand(()) > 0.5:
                    x = x + block(x) * 2
            return self.head(x)  # type: ignore[no-any-return]

    model = Deep().half()
    optimizer, x, y = torch.optim.SGD(model.parameters(), 0.1), seeded(16, 16).half(), torch.arange(16) % 4

    def loss() -> Tensor:
        return F.cross_entropy(model(x).float(), y)

    return Step(model, step_of(model, loss, optimizer))


@healthy("unseen")
def a_climb() -> Step:
    return sharpness(nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 1)))


@healthy("unseen")
def sequences_with_padding_and_dropout() -> Step:
    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.layers(x, src_key_padding_mask=padding)[:, 0])

    torch.manual_seed(0)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2)
    model, padding = Of(forward, layers=layers, out=linear(8, 3)), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    return in_training(model, lambda: F.cross_entropy(model(seeded(3, 5, 8), padding), labels(3, 3)))


@healthy("unseen")
def everything_is_dropped() -> Step:
    model = nn.Sequential(linear(4, 8), nn.Dropout(1.0), linear(8, 3))
    return in_training(model, lambda: F.cross_entropy(model(seeded(6, 4)), labels(6, 3)))


@healthy("unseen")
def an_equation_of_second_order() -> Step:
    model = nn.Sequential(linear(1, 8), nn.Tanh(), linear(8, 1))

    def loss() -> Tensor:
        x = torch.linspace(-1, 1, 9)[:, None].requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curve + u).square().mean()

    return in_training(model, loss)


@healthy("unseen")
def a_step_within_a_step() -> Step:
    """MAML."""
    model = nn.Sequential(linear(3, 8), nn.Tanh(), linear(8, 1))

    def loss() -> Tensor:
        slow = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, slow, (seeded(6, 3),)), seeded(6, 1))
        gradients = torch.autograd.grad(inner, [*slow.values()], create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, fast, (seeded(6, 3, seed=2),)), seeded(6, 1, seed=2))

    return in_training(model, loss)


@healthy("unseen")
def groups_without_a_member() -> Step:
    """Their mean is 0, and their maximum -inf, which is masked."""
    model = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3))
    group = torch.tensor([0, 0, 2, 2, 2, 4])[:, None].expand(-1, 3)

    def loss() -> Tensor:
        z = model(seeded(6, 4))
        mean = torch.zeros(5, 3).scatter_reduce(0, group, z, "mean", include_self=False)
        most = torch.full((5, 3), -torch.inf).scatter_reduce(0, group, z, "amax")
        return mean.square().mean() + most.masked_fill(most == -torch.inf, 0).square().mean()

    return in_training(model, loss)


@healthy("unseen")
def a_sparse_adam() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True))
    optimizer = torch.optim.SparseAdam([*model.parameters()], 1e-2)
    return in_training(model, lambda: model(torch.arange(6)).square().mean(), optimizer)


@healthy("unseen")
def a_fused_adam_in_bfloat16() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    x = seeded(6, 4).bfloat16()
    return in_training(model, lambda: F.cross_entropy(model(x).float(), labels(6, 3)), optimizer)


@healthy("unseen")
def thresholds_without_end() -> Step:
    """An ordinal regression, whose first and last class are open."""
    model, y = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 1)), labels(6, 4)
    ends = torch.tensor([-torch.inf, -1.0, 0.0, 1.0, torch.inf])

    def loss() -> Tensor:
        below = (ends - model(seeded(6, 4))).sigmoid()
        p = below.gather(1, y[:, None] + 1) - below.gather(1, y[:, None])
        return -p.clamp_min(1e-6).log().mean()

    return in_training(model, loss)


@healthy("unseen")
def what_is_missing_is_replaced() -> Step:
    model, x = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 3)), seeded(6, 4)
    x[0, 0] = torch.nan
    return in_training(model, lambda: F.cross_entropy(model(torch.where(x.isnan(), x.nanmean(0), x)), labels(6, 3)))


@healthy("unseen")
def a_transcript_that_is_left_out() -> Step:
    """CTC of a recording that is too short, with zero_infinity."""
    model = nn.Sequential(linear(6, 16), nn.GELU(), linear(16, 5))

    def loss() -> Tensor:
        scores = model(seeded(4, 3, 6)).log_softmax(-1)
        targets = torch.tensor([[1, 2, 3], [1, 1, 1], [2, 3, 4]])
        return F.ctc_loss(scores, targets, (4, 4, 2), (3, 3, 3), zero_infinity=True)

    return in_training(model, loss)


class Kahan(Own):
    """SGD whose rounding errors are kept, and come in later."""

    def move(self, p: Any, lr: float) -> None:
        state = self.state[p]
        if "lost" not in state:
            state["lost"] = torch.zeros_like(p)
        state["lost"].add_(p.grad, alpha=-lr)
        before = p.clone()
        p.add_(state["lost"])
        state["lost"].add_(before - p)


@healthy("unseen")
def sums_of_kahan_in_bfloat16() -> Step:
    model = nn.Sequential(linear(8, 16), nn.SiLU(), linear(16, 4)).bfloat16()
    for p in model.parameters():
        p.data.add_(0.5)
    x = seeded(8, 8).bfloat16()
    loss = lambda: F.cross_entropy(model(x).float(), labels(8, 4))
    return in_training(model, loss, Kahan(model.parameters(), 3e-4))


class Masters(Own):
    """Adam on float32 copies, which are rounded into the parameters."""

    def move(self, p: Any, lr: float) -> None:
        state = self.state[p]
        if not state:
            state["master"] = p.detach().float().clone()
            state["square"] = torch.zeros_like(state["master"])
        gradient = p.grad.float()
        state["square"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        state["master"].addcdiv_(gradient, state["square"].sqrt().add_(1e-8), value=-lr)
        p.copy_(state["master"])


@healthy("unseen")
def masters_of_ones_own_in_bfloat16() -> Step:
    model = nn.Sequential(linear(8, 16), nn.SiLU(), linear(16, 4)).bfloat16()
    for p in model.parameters():
        p.data.add_(0.5)
    x = seeded(8, 8).bfloat16()
    loss = lambda: F.cross_entropy(model(x).float(), labels(8, 4))
    return in_training(model, loss, Masters(model.parameters(), 1e-6))


@healthy("unseen")
def a_bag_without_words() -> Step:
    def forward(self: Any, ids: Tensor, starts: Tensor) -> Tensor:
        return self.head(F.normalize(self.bag(ids, starts), dim=-1))

    torch.manual_seed(0)
    model = Of(forward, bag=nn.EmbeddingBag(20, 8, mode="mean"), head=linear(8, 3))
    ids, starts = torch.arange(10), torch.tensor([0, 4, 4, 7])
    return in_training(model, lambda: F.cross_entropy(model(ids, starts), labels(4, 3)))


@healthy("unseen")
def a_triplet_of_the_same_points() -> Step:
    """The distance of a point to itself is 0, and its slope is 0 by torch's choice."""
    model = nn.Sequential(linear(6, 12), nn.ReLU(), linear(12, 4))
    x = seeded(6, 6)
    x[3] = x[1]

    def loss() -> Tensor:
        z = model(x)
        gaps = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
        return (gaps[:3, :3].mean() - gaps[:3, 3:].mean() + 1).relu()

    return in_training(model, loss)


@healthy("unseen")
def a_feature_that_has_collapsed() -> Step:
    """VICReg, whose deviation of a constant is 0."""
    model = nn.Sequential(linear(6, 12), nn.ReLU(), linear(12, 8)).bfloat16()
    model[2].weight.data[3] = 0.0
    x = seeded(16, 6).bfloat16()

    def loss() -> Tensor:
        z = model(x).float()
        z = z - z.mean(0)
        covariance = z.T @ z / 15
        return (1 - z.std(0)).relu().mean() + covariance.triu(1).square().sum() / 8

    return in_training(model, loss)


@healthy("unseen")
def a_softmax_of_nothing_that_is_mended() -> Step:
    """NaN in a row that may see nobody, replaced by zeros; its gradient ends at the mask."""

    def attend(self: Any, x: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        mask[2] = True
        scores = (self.q(x) @ self.k(x).transpose(-1, -2) / 8**0.5).masked_fill(mask, -torch.inf)
        return x + torch.nan_to_num(scores.softmax(-1)) @ self.v(x)

    model = nn.Sequential(Of(attend, q=linear(8, 8), k=linear(8, 8), v=linear(8, 8)), linear(8, 3))
    return in_training(model, lambda: F.cross_entropy(model(seeded(2, 5, 8)).mean(1), labels(2, 3)))


@healthy("unseen")
def a_head_that_nobody_has_filled() -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.heads[0](self.body(x).relu())

    model = Of(forward, body=linear(6, 12), heads=nn.ModuleList([linear(12, 3), linear(12, 3)])).half()
    model.heads[1].weight.data.fill_(torch.nan)
    x = seeded(5, 6).half()
    loss = lambda: F.cross_entropy(model(x).float(), labels(5, 3))
    return in_training(model, loss, torch.optim.SGD(model.parameters(), 0.1))


@healthy("unseen")
def infinities_where_there_is_padding() -> Step:
    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        seen = self.body(x.masked_fill(padding[..., None], 0.0)).relu()
        return self.head(seen.masked_fill(padding[..., None], -torch.inf).amax(1))

    model = Of(forward, body=linear(6, 12), head=linear(12, 3))
    x, padding = seeded(3, 5, 6), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    x[padding] = torch.inf
    return in_training(model, lambda: F.cross_entropy(model(x, padding), labels(3, 3)), auto=torch.float16)


@healthy("unseen")
def missing_labels_left_out_in_time() -> Step:
    model = nn.Sequential(linear(6, 12), nn.Mish(), linear(12, 3)).bfloat16()
    x, y = seeded(8, 6).bfloat16(), seeded(8, 3)
    y[2, 1] = torch.nan
    known = ~y.isnan()
    return in_training(model, lambda: F.smooth_l1_loss(model(x).float()[known], y[known]))


@healthy("unseen")
def probabilities_of_zero_and_one() -> Step:
    """binary_cross_entropy bounds its logarithms."""
    model = nn.Sequential(linear(6, 12), nn.ReLU(), linear(12, 2, 300.0), nn.Sigmoid())
    return in_training(model, lambda: F.binary_cross_entropy(model(seeded(8, 6)), (seeded(8, 2, seed=2) > 0).float()))


@healthy("unseen")
def gates_that_are_shut() -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8, dtype=x.dtype)
        for i in range(x.shape[1]):
            state = self.cell(x[:, i], state)
        return self.out(state)

    torch.manual_seed(0)
    model = Of(forward, cell=nn.GRUCell(6, 8), out=linear(8, 3)).half()
    model.cell.bias_ih.data[8:10] = 40.0
    x = seeded(4, 3, 6).half()
    return in_training(model, lambda: F.cross_entropy(model(x).float(), labels(4, 3)))


@healthy("unseen")
def an_or_of_impossible_causes() -> Step:
    """A product with zeros, whose slope torch has."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return 1 - (1 - F.hardsigmoid(self.causes(x))).prod(-1)

    model = Of(forward, causes=linear(6, 5, 6.0))
    return in_training(model, lambda: F.mse_loss(model(seeded(8, 6)), torch.full((8,), 0.5)))


@healthy("unseen")
def a_gamma_of_black_pixels() -> Step:
    """0 ** gamma: the picture needs no slope, and that of gamma is 0."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head((x**self.gamma).flatten(1))

    model = fpsim.quantize(Of(forward, head=linear(16, 3), gamma=nn.Parameter(torch.tensor(0.45))), "fp16")
    x = seeded(4, 4, 4).relu()
    return in_training(model, lambda: F.cross_entropy(model(x), labels(4, 3)))


@healthy("unseen")
def a_step_of_lbfgs() -> Step:
    model = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 1))
    x, y = seeded(16, 6), seeded(16, 1, seed=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return Step(model, lambda: optimizer.step(closure))


@healthy("unseen")
def gradients_of_examples() -> Step:
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

    return Step(model, step, torch.optim.SGD(model.parameters(), 0.1))


@healthy("unseen")
def large_numbers_in_blocks() -> Step:
    plain = nn.Sequential(linear(32, 32, 1e4), nn.RMSNorm(32), linear(32, 4))
    model, x = fpsim.quantize(plain, "mxfp8_e4m3"), seeded(8, 32)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(8, 4)))


@healthy("unseen")
def margins_that_are_kept() -> Step:
    """A hinge loss of 0, and gradients of 0."""
    critic = nn.Sequential(linear(6, 12), nn.LeakyReLU(0.2), linear(12, 1)).half()
    critic[2].weight.data.zero_()
    critic[2].bias.data.fill_(3.0)
    x = seeded(5, 6).half()
    return in_training(critic, lambda: (1 - critic(x)).relu().float().mean())


@healthy("unseen")
def slopes_of_alibi() -> Step:
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
    return in_training(model, lambda: -F.cosine_similarity(model(x), model(x.flip(1)).detach(), dim=-1).mean())


@healthy("unseen")
def a_chain_with_forbidden_transitions() -> Step:
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
    return in_training(model, lambda: model(seeded(5, 6)))


@healthy("unseen")
def straight_through_a_choice() -> Step:
    """Gumbel-softmax that is hard, at a temperature of 0.05, in the emulated fp16."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scores = (self.choose(x) + self.noise) / 0.05
        soft = scores.softmax(-1)
        hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
        return self.out(hard - soft.detach() + soft)

    plain = Of(forward, choose=linear(6, 8), out=linear(8, 3), noise=-torch.log(-torch.log(torch.rand(8) * 0.9 + 0.05)))
    model, x = fpsim.quantize(plain, "fp16"), seeded(6, 6)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(6, 3)))


@healthy("unseen")
def a_logarithm_behind_a_rectifier() -> Step:
    """`where` lets 0 * inf through, and the rectifier does not."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.body(x).relu()
        return self.head(torch.where(y > 0, y.log(), torch.zeros_like(y)))

    model = Of(forward, body=linear(6, 12), head=linear(12, 3))
    return in_training(model, lambda: F.cross_entropy(model(seeded(5, 6)), labels(5, 3)))


@healthy("unseen")
def a_mixture_in_blocks_of_eight_bits() -> Step:
    """Weights of 1e-8 that are not in the blocks' products."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.experts(x).softmax(-1).log()

    plain = Of(forward, experts=linear(8, 32, 6.0))
    model, x = fpsim.quantize(plain, "mxfp8_e4m3"), seeded(6, 8)
    return in_training(model, lambda: F.nll_loss(model(x), labels(6, 32)))


@healthy("unseen")
def a_slope_that_ends_at_a_rectifier() -> Step:
    """1 / 0 where the rectifier is shut, which lets no gradient through."""
    model = nn.Sequential(linear(6, 12), Of(lambda self, x: Root.apply(x.relu())), linear(12, 3))
    return in_training(model, lambda: F.cross_entropy(model(seeded(5, 6)), labels(5, 3)))
