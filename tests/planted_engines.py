"""Two engines with one planted difference, drawn at random: does `mismatch` name its place and its kind?

    python tests/planted_engines.py --cases 200 --controls 100 --seed 0 [--kinds weights] [--out FILE]

A case is an architecture of transformers, small and random, in float32, under a policy or natively in bfloat16, on a
batch with padding or without, and a way of `planted_engine_kinds`. Kinds come in turn, by seed. A difference that
leaves the logits equal to the bit is drawn again. A control is two equal copies; in half of them b sums in another
order.

Prints each case that is not right, with its seed (`--seed S --cases 1` runs it again), then tables. A place is right if
it is that of the first row; a kind, if its word is in the line of the largest place. Where two kinds are as true, the
table counts the one planted as `kind` and either as `either`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

if __package__:  # python -m tests.planted_engines
    sys.path.insert(0, str(Path(__file__).parent))

import torch
from planted_engine_kinds import KINDS, WAYS, Truth
from planted_engine_models import FAMILIES, MODES, Engines, rewrite
from torch import Tensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import fpsim
from fpsim import Accumulator, Products

Row = dict[str, Any]
LINE = "Most: "


def drawn(seed: int, kinds: list[str] | None = None) -> tuple[Engines, str, Truth]:
    """A case whose logits differ, the name of its way, and the truth."""
    kinds = kinds or [*KINDS]
    kind = kinds[seed % len(kinds)]
    for attempt in range(50):
        source = random.Random(f"engines {seed} {attempt}")
        family, mode = source.choice(FAMILIES), source.choice(MODES)
        case = Engines(source, family, mode)
        names = [name for name, one in WAYS.items() if one.kind == kind and family in one.families]
        names = [name for name in names if mode in WAYS[name].modes and (case.eager or not WAYS[name].needs_eager)]
        if not names:
            continue
        name = source.choice(names)
        truth = WAYS[name].plant(case)
        if not torch.equal(case.logits("a"), case.logits("b")):
            return case, name, truth
    raise RuntimeError(f"seed {seed}: 50 draws of the kind {kind!r} changed nothing")


def asked(seed: int, kinds: list[str] | None = None) -> Row:
    """What `mismatch` says of a case."""
    case, name, truth = drawn(seed, kinds)
    kind = WAYS[name].kind
    row: Row = {"seed": seed, "is_control": False, "way": name, "kind": kind, "also": truth.also, "place": truth.place}
    row |= {"how": truth.how, "case": str(case), "family": case.family, "mode": case.mode}
    try:
        found = fpsim.mismatch(case.built("a"), case.built("b"), case.batch)
    except Exception as problem:  # whatever it raises
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        return {**row, "place_right": False, "kind_right": False, "either_right": False, "said": said, "raises": True}
    line = next((line for line in str(found).splitlines() if line.startswith(LINE)), "")
    place = found[0]["module"] if found else ""
    row["place_right"] = place == truth.place or (truth.within and f"{place}.".startswith(f"{truth.place}."))
    row["kind_right"] = f": {kind}" in line
    row["either_right"] = row["kind_right"] or (bool(truth.also) and f": {truth.also}" in line)
    return row | {"said": line or str(found).splitlines()[-1], "places": len(found), **_figures(found)}


def _figures(found: Any) -> Row:
    """The lines of the figures and of the floor, by which a reader sees whether a difference was there to be found."""
    lines = str(found).splitlines()
    return {"figures": [line for line in lines if " sequences: " in line or line.startswith("Floor")]}


# Controls


def _permuted(order: Tensor) -> Any:
    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        if isinstance(self, Conv1D):
            flat = torch.addmm(self.bias, x.flatten(0, -2)[:, order], self.weight[order])
            return flat.view(*x.shape[:-1], -1)
        return functional.linear(x[..., order], self.weight[:, order], self.bias)

    return forward


def _halves(original: Any, self: Any, x: Tensor) -> Tensor:
    """Two sums in float32, added there; one rounding, as natively."""
    weight = self.weight.T if isinstance(self, Conv1D) else self.weight
    xs, ws = x.float().chunk(2, -1), weight.float().chunk(2, -1)
    found = functional.linear(xs[0], ws[0]) + functional.linear(xs[1], ws[1])
    return (found if self.bias is None else found + self.bias.float()).to(x.dtype)


def _one_by_one(original: Any, self: Any, x: Tensor) -> Tensor:
    return torch.cat([original(self, one[None]) for one in x])


def control(seed: int) -> tuple[Engines, str]:
    """Two copies that compute the same; in those of odd seeds b's sums have another order."""
    source = random.Random(f"engines control {seed}")
    case = Engines(source, source.choice(FAMILIES), source.choice(MODES))
    if seed % 2 == 0:
        return case, "equal"
    ways = ["permuted"]
    # a scale of a whole tensor is another one for a part of it, and no other order of sums
    ways += ["one by one"] * ("per tensor" not in str(case.base))
    ways += ["halves"] if case.mode in ("float32", "native") else ["halves of the policy"]
    which = source.choice(ways)
    if which == "halves of the policy":
        fprop: Any = case.base.products.fprop if case.base and case.base.products else (None, None)
        halves = Accumulator("fp32", order="torch", splits=2)
        for name in (*case.linears, "lm_head"):
            case.override("b", name, products=Products(fprop=fprop, accumulator=halves))
        return case, which
    for name in (*case.linears, "lm_head"):
        module: Any = case.b.get_submodule(name)
        if which == "permuted":
            wide = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
            rewrite(module, _permuted(torch.randperm(wide)))
        else:
            rewrite(module, _halves if which == "halves" else _one_by_one)
    return case, which


def asked_control(seed: int) -> Row:
    case, which = control(seed)
    row: Row = {"seed": seed, "is_control": True, "way": which, "case": str(case), "mode": case.mode}
    try:
        found = fpsim.mismatch(case.built("a"), case.built("b"), case.batch)
    except Exception as problem:
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        return {**row, "is_silent": False, "said": said, "raises": True}
    line = next((line for line in str(found).splitlines() if line.startswith(LINE)), "")
    return {**row, "is_silent": not found and not line, "said": line, **_figures(found)}


# What is printed


def is_right(row: Row) -> bool:
    return row["is_silent"] if row["is_control"] else row["place_right"] and row["either_right"]


def described(row: Row) -> str:
    head = f"seed {row['seed']}: {row['case']}: {row['way']}"
    if row["is_control"]:
        head = f"control {head}: named"
    else:
        wrong = " and ".join(["place"] * (not row["place_right"]) + ["kind"] * (not row["either_right"]))
        head += f" ({row['how']}), {row['kind']} at {row['place']}: wrong {wrong or 'nothing'}"
    return "\n    ".join([head, *row.get("figures", []), f"said: {row['said']}"])


def tables(rows: list[Row]) -> str:
    cases = [row for row in rows if not row["is_control"]]
    lines = ["kind | cases | place | kind | either | raises"]

    def line(name: str, some: list[Row]) -> str:
        keys = ("place_right", "kind_right", "either_right", "raises")
        return " | ".join([name, str(len(some)), *(str(sum(row.get(key, False) for row in some)) for key in keys)])

    for kind in KINDS:
        some = [row for row in cases if row["kind"] == kind]
        lines.append(line(kind, some))
        for name in dict.fromkeys(sorted(row["way"] for row in some)):
            lines.append(line(f"  {name}", [row for row in some if row["way"] == name]))
    for key in ("family", "mode"):
        lines += [line(value, [row for row in cases if row[key] == value]) for value in sorted({r[key] for r in cases})]
    lines.append(line("ALL", cases))
    controls = [row for row in rows if row["is_control"]]
    lines.append("controls | cases | silent")
    counts = Counter(row["way"] for row in controls)
    for name, count in counts.items():
        lines.append(f"{name} | {count} | {sum(row['is_silent'] for row in controls if row['way'] == name)}")
    lines.append(f"ALL | {len(controls)} | {sum(row['is_silent'] for row in controls)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--controls", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="draw from these alone", metavar="KIND")
    parser.add_argument("--out", type=Path, help="a file that rows are added to, as lines of JSON")
    parser.add_argument("--show", nargs="*", type=Path, default=[], help="print the tables of such files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = [json.loads(line) for path in options.show for line in path.read_text().splitlines()]
    for is_control, count in ((False, options.cases), (True, options.controls)):
        for seed in range(options.seed, options.seed + count):
            row = asked_control(seed) if is_control else asked(seed, options.kinds)
            rows.append(row)
            if options.out:
                with options.out.open("a") as file:
                    print(json.dumps(row), file=file)
            if not is_right(row):
                print(described(row), flush=True)
    print(tables(rows))
    failed = [row for row in rows if not is_right(row)]
    print(f"{len(failed)} of {len(rows)} are not right, in {time.process_time():.0f} processor seconds")
    sys.exit(bool(failed) and not options.show)


if __name__ == "__main__":
    main()
