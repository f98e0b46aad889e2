"""Twenty models of transformers of different architectures, tiny and random, with the inputs that each takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 48
PAD = 1
LENGTH = 10
IMAGE = 16

Inputs = dict[str, Tensor]


class Kind(NamedTuple):
    """An architecture.

    model: the class, by name in transformers.
    config: the class of its configuration.
    options: of the configuration.
    inputs: what makes its inputs, from where the padding stands: "left", "right", or "" for none.
    """

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[str], Inputs]

    @property
    def takes_padding(self) -> bool:
        return "attention_mask" in self.inputs("left")

    def make(self, seed: int = 7) -> nn.Module:
        """The same model each time, in training mode: its dropout is on."""
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = "eager"  # written out in Python: masks, softmax and all
        torch.manual_seed(seed)
        return getattr(transformers, self.model)(config).train()  # type: ignore[no-any-return]


def mask(side: str) -> Tensor:
    """Which of the tokens of two sequences are real. The second has four, the first all of them."""
    found = torch.ones(2, LENGTH, dtype=torch.long)
    if side:
        found[1] = 0
        found[1, slice(-4, None) if side == "left" else slice(4)] = 1
    return found


def tokens(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCABULARY, (2, LENGTH), generator=draw)
    return {"input_ids": ids.where(mask(side) > 0, PAD), "attention_mask": mask(side)}


def causal(side: str) -> Inputs:
    found = tokens(side)
    return {**found, "labels": found["input_ids"].where(found["attention_mask"] > 0, -100)}


def translated(side: str) -> Inputs:
    return {**tokens(side), "labels": causal("")["labels"][:, :6].contiguous()}


def image(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=draw), "labels": torch.tensor([0, 2])}


def image_and_text(side: str) -> Inputs:
    return {**tokens(side), "pixel_values": image(side)["pixel_values"], "return_loss": True}  # type: ignore[dict-item]


def sound(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    samples = torch.ones(2, 400, dtype=torch.long)
    if side:
        samples[1, slice(150) if side == "left" else slice(250, None)] = 0
    return {
        "input_values": torch.randn(2, 400, generator=draw) * samples,
        "attention_mask": samples,
        "labels": torch.tensor([[5, 6], [7, 8]]),
    }


_IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3}
_SIZE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT: dict[str, Any] = {**_IDS, **_SIZE, "intermediate_size": 24, "max_position_embeddings": 32}
_GROUPED: dict[str, Any] = {**_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2, "output_router_logits": False}
_VISION: dict[str, Any] = {**_SIZE, "intermediate_size": 24, "image_size": IMAGE, "patch_size": 8}

SPEECH: dict[str, Any] = {
    **_IDS,
    **_SIZE,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}

ZOO: dict[str, Kind] = {
    "gpt2": Kind(
        "GPT2LMHeadModel", "GPT2Config", {**_IDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}, causal
    ),
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", _GROUPED, causal),
    "mistral": Kind("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}, causal),
    "qwen2": Kind("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, causal),
    "gemma2": Kind("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 4, "sliding_window": 4}, causal),
    "phi": Kind("PhiForCausalLM", "PhiConfig", _TEXT, causal),
    "opt": Kind("OPTForCausalLM", "OPTConfig", {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}, causal),
    "gpt-neox": Kind("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT, causal),
    "bloom": Kind("BloomForCausalLM", "BloomConfig", {**_IDS, "hidden_size": 16, "n_layer": 2, "n_head": 2}, causal),
    "mixtral": Kind("MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, causal),
    "mamba": Kind(
        "MambaForCausalLM", "MambaConfig", {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, causal
    ),
    "bert": Kind("BertForMaskedLM", "BertConfig", _TEXT, causal),
    "roberta": Kind("RobertaForMaskedLM", "RobertaConfig", _TEXT, causal),
    "distilbert": Kind(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {**_IDS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32},
        causal,
    ),
    "electra": Kind("ElectraForMaskedLM", "ElectraConfig", {**_TEXT, "embedding_size": 8}, causal),
    "t5": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_IDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        translated,
    ),
    "bart": Kind(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **_IDS,
            **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32},
            **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
            "decoder_start_token_id": 3,
        },
        translated,
    ),
    "vit": Kind("ViTForImageClassification", "ViTConfig", {**_VISION, "num_labels": 3}, image),
    "wav2vec2": Kind(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        SPEECH,
        sound,
    ),
    "clip": Kind(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 8},
        image_and_text,
    ),
}
