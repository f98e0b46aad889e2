"""How many planted causes `why` names, and how many of its remedies work.

    python tests/planted_counts.py [--every N [--from I]]

Prints each case that is not right, then the counts that docs/diagnose.md has: of the causes, of the controls in which
nothing is wrong, of those told in forums, of posts, of whole loops and of models not seen before; and how often a step
was run.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from planted_cases import CONTROLS, GRID, HEALTHY, STEPS
from planted_grid import CAUSES
from planted_remedies import works

import fpsim

LATE = ("float32",)  # the stage of what is found by the comparison with float32 alone


class Counts:
    """What is counted, and the most runs of a step."""

    def __init__(self) -> None:
        self.all: Counter[str] = Counter()
        self.runs: dict[str, list[int]] = {"before": [], "compared": []}

    def add(self, name: str, is_right: bool, what: str, found: fpsim.Why, runs: bool = True) -> None:
        self.all[name] += 1
        self.all[f"{name} right"] += is_right
        if not is_right:
            print(f"{name}: {what}: {str(found).splitlines()[0]}", flush=True)
        if runs:
            late = found.cause is None or found.cause["stage"] in LATE or found.float32 is not None
            is_before = found.cause is not None and found.cause["stage"] not in LATE
            self.runs["before" if is_before or not late else "compared"].append(found.runs)


def count(every: int, first: int = 0) -> Counts:
    """Run each n-th case of all sorts, from a first one on."""
    counts, some = Counts(), slice(first, None, every)
    for case in GRID[some]:
        found = case.build().why()
        counts.add("causes", case.is_named_by(found), case.name, found)
        for which, remedy in enumerate(found.tried):
            counts.add("remedies", works(case, found, which), f"{case.name}: {remedy['remedy']}", found, runs=False)
        counts.all["with a tried remedy"] += bool(found.tried)
    for told in ("forum", "post", "loop", "unseen"):
        for case in [case for case in STEPS if case.told == told][some]:
            found = case.build().why()
            counts.add(told, case.is_named_by(found), case.name, found)
    for name, build in CONTROLS[some]:
        found = build().why()
        counts.add("controls", found.cause is None, name, found)
    for told, builds in HEALTHY.items():
        for build in builds[some]:
            found = build().why()
            counts.add(f"healthy {told}", found.cause is None, build.__name__, found)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=1, help="run each n-th case only")
    parser.add_argument("--from", type=int, default=0, help="from this one on, so that N runs are all", dest="first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = count(options.every, options.first)
    total = counts.all
    print(f"{len(CAUSES)} causes: {total['causes right']} of {total['causes']} cases are named right")
    print(f"controls: nothing is named in {total['controls right']} of {total['controls']}")
    for told, words in (("forum", "forums"), ("post", "posts"), ("loop", "loops"), ("unseen", "unseen models")):
        print(f"{words}: {total[f'{told} right']} of {total[told]} are named right")
    for told, words in (("loop", "healthy loops"), ("unseen", "healthy unseen models")):
        print(f"{words}: nothing is named in {total[f'healthy {told} right']} of {total[f'healthy {told}']}")
    print(f"remedies printed as tried: {total['remedies right']} of {total['remedies']} work when applied")
    print(f"cases with one or more tried remedies: {total['with a tried remedy']}")
    for name, words in (("before", "where it speaks before"), ("compared", "where it reaches")):
        runs = sorted(counts.runs[name]) or [0]
        print(f"steps {words} the comparison with float32: median {runs[len(runs) // 2]}, at most {runs[-1]}")


if __name__ == "__main__":
    main()
