"""PTX as text becomes a kernel as data: its parameters, its variables, its registers and its instructions.

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0, chapters 4 (syntax), 5 (state spaces, types, variables) and
9.1 (format of an instruction). What the compiler of the kernels never writes is an error here, not a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Operand = str | tuple[str, ...]  # a tuple is a vector: {%r1, %r2}


class UnknownPTX(Exception):
    """PTX that these files do not know. They have to learn it before a kernel that uses it can be tested."""


@dataclass(frozen=True)
class Instruction:
    """guard: the predicate register and whether it is negated, or None. line: in the text, from 1."""

    line: int
    guard: tuple[str, bool] | None
    opcode: str
    operands: tuple[Operand, ...]


@dataclass
class Variables:
    """What lies in one state space: where each name begins and what is there at the start."""

    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, alignment: int, size: int) -> None:
        first = -(-self.size // alignment) * alignment
        self.offsets[name], self.size = first, first + size


@dataclass
class Kernel:
    """registers: their width in bits, 1 for a predicate. body: instructions, and labels as strings.

    most_threads: of a block, as `.maxntid` bounds them.
    """

    name: str
    most_threads: int = 1024
    params: Variables = field(default_factory=Variables)
    shared: Variables = field(default_factory=Variables)
    local: Variables = field(default_factory=Variables)
    registers: dict[str, int] = field(default_factory=dict)
    body: list[Instruction | str] = field(default_factory=list)

    @property
    def instructions(self) -> list[Instruction]:
        return [item for item in self.body if isinstance(item, Instruction)]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"(?:\.visible\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_BOUND = re.compile(r"\.maxntid\s+(\d+)(?:\s*,\s*1){0,2}")
_HEAD = re.compile(r"\.(?:version|target|address_size)[^\n]*")
_VARIABLE = re.compile(r"\.(shared|local|param)\s+(?:\.align\s+(\d+)\s+)?\.[busf](8|16|32|64)\s+([\w$]+)(?:\[(\d+)\])?")
# Numba's environment of a function: it is declared, and nothing that is compiled for a card reads it
_ENVIRONMENT = re.compile(r"\.common \.global \.align 8 \.u64 _ZN08NumbaEnv\w+")
_REGISTER = re.compile(r"\.reg\s+\.(pred|[busf]\d+)\s+(.*)", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):")
_GUARD = re.compile(r"@(!?)(%\w+)\s+(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def parse(text: str) -> Kernel:
    """The one kernel of a PTX text. Raises UnknownPTX for a second one, a function, or anything else unexpected."""
    text = _COMMENT.sub(lambda found: "\n" * found.group().count("\n"), text).rstrip("\0 \n\t")
    entry = _ENTRY.search(text)
    if entry is None:
        raise UnknownPTX("no .entry: the text holds no kernel")
    kernel = Kernel(entry.group(1))
    if directive := entry.group(3).strip():
        bound = _BOUND.fullmatch(directive)
        if bound is None:
            raise UnknownPTX(f"a directive of the kernel: {directive}")
        kernel.most_threads = int(bound.group(1))
    for parameter in filter(None, map(str.strip, entry.group(2).split(","))):
        _declare(parameter, kernel)
    end = _closing_brace(text, entry.end())
    _Body(kernel).read(text, entry.end(), end)
    for rest in (_HEAD.sub("", text[: entry.start()]), text[end + 1 :]):
        for statement in filter(None, map(str.strip, rest.split(";"))):
            _declare(statement, kernel)
    return kernel


def _declare(statement: str, kernel: Kernel) -> None:
    if _ENVIRONMENT.fullmatch(statement):
        return
    match = _VARIABLE.fullmatch(statement.removeprefix(".visible").strip())
    if match is None:
        raise UnknownPTX(f"a declaration: {statement!r}")
    space, alignment, bits, name, count = match.groups()
    size = int(bits) // 8
    variables = {"shared": kernel.shared, "local": kernel.local, "param": kernel.params}[space]
    variables.add(name, int(alignment or size), size * int(count or 1))


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise UnknownPTX("the body of the kernel does not end")


class _Body:
    """Reads the statements of a kernel. A name that a pair of braces declares is valid inside them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._scopes: list[dict[str, str]] = [{}]
        self._count = 0

    def read(self, text: str, start: int, end: int) -> None:
        line, place = text.count("\n", 0, start) + 1, start
        while True:
            blank = re.compile(r"\s*").match(text, place, end)
            line += blank.group().count("\n")  # type: ignore[union-attr]
            place = blank.end()  # type: ignore[union-attr]
            if place >= end:
                return
            if label := _LABEL.match(text, place, end):
                self._kernel.body.append(label.group(1))
                place = label.end()
            elif text[place] in "{}":
                self._scopes.append({}) if text[place] == "{" else self._scopes.pop()
                place += 1
            else:
                stop = text.find(";", place, end)
                if stop < 0:
                    raise UnknownPTX(f"line {line}: a statement does not end")
                self._statement(text[place:stop], line)
                line += text.count("\n", place, stop)
                place = stop + 1

    def _statement(self, text: str, line: int) -> None:
        text = text.strip()
        if match := _REGISTER.fullmatch(text):
            width = 1 if match.group(1) == "pred" else int(match.group(1)[1:])
            for names in match.group(2).split(","):
                self._registers(names.strip(), width)
        elif text.startswith(".pragma"):  # "nounroll": of no effect on results
            pass
        elif text.startswith("."):
            _declare(text, self._kernel)
        else:
            guard = None
            if match := _GUARD.fullmatch(text):
                guard, text = (self._renamed(match.group(2)), match.group(1) == "!"), match.group(3)
            opcode, *rest = text.split(None, 1)
            operands = tuple(self._operand(found) for found in _OPERAND.findall("".join(rest)))
            self._kernel.body.append(Instruction(line, guard, opcode, operands))

    def _registers(self, names: str, width: int) -> None:
        if match := re.fullmatch(r"(%?\w+)<(\d+)>", names):
            for i in range(int(match.group(2))):
                self._kernel.registers[f"{match.group(1)}{i}"] = width
        elif len(self._scopes) == 1:
            self._kernel.registers[names] = width
        else:  # the compiler writes one %temp in many pairs of braces
            self._count += 1
            self._scopes[-1][names] = f"{names}.{self._count}"
            self._kernel.registers[f"{names}.{self._count}"] = width

    def _renamed(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return tuple(self._renamed(part.strip()) for part in text[1:-1].split(","))
        return self._renamed(text)
