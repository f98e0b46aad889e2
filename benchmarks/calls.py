"""Count the functions of fpsim that one call enters, and time small calls: `python benchmarks/calls.py [--time]`.

A small call costs what Python does around the kernel, and who reads the code goes through the same functions. Counted
are calls of functions of the package (`sys.setprofile`), once everything that is kept has been kept. Times are of this
thread's processor, beside the plain call in the same run, and pairs take turns; the medians are printed.

Of `why` on README's example, insight's own part is counted: its calls, its files, and how often it runs the step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fpsim

HOME = f"{Path(fpsim.__file__).parent}/"
TURN_SECONDS = 0.003  # of one turn at least
EXPLAINED = "why on README's example, insight's own part"
Work = Callable[[], object]


# Counts


def entered(work: Work) -> Counter[str]:
    """The functions of fpsim that `work` enters, each with how often it does."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(HOME):
            calls[f"{path.removeprefix(HOME)}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def layers(width: int, times: int) -> nn.Sequential:
    """Linear and GELU, so many times."""
    return nn.Sequential(*(layer for _ in range(times) for layer in (nn.Linear(width, width), nn.GELU())))


def counts() -> dict[str, tuple[Counter[str], int]]:
    """What each call enters, and the number of calls that is the goal."""
    x = torch.randn(64, 64)
    model = fpsim.quantize(layers(64, 1), "e4m3fn")
    results: list[Tensor] = []

    def forward() -> None:
        results[:] = [model(x)]

    def backward() -> None:
        results[0].backward(x)

    def add() -> Counter[str]:
        with fpsim.emulate("bf16"):
            y = x + x
            y + y
            return entered(lambda: y + y)

    calls: dict[str, tuple[Work, int]] = {
        'round_to(x, "e4m3fn")': (lambda: fpsim.round_to(x, "e4m3fn"), 6),
        'round_to(x, "mxfp8_e4m3")': (lambda: fpsim.round_to(x, "mxfp8_e4m3"), 12),
        "Linear and GELU in e4m3fn, forward": (forward, 90),
        "Linear and GELU in e4m3fn, backward": (backward, 35),
    }
    for _ in range(2):  # what is kept is found by then
        for work, _ in calls.values():
            work()
    counted = {name: (entered(work), goal) for name, (work, goal) in calls.items()}
    counted["an addition under emulate"] = add(), 12
    return counted


def explained() -> tuple[Counter[str], int]:
    """What `why` enters of insight on the example of README, and how often it runs the step."""
    torch.manual_seed(0)
    model = fpsim.quantize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), fmt="fp16")
    x, y = torch.randn(32, 64), torch.arange(32) % 10
    results: list[fpsim.Why] = []

    def explain() -> None:
        results[:] = [fpsim.why(model, x, loss=lambda out: nn.functional.cross_entropy(out, y) * 2**24)]

    explain()  # some things are found out about torch at the first call
    calls = entered(explain)
    return Counter({name: n for name, n in calls.items() if name.startswith("insight/")}), results[0].runs


def files(calls: Counter[str]) -> set[str]:
    """The files in which functions that were entered are."""
    return {name.partition(":")[0] for name in calls}


# Processor time

Repeated = Callable[[int], object]  # does the same thing so many times


class Timed(NamedTuple):
    """A call beside the plain one.

    per_call: whether the goal is microseconds of the call; else it is times the plain call.
    """

    plain: Repeated
    ours: Repeated
    goal: float | None
    per_call: bool = False
    pairs: int = 60


def repeated(call: Callable[[], object]) -> Repeated:
    """`call`, so many times."""

    def work(times: int) -> None:
        for _ in range(times):
            call()

    return work


def added(fmt: str | None) -> Repeated:
    """Additions of 16 numbers in a block of `fpsim.emulate`, or in none."""
    x = fpsim.round_to(torch.randn(16), "bf16")

    def work(times: int) -> None:
        with nullcontext() if fmt is None else fpsim.emulate(fmt):
            y = x + x
            for _ in range(times):
                y + y

    return work


def stepped(model: nn.Module, x: Tensor) -> Repeated:
    """Training steps without an optimizer."""
    ones = torch.ones_like(x)

    def step() -> None:
        model.zero_grad()
        model(x).backward(ones)

    return repeated(step)


def per_sample(model: nn.Module, x: Tensor) -> Repeated:
    """A loop that gives the model one sample at a time, as who wants the gradient of each."""

    def loop() -> None:
        for row in x:
            model.zero_grad()
            model(row[None]).sum().backward()

    return repeated(loop)


def timed() -> dict[str, Timed]:
    """The small calls."""
    x16, x, sequence = torch.randn(16), torch.randn(64, 64), torch.randn(8, 4, 32)
    rows = {
        'round_to(x, "e4m3fn") of 16, relu': Timed(
            repeated(lambda: torch.relu(x16)), repeated(lambda: fpsim.round_to(x16, "e4m3fn")), 2.5
        ),
        "x + x of 16 under emulate, bf16": Timed(added(None), added("bf16"), 6.0, True),
    }
    linear = nn.Linear(64, 64)
    for fmt, goal in (("e4m3fn", 35.0), ("mxfp8_e4m3", 60.0), ("recipe:fp8_current", 80.0)):
        model = fpsim.quantize(linear, fmt)
        rows[f"Linear(64, 64), {fmt}"] = Timed(repeated(partial(linear, x)), repeated(partial(model, x)), goal, True)
    for width in (64, 256):
        for fmt, goal in (("e4m3fn", 2.0), ("recipe:fp8_current", 3.5)):
            plain, y = layers(width, 2), torch.randn(width, width)
            rows[f"step of (Linear, GELU) x 2, {width} wide, {fmt}"] = Timed(
                stepped(plain, y), stepped(fpsim.quantize(plain, fmt), y), goal
            )
    lstm = nn.LSTM(32, 32)
    cell = fpsim.quantize(lstm, "e4m3fn")
    rows["LSTM(32, 32) of 8 steps, e4m3fn"] = Timed(
        repeated(lambda: lstm(sequence)), repeated(lambda: cell(sequence)), None
    )
    plain, y = layers(64, 2), torch.randn(8, 64)
    rows["gradients of 8 samples, one by one, e4m3fn"] = Timed(
        per_sample(plain, y), per_sample(fpsim.quantize(plain, "e4m3fn"), y), None
    )
    return rows


TOKENS = 32


def llama(width: int = 384) -> nn.Module:
    """A Llama of four layers, and 4,096 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 48 * 16, "num_attention_heads": width // 64}
    words = {"vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes, **words)).eval()


def generated(model: nn.Module, is_frozen: bool = False) -> Repeated:
    """Texts of so many tokens, one token after the other."""
    prompt = torch.randint(3, 4096, (1, 8))

    def work(times: int) -> None:
        for _ in range(times):
            with torch.no_grad(), fpsim.frozen(model) if is_frozen else nullcontext():
                out = model(prompt, use_cache=True)
                for _ in range(TOKENS):
                    token = out.logits[:, -1:].argmax(-1)
                    out = model(token, past_key_values=out.past_key_values, use_cache=True)

    return work


def rolled_out(model: nn.Module, is_frozen: bool = False) -> Repeated:
    """Texts of so many tokens, as `generate` of transformers makes them with its cache."""
    prompt = torch.randint(3, 4096, (1, 8))

    def work(times: int) -> None:
        for _ in range(times):
            with torch.no_grad(), fpsim.frozen(model) if is_frozen else nullcontext():
                model.generate(prompt, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)

    return work


def rollouts() -> dict[str, Timed]:
    """`generate` of a model 256 wide, frozen and not."""
    plain, rows = llama(256), {}
    for fmt, goal in (("bf16", 2.0), ("recipe:fp8_current", 2.5), ("recipe:mxfp8", 2.5)):
        model = fpsim.quantize(plain, fmt)
        rows[f"generate {TOKENS} tokens, {fmt}, frozen"] = Timed(
            rolled_out(plain), rolled_out(model, True), goal, pairs=9
        )
        rows[f"generate {TOKENS} tokens, {fmt}"] = Timed(rolled_out(plain), rolled_out(model), None, pairs=9)
    return rows


def evaluated(model: nn.Module, texts: int, is_frozen: bool = False) -> Repeated:
    """Evaluations of so many texts of 256 tokens."""
    text = torch.randint(3, 4096, (1, 256))

    def work(times: int) -> None:
        for _ in range(times):
            with torch.no_grad(), fpsim.frozen(model) if is_frozen else nullcontext():
                for _ in range(texts):
                    model(text)

    return work


def generations() -> dict[str, Timed]:
    """Generation and evaluation, with weights that are rounded once and at each call."""
    plain, rows = llama(), {}
    for fmt, goal in (("bf16", 2.0), ("e4m3fn", 2.0), ("recipe:fp8_current", 2.5), ("recipe:mxfp8", 2.5)):
        model = fpsim.quantize(plain, fmt)
        rows[f"{TOKENS} tokens, {fmt}, frozen"] = Timed(generated(plain), generated(model, True), goal, pairs=5)
        rows[f"{TOKENS} tokens, {fmt}"] = Timed(generated(plain), generated(model), None, pairs=5)
        for texts in (2, 16):
            rows[f"evaluation of {texts} texts, {fmt}, frozen"] = Timed(
                evaluated(plain, texts), evaluated(model, texts, True), 1.4, pairs=5
            )
    return rows


def seconds(work: Repeated, times: int) -> float:
    """This thread's processor time for one of so many."""
    began = time.thread_time()
    work(times)
    return (time.thread_time() - began) / times


def paired(row: Timed) -> tuple[float, float, float]:
    """Median seconds of the plain call and of ours, and the median of their ratio."""
    works = [row.plain, row.ours]
    row.plain(1), row.ours(1)
    times = max(1, round(TURN_SECONDS / max(seconds(row.ours, 1), 1e-9)))
    taken: dict[Repeated, list[float]] = {work: [] for work in works}
    for _ in range(row.pairs):
        for work in works:
            taken[work].append(seconds(work, times))
        works.reverse()
    plain, ours = taken[row.plain], taken[row.ours]
    ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
    return statistics.median(plain), statistics.median(ours), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="time small calls too")
    parser.add_argument("--list", action="store_true", help="list the functions that each call enters")
    parser.add_argument("--generate", action="store_true", help="time generation and evaluation of a small Llama too")
    parser.add_argument("--rollouts", action="store_true", help="time generate of transformers too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (calls, goal) in counts().items():
        print(f"{name:56} {calls.total():4} calls of {len(calls):3} functions   goal <= {goal}")
        for function, times in calls.most_common() if options.list else ():
            print(f"{times:8} {function}")
    calls, runs = explained()
    print(
        f"{EXPLAINED:56} {calls.total():4} calls of {len(calls):3} functions in "
        f"{len(files(calls))} files, of {runs} runs of the step   goal <= 3500 in 12 files"
    )
    for function, times in calls.most_common() if options.list else ():
        print(f"{times:8} {function}")
    rows = [*timed().items()] if options.time else []
    rows += [*generations().items()] if options.generate else []
    rows += [*rollouts().items()] if options.rollouts else []
    for name, row in rows:
        plain, ours, ratio = paired(row)
        goal = "" if row.goal is None else f"   goal <= {row.goal:g} {'us' if row.per_call else 'times'}"
        print(f"{name:56} {ours * 1e6:7.1f} us, plain {plain * 1e6:6.1f} us: {ratio:5.2f} times{goal}")


if __name__ == "__main__":
    main()
