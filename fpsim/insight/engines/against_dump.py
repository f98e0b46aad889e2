"""Compare a model with a dump: log-probabilities, modules whose own code differs, and each module's share of the KL."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.checks import few
from fpsim.insight.engines.dumps import LOGPROBS, MASK, TOKENS, Dump
from fpsim.insight.engines.forced import Change, Injected, Judged, Seen, Target, apart, changes, matched
from fpsim.insight.engines.likelihoods import (
    Choices,
    Decision,
    Figures,
    Likelihoods,
    Replayed,
    compared,
    compared_choices,
    ids_told,
    interval,
    read_batch,
)
from fpsim.insight.engines.msprobe import STATISTICS
from fpsim.insight.engines.places import MARGIN, TINY, Measured, Permuted, Split
from fpsim.insight.engines.recorded import Recorded, Source, Steps, batched_steps, mapped, outputs_of
from fpsim.insight.engines.remedies import Tried, largest_share, truncated
from fpsim.insight.engines.sides import Door, Pair
from fpsim.tensors.noise import keep_random_numbers
from fpsim.undoing import Undo, undone

__all__ = ["Asked", "compare_with_dump"]

# The relative difference between the results of two kernels of exp or rsqrt: in float32, one ulp in some elements. In a
# narrow dtype, this float32 ulp makes a few elements round to the other neighbour.
KERNELS = {torch.float64: 2.0**-40, torch.float32: 2.0**-21, torch.float16: 2.0**-16, torch.bfloat16: 2.0**-13}
BELOW = 0.1  # no module is named while mean |dlogp| is at most this times the floor's
FAR = 4.0  # a change explains a place if it divides the difference there by more than this
CLOSE = 1.5  # the simplest change is taken whose remaining difference is at most this times the smallest one
HALF, MOST_BACK, MOST_TRIED = 0.5, 8, 3
NOT_TOLD = "not told"


class Asked(NamedTuple):
    """Arguments of `mismatch`. is_a: whether the dump is the first side."""

    batch: Any
    readers: tuple[Any, Any, Any]
    names: Mapping[str, str | tuple[str, ...]]
    attribution: str
    seed: int
    progress: Callable[[], object] | None
    is_a: bool


@dataclass
class Site:
    """A module whose own code, given the engine's inputs, computes other numbers than the recorded ones."""

    module: str
    targets: list[Target]

    @property
    def worst(self) -> Target:
        return max(self.targets, key=lambda t: t.local)


def compare_with_dump(model: nn.Module, dump: Dump, asked: Asked, result: Any) -> None:
    """Fill a `Mismatch` with the results of comparing a model with a dump."""
    if dump.is_statistics:
        undone(partial(_statistics, model, dump, asked, result))
        return
    found = undone(partial(_found, model, dump, asked, result))
    if result:
        _explain(model, *found, asked, result)


def _found(model: nn.Module, dump: Dump, asked: Asked, result: Any, undo: Undo) -> tuple[_Runs, Recorded, list[Site]]:
    keep_random_numbers(undo)
    steps, batch = _same_tokens(model, dump, asked)
    # Only the doors and the threads of a pair are needed: its second side is empty, and each run is of the model.
    pair = Pair(model, nn.Identity(), {}, asked.seed, undo)
    known = {name: door.module for name, door in pair.doors["a"].items()}
    sources, alone = _mapped(dump, known, asked)
    runs = _Runs(pair, batch, steps, asked, result.eps)
    made: tuple[list[Decision], list[Decision]] = ([], [])
    runs.run_model(lambda: Choices(made[0], lambda: pair.running))
    leaves = {name for name, module in known.items() if not any(True for _ in module.children())}
    recorded = Recorded(dump, steps, sources, runs.seen.shapes, leaves)
    runs.read_dump(recorded)
    _tell_sides(result, asked, alone, [n for n in known if n and n not in sources and n in runs.seen.shapes])
    result.figures = runs.figures_of_dump
    _grow(runs, recorded, result)
    judged = Judged(recorded)
    runs.run(judged, lambda: Choices(made[1], lambda: pair.running))
    # The second run has the same recorded inputs, and permutes the terms of each sum: it measures each place's floor.
    runs.run(Judged(recorded, judged.targets), Permuted)
    result.unlike = recorded.unlike
    if not judged.judged:
        raise ValueError(
            f"Nothing of {dump.path.name} can be compared with the model: "
            f"{'; '.join([*result.unlike.values()][:2]) or 'it has no tensors of floating point'}. Expected: "
            f"results of modules with the model's shapes, (batch, time, ...) or one row for each token."
        )
    sites = _sites(judged, result)
    _decide(runs, recorded, made, asked.is_a, result)
    for site in sites:
        row: dict[str, Any] = {"module": site.module, "class": type(known[site.module]).__name__, "kind": NOT_TOLD}
        empty: dict[str, Any] = {"put_back": None, "put_back_interval": (math.nan, math.nan)}
        row |= {"detail": "", "local": site.worst.local, "floor": site.worst.floor, **empty}
        result.append(row | {"added": None, "added_interval": (math.nan, math.nan)})
    if sites and asked.attribution != "none":
        _attribute(runs, sites, asked, result)
    _note(dump, runs, judged, sites, result)
    result.passes = pair.passes
    return runs, recorded, sites


def _mapped(dump: Dump, known: Mapping[str, Any], asked: Asked) -> tuple[dict[str, Source], list[str]]:
    sources, alone = mapped(dump.modules, known, asked.names, dump.engine)
    if not any(name for name in sources):
        raise ValueError(
            f"No module of {dump.path.name} ({few(alone or dump.modules, 3)}) has the name of one of the model "
            f"({few([n for n in known if n], 3)}). Expected: names={{beginning in the dump: beginning in the model}}."
        )
    return sources, [name for name in alone if name]


def _tell_sides(result: Any, asked: Asked, of_dump: list[str], of_model: list[str]) -> None:
    result.alone = dict(zip("ab", (of_dump, of_model) if asked.is_a else (of_model, of_dump)))


# Tokens


def _same_tokens(model: nn.Module, dump: Dump, asked: Asked) -> tuple[Steps, Any]:
    """Return the dump's tokens and the model's arguments. Raises ValueError if the batch has other tokens."""
    steps, batch = dump.steps(), asked.batch
    if steps is not None and not bool((steps.mask[:, :-1] & steps.mask[:, 1:]).any()):
        raise ValueError(
            f"{dump.path.name} has tokens of shape {tuple(steps.tokens.shape)}, and none behind another that is no "
            f"padding: nothing is predicted. Expected: a run of at least two tokens, and {MASK!r} True at what is none."
        )
    if batch is None:
        if steps is None:
            raise ValueError(
                f"{dump.path.name} does not tell its tokens. Expected: tensors {TOKENS!r} and {MASK!r} (batch, time) "
                f"in it, the ids that its root is called with, or batch=..."
            )
        return steps, _batch_of(model, steps)
    ids, valid = (x.cpu() for x in read_batch(batch, *asked.readers[1:]))
    if steps is None:
        return batched_steps([ids], valid), batch
    if ids.shape != steps.tokens.shape:
        raise ValueError(
            f"The batch has tokens of shape {tuple(ids.shape)}, and {dump.path.name} of {tuple(steps.tokens.shape)}. "
            f"Expected: the tokens of the dump, Dump(path).steps().tokens, or batch=None, which takes them."
        )
    both = valid & steps.mask
    other = int((ids != steps.tokens)[both].sum())
    if other:
        raise ValueError(
            f"{other} of {int(both.sum())} tokens of the batch are not those of {dump.path.name}. Expected: the tokens "
            f"of the dump, Dump(path).steps().tokens, or batch=None, which takes them."
        )
    return steps._replace(mask=both), batch


def _batch_of(model: nn.Module, steps: Steps) -> Any:
    """Return a model's arguments for a dump's tokens, as keywords if its forward has transformers' argument names."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    known: Mapping[str, Any] = {}
    with suppress(TypeError, ValueError):  # a forward without a signature
        known = inspect.signature(model.forward).parameters
    ids = steps.tokens.to(device)
    if "input_ids" not in known:
        return ids
    batch: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in known:
        batch["attention_mask"] = steps.mask.long().to(device)
    if "position_ids" in known and steps.positions is not None:
        batch["position_ids"] = steps.positions.to(device)
    if "use_cache" in known:
        batch["use_cache"] = False
    return batch


# Runs


class _Runs:
    """Runs of the model, and the comparison of their log-probabilities with the dump's, if the dump has any."""

    def __init__(self, pair: Pair, batch: Any, steps: Steps, asked: Asked, eps: float) -> None:
        self.pair, self.batch, self.steps, self.eps = pair, batch, steps, eps
        self._logits, self._progress, self.is_a = asked.readers[0], asked.progress, asked.is_a
        self.seen = Seen()
        self.both = steps.mask[:, :-1] & steps.mask[:, 1:]
        self.logits: Tensor | None = None
        self.of_dump: Likelihoods | None = None
        self.figures_of_dump: Figures | None = None
        self.words = ""  # the name of the dump's tensor that holds the logits or log-probabilities

    def run(self, visitor: Any = None, mode: Any = None, pair: Pair | None = None, choice: Any = "a") -> Tensor:
        """Return the logits of a run. Raises ValueError if their shape is not (batch, time, vocabulary)."""
        pair = pair or self.pair
        with ids_told(pair.models["a"], self.steps.tokens, "the model"):
            output = pair.run(self.batch, choice, visitor, mode)
        if self._progress is not None:
            self._progress()
        named = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
        found = self._logits(output) if self._logits is not None else named
        found = found[0] if isinstance(found, tuple | list) and found else found
        shape = tuple(self.steps.tokens.shape)
        if isinstance(found, Tensor) and found.dim() == 3 and tuple(found.shape[:2]) == shape:
            return found
        raise ValueError(
            f"The output of the model has no logits (batch, time, vocabulary) = {shape} + (vocabulary,). Expected: "
            f"output.logits, the output itself, or logits=lambda output: ..."
        )

    def run_model(self, mode: Any) -> None:
        self.logits = self.run(self.seen, mode)

    def told(self, logits: Tensor) -> Likelihoods:
        """Return the log-probabilities of logits at the places for which the dump has log-probabilities too."""
        logs = logits[:, :-1].detach().cpu().double().log_softmax(-1)
        following = self.steps.tokens[:, 1:].masked_fill(~(self.steps.mask[:, :-1] & self.steps.mask[:, 1:]), 0)
        chosen = logs.gather(-1, following.unsqueeze(-1)).squeeze(-1)
        return Likelihoods(chosen, logs[self.both], self.both, logs[self.both].argmax(-1))

    @property
    def own(self) -> Likelihoods:
        assert self.logits is not None
        return self.told(self.logits)

    def read_dump(self, recorded: Recorded) -> None:
        """Read the dump's logits, from its root or the last module that returns some; else its log-probabilities."""
        assert self.logits is not None
        # The root comes first, then the modules from last to first: an engine may compute logits in a separate module.
        for name in ("", *dict.fromkeys(reversed([name for name, _ in self.seen.outputs]))):
            for path, value in recorded.values(name, 0).items():
                there = value.like(self.logits, recorded.tokens) if value.rows is not None else None
                if there is None or not path.startswith("out") or not there[0].is_floating_point():
                    continue
                rows = recorded.valid if there[1] is None else there[1]
                both = self.both & rows.reshape(self.steps.mask.shape)[:, :-1]
                if bool(both.any()):
                    self.both, self.words = both, value.name
                    self.of_dump = self.told(there[0])
                    self.figures_of_dump = self.beside(self.own, self.of_dump)
                    return
        logs = recorded.dump[LOGPROBS].double() if LOGPROBS in recorded.dump.entries else None
        if logs is None:
            return
        if logs.shape != self.steps.tokens.shape:
            raise ValueError(
                f"{LOGPROBS!r} of {recorded.dump.path.name} has shape {tuple(logs.shape)}, and its tokens "
                f"{tuple(self.steps.tokens.shape)}. Expected: for each token its log-probability given those before."
            )
        known = self.both & logs[:, 1:].isfinite()
        if not bool(known.any()):
            raise ValueError(
                f"{LOGPROBS!r} of {recorded.dump.path.name} has no finite number at a token that is no padding. "
                f"Expected: log-probabilities of the chosen tokens, NaN where they are not known."
            )
        self.both, self.words = known, LOGPROBS
        other = self.own._replace(chosen=logs[:, 1:])
        found = self.beside(self.own, other)
        sums = found.by_sequence.copy()
        sums[:, 0] = math.nan
        self.figures_of_dump = found._replace(kl=math.nan, flips=math.nan, by_sequence=sums)

    def beside(self, model: Likelihoods, dump: Likelihoods) -> Figures:
        return compared(dump, model, self.eps) if self.is_a else compared(model, dump, self.eps)

    def floors(self, recorded: Recorded) -> tuple[Figures, Measured]:
        """Return how much another order of sums changes the figures, and how much it changes each module's result."""
        measured = Measured(self.seen, recorded.steps.mask)
        runs = [self.run(measured, Permuted), self.run(None, Split)]
        return max((compared(self.own, self.told(x), self.eps) for x in runs), key=lambda f: f.mean_dlogp), measured


def _grow(runs: _Runs, recorded: Recorded, result: Any) -> None:
    """Set the floor, and the first and last module whose result in the model's own run is beyond the module's floor."""
    result.floor, measured = runs.floors(recorded)
    beyond: dict[str, tuple[str, float, float]] = {}
    for (name, call), out in runs.seen.outputs.items():
        for _, x, value in matched([*outputs_of(out)], recorded.values(name, call), recorded.tokens):
            there = value.like(x, recorded.tokens)
            if there is None or not x.is_floating_point():
                continue
            far = apart(x, there[0], there[1], recorded.valid)
            floor = max(measured.relative.get(name, 0.0), KERNELS.get(x.dtype, 2.0**-21) / MARGIN)
            if far > MARGIN * floor and far > beyond.get(name, ("", 0.0, 0.0))[1]:
                beyond[name] = (name, far, floor)
    if beyond:
        result.first, result.last = next(iter(beyond.values())), [*beyond.values()][-1]


def _threshold(target: Target) -> float:
    """Return the largest difference that another order of sums, or another kernel of a function, can make."""
    return max(MARGIN * target.floor, KERNELS.get(target.dtype, 2.0**-13), TINY)


def _sites(judged: Judged, result: Any) -> list[Site]:
    """Return the modules beyond the floor; none if the log-probabilities differ by far less than their floor."""
    if result.figures is not None and result.figures.mean_dlogp <= BELOW * result.floor.mean_dlogp:
        return []
    by_module: dict[str, list[Target]] = {}
    for target in judged.targets.values():
        by_module.setdefault(target.module, []).append(target)
    kept = ([t for t in of if not t.own.is_floating_point() or t.local > _threshold(t)] for of in by_module.values())
    return [Site(of[0].module, of) for of in kept if any(t.own.is_floating_point() for t in of)]


def _decide(
    runs: _Runs, recorded: Recorded, made: tuple[list[Decision], list[Decision]], is_a: bool, result: Any
) -> None:
    """Compare the model's choices of experts with the dump's: recorded choices, or choices from recorded numbers."""
    calls: dict[str, int] = {}
    for decision in made[1]:
        call = calls.get(decision.module, 0)
        calls[decision.module] = call + 1
        for value in recorded.values(decision.module, call).values():
            is_chosen = value.rows is not None and not value.rows.is_floating_point()
            if is_chosen and value.rows.shape == decision.indices.shape:  # type: ignore[union-attr]
                rows = value.rows.to(decision.indices)  # type: ignore[union-attr]
                decision.indices = torch.where(value.present.to(rows.device)[:, None], rows, decision.indices)  # type: ignore[union-attr]
    kept = [[_of_tokens(d, recorded.valid) for d in of] for of in made]
    result.decisions = compared_choices(*(kept[::-1] if is_a else kept))
    if any(row["flips"] for row in result.decisions):
        replayed = iter(made[1])
        found = runs.told(runs.run(None, lambda: Replayed(replayed)))
        result.replayed = None if runs.of_dump is None else runs.beside(found, runs.of_dump).kl


def _of_tokens(decision: Decision, valid: Tensor) -> Decision:
    """Return a decision without the rows of padding."""
    if len(decision.indices) != len(valid):
        return decision
    rows = valid.to(decision.indices.device)
    kept = Decision(decision.indices[rows], decision.margin[valid.to(decision.margin.device)])
    kept.module = decision.module
    return kept


def _attribute(runs: _Runs, sites: list[Site], asked: Asked, result: Any) -> None:
    """Measure each module's share of the KL: add the dump's differences in this module, or in all others, to the model.

    With all differences added, the model computes the dump's numbers. With the differences of one module left out, the
    model stands for the engine with the model's own code in this module.
    """
    every = [t for site in sites for t in site.targets]
    own = runs.own

    def with_(targets: list[Target]) -> Likelihoods:
        return runs.told(runs.run(Injected(targets, tuple(runs.steps.tokens.shape)))) if targets else own

    # If the dump has no logits, the model with all differences added stands for the engine.
    base = runs.of_dump or with_(every)
    first = base if asked.is_a else own  # every KL is of the first side

    def kl(targets: list[Target]) -> Figures:
        return compared(first, with_(targets), runs.eps)

    def but(names: set[str], is_back: bool) -> list[Target]:
        """Return the differences to add for a hybrid: one side, with the other side's code in the named modules.

        is_back: whether the hybrid is the second side with code of the first; else it is the first with code of the
            second.
        """
        return [t for t in every if (t.module in names) == (is_back == asked.is_a)]

    total = compared(first, own if asked.is_a else base, runs.eps)
    whole = total.by_sequence[:, 0]
    for site, row in zip(sites, result, strict=True):
        without = kl(but({site.module}, True)).by_sequence[:, 0]
        row["put_back"] = float((whole - without).sum() / whole.sum()) if whole.sum() else 0.0
        row["put_back_interval"] = interval(whole - without, whole, asked.seed)
        row["kl_without"] = float(without.sum() / max(total.by_sequence[:, 1].sum(), 1))
        if asked.attribution == "both":
            alone = kl(but({site.module}, False)).by_sequence[:, 0]
            row["added"] = float(alone.sum() / whole.sum()) if whole.sum() else 0.0
            row["added_interval"] = interval(alone, whole, asked.seed)
    result.sort(key=largest_share)
    back: set[str] = set()
    for row in result[:MOST_BACK]:
        back.add(row["module"])
        left = row["kl_without"] if len(back) == 1 else kl(but(back, True)).kl
        result.halving.append((row["module"], left))
        result.is_halved = left <= HALF * total.kl
        if result.is_halved:
            break
    if runs.of_dump is not None:
        change = (first.chosen - (own if asked.is_a else base).chosen)[runs.both]
        result.weights = truncated(change)


def _note(dump: Dump, runs: _Runs, judged: Judged, sites: list[Site], result: Any) -> None:
    """Add the notes: the tensors that were compared, and the questions that a dump leaves open."""
    notes = result.notes
    if runs.figures_of_dump is None:
        notes.append(
            "The dump has no logits: its log-probabilities are not told; shares are of the KL that forcing makes."
        )
    elif runs.of_dump is None:
        notes.append(
            f"The dump has {LOGPROBS!r} of the chosen tokens alone: KL and likeliest tokens are not told. Shares are "
            f"of the KL that forcing makes."
        )
    else:
        notes.append(f"The log-probabilities of the dump are those of {runs.words}.")
    differ = "differs" if len(sites) == 1 else "differ"
    notes.append(f"{len(judged.judged)} modules ran on what the engine's had; {len(sites)} of them {differ}.")
    has_inputs = any(key.module and key.path.startswith("in") for m in dump.modules for key in dump.of(m))
    if not has_inputs:
        notes.append(
            "The dump has results alone: a module's inputs were computed from them, so that a place is the module or "
            "the code that leads to it."
        )
    notes.append(
        "The floor is the model's: what another order of sums does in the engine, a dump does not tell. Shares force "
        "the dump's numbers into the model: the engine's answer to other inputs needs the engine."
    )
    if short := [*judged.recorded.short]:
        notes.append(f"Fewer tokens than ids are in {few(short, 3)}: they are taken to be the last of each call.")
    if dump.left_out:
        name, why = next(iter(dump.left_out.items()))
        notes.append(f"{len(dump.left_out)} entries of the dump are not read, the first {name}: {why}.")


# Kinds and remedies


def _explain(model: nn.Module, runs: _Runs, recorded: Recorded, sites: list[Site], asked: Asked, result: Any) -> None:
    """Try changes of the model. A change that comes near a place's recorded numbers gives its kind, and is a remedy."""
    before = {site.module: site.worst.local for site in sites}
    enough = {site.module: _threshold(site.worst) for site in sites}
    found: dict[str, list[tuple[Change, float]]] = {name: [] for name in before}
    failed: list[str] = []
    for change in changes(model, before):
        try:
            left = undone(partial(_left, change, runs, recorded, before, asked, result))
        except Exception as error:  # the model's code cannot run with this change; a note below says so
            failed.append(f"{change.words} ({type(error).__name__})")
            continue
        for name, now in left.items():
            if now < before[name] / FAR:
                found[name].append((change, now))
        # Simple changes come first: once they explain all places, the others are not tried.
        if all(any(now <= enough[name] for _, now in of) for name, of in found.items()):
            break
    remedies: dict[str, tuple[Change, list[str]]] = {}
    worst = {site.module: site.worst for site in sites}
    for row in result:
        name, target = row["module"], worst[row["module"]]
        best = min((now for _, now in found[name]), default=0.0)
        chosen = next(((c, now) for c, now in found[name] if now <= max(CLOSE * best, enough[name])), None)
        row["detail"] = f"{target.words} differs by {target.local:.2g}"
        if chosen is None:
            row["detail"] += "; no change that was tried gives it"
            continue
        row["kind"] = chosen[0].kind
        row["detail"] += f"; {chosen[0].words} in the model leaves {chosen[1]:.2g}"
        remedies.setdefault(chosen[0].words, (chosen[0], []))[1].append(name)
    for change, names in [*remedies.values()][: MOST_TRIED if runs.of_dump is not None else 0]:
        undone(partial(_remedy, model, change, names, runs, asked, result))
    result.tried.sort(key=lambda t: t.kl)
    if failed:
        result.notes.append(f"{len(failed)} changes do not run in this model, the first {failed[0]}.")


def _left(
    change: Change, runs: _Runs, recorded: Recorded, places: Iterable[str], asked: Asked, result: Any, undo: Undo
) -> dict[str, float]:
    """Return the difference that is left at each place with a changed model."""
    keep_random_numbers(undo)
    with change.make([]) as changed:
        judged = Judged(recorded)
        runs.run(judged, None, Pair(changed, nn.Identity(), {}, asked.seed, undo))
    result.passes += 1
    left = dict.fromkeys(places, 0.0)
    for target in judged.targets.values():
        if target.module in left:
            left[target.module] = max(left[target.module], target.local)
    return left


def _remedy(
    model: nn.Module, change: Change, names: list[str], runs: _Runs, asked: Asked, result: Any, undo: Undo
) -> None:
    """Compare the dump with the model after a change at the places that the change explains."""
    keep_random_numbers(undo)
    assert runs.of_dump is not None
    with change.make(names) as changed:
        other = nn.Identity() if changed is model else changed
        pair = Pair(model, other, {}, asked.seed, undo)
        pair.is_mixed = changed is not model
        choice = "a" if changed is model else lambda n: "b" if n in names else "a"
        figures = runs.beside(runs.told(runs.run(pair=pair, choice=choice)), runs.of_dump)
    result.passes += 1
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    result.tried.append(
        Tried(f"{change.words} in {names[0] or 'the model itself'}{more}", figures.mean_dlogp, figures.kl)
    )


# Statistics


def statistics_of(x: Tensor) -> dict[str, float]:
    """Return the statistics that msprobe records of a tensor, and its root mean square as the scale of differences."""
    wide = x.detach().float()
    norm = float(wide.norm())
    found = {"Max": float(wide.max()), "Min": float(wide.min()), "Mean": float(wide.mean()), "Norm": norm}
    return found | {"scale": norm / math.sqrt(wide.numel())}


def statistics_apart(own: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the largest relative difference of two tensors' statistics.

    The difference of the norms is relative to the norm. The other differences are relative to the root mean square.
    """
    worst = 0.0
    for name in STATISTICS:
        if name not in other or not own["Norm"] or not math.isfinite(own[name]):
            continue
        if not math.isfinite(other[name]):
            return math.inf
        worst = max(worst, abs(own[name] - other[name]) / (own["Norm"] if name == "Norm" else own["scale"]))
    return worst


class _Statistics(Seen):
    """A visitor that keeps the statistics of each module's results instead of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int, str], tuple[dict[str, float], torch.Size, torch.dtype]] = {}

    def seen(self, door: Door, call: int, out: Any) -> None:
        for path, x in outputs_of(out):
            if x.is_floating_point() and x.numel():
                self.shapes.setdefault(door.name, [])
                self.found[door.name, call, path] = statistics_of(x), x.shape, x.dtype


def _statistics(model: nn.Module, dump: Dump, asked: Asked, result: Any, undo: Undo) -> None:
    """Compare statistics of results on the engine's batch, and add a row for each module beyond its floor, in order."""
    if asked.batch is None:
        raise ValueError(
            f"{dump.path.name} has statistics alone, which do not tell the tokens. Expected: batch=..., what the "
            f"engine ran."
        )
    keep_random_numbers(undo)
    pair = Pair(model, nn.Identity(), {}, asked.seed, undo)
    sources, alone = _mapped(dump, pair.doors["a"], asked)
    own, again = _Statistics(), _Statistics()
    for visitor, mode in ((own, None), (again, Permuted)):
        pair.run(asked.batch, "a", visitor, mode)
        if asked.progress is not None:
            asked.progress()
    _tell_sides(result, asked, alone, [n for n in own.shapes if n and n not in sources])
    far: dict[str, tuple[float, float]] = {}
    for (name, call, path), (mine, shape, dtype) in own.found.items():
        source = sources.get(name)
        entries = {} if source is None else {(k.call, k.path): entry for k, entry in dump.of(source.module).items()}
        entry = entries.get((call, path))
        if source is None or entry is None or not entry.statistics:
            continue
        if source.is_part or math.prod(entry.shape) != math.prod(shape):
            is_part = f"it is part of {source.module}, and statistics have no parts"
            words = f"the dump has it of shape {entry.shape}, and the model of {tuple(shape)}"
            result.unlike[name] = is_part if source.is_part else words
            continue
        floor = max(MARGIN * statistics_apart(mine, again.found[name, call, path][0]), KERNELS.get(dtype, 2.0**-13))
        before = far.get(name, (0.0, 0.0))
        far[name] = max(before[0], statistics_apart(mine, entry.statistics)), max(before[1], floor)
    if not far:
        raise ValueError(
            f"No result of {dump.path.name} ({few(dump.modules, 3)}) has the size of the model's "
            f"({few([*own.shapes], 3)}). Expected: batch=..., what the engine ran."
        )
    result += [{"module": name, "local": x, "floor": floor} for name, (x, floor) in far.items() if x > floor]
    if result:
        result.first, result.last = (tuple(result[i].values()) for i in (0, -1))
    result.passes = pair.passes
    result.notes.append(
        f"The dump has statistics alone: largest and least number, mean and norm of {len(far)} results are compared. "
        f"Not told are log-probabilities, which module's own code it is, kinds and shares: for these dump tensors "
        f'(msprobe: "task": "tensor").'
    )
