"""Small models in which something can be planted: four of our own, two of transformers, and a residual network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fpsim

WIDTH, CLASSES = 16, 8


class Point(nn.Module):
    """Where an operation is planted; without one it is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.plant: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.plant is None else self.plant(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fill = -torch.inf

    def forward(self, x: Tensor, seen: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
            cache.update(k=k, v=v)
        logits = q @ k.mT
        logits = (logits / WIDTH**0.5).masked_fill(~seen, self.fill)
        return logits.softmax(-1) @ v


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.point = Point()

    def forward(self, x: Tensor, seen: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), seen, cache)
        return self.point(x + self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scales", torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = (self.tokens(ids) + self.places(torch.arange(n))) * self.scales
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


class Decoder(Gpt):
    """The last token alone, with the keys and values of those before it in a cache."""

    def forward(self, ids: Tensor) -> Tensor:
        n, caches = ids.shape[1], [{}, {}]  # type: ignore[var-annotated]
        outputs = []
        for first, last in ((0, n - 1), (n - 1, n)):
            x = (self.tokens(ids[:, first:last]) + self.places(torch.arange(first, last))) * self.scales
            seen = torch.ones(n, n, dtype=torch.bool).tril()[first:last, :last]
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, seen, cache)
            outputs.append(self.head(self.norm(x)))
        return torch.cat(outputs, 1)


class Encoder(nn.Module):
    """Reads features, some of which are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scales", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        seen = (torch.arange(x.shape[1]) < x.shape[1] - 1).expand(x.shape[1], -1)
        x = self.enter(x) * self.scales
        for block in self.blocks:
            x = block(x, seen)
        return self.head(x)


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.point = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), Point()
        self.up, self.down = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.bn(self.conv(x)))
        return self.point(x + self.down(F.gelu(self.up(x))))


class Pictures(nn.Module):
    """Reads pictures: a stem, two blocks and a head."""

    def __init__(self, stem: nn.Module, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scales", torch.ones(WIDTH, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scales
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1))).unsqueeze(1)


class Conv(Pictures):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, WIDTH, 3, padding=1), ConvBlock(), ConvBlock())


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


class Headed(nn.Module):
    """A body, whose layers are called blocks here, and a head."""

    def __init__(self, body: nn.Module, blocks: nn.ModuleList, kind: type) -> None:
        super().__init__()
        for block in blocks:
            block.__class__ = kind
            block.point = Point()
        self.blocks, self.body, self.head = blocks, body, nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scales", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """x: the numbers of words, or what stands in the place of their embeddings."""
        out = self.body(inputs_embeds=x) if x.is_floating_point() else self.body(x)
        return self.head(out.last_hidden_state * self.scales)


def bert() -> nn.Module:
    body = BertModel(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), False)
    return Headed(body, body.encoder.layer, PointedBert)


def llama() -> nn.Module:
    body = LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=1))
    nn.init.normal_(body.embed_tokens.weight)  # as of a trained one: nothing normalises what the blocks add up
    return Headed(body, body.layers, PointedLlama)


class Basic(nn.Module):
    """Two convolutions with batch normalisations around which the input goes, as in ResNet-18."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(WIDTH, WIDTH, 3, stride, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.bn2 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.down = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1, stride, bias=False), nn.BatchNorm2d(WIDTH))
        self.point = Point()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.point(F.relu(y + self.down(x)))


class ResNet(Pictures):
    def __init__(self) -> None:
        stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
        super().__init__(stem, Basic(1), Basic(2))


LIBRARY: dict[str, Callable[[], nn.Module]] = {"bert": bert, "llama": llama, "resnet": ResNet}

# Where a layer, the one that reads it, and the normalisation after it lie in the second block
PARTS = {
    "bert": {"up": "blocks.1.intermediate.dense", "down": "blocks.1.output.dense"},
    "llama": {"up": "blocks.1.mlp.up_proj", "down": "blocks.1.mlp.down_proj"},
    "resnet": {"up": "blocks.1.conv1", "down": "blocks.1.conv2", "conv": "blocks.1.conv1", "bn": "blocks.1.bn1"},
}


def llama_of(width: int, layers: int = 2, heads: int = 2, words: int = 64, **others: Any) -> LlamaForCausalLM:
    """A model of language from seed 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=2 * width, **others))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": Gpt, "conv": Conv, "encoder": Encoder, "decoder": Decoder}
OWN_PARTS = {name: f"blocks.1.{name}" for name in ("up", "down", "conv", "bn")}
NATIVE = {"half": torch.float16, "bfloat16": torch.bfloat16}


def parts_of(model: str) -> dict[str, str]:
    """The names of the modules that causes are planted in."""
    return PARTS.get(model, OWN_PARTS)


class Planted:
    """A model in a format, its batch, and its step. plant: changes it before it is put into the format.

    Afterwards `late` changes the model, or the batch, as it is in the format.
    """

    def __init__(self, model: str, fmt: str, plant: Callable[[Planted], None] | None = None) -> None:
        torch.manual_seed(0)
        self.name, self.fmt = model, fmt
        self.model: Any = (MODELS | LIBRARY)[model]()
        generator = torch.Generator().manual_seed(1)
        if model in ("gpt", "decoder", "bert", "llama"):
            self.x = torch.randint(0, CLASSES, (2, 8), generator=generator)
        elif model == "encoder":
            self.x = torch.randn(2, 8, WIDTH, generator=generator)
        else:
            self.x = torch.randn(4, 3, 6, 6, generator=generator)
        n = 1 if model in ("conv", "resnet") else 8
        self.y = torch.randint(0, CLASSES, (len(self.x), n), generator=generator)
        self.loss: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(
            out.float().flatten(0, 1), y.flatten()
        )
        self.policy: Any = fmt
        self.optimizer: Any = None
        self.scaler: Any = None
        self.scale = 1.0
        self.late: Callable[[Planted], None] = lambda planted: None
        self.clears = True
        self.passes = 1  # forward and backward, in one step
        self.after_backward: Callable[[Planted], None] = lambda planted: None
        if plant is not None:
            plant(self)
        if fmt in NATIVE:
            self.model = self.model.to(NATIVE[fmt])
            self.x = self.x if not self.x.is_floating_point() else self.x.to(NATIVE[fmt])
        elif fmt not in ("float32", "autocast"):
            self.model = fpsim.quantize(self.model, self.policy)
        self.late(self)

    def output(self, model: nn.Module | None = None) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.fmt == "autocast"):
            return (model or self.model)(self.x)  # type: ignore[no-any-return]

    def step(self) -> None:
        if self.clears:
            self.model.zero_grad()
        for _ in range(self.passes):
            loss = self.loss(self.output(), self.y) * self.scale
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            loss.backward()
        self.after_backward(self)

    def why(self) -> fpsim.Why:
        return fpsim.why(self.model, self.step, self.optimizer, self.scaler)

    @property
    def point(self) -> Point:
        return self.model.blocks[1].point  # type: ignore[no-any-return]

    def part(self, name: str) -> Any:
        """A module of the second block, by what it does."""
        return self.model.get_submodule(parts_of(self.name)[name])

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.model)
