"""One way to call the tools: the model first, then a step without arguments or a batch; old forms stay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fpsim

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Classifier(nn.Module):
    """Gives its loss where it has labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.head(self.up(self.norm(x)).tanh())
        return SimpleNamespace(logits=out, loss=None if labels is None else F.cross_entropy(out, labels))


def step_of(model: nn.Module) -> Any:
    def step() -> Tensor:
        total = model(X, Y).loss
        total.backward()
        return total

    return step


TOOLS = {
    "why": lambda model, step, **o: fpsim.why(model, step, **o),
    "diagnose": lambda model, step, **o: fpsim.diagnose(model, step, **o),
    "compare": lambda model, step, **o: fpsim.compare(model, step, None, "e4m3fn", **o),
    "sensitivity": lambda model, step, **o: fpsim.sensitivity(model, step, "e4m3fn", **o),
    "watch": lambda model, step, **o: fpsim.watch(model, step, ["e4m3fn"], **o).rows(),
}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", TOOLS)
def test_a_step_and_a_batch_of_a_model_with_a_loss_say_the_same_and_leave_all_as_it_was(
    name: str, quantised: bool
) -> None:
    if name == "watch" and quantised:
        pytest.skip("watch takes a plain model")
    model = fpsim.quantize(Classifier(), "bf16") if quantised else Classifier()
    model.up.weight.grad = torch.ones(6, 6)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = repr(model), torch.get_rng_state()
    results = [TOOLS[name](model, given) for given in (step_of(model), (X, Y), {"x": X, "labels": Y})]
    words = [[line for line in str(r).splitlines() if not line.startswith("KL ")] for r in results]  # of outputs
    assert words[0] == words[1] == words[2]
    assert [*map(repr, results[0])] == [*map(repr, results[1])]
    assert all(v.equal(state[k]) for k, v in model.state_dict().items())
    assert model.up.weight.grad.equal(torch.ones(6, 6))
    assert model.head.weight.grad is None
    assert repr(model) == before[0]
    assert torch.get_rng_state().equal(before[1])


def test_a_comparison_of_a_step_is_that_of_its_batch() -> None:
    model = Classifier()
    old = fpsim.compare(model, None, "e4m3fn", (X, Y))
    new = fpsim.compare(model, step_of(model), None, "e4m3fn")
    assert list(old) == list(new)
    assert old.losses == new.losses
    assert list(fpsim.compare(model, (X, Y), None, "e4m3fn")) == list(old)


def test_dtypes_are_formats_and_no_steps() -> None:
    model = Classifier()
    by_name = fpsim.compare(model, None, "bf16", (X, Y))
    assert list(fpsim.compare(model, torch.float32, torch.bfloat16, (X, Y))) == list(by_name)
    assert list(fpsim.compare(model, step_of(model), np.float32, torch.bfloat16)) == list(by_name)
    with pytest.raises(TypeError, match="Expected a format, got"):
        fpsim.compare(model, lambda: None, "bf16", X)


@pytest.mark.parametrize("name", ["why", "diagnose", "watch"])
def test_a_batch_takes_a_loss_for_a_model_that_has_none(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3))

    def step() -> Tensor:
        total = F.cross_entropy(model(X), Y)
        total.backward()
        return total

    by_batch = TOOLS[name](model, X, loss=lambda out: F.cross_entropy(out, Y))
    assert str(by_batch) == str(TOOLS[name](model, step))


@pytest.mark.parametrize("name", TOOLS)
def test_a_wrong_form_is_refused_in_a_line_that_shows_the_right_one(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(
        TypeError, match=r"^Got .*fpsim\.\w+\(model, lambda: loss\(model\(x\)\)\.backward\(\)\)\.$"
    ) as e:
        TOOLS[name](model, lambda x, y: model(x).sum())
    assert "needs 2 arguments" in str(e.value)
    if name != "compare":  # which runs forward alone for a model without a loss
        with pytest.raises(TypeError, match=r"has no `loss`\. Expected loss=lambda output"):
            TOOLS[name](model, X)
    if name in ("why", "diagnose", "watch"):
        with pytest.raises(TypeError, match=r"Got loss=<function .* with a step"):
            TOOLS[name](model, lambda: model(X).sum(), loss=lambda out: out.sum())


def test_a_step_of_a_model_in_eval_mode_is_not_watched_in_silence() -> None:
    model = nn.Linear(6, 3).eval()
    with pytest.raises(ValueError, match=r"eval mode. watch sees calls in training: model.train\(\)"):
        fpsim.watch(model, lambda: model(X).sum().backward())


def test_old_forms_of_watch_stay() -> None:
    model = nn.Linear(6, 3)
    for watching in (fpsim.watch(model, ["fp16"]), fpsim.watch(model, formats=("fp16",)), fpsim.watch(model)):
        with watching:
            model(X).sum().backward()
        assert {row["format"] for row in watching.rows()} >= {"fp16"}


class Branches(nn.Module):
    """Takes a branch, in which it divides by zero if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: 1 / self.inner(x), lambda x: self.other(x), (x,))  # type: ignore[no-any-return]


def test_diagnose_looks_into_the_branch_that_is_taken() -> None:
    model = Branches()
    with torch.no_grad():
        model.inner.weight.zero_()
        model.inner.bias.zero_()
    assert str(fpsim.diagnose(model, lambda: model(-X.abs()).sum())).startswith("Nothing is inf")
    found = str(fpsim.diagnose(model, lambda: model(X.abs()).sum()))
    assert found.startswith("inf first appears forward at :rdiv, activation: 24 of 24 (100 %), a division by zero")


def test_watch_sees_the_modules_of_the_branch_that_is_taken() -> None:
    model = Branches()
    with fpsim.watch(model) as watched:
        model(X.abs()).sum().backward()
    sites = {row["site"] for row in watched.rows()}
    assert "inner:linear" in sites
    assert "other:linear" not in sites


def test_why_and_sensitivity_take_a_step_with_branches() -> None:
    model = Branches()

    def step() -> Tensor:
        total = model(X.abs()).square().mean()
        total.backward()
        return total

    assert fpsim.why(model, step) is not None
    assert "inner" in str(fpsim.sensitivity(model, step, "e4m3fn"))


# Steps that call the parts of a model one by one


class Power(nn.Module):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).pow(2)


class Coder(nn.Module):
    """Has no forward of its own: `encode` and `decode` are called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(4, 6), Power())

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        """As a Lightning module has it."""
        return (self.decode(self.encode(x)) - x).square().mean()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), Power(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


Parts = tuple[nn.Module, Callable[[Tensor], Tensor], str]  # a model, its loss, and the module that overflows


def of_methods() -> Parts:
    model = Coder()
    return model, lambda x: (model.decode(model.encode(x)) - x).square().mean(), "decoder.1"


def of_a_training_step() -> Parts:
    model = Coder()
    return model, model.training_step, "decoder.1"


def of_an_adversary() -> Parts:
    gan = nn.ModuleDict({"g": nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "d": Critic()})

    def loss(x: Tensor) -> Tensor:
        return F.softplus(gan["d"](gan["g"](x))).mean() + F.softplus(-gan["d"](x)).mean()

    return gan, loss, "d.layers.1"


def of_a_list_with_checkpoints() -> Parts:
    layers = nn.ModuleList([nn.Linear(6, 6), Power(), nn.Linear(6, 1)])

    def loss(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    return layers, loss, "1"


def of_a_part_of_a_part() -> Parts:
    model = nn.ModuleDict({"both": nn.Sequential(nn.Linear(6, 6), Power()), "head": nn.Linear(6, 1)})

    def loss(x: Tensor) -> Tensor:
        return model["head"](model["both"][1](x) + model["both"](x)).square().mean()  # type: ignore[index, no-any-return]

    return model, loss, "both.1"


PARTS = {
    parts.__name__: parts
    for parts in (of_methods, of_a_training_step, of_an_adversary, of_a_list_with_checkpoints, of_a_part_of_a_part)
}


def step_of_parts(name: str, fmt: str) -> tuple[nn.Module, Callable[[], Tensor], str]:
    """In half, fp16 and under autocast a power overflows."""
    torch.manual_seed(0)
    model, loss, at = PARTS[name]()
    for part in model.modules():
        if isinstance(part, Power):
            part.scale = 4000.0 if fmt in ("half", "fp16", "autocast") else 1.0
    if fmt in ("fp16", "bf16"):
        fpsim.quantize(model, fmt, inplace=True)
    x = X.half() if fmt == "half" else X
    model.to(x.dtype)

    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=fmt == "autocast"):
            total = loss(x)
        total.backward()
        return total

    return model, step, at


@pytest.mark.filterwarnings("ignore:Coder.* outside of the model's forward")  # of its methods, which is said once
@tiers.parametrize("fmt", ["half", "fp16", "autocast"], keep=["half", "fp16"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_a_step_calls_one_by_one_have_their_names(name: str, fmt: str) -> None:
    model, step, at = step_of_parts(name, fmt)
    found = fpsim.why(model, step)
    assert found.cause is not None
    place = found.cause["place"]
    assert (place.partition(":")[0], found.cause["kind"]) == (at, "overflow")
    assert fpsim.diagnose(model, step).cause["site"] == place  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:Coder.* outside of the model's forward")  # of its methods, which is said once
@tiers.parametrize("name", PARTS, keep=["of_methods", "of_an_adversary"])
def test_parts_have_the_names_that_a_recording_has(name: str) -> None:
    model, step, _ = step_of_parts(name, "bf16")
    with fpsim.record(model) as recording:
        step()
    rounded = {row["site"] for row in recording.rows() if row["role"] == "activation"}
    recorded = {site for site in rounded if not site.endswith(":activation")}  # without what comes in from outside
    seen = {row["site"] for row in fpsim.why(model, step).run}
    compared = {row["site"] for row in fpsim.compare(model, step, None, "bf16") if row["role"] == "activation"}
    assert recorded == {site for site in seen if not site.startswith(":")}
    assert recorded == {site for site in compared if not site.startswith(":")}
    rows = fpsim.watch(*step_of_parts(name, "float32")[:2], ["bf16"]).rows()
    assert {row["step"] for row in rows} == {1}
    assert recorded == {row["site"] for row in rows if row["role"] == "activation"}


def test_a_part_that_is_called_twice_has_two_calls_and_nothing_stays_behind() -> None:
    model, step, _ = step_of_parts("of_an_adversary", "half")
    rows = fpsim.diagnose(model, step).run
    assert [row["call"] for row in rows if row["site"] == "d.layers.0:linear"] == [0, 1]

    def raises() -> None:
        step()
        raise KeyError("a word")

    with pytest.raises(KeyError, match="a word"):
        fpsim.diagnose(model, raises)
    assert all(vars(module).get("_compiled_call_impl") is None for module in model.modules())
