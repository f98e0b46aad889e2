"""Where a quantised optimizer runs: each way of docs/updates.md gives the weights of the plain loop, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fpsim
from fpsim import quantize_optimizer

PAGE = (Path(__file__).parents[3] / "docs" / "updates.md").read_text()
STEPS = 4
UPDATE = "bf16_sr"


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.ones(8, 1) * 0.1 * i)
        for i in range(STEPS)
    ]


class Net(nn.Module):
    """Takes and gives what the transformers library's Trainer wants; plain tensors will do, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.inner(x)
        return y if labels is None else {"loss": mse_loss(y, labels), "logits": y}


def new() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def plain() -> list[torch.Tensor]:
    model, optimizer = new()
    quantize_optimizer(optimizer, UPDATE, model)
    for x, y in data():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def assert_equal(model: nn.Module) -> None:
    found, wanted = weights(model), plain()
    assert all((p == p.bfloat16().float()).all() for p in wanted)
    assert not torch.equal(wanted[0], weights(Net())[0])
    assert all(map(torch.equal, found, wanted))


def test_a_plain_loop_with_accumulated_gradients_and_a_schedule():
    """As nanoGPT's: two halves of a batch, a scheduled rate set by hand, clipping, a GradScaler that is off."""
    model, optimizer = new()
    quantize_optimizer(optimizer, UPDATE, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in data():
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        for half, target in zip(x.split(4), y.split(4), strict=True):
            scaler.scale(mse_loss(model(half), target) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    stored = weights(model)
    assert all((p == p.bfloat16().float()).all() for p in stored)
    # sums of gradients in another order: a spacing of bfloat16 a step, below 2**-7 of the largest weight, 1
    assert all(torch.allclose(p, q, rtol=0, atol=STEPS * 2.0**-7) for p, q in zip(stored, plain(), strict=True))


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, optimizer = new()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    quantize_optimizer(optimizer, UPDATE, accelerator.unwrap_model(model))
    for x, y in data():
        optimizer.zero_grad()
        accelerator.backward(mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert_equal(accelerator.unwrap_model(model))


@pytest.mark.filterwarnings("ignore")  # of the library itself
def test_the_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, optimizer = new()
    quantized = quantize_optimizer(optimizer, UPDATE, model)
    samples = [{"x": a, "labels": b} for x, y in data() for a, b in zip(x, y, strict=True)]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    InOrder(model, arguments, train_dataset=samples, optimizers=(optimizer, schedule)).train()
    assert quantized.steps == STEPS
    assert_equal(model)


@pytest.mark.filterwarnings("ignore")  # of the library itself
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, weight_decay=0.01)
            quantize_optimizer(optimizer, UPDATE, self.net)
            return optimizer

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=None))
    assert_equal(module.net)


def test_a_compiled_step():
    model, optimizer = new()
    quantize_optimizer(optimizer, UPDATE, model)
    step = torch.compile(optimizer.step, backend="eager")
    for x, y in data():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()
    torch.compiler.reset()
    assert_equal(model)


def test_the_page_names_each_way_and_its_test():
    section = PAGE.partition("## Where it runs\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(test_\w+)`", section)
    assert named
    assert {*named} <= {*globals()} | {"test_shards_of_two_ranks_are_the_weights_of_one_process_bit_for_bit"}


def other(name: str, params: Any) -> torch.optim.Optimizer:
    """An optimizer of another library, with small steps and momentum where it has some."""
    if name == "transformers.Adafactor":
        module = pytest.importorskip("transformers.optimization", reason="transformers is not installed")
        return module.Adafactor(params, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9)
    if name == "optimi.Lion":
        module = pytest.importorskip("optimi", reason="torch-optimi is not installed")
        return module.Lion(params, lr=1e-4, foreach=False, triton=False)
    if name == "optimi.AdamW":
        module = pytest.importorskip("optimi", reason="torch-optimi is not installed")
        return module.AdamW(params, lr=1e-3, foreach=False, triton=False, kahan_sum=False)
    return torch.optim.Muon(params, lr=1e-3)


STATES = {
    "transformers.Adafactor": ["exp_avg"],  # with factors of rows and columns besides, which have other shapes
    "optimi.Lion": ["exp_avg"],
    "optimi.AdamW": ["exp_avg", "exp_avg_sq"],
    "torch.optim.Muon": ["momentum_buffer"],
}


@pytest.mark.parametrize("name", STATES)
def test_optimizers_of_other_libraries_store_weights_and_states(name):
    """States are found by name and by shape; a step in float32 is the plain one's, rounded once."""
    torch.manual_seed(0)
    value = torch.randn(8, 8).bfloat16().float()
    results = []
    for update in (None, fpsim.Update(weight="bf16", states="bf16")):
        p = nn.Parameter(value.clone())
        optimizer = other(name, [p])
        if update is not None:
            quantize_optimizer(optimizer, update)
        p.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        results.append((p.detach(), {k: optimizer.state[p][k].clone() for k in STATES[name]}))
    (p, states), (q, stored) = results
    assert torch.equal(q, p.bfloat16().float())
    assert not torch.equal(p, q)
    for key, x in states.items():
        assert torch.equal(stored[key].float(), x.float().bfloat16().float()), key
