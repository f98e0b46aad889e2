"""What a model would do on other hardware: presets with sources, planted failures, verdicts whose truth is known."""

from __future__ import annotations

import json
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fpsim
from ada_loss.__main__ import app
from ada_loss.lab.results.judgement import Judgement
from ada_loss.lab.studies.hardware import PRESETS, described, preset, presets_in
from ada_loss.lab.studies.on import On, _in_words, _verdicts, function_at, on, runs

ROOT = Path(__file__).parents[4]
NAMES = ["h100", "b200", "b200_fp4", "mi250", "mi300", "tpu", "gaudi", "cerebras"]


def mlp(seed: int) -> nn.Module:
    assert torch.initial_seed() == seed
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(seed)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 32)
    return x, x[:, 0].long() % 4


# Presets


def test_every_preset_has_a_version_and_a_source_for_each_line_and_says_what_is_missing() -> None:
    assert [*PRESETS] == NAMES
    for name, one in PRESETS.items():
        assert one.full_name == f"{name}@{one.version}"
        assert one.lines
        assert all(len(line.source) > 10 and line.what for line in one.lines)
        assert one.missing
        assert any("attention" in words for words in one.missing) or one.policy().products.attention  # type: ignore[union-attr]


def test_the_policies_are_those_of_the_lines() -> None:
    model = made(0)
    h100 = preset("h100").policy(model)
    assert h100.products is not None
    assert str(h100.products.fprop[0]) == "e4m3fn per tensor fp32 saturate nearest_even"
    assert str(h100.products.dgrad[0]).startswith("e5m2 per tensor fp32 saturate")
    assert [str(a) for a in h100.products.accumulator] == [  # type: ignore[union-attr]
        "hopper_fp8",
        "hopper_fp8_chunk128",
        "hopper_fp8_chunk128",
    ]
    assert preset("h100").policy(model, sums=False).products == fpsim.recipe("fp8_current").products
    assert str(preset("b200").policy(model).products.accumulator) == "blackwell_fp8"  # type: ignore[union-attr]
    mi300 = preset("mi300").policy(model).products
    assert mi300 is not None
    assert mi300.fprop[0].fmt.element == fpsim.as_format("e4m3fnuz")  # type: ignore[union-attr]
    assert mi300.fprop[0].fmt.element.largest == 240  # type: ignore[union-attr]
    gaudi = preset("gaudi").policy(model).products
    assert gaudi is not None
    assert gaudi.is_delayed
    assert gaudi.fprop[0].fmt.element.largest == 240  # type: ignore[union-attr]
    assert not preset("gaudi").policy(model, settled=True).products.is_delayed  # type: ignore[union-attr]
    assert preset("mi250").policy(model) == fpsim.recipe("fp16_gfx90a")
    assert preset("cerebras").policy(model) == fpsim.Policy("cb16", "cb16", "cb16")


def test_a_tpu_multiplies_in_bf16_without_subnormals_and_adds_in_float32() -> None:
    layer = fpsim.quantize(nn.Linear(2, 1, bias=False), preset("tpu").policy())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1.0]]))
    x = torch.tensor([[1 + 2.0**-7, 2.0**-20]])
    assert layer(x).item() == 1 + 2.0**-7 + 2.0**-20  # no bf16 number: the sum is kept
    assert layer(torch.tensor([[1 + 2.0**-9, 0.0]])).item() == 1.0
    assert layer(torch.tensor([[2.0**-130, 0.0]])).item() == 0.0


def test_unknown_hardware_and_versions_are_refused_in_words() -> None:
    assert [one.full_name for one in presets_in("H100, tpu@1,h100")] == ["h100@1", "tpu@1"]
    with pytest.raises(ValueError, match=r"Unknown hardware 'h10'\. Did you mean 'h100'\? Known: h100"):
        preset("h10")
    with pytest.raises(ValueError, match=r"There is no 'h100@7'\. Expected: h100@1"):
        preset("h100@7")
    with pytest.raises(ValueError, match=r"The hardware is ''"):
        presets_in("h100,,tpu")


def test_the_page_has_every_preset_with_its_sources() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    for one in PRESETS.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{one.full_name}` "))
        for line in one.lines:
            assert line.what in row
            assert line.source in row
        for words in one.missing:
            assert words in row


# One step


def test_what_overflows_fp16_fails_there_and_nowhere_else() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x) * 2.0**18 / 2.0**18)  # 2**18 is beyond fp16, within cb16's 2**32

    found = on(["mi250", "cerebras"], Large, pair, loss=nn.functional.cross_entropy, seeds=0)
    fp16, cb16 = found.rows
    assert "mul" in fp16.failure
    assert fp16.breaks.startswith(":mul (activation)") or ":mul" in fp16.breaks
    assert (cb16.failure, cb16.breaks) == ("", "")
    assert "fails: nothing" in str(cb16)
    assert "not modelled: " in str(found)


def test_the_error_by_site_is_that_of_compare() -> None:
    (row,) = on("mi300", mlp, pair, loss=nn.functional.cross_entropy, seeds=0).rows
    model, (x, y) = made(0), pair_at_0()

    def step() -> torch.Tensor:
        total = nn.functional.cross_entropy(model(x), y)
        total.backward()
        return total

    rows = fpsim.compare(model, step, None, preset("mi300").policy(model))
    errors = {
        role: {r["site"]: r["relative"] for r in rows if r["role"] == role} for role in ("activation", "weight_grad")
    }
    assert row.losses == rows.losses
    assert dict(row.results).items() <= errors["activation"].items()
    assert row.gradients[0][1] == max(errors["weight_grad"].values())
    assert len(row.gradients) == 3


def pair_at_0() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return pair()


def test_a_gradient_that_is_noise_in_float32_is_not_named() -> None:
    """A bias before a normalisation: its gradient is zero but for roundings."""

    def net(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    (row,) = on("cerebras", net, pair, loss=nn.functional.cross_entropy, seeds=0).rows
    assert "0.bias" not in dict(row.gradients)
    assert max(error for _, error in row.gradients) < 0.1


def test_no_gradient_counts_as_noise_where_float64_draws_other_numbers() -> None:
    """Stochastic depth draws by `torch.rand`, which gives float64 others: nothing is known, and nothing is left out."""

    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            return self[1](x * (torch.rand(len(x), 1, dtype=x.dtype) > 0.5) * 2)

    def net(seed: int) -> nn.Module:
        return Net(nn.Linear(32, 16), nn.Linear(16, 4))

    (row,) = on("cerebras", net, pair, loss=nn.functional.cross_entropy, seeds=0).rows
    assert len(row.gradients) == 3


def test_bits_are_those_of_operands_and_results() -> None:
    tpu, fp4 = on(
        ["tpu", "b200_fp4"], lambda: nn.Linear(32, 16), lambda: torch.randn(8, 32), loss=torch.sum, seeds=0
    ).rows
    x, w, y = 8 * 32, 32 * 16, 8 * 16
    assert tpu.moved_float32 == 3 * (x + w + y) * 4
    # operands in 16 bits; y, dx and dw in 32
    assert tpu.moved == 2 * (x + w) + 4 * y + 2 * (y + w) + 4 * x + 2 * (y + x) + 4 * w
    assert tpu.weight_bits == 16
    # a scale of 8 bits for 16 numbers, and for tiles of 16 x 16; y and dx in 16 bits, and dw in 32
    part, tile = 4.5 / 8, (4 + 8 / 256) / 8
    assert fp4.weight_bits == 8 * tile
    assert fp4.moved == part * x + tile * w + 2 * y + part * y + tile * w + 2 * x + part * (y + x) + 4 * w


def test_batches_and_losses_of_every_form_are_taken() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 2)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {"loss": (self.head(x) * scale).square().mean()}

    for given in (torch.ones(2, 32), (torch.ones(2, 32), 2.0), {"x": torch.ones(2, 32), "scale": 2.0}):
        (row,) = on("tpu", Own, lambda given=given: given, seeds=0).rows
        assert row.losses is not None
    with pytest.raises(TypeError, match=r"gave no loss for the batch\. Expected: an output with a `loss`"):
        on("tpu", mlp, lambda: torch.ones(2, 32), seeds=0)
    with pytest.raises(TypeError, match=r"Expected for a loss of two arguments: a pair"):
        on("tpu", mlp, lambda: torch.ones(2, 32), loss=nn.functional.mse_loss, seeds=0)
    with pytest.raises(TypeError, match=r"The function of the model gave 3"):
        on("tpu", lambda: 3, lambda: torch.ones(2, 32), seeds=0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"seeds=2 decide nothing\. Expected: 3 or more, or 0"):
        on("tpu", mlp, pair, seeds=2)


class Routed(nn.Module):
    """A router that argmax reads, and two experts. Of ones the second score is 1 + 2^-10, and 1 - 2^-10 in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(2, 2, bias=False), nn.ModuleList(nn.Linear(2, 3) for _ in range(2))
        with torch.no_grad():
            self.router.weight.copy_(torch.tensor([[1.0, 0.0], [1 + 2.0**-9, -(2.0**-10)]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        return torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]


def test_tokens_that_go_to_other_experts_are_counted_and_do_not_count_as_lost() -> None:
    def batch() -> torch.Tensor:
        return torch.ones(8, 2)

    (row,) = on("tpu", Routed, batch, loss=lambda output: output.square().mean(), seeds=0).rows
    assert row.choices == 1.0
    assert "choices: 100.0% of the rows" in " ".join(str(row).split())
    assert row.breaks == ""
    (plain,) = on("tpu", lambda: made(0), pair, loss=nn.functional.cross_entropy, seeds=0).rows
    assert plain.choices == 0.0
    assert "choices" not in str(plain)


# Trainings


def test_a_short_training_is_beside_float32_with_the_same_data_and_weights() -> None:
    told: list[int] = []
    found = on(
        "tpu",
        mlp,
        lambda step: pair(),
        loss=nn.functional.cross_entropy,
        steps=5,
        seeds=3,
        progress=lambda: told.append(1),
    )
    (row,) = found.rows
    assert len(told) == runs("tpu", 3) == 7  # of float32 three, of the TPU three and its row
    assert len(row.trained) == len(row.float32) == 3
    assert row.trained != row.float32
    assert max(abs(a - b) for a, b in zip(row.trained, row.float32, strict=True)) < 0.01
    assert "in float32, after 5 steps with 3 seeds: worse by no more than" in row.verdict
    # by hand, in float32: AdamW from the weights of each seed
    model = made(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        torch.manual_seed(step)
        x, y = pair()
        total = nn.functional.cross_entropy(model(x), y)
        losses.append(total.item())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert row.float32[1] == losses[-1]


def test_a_training_that_diverges_says_so() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) * 1e6) / 1e6  # beyond fp16

    (row,) = on("mi250", Growing, pair, loss=nn.functional.cross_entropy, steps=3, seeds=3).rows
    assert all(map(math.isinf, row.trained))
    assert row.verdict.startswith("3 of 3 seeds diverged, ")


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ([1.0012345, 1.1023456, 0.9001234], "worse by no more than 0.01 (1 %)"),
        ([2.0012345, 2.1023456, 1.9001234], "worse by more than 0.01 (1 %)"),
        ([1.0012345, 1.2023456, 0.8001234], "open whether it is worse by more than 0.01 (1 %)"),
        ([math.inf, 1.1023456, 0.9001234], "1 of 3 seeds diverged"),
    ],
)
def test_the_verdict_is_that_of_the_planted_truth(trained: list[float], words: str) -> None:
    one = preset("tpu")
    assert words in _verdicts([one], {one: trained}, [1.0012346, 1.1023457, 0.9001235], 10)[one]


def test_nothing_is_said_where_float32_diverged_or_ends_at_zero() -> None:
    one = preset("tpu")
    assert _verdicts([one], {}, [math.inf, 1.0, 1.0], 10)[one].startswith("float32 diverged")
    zero = _verdicts([one], {one: [0.0, 0.001, -0.001]}, [0.001, -0.001, 0.0], 10)[one]
    assert zero.endswith("Too near to 0 for a verdict")
    assert _verdicts([one], {}, [], 10) == {}


def test_every_outcome_has_words() -> None:
    for outcome in ("match", "short", "worse", "collapsed", "undecided"):
        found = Judgement(outcome, 0.0, (0.0, 0.0), 1.0, 0.0, 101 if outcome == "undecided" else 0, (1,))
        assert _in_words(found, 0.01)


# The command


MINE = """
import torch
from torch import nn

def make(seed):
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

def batch(step):
    return torch.randn(4, 32), torch.arange(4)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def test_the_command_answers_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    words = ["on", "h100,tpu", f"{file}:make", "--batch", f"{file}:batch", "--loss", f"{file}:loss", "--fast"]
    done = CliRunner().invoke(app, [*words, "--steps", "2", "--seeds", "3"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("h100@1: NVIDIA H100")
    assert "\ntpu@1: Google TPU" in done.output
    assert done.output.count("  trains: loss ") == 2
    as_json = json.loads(CliRunner().invoke(app, [*words, "--seeds", "0", "--json"]).stdout)
    assert [row["preset"] for row in as_json["rows"]] == ["h100@1", "tpu@1"]


def test_the_list_has_the_source_of_each_line() -> None:
    done = CliRunner().invoke(app, ["on", "--list"])
    assert done.exit_code == 0
    for one in PRESETS.values():
        assert f"{one.full_name}: {one.hardware}" in done.output
        assert all(f"[{line.source}]" in done.output for line in one.lines)
    listed = json.loads(CliRunner().invoke(app, ["on", "--list", "--json"]).output)
    assert listed == [described(one) for one in PRESETS.values()]


def test_a_file_on_the_command_line_may_define_dataclasses_and_fail_to_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Width:\n    inputs: int = 8\n\ndef make():\n    return Width()\n"
    )
    width = function_at(f"{tmp_path}/mine.py:make", "model")()
    assert pickle.loads(pickle.dumps(width)) == width
    (tmp_path / "bad.py").write_text("1 / 0\n")
    before = {*sys.modules}
    with pytest.raises(ZeroDivisionError):
        function_at(f"{tmp_path}/bad.py:make", "model")
    assert {*sys.modules} == before


def test_what_the_command_cannot_find_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("three = 3\n")
    assert CliRunner().invoke(app, ["on"]).exit_code == 2
    with pytest.raises(ValueError, match=r"The model is 'mine'\. Expected: FILE:function"):
        function_at("mine", "model")
    with pytest.raises(ValueError, match=r"There is no file .*other\.py"):
        function_at(f"{tmp_path}/other.py:make", "model")
    with pytest.raises(ValueError, match=r"has no 'make'\. Expected: a function of the model"):
        function_at(f"{tmp_path}/mine.py:make", "model")
    with pytest.raises(ValueError, match=r"is a int\. Expected: a function of the batch"):
        function_at(f"{tmp_path}/mine.py:three", "batch")
    assert function_at("torch.nn:Linear", "model") is nn.Linear
    assert str(On([])).startswith("Sources of each line")
