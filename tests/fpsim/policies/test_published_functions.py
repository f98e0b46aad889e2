"""The functions of docs/recipes.md that round as papers do, beside their sources, written here number by number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from readme_blocks import examples
from torch import Tensor, nn

import fpsim

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    (block,) = (code for code, _ in examples(PAGE) if "def ms_eden" in code)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def numbers(seed: int, rows: int = 24, columns: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, columns // 32), generator=generator)).repeat_interleave(32, 1)
    x[1, :64] = 0.0
    return x


def bf16(x: float) -> float:
    return float(np.float32(x).astype(ml_dtypes.bfloat16))


def hif4_of_64(v: np.ndarray) -> np.ndarray:
    """quant_cy_npu/base/QFunc/hifx.py, quant_hifx with four bits, which a vendor's port of Megatron-LM has."""
    third, one_seventh = np.abs(v).reshape(8, 2, 4), bf16(1 / 7)
    scale = min(max(bf16(np.float32(np.abs(v).max()) * np.float32(one_seventh)), 2.0**-48), 49152.0)
    exponent = math.floor(math.log2(scale))
    scale = round(scale * 2.0 ** (2 - exponent)) * 2.0 ** (exponent - 2)  # e6m2
    by, out = np.float32(bf16(1 / scale)), np.empty_like(third)
    for i in range(8):
        second = 2 if third[i].max() * by >= 4 else 1
        for j in range(2):
            first = 2 if third[i, j].max() * by / second >= 2 else 1
            steps = np.floor(third[i, j] / second / first * by * np.float32(4) + np.float32(0.5))
            out[i, j] = np.minimum(steps, 7) / 4 * second * first * scale
    return np.copysign(out.reshape(64), v)


@pytest.mark.parametrize("axis", [1, 0])
def test_hif4_is_what_its_source_computes(page: dict[str, Any], axis: int) -> None:
    x = numbers(0)
    x[2], x[3] = x[2] * 2.0**40, x[3] * 2.0**-60  # beyond the ends of the scale
    given = x if axis else x.T.contiguous()
    found = page["hif4"](given, axis)
    expected = np.stack([np.concatenate([hif4_of_64(part) for part in row.reshape(2, 64)]) for row in x.numpy()])
    assert torch.equal(found if axis else found.T, torch.from_numpy(expected))


def eden_of_32(v: np.ndarray, whole: float) -> tuple[np.ndarray, np.ndarray]:
    """Quartet-II, nvfp4_triton.py, eden_1x16s_fp4_kernel: the elements, and the scales before they are rounded."""
    blocks, top = v.astype(np.float64).reshape(2, 16), 6 / (17 / 16 * 0.93)
    scales = (np.abs(blocks).max(1) / top / whole).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales[scales == 0] = 1
    wanted = blocks / (scales[:, None] * whole)
    q = np.copysign(E2M1[np.abs(np.abs(wanted)[..., None] - E2M1).argmin(-1)], wanted)
    kept = (wanted * q).sum()
    return q, scales * ((wanted * wanted).sum() / kept if kept else 1.0)


def test_the_noise_of_ms_eden_is_in_its_scales_and_has_the_mean_of_its_source(page: dict[str, Any]) -> None:
    x = numbers(1, 4, 64)
    torch.manual_seed(0)
    drawn = torch.stack([page["ms_eden"](x, 1) for _ in range(600)]).double().numpy()
    whole = float(x.abs().max()) / (255.99 * 6 / (17 / 16 * 0.93))
    for row, values in zip(x.numpy(), drawn.transpose(1, 0, 2), strict=True):
        for part, found in zip(row.reshape(2, 32), values.reshape(-1, 2, 32).transpose(1, 0, 2), strict=True):
            q, scales = eden_of_32(part, whole)
            for element, scale, each in zip(q, scales, found.reshape(-1, 2, 16).transpose(1, 0, 2), strict=True):
                at = np.abs(element).argmax()
                of_draws = each[:, at] / (element[at] * whole) if element[at] else np.ones(len(each))
                assert np.allclose(each, of_draws[:, None] * element * whole, rtol=1e-5)  # one scale for all of 16
                if element[at]:
                    above = np.searchsorted(E4M3, scale * (1 + 1e-7))
                    low, high = E4M3[max(above - 1, 0)], E4M3[above]
                    assert np.isclose(of_draws[:, None], [low, high], rtol=1e-5).any(1).all()
                    assert abs(of_draws.mean() - scale) < 5 * (high - low) / 2 / 600**0.5 + 1e-5 * scale


def test_ms_eden_in_random_transforms_is_unbiased_and_better_than_stochastic_elements(page: dict[str, Any]) -> None:
    """The paper's claim: noise in the scales has half of the squared error."""
    torch.manual_seed(0)
    x = torch.randn(64, 128)
    turned = fpsim.Hadamard(32)
    signs = torch.randint(0, 2, (200, 1, 128)) * 2.0 - 1
    of_numbers, of_scales = [], []
    for sign in signs:
        rotated = fpsim.hadamard(x * sign, turned, axis=1)
        for found, rounded in (
            (of_numbers, fpsim.round_to(rotated, "nvfp4", "stochastic")),
            (of_scales, page["ms_eden"](rotated, 1)),
        ):
            found.append(fpsim.hadamard(rounded, turned, axis=1) * sign - x)  # its transform is its own inverse
    noise, better = (torch.stack(found) for found in (of_numbers, of_scales))
    assert better.square().mean() < 0.55 * noise.square().mean()
    deviation = better.square().mean().sqrt()
    assert better.mean(0).abs().max() < 6 * deviation / 200**0.5


def test_a_model_takes_a_step_of_quartet_ii(page: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 64, bias=False), torch.randn(96, 128)
    model = fpsim.quantize(layer, page["quartet_ii"])
    target = torch.randn(96, 64)
    grads: list[Tensor] = []
    for _ in range(64):
        model.zero_grad()
        (model(x) - target).square().sum().backward()
        grads.append(model.weight.grad.clone())
    y = fpsim.round_to(x, "nvfp4_4over6") @ fpsim.round_to(layer.weight.detach(), "nvfp4_4over6").T
    assert torch.allclose(model(x).detach(), y, rtol=1e-4, atol=1e-4)
    dy = 2 * (y - target)
    true = dy.T @ fpsim.round_to(x, "nvfp4_4over6")
    mean = torch.stack(grads).mean(0)
    assert float((mean - true).norm() / true.norm()) < 2.5 * float((grads[0] - true).norm() / true.norm()) / 64**0.5
