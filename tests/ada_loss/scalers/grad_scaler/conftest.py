"""Both classes: what torch's own tests ask of `torch.amp.GradScaler` is asked of ours too."""

from __future__ import annotations

import pytest
from grad_scaler_cases import Make, ours, torchs


@pytest.fixture(params=[torchs, ours], ids=["torch", "ours"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param
