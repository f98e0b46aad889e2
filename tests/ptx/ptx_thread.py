"""A PTX kernel as a module of LLVM IR: `run` runs the threads of some blocks until each ends, waits or fails.

`thread` is the kernel for one thread. At a barrier it gives the barrier's number; called again, it goes on behind it.
Its registers lie in a structure of its own if there are barriers, and are LLVM's variables otherwise. So the threads of
a block run one after the other from barrier to barrier, and who calls decides the order.
"""

from __future__ import annotations

from ptx_function import GARBAGE, MACHINE, Function
from ptx_moves import operation as _known  # the operations of both files are known once they are imported
from ptx_operations import translate
from ptx_text import Instruction, Kernel

assert _known

# The rows of `ranges` are first address, end, and whether it may be written. `shadow` has two words for each of shared
# memory: who wrote it since the last barrier, and who read it, as thread + 1; -1 is an atomic operation, -2 several.
_HELPERS = """
define internal i1 @inside(ptr %ranges, i64 %count, i64 %address, i64 %size, i64 %writes) alwaysinline {
  br label %loop
loop:
  %k = phi i64 [ 0, %0 ], [ %next, %more ]
  %is_left = icmp ult i64 %k, %count
  br i1 %is_left, label %look, label %end
look:
  %row = mul i64 %k, 3
  %p = getelementptr i64, ptr %ranges, i64 %row
  %first = load i64, ptr %p
  %q = getelementptr i64, ptr %p, i64 1
  %last = load i64, ptr %q
  %w = getelementptr i64, ptr %p, i64 2
  %writable = load i64, ptr %w
  %stop = add i64 %address, %size
  %after = icmp uge i64 %address, %first
  %before = icmp ule i64 %stop, %last
  %allowed = icmp ule i64 %writes, %writable
  %both = and i1 %after, %before
  %all = and i1 %both, %allowed
  %next = add i64 %k, 1
  br i1 %all, label %end, label %more
more:
  br label %loop
end:
  %found = phi i1 [ false, %loop ], [ true, %look ]
  ret i1 %found
}

define internal i1 @touch(ptr %shadow, i64 %address, i64 %size, i64 %thread, i64 %kind) {
  %who64 = add i64 %thread, 1
  %who = trunc i64 %who64 to i32
  %is_atomic = icmp eq i64 %kind, 2
  %is_read = icmp eq i64 %kind, 0
  %begin = lshr i64 %address, 2
  %past = add i64 %address, %size
  %up = add i64 %past, 3
  %end = lshr i64 %up, 2
  br label %loop
loop:
  %k = phi i64 [ %begin, %0 ], [ %next, %good ]
  %is_left = icmp ult i64 %k, %end
  br i1 %is_left, label %look, label %peace
look:
  %place = mul i64 %k, 2
  %w = getelementptr i32, ptr %shadow, i64 %place
  %r = getelementptr i32, ptr %w, i64 1
  %writer = load i32, ptr %w
  %reader = load i32, ptr %r
  %no_writer = icmp eq i32 %writer, 0
  %own_writer = icmp eq i32 %writer, %who
  %atomic_writer = icmp eq i32 %writer, -1
  %both_atomic = and i1 %atomic_writer, %is_atomic
  %w1 = or i1 %no_writer, %own_writer
  %w2 = or i1 %w1, %both_atomic
  %no_reader = icmp eq i32 %reader, 0
  %own_reader = icmp eq i32 %reader, %who
  %r1 = or i1 %no_reader, %own_reader
  %r2 = or i1 %r1, %is_read
  %fine = and i1 %w2, %r2
  br i1 %fine, label %good, label %race
good:
  %mark = select i1 %is_atomic, i32 -1, i32 %who
  %new_writer = select i1 %is_read, i32 %writer, i32 %mark
  store i32 %new_writer, ptr %w
  %many = select i1 %r1, i32 %who, i32 -2
  %new_reader = select i1 %is_read, i32 %many, i32 %reader
  store i32 %new_reader, ptr %r
  %next = add i64 %k, 1
  br label %loop
race:
  ret i1 false
peace:
  ret i1 true
}
"""

_RUN = """
define i64 @run(ptr noalias %machine, i64 %first_block, i64 %last_block) {
HEAD
  %all = sub i64 %last_block, %first_block
  %is_backwards = icmp ne i64 %backwards, 0
  br label %next_block
next_block:
  %b = phi i64 [ 0, %0 ], [ %b1, %block_done ]
  %has_block = icmp ult i64 %b, %all
  br i1 %has_block, label %in_block, label %done
in_block:
  %from_end = sub i64 %all, %b
  %from_end1 = sub i64 %from_end, 1
  %in_order = select i1 %is_backwards, i64 %from_end1, i64 %b
  %block = add i64 %first_block, %in_order
  br label %next_thread
next_thread:
  %t = phi i64 [ 0, %in_block ], [ %t1, %went_well ]
  %has_thread = icmp ult i64 %t, %threads
  br i1 %has_thread, label %in_thread, label %block_done
in_thread:
  %t_end = sub i64 %threads, %t
  %t_end1 = sub i64 %t_end, 1
  %thread = select i1 %is_backwards, i64 %t_end1, i64 %t
  %status = call i64 @thread(ARGUMENTS)
  %slot = getelementptr i64, ptr %statuses, i64 %thread
  store i64 %status, ptr %slot
  %failed = icmp slt i64 %status, 0
  br i1 %failed, label %fail, label %went_well
went_well:
  %t1 = add i64 %t, 1
  br label %next_thread
block_done:
  %b1 = add i64 %b, 1
  br label %next_block
fail:
  store i64 %block, ptr %at_block.slot
  store i64 %thread, ptr %at_thread.slot
  ret i64 %status
done:
  ret i64 0
}
"""
_POINTERS = ("params", "ranges", "shared", "shadow", "states", "statuses")
_PASSED = [name for name in MACHINE if name not in ("statuses", "backwards", "at_block", "at_thread")]


def state_size(kernel: Kernel) -> int:
    """The bytes that a thread keeps: where it goes on, its registers, its local memory."""
    return 8 + 8 * len(kernel.registers) + -(-kernel.local.size // 16) * 16


def module(kernel: Kernel, fuses: bool = False) -> tuple[str, int]:
    """The IR, and how many barriers there are in the text. Raises UnknownPTX. fuses: see Function."""
    f = Function(kernel, fuses)
    _translate_body(f)
    head = []
    for i, name in enumerate(MACHINE):
        head.append(f"  %{name}.slot = getelementptr i64, ptr %machine, i64 {i}")
        head.append(f"  %{name} = load {'ptr' if name in _POINTERS else 'i64'}, ptr %{name}.slot")
    typed = [f"{'ptr' if name in _POINTERS else 'i64'} %{name}" for name in _PASSED] + ["i64 %block", "i64 %thread"]
    arguments = ", ".join(typed)
    run = _RUN.replace("HEAD", "\n".join(head)).replace("ARGUMENTS", arguments)
    alone = arguments.replace("ptr %states", "ptr noalias %states")  # nothing else points there
    thread = f"define internal i64 @thread({alone}) {{\n" + "\n".join([*_prologue(f), *f.lines]) + "\n}\n"
    return _HELPERS + thread + run, f.stops


def _prologue(f: Function) -> list[str]:
    lines = ["  %fuel = alloca i64", "  store i64 %steps, ptr %fuel"]
    lines += ["  %at = mul i64 %thread, %stride", "  %state = getelementptr i8, ptr %states, i64 %at"]
    lines.append(f"  %local = getelementptr i8, ptr %state, i64 {8 + 8 * len(f.kernel.registers)}")
    for i, width in enumerate(f.kernel.registers.values()):
        place = f"getelementptr i8, ptr %state, i64 {8 + 8 * i}" if f.stops else f"alloca i{width}"
        lines.append(f"  %r{i} = {place}")
    if f.stops:
        cases = " ".join(f"i64 {stop}, label %stop{stop}" for stop in range(1, f.stops + 1))
        lines += ["  %where = load i64, ptr %state", f"  switch i64 %where, label %new [ {cases} ]", "new:"]
    for i, width in enumerate(f.kernel.registers.values()):
        lines.append(f"  store i{width} {GARBAGE % 2**width}, ptr %r{i}")
    return [*lines, "  br label %start", "start:"]


def _translate_body(f: Function) -> None:
    seen: set[str] = set()
    labels = {item: f"b{i}" for i, item in enumerate(f.kernel.body) if isinstance(item, str)}
    for item in f.kernel.body:
        f.instruction = None
        if isinstance(item, str):
            f.add(f"br label %{labels[item]}")
            f.begin(labels[item])
            f.products.clear()
            seen.add(item)
            continue
        f.instruction = item
        after = f.label()
        if item.guard is not None:
            register, is_negated = item.guard
            do, condition = f.label(), f.bits(register, 1)
            f.add(f"br i1 {condition}, label %{after if is_negated else do}, label %{do if is_negated else after}")
            f.begin(do)
        _translate_one(f, item, labels, seen)
        if item.guard is not None:
            f.products.clear()
            f.add(f"br label %{after}")
            f.begin(after)
    f.add("ret i64 0")


def _translate_one(f: Function, i: Instruction, labels: dict[str, str], seen: set[str]) -> None:
    if i.opcode in ("bra", "bra.uni"):
        (target,) = i.operands
        if target not in labels:
            raise f.unknown("a label")
        if target in seen:
            f.burn_fuel()
        f.add(f"br label %{labels[str(target)]}")
        f.begin(f.label())
    elif i.opcode in ("ret", "exit", "ret.uni"):
        f.add("ret i64 0")
        f.begin(f.label())
    elif i.opcode in ("bar.sync", "barrier.sync", "barrier.sync.aligned", "bar.cta.sync"):
        if i.operands != ("0",) or i.guard is not None:
            raise f.unknown("a barrier of a part of the block")
        f.stops += 1
        f.add(f"store i64 {f.stops}, ptr %state")
        f.add(f"ret i64 {f.stops}")
        f.begin(f"stop{f.stops}")
        f.products.clear()
    else:
        translate(f, i)
