"""Machine code on disk: nobody else's is run, an update names nothing wrongly, and processes compile it once."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import environment

import fpsim
from fpsim.compiling import kept
from fpsim.compiling.compile import llvm_text, machine_code
from fpsim.compiling.kept import write_whole
from fpsim.compiling.native import Loop, compiled_loop

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "fpsim"


def new_loop() -> Loop:
    """The same loop as in another process: nothing of it is kept in memory."""

    @compiled_loop(3)
    def loop(a):  # type: ignore[no-untyped-def]
        return a + 1

    return loop  # type: ignore[no-any-return]


def planted(a):  # type: ignore[no-untyped-def]
    return 666


def kept_file(folder: Path) -> Path:
    assert new_loop()(1) == 2
    (file,) = folder.iterdir()
    return file


def test_folder_and_files_are_the_users_alone_under_any_mask(folder: Path) -> None:
    before = os.umask(0)
    try:
        file = kept_file(folder)
    finally:
        os.umask(before)
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder, file)] == ["0o700", "0o600"]


def _replace_by_pipe(folder: Path, file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _replace_by_link(folder: Path, file: Path) -> None:
    target = folder.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


def _replace_by_endless_link(folder: Path, file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


# What is done to a planted file or its folder, and what the warning says.
UNTRUSTED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a file that the group can write": (lambda d, f: f.chmod(0o660), r"\(mode 660\). Type: chmod go-w .*\.o"),
    "a file that all can write": (lambda d, f: f.chmod(0o602), r"\(mode 602\). Type: chmod go-w .*\.o"),
    "a folder that the group can write": (lambda d, f: d.chmod(0o770), r"\(mode 770\). Type: chmod go-w .*fpsim\."),
    "a folder that all can write": (lambda d, f: d.chmod(0o777), r"\(mode 777\). Type: chmod go-w .*fpsim\."),
    "a pipe": (_replace_by_pipe, "is not a regular file"),
    "a link to a file": (_replace_by_link, "is a link"),
    "a link to /dev/zero": (_replace_by_endless_link, "is a link"),
    "a file of 100 GB": (lambda d, f: os.truncate(f, 100 << 30), "is not a regular file of at most"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", UNTRUSTED)
def test_code_that_others_can_write_is_not_run_and_one_warning_says_what_to_type(kind: str, folder: Path) -> None:
    file = kept_file(folder)
    write_whole(file, machine_code(llvm_text(planted, False, "python")))
    assert new_loop()(1) == 666  # the planted code is whole, and would be run
    spoil, words = UNTRUSTED[kind]
    spoil(folder, file)
    loop = new_loop()
    with pytest.warns(RuntimeWarning, match=words):
        assert loop(1) == 2
    assert loop.was_compiled
    assert new_loop()(1) == 2  # without a second warning, which would be an error here


@as_root
@pytest.mark.parametrize("which", ["file", "folder"])
def test_code_of_another_user_is_not_run(which: str, folder: Path) -> None:
    file = kept_file(folder)
    write_whole(file, machine_code(llvm_text(planted, False, "python")))
    os.chown(file if which == "file" else folder, OTHER_USER, OTHER_USER)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {OTHER_USER}.*Set NUMBA_CACHE_DIR to a folder of your"):
        assert new_loop()(1) == 2


def test_a_file_that_was_not_trusted_is_replaced_by_ones_own(folder: Path) -> None:
    file = kept_file(folder)
    file.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="chmod go-w"):
        assert new_loop()(1) == 2
    loop = new_loop()
    assert (loop(1), loop.was_compiled, oct(stat.S_IMODE(file.stat().st_mode))) == (2, False, "0o600")


# A process that has imported fpsim; then an "update" changes the rule for ties, and then it rounds for the first time.
UPDATE = """
import sys
from pathlib import Path
import torch
import fpsim
if len(sys.argv) > 1:
    file = Path(fpsim.__file__).parent / "kernels" / "core.py"
    text = file.read_text()
    file.write_text(text + "# of a new release")
print(fpsim.round_to(torch.tensor([1.125]), "e5m2").tolist())
"""


@pytest.mark.parametrize("updates", [2])
@pytest.mark.timeout(300)
@pytest.mark.full
def test_a_process_that_outlives_an_update_keeps_nothing_under_the_name_of_the_new_sources(
    tmp_path: Path, updates: int
) -> None:
    house = tmp_path / "house"
    shutil.copytree(Path(fpsim.__file__).parent, house / "fpsim", ignore=shutil.ignore_patterns("__pycache__"))
    code = tmp_path / "code"
    code.mkdir()
    command = [sys.executable, "-c", UPDATE]
    settings = {**environment(), "PYTHONPATH": str(house), "NUMBA_CACHE_DIR": str(code)}

    def run(*words: str) -> int:
        """How many files are kept after a process has run."""
        done = subprocess.run([*command, *words], capture_output=True, text=True, env=settings, cwd=house)
        assert (done.returncode, done.stdout) == (0, "[1.0]\n"), done.stderr
        return len([*code.rglob("*.o")])

    for kept_before in range(updates):
        assert [run("update"), run()] == [kept_before, kept_before + 1]


ONE_OF_MANY = """
import sys, time
from pathlib import Path
from fpsim.kernels.moments import exponents_loop
import numpy as np
loop = exponents_loop(4)
Path(sys.argv[1], sys.argv[2]).touch()
while len([*Path(sys.argv[1]).iterdir()]) < int(sys.argv[3]):
    time.sleep(0.001)
x, bins = np.ones(1, np.float32), np.zeros(256, np.int64)
loop(x.ctypes.data, 1, bins.ctypes.data)
print(int(bins.argmax()), loop.was_compiled)
"""


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.timeout(300)
def test_processes_on_an_empty_folder_compile_a_loop_once(folder: Path, tmp_path: Path, count: int) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    commands = [
        [sys.executable, "-W", "error", "-c", ONE_OF_MANY, str(ready), str(i), str(count)] for i in range(count)
    ]
    children = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True, env=environment()) for c in commands]
    said = [child.communicate()[0].split() for child in children]
    assert sorted(said) == [["126", "False"]] * (count - 1) + [["126", "True"]]  # 1 ends the binade from 2**-1
    assert len([*folder.iterdir()]) == 1  # no lock is left


def test_a_lock_that_is_held_for_ever_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LONGEST_WAIT", 0.1)
    with kept.one_process_for(new_loop().file_name):
        assert new_loop()(1) == 2


def test_a_lock_that_cannot_be_made_is_done_without(folder: Path) -> None:
    folder.mkdir()
    lock = folder / f"{new_loop().file_name}.lock"
    lock.mkdir()
    assert new_loop()(1) == 2
    assert len([*folder.glob("*.o")]) == 1
