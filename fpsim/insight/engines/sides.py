"""Two models that call one another's modules: for each module, a run chooses the side whose own code is executed.

A module's *own code* is the computation of its forward without the modules that it calls. Each module of both models
has a door in its call slot. If a run has chosen the other side, the door calls the other side's module with the same
arguments. The inner modules of the called module have doors too, and each of these doors chooses again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fpsim.checks import few, shown
from fpsim.emulation.caches import counted
from fpsim.emulation.casts import autocast_here
from fpsim.emulation.marks import format_of, mark_like
from fpsim.emulation.scope import active
from fpsim.insight.stepping import called
from fpsim.tensors.noise import keep_random_numbers, noise_of_torch
from fpsim.torch_internals import map_leaves
from fpsim.torch_modes import CALL_SLOT, call_inside, without_torch_function
from fpsim.undoing import Undo, undone

__all__ = ["Door", "Pair", "Resume", "Visitor", "cloned"]

Result = TypeVar("Result")
Visitor = Callable[["Door", tuple[Any, ...], dict[str, Any]], Any]
Choice = Callable[[str], str]
SIDES = ("a", "b")


class Door:
    """Stand-in for the call of a module.

    side: "a" or "b". name: the module's name on the first side.
    """

    def __init__(self, pair: Pair, side: str, name: str, module: nn.Module) -> None:
        self.pair, self.side, self.name, self.module = pair, side, name, module
        self._inside = getattr(module, CALL_SLOT, None) or call_inside(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.pair.come(self, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Its inner modules have separate doors."""
        return self._inside(*args, **kwargs)


class Pair:
    """The models of both sides, and the choice of the side that runs in each module.

    names: the names of the modules that both sides have, in the order of the first side.
    alone: the names of the modules that only one side has, by side.
    dtypes: by side, the dtype of most of the model's numbers.
    training: {name: side} of modules that are in training mode on one side only, while both models are in eval mode.
    """

    def __init__(self, a: nn.Module, b: nn.Module, names: Mapping[str, str], seed: int, undo: Undo) -> None:
        self.models, self.seed = {"a": a, "b": b}, seed
        self.doors: dict[str, dict[str, Door]] = {side: {} for side in SIDES}
        for side, model in self.models.items():
            for name, module in model.named_modules():
                known = renamed(name, names) if side == "b" else name
                if known in self.doors[side]:
                    raise ValueError(
                        f"names maps two modules of b to {known or 'the model itself'!r}, the second of them {name!r}. "
                        f"Expected: another name for each."
                    )
                self.doors[side][known] = Door(self, side, known, module)
        _require_found(names, b, self.doors["a"])
        self.names = [name for name in self.doors["a"] if name in self.doors["b"]]
        self.alone = {side: [n for n in self.doors[side] if n not in self.doors[other]] for side, other in ("ab", "ba")}
        self.passes = self.resumed = 0
        self.has_drawn = False  # whether any run drew random numbers: a resumed run would draw others at each place
        self.running = ""  # the module whose own code runs now
        self.is_mixed = False  # whether runs mix both sides, or have changed policies
        self._chosen: Choice = lambda name: "a"
        self._resume: Resume | None = None
        self._visitor: Visitor | None = None
        self._modes: list[Callable[[], Any]] = []
        self._autocast = autocast_here()
        self.dtypes = {side: _dtype_of(model) for side, model in self.models.items()}
        self._buffers = [(b, b.detach().clone()) for model in self.models.values() for b in model.buffers()]
        undo.by(self._restore)
        sides = (("a", "b"), ("b", "a"))
        self.training = {n: side for n in self.names for side, other in sides if self._trains_alone(n, side, other)}
        for side in SIDES:
            for door in self.doors[side].values():
                undo.by(partial(setattr, door.module, "training", door.module.training))
                door.module.training = False
                undo.by(partial(_close, door.module, vars(door.module).get(CALL_SLOT)))
                vars(door.module)[CALL_SLOT] = door

    def _trains_alone(self, name: str, side: str, other: str) -> bool:
        is_eval = not (self.models["a"].training or self.models["b"].training)
        return is_eval and self.doors[side][name].module.training and not self.doors[other][name].module.training

    def run(
        self,
        batch: Any,
        choice: Choice | str,
        visitor: Visitor | None = None,
        mode: Callable[[], Any] | None = None,
        resume: Resume | None = None,
    ) -> Any:
        """Return the output for a batch.

        choice: a function from a module's name to the side whose own code runs there; "a" or "b" for every module.
        visitor: a function that runs each module, given its door and arguments; None calls `door.run`.
        mode: a function that makes a TorchFunctionMode, which is active during the whole run.
        resume: the cached results of another run; ignored if runs draw random numbers.
        """
        self.passes += 1
        resume = None if self.has_drawn else resume
        self.resumed += resume is not None
        chosen = (lambda name: choice) if isinstance(choice, str) else choice
        root = self.models[chosen("")]

        def seeded(undo: Undo) -> Any:
            undo.by(self._restore)  # a run may write to buffers
            keep_random_numbers(undo)
            torch.manual_seed(self.seed)
            state = _random_state()
            undo.by(partial(setattr, self, "_resume", None))
            self._resume = resume
            with self._choosing(chosen, visitor), self._inside(mode):
                # Modes and emulation are per thread. In a new thread, no mode or emulation of either side is active.
                out = self._apart(lambda: called(root, _as_given(batch)))
            self.has_drawn |= not all(map(torch.equal, state, _random_state()))
            return out

        return undone(seeded)

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    def come(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a module with its own side's code or the other side's, and return the result."""
        if self._resume is not None:
            is_known, out = self._resume.look_up(door.name)
            if is_known:
                return out
        wanted = self._chosen(door.name)
        other = self.doors[wanted].get(door.name)
        if wanted == door.side or other is None:
            return self._visited(door, args, kwargs)
        given, named = self.crossed((args, kwargs), door.side, wanted)
        return self.crossed(self._apart(lambda: self._visited(other, given, named)), wanted, door.side)

    def quietly(self, door: Door, choice: Choice, given: Any, mode: Any = None) -> Any:
        """Call one module with a choice of sides for this call alone, without a visitor.

        given: positional and keyword arguments, in the form in which a's module takes them. The result has the form of
            a's result.
        """
        args, kwargs = self.crossed(given, "a", door.side)
        around, self.running = self.running, door.name
        try:
            with self._choosing(choice, None), self._inside(mode):
                return self.crossed(self._apart(lambda: door.run(*args, **kwargs)), door.side, "a")
        finally:
            self.running = around

    def crossed(self, tree: Any, before: str, after: str) -> Any:
        """Return arguments or results of one side in the form of the other side.

        Tensors in the dtype of one model are cast to the dtype of the other; finite numbers of a mask stay finite. All
        other tensors keep the marks that an emulation gave them.
        """
        from_dtype, to_dtype = self.dtypes[before], self.dtypes[after]

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if from_dtype is to_dtype or x.dtype is not from_dtype:
                # Without its mark, a tensor that is float32 on purpose would be rounded, and only in mixed runs.
                return alike(x, x.detach())
            wide = x.detach()
            # Masks hold the least number of float32. It would become -inf in float16, and -inf minus -inf is NaN.
            ends = torch.finfo(to_dtype)
            if ends.max < torch.finfo(from_dtype).max:
                wide = torch.where(wide.isinf(), wide, wide.clamp(ends.min, ends.max))
            return wide.to(to_dtype)

        with without_torch_function():  # the calling side's mode would report other dtypes
            return map_leaves(move, tree)

    def _visited(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        around, self.running = self.running, door.name
        counted.updates += self.is_mixed  # the other side's module may store the keys and values
        try:
            return door.run(*args, **kwargs) if self._visitor is None else self._visitor(door, args, kwargs)
        finally:
            self.running = around

    @contextmanager
    def _choosing(self, choice: Choice, visitor: Visitor | None) -> Iterator[None]:
        before = self._chosen, self._visitor
        self._chosen, self._visitor = choice, visitor
        try:
            yield
        finally:
            self._chosen, self._visitor = before

    @contextmanager
    def _inside(self, mode: Callable[[], Any] | None) -> Iterator[None]:
        before = self._modes
        self._modes = before if mode is None else [*before, mode]
        try:
            yield
        finally:
            self._modes = before

    def _apart(self, function: Callable[[], Result]) -> Result:
        """Run a function in a separate thread, in which the caller's torch modes and emulation are not active."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with ExitStack() as stack:
                    stack.enter_context(torch.no_grad())
                    stack.enter_context(noise_of_torch())  # the generator that all threads share
                    for autocast in self._autocast:
                        stack.enter_context(autocast())
                    for mode in self._modes:
                        stack.enter_context(mode())
                    results.append(function())
            except BaseException as error:
                errors.append(error)
            stored.append(counted.updates)

        stored: list[int] = []  # the number of writes to caches of keys and values in the thread
        thread = threading.Thread(target=run, name="fpsim.mismatch", daemon=True)
        emulation, active.emulation = active.emulation, None  # else it would warn of the work in another thread
        try:
            thread.start()
        finally:
            active.emulation = emulation
        thread.join()
        counted.updates += sum(stored)  # else the model around would report that it stored nothing
        if errors:
            raise errors[0]
        return results[0]


class Resume:
    """Cached results of the modules that run before the first changed one.

    kept: the results of each module, by name and number of the call, in a run in which no module was changed.
    changed: the modules whose own code is the other side's in this run.
    """

    def __init__(self, kept: Mapping[tuple[str, int], Any], changed: Iterable[str]) -> None:
        self._kept = kept
        self._changed = {*changed}
        self._around = {"", *("".join(n[:i]) for n in self._changed for i, c in enumerate(n) if c == ".")}
        self._calls: dict[str, int] = {}
        self._is_over = False

    def look_up(self, name: str) -> tuple[bool, Any]:
        """Return whether the result of this call of a module is known, and the result."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._is_over |= name in self._changed
        if self._is_over or name in self._around or (name, call) not in self._kept:
            return False, None
        return True, cloned(self._kept[name, call])


def _as_given(batch: Any) -> Any:
    """Return a batch with copies of objects that have a state, such as a key-value cache: a run writes into them."""
    if isinstance(batch, Mapping):
        return {name: x if isinstance(x, Tensor) else cloned(x) for name, x in batch.items()}
    return tuple(x if isinstance(x, Tensor) else cloned(x) for x in batch) if isinstance(batch, tuple | list) else batch


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the name on the first side for a module of the second: replace the longest prefix that is in `names`.

    A prefix consists of whole parts of the name.
    """
    parts = name.split(".") if name else []
    for n in range(len(parts), -1, -1):
        prefix = ".".join(parts[:n])
        if prefix in names:
            return ".".join(part for part in (names[prefix], *parts[n:]) if part)
    return name


def is_beginning(prefix: str, name: str) -> bool:
    """Return True if the parts of a module's name begin with the parts of `prefix`."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _require_found(names: Mapping[str, str], b: nn.Module, of_a: Iterable[str]) -> None:
    """Raise ValueError for a name in the mapping that no module has: with a typo, fewer modules would be compared."""
    both = [
        *((key, "b", [n for n, _ in b.named_modules()]) for key in names),
        *((v, "a", of_a) for v in names.values()),
    ]
    for name, side, known in both:
        if not any(is_beginning(name, other) for other in known):
            raise ValueError(
                f"names has {shown(name)}, and no module of {side} begins with it. Expected: {{beginning in b: "
                f"beginning in a}}, of {few([n for n in known if n], 3)}."
            )


def require_names(names: Any) -> dict[str, str]:
    """Return the mapping of names. Raises TypeError for anything else."""
    if names is None:
        return {}
    if not isinstance(names, Mapping) or not all(isinstance(x, str) for pair in names.items() for x in pair):
        raise TypeError(
            f"names={shown(names)}. Expected: a mapping from names of b's modules, or their beginnings, to a's: "
            f"{{'transformer.h': 'model.layers'}}."
        )
    return dict(names)


def _close(module: nn.Module, before: Any) -> None:
    if before is None:
        vars(module).pop(CALL_SLOT, None)
    else:
        vars(module)[CALL_SLOT] = before


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that most numbers in a model's parameters have; float32 for a model without parameters."""
    counts: dict[torch.dtype, int] = {}
    for p in model.parameters():
        if p.is_floating_point():
            counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def alike(x: Tensor, copy: Tensor) -> Tensor:
    """Give a tensor's copy the mark of its format, if an emulation has marked the tensor, and return the copy."""
    known = format_of(x)
    if known is not None:
        mark_like(copy, known)
    return copy


def cloned(tree: Any) -> Any:
    """Copy what a call may write to: tensors, and objects with a state, such as a cache of keys and values."""

    def copied(x: Any) -> Any:
        if isinstance(x, Tensor):
            return alike(x, x.detach().clone())
        has_state = hasattr(x, "__dict__") and not (callable(x) or isinstance(x, type))
        return copy.deepcopy(x) if has_state else x

    with without_torch_function():
        return map_leaves(copied, tree)
