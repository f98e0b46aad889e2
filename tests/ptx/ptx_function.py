"""The LLVM function of one thread while it is written: its values, its registers, its memory and its faults.

A register is a variable of LLVM's, an integer of the register's width whatever its type: LLVM makes values of them.
What a card leaves undefined begins as garbage. A fault is what a card would not survive, or leaves undefined: it
ends the thread with a negative number, which holds the line and the kind.
"""

from __future__ import annotations

import re

from ptx_text import Instruction, Kernel, UnknownPTX, Variables

FAULTS = (
    "leaves the arrays that were given",
    "is not aligned to its size",
    "divides by zero or overflows",
    "goes round for ever",
    "races with another thread since the last barrier",
)
MEMORY, ALIGNMENT, DIVISION, ENDLESS, RACE = range(len(FAULTS))

# The int64 of a launch that the code reads, by name.
MACHINE = (
    "params ranges range_count shared shadow states stride threads blocks steps statuses backwards at_block at_thread"
).split()

GARBAGE = 0xA5A5_C3C3_5A5A_3C3C
FLOATS = {32: "float", 64: "double"}
SPECIAL = {
    "%tid.x": "thread",
    "%ctaid.x": "block",
    "%ntid.x": "threads",
    "%nctaid.x": "blocks",
    **{f"%{name}.{axis}": "0" for name in ("tid", "ctaid") for axis in "yz"},
    **{f"%{name}.{axis}": "1" for name in ("ntid", "nctaid") for axis in "yz"},
}


class Function:
    """fuses: a product whose sum may be computed with one rounding is, as ptxas may choose to, see ptx_operations."""

    def __init__(self, kernel: Kernel, fuses: bool = False) -> None:
        self.kernel, self.fuses = kernel, fuses
        self.lines: list[str] = []
        self.instruction: Instruction | None = None
        self.stops = 0
        self.products: dict[str, tuple[str, str]] = {}
        self._count = 0
        self.names = {name: f"%r{i}" for i, name in enumerate(kernel.registers)}

    # Values

    def add(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def new(self, expression: str) -> str:
        self._count += 1
        self.add(f"%v{self._count} = {expression}")
        return f"%v{self._count}"

    def label(self) -> str:
        self._count += 1
        return f"l{self._count}"

    def begin(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def unknown(self, what: str) -> UnknownPTX:
        i = self.instruction
        return UnknownPTX(f"{what}, in line {i.line}: {i.opcode} {i.operands}" if i else what)

    # Operands

    def width_of(self, operand: str) -> int:
        if operand not in self.kernel.registers:
            raise self.unknown(f"{operand!r} is not a register")
        return self.kernel.registers[operand]

    def bits(self, operand: str | tuple[str, ...], width: int, narrows: bool = False) -> str:
        """An operand as an integer of `width` bits. narrows: of a wider register the low bits will do (9.4.1)."""
        if isinstance(operand, tuple):
            raise self.unknown("a vector where one value belongs")
        if operand in self.kernel.registers:
            own = self.width_of(operand)
            value = self.new(f"load i{own}, ptr {self.names[operand]}")
            if own == width:
                return value
            if narrows and own > width:
                return self.new(f"trunc i{own} {value} to i{width}")
            raise self.unknown(f"{operand} has {own} bits, not {width}")
        if operand in SPECIAL:
            return self._special(operand, width)
        if match := re.fullmatch(r"0([fd])([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", operand):
            if {"f": 32, "d": 64}[match.group(1)] != width:
                raise self.unknown(f"{operand} does not have {width} bits")
            return str(int(match.group(2), 16))
        if match := re.fullmatch(r"(-?)(0[xX][0-9A-Fa-f]+|\d+)U?", operand):
            value_of = int(match.group(2), 0 if match.group(2)[:2] in ("0x", "0X") else 10)
            return str((-value_of if match.group(1) else value_of) % 2**width)
        if width in (32, 64):
            for variables in (self.kernel.shared, self.kernel.local):
                if operand in variables.offsets:
                    return str(variables.offsets[operand])
        raise self.unknown(f"an operand, {operand!r}")

    def _special(self, operand: str, width: int) -> str:
        source = SPECIAL[operand]
        if width != 32:
            raise self.unknown(f"{operand} has 32 bits")
        return source if source in "01" else self.new(f"trunc i64 %{source} to i32")

    def number(self, operand: str | tuple[str, ...], width: int) -> str:
        """An operand as a floating-point value."""
        return self.as_float(self.bits(operand, width), width)

    def as_float(self, value: str, width: int) -> str:
        return self.new(f"bitcast i{width} {value} to {FLOATS[width]}")

    def put(self, operand: str | tuple[str, ...], value: str, width: int, signed: bool | None = None) -> None:
        """Write an integer of `width` bits. signed: how it is extended where the register is wider, which few allow."""
        if isinstance(operand, tuple):
            raise self.unknown("a vector where one register belongs")
        if operand == "_":
            return
        own = self.width_of(operand)
        if own != width:
            if signed is None or own < width:
                raise self.unknown(f"{operand} has {own} bits, not {width}")
            value = self.new(f"{'s' if signed else 'z'}ext i{width} {value} to i{own}")
        self.add(f"store i{own} {value}, ptr {self.names[operand]}")
        self.products.pop(operand, None)

    def put_number(self, operand: str | tuple[str, ...], value: str, width: int) -> None:
        """Write the result of floating-point arithmetic. A NaN in float32 is 0x7fffffff, whatever went in (9.7.3)."""
        bits = self.new(f"bitcast {FLOATS[width]} {value} to i{width}")
        if width == 32:
            is_nan = self.new(f"fcmp uno float {value}, 0.0")
            bits = self.new(f"select i1 {is_nan}, i32 {0x7FFFFFFF}, i32 {bits}")
        self.put(operand, bits, width)

    # Faults

    def check(self, condition: str, fault: int) -> None:
        """Go on where the condition holds."""
        good, bad = self.label(), self.label()
        self.add(f"br i1 {condition}, label %{good}, label %{bad}")
        self.begin(bad)
        line = self.instruction.line if self.instruction else 0
        self.add(f"ret i64 {-(line * len(FAULTS) + fault + 1)}")
        self.begin(good)

    def burn_fuel(self) -> None:
        """A branch backwards may be taken only so many times."""
        left = self.new("load i64, ptr %fuel")
        self.check(self.new(f"icmp sgt i64 {left}, 0"), ENDLESS)
        self.add(f"store i64 {self.new(f'sub i64 {left}, 1')}, ptr %fuel")

    # Memory

    def address(self, operand: str | tuple[str, ...], variables: Variables | None) -> str:
        """The int64 in square brackets. variables: whose names may stand there; their addresses are offsets."""
        match = re.fullmatch(r"\[([%\w$.]+?)(?:\+(-?\d+))?\]", operand) if isinstance(operand, str) else None
        if match is None:
            raise self.unknown(f"an address, {operand!r}")
        base, offset = match.group(1), int(match.group(2) or 0)
        if variables is not None and base in variables.offsets:
            return str(variables.offsets[base] + offset)
        width = self.width_of(base)
        value = self.bits(base, width)
        if width == 32:  # an address in shared or local memory
            value = self.new(f"zext i32 {value} to i64")
        return self.new(f"add i64 {value}, {offset}") if offset else value

    def pointer(self, space: str, operand: str | tuple[str, ...], size: int, how: str) -> str:
        """A checked pointer to `size` bytes. how: 'read', 'write' or 'atomic'."""
        if space == "param":
            return self._param(operand, size)
        variables = {"shared": self.kernel.shared, "local": self.kernel.local}.get(space)
        address = self.address(operand, variables)
        aligned = self.new(f"and i64 {address}, {size - 1}")
        self.check(self.new(f"icmp eq i64 {aligned}, 0"), ALIGNMENT)
        if variables is None:
            writes = int(how != "read")
            inside = f"call i1 @inside(ptr %ranges, i64 %range_count, i64 {address}, i64 {size}, i64 {writes})"
            self.check(self.new(inside), MEMORY)
            return self.new(f"inttoptr i64 {address} to ptr")
        self.check(self.new(f"icmp ule i64 {address}, {max(variables.size - size, -1) % 2**64}"), MEMORY)
        if space == "shared":
            kind = ("read", "write", "atomic").index(how)
            peaceful = f"call i1 @touch(ptr %shadow, i64 {address}, i64 {size}, i64 %thread, i64 {kind})"
            self.check(self.new(peaceful), RACE)
        return self.new(f"getelementptr i8, ptr %{space}, i64 {address}")

    def _param(self, operand: str | tuple[str, ...], size: int) -> str:
        params = self.kernel.params
        address = self.address(operand, params)
        if not address.isdigit() or int(address) + size > params.size:
            raise self.unknown("an address outside the parameters")
        return self.new(f"getelementptr i8, ptr %params, i64 {address}")
