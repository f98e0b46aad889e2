"""The command line: `python -m fpsim verify --device cpu|cuda [--quick|--full]`, `python -m fpsim why script.py`."""

from __future__ import annotations

import argparse
import platform
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fpsim.changes import BITS
from fpsim.checks import DISTRIBUTION
from fpsim.insight.why import why
from fpsim.tensors.golden import replay
from fpsim.tensors.verify import verify

_NAMES: dict[str, tuple[Callable[[Any], bool], str]] = {  # of `why`, which a script may define
    "optimizer": (lambda x: isinstance(x, torch.optim.Optimizer), "a torch.optim.Optimizer"),
    "scaler": (lambda x: all(callable(getattr(x, name, None)) for name in ("scale", "step", "update")), "a GradScaler"),
    "batches": (lambda x: isinstance(x, int) and not isinstance(x, bool), "the number of batches of `step(i)`"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit status: 1 if a comparison differs, or a cause was found; 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m fpsim", description=__doc__)
    words = f"fpsim {version(DISTRIBUTION)}, torch {torch.__version__}, numbers of version {BITS}"
    parser.add_argument("--version", action="version", version=words)
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|why")
    command = commands.add_parser(
        "verify", help="compare the kernels of this machine with golden vectors and a second definition"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    extent = command.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="130,000 numbers for each format and rounding (default)")
    extent.add_argument("--full", action="store_true", help="also all 2**32 float32 numbers, for six formats")
    command = commands.add_parser("why", help="say what makes the step of a script fail")
    command.add_argument(
        "script",
        help="a Python file that defines `model` and `step`, and may define `optimizer`, `scaler` and `batches`; what "
        'stands under `if __name__ == "__main__":` is not run',
    )
    chosen = parser.parse_args(arguments)
    return _why(parser, chosen.script) if chosen.command == "why" else _verify(parser, chosen)


def _why(parser: argparse.ArgumentParser, script: str) -> int:
    """Print why the step of a script fails."""
    if not Path(script).is_file():
        parser.error(f"Got {script!r}, which is not a file. Expected a Python file that defines `model` and `step`.")
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        names = runpy.run_path(script, run_name="fpsim_why")
    finally:
        del sys.path[0]
    missing = [name for name in ("model", "step") if name not in names]
    if missing:
        parser.error(
            f"{script} does not define {' and '.join(f'`{name}`' for name in missing)}. Expected at its top level: "
            f"model, a torch.nn.Module; step, a function without arguments that runs the step that fails."
        )
    explanation = why(names["model"], names["step"], **_given(script, names))
    print(explanation)
    return int(explanation.cause is not None)


def _given(script: str, names: dict[str, Any]) -> dict[str, Any]:
    """What a script defines for `why`; a name that it uses for something else is left out, and that is said."""
    given: dict[str, Any] = {}
    for name, (is_meant, words) in _NAMES.items():
        if name in names and is_meant(names[name]):
            given[name] = names[name]
        elif names.get(name) is not None:
            kind = type(names[name]).__name__
            print(f"{script}: `{name}` is of type {kind}, not {words}, and is left out.", file=sys.stderr)
    return given


def _verify(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    """Print a table of what was compared and measured."""
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was given, and torch sees no card. Expected here: --device cpu.")
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    failed = total = 0
    for row in chain(replay(chosen.device), verify(chosen.device, chosen.full)):
        verdict = {None: "", True: "ok", False: "WRONG"}[row.ok]
        print(f"{row.check:34} {verdict:6} {row.detail}", flush=True)
        total, failed = total + (row.ok is not None), failed + (row.ok is False)
    print(f"{failed} of {total} checks failed" if failed else f"all {total} checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
