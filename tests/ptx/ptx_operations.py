"""What each PTX instruction does, as LLVM IR: one function for each family of opcodes, found by the whole opcode.

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0; the section stands at each function. An opcode or a suffix
that no pattern here matches raises UnknownPTX. Control flow and barriers are in ptx_thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx_function import DIVISION, FLOATS, Function
from ptx_text import Instruction

Operation = Callable[[Function, re.Match[str], Instruction], None]
_OPERATIONS: list[tuple[re.Pattern[str], Operation]] = []


def operation(pattern: str) -> Callable[[Operation], Operation]:
    def keep(function: Operation) -> Operation:
        _OPERATIONS.append((re.compile(pattern), function))
        return function

    return keep


def translate(f: Function, i: Instruction) -> None:
    """Write one instruction that is not a branch. Raises UnknownPTX."""
    for pattern, function in _OPERATIONS:
        if match := pattern.fullmatch(i.opcode):
            function(f, match, i)
            return
    raise f.unknown("an instruction")


# Integers, 9.7.1


@operation(r"(add|sub|and|or|xor|mul)(?:(?<=mul)\.lo)?\.([usb]\d+|pred)")
def _binary(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = 1 if match.group(2) == "pred" else int(match.group(2)[1:])
    d, a, b = i.operands
    f.put(d, f.new(f"{match.group(1)} i{width} {f.bits(a, width)}, {f.bits(b, width)}"), width)


@operation(r"(mul|mad)\.(wide|hi)\.([us])(16|32|64)")
def _wide_product(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, part, sign, width = match.group(1), match.group(2), match.group(3), int(match.group(4))
    extend = "sext" if sign == "s" else "zext"
    a, b = (f.new(f"{extend} i{width} {f.bits(x, width)} to i{2 * width}") for x in i.operands[1:3])
    value, kept = f.new(f"mul i{2 * width} {a}, {b}"), 2 * width
    if part == "hi":
        high = f.new(f"lshr i{2 * width} {value}, {width}")
        value, kept = f.new(f"trunc i{2 * width} {high} to i{width}"), width
    if name == "mad":
        value = f.new(f"add i{kept} {value}, {f.bits(i.operands[3], kept)}")
    f.put(i.operands[0], value, kept)


@operation(r"mad\.lo\.[us](\d+)")
def _mad(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(1))
    d, a, b, c = i.operands
    product = f.new(f"mul i{width} {f.bits(a, width)}, {f.bits(b, width)}")
    f.put(d, f.new(f"add i{width} {product}, {f.bits(c, width)}"), width)


@operation(r"(div|rem)\.([us])(\d+)")
def _division(f: Function, match: re.Match[str], i: Instruction) -> None:
    sign, width = match.group(2), int(match.group(3))
    a, b = (f.bits(x, width) for x in i.operands[1:])
    is_good = f.new(f"icmp ne i{width} {b}, 0")
    if sign == "s":
        lowest, minus_one = f.new(f"icmp ne i{width} {a}, {1 << (width - 1)}"), f.new(f"icmp ne i{width} {b}, -1")
        is_good = f.new(f"and i1 {is_good}, {f.new(f'or i1 {lowest}, {minus_one}')}")
    f.check(is_good, DIVISION)
    f.put(i.operands[0], f.new(f"{sign}{match.group(1)} i{width} {a}, {b}"), width)


@operation(r"(min|max)\.([us])(16|32|64)")
def _extreme(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, width = match.group(2) + match.group(1), int(match.group(3))
    d, a, b = i.operands
    value = f"call i{width} @llvm.{name}.i{width}(i{width} {f.bits(a, width)}, i{width} {f.bits(b, width)})"
    f.put(d, f.new(value), width)


@operation(r"(neg|abs|not)\.(?:[sb](\d+)|pred)")
def _unary(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, width = match.group(1), int(match.group(2) or 1)
    a = f.bits(i.operands[1], width)
    if name == "not":
        value = f"xor i{width} {a}, -1"
    elif name == "neg":
        value = f"sub i{width} 0, {a}"
    else:
        value = f"call i{width} @llvm.abs.i{width}(i{width} {a}, i1 false)"
    f.put(i.operands[0], f.new(value), width)


def _within(f: Function, width: int, amount: str) -> tuple[str, str]:
    """Whether an unsigned int32 is below `width`, and it as an integer of that width."""
    is_within = f.new(f"icmp ult i32 {amount}, {width}")
    if width > 32:
        amount = f.new(f"zext i32 {amount} to i{width}")
    elif width < 32:
        amount = f.new(f"trunc i32 {amount} to i{width}")
    return is_within, amount


def _shifted(f: Function, name: str, width: int, value: str, amount: str) -> str:
    """A shift by a width or more gives zero, or copies of the sign; LLVM's gives no value."""
    is_within, amount = _within(f, width, amount)
    amount = f.new(f"select i1 {is_within}, i{width} {amount}, i{width} {width - 1 if name == 'ashr' else 0}")
    value = f.new(f"{name} i{width} {value}, {amount}")
    return value if name == "ashr" else f.new(f"select i1 {is_within}, i{width} {value}, i{width} 0")


@operation(r"(shl\.b|shr\.[usb])(16|32|64)")
def _shift(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, width = match.group(1), int(match.group(2))
    name = "shl" if name == "shl.b" else ("ashr" if name == "shr.s" else "lshr")
    d, a, amount = i.operands
    f.put(d, _shifted(f, name, width, f.bits(a, width), f.bits(amount, 32)), width)


@operation(r"shf\.([lr])\.(wrap|clamp)\.b32")
def _funnel(f: Function, match: re.Match[str], i: Instruction) -> None:
    d, low, high, amount = i.operands
    n = f.bits(amount, 32)
    if match.group(2) == "wrap":
        value = f"call i32 @llvm.fsh{match.group(1)}.i32(i32 {f.bits(high, 32)}, i32 {f.bits(low, 32)}, i32 {n})"
        f.put(d, f.new(value), 32)
        return
    pair = f.new(f"shl i64 {f.new(f'zext i32 {f.bits(high, 32)} to i64')}, 32")
    pair = f.new(f"or i64 {pair}, {f.new(f'zext i32 {f.bits(low, 32)} to i64')}")
    n = f.new(f"zext i32 {f.new(f'call i32 @llvm.umin.i32(i32 {n}, i32 32)')} to i64")
    if match.group(1) == "r":
        value = f.new(f"lshr i64 {pair}, {n}")
    else:
        value = f.new(f"lshr i64 {f.new(f'shl i64 {pair}, {n}')}, 32")
    f.put(d, f.new(f"trunc i64 {value} to i32"), 32)


@operation(r"(popc|clz|brev|bfind\.u)(?:\.b|(?<=u))(32|64)")
def _counted(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, width = match.group(1), int(match.group(2))
    a = f.bits(i.operands[1], width)
    if name == "brev":
        f.put(i.operands[0], f.new(f"call i{width} @llvm.bitreverse.i{width}(i{width} {a})"), width)
        return
    if name == "popc":
        value = f.new(f"call i{width} @llvm.ctpop.i{width}(i{width} {a})")
    else:
        value = f.new(f"call i{width} @llvm.ctlz.i{width}(i{width} {a}, i1 false)")
    if name == "bfind.u":  # of zero 0xffffffff, which is -1
        value = f.new(f"sub i{width} {width - 1}, {value}")
    f.put(i.operands[0], f.new(f"trunc i64 {value} to i32") if width == 64 else value, 32)


def _low_bits(f: Function, width: int, count: str) -> str:
    """A mask of the `count` lowest bits."""
    return f.new(f"xor i{width} {_shifted(f, 'shl', width, '-1', count)}, -1")


@operation(r"bfe\.([us])(32|64)")
def _field(f: Function, match: re.Match[str], i: Instruction) -> None:
    sign, width = match.group(1), int(match.group(2))
    d, a, position, length = i.operands
    value, first, count = f.bits(a, width), f.bits(position, 32), f.bits(length, 32)
    first, count = f.new(f"and i32 {first}, 255"), f.new(f"and i32 {count}, 255")
    mask = _low_bits(f, width, count)
    found = _shifted(f, "ashr" if sign == "s" else "lshr", width, value, first)
    found = f.new(f"and i{width} {found}, {mask}")
    if sign == "s":  # the field's highest bit, or the number's where the field goes beyond it; of no bits 0
        end = f.new(f"add i32 {first}, {count}")
        last = f.new(f"call i32 @llvm.umin.i32(i32 {f.new(f'sub i32 {end}, 1')}, i32 {width - 1})")
        bit = f.new(f"and i{width} {_shifted(f, 'lshr', width, value, last)}, 1")
        copies = f.new(f"and i{width} {f.new(f'sub i{width} 0, {bit}')}, {f.new(f'xor i{width} {mask}, -1')}")
        found = f.new(f"or i{width} {found}, {copies}")
        is_empty = f.new(f"icmp eq i32 {count}, 0")
        found = f.new(f"select i1 {is_empty}, i{width} 0, i{width} {found}")
    f.put(d, found, width)


@operation(r"bfi\.b(32|64)")
def _inserted(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(1))
    d, a, b, position, length = i.operands
    first, count = f.bits(position, 32), f.bits(length, 32)
    first, count = f.new(f"and i32 {first}, 255"), f.new(f"and i32 {count}, 255")
    mask = _shifted(f, "shl", width, _low_bits(f, width, count), first)
    placed = f.new(f"and i{width} {_shifted(f, 'shl', width, f.bits(a, width), first)}, {mask}")
    rest = f.new(f"and i{width} {f.bits(b, width)}, {f.new(f'xor i{width} {mask}, -1')}")
    f.put(d, f.new(f"or i{width} {placed}, {rest}"), width)


@operation(r"lop3\.b32")
def _three_inputs(f: Function, match: re.Match[str], i: Instruction) -> None:
    d, *inputs, table = i.operands
    values = [f.bits(x, 32) for x in inputs]
    inverted = [f.new(f"xor i32 {x}, -1") for x in values]
    found = "0"
    for row in range(8):  # bit `row` of the table: the result where a, b, c are the bits of `row`, a the highest
        if int(f.bits(table, 32)) >> row & 1:
            a, b, c = (values[k] if row >> (2 - k) & 1 else inverted[k] for k in range(3))
            both = f.new(f"and i32 {a}, {b}")
            found = f.new(f"or i32 {found}, {f.new(f'and i32 {both}, {c}')}")
    f.put(d, found, 32)


@operation(r"prmt\.b32")
def _permuted(f: Function, match: re.Match[str], i: Instruction) -> None:
    d, a, b, selector = i.operands
    pair = f.new(f"shl i64 {f.new(f'zext i32 {f.bits(b, 32)} to i64')}, 32")
    pair = f.new(f"or i64 {pair}, {f.new(f'zext i32 {f.bits(a, 32)} to i64')}")
    chosen = f.new(f"zext i32 {f.bits(selector, 32)} to i64")
    found = "0"
    for byte in range(4):
        nibble = f.new(f"lshr i64 {chosen}, {4 * byte}")
        place = f.new(f"mul i64 {f.new(f'and i64 {nibble}, 7')}, 8")
        value = f.new(f"trunc i64 {f.new(f'lshr i64 {pair}, {place}')} to i8")
        is_sign = f.new(f"icmp ne i64 {f.new(f'and i64 {nibble}, 8')}, 0")
        copies = f.new(f"ashr i8 {value}, 7")
        value = f.new(f"zext i8 {f.new(f'select i1 {is_sign}, i8 {copies}, i8 {value}')} to i32")
        found = f.new(f"or i32 {found}, {f.new(f'shl i32 {value}, {8 * byte}')}")
    f.put(d, found, 32)


# Comparison and selection, 9.7.6

_UNSIGNED = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
_FLOATING = {"num": "ord", "nan": "uno", **{c: "o" + c for c in "eq ne lt le gt ge".split()}}
_FLOATING |= {f"{c}u": "u" + c for c in "eq ne lt le gt ge".split()}


@operation(r"setp\.(\w+?)(?:\.(and|or|xor))?\.([usbf])(16|32|64)")
def _compared(f: Function, match: re.Match[str], i: Instruction) -> None:
    comparison, joined, kind, width = match.group(1), match.group(2), match.group(3), int(match.group(4))
    d, a, b = i.operands[:3]
    if kind == "f":
        if comparison not in _FLOATING:
            raise f.unknown("a comparison")
        found = f.new(f"fcmp {_FLOATING[comparison]} {FLOATS[width]} {f.number(a, width)}, {f.number(b, width)}")
    else:
        allowed = ("eq", "ne") if kind == "b" else ("eq", "ne", "lt", "le", "gt", "ge", *_UNSIGNED)
        if comparison not in allowed:
            raise f.unknown("a comparison")
        ordered = _UNSIGNED.get(comparison) or (comparison if comparison in ("eq", "ne") else kind + comparison)
        found = f.new(f"icmp {ordered} i{width} {f.bits(a, width)}, {f.bits(b, width)}")
    if joined:
        found = f.new(f"{joined} i1 {found}, {f.bits(i.operands[3], 1)}")
    f.put(d, found, 1)


@operation(r"selp\.[usbf](16|32|64)")
def _selected(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(1))
    d, a, b, p = i.operands
    f.put(d, f.new(f"select i1 {f.bits(p, 1)}, i{width} {f.bits(a, width)}, i{width} {f.bits(b, width)}"), width)


# Floating point, 9.7.3. Only what rounds to nearest even, keeps subnormals and approximates nothing, but for one


@operation(r"(add|sub)(\.rn)?\.f(32|64)")
def _sum(f: Function, match: re.Match[str], i: Instruction) -> None:
    """Without .rn it may be fused with a product that has none either: ptxas is free to (9.7.3, add and mul)."""
    name, exact, width = match.group(1), match.group(2), int(match.group(3))
    d, a, b = i.operands
    kind, x, y = FLOATS[width], f.number(a, width), f.number(b, width)
    value = f"f{name} {kind} {x}, {y}"
    if f.fuses and not exact:
        if str(a) in f.products:
            p, q = f.products[str(a)]
            rest = f.new(f"fneg {kind} {y}") if name == "sub" else y
            value = f"call {kind} @llvm.fma.f{width}({kind} {p}, {kind} {q}, {kind} {rest})"
        elif str(b) in f.products:
            p, q = f.products[str(b)]
            p = f.new(f"fneg {kind} {p}") if name == "sub" else p
            value = f"call {kind} @llvm.fma.f{width}({kind} {p}, {kind} {q}, {kind} {x})"
    f.put_number(d, f.new(value), width)


@operation(r"mul(\.rn)?\.f(32|64)")
def _product(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(2))
    d, a, b = i.operands
    x, y = f.number(a, width), f.number(b, width)
    f.put_number(d, f.new(f"fmul {FLOATS[width]} {x}, {y}"), width)
    if not match.group(1):
        f.products[str(d)] = x, y


@operation(r"fma\.rn\.f(32|64)")
def _fused(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(1))
    values = ", ".join(f"{FLOATS[width]} {f.number(x, width)}" for x in i.operands[1:])
    f.put_number(i.operands[0], f.new(f"call {FLOATS[width]} @llvm.fma.f{width}({values})"), width)


@operation(r"div\.rn\.f(32|64)")
def _quotient(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(1))
    d, a, b = i.operands
    f.put_number(d, f.new(f"fdiv {FLOATS[width]} {f.number(a, width)}, {f.number(b, width)}"), width)


@operation(r"(rcp|sqrt)\.rn\.f(32|64)")
def _root(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(2))
    d, a = i.operands
    kind, x = FLOATS[width], f.number(a, width)
    value = f"fdiv {kind} 1.0, {x}" if match.group(1) == "rcp" else f"call {kind} @llvm.sqrt.f{width}({kind} {x})"
    f.put_number(d, f.new(value), width)


@operation(r"rcp\.approx\.ftz\.f64")
def _rough_reciprocal(f: Function, match: re.Match[str], i: Instruction) -> None:
    """The one approximation: libdevice begins a logarithm or a division with it. Its low 32 bits are zero; subnormal
    input and output are zero. What the compiler makes of it is exact to the last place, whatever these bits are."""
    d, a = i.operands
    bits = f.new(f"and i64 {f.bits(a, 64)}, {0xFFFFFFFF00000000}")
    quotient = f.new(f"fdiv double 1.0, {f.as_float(_flushed(f, bits), 64)}")
    cut = f.new(f"and i64 {f.new(f'bitcast double {quotient} to i64')}, {0xFFFFFFFF00000000}")
    f.put(d, _flushed(f, cut), 64)


def _flushed(f: Function, bits: str) -> str:
    field = f.new(f"and i64 {bits}, {0x7FF << 52}")
    zero = f.new(f"and i64 {bits}, {1 << 63}")
    return f.new(f"select i1 {f.new(f'icmp eq i64 {field}, 0')}, i64 {zero}, i64 {bits}")


@operation(r"(neg|abs)\.f(32|64)")
def _sign(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, width = match.group(1), int(match.group(2))
    d, a = i.operands
    top, product = 1 << (width - 1), f.products.get(str(a))
    change = (
        f"xor i{width} {f.bits(a, width)}, {top}" if name == "neg" else f"and i{width} {f.bits(a, width)}, {top - 1}"
    )
    f.put(d, f.new(change), width)
    if name == "neg" and product:  # a sign is part of a fused multiply-add
        f.products[str(d)] = f.new(f"fneg {FLOATS[width]} {product[0]}"), product[1]


@operation(r"(min|max)\.f(32|64)")
def _floating_extreme(f: Function, match: re.Match[str], i: Instruction) -> None:
    """A number beats a NaN, and +0 is above -0; two NaN give the canonical one."""
    name, width = match.group(1), int(match.group(2))
    d, a, b = i.operands
    kind, x, y = FLOATS[width], f.bits(a, width), f.bits(b, width)
    u, v = f.as_float(x, width), f.as_float(y, width)
    u_nan, v_nan = f.new(f"fcmp uno {kind} {u}, 0.0"), f.new(f"fcmp uno {kind} {v}, 0.0")
    order = {"min": "olt", "max": "ogt"}[name]
    zeros = f.new(f"{'or' if name == 'min' else 'and'} i{width} {x}, {y}")  # what equal numbers are, zeros and others
    u_first, v_first = f.new(f"fcmp {order} {kind} {u}, {v}"), f.new(f"fcmp {order} {kind} {v}, {u}")
    value = f.new(f"select i1 {v_first}, i{width} {y}, i{width} {zeros}")
    value = f.new(f"select i1 {u_first}, i{width} {x}, i{width} {value}")
    value = f.new(f"select i1 {v_nan}, i{width} {x}, i{width} {value}")
    value = f.new(f"select i1 {u_nan}, i{width} {y}, i{width} {value}")
    f.put_number(d, f.as_float(value, width), width)
