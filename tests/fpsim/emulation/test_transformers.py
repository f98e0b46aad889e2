"""Models of transformers, tiny and random: forward, backward, and no operation that escapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpsim
from fpsim.emulation.scope import active

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(config: type, **options: Any) -> Any:
    return config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **options
    )


def gpt2(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, attn_implementation=attention)
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS}


def llama(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = small(transformers.LlamaConfig, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def bert(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = small(transformers.BertConfig, attn_implementation=attention)
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": IDS, "labels": IDS, "attention_mask": mask}


def vit(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        num_labels=3, attn_implementation=attention,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": IMAGE, "labels": torch.tensor([0, 2])}


def resnet(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": IMAGE, "labels": torch.tensor([0, 2])}


MODELS = {
    f"{make.__name__}-{attention}": (make, attention)
    for make in (gpt2, llama, bert, vit, resnet)
    for attention in (("eager", "sdpa") if make is not resnet else ("eager",))
}


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_finite_and_in_the_format(name: str, fmt: str) -> None:
    make, attention = MODELS[name]
    plain, inputs = make(attention)
    model = fpsim.quantize(plain, fmt)
    out = model(**inputs)
    out.loss.backward()
    assert torch.equal(out.logits, fpsim.round_to(out.logits, fmt))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 5
    for parameter, gradient in gradients.items():
        assert gradient.isfinite().all(), parameter
        assert torch.equal(gradient, fpsim.round_to(gradient, fmt)), parameter
    if fmt != "e5m2":
        reference = plain(**inputs)
        # bf16 keeps 8 significant bits; the loss of a few dozen operations stays within a few per cent
        assert abs(float(out.loss) - float(reference.loss)) < 0.05 * float(reference.loss)


# What is not a value of the format when the forward pass is over, as module class and ATen operation, and why that is
# right. Everything else is.
STATISTICS = "the statistics that a normalisation saves for its backward stay float32"
ISLAND = "code that asks for float32"
LOSS = "inside cross_entropy, a loss that is rounded at its border"
OUTSIDE = "a parameter or input before it is rounded, under another name"
MASK = "an additive mask, which every format lets pass"
ANYWHERE = {
    "detach": OUTSIDE,
    "scalar_tensor": MASK,
    "_log_softmax": LOSS,
    "nll_loss_forward": LOSS,
    "_scaled_dot_product_flash_attention_for_cpu": "its second result, log-sum-exp, is saved for its backward",
}
IN_MODULES = {
    "LayerNorm.native_layer_norm": STATISTICS,
    "BatchNorm2d.native_batch_norm": STATISTICS,
    **{f"LlamaRMSNorm.{op}": ISLAND for op in ("clone", "pow", "mean", "add", "rsqrt", "mul")},
    **{f"LlamaRotaryEmbedding.{op}": ISLAND for op in ("_to_copy", "clone", "bmm", "cat", "cos", "sin", "mul")},
    "LlamaAttention._softmax": ISLAND,
    "ViTAttention._softmax": ISLAND,
    **dict.fromkeys(("GPT2Model.where", "BertModel.where", "LlamaModel.where"), MASK),
    **{f"{name}.add": MASK for name in ("GPT2Attention", "LlamaAttention", "BertSelfAttention")},
}


class Outputs(TorchDispatchMode):
    """Keeps every floating result of every ATen operation, with the class of the module that ran it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.results: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        emulation = active.emulation
        module = self.model.get_submodule(emulation.scope.name) if emulation else None
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.results.append((f"{type(module).__name__}.{func.overloadpacket.__name__}", x))
        return out


@pytest.mark.parametrize("name", MODELS)
def test_no_operation_escapes_but_those_listed_with_their_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, attention = MODELS[name]
    plain, inputs = make(attention)
    model = fpsim.quantize(plain, "e5m2").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # its mask is not a number of the computation
    # the watcher must not change the way: a dispatch mode would mean the traced one
    monkeypatch.setattr(fpsim.torch_modes, "is_watched", lambda: False)
    with Outputs(model) as outputs:
        model(**inputs)
    assert len(outputs.results) > 50
    escaped = {op for op, x in outputs.results if not torch.equal(x, fpsim.round_to(x, "e5m2"))}
    assert {op for op in escaped - set(IN_MODULES) if op.split(".")[1] not in ANYWHERE} == set()
