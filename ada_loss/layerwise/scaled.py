"""The engine that gives each layer its own scale: it answers the emulation's question at each place of a backward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ada_loss.layerwise.forks import round_shares
from ada_loss.layerwise.graph import errors_behind, register, sources
from ada_loss.layerwise.scale_kernels import (
    IF_UNKNOWN,
    RECOMPUTE,
    REQUESTED,
    REUSE,
    Limits,
    delayed_scaling,
    factor_kernel,
    meeting_scale,
    pass_scale_on,
    retain_last_informative,
    scale_to_max,
    smallest_sufficient_scale,
)
from ada_loss.layerwise.sites import MOMENTS, Arrival, Edge, Memory, Place
from ada_loss.rules.layer import (
    AMAX,
    AMIN,
    AmaxHistory,
    Current,
    ElementWiseRange,
    Exact,
    Fixed,
    LayerRule,
    as_layer_rule,
)
from ada_loss.transforms import PRODUCTS, AdaLossTransform, AdaLossTransformCast, Product
from fpsim import scaling
from fpsim.scaling import (
    RoundingSpec,
    amax_of,
    binades,
    is_rounded_at,
    keep_memory_of,
    listeners,
    mark_rounded,
    memory_of,
    moments_of,
    on_device,
)

__all__ = ["AdaLossScaled", "Observed"]

NEAREST = ("nearest_even", "nearest_away", "stochastic")
MEASURED = -1  # the number of a product whose gradient is measured, in the place of a product's own
MOST_PRODUCTS = 1 << 27


class Observed(Protocol):
    """Who is told of the gradients of some steps, before they are rounded, with the scales chosen for them."""

    def wants(self, step: int) -> bool: ...

    def __call__(
        self, step: int, site: str, role: str, spec: RoundingSpec, gradient: Tensor, log2_scale: Tensor, chosen: Tensor
    ) -> None: ...


class AdaLossScaled:
    """Adaptive gradient scaling of a quantised model: each layer's gradient is rounded at a scale of its own.

    Attaches to `model`, which is trained as before: gradients keep their true size, so that the optimizer, clipping
    and a loss scaler need not know. `detach()`, or the end of a `with` block, leaves the model as it was. A copy of
    the model is not scaled.

    Zhao, Vogel, Ahmed, Luk, IJCAI 2020, for every format: at a matrix product the incoming gradient, rounded at scale
    S, and the other operand tell by which power of two the outgoing gradient is to be scaled so that few of its
    elements underflow and none overflows; other operations pass S on, and parameters' gradients are rounded at S. In
    every step a scale at which a gradient would overflow is lowered until it fits. A gradient that holds inf or NaN is
    passed through at scale 1; guard the step with a scaler (`GradScaler("static", ...)`) where that may happen.

    model: from `fpsim.quantize`, with any format and policy; formats with float32's exponents have nothing to scale.
    transforms: which modules' products are scaled, `[AdaLossTransformLinear(), ...]`; None for every product, and for
    the cast of float32 gradients at the model's outputs. rule: a name ("approx_range", "abs_range",
    "element_wise_range", "fixed", "exact", "current", "amax_history") or a rule with its parameters. The last three
    measure each tensor itself, wherever it is rounded. init_scale: the scale of gradients that enter the model, a
    power of two. update_every: scales are chosen anew in each n-th step, a step being a backward pass, and kept in
    between, each place its own; where the gradient is zero or not finite the last one stays, or the next step finds
    the first. A gradient that overflows between updates, more than 16 times as large as in the step before, may have
    been rounded once already when its scale is lowered.
    scale_upper_bound, accum_upper_bound: of one factor and of the scale, None for no bound (the original: 16 and
    1024). branches: where gradients of several consumers meet, "exact" rounds their sum once, at the largest of their
    scales at which it fits; "original" rounds each at its own and the sum at the scale that the original chooses, and
    keeps factors between updates, not scales.
    u_min: what the rules keep gradients above: "smallest", the format's smallest magnitude; "flush", the half of it,
    where rounding flushes; "normal", the smallest with all its digits, which 8-bit formats are glad of.

    >>> import fpsim
    >>> model = fpsim.quantize(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), "fp16")
    >>> x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    >>> (model(x).sum() * 1e-7).backward()
    >>> float((model[0].weight.grad == 0).float().mean()) > 0.9
    True
    >>> model.zero_grad()
    >>> with AdaLossScaled(model):
    ...     (model(x).sum() * 1e-7).backward()
    >>> float((model[0].weight.grad == 0).float().mean()) < 0.6
    True
    """

    def __init__(
        self,
        model: nn.Module,
        transforms: Iterable[AdaLossTransform | AdaLossTransformCast] | None = None,
        init_scale: float = 1.0,
        rule: LayerRule | str = "approx_range",
        update_every: int = 1,
        scale_upper_bound: float | None = None,
        accum_upper_bound: float | None = None,
        branches: str = "exact",
        u_min: str = "smallest",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model came as {type(model).__name__}. Possible: a torch.nn.Module from fpsim.quantize.")
        try:
            self._listeners = listeners(model)
        except ValueError:
            raise ValueError(
                f"{type(model).__name__} is not quantised, and float32 has nothing to scale. "
                f"Call fpsim.quantize(model, fmt) first and scale what it returns."
            ) from None
        if any(found.scaling is not None for found in self._listeners):
            raise ValueError("This model is scaled already. Call detach() on the other AdaLossScaled first.")
        self.rule = as_layer_rule(rule)
        self._check(init_scale, update_every, scale_upper_bound, accum_upper_bound, branches, u_min)
        self.model, self.init_scale, self.update_every = model, float(init_scale), update_every
        self.scale_upper_bound, self.accum_upper_bound = scale_upper_bound, accum_upper_bound
        self.branches, self.u_min = branches, u_min
        self.step = 0
        self.observer: Observed | None = None
        self._choose(model, None if transforms is None else list(transforms))
        self._memories: defaultdict[tuple[str, str], Memory] = defaultdict(Memory)
        self._unlinked: dict[tuple[str, str], Place] = {}
        self._task = -1
        self._roots: dict[int, int] = {}
        self._keeps = self.rule.ahead and branches == "exact" and update_every > 1  # scales, from step to step
        self._updated = -update_every  # the step from which the next update is counted: the last one that chose all
        self._is_update = True
        self._links = True  # whether places of the step that runs know one another
        self._are_known, self._asked = False, -1  # all scales and factors; in which step that was asked last
        self._told: Observed | None = None
        self._constants: dict[Any, Tensor] = {}
        self._decided = keep_memory_of(torch.zeros(1, dtype=torch.int64, device="cpu"))
        for found in self._listeners:
            found.scaling = self._place

    def _check(
        self,
        init_scale: float,
        update_every: int,
        scale_bound: float | None,
        accumulated_bound: float | None,
        branches: str,
        u_min: str,
    ) -> None:
        number = isinstance(init_scale, int | float) and not isinstance(init_scale, bool)
        if not (number and 0 < init_scale < math.inf and math.frexp(init_scale)[0] == 0.5):
            raise ValueError(
                f"init_scale={init_scale!r} is impossible. Possible: a power of two, such as 1.0 or 2.0**15."
            )
        if isinstance(update_every, bool) or not isinstance(update_every, int) or update_every < 1:
            raise ValueError(f"update_every={update_every!r} is impossible. Possible: 1 for every step, or more.")
        for name, bound in (("scale_upper_bound", scale_bound), ("accum_upper_bound", accumulated_bound)):
            if bound is not None and not (isinstance(bound, int | float) and 0 < bound < math.inf):
                raise ValueError(f"{name}={bound!r} is impossible. Possible: a finite number above 0, or None.")
        if branches not in ("exact", "original"):
            raise ValueError(f"branches={branches!r} is impossible. Possible: 'exact' or 'original'.")
        if branches == "original" and not self.rule.ahead:
            raise ValueError(
                f"branches='original' came with the rule {self.rule.name!r}, which measures the sum of the branches. "
                f"Possible: branches='exact', or a rule of the original."
            )
        if u_min not in ("smallest", "flush", "normal"):
            raise ValueError(f"u_min={u_min!r} is impossible. Possible: 'smallest', 'flush' or 'normal'.")

    def _choose(self, model: nn.Module, transforms: Sequence[Any] | None) -> None:
        """Which modules' products are scaled, and whether casts are."""
        self._casts = transforms is None
        self._modules: set[str] | None = None
        if transforms is None:
            return
        self._modules = set()
        modules = dict(model.named_modules())
        for transform in transforms:
            if isinstance(transform, AdaLossTransformCast):
                self._casts = True
                continue
            if not isinstance(transform, AdaLossTransform):
                raise TypeError(
                    f"A transform came as {transform!r}. Possible: AdaLossTransformLinear(), AdaLossTransformConv2d(), "
                    f"..., or AdaLossTransform(YourModule)."
                )
            matched = [name for name, module in modules.items() if transform.matches(module)]
            if not matched:
                kinds = sorted({type(m).__name__ for m in modules.values()})
                raise ValueError(
                    f"The transform {transform} matches no module. Classes in the model: {', '.join(kinds)}. "
                    f"Leave it out, or leave out transforms= to scale every product."
                )
            self._modules |= {
                m for m in modules for name in matched if m == name or m.startswith(f"{name}.") or not name
            }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> AdaLossScaled:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "An AdaLossScaled belongs to the model that it is attached to, and is neither copied nor pickled. Copy or "
            "save its .model and its state_dict(), and give them to a new one."
        )

    def detach(self) -> nn.Module:
        """Leave the model as it was and give it back. Graphs that were made before keep their scales."""
        for found in self._listeners:
            if found.scaling == self._place:
                found.scaling = None
        return self.model

    def __repr__(self) -> str:
        words = [repr(self.rule), f"update_every={self.update_every}", f"branches={self.branches!r}"]
        return f"AdaLossScaled({type(self.model).__name__}, {', '.join(words)}, step={self.step})"

    def last_log2_scale(self, site: str, role: str = "error") -> int:
        """The scale at which a place's gradient was rounded last; copies it to the host. KeyError for no such place."""
        memory = self._memories.get((site, role))
        if memory is None or memory.log2_scale is None:
            known = sorted({s for (s, r), m in self._memories.items() if r == role and m.log2_scale is not None})
            raise KeyError(f"No gradient was rounded at {site!r} as {role}. Sites: {', '.join(known) or 'none yet'}.")
        return int(memory.log2_scale)

    def log2_scales(self, role: str = "error") -> dict[str, int]:
        """The scales at which gradients were rounded last, by site, from input to output; copies them to the host."""
        kept = [(site, memory.log2_scale) for (site, r), memory in self._memories.items() if r == role]
        return {site: int(log2_scale) for site, log2_scale in reversed(kept) if log2_scale is not None}

    def state_dict(self) -> dict[str, Any]:
        """The settings, the step, and what each place remembers, as plain values; copies numbers to the host."""
        sites = [
            {
                "site": site,
                "role": role,
                "factors": {index: float(f) for index, f in memory.factors.items()},
                "kept": None if memory.kept is None else int(memory.kept),
                "amax": memory.amax,
                "ceiling": memory.ceiling,
                "reached": memory.reached,
                "history": None if memory.history is None else memory.history.tolist(),
                "log2_scale": None if memory.log2_scale is None else int(memory.log2_scale),
            }
            for (site, role), memory in self._memories.items()
        ]
        own = {"rule": self.rule.name, "params": asdict(self.rule), "step": self.step, "updated": self._updated}
        return {**own, "sites": sites}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved. Raises ValueError for the state of another rule."""
        if not {"rule", "params", "step", "updated", "sites"} <= set(state):
            raise ValueError(
                f"The state has {sorted(state)}. It has rule, params, step, updated and sites. Use state_dict()."
            )
        if (state["rule"], state["params"]) != (self.rule.name, asdict(self.rule)):
            raise ValueError(
                f"The state is of the rule {state['rule']!r} with {state['params']}, and this scales by {self.rule}. "
                f"Make one with that rule, or start this one afresh."
            )
        self.step, self._updated = int(state["step"]), int(state["updated"])
        self._are_known, self._asked = False, -1
        self._memories.clear()
        for saved in state["sites"]:
            memory = self._memories[saved["site"], saved["role"]]
            for i, f in saved["factors"].items():
                memory.factors[int(i)] = keep_memory_of(torch.tensor([f], dtype=torch.float64, device="cpu"))
            memory.noticed = dict(memory.factors)
            memory.amax, memory.reached = saved["amax"], saved["reached"]
            if self._keeps and saved["kept"] is not None:
                memory.kept = self._constant(torch.int64, torch.device("cpu"), saved["kept"])
                memory.ceiling = saved["ceiling"]
            if saved["history"] is not None:
                memory.history = torch.tensor(saved["history"], dtype=torch.float64, device="cpu")
            if saved.get("log2_scale") is not None:
                memory.log2_scale = torch.tensor([saved["log2_scale"]], device="cpu")

    # The forward pass: places and what connects them.

    def _place(
        self, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...], out: Tensor
    ) -> Place:
        task = scaling.current_backward_pass()
        is_linked = self._is_linking(task)
        if not is_linked:
            place = self._unlinked.get((site, role))
            if place is not None and place.spec is spec and place.dtype is out.dtype and place.made_in == task:
                return place  # it keeps nothing of a step
        is_chosen = self._modules is None or site.split(":")[0] in self._modules
        place = Place(self, site, role, spec, out.dtype, is_chosen, is_linked, task)
        if not is_linked:
            self._unlinked[place.key] = place
            return place
        if out.grad_fn is None:
            return place
        register(place, out.grad_fn, out.output_nr)
        if operation == "weight" and operands[0].grad_fn is None:
            return place  # nothing lies behind a leaf
        entries = []
        for index, product in enumerate(self._products(place, operation, operands)):
            entry = product.operand.grad_fn, product.operand.output_nr
            targets = errors_behind(entry)
            if targets:
                place.edges.append(Edge(targets, product, index))
                entries.append((entry, place.edges[-1]))
                if product.other is not None:
                    place.predicted.append(index)
        by_product = {id(target) for edge in place.edges for target in edge.targets}
        behind = sources([(out.grad_fn, None)])
        place.passes = list({id(target): target for target in behind if id(target) not in by_product}.values())
        if self.branches == "original":
            round_shares(place, out.grad_fn, operands, entries)
        return place

    def _products(self, place: Place, operation: str, operands: tuple[Any, ...]) -> list[Product]:
        find = PRODUCTS.get(operation)
        if find is None or not self.rule.ahead or not place.is_chosen:
            return []
        products = find(*operands)
        if isinstance(self.rule, ElementWiseRange) and any(p.channel is None for p in products):
            raise NotImplementedError(
                f"{operation} at {place.key[0]} is no linear layer or plain convolution, and element_wise_range forms "
                f"the products of those alone. Choose modules with transforms=, or another rule."
            )
        return products

    # The backward pass.

    def _root_of(self, place: Place, task: int) -> int:
        """The backward pass to which one belongs that a checkpoint runs inside of it, where its forward pass ran."""
        return self._roots.setdefault(task, self._roots.get(place.made_in, place.made_in))

    def _is_linking(self, task: int) -> bool:
        """Whether places that are made now have to know one another: the step that runs, or the next, chooses scales.

        Between updates none is chosen, and what it costs to follow the graph is saved.
        """
        if not self._keeps:
            return True
        if task >= 0 and self._roots.get(task, task) <= self._task:  # a checkpoint's forward pass
            return self._links
        if self.step + 1 - self._updated >= self.update_every:
            return True
        if not self._are_known and self._asked != self.step:
            self._asked = self.step
            # a place that no step has reached since the update may never come again
            reached = [memory for memory in self._memories.values() if memory.reached >= self._updated]
            self._are_known = all(memory.kept is not None and memory.knows(memory.noticed) for memory in reached)
        return not self._are_known

    def _begin(self, task: int, links: bool) -> None:
        """A new backward pass is a new step."""
        self._task, self._links = task, links
        self.step += 1
        self._is_update = links and self.step - self._updated >= self.update_every
        if self._is_update:
            self._updated = self.step
        self._told = self.observer if self.observer is not None and self.observer.wants(self.step) else None
        self._roots.clear()

    def scale_at(self, place: Place, gradient: Tensor, may_round: bool) -> Tensor:
        task = scaling.current_backward_pass()
        root = task if place.made_in < 0 else self._root_of(place, task)
        if root > self._task:
            self._begin(root, place.is_linked)
        if self._is_update and not place.is_linked:  # of a graph that was made in an earlier step
            self._updated = self.step - self.update_every  # so the next step is to choose all scales
        key, memory = self._recall(place)
        memory.to(gradient.device)
        if place.is_linked or memory.reached < self._updated:  # it may learn, or comes for the first time since then
            self._are_known = False
        memory.reached = self.step
        seen = None if self._told is None else gradient.detach()
        if place.is_linked or memory.kept is None:
            log2_scale = self._choose_at(place, task, gradient, memory)
        else:
            if seen is not None and may_round:
                seen = seen.clone()  # who is told sees it before it is rounded
            log2_scale = self._keep_at(place, gradient, memory.kept, memory, may_round)
        memory.log2_scale = log2_scale
        if self._told is not None and seen is not None:
            self._told(self.step, *key, place.spec, seen, log2_scale, memory.chosen.clone())
        return log2_scale

    def _keep_at(self, place: Place, gradient: Tensor, kept: Tensor, memory: Memory, may_round: bool) -> Tensor:
        """The scale between updates: the one that was kept, or a lower one where the gradient would overflow at it.

        On the CPU a gradient is rounded in the pass that looks at it, where the one before it left so much room that
        this one will fit. If it does not after all, it has been rounded once when its scale is lowered.
        """
        is_rounded = may_round and memory.has_room() and self._round_what_fits(place, gradient, kept, memory)
        if is_rounded or is_rounded_at(gradient, kept, place.spec):  # in this format, at this very scale: it fits
            if self._told is not None:
                memory.chosen[REQUESTED:] = kept  # the scale wanted and the final one
            return kept
        limits = self.limits_of(place, gradient)
        log2_scale = self._decide(place, gradient, kept, limits, memory)
        self._note_room(memory, kept, limits)
        return log2_scale

    def _round_what_fits(self, place: Place, gradient: Tensor, log2_scale: Tensor, memory: Memory) -> bool:
        """Round in place what is below the ceiling, and tell whether all is."""
        amax = scaling.round_fitting_(gradient, place.spec, log2_scale, memory.ceiling)
        if amax is None or amax > memory.ceiling:
            return False
        memory.amax = amax
        mark_rounded(gradient, log2_scale, place.spec)
        return True

    def _note_room(self, memory: Memory, kept: Tensor, limits: Tensor) -> None:
        """What tells in the next step whether a gradient will fit at the scale that is kept; on the CPU alone."""
        if kept.is_cpu:
            k, (_, largest, low, high, *_) = memory_of(kept)[0], memory_of(limits)
            memory.ceiling = math.ldexp(largest, -k) if low <= k <= high else 0.0
            memory.amax = float(memory_of(memory.moments)[AMAX])

    def _choose_at(self, place: Place, task: int, gradient: Tensor, memory: Memory) -> Tensor:
        """The scale in a step in which scales are chosen. It is handed on to the places that this one knows."""
        limits = self.limits_of(place, gradient)
        arrivals = place.arrivals if place.task == task else []
        place.arrivals = []
        is_cast = not arrivals and self._casts and not isinstance(self.rule, Fixed)
        must_measure = self.rule.ahead and (is_cast or any(a.measure for a in arrivals))
        is_known = memory.knows([*place.predicted, MEASURED] if must_measure else place.predicted)
        anew = self._is_update or not is_known or memory.kept is None or any(a.anew for a in arrivals)
        wanted = memory.kept if not anew else self._meeting(arrivals, limits, gradient.device)
        assert wanted is not None
        must_measure = must_measure and anew
        fresh = (must_measure or bool(place.predicted)) and (self._is_update or not is_known)
        if anew and self._told is not None:
            memory.chosen[:REQUESTED] = math.nan  # what an earlier step chose
        is_passed_on = arrivals and self.rule.ahead and not must_measure and not self._keeps and self._told is None
        if is_passed_on and is_rounded_at(gradient, wanted, place.spec):
            log2_scale = wanted
            if fresh:
                moments_of(gradient, out=memory.moments)
        else:
            if fresh:
                moments_of(gradient, logs=must_measure and self.rule.logs, out=memory.moments)
            if must_measure:
                wanted = self._choose_factor(wanted, memory.moments, None, 1, limits, memory, MEASURED, fresh)
            log2_scale = self._decide(place, gradient, wanted, limits, memory, is_measured=fresh)
        if anew and self._keeps and place.is_linked:
            memory.kept = self._held(wanted, memory)
        if memory.kept is not None:
            self._note_room(memory, memory.kept, limits)
        self._send(place, task, gradient, log2_scale, memory, fresh, anew)
        return log2_scale

    def _held(self, wanted: Tensor, memory: Memory) -> Tensor:
        """The scale to be kept: a gradient of zeros or one that is not finite came with none that tells anything."""
        if memory.kept is None:
            return wanted
        out = self._scale_on(wanted.device)
        on_device(retain_last_informative, wanted, memory.kept, memory.moments, out)
        return self._settled(out)

    def _recall(self, place: Place) -> tuple[tuple[str, str], Memory]:
        """What is kept of a place, and under which name: its site's, with a number from the second of its uses on.

        Counted as a backward pass reaches them, for not each forward pass has one: the last use is the first.
        """
        key = place.key
        memory = self._memories[key]
        if memory.reached == self.step:
            key, memory.uses = (f"{key[0]}#{memory.uses}", key[1]), memory.uses + 1
            return key, self._memories[key]
        memory.uses = 1
        return key, memory

    def _meeting(self, arrivals: list[Arrival], limits: Tensor, device: torch.device) -> Tensor:
        """The scale with which a gradient arrives."""
        if not arrivals:
            return self._constant(torch.int64, device, math.frexp(self.init_scale)[1] - 1)
        if any(a.log2_scale.device != device for a in arrivals):  # a model over several cards
            arrivals = [a._replace(log2_scale=a.log2_scale.to(device, non_blocking=True)) for a in arrivals]
        if len(arrivals) == 1:
            return arrivals[0].log2_scale
        scales = list({id(a.log2_scale): a.log2_scale for a in arrivals}.values())
        if len(scales) == 1:
            return scales[0]
        known = [a for a in arrivals if a.amax is not None]
        if known:  # branches="original"
            out = self._scale_on(device)
            amaxima = torch.cat([a.amax for a in known if a.amax is not None])
            on_device(meeting_scale, amaxima, torch.cat([a.log2_scale for a in known]), limits, out)
            return self._settled(out)
        if device.type == "cpu":
            return max(scales, key=lambda scale: memory_of(scale)[0])  # type: ignore[no-any-return]
        return torch.cat(scales).amax(0, keepdim=True)

    def _decide(
        self,
        place: Place,
        gradient: Tensor,
        wanted: Tensor,
        limits: Tensor,
        memory: Memory,
        is_measured: bool = False,
    ) -> Tensor:
        """The scale at which a gradient is rounded that came with one; never one at which it overflows."""
        rule, device, moments, chosen = self.rule, gradient.device, memory.moments, memory.chosen
        if not is_measured:
            amax_of(gradient, out=moments)
        out = self._scale_on(device)
        if rule.ahead or not place.is_chosen:
            on_device(pass_scale_on, wanted, moments, limits, out, chosen)
        elif isinstance(rule, Current):
            margin = self._constant(torch.int64, device, rule.margin)
            on_device(scale_to_max, wanted, moments, limits, margin, out, chosen)
        elif isinstance(rule, AmaxHistory):
            if memory.history is None:
                memory.history = torch.zeros(rule.length, dtype=torch.float64, device=device)
            margin = self._constant(torch.int64, device, rule.margin)
            on_device(delayed_scaling, wanted, moments, limits, margin, memory.history, out, chosen)
        else:
            assert isinstance(rule, Exact)
            bins, first = binades(gradient)
            share = self._constant(torch.float64, device, rule.n_uf_threshold)
            first_bin = self._constant(torch.int64, device, first)
            on_device(smallest_sufficient_scale, wanted, moments, limits, bins, first_bin, share, out, chosen)
        return self._settled(out)

    def _choose_factor(
        self,
        log2_scale: Tensor,
        g: Tensor,
        w: Tensor | None,
        terms: int,
        limits: Tensor,
        memory: Memory,
        index: int,
        fresh: bool,
    ) -> Tensor:
        device = log2_scale.device
        when = REUSE if not fresh else RECOMPUTE if self._is_update else IF_UNKNOWN
        factor = memory.factors.get(index)
        if factor is None:
            factor = keep_memory_of(torch.zeros(1, dtype=torch.float64, device=device))
            memory.factors[index] = factor
        out = self._scale_on(device)
        on_device(
            factor_kernel(self.rule.core()),
            log2_scale,
            g,
            self._constant(torch.float64, device, *[0.0] * MOMENTS) if w is None else w,
            self._constant(torch.int64, device, terms),
            limits,
            self._constant(torch.float64, device, *self.rule.parameters()),
            self._constant(torch.int64, device, when),
            factor,
            out,
            memory.chosen,
        )
        if self.update_every > 1 and when != REUSE:
            memory.notice(index)
        return self._settled(out)

    def _scale_on(self, device: torch.device) -> Tensor:
        """Where a decision writes a scale; see _settled."""
        return self._decided if device.type == "cpu" else torch.empty(1, dtype=torch.int64, device=device)

    def _settled(self, out: Tensor) -> Tensor:
        """The scale that was written. On the CPU equal ones are one tensor, which costs less to find than to make."""
        return self._constant(torch.int64, out.device, memory_of(out)[0]) if out is self._decided else out

    def _send(
        self, place: Place, task: int, gradient: Tensor, log2_scale: Tensor, memory: Memory, fresh: bool, anew: bool
    ) -> None:
        for target in place.passes:
            target.receive(task, Arrival(log2_scale, anew, False, place))
        for edge in place.edges:
            if edge.is_hidden:
                for target in edge.targets:
                    target.receive(task, Arrival(log2_scale, anew, True, edge))
                continue
            if isinstance(self.rule, ElementWiseRange):
                g, w = self._products_of(gradient, edge) if fresh else memory.moments, None
                is_known = fresh
            else:
                if fresh and edge.other is not None:
                    edge.other_moments = moments_of(edge.other)
                edge.other = None
                g, w = memory.moments, edge.other_moments
                is_known = fresh and w is not None
            target = edge.targets[0]
            limits = self.limits_of(target, log2_scale)
            scale = self._choose_factor(log2_scale, g, w, edge.terms, limits, memory, edge.index, is_known)
            for target in edge.targets:
                target.receive(task, Arrival(scale, anew, False, edge))

    def _products_of(self, gradient: Tensor, edge: Edge) -> Tensor:
        """Moments whose amin and amax are those of every product of an element and a weight of its channel."""
        assert isinstance(self.rule, ElementWiseRange)
        assert edge.other is not None
        assert edge.product_channel is not None
        along, across = edge.product_channel
        moments = torch.zeros(MOMENTS, dtype=torch.float64, device=gradient.device)
        if gradient.numel() == 0 or edge.other.numel() == 0:
            return moments
        g, w = (  # by channel; a vector has one element in each
            x.detach().abs().double().movedim(channel, 0).unsqueeze(-1).flatten(1)
            for x, channel in ((gradient, along), (edge.other, across))
        )
        if self.rule.max_rescue_ratio is None:
            infinity = torch.tensor(math.inf, dtype=torch.float64, device=g.device)
            amin = torch.stack([torch.where(t > 0, t, infinity).amin(1) for t in (g, w)]).prod(0).amin()
            amax = (g.amax(1) * w.amax(1)).amax()
            amin = torch.where(amin < math.inf, amin, 0.0)
        else:
            if g.numel() * w.shape[1] > MOST_PRODUCTS:
                raise ValueError(
                    f"max_rescue_ratio came with a layer of {g.numel() * w.shape[1]} products. Possible: up to "
                    f"{MOST_PRODUCTS}. Choose smaller layers with transforms=, or leave max_rescue_ratio out."
                )
            products = (g[:, :, None] * w[:, None, :]).flatten().sort(descending=True).values
            kept = (products.count_nonzero().double() * self.rule.max_rescue_ratio).ceil().clamp(min=1)
            amax, amin = products[0], products.take(kept.long() - 1)
        moments[AMAX], moments[AMIN] = amax, amin
        return moments

    def limits_of(self, place: Place, gradient: Tensor) -> Tensor:
        spec, dtype, device = place.spec, place.dtype, gradient.device
        key = (spec, dtype, device)
        found = self._constants.get(key)
        if found is None:
            fmt = spec.fmt
            low, high = scaling.log2_scale_limits(spec, dtype)
            u_min = {"smallest": fmt.smallest, "flush": fmt.smallest / 2, "normal": fmt.smallest_normal}[self.u_min]
            lost_below = fmt.smallest_normal if self.u_min == "normal" else fmt.smallest
            # nearest roundings, and on average stochastic ones, flush up to the half of the smallest magnitude
            flushed = 1 if self.u_min != "normal" and spec.rounding in NEAREST else 0
            threshold = math.floor(math.log2(lost_below)) - flushed
            bounds = [math.inf if b is None else float(b) for b in (self.scale_upper_bound, self.accum_upper_bound)]
            found = torch.tensor(
                Limits(u_min, fmt.largest, low, high, bounds[0], bounds[1], threshold),
                dtype=torch.float64,
                device=device,
            )
            self._constants[key] = keep_memory_of(found)
        return found

    def _constant(self, dtype: torch.dtype, device: torch.device, *values: float) -> Tensor:
        key = (dtype, device, values)
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = keep_memory_of(torch.tensor(values, dtype=dtype, device=device))
        return found
