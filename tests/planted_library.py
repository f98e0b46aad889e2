"""Models of the transformers library and a residual network in which something can be planted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

WIDTH, CLASSES = 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": CLASSES,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
    "use_cache": False,
}


class Pointed:
    """A layer whose result goes through its `point`."""

    point: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.point(out) if isinstance(out, Tensor) else (self.point(out[0]), *out[1:])


class PointedBert(Pointed, BertLayer):  # type: ignore[misc]
    pass


class PointedLlama(Pointed, LlamaDecoderLayer):  # type: ignore[misc]
    pass


class Of(nn.Module):
    """A body, whose layers are called blocks here, and a head."""

    def __init__(self, body: nn.Module, blocks: nn.ModuleList, kind: type, point: type[nn.Module]) -> None:
        super().__init__()
        for block in blocks:
            block.__class__ = kind
            block.point = point()
        self.blocks, self.body, self.head = blocks, body, nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scales", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """x: the numbers of words, or what stands in the place of their embeddings."""
        out = self.body(inputs_embeds=x) if x.is_floating_point() else self.body(x)
        return self.head(out.last_hidden_state * self.scales)


def bert(point: type[nn.Module]) -> nn.Module:
    body = BertModel(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), False)
    return Of(body, body.encoder.layer, PointedBert, point)


def llama(point: type[nn.Module]) -> nn.Module:
    body = LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=1))
    nn.init.normal_(body.embed_tokens.weight)  # as of a trained one: nothing normalises what the blocks add up
    return Of(body, body.layers, PointedLlama, point)


class Basic(nn.Module):
    """Two convolutions with batch normalisations around which the input goes, as in ResNet-18."""

    def __init__(self, stride: int, point: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(WIDTH, WIDTH, 3, stride, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.bn2 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.down = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1, stride, bias=False), nn.BatchNorm2d(WIDTH))
        self.point = point()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.point(F.relu(y + self.down(x)))


class ResNet(nn.Module):
    def __init__(self, point: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.blocks = nn.ModuleList([Basic(1, point), Basic(2, point)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scales", torch.ones(WIDTH, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scales
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1))).unsqueeze(1)


LIBRARY = {"bert": bert, "llama": llama, "resnet": ResNet}

# Where a layer, the one that reads it, and the normalisation after it lie in the second block
PARTS = {
    "bert": {"up": "blocks.1.intermediate.dense", "down": "blocks.1.output.dense"},
    "llama": {"up": "blocks.1.mlp.up_proj", "down": "blocks.1.mlp.down_proj"},
    "resnet": {"up": "blocks.1.conv1", "down": "blocks.1.conv2", "conv": "blocks.1.conv1", "bn": "blocks.1.bn1"},
}
