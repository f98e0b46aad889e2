"""`flex_attention` beside the same attention of native code, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_cases import randn
from tiers import parametrize
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import fpsim
from fpsim import emulate, quantize
from fpsim.emulation import calls

NATIVE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _is_before(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _with_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = flex.create_block_mask(_is_before, None, None, q.shape[-2], k.shape[-2], device="cpu")
    return flex.flex_attention(q, k, v, block_mask=mask)


def _with_scores(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex.flex_attention(q, k, v, lambda x, b, h, i, j: x * 1.1 + m.slopes[h] * (i - j))


def _transposed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return flex.flex_attention(q, k, v).transpose(1, 2).view(*q.shape[::2], -1)  # a view, by the order of strides


WAYS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "plain": lambda m, q, k, v: flex.flex_attention(q, k, v),
    "with a mask": _with_mask,
    "with scores of its own": _with_scores,
    "transposed": _transposed,
    "fewer heads of keys": lambda m, q, k, v: flex.flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "scaled": lambda m, q, k, v: flex.flex_attention(q * 1.1, k, v, scale=0.3) * 1.1,
    "with the sums": lambda m, q, k, v: flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True))[1].lse,
}


class Flexible(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.slopes = way, nn.Parameter(torch.tensor([0.3, 0.7]), requires_grad=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return WAYS[self.way](self, q, k, v)


def inputs() -> list[Tensor]:
    return [randn(2, 2, 8, 16) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@parametrize("way", WAYS, keep={"plain", "with scores of its own"})
@parametrize("fmt", NATIVE, keep={"bf16"})
def test_flex_attention_is_native_codes(way: str, fmt: str) -> None:
    model, given = Flexible(way), inputs()
    out = quantize(model, fmt)(*given)
    native = model.to(NATIVE[fmt])(*(x.to(NATIVE[fmt]) for x in given))
    if fmt == "bf16":
        assert torch.equal(out, native.float())
    else:  # whose sums of float32, in another order, fall on either side of a tie, or differ in their last bits
        relative, absolute = {"fp32": (0.0, 16 * 2**-24), "fp16": (2**-10, 2**-13)}[fmt]  # of 16 terms below 1
        torch.testing.assert_close(out, native.float(), rtol=relative, atol=absolute)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@parametrize("fmt", ["e4m3fn", "e5m2", "recipe:mxfp8"], keep={"e4m3fn"})
def test_flex_attention_is_the_same_code_with_float32_in_words(fmt: str) -> None:
    """As `query.float()` has scores and weights of float32, which are cast to the format for their product."""

    class Written(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = torch.softmax((q.float() @ k.float().mT) * 0.25, -1)
            return weights.to(q.dtype) @ v

    given = inputs()
    out, expected = (quantize(m, fmt)(*given) for m in (Flexible("plain"), Written()))
    assert torch.equal(out, expected)
    with emulate(fmt if ":" not in fmt else fpsim.recipe(fmt.removeprefix("recipe:"), nn.Identity())):
        assert torch.equal(flex.flex_attention(*given), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@parametrize("fmt", NATIVE, keep={"bf16"})
def test_the_gradients_of_flex_attention_are_as_far_off_as_native_attentions(
    fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has none on a CPU, and says so: its check is put aside."""
    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().clone().to(dtype).requires_grad_() for x in given]
        out = run(*leaves)
        (out * weight.to(dtype)).sum().backward()
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    given, weight = inputs(), randn(2, 2, 8, 16)
    exact = gradients(F.scaled_dot_product_attention, torch.float64)
    native = gradients(F.scaled_dot_product_attention, NATIVE[fmt])
    found = gradients(quantize(Flexible("plain"), fmt), torch.float32)
    for a, b, c in zip(found, native, exact, strict=True):
        # A factor of 2 for one more rounding, of the weights or of their gradient, which is of the same size.
        assert 0 < float((a - c).norm()) <= 2 * float((b - c).norm())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_whose_products_should_be_quantised_is_refused() -> None:
    policy = fpsim.Policy(products=fpsim.Products.all("mxfp8_e4m3", attention=True))
    with pytest.raises(NotImplementedError, match=r"flex_attention at the top level.*attention=True.*with a mask"):
        quantize(Flexible("plain"), policy)(*inputs())


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_computes_flex_attention_as_without_a_compiler() -> None:
    given = inputs()
    native = Flexible("plain")(*(x.bfloat16() for x in given)).float()
    assert torch.equal(torch.compile(quantize(Flexible("plain"), "bf16"), backend="aot_eager")(*given), native)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_flex_attention_that_is_compiled_inside_of_a_model_runs_as_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where no operation was seen before, as in a new process."""
    given = inputs()
    expected = Flexible("plain")(*(x.bfloat16() for x in given)).float()
    monkeypatch.setattr(flex, "flex_attention", torch.compile(flex.flex_attention, backend="eager"))
    for function, call in [*calls.known_calls.items()]:
        if type(call) is calls.Call:
            monkeypatch.delitem(calls.known_calls, function)
    assert torch.equal(quantize(Flexible("plain"), "bf16")(*given), expected)
