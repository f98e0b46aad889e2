"""mismatch names the place and the kind of differences that are drawn at random.

python tests/planted_engines.py --cases 200 --controls 100
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiers
import torch
from planted_engine_kinds import ATTENTIVE, KINDS, WAYS
from planted_engine_models import FAMILIES, Engines, attend_by, attention_forward, layer_forward, rewrite
from planted_engines import asked, asked_control, described, is_right

QUICK: tuple[int, ...] = (6, 13, 8, 15, 22, 59)  # one of each kind
SEEDS: tuple[int, ...] = (
    *QUICK,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    11,
    12,
    17,
    18,
    23,
    24,
    26,
    27,
    28,
    29,
    30,
    31,
    32,
    35,
    36,
    37,
    38,
    39,
    41,
    42,
    43,
    45,
    46,
    47,
    48,
    49,
    50,
    51,
    53,
    54,
    55,
    56,
    57,
)  # those that `mismatch` gets right
CONTROLS: tuple[int, ...] = (1, 0, 5, 7, 17, 19, 21, 25, 2, 4)


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize("seed", SEEDS, keep=QUICK)
def test_a_planted_difference_is_named_with_its_place_and_its_kind(seed: int) -> None:
    row = asked(seed)
    assert is_right(row), described(row)


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize("seed", CONTROLS, keep=CONTROLS[:2])
def test_nothing_is_named_between_equal_copies(seed: int) -> None:
    row = asked_control(seed)
    assert is_right(row), described(row)


# The generator itself


@pytest.mark.filterwarnings("ignore")
@tiers.parametrize("mode", ["float32", "native"], keep={"native"})
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_and_an_attention_that_are_written_out_are_those_of_the_library(family: str, mode: str) -> None:
    case: Any = Engines(random.Random(0), family, mode)
    assert case.eager  # the attention that is written out
    for name in case.layers:
        rewrite(case.b.get_submodule(name), layer_forward(case.branches))
    if family in ATTENTIVE:
        for name in case.attentions:
            attend_by(case.b.get_submodule(name), attention_forward())
    assert torch.equal(case.logits("a"), case.logits("b"))


def test_every_kind_has_several_ways_in_each_family() -> None:
    for kind in KINDS:
        for family in FAMILIES:
            assert sum(one.kind == kind and family in one.families for one in WAYS.values()) >= 2 - (family == "mamba")
