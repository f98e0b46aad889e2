"""Heat maps by site and step: as figures, and as images of one pixel each, transparent for NaN."""

from __future__ import annotations

import struct
import textwrap
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ada_loss.lab.results.figures import LETTERS_AN_INCH, ink, plain
from fpsim.checks import pip_install
from fpsim.insight.pictures import new_picture

try:
    from matplotlib import colormaps
except ImportError as error:
    raise ImportError(f"A heat map needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["heat_png", "plot_heat"]

COLOURS = "cividis"
SHOWN_SITES = 60
STEPS = 255  # of the colours; the last entry of the palette is transparent


def heat_png(shares: NDArray[np.float64]) -> bytes:
    """The content of a PNG of shares between 0 and 1.

    shares: (rows, columns), at least one of each; NaN is transparent.

    >>> content = heat_png(np.array([[0.0, np.nan], [0.5, 1.0]]))
    >>> content[:8], len(content) < 1200
    (b'\\x89PNG\\r\\n\\x1a\\n', True)
    """
    height, width = shares.shape
    known = np.isfinite(shares)
    indices = np.full(shares.shape, STEPS, dtype=np.uint8)
    indices[known] = np.round(np.clip(shares[known], 0, 1) * (STEPS - 1)).astype(np.uint8)
    palette = (colormaps[COLOURS](np.linspace(0, 1, STEPS))[:, :3] * 255).round().astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1)  # each begins with its filter, none
    # PNG, third edition, 11.2: colour type 3 is indexed, and tRNS has the alpha of each entry
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [_chunk(b"IHDR", header), _chunk(b"PLTE", palette.tobytes() + bytes(3))]
    parts += [_chunk(b"tRNS", bytes([255] * STEPS + [0])), _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def plot_heat(
    steps: Sequence[int],
    sites: Sequence[str],
    values: NDArray[np.float64],
    title: str,
    words: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> Any:
    """Plot values by site and step, as colours.

    steps: the steps at which a column ends.
    sites: from input to output.
    values: (steps, sites); NaN is hatched.
    title: of the figure.
    words: the label of the colour bar.
    limits: the values of the first and the last colour.
    """
    if len(sites) > SHOWN_SITES:
        title += f"; {SHOWN_SITES} of {len(sites)} sites"
        chosen = np.linspace(0, len(sites) - 1, SHOWN_SITES).round().astype(int)
        sites, values = [sites[i] for i in chosen], values[:, chosen]
    figure = new_picture(7.2, 1.1 + 0.19 * len(sites))
    axes = figure.subplots()
    edges = [0, *steps]
    low, high = limits
    mesh = axes.pcolormesh(edges, range(len(sites) + 1), values.T, cmap=COLOURS, vmin=low, vmax=high)
    mesh.set(edgecolor="face", linewidth=0.2)  # no hairlines between the cells of a vector picture
    axes.set_facecolor("0.85" if ink() == "black" else "0.3")
    is_empty = bool(np.isnan(values).any())
    axes.patch.set(hatch="////" if is_empty else None, edgecolor=ink())
    axes.set_yticks([i + 0.5 for i in range(len(sites))], [*map(plain, sites)], fontsize=7)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("step (hatched: nothing arrives here)" if is_empty else "step", fontsize=9)
    axes.set_title(textwrap.fill(plain(title), round(LETTERS_AN_INCH * figure.get_figwidth())), fontsize=9)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(words, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure
