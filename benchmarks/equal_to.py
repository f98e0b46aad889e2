"""What of this library equals what of others, number by number: the table of docs/equal-to.md.

    python benchmarks/equal_to.py            # with the libraries that are installed; names those that are not
    python benchmarks/equal_to.py --write    # writes the rows of these into the page, and leaves the others

Each row rounds or multiplies the same float32 numbers with both, and counts where the results are not the same number
(NaN equals NaN). Nothing here needs a card: `pip install gfloat ml_dtypes torchao==0.18.0 fouroversix mmasim
bitsandbytes compressed-tensors loguru` installs the peers (`SKIP_CUDA_BUILD=1` for fouroversix), and qtorch compiles
its own code when it is imported.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fpsim

PAGE = Path(__file__).parents[1] / "docs" / "equal-to.md"
STEP = 251  # a prime: of all 2**32 patterns of float32, each 251st


class Row(NamedTuple):
    """One comparison. library: with its version. differ: None where nothing was compared."""

    library: str
    theirs: str
    ours: str
    compared: int
    differ: int

    def __str__(self) -> str:
        share = "0" if not self.differ else f"{self.differ:,} ({self.differ / self.compared:.1g})"
        return f"| {self.library} | `{self.theirs}` | `{self.ours}` | {self.compared:,} | {share} |"


def counted(library: str, theirs: str, ours: str, expected: Tensor, found: Tensor) -> Row:
    a, b = expected.double(), found.double()
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    return Row(f"{library} {version(library)}", theirs, ours, a.numel(), int(differ.sum()))


def patterns() -> Tensor:
    """17 million float32 of all sizes, with infinities and NaN."""
    return torch.arange(-(1 << 31), 1 << 31, STEP).int().view(torch.float32)


def tensors() -> Iterator[Tensor]:
    """Matrices as operands of products are: normal, of many sizes, numbers of bfloat16, heavy tails."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(512, 512, generator=generator)
        yield x
        yield x * torch.exp2(torch.randint(-12, 6, x.shape, generator=generator).float())
        yield x.bfloat16().float()
        yield x / torch.randn(512, 512, generator=generator).abs().clamp(min=0.05)


def by_tensors(library: str, theirs: str, ours: str, f: Callable[[Tensor], Tensor], axis: int = 1) -> Row:
    """f: what the library makes of a matrix, with blocks along its rows."""
    rows = [counted(library, theirs, ours, f(x), fpsim.round_to(x, ours, axis=axis)) for x in tensors()]
    return rows[0]._replace(compared=sum(r.compared for r in rows), differ=sum(r.differ for r in rows))


def in_our_order(theirs: Tensor, x: Tensor) -> Tensor:
    """What NVFP4 gives, but ours where both differ by the order alone in which an element and two scales multiply."""
    ours = fpsim.round_to(x, "nvfp4")
    return torch.where((theirs - ours).abs() <= 2.0**-22 * ours.abs(), ours, theirs)


# The libraries


def of_torch() -> Iterator[Row]:
    x = patterns()
    dtypes = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    for name, ours in zip(dtypes, ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"), strict=True):
        finite = x[x.isfinite()] if name == "float8_e4m3fn" else x
        words = {"overflow": "nan"} if ours.endswith("fnuz") else {}
        expected = finite.to(getattr(torch, name)).float()
        yield counted("torch", f"x.to(torch.{name})", ours, expected, rounded(finite, ours, **words))


def rounded(x: Tensor, fmt: str, **words: Any) -> Tensor:
    """To nearest, without the masks that `round_to` leaves: float32's largest number is one."""
    is_mask = x.abs() == torch.finfo(torch.float32).max
    below = torch.where(is_mask, x.sign() * torch.tensor(3.3895314e38), x)  # as far beyond every format
    return fpsim.round_to(below if fmt != "bf16" else torch.where(is_mask, x.sign() * torch.inf, x), fmt, **words)


def of_ml_dtypes() -> Iterator[Row]:
    import ml_dtypes

    x = patterns()
    for name, ours, words in (
        ("float8_e3m4", "e3m4", {}),
        ("float8_e4m3", "e4m3", {}),
        ("float8_e4m3b11fnuz", "e4m3b11fnuz", {"overflow": "nan"}),
        ("float8_e5m2", "e5m2", {}),
        ("float6_e2m3fn", "e2m3fn", {"overflow": "saturate"}),
        ("float6_e3m2fn", "e3m2fn", {"overflow": "saturate"}),
        ("float4_e2m1fn", "e2m1fn", {"overflow": "saturate"}),
    ):
        numbers = x[x.isfinite()] if "saturate" in words.values() else x  # those have no code for NaN
        with np.errstate(all="ignore"):
            expected = numbers.numpy().astype(getattr(ml_dtypes, name)).astype(np.float32)
        yield counted("ml_dtypes", name, ours, torch.from_numpy(expected), rounded(numbers, ours, **words))


def of_gfloat() -> Iterator[Row]:
    import gfloat
    from gfloat.formats import format_info_binary16, format_info_ocp_e4m3, format_info_ocp_e5m2

    x = patterns()[::7]
    formats = (format_info_binary16, "fp16", {}), (format_info_ocp_e5m2, "e5m2", {})
    for info, ours, words in (*formats, (format_info_ocp_e4m3, "e4m3fn", {"overflow": "nan"})):
        numbers = x[x.isfinite()]
        expected = torch.from_numpy(gfloat.round_ndarray(info, numbers.numpy().astype(np.float64)))
        yield counted("gfloat", f"round_ndarray {info.name}", ours, expected, rounded(numbers, ours, **words))


def of_torchao() -> Iterator[Row]:
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

    elements: dict[str, Any] = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    elements |= {"e2m3fn": DTYPE_FP6_E2M3, "e3m2fn": DTYPE_FP6_E3M2, "e2m1fn": torch.float4_e2m1fn_x2}
    for rule, mode in (("", "FLOOR"), (" ceil", "RCEIL"), (" even", "EVEN"), (" ceil_amax", "CEIL")):
        for element, dtype in elements.items():

            def theirs(x: Tensor, dtype: Any = dtype, mode: str = mode) -> Tensor:
                scale, data = to_mx(x, dtype, 32, ScaleCalculationMode[mode])
                return to_dtype(data, scale, dtype, 32, torch.float32).view_as(x)

            yield by_tensors("torchao", f"to_mx {element} {mode}", f"{element} per 32{rule}", theirs)

    def nvfp4(x: Tensor) -> Tensor:
        whole = per_tensor_amax_to_scale(x.abs().max())
        scales, data = nvfp4_quantize(x, per_tensor_scale=whole)
        theirs = NVFP4Tensor(data, scales, 16, torch.float32, per_tensor_scale=whole).dequantize(torch.float32)
        return in_our_order(theirs, x)

    yield by_tensors("torchao", "nvfp4_quantize", "nvfp4", nvfp4)
    of_rows = "nvfp4_quantize row by row"
    yield by_tensors("torchao", of_rows, "nvfp4_row", lambda x: torch.cat([nvfp4(row) for row in x.split(1)]))


def of_fouroversix() -> Iterator[Row]:
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, ScaleRule

    for rule, word in (("mse", "mse"), ("mae", "mae"), ("abs_max", "max")):

        def theirs(x: Tensor, rule: str = rule) -> Tensor:
            options = {"pack_values": False, "use_blackwell_scale_layout": False}
            q, scales, _ = quantize_to_fp4(x, fp4_format=DataType.nvfp4, scale_rule=ScaleRule[rule], **options)
            whole = torch.tensor(6 * 256.0) / x.abs().max()  # in our order: theirs differs in the last bit
            return (q.float().view(-1, 16) * scales.float().view(-1, 1) / whole).view_as(x)

        ours = f"e2m1fn per 16 e4m3fn fp32 {word}(amax/6,amax/4)"
        yield by_tensors("fouroversix", f"quantize_to_fp4 {rule}", ours, theirs)


# Operations of MMA-Sim: our accumulator, the class and its words, and formats of operands that are not the name's
CORES = (
    ("volta_fp16", "MMA", "Volta", "m8n8k4.f32.f16.f16.f32", None),
    ("turing_fp16", "MMA", "Turing", "m16n8k8.f32.f16.f16.f32", None),
    ("ampere_fp16", "MMA", "Ampere", "m16n8k16.f32.f16.f16.f32", None),
    ("ampere_bf16", "MMA", "Ampere", "m16n8k16.f32.bf16.bf16.f32", None),
    ("ampere_tf32", "MMA", "Ampere", "m16n8k8.f32.tf32.tf32.f32", None),
    ("ada_fp16", "MMA", "Ada Lovelace", "m16n8k16.f32.f16.f16.f32", None),
    ("ada_bf16", "MMA", "Ada Lovelace", "m16n8k16.f32.bf16.bf16.f32", None),
    ("ada_fp8", "MMA", "Ada Lovelace", "m16n8k32.f32.e4m3.e4m3.f32", None),
    ("hopper_fp16", "WGMMA", "Hopper", "m64n8k16.f32.f16.f16", None),
    ("hopper_bf16", "WGMMA", "Hopper", "m64n8k16.f32.bf16.bf16", None),
    ("hopper_fp8", "WGMMA", "Hopper", "m64n8k32.f32.e4m3.e4m3", None),
    ("hopper_fp8", "WGMMA", "Hopper", "m64n8k32.f32.e5m2.e4m3", ("e5m2", "e4m3fn")),
    ("blackwell_fp16", "TCGen05MMA", "Blackwell", "m64n8k16.kind::f16.f32.f16.f16", None),
    ("blackwell_bf16", "TCGen05MMA", "Blackwell", "m64n8k16.kind::f16.f32.bf16.bf16", None),
    ("blackwell_fp8", "TCGen05MMA", "Blackwell", "m64n8k32.kind::f8f6f4.f32.e4m3.e4m3", None),
    ("blackwell_fp8", "TCGen05MMA", "Blackwell", "m64n8k32.kind::f8f6f4.f32.e5m2.e2m3", ("e5m2", "e2m3fn")),
    ("blackwell_fp8", "TCGen05MMA", "Blackwell", "m64n8k32.kind::f8f6f4.f32.e3m2.e2m1", ("e3m2fn", "e2m1fn")),
    ("cdna3_fp16", "MFMA", "CDNA3", "f32_16x16x16_f16", None),
    ("cdna3_bf16", "MFMA", "CDNA3", "f32_16x16x16_bf16", None),
    ("cdna3_xf32", "MFMA", "CDNA3", "f32_16x16x8_xf32", None),
)
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "tf32": "float32", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2"}
SUBNORMAL = (0.01, 0.17, 0.5, 0.84)  # shares of operands
TERMS = (4, 64, 256, 1024, 4096)


def among_subnormals(shape: tuple[int, int], fmt: fpsim.FloatFormat, share: float, binades: int, seed: int) -> Tensor:
    """Numbers of a format over so many binades below 1, but a share of subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(-torch.randint(0, binades + 1, shape, generator=generator).double()).float()
    most = 2**fmt.mantissa_bits - 1
    steps = torch.randint(-most, most + 1, shape, generator=generator) * torch.tensor(fmt.smallest_subnormal)
    return fpsim.round_to(torch.where(torch.rand(shape, generator=generator) < share, steps, x), fmt)


def up_to_the_largest(shape: tuple[int, int], fmt: fpsim.FloatFormat, specials: float, seed: int) -> Tensor:
    """Numbers of the upper binades of a format, and a share of what is not finite there and of zeros."""
    generator = torch.Generator().manual_seed(seed)
    binades = torch.randint(0, 12 if fmt.exponent_bits < 8 else 80, shape, generator=generator)
    x = torch.randn(shape, generator=generator) * torch.exp2(-binades.float())
    x = fpsim.round_to((x * fmt.largest).clamp(-fmt.largest, fmt.largest), fmt)
    rest = [0.0, -0.0] + [torch.inf, -torch.inf] * fmt.has_inf + [torch.nan] * fmt.has_nan
    place = torch.randint(0, len(rest), shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < specials, torch.tensor(rest)[place], x)


def as_theirs(x: Tensor, fmt: fpsim.FloatFormat) -> Tensor:
    """Operands as MMA-Sim takes them: torch's dtypes; codes of 6 bits, and of 4 in bits 2 to 5, in bytes."""
    if str(fmt) in DTYPES:
        return x.to(getattr(torch, DTYPES[str(fmt)]))
    values = torch.tensor([fmt.decode(code) for code in range(2**fmt.bits)])
    return ((x[..., None] == values).int().argmax(-1) << (6 - fmt.bits)).to(torch.uint8)


def of_mmasim() -> Iterator[Row]:
    """20,480 results at each share of subnormals, and 3,072 of numbers up to the largest, with infinities and NaN."""
    from mmasim.amd import MFMA
    from mmasim.nv_ptx import MMA, WGMMA, TCGen05MMA

    kinds = {cls.__name__: cls for cls in (MMA, WGMMA, TCGen05MMA, MFMA)}
    for name, kind, arch, words, operands in CORES:
        accumulator = fpsim.as_accumulator(name)
        if operands is not None:
            accumulator = replace(accumulator, operands=operands)
        (f, g), operation, rows = accumulator.operand_formats, kinds[kind](arch, words), []
        assert f is not None
        assert g is not None
        ours = f"matmul {name}" + (f", operands={operands}" if operands else "")
        reach = min(f.min_exponent, g.min_exponent)
        pairs: list[tuple[Tensor, Tensor]] = []
        for share, k, part in product(SUBNORMAL, TERMS, (0, 1, 2, 3)):
            a = among_subnormals((64, k), f, share, -reach * part // 3, k + part)
            pairs.append((a, among_subnormals((k, 16), g, share, -reach * part // 4, k + part + 4)))
        for share in (0.0, 0.001, 0.01):
            pairs.append((up_to_the_largest((64, 64), f, share, 0), up_to_the_largest((64, 16), g, share, 1)))
        for a, b in pairs:
            expected = operation(as_theirs(a, f), as_theirs(b, g), torch.zeros(64, 16))
            found = fpsim.matmul(a, b, accumulator)
            rows.append(counted("mmasim", f"{kind} {arch} {words}", ours, expected, found))
        yield rows[0]._replace(compared=sum(r.compared for r in rows), differ=sum(r.differ for r in rows))


def of_bitsandbytes() -> Iterator[Row]:
    from bitsandbytes import functional

    maps = {"dynamic8": functional.create_dynamic_map(), "udynamic8": functional.create_dynamic_map(signed=False)}
    for name, book in maps.items():
        own = torch.tensor(fpsim.as_format(name).finite)  # type: ignore[union-attr]
        yield counted("bitsandbytes", "create_dynamic_map", f"values of {name}", book.sort().values, own.sort().values)

    def blockwise(x: Tensor) -> Tensor:
        codes, state = functional.quantize_blockwise(x, blocksize=256)
        return functional.dequantize_blockwise(codes, state)

    yield by_tensors("bitsandbytes", "quantize_blockwise 256", "dynamic8 per 256 fp32", blockwise)


def of_compressed_tensors() -> Iterator[Row]:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights

    def theirs(x: Tensor) -> Tensor:
        whole = generate_gparam(x.amin().view(1), x.amax().view(1))
        blocks = x.view(x.shape[0], -1, 16)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=whole)
        return in_our_order(fake_quantize(x, scale, zero, args, global_scale=whole), x)

    yield by_tensors("compressed-tensors", "fake_quantize NVFP4", "nvfp4", theirs)


def of_qtorch() -> Iterator[Row]:
    from qtorch.quant import float_quantize

    x = patterns()[::7]
    x = x[x.isfinite() & (x.abs() > 2.0**-126)]
    for ours, e, m in (("fp16", 5, 10), ("bf16", 8, 7), ("e5m2", 5, 2)):
        fits = x[x.abs() < float(fpsim.as_format(ours).largest)]  # type: ignore[union-attr]  # it saturates beyond
        expected = float_quantize(fits, e, m, "nearest")
        yield counted("qtorch", f"float_quantize({e}, {m}, 'nearest')", ours, expected, rounded(fits, ours))


LIBRARIES: dict[str, Callable[[], Iterator[Row]]] = {
    "torch": of_torch, "ml_dtypes": of_ml_dtypes, "gfloat": of_gfloat, "torchao": of_torchao,
    "fouroversix": of_fouroversix, "mmasim": of_mmasim, "bitsandbytes": of_bitsandbytes,
    "compressed-tensors": of_compressed_tensors, "qtorch": of_qtorch,
}  # fmt: skip


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def written(page: str, rows: list[Row]) -> str:
    """The page with the lines of these libraries in the place of those that it has of them."""
    before, head, rest = page.partition("| --- | --- | --- | ---: | ---: |\n")
    table, _, after = rest.partition("\n\n")
    kept = {name: [line for line in table.splitlines() if line.startswith(f"| {name} ")] for name in LIBRARIES}
    for name in {row.library.split()[0] for row in rows}:
        kept[name] = [str(row) for row in rows if row.library.split()[0] == name]
    return before + head + "\n".join(line for name in LIBRARIES for line in kept[name]) + "\n\n" + after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=LIBRARIES, default=[*LIBRARIES], help="these libraries alone")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/equal-to.md")
    options, rows = parser.parse_args(), []
    warnings.simplefilter("ignore")
    for name in options.only:
        if not is_installed(name):
            print(f"{name} is not installed: not compared")
            continue
        for row in LIBRARIES[name]():
            print(row, flush=True)
            rows.append(row)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
