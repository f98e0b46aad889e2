"""float32 on a GPU is float32 while a cell computes, and afterwards what it was before."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest
from torch.backends import cudnn

from ada_loss.lab.devices import float32_in_full


@pytest.mark.parametrize("before", [True, False])
def test_convolutions_are_not_computed_in_tf32_on_a_card_and_as_before_afterwards(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "allow_tf32", before)
    with float32_in_full("cpu"):
        assert cudnn.allow_tf32 is before
    inside = []
    with suppress(KeyError), float32_in_full("cuda:1"):
        inside.append(cudnn.allow_tf32)
        raise KeyError
    assert inside == [False]
    assert cudnn.allow_tf32 is before


def test_settings_that_tell_convolutions_and_recurrent_layers_apart_stay() -> None:
    code = """
from torch.backends import cudnn
from ada_loss.lab.devices import float32_in_full
cudnn.conv.fp32_precision = "tf32"
cudnn.rnn.fp32_precision = "ieee"
with float32_in_full("cuda"):
    print(cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
"""  # in a process of its own, for torch does not take them back
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tf32", "ieee"]
