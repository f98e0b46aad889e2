"""Machine instructions of a CUDA kernel for each element, from its disassembly; no card is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from fpsim.kernels.card import CudaKernel

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
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


def instructions_per_element(sass: str, element_bytes: int) -> float:
    """Instructions that a thread executes for each element that it stores, on the path where these are fewest.

    That is the path of a thread all of whose elements exist: on others, it stores fewer for the same setup. Branches
    back are not taken. A predicated instruction counts, whether or not it does anything.
    """
    code: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label.group(1)] = len(code)
        elif match := _LINE.search(line):
            code.append((match.group(1) or "", match.group(2), match.group(3)))
    reached: dict[int, dict[int, int]] = {0: {0: 0}}  # before an instruction: bytes stored, fewest instructions
    ends: list[float] = []
    for i, (predicate, name, rest) in enumerate(code):
        width = int(next(iter(re.findall(r"\.(64|128)\b", name)), 32)) // 8 if name.startswith("STG") else 0
        after = {stored + width: count + 1 for stored, count in reached.get(i, {}).items()}
        following = [i + 1] if predicate or not name.startswith(("EXIT", "BRA")) else []
        if name.startswith("EXIT"):
            ends += [count * element_bytes / stored for stored, count in after.items() if stored]
        target = re.search(r"\.?(L_x_\d+)", rest) if name.startswith("BRA") else None
        if target is not None and labels[target.group(1)] > i:
            following.append(labels[target.group(1)])
        for j in following:
            for stored, count in after.items():
                known = reached.setdefault(j, {})
                known[stored] = min(known.get(stored, count), count)
    return min(ends)
