"""fpsim: PyTorch models that compute as hardware with a small number format would."""

from inspect import currentframe as _currentframe
from typing import TYPE_CHECKING

# This import is first: it reads the source files of compiled code before they are imported. They may change later.
from fpsim.compiling import sources as _sources  # noqa: F401

# isort: split
from fpsim.changes import BITS, changes_since
from fpsim.checks import warn_of_namesake
from fpsim.emulation import emulate
from fpsim.exporting import export
from fpsim.formats.blocks import BLOCKS, BlockFormat, Choose, Delayed, as_format
from fpsim.formats.codebook import CODEBOOKS, Codebook
from fpsim.formats.fixed_point import FixedPoint
from fpsim.formats.floats import CATALOGUE, FloatFormat
from fpsim.insight.compare import Comparison, compare
from fpsim.insight.diagnose import Diagnosis, diagnose
from fpsim.insight.engines.dumps import Dump, dump
from fpsim.insight.lost_updates import LostUpdates, lost_updates
from fpsim.insight.mismatch import Mismatch, mismatch
from fpsim.insight.recording import Recording, record
from fpsim.insight.sensitivity import Sensitivity, last_layers, sensitivity
from fpsim.insight.snapshots import Snapshot, Snapshots, snapshots
from fpsim.insight.summary import summary
from fpsim.insight.watch import Watch, watch
from fpsim.insight.why import Why, why
from fpsim.models.optimizers import QuantizedOptimizer, quantize_optimizer
from fpsim.models.quantize import dequantize, frozen, quantize, round_parameters_, set_policy
from fpsim.models.ranks import Ranks
from fpsim.models.scaling_state import load_scaling_state, scaling_state, set_scaling_group
from fpsim.policies.attention import Attention
from fpsim.policies.operand import Operand
from fpsim.policies.policy import ROLES, FormatLike, Policy
from fpsim.policies.products import Products
from fpsim.policies.profiles import profile, profiles
from fpsim.policies.recipes import RECIPE_PREFIX, as_policy, recipe, recipes
from fpsim.policies.update import UPDATES, Update
from fpsim.tensors.accumulators import Accumulator, as_accumulator
from fpsim.tensors.codes import BlockCodes, decode, encode, scales_of
from fpsim.tensors.gemm import matmul
from fpsim.tensors.hadamard import Hadamard, hadamard
from fpsim.tensors.noise import manual_seed, noise_of_torch
from fpsim.tensors.ops import Rounder, round_to, round_to_
from fpsim.tensors.reductions import all_reduce
from fpsim.tensors.tally import Tally, tally
from fpsim.tensors.warm import warm_up

__distribution__ = "ada-loss"  # ada_loss looks for this line: another project's package has the same name

__all__ = [
    "BITS",
    "BLOCKS",
    "CATALOGUE",
    "CODEBOOKS",
    "RECIPE_PREFIX",
    "ROLES",
    "UPDATES",
    "Accumulator",
    "Attention",
    "BlockCodes",
    "BlockFormat",
    "Choose",
    "Codebook",
    "Comparison",
    "Delayed",
    "Diagnosis",
    "Dump",
    "FixedPoint",
    "FloatFormat",
    "FormatLike",
    "Hadamard",
    "LostUpdates",
    "Mismatch",
    "Operand",
    "Policy",
    "Products",
    "QuantizedOptimizer",
    "Ranks",
    "Recording",
    "Rounder",
    "Sensitivity",
    "Snapshot",
    "Snapshots",
    "Tally",
    "Update",
    "Watch",
    "Why",
    "all_reduce",
    "as_accumulator",
    "as_format",
    "as_policy",
    "changes_since",
    "compare",
    "decode",
    "dequantize",
    "diagnose",
    "dump",
    "emulate",
    "encode",
    "export",
    "frozen",
    "hadamard",
    "last_layers",
    "load_scaling_state",
    "lost_updates",
    "manual_seed",
    "matmul",
    "mismatch",
    "noise_of_torch",
    "profile",
    "profiles",
    "quantize",
    "quantize_optimizer",
    "recipe",
    "recipes",
    "record",
    "round_parameters_",
    "round_to",
    "round_to_",
    "scales_of",
    "scaling_state",
    "sensitivity",
    "set_policy",
    "set_scaling_group",
    "snapshots",
    "summary",
    "tally",
    "warm_up",
    "watch",
    "why",
]

# Functions and classes of other libraries, and the calls that replace them here (docs/coming-from.md).
_NAMES_OF_OTHERS = {
    # qtorch
    "BlockFloatingPoint": "fpsim.BlockFormat(...)",
    "FloatingPoint": "a name such as 'e5m2', or fpsim.FloatFormat(...)",
    "OptimLP": "fpsim.quantize_optimizer(optimizer, fpsim.Update(...))",
    "Quantizer": "fpsim.quantize(model, fmt=...), or fpsim.Rounder(...) as a layer",
    "block_quantize": "fpsim.round_to(x, 'mxint8', 'nearest_away')",
    "fixed_point_quantize": "fpsim.round_to(x, fpsim.FixedPoint(8, 4), 'nearest_away')",
    "float_quantize": "fpsim.round_to(x, 'e5m2', 'nearest_away', 'saturate')",
    "quantizer": "fpsim.Rounder(...)",
    # microxcaling
    "MxSpecs": "fpsim.Products(...), or fpsim.recipe('mxfp8')",
    "inject_pyt_ops": "fpsim.emulate(...)",
    # torch, torchao, TransformerEngine, bitsandbytes
    "Adam8bit": "fpsim.quantize_optimizer(optimizer, 'adam8bit')",
    "GradScaler": "ada_loss.GradScaler(...)",
    "autocast": "fpsim.emulate(...), or fpsim.quantize(model, fmt=...)",
    "convert_to_float8_training": "fpsim.quantize(model, fmt='recipe:fp8_current')",
    "fp8_autocast": "fpsim.quantize(model, fmt='recipe:fp8_delayed')",
    "quantize_": "fpsim.quantize(model, fmt=...)",
}

warn_of_namesake()


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]


# A type checker that sees `__getattr__` accepts every name.
if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            # fpsim comes with the distribution ada-loss.
            from importlib.metadata import version

            return version("ada-loss")
        text = f"module 'fpsim' has no attribute {name!r}"
        if name not in _NAMES_OF_OTHERS:
            raise AttributeError(text)
        text += f", which is a name of another library. Use {_NAMES_OF_OTHERS[name]} (docs/coming-from.md)."
        caller = _currentframe().f_back
        # `from fpsim import OptimLP` would replace an AttributeError by an error of its own, without the hint.
        raise (ImportError if caller and caller.f_code.co_name == "_handle_fromlist" else AttributeError)(text)
