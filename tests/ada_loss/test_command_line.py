"""The command line as a user types it; in a process of its own where that is the claim."""

from __future__ import annotations

import inspect
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from children import environment, heed_ctrl_c
from tiers import parametrize

from ada_loss.__main__ import app, main
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.studies.search import search
from ada_loss.lab.sweep.config import SHIPPED, read_sweep
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.terminal import say
from fpsim import ROLES

CONFIG = """
task: sweep_tasks:tiny
formats: [fp16, e5m2]
scaling: [none, 1024]
seeds: 2
task_options: {epochs: 1}
baseline: false
"""


def started(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ada_loss", *map(str, words)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(), start_new_session=True, preexec_fn=heed_ctrl_c, **pipes)


def alone(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """What a process of its own prints: it takes two seconds, nearly all of them to import torch."""
    process = started(*words)
    said = process.communicate()
    return as_expected(subprocess.CompletedProcess(process.args, process.returncode, *said), code)


def ada_loss(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The same in this process. An exception that is not an exit fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["ada-loss", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    returncode = int(end.value.code or 0)
    return as_expected(subprocess.CompletedProcess(sys.argv, returncode, out.getvalue(), err.getvalue()), code)


def as_expected(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that is done, but for one cell that failed."""
    folder = tmp_path_factory.mktemp("sweep")
    options: Any = {"task_options": {"epochs": 1}, "baseline": False, "show_progress": False}
    sweep("sweep_tasks:raises", ["fp16", "e5m2"], ["none", 8], seeds=[0, 1], out=folder, **options)
    return folder


def test_a_sweep_runs_prints_its_table_and_names_its_report(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG)
    done = alone("sweep", config, "--out", tmp_path / "out")
    assert "| format \\ scaling | none | 1024 |" in done.stdout
    assert "| fp16 | " in done.stdout
    report = tmp_path / "out" / "report.html"
    assert f"Report: {report}" in done.stdout
    assert report.read_text().startswith("<!doctype html>")
    assert "8/8" in done.stderr  # the progress bar
    again = ada_loss("sweep", config, "--out", tmp_path / "out", "--json")
    assert json.loads(again.stdout)["counts"] == {"planned": 0, "running": 0, "done": 8, "failed": 0}
    more = ada_loss("sweep", config, "--out", tmp_path / "out", "--seeds", 3, "--json")
    assert json.loads(more.stdout)["counts"]["done"] == 12


def test_failed_cells_are_an_exit_code_of_their_own(out: Path) -> None:
    done = ada_loss("resume", out, "--trust", code=1)
    assert "RuntimeError: seed 1 is not to be had" in done.stdout


def test_a_task_from_elsewhere_is_run_on_resume_only_where_it_is_trusted(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "of someone else")
    said = ada_loss("resume", tmp_path / "of someone else", code=2).stderr
    assert "The ledger names the task 'sweep_tasks:raises', which is code from outside of this library" in said
    assert "give trust=True (--trust)" in said


def test_what_a_user_has_run_into_a_folder_is_resumed_without_a_word(out: Path) -> None:
    assert "RuntimeError: seed 1 is not to be had" in ada_loss("resume", out, code=1).stdout


@parametrize(
    ("words", "offered"),
    [
        (["sweep", "oper"], ["operands"]),
        (["search", "dig"], ["digits"]),
        (["inspect", "digits", "--format", "mxfp8_e4"], ["mxfp8_e4m3"]),
        (["inspect", "digits", "--format", "recipe:nv"], ["recipe:nvfp4"]),
        (["sweep", "updates", "--update", "bf16_s"], ["bf16_sr"]),
    ],
    ids=["sweep", "task", "format", "recipe", "update"],
    keep=lambda _, offered: offered in (["operands"], ["mxfp8_e4m3"]),  # each is a process
)
def test_sweeps_tasks_and_formats_are_completed(words: list[str], offered: list[str]) -> None:
    context = {"_ADA_LOSS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["ada-loss", *words])}
    context["COMP_CWORD"] = str(len(words))
    code = "import sys; sys.argv = ['ada-loss']; from ada_loss.__main__ import main; main()"
    environment = {**os.environ, **context}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == offered, done.stderr


MODULE = """import sweep_tasks
def task(seed):
    return sweep_tasks.tiny(seed)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "workers"),  # two start a cluster
    [
        ("beside", 2),
        ("current", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("beside", 1), ("current", 2))),
    ],
)
def test_a_task_beside_the_yaml_or_in_the_current_folder_is_found_by_workers_too(
    tmp_path: Path, place: str, workers: int
) -> None:
    folders, name = {key: tmp_path / key for key in ("beside", "current")}, f"mine_{place}_{workers}"
    for folder in folders.values():
        folder.mkdir()
    (folders[place] / f"{name}.py").write_text(MODULE)
    config = folders["beside"] / f"{name}.yaml"
    config.write_text(CONFIG.replace("sweep_tasks:tiny", f"{name}:task"))
    script = "import sys; from ada_loss.__main__ import main; sys.argv[0] = 'ada-loss'; main()"
    # -P, as of the installed script: the current folder is not on the path by itself
    words = ["sweep", config, "--out", tmp_path / name, "--workers", workers, "--json"]
    command = [sys.executable, "-c", f"import sys; sys.path.remove('')\n{script}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folders["current"], env=environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["done"] == 8


@pytest.mark.full
def test_a_sweep_that_was_killed_is_not_said_to_run(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG.replace("tiny", "slow").replace("seeds: 2", "seeds: 30"))
    process = started("sweep", config, "--out", tmp_path / "out")
    told: dict[str, Any] = {"done": 0}
    while told["done"] < 2 or not told["running"]:
        assert process.poll() is None
        time.sleep(0.05)
        if (tmp_path / "out" / "telemetry").exists():  # the ledger is complete
            told = json.loads(ada_loss("status", tmp_path / "out", "--json").stdout)
    assert told["interrupted"] == 0
    process.kill()
    process.communicate()
    left = json.loads(ada_loss("status", tmp_path / "out", "--json").stdout)
    with Ledger(tmp_path / "out" / "ledger.sqlite", readonly=True) as ledger:
        assert left["interrupted"] == ledger.counts()["running"] > 0
        assert left["planned"] == ledger.counts()["planned"] + left["interrupted"]
    assert left["running"] == 0
    said = ada_loss("status", tmp_path / "out").stdout
    assert f"{left['interrupted']} of the planned were interrupted. Go on with: ada-loss resume {tmp_path}" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_one_refusal_before_any_cell(tmp_path: Path, device: str) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG)
    for words in (["sweep", config], ["search", "digits"]):
        said = ada_loss(*words, "--device", device, "--out", tmp_path / "out", code=2).stderr
        assert said.startswith(f"device='{device}' needs a GPU, and ")
    assert not (tmp_path / "out").exists()


SORTS = ("search", "sweep_tasks:sorts", "--roles", "activation", "--trials", 6, "--seeds", 2, "--tolerance", 0)
NARROW = ("--exponent-bits", 2, 5, "--mantissa-bits", 0, 4)


def test_a_search_prints_what_nothing_beats_and_the_answer_in_words(tmp_path: Path) -> None:
    done = ada_loss(*SORTS, *NARROW, "--out", tmp_path)
    *table, answer, place = done.stdout.splitlines()
    assert table[:2] == ["| bits | activation | accuracy in % |", "|---:|---|---:|"]
    # 1.125 takes three bits behind the point, and two of the exponent span 0 to 2
    assert table[-1] == "| 6 | e2m3 | 100.0 ± 0.0 |"
    bits = [int(line.split("|")[1]) for line in table[2:]]
    assert bits == sorted(set(bits))
    assert answer == (
        "Smallest found: activation e2m3. 6 bits, accuracy 100.0 ± 0.0 %; float32's is 100.0 %; not decided at a "
        "tolerance of 0.0 points: 2 seeds of float32 cannot tell a difference from chance. Give seeds=3, better 5."
    )
    assert place == f"Every training: {tmp_path / 'ledger.sqlite'}"
    told = json.loads(ada_loss(*SORTS, *NARROW, "--out", tmp_path, "--json").stdout)
    assert (told["formats"], told["bits"], told["accuracy"], told["baseline"]) == ({"activation": "e2m3"}, 6, 1.0, 1.0)
    assert [row["bits"] for row in told["front"]] == bits
    assert (told["outcome"], told["tolerance"]) == ("few", 0)
    assert answer.endswith(f"; {told['statement']}.")
    with Ledger(tmp_path / "ledger.sqlite", readonly=True) as ledger:
        assert all(cell["attempts"] == 1 for cell in ledger.rows())  # the second went over what was done


def test_the_options_of_a_searched_training_are_set_on_the_command_line(tmp_path: Path) -> None:
    options = ("--seeds", 1, "--roles", "error", "--trials", 1, "--tolerance", 1, "--out", tmp_path)
    ada_loss("search", "sweep_tasks:tiny", *options, "--set", "task_options.epochs=2", "--set", "retry_failed=true")
    with Ledger(tmp_path / "ledger.sqlite", readonly=True) as ledger:
        assert {cell["config"]["options"]["epochs"] for cell in ledger.rows()} == {2}
    said = ada_loss("search", "sweep_tasks:tiny", "--set", "epochs=2", code=2).stderr
    assert "--set: unknown key 'epochs'. Did you mean task_options.epochs? Known: task, train, roles" in said
    said = ada_loss("search", "sweep_tasks:tiny", "--set", "task_options.epoch=2", code=2).stderr
    assert "Unknown key task_options.epoch. Did you mean 'epochs'?" in said


def test_short_help_is_help_and_the_version_is_that_of_the_distribution() -> None:
    assert ada_loss("-h").stdout == ada_loss("--help").stdout
    assert ada_loss("table", "-h").stdout == ada_loss("table", "--help").stdout
    assert ada_loss("--version").stdout.startswith(
        f"ada-loss {version('ada-loss')}, torch {version('torch')}, Python 3."
    )
    said = subprocess.run(
        [sys.executable, "-m", "fpsim", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(f"fpsim {version('ada-loss')}, torch {torch.__version__}, numbers of version ")


def test_a_file_that_comes_with_the_library_is_printed_to_start_from(tmp_path: Path) -> None:
    done = alone("sweep", "--print", "operands")
    assert done.stdout == SHIPPED["operands"].read_text()
    assert done.stderr == ""
    mine = tmp_path / "mine.yaml"
    mine.write_text(ada_loss("sweep", "digits", "--print").stdout)
    assert read_sweep(mine) == read_sweep("digits")
    assert ada_loss("sweep", mine, "--print").stdout == mine.read_text()
    assert (
        "There is no file 'operand'. Did you mean 'operands'?" in ada_loss("sweep", "operand", "--print", code=2).stderr
    )


@pytest.mark.full
def test_json_of_a_search_with_one_seed_has_no_number_that_is_none(tmp_path: Path) -> None:
    options = ("--seeds", 1, "--roles", "activation, weight", "--roles", "error", "--trials", 1, "--scaling", 8)
    done = ada_loss("search", "sweep_tasks:tiny", *options, "--out", tmp_path, "--tolerance", 1, "--json")
    told = json.loads(done.stdout, parse_constant=pytest.fail)
    assert [*told["formats"]] == ["activation", "weight", "error"]
    assert {row["deviation"] for row in told["front"]} == {None}
    with Ledger(tmp_path / "ledger.sqlite", readonly=True) as ledger:
        assert {cell["config"]["scaling"] for cell in ledger.rows()} == {"none", 8.0}


@pytest.mark.full
def test_a_search_that_is_stopped_names_the_command_that_goes_on(tmp_path: Path) -> None:
    options = ("--roles", "error", "--seeds", 2, "--trials", 8, "--tolerance", 0.5, "--workers", 2)
    words = ("search", "sweep_tasks:slow", *options, "--out", tmp_path / "a folder")
    process = started(*words)
    ledger = tmp_path / "a folder" / "ledger.sqlite"

    def done() -> int:
        try:
            with Ledger(ledger, readonly=True) as opened:
                return opened.counts()["done"]
        except (FileNotFoundError, ValueError):  # not yet there, or not yet complete
            return 0

    while done() < 3:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the driver and to its workers
    said = process.communicate(timeout=240)[1]
    last = said.splitlines()[-1]
    assert process.returncode == 130
    assert "Traceback" not in said  # of the workers, which the terminal's signal reaches too
    assert last.startswith("Interrupted.")
    assert last.endswith(f"Go on with: {shlex.join(['ada-loss', *map(str, words)])}")
    with Ledger(ledger, readonly=True) as opened:
        assert opened.counts()["running"] == 0
    assert "Smallest found: error e" in alone(*words).stdout


def test_a_search_that_is_stopped_between_two_trainings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[search.__module__], "search", interrupted)
    said = ada_loss("search", "sweep_tasks:tiny", code=130).stderr
    assert said == "Interrupted. Go on with: ada-loss search sweep_tasks:tiny\n"


def test_a_search_without_options_is_that_of_the_library() -> None:
    command = typer.main.get_command(app).commands["search"]  # type: ignore[attr-defined]
    here = {parameter.name: parameter.default for parameter in command.params}
    there = {name: parameter.default for name, parameter in inspect.signature(search).parameters.items()}
    (roles,) = here.pop("roles")
    assert tuple(roles.split(",")) == there["roles"] == ROLES
    assert str(here.pop("out")) == there["out"]
    for name in ("device", "keep_old"):
        assert here.pop(name) == inspect.signature(sweep).parameters[name].default
    shared = here.keys() & there.keys() - {"task"}
    assert shared == here.keys() - {"task", "as_json", "settings"}
    of_lists = {name: there[name] if there[name] == () and here[name] is None else here[name] for name in shared}
    assert of_lists == {name: there[name] for name in shared}


def test_status_tells_how_far_a_sweep_is(out: Path) -> None:
    assert "8 cells: 0 planned, 0 running, 4 done, 4 failed" in ada_loss("status", out).stdout
    told = json.loads(ada_loss("status", out, "--json").stdout)
    assert (told["cells"], told["done"], len(told["failures"])) == (8, 4, 4)


def test_tables_go_to_papers(out: Path) -> None:
    assert "| e5m2 |" in ada_loss("table", out).stdout
    assert r"\toprule" in ada_loss("table", out, "--to", "latex").stdout
    assert ada_loss("table", out, "--to", "csv").stdout.startswith("format,scaling,accuracy mean")
    rows = json.loads(ada_loss("table", out, "--to", "json", "--where", "format=fp16").stdout)
    assert [row["scaling"] for row in rows] == ["none", "8"]
    assert "Known: markdown" in ada_loss("table", out, "--to", "word", code=2).stderr
    assert "Expected: NAME=VALUE" in ada_loss("table", out, "--where", "fp16", code=2).stderr


def test_a_verdict_has_the_tolerance_that_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "three seeds"
    sweep("sweep_tasks:tiny", formats=["fp16", "e5m2"], seeds=3, out=out)
    metric = Results(out).verdicts()[0].metric
    wide = ada_loss("verdict", out, "--tolerance", 0.9).stdout
    assert wide == "".join(f"{found}\n" for found in Results(out).verdicts(metric, 0.9))
    assert "No more than 90.0 points below" in wide
    both = ada_loss("verdict", out, "--metric", metric, "--tolerance", 0.9, "--equivalence", "--level", 0.01).stdout
    assert both == "".join(f"{found}\n" for found in Results(out).verdicts(metric, 0.9, 0.01, equivalence=True))
    assert "Matches float32 within 90.0 points" in both
    said = ada_loss("verdict", out, "--minimize", "acuracy", code=2).stderr  # it would be passed over otherwise
    assert "Unknown metric 'acuracy'. Did you mean 'accuracy'?" in said
    said = ada_loss("verdict", out, "--tolerance", -1, code=2).stderr
    assert "tolerance=-1.0" in said


def test_a_report_goes_where_it_is_told(out: Path, tmp_path: Path) -> None:
    target = tmp_path / "paper.html"
    assert str(target) in ada_loss("report", out, "--to", target, "--question", "Which is it?").stdout
    assert "Which is it?" in target.read_text()


def test_the_catalogue_is_printed() -> None:
    lines = ada_loss("formats").stdout.splitlines()
    assert lines[0].split()[:2] == ["name", "bits"]
    assert any(line.split()[:5] == ["fp16", "16", "5", "10", "65504"] for line in lines)
    assert next(row for row in json.loads(ada_loss("formats", "--json").stdout) if row["name"] == "e4m3fn")["bits"] == 8


def test_inspect_shows_modules_and_sites() -> None:
    said = ada_loss("inspect", "digits", "--format", "e5m2").stdout
    assert "block.conv1  Conv2d" in said
    assert "block.conv1:conv2d" in said
    sites = json.loads(ada_loss("inspect", "sweep_tasks:tiny", "--json").stdout, parse_constant=pytest.fail)["sites"]
    assert {row["role"] for row in sites} == {"weight", "activation", "error", "weight_grad"}
    told = json.loads(ada_loss("inspect", "torch.nn:Identity", "--json").stdout)
    assert told == {
        "modules": [
            {"module": "(model)", "type": "Identity"}
            | dict.fromkeys(("weight", "activation", "error", "weight_grad"), "fp16 nearest_even")
            | {"products": "", "wide": "", "cache": ""}
        ],
        "sites": [],
    }
    assert "needs 2 arguments" in ada_loss("inspect", "torch.nn:Linear", code=2).stderr
    assert "gave a bool" in ada_loss("inspect", "torch.cuda:is_available", code=2).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "nowhere.yaml"], "There is no file 'nowhere.yaml'"),
        (
            ["sweep", "my_task:my_task"],
            "is a task or a training function, not a file. Write a YAML file with `task: my_",
        ),
        (["resume", "nowhere"], "There is no ledger at"),
        (["status", "nowhere"], "There is no ledger at"),
        (["table", "nowhere"], "There is no ledger at"),
        (["report", "nowhere"], "There is no ledger at"),
        (["search", "digit"], "Did you mean 'digits'?"),
        (["search", "digits", "--roles", "weights"], "roles=['weights'] is invalid. Expected: some of weight,"),
        (["search", "digits", "--exponent-bits", "5", "4"], "exponent_bits=(5, 4) is invalid"),
        (["search", "digits", "--scaling", "torchh"], "Unknown scaling method 'torchh'"),
        (["inspect", "digit"], "Did you mean 'digits'?"),
        (["inspect", ":f"], "The task ':f' is not an import path. Expected: 'module:function'"),
        (["inspect", "..x:f"], "The task '..x:f' is not an import path. Expected: 'module:function'"),
        (["search", "digits", "--device", "cuda:"], "device='cuda:' is invalid. Expected: 'cpu', 'cuda'"),
        (["search", "digits", "--device", "tpu"], "device='tpu' is invalid. Expected: 'cpu', 'cuda'"),
        (["inspect", "digits", "--format", "fp61"], "Unknown format 'fp61'"),
        (["depth", "--out", "docs"], "The command depth is a script of the repository now: python benchmarks/depth.py"),
    ],
)
def test_bad_input_is_one_line_and_the_exit_code_2(words: list[str], said: str) -> None:
    for run in (alone, ada_loss) if "fp61" in words else (ada_loss,):
        done = run(*words, code=2)
        assert said in done.stderr
        assert done.stdout == ""


def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path, out: Path) -> None:
    config, file = tmp_path / "mine.yaml", tmp_path / "file"
    config.write_text(CONFIG)
    file.touch()
    assert f"{file} cannot be written" in ada_loss("sweep", config, "--out", file, code=3).stderr
    said = ada_loss(*SORTS, "--out", file, code=3).stderr
    assert f"{file} cannot be written" in said
    assert said.rstrip().endswith(f"--out {file}")
    assert "File exists" in ada_loss("report", out, "--to", file / "report.html", code=2).stderr


def test_a_ledger_that_is_damaged_is_one_line(tmp_path: Path, out: Path) -> None:
    content = (out / "ledger.sqlite").read_bytes()
    (tmp_path / "ledger.sqlite").write_bytes(content[:4096] + b"?" * (len(content) - 4096))
    for command in ("status", "table", "resume"):
        assert "The ledger cannot be read: it is damaged (" in ada_loss(command, tmp_path, code=2).stderr


def test_a_mistyped_configuration_is_named_with_its_place(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG.replace("epochs: 1", "epoch: 1"))
    said = ada_loss("sweep", config, code=2).stderr
    assert "Unknown key task_options.epoch. Did you mean 'epochs'?" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("words", "said"), [(["--help"], "sweep"), (["status"], "4 failed")], ids=["help", "status"])
def test_help_and_status_need_no_torch(out: Path, words: list[str], said: str) -> None:
    words = ["ada-loss", *words, *([str(out)] if words == ["status"] else [])]
    code = f"import sys; sys.argv = {words!r}\nfrom ada_loss.__main__ import main\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code\n"
    code += "assert not {'torch', 'numba', 'dask', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_errors_of_a_ledger_send_no_codes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.add([("0" * 16, {})])
        ledger.start("0" * 16)
        ledger.fail("0" * 16, "ValueError: \x1b]0;title\x07\x9b31m\u202e red\n\tand more")
    printed = ada_loss("status", tmp_path).stdout
    assert r"ValueError: \x1b]0;title\x07\x9b31m\u202e red" in printed
    assert "\n\tand more" in printed
    say("a cell failed: \x1b[2J")
    assert capsys.readouterr().err == "a cell failed: \\x1b[2J\n"


def test_tasks_are_listed_with_what_they_can_decide() -> None:
    lines = ada_loss("tasks").stdout.splitlines()
    assert lines[0].split()[:3] == ["task", "metric", "float32"]
    assert lines[1].startswith("digits ")
    rows = {row["task"]: row for row in json.loads(ada_loss("tasks", "--json").stdout)}
    assert rows["deep_digits"]["metric"] == "accuracy"
    assert rows["cifar10"]["metric"] == "not measured"
