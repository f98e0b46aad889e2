"""A model beside a dump: figures of the tokens, the places whose own code differs, and what each of them explains."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.checks import few
from fpsim.insight.engines.dumped_names import mapped
from fpsim.insight.engines.dumps import MASK, TOKENS, Dump
from fpsim.insight.engines.forced import EVERYTHING, Injected, Judged, Recorded, Seen, Target
from fpsim.insight.engines.likelihoods import Figures, Likelihoods, compared, interval, read_batch
from fpsim.insight.engines.places import MARGIN, TINY, Measured, relative_of
from fpsim.insight.engines.recorded import Steps, batched_steps
from fpsim.insight.engines.reordered import Permuted, Split
from fpsim.insight.engines.sides import Pair
from fpsim.insight.engines.trials import Trial, tried_on
from fpsim.tensors.noise import keep_random_numbers
from fpsim.undoing import Undo, undone

__all__ = ["KERNELS", "Beside", "Site", "compare_with_dump"]

# A relative difference that other kernels of exp or rsqrt make, with the same sums: an ulp of float32 in some elements,
# and in a narrow dtype the few roundings that it turns over.
KERNELS = {torch.float64: 2.0**-40, torch.float32: 2.0**-21, torch.float16: 2.0**-16, torch.bfloat16: 2.0**-13}
BELOW = 0.1  # of the floor's mean |dlogp|, up to which no module is named
HALF, MOST = 0.5, 8


@dataclass
class Site:
    """A module whose own code, on the inputs that the engine had, gives something else than was recorded."""

    module: str
    kind_of: str
    targets: list[Target]
    kind: str = ""
    detail: str = ""
    tried: list[tuple[str, float]] = field(default_factory=list)
    added: float | None = None
    added_interval: tuple[float, float] = (math.nan, math.nan)
    kl: float | None = None

    @property
    def worst(self) -> Target:
        """The target that is furthest apart."""
        return max(self.targets, key=lambda t: t.local)


@dataclass
class Beside:
    """A model beside a dump."""

    dump: Dump
    is_a: bool
    figures: Figures | None = None
    floor: Figures | None = None
    sites: list[Site] = field(default_factory=list)
    first: tuple[str, float, float] | None = None
    last: tuple[str, float, float] | None = None
    grown: list[tuple[str, float, float]] = field(default_factory=list)
    greedy: list[tuple[str, float]] = field(default_factory=list)
    together: float | None = None
    alone: dict[str, list[str]] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    judged: int = 0
    order: list[str] = field(default_factory=list)  # of the places, as they ran
    has_inputs: bool = True
    passes: int = 0
    logits_of: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """A row for each place; of statistics, for each module that is beyond the floor."""
        none = (math.nan, math.nan)
        if self.dump.is_statistics:
            return [{"module": name, "local": far, "floor": floor} for name, far, floor in self.grown if far > floor]
        return [
            {
                "module": site.module,
                "class": site.kind_of,
                "kind": site.kind,
                "detail": site.detail,
                "local": site.worst.local,
                "floor": site.worst.floor,
                "put_back": None,
                "put_back_interval": none,
                "added": site.added,
                "added_interval": site.added_interval,
                "where": site.worst.words,
            }
            for site in self.sites
        ]


def compare_with_dump(
    model: nn.Module, dump: Dump, batch: Any, readers: Any, names: Mapping[str, str | tuple[str, ...]], eps: float,
    attribution: str, seed: int, progress: Callable[[], object] | None, is_a: bool,
) -> Beside:  # fmt: skip
    """Compare. is_a: whether the dump is the first side. The arguments are those of `mismatch`."""
    return undone(partial(_found, model, dump, batch, readers, names, eps, attribution, seed, progress, is_a))


def _found(
    model: nn.Module, dump: Dump, batch: Any, readers: Any, names: Any, eps: float, attribution: str, seed: int,
    progress: Any, is_a: bool, undo: Undo,
) -> Beside:  # fmt: skip
    keep_random_numbers(undo)
    steps, batch = _same_tokens(model, dump, batch, readers)
    pair = Pair(model, nn.Identity(), {}, seed, undo)
    known = {name: door.module for name, door in pair.doors["a"].items()}
    sources, alone = mapped(dump.modules, known, names, dump.engine)
    if not any(name for name in sources):
        raise ValueError(
            f"No module of {dump.path.name} ({few(alone or dump.modules, 3)}) has the name of one of the model "
            f"({few([n for n in known if n], 3)}). Expected: names={{beginning in the dump: beginning in the model}}."
        )
    result = Beside(dump, is_a, alone={"dump": [n for n in alone if n]})
    run = _Runs(pair, batch, steps, readers[0], eps, is_a, progress)
    run.model_alone()
    leaves = {name for name, module in known.items() if not any(True for _ in module.children())}
    recorded = Recorded(dump, steps, sources, run.seen, leaves)
    result.alone["model"] = [n for n in known if n and n not in sources and n in run.seen.results]
    run.dump_alone(recorded, result)
    _grow(run, recorded, result)
    run.floors(result)
    judged = Judged(recorded)
    run.forced(judged)
    run.forced(Judged(recorded, judged.targets), Permuted)
    result.judged, result.has_inputs = len(judged.judged), recorded.has_inputs
    result.unlike = recorded.unlike
    if not judged.judged:
        raise ValueError(
            f"Nothing of {dump.path.name} can be compared with the model: "
            f"{'; '.join([*result.unlike.values()][:2]) or 'it has no tensors of floating point'}. Expected: "
            f"results of modules with the model's shapes, (batch, time, ...) or one row for each token."
        )
    if _is_beyond_floor(result):
        result.sites = _sites(judged, known)
        result.order = [site.module for site in result.sites]
    if result.sites:
        _name_kinds(model, run, recorded, result, seed)
        if attribution != "none":
            _attribute(run, result, seed)
    result.passes = pair.passes
    return result


def _same_tokens(model: nn.Module, dump: Dump, batch: Any, readers: Any) -> tuple[Steps, Any]:
    """The tokens of the dump, and what the model is called with. Raises ValueError where the tokens are others."""
    steps = dump.steps()
    if batch is None:
        if steps is None:
            raise ValueError(
                f"{dump.path.name} does not tell its tokens. Expected: tensors {TOKENS!r} and {MASK!r} (batch, time) "
                f"in it, the ids that its root is called with, or batch=..."
            )
        return steps, _batch_of(model, steps)
    ids, valid = read_batch(batch, *readers[1:])
    if steps is None:
        return batched_steps([ids.cpu()], valid.cpu()), batch
    if ids.shape != steps.tokens.shape:
        raise ValueError(
            f"The batch has tokens of shape {tuple(ids.shape)}, and {dump.path.name} of {tuple(steps.tokens.shape)}. "
            f"Expected: the tokens of the dump, Dump(path).steps().tokens, or batch=None, which takes them."
        )
    both = valid.cpu() & steps.mask
    other = int((ids.cpu() != steps.tokens)[both].sum())
    if other:
        raise ValueError(
            f"{other} of {int(both.sum())} tokens of the batch are not those of {dump.path.name}. Expected: the tokens "
            f"of the dump, Dump(path).steps().tokens, or batch=None, which takes them."
        )
    return Steps(steps.tokens, both, steps.steps, steps.positions), batch


def _batch_of(model: nn.Module, steps: Steps) -> Any:
    """What a model is called with for the tokens of a dump: by name where its forward has transformers' names."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        known = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        known = {}  # type: ignore[assignment]
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


class _Runs:
    """Runs of the model, and their figures beside one another and the dump's."""

    def __init__(
        self, pair: Pair, batch: Any, steps: Steps, logits: Any, eps: float, is_a: bool, progress: Any
    ) -> None:
        self.pair, self.batch, self.steps, self._logits = pair, batch, steps, logits
        self._eps, self._is_a, self._progress = eps, is_a, progress
        self.seen = Seen()
        self.of_model: Tensor | None = None
        self.of_dump: Likelihoods | None = None
        self.both: Tensor | None = None

    def run(self, visitor: Any = None, mode: Any = None) -> Tensor | None:
        """The logits of a run of the model; None where they are not (batch, time, vocabulary)."""
        output = self.pair.run(self.batch, "a", visitor, mode)
        if self._progress is not None:
            self._progress()
        return self._logits_in(output)

    def _logits_in(self, output: Any) -> Tensor | None:
        named = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
        found = self._logits(output) if self._logits is not None else named
        found = found[0] if isinstance(found, tuple | list) and found else found
        shape = tuple(self.steps.tokens.shape)
        is_right = isinstance(found, Tensor) and found.dim() == 3 and tuple(found.shape[:2]) == shape
        return found if is_right else None

    def model_alone(self) -> None:
        self.of_model = self.run(self.seen)

    def forced(self, visitor: Any, mode: Any = None) -> None:
        self.run(visitor, mode)

    def dump_alone(self, recorded: Recorded, result: Beside) -> None:
        """The figures from the dump's logits, where it has some."""
        if self.of_model is None:
            raise ValueError(
                f"The output of the model has no logits (batch, time, vocabulary) = {tuple(self.steps.tokens.shape)} + "
                f"(vocabulary,). Expected: output.logits, the output itself, or logits=lambda output: ..."
            )
        vocabulary = self.of_model.shape[-1]
        for name in ("", *reversed([name for name, _ in self.seen.outputs])):
            for value in recorded.values(name, 0).values() if name in recorded.sources else ():
                there = value.like(self.of_model, recorded.tokens) if value.rows is not None else None
                is_result = value.name.rpartition(".")[2].startswith("out") or ".out." in f".{value.name}"
                if there is None or not is_result or there[0].shape[-1] != vocabulary:
                    continue
                rows = there[1] if there[1] is not None else torch.ones_like(self.steps.mask).reshape(-1)
                valid = self.steps.mask
                both = valid[:, :-1] & valid[:, 1:] & rows.reshape(valid.shape)[:, :-1]
                if not bool(both.any()):
                    continue
                self.both, result.logits_of = both, value.name
                self.of_dump = self.told(there[0])
                result.figures = self.apart(self.of_dump)
                return

    def told(self, logits: Tensor) -> Likelihoods:
        """Log-probabilities where the dump has them."""
        assert self.both is not None
        ids, both = self.steps.tokens, self.both
        logs = logits[:, :-1].detach().cpu().double().log_softmax(-1)
        chosen = logs.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return Likelihoods(chosen, logs[both], both, logs[both].argmax(-1))

    def apart(self, other: Likelihoods) -> Figures:
        """The figures of another run, or of the dump, beside the model's own."""
        assert self.of_model is not None
        own = self.told(self.of_model)
        return compared(other, own, self._eps) if self._is_a else compared(own, other, self._eps)

    def figures(self, visitor: Any = None, mode: Any = None) -> Figures | None:
        logits = self.run(visitor, mode)
        return None if self.both is None or logits is None else self.apart(self.told(logits))

    def floors(self, result: Beside) -> None:
        """What sums in another order do: to the figures, and to each module's result."""
        if self.both is None:
            valid = self.steps.mask
            self.both = valid[:, :-1] & valid[:, 1:]
        measured = Measured(self.seen, self.steps.mask)  # type: ignore[arg-type]
        found = [self.figures(measured, Permuted), self.figures(None, Split)]
        result.floor = max((f for f in found if f is not None), key=lambda f: f.mean_dlogp)
        dtypes = {name: outs for (name, call), outs in self.seen.outputs.items() if call == 0}
        result.grown = [
            (name, far, max(measured.relative.get(name, 0.0), _kernels(dtypes.get(name, []))))
            for name, far, _ in result.grown
        ]
        beyond = [row for row in result.grown if row[1] > MARGIN * row[2]]
        if beyond:
            result.first, result.last = beyond[0], beyond[-1]


def _kernels(outs: list[Tensor]) -> float:
    return max((KERNELS.get(x.dtype, 2.0**-21) for x in outs), default=2.0**-21) / MARGIN


def _grow(run: _Runs, recorded: Recorded, result: Beside) -> None:
    """How far each module's result in the model's own run is from the dump's, in the order of the run."""
    valid = recorded.valid
    far: dict[str, float] = {}
    for name, call in run.seen.outputs:
        values = {p: v for p, v in recorded.values(name, call).items() if p.startswith("out")}
        for x, value in zip(run.seen.outputs[name, call], values.values()):
            there = value.like(x, recorded.tokens)
            if there is None:
                continue
            known, rows = there
            if rows is None:
                found = relative_of([x], [known.to(x.device)], EVERYTHING)
            else:
                n, kept = len(rows), (rows & valid).to(x.device)
                found = relative_of(
                    [x.reshape(n, -1)[kept]], [known.reshape(n, -1)[kept.cpu()].to(x.device)], EVERYTHING
                )
            far[name] = max(far.get(name, 0.0), found)
    result.grown = [(name, value, 0.0) for name, value in far.items()]


def _is_beyond_floor(result: Beside) -> bool:
    if result.figures is None or result.floor is None:
        return True
    return result.figures.mean_dlogp > BELOW * result.floor.mean_dlogp


def is_beyond(target: Target) -> bool:
    """Whether a difference is more than another order of sums, or another kernel of a function."""
    return target.local > threshold(target)


def threshold(target: Target) -> float:
    return max(MARGIN * target.floor, KERNELS.get(target.dtype, 2.0**-13), TINY)


def _sites(judged: Judged, known: Mapping[str, nn.Module]) -> list[Site]:
    by_module: dict[str, list[Target]] = {}
    for target in judged.targets.values():
        if is_beyond(target):
            by_module.setdefault(target.module, []).append(target)
    return [Site(name, type(known[name]).__name__, targets) for name, targets in by_module.items()]  # as they ran


def _name_kinds(model: nn.Module, run: _Runs, recorded: Recorded, result: Beside, seed: int) -> None:
    """Try small changes on the model's own code: the one that gives what was recorded names the kind."""
    wanted = {site.module for site in result.sites}

    def locals_of(changed: nn.Module, is_same: bool) -> dict[str, float]:
        """How far the places are apart with a changed model."""

        def judge(undo: Undo) -> dict[str, float]:
            pair = run.pair if is_same else Pair(changed, nn.Identity(), {}, seed, undo)
            judged = Judged(recorded)
            pair.run(run.batch, "a", judged)
            if not is_same:
                run.pair.passes += pair.passes
            found = dict.fromkeys(wanted, 0.0)
            for target in judged.targets.values():
                if target.module in found:
                    found[target.module] = max(found[target.module], target.local)
            return found

        return undone(judge)

    before = {site.module: site.worst.local for site in result.sites}
    floors = {site.module: threshold(site.worst) for site in result.sites}
    found: dict[str, Trial] = tried_on(model, before, floors, locals_of)
    for site in result.sites:
        trial = found.get(site.module)
        if trial is None:
            site.kind = "not told"
            site.detail = f"{site.worst.words} differs by {site.worst.local:.2g}; no format that was tried gives it"
        else:
            site.kind, site.tried = trial.kind, [(trial.words, trial.left)]
            site.detail = f"{trial.words} in the model leaves {trial.left:.2g} of {site.worst.local:.2g}"


def _attribute(run: _Runs, result: Beside, seed: int) -> None:
    """The KL that each place's difference makes in the model alone, and the places that make half of it together."""
    whole = None if result.figures is None else result.figures.by_sequence[:, 0]
    total = None if whole is None else float(whole.sum())
    for site in result.sites:
        alone = run.figures(Injected(site.targets))
        if alone is None:
            continue
        site.kl = alone.kl
        if whole is not None and total:
            site.added = float(alone.by_sequence[:, 0].sum()) / total
            site.added_interval = interval(alone.by_sequence[:, 0], whole, seed)
    result.sites.sort(key=lambda site: -(site.kl or 0.0))
    if whole is None or not total or result.figures is None:
        return
    together: list[Target] = []
    for site in result.sites[:MOST]:
        together += site.targets
        kl = site.kl if len(result.greedy) == 0 else getattr(run.figures(Injected(together)), "kl", None)
        if kl is None:
            return
        result.greedy.append((site.module, kl))
        if kl >= HALF * result.figures.kl:
            break
    if len(result.sites) > 1:
        every = run.figures(Injected([t for site in result.sites for t in site.targets]))
        result.together = None if every is None else float(every.by_sequence[:, 0].sum()) / total
    else:
        result.together = result.sites[0].added
