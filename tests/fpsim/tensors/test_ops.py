"""The door to torch and NumPy: autograd, transforms, tracing, memory, bad input."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import re
import subprocess
import sys
import threading
import weakref
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiers
import torch
from format_cases import ML_DTYPES
from inductor import needs_inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fpsim
from fpsim import Rounder, as_format, decode, encode, round_to, round_to_
from fpsim.kernels.round import cpu_loop
from fpsim.kernels.tally import tally_loop
from fpsim.tensors import launch
from fpsim.tensors.launch import to_float64
from fpsim.tensors.spec import rounding_spec

ARGUMENTS = (repr(as_format("e4m3fn")), "nearest_even", "saturate", 0, None)


def test_the_operator_passes_torchs_own_checks() -> None:
    key = torch.tensor(12345)
    for x in (torch.randn(4, 5), torch.randn(6, 4).t()[::2], torch.randn(3, dtype=torch.float64), torch.empty(0)):
        for leaf in (x, x.clone().requires_grad_()):
            torch.library.opcheck(torch.ops.fpsim.round.default, (leaf, *ARGUMENTS))
            torch.library.opcheck(
                torch.ops.fpsim.round.default, (leaf, repr(as_format("e5m2")), "stochastic", "inf", 0, key)
            )


@pytest.mark.filterwarnings("ignore")
def test_it_compiles_as_one_graph_and_gives_the_same() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return round_to(x * 3, "e4m3fn") + 1

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    x = torch.randn(37, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = compiled(x), f(y)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(out, expected)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


@needs_inductor
@pytest.mark.filterwarnings("ignore")
def test_the_default_compiler_makes_code_that_gives_the_same() -> None:
    compiled = torch.compile(lambda x: round_to(x.exp() * 3, "e4m3fn") + 1, fullgraph=True)
    x = torch.randn(999)
    assert torch.equal(compiled(x), round_to(torch.compile(lambda x: x.exp() * 3)(x), "e4m3fn") + 1)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_compiles_as_one_graph_and_rounds_both_ways() -> None:
    layer = Rounder("e4m3fn", "e5m2")
    x = torch.randn(300, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(y)
    assert torch.equal(out, expected)
    gradient = torch.randn(300)
    out.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert torch.equal(y.grad, round_to(gradient, "e5m2"))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_stochastic_rounding_compiles_as_one_graph() -> None:
    compiled = torch.compile(lambda x: round_to(x, "e5m2", "stochastic"), fullgraph=True, backend="aot_eager")
    x = torch.full((4096,), 1.125)
    first, second = compiled(x), compiled(x)
    assert set(first.tolist()) == {1.0, 1.25}
    assert not torch.equal(first, second)


def test_the_gradient_is_straight_through_also_twice() -> None:
    for size in (5, 40_000):  # a small tensor and one that takes the other way
        x = torch.randn(size, requires_grad=True)
        y = round_to(x, "e5m2")
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        assert torch.equal(gradient, 3 * y**2)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert torch.equal(second, 6 * y)


class Dropping(torch.autograd.Function):
    """Has no gradient for its second operand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 1.5, None


OF_ROWS = {
    "torch's own": lambda y: y * 1.1,
    "a format": lambda y: round_to(y, "e4m3fn"),
    "a format, stochastically": lambda y: round_to(y, "e4m3fn", "stochastic"),
    "a Rounder": Rounder("e4m3fn", "e5m2"),
    "blocks": lambda y: round_to(y, "mxfp8_e4m3"),
    "a Hadamard transform": lambda y: fpsim.hadamard(y, fpsim.Hadamard(16)),
    "a product": lambda y: fpsim.matmul(y, torch.ones(32, 32), "fp16"),
}
AROUND = {
    "plainly": lambda f, y: f(y),
    "vmap": lambda f, y: torch.func.vmap(f, randomness="different")(y),
    "vmap of vmap": lambda f, y: torch.func.vmap(torch.func.vmap(f, randomness="same"), randomness="same")(y[None]),
    "vjp": lambda f, y: torch.func.vjp(f, y)[0],
    "vjp of vmap": lambda f, y: torch.func.vjp(torch.func.vmap(f, randomness="same"), y)[0],
}


NO_VJP = {"blocks", "a Hadamard transform"}  # torch's operators with a gradient have none


@tiers.parametrize(
    ("function", "around", "rows"),
    [
        *((f, around, 3) for f, around in itertools.product(OF_ROWS, AROUND) if "vjp" not in around or f not in NO_VJP),
        *((f, "plainly", 2000) for f in OF_ROWS),  # which take another way
    ],
    keep=lambda f, around, rows: around == "vmap" or rows == 2000,
)
def test_where_no_gradient_arrives_none_goes_on(function: str, around: str, rows: int) -> None:
    x, y = (torch.randn(rows, 32, requires_grad=True) for _ in range(2))
    z = AROUND[around](OF_ROWS[function], y)
    assert z.requires_grad
    Dropping.apply(x, z.view_as(x)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1.5))  # type: ignore[arg-type]
    assert y.grad is None


def test_functional_transforms_see_the_straight_through_gradient() -> None:
    x = torch.randn(6, 3)

    def f(v: torch.Tensor) -> torch.Tensor:
        return (round_to(v, "e4m3fn") ** 2).sum()

    assert torch.equal(torch.func.grad(f)(x), 2 * round_to(x, "e4m3fn"))
    assert torch.equal(torch.func.vmap(lambda v: round_to(v, "e4m3fn"))(x), round_to(x, "e4m3fn"))
    assert torch.equal(
        torch.func.vmap(lambda v: round_to(v, "e4m3fn"), in_dims=1, out_dims=1)(x), round_to(x, "e4m3fn")
    )
    assert torch.equal(torch.func.vmap(torch.func.grad(f))(x), 2 * round_to(x, "e4m3fn"))  # per-sample gradients
    assert torch.equal(torch.func.hessian(f)(x).reshape(18, 18), 2 * torch.eye(18))


def test_forward_mode_passes_the_tangent_through() -> None:
    for size in (5, 40_000):
        x, tangent = torch.randn(size), torch.randn(size)
        value, derivative = torch.func.jvp(lambda v: round_to(v, "e4m3fn"), (x,), (tangent,))
        assert torch.equal(value, round_to(x, "e4m3fn"))
        assert torch.equal(derivative, tangent)
        with forward_ad.dual_level():
            value, derivative = forward_ad.unpack_dual(round_to(forward_ad.make_dual(x, tangent), "e4m3fn"))
            assert torch.equal(value, round_to(x, "e4m3fn"))
            assert derivative is not None
            assert torch.equal(derivative, tangent)


def test_vmap_gives_samples_the_noise_that_its_randomness_says() -> None:
    def f(v: torch.Tensor) -> torch.Tensor:
        return round_to(v, "e5m2", "stochastic")

    x = torch.full((40, 50), 1.125)
    for dim in (0, 1):
        different = torch.func.vmap(f, in_dims=dim, out_dims=dim, randomness="different")(x).movedim(dim, 0)
        assert set(different.flatten().tolist()) == {1.0, 1.25}
        assert len({tuple(sample) for sample in different.tolist()}) == len(different)
        same = torch.func.vmap(f, in_dims=dim, out_dims=dim, randomness="same")(x).movedim(dim, 0)
        assert set(same.flatten().tolist()) == {1.0, 1.25}
        assert len({tuple(sample) for sample in same.tolist()}) == 1
    shared = torch.func.vmap(lambda _: f(x[0]), randomness="different")(torch.arange(9))  # the tensor has no samples
    assert len({tuple(sample) for sample in shared.tolist()}) == 9
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(f)(x)


def test_a_seed_of_our_own_reaches_transforms() -> None:
    x = torch.full((3, 512), 1.125)
    results = []
    for other in (1, 2):
        torch.manual_seed(other)
        fpsim.manual_seed(5)
        results.append(torch.func.vmap(lambda v: round_to(v, "e5m2", "stochastic"), randomness="different")(x))
    assert torch.equal(*results)


def test_meta_and_fake_tensors_keep_shape_and_dtype() -> None:
    x = torch.empty(3, 4, device="meta", dtype=torch.float64)
    assert round_to(x, "fp16").shape == (3, 4)
    assert round_to(x, "fp16", "stochastic").device.type == "meta"
    with FakeTensorMode():
        y = torch.randn(2, 5, requires_grad=True)
        z = round_to(y, "bf16")
        assert z.shape == (2, 5)
        assert z.requires_grad
        assert round_to_(torch.randn(2), "bf16").shape == (2,)


def test_any_strides_are_rounded_in_place_and_out_of_place() -> None:
    base = torch.randn(8, 6, 4)
    for view in (base, base.transpose(0, 2), base[::2, 1:, ::3], base[..., 0], base[0, 0, 0], base[:0]):
        expected = round_to(view.contiguous(), "e4m3fn")
        assert torch.equal(round_to(view, "e4m3fn"), expected)
        copy = base.clone().as_strided(view.size(), view.stride(), view.storage_offset())
        assert round_to_(copy, "e4m3fn") is copy
        assert torch.equal(copy, expected)
    expanded = torch.tensor([1.1, 2.3])[:, None].expand(2, 5)
    assert torch.equal(round_to(expanded, "e4m3fn"), round_to(expanded.clone(), "e4m3fn"))
    assert (
        round_to(base.to(memory_format=torch.contiguous_format).permute(2, 0, 1), "fp16").stride()
        == base.permute(2, 0, 1).stride()
    )


def test_the_default_device_does_not_matter() -> None:
    x = torch.full((300,), 1.125)
    torch.manual_seed(3)
    expected = round_to(x, "e5m2", "stochastic")
    torch.manual_seed(3)
    with torch.device("meta"):  # as a model is built without memory
        assert torch.equal(round_to(x, "e5m2", "stochastic"), expected)
        codes = encode(x, "e3m4")
        assert torch.equal(decode(codes, "e3m4"), x)
    assert torch.equal(decode(codes, "e3m4"), x)


def test_a_table_first_asked_for_under_a_tracer_serves_later() -> None:
    f = fpsim.FloatFormat(3, 3, 5)
    with FakeTensorMode():
        assert encode(torch.ones(2), f).shape == (2,)
    assert decode(encode(torch.ones(2), f), f).tolist() == [1.0, 1.0]


def test_views_that_negate_and_conjugate_are_rounded_as_what_they_show() -> None:
    x = torch.tensor([1.1 + 2.3j])
    for view in (x.conj().imag, torch._neg_view(torch.tensor([1.1, -2.3])), torch.view_as_real(x.resolve_conj())):
        expected = round_to(view.clone(), "e4m3fn")
        assert torch.equal(round_to(view, "e4m3fn"), expected)
        assert torch.equal(round_to(view, "e4m3fn", out=torch.empty(view.shape)), expected)
        assert torch.equal(round_to_(view, "e4m3fn"), expected)


def test_inference_mode_rounds() -> None:
    with torch.inference_mode():
        x = torch.tensor([1.1])
        assert round_to(x, "e4m3fn").item() == 1.125
        assert round_to(x, "e4m3fn", out=torch.empty(1)).item() == 1.125
        assert round_to_(x, "e4m3fn").item() == 1.125


def test_rounding_in_place_touches_only_the_view() -> None:
    base = torch.full((4, 4), 1.1)
    round_to_(base[1:3, ::2], "e4m3fn")
    assert int((base == 1.125).sum()) == 4
    assert int((base == torch.tensor(1.1)).sum()) == 12


def test_rounding_in_place_keeps_the_gradient_and_tells_autograd() -> None:
    x = torch.randn(5, requires_grad=True)
    y = x * 2
    z = round_to_(y, "e4m3fn")
    assert z is y
    (z**2).sum().backward()
    assert torch.equal(x.grad, 2 * 2 * z.detach())  # type: ignore[arg-type]
    a = (x * 2).exp()
    round_to_(a, "e4m3fn")  # exp saved its result: autograd must notice the change
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a.sum().backward()
    for leaf in (x, x[1:], x.view(1, 5)):
        with pytest.raises(RuntimeError, match=r"leaf.*Use round_to\(x\)"):
            round_to_(leaf, "fp16")
    with torch.no_grad():
        round_to_(x, "fp16")
    w = torch.randn(5, requires_grad=True)
    y = w * 2
    round_to_(y[1:3], "e4m3fn")  # a view of a result
    (y**2).sum().backward()
    assert torch.equal(w.grad, 4 * y.detach())  # type: ignore[arg-type]


def test_out_is_written_to() -> None:
    x, out = torch.randn(100), torch.full((100,), 7.0)
    assert round_to(x, "e5m2", out=out) is out
    assert torch.equal(out, round_to(x, "e5m2"))
    round_to(x.double()[::2], "e5m2", out=(half := torch.empty(50, dtype=torch.float64)))
    assert torch.equal(half, round_to(x.double()[::2], "e5m2"))
    assert round_to(x, "fp32", out=out) is out
    assert torch.equal(out, x)
    assert round_to(x, "e5m2", out=x) is x  # in place


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_out_may_overlap_the_input(rounding: str) -> None:
    for size in (9, 2**18 + 1):
        torch.set_num_threads(2)
        for shift in (1, -1):
            x = torch.randn(size)
            source, target = (x[:-1], x[1:]) if shift > 0 else (x[1:], x[:-1])
            fpsim.manual_seed(1)
            expected = round_to(source.clone(), "e4m3fn", rounding)
            fpsim.manual_seed(1)
            assert torch.equal(round_to(source, "e4m3fn", rounding, out=target), expected)


def test_numpy_arrays_come_back_as_arrays() -> None:
    for dtype in (np.float32, np.float64, np.float16):
        x = np.linspace(-2, 2, 12, dtype=dtype).reshape(3, 4)
        got = round_to(x, "e4m3fn")
        assert isinstance(got, np.ndarray)
        assert got.dtype == dtype
        assert np.array_equal(got, x.astype(ml_dtypes.float8_e4m3fn).astype(dtype))
        assert np.array_equal(round_to(x.T, "e4m3fn"), got.T)
    frozen = np.ones(3, np.float32) * np.float32(1.1)
    frozen.flags.writeable = False
    assert round_to(frozen, "e4m3fn")[0] == 1.125
    out = np.empty((3, 4))
    assert round_to(np.full((3, 4), 1.1), "e4m3fn", out=out) is out
    assert (out == 1.125).all()
    for unfit, message in (
        (np.empty((4, 3)), r"out has shape \(4, 3\), x has \(3, 4\).*numpy\.empty_like"),
        (np.empty((3, 4), np.float32), "out has dtype float32, x has float64"),
        (np.empty((3, 4), object), "out has dtype object"),
        (np.empty((4, 3)).T, "not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            round_to(np.ones((3, 4)), "fp16", out=unfit)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        round_to(np.ones((3, 4)), "fp16", out=out)
    assert round_to(np.array(1.1), "e4m3fn").shape == ()


def test_empty_and_scalar_tensors_work() -> None:
    assert round_to(torch.empty(0, 3), "fp16").shape == (0, 3)
    assert round_to(torch.empty(0), "fp16", "stochastic").shape == (0,)
    assert float(round_to(torch.tensor(1.1), "e4m3fn")) == 1.125
    assert float(round_to(torch.tensor(1.1, dtype=torch.float64), "e4m3fn")) == 1.125


def test_nan_and_inf_are_neither_lost_nor_invented() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -1e-45, 0.0])
    for fmt in fpsim.CATALOGUE.values():
        if not fmt.is_signed:
            continue
        for rounding in ("nearest_even", "toward_zero", "stochastic"):
            y = round_to(x, fmt, rounding)
            assert y[0].isnan()
            assert not y[1:].isnan().any()
            assert not y[4:].isinf().any()
            assert bool(y[1] == (math.inf if fmt.has_inf else fmt.largest))


def test_a_parameter_and_a_subclass_are_rounded() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.1]))
    assert round_to(parameter, "e4m3fn").item() == 1.125
    assert round_to(parameter, "e4m3fn").requires_grad


# The layer


def test_a_rounder_rounds_each_direction_to_its_format() -> None:
    x = torch.tensor([1.1, -0.3], requires_grad=True)
    y = Rounder("e4m3fn", "e5m2")(x)
    assert y.tolist() == [1.125, -0.3125]
    y.backward(torch.tensor([1.1, 0.3]))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.3125]
    z = Rounder(backward="e5m2")(x)
    assert torch.equal(z, x)
    assert z is not x
    assert "forward=e4m3fn nearest_even, backward=float32" in repr(Rounder("e4m3fn"))


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_one_random_bit_of_a_layer_moves_nothing_that_lies_below_half(rounding: str) -> None:
    """Variant A cuts a distance of 0.4 ulp to 0 of 2; with 32 bits two in five of the numbers go up."""
    x = torch.full((1000,), 1 + 0.4 / 8, requires_grad=True)  # e4m3fn has an ulp of 1/8 there, e5m2 one of 1/4
    layer = Rounder("e4m3fn", "e5m2", rounding, "stochastic", random_bits=1)
    y = layer(x)
    y.backward(torch.full((1000,), 1 + 0.4 / 4))
    assert x.grad is not None
    assert bool((y == 1).all())
    assert bool((x.grad == 1).all())
    free = Rounder("e4m3fn", "e5m2", "stochastic")(x)
    assert 0 < int((free > 1).sum()) < 1000
    torch.manual_seed(0)
    once = Rounder("e4m3fn", rounding="stochastic", random_bits=3, variant="C")(x)
    torch.manual_seed(0)
    assert torch.equal(once, round_to(x, "e4m3fn", "stochastic", random_bits=3, variant="C"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"forward": "e4m3fn", "random_bits": 3}, "only 'stochastic' uses it"),
        ({"backward": "e5m2", "rounding": "stochastic", "backward_rounding": "up", "random_bits": 3}, "rounding='up'"),
        ({"forward": "fp16", "rounding": "stochastic", "variant": "B"}, "variant='B' without random_bits"),
        ({"forward": "fp16", "rounding": "stochastic", "random_bits": 33}, "Expected: 1 to 32"),
    ],
)
def test_random_bits_that_no_rounding_of_a_layer_uses_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rounder(**words)


def test_a_rounder_survives_copies_and_pickles() -> None:
    layer = Rounder("e4m3fn", "e5m2", "stochastic", "up", "nan", "saturate")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert (other.forward_spec, other.backward_spec) == (layer.forward_spec, layer.backward_spec)
        assert repr(other) == repr(layer)


def test_a_rounder_supports_double_backward() -> None:
    x = torch.tensor([1.1], requires_grad=True)
    (g,) = torch.autograd.grad((Rounder("e4m3fn", "e5m2")(x) ** 3).sum(), x, create_graph=True)
    assert g.item() == float(round_to(torch.tensor(3 * 1.125**2), "e5m2"))
    (second,) = torch.autograd.grad(g, x)
    assert second.item() == 7.0  # 6 * 1.125 = 6.75, rounded to e5m2 on its way back through the layer


# Codes


@pytest.mark.parametrize("name", ML_DTYPES)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    f = as_format(name)
    codes = np.arange(2**f.bits, dtype=np.uint16 if f.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = torch.from_numpy(codes.view(ML_DTYPES[name]).astype(np.float32))
    got = decode(torch.from_numpy(codes.astype(np.int32)), name)
    assert bool(((got == values) & (got.signbit() == values.signbit()) | got.isnan() & values.isnan()).all())
    finite = ~values.isnan()
    assert torch.equal(encode(values[finite], name), torch.from_numpy(codes.astype(np.int32))[finite])
    if f.has_nan:
        assert decode(encode(torch.tensor([math.nan]), name), name).isnan().all()


def test_encode_rounds_first() -> None:
    x = torch.randn(3, 1000) * 100
    theirs = x.numpy().astype(ml_dtypes.float8_e5m2).view(np.uint8).astype(np.int32)
    assert torch.equal(encode(x, "e5m2"), torch.from_numpy(theirs))


def test_codes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no code for it"):
        encode(torch.tensor([math.nan]), "e2m1fn")
    assert decode(torch.zeros(0, 3, dtype=torch.uint8), "e5m2").shape == (0, 3)
    with pytest.raises(ValueError, match="0 to 255"):
        decode(torch.tensor([256]), "e5m2")
    with pytest.raises(TypeError, match="integer"):
        decode(torch.tensor([1.0]), "e5m2")
    with pytest.raises(TypeError, match=r"codes is ndarray\. Expected: a torch\.Tensor"):
        decode(np.array([1]), "e5m2")  # type: ignore[arg-type]
    for x, message in (([1.0], "x is list"), (torch.ones(1, dtype=torch.int32), "x has dtype int32")):
        with pytest.raises(TypeError, match=message):
            encode(x, "e5m2")  # type: ignore[arg-type]
    for call in (lambda: encode(torch.ones(1), "tf32"), lambda: decode(torch.ones(1).int(), "tf32")):
        with pytest.raises(ValueError, match=r"tf32 has 19 bits\. encode\(\) and decode\(\) take formats of up to 16"):
            call()


# Threads and processes


def test_two_python_threads_round_at_once() -> None:
    torch.set_num_threads(2)
    x = torch.randn(2**19)
    expected = {name: round_to(x, name) for name in ("fp16", "e5m2")}
    failures: list[str] = []

    def work(name: str) -> None:
        for _ in range(20):
            if not torch.equal(round_to(x, name), expected[name]):
                failures.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_that_start_at_once_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(50):
        monkeypatch.setattr(launch, "_pools", {})
        barrier, found = threading.Barrier(8), []

        def ask(barrier: threading.Barrier = barrier, found: list[object] = found) -> None:
            barrier.wait()
            found.append(launch.thread_pool())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


def test_an_interrupt_leaves_no_thread_with_memory_that_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_pools", {})  # the one that is shut down below
    torch.set_num_threads(2)
    x = torch.randn(2**19)
    spec = rounding_spec("fp16")
    kernel, alive, release, main = launch.kernel_for(spec, 32), [], threading.Event(), threading.current_thread()
    out = torch.empty_like(x)

    def loop(*arguments: int) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt  # as after Ctrl-C, with the other part still to do
        release.wait(10)
        alive.append(reference() is not None)

    reference = weakref.ref(out)
    monkeypatch.setattr(kernel, "loop", loop)
    with pytest.raises(KeyboardInterrupt):
        launch.launch(x, out, kernel, None)
    del out
    gc.collect()
    release.set()
    launch.thread_pool().shutdown(wait=True)
    assert alive == [True]


def test_two_variants_of_a_loop_never_share_a_file_of_the_cache() -> None:
    names = [
        loop.file_name
        for loop in (
            *(cpu_loop(rule, shape, width) for rule in range(7) for shape in range(5) for width in (32, 64)),
            tally_loop(4),
            tally_loop(8),
        )
    ]
    assert len(set(names)) == len(names) == 72


class Rounded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        # no arithmetic of torch's here: after a fork its own threads may hang
        torch.set_num_threads(2)
        return round_to(self.x[i], "e5m2")


@pytest.mark.timeout(120)
def test_a_forked_worker_rounds_after_the_parent_used_its_threads() -> None:
    torch.set_num_threads(2)
    x = torch.randn(4, 2**19)
    round_to(x, "e5m2")
    loader = torch.utils.data.DataLoader(Rounded(x), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for i, y in enumerate(loader):
        assert torch.equal(y, round_to(x[i], "e5m2"))


LAST = """
import atexit, threading, torch, fpsim
torch.set_num_threads(4)
x = torch.linspace(-7e4, 7e4, 2**19)
expected = x.half().float()
if {warm}:
    fpsim.round_to(x, "fp16")

@atexit.register
def last():
    print(torch.equal(fpsim.round_to(x, "fp16"), expected))
"""


@tiers.parametrize("warm", [False, True], keep={True})
def test_a_large_tensor_is_rounded_while_the_interpreter_ends(warm: bool) -> None:
    done = subprocess.run([sys.executable, "-c", LAST.format(warm=warm)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


NO_THREADS = """
import threading, torch, fpsim
x = torch.linspace(-7e4, 7e4, 2**19)
expected = x.half().float()
torch.set_num_threads(4)
before = threading.stack_size(1 << 46)  # more than there is: no thread can be started
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("none")
out = torch.empty_like(x)
print(torch.equal(fpsim.round_to(x, "fp16", out=out), expected))
out.zero_()
threading.stack_size(before)
print(torch.equal(fpsim.round_to(x, "fp16"), expected))  # threads begin, and find what was left in their queue
fpsim.round_to(x, "fp16")
print(out.abs().max().item())
"""


@pytest.mark.full
def test_where_no_thread_can_be_started_one_does_it_all_and_none_does_it_later() -> None:
    done = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["none", "True", "True", "0.0"], "")


# Bad input: what came, what is possible, what to do


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, dtype=torch.int64), r"dtype int64\. Expected: float32.*x\.double\(\)"),
        (torch.ones(2, dtype=torch.int16), r"dtype int16\. Expected: float32.*x\.float\(\)"),
        (torch.ones(2, dtype=torch.bool), "dtype bool"),
        (torch.ones(2, dtype=torch.complex64), r"dtype complex64.*x\.real and x\.imag"),
        (torch.ones(2, 2).to_sparse(), r"sparse_coo.*Expected: dense.*x\.values\(\)"),
        (torch.ones(2).to(torch.float8_e5m2), r"dtype float8_e5m2\. Expected: float32.*x\.float\(\)"),
        ([1.0, 2.0], r"x is list\. Expected: a torch\.Tensor"),
        (1.5, "x is float"),
        (np.array([1, 2]), r"dtype int64.*astype\(numpy\.float64\)"),
        (np.array([1.0], np.longdouble), r"dtype (float128|longdouble).*astype\(numpy\.float64\)"),
        (np.array([1.0], dtype=">f4"), "native byte order"),
        (np.array(["a"]), "Expected: float32"),
        (np.ma.array([1.0, 2.0], mask=[True, False]), r"masked array.*mask would be lost.*mask=x\.mask"),
    ],
)
def test_tensors_that_cannot_be_rounded_are_refused(x: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        round_to(x, "fp16")  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_the_cast_that_an_error_names_leaves_one_rounding(dtype: torch.dtype) -> None:
    most = min(torch.iinfo(dtype).max, 16_973_823)  # by way of float32, this one becomes another number of bf16
    x = torch.tensor([most], dtype=dtype)
    with pytest.raises(TypeError) as refused:
        round_to(x, "bf16")
    cast = re.search(r"x\.(\w+)\(\)", str(refused.value))
    assert cast is not None
    unit = Fraction(2) ** max(most.bit_length() - 8, 0)
    nearest = round(Fraction(most) / unit) * unit  # to even
    assert Fraction(round_to(getattr(x, cast[1])(), "bf16").item()) == nearest


@pytest.mark.parametrize(
    ("x", "is_rounded"),
    [
        (torch.tensor([2**60 + 2**52 + 1]), True),
        (np.array([2**60 + 2**52 + 1]), True),
        (np.array([1 + np.ldexp(np.longdouble(1), -8) + np.ldexp(np.longdouble(1), -60)]), True),
        (torch.tensor([2**16 + 2**8 + 1], dtype=torch.int32), False),
        (np.array([2**16 + 2**8 + 1], np.int32), False),
        (np.array([1.5], ">f8"), False),
    ],
)
def test_an_error_says_whether_the_cast_that_it_names_rounds_first(x: Any, is_rounded: bool) -> None:
    """A hair above half of a unit in the last place of bf16, which the cast may lose."""
    with pytest.raises(TypeError) as refused:
        round_to(x, "bf16")
    assert ("rounds beyond 53 bits" in str(refused.value)) is is_rounded
    cast = x.double() if isinstance(x, torch.Tensor) else x.astype(np.float64)
    is_lost = any(int(a) != int(b) or a != b for a, b in zip(x.tolist(), cast.tolist(), strict=True))
    assert is_lost is is_rounded


def test_an_array_is_refused_where_a_tensor_is_wanted() -> None:
    for call in (lambda x: round_to_(x, "fp16"), Rounder("fp16"), lambda x: encode(x, "fp16")):
        with pytest.raises(
            TypeError, match=r"x is a numpy\.ndarray\. Expected here: a torch\.Tensor; torch\.from_numpy"
        ):
            call(np.ones(2))


def test_unknown_words_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="Unknown format 'fp9'"):
        round_to(x, "fp9")
    with pytest.raises(ValueError, match=r"Unknown rounding 'nearest'\. Did you mean 'nearest_even'\? Known: "):
        round_to(x, "fp16", "nearest")
    with pytest.raises(ValueError, match=r"Unknown overflow 'clip'\. Known: inf, nan, saturate"):
        round_to(x, "fp16", overflow="clip")
    with pytest.raises(ValueError, match=r"overflow='inf' is invalid: e4m3fn has no inf.*Expected: nan, saturate"):
        round_to(x, "e4m3fn", overflow="inf")


@pytest.mark.parametrize("word", [[], {}, {"a"}, [[]], np.array([1.0, 2.0]), slice(1), torch.ones(2), object(), b"up"])
def test_words_that_are_none_are_refused_as_unknown_ones_are(word: object) -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="Expected a format, got"):
        round_to(x, word)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"Unknown rounding .*Known: nearest_even"):
        round_to(x, "fp16", word)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"Unknown overflow .*Known: inf, nan, saturate"):
        round_to(x, "fp16", overflow=word)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"random_bits=.* is invalid\. Expected: 1 to 32"):
        round_to(x, "fp16", "stochastic", random_bits=word)  # type: ignore[call-overload]


def test_a_mask_is_not_lost_where_results_are_written_or_counted() -> None:
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    with pytest.raises(TypeError, match="out is a masked array"):
        round_to(np.ones(2), "fp16", out=masked)
    with pytest.raises(TypeError, match="x is a masked array"):
        fpsim.tally(masked, "fp16")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(4, 3).t(), r"strides \(1, 3\), which is not contiguous"),
        (torch.empty(3, 4, dtype=torch.float64), r"out has dtype torch\.float64, x has torch\.float32"),
        (torch.empty(4, 3), r"out has shape \(4, 3\), x has \(3, 4\)"),
        (torch.empty(3, 4, device="meta"), "out has device meta"),
    ],
)
def test_an_unfit_out_is_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        round_to(torch.ones(3, 4), "fp16", out=out)


def test_out_is_written_to_without_gradients_though_x_or_out_requires_one() -> None:
    x, out = torch.full((2,), 0.1, requires_grad=True), torch.empty(2, requires_grad=True)
    with torch.no_grad():
        assert round_to(x, "fp16", out=out) is out
        assert torch.equal(out, x.half().float())


def test_out_with_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out= keeps no gradient.*torch\.no_grad"):
        round_to(torch.ones(2, requires_grad=True), "fp16", out=torch.empty(2))
    with pytest.raises(TypeError, match="out is list"):
        round_to(torch.ones(2), "fp16", out=[1.0, 2.0])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="out is Tensor and x a numpy"):
        round_to(np.ones(2), "fp16", out=torch.empty(2))  # type: ignore[call-overload]


@pytest.mark.parametrize("log2_scale", [-1, 0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_numbers_are_scaled_by_every_power_of_two(dtype: torch.dtype, log2_scale: int) -> None:
    x = torch.tensor([3.0, -0.5], dtype=dtype)
    expected = torch.tensor([3.0 * 2.0**log2_scale, -0.5 * 2.0**log2_scale], dtype=torch.float64)
    assert torch.equal(to_float64(x, log2_scale), expected)


def test_formats_that_end_below_two_to_the_fortieth_saturate_and_keep_masks_apart() -> None:
    ends = {2.0**39: True, 2.0**40: False, 2.0**41: False}
    assert {end: rounding_spec(fpsim.Codebook((0.0, end))).saturates for end in ends} == ends


@pytest.mark.parametrize("axis", [True, 0.0, "0", 2, -3])
def test_what_is_no_axis_is_refused(axis: Any) -> None:
    with pytest.raises(ValueError, match=r"axis=.* is not an axis of a tensor of shape \(2, 32\)"):
        round_to(torch.ones(2, 32), "mxfp8_e4m3", axis=axis)


@pytest.mark.parametrize("dtype", [np.int64, np.complex64, np.bool_, ">f4"])
def test_an_array_of_another_dtype_is_refused_with_what_to_do(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"x has dtype .*\. Expected: float32, float64, float16 in native byte order"):
        round_to(np.zeros(2, dtype), "fp16")
