"""Whatever is raised within a call of fpsim, nothing of it stays on torch, on the model or in the thread."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from instants import interrupted
from leftovers import ENTRIES, Net, X, left_on, loss_of, model_for
from torch import Tensor, nn

import fpsim
from fpsim.policies.delayed import loaded as loaded_histories

KINDS = (KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError)
RUNNING = [name for name in ENTRIES if name != "quantize"]  # which run the model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("entry", RUNNING)
def test_what_a_forward_raises_leaves_nothing_though_the_traceback_is_kept(
    entry: str, kind: type[BaseException]
) -> None:
    model, calls = model_for(entry), []

    def fail() -> None:
        calls.append(None)
        if len(calls) >= 3:
            raise kind

    model.middle.then = fail
    seen, kept = [], []
    for _ in range(4):
        try:
            ENTRIES[entry][0](model)
        except kind as error:
            kept.append(error)  # as a notebook keeps the last one
            seen.append(left_on(model))
    assert seen == [[]] * len(seen)
    assert len(seen) >= 2
    calls[:] = []
    model.middle.then = int
    ENTRIES[entry][0](model)  # works again
    assert left_on(model) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("where", ["forward_pre_hook", "forward_hook"])
@pytest.mark.parametrize("entry", ["watch", "diagnose", "diagnose quantised"])
def test_what_a_hook_of_the_model_raises_leaves_nothing(entry: str, where: str, kind: type[BaseException]) -> None:
    model = model_for(entry)

    def fail(*_: object) -> None:
        raise kind

    for module in (model, model.middle):
        handle = getattr(module, f"register_{where}")(fail)
        with pytest.raises(kind):
            ENTRIES[entry][0](model)
        handle.remove()
        assert left_on(model) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("entry", ["watch", "diagnose", "diagnose quantised", "record", "quantised", "emulate"])
def test_what_a_backward_pass_raises_leaves_nothing(entry: str, kind: type[BaseException]) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            raise kind

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fails.apply(x)

    model = Net()
    model.middle = Failing()
    model = fpsim.quantize(model, "fp16") if ENTRIES[entry][1] else model
    with pytest.raises(kind):
        ENTRIES[entry][0](model)
    assert left_on(model) == []


def test_the_mode_of_a_watch_is_off_after_an_interrupted_call_within_the_block() -> None:
    model = Net()
    with fpsim.watch(model, ["fp16"], every=1) as watching:
        model.middle.then = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert torch.overrides._get_current_function_mode_stack() == []
        assert [name for name, m in model.named_modules() if m._compiled_call_impl is not None] == [""]
        before = len(watching.rows())
        torch.ones(3) + 1
        assert len(watching.rows()) == before
        model.middle.then = int
        loss_of(model).backward()
        assert {row["step"] for row in watching.rows()} == {1, 2}
    assert left_on(model) == []


STEPS: dict[str, Callable[[nn.Module, Callable[[], Tensor]], object]] = {
    "diagnose": fpsim.diagnose,
    "why": fpsim.why,
    "compare": lambda model, step: fpsim.compare(model, step, None, "fp16"),
    "sensitivity": lambda model, step: fpsim.sensitivity(model, step, "fp16"),
    "watch": lambda model, step: fpsim.watch(model, step, ["fp16"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_on_after_a_step_that_was_interrupted_while_torch_had_them_off(name: str) -> None:
    model = Net()

    def step() -> Tensor:
        torch._C._set_grad_enabled(False)  # as a step of an optimizer, whose block a signal keeps from its end
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        STEPS[name](model, step)
    assert left_on(model) == []


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_watch_may_be_detached_within_a_forward(where: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), Net().middle, nn.Linear(4, 4))
    watching = fpsim.watch(model, ["fp16"], every=1)
    model[1].then = watching.detach
    (model(X) if where == "first" else nn.Sequential(model)(X)).sum().backward()
    assert left_on(model) == []
    sites = {row["site"] for row in watching.rows() if row["role"] == "activation"}
    assert sites == {"0:linear"}  # what came before


def test_what_is_left_on_torchs_stack_after_all_is_taken_off_and_said() -> None:
    from fpsim.emulation.entering import Emulation, make_scope
    from fpsim.emulation.scope import Listeners
    from fpsim.torch_modes import push_mode

    class Others(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    model = fpsim.quantize(Net(), "fp16")
    expected = model(X)
    push_mode(Emulation(make_scope("", fpsim.Policy(activation="e5m2"), Listeners())))  # as a second signal may
    with Others() as others:
        with pytest.warns(UserWarning, match="has left 1 of its modes"):
            assert torch.equal(model(X), expected)
        assert torch.overrides._get_current_function_mode_stack() == [others]
    assert left_on(model) == []
    model(X)  # and not said again


@pytest.mark.parametrize(
    "entry", ["quantised", "emulate", "watch", "diagnose", "diagnose quantised", "compare", "why", "why quantised"]
)
def test_a_mode_that_torch_puts_back_too_late_changes_no_number_and_is_taken_off(entry: str) -> None:
    model, held = model_for(entry), []

    def interrupted_in_torch() -> None:
        taken_off = torch.overrides._pop_mode_temporarily()  # what torch does around its functions in Python
        taken_off.__enter__()
        held.append(taken_off)
        raise KeyboardInterrupt

    model.middle.then = interrupted_in_torch
    with pytest.raises(KeyboardInterrupt):
        ENTRIES[entry][0](model)
    model.middle.then = int
    assert left_on(model) == []
    held.pop().__exit__(None, None, None)
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    third = torch.tensor([1.0]) / 3
    assert third.view(torch.int32).item() == 0x3EAAAAAB  # of float32
    with pytest.warns(UserWarning, match="has left 1 of its modes"):
        fpsim.quantize(Net(), "fp16")
    assert left_on(model) == []


@pytest.mark.parametrize("name", ["cat", "where", "full_like"])
def test_histories_of_delayed_scaling_are_whole_after_any_interrupt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true, counts = getattr(torch, name), {"calls": 0, "fails at": -1}

    def interrupted(*args: object, **kwargs: object) -> object:
        counts["calls"] += 1
        if counts["calls"] == counts["fails at"]:
            raise KeyboardInterrupt
        return true(*args, **kwargs)

    def trained(fails_at: int) -> tuple[nn.Module, int]:
        model = Net()
        model = fpsim.quantize(model, fpsim.recipe("fp8_delayed", model))
        counts.update({"calls": 0, "fails at": fails_at})
        for _ in range(3):
            try:
                loss_of(model).backward()
            except KeyboardInterrupt:
                assert torch.is_grad_enabled()
                loss_of(model).backward()
        return model, counts["calls"]

    with monkeypatch.context() as patch:
        patch.setattr(torch, name, interrupted)
        whole, calls = trained(-1)
        found = [fpsim.scaling_state(trained(i)[0]) for i in range(1, calls + 1)]
    assert len(found) == calls > 1
    expected = fpsim.scaling_state(whole)
    for state in found:
        assert state.keys() == expected.keys()
        assert all(state[k]["scale"] > 0 and state[k]["amaxes"].shape == expected[k]["amaxes"].shape for k in state)


def test_a_lost_watch_watches_no_longer() -> None:
    model, optimizer = Net(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fpsim.watch(model, ["fp16"], every=1, optimizer=optimizer)
    assert left_on(model) == []
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("name", ["diagnose", "why", "watch"])
def test_a_step_that_makes_parameters_leaves_no_hook_on_them(name: str) -> None:
    model = Net()

    def step() -> None:
        model.last = nn.Linear(8, 3)
        loss_of(model).backward()

    getattr(fpsim, name)(model, step)
    assert left_on(model) == []


@pytest.mark.parametrize("name", ["diagnose", "why", "watch"])
def test_a_leaf_that_a_model_returns_keeps_no_hook(name: str) -> None:
    class Returns(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.weight

    model = Returns(6, 2)
    getattr(fpsim, name)(model, lambda: sum(out.square().sum() for out in model(X)).backward())
    assert left_on(model) == []


@pytest.mark.parametrize("name", ["diagnose", "why", "watch"])
def test_a_lazy_model_that_never_ran_is_refused(name: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(ValueError, match=r"^0\.weight of the model has no shape yet"):
        getattr(fpsim, name)(model, lambda: model(X).sum().backward())
    assert left_on() == []
    model(X)
    getattr(fpsim, name)(model, lambda: model(X).sum().backward())
    assert left_on(model) == []


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: loaded(model),
    "copy": copy.copy,
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "dequantize(quantize)": lambda model: fpsim.dequantize(fpsim.quantize(model, "fp16")),
}


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class WithItsOwnState(Net):
    """A class that says itself what is saved of it."""

    def __getstate__(self) -> dict[str, object]:
        return dict(vars(self))


@pytest.mark.parametrize("kind", [Net, WithItsOwnState], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", COPIES)
def test_a_watched_model_is_copied_and_saved_and_the_copy_is_not_watched(how: str, kind: type[nn.Module]) -> None:
    model = kind()
    model.middle.then = int
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fpsim.watch(model, ["fp16"], every=1, optimizer=optimizer) as watching:
        loss_of(model).backward()
        duplicate = COPIES[how](model)
        rows = len(watching.rows())
        assert torch.equal(loss_of(duplicate), loss_of(Net()))
        assert len(watching.rows()) == rows
        if how != "copy":  # which shares its modules
            assert left_on(duplicate) == []
        loss_of(model).backward()
        assert len(watching.rows()) > rows
        with pytest.raises(TypeError, match=r"neither copied nor pickled"):
            copy.deepcopy(watching)
    assert left_on(model) == []


def test_a_model_that_is_compiled_in_place_after_the_watch_began_is_told() -> None:
    model = Net()
    watching = fpsim.watch(model, ["fp16"], every=1)
    assert watching.rows() == []
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"model\.compile\(\) was called after"):
        assert watching.rows() == []
    compiled = model._compiled_call_impl
    watching.detach()
    assert model._compiled_call_impl is compiled
    with fpsim.watch(model, ["fp16"], every=1):
        assert model._compiled_call_impl is not compiled
    assert model._compiled_call_impl is compiled


def test_a_model_may_be_copied_within_its_watched_forward() -> None:
    model, found = Net(), []
    with fpsim.watch(model, ["fp16"], every=1):
        model.middle.then = lambda: found.append(copy.deepcopy(model.last))
        model(X)
    assert left_on(model, *found) == []


def run_in_threads(count: int, function) -> list[BaseException]:  # type: ignore[no-untyped-def]
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), name=f"thread {i}", daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.mark.filterwarnings("ignore:fpsim.watch sees the calls that come from one thread")
def test_of_a_model_that_several_threads_train_one_thread_is_watched() -> None:
    model, expected = Net(), loss_of(Net()).item()
    steps, rows = 10, []
    left: list[list[str]] = []
    with fpsim.watch(model, ["fp16"], every=1) as watching:
        loss_of(model).backward()  # this thread's

        def train(i: int) -> None:
            for _ in range(steps):
                loss = loss_of(model)
                loss.backward()
                assert loss.item() == expected
            left.append(left_on())

        with pytest.warns(UserWarning, match=r"one thread, 'MainThread'. Those from 'thread \d' are left out"):
            assert run_in_threads(4, train) == []
        loss_of(model).backward()
        rows = watching.rows()
    assert left == [[]] * 4
    assert {row["step"] for row in rows} == {1, 2}
    with fpsim.watch(Net(), ["fp16"], every=1) as alone:
        for _ in range(2):
            loss_of(alone._trace.model).backward()
    assert [row for row in rows if row["role"] == "error"] == [row for row in alone.rows() if row["role"] == "error"]
    assert [r for r in rows if r["role"] == "weight_grad"] == [r for r in alone.rows() if r["role"] == "weight_grad"]
    assert left_on(model) == []


def test_a_thread_that_has_ended_leaves_the_watch_to_the_next() -> None:
    model = Net()
    with fpsim.watch(model, ["fp16"], every=1) as watching:
        for _ in range(3):
            assert run_in_threads(1, lambda i: loss_of(model).backward()) == []
    assert {row["step"] for row in watching.rows()} == {1, 2, 3}


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "quantised"])
def test_two_threads_cannot_diagnose_one_model_and_are_told(quantised: bool) -> None:
    model = fpsim.quantize(Net(), "fp16") if quantised else Net()
    ready, done = threading.Event(), threading.Event()
    found = []

    def first(_: int) -> None:
        def step() -> None:
            ready.set()
            assert done.wait(30)
            loss_of(model).backward()

        found.append(fpsim.diagnose(model, step))

    thread = threading.Thread(target=first, args=(0,), name="the first", daemon=True)
    thread.start()
    assert ready.wait(30)
    with pytest.raises(RuntimeError, match=r"in thread 'the first', so fpsim\.diagnose cannot run"):
        fpsim.diagnose(model, lambda: loss_of(model).backward())
    done.set()
    thread.join(30)
    assert not thread.is_alive()
    assert found[0].cause is None
    assert left_on(model) == []


@pytest.mark.parametrize("policy", ["e4m3fn", "mxfp8_e4m3"])
def test_threads_may_share_a_quantised_model(policy: str) -> None:
    model = fpsim.quantize(Net(), policy)
    parameters = [*model.parameters()]

    def step() -> list[Tensor]:
        loss = loss_of(model)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    expected = step()

    def run(_: int) -> None:
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
            with torch.no_grad():
                assert torch.equal(loss_of(model), expected[0])

    assert run_in_threads(4, run) == []
    assert left_on(model) == []


def test_gradients_stay_on_though_an_interrupted_look_at_histories_is_forgotten_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    model = model_for("delayed")
    loss_of(model).backward()
    state = dict([*fpsim.scaling_state(model).items()][:1])

    def run() -> None:
        loaded_histories(state).state_dict()

    with torch.no_grad():  # what such a generator would put back
        instants, _ = interrupted(run, 0)
    for at in range(1, instants + 1):
        with torch.no_grad():
            _, error = interrupted(run, at)
        assert torch.is_grad_enabled(), f"at {at} of {instants}, while its traceback is kept"
        del error
        assert torch.is_grad_enabled(), f"at {at} of {instants}, when it is forgotten"
