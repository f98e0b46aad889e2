"""Two policies side by side: where their results part, recomputed with torch's casts and NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim
from fpsim.insight.ranges import binades_in

X = torch.linspace(-1, 1, 48).reshape(8, 6)


def half(x: Tensor) -> Tensor:
    return x.half().float()


def distance(b: Tensor, a: Tensor) -> float:
    """|b - a| / |a|, by NumPy in float64."""
    x, y = a.detach().numpy().astype(np.float64), b.detach().numpy().astype(np.float64)
    return float(np.linalg.norm(y - x) / np.linalg.norm(x))


class Cancelling(nn.Module):
    """x w, plus 1000, minus 1000, squared: the subtraction keeps the error and loses the size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.layer(x) + 1000) - 1000) ** 2


def rows_by_site(found: fpsim.Comparison, role: str) -> dict[str, dict[str, float]]:
    return {row["site"]: row for row in found if row["role"] == role}


def test_errors_are_those_of_torchs_half_casts_and_the_subtraction_is_where_they_grow() -> None:
    model = Cancelling()
    w = model.layer.weight.detach()
    a = [F.linear(X, w)]
    a += [a[0] + 1000]
    a += [a[1] - 1000]
    a += [a[2] ** 2]
    b = [half(F.linear(half(X), half(w)))]
    b += [half(b[0] + 1000)]
    b += [half(b[1] - 1000)]
    b += [half(b[2] ** 2)]
    found = fpsim.compare(model, None, "fp16", X)
    sites = ["layer:linear", ":add", ":sub", ":pow"]
    assert [(row["site"], row["role"]) for row in found] == [(site, "activation") for site in sites]
    expected = [distance(y, x) for x, y in zip(a, b, strict=True)]
    for row, error, x, y in zip(found, expected, a, b, strict=True):
        assert row["relative"] == pytest.approx(error, rel=1e-9)  # sums in float64, in another order
        assert (row["amax_a"], row["amax_b"]) == (float(x.abs().max()), float(y.abs().max()))
        angle = float((x.double() * y.double()).sum() / x.double().norm() / y.double().norm())
        assert row["cosine"] == pytest.approx(angle, rel=1e-9)
    assert [row["entering"] for row in found] == pytest.approx([0.0, *expected[:-1]], rel=1e-9)
    assert found.begins()["site"] == "layer:linear"
    assert found.grows()["site"] == ":sub"
    assert found.grows()["growth"] == pytest.approx(expected[2] / expected[1], rel=1e-9)
    assert "it first grows by 2 at :sub" in str(found)


def test_gradients_are_those_of_torchs_half_casts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    found = fpsim.compare(model, None, "fp16", X, loss=lambda out: out.square().sum())
    (w1, b1), (w2, b2) = ((m.weight.detach(), m.bias.detach()) for m in model)

    def gradients(cast) -> dict[str, Tensor]:
        x, v1, v2 = cast(X), cast(w1), cast(w2)
        h = cast(F.linear(x, v1, cast(b1)))
        g2 = cast(2 * cast(F.linear(h, v2, cast(b2))))
        g1 = cast(g2 @ v2)
        return {"1:linear": g2, "0:linear": g1, "1.weight": cast(g2.T @ h), "0.weight": cast(g1.T @ x)}

    a, b = gradients(lambda x: x), gradients(half)
    for site, gradient in a.items():
        row = rows_by_site(found, "weight_grad" if site.endswith("weight") else "error")[site]
        # the products are added up in another order
        assert row["relative"] == pytest.approx(distance(b[site], gradient), rel=1e-3), site
    out_a = F.linear(F.linear(X, w1, b1), w2, b2)
    assert found.losses[0] == pytest.approx(float(out_a.square().sum()), rel=1e-6)
    out_b = half(F.linear(half(F.linear(half(X), half(w1), half(b1))), half(w2), half(b2)))
    p, q = (np.asarray(o.double().softmax(-1)) for o in (out_a, out_b))
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()), rel=1e-6)


def test_a_layer_in_a_smaller_format_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])
    policy = fpsim.Policy("fp16", "fp16", "fp16", "fp16", overrides={"4": "e4m3fn"})
    found = fpsim.compare(model, "fp16", policy, torch.randn(8, 16))
    assert found.begins()["site"] == "4:linear"
    assert fpsim.compare(model, None, policy, torch.randn(8, 16)).grows()["site"] == "4:linear"


def test_over_draws_noise_goes_away_and_bias_stays() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.0

    draws, x = 16, torch.full((20000,), 1.0 + 2**-5)  # a quarter between 1 and 1.125, neighbours in e4m3fn
    found = fpsim.compare(Add(), None, fpsim.Policy(activation="e4m3fn", rounding="stochastic"), x, draws=draws)
    row = found[0]
    step, share = 2**-3, 0.25
    deviation = math.sqrt(share * (1 - share)) * step / float(x[0])  # of a binomial
    # the input is rounded first, so that the operation's result is exact; 6 standard errors of a mean over 320,000
    assert row["relative"] == pytest.approx(deviation, rel=6 / math.sqrt(2 * draws * len(x)) * 2)
    assert row["bias"] == pytest.approx(deviation / math.sqrt(draws), rel=6 / math.sqrt(2 * len(x)) * 2)
    assert row["snr"] == pytest.approx(1 / deviation, rel=0.06)  # 1 - 1/16 of the variance is around the mean of draws
    nearest = fpsim.compare(Add(), None, fpsim.Policy(activation="e4m3fn"), x, draws=2)[0]
    assert nearest["bias"] == nearest["relative"] == pytest.approx(2**-5 / (1 + 2**-5), rel=1e-12)
    assert nearest["snr"] == math.inf


def test_what_is_not_finite_in_b_is_an_infinite_error() -> None:
    class Times(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e5).clamp(max=1.0)

    found = fpsim.compare(Times(), None, "fp16", torch.ones(4))
    assert [row["relative"] for row in found] == [math.inf, 0.0]


def test_a_mask_does_not_hide_the_error_of_the_numbers_beside_it() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros_like(x)
            mask[:, 3:] = torch.finfo(x.dtype).min
            return (x + mask).softmax(-1)

    found = fpsim.compare(Masked(), None, "fp16", X)
    assert [row["site"] for row in found][-2:] == [":add", ":softmax"]
    kept = X[:, :3]
    assert found[-2]["relative"] == pytest.approx(distance(half(kept), kept), rel=1e-6)


def test_equal_policies_are_equal_with_dropout_too_and_the_model_and_the_noise_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state, stochastic = torch.get_rng_state(), fpsim.Policy("e5m2", "e5m2", "e5m2", "e5m2", rounding="stochastic")
    for policy in (None, stochastic):
        found = fpsim.compare(model, policy, policy, X, loss=lambda out: out.square().sum())
        assert len(found) > 8
        assert {row["relative"] for row in found} == {0.0}
        assert found.begins() is found.grows() is found.begins("error") is None
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model[0].weight.grad is None


def test_a_quantised_model_arguments_by_name_and_a_loss_in_the_output_are_taken() -> None:
    class Out(dict):
        loss: Tensor
        logits: Tensor

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Out:
            out = Out()
            out.logits = self.layer(x) * scale
            out.loss = out.logits.square().mean()
            return out

    batch = {"x": X, "scale": torch.tensor(2.0)}
    plain = fpsim.compare(Named(), None, "fp16", batch)
    assert {row["role"] for row in plain} == {"activation", "error", "weight_grad"}
    assert plain.losses is not None
    assert plain.kl is not None
    quantised = fpsim.compare(fpsim.quantize(Named(), "e5m2"), None, "fp16", batch)
    assert list(quantised) == list(plain)


def test_results_are_rows_frames_and_pictures() -> None:
    found = fpsim.compare(Cancelling(), None, "fp16", X, loss=torch.sum)
    frame = found.to_frame()
    assert list(frame["site"]) == [row["site"] for row in found]
    assert found.plot()._repr_png_()[:4] == b"\x89PNG"
    for model in (Cancelling(), nn.Identity()):  # without an error, and without a row
        assert fpsim.compare(model, None, None, X).plot()._repr_png_()[:4] == b"\x89PNG"


def test_impossible_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="draws=0"):
        fpsim.compare(Cancelling(), None, "fp16", X, draws=0)


def test_what_becomes_infinite_is_told_before_what_doubles() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.square() * 300).sum(-1)  # the square doubles a relative error, the sum leaves fp16

    found = fpsim.compare(Squares(), None, "fp16", torch.linspace(9.1, 10.3, 16)[None])
    row = found.breaks()
    assert row is not None
    assert (row["site"], row["relative"]) == (":sum", math.inf)
    lines = [line for line in str(found).splitlines() if line.startswith("forward:")]
    assert lines[0].startswith("forward: it becomes inf at :sum")


def test_a_branch_that_is_lost_is_told_before_what_doubles() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square() + x * 1e-9

    row = fpsim.compare(Branch(), None, "fp16", torch.linspace(1.1, 2.3, 16)).breaks()
    assert row is not None
    assert (row["site"], row["relative"]) == (":mul", 1.0)


def test_two_losses_that_are_no_numbers_are_refused() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"nan in a and nan in b.*fpsim.why"):
        fpsim.compare(model, None, "fp16", torch.ones(1, 2), loss=lambda out: out.sum())


def test_binades_are_those_from_the_200th_part_of_the_numbers_to_that_from_above() -> None:
    """Of 200 numbers one is the 200th part: the percentiles 0.5 and 99.5 leave it out at either end, and two not."""
    assert binades_in({0: 199, 5: 1}) == 1
    assert binades_in({-5: 1, 0: 199}) == 1
    assert binades_in({0: 198, 5: 2}) == 6
    assert binades_in({-5: 2, 0: 198}) == 6
    assert binades_in({}) == 0


def test_a_seed_with_too_few_above_it_is_refused() -> None:
    model, x = nn.Linear(1, 1), torch.ones(1, 1)
    assert fpsim.compare(model, "fp16", "bf16", x, draws=3, seed=2**64 - 3)  # the last is 2**64 - 1
    with pytest.raises(ValueError, match=r"leaves no seeds for draws=3\. Expected: a smaller one"):
        fpsim.compare(model, "fp16", "bf16", x, draws=3, seed=2**64 - 2)
