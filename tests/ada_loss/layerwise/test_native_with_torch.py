"""Native per-layer scaling with the rest of torch: compiled blocks, accumulation, adapters, models of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ada_loss
from ada_loss.layerwise.native import NativeScaling
from ada_loss.layerwise.native_graph import (
    CONVOLUTION,
    GATE,
    INSIDE,
    MATRICES,
    PASSED,
    Factor,
    parameter_behind,
    plan_of,
)
from ada_loss.layerwise.native_hooks import NativePass
from ada_loss.layerwise.native_powers import Power
from ada_loss.rules.layer import Fixed


def some_powers() -> Callable[[Factor, list[Tensor], Power], Power]:
    count = 0

    def choose(factor: Factor, came: list[Tensor], log2: Power) -> Power:
        nonlocal count
        count += 1
        return count % 13 - 4

    return choose


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)), nn.Linear(16, 4))


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, loss: Callable[[], Tensor], scale: Any = lambda loss: loss) -> list[Tensor]:
    model.zero_grad()
    scale(loss()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at its inputs' own
@pytest.mark.full
@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_a_compiled_region_carries_one_power_of_two_and_gives_true_gradients(way: str) -> None:
    torch.compiler.reset()
    model = blocks()
    if way == "blocks":
        for i, block in enumerate(model):
            model[i] = torch.compile(block, backend="aot_eager")
        called: Any = model
    else:
        called = torch.compile(model, backend="aot_eager")
    seen: list[str] = []
    powers = some_powers()

    def choose(factor: Factor, came: list[Tensor], log2: Power) -> Power:
        seen.append(factor.site)
        return powers(factor, came, log2)

    def loss() -> Tensor:
        return called(inputs()).square().mean()

    assert_equal(gradients(model, loss, NativePass({}, choose).scale), gradients(model, loss))
    assert len([site for site in seen if "CompiledFunction" in site]) == {"blocks": 4, "whole": 1}[way]


def test_gradients_of_micro_batches_add_up_whatever_the_scales_of_each() -> None:
    model = blocks()
    names = {id(p): name for name, p in model.named_parameters()}
    scaler = NativePass(names, some_powers())  # other powers in each pass
    model.zero_grad()
    for seed in range(3):
        model(inputs(seed)).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for seed in range(3):
        scaler.scale(model(inputs(seed)).square().mean()).backward()
    assert_equal([p.grad for p in model.parameters()], plain)


def test_powers_of_two_do_nothing_to_gradients_in_bfloat16() -> None:
    # so that native scaling refuses bfloat16: it has float32's exponents, and nothing is gained
    model = blocks()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs()).float().square().mean() * 2.0**-30

    scaler = NativePass({}, some_powers(), half=torch.bfloat16)
    assert_equal(gradients(model, loss, scaler.scale), gradients(model, loss))


class Adapted(nn.Module):
    """A frozen layer in float16 with an adapter of low rank in float32, as LoRA has."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).half().requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_of_a_frozen_half_model_get_gradients_that_a_constant_loses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(4)))
    wide = nn.Sequential(*(Adapted() for _ in range(4)))
    wide.load_state_dict(model.state_dict())
    wide.float()
    size = 2.0**-40

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(inputs()).float().square().mean() * size

    true = gradients(wide, lambda: wide(inputs()).square().mean() * size)
    constant = gradients(model, loss, lambda loss: loss * 2.0**16)
    assert all(not g.any() for g in constant[:-2])  # guards the test
    for ours, wanted in zip(gradients(model, loss, NativeScaling(model).scale), true, strict=True):
        # products in float16, each with a relative error of 2**-11 and sums of 16 terms of it
        assert (ours - wanted).norm() <= 2.0**-7 * wanted.norm()


def trained(model: nn.Module, scaler: Any, sizes: list[float], x: Tensor) -> list[bool]:
    """Which steps were skipped, of a training whose losses have these sizes."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    skipped = []
    for size in sizes:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean() * size
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        skipped.append(scaler.overflowed(optimizer))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return skipped


@pytest.mark.parametrize(("update_every", "most"), [(1, 0), (100, 2)])
def test_a_gradient_that_grows_by_four_thousand_between_two_steps_costs_few_steps(update_every: int, most: int) -> None:
    model = blocks()
    scaler = ada_loss.GradScaler(layers=NativeScaling(model, update_every=update_every))
    skipped = trained(model, scaler, [2.0**-12] * 3 + [1.0] * 8, inputs())
    # factors that are held know nothing of the jump
    assert sum(skipped) <= most
    assert not any(skipped[-5:])


@pytest.mark.parametrize("times", [1000.0, 3000.0, 10000.0])
def test_large_inputs_cost_no_step_where_float16_holds_the_true_gradients(times: float) -> None:
    # The rule looks at the gradient that goes on, not at the weight's, which is a sum over the batch.
    x, seen = inputs() * times, set()
    for size in (2.0**-k for k in range(0, 15, 3)):
        model = blocks()
        largest = max(float(g.abs().max()) for g in gradients(model, lambda: model(x).square().mean() * size))  # noqa: B023
        scaler = ada_loss.GradScaler(layers=model)
        skipped = trained(model, scaler, [size] * 6, x)
        fits = largest < torch.finfo(torch.float16).max
        # beyond it, each step that is skipped takes a sixteenth of the scale
        assert sum(skipped) == scaler.skipped == (0 if fits else math.ceil(math.log2(largest / 65504) / 4))
        seen.add(fits)
    assert seen == {True, False}
    theirs = trained(blocks(), ada_loss.GradScaler("torch", init_scale=2.0**16), [1.0] * 12, x)
    assert sum(theirs) > 4


def test_half_weights_train_with_float32_gradients() -> None:
    # by SGD: torch's Adam takes no gradient of another dtype than its states
    model, x = blocks().half(), inputs().half()
    scaler, optimizer = ada_loss.GradScaler(layers=model), torch.optim.SGD(model.parameters(), lr=2.0**20)
    losses = []
    for _ in range(10):
        loss = model(x).float().square().mean() * 2.0**-20
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 2.0**-24)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_after_a_backward_pass_that_was_stopped_the_next_one_is_a_plain_or_a_scaled_one(
    error: type[BaseException],
) -> None:
    model, stops = blocks(), True
    scaling = NativeScaling(model, Fixed(2.0**3))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(inputs()).float().square().mean() * 2.0**-20

    def stop(gradient: Tensor) -> None:
        if stops:
            raise error

    plain, ours = gradients(model, loss), gradients(model, loss, scaling.scale)
    handle = model[1].up.weight.register_hook(stop)
    kept = loss()
    with pytest.raises(error):
        scaling.scale(kept).backward(retain_graph=True)
    stops = False
    handle.remove()
    assert_equal(gradients(model, loss), plain)
    assert_equal(gradients(model, loss, scaling.scale), ours)
    model.zero_grad()
    kept.backward()  # the hooks of the pass that was stopped are on its graph, and inert
    assert_equal([p.grad for p in model.parameters()], plain)


def test_parameters_that_are_new_since_the_scaler_was_made_have_names() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    scaling = NativeScaling(model)
    for name in ("1:linear", "2:linear"):
        with torch.autocast("cpu", torch.float16):
            scaling.scale(model(inputs()).float().sum()).backward()
        assert name in scaling.log2_scales()
        model.append(nn.Linear(16, 16))


PRODUCTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ("AddmmBackward0", lambda x, w: nn.functional.linear(x, w, w[0])),
    "linear without bias": ("MmBackward0", nn.functional.linear),
    "linear of three dimensions": ("AddmmBackward0", lambda x, w: nn.functional.linear(x[None], w, w[0])),
    "x @ w": ("MmBackward0", lambda x, w: x @ w),
    "a batch @ w": ("MmBackward0", lambda x, w: x.expand(3, 4, 4) @ w),
    "bmm": ("BmmBackward0", lambda x, w: torch.bmm(x[None], w[None])),
    "baddbmm": ("BaddbmmBackward0", lambda x, w: torch.baddbmm(x[None], x[None], w[None])),
    "einsum": ("BmmBackward0", lambda x, w: torch.einsum("ab,cb->ac", x, w)),
    "conv1d": ("ConvolutionBackward0", lambda x, w: nn.functional.conv1d(x, w[..., None])),
    "conv2d": ("ConvolutionBackward0", lambda x, w: nn.functional.conv2d(x[..., None], w[..., None, None])),
    "conv_transpose2d": (
        "ConvolutionBackward0",
        lambda x, w: nn.functional.conv_transpose2d(x[..., None], w[..., None, None]),
    ),
    "gate": ("MulBackward0", lambda x, w: x * w),
    "attention": (
        "ScaledDotProduct",
        lambda x, w: nn.functional.scaled_dot_product_attention(
            x[None, None], w[None, None], w[None, None], is_causal=True
        ),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_has_the_node_that_the_table_says_and_is_a_site(name: str) -> None:
    # Names of nodes change between versions of torch. One that is unknown is passed by, and its layer not scaled.
    kind, product = PRODUCTS[name]
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    y = product(x * 1, w)
    names, node, waiting = set(), y.grad_fn, [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and not hasattr(node, "variable"):
            names.add(node.name())
            waiting += [before for before, _ in node.next_functions]
    assert any(found.startswith(kind) for found in names), names
    assert any(kind.startswith(known) for known in (*MATRICES, CONVOLUTION, *INSIDE, GATE))
    root = y.view_as(y).grad_fn
    sites = plan_of(root, {id(w): "layer.weight"}).sites
    assert sites
    if name not in ("attention", "einsum"):  # einsum multiplies by a view that sums nothing
        assert sites[0].startswith("layer:")  # the parameter is found behind views


def test_a_weight_is_found_behind_every_view_and_cast_of_the_table() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    ways = {
        "TBackward0": w.t(),
        "ToCopyBackward0": w.half(),
        "TransposeBackward0": w.transpose(0, 1),
        "ViewBackward0": w.view(16),
        "PermuteBackward0": w.permute(1, 0),
        "UnsafeViewBackward0": torch.ops.aten._unsafe_view(w, [16]),
        "UnsqueezeBackward0": w[None],
        "ExpandBackward0": w.expand(2, 4, 4),
    }
    assert set(ways) == set(PASSED)
    for name, seen in ways.items():
        assert seen.grad_fn is not None
        assert seen.grad_fn.name() == name
        assert parameter_behind(seen.grad_fn) is w
    assert parameter_behind((w * 2).grad_fn) is None


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_sites(cell: type[nn.Module]) -> None:
    y = cell(4, 4)(torch.randn(2, 3, 4, requires_grad=True) * 1)[0]
    assert plan_of(y.view_as(y).grad_fn, {}).sites


def configured(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of transformers with weights at random, and what it is given."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(3, 90, (2, 12))
    small = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}
    if name == "t5":
        config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        config.decoder_start_token_id = 0
        return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}
    if name == "llama":
        config = transformers.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
    if name == "mixtral":
        config = transformers.MixtralConfig(**small, intermediate_size=64, num_key_value_heads=2, num_local_experts=4)
        return transformers.MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}
    if name == "vit":
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
        )
        given = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
        return transformers.ViTForImageClassification(config), given
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    given = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return transformers.ConvNextForImageClassification(config), given


KINDS = ("gpt2", "t5", "llama", "mixtral", "vit", "convnext")


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_models_of_transformers_have_the_gradients_of_a_plain_pass_bit_for_bit(name: str) -> None:
    model, given = configured(name)
    model.eval()  # without dropout, so that two passes are one
    scaler = NativePass({id(p): n for n, p in model.named_parameters()}, some_powers())
    ours = gradients(model, lambda: model(**given).loss, scaler.scale)
    assert_equal(ours, gradients(model, lambda: model(**given).loss))


@pytest.mark.full
@pytest.mark.parametrize("size", [1.0, 2.0**-20])
@pytest.mark.parametrize("name", KINDS)
def test_models_of_transformers_lose_nothing_at_any_size_of_their_loss(name: str, size: float) -> None:
    model, given = configured(name)
    model.eval()

    def loss(*, is_half: bool = True) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=is_half):
            return model(**given).loss.float() * size

    true = gradients(model, lambda: loss(is_half=False))
    ours = gradients(model, loss, NativeScaling(model).scale)

    def error(found: list[Tensor], scale: float = 1.0) -> float:
        errors = [float((g / scale - t).norm() / t.norm()) for g, t in zip(found, true, strict=True) if t.any()]
        return sorted(math.inf if math.isnan(e) else e for e in errors)[len(errors) // 2]

    assert all(g.isfinite().all() for g in ours)
    constants = [2.0**k for k in range(0, 41, 4)]
    best = min(error(gradients(model, loss, lambda loss, c=c: loss * c), c) for c in constants)
    assert error(ours) <= 1.1 * best


class Spectral(nn.Module):
    """Products of complex numbers between layers in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(self.a(x).float()) @ self.mix * self.gain
        return self.b(torch.fft.irfft(frequencies, n=8))


def test_complex_products_pass_what_layers_carry() -> None:
    torch.manual_seed(0)
    model, x, size = Spectral(), torch.randn(4, 8), 2.0**-24

    def loss(factor: float) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().square().mean() * factor

    wanted = torch.autograd.grad(loss(1.0), [*model.parameters()])
    scaler = ada_loss.GradScaler(layers=model)
    scaler.scale(loss(size)).backward()
    for p, plain in zip(model.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert float((p.grad / size - plain).abs().max()) < 2e-3 * float(plain.abs().max())  # float16 has 2^-11
