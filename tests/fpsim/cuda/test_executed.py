"""The CUDA kernels as a launch links them, executed on the CPU instruction by instruction: no card is needed."""

from __future__ import annotations

import importlib.util

import pytest
from test_cuda import run_alone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None, reason="NVVM is not installed: pip install nvidia-nvvm nvidia-nvjitlink"
)


SOME = (  # kernels that compile fast, a changed instruction among them
    "format_and_rule_has_the_bits_of_the_cpu[nearest_even-flat-32]",
    "masks_pass_as_on_the_cpu[e4m3fn-nearest_even-32]",
    "binades_are_counted_as_on_the_cpu[torch.float64-ends]",
    "what_blocks_share_is_found_as_on_the_cpu[nvfp4]",
    "a_change_of_one_instruction_is_found[binades]",
    "a_floating_point_instruction_would_be_found",
    "the_kernels_of_tallies_compile[float64]",
)


@pytest.mark.full
def test_some_kernels_as_ptx_and_executed() -> None:
    run_alone("executed_rounding.py executed_kernels.py executed_mutants.py ptx.py", "-k", " or ".join(SOME))


@pytest.mark.full
def test_the_rounding_kernels() -> None:
    run_alone("executed_rounding.py", "-k", "not masks")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_rounding_kernels_on_a_thousand_million_patterns() -> None:
    run_alone("executed_rounding.py", "-m", "slow")
