"""A valid call of every public callable: what the generated test of arguments starts from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import ada_loss
import fpsim

Made = tuple[Callable[..., Any], dict[str, Any]]


class Call(NamedTuple):
    """A public callable and how to call it.

    name: "quantize", "Policy.with_rounding".
    make: gives, new for each call, the callable and valid arguments by name.
    """

    name: str
    make: Callable[[], Made]

    def arguments(self) -> list[str]:
        """Every argument of the signature, and those that are given besides."""
        function, valid = self.make()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds]
        return [*named, *(name for name in valid if name not in named)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def quantised(fmt: Any = "fp16") -> Any:
    return fpsim.quantize(model(), fmt, inplace=True)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))


def ids() -> torch.Tensor:
    return torch.arange(6).reshape(2, 3) % 4


def batch() -> torch.Tensor:
    return torch.ones(2, 2)


def _dumped() -> fpsim.Dump:
    return fpsim.dump(language_model(), ids(), Path(Folder.path) / "b.safetensors")


def sgd(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=0.1)


def entered(manager: Any) -> None:
    """Enter a context manager and leave it."""
    with manager:
        pass


def _emulate(fmt: Any, rounding: Any = None) -> None:
    entered(fpsim.emulate(fmt, rounding))


def _record(model: Any, every: Any = 1, into: Any = None) -> None:
    with fpsim.record(model, every, into):
        model(batch())


def _snapshots(model: Any, folder: Any, sites: Any = "*", roles: Any = "error", every: Any = 1) -> None:
    with fpsim.snapshots(model, folder, sites, roles, every):
        pass


def _snapshot_file() -> str:
    found = quantised()
    with fpsim.snapshots(found, Path(Folder.path) / "tensors") as kept:
        found(batch()).sum().backward()
    return str(kept.files[0])


def _compare() -> Made:
    return fpsim.compare, {"model": model(), "a": None, "b": "fp16", "batch": batch()}


def _diagnose() -> Made:
    m = model()
    return fpsim.diagnose, {"model": m, "step": lambda: m(batch()).sum().backward()}


def _why() -> Made:
    m, x = model(), batch()
    return fpsim.why, {"model": m, "step": lambda: m(x).sum().backward()}


def _watch(model: Any, formats: Any = ("fp16",), every: Any = 1000, optimizer: Any = None) -> None:
    fpsim.watch(model, formats=formats, every=every, optimizer=optimizer).detach()


def _watching() -> fpsim.Watch:
    m = model()
    found = fpsim.watch(m, ["fp16"], every=1)
    m(batch()).sum().backward()
    found.detach()
    return found


def _scaled(model: Any, **options: Any) -> None:
    ada_loss.AdaLossScaled(model, **options).detach()


_scaled.__signature__ = inspect.signature(ada_loss.AdaLossScaled)  # type: ignore[attr-defined]


def scaled_after_a_step() -> ada_loss.AdaLossScaled:
    scaled = ada_loss.AdaLossScaled(quantised())
    scaled(batch()).sum().backward()
    return scaled


def _updater() -> Made:
    m, scaler = model(), ada_loss.GradScaler("torch")
    words = {"optimizer": sgd(m), "loss_fn": lambda x: m(x).sum(), "data_feeder": batch, "scaler": scaler}
    return ada_loss.Updater, words


def train(job: Any) -> dict[str, float]:
    """A training function of a sweep."""
    for step in range(3):
        job.log(step, loss=1.0)
    return {"accuracy": 1.0}


class Folder:
    """A folder with a sweep in it."""

    path: Path

    @classmethod
    def results(cls) -> Any:
        return ada_loss.Results(cls.path)


def _in_folder(function: Callable[..., Any], /, **valid: Any) -> Callable[[], Made]:
    return lambda: (function, {**valid, "out": Folder.path})


def _export() -> Made:
    path = Folder.path.with_name(f"exported-{len([*Folder.path.parent.iterdir()])}")
    return fpsim.export, {"model": quantised(fpsim.Policy(weight="e4m3fn")), "folder": path, "weights_only": False}


def _recorded() -> fpsim.Recording:
    """A recording of one step."""
    found = quantised()
    with fpsim.record(found) as recording:
        found(batch()).sum().backward()
    return recording


def _recorded_scales() -> ada_loss.Recorder:
    """The scales of one step."""
    found = quantised()
    scaled = ada_loss.AdaLossScaled(found)
    scaled.observer = recorder = ada_loss.Recorder()
    found(batch()).sum().backward()
    scaled.detach()
    return recorder


def _job() -> Any:
    return ada_loss.Job("fp16")


def _lost() -> fpsim.LostUpdates:
    return fpsim.lost_updates(fpsim.quantize_optimizer(sgd(model()), "bf16_sr"))


def _quantised_job() -> Any:
    job = _job()
    job.quantize(model())
    return job


def _task() -> Made:
    pair = torch.ones(2, 2), torch.ones(2)
    loss, metrics = nn.functional.mse_loss, {"m": lambda y, t: 0.0}
    return ada_loss.Task, {"name": "t", "model": model(), "train": pair, "test": pair, "loss": loss, "metrics": metrics}


def a_task(seed: int) -> ada_loss.Task:
    """A task of a search."""
    function, words = _task()
    return function(**words)


def _constructor(kind: Any, /, **valid: Any) -> Callable[[], Made]:
    return lambda: (kind, dict(valid))


def _method(owner: Callable[[], Any], name: str, /, **valid: Any) -> Callable[[], Made]:
    return lambda: (getattr(owner(), name), dict(valid))


def _scaler_with_a_gradient() -> Any:
    m, scaler = model(), ada_loss.GradScaler("torch")
    scaler.scale(m(batch()).sum()).backward()
    scaler.optimizer = sgd(m)  # type: ignore[attr-defined]
    return scaler


def _verb(name: str, /, **valid: Any) -> Callable[[], Made]:
    def make() -> Made:
        scaler = _scaler_with_a_gradient()
        if name in ("clip_", "overflowed"):
            scaler.unscale_(scaler.optimizer)
        return getattr(scaler, name), {"optimizer": scaler.optimizer, **valid}

    return make


def _policy() -> Any:
    return fpsim.Policy("fp16", "fp16")


def _sensitivity() -> Any:
    return fpsim.sensitivity(model(), lambda m: m(batch()).sum(), "fp16")


X = {"x": torch.tensor([1.0, 2.0]), "fmt": "fp16"}
SWEEP = {"train": train, "formats": ["fp16"], "show_progress": False}
# fmt: off
# ruff: noqa: E501  # a line for each
CALLS = [
    Call("round_to", lambda: (fpsim.round_to, {**X})),
    Call("round_to of blocks", lambda: (fpsim.round_to, {"x": torch.ones(2, 32), "fmt": "mxfp4", "axis": 1})),
    Call("round_to_", lambda: (fpsim.round_to_, {"x": torch.tensor([1.0]), "fmt": "fp16"})),
    Call("tally", lambda: (fpsim.tally, {**X})),
    Call("scales_of", lambda: (fpsim.scales_of, {"x": torch.ones(4, 32), "fmt": "mxfp4", "axis": 1})),
    Call("encode", lambda: (fpsim.encode, {**X})),
    Call("encode of blocks", lambda: (fpsim.encode, {"x": torch.ones(2, 32), "fmt": "mxfp4", "axis": 1})),
    Call("BlockCodes", _constructor(fpsim.BlockCodes, fmt=fpsim.as_format("mxfp4"), shape=(1, 4), codes=torch.zeros(1, 2).byte(), scales=torch.zeros(1, 1).byte())),
    Call("decode", _constructor(fpsim.decode, codes=torch.tensor([1]), fmt="fp16")),
    Call("changes_since", _constructor(fpsim.changes_since, bits=1)),
    Call("as_format", _constructor(fpsim.as_format, fmt="fp16")),
    Call("as_accumulator", _constructor(fpsim.as_accumulator, accumulator="fp32")),
    Call("hadamard", lambda: (fpsim.hadamard, {"x": torch.ones(2, 4), "transform": fpsim.Hadamard(4)})),
    Call("all_reduce", lambda: (fpsim.all_reduce, {"tensors": [batch(), batch()], "fmt": "bf16", "order": "ring"})),
    Call("Ranks", lambda: (fpsim.Ranks, {"model": model(), "fmt": "bf16", "order": "ring", "averages": True, "bucket_cap_mb": 25.0})),
    Call("Ranks.run", _method(lambda: fpsim.Ranks(model()), "run", step=lambda x: x, batches=[1, 2])),
    Call("matmul", lambda: (fpsim.matmul, {"a": batch(), "b": batch(), "accumulator": "fp16"})),
    Call("manual_seed", _constructor(fpsim.manual_seed, seed=1)),
    Call("warm_up", _constructor(fpsim.warm_up, device="cpu", formats=["fp16"], roundings=["nearest_even"], variants=["A"])),
    Call("recipe", _constructor(fpsim.recipe, name="nvfp4")),
    Call("profile", lambda: (fpsim.profile, {"names": ("hf_bf16", "fp8_w8a8"), "model": model()})),
    Call("as_policy", _constructor(fpsim.as_policy, fmt="fp16", rounding="stochastic", overflow="saturate", model=None)),
    Call("Accumulator", _constructor(fpsim.Accumulator, format="fp32")),
    Call(
        "BlockFormat",
        _constructor(
            fpsim.BlockFormat, element=fpsim.as_format("e4m3fn"), block=32, scale=fpsim.as_format("e8m0fnu"), scale_rule="floor"
        ),
    ),
    Call("Choose", _constructor(fpsim.Choose, candidates=("floor", "ceil"))),
    Call("Delayed", _constructor(fpsim.Delayed)),
    Call("Codebook", _constructor(fpsim.Codebook, values=(-1.0, 0.0, 1.0))),
    Call("Codebook.encode", _method(lambda: fpsim.as_format("nf4"), "encode", value=1.0)),
    Call("Codebook.decode", _method(lambda: fpsim.as_format("nf4"), "decode", code=1)),
    Call("Codebook.resolve_overflow", _method(lambda: fpsim.as_format("nf4"), "resolve_overflow")),
    Call("FixedPoint", _constructor(fpsim.FixedPoint, word_length=8)),
    Call("FixedPoint.resolve_overflow", _method(lambda: fpsim.FixedPoint(8), "resolve_overflow")),
    Call("FloatFormat", _constructor(fpsim.FloatFormat, exponent_bits=5, mantissa_bits=2)),
    Call("FloatFormat.encode", _method(lambda: fpsim.as_format("fp16"), "encode", value=1.0)),
    Call("FloatFormat.decode", _method(lambda: fpsim.as_format("fp16"), "decode", code=1)),
    Call("FloatFormat.resolve_overflow", _method(lambda: fpsim.as_format("fp16"), "resolve_overflow")),
    Call("Hadamard", _constructor(fpsim.Hadamard, size=16)),
    Call("Operand", _constructor(fpsim.Operand, fmt=fpsim.as_format("fp16"))),
    Call("Policy", _constructor(fpsim.Policy, weight="fp16")),
    Call("Policy.with_rounding", _method(_policy, "with_rounding", rounding="stochastic")),
    Call("Policy.with_stochastic_gradients", _method(_policy, "with_stochastic_gradients", most_bits=6)),
    Call("Policy.for_modules", lambda: (_policy().for_modules, {"model": model()})),
    Call("Attention", _constructor(fpsim.Attention, q="fp16", block_kv=4)),
    Call("Attention.with_rounding", _method(lambda: fpsim.Attention(q="fp16"), "with_rounding", rounding="up")),
    Call(
        "Attention.with_stochastic_gradients",
        _method(lambda: fpsim.Attention(q="fp16"), "with_stochastic_gradients", most_bits=6),
    ),
    Call("Attention.point", _method(lambda: fpsim.Attention(q="fp16"), "point", name="q")),
    Call("Products", _constructor(fpsim.Products, fprop=("fp16", "fp16"))),
    Call("Products.all", _constructor(fpsim.Products.all, fmt="fp16")),
    Call("Products.by_operand", _constructor(fpsim.Products.by_operand, x="fp16")),
    Call("Products.with_rounding", _method(lambda: fpsim.Products(("fp16", "fp16")), "with_rounding", rounding="up")),
    Call(
        "Products.with_stochastic_gradients",
        _method(lambda: fpsim.Products(("fp16", "fp16")), "with_stochastic_gradients", most_bits=6),
    ),
    Call("Rounder", _constructor(fpsim.Rounder, forward="fp16")),
    Call("Rounder.forward", lambda: (fpsim.Rounder("fp16").forward, {"x": batch()})),
    Call("Recording", _constructor(fpsim.Recording)),
    Call("Recording.continue_from", lambda: (fpsim.Recording().continue_from, {"other": fpsim.Recording()})),
    Call("Recording.load_state_dict", lambda: (fpsim.Recording().load_state_dict, {"state": fpsim.Recording().state_dict()})),
    Call("lost_updates", lambda: (fpsim.lost_updates, {"quantized": fpsim.quantize_optimizer(sgd(model()), "bf16_sr")})),
    Call("LostUpdates.load_state_dict", lambda: (_lost().load_state_dict, {"state": _lost().state_dict()})),
    Call("Update", _constructor(fpsim.Update, weight="bf16")),
    Call(
        "quantize_optimizer",
        lambda: (fpsim.quantize_optimizer, {"optimizer": sgd(model()), "update": fpsim.Update(weight="bf16")}),
    ),
    Call("quantize", lambda: (fpsim.quantize, {"model": model(), "fmt": "fp16"})),
    Call("dequantize", lambda: (fpsim.dequantize, {"model": quantised()})),
    Call("export", _export),
    Call("frozen", lambda: (fpsim.frozen, {"model": quantised()})),
    Call("set_policy", lambda: (fpsim.set_policy, {"model": quantised(), "fmt": "bf16"})),
    Call("round_parameters_", lambda: (fpsim.round_parameters_, {"model": quantised()})),
    Call("scaling_state", lambda: (fpsim.scaling_state, {"model": quantised()})),
    Call("load_scaling_state", lambda: (fpsim.load_scaling_state, {"model": quantised(), "state": {}})),
    Call("set_scaling_group", lambda: (fpsim.set_scaling_group, {"model": quantised(), "group": None})),
    Call("summary", lambda: (fpsim.summary, {"model": quantised()})),
    Call("emulate", _constructor(_emulate, fmt="fp16")),
    Call("record", lambda: (_record, {"model": quantised()})),
    Call("snapshots", lambda: (_snapshots, {"model": quantised(), "folder": str(Path(Folder.path) / "tensors")})),
    Call("Snapshot.load", lambda: (fpsim.Snapshot.load, {"path": _snapshot_file()})),
    Call("watch", lambda: (_watch, {"model": model()})),
    Call("Watch.table", _method(_watching, "table")),
    Call("Watch.policy", _method(_watching, "policy", underflow=1.0, overflow=1.0, sqnr_db=-100.0)),
    Call("Watch.suggest", _method(_watching, "suggest", underflow=1.0, overflow=1.0, sqnr_db=-100.0)),
    Call("Watch.plot", _method(_watching, "plot")),
    Call("compare", _compare),
    Call("Comparison.begins", lambda: (fpsim.compare(**_compare()[1]).begins, {})),
    Call("Comparison.grows", lambda: (fpsim.compare(**_compare()[1]).grows, {})),
    Call("Comparison.breaks", lambda: (fpsim.compare(**_compare()[1]).breaks, {})),
    Call("diagnose", _diagnose),
    Call("why", _why),
    Call("last_layers", lambda: (fpsim.last_layers, {"model": model(), "step": batch(), "loss": lambda out: out.sum()})),
    Call("mismatch", lambda: (fpsim.mismatch, {"a": language_model(), "b": language_model(), "batch": ids(), "attribution": "none"})),
    Call("dump", lambda: (fpsim.dump, {"model": language_model(), "batch": ids(), "file": Folder.path / "a.safetensors"})),
    Call("Dump", lambda: (fpsim.Dump, {"path": str(_dumped().path)})),
    Call("sensitivity", lambda: (fpsim.sensitivity, {"model": model(), "loss": lambda m: m(batch()).sum(), "policy": "fp16"})),
    Call("Sensitivity", lambda: (fpsim.Sensitivity, {"policy": _policy()})),
    Call("Sensitivity.policy", _method(_sensitivity, "policy", k=1)),
    Call("AdaLossScaled", lambda: (_scaled, {"model": quantised()})),
    Call("AdaLossScaled.detach_from", lambda: (ada_loss.AdaLossScaled.detach_from, {"model": quantised()})),
    Call("AdaLossScaled.last_log2_scale", _method(scaled_after_a_step, "last_log2_scale", site="0:linear")),
    Call("AdaLossScaled.log2_scales", _method(scaled_after_a_step, "log2_scales")),
    Call("AdaLossScaled.load_state_dict", lambda: (scaled_after_a_step().load_state_dict, {"state": scaled_after_a_step().state_dict()})),
    Call("AdaLossTransform", _constructor(ada_loss.AdaLossTransform, kind=nn.Linear)),
    Call("AdaLossTransform.matches", lambda: (ada_loss.AdaLossTransform(nn.Linear).matches, {"module": model()})),
    Call("GradScaler", _constructor(ada_loss.GradScaler, rule="torch", init_scale=2.0, growth_interval=3)),
    Call("GradScaler.scale", lambda: (ada_loss.GradScaler().scale, {"outputs": batch()})),
    Call("GradScaler.unscale_", _verb("unscale_")),
    Call("GradScaler.clip_", _verb("clip_", max_norm=1.0)),
    Call("GradScaler.step", _verb("step")),
    Call("GradScaler.overflowed", _verb("overflowed")),
    Call("GradScaler.update", lambda: (_scaler_with_a_gradient().update, {"new_scale": 2.0})),
    Call("GradScaler.set_growth_factor", _method(ada_loss.GradScaler, "set_growth_factor", new_factor=3.0)),
    Call("GradScaler.set_backoff_factor", _method(ada_loss.GradScaler, "set_backoff_factor", new_factor=0.5)),
    Call("GradScaler.set_growth_interval", _method(ada_loss.GradScaler, "set_growth_interval", new_interval=5)),
    Call("GradScaler.load_state_dict", lambda: (ada_loss.GradScaler().load_state_dict, {"state_dict": ada_loss.GradScaler().state_dict()})),
    Call("Updater", _updater),
    Call("layer_rule", _constructor(ada_loss.layer_rule, name="amax_history", length=4)),
    Call("loss_rule", _constructor(ada_loss.loss_rule, system="torch", init_scale=8.0, growth_factor=2.0, growth_interval=2)),
    Call("trajectory", lambda: (ada_loss.trajectory, {"rule": ada_loss.loss_rule("torch"), "oks": [True]})),
    Call("Recorder", _constructor(ada_loss.Recorder)),
    Call("Recorder.plot", _method(_recorded_scales, "plot")),
    Call("Recording.plot", _method(_recorded, "plot")),
    Call("Job", _constructor(ada_loss.Job, fmt="fp16", rounding="stochastic", scaling="torch", device="cpu")),
    Call("Job.quantize", lambda: (_job().quantize, {"model": model()})),
    Call("Job.scaler", lambda: (_quantised_job().scaler, {})),
    Call("Job.optimizer", lambda: (ada_loss.Job(update="bf16_sr").optimizer, {"optimizer": sgd(model())})),
    Call("Job.begin_step", _method(_quantised_job, "begin_step", step=0, steps=2)),
    Call("Job.log", _method(_job, "log", step=0, loss=1.0)),
    Call("Job.checkpoint", lambda: (_job().checkpoint, {"model": model()})),
    Call("Task", _task),
    Call("Results", _in_folder(ada_loss.Results)),
    Call("Results.table", _method(Folder.results, "table")),
    Call("Results.tables", _method(Folder.results, "tables")),
    Call("Results.best", _method(Folder.results, "best", metric="accuracy")),
    Call("Results.curves", _method(Folder.results, "curves", points=2)),
    Call("Results.verdicts", _method(Folder.results, "verdicts")),
    Call("Results.compare", _method(Folder.results, "compare", a="fp16", b="fp32")),
    Call("Results.cell", lambda: (Folder.results().cell, {"cell": Folder.results().cells[0]["id"]})),
    Call("Results.telemetry", lambda: (Folder.results().telemetry, {"cell": Folder.results().cells[0]["id"]})),
    Call("sweep", _in_folder(ada_loss.sweep, **SWEEP)),
    Call("sweep of a task", _in_folder(ada_loss.sweep, task="digits", formats=["fp16"], show_progress=False)),
    Call("resume", _in_folder(ada_loss.resume, trust=True, show_progress=False)),
    Call("search", _in_folder(ada_loss.search, task=a_task, show_progress=False)),
]
# fmt: on
