"""The statements of a verdict: lists of settings compared with float32, and a description of the tests at the end."""

from __future__ import annotations

import html
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ada_loss.files import data_frame
from ada_loss.lab.directions import hint_for
from ada_loss.lab.results.comparison import Comparison, in_units, per_cent
from ada_loss.lab.results.judgement import (
    LEAST_SEEDS,
    LEVEL,
    MOST_SEEDS,
    SIMULATED,
    Judgement,
    is_sharing,
    largest_rate_unseen,
)
from ada_loss.lab.results.table import heading, is_share, latex, mean_and_deviation, mean_of

__all__ = ["SECTIONS", "WORSE", "Combination", "Section", "Verdict", "as_html", "as_latex", "as_text"]

# The largest number of settings in a list that are described.
MOST_NAMED = 20
# The largest number of formats in a list without descriptions.
MOST_LISTED = 12
# Amounts below this part of the tolerance are rounding errors of float64, and are shown as 0.
NOISE = 1e-9
# The least share of lost gradients that is mentioned.
NOTABLE = 0.005
# The number of seeds that reveals most collapses; docs/verdict.md has the numbers.
ENOUGH = 5
# The lists of a verdict in order, with the outcomes in each list.
SECTIONS = {
    "match": ("match",),
    "above": ("above",),
    "short": ("short",),
    "collapsed": ("collapsed",),
    "counted": ("diverged", "worse"),
    "open": ("undecided", "few", "failed"),
}
# The outcomes whose reason is worth knowing.
WORSE = (*SECTIONS["short"], *SECTIONS["collapsed"], *SECTIONS["counted"])


@dataclass(frozen=True)
class Combination:
    """A format with its scaling method and all other settings that differ, compared with float32.

    fmt, rest: the format, and the other settings that differ, as words.
    outcome: "match" (worse by no more than the tolerance), "short" (worse by more), "above" (in a test for equivalence:
        better by more), "collapsed" (some seeds do not belong to the others) or "undecided". Without a test the outcome
        is "diverged", "worse" (worse with every seed, and much worse with one), "failed" (no result) or "few" (results
        of fewer than three seeds).
    comparison: the comparison with float32; it has no differences if the setting failed.
    seeds: the number of trainings that are done.
    shares: what the trainings lost, {"underflow", "overflow", "skipped steps": a share}, as means over the seeds.
    judgement: the result of the test, whose differences are positive if the setting is better; None if it is not
        tested.
    collapsed, failed: the seeds that collapsed, and the seeds that failed.
    silent: the seeds whose trainings ended without this metric.
    cells: the ids of the cells.
    why: the reason that `fpsim.why` found for one of the cells, if the sweep asked for it.
    """

    fmt: str
    rest: str
    outcome: str
    comparison: Comparison
    seeds: int
    shares: Mapping[str, float] = field(default_factory=dict)
    judgement: Judgement | None = None
    collapsed: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    cells: tuple[str, ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        """Return the combination in words."""
        return f"{self.fmt} ({self.rest})" if self.rest else self.fmt

    @property
    def reasons(self) -> str:
        """Return how many trainings diverged, what they lost, and the reason, in words; "" if nothing is known."""
        diverged = self.comparison.diverged
        words = [f"{diverged} of {self.seeds} diverged"] if diverged else []
        text = ", ".join([*words, *self.losses])
        return f"{text}{': ' if text and self.why else ''}{self.why}"

    @property
    def losses(self) -> list[str]:
        """Return a description of each notable loss of the trainings, such as the share of underflowed gradients."""
        return [f"{name} {per_cent(round(share, 3))}" for name, share in self.shares.items() if share >= NOTABLE]

    @property
    def asked(self) -> int:
        """Return the number of seeds that were trained or failed."""
        return self.seeds + len(self.failed)


@dataclass(frozen=True)
class Verdict:
    """The verdict of a sweep on all settings compared with float32. It is printed as a few lists.

    A setting has collapsed if some of its seeds cannot belong to its other seeds. Each other setting is tested once,
    two-sided, at the tolerance below float32: it stays within the tolerance, it falls short by more, or the test is
    open. `judgement.py` has the tests and their simulated errors. A setting with a diverged seed is counted and not
    tested, and a setting with fewer than three seeds is not judged.

    metric: the name of the metric.
    baseline: the results of float32, {seed: metric}; empty without float32.
    tolerance: the tolerance in units of the metric.
    level: the bound for the probability of any wrong statement, if differences are normal.
    combinations: the combinations, in the order of the sweep.
    subject: the part of the sweep that the verdict is about, if there are several: the task, the options that differ.
    sign: 1 if a larger metric is better, -1 if a smaller metric is better; 0 if this is not known, so that nothing is
        judged.
    equivalence: whether "match" means within the tolerance on both sides.
    lost: the seeds of float32 that diverged or failed.
    is_near_zero: whether no tolerance was given, and float32 is too near 0 for a tolerance that is a share of it.
    """

    metric: str
    baseline: Mapping[int, float]
    tolerance: float
    level: float
    combinations: Sequence[Combination]
    subject: str = ""
    sign: int = 1
    equivalence: bool = False
    lost: tuple[int, ...] = ()
    is_near_zero: bool = False

    def of(self, outcome: str) -> list[Combination]:
        """Return the combinations with an outcome."""
        return [one for one in self.combinations if one.outcome == outcome]

    @property
    def problem(self) -> str:
        """Return the reason why a verdict is impossible, as a sentence; "" if it is possible."""
        if not self.baseline and self.lost:
            return f"No verdict: float32 itself gave no finite {self.metric}, so there is nothing to compare with."
        if not self.baseline:
            return "No verdict: there is no float32 to compare with. Leave baseline=True, or add 'fp32' to the formats."
        if not self.combinations:
            return "No verdict: there is nothing but float32."
        if not self.sign:
            words = f"No verdict: nothing tells whether a larger or a smaller {self.metric} is better."
            return f"{words} {hint_for(self.metric)}"
        if len(self.baseline) < LEAST_SEEDS:
            count = f"{len(self.baseline)} seed{'s' * (len(self.baseline) > 1)}"
            more = "" if self.lost else f" Give seeds={LEAST_SEEDS}, better 5."
            return f"No verdict: {count} of float32 cannot tell a difference from chance.{more}"
        if self.is_near_zero:
            return (
                f"No verdict: float32's {self.metric} {self._of_float32} is so near 0 that no share of it is a "
                f"tolerance. Give one in its units: Results.verdicts(tolerance=), or ada-loss verdict --tolerance."
            )
        return ""

    @property
    def head(self) -> str:
        """Return float32's metric, or the reason why a verdict is impossible."""
        words = self.problem
        if not words:
            better = ", lower is better" * (self.sign < 0)
            words = f"float32 gives {self.metric} {self._of_float32}{' %' * (is_share(self.metric))}{better}."
        if self.lost:
            words += f" float32 itself gave none with {_seeds(self.lost)}, and nothing is compared there."
        return f"{self.subject}{': ' * bool(self.subject)}{words}"

    @property
    def _of_float32(self) -> str:
        """Return the mean and the deviation of float32."""
        values = [*self.baseline.values()]
        return mean_and_deviation(self.metric, mean_of(values), statistics.stdev(values))

    @property
    def sections(self) -> list[Section]:
        """Return the lists that are not empty."""
        sections = []
        for kind, outcomes in SECTIONS.items():
            chosen = [one for one in self.combinations if one.outcome in outcomes]
            if chosen:
                chosen.sort(key=lambda one: (outcomes.index(one.outcome), -abs(_finite(one.comparison.mean))))
                lines = self._listed(chosen) if kind in ("match", "above") else self._named(chosen)
                title = self._title(kind)
                sections.append(Section(kind, f"{title}, {len(chosen)} of {len(self.combinations)}", lines))
        return sections

    @property
    def foot(self) -> str:
        """Return the description of the tests, and of the chance of a wrong statement."""
        judged = [one for one in self.combinations if one.judgement is not None or one.collapsed]
        if not judged:
            return ""
        # A setting that collapsed has no judgement, although it was tested for collapses.
        tested = [one.judgement for one in judged if one.judgement is not None]
        counts = [len(one.comparison.differences) for one in judged]
        fewest, seeds = min(counts), max(counts)
        shared = ", variances shared where they are alike" if is_sharing(len(tested), seeds) else ""
        both = " and above" if self.equivalence else ""
        over = f"over {f'{fewest} to ' * (fewest < seeds)}{seeds} seeds"
        if tested:
            words = f"One test for each of {len(tested)} settings at {self.amount} {self._side}{both} float32, {over}, "
            words = words.replace("each of 1 settings", "the one setting")
            words += f"Holm-corrected{shared}, and one for collapses"
        else:
            words = f"One test of each setting for collapses, {over}"
        words += (
            f": a wrong statement anywhere has a chance of at most {per_cent(self.level)} if differences are normal"
        )
        if self.level == LEVEL and shared:
            words += f", and occurred in at most {per_cent(SIMULATED)} of simulated sweeps, also with unequal variances"
            words += " and heavy tails"
        words += ". Differences with one long tail are not covered."
        words += " In brackets: intervals at the level of each test." if tested else ""
        rate = per_cent(round(largest_rate_unseen(seeds), 2))
        words += f" Where none of {seeds} seeds collapsed, rates of collapse above {rate} are excluded."
        if not tested:
            return words
        least = statistics.median(one.margin for one in tested)
        if least > self.tolerance > 0:
            amount = self._said(least)
            words += (
                f" With so many seeds a setting that equals float32 is likely found from a tolerance of {amount} on."
            )
        if any(0 < one.seeds <= MOST_SEEDS for one in tested):
            words += " So many seeds would decide an open setting if its mean and deviation stay."
        return words

    def __len__(self) -> int:
        return len(self.combinations)

    def __bool__(self) -> bool:
        return True

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame with a row for each setting."""
        rows = []
        for one in self.combinations:
            low, high = (math.nan, math.nan) if one.judgement is None else one.judgement.interval
            low, high = sorted((self.sign * low, self.sign * high))
            words = {"format": one.fmt, "rest": one.rest, "outcome": one.outcome, "seeds": one.seeds}
            lost = {"diverged": one.comparison.diverged, "collapsed": len(one.collapsed)}
            numbers = {"difference": one.comparison.mean, "low": low, "high": high, **lost}
            rows.append({**words, **numbers, **one.shares})
        return data_frame(rows)

    def plot(self) -> Any:
        """Return a figure: the differences from float32, with their intervals and the tolerance; needs matplotlib."""
        from ada_loss.lab.results.figures import plot_differences

        rows = []
        for one in self.combinations:
            interval = (math.nan, math.nan) if one.judgement is None else one.judgement.interval
            ends = sorted(self.sign * bound for bound in interval)
            rows.append({"name": one.name, "differences": [*one.comparison.differences.values()], "interval": ends})
        words = f"{heading(self.metric)}: difference from float32" + ", lower is better" * (self.sign < 0)
        return plot_differences(rows, words, self.tolerance, 100.0 if is_share(self.metric) else 1.0)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return as_text(self.head, self.sections, self.foot)

    def _repr_html_(self) -> str:
        return as_html(self.head, self.sections, self.foot)

    def to_html(self) -> str:
        """Return the lists as a block of HTML."""
        return as_html(self.head, self.sections, self.foot)

    def to_latex(self) -> str:
        """Return the lists as a LaTeX description."""
        return as_latex(self.head, self.sections, self.foot)

    def statement(self, one: Combination) -> str:
        """Return the statement on a combination, a sentence without the combination's name."""
        (title,) = [self._title(kind) for kind, outcomes in SECTIONS.items() if one.outcome in outcomes]
        title = title[0].lower() + title[1:]
        if one.outcome in ("match", "above"):
            return ", ".join(filter(None, (f"{title}: {self._estimate(one)}", self._words(one))))
        # The descriptions of these outcomes need no title.
        is_told = one.outcome in (*SECTIONS["collapsed"], *SECTIONS["counted"])
        return self._words(one) if is_told else f"{title}: {self._words(one)}"

    @property
    def _side(self) -> str:
        return "above" if self.sign < 0 else "below"

    @property
    def amount(self) -> str:
        """Return the tolerance in words."""
        # All digits of the tolerance itself are shown, because it was given, not measured.
        if is_share(self.metric):
            words = f"{100 * self.tolerance:.4g}"
            return "1 point" if words == "1" else f"{words if '.' in words or 'e' in words else words + '.0'} points"
        return _bare(self.metric, self.tolerance)

    def _said(self, value: float) -> str:
        """Return an amount in words, with as many decimals as are needed to compare it with the tolerance."""
        return _bare(self.metric, value, self.tolerance)

    def _title(self, kind: str) -> str:
        if kind == "open":
            return "Open"
        if kind == "above":
            return f"Better by more than {self.amount}"
        if kind == "short":
            return f"Falls short by more than {self.amount}"
        if kind == "collapsed":
            return "Collapses with some seeds"
        if kind == "counted":
            return "Counted, not tested"
        if self.equivalence:
            return f"Matches float32 within {self.amount}"
        return f"No more than {self.amount} {self._side} float32"

    def _named(self, chosen: Sequence[Combination]) -> list[tuple[str, str]]:
        """Return formats with the descriptions of their settings, a line for each format."""
        lines = []
        shown = chosen[:MOST_NAMED]
        for fmt in dict.fromkeys(one.fmt for one in shown):
            is_alone = sum(one.fmt == fmt for one in self.combinations) == 1
            of_format = [one for one in shown if one.fmt == fmt]
            lines.append(
                (fmt, "\n".join(f"{'' if is_alone else one.rest + ': '}{self._words(one)}" for one in of_format))
            )
        return lines + ([(f"{len(chosen) - MOST_NAMED} more", "")] if len(chosen) > MOST_NAMED else [])

    def _listed(self, chosen: Sequence[Combination]) -> list[tuple[str, str]]:
        """Return the combinations by their formats, in the order of the sweep."""
        chosen = [one for one in self.combinations if one in chosen]
        words = []
        for fmt in dict.fromkeys(one.fmt for one in chosen):
            of_format = [one for one in chosen if one.fmt == fmt]
            count = sum(one.fmt == fmt for one in self.combinations)
            notes = [", ".join(filter(None, (one.rest * (count > 1), self._words(one)))) for one in of_format]
            if len(of_format) == count > 1 and not any(self._words(one) for one in of_format):
                words.append(f"{fmt} (all {count})")
            else:
                words.append(f"{fmt} ({'; '.join(notes)})" if any(notes) else fmt)
        if len(words) > MOST_LISTED:
            words[MOST_LISTED:] = [f"{len(words) - MOST_LISTED} formats more"]
        return [(word, "") for word in words]

    def _words(self, one: Combination) -> str:
        """Return what the title of a combination's list does not say about the combination; "" if it says all."""
        parts = []
        if one.outcome in ("match", "above") and one.judgement is not None:
            far = one.judgement.mean > self.tolerance
            parts.append(f"{self._said(one.judgement.mean)} better" if far else "")
        elif one.outcome == "short":
            parts += [f"by {self._estimate(one, positive=True)}", *one.losses]
        elif one.outcome in ("collapsed", "diverged"):
            parts += [self._counted(one), *one.losses]
        elif one.outcome == "worse":
            parts += [self._worse(one), *one.losses]
        elif one.outcome == "undecided":
            parts += [self._open(one)]
        if one.outcome == "failed":
            parts.append("gave no result")
        elif one.outcome == "few":
            few = len(one.comparison.differences)
            # A running sweep has not trained the other seeds yet, so "2 of 2" would say nothing.
            of = f" of {one.asked}" if few < one.asked else ""
            parts.append(f"gave too few results, {few}{of} seed{'s' * (few > 1 or bool(of))}; {LEAST_SEEDS} are needed")
        elif len(one.comparison.differences) < one.asked and one.outcome != "diverged":
            parts.append(f"over {len(one.comparison.differences)} of {one.asked} seeds")
        lost = [f"{_seeds(one.failed)} failed"] if one.failed else []
        lost += [f"{_seeds(one.silent)} gave no {self.metric}"] if one.silent else []
        words = ", ".join(filter(None, parts))
        words += f"{': ' if one.outcome == 'failed' else ', ' * bool(words)}{', '.join(lost)}" if lost else ""
        return f"{words}: {one.why}" if one.why else words

    def _counted(self, one: Combination) -> str:
        """Return the number of seeds that diverged or collapsed, and the range of the others, in words."""
        differences = one.comparison.differences
        if one.outcome == "diverged":
            words, out = f"diverges with {one.comparison.diverged} of {one.asked} seeds", set[int]()
        else:
            out = {*one.collapsed}
            worst = max(abs(differences[seed]) for seed in out)
            by = f"{'up to ' * (len(out) > 1)}{self._said(worst)}"
            words = f"collapses with {len(out)} of {one.asked} seeds (by {by})"
        others = [value for seed, value in differences.items() if seed not in out and math.isfinite(value)]
        if not others:
            return words
        low, high = (in_units(self.metric, value, False, seen=self.tolerance) for value in (min(others), max(others)))
        verb = f"the other {len(others)} differ by" if len(others) > 1 else "the other differs by"
        return f"{words}, {verb} {low if low == high else f'{low} to {high}'}"

    def _worse(self, one: Combination) -> str:
        """Describe a setting that is worse with every seed: by how much the seeds are worse."""
        losses = [-self.sign * value for value in one.comparison.differences.values()]
        low, high = (in_units(self.metric, value, False, seen=self.tolerance) for value in (min(losses), max(losses)))
        side = f"more than {self.amount} {self._side} float32"
        return f"{side} with each of {len(losses)} seeds, by {low} to {high}"

    def _far(self, one: Combination) -> str:
        """Describe the seeds of an open setting that are far below the others; "" if there are none."""
        if one.judgement is None or not one.judgement.low:
            return ""
        seeds, values = [*one.comparison.differences], [*one.comparison.differences.values()]
        low = [seeds[place] for place in one.judgement.low]
        others = [self.sign * value for seed, value in zip(seeds, values, strict=True) if seed not in low]
        apart = min(others) - max(self.sign * one.comparison.differences[seed] for seed in low)
        more = ENOUGH if len(seeds) < ENOUGH else "more"
        words = f"{_seeds(low)} {'are' if len(low) > 1 else 'is'} {self._said(apart)} {self._side} the others"
        return f"{words}, by a collapse or by chance: {more} seeds would tell"

    def _open(self, one: Combination) -> str:
        """Describe an open setting: its difference, and how many seeds would decide the test."""
        if one.judgement is None:
            mean = one.comparison.mean
            difference = in_units(self.metric, mean, seen=self.tolerance)
            return f"differs by {difference}" if math.isfinite(mean) else "without a difference"
        words = self._estimate(one)
        if one.judgement.interval[1] < 0:
            words += f", {self._side} float32, by more or less than {self.amount} is not decided"
        if far := self._far(one):
            return f"{words}; {far}"
        seeds = one.judgement.seeds
        number = f"more than {MOST_SEEDS}" if seeds > MOST_SEEDS else f"about {seeds}"
        return f"{words}; {number} seeds would probably decide it"

    def _estimate(self, one: Combination, positive: bool = False) -> str:
        """Return the mean difference with its interval, in the metric's direction.

        positive: whether to return the amount by which the setting is worse instead.
        """
        assert one.judgement is not None
        sign = -1 if positive else self.sign
        low, high = sorted(sign * bound for bound in one.judgement.interval)
        seen = self.tolerance or high - low or abs(one.judgement.mean)
        least = NOISE * self.tolerance
        # Without this step, 0 would be shown as 1e-17, with an exponent.
        values = (value if abs(value) >= least else 0.0 for value in (sign * one.judgement.mean, low, high))
        words = [in_units(self.metric, value, unit=False, seen=seen) for value in values]
        return f"{words[0]} [{words[1]}, {words[2]}]"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _seeds(seeds: Sequence[int]) -> str:
    """Return seeds in words.

    >>> _seeds([3]), _seeds([3, 4, 5])
    ('seed 3', 'seeds 3, 4, 5')
    """
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _bare(metric: str, value: float, seen: float = 0.0) -> str:
    """Return an amount in words: "1 point", "1.5 points"."""
    words = in_units(metric, value, seen=seen)
    return words.removesuffix("s").replace("1.0", "1") if words == "1.0 points" else words


WIDTH = 110
WIDEST_LABEL = 44
# The separator is not a comma, because names contain commas.
APART = " · "


@dataclass(frozen=True)
class Section:
    """A list with a title.

    kind: one of `SECTIONS`, which chooses the colour.
    title: the title, without a full stop.
    lines: (label, description, which may have several lines); labels without a description are printed in a row.
    """

    kind: str
    title: str
    lines: Sequence[tuple[str, str]]

    @property
    def named(self) -> list[tuple[str, str]]:
        """Return the lines with a description."""
        return [line for line in self.lines if line[1]]

    @property
    def listed(self) -> list[str]:
        """Return the labels without a description."""
        return [label for label, words in self.lines if not words]


def as_text(head: str, sections: Sequence[Section], foot: str) -> str:
    """Return lines for a terminal, without a newline at the end."""
    lines = [head] if head else []
    for section in sections:
        lines.append(f"{section.title}:")
        if section.listed:
            # There is a no-break space before the dot, because a line must not begin with the dot.
            names = APART.replace(" ", "\N{NO-BREAK SPACE}", 1).join(section.listed)
            wrapped = textwrap.wrap(names, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
            lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
        width = min(max((len(label) for label, _ in section.named), default=0), WIDEST_LABEL)
        for label, words in section.named:
            first, *others = words.splitlines()
            is_long = len(label) > width
            lines += [f"  {label}", f"  {'':<{width}}  {first}"] if is_long else [f"  {label:<{width}}  {first}"]
            lines += [f"  {'':<{width}}  {line}" for line in others]
    return "\n".join([*lines, *([foot] if foot else [])])


def as_html(head: str, sections: Sequence[Section], foot: str) -> str:
    """Return a block of HTML, for a notebook and for the report, which has the style. No line begins with a %."""
    parts = [f"<p>{html.escape(head)}</p>"] if head else []
    for section in sections:
        parts.append(f'<div class="{section.kind}"><b>{html.escape(section.title)}</b><ul>')
        if section.listed:
            parts.append(f"<li>{APART.join(map(html.escape, section.listed))}</li>")
        for label, words in section.named:
            name, lines = f"<b>{html.escape(label)}</b>", [html.escape(line) for line in words.splitlines()]
            said = [f"{name} {lines[0]}"] if len(lines) == 1 else [name, *lines]
            parts.append(f"<li>{'<br>'.join(said)}</li>")
        parts.append("</ul></div>")
    parts += [f"<p><small>{html.escape(foot)}</small></p>"] if foot else []
    return f'<div class="verdict">{"".join(parts)}</div>'.replace(" %", "\N{NO-BREAK SPACE}%")


def as_latex(head: str, sections: Sequence[Section], foot: str) -> str:
    """Return a description list in LaTeX, with a newline at the end."""
    lines = [latex(head), r"\begin{description}"]
    for section in sections:
        said = [latex("; ".join(section.listed))] if section.listed else []
        said += [f"{latex(label)}: {latex('; '.join(words.splitlines()))}" for label, words in section.named]
        lines.append(rf"\item[{latex(section.title)}] {'; '.join(said)}.")
    return "\n".join([*lines, r"\end{description}", latex(foot)]) + "\n"
