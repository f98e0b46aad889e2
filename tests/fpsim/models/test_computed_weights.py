"""Weights that are computed: what computes them is float32, and they are rounded once, where they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fpsim
from fpsim import Policy, quantize, round_parameters_, summary

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.* is deprecated")
# torch's own dtypes round what is expected: weights to one, activations and errors to another
POLICY = Policy(weight="bf16", activation="fp16", error="fp16", weight_grad="bf16")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bf16(x: Tensor) -> Tensor:
    return x.detach().bfloat16().float()


def fp16(x: Tensor) -> Tensor:
    return x.detach().half().float()


class Symmetric(nn.Module):
    """A parametrization of a user, as in torch's tutorial."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def chained(layer: nn.Module) -> nn.Module:
    return symmetric(parametrizations.weight_norm(layer))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(layer)  # type: ignore[no-any-return]


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.5)  # type: ignore[no-any-return]


NEW: list[Callable[[nn.Module], nn.Module]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    symmetric,
    chained,
]
OLD: list[Callable[[nn.Module], nn.Module]] = [old_weight_norm, nn.utils.spectral_norm, pruned]


def layer_with(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return norm(nn.Linear(6, 6))


def require_by_hand(model: nn.Module, layer: nn.Module, plain: nn.Module) -> None:
    """`layer`, quantised inside of `model`, against the same one unquantised and rounded by hand where it is used."""
    x, g = randn(4, 6, seed=1).requires_grad_(), randn(4, 6, seed=2)
    out = model(x)
    out.backward(g)

    for hook in plain._forward_pre_hooks.values():
        hook(plain, ())
    weight, bias = plain.weight, plain.bias  # in float32, by torch alone
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    assert not torch.equal(bf16(weight), weight)
    assert torch.equal(out, fp16(F.linear(fp16(x), bf16(weight), bf16(bias))))
    error = fp16(g)
    assert x.grad is not None
    assert torch.equal(x.grad, fp16(error @ bf16(weight)))
    bias.grad = bf16(error.sum(0))
    weight.backward(bf16(error.T @ fp16(x)))
    theirs = dict(plain.named_parameters())
    assert list(theirs) == [name for name, _ in layer.named_parameters()]
    for name, parameter in layer.named_parameters():
        expected = theirs[name].grad
        assert expected is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected), name


@pytest.mark.parametrize("norm", NEW + OLD, ids=lambda norm: norm.__name__)
def test_a_computed_weight_is_rounded_once_where_it_is_used(norm: Callable[[nn.Module], nn.Module]) -> None:
    layer = layer_with(norm)
    require_by_hand(quantize(nn.Sequential(layer), POLICY, inplace=True), layer, layer_with(norm))


@pytest.mark.parametrize("alone", [False, True], ids=["inside", "alone"])
@pytest.mark.parametrize("norm", NEW + OLD, ids=lambda norm: norm.__name__)
def test_a_norm_may_be_registered_after_quantising(norm: Callable[[nn.Module], nn.Module], alone: bool) -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(6, 6)), POLICY)
    layer = norm(model[0])
    require_by_hand(layer if alone else model, layer, layer_with(norm))


@pytest.mark.parametrize("norm", NEW + OLD, ids=lambda norm: norm.__name__)
def test_a_module_added_later_computes_its_weights_in_float32(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = quantize(nn.Sequential(nn.Identity()), POLICY)
    layer = layer_with(norm)
    model[0] = nn.Sequential(nn.Identity(), nn.Sequential(layer))
    require_by_hand(model, layer, layer_with(norm))


@pytest.mark.parametrize("norm", NEW, ids=lambda norm: norm.__name__)
def test_copies_compute_their_own_weights(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = quantize(nn.Sequential(layer_with(norm)), POLICY)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    require_by_hand(duplicate, duplicate[0], layer_with(norm))


def test_a_cached_weight_is_computed_once_and_keeps_its_role() -> None:
    calls: list[int] = []

    class Counting(Symmetric):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    layer = nn.Linear(6, 6)
    expected = layer.weight.triu() + layer.weight.triu(1).T
    parametrize.register_parametrization(layer, "weight", Counting())
    model, x = quantize(layer, POLICY), randn(4, 6)
    calls.clear()
    with parametrize.cached():
        assert torch.equal(model.weight, expected)  # not rounded: the user sees what was computed
        outputs = [model(x), model(x)]
    assert len(calls) == 1
    for out in outputs:
        assert torch.equal(out, fp16(F.linear(fp16(x), bf16(expected), bf16(layer.bias))))
    sum(out.sum() for out in outputs).backward()  # type: ignore[union-attr]
    gradient = bf16(torch.ones(4, 6).T @ fp16(x)) * 2  # each use rounds its own, as of a parameter
    expected.backward(gradient)
    assert torch.equal(model.parametrizations.weight.original.grad, layer.parametrizations.weight.original.grad)


def test_a_parametrised_buffer_is_no_weight() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    module, x = Scaled(), randn(4, 6, seed=1)
    scale = module.scale.clone()
    parametrize.register_parametrization(module, "scale", Half())
    assert torch.equal(quantize(module, POLICY)(x), fp16(fp16(x) * fp16(scale / 2)))


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_use_computed_weights(kind: type[nn.RNNBase], norm: Callable[..., nn.Module]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return norm(kind(3, 4), "weight_hh_l0")

    layer, plain = make(), make()
    x = randn(5, 2, 3)
    for hook in plain._forward_pre_hooks.values():
        hook(plain, ())
    rounded = kind(3, 4)  # the same weights, rounded, in one that computes nothing
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            parameter.copy_(bf16(getattr(plain, name)))
    model = quantize(layer, POLICY, inplace=True)
    found, _ = model(x)
    expected, _ = quantize(rounded, POLICY)(x)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_attention_uses_the_computed_weight_of_its_last_layer() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    parametrizations.weight_norm(attention.out_proj)
    x, model = randn(2, 5, 8), quantize(attention, "fp16")
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        for name in ("in_proj_weight", "in_proj_bias"):
            getattr(plain, name).copy_(getattr(attention, name))
        plain.out_proj.bias.copy_(attention.out_proj.bias)
        plain.out_proj.weight.copy_(attention.out_proj.weight)
    assert torch.equal(model(x, x, x)[0], quantize(plain, "fp16")(x, x, x)[0])


def test_the_role_and_no_activation_is_recorded() -> None:
    model = quantize(nn.Sequential(layer_with(parametrizations.spectral_norm)), POLICY)
    with fpsim.record(model) as recording:
        model(randn(4, 6)).sum().backward()
    assert {(row["site"], row["role"]) for row in recording.rows()} == {
        ("0:activation", "activation"),
        ("0:weight", "weight"),
        ("0:weight_1", "weight"),
        ("0:weight", "weight_grad"),
        ("0:weight_1", "weight_grad"),
        ("0:linear", "activation"),
        ("0:linear", "error"),
    }


def test_what_computes_weights_is_shown_in_float32() -> None:
    rows = {
        row.module: row for row in summary(quantize(nn.Sequential(layer_with(parametrizations.weight_norm)), "fp16"))
    }
    assert rows["0"].weight == "fp16 nearest_even"
    assert rows["0.parametrizations.weight"].activation == "float32"
    assert rows["0.parametrizations.weight.0"].weight == "float32"


@pytest.mark.parametrize("norm", NEW + OLD, ids=lambda norm: norm.__name__)
def test_master_values_of_a_computed_weight_are_not_rounded(norm: Callable[[nn.Module], nn.Module]) -> None:
    layer = layer_with(norm)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    quantize(layer, POLICY, inplace=True)
    round_parameters_(layer)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, bf16(before[name]) if name == "bias" else before[name])


@pytest.mark.parametrize("norm", NEW + OLD, ids=lambda norm: norm.__name__)
def test_a_dequantised_model_is_as_before(norm: Callable[[nn.Module], nn.Module]) -> None:
    layer, plain, x = layer_with(norm), layer_with(norm), randn(4, 6)
    fpsim.dequantize(quantize(layer, POLICY, inplace=True), inplace=True)
    assert torch.equal(layer(x), plain(x))
    with fpsim.emulate("fp16"):  # nothing of it is left: outside of a model, its norm counts as activations
        assert torch.equal(layer(x), plain(x))


def test_norms_are_removed_as_ever() -> None:
    layer, plain = layer_with(old_weight_norm), layer_with(old_weight_norm)
    quantize(layer, POLICY, inplace=True)
    nn.utils.remove_weight_norm(layer)
    nn.utils.remove_weight_norm(plain)
    assert torch.equal(layer.weight, plain.weight)
    new = quantize(layer_with(parametrizations.weight_norm), POLICY)
    parametrize.remove_parametrizations(new, "weight")
    assert type(new) is nn.Linear
    x = randn(4, 6)
    assert torch.equal(new(x), fp16(F.linear(fp16(x), bf16(new.weight), bf16(new.bias))))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, symmetric], ids=lambda norm: norm.__name__)
def test_a_compiled_model_computes_the_same(norm: Callable[[nn.Module], nn.Module]) -> None:
    model, x = quantize(nn.Sequential(layer_with(norm), nn.ReLU()), POLICY), randn(4, 6)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    out, expected = compiled(x), model(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


# Models as they are written


def with_plain_weights(model: nn.Module) -> nn.Module:
    """The model with each computed weight in place as a parameter, computed in float32."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, name)
    return model


SPEECH = {
    "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn"])
@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert"])
def test_a_speech_model_with_weight_norm_computes_as_with_the_weight_itself(name: str, fmt: str) -> None:
    def make() -> nn.Module:  # again, for torch's copies share the class that a parametrization changes
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SPEECH)
        return getattr(transformers, f"{name}Model")(config).eval()  # type: ignore[no-any-return]

    assert any(parametrize.is_parametrized(m) for m in make().modules())
    sound = randn(2, 400)
    model, twin = quantize(make(), fmt), quantize(with_plain_weights(make()), fmt)
    found, expected = model(sound).last_hidden_state, twin(sound).last_hidden_state
    assert torch.equal(found, expected)
    assert torch.equal(found, fpsim.round_to(found, fmt))
    found.square().sum().backward()
    expected.square().sum().backward()
    theirs = dict(twin.named_parameters())
    checked = 0
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter_name in theirs:
            assert torch.equal(parameter.grad, theirs[parameter_name].grad), parameter_name
            checked += 1
    assert checked > 20


class Discriminator(nn.Module):
    """As in Miyato et al. 2018, table 3: spectral norm on every layer; small."""

    def __init__(self) -> None:
        super().__init__()
        norm = parametrizations.spectral_norm
        self.layers = nn.Sequential(
            norm(nn.Conv2d(3, 8, 3, 1, 1)), nn.LeakyReLU(0.1),
            norm(nn.Conv2d(8, 8, 4, 2, 1)), nn.LeakyReLU(0.1),
            norm(nn.Conv2d(8, 16, 3, 1, 1)), nn.LeakyReLU(0.1),
        )  # fmt: skip
        self.head = norm(nn.Linear(16 * 8 * 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))  # type: ignore[no-any-return]


def test_a_discriminator_trains_and_its_singular_vectors_stay_float32() -> None:
    torch.manual_seed(0)
    plain = Discriminator()
    model = quantize(plain, "e5m2")
    real, fake = randn(4, 3, 16, 16), randn(4, 3, 16, 16, seed=1)
    model(real)
    plain(real)
    # the same master weights: one power iteration in float32 gives the same vectors, bit for bit
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.9))
    losses = []
    for _ in range(20):
        loss = F.relu(1 - model(real)).mean() + F.relu(1 + model(fake)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for module in model.modules():
        if parametrize.is_parametrized(module):
            sigma = torch.linalg.matrix_norm(module.weight.detach().flatten(1), 2)
            assert 0.5 < sigma < 1.5  # one power iteration a step follows the largest singular value roughly
