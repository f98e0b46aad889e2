"""Record the effects of the formats on a running model: a tally of every site and role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fpsim.checks import require_mapping, require_whole, require_word, shown
from fpsim.emulation.entering import take_off_leftovers
from fpsim.emulation.scope import Listeners, Observer
from fpsim.insight.lost_updates import LostUpdates, unrecorded
from fpsim.insight.rows import Rows
from fpsim.kernels.statistics import TALLY_COUNTS
from fpsim.models.optimizers import quantized_optimizers
from fpsim.models.quantize import listeners
from fpsim.tensors.cuts import Cut
from fpsim.tensors.spec import Spec, any_spec, holds_numbers
from fpsim.tensors.tally import Accumulator, Tally, row_of
from fpsim.undoing import Block, Undo

__all__ = ["Recording", "is_of_role", "observe", "record"]

WHOLES = {  # the denominator of each count's share
    "underflow": "nonzero",
    **dict.fromkeys(("subnormal", "overflow", "nonfinite", "exact"), "count"),
    **dict.fromkeys(("scale_underflow", "scale_overflow"), "blocks"),
}
SHOWN = (
    "site",
    "role",
    "format",
    "rounding",
    "calls",
    "count",
    "underflow",
    "overflow",
    "nonfinite",
    "sqnr_db",
    "scale_bias",
    "dead_zone_share",
    "amax",
    "log2_scale_spread",
    "row_bias",
    "kurtosis",
)
LIKE_A_TALLY = ("amax", "sqnr_db", "scale_bias", "log2_scale_spread", "row_bias", "kurtosis")
SUMS = ("counts", "sums", "exponents", "shape")  # the tensors of an Accumulator


def is_of_role(name: str, role: str) -> bool:
    """True if a row belongs to a role. The rows of "error" include gradients of activations as operands."""
    return name == role or (role == "error" and name.endswith(".dy"))


def _loaded(
    state: Mapping[str, Any],
) -> tuple[int, Counter[tuple[str, str]], dict[tuple[str, str, Spec], Accumulator]]:
    """Return `every`, the counts of seen calls, and the sums of a state. Raises ValueError and others."""
    require_whole("state['every']", state["every"], 1)
    seen: Counter[tuple[str, str]] = Counter()
    for site, role, count in state["seen"]:
        _require_words(site, role)
        require_whole(f"the count of {shown(site)} in state['seen']", count, 0)
        seen[site, role] = int(count)
    sums: dict[tuple[str, str, Spec], Accumulator] = {}
    for saved in state["sums"]:
        _require_words(saved["site"], saved["role"])
        spec = any_spec(saved["format"], saved["rounding"], saved["overflow"], saved["random_bits"], saved["variant"])
        accumulator = Accumulator(spec, saved["counts"].device)
        require_whole("state['sums'][...]['calls']", saved["calls"], 0)
        accumulator.calls = int(saved["calls"])
        for name in SUMS:
            mine, its = getattr(accumulator, name), saved[name]
            if (mine.shape, mine.dtype) != (its.shape, its.dtype):
                raise ValueError(
                    f"The state has {name} of shape {tuple(its.shape)} and {its.dtype} at {shown(saved['site'])}. "
                    f"Expected: shape {tuple(mine.shape)} and {mine.dtype}."
                )
            # All tensors except `sums` hold counts.
            if name != "sums" and bool((its < 0).any()):
                raise ValueError(f"The state has numbers below 0 among its {name} at {shown(saved['site'])}.")
            mine.copy_(its)
        sums[saved["site"], saved["role"], spec] = accumulator
    return state["every"], seen, sums


def _require_words(site: object, role: object) -> None:
    if not isinstance(site, str) or not isinstance(role, str):
        raise ValueError(f"The state names the site {shown(site)} and the role {shown(role)}. Expected: two strings.")


class Recording:
    """Tallies of a running model by site and role; see `record`. It prints as a table, and converts to a DataFrame.

    updates: the lost updates of each quantised optimizer of the model; see `lost_updates`.
    """

    def __init__(self, every: int = 1) -> None:
        require_whole("every", every, 1)
        self._every = every
        self._seen: Counter[tuple[str, str]] = Counter()
        self._sums: dict[tuple[str, str, Spec], Accumulator] = {}
        self.updates: list[LostUpdates] = []

    def wants(self, site: str, role: str) -> bool:
        """True if this call of a site is tallied."""
        # The emulation calls this method once for each call of a site, so the method counts the calls.
        self._seen[site, role] += 1
        return (self._seen[site, role] - 1) % self._every == 0

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, cut: Cut | None = None) -> None:
        """Tally a tensor before and after it is rounded; the emulation calls this if `wants` has returned True."""
        # Tensors on device meta have no numbers to count.
        if not holds_numbers(before):
            return
        key = (site, role, spec)
        if key not in self._sums:
            self._sums[key] = Accumulator(spec, before.device)
        self._sums[key].add(before, after, cut, row_of(site) if is_of_role(role, "error") else None)

    def continue_from(self, other: Recording) -> None:
        """Continue another recording, for instance one that was saved and loaded."""
        if not isinstance(other, Recording):
            raise TypeError(f"other is {shown(other)}. Expected: a fpsim.Recording.")
        self._every, self._seen, self._sums = other._every, other._seen, other._sums

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics so far: tensors, numbers and strings, for `torch.load(..., weights_only=True)`."""
        sums = [
            {
                "site": site,
                "role": role,
                "format": repr(spec.fmt),
                "rounding": spec.rounding,
                "overflow": spec.overflow,
                "random_bits": spec.random_bits,
                "variant": spec.variant,
                "calls": accumulator.calls,
                **{name: getattr(accumulator, name) for name in SUMS},
            }
            for (site, role, spec), accumulator in self._sums.items()
        ]
        return {"every": self._every, "seen": [(*key, count) for key, count in self._seen.items()], "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the recording whose `state_dict` is `state`. A refused state changes nothing.

        Raises TypeError for anything but a mapping, ValueError for a mapping that is not the state of a recording.
        """
        require_mapping("state", state, "what state_dict() returns")
        # Nothing is assigned before the whole state has been checked.
        try:
            self._every, self._seen, self._sums = _loaded(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"state is {shown(state)}, which is not the state of a Recording ({type(error).__name__}: {error}). "
                f"Expected: what state_dict() returns."
            ) from error

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._seen.clear()
        self._sums.clear()

    def tallies(self) -> dict[tuple[str, str, str], Tally]:
        """Return {(site, role, rounding): Tally}, in the order in which the sites were first called."""
        return {(site, role, str(spec)): sums.result() for (site, role, spec), sums in self._sums.items()}

    def rows(self) -> Rows:
        """Return a row for each site and role; the rows print as a table. Copies the numbers to the host.

        count, nonzero, blocks, zero_blocks: counts of numbers, and of blocks that share a scale.
        underflow: share of the non-zero numbers that became zero. subnormal, overflow, nonfinite, exact: shares of all
        numbers. scale_underflow, scale_overflow: shares of all blocks. Each share has a count too: `underflow_count`.
        amax, sqnr_db, scale_bias, log2_scale_spread: as in a `Tally`. row_bias, kurtosis: also as in a `Tally`, but
        only for gradients of activations. scale_share, dead_zone_share, grid_share: the `error_shares` of a `Tally`.
        """
        rows = Rows()
        for (site, role, spec), sums in self._sums.items():
            t = sums.result()
            row: dict[str, Any] = {"site": site, "role": role, "format": str(spec.fmt), "rounding": spec.rounding}
            row["calls"] = sums.calls
            for name in TALLY_COUNTS:
                value = getattr(t, name)
                whole = WHOLES.get(name)
                if whole is not None:
                    row[name] = value / max(getattr(t, whole), 1)
                row[name if whole is None else f"{name}_count"] = value
            row.update({name: getattr(t, name) for name in LIKE_A_TALLY})
            row.update({f"{name}_share": share for name, share in t.error_shares._asdict().items()})
            rows.append(row)
        return rows

    def __len__(self) -> int:
        return len(self._sums)

    def __bool__(self) -> bool:
        # `__len__` is 0 before the first call, but `if recording:` asks whether there is a recording.
        return True

    def to_frame(self) -> Any:
        """Return the rows as a pandas.DataFrame."""
        return self.rows().to_frame()

    def plot(self, role: str = "error", value: str = "underflow") -> Any:
        """Plot a value of the rows by site, from input to output; needs matplotlib.

        role: the role whose rows are plotted. value: the column.
        Raises ValueError if no row has the role or the value.
        """
        if not isinstance(role, str):
            raise TypeError(f"role={shown(role)} is not a string. Expected: the role of a row, such as 'error'.")
        rows = [row for row in self.rows() if is_of_role(row["role"], role)]
        if not rows:
            known = ", ".join(dict.fromkeys(row["role"] for row in self.rows())) or "none yet"
            raise ValueError(f"No row has the role {shown(role)}. Known: {known}.")
        require_word("value", value, [name for name, entry in rows[0].items() if not isinstance(entry, str)])
        from fpsim.insight.pictures import plot_sites

        # Gradients arrive from output to input.
        if role in ("error", "weight_grad"):
            rows.reverse()
        return plot_sites(rows, value, f"{value}, role {role}")

    def __str__(self) -> str:
        rows = self.rows()
        shown_names = [name for name in SHOWN if name != "log2_scale_spread" or any(row["blocks"] for row in rows)]
        table = str(Rows({name: row[name] for name in shown_names} for row in rows))
        return "\n\n".join([table, *(f"lost updates:\n{lost}" for lost in self.updates)])

    __repr__ = __str__


def record(model: nn.Module, every: int = 1, into: Recording | None = None) -> AbstractContextManager[Recording]:
    """Tally the effects of rounding at every site of a quantised model, while the block runs it forward and backward.

    A site is a module's name and the operation in it ("layer1.conv1:conv2d"). A role is "weight", "activation", "error"
    or "weight_grad", or an operand of a product: "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x",
    and "output" for its result. Rows have the fields of a `Tally`, and each count as a share too. For a format whose
    numbers share scales they also have the effects on the scales. If a quantised optimizer has the model's parameters,
    `updates` counts the lost updates of each n-th step, unless `lost_updates` records them. Recording changes no
    result.

    Args:
        model: a model that `fpsim.quantize` returned.
        every: tally each n-th call of a site.
        into: an earlier recording to continue; its `every` replaces the argument `every`.

    Raises:
        ValueError: for a model that is not quantised, and for one that is being recorded already.

    >>> import fpsim, torch
    >>> model = fpsim.quantize(nn.Linear(3, 1, bias=False), "fp16")
    >>> with record(model) as recording:
    ...     (model(torch.ones(2, 3)) * 1e-8).sum().backward()
    >>> [(row["site"], row["underflow"], row["underflow_count"]) for row in recording.rows() if row["role"] == "error"]
    [(':linear', 1.0, 2)]
    """
    return Block(partial(_record, model, every, into))


def _record(model: nn.Module, every: int, into: Recording | None, undo: Undo) -> Recording:
    require_whole("every", every, 1)
    if into is not None and not isinstance(into, Recording):
        raise TypeError(f"into is {shown(into)}. Expected: a fpsim.Recording that goes on, or None for a new one.")
    recording = Recording(every) if into is None else into
    observe(model, recording, undo)
    for quantized in unrecorded(quantized_optimizers(model)):
        # A recording that is continued keeps the counts of its earlier blocks.
        known = next((lost for lost in recording.updates if lost.is_of(quantized)), None)
        lost = LostUpdates(quantized, recording._every) if known is None else known
        undo.by(lost.detach)
        lost.attach()
        if known is None:
            recording.updates.append(lost)
    return recording


def observe(model: nn.Module, observer: Observer, undo: Undo) -> None:
    """Show the roundings of a quantised model to an observer, until `undo` runs.

    Raises ValueError for a model that is not quantised, and for one that has an observer.
    """
    take_off_leftovers()
    registered = listeners(model)
    if any(listener.observer is not None for listener in registered):
        raise ValueError(
            "This model is being recorded already. Leave the other `with fpsim.record(...)` or "
            "`with fpsim.snapshots(...)` block first."
        )
    # The undo is registered before the change, so an interrupt between the two leaves no observer behind.
    undo.by(partial(_leave, registered, observer))
    for listener in registered:
        listener.observer = observer


def _leave(registered: list[Listeners], observer: Observer) -> None:
    # This may run twice. If another block has begun in the meantime, its observer stays.
    for listener in registered:
        if listener.observer is observer:
            listener.observer = None
