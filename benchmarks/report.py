"""Measure fpsim against a plain copy and its peers, all in one run: `python benchmarks/report.py [--quick]`.

Every figure is a ratio of paired runs (A, B, B, A, A, B, ...), of which the median is printed; the report is also saved
as JSON under benchmarks/results/, with the machine it was measured on. A goal is met, or printed as missed.

With `--base REV` this checkout is measured against another revision instead, by processor time (against_base.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# torch's OpenMP threads otherwise spin for a while after each of its operations, on the cores that ours need next:
# on two cores that halves what two threads round, and leaves torch's own figures as they are.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from against_base import ROWS, WORSE, NotMeasuredError, Ratio, archived, compare
from torch import Tensor, nn

import ada_loss
import fpsim

RESULTS = Path(__file__).parent / "results"
PAIRS = {"resnet20": 6, "gpt2": 3}  # for each repeat: the pairs differ by some 5 % from one another


def paired(baseline: Callable[[], object], candidate: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of the baseline and the candidate, and the median of baseline / candidate pair by pair."""
    baseline(), candidate()
    first: list[float] = []
    second: list[float] = []
    runs = [(baseline, first), (candidate, second)]
    for _ in range(repeats):
        for run, seconds in runs:
            t0 = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - t0)
        runs.reverse()
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    return statistics.median(first), statistics.median(second), ratio


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def has(self, package: str, section: str) -> bool:
        """Whether a package to compare with is installed; where it is not, the report says so."""
        if importlib.util.find_spec(package) is not None:
            return True
        self.notes.append(f"{section}: {package} is not installed, and nothing here is compared with it.")
        print(self.notes[-1], flush=True)
        return False

    def add(
        self, section: str, name: str, value: float, unit: str, goal: float | None = None, at_least: bool = True
    ) -> None:
        met = None if goal is None else (value >= goal if at_least else value <= goal)
        self.rows.append(
            {"section": section, "name": name, "value": round(value, 4), "unit": unit, "goal": goal, "met": met}
        )
        sign = ">=" if at_least else "<="
        verdict = "" if goal is None else f"   goal {sign} {goal:g}: {'met' if met else 'MISSED'}"
        print(f"{section:10} {name:58} {value:9.3f} {unit}{verdict}", flush=True)

    def add_ratio(self, section: str, name: str, ratio: Ratio) -> None:
        """A row whose goal is met where its interval does not lie wholly above the goal."""
        low, high = round(ratio.low, 4), round(ratio.high, 4)
        row = {"value": round(ratio.value, 4), "low": low, "high": high, "unit": "of the base", "goal": WORSE}
        self.rows.append({"section": section, "name": name, **row, "met": not ratio.is_worse})
        interval = f"{ratio.value:6.3f} of the base, {low:.3f} to {high:.3f}"
        print(f"{section:10} {name:44} {interval}   {ratio.verdict}", flush=True)


def machine() -> dict[str, Any]:
    model = next(
        (s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), ""
    )
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
    }


def save(report: Report, target: Path) -> None:
    """Write the rows with the machine and the command, whole or not at all, and say how many goals were missed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    temporary.write_text(
        json.dumps({"machine": machine(), "command": command, "notes": report.notes, "rows": report.rows}, indent=1)
        + "\n"
    )
    os.replace(temporary, target)
    missed = [row for row in report.rows if row["met"] is False]
    print(f"\n{len(missed)} of {sum(row['goal'] is not None for row in report.rows)} goals missed. Saved {target}.")


# Rounding


def rounding(report: Report, repeats: int) -> None:
    """Ours against torch.Tensor.copy_ on the same tensors, one thread and all."""
    cores = os.cpu_count() or 1
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for log2_size in (22, 24):
            x = torch.randn(2**log2_size)
            out = torch.empty_like(x)
            where = f"2^{log2_size}, {threads} thread{'s' * (threads > 1)}"
            for mode, goal in (("nearest_even", 0.8), ("stochastic", 0.4)):
                for fmt in fpsim.CATALOGUE:
                    copy = partial(out.copy_, x)
                    _, _, ratio = paired(copy, partial(fpsim.round_to, x, fmt, mode, out=out), repeats)
                    report.add("rounding", f"{fmt} {mode}, {where}", ratio, "x copy", goal)
    codebooks(report, repeats)
    torch.set_num_threads(cores)


def codebooks(report: Report, repeats: int) -> None:
    """Code books on one thread: beside a copy, and beside torch.bucketize, which looks for the codes alone."""
    torch.set_num_threads(1)
    x = torch.randn(2**22).clamp(-1, 1)
    out, codes = torch.empty_like(x), torch.empty(2**22, dtype=torch.int64)
    for name in ("nf4", "dynamic8", "hif8"):
        borders = torch.tensor(fpsim.as_format(name).midpoints).float()
        bucketize = partial(torch.bucketize, x, borders, out=codes)
        for mode in ("nearest_even", "stochastic"):
            ours = partial(fpsim.round_to, x, name, mode, out=out)
            for base, unit in ((partial(out.copy_, x), "x copy"), (bucketize, "x torch.bucketize")):
                _, _, ratio = paired(base, ours, repeats)
                report.add("rounding", f"{name} {mode}, 2^22, 1 thread", ratio, unit)


def peers(report: Report, repeats: int) -> None:
    """Ours against what people use today, 2^22 float32, one thread."""
    torch.set_num_threads(1)
    x = torch.randn(2**22)
    out = torch.empty_like(x)
    for name, cast in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("e4m3fn", torch.float8_e4m3fn)):
        _, _, ratio = paired(lambda c=cast: x.to(c).float(), lambda n=name: fpsim.round_to(x, n, out=out), repeats)
        report.add("peers", f"torch .to({name}).float()", ratio, "times slower than ours")
    import ml_dtypes

    array = x.numpy()
    for name, dtype in (("e4m3fn", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        _, _, ratio = paired(
            lambda d=dtype: array.astype(d).astype(np.float32), lambda n=name: fpsim.round_to(x, n, out=out), 5
        )
        report.add("peers", f"ml_dtypes {name}", ratio, "times slower than ours")
    import gfloat
    from gfloat.formats import format_info_binary16

    small = x[: 2**16].numpy().astype(np.float64)
    y = torch.from_numpy(small)
    _, _, ratio = paired(
        lambda: gfloat.round_ndarray(format_info_binary16, small), lambda: fpsim.round_to(y, "fp16"), 5
    )
    report.add("peers", "gfloat.round_ndarray fp16, 2^16 float64", ratio, "times slower than ours")
    if report.has("qtorch", "peers"):
        qtorch_casts(report, x, out)
    torch.set_num_threads(os.cpu_count() or 1)


def qtorch_casts(report: Report, x: Tensor, out: Tensor) -> None:
    """Time qtorch's rounding, to nearest and stochastic."""
    from qtorch.quant import float_quantize

    for mode, theirs, goal in (("nearest_even", "nearest", 25), ("stochastic", "stochastic", 40)):
        for name, e, m in (("fp16", 5, 10), ("bf16", 8, 7), ("e5m2", 5, 2)):
            _, _, ratio = paired(
                lambda e=e, m=m, r=theirs: float_quantize(x, e, m, r),
                lambda n=name, r=mode: fpsim.round_to(x, n, r, out=out),
                3,
            )
            report.add("peers", f"qtorch float_quantize {name} {mode}", ratio, "times slower than ours", goal)


def blocks(report: Report, repeats: int) -> None:
    """Formats whose blocks share a scale, 2^24 float32, one thread, against a copy and against gfloat's blocks."""
    torch.set_num_threads(1)
    x = torch.randn(4096, 4096)
    out = torch.empty_like(x)
    for name, goal in (("mxfp8_e4m3", 0.5), ("mxfp4", None), ("nvfp4", 0.35), ("e4m3fn per row fp32", None)):
        for mode in ("nearest_even", "stochastic"):
            for axis in (1, 0):
                ours = partial(fpsim.round_to, x, name, mode, out=out, axis=axis)
                _, _, ratio = paired(partial(out.copy_, x), ours, repeats)
                title = f"{name} {mode}, blocks along axis {axis} of 4096 x 4096"
                report.add("blocks", title, ratio, "x copy", goal if mode == "nearest_even" else None)
    for name, choice in (("mxfp4", "e2m1fn per 32 mse(floor,ceil)"), ("nvfp4", "nvfp4_4over6")):
        for mode in ("nearest_even", "stochastic"):
            for axis in (1, 0):
                one, best = (partial(fpsim.round_to, x, n, mode, out=out, axis=axis) for n in (name, choice))
                _, _, ratio = paired(one, best, repeats)
                title = f"{choice} {mode}, blocks along axis {axis} of 4096 x 4096"
                report.add(
                    "blocks", title, ratio, "x the format without a choice", 0.4 if mode == "nearest_even" else None
                )
    from gfloat.block import compute_scale_amax, quantize_block
    from gfloat.formats import format_info_mxfp8_e4m3 as info

    rows = x[:8, :32].numpy().astype(np.float64)
    part, result = x[:1024, :1024].contiguous(), torch.empty(1024, 1024)
    theirs = lambda: [quantize_block(info, row, compute_scale_amax) for row in rows]  # noqa: E731
    _, _, ratio = paired(theirs, partial(fpsim.round_to, part, "mxfp8_e4m3", out=result), 5)
    ratio *= part.numel() / rows.size
    report.add("blocks", "gfloat.quantize_block mxfp8_e4m3, for each number", ratio, "times slower than ours", 50)
    if report.has("torchao", "blocks"):
        torchao_casts(report, part, result)
    torch.set_num_threads(os.cpu_count() or 1)


def torchao_casts(report: Report, x: Tensor, out: Tensor) -> None:
    """torchao's casts to MX and NVFP4, which give codes and scales; ours gives the numbers that they stand for."""
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    elements = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": DTYPE_FP6_E2M3,
        "mxfp6_e3m2": DTYPE_FP6_E3M2,
        "mxfp4": torch.float4_e2m1fn_x2,
    }
    casts: dict[str, Callable[[], object]] = {name: partial(to_mx, x, e, 32) for name, e in elements.items()}
    casts["nvfp4"] = lambda: nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    for name, theirs in casts.items():
        _, _, ratio = paired(theirs, partial(fpsim.round_to, x, name, out=out), 5)
        report.add("blocks", f"torchao {name}, 1024 x 1024", ratio, "times slower than ours", 10)


def numpy_running_sum(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A product in a float16 accumulator as one writes it in NumPy: rounded after each step."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float16)
    for k in range(a.shape[1]):
        total = (total.astype(np.float32) + a[:, k : k + 1] * b[k]).astype(np.float16)
    return total


def accumulators(report: Report, repeats: int) -> None:
    """Products of matrices in an accumulator, one thread; and a NumPy loop that rounds after each step."""
    torch.set_num_threads(1)
    m, k, n = 128, 512, 512
    a, b = torch.randn(m, k), torch.randn(k, n)
    billions = m * k * n / 1e9
    stochastic = fpsim.Accumulator("fp16", "stochastic")
    for accumulator, goal in (
        ("fp16", 0.5),
        ("bf16", None),
        ("cb16_chunk64", None),
        ("hopper_fp8", None),
        (fpsim.Accumulator("fp16", product="fp16"), None),
        (stochastic, None),
    ):
        is_fp8 = accumulator == "hopper_fp8"  # its operands are FP8 numbers, the others take any
        operands = [fpsim.round_to(x, "e4m3fn") if is_fp8 else x for x in (a, b)]
        ours = partial(fpsim.matmul, *operands, accumulator)
        theirs = partial(numpy_running_sum, a.numpy(), b.numpy())
        _, seconds, ratio = paired(theirs, ours, repeats)
        report.add("accumulators", f"{accumulator}, {m} x {k} x {n}", billions / seconds, "G terms/s", goal)
        report.add("accumulators", f"{accumulator} against NumPy's float16 loop", ratio, "times faster")
    torch.set_num_threads(os.cpu_count() or 1)


def small(report: Report) -> None:
    """A 16-element tensor: what a call costs."""
    x, leaf = torch.randn(16), torch.randn(16, requires_grad=True)
    for name, call, goal in (
        ("16 elements, no gradient", lambda: fpsim.round_to(x, "fp16"), 6),
        ("16 elements, with gradient", lambda: fpsim.round_to(leaf, "fp16"), 12),
        ("16 elements, stochastic", lambda: fpsim.round_to(x, "fp16", "stochastic"), None),
    ):
        call()
        times = []
        for _ in range(20):
            t0 = time.perf_counter()
            for _ in range(500):
                call()
            times.append((time.perf_counter() - t0) / 500)
        report.add("small", name, statistics.median(times) * 1e6, "us", goal, at_least=False)


# Training


class BasicBlock(nn.Module):
    """The residual block of He et al. 2016 for CIFAR, option B shortcuts."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def launches(report: Report, repeats: int) -> None:
    """What Python takes to round on a card, against all of `torch.relu` on 16 elements of the CPU.

    Everything is done but the driver's cuLaunchKernel, in whose place a function gives success at once. The tensors are
    the CPU's, whose addresses take as long; for them, functions stand in for torch's current device and stream.
    """
    import fpsim.tensors.launch as launch_file
    from fpsim.compiling.card import CudaKernel

    def bind(kernel: CudaKernel, device: int, stream: int = 0) -> None:
        kernel.bind(device, lambda *arguments: (0,), 0)

    def launch(src: Tensor, dst: Tensor, kernel: Any, key: Tensor | None, log2_scale: Tensor | None = None) -> None:
        launch_file.launch_on_card(src, dst, src.numel(), kernel, key, log2_scale)

    own = CudaKernel.load, launch_file.launch, launch_file.current_stream_handle, torch.cuda.current_device
    x = torch.randn(16)
    relu = partial(_many, partial(torch.relu, x))
    try:
        CudaKernel.load, launch_file.launch = bind, launch  # type: ignore[method-assign]
        launch_file.current_stream_handle, torch.cuda.current_device = (lambda device: 0), (lambda: -1)
        for mode in ("nearest_even", "stochastic"):
            _, ours, ratio = paired(relu, partial(_many, partial(fpsim.round_to, x, "e4m3fn", mode)), 5 * repeats)
            report.add("launches", f"round_to on a card, {mode}, / torch.relu", 1 / ratio, "times", 5, at_least=False)
            report.add("launches", f"round_to on a card, {mode}", ours * 1e6 / MANY, "us", 27.6, at_least=False)
    finally:
        CudaKernel.load, launch_file.launch = own[:2]  # type: ignore[method-assign]
        launch_file.current_stream_handle, torch.cuda.current_device = own[2:]


def instructions(report: Report) -> None:
    """Machine instructions of the rounding kernels for each element, disassembled for an H100 (sm_90)."""
    from sass import disassembled, disassembler, instructions_per_element

    from fpsim.kernels.round import cuda_loop
    from fpsim.tensors.spec import any_spec

    if disassembler() is None:
        print("instructions   not counted: pip install nvidia-cuda-nvdisasm nvidia-nvjitlink")
        return
    for width in (32, 64):
        for shape, name in ((0, "flat"), (1, "grid"), (2, "gap"), (4, "grid without -0")):
            for rule, mode, goal in ((0, "nearest_even", 45.0), (6, "stochastic", 80.0)):
                count = instructions_per_element(disassembled(cuda_loop(rule, shape, width), (9, 0)), width // 8)
                goals = {"goal": goal, "at_least": False} if width == 32 else {}
                report.add("instructions", f"{name} {mode}, float{width}", count, "an element", **goals)
    for name in ("mxfp8_e4m3", "mxfp4", "nvfp4"):
        for mode in ("nearest_even", "stochastic"):
            for shape, axis in (((4096, 4096), 1), ((4096, 4094), 1), ((4096, 4096), 0)):
                count = _of_blocks(any_spec(name, mode), torch.Size(shape), axis)
                goals = {"goal": 80.0 if mode == "nearest_even" else 150.0, "at_least": False}
                goals = goals if shape[axis] % 32 == 0 and axis else {}
                report.add("instructions", f"{name} {mode} of {shape}, axis {axis}", count, "an element", **goals)


def _of_blocks(spec: Any, shape: torch.Size, axis: int) -> float:
    """Instructions for each element of a tensor of this shape; where a thread has more than eight, each costs the same.

    The scale's reduction is a loop through which the path with the fewest does not go.
    """
    from sass import disassembled, instructions_per_element

    from fpsim.tensors.cuts import block_axes
    from fpsim.tensors.shared_scales import block_plan, launch_of

    axes = block_axes(shape, spec.fmt.tile, axis, None)
    work = launch_of(block_plan(spec), axes, spec.fmt)
    sass, each = disassembled(work.kernel, (9, 0)), -(-shape.numel() // (work.grid * work.kernel.threads))
    if work.is_dense:
        return instructions_per_element(sass, 4, each, 1)
    totals = {n: n * instructions_per_element(sass, 4, n, 2) for n in {min(each, 4), min(each, 8)}}
    return (totals[each] if each in totals else totals[4] + (totals[8] - totals[4]) / 4 * (each - 4)) / each


MANY = 50  # in less than the time that a process is left alone on a busy machine


def _many(function: Callable[[], object]) -> None:
    for _ in range(MANY):
        function()


def resnet20() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(BasicBlock(width, outputs, 2 if block == 0 and outputs != 16 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def make_model(which: str, device: str = "cpu") -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A model and its loss on one batch.

    which: "resnet20", "gpt2", "gpt2-1024", with 1,024 words, or "gpt2-small", as large as OpenAI's smallest.
    """
    torch.manual_seed(0)
    if which == "resnet20":
        model: nn.Module = resnet20()
        x, y = torch.randn(64, 3, 32, 32).to(device), torch.randint(0, 10, (64,)).to(device)

        def loss(m: nn.Module) -> Tensor:
            return nn.functional.cross_entropy(m(x), y)

    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        words = 1024 if which == "gpt2-1024" else 50257
        ends = {"bos_token_id": 1, "eos_token_id": 1} if which == "gpt2-1024" else {}
        sizes = {} if which == "gpt2-small" else {"n_layer": 4, "n_embd": 128, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=words, **sizes, **ends))
        x = torch.randint(0, words, (8, 1024) if which == "gpt2-small" else (16, 128)).to(device)

        def loss(m: nn.Module) -> Tensor:
            return m(input_ids=x, labels=x).loss  # type: ignore[no-any-return]

    return model.to(device), loss


def with_torchaos_products(model: nn.Module) -> None:
    """Let the layers of a GPT-2 but the head compute their three products by torchao's emulation of MXFP8."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    from transformers.pytorch_utils import Conv1D

    e4m3, rest = torch.float8_e4m3fn, (MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
    words = (e4m3, e4m3, e4m3, 32, KernelPreference.EMULATED, *rest, ScaleCalculationMode.RCEIL, False)

    def forward(layer: Conv1D, x: Tensor) -> Tensor:
        return mx_mm.apply(x, layer.weight.t().contiguous(), *words) + layer.bias  # type: ignore[no-any-return]

    for module in model.modules():
        if isinstance(module, Conv1D):
            module.forward = partial(forward, module)


def make_step(which: str, form: str, device: str = "cpu") -> Callable[[], object]:
    """A whole training step of a model, as `make_model` has it.

    form: "float32"; "fpsim", all roles fp16, or "fpsim bf16"; "format NAME"; "recipe:NAME", a recipe of fpsim;
        "torchao", its MXFP8 in the layers but the head; "qtorch", its Quantizer at the same sites; "watched" and
        "unwatched", float32 with fpsim.watch in each step and in none; "static", fpsim with a loss scale; "adaptive
        N M", fpsim with a scale for each layer, computed every N steps and recorded every M (0: never).
    """
    model, loss = make_model(which, device)
    if form.startswith(("recipe:", "format ")):
        fpsim.quantize(model, form.removeprefix("format "), inplace=True)
    elif form == "torchao":
        with_torchaos_products(model)
    elif form not in ("float32", "qtorch", "watched", "unwatched"):
        fpsim.quantize(model, "bf16" if form == "fpsim bf16" else "fp16", inplace=True)
    scaler: Any = None
    if form.startswith("adaptive"):
        _, update_every, record_every = form.split()
        handle = ada_loss.AdaLossScaled(model, update_every=int(update_every))
        if int(record_every):
            handle.observer = ada_loss.Recorder(int(record_every))
        scaler = ada_loss.GradScaler(1.0)
    elif form == "static":
        scaler = ada_loss.GradScaler(1024.0)
    elif form == "qtorch":
        from qtorch import FloatingPoint
        from qtorch.quant import Quantizer

        half = FloatingPoint(5, 10)
        for module in [m for m in model.modules() if not list(m.children())]:
            quantizer = Quantizer(half, half, "nearest", "nearest")
            module.register_forward_hook(lambda m, i, out, q=quantizer: q(out) if torch.is_tensor(out) else out)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if form in ("watched", "unwatched"):
        fpsim.watch(model, every=1 if form == "watched" else 1 << 40, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    def scaled_step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step if scaler is None else scaled_step


def recipes(report: Report, repeats: int) -> None:
    """Whole training steps of a small GPT-2 under recipes, over float32's."""
    for name, goal in (("fp8_current", 1.3), ("mxfp8", 1.5), ("nvfp4", 2.0), ("fp8_delayed", None), ("fp8_tile", None)):
        plain, under = make_step("gpt2", "float32"), make_step("gpt2", f"recipe:{name}")
        plain(), under()
        _, _, ratio = paired(plain, under, repeats)
        report.add("recipes", f"gpt2 recipe {name} / float32 step", 1 / ratio, "times", goal, at_least=False)
    if report.has("torchao", "recipes"):
        plain, theirs = make_step("gpt2", "float32"), make_step("gpt2", "torchao")
        _, _, ratio = paired(plain, theirs, repeats)
        report.add("recipes", "gpt2 torchao's emulated MXFP8 / float32 step", 1 / ratio, "times")


def watching(report: Report, repeats: int) -> None:
    """A training step with fpsim.watch over one without; at its default one step in `every` is watched."""
    every = inspect.signature(fpsim.watch).parameters["every"].default
    for which in PAIRS:
        ratios = []
        for form in ("watched", "unwatched"):
            plain, other = make_step(which, "float32"), make_step(which, form)
            plain(), other()
            ratios.append(1 / paired(plain, other, repeats)[2])
        watched, unwatched = ratios
        report.add("watching", f"{which} a watched step / one without", watched, "times", None, at_least=False)
        average = unwatched + (watched - unwatched) / every
        report.add("watching", f"{which} watching each {every}th step / none", average, "times", 1.03, at_least=False)


def scaling(report: Report, repeats: int) -> None:
    """Adaptive scaling over static scaling, whole training steps; our scaler over torch's, its own steps alone."""
    for which, times in PAIRS.items():
        pairs = times * repeats
        for name, form, goal in (
            ("a factor at every step", "adaptive 1 0", 1.15),
            ("a factor at each 1000th step", "adaptive 1000 0", 1.02),
            ("the same, recorded at each 100th", "adaptive 1000 100", None),
        ):
            static, adaptive = make_step(which, "static"), make_step(which, form)
            for _ in range(2):
                static(), adaptive()
            _, _, ratio = paired(static, adaptive, pairs)
            title = f"{which} {name} / static loss scale"
            report.add("scaling", title, 1 / ratio, "times", goal, at_least=False)
        theirs, ours = (scaler_alone(which, form) for form in ("theirs", "ours"))
        _, _, ratio = paired(theirs, ours, 300)
        report.add("scaling", f"{which} our scaler's step / torch's", 1 / ratio, "times", 1.05, at_least=False)
        # a sampled step costs more; one in a hundred is sampled
        plain, recorded = make_step(which, "adaptive 1000 0"), make_step(which, "adaptive 1000 1")
        for _ in range(2):
            plain(), recorded()
        _, _, ratio = paired(plain, recorded, max(pairs // 4, 3))
        average = 0.99 + 0.01 / ratio
        report.add("scaling", f"{which} recorder at each 100th step / none", average, "times", 1.01, at_least=False)


def scaler_alone(which: str, whose: str) -> Callable[[], object]:
    """Unscale, check, step and update for a model's parameters, with no model around it."""
    parameters = [nn.Parameter(torch.randn_like(p)) for p in make_model(which)[0].parameters()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    scaler: Any = (
        torch.amp.GradScaler("cpu", init_scale=1.0)
        if whose == "theirs"
        else ada_loss.GradScaler("torch", init_scale=1.0)
    )
    loss = torch.ones(())

    def step() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    return step


def training(report: Report, repeats: int) -> None:
    for which, times in PAIRS.items():
        plain, ours = make_step(which, "float32"), make_step(which, "fpsim")
        for _ in range(2):
            plain(), ours()
        seconds, _, ratio = paired(plain, ours, times * repeats)
        report.add("training", f"{which} float32 step", seconds * 1e3, "ms")
        report.add("training", f"{which} all roles fp16 / float32 step", 1 / ratio, "times", 1.3, at_least=False)
    if report.has("qtorch", "training"):
        theirs, plain = make_step("resnet20", "qtorch"), make_step("resnet20", "float32")
        _, _, ratio = paired(plain, theirs, repeats)
        report.add("training", "resnet20 with qtorch's Quantizer / float32 step", 1 / ratio, "times")


def compiled(report: Report, repeats: int) -> None:
    """GPT-2 under torch.compile, whose forward and backward are one program each, beside the compiled float32 model."""
    from torch._inductor.utils import fresh_cache
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1024, bos_token_id=1, eos_token_id=1)
    x = torch.randint(0, 1024, (8, 128))

    def make(fmt: str | None) -> Callable[[], object]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        run = torch.compile(model if fmt is None else fpsim.quantize(model, fmt), fullgraph=True)

        def step() -> None:
            run.zero_grad()
            logits = run(input_ids=x, use_cache=False).logits
            nn.functional.cross_entropy(logits.view(-1, 1024), x.flatten()).backward()

        return step

    def first_call(step: Callable[[], object]) -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    first_call(lambda: torch.compile(torch.sin)(x[0].float()))  # the compiler's imports
    with fresh_cache():  # nothing is found on disk
        plain = make(None)
        baseline = first_call(plain)
        report.add("compile", "gpt2 float32, first step", baseline, "s")
        for fmt in ("bf16", "fp16"):
            ours = make(fmt)
            seconds = first_call(ours)
            report.add(
                "compile", f"gpt2 all roles {fmt}, first step / float32", seconds / baseline, "times", 2.0, False
            )
            _, _, ratio = paired(plain, ours, repeats)
            report.add(
                "compile", f"gpt2 all roles {fmt} step / compiled float32", 1 / ratio, "times", 1.25, at_least=False
            )


MEMORY_FORMATS = ("bf16", "e4m3fn", "mxfp8_e4m3", "nvfp4")
MEMORY = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from report import make_step
import torch
torch.set_num_threads(1)
step = make_step({which!r}, {form!r})


def kilobytes(what):  # not getrusage: a child's ru_maxrss starts at its parent's
    return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if what in line))


base = kilobytes("VmRSS")
for _ in range(3):
    step()
print(kilobytes("VmHWM") - base)
"""


def python(code: str, **environment: str) -> str:
    command, variables = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout.strip()


def memory(report: Report, repeats: int) -> None:
    """Peak resident memory of three training steps over what the process had before them, one form over another.

    Tensors get memory of their own from the system, so that the peak is that of what is in use: otherwise small ones
    that live long keep holes open in the heap, which moves the peak by some 5 %, up or down, from run to run.
    """
    folder = str(Path(__file__).parent)

    def peak(which: str, form: str) -> int:
        code = MEMORY.format(folder=folder, which=which, form=form)
        return int(python(code, MALLOC_MMAP_THRESHOLD_="131072").splitlines()[-1])

    for which in ("resnet20", "gpt2"):
        for title, form, base, goal in (
            ("all roles fp16 / float32", "fpsim", "float32", 1.15),
            *((f"{name} / float32", f"format {name}", "float32", 1.15) for name in MEMORY_FORMATS),
            ("adaptive / static scaling", "adaptive 1 0", "static", 1.02),
        ):
            ratio = statistics.median(peak(which, form) / peak(which, base) for _ in range(repeats))
            report.add("memory", f"{which} peak, {title}", ratio, "times", goal, at_least=False)


STARTUP = """
import time
import torch
t1 = time.perf_counter()
import fpsim
fpsim.round_to(torch.ones(4), "fp16")
print(time.perf_counter() - t1)
"""


def startup(report: Report, repeats: int) -> None:
    """From `import torch` done to the first rounding done, in a fresh process with its loops on disk."""
    python(STARTUP)
    seconds = statistics.median(float(python(STARTUP)) for _ in range(repeats))
    report.add("startup", "import fpsim and first rounding, after import torch", seconds, "s", 0.3, at_least=False)


def against_base(report: Report, revision: str, only: list[str] | None, is_quick: bool) -> None:
    """This checkout over another revision of it, row by row."""
    root = Path(__file__).resolve().parents[1]
    git = partial(subprocess.run, cwd=root, check=True, capture_output=True, text=True)
    state = git(["git", "describe", "--always", "--dirty"]).stdout.strip()
    names = [name for name, (section, _) in ROWS.items() if only is None or section in only]
    if not names:
        raise SystemExit(
            f"No section of {only} is compared with a base. Known: {sorted({s for s, _ in ROWS.values()})}"
        )
    rounds, pairs = (5, 100) if is_quick else (15, 200)
    with archived(revision, root) as base:
        identity = git(["git", "rev-parse", "--short", revision]).stdout.strip()
        report.notes.append(
            f"{state} against {identity}, by processor time: the mean log ratio of {rounds} rounds, each the median of "
            f"up to {pairs} pairs in two fresh processes, with Student's 95 % interval over the rounds."
        )
        print(report.notes[-1], flush=True)
        for name, ratio in compare(base, root, names, rounds, pairs):
            if isinstance(ratio, NotMeasuredError):
                report.notes.append(f"{name}: not measured. {ratio}")
                print(report.notes[-1], flush=True)
            else:
                report.add_ratio(ROWS[name][0], name, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument(
        "--only",
        nargs="+",
        help="sections: startup small launches instructions rounding peers blocks recipes accumulators training "
        "watching scaling compile memory",
    )
    parser.add_argument("--base", metavar="REV", help="measure this checkout against a revision of it instead")
    parser.add_argument(
        "--out",
        type=Path,
        help="where to save the JSON report (default: results/<machine>.json, with --base <machine>-against-base.json)",
    )
    options = parser.parse_args()
    repeats = 5 if options.quick else 21
    report = Report()
    about = machine()
    name = f"{about['gpu'] or about['cpu']}{'-against-base' if options.base else ''}.json"
    target = options.out or RESULTS / name.replace(" ", "-").lower()
    if options.base:
        against_base(report, options.base, options.only, options.quick)
        return save(report, target)
    sections: dict[str, Callable[[], None]] = {
        "startup": lambda: startup(report, 3 if options.quick else 9),
        "small": lambda: small(report),
        "launches": lambda: launches(report, repeats),
        "instructions": lambda: instructions(report),
        "rounding": lambda: rounding(report, repeats),
        "peers": lambda: peers(report, repeats),
        "blocks": lambda: blocks(report, 5 if options.quick else 21),
        "recipes": lambda: recipes(report, 3 if options.quick else 9),
        "accumulators": lambda: accumulators(report, 5 if options.quick else 21),
        "training": lambda: training(report, 5 if options.quick else 15),
        "watching": lambda: watching(report, 3 if options.quick else 15),
        "scaling": lambda: scaling(report, 5 if options.quick else 21),
        "compile": lambda: compiled(report, 5 if options.quick else 21),
        "memory": lambda: memory(report, 1 if options.quick else 3),
    }
    try:
        for name, section in sections.items():
            if options.only is None or name in options.only:
                section()
    except BaseException:
        save(report, target.with_suffix(".partial.json"))  # never over a whole report
        raise
    save(report, target)


if __name__ == "__main__":
    main()
