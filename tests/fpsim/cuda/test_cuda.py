"""CUDA: in the simulator and as PTX anywhere, on a card where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from format_cases import ALL, fits, same

import fpsim
from ada_loss import AdaLossScaled, Recorder
from ada_loss.rules import LAYER_RULES
from fpsim import Accumulator, FloatFormat, as_accumulator, matmul, round_to
from fpsim.compiling.compile import cuda_module
from fpsim.kernels.core import ROUNDINGS
from fpsim.kernels.round import cuda_loop
from fpsim.policies.delayed import Histories
from fpsim.tensors import tally
from fpsim.tensors.launch import rounded
from fpsim.tensors.moments import binades, moments_of
from fpsim.tensors.spec import rounding_spec

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run_alone(files: str, *options: str, **environment: str) -> None:
    """pytest on files in a process of its own: the simulator is chosen when Numba is imported.

    An -m is given, so that their own cases are not in tiers: what calls this is.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu"]
    command += [str(HERE / file) for file in files.split()]
    done = subprocess.run(
        [*command, *options], env={**os.environ, **environment}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


SIMULATED = (  # of the kernels, those that compile fast
    "masks_pass_as_on_the_cpu[e4m3fn-stochastic-dtype3]",
    "what_blocks_share_is_found_as_on_the_cpu",
    "binades_are_counted_as_on_the_cpu[torch.float32-ends]",
    "losses_are_counted_as_on_the_cpu[6-torch.float32]",
    "factors_are_chosen_as_on_the_cpu",
    "scales_are_chosen_as_on_the_cpu",
)


def test_some_kernels_in_the_simulator() -> None:
    run_alone("simulator.py", "-k", " or ".join(SIMULATED), NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.full
def test_the_kernels_in_the_simulator() -> None:
    run_alone("simulator.py", NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="NVVM is not installed: pip install nvidia-nvvm")
def test_the_kernels_as_ptx() -> None:
    run_alone("ptx.py")


def test_a_cuda_tensor_without_numba_cuda_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda_module.cache_clear()
    monkeypatch.setitem(sys.modules, "numba_cuda", None)  # what Python leaves for a package that is not there
    with pytest.raises(RuntimeError, match=r"numba-cuda is not installed.*pip install .*\[cuda12\]'.*\.cpu\(\)"):
        cuda_loop.__wrapped__(0, 0, 32).ptx((9, 0))


def test_a_numpy_with_which_numba_cuda_compiles_nothing_is_an_error_that_says_which_one_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba_cuda", "0.30").__version__.startswith("0.30.") or pytest.skip("a later numba-cuda")
    monkeypatch.delattr(np, "row_stack", raising=False)
    with pytest.raises(RuntimeError, match=r"with NumPy .* no np\.row_stack: pip install 'numpy<2\.5'.*\.cpu\(\)"):
        cuda_module.__wrapped__()


# On a card

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CASES = [(f, dtype) for f in ALL for dtype in DTYPES if fits(f, dtype)]


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("f", "dtype"), CASES, ids=str)
def test_the_card_gives_the_bits_of_the_cpu(f: FloatFormat, rounding: str, dtype: torch.dtype) -> None:
    n = 100_003
    x = torch.randn(n, dtype=torch.float64) * f.smallest * torch.exp2(torch.randint(-8, 60, (n,)))
    x[: n // 2] = torch.randn(n // 2, dtype=torch.float64) * f.largest
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149, f.largest, -f.smallest / 2])
    x = x.to(dtype)
    fpsim.manual_seed(3)
    expected = round_to(x, f, rounding)
    fpsim.manual_seed(3)
    assert same(round_to(x.cuda(), f, rounding).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("overflow", ["inf", "nan", "saturate"])
def test_the_card_overflows_as_the_cpu_does(overflow: str) -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, 1e9, torch.inf, torch.nan])
    x = torch.cat([x, -x])
    for rounding in ROUNDINGS:
        fpsim.manual_seed(3)
        expected = round_to(x, "fp16", rounding, overflow)
        fpsim.manual_seed(3)
        assert same(round_to(x.cuda(), "fp16", rounding, overflow).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 2**20 + 5])
def test_every_length_works_on_the_card(n: int) -> None:
    x = torch.randn(n)
    for rounding in ("nearest_even", "stochastic"):
        guarded = torch.full((n + 4,), 7.0, device="cuda")
        fpsim.manual_seed(3)
        round_to(x.cuda(), "e4m3fn", rounding, out=guarded[:n])
        fpsim.manual_seed(3)
        assert same(guarded[:n].cpu(), round_to(x, "e4m3fn", rounding))
        assert bool((guarded[n:] == 7.0).all())


@pytest.mark.gpu
def test_a_tally_that_begins_on_the_cpu_goes_on_on_the_card() -> None:
    x, spec = torch.randn(1001), rounding_spec("fp16")
    after = round_to(x, "fp16")
    expected, moved = (tally.Accumulator(spec, x.device) for _ in range(2))
    for _ in range(2):
        expected.add(x, after)
    moved.add(x, after)
    moved.add(x.cuda(), after.cuda())
    assert torch.equal(moved.counts.cpu(), expected.counts)
    assert torch.equal(moved.exponents.cpu(), expected.exponents)
    lost = tally.lost_between(x.cuda(), after.cuda(), 65504.0, torch.tensor([0]))
    assert torch.equal(lost.cpu(), tally.lost_between(x, after, 65504.0, torch.tensor([0])))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_strides_place_and_streams_change_nothing_on_the_card(rounding: str) -> None:
    x = torch.randn(16, 8, 12, 10)
    for view in (x, x.transpose(0, 3), x[::2, 1:], x.to(memory_format=torch.channels_last)):
        fpsim.manual_seed(5)
        expected = round_to(view, "e4m3fn", rounding)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                card = torch.empty_strided(view.size(), view.stride(), device="cuda").copy_(view)
                fpsim.manual_seed(5)
                got = round_to(card, "e4m3fn", rounding)
                fpsim.manual_seed(5)
                fpsim.round_to_(card, "e4m3fn", rounding)
            stream.synchronize()
            assert torch.equal(got.cpu(), expected)
            assert torch.equal(card.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "compute", [lambda x: round_to(x, "e4m3fn"), lambda x: moments_of(x)], ids=["round", "moments"]
)
def test_a_call_waits_for_no_other_streams_first_call(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    # what a call needs on the card is filled on its own stream: the first stream is asleep when the second one runs
    x = torch.randint(-8, 8, (1024,), device="cuda").float()  # whose sums and means are exact
    expected = compute(x.cpu())
    compute(x)  # loads the kernels, which may wait for all streams
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):  # gets memory of its own, for which torch may wait
        with torch.cuda.stream(stream):
            torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(1_000_000_000)
        compute(x)
    with torch.cuda.stream(second):
        found = compute(x).cpu()
        assert not first.query()
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_the_kernel_runs_on_torchs_current_stream() -> None:
    # a long sleep on the stream keeps the input unwritten: a kernel on any other stream would read zeros
    stream = torch.cuda.Stream()
    source = torch.full((1000,), 1.1, device="cuda")
    x = torch.zeros(1000, device="cuda")
    fpsim.round_to(x, "e4m3fn")  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(source)
        y = round_to(x, "e4m3fn")
    stream.synchronize()
    assert torch.equal(y.cpu(), torch.full((1000,), 1.125))


@pytest.mark.gpu
def test_rounding_on_the_card_waits_for_nothing_and_warns_of_nothing() -> None:
    x = torch.randn(1000, device="cuda")
    for rounding in ROUNDINGS:
        round_to(x, "fp16", rounding)  # compiled
    try:
        torch.cuda.set_sync_debug_mode("error")
        for rounding in ROUNDINGS:
            round_to(x, "fp16", rounding)
            fpsim.round_to_(x.view(20, 50).t(), "fp16", rounding)
            round_to(x, "fp16", rounding, out=torch.empty_like(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_memory_that_begins_between_vectors_is_rounded_too(dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=dtype)
    card = x.cuda()
    for first in range(1, 5):
        for out in (None, torch.empty(1005, dtype=dtype, device="cuda")[3 : 1003 - first]):
            got = round_to(card[first:], "e4m3fn", out=out)
            assert same(got.cpu(), round_to(x[first:], "e4m3fn"))


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_card_can_round() -> None:
    x, out = torch.randn(1000, device="cuda"), torch.empty(1000, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(round_to, x, "e4m3fn", out=out).result()
    assert same(out.cpu(), round_to(x.cpu(), "e4m3fn"))


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_its_own_noise() -> None:
    fpsim.warm_up("cuda", ["e4m3fn", "mxfp8_e4m3"], ["nearest_even", "stochastic"])
    x = torch.full((1 << 14,), 1.0625, device="cuda")
    for fmt in ("e4m3fn", "mxfp8_e4m3"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = round_to(x, fmt, "stochastic")
        drawn = []
        for seed in (0, 1, 0):
            torch.cuda.manual_seed(seed)
            for _ in range(2):
                graph.replay()
                drawn.append(out.clone())
        assert all(set(d.unique().tolist()) == {1.0, 1.125} for d in drawn)
        # 2**14 fair draws: the standard deviation of their mean is 0.0625 / 128
        assert all(abs(float(d.mean()) - 1.0625) < 6 * 0.0625 / 128 for d in drawn)
        assert [[torch.equal(a, b) for b in drawn[:4]] for a in drawn[:4]] == torch.eye(4).bool().tolist()
        assert torch.equal(drawn[4], drawn[0])
        assert torch.equal(drawn[5], drawn[1])


@pytest.mark.gpu
def test_rounding_in_a_graph_gives_the_bits_of_the_cpu() -> None:
    fpsim.warm_up("cuda", ["e4m3fn", "nvfp4"])
    x = torch.randn(5000)
    card, graph = x.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [round_to(card, fmt) for fmt in ("e4m3fn", "nvfp4")] + [moments_of(card)]
    for size in (1.0, 3.0):
        card.copy_(x * size)
        graph.replay()
        for fmt, got in zip(("e4m3fn", "nvfp4"), results, strict=False):
            assert same(got.cpu(), round_to(x * size, fmt))
        assert float(results[2][6]) == float((x * size).abs().max())


@pytest.mark.gpu
def test_loading_a_kernel_while_a_graph_is_captured_is_an_error_that_says_what_to_do() -> None:
    kernel = cuda_loop.__wrapped__(1, 0, 32)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"captured.*fpsim\.warm_up"):
            kernel.load(x.device.index, torch.cuda.current_stream().cuda_stream)


@pytest.mark.gpu
def test_a_kernel_is_loaded_while_another_thread_captures_a_graph() -> None:
    fpsim.warm_up("cuda", ["e4m3fn"])
    x, graph, stream = torch.randn(5000), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    card, kernel = x.cuda(), cuda_loop.__wrapped__(1, 0, 32)
    with torch.cuda.graph(graph), ThreadPoolExecutor(1) as pool:
        pool.submit(kernel.load, card.get_device(), stream.cuda_stream).result()
        out = round_to(card, "e4m3fn")
    graph.replay()
    assert same(out.cpu(), round_to(x, "e4m3fn"))


@pytest.mark.gpu
def test_branches_on_streams_of_their_own_get_the_scales_of_one_stream() -> None:
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)]).cuda()
    x, streams = torch.randn(256, 64, device="cuda"), [torch.cuda.Stream() for _ in range(4)]
    fpsim.quantize(net, fpsim.Policy(error="e5m2", weight_grad="e5m2"), inplace=True)
    handle, found = AdaLossScaled(net), []
    for chosen in ([torch.cuda.current_stream()] * 4, streams):
        handle.observer = recorder = Recorder()
        for _ in range(20):
            parts, start = [], torch.cuda.current_stream()
            for layer, stream in zip(net, chosen, strict=True):
                stream.wait_stream(start)
                with torch.cuda.stream(stream):
                    parts.append(layer(torch.relu(layer(x))) * 1e-5)
            for stream, part in zip(chosen, parts, strict=True):
                start.wait_stream(stream)
                part.record_stream(start)
            sum(parts).sum().backward()
            del parts, part  # with their graph, whose ends belong to the streams of this step
        torch.cuda.synchronize()
        found.append(sorted((row["site"], row["role"], row["log2_scale"]) for row in recorder.rows()))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_gradients_transforms_and_codes_work_on_the_card() -> None:
    x = torch.randn(40_000, device="cuda", requires_grad=True)
    (round_to(x, "e4m3fn") ** 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * round_to(x.detach(), "e4m3fn"))
    y = torch.full((4, 99), 1.125, device="cuda")
    for randomness in ("same", "different"):
        noisy = torch.func.vmap(lambda v: round_to(v, "e5m2", "stochastic"), randomness=randomness)(y)
        assert set(noisy.flatten().tolist()) == {1.0, 1.25}
    codes = fpsim.encode(x.detach(), "e4m3fn")
    assert codes.is_cuda
    assert torch.equal(fpsim.decode(codes, "e4m3fn"), round_to(x.detach(), "e4m3fn"))


@pytest.mark.gpu
@pytest.mark.parametrize("update_every", [1, 3])
@pytest.mark.parametrize("rule", LAYER_RULES)
def test_an_adaptive_step_waits_for_nothing_and_decides_as_the_cpu_does(rule: str, update_every: int) -> None:
    if update_every > 1 and not LAYER_RULES[rule].predicts:
        pytest.skip("what measures does so in every step")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x, g = torch.randn(32, 64), torch.randn(32, 8) * 1e-6
    scales = []
    for device in ("cpu", "cuda"):
        model = fpsim.quantize(net, fpsim.Policy(error="e5m2", weight_grad="e5m2")).to(device)
        inputs, gradient = x.to(device), g.to(device)
        handle = AdaLossScaled(model, rule=rule, update_every=update_every)
        model(inputs).backward(gradient)  # kernels compiled, constants sent
        handle.observer = recorder = Recorder()
        model(inputs).backward(gradient)
        handle.observer = None
        if device == "cuda":
            torch.cuda.synchronize()
            try:
                torch.cuda.set_sync_debug_mode("error")
                model(inputs).backward(gradient)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        scales.append([(row["site"], row["role"], row["log2_scale"]) for row in recorder.rows()])
    # what a product rounds to may differ in float32's last bits: the sizes of its moments do not
    assert scales[0] == scales[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000, 2**20 + 3])
def test_moments_on_the_card_are_those_of_the_cpu(n: int, dtype: torch.dtype) -> None:
    x = (torch.randn(n) * 2.0**-20).to(dtype)
    expected, got = moments_of(x, logs=True), moments_of(x.cuda(), logs=True).cpu()
    assert torch.equal(got[[0, 1, 4, 5, 6, 7]], expected[[0, 1, 4, 5, 6, 7]])
    assert torch.allclose(got, expected, rtol=1e-9, atol=0 if n < 2 else 1e-15)
    for power_begins in (False, True):
        assert torch.equal(binades(x.cuda(), power_begins)[0].cpu(), binades(x, power_begins)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 16, 64, 1024])
def test_hadamard_transforms_on_the_card_give_the_bits_of_the_cpu(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * size, 37).to(dtype)
    for signs in (None, "fixed", "random"):
        transform, key = fpsim.Hadamard(size, signs), torch.tensor(99)
        for view, axis in ((x, 1), (x.transpose(1, 2).contiguous(), 2), (x.transpose(0, 2), 1)):
            expected = fpsim.hadamard(view, transform, axis, key)
            torch.cuda.synchronize()
            assert same(fpsim.hadamard(view.cuda(), transform, axis, key).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["mxfp4", "e2m1fn per 32 at 0.75", "nvfp4", "e4m3fn per tensor fp32"])
def test_blocks_are_tallied_on_the_card_as_on_the_cpu(name: str, axis: int) -> None:
    x = torch.randn(300, 170) * torch.exp2(torch.randint(-30, 30, (300, 1)).float())
    x[3], x[5, 7] = 0.0, torch.inf if name in ("mxfp4", "e2m1fn per 32 at 0.75") else -torch.finfo().max
    ours, theirs = fpsim.tally(x.cuda(), name, axis=axis), fpsim.tally(x, name, axis=axis)
    for field in ("blocks", "zero_blocks", "scale_underflow", "scale_overflow", "subnormal", "overflow"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.log2_scale_spread == pytest.approx(theirs.log2_scale_spread, rel=2**-50)  # a logarithm of each library


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "axis"), [((64, 4096), 1), ((64, 4096), 0), ((256, 4094), 1), ((3, 5, 96), 2)], ids=str
)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4", "e4m3fn per row fp32", "e5m2 per 128x128 fp32"])
def test_blocks_on_the_card_have_the_bits_of_the_cpu(
    name: str, rounding: str, shape: tuple[int, ...], axis: int
) -> None:
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1)).float())
    x[0, :40], x[3, 5] = 0.0, -torch.finfo().max
    if name != "nvfp4":  # of which all would be NaN
        x[1, 3], x[2, 4] = torch.inf, torch.nan
    results = []
    for device in ("cpu", "cuda"):
        fpsim.manual_seed(5)
        results.append(round_to(x.to(device), name, rounding, axis=axis).cpu())
    assert same(*results)


@pytest.mark.gpu
def test_a_scale_on_another_device_than_the_numbers_is_brought_to_them() -> None:
    x, spec, scale = torch.randn(1000), rounding_spec("e4m3fn"), torch.tensor([20])
    expected = rounded(x, spec, None, scale)
    assert torch.equal(rounded(x.cuda(), spec, None, scale).cpu(), expected)
    assert torch.equal(rounded(x, spec, None, scale.cuda()), expected)


@pytest.mark.gpu
def test_delayed_scaling_waits_for_nothing_and_moves_with_the_model() -> None:
    histories, rule = Histories(), fpsim.Delayed(history=3)
    for device in ("cpu", "cuda"):
        found = histories.of("a:linear", "fprop.x", rule, 448.0, torch.device(device, 0 if device == "cuda" else None))
        found.record(torch.tensor(7.0, device=device))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            histories.begin_step()
            scale = found.scale()
            found.record(scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scale.device.type == "cuda"
    assert scale.item() == 7.0  # 448 / 7 = 64, 448 / 64 = 7, then the larger of 64 and 7


@pytest.mark.gpu
@pytest.mark.parametrize(
    "accumulator",
    [
        as_accumulator("fp16"),
        as_accumulator("cb16_chunk64"),
        as_accumulator("hopper_fp8_chunk128"),
        Accumulator("fp32"),
        Accumulator("e4m3fn", "stochastic", product="e4m3fn", product_rounding="stochastic"),
        Accumulator("bf16", "stochastic", group=5, group_bits=12, chunk=13),
        Accumulator("fp32", "toward_zero", group=8, group_bits=12, operands=("e4m3fn", "fp16"), zero_exponent=-2),
    ],
    ids=repr,
)
def test_products_on_the_card_have_the_bits_of_the_cpu(accumulator: Accumulator) -> None:
    a, b, bias = torch.randn(3, 70, 300), torch.randn(300, 90), torch.randn(90)
    a[0, 0, :3] = torch.tensor([torch.inf, 2.0**-149, -0.0])
    results = []
    for device in ("cpu", "cuda"):
        fpsim.manual_seed(3)
        x, y = (t.to(device, copy=True).requires_grad_() for t in (a, b))
        result = matmul(x, y, accumulator, bias.to(device))
        result.backward(torch.ones_like(result))
        results.append([t.cpu() for t in (result.detach(), x.grad, y.grad) if t is not None])
    for got, wanted in zip(*results, strict=True):
        assert same(got, wanted)
    empty = matmul(torch.ones(2, 0, device="cuda"), torch.ones(0, 3, device="cuda"), accumulator)
    assert empty.tolist() == [[0.0] * 3] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_second_card_gives_the_same() -> None:
    x = torch.randn(1000)
    expected = round_to(x, "e4m3fn")
    for device in ("cuda:1", "cuda:0"):
        y = round_to(x.to(device), "e4m3fn")
        assert y.device == torch.device(device)
        assert torch.equal(y.cpu(), expected)
