"""The page for users of AMP: the script of two ranks, and the lines for other libraries' loops.

Its other blocks are examples with an output, which `test_readme.py` runs.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from readme_blocks import examples
from torch import nn

import ada_loss

PAGE = Path(__file__).parents[1] / "docs" / "mixed-precision.md"
BLOCKS = re.findall(r"```python\n((?:(?!```).)*)```", PAGE.read_text(), re.DOTALL)
(RANKS,) = [code for code in BLOCKS if "init_process_group" in code]
(LOOPS,) = [code for code in BLOCKS if "use_scaler" in code]


def test_every_block_of_the_page_is_run() -> None:
    assert sorted(BLOCKS) == sorted([*(code for code, _ in examples(PAGE)), RANKS, LOOPS])


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
@pytest.mark.parametrize("case", ["torch", "layers", "overflow"])
def test_two_ranks_print_what_the_page_says(case: str) -> None:
    code, said = RANKS, re.search(r"Both ranks print `(.*)`\.", PAGE.read_text())
    assert said is not None
    expected = said[1]
    if case == "layers":
        code = code.replace('GradScaler("torch")', "GradScaler(layers=model)")
        expected = expected.replace("scale 65536", "scale 1")  # the loss is not scaled then
    elif case == "overflow":  # in one rank's part of a gradient
        line = "    scaler.unscale_(optimizer)\n"
        overflow = 'model[0].weight.grad.to_local()[0, 0] = float("inf")'
        code = code.replace(line, f"    if _ == 3 and dist.get_rank() == 1:\n        {overflow}\n{line}")
        expected = expected.replace("65536", "32768")
    assert (code == RANKS) == (case == "torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PAGE.parents[1],
            env={**os.environ, **words, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        printed, complaints = rank.communicate(timeout=200)
        assert (rank.returncode, printed) == (0, f"{expected}\n"), complaints


@pytest.mark.filterwarnings("ignore")
def test_on_a_cpu_the_loops_of_other_libraries_take_the_lines_or_say_that_they_do_not_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning.pytorch")
    from ada_loss.integrations.huggingface import use_scaler
    from ada_loss.integrations.lightning import ScaledPrecision

    monkeypatch.chdir(tmp_path)  # the Trainer makes a folder
    names = {"ada_loss": ada_loss, "model": nn.Linear(2, 2), "module": nn.Linear(2, 2)}
    names |= {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}
    names |= {"use_scaler": use_scaler, "ScaledPrecision": ScaledPrecision}
    with_accelerator, with_trainer, with_lightning = LOOPS.split("\n\n")
    accelerate.state.AcceleratorState._reset_state(True)
    for lines in (with_accelerator, with_trainer):
        if torch.cuda.is_available():
            exec(lines, names)
        else:
            with pytest.raises(ValueError, match=r"casts nothing on cpu"):
                exec(lines, names)
        accelerate.state.AcceleratorState._reset_state(True)
    exec(with_lightning, names)
