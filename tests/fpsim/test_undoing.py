"""What is put back after any error, one that comes while it is put back too."""

from __future__ import annotations

import pytest

from fpsim.undoing import Undo, undone


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_one_action_keeps_no_other_from_being_done(which: int, kind: type[BaseException]) -> None:
    done: list[int] = []

    def action(i: int) -> None:
        if i == which and not failed:
            failed.append(i)
            raise kind
        done.append(i)

    failed: list[int] = []

    def work(undo: Undo) -> None:
        for i in range(3):
            undo.by(lambda i=i: action(i))

    with pytest.raises(kind):
        undone(work)
    expected = [2, 1, 0]  # the last one first
    if kind is RuntimeError:
        expected.remove(which)  # it has failed; an interrupted one is done again
    assert done == expected


def test_what_is_named_before_an_error_is_undone_and_the_error_goes_on() -> None:
    done: list[str] = []

    def work(undo: Undo) -> None:
        undo.by(lambda: done.append("first"))
        raise GeneratorExit

    with pytest.raises(GeneratorExit):
        undone(work)
    assert done == ["first"]
    assert undone(lambda undo: 5) == 5
