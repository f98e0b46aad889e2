"""Measure fpsim on a GPU against a plain copy, torch's casts and its peers: `python benchmarks/card.py [--quick]`.

Kernels are timed by the card's own events around many calls, candidate and baseline in turn; steps by the host, which
waits for the card at the end of each. Ratios are medians of pairs in one run. The report is saved as JSON under
benchmarks/results/, with the card's name; with --only it has those sections alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from report import RESULTS, Report, machine, make_step, paired, save
from torch import Tensor

import fpsim
from fpsim.tensors.moments import moments_of
from fpsim.tensors.tally import lost_between
from fpsim.tensors.verify import milliseconds

LARGE, CACHED = 1 << 27, 1 << 22  # elements: of memory, and within the second-level cache
MODES = ("nearest_even", "stochastic")
FORMATS = ("fp16", "bf16", "tf32", "dlfloat16", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "int8", "hif8", "posit8")
BLOCKS = ("mxfp8_e4m3", "mxfp4", "nvfp4", "e4m3fn per row fp32", "e4m3fn per tensor fp32")


def on_card(baseline: Callable[[], object], candidate: Callable[[], object], repeats: int) -> float:
    """The median of baseline / candidate, pair by pair."""
    baseline(), candidate()
    times = max(1, min(200, int(2 / milliseconds(baseline, 3))))
    runs = [baseline, candidate]
    ratios = []
    for _ in range(repeats):
        found = {run: milliseconds(run, times) for run in runs}
        ratios.append(found[baseline] / found[candidate])
        runs.reverse()
    return statistics.median(ratios)


def waited(step: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def rounding(report: Report, repeats: int) -> None:
    for n in (LARGE, CACHED):
        x = torch.randn(n, device="cuda")
        out = torch.empty_like(x)
        copy = partial(out.copy_, x)
        milliseconds(copy, 20)  # the clocks go up
        speed = 8 * n / milliseconds(copy, 20) / 1e6
        report.add("rounding", f"copy of {n:,} float32", speed, "GB/s")
        for fmt in FORMATS:
            for mode in MODES[: 1 if isinstance(fpsim.as_format(fmt), fpsim.Codebook) else 2]:
                goal = (0.9 if mode == MODES[0] else 0.8) if n == LARGE else None
                ratio = on_card(copy, partial(fpsim.round_to, x, fmt, mode, out=out), repeats)
                report.add("rounding", f"{fmt} {mode}, {n:,}", ratio, "x copy", goal)


def containers(report: Report, repeats: int) -> None:
    """Other containers than float32, against a copy of the same bytes."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.randn(LARGE // 2, device="cuda").to(dtype)
        out = torch.empty_like(x)
        for mode in MODES:
            ratio = on_card(partial(out.copy_, x), partial(fpsim.round_to, x, "e4m3fn", mode, out=out), repeats)
            report.add("containers", f"e4m3fn {mode} in {str(dtype)[6:]}", ratio, "x copy")


def blocks(report: Report, repeats: int) -> None:
    """Formats whose numbers share scales; the copy is of a tensor of the same shape."""
    for shape in ((1 << 13, 1 << 14), (1 << 13, (1 << 14) - 2)):
        x = torch.randn(shape, device="cuda")
        out = torch.empty_like(x)
        copy = partial(out.copy_, x)
        for name in BLOCKS:
            for mode in MODES:
                for axis in (1, 0):
                    goal = (0.8 if mode == MODES[0] else 0.6) if shape[1] % 32 == 0 and name in BLOCKS[:3] else None
                    ratio = on_card(copy, partial(fpsim.round_to, x, name, mode, axis=axis, out=out), repeats)
                    report.add("blocks", f"{name} {mode}, {shape[0]} x {shape[1]}, axis {axis}", ratio, "x copy", goal)


def readers(report: Report, repeats: int) -> None:
    """What only reads: its bytes a second over a copy's."""
    x = torch.randn(LARGE, device="cuda")
    out = torch.empty_like(x)
    scale, rounded = torch.zeros(1, dtype=torch.int32, device="cuda"), fpsim.round_to(x, "e4m3fn")
    for name, call, read in (
        ("moments, e.g. of adaptive scaling", partial(moments_of, x), 0.5),
        ("what a rounding lost", partial(lost_between, x, rounded, 448.0, scale), 1.0),
        ("torch's amax, for comparison", x.abs().amax, 0.5),
    ):
        ratio = on_card(partial(out.copy_, x), call, repeats)
        report.add("readers", name, ratio * read, "x copy's bytes a second", 0.8 if "torch" not in name else None)


def peers(report: Report, repeats: int) -> None:
    """The same numbers by torch's casts there and back, by torchao and by qtorch: how often faster."""
    x = torch.randn(LARGE, device="cuda")
    out = torch.empty_like(x)
    for fmt, dtype in (
        ("fp16", torch.float16), ("bf16", torch.bfloat16), ("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)
    ):  # fmt: skip
        ratio = on_card(lambda dtype=dtype: x.to(dtype).float(), partial(fpsim.round_to, x, fmt, out=out), repeats)
        report.add("peers", f"{fmt}, than x.to({dtype}).float()", ratio, "times as fast", 1.0)
    if report.has("qtorch", "peers"):
        from qtorch.quant import float_quantize

        for mode, theirs in zip(MODES, ("nearest", "stochastic"), strict=True):
            ours = partial(fpsim.round_to, x, "e5m2", mode, out=out)
            ratio = on_card(partial(float_quantize, x, 5, 2, theirs), ours, repeats)
            report.add("peers", f"e5m2 {mode}, than qtorch", ratio, "times as fast", 1.0)
    if report.has("torchao", "peers"):
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        small = x[: 1 << 24].view(1 << 12, 1 << 12)
        target = torch.empty_like(small)
        for name, kind in (("mxfp8_e4m3", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):

            def theirs_of(kind: torch.dtype = kind) -> Tensor:
                return MXTensor.to_mx(small, kind, 32).dequantize(torch.float32)

            for how, theirs in (("torchao", theirs_of), ("torchao compiled", torch.compile(theirs_of))):
                ratio = on_card(theirs, partial(fpsim.round_to, small, name, out=target), repeats)
                report.add("peers", f"{name} of 2^24, than {how}", ratio, "times as fast", 1.0)


def launches(report: Report, repeats: int) -> None:
    """What a call costs Python: 1,000 calls for 16 elements, none of which waits, against torch.relu."""
    x, square = torch.randn(16, device="cuda"), torch.randn(4, 32, device="cuda")
    for name, call in (
        ("e4m3fn nearest_even", partial(fpsim.round_to, x, "e4m3fn")),
        ("e4m3fn stochastic", partial(fpsim.round_to, x, "e4m3fn", "stochastic")),
        ("mxfp8_e4m3", partial(fpsim.round_to, square, "mxfp8_e4m3")),
        ("nvfp4", partial(fpsim.round_to, square, "nvfp4")),
    ):

        def many(call: Callable[[], object]) -> None:
            for _ in range(1000):
                call()
            torch.cuda.synchronize()

        _, seconds, ratio = paired(partial(many, partial(torch.relu, x)), partial(many, call), repeats)
        report.add("launches", f"round_to of {name}", seconds * 1e3, "us")
        report.add("launches", f"round_to of {name} / torch.relu", 1 / ratio, "times")


STEPS = (
    "format bf16", "format fp16", "format e4m3fn", "recipe:fp8_current", "recipe:fp8_delayed", "recipe:mxfp8",
    "recipe:nvfp4", "static", "adaptive 1 0", "adaptive 100 0",
)  # fmt: skip


def steps(report: Report, repeats: int) -> None:
    """Whole training steps over float32's."""
    for which in ("gpt2-small", "resnet20"):
        plain = waited(make_step(which, "float32", "cuda"))
        for form in STEPS:
            ours = waited(make_step(which, form, "cuda"))
            for _ in range(2):
                plain(), ours()
            seconds, _, ratio = paired(plain, ours, repeats)
            report.add("steps", f"{which} {form} / float32", 1 / ratio, "times")
            del ours
            torch.cuda.empty_cache()
        report.add("steps", f"{which} float32", seconds * 1e3, "ms")


def compiled(report: Report, repeats: int) -> None:
    """The forward and backward of a compiled GPT-2, one program each, over the compiled float32 model's."""
    from report import make_model

    def make(fmt: str | None) -> Callable[[], None]:
        model, loss = make_model("gpt2-small", "cuda")
        run = torch.compile(model if fmt is None else fpsim.quantize(model, fmt))

        def step() -> None:
            run.zero_grad()
            loss(run).backward()

        return waited(step)

    plain = make(None)
    for fmt in ("fp16", "e4m3fn", "recipe:mxfp8"):
        ours = make(fmt)
        for _ in range(2):
            plain(), ours()
        seconds, _, ratio = paired(plain, ours, repeats)
        report.add("compiled", f"gpt2-small {fmt} / compiled float32", 1 / ratio, "times")
    report.add("compiled", "gpt2-small float32", seconds * 1e3, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    sections = {f.__name__: f for f in (rounding, containers, blocks, readers, peers, launches, steps, compiled)}
    parser.add_argument("--only", nargs="+", choices=sections, help="sections")
    parser.add_argument("--out", type=Path, help="where to save the JSON report (default: results/<card>.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("No CUDA device is here. On a CPU: python benchmarks/report.py")
    report = Report()
    target = options.out or RESULTS / f"{machine()['gpu']}.json".replace(" ", "-").lower()
    try:
        for name, section in sections.items():
            if options.only is None or name in options.only:
                section(report, 5 if options.quick else 21)
    finally:  # what was measured stays, whatever happened
        save(report, target)


if __name__ == "__main__":
    main()
