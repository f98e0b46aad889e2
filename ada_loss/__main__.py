"""The command line, `ada-loss` or `python -m ada_loss`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from ada_loss.completions import (
    complete_classics,
    complete_formats,
    complete_hardware,
    complete_sweeps,
    complete_tasks,
    complete_updates,
)

try:
    import typer
except ImportError:
    from fpsim.checks import pip_install

    raise SystemExit(f"The command line needs more than the library: {pip_install('lab')}.") from None

# Everything else is imported where it is used, so that --help and a mistyped option are answered at once, without
# importing torch.

# 2 is typer's own exit code for a wrong option, and 130 is a shell's exit code for Ctrl-C.
FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="ada-loss",
    epilog="Exit codes: 0 success; 1 cells failed; 2 bad input; 3 it could not go on; 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes would double the time of the imports
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"ada-loss {version('ada-loss')}, torch {version('torch')}, Python {python}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Compare number formats and gradient scaling methods in the training of neural networks."""


Out = Annotated[Path, typer.Argument(help="The folder of a sweep.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Workers = Annotated[int | None, typer.Option(help="Processes of this machine.", show_default="as the file says, or 1")]
Minimize = Annotated[
    list[str] | None, typer.Option("--minimize", help="A metric of which a smaller value is better. Repeatable.")
]
Maximize = Annotated[
    list[str] | None, typer.Option("--maximize", help="A metric of which a larger value is better. Repeatable.")
]
EngineName = Annotated[str | None, typer.Option(help="here, local, or a Dask scheduler's tcp://HOST:PORT.")]
Device = Annotated[str | None, typer.Option(help="Where cells compute: cpu, cuda.", show_default="cpu")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Run the failed cells again.")]
KeepOld = Annotated[
    bool, typer.Option("--keep-old", help="Go on with a folder that another release has computed; the report marks it.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="An argument, or an option: task_options.epochs=3. Repeatable.")
]
Seconds = Annotated[float | None, typer.Option(help="Seconds that one cell may take.", show_default="no limit")]


@contextmanager
def _errors_as_exit_codes(hint: str = "") -> Iterator[None]:
    """Report an error as one line on stderr and an exit code; bugs of this library keep their traceback.

    hint: printed after the error if the work was stopped and can be resumed.
    """
    from ada_loss.lab.errors import SweepStopped

    # The library raises errors of these kinds for bad input, with messages for users.
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        _say(error)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt as error:
        _say(f"{str(error) or 'Interrupted.'}{hint}")
        raise typer.Exit(INTERRUPTED) from None
    except SweepStopped as error:
        _say(f"{error}{hint}")
        raise typer.Exit(STOPPED) from None


def _say(words: object) -> None:
    from ada_loss.lab.errors import printable

    print(printable(words), file=sys.stderr)


def _given(**options: Any) -> dict[str, Any]:
    """Drop options that were not given, so that the defaults of the library, or of the file, apply."""
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def sweep(
    config: Annotated[
        str,
        typer.Argument(
            help="A YAML file, or the name of a sweep that comes with the library (digits).",
            autocompletion=complete_sweeps,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The folder to keep everything in.")] = None,
    workers: Workers = None,
    engine: EngineName = None,
    device: Device = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds each training is run with.")] = None,
    update: Annotated[
        list[str] | None,
        typer.Option(
            help="What the optimizer stores: float32, bf16_sr, ... Repeatable.", autocompletion=complete_updates
        ),
    ] = None,
    time_limit: Seconds = None,
    retry_failed: RetryFailed = False,
    keep_old: KeepOld = False,
    settings: Settings = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Do not train float32 for comparison.")] = False,
    minimize: Minimize = None,
    maximize: Maximize = None,
    why: Annotated[
        bool, typer.Option("--why", help="Explain why cells diverge or fall short; some are trained again.")
    ] = False,
    print_file: Annotated[
        bool, typer.Option("--print", help="Print the file, to write your own from it, and train nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train every combination of formats, scaling methods and seeds of a file, and report the results.

    Run it again to resume. Options given here override the file.
    """
    with _errors_as_exit_codes():
        from ada_loss.lab.sweep.config import read_sweep, text_of, with_settings
        from ada_loss.lab.sweep.driver import sweep as run
        from ada_loss.lab.terminal import without_offers

        if print_file:
            print(text_of(config), end="")
            return

        folder = None if out is None else str(out)
        execution = _given(workers=workers, engine=engine, device=device, time_limit=time_limit)
        # A flag that is not given must not override the file, so its value is None here, not False.
        chosen = {"retry_failed": retry_failed or None, "baseline": False if no_baseline else None, "why": why or None}
        chosen["keep_old"] = keep_old or None
        given = _given(
            **execution, **chosen, seeds=seeds, updates=update, out=folder, minimize=minimize, maximize=maximize
        )
        arguments = with_settings(read_sweep(config), settings or [])
        _add_current_folder()
        with without_offers():
            results = run(**{**arguments, **given})
        _finish(results, as_json)


def _add_current_folder() -> None:
    """Make modules in the current folder importable, because they may have tasks.

    Python would add only the folder of the script `ada-loss` to the path.
    """
    from ada_loss.lab.tasks import add_to_path

    # `python -P` keeps the current folder off the path on purpose.
    if not sys.flags.safe_path:
        add_to_path(".")


@app.command()
def resume(
    out: Out,
    workers: Workers = None,
    engine: EngineName = None,
    device: Device = None,
    time_limit: Seconds = None,
    retry_failed: RetryFailed = False,
    keep_old: KeepOld = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import and run the tasks that the folder names, whatever they are.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Resume a stopped sweep from its folder alone."""
    with _errors_as_exit_codes():
        from ada_loss.lab.sweep.driver import resume as run
        from ada_loss.lab.terminal import without_offers

        _add_current_folder()
        execution = _given(workers=workers, engine=engine, device=device, time_limit=time_limit)
        with without_offers():
            results = run(out, **execution, retry_failed=retry_failed, keep_old=keep_old, trust=trust)
        _finish(results, as_json)


def _finish(results: Any, as_json: bool) -> None:
    """Write the report, print the tables and the failed cells; exit with FAILED if a cell failed."""
    from ada_loss.lab.errors import printable
    from ada_loss.lab.printed import show, show_table

    report, verdicts = results.report(), [str(one) for one in results.verdicts()]
    if as_json:
        told = {"out": str(results.out), "report": str(report), "counts": results.counts, "verdicts": verdicts}
        told |= {"missing": len(results.missing.cells), "old": results.old}
        print(json.dumps(told))
    else:
        for table in results.tables():
            show_table(table)
        if results.old:
            show(results.old)
        for name, words in results.legend.items():
            show(f"{printable(name)}: {printable(words)}")
        for cell in results.failures():
            show(printable(f"failed: {cell['id']}: {cell['error']}"))
        for words in verdicts:
            show(words)
        show(f"Report: {report}")
    if results.counts["failed"]:
        raise typer.Exit(FAILED)


@app.command()
def search(
    task: Annotated[
        str, typer.Argument(help="A task's name, or 'module:function' that makes one.", autocompletion=complete_tasks)
    ],
    roles: Annotated[
        list[str], typer.Option(help="Roles that get small formats, with commas between; also states, the optimizer's.")
    ] = ["weight,activation,error,weight_grad"],  # noqa: B006
    scaling: Annotated[str, typer.Option(help="How gradients are scaled: a method's name or a number.")] = "none",
    rounding: Annotated[
        str | None, typer.Option(help="nearest_even, stochastic, ...", show_default="nearest_even")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far below float32 the mean over the seeds may be.")] = 0.01,
    seeds: Annotated[int, typer.Option(help="How many seeds each training is run with.")] = 3,
    trials: Annotated[int, typer.Option(help="How many combinations are tried before bits are taken away.")] = 30,
    exponent_bits: Annotated[tuple[int, int], typer.Option(help="Least and most.")] = (2, 8),
    mantissa_bits: Annotated[tuple[int, int], typer.Option(help="Least and most.")] = (0, 10),
    metric: Annotated[str | None, typer.Option(help="The metric to keep.", show_default="the task's first")] = None,
    minimize: Minimize = None,
    maximize: Maximize = None,
    workers: Annotated[int, typer.Option(help="Processes of this machine, and combinations tried at once.")] = 1,
    engine: EngineName = None,
    device: Annotated[str, typer.Option(help="Where cells compute: cpu, cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="The folder to keep everything in.")] = Path("runs/search"),
    keep_old: KeepOld = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest formats, by role, with which a task keeps the accuracy of float32, or another metric.

    Prints the formats that no others beat in both bits and metric, the smallest within the tolerance, and whether the
    seeds decide that it is within the tolerance.

    Run it again to resume.
    """
    command = shlex.join(["ada-loss", *sys.argv[1:]])
    with _errors_as_exit_codes(f" Go on with: {command}"):
        from ada_loss.files import strict_json
        from ada_loss.lab.printed import show
        from ada_loss.lab.studies.search import SETTABLE
        from ada_loss.lab.studies.search import search as run
        from ada_loss.lab.sweep.config import with_settings

        _add_current_folder()
        arguments = {
            "task": task,
            # The option may also be repeated: typer makes a list of all values.
            "roles": [role.strip() for word in roles for role in word.split(",")],
            "exponent_bits": exponent_bits,
            "mantissa_bits": mantissa_bits,
            "tolerance": tolerance,
            "scaling": _number_or_name(scaling),
            "rounding": rounding,
            "seeds": seeds,
            "trials": trials,
            "metric": metric,
            "minimize": minimize or (),
            "maximize": maximize or (),
            "workers": workers,
            "engine": engine,
            "device": device,
            "out": out,
            "keep_old": keep_old,
        }
        result = run(**with_settings(arguments, settings or [], SETTABLE))
        if as_json:
            names = "formats bits metric accuracy deviation baseline tolerance outcome statement".split()
            answer = {name: getattr(result, name) for name in names}
            print(strict_json({"out": str(out), **answer, "front": result.front()}))
        else:
            show(f"{result}\nEvery training: {out / 'ledger.sqlite'}")


def _number_or_name(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


@app.command()
def status(out: Out, as_json: AsJson = False) -> None:
    """Show the progress of a sweep, also while it runs."""
    with _errors_as_exit_codes():
        from ada_loss.lab.cells.ledger import Ledger, counted  # without torch, so that the answer comes at once
        from ada_loss.lab.cells.missing import is_driven, read_snapshot
        from ada_loss.lab.errors import printable

        driven = is_driven(out)  # before and after: a driver may end or begin in between
        with Ledger(out / "ledger.sqlite", readonly=True) as ledger:
            cells, _, missing = read_snapshot(ledger, out)
        driven = is_driven(out) or driven
    counts, interrupted = counted(cells), 0
    if not driven:  # the next driver plans the running cells again
        interrupted, counts["running"] = counts["running"], 0
        counts["planned"] += interrupted
    seconds = sum(cell["seconds"] or 0.0 for cell in cells if cell["state"] == "done")
    failed = [{"id": cell["id"], "error": cell["error"]} for cell in cells if cell["state"] == "failed"]
    if as_json:
        told = {"out": str(out), "cells": len(cells), **counts, "interrupted": interrupted, "seconds": seconds}
        told |= {"missing": len(missing.cells)}
        print(json.dumps({**told, "failures": failed}))
        return
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    print(f"{len(cells)} cells: {words}; {seconds:.1f} s of training")
    if interrupted:
        print(f"No driver is running; {interrupted} of the planned were interrupted. Go on with: ada-loss resume {out}")
    if missing:
        print(missing)
    for cell in failed:
        print(printable(f"failed: {cell['id']}: {cell['error']}"))


@app.command()
def table(
    out: Out,
    rows: Annotated[str, typer.Option(help="The rows: format, scaling, rounding, seed, or an option.")] = "format",
    columns: Annotated[str, typer.Option(help="The columns.")] = "scaling",
    metric: Annotated[
        str | None, typer.Option(help="accuracy, underflow, ...", show_default="the task's first")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help="Only these cells: rounding=stochastic. Repeatable.")] = None,
    to: Annotated[str, typer.Option(help="markdown, latex, csv or json.")] = "markdown",
) -> None:
    """Print a metric as a table: mean and standard deviation over the seeds."""
    with _errors_as_exit_codes():
        from ada_loss.lab.printed import is_terminal, show_table
        from ada_loss.lab.results import Results

        chosen = dict(_pair(word) for word in where or [])
        result = Results(out).table(rows, columns, metric, chosen)
        if to == "markdown" and is_terminal():
            show_table(result)
        else:
            print(result.to(to), end="")


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"--where is {word!r}. Expected: NAME=VALUE. Take rounding=stochastic, for instance.")
    return name, value


@app.command()
def report(
    out: Out,
    to: Annotated[Path | None, typer.Option(help="The HTML file to write.", show_default="report.html there")] = None,
    question: Annotated[str | None, typer.Option(help="The question of the sweep, for the head of the page.")] = None,
    minimize: Minimize = None,
    maximize: Maximize = None,
) -> None:
    """Write one HTML file, for offline use, with the tables, the pictures and every cell."""
    with _errors_as_exit_codes():
        from ada_loss.lab.results import Results

        results = Results(out, minimize=minimize or (), maximize=maximize or ())
        print(results.report(to, question=question))


@app.command()
def verdict(
    out: Out,
    metric: Annotated[str | None, typer.Option(help="What is compared.", show_default="the task's first")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="In units of the metric.", show_default="a point, or 1 % of float32's mean")
    ] = None,
    level: Annotated[float, typer.Option(help="The bound for the chance of a wrong statement.")] = 0.05,
    equivalence: Annotated[
        bool,
        typer.Option("--equivalence", help="Require a setting to be within the tolerance on both sides of float32."),
    ] = False,
    minimize: Minimize = None,
    maximize: Maximize = None,
) -> None:
    """List the settings within a tolerance of float32, those that fall short, and those still undecided."""
    with _errors_as_exit_codes():
        from ada_loss.lab.printed import show
        from ada_loss.lab.results import Results

        results = Results(out, minimize=minimize or (), maximize=maximize or ())
        for name in (*(minimize or ()), *(maximize or ())):  # without this check a misspelt name would be ignored
            results.require_metric(name)
        for one in results.verdicts(metric, tolerance, level, equivalence):
            show(one)


@app.command()
def formats(as_json: AsJson = False) -> None:
    """Print the catalogue of number formats."""
    from ada_loss.lab.printed import show_lines
    from fpsim import CATALOGUE

    names = ("bits", "exponent_bits", "mantissa_bits", "largest", "smallest_normal", "smallest", "epsilon")
    rows = [{"name": key, **{name: getattr(fmt, name) for name in names}} for key, fmt in CATALOGUE.items()]
    if as_json:
        print(json.dumps(rows))
        return
    head = ["name", *(name.replace("_", " ") for name in names)]
    show_lines([head, *([str(row["name"]), *(f"{row[name]:.6g}" for name in names)] for row in rows)])


@app.command()
def tasks(as_json: AsJson = False) -> None:
    """Show the tasks with the metric of float32 and the smallest tolerance that 3, 5 and 10 seeds can decide."""
    with _errors_as_exit_codes():
        from ada_loss.lab.printed import show_lines
        from ada_loss.lab.results.deciding import task_rows

        rows = task_rows()
        if as_json:
            print(json.dumps(rows))
            return
        show_lines([[*rows[0]], *([*row.values()] for row in rows)])


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="A task's name, or 'module:function' of a model or a task.", autocompletion=complete_tasks),
    ],
    fmt: Annotated[
        str, typer.Option("--format", help="The format for all roles.", autocompletion=complete_formats)
    ] = "fp16",
    as_json: AsJson = False,
) -> None:
    """Show the formats of a model's modules, and for a task also those of every site of one training step."""
    with _errors_as_exit_codes():
        from ada_loss.files import strict_json
        from ada_loss.lab.studies.describe import describe

        _add_current_folder()
        description = describe(model, fmt)
        print(strict_json(description.as_dict()) if as_json else description)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def depth() -> None:
    """Say where the trial with deep networks is now."""
    _say("The command depth is a script of the repository now: python benchmarks/depth.py --out FOLDER.")
    raise typer.Exit(BAD_INPUT)


@app.command()
def on(
    hardware: Annotated[
        str | None,
        typer.Argument(help="Names with commas between: h100,b200,mi300.", autocompletion=complete_hardware),
    ] = None,
    model: Annotated[
        str | None, typer.Argument(help="FILE:function that returns the model; it takes a seed, or nothing.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="FILE:function that returns a batch; it takes a step's number, or nothing.", show_default=False
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="FILE:function from the output, or output and target, to a loss.", show_default="the output's loss"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each short training.")] = 40,
    seeds: Annotated[int, typer.Option(help="Seeds of each short training; 0 for none, 3 or more for a verdict.")] = 3,
    lr: Annotated[float, typer.Option("--lr", help="The learning rate of AdamW.")] = 1e-3,
    fast: Annotated[bool, typer.Option("--fast", help="Leave the sums of products to torch, in float32.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="Print the hardware, and each line's source.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a model's behaviour on other hardware: failures, error by site, a short training, bits.

    The model runs here, in the formats that documents of the hardware name.
    """
    with _errors_as_exit_codes():
        from tqdm.auto import tqdm

        from ada_loss.files import strict_json
        from ada_loss.lab.studies.hardware import PRESETS, described
        from ada_loss.lab.studies.on import function_at, runs
        from ada_loss.lab.studies.on import on as run

        if list_them:
            rows = [described(one) for one in PRESETS.values()]
            print(strict_json(rows) if as_json else "\n\n".join(map(str, PRESETS.values())))
            return
        if hardware is None or model is None or batch is None:
            raise ValueError(
                "Hardware, a model and a batch are wanted: ada-loss on h100,b200 mine.py:make --batch mine.py:batch. "
                "The hardware: ada-loss on --list."
            )
        _add_current_folder()
        functions = function_at(model, "model"), function_at(batch, "batch")
        chosen = None if loss is None else function_at(loss, "loss")
        options: dict[str, Any] = {"steps": steps, "seeds": seeds, "learning_rate": lr, "sums": not fast}
        with tqdm(total=runs(hardware, max(seeds, 0)), unit="run", leave=False) as bar:  # on stderr
            found = run(hardware, *functions, loss=chosen, progress=bar.update, **options)
        print(strict_json(found.as_dict()) if as_json else found)


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="Which classic: swamping, ...", show_default=False, autocompletion=complete_classics),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the classics and their papers.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", show_default="5, with --quick 2")] = None,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="The folder for NAME.png, .csv and .md.")] = Path("runs/classics"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter measurements: half a minute.")] = False,
) -> None:
    """Reproduce a published effect in minutes: a picture, its numbers, and a paragraph on what they show.

    Run it again to resume.
    """
    command = shlex.join(["ada-loss", *sys.argv[1:]])
    with _errors_as_exit_codes(f" Go on with: {command}"):
        from ada_loss.lab.studies.classics import CLASSICS, reproduce_classic

        if listed or name is None:
            for key, paper in CLASSICS.items():
                print(f"{key:13} {paper.title}")
            return
        result = reproduce_classic(name, **_given(seeds=seeds, device=device), out=out, quick=quick, progress=_say)
        print(f"{result}\n\n{result.seconds:.0f} s of the processor")
        print(f"Written: {', '.join(map(str, result.files))}")


def main() -> None:
    app(prog_name="ada-loss")


if __name__ == "__main__":
    main()
