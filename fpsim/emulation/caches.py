"""Caches of keys and values: round keys and values where transformers stores them, in `Cache.update`.

The cache classes are those of transformers, if the process has imported it; this module never imports it. A module that
would store keys and values and is given no cache, as in training, is given one of its own for the call, so that they
are rounded at the same place, after the rotary embedding and before attention. Everything else that a model does with
its cache is left alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.emulation.marks import is_roundable, is_wide_tensor, mark
from fpsim.emulation.scope import active
from fpsim.policies.operand import Operand
from fpsim.policies.policy import CACHED, Policy
from fpsim.tensors.autograd import round_differentiably
from fpsim.tensors.block_autograd import round_blocks_differentiably
from fpsim.tensors.cuts import Cut
from fpsim.tensors.expressions import round_here_
from fpsim.tensors.own import rounded_by_function
from fpsim.tensors.spec import BlockSpec, OwnFormat
from fpsim.torch_internals import is_traced
from fpsim.torch_modes import is_plain, without_torch_function

__all__ = ["CacheUse", "Stored", "cache_use", "counted"]

PARAMETERS = ("past_key_values", "layer_past")  # as forwards of transformers name the cache that they are given
LAYERS = ("layer_idx", "layer_id")  # as its attention names the layer of the cache that is its own
LIBRARY = "transformers.cache_utils"


class CacheUse(NamedTuple):
    """Use of a cache by a module.

    name, position: of the parameter that takes the cache.
    stores: whether its own code calls `update`; others hand the cache on.
    of_encoder: whether that code expects an `EncoderDecoderCache`, one cache for its own keys and one for an encoder's.
    """

    name: str
    position: int
    stores: bool
    of_encoder: bool

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The cache among the arguments of a call; None without one."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)

    def with_cache(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with a cache among them."""
        if self.position < len(args):
            return (*args[: self.position], cache, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.name: cache}


def cache_use(module: nn.Module, signature: inspect.Signature | None) -> CacheUse | None:
    """Use of a cache of keys and values by a module; None if it takes no cache.

    Whether its code stores something is read from the names that the code uses. An encoder shares the code of a decoder
    in some models, and says by `is_decoder` which of the two it is: its keys are in no cache.
    """
    names = [] if signature is None else list(signature.parameters)
    name = next((name for name in names if name in PARAMETERS), None)
    if name is None:
        return None
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    used = () if code is None else code.co_names
    has_layer = any(isinstance(getattr(module, layer, None), int) for layer in LAYERS)
    stores = "update" in used and has_layer and getattr(module, "is_decoder", True) is not False
    return CacheUse(name, names.index(name), stores, "cross_attention_cache" in used)


class _Counted(threading.local):
    updates = 0  # of caches, in which this thread has rounded something


counted = _Counted()
_stored: weakref.WeakSet[Any] = weakref.WeakSet()  # caches in which something was rounded


class Stored:
    """The keys and values that one call of a module stores in a cache.

    use: how it takes one; None where it does not.
    where: the module, for errors.
    """

    def __init__(self, use: CacheUse | None, where: str) -> None:
        self.use, self.where = use, where
        self._cache: Any = None
        self._before = counted.updates
        _watch()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with a cache where the module would store something and has none.

        Raises TypeError for a cache that is not one of transformers.
        """
        use, library = self.use, sys.modules.get(LIBRARY)
        if use is None:
            return args, kwargs
        self._cache = given = use.given(args, kwargs)
        if given is not None:
            if library is None or not isinstance(given, library.Cache):
                of = type(given)
                raise TypeError(
                    f"{self.where} is given a {of.__module__}.{of.__qualname__} as {use.name}, and Policy(cache=...) "
                    f"rounds what is stored by Cache.update of transformers. Expected: a cache of transformers, such "
                    f"as DynamicCache, StaticCache, QuantizedCache or EncoderDecoderCache, a subclass of Cache whose "
                    f"update calls super().update, or None. For another one, round keys and values in its own code "
                    f"with fpsim.round_to, and leave out cache=."
                )
            return args, kwargs
        if not use.stores or library is None:
            return args, kwargs
        own = library.DynamicCache()
        if use.of_encoder:
            own = library.EncoderDecoderCache(own, library.DynamicCache())
        return use.with_cache(own, args, kwargs)

    def require_rounded(self) -> None:
        """Raise TypeError if a cache stores keys and values without calling the base class's `update`."""
        if self._cache is None or self.use is None or not self.use.stores:
            return
        library: Any = sys.modules[LIBRARY]
        is_double = isinstance(self._cache, library.EncoderDecoderCache)
        caches = [self._cache.self_attention_cache, self._cache.cross_attention_cache] if is_double else [self._cache]
        for cache in caches:
            of = type(cache)
            if of.update is library.Cache.update or cache in _stored:
                continue
            with without_torch_function():
                is_empty = not cache.get_seq_length()
            if not is_empty:
                raise TypeError(
                    f"The cache of {self.where} is a {of.__module__}.{of.__qualname__}, whose update does not call "
                    f"that of transformers' Cache, by which Policy(cache=...) rounds keys and values. Expected: one "
                    f"that calls super().update, or a class of transformers, such as DynamicCache."
                )

    def require_any(self, policy: Policy) -> None:
        """Raise RuntimeError where no cache was met in a call of a whole model: its policy would change nothing."""
        if counted.updates == self._before:
            raise RuntimeError(
                f"{self.where} stored no keys and values, and its policy rounds those that are stored: {policy}. "
                f"Expected: a decoder of transformers, whose attention calls update of a Cache, under a policy or an "
                f"override with cache=. For other models, round keys and values in their own code with fpsim.round_to, "
                f"and leave out cache=."
            )


_watched: Any = None  # the class whose update is ours
_watching = threading.Lock()


def _watch() -> None:
    """Have `Cache.update` of transformers round, from here on, where it runs inside of an emulation that says so."""
    global _watched
    library = sys.modules.get(LIBRARY)
    of = getattr(library, "Cache", None)  # not there yet while another thread imports it
    if of is None or of is _watched:
        return
    with _watching:  # twice, it would round twice
        if of is not _watched:
            of.update = _rounding(of.update)
            _watched = of


def _rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Dynamo reads this line by line, for models that are not ours; ours it takes as one
        if not torch.compiler.is_dynamo_compiling():
            emulation = active.emulation
            if emulation is not None and emulation.scope.cache is not None:
                key_states, value_states = _rounded_pair(emulation, key_states, value_states)
                _stored.add(self)
        return original(self, key_states, value_states, *args, **kwargs)

    return update


def _rounded_pair(emulation: Any, *pair: Tensor) -> list[Tensor]:
    """Keys and values as they are stored."""
    counted.updates += 1
    site = emulation.scope.site("cache")
    operands = [emulation.scope.cache.get(name) for name in CACHED]
    return [
        x if operand is None or not is_roundable(x) else _rounded(emulation, x, operand, site, f"cache.{name}")
        for x, operand, name in zip(pair, operands, CACHED, strict=True)
    ]


def _rounded(emulation: Any, x: Tensor, operand: Operand, site: str, role: str) -> Tensor:
    """One of them, with the gradient of `x`. A mark says where it is in the activations' format; else that is found
    out, and it is brought there, where it is read.
    """
    spec: Any = operand.spec()
    is_wide = is_wide_tensor(x)
    with without_torch_function():
        # values read from a cache in a real half dtype have that dtype: a scale of float32 makes other numbers
        given = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        observer = None if is_traced(x) else emulation.scope.listeners.watching(site, role)
        axis, cut = max(given.dim() - 1, 0), None
        if isinstance(spec.fmt, OwnFormat):
            values, _ = rounded_by_function(given, spec.fmt, axis, site)
            out = given.clone()  # its backward is the straight-through gradient
            with torch.no_grad():
                out.copy_(values)
        elif isinstance(spec, BlockSpec):
            cut = Cut(axis)
            out = round_blocks_differentiably(given, spec, axis, None)
        elif is_traced(given) and not is_plain(given):
            out = given.clone()
            round_here_(out, spec)
        else:
            out = round_differentiably(given, spec)
        if observer is not None:
            observer(site, role, given.detach(), out.detach(), spec, cut)
        out = out.to(x.dtype)
    if is_wide:
        emulation.mark_wide(out)
    elif spec.text == emulation.scope.activation:
        mark(out, spec.text)
    return out
