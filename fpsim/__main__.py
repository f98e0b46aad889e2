"""The command line: `python -m fpsim verify --device cpu|cuda [--quick|--full]`."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from fpsim.verify import verify


def main(arguments: list[str] | None = None) -> int:
    """Print a table of what was compared and measured; 1 if anything differs, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m fpsim", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="verify")
    command = commands.add_parser("verify", help="compare the kernels of this machine with a second definition")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    extent = command.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="130,000 numbers for each format and rounding (default)")
    extent.add_argument("--full", action="store_true", help="also all 2**32 float32 numbers, for six formats")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda came, and torch sees no card. Possible here: --device cpu.")
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    failed = total = 0
    for row in verify(chosen.device, chosen.full):
        verdict = {None: "", True: "ok", False: "WRONG"}[row.ok]
        print(f"{row.check:34} {verdict:6} {row.detail}", flush=True)
        total, failed = total + (row.ok is not None), failed + (row.ok is False)
    print(f"{failed} of {total} checks failed" if failed else f"all {total} checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
