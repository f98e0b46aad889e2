"""What a folder of someone else does to a sweep: this script puts things in the place of its files, and acts on it.

    python tests/foreign_folder.py WORK [--things NAME ...] [--actions NAME ...] [--share N]

WORK is an empty folder. Which files a sweep opens is found out by an audit hook on opening, renaming and deleting.
Then, for each such place and each thing, a copy of the folder gets the thing there, before the actions or at the moment
at which the place is opened. A line of JSON for each: what every action gave, how long it took, and what has changed
outside of the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ada_loss.__main__ as command_line
from ada_loss.lab.cells.ledger import BESIDE, Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.results.results import REASONS
from ada_loss.lab.sweep.driver import sweep

LONGEST = 60.0  # seconds of a case, on a machine where others compute too
OPENS = {"open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir", "sqlite3.connect"}
WRITES = os.O_WRONLY | os.O_RDWR
ID, TOKEN = re.compile("[0-9a-f]{16}"), re.compile(r"\.[0-9a-f]{16}\.tmp$")
TASK: dict[str, Any] = {"task": "sweep_tasks:tiny", "scaling": ["none", "torch"], "minimize": ["mse"]}
TASK |= {"formats": ["fp16", {"name": "mine", "format": "e5m2"}], "show_progress": False}


class Follower:
    """A tracker that is told of cells while they train, so that workers write how these go."""

    def known(self) -> set[str]:
        return set()

    def log(self, *_: object) -> None:
        pass

    begin = add = finish = abandon = log


class Audit:
    """What is opened in a folder: {place: whether it is written to}, and the flags of those that are."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.places: dict[str, None] = {}
        self.unsafe: dict[str, None] = {}
        self.opened = ""  # the last folder that was
        self.meanwhile: tuple[str, Callable[[Path], None]] | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in OPENS:
            return
        for path in self._named(event, arguments):
            if path is None:
                continue
            place = str(path.relative_to(self.folder))
            self.places[place] = None
            if event == "open" and (arguments[2] or 0) & WRITES:
                flags = arguments[2]
                if not (flags & os.O_NOFOLLOW and (flags & os.O_EXCL or flags & os.O_NONBLOCK)):
                    self.unsafe[place] = None
            if self.meanwhile is not None and (found := self.meanwhile)[0] == place:
                self.meanwhile = None
                found[1](path)

    def _named(self, event: str, arguments: tuple[Any, ...]) -> list[Path | None]:
        """The paths of an event that are in the folder; those without a folder are beside the one that is open."""
        if event == "os.rename":
            return [self._inside(path, at) for path, at in zip(arguments[:2], arguments[2:], strict=True)]
        if event == "open" and (arguments[2] or 0) & os.O_DIRECTORY:
            self.opened = str(arguments[0])
        at = arguments[1] if event == "os.remove" else self.opened if event == "open" else -1
        return [self._inside(arguments[0], at)]

    def _inside(self, given: object, at: int | str) -> Path | None:
        """The path, if it is one in the folder. at: the folder that it is named from, or its handle."""
        if not isinstance(given, str | os.PathLike):
            return None
        path = Path(str(given).removeprefix("file://").partition("?")[0])
        if at != -1 and len(path.parts) == 1:  # a name beside an open folder
            path = Path(at if isinstance(at, str) else os.readlink(f"/proc/self/fd/{at}")) / path
        return path if self.folder is not None and path.is_relative_to(self.folder) else None


def prepare(out: Path, audit: Audit) -> None:
    """A sweep of which one cell is not done, and was interrupted: everything that a folder can have is there."""
    stages = [{"schedule": {0: "fp16", 0.5: last}} for last in ("e5m2", "fp32")]
    audit.folder = out
    results = sweep(**{**TASK, "formats": [*TASK["formats"], *stages]}, out=out, track=[Follower()], keep_states=True)
    audit.folder = None
    *_, cell = results.cells
    with Ledger(out / "ledger.sqlite") as ledger:
        ledger.release([cell["id"]])
    (out / "telemetry" / f"{cell['id']}.npz").unlink()
    for suffix in (".pt", ".steps", ".live"):
        (out / "checkpoints" / f"{cell['id']}{suffix}").write_bytes(b"left")
    (out / "telemetry" / ".x.npz.0123456789abcdef.tmp").write_bytes(b"left")
    (out / REASONS).write_text(json.dumps({results.cells[0]["id"]: "a reason"}))
    audit.folder = out
    results.report()
    audit.folder = None


def on_the_command_line(*words: str) -> str:
    """What `ada-loss` gives: its exit code and what it says; an exception that it does not expect is raised."""
    said = io.StringIO()
    sys.argv = ["ada-loss", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            command_line.main()
        except SystemExit as end:
            return f"{end.code or 0}: {said.getvalue()}"
    return f"0: {said.getvalue()}"


def metrics(out: Path) -> dict[str, Any]:
    return {cell["id"]: cell["metrics"] for cell in Results(out).cells if cell["state"] == "done"}


def more(out: Path) -> str:
    sweep(**TASK, seeds=[0, 1], out=out, track=[Follower()])
    return "done"


ACTIONS: dict[str, Callable[[Path], Any]] = {
    "status": lambda out: on_the_command_line("status", str(out)),
    "results": metrics,
    "table": lambda out: on_the_command_line("table", str(out), "--where", "format=fp16"),
    "verdict": lambda out: on_the_command_line("verdict", str(out)),
    "report": lambda out: on_the_command_line("report", str(out)),
    "resume": lambda out: on_the_command_line("resume", str(out), "--trust"),
    "sweep": more,
    "afterwards": metrics,
}


def link(path: Path, to: Path) -> None:
    path.symlink_to(to)


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b"{")
        file.truncate(1 << 40)  # without a block on the disk


THINGS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, elsewhere: link(path, elsewhere / "precious"),
    "link-to-folder": lambda path, elsewhere: link(path, elsewhere),
    "link-to-nothing": lambda path, elsewhere: link(path, elsewhere / "new"),
    "link-to-device": lambda path, _: link(path, Path("/dev/zero")),
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "huge": lambda path, _: huge(path),
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def state_of(folder: Path) -> dict[str, str]:
    """Every file below a folder, with what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = b"" if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def act(out: Path, audit: Audit) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each action gives, or the error: its class, and what it says."""
    for name, action in ACTIONS.items():
        start = time.monotonic()
        audit.folder = out
        told: dict[str, Any]
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                told = {"gave": action(out)}
        except Exception as error:
            told = {"raised": [kind.__name__ for kind in type(error).__mro__], "words": str(error)}
        finally:
            audit.folder = None
        yield name, {**told, "seconds": round(time.monotonic() - start, 1)}


def elsewhere_in(work: Path, cells: list[str]) -> Path:
    """A folder of the reader, with files whose names a sweep would write or delete."""
    folder = work / "elsewhere"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    for cell in cells:
        for suffix in (".pt", ".steps", ".live", ".npz", ".branch"):
            (folder / f"{cell}{suffix}").write_text("precious")
    (folder / ".x.0123456789abcdef.tmp").write_text("precious")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--things", nargs="+", default=[*THINGS])
    parser.add_argument("--share", type=int, default=1, help="each n-th case")
    parser.add_argument("--actions", nargs="+", default=[*ACTIONS])
    options = parser.parse_args()
    for name in {*ACTIONS} - {*options.actions}:
        del ACTIONS[name]
    os.environ["XDG_STATE_HOME"] = str(options.work / "state")
    audit = Audit()
    whole, base = options.work / "whole", options.work / "base"
    prepare(whole, audit)
    shutil.copytree(whole, base)
    known = [cell["id"] for cell in Results(whole).cells]
    elsewhere = elsewhere_in(options.work, known)
    before = state_of(elsewhere)
    outcomes = dict(act(whole, audit))
    opened = [*audit.places, *(f"ledger.sqlite{suffix}" for suffix in BESIDE)]
    # one cell for all, and no name that nobody can guess
    kinds = {ID.sub("ID", place): place for place in opened if place != "." and not TOKEN.search(place)}
    names = [place for place in audit.places if place.endswith(".tmp") and "/.x." not in place]
    guessable = [place for place in names if not TOKEN.search(place)]
    print(json.dumps({"places": [*kinds], "unsafe": [*audit.unsafe], "guessable": guessable, "gave": outcomes}))
    cases = [(place, thing, when) for place in kinds.values() for thing in options.things for when in ("before", "at")]
    # SQLite opens its files itself: what is put there between a look at them and that is not seen
    cases = [case for case in cases if case[2] == "before" or not case[0].startswith("ledger.sqlite")]
    for place, thing, when in cases[:: options.share]:
        out = options.work / "out"
        shutil.copytree(base, out, symlinks=True)

        def put(path: Path, thing: str = thing) -> None:
            remove(path)
            THINGS[thing](path, elsewhere)

        if when == "before":
            (out / place).parent.mkdir(exist_ok=True)
            put(out / place)
        else:
            audit.meanwhile = place, put
        faulthandler.dump_traceback_later(LONGEST, exit=True)  # whatever waits for ever
        told = dict(act(out, audit))
        faulthandler.cancel_dump_traceback_later()
        audit.meanwhile = None
        after = state_of(elsewhere)
        changed = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
        case = {"place": ID.sub("ID", place), "thing": thing, "when": when}
        print(json.dumps({**case, "changed": changed, "gave": told}), flush=True)
        if changed:
            shutil.rmtree(elsewhere)
            before = state_of(elsewhere_in(options.work, known))
        shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
