"""Two checkouts beside each other, by processor time: `report.py --base REV` asks for it.

In each of several rounds a fresh process of each checkout is started, both on one core. The two take turns (A, B, B, A,
A, B, ...) at the same work, and each says how many seconds of its own processor time that took. Turns are short: a core
of a cloud's machine is up to 1.7 times slower while its neighbour works, for tenths of a second or longer, and a pair
of short turns mostly lies within one such time. Of a round the median of log(current / base) over its pairs counts.
What is printed is the mean over the rounds, and its interval by Student's t: a process places its memory once, which
makes it faster or slower by some percent for as long as it lives, so that pairs of one round are not independent and
rounds are.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

WORSE = 1.03  # an interval wholly above it is worse
TURN_SECONDS = 0.003  # of one turn at least: shorter work is repeated
ROUND_SECONDS = 6.0  # for one row of a round at most, but four pairs are always measured
Work = Callable[[int], object]  # does the same thing so many times


# What is measured; imports are those of the checkout that the process was given


def _round(elements: int) -> Work:
    import torch

    import fpsim

    x = torch.randn(elements)

    def work(times: int) -> None:
        for _ in range(times):
            fpsim.round_to(x, "fp16")

    return work


def _under_emulate(fmt: str, call: Callable[[Any], object]) -> Work:
    """`call(x)` in one block of `fpsim.emulate`, for an x of 16 numbers that are in the format."""
    import torch

    import fpsim

    x = torch.randn(16).to(torch.bfloat16).float()

    def work(times: int) -> None:
        with fpsim.emulate(fmt):
            y = x + x
            for _ in range(times):
                call(y)

    return work


def _linear(fmt: str) -> Work:
    import torch

    import fpsim

    model, x = fpsim.quantize(torch.nn.Linear(16, 16), fmt), torch.randn(4, 16)

    def work(times: int) -> None:
        for _ in range(times):
            model(x).sum().backward()

    return work


def _round_blocks(axis: int) -> Work:
    import torch

    import fpsim

    x = torch.randn(1024, 1024)

    def work(times: int) -> None:
        for _ in range(times):
            fpsim.round_to(x, "mxfp8_e4m3", axis=axis)

    return work


@cache
def _linear_function() -> Any:
    """A linear layer's products, forward and backward, as an autograd Function of the model's own."""
    import torch

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    return Linear


def _of_functions(x: Any, layer: Any) -> Any:
    """A linear layer by `_linear_function`."""
    return _linear_function().apply(x, layer.weight) + layer.bias


def _of_integers(x: Any, layer: Any) -> Any:
    """Integer tensors beside numbers of the format, and writes at indices and under a mask."""
    import torch

    rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    y = layer(x) + columns  # a distance, as ALiBi adds it
    z = y * rows.unsqueeze(1) / (columns + 1)
    z[rows[::2]] = y[rows[::2]]
    z.index_add_(0, rows, y)
    return z.masked_fill(columns > 12, 0) + z.maximum(columns)


def _of_rotary(x: Any, layer: Any) -> Any:
    """A rotary code whose table is an einsum of positions and frequencies."""
    import torch

    positions = torch.arange(x.shape[0], dtype=torch.float32)
    frequencies = 10000.0 ** (-torch.arange(0, x.shape[1], 2).float() / x.shape[1])
    angles = torch.einsum("i,j->ij", positions, frequencies).repeat(1, 2)
    y = layer(x)
    first, second = y.chunk(2, -1)
    return y * angles.cos().to(y.dtype) + torch.cat((-second, first), -1) * angles.sin().to(y.dtype)


def _layer(fmt: str, forward: Callable[[Any, Any], Any]) -> Work:
    """Forward and backward of `forward(x, layer)`, quantised, for a layer of 16 x 16 and 32 rows."""
    import torch

    import fpsim

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return forward(x, self.layer)

    model, x = fpsim.quantize(Model(), fmt), torch.randn(32, 16)

    def work(times: int) -> None:
        for _ in range(times):
            model(x).sum().backward()

    return work


def _step(which: str, form: str) -> Work:
    from report import make_step

    step = make_step(which, form)

    def work(times: int) -> None:
        for _ in range(times):
            step()

    return work


ROWS: dict[str, tuple[str, Callable[[], Work]]] = {  # by name: the section, and what makes the work
    "resnet20, all roles fp16, step": ("training", lambda: _step("resnet20", "fpsim")),
    "gpt2-1024, all roles fp16, step": ("training", lambda: _step("gpt2-1024", "fpsim")),
    "gpt2-1024, all roles bf16, step": ("training", lambda: _step("gpt2-1024", "fpsim bf16")),
    "x + x under emulate, bf16": ("small", lambda: _under_emulate("bf16", lambda x: x + x)),
    "x.dtype under emulate, bf16": ("small", lambda: _under_emulate("bf16", lambda x: x.dtype)),
    "x.to(x.dtype) under emulate, bf16": ("small", lambda: _under_emulate("bf16", lambda x: x.to(x.dtype))),
    "Linear(16, 16), forward and backward, fp16": ("small", lambda: _linear("fp16")),
    "gpt2-1024, recipe mxfp8, step": ("training", lambda: _step("gpt2-1024", "recipe:mxfp8")),
    "gpt2-1024, recipe nvfp4, step": ("training", lambda: _step("gpt2-1024", "recipe:nvfp4")),
    "an autograd Function, forward and backward, fp16": ("small", lambda: _layer("fp16", _of_functions)),
    "integer operands, indexed writes, bf16": ("small", lambda: _layer("bf16", _of_integers)),
    "rotary table by einsum, bf16": ("small", lambda: _layer("bf16", _of_rotary)),
    "round_to of 16": ("rounding", lambda: _round(16)),
    "round_to of 2^20": ("rounding", lambda: _round(2**20)),
    "round_to of 2^20, mxfp8_e4m3, last axis": ("rounding", lambda: _round_blocks(-1)),
    "round_to of 2^20, mxfp8_e4m3, first axis": ("rounding", lambda: _round_blocks(0)),
}


# The process of one checkout


def serve(checkout: str, core: str) -> None:
    """Do the work that each line of the input names, and print the processor time that it took."""
    os.sched_setaffinity(0, {int(core)})
    answers, sys.stdout = sys.stdout, sys.stderr
    import fpsim

    if not Path(str(fpsim.__file__)).is_relative_to(Path(checkout).resolve()):
        raise ImportError(f"Got fpsim of {fpsim.__file__}. Expected that of {checkout}.")
    known: dict[str, Work] = {}
    for line in sys.stdin:
        name, times = json.loads(line)
        try:
            if name not in known:
                known.clear()  # one row's memory at a time
                known[name] = ROWS[name][1]()
                known[name](2)
                gc.collect()
                gc.freeze()
            began = time.process_time()
            known[name](times)
            answer: dict[str, Any] = {"seconds": time.process_time() - began}
        except Exception as error:  # work that this checkout cannot do is a note of the report
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class NotMeasuredError(Exception):
    """A checkout could not do the work."""


class Checkout:
    """A process that imports the packages of one checkout."""

    def __init__(self, folder: Path, core: int) -> None:
        self.folder = folder
        variables = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        variables["TRANSFORMERS_VERBOSITY"] = "error"
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), str(core)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=folder
        )

    def seconds(self, name: str, times: int) -> float:
        """The processor time of the work called `name`, done so many times."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([name, times]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process of {self.folder} ended with code {self._process.wait()}.")
        answer = json.loads(line)
        if "error" in answer:
            raise NotMeasuredError(f"{self.folder}: {answer['error']}")
        return float(answer["seconds"])

    def __enter__(self) -> Checkout:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()  # the end of its input is its end


@contextmanager
def archived(revision: str, repository: Path) -> Iterator[Path]:
    """A folder with the files of a revision; removed afterwards."""
    command = ["git", "-C", str(repository), "archive", "--format=tar", revision]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(f"git knows no revision {revision!r}: {done.stderr.decode().strip()}")
    with TemporaryDirectory(prefix="fpsim-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder).resolve()


# The comparison


class Ratio(NamedTuple):
    """How much longer the current checkout takes, with the borders of the interval in which that lies at 95 %."""

    value: float
    low: float
    high: float

    @property
    def is_worse(self) -> bool:
        return self.low > WORSE

    @property
    def verdict(self) -> str:
        return "WORSE by 3 %" if self.is_worse else "not worse by 3 %"


def ratio_of(logs: Sequence[float]) -> Ratio:
    """The mean ratio and its interval, from one log(current / base) for each round; at least two rounds."""
    from scipy.stats import t

    mean = statistics.fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def one_round(base: Checkout, current: Checkout, name: str, pairs: int, is_current_first: bool) -> float:
    """The median of log(current / base) over pairs of turns, of which each begins with who ended the one before."""
    base.seconds(name, 1), current.seconds(name, 1)  # the first makes the work
    once = max(base.seconds(name, 4) / 4, current.seconds(name, 4) / 4, 1e-9)
    times = max(1, math.ceil(TURN_SECONDS / once))
    turns, logs = [current, base] if is_current_first else [base, current], []
    for _ in range(min(pairs, max(4, int(ROUND_SECONDS / (2 * times * once))))):
        seconds = {turn: turn.seconds(name, times) for turn in turns}
        logs.append(math.log(seconds[current] / seconds[base]))
        turns.reverse()
    return statistics.median(logs)


def compare(
    base: Path, current: Path, names: Sequence[str], rounds: int, pairs: int
) -> Iterator[tuple[str, Ratio | NotMeasuredError]]:
    """The ratio for each row, or why there is none."""
    cores = sorted(os.sched_getaffinity(0))
    logs: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, NotMeasuredError] = {}
    for number in range(rounds):
        with ExitStack() as stack:
            core = cores[number % len(cores)]
            sides = [stack.enter_context(Checkout(folder, core)) for folder in (base, current)]
            for name in names:
                if name in failed:
                    continue
                try:
                    logs[name].append(one_round(*sides, name, pairs, number % 2 == 1))
                except NotMeasuredError as error:
                    failed[name] = error
    for name in names:
        yield name, failed[name] if name in failed else ratio_of(logs[name])


if __name__ == "__main__":
    serve(*sys.argv[1:])
