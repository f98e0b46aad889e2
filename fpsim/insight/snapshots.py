"""Keep whole tensors of chosen sites, before and after they are rounded: a safetensors file for each n-th call."""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor, nn

from fpsim.checks import pip_install, require_iterable, require_whole, shown
from fpsim.formats.blocks import Format, as_format
from fpsim.insight.recording import is_of_role, observe
from fpsim.tensors.cuts import Cut
from fpsim.tensors.spec import Spec, holds_numbers
from fpsim.undoing import Block, Undo

__all__ = ["Snapshot", "Snapshots", "safetensors_package", "snapshots", "write_tensors"]

NAMED = 12  # how many sites a warning names


class Snapshot(NamedTuple):
    """A tensor of one site, before and after it was rounded.

    site, role: the site and the role of the tensor, as in `record`.
    format, rounding: the format to which it was rounded, and the rounding.
    call: the number of the site's call, from 1 on.
    before, after: the tensor. Gradients have their true size, even if they are rounded at a scale.
    """

    site: str
    role: str
    format: str
    rounding: str
    call: int
    before: Tensor
    after: Tensor

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Snapshot:
        """Load the snapshot in a file. Raises ValueError for a file that is not a snapshot or cannot be read.

        Raises ImportError without safetensors.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path is {shown(path)}. Expected: the path of a file that fpsim.snapshots has written.")
        safetensors = safetensors_package()
        try:
            with safetensors.safe_open(path, "pt") as file:
                words, before, after = file.metadata() or {}, file.get_tensor("before"), file.get_tensor("after")
            site, role, fmt, rounding = (words[name] for name in ("site", "role", "format", "rounding"))
            return Snapshot(site, role, fmt, rounding, int(words["call"]), before, after)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"path={shown(str(path))} is not a snapshot ({type(error).__name__}: {error}). Expected: a file that "
                f"fpsim.snapshots has written."
            ) from None

    def plot(self) -> Any:
        """Plot how many elements have each exponent, and how many of these became zero; needs matplotlib."""
        from fpsim.insight.pictures import plot_magnitudes

        before = self.before.double().abs()
        is_counted = (before > 0) & before.isfinite()
        # Significands of frexp are in [0.5, 1), and those of a format in [1, 2).
        exponents = torch.frexp(before[is_counted])[1] - 1
        lost = exponents[self.after.double()[is_counted] == 0]
        counts, lost_counts = (Counter(x.tolist()) for x in (exponents, lost))
        fmt = as_format(self.format)
        title = f"{self.site} {self.role}, {fmt} {self.rounding}, call {self.call}: {self.before.numel():,} elements, "
        title += f"{int((before == 0).sum()):,} of them zero"
        return plot_magnitudes(counts, lost_counts, _range_of(fmt), title)


def _range_of(fmt: Format) -> dict[str, float]:
    """Return log2 of a format's smallest and largest magnitude; {} for a format whose numbers share scales."""
    if not all(hasattr(fmt, name) for name in ("smallest", "largest")):
        return {}
    return {"smallest": math.log2(fmt.smallest), "largest": math.log2(fmt.largest)}  # type: ignore[union-attr]


class Snapshots:
    """The files that a block of `snapshots` writes.

    folder: the folder of the files.
    files: the files' paths, in the order of the calls.
    """

    def __init__(self, folder: Path, sites: tuple[str, ...], roles: tuple[str, ...], every: int) -> None:
        self.folder, self.files = folder, list[Path]()
        self._sites, self._roles, self._every = sites, roles, every
        self._seen: Counter[tuple[str, str]] = Counter()

    def wants(self, site: str, role: str) -> bool:
        """True if this call of a site is kept."""
        # Calls are counted at all sites, because `warn_if_empty` names those that were not chosen.
        self._seen[site, role] += 1
        is_due = (self._seen[site, role] - 1) % self._every == 0
        return is_due and self._is_chosen(site, role)

    def _is_chosen(self, site: str, role: str) -> bool:
        is_of_roles = any(is_of_role(role, wanted) for wanted in self._roles)
        return is_of_roles and any(fnmatchcase(site, pattern) for pattern in self._sites)

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, cut: Cut | None = None) -> None:
        """Write a tensor before and after it is rounded; the emulation calls this if `wants` has returned True."""
        if not holds_numbers(before):
            return
        call = self._seen[site, role]
        words = {"site": site, "role": role, "format": repr(spec.fmt), "rounding": spec.rounding, "call": str(call)}
        # Names of sites have characters that some file systems refuse, such as the colon before an operation.
        path = self.folder / f"{quote(site, safe=' ')}.{role}.{call:06d}.safetensors"
        write_tensors(path, words, {"before": before, "after": after})
        self.files.append(path)

    def warn_if_empty(self) -> None:
        """Warn if sites ran, but none of them was chosen."""
        if not self._seen or any(self._is_chosen(*key) for key in self._seen):
            return
        seen = sorted({f"{site} {role}" for site, role in self._seen})
        more = f", and {len(seen) - NAMED} more" if len(seen) > NAMED else ""
        warnings.warn(
            f"No snapshot was written: sites={list(self._sites)} with roles={list(self._roles)} match none of those "
            f"that ran: {', '.join(seen[:NAMED])}{more}.",
            stacklevel=5,  # the end of the user's block: three functions of `fpsim.undoing` are in between
        )

    def __len__(self) -> int:
        return len(self.files)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Snapshots({str(self.folder)!r}, {len(self.files)} files)"


def snapshots(
    model: nn.Module,
    folder: str | os.PathLike[str],
    sites: str | Iterable[str] = "*",
    roles: str | Iterable[str] = "error",
    every: int = 1,
) -> AbstractContextManager[Snapshots]:
    """Keep whole tensors of a quantised model, before and after they are rounded, while the block runs it.

    Each file is written whole or not at all, and named by site, role and call: "layer1.conv1%3Aconv2d.error.000001
    .safetensors" has the tensors `before` and `after`, and site, role, format, rounding and call as its metadata. The
    safetensors package reads the file, and so does `fpsim.Snapshot.load`, whose result can plot a histogram. The host
    waits for each tensor that is kept; other tensors cost nothing. Snapshots change no result.

    Args:
        model: a model that `fpsim.quantize` returned.
        folder: the folder for the files; it is made if it does not exist. Files with the same names are replaced.
        sites: one or several names of sites, as in `record`, with * for any characters.
        roles: one or several of "weight", "activation", "error", "weight_grad", or operands of products such as
            "dgrad.dy". "error" includes gradients of activations that enter products as operands.
        every: keep the first call of a site and each n-th call after it; in a training, these are the calls of each
            n-th step.

    Raises:
        ValueError: for a model that is not quantised, and for one that is being recorded already.
        ImportError: without safetensors, which the extra `export` brings.

    >>> import fpsim, tempfile
    >>> model = fpsim.quantize(nn.Linear(2, 1, bias=False), "fp16")
    >>> with tempfile.TemporaryDirectory() as folder, snapshots(model, folder, ":linear") as kept:
    ...     (model(torch.ones(2, 2)) * 1e-8).sum().backward()
    ...     found = fpsim.Snapshot.load(kept.files[0])
    >>> found.site, found.call, found.before.flatten(), found.after.flatten()
    (':linear', 1, tensor([1.0000e-08, 1.0000e-08]), tensor([0., 0.]))
    """
    return Block(partial(_snapshots, model, folder, sites, roles, every))


def _snapshots(model: nn.Module, folder: Any, sites: Any, roles: Any, every: int, undo: Undo) -> Snapshots:
    if not isinstance(folder, str | os.PathLike) or not str(folder).strip():
        raise TypeError(f"folder is {shown(folder)}. Expected: the path of a folder, such as 'runs/snapshots'.")
    require_whole("every", every, 1)
    safetensors_package()
    chosen = _words("sites", sites, "['layer1.*']"), _words("roles", roles, "['error', 'weight_grad']")
    kept = Snapshots(Path(folder), *chosen, every)
    undo.by(kept.warn_if_empty)
    observe(model, kept, undo)
    return kept


def _words(name: str, given: Any, example: str) -> tuple[str, ...]:
    """Return the strings of an argument that is one string or several. Raises an error for anything else."""
    words = (given,) if isinstance(given, str) else tuple(require_iterable(name, given, example))
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"{name} holds {shown(word)}, which is not a string. Expected: such as {example}.")
    if not words or not all(words):
        raise ValueError(f"{name}={shown(given)} names nothing. Expected: such as {example}.")
    return words


def safetensors_package() -> Any:
    """Return the safetensors package. Raises ImportError if it is not installed: only the extra `export` has it."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            f"Snapshots and dumps need safetensors, which is not installed: {pip_install('export')}."
        ) from None
    return safetensors


def write_tensors(path: Path, words: dict[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    # Copies are written, because safetensors refuses tensors that share memory. If nothing was rounded, `before` and
    # `after` are one tensor.
    own = {name: x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, x in tensors.items()}
    content = safetensors_package().torch.save(own, words)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is written next to the target and then renamed, so that a reader finds a whole file or none. fsync comes
    # before the rename: else the rename may reach the disk before the content, and a crash would leave an empty file.
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
