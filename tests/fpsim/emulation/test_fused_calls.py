"""Calls that hide several operations: emulated inside, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_cases import FP16, is_fp16, randn
from tiers import parametrize
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as control_map
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fpsim
from fpsim import emulate, quantize
from fpsim.emulation import calls


def test_multihead_attention_is_emulated_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = quantize(nn.MultiheadAttention(8, 2, batch_first=True), FP16)
    x = randn(2, 5, 8)
    for need_weights in (True, False):
        for train in (True, False):
            attention.train(train)
            with fpsim.record(attention) as recording:
                out = attention(x, x, x, need_weights=need_weights)[0]
            assert is_fp16(out)
            operations = {row["site"].split(":")[1].rstrip("_0123456789") for row in recording.rows()}
            assert {"linear", "weight"} <= operations
            assert operations & {"scaled_dot_product_attention", "softmax", "baddbmm", "bmm"}


def test_a_transformer_layer_has_no_fast_path_around_the_emulation() -> None:
    layer = quantize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), FP16).eval()
    x = randn(2, 5, 8)
    with torch.no_grad():
        fast = layer(x)
    assert is_fp16(fast)
    slow = layer.train()(x)
    assert torch.equal(fast, slow)


def test_a_fused_call_that_cannot_be_looked_into_is_refused() -> None:
    x, w, b = randn(2, 5, 8), randn(24, 8), randn(24)
    with emulate(FP16), pytest.raises(NotImplementedError, match=r"hides several.*nn\.MultiheadAttention"):
        torch._native_multi_head_attention(x, x, x, 8, 2, w, b, w[:8], b[:8])


NATIVE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda x: m.a * x * 1.1, lambda x: x * m.b, (x,)),
    "the other branch": lambda m, x: torch.cond(x.sum() < 0, lambda x: m.a * x * 1.1, lambda x: x * m.b, (x,)),
    "cond in cond": lambda m, x: torch.cond(
        x.sum() > 0, lambda x: torch.cond(x.sum() < 0, lambda x: x + 1, lambda x: x * m.b, (x,)), lambda x: x * 2, (x,)
    ),
    "while_loop": lambda m, x: while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x * m.a * 1.1), (torch.tensor(0), x)
    )[1],
    "map": lambda m, x: control_map(lambda row: row * m.a * 1.1, x),
    "scan": lambda m, x: scan(lambda kept, row: (kept * 1.1 + row * m.a, kept * 1.1), torch.zeros_like(x[0]), x)[1],
}


class Bodied(nn.Module):
    """Gives functions to an operation of torch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.a, self.b = way, nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return BODIES[self.way](self, x)


@parametrize("way", BODIES, keep={"cond", "while_loop"})
@parametrize("fmt", NATIVE, keep={"fp32", "bf16"})
def test_functions_that_are_given_to_an_operation_are_emulated(way: str, fmt: str) -> None:
    """As native code computes them, bit for bit, of operations that are rounded once."""
    model, x = Bodied(way), torch.rand(5, 4)
    q, native = quantize(model, fmt), model.to(NATIVE[fmt])
    given, of_native = x.clone().requires_grad_(), x.to(NATIVE[fmt]).requires_grad_()
    out, expected = q(given), native(of_native)
    assert torch.equal(out, expected.float())
    out.sum().backward()
    expected.sum().backward()
    assert given.grad is not None
    if fmt == "fp32":  # sums over rows, in whatever order
        torch.testing.assert_close(given.grad, of_native.grad)
        for p, expected_p in zip(q.parameters(), native.parameters(), strict=True):
            if p.grad is None:  # of the branch that is not taken, where torch has zeros
                assert expected_p.grad is None or not expected_p.grad.any()
            else:
                torch.testing.assert_close(p.grad, expected_p.grad)


@parametrize("fmt", ["fp32", "bf16", "e4m3fn", "mxfp8_e4m3", "recipe:mxfp8"], keep={"fp32", "mxfp8_e4m3"})
def test_a_loop_of_torch_and_the_loop_written_out_have_equal_bits_forward_and_backward(fmt: str) -> None:
    class Loops(nn.Module):
        def __init__(self, is_written_out: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.is_written_out, self.layer = is_written_out, nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            i = torch.tensor(0)
            if not self.is_written_out:
                return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(self.layer(x)) + x), (i, x))[1]
            for _ in range(3):
                x = torch.tanh(self.layer(x)) + x
            return x

    def numbers(is_written_out: bool, is_block: bool) -> list[Tensor]:
        model, given = Loops(is_written_out), x.clone().requires_grad_()
        model = model if is_block else quantize(model, policy)
        with emulate(policy) if is_block else nullcontext():
            out = model(given)
        out.sum().backward()
        return [out, *(t.grad for t in (given, *model.parameters()) if t.grad is not None)]

    x, policy = randn(4, 32), fpsim.recipe("mxfp8", nn.Identity()) if ":" in fmt else fmt
    for is_block in (True, False):
        found, expected = numbers(False, is_block), numbers(True, is_block)
        assert len(found) == len(expected) == 4
        assert all(map(torch.equal, found, expected))
    if fmt == "fp32":
        plain = Loops(False)
        # Torch 2.13's own loop loses the gradient through what it carries, if the first of that requires none.
        plain(x.clone().requires_grad_()).sum().backward()
        torch.testing.assert_close(found[2], plain.layer.weight.grad)


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_each_sample_of_a_batch_takes_its_own_branch(fmt: str) -> None:
    model, x = Bodied("cond"), torch.tensor([[0.5, 1.0, 0.25, 2.0], [-0.5, -1.0, 0.25, -2.0]])
    found = torch.func.vmap(quantize(model, fmt))(x)
    native = model.to(NATIVE[fmt])
    assert torch.equal(found, torch.stack([native(row) for row in x.to(NATIVE[fmt])]).float())


def test_a_compiled_model_runs_functions_that_are_given_to_an_operation_as_without_a_compiler() -> None:
    q, x = quantize(Bodied("cond"), "bf16"), torch.rand(5, 4)
    with pytest.warns(UserWarning, match=r"torch's cond at the top level is given functions.*Use Python's own"):
        out = torch.compile(q, backend="aot_eager")(x)
    assert torch.equal(out, q(x))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@parametrize("fmt", ["bf16", "mxfp8_e4m3"], keep={"mxfp8_e4m3"})
@parametrize("is_known", [True, False], keep={True})
def test_functions_that_are_given_to_an_operation_in_a_compiled_block_are_refused(fmt: str, is_known: bool) -> None:
    model, x = Bodied("while_loop"), torch.rand(5, 4)
    calls.known_calls.pop(torch.ops.higher_order.while_loop, None)
    with emulate(fmt):
        if is_known:
            model(x)
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"fpsim emulates it without torch\.compile"):
            torch.compile(model, backend="aot_eager")(x)


@parametrize("fmt", [*NATIVE, "e4m3fn", "recipe:mxfp8"], keep={"fp32", "e4m3fn"})
@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
def test_a_causal_mask_of_torch_is_that_mask_written_out(mask: Any, fmt: str) -> None:
    class Attention(nn.Module):
        def __init__(self, make: Callable[[], Tensor]) -> None:
            super().__init__()
            self.make = make

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, :, :3] * 1.1, x, x, attn_mask=self.make())

    x = randn(2, 2, 5, 4)
    written = torch.ones(3, 5, dtype=torch.bool).tril(2 if mask is causal_lower_right else 0)
    got, expected = (quantize(Attention(make), fmt)(x) for make in (lambda: mask(3, 5), lambda: written))
    ulp = {"fp32": 2**-20, "fp16": 2**-10, "e4m3fn": 2**-3}.get(fmt, 2**-7)
    torch.testing.assert_close(got, expected, rtol=ulp, atol=0)  # of another kernel: it may fall on the other side
    plain = Attention(lambda: mask(3, 5))(x)
    if fmt == "fp32":
        assert torch.equal(got, plain)
    assert float((got - plain).norm()) < 0.1 * float(plain.norm())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without mkldnn")
def test_a_tensor_in_mkldnns_layout_is_refused() -> None:
    class Moved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_mkldnn()).to_dense()

    model, x = Moved(4, 3), randn(2, 4)
    with torch.no_grad():
        assert torch.equal(quantize(model, "fp32")(x), model(x))
        with pytest.raises(
            NotImplementedError, match=r"Got a tensor in mkldnn's layout from to_mkldnn.*x\.to_dense\(\)"
        ):
            quantize(model, "bf16")(x)
        with pytest.raises(NotImplementedError, match=r"Got a tensor in mkldnn's layout from linear at the top level"):
            quantize(nn.Linear(4, 3), "bf16")(x.to_mkldnn())
