"""fpsim: PyTorch models that compute as hardware with a small number format would."""

from fpsim.formats import CATALOGUE, FloatFormat, as_format
from fpsim.ops import Rounder, decode, encode, manual_seed, round_to, round_to_

__all__ = ["CATALOGUE", "FloatFormat", "Rounder", "as_format", "decode", "encode", "manual_seed", "round_to", "round_to_"]
