"""The trial of scaling methods in deep networks: a table, its numbers, and a picture.

    python benchmarks/depth.py --out runs/depth

Sends a gradient through deep ReLU networks whose layers make it grow or shrink, under every scaling method. Prints the
underflow, or how many gradients left the range, and the relative error of the first layer's weight gradient against
float32. Writes depth.csv, .md, .png and .svg.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ada_loss.files import csv_bytes, write_atomically
from ada_loss.lab.results.figures import figure_bytes, method_words, plot_depth
from ada_loss.lab.studies.depth import depth_trial

COLUMNS = ("format", "gain", "method", "log2_scale", "underflow", "overflow", "error")


def depth_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown: underflow and error, a line for each format and method, a column for each gain."""
    gains = list(dict.fromkeys(row["gain"] for row in rows))
    lines = [
        "| format | method | " + " | ".join(f"gain {g:g}" for g in gains) + " |",
        "|---|---|" + "---|" * len(gains),
    ]
    for fmt, method in dict.fromkeys((row["format"], row["method"]) for row in rows):
        cells = []
        for gain in gains:
            (row,) = (r for r in rows if (r["format"], r["method"], r["gain"]) == (fmt, method, gain))
            lost = f"{row['overflow']} beyond" if row["overflow"] else f"{100 * row['underflow']:.2f} %"
            cells.append(f"{lost}, {row['error']:.2g}" if math.isfinite(row["error"]) else f"{lost}, lost")
        lines.append(f"| {fmt} | {method_words(method)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/depth"), help="the folder for the files")
    out: Path = parser.parse_args(arguments).out
    torch.set_num_threads(1)
    rows = depth_trial()
    figure, text = plot_depth(rows), depth_table(rows)
    files = {"csv": csv_bytes(rows, COLUMNS), "md": f"{text}\n".encode()}
    files |= {kind: figure_bytes(figure, kind) for kind in ("png", "svg")}
    for kind, content in files.items():
        write_atomically(out / f"depth.{kind}", content)
    print(text)
    print(f"Written: {', '.join(str(out / f'depth.{kind}') for kind in files)}")


if __name__ == "__main__":
    main()
