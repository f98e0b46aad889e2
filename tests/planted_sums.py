"""Sums that lose their terms little by little, integers that a format does not hold, averages that do not move.

Cases are generated: forms of a sum, formats and lengths. Beside each stands a control in which float32 adds up, or
there is nothing to lose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from planted_steps import CASES, HEALTHY, Case, Of, Step, in_format, in_training, linear, mean_square, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fpsim

NATIVE = {"half": torch.float16, "bfloat16": torch.bfloat16}
HOLDS = {"half": 2048, "fp16": 2048, "bfloat16": 256, "bf16": 256}  # from there on a term below 1 is lost


def planted(name: str, kind: str, place: str, role: str, build: Callable[[], Step], missed: str = "") -> None:
    CASES.append(Case(name, partial(_seeded, build), kind, place, role, "own", missed))


def fine(name: str, build: Callable[[], Step]) -> None:
    named = partial(_seeded, build)
    named.__name__ = name  # type: ignore[attr-defined]
    HEALTHY["own"].append(named)


def _seeded(build: Callable[[], Step]) -> Step:
    torch.manual_seed(0)
    return build()


# What adds up the numbers of a tensor: (n, features) -> (features,)


def loop(x: Tensor) -> Tensor:
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total


def in_place(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for term in x:
        total += term
    return total


def from_numbers(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1], dtype=x.dtype)
    for term in x:
        total.add_(term)
    return total


def by_python(x: Tensor) -> Tensor:
    return sum(x.unbind(), start=torch.zeros(x.shape[1]).to(x.dtype))


def subtracted(x: Tensor) -> Tensor:
    total = -x[0]
    for term in x[1:]:
        total = total - term
    return -total


def stored_after_each(x: Tensor) -> Tensor:
    total = x[0]
    for term in x[1:]:
        total = (total.float() + term.float()).to(x.dtype)
    return total


def index_add(x: Tensor) -> Tensor:
    """torch 2.13 adds up numbers in the dtype here, and rows in float32."""
    where = torch.zeros(len(x), dtype=torch.long)
    return torch.stack([torch.zeros(2, dtype=x.dtype).index_add(0, where, numbers)[0] for numbers in x.T])


def index_put(x: Tensor) -> Tensor:
    where = torch.zeros(len(x), dtype=torch.long)
    sums = [torch.zeros(2, dtype=x.dtype).index_put((where,), numbers, accumulate=True) for numbers in x.T]
    return torch.stack(sums)[:, 0]


def scatter_add(x: Tensor) -> Tensor:
    where = torch.zeros(x.shape, dtype=torch.long)
    return torch.zeros(2, x.shape[1], dtype=x.dtype).scatter_add(0, where, x)[0]


def index_add_in_parts(x: Tensor) -> Tensor:
    total = torch.zeros(2, x.shape[1], dtype=x.dtype)
    for part in x.split(4):
        total.index_add_(0, torch.zeros(len(part), dtype=torch.long), part)
    return total[0]


LOSING = (loop, in_place, by_python, subtracted, stored_after_each)
# Where a format is emulated, what a factory makes is float32, and the result of one operation is rounded once.
LOSING_IN_DTYPES = (from_numbers, index_add, index_put, index_add_in_parts)


def at_once(x: Tensor) -> Tensor:
    return x.sum(0)


def mean(x: Tensor) -> Tensor:
    return x.mean(0) * len(x)


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(0)[-1]


def product_with_ones(x: Tensor) -> Tensor:
    return torch.ones_like(x[:, :1]).T @ x


def in_pairs(x: Tensor) -> Tensor:
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def in_float32(x: Tensor) -> Tensor:
    return loop(x.float()).to(x.dtype)


def into_float32(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1])
    for term in x:
        total += term
    return total.to(x.dtype)


KEEPING = (at_once, mean, cumsum, scatter_add, product_with_ones, in_pairs, in_float32, into_float32)


def sum_step(form: Callable[[Tensor], Tensor], fmt: str, terms: int, first: float) -> Step:
    """The terms are between 0.5 and 0.9, but for the first: below half an ulp of it they are lost."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.cat([x[:1] * 0 + first, 0.5 + 0.4 * torch.sigmoid(self.fc(x))[1:]])
        return self.out(self.sums(y)[None] / len(x))  # type: ignore[no-any-return]

    def summed(self: Any, y: Tensor) -> Tensor:
        return form(y)

    model, cast = in_format(Of(forward, fc=linear(4, 4), sums=Of(summed), out=linear(4, 3)), fmt)
    x = cast(seeded(terms, 4))
    return in_training(model, lambda: model(x).float().square().sum())


def step_of_losses(fmt: str, terms: int, form: Callable[[Tensor], Tensor] = loop) -> Step:
    """A loss for each example, of a model without a batch: they are added up outside of the model."""
    model, cast = in_format(linear(4, 3), fmt)
    x, y = cast(seeded(terms, 4) * 0.2), torch.arange(terms) % 3

    def loss() -> Tensor:
        losses = F.cross_entropy(model(x), y, reduction="none")
        return form(losses[:, None])[0]

    return in_training(model, loss)


for losing in LOSING:
    for fmt in HOLDS:
        build = partial(sum_step, losing, fmt, 64, HOLDS[fmt])
        planted(f"sum_{losing.__name__}-{fmt}", "swamping", "sums:.*", "activation", build)
for losing in LOSING_IN_DTYPES:
    for fmt in NATIVE:
        build = partial(sum_step, losing, fmt, 64, HOLDS[fmt])
        planted(f"sum_{losing.__name__}-{fmt}", "swamping", "sums:.*", "activation", build)
for terms in (600, 1200):
    planted(f"losses_{terms}", "swamping", ":add.*", "activation", partial(step_of_losses, "bfloat16", terms))
for keeping in KEEPING:
    for fmt in HOLDS:
        if keeping is not in_float32 or fmt in NATIVE:
            fine(f"sum_{keeping.__name__}_{fmt}", partial(sum_step, keeping, fmt, 64, HOLDS[fmt]))
for terms in (16, 256, 4096):
    for fmt in HOLDS:
        fine(f"sum_of_{terms}_{fmt}", partial(sum_step, at_once, fmt, terms, 0.5))
for fmt in HOLDS:
    fine(f"few_terms_{fmt}", partial(sum_step, loop, fmt, 16, 0.5))
fine("losses_at_once", partial(step_of_losses, "bfloat16", 1200, at_once))


# Averages over the steps of a recurrence


def running_mean(x: Tensor, seen: int = 600) -> Tensor:
    """Of so many numbers before."""
    mean = x[0]
    for count, term in enumerate(x[1:], seen):
        mean = mean + (term - mean) / count
    return mean


def smoothed(x: Tensor, decay: float = 0.999) -> Tensor:
    average = x[0]
    for term in x[1:]:
        average = decay * average + (1 - decay) * term
    return average


def smoothed_by_lerp(x: Tensor) -> Tensor:
    average = x[0]
    for term in x[1:]:
        average = torch.lerp(average, term, 0.001)
    return average


def rising_step(form: Callable[[Tensor], Tensor], fmt: str, terms: int) -> Step:
    """From about 0.6 to 1.6: in bf16 half an ulp of 0.6 is 0.002, and a thousandth of the way is lost each time."""

    def forward(self: Any, x: Tensor) -> Tensor:
        first = torch.cat([torch.zeros(1, 1), torch.ones(len(x) - 1, 1)]).to(x.dtype)
        return self.out(self.sums(0.55 + 0.1 * torch.sigmoid(self.fc(x)) + first)[None])  # type: ignore[no-any-return]

    def averaged(self: Any, y: Tensor) -> Tensor:
        return form(y)

    model, cast = in_format(Of(forward, fc=linear(4, 4), sums=Of(averaged), out=linear(4, 3)), fmt)
    x = cast(seeded(terms, 4))
    return in_training(model, lambda: model(x).float().square().sum())


for form in (running_mean, smoothed, smoothed_by_lerp):
    for fmt in ("bfloat16", "bf16"):
        build = partial(rising_step, form, fmt, 100)
        planted(f"{form.__name__}-{fmt}", "swamping", "sums:.*", "activation", build)
    fine(f"{form.__name__}_of_few", partial(rising_step, form, "bf16", 8))
    fine(f"{form.__name__}_in_float32", partial(rising_step, form, "float32", 100))
fine("smoothed_quickly", partial(rising_step, partial(smoothed, decay=0.75), "bf16", 100))


# Accumulators of products


def accumulator_step(accumulator: str | None, inputs: int, batch: int = 4) -> Step:
    """Terms of one sign; of a batch also in the gradient of the weight."""

    def spread(self: Any, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) * 0 + torch.ones(len(x), inputs)

    plain = nn.Sequential(linear(8, 4), Of(spread), nn.Linear(inputs, 2), linear(2, 2))
    with torch.no_grad():
        plain[2].weight.copy_(seeded(2, inputs).abs() * 0.01)
    products = fpsim.Products(accumulator=accumulator)
    model = fpsim.quantize(plain, fpsim.Policy(products=products))
    x = seeded(batch, 8)
    return in_training(model, lambda: model(x).square().mean())


planted("accumulator_4096", "swamping", "2:linear", "activation", partial(accumulator_step, "bf16", 4096))
planted("accumulator_1024", "swamping", "2:linear", "activation", partial(accumulator_step, "bf16", 1024))
planted("accumulator_of_the_gradient", "swamping", ".*:linear", "error", partial(accumulator_step, "bf16", 8, 2048))
fine("accumulator_of_16", partial(accumulator_step, "bf16", 16))
fine("accumulator_in_chunks", partial(accumulator_step, "cb16_chunk64", 4096))
fine("accumulator_of_float32", partial(accumulator_step, None, 4096))


# Gradients that are added to .grad one by one


def micro_batches(fmt: str, count: int) -> Step:
    model, cast = in_format(nn.Sequential(linear(4, 4), linear(4, 1)), fmt)
    x = cast(seeded(count, 1, 4).abs())

    def step() -> None:
        model.zero_grad()
        for part in x:
            model(part).float().sum().backward()

    return Step(model, step)


planted("micro_batches", "swamping", r"\d\.(weight|bias)", "gradient", partial(micro_batches, "bfloat16", 300))
fine("eight_micro_batches", partial(micro_batches, "bfloat16", 8))
fine("micro_batches_in_float32", partial(micro_batches, "float32", 100))


# Gradients of what is read many times


def read_in_each_step(self: Any, x: Tensor) -> Tensor:
    """Each loss reads the weight, and their gradients have one sign."""
    terms = [self.fc(row) for row in x]
    return torch.stack(terms).float().sum()


def looked_up(self: Any, x: Tensor) -> Tensor:
    """Most of the tokens are padding, which has a row too."""
    return self.table(torch.arange(len(x)) % 300 // 299).float().sum() + self.fc(x).float().mean()


def scaled_in_each_step(self: Any, x: Tensor) -> Tensor:
    """A result that many operations read."""
    h = self.fc(x[:1])
    return torch.stack([h * (1 + row[0].abs()) for row in x]).float().sum()


def reads_step(forward: Callable[[Any, Tensor], Tensor], fmt: str, count: int) -> Step:
    """fmt: "autocast" keeps a cast of the weight, to which all its readers give their gradients."""
    plain = Of(forward, fc=linear(4, 4), table=nn.Embedding(2, 4))
    model, cast = in_format(plain, "float32" if fmt == "autocast" else fmt)
    x = cast(seeded(count, 4).abs())
    return in_training(model, lambda: model(x) / count, auto=torch.bfloat16 if fmt == "autocast" else None)


for forward, place, role in (
    (looked_up, r"table\.weight", "weight_grad"),
    (read_in_each_step, r"fc\.(weight|bias)", "weight_grad"),
    (scaled_in_each_step, "fc:linear", "error"),
):
    build = partial(reads_step, forward, "bfloat16", 600 if forward is looked_up else 1000)
    planted(f"{forward.__name__}-bfloat16", "swamping", place, role, build)
    fine(f"{forward.__name__}_in_float32", partial(reads_step, forward, "float32", 100))
    fine(f"{forward.__name__}_of_few", partial(reads_step, forward, "bfloat16", 8))
build = partial(reads_step, read_in_each_step, "autocast", 1000)
planted("read_in_each_step-autocast", "swamping", r"fc\.(weight|bias)", "weight_grad", build)


# Integers that go through a format


def half_and_back(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).long()


def like_another(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.type_as(torch.zeros(1, dtype=dtype)).to(torch.int64)


def by_method(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.half() if dtype is torch.float16 else x.bfloat16()).int()


def counted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (torch.ones(len(x), dtype=dtype).cumsum(0) - 1).long()


def ranged(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.arange(len(x), dtype=dtype).long()


def ids_step(form: Callable[[Tensor, torch.dtype], Tensor], fmt: str, count: int) -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(self.table(self.ids(x)))  # type: ignore[no-any-return]

    def through(self: Any, x: Tensor) -> Tensor:
        return form(x, NATIVE[fmt])

    model, _ = in_format(Of(forward, ids=Of(through), table=nn.Embedding(count + 8, 4), out=linear(4, 3)), fmt)
    x = torch.arange(count)
    return in_training(model, lambda: F.cross_entropy(model(x).float(), x % 3))


def positions_step(fmt: str, count: int, rounds: bool = True) -> Step:
    """Positions counted by a cumulative sum, of a mask in the dtype of the model; or in integers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.fc(x)
        mask = h[:, 0] * 0 + 1
        counts = (mask if rounds else mask.long()).cumsum(0)
        return self.out(h + self.table(counts.long() - 1))  # type: ignore[no-any-return]

    model, cast = in_format(Of(forward, fc=linear(4, 4), table=nn.Embedding(count, 4), out=linear(4, 3)), fmt)
    x = cast(seeded(count, 4))
    return in_training(model, lambda: F.cross_entropy(model(x).float(), torch.arange(count) % 3))


for fmt in HOLDS:
    build = partial(positions_step, fmt, HOLDS[fmt] + 100)
    planted(f"positions-{fmt}", "integers lost", ":cumsum", "activation", build)
    fine(f"positions_in_integers_{fmt}", partial(positions_step, fmt, HOLDS[fmt] + 100, False))
    fine(f"few_positions_{fmt}", partial(positions_step, fmt, HOLDS[fmt] // 8))
for form in (half_and_back, like_another, by_method, counted, ranged):
    for fmt in NATIVE:
        build = partial(ids_step, form, fmt, HOLDS[fmt] + 100)
        planted(f"ids_{form.__name__}-{fmt}", "integers lost", "ids:.*", "activation", build)
        fine(f"ids_{form.__name__}_{fmt}", partial(ids_step, form, fmt, HOLDS[fmt] // 8))


# Averages


def lerp(average: Tensor, x: Tensor, share: float) -> None:
    average.lerp_(x, share)


def in_two_steps(average: Tensor, x: Tensor, share: float) -> None:
    average.mul_(1 - share).add_(x, alpha=share)


def copied(average: Tensor, x: Tensor, share: float) -> None:
    average.copy_((1 - share) * average + share * x)


def of_lists(average: Tensor, x: Tensor, share: float) -> None:
    torch._foreach_lerp_([average], [x], share)


FORMS = (lerp, in_two_steps, copied, of_lists)


def moved_after(model: nn.Module, cast: Callable[[Tensor], Tensor], after: Callable[[], None]) -> Step:
    """A step of a layer of eight numbers, after whose backward pass something is moved by hand."""
    x = cast(seeded(4, 8))
    return in_training(model, lambda: mean_square(model(x)), after=torch.no_grad()(after))


def average_step(
    form: Callable[[Tensor, Tensor, float], None], fmt: str, share: float, where: str, away: float
) -> Step:
    """An average of a parameter: a buffer of the model, or beside it. away: how far it is from there, of its size."""
    model, cast = in_format(Of(lambda self, x: self.fc(x), fc=linear(8, 8), average=torch.zeros(8, 8)), fmt)
    average = model.average if where == "buffer" else torch.zeros(8, 8, dtype=model.fc.weight.dtype)
    average.copy_(model.fc.weight.detach() * (1 + away))

    def after() -> None:
        form(average, model.fc.weight.detach(), share)

    return moved_after(model, cast, after)


def averaged_model(fmt: str, share: float) -> Step:
    """A copy of the model whose parameters are averages of the model's, as torch keeps it."""
    model, cast = in_format(linear(8, 8), fmt)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - share))
    average.n_averaged.fill_(1)
    with torch.no_grad():
        for p in average.parameters():
            p.mul_(1.25).add_(0.1)

    def after() -> None:
        average.update_parameters(model)
        average.n_averaged.fill_(1)

    return moved_after(model, cast, after)


def norm_step(fmt: str, momentum: float, mean: float) -> Step:
    """A batch norm whose running mean is some way off."""
    norm = nn.BatchNorm1d(8, momentum=momentum)
    norm.running_mean.fill_(1 + mean)  # type: ignore[union-attr]
    norm.running_var.fill_(1.02)  # type: ignore[union-attr]
    model, cast = in_format(nn.Sequential(norm, linear(8, 3)), fmt)
    x = seeded(64, 8)
    x = cast((x - x.mean(0)) / x.std(0) + 1)
    return in_training(model, lambda: F.cross_entropy(model(x).float(), torch.arange(64) % 3))


def by_hand(fmt: str, rate: float) -> Step:
    """Parameters that the step itself moves."""
    model, cast = in_format(linear(8, 8), fmt)

    def after() -> None:
        for p in model.parameters():
            p.sub_(rate * p.grad)  # type: ignore[operator]

    return moved_after(model, cast, after)


for form in FORMS:
    for where in ("buffer", "state"):
        for fmt in NATIVE:
            place = "average" if where == "buffer" else ":.*"
            share = 2e-4 if fmt == "half" else 1e-3
            build = partial(average_step, form, fmt, share, where, 0.25)
            planted(f"average_{form.__name__}_{where}-{fmt}", "update lost", place, where, build)
    fine(f"average_that_moves_{form.__name__}", partial(average_step, form, "bfloat16", 0.1, "buffer", 0.25))
    fine(f"average_that_is_there_{form.__name__}", partial(average_step, form, "bfloat16", 1e-3, "state", 0.0))
    fine(f"average_in_float32_{form.__name__}", partial(average_step, form, "float32", 1e-3, "buffer", 0.25))
planted("averaged_model", "update lost", ":.*", "state", partial(averaged_model, "bfloat16", 1e-3))
planted("running_mean", "update lost", r"0\.running_(mean|var)", "buffer", partial(norm_step, "bfloat16", 1e-3, 0.2))
planted("moved_by_hand", "update lost", "(weight|bias)", "parameter", partial(by_hand, "bfloat16", 1e-5))
fine("running_mean_that_moves", partial(norm_step, "bfloat16", 0.1, 0.2))
fine("running_mean_that_is_there", partial(norm_step, "bfloat16", 0.1, 0.01))
fine("moved_by_hand_in_float32", partial(by_hand, "float32", 1e-5))
