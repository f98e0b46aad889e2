"""Steps with a planted cause, composed at random: what does `why` say of them, and do its remedies cure?

    python tests/planted_random.py --count 500 --seed 0 [--controls 300] [--seconds 200] [--kinds "square overflows"]

A case is a cause of `planted_kinds` and `planted_losses`, a place, a body, the way its parts are called, and a format.
It counts only if the harm is there, measured beside float64, and is absent without the cause. A control is a case
without its cause, whose gradient has a cosine above 0.99 with float64's and loses no parameter's; a quarter of them
are recipes and block formats. A third of the cases are of gradients.

Prints each case that is not right, with its seed: `--seed S --count 1` draws it again. Then tables: per kind what is
right, and how many remedies that are printed as tried cure when they are applied to the model; per way to call the
parts, and per format. `--out FILE` keeps the rows, and `--show FILES` prints the tables of several runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if __package__:  # python -m tests.planted_random
    sys.path.insert(0, str(Path(__file__).parent))

import planted_losses  # noqa: F401  these register their kinds
import planted_outer_kinds  # noqa: F401
import torch
from planted_bench import SHELLS, Drawn
from planted_healthy_kinds import HEALTHY, QUARTER
from planted_kinds import KINDS, Kind
from planted_truth import Examined

Row = dict[str, Any]
VERDICTS = ("right", "wrong place", "wrong kind", "both wrong", "false words", "nothing", "raises")
CAUSES = {name: one for name, one in KINDS.items() if name not in HEALTHY}


def draw(seed: int, kinds: list[str] | None = None) -> Drawn:
    """A case; a third of gradients, unless `kinds` has others."""
    source = random.Random(f"case {seed}")
    is_back = source.random() < 1 / 3
    names = [name for name, one in CAUSES.items() if one.is_back is is_back and name in (kinds or CAUSES)]
    return _composed(source, seed, CAUSES[source.choice(names or kinds or [])])


def draw_control(seed: int, kinds: list[str] | None = None) -> Drawn:
    """A case whose cause is taken out, or one that only looks wrong; a quarter are recipes and block formats."""
    source = random.Random(f"control {seed}")
    which = source.random()
    if which < 0.25:
        names = [*QUARTER]
    elif which < 0.5:
        names = [name for name in HEALTHY if name not in QUARTER]
    else:
        names = [name for name, one in CAUSES.items() if one.has_sister]
    some = [name for name in names if kinds is None or name in kinds]
    return _composed(source, seed, KINDS[source.choice(some or kinds or [])])


def _composed(source: random.Random, seed: int, kind: Kind) -> Drawn:
    shell = source.choice([*SHELLS])
    return Drawn(seed, kind.name, source.choice(kind.bodies), shell, source.choice(kind.formats))


def asked(drawn: Drawn) -> Row | None:
    """What `why` says of a case; None where the case does no harm."""
    case = Examined(drawn)
    if not case.is_harmed():
        return None
    row = {**_row(drawn), "is_control": False, "remedies": []}
    trial = case.trial()
    try:
        found = trial.why()
    except Exception as problem:  # whatever it raises
        return {**row, "verdict": "raises", "said": f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"}
    row |= {"verdict": case.verdict(found, trial.paths), "said": str(found).splitlines()[0]}
    row["wanted"] = f"{case.answer.kind} at {case.place(trial.paths)}"
    row["runs"] = found.runs
    for which, remedy in enumerate(found.tried):
        try:
            problem_ = case.cures(found, which)
        except Exception as problem:
            problem_ = f"not applied: {type(problem).__name__} {' '.join(str(problem).split())[:100]}"
        row["remedies"].append([remedy["remedy"], remedy.get("what", ""), problem_])
    return row


def asked_control(drawn: Drawn) -> Row | None:
    """What `why` says of a control; None where the case without its cause is not a healthy step."""
    case = Examined(drawn)
    if not case.is_healthy():
        return None
    row = {**_row(drawn), "is_control": True, "remedies": []}
    try:
        found = case.trial(is_planted=False).why()
    except Exception as problem:
        return {**row, "verdict": "raises", "said": f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"}
    never = case.answer.never if case.kind.harm == "none" else ""
    is_false = bool(never) and found.cause is None and re.search(never, str(found)) is not None
    verdict = "named" if found.cause is not None else "false words" if is_false else "silent"
    return {
        **row,
        "verdict": verdict,
        "said": str(found).splitlines()[0],
        "cosine": case.control_cosine,
        "runs": found.runs,
    }


def _row(drawn: Drawn) -> Row:
    return {"seed": drawn.seed, "kind": drawn.kind, "body": drawn.body, "shell": drawn.shell, "format": drawn.fmt}


def rows(seeds: Iterable[int], is_control: bool, kinds: list[str] | None, idle: Counter[str]) -> Iterator[Row]:
    """The rows of the cases that count; the others are counted in `idle` by kind."""
    for seed in seeds:
        drawn = draw_control(seed, kinds) if is_control else draw(seed, kinds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                row = asked_control(drawn) if is_control else asked(drawn)
            except Exception as problem:
                print(f"{drawn}: cannot be built: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                row = None
        if row is None:
            idle[drawn.kind] += 1
            continue
        yield row


def is_right(row: Row) -> bool:
    return row["verdict"] in ("right", "silent")


def described(row: Row) -> str:
    lines = []
    head = f"{'control ' * row['is_control']}seed {row['seed']}: {row['kind']}; "
    head += f"{row['body']}, {row['shell']}, {row['format']}"
    if not is_right(row):
        lines.append(f"{head}: {row['verdict']}: {row['said']}")
        lines += [f"    wanted {row['wanted']}"] if "wanted" in row else []
    for name, what, problem in row["remedies"]:
        if problem:
            lines.append(f"{head}: {name} ({what}): {problem}")
    return "\n".join(lines)


def tables(found: list[Row], idle: Counter[str]) -> str:
    cases, controls = ([row for row in found if row["is_control"] is which] for which in (False, True))
    lines = ["kind | cases | " + " | ".join(VERDICTS) + " | with a remedy | remedies | cure | do not | not applied"]

    def line(name: str, some: list[Row]) -> str:
        counts = Counter(row["verdict"] for row in some)
        problems = [problem for row in some for *_, problem in row["remedies"]]
        skipped = sum(problem.startswith("not applied") for problem in problems)
        cured = sum(not problem for problem in problems)
        numbers = [len(some), *(counts[word] for word in VERDICTS)]
        numbers += [sum(any(not p for *_, p in row["remedies"]) for row in some)]
        numbers += [len(problems), cured, len(problems) - cured - skipped, skipped]
        return f"{name} | " + " | ".join(map(str, numbers))

    for row_name in dict.fromkeys(one.row for one in CAUSES.values()):
        names = [name for name, one in CAUSES.items() if one.row == row_name]
        some = {name: [row for row in cases if row["kind"] == name] for name in names}
        lines += [line(f"  {name}", rows) for name, rows in some.items() if rows]
        lines.append(line(f"{row_name.upper()}", [row for row in cases if row["kind"] in names]))
    lines.append(line("ALL", cases))
    lines.append(line("of gradients", [row for row in cases if CAUSES[row["kind"]].is_back]))
    for key in ("shell", "format", "body"):
        lines.append("")
        for value in dict.fromkeys(sorted(row[key] for row in cases)):
            some = [row for row in cases if row[key] == value]
            lines.append(line(f"{key} {value}", some))
    lines.append("\ncontrols | steps | silent | named | false words | raises")
    names = list(dict.fromkeys(sorted(row["kind"] for row in controls)))
    for name in (*names, "ALL CONTROLS"):
        some = [row for row in controls if name in (row["kind"], "ALL CONTROLS")]
        counts = Counter(row["verdict"] for row in some)
        lines.append(
            f"  {name} | {len(some)} | "
            + " | ".join(str(counts[w]) for w in ("silent", "named", "false words", "raises"))
        )
    special = [row for row in controls if row["format"].startswith(("recipe", "mx", "nv"))]
    lines.append(f"recipes and block formats: {len(special)} of {len(controls)}")
    if idle:
        lines.append("drawn and without harm, or no control: " + ", ".join(f"{n} {k}" for k, n in idle.most_common()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="cases")
    parser.add_argument("--controls", type=int, default=0, help="controls")
    parser.add_argument("--seed", type=int, default=0, help="the first; the next case has the next seed that counts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the processor, after which it stops")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="draw from these alone", metavar="KIND")
    parser.add_argument("--out", type=Path, help="a file that rows are added to, as lines of JSON")
    parser.add_argument("--show", nargs="*", type=Path, default=[], help="print the tables of such files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = [json.loads(line) for path in options.show for line in path.read_text().splitlines()]
    idle: Counter[str] = Counter()
    share = options.count / max(1, options.count + options.controls)
    for is_control, count in ((False, options.count), (True, options.controls)):
        until = options.seconds if is_control else options.seconds * share
        drawn = rows(itertools.count(options.seed), is_control, options.kinds, idle)
        for row in itertools.islice(drawn, count):
            found.append(row)
            if options.out:
                with options.out.open("a") as file:
                    print(json.dumps(row), file=file)
            if text := described(row):
                print(text, flush=True)
            if time.process_time() > until:
                break
    print(tables(found, idle))
    failed = [row for row in found if not is_right(row)]
    print(f"{len(failed)} of {len(found)} are not right, in {time.process_time():.0f} processor seconds")
    sys.exit(bool(failed) and not options.show)


if __name__ == "__main__":
    main()
