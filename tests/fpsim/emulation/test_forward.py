"""What a model computes forward under emulation: every call, against arithmetic done by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulated_cases import FP16, h, is_fp16, randn
from torch import Tensor, nn

import fpsim
from fpsim import Policy, emulate, quantize, round_to


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


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus, "sin": torch.sin, "log1p": torch.log1p,
    "square": lambda x: x**2, "times": lambda x: x * 0.1, "1 / x": lambda x: 1 / x,
    "softmax": lambda x: F.softmax(x, -1), "log_softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(), "std": lambda x: x.std(), "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: F.layer_norm(x, (6,)), "norm": lambda x: x.norm(), "normalize": lambda x: F.normalize(x),
    "clamp": lambda x: x.clamp(0.1, 0.9), "masked_fill": lambda x: x.masked_fill(x > 1, 0.3),
    "where": lambda x: torch.where(x > 1, x, 0.7), "pad": lambda x: F.pad(x, (1, 1), value=0.1),
    "dropout": lambda x: F.dropout(x, 0.3), "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "matmul": lambda x: x @ x.T, "linear": lambda x: F.linear(x, x),
    "addmm": lambda x: torch.addmm(x[:, :5], x, x.T[:, :5]), "lerp": lambda x: torch.lerp(x, -x, 0.3),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=1.5, mode="linear"),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_gives_the_rounded_float32_result_of_rounded_operands(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(5, 6) + 0.5
    torch.manual_seed(1)
    expected = call(h(x))
    torch.manual_seed(1)
    with emulate(FP16):
        got = call(x)
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


def test_a_change_in_place_is_rounded_with_noise_under_a_transform() -> None:
    def function(v: Tensor) -> Tensor:
        with emulate("e4m3fn", rounding="stochastic"):
            y = v * 1.0
            y.mul_(0.3)
        return y

    y = torch.func.vmap(function, randomness="different")(randn(5, 6))
    assert torch.equal(y, y.to(torch.float8_e4m3fn).float())


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
