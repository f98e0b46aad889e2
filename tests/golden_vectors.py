"""Makes the golden vectors from the oracle in fractions: `python tests/golden_vectors.py --write` writes the file."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from fractions import Fraction

import golden_blocks
import oracle
import torch
from format_cases import oracle_format

import fpsim
from fpsim.tensors.golden import FILE, STREAM

NUMBERS = 62  # of each case
FEW = 4  # random bits
DETERMINISTIC = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd")
ABOUT = (
    "What numbers become in a format. `inputs` has the bits of float32 numbers for each format, in hexadecimal. The "
    "`outputs` of a case are those of these numbers in the same order; a NaN stands for any NaN. Overflow is that of "
    "the format: inf where it has one, else its largest number. A stochastic case is one call after "
    "fpsim.manual_seed(seed). Its noise is Threefry-4x32 with 12 rounds, keyed by `key`; with `random_bits` the first "
    "bits of each word decide, by the variant of IEEE P3109."
)


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def inputs_of(fmt: oracle.Format, seed: int) -> list[float]:
    """The borders of a format, then random numbers over its range; all are float32 numbers."""
    half, lowest = Fraction(1, 2), Fraction(2) ** fmt.lowest_exponent
    ulp, last = Fraction(1, 2**fmt.mantissa_bits), fmt.next_magnitude - fmt.largest
    middle = [fmt.smallest / 2, lowest - fmt.smallest / 2, 1 + ulp / 2, 1 + ulp * 3 / 2, fmt.largest + last / 2]
    borders = [fmt.smallest, fmt.smallest * 3 / 2, lowest, Fraction(1), fmt.largest, fmt.largest - last / 2]
    found = [0.0, math.inf, math.nan, float_of(1), float_of(0x7F7FFFFF)]
    for value in (*middle, *borders, fmt.next_magnitude * 2, fmt.largest * half):
        if not math.ldexp(1, -149) <= value < Fraction(2) ** 128 or Fraction(float(value)) != value:
            continue
        nearest = (
            struct.unpack("<f", struct.pack("<f", float(value)))[0] if value < Fraction(float_of(0x7F7FFFFF)) else 0.0
        )
        if nearest == value:
            found.append(nearest)
            if value in middle:
                found += [float_of(bits_of(nearest) - 1), float_of(bits_of(nearest) + 1)]
    found = list(dict.fromkeys(found))
    found = [y for x in found for y in ((x,) if math.isnan(x) else (x, -x))][:NUMBERS]
    numbers, low, high = random.Random(seed), oracle.floor_log2(fmt.smallest), oracle.floor_log2(fmt.largest)
    while len(found) < NUMBERS:
        exponent = numbers.randint(max(low - 2, -126), min(high + 1, 127))
        significand = (1 << 23 | numbers.getrandbits(23)) / 2**23
        found.append(math.copysign(math.ldexp(significand, exponent), numbers.random() - 0.5))
    return found


def key_of(seed: int) -> int:
    """The key of the first call after `manual_seed(seed)`: what torch's generator draws."""
    generator = torch.Generator().manual_seed(seed)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def stochastic(fmt: oracle.Format, x: float, overflow: str, word: int, random_bits: int | None, variant: str) -> float:
    """The rounded value of a float under these 32 random bits."""
    if not math.isfinite(x) or (not fmt.signed and x < fmt.smallest):
        return oracle.round_to(fmt, x, "toward_zero", overflow)
    magnitude = abs(Fraction(x))
    if magnitude >= fmt.next_magnitude:
        rounded = fmt.next_magnitude
    else:
        below, above, _ = fmt.neighbours(magnitude)
        r = 32 if random_bits is None else random_bits
        up = oracle.goes_up((magnitude - below) / (above - below), r, word >> (32 - r), variant)
        rounded = above if up else below
    if rounded > fmt.largest:
        beyond = {"inf": math.inf, "nan": math.nan, "saturate": float(fmt.largest)}[overflow]
        return math.copysign(beyond, x)
    if rounded == 0 and not fmt.has_negative_zero:
        return 0.0
    return math.copysign(float(rounded), x)


def words(numbers: list[float]) -> str:
    return " ".join("7fc00000" if math.isnan(x) else f"{bits_of(x):08x}" for x in numbers)


def content() -> str:
    """The file."""
    inputs, cases = {}, []
    for i, (name, f) in enumerate(fpsim.CATALOGUE.items()):
        fmt, overflow = oracle_format(f), f.resolve_overflow()
        x = inputs_of(fmt, i)
        inputs[name] = words(x)
        for rounding in DETERMINISTIC:
            case = {
                "format": name,
                "rounding": rounding,
                "seed": None,
                "key": None,
                "random_bits": None,
                "variant": "A",
            }
            cases.append({**case, "outputs": words([oracle.round_to(fmt, v, rounding, overflow) for v in x])})
        for seed, random_bits, variant in ((2 * i, None, "A"), (2 * i + 1, FEW, "ABC"[i % 3])):
            key = key_of(seed)
            case = {"format": name, "rounding": "stochastic", "seed": seed, "key": key, "random_bits": random_bits}
            noise = [oracle.noise_word(element, key) for element in range(len(x))]
            rounded = [stochastic(fmt, v, overflow, w, random_bits, variant) for v, w in zip(x, noise, strict=True)]
            cases.append({**case, "variant": variant, "outputs": words(rounded)})
    head = json.dumps({"about": ABOUT, "stream": STREAM})[1:-1]
    first = ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in inputs.items())
    rest = ",\n".join(f"  {json.dumps(case)}" for case in cases)
    return f'{{{head},\n"inputs": {{\n{first}\n}},\n"cases": [\n{rest}\n],\n{golden_blocks.section()}}}\n'


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(content(), encoding="ascii")
    else:
        sys.stdout.write(content())
