"""The layers whose product the loss reads first, in models of this file and of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpsim
from fpsim import last_layers

IDS = torch.arange(14).reshape(2, 7)


class Heads(nn.Module):
    """A detector's: two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(x).relu()
        return self.classes(found), self.boxes(found)


class Tied(nn.Module):
    """A language model whose own matmul multiplies by the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.embedding(ids)) @ self.embedding.weight.T


class Towers(nn.Module):
    """As CLIP: the product of two activations has no weight, so the projections before it are last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.text, self.image = nn.Embedding(16, 8), nn.Linear(8, 4), nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        image = self.image(torch.ones(2, 12))
        return self.text(self.words(ids).mean(1)) @ image.T


def pruned() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.nn.utils.prune.random_unstructured(net[1], "weight", 0.5)
    return net


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.LayerNorm(8))


def of_images(output: Any) -> Tensor:
    return sum((x.square().mean() for x in output), torch.zeros(()))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "heads": (Heads, torch.ones(2, 3, 6, 6), ["classes", "boxes"]),
    "tied": (Tied, IDS, [""]),
    "towers": (Towers, IDS, ["image", "text"]),
    "pruned": (pruned, torch.ones(2, 8), ["1"]),
    "normalised": (normalised, torch.ones(2, 8), ["1"]),
    "recurrent": (lambda: nn.GRU(4, 5), torch.ones(3, 2, 4), [""]),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16), torch.ones(3, 2, 8), ["linear2"]),
}


@pytest.mark.parametrize("fmt", [None, "bf16", "mxfp8_e4m3"])
@pytest.mark.parametrize("name", CASES)
def test_the_last_layers_are_those_before_the_loss(name: str, fmt: str | None) -> None:
    make, x, expected = CASES[name]
    model = make() if fmt is None else fpsim.quantize(make(), fmt, inplace=True)
    words = str(model)

    def step() -> Tensor:
        output = model(x)
        loss = of_images(output if isinstance(output, tuple) else (output,))
        loss.backward()
        return loss

    assert last_layers(model, step) == expected
    assert str(model) == words
    assert all(p.grad is None for p in model.parameters())


def test_models_of_a_library_with_a_batch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=16,
    )  # fmt: skip
    assert last_layers(transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}) == ["lm_head"]
    net = nn.Sequential(nn.Linear(8, 4))
    assert last_layers(net, torch.ones(2, 8), loss=lambda out: F.mse_loss(out, torch.ones(2, 4))) == ["0"]


def test_a_policy_leaves_them_out() -> None:
    model = Heads()
    wide = dict.fromkeys(last_layers(model, torch.ones(2, 3, 6, 6), loss=of_images), "bf16")
    policy = fpsim.Policy(error="e2m1fn", overrides=wide)
    assert [str(policy.for_modules(model)[name].specs().error.fmt) for name in ("body", "boxes")] == ["e2m1fn", "bf16"]


def test_what_leads_to_no_product_is_refused_in_words() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"Got 1\.0, of type float, from the step\. Expected: the loss"):
        last_layers(net, lambda: 1.0)
    with pytest.raises(ValueError, match="No product with a parameter of Sequential leads to what the step returned"):
        last_layers(net, lambda: torch.ones(2).sum())


NAMED = fpsim.Policy(error="e2m1fn", rounding="nearest_even")


@pytest.mark.parametrize(
    "policy",
    ["mxfp4", "nvfp4", "e2m1fn per tensor fp32", NAMED, fpsim.Policy(products=fpsim.Products.by_operand(dy="mxfp4"))],
    ids=str,
)
def test_a_last_layer_in_four_bits_to_nearest_is_warned_of_with_its_name(policy: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=r"The gradient of 2 is rounded to nearest in .*overrides=\{'2': 'bf16'\}"):
        fpsim.quantize(model, policy)


@pytest.mark.parametrize(
    "policy",
    [
        "mxfp8_e4m3",
        "mxfp6_e2m3",
        "recipe:nvfp4",  # stochastic, and without the head
        "recipe:mxfp4_sr",
        fpsim.Policy(error="e2m1fn"),  # nobody named a rounding: it is stochastic under adaptive scaling
        fpsim.Policy(error="e2m1fn", rounding="stochastic"),
        fpsim.Policy(error="e2m1fn", rounding="nearest_even", overrides={"2": "bf16"}),
        fpsim.Policy(weight="e2m1fn", activation="e2m1fn", rounding="nearest_even"),
    ],
    ids=str,
)
def test_a_wider_or_stochastic_last_layer_is_not_warned_of(policy: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fpsim.quantize(model, policy)
        fpsim.quantize(model[2], "mxfp4")  # a single layer is not a model with a head


def test_a_recording_is_not_told_of_the_step_that_finds_the_last_layers() -> None:
    model = fpsim.quantize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "fp16")
    with fpsim.record(model) as recording:
        assert fpsim.last_layers(model, lambda: model(torch.ones(1, 2)).sum()) == ["1"]
    assert recording.rows() == []
