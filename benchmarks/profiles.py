"""How near the profiles of engines come: the tables of docs/mismatch.md.

    python benchmarks/profiles.py

Trains three small models of transformers on a page of text, runs each in native bfloat16, and prints the mean |dlogp|
of its emulation: in bf16 without a profile, with the kernels of one part of it after the other, with all of it, and the
floor, which is native bfloat16 beside itself with sums permuted and its sequences one by one. Another table has each
engine's own code beside its profile. Needs transformers; some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from fpsim import Policy

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engine_code import (
    ENGINES,
    apart,
    floor_of,
    in_bf16,
    log_probabilities,
    model_of,
)

KINDS = {"llama": "Llama", "gpt2": "GPT-2", "mixtral": "Mixtral"}
TOKENS, BATCH, SEQUENCES = 128, 8, 8
PARTS = {  # the operations whose kernels a profile has, and what rounds there
    "to float": ("rotary codes", "`inv_freq` is cast by `nn.Module.to`"),
    "scaled_dot_product_attention": ("attention", "`cpu_flash_attention` and its `Vectorized::fexp_u20`"),
    "pow": ("GELU", "`pow_tensor_scalar_optimized_kernel`: x * x * x"),
}


def text() -> Tensor:
    """The bytes of a page that does not change, as ids below 128."""
    return torch.tensor([byte for byte in (ROOT / "LICENSE").read_bytes() if byte < 128])


def rows_of(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - TOKENS, (count,), generator=generator)
    return torch.stack([data[i : i + TOKENS] for i in starts])


def trained(kind: str, steps: int) -> nn.Module:
    """A model of four layers after a short training."""
    model = model_of(kind, "sdpa", vocabulary=128, layers=4, positions=TOKENS, gain=1.0).train()
    data, generator = text(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        ids = rows_of(data, BATCH, generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def with_kernels(policy: Policy, names: Sequence[str]) -> Policy:
    """A profile of which only the kernels of some operations are left."""

    def part(one: Any) -> Policy:
        return replace(one, kernels={name: one.kernels[name] for name in names if name in one.kernels})

    return replace(part(policy), overrides={pattern: part(inner) for pattern, inner in policy.overrides.items()})


def models(steps: int) -> str:
    """A table of models: how far they are from native bfloat16, and what is left of it with each part put right."""
    lines = [
        "| model | attention | float32 | bf16 alone | with one part after another | with the profile | floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, word in KINDS.items():
        model = trained(kind, steps)
        ids = rows_of(text(), SEQUENCES, torch.Generator().manual_seed(1))
        for attention in ("eager", "sdpa"):
            model.config._attn_implementation = attention
            profile = fpsim.profile("hf_eager_bf16", model)
            native = in_bf16(model, True)
            theirs = log_probabilities(native, ids)

            def distance(found: Tensor, theirs: Tensor = theirs) -> float:
                return apart(found, theirs)

            before = alone = log_probabilities(fpsim.quantize(model, "bf16"), ids)
            names: list[str] = []
            left = []
            for operations, (part, _) in PARTS.items():
                names += operations.split()
                found = log_probabilities(fpsim.quantize(model, with_kernels(profile, names)), ids)
                if not torch.equal(found, before):  # the model has this part
                    left.append(f"{part} {distance(found):.1e}")
                    before = found
            float32, floor = distance(log_probabilities(model, ids)), floor_of(native, ids)
            numbers = f"{float32:.1e} | {distance(alone):.1e} | {', '.join(left)}"
            lines.append(f"| {word} | {attention} | {numbers} | {distance(before):.1e} | {floor:.1e} |")
    return "\n".join(lines)


def engines() -> str:
    """The second table."""
    lines = ["| profile | `hf_bf16` alone | with the profile too | floor |", "|---|---|---|---|"]
    model = model_of("llama")
    ids = torch.randint(0, 64, (16, 48), generator=torch.Generator().manual_seed(2))
    for name, change in ENGINES.items():
        native = in_bf16(model, False)
        change(native)
        theirs = log_probabilities(native, ids)
        found = [
            apart(log_probabilities(fpsim.quantize(model, fpsim.profile(names, model)), ids), theirs)
            for names in ("hf_bf16", ("hf_bf16", name))
        ]
        lines.append(f"| `{name}` | {found[0]:.1e} | {found[1]:.1e} | {floor_of(native, ids):.1e} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of training")
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    print(engines(), flush=True)
    print()
    print(models(steps))
    for part, words in PARTS.values():
        print(f"- {part}: {words}")


if __name__ == "__main__":
    main()
