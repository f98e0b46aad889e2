"""What `mismatch` and `dump` refuse, each error with what came, what is expected and what to do; and hybrids of NaN."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from module_blocks import Function
from torch import Tensor, nn

import fpsim
from fpsim import Policy, Products, mismatch, quantize
from fpsim.insight.engines.recorded import batched_steps, mapped, placed

WORDS = 16
IDS = torch.randint(0, WORDS, (3, 8), generator=torch.Generator().manual_seed(0))
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


class Net(nn.Module):
    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.first, self.second = Function(first), Function(second)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(self.embed(ids))))
        return logits


def net() -> nn.Module:
    return Net(lambda x: x, lambda x: x)


# Numbers that are not finite


def test_a_hybrid_of_two_engines_that_is_nan_is_told_as_not_finite() -> None:
    """a multiplies by 2**120 and divides again; b's second module squares, which a's first makes infinite."""
    a = Net(lambda x: x * 2.0**120, lambda x: x * 2.0**-120)
    b = Net(lambda x: x * 1.01, lambda x: x * x / x)
    found = mismatch(a, b, IDS)
    rows = {row["module"]: row for row in found}
    assert rows["first"]["put_back"] != rows["first"]["put_back"]  # b with a's first is NaN
    assert rows["second"]["added"] != rows["second"]["added"]  # and so is a with b's second
    assert all(rows[name][of] == rows[name][of] for name, of in (("first", "added"), ("second", "put_back")))
    lines = [line for line in str(found).splitlines() if line.startswith(("first ", "second "))]
    assert ["not finite" in line for line in lines] == [True, True]
    assert all(kl == kl for _, kl in found.halving) or "(KL not finite)" in str(found)


def test_a_module_that_one_engine_alone_has_in_training_mode_is_told() -> None:
    """All run in eval mode, in which a norm with the statistics of its batch is none."""
    a, b = net().eval(), net().eval()
    assert not mismatch(a, b, IDS).unlike
    b.second.train()  # type: ignore[operator]
    found = mismatch(a, b, IDS)
    assert found.unlike == {"second": "b has it in training mode, and all modules run in eval mode"}
    assert "second is not compared: b has it in training mode, and all modules run in eval mode." in str(found)
    assert [m.training for m in (a.second, b.second)] == [False, True]  # type: ignore[union-attr]
    assert not mismatch(net().train(), b.eval(), IDS).unlike  # a trainer may be in training mode as a whole


# What is refused


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (IDS + WORDS, rf"ids go from 16 to 31, and the embedding of a has {WORDS} rows.* from 0 to 15, as this model"),
        (IDS - 1, rf"ids go from -1 to 14, and the embedding of a has {WORDS} rows.* from 0 to 15, as this model"),
    ],
)
def test_ids_that_the_embedding_has_not_are_refused(ids: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mismatch(net(), quantize(net(), "bf16"), ids)


def test_an_index_error_of_the_models_own_stays_itself() -> None:
    def broken(x: Tensor) -> Tensor:
        raise IndexError("of the model's own")

    with pytest.raises(IndexError, match="of the model's own"):
        mismatch(net(), Net(broken, lambda x: x), IDS)


def test_ids_that_the_logits_have_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids go from 0 to 15, and the logits of a are of 8 tokens\. Expected"):
        mismatch(net(), quantize(net(), "bf16"), IDS, logits=lambda out: out[..., :8])


def test_ids_of_padding_are_any() -> None:
    class Clamped(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids.clamp(min=0))

    padded = IDS.clone()
    padded[:, 6:] = -100
    a = Clamped(lambda x: x, lambda x: x)
    found = mismatch(a, quantize(a, "bf16"), padded, mask=lambda ids: ids >= 0, attribution="none")
    assert found.figures is not None
    assert found.figures.by_sequence[:, 1].tolist() == [5, 5, 5]


@pytest.mark.parametrize("mask", ["abc", [["a"]], [[1], [1, 2]]])
def test_a_mask_that_is_none_is_refused(mask: Any) -> None:
    with pytest.raises(TypeError, match=r"The mask is .*\. Expected: a tensor \(batch, time\), True where"):
        mismatch(net(), quantize(net(), "bf16"), IDS, mask=lambda batch: mask)
    with pytest.raises(TypeError, match=r"mask is 'abc', which cannot be called\. Expected: a function"):
        mismatch(net(), quantize(net(), "bf16"), IDS, mask="abc")  # type: ignore[arg-type]


@pytest.mark.parametrize(("names", "side"), [({"heed": "head"}, "b"), ({"head": "haed"}, "a")])
def test_names_that_no_module_has_are_refused(names: dict[str, str], side: str) -> None:
    given = next(iter(names.items()))[side == "a"]
    with pytest.raises(ValueError, match=rf"names has '{given}', and no module of {side} begins with it\. Expected"):
        mismatch(net(), quantize(net(), "bf16"), IDS, names=names)


@pytest.mark.parametrize("key", ["heed", "*.qkv", "hea"])
def test_names_that_no_module_of_a_dump_has_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"names has .*, and no module of the dump fits it\. Expected: names, begin"):
        mapped(["embed", "head", "layers.0.qkv_proj"], ["embed", "lm_head"], {key: "lm_head"}, None)
    found, alone = mapped(["embed", "head", "a.qkv"], ["embed", "lm_head"], {"head": "lm_head", "*.qkv": "x"}, None)
    assert ([*found], alone) == (["embed", "lm_head"], ["a.qkv"])


def test_a_remedy_is_tried_once() -> None:
    head = Policy(products=Products(fprop=("e4m3fn", "e4m3fn")))
    found = mismatch(net(), quantize(net(), Policy(overrides={"head": head})), IDS)
    assert [name for name, _ in found.halving] == ["head"]
    assert [t.what for t in found.tried if "head" in t.what] == ["the head, head, in float32"]


def test_the_command_exits_with_2_where_something_raises(tmp_path: Path) -> None:
    (tmp_path / "pair.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))\n"
        "batch = torch.full((2, 5), 4)\n"
    )
    made = ["pair.py:make", "pair.py:make", "--batch", "pair.py:batch"]
    found = subprocess.run(
        [sys.executable, "-m", "fpsim", "mismatch", *made], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "ValueError: The ids go from 4 to 4, and the embedding of a has 4 rows." in found.stderr


# Dumps


def test_tensors_with_fewer_tokens_than_ids_are_those_of_the_last_and_known_to_be() -> None:
    steps = batched_steps([torch.arange(8).reshape(2, 4)])
    value = placed("head.out0", [(steps.steps[0], torch.tensor([[[1.0]], [[2.0]]]))], steps)
    assert value.is_short
    assert value.present is not None
    assert value.present.reshape(2, 4).tolist() == [[False] * 3 + [True]] * 2
    assert not placed("head.out0", [(steps.steps[0], torch.ones(2, 4, 1))], steps).is_short


def llama() -> Any:
    t = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": WORDS}
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_hidden_layers=1, bos_token_id=0, eos_token_id=0)).eval()


@needs_transformers
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 3}, r"Beam search moves sequences from row to row between calls, .*Expected: sampling"),
        ({"num_beams": 3, "use_cache": False}, r"A call with 9 tokens in a row begins with the 8 .*use_cache=True"),
        ({"use_cache": False}, r"A call with 9 tokens in a row begins with the 8 .*Expected: .*use_cache=True"),
        ({"prompt_lookup_num_tokens": 2}, r"Assisted decoding takes tokens back between calls, .*Expected: sampling"),
    ],
    ids=["beams", "beams without a cache", "no cache", "assisted"],
)
def test_a_generation_whose_calls_do_not_follow_one_another_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model, file = llama(), tmp_path / "rollout.safetensors"
    ids = IDS[:1] if "prompt_lookup_num_tokens" in options else IDS
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **options}
    with pytest.raises(ValueError, match=words):
        fpsim.dump(model, lambda: model.generate(ids, **given), file)
    assert not file.exists()


@needs_transformers
def test_a_cache_of_the_callers_own_is_left_as_it_was_and_short_tensors_are_told(tmp_path: Path) -> None:
    t = pytest.importorskip("transformers", reason="transformers is not installed")
    model, cache = llama(), t.DynamicCache()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    dump = fpsim.dump(model, lambda: model.generate(IDS, **options), tmp_path / "rollout.safetensors")
    assert not {"reorder_cache", "crop"} & {*vars(cache)}
    found = str(mismatch(model, dump))
    assert "Fewer tokens than ids are in " in found
    assert "they are taken to be the last of each call." in found
