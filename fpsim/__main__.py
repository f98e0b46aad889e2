"""The command line: `python -m fpsim verify --device cpu|cuda [--quick|--full]`, `python -m fpsim why script.py`, and
`python -m fpsim mismatch FILE:make_a FILE:make_b --batch FILE:batch` (or a dump of an engine), `python -m fpsim warm`.
"""

from __future__ import annotations

import argparse
import platform
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from fpsim.changes import BITS
from fpsim.checks import DISTRIBUTION
from fpsim.compiling.kept import folder_of_code
from fpsim.insight.mismatch import mismatch
from fpsim.insight.why import why
from fpsim.tensors.golden import replay
from fpsim.tensors.verify import verify
from fpsim.warming import STEPS, compile_steps

# Arguments of `why` that a script may define, each with a test of the value and a description of valid values.
_NAMES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer": (lambda x: isinstance(x, torch.optim.Optimizer), "a torch.optim.Optimizer"),
    "scaler": (lambda x: all(callable(getattr(x, name, None)) for name in ("scale", "step", "update")), "a GradScaler"),
    "batches": (lambda x: isinstance(x, int) and not isinstance(x, bool), "the number of batches of `step(i)`"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit status: 1 if a comparison differs, or a cause was found; 0 otherwise.

    As with diff and grep, a status of 2 means trouble: wrong arguments, or code that raises.
    """
    parser = argparse.ArgumentParser(prog="python -m fpsim", description=__doc__)
    words = f"fpsim {version(DISTRIBUTION)}, torch {torch.__version__}, numbers of version {BITS}"
    parser.add_argument("--version", action="version", version=words)
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|why|mismatch|warm")
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
    command = commands.add_parser("mismatch", help="say why two engines disagree on the same tokens")
    for side, what in (("a", "trains"), ("b", "samples")):
        words = f"a function that returns the model that {what}, or the file of a dump of its engine"
        command.add_argument(side, metavar=f"FILE:make_{side}", help=words)
    command.add_argument(
        "--batch",
        metavar="FILE:batch",
        help="what the models are called with, or a function for it; a dump brings its tokens",
    )
    command.add_argument("--attribution", choices=("both", "back", "none"), default="both")
    command = commands.add_parser(
        "warm", help="compile common formats, recipes and updates in about a minute on two cores, and keep them on disk"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args(arguments)
    if chosen.command in ("why", "mismatch"):
        return _why(parser, chosen.script) if chosen.command == "why" else _mismatch(parser, chosen)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("Got --device cuda, and torch sees no card. Expected here: --device cpu.")
    return _warm(parser, chosen.device) if chosen.command == "warm" else _verify(chosen)


def _mismatch(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    """Print the distance between two engines, and its causes."""
    loaded: dict[str, dict[str, Any]] = {}
    made = []
    is_dump = [Path(word).suffix in (".safetensors", ".json") or Path(word).is_dir() for word in (chosen.a, chosen.b)]
    if chosen.batch is None and not any(is_dump):
        parser.error("--batch was not given. Expected: --batch FILE:batch, or a dump, which brings its tokens.")
    for word, is_path in zip((chosen.a, chosen.b, chosen.batch), (*is_dump, chosen.batch is None), strict=True):
        if is_path:
            made.append(word)
            continue
        file, _, name = word.rpartition(":")
        if not name.isidentifier() or not Path(file).is_file():
            parser.error(f"Got {word!r}. Expected FILE:NAME, a Python file and a name at its top level, or a dump.")
        if file not in loaded:
            loaded[file] = _run_script(file, "fpsim_mismatch")
        if name not in loaded[file]:
            parser.error(f"{file} does not define `{name}`. Expected it at its top level.")
        value = loaded[file][name]
        made.append(value() if callable(value) and not isinstance(value, torch.nn.Module) else value)
    models = [side for side in made[:2] if isinstance(side, torch.nn.Module)]
    # An upper bound of the passes, for the progress: 20, and two for each module. With a dump, some 40 more: changes of
    # the model are tried.
    passes, most = count(1), (60 if any(is_dump) else 20) + 2 * sum(1 for model in models[:1] for _ in model.modules())
    progress = (lambda: _show_progress(next(passes), most, "passes, at most")) if sys.stderr.isatty() else None
    try:
        found = mismatch(*made, attribution=chosen.attribution, progress=progress)
    except (FileNotFoundError, ValueError) as error:
        # Without a dump, the error comes from the user's own code, and its traceback says where.
        if not any(is_dump):
            raise
        parser.error(str(error))
    if progress is not None:
        print(file=sys.stderr)
    print(found)
    return int(found.is_beyond)


def _run_script(script: str, name: str) -> dict[str, Any]:
    """Return the names that a Python file defines; code under `if __name__ == "__main__":` is not run."""
    # The script's folder goes on the path, as when Python runs the script, so that it can import its neighbours.
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        return runpy.run_path(script, run_name=name)
    finally:
        del sys.path[0]


def _why(parser: argparse.ArgumentParser, script: str) -> int:
    """Print why the step of a script fails."""
    if not Path(script).is_file():
        parser.error(f"Got {script!r}, which is not a file. Expected a Python file that defines `model` and `step`.")
    names = _run_script(script, "fpsim_why")
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
    """Collect the arguments of `why` that a script defines; report names that it uses for something else."""
    given: dict[str, Any] = {}
    for name, (is_meant, words) in _NAMES.items():
        if name in names and is_meant(names[name]):
            given[name] = names[name]
        elif names.get(name) is not None:
            kind = type(names[name]).__name__
            print(f"{script}: `{name}` is of type {kind}, not {words}, and is left out.", file=sys.stderr)
    return given


def _warm(parser: argparse.ArgumentParser, device: str) -> int:
    """Compile all loops that are not on disk yet, with a progress bar on stderr."""
    try:
        folder = folder_of_code()
    except OSError as error:
        parser.error(f"Machine code cannot be kept ({error}). Set NUMBA_CACHE_DIR to a folder that can be written.")
    begin, total = time.monotonic(), len(STEPS)
    _show_progress(0, total, "starting")
    try:
        for done, name in enumerate(compile_steps(device), 1):
            _show_progress(done, total, name)
    except KeyboardInterrupt:
        print("\nInterrupted. What is compiled is kept; the same command goes on.", file=sys.stderr)
        return 130
    finally:
        print(file=sys.stderr)
    print(f"Machine code is in {folder}, after {time.monotonic() - begin:.0f} seconds.")
    return 0


def _show_progress(done: int, total: int, name: str) -> None:
    """Print a bar that overwrites itself on a terminal; a line for each step elsewhere."""
    bar = ("#" * (30 * done // total)).ljust(30, ".")
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"[{bar}] {done}/{total} {name:28}", end=end, file=sys.stderr, flush=True)


def _verify(chosen: argparse.Namespace) -> int:
    """Print a table of the comparisons and measurements."""
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    failed = total = 0
    for row in chain(replay(chosen.device), verify(chosen.device, chosen.full)):
        verdict = {None: "", True: "ok", False: "WRONG"}[row.ok]
        print(f"{row.check:34} {verdict:6} {row.detail}", flush=True)
        total, failed = total + (row.ok is not None), failed + (row.ok is False)
    print(f"{failed} of {total} checks failed" if failed else f"all {total} checks passed")
    return int(failed > 0)


def _status() -> int:
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return 2  # Python's own status is 1, which a script would take for a difference


if __name__ == "__main__":
    sys.exit(_status())
