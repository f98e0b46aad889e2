"""Machine instructions of a CUDA kernel for each element, from its disassembly; no card is needed."""

from __future__ import annotations

import heapq
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from fpsim.compiling.card import CudaKernel

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
MOST_BYTES = 64  # that a thread stores without going round a loop
_LABEL = re.compile(r"^\.?(L_x_\d+):")


def disassembler() -> str | None:
    """nvdisasm, of a CUDA toolkit or of the wheel nvidia-cuda-nvdisasm."""
    from cuda.pathfinder import find_nvidia_binary_utility

    path = find_nvidia_binary_utility("nvdisasm")
    return None if path is None and shutil.which("nvdisasm") is None else str(path or "nvdisasm")


def disassembled(kernel: CudaKernel, capability: tuple[int, int]) -> str:
    """The SASS of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.cubin(capability))
        command = [disassembler() or "nvdisasm", "-c", str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions_per_element(sass: str, element_bytes: int, elements: int | None = None, reads: int = 0) -> float:
    """Instructions that a thread executes for each element that it stores, on the path where these are fewest.

    That is the path of a thread all of whose elements exist: on others, it stores fewer for the same setup. A
    predicated instruction counts, whether or not it does anything. Nothing is called.

    elements: that the thread stores. None for any number, with no branch back taken.
    reads: how often it loads each of them.
    """
    code, labels = _instructions(sass)
    most = MOST_BYTES if elements is None else elements * element_bytes
    best: dict[tuple[int, int, int], int] = {}
    ends: list[float] = []
    queue = [(0, 0, 0, 0)]  # instructions so far; before which one, and bytes loaded and stored
    while queue:
        count, *state = heapq.heappop(queue)
        i, loaded, stored = state
        if best.setdefault((i, loaded, stored), count) < count or i == len(code):
            continue
        is_conditional, name, target = code[i]
        if name.startswith("EXIT") and stored and loaded >= reads * stored and (elements is None or stored == most):
            ends.append((count + 1) * element_bytes / stored)
        following = [i + 1] if is_conditional or not name.startswith(("EXIT", "BRA", "RET", "CALL")) else []
        if name.startswith("BRA") and (elements is not None or labels[target] > i):
            following.append(labels[target])
        width = int(next(iter(re.findall(r"\.(64|128)\b", name)), 32)) // 8
        moved = width if name.startswith(("STG", "LDG")) and width in (element_bytes, 16) else 0
        for moves in {moved, 0} if is_conditional else {moved}:
            after = loaded + moves * name.startswith("LDG"), stored + moves * name.startswith("STG")
            after = min(after[0], reads * most), after[1]
            for j in following if after[1] <= most else []:
                if best.get((j, *after), count + 2) > count + 1:
                    best[j, *after] = count + 1
                    heapq.heappush(queue, (count + 1, j, *after))
    return min(ends)


def _instructions(sass: str) -> tuple[list[tuple[bool, str, str]], dict[str, int]]:
    """Of the kernel: whether an instruction has a condition, its name, and where it may go; and the labels."""
    code: list[tuple[bool, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass[sass.index("\nkernel:") :].splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label.group(1)] = len(code)
        elif match := _LINE.search(line):
            target = re.search(r"\.?(L_x_\d+)", match.group(3))
            code.append((bool(match.group(1)), match.group(2), target.group(1) if target else ""))
        elif ".section" in line and code:
            break
    return code, labels
