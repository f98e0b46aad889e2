"""The three products of a layer: which operands each is given, and along which axes they were quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
import torch.nn.functional as F
from product_cases import Calls, Kept, by_hand, gradients
from torch import Tensor, nn

import fpsim
from fpsim import Operand, Policy, Products, quantize
from fpsim.emulation.forms import Batched, ByVjp, Convolution, ConvolutionSettings, Form, Linear, in_matrices
from fpsim.tensors.shared_scales import rounded_blocks

MX = ["mxfp8_e4m3", "mxfp4", "mxint8"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose size changes along every axis, so that blocks along another axis have other scales."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=generator)
    for axis in range(len(shape)):
        sizes = torch.exp2(torch.randint(-6, 7, (shape[axis],), generator=generator).float())
        x = x * sizes.view([-1 if d == axis else 1 for d in range(len(shape))])
    return x


def close(got: Tensor, expected: Tensor) -> None:
    """Equal up to the order in which float32 adds some hundred terms."""
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=2e-6 * float(expected.abs().max()))


# What each product is given


@pytest.mark.parametrize("fmt", MX)
def test_a_linear_layer_quantises_each_operand_along_the_axis_of_its_product(fmt: str) -> None:
    x, dy = randn(3, 20, 40), randn(3, 20, 36)
    model = quantize(nn.Linear(40, 36), fmt)
    w, b = model.weight.detach(), model.bias.detach()
    kept = Kept(model)
    y, dx, grads = gradients(model, x, dy)
    tokens, errors = x.reshape(60, 40), dy.reshape(60, 36)
    expected = {
        "fprop.x": by_hand(tokens, fmt, -1),
        "fprop.w": by_hand(w, fmt, 1),
        "dgrad.dy": by_hand(errors, fmt, -1),
        "dgrad.w": by_hand(w, fmt, 0),
        "wgrad.dy": by_hand(errors, fmt, 0),
        "wgrad.x": by_hand(tokens, fmt, 0),
    }
    assert {role for _, role in kept.after} == expected.keys()
    for role, operand in expected.items():
        assert torch.equal(kept.operand(role), operand), role
    for role, wrong in {"fprop.w": 0, "dgrad.w": 1, "wgrad.dy": 1, "wgrad.x": 1}.items():
        original = {"w": w, "dy": errors, "x": tokens}[role.split(".")[1]]
        assert not torch.equal(kept.operand(role), by_hand(original, fmt, wrong)), role
    q = {role: operand.double() for role, operand in expected.items()}
    close(y.view(60, 36), q["fprop.x"] @ q["fprop.w"].T + b)
    close(dx.view(60, 40), q["dgrad.dy"] @ q["dgrad.w"])
    close(grads["weight"], q["wgrad.dy"].T @ q["wgrad.x"])
    close(grads["bias"], errors.sum(0))


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_a_convolution_quantises_along_channels_and_the_batch(fmt: str, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(40, 36, 3, stride=2, padding=1, groups=2, dilation=2)
    model = quantize(layer, fmt)
    w = model.weight.detach()
    x = randn(34, 40, 7, 6)
    dy = randn(*layer(x).shape)
    kept = Kept(model)
    y, dx, grads = gradients(model, x, dy)
    inner, outer = (0, 1) if transposed else (1, 0)
    expected = {
        "fprop.x": by_hand(x, fmt, 1),
        "fprop.w": by_hand(w, fmt, inner),
        "dgrad.dy": by_hand(dy, fmt, 1),
        "dgrad.w": by_hand(w, fmt, outer),
        "wgrad.dy": by_hand(dy, fmt, 0),
        "wgrad.x": by_hand(x, fmt, 0),
    }
    for role, operand in expected.items():
        assert torch.equal(kept.operand(role), operand), role
    f = F.conv_transpose2d if transposed else F.conv2d
    q = {role: operand.double().requires_grad_() for role, operand in expected.items()}
    settings = {"stride": 2, "padding": 1, "groups": 2, "dilation": 2}
    close(y, f(q["fprop.x"], q["fprop.w"], model.bias.detach().double(), **settings).detach())
    of_x = f(q["fprop.x"], q["dgrad.w"], **settings)
    close(dx, torch.autograd.grad(of_x, q["fprop.x"], q["dgrad.dy"])[0])
    of_w = f(q["wgrad.x"], q["fprop.w"], **settings)
    close(grads["weight"], torch.autograd.grad(of_w, q["fprop.w"], q["wgrad.dy"])[0])
    close(grads["bias"], dy.sum((0, 2, 3)))


@pytest.mark.parametrize("fmt", MX)
def test_a_batched_product_quantises_each_matrix_of_the_batch(fmt: str) -> None:
    model = quantize(Calls(torch.bmm, randn(3, 40, 36)), fmt)
    w, x, dy = model.w.detach(), randn(3, 34, 40), randn(3, 34, 36)
    kept = Kept(model)
    y, dx, grads = gradients(model, x, dy)
    close(y, torch.bmm(by_hand(x, fmt, 2).double(), by_hand(w, fmt, 1).double()))
    close(dx, by_hand(dy, fmt, 2).double() @ by_hand(w, fmt, 2).mT.double())
    close(grads["w"], by_hand(x, fmt, 1).mT.double() @ by_hand(dy, fmt, 1).double())
    assert torch.equal(kept.operand("wgrad.x"), by_hand(x, fmt, 1))
    assert torch.equal(kept.operand("dgrad.w"), by_hand(w, fmt, 2))


# However a product is written: x is (tokens, 40), w is (36, 40), and y is (tokens, 36)

WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "linear, by name": lambda x, w: F.linear(weight=w, input=x),
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "@": lambda x, w: x @ w.T,
    "@ from the right": lambda x, w: (w @ x.T).T,
    "mm": lambda x, w: torch.mm(x, w.transpose(0, 1)),
    "Tensor.mm": lambda x, w: x.mm(mat2=w.mT),
    "linalg.matmul": lambda x, w: torch.linalg.matmul(x, w.permute(1, 0)),
    "addmm": lambda x, w: torch.addmm(torch.zeros(36), x, w.T),
    "addmm, scaled": lambda x, w: torch.addmm(torch.full((), torch.nan), x, w.T, beta=0, alpha=1.0),
    "addmm_": lambda x, w: torch.zeros(60, 36).addmm_(x, w.T),
    "bmm": lambda x, w: torch.bmm(x[None], w.T[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(1, 60, 36), x[None], w.T[None])[0],
    "addbmm": lambda x, w: torch.addbmm(torch.zeros(60, 36), x[None], w.T[None]),
    "einsum": lambda x, w: torch.einsum("ti,oi->to", x, w),
    "einsum, mixed": lambda x, w: torch.einsum("oi,ti->to", w, x),
    "einsum of a list": lambda x, w: torch.einsum("ti,oi->to", [x, w]),
    "einsum with ...": lambda x, w: torch.einsum("...i,oi->...o", x.view(3, 20, 40), w).view(60, 36),
    "einsum of lists": lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]),
    "einsum of heads": lambda x, w: torch.einsum("bsi,hdi->bshd", x.view(3, 20, 40), w.view(4, 9, 40)).reshape(60, 36),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [1])),
    "inner": lambda x, w: torch.inner(x, w),
    "aten": lambda x, w: torch.ops.aten.mm.default(x, w.t()),
    "1x1 convolution": lambda x, w: F.conv1d(x.view(60, 40, 1), w[..., None]).view(60, 36),
}


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize("roles", [None, "fp32"], ids=["no roles", "roles"])
def test_a_product_is_the_same_however_it_is_written(way: str, roles: str | None) -> None:
    fmt, x, w, dy = "mxfp8_e4m3", randn(60, 40), randn(36, 40), randn(60, 36)
    policy = Policy(roles, roles, roles, roles, products=Products.all(fmt))
    model = quantize(Calls(WRITTEN[way], w), policy)
    kept = Kept(model)
    y, dx, grads = gradients(model, x, dy)
    assert len([role for _, role in kept.after if "." in role]) == 6
    close(y, by_hand(x, fmt, 1).double() @ by_hand(w, fmt, 1).T.double())
    close(dx, by_hand(dy, fmt, 1).double() @ by_hand(w, fmt, 0).double())
    close(grads["w"], by_hand(dy, fmt, 0).T.double() @ by_hand(x, fmt, 0).double())


def test_a_formula_of_one_operand_is_no_product() -> None:
    x = torch.arange(9.0).reshape(3, 3)
    with fpsim.emulate(Policy(products=Products.all("mxfp8_e4m3"))):
        turned, diagonal, rows = (torch.einsum(formula, x) for formula in ("ij->ji", "ii->i", "ij->i"))
    assert torch.equal(turned, x.T)
    assert torch.equal(diagonal, x.diagonal())
    assert torch.equal(rows, x.sum(1))


VECTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mv": lambda x, w: torch.mv(w, x),
    "matmul": lambda x, w: w @ x,
    "from the left": lambda x, w: x @ w.T,
    "addmv": lambda x, w: torch.addmv(torch.zeros(36), w, x),
    "linear": lambda x, w: F.linear(x, w),
    "dot": lambda x, w: torch.stack([torch.dot(row, x) for row in w]),
    "vdot": lambda x, w: torch.stack([torch.vdot(x, row) for row in w]),
    "vecdot": lambda x, w: torch.linalg.vecdot(x.expand(36, 40), w),
    "linear to one": lambda x, w: torch.stack([F.linear(x, row) for row in w]),
}


@pytest.mark.parametrize("way", VECTORS)
def test_products_with_vectors(way: str) -> None:
    fmt, x, w, dy = "mxfp8_e4m3", randn(40), randn(36, 40), randn(36)
    model = quantize(Calls(VECTORS[way], w), fmt)
    y, dx, _ = gradients(model, x, dy)
    close(y, by_hand(w, fmt, 1).double() @ by_hand(x, fmt, 0).double())
    if way in ("mv", "matmul", "from the left", "addmv", "linear"):  # others are 36 products, of one term each in dx
        close(dx, by_hand(dy, fmt, 0).double() @ by_hand(w, fmt, 0).double())


# With operands in float32, every function gives what torch gives

SAME: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear of a vector": (F.linear, (5,), (3, 5)),
    "linear of four axes": (lambda x, w: F.linear(x, w, w[:, 0]), (2, 3, 4, 5), (3, 5)),
    "broadcast matmul": (torch.matmul, (2, 1, 4, 5), (3, 5, 6)),
    "matmul of a batch from the left": (lambda x, w: w @ x, (2, 5, 6), (3, 1, 4, 5)),
    "matmul of a matrix and a batch": (lambda x, w: w @ x, (2, 3, 5, 6), (4, 5)),
    "matmul of a batch and a vector": (torch.matmul, (2, 4, 5), (5,)),
    "matmul of a vector and a batch": (lambda x, w: x @ w, (5,), (2, 5, 4)),
    "a vector that is a weight": (lambda x, w: w @ x, (5, 4), (5,)),
    "baddbmm": (lambda x, w: torch.baddbmm(x[:, :, :1], x, w, beta=0.5, alpha=2), (2, 3, 4), (2, 4, 6)),
    "addbmm": (lambda x, w: torch.addbmm(x[0, :, :1], x, w, beta=0.5, alpha=2), (2, 3, 4), (2, 4, 6)),
    "addmv": (lambda x, w: torch.addmv(w[:, 0], w, x, beta=0.5, alpha=2), (5,), (3, 5)),
    "addmm": (lambda x, w: torch.addmm(x[:, :1], x, w, beta=0.5, alpha=2), (3, 5), (5, 4)),
    "einsum in batches": (lambda x, w: torch.einsum("bhsd,hde->behs", x, w), (2, 3, 4, 5), (3, 5, 6)),
    "einsum of three": (lambda x, w: torch.einsum("ij,jk,kl->il", x, w, w), (3, 4), (4, 4)),
    "einsum with a sum": (lambda x, w: torch.einsum("ijk,kl->il", x, w), (3, 4, 5), (5, 6)),
    "einsum with a diagonal": (lambda x, w: torch.einsum("iij,jk->ik", x, w), (3, 3, 5), (5, 6)),
    "einsum that broadcasts": (lambda x, w: torch.einsum("bij,bjk->bik", x, w), (1, 4, 5), (3, 5, 6)),
    "einsum without a result": (lambda x, w: torch.einsum("zi,iz", x, w), (3, 5), (5, 3)),
    "einsum over two": (lambda x, w: torch.einsum("aij,kji->ka", x, w), (3, 4, 5), (2, 5, 4)),
    "einsum without a sum": (lambda x, w: torch.einsum("i,j->ij", x, w), (3,), (4,)),
    "tensordot": (lambda x, w: torch.tensordot(x, w), (2, 3, 4), (3, 4, 5)),
    "inner": (torch.inner, (2, 3, 5), (4, 5)),
    "bilinear": (lambda x, w: F.bilinear(x, x[..., :3], w), (2, 6, 5), (4, 5, 3)),
    "conv1d, same": (lambda x, w: F.conv1d(x, w, padding="same"), (2, 3, 9), (4, 3, 4)),
    "conv1d, valid": (lambda x, w: F.conv1d(x, w, padding="valid"), (2, 3, 9), (4, 3, 4)),
    "conv2d, same, dilated": (lambda x, w: F.conv2d(x, w, padding="same", dilation=(3, 1)), (2, 3, 9, 8), (4, 3, 2, 3)),
    "conv2d of one": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], (2, 1), 1), (3, 9, 8), (4, 3, 2, 3)),
    "conv2d by name": (lambda x, w: F.conv2d(weight=w, input=x, stride=2, groups=3), (2, 3, 9, 8), (6, 1, 2, 3)),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (2, 3, 4, 5, 6), (2, 3, 2, 2, 2)),
    "conv_transpose1d": (
        lambda x, w: F.conv_transpose1d(x, w, None, 3, 1, 2, 2, 1), (2, 4, 7), (4, 3, 3),
    ),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w, stride=2), (1, 2, 3, 3, 3), (2, 2, 2, 2, 2)),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, (1, 1), (0, 1), (1, 1), False, (0, 0), 1), (2, 3, 5, 5),
        (4, 3, 2, 3),
    ),
    "conv_tbc": (lambda x, w: torch.conv_tbc(x, w, w[0, 0], 1), (7, 2, 3), (3, 3, 5)),
    "multi_head_attention": (
        lambda x, w: F.multi_head_attention_forward(
            x, x, x, 4, 2, torch.cat([w, w, w]), None, None, None, False, 0.0, w, None)[0],
        (3, 2, 4), (4, 4),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("has_attention", [False, True], ids=["without attention", "with attention"])
def test_operands_in_float32_change_nothing(name: str, has_attention: bool) -> None:
    f, of_x, of_w = SAME[name]
    x, plain = torch.randn(of_x, dtype=torch.float64), Calls(f, torch.randn(of_w, dtype=torch.float64))
    policy = Policy(products=Products.all("fp32", attention=has_attention))
    model = quantize(plain, policy)
    x32 = Calls(f, plain.w.detach().float()), quantize(Calls(f, plain.w.detach().float()), policy)
    dy = torch.randn_like(plain(x))
    y, dx, grads = gradients(model, x, dy)
    expected, expected_dx, expected_grads = gradients(plain, x, dy)
    # fp32 rounds float64 operands: 2^-24 of each
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads["w"], expected_grads["w"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x32[1](x.float()), x32[0](x.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear of four axes", "conv2d of one", "conv_transpose1d", "broadcast matmul"])
def test_operands_in_float32_give_the_bits_of_torch(name: str) -> None:
    f, of_x, of_w = SAME[name]
    x, w = torch.randn(of_x), torch.randn(of_w)
    assert torch.equal(quantize(Calls(f, w), Policy(products=Products.all("fp32")))(x), f(x, w))


# The generic way


def _forms() -> dict[str, tuple[Form, tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]]:
    def convolution(x: tuple[int, ...], w: tuple[int, ...], *settings: object) -> object:
        s = ConvolutionSettings(*settings)  # type: ignore[arg-type]
        f = lambda a, b: torch.convolution(a, b, None, *s)
        return Convolution(torch.empty(x), torch.empty(w), s), x, w, f

    cases = {
        "linear": (Linear(torch.empty(7, 5), torch.empty(4, 5)), (7, 5), (4, 5), lambda x, w: x @ w.T),
        "batched": (
            Batched(torch.empty(2, 1, 7, 5), torch.empty(3, 5, 4)), (2, 1, 7, 5), (3, 5, 4), lambda x, w: x @ w
        ),
        "conv1d": convolution((3, 4, 9), (6, 2, 3), [2], [1], [2], False, [0], 2),
        "conv2d": convolution((3, 4, 9, 8), (6, 4, 3, 2), [1, 2], [1, 0], [1, 3], False, [0, 0], 1),
        "conv3d": convolution((1, 2, 5, 6, 7), (3, 2, 2, 2, 2), [1, 1, 2], [1, 0, 1], [1, 1, 1], False, [0, 0, 0], 1),
        "transposed": convolution((3, 4, 5, 6), (4, 3, 3, 2), [2, 3], [1, 0], [1, 2], True, [1, 2], 2),
    }  # fmt: skip
    return cases  # type: ignore[return-value]


@pytest.mark.parametrize("name", _forms())
def test_gradients_written_by_hand_are_the_products_own_vjp(name: str) -> None:
    form, of_x, of_w, f = _forms()[name]
    torch.manual_seed(0)
    x, w, other_x, other_w = torch.randn(of_x), torch.randn(of_w), torch.randn(of_x), torch.randn(of_w)
    generic = ByVjp(x, w, f, (form.fprop, form.dgrad, form.wgrad))
    y = form.forward(form.arrange(x), w, None)
    torch.testing.assert_close(y, generic.forward(x, w, None))
    dy = torch.randn_like(y)
    torch.testing.assert_close(form.data_gradient(form.arrange(dy), other_w), generic.data_gradient(dy, other_w))
    torch.testing.assert_close(
        form.weight_gradient(form.arrange(dy), form.arrange(other_x)), generic.weight_gradient(dy, other_x)
    )
    leaf = other_x.clone().requires_grad_()  # and both are what autograd says of torch's function
    torch.testing.assert_close(
        form.data_gradient(form.arrange(dy), other_w), torch.autograd.grad(f(leaf, other_w), leaf, dy)[0]
    )


def _multiply(a: Tensor, b: Tensor, added: Tensor | None) -> Tensor:
    assert a.dim() == b.dim() == 3
    return torch.bmm(a, b) if added is None else torch.baddbmm(added, a, b)


@pytest.mark.parametrize("name", _forms())
def test_every_form_is_also_a_product_of_matrices(name: str) -> None:
    form, of_x, of_w, _ = _forms()[name]
    torch.manual_seed(0)
    x, w = torch.randn(of_x, dtype=torch.float64), torch.randn(of_w, dtype=torch.float64)
    matrices, columns = in_matrices(form, (_multiply,) * 3), form.forward(form.arrange(x), w, None)
    channels = None if name == "batched" else columns.shape[-1 if name == "linear" else 1]
    bias = None if channels is None else torch.randn(channels, dtype=torch.float64)
    y = form.forward(form.arrange(x), w, bias)
    torch.testing.assert_close(matrices.forward(matrices.arrange(x), w, bias), y)
    dy = torch.randn_like(y)
    assert (matrices.fprop, matrices.dgrad, matrices.wgrad) == (form.fprop, form.dgrad, form.wgrad)
    of_dy, of_tokens = form.arrange(dy), form.arrange(x)
    torch.testing.assert_close(matrices.data_gradient(of_dy, w), form.data_gradient(of_dy, w))
    torch.testing.assert_close(matrices.weight_gradient(of_dy, of_tokens), form.weight_gradient(of_dy, of_tokens))


def test_a_form_without_matrices_is_refused() -> None:
    x = torch.empty(2, 3)
    with pytest.raises(NotImplementedError, match="not known as a product of matrices"):
        in_matrices(ByVjp(x, x, torch.mul, (Linear.fprop, Linear.dgrad, Linear.wgrad)), (_multiply,) * 3)


# Formats of single numbers, and operands that differ


def test_each_operand_has_its_own_format() -> None:
    products = Products(("fp16", "bf16"), ("e5m2", "e4m3fn"), ("e4m3fnuz", None))
    model = quantize(nn.Linear(8, 4, bias=False), Policy(products=products))
    x, dy, w = torch.randn(6, 8) * 0.1, torch.randn(6, 4), model.weight.detach()
    y, dx, grads = gradients(model, x, dy)

    def q(t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.to(dtype).double()

    close(y, q(x, torch.float16) @ q(w, torch.bfloat16).T)
    close(dx, q(dy, torch.float8_e5m2) @ q(w, torch.float8_e4m3fn))
    close(grads["weight"], q(dy, torch.float8_e4m3fnuz).T @ x.double())


def test_roles_round_first_and_products_quantise_what_they_gave() -> None:
    products = Products.all("e4m3fn")
    model = quantize(nn.Linear(8, 4), Policy("bf16", "bf16", "bf16", "bf16", products=products))
    x, dy = torch.randn(6, 8) * 0.3, torch.randn(6, 4)
    kept = Kept(model)
    y, dx, grads = gradients(model, x, dy)

    def b(t: Tensor) -> Tensor:
        return t.detach().bfloat16().float()

    def q(t: Tensor) -> Tensor:
        return b(t).to(torch.float8_e4m3fn).float()

    w = model.weight
    assert torch.equal(kept.before[":linear", "fprop.x"], b(x))
    assert torch.equal(kept.before[":linear", "dgrad.dy"], b(dy))
    assert torch.equal(y, b(torch.addmm(b(model.bias), q(x), q(w).T)))
    assert torch.equal(dx, b(q(dy) @ q(w)))
    assert torch.equal(grads["weight"], b(q(dy).T @ q(x)))
    assert torch.equal(grads["bias"], b(b(dy).sum(0)))


def test_a_result_without_a_role_has_the_products_format() -> None:
    products = Products.all("e4m3fn", output=Operand("bf16"))
    model = quantize(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), Policy(products=products))
    x, dy = torch.randn(6, 8), torch.randn(6, 4)
    kept = Kept(model)
    y, *_ = gradients(model, x, dy)
    q = [t.detach().to(torch.float8_e4m3fn).float() for t in (x, model[0].weight)]
    expected = torch.addmm(model[0].bias.detach(), q[0], q[1].T).bfloat16().float()
    assert torch.equal(y, torch.tanh(expected))
    assert torch.equal(kept.after["0:linear", "output"], expected)
    before = kept.before["0:linear", "dgrad.dy"]  # its gradient passes
    leaf = expected.requires_grad_()
    assert torch.equal(before, torch.autograd.grad(torch.tanh(leaf), leaf, dy)[0])
    assert not torch.equal(before, before.bfloat16().float())


def test_stochastic_operands_are_unbiased_in_both_gradients() -> None:
    without_saturation = Operand("e2m1fn per 32 ceil", "stochastic")  # rounded down, a scale clips, which is a bias
    products = Products(dgrad=(Operand("e2m1fn", "stochastic"), None), wgrad=(without_saturation, None))
    model = quantize(nn.Linear(40, 36, bias=False), Policy(products=products))
    x, dy = torch.randn(5, 40), torch.rand(5, 36) * 3
    torch.manual_seed(0)
    runs = 2000
    sums = torch.zeros(5, 40), torch.zeros(36, 40)
    for _ in range(runs):
        model.zero_grad()
        _, dx, grads = gradients(model, x, dy)
        sums[0].add_(dx)
        sums[1].add_(grads["weight"])
    of_x, of_w = dy @ model.weight.detach(), dy.T @ x
    # e2m1's steps are 1 at most here, and so is the change of a dy: variance at most 1/4, over so many terms and runs
    for total, expected, terms in (
        (sums[0], of_x, model.weight.detach().square().sum(0).amax()),
        (sums[1], of_w, x.square().sum(0).amax()),
    ):
        deviation = 5 * (0.25 * terms / runs).sqrt()
        assert float((total / runs - expected).abs().max()) < float(deviation)
    nearest = quantize(nn.Linear(40, 36, bias=False), Policy(products=Products(dgrad=("e2m1fn", None))))
    nearest.load_state_dict(model.state_dict())
    dx = gradients(nearest, x, dy)[1]
    assert float((dx - of_x).abs().max()) > float(
        5 * (0.25 * model.weight.detach().square().sum(0).amax() / runs).sqrt()
    )


def test_nearest_copies_of_dy_are_shared_and_stochastic_ones_are_not() -> None:
    for rounding, is_shared in (("nearest_even", True), ("stochastic", False)):
        model = quantize(nn.Linear(8, 4), Policy(products=Products.all("e2m1fn", rounding)))
        kept = Kept(model)
        gradients(model, torch.randn(6, 8), torch.randn(6, 4))
        assert torch.equal(kept.operand("dgrad.dy"), kept.operand("wgrad.dy")) is is_shared


@tiers.parametrize(
    ("operand", "count"),
    [("e4m3fn per tensor fp32", 5), ("e4m3fn per tensor delayed", 6), ("e4m3fn per row fp32", 6), ("mxfp4", 6)]
    + [(Operand("e4m3fn per tensor fp32", "stochastic"), 6)],
    keep={"e4m3fn per tensor fp32", "mxfp4"},
)
def test_a_scale_for_the_whole_tensor_makes_one_copy_of_dy(
    operand: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = []

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rounded.append(x)
        return rounded_blocks(x, *args, **kwargs)

    monkeypatch.setattr("fpsim.emulation.products.rounded_blocks", counting)
    model = quantize(nn.Linear(8, 4), Policy(products=Products.all(operand)))
    with fpsim.record(model) as recording:
        gradients(model, torch.randn(6, 8), torch.randn(6, 4))
    assert len(rounded) == count
    assert {row["role"]: row["count"] for row in recording.rows() if ".dy" in row["role"]} == {
        "dgrad.dy": 24,
        "wgrad.dy": 24,
    }


def test_products_are_recorded_by_operand() -> None:
    model = quantize(nn.Linear(4, 3, bias=False), Policy(products=Products.all("e4m3fn", dgrad=("mxfp4", None))))
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.tensor([[1e-5, 1000.0, 1.0, 0.0]])
    with fpsim.record(model) as recording:
        gradients(model, x, torch.tensor([[1.0, 1e-3, 0.0]]))
    rows = {row["role"]: row for row in recording.rows()}
    assert set(rows) == {"fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"}
    x_row = rows["fprop.x"]
    assert (x_row["site"], x_row["format"], x_row["underflow_count"], x_row["overflow_count"]) == (
        ":linear",
        "e4m3fn",
        1,
        1,
    )
    dy_row = rows["dgrad.dy"]
    # the block's scale is 1/4: 1e-3 is below an eighth, half of the smallest value
    assert (dy_row["format"], dy_row["rounding"]) == ("mxfp4", "nearest_even")
    assert (dy_row["underflow_count"], dy_row["exact_count"], dy_row["nonzero"]) == (1, 2, 2)
    assert rows["wgrad.dy"]["underflow_count"] == 1 - 1


def test_a_recording_of_products_is_saved_and_goes_on() -> None:
    dy = Operand("mxfp4", "stochastic", random_bits=8)
    model = quantize(nn.Linear(4, 3), Policy(products=Products.all("e4m3fn", dgrad=(dy, "nvfp4"))))
    with fpsim.record(model) as recording:
        gradients(model, torch.randn(5, 4), torch.randn(5, 3))
    again = fpsim.Recording()
    again.load_state_dict(recording.state_dict())
    assert again.rows() == recording.rows()
    assert again.tallies() == recording.tallies()
    assert any("mxfp4 stochastic" in rounding for _, _, rounding in again.tallies())
