"""What tests of torch's own compiler need."""

from __future__ import annotations

import os

import pytest

# It writes vectors for the processor, which torch's headers do not declare where this forbids them (torch 2.13).
needs_inductor = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default", reason="torch's inductor compiles nothing without vectors"
)
