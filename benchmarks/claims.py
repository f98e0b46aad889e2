"""Are the sentences of README and docs true? Every quantitative claim as a row, run with two lists of seeds.

    python benchmarks/claims.py                          list the rows
    python benchmarks/claims.py --out runs/claims        run what is not done there, and judge every row
    python benchmarks/claims.py --out runs/claims --only chars. --lists 1
    python benchmarks/claims.py --out runs/claims --judge    judge what is done, run nothing
    python benchmarks/claims.py --out runs/claims --known docs --write    run only what docs/claims.json has not

A row has the page and the sentence, what is measured, its band, and how many seeds of each list it takes. It holds
where the mean over the seeds of each list lies within the band. Trainings are cells of one sweep in the folder, and are
trained once; other numbers stand in its computed.json. docs/claims.md has the results of the last full run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from scipy import stats

from ada_loss.files import write_atomically
from ada_loss.lab.cells.cells import Cell, plan
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import run_cells
from ada_loss.lab.sweep.execution import Execution

ROOT = Path(__file__).parents[1]
# Two disjoint lists, written down before anything was run with them. A row takes the first few of each.
SEEDS = (tuple(range(1000, 1010)), tuple(range(2000, 2010)))
OPTIONS: dict[str, dict[str, Any]] = {
    "chars": {"steps": 100},
    "digits": {"epochs": 6, "record_every": 4},
    "deep_digits": {},  # those of the task itself
    "segmentation": {},
    "detection": {},
}
POINTS, BITS, SHARE, RATIO = "points", "bits", "%", ""  # units of rows
INF = math.inf


@dataclass(frozen=True)
class Setting:
    """What is trained: a task, a format, a scaling method, and a rounding (None: the usual one)."""

    task: str
    fmt: Any
    scaling: str | float = "none"
    rounding: str | None = None

    def cell(self, seed: int, small: bool = False) -> Cell:
        """The cell of a seed. small: for a test, a few steps."""
        options = OPTIONS[self.task] | ({"epochs": 1} if small and "epochs" in OPTIONS[self.task] else {})
        roundings = None if self.rounding is None else [self.rounding]
        formats, methods = [self.fmt], [self.scaling]
        (cell,) = plan(self.task, formats, methods, roundings=roundings, seeds=[seed], options=options)
        return cell


@dataclass(frozen=True)
class Trained:
    """A metric of trainings, for one seed: its value, or its difference from another setting with the same seed."""

    setting: Setting
    metric: str
    against: Setting | None = None

    def cells(self, seed: int, small: bool = False) -> list[Cell]:
        """The trainings that it needs."""
        return [one.cell(seed, small) for one in (self.setting, self.against) if one is not None]

    def value(self, seed: int, rows: Mapping[str, Mapping[str, Any]], small: bool = False) -> float:
        """The number, from the rows of finished trainings by id; shares in %. KeyError for a missing one."""
        values = [float(rows[cell.id][self.metric]) for cell in self.cells(seed, small)]
        factor = 1.0 if self.metric == "bits_per_character" else 100.0
        return factor * (values[0] - (values[1] if len(values) > 1 else 0.0))

    @property
    def words(self) -> str:
        """What is trained, as in a sweep."""
        one = self.setting
        words = f"{one.task} {_brief(one.fmt)} {one.scaling} {one.rounding or ''}".rstrip()
        if self.against is not None:
            other = "fp32" if self.against.fmt == "fp32" else f"{_brief(self.against.fmt)} {self.against.scaling}"
            words += f" against {other}"
        return f"{words}: {self.metric.replace('_', ' ')}"


@dataclass(frozen=True)
class Computed:
    """A number that a function of this file computes for one seed."""

    function: Callable[..., float]
    arguments: tuple[Any, ...] = ()

    @property
    def words(self) -> str:
        """The call."""
        return f"{self.function.__name__}({', '.join(map(repr, self.arguments))})"

    def value(self, seed: int) -> float:
        """The number."""
        return float(self.function(seed, *self.arguments))


@dataclass(frozen=True)
class Claim:
    """A row: a sentence of a page, what is measured, and the band of its mean.

    name: "chars.e4m3fn.none", by which `--only` finds it.
    page, sentence: the words that stand there, with single spaces.
    low, high: of the mean over each list of seeds, in `unit`. A row without a bound reports.
    seeds: of each list.
    """

    name: str
    page: str
    sentence: str
    quantity: Trained | Computed
    unit: str
    low: float = -INF
    high: float = INF
    seeds: int = 5

    def stands(self) -> bool:
        """Whether the sentence stands in the page."""
        return self.sentence in spaced((ROOT / self.page).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Measured:
    """What a list of seeds gave: the values of those that are done."""

    claim: Claim
    values: dict[int, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """NaN where nothing is done."""
        return statistics.fmean(self.values.values()) if self.values else math.nan

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of the mean; NaN for less than two seeds."""
        count = len(self.values)
        if count < 2:
            return math.nan
        return float(stats.t.isf(0.025, count - 1)) * statistics.stdev(self.values.values()) / math.sqrt(count)

    @property
    def holds(self) -> bool | None:
        """Whether the mean is in the band; None where seeds are missing. A value that is not finite is in none."""
        if len(self.values) < self.claim.seeds:
            return None
        return math.isfinite(self.mean) and self.claim.low <= self.mean <= self.claim.high


def spaced(text: str) -> str:
    """A page with single spaces, as sentences are compared.

    >>> spaced("one\\n  two")
    'one two'
    """
    return re.sub(r"\s+", " ", text)


def _brief(fmt: Any) -> str:
    if isinstance(fmt, str):
        return fmt
    words = {**fmt, **fmt.get("products", {})} if isinstance(fmt.get("products"), Mapping) else fmt
    return " ".join(
        f"{name}={value}"
        if name != "overrides"
        else " ".join(f"{place}={inner or 'float32'}" for place, inner in value.items())
        for name, value in words.items()
        if name != "products"
    )


# The numbers that need no training


def first_layer_error(seed: int, fmt: str, gain: float, method: str | float, other: str | float | None = None) -> float:
    """The error of the first layer's weight gradient in a deep network; over that of another method."""
    from ada_loss.lab.studies.depth import depth_trial

    methods = [method] if other is None else [method, other]
    errors = [row["error"] for row in depth_trial([fmt], [gain], methods, width=64, batch=32, seed=seed)]
    return float(errors[0] if other is None else errors[0] / errors[1])


@cache
def second_head_error(seed: int, scaler: str, against: str | None = None) -> float:
    """The error of a head whose loss is small, after a training in float16; less that of another training.

    Two heads on one trunk learn differences of two inputs, in 300 steps of Adam. The loss of the second is multiplied
    by 1e-12, as one in other units would be. A head that answers 0 has an error of 0.5.

    scaler: "layers" or a rule, in float16 under torch.autocast; "float32" for a training without either.
    """
    import torch
    from torch import nn

    import ada_loss

    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(8, 64), nn.Tanh())
    heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(2))
    model = nn.ModuleList([trunk, heads])
    words: dict[str, Any] = {"layers": {"layers": model}, "float32": {"rule": "off"}}.get(scaler, {"rule": scaler})
    loss_scaler = ada_loss.GradScaler(**words)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-30)  # it divides a gradient by its own size

    def errors(count: int) -> list[torch.Tensor]:
        x = torch.randn(count, 8)
        with torch.autocast("cpu", torch.float16, enabled=scaler != "float32"):
            inner = trunk(x)
            answers = [head(inner).float() for head in heads]
        return [(y - (x[:, i : i + 1] - x[:, i + 1 : i + 2]) / 2).square().mean() for i, y in enumerate(answers)]

    for _ in range(300):
        first, second = errors(64)
        loss_scaler.scale(first + 1e-12 * second).backward()
        loss_scaler.step(optimizer)
        loss_scaler.update()
        optimizer.zero_grad()
    with torch.no_grad():
        error = float(errors(4096)[1])
    return error - (second_head_error(seed, against) if against is not None else 0.0)


def best_constant(seed: int, fmt: str, gain: float) -> float:
    """The least such error of the loss scales 2^6, 2^10, ... 2^30."""
    from ada_loss.lab.studies.depth import depth_trial

    constants = [2.0**k for k in range(6, 31, 4)]
    rows = depth_trial([fmt], [gain], constants, width=64, batch=32, seed=seed)
    return float(min(row["error"] for row in rows))


def mean_error_of(seed: int, variant: str) -> float:
    """The mean error of e4m3fn with one random bit, in units of the spacing."""
    import torch

    import fpsim

    x = 1 + torch.rand(1_000_000, generator=torch.Generator().manual_seed(seed))
    fpsim.manual_seed(seed)
    rounded = fpsim.round_to(x, "e4m3fn", "stochastic", random_bits=1, variant=variant)
    return float((rounded.double() - x.double()).mean()) * 8


def stochastic_sum(seed: int) -> float:
    """The mean of 10,000 sums of 1 and a thousand terms of 0.001, in bf16 with stochastic rounding."""
    import torch

    import fpsim

    terms = torch.full((1001,), 0.001)
    terms[0] = 1.0
    fpsim.manual_seed(seed)
    return float(fpsim.matmul(terms, torch.ones(1001, 10_000), fpsim.Accumulator("bf16", "stochastic")).mean())


def worst_share_wrong(seed: int) -> float:
    """Simulated sweeps with a wrong statement, in the worst cell with up to five seeds, in %."""
    import verdicts as sim

    return 100 * float(sim.share_wrong(sim.Cell(5, 3, 1.0, "unequal", "edge"), 4000, seed))


def share_found(seed: int, settings: int, seeds: int, deviation: float) -> float:
    """Equal settings that are found in simulated sweeps, in %."""
    import verdicts as sim

    return 100 * float(sim.shares_found(sim.Cell(settings, seeds, deviation, "shared", "thirds"), 1000, seed)[0])


# The settings of the pages


def operands(fmt: str, dy: str | None = None, head: bool = True) -> dict[str, Any]:
    """All operands of products, x and w with a scale for each tensor. dy: its format, where it is another one."""
    one = f"{fmt} per tensor fp32"
    policy: dict[str, Any] = {"products": {"x": one, "w": one, "dy": dy or fmt}}
    return policy if head else policy | {"overrides": {"head": None}}


def gradient(dy: str) -> dict[str, Any]:
    """dy alone."""
    return {"products": {"dy": dy}}


def chars(fmt: Any, scaling: str | float = "none", rounding: str | None = None) -> Setting:
    return Setting("chars", fmt, scaling, rounding)


def error_of(fmt: str, **more: Any) -> dict[str, Any]:
    """Gradients of activations and weights, of the deep network."""
    return {"error": fmt, "weight_grad": fmt, **more}


# Running and judging


class Store:
    """What was measured in a folder: the rows of finished trainings by id, and computed numbers by call and seed.

    known: folders of other sweeps, or with a claims.json such as docs has, whose numbers are not measured again.
    """

    def __init__(self, out: Path, known: Sequence[Path] = ()) -> None:
        self.out, self.path = out, out / "computed.json"
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.numbers: dict[str, dict[str, float]] = {}  # of a claims.json, by claim and seed
        for folder in (*known, out):
            if (folder / "ledger.sqlite").exists():
                self.rows |= {row["id"]: row for row in Results(folder).rows()}
            if (folder / "claims.json").exists():
                lists = json.loads((folder / "claims.json").read_text("utf-8"))
                for name, ones in lists.items():
                    self.numbers.setdefault(name, {}).update({seed: x for one in ones for seed, x in one.items()})
        content = self.path.read_text("utf-8") if self.path.exists() else "{}"
        self.computed: dict[str, dict[str, float]] = json.loads(content)

    def value(self, claim: Claim, seed: int, small: bool = False) -> float | None:
        """The number of a claim; None where it is not done."""
        known = self.numbers.get(claim.name, {}).get(str(seed))
        if isinstance(claim.quantity, Computed):
            return self.computed.get(claim.quantity.words, {}).get(str(seed), known)
        try:
            return claim.quantity.value(seed, self.rows, small)
        except KeyError:
            return known

    def compute(self, claim: Claim, seed: int) -> None:
        """Compute a number and keep it, unless it is known."""
        assert isinstance(claim.quantity, Computed)
        numbers = self.computed.setdefault(claim.quantity.words, {})
        if str(seed) not in numbers:
            numbers[str(seed)] = claim.quantity.value(seed)
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.computed, indent=1).encode())


def run(
    claims: Sequence[Claim],
    lists: Sequence[Sequence[int]],
    out: Path,
    workers: int = 1,
    known: Sequence[Path] = (),
    small: bool = False,
) -> Store:
    """Run what is not done in the folder: trainings as cells of one sweep, then what is computed.

    lists: of seeds, of which each claim takes its first ones.
    known: folders of what was measured elsewhere, as in `Store`.
    small: for a test, with few steps where the task's options say epochs.
    """
    cells: dict[str, Cell] = {}
    before = Store(out, known)
    elsewhere = before.rows.keys() - Store(out).rows.keys()
    for seeds in lists:
        for claim in claims:
            if isinstance(claim.quantity, Trained):
                for seed in seeds[: claim.seeds]:
                    if before.value(claim, seed, small) is None:
                        needed = claim.quantity.cells(seed, small)
                        cells |= {cell.id: cell for cell in needed if cell.id not in elsewhere}
    if cells:
        run_cells([*cells.values()], out, Execution(workers=workers), title="claims")
    store = Store(out, known)
    for seeds in lists:
        for claim in claims:
            if isinstance(claim.quantity, Computed):
                for seed in seeds[: claim.seeds]:
                    if store.value(claim, seed) is None:
                        store.compute(claim, seed)
    return store


def judge(
    claims: Iterable[Claim], lists: Sequence[Sequence[int]], store: Store, small: bool = False
) -> list[tuple[Claim, list[Measured]]]:
    """For each claim what each list of seeds gave."""
    judged = []
    for claim in claims:
        ones = []
        for seeds in lists:
            values = {seed: store.value(claim, seed, small) for seed in seeds[: claim.seeds]}
            ones.append(Measured(claim, {seed: value for seed, value in values.items() if value is not None}))
        judged.append((claim, ones))
    return judged


def verdict_on(ones: Sequence[Measured]) -> str:
    """What is said of a claim: "holds", "fails", "reported", or how many numbers are missing."""
    missing = sum(one.claim.seeds - len(one.values) for one in ones)
    if missing:
        return f"{missing} to run"
    if not all(one.holds for one in ones):
        return "fails"
    is_bound = any(map(math.isfinite, (ones[0].claim.low, ones[0].claim.high)))
    return "holds" if is_bound else "reported"


def table(judged: Iterable[tuple[Claim, list[Measured]]]) -> str:
    """The rows as a table in Markdown: mean and 95 % interval of each list, and whether the row holds."""
    lines = ["| row | measured | band | first seeds | second seeds | |", "| --- | --- | --- | ---: | ---: | --- |"]
    for claim, ones in judged:
        band = f"{bound(claim.low)} to {bound(claim.high)} {claim.unit}".rstrip()
        values = [_mean(one) for one in ones]
        words = " | ".join(values + ["-"] * (len(SEEDS) - len(values)))
        lines.append(f"| {claim.name} | {claim.quantity.words} | {band} | {words} | {verdict_on(ones)} |")
    return "\n".join(lines)


HEAD = """# Claims: which sentences of these pages were checked, and what came out

    python benchmarks/claims.py --out runs/claims --write

Each statement of README about its sweep, and each quantitative sentence of the pages named here, is a row of
`benchmarks/claim_rows.py`. A row has the page and the words, the training or computation, and a band for the mean.
There are two disjoint lists of seeds, 1000 to 1009 and 2000 to 2009. A row takes the first five seeds or all ten of
each list. Seeds and bands were written down before anything was run with them. A row holds if the mean over each list
lies in its band; a row that is "reported" has no band. The command runs only the computations whose results its folder
lacks, so that it can be interrupted and resumed. It is run in full before a release. Every run of the tests checks that
each sentence occurs in its page, and computes a few rows at a reduced size.

Differences are from float32 with the same seed. The two columns of seeds have the mean with its 95 % interval, and in
parentheses how many seeds are done. claims.json has the number of each seed. "to run" says how many numbers are still
missing.

**What did not hold.** The rows `deep_digits.abs_range` and `deep_digits.exact` first stood for the claim that these
rules "lose accuracy in e4m3fn", with a band of -30 to -0.5 points. Both failed with both lists, as the numbers below
show. The sentence of scaling.md says the opposite now, and the band of the two rows is that of the other rules. It was
changed after the numbers were seen, so that these two rows confirm nothing; all other bands are unchanged. The rows
`readme` and `notebook` were added later. At that time the numbers of the same trainings were known from other rows,
except those of `readme` with `nearest_even`.

"""


def write(judged: Sequence[tuple[Claim, list[Measured]]], folder: Path) -> None:
    """Write claims.md and claims.json, the page of results and the number of each seed."""
    judged = [
        (claim, [replace(one, values={k: round(v, 6) for k, v in one.values.items()}) for one in ones])
        for claim, ones in judged
    ]
    values = {claim.name: [one.values for one in ones] for claim, ones in judged}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in values.items())
    write_atomically(folder / "claims.json", f"{{\n{lines}\n}}\n".encode())
    write_atomically(folder / "claims.md", f"{HEAD}{table(judged)}\n\n{count(judged)}\n".encode())


def count(judged: Iterable[tuple[Claim, list[Measured]]]) -> str:
    """How many rows hold, fail, are reported, and are to be run, in words."""
    kinds = [verdict_on(ones) for _, ones in judged]
    words = [f"{kinds.count(kind)} {verb}" for kind, verb in (("holds", "hold"), ("fails", "fail"))]
    return f"{', '.join(words)}, {kinds.count('reported')} are reported, of {len(kinds)}."


def bound(value: float) -> str:
    """An end of a band as text."""
    return "any" if math.isinf(value) else f"{value:g}"


def _mean(one: Measured) -> str:
    if not one.values:
        return "-"
    digits = {POINTS: 2, SHARE: 1}.get(one.claim.unit, 4)
    interval = f" ± {one.half_width:.{digits}f}" if len(one.values) > 1 else ""
    return f"{one.mean:.{digits}f}{interval} ({len(one.values)})"


def chosen(claims: Iterable[Claim], only: str) -> list[Claim]:
    """The claims whose name begins with one of the parts, separated by commas, in the order of the parts."""
    every = [*claims]
    by_name = {claim.name: claim for part in only.split(",") for claim in every if claim.name.startswith(part)}
    return [*by_name.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """List, run and judge the rows. Returns 1 where a row fails."""
    from claim_rows import CLAIMS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the results; without it the rows are listed")
    parser.add_argument("--only", default="", help="what names begin with, separated by commas: chars.,depth.")
    parser.add_argument("--lists", default="1,2", help="which lists of seeds")
    parser.add_argument("--seeds", type=int, default=0, help="at most so many of each list")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--known", type=Path, action="append", default=[], help="a sweep's folder, or docs, to take from"
    )
    parser.add_argument("--judge", action="store_true", help="judge what is done, and run nothing")
    parser.add_argument("--write", action="store_true", help="write docs/claims.md and docs/claims.json")
    options = parser.parse_args(arguments)
    claims = chosen(CLAIMS, options.only)
    if options.seeds:
        claims = [replace(claim, seeds=min(claim.seeds, options.seeds)) for claim in claims]
    if options.out is None:
        for claim in claims:
            print(f"{claim.name}: {claim.page}: {claim.sentence}\n    {claim.quantity.words}")
        return 0
    lists = [SEEDS[int(number) - 1] for number in options.lists.split(",")]
    known = options.known
    store = Store(options.out, known) if options.judge else run(claims, lists, options.out, options.workers, known)
    judged = judge(claims, lists, store)
    print(table(judged))
    print(f"\n{count(judged)}")
    if options.write:
        write(judged, ROOT / "docs")
    return int(any(verdict_on(ones) == "fails" for _, ones in judged))


if __name__ == "__main__":
    import claims  # under the name by which the rows know it

    sys.exit(claims.main())
