"""A model beside a dump, in words."""

from __future__ import annotations

import math

from fpsim.insight.engines.against_dump import HALF, Beside, Site
from fpsim.insight.rows import number, text_table

__all__ = ["told"]

SHOWN, NAMED = 12, 3
COLUMNS = ("module", "kind", "local", "floor", "added", "where")


def told(beside: Beside, words: tuple[str, str], eps: float) -> str:
    """The report of a comparison with a dump."""
    lines = [f"a: {words[0]}", f"b: {words[1]}", *_figures(beside, eps)]
    if beside.dump.is_statistics:
        lines += _statistics(beside)
    else:
        lines += _sites(beside) if beside.sites else [_nothing(beside)]
    lines += _not_compared(beside)
    lines.append(f"{beside.passes} passes.")
    return "\n".join(lines)


def spoken(name: str) -> str:
    return name or "the model itself"


def _figures(beside: Beside, eps: float) -> list[str]:
    lines = []
    if (f := beside.figures) is not None:
        places = int(f.by_sequence[:, 1].sum())
        lines.append(
            f"{places} tokens of {len(f.by_sequence)} sequences, by {beside.logits_of}: mean |dlogp| "
            f"{f.mean_dlogp:.3g} (largest {f.largest_dlogp:.3g}), k1 {f.k1:.3g}, k3 {f.k3:.3g}, KL {f.kl:.3g} nats, "
            f"{f.outside:.1%} of ratios outside of 1 ± {eps:g}, perplexity {f.perplexities[0]:.5g} and "
            f"{f.perplexities[1]:.5g}, likeliest token other in {f.flips:.1%}"
        )
    elif not beside.dump.is_statistics:
        lines.append("The dump has no logits: log-probabilities, and shares of their KL, are not told.")
    if (floor := beside.floor) is not None:
        lines.append(
            f"Floor, sums of the model in another order alone: mean |dlogp| {floor.mean_dlogp:.3g}, KL {floor.kl:.3g} "
            f"nats."
        )
    return lines


def _nothing(beside: Beside) -> str:
    return (
        f"{beside.judged} modules were run on what the engine's had: nothing is beyond the floor, and no module is "
        f"named."
    )


def _sites(beside: Beside) -> list[str]:
    top = beside.sites[0]
    lines = [
        f"Most: {spoken(top.module)} ({top.kind_of}): {top.kind}: {top.detail}.",
        f"{beside.judged} modules were run on what the engine's had; {len(beside.sites)} of them "
        f"{'gives' if len(beside.sites) == 1 else 'give'} something else. The first in the order of the run is "
        f"{spoken(beside.order[0])}.",
    ]
    if not beside.has_inputs:
        lines.append(
            "The dump has results alone: a module's inputs were computed from them, so that a place is the module or "
            "the code that leads to it."
        )
    if beside.first is not None and beside.last is not None:
        lines.append(
            f"In the model's own run results are beyond the floor first at {spoken(beside.first[0])} "
            f"({number(beside.first[1])}, floor {number(beside.first[2])}), and end at {spoken(beside.last[0])} with "
            f"{number(beside.last[1])}."
        )
    lines.append(text_table(COLUMNS, [[_cell(site, name) for name in COLUMNS] for site in beside.sites[:SHOWN]]))
    if len(beside.sites) > SHOWN:
        lines.append(f"... and {len(beside.sites) - SHOWN} more.")
    if beside.figures is not None and beside.together is not None:
        lines.append(
            f"added: the KL that the model has with the difference of that place alone, as a share. All of them added "
            f"make {beside.together:.0%}."
        )
    if beside.greedy and beside.figures is not None:
        steps = ", ".join(f"{spoken(name)} (KL {kl:.3g})" for name, kl in beside.greedy)
        is_half = beside.greedy[-1][1] >= HALF * beside.figures.kl
        lines.append(f"Added greedily, half of the KL is {'there' if is_half else 'not there'} with {steps}.")
    tried = [(site, *site.tried[0]) for site in beside.sites[:SHOWN] if site.tried]
    if tried:
        lines.append("Tried in the model, on the engine's inputs (what is left of the local difference):")
        lines += [
            f"  {spoken(site.module)}, {words}: {left:.3g} of {site.worst.local:.3g}" for site, words, left in tried
        ]
    lines.append(
        "Putting one module back into the engine needs an engine that runs: a dump answers for what it recorded."
    )
    return lines


def _cell(site: Site, name: str) -> str:
    if name == "added":
        if site.added is None:
            return "-" if site.kl is None else f"KL {site.kl:.3g}"
        low, high = site.added_interval
        return f"{site.added:.0%}" if math.isnan(low) else f"{site.added:.0%} [{low:.0%}, {high:.0%}]"
    worst = site.worst
    cells = {"module": spoken(site.module), "kind": site.kind, "where": worst.words}
    return cells[name] if name in cells else number({"local": worst.local, "floor": worst.floor}[name])


def _statistics(beside: Beside) -> list[str]:
    lines = [
        "The dump has statistics alone: largest and least number, mean and norm of each result are compared. Told is "
        "where results part and how it grows; not told are log-probabilities, which module's own code it is, kinds and "
        'shares: for these dump tensors (msprobe: "task": "tensor").'
    ]
    if beside.first is None or beside.last is None:
        return [*lines, "No statistic is beyond the floor, and no module is named."]
    lines.append(
        f"Statistics are beyond the floor first at {spoken(beside.first[0])} ({number(beside.first[1])}, floor "
        f"{number(beside.first[2])}), and end at {spoken(beside.last[0])} with {number(beside.last[1])}."
    )
    beyond = [row for row in beside.grown if row[1] > row[2]]
    cells = [[spoken(name), number(far), number(floor)] for name, far, floor in beyond[:SHOWN]]
    lines.append(text_table(("module", "statistics differ by", "floor"), cells))
    if len(beyond) > SHOWN:
        lines.append(f"... and {len(beyond) - SHOWN} more.")
    return lines


def _not_compared(beside: Beside) -> list[str]:
    lines = []
    for side, names in beside.alone.items():
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"In the {side} alone, and so not compared: {', '.join(names[:NAMED])}{more}.")
    lines += [f"{spoken(name)} is not compared: {why}." for name, why in [*beside.unlike.items()][:SHOWN]]
    if len(beside.unlike) > SHOWN:
        lines.append(f"... nor are {len(beside.unlike) - SHOWN} more: `unlike` has them.")
    if beside.dump.left_out:
        name, why = next(iter(beside.dump.left_out.items()))
        lines.append(f"{len(beside.dump.left_out)} entries of the dump are not read, the first {name}: {why}.")
    return lines
