"""Engines, which compute cells in this process, in processes of this machine, or on a cluster."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from typing import Any

from ada_loss.lab.devices import device_problem
from ada_loss.lab.sweep.execution import Execution
from fpsim.checks import pip_install

__all__ = ["Engine", "keep_freed_memory", "open_engine", "refuse_in_a_starting_worker"]

# The certificates of the clusters that this process started, by address. A client without a certificate cannot connect.
_CERTIFICATES: dict[str, Any] = {}
# Constants of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Engine:
    """An executor, and its properties for the driver.

    name: the name of the engine, for the ledger.
    executor: the executor that takes the cells.
    slots: a function that returns the number of cells that the executor computes at once.
    worker_died: the exceptions that mean that a worker died.
    own_processes: whether a worker may end its process without ending the driver.
    """

    name: str
    executor: Executor
    slots: Callable[[], int]
    worker_died: tuple[type[BaseException], ...] = ()
    own_processes: bool = True


class Here(Executor):
    """Executor that computes immediately, in the submitting thread, where Ctrl-C arrives."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def refuse_in_a_starting_worker() -> None:
    """End a process that multiprocessing has started and that is still importing the main script."""
    # multiprocessing itself makes the same test. SystemExit prints one line; an error would print a traceback in each
    # worker.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(
            "A worker that is starting reached sweep(), because it imports the script that calls it. "
            "Put the call below `if __name__ == '__main__':`."
        )


@cache
def keep_freed_memory() -> None:
    """Let a worker's allocator keep freed memory for the next tensors, as glibc does by default. Needs glibc."""
    # Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536. Every large tensor would then get new memory, page by page;
    # the task digits took twice as long.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_TRIM_THRESHOLD, 1 << 30)
    mallopt(M_MMAP_THRESHOLD, 1 << 25)


@contextmanager
def open_engine(execution: Execution) -> Iterator[Engine]:
    """Open the engine of an execution. An engine that is started here is closed at the end.

    Raises ConnectionError if a scheduler does not answer, or has no worker with the resources, and if local workers do
    not start; ValueError if no worker has the device; ImportError without Dask.
    """
    engine = execution.chosen_engine
    if isinstance(engine, Executor):
        # ThreadPoolExecutor and ProcessPoolExecutor have this attribute; only the caller knows the size of other
        # executors.
        slots = max(execution.workers, getattr(engine, "_max_workers", 0) or 0)
        yield Engine(type(engine).__name__, engine, lambda: slots, (), own_processes=False)
    elif engine == "here":
        yield Engine("here", Here(), lambda: 1, (), own_processes=False)
    elif engine == "local":
        with _local_cluster(execution) as address, _client(address, execution) as opened:
            yield opened
    else:
        with _client(engine, execution) as opened:
            yield opened


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise ImportError(
            f"Several workers or a scheduler need Dask, which is not installed. {pip_install('lab')}, "
            "or give workers=1, or an executor of concurrent.futures."
        ) from None
    return distributed


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Mask Ctrl-C in threads and processes that are started inside the `with`; this thread handles it at the end."""
    # A terminal sends SIGINT to every process of the sweep, and each worker would print its traceback. A blocked signal
    # stays blocked in the threads and processes that are started here (not on Windows, where the mask does nothing).
    # The signal may still arrive in another thread of this process, and Python would then raise KeyboardInterrupt in
    # the main thread. Therefore the handler, too, is called only after the block.
    arrived: list[Any] = []
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if callable(handler):
        signal.signal(signal.SIGINT, lambda *call: arrived.append(call))
    try:
        with _masked():
            yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if arrived:
                handler(*arrived[0])


@contextmanager
def _masked() -> Iterator[None]:
    """Block SIGINT in this thread, and in the threads and processes that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # multiprocessing's resource tracker is started now, because it would later unblock the signal in the thread that
    # starts the first process.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _closed_at_the_end(start: Callable[[], Any]) -> Iterator[Any]:
    """Start an object and close it after the block. Ctrl-C never interrupts the start or the end."""
    # If closing a client of Dask is interrupted, the client closes itself again when it is deleted. It then waits for
    # an event loop that has ended, and prints a traceback a minute later.
    with ExitStack() as stack:
        with _interrupts_held():
            started = start()
            stack.callback(_close, started)
        yield started


def _close(started: Any) -> None:
    with _interrupts_held():
        started.close()


@contextmanager
def _local_cluster(execution: Execution) -> Iterator[str]:
    """Start a Dask cluster in processes of this machine; yield its address."""
    distributed = _distributed()
    import dask

    # The connection is encrypted, with certificates that only this process and its workers have: any user of the
    # machine can reach a port of the loopback interface, and a client of a scheduler can run code.
    try:
        security = distributed.Security.temporary()
    except ImportError:
        raise ImportError(
            f"Several workers need cryptography, which is not installed. {pip_install('lab')}, or give workers=1."
        ) from None

    settings = {
        # The driver itself counts deaths of workers, and reports them.
        "distributed.scheduler.allowed-failures": 0,
        # If the cell leaks memory, a paused worker would wait for free memory forever. A worker beyond the limit is
        # replaced instead.
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.target": False,
        "distributed.admin.log-length": 0,
        # By default workers check their event loops every 20 ms, which would slow the training down.
        "distributed.admin.tick.interval": "1s",
        "distributed.admin.system-monitor.interval": "10s",
        # HTTP routes require no certificate, so they would be open to any user of the machine.
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
        # The profiler is off, because it would sample the training every 10 ms.
        "distributed.worker.profile.enabled": False,
        "distributed.nanny.environ": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    }

    def started() -> Any:
        try:
            return distributed.LocalCluster(
                n_workers=execution.workers,
                threads_per_worker=1,
                host="127.0.0.1",
                protocol="tls://",
                security=security,
                # With None Dask uses port 8787, which another sweep may use already.
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                memory_limit=execution.memory_limit,
                resources=dict(execution.resources or {}),
                silence_logs="CRITICAL",
            )
        except RuntimeError as error:
            raise ConnectionError(
                f"The workers did not start ({error}) They import the file that was started. In a script, call sweep() "
                f"below `if __name__ == '__main__':`; from standard input, give workers=1."
            ) from None

    with dask.config.set(settings), _closed_at_the_end(started) as cluster:
        address = cluster.scheduler_address
        _CERTIFICATES[address] = security
        try:
            yield address
        finally:
            del _CERTIFICATES[address]


@contextmanager
def _client(address: str, execution: Execution) -> Iterator[Engine]:
    """Connect to a scheduler, and yield its workers as an engine."""
    resources, timeout = execution.resources, execution.engine_timeout
    distributed = _distributed()
    security = _CERTIFICATES.get(address) or distributed.Security()

    def started() -> Any:
        return distributed.Client(address, security=security, timeout=timeout, set_as_default=False)

    with ExitStack() as stack:
        try:
            # The handshake comes first, before Ctrl-C is blocked, so that Ctrl-C can end the wait for a silent
            # scheduler.
            _shake_hands(distributed, address, security, timeout)
            client = stack.enter_context(_closed_at_the_end(started))
        # TimeoutError is an OSError, too.
        except OSError as error:
            raise ConnectionError(
                f"No Dask scheduler answered at {address} within {timeout:g} s ({type(error).__name__}). "
                f"Start one with `dask scheduler --host HOST`, or give a higher engine_timeout."
            ) from None
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError:
            raise ConnectionError(
                f"The scheduler at {address} had no worker within {timeout:g} s. "
                f"Start some with `dask worker {address} --nthreads 1`, or give a higher engine_timeout."
            ) from None
        options = {"resources": dict(resources)} if resources else {}
        workers = _offering(client, resources or {}, timeout)
        if not workers:
            raise ConnectionError(
                f"No worker of {address} offered {dict(resources or {})} within {timeout:g} s, so no cell could run. "
                f"Start some with `dask worker {address} --resources {_words(resources or {})}`, "
                f"or omit resources."
            )
        if execution.device != "cpu" and all(
            problems := client.run(device_problem, execution.device, workers=workers).values()
        ):
            raise ValueError(f"The workers of {address} cannot compute: {next(iter(problems))}")
        executor = client.get_executor(pure=False, retries=0, **options)
        try:
            yield Engine(
                address,
                executor,
                lambda: max(1, sum(client.nthreads().values())),
                (distributed.KilledWorker, BrokenExecutor),
            )
        finally:
            # `with executor` would wait for cells whose workers Ctrl-C has ended.
            executor.shutdown(wait=False)


def _shake_hands(distributed: Any, address: str, security: Any, timeout: float) -> None:
    """Raise OSError if no scheduler answers in time. Dask itself would wait forever for a silent port."""

    async def connect() -> None:
        secrets = security.get_connection_args("client")
        comm = await asyncio.wait_for(distributed.core.connect(address, timeout=timeout, **secrets), timeout)
        comm.abort()

    # The coroutine runs in another thread, because a notebook's thread already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, connect()).result()


def _offering(client: Any, resources: Mapping[str, float], timeout: float) -> list[str]:
    """Return the addresses of workers with the resources of a cell. Wait up to `timeout` s for the first of them."""
    end = time.monotonic() + timeout
    while True:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        needed = resources.items()
        addresses = [a for a, worker in workers.items() if all(worker["resources"].get(n, 0) >= x for n, x in needed)]
        if addresses or time.monotonic() > end:
            return addresses
        time.sleep(0.1)


def _words(resources: Mapping[str, float]) -> str:
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())
