"""fpsim: PyTorch models that compute as hardware with a small number format would."""

from fpsim.emulation import emulate
from fpsim.formats import CATALOGUE, FloatFormat, as_format
from fpsim.model import dequantize, quantize, summary
from fpsim.ops import Rounder, decode, encode, manual_seed, round_to, round_to_
from fpsim.policy import Policy
from fpsim.statistics import Tally, record, tally

__all__ = [
    "CATALOGUE",
    "FloatFormat",
    "Policy",
    "Rounder",
    "Tally",
    "as_format",
    "decode",
    "dequantize",
    "emulate",
    "encode",
    "manual_seed",
    "quantize",
    "record",
    "round_to",
    "round_to_",
    "summary",
    "tally",
]
