"""How many planted causes `why` names, and how many of its remedies work: `python tests/planted_counts.py [--every N]`.

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
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import planted_fresh_second  # noqa: F401  registers more of WRONG and FINE
from planted_cases import CAUSES, cases
from planted_controls import CONTROLS, controls
from planted_forum import FORTY
from planted_fresh import WRONG
from planted_fresh_fine import FINE
from planted_loops import FAILING, HEALTHY
from planted_models import Planted
from planted_posts import POSTS
from planted_remedies import is_cured

import fpsim

LATE = ("float32",)  # the stage of what is found by the comparison with float32 alone


def is_named(name: str, model: str, found: fpsim.Why) -> bool:
    """Place, role and kind, in the first of at most fifteen lines."""
    cause, first = CAUSES[name], str(found).splitlines()[0]
    if found.cause is None:
        return False
    place, wanted = found.cause["place"], cause.place_in(model)
    at = wanted in place if wanted.endswith(":") else place.endswith(wanted)
    is_told = place in first and cause.role in first and cause.kind.lower() in first.lower()
    return at and is_told and (found.cause["role"], found.cause["kind"]) == (cause.role, cause.kind)


class Counts:
    """What is counted, and the most runs of a step."""

    def __init__(self) -> None:
        self.all: Counter[str] = Counter()
        self.runs: dict[str, list[int]] = {"before": [], "compared": []}

    def add(self, name: str, is_right: bool, what: str, found: Any) -> None:
        self.all[name] += 1
        self.all[f"{name} right"] += is_right
        if not is_right:
            text = str(found).splitlines()
            print(f"{name}: {what}: {text[0]}", flush=True)

    def add_runs(self, found: fpsim.Why) -> None:
        late = found.cause is None or found.cause["stage"] in LATE or found.float32 is not None
        is_before = found.cause is not None and found.cause["stage"] not in LATE
        self.runs["before" if is_before or not late else "compared"].append(found.runs)


def count(every: int) -> Counts:
    """Run each n-th case of all kinds."""
    counts = Counts()
    for case in [*cases()][::every]:
        name, model, fmt = case
        found = Planted(model, fmt, CAUSES[name].plant).why()
        counts.add("causes", is_named(name, model, found), " ".join(case), found)
        counts.add_runs(found)
        for which in range(len(found.tried)):
            works = is_cured(Planted(model, fmt, CAUSES[name].plant), found, which)
            counts.add("remedies", works, f"{' '.join(case)}: {found.tried[which]['remedy']}", found)
        counts.all["with a tried remedy"] += bool(found.tried)
    for case in [*controls()][::every]:
        name, model, fmt = case
        found = Planted(model, fmt, CONTROLS[name][0]).why()
        counts.add("controls", found.cause is None, " ".join(case), found)
        counts.add_runs(found)
    for name, all_told in (("forums", FORTY), ("posts", POSTS), ("loops", FAILING), ("healthy loops", HEALTHY)):
        for told in all_told[::every]:
            planted = told()
            found = fpsim.why(planted.model, planted.step, planted.optimizer, planted.scaler)
            is_right = planted.is_named_by(found) if name != "healthy loops" else found.cause is None
            counts.add(name, is_right, told.__name__, found)
            counts.add_runs(found)
    for told in WRONG[::every]:
        fresh = told()
        found = fpsim.why(fresh.model, fresh.step, fresh.optimizer)
        counts.add("fresh", fresh.is_named_by(found), told.__name__, found)
        counts.add_runs(found)
    for make in FINE[::every]:
        fresh = make()
        found = fpsim.why(fresh.model, fresh.step, fresh.optimizer)
        counts.add("fresh and fine", found.cause is None, make.__name__, found)
        counts.add_runs(found)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=1, help="run each n-th case only")
    every = parser.parse_args().every
    warnings.simplefilter("ignore")
    counts = count(every)
    total = counts.all
    print(f"{len(CAUSES)} causes: {total['causes right']} of {total['causes']} cases are named right")
    print(f"controls: nothing is named in {total['controls right']} of {total['controls']}")
    print(f"forums: {total['forums right']} of {total['forums']} are named right")
    print(f"posts: {total['posts right']} of {total['posts']} are named right")
    print(f"loops: {total['loops right']} of {total['loops']} are named right")
    print(f"healthy loops: nothing is named in {total['healthy loops right']} of {total['healthy loops']}")
    print(f"fresh: {total['fresh right']} of {total['fresh']} are named right")
    print(f"fresh and fine: nothing is named in {total['fresh and fine right']} of {total['fresh and fine']}")
    print(f"remedies printed as tried: {total['remedies right']} of {total['remedies']} work when applied")
    print(f"cases with one or more tried remedies: {total['with a tried remedy']}")
    for name, words in (("before", "where it speaks before"), ("compared", "where it reaches")):
        runs = sorted(counts.runs[name]) or [0]
        print(f"steps {words} the comparison with float32: median {runs[len(runs) // 2]}, at most {runs[-1]}")


if __name__ == "__main__":
    main()
