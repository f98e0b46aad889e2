"""The picture in docs/architecture.md: the rooms of the two packages, and which imports which.

A room is a folder, or a file outside of the folders below. An arrow that a chain of others implies is left out.

    python docs/rooms.py            print the Mermaid graph
    python docs/rooms.py --write    write it to architecture.md
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"```mermaid\n.*?```", re.DOTALL)
PACKAGES = ("fpsim", "ada_loss")
# Folders of rooms: each file and each folder in them is a room. Any other folder is one room.
HOUSES = ("fpsim", "ada_loss", "ada_loss/lab")

Arrows = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the packages by its name, "fpsim.kernels.round"."""
    files = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports() -> Arrows:
    """Which modules of the packages each module imports, anywhere in its source."""
    files = modules()

    def home(name: str) -> str | None:
        """The module that a full name comes from: `fpsim.formats` for `fpsim.formats.floats.as_format`."""
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name or None

    arrows: Arrows = {}
    for module, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        arrows[module] = {source for name in names if (source := home(name))} - {module}
    return arrows


def reachable(arrows: Arrows, start: str) -> set[str]:
    """Whatever can be reached from `start` by one arrow or more."""
    seen: set[str] = set()
    stack = [start]
    while stack:
        for target in arrows.get(stack.pop(), ()):
            if target not in seen:
                seen.add(target)
                stack.append(target)
    return seen


def room_of(module: str) -> str:
    """The room of a module: `fpsim/kernels` for `fpsim.kernels.round`."""
    path = module.replace(".", "/")
    house = max((house for house in HOUSES if f"{path}/".startswith(f"{house}/")), key=len)
    inside = path.removeprefix(house).strip("/")
    return f"{house}/{inside.partition('/')[0] or '__init__'}"


def rooms() -> Arrows:
    """Which rooms each room imports."""
    arrows: Arrows = {}
    for module, targets in imports().items():
        room = room_of(module)
        arrows.setdefault(room, set()).update({room_of(t) for t in targets} - {room})
    return {room: targets for room, targets in arrows.items() if targets or any(room in t for t in arrows.values())}


def without_implied(arrows: Arrows) -> Arrows:
    """The same order with as few arrows as possible."""
    kept = {room: set(targets) for room, targets in arrows.items()}
    for room in sorted(kept):
        for target in sorted(kept[room]):
            kept[room].discard(target)
            if target not in reachable(kept, room):
                kept[room].add(target)
    return kept


def mermaid() -> str:
    """The picture as a Mermaid graph, in the block that the page holds."""
    arrows = without_implied(rooms())
    lines = ["```mermaid", "graph TD"]
    for house in HOUSES:
        lines.append(f'    subgraph {_id(house)}["{house}/"]')
        for room in sorted(arrows):
            if room.rpartition("/")[0] == house:
                lines.append(f'        {_id(room)}["{_path(room).removeprefix(f"{house}/")}"]')
        lines.append("    end")
    lines += [f"    {_id(room)} --> {_id(target)}" for room in sorted(arrows) for target in sorted(arrows[room])]
    return "\n".join([*lines, "```"])


def table() -> str:
    """The picture as a table in Markdown, for a page without the forge's script: a row for each room that imports."""
    arrows = without_implied(rooms())
    rows = [
        f"| `{_path(room)}` | {', '.join(f'`{_path(target)}`' for target in sorted(arrows[room]))} |"
        for house in HOUSES
        for room in sorted(arrows)
        if arrows[room] and room.rpartition("/")[0] == house
    ]
    return "\n".join(["| room | imports |", "| --- | --- |", *rows])


def _path(room: str) -> str:
    return f"{room}/" if (ROOT / room).is_dir() else f"{room}.py"


def _id(room: str) -> str:
    return room.replace("/", "_")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(BLOCK.sub(lambda _: mermaid(), PAGE.read_text(), count=1))
    else:
        print(mermaid())
