"""Dumps: files with the activations of a run, written from any torch model and read as one side of `mismatch`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.border import require_memory, require_module
from fpsim.checks import few, shown
from fpsim.insight.engines.msprobe import is_msprobe, read_msprobe
from fpsim.insight.engines.recorded import Entry, Steps, batched_steps, flat_steps, inputs_of, outputs_of
from fpsim.insight.snapshots import safetensors_package, write_tensors
from fpsim.insight.stepping import called, is_function
from fpsim.tensors.noise import keep_random_numbers
from fpsim.torch_modes import keeps_grad_mode, without_torch_function
from fpsim.undoing import Undo, undone

__all__ = ["LOGPROBS", "MASK", "TOKENS", "Dump", "dump", "opened"]

VERSION = 1
METADATA = "fpsim_dump"  # the key of the JSON in the metadata of the file
TOKENS, MASK = "tokens", "mask"
LOGPROBS = "logprobs"  # of each token, given the tokens before it; for engines that return no logits
# "<module>.in0", ".in.hidden_states", ".out0.1", "@2" for the third call. The longest possible module name is taken,
# because a module may be called `out`.
KEY = re.compile(r"(?:(?P<module>.+)\.)?(?P<path>(?:in|out)(?:\d+(?:\.\w+)*|(?:\.\w+)+))(?:@(?P<call>\d+))?")
WORDS = {  # from the dtypes of safetensors' headers to torch's
    word: getattr(torch, name)
    for word, name in (
        pair.split("=")
        for pair in (
            "F64=float64 F32=float32 F16=float16 BF16=bfloat16 F8_E4M3=float8_e4m3fn F8_E4M3FNUZ=float8_e4m3fnuz "
            "F8_E5M2=float8_e5m2 F8_E5M2FNUZ=float8_e5m2fnuz F8_E8M0=float8_e8m0fnu BOOL=bool U8=uint8 I8=int8 "
            "I16=int16 U16=uint16 I32=int32 U32=uint32 I64=int64 U64=uint64"
        ).split()
    )
}
DTYPES = {*WORDS.values()}
MOVES = {  # methods of a cache after which a row's next call does not continue its last one
    "reorder_cache": "Beam search moves sequences from row to row between calls",
    "crop": "Assisted decoding takes tokens back between calls",
}
MOST_HEADER = 100_000_000  # bytes; safetensors' own limit


class Key(NamedTuple):
    """Parts of the name of a tensor in a dump."""

    module: str
    path: str
    call: int


def key_of(name: str) -> Key | None:
    """Return the parts of a tensor's name; None for a name of another form.

    >>> key_of("model.layers.0.mlp.out0@2")
    Key(module='model.layers.0.mlp', path='out0', call=2)
    """
    found = KEY.fullmatch(name)
    return None if found is None else Key(found["module"] or "", found["path"], int(found["call"] or 0))


def named(key: Key) -> str:
    return f"{key.module}{'.' * bool(key.module)}{key.path}{f'@{key.call}' * bool(key.call)}"


# Writing


@keeps_grad_mode
def dump(model: nn.Module, batch: Any, file: str | os.PathLike[str], *, engine: str = "torch") -> Dump:
    """Write the inputs and the outputs of each module of a model, as one side of `fpsim.mismatch`.

    The file is a safetensors file. A tensor is named after its module: "model.norm.in0" is the first argument,
    "model.norm.in.hidden_states" a keyword argument, "model.norm.out0" the result. The names of further calls end with
    "@1", "@2". `tokens` holds the run's ids, and `mask` is false at padding. The metadata has JSON under "fpsim_dump":
    the version of this layout, the engine, the model's dtype, the modules in the order of their calls, and the tensors
    that the format cannot hold. The file is written whole or not at all.

    The model runs in eval mode, without gradients, and is left as it was. All tensors stay in memory until the file is
    written, so choose a short batch.

    Args:
        model: any module, quantised by fpsim or not.
        batch: the arguments of the model, as for `mismatch`; or a function that calls the model, such as
            `lambda: model.generate(ids, max_new_tokens=8)`, whose calls continue one another.
        file: the path; a file there is replaced.
        engine: a word for the metadata.

    Returns:
        The opened `Dump`.

    Raises:
        TypeError: for an argument that is not a module, a path or a batch.
        ValueError: for a function that never calls the model, and for a generation whose calls do not continue one
            another: beam search, assisted decoding, use_cache=False.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = dump(model, torch.tensor([[1, 2, 3]]), f"{folder}/rollout.safetensors")
    ...     print(found, found["1.out0"].shape)
    torch's dump of 3 tokens, float32: 3 modules, 6 tensors torch.Size([1, 3, 8])
    """
    require_module(model)
    require_memory(model)
    if not isinstance(engine, str) or not engine:
        raise TypeError(f"engine={shown(engine)}. Expected: a word, such as 'torch'.")
    if not is_function(batch) and not isinstance(batch, Tensor | tuple | list | Mapping):
        raise TypeError(
            f"batch={shown(batch)}. Expected: ids, a tuple, a mapping, or a function that calls the model, such as "
            f"lambda: model.generate(ids, max_new_tokens=8)."
        )
    path = _path(file)
    recorder = _Recorder()
    undone(partial(_run, model, batch, recorder))
    # The hooks are on this model's modules. A compiled or copied model has other modules, so its `generate` would
    # leave an empty file.
    if not recorder.calls.get(""):
        raise ValueError(
            f"The function never called {type(model).__name__} itself. Expected: one that calls this model, and not a "
            f"copy of it or its compiled form: lambda: model.generate(ids)."
        )
    tensors = recorder.tensors
    _require_new_tokens(tensors)
    steps = _steps_of_calls({key: x for name, x in tensors.items() if (key := key_of(name)) and not key.module})
    if steps is not None:
        tensors = tensors | {TOKENS: steps.tokens, MASK: steps.mask}
    words = {
        "version": VERSION,
        "engine": engine,
        "dtype": str(_dtype_of(model)).removeprefix("torch."),
        "modules": recorder.order,
        "left_out": recorder.left_out,
    }
    write_tensors(path, {METADATA: json.dumps(words)}, tensors)
    return Dump(path)


class _Recorder:
    """Hooks that keep copies of inputs and outputs. The copies are made at once: code may write into a tensor later."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.calls: dict[str, int] = {}
        self.left_out: dict[str, str] = {}
        self._open: dict[str, list[int]] = {}
        self._watched: list[tuple[dict[str, Any], str]] = []

    def before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        self._open.setdefault(name, []).append(call)
        if not name:
            self._watch(*args, *kwargs.values())
        if call == 0:
            self.order.append(name)
        self._keep(name, call, inputs_of(args, kwargs))

    def _watch(self, *given: Any) -> None:
        """Make the methods in MOVES raise ValueError for caches among the arguments: a dump cannot represent the moves.

        The methods are replaced in the objects and not in their classes, because this module does not import the
        library of these classes.
        """
        for cache in given:
            if isinstance(cache, Tensor) or not callable(getattr(cache, "reorder_cache", None)):
                continue
            for verb, words in MOVES.items():
                if verb not in vars(cache):
                    vars(cache)[verb] = partial(_refuse_to_move, words)
                    self._watched.append((vars(cache), verb))

    def leave(self) -> None:
        """Restore the caches."""
        for own, verb in self._watched:
            own.pop(verb, None)

    def after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._keep(name, self._open[name].pop(), outputs_of(output))

    def _keep(self, name: str, call: int, leaves: Iterator[tuple[str, Tensor]]) -> None:
        with without_torch_function():
            for path, x in leaves:
                key = named(Key(name, path, call))
                if x.dtype not in DTYPES or x.layout is not torch.strided or x.is_quantized or x.is_meta:
                    self.left_out[key] = f"{str(x.dtype).removeprefix('torch.')}, {type(x).__name__}, {x.layout}"
                    continue
                self.tensors[key] = x.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _refuse_to_move(words: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"{words}, and a dump puts the calls of one row after one another. Expected: sampling or greedy decoding, as "
        f"generate(ids, num_beams=1) without an assistant."
    )


def _require_new_tokens(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a call of the model repeats the tokens of the call before it."""
    by_call = {k.call: x for n, x in tensors.items() if (k := key_of(n)) and not k.module and _has_ids(k, x)}
    ids = [by_call[call] for call in sorted(by_call)]
    for before, after in pairwise(ids):
        n = before.shape[1]
        # The rows may be in another order, as in a beam search.
        if after.shape[1] > n and {*map(tuple, after[:, :n].tolist())} <= {*map(tuple, before.tolist())}:
            raise ValueError(
                f"A call with {after.shape[1]} tokens in a row begins with the {n} of the call before it, and a dump "
                f"puts the calls of one row after one another. Expected: generate(ids, use_cache=True), whose calls "
                f"have the new tokens alone; or one call with all tokens."
            )


def _has_ids(key: Key, x: Tensor) -> bool:
    return key.path in ("in0", "in.input_ids") and x.dim() == 2 and not x.is_floating_point()


def _run(model: nn.Module, batch: Any, recorder: _Recorder, undo: Undo) -> None:
    keep_random_numbers(undo)
    undo.by(recorder.leave)
    for name, module in model.named_modules():
        undo.by(partial(setattr, module, "training", module.training))
        module.training = False
        for handle in (
            # This hook runs before the module's own hooks, whose casts are part of the module.
            module.register_forward_pre_hook(partial(recorder.before, name), with_kwargs=True, prepend=True),
            module.register_forward_hook(partial(recorder.after, name), with_kwargs=True),
        ):
            undo.by(handle.remove)
    with torch.no_grad():
        batch() if is_function(batch) else called(model, batch)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _path(file: Any) -> Path:
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        raise TypeError(f"file is {shown(file)}. Expected: a path, such as 'rollout.safetensors'.")
    path = Path(file)
    if "\0" in os.fsdecode(file):  # is_dir returns False for it, so the error would come only after the run
        raise ValueError(f"file={shown(file)} has a null byte. Expected: a path for a new file.")
    try:
        is_taken = path.is_dir()
    except (OSError, ValueError) as error:
        raise ValueError(f"file={shown(file)} cannot be looked at: {error}. Expected: a path for a new file.") from None
    if is_taken:
        raise IsADirectoryError(f"{shown(str(file))} is a folder. Expected: the path of a file in it.")
    return path


# Reading


class Dump:
    """An opened dump: a safetensors file of `dump` or of a hook, or msprobe's dump.json with its tensors.

    `dump[name]` reads a tensor. Iteration yields the names.

    path: the file's path. engine, dtype, version: from the file's metadata; None if the metadata lacks them.
    modules: names in the order of their first calls, as far as the file tells.
    left_out: the tensors that the writer could not keep, each with the reason.
    is_statistics: whether the dump has only extremes, means and norms.

    Raises:
        TypeError: for a value that is not a path.
        FileNotFoundError: for a path that does not exist.
        ValueError: for a file that is not a dump, or that has a dtype unknown to torch.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise TypeError(f"path is {shown(path)}. Expected: the path of a dump, such as 'rollout.safetensors'.")
        self.path = Path(path)
        try:
            is_there = self.path.exists()
        except (OSError, ValueError) as error:
            raise ValueError(f"{shown(str(path))} cannot be looked at: {error}. Expected: a path of a dump.") from None
        if not is_there:
            raise FileNotFoundError(
                f"There is no file {shown(str(path))}. Expected: what fpsim.dump(model, batch, file) has written, or "
                f"the dump.json of msprobe."
            )
        self.engine: str | None = None
        self.dtype: str | None = None
        self.version: int | None = None
        self.modules: list[str] = []
        self.left_out: dict[str, str] = {}
        self.is_statistics = False
        self.entries: dict[str, Entry] = {}
        if is_msprobe(self.path):
            found = read_msprobe(self.path)
            self.entries, self.engine, self.left_out = found.entries, found.engine, found.left_out
            self.is_statistics = found.is_statistics
        else:
            self._open_safetensors()
        self._by_module: dict[str, dict[Key, Entry]] = {}
        for name, entry in self.entries.items():
            key = key_of(name)
            if key is not None:
                self._by_module.setdefault(key.module, {})[key] = entry
        self.modules = [*dict.fromkeys([name for name in self.modules if name in self._by_module] + [*self._by_module])]
        if not self.modules:
            raise ValueError(
                f"{self.path.name} has no tensor that is named as of a module "
                f"({few([*self.entries], 3) or 'it is empty'}). Expected: "
                f"names such as 'model.norm.in0' and 'model.norm.out0', as fpsim.dump writes them."
            )

    def _open_safetensors(self) -> None:
        header = _header(self.path)
        words = _metadata(self.path, header.pop("__metadata__", {}))
        self.version, self.engine, self.dtype = words.get("version"), words.get("engine"), words.get("dtype")
        self.modules, self.left_out = [*words.get("modules", [])], dict(words.get("left_out", {}))
        for name, of in header.items():
            dtype, shape = WORDS[of["dtype"]], tuple(of["shape"])
            self.entries[name] = Entry(shape, dtype, partial(_read, self.path, name))

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries.get(name)
        if entry is None:
            raise KeyError(f"{self.path.name} has no {shown(name)}. It has {few([*self.entries], 3)}.")
        if entry.read is None:
            raise ValueError(
                f"{self.path.name} has statistics of {shown(name)} alone. Expected: a dump of tensors, which msprobe "
                f'writes with "task": "tensor".'
            )
        return entry.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def of(self, module: str) -> dict[Key, Entry]:
        """Return the entries of a module, of all its calls."""
        return self._by_module.get(module, {})

    def steps(self) -> Steps | None:
        """Return the tokens of each call of the model; None if the dump does not have them."""
        found = None
        # Look for the module that is called with ids and positions: the root, or the inner model that an engine calls.
        for module in sorted(self.modules, key=lambda name: name.count(".") + bool(name)):
            entries = {k: e for k, e in self.of(module).items() if k.path.startswith("in")}
            ints = {k: e.read() for k, e in entries.items() if e.read is not None and not e.dtype.is_floating_point}
            found = _steps_of_calls(ints, needs_positions=bool(module))
            if found is not None or module.count("."):
                break
        if TOKENS not in self.entries:
            return found
        tokens = self[TOKENS]
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        mask = (self[MASK] if MASK in self.entries else torch.ones_like(tokens)).bool()
        if tokens.dim() != 2 or tokens.is_floating_point() or mask.numel() != tokens.numel():
            raise ValueError(
                f"{TOKENS!r} of {self.path.name} has shape {tuple(tokens.shape)} and dtype {_word(tokens.dtype)}, and "
                f"{MASK!r} shape {tuple(mask.shape)}. Expected: integers (batch, time), and a mask of the same shape."
            )
        mask = mask.reshape(tokens.shape)
        if found is None or found.tokens.shape != tokens.shape:
            found = batched_steps([tokens], mask)
        return Steps(tokens, mask, found.steps, found.positions)

    def __str__(self) -> str:
        steps = None if self.is_statistics else self.steps()
        count = "" if steps is None else f" of {int(steps.mask.sum())} tokens"
        dtype = "" if self.dtype is None else f", {self.dtype}"
        kind = "statistics of tensors" if self.is_statistics else "tensors"
        n = sum(key_of(name) is not None for name in self.entries)
        return f"{self.engine or 'An unnamed engine'}'s dump{count}{dtype}: {len(self.modules)} modules, {n} {kind}"

    __repr__ = __str__


def opened(side: Any) -> Any:
    """Open the dump at a path; return any other value as it is."""
    return Dump(side) if isinstance(side, str | os.PathLike) else side


def _read(path: Path, name: str) -> Tensor:
    """Read only one tensor of a safetensors file, because a dump may be larger than memory."""
    package = safetensors_package()
    try:
        with package.safe_open(path, "pt") as file:
            return file.get_tensor(name)
    except package.SafetensorError as error:
        raise ValueError(
            f"{shown(name)} of {path.name} cannot be read ({error}). Expected: a whole file; write or copy it again."
        ) from None


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file. Raises ValueError for any other file, and for an unknown dtype."""
    expected = "Expected: a file that fpsim.dump(model, batch, file) has written, or the dump.json of msprobe."
    if path.is_dir():
        raise ValueError(f"{shown(str(path))} is a folder without a dump.json. {expected}")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 0 < length <= MOST_HEADER else b""
    try:
        header = json.loads(text)
        unknown = {
            name: of["dtype"]
            for name, of in header.items()
            if name != "__metadata__" and (of["dtype"] not in WORDS or len(of["data_offsets"]) != 2)
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{shown(str(path))} is not a safetensors file. {expected}") from None
    if unknown:
        name, word = next(iter(unknown.items()))
        raise ValueError(
            f"{shown(name)} of {path.name} has dtype {shown(word)}, which is not known here. Expected: one of "
            f"{', '.join(WORDS)}. Write the numbers that it stands for, in float32 or bfloat16."
        )
    return header  # type: ignore[no-any-return]


def _metadata(path: Path, given: Any) -> dict[str, Any]:
    """Return the metadata that `dump` wrote; an empty mapping if the file is of a hook that wrote none."""
    text = given.get(METADATA) if isinstance(given, Mapping) else None
    if text is None:
        return {}
    try:
        words = json.loads(text)
        version = int(words.get("version", VERSION))
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"The metadata of {path.name} has {shown(text)} as {METADATA!r}. Expected: JSON with 'version' and "
            f"'engine'."
        ) from None
    if version > VERSION:
        raise ValueError(
            f"{path.name} is of version {version} of the layout, and this library knows up to {VERSION}. Read it with "
            f"the version that wrote it, or write it again here."
        )
    return words  # type: ignore[no-any-return]


def _steps_of_calls(root: Mapping[Key, Tensor], needs_positions: bool = False) -> Steps | None:
    """Return the tokens of each call of a module, from its arguments; None if it has no ids.

    needs_positions: whether to return None for tokens in one row without positions, as an inner module may get them.
    """
    calls: dict[int, dict[str, Tensor]] = {}
    for key, x in root.items():
        if key.path.startswith("in") and not x.is_floating_point():
            calls.setdefault(key.call, {})[key.path] = x
    if not calls:
        return None
    ids, positions, mask = [], [], None
    for call in sorted(calls):
        given = calls[call]
        named = {path.removeprefix("in."): x for path, x in given.items()}
        found = named.get("input_ids", next((x for x in given.values() if x.dim() in (1, 2)), None))
        if found is None or found.dtype is torch.bool or found.dim() not in (1, 2):
            return None
        where = named.get("positions", named.get("position_ids"))
        if where is None and found.dim() == 1:  # vLLM and SGLang: forward(input_ids, positions, ...)
            where = next((x for x in given.values() if x is not found and x.shape == found.shape), None)
        if where is None and found.dim() == 1 and needs_positions:
            return None
        ids.append(found)
        positions.append(where)
        of_call = named.get("attention_mask")
        mask = of_call if of_call is not None and of_call.dim() == 2 else mask
    if all(x.dim() == 1 for x in ids):
        return flat_steps(ids, positions)
    if any(x.dim() != 2 or len(x) != len(ids[0]) for x in ids):
        return None
    return batched_steps(ids, mask, positions)
