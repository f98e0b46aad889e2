"""Codes of blocks: the bits that ml_dtypes, compressed-tensors and torchao store, and back to what `round_to` gives."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fpsim
from fpsim import BlockCodes, decode, encode

E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
MORE = (
    "e4m3fn per tensor fp32",
    "e4m3fn per row fp32",
    "e4m3fn per 128x128 fp32",
    "e4m3fn per 8x8 ceil",
    "e5m2 per 32 saturate",
    "e2m1fn per 32 at 0.75",
    "nf4 per 64 fp32",
    "int4 per 32",
    "int8 per row fp32",
    "e2m1fn per 16 e4m3fn fp32 per 32",
    "e2m1fn per 16 e4m3fn",
    "e2m1fn per 16x16 e4m3fn fp32",
    "fp16 per row fp32",
)


def numbers(seed: int = 0, rows: int = 37, columns: int = 83) -> torch.Tensor:
    """Rows of many sizes, with zeros, subnormals of float32 and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    x[3] *= 2.0**-140
    x[5], x[7, ::2] = 0.0, -0.0
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    is_nan = a.isnan() & b.isnan()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | is_nan).all())


# What the bytes are: in NumPy, by the casts of ml_dtypes


def bytes_of(x: Any, dtype: Any) -> np.ndarray:
    """The codes of numbers, by a cast of ml_dtypes: one in each byte."""
    return np.asarray(x).astype(dtype).view(np.uint8)


def nibbles(codes: np.ndarray) -> bytes:
    """Two codes in a byte, the first one in the low nibble: OCP's order, and that of the libraries."""
    rows = [[low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)] for row in codes.tolist()]
    return b"".join(struct.pack(f"<{len(row)}B", *row) for row in rows)


def exponents(x: np.ndarray, emax: int) -> np.ndarray:
    """log2 of the scales of blocks of 32: OCP MX v1.0, 6.3. A block of zeros has the least."""
    amax = np.abs(x.reshape(len(x), -1, 32)).max(-1)
    return np.where(amax == 0, -127, np.frexp(np.where(amax == 0, 1, amax))[1] - 1 - emax).clip(-127, 127)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2"])
def test_the_codes_of_mx_are_the_casts_of_ml_dtypes(name: str) -> None:
    dtype, emax, largest = {
        "mxfp4": (E2M1, 2, 6.0),
        "mxfp8_e4m3": (E4M3, 8, 448.0),
        "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0),
        "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 7.5),
        "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 28.0),
    }[name]
    x = numbers(columns=96)
    codes = encode(x, name)
    exponent = exponents(x.numpy(), emax)
    assert codes.scales.numpy().tobytes() == bytes_of(2.0**exponent, E8M0).tobytes()
    scaled = x.double().numpy() / 2.0 ** exponent.repeat(32, -1)
    elements = bytes_of(scaled.clip(-largest, largest).astype(np.float32), dtype)
    packed = nibbles(elements) if name == "mxfp4" else elements.tobytes()
    assert codes.codes.numpy().tobytes() == packed
    assert codes.tensor_scale is None


def test_the_codes_of_nvfp4_are_the_casts_of_ml_dtypes() -> None:
    """In the order of TransformerEngine, each operation of float32 rounded by itself."""
    f32 = np.float32
    x = numbers(columns=96).numpy()
    x[3] = 0  # so far below the largest that the scale is 0: a test of its own
    codes = encode(torch.from_numpy(x), "nvfp4")
    whole = f32(2688) / np.abs(x).max()
    assert codes.tensor_scale is not None
    assert codes.tensor_scale.numpy() == whole
    amax = np.abs(x.reshape(len(x), -1, 16)).max(-1)
    scales = (amax * (whole * (f32(1) / f32(6)))).clip(0, 448).astype(E4M3)
    assert codes.scales.numpy().tobytes() == scales.tobytes()
    with np.errstate(divide="ignore"):
        divisor = scales.astype(f32) * (f32(1) / whole)
        by = np.minimum(f32(1) / divisor, np.finfo(f32).max)
    with np.errstate(over="ignore"):
        scaled = (x * by.repeat(16, -1)).clip(-6, 6)
    assert codes.codes.numpy().tobytes() == nibbles(bytes_of(scaled, E2M1))


@pytest.mark.parametrize("name", ["e4m3fn per tensor fp32", "e4m3fn per row fp32"])
def test_the_codes_of_fp8_are_the_casts_of_ml_dtypes(name: str) -> None:
    f32, x = np.float32, numbers().numpy()
    codes = encode(torch.from_numpy(x), name)
    amax = np.abs(x).max(None if "tensor" in name else -1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        by = np.where(amax == 0, f32(1), np.minimum(f32(448) / amax, np.finfo(f32).max))
    scales = codes.scales.numpy()
    assert np.array_equal(scales.reshape(by.shape), f32(1) / by)
    assert codes.codes.numpy().tobytes() == bytes_of((x * by).clip(-448, 448), E4M3).tobytes()


def test_integers_are_in_twos_complement() -> None:
    codes = encode(torch.tensor([[7.0, -7.0, 1.0, -1.0, 0.0]]), "int4 per 32")
    assert codes.codes.tolist() == [[0x97, 0xF1, 0x00]]  # the fifth one alone: its other nibble is 0
    assert codes.unpacked().tolist() == [[7, 9, 1, 15, 0]]


# Back to the numbers


@pytest.mark.parametrize("name", [*fpsim.BLOCKS, *MORE])
def test_decoded_codes_are_what_is_rounded(name: str) -> None:
    for x in (numbers(), numbers(1) * 2.0**100, numbers(2) * 2.0**-120):
        for axis in (None, 0):
            assert same_bits(decode(encode(x, name, axis=axis)), fpsim.round_to(x, name, axis=axis))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3fn per row fp32", "e5m2 per 32 saturate", "nvint4"])
def test_stochastic_codes_are_those_of_the_same_noise(name: str) -> None:
    x = numbers()
    try:
        fpsim.manual_seed(3)
        codes = encode(x, name, "stochastic")
        fpsim.manual_seed(3)
        assert same_bits(decode(codes), fpsim.round_to(x, name, "stochastic"))
    finally:
        fpsim.manual_seed(None)


def test_an_infinity_is_in_the_code_of_its_scale() -> None:
    x = torch.ones(2, 64)
    x[0, 3] = torch.inf
    codes = encode(x, "mxfp4")
    assert codes.scales.tolist() == [[255, 125], [125, 125]]  # NaN of E8M0: OCP MX v1.0, 5.4.1
    assert codes.unpacked()[0, :32].tolist() == [0] * 32
    assert decode(codes).isnan().tolist() == [[True] * 32 + [False] * 32, [False] * 64]
    whole = encode(x, "nvfp4")
    assert whole.tensor_scale is not None
    assert whole.tensor_scale.isnan()
    assert decode(whole).isnan().all()


def test_a_tensor_of_no_axis_and_an_odd_axis_are_packed() -> None:
    assert encode(torch.tensor(3.0), "mxfp4").codes.tolist() == [7]  # 6 times 2**-1
    assert decode(encode(torch.tensor(3.0), "mxfp4")).item() == 3.0
    x = torch.tensor([[1.0, 6.0], [-2.0, 0.5], [4.0, -3.0]])
    codes = encode(x, "e2m1fn per 3", axis=0)
    assert codes.codes.tolist() == [[0xC2, 0x17], [0x06, 0x0D]]  # the blocks run down, and so do the pairs
    assert torch.equal(decode(codes), x)


def test_what_has_no_codes_is_refused_in_words() -> None:
    x = torch.ones(2, 32)
    with pytest.raises(TypeError, match=r"x has dtype float64\. Blocks are looked at in float32"):
        encode(x.double(), "mxfp4")
    with pytest.raises(ValueError, match=r"x of shape \(0,\) has no elements"):
        encode(torch.zeros(0), "mxfp4")
    with pytest.raises(ValueError, match=r"a mask, and mxfp4 has no code for it"):
        encode(torch.tensor([torch.finfo(torch.float32).max, 1.0]), "mxfp4")
    with pytest.raises(ValueError, match=r"holds NaN and e2m1fn has no code"):
        encode(torch.tensor([torch.nan, 1.0]), "e2m1fn per 2 saturate")
    with pytest.raises(ValueError, match=r"holds NaN and int4 per 2 saturate has no code"):
        encode(torch.tensor([torch.nan, 1.0]), "int4 per 2 saturate")
    with pytest.raises(ValueError, match=r"axis=0 was given with 'fp16'"):
        encode(x, "fp16", axis=0)
    with pytest.raises(TypeError, match=r"decode got no fmt"):
        decode(torch.tensor([1]))  # type: ignore[call-overload]
    codes = encode(x, "mxfp4")
    with pytest.raises(ValueError, match=r"codes are of mxfp4, and fmt='nvfp4' was given"):
        decode(codes, "nvfp4")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"codes has shape \(2, 15\)\. Expected: codes of mxfp4 .* \(2, 16\)"):
        BlockCodes("mxfp4", (2, 32), codes.codes[:, :-1], codes.scales)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scales has dtype float32\. Expected: scales of mxfp4"):
        BlockCodes("mxfp4", (2, 32), codes.codes, codes.scales.float())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tensor_scale is None, of type NoneType"):
        BlockCodes("nvfp4", (1, 16), torch.zeros(1, 8).byte(), torch.zeros(1, 1).byte())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"was given, and mxfp4 has none"):
        BlockCodes("mxfp4", (2, 32), codes.codes, codes.scales, torch.tensor(1.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"share no scale"):
        BlockCodes("fp16", (1,), torch.zeros(1).int(), torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"encode was called under"):
        torch.vmap(lambda v: encode(v, "mxfp4"))(x)


# The tensors of torchao


def torchao_formats() -> Any:
    return pytest.importorskip("torchao.prototype.mx_formats", reason="torchao is not installed")


@pytest.mark.full
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_the_mx_tensor_of_torchao_is_built_of_our_codes(name: str) -> None:
    torchao_formats()
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    x = numbers(columns=96)
    dtype = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}[name]
    codes = encode(x, name)
    data = codes.codes if name == "mxfp4" else codes.codes.view(dtype)
    scales = codes.scales.view(torch.float8_e8m0fnu)
    theirs = MXTensor(data, scales, dtype, 32, torch.float32, KernelPreference.EMULATED, None, False)
    assert same_bits(theirs.dequantize(torch.float32), fpsim.round_to(x, name))


@pytest.mark.full
def test_the_nvfp4_tensor_of_torchao_is_built_of_our_codes() -> None:
    torchao_formats()
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = numbers(columns=96)
    one = encode(x, "e2m1fn per 16 e4m3fn")
    theirs = NVFP4Tensor(one.codes, one.scales.view(torch.float8_e4m3fn), 16, torch.float32)
    assert same_bits(theirs.dequantize(), fpsim.round_to(x, "e2m1fn per 16 e4m3fn"))
    # With a second scale torchao multiplies by its inverse, and before the element: the same codes, and float32
    # numbers of three roundings more, each off by half an ulp.
    two = encode(x, "nvfp4")
    assert two.tensor_scale is not None
    scales, inverse = two.scales.view(torch.float8_e4m3fn), two.tensor_scale.reciprocal()
    theirs = NVFP4Tensor(two.codes, scales, 16, torch.float32, inverse)
    ours, found = fpsim.round_to(x, "nvfp4"), theirs.dequantize()
    normal = ours.abs() >= 2.0**-126
    assert ((ours - found).abs()[normal] <= 4 * 2.0**-24 * ours.abs()[normal]).all()
    elements = decode(two.unpacked(), "e2m1fn")
    by_hand = elements * (inverse * scales.float()).repeat_interleave(16, -1)
    assert same_bits(found, by_hand)
