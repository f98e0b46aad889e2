"""Machine code from disk: loaded without Numba, called from Python, and compiled again where it cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from fpsim.compiling.compile import ENTRY, llvm_text, machine_code
from fpsim.compiling.deferred import linked_libraries
from fpsim.compiling.kept import read_whole, write_whole
from fpsim.compiling.native import Loop, compiled_loop, loaded

TRAINING = """
import sys
import torch
import fpsim
x = torch.linspace(-7e4, 7e4, 1000)
assert torch.equal(fpsim.round_to(x, "fp16"), x.half().float())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model = fpsim.quantize(model, fmt="bf16")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model[0].weight.detach().clone()
y = model(torch.randn(4, 8))
y.square().mean().backward()
optimizer.step()
assert torch.equal(y.bfloat16().float(), y) and not torch.equal(model[0].weight, before)
print("numba" in sys.modules)
"""


def python(code: str, folder: Path) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(300)
@pytest.mark.full
def test_a_process_with_its_kernels_on_disk_trains_without_numba(tmp_path: Path) -> None:
    assert [python(TRAINING, tmp_path), python(TRAINING, tmp_path)] == ["True", "False"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "fpsim"


def new_loop() -> Loop:
    """The same loop as in another process: nothing of it is kept in memory."""

    @compiled_loop(1)
    def loop(a, b: float, c):  # type: ignore[no-untyped-def]
        return a // c * b

    return loop  # type: ignore[no-any-return]


def object_of(assembly: str) -> bytes:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(reloc="pic")
    return bytes(machine.emit_object(binding.parse_assembly(assembly)))


CODE = "define i64 @{name}(i64 %a) {{ %b = call i64 @{other}(i64 %a) ret i64 %b }} declare i64 @{other}(i64)"
OF_NO_USE = {
    "a function that is nowhere": lambda code: object_of(CODE.format(name=ENTRY, other="fpsim_nowhere")),
    "no entry": lambda code: object_of(CODE.format(name="fpsim_other", other="labs")),
    "cut": lambda code: code[: len(code) // 2],
    "text": lambda code: b"no object code",
    "nothing": lambda code: b"",
}


@pytest.mark.parametrize("kind", OF_NO_USE)
def test_what_cannot_be_loaded_is_compiled_anew_and_replaced(kind: str, folder: Path) -> None:
    assert new_loop()(7, 0.5, 2) == 1.5
    (file,) = folder.iterdir()
    code = read_whole(file)
    assert code is not None
    write_whole(file, OF_NO_USE[kind](code))  # whole, as if another library had stood there
    loop = new_loop()
    assert (loop(9, 0.5, 2), loop.was_compiled) == (2.0, True)
    again = new_loop()
    assert (again(9, 0.25, 2), again.was_compiled) == (1.0, False)
    assert [*folder.iterdir()] == [file]


def test_code_of_another_state_of_the_tools_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_loop()(7, 0.5, 2) == 1.5
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "another")
    from fpsim.compiling import native

    native._toolchain.cache_clear()
    try:
        other = new_loop()
        assert (other(7, 0.5, 2), other.was_compiled) == (1.5, True)
    finally:
        native._toolchain.cache_clear()
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("arguments", [(), (1, 2.0), (1, 2.0, 3, 4)])
def test_a_call_with_too_few_or_too_many_numbers_is_an_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match="This loop takes 3 numbers: a, b, c"):
        new_loop()(*arguments)


@pytest.mark.parametrize(("arguments", "error"), [(("1", 2.0, 3), TypeError), ((2**64, 2.0, 3), OverflowError)])
def test_what_is_no_number_of_64_bits_is_an_error(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        new_loop()(*arguments)


def test_an_error_inside_of_a_loop_is_raised() -> None:
    loop = new_loop()
    with pytest.raises(RuntimeError, match="A compiled loop failed: a division by zero"):
        loop(1, 1.0, 0)
    assert loop(4, 1.0, 2) == 2.0


def test_threads_that_need_a_loop_at_once_each_get_it() -> None:
    loop = new_loop()
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda i: loop(i, 1.0, 1), range(64))] == [float(i) for i in range(64)]


def test_compiling_leaves_numba_as_it_was() -> None:
    from numba.core import ir

    def loop(n):  # type: ignore[no-untyped-def]
        return n + 1

    assert loaded(machine_code(llvm_text(loop, False, "python")))(41) == 42
    assert "__deepcopy__" not in vars(ir.Scope)


class Library:
    """What `linked_libraries` asks of a compiled function: those that it calls."""

    def __init__(self, *calls: Library) -> None:
        self._linking_libraries = calls


def test_what_a_loop_calls_is_linked_after_all_that_call_it() -> None:
    last = Library()
    middle = Library(last)
    first = Library(middle, last)
    for calls in permutations((last, middle, first)):
        assert [*linked_libraries(Library(*calls))] == [first, middle, last]
