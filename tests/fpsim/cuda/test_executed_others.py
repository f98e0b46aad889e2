"""The kernels that test_executed.py does not run, and some with one instruction changed.

A file of its own, so that two workers share them.
"""

from __future__ import annotations

import importlib.util

import pytest
from test_cuda import run_alone

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None,
        reason="NVVM is not installed: pip install nvidia-nvvm nvidia-nvjitlink",
    ),
]


@pytest.mark.slow  # the simulator runs them all in `full`
@pytest.mark.timeout(7200)
def test_the_rounding_kernels_that_let_masks_pass() -> None:
    run_alone("executed_rounding.py", "-k", "masks")


def test_the_other_kernels() -> None:
    run_alone("executed_kernels.py", "-k", "not infinities or mxfp8_e4m3 or delayed")


@pytest.mark.slow  # the simulator runs some of them in `full`, too
def test_infinities_in_blocks_of_every_kind() -> None:
    run_alone("executed_kernels.py", "-k", "infinities")


def test_a_change_of_one_instruction_is_found() -> None:
    run_alone("executed_mutants.py")
