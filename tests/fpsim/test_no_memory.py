"""Tensors without memory (on device meta, fake, with a freed storage) never reach a kernel: an error, not a crash.

The kernels are called in a child: one that looked at address 0 would end this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tiers
import torch
from children import environment
from leftovers import left_on
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fpsim
from fpsim.tensors.accumulators import as_accumulator
from fpsim.tensors.block_tally import blocks_between
from fpsim.tensors.cuts import Cut
from fpsim.tensors.gemm import accumulate
from fpsim.tensors.hadamard import transformed
from fpsim.tensors.launch import round_fitting_, rounded, to_float64
from fpsim.tensors.moments import amax_of, binades, moments_of
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import BlockSpec, any_spec, rounding_spec
from fpsim.tensors.tally import Accumulator, lost_between

FP16, BLOCKS = rounding_spec("fp16"), any_spec("mxfp4")
assert isinstance(BLOCKS, BlockSpec)


def meta() -> Tensor:
    return torch.empty(4, 32, device="meta")


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(4, 32)


def freed() -> Tensor:
    x = torch.empty(4, 32)
    x.untyped_storage().resize_(0)
    return x


WITHOUT = {"meta": meta, "fake": fake, "freed": freed}
# Everything that gives a kernel an address.
KERNELS: dict[str, Callable[[Tensor], object]] = {
    "rounding": lambda x: rounded(x, FP16),
    "scaled rounding": lambda x: rounded(x, FP16, log2_scale=torch.tensor([3])),
    "stochastic rounding": lambda x: rounded(x, rounding_spec("fp16", "stochastic"), torch.tensor(1)),
    "fitting": lambda x: round_fitting_(x, FP16, torch.zeros(1, dtype=torch.int64), 1.0),
    "float64": to_float64,
    "tally": lambda x: Accumulator(FP16, torch.device("cpu")).add(x, x),
    "tally of a memory": lambda x: Accumulator(FP16, torch.device("cpu")).add(torch.ones(4, 32), x),
    "losses": lambda x: lost_between(x, x, 1.0, torch.tensor([0])),
    "block tally": lambda x: blocks_between(x, x, BLOCKS, Cut()),
    "blocks along": lambda x: rounded_blocks(x, BLOCKS),
    "blocks across": lambda x: rounded_blocks(x, BLOCKS, 0),
    "moments": moments_of,
    "moments with logs": lambda x: moments_of(x, True),
    "amax": amax_of,
    "binades": binades,
    "accumulator": lambda x: accumulate(x[None], torch.ones(1, 32, 2), as_accumulator("fp16"), None),
    "transform": lambda x: transformed(x, fpsim.Hadamard(32), 1, None),
}
# These reach no kernel: on device meta they compute with torch's operations, as on any device but the CPU, and of a
# freed storage torch refuses to make a view with one more dimension.
OF_TORCH = {"meta": {"fitting", "float64"}, "fake": set(), "freed": {"accumulator"}}


def run_kernels(kind: str) -> None:
    """Call every kernel; print what it raised."""
    warnings.simplefilter("ignore")  # of torch, which deprecates the address of a fake tensor
    for name, kernel in KERNELS.items():
        said = "nothing"
        try:
            kernel(WITHOUT[kind]())
        except (TypeError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        print(f"{name}: {said}", flush=True)


@tiers.parametrize("kind", WITHOUT, keep={"freed"})  # each is a process
def test_no_kernel_looks_at_address_0(kind: str) -> None:
    code = f"import test_no_memory; test_no_memory.run_kernels({kind!r})"
    settings = environment()
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), settings["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr}"
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert [*said] == [*KERNELS]
    refused = {name for name, text in said.items() if text.startswith("TypeError: A tensor reached a kernel that is")}
    assert {*KERNELS} - refused == OF_TORCH[kind]


@pytest.mark.parametrize("fmt", ["fp16", "fp32", "mxfp4"])
@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tally_of_what_has_no_memory_is_refused_at_the_border(kind: str, fmt: str) -> None:
    with pytest.raises(TypeError, match=r"^x is .*where tensors hold no numbers. Expected: a tensor on cpu or cuda"):
        fpsim.tally(WITHOUT[kind](), fmt)


def test_a_model_without_memory_can_be_watched_and_has_no_rows() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 2), nn.ReLU())
    watching = fpsim.watch(model, ["fp16", "mxfp4"], every=1)
    y = model(meta())
    watching.detach()
    assert (y.shape, y.device.type) == ((4, 2), "meta")
    with pytest.warns(UserWarning, match=r"hold no numbers\. fpsim\.watch\(model\) has left them out"):
        assert watching.rows() == []


def test_a_quantised_model_without_memory_can_be_recorded_and_has_no_rows() -> None:
    with torch.device("meta"):
        model = fpsim.quantize(nn.Linear(32, 2), "fp16")
    with fpsim.record(model) as recording:
        assert model(meta()).shape == (4, 2)
    assert recording.rows() == []


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "meta": lambda: torch.device("meta"),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}
TOOLS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "diagnose": lambda model, x: fpsim.diagnose(model, lambda: model(x).square().mean().backward()),
    "why": lambda model, x: fpsim.why(model, lambda: model(x).square().mean().backward()),
    "compare": lambda model, x: fpsim.compare(model, None, "fp16", x),
    "compare of a step": lambda model, x: fpsim.compare(model, lambda: model(x).mean(), None, "fp16"),
    "sensitivity": lambda model, x: fpsim.sensitivity(model, lambda m: m(x).sum(), "fp16"),
    "sensitivity of a step": lambda model, x: fpsim.sensitivity(model, lambda: model(x).sum(), "fp16"),
    "watch of a step": lambda model, x: fpsim.watch(model, lambda: model(x).sum().backward(), ["fp16"]),
}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 2))


def left_by(model: nn.Module) -> list[object]:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [*modes, *left_on(model), *(name for name, p in model.named_parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("name", TOOLS)
def test_a_model_without_memory_is_refused_by_what_looks_at_its_numbers(name: str, kind: str) -> None:
    with MODES[kind]():
        model, x = two_layers(), torch.ones(4, 32)
    where = {"meta": "on device meta", "fake": "of a FakeTensorMode"}[kind]
    with pytest.raises(TypeError, match=rf"^0\.weight of the model is {where}, where tensors hold no numbers"):
        TOOLS[name](model, x)
    assert left_by(model) == []


@pytest.mark.parametrize("name", TOOLS)
def test_what_looks_at_numbers_is_refused_under_a_mode_that_makes_none(name: str) -> None:
    model, x = two_layers(), torch.ones(4, 32)
    with (
        MODES["fake"](),
        pytest.raises(TypeError, match=r"^This is called under a FakeTensorMode, where tensors hold no numbers"),
    ):
        TOOLS[name](model, x)
    assert left_by(model) == []
    TOOLS[name](model, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch reads to make a fake one
@pytest.mark.parametrize("name", [name for name in TOOLS if name != "watch of a step"])
def test_a_batch_without_numbers_is_refused_where_its_first_result_is_read(name: str) -> None:
    model = two_layers()
    with MODES["fake"]():
        x = torch.ones(4, 32)
    words = r"^The (result of 0:linear|loss) is of a FakeTensorMode, where tensors hold no numbers for fpsim\."
    with pytest.raises(TypeError, match=words):
        TOOLS[name](model, x)
    assert left_by(model) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_watch_leaves_out_what_a_fake_batch_gives_and_says_so() -> None:
    model = two_layers()
    with MODES["fake"]():
        x = torch.ones(4, 32)
    with fpsim.watch(model, ["fp16"], every=1) as watching:
        model(x)
    with pytest.warns(UserWarning, match="hold no numbers"):
        assert {row["role"] for row in watching.rows()} == {"weight"}
    assert left_by(model) == []
