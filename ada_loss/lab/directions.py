"""Directions of metrics: whether larger or smaller values are better, as stated, otherwise by the metric's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ada_loss.files import mapping_in, strict_json, write_atomically
from fpsim.checks import did_you_mean, shown

__all__ = [
    "MAXIMIZE",
    "MINIMIZE",
    "Directions",
    "by_name",
    "goals_of",
    "hint_for",
    "keep_directions",
    "read_directions",
    "stated",
]

MINIMIZE, MAXIMIZE = "minimize", "maximize"
FILE = "directions.json"  # the name of the file in the folder of a sweep
# The words that tell a direction. There are few, and each has only one meaning, because a wrong guess would reverse a
# verdict. A metric whose direction is unknown is not judged, and the user can state it with one option.
LARGER = "accuracy acc precision iou f1 auc bleu".split()
SMALLER = "loss error perplexity ppl entropy nll bits mse".split()
COLUMNS = ("underflow", "skipped", "seconds")  # columns of every sweep, whose smaller values are better
# A name with one of these words tells no direction.
TURNED = {"neg", "negative", "negated", "minus", "inverse"}


def by_name(metric: str) -> str | None:
    """Return the direction that the last word of a metric's name tells; None if the word is not one of fifteen.

    Digits, "rate", "score" (for a metric to maximize) and a unit behind "per" may follow this word.

    >>> by_name("val_loss"), by_name("top5_acc"), by_name("F1Score"), by_name("bits_per_character")
    ('minimize', 'maximize', 'maximize', 'minimize')
    >>> by_name("loss_scale"), by_name("neg_log_loss"), by_name("1-accuracy"), by_name("kappa")
    (None, None, None, None)
    """
    if metric in COLUMNS:
        return MINIMIZE
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[^\W\d_A-Z]+\d*|\d+", metric)]
    # "bits_per_character" is counted in bits: the unit behind "per" tells no direction.
    if "per" in words:
        words = words[: words.index("per")]
    is_score = words[-1:] == ["score"]
    while words and (words[-1].isdigit() or words[-1] in ("score", "rate")):
        words.pop()
    # "1 - accuracy", "-loss" and "one_minus_f1" reverse the direction of the metric that they name.
    if not words or TURNED & {*words} or re.match(r"\W|1\W", metric.strip()):
        return None
    last = words[-1] if words[-1] in LARGER else words[-1].rstrip("0123456789")
    if last in LARGER:
        return MAXIMIZE
    # a "d2_log_loss_score" is large where the loss is small
    return MINIMIZE if last in SMALLER and not is_score else None


def goals_of(goal: object, first: str | None = None) -> dict[str, str]:
    """Return a goal as {metric: "minimize" or "maximize"}.

    goal: "minimize" or "maximize" for the first metric; or a mapping from metrics to these words; None for no goal.
    first: the name of the first metric.
    Raises TypeError for another type, ValueError for another direction.
    """
    if goal is None:
        return {}
    if isinstance(goal, str):
        goal = {first: goal} if first is not None else {}
    if not isinstance(goal, Mapping):
        raise TypeError(
            f"Got the goal {shown(goal)}. Use 'minimize', 'maximize', or a mapping such as {{'val_loss': 'minimize'}}."
        )
    for metric, direction in goal.items():
        if not isinstance(metric, str) or direction not in (MINIMIZE, MAXIMIZE):
            hint = did_you_mean(direction, (MINIMIZE, MAXIMIZE))
            raise ValueError(
                f"Got the goal {shown(direction)} of the metric {shown(metric)}.{hint} Use 'minimize' or 'maximize'."
            )
    return dict(goal)


def stated(minimize: object = (), maximize: object = ()) -> dict[str, str]:
    """Return the directions that two lists of metrics state.

    Raises TypeError for anything but lists of names, ValueError for a metric in both.

    >>> stated(["wer"], ["speed"])
    {'wer': 'minimize', 'speed': 'maximize'}
    """
    lists: dict[str, list[str]] = {}
    for name, given in ((MINIMIZE, minimize), (MAXIMIZE, maximize)):
        if not isinstance(given, list | tuple | set | frozenset):
            raise TypeError(f"Got {name}={shown(given)}. Expected a list of metrics. Write {name}=[{shown(given)}].")
        lists[name] = [*given]
        for metric in lists[name]:
            if not isinstance(metric, str):
                raise TypeError(f"Got the metric {shown(metric)} in {name}. Expected a name.")
    both = [metric for metric in lists[MINIMIZE] if metric in lists[MAXIMIZE]]
    if both:
        raise ValueError(f"The metric {shown(both[0])} is in minimize and in maximize. Name it in one of them.")
    return {metric: name for name, metrics in lists.items() for metric in metrics}


class Directions:
    """The directions of metrics: as stated, otherwise by their names.

    said: {metric: "minimize" or "maximize"}, as stated.

    >>> Directions({"speed": "maximize"}).of("speed"), Directions().of("speed"), Directions().of("val_loss")
    ('maximize', None, 'minimize')
    """

    def __init__(self, said: Mapping[str, str] | None = None) -> None:
        self.said = dict(said or {})

    def of(self, metric: str) -> str | None:
        """Return the direction of a metric; None if it is not known."""
        name = metric
        # A metric that has the same name as another column gets the prefix "metric."; see `Results`.
        while name.startswith("metric.") and name not in self.said:
            name = name.removeprefix("metric.")
        return self.said.get(name) or by_name(name)

    def sign(self, metric: str) -> int:
        """Return 1 if larger is better, -1 if smaller is better, and 0 if the direction is not known."""
        return {MAXIMIZE: 1, MINIMIZE: -1, None: 0}[self.of(metric)]

    def words(self, metric: str) -> str:
        """Return "lower is better" for a metric to minimize; "" for others."""
        return "lower is better" if self.of(metric) == MINIMIZE else ""

    def __or__(self, other: Mapping[str, str]) -> Directions:
        return Directions({**self.said, **other})


def hint_for(metric: str) -> str:
    """Return advice on stating the direction of a metric, for an error."""
    return (
        f"State it: minimize=[{metric!r}] or maximize=[{metric!r}] in the sweep or in ada_loss.Results, --minimize or "
        f"--maximize {metric} on the command line, or Task(goal=...)."
    )


def read_directions(folder: Path) -> dict[str, str]:
    """Read the directions stored in the folder of a sweep; invalid entries are skipped."""
    return {
        name: direction for name, direction in mapping_in(folder / FILE).items() if direction in (MINIMIZE, MAXIMIZE)
    }


def keep_directions(folder: Path, said: Mapping[str, str]) -> None:
    """Store stated directions in the folder of a sweep, in addition to those already there."""
    kept = read_directions(folder)
    if said and {**kept, **said} != kept:
        write_atomically(folder / FILE, strict_json({**kept, **said}).encode())
