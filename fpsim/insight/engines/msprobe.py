"""Read the dumps of msprobe (MindStudio probe): a dump.json of statistics, with or without files of tensors.

The layout is that of https://gitcode.com/Ascend/mstt, msprobe's docs/27.dump_json_instruction.md, levels L0 and mix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.insight.engines.recorded import Entry

__all__ = ["STATISTICS", "is_msprobe", "read_msprobe"]

FILE, TENSORS = "dump.json", "dump_tensor_data"
STATISTICS = ("Max", "Min", "Mean", "Norm")
KINDS = ("Module", "Cell")  # modules of PyTorch and of MindSpore; other entries are functions
SIDES = (("input_args", "in"), ("input_kwargs", "in."), ("output", "out"))
NUMPY = {"Float": "float32", "Float16": "float16", "Half": "float16", "BFloat16": "bfloat16"}  # MindSpore's names


class Found(NamedTuple):
    """Contents of a dump.json. left_out: entries other than a module's forward pass, each with the reason."""

    entries: dict[str, Entry]
    engine: str
    left_out: dict[str, str]
    is_statistics: bool


def is_msprobe(path: Path) -> bool:
    """Return True if a path is a JSON file, or a folder with a dump.json of msprobe."""
    return path.suffix == ".json" or (path / FILE).is_file()


def read_msprobe(path: Path) -> Found:
    """Read the tensors of modules in a dump.json. Raises ValueError for any other JSON, and for an unknown dtype."""
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        data = content["data"].items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{shown(str(file))} is not msprobe's dump.json ({type(error).__name__}). Expected: JSON with 'task', "
            f"'level' and 'data', as msprobe writes it for level L0 or mix."
        ) from None
    entries: dict[str, Entry] = {}
    left_out: dict[str, str] = {}
    folders = [file.parent / TENSORS, *([Path(content["dump_data_dir"])] if content.get("dump_data_dir") else [])]
    for name, of in data:
        parts = name.split(".")
        if parts[0] not in KINDS:
            left_out[name] = "of a function, not of a module"
            continue
        if len(parts) < 4 or parts[-2] != "forward" or not parts[-1].isdigit():
            left_out[name] = "of the backward pass"
            continue
        module = ".".join(parts[1:-3])
        for side, word in SIDES:
            for at, leaf in _leaves(of.get(side)):
                key = f"{module}{'.' * bool(module)}{word}{at}{f'@{parts[-1]}' * (parts[-1] != '0')}"
                entries[key] = _entry(leaf, key, file, folders)
    is_statistics = not any(entry.read for entry in entries.values())
    return Found(entries, f"msprobe ({content.get('framework', 'pytorch')})", left_out, is_statistics)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the descriptions of tensors, each with its path of list indices and mapping keys."""
    if isinstance(tree, dict):
        if str(tree.get("type", "")).endswith(".Tensor"):
            yield path, tree
        elif "type" not in tree:
            for key, value in tree.items():
                yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{path}.{i}" if path else str(i))


def _entry(leaf: dict[str, Any], key: str, file: Path, folders: list[Path]) -> Entry:
    word = str(leaf.get("dtype")).removeprefix("torch.")
    word = NUMPY.get(word, word.lower())
    dtype = getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{key} in {file.name} has dtype {shown(leaf.get('dtype'))}, which torch has not. Expected: one of "
            f"torch's, such as 'torch.bfloat16'."
        )
    found = {name: float(x) for name in STATISTICS if isinstance(x := leaf.get(name), int | float)}
    name = leaf.get("data_name")
    read: Callable[[], Tensor] | None = None
    if isinstance(name, str) and name not in ("", "-1"):
        # Only the file's name is used: a path in the dump must not lead to another folder.
        read = partial(_read, Path(name).name, key, dtype, folders)
    return Entry(tuple(leaf.get("shape") or ()), dtype, read, found)


def _read(name: str, key: str, dtype: torch.dtype, folders: list[Path]) -> Tensor:
    for folder in folders:
        path = folder / name
        if path.is_file():
            if path.suffix == ".npy":
                return torch.from_numpy(np.load(path, allow_pickle=False)).to(dtype)
            found = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(found, Tensor):
                return found.detach()
            raise ValueError(f"{path} holds {type(found).__name__}. Expected: the tensor of {key}.")
    raise FileNotFoundError(
        f"The tensor of {key} is not there: no file {shown(name)} in {' or '.join(map(str, folders))}. Expected: the "
        f"folder {TENSORS!r} beside the dump.json, as msprobe writes it."
    )
