"""Products in models: what counts as one, scaling, recomputation, autocast, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from product_cases import Calls, Kept, by_hand, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from ada_loss import AdaLossScaled
from ada_loss.rules import layer_rule
from fpsim import Operand, Policy, Products, emulate, quantize

E4M3 = Policy(products=Products.all("e4m3fn"))


def q(x: Tensor) -> Tensor:
    return x.detach().to(torch.float8_e4m3fn).float()


# What counts as a product with a weight


class TwoActivations(nn.Module):
    def __init__(self, f: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.f(a, b)


@pytest.mark.parametrize(
    "f",
    [torch.matmul, torch.bmm, lambda a, b: a @ b, lambda a, b: torch.einsum("bij,bjk->bik", a, b)],
    ids=["matmul", "bmm", "@", "einsum"],
)
def test_products_of_two_activations_are_quantised_on_request(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    for attention, expected in ((False, a @ b), (True, q(a) @ q(b))):
        model = quantize(TwoActivations(f), Policy(products=Products.all("e4m3fn", attention=attention)))
        assert torch.equal(model(a, b), expected)


VIEWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "parameter": lambda m, x: x @ m.w,
    "transposed": lambda m, x: x @ m.v.t(),
    "T": lambda m, x: x @ m.v.T,
    "viewed": lambda m, x: x @ m.w.view(2, 2, 6).reshape(4, 6),
    "cut": lambda m, x: x @ m.long[:4],
    "split": lambda m, x: x @ m.long.split(4)[0],
    "cast": lambda m, x: x @ m.w.to(x.dtype),
    "stacked": lambda m, x: x @ torch.cat([m.w[:2], m.w[2:]]),
    "normed": lambda m, x: x @ m.normed.weight.t(),
    "linear of what is computed": lambda m, x: F.linear(x, m.v * 1.0),
}


class Viewed(nn.Module):
    def __init__(self, view: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view
        self.w = nn.Parameter(torch.randn(4, 6))
        self.v = nn.Parameter(self.w.detach().t().clone())
        self.long = nn.Parameter(torch.cat([self.w.detach()] * 2))
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        with torch.no_grad():
            self.normed.weight = self.v.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self, x)


@pytest.mark.parametrize("role", [None, "bf16"], ids=["no roles", "roles"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_copies_of_parameters_are_weights(view: str, role: str | None) -> None:
    plain = Viewed(VIEWS[view])
    model = quantize(plain, Policy(role, role, products=Products.all("e4m3fn")))
    kept, x = Kept(model), torch.randn(3, 4)
    y = model(x)
    w = plain.w if role is None else plain.w.bfloat16().float()
    x = x if role is None else x.bfloat16().float()
    expected = q(x) @ (q(w) if view != "normed" else q(w if role else plain.normed.weight.t()))
    expected = expected if role is None else expected.bfloat16().float()
    assert any(r == "fprop.w" for _, r in kept.after)
    torch.testing.assert_close(y, expected, rtol=0.01 if role and view == "normed" else 1e-5, atol=1e-2)


def test_what_is_looked_up_in_a_weight_is_an_activation() -> None:
    table = nn.Embedding(5, 4)

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            e = self.table(x)
            return e @ e.mT + F.linear(e, self.table.weight)[..., :1]

    model = quantize(Scores(), E4M3)
    kept = Kept(model)
    model(torch.tensor([[0, 1, 2]]))
    assert {site for site, _ in kept.after} == {":linear"}


def test_functional_call_with_other_weights_knows_them_for_weights() -> None:
    model = quantize(Calls(torch.matmul, torch.randn(4, 6)), E4M3)
    x, w = torch.randn(3, 4), torch.randn(4, 6)
    assert torch.equal(torch.func.functional_call(model, {"w": w}, (x,)), q(x) @ q(w))


def test_operations_named_float32_and_overridden_modules_keep_their_products() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    off = quantize(plain, Policy(products=Products.all("e4m3fn"), overrides={"1": None}))
    first = F.linear(q(x), q(plain[0].weight), plain[0].bias)
    assert torch.equal(off(x), plain[1](first))
    assert torch.equal(quantize(plain, Policy(products=Products.all("e4m3fn"), float32=("linear",)))(x), plain(x))


def test_what_is_float32_on_purpose_is_quantised_where_it_enters_a_product_with_a_weight() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            angles = x.float() @ x.float().mT  # float32 on purpose, both of them
            return self.linear(x.float()) + angles[:, :3]

    x = torch.randn(4, 4)
    model = quantize(Wide(), Policy("bf16", "bf16", products=Products.all("e4m3fn", attention=True)))
    w = model.linear.weight.detach().bfloat16().float()
    kept = Kept(model)
    model(x)
    assert torch.equal(kept.after["linear:linear", "fprop.x"], q(x.bfloat16().float()))
    assert torch.equal(kept.after["linear:linear", "fprop.w"], q(w))
    assert {site for site, role in kept.after if role == "fprop.x"} == {"linear:linear"}


# Attention


def attention_cases() -> dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, object]]]:
    floats = torch.randn(5, 6)
    floats[2] = -torch.inf  # a row that sees nothing
    keep = torch.rand(2, 1, 5, 6) > 0.4
    keep[0, 0, 1] = False
    same = (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7)
    return {
        "plain": (same, {}),
        "causal": (((2, 5, 4), (2, 5, 4), (2, 5, 4)), {"is_causal": True}),
        "scaled": (same, {"scale": 0.3}),
        "bool mask": (same, {"attn_mask": keep}),
        "float mask": (same, {"attn_mask": floats}),
        "grouped": (((2, 6, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7)), {"enable_gqa": True}),
    }


@pytest.mark.parametrize("name", attention_cases())
def test_attention_written_out_is_torchs(name: str) -> None:
    shapes, options = attention_cases()[name]
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]

    def run(context: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        with context:  # type: ignore[attr-defined]
            y = F.scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
        y.backward(torch.ones_like(y) * torch.arange(y.shape[-1]))
        return [y.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]

    expected = run(torch.autograd.set_grad_enabled(True))
    got = run(emulate(Policy(products=Products.all("fp32", attention=True))))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_quantises_both_of_its_products_on_request() -> None:
    query, key, value = torch.randn(2, 5, 32), torch.randn(2, 6, 32), torch.randn(2, 6, 7)

    class Attention(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)

    for attention in (False, True):
        model = quantize(Attention(), Policy(products=Products.all("mxfp8_e4m3", attention=attention)))
        kept = Kept(model)
        y = model(query)
        if not attention:
            assert not kept.after
            assert torch.equal(y, F.scaled_dot_product_attention(query, key, value))
            continue
        scores = by_hand(query, "mxfp8_e4m3", 2) @ by_hand(key, "mxfp8_e4m3", 2).mT / 32**0.5
        weights = torch.softmax(scores, -1)
        expected = by_hand(weights, "mxfp8_e4m3", 2) @ by_hand(value, "mxfp8_e4m3", 1)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)  # softmax's last digit may tip a rounding
        assert {s for s, _ in kept.after} == {
            ":scaled_dot_product_attention.qk",
            ":scaled_dot_product_attention.pv",
        }


# Gradients that are rounded at scales


def test_dy_is_rounded_at_the_scale_that_a_scaling_gives() -> None:
    products = Products(dgrad=("e5m2", None), wgrad=("e5m2", None))
    model = quantize(nn.Linear(8, 4), Policy(products=products))
    x, dy = torch.randn(6, 8), torch.randn(6, 4) * 2e-6
    _, lost, _ = gradients(model, x, dy)
    assert not torch.equal(lost, dy @ model.weight.detach())
    with AdaLossScaled(model, init_scale=2.0**20, rule=layer_rule("fixed", fixed_loss_scale=1.0)) as scaled:
        model.zero_grad()
        _, dx, grads = gradients(model, x, dy)
        assert scaled.log2_scales() == {":linear": 20}
    rounded = (dy * 2.0**20).to(torch.float8_e5m2).float() / 2.0**20
    assert torch.equal(dx, rounded @ model.weight.detach())
    assert torch.equal(grads["weight"], rounded.T @ x)


def test_a_layers_scale_follows_from_its_products_as_with_roles() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    products = Products(dgrad=("fp16", None), wgrad=("fp16", None))
    by_products, by_roles = quantize(net, Policy(products=products)), quantize(net, Policy(error="fp16"))
    x, dy = torch.randn(6, 16), torch.randn(6, 4) * 1e-9
    found = []
    for model in (by_products, by_roles):
        with AdaLossScaled(model) as scaled:
            gradients(model, x, dy)
            found.append(scaled.log2_scales())
    linears = {site: scale for site, scale in found[1].items() if site.endswith(":linear")}
    assert list(found[0]) == ["0:linear", "2:linear", "4:linear"]
    assert min(found[0].values()) > 10
    # with roles, what tanh passes on is rounded too, and statistics are those of rounded numbers
    assert all(abs(found[0][site] - scale) <= 1 for site, scale in linears.items())


def test_a_block_format_asks_no_scaling() -> None:
    model = quantize(nn.Linear(32, 4), "mxfp4")
    with AdaLossScaled(model) as scaled:
        gradients(model, torch.randn(6, 32), torch.randn(6, 4))
        assert scaled.log2_scales() == {}


def test_what_is_shown_of_dy_has_the_scale_of_its_own_rounding() -> None:
    model = quantize(nn.Linear(32, 4), Policy(products=Products(dgrad=("e5m2", None), wgrad=("mxfp4", None))))
    dy = torch.randn(6, 4)
    one = layer_rule("fixed", fixed_loss_scale=1.0)
    with AdaLossScaled(model, init_scale=2.0**10, rule=one), fpsim.record(model) as recording:
        gradients(model, torch.randn(6, 32), dy)
    amax = {row["role"]: row["amax"] for row in recording.rows()}
    assert amax == {"dgrad.dy": float(dy.abs().max()) * 2**10, "wgrad.dy": float(dy.abs().max())}


def test_two_formats_of_dy_get_a_scale_each() -> None:
    products = Products(dgrad=("e5m2", None), wgrad=("e4m3fn", None))
    model = quantize(nn.Linear(8, 4), Policy(products=products))
    x, dy = torch.randn(6, 8), torch.randn(6, 4) * 1e-9
    with AdaLossScaled(model, init_scale=2.0**40, rule=layer_rule("fixed", fixed_loss_scale=1.0)) as scaled:
        _, dx, grads = gradients(model, x, dy)
        of_x, of_w = scaled.log2_scales()[":linear"], scaled.log2_scales("wgrad.dy")[":linear"]
    assert of_x == 40
    largest = torch.tensor(448.0)  # it is lowered until the largest fits
    assert of_w == int(torch.floor(torch.log2(largest / dy.abs().max())))
    copies = (
        (dy.double() * 2.0**of_x).float().to(torch.float8_e5m2),
        (dy.double() * 2.0**of_w).float().to(torch.float8_e4m3fn),
    )
    torch.testing.assert_close(dx, (copies[0].double() / 2.0**of_x).float() @ model.weight.detach())
    torch.testing.assert_close(grads["weight"], (copies[1].double() / 2.0**of_w).float().T @ x)


def test_an_error_role_and_dy_have_a_site_each() -> None:
    products = Products(dgrad=("e5m2", None), wgrad=("e5m2", None))
    policy = Policy("bf16", "bf16", "fp16", "fp16", products=products)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), policy)
    x, dy = torch.randn(6, 8), torch.randn(6, 4) * 1e-7
    with AdaLossScaled(model, init_scale=2.0**12, rule="fixed") as scaled:
        _, dx, _ = gradients(model, x, dy)
        scales, of_weights = scaled.log2_scales(), scaled.log2_scales("weight_grad")
    assert {
        site: scales[site] for site in ("2:linear", "2:linear.output", "0:linear", "0:linear.output")
    } == dict.fromkeys(("2:linear", "2:linear.output", "0:linear", "0:linear.output"), 12)
    assert set(of_weights.values()) == {12}
    assert float(dx.abs().max()) > 0


def test_a_loss_scale_reaches_dy() -> None:
    products = Products(dgrad=("e5m2", None), wgrad=("e5m2", None))
    model = quantize(nn.Linear(8, 1, bias=False), Policy(products=products))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x = torch.randn(1, 8)
    scaler.scale(model(x).sum() * 1e-6).backward()
    scaler.unscale_(optimizer)
    dy = (2.0**16 * torch.tensor(1e-6)).to(torch.float8_e5m2).float()
    torch.testing.assert_close(model.weight.grad, dy * x / 2**16)


# What is kept between forward and backward


def test_backward_quantises_anew_what_was_saved_before_any_quantisation() -> None:
    model = quantize(nn.Linear(8, 4), E4M3)
    saved: list[Tensor] = []
    x = torch.randn(6, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    assert [any(torch.equal(t, original) for t in saved) for original in (x, model.weight)] == [True, True]
    assert len(saved) == 2


def test_a_weight_changed_between_forward_and_backward_is_refused_by_torch() -> None:
    model = quantize(nn.Linear(8, 4), E4M3)
    y = model(torch.randn(6, 8, requires_grad=True))
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_may_be_changed_in_place() -> None:
    for layer, shape in ((nn.Linear(8, 4), (2, 3, 8)), (nn.Conv1d(8, 4, 1), (2, 8, 3)), (nn.Conv1d(8, 4, 1), (8, 3))):
        model = quantize(nn.Sequential(layer, nn.ReLU(inplace=True)), E4M3)
        model(torch.randn(shape)).sum().backward()
        assert layer.weight.grad is None
        assert model[0].weight.grad is not None


def test_only_needed_gradients_are_computed() -> None:
    model = quantize(nn.Linear(8, 4), E4M3)
    kept = Kept(model)
    model(torch.randn(6, 8)).sum().backward()
    assert {r for _, r in kept.after} == {"fprop.x", "fprop.w", "wgrad.dy", "wgrad.x"}
    model.requires_grad_(False)
    kept = Kept(model)
    model(torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert {r for _, r in kept.after} == {"fprop.x", "fprop.w", "dgrad.dy", "dgrad.w"}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same(context: Callable[[], object]) -> None:
    model, x = quantize(nn.Linear(8, 4), E4M3), torch.randn(6, 8)
    expected = model(x).detach()
    with context():  # type: ignore[attr-defined]
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_runs_products_again_with_the_same_noise(use_reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self, is_checkpointed: bool) -> None:
            super().__init__()
            self.first, self.v, self.is_checkpointed = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), is_checkpointed

        def body(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.tanh(self.first(x)) @ w

        def forward(self, x: Tensor) -> Tensor:
            w = self.v.t()
            return checkpoint(self.body, x, w, use_reentrant=use_reentrant) if self.is_checkpointed else self.body(x, w)

    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = quantize(nn.Sequential(Block(is_checkpointed), nn.Linear(8, 3)), "mxfp4", rounding="stochastic")
        x = torch.randn(40, 8)
        torch.manual_seed(1)
        found.append(gradients(model, x, torch.ones(40, 3)))
    (y, dx, grads), (y2, dx2, grads2) = found
    assert torch.equal(y, y2)
    assert torch.equal(dx, dx2)
    for name in grads:
        assert torch.equal(grads[name], grads2[name]), name


def test_autocast_gives_its_dtype_and_the_operands_are_quantised_from_float32() -> None:
    model = quantize(nn.Linear(8, 4, bias=False), E4M3)
    x = torch.randn(6, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, (q(x) @ q(model.weight).T).bfloat16())
        dy = torch.randn(6, 4).bfloat16()
        y.backward(dy)
    assert torch.equal(x.grad, q(dy.float()) @ q(model.weight))
    assert model.weight.grad.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x.detach().bfloat16()), (q(x.bfloat16().float()) @ q(model.weight).T).bfloat16())


def test_a_model_in_bfloat16_has_its_products_added_in_float32() -> None:
    model = quantize(nn.Linear(8, 4).bfloat16(), E4M3)
    x, dy = torch.randn(6, 8).bfloat16(), torch.randn(6, 4).bfloat16()
    y, dx, grads = gradients(model, x, dy)
    w, b = model.weight, model.bias.detach().float()
    assert torch.equal(y, torch.addmm(b, q(x.float()), q(w.float()).T).bfloat16())
    assert torch.equal(dx, (q(dy.float()) @ q(w.float())).bfloat16())
    assert grads["weight"].dtype is torch.bfloat16


def test_what_is_written_to_gets_the_result() -> None:
    x, w, out = torch.randn(3, 4), nn.Parameter(torch.randn(4, 5)), torch.empty(0)
    with emulate(E4M3), torch.no_grad():
        torch.mm(x, w, out=out)
        sums = torch.ones(3, 5)
        sums.addmm_(x, w, beta=2)
        square = torch.eye(4)
        square @= w[:, :4]
    assert torch.equal(out, q(x) @ q(w))
    assert torch.equal(sums, torch.add(torch.full((3, 5), 2.0), q(x) @ q(w)))
    assert torch.equal(square, q(w[:, :4]))
    with emulate(E4M3), pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.mm(x, w, out=out)


# What is refused


def test_double_backward_is_refused_where_it_is_used() -> None:
    model = quantize(nn.Linear(8, 4), E4M3)
    x = torch.randn(6, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(NotImplementedError, match="product at :linear was differentiated again"):
        dx.sum().backward()


def test_transforms_and_batches_of_gradients_are_refused() -> None:
    model = quantize(nn.Linear(8, 4), E4M3)
    with pytest.raises(NotImplementedError, match="A product at :linear has operands to quantise under"):
        torch.func.vmap(model)(torch.randn(5, 6, 8))
    x = torch.randn(6, 8, requires_grad=True)
    y = model(x)
    with pytest.raises(NotImplementedError, match="reached the product at :linear is a batch"):
        torch.autograd.grad(y, x, torch.eye(24).view(24, 6, 4), is_grads_batched=True)


def test_export_is_refused() -> None:
    with pytest.raises(Exception, match=r"has operands to quantise under torch.export"):
        torch.export.export(quantize(nn.Linear(8, 4), E4M3), (torch.randn(6, 8),))


def test_several_products_in_one_call_are_refused() -> None:
    model = quantize(Calls(lambda x, w: torch.linalg.multi_dot([x, w, w]), torch.randn(4, 4)), E4M3)
    with pytest.raises(NotImplementedError, match="linalg_multi_dot at the top level hides several products"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize("power", [torch.matrix_power, torch.linalg.matrix_power, Tensor.matrix_power])
def test_a_power_of_a_weight_is_refused_where_it_is_several_products(power: Callable[..., Tensor]) -> None:
    w = torch.randn(4, 4)
    for n in (-2, 2, 3):
        with pytest.raises(NotImplementedError, match="matrix_power at the top level hides several products"):
            quantize(Calls(lambda x, w, n=n: power(w, n), w), E4M3)(torch.randn(3, 4))
    for n in (-1, 0, 1):
        model = quantize(Calls(lambda x, w, n=n: power(w, n), w), E4M3)
        assert torch.equal(model(torch.randn(3, 4)), power(w, n))
    expected = w @ w
    with emulate(E4M3):  # of an activation
        assert torch.equal(power(w, 2), expected)


@pytest.mark.parametrize("w", [torch.randn(4, 4), torch.randn(4, 4, dtype=torch.complex64)], ids=["cast", "complex"])
def test_complex_products_with_a_weight_are_refused(w: Tensor) -> None:
    spectral = nn.Sequential(Calls(lambda x, w: torch.einsum("bi,io->bo", torch.fft.fft(x), w.to(torch.complex64)), w))
    x = torch.randn(3, 4)
    with pytest.raises(NotImplementedError, match="product at 0:einsum has complex operands"):
        quantize(spectral, E4M3)(x)
    assert torch.equal(quantize(spectral, replace(E4M3, overrides={"0": None}))(x), spectral(x))
    by_parts = Calls(lambda x, w: x @ w.real + x @ torch.view_as_real(w + 0)[..., 1], torch.complex(w.real, w.real))
    assert not torch.equal(quantize(by_parts, E4M3)(x), by_parts(x))
    z = torch.fft.fft(x)  # an activation
    expected = z @ z.mT
    with emulate(E4M3):
        assert torch.equal(z @ z.mT, expected)


@pytest.mark.filterwarnings("ignore")  # torch's quantisation is deprecated, and models have it
def test_products_of_numbers_that_are_quantised_already_are_refused() -> None:
    int8 = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), dtype=torch.qint8)
    with pytest.raises(NotImplementedError, match="linear_dynamic at 0 computes with numbers that are"):
        quantize(int8, E4M3)(torch.randn(32, 8))
    x = torch.ones(32, 32, dtype=torch.int8)
    with emulate(E4M3), pytest.raises(NotImplementedError, match="_int_mm at the top level computes"):
        torch._int_mm(x, x)


def test_torchs_own_errors_are_torchs() -> None:
    model = quantize(nn.Linear(8, 4), E4M3)
    with pytest.raises(RuntimeError, match=r"must have the same dtype|expected m1 and m2 to have the same dtype"):
        model(torch.randn(3, 8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
        model(torch.randn(3, 7))
    with emulate(E4M3), pytest.raises(TypeError, match="missing 1 required positional"):
        torch.mm(nn.Parameter(torch.ones(2, 2)), mat3=torch.ones(2, 2))


def test_tensors_without_memory_and_integers_are_left_to_torch() -> None:
    model = quantize(nn.Linear(8, 4).to("meta"), E4M3)
    assert model(torch.empty(6, 8, device="meta")).shape == (6, 4)
    with emulate(E4M3):
        assert torch.equal(
            torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64), torch.full((2, 2), 2)
        )


def test_copies_and_pickles_keep_products() -> None:
    model, x = quantize(nn.Linear(8, 4), E4M3), torch.randn(6, 8)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(fpsim.dequantize(model)(x), F.linear(x, model.weight, model.bias))


def test_operands_are_rounded_as_their_own_spec_says() -> None:
    operand = Operand("e4m3fn", "toward_zero", overflow="saturate")
    model = quantize(nn.Linear(4, 1, bias=False), Policy(products=Products(fprop=(operand, None))))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0, 0]]))
    assert model(torch.tensor([[1e9, 0, 0, 0], [1.12, 0, 0, 0]])).flatten().tolist() == [448.0, 1.0]


# Products in other forms


class Experts(nn.Module):
    """Tokens of each expert, side by side, times the expert's own matrix."""

    def __init__(self, is_grouped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.is_grouped = nn.Parameter(torch.randn(3, 16, 8)), is_grouped

    def forward(self, x: Tensor) -> Tensor:
        if self.is_grouped:  # the second expert has no tokens
            return nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([2, 2, 5], dtype=torch.int32))
        return torch.cat([x[:2] @ self.weight[0], x[2:] @ self.weight[2]])


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch without grouped_mm")
def test_a_grouped_product_is_the_products_of_its_groups() -> None:
    torch.manual_seed(1)
    x, dy = torch.randn(5, 16), torch.randn(5, 8)
    found = []
    for is_grouped in (True, False):
        model = fpsim.quantize(Experts(is_grouped), "mxfp4")
        y, dx, grads = gradients(model, x, dy)
        found.append((y, dx, grads["weight"]))
    for grouped, apart in zip(*found, strict=True):
        assert torch.equal(grouped, apart)
    assert not torch.equal(found[0][0], Experts(False)(x))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: torch.sparse.mm(x.to_sparse(), w),
        lambda x, w: x.to_sparse_csr() @ w,
        lambda x, w: nn.functional.linear(torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged), w.mT),
    ],
    ids=["sparse.mm", "csr @", "jagged linear"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_and_nested_operands_are_refused(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = fpsim.quantize(Calls(f, torch.randn(6, 3)), "mxfp4")
    with pytest.raises(NotImplementedError, match=r"sparse or nested.*Expected: dense tensors"):
        model(torch.randn(5, 6))


def test_a_sparse_operand_of_activations_is_left_alone() -> None:
    net = Calls(lambda x, w: torch.sparse.mm(torch.eye(5).to_sparse(), x @ w), torch.randn(6, 3))
    model = quantize(net, "mxfp4")
    x = torch.randn(5, 6)
    expected = quantize(Calls(lambda x, w: x @ w, net.w.detach()), "mxfp4")(x)
    assert torch.equal(model(x), expected)


def test_a_transposed_convolution_pads_nothing_unless_it_is_told_to() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(32, 32, 3, 3), torch.randn(2, 32, 4, 4)
    short = fpsim.quantize(Calls(F.conv_transpose2d, weight), "mxfp8_e4m3")
    long = fpsim.quantize(Calls(lambda x, w: F.conv_transpose2d(x, w, None, 1, 0, 0, 1, 1), weight), "mxfp8_e4m3")
    assert torch.equal(short(x), long(x))
    assert short(x).shape == (2, 32, 6, 6)  # 4 + 3 - 1


@pytest.mark.parametrize(("formula", "count", "sites"), [("ab,bc", 1, [""]), ("ab,bc,cd", 2, [".0", ".1"])])
def test_the_products_of_an_einsum_are_numbered_where_it_has_several(
    formula: str, count: int, sites: list[str]
) -> None:
    model = Calls(lambda x, w: torch.einsum(formula, x, *[w] * count), torch.ones(32, 32))
    model = fpsim.quantize(model, "mxfp8_e4m3")
    with fpsim.record(model) as recording:
        model(torch.ones(32, 32))
    assert list(dict.fromkeys(row["site"] for row in recording.rows())) == [f":einsum{part}" for part in sites]
