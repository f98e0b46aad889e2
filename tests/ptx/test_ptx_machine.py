"""The machine that runs PTX on the CPU: each instruction against Python's integers and fractions; what it refuses."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from ptx_machine import Fault, Program
from ptx_text import UnknownPTX, parse

M32, M64 = 2**32 - 1, 2**64 - 1
# of kernels with two int64 arrays: what numba-cuda passes for each, and the addresses of the data
PARAMETERS = ",\n".join(f".param .u64 p{i}" for i in range(14))
HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
BEGIN = """
    .reg .pred %p<9>;
    .reg .b32 %r<30>;
    .reg .b64 %rd<30>;
    .reg .f32 %f<9>;
    .reg .f64 %fd<9>;
    ld.param.u64 %rd1, [p4];
    ld.param.u64 %rd2, [p11];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 32;
    add.s64 %rd4, %rd1, %rd3;
    mul.wide.u32 %rd5, %r1, 8;
    add.s64 %rd6, %rd2, %rd5;
"""


def program(body: str, variables: str = "", fuses: bool = False) -> Program:
    return Program(f"{HEAD}{variables}.visible .entry k(\n{PARAMETERS}\n)\n{{{BEGIN}{body}\n    ret;\n}}\n", fuses)


def results(
    body: str, rows: np.ndarray, threads: int | None = None, variables: str = "", fuses: bool = False
) -> list[int]:
    """Thread t finds four int64 at [%rd4] and leaves one at [%rd6]."""
    out = np.zeros(len(rows), np.uint64)
    rows.flags.writeable = False
    program(body, variables, fuses).launch(1, threads or len(rows), rows.reshape(-1), out)
    return [int(x) for x in out]


def operands(seed: int = 0, count: int = 300) -> np.ndarray:
    """Rows of four words: random, small, and near the ends."""
    source = random.Random(seed)
    words = [0, 1, 2, 31, 32, 33, 63, 64, 65, 255, 2**31 - 1, 2**31, M32, 2**32, 2**63 - 1, 2**63, M64, M64 - 31]
    rows = [
        [source.choice([*words, source.getrandbits(64), source.getrandbits(6)]) for _ in range(4)] for _ in range(count)
    ]
    return np.array(rows, np.uint64)


def signed(x: int, width: int) -> int:
    x &= 2**width - 1
    return x - 2**width if x >> (width - 1) else x


def low(x: int) -> int:
    return x & M32


LOAD32 = "".join(f"ld.global.u32 %r{i + 2}, [%rd4+{8 * i}];\n" for i in range(4))
LOAD64 = "".join(f"ld.global.u64 %rd{i + 7}, [%rd4+{8 * i}];\n" for i in range(4))
STORE32 = "cvt.u64.u32 %rd20, %r20; st.global.u64 [%rd6], %rd20;"
STORE64 = "st.global.u64 [%rd6], %rd20;"


def table(a: int, b: int, c: int) -> int:
    return (a & b) ^ (~c & M32)


def permuted(a: int, b: int, selector: int) -> int:
    data, found = struct.pack("<II", a, b), 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data[nibble & 7]
        found |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
    return found


def field(x: int, position: int, length: int, width: int, is_signed: bool) -> int:
    """As 9.7.1.20 has it, bit by bit."""
    position, length = position & 255, length & 255
    sign = x >> min(position + length - 1, width - 1) & 1 if is_signed and length else 0
    bits = [x >> (i + position) & 1 if i < length and i + position < width else sign for i in range(width)]
    return sum(bit << i for i, bit in enumerate(bits))


Naive = Callable[[int, int, int], int]
# of 32-bit words a, b, c
WORDS: dict[str, Naive] = {
    "add.s32 %r20, %r2, %r3": lambda a, b, c: a + b,
    "sub.s32 %r20, %r2, %r3": lambda a, b, c: a - b,
    "mul.lo.s32 %r20, %r2, %r3": lambda a, b, c: a * b,
    "mul.hi.u32 %r20, %r2, %r3": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r20, %r2, %r3": lambda a, b, c: signed(a, 32) * signed(b, 32) >> 32,
    "mad.lo.s32 %r20, %r2, %r3, %r4": lambda a, b, c: a * b + c,
    "min.s32 %r20, %r2, %r3": lambda a, b, c: min(signed(a, 32), signed(b, 32)),
    "max.u32 %r20, %r2, %r3": lambda a, b, c: max(a, b),
    "abs.s32 %r20, %r2": lambda a, b, c: abs(signed(a, 32)),
    "neg.s32 %r20, %r2": lambda a, b, c: -a,
    "not.b32 %r20, %r2": lambda a, b, c: ~a,
    "and.b32 %r20, %r2, -16": lambda a, b, c: a & ~15,
    "or.b32 %r20, %r2, %r3": lambda a, b, c: a | b,
    "xor.b32 %r20, %r2, %r3": lambda a, b, c: a ^ b,
    "shl.b32 %r20, %r2, %r3": lambda a, b, c: a << min(b, 32),
    "shr.u32 %r20, %r2, %r3": lambda a, b, c: a >> min(b, 32),
    "shr.s32 %r20, %r2, %r3": lambda a, b, c: signed(a, 32) >> min(b, 32),
    "shf.l.wrap.b32 %r20, %r2, %r3, %r4": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.wrap.b32 %r20, %r2, %r3, %r4": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.l.clamp.b32 %r20, %r2, %r3, %r4": lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32,
    "shf.r.clamp.b32 %r20, %r2, %r3, %r4": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "popc.b32 %r20, %r2": lambda a, b, c: a.bit_count(),
    "clz.b32 %r20, %r2": lambda a, b, c: 32 - a.bit_length(),
    "bfind.u32 %r20, %r2": lambda a, b, c: a.bit_length() - 1,
    "brev.b32 %r20, %r2": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfe.u32 %r20, %r2, %r3, %r4": lambda a, b, c: field(a, b, c, 32, False),
    "bfe.s32 %r20, %r2, %r3, %r4": lambda a, b, c: field(a, b, c, 32, True),
    "lop3.b32 %r20, %r2, %r3, %r4, 149": table,  # (0xF0 & 0xCC) ^ ~0xAA & 0xFF: the ISA's way to write a table
    "prmt.b32 %r20, %r2, %r3, %r4": permuted,
    "prmt.b32 %r20, %r2, %r3, 0x5410": lambda a, b, c: a & 0xFFFF | (b & 0xFFFF) << 16,
    "setp.lt.s32 %p1, %r2, %r3; selp.b32 %r20, 5, %r4, %p1": lambda a, b, c: 5 if signed(a, 32) < signed(b, 32) else c,
    "setp.hi.u32 %p1, %r2, %r3; selp.b32 %r20, 5, %r4, %p1": lambda a, b, c: 5 if a > b else c,
    "setp.eq.s32 %p2, %r4, 0; setp.ge.and.u32 %p1, %r2, %r3, %p2; selp.u32 %r20, 1, 0, %p1": lambda a, b, c: int(
        a >= b and c == 0
    ),
    "mov.u32 %r20, 7; setp.ne.s32 %p1, %r2, 0; @!%p1 add.s32 %r20, %r20, 1": lambda a, b, c: 7 + (a == 0),
    "cvt.u32.u8 %r20, %r2": lambda a, b, c: a & 255,
    "cvt.s32.s8 %r20, %r2": lambda a, b, c: signed(a, 8),
    "mov.b64 %rd9, {%r2, %r3}; mov.b64 {%r5, %r20}, %rd9": lambda a, b, c: b,
}


@pytest.mark.parametrize("instruction", WORDS)
def test_an_instruction_on_32_bits_does_what_python_says(instruction: str) -> None:
    rows = operands()
    expected = [WORDS[instruction](*(low(int(x)) for x in row[:3])) & M32 for row in rows]
    assert results(f"{LOAD32}{instruction}; {STORE32}", rows) == expected


LONG: dict[str, Naive] = {
    "add.s64 %rd20, %rd7, %rd8": lambda a, b, c: a + b,
    "mul.lo.s64 %rd20, %rd7, %rd8": lambda a, b, c: a * b,
    "mul.hi.u64 %rd20, %rd7, %rd8": lambda a, b, c: a * b >> 64,
    "mad.lo.s64 %rd20, %rd7, %rd8, %rd9": lambda a, b, c: a * b + c,
    "cvt.u32.u64 %r5, %rd7; cvt.u32.u64 %r6, %rd8; mul.wide.s32 %rd20, %r5, %r6": lambda a, b, c: (
        signed(a, 32) * signed(b, 32)
    ),
    "cvt.u32.u64 %r5, %rd7; mad.wide.u32 %rd20, %r5, 12, %rd8": lambda a, b, c: low(a) * 12 + b,
    "min.s64 %rd20, %rd7, %rd8": lambda a, b, c: min(signed(a, 64), signed(b, 64)),
    "max.u64 %rd20, %rd7, %rd8": lambda a, b, c: max(a, b),
    "cvt.u32.u64 %r5, %rd8; shl.b64 %rd20, %rd7, %r5": lambda a, b, c: a << min(low(b), 64),
    "cvt.u32.u64 %r5, %rd8; shr.u64 %rd20, %rd7, %r5": lambda a, b, c: a >> min(low(b), 64),
    "cvt.u32.u64 %r5, %rd8; shr.s64 %rd20, %rd7, %r5": lambda a, b, c: signed(a, 64) >> min(low(b), 64),
    "clz.b64 %r5, %rd7; cvt.u64.u32 %rd20, %r5": lambda a, b, c: 64 - a.bit_length(),
    "popc.b64 %r5, %rd7; cvt.u64.u32 %rd20, %r5": lambda a, b, c: a.bit_count(),
    "bfind.u64 %r5, %rd7; cvt.s64.s32 %rd20, %r5": lambda a, b, c: a.bit_length() - 1,
    "cvt.s64.s32 %rd20, %rd7": lambda a, b, c: signed(a, 32),
    "setp.gt.s64 %p1, %rd7, %rd8; selp.b64 %rd20, %rd9, -1, %p1": lambda a, b, c: (
        c if signed(a, 64) > signed(b, 64) else -1
    ),
    "bfe.s64 %rd20, %rd7, 5, 9": lambda a, b, c: field(a, 5, 9, 64, True),
    "bfi.b64 %rd20, %rd7, %rd8, 60, 9": lambda a, b, c: b & (2**60 - 1) | (a & 15) << 60,
    "or.b64 %rd9, %rd8, 1; div.u64 %rd20, %rd7, %rd9": lambda a, b, c: a // (b | 1),
    "or.b64 %rd9, %rd8, 1; rem.u64 %rd20, %rd7, %rd9": lambda a, b, c: a % (b | 1),
    "shr.u64 %rd9, %rd8, 40; or.b64 %rd9, %rd9, 1; rem.s64 %rd20, %rd7, %rd9": lambda a, b, c: (
        abs(signed(a, 64)) % (b >> 40 | 1) * (-1 if a >> 63 else 1)
    ),
}


@pytest.mark.parametrize("instruction", LONG)
def test_an_instruction_on_64_bits_does_what_python_says(instruction: str) -> None:
    rows = operands()
    expected = [LONG[instruction](*(int(x) for x in row[:3])) & M64 for row in rows]
    assert results(f"{LOAD64}{instruction}; {STORE64}", rows) == expected


def numbers(seed: int = 0, count: int = 400) -> np.ndarray:
    """Rows of four float64 that are float32 too: of all sizes, zeros of both signs, infinities, ties."""
    source = random.Random(seed)
    special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        math.inf,
        -math.inf,
        math.nan,
        2.0**-149,
        -(2.0**-126),
        2.5,
        3.5,
        -0.5,
        1 + 2.0**-23,
    ]
    rows = [
        [
            source.choice([*special, source.gauss(0, 1), source.gauss(0, 1) * 2.0 ** source.randrange(-140, 127)])
            for _ in range(4)
        ]
        for _ in range(count)
    ]
    with np.errstate(all="ignore"):
        return np.array(rows).astype("f4").astype("f8")


def exact(operation: Callable[..., Fraction], kind: type) -> Callable[..., float]:
    """An operation on fractions with one rounding at the end; NumPy's own where a number is not a fraction, or zero."""

    def compute(*values: float) -> float:
        if not all(map(math.isfinite, values)) or operation(*map(Fraction, values)) == 0:
            return float(operation(*map(kind, values)))  # type: ignore[arg-type]
        return rounded(operation(*map(Fraction, values)), kind)

    return compute


def rounded(value: Fraction, kind: type) -> float:
    """A fraction to nearest even, in float32 or float64."""
    bits, least, largest = (53, -1074, 1024) if kind is np.float64 else (24, -149, 128)
    exponent = math.floor(math.log2(abs(value.numerator)) - math.log2(value.denominator))
    exponent += (abs(value) >= Fraction(2) ** (exponent + 1)) - (abs(value) < Fraction(2) ** exponent)
    spacing = Fraction(2) ** max(exponent - bits + 1, least)
    result = round(value / spacing) * spacing
    return math.copysign(math.inf if abs(result) >= Fraction(2) ** largest else float(abs(result)), value)


ARITHMETIC = {
    "add": (2, lambda a, b: a + b),
    "sub.rn": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma.rn": (3, lambda a, b, c: a * b + c),
    "div.rn": (2, lambda a, b: a / b),
    "rcp.rn": (1, lambda a: 1 / a),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_has_one_rounding(name: str, width: int) -> None:
    count, operation = ARITHMETIC[name]
    kind, register = (np.float32, "f") if width == 32 else (np.float64, "fd")
    rows = numbers()
    if name in ("div.rn", "rcp.rn"):
        rows = rows[(rows[:, 0] != 0) & (rows[:, 1] != 0)].copy()
    load = "".join(f"ld.global.f64 %fd{i + 1}, [%rd4+{8 * i}];\n" for i in range(3))
    if width == 32:
        load += "".join(f"cvt.rn.f32.f64 %f{i + 1}, %fd{i + 1};\n" for i in range(3))
    inputs = ", ".join(f"%{register}{i + 1}" for i in range(count))
    store = "cvt.f64.f32 %fd8, %f8;" if width == 32 else ""
    got = results(f"{load}{name}.f{width} %{register}8, {inputs}; {store} st.global.f64 [%rd6], %fd8;", rows.view("u8"))
    for row, bits in zip(rows, got, strict=True):
        wanted, found = exact(operation, kind)(*row[:count]), struct.unpack("<d", struct.pack("<Q", bits))[0]
        same = struct.pack("<d", wanted) == struct.pack("<d", found) or (math.isnan(wanted) and math.isnan(found))
        assert same, (row, found, wanted)


def test_extremes_prefer_numbers_and_order_the_zeros() -> None:
    nan, inf = math.nan, math.inf
    rows = np.array([[1, 2], [2, 1], [0.0, -0.0], [-0.0, 0.0], [nan, 1], [1, nan], [-inf, nan], [-1, -2]])
    rows = np.concatenate([rows, rows], axis=1)
    load = "ld.global.v2.f64 {%fd1, %fd2}, [%rd4];"
    for name, wanted in (("min", "1 1 -0 -0 1 1 -inf -2"), ("max", "2 2 0 0 1 1 -inf -1")):
        got = results(f"{load} {name}.f64 %fd3, %fd1, %fd2; st.global.f64 [%rd6], %fd3;", rows.view("u8").copy())
        assert [struct.unpack("<d", struct.pack("<Q", x))[0].hex() for x in got] == [
            float(w).hex() for w in wanted.split()
        ]


def test_floats_become_integers_within_their_range() -> None:
    values = [0.5, 1.5, 2.5, -1.7, 1e30, -1e30, math.nan, math.inf, -0.0]
    rows = np.array([[value] * 4 for value in values]).view("u8")
    top = 2**63
    for how, wanted in (
        ("rzi.s64", [0, 1, 2, -1, top - 1, -top, -top, top - 1, 0]),
        ("rni.s64", [0, 2, 2, -2, top - 1, -top, -top, top - 1, 0]),
        ("rmi.s64", [0, 1, 2, -2, top - 1, -top, -top, top - 1, 0]),
        ("rzi.u64", [0, 1, 2, 0, M64, 0, top, M64, 0]),
    ):
        got = results(f"ld.global.f64 %fd1, [%rd4]; cvt.{how}.f64 %rd20, %fd1; {STORE64}", rows.copy())
        assert got == [x & M64 for x in wanted]


def test_a_product_may_be_fused_with_its_sum_where_ptx_allows_it() -> None:
    x = 1 + 2.0**-30
    rows = np.array([[x, x, -(x * x), 0]]).view("u8")  # x * x - round(x * x) is 0, or what was rounded away
    load = "ld.global.v2.f64 {%fd1, %fd2}, [%rd4]; ld.global.f64 %fd3, [%rd4+16];"
    for rn, fuses, wanted in (("", False, 0.0), ("", True, 2.0**-60), (".rn", True, 0.0)):
        body = f"{load} mul{rn}.f64 %fd4, %fd1, %fd2; add.f64 %fd5, %fd4, %fd3; st.global.f64 [%rd6], %fd5;"
        got = results(body, rows.copy(), fuses=fuses)
        assert struct.unpack("<d", struct.pack("<Q", got[0]))[0] == wanted


SUM = """
    mov.u32 %r5, s;
    shl.b32 %r6, %r1, 3;
    add.s32 %r7, %r5, %r6;
    ld.global.u64 %rd10, [%rd4];
    st.shared.u64 [%r7], %rd10;
    mov.u32 %r8, 4;
LOOP:
    BARRIER
    setp.ge.u32 %p1, %r1, %r8;
    @%p1 bra NEXT;
    shl.b32 %r9, %r8, 3;
    add.s32 %r10, %r7, %r9;
    ld.shared.u64 %rd11, [%r10];
    ld.shared.u64 %rd12, [%r7];
    add.s64 %rd13, %rd11, %rd12;
    st.shared.u64 [%r7], %rd13;
NEXT:
    shr.u32 %r8, %r8, 1;
    setp.ne.s32 %p2, %r8, 0;
    @%p2 bra LOOP;
    BARRIER
    ld.shared.u64 %rd20, [s];
    st.global.u64 [%rd6], %rd20;
"""
SHARED = ".shared .align 8 .b8 s[64];\n"


def test_threads_of_a_block_wait_for_one_another() -> None:
    rows = operands()[:8]
    assert results(SUM.replace("BARRIER", "bar.sync 0;"), rows.copy(), variables=SHARED) == [int(rows[:, 0].sum())] * 8


def test_a_block_has_no_more_threads_than_the_kernel_is_assembled_for() -> None:
    bounded = Program(f"{HEAD}.visible .entry k(.param .u64 p)\n.maxntid 32, 1, 1\n{{ ret; }}\n")
    bounded.launch_words(1, 32, [0], [])
    with pytest.raises(Fault, match="33 threads in a block: the kernel is assembled for 32"):
        bounded.launch_words(1, 33, [0], [])


def test_a_missing_barrier_is_a_race() -> None:
    for missing in (0, 1):
        parts = SUM.split("BARRIER")
        body = (
            parts[0]
            + ("" if missing == 0 else "bar.sync 0;")
            + parts[1]
            + ("" if missing else "bar.sync 0;")
            + parts[2]
        )
        with pytest.raises(Fault, match="races with another thread"):
            results(body, operands()[:8].copy(), variables=SHARED)


def test_atomics_change_memory_and_give_what_was_there() -> None:
    rows = operands()[:100]
    for name, wanted in (
        ("add.u64", int(rows[:, 0].sum())),
        ("max.u64", int(rows[:, 0].max())),
        ("min.s64", min(signed(int(x), 64) for x in [*rows[:, 0], 0])),
    ):
        out = np.zeros(100, np.uint64)
        given = rows.reshape(-1).copy()
        body = f"ld.global.u64 %rd10, [%rd4]; atom.global.{name} %rd11, [%rd2], %rd10;"
        body += "red.relaxed.gpu.global.add.u64 [%rd2+8], 1;"
        program(body).launch(1, 100, given, out)
        assert out[:2].tolist() == [wanted % 2**64, 100]


FAULTY = {
    "leaves the arrays": "ld.global.u64 %rd20, [%rd4+8000];",
    "leaves the arrays that": "st.global.u64 [%rd1], %rd1;",  # which is read only
    "is not aligned": "ld.global.u32 %r20, [%rd4+2];",
    "is not aligned to": "ld.global.v2.u64 {%rd20, %rd21}, [%rd4+8];",
    "divides by zero": "mov.u64 %rd9, 0; div.s64 %rd20, %rd1, %rd9;",
    "goes round": "LOOP: bra LOOP;",
    "wait at different barriers": "setp.eq.s32 %p1, %r1, 0; @%p1 bra END; bar.sync 0; END:",
}


@pytest.mark.parametrize("message", FAULTY)
def test_what_a_card_would_not_survive_is_a_fault(message: str) -> None:
    rows = np.zeros((10, 4), np.uint64)
    assert rows.ctypes.data % 16 == 0
    with pytest.raises(Fault, match=message):
        results(FAULTY[message], rows)


UNKNOWN = {
    "an instruction": "sin.approx.f32 %f1, %f2;",
    "an instruction, in": "add.ftz.f32 %f1, %f2, %f3;",
    "has 64 bits, not 32": "add.s32 %r1, %rd1, 1;",
    "an operand, '%warpid'": "mov.u32 %r1, %warpid;",
    "a barrier of a part": "bar.sync 1;",
    "a comparison": "setp.lt.b32 %p1, %r1, %r2;",
    "a label": "bra NOWHERE;",
    "is not a register": "ld.global.u32 %r1, [nothing];",
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_what_is_not_known_is_an_error(message: str) -> None:
    with pytest.raises(UnknownPTX, match=message):
        program(UNKNOWN[message])


def test_other_text_than_one_kernel_is_an_error() -> None:
    for text in (
        "",
        HEAD,
        f"{HEAD}.func f() {{ ret; }}\n.entry k() {{ ret; }}",
        f"{HEAD}.entry k() .reqntid 32 {{ ret; }}",
        f"{HEAD}.entry k() .maxntid 32, 2 {{ ret; }}",
    ):
        with pytest.raises(UnknownPTX):
            parse(text)
