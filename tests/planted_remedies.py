"""Applying a remedy that `why` printed as tried, by other means than its own: does the step then work?"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from planted_models import Planted
from planted_steps import Case, Step
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fpsim
from fpsim.torch_internals import tensors_of

LOW = (torch.float16, torch.bfloat16)
MOVES = frozenset(
    "view reshape transpose permute expand contiguous unsqueeze squeeze flatten mT T getitem relu neg stack cat".split()
)

CASTS = ("to", "half", "bfloat16")


class AtSites(TorchFunctionMode):
    """Runs the operations at some sites in float32, or with other arguments; sites are counted as users read them.

    wide: sites that run in float32, or in `dtype`; what else reads their results gets them in the dtype from before.
    change: by the name of an operation at a site, what becomes of its arguments.
    before: of the results at sites, in the step without a remedy: `dtypes_of`.
    """

    def __init__(
        self,
        model: nn.Module,
        wide: list[str],
        change: dict[str, Callable[[tuple[Any, ...]], Any]],
        dtype: torch.dtype = torch.float32,
        before: dict[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self.before, self.dtypes = before or {}, dict[str, torch.dtype]()
        self.dtype, self.low = dtype, LOW if dtype is torch.float32 else (*LOW, torch.float32)
        self.model, self.wide, self.change = model, set(wide), change
        self.frames: list[tuple[str, dict[str, int]]] = [("", {})]
        self.inside = 0
        self.handles: list[Any] = []
        self.narrow: dict[int, tuple[Tensor, torch.dtype]] = {}
        self.missed = {*wide, *change}  # sites that no operation was at

    def __enter__(self) -> Any:
        for name, module in self.model.named_modules():
            self.handles.append(
                module.register_forward_pre_hook(lambda m, a, name=name: self.frames.append((name, {})))
            )
            self.handles.append(module.register_forward_hook(lambda m, a, o: (self.frames.pop(), None)[1]))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        name = name.strip("_") if name.startswith("__") else name
        of_property = getattr(getattr(func, "__self__", None), "__name__", "") if name == "get" else ""
        name = of_property if of_property in MOVES else name
        module, counts = self.frames[-1]
        if name == "reciprocal" and any(site.startswith(f"{module}:rdiv") for site in self.change):
            name = "rdiv"  # which a quantised model computes so
        ordinal = counts.get(name, 0)
        count = len(args[0]) if name.startswith("_foreach") else 2 if name == "lstm_cell" else 1
        sites = [f"{module}:{name}_{i}" if i else f"{module}:{name}" for i in range(ordinal, ordinal + count)]
        site = sites[0]
        self.missed.difference_update(sites)
        to_integers = name in ("to", "type") and any(
            isinstance(a, torch.dtype) and not a.is_floating_point for a in args
        )
        if (
            name in ("backward", "grad", "get", "set", "int", "long", "requires_grad_")
            or func is Tensor.__float__
            or to_integers
        ):
            return func(*args, **kwargs)  # an index is read from as many bits as there are
        if site in self.change:
            args, kwargs = self.change[site]((args, kwargs))
        is_float32 = self.dtype is torch.float32
        if is_float32 and func is Tensor.float and site not in self.wide and id(args[0]) in self.narrow:
            return args[0].clone()  # it is float32 by now
        moves = name in MOVES or (name == "to" and not any(isinstance(x, torch.dtype) for x in args))
        is_wide = not self.wide.isdisjoint(sites) or (moves and any(id(x) in self.narrow for x in tensors_of(args)))
        if is_wide:
            args = tuple(map(self._widened, args))
            kwargs = {k: self._widened(a) for k, a in kwargs.items()}
            with torch.autocast("cpu", enabled=False):
                out = args[0].to(self.dtype) if name in CASTS else func(*args, **kwargs)
        else:
            out = func(*map(self._narrowed, args), **{k: self._narrowed(a) for k, a in kwargs.items()})
            if name in CASTS and isinstance(out, Tensor) and self.before.get(site) in self.low:
                out = out.to(self.before[site])  # its dtype may be that of a result which is float32 here alone
        results = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        if results and results[0].is_floating_point():
            counts[name] = ordinal + count
            self.dtypes[site] = results[0].dtype
            if is_wide and (low := self.before.get(site)) in self.low:
                self.narrow.update({id(x): (x, low) for x in results if x.dtype is self.dtype})
        return out

    def _widened(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)([self._widened(y) for y in x])
        if isinstance(x, torch.dtype):
            return self.dtype if x in self.low else x
        return x.to(self.dtype) if isinstance(x, Tensor) and x.dtype in self.low else x

    def _narrowed(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)([self._narrowed(y) for y in x])
        return x.to(self.narrow[id(x)][1]) if id(x) in self.narrow else x


def dtypes_of(planted: Any) -> dict[str, torch.dtype]:
    """The dtype of what each site gives in the step as it is, which it runs."""
    with AtSites(planted.model, [], {}) as mode, suppress(ValueError):  # a distribution refuses NaN
        planted.step()
    return mode.dtypes  # type: ignore[no-any-return]


OF_DTYPES = {"float32": torch.float32, "format": torch.float32, "float64": torch.float64}
OF_OPTIMIZER = ("master", "stochastic", "optimizer eps", "rate")


def can_be_applied(case: Case, remedy: dict[str, Any]) -> bool:
    """Whether `works` has a means for it: not inside of an LSTM, nor for an optimizer that it does not know."""
    has_optimizer = remedy["remedy"] not in OF_OPTIMIZER or case.build().optimizer is not None
    return case.name != "a_sentence_without_words" and has_optimizer


def works(case: Case, found: fpsim.Why, which: int = 0) -> bool:
    """Whether a remedy that was printed as tried works on the step made anew."""
    planted, remedy = case.build(), found.tried[which]
    if remedy["remedy"] in (*OF_OPTIMIZER, "clear"):
        return is_cured_update(planted, remedy)
    before = dtypes_of(case.build()) if remedy["remedy"] in OF_DTYPES else {}
    cures = is_cured if isinstance(planted, Planted) else is_cured_loop
    return cures(planted, found, which, before)  # type: ignore[arg-type]


def is_cured_loop(planted: Step, found: fpsim.Why, which: int, before: dict[str, torch.dtype]) -> bool:
    """As `is_cured`, of a whole loop: its loss is the printed one, and parameters and gradients are finite."""
    remedy = found.tried[which]

    mode: TorchFunctionMode = Scaled(remedy["value"] if remedy["remedy"] == "scale" else 1.0)
    if remedy["remedy"] == "scale" and planted.scaler is not None:
        planted.scaler._init_scale, mode = remedy["value"], AtSites(planted.model, [], {})
    if remedy["remedy"] in OF_DTYPES:
        if "policy() has it" in str(found):
            fpsim.set_policy(planted.model, found.policy())
        else:
            mode = AtSites(planted.model, remedy["sites"], {}, OF_DTYPES[remedy["remedy"]], before)
    elif remedy["remedy"] != "scale":
        mode = AtSites(planted.model, [], _changes(found, remedy, "fp32"))
    with mode:
        loss: Any = planted.step()
    if loss is None:
        return _is_finite(planted.model)
    near = 2**-10  # half an ulp of fp16, and twice
    same = remedy["loss"] is None or math.isclose(loss, remedy["loss"], rel_tol=near)
    return same and math.isfinite(loss) and _is_finite(planted.model)


def is_cured_by_the_rule(make: Callable[[str], Step], fmt: str, found: fpsim.Why, which: int) -> bool:
    """Whether the model's own gradients are there and four times nearer to float64's, and so is the loss.

    A gradient that was nearer than a half is left out, as is a loss that rounding alone moves.
    """
    remedy, planted = found.tried[which], make(fmt)
    loss, wanted = _loss_and_gradients(make("float64"))
    before, was = _loss_and_gradients(make(fmt))
    by = remedy["value"] if remedy["remedy"] == "scale" else 1.0
    mode: TorchFunctionMode = AtSites(planted.model, [], _changes(found, remedy, "fp32"))
    if planted.scaler is not None:
        by, start = remedy["value"], planted.scaler.get_scale()
        planted.scaler._init_scale = by
        was = {name: g / start for name, g in was.items()}
    elif remedy["remedy"] == "scale":
        mode = Scaled(by)
    elif remedy["remedy"] in OF_DTYPES and "policy() has it" in str(found):
        fpsim.set_policy(planted.model, found.policy() if which == 0 else found._remedies[which].policy)
    elif remedy["remedy"] in OF_DTYPES:
        mode = AtSites(planted.model, remedy["sites"], {}, OF_DTYPES[remedy["remedy"]], dtypes_of(make(fmt)))
    with mode:
        after, now = _loss_and_gradients(planted)
    truth = {name: g for name, g in wanted.items() if bool(g.any())}
    if not all(name in now and bool(now[name].any()) and bool(now[name].isfinite().all()) for name in truth):
        return False
    far = {name: _error(was.get(name), g) for name, g in truth.items()}
    left = {name: _error(now[name] / by, g) for name, g in truth.items()}
    is_nearer = all(left[name] <= min(error, 1.0) / 4 for name, error in far.items() if not error < 0.5)
    gap = abs(before - loss) if math.isfinite(before) else abs(loss)
    return is_nearer and abs(after - loss) <= max(gap / 4, 0.01 * abs(loss))


def _loss_and_gradients(planted: Step) -> tuple[float, dict[str, Tensor]]:
    loss: Any = planted.step()
    named = planted.model.named_parameters()
    return float(loss.detach()), {name: p.grad.double() for name, p in named if p.grad is not None}


def _error(x: Tensor | None, truth: Tensor) -> float:
    error = math.inf if x is None else float((x - truth).norm() / truth.norm())
    return error if error == error else math.inf


class Scaled(TorchFunctionMode):
    """Begins backward passes at the loss times a number."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "backward":
            args = (args[0] * self.by, *args[1:])
        return func(*args, **(kwargs or {}))


def is_cured(planted: Planted, found: fpsim.Why, which: int, before: dict[str, torch.dtype]) -> bool:
    """Whether the step is finite, or does what it did not do, under the remedy; the loss must be the printed one."""
    remedy = found.tried[which]
    assert found.cause is not None
    if remedy["remedy"] == "scale":
        planted.scale *= remedy["value"]
        planted.step()
        return _is_finite(planted.model)
    if planted.fmt not in ("half", "bfloat16", "autocast", "float32") and remedy["remedy"] in OF_DTYPES:
        fpsim.set_policy(planted.model, found.policy())
        return _runs(planted, remedy)
    is_rounded = planted.fmt not in ("half", "bfloat16", "autocast", "float32", "mxfp4")
    change = _changes(found, remedy, planted.fmt if is_rounded else "fp32")
    is_dtype = remedy["remedy"] in OF_DTYPES
    dtype, sites = OF_DTYPES.get(remedy["remedy"], torch.float32), remedy["sites"] if is_dtype else []
    with AtSites(planted.model, sites, change, dtype, before):
        return _runs(planted, remedy)


def _runs(planted: Planted, remedy: dict[str, Any]) -> bool:
    losses: list[float] = []
    original = planted.loss

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = original(out, y)
        losses.append(float(value.detach()) * planted.scale)
        return value

    planted.loss = loss
    planted.step()
    # What is put in here is not rounded to an emulated format, and `why` rounds it: half an ulp of fp16 is 2**-11.
    near = 1e-5 if planted.fmt in ("float32", "half", "bfloat16", "autocast") else 2**-10
    same = remedy["loss"] is None or math.isclose(losses[0], remedy["loss"], rel_tol=near, abs_tol=1e-7)
    return same and math.isfinite(losses[0]) and _is_finite(planted.model)


def _is_finite(model: nn.Module) -> bool:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(x.isfinite().all()) for x in (*model.parameters(), *gradients))


def _changes(found: fpsim.Why, remedy: dict[str, Any], fmt: str) -> dict[str, Any]:
    """What becomes of the arguments at each site; what is computed here is in the format, as in the model's code."""
    value, kind = remedy["value"], remedy["remedy"]
    if kind in OF_DTYPES:
        return {}

    def in_format(x: Tensor) -> Tensor:
        return x if fmt == "fp32" else fpsim.round_to(x, fmt)

    def changed(given: Any) -> Any:
        args, kwargs = given
        first = args[0]
        if kind == "eps":
            args = tuple(value if isinstance(a, float) and 0 < a < value else a for a in args)
            has_eps = any(name in remedy["sites"][0] for name in ("normalize", "cosine_similarity", "_norm"))
            kwargs = {**kwargs, "eps": value} if has_eps else kwargs
        elif kind == "clamp" and "inside its domain" in remedy["what"]:
            low, high = (-1.0, math.inf) if "log1p" in remedy["sites"][0] else (0.0, 1.0)
            args = (in_format(first.clamp(low + value, high - value)), *args[1:])
        elif kind == "fill" and value > -math.inf:
            args = tuple(a.clamp(min=value) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        elif kind == "clamp":
            is_divisor = "div" in remedy["sites"][0]
            args = (first, args[1].clamp(min=1)) if is_divisor else (in_format(first.clamp(min=value)), *args[1:])
        elif kind == "divisor":
            at = 1 if ":div" in remedy["sites"][0] else 0  # of 1 / x, which is a reciprocal or "rdiv", the first
            args = (*args[:at], in_format(args[at].masked_fill(args[at] == 0, value)), *args[at + 1 :])
        elif kind == "infinity":
            args, kwargs = args[:6], {**kwargs, "zero_infinity": True}
        elif kind == "mask" and "key_padding_mask" in kwargs:
            mask = kwargs["key_padding_mask"]  # of numbers by here
            whole = (mask == -torch.inf).all(-1, keepdim=True)
            kwargs = {**kwargs, "key_padding_mask": mask.masked_fill(whole, 0.0)}
        elif kind == "mask":
            rows = (first == -torch.inf).all(1 if "cross_entropy" in remedy["sites"][0] else -1, keepdim=True)
            args = (torch.where(rows, 0.0, first).to(first.dtype), *args[1:])
        elif kind == "slope":
            low, high = (1.0, math.inf) if "cosh" in remedy["sites"][0] else (-1.0, 1.0)
            at = 1 if "xlog" in remedy["sites"][0] else 0  # x log y has a border in y
            inside = first.clamp(low, high)
            narrowed = inside + value if high == math.inf else inside * (1 - value)
            moved = args[at] + value if "added" in remedy["what"] else narrowed
            if "diagonal" in remedy["what"]:
                moved = first + torch.diag(value * torch.arange(1, len(first) + 1))
            args = (*args[:at], in_format(moved), *args[at + 1 :])
        return args, kwargs

    return dict.fromkeys(remedy["sites"], changed)


def is_cured_update(planted: Planted | Step, remedy: dict[str, Any]) -> bool:
    name, value = remedy["remedy"], remedy["value"]
    if name == "clear":
        planted.model.zero_grad()
        planted.step()
        return _is_finite(planted.model)
    planted.step()
    optimizer, model = planted.optimizer, planted.model
    before = [p.detach().clone() for p in model.parameters()]
    if name in ("master", "stochastic"):
        group = {k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "betas", "eps")}
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        type(optimizer)(masters, **group).step()
        if name == "master":
            pairs = [(m, b) for m, b in zip(masters, before, strict=True) if m.grad is not None]
            moved = sum(int((m.detach() != b.float()).sum()) for m, b in pairs)
            wanted = sum(int(m.grad.count_nonzero()) for m, _ in pairs)
            return moved >= 0.5 * wanted and all(bool(m.isfinite().all()) for m, _ in pairs)
        fmt = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(before[0].dtype, planted.fmt)
        moved = sum(
            int((fpsim.round_to(m.detach(), fmt, "stochastic") != b).sum())
            for m, b in zip(masters, before, strict=True)
        )
        return moved > 0
    for group in optimizer.param_groups:
        group.update({"eps": value} if name == "optimizer eps" else {"lr": group["lr"] * value})
    optimizer.step()
    return all(bool(p.isfinite().all()) for p in model.parameters())
