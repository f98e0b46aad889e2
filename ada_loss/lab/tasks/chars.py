"""A small GPT that learns the characters of a text: Python's own documentation, or a text that the user names."""

from __future__ import annotations

import math
import os
import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss.lab.tasks.task import Task, made_of, seeded, trained_with
from fpsim.checks import shown

__all__ = ["chars", "drawn", "log_likelihood"]

CONTEXT = 64
LEAST = 10  # the least number of sequences in a text


class Block(nn.Module):
    """Causal attention and a feed-forward layer, Radford et al. 2019: (batch, time, width) -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """A GPT: indices of characters, (batch, time) int64 -> logits of the next characters, (batch, time, characters)."""

    def __init__(self, characters: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.character(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))  # type: ignore[no-any-return]


def next_character(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions, in nats."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def bits_per_character(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean cross entropy over all positions, in bits."""
    return next_character(outputs, targets).item() / math.log(2)


def drawn(model: nn.Module, text: Tensor, length: int) -> Tensor:
    """Continue texts up to a length with characters drawn one by one from a model's distribution.

    (batch, time) -> (batch, length), int64.
    """
    with torch.no_grad():
        while text.shape[1] < length:
            last = torch.softmax(model(text)[:, -1].double(), dim=-1)
            # Characters are drawn on the host, so that a seed yields the same text on any device.
            text = torch.cat([text, torch.multinomial(last.cpu(), 1).to(text.device)], dim=1)
    return text


def log_likelihood(model: nn.Module, text: Tensor) -> Tensor:
    """Return log-probabilities of all characters but the first, in nats: (batch, time) -> (batch, time - 1) float64."""
    with torch.no_grad():
        given = torch.log_softmax(model(text[:, :-1]).double(), dim=-1)
    return given.gather(-1, text[:, 1:, None])[..., 0]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the characters that were predicted; NaN outputs are wrong."""
    right = (outputs.argmax(dim=-1) == targets) & ~outputs.isnan().any(dim=-1)
    return float(right.float().mean())


@made_of("text")
@trained_with(optimizer="adamw", learning_rate=3e-3, warmup=20, weight_decay=0.01, epochs=1, batch_size=32)
def chars(seed: int = 0, text: str | os.PathLike[str] | None = None) -> Task:
    """Learn a text in sequences of 64 characters; the last tenth is the test; the metric is bits per character.

    Bits per character depend on the whole predicted distribution, and accuracy only on its most likely character: of
    two trainings with the same accuracy, one can be worse by 0.7 bits.

    In float32 one epoch of the library's text reaches 3.3 bits and 40 % of the characters (Python 3.11, seed 0), in 7 s
    on two cores. The text comes with the running Python, so results of different versions cannot be compared.

    Args:
        seed: the seed of the weights.
        text: a file in UTF-8; None for the 465,000 characters of `pydoc_data.topics`. In a sweep: "chars=book.txt".

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that is not UTF-8, or too short for a training.

    >>> task = chars()
    >>> task.train[0].shape[1], bool((task.train[0][0, 1:] == task.train[1][0, :-1]).all())
    (64, True)
    >>> next(iter(task.metrics))
    'bits_per_character'
    """
    content = "\n".join(pydoc_data.topics.topics.values()) if text is None else _read(Path(text))
    # The characters are sorted, because the order of a set of strings differs between processes.
    known = {character: number for number, character in enumerate(sorted(set(content)))}
    numbers = torch.tensor([known[character] for character in content])
    stretches = numbers[: (len(numbers) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    # The targets are the same text, one character later: the target of each character is the next character.
    following = numbers[1 : 1 + stretches.numel()].view(-1, CONTEXT)
    split = len(stretches) * 9 // 10
    model = seeded(seed, lambda: SmallGPT(len(known)))
    data = ((stretches[:split], following[:split]), (stretches[split:], following[split:]))
    return Task("chars", model, *data, next_character, {"bits_per_character": bits_per_character, "accuracy": accuracy})


def _read(path: Path) -> str:
    """Read a text. Raises ValueError if it is too short."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"The text {shown(str(path))} of the task chars is not there. Give the path of a text file, or omit it."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"The text {shown(str(path))} is not UTF-8 ({error.reason}). Convert it to UTF-8.") from None
    if len(content) < LEAST * CONTEXT + 1:
        raise ValueError(
            f"The text {shown(str(path))} has {len(content)} characters. Expected {LEAST * CONTEXT + 1} or more: "
            f"{LEAST} sequences of {CONTEXT}, a tenth of them for the test."
        )
    return content
