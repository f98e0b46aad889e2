"""why names causes that are composed at random, is silent where they are taken out, and its remedies cure.

python tests/planted_random.py --count 1000 --controls 1000 --seed 12345
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiers
import torch
from planted_bench import SHELLS, Drawn
from planted_healthy_kinds import QUARTER
from planted_random import CAUSES, Row, asked, asked_control, described, draw, draw_control, is_right
from planted_truth import Examined, Measured, measure

SLICE = 20  # cases of one test, and half as many controls
FIRST = range(1000, 1600, 100)  # seeds; a slice has the next ones that do harm


def taken(first: int, draws: Callable[[int], Drawn], ask: Callable[[Drawn], Row | None]) -> Any:
    return filter(None, map(ask, map(draws, itertools.count(first))))


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize("first", FIRST, keep=FIRST[:1])
def test_causes_composed_at_random_are_named_and_what_is_printed_as_tried_cures(first: int) -> None:
    found = list(itertools.islice(taken(first, draw, asked), SLICE))
    for row in found:
        row["remedies"] = [one for one in row["remedies"] if not one[2].startswith("not applied")]
    assert not [described(row) for row in found if described(row)]


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize("first", FIRST, keep=FIRST[:1])
def test_nothing_is_named_where_the_cause_is_taken_out(first: int) -> None:
    found = itertools.islice(taken(first, draw_control, asked_control), SLICE // 2)
    assert not [described(row) for row in found if not is_right(row)]


# The generator itself


def test_a_third_of_the_cases_are_of_gradients_and_a_quarter_of_the_controls_recipes_and_block_formats() -> None:
    """Of 2,000, within four standard deviations."""
    backward = sum(CAUSES[draw(seed).kind].is_back for seed in range(2000))
    assert abs(backward - 2000 / 3) < 4 * (2000 * 2 / 9) ** 0.5
    quarter = sum(draw_control(seed).kind in QUARTER for seed in range(2000))
    assert abs(quarter - 500) < 4 * (2000 * 3 / 16) ** 0.5


def test_every_kind_is_drawn_with_every_way_to_call_the_parts() -> None:
    drawn = [draw(seed) for seed in range(5000)]
    assert {one.kind for one in drawn} == {*CAUSES}
    assert {one.shell for one in drawn} == {*SHELLS}


def test_a_seed_gives_the_same_numbers_again_and_another_seed_others() -> None:
    first, again, other = (measure(Examined(drawn_of("square overflows", seed)).trial(False)) for seed in (3, 3, 4))
    assert first.loss == again.loss
    assert all(torch.equal(first.gradients[name], again.gradients[name]) for name in first.gradients)
    assert first.loss != other.loss


def drawn_of(kind: str, seed: int, **others: str) -> Drawn:
    given = {"body": "mlp", "shell": "net", "fmt": CAUSES[kind].formats[0], **others}
    return Drawn(seed, kind, **given)


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize("kind", CAUSES, keep=["square overflows", "a gate that is a number", "updates are lost"])
def test_each_kind_does_its_harm_in_one_case_of_a_hundred_at_least(kind: str) -> None:
    assert any(Examined(draw(seed, [kind])).is_harmed() for seed in range(100))


# The judge: an answer that is wrong is found to be


def answer(case: Examined, kind: str, place: str, *tried: Any) -> Any:
    """As `why` would give it."""

    class Answer(SimpleNamespace):
        def __str__(self) -> str:
            return f"{kind} at {place}, activation, in float16."

    return Answer(cause={"kind": kind, "place": place, "role": "activation"}, tried=list(tried))


@pytest.mark.parametrize(
    ("kind", "place", "verdict"),
    [
        ("overflow", "{point}:square", "right"),
        ("overflow", "{point}:mul_1", "right"),
        ("overflow", ":square", "wrong place"),
        ("overflow", "{stem}.fc:linear", "wrong place"),
        ("division by zero", "{point}:square", "wrong kind"),
        ("division by zero", "{stem}.fc:linear", "both wrong"),
    ],
)
def test_an_answer_is_right_in_place_and_kind_alone(kind: str, place: str, verdict: str) -> None:
    case = Examined(drawn_of("square overflows", 0))
    paths = case.trial().paths
    assert case.verdict(answer(case, kind, place.format(**paths)), paths) == verdict
    assert case.verdict(SimpleNamespace(cause=None), paths) == "nothing"  # type: ignore[arg-type]


def test_words_that_are_false_are_found_beside_the_right_place_and_kind() -> None:
    case = Examined(drawn_of("inf made by half in a parameter", 0))
    paths = case.trial().paths
    place = case.place(paths).replace("\\", "")[1:].partition(")")[0]
    said = answer(case, "inf came in", place)
    assert case.verdict(said, paths) == "right"
    text = f"{said}\nDo: load an earlier checkpoint"
    type(said).__str__ = lambda self: text
    assert case.verdict(said, paths) == "false words"


@pytest.mark.parametrize(("value", "cures"), [(1.0, False), (16.0, False), (2.0**14, True), (2.0**30, False)])
def test_a_loss_scale_cures_if_every_parameter_has_a_gradient_that_is_near(value: float, cures: bool) -> None:
    """With a scale of 16 the first layers are without one as before; with 2^30 gradients overflow."""
    case = Examined(drawn_of("depth in half", 1, fmt="half"))
    assert case.is_harmed()
    said = answer(case, "gradient lost", "", {"remedy": "scale", "value": value, "what": "", "sites": []})
    assert (case.cures(said, 0) == "") is cures, case.cures(said, 0)


@pytest.mark.parametrize(
    ("gradient", "loss", "cures"), [(1.1, 1.0, True), (1.5, 1.0, False), (1.1, 1.5, False), (torch.nan, 1.0, False)]
)
def test_a_remedy_cures_if_gradients_and_loss_are_four_times_nearer(gradient: float, loss: float, cures: bool) -> None:
    """The gradients that were lost were off by all of themselves, and the loss by nothing."""
    case = Examined(drawn_of("depth in half", 1, fmt="half"))
    wanted = case.reference
    after = Measured(wanted.loss * loss, {name: g * gradient for name, g in wanted.gradients.items()})
    assert (case.by_the_rule(after, "scale") == "") is cures


def test_float32_at_another_place_does_not_cure_and_at_the_right_one_it_does() -> None:
    case = Examined(drawn_of("softmax by hand overflows", 1, fmt="half"))
    assert case.is_harmed()
    point = case.trial().paths["point"]
    for names, cures in (("exp sum div", True), ("exp", False), ("sigmoid add", False)):
        sites = [f"{point}:{name}" for name in names.split()]
        said = answer(case, "overflow", "", {"remedy": "float32", "value": None, "what": "", "sites": sites})
        assert (case.cures(said, 0) == "") is cures, case.cures(said, 0)
