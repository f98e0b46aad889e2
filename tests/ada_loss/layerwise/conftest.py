"""The models that every test of all models goes through."""

from __future__ import annotations

import pytest
import torch
from layerwise_cases import CASES
from torch import Tensor, nn


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return CASES[request.param]()
