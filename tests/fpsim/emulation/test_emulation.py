"""What a model computes under emulation: every call, forward and backward, against arithmetic done by hand."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import Policy, emulate, quantize, round_to
from fpsim.emulation import backward

FP16 = "fp16"


def h(x: Tensor) -> Tensor:
    """To fp16 and back by torch's own cast: the oracle of every expectation here."""
    return x.detach().half().float()


def is_fp16(x: Tensor) -> bool:
    return torch.equal(x.detach(), h(x))


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)


# Forward


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_elementwise_arithmetic_is_numpys_float16(name: str) -> None:
    bits = torch.randint(-(2**15), 2**15, (2, 50_000), dtype=torch.int32).to(torch.int16)
    a, b = (v.clone() for v in bits.view(torch.float16))
    numpy_name = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}[name]
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(getattr(np, numpy_name)(a.numpy(), b.numpy())).float()
    a, b = a.float(), b.float()
    with emulate(FP16):
        got = getattr(torch, name)(a, b)
    assert torch.equal(got.nan_to_num(7.0, 8.0, -8.0), expected.nan_to_num(7.0, 8.0, -8.0))


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp, torch.tanh, torch.sigmoid, torch.sqrt, torch.rsqrt, F.gelu, F.silu, F.softplus, torch.sin, torch.log1p,
    lambda x: x**2, lambda x: x * 0.1, lambda x: 1 / x, lambda x: F.softmax(x, -1), lambda x: x.log_softmax(-1),
    lambda x: x.sum(0), lambda x: x.mean(), lambda x: x.std(), lambda x: F.layer_norm(x, (6,)), lambda x: x.cumsum(0),
    lambda x: x.clamp(0.1, 0.9), lambda x: x.masked_fill(x > 1, 0.3), lambda x: torch.where(x > 1, x, 0.7),
    lambda x: F.pad(x, (1, 1), value=0.1), lambda x: F.dropout(x, 0.3), lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: x @ x.T, lambda x: F.linear(x, x), lambda x: torch.addmm(x[:, :5], x, x.T[:, :5]),
    lambda x: torch.lerp(x, -x, 0.3),
    lambda x: F.avg_pool1d(x, 2), lambda x: x.norm(), lambda x: F.interpolate(x[None], scale_factor=1.5, mode="linear"),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), lambda x: F.normalize(x),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(UNARY)))
def test_a_call_gives_the_rounded_float32_result_of_rounded_operands(index: int) -> None:
    x = torch.rand(5, 6) + 0.5
    torch.manual_seed(1)
    expected = UNARY[index](h(x))
    torch.manual_seed(1)
    with emulate(FP16):
        got = UNARY[index](x)
    assert is_fp16(got)
    assert torch.equal(got, h(expected))


def test_a_module_gives_the_rounded_result_of_rounded_operands() -> None:
    layer, x = nn.Linear(7, 3), randn(4, 7)
    expected = h(F.linear(h(x), h(layer.weight), h(layer.bias)))
    assert torch.equal(quantize(layer, FP16)(x), expected)
    conv, image = nn.Conv2d(2, 3, 3), randn(1, 2, 8, 8)
    expected = h(F.conv2d(h(image), h(conv.weight), h(conv.bias)))
    assert torch.equal(quantize(conv, FP16)(image), expected)
    table = nn.Embedding(5, 4)
    assert torch.equal(quantize(table, FP16)(torch.tensor([1, 3])), h(table.weight)[[1, 3]])


def test_views_copies_and_selections_change_nothing_and_stay_in_the_format() -> None:
    x = randn(4, 6)
    with emulate(FP16):
        y = x * 1.0
        pieces = [
            y.view(24), y.T, y[1], y[:, ::2], y.reshape(3, 8), y.expand(2, 4, 6), torch.cat([y, y]),
            torch.stack([y, y]),
            y.clone(), y.chunk(2)[1], y.unbind(0)[2], y.repeat(2, 1), y.contiguous(), y.flip(0), y.relu(), -y, y.abs(),
            y.max(), y.sort().values, y.gather(1, torch.zeros(4, 1, dtype=torch.int64)), F.max_pool1d(y, 2), y.detach(),
        ]  # fmt: skip
    for piece in pieces:
        assert is_fp16(piece)


def test_the_value_that_pads_is_rounded() -> None:
    long, short = torch.ones(2), torch.ones(1)
    with emulate(FP16):
        y = nn.utils.rnn.pad_sequence([long * 1, short * 1], padding_value=0.1)
    assert torch.equal(y, h(torch.tensor([[1.0, 1.0], [1.0, 0.1]])))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag], ids=lambda t: t.__name__)
def test_an_embedding_with_a_largest_norm_changes_its_weight(table: type[nn.Module]) -> None:
    layer, rows = table(5, 4, max_norm=0.5), torch.tensor([[1], [3]])
    model = quantize(layer, FP16)
    out = model(rows)
    layer(rows)
    assert torch.equal(model.weight, layer.weight)
    assert torch.equal(out.view(2, 4), h(layer.weight)[[1, 3]])


def test_a_weight_that_is_moved_keeps_the_format_of_weights() -> None:
    weight, x = nn.Parameter(randn(5, 6)), randn(3, 6)
    with emulate(Policy(weight=FP16, activation="e4m3fn")):
        y = x @ weight.T
    assert torch.equal(y, round_to(round_to(x, "e4m3fn") @ h(weight).T, "e4m3fn"))


def test_an_activation_in_the_format_of_the_next_modules_weights_is_rounded_as_an_activation() -> None:
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), randn(3, 4)
    model = quantize(layers, Policy(weight=FP16, activation="e4m3fn", overrides={"0": FP16}))
    hidden = h(F.linear(h(x), h(layers[0].weight), h(layers[0].bias)))
    expected = F.linear(round_to(hidden, "e4m3fn"), h(layers[1].weight), h(layers[1].bias))
    assert torch.equal(model(x), round_to(expected, "e4m3fn"))


def test_what_is_looked_up_in_a_weight_is_an_activation() -> None:
    layers, words = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), torch.tensor([1, 5])
    model = quantize(layers, Policy(weight=FP16, activation="e4m3fn"))
    x = round_to(h(layers[0].weight)[words], "e4m3fn")
    assert torch.equal(model[0](words), x)
    expected = round_to(F.linear(x, h(layers[1].weight), h(layers[1].bias)), "e4m3fn")
    assert torch.equal(model(words), expected)
    model = quantize(layers, Policy(weight=None, activation="e4m3fn"))
    assert torch.equal(model[0](words), round_to(layers[0].weight[words], "e4m3fn"))


def test_a_rounded_tensor_joined_with_another_is_rounded_again() -> None:
    raw = torch.full((2,), 1.5 + 2.0**-13)  # rounds to 1.5
    ones = torch.ones(2)
    with emulate(FP16):
        joined = torch.cat([ones * 1.5, raw])
        assert torch.equal(joined - 1.5, torch.zeros(4))


def test_what_is_joined_to_an_empty_tensor_stays_in_the_format() -> None:
    # as transformers joins keys to an empty cache: the gradient is rounded where h is made, and not where it was joined
    h, w, g = (round_to(torch.randn(shape), "bf16") for shape in ((64,), (3, 64), (3, 64)))
    h.requires_grad_()
    with emulate("bf16"):
        out = torch.cat([torch.tensor([], dtype=h.dtype), h * 1.0]).expand(3, 64) * w
    out.backward(g)
    products = g * w
    assert torch.equal(h.grad, products.sum(0).bfloat16().float())  # type: ignore[arg-type]
    assert not torch.equal(h.grad, products.bfloat16().float().sum(0).bfloat16().float())  # type: ignore[arg-type]


def test_in_place_calls_are_rounded_too() -> None:
    x, out = h(randn(8)), torch.empty(8)
    with emulate(FP16):
        a = x * 1.0
        a += 0.1
        assert torch.equal(a, h(x + 0.1))
        a.mul_(0.3)
        assert torch.equal(a, h(h(x + 0.1) * 0.3))
        b = x * 1.0
        b[2:4] = 0.1
        assert is_fp16(b)
        torch.exp(x, out=out)
        assert torch.equal(out, h(x.exp()))
        c = F.relu(x * 3, inplace=True)
        assert torch.equal(c, h(x * 3).relu())


@pytest.mark.parametrize(
    ("change", "slope"),
    [
        (lambda v: v.mul_(0.3), lambda y: 0.3),
        (lambda v: F.leaky_relu(v, 0.1, inplace=True), lambda y: torch.where(y > 0, 1.0, 0.1)),
    ],
    ids=["mul_", "leaky_relu"],
)
def test_what_a_call_changes_in_place_is_an_operand_and_is_rounded_first(
    change: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor | float]
) -> None:
    x, g = randn(1000, grad=True), randn(1000)
    raw = x * 1.5  # outside: in no format
    expected = round_to(change(round_to(raw.detach(), "e4m3fn")), "e4m3fn")
    with emulate("e4m3fn"):
        changed = change(raw)
    assert torch.equal(changed, expected)
    (gradient,) = torch.autograd.grad(changed, x, g)
    assert torch.equal(gradient, round_to(round_to(g, "e4m3fn") * slope(expected), "e4m3fn") * 1.5)
    with emulate("e4m3fn"), pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(2.0)
    assert not torch.equal(x, round_to(x.detach(), "e4m3fn"))  # refused, and left as it was


def test_operators_called_below_torchs_functions_are_treated_as_these_are() -> None:
    x = randn(50)
    expected = h(h(x) + 0.1)
    with emulate(FP16):
        moved = torch.ops.aten.view.default(x, [5, 10])
        torch.ops.aten.add_.Tensor(x, 0.1)
    assert torch.equal(x, expected)
    assert torch.equal(moved, expected.view(5, 10))  # a view of the same memory


def test_a_change_in_place_is_rounded_under_a_transform() -> None:
    def function(v: Tensor) -> Tensor:
        with emulate("e4m3fn"):
            y = v * 1.0
            y.mul_(0.3)
        return y

    x = randn(5, 6)
    expected = round_to(round_to(x, "e4m3fn") * 0.3, "e4m3fn")
    assert torch.equal(torch.func.vmap(function)(x), expected)


def test_a_rounded_tensor_that_is_changed_is_rounded_again() -> None:
    x = torch.ones(3)
    with emulate(FP16):
        y = x * 1.5
    y.add_(2.0**-13)  # outside: no value of fp16 any more
    with emulate(FP16):
        z = y - 1.5
    assert torch.equal(z, torch.zeros(3))


def test_a_view_that_a_computation_returns_leaves_its_operand_as_it_is() -> None:
    weight, x = nn.Parameter(randn(5, 6)), randn(3, 6)
    w = weight.detach().clone()
    with emulate(Policy(activation="e4m3fn")):
        moved = torch.einsum("ij->ji", weight)  # no copy: the parameter's own memory
    assert torch.equal(weight, w)
    assert torch.equal(moved, w.T)
    with emulate(Policy(weight=FP16, activation="e4m3fn")):
        torch.einsum("ij->ji", weight)
        y = F.linear(x, weight)  # the same rounded copy of the weight
    assert torch.equal(y, round_to(F.linear(round_to(x, "e4m3fn"), h(w)), "e4m3fn"))


@pytest.mark.parametrize(
    ("view", "owner"),
    [
        (torch.imag, lambda: torch.randn(8, dtype=torch.complex64)),
        (torch.view_as_real, lambda: torch.randn(8, dtype=torch.complex64)),
        (torch.Tensor.values, lambda: torch.randn(3, 3).to_sparse_coo().coalesce()),
        (lambda x: x.unsqueeze_(0), lambda: torch.randn(8)),
        (lambda x: x.t_(), lambda: torch.randn(3, 3)),
    ],
    ids=["imag", "view_as_real", "sparse values", "unsqueeze_", "t_"],
)
def test_a_view_of_what_is_in_no_format_leaves_its_numbers_and_is_rounded_where_it_is_used(
    view: Callable[[Tensor], Tensor], owner: Callable[[], Tensor]
) -> None:
    x = owner()
    numbers = view(x.clone())
    with emulate("e5m2"):
        seen = view(x)
        doubled = seen * 2.0
    assert torch.equal(seen, numbers)
    assert torch.equal(doubled, 2.0 * round_to(numbers, "e5m2"))


def test_a_weight_converted_by_type_keeps_the_format_of_weights() -> None:
    weight, x = nn.Parameter(randn(5, 6)), randn(3, 5).double()
    with emulate(Policy(weight="e4m3fn", activation=FP16)):
        y = x @ weight.type(torch.float64)
    assert torch.equal(y, round_to(round_to(x, FP16) @ round_to(weight.detach(), "e4m3fn").double(), FP16))


def test_a_result_written_over_an_operand_is_rounded() -> None:
    a, b = randn(50), randn(50)
    with emulate(FP16):
        a, b = a * 1.0, b * 1.0
        expected = h(a + b)
        torch.add(a, b, out=a)
    assert torch.equal(a, expected)


@pytest.mark.parametrize(
    ("role", "sites"),
    [("activation", {"0:activation", "0:linear", "2:linear"}), ("error", {"0:linear", "2:linear"})],
    ids=["activation", "error"],
)
def test_what_is_in_its_format_is_not_rounded_again(role: str, sites: set[str]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(inplace=True), nn.Linear(4, 4, bias=False))
    model = quantize(layers, Policy(**{role: FP16}))
    with fpsim.record(model) as recording:
        model(randn(3, 4)).sum().backward()
    assert {row["site"] for row in recording.rows()} == sites


def test_operands_in_a_tuple_are_rounded_and_so_are_results_in_one() -> None:
    a, b = randn(3, 4), randn(4, 5)
    with emulate(FP16):
        product = torch.linalg.multi_dot((a, b))
        pair = torch.std_mean(b, 0)
    assert torch.equal(product, h(h(a) @ h(b)))
    expected = [h(v) for v in torch.std_mean(h(b), 0)]
    assert all(map(torch.equal, pair, expected))

    def under_vmap(v: Tensor) -> tuple[Tensor, Tensor]:
        with emulate(FP16):
            return torch.std_mean(v)

    assert all(map(torch.equal, torch.func.vmap(under_vmap, in_dims=1)(b), expected))


def test_parameters_are_updated_and_initialised_in_float32() -> None:
    layer = nn.Linear(4, 3)
    before = [p.detach().clone() for p in layer.parameters()]
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    with emulate("e4m3fn"), pytest.warns(UserWarning, match="stays a float32 step"):
        torch.optim.SGD(layer.parameters(), lr=0.1, foreach=True).step()
    assert all(map(torch.equal, layer.parameters(), [p - 0.1 for p in before]))
    with emulate("e4m3fn"), torch.no_grad():
        layer.weight.copy_(before[0]).mul_(0.3)
    assert torch.equal(layer.weight, before[0] * 0.3)


def test_finite_numbers_of_an_attention_mask_are_an_operand() -> None:
    q, mask = h(randn(1, 5, 8)), 8 * randn(5, 5)
    mask[0, 1], mask[1, 2] = -torch.inf, torch.finfo(torch.float32).min
    with emulate(FP16):
        got = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    expected = h(mask)
    expected[1, 2] = mask[1, 2]  # it hides, as infinity does
    assert torch.equal(got, h(F.scaled_dot_product_attention(q, q, q, attn_mask=expected)))


def test_a_rounding_may_be_chosen_for_the_block() -> None:
    x = randn(50)
    with emulate(FP16, rounding="toward_zero"):
        y = x * 1.0
    assert torch.equal(y, round_to(x, FP16, "toward_zero"))


def test_an_input_keeps_its_values() -> None:
    x = randn(5)
    before = x.clone()
    with emulate("e4m3fn"):
        _ = x + 1
        _ = torch.exp(x)
    assert torch.equal(x, before)


def test_integers_and_booleans_pass() -> None:
    with emulate("e2m1fn"):
        n = torch.arange(100) * 7
        assert int(n[-1]) == 99 * 7
        assert bool((torch.tensor([1.0]) == 1.0).all())


def test_what_has_no_float_container_passes() -> None:
    with emulate("e4m3fn"):
        z = torch.fft.fft(torch.ones(4)) * 1j
        sparse = torch.eye(3).to_sparse() * 1.1
        eight = torch.ones(2).to(torch.float8_e5m2)
    assert z.is_complex()
    assert sparse.is_sparse
    assert eight.dtype is torch.float8_e5m2


def test_batch_norm_statistics_stay_float32_and_are_updated() -> None:
    layer = nn.BatchNorm2d(3, momentum=0.1)
    model, x = quantize(layer, FP16), randn(4, 3, 5, 5)
    out = model(x)
    twin = nn.BatchNorm2d(3, momentum=0.1)
    expected = twin(h(x))
    assert torch.equal(out, h(expected))
    assert torch.equal(model.running_mean, twin.running_mean)
    assert torch.equal(model.running_var, twin.running_var)
    assert not is_fp16(model.running_var)
    model.eval(), twin.eval()
    assert torch.equal(model(x), h(twin(h(x))))
    layer = nn.InstanceNorm2d(3, track_running_stats=True)
    model, twin = quantize(layer, FP16), layer
    assert torch.equal(model(x), h(twin(h(x))))
    assert torch.equal(model.running_var, twin.running_var)
    assert not is_fp16(model.running_var)


@pytest.mark.parametrize(
    "function",
    [torch.batch_norm, torch.ops.aten.batch_norm, torch.ops.aten.native_batch_norm, torch.instance_norm],
    ids=["torch", "operator", "native", "instance"],
)
def test_statistics_are_those_of_an_operator_whose_weight_comes_first(function: Callable[..., Tensor]) -> None:
    x, weight, bias = randn(6, 3, 5), randn(3), randn(3)
    mean, variance = randn(3), torch.rand(3)
    expected_mean, expected_variance = mean.clone(), variance.clone()
    rest = (True, 0.1, 1e-5) if function is torch.ops.aten.native_batch_norm else (True, 0.1, 1e-5, False)
    with emulate("e5m2"):
        out = function(x, weight, bias, mean, variance, *rest)
    x, weight, bias = (round_to(v, "e5m2") for v in (x, weight, bias))
    expected = function(x, weight, bias, expected_mean, expected_variance, *rest)
    first = (lambda v: v[0]) if isinstance(out, tuple) else (lambda v: v)
    assert torch.equal(first(out), round_to(first(expected), "e5m2"))
    assert torch.equal(mean, expected_mean)
    assert torch.equal(variance, expected_variance)


# Backward


@pytest.mark.parametrize(
    ("function", "gradient"),
    [
        (torch.tanh, lambda y: 1 - y * y),
        (torch.sigmoid, lambda y: (1 - y) * y),
        (torch.exp, lambda y: y),
    ],
    ids=["tanh", "sigmoid", "exp"],
)
def test_what_an_operation_saves_for_its_backward_is_the_rounded_result(
    function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]
) -> None:
    x = h(randn(1000)).requires_grad_()
    with emulate(Policy(activation=FP16)):
        y = function(x)
    y.sum().backward()
    expected = gradient(h(function(x.detach())))
    # ATen may fuse the formula: one float32 rounding of a number below 2, twice
    torch.testing.assert_close(x.grad, expected, rtol=2**-22, atol=2**-23)
    unrounded = gradient(function(x.detach()))
    assert (x.grad - expected).abs().sum() * 50 < (unrounded - expected).abs().sum()  # type: ignore[operator]


def test_the_gradients_of_two_layers_are_rounded_at_every_step() -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False))
    q, x, g = quantize(model, FP16), randn(3, 6), randn(3, 4)
    q(x).backward(g)
    w1, w2 = h(model[0].weight), h(model[2].weight)
    a1 = h(h(x) @ w1.T)
    r1 = a1.relu()
    g2 = h(g)
    assert torch.equal(q[2].weight.grad, h(g2.T @ r1))
    g1 = h((g2 @ w2) * (a1 > 0))
    assert torch.equal(q[0].weight.grad, h(g1.T @ h(x)))


def test_each_role_alone_rounds_what_it_names() -> None:
    layer, x, g = nn.Linear(6, 5, bias=False), randn(3, 6), randn(3, 5)
    w = layer.weight.detach()

    def run(**roles: str) -> tuple[Tensor, Tensor]:
        model = quantize(layer, Policy(**roles))
        out = model(x)
        out.backward(g)
        assert model.weight.grad is not None
        return out.detach(), model.weight.grad

    assert torch.equal(run()[0], x @ w.T)
    assert torch.equal(run(weight=FP16)[0], F.linear(x, h(w)))
    assert torch.equal(run(activation=FP16)[0], h(F.linear(h(x), w)))
    assert torch.equal(run(error=FP16)[1], h(g).T @ x)
    assert torch.equal(run(weight_grad=FP16)[1], h(g.T @ x))


def test_the_gradient_of_a_fan_out_is_rounded_once_and_hands_of_the_user_stay_clean() -> None:
    x = h(randn(50)).requires_grad_()
    g = randn(50)
    mine = g.clone()
    with emulate(FP16):
        y = x * 1.0
        z = y + y * 0.5
    y.retain_grad()
    z.backward(mine)
    assert torch.equal(mine, g)
    gz = h(g)
    assert torch.equal(y.grad, h(gz + h(gz) * 0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "outside",
    [
        lambda y: y + 0.0,
        lambda y: y.view(50),
        lambda y: y.mT,
        lambda y: y.unsqueeze(0),
        lambda y: y.view(50).view(2, 25),
    ],
    ids=["same tensor", "view", "transposed", "unsqueezed", "view of a view"],
)
def test_a_gradient_that_nobody_else_holds_is_rounded_where_it_is(
    outside: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, g = randn(5, 10, grad=True), randn(5, 10)
    with emulate("e4m3fn"):
        y = x * 1.0
    z = outside(y)
    loss = (z * outside(g)).sum()
    copies: list[Tensor] = []
    rounded = backward.rounded
    monkeypatch.setattr(backward, "rounded", lambda t, *rest: copies.append(t) or rounded(t, *rest))
    loss.backward()
    assert not copies
    assert torch.equal(x.grad, round_to(g, "e4m3fn"))  # type: ignore[arg-type]


@pytest.mark.parametrize("outside", [lambda y: y + 0.0, lambda y: y.view(50)], ids=["same tensor", "view of it"])
@pytest.mark.parametrize("keep", ["itself", "detached", "asked for"])
def test_a_gradient_that_a_hook_kept_is_not_changed_behind_its_back(
    outside: Callable[[Tensor], Tensor], keep: str
) -> None:
    x, g, kept = randn(5, 10, grad=True), randn(5, 10), []
    with emulate("e4m3fn"):
        y = x * 1.0
    z = outside(y)  # its backward hands on the very tensor that came, or a view of it
    if keep != "asked for":
        z.register_hook(lambda v: kept.append(v if keep == "itself" else v.detach()))
    into_z, into_x = torch.autograd.grad((z * g.view(z.shape)).sum(), (z, x))
    assert torch.equal((kept[0] if kept else into_z).view(5, 10), g)
    assert torch.equal(into_x, round_to(g, "e4m3fn"))


@pytest.mark.parametrize("shape", [(5, 10), (50,)], ids=["same tensor", "view of it"])
@pytest.mark.parametrize("keep", ["numpy", "dlpack", "storage"])
def test_a_gradient_whose_memory_is_kept_by_no_tensor_is_not_changed_behind_its_back(
    shape: tuple[int, ...], keep: str
) -> None:
    x, g = randn(5, 10, grad=True), randn(*shape)
    array, storages = g.numpy().copy(), []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, _: Tensor) -> Tensor:
            if keep == "numpy":
                own = torch.from_numpy(array)
            elif keep == "dlpack":
                own = torch.from_dlpack(array)
            else:
                own = g.clone()
                storages.append(own.untyped_storage())
            return own if own.shape == y.shape else own.view(y.shape)

    with emulate("e4m3fn"):
        y = x * 1.0
    Kept.apply(y).sum().backward()
    assert torch.equal(x.grad, round_to(g, "e4m3fn").view(5, 10))  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(array), g)
    assert all(bytes(storage) == g.numpy().tobytes() for storage in storages)


def test_a_residual_sum_does_not_mix_the_formats_of_its_branches() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    policy = Policy(error="fp32", overrides={"first": Policy(error="e5m2"), "second": Policy(error="e4m3fn")})
    model, x, g = quantize(Two(), policy), randn(4, 8), randn(4, 8)
    model(x).backward(g)
    assert torch.equal(model.first.weight.grad, round_to(g, "e5m2").T @ x)
    assert torch.equal(model.second.weight.grad, round_to(g, "e4m3fn").T @ x)


def test_a_weight_used_twice_has_its_gradient_rounded_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w + x @ self.w.T

    model, x, g = quantize(Tied(), Policy(weight=FP16, weight_grad=FP16)), h(randn(3, 5)), randn(3, 5)
    out = model(x)
    assert torch.equal(out, x @ h(model.w) + x @ h(model.w).T)
    out.backward(g)
    torch.testing.assert_close(model.w.grad, h(x.T @ g + (x.T @ g).T), rtol=2**-10, atol=0)  # the order of two sums
    assert is_fp16(model.w.grad)


def test_modules_that_share_an_operand_round_its_gradients_each_to_its_own_format() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    formats = {"first": "e5m2", "second": FP16}
    overrides = {name: Policy(FP16, FP16, error=f, weight_grad=f) for name, f in formats.items()}
    model, x, g = quantize(Shared(), Policy(overrides=overrides)), h(randn(3, 5)).requires_grad_(), h(randn(3, 5))
    for out, fmt in zip(model(x), formats.values(), strict=True):
        into_x, into_w = torch.autograd.grad(out, (x, model.first.weight), g)
        arrived = round_to(g, fmt)
        assert torch.equal(into_x, round_to(arrived @ h(model.first.weight), fmt))
        assert torch.equal(into_w, round_to(arrived.T @ x.detach(), fmt))


def test_a_parameter_unfrozen_in_the_block_gets_its_gradient() -> None:
    layer, x = nn.Linear(4, 3, bias=False).requires_grad_(False), randn(2, 4)
    with emulate(FP16):
        layer(x)
        layer.requires_grad_(True)
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, h(h(x).sum(0)).expand(3, 4))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag], ids=lambda t: t.__name__)
def test_a_sparse_gradient_of_an_embedding_is_rounded(table: type[nn.Module]) -> None:
    model, g, rows = quantize(table(5, 4, sparse=True), FP16), randn(3, 4), torch.tensor([1, 2, 2])
    if table is nn.EmbeddingBag:
        model(rows, torch.tensor([0, 1, 2])).backward(g)  # bags of one
    else:
        model(rows).backward(g)
    gradient = model.weight.grad
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), h(torch.zeros(5, 4).index_add(0, rows, h(g))))


def test_gradients_accumulate_in_float32() -> None:
    model, x = quantize(nn.Linear(4, 4, bias=False), FP16), randn(2, 4)
    grads = []
    for scale in (1.0, 2.0**-12):
        model.zero_grad()
        model(x).backward(torch.full((2, 4), scale))
        grads.append(model.weight.grad.clone())
    model.zero_grad()
    for scale in (1.0, 2.0**-12):
        model(x).backward(torch.full((2, 4), scale))
    assert torch.equal(model.weight.grad, grads[0] + grads[1])


def test_what_requires_a_gradient_after_it_was_rounded_has_its_error_rounded() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2  # without a gradient, then given one

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            arrived.append(g)
            return g * 2

    arrived: list[Tensor] = []
    x, g = h(randn(50)), randn(50)
    with emulate(FP16):
        leaf = (x * 1.0).detach().requires_grad_()
        out = Double.apply(leaf) * 0.3
    out.backward(g)
    assert torch.equal(arrived[0], h(h(g) * 0.3))
    assert torch.equal(leaf.grad, arrived[0] * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [0, 1], ids=["std", "mean"])
def test_an_output_that_nobody_uses_brings_no_gradient(used: int) -> None:
    x = h(randn(8)).requires_grad_()
    with emulate(Policy(error=FP16)):
        outputs = torch.std_mean(x)
    outputs[used].backward()
    (expected,) = torch.autograd.grad(torch.std_mean(x)[used], x)
    assert torch.equal(x.grad, h(expected))  # type: ignore[arg-type]


def test_a_gradient_of_a_gradient_passes_straight_through_the_rounding() -> None:
    x = torch.arange(1.0, 6.0).requires_grad_()  # all that follows are whole numbers that fp16 has
    with emulate(FP16):
        square, triple = x * x, x * 3.0
    y = (square + triple) * x  # outside: one gradient, which depends on x, arrives at two places
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(first, 3 * x**2 + 6 * x)
    assert torch.equal(second, 6 * x + 6)


def test_double_backward_and_retained_graphs_work() -> None:
    model, x = quantize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), FP16), randn(3, 4, grad=True)
    out = model(x).sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    g.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model[0].parameters())
    out = model(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(out, x)[0], first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_give_the_same_gradients(reentrant: bool) -> None:
    model = quantize(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), FP16)
    x = randn(4, 6, grad=True)
    for rounding in ("nearest_even", "stochastic"):
        model = quantize(fpsim.dequantize(model), FP16, rounding=rounding)
        results = []
        for call in (model, lambda v, m=model: checkpoint(m, v, use_reentrant=reentrant)):
            x.grad = None
            model.zero_grad()
            torch.manual_seed(5)
            call(x).sum().backward()
            results.append([x.grad.clone(), *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
        if rounding == "nearest_even":  # backward's own noise is drawn at another point of the stream
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_a_backward_pass_inside_the_block_runs_again_is_emulated(reentrant: bool) -> None:
    model = quantize(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6)), "e5m2")
    x = randn(4, 6, grad=True)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with emulate("e5m2"):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_a_forward_may_take_gradients_of_its_input() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    model, x = quantize(Force(), Policy("fp16", "fp16", "fp16", "fp16", overrides={"energy": "bf16"})), randn(2, 3)
    force = model(x.requires_grad_())
    assert torch.equal(force, model.energy.weight.bfloat16().float().expand(2, 3))
    force.sum().backward()
    assert torch.equal(model.energy.weight.grad, torch.full((1, 3), 2.0))


def test_functional_calls_and_transforms_are_emulated() -> None:
    layer, x = nn.Linear(4, 3), randn(5, 4)
    model = quantize(layer, FP16)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    expected = h(F.linear(h(x), h(layer.weight), h(layer.bias)))
    assert torch.equal(torch.func.functional_call(model, parameters, (x,)), expected)
    per_sample = torch.func.vmap(
        torch.func.grad(lambda p, v: torch.func.functional_call(model, p, (v,)).sum()), in_dims=(None, 0)
    )(parameters, x)
    assert torch.equal(per_sample["weight"], h(x)[:, None, :].expand(5, 3, 4))
    assert torch.equal(torch.func.vmap(model)(x), expected)


@pytest.mark.parametrize("attention", [False, True], ids=["linear", "attention"])
def test_a_tensor_in_the_place_of_a_parameter_has_the_formats_of_weights(attention: bool) -> None:
    layer, x = nn.MultiheadAttention(4, 2) if attention else nn.Linear(4, 3), randn(5, 4)
    model = quantize(layer, Policy(weight="e4m3fn", activation="bf16", error="bf16", weight_grad="e5m2"))
    inputs = (x, x, x) if attention else (x,)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for out in (model(*inputs), torch.func.functional_call(model, parameters, inputs)):
        (out[0] if attention else out).square().sum().backward()
    if not attention:
        weight, bias = (round_to(p.detach(), "e4m3fn") for p in (layer.weight, layer.bias))
        assert torch.equal(out, round_to(F.linear(round_to(x, "bf16"), weight, bias), "bf16"))
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, round_to(p.grad, "e5m2"))
        assert torch.equal(parameters[name].grad, p.grad)


def test_tangents_pass_straight_through() -> None:
    layer, x, t = nn.Linear(4, 3), randn(5, 4), randn(5, 4)
    out, tangent = torch.func.jvp(quantize(layer, FP16), (x,), (t,))
    assert torch.equal(out, h(F.linear(h(x), h(layer.weight), h(layer.bias))))
    assert torch.equal(tangent, F.linear(t, h(layer.weight)))
    model = quantize(nn.Sequential(layer, nn.Tanh()), FP16)
    assert torch.func.hessian(lambda v: model(v).sum())(x[0]).isfinite().all()


def test_inference_mode_and_no_grad_are_emulated() -> None:
    layer, x = nn.Linear(4, 3), randn(5, 4)
    expected = h(F.linear(h(x), h(layer.weight), h(layer.bias)))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(quantize(layer, FP16)(x), expected)


def test_in_inference_mode_too_a_tensor_that_is_changed_is_rounded_again() -> None:
    tiny = 2.0**-13  # 1.5 + tiny rounds to 1.5 in fp16; tiny itself is a value
    with torch.inference_mode():
        ones, caches = torch.ones(3), [torch.ones(3) for _ in range(3)]
        with emulate(FP16):
            y = ones * 1.5
        y.add_(tiny)
        with emulate(FP16):
            assert torch.equal(y - 1.5, torch.zeros(3))
            changes = (
                lambda v: v.fill_(1.5 + tiny),
                lambda v: v.__setitem__(slice(None), 1.5 + tiny),
                lambda v: torch.full((3,), 1.5 + tiny, out=v),
            )
            for change, cache in zip(changes, caches):
                assert torch.equal(cache * 2, torch.full((3,), 2.0))
                change(cache)
                assert torch.equal(cache - 1.5, torch.zeros(3))
            y = ones * 1.5
            y[1:] = 1.5 + tiny
            assert torch.equal(y, torch.full((3,), 1.5))


# What hides several operations


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


# The mode itself


def test_an_exception_or_an_interrupt_leaves_no_mode_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise self.error

    for error in (RuntimeError("no"), KeyboardInterrupt()):
        model = quantize(nn.Sequential(nn.Linear(3, 3), Fails()), "e2m1fn")
        model[1].error = error
        with pytest.raises(type(error)):
            model(randn(2, 3))
        x = randn(3)
        assert torch.equal(x * 1.1, x.double().mul(1.1).float()) or torch.equal(x * 1.1, torch.mul(x, 1.1))
        assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_two_threads_emulate_different_formats_at_once() -> None:
    layer, x = nn.Linear(16, 16), randn(8, 16)
    models = {name: quantize(layer, name) for name in ("fp16", "e5m2", "e4m3fn")}
    expected = {name: model(x) for name, model in models.items()}
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            if not torch.equal(models[name](x), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_activations_die_with_their_graph() -> None:
    model, x = quantize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), FP16), randn(2, 4)
    alive: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda m, i, out: alive.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        model(x).sum().backward()
        assert alive[0]() is None  # without the garbage collector: no reference cycle holds it
    finally:
        gc.enable()


def test_operands_die_while_the_block_runs_on() -> None:
    gc.collect()
    gc.disable()
    try:
        with emulate(FP16):
            x = randn(4)
            _ = x + x
            alive = weakref.ref(x)
            del x
            assert alive() is None
    finally:
        gc.enable()


def test_emulate_refuses_a_policy_for_modules() -> None:
    with pytest.raises(ValueError, match=r"Use quantize\(model, policy\)"), emulate(Policy(overrides={"a": None})):
        pass


def test_a_stochastic_model_is_reproducible_and_unbiased() -> None:
    model, x = quantize(nn.Linear(8, 8), "e4m3fn", rounding="stochastic"), randn(4, 8)
    torch.manual_seed(1)
    first = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    assert torch.equal(first, round_to(first, "e4m3fn"))


def test_operations_named_float32_are_left_alone() -> None:
    x = randn(3, 5)
    with emulate(Policy(activation="e4m3fn", float32=("softmax",))):
        y = F.softmax(x, -1)
        z = y * 1.0
    assert torch.equal(y, F.softmax(x, -1))
    assert torch.equal(z, round_to(y, "e4m3fn"))


def test_a_copy_of_an_emulated_result_can_be_saved(tmp_path: object) -> None:
    with emulate(FP16):
        y = randn(3) * 2
    path = f"{tmp_path}/y.pt"
    torch.save(y, path)
    assert torch.equal(torch.load(path, weights_only=True), y)
    assert torch.equal(copy.deepcopy(y), y)


class Heads(nn.Module):
    """Scores of two feature maps in one list, as detectors make them: their gradients are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(8, 15, 1)

    def forward(self, *maps: Tensor) -> Tensor:
        return torch.cat([self.scores(x).permute(0, 2, 3, 1).flatten(1) for x in maps], 1)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_gradients_with_holes_are_summed_in_the_same_order_in_fp32(is_recorded: bool) -> None:
    torch.manual_seed(0)
    model = Heads()
    emulated = quantize(model, "fp32")
    maps, weights = (torch.randn(2, 8, 9, 9), torch.randn(2, 8, 5, 5)), torch.randn(2, 15 * (81 + 25))
    with fpsim.record(emulated) if is_recorded else nullcontext():
        for m in (model, emulated):
            (m(*maps) * weights).sum().backward()
    for p, q in zip(model.parameters(), emulated.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
