"""Formats of the weights and states that an optimizer stores: `Update`, and the updates by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fpsim.checks import did_you_mean, known_arguments, nearest, require_whole, require_word, shown
from fpsim.formats.blocks import POWER_RULES, BlockFormat, Format, as_format
from fpsim.formats.floats import CATALOGUE
from fpsim.policies.policy import RoleFormat
from fpsim.tensors.spec import RoundingSpec, Spec, any_spec

__all__ = ["UPDATES", "UPDATE_SCALES", "Storage", "Update", "UpdateLike", "as_update", "state_storage", "updates_of"]

COMPENSATIONS = {
    "kahan": "what rounding took from the weight is added to the next update (Kahan; Zamirai et al., arXiv 2010.06192)",
    "pair": "the weight is a sum of two numbers of its format (Collage, arXiv 2405.03637)",
    "remainder16": "bfloat16 weights and the 16 bits that make them float32 (TransformerEngine, FusedAdam)",
}
LOST = {
    "least": "an update that rounding would lose changes the number by the least that its format has there (as "
    "chainerlp's LpMomentumSGD(rule='deterministic'), whose update of 0 becomes the least magnitude)"
}
ARITHMETICS = ("float32", "format", "torch")
DECAYS = ("inside", "before_uncompensated")
UPDATE_SCALES = {
    "power_of_two": "the largest power of two under which nothing saturates (FP8-LM: 2**floor(log2(largest / amax)))",
    **dict.fromkeys(POWER_RULES, "a power of two, see fpsim.formats.blocks.SCALE_RULES"),
    "amax": "largest / amax in float32, by which elements are multiplied (TransformerEngine's current scaling)",
    "amax_torchao": "elements are divided by max(amax, 1e-12) / largest in float32 (torchao.optim)",
    "amax_te": "elements are multiplied by 1 / (amax / range), range 32752 in fp16 (TransformerEngine, FusedAdam)",
}
FROM_LIBRARIES = ("amax_torchao", "amax_te")
WEIGHT, MASTER = "weight", "master"


@dataclass(frozen=True)
class Storage:
    """Storage of one tensor: its rounding, and the rule of its scale if that is the special rule of a library.

    spec: the format, and the rounding to it.
    library_scale: "amax_torchao" or "amax_te" of UPDATE_SCALES; None for the format's own rule.
    """

    spec: Spec
    library_scale: str | None = None

    def __str__(self) -> str:
        return f"{self.spec} {self.library_scale}" if self.library_scale else str(self.spec)

    @property
    def shares_scales(self) -> bool:
        return not isinstance(self.spec, RoundingSpec)

    def rounded_by(self, rounding: str) -> Storage:
        """Return a storage in the same format, with a rounding that is not stochastic."""
        return replace(self, spec=any_spec(self.spec.fmt, rounding, self.spec.overflow))

    @property
    def bits(self) -> float:
        """Bits of an element and its part of a block's scale. The scale of a row or a tensor is not counted."""
        fmt = self.spec.fmt
        return fmt.bits_per_value if isinstance(fmt, BlockFormat) else fmt.bits


@known_arguments()
@dataclass(frozen=True)
class Update:
    """Formats in which an optimizer stores weights and states. None stands for float32.

    With arithmetic="float32" the optimizer computes its step in float32, and rounds once, when it stores the results,
    as torchao, bitsandbytes, MS-AMP and TransformerEngine do.

    Args:
        weight: the format of parameters; None leaves them in float32, or in the format of the master copy.
        rounding: the rounding of the weight, as in `round_to`; or a mapping from "weight", "master" and names of states
            to roundings. Tensors whose names are missing are rounded to nearest even.
        random_bits: as in `round_to`, for stochastic roundings.
        compensation: how the rounding error of the weight is stored: None, "kahan", "pair" (two numbers of
            the weight's format) or "remainder16" (the lower 16 bits of a float32, which a bfloat16 does not have).
        lost: the handling of an update that is lost because rounding to nearest returns the old number. None loses it.
            "least" moves the number to its neighbour in the direction of the update, for example 0 to the least
            magnitude. This is biased, because even a tiny update counts as a whole spacing; `rounding="stochastic"` is
            not biased. It applies to the master copy if there is one, else to the weight, in formats of single numbers.
        master: the format of a copy of the weights, which the optimizer updates instead of the weights.
        states: {name: format}, with names as in `optimizer.state[parameter]` and * for any characters; or one format
            for all states that have the parameter's shape, or its number of elements if they are in a dict or a list.
        min_size: the states of parameters with fewer elements stay float32.
        arithmetic: "float32"; "format": each operation of the step is rounded to the weight's format, and so are
            learning rate and coefficients; "torch": the same, except that coefficients are float32, as in torch's
            bfloat16 kernels. On the CPU the coefficients of sums are rounded there too.
        decay: the place of decoupled weight decay with "format" or "torch": "inside" of the update, where a
            compensation takes it into account, or "before_uncompensated", as a separate product before the update, as
            in torch. None takes "inside" for the compensation "pair", and "before_uncompensated" otherwise.
        scale: the rule by which the scales of block formats depend on amax, instead of the formats' own rules: one of
            UPDATE_SCALES.
        overrides: {pattern: Update, name or None} for some parameters; None leaves them in float32. A pattern is the
            name of a parameter or a module ("head"), with * for single parts ("blocks.*.norm"), or a module class. If
            several patterns match, the last one wins.

    The numbers of a block are neighbours in memory, as in bitsandbytes and torchao; rows and tiles are those of the
    tensor.

    Raises:
        ValueError: for unknown words, and for combinations that no optimizer could have.
        TypeError: for values of other types.

    >>> print(Update(weight="bf16", rounding="stochastic"))
    weight=bf16 stochastic
    >>> print(Update(states={"exp_avg": "e4m3fn per tensor", "exp_avg_sq": "fp16 per tensor"}, scale="power_of_two"))
    exp_avg=e4m3fn per tensor ceil nearest_even, exp_avg_sq=fp16 per tensor ceil nearest_even saturate
    """

    weight: RoleFormat | None = None
    rounding: str | Mapping[str, str] = "nearest_even"
    random_bits: int | None = None
    compensation: str | None = None
    master: RoleFormat | None = None
    states: RoleFormat | Mapping[str, RoleFormat | None] = field(default_factory=dict)
    min_size: int = 0
    arithmetic: str = "float32"
    decay: str | None = None
    scale: str | None = None
    overrides: Mapping[str | type[nn.Module], UpdateLike] = field(default_factory=dict)
    lost: str | None = None

    def __post_init__(self) -> None:
        require_word("arithmetic", self.arithmetic, ARITHMETICS)
        require_whole("min_size", self.min_size, 0)
        for name, known in (
            ("compensation", COMPENSATIONS),
            ("decay", DECAYS),
            ("scale", UPDATE_SCALES),
            ("lost", LOST),
        ):
            if getattr(self, name) is not None:
                require_word(name, getattr(self, name), known)
        if not isinstance(self.rounding, str | Mapping):
            raise TypeError(
                f"rounding is {shown(self.rounding)}. Expected: a word, such as 'stochastic', or a mapping from "
                f"'weight', 'master' and names of states to words."
            )
        _require_roundings(self)
        storages = self._storages()
        if self.scale is not None and not any(s is not None and s.shares_scales for s in storages):
            raise ValueError(
                f"scale={self.scale!r} was given, and no format here has scales. Use formats that have, such as "
                f"'e4m3fn per tensor', or omit scale."
            )
        _require_compensation(self)
        _require_arithmetic(self)
        _require_lost(self)
        _require_overrides(self)

    # Storage of each tensor

    @property
    def state_patterns(self) -> dict[str, RoleFormat | None]:
        """The formats by names of states, which may have wildcards."""
        if isinstance(self.states, Mapping):
            return dict(self.states)
        return {"*": self.states}

    def _storages(self) -> list[Storage | None]:
        states = (state_storage(self, name) for name in self.state_patterns)
        return [self.weight_storage, self.master_storage, *states]

    def _rounding_of(self, name: str) -> str:
        if isinstance(self.rounding, Mapping):
            return self.rounding.get(name, "nearest_even")
        return self.rounding if name == WEIGHT else "nearest_even"

    def _storage(self, name: str, fmt: RoleFormat | None) -> Storage | None:
        if fmt is None:
            return None
        resolved: Format = as_format(fmt)
        is_library = self.scale in FROM_LIBRARIES and isinstance(resolved, BlockFormat)
        if self.scale is not None and not is_library and isinstance(resolved, BlockFormat):
            resolved = _with_scale(resolved, self.scale)
        rounding = self._rounding_of(name)
        bits = self.random_bits if rounding == "stochastic" else None
        return Storage(any_spec(resolved, rounding, None, bits), self.scale if is_library else None)

    @property
    def weight_storage(self) -> Storage | None:
        """The storage of the weight that the model reads."""
        if self.compensation == "remainder16":
            return Storage(any_spec("bf16", "nearest_away"))  # because of the remainder's sign, ties go away from zero
        return self._storage(WEIGHT, self.weight)

    @property
    def master_storage(self) -> Storage | None:
        """The storage of the copy that the optimizer updates."""
        return self._storage(MASTER, self.master)

    @property
    def has_copy(self) -> bool:
        """True if the optimizer works on numbers that the model does not see."""
        return self.compensation in ("pair", "remainder16") or (self.master is not None and self.weight is not None)

    @property
    def is_in_format(self) -> bool:
        """True if each operation of the step is rounded."""
        return self.arithmetic != "float32"

    @property
    def decays_inside(self) -> bool:
        """True if decoupled weight decay is part of the update; used if the update is not computed in float32."""
        return self.decay == "inside" if self.decay is not None else self.compensation == "pair"

    @property
    def is_float32(self) -> bool:
        """True if nothing is rounded anywhere."""
        inner = (as_update(other) for other in self.overrides.values())
        return all(s is None or _is_exact(s) for s in self._storages()) and all(u.is_float32 for u in inner)

    def __str__(self) -> str:
        words = [
            f"{name}={storage}"
            for name, storage in (
                (WEIGHT, self.weight_storage),
                (MASTER, self.master_storage),
                *((name, state_storage(self, name)) for name in self.state_patterns),
            )
            if storage is not None
        ]
        words += [f"compensation={self.compensation}"] * (self.compensation is not None)
        words += [f"lost={self.lost}"] * (self.lost is not None)
        words += [f"min_size={self.min_size}"] * (self.min_size > 0)
        if self.is_in_format:
            decay = "inside" if self.decays_inside else "before_uncompensated"
            words += [f"arithmetic={self.arithmetic}", f"decay={decay}"]
        text = ", ".join(words) or "float32"
        for pattern, inner in self.overrides.items():
            text += f"; {pattern if isinstance(pattern, str) else pattern.__name__}: {as_update(inner)}"
        return text


UpdateLike = Update | str | None


def state_storage(update: Update, name: str) -> Storage | None:
    """Return the storage of the state with this name; None if it stays float32."""
    # The first pattern that matches applies, as in a shell's `case`. Among overrides of parameters, the last pattern
    # that matches applies, as in a policy.
    fmt = next((f for pattern, f in update.state_patterns.items() if fnmatchcase(name, pattern)), None)
    return update._storage(name, fmt)


def _is_exact(storage: Storage) -> bool:
    return isinstance(storage.spec, RoundingSpec) and storage.spec.is_float32


def _with_scale(fmt: BlockFormat, scale: str) -> BlockFormat:
    """Return the format with another rule for its scales."""
    # Libraries store one scale for each block, so a format's second scale and its gain are dropped.
    if scale == "amax":
        return replace(fmt, scale=CATALOGUE["fp32"], scale_rule="amax", tensor_scale=False, gain=1.0)
    rule = "ceil" if scale == "power_of_two" else scale
    return replace(fmt, scale=CATALOGUE["e8m0fnu"], scale_rule=rule, tensor_scale=False, gain=1.0)


def _require_roundings(update: Update) -> None:
    names = {WEIGHT: update.weight, MASTER: update.master, **update.state_patterns}
    if isinstance(update.rounding, Mapping):
        for name in update.rounding:
            if name not in names and not any(fnmatchcase(str(name), pattern) for pattern in update.state_patterns):
                raise ValueError(
                    f"rounding names {shown(name)}, which has no format here.{did_you_mean(name, names)} Expected: "
                    f"'weight', 'master', or a state of states=."
                )
    elif update.weight is None and update.rounding != "nearest_even":
        any_spec("fp32", update.rounding)  # raises an error for an unknown word
        raise ValueError(
            f"rounding={update.rounding!r} is the weight's, and weight is None. Name its format, weight='bf16', or "
            f"what is rounded so: rounding={{'master': {update.rounding!r}}}."
        )
    words = update.rounding.values() if isinstance(update.rounding, Mapping) else [update.rounding]
    if update.random_bits is not None and "stochastic" not in words:
        raise ValueError(
            f"random_bits={shown(update.random_bits)} was given, and nothing is rounded stochastically. Use "
            f"rounding='stochastic', or omit random_bits."
        )
    storages = {name: update._storage(name, fmt) for name, fmt in names.items()}
    for name, storage in storages.items():
        if storage is None:
            continue
        fmt = storage.spec.fmt
        if isinstance(fmt, BlockFormat) and fmt.is_delayed:
            raise ValueError(
                f"{name} has the format {fmt}, whose scale is delayed. What is stored has a scale of its own: use "
                f"'{fmt.element} per tensor fp32'."
            )
        if storage.library_scale is not None and isinstance(fmt, BlockFormat) and isinstance(fmt.block, tuple):
            raise ValueError(
                f"scale={update.scale!r} was given with tiles of {name}={fmt}, which no library has. Use scale='amax', "
                f"or blocks of a number of elements, 'row' or 'tensor'."
            )


def _require_compensation(update: Update) -> None:
    if update.compensation is None:
        return
    given = f"compensation={update.compensation!r}"
    if update.weight is None:
        raise ValueError(f"{given} was given without a format of the weight. Add weight='bf16'.")
    weight = as_format(update.weight)
    if isinstance(weight, BlockFormat):
        raise ValueError(
            f"{given} was given with weight={weight}, whose numbers share scales. Use a format of single numbers, such "
            f"as '{weight.element}'."
        )
    if update.master is not None:
        raise ValueError(f"{given} was given with master={shown(update.master)}, which loses nothing. Omit one.")
    if update._rounding_of(WEIGHT) != "nearest_even" and not (
        update.compensation == "remainder16" and update._rounding_of(WEIGHT) == "nearest_away"
    ):
        raise ValueError(
            f"{given} was given with rounding={update._rounding_of(WEIGHT)!r}. A compensation keeps what rounding to "
            f"nearest takes. Omit rounding, or the compensation."
        )
    if update.compensation == "remainder16" and weight != CATALOGUE["bf16"]:
        raise ValueError(
            f"{given} was given with weight={weight}. It is the 16 bits that a bfloat16 lacks of a float32: use "
            f"weight='bf16', or compensation='pair'."
        )


def _require_arithmetic(update: Update) -> None:
    if update.arithmetic == "float32":
        if update.decay == "before_uncompensated":
            raise ValueError(
                "decay='before_uncompensated' was given with arithmetic='float32', where decay and update are rounded "
                "together, once. Use arithmetic='format', or omit decay."
            )
        return
    if update.weight is None or isinstance(as_format(update.weight), BlockFormat):
        raise ValueError(
            f"arithmetic={update.arithmetic!r} was given with weight={shown(update.weight)}. It computes in the "
            f"weight's format: use one of single numbers, such as weight='bf16'."
        )
    wrong = {
        "master": update.master is not None,
        "states": bool(update.state_patterns),
        "min_size": update.min_size > 0,
        "rounding": update._rounding_of(WEIGHT) != "nearest_even",
        "compensation": update.compensation == "remainder16",
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(
                f"{name}={shown(getattr(update, name))} was given with arithmetic={update.arithmetic!r}, where states "
                f"are in the weight's format, and each operation is rounded to nearest even. Omit {name}, or use "
                f"arithmetic='float32'."
            )


def _require_lost(update: Update) -> None:
    """Raise ValueError for a `lost` if no update can be lost, or if a number's neighbour is not known in advance."""
    if update.lost is None:
        return
    given = f"lost={update.lost!r}"
    name = WEIGHT if update.master is None else MASTER
    stepped = update.weight_storage if update.master is None else update.master_storage
    if stepped is None:
        raise ValueError(
            f"{given} was given without a format of the weight, where no update is lost. Add weight='bf16'."
        )
    if stepped.shares_scales:
        raise ValueError(
            f"{given} was given with {name}={stepped.spec.fmt}, whose numbers share a scale that each step changes. "
            f"Use a format of single numbers, such as {name}='bf16'."
        )
    if update.compensation is not None:
        raise ValueError(
            f"{given} was given with compensation={update.compensation!r}, which loses no update. Omit one of them."
        )
    if update.is_in_format:
        raise ValueError(
            f"{given} was given with arithmetic={update.arithmetic!r}, whose operations are those of torch. Use "
            f"arithmetic='float32'."
        )
    rounding = update._rounding_of(name)
    if rounding not in ("nearest_even", "nearest_away"):
        raise ValueError(
            f"{given} was given with rounding={rounding!r} of the {name}. An update is lost that rounding to nearest "
            f"takes. Omit rounding, or lost."
        )


def _require_overrides(update: Update) -> None:
    if not isinstance(update.overrides, Mapping):
        raise TypeError(
            f"overrides is {shown(update.overrides)}, which is not a mapping. Expected: such as {{'head': None}}."
        )
    for pattern, inner in update.overrides.items():
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(f"The pattern {shown(pattern)} is neither a name, with * for parts, nor a module class.")
        if as_update(inner).overrides:
            raise ValueError(
                f"The update for {shown(pattern)} has overrides of its own. Put all patterns in one update."
            )


def as_update(update: Any) -> Update:
    """Return the `Update` of an `Update`, of a name of UPDATES, or of None (everything float32).

    >>> print(as_update("bf16_sr"))
    weight=bf16 stochastic, *=bf16 nearest_even
    """
    if isinstance(update, Update):
        return update
    if update is None:
        return Update()
    if isinstance(update, str) and update in UPDATES:
        return UPDATES[update]
    if isinstance(update, str):
        raise ValueError(
            f"Unknown update {shown(update)}.{did_you_mean(update, UPDATES)} Known: {', '.join(UPDATES)}. A format of "
            f"the weight alone is fpsim.Update(weight={shown(update)})."
        )
    raise TypeError(f"The update is {shown(update)}. Expected: a fpsim.Update, or a name such as 'bf16_sr'.")


# Each update reproduces the library or method of its name, see docs/updates.md and tests/fpsim/test_update_presets.py.
UPDATES: dict[str, Update] = {
    "bf16": Update(weight="bf16", arithmetic="torch"),
    "bf16_sr": Update(weight="bf16", rounding="stochastic", states="bf16"),
    "bf16_kahan": Update(weight="bf16", compensation="kahan", arithmetic="torch"),
    "bf16_collage": Update(weight="bf16", compensation="pair", arithmetic="torch"),
    "adam8bit": Update(
        states={"exp_avg": "dynamic8 per 256 fp32", "exp_avg_sq": "udynamic8 per 256 fp32"},
        min_size=4096,
        scale="amax_torchao",
    ),
    "adam4bit": Update(
        states={"exp_avg": "dynamic4 per 128 fp32", "exp_avg_sq": "ulinear4 per 128 fp32"},
        min_size=4096,
        scale="amax_torchao",
    ),
    "adam_fp8": Update(
        states=dict.fromkeys(("exp_avg", "exp_avg_sq"), "e4m3fn per 256 fp32"), min_size=4096, scale="amax_torchao"
    ),
    "fp8_lm": Update(
        master="fp16 per tensor",
        states={"exp_avg": "e4m3fn per tensor", "exp_avg_sq": "fp16 per tensor"},
        scale="power_of_two",
    ),
    "te_fp16_master": Update(weight="bf16", master="fp16 per tensor fp32", scale="amax_te"),
    "bf16_remainder": Update(weight="bf16", compensation="remainder16"),
    "muon_bf16": Update(states={"momentum_buffer": "bf16"}),
}


# The update of each parameter: the patterns of `Update.overrides`


def updates_of(update: Update, names: list[str], classes: Mapping[str, list[type]]) -> list[Update]:
    """Return the update of each parameter by its name, with overrides resolved.

    Args:
        update: the update of the optimizer.
        names: the names of the parameters, such as "blocks.0.norm.weight".
        classes: the classes of the modules, by name; empty without a model.

    Raises:
        ValueError: for a pattern that matches no parameter.
    """
    updates = [replace(update, overrides={})] * len(names)
    for pattern, inner in update.overrides.items():
        matched = [i for i, name in enumerate(names) if _matches(pattern, name, classes)]
        if not matched:
            raise ValueError(_no_match(pattern, names, classes))
        for i in matched:
            updates[i] = as_update(inner)
    return updates


def _matches(pattern: str | type[nn.Module], name: str, classes: Mapping[str, list[type]]) -> bool:
    parts = name.split(".")
    if not isinstance(pattern, str):
        places = [".".join(parts[:i]) for i in range(len(parts))]
        return any(issubclass(kind, pattern) for place in places for kind in classes.get(place, ()))
    wanted = pattern.split(".")
    return len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted))


def _no_match(pattern: str | type[nn.Module], names: list[str], classes: Mapping[str, list[type]]) -> str:
    if not isinstance(pattern, str):
        kinds = sorted({kind.__name__ for of_module in classes.values() for kind in of_module})
        remedy = f"Classes that have parameters: {', '.join(kinds)}." if kinds else "Classes need model=model."
        return f"The pattern {pattern.__name__} matches no parameter. {remedy}"
    near = nearest(pattern, names, most=3, cutoff=0.4) or names[:5]
    if not classes and all(name.replace(".", "").isdecimal() for name in names):
        return f"The pattern {shown(pattern)} matches no parameter, for they have no names. Give model=model."
    return (
        f"The pattern {shown(pattern)} matches no parameter. Names are those of model.named_parameters(), for instance "
        f"{', '.join(near)}; * stands for one part of a name."
    )
