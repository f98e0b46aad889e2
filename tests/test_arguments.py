"""Every public callable refuses what an argument cannot be: an error of ours that names the argument and what came.

The cases are generated: each argument of each callable of `border_calls.CALLS`, the others valid, is given the values
of `border_values`. What may pass all the same is listed here with its reason.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib
import pytest
import tiers
import torch
from border_calls import CALLS, Call, Folder, batch, model, quantised, train
from border_values import Outcome, Reached, near_values, outcome, wrong_values
from torch import nn

import ada_loss
import fpsim
from ada_loss.lab.studies import search as searches
from ada_loss.lab.sweep import driver

PARTS = 4  # without `-m slow` each argument is given one value in four

A_FORMAT, A_WORD = ("format", "recipe", "share no scale"), ("unknown",)
# What an error calls an argument, where that is not its name.
WORDS = {
    **dict.fromkeys("fmt a b weight activation error weight_grad forward backward formats policy".split(), A_FORMAT),
    **dict.fromkeys("element scale product outer split_format format master states".split(), A_FORMAT),
    **dict.fromkeys("backward_rounding roundings".split(), ("rounding",)),
    **dict.fromkeys("rows columns metric".split(), ("column", "number of the metric")),
    "init_scale": ("scale",),
    "modules": ("pattern",),
    "names": ("profile", "name"),
    "name": ("curve", "layer rule", "recipe"),
    "train": ("task",),
    "x": ("axis",),
    "axis": ("transform", "dimensions", "extent"),
    "backward_overflow": ("overflow",),
    "cell": ("telemetry",),
    "new_factor": ("growth_factor", "backoff_factor"),
    "new_interval": ("growth_interval",),
    "new_scale": ("scale",),
    "outputs": ("outputs",),
    "overrides": (*A_FORMAT, "pattern"),
    "rule": ("system", "layer rule"),
    "scaling": ("scale", "scaling method"),
    "system": ("system", "rule"),
    "track": ("tracker",),
    "transforms": ("transform",),
    "value": ("no code", "column"),
    "where": ("cell", "column"),
    **dict.fromkeys("a b".split(), (*A_FORMAT, "side of the comparison", "cell", "the trainer", "the rollout")),
}
# Errors that neither a TypeError nor a ValueError of ours is: (callable, argument): classes, and why.
LISTED: dict[tuple[str, str], tuple[tuple[type[Exception], ...], str]] = {
    ("Ranks.run", "step"): ((Exception,), "a function of the user's, which is called, may raise anything"),
    ("mismatch", "batch"): ((Exception,), "the models are called with it, and say themselves what they cannot take"),
    ("Dump", "path"): ((FileNotFoundError,), "documented: a path that leads to no dump"),
    ("dump", "batch"): ((Exception,), "the model is called with it, and says itself what it cannot take"),
    ("mismatch", "a"): ((ValueError, FileNotFoundError), "no name in common with b, another output, no dump"),
    ("mismatch", "b"): ((ValueError, FileNotFoundError), "no name in common with a, another output, no dump"),
    **{("mismatch", f): ((TypeError, ValueError), "a function of the user's") for f in ("logits", "tokens", "mask")},
    ("compare", "batch"): ((Exception,), "the model is called with it, and says itself what it cannot take"),
    ("compare", "loss"): ((TypeError, ValueError), "a function of the user's, which is called, may raise anything"),
    ("sensitivity", "loss"): (
        (Exception,),
        "a batch: the model is called with it, and says itself what it cannot take",
    ),
    ("why", "step"): ((Exception,), "a batch: the model is called with it, and says itself what it cannot take"),
    ("why", "batches"): ((TypeError,), "the step is called with the batch's number, and this one takes none"),
    ("last_layers", "step"): (
        (Exception,),
        "a batch: the model is called with it, and says itself what it cannot take",
    ),
    ("last_layers", "loss"): ((TypeError, ValueError), "a function of the user's, which is called, may raise anything"),
    ("diagnose", "step"): ((Exception,), "a batch: the model is called with it, and says itself what it cannot take"),
    ("hadamard", "axis"): ((IndexError,), "documented, as Python has it for an axis that is not there"),
    ("hadamard", "x"): ((IndexError,), "a tensor of no dimension has no axis: documented"),
    ("Results", "out"): ((FileNotFoundError, OSError), "documented: a path that leads to no ledger"),
    ("resume", "out"): ((FileNotFoundError, OSError), "documented: a path that leads to no ledger"),
    ("sweep", "out"): ((ada_loss.lab.errors.SweepStopped,), "documented: a folder that cannot be made"),
    ("sweep of a task", "out"): ((ada_loss.lab.errors.SweepStopped,), "documented: a folder that cannot be made"),
    ("search", "out"): ((ada_loss.lab.errors.SweepStopped,), "documented: a folder that cannot be made"),
    ("resume", "trust"): ((ValueError,), "False is right, and the ledger's task is refused"),
    ("AdaLossScaled.last_log2_scale", "site"): ((KeyError,), "documented: a name of no site"),
    ("GradScaler.load_state_dict", "state_dict"): ((RuntimeError,), "documented, and torch's class for it"),
    ("GradScaler.update", "new_scale"): ((RuntimeError,), "None is right, and update() before a step is refused"),
}
TAKES_ANYTHING = {("Job", "fmt"): "job.quantize checks it, with the model that a recipe is for"}
# Public callables without a call here: why.
WITHOUT = {
    "AdaLossTransformBasicBlock.matches": "that of AdaLossTransform",
    "AdaLossTransformBatchNorm.matches": "that of AdaLossTransform",
    "AdaLossTransformBottleneck.matches": "that of AdaLossTransform",
    "AdaLossTransformConv2d.matches": "that of AdaLossTransform",
    "AdaLossTransformLinear.matches": "that of AdaLossTransform",
    "Accumulator.random_bits_of": "of a format that the accumulator holds",
    "Codebook.goes_up": "for what builds the table of a book",
    "Comparison": "a result: compare() makes it",
    "Dump.of": "for mismatch, of names that it has read",
    "Mismatch": "a result: mismatch() makes it",
    "Snapshot": "a result: Snapshot.load reads it",
    "Snapshots": "a result: snapshots() makes it",
    "Snapshots.wants": "an observer's method: the emulation calls it",
    "Job.load_state_dict": "for the checkpoint, which checks what it reads",
    "Job.note_update": "for the job's own scaler",
    "Job.result": "for the driver, of what a training returned",
    "LayerRule.factor": "for the kernels",
    "LossRule": "the base class of the rules",
    "LossRule.adjust": "for the scaler, once a step",
    "LossRule.evolve": "for the scaler, once a step, and not checked for speed",
    "QuantizedOptimizer": "a result: quantize_optimizer() makes it",
    "LostUpdates": "a result: lost_updates() makes it",
    "LostUpdates.is_of": "for record, of optimizers that it has found",
    "QuantizedOptimizer.add_param_group": "the optimizer's own",
    "QuantizedOptimizer.load_state_dict": "the optimizer's own, which its hooks check",
    "QuantizedOptimizer.step": "the optimizer's own",
    "QuantizedOptimizer.zero_grad": "the optimizer's own",
    "LostUpdates.is_due": "for the optimizer, once a step",
    "LostUpdates.saw": "for the optimizer, once a step",
    "Recorder.to_csv": "whose path Python's own functions refuse",
    "Recorder.to_tensorboard": "whose writer is the user's",
    "Recorder.wants": "for AdaLossScaled, once a step",
    "Recording.wants": "for the emulation, once a call",
    "Results.chosen_rows": "where= of table() and the others",
    "Results.named": "metric= of table() and the others",
    "Results.plot": "metric= and where= of table()",
    "Results.require_metric": "metric= of tables() and verdicts()",
    "Results.settings_of": "for the ledger's own cells",
    "Results.shown": "metric= of table() and the others",
    "Results.plot_accuracy": "metric= and where= of table()",
    "Results.plot_layer_scales": "where= of table()",
    "Results.plot_scales": "where= of table()",
    "Results.plot_underflow": "cell= of telemetry()",
    "Results.readable_telemetry": "cell= of telemetry()",
    "Results.report": "whose path Python's own functions refuse",
    "Tally": "a result: tally() makes it",
    "Why": "a result: why() makes it",
    "Watch": "watch() makes it, with the same arguments",
    "Watch.backward": "for the tracer",
    "Watch.forward": "for the tracer",
}


@pytest.fixture(scope="module", autouse=True)
def _nothing_behind_the_border(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with a sweep in it; no other sweep gets further than to its lock, no search further than its engine."""
    matplotlib.use("Agg")
    Folder.path = tmp_path_factory.mktemp("arguments") / "sweep"
    with contextlib.redirect_stderr(io.StringIO()):
        ada_loss.sweep(train=train, formats=["fp16"], out=Folder.path, show_progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        patch.setattr(driver, "FileLock", Lock)
        patch.setattr(searches, "open_engine", reached)
        yield


class Lock:
    """Stands for a sweep's lock, which comes behind all checks."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def acquire(self) -> None:
        raise Reached

    def release(self) -> None: ...


def reached(*_: object, **__: object) -> None:
    raise Reached


def public_callables() -> Iterator[str]:
    """The names of all public functions and classes that take an argument, and of the methods of such classes."""
    for package in (fpsim, ada_loss):
        for name in package.__all__:
            thing = getattr(package, name)
            if not callable(thing) or not hasattr(thing, "__module__"):
                continue
            if takes_an_argument(thing):
                yield name
            for word, method in inspect.getmembers(thing, inspect.isroutine) if isinstance(thing, type) else ():
                is_ours = (getattr(method, "__module__", None) or "").partition(".")[0] in ("fpsim", "ada_loss")
                if is_ours and not word.startswith("_") and takes_an_argument(method):
                    yield f"{name}.{word}"


def takes_an_argument(thing: Any) -> bool:
    try:
        names = [*inspect.signature(thing).parameters]
    except (TypeError, ValueError):
        return False
    return [name for name in names if name != "self"] != []


def test_every_public_callable_has_a_valid_call_or_a_reason() -> None:
    called = {call.name.partition(" of ")[0] for call in CALLS}
    found = set(public_callables())
    assert found - called - {*WITHOUT} == set()
    assert called - found == set()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_valid_call_passes(call: Call) -> None:
    function, valid = call.make()
    assert outcome(lambda: function(**valid), "", "") == Outcome("accepted")


def wrong_calls(call: Call, name: str, part: int, parts: int) -> Iterator[tuple[str, Outcome]]:
    """What becomes of a call with each wrong value, or one in so many, for an argument."""
    valid = call.make()[1].get(name)
    labels = [*wrong_values(), *near_values(valid)]
    for label in labels[part % parts :: parts]:
        function, arguments = call.make()
        arguments[name] = {**wrong_values(), **near_values(valid)}[label]
        yield label, outcome(lambda: function(**arguments), name, arguments[name], WORDS.get(name, A_WORD))  # noqa: B023


def check(call: Call, parts: int) -> None:
    problems = []
    for name in call.arguments():
        allowed, _ = LISTED.get((call.name, name), ((), ""))
        kinds = set()
        for label, found in wrong_calls(call, name, zlib.crc32(f"{call.name} {name}".encode()), parts):
            kinds.add(found.kind)
            if found.kind in ("inner", "vague") and not isinstance(found.error, allowed):
                words = "" if label == "unreadable" else str(found.error)[:200]
                problems.append(f"{name}={label}: {found.kind}: {type(found.error).__name__} at {found.place}: {words}")
        if kinds == {"accepted"} and (call.name, name) not in TAKES_ANYTHING:
            problems.append(f"{name} takes anything")
    assert not problems, "\n".join(problems)


@tiers.parametrize("call", CALLS, keep=tiers.every(3), ids=lambda call: call.name)
def test_a_wrong_argument_is_refused_in_words(call: Call) -> None:
    check(call, PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_every_wrong_argument_is_refused_in_words(call: Call) -> None:
    check(call, 1)


def _sweep(**words: Any) -> Any:
    return ada_loss.sweep(**{"train": train, "formats": ["fp16"], "out": Folder.path, "show_progress": False, **words})


def _begun_job() -> ada_loss.Job:
    job = ada_loss.Job("fp16")
    job.quantize(model())
    return job


def _watching() -> fpsim.Watch:
    found = fpsim.watch(model(), ["fp16"], every=1)
    found.detach()
    return found


def _compared() -> Any:
    return fpsim.compare(model(), None, "fp16", batch())


PAIR, MSE = (torch.ones(2, 2), torch.ones(2)), nn.functional.mse_loss
# Calls that trained what nobody asked for, did nothing, or broke later and elsewhere; and what they say.
WORST: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "letters as scaling methods": (lambda: _sweep(scaling=b"fp"), TypeError, "scaling is b'fp'"),
    "letters as seeds": (lambda: _sweep(seeds=b"\x01\x02"), TypeError, "seeds is b'"),
    "no seeds": (lambda: _sweep(seeds=-1), ValueError, "seeds=-1 is not a number of seeds"),
    "no folder": (lambda: _sweep(out=""), ValueError, "out='' is not a folder"),
    "a null in a path": (lambda: _sweep(out="a\0b"), ValueError, "out='a.x00b' is not a folder"),
    "a word for trust": (lambda: ada_loss.resume(Folder.path, trust="no"), ValueError, "trust='no' is not a flag"),
    "no transforms": (lambda: ada_loss.AdaLossScaled(quantised(), transforms=[]), ValueError, "is empty, and nothing"),
    "a word for inplace": (lambda: fpsim.quantize(model(), "fp16", inplace="no"), ValueError, "inplace=.no. is not"),
    "a word for enabled": (lambda: ada_loss.GradScaler(enabled="no"), ValueError, "enabled='no' is not a flag"),
    "into a truth": (lambda: fpsim.record(quantised(), into=True).__enter__(), TypeError, "into is True"),
    "every no call": (lambda: fpsim.Recording(0), ValueError, "every=0 is out of range"),
    "compare a number": (lambda: fpsim.compare(3, None, "fp16", None), TypeError, "model is 3, of type int"),
    "summary of a word": (lambda: fpsim.summary("x"), TypeError, "model is 'x', of type str"),
    "update nothing": (lambda: ada_loss.Updater(None, print, print, None), TypeError, "optimizer is None"),
    "transform a number": (lambda: ada_loss.AdaLossTransform(3), TypeError, "kind is 3"),
    "seed by a word": (lambda: fpsim.manual_seed("x"), TypeError, "seed='x' is not an integer"),
    "a seed after which there is none": (
        lambda: fpsim.compare(model(), None, "fp16", batch(), draws=2, seed=2**64 - 1), ValueError,
        "seed=18446744073709551615 leaves no seeds for draws=2",
    ),
    "seed beyond 64 bits": (lambda: fpsim.manual_seed(2**70), ValueError, "seed=1180591620717411303424 is out of"),
    "watch no format": (lambda: fpsim.watch(model(), []), ValueError, r"formats=\[\] is empty"),
    "watch a number": (lambda: fpsim.watch(model(), 3), TypeError, "formats is 3, which is not a list"),
    "watch by a number": (lambda: fpsim.watch(model(), optimizer=3), TypeError, "optimizer is 3, of type int"),
    "warm up a number": (lambda: fpsim.warm_up("cpu", 3), TypeError, "formats is 3, which is not a list"),
    "a scale of 2**-1100": (
        lambda: fpsim.tally(batch(), "fp16", log2_scale=-1100), ValueError, "log2_scale=-1100 is out of range"
    ),
    "letters as truth": (
        lambda: ada_loss.trajectory(ada_loss.loss_rule("torch"), "no"), TypeError, "oks is 'no', which is not a list"
    ),
    "no rule": (lambda: ada_loss.trajectory(None, [True]), TypeError, "rule is None"),
    "results of a number": (lambda: ada_loss.Results(3), ValueError, "out=3 is not a folder"),
    "where a number": (lambda: Folder.results().table(where=3), TypeError, "where is 3, which is not a mapping"),
    "metric 0": (lambda: Folder.results().table(metric=0), TypeError, "metric=0 is not a string"),
    "the best of a list": (lambda: Folder.results().best([]), TypeError, r"metric=\[\] is not a string"),
    "options a number": (lambda: ada_loss.Job(options=3), TypeError, "options is 3, which is not a mapping"),
    "a step by a word": (lambda: ada_loss.Job("fp16").checkpoint("x"), TypeError, "step='x' is not an integer"),
    "a scale rule of other scales": (
        lambda: fpsim.BlockFormat("e4m3fn", 32, fpsim.as_format("e8m0"), "floor"), ValueError, "scale='e8m0fnu'"
    ),
    "the class of a loss": (
        lambda: ada_loss.Task("t", model(), PAIR, PAIR, nn.MSELoss, {}), TypeError, "a class. Expected: a function, or"
    ),
    "the class of a loss for an updater": (
        lambda: ada_loss.Updater(torch.optim.SGD(model().parameters()), nn.MSELoss, batch, ada_loss.GradScaler()),
        TypeError, "loss_fn is <class",
    ),
    "letters as data": (lambda: ada_loss.Task("t", model(), "yes", PAIR, MSE, {}), TypeError, "train of the task"),
    "a blank name": (lambda: ada_loss.Task(" ", model(), PAIR, PAIR, MSE, {}), ValueError, "name=' ' is not a name"),
    "a number as an option's name": (lambda: _sweep(task_options={1: "a"}), TypeError, "with 1 as a name"),
    "a number as an inner option's name": (
        lambda: _sweep(task_options={"a": [{2: 3}]}), TypeError, "with 2 as a name"
    ),
    "a number as a job's option": (lambda: ada_loss.Job(options={1: 2}), TypeError, "options names 1"),
    "no file for a checkpoint": (lambda: ada_loss.Job(checkpoint=""), TypeError, "checkpoint='' is not a path"),
    "a step beyond the last": (lambda: _begun_job().begin_step(3, 2), ValueError, "step=3 is beyond steps=2"),
    "three bytes of memory": (lambda: _sweep(memory_limit=3), ValueError, "memory_limit=3 is invalid"),
    "a tensor of memory": (lambda: _sweep(memory_limit=torch.tensor(1.0)), ValueError, "memory_limit=tensor"),
    "a limit beyond all clocks": (lambda: _sweep(time_limit=2**70), ValueError, "time_limit=1180591620717411303424"),
    "a blank folder": (lambda: _sweep(out=" "), ValueError, "out=' ' is not a folder"),
    "a verdict on no metric": (lambda: Folder.results().verdicts("acuracy"), ValueError, "Did you mean 'accuracy"),
    "tables of no metric": (lambda: Folder.results().tables("acuracy"), ValueError, "Did you mean 'accuracy"),
    "a share above 1": (lambda: _watching().table(underflow=1.5), ValueError, "underflow=1.5 is out of range"),
    "a share below 0": (lambda: _watching().policy(overflow=-1), ValueError, "overflow=-1 is out of range"),
    "an unknown role": (lambda: _compared().begins("eror"), ValueError, "Unknown role='eror'. Did you mean 'error"),
    "a role that nothing has": (lambda: _compared().breaks("weight"), ValueError, "Unknown role='weight'"),
    "growth by less than 1": (lambda: _compared().grows(by=-1), ValueError, "by=-1 is out of range"),
    "warm up a device that is not here": (
        lambda: fpsim.warm_up(f"cuda:{torch.cuda.device_count()}", ["fp16"]), ValueError, "is not here: torch finds",
    ),
    "bytes as a device": (lambda: fpsim.warm_up(b"cpu", ["fp16"]), ValueError, "device=b'cpu' is not a device"),
    "a number as a device": (lambda: ada_loss.GradScaler(device=0), TypeError, "device=0 is not a device"),
    "no device": (lambda: ada_loss.GradScaler(device="x"), ValueError, "device='x' is not a device"),
    "truth as a code": (lambda: fpsim.as_format("fp16").decode(True), ValueError, "Code True is out of range for fp16"),
    "a chunk beyond memory": (lambda: fpsim.Accumulator("fp16", chunk=2**70), ValueError, "chunk=1180591620717411303"),
    "a block beyond memory": (
        lambda: fpsim.BlockFormat("e4m3fn", 10**5000, fpsim.as_format("e8m0fnu")), ValueError, "block=a value of type"
    ),
    "a margin beyond 64": (lambda: fpsim.Delayed(margin=65), ValueError, "margin=65 is invalid"),
    "a margin below -64": (lambda: fpsim.Delayed(margin=-65), ValueError, "margin=-65 is invalid"),
    "a history beyond memory": (lambda: fpsim.Delayed(history=2**30), ValueError, "history=1073741824 is not a number"),
    "amaxes beyond memory": (lambda: ada_loss.layer_rule("amax_history", length=2**30), ValueError, "length=10737"),
    "a batch of NaN": (
        lambda: fpsim.compare(model(), None, "fp16", batch() * torch.nan), ValueError, "No number in the output of Seq"
    ),
    "a name that no file holds": (
        lambda: ada_loss.Job("fp16").log(0, **{"\ud800": 1.0}), ValueError, "is not Unicode"
    ),
}  # fmt: skip


TOOLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "diagnose": fpsim.diagnose,
    "why": fpsim.why,
    "watch": fpsim.watch,
    "compare": lambda model, step: fpsim.compare(model, step, None, "fp16"),
    "sensitivity": lambda model, step: fpsim.sensitivity(model, step, "fp16"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_step_that_runs_nothing_is_refused(tool: str) -> None:
    with pytest.raises(ValueError, match=rf"^fpsim\.{tool} saw no operation of Sequential in the step"):
        TOOLS[tool](model(), lambda: 3.0)


def test_parameters_of_a_model_that_is_not_quantised_are_not_rounded_and_it_says_so() -> None:
    with pytest.warns(UserWarning, match="changed nothing: this Sequential is not quantised"):
        fpsim.round_parameters_(model())


@pytest.mark.parametrize("kind", WORST)
def test_a_call_that_once_went_through_is_refused(kind: str) -> None:
    call, error, words = WORST[kind]
    with pytest.raises(error, match=words):
        call()
