"""The CUDA kernels as a launch links them, executed on the CPU instruction by instruction: no card is needed."""

from __future__ import annotations

import importlib.util

import pytest
from test_cuda import run_alone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None, reason="NVVM is not installed: pip install nvidia-nvvm nvidia-nvjitlink"
)


def test_the_rounding_kernels() -> None:
    run_alone("executed_rounding.py", "-k", "not masks")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_rounding_kernels_on_a_thousand_million_patterns() -> None:
    run_alone("executed_rounding.py", "-m", "slow")
