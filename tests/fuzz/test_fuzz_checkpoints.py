"""Checkpoints that were damaged, or made up with a digest that fits: training starts over, goes on, or says why not."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import sweep_tasks
import torch
from damage import accidents, damaged
from fuzzing import documented, fuzz
from hypothesis import strategies as st

from ada_loss.lab.training.checkpoints import DIGEST
from ada_loss.lab.training.loop import train

OPTIONS: dict[str, Any] = {
    "fmt": "e5m2",
    "rounding": "stochastic",
    "scaling": "adaptive",
    "steps": 4,
    "record_every": 1,
}


@cache
def left_behind() -> tuple[bytes, list[float]]:
    """The checkpoint of the first steps of a training, and all losses of it."""
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.pt"

        def keep(_: int) -> None:
            if path.exists():
                kept.append(path.read_bytes())

        options = {**OPTIONS, "checkpoint": path, "checkpoint_seconds": 0.0, "progress": keep}
        losses = train(sweep_tasks.tiny(0), **options).losses
    return kept[-1], losses


@fuzz(60, happened=accidents(), with_its_digest=st.booleans())
def test_fuzz_a_damaged_checkpoint_is_left_aside_or_refused(happened: Any, with_its_digest: bool) -> None:
    whole, losses = left_behind()
    changed = damaged(whole, happened)
    if with_its_digest:
        changed = damaged(whole[DIGEST:], happened)
        changed = hashlib.sha256(changed).digest() + changed
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = Path(folder) / "cell.pt"
        path.write_bytes(changed)
        with documented(ValueError) as outcome:
            found = train(sweep_tasks.tiny(0), **OPTIONS, checkpoint=path).losses
        if outcome.error is None and not with_its_digest:
            assert found == losses
            assert bool(said) == (changed != whole)
