"""The settings of adaptive scaling: read, and refused where they are impossible."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from instants import interrupted
from torch import Tensor, nn

from ada_loss import AdaLossScaled, AdaLossTransformConv2d, layer_rule
from ada_loss.layerwise.chooser import MEASURES
from ada_loss.layerwise.options import Options
from ada_loss.layerwise.scaled import _short
from ada_loss.rules.layer import LAYER_RULES
from fpsim import quantize
from fpsim.scaling import listeners


def test_the_settings_can_be_read_and_not_set() -> None:
    given = {
        "init_scale": 8.0,
        "rule": layer_rule("abs_range"),
        "update_every": 5,
        "scale_upper_bound": 16.0,
        "accum_upper_bound": 1024.0,
        "branches": "original",
        "u_min": 6e-8,
        "u_max": 6e4,
    }
    with AdaLossScaled(quantize(nn.Linear(2, 2), "fp16"), **given) as handle:  # type: ignore[arg-type]
        assert {name: getattr(handle, name) for name in given} == given
        assert (handle.step, handle.observer) == (0, None)
        for name in (*given, "step"):
            with pytest.raises(AttributeError):
                setattr(handle, name, 1)


def test_bad_input_is_refused_with_what_to_do() -> None:
    model = quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "fp16")
    with pytest.raises(ValueError, match=r"Linear is not quantised.*Call fpsim\.quantize\(model, fmt\) first"):
        AdaLossScaled(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model is <function .*, of type function"):
        AdaLossScaled(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"AdaLossTransformConv2d matches no module\. Classes in the model: Linear, ReLU, S"
    ):
        AdaLossScaled(model, [AdaLossTransformConv2d()])
    with pytest.raises(TypeError, match=r"A transform is 'Linear'\. Expected: AdaLossTransformLinear\(\)"):
        AdaLossScaled(model, ["Linear"])  # type: ignore[list-item]
    unheeded = ({"init_scale": 2.0}, {"update_every": 2}, {"scale_upper_bound": 16.0})
    for options, message in (
        ({"init_scale": 3.0}, "init_scale=3.0 is invalid. Expected: a power of two"),
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"update_every": 0}, "update_every=0"),
        ({"scale_upper_bound": -1.0}, "scale_upper_bound=-1.0"),
        ({"accum_upper_bound": math.nan}, "accum_upper_bound=nan"),
        ({"accum_upper_bound": True}, "accum_upper_bound=True is invalid. Expected: a finite number above 0"),
        ({"update_every": True}, "update_every=True is invalid. Expected: 1 for every step, or more"),
        ({"branches": "both"}, "branches='both' is invalid. Expected: 'exact' or 'original'"),
        ({"branches": np.array(["exact", "original"])}, "Expected: 'exact' or 'original'"),
        ({"u_min": "half"}, "u_min='half'"),
        ({"u_min": np.array(["smallest", "flush"])}, "Expected: 'smallest', 'flush' or 'normal'"),
        ({"u_min": 0.0}, "u_min=0.0 is invalid. Expected: 'smallest', 'flush' or 'normal', or a finite number"),
        ({"u_min": True}, "u_min=True is invalid"),
        ({"u_min": math.nan}, "u_min=nan is invalid"),
        ({"u_max": math.inf}, "u_max=inf is invalid. Expected: a finite number above 0"),
        ({"u_max": "largest"}, "u_max='largest' is invalid"),
        ({"u_min": 2.0, "u_max": 1.0}, "u_min=2.0 is not below u_max=1.0"),
        ({"power_of_two": False}, "power_of_two=False is refused.*exact only for powers of two.*Omit it"),
        ({"rule": "exact", "branches": "original"}, "branches='original' was given with the rule 'exact'"),
        *(
            ({"rule": rule, **given}, "{}={} was given with the rule '{}'".format(*next(iter(given.items())), rule))
            for rule in ("exact", "current", "amax_history")
            for given in unheeded
        ),
        ({"rule": "adaptive"}, "Unknown layer rule 'adaptive'"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            AdaLossScaled(model, **options)  # type: ignore[arg-type]
    first = AdaLossScaled(model)
    with pytest.raises(ValueError, match=r"scaled already\. Call detach\(\)"):
        AdaLossScaled(model)
    first.detach()
    AdaLossScaled(model).detach()
    assert "ApproxRange(n_uf_threshold=0.001" in repr(first)
    product = quantize(Product(), "fp16")
    AdaLossScaled(product, rule="element_wise_range")
    with pytest.raises(NotImplementedError, match=r"matmul at :matmul is not a linear layer.*transforms="):
        product(torch.ones(2, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("fmt", "options", "said"),
    [
        ("e4m3fn", {"u_min": 6e-8}, r"u_min=6e-08 was given, and the gradient at 0:weight is rounded to e4m3fn, whose"),
        ("fp16", {"u_max": 70000.0}, r"u_max=70000\.0 was given.*fp16.*to 65504\.0"),
        ("fp16", {"u_min": 2.0**-26, "u_max": 1.0}, r"u_min=1\.\d+e-08 and u_max=1\.0 was given"),
        ("fp16", {"u_max": 2.0**-25}, "u_max=2.9"),
    ],
)
def test_numbers_beyond_the_format_of_a_gradient_are_refused_at_its_site(
    fmt: str, options: dict[str, Any], said: str
) -> None:
    model = quantize(nn.Sequential(nn.Linear(2, 2)), fmt)
    with AdaLossScaled(model, **options), pytest.raises(ValueError, match=said):
        model(torch.ones(1, 2))
    with AdaLossScaled(model, u_min="smallest"):
        model(torch.ones(1, 2)).sum().backward()


def test_half_the_smallest_magnitude_and_the_largest_are_numbers_of_the_format() -> None:
    model = quantize(nn.Sequential(nn.Linear(2, 2)), "fp16")
    with AdaLossScaled(model, u_min=np.float32(2.0**-25), u_max=65504) as scaled:
        model(torch.ones(1, 2)).sum().backward()
    assert (scaled.u_min, scaled.u_max) == (2.0**-25, 65504.0)
    assert type(scaled.u_min) is type(scaled.u_max) is float


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


def test_what_a_lost_adaptive_scaling_has_left_is_taken_off_and_said() -> None:
    model = quantize(nn.Linear(2, 2), "fp16")
    AdaLossScaled(model)  # as one that Ctrl-C keeps from its `with`
    with pytest.warns(UserWarning, match="that nothing holds any longer.*It is detached"):
        scaled = AdaLossScaled(model)
    with pytest.raises(ValueError, match=r"scaled already\. Call detach\(\) on the other.*detach_from\(model\)"):
        AdaLossScaled(model)
    AdaLossScaled.detach_from(model)
    AdaLossScaled.detach_from(model)  # nothing is left to do
    with AdaLossScaled(model):
        pass
    assert all(found.scaling is None for found in listeners(model))
    scaled.detach()


def test_a_lost_adaptive_scaling_is_taken_off_though_the_next_one_is_refused() -> None:
    model = quantize(nn.Linear(2, 2), "fp16")
    AdaLossScaled(model)
    with pytest.warns(UserWarning, match="It is detached"), pytest.raises(ValueError, match="update_every"):
        AdaLossScaled(model, update_every=0)
    assert all(found.scaling is None for found in listeners(model))


def test_an_adaptive_scaling_that_is_interrupted_within_its_block_ends_though_the_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)  # of what runs while something is forgotten
    model, begun, kept, inside = quantize(nn.Linear(2, 2), "fp16"), list[int](), [], 0

    def run() -> None:
        begun.clear()
        with AdaLossScaled(model):
            begun.append(1)

    run()
    instants, _ = interrupted(run, 0)
    for at in range(instants - 60, instants + 1):
        kept.append(interrupted(run, at)[1])
        if begun:
            inside += 1
            assert all(found.scaling is None for found in listeners(model))
        AdaLossScaled.detach_from(model)
    assert inside >= 10


def test_a_rule_either_predicts_or_says_what_it_measures() -> None:
    assert {rule.measures for rule in LAYER_RULES.values() if not rule.predicts} == MEASURES.keys()
    assert {rule.measures for rule in LAYER_RULES.values() if rule.predicts} == {""}


@pytest.mark.parametrize("branches", ["exact", "original"])
@pytest.mark.parametrize("update_every", [1, 2])
def test_scales_are_held_between_updates_where_branches_are_exact(branches: str, update_every: int) -> None:
    bounds = {"scale_upper_bound": None, "accum_upper_bound": None, "u_min": "smallest", "u_max": None}
    options = Options(
        layer_rule("abs_range"), 1.0, update_every, branches=branches, modules=None, scales_casts=True, **bounds
    )
    assert options.holds_scales is (branches == "exact" and update_every == 2)


def test_a_setting_of_81_characters_is_shown_by_its_ends() -> None:
    assert _short("x" * 78) == f"'{'x' * 78}'"
    assert _short("a" * 40 + "b" * 39) == f"'{'a' * 37} ... {'b' * 37}'"
