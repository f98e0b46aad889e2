"""The models of benchmarks/native.py: small, with random weights, and an input and a target of each.

None of them is among those with which scaling of layers in real float16 was designed (GPT-2, T5, Llama, Mixtral, Mamba,
Whisper, wav2vec2, SegFormer, CLIP, ViT, ConvNeXt, BERT, Swin, BART).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from parity_models import Subject
from torch import Tensor, nn

__all__ = ["subjects"]

VOCABULARY = 128
TOKENS = 32
CLASSES = 10
WIDTH = 64
HEADS = 4
# what most configurations of transformers call these
SIZE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * TOKENS, "pad_token_id": 0, **SIZE}
IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES, **SIZE}


def subjects() -> Iterator[Subject]:
    """The models one by one."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (4, TOKENS))
    text, following = {"input_ids": ids}, ids.roll(-1, 1)
    for name, (family, words) in DECODERS.items():
        yield Subject(name, _made(family, "ForCausalLM", TEXT | words), text, following)
    for name, (family, words) in ENCODERS.items():
        yield Subject(name, _made(family, "ForMaskedLM", TEXT | words), text, ids)
    yield Subject("Marian", _translator(), {**text, "decoder_input_ids": ids.roll(1, 1)}, ids)
    images, classes = {"pixel_values": torch.randn(4, 3, 32, 32)}, torch.arange(4)
    for name, (family, words) in IMAGES.items():
        yield Subject(name, _made(family, "ForImageClassification", words), images, classes)
    sound = {"input_values": torch.randn(2, 1600)}
    yield Subject("HuBERT", _made("Hubert", "ForSequenceClassification", SOUND), sound, classes[:2])
    yield from _of_torch(ids, images["pixel_values"], classes)


GROUPED = {"num_key_value_heads": 2}
Families = dict[str, tuple[str, dict[str, Any]]]
DECODERS: Families = {
    "Mistral": ("Mistral", GROUPED),
    "Qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "Qwen2-MoE": (
        "Qwen2Moe",
        {**GROUPED, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    ),
    "Gemma 2": ("Gemma2", {**GROUPED, "head_dim": 16}),
    "OLMo 2": ("Olmo2", GROUPED),
    "GPT-NeoX": ("GPTNeoX", {}),
    "OPT": ("OPT", {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "BLOOM": ("Bloom", {"n_layer": 3, "n_head": HEADS}),
}
ENCODERS: Families = {
    "RoBERTa": ("Roberta", {}),
    "DeBERTa-v2": ("DebertaV2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "ELECTRA": ("Electra", {"embedding_size": WIDTH // 2}),
    "ALBERT": ("Albert", {"embedding_size": WIDTH // 2}),
    "ModernBERT": ("ModernBert", {}),
    "FNet": ("FNet", {}),
}
TRANSLATION = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2 * TOKENS,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "d_model": WIDTH,
    **{f"{end}_layers": 2 for end in ("encoder", "decoder")},
    **{f"{end}_attention_heads": HEADS for end in ("encoder", "decoder")},
    **{f"{end}_ffn_dim": 2 * WIDTH for end in ("encoder", "decoder")},
}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
IMAGES: Families = {
    "DINOv2": ("Dinov2", {**IMAGE, "mlp_ratio": 2}),
    "BEiT": ("Beit", {**IMAGE, "use_relative_position_bias": True, "layer_scale_init_value": 1e-5}),
    "PoolFormer": (
        "PoolFormer",
        {**STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]},
    ),
    "RegNet": ("RegNet", {**STAGES, "embedding_size": 8, "groups_width": 8}),
}
SOUND: dict[str, Any] = {
    **SIZE,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [10, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_labels": CLASSES,
    "classifier_proj_size": 32,
}


def _made(family: str, head: str, words: dict[str, Any]) -> nn.Module:
    return getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**words))  # type: ignore[no-any-return]


def _translator() -> nn.Module:
    return transformers.MarianMTModel(transformers.MarianConfig(**TRANSLATION))


class Translator(nn.Module):
    """torch's own Transformer, from tokens to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.both = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, batch_first=True)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        return {"logits": self.head(self.both(x, x.roll(1, 1)))}


class Recurrent(nn.Module):
    """A language model of LSTM cells: torch's layer has no float16 on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        state, found = None, []
        for x in self.tokens(input_ids).unbind(1):
            state = self.cell(x, state)
            found.append(state[0])
        return {"logits": self.head(torch.stack(found, 1))}


class Convolutional(nn.Module):
    """A network with batch norm whose blocks are as those of VGG."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 16), (16, 32)):
            layers += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(512, CLASSES)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.features(pixel_values).flatten(1))}


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, CLASSES)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mixes = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)) for size in (16, WIDTH) * 2
        )

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        for i, (norm, mix) in enumerate(zip(self.norms, self.mixes, strict=True)):
            x = x + (mix(norm(x)) if i % 2 else mix(norm(x).transpose(1, 2)).transpose(1, 2))
        return {"logits": self.head(x.mean(1))}


def _of_torch(ids: Tensor, images: Tensor, classes: Tensor) -> Iterator[Subject]:
    text, pixels = {"input_ids": ids}, {"pixel_values": images}
    yield Subject("nn.Transformer", Translator(), text, ids.roll(-1, 1))
    yield Subject("nn.LSTMCell", Recurrent(), text, ids.roll(-1, 1))
    yield Subject("VGG with batch norm", Convolutional(), pixels, classes)
    yield Subject("MLP-Mixer", Mixer(), pixels, classes)
