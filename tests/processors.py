"""What of torch's own numbers depends on the processor."""

from __future__ import annotations

import pytest
import torch

# Without vector instructions a sum in bfloat16 with alpha rounds twice everywhere, not only behind the last whole
# vector, and linspace and fused steps have other last bits. Every x86 processor of the last ten years has AVX2.
NEEDS_VECTORS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch computes without vector instructions (ATEN_CPU_CAPABILITY=default)",
)
