"""What a launch hands to the driver, and what is kept of a kernel: nothing here needs a card."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numba
import pytest
import tiers
import torch
from kernel_cases import COMPILED, block_spec

import fpsim
from fpsim.compiling import card
from fpsim.compiling.card import CudaKernel, array_words, assembled, scalar_kernel
from fpsim.compiling.kept import kept_code
from fpsim.kernels import block_dense, block_teams
from fpsim.kernels.core import NUMBERS
from fpsim.kernels.round import ALIGNED, HAS_KEY, HAS_SCALE, cuda_loop
from fpsim.tensors import launch, shared_scales

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or importlib.util.find_spec("nvidia") is None,
    reason="numba-cuda and NVVM are not installed: pip install 'ada-loss[cuda13]'",
)

KERNELS = {**COMPILED, "scalar": lambda: scalar_kernel(keep_first, (("int64", 1), ("float64", 2)))}


def keep_first(a: Any, b: Any) -> None:
    b[0, 0] = a[0]


class Driver:
    """In the place of cuLaunchKernel: it notes what it is given, and reads the arguments as the driver does."""

    def __init__(self, count: int, error: int = 0) -> None:
        self.count, self.error = count, error
        self.grid: tuple[int, ...] = ()
        self.arguments: list[int] = []

    def __call__(self, function: Any, *words: int) -> tuple[int]:
        *grid, shared, self.stream, table, extra = words
        assert (shared, extra) == (0, 0)
        self.grid = tuple(grid)
        addresses = (ctypes.c_void_p * self.count).from_address(table)
        self.arguments = [ctypes.c_int64.from_address(a or 0).value for a in addresses]
        return (self.error,)


@cache
def ptx_of(name: str) -> tuple[CudaKernel, str]:
    kernel = KERNELS[name]()
    return kernel, kernel.ptx((7, 5))


FEW = {name for place, name in enumerate(KERNELS) if place % 4 == 0} | {"scalar"}


@tiers.parametrize("name", KERNELS, keep=FEW)
def test_a_launch_packs_what_the_ptx_declares(name: str) -> None:
    kernel, ptx = ptx_of(name)
    declared = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)", ptx.split(".entry kernel(")[1])
    assert declared
    assert set(declared) <= {"u64", "s64", "b64"}
    kernel.bind(0, driver := Driver(len(declared)), None)
    kernel(0, 7, 3, tuple(range(len(declared))))
    assert driver.arguments == list(range(len(declared)))
    assert (driver.grid, driver.stream) == ((3, 1, 1, kernel.threads, 1, 1), 7)
    with pytest.raises(Exception, match=r"pack_into expected|required"):
        kernel(0, 7, 3, tuple(range(len(declared) + 1)))


@tiers.parametrize("name", KERNELS, keep=FEW)
def test_the_assembler_knows_how_many_threads_there_are(name: str) -> None:
    kernel, ptx = ptx_of(name)
    assert f".maxntid {kernel.threads}, 1, 1" in ptx


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver for all kernels; tensors of the CPU are launched as those of a card would be."""
    driver = Driver(7 + NUMBERS)  # as a rounding has
    launch.kernel_for.cache_clear()
    cuda_loop.cache_clear()  # a kernel remembers what launches it
    block_dense.cuda_rounding.cache_clear()
    monkeypatch.setattr(CudaKernel, "load", lambda self, device, stream=0: self.bind(device, driver, None))
    monkeypatch.setattr(launch, "current_stream_handle", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    yield driver
    launch.kernel_for.cache_clear()
    cuda_loop.cache_clear()
    block_dense.cuda_rounding.cache_clear()


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_element_has_a_thread_and_no_block_is_idle(driver: Driver, dtype: torch.dtype, rounding: str) -> None:
    spec = fpsim.tensors.spec.rounding_spec("fp16", rounding)
    kernel = launch.kernel_for(spec, 32 if dtype is torch.float32 else 64)
    # 16 bytes a thread; stochastic rounding eight elements, and always whole blocks of 128
    per_block = 256 * (8 if rounding == "stochastic" else 16 // dtype.itemsize)
    for n in (1, per_block - 1, per_block, per_block + 1, 5 * per_block):
        x = torch.empty(n, dtype=dtype)
        launch.launch_on_card(x, x, n, kernel, torch.tensor(-3))
        assert driver.grid == (-(-n // per_block), 1, 1, 256, 1, 1)
        assert driver.stream == 7


def test_arguments_are_addresses_flags_and_the_plan(driver: Driver) -> None:
    kernel = launch.kernel_for(fpsim.tensors.spec.rounding_spec("e4m3fn", "stochastic"), 32)
    memory = torch.empty(64)
    x, y = memory[4:20], memory[24:40]
    scale, key = torch.tensor([3]), torch.tensor(-5)
    assert x.data_ptr() % 16 == y.data_ptr() % 16 == 0
    launch.launch_on_card(x, y, 16, kernel, key, scale)
    head = [x.data_ptr(), y.data_ptr(), scale.data_ptr(), 0, 16, ALIGNED | HAS_SCALE, -5]
    assert driver.arguments == [*head, *kernel.plan.numbers]
    launch.launch_on_card(x, memory[23:39], 16, kernel, None)
    assert driver.arguments[2:7] == [0, 0, 16, 0, 0]  # no longer aligned
    assert HAS_KEY not in (ALIGNED, HAS_SCALE)


@pytest.mark.parametrize(
    ("name", "shape", "axis", "kernel"),
    [
        ("mxfp8_e4m3", (5, 96), -1, "dense"),
        ("mxfp8_e4m3", (5, 97), -1, "blocks"),  # a block is cut off
        ("mxfp8_e4m3", (96, 5), 0, "blocks"),  # neighbours in memory are of other blocks
        ("mxfp8_e4m3", (96, 1), 0, "dense"),
        ("e4m3fn per 4x8 fp32", (8, 32), -1, "blocks"),
        ("e4m3fn per 3 fp32", (8, 33), -1, "blocks"),
        ("e4m3fn per 256 fp32", (8, 512), -1, "blocks"),
        ("e4m3fn per row fp32", (5, 64), -1, "blocks"),
        ("e4m3fn per tensor fp32", (5, 97), 0, "dense"),
    ],
)
def test_whole_blocks_along_the_memory_have_a_kernel_of_their_own(
    name: str, shape: tuple[int, ...], axis: int, kernel: str
) -> None:
    spec = block_spec(name)
    axes = shared_scales.block_axes(torch.Size(shape), spec.fmt.tile, axis, None)
    work = shared_scales.launch_of(shared_scales.block_plan(spec), axes, spec.fmt)
    assert work.kernel.name.split("-")[0] == kernel
    assert work.is_dense is (kernel == "dense")


def test_places_are_computed_in_32_bits_while_they_fit() -> None:
    assert block_teams.is_small((1, 1, 1, 2**31 - 1, 1, 1, 32))
    assert not block_teams.is_small((2**11, 1, 1, 2**10, 2**10, 1, 32))
    assert not block_teams.is_small((1, 1, 1, 32, 1, 1, 2**40))  # a block longer than any tensor


@pytest.mark.parametrize("offset", [0, 1])
def test_a_launch_of_dense_blocks_tells_whether_memory_is_aligned(driver: Driver, offset: int) -> None:
    spec, shape = block_spec("mxfp8_e4m3", "stochastic"), torch.Size((50, 96))
    plan = shared_scales.block_plan(spec)
    work = shared_scales.launch_of(plan, shared_scales.block_axes(shape, spec.fmt.tile, -1, None), spec.fmt)
    driver.count = 4 + len(plan.parameters) + 6
    x, y = torch.empty(4801)[offset:][:4800], torch.empty(4800)
    shared, scales = torch.tensor([-1, -1]), torch.empty(150)
    shared_scales._run_on_card(work, plan, torch.tensor(-5), x, y, shared, scales)
    assert driver.grid == (5, 1, 1, 256, 1, 1)  # of 1,024 elements each
    head = [x.data_ptr(), y.data_ptr(), 4800, int(offset == 0)]
    assert driver.arguments == [*head, *plan.parameters, shared.data_ptr(), scales.data_ptr(), 1, 0, 0, -5]


def test_an_error_of_the_driver_is_raised(driver: Driver) -> None:
    driver.error = 719
    x = torch.ones(3)
    kernel = launch.kernel_for(fpsim.tensors.spec.rounding_spec("e5m2", "up"), 32)
    with pytest.raises(RuntimeError, match="driver returned 719"):
        launch.launch_on_card(x, x, 3, kernel, None)


def test_a_launch_while_another_device_is_current_takes_the_context_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, calls = ["other"], []

    class Contexts:
        def cuCtxPushCurrent(self, context: str) -> tuple[int]:
            stack.append(context)
            return (0,)

        def cuCtxPopCurrent(self) -> tuple[int, str]:
            return 0, stack.pop()

    def launch_in(function: Any, *words: int) -> tuple[int]:
        calls.append(stack[-1])
        return (0 if stack[-1] == "of device 1" else 400,)

    monkeypatch.setattr(card, "_driver", Contexts)
    monkeypatch.setattr(card, "_context", lambda device: f"of device {device}")
    kernel = CudaKernel(lambda: None, (numba.types.int64,))
    for device in (1, 2):
        kernel.bind(device, launch_in, None)
    kernel(1, 0, 1, (5,))
    assert calls == ["other", "of device 1"]
    with pytest.raises(RuntimeError, match="driver returned 400"):  # not of the context: the second one is told
        kernel(2, 0, 1, (5,))
    assert stack == ["other"]


def test_threads_do_not_share_the_memory_of_arguments() -> None:
    kernel, seen = CudaKernel(lambda: None, (numba.types.int64,)), []
    barrier = threading.Barrier(2)

    def launch_slowly(function: Any, *words: int) -> tuple[int]:
        barrier.wait()  # both are inside of the driver
        address = ctypes.c_void_p.from_address(words[-2]).value or 0
        seen.append(ctypes.c_int64.from_address(address).value)
        return (0,)

    kernel.bind(0, launch_slowly, None)
    threads = [threading.Thread(target=kernel, args=(0, 0, 1, (number,))) for number in (11, 22)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [11, 22]


def test_an_array_is_seven_words_as_numba_has_it() -> None:
    x = torch.zeros(4, 6, dtype=torch.float64)
    assert array_words(99, (4, 6), 8) == (0, 0, 24, 8, 99, *x.shape, *x.numpy().strides)


def test_code_is_made_once_and_again_if_a_bit_has_flipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"code"

    assert [kept_code("k.cubin", make), kept_code("k.cubin", make)] == [b"code", b"code"]
    assert len(made) == 1
    (file,) = tmp_path.rglob("k.cubin")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert kept_code("k.cubin", make) == b"code"
    assert len(made) == 2


def test_a_function_that_changes_has_another_name_on_disk() -> None:
    def with_number(number: float) -> Any:
        def function(a: Any) -> None:
            a[0] = number

        return function

    keys = [scalar_kernel(with_number(n), (("float64", 1),)).name for n in (1.0, 1.0, 2.0)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.skipif(not [*distributions(name="nvidia-nvjitlink")], reason="pip install nvidia-nvjitlink")
@pytest.mark.full
def test_the_ptx_is_assembled_for_a_card() -> None:
    cubin = assembled(KERNELS["round"]().ptx((9, 0)), (9, 0))
    assert cubin[:4] == b"\x7fELF"
    assert int.from_bytes(cubin[18:20], "little") == 190  # EM_CUDA
    assert b"kernel" in cubin
    newer = KERNELS["round"]().ptx((99, 0))
    assert assembled(newer, (99, 0)) == newer.encode() + b"\0"  # for the card's driver to assemble
    with pytest.raises(Exception, match="ERROR_PTX_COMPILE"):
        assembled(".version 9.0\nno ptx", (9, 0))
    with pytest.raises(
        RuntimeError, match=r"Unsupported \.version 99\.0; .*two releases.*pip install.*nvidia-nvjitlink"
    ):
        assembled(re.sub(r"\.version \S+", ".version 99.0", KERNELS["round"]().ptx((9, 0))), (9, 0))
