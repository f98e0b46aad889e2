"""Native code in float16 and bfloat16 beside the emulation: how far is each from float32?

python benchmarks/parity.py [--tokens 1024] prints the table of docs/parity.md: for small models of transformers with
random weights, the relative error of the logits against float32, natively (`model.to(torch.bfloat16)`) and emulated
(`fpsim.quantize(model, "bf16")`), and the first module whose output differs between the two, with the largest
difference in units in the last place of its largest number. Needs pip install -e '.[compare]'.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fpsim

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY = 128


def models(tokens: int) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Small models with random weights, and an input of each."""
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    wide: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    text: dict[str, Any] = {**wide, "intermediate_size": 128, "vocab_size": VOCABULARY, **eager}
    ids = torch.randint(2, VOCABULARY, (2, tokens))
    image = torch.randn(2, 3, 32, 32)
    llama = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=tokens, **text)
    yield "Llama", transformers.LlamaForCausalLM(llama), {"input_ids": ids}
    gpt2 = transformers.GPT2Config(
        n_positions=tokens,
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        **eager,
    )
    yield "GPT-2", transformers.GPT2LMHeadModel(gpt2), {"input_ids": ids}
    bert = transformers.BertConfig(max_position_embeddings=tokens, **text)
    yield "BERT", transformers.BertForMaskedLM(bert), {"input_ids": ids}
    t5 = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    yield "T5", transformers.T5ForConditionalGeneration(t5), {"input_ids": ids, "decoder_input_ids": ids[:, :64]}
    vit = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=10, intermediate_size=128, **wide, **eager)
    yield "ViT", transformers.ViTForImageClassification(vit), {"pixel_values": image}
    resnet = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10, layer_type="basic"
    )
    yield "ResNet", transformers.ResNetForImageClassification(resnet), {"pixel_values": image}


def outputs_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the first tensor that each leaf module gives, in the order in which they ran."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if next(module.children(), None) is None:

            def keep(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                first = out[0] if isinstance(out, tuple) else out
                if isinstance(first, Tensor) and first.is_floating_point():
                    found.setdefault(name, first.float())

            handles.append(module.register_forward_hook(keep))
    logits = model(**inputs).logits.float()
    for handle in handles:
        handle.remove()
    return logits, found


def ulps(a: Tensor, b: Tensor, fmt: str) -> float:
    """The largest difference of two tensors, in units in the last place of their largest number."""
    exponent = math.frexp(float(torch.maximum(a.abs(), b.abs()).max()))[1] - 1
    return float((a - b).abs().max()) / 2.0 ** (exponent - fpsim.as_format(fmt).mantissa_bits)


@torch.no_grad()
def rows(tokens: int) -> Iterator[tuple[str, ...]]:
    torch.manual_seed(0)
    for name, model, inputs in models(tokens):
        model.eval()
        exact, _ = outputs_of(model, inputs)
        for fmt, dtype in NATIVE.items():
            cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
            native, of_native = outputs_of(copy.deepcopy(model).to(dtype), cast)
            emulated, of_emulated = outputs_of(fpsim.quantize(model, fmt), inputs)
            errors = [float((x - exact).norm() / exact.norm()) for x in (native, emulated)]
            differing = [k for k in of_native if not torch.equal(of_native[k], of_emulated[k])]
            where = (
                "none"
                if not differing
                else f"{differing[0]}, {ulps(of_native[differing[0]], of_emulated[differing[0]], fmt):.2g}"
            )
            yield name, fmt, f"{errors[0]:.5f}", f"{errors[1]:.5f}", f"{errors[1] / errors[0]:.2f}", where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text models (default 1024)")
    tokens = parser.parse_args().tokens
    transformers.logging.set_verbosity_error()
    print("| model | format | native | emulated | ratio | first module that differs, by how many ulps |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for row in rows(tokens):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
