"""The command line: `python -m ada_loss digits`, `depth`, `scaling`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFAULT_FORMATS = "fp32 fp16 bf16 cb16 e5m2 e4m3fn"

DEPTH = """Send one gradient back through deep ReLU networks whose layers make it grow or shrink, with every gradient
scaling method, and compare what arrives at the first layer with float32. Prints a table: underflow (or how many
gradients left the range) and the relative error of the first layer's weight gradient."""

SCALING = """Train a deep network on scikit-learn's digits with gradients in small formats, all else in float32, under
every gradient scaling method: none, each constant power of two from 2 to 2^20, three systems' dynamic loss scales as
they start by themselves, and adaptive scaling per layer. Prints the test accuracy, mean and standard deviation over
the seeds. A step with a gradient that is not finite is skipped under all of them."""

DESCRIPTION = """Train a small residual network on scikit-learn's 1,797 handwritten digits in several number formats.

Every tensor of the forward and the backward pass is rounded to the format (weights where they are used, activations,
their gradients, weight gradients); float32 master weights, SGD with momentum, no loss scaling. Columns of the table:
accuracy on the 450 test images, computed in the format; underflow, the share of non-zero gradients of activations that
become zero when they are rounded (sampled at every fourth call); seconds of training."""


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="python -m ada_loss", description="Compare number formats in training.")
    commands = main.add_subparsers(dest="command", required=True)
    digits = commands.add_parser(
        "digits",
        help="what each format does to the training of a small network on real images",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    digits.add_argument(
        "--formats", nargs="+", default=DEFAULT_FORMATS.split(), metavar="FORMAT", help=f"default: {DEFAULT_FORMATS}"
    )
    digits.add_argument("--epochs", type=int, default=12, help="passes over the training images (12)")
    digits.add_argument("--seed", type=int, default=0, help="of weights, order and noise (0)")
    digits.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for digits.csv, .png and .svg")
    digits.set_defaults(run=run_digits)
    depth = commands.add_parser(
        "depth",
        help="what each scaling method saves of a gradient on its way through a deep network",
        description=DEPTH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    depth.add_argument("--out", type=Path, default=Path("runs/depth"), help="folder for depth.csv, .md, .png and .svg")
    depth.set_defaults(run=run_depth)
    scaling = commands.add_parser(
        "scaling",
        help="which scaling method saves the training of a deep network on real images",
        description=SCALING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scaling.add_argument("--seeds", type=int, default=5, help="runs of each method (5)")
    scaling.add_argument("--epochs", type=int, default=40, help="passes over the training images (40)")
    scaling.add_argument("--workers", type=int, default=1, help="processes (1)")
    scaling.add_argument("--methods", nargs="+", metavar="METHOD", help="none, numbers and names; default: all")
    scaling.add_argument(
        "--out", type=Path, default=Path("runs/scaling"), help="folder for scaling.csv, .md, .png, .svg"
    )
    scaling.set_defaults(run=run_scaling)
    return main


def run_digits(options: argparse.Namespace) -> None:
    from ada_loss.lab.compare import COLUMNS, compare, format_table
    from ada_loss.lab.plots import plot_comparison
    from ada_loss.lab.tasks import digits

    results = compare(digits, options.formats, epochs=options.epochs, seed=options.seed)
    print(format_table(results))
    _write(options.out / "digits", results, COLUMNS, plot_comparison(results))


def run_depth(options: argparse.Namespace) -> None:
    import torch
    from tqdm.auto import tqdm

    from ada_loss.lab.depth import COLUMNS, GAINS, METHODS, depth_table, depth_trial
    from ada_loss.lab.plots import plot_depth

    torch.set_num_threads(1)
    with tqdm(total=3 * len(GAINS) * len(METHODS), unit="backward") as bar:
        rows = depth_trial(progress=bar.update)
    print(depth_table(rows))
    _write(options.out / "depth", rows, COLUMNS, plot_depth(rows), depth_table(rows))


def run_scaling(options: argparse.Namespace) -> None:
    from ada_loss.lab.methods import COLUMNS, METHODS, as_method, method_table, run_methods
    from ada_loss.lab.plots import plot_methods

    methods = METHODS if options.methods is None else [as_method(word) for word in options.methods]
    rows = run_methods(methods=methods, seeds=options.seeds, epochs=options.epochs, workers=options.workers)
    print(method_table(rows))
    _write(options.out / "scaling", rows, COLUMNS, plot_methods(rows), method_table(rows))


def _write(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str], figure: Any, table: str = "") -> None:
    """The rows as CSV, the table as Markdown, the figure as PNG and SVG: each whole or not at all."""
    from ada_loss.lab.files import csv_bytes, write_atomically
    from ada_loss.lab.plots import figure_bytes

    files = {"csv": csv_bytes(rows, columns), "png": figure_bytes(figure, "png"), "svg": figure_bytes(figure, "svg")}
    if table:
        files["md"] = (table + "\n").encode()
    for kind, content in files.items():
        write_atomically(path.with_suffix(f".{kind}"), content)
    print(f"Written: {', '.join(str(path.with_suffix(f'.{kind}')) for kind in files)}")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    for name in ("epochs", "seeds", "workers"):
        if getattr(options, name, 1) < 1:
            print(f"--{name} {getattr(options, name)} trains nothing. Possible: 1 or more.", file=sys.stderr)
            return 2
    try:
        options.run(options)  # imports after the options, so that --help and a mistyped one answer at once
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
