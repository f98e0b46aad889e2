"""Training functions as users have them: a loop like nanoGPT's, Accelerate, transformers' Trainer, Lightning."""

from __future__ import annotations

import codecs
import contextlib
import io
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss import Job

with contextlib.redirect_stdout(io.StringIO()):
    import this

TEXT = codecs.decode(this.s, "rot13") * 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 32, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, index: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(index) + self.wpe(torch.arange(index.shape[1], device=index.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt(job: Job) -> dict[str, float]:
    """nanoGPT's train.py, shortened: the lines with `job` are those that a sweep needs."""
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT])
    context, batch, steps = 16, 8, job.options.get("steps", 12)

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - context, (batch,)).tolist()
        x = torch.stack([data[i : i + context] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + context] for i in starts])
        return x.to(job.device), y.to(job.device)

    model = job.quantize(GPT(len(letters), context), record_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    scaler = job.scaler(optimizer)
    start = job.checkpoint(model=model, optimizer=optimizer)
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for _ in range(2):  # gradient accumulation
            _, loss = model(*get_batch())
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        job.log(step, loss=loss, lr=group["lr"])
        job.checkpoint(step + 1)
        die_once(job, step)
    model.eval()
    with torch.no_grad():
        losses = [model(*get_batch())[1].item() for _ in range(4)]
    return {"loss": sum(losses) / len(losses)}


def moment() -> None:
    """Called several times in each step of `short`; tests put something else here."""


def short(job: Job) -> dict[str, float]:
    """A few small steps that draw from every global generator, with dropout and a metric of its own at the end."""
    model = job.quantize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1)), record_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = job.scaler(optimizer)
    start = job.checkpoint(model=model, optimizer=optimizer)
    for step in range(start, job.options["steps"]):
        moment()
        x = torch.randn(8, 4) + np.random.rand() + random.random()  # noqa: NPY002
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        moment()
        scaler.step(optimizer)
        scaler.update()
        moment()
        job.log(step, loss=loss, drawn=x.mean())
        moment()
        job.checkpoint(step + 1)
    moment()
    with torch.no_grad():
        error = model(torch.ones(1, 4)).item()
    moment()
    return {"error": error}


def fails_behind_the_last_step(job: Job) -> dict[str, float]:
    """As one that returns the loss of its last step, which a training that goes on behind that step has not."""
    model = job.quantize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = job.scaler(optimizer)
    for step in range(job.checkpoint(model=model, optimizer=optimizer), 3):
        loss = model(torch.ones(4, 2)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        job.log(step, loss=loss)
        job.checkpoint(step + 1)
    moment()
    return {"loss": loss.item()}


def die_once(job: Job, step: int) -> None:
    """Kill this process, the first time it comes to the step that an option names."""
    mark = Path(job.options.get("mark", ""))
    if step == job.options.get("die_at") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def returns_nothing(job: Job) -> Any:
    job.quantize(nn.Linear(1, 1))


def raises_for_seed_1(job: Job) -> dict[str, float]:
    if job.seed == 1:
        raise RuntimeError("not with this seed")
    return {"accuracy": 1.0}


def diverges(job: Job) -> dict[str, float]:
    job.log(0, loss=math.inf)
    return {"accuracy": 0.1}
