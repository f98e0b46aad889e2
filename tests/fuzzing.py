"""Fuzzing: a bounded number of examples, or all that fit into FUZZ_MINUTES; and which errors are documented.

FUZZ_MINUTES=10 nice pytest -n 0 -s tests/fuzz/test_fuzz_round_to.py
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from tiers import parametrize

import ada_loss
import fpsim

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
_claims: Counter[str] = Counter()  # by module
PACKAGES = tuple(Path(str(package.__file__)).parent for package in (fpsim, ada_loss))


def fuzz(examples: int, **arguments: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A test that holds a claim against drawn arguments.

    examples: how many, always the same ones; by default a tenth of them. With FUZZ_MINUTES in the environment, new ones
    for that long; the tests of one file are one target, and share its minutes.
    """
    few = examples if MINUTES else max(1, examples // 10)

    def decorate(claim: Callable[..., None]) -> Callable[[int], None]:
        _claims[claim.__module__] += 1

        def test(count: int) -> None:
            bounds = settings(
                max_examples=count,
                derandomize=not MINUTES,
                deadline=None,
                database=None,
                print_blob=True,
                suppress_health_check=[HealthCheck.too_slow],
            )
            run = bounds(given(**arguments)(claim))
            end = time.monotonic() + 60 * MINUTES / _claims[claim.__module__]
            run()
            rounds = 1
            while time.monotonic() < end:
                run()
                rounds += 1
            if MINUTES:
                print(f"{claim.__name__}: {rounds * examples} examples")

        test.__name__, test.__doc__, test.__module__ = claim.__name__, claim.__doc__, claim.__module__
        counts = parametrize("count", [few, examples][few == examples :], keep={few})
        return pytest.mark.timeout(900 + 60 * MINUTES)(counts(test))

    return decorate


class Outcome:
    """What became of a block under `documented`: the error, or None."""

    error: Exception | None = None


@contextmanager
def documented(*errors: type[Exception]) -> Iterator[Outcome]:
    """Let errors of these classes end the block if a `raise` of the packages gave them; anything else is a failure.

    An error that Python, NumPy or torch raised of its own tells the user nothing: it was not foreseen.
    """
    outcome = Outcome()
    try:
        yield outcome
    except errors as error:
        if not is_foreseen(error):
            raise
        outcome.error = error


def is_foreseen(error: Exception) -> bool:
    """Whether a `raise` of the packages gave this error, with a message that can be read."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = any(Path(last.filename).is_relative_to(package) for package in PACKAGES)
    return is_ours and (last.line or "").startswith("raise ") and 20 <= len(str(error)) <= 2000
