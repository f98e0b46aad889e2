"""Caches of keys and values: round keys and values where transformers stores them, in `Cache.update`.

The cache classes are those of transformers, if the process has imported it; this module never imports it. A module that
stores keys and values may get no cache, as in training. It then gets a new cache for the call, so that keys and values
are always rounded at the same point: after the rotary embedding and before attention. Everything else that a model does
with its cache stays unchanged.
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

PARAMETERS = ("past_key_values", "layer_past")  # names of the cache in forwards of transformers
LAYERS = ("layer_idx", "layer_id")  # names of an attention's own layer of the cache
LIBRARY = "transformers.cache_utils"


class CacheUse(NamedTuple):
    """Use of a cache by a module.

    name, position: name and position of the parameter that takes the cache.
    stores: whether the module's own code calls `update`; other modules pass the cache on.
    of_encoder: whether the module's code expects an `EncoderDecoderCache`: one cache for the module's own keys, and
        another one for an encoder's keys.
    """

    name: str
    position: int
    stores: bool
    of_encoder: bool

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cache among the arguments of a call; None if there is none."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)

    def with_cache(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments with `cache` among them."""
        if self.position < len(args):
            return (*args[: self.position], cache, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.name: cache}


def cache_use(module: nn.Module, signature: inspect.Signature | None) -> CacheUse | None:
    """Return how a module uses a cache of keys and values; None if it takes no cache."""
    names = [] if signature is None else list(signature.parameters)
    name = next((name for name in names if name in PARAMETERS), None)
    if name is None:
        return None
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    # The module's code is read, since no attribute tells whether it calls `update` or passes the cache on. In some
    # models encoder and decoder share their code, and only `is_decoder` differs: an encoder stores nothing.
    used = () if code is None else code.co_names
    has_layer = any(isinstance(getattr(module, layer, None), int) for layer in LAYERS)
    stores = "update" in used and has_layer and getattr(module, "is_decoder", True) is not False
    return CacheUse(name, names.index(name), stores, "cross_attention_cache" in used)


class _Counted(threading.local):
    updates = 0  # the number of updates in which this thread has rounded something


counted = _Counted()
_stored: weakref.WeakSet[Any] = weakref.WeakSet()  # caches in which something was rounded


class Stored:
    """The keys and values that one call of a module stores in a cache.

    use: how the module takes a cache; None if it takes none.
    where: the module's name, for errors.
    """

    def __init__(self, use: CacheUse | None, where: str) -> None:
        self.use, self.where = use, where
        self._cache: Any = None
        self._before = counted.updates
        _watch()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call; add a new cache if the module stores keys and values but got no cache.

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
        """Raise RuntimeError if a call of a whole model stored nothing in a cache: its policy would change nothing."""
        if counted.updates == self._before:
            raise RuntimeError(
                f"{self.where} stored no keys and values, and its policy rounds those that are stored: {policy}. "
                f"Expected: a decoder of transformers, whose attention calls update of a Cache, under a policy or an "
                f"override with cache=. For other models, round keys and values in their own code with fpsim.round_to, "
                f"and leave out cache=."
            )


_watched: Any = None  # the class whose `update` is replaced
_watching = threading.Lock()


def _watch() -> None:
    """Patch `Cache.update` of transformers, so that it rounds inside of an emulation with formats of a cache."""
    global _watched
    library = sys.modules.get(LIBRARY)
    # The class may be missing while another thread imports the module.
    of = getattr(library, "Cache", None)
    if of is None or of is _watched:
        return
    # A lock is held, because an `update` that is patched twice would round twice.
    with _watching:
        if of is not _watched:
            of.update = _rounding(of.update)
            _watched = of


def _rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # In models that are not quantised, Dynamo traces this function, and must not reach the emulation. A quantised
        # model is a single operator for Dynamo.
        if not torch.compiler.is_dynamo_compiling():
            emulation = active.emulation
            if emulation is not None and emulation.scope.cache is not None:
                key_states, value_states = _rounded_pair(emulation, key_states, value_states)
                _stored.add(self)
        return original(self, key_states, value_states, *args, **kwargs)

    return update


def _rounded_pair(emulation: Any, *pair: Tensor) -> list[Tensor]:
    """Return keys and values, rounded as the cache stores them."""
    counted.updates += 1
    site = emulation.scope.site("cache")
    operands = [emulation.scope.cache.get(name) for name in CACHED]
    return [
        x if operand is None or not is_roundable(x) else _rounded(emulation, x, operand, site, f"cache.{name}")
        for x, operand, name in zip(pair, operands, CACHED, strict=True)
    ]


def _rounded(emulation: Any, x: Tensor, operand: Operand, site: str, role: str) -> Tensor:
    """Round keys or values, with a straight-through gradient."""
    spec: Any = operand.spec()
    is_wide = is_wide_tensor(x)
    with without_torch_function():
        # Keys and values of a half-precision dtype are rounded in float32: in their own dtype, a float32 scale would
        # make other numbers.
        given = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        observer = None if is_traced(x) else emulation.scope.listeners.watching(site, role)
        axis, cut = max(given.dim() - 1, 0), None
        if isinstance(spec.fmt, OwnFormat):
            values, _ = rounded_by_function(given, spec.fmt, axis, site)
            # A copy is overwritten below autograd, so that the gradient of `clone` is the straight-through gradient.
            out = given.clone()
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
    # The tensor is marked with a format only if the cache has the activations' format. Else it counts as a tensor from
    # outside, which attention rounds to the activations' format.
    if is_wide:
        emulation.mark_wide(out)
    elif spec.text == emulation.scope.activation:
        mark(out, spec.text)
    return out
