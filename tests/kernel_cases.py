"""The kernels, each with its arguments: one list for the machines that run them.

A machine is `run(kernel, blocks, *arguments, reads=())`: Numba's simulator, or the CPU that executes PTX. What either
gives is compared with the CPU's own kernels; PTX is compiled of the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ada_loss.layerwise import scale_kernels
from ada_loss.rules import LAYER_RULES, LayerRule
from fpsim import Accumulator, as_accumulator
from fpsim.compiling.card import CudaKernel
from fpsim.formats.blocks import Choose
from fpsim.kernels import accumulate, block_choice, block_dense, block_teams, hadamard, moments, tally
from fpsim.kernels.blocks import WIDE_NUMBERS
from fpsim.kernels.codebooks import table_address, table_at
from fpsim.kernels.core import BINARY32, BINARY64, BOOK, NUMBERS
from fpsim.kernels.round import Masks, cuda_loop
from fpsim.kernels.statistics import SMALLEST_SCALE
from fpsim.tensors.block_tally import limits_of
from fpsim.tensors.cuts import block_axes
from fpsim.tensors.gemm import summation_of
from fpsim.tensors.hadamard import FIXED_SIGNS
from fpsim.tensors.moments import binades, moments_of
from fpsim.tensors.shared_scales import (
    amax_pattern,
    asked_of,
    block_plan,
    in_parts,
    launch_of,
    rounded_with_scales,
    shared_numbers,
)
from fpsim.tensors.spec import BlockSpec, any_spec

KEY = 0x0123_4567_89AB_CDEF


class Memory(NamedTuple):
    """Memory that a kernel gets the address of.

    is_written: whether it may write there. has_numbers: floats are read and written as such, not as their patterns.
    """

    x: torch.Tensor
    is_written: bool = False
    has_numbers: bool = False


class Array(NamedTuple):
    """Memory that a kernel gets with its shape and strides, and may write to."""

    x: torch.Tensor


class Machine(Protocol):
    """Runs kernels of a card without one.

    threads: of a block; None for the kernel's own.
    reads: other memory that the kernel may read. None among the arguments is no memory.
    """

    threads: int | None

    def __call__(self, kernel: CudaKernel, blocks: int, *arguments: Any, reads: tuple[Any, ...] = ()) -> None: ...


def launched(machine: Machine, kernel: CudaKernel) -> int:
    """How many threads a block of the kernel has there."""
    kernel.threads = machine.threads or kernel.threads
    return kernel.threads


# Moments and binades


def is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0


def gathered_by(
    machine: Machine, x: torch.Tensor, only_amax: bool = False, logs: bool = False, aligned: bool | None = None
) -> torch.Tensor:
    """The moments of a tensor. aligned: what the kernel is told; None for the truth."""
    n, size = x.numel(), x.element_size()
    blocks, integers, floats = moments.partial_words(n, size)
    rows, sums = torch.zeros(integers, dtype=torch.int64), torch.full((floats,), torch.nan).double()
    out = torch.zeros(10).double()
    kernel = moments.cuda_moments(size, only_amax, logs)
    kernel.threads = moments.CUDA_THREADS
    whether = int(is_aligned(x) if aligned is None else aligned)
    machine(kernel, blocks, Memory(x), n, whether, Array(rows), Memory(sums, True, True), Memory(out, True, True))
    return out


def counted_by(machine: Machine, x: torch.Tensor, power_begins: bool, aligned: bool | None = None) -> torch.Tensor:
    """How many numbers of a tensor are in each binade."""
    bins = torch.zeros(256 if x.element_size() == 4 else 2048, dtype=torch.int64)
    kernel = moments.cuda_exponents(x.element_size(), power_begins)
    kernel.threads = moments.CUDA_THREADS
    whether = int(is_aligned(x) if aligned is None else aligned)
    blocks = moments.partial_words(x.numel(), x.element_size())[0]
    machine(kernel, blocks, Memory(x), x.numel(), whether, Array(bins))
    return bins


# Tallies: what a rounding did, and what it lost

SCALES_OF_LOSSES = [0, 6, -9]


class Tallied(NamedTuple):
    """Counts of elements, the histogram of their exponents, and amax, signal, noise, dead_zone and along."""

    counts: torch.Tensor
    exponents: torch.Tensor
    sums: tuple[float, ...]


def tallied_elements(machine: Machine, x: torch.Tensor, after: torch.Tensor, limits: tuple[float, ...]) -> Tallied:
    """What happened to numbers between `x` and `after`. limits: as those of a tensors.tally.Accumulator."""
    counts, exponents, amax = (torch.zeros(size, dtype=torch.int64) for size in (11, 2048, 1))
    kernel = tally.cuda_tally(x.element_size())
    launched(machine, kernel)
    blocks = moments.partial_words(x.numel(), x.element_size())[0]
    sums = torch.full((blocks, tally.CARD_SUMS), torch.nan, dtype=torch.float64)
    patterns = map(BINARY64.bits, limits)
    words = Memory(x), Memory(after), x.numel(), *patterns, Array(counts), Array(exponents), Array(amax)
    machine(kernel, blocks, *words, Memory(sums, True, True))
    return Tallied(counts, exponents, (float(amax.view(torch.float64)), *sums.sum(0).tolist()))


def lost_by(machine: Machine, x: torch.Tensor, after: torch.Tensor, largest: float, log2_scale: int) -> torch.Tensor:
    """The LOST_COUNTS of numbers between `x` and `after`, rounded at a scale."""
    counts, kernel = torch.zeros(3, dtype=torch.int64), tally.cuda_lost(x.element_size())
    launched(machine, kernel)
    blocks = moments.partial_words(x.numel(), x.element_size())[0]
    numbers = x.numel(), BINARY64.bits(largest), Memory(torch.tensor([log2_scale]))
    machine(kernel, blocks, Memory(x), Memory(after), *numbers, Array(counts))
    return counts


# Blocks: format, rounding, shape, axis, and how many of 256 threads share a block

BLOCKS = [
    ("mxfp8_e4m3", "nearest_even", (20, 134, 37), 1, 8),
    ("mxfp8_e4m3", "stochastic", (20, 134, 37), -1, 8),
    ("e2m1fn per 4x8 even", "nearest_even", (20, 134, 37), 0, 8),
    ("nvfp4", "nearest_even", (20, 134, 37), -1, 8),
    ("nvfp4", "stochastic", (20, 134, 37), 1, 4),
    ("mxfp4", "nearest_even", (20, 4958), -1, 8),
    ("e4m3fn per 3 fp32", "nearest_even", (20, 4958), -1, 1),
    ("e4m3fn per row fp32", "nearest_even", (20, 134, 37), 1, 32),
    ("e4m3fn per row fp32", "nearest_even", (20, 4958), -1, 256),
    ("e4m3fn per row fp32", "nearest_even", (4958, 20), 0, 32),
    ("e4m3fn per 128x128 fp32", "nearest_even", (370, 268), -1, 256),
    ("e4m3fn per 128x1 fp32", "nearest_even", (370, 268), -1, 32),
    ("nf4 per 32", "nearest_even", (20, 134, 37), 1, 8),
    ("dynamic8 per 32 fp32", "stochastic", (20, 134, 37), -1, 8),
    ("nvfp4_row", "nearest_even", (20, 134, 37), -1, 8),
    ("e2m1fn per 16 e4m3fn fp32 per 64", "stochastic", (20, 4958), -1, 8),
]
# Blocks one behind the other, or one scale for all: the same without an axis, and which size is compiled in
DENSE = [
    ("mxfp8_e4m3", "nearest_even", (4, 3, 96), 32),
    ("mxfp8_e4m3", "stochastic", (5, 32), 32),
    ("mxfp4", "nearest_even", (3, 64), 32),
    ("mxfp4", "stochastic", (2, 160), 32),
    ("nvfp4", "nearest_even", (9, 48), 16),
    ("nvfp4", "stochastic", (2, 144), 16),
    ("e2m1fn per 32 at 0.75", "nearest_even", (3, 32), 32),
    ("e4m3fn per 4 fp32", "up", (5, 12), 4),
    ("e4m3fn per 8 fp32", "nearest_even", (3, 8), 8),
    ("e5m2 per 64", "toward_zero", (2, 64), 64),
    ("e4m3fn per 128 fp32", "nearest_even", (2, 3, 128), 128),
    ("nf4 per 32", "nearest_even", (7, 64), 32),
    ("dynamic8 per 32 fp32", "stochastic", (6, 32), 32),
    ("e4m3fn per tensor fp32", "nearest_even", (3, 83), 0),
    ("e4m3fn per tensor fp32", "stochastic", (1, 259), 0),
    ("e5m2 per tensor", "stochastic", (9, 37), 0),
]
SHARING = ["nvfp4", "e4m3fn per tensor fp32", "e5m2 per tensor", "e4m3fn per tensor e4m3fn", "mxfp8_e4m3"]
TALLIED = [("mxfp4", 1), ("e2m1fn per 32 at 0.75", -1), ("nvfp4", 1), ("e4m3fn per tensor fp32", 0)]


# Formats of which both rules of an infinity are looked at, and those whose scale the whole tensor shares
INFINITIES = [
    "mxfp8_e4m3",
    "e4m3fn per 32 ceil saturate",
    "e2m1fn per 16 e4m3fn fp32",
    "e2m1fn per 16 e4m3fn fp32 saturate",
    "e4m3fn per 128 fp32",
    "e4m3fn per 128 fp32 saturate",
    "e4m3fn per tensor fp32",
    "e4m3fn per tensor fp32 saturate",
    "e5m2 per tensor fp32 delayed",
    "e5m2 per tensor fp32 delayed saturate",
]
MASK = torch.finfo(torch.float32).max


def infinities() -> Iterator[torch.Tensor]:
    """(rows, 128): infinities, NaN and masks, alone, beside one another and beside numbers; then fewer of them."""
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1, 5], x[2, 40:42], x[3, 77] = torch.inf, torch.nan, torch.tensor([-torch.inf, MASK]), -MASK
    x[4], x[5], x[6], x[6, ::9], x[7, 1] = (
        MASK,
        -torch.inf,
        0.0,
        -MASK,
        float(torch.tensor(MASK).nextafter(x.new_zeros(()))),
    )
    yield x
    yield x.nan_to_num(nan=3.0, posinf=MASK, neginf=-MASK)
    yield x.nan_to_num(nan=3.0, posinf=MASK, neginf=-MASK).clamp(-4, 4).index_fill(0, torch.tensor([2]), torch.inf)
    yield x.nan_to_num(nan=torch.nan, posinf=1.0, neginf=-2.0)


def of_tensor(spec: BlockSpec) -> bool:
    """Whether an infinity makes a scale of the whole tensor NaN."""
    return spec.fmt.tensor_scale is True or spec.fmt.block == "tensor"


def beside_numbers(spec: BlockSpec) -> torch.Tensor:
    """Three elements for a tensor of numbers: with NaN and inf, where these leave the other blocks alone."""
    return torch.tensor([-MASK, MASK, -0.0] if of_tensor(spec) else [torch.nan, torch.inf, -0.0])


class Rounded(NamedTuple):
    """What rounding in blocks gives, and how many threads share a block."""

    y: torch.Tensor
    scales: torch.Tensor
    team: int


def rounded_by(
    machine: Machine, x: torch.Tensor, spec: BlockSpec, axis: int, has_key: bool, small: bool = True
) -> Rounded:
    """A tensor rounded in blocks by the kernel for all cuts.

    has_key: the key is in memory, and not a number among the arguments. small: places are computed in 32 bits.
    """
    plan, axes = block_plan(spec), block_axes(x.shape, spec.fmt.tile, axis, None)
    y, scales = torch.full_like(x, 77.0), torch.zeros(math.prod(axes.blocks))
    kernel = block_teams.cuda_rounding(plan.rule, plan.shape, plan.scale_shape, plan.kind, small)
    grid, team = block_teams.grid_of(axes, launched(machine, kernel))
    shared, key = Memory(shared_numbers(x, spec.fmt, plan, None)), Memory(torch.tensor([KEY]))
    key_words = (key, 1, 0) if has_key else (None, 0, KEY)
    places = (0, WIDE_NUMBERS) if plan.shape >= BOOK else ()
    tables = [table_at(table_address(plan.parameters[i : i + NUMBERS])) for i in places]
    words = Memory(x), Memory(y, True), *axes, *plan.parameters, shared, Memory(scales, True, True), 1, *key_words, team
    machine(kernel, grid, *words, reads=tuple(tables))
    return Rounded(y, scales, team)


def densely_rounded_by(
    machine: Machine, x: torch.Tensor, spec: BlockSpec, has_key: bool, scale: torch.Tensor | None = None
) -> Rounded:
    """A contiguous tensor rounded along its last axis by the kernel that a launch takes; a size in place of a team."""
    plan, axes = block_plan(spec), block_axes(x.shape, spec.fmt.tile, -1, None)
    y, scales = torch.full((x.numel() + 4,), 77.0), torch.zeros(math.prod(axes.blocks))
    y = y[x.storage_offset() :][: x.numel()].view(x.shape)  # aligned as x is
    work = launch_of(plan, axes, spec.fmt)
    work = launch_of(plan, axes, spec.fmt, launched(machine, work.kernel))
    shared, key = Memory(shared_numbers(x, spec.fmt, plan, scale)[:2]), Memory(torch.tensor([KEY]))
    key_words = (key, 1, 0) if has_key else (None, 0, KEY)
    places = (0, WIDE_NUMBERS) if plan.shape >= BOOK else ()
    tables = [table_at(table_address(plan.parameters[i : i + NUMBERS])) for i in places]
    assert work.is_dense
    words = *work.before, int(is_aligned(x) and is_aligned(y)), *plan.parameters, shared, Memory(scales, True, True)
    machine(work.kernel, work.grid, Memory(x), Memory(y, True), *words, 1, *key_words, reads=tuple(tables))
    return Rounded(y, scales, int(work.kernel.name.rsplit("-", 1)[1]))


def shared_by(machine: Machine, x: torch.Tensor, spec: BlockSpec) -> torch.Tensor:
    """What the blocks of a tensor share, two int64, and its amax."""
    out, kernel = torch.full((block_dense.PLACES,), -1), block_dense.cuda_amax()
    launched(machine, kernel)
    asked, largest = asked_of(spec.fmt, block_plan(spec)), BINARY32.bits(spec.fmt.largest)
    blocks = moments.partial_words(x.numel(), 4)[0]
    machine(kernel, blocks, Memory(x), x.numel(), int(is_aligned(x)), largest, asked, Array(out))
    return out[: block_dense.FOUND + 1]


def tallied_by(machine: Machine, x: torch.Tensor, after: torch.Tensor, spec: BlockSpec, axis: int) -> torch.Tensor:
    """What happened to blocks between `x` and `after`."""
    plan, axes = block_plan(spec), block_axes(x.shape, spec.fmt.tile, axis, None)
    whole = amax_pattern(x, plan) if spec.fmt.block == "tensor" else torch.tensor(-1)
    shared = shared_numbers(x, spec.fmt, plan, None)
    shared = torch.cat([shared[:2], whole.reshape(1), shared[3:]])
    axes = in_parts(axes, True) if spec.fmt.block == "tensor" else axes
    out = torch.tensor([0] * SMALLEST_SCALE + [2**63 - 1, 0])
    kernel = block_teams.cuda_tally(plan.scale_shape, plan.kind, block_teams.is_small(axes))
    grid, team = block_teams.grid_of(axes, launched(machine, kernel))
    words = Memory(x), Memory(after), *axes, *plan.parameters, Memory(shared), Array(out), *limits_of(spec), team
    machine(kernel, grid, *words)
    return out


# Formats whose blocks choose a scale, and along which axis: short and long blocks, rows, tiles, each error
CHOOSING = [
    ("nvfp4_4over6", -1),
    ("nvfp4_4over6", 0),
    ("e2m1fn per 32 mae(floor,ceil)", 1),
    ("e4m3fn per 5 max(even,ceil,floor_plus1)", -1),
    ("int4 per row mse(floor,uos(1))", -1),
    ("e2m1fn per 4x8 e4m3fn fp32 mse(amax/6,amax/4)", -1),
]


def chosen_by(machine: Machine, x: torch.Tensor, spec: BlockSpec, axis: int) -> torch.Tensor:
    """A tensor whose blocks are the nearest of the candidates of a format, which the CPU has rounded."""
    axes, rule = block_axes(x.shape, spec.fmt.tile, axis, None), spec.fmt.scale_rule
    assert isinstance(rule, Choose)
    kernel = block_teams.cuda_choice(block_choice.ERRORS.index(rule.error), block_teams.is_small(axes))
    grid, team = block_teams.grid_of(axes, launched(machine, kernel))
    errors, chosen = torch.full((math.prod(axes.blocks),), 7.0).double(), torch.full((math.prod(axes.blocks),), 7)
    results = [
        rounded_with_scales(x, candidate, axis, None, None, None, False, None, spec.fmt)[0]
        for candidate in spec.candidates
    ]
    kept = results[0].clone()
    for number, other in enumerate(results[1:], 1):
        tensors = Memory(x, has_numbers=True), Memory(kept, True, True), Memory(other, has_numbers=True)
        known = Memory(errors, True, True), Memory(chosen, True)
        machine(kernel, grid, *tensors, *axes, *known, number, int(rule.ties == "last"), team)
    again = torch.full_like(x, 77.0)
    for number, other in enumerate(results):
        tensors = Memory(x, has_numbers=True), Memory(again, True, True), Memory(other, has_numbers=True)
        known = Memory(errors, True, True), Memory(chosen, True)
        machine(kernel, grid, *tensors, *axes, *known, number, block_choice.GIVEN, team)
    assert torch.equal(again, kept)
    return kept


def block_spec(name: str, rounding: str = "nearest_even") -> BlockSpec:
    spec = any_spec(name, rounding)
    assert isinstance(spec, BlockSpec)
    return spec


# Hadamard transforms: groups, what lies behind the axis, signs, whether it is the inverse

TRANSFORMS = [(6, 1, None, False), (3, 5, "fixed", False), (3, 5, "random", True), (1, 9, "random", False)]


def transformed_by(
    machine: Machine, x: torch.Tensor, signs: str | None, is_inverse: bool, has_key: bool
) -> torch.Tensor:
    """x: (groups, size, inner), transformed along its second axis."""
    groups, size, inner = x.shape
    y, kernel = torch.full_like(x, 77.0), hadamard.cuda_loop(size, 8 * x.element_size())
    words = FIXED_SIGNS if signs == "fixed" else 0, int(signs == "random"), int(is_inverse)
    key = (Memory(torch.tensor([KEY])), 1, 0) if has_key else (None, 0, KEY)
    source, target = Memory(x, has_numbers=True), Memory(y, True, True)
    machine(kernel, -(-x.numel() // kernel.threads), source, target, groups * inner, inner, *words, *key)
    return y


# Products

ACCUMULATORS = [
    as_accumulator("fp16"),
    as_accumulator("hopper_fp8"),
    as_accumulator("hopper_fp8_chunk128"),
    Accumulator("fp32"),
    Accumulator("e5m2", "stochastic", product="e5m2", product_rounding="stochastic", chunk=4),
    Accumulator("dlfloat16", "up", "saturate", chunk=3, outer="bf16", outer_rounding="stochastic"),
    Accumulator("e4m3fn", "stochastic", group=3, group_bits=9, chunk=8, outer="fp32", outer_rounding="to_odd"),
    Accumulator("fp32", "toward_zero", group=8, group_bits=12, operands=("e4m3fn", "fp16"), zero_exponent=-2),
    Accumulator("e4m3fn", "toward_zero", "nan", group=2, group_bits=9),  # which overflows
    Accumulator("fp32", group=4, group_bits=9, sum_bits=12, operands=("fp16", "e4m3fn")),
]


def operands_of_a_product(batches: int, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and a bias, with strides of every kind."""
    a = (torch.randn(batches, k, m) * torch.exp2(torch.randint(-7, 8, (batches, 1, m)))).mT
    a[0, 0, :3] = torch.tensor([torch.inf, 2.0**-149, -0.0])
    return a, torch.randn(k, n).expand(batches, k, n), torch.randn(n).expand(batches, m, n)


def product_by(
    machine: Machine, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, has_bias: bool, accumulator: Accumulator
) -> torch.Tensor:
    """a @ b, and the bias if there is one, of `operands_of_a_product`."""
    batches, m, k = a.shape
    n, summation = b.shape[-1], summation_of(accumulator)
    y = torch.full((batches, m, n), 77.0)
    strides = (*a.stride(), *b.stride(), *(bias.stride() if has_bias else (0, 0, 0)), *y.stride())
    sizes = accumulate.Sizes(batches, m, n, k, *strides, int(has_bias), *summation.ends)
    kernel = accumulate.cuda_loop(summation.code)
    plans = [integer for plan in summation.plans for integer in plan]
    words = Memory(a.mT), Memory(b[0]), Memory(bias[0, 0]), Memory(y, True), *sizes, *plans, None, 0, KEY
    machine(kernel, -(-y.numel() // launched(machine, kernel)), *words)
    return y


# Decisions of adaptive scaling

PREDICTING = [rule for rule in LAYER_RULES.values() if rule.predicts]
SIZES = [2.0**-30, 1.0, 2.0**20, 0.0, torch.inf]  # of gradients
Decision = tuple[Callable[..., None], tuple[torch.Tensor, ...]]


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def reals(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def factor_of(rule: type[LayerRule], size: float, recompute: int = scale_kernels.RECOMPUTE) -> Decision:
    """The kernel that chooses a rule's factor, and its arrays."""
    limits = reals(*scale_kernels.Limits(2.0**-24, 65504.0, -112, 70, 16.0, 2.0**20, lost_exponent=-25))
    head = integers(3), moments_of(torch.randn(40) * size), moments_of(torch.randn(30)), integers(12), limits
    ends = integers(0), torch.zeros(len(scale_kernels.CHOSEN)).double()
    own = reals(*rule().parameters()), integers(recompute), torch.ones(1).double()
    return scale_kernels.factor_kernel(rule.core()), (*head, *own, *ends)


def decisions_at(size: float) -> Iterator[Decision]:
    """Each other kernel that decides a scale, and its arrays."""
    limits = reals(*scale_kernels.Limits(2.0**-9, 448.0, -119, 85, torch.inf, torch.inf, lost_exponent=-10))
    x = torch.randn(50) * size
    bins, first = binades(x)
    for function, own in (
        (scale_kernels.pass_scale_on, ()),
        (scale_kernels.scale_to_max, (integers(1),)),
        (scale_kernels.delayed_scaling, (integers(0), reals(1.0, 2.0, 0.5))),
        (scale_kernels.smallest_sufficient_scale, (bins, integers(first), reals(0.01))),
    ):
        yield function, (integers(5), moments_of(x), limits.clone(), *own, integers(0), torch.zeros(5).double())
    yield scale_kernels.retain_last_informative, (integers(5), integers(7), moments_of(x), integers(0))
    amaxima, scales = reals(size, 2.0**-30, 4.0), integers(3, -7, 60)
    yield scale_kernels.meeting_scale, (amaxima, scales, limits.clone(), integers(0))


# What is compiled and launched, one kernel of each kind whose arguments are integers

COMPILED: dict[str, Callable[[], CudaKernel]] = {
    "round": lambda: cuda_loop(0, 1, 32),
    "round, with masks": lambda: cuda_loop(6, 1, 32, Masks(1, True)),
    "blocks": lambda: block_teams.cuda_rounding(0, 1, 1, 0),
    "blocks, dense": lambda: block_dense.cuda_rounding(0, 1, 1, 0, 32),
    "amax": block_dense.cuda_amax,
    "hadamard": lambda: hadamard.cuda_loop(1024, 32),
    "accumulate": lambda: accumulate.cuda_loop(summation_of(ACCUMULATORS[0]).code),
    "moments": lambda: moments.cuda_moments(4, True, False),
    "exponents": lambda: moments.cuda_exponents(4),
    "choice": lambda: block_teams.cuda_choice(0),
    "tally": lambda: tally.cuda_tally(4),
    "lost": lambda: tally.cuda_lost(4),
}
