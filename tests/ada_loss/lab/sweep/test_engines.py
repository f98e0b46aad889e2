"""Starting and closing an engine under Ctrl-C: both are whole, or never were."""

import os
import signal
import threading

import pytest

from ada_loss.lab.sweep import engines


class Started:
    """Closes in two halves, with Ctrl-C between them."""

    def __init__(self, interrupted: bool = False) -> None:
        self.halves = 0
        if interrupted:
            ctrl_c()
        self.whole = True

    def close(self) -> None:
        self.halves += 1
        ctrl_c()
        self.halves += 1


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # where Python would raise
        pass


@pytest.fixture
def another_thread():
    """A thread that lets signals in, as those of a notebook do: the system may give it one that is masked here.

    Ctrl-C raises, also where the tests are a shell's job in the background, which ignores it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("another_thread")
def test_ctrl_c_while_an_engine_closes_comes_when_it_is_closed() -> None:
    entered: list[Started] = []
    with pytest.raises(KeyboardInterrupt), engines._closed_at_the_end(Started) as started:
        entered.append(started)
    assert entered[0].halves == 2


@pytest.mark.usefixtures("another_thread")
def test_ctrl_c_while_an_engine_starts_comes_when_it_started_and_closes_it() -> None:
    made: list[Started] = []

    def start() -> Started:
        made.append(Started(interrupted=True))
        return made[0]

    with pytest.raises(KeyboardInterrupt), engines._closed_at_the_end(start):
        pytest.fail("the block was entered")
    assert made[0].whole
    assert made[0].halves == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_engines_start_in_threads_where_no_handler_can_be_set() -> None:
    closed: list[bool] = []

    class Quiet:
        def close(self) -> None:
            closed.append(True)

    def run() -> None:
        with engines._closed_at_the_end(Quiet):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert closed == [True]
