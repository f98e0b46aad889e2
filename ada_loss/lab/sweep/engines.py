"""Where cells are computed: here, in processes of this machine, on a cluster; each a `concurrent.futures` executor."""

from __future__ import annotations

import asyncio
import ctypes
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = [
    "ENGINES",
    "Engine",
    "keep_freed_memory",
    "open_engine",
    "refuse_in_a_starting_worker",
    "require_known",
    "require_memory",
]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
ENGINES = ("here", "local", "tcp://HOST:PORT or tls://HOST:PORT", "a concurrent.futures.Executor")
ADDRESS = re.compile(r"(tcp|tls)://(\[[^\]]+\]|[^\s:/@]+):(?P<port>[0-9]+)")


@dataclass(frozen=True)
class Engine:
    """An executor, how many cells it takes at once, and by which exceptions it says that a worker died."""

    name: str
    executor: Executor
    slots: Callable[[], int]
    worker_died: tuple[type[BaseException], ...] = ()
    own_processes: bool = True  # a worker may end itself without ending the driver


class Here(Executor):
    """Computes at once, in this very thread. Ctrl-C comes through."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def require_known(engine: object) -> None:
    """Raise ValueError for what is no engine."""
    if isinstance(engine, Executor) or engine in ("here", "local"):
        return
    if not isinstance(engine, str) or not engine.startswith(("tcp://", "tls://")):
        raise ValueError(f"Unknown engine {engine!r}. Possible: {', '.join(ENGINES)}. Leave it out for the default.")
    match = ADDRESS.fullmatch(engine)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ValueError(
            f"The engine {engine!r} is no address. Possible: {ENGINES[2]}, where PORT is a number from 1 to "
            f"{2**16 - 1}. Take what `dask scheduler` prints."
        )


def require_memory(memory_limit: object) -> None:
    """Raise ValueError for what is no memory of a local worker."""
    try:
        fits = memory_limit is None or memory_limit == "auto" or 0 <= _bytes(memory_limit) < math.inf
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(
            f"memory_limit={memory_limit!r} is impossible. Possible: 'auto', a number of bytes such as '4 GiB', or 0 "
            f"for no limit. Leave it out to share the machine's memory out."
        )


def _bytes(memory_limit: Any) -> float:
    """As Dask reads it: numbers up to 1 are a share of the machine's memory."""
    with suppress(ValueError):
        if not isinstance(memory_limit, bool):
            return float(memory_limit)
    if not isinstance(memory_limit, str) or not any(map(str.isdigit, memory_limit)):
        raise TypeError
    try:
        from dask.utils import parse_bytes
    except ImportError:
        return 0.0  # then there is no local worker either
    return float(parse_bytes(memory_limit))


def refuse_in_a_starting_worker() -> None:
    """Raise RuntimeError in a process that multiprocessing has started and that still imports the script it is from."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # what multiprocessing itself asks
        raise RuntimeError(
            "A worker that is starting came to sweep(), for it imports the script that calls it. "
            "Put the call below `if __name__ == '__main__':`."
        )


@cache
def keep_freed_memory() -> None:
    """In a worker's process: let the allocator keep what tensors free for the next ones, as it does by default.

    Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536. Then every large tensor is new memory, page by page, and the
    digits took twice the time. Does nothing where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_TRIM_THRESHOLD, 1 << 30)
    mallopt(M_MMAP_THRESHOLD, 1 << 25)


@contextmanager
def open_engine(
    engine: str | Executor,
    workers: int = 1,
    *,
    resources: Mapping[str, float] | None = None,
    memory_limit: str | int = "auto",
    timeout: float = 30,
) -> Iterator[Engine]:
    """An engine by its name, closed in the end where it was opened here.

    engine: "here"; "local", a Dask LocalCluster with as many `workers`; the address of a Dask scheduler; an executor.
    resources: what a cell needs of a Dask worker, {"GPU": 1}; local workers have it each. memory_limit: of one local
    worker ("4 GiB"), beyond which it is replaced; "auto" shares the machine's memory out, 0 is no limit.
    timeout: seconds to wait for a scheduler, and for its first worker.
    Raises ConnectionError for a scheduler that does not answer, has no worker or none with the resources, and for
    workers that do not start,
    ImportError without Dask, ValueError for what is no engine or no memory.
    """
    require_known(engine)
    require_memory(memory_limit)
    if isinstance(engine, Executor):
        slots = max(workers, getattr(engine, "_max_workers", 0) or 0)
        yield Engine(type(engine).__name__, engine, lambda: slots, (), own_processes=False)
    elif engine == "here":
        yield Engine("here", Here(), lambda: 1, (), own_processes=False)
    elif engine == "local":
        with _local_cluster(workers, resources, memory_limit) as address, _client(address, resources, timeout) as found:
            yield found
    else:
        with _client(engine, resources, timeout) as found:
            yield found


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise ImportError(
            "Several workers or a scheduler need Dask, which is not installed. pip install 'fpsim[lab]', "
            "or give workers=1, or an executor of concurrent.futures."
        ) from None
    return distributed


@contextmanager
def _local_cluster(workers: int, resources: Mapping[str, float] | None, memory_limit: str | int) -> Iterator[str]:
    distributed = _distributed()
    import dask

    settings = {
        "distributed.scheduler.allowed-failures": 0,  # the driver counts deaths, and says so
        "distributed.worker.memory.pause": False,  # a cell that leaves memory behind would stop its worker for good
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.target": False,
        "distributed.admin.log-length": 0,
        "distributed.admin.tick.interval": "1s",  # looks at the event loop, by default every 20 ms in each process
        "distributed.admin.system-monitor.interval": "10s",
        "distributed.worker.profile.enabled": False,  # it would look at the training every 10 ms
        "distributed.nanny.environ": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    }
    with dask.config.set(settings):
        try:
            cluster = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # None means 8787, which another sweep may have
                memory_limit=memory_limit,
                resources=dict(resources or {}),
                silence_logs="CRITICAL",
            )
        except RuntimeError as error:
            raise ConnectionError(
                f"The workers did not start ({error}) They import the file that was started. In a script, call sweep() "
                f"below `if __name__ == '__main__':`; from standard input, give workers=1."
            ) from None
        with cluster:
            yield cluster.scheduler_address


@contextmanager
def _client(address: str, resources: Mapping[str, float] | None, timeout: float) -> Iterator[Engine]:
    distributed = _distributed()
    try:
        _shake_hands(distributed, address, timeout)
        client = distributed.Client(address, timeout=timeout, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise ConnectionError(
            f"No Dask scheduler answered at {address} within {timeout:g} s ({type(error).__name__}). "
            f"Start one with `dask scheduler`, or give a higher engine_timeout."
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError:
            raise ConnectionError(
                f"The scheduler at {address} had no worker within {timeout:g} s. "
                f"Start some with `dask worker {address} --nthreads 1`, or give a higher engine_timeout."
            ) from None
        options = {"resources": dict(resources)} if resources else {}
        if resources and not _offered(client, resources, timeout):
            raise ConnectionError(
                f"No worker of {address} offered {dict(resources)} within {timeout:g} s, so no cell could run. "
                f"Start some with `dask worker {address} --resources {_words(resources)}`, or leave resources out."
            )
        executor = client.get_executor(pure=False, retries=0, **options)
        try:
            yield Engine(
                address,
                executor,
                lambda: max(1, sum(client.nthreads().values())),
                (distributed.KilledWorker, BrokenExecutor),
            )
        finally:
            executor.shutdown(wait=False)  # not its `with`: that waits for cells whose workers Ctrl-C has ended


def _shake_hands(distributed: Any, address: str, timeout: float) -> None:
    """Raise OSError where no scheduler answers in time. Dask waits without end for what listens and says nothing."""

    async def connect() -> None:
        secrets = distributed.Security().get_connection_args("client")
        comm = await asyncio.wait_for(distributed.core.connect(address, timeout=timeout, **secrets), timeout)
        comm.abort()

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread runs a loop already
        thread.submit(asyncio.run, connect()).result()


def _offered(client: Any, resources: Mapping[str, float], timeout: float) -> bool:
    """Whether some worker has what a cell takes, by the end of a time."""
    end = time.monotonic() + timeout
    while True:
        found = [worker["resources"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()]
        if any(all(has.get(name, 0) >= amount for name, amount in resources.items()) for has in found):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _words(resources: Mapping[str, float]) -> str:
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())
