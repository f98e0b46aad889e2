from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_in_a_sweep(one_thread: None) -> None:
    """Train on one thread in every test of this folder."""
