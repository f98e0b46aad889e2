"""What a forward computes in another thread: a module of the model is emulated, all else warns once."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as futures
from contextlib import closing, nullcontext
from multiprocessing.pool import ThreadPool
from typing import Any
from unittest import mock

import pytest
import torch
from emulated_cases import randn
from module_blocks import Function
from tiers import parametrize
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply

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


older: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def pools_whose_threads_are_older_than_any_forward() -> Iterator[None]:
    with ThreadPoolExecutor(1) as older["futures"], closing(ThreadPool(1)) as older["multiprocessing"]:
        older["futures"].submit(int).result()
        yield
    older["multiprocessing"].join()
    older.clear()


def _by_new_pool(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        return next(iter(pool.map(function, [x])))


def _by_new_thread_pool(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with ThreadPool(1) as pool:
        return pool.map(function, [x])[0]


def _by_parallel_apply(function: Any, x: Tensor) -> Tensor:
    here: dict[str, Any] = {
        "current_stream": lambda device: nullcontext(),
        "device_index": lambda index: nullcontext(),
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cpu"),
    }  # a machine with a card
    with mock.patch.multiple(torch.accelerator, **here):
        return parallel_apply([function, function], [x, x], devices=[0, 0])[0]


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "thread": _by_thread,
    "subclass": _by_subclass,
    "pool": lambda function, x: older["futures"].submit(function, x).result(),
    "new pool": _by_new_pool,
    "thread pool": lambda function, x: older["multiprocessing"].apply(function, (x,)),
    "thread pool in order": lambda function, x: next(older["multiprocessing"].imap(function, [x])),
    "thread pool in any order": lambda function, x: next(older["multiprocessing"].imap_unordered(function, [x])),
    "new thread pool": _by_new_thread_pool,
    "parallel_apply": _by_parallel_apply,
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
    assert older["futures"].submit(torch._C._len_torch_function_stack).result() == 0


def test_a_large_tensor_is_rounded_by_threads_of_the_library_that_warn_of_nothing() -> None:
    x = randn(2048, 2048)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = quantize(nn.ReLU(), "bf16")(x)
    assert torch.equal(out, x.bfloat16().relu().float())
    assert type(thread_pool()).submit.__code__.co_filename == futures.__file__  # unwatched


def test_a_thread_that_has_ended_is_kept_by_nothing() -> None:
    threads: list[weakref.ref[threading.Thread]] = []

    def start(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: x * 1.1)
        thread.start()
        thread.join()
        threads.append(weakref.ref(thread))
        return x

    gc.disable()
    try:
        start(randn(2))
        with pytest.warns(UserWarning, match="not emulated"):
            quantize(Function(start), "bf16")(randn(2))
        assert [thread() for thread in threads] == [None, None]
    finally:
        gc.enable()
