"""How long a first call takes: `python benchmarks/first_call.py [--repeat N]`, seconds of the processor.

Each kind runs in processes of its own. The first has an empty folder for machine code: what it calls is compiled from
Python or, where `.ci/loops` has written them, from LLVM's instructions. The second finds the machine code there.
`import fpsim` is not in the times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fpsim.compiling import native

ROOT = Path(__file__).parents[1]
KINDS = {  # what runs, with fpsim, nn and x
    'round_to(x, "e4m3fn")': 'fpsim.round_to(x, "e4m3fn")',
    'round_to(x, "e4m3fn", "stochastic")': 'fpsim.round_to(x, "e4m3fn", "stochastic")',
    'round_to(x, "mxfp4")': 'fpsim.round_to(x, "mxfp4")',
    'round_to(x, "mxfp4", "stochastic")': 'fpsim.round_to(x, "mxfp4", "stochastic")',
    'round_to(x, "nvfp4", "stochastic")': 'fpsim.round_to(x, "nvfp4", "stochastic")',
    "a step of three Linear, recipe:fp8_current": 'step(fpsim.quantize(model, "recipe:fp8_current"))',
    "a step of three Linear, recipe:nvfp4": 'step(fpsim.quantize(model, "recipe:nvfp4"))',
    "a product in an accumulator": 'fpsim.matmul(x, x, "fp16")',
}
PROGRAM = """
import time
import torch
from torch import nn
import fpsim

def step(model):
    model(x).sum().backward()

x = torch.randn(64, 64)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
begin = time.process_time()
{call}
print(time.process_time() - begin)
"""


def seconds(call: str, folder: Path) -> float:
    """Of the processor, for a call in a process that keeps its machine code in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM.format(call=call)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    return float(done.stdout)


def first_and_second(call: str) -> tuple[float, float]:
    """Seconds of the first process, whose folder is empty, and of the second one."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (seconds(call, Path(folder)) for _ in range(2))
    return first, second


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, of which the median is printed")
    repeat = parser.parse_args().repeat
    source = "LLVM's instructions" if native.ships_loops() else "Python"
    print(f"Compiled from {source}. Goals: 1.5 s in the first process, 0.3 s in the second.")
    print("| | first process | second |\n| --- | ---: | ---: |")
    for words, call in KINDS.items():
        first, second = map(statistics.median, zip(*(first_and_second(call) for _ in range(repeat)), strict=True))
        print(f"| {words} | {first:.2f} | {second:.2f} |", flush=True)


if __name__ == "__main__":
    main()
