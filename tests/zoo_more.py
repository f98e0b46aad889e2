"""Models of transformers that tests/zoo.py has not: decoders with caches of many kinds, encoders, both, images, sound.

Each is tiny and random. A row names the classes by what they share, and the options of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from zoo import (
    _GROUPED,
    _IDS,
    _SIZE,
    _TEXT,
    _VISION,
    LENGTH,
    SPEECH,
    Inputs,
    Kind,
    causal,
    image,
    sound,
    tokens,
    translated,
)

_EXPERTS: dict[str, Any] = {**_GROUPED, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {**_EXPERTS, "num_local_experts": 4}
_HEADS_OF_4: dict[str, Any] = {**_GROUPED, "head_dim": 4}
_LATENT: dict[str, Any] = {
    **_TEXT,
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}
_BOTH: dict[str, Any] = {
    **_IDS,
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
    "decoder_start_token_id": 3,
}
_LIKE_T5: dict[str, Any] = {
    **_IDS,
    **{"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
}
_LABELS: dict[str, Any] = {"num_labels": 3}
_STAGES: dict[str, Any] = {**_LABELS, "image_size": 32, "num_channels": 3}


def _unmasked(side: str) -> Inputs:
    return {name: x for name, x in causal("").items() if name != "attention_mask"}


def _large_image(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw), "labels": torch.tensor([0, 2])}


def _spectrum(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    return {"input_features": torch.randn(2, 8, 60, generator=draw), "labels": translated("")["labels"]}


def _frames(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    return {"input_features": torch.randn(2, 40, 8, generator=draw), "labels": translated("")["labels"]}


def _spectrogram(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    return {"input_values": torch.randn(2, 32, 16, generator=draw), "labels": torch.tensor([0, 2])}


def _series(side: str) -> Inputs:
    draw = torch.Generator().manual_seed(5)
    return {f"{time}_values": torch.randn(2, n, 2, generator=draw) for time, n in (("past", 16), ("future", 4))}


def _classified(side: str) -> Inputs:
    return {**tokens(side), "labels": torch.tensor([0, 2])}


def _decoder(name: str, options: dict[str, Any], config: str | None = None) -> Kind:
    return Kind(f"{name}ForCausalLM", f"{config or name}Config", options, causal)


def _masked(name: str, options: dict[str, Any]) -> Kind:
    return Kind(f"{name}ForMaskedLM", f"{name}Config", options, causal)


def _seq2seq(name: str, options: dict[str, Any], ending: str = "ForConditionalGeneration") -> Kind:
    return Kind(f"{name}{ending}", f"{name}Config", options, translated)


def _pictures(name: str, options: dict[str, Any], inputs: Callable[[str], Inputs] = _large_image) -> Kind:
    return Kind(f"{name}ForImageClassification", f"{name}Config", {**_LABELS, **options}, inputs)


DECODERS: dict[str, Kind] = {
    "olmo": _decoder("Olmo", {**_GROUPED, "clip_qkv": 0.5}),
    "olmo2": _decoder("Olmo2", _GROUPED),
    "olmoe": _decoder("Olmoe", _EXPERTS),
    "phi3": _decoder("Phi3", _GROUPED),
    "phimoe": _decoder("Phimoe", _LOCAL),
    "qwen3": _decoder("Qwen3", _HEADS_OF_4),
    "qwen3-moe": _decoder("Qwen3Moe", {**_HEADS_OF_4, **_EXPERTS, "decoder_sparse_step": 1}),
    "gemma": _decoder("Gemma", _HEADS_OF_4),
    "gemma3": _decoder("Gemma3", {**_HEADS_OF_4, "sliding_window": 4}, "Gemma3Text"),
    "cohere": _decoder("Cohere", {**_GROUPED, "use_qk_norm": True}),
    "cohere2": _decoder("Cohere2", {**_GROUPED, "sliding_window": 4}),
    "starcoder2": _decoder("Starcoder2", {**_GROUPED, "sliding_window": 4}),
    "stablelm": _decoder("StableLm", {**_GROUPED, "use_parallel_residual": True, "qk_layernorm": True}),
    "granite": _decoder("Granite", {**_GROUPED, "attention_multiplier": 0.3, "residual_multiplier": 0.2}),
    "granite-moe": _decoder("GraniteMoe", _LOCAL),
    "falcon-alibi": _decoder("Falcon", {**_TEXT, "alibi": True, "new_decoder_architecture": False}),
    "gptj": _decoder("GPTJ", {**_IDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}),
    "gpt-neo": _decoder(
        "GPTNeo",
        {
            **{**_IDS, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32},
            **{"window_size": 4, "attention_types": [[["global", "local"], 1]]},
        },
    ),
    "gpt-bigcode": _decoder("GPTBigCode", {**_IDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "mpt": _decoder("Mpt", {**_IDS, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32}),
    "persimmon": _decoder("Persimmon", _TEXT),
    "glm4": _decoder("Glm4", _HEADS_OF_4),
    "nemotron": _decoder("Nemotron", _GROUPED),
    "smollm3": _decoder("SmolLM3", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "diffllama": _decoder("DiffLlama", _GROUPED),
    "deepseek-v2": _decoder("DeepseekV2", {**_LATENT, "topk_method": "greedy"}),
    "deepseek-v3": _decoder("DeepseekV3", {**_LATENT, "num_key_value_heads": 2}),
    "gpt-oss": _decoder("GptOss", {**_HEADS_OF_4, **_LOCAL, "sliding_window": 4}),
    "mamba2": _decoder(
        "Mamba2",
        {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 8}
        | {"n_groups": 1, "chunk_size": 4},
    ),
    "falcon-mamba": _decoder("FalconMamba", {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "recurrent-gemma": _decoder(
        "RecurrentGemma",
        {**_GROUPED, "num_hidden_layers": 3, "head_dim": 4, "lru_width": 16, "attention_window_size": 4},
    ),
    "lfm2": _decoder("Lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 4}),
    "bitnet": _decoder("BitNet", _GROUPED),
    "biogpt": _decoder("BioGpt", _TEXT),
    "ctrl": Kind(
        "CTRLLMHeadModel",
        "CTRLConfig",
        {**_IDS, "n_positions": 32, "n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2},
        causal,
    ),
}

OTHERS: dict[str, Kind] = {
    "albert": _masked("Albert", {**_TEXT, "embedding_size": 8}),
    "deberta-v2": _masked(
        "DebertaV2", {**_TEXT, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
    ),
    "mpnet": _masked("MPNet", _TEXT),
    "convbert": _masked("ConvBert", {**_TEXT, "embedding_size": 16, "conv_kernel_size": 3}),
    "fnet": Kind("FNetForMaskedLM", "FNetConfig", _TEXT, _unmasked),
    "mobilebert": _masked(
        "MobileBert", {**_TEXT, "embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8}
    ),
    "roformer": _masked("RoFormer", {**_TEXT, "embedding_size": 16}),
    "nystromformer": Kind(
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        {**_TEXT, "num_landmarks": 2, "segment_means_seq_len": LENGTH, "conv_kernel_size": 3},
        _unmasked,
    ),
    "xlnet": Kind(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {**_IDS, **_LABELS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
        _classified,
    ),
    "esm": _masked("Esm", {**_TEXT, "mask_token_id": 4, "position_embedding_type": "rotary"}),
    "modernbert": _masked(
        "ModernBert", {**_TEXT, "cls_token_id": 2, "sep_token_id": 3, "global_attn_every_n_layers": 2}
    ),
    "mbart": _seq2seq("MBart", _BOTH),
    "pegasus": _seq2seq("Pegasus", _BOTH),
    "m2m-100": _seq2seq("M2M100", _BOTH),
    "prophetnet": _seq2seq(
        "ProphetNet",
        {
            **_IDS,
            "decoder_start_token_id": 3,
            "hidden_size": 16,
            "max_position_embeddings": 32,
            **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
            **{f"num_{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"num_{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        },
    ),
    "longt5": _seq2seq("LongT5", {**_LIKE_T5, "local_radius": 3, "encoder_attention_type": "local"}),
    "switch": _seq2seq(
        "SwitchTransformers",
        {
            **_LIKE_T5,
            "num_experts": 4,
            "expert_capacity": 8,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
        },
    ),
    "umt5": _seq2seq("UMT5", _LIKE_T5),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_BOTH,
            "num_mel_bins": 8,
            "max_source_positions": 30,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _spectrum,
    ),
    "speech-to-text": Kind(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {
            **_BOTH,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 40,
            "max_target_positions": 32,
        },
        _frames,
    ),
    "wavlm": Kind(
        "WavLMForCTC",
        "WavLMConfig",
        SPEECH,
        sound,
    ),
    "ast": Kind(
        "ASTForAudioClassification",
        "ASTConfig",
        {
            **_SIZE,
            **_LABELS,
            "intermediate_size": 24,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "max_length": 32,
            "num_mel_bins": 16,
        },
        _spectrogram,
    ),
    "beit": _pictures("Beit", {**_VISION, "use_relative_position_bias": True}, image),
    "deit": _pictures("DeiT", _VISION, image),
    "swin": _pictures(
        "Swin", {**_STAGES, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
    ),
    "convnextv2": _pictures("ConvNextV2", {**_STAGES, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "dinov2": _pictures("Dinov2", _VISION, image),
    "poolformer": _pictures("PoolFormer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "segformer": _pictures(
        "Segformer",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "hiera": _pictures(
        "Hiera",
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "masked_unit_size": [4, 4],
        },
    ),
    "patchtsmixer": Kind(
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        {
            "context_length": 16,
            "prediction_length": 4,
            "num_input_channels": 2,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 8,
            "num_layers": 2,
        },
        _series,
    ),
    "patchtst": Kind(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "context_length": 16,
            "prediction_length": 4,
            "num_input_channels": 2,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 8,
            "ffn_dim": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "loss": "mse",
        },
        _series,
    ),
}

MORE: dict[str, Kind] = {**DECODERS, **OTHERS}
