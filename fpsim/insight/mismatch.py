"""mismatch(a, b, batch): explain why a training engine and a sampling engine disagree on the same tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpsim.border import require_memory, require_module, require_seed
from fpsim.checks import is_finite_number, require_callable, require_word, shown
from fpsim.insight.engines.against_dump import Asked, compare_with_dump
from fpsim.insight.engines.dumps import Dump, opened
from fpsim.insight.engines.kinds import STATE, described, has_scales_of_tensors, kind_of, policies_of
from fpsim.insight.engines.likelihoods import (
    Choices,
    Decision,
    Figures,
    Likelihoods,
    NotNumbersError,
    Replayed,
    batches_of,
    change_of,
    compared,
    compared_choices,
    has_known_parts,
    ids_told,
    interval,
    joined,
    likelihoods,
    read_batch,
    require_vocabulary,
)
from fpsim.insight.engines.places import Kept, Local, Measured, Permuted, Place, Split
from fpsim.insight.engines.recorded import require_dump_names
from fpsim.insight.engines.remedies import (
    Tried,
    Truncated,
    changed_policies,
    fields_of,
    largest_share,
    remedies_for,
    truncated,
)
from fpsim.insight.engines.sides import Pair, Resume, require_names
from fpsim.insight.rows import Rows, number, text_table
from fpsim.models.installed import emulated_forward, emulated_forwards
from fpsim.policies.policy import Policy
from fpsim.tensors.noise import keep_random_numbers
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["Mismatch", "mismatch"]

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
ATTRIBUTIONS = ("both", "back", "none")
COLUMNS = ("module", "kind", "local", "floor", "put_back", "added")
SHOWN, NAMED, TOP, MOST_BACK = 12, 3, 5, 8
HALF = 0.5
BELOW = 0.1  # no module is named while mean |dlogp| is at most this times the floor's
BEYOND = 4.0  # a figure above this times the floor's is more than another order of sums makes


class Mismatch(Rows):
    """Disagreement of two engines and its causes: a row for each module whose own code differs. See `mismatch`.

    figures, floor: `Figures` of b compared with a, and of a with sums in another order compared with a.
    first, last: the first and the last module in the order of the run whose output is beyond the floor: name, relative
        difference, floor.
    halving: the modules that halve the KL if they are put back one after the other, with the KL after each.
    parts: the share that each part of a policy explains in the five largest places: (module, part, share).
    decisions: a row for each topk and argmax call: the share of decisions that differ, and a's margin in these.
    replayed: the mean KL with a's decisions in b; None if no decision differs.
    tried: remedies, each with its mean |dlogp| and KL.
    weights: statistics of truncated importance weights.
    alone: the modules that only one side has, by side. unlike: the modules that cannot be compared, with the reason.
    passes: how often a model ran. resumed: how many of these runs began at the first changed module.
    notes: the comparison with a dump, and its limits, in words.
    """

    def __init__(self, words: tuple[str, str], eps: float) -> None:
        super().__init__()
        self.words, self.eps = words, eps
        self.figures: Figures | None = None
        self.floor: Figures | None = None
        self.first: tuple[str, float, float] | None = None
        self.last: tuple[str, float, float] | None = None
        self.halving: list[tuple[str, float]] = []
        self.is_halved = False
        self.parts: list[tuple[str, str, float]] = []
        self.decisions: list[dict[str, Any]] = []
        self.replayed: float | None = None
        self.tried: list[Tried] = []
        self.weights: Truncated | None = None
        self.alone: dict[str, list[str]] = {"a": [], "b": []}
        self.unlike: dict[str, str] = {}
        self.passes = self.resumed = 0
        self.notes: list[str] = []

    @property
    def is_beyond(self) -> bool:
        """True if a module is named, or if the figures are beyond the floor and some modules are not compared."""
        return bool(self) or self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        """True if the figures are beyond the floor, and some modules are not compared."""
        # The floor of the engine that wrote a dump is not known.
        if self.notes or self.figures is None or self.floor is None:
            return False
        is_more = self.figures.mean_dlogp > BEYOND * self.floor.mean_dlogp
        return is_more and bool(self.alone["a"] or self.alone["b"] or self.unlike)

    def __str__(self) -> str:
        lines = [f"a: {self.words[0]}", f"b: {self.words[1]}"]
        if (f := self.figures) is not None:
            places = int(f.by_sequence[:, 1].sum())
            lines.append(
                f"{places} tokens of {len(f.by_sequence)} sequences: mean |dlogp| {f.mean_dlogp:.3g} (largest "
                f"{f.largest_dlogp:.3g}), k1 {f.k1:.3g}, k3 {f.k3:.3g}, KL {f.kl:.3g} nats, {f.outside:.1%} of ratios "
                f"outside of 1 ± {self.eps:g}, perplexity {f.perplexities[0]:.5g} and {f.perplexities[1]:.5g}, "
                f"likeliest token other in {f.flips:.1%}"
            )
        if (floor := self.floor) is not None:
            lines.append(
                f"Floor, sums in another order alone: mean |dlogp| {floor.mean_dlogp:.3g}, KL {floor.kl:.3g} nats."
            )
        lines += self._places()
        lines += self._decided()
        if self.tried:
            lines.append(f"Tried in {'the model' if self.notes else 'b'} (mean |dlogp|, KL):")
            lines += [f"  {t.what}: {self._left(t)}" for t in self.tried]
        if self.weights is not None and self.is_beyond:
            w = self.weights
            lines.append(
                f"Importance weights cut off at {w.limit:g}: {w.share:.2%} are cut, effective sample size "
                f"{w.effective:.1%}."
            )
        for side, names in self.alone.items():
            if names:
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                lines.append(f"In {side} alone, and so not compared: {', '.join(map(_spoken, names[:NAMED]))}{more}.")
        lines += [f"{_spoken(name)} is not compared: {why}." for name, why in [*self.unlike.items()][:NAMED]]
        if len(self.unlike) > NAMED:
            lines.append(f"... nor are {len(self.unlike) - NAMED} more: `unlike` has them.")
        lines += self.notes
        begun = f", of which {self.resumed} begin behind what was known already" if self.resumed else ""
        lines.append(f"{self.passes} passes{begun}.")
        return "\n".join(lines)

    __repr__ = __str__

    def _left(self, tried: Tried) -> str:
        is_cured = self.floor is not None and 0 < tried.mean_dlogp <= 2 * self.floor.mean_dlogp
        return "within twice the floor" if is_cured else f"{tried.mean_dlogp:.3g}, {tried.kl:.3g}"

    def _places(self) -> list[str]:
        if self._is_elsewhere and not self:
            return [
                "It is beyond the floor, and each module that both have gives the same on the same inputs: what "
                "differs is in modules that are not compared."
            ]
        if not self:
            return ["Nothing is beyond the floor, and no module is named."]
        lines = []
        # With a dump of statistics, modules have neither kinds nor shares.
        columns = [name for name in COLUMNS if name in self[0]]
        if "kind" in columns:
            top = self[0]
            lines.append(f"Most: {_spoken(top['module'])} ({top['class']}): {top['kind']}: {top['detail']}.")
        if self.first is not None and self.last is not None:
            lines.append(
                f"Outputs are beyond the floor first at {_spoken(self.first[0])} ({number(self.first[1])}, floor "
                f"{number(self.first[2])}), and end at {_spoken(self.last[0])} with {number(self.last[1])}."
            )
        if "kind" in columns:
            lines.append(
                "Modules whose own code differs, and the share of KL that each explains (95 % over sequences):"
            )
        lines.append(text_table(columns, [[_cell(row, name) for name in columns] for row in self[:SHOWN]]))
        if len(self) > SHOWN:
            lines.append(f"... and {len(self) - SHOWN} more; all others give the same on the same inputs.")
        for module, part, share in self.parts:
            lines.append(f"  of {_spoken(module)}, {part} put back explains {share:.0%}")
        if self.halving:
            steps = ", ".join(f"{_spoken(name)} (KL {_told(kl)})" for name, kl in self.halving)
            lines.append(f"Put back greedily, half of the KL is {'' if self.is_halved else 'not '}gone with {steps}.")
        return lines

    def _decided(self) -> list[str]:
        lines = []
        for row in self.decisions:
            if row["flips"]:
                lines.append(
                    f"Decisions at {_spoken(row['module'])}: {row['flips']:.1%} of {row['rows']} differ, at a median "
                    f"margin of {number(row['margin_of_flips'])} (all: {number(row['margin'])})"
                )
        if self.replayed is not None and lines:
            where = "the dump's decisions replayed in the model" if self.notes else "a's decisions replayed in b"
            lines.append(f"With {where}: KL {_told(self.replayed)} nats.")
        return lines


def _spoken(name: str) -> str:
    return name or "the model itself"


def _told(kl: float) -> str:
    return f"{kl:.3g}" if math.isfinite(kl) else "not finite"


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if name == "module":
        return _spoken(value)
    if name in ("put_back", "added"):
        if value is None:
            return "-"
        if not math.isfinite(value):
            return "not finite"
        low, high = row[f"{name}_interval"]
        return f"{value:.0%}" if math.isnan(low) else f"{value:.0%} [{low:.0%}, {high:.0%}]"
    return number(value)


@keeps_grad_mode
def mismatch(
    a: nn.Module | Dump | str | os.PathLike[str],
    b: nn.Module | Dump | str | os.PathLike[str],
    batch: Any = None,
    *,
    logits: Callable[[Any], Tensor] | None = None,
    tokens: Callable[[Any], Tensor] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
    names: Mapping[str, str | Sequence[str]] | None = None,
    eps: float = 0.2,
    attribution: str = "both",
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> Mismatch:
    """Measure how much two engines disagree on the same tokens; name the modules that cause it, its kind, and a remedy.

    `a` trains and `b` samples: two policies of one model, or two implementations. The *own code* of each module is its
    computation without the modules that it calls. Both sides' own code runs on the same inputs, with the same inner
    modules. If the results differ by more than 4 times the effect of another order of its sums, the module is a place.
    The share of the KL divergence that a place explains is measured in two ways: by putting it back (b with a's own
    code there) and by adding it (a with b's own code there). The two shares differ if errors compensate. A place's kind
    is one of: formula, rounding point, format or scale of an operand, accumulator or order, cache or state, weights.

    Both models run in eval mode, without gradients, and are left as they were. Each side runs in a separate thread, so
    the formats, autocast and modes of one side do not reach the other.

    Args:
        a, b: modules, quantised or not. One of them may be a dump of an engine (`dump`, a hook, msprobe), as a path or
            opened (`Dump`). Then each module runs on the inputs that the engine's module had.
        batch: the arguments of the models: ids (batch, time), a tuple, or a mapping such as transformers'; or an
            iterable of these, such as a DataLoader. A list is the arguments of one call. With a dump, None takes its
            tokens.
        logits: a function from an output to (batch, time, vocabulary); None takes `output.logits` or the output itself.
        tokens, mask: functions from a batch to ids, and to a mask that is false at padding, (batch, time); None takes
            `input_ids` and `attention_mask`. Padding counts nowhere.
        names: {name in b: name in a} for modules or prefixes that differ: {"transformer.h": "model.layers"}. With a
            dump, {name in the dump: name in the model}. A name may be an ending, and a fused module may have several
            names: {"*.qkv_proj": ("*.q_proj", "*.k_proj", "*.v_proj")}.
        eps: the report counts ratios p / q outside of 1 - eps to 1 + eps.
        attribution: "both", "back" (half of the passes) or "none".
        seed: the seed of stochastic rounding and of the intervals.
        progress: a function that is called after each pass.

    Returns:
        A `Mismatch`, which prints as a report. For n modules, at most 2 n + 20 passes are run. In one of these passes,
        a module runs again for itself and for each module around it: once each, or three times where the code of the
        two sides gives different results.

    Raises:
        TypeError: for a value that is not a module, or not a batch.
        ValueError: for logits of other shapes or with NaN, batches that predict nothing, and models without a common
            module name.

    >>> class Tiny(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)
    ...     def forward(self, ids):
    ...         return self.head(self.embed(ids))
    >>> _ = torch.manual_seed(0)
    >>> model = Tiny()
    >>> from fpsim import Policy, Products, quantize
    >>> rollout = quantize(model, Policy(overrides={"head": Policy(products=Products(fprop=("e4m3fn", "e4m3fn")))}))
    >>> found = mismatch(model, rollout, torch.arange(24).reshape(3, 8) % 8)
    >>> found[0]["module"], found[0]["kind"]
    ('head', 'format or scale of an operand')
    """
    sides: tuple[Any, Any] = opened(a), opened(b)
    for side, name in zip(sides, ("a, the trainer,", "b, the rollout,")):
        if not isinstance(side, Dump):
            require_module(side, name, " Or the path of a dump.")
            require_memory(side)
    require_seed(seed)
    require_word("attribution", attribution, ATTRIBUTIONS)
    if not is_finite_number(eps) or not eps > 0:
        raise ValueError(f"eps={shown(eps)} is invalid. Expected: a number above 0, such as 0.2.")
    for name, function in (("logits", logits), ("tokens", tokens), ("mask", mask), ("progress", progress)):
        if function is not None:
            require_callable(name, function, "lambda output: output.logits")
    # A compiled model calls no inner modules, so none could be replaced: the original model is run.
    models = (getattr(model, "_orig_mod", model) for model in sides)
    one, other = (model.module if isinstance(model, WRAPPERS) else model for model in models)
    if one is other:
        raise ValueError("a and b are one module. Expected: two, as b = copy.deepcopy(a).")
    readers = logits, tokens, mask
    if isinstance(one, Dump) or isinstance(other, Dump):
        return _with_dump(one, other, batch, readers, names, eps, attribution, seed, progress)
    if batch is None:
        raise TypeError("batch is None. Expected: the arguments of both models; only a dump has tokens of its own.")
    mapping = require_names(names)
    return undone(partial(_found, one, other, batches_of(batch), readers, mapping, eps, attribution, seed, progress))


def _with_dump(
    a: Any, b: Any, batch: Any, readers: Any, names: Any, eps: float, attribution: str, seed: int, progress: Any
) -> Mismatch:
    """Compare a model with a dump."""
    if isinstance(a, Dump) and isinstance(b, Dump):
        raise ValueError("a and b are both dumps. Expected: one of them a model, whose code runs on the dump's inputs.")
    is_a = isinstance(a, Dump)
    model, side = (b, a) if is_a else (a, b)
    words = f"the dump {side.path.name}, {side}", described(model)
    result = Mismatch(words if is_a else words[::-1], eps)
    asked = Asked(batch, readers, require_dump_names(names), attribution, seed, progress, is_a)
    compare_with_dump(model, side, asked, result)
    return result


class _Runs:
    """The runs of a pair over all batches, and their figures compared with a."""

    def __init__(self, pair: Pair, batches: list[Any], readers: Any, eps: float, progress: Any) -> None:
        self.pair, self.batches, self.eps, self._progress = pair, batches, eps, progress
        self._logits, tokens, mask = readers
        self.read = [read_batch(batch, tokens, mask) for batch in batches]
        self.of_a: list[Likelihoods] = []
        self.kept: dict[str, Kept] = {}  # the modules' outputs for the first batch, by side

    def told(self) -> None:
        if self._progress is not None:
            self._progress()

    def likelihoods(self, i: int, side: str, *args: Any, **kwargs: Any) -> Likelihoods:
        # A hybrid may use either embedding. Both have the same vocabulary, so a's is checked.
        with ids_told(self.pair.models["b" if side == "b" else "a"], self.read[i][0], side):
            out = self.pair.run(self.batches[i], *args, **kwargs)
        self.told()
        return likelihoods(out, *self.read[i], self._logits, side)

    def figures(self, choice: Any, mode: Any = None) -> Figures:
        """Return the figures of a run of all batches, compared with a."""
        parts = [
            compared(self.of_a[i], self.likelihoods(i, "a hybrid", choice, mode=mode), self.eps)
            for i in range(len(self.batches))
        ]
        return joined(parts)

    def figures_with(self, side: str, changed: Collection[str]) -> Figures:
        """Return the figures, compared with a, of one side with the other's own code in some modules."""
        other = "a" if side == "b" else "b"
        parts = []
        for i in range(len(self.batches)):
            # Outputs are kept for the first batch only. Its run resumes at the first changed module.
            resume = Resume(self.kept[side].outputs, changed) if i == 0 else None
            found = self.likelihoods(i, "a hybrid", lambda n: other if n in changed else side, resume=resume)
            parts.append(compared(self.of_a[i], found, self.eps))
        return joined(parts)

    def kl_with(self, side: str, changed: Collection[str]) -> np.ndarray[Any, Any]:
        """Return the KL sums by sequence of `figures_with`; NaN if this hybrid of two engines computes NaN.

        Each engine alone computes numbers. Suppose that in one of them a module multiplies by 2**20, and the next one
        divides by it. If only the first of these is in the hybrid, the result may be infinite.
        """
        try:
            return self.figures_with(side, changed).by_sequence[:, 0]
        except NotNumbersError:
            return np.full(sum(len(ids) for ids, _ in self.read), math.nan)

    def one_by_one(self, side: str) -> Figures | None:
        """Compare runs of each sequence alone with runs of its batch; None if a batch fails `has_known_parts`."""
        parts = []
        for i, batch in enumerate(self.batches):
            ids, valid = self.read[i]
            if not has_known_parts(batch, ids):
                return None
            rows, n = [], len(ids)
            for r in range(n):
                one = {k: _row(v, r, n) for k, v in batch.items()} if isinstance(batch, Mapping) else batch[r : r + 1]
                out = self.pair.run(one, side)
                rows.append(likelihoods(out, ids[r : r + 1], valid[r : r + 1], self._logits, side))
            # Together these runs count as one pass over the batch.
            self.pair.passes -= n - 1
            self.told()
            together = Likelihoods(*(torch.cat([getattr(row, name) for row in rows]) for name in Likelihoods._fields))
            parts.append(compared(self.of_a[i], together, self.eps))
        return joined(parts)


def _row(x: Any, r: int, n: int) -> Any:
    """Return the r-th sequence of an argument with n sequences; any other argument as it is."""
    return x[r : r + 1] if isinstance(x, Tensor) and x.dim() and len(x) == n else x


def _found(
    a: nn.Module, b: nn.Module, batches: list[Any], readers: Any, names: dict[str, str], eps: float, attribution: str,
    seed: int, progress: Any, undo: Undo,
) -> Mismatch:  # fmt: skip
    keep_random_numbers(undo)
    pair = Pair(a, b, names, seed, undo)
    if not any(name for name in pair.names):
        raise ValueError(
            f"No module of b ({', '.join(pair.alone['b'][:3])} ...) has the name of one of a "
            f"({', '.join(pair.alone['a'][:3])} ...). Expected: names={{beginning in b: beginning in a}}."
        )
    result = Mismatch((described(a), described(b)), eps)
    result.alone = pair.alone
    runs = _Runs(pair, batches, readers, eps, progress)
    measured, floors, decisions = _compare_outputs(runs, result)
    for name, side in pair.training.items():
        result.unlike.setdefault(name, f"{side} has it in training mode, and all modules run in eval mode")
    pair.is_mixed = True
    places = _local_places(runs)
    _name_first(result, measured, floors, places)
    total, floor = result.figures, result.floor
    assert total is not None
    assert floor is not None
    # Such a difference is negligible compared with the effect of another order of sums.
    if total.mean_dlogp <= BELOW * floor.mean_dlogp:
        places = []
    for place in places:
        kind, detail = kind_of(pair, place, runs.read[0][1])
        row = {"module": place.name, "class": place.kind_of, "kind": kind, "detail": detail, "local": place.local}
        empty = {"put_back": None, "put_back_interval": (math.nan, math.nan)}
        row |= {"floor": place.floor, **empty, "added": None, "added_interval": (math.nan, math.nan)}
        result.append(row)
    if result and attribution != "none":
        _attribute(runs, result, total, attribution, seed)
        _halve(runs, result, total)
        _parts(runs, result, total)
    if result:
        _replay(runs, result, decisions)
        _remedies(runs, result, measured)
    result.passes, result.resumed = pair.passes, pair.resumed
    return result


def _compare_outputs(runs: _Runs, result: Mismatch) -> tuple[Measured, Measured, tuple[list[Decision], list[Decision]]]:
    """Run both engines, then run a with sums in another order."""
    pair, made = runs.pair, ([], [])  # type: ignore[var-annotated]
    noting = [partial(Choices, of_side, lambda: pair.running) for of_side in made]
    parts, floors, changes = [], [], []
    for i in range(len(runs.batches)):
        valid, kept = runs.read[i][1], Kept()
        # Modules and decisions are compared in the first batch only, because both sides' activations stay in memory.
        runs.of_a.append(runs.likelihoods(i, "a", "a", kept, noting[0] if i == 0 else None))
        measured, floor = Measured(kept, valid, keeps=i == 0), Measured(kept, valid)
        of_b = runs.likelihoods(i, "b", "b", measured, noting[1] if i == 0 else None)
        require_vocabulary(runs.of_a[i], of_b)
        changes.append(change_of(runs.of_a[i], of_b))
        parts.append(compared(runs.of_a[i], of_b, runs.eps))
        if i == 0:
            runs.kept = {"a": kept, "b": measured}
            first, of_floor = measured, floor
        floors.append(compared(runs.of_a[i], runs.likelihoods(i, "a", "a", floor, Permuted), runs.eps))
    result.figures, result.weights = joined(parts), truncated(torch.cat(changes))
    candidates = [joined(floors), runs.figures("a", Split)]
    # A part of a batch has other per-tensor scales and random numbers, which change more than the order of sums.
    alone = None if pair.has_drawn or has_scales_of_tensors(pair.models["a"]) else runs.one_by_one("a")
    candidates += [] if alone is None else [alone]
    result.floor = max(candidates, key=lambda f: f.mean_dlogp)
    result.unlike = first.unlike
    result.decisions = compared_choices(*made)
    return first, of_floor, made


def _local_places(runs: _Runs) -> list[Place]:
    """Return the places beyond the floor, in the order of the run."""
    local = Local(runs.pair, runs.read[0][1], lambda: None)
    runs.likelihoods(0, "a", "a", local)
    return [place for name in local.order if (place := local.places[name]).is_beyond]


def _name_first(result: Mismatch, measured: Measured, floors: Measured, places: list[Place]) -> None:
    """Set the first and the last module whose outputs are beyond the floor."""
    beyond = [
        (name, measured.relative[name], floors.relative.get(name, 0.0))
        for name in measured.order
        if measured.relative[name] > max(BEYOND * floors.relative.get(name, 0.0), 2.0**-40)
    ]
    if beyond and places:
        result.first, result.last = beyond[0], beyond[-1]


def _attribute(runs: _Runs, result: Mismatch, total: Figures, attribution: str, seed: int) -> None:
    """Measure each place's share of the KL: what a's code there removes from b, and what b's code there adds to a."""
    whole = total.by_sequence[:, 0]
    for row in result:
        name = row["module"]
        # If there is only one place, b with a's code there is a.
        without = np.zeros_like(whole) if len(result) == 1 else runs.kl_with("b", {name})
        row["put_back"] = float((whole - without).sum() / whole.sum()) if whole.sum() else 0.0
        row["put_back_interval"] = interval(whole - without, whole, seed)
        row["kl_without"] = float(without.sum() / max(total.by_sequence[:, 1].sum(), 1))
        if attribution == "both":
            alone = whole if len(result) == 1 else runs.kl_with("a", {name})
            row["added"] = float(alone.sum() / whole.sum()) if whole.sum() else 0.0
            row["added_interval"] = interval(alone, whole, seed)
    result.sort(key=largest_share)


def _halve(runs: _Runs, result: Mismatch, total: Figures) -> None:
    """Put places back, the largest share first, until half of the KL is gone."""
    back: list[str] = []
    for row in result[:MOST_BACK]:
        back.append(row["module"])
        count = max(total.by_sequence[:, 1].sum(), 1)
        kl = row["kl_without"] if len(back) == 1 else float(runs.kl_with("b", back).sum() / count)
        result.halving.append((row["module"], kl))
        result.is_halved = kl <= HALF * total.kl
        if result.is_halved:
            return


def _parts(runs: _Runs, result: Mismatch, total: Figures) -> None:
    """Measure the share that each part of a policy explains, in the places that explain most."""
    for row in result[:TOP]:
        both = policies_of(runs.pair, row["module"])
        wanted = emulated_forward(runs.pair.doors["b"][row["module"]].module)
        if both is None or wanted is None:
            continue
        parts = [part for part in fields_of(*both) if part[0] != "cache" or row["kind"] == STATE]
        if len(parts) < 2:
            continue
        for words, policy in parts:

            def change(name: str, own: Policy, policy: Policy = policy, wanted: str = wanted.name) -> Policy:
                return policy if name == wanted else own

            with changed_policies(runs.pair.models["b"], change) as is_other:
                if not is_other:
                    continue
                # A mixture of two engines may overflow although neither of them does.
                with suppress(NotNumbersError):
                    kl = runs.figures("b").kl
                    result.parts.append((row["module"], words, 1 - kl / total.kl if total.kl else 0.0))


def _replay(runs: _Runs, result: Mismatch, decisions: tuple[list[Decision], list[Decision]]) -> None:
    """Run b with the decisions that a made."""
    if not any(row["flips"] for row in result.decisions):
        return
    made: Iterator[Decision] = iter(decisions[0])
    try:
        found = runs.likelihoods(0, "b", "b", mode=lambda: Replayed(made))
    except NotNumbersError:
        result.replayed = math.nan
    else:
        result.replayed = compared(runs.of_a[0], found, runs.eps).kl


def _remedies(runs: _Runs, result: Mismatch, measured: Measured) -> None:
    """Run b under changes of its policy."""
    pair = runs.pair
    model = pair.models["b"]
    if not any(emulated_forwards(model)):
        return
    vocabulary = runs.of_a[0].all.shape[-1]
    weights = {name: next(iter(door.module.parameters(recurse=False)), None) for name, door in pair.doors["b"].items()}
    # The embedding has a weight of that shape too, but it is not the last such module.
    heads = [n for n in measured.order if (w := weights.get(n)) is not None and w.dim() == 2 and vocabulary in w.shape]
    head = heads[-1] if heads else None
    routers = {row["module"] for row in result.decisions if row["module"]}
    own_names = {module: name for name, module in model.named_modules()}
    names = {own_names[door.module]: known for known, door in pair.doors["b"].items()}
    halving = [name for name, _ in result.halving]
    for words, change in remedies_for(pair.models["a"], head, routers, halving, lambda n: names.get(n, n)):
        with changed_policies(model, change) as is_other:
            if not is_other:
                continue
            # A format may be too small for the activations, as fp16 is for those beyond 65504.
            try:
                figures = runs.figures("b")
            except NotNumbersError:
                result.tried.append(Tried(f"{words}, whose logits are NaN", math.inf, math.inf))
            else:
                result.tried.append(Tried(words, figures.mean_dlogp, figures.kl))
    result.tried.sort(key=lambda t: t.kl)
