"""Each update by name stores what the library stores after which it is named: bit for bit, five steps and odd sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import oracle
import pytest
import torch
import update_oracle as libraries
from processors import NEEDS_VECTORS
from torch import Tensor, nn

from fpsim import UPDATES, quantize_optimizer
from fpsim.models.storing import noise_key

SHAPES = [(7, 33), (1,), (130,), (), (3, 5, 2)]


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(params: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 2) for p in params]


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach().float(), b.detach())


def random_bits(seed: int, step: int, index: int, shape: torch.Size) -> Tensor:
    """The 16 bits with which torchao goes up where fpsim's noise does: that adds them, torchao compares."""
    key = int(noise_key(seed, step, index, "weight")) % 2**64
    words = [65535 - (oracle.noise_word(i, key) >> 16) for i in range(shape.numel())]
    return torch.tensor(words, dtype=torch.int32).reshape(shape)


def test_bf16_sr_is_torchaos_adamw_with_its_random_bits():
    ours = parameters(SHAPES)
    native = [p.detach().bfloat16() for p in ours]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in native]  # in the dtype of the weight
    optimizer = libraries.Ao(ours)
    quantize_optimizer(optimizer, "bf16_sr", seed=7)
    for step in range(1, 6):
        for index, (p, g) in enumerate(zip(ours, gradients(ours, step), strict=True)):
            p.grad = g.bfloat16().float()
            m, v = moments[index]
            new, *new_moments = libraries.ao_step(native[index], g.bfloat16(), step, m, v, 0.01, 0.9, 0.999, 0.1, 1e-8)
            m.copy_(new_moments[0]), v.copy_(new_moments[1])
            native[index] = libraries.ao_stochastic(new, random_bits(7, step - 1, index, p.shape))
        optimizer.step()
        for p, weight, (m, v) in zip(ours, native, moments, strict=True):
            assert equal(weight, p)
            assert equal(m, optimizer.state[p]["exp_avg"])
            assert equal(v, optimizer.state[p]["exp_avg_sq"])


AO_STATES = {
    "adam8bit": [partial(libraries.ao_mapped, block=256, values=libraries.ao_map(signed)) for signed in (True, False)],
    "adam4bit": [
        partial(libraries.ao_mapped, block=128, values=libraries.ao_map(signed, 3, 4)) for signed in (True, False)
    ],
    "adam_fp8": [partial(libraries.ao_fp8, block=256)] * 2,
}


@NEEDS_VECTORS
@pytest.mark.parametrize("name", AO_STATES)
def test_states_in_few_bits_are_torchaos_from_4096_elements_on(name):
    ours = parameters([(64, 64), (4096 + 256,), (4095,)])
    plain = [p.detach().clone() for p in ours]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in plain]
    optimizer = libraries.Ao(ours)
    quantize_optimizer(optimizer, name)
    for step in range(1, 6):
        for index, (p, g) in enumerate(zip(ours, gradients(ours, step), strict=True)):
            p.grad = g
            plain[index], *new = libraries.ao_step(plain[index], g, step, *moments[index], 0.01, 0.9, 0.999, 0.1, 1e-8)
            is_large = p.numel() >= 4096
            moments[index] = [keep(x) if is_large else x for keep, x in zip(AO_STATES[name], new, strict=True)]
        optimizer.step()
        for p, weight, (m, v) in zip(ours, plain, moments, strict=True):
            assert equal(weight, p)
            assert equal(m, optimizer.state[p]["exp_avg"])
            assert equal(v, optimizer.state[p]["exp_avg_sq"])


def test_adam_fp8_of_zeros_and_of_what_is_not_finite_is_torchaos():
    p = nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([p], lr=0.0, momentum=0.9)
    update = replace(UPDATES["adam_fp8"], states={"momentum_buffer": "e4m3fn per 256 fp32"})
    quantize_optimizer(optimizer, update)
    p.grad = torch.zeros(4096)
    p.grad[256], p.grad[512], p.grad[513], p.grad[768] = torch.inf, torch.nan, 1.0, 1e-30
    wanted = libraries.ao_fp8(p.grad, 256)
    optimizer.step()
    found = optimizer.state[p]["momentum_buffer"]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert int(found.isnan().sum()) == 2 * 256  # of a block with inf all: 0 * inf; and of one whose amax is NaN


def test_fp8_lm_is_ms_amps_in_both_of_its_stages():
    ours = parameters(SHAPES)
    optimizer = libraries.Msamp(ours)
    quantize_optimizer(optimizer, "fp8_lm")
    plain = [libraries.msamp_stored(p.detach(), torch.float16) for p in parameters(SHAPES)]
    # fpsim has rounded the parameters at first, as MS-AMP's cast does
    assert all(equal(x, p) for x, p in zip(plain, ours, strict=True))
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in plain]
    for step in range(1, 6):
        for index, (p, g) in enumerate(zip(ours, gradients(ours, step), strict=True)):
            p.grad = g
            new, m, v = libraries.msamp_stage1(plain[index], g, step, *moments[index], 0.01, 0.1)
            plain[index] = libraries.msamp_stored(new, torch.float16)
            moments[index] = [libraries.msamp_stored(m, torch.float8_e4m3fn), libraries.msamp_stored(v, torch.float16)]
        optimizer.step()
        for p, weight, (m, v) in zip(ours, plain, moments, strict=True):
            assert equal(weight, p)
            assert equal(m, optimizer.state[p]["exp_avg"])
            assert equal(v, optimizer.state[p]["exp_avg_sq"])


def test_te_fp16_master_has_the_scale_of_transformer_engine():
    ours = parameters(SHAPES)
    optimizer = torch.optim.AdamW(ours, lr=0.01)
    quantize_optimizer(optimizer, "te_fp16_master")
    masters = [libraries.te_fp16(p.detach().bfloat16().float().numpy()) for p in parameters(SHAPES)]
    twins = [nn.Parameter(torch.from_numpy(np.array(x))) for x in masters]
    plain = torch.optim.AdamW(twins, lr=0.01)
    for step in range(5):
        for p, q, g in zip(ours, twins, gradients(ours, step), strict=True):
            p.grad, q.grad = g, g.clone()
        optimizer.step(), plain.step()
        for p, q in zip(ours, twins, strict=True):
            q.data = torch.from_numpy(np.asarray(libraries.te_fp16(q.detach().numpy())))
            assert equal(q.detach().bfloat16(), p)


def test_a_master_of_zeros_stays_zero_in_transformer_engine():
    p = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=0.0)
    quantize_optimizer(optimizer, "te_fp16_master")
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.tolist() == [0, 0, 0]
    assert libraries.te_fp16(np.zeros(3, np.float32)).tolist() == [0, 0, 0]


def test_bf16_remainder_is_float32_split_as_transformer_engine_splits_it():
    ours, twins = parameters(SHAPES), parameters(SHAPES)
    for q in twins:
        high, _ = libraries.te_split(q.detach().numpy())  # of a model that was cast: the remainder begins at zero
        q.data = torch.from_numpy(np.array(libraries.te_joined(high, np.zeros_like(high).view(np.int16))))
    optimizer, plain = torch.optim.AdamW(ours, lr=0.01), torch.optim.AdamW(twins, lr=0.01)
    quantize_optimizer(optimizer, "bf16_remainder")
    for step in range(5):
        for p, q, g in zip(ours, twins, gradients(ours, step), strict=True):
            p.grad, q.grad = g, g.clone()
        optimizer.step(), plain.step()
        for p, q in zip(ours, twins, strict=True):
            high, remainder = libraries.te_split(q.detach().numpy())
            assert np.array_equal(libraries.te_joined(high, remainder), q.detach().numpy())
            seen = (high.astype(np.uint32) << np.uint32(16)).view(np.float32)
            assert np.array_equal(seen, p.detach().numpy())


@pytest.mark.parametrize("value", [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 3.4e38, 1e-40, 2.0**-126, -0.0])
def test_the_bfloat16_of_a_remainder_rounds_ties_away_from_zero(value):
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    quantize_optimizer(optimizer, "bf16_remainder")
    p.grad = torch.tensor([-value])
    optimizer.step()
    high, _ = libraries.te_split(np.array([0 + np.float32(value)], np.float32))
    assert p.item() == (high.astype(np.uint32) << np.uint32(16)).view(np.float32).item()


# Kahan: with coefficients that bfloat16 holds, long after the first step, when betas need no correction
LR, B1, B2, DECAY, EPS = 2.0**-6, 0.75, 0.875, 0.5, 2.0**-20


def test_bf16_kahan_is_torch_optimis_adamw():
    ours = parameters(SHAPES)
    optimizer = torch.optim.AdamW(ours, lr=LR, betas=(B1, B2), weight_decay=DECAY, eps=EPS)
    quantize_optimizer(optimizer, "bf16_kahan")
    native = [p.detach().bfloat16() for p in ours]
    states = [[torch.zeros_like(p) for _ in range(3)] for p in native]
    for p in ours:
        zeros = (torch.zeros_like(p.detach()) for _ in range(2))
        optimizer.state[p] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(1e4), *zeros), strict=True))
    for step in range(1, 6):
        for p, q, g, (m, v, k) in zip(ours, native, gradients(ours, step), states, strict=True):
            p.grad = g
            libraries.optimi_adam(q, g.bfloat16(), m, v, k, LR, B1, B2, DECAY, EPS)
        optimizer.step()
        kept = [entry["fpsim_compensation"] for entry in optimizer.state_dict()["state"].values()]
        for p, q, (m, v, k), c in zip(ours, native, states, kept, strict=True):
            assert equal(q, p)
            assert equal(m, optimizer.state[p]["exp_avg"])
            assert equal(v, optimizer.state[p]["exp_avg_sq"])
            assert equal(k, c)


@NEEDS_VECTORS
def test_bf16_kahan_is_torch_optimis_sgd():
    shapes = [(8, 32), (4096,)]  # whole vectors, see test_format_steps
    ours = parameters(shapes)
    optimizer = torch.optim.SGD(ours, lr=0.013)
    quantize_optimizer(optimizer, "bf16_kahan")
    native = [p.detach().bfloat16() for p in ours]
    rests = [torch.zeros_like(p) for p in native]
    for step in range(5):
        for p, q, g, k in zip(ours, native, gradients(ours, step), rests, strict=True):
            p.grad = g
            libraries.optimi_sgd(q, g.bfloat16(), k, 0.013)
        optimizer.step()
        assert all(equal(q, p) for p, q in zip(ours, native, strict=True))


def test_muon_bf16_stores_its_momentum_in_bfloat16():
    shapes = [(8, 16), (32, 5)]
    ours, twins = parameters(shapes), parameters(shapes)
    optimizer, plain = torch.optim.Muon(ours, lr=0.02), torch.optim.Muon(twins, lr=0.02)
    quantize_optimizer(optimizer, "muon_bf16")
    for step in range(5):
        for p, q, g in zip(ours, twins, gradients(ours, step), strict=True):
            p.grad, q.grad = g, g.clone()
        optimizer.step(), plain.step()
        for p, q in zip(ours, twins, strict=True):
            buffer = plain.state[q]["momentum_buffer"]
            buffer.copy_(buffer.bfloat16())
            assert torch.equal(p, q)
            assert torch.equal(optimizer.state[p]["momentum_buffer"], buffer)


# The oracle against the libraries themselves, where they are installed


def test_the_oracle_is_torchao():
    adam = pytest.importorskip("torchao.optim.adam", reason="torchao is not installed: pip install --no-deps torchao")
    from torchao.optim.quant_utils import _fp32_to_bf16_sr
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    states = {
        "adam8bit": [OptimState8bit.zeros((64, 64), signed, 256) for signed in (True, False)],
        "adam4bit": [OptimState4bit.zeros((64, 64), signed, 128) for signed in (True, False)],
        "adam_fp8": [OptimStateFp8.zeros((64, 64)) for _ in range(2)],
    }
    for name, (m, v) in states.items():
        p, g = torch.randn(64, 64), torch.randn(64, 64)
        m.copy_(torch.zeros(64, 64)), v.copy_(torch.zeros(64, 64))  # code 0 is not a zero in a map
        mine, moments = p.clone(), [keep(torch.zeros(64, 64)) for keep in AO_STATES[name]]
        for step in range(1, 6):
            rate, count = torch.tensor(0.01), torch.tensor(float(step))
            adam.single_param_adam(p, g, count, m, v, None, rate, 0.9, 0.999, 0.1, 1e-8, True, False)
            mine, *moments = libraries.ao_step(mine, g, step, *moments, 0.01, 0.9, 0.999, 0.1, 1e-8)
            moments = [keep(x) for keep, x in zip(AO_STATES[name], moments, strict=True)]
            assert torch.equal(p, mine)
            assert torch.equal(m.dequantize(), moments[0])
            assert torch.equal(v.dequantize(), moments[1])
    torch.manual_seed(0)
    found = _fp32_to_bf16_sr(p)
    torch.manual_seed(0)
    assert torch.equal(found, libraries.ao_stochastic(p, torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)))


def test_the_oracle_is_torch_optimi():
    optimi = pytest.importorskip("optimi", reason="torch-optimi is not installed: pip install --no-deps torch-optimi")
    options = {"foreach": False, "triton": False, "kahan_sum": True}
    p, q = nn.Parameter(torch.randn(7, 33).bfloat16()), nn.Parameter(torch.randn(7, 33).bfloat16())
    adamw = optimi.AdamW([p], lr=LR, betas=(B1, B2), weight_decay=DECAY, eps=EPS, **options)
    sgd = optimi.SGD([q], lr=0.013, momentum=0, **options)
    mine, other = p.detach().clone(), q.detach().clone()
    m, v, k, rest = (torch.zeros_like(mine) for _ in range(4))
    p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
    adamw.step()
    adamw.param_groups[0]["step"].fill_(10_000)
    for x in (mine,):
        x.copy_(p.detach())
    for step in range(5):
        g = torch.randn(7, 33, generator=torch.Generator().manual_seed(step)).bfloat16()
        p.grad, q.grad = g.clone(), g.clone()
        adamw.step(), sgd.step()
        libraries.optimi_adam(mine, g.clone(), m, v, k, LR, B1, B2, DECAY, EPS)
        libraries.optimi_sgd(other, g.clone(), rest, 0.013)
        assert torch.equal(p.detach(), mine)
        assert torch.equal(q.detach(), other)
