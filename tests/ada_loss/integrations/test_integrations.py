"""Accelerate, transformers' Trainer and Lightning, the real ones, against the same steps with torch alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import ada_loss
import fpsim
from ada_loss import GradScaler, Job
from ada_loss.rules import loss_rule

STEPS, NORM, RATE = 6, 0.5, 0.1
FORMAT = "e5m2"


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4 * STEPS, 6, generator=generator)
    return x, (x[:, 0] > 0).long()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


SMALL = 2.0**-20  # of a gradient, which is then lost in float16 without a scale


class Native(nn.Module):
    """It trains in real float16: its forward asks for it. The gradient that arrives is multiplied by `small`."""

    def __init__(self, device: str = "cpu", small: float = 1.0, is_half: bool = False, enabled: bool = True) -> None:
        super().__init__()
        self.net, self.device, self.small = network(), device, small
        self.is_half, self.enabled = is_half, enabled and device == "cpu" and not is_half  # on a GPU the loop casts
        if is_half:
            self.net.half()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.float16, enabled=self.enabled):
            y = self.net(x.half() if self.is_half else x)
        return y if self.small == 1.0 else y.float() * self.small + y.detach().float() * (1.0 - self.small)


def expected(
    scaling: Any = 1024.0, fmt: str = FORMAT, native: nn.Module | None = None
) -> tuple[list[Tensor], list[float], list[float]]:
    """Parameters, losses and scales of the loop by hand, with `GradScaler` alone."""
    model = fpsim.quantize(network(), fmt) if native is None else native
    optimizer = sgd(model)
    rule = scaling if isinstance(scaling, str) else loss_rule("static", scale=scaling, skip_overflow=True)
    scaler = GradScaler(layers=model) if scaling == "layers" else GradScaler(rule)
    losses, scales = [], []
    for x, y in zip(data()[0].split(4), data()[1].split(4)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return [p.detach().clone() for p in model.parameters()], losses, scales


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are as large where gradients are small. Adam's states of half weights take no float32 gradients."""
    return torch.optim.SGD(model.parameters(), lr=RATE / getattr(model, "small", 1.0))


def same(model: nn.Module, parameters: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("scaling", [1024.0, "torch"])
def test_accelerate_takes_the_steps_of_the_loop_by_hand(scaling: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    from ada_loss.integrations.huggingface import use_scaler

    parameters, losses, scales = expected(scaling)
    job = Job(FORMAT, scaling=scaling)
    model = job.quantize(network())
    accelerator = accelerate.Accelerator(cpu=True)
    use_scaler(accelerator, job.scaler())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader([*zip(*data())], batch_size=4))
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        job.log(step, loss=loss)
    job.close()
    assert same(model, parameters)
    assert [value for _, value in job.curves["loss"]] == losses
    assert job.scales == scales
    with pytest.raises(ValueError, match="Call use_scaler before"):
        use_scaler(accelerator, job.scaler())
    with pytest.raises(TypeError, match=r"Expected: an accelerate\.Accelerator"):
        use_scaler(model, job.scaler())


LOOPS = ["accelerate", "trainer", "lightning"]
SCALINGS = [("nnabla", False), ("layers", False), ("layers", True)]


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize(
    ("loop", "scaling", "is_half"),
    [(loop, *scaling) for loop in LOOPS for scaling in SCALINGS],
    keep=lambda _, scaling, __: scaling == "layers",
)
def test_a_model_that_casts_to_float16_itself_is_trained_as_by_hand(
    tmp_path: Path, loop: str, scaling: str, is_half: bool
) -> None:
    pytest.importorskip("lightning.pytorch" if loop == "lightning" else "accelerate")
    small = SMALL if scaling == "layers" else 1.0
    parameters, _, scales = expected(scaling, native=Native(small=small, is_half=is_half))
    exact, _, _ = expected("off", native=Native(small=small, enabled=False))
    assert not all(map(torch.equal, parameters, exact))
    model: nn.Module = Native(small=small, is_half=is_half)
    scaler = GradScaler(layers=model) if scaling == "layers" else GradScaler(scaling)
    seen: list[float] = []
    model.register_forward_hook(lambda *_: seen.append(scaler.get_scale()))
    optimizer = sgd(model)
    if loop == "accelerate":
        import accelerate

        from ada_loss.integrations.huggingface import use_scaler

        accelerator = accelerate.Accelerator(cpu=True)
        use_scaler(accelerator, scaler)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader([*zip(*data())], batch_size=4))
        for x, y in loader:
            loss = F.cross_entropy(prepared(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), NORM)
            optimizer.step()
    elif loop == "trainer":
        trainer_of(Classifier(model), optimizer, scaler, tmp_path).train()
    else:
        fit(model, optimizer, scaler, tmp_path)
    assert same(model, parameters)
    assert seen == scales


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_quantised_model_inside_of_bfloat16_is_trained_as_by_hand(tmp_path: Path, loop: str) -> None:
    """The format is emulated inside of real bfloat16 tensors: what the loop by hand does, a loop with a scaler does."""
    pytest.importorskip("lightning.pytorch" if loop == "lightning" else "accelerate")

    class Cast(nn.Module):  # as the loops cast: around the forward alone
        def __init__(self) -> None:
            super().__init__()
            self.net = fpsim.quantize(network(), FORMAT)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.net(x)
            return y.float()

    parameters, _, _ = expected(1024.0, native=Cast())
    assert not all(map(torch.equal, parameters, expected(1024.0)[0]))  # beside float32 tensors it is another training
    model = fpsim.quantize(network(), FORMAT)
    optimizer, scaler = sgd(model), GradScaler(loss_rule("static", scale=1024.0, skip_overflow=True))
    if loop == "accelerate":
        import accelerate

        from ada_loss.integrations.huggingface import use_scaler

        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        use_scaler(accelerator, scaler)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader([*zip(*data())], batch_size=4))
        for x, y in loader:
            loss = F.cross_entropy(prepared(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), NORM)
            optimizer.step()
        accelerate.state.AcceleratorState._reset_state(True)
    elif loop == "trainer":
        import accelerate

        accelerate.state.AcceleratorState._reset_state(True)
        trainer_of(Classifier(model), optimizer, scaler, tmp_path, bf16=True).train()
        accelerate.state.AcceleratorState._reset_state(True)
    else:
        fit(model, optimizer, scaler, tmp_path, "bf16-mixed")
    assert same(model, parameters)


@pytest.mark.filterwarnings("ignore")
def test_a_format_that_half_tensors_cannot_hold_names_the_option_to_leave_out(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    model = fpsim.quantize(network(), "fp16")
    x = data()[0][:4]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError) as error:
        model(x)
    for option in ("precision='bf16-mixed' of Lightning", "mixed_precision='bf16' of Accelerate", "bf16=True of"):
        assert option in str(error.value)
    with pytest.raises(RuntimeError, match=r"Leave it out.*precision='bf16-mixed' of Lightning"):
        fit(model, sgd(model), GradScaler(), tmp_path, "bf16-mixed")
    with pytest.raises(RuntimeError, match=r"with model\.float\(\)"):
        fpsim.quantize(network().bfloat16(), "fp16")(x.bfloat16())

    def train(job: Job) -> dict[str, float]:
        half = job.quantize(network(job.seed).bfloat16())
        return {"loss": float(F.cross_entropy(half(x.bfloat16()).float(), data()[1][:4]))}

    results = ada_loss.sweep(None, ["e5m2"], train=train, out=tmp_path / "sweep", show_progress=False)
    assert [row["format"] for row in results.rows()] == ["e5m2"]  # which bfloat16 holds
    (failure,) = results.failures()
    assert failure["config"]["format"] == "fp32"  # the baseline
    assert "a model that has half parameters with model.float()" in failure["error"]


@pytest.mark.filterwarnings("ignore")
def test_what_a_loop_does_not_scale_or_cast_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    from ada_loss.integrations.huggingface import use_scaler

    accelerate.state.AcceleratorState._reset_state(True)
    for scaler, precision, words in (
        (GradScaler(), "fp16", "casts nothing on cpu"),
        (GradScaler(layers=network()), "fp16", "casts nothing on cpu"),
        (GradScaler(layers=network()), "bf16", r"needs no loss scale, and GradScaler\(layers=...\) scales float16"),
    ):
        with pytest.raises(ValueError, match=words):
            use_scaler(accelerate.Accelerator(cpu=True, mixed_precision=precision), scaler)
        accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    use_scaler(accelerator, GradScaler())
    with pytest.raises(
        ValueError, match=r"needs no loss scale, and Sequential is not quantised\. Leave use_scaler out"
    ):
        accelerator.prepare(network())
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    for loop in (accelerate.DistributedType.DEEPSPEED, accelerate.DistributedType.MEGATRON_LM):
        monkeypatch.setattr(accelerator.state, "distributed_type", loop)
        with pytest.raises(ValueError, match=f"{loop.value} scales losses itself"):
            use_scaler(accelerator, GradScaler())
    accelerate.state.AcceleratorState._reset_state(True)
    pytest.importorskip("lightning.pytorch")
    from ada_loss.integrations.lightning import ScaledPrecision

    with pytest.raises(ValueError, match="Expected: '32-true', '16-mixed', 'bf16-mixed'"):
        ScaledPrecision(GradScaler(), "bf16-true")
    with pytest.raises(ValueError, match=r"needs no loss scale, and GradScaler\(layers=...\) scales float16"):
        ScaledPrecision(GradScaler(layers=network()), "bf16-mixed")
    with pytest.raises(
        ValueError, match=r"needs no loss scale, and nothing in .* is quantised\. Leave ScaledPrecision out"
    ):
        fit(network(), None, GradScaler(), tmp_path, "bf16-mixed")
    with pytest.raises(ValueError, match="where precision='16-mixed' casts nothing"):
        ScaledPrecision(GradScaler(), "16-mixed").pre_backward(torch.ones(()), None)
    with pytest.raises(ValueError, match="LBFGS calls its closure several times"):
        fit(network(), torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), GradScaler(), tmp_path)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", ["nnabla", "layers"])
@pytest.mark.parametrize("loop", ["trainer", "lightning"])
def test_float16_of_a_loop_on_a_card_is_trained_as_by_hand(tmp_path: Path, loop: str, scaling: str) -> None:
    small = SMALL if scaling == "layers" else 1.0
    model, by_hand = Native("cuda", small), Native("cuda", small)

    def scaler_of(net: nn.Module) -> GradScaler:
        return GradScaler(layers=net) if scaling == "layers" else GradScaler(scaling)

    optimizer = sgd(model)
    if loop == "trainer":
        from ada_loss.integrations.huggingface import use_scaler

        trainer_of(Classifier(model), optimizer, scaler_of(model), tmp_path, fp16=True, use_cpu=False).train()
        trainer = trainer_of(
            Classifier(fpsim.quantize(network(), FORMAT)), None, None, tmp_path, fp16=True, use_cpu=False
        )
        use_scaler(trainer, GradScaler())
        with pytest.raises(ValueError, match=r"Classifier is quantised, and mixed_precision='fp16'"):
            trainer.train()
    else:
        fit(model, optimizer, scaler_of(model), tmp_path, "16-mixed")
    scaler, optimizer = scaler_of(by_hand.cuda()), sgd(by_hand)
    for x, y in zip(data()[0].cuda().split(4), data()[1].cuda().split(4)):
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(by_hand(x).float() if loop == "lightning" else by_hand(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(by_hand.parameters(), NORM)
        scaler.step(optimizer)
        scaler.update()
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(data()[0])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": data()[0][i], "labels": data()[1][i]}


class Classifier(nn.Module):
    """What transformers' Trainer trains: a forward that gives its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def trainer_of(
    model: nn.Module, optimizer: Any, scaler: GradScaler | None, folder: Path, log: Any = None, **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    from ada_loss.integrations.huggingface import tell, use_scaler

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=NORM,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{"use_cpu": True, **options},
    )

    class InOrder(Trainer):  # the one thing that is not the library's: the order of the data
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(Rows())

    callbacks = [] if log is None else [tell(log)]
    trainer = InOrder(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None), callbacks=callbacks)
    if scaler is not None:
        use_scaler(trainer, scaler)
    return trainer


def trainer_with(job: Job, folder: Path) -> Any:
    model = Classifier(job.quantize(network()))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return trainer_of(model, optimizer, job.scaler(), folder, job.log)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", [1024.0, "torch"])
def test_transformers_trainer_takes_the_steps_of_the_loop_by_hand(tmp_path: Path, scaling: Any) -> None:
    pytest.importorskip("accelerate")
    parameters, losses, scales = expected(scaling)
    job = Job(FORMAT, scaling=scaling)
    trainer = trainer_with(job, tmp_path)
    trainer.train()
    job.close()
    assert same(trainer.model, parameters)
    assert [value for _, value in job.curves["loss"]] == pytest.approx(losses, abs=1e-4)  # the Trainer rounds them
    assert job.scales == scales


def fit(
    net: nn.Module, optimizer: Any, scaler: GradScaler, folder: Path, precision: str = "32-true", log: Any = None
) -> tuple[Any, Any]:
    """A LightningModule and the Trainer that has trained it."""
    import lightning.pytorch as lightning

    from ada_loss.integrations.lightning import ScaledPrecision, Tell

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    module = Module()
    trainer = lightning.Trainer(
        accelerator="gpu" if precision == "16-mixed" else "cpu",
        max_epochs=1,
        gradient_clip_val=NORM,
        plugins=[ScaledPrecision(scaler, precision)],
        callbacks=[] if log is None else [Tell(log)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, DataLoader([*zip(*data())], batch_size=4))
    return module, trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", [1024.0, "torch"])
def test_lightning_takes_the_steps_of_the_loop_by_hand(tmp_path: Path, scaling: Any) -> None:
    pytest.importorskip("lightning.pytorch")
    parameters, losses, scales = expected(scaling)
    job = Job(FORMAT, scaling=scaling)
    net = job.quantize(network())
    module, trainer = fit(net, torch.optim.SGD(net.parameters(), lr=RATE), job.scaler(), tmp_path, log=job.log)
    job.close()
    assert same(module, parameters)
    assert [value for _, value in job.curves["loss"]] == losses
    assert job.scales == scales
    state = copy.deepcopy(trainer.precision_plugin.state_dict())
    trainer.precision_plugin.load_state_dict(state)
    assert job.scaler().get_scale() == GradScaler.get_scale(trainer.precision_plugin.scaler)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_that_lightning_skips_calls_the_hooks_of_a_step_and_changes_nothing(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins.precision import Precision

    from ada_loss.integrations.lightning import ScaledPrecision

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = network(), []

        def training_step(self, batch: Any, index: int) -> Tensor | None:
            return None if index % 2 else F.cross_entropy(self.net(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append([p.detach().clone() for p in self.parameters()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    def trained(precision: Any) -> Any:
        module = Module()
        options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, plugins=[precision], enable_model_summary=False,
            default_root_dir=str(tmp_path), **options,
        )  # fmt: skip
        trainer.fit(module, DataLoader([*zip(*data())], batch_size=4))
        return module

    plain, scaled = trained(Precision()), trained(ScaledPrecision(GradScaler(init_scale=1024.0), "32-true"))
    assert len(scaled.seen) == len(plain.seen) > 2
    for ours, theirs in zip(scaled.seen, plain.seen, strict=True):
        assert all(map(torch.equal, ours, theirs))  # a power of two, in float32: the same bits


def with_trainer(job: Job) -> dict[str, float]:
    trainer = trainer_with(job, Path(job.options["folder"]))
    return {"train_loss": trainer.train().training_loss}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
def test_a_sweep_runs_over_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    results = ada_loss.sweep(
        train=with_trainer,
        formats=["fp16"],
        scaling=["none", "torch"],
        seeds=2,
        task_options={"folder": str(tmp_path)},
        out=tmp_path / "out",
        show_progress=False,
    )
    assert [row["format"] for row in results.rows()] == ["fp32"] * 2 + ["fp16"] * 4
    assert all(len(curve.steps) == STEPS for curve in results.curves("loss"))
