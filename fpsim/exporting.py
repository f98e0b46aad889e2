"""export(model, folder): write the weights of a quantised model as a packed checkpoint.

The layouts are those of compressed-tensors, which vLLM and transformers load.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.border import require_initialised, require_memory, require_module
from fpsim.checks import few, pip_install, require_flag, shown
from fpsim.formats.blocks import BlockFormat
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import CATALOGUE
from fpsim.insight.rows import Rows
from fpsim.models.computed_weights import sources
from fpsim.models.forwards import EmulatedForward
from fpsim.models.installed import emulated_forwards
from fpsim.tensors.codes import decode, encode
from fpsim.tensors.ops import round_to
from fpsim.tensors.spec import OwnFormat, RoundingSpec, Spec
from fpsim.torch_internals import parametrization_lists

__all__ = ["LAYOUTS", "export"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"  # as transformers and vLLM name them


def export(model: nn.Module, folder: str | os.PathLike[str], *, weights_only: bool = False) -> Rows:
    """Write the weights of a quantised model as a packed checkpoint, which compressed-tensors' loader reads.

    The folder gets `model.safetensors` and `config.json`, which holds a `quantization_config` and, for a model of
    transformers, the model's own configuration. The folder is written completely or not at all. The packed weights are
    those of `nn.Linear` in NVFP4, MXFP4, MXFP6 (e2m3), MXFP8 (e4m3) and FP8 (e4m3fn without scales, or with a scale per
    tensor, row, tile, or number of elements): codes and scales are those of `encode`. Everything else is stored in its
    own dtype, as the module uses it.

    The formats of the backward pass do not matter to a checkpoint. Formats of the forward pass other than the weights'
    cannot be stored in a checkpoint: they are refused, or left out by `weights_only=True`.

    Args:
        model: a model that `quantize` returned.
        folder: a path that does not exist yet, or an empty folder.
        weights_only: leave out the policy's formats of activations, results and sums.

    Returns:
        A row for each packed weight: its format, its bytes and its bytes in float32; `differs`, how many of its numbers
        differ between the loader's arithmetic and the emulation; and the largest relative difference. In a float32
        model only NVFP4 differs, because the loader rounds its numbers to bfloat16.

    Raises:
        ValueError: for a model that is not quantised, and for features without a place in a checkpoint: stochastic
            rounding and code books, formats that the layout has no name for, tied and computed weights, other modules
            than `nn.Linear` whose weights are quantised.
        FileExistsError: for a folder that has files.
        ImportError: without safetensors, which the extra `export` brings.

    >>> import tempfile
    >>> from fpsim import Policy, Products, quantize
    >>> model = quantize(nn.Linear(64, 4), Policy(products=Products(fprop=(None, "mxfp4"))))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(export(model, f"{folder}/mxfp4"))
    module   format  bytes  float32  differs  largest
    -------  ------  -----  -------  -------  -------
    (model)  mxfp4   136    1024     0        0
    """
    require_module(model)
    require_flag("weights_only", weights_only)
    target = _new_folder(folder)
    save_file = _safetensors()
    require_initialised(model)
    require_memory(model)
    found = _Found(model, weights_only)
    _write(target, save_file, found.tensors, _config(model, found))
    return found.rows


class _Weight(NamedTuple):
    """A weight to be packed."""

    module: str
    layout: Layout


class _Found:
    """The parts of a model that are written: its tensors, which of them are packed, and a row for each packed one."""

    def __init__(self, model: nn.Module, weights_only: bool) -> None:
        forwards = {id(module): forward for module, forward in emulated_forwards(model)}
        if not forwards:
            raise ValueError(f"{type(model).__name__} is not quantised. Call fpsim.quantize(model, fmt) first.")
        self.tensors: dict[str, Tensor] = {}
        self.packed: list[_Weight] = []
        self.plain: list[str] = []  # modules that a loader would take for packed ones
        self.rows = Rows()
        self._names = _names_by_parameter(model)
        if not weights_only:
            _require_weights_alone(model, forwards)
        # A shared module is stored under each of its names, as in `state_dict`: a loader looks for all of them.
        for name, module in model.named_modules(remove_duplicate=False):
            self._take(name, module, forwards.get(id(module)))
        if not self.packed:
            raise ValueError(
                f"No weight of {type(model).__name__} is in a format that is packed. Expected: a policy that quantises "
                f"the weights of nn.Linear, such as fpsim.Policy(products=fpsim.Products(fprop=(None, 'mxfp4')))."
            )

    def _take(self, name: str, module: nn.Module, forward: EmulatedForward | None) -> None:
        """Collect the module's own parameters and buffers."""
        if forward is not None and any(True for _ in _quantised(forward)) and _computes_weights(module):
            raise ValueError(
                f"The weights of {name or '(model)'} are computed from others, as by a parametrization, and a "
                f"checkpoint would have the others. Make them plain first: torch.nn.utils.parametrize."
                f"remove_parametrizations."
            )
        spec = _spec_of_weight(name, module, forward)
        for key, x in _state(module):
            what = f"{name}.{key}".lstrip(".")
            if not isinstance(x, nn.Parameter) or forward is None or not x.is_floating_point():
                self.tensors[what] = _own(x)
                continue
            role = rounded_role(x, forward.specs.weight, what)
            if isinstance(module, nn.Linear) and key == "weight":
                self._take_weight(name, x, role, _role_of_linear(spec, forward), what)
            else:
                self.tensors[what] = _own(role)

    def _take_weight(self, name: str, x: nn.Parameter, role: Tensor, spec: Spec | None, what: str) -> None:
        if is_dense(spec):
            dense = role if spec is None else round_to(role, spec.fmt, spec.rounding, spec.overflow)  # type: ignore[arg-type]
            self.tensors[what] = _own(dense)
            self.plain.append(name)
            return
        assert spec is not None
        layout = layout_of(spec, what)
        others = [other for other in self._names[id(x)] if other != what]
        if others:
            raise ValueError(
                f"{what} is quantised, and is also {few(others)}: one tensor cannot be stored packed and plain. Untie "
                f"them, or leave the layer in float32: Policy(overrides={{{name!r}: None}})."
            )
        found = packed(role.float().cpu(), spec, layout, what)
        self.tensors |= {f"{name}.{key}".lstrip("."): y for key, y in found.tensors.items()}
        self.packed.append(_Weight(name, layout))
        self.rows.append(_row(name, spec, found, x.dtype))


def _row(name: str, spec: Spec, found: Packed, dtype: torch.dtype) -> dict[str, Any]:
    loaded, emulated = found.loaded.to(dtype).double(), found.emulated.double()
    distance = (loaded - emulated).abs()
    relative = (distance / emulated.abs()).masked_fill(distance == 0, 0.0)
    return {
        "module": name or "(model)",
        "format": str(spec.fmt),
        "bytes": sum(x.nbytes for x in found.tensors.values()),
        "float32": 4 * emulated.numel(),
        "differs": int((distance > 0).sum()),
        "largest": float(relative.max()),
    }


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and persistent buffers by name. Raises ValueError for extra state."""
    # The tensors come from `state_dict`, which leaves out buffers that are not persistent, and which modules override.
    own = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    for key, x in module.state_dict(keep_vars=True).items():
        if key in own:
            yield key, x
        elif key.endswith("_extra_state") and "." not in key:
            raise ValueError(
                f"{type(module).__name__} has extra state, which safetensors cannot hold. Expected: tensors."
            )


def _own(x: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    # This is always a copy: safetensors refuses tensors that share memory.
    return x.detach().cpu().clone(memory_format=torch.contiguous_format)


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return names


def _computes_weights(module: nn.Module) -> bool:
    return bool(sources(module)) or any(True for _ in parametrization_lists(module))


# The policy's formats


def _quantised(forward: EmulatedForward) -> Iterator[Spec]:
    """Yield the specs of a module's weights: by their role, and as the operand of the forward product."""
    if forward.specs.weight is not None:
        yield forward.specs.weight
    operand = None if forward.products is None else forward.products.specs.fprop[1]
    if operand is not None and (spec := operand.spec()) is not None:
        yield spec


def _spec_of_weight(name: str, module: nn.Module, forward: EmulatedForward | None) -> Spec | None:
    """Return the format of a module's weight as an operand; None if it enters products unrounded."""
    if forward is None or forward.products is None:
        return None
    operand = forward.products.specs.fprop[1]
    spec = None if operand is None else operand.spec()
    if spec is None or not any(x.dim() > 1 for x in module.parameters(recurse=False)):
        return None
    what = f"The weight of {name or '(model)'}"
    # An embedding looks numbers up, and multiplies nothing.
    if isinstance(module, nn.Embedding) or is_dense(spec):
        return spec if isinstance(module, nn.Linear) else None
    if not isinstance(module, nn.Linear):
        raise ValueError(
            f"{name or 'The model'} is a {type(module).__name__} in {spec.fmt}, and the layout has a place for the "
            f"weights of nn.Linear alone. Leave it in float32: Policy(overrides={{{name!r}: None}})."
        )
    if isinstance(spec.fmt, OwnFormat):
        raise ValueError(
            f"{what} is rounded by a function, {spec.fmt}, for which the layout has no name. Expected: {EXPECTED}."
        )
    assert operand is not None
    if operand.hadamard is not None:
        raise ValueError(
            f"{what} is transformed before it is rounded, by {operand.hadamard}, and the loader would not "
            f"transform its activations. Expected: an operand without hadamard."
        )
    if "linear" in forward.scope.float32:
        raise ValueError(f"{what} is in {spec.fmt}, and the policy has linear in float32. Expected: one of them.")
    return spec


def _role_of_linear(spec: Spec | None, forward: EmulatedForward) -> Spec | None:
    """Return the format in which the weight of an nn.Linear is stored: the operand's format, else the role's."""
    return forward.specs.weight if spec is None else spec


def _require_weights_alone(model: nn.Module, forwards: dict[int, EmulatedForward]) -> None:
    """Raise ValueError for a policy that rounds something besides weights in the forward pass."""
    for name, module in model.named_modules():
        forward = forwards.get(id(module))
        if forward is None:
            continue
        words = [f"activation={forward.specs.activation}"] if forward.specs.activation is not None else []
        if forward.products is not None:
            specs = forward.products.specs
            words += [f"x of products in {specs.fprop[0]}"] if specs.fprop[0] is not None else []
            words += [f"output={specs.output}"] if specs.output is not None else []
            words += [f"accumulator={forward.products.accumulator}"] if specs.accumulators is not None else []
        if words:
            raise ValueError(
                f"{name or type(model).__name__} rounds more than weights in its forward pass: {', '.join(words)}. A "
                f"checkpoint has no place for that, and its loader computes other numbers. Use weights_only=True to "
                f"leave it out, or a policy of weights: Products(fprop=(None, 'mxfp4'))."
            )


# The files


def _config(model: nn.Module, found: _Found) -> dict[str, Any]:
    """Return the content of config.json: a transformers model's own configuration, and the layouts of its weights."""
    own = getattr(model, "config", None)
    content: dict[str, Any] = {}
    if callable(getattr(own, "to_json_string", None)):
        content = json.loads(own.to_json_string())  # type: ignore[union-attr]
        dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
        content |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    # Layouts are keyed by their text, because a layout holds a dictionary.
    layouts: dict[str, tuple[Layout, list[str]]] = {}
    for weight in found.packed:
        layouts.setdefault(json.dumps(weight.layout), (weight.layout, []))[1].append(weight.module)
    # A single layout targets the class Linear, as other tools write it. If there are several, each lists its modules.
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(layouts) == 1 else names,
            "weights": layout.weights,
            "input_activations": None,
            "output_activations": None,
            "format": layout.format,
        }
        for i, (layout, names) in enumerate(layouts.values())
    }
    words = {layout.format for layout, _ in layouts.values()}
    content["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": words.pop() if len(words) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": found.plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return content


def _safetensors() -> Any:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError(f"export() needs safetensors, which is not installed: {pip_install('export')}.") from None
    return save_file


def _new_folder(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise TypeError(f"folder is {shown(folder)}. Expected: the path of a folder, such as 'checkpoints/mxfp4'.")
    try:
        path = Path(folder).resolve()
        is_taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    except (OSError, ValueError) as error:
        # `strerror` leaves out the path, which may be too long to print.
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"folder={shown(folder)} cannot be read: {why}. Expected: a new path.") from None
    if is_taken:
        raise FileExistsError(f"{shown(str(folder))} exists, and is not an empty folder. Expected: a new path.")
    return path


def _write(target: Path, save_file: Any, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write both files into a folder beside the target, and rename it: the target is complete, or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
    beside.mkdir()
    try:
        # transformers refuses a file without this entry.
        save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
        (beside / CONFIG).write_text(text, encoding="utf-8")
        for path in (beside / WEIGHTS, beside / CONFIG):
            # Without this, a crash of the machine could leave the new name on an empty file.
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        # The target is an empty folder, and not every system renames onto a folder.
        if target.exists():
            target.rmdir()
        os.rename(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


FLOAT_QUANTIZED = "float-quantized"
# By element, block and scale: the word of config.json, the strategy, and the type of a scale. compressed-tensors 0.20:
# config/base.py, compressors/*/base.py, quantization/quant_scheme.py.
LAYOUTS = {
    ("e2m1fn", 16, "e4m3fn"): ("nvfp4-pack-quantized", "tensor_group", "torch.float8_e4m3fn"),
    ("e2m1fn", 32, "e8m0fnu"): ("mxfp4-pack-quantized", "group", "torch.uint8"),
    ("e2m3fn", 32, "e8m0fnu"): ("mxfp6-pack-quantized", "group", "torch.uint8"),
    ("e4m3fn", 32, "e8m0fnu"): ("mxfp8-quantized", "group", "torch.uint8"),
}
EXPECTED = (
    "nvfp4, e2m1fn per 16 e4m3fn, mxfp4, mxfp6_e2m3, mxfp8_e4m3, e4m3fn, and e4m3fn per tensor, row, tile or number of "
    "elements, such as 'e4m3fn per row fp32'"
)


class Layout(NamedTuple):
    """Description of a weight for a loader.

    format: the loader's name of the packing.
    weights: the loader's arguments of quantisation, as JSON.
    """

    format: str
    weights: dict[str, Any]


class Packed(NamedTuple):
    """A weight as it is stored.

    tensors: the stored tensors, by their names in the module.
    emulated: the numbers that the emulated model computes with, float32.
    loaded: the numbers that the loader computes from the tensors, in its arithmetic and its dtype.
    """

    tensors: dict[str, Tensor]
    emulated: Tensor
    loaded: Tensor


def is_dense(spec: Spec | None) -> bool:
    """True if a weight of this format is stored unpacked, because the format is a dtype that checkpoints use."""
    return spec is None or (isinstance(spec, RoundingSpec) and (spec.dtype is not None or spec.is_float32))


def _require_one_value(spec: Spec, what: str) -> None:
    if spec.rounding == "stochastic":
        raise ValueError(
            f"{what} is rounded stochastically, to other numbers in each call; a checkpoint has one of them. Expected: "
            f"a weight that is rounded to nearest."
        )


def layout_of(spec: Spec, what: str) -> Layout:
    """Return the layout of a format. what: the weight, for an error. Raises ValueError for a spec without a layout."""
    f = spec.fmt
    _require_one_value(spec, what)
    if isinstance(f, Codebook) or (isinstance(f, BlockFormat) and isinstance(f.element, Codebook)):
        raise ValueError(f"{what} is in {f}: the layout has no place for a code book. Expected: {EXPECTED}.")
    if isinstance(f, BlockFormat) and f.is_delayed:
        raise ValueError(
            f"{what} is in {f}, whose scale follows from earlier steps. Expected: a format whose scale is that of the "
            f"weight, such as 'e4m3fn per tensor fp32'."
        )
    shared: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if f == CATALOGUE["e4m3fn"]:
        return Layout(FLOAT_QUANTIZED, {**shared, "strategy": "tensor", "group_size": None})
    if not isinstance(f, BlockFormat) or f.gain != 1:
        raise ValueError(f"{what} is in {f}, for which the layout has no name. Expected: {EXPECTED}.")
    # A second scale, of the whole tensor, is optional in NVFP4, and has no place in the others.
    known = LAYOUTS.get((str(f.element), f.block, str(f.scale)))  # type: ignore[arg-type]
    is_nvfp4 = known is not None and known[1] == "tensor_group"
    if known is not None and (is_nvfp4 or not f.tensor_scale) and f.tensor_scale in (True, False):
        name, strategy, dtype = known
        bits = f.element.bits
        return Layout(
            name, {**shared, "num_bits": bits, "strategy": strategy, "group_size": f.block, "scale_dtype": dtype}
        )
    if f.element != CATALOGUE["e4m3fn"] or f.tensor_scale:
        raise ValueError(f"{what} is in {f}, for which the layout has no name. Expected: {EXPECTED}.")
    if isinstance(f.block, tuple):
        blocks = {"strategy": "block", "group_size": None, "block_structure": list(f.block)}
        return Layout(FLOAT_QUANTIZED, {**shared, **blocks})
    if isinstance(f.block, int):
        return Layout(FLOAT_QUANTIZED, {**shared, "strategy": "group", "group_size": f.block})
    strategy = {"tensor": "tensor", "row": "channel"}[f.block]
    return Layout(FLOAT_QUANTIZED, {**shared, "strategy": strategy, "group_size": None})


def packed(weight: Tensor, spec: Spec, layout: Layout, what: str) -> Packed:
    """Pack a weight, (out, in) float32, whose blocks run along the last axis.

    Raises ValueError for a weight that is not finite, or whose length the blocks do not divide.
    """
    size = layout.weights["group_size"]
    if size and weight.shape[-1] % size:
        raise ValueError(
            f"{what} has shape {tuple(weight.shape)}, whose rows {size} does not divide, and the loader takes whole "
            f"blocks alone. Expected: rows of a multiple of {size}; or leave the layer in float32 by overrides."
        )
    if not weight.isfinite().all():
        raise ValueError(f"{what} holds an infinity or NaN. Expected: finite weights.")
    f = spec.fmt
    if not isinstance(f, BlockFormat):
        codes = encode(weight, f, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        tensors = {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
        values = decode(codes, f)  # type: ignore[arg-type]
        return Packed(tensors, values, values)
    blocks = encode(weight, f, spec.rounding, spec.overflow)
    emulated, elements = decode(blocks), decode(blocks.unpacked(), f.element)  # type: ignore[arg-type]
    scales = decode(blocks.scales, f.scale) if f.scale.bits <= 16 else blocks.scales
    if layout.format == FLOAT_QUANTIZED:
        shape = {"tensor": (1,), "channel": (-1, 1)}.get(layout.weights["strategy"], tuple(scales.shape))
        tensors = {"weight": blocks.codes.view(torch.float8_e4m3fn), "weight_scale": scales.reshape(shape).contiguous()}
        # The loader multiplies an element and a scale in float32, as `decode` does.
        return Packed(tensors, emulated, emulated)
    each = scales.repeat_interleave(size, -1)
    if layout.format == "nvfp4-pack-quantized":
        whole = torch.ones(1) if blocks.tensor_scale is None else blocks.tensor_scale.reshape(1)
        codes_of_scales = blocks.scales.to(torch.uint8).view(torch.float8_e4m3fn)
        tensors = {"weight_packed": blocks.codes, "weight_scale": codes_of_scales, "weight_global_scale": whole}
        return Packed(tensors, emulated, (elements * (each / whole)).bfloat16())
    name, stored = "weight_packed", blocks.codes
    if layout.format == "mxfp8-quantized":
        name, stored = "weight", blocks.codes.view(torch.float8_e4m3fn)
    elif layout.format == "mxfp6-pack-quantized":
        stored = _in_three_bytes(blocks.codes)
    return Packed({name: stored, "weight_scale": blocks.scales}, emulated, (elements * each).bfloat16())


def _in_three_bytes(codes: Tensor) -> Tensor:
    """Pack four codes of 6 bits each into three bytes, the first one in the lowest bits."""
    of_four = codes.to(torch.int32).unflatten(-1, (-1, 4)) << torch.tensor([0, 6, 12, 18], dtype=torch.int32)
    word = of_four.sum(-1, dtype=torch.int32)
    return torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).to(torch.uint8).flatten(-2)


def rounded_role(x: Tensor, spec: RoundingSpec | None, what: str) -> Tensor:
    """Return a parameter as its module uses it, in its own dtype. Raises ValueError for stochastic rounding."""
    if spec is None:
        return x.detach()
    _require_one_value(spec, what)
    return round_to(x.detach(), spec.fmt, spec.rounding, spec.overflow)
