"""The command line: `python -m ada_loss digits`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DEFAULT_FORMATS = "fp32 fp16 bf16 cb16 e5m2 e4m3fn"

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
    return main


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.epochs < 1:
        print(f"--epochs {options.epochs} trains nothing. Possible: 1 or more.", file=sys.stderr)
        return 2
    # after the options, so that --help and a mistyped one answer at once
    from ada_loss.lab.compare import compare, format_table, write_atomically, write_csv
    from ada_loss.lab.plots import figure_bytes, plot_comparison
    from ada_loss.lab.tasks import digits

    try:
        results = compare(digits, options.formats, epochs=options.epochs, seed=options.seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(format_table(results))
    write_csv(results, options.out / "digits.csv")
    figure = plot_comparison(results)
    for kind in ("png", "svg"):
        write_atomically(options.out / f"digits.{kind}", figure_bytes(figure, kind))
    print(f"Written: {', '.join(str(options.out / f'digits.{kind}') for kind in ('csv', 'png', 'svg'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
