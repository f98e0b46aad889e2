"""The PTX of a CUDA kernel as a launch links it: with optimisation at link time, for a compute capability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.cuda.compiler import _compile_pyfunc_with_fixup

HOPPER = (9, 0, "a")  # as numba-cuda calls what an H100 has
CAPABILITIES = ((7, 5), (8, 0), HOPPER)


def linked(kernel: Any, signature: Sequence[Any], *capabilities: tuple[Any, ...]) -> list[str]:
    """The PTX for each of the capabilities, or for an H100 alone.

    numba-cuda gives nvJitLink the kernel as LTO-IR; this is the PTX which that makes of it, and assembles for a launch.
    The kernel is typed once for all of them, which takes nearly all of the time. Raises RuntimeError without nvJitLink.
    """
    capabilities = capabilities or (HOPPER,)
    library, _ = _compile_pyfunc_with_fixup(
        kernel, tuple(signature), device=False, abi="numba", cc=capabilities[0], lto=True
    )
    library._lto = True  # which numba-cuda's launch sets where nvJitLink is installed, see numba.cuda.decorators
    return [library.get_lto_ptx(cc=capability).rstrip("\0 \n") for capability in capabilities]
