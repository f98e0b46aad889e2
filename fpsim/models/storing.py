"""Storing a tensor of an optimizer: rounded in place to its format, with random bits that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpsim.formats.blocks import BlockFormat
from fpsim.formats.floats import CATALOGUE
from fpsim.policies.update import Storage
from fpsim.tensors.launch import round_memory_, rounded
from fpsim.tensors.noise import new_key_for
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import BlockSpec, RoundingSpec
from fpsim.torch_modes import Place, place_of

__all__ = ["State", "local_part", "noise_key", "states_in", "store_", "stored"]

TORCHAO_LEAST_AMAX = 1e-12  # torchao.optim.quant_utils.scale_tensor
TE_FP16_RANGE = torch.finfo(torch.float16).max / 2  # TransformerEngine, FusedAdam.dtype_to_range_map


class State(NamedTuple):
    """A tensor that an optimizer keeps for one parameter.

    path: the keys and indices that lead to the tensor: ("exp_avg",), or (0, "exp_avg") in a dict inside a dict.
    """

    path: tuple[Any, ...]
    x: Tensor

    @property
    def name(self) -> str:
        """Nearest key that is a string: all the tensors of a list have the same name."""
        return next((key for key in reversed(self.path) if isinstance(key, str)), self.text)

    @property
    def text(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def is_nested(self) -> bool:
        return len(self.path) > 1


def states_in(state: Mapping[Any, Any]) -> Iterator[State]:
    """Yield the tensors of `optimizer.state[parameter]`, including those in dicts, lists and tuples inside it."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), state)]
    containers = set()
    while waiting:
        path, x = waiting.pop()
        if isinstance(x, Tensor):
            yield State(path, x)
        elif isinstance(x, Mapping | list | tuple) and id(x) not in containers:
            containers.add(id(x))
            inner = x.items() if isinstance(x, Mapping) else enumerate(x)
            waiting += reversed([((*path, key), value) for key, value in inner])


def noise_key(seed: int, step: int, index: int, name: str) -> Tensor:
    """Return the key of the random bits of one tensor in one step: the same on each rank and each device.

    seed: the seed of the run.
    index: the index of the parameter in its optimizer.
    name: the name of the stored tensor, "weight" or a state.
    """
    return _key_from(f"{seed} {step} {index} {name}")


def _key_from(text: str) -> Tensor:
    digest = blake2b(text.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), dtype=torch.int64, device="cpu")


def local_part(x: Tensor) -> Tensor:
    """Return the part of a sharded tensor (a DTensor) that is on this rank, or any other tensor itself."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def store_(x: Tensor, storage: Storage, key: Tensor | None = None) -> None:
    """Round `x` in place to its stored value.

    The random bits of an element depend on its index in the whole tensor, however the tensor is sharded. Blocks of
    numbers that share a scale lie within the part on this rank.

    x: float32, of any shape and strides; of a sharded tensor (a DTensor), the part on this rank is rounded.
    key: the key of the random bits, from `noise_key`; None draws one.
    """
    place = place_of(x)
    x = local_part(x)
    if not x.numel():
        return
    if place is not None and storage.spec.rounding == "stochastic":
        if isinstance(storage.spec, RoundingSpec):
            _store_part(x, storage.spec, key, place)
            return
        # Blocks lie in this part, and cannot be rounded as in the whole tensor: each rank has other random bits.
        key = None if key is None else _key_from(f"{int(key)} {place.offset}")
    if isinstance(storage.spec, RoundingSpec):
        round_memory_(x.detach(), storage.spec, key)
        torch.autograd.graph.increment_version(x)
    else:
        x.copy_(stored(x, storage, key))


def _store_part(x: Tensor, spec: RoundingSpec, key: Tensor | None, place: Place) -> None:
    """Round a part of a tensor as it would be rounded in the whole tensor."""
    if key is None:
        key = new_key_for(x)
    # Noise depends on an element's index: the part is rounded at its place in a whole tensor of zeros.
    whole = x.new_zeros(place.shape)
    part = whole
    for dim, (start, size) in enumerate(zip(place.offset, x.shape, strict=True)):
        part = part.narrow(dim, start, size)
    part.copy_(x)
    round_memory_(whole, spec, key)
    x.copy_(part)


def stored(x: Tensor, storage: Storage, key: Tensor | None = None) -> Tensor:
    """Return the stored value of `x`, in float32; `x` is unchanged."""
    spec = storage.spec
    if isinstance(spec, RoundingSpec):
        return rounded(x.detach(), spec, key)
    if not x.numel():
        return x.detach().clone()
    rows = in_rows(x.detach(), spec.fmt)
    if storage.library_scale == "amax_torchao":
        result = _as_torchao(rows, spec, key)
    elif storage.library_scale == "amax_te":
        result = _as_transformer_engine(rows, spec, key)
    else:
        result = rounded_blocks(rows, spec, key=key)
    return result.flatten()[: x.numel()].view(x.shape)


def in_rows(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Return `x` as a matrix along whose rows blocks run."""
    # Blocks of a number of elements run through all of the tensor's memory.
    if isinstance(fmt.block, int):
        return x.reshape(1, -1)
    return x.reshape(1, -1) if x.dim() < 2 else x


def _as_torchao(x: Tensor, spec: BlockSpec, key: Tensor | None) -> Tensor:
    """Round as torchao.optim does."""
    # This follows quantize_fp8, and scale_tensor with dequant_with_qmap, whose largest value is 1.
    blocks = _blocks(x, spec.fmt)
    scale = blocks.abs().amax(-1, keepdim=True).clip(TORCHAO_LEAST_AMAX) / spec.fmt.largest
    return rounded(blocks / scale, spec.element, key) * scale


def _as_transformer_engine(x: Tensor, spec: BlockSpec, key: Tensor | None) -> Tensor:
    """Round as TransformerEngine's optimizer does."""
    # This follows FusedAdam._apply_scale and get_unscaled_state.
    blocks = _blocks(x, spec.fmt)
    is_fp16 = spec.fmt.element == CATALOGUE["fp16"]
    scale = blocks.abs().amax(-1, keepdim=True) / (TE_FP16_RANGE if is_fp16 else spec.fmt.largest)
    by = torch.where(scale > 0, scale.reciprocal(), 0.0)
    return rounded(blocks * by, spec.element, key) * scale


def _blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Return `x` with a row for each block; the last row is filled up with zeros."""
    if fmt.block == "row":
        return x.contiguous().view(-1, x.shape[-1])
    if fmt.block == "tensor":
        return x.reshape(1, -1)
    assert isinstance(fmt.block, int)
    missing = -x.numel() % fmt.block
    flat = torch.nn.functional.pad(x.reshape(-1), (0, missing)) if missing else x.reshape(-1)
    return flat.view(-1, fmt.block)
