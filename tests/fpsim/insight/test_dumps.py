"""Dumps as a side of `mismatch`: of transformers' generate with a planted difference, of hooks, of msprobe."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fpsim import Dump, Policy, dump, mismatch, quantize
from fpsim.__main__ import main
from fpsim.insight.engines.recorded import flat_steps

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
WORDS, NEW = 64, 6
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
HOOKS: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/mismatch.md").read_text(), re.DOTALL)


def made(kind: str = "Llama", attention: str = "eager") -> Any:
    """A tiny model of transformers whose logits are not all alike."""
    torch.manual_seed(0)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_hidden_layers=2, vocab_size=WORDS, **more)
    config._attn_implementation = attention
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.fixture
def prompts() -> Tensor:
    return torch.randint(1, WORDS, (3, 5), generator=torch.Generator().manual_seed(1))


def generated(model: Any, prompts: Tensor, mask: Tensor | None = None) -> Callable[[], Any]:
    kept = torch.ones_like(prompts) if mask is None else mask
    return lambda: model.generate(prompts, attention_mask=kept, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


# Planted differences


def head_in_bfloat16(model: Any) -> Any:
    """Without a float32 head: the trainer keeps one."""
    return in_bfloat16(model, model.lm_head)


def in_bfloat16(model: Any, module: nn.Module) -> Any:
    def wide(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    module.bfloat16()
    module.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    module.register_forward_hook(lambda m, a, out: tuple(map(wide, out)) if isinstance(out, tuple) else wide(out))
    return model


def with_epsilon(model: Any) -> Any:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3
    return model


def cache_in_fp8(model: Any) -> Any:
    return quantize(model, Policy(cache="e4m3fn"))


PLANTED = [
    (head_in_bfloat16, "lm_head", "rounding point", "bfloat16"),
    (with_epsilon, "model.layers.1.post_attention_layernorm", "formula", "an epsilon of 0.001"),
    (cache_in_fp8, "model.layers.0.self_attn", "cache or state", "keys and values in E4M3"),
]


@tiers.parametrize("attention", ["eager", "sdpa"], keep={"sdpa"})
@pytest.mark.parametrize(("plant", "place", "kind", "words"), PLANTED, ids=[p[0].__name__ for p in PLANTED])
def test_a_planted_difference_is_named_from_a_dump_of_generate(
    plant: Any, place: str, kind: str, words: str, attention: str, prompts: Tensor, tmp_path: Path
) -> None:
    engine = plant(made("Llama", attention))
    rollout = dump(engine, generated(engine, prompts), tmp_path / "rollout.safetensors")
    found = mismatch(made(), rollout)
    assert (found[0]["module"], found[0]["kind"]) == (place, kind)
    assert f"{words} in the model" in found[0]["detail"]
    assert {row["module"] for row in found} <= {place, "model.layers.1.self_attn"}  # a cache is of every layer
    # the remedy, in the places that it explains, leaves no more than sums in another order do
    assert found.tried[0].what.startswith(words)
    assert found.figures is not None
    assert found.floor is not None
    assert found.tried[0].mean_dlogp <= max(2 * found.floor.mean_dlogp, 1e-3 * found.figures.mean_dlogp)
    if len(found) == 1:
        assert found[0]["put_back"] == pytest.approx(1.0, abs=1e-3)
        assert found[0]["added"] == pytest.approx(1.0, abs=1e-2)  # a KL of 1e-6 nats from float32 logits


@tiers.parametrize("kind", ["Llama", "Mixtral"], keep={"Mixtral"})
@tiers.parametrize("attention", ["eager", "sdpa"], keep={"eager"})
def test_no_module_is_named_where_only_calls_and_kernels_differ(
    kind: str, attention: str, prompts: Tensor, tmp_path: Path
) -> None:
    engine = made(kind, attention)
    found = mismatch(made(kind), dump(engine, generated(engine, prompts), tmp_path / "rollout.safetensors"))
    assert not found
    assert "no module is named" in str(found)


def test_the_figures_are_those_of_the_logits_of_generate(prompts: Tensor, tmp_path: Path) -> None:
    """The oracle runs neither a dump nor mismatch: generate's own logits, and a forward pass over its sequences."""
    engine, model = with_epsilon(made()), made()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out = engine.generate(prompts, **options, output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        own = model(out.sequences).logits[:, :-1].double().log_softmax(-1)
    there = torch.stack(out.logits, 1).double().log_softmax(-1)
    n = prompts.shape[1]
    chosen = out.sequences[:, n:-1, None]  # the last token that is sampled goes into no call
    change = own[:, n - 1 : -1].gather(-1, chosen) - there[:, :-1].gather(-1, chosen)
    p, q = own[:, n - 1 : -1], there[:, :-1]
    found = mismatch(model, dump(engine, generated(engine, prompts), tmp_path / "x.safetensors"), attribution="none")
    assert found.figures is not None
    # generate gives the logits of the last token of the prompt, and of each that follows
    assert found.figures.by_sequence[:, 1].tolist() == [NEW - 1] * 3
    assert found.figures.mean_dlogp == pytest.approx(float(change.abs().mean()), rel=1e-3)
    assert found.figures.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-2)


def test_a_dump_may_be_the_first_side(prompts: Tensor, tmp_path: Path) -> None:
    engine = with_epsilon(made())
    file = tmp_path / "trainer.safetensors"
    dump(engine, {"input_ids": prompts}, file)
    there, back = mismatch(str(file), made()), mismatch(made(), file)
    assert there.words[0].startswith("the dump trainer.safetensors")
    assert [row["module"] for row in there] == [row["module"] for row in back]
    assert there.figures is not None
    assert back.figures is not None
    assert there.figures.k1 == pytest.approx(-back.figures.k1)
    assert there.figures.perplexities == back.figures.perplexities[::-1]


def test_padding_on_the_left_counts_nowhere(prompts: Tensor, tmp_path: Path) -> None:
    mask = torch.ones_like(prompts)
    mask[0, :2] = 0
    engine = with_epsilon(made("Llama", "sdpa"))
    found = mismatch(made(), dump(engine, generated(engine, prompts, mask), tmp_path / "x.safetensors"))
    assert [row["module"] for row in found] == ["model.layers.1.post_attention_layernorm"]
    assert found.figures is not None
    assert found.figures.by_sequence[:, 1].tolist() == [NEW - 1] * 3


def test_experts_that_flip_are_counted(tmp_path: Path) -> None:
    """A router in bfloat16; the choices of each run are read from plain forward passes."""
    model, engine = made("Mixtral"), made("Mixtral")
    in_bfloat16(engine, engine.model.layers[1].mlp.gate)
    prompts = torch.randint(0, WORDS, (12, 40), generator=torch.Generator().manual_seed(3))
    chosen: list[Tensor] = []
    for m in (model, engine):
        gate = m.model.layers[1].mlp.gate
        handle = gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].sort(-1).values))
        with torch.no_grad():
            m(prompts)
        handle.remove()
    flips = (chosen[0] != chosen[1]).any(-1).double().mean()
    assert flips > 0
    found = mismatch(model, dump(engine, {"input_ids": prompts}, tmp_path / "x.safetensors"))
    assert [(row["module"], row["kind"]) for row in found] == [("model.layers.1.mlp.gate", "rounding point")]
    assert found[0]["added"] == pytest.approx(1.0, abs=1e-3)  # with the experts that it chooses
    rows = {row["module"]: row for row in found.decisions}
    assert rows["model.layers.0.mlp.gate"]["flips"] == 0  # before the planted difference
    assert rows["model.layers.1.mlp.gate"]["rows"] == prompts.numel()
    assert rows["model.layers.1.mlp.gate"]["flips"] == float(flips)
    assert found.replayed is not None
    assert "With the dump's decisions replayed in the model" in str(found)


def test_a_model_is_left_as_it_was(prompts: Tensor, tmp_path: Path) -> None:
    model = made().train()
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    state = torch.get_rng_state()
    mismatch(model, dump(model, {"input_ids": prompts}, tmp_path / "x.safetensors"))
    assert torch.equal(torch.get_rng_state(), state)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


# What is in a file


def rewritten(file: Path, change: Callable[[dict[str, Tensor]], object], words: dict[str, Any] | None = None) -> Path:
    """A file with other tensors, as of an engine that writes them so."""
    tensors = load_file(file)
    change(tensors)
    other = file.with_name("other.safetensors")
    save_file(tensors, other, {"fpsim_dump": json.dumps({"version": 1, "engine": "made"} | (words or {}))})
    return other


@pytest.fixture
def file(prompts: Tensor, tmp_path: Path) -> Path:
    dump(with_epsilon(made()), {"input_ids": prompts}, tmp_path / "rollout.safetensors")
    return tmp_path / "rollout.safetensors"


def test_log_probabilities_of_chosen_tokens_do_without_logits(file: Path) -> None:
    whole = mismatch(made(), file)

    def change(tensors: dict[str, Tensor]) -> None:
        logs = tensors["out.logits"][:, :-1].double().log_softmax(-1)
        chosen = logs.gather(-1, tensors["tokens"][:, 1:, None]).squeeze(-1)
        tensors["logprobs"] = F.pad(chosen, (1, 0), value=torch.nan)
        del tensors["out.logits"], tensors["lm_head.out0"]

    found = mismatch(made(), rewritten(file, change))
    assert whole.figures is not None
    assert found.figures is not None
    assert found.figures.mean_dlogp == pytest.approx(whole.figures.mean_dlogp, rel=1e-9)
    assert np.isnan(found.figures.kl)
    assert found[0]["module"] == whole[0]["module"]
    assert found[0]["put_back"] == pytest.approx(1.0)
    assert "KL and likeliest tokens are not told" in str(found)
    without = mismatch(made(), rewritten(file, lambda tensors: (change(tensors), tensors.pop("logprobs"))))
    assert without.figures is None
    assert without[0]["module"] == whole[0]["module"]
    assert "The dump has no logits" in str(without)


def test_a_dump_of_results_alone_says_so(file: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.search(r"\.in[\d.]", name)]:
            del tensors[name]

    found = mismatch(made(), rewritten(file, change))
    assert [row["module"] for row in found] == ["model.layers.1.post_attention_layernorm"]
    assert "The dump has results alone" in str(found)


def test_names_are_mapped_and_those_that_do_not_map_are_listed(file: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            if name.startswith("model."):
                tensors["transformer" + name.removeprefix("model")] = tensors.pop(name)

    other = rewritten(file, change)
    found = mismatch(made(), other, names={"transformer": "model"})
    assert found[0]["module"] == "model.layers.1.post_attention_layernorm"
    assert found.alone == {"a": [], "b": []}
    found = mismatch(made(), other)
    assert "transformer.norm" in found.alone["b"]
    assert "model.norm" in found.alone["a"]
    assert "In b alone, and so not compared: transformer" in str(found)


def test_another_shape_is_listed(file: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.out0"] = tensors["model.layers.0.mlp.up_proj.out0"][..., :7].clone()

    found = mismatch(made(), rewritten(file, change))
    assert found.unlike == {
        "model.layers.0.mlp.up_proj": "model.layers.0.mlp.up_proj.out0 is (7,) for each token in the dump, and "
        "(3, 5, 48) in the model"
    }


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.out0"][0, 1, 2] = torch.nan


def _longer(tensors: dict[str, Tensor]) -> None:
    tensors["logprobs"] = torch.zeros(2, 2)
    del tensors["out.logits"], tensors["lm_head.out0"]


WRONG: list[tuple[Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = [
    (_nan, {}, r"model.norm.out0 of other.safetensors has NaN .* Expected: numbers. .*first module"),
    (_longer, {}, r"'logprobs' of other.safetensors has shape \(2, 2\).*Expected: for each token"),
    (lambda tensors: None, {"version": 9}, "version 9 .* knows up to 1. Read it with"),
    (lambda t: [t.pop(n) for n in [*t] if "." in n], {}, "no tensor that is named as of a module.*Expected: names"),
    (lambda t: [t.pop(n) for n, x in [*t.items()] if not x.is_floating_point()], {}, "does not tell its tokens. Exp"),
]


@pytest.mark.parametrize(("change", "words", "error"), WRONG)
def test_a_broken_dump_is_an_error(change: Any, words: dict[str, Any], error: str, file: Path) -> None:
    with pytest.raises(ValueError, match=error):
        mismatch(made(), rewritten(file, change, words))


def test_an_unknown_dtype_is_an_error(tmp_path: Path) -> None:
    header = json.dumps({"norm.out0": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(ValueError, match=r"'norm.out0' of x.safetensors has dtype 'F6_E2M3'.*Expected: one of .*BF16"):
        Dump(file)


def test_other_tokens_and_sides_are_errors(file: Path, prompts: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"15 of 15 tokens of the batch are not those of .*Expected: the tokens"):
        mismatch(made(), file, {"input_ids": (prompts + 1) % WORDS})
    with pytest.raises(ValueError, match=r"tokens of shape \(3, 4\), and .* of \(3, 5\). Expected"):
        mismatch(made(), file, {"input_ids": prompts[:, :4]})
    with pytest.raises(ValueError, match=r"both dumps. Expected: one of them a model"):
        mismatch(file, file)
    with pytest.raises(ValueError, match=r"No module of rollout.safetensors .*Expected: names="):
        mismatch(nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)), file)
    with pytest.raises(FileNotFoundError, match=r"no file .* Expected: what fpsim.dump"):
        mismatch(made(), tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match=r"is not a safetensors file. Expected"):
        Dump(Path(__file__))
    with pytest.raises(TypeError, match=r"batch is None. Expected"):
        mismatch(made(), made())
    with pytest.raises(ValueError, match=r"never called LlamaForCausalLM itself. Expected"):
        dump(made(), lambda: None, tmp_path / "x.safetensors")


def test_the_command_takes_a_dump(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "models.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests/fpsim/insight')!r})\nfrom test_dumps import made\n"
    )
    assert main(["mismatch", f"{script}:made", str(file)]) == 1
    assert "model.layers.1.post_attention_layernorm" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["mismatch", f"{script}:made", f"{script}:made"])
    assert "--batch was not given" in capsys.readouterr().err


# msprobe, whose layout is made here by hand as its documentation describes it


def msprobe(file: Path, folder: Path, suffix: str | None) -> Path:
    """A dump.json of level L0, of the tensors of a dump; with files, or with statistics alone."""
    tensors = load_file(file)
    data: dict[str, Any] = {}
    (folder / "dump_tensor_data").mkdir()
    for name, x in tensors.items():
        found = re.fullmatch(r"(.+)\.(in|out)(\d|\.\w+)", name)
        if found is None or not x.is_floating_point():
            continue
        empty: dict[str, Any] = {"input_args": [], "input_kwargs": {}, "output": []}
        entry = data.setdefault(f"Module.{found[1]}.Any.forward.0", empty)
        wide = x.float()
        leaf = {"type": "torch.Tensor", "dtype": str(x.dtype), "shape": [*x.shape], "requires_grad": False}
        leaf |= {
            "Max": float(wide.max()),
            "Min": float(wide.min()),
            "Mean": float(wide.mean()),
            "Norm": float(wide.norm()),
        }
        if suffix is not None:
            leaf["data_name"] = f"{name}{suffix}"
            path = folder / "dump_tensor_data" / leaf["data_name"]
            np.save(path, x.numpy()) if suffix == ".npy" else torch.save(x, path)
        if found[2] == "out":
            entry["output"].append(leaf)
        elif found[3].isdigit():
            entry["input_args"].append(leaf)
        else:
            entry["input_kwargs"][found[3][1:]] = leaf
    data["Torch.add.0.forward"] = {"input_args": [], "input_kwargs": {}, "output": []}
    content = {"task": "tensor" if suffix else "statistics", "level": "L0", "framework": "pytorch", "data": data}
    (folder / "dump.json").write_text(json.dumps(content))
    return folder / "dump.json"


@tiers.parametrize("suffix", [".npy", ".pt"], keep={".npy"})
def test_a_dump_of_msprobe_is_read(suffix: str, file: Path, prompts: Tensor, tmp_path: Path) -> None:
    found = mismatch(made(), msprobe(file, tmp_path, suffix), {"input_ids": prompts})
    assert (found[0]["module"], found[0]["kind"]) == ("model.layers.1.post_attention_layernorm", "formula")
    assert "entries of the dump are not read, the first Torch.add.0.forward: of a function" in str(found)


def test_statistics_of_msprobe_tell_where_results_part(file: Path, prompts: Tensor, tmp_path: Path) -> None:
    path = msprobe(file, tmp_path, None)
    found = mismatch(made(), path, {"input_ids": prompts})
    assert found.first is not None
    assert found.first[0] == "model.layers.1.post_attention_layernorm"
    assert found.figures is None
    assert "Not told are log-probabilities" in str(found)
    with pytest.raises(ValueError, match=r"statistics alone, which do not tell the tokens. Expected: batch"):
        mismatch(made(), path)
    with pytest.raises(ValueError, match=r"statistics of 'lm_head.out0' alone. Expected: a dump of tensors"):
        Dump(path)["lm_head.out0"]
    engine = made()
    dump(engine, {"input_ids": prompts}, file)
    (same := tmp_path / "same").mkdir()
    assert not mismatch(made(), msprobe(file, same, None), {"input_ids": prompts})


def test_json_of_another_kind_is_an_error(file: Path, tmp_path: Path) -> None:
    path = msprobe(file, tmp_path, ".npy")
    path.write_text(path.read_text().replace("torch.float32", "torch.float6"))
    with pytest.raises(ValueError, match=r"has dtype 'torch.float6', which torch has not. Expected"):
        Dump(path)
    path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"is not msprobe's dump.json .*Expected: JSON with 'task'"):
        Dump(path)


# vLLM and SGLang, whose calls a stand-in makes: tokens of all sequences in one row, fused products and fused norms


class Norm(nn.Module):
    def __init__(self, of: Any, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = of.weight, eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            residual.add_(x)  # in place, as the fused kernels do
        wide = x if residual is None else residual
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return out if residual is None else (x.copy_(out), residual)


class Fused(nn.Module):
    """Several products in one, that returns a bias which is None."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class Attend(nn.Module):
    def __init__(self, of: Any, rotary: Any) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Fused(of.q_proj, of.k_proj, of.v_proj), Fused(of.o_proj)
        self._rotary, self._dim = [rotary], of.head_dim
        self.stored: list[tuple[Tensor, Tensor]] = []

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
        qkv = self.qkv_proj(hidden_states)[0].view(len(positions), 4, self._dim).transpose(0, 1)
        q, k, v = qkv.split([2, 1, 1])
        cos, sin = self._rotary[0](v[None], positions[None])
        q, k = (x[0] for x in rotate(q[None], k[None], cos, sin))
        begins = [i for i, p in enumerate(positions.tolist()) if p == 0 or len(positions) == len(self.stored)]
        out = []
        for s, (i, j) in enumerate(zip(begins, [*begins[1:], len(positions)], strict=True)):
            if positions[i] == 0:
                self.stored.append((k[:, i:j], v[:, i:j]))
            else:
                self.stored[s] = tuple(
                    torch.cat(x, 1) for x in zip(self.stored[s], (k[:, i:j], v[:, i:j]), strict=True)
                )
            keys, values = (x.expand(2, -1, -1) for x in self.stored[s])
            out.append(F.scaled_dot_product_attention(q[:, i:j], keys, values, is_causal=j - i > 1))
        return self.o_proj(torch.cat(out, 1).transpose(0, 1).flatten(1))[0]


class Mlp(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Fused(of.gate_proj, of.up_proj), Fused(of.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)[0]


class Layer(nn.Module):
    def __init__(self, of: Any, rotary: Any, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attend(of.self_attn, rotary), Mlp(of.mlp)
        self.input_layernorm = Norm(of.input_layernorm, 1e-6)
        self.post_attention_layernorm = Norm(of.post_attention_layernorm, eps)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, x = hidden_states.clone(), self.input_layernorm(hidden_states)
        else:
            x, residual = self.input_layernorm(hidden_states, residual)
        x = self.self_attn(positions=positions, hidden_states=x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Inner(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.embed_tokens, self.norm = of.embed_tokens, Norm(of.norm, 1e-6)
        eps = [1e-6, 1e-3]  # the planted one
        self.layers = nn.ModuleList(Layer(x, of.rotary_emb, e) for x, e in zip(of.layers, eps, strict=True))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]


@dataclass
class Output:
    next_token_logits: Tensor


class Logits(nn.Module):
    def __init__(self, is_sglang: bool) -> None:
        super().__init__()
        self._is_sglang = is_sglang

    def forward(self, *args: Any) -> Any:
        head, x = (args[2], args[1]) if self._is_sglang else args
        logits = F.linear(x, head.weight)
        return Output(logits) if self._is_sglang else logits


class Engine(nn.Module):
    """A Llama as vLLM and SGLang build and call it."""

    def __init__(self, of: Any, is_sglang: bool = False) -> None:
        super().__init__()
        self.model, self.lm_head, self.logits_processor = Inner(of.model), of.lm_head, Logits(is_sglang)
        self._is_sglang = is_sglang

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy tokens: all prompts in one call, then one token of each in every call."""
        sequences, ids = [[*p] for p in prompts], torch.tensor([token for p in prompts for token in p])
        positions = torch.cat([torch.arange(len(p)) for p in prompts])
        last = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
        for _ in range(NEW):
            x = self(input_ids=ids, positions=positions)[last]
            args = (ids, x, self.lm_head) if self._is_sglang else (self.lm_head, x)
            out = self.logits_processor(*args)
            ids = (out.next_token_logits if self._is_sglang else out).argmax(-1)
            positions, last = torch.tensor([len(s) for s in sequences]), torch.arange(len(prompts))
            for sequence, token in zip(sequences, ids.tolist(), strict=True):
                sequence.append(token)
        return sequences


def names_of(engine: str) -> dict[str, Any]:
    """What the hook of an engine on the docs' page defines."""
    code = next(code for code in HOOKS if f"{engine}_dump.py" in code)
    assert len(code.strip().splitlines()) < 50
    names: dict[str, Any] = {}
    exec(compile(code, f"{engine}_dump.py", "exec"), names)
    return names


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_hook_of_the_page_writes_what_is_read(engine: str, tmp_path: Path) -> None:
    names, file, model = names_of(engine), tmp_path / "rollout.safetensors", made()
    stand_in = Engine(copy.deepcopy(model), engine == "sglang")
    known = dict(stand_in.named_modules())
    if engine == "vllm":
        names["install"](stand_in)
    else:
        for spec in names["specs"](2, str(file)):
            hook = names[spec["hook_factory"].partition(":")[2]](spec["config"])
            known[spec["target_modules"][0]].register_forward_hook(hook)
    prompts = [[5, 17, 3, 40], [9, 2, 33, 21, 8, 60]]
    sequences = stand_in.generate(prompts)
    if engine == "vllm":
        names["save"](stand_in, file)
    rollout = Dump(file)
    steps = rollout.steps()
    assert steps is not None
    assert [row[mask].tolist() for row, mask in zip(steps.tokens, steps.mask, strict=True)] == [
        s[:-1] for s in sequences
    ]
    found = mismatch(model, rollout)
    assert [(row["module"], row["kind"]) for row in found] == [("model.layers.1.post_attention_layernorm", "formula")]
    assert found.figures is not None
    assert found.figures.by_sequence[:, 1].tolist() == [NEW - 1] * 2
    assert found.unlike.keys() <= {""}  # vLLM's model returns hidden states


def test_tokens_in_one_row_are_told_apart_by_their_positions() -> None:
    ids = [torch.tensor([1, 2, 3, 7, 8]), torch.tensor([4, 9]), torch.tensor([5, 6, 10])]
    positions = [torch.tensor([0, 1, 2, 0, 1]), torch.tensor([3, 2]), torch.tensor([4, 5, 3])]
    found = flat_steps(ids, positions)  # the second call has one token of each, the third a part of a prompt
    assert found is not None
    assert found.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]
    assert found.mask.sum(1).tolist() == [6, 4]
    assert [step.ends.tolist() for step in found.steps] == [[2, 7], [3, 8], [5, 9]]
    assert flat_steps([torch.tensor([4, 5])], [torch.tensor([7, 8])]) is None  # of a cache that nobody recorded
