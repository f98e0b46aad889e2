"""What stored formats cost the `chars` task, and what they lose: the table of docs/updates.md.

    python benchmarks/updates.py --rate 3e-4 --seeds 1

AdamW, 200 steps of 32 sequences, weight decay 0.01, a warm-up of 20 steps and a cosine to a tenth of the rate.
"""

from __future__ import annotations

import argparse
import math

import torch

import fpsim
from ada_loss.lab.tasks.chars import bits_per_character, chars
from fpsim import Update
from fpsim.insight.rows import Rows

UPDATES = {
    "float32": Update(),
    "bf16 nearest": Update(weight="bf16"),
    "bf16 stochastic": Update(weight="bf16", rounding="stochastic"),
    "bf16 Kahan": Update(weight="bf16", compensation="kahan"),
    "8-bit states": fpsim.UPDATES["adam8bit"],
    "FP8-LM": fpsim.UPDATES["fp8_lm"],
}


def train(update: Update, rate: float, seed: int, steps: int = 200) -> dict[str, object]:
    """One training: bits per character of the test, and what was lost."""
    task = chars(seed)
    model, (inputs, targets) = task.model, task.train
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    quantized = fpsim.quantize_optimizer(optimizer, update, model, seed=seed)
    warm, last = 20, 0.1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 1) * (last + (1 - last) * (1 + math.cos(math.pi * i / steps)) / 2),
    )
    with fpsim.lost_updates(quantized, every=10) as lost:
        for _ in range(steps):
            batch = torch.randint(len(inputs), (32,))
            optimizer.zero_grad()
            task.loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            schedule.step()
    norms = [p for name, p in model.named_parameters() if "norm" in name and name.endswith("weight")]
    with torch.no_grad():
        bits = bits_per_character(model(task.test[0]), task.test[1])
    still = sum(int((p == 1).sum()) for p in norms) / sum(p.numel() for p in norms)
    return {"bits": bits, "lost": lost.share, "edq": lost.edq, "norm weights at 1": still}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    rows = Rows()
    for name, update in UPDATES.items():
        for seed in range(arguments.seeds):
            rows.append({"update": name, "rate": arguments.rate, "seed": seed, **train(update, arguments.rate, seed)})
            print(rows[-1], flush=True)
    print(rows)


if __name__ == "__main__":
    main()
