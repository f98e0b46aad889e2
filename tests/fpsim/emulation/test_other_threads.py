"""What a forward computes in another thread: a module of the model is emulated, all else warns once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as futures
from typing import Any

import pytest
import torch
from emulated_cases import randn
from tiers import parametrize
from torch import Tensor, nn

from fpsim import emulate, quantize
from fpsim.tensors.launch import thread_pool

WORDS = r"(?s){operation} ran in thread '.+', to which emulated code at {place} gave work.*not emulated"


def _by_thread(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function(x)))
    thread.start()
    thread.join()
    return found[0]


def _by_subclass(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    class Own(threading.Thread):
        def run(self) -> None:
            self.found = function(x)

    thread = Own()
    thread.start()
    thread.join()
    return thread.found


_pool = ThreadPoolExecutor(1)
_pool.submit(int).result()  # its thread is older than any forward


def _by_new_pool(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        return next(iter(pool.map(function, [x])))


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "thread": _by_thread,
    "subclass": _by_subclass,
    "pool": lambda function, x: _pool.submit(function, x).result(),
    "new pool": _by_new_pool,
}


class Elsewhere(nn.Module):
    def __init__(self, way: str, function: Any) -> None:
        super().__init__()
        self.way, self.function = way, function

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self.function, x)


@pytest.mark.parametrize("way", WAYS)
@parametrize("fmt", ["bf16", "recipe:mxfp8"], keep={"bf16"})
def test_an_operation_in_a_thread_that_a_forward_gave_work_to_warns_once(way: str, fmt: str) -> None:
    model = quantize(nn.Sequential(nn.Identity(), Elsewhere(way, lambda x: (x * 1.1).softmax(-1))), fmt)
    x = randn(2, 4)
    with pytest.warns(UserWarning, match=WORDS.format(operation="mul", place="1")) as told:
        model(x)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_another_thread_calls_is_emulated_there_and_says_nothing(way: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model, x = quantize(Elsewhere(way, inner), "bf16"), randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(x)
    assert torch.equal(out, inner.bfloat16()(x.bfloat16()).float())


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_that_computes_with_no_numbers_or_was_given_work_elsewhere_says_nothing(way: str) -> None:
    x = randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(Elsewhere(way, lambda x: x.view(-1)), "bf16")(x)
        quantize(Elsewhere(way, lambda x: torch.arange(3) + 1), "bf16")(x)
        quantize(Elsewhere(way, lambda x: x * 1.1), "fp32")(x)
        assert torch.equal(WAYS[way](lambda x: x * 1.1, x), x * 1.1)


def test_a_thread_of_an_emulated_block_warns_and_computes_in_float32() -> None:
    x = randn(2, 4)
    with emulate("e4m3fn"), pytest.warns(UserWarning, match=WORDS.format(operation="mul", place="the top level")):
        out = _by_thread(lambda x: x * 1.1, x)
    assert torch.equal(out, x * 1.1)


def test_an_error_in_the_thread_arrives_as_ever_and_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    model, x = quantize(Elsewhere("pool", fail), "bf16"), randn(2, 4)
    with pytest.raises(KeyError, match="mine"):
        model(x)
    assert _pool.submit(torch._C._len_torch_function_stack).result() == 0


def test_a_large_tensor_is_rounded_by_threads_of_the_library_that_warn_of_nothing() -> None:
    x = randn(2048, 2048)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = quantize(nn.ReLU(), "bf16")(x)
    assert torch.equal(out, x.bfloat16().relu().float())
    assert type(thread_pool()).submit.__code__.co_filename == futures.__file__  # unwatched
