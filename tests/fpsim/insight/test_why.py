"""why tells the first of several causes, puts everything back, and refuses what is no step; its parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from module_blocks import Function
from planted_cases import step_named
from planted_grid import CAUSES
from planted_models import Planted
from planted_overflow import t5, t5_step
from torch import Tensor, nn

import fpsim
from fpsim.__main__ import main
from fpsim.emulation.calls import call_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.compare import Errors
from fpsim.insight.masks import is_mask_like, leaking
from fpsim.insight.ranges import Ends, Glance, glance
from fpsim.insight.reasons.against import _is_noise, _measured
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import Attempts, Change, Outcome
from fpsim.insight.reasons.updates import Updates
from fpsim.insight.reasons.widening import Widening
from fpsim.insight.why import _advice
from fpsim.models.quantize import listeners
from fpsim.tensors.spec import any_spec


def test_a_step_whose_scaler_is_not_given_is_refused_and_told_so() -> None:
    planted = step_named("a_scaler_that_begins_too_high")()
    with pytest.raises(ValueError, match=r"Give a GradScaler that it uses as scaler="):
        fpsim.why(planted.model, planted.step, planted.optimizer)


def border_step(fmt: str, at: float, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, Any]:
    model: Any = nn.Sequential(nn.Linear(2, 2), Function(function))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(at)
    model = model.half() if fmt == "half" else (fpsim.quantize(model, fmt) if fmt in ("fp16", "bf16") else model)

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.eye(2, dtype=next(model.parameters()).dtype)).float().sum()
        loss.backward()
        return loss

    return model, step


@pytest.mark.parametrize("fmt", ["float32", "half", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("function", "at", "low", "high"),
    [(torch.acos, 1.0, -1.0, 1.0), (torch.asin, -1.0, -1.0, 1.0), (torch.acosh, 1.0, 1.0, 4.0)],
    ids=["acos", "asin", "acosh"],
)
def test_an_input_at_a_border_is_clamped_by_what_the_format_holds(
    fmt: str, function: Callable[[torch.Tensor], torch.Tensor], at: float, low: float, high: float
) -> None:
    """1 - 1e-12 is 1 in float32: clamping to that, as was printed once, moves nothing."""
    found = fpsim.why(*border_step(fmt, at, function))
    assert found.cause is not None
    assert (found.cause["kind"], found.cause["place"]) == ("infinite slope", f"1:{function.__name__}"), str(found)
    eps = found.tried[0]["value"]
    model, step = border_step(fmt, at, lambda x: function(x.clamp(low + eps, high - eps)))
    loss = step()
    assert loss.isfinite()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert found.tried[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_float32_whose_gradients_are_not_finite_is_blamed_too() -> None:
    planted = step_named("a_plan_of_transport_that_underflows")()
    found = fpsim.why(planted.model, planted.step)
    assert found.float32 == pytest.approx(13.7036, rel=1e-5)  # of the same model after .float(), and its gradients inf
    assert [remedy["remedy"] for remedy in found.tried][:1] == ["float64"]
    assert "not finite there: gradient left.weight" in str(found)


@pytest.mark.parametrize("fmt", ["float32", "half", "fp16"])
def test_an_infinity_that_comes_to_nothing_is_not_named(fmt: str) -> None:
    """The bucket of position 0 of a T5 is log(0), cast to an integer and not taken."""
    model = t5()
    model = model.half() if fmt == "half" else (fpsim.quantize(model, fmt) if fmt == "fp16" else model)
    step, seen = t5_step(model), []

    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func is torch.log:
                seen.append(bool(out.isinf().any()))
            return out

    with Log():
        step()
    assert any(seen)
    assert fpsim.why(model, lambda: step() * 1).cause is None


def test_a_saturation_is_cured_where_it_is_read_too() -> None:
    """Who leaves a result in float32 and lets a product round it again has cured nothing: the loss is the same."""
    planted = step_named("a_squared_rectifier_in_eight_bits")()
    found = fpsim.why(planted.model, planted.step)
    assert {site.rpartition(":")[0] for site in found.tried[0]["sites"]} >= {"act", "down"}
    fpsim.set_policy(planted.model, found.policy())
    assert fpsim.diagnose(planted.model, planted.step).cause is None


def two(first: str, second: str) -> Planted:
    def plant(planted: Planted) -> None:
        CAUSES[second].plant(planted)
        late = planted.late
        CAUSES[first].plant(planted)
        of_first = planted.late

        def both(p: Planted) -> None:
            late(p)
            if of_first is not late:
                of_first(p)

        planted.late = both

    return Planted("gpt", "half", plant)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("nan_in_a_parameter", "exp overflows"),
        ("nan_in_a_buffer", "eps_of_adam_is_lost"),
        ("inf_in_a_gradient", "square overflows"),
        ("logits_grow", "count_of_targets_is_zero"),
        ("exp overflows", "eps_of_adam_is_lost"),
        ("branch behind a small gate", "updates_are_lost"),
    ],
)
def test_of_two_causes_the_first_is_named(first: str, second: str) -> None:
    found, cause = two(first, second).why(), CAUSES[first]
    assert found.cause is not None
    assert found.cause["place"].endswith(cause.place_in("gpt")), str(found)
    assert (found.cause["role"], found.cause["kind"]) == (cause.role, cause.kind)


def snapshot(planted: Planted) -> list[torch.Tensor]:
    tensors = [*planted.model.parameters(), *planted.model.buffers(), torch.get_rng_state()]
    tensors += [p.grad for p in planted.model.parameters() if p.grad is not None]
    if planted.optimizer is not None:
        tensors += [x for state in planted.optimizer.state.values() for x in state.values()]
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("fmt", ["float32", "half", "fp16"])
def test_model_optimizer_and_random_numbers_are_as_they_were(fmt: str) -> None:
    def plant(planted: Planted) -> None:
        planted.point.plant = lambda x: nn.functional.dropout(x + (x * 400).square() / 1e6, 0.5)

        def late(p: Planted) -> None:
            p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-3, eps=1e-4)
            p.step()
            p.optimizer.step()

        planted.late = late

    planted = Planted("conv", fmt, plant)
    before, policies = snapshot(planted), str(planted.model)
    planted.why()
    after = snapshot(planted)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(before, after, strict=True))
    assert str(planted.model) == policies
    assert planted.optimizer.param_groups[0]["eps"] == 1e-4


def test_all_is_put_back_after_an_exception() -> None:
    planted, calls = Planted("gpt", "fp16"), [0]

    def step() -> None:
        planted.step()
        with torch.no_grad():
            planted.model.head.weight.zero_()
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("planted")

    before = snapshot(planted)
    with pytest.raises(RuntimeError, match="planted"):
        fpsim.why(planted.model, step)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(planted), strict=True))
    with fpsim.record(planted.model):  # nobody observes it any more
        planted.step()


@pytest.mark.parametrize("fmt", ["half", "fp16"])
def test_a_step_that_raises_because_of_nan_is_looked_at_up_to_there(fmt: str) -> None:
    """The binary cross entropy refuses NaN, which a sigmoid by hand gives of large numbers."""

    def plant(planted: Planted) -> None:
        def sigmoid(x: torch.Tensor) -> torch.Tensor:
            e = (x + 12).exp()
            return e / (1 + e)

        planted.point.plant = sigmoid
        planted.loss = lambda out, y: nn.functional.binary_cross_entropy(
            out.float().softmax(-1), nn.functional.one_hot(y, out.shape[-1]).float()
        )

    planted = Planted("gpt", fmt, plant)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        planted.step()
    found = planted.why()
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("blocks.1.point:exp", "overflow")
    assert "Then the step raises RuntimeError" in str(found).splitlines()[1]
    assert found.tried[0]["remedy"] == "float32"


def test_what_a_step_raises_of_itself_is_raised() -> None:
    def step() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fpsim.why(nn.Linear(1, 1), step)


def test_a_step_that_changes_is_refused_with_both_losses() -> None:
    model, batches = nn.Linear(1, 1), iter(range(1, 100))

    def step() -> None:
        model(torch.full((1, 1), float(next(batches)))).square().sum().backward()

    with pytest.raises(ValueError, match=r"The step gave loss .* and then .*Expected the same step each time"):
        fpsim.why(model, step)


def test_the_batch_that_breaks_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).half()
    batches = [torch.ones(1, 2).half() for _ in range(10)]
    batches[7] = torch.full((1, 2), 6e4).half()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    found = fpsim.why(model, lambda i: model(batches[i]).sum().backward(), batches=10)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"], found.cause["batch"]) == ("0:linear", "overflow", 7)
    assert "in batch 7" in str(found).splitlines()[0]


def test_a_shared_module_is_named_with_its_call_and_its_caller() -> None:
    class Exponential(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    class Block(nn.Module):
        def __init__(self, shared: nn.Module, gain: float) -> None:
            super().__init__()
            self.shared, self.gain = shared, gain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shared(x * self.gain).tanh()

    shared = Exponential()
    model = nn.Sequential(nn.Linear(2, 2), Block(shared, 1.0), Block(shared, 50.0)).half()
    x = torch.ones(1, 2).half()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    found = fpsim.why(model, lambda: model(x).sum().backward())
    assert found.cause is not None
    assert found.cause["place"] == "1.shared:exp"
    assert "call 2 of 2, called by 2" in str(found).splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Linear(1, 1), torch.ones(1)), "Got a batch, and the output of Linear for it has no `loss`"),
        ((nn.Linear(1, 1), 3), "Got 3, of type int, as the step"),
        ((lambda: None, lambda: None), "Got function as the model"),
        ((nn.Linear(1, 1), lambda: None, 3), "Got int as the optimizer"),
    ],
)
def test_what_is_no_step_is_refused_in_a_line(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        fpsim.why(*arguments)  # type: ignore[arg-type]


def test_rows_pictures_and_policies() -> None:
    def plant(planted: Planted) -> None:
        planted.point.plant = lambda x: x + (x * 400).square() / 1e6

    found = Planted("gpt", "fp16", plant).why()
    assert found.to_frame().loc[0, "kind"] == "overflow"
    assert found.plot()._repr_png_()[:4] == b"\x89PNG"
    assert "square" in found.policy().overrides["blocks.1.point"].float32
    with pytest.raises(ValueError, match="No remedy that was tried here is a policy"):
        Planted("gpt", "half", plant).why().policy()


def test_the_command_line_runs_a_script_that_defines_model_and_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model.bias.data.fill_(torch.nan)\n"
        "def step():\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "if __name__ == '__main__':\n"
        "    raise RuntimeError('a training')\n"
    )
    assert main(["why", str(script)]) == 1
    assert capsys.readouterr().out.startswith("NaN came in with a parameter: bias")
    script.write_text(script.read_text().replace("torch.nan", "0.5"))
    assert main(["why", str(script)]) == 0
    script.write_text(script.read_text() + "batches = [torch.ones(1, 2)]\n")
    assert main(["why", str(script)]) == 0
    assert "`batches` is of type list" in capsys.readouterr().err
    script.write_text("model = 1\n")
    with pytest.raises(SystemExit):
        main(["why", str(script)])
    assert "does not define `step`" in capsys.readouterr().err


def test_gradients_that_a_constant_in_the_loss_makes_too_small_are_lost_and_no_noise() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half(), torch.ones(2, 4).half()
    found = fpsim.why(model, lambda: (model(x).float() * 1e-12).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["role"], found.cause["kind"]) == ("1:linear", "error", "gradient lost")


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_step_clears_first_are_not_blamed(to_none: bool) -> None:
    """The usual moment to ask: the step was taken, and `.grad` is NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    x = torch.full((2, 4), 6e4).half()
    with torch.no_grad():
        model[0].weight.fill_(2.0)

    def step() -> None:
        model.zero_grad(set_to_none=to_none)
        model(x).float().square().mean().backward()

    step()
    assert model[0].weight.grad.isnan().any()
    found = fpsim.why(model, step)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("0:linear", "overflow"), str(found)


@pytest.mark.parametrize("has_optimizer", [True, False], ids=["before an optimizer clears", "at the end"])
def test_gradients_that_overflow_where_they_are_added_are_named(has_optimizer: bool) -> None:
    """Each of three is 30000, and float16 ends at 65504; the optimizer's step forgets their sum."""
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step() -> None:
        for _ in range(3):
            (model(torch.ones(1, 1).half()).float() * 3e4).sum().backward()
        if has_optimizer:
            optimizer.step()
            optimizer.zero_grad()

    found = fpsim.why(model, step, optimizer=optimizer if has_optimizer else None)
    model.zero_grad()
    assert found.cause is not None
    assert (found.cause["place"], found.cause["role"], found.cause["kind"]) == ("weight", "gradient", "overflow")
    assert "got 3 gradients of up to 3e+04" in str(found)


def test_a_parameter_that_came_in_broken_is_broken_in_float32_too_and_no_format_is_blamed() -> None:
    model = fpsim.quantize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "fp16")
    with torch.no_grad():
        model[1].weight[0, 0] = torch.inf
    found = fpsim.why(model, lambda: model(torch.ones(1, 2)).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("1.weight", "inf came in")
    assert "No format is to blame: float32 gives NaN or inf too." in str(found)


def test_states_that_a_step_makes_and_the_history_of_its_scales_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))
    model = fpsim.quantize(model, fpsim.recipe("fp8_delayed", model))
    optimizer = torch.optim.Adam(model.parameters())
    (histories,) = {id(listener.histories): listener.histories for listener in listeners(model)}.values()

    def step() -> None:
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()

    before = copy.deepcopy(histories.state_dict())
    fpsim.why(model, step, optimizer=optimizer)
    assert not optimizer.state
    assert repr(histories.state_dict()) == repr(before)


class Evaluated(torch.optim.Optimizer):
    """Evaluates a closure, and changes nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def test_what_overflows_where_an_optimizer_evaluates_is_not_told_of_the_operation_after_it() -> None:
    model = fpsim.quantize(nn.Sequential(nn.Linear(1, 1, bias=False)), "fp16")
    optimizer = Evaluated(model.parameters())
    with torch.no_grad():
        model[0].weight.fill_(1.0)

    def evaluate() -> None:
        model(torch.full((1, 1), 1e6))

    def step() -> None:
        optimizer.step(evaluate)
        model(torch.ones(1, 1)).sum().backward()

    found = fpsim.why(model, step, optimizer=optimizer)
    assert found.cause is None, str(found)


def test_an_operation_after_a_backward_pass_ends_where_its_own_dtype_does() -> None:
    model, x = fpsim.quantize(nn.Linear(1, 1), fpsim.Policy(error="e5m2", weight_grad="e5m2")), torch.tensor(100.0)

    def step() -> torch.Tensor:
        model(torch.ones(1, 1)).sum().backward()
        return x.exp()

    found = fpsim.why(model, step)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"], found.cause["format"]) == (":exp", "overflow", "float32")


@pytest.mark.parametrize(
    ("kind", "remedy", "words"),
    [
        ("NaN", "skip", "Skip batches without a target, or divide by max(count, 1)."),
        ("NaN", "correction", "Use correction=0, or skip batches of one."),
        ("zero times infinity", "", "Use masked_fill or where instead of a product with a mask."),
        ("rate is NaN", "", "Look at what sets lr, such as a schedule of 0 steps."),
        ("NaN", "", "no remedy that was tried is enough."),
    ],
)
def test_what_cannot_be_run_here_is_advised(kind: str, remedy: str, words: str) -> None:
    event = Event("forward", kind, "0:mul", "activation", remedy=remedy)
    assert _advice(event, 1.0, [], []).removesuffix(" (not tried)") == words


def test_what_came_in_broken_is_told_of_a_step_that_runs_nothing() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"^fpsim\.why saw no operation"):
        fpsim.why(model, lambda: None)
    nn.init.constant_(model.weight, torch.nan)
    found = fpsim.why(model, lambda: None)
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("weight", "NaN came in")


class Zeros(nn.Module):
    """A layer over zeros that are divided by their mean square, with a constant that float16 has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x / (x.square().mean(-1, keepdim=True) + 1e-8))


def test_the_first_eps_that_the_format_has_is_tried_in_the_place_of_one_that_it_lost() -> None:
    model = Zeros().half()
    assert torch.tensor([1e-8, 1e-7]).half().count_nonzero() == 1
    found = fpsim.why(model, lambda: model(torch.zeros(2, 4).half()).float().sum().backward())
    assert found.tried[0]["remedy"] == "eps"
    assert found.tried[0]["value"] == 1e-7
    assert ", call " not in str(found).splitlines()[0]  # it is called once


@pytest.mark.parametrize(
    ("function", "weights", "factor"),
    [(lambda w: w / w.new_tensor(1e-4), [0.0, 1.0], 100.0), (lambda w: w**1.5, [0.0, 100.0], 1e4)],
    ids=["a dividend", "a power above 1"],
)
def test_a_gradient_that_overflows_beside_a_zero_is_not_blamed_on_a_slope_without_end(
    function: Callable[[torch.Tensor], torch.Tensor], weights: list[float], factor: float
) -> None:
    """The slopes are 10^4, and 0 and 15: what arrives is beyond 65504 with its factor."""
    model = Function(function).half()
    model.w = nn.Parameter(torch.tensor(weights).half())
    found = fpsim.why(model, lambda: (model(model.w).float() * factor).sum().backward())
    assert found.cause is not None
    assert (found.cause["place"], found.cause["kind"]) == ("w", "overflow"), str(found)


def test_a_format_whose_blocks_have_scales_has_no_ends() -> None:
    ends = Ends.of_spec(any_spec("mxfp8_e4m3"))
    assert (ends.largest, ends.smallest) == (math.inf, 0.0)
    assert ends.rounded(1e-30) == 1e-30
    assert ends.holds(1e-30)


@pytest.mark.parametrize("cast", [torch.Tensor.half, torch.Tensor.bfloat16], ids=["half", "bfloat16"])
def test_a_cast_to_few_bits_stays_float32_where_it_is_widened(cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor([0.1, 3.0])
    got = Widening(None)(0, call_of(cast), cast, (x,), {})
    assert got.dtype is torch.float32
    assert torch.equal(got, x)


def test_errors_are_relative_to_numbers_below_those_that_mask() -> None:
    """From 1e30 on a number stands for infinity."""
    operation = Operation("f:add", "f", "add", 0, True, [])
    zeros, true = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.1e30])
    assert _measured(Errors(), operation, zeros, true) == 0.0
    assert _measured(Errors(), operation, torch.zeros(2), torch.tensor([0.0, 0.9e30])) == 1.0
    operation.notes["masked"] = torch.tensor([False, True])
    assert _measured(Errors(), operation, torch.tensor([1.5, 9.0]), torch.tensor([1.0, 1.0])) == 0.5
    assert _measured(Errors(), operation, torch.tensor([1e-29, 0.0]), torch.tensor([1e-31, 0.0])) == 0.0


@pytest.mark.parametrize(("amax", "is_noise"), [(0.9e-4, True), (1.1e-4, False)])
def test_a_gradient_below_a_10000th_of_what_is_summed_is_noise(amax: float, is_noise: bool) -> None:
    reader = SimpleNamespace(site="0:linear", call=0, name="linear", notes={})
    read = SimpleNamespace(notes={"gradient": Glance(8, 8, -1.0, 1.0)})
    bias = SimpleNamespace(name="parameter", children=[reader], notes={"result": Glance(8, 8, -1.0, 1.0)})
    reference: Any = SimpleNamespace(by_key={("0:linear", 0, 0): read})
    assert _is_noise(bias, Glance(8, 8, -amax, amax), reference) is is_noise  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policies", "bad", "looks"),
    [({}, [], [False]), ({}, ["loss"], [False]), ({"": fpsim.Policy()}, [], [False, True])],
)
def test_a_run_is_looked_into_only_where_its_end_does_not_tell(
    policies: dict[str, fpsim.Policy], bad: list[str], looks: list[bool]
) -> None:
    taken: list[bool] = []

    def run(change: Change, seen: Timeline | None = None, **options: bool) -> Outcome:
        taken.append(seen is not None)
        return Outcome([], 1.0, bad)

    trials: Any = SimpleNamespace(model=nn.Linear(1, 1), run=run, runs=0)
    event, was = Event("forward", "NaN", ":mul", "activation"), Outcome([], 1.0, ["loss"])
    reference = SimpleNamespace(truth=None, dtype=None)
    attempts = Attempts(trials, event, was, Timeline(trials.model), reference)  # type: ignore[arg-type]
    assert (attempts.works(Change(policies=policies)) is None) is bool(bad)
    assert taken == looks


@pytest.mark.parametrize(
    ("before", "after", "is_remedy"),
    [
        ((1.0, 0.6), (0.0, 0.14), True),
        ((1.0, 0.6), (0.0, 0.16), False),  # nearer by 3.75, and the farthest of all by more than 4
        ((1.0, 0.6), (0.24, 0.0), True),
        ((1.0, 0.6), (0.26, 0.0), False),
        ((1.0, 0.1), (0.0, 0.1), True),  # what was near need not be nearer
        ((1.0, 0.1), (0.0, 0.4), True),  # rounding may move it
        ((1.0, 0.1), (0.0, 0.6), False),  # but it is not far now
        ((0.4, 0.2), (0.1, 0.04), True),  # none was far: the mean
        ((0.4, 0.2), (0.1, 0.06), False),
    ],
)
def test_a_remedy_brings_each_gradient_that_was_far_four_times_nearer(
    before: tuple[float, ...], after: tuple[float, ...], is_remedy: bool
) -> None:
    def gradients(errors: tuple[float, ...]) -> dict[str, Tensor]:
        return {name: torch.tensor([1.0 - error]) for name, error in zip(("a.w", "b.w"), errors, strict=True)}

    was, now, wide = (Outcome([], 1.0, [], gradients(errors)) for errors in (before, after, (0.0, 0.0)))
    now.gradients = {name: g + 1e-6 * (not g.any()) for name, g in now.gradients.items()}
    trials: Any = SimpleNamespace(model=nn.Linear(1, 1), run=lambda *_, **__: now, runs=0)
    reference: Any = SimpleNamespace(truth=wide, dtype=torch.float32)
    event = Event("float32", "far", ":mul", "activation")
    attempts = Attempts(trials, event, was, Timeline(trials.model), reference)
    assert (attempts.works(Change(), looks=False) is not None) is is_remedy


def test_zeros_and_masks_are_known_by_their_numbers() -> None:
    assert [glance(torch.tensor(x)).has_zeros for x in ([1.0, 0.5], [1.0, 0.0])] == [False, True]
    assert [is_mask_like(torch.tensor([-math.inf, x])) for x in (0.0, 0.5)] == [True, False]


def test_an_event_that_counts_nothing_has_none() -> None:
    row = Event("optimizer", "rate is NaN", "group 0", "update").row()
    assert (row["count"], row["of"]) == (0, 0)


def test_what_a_step_would_give_in_float32_is_that_of_the_first_step() -> None:
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    updates = Updates(model)
    for weight in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(weight)
        model.weight.grad = torch.full((1, 1), 1e-3).half()
        updates.before(optimizer)
    wanted = 1.0 - 0.25 * torch.full((1, 1), 1e-3).half().float()
    assert torch.equal(updates.masters["weight"], wanted)
    assert updates.masters["weight"].dtype is torch.float32


@pytest.mark.parametrize(("weight", "counts"), [(0.9e-5, False), (1.1e-5, True)])
def test_a_hundred_thousandth_on_a_masked_position_is_a_leak(weight: float, counts: bool) -> None:
    scores = SimpleNamespace(notes={"masked": torch.tensor([[False, True]])})
    softmax: Any = SimpleNamespace(name="softmax", sources=[scores])
    assert (leaking(softmax, torch.tensor([[1.0 - weight, weight]])) is not None) is counts
