"""Optimizers of pytorch_optimizer with each operation rounded, beside the same in torch's own bfloat16 on the CPU.

    pip install --no-deps pytorch_optimizer
    python benchmarks/optimizers.py

Five steps with the defaults of each: whose weights have all bits of the native ones, in how many numbers others differ,
and which cannot be compared, with the reason. One that needs a closure or a model is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fpsim

SHAPES = ((8, 32), (32,), (16, 16))
STEPS = 5
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """The same numbers in either dtype."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in SHAPES]


def trained(make: Make, dtype: torch.dtype) -> list[Tensor]:
    """The weights after some steps; a float32 optimizer is quantised."""
    ours = parameters(dtype)
    optimizer = make(ours)
    if dtype is torch.float32:
        fpsim.quantize_optimizer(optimizer, fpsim.Update(weight="bf16", arithmetic="torch"))
    torch.manual_seed(0)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for p in ours:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
        optimizer.step()
    return [p.detach().float() for p in ours]


def compared() -> Iterator[tuple[str, str]]:
    """The name of each optimizer that steps natively, and what came of the comparison."""
    import pytorch_optimizer

    for name in pytorch_optimizer.get_supported_optimizers():
        make: Any = pytorch_optimizer.load_optimizer(name)
        try:
            native = trained(make, torch.bfloat16)
        except Exception as error:  # it wants other arguments, a closure, or a kernel that is not there
            yield name, f"left out: {type(error).__name__}: {str(error)[:70]}"
            continue
        try:
            emulated = trained(make, torch.float32)
        except Exception as error:
            yield name, f"refused: {type(error).__name__}: {str(error)[:70]}"
            continue
        count = sum(
            int((~torch.isclose(a, b, 0, 0, equal_nan=True)).sum()) for a, b in zip(native, emulated, strict=True)
        )
        yield name, f"differs in {count} numbers" if count else "equal"


def main() -> None:
    warnings.simplefilter("ignore")  # of the optimizers
    torch.set_num_threads(1)
    results = dict(compared())
    for name, words in results.items():
        if words != "equal":
            print(f"{name}: {words}")
    kinds = [words.split(":")[0].split()[0] for words in results.values()]
    print({kind: kinds.count(kind) for kind in sorted({*kinds})}, "of", len(results))


if __name__ == "__main__":
    main()
