"""What a drawn case is built on: a body, the way in which its parts are called, a format, and a reference in float64.

A kind of `planted_kinds` or `planted_losses` changes a `Bench`: it puts a function between two stages, makes weights
large, takes another loss. `Bench.trial` builds the model and its step. The reference has the same numbers in float64.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from planted_steps import Of
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

WIDTH, CLASSES, ROWS = 16, 5, 12
NATIVE = {"half": torch.float16, "bfloat16": torch.bfloat16}
AUTOCAST = {"autocast": torch.float16, "autocast_bf16": torch.bfloat16}
# The gradients of a healthy step keep their numbers at these scales of the loss.
SCALES = {"half": 64.0, "autocast": 64.0, "fp16": 64.0, "e4m3fn": 2.0**10, "grad_e5m2": 2.0**10, "grad_e4m3fn": 2.0**10}
SCALES |= {"e5m2": 2.0**10}
BLOCKS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4")
RECIPES = tuple(
    f"recipe:{name}" for name in ("nvfp4", "mxfp8", "fp8_current", "fp8_delayed", "fp8_row", "fp8_tile", "bf16")
)


def policy_of(fmt: str, model: nn.Module) -> Any:
    if fmt.startswith("grad_"):
        return fpsim.Policy(error=fmt[5:], weight_grad=fmt[5:])
    return fmt


def wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


# Stages


class Dense(nn.Module):
    def __init__(self, inputs: int, act: Callable[[Tensor], Tensor], gain: float = 1.0, outputs: int = WIDTH) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(inputs, outputs), act
        nn.init.normal_(self.fc.weight, 0.0, gain / math.sqrt(inputs))
        nn.init.normal_(self.fc.bias, 0.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


class ConvUnit(nn.Module):
    def __init__(self, inputs: int, act: Callable[[Tensor], Tensor], gain: float = 1.0) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(inputs, WIDTH, 3, padding=1), act
        nn.init.normal_(self.conv.weight, 0.0, gain / math.sqrt(9 * inputs))
        self.bn: nn.Module = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Residual(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.bn2, self.act = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
            act,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.bn2(self.conv2(self.act(self.bn(self.conv(x))))))


class Recurrent(nn.Module):
    """A loop over time: x (rows, time, features) gives all states, or with `steps` what is left of x itself."""

    def __init__(self, cell: str, inputs: int = WIDTH, steps: int = 0, gain: float = 1.0) -> None:
        super().__init__()
        self.name, self.steps = cell, steps
        if cell == "tanh":
            self.enter, self.cell = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH)
            nn.init.normal_(self.cell.weight, 0.0, gain / math.sqrt(WIDTH))
        else:
            self.cell = (nn.GRUCell if cell == "gru" else nn.LSTMCell)(inputs, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.steps:
            h = self.enter(x)
            for _ in range(self.steps):
                h = torch.tanh(self.cell(h))
            return h
        h = c = x.new_zeros(len(x), WIDTH)
        states = []
        for t in range(x.shape[1]):
            if self.name == "tanh":
                h = torch.tanh(self.enter(x[:, t]) + self.cell(h))
            elif self.name == "gru":
                h = self.cell(x[:, t], h)
            else:
                h, c = self.cell(x[:, t], (h, c))
            states.append(h)
        return torch.stack(states, 1)


class Block(nn.Module):
    """A layer of a transformer. mask: "fill" or "add" of -inf above the diagonal, "large" of -1e4, or none."""

    def __init__(self, mask: str = "") -> None:
        super().__init__()
        self.norm, self.norm2, self.mask = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mask
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.hidden: Tensor | None = None  # rows and columns that are masked besides

    def forward(self, x: Tensor) -> Tensor:
        y, n = self.norm(x), x.shape[1]
        scores = self.q(y) @ self.k(y).mT
        scores = scores / WIDTH**0.5
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        if self.hidden is not None:
            later = later | self.hidden
        if self.mask in ("fill", "large"):
            scores = scores.masked_fill(later, -torch.inf if self.mask == "fill" else -1e4)
        elif self.mask == "add":
            scores = scores + torch.zeros(n, n, dtype=scores.dtype).masked_fill(later, -torch.inf)
        x = x + self.out(scores.softmax(-1) @ self.v(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x if x.dim() == 2 else x.mean((-2, -1)) if x.dim() == 4 else x[:, -1])


# Bodies: the stages by name, and what they read

Stages = dict[str, nn.Module]
ACTS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, F.gelu, F.silu, torch.relu)
DEPTHS = {
    "mlp": (2, 5),
    "conv": (2, 3),
    "resnet": (1, 2),
    "rnn": (1, 2),
    "gru": (1, 1),
    "lstm": (1, 1),
    "former": (1, 3),
}
BODIES = (*DEPTHS,)
LAYERS = {"Dense": ("fc",), "ConvUnit": ("conv",), "Residual": ("conv", "conv2"), "Head": ("fc",)}
LAYERS |= {"Block": ("v", "out", "up", "down"), "Recurrent": ("cell",)}


def stages_of(body: str, depth: int, act: Callable[[Tensor], Tensor], gain: float, mask: str) -> Stages:
    if body in ("conv", "resnet"):
        stem = ConvUnit(3, act, gain)
        rest = [ConvUnit(WIDTH, act, gain) if body == "conv" else Residual(act) for _ in range(depth)]
    elif body in ("rnn", "gru", "lstm"):
        cell = "tanh" if body == "rnn" else body
        stem, rest = Dense(8, act, gain), [Recurrent(cell) for _ in range(depth)]
    elif body == "former":
        stem, rest = Dense(8, lambda x: x), [Block(mask) for _ in range(depth)]
    else:
        stem, rest = Dense(8, act, gain), [Dense(WIDTH, act, gain) for _ in range(depth)]
    return {"stem": stem, **{f"part{i}": stage for i, stage in enumerate(rest)}, "head": Head()}


def input_of(body: str) -> Tensor:
    if body in ("conv", "resnet"):
        return torch.randn(ROWS, 3, 8, 8)
    return torch.randn(ROWS, 8, 8) if body in ("rnn", "gru", "lstm", "former") else torch.randn(ROWS, 8)


# Shells: the model, and how its parts are called


def in_order(stages: Stages) -> nn.Sequential:
    return nn.Sequential(OrderedDict(stages))


class Net(nn.Module):
    def __init__(self, front: Stages, back: Stages) -> None:
        super().__init__()
        self.body, self.top = in_order(front), in_order(back)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x))


class Coder(nn.Module):
    """Has no forward: `encode` and `decode` are called."""

    def __init__(self, front: Stages, back: Stages) -> None:
        super().__init__()
        self.encoder, self.decoder = in_order(front), in_order(back)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x)


class Lit(nn.Module):
    """As of Lightning: a trainer calls `training_step`."""

    def __init__(self, front: Stages, back: Stages) -> None:
        super().__init__()
        self.net = Net(front, back)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int, loss: Callable[..., Tensor]) -> Tensor:
        x, y = batch
        return loss(self.net(x), y)


Run = Callable[[Any, Tensor, Tensor, Callable[..., Tensor]], Tensor]


def sequential(front: Stages, back: Stages) -> tuple[nn.Module, Run]:
    return in_order({**front, **back}), lambda m, x, y, loss: loss(m(x), y)


def net(front: Stages, back: Stages) -> tuple[nn.Module, Run]:
    return Net(front, back), lambda m, x, y, loss: loss(m(x), y)


def coder(front: Stages, back: Stages) -> tuple[nn.Module, Run]:
    return Coder(front, back), lambda m, x, y, loss: loss(m.decode(m.encode(x)), y)


def pair(front: Stages, back: Stages) -> tuple[nn.Module, Run]:
    model = nn.ModuleDict({"g": in_order(front), "d": in_order(back)})
    return model, lambda m, x, y, loss: loss(m["d"](m["g"](x)), y)


def parts(front: Stages, back: Stages) -> tuple[nn.Module, Run]:
    def run(m: Any, x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        for name in (*front, *back):
            x = m[name](x)
        return loss(x, y)

    return nn.ModuleDict({**front, **back}), run


def lit(front: Stages, back: Stages) -> tuple[nn.Module, Run]:
    return Lit(front, back), lambda m, x, y, loss: m.training_step((x, y), 0, loss)


SHELLS: dict[str, Callable[[Stages, Stages], tuple[nn.Module, Run]]] = {
    "sequential": sequential,
    "net": net,
    "coder": coder,
    "pair": pair,
    "parts": parts,
    "lit": lit,
}


# A step


@dataclass
class Trial:
    """A model and its step, as `why` takes them. by: what the step's gradients are to be divided by."""

    model: nn.Module
    step: Callable[[], Tensor]
    optimizer: Any
    scaler: Any
    paths: dict[str, str]
    by: float
    fmt: str = ""
    factor: float = 1.0  # of the loss, besides; a remedy may set it
    kept: list[Tensor] = field(default_factory=list)  # what a kind wants to look at afterwards

    @property
    def scale(self) -> float:
        return self.factor * self.by * (1.0 if self.scaler is None else self.scaler.get_scale())

    def why(self) -> fpsim.Why:
        return fpsim.why(self.model, self.step, self.optimizer, self.scaler)


@dataclass(frozen=True)
class Drawn:
    """What a case was drawn as; the same numbers come from the same seed."""

    seed: int
    kind: str
    body: str
    shell: str
    fmt: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind}; {self.body}, {self.shell}, {self.fmt}"


class Bench:
    """A model before it is built, which a kind changes. is_planted: else the cause is left out, and all else is there.

    depth, gain: of the body, if not its own. reference: the dtype of a step without a format, from the same numbers.
    """

    def __init__(
        self, drawn: Drawn, is_planted: bool, reference: torch.dtype | None, depth: tuple[int, int] | None, gain: float
    ) -> None:
        self.drawn, self.is_planted, self.reference = drawn, is_planted, reference
        self.random = random.Random(drawn.seed)
        torch.manual_seed(drawn.seed)
        self.fmt, self.dtype = drawn.fmt, NATIVE.get(drawn.fmt)
        act = self.random.choice(ACTS) if gain == 1.0 else torch.tanh
        count = self.random.randint(*(depth or DEPTHS[drawn.body]))
        mask = self.random.choice(("", "fill", "large"))
        self.stages = stages_of(drawn.body, count, act, gain, mask)
        self.x, self.y = input_of(drawn.body), torch.randint(0, CLASSES - 2, (ROWS,))
        self.loss: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(wide(out), y)
        self.scale = SCALES.get(self.fmt, 1.0)
        self.optimizer: Callable[[nn.Module], Any] | None = None
        self.scaler: Callable[[], Any] | None = None
        self.policy: Callable[[dict[str, str], nn.Module], Any] | None = None
        self.late: list[Callable[[Trial], None]] = []
        self.after: Callable[[Trial], None] | None = None
        self.clears = True

    @property
    def is_reference(self) -> bool:
        return self.reference is not None

    def pick(self, bad: Any, good: Any) -> Any:
        return bad if self.is_planted else good

    def low(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A cast that belongs to the cause; the reference does without."""
        return x if self.is_reference else x.to(dtype)

    def insert(self, stage: nn.Module) -> None:
        """Put a stage "point" between two others."""
        names = [*self.stages]
        at = self.random.randint(1, len(names) - 1)
        self.stages = {
            **{name: self.stages[name] for name in names[:at]},
            "point": stage,
            **{name: self.stages[name] for name in names[at:]},
        }

    def point(self, function: Callable[[Tensor], Tensor]) -> None:
        self.insert(Of(lambda _, x: function(x)))

    def unit(self) -> nn.Module:
        """A layer that keeps the shape of what the stages hand on."""
        return nn.Conv2d(WIDTH, WIDTH, 1) if self.drawn.body in ("conv", "resnet") else nn.Linear(WIDTH, WIDTH)

    def before(self, place: str) -> str:
        """A pattern of the places up to a layer's stage: a large weight makes gradients large there."""
        names = [*self.stages]
        return "|".join(f"{{{name}}}[:.].*" for name in names[: names.index(place[1 : place.index("}")]) + 1])

    def layer(self, *, has_head: bool = True) -> tuple[Any, str]:
        """A layer with a weight, and its place, such as "{part0}.fc"."""
        found = [
            (getattr(stage, name), f"{{{key}}}.{name}")
            for key, stage in self.stages.items()
            for name in LAYERS.get(type(stage).__name__, ())
            if hasattr(getattr(stage, name), "weight") and (has_head or key != "head")
        ]
        return self.random.choice(found)

    def trial(self) -> Trial:
        names = [*self.stages]
        at = self.random.randint(1, len(names) - 1)
        front, back = ({name: self.stages[name] for name in some} for some in (names[:at], names[at:]))
        model, run = SHELLS[self.drawn.shell](front, back)
        paths = {path.rpartition(".")[2]: path for path, _ in model.named_modules() if path.count(".") < 3}
        paths = {name: paths[name] for name in self.stages}
        auto = None if self.is_reference else AUTOCAST.get(self.fmt)
        x = self.x
        if self.reference is not None:
            if self.dtype is not None:
                model, x = model.to(self.dtype), x.to(self.dtype)
            model, x = model.to(self.reference), x.to(self.reference)
        elif self.dtype is not None:
            model, x = model.to(self.dtype), x.to(self.dtype)
        elif self.fmt != "float32" and self.fmt not in AUTOCAST:
            given = policy_of(self.fmt, model) if self.policy is None else self.policy(paths, model)
            model = fpsim.quantize(model, given)
        scaler = None if self.scaler is None or self.is_reference else self.scaler()
        optimizer = None if self.optimizer is None else self.optimizer(model)
        by = 1.0 if scaler is not None else self.scale
        trial = Trial(model, lambda: torch.zeros(()), optimizer, scaler, paths, by, self.fmt)
        loss_of, y, clears = self.loss, self.y, lambda: self.clears

        def step() -> Tensor:
            if clears():
                model.zero_grad()
            with torch.autocast("cpu", auto, enabled=auto is not None):
                loss = run(model, x, y, loss_of)
            scaled = loss * (trial.by * trial.factor)
            (scaled if scaler is None else scaler.scale(scaled)).backward()
            if self.after is not None:
                self.after(trial)
            return loss

        trial.step = step
        for late in self.late:
            late(trial)
        return trial
