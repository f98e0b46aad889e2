"""Models for the tests of adaptive scaling, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ada_loss.rules import LAYER_RULES

RULES = list(LAYER_RULES)
AHEAD = [name for name in RULES if LAYER_RULES[name].predicts]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Residual(nn.Module):
    """Convolutions, batch normalisation, a shortcut, an in-place ReLU, pooling, a shared layer, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.twice = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)), inplace=True)
        x = F.relu(x + self.conv(x))
        x = torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrence with shared weights, an embedding tied to the output, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        h, states = torch.zeros_like(e[:, 0]), []
        for t in range(e.shape[1]):
            h = torch.tanh(self.inner(torch.cat([e[:, t], h], 1)))
            states.append(h)
        y = torch.stack(states, 1)
        y = self.norm(y + self.attention(y, y, y, need_weights=False)[0])
        return y @ self.embedding.weight.t()


def cases() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Tensor]]]]:
    def mlp() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(6, 5)

    yield "mlp", mlp
    yield "residual", lambda: (Residual(), torch.randn(4, 2, 6, 6))
    yield "recurrent", lambda: (Recurrent(), torch.randint(0, 11, (3, 5)))


CASES = dict(cases())


def backward(model: nn.Module, x: Tensor, size: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(x)
    (out * torch.randn(out.shape, generator=seeded(1)) * size).sum().backward()
    return gradients(model)


class Fork(nn.Module):
    """Two branches whose gradients carry different scales, and one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.small, self.large = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return self.small(h), self.large(h)
