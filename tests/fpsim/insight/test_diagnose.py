"""Where a step breaks: steps that break at a known place, recomputed with torch's casts and NumPy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import fpsim
from fpsim.insight.diagnose import AFTER


class Attention(nn.Module):
    """One head of causal attention, written out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).mT
        mask = torch.triu(torch.ones(x.shape[0], x.shape[0], dtype=torch.bool), 1)
        return logits.masked_fill(mask, -torch.inf).softmax(-1) @ x


def grown(factor: float) -> Attention:
    model = Attention()
    with torch.no_grad():
        model.query.weight *= factor
        model.key.weight *= factor
    return model


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def in_fp16(model: nn.Module, scale: float = 1.0):
    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            out = model(X)
        (out.float().square().sum() * scale).backward()

    return step


def test_the_product_that_overflows_under_autocast_is_named_with_its_operands_and_the_way_to_the_loss() -> None:
    model = grown(2e3)
    found = fpsim.diagnose(model, in_fp16(model))
    q, k = (F.linear(X.half(), m.weight.detach().half()) for m in (model.query, model.key))
    logits = q @ k.mT
    assert found.cause is not None
    assert (found.cause["site"], found.cause["role"]) == (":matmul", "activation")
    counts = {"inf": int((logits == torch.inf).sum()), "-inf": int((logits == -torch.inf).sum())}
    assert {e["kind"]: e["count"] for e in found if e["site"] == ":matmul" and e["role"] == "activation"} == {
        kind: n for kind, n in counts.items() if n
    }
    assert found.cause["largest"] == 65504
    assert [row["what"] for row in found.operands] == ["query:linear", ":mT"]
    low, high = (float(f"{v:.3g}") for v in (q.min(), q.max()))
    assert found.operands[0]["range"] == f"{low:.3g} to {high:.3g}"
    assert [row["site"] for row in found.chain] == [
        *(":matmul", ":masked_fill", ":softmax", ":matmul_1", ":square", ":sum", ":mul")
    ]
    assert f"{found.cause['kind']} first appears forward at :matmul" in str(found)
    assert found.plot()._repr_png_()[:4] == b"\x89PNG"


def test_a_step_without_trouble_has_no_cause_and_a_mask_is_none() -> None:
    model = grown(1.0)
    found = fpsim.diagnose(model, in_fp16(model))
    assert list(found) == []
    assert str(found).startswith("Nothing is inf, NaN or saturated. fpsim.why(model, step) looks at")


def test_a_row_that_is_masked_as_a_whole_gives_nan_at_the_softmax() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf).softmax(-1) + 1

    model = Masked()
    found = fpsim.diagnose(model, lambda: model(X))
    assert [(e["site"], e["kind"], e["count"]) for e in found] == [(":softmax", "NaN", X.numel())]


def test_an_emulated_fp16_overflows_as_numpys_float16() -> None:
    model = grown(2e3)
    quantised = fpsim.quantize(model, "fp16")
    found = fpsim.diagnose(quantised, lambda: quantised(X).sum().backward())

    def half(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().astype(np.float16).astype(np.float32))

    with np.errstate(over="ignore"):
        q, k = (half(F.linear(half(X), half(m.weight))) for m in (model.query, model.key))
        logits = half(q @ k.mT)
    assert found.cause is not None
    assert (found.cause["site"], found.cause["kind"]) == (":matmul", "inf")
    assert found.cause["count"] == int(logits.isinf().sum())
    assert found.cause["amax"] == pytest.approx(float((q @ k.mT).abs().max()), rel=1e-6)


def test_saturated_operands_of_a_product_are_counted() -> None:
    layer = nn.Linear(8, 4, bias=False)
    model = fpsim.quantize(nn.Sequential(layer), fpsim.Policy(products=fpsim.Products.all("e4m3fn")))
    x = torch.linspace(-600, 600, 80).reshape(10, 8)
    found = fpsim.diagnose(model, lambda: model(x).sum().backward())
    cut_off = int((x.abs() >= 448 + 16).sum())  # 16 is half an ulp of e4m3fn's largest value
    assert [(e["site"], e["role"], e["kind"], e["count"]) for e in found] == [
        ("0:linear", "fprop.x", "saturation", cut_off),
        ("0:linear", "wgrad.x", "saturation", cut_off),
    ]
    assert found.cause is not None
    assert (found.cause["amax"], found.cause["largest"]) == (600, 448)


def test_a_delayed_scale_that_lags_behind_saturates() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4, bias=False))
    model = fpsim.quantize(net, fpsim.recipe("fp8_delayed", net))
    x = torch.linspace(-1, 1, 80).reshape(10, 8)
    model(x).sum().backward()  # the scale of the next step: 448 / 1
    assert list(fpsim.diagnose(model, lambda: model(x).sum().backward())) == []
    before = fpsim.scaling_state(model)
    found = fpsim.diagnose(model, lambda: model(1.5 * x).sum().backward())
    cut_off = int(((1.5 * x).bfloat16().float().abs() > 464 / 448).sum())  # 16 is half an ulp of 448
    assert {e["role"]: e["count"] for e in found} == {"fprop.x": cut_off, "wgrad.x": cut_off}
    after = fpsim.scaling_state(model)
    assert all(torch.equal(after[name][k], before[name][k]) for name in before for k in ("amaxes", "scale", "pending"))


@pytest.mark.parametrize("x", [1.0, 6.0], ids=["all is lost", "all becomes the least number"])
def test_a_delayed_scale_after_a_spike_underflows_and_saturates_nothing(x: float) -> None:
    """At a scale for numbers up to 1e6 the least number is 1e6 / 448 * 2**-9 = 4.36."""
    net = nn.Sequential(nn.Linear(8, 4))
    model = fpsim.quantize(net, fpsim.recipe("fp8_delayed", net))
    model(torch.full((4, 8), 1e6)).sum().backward()
    assert list(fpsim.diagnose(model, lambda: model(torch.full((4, 8), x)).sum().backward())) == []


def test_the_gradient_that_overflows_and_the_scale_at_which_none_does_are_those_that_torch_finds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 3))

    def run(scaler: torch.amp.GradScaler) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = 30 * model(X).float().square().mean()
        scaler.scale(loss).backward()

    def fits(log2_scale: int) -> bool:
        model.zero_grad()
        run(torch.amp.GradScaler("cpu", init_scale=2.0**log2_scale))
        return all(bool(p.grad.isfinite().all()) for p in model.parameters())

    largest = max(k for k in range(8, 24) if fits(k))
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    found = fpsim.diagnose(model, lambda: run(scaler), scaler=scaler)
    assert not fits(22)
    assert found.scale == (2.0**22, 2.0**largest)
    assert found.cause is not None
    assert found.cause["role"] in ("error", "weight_grad")
    assert found.cause["site"].startswith("3")  # the last layer's is the first that the backward pass computes
    assert found.layers[0]["fits"] == 2.0**largest
    assert scaler.get_scale() == 2.0**22
    assert f"{2.0**largest:g}" in str(found)


def test_a_scaler_does_not_help_where_the_forward_pass_overflows() -> None:
    model = grown(2e3)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(X).float().square().sum()
        scaler.scale(loss).backward()

    found = fpsim.diagnose(model, step, scaler=scaler)
    assert found.scale == (65536.0, None)
    assert "not finite down to a scale of 2^-60" in str(found)


def test_what_the_step_changes_is_put_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model(X).sum().backward()
    tensors = {**model.state_dict(), **{f"grad {n}": p.grad for n, p in model.named_parameters()}}
    before, state = {name: x.clone() for name, x in tensors.items()}, torch.get_rng_state()

    def step() -> None:
        model(X).square().sum().backward()
        with torch.no_grad():
            model[0].weight += 1

    fpsim.diagnose(model, step)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())
    assert all(not p._backward_hooks for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("quantised", [False, True], ids=["autocast", "emulated"])
def test_growing_attention_logits_of_a_gpt2_are_found(quantised: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, :64] *= 2000  # queries and keys
    ids = torch.arange(16)[None]
    if quantised:
        model = fpsim.quantize(model, "fp16")

    def step() -> None:
        with torch.autocast("cpu", torch.float16, enabled=not quantised):
            loss = model(ids, labels=ids).loss
        loss.backward()

    found = fpsim.diagnose(model, step)
    assert found.cause is not None
    assert (found.cause["site"], found.cause["role"]) == ("transformer.h.1.attn:matmul", "activation")
    assert found.cause["kind"] in ("inf", "-inf")
    assert found.chain[0]["site"] == "transformer.h.1.attn:matmul"
    assert "NaN" in found.chain[-1]["result"]
    assert math.isnan(model(ids, labels=ids).loss.item()) is quantised  # it does break, and float32 does not


def test_what_is_no_grad_scaler_and_a_recorded_model_are_refused() -> None:
    model = fpsim.quantize(Attention(), "fp16")
    with pytest.raises(TypeError, match=r"Expected: a torch\.amp\.GradScaler"):
        fpsim.diagnose(model, lambda: None, scaler=2.0)  # type: ignore[arg-type]
    with fpsim.record(model), pytest.raises(ValueError, match="is being recorded"):
        fpsim.diagnose(model, lambda: model(X))


@pytest.mark.parametrize("fmt", [None, "fp16"])
@pytest.mark.parametrize("where", ["input", "parameter", "buffer"])
def test_nan_that_came_in_is_named_where_it_came_in_and_not_where_it_is_seen_backward(
    fmt: str | None, where: str
) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    x = torch.ones(2, 4)
    broken = {"input": x, "parameter": model[0].weight.data, "buffer": model[1].running_mean}[where]
    broken.view(-1)[1] = torch.nan
    model = model if fmt is None else fpsim.quantize(model, fmt)
    found = fpsim.diagnose(model, lambda: model(x).square().mean().backward())
    names = {"input": "(from outside), read by 0:linear", "parameter": "0.weight", "buffer": "1.running_mean"}
    assert found.cause is not None
    assert (found.cause["site"], found.cause["role"], found.cause["kind"]) == (names[where], where, "NaN")
    assert (found.cause["count"], found.cause["of"]) == (1, broken.numel())
    assert str(found).startswith(f"NaN came in with {where} {names[where]}: 1 of {broken.numel()}")


def test_a_forward_pass_alone_that_reads_nan_has_a_cause() -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    x[0, 0] = torch.nan
    assert str(fpsim.diagnose(model, lambda: model(x).sum())).startswith("NaN came in with input")


def test_what_the_optimizer_made_infinite_is_told_of() -> None:
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.full((2, 4), 1e-3).half()) * 1e-2).sum().backward()
        optimizer.step()

    found = fpsim.diagnose(model, step)
    assert found.cause is not None
    assert (found.cause["site"], found.cause["role"]) == ("weight", "the parameter")
    assert bool(model.weight.isfinite().all())


def test_gradients_that_overflow_as_they_are_summed_are_told_of() -> None:
    model = nn.Linear(4, 1, bias=False).half()
    model.weight.grad = torch.full((1, 4), 6e4).half()
    found = fpsim.diagnose(model, lambda: model(torch.full((2, 4), 1e4).half()).sum().backward())
    assert found.cause is not None
    assert (found.cause["site"], found.cause["role"], found.cause["count"]) == ("weight", AFTER[2], 4)


def test_a_buffer_that_overflows_in_the_step_is_told_of() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(2)).half(), torch.tensor([[-3e4, 1.0], [3e4, 2.0]]).half()
    found = fpsim.diagnose(model, lambda: model(x).sum().backward())
    assert [event["site"] for event in found] == ["0.running_var"]


def test_a_model_that_is_recorded_is_not_diagnosed_meanwhile() -> None:
    model = fpsim.quantize(nn.Linear(1, 1), "fp16")
    with fpsim.record(model) as recording:
        with pytest.raises(ValueError, match=r"This model is being recorded\. Leave the"):
            fpsim.diagnose(model, lambda: model(torch.ones(1, 1)).sum().backward())
        model(torch.ones(1, 1))  # the recording goes on
    assert {row["role"] for row in recording.rows()} >= {"activation"}


@pytest.mark.parametrize("step", [3, "step", None], ids=str)
def test_what_is_neither_a_step_nor_a_batch_is_refused(step: object) -> None:
    with pytest.raises(TypeError, match=r"as the step of fpsim\.diagnose\. Expected a function without arguments"):
        fpsim.diagnose(nn.Linear(1, 1), step)  # type: ignore[arg-type]


class Beside(nn.Module):
    """Runs a module of its own in another thread while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.has_begun, self.may_end = Waits(self), threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.other, args=(x.detach(),))
        thread.start()
        self.has_begun.wait(60)
        y = x.exp()
        self.may_end.set()
        thread.join()
        return y


class Waits(nn.Module):
    def __init__(self, beside: Beside) -> None:
        super().__init__()
        self.beside = (beside,)  # not a module of this one

    def forward(self, x: Tensor) -> Tensor:
        self.beside[0].has_begun.set()
        self.beside[0].may_end.wait(60)
        return x


def test_an_operation_is_not_named_for_a_module_that_another_thread_runs() -> None:
    model = Beside()
    x = torch.full((1,), 100.0, requires_grad=True)  # e^100 is beyond the end of float32
    found = fpsim.diagnose(model, lambda: model(x).sum().backward())
    assert found.cause is not None
    assert found.cause["site"] == ":exp"


def test_a_step_that_runs_nothing_of_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^fpsim\.diagnose saw no operation"):
        fpsim.diagnose(nn.Linear(1, 1), lambda: None)


@pytest.mark.parametrize("divide", [Tensor.div, Tensor.divide_, Tensor.__itruediv__, torch.true_divide])
def test_a_division_by_zero_is_noted_in_every_spelling(divide: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = nn.Linear(2, 3)
    found = fpsim.diagnose(net, lambda: divide(net(torch.ones(1, 2)), torch.tensor([0.0, 1.0, 0.0])).sum())
    assert "a division by zero (2 of 3 divisors)" in str(found).splitlines()[0]


@pytest.mark.parametrize("fmt", [None, "e4m3fn", "recipe:fp8_current"])
def test_no_result_of_the_look_itself_and_no_gradient_twice_is_counted(fmt: str | None) -> None:
    x, plain = torch.randn(2, 4), nn.Linear(4, 2)
    model = plain if fmt is None else fpsim.quantize(plain, fmt)

    def step() -> None:
        for _ in range(2):
            model(x).sum().backward()

    wanted = "Looked at: 4 results, 4 gradients of results, those of 2 of 2 parameters;"
    assert fpsim.diagnose(model, step).checked.startswith(wanted)
