"""What moves and converts in PTX: mov, cvt, cvta, loads and stores, atomics and fences.

Source: as in ptx_operations. Threads of a grid run one after the other here, so that an atomic operation is a load and
a store, and a fence is nothing.
"""

from __future__ import annotations

import re

from ptx_function import FLOATS, Function
from ptx_operations import operation
from ptx_text import Instruction, Operand


@operation(r"mov\.(?:[usbf](16|32|64)|pred)")
def _move(f: Function, match: re.Match[str], i: Instruction) -> None:
    """9.7.9.3 and 9.7.9.4: also of a vector's parts into one register, and back; the first part is the lowest."""
    width = int(match.group(1) or 1)
    d, a = i.operands
    if isinstance(d, tuple):
        part, value = width // len(d), f.bits(a, width)
        for place, name in enumerate(d):
            shifted = f.new(f"lshr i{width} {value}, {place * part}")
            f.put(name, f.new(f"trunc i{width} {shifted} to i{part}"), part)
    elif isinstance(a, tuple):
        part, found = width // len(a), "0"
        for place, name in enumerate(a):
            wide = f.new(f"zext i{part} {f.bits(name, part)} to i{width}")
            found = f.new(f"or i{width} {found}, {f.new(f'shl i{width} {wide}, {place * part}')}")
        f.put(d, found, width)
    else:
        product = f.products.get(str(a))
        f.put(d, f.bits(a, width), width)
        if product:
            f.products[str(d)] = product


# Conversion, 9.7.9.21


@operation(r"cvt\.([us])(8|16|32|64)\.([us])(8|16|32|64)")
def _between_integers(f: Function, match: re.Match[str], i: Instruction) -> None:
    to_sign, to, sign, width = match.group(1), int(match.group(2)), match.group(3), int(match.group(4))
    value = f.bits(i.operands[1], width, narrows=True)
    if to != width:
        how = "trunc" if to < width else ("sext" if sign == "s" else "zext")
        value = f.new(f"{how} i{width} {value} to i{to}")
    f.put(i.operands[0], value, to, signed=to_sign == "s")


@operation(r"cvt\.rn\.f(32|64)\.([us])(8|16|32|64)")
def _from_integer(f: Function, match: re.Match[str], i: Instruction) -> None:
    to, sign, width = int(match.group(1)), match.group(2), int(match.group(3))
    value = f.bits(i.operands[1], width, narrows=True)
    f.put_number(i.operands[0], f.new(f"{sign}itofp i{width} {value} to {FLOATS[to]}"), to)


_TO_WHOLE = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@operation(r"cvt\.(rni|rzi|rmi|rpi)\.([us])(16|32|64)\.f(32|64)")
def _to_integer(f: Function, match: re.Match[str], i: Instruction) -> None:
    """Too large becomes the largest. NaN becomes 0, and where 64 bits take part the highest bit alone."""
    how, sign, to, width = match.group(1), match.group(2), int(match.group(3)), int(match.group(4))
    kind, value = FLOATS[width], f.number(i.operands[1], width)
    whole = f.new(f"call {kind} @llvm.{_TO_WHOLE[how]}.f{width}({kind} {value})")
    found = f.new(f"call i{to} @llvm.fpto{sign}i.sat.i{to}.f{width}({kind} {whole})")
    if width == 64 or to == 64:
        is_nan = f.new(f"fcmp uno {kind} {value}, 0.0")
        found = f.new(f"select i1 {is_nan}, i{to} {1 << (to - 1)}, i{to} {found}")
    f.put(i.operands[0], found, to)


@operation(r"cvt\.(rni|rzi|rmi|rpi)\.f(32|64)\.f\2")
def _to_whole_number(f: Function, match: re.Match[str], i: Instruction) -> None:
    width = int(match.group(2))
    value = f"call {FLOATS[width]} @llvm.{_TO_WHOLE[match.group(1)]}.f{width}({FLOATS[width]} "
    f.put_number(i.operands[0], f.new(f"{value}{f.number(i.operands[1], width)})"), width)


@operation(r"cvt\.f64\.f32|cvt\.rn\.f32\.f64")
def _between_floats(f: Function, match: re.Match[str], i: Instruction) -> None:
    widens = i.opcode == "cvt.f64.f32"
    width, to = (32, 64) if widens else (64, 32)
    value = f.number(i.operands[1], width)
    value = f.new(f"fp{'ext' if widens else 'trunc'} {FLOATS[width]} {value} to {FLOATS[to]}")
    f.put_number(i.operands[0], value, to)


# Memory, 9.7.9.8 to 9.7.9.13


@operation(r"cvta(\.to)?\.(global|param)\.u64")
def _same_address(f: Function, match: re.Match[str], i: Instruction) -> None:
    """Global memory lies at the same addresses in the generic space, for which the host's memory stands."""
    f.put(i.operands[0], f.bits(i.operands[1], 64), 64)


@operation(r"cvta(\.to)?\.(shared|local)\.u64")
def _windowed_address(f: Function, match: re.Match[str], i: Instruction) -> None:
    base = f.new(f"ptrtoint ptr %{match.group(2)} to i64")
    how = "sub" if match.group(1) else "add"
    f.put(i.operands[0], f.new(f"{how} i64 {f.bits(i.operands[1], 64)}, {base}"), 64)


_SPACE = r"(?:\.(param|global|shared|local))?"
_ELEMENT = r"(?:\.v(2|4))?\.([usbf])(8|16|32|64)"


def _parts(operand: Operand, count: str | None) -> tuple[str, ...]:
    parts = operand if isinstance(operand, tuple) else (operand,)
    assert len(parts) == int(count or 1)
    return parts


@operation(rf"ld(?:\.volatile|\.relaxed\.(?:cta|gpu))?{_SPACE}(?:\.nc)?{_ELEMENT}")
def _load(f: Function, match: re.Match[str], i: Instruction) -> None:
    space, count, kind, width = match.group(1), match.group(2), match.group(3), int(match.group(4))
    parts = _parts(i.operands[0], count)
    size = width // 8
    pointer = f.pointer(space or "generic", i.operands[1], size * len(parts), "read")
    values = []
    for place in range(len(parts)):  # all of them first: a part may be the register of the address
        part = f.new(f"getelementptr i8, ptr {pointer}, i64 {place * size}")
        values.append(f.new(f"load i{width}, ptr {part}, align {size}"))
    for name, value in zip(parts, values, strict=True):
        f.put(name, value, width, signed=kind == "s")


@operation(rf"st(?:\.volatile|\.relaxed\.(?:cta|gpu))?{_SPACE}{_ELEMENT}")
def _store(f: Function, match: re.Match[str], i: Instruction) -> None:
    space, count, width = match.group(1), match.group(2), int(match.group(4))
    if space == "param":
        raise f.unknown("a call")
    parts = _parts(i.operands[1], count)
    size = width // 8
    values = [f.bits(part, width, narrows=True) for part in parts]
    pointer = f.pointer(space or "generic", i.operands[0], size * len(parts), "write")
    for place, value in enumerate(values):
        part = f.new(f"getelementptr i8, ptr {pointer}, i64 {place * size}")
        f.add(f"store i{width} {value}, ptr {part}, align {size}")


# Atomics and fences, 9.7.13.5 to 9.7.13.7 and 9.7.13.4

_ORDER = r"(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|gpu|sys))?"


@operation(rf"(atom|red){_ORDER}(?:\.(global|shared))?\.(\w+)\.([usbf])(32|64)")
def _atomic(f: Function, match: re.Match[str], i: Instruction) -> None:
    name, space, what, kind, width = *match.group(1, 2, 3, 4), int(match.group(5))
    operands = list(i.operands)
    target = operands.pop(0) if name == "atom" else "_"
    address, *values = operands
    bits = [f.bits(value, width) for value in values]
    pointer = f.pointer(space or "generic", address, width // 8, "atomic")
    old = f.new(f"load i{width}, ptr {pointer}")
    f.add(f"store i{width} {_changed(f, what, kind, width, old, bits)}, ptr {pointer}")
    f.put(target, old, width)


def _changed(f: Function, what: str, kind: str, width: int, old: str, values: list[str]) -> str:
    """What an atomic operation leaves in memory."""
    value = values[0]
    if kind == "f" and what == "add":
        numbers = f"{f.as_float(old, width)}, {f.as_float(value, width)}"
        return f.new(f"bitcast {FLOATS[width]} {f.new(f'fadd {FLOATS[width]} {numbers}')} to i{width}")
    if kind != "f" and what in ("add", "and", "or", "xor"):
        return f.new(f"{what} i{width} {old}, {value}")
    if kind in "us" and what in ("min", "max"):
        return f.new(f"call i{width} @llvm.{kind}{what}.i{width}(i{width} {old}, i{width} {value})")
    if what == "exch":
        return value
    if what == "cas":
        is_equal = f.new(f"icmp eq i{width} {old}, {value}")
        return f.new(f"select i1 {is_equal}, i{width} {values[1]}, i{width} {old}")
    if what == "inc" and kind == "u":
        is_last = f.new(f"icmp uge i{width} {old}, {value}")
        return f.new(f"select i1 {is_last}, i{width} 0, i{width} {f.new(f'add i{width} {old}, 1')}")
    raise f.unknown("an atomic operation")


@operation(r"membar\.(?:cta|gl|sys)|fence\.(?:sc|acq_rel)\.(?:cta|gpu|sys)")
def _fence(f: Function, match: re.Match[str], i: Instruction) -> None:
    pass
