"""What an `Update` accepts, what it refuses, and which parameter gets which."""

from __future__ import annotations

import re

import pytest
from torch import nn

import fpsim
from fpsim import UPDATES, Update
from fpsim.policies.update import as_update, state_storage, updates_of

REFUSED = [
    ({"weight": "bf61"}, "Unknown format 'bf61'"),
    ({"weight": "bf16", "rounding": "stochastc"}, "Unknown rounding 'stochastc'"),
    ({"rounding": "stochastic"}, "weight is None"),
    ({"weight": "bf16", "rounding": {"exp_avg": "stochastic"}}, "'exp_avg', which has no format here"),
    ({"weight": "bf16", "random_bits": 8}, "nothing is rounded stochastically"),
    ({"weight": "bf16", "rounding": "stochastic", "random_bits": 0}, "random_bits=0"),
    ({"compensation": "kahan"}, "without a format of the weight"),
    ({"weight": "bf16", "compensation": "khan"}, "Did you mean 'kahan"),
    ({"weight": "e4m3fn per tensor", "compensation": "kahan"}, "whose numbers share scales"),
    ({"weight": "bf16", "compensation": "pair", "master": "fp16"}, "which loses nothing"),
    ({"weight": "bf16", "compensation": "kahan", "rounding": "stochastic"}, "rounding='stochastic'"),
    ({"weight": "fp16", "compensation": "remainder16"}, "the 16 bits that a bfloat16 lacks"),
    ({"weight": "bf16", "arithmetic": "formt"}, "Did you mean 'format"),
    ({"arithmetic": "format"}, "weight=None"),
    ({"weight": "int8 per row", "arithmetic": "format"}, "It computes in the weight's format"),
    ({"weight": "bf16", "arithmetic": "format", "states": "bf16"}, "states='bf16'"),
    ({"weight": "bf16", "arithmetic": "format", "master": "fp16"}, "master='fp16'"),
    ({"weight": "bf16", "arithmetic": "format", "rounding": "stochastic"}, "rounding='stochastic'"),
    ({"weight": "bf16", "arithmetic": "format", "min_size": 1}, "min_size=1"),
    ({"weight": "bf16", "arithmetic": "format", "compensation": "remainder16"}, "compensation='remainder16'"),
    ({"weight": "bf16", "decay": "before_uncompensated"}, "arithmetic='float32'"),
    ({"weight": "bf16", "decay": "outside"}, "Unknown decay='outside'"),
    ({"weight": "bf16", "min_size": -1}, "min_size=-1"),
    ({"weight": "bf16", "scale": "amax"}, "no format here has scales"),
    ({"states": {"exp_avg": "e4m3fn per tensor"}, "scale": "power_of_to"}, "Did you mean 'power_of_two"),
    ({"states": {"exp_avg": "e4m3fn per 2x2 fp32"}, "scale": "amax_te"}, "tiles of exp_avg"),
    ({"states": {"exp_avg": "e4m3fn per tensor delayed"}}, "whose scale is delayed"),
    ({"weight": "bf16", "lost": "most"}, "Unknown lost='most'"),
    ({"lost": "least"}, "where no update is lost"),
    ({"weight": "mxfp4", "lost": "least"}, "share a scale that each step changes"),
    ({"weight": "bf16", "master": "fp16 per tensor", "lost": "least"}, "master=fp16 per tensor"),
    ({"weight": "bf16", "compensation": "kahan", "lost": "least"}, "which loses no update"),
    ({"weight": "bf16", "arithmetic": "format", "lost": "least"}, "arithmetic='format'"),
    ({"weight": "bf16", "rounding": "stochastic", "lost": "least"}, "rounding='stochastic' of the weight"),
    ({"weight": "bf16", "overrides": {"a": Update(overrides={"b": None})}}, "overrides of its own"),
    ({"weight": "bf16", "overrides": {"a": "bf16_rs"}}, "Unknown update 'bf16_rs'. Did you mean 'bf16_sr"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_combinations_are_refused_with_a_remedy(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Update(**words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"wieght": "bf16"}, "Did you mean 'weight"),
        ({"rounding": 3}, "rounding is 3"),
        ({"min_size": 0.5}, "min_size=0.5"),
        ({"overrides": "head"}, "not a mapping"),
        ({"overrides": {3: None}}, "neither a name"),
        ({"overrides": {"head": 3}}, "The update is 3"),
    ],
)
def test_other_types_are_refused(words, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Update(**words)


@pytest.mark.parametrize("weight", ["fp16", "bf16", "e4m3fn"])
@pytest.mark.parametrize("compensation", ["kahan", "pair"])
def test_all_compensations_but_remainder16_take_any_format_of_single_numbers(weight, compensation):
    assert Update(weight=weight, compensation=compensation).compensation == compensation


def test_a_format_in_the_place_of_an_update_is_refused_with_both_ways_to_write_it():
    with pytest.raises(ValueError, match=re.escape("fpsim.Update(weight='fp16')")):
        as_update("fp16")


def test_an_update_is_a_frozen_value():
    assert Update(weight="bf16") == Update(weight="bf16") != Update(weight="fp16")
    with pytest.raises(AttributeError):
        Update().weight = "bf16"


@pytest.mark.parametrize("update", UPDATES.values(), ids=list(UPDATES))
def test_the_words_of_an_update_say_what_is_rounded(update):
    assert not update.is_float32
    assert str(update) != str(Update())


def test_updates_that_differ_have_other_words():
    words = [str(update) for update in UPDATES.values()]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("update", [Update(), Update(weight="fp32"), Update(states="fp32", overrides={"a": None})])
def test_float32_is_no_rounding(update):
    assert update.is_float32


def test_a_rounding_alone_is_the_weights():
    update = Update(weight="bf16", master="fp16", states={"exp_avg": "bf16"}, rounding="stochastic")
    assert update.weight_storage.spec.rounding == "stochastic"
    assert update.master_storage.spec.rounding == state_storage(update, "exp_avg").spec.rounding == "nearest_even"


def test_roundings_are_named_one_by_one():
    update = Update(weight="bf16", states={"exp*": "bf16"}, rounding={"exp_avg": "stochastic"}, random_bits=8)
    assert update.weight_storage.spec.rounding == "nearest_even"
    assert state_storage(update, "exp_avg").spec.random_bits == 8
    assert state_storage(update, "exp_avg_sq").spec.rounding == "nearest_even"


def test_a_scale_overrides_the_rule_of_each_block_format():
    update = Update(states={"a": "e4m3fn per 32", "b": "int8 per tensor fp32", "c": "bf16"}, scale="power_of_two")
    assert [str(state_storage(update, name).spec.fmt) for name in "abc"] == [
        "e4m3fn per 32 ceil",
        "int8 per tensor ceil",
        "bf16",
    ]


@pytest.mark.parametrize(
    ("fmt", "bits"), [("bf16", 16), ("e4m3fn per 256 fp32", 8.125), ("e4m3fn per tensor", 8), ("e2m1fn per 16", 4.5)]
)
def test_bits_count_an_element_and_its_part_of_the_scale(fmt, bits):
    assert state_storage(Update(states={"a": fmt}), "a").bits == bits


NAMES = ["embed.weight", "blocks.0.norm.weight", "blocks.0.fc.weight", "blocks.1.norm.weight", "head.weight"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("embed.weight", [0]),
        ("head", [4]),
        ("blocks.*.norm", [1, 3]),
        ("blocks", [1, 2, 3]),
        ("*.weight", [0, 4]),
        ("*", [0, 1, 2, 3, 4]),
        (nn.LayerNorm, [1, 3]),
        (nn.Module, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_a_pattern_names_a_parameter_or_the_module_that_it_is_in(pattern, matched):
    classes = {"embed": [nn.Embedding], "head": [nn.Linear]}
    classes |= {f"blocks.{i}.norm": [nn.LayerNorm] for i in (0, 1)} | {"blocks.0.fc": [nn.Linear]}
    found = updates_of(Update(weight="bf16", overrides={pattern: None}), NAMES, classes)
    assert [i for i, update in enumerate(found) if update.is_float32] == matched


def test_of_several_patterns_the_last_one_wins():
    update = Update(weight="bf16", overrides={"blocks": None, "blocks.*.norm": Update(weight="fp16")})
    assert [str(u) for u in updates_of(update, NAMES, {})] == [
        "weight=bf16 nearest_even",
        "weight=fp16 nearest_even",
        "float32",
        "weight=fp16 nearest_even",
        "weight=bf16 nearest_even",
    ]


def test_a_pattern_without_a_parameter_is_refused():
    with pytest.raises(ValueError, match=r"'blocks\.\*\.nrm' matches no parameter.*blocks\.\d\.norm"):
        updates_of(Update(overrides={"blocks.*.nrm": None}), NAMES, {})
    with pytest.raises(ValueError, match=r"LayerNorm matches no parameter\. Classes need model=model"):
        updates_of(Update(overrides={nn.LayerNorm: None}), NAMES, {})


def test_names_are_public():
    assert fpsim.Update is Update
    assert fpsim.UPDATES is UPDATES


@pytest.mark.parametrize("pattern", [3, int, None])
def test_a_pattern_that_is_neither_a_name_nor_a_class_of_modules_is_refused(pattern):
    with pytest.raises(TypeError, match="nor a module class"):
        Update(overrides={pattern: None})
