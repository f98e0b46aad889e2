"""The models of benchmarks/parity.py: small, with random weights, and an input and a target of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

__all__ = ["Subject", "subjects"]

VOCABULARY = 128


class Subject(NamedTuple):
    """A model with what it is given.

    inputs: its arguments by name.
    target: what it is trained to give: classes in int64, or numbers of the output's shape in float32.
    """

    name: str
    model: nn.Module
    inputs: dict[str, Tensor]
    target: Tensor


def subjects(tokens: int) -> Iterator[Subject | str]:
    """The models one by one, with two sequences of `tokens` where they take tokens; the name of one that is missing."""
    torch.manual_seed(0)
    yield from _of_text(tokens)
    yield from _of_images()
    yield _unet() or "UNet (diffusers)"


def _of_text(tokens: int) -> Iterator[Subject]:
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    text: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    text |= {"vocab_size": VOCABULARY, "max_position_embeddings": tokens, **eager}
    ids = torch.randint(2, VOCABULARY, (2, tokens))
    given, following = {"input_ids": ids}, ids.roll(-1, 1)
    llama = transformers.LlamaConfig(num_key_value_heads=2, **text)
    yield Subject("Llama", transformers.LlamaForCausalLM(llama), given, following)
    size = {"n_positions": tokens, "n_embd": 64, "n_layer": 3, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(vocab_size=VOCABULARY, **size, **ends, **eager)
    yield Subject("GPT-2", transformers.GPT2LMHeadModel(gpt2), given, following)
    bert = transformers.BertConfig(**text)
    yield Subject("BERT", transformers.BertForMaskedLM(bert), given, following)
    size = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    t5 = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **size)
    given, following = {**given, "decoder_input_ids": ids[:, :64]}, following[:, :64]
    yield Subject("T5", transformers.T5ForConditionalGeneration(t5), given, following)


def _of_images() -> Iterator[Subject]:
    given, classes = {"pixel_values": torch.randn(2, 3, 32, 32)}, torch.tensor([3, 7])
    size: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    vit = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=10, attn_implementation="eager", **size)
    yield Subject("ViT", transformers.ViTForImageClassification(vit), given, classes)
    size = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    resnet = transformers.ResNetConfig(num_labels=10, layer_type="basic", **size)
    yield Subject("ResNet", transformers.ResNetForImageClassification(resnet), given, classes)


def _unet() -> Subject | None:
    """A diffusion UNet that takes text; None where diffusers is not installed."""
    try:
        from diffusers import UNet2DConditionModel
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        return None
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([7, 742])}
    return Subject("UNet", model, {**given, "encoder_hidden_states": torch.randn(2, 8, 32)}, torch.randn(2, 4, 8, 8))
