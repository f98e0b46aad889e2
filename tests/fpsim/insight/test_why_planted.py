"""why names what was planted: place, role and kind, in its first lines, with a remedy that works; else it is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planted_cases import failing, fine
from planted_division import a_sentence_without_words
from planted_remedies import can_be_applied, works
from planted_steps import Case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", failing())
def test_a_planted_cause_is_named_and_what_is_printed_as_tried_works(case: Case) -> None:
    found = case.build().why()
    assert case.is_named_by(found), str(found)
    lines = str(found).splitlines()
    assert len(lines) <= 15
    assert found.runs <= 30
    assert lines[2].startswith("Tried: " if found.tried else "Do: ")
    for which, remedy in enumerate(found.tried):
        if can_be_applied(case, remedy):
            assert works(case, found, which), remedy


def test_what_is_tried_for_a_sentence_without_words_has_the_loss_of_a_clamp_by_hand() -> None:
    """Its LSTM divides inside, which a mode of torch does not see."""
    remedy = a_sentence_without_words().why().tried[0]
    assert remedy["loss"] == pytest.approx(float(a_sentence_without_words(least=1).step()), rel=2**-10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", fine())
def test_where_nothing_is_wrong_nothing_is_named(build: Callable[[], Any]) -> None:
    found = build().why()
    assert found.cause is None, str(found)
    assert str(found).startswith("Nothing was found")
