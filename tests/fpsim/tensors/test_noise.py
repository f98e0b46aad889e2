"""Stochastic rounding: exact for every noise value, unbiased, and the same however the work is cut."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import numpy as np
import oracle
import pytest
import tiers
import torch
from numba import njit

import fpsim
from fpsim import FloatFormat, as_format, round_to
from fpsim.kernels.core import STOCHASTIC, Numbers, make_plan, make_round
from fpsim.kernels.round import make_lie_beside
from fpsim.kernels.threefry import NOISE_BLOCK, NOISE_LANES, fill_noise, noise_words, threefry
from fpsim.tensors.launch import round_memory_
from fpsim.tensors.noise import is_captured, noise_state, replayed_noise
from fpsim.tensors.spec import rounding_spec

FORMATS = ["fp16", "bf16", "cb16", "e4m3fn", "e5m2", "e2m1fn", "e4m3fnuz", "p3109_p3", "dlfloat16", "tf32"]
CUSTOM = [
    FloatFormat(4, 3, subnormals=False),
    FloatFormat(3, 0, 3, subnormals=False),
    as_format("e5m0"),
    as_format("e3m3"),
    FloatFormat(5, 2, 93),  # spacing 2**-94: the last that float32 rounds for itself
]
ALL = [*map(as_format, [*FORMATS, "e8m0fnu"]), *CUSTOM]
FEW = {*ALL[::6], ALL[-1]}  # most compile a core


def rounded_with(f: FloatFormat, x: float, noise: int, random_bits: int | None, width: int) -> float:
    """The compiled core on one value and one chosen 32-bit noise word."""
    plan = make_plan(f, "stochastic", None, random_bits, width)
    uint, sint, floating = ((np.uint32, np.int32, np.float32), (np.uint64, np.int64, np.float64))[width == 64]
    kinds = sint, sint, *[uint] * 7
    words = plan.numbers._replace(used=plan.numbers.used << (width - 32))
    numbers = Numbers._make(kind(n % 2**64 if kind is uint else n) for kind, n in zip(kinds, words, strict=True))
    bits = np.array([x], floating).view(uint)[0]
    result = _core(plan.shape, width)(bits, uint(noise << (width - 32)), numbers)
    return float(np.array([result], uint).view(floating)[0])


@cache
def _core(shape: int, width: int) -> Callable[..., int]:
    return make_round(STOCHASTIC, shape, width)


def points(f: FloatFormat, width: int) -> list[float]:
    values = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals).magnitudes
    pairs = [(0, 1), (1, 2), (len(values) // 2, len(values) // 2 + 1), (len(values) - 2, len(values) - 1)]
    pairs = [pair for pair in pairs if pair[1] < len(values)]
    shares = (Fraction(1, 3), Fraction(1, 2), Fraction(1, 1000), Fraction(999, 1000))
    found = [float(values[a] + (values[b] - values[a]) * share) for a, b in pairs for share in shares]
    if f.has_zero:
        found += [f.smallest * 2.0**-20, f.smallest * 1.25 * 2.0**-9, f.smallest * 2.0**-33]
    return [float(np.float32(v)) if width == 32 else v for v in found]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("random_bits", [None, 1, 8, 23])
@tiers.parametrize("f", ALL, keep=FEW, ids=str)
def test_the_share_of_noise_words_that_round_up_is_the_distance(
    f: FloatFormat, random_bits: int | None, width: int
) -> None:
    fmt = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)
    for x in points(f, width):
        below, above, _ = fmt.neighbours(Fraction(x))
        expected = oracle.round_up_probability(fmt, x, random_bits or 32)
        # rounding up is monotone in the noise: find the first word that does, by bisection over all 2**32
        low, high = 0, 2**32
        while low < high:
            middle = (low + high) // 2
            up = rounded_with(f, x, middle, random_bits, width)
            assert up in (float(below), float(above))
            low, high = (low, middle) if up == float(above) and above != below else (middle + 1, high)
        assert Fraction(2**32 - low, 2**32) == expected, (x, random_bits)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("random_bits", [1, 3, 8])
@tiers.parametrize("f", ALL, keep=FEW, ids=str)
def test_every_noise_value_of_a_few_bits_decides_as_carrying_says(f: FloatFormat, random_bits: int, width: int) -> None:
    fmt = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)
    unused = 2 ** (32 - random_bits) - 1  # bits beyond the last that counts: set, and of no effect
    for x in points(f, width)[::3]:
        below, above, _ = fmt.neighbours(Fraction(x))
        share = oracle.round_up_probability(fmt, x, random_bits)
        for value in range(2**random_bits):
            got = rounded_with(f, x, value << (32 - random_bits) | unused, random_bits, width)
            assert got == float(above if share + Fraction(value, 2**random_bits) >= 1 else below), (x, value)


def test_values_of_the_format_stay_whatever_the_noise() -> None:
    for f in ALL:
        for x in (f.smallest, f.largest, -f.largest, 1.0 if f.largest >= 1 else f.smallest):
            if x > 0 or f.is_signed:
                for noise in (0, 1, 2**31, 2**32 - 1):
                    assert rounded_with(f, x, noise, None, 32) == x


@pytest.mark.parametrize("overflow", ["inf", "nan", "saturate"])
def test_beyond_the_largest_the_rounded_value_decides_about_overflow(overflow: str) -> None:
    x = 65504.0 + 8  # a quarter of the gap to 65536, which is overflow
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": 65504.0}[overflow]
    got = round_to(torch.tensor([x, -x]).repeat(4096), "fp16", "stochastic", overflow).view(-1, 2)
    up = got[:, 0] != 65504.0
    for column, sign in ((0, 1), (1, -1)):
        expected = torch.full((4096,), sign * 65504.0)
        moved = got[:, column] != expected
        expected[moved] = sign * beyond
        assert torch.equal(got[:, column].nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0))
    if overflow != "saturate":  # five standard deviations of 4096 coins that fall up one time in four
        assert abs(float(up.float().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4096)
    again = round_to(torch.tensor([math.inf, -math.inf, math.nan]), "fp16", "stochastic", overflow)
    assert torch.equal(
        again.nan_to_num(1.0, 2.0, 3.0), torch.tensor([beyond, -beyond, math.nan]).nan_to_num(1.0, 2.0, 3.0)
    )


# The random bits


def test_the_naive_threefry_gives_the_known_answers() -> None:
    # Random123, kat_vectors: threefry4x32, 20 rounds
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
    zeros, ones = (0,) * 4, (2**32 - 1,) * 4
    assert oracle.threefry(zeros, zeros, 20) == (0x9C6CA96A, 0xE17EAE66, 0xFC10ECD4, 0x5256A7D8)
    assert oracle.threefry(ones, ones, 20) == (0x2A881696, 0x57012287, 0xF6C7446E, 0xA16A6732)
    assert oracle.threefry(*pi, 20) == (0x59CD1DBB, 0xB8879579, 0x86B5D00C, 0xAC8B6D84)


@pytest.mark.parametrize("rounds", [12, 20])
def test_threefry_gives_the_words_of_the_naive_one(rounds: int) -> None:
    compiled = njit(lambda a, b, c, d: threefry(a, b, c, d, rounds))
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(2**32, (60, 4), generator=generator).tolist()
    words += [[0, 0, 0, 0], [2**32 - 1] * 4, [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    for c0, c1, k0, k1 in words:
        found = compiled(*(np.uint32(w) for w in (c0, c1, k0, k1)))
        assert tuple(map(int, found)) == oracle.threefry((c0, c1, 0, 0), (k0, k1, 0, 0), rounds)


_fill = njit(lambda noise, block, key0, key1: fill_noise(noise, block, key0, key1))
_words = njit(lambda counter, key0, key1: noise_words(counter, key0, key1))


def filled(block: int, key: int) -> np.ndarray:  # type: ignore[type-arg]
    noise = np.empty(NOISE_BLOCK, np.uint32)
    _fill(noise, block, np.uint32(key % 2**32), np.uint32(key >> 32))
    return noise


@pytest.mark.parametrize("block", [0, 1, 77, 2**28 - 1, 2**28, 2**40 + 3])  # 16 counters a block: 2**28 needs 33 bits
def test_every_element_has_the_noise_of_its_index(block: int) -> None:
    key = 0x0123456789ABCDEF
    assert filled(block, key).tolist() == [oracle.noise_word(NOISE_BLOCK * block + i, key) for i in range(NOISE_BLOCK)]
    for lane in range(NOISE_LANES):
        words = _words(NOISE_LANES * block + lane, np.uint32(key % 2**32), np.uint32(key >> 32))
        assert [int(w) for w in words] == [
            oracle.noise_word(NOISE_BLOCK * block + 32 * w + lane, key) for w in range(4)
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "dlfloat16"])
def test_each_element_of_a_tensor_rounds_by_the_carry_of_its_own_noise(name: str, dtype: torch.dtype) -> None:
    f, key = as_format(name), 0x7EDCBA9876543210
    fmt = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)
    x = torch.randn(400, dtype=torch.float64).to(dtype) * f.smallest * torch.exp2(torch.randint(-3, 20, (400,)))
    x = x.clamp(-f.largest, f.largest)
    got = torch.ops.fpsim.round(x, repr(f), "stochastic", f.resolve_overflow(), 0, torch.tensor(key))
    for i, (value, result) in enumerate(zip(x.tolist(), got.tolist(), strict=True)):
        below, above, _ = fmt.neighbours(abs(Fraction(value)))
        carries = oracle.round_up_probability(fmt, value, 32) + Fraction(oracle.noise_word(i, key), 2**32) >= 1
        assert result == math.copysign(float(above if carries else below), value), i


def test_every_bit_of_the_noise_is_balanced_and_independent_of_its_neighbours_blocks_and_keys() -> None:
    blocks = 512
    noise = np.stack([filled(block, key) for key in (5, 6) for block in range(blocks)])
    bits = torch.from_numpy((noise[..., None] >> np.arange(32, dtype=np.uint32)) & 1).double() * 2 - 1
    coins = bits.view(2, blocks * NOISE_BLOCK, 32)  # key, element, bit
    n = coins.shape[1]
    # of the numbers below each is a mean of n products of independent coins: standard deviation 1 / sqrt(n); with a
    # few thousand of them, none is expected beyond six
    bound = 6 / math.sqrt(n)
    assert float(coins.mean(1).abs().max()) < bound
    first, second = coins
    assert float((first.T @ second / n).abs().max()) < bound  # the same element under the next key
    pairs = first.T @ first / n
    assert float((pairs - torch.eye(32)).abs().max()) < bound  # two bits of one element
    for lag in (1, 2, 15, 17, 32, 64, NOISE_BLOCK, 16 * NOISE_BLOCK):
        matrix = first[lag:].T @ first[:-lag] / (n - lag)
        assert float(matrix.abs().max()) < bound * math.sqrt(n / (n - lag)), lag
    # 16 elements on there may be the same word with its halves exchanged: the leading 16 bits are another's
    leading = first[16:, 16:].T @ first[:-16, 16:] / (n - 16)
    assert float(leading.abs().max()) < bound * math.sqrt(n / (n - 16))


@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "bf16", "dlfloat16"])
def test_the_mean_is_the_number_itself(name: str) -> None:
    f = as_format(name)
    n = 2**20
    for x in (1 + f.epsilon / 3, -(1.5 + f.epsilon / 7), f.smallest / 5):
        exact = float(np.float32(x))
        values = round_to(torch.full((n,), exact), name, "stochastic").double()
        gap = float(values.max() - values.min())
        share = abs(float(values.mean()) - exact) / gap
        assert share < 5 * 0.5 / math.sqrt(n)  # five standard deviations of a mean of n coins


def noisy(x: torch.Tensor, seed: int = 7) -> torch.Tensor:
    fpsim.manual_seed(seed)
    return round_to(x, "e4m3fn", "stochastic")


@pytest.mark.parametrize("f", [as_format("dlfloat16"), FloatFormat(4, 3, 8, "fnuz", subnormals=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log2_scale", [0, 3], ids="scale {}".format)
def test_a_number_in_the_gap_below_the_smallest_value_is_seen_among_others(
    f: FloatFormat, dtype: torch.dtype, log2_scale: int
) -> None:
    place, blocks = 77, 4000
    others = torch.tensor([0.0, -0.0, f.smallest, -f.smallest, 1.5, -1.0, 2.0, f.largest], dtype=dtype)
    x = others.repeat(blocks, NOISE_BLOCK // len(others)) * 2.0**-log2_scale
    x[:, place] = f.smallest * 2.0**-log2_scale / 4
    y = x.clone()
    round_memory_(y, rounding_spec(f, "stochastic"), torch.tensor(5), torch.tensor(log2_scale))
    in_gap = y[:, place] * 2.0**log2_scale / f.smallest
    assert set(in_gap.tolist()) == {0.0, 1.0}
    assert abs(float(in_gap.mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / blocks)
    x[:, place] = y[:, place]
    assert torch.equal(y, x)
    assert torch.equal(y.signbit(), x.signbit() & (f.has_negative_zero | (x != 0)))


@pytest.mark.parametrize("width", [32, 64])
def test_the_smallest_value_and_zero_do_not_lie_in_the_gap(width: int) -> None:
    floating, smallest = np.dtype(f"f{width // 8}"), as_format("dlfloat16").smallest
    lie_beside = make_lie_beside(width)

    def answer(*values: float) -> bool:
        words = np.array([1.0, 0.0, -0.0, smallest, -smallest, np.inf, *values], floating).view(f"u{width // 8}")
        return bool(lie_beside(words, np.array([smallest], floating).view(f"u{width // 8}")[0]))

    below = np.nextafter(floating.type(smallest), floating.type(0))
    assert answer()
    assert not any(answer(value) for value in (below, -below, np.nextafter(floating.type(0), floating.type(1))))


def test_the_result_does_not_depend_on_threads_strides_or_place() -> None:
    x = torch.randn(2**19 + 77)
    one = noisy(x)
    torch.set_num_threads(2)
    assert torch.equal(noisy(x), one)
    torch.set_num_threads(3)
    assert torch.equal(noisy(x), one)
    torch.set_num_threads(1)
    fpsim.manual_seed(7)
    assert torch.equal(round_to(x, "e4m3fn", "stochastic", out=torch.empty_like(x)), one)
    fpsim.manual_seed(7)
    assert torch.equal(fpsim.round_to_(x.clone(), "e4m3fn", "stochastic"), one)
    square = x[: 2**18].reshape(2, 2**11, 8, 8)
    for other in (square.to(memory_format=torch.channels_last), square.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(noisy(other), noisy(square))
        fpsim.manual_seed(7)
        assert torch.equal(fpsim.round_to_(other.clone(), "e4m3fn", "stochastic"), noisy(square))
    assert torch.equal(noisy(x[::3]), noisy(x[::3].clone()))


def test_a_longer_tensor_begins_with_the_same_noise() -> None:
    x = torch.randn(1000)
    for n in (1, 15, 16, 127, 128, 129, 999):
        assert torch.equal(noisy(x[:n]), noisy(x)[:n])


def test_seeds_reproduce_and_calls_differ() -> None:
    x = torch.full((4096,), 1.05)
    torch.manual_seed(1)
    first, second = (round_to(x, "e5m2", "stochastic") for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(round_to(x, "e5m2", "stochastic"), first)
    fpsim.manual_seed(1)
    own = round_to(x, "e5m2", "stochastic")
    torch.manual_seed(5)
    fpsim.manual_seed(1)
    assert torch.equal(round_to(x, "e5m2", "stochastic"), own)
    assert not torch.equal(noisy(x, 1), noisy(x, 2))


def test_saving_and_forking_torchs_generator_reaches_the_noise() -> None:
    x = torch.full((512,), 1.05)
    state = torch.get_rng_state()
    first = round_to(x, "e5m2", "stochastic")
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        assert torch.equal(round_to(x, "e5m2", "stochastic"), first)
    assert torch.equal(round_to(x, "e5m2", "stochastic"), first)


def test_decisions_of_neighbours_and_of_calls_are_uncorrelated() -> None:
    n = 2**18
    x = torch.full((n,), 1.125)  # half way between two values of e5m2
    a, b = ((round_to(x, "e5m2", "stochastic").double() - 1.125) * 8 for _ in range(2))  # each -1 or 1
    bound = 5 / math.sqrt(n)  # five standard deviations of a mean of n products of coins
    assert abs(float(a.mean())) < bound
    assert abs(float((a * b).mean())) < bound
    for lag in (1, 2, 15, 16, 17, 32, 64, NOISE_BLOCK, 2048):
        assert abs(float((a[lag:] * a[:-lag]).mean())) < bound * math.sqrt(n / (n - lag))


# Threads and processes


def draws(n: int) -> list[torch.Tensor]:
    return [round_to(torch.full((64,), 1.05), "e5m2", "stochastic") for _ in range(n)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_noise_of_torch_in_two_threads_leaves_the_stream_as_it_was() -> None:
    fpsim.manual_seed(3)
    expected = draws(4)
    fpsim.manual_seed(3)
    first = draws(2)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with fpsim.noise_of_torch():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with fpsim.noise_of_torch():
        thread.start()
        entered.wait(60)
    # the other thread is still inside: this one follows torch, and so would a thread of autograd's
    state = torch.get_rng_state()
    of_torch = draws(1)
    torch.set_rng_state(state)
    assert same(of_torch, draws(1))
    left.set()
    thread.join()
    assert same(first + draws(2), expected)


def test_inside_of_noise_of_torch_the_stream_neither_moves_nor_is_drawn_from() -> None:
    fpsim.manual_seed(3)
    expected = draws(2)
    torch.manual_seed(9)
    with fpsim.noise_of_torch():
        of_torch = draws(1)
        with fpsim.noise_of_torch():
            pass
        fpsim.manual_seed(3)
        of_torch += draws(1)
    torch.manual_seed(9)
    fpsim.manual_seed(None)
    assert same(of_torch, draws(2))
    fpsim.manual_seed(3)
    assert same(expected, draws(2))


def test_a_thread_that_replays_takes_nothing_from_the_others() -> None:
    fpsim.manual_seed(3)
    expected = draws(6)
    fpsim.manual_seed(3)
    state = noise_state()
    first = draws(2)
    found: list[torch.Tensor] = []
    with replayed_noise(state):
        found += draws(1)
        thread = threading.Thread(target=lambda: first.extend(draws(2)))
        thread.start()
        thread.join()
        found += draws(1)
    assert same(found, expected[:2])
    assert same(first + draws(2), expected)


def test_what_followed_torch_is_replayed_from_torch() -> None:
    with fpsim.noise_of_torch():
        state = noise_state()
    fpsim.manual_seed(3)
    torch.manual_seed(4)
    with replayed_noise(state):
        of_torch = draws(1)
    torch.manual_seed(4)
    with fpsim.noise_of_torch():
        assert same(draws(1), of_torch)


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> torch.Tensor:
        return draws(1)[0]


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_workers_draw_equal_noise_from_a_stream_that_they_copy_until_they_seed_it() -> None:
    def from_workers(init: Callable[[int], None] | None = None) -> list[torch.Tensor]:
        torch.manual_seed(11)
        loader = torch.utils.data.DataLoader(
            Noisy(), batch_size=None, num_workers=2, worker_init_fn=init, multiprocessing_context="fork"
        )
        return list(loader)

    first, second = from_workers()
    assert not torch.equal(first, second)  # torch's stream, which DataLoader seeds
    fpsim.manual_seed(3)
    first, second = from_workers()
    assert torch.equal(first, second)
    # as the docstring of manual_seed says
    seeded = from_workers(lambda worker: fpsim.manual_seed(torch.initial_seed()))
    assert not torch.equal(*seeded)
    assert same(seeded, from_workers(lambda worker: fpsim.manual_seed(torch.initial_seed())))


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_another_thread_follows_torch_does_not_follow_it() -> None:
    fpsim.manual_seed(3)
    expected = draws(1)[0]
    fpsim.manual_seed(3)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with fpsim.noise_of_torch():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"equal" if torch.equal(draws(1)[0], expected) else b"other")
        os._exit(0)
    os.waitpid(child, 0)
    left.set()
    thread.join()
    assert os.read(reading, 5) == b"equal"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("bits", [0, 33, 2.5, True])
def test_impossible_numbers_of_random_bits_are_refused(bits: object) -> None:
    with pytest.raises(ValueError, match="1 to 32"):
        round_to(torch.ones(1), "fp16", "stochastic", random_bits=bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only 'stochastic' uses it"):
        round_to(torch.ones(1), "fp16", random_bits=4)


@pytest.mark.parametrize(("captured", "place"), [(1, 1), (0, 0)])
def test_whether_noise_is_captured_is_asked_of_the_tensors_own_device(
    captured: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]

    class On:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *error: object) -> None:
            current.pop()

    class OfCard:
        is_cuda = True

        def get_device(self) -> int:
            return place

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == captured)
    assert is_captured(OfCard())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] != captured)
    assert not is_captured(OfCard())
    assert current == [0]
