"""why names what was planted: place, role and kind, in its first lines, with a remedy that works; else it is silent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import planted_grid
import pytest
import tiers
from planted_cases import GRID, failing, fine
from planted_division import a_sentence_without_words
from planted_lost import MADE, lab_step
from planted_remedies import can_be_applied, is_cured_by_the_rule, works
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


def test_each_cause_of_the_grid_is_planted_somewhere_where_none_is_drawn_at_random() -> None:
    assert {case.name.split("-")[0] for case in GRID} == {*planted_grid.CAUSES}


def test_what_is_tried_for_a_sentence_without_words_has_the_loss_of_a_clamp_by_hand() -> None:
    """Its LSTM divides inside, which a mode of torch does not see."""
    remedy = a_sentence_without_words().why().tried[0]
    assert remedy["loss"] == pytest.approx(float(a_sentence_without_words(least=1).step()), rel=2**-10)


@tiers.parametrize("name", MADE, keep=["a_recurrence_in_half", "a_network_of_sines", "a_critic_that_is_sure"])
def test_a_remedy_of_what_was_lost_before_brings_the_model_itself_near_to_float64(name: str) -> None:
    """No parameter is without a gradient, and those that were far from float64's are four times nearer."""
    make, fmt = MADE[name]
    found = make(fmt).why()
    assert bool(found.tried) is (name != "a_critic_that_is_sure"), str(found)
    for which, remedy in enumerate(found.tried):
        assert is_cured_by_the_rule(make, fmt, found, which), remedy


def test_the_network_of_the_lab_whose_layers_get_nothing_is_named_with_the_stretch() -> None:
    planted = lab_step()
    planted.step()
    unfed = [n.partition(".")[0] for n, p in planted.model.named_parameters() if p.dim() > 1 and not bool(p.grad.any())]  # type: ignore[union-attr]
    found = planted.why()
    assert found.cause is not None
    assert (found.cause["kind"], found.cause["stage"]) == ("gradient lost", "backward")
    assert len(unfed) >= 4
    assert f"No gradient at all is left for {', '.join(unfed)}" in str(found)
    shares = [float(x) for x in re.findall(r"([0-9.]+) % at", found.cause["why"])]
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert [remedy["remedy"] for remedy in found.tried] == ["scale", "format"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", fine())
def test_where_nothing_is_wrong_nothing_is_named(build: Callable[[], Any]) -> None:
    found = build().why()
    assert found.cause is None, str(found)
    assert str(found).startswith("Nothing was found")
