"""Networks in which more than one thing is planted, or something in one step and nothing in another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from planted_steps import (
    Step,
    ids,
    seeded,
    step_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim


class Net(nn.Module):
    """A perceptron with a function between its layers."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(6, 12), nn.Linear(12, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """A recurrent network on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(10, 8), nn.GRUCell(8, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros(len(ids), 8, dtype=self.words.weight.dtype)
        for i in range(ids.shape[1]):
            state = self.cell(self.words(ids[:, i]), state)
        return self.out(state)  # type: ignore[no-any-return]


def net(dtype: Any = None, function: Callable[[Tensor], Tensor] = F.silu, gain: float = 1.0) -> Step:
    torch.manual_seed(3)
    model: nn.Module = Net(function)
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    if isinstance(dtype, torch.dtype):
        model, x = model.to(dtype), x.to(dtype)
    elif dtype is not None:
        model = fpsim.quantize(model, dtype)
    return Step(model, lambda: (F.cross_entropy(model(x).float(), y) * gain).backward())


def reader(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    return Reader().to(dtype), torch.randint(0, 10, (3, 5))


class Res(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int = 16) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(width, outputs)
        self.n2, self.c2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.c1(F.silu(self.n1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))  # type: ignore[no-any-return]


class TimeCode(nn.Module):
    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.width, self.factor = width, factor
        self.enter, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half).to(t.dtype)
        angles = (t * self.factor)[:, None] * rates
        return self.out(F.silu(self.enter(torch.cat([angles.sin(), angles.cos()], -1))))  # type: ignore[no-any-return]


class UNet(nn.Module):
    def __init__(self, factor: float = 1000.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = TimeCode(16, factor)
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down1, self.down2 = Res(8, 8), Res(8, 16)
        self.pool, self.mid = nn.AvgPool2d(2), Res(16, 16)
        self.up1, self.up2 = Res(32, 8), Res(16, 8)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        code = self.time(t)
        a = self.down1(self.enter(x), code)
        b = self.down2(self.pool(a), code)
        c = self.mid(self.pool(b), code)
        b = self.up1(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1), code)
        a = self.up2(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1), code)
        return self.out(a)  # type: ignore[no-any-return]


IMAGES, NOISE = seeded(4, 3, 8, 8), seeded(4, 3, 8, 8, seed=1)


class Mamba(nn.Module):
    """A selective state space, as a scan in a loop or by cumulated sums."""

    def __init__(self, by_sums: bool, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.width, self.state = nn.Embedding(32, 16), 16, 4
        self.enter, self.select, self.dt = nn.Linear(16, 32), nn.Linear(16, 8), nn.Linear(16, 16)
        self.log_a = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(16, 1))
        self.d, self.out, self.head = nn.Parameter(torch.ones(16)), nn.Linear(16, 16), nn.Linear(16, 32)
        self.by_sums = by_sums
        nn.init.constant_(self.dt.bias, rate)

    def scan(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a = -self.log_a.exp()
        decay = dt[..., None] * a
        came = (dt * x)[..., None] * b[:, :, None]
        if self.by_sums:
            total = decay.cumsum(1).exp()
            h = total * (came / total).cumsum(1)
            return (h * c[:, :, None]).sum(-1)
        h, outputs = came[:, 0], []
        for i in range(x.shape[1]):
            h = decay[:, i].exp() * h + came[:, i]
            outputs.append((h * c[:, i, None]).sum(-1))
        return torch.stack(outputs, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        e = self.tokens(tokens)
        x, z = self.enter(e).chunk(2, -1)
        x = F.silu(x)
        b, c = self.select(x).chunk(2, -1)
        y = self.scan(x, F.softplus(self.dt(x)), b, c) + self.d * x
        return self.head(e + self.out(y * F.silu(z)))  # type: ignore[no-any-return]


def language_step(
    model: nn.Module, tokens: Tensor, optimizer: torch.optim.Optimizer, scale: float = 1.0
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss * scale).backward()
        optimizer.step()
        return loss

    return step


class Rwkv(nn.Module):
    """The recurrence of RWKV-4, with the running maximum or without it."""

    def __init__(self, with_maximum: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.k, self.v, self.r = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.decay, self.first = nn.Parameter(torch.linspace(-2, 1, 16)), nn.Parameter(torch.full((16,), 0.3))
        self.out, self.head, self.with_maximum = nn.Linear(16, 16), nn.Linear(16, 32), with_maximum

    def wkv(self, k: Tensor, v: Tensor) -> Tensor:
        w, outputs = -self.decay.exp(), []
        if not self.with_maximum:
            up, down = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
            for i in range(k.shape[1]):
                now = torch.exp(self.first + k[:, i])
                outputs.append((up + now * v[:, i]) / (down + now))
                grown = torch.exp(k[:, i])
                up, down = w.exp() * up + grown * v[:, i], w.exp() * down + grown
            return torch.stack(outputs, 1)
        up, down, top = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e38)
        for i in range(k.shape[1]):
            larger = torch.maximum(top, self.first + k[:, i])
            old, now = torch.exp(top - larger), torch.exp(self.first + k[:, i] - larger)
            outputs.append((old * up + now * v[:, i]) / (old * down + now))
            larger = torch.maximum(top + w, k[:, i])
            old, now = torch.exp(top + w - larger), torch.exp(k[:, i] - larger)
            up, down, top = old * up + now * v[:, i], old * down + now, larger
        return torch.stack(outputs, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        h = self.norm(x)
        return self.head(x + self.out(self.r(h).sigmoid() * self.wkv(self.k(h), self.v(h))))  # type: ignore[no-any-return]


class GateClassifier(nn.Module):
    """The same with a cell written by hand, which autocast takes on each machine."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, 16, padding_idx=0)
        self.reads, self.keeps, self.out = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(16, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        h, c = torch.zeros(len(tokens), 16), torch.zeros(len(tokens), 16)
        for t, x in enumerate(self.words(tokens).unbind(1)):
            i, f, g, o = (self.reads(x) + self.keeps(h)).chunk(4, -1)
            new = f.sigmoid() * c + i.sigmoid() * g.tanh()
            live = (t < lengths)[:, None]
            h, c = torch.where(live, o.sigmoid() * new.tanh(), h), torch.where(live, new, c)
        return self.out(h)  # type: ignore[no-any-return]


class Seq2seq(nn.Module):
    """One table of words for the encoder, the decoder and the output; attention of Luong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, 16)
        self.reads, self.writes, self.mix = nn.GRU(16, 16, batch_first=True), nn.GRUCell(16, 16), nn.Linear(32, 16)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, h = self.reads(self.words(source))
        h, outputs = h[0], []
        for i in range(target.shape[1]):
            h = self.writes(self.words(target[:, i]), h)
            attention = (memory @ h[:, :, None]).squeeze(-1).softmax(-1)
            context = (attention[:, None] @ memory).squeeze(1)
            outputs.append(F.linear(self.mix(torch.cat([h, context], -1)).tanh(), self.words.weight))
        return torch.stack(outputs, 1)


def translation_step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float, sums: bool) -> Callable[[], Any]:
    source, target = ids(8, 7, below=32), ids(8, 6, below=32, seed=1)
    target[:, 4:] = 0

    def step() -> Tensor:
        optimizer.zero_grad()
        logits = model(source, target[:, :-1]).float()
        loss = F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, reduction="sum" if sums else "mean"
        )
        (loss * scale).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scale
        optimizer.step()
        return loss

    return step


class Gat(nn.Module):
    """Attention over edges, normalised over those that enter a node."""

    def __init__(self, top: str) -> None:
        super().__init__()
        self.w, self.s, self.d, self.top = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1), top

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.w(x)
        source, target = edges
        e = F.leaky_relu(self.s(h)[source] + self.d(h)[target], 0.2).squeeze(-1)
        if self.top == "each":
            most = torch.full((len(x),), -torch.inf, dtype=e.dtype).scatter_reduce(0, target, e.detach(), "amax")
            e = torch.exp(e - most[target])
        else:
            e = torch.exp(e - e.max().detach())
        total = torch.zeros(len(x), dtype=e.dtype).index_add(0, target, e)
        weight = e / total[target]
        return torch.zeros_like(h).index_add(0, target, weight[:, None] * h[source])


class Graph(nn.Module):
    def __init__(self, top: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs, self.head = nn.ModuleList([Gat(top), Gat(top)]), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + F.elu(conv(x, edges))
        return self.head(x)  # type: ignore[no-any-return]


EDGES = torch.stack([torch.arange(30) % 10, (torch.arange(30) * 7 + 1) % 9])  # node 9 has no edge that enters


def graph_step(model: nn.Module) -> Callable[[], Tensor]:
    x, y, optimizer = seeded(10, 8), torch.arange(10) % 3, torch.optim.Adam(model.parameters(), 1e-3)

    def loss() -> Tensor:
        return F.cross_entropy(model(x, EDGES).float(), y)

    return step_of(model, loss, optimizer)


class Clip(nn.Module):
    def __init__(self, log_scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pictures = nn.Sequential(nn.Flatten(), nn.Linear(48, 16))
        self.texts = nn.EmbeddingBag(32, 16, mode="mean")
        self.logit_scale = nn.Parameter(torch.tensor(log_scale))

    def forward(self, pictures: Tensor, texts: Tensor) -> Tensor:
        a, b = F.normalize(self.pictures(pictures), dim=-1, eps=1e-6), F.normalize(self.texts(texts), dim=-1, eps=1e-6)
        return self.logit_scale.exp() * a @ b.mT


def contrast_step(model: nn.Module, dtype: torch.dtype) -> Callable[[], Tensor]:
    pictures, texts = seeded(6, 3, 4, 4).to(dtype), ids(6, 5, below=32)
    optimizer, y = torch.optim.SGD(model.parameters(), 1e-3), torch.arange(6)

    def loss() -> Tensor:
        logits = model(pictures, texts).float()
        return (F.cross_entropy(logits, y) + F.cross_entropy(logits.mT, y)) / 2

    return step_of(model, loss, optimizer)


class Experts(nn.Module):
    """Each token goes to one of four experts, some of which get none."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 8)
        with torch.no_grad():
            self.router.weight.mul_(gain)
            self.router.bias[2] = -1e3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weight, which = logits.softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (which == i).nonzero().squeeze(-1)
            y = y.index_add(0, rows, (expert(x[rows]) * weight[rows, None]).to(y.dtype))
        return self.head(x + y), logits.logsumexp(-1).square().mean()


def experts_step(model: nn.Module, dtype: torch.dtype) -> Callable[[], Tensor]:
    x, y, optimizer = seeded(12, 16).to(dtype), torch.arange(12) % 8, torch.optim.SGD(model.parameters(), 1e-2)

    def loss() -> Tensor:
        out, z = model(x)
        return F.cross_entropy(out.float(), y) + 1e-3 * z.float()

    return step_of(model, loss, optimizer)


class Coupling(nn.Module):
    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.net, self.bounded = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 8)), bounded

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        s = s.tanh() if self.bounded else s
        return torch.cat([b * s.exp() + t, a], -1), s.sum(-1)


class Flow(nn.Module):
    def __init__(self, bounded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList([Coupling(bounded) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for step in self.steps:
            x, logdet = step(x)
            total = total + logdet
        return (0.5 * x.square().sum(-1) - total).mean()


def flow_step(model: nn.Module) -> Callable[[], Tensor]:
    x, optimizer = seeded(32, 8), torch.optim.Adam(model.parameters(), 1e-3)

    def loss() -> Tensor:
        return model(x)

    return step_of(model, loss, optimizer)


class Light(nn.Module):
    """A radiance field: density and colour at the samples of a ray, composed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, points: Tensor) -> Tensor:
        code = torch.cat([f(points * 2.0**i) for i in range(3) for f in (torch.sin, torch.cos)], -1)
        density, colour = self.net(code).split([1, 3], -1)
        alpha = 1 - torch.exp(-F.softplus(density).squeeze(-1))
        seen = torch.exp(torch.cumsum(torch.log(1 - alpha + 1e-10), -1))
        return ((alpha * seen)[..., None] * colour.sigmoid()).sum(1)


def light_step(model: nn.Module, dtype: torch.dtype) -> Callable[[], Tensor]:
    points, colours = seeded(8, 12, 3).to(dtype), seeded(8, 3, seed=1).sigmoid()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def loss() -> Tensor:
        return F.mse_loss(model(points).float(), colours)

    return step_of(model, loss, optimizer)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.q = nn.Sequential(nn.Linear(6, 32), nn.ReLU()), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(self.trunk(x))  # type: ignore[no-any-return]


LEGAL = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()


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


def sharpness(model: nn.Module) -> Step:
    optimizer = Sharpness(model.parameters(), 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (1 - model(seeded(6, 4))).relu().mean()
        loss.backward()
        return loss

    return Step(model, lambda: optimizer.step(closure))
