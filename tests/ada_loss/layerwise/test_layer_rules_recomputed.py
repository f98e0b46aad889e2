"""Adaptive scaling of whole models against a recomputation in NumPy that shares no code with the package.

Everything here is written from the specification: the rounding, the networks and their gradients, the rules, bounds,
branches and updates. Data are such that float32's sums are exact in any order, which is checked, so that scales and
gradients have to be equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransformLinear, layer_rule

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Narrow:
    """A format: digits behind the point, exponent of the smallest normal number, largest value, beyond it."""

    digits: int
    lowest: int
    largest: float
    beyond: float

    @property
    def smallest(self) -> float:
        return 2.0 ** (self.lowest - self.digits)

    def round(self, x: Array) -> Array:
        """To nearest, ties to even (np.rint), IEEE 754-2019 4.3.1."""
        exponent = np.maximum(np.frexp(x)[1] - 1, self.lowest)
        rounded = np.ldexp(np.rint(np.ldexp(x, self.digits - exponent)), exponent - self.digits)
        return np.where(np.abs(rounded) > self.largest, np.copysign(self.beyond, x), rounded)

    def at_scale(self, x: Array, k: int) -> Array:
        return np.ldexp(self.round(np.ldexp(x, k)), -k)


FORMATS = {
    "fp16": Narrow(10, -14, 65504.0, math.inf),
    "e5m2": Narrow(2, -14, 57344.0, math.inf),
    "e4m3fn": Narrow(3, -6, 448.0, 448.0),  # it saturates
}
FEW_BITS = Narrow(1, 0, 6.0, 6.0)  # e2m1fn


def product(a: Array, b: Array) -> Array:
    """a @ b, if float32 adds it up exactly in any order: multiples of one unit that stay below 2**24 of them."""
    terms = np.abs(a[:, :, None] * b[None, :, :])
    if terms.any():
        mantissa, exponent = np.frexp(terms[terms > 0])
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        unit = np.min(exponent - 53 + np.log2((whole & -whole).astype(np.float64)))
        assert terms.sum(1).max() <= 2.0 ** (unit + 24), "the data are not exact in float32"
        assert unit >= -149
    return a @ b


def power_below(x: float) -> int:
    """The exponent of the largest power of two not above x."""
    return math.frexp(x)[1] - 1


def fitting(amax: float, largest: float) -> int:
    """The largest k with amax * 2**k <= largest, by trial."""
    k = 200
    while amax * 2.0**k > largest:
        k -= 1
    return k


HALF_WIDTH = 1.253314465e-3  # sqrt(2) erfinv(p) of p = 1e-3, from the golden table A.1


@dataclass
class Settings:
    rule: str
    params: dict[str, Any] = field(default_factory=dict)
    branches: str = "exact"
    update_every: int = 1
    factor_bound: float = math.inf
    scale_bound: float = math.inf
    u_min: str | float = "smallest"
    u_max: float | None = None
    init_log2: int = 0
    casts: bool = True

    @property
    def measures(self) -> bool:
        return self.rule in ("exact", "current", "amax_history", "mse")


class Recomputed:
    """The scales and the gradients of one network over several steps."""

    def __init__(self, fmt: Narrow, settings: Settings) -> None:
        self.fmt, self.s = fmt, settings
        self.step = 0
        self.factors: dict[str, float] = {}
        self.held: dict[str, int] = {}
        self.history: dict[str, list[float]] = {}
        self.scales: dict[str, int] = {}
        self.arrived: dict[str, bool] = {}  # whether a site's gradient was not zero before it was rounded

    @property
    def updates(self) -> bool:
        return (self.step - 1) % self.s.update_every == 0

    @property
    def holds(self) -> bool:
        return self.s.update_every > 1 and self.s.branches == "exact"

    def u_min(self) -> float:
        f = self.fmt
        if isinstance(self.s.u_min, float):
            return self.s.u_min
        return {"smallest": f.smallest, "flush": f.smallest / 2, "normal": 2.0**f.lowest}[self.s.u_min]

    def u_max(self) -> float:
        return self.fmt.largest if self.s.u_max is None else self.s.u_max

    # Factors, of the gradient as it is carried: times its scale.

    def factor(self, g: Array, w: Array | None) -> float:
        """The raw factor of a product g @ w, of a gate g * w (w: one dimension), or of a cast."""
        s, u_min, u_max = self.s, self.u_min(), self.u_max()
        if s.rule == "fixed":
            return float(s.params["fixed_loss_scale"])
        k, amax = 1 if w is None or w.ndim == 1 else len(w), float(np.abs(g).max())
        wmax = 0.0 if w is None else float(np.abs(w).max())
        limit = u_max / (amax * max(1.0, k * wmax))
        nonzero = np.abs(g[g != 0])
        if s.rule == "approx_range":
            stats = s.params.get("stats", "grad+weight")
            if stats == "grad":
                deviation, limit = float(np.std(g)), u_max / amax
            else:
                deviation = math.sqrt(float(np.mean(g * g)))
                if w is not None:
                    deviation *= math.sqrt(float(np.mean(w * w)))
                    if stats == "grad+weight":
                        deviation *= math.sqrt(k / 2)
            if w is not None and s.params.get("bound", "measured") == "measured":
                limit = math.inf
            if deviation == 0:
                return 1.0
            return min(max(u_min / (HALF_WIDTH * deviation), 1.0), limit)
        if s.rule == "abs_range":
            smallest = float(nonzero.min()) * (1.0 if w is None else float(np.abs(w[w != 0]).min()))
            return min(max(u_min / k / max(smallest, 1e-15), 1.0), limit)
        assert s.rule == "element_wise_range"
        if w is None:
            return min(max(u_min / float(nonzero.min()), 1.0), limit)
        products = np.abs(g * w if w.ndim == 1 else g[:, :, None] * w[None, :, :])
        return min(max(u_min / float(products[products > 0].min()), 1.0), u_max / (k * float(products.max())))

    def times_factor(self, key: str, g: Array, w: Array | None, k: int, site: str = "") -> int:
        """The scale k times the factor under a key, which is computed in an update and used again until the next."""
        # a fixed factor asks nothing of the gradient, not even whether rounding at its site has left any of it
        asks = self.s.rule != "fixed" or self.s.branches == "original"
        tells = g.any() if asks else self.arrived.get(site, g.any())
        if tells and (self.updates or key not in self.factors):
            self.factors[key] = self.factor(np.ldexp(g, k), w)
        raw = self.factors.get(key, 1.0)
        bounded = min(raw, self.s.factor_bound, self.s.scale_bound * 2.0**-k)
        return k + power_below(bounded)

    # Scales of sites.

    def measured(self, site: str, g: Array, arriving: int) -> int:
        """The scale that a rule measures."""
        s, f, amax = self.s, self.fmt, float(np.abs(g).max())
        if s.rule == "exact":
            lost: Callable[[Array], Array] = {
                "smallest": lambda x: f.round(x) == 0,
                "normal": lambda x: np.abs(x) < 2.0**f.lowest,
            }.get(s.u_min, lambda x: np.abs(x) < next(2.0**k for k in range(-200, 200) if 2.0**k >= self.u_min()))
            nonzero, k = g[g != 0], 0
            while len(nonzero) and lost(np.ldexp(nonzero, k)).mean() > s.params.get("n_uf_threshold", 1e-3):
                k += 1
        elif s.rule == "current":
            k = fitting(amax, self.u_max()) - s.params.get("margin", 0) if amax else arriving
        elif s.rule == "mse":
            fits = fitting(amax, self.u_max()) if amax else arriving
            errors = [float(np.sum((f.at_scale(g, fits + i) - g) ** 2)) for i in range(4)]
            k = fits + errors.index(min(errors))
        else:
            seen = self.history.setdefault(site, [])
            largest = max([*seen[-s.params.get("length", 16) :], 0.0]) or amax
            k = fitting(largest, self.u_max()) - s.params.get("margin", 0) if largest else 0
            seen.append(amax)
        return k if s.scale_bound == math.inf else min(k, power_below(s.scale_bound))

    def round(self, site: str, g: Array, k: int) -> tuple[Array, int]:
        """A gradient that arrives with scale k, rounded, and the scale at which it was."""
        self.arrived[site] = bool(g.any())
        if self.s.measures:
            k = self.measured(site, g, k)
        if self.holds:
            if self.updates:
                self.held[site] = k
            k = self.held[site]
        if g.any() and self.s.rule != "mse":
            k = min(k, fitting(float(np.abs(g).max()), self.u_max()))
        self.scales[site] = k
        return self.fmt.at_scale(g, k), k

    def enter(self, site: str, g: Array) -> tuple[Array, int]:
        """A gradient from float32."""
        k = self.s.init_log2
        if self.s.casts and not self.s.measures and self.s.rule != "fixed":
            k = self.times_factor(f"cast {site}", g, None, k)
        return self.round(site, g, k)

    def through(self, layer: str, g: Array, k: int, w: Array) -> tuple[Array, int]:
        """The gradient of a linear layer's input, not rounded, and the scale that it carries. w: (out, in)."""
        return product(g, w), k if self.s.measures else self.times_factor(layer, g, w, k, f"{layer}:linear")

    def gate(self, name: str, g: Array, k: int, w: Array) -> tuple[Array, int]:
        """The gradient of what a gate multiplies, not rounded, and the scale that it carries. w: (out,)."""
        is_chosen = self.s.casts  # else linear layers alone are
        return g * w, self.times_factor(name, g, w, k, ":mul") if is_chosen and not self.s.measures else k

    def meet(self, branches: Sequence[tuple[Array, int]]) -> tuple[Array, int]:
        """The sum of gradients with scales of their own, before it is rounded, and its scale."""
        if self.s.branches == "exact":
            total = sum((g for g, _ in branches), np.zeros(()))
            return total, max(k for _, k in branches)
        rounded = []
        for g, k in branches:
            k = min(k, fitting(float(np.abs(g).max()), self.u_max())) if g.any() else k
            rounded.append((self.fmt.at_scale(g, k), k))
        largest = max(float(np.abs(g).max()) for g, _ in rounded)
        fits = [k for _, k in rounded if largest * 2.0**k < self.u_max()]
        k = max(fits) if fits else min(k for _, k in rounded)
        while k >= -3 and largest * 2.0**k >= self.u_max():
            k -= 1
        return sum((g for g, _ in rounded), np.zeros(())), k


# The networks: three linear layers, a residual block between two, and one whose branch is behind a gate.


def linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(8, 8, bias=bias)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = linear(), linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        return self.head(h + self.b(torch.relu(self.a(h))))  # type: ignore[no-any-return]


class Gated(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        return self.head(h + self.gate * self.b(torch.relu(self.a(h))))  # type: ignore[no-any-return]


def of_mlp(net: Recomputed, w: dict[str, Array], x: Array, g: Array) -> dict[str, Array]:
    inputs, names = [x], ("0", "2", "4")
    for name in names[:2]:
        inputs.append(np.maximum(product(inputs[-1], w[name].T), 0))
    grads = {}
    g, k = net.enter("4:linear", g)
    for i in (2, 1, 0):
        name = names[i]
        grads[name], _ = net.round(f"{name}:weight", product(g.T, inputs[i]), k)
        if i:
            g, k = net.through(name, g, k, w[name])
            g, k = net.round(f"{names[i - 1]}:linear", g * (inputs[i] > 0), k)
    return grads


def of_residual(net: Recomputed, w: dict[str, Array], x: Array, g: Array) -> dict[str, Array]:
    h = product(x, w["stem"].T)
    inner = np.maximum(product(h, w["a"].T), 0)
    branch_out = product(inner, w["b"].T)
    out = h + branch_out * w.get("gate", np.ones(8))
    grads = {}
    g, k = net.enter("head:linear", g)
    grads["head"], _ = net.round("head:weight", product(g.T, out), k)
    g, k = net.through("head", g, k, w["head"])
    summed, k_summed = net.round(":add", g, k)
    if "gate" in w:
        g, k = net.round(":mul", summed, k_summed)
        grads["gate"], _ = net.round(":weight", product(np.ones((1, len(g))), g * branch_out)[0], k)
        g, k = net.round("b:linear", *net.gate("gate", g, k, w["gate"]))
    else:
        g, k = net.round("b:linear", summed, k_summed)
    grads["b"], _ = net.round("b:weight", product(g.T, inner), k)
    g, k = net.through("b", g, k, w["b"])
    g, k = net.round("a:linear", g * (inner > 0), k)
    grads["a"], _ = net.round("a:weight", product(g.T, h), k)
    branch = net.through("a", g, k, w["a"])
    g, k = net.round("stem:linear", *net.meet([(summed, k_summed), branch]))
    grads["stem"], _ = net.round("stem:weight", product(g.T, x), k)
    return grads


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Array]]]] = {
    "mlp": (lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear()), of_mlp),
    "residual": (Residual, of_residual),
    "gated": (Gated, of_residual),
}


def same_in_torch_and_numpy(
    which: str, fmt: str, settings: Settings, steps: Sequence[int], seed: int = 0
) -> Recomputed:
    """Backward passes with output gradients of sizes 2**steps: all scales and gradients are equal in each.

    The weights stay as they are. Gives the recomputation.
    """
    rng = np.random.default_rng(seed)
    make, recompute = NETWORKS[which]
    net = make()
    w: dict[str, Array] = {}
    for name, parameter in net.named_parameters():
        shape = tuple(parameter.shape)
        sparse = rng.integers(-1, 2, shape) * (rng.integers(0, 2, shape) if len(shape) == 2 else 2.0**-2)
        w[name.split(".")[0]] = sparse * 2.0**-3 * (1.0 + (rng.random(shape) < 0.5))
        parameter.data = torch.tensor(w[name.split(".")[0]], dtype=torch.float32)
    model = fpsim.quantize(net, fpsim.Policy(error=fmt, weight_grad=fmt, rounding="nearest_even"))
    x = rng.integers(-1, 2, (4, 8)).astype(np.float64)
    ours = Recomputed(FORMATS.get(fmt, FEW_BITS), settings)
    transforms = None if settings.casts else [AdaLossTransformLinear()]
    with AdaLossScaled(
        model,
        transforms,
        init_scale=2.0**settings.init_log2,
        rule=layer_rule(settings.rule, **settings.params),
        update_every=settings.update_every,
        scale_upper_bound=None if settings.factor_bound == math.inf else settings.factor_bound,
        accum_upper_bound=None if settings.scale_bound == math.inf else settings.scale_bound,
        branches=settings.branches,
        u_min=settings.u_min,
        u_max=settings.u_max,
    ) as handle:
        for number, size in enumerate(steps, 1):
            g = rng.integers(-3, 4, (4, 8)) * 2.0 ** (size - rng.integers(0, 5, (4, 8)))
            model.zero_grad()
            model(torch.tensor(x, dtype=torch.float32)).backward(torch.tensor(g, dtype=torch.float32))
            ours.step = number
            gradients = recompute(ours, w, x, g)
            found = {**handle.log2_scales(), **handle.log2_scales("weight_grad")}
            assert found == {site: ours.scales[site] for site in found}, f"step {number}"
            assert found.keys() == ours.scales.keys()
            for name, expected in gradients.items():
                got = model.get_parameter(name if name == "gate" else f"{name}.weight").grad
                assert torch.equal(got, torch.tensor(expected, dtype=torch.float32)), f"step {number}, {name}"
    return ours


PREDICTING: dict[str, tuple[str, dict[str, Any]]] = {
    "grad+weight": ("approx_range", {}),
    "grad+weight, worst case": ("approx_range", {"bound": "worst_case"}),
    "product": ("approx_range", {"stats": "product"}),
    "grad": ("approx_range", {"stats": "grad"}),
    "abs_range": ("abs_range", {}),
    "element_wise_range": ("element_wise_range", {}),
    "fixed": ("fixed", {"fixed_loss_scale": 4.0}),
}
MEASURING: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("exact", {"n_uf_threshold": 0.1}),
    "current": ("current", {}),
    "current, margin": ("current", {"margin": 2}),
    "amax_history": ("amax_history", {"length": 2}),
    "mse": ("mse", {}),
}
SIZES = {"fp16": -22, "e5m2": -12, "e4m3fn": -6}  # near the least that is kept at scale 1


@pytest.mark.filterwarnings("ignore:Every gradient of")
@pytest.mark.parametrize("casts", [True, False], ids=["casts", "no casts"])
@pytest.mark.parametrize("branches", ["exact", "original"])
@pytest.mark.parametrize("rule", PREDICTING)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("which", NETWORKS)
def test_rules_that_predict_are_the_recomputation(which: str, fmt: str, rule: str, branches: str, casts: bool) -> None:
    name, params = PREDICTING[rule]
    size = SIZES[fmt]
    for seed in range(3):
        settings = Settings(name, params, branches, casts=casts, init_log2=1)
        same_in_torch_and_numpy(which, fmt, settings, (size, size - 6, size + 9, size + 1), seed)


@pytest.mark.filterwarnings("ignore:Every gradient of")
@pytest.mark.parametrize("branches", ["exact", "original"])
@pytest.mark.parametrize("rule", PREDICTING)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("which", NETWORKS)
def test_bounds_are_the_recomputations(which: str, fmt: str, rule: str, branches: str) -> None:
    name, params = PREDICTING[rule]
    settings = Settings(name, params, branches, factor_bound=16.0, scale_bound=100.0, init_log2=3)
    free = Settings(name, params, branches, init_log2=3)
    steps = (SIZES[fmt] - 4, SIZES[fmt] - 12)
    bound = same_in_torch_and_numpy(which, fmt, settings, steps).scales
    assert max(bound.values()) <= 6  # 64, the power of two below 100
    assert bound != same_in_torch_and_numpy(which, fmt, free, steps).scales


@pytest.mark.filterwarnings("ignore:Every gradient of")
@pytest.mark.parametrize("branches", ["exact", "original"])
@pytest.mark.parametrize("rule", PREDICTING)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("which", NETWORKS)
def test_between_updates_scales_or_factors_are_the_recomputations(
    which: str, fmt: str, rule: str, branches: str
) -> None:
    name, params = PREDICTING[rule]
    size = SIZES[fmt]
    for seed in range(3):
        settings = Settings(name, params, branches, update_every=3)
        same_in_torch_and_numpy(which, fmt, settings, (size, size + 3, size - 4, size - 2, size + 1), seed)


@pytest.mark.filterwarnings("ignore:Every gradient of")
@pytest.mark.parametrize("scale_bound", [math.inf, 100.0])
@pytest.mark.parametrize("rule", MEASURING)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("which", NETWORKS)
def test_rules_that_measure_are_the_recomputation(which: str, fmt: str, rule: str, scale_bound: float) -> None:
    name, params = MEASURING[rule]
    size = SIZES[fmt] - 4
    for seed in range(3):
        settings = Settings(name, params, scale_bound=scale_bound)
        found = same_in_torch_and_numpy(which, fmt, settings, (size, size - 3, size + 5, size, size - 8), seed).scales
        assert max(found.values()) == 6 if scale_bound < math.inf else max(found.values()) > 6


@pytest.mark.filterwarnings("ignore:Every gradient of")
@pytest.mark.parametrize("rule", [rule for rule in [*PREDICTING, *MEASURING] if rule != "fixed"])
@pytest.mark.parametrize("which", NETWORKS)
def test_scales_in_four_bits_are_the_recomputations(which: str, rule: str) -> None:
    name, params = {**PREDICTING, **MEASURING}[rule]
    for seed in range(3):
        for size in (0, -9):
            same_in_torch_and_numpy(which, "e2m1fn", Settings(name, params), (size, size - 6, size + 9, size + 1), seed)


@pytest.mark.parametrize("u_min", ["flush", "normal"])
@pytest.mark.parametrize("rule", ["grad+weight", "abs_range", "element_wise_range"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_rules_keep_gradients_above_is_the_recomputations(fmt: str, rule: str, u_min: str) -> None:
    name, params = PREDICTING[rule]
    settings = Settings(name, params, u_min=u_min)
    same_in_torch_and_numpy("residual", fmt, settings, (SIZES[fmt], SIZES[fmt] - 5))


@pytest.mark.parametrize("rule", [*PREDICTING, *MEASURING])
@pytest.mark.parametrize("which", NETWORKS)
def test_numbers_for_the_limits_of_a_format_are_the_recomputations(which: str, rule: str) -> None:
    name, params = {**PREDICTING, **MEASURING}[rule]
    # 6e-8 and 60000 are those of the original's first version; 1/3 and 3000 are no powers of two, and bind
    for u_min, u_max in ((6e-8, 60000.0), (1 / 3, 3000.0), (2.0**-20, None), ("normal", 2.0**6)):
        settings = Settings(name, params, u_min=u_min, u_max=u_max)
        same_in_torch_and_numpy(which, "fp16", settings, (SIZES["fp16"], SIZES["fp16"] - 5, SIZES["fp16"] + 20))


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.2])
@pytest.mark.parametrize("u_min", ["smallest", "normal"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_exact_counts_what_rounding_loses_also_at_ties(fmt: str, u_min: str, share: float) -> None:
    # these data are a few digits times powers of two: ties are everywhere
    for seed in range(3):
        settings = Settings("exact", {"n_uf_threshold": share}, u_min=u_min)
        same_in_torch_and_numpy("residual", fmt, settings, (SIZES[fmt], SIZES[fmt] - 5), seed)
