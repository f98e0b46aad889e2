"""Profiles of engines beside native bfloat16 code that rounds as the engine does."""

import copy
import importlib
import itertools
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from engine_code import (
    BF16,
    ENGINES,
    IDS,
    apart,
    by_block,
    by_row,
    by_square,
    floor_of,
    in_bf16,
    log_probabilities,
    model_of,
)
from torch import nn

import fpsim
from fpsim import Policy
from fpsim.insight.engines.kinds import differences
from fpsim.policies.cpu_kernels import CPU_KERNELS, flash_attention, power, rsqrt

KINDS = ("llama", "gpt2", "mixtral")
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


# torch's kernels


def emulated(function, **kernels):
    class Function(nn.Module):
        def forward(self, *args):
            return function(*args)

    return fpsim.quantize(Function(), Policy("bf16", "bf16", "bf16", kernels=kernels or CPU_KERNELS))


EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
POWERS = {str(e): lambda x, e=e: x**e for e in (3, -2, 2, -1, 0.5, -0.5, 4, 0.3, -1 / 3)}


@pytest.mark.parametrize("function", [*POWERS.values(), torch.rsqrt], ids=[*POWERS, "rsqrt"])
def test_powers_are_torchs_for_every_number_of_bf16(function):
    native = function(EVERY_BF16).float()
    assert torch.equal(emulated(function)(EVERY_BF16.float()).nan_to_num(7.0), native.nan_to_num(7.0))


def test_powers_of_float32_and_into_a_tensor_are_left_as_they_are():
    x, out = torch.linspace(0.1, 2, 64).to(BF16), torch.empty(64)
    wide = emulated(lambda y: y.float() ** (1 / 3))(x.float())
    assert torch.equal(wide, x.float() ** (1 / 3))
    assert power(x, 3, out=out) is NotImplemented
    assert rsqrt(x, out=out) is NotImplemented
    assert power(3, x) is NotImplemented


def test_scalar_code_of_torch_is_followed_where_there_is_no_vector_code():
    """The tests of powers and attention hold in a process to which torch gives its scalar kernels."""
    chosen = "powers_are or torchs_fused_kernel or is_hidden"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-o", "addopts=", "-k", chosen, __file__]
    found = subprocess.run(
        command, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout
    assert f"{len(POWERS) + 1 + len(CALLS) + 1} passed" in found.stdout


CALLS = {
    "causal": (128, 128, {"is_causal": True}),
    "two blocks of keys": (48, 700, {}),
    "rows that fill no vector": (33, 33, {"is_causal": True}),
    "one query": (1, 200, {}),
    "fewer heads of keys": (64, 64, {"is_causal": True, "enable_gqa": True}),
    "a mask of truth values": (40, 64, {"attn_mask": torch.ones(40, 64, dtype=torch.bool).tril(20)}),
    "a mask that is added": (40, 64, {"attn_mask": torch.linspace(-4, 0, 64).expand(40, 64).to(BF16)}),
    "a scale": (64, 64, {"scale": 1.5}),
}


@pytest.mark.parametrize("call", CALLS)
def test_attention_is_torchs_fused_kernel(call):
    """Its sums are float32 in an order of their own: one element in a thousand is across a tie from ours."""
    queries, keys, named = CALLS[call]
    torch.manual_seed(len(call))
    heads = 2 if "enable_gqa" in named else 4
    q = torch.randn(2, 4, queries, 32).to(BF16)
    k, v = torch.randn(2, 2, heads, keys, 32).to(BF16)
    native = F.scaled_dot_product_attention(q, k, v, **named).float()
    wide = {name: x.float() if torch.is_tensor(x) and x.dtype is BF16 else x for name, x in named.items()}
    given = [x.float() for x in (q, k, v)]

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **wide)

    ours, once = emulated(attention)(*given), emulated(attention, sqrt=torch.sqrt)(*given)
    assert (ours != native).float().mean() < 1e-3
    assert (once != native).float().mean() > 2e-2  # rounded once, which is what the emulation does without


def test_attention_of_which_all_is_hidden_is_zero_as_torchs():
    q, k, v = torch.randn(3, 1, 1, 4, 16).to(BF16)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1:] = True
    native = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(flash_attention(q, k, v, attn_mask=mask), native)
    assert (native[..., 0, :] == 0).all()


def test_attention_has_the_gradient_of_softmax():
    torch.manual_seed(0)
    q, k, v = (x.to(BF16).requires_grad_() for x in torch.randn(3, 2, 2, 24, 16))
    ours = torch.autograd.grad(flash_attention(q, k, v, is_causal=True).square().sum(), (q, k, v))
    torchs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(), (q, k, v))
    for mine, other in zip(ours, torchs, strict=True):
        assert (mine.float() - other.float()).norm() < 2**-7 * other.float().norm()  # ulps of bf16, in which both are


def test_where_torch_has_no_fused_kernel_attention_is_as_it_was():
    q = torch.randn(1, 2, 8, 16).to(BF16)
    assert flash_attention(q.float(), q.float(), q.float()) is NotImplemented  # of float32
    assert flash_attention(q, q, q[..., :8]) is NotImplemented
    assert flash_attention(q[0], q[0], q[0]) is NotImplemented
    assert flash_attention(q, q, q, dropout_p=0.5) is NotImplemented


HEADS, FUSED = torch.randn(1, 2, 24, 16).to(BF16), "aten::_scaled_dot_product_flash_attention_for_cpu"
DISPATCHED = {
    "plain": ((HEADS, HEADS, HEADS), {}),
    "causal": ((HEADS, HEADS, HEADS), {"is_causal": True}),
    "a mask": ((HEADS, HEADS, HEADS), {"attn_mask": torch.zeros(24, 24, dtype=BF16)}),
    "fewer heads of keys": ((HEADS, HEADS[:, :1], HEADS[:, :1]), {"enable_gqa": True}),
    "dropout": ((HEADS, HEADS, HEADS), {"dropout_p": 0.1}),
    "heads of other sizes": ((HEADS, HEADS, HEADS[..., :8]), {}),
    "a mask with a gradient": ((HEADS, HEADS, HEADS), {"attn_mask": torch.zeros(24, 24, requires_grad=True)}),
    "three axes": ((HEADS[0], HEADS[0], HEADS[0]), {}),
    "no keys": ((HEADS, HEADS[:, :, :0], HEADS[:, :, :0]), {}),
}


@pytest.mark.parametrize("call", DISPATCHED)
def test_attention_is_left_alone_where_torch_dispatches_to_another_kernel(call):
    given, named = DISPATCHED[call]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(*given, **named)
    is_fused = any(event.key == FUSED for event in seen.key_averages())
    assert is_fused == (flash_attention(*given, **named) is not NotImplemented)


# Models of transformers


@needs_transformers
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hf_bf16", "hf_eager_bf16"])
def test_a_model_of_transformers_is_at_the_floor(name, kind, attention):
    model = model_of(kind, attention)
    native = in_bf16(model, name == "hf_eager_bf16")
    theirs = log_probabilities(native)
    ours = apart(log_probabilities(fpsim.quantize(model, fpsim.profile(name, model))), theirs)
    assert ours <= max(1e-3, 1.5 * floor_of(native))
    if kind != "gpt2" and (attention == "sdpa" or name == "hf_eager_bf16"):
        assert ours < 0.4 * apart(log_probabilities(fpsim.quantize(model, "bf16")), theirs)


@needs_transformers
def test_float32_buffers_make_the_queries_and_keys_of_codegen_float32():
    t = importlib.import_module("transformers")
    sizes = {"vocab_size": 64, "n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 64}
    torch.manual_seed(0)
    model = t.CodeGenForCausalLM(t.CodeGenConfig(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    native = in_bf16(model, False)
    theirs = log_probabilities(native)
    policy = fpsim.profile("hf_bf16", model)
    assert apart(log_probabilities(fpsim.quantize(model, policy)), theirs) <= max(1e-3, 1.5 * floor_of(native))
    # with buffers in bfloat16 it is another engine
    assert apart(log_probabilities(fpsim.quantize(model, fpsim.profile("hf_eager_bf16", model))), theirs) > 2e-3
    assert pickle.loads(pickle.dumps(policy)) == policy
    for one, other in zip(policy.overrides.values(), fpsim.profile("hf_bf16", model).overrides.values(), strict=True):
        assert differences(one, other) == []


# Engines


@needs_transformers
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "logits_fp32"])
def test_an_engines_own_code_is_at_the_floor_of_its_profile(name):
    """The same model with the engine's code in native bfloat16; the profile without its difference is far from it."""
    model = model_of("llama")
    native = in_bf16(model, False)
    ENGINES[name](native)
    theirs = log_probabilities(native)
    with_it = apart(log_probabilities(fpsim.quantize(model, fpsim.profile(("hf_bf16", name), model))), theirs)
    without = apart(log_probabilities(fpsim.quantize(model, fpsim.profile("hf_bf16", model))), theirs)
    assert with_it <= max(1e-3, 1.5 * floor_of(native))
    assert without > 2 * with_it


@needs_transformers
def test_logits_are_sums_that_no_one_rounds():
    model = model_of("llama")
    ours = fpsim.quantize(model, fpsim.profile(("hf_bf16", "logits_fp32"), model))
    read = []
    ours.lm_head.register_forward_pre_hook(lambda module, args: read.append(args[0].detach().clone()))
    with torch.no_grad():
        logits = ours(input_ids=IDS, use_cache=False).logits
    assert torch.equal(logits, F.linear(read[0].to(BF16).float(), model.lm_head.weight.detach().to(BF16).float()))


@needs_transformers
@pytest.mark.parametrize(("name", "of_x", "of_w"), [("fp8_w8a8", by_row, by_row), ("fp8_block", by_block, by_square)])
def test_experts_multiply_in_fp8(name, of_x, of_w):
    """The experts of a Mixtral, token by token. Their sum is not rounded here: what is left is bf16's last rounding."""
    model = model_of("mixtral")
    torch.manual_seed(1)
    x, chosen, weights = torch.randn(24, 128).to(BF16), torch.randint(0, 4, (24, 2)), torch.rand(24, 2)
    native = in_bf16(model, False).model.layers[0].mlp.experts

    def expert(i, token, of_x, of_w):
        gate, up = F.linear(of_x(token).float(), of_w(native.gate_up_proj[i]).float()).to(BF16).chunk(2, -1)
        return F.linear(of_x(F.silu(gate) * up).float(), of_w(native.down_proj[i]).float()).to(BF16)[0].float()

    def experts(of_x, of_w):
        found = [sum(w * expert(i, x[t : t + 1], of_x, of_w) for i, w in zip(chosen[t], weights[t])) for t in range(24)]
        return torch.stack(found).detach()

    theirs, plain = experts(of_x, of_w), experts(lambda y: y, lambda y: y)
    emulated = fpsim.quantize(model, fpsim.profile(("hf_bf16", name), model))
    ours = emulated.model.layers[0].mlp.experts(x.float(), chosen, weights).detach()
    assert (ours - theirs).norm() < 2**-8 * theirs.norm()  # half an ulp of bf16
    assert (plain - theirs).norm() > 2**-5 * theirs.norm()


@needs_transformers
def test_several_profiles_are_one_engine():
    model = model_of("llama", "sdpa")
    native = in_bf16(model, False)
    names = ("fused_residual_norm", "fused_silu_mul", "logits_fp32", "rope_fp32")
    for name in names:
        ENGINES[name](native)
    theirs = log_probabilities(native)
    ours = log_probabilities(fpsim.quantize(model, fpsim.profile(("hf_bf16", *names), model)))
    assert apart(ours, theirs) <= max(1e-3, 1.5 * floor_of(native))


# Policies


def test_a_fused_module_rounds_what_leaves_it_once():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.01, 0.99]))

        def forward(self, x):
            return (x * self.weight) * x

    x = torch.tensor([1.203125, 3.015625], requires_grad=True)
    model = fpsim.quantize(Square(), Policy("bf16", "bf16", "bf16", fused=True))
    out = model(x)
    w = model.weight.detach().to(BF16).float()
    assert torch.equal(out.detach(), ((x * w) * x).detach().to(BF16).float())
    assert not torch.equal(out.detach(), fpsim.quantize(Square(), "bf16")(x).detach())
    (gradient,) = torch.autograd.grad(out, x, torch.tensor([1.01, 1.01]))
    error = torch.tensor([1.01, 1.01]).to(BF16).float()
    assert torch.equal(gradient, error * (x * w).detach() + error * x.detach() * w)


def test_modules_inside_of_a_fused_one_do_not_round():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    torch.manual_seed(0)
    x = torch.randn(4, 8).to(BF16).float()
    fused = fpsim.quantize(model, Policy("bf16", "bf16", fused=True))
    a, b = (layer.weight.detach().to(BF16).float() for layer in model)
    assert torch.equal(fused(x).detach(), ((x @ a.T) @ b.T).to(BF16).float())


def test_a_kernel_that_returns_not_implemented_changes_nothing():
    def never(x, *args):
        return NotImplemented

    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(emulated(lambda y: y.exp() * y, exp=never)(x), emulated(lambda y: y.exp() * y, sin=never)(x))


def test_a_copy_computes_as_its_model():
    model = fpsim.quantize(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), Policy("bf16", "bf16", fused=True))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    cubes = emulated(lambda y: y**3)
    assert torch.equal(copy.deepcopy(cubes)(x), (x.to(BF16) ** 3).float())


@pytest.mark.parametrize("policy", [Policy("bf16", "bf16", fused=True), Policy("bf16", "bf16", kernels=CPU_KERNELS)])
def test_mismatch_calls_them_rounding_points(policy):
    kinds = [kind for kind, _ in differences(policy, Policy("bf16", "bf16"))]
    assert {*kinds} == {"rounding point"}


# What is refused


def test_unknown_names_are_refused_with_all_that_are_known():
    with pytest.raises(ValueError, match="no profile") as error:
        fpsim.profile("hf_bf61", nn.Linear(2, 2))
    assert "Did you mean 'hf_bf16'?" in str(error.value)
    assert all(row.name in str(error.value) for row in fpsim.profiles())


@pytest.mark.parametrize("names", [3, (), ["hf_bf16", 3], None])
def test_what_is_no_name_is_refused(names):
    with pytest.raises(TypeError, match="Expected: the name of a profile"):
        fpsim.profile(names, nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["fused_norm", "fused_residual_norm", "fused_silu_mul", "rope_fp32", "fp8_w8a8"])
def test_a_model_without_what_a_profile_is_about_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*has none"):
        fpsim.profile(name, nn.Sequential(nn.Linear(4, 4)))


@needs_transformers
@pytest.mark.parametrize(
    "names",
    [("hf_eager_bf16", "rope_fp32"), ("fp8_w8a8", "fp8_block"), ("hf_bf16", "hf_eager_bf16")],
    ids="-".join,
)
def test_profiles_that_contradict_each_other_are_refused(names):
    model = model_of("llama")
    for pair in itertools.permutations(names):
        with pytest.raises(ValueError, match="Two of the profiles"):
            fpsim.profile(pair, model)


def test_fused_is_refused_where_no_module_ends():
    with pytest.raises(ValueError, match="fused=True"), fpsim.emulate(Policy("bf16", "bf16", fused=True)):
        pass


@pytest.mark.parametrize("value", [{"pow": 3}, {"pow": int}, ("pow",), {"no_such_operation": torch.exp}])
def test_kernels_that_are_no_functions_by_operation_are_refused(value):
    with pytest.raises((TypeError, ValueError), match="kernels"):
        Policy(kernels=value)


def test_profiles_do_not_import_transformers():
    code = """
import sys, torch, fpsim
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4), torch.nn.Linear(4, 8))
fpsim.quantize(model, fpsim.profile(("hf_bf16", "fused_norm", "logits_fp32"), model))
assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
