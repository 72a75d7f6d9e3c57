"""Groups of ranks: forked processes, or threads of this one."""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zipccl_core.config import ZipCCLConfig
from zipccl_core.registration import register

Result = TypeVar("Result")


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time; the message has its traceback."""


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    backend: str | None = "zipccl",
    launcher: Literal["processes", "threads"] = "processes",
    config: ZipCCLConfig | None = None,
    timeout: float = 60,
) -> list[Result]:
    """Runs `fn(rank, world_size, *args)` on every rank of a new group and returns the results in rank order.

    Args:
        fn: finds torch.distributed initialised, with `backend`, as the default group.
        world_size: how many ranks.
        args: for `fn`.
        backend: `zipccl`, `gloo`, ...; None leaves `init_process_group` to `fn` (RANK, WORLD_SIZE, LOCAL_RANK,
            MASTER_ADDR and MASTER_PORT are set; processes only).
        launcher: `processes` forks this one, about 50 ms each; the parent must not have run a backward pass.
            `threads` simulates the ranks as threads of this process: real gloo messages, and a world of its own for
            every thread. Threads share torch's random state: use generators.
        config: for the backend `zipccl`.
        timeout: seconds for everything together; also of the group's operations.

    Raises:
        RankFailedError: a rank failed; the others are stopped (processes) or left behind (threads).
    """
    register()
    job = _Job(fn, args, world_size, backend, config, timeout)
    return _in_processes(job) if launcher == "processes" else _in_threads(job)


class _Job(NamedTuple):
    """What every rank does."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    config: ZipCCLConfig | None
    timeout: float

    def run(self, rank: int, **rendezvous: Any) -> Any:
        if self.backend is not None:
            dist.init_process_group(
                self.backend,
                rank=rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeout),
                pg_options=self.config,
                **rendezvous,
            )
        result = self.fn(rank, self.world_size, *self.args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return result


def _in_processes(job: _Job) -> list[Any]:
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        pipes, processes = [], []
        for rank in range(job.world_size):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(job, rank, Path(folder, "store"), port, child), daemon=True)
            process.start()
            child.close()
            pipes.append(parent)
            processes.append(process)
        try:
            return _collect(pipes, job.timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        waiting = [pipes[rank] for rank in missing]
        ready: list[Any] = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {missing} did not end within {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ended_well, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailedError(f"rank {rank} died without a word") from None
            if not ended_well:
                raise RankFailedError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _child(job: _Job, rank: int, store: Path, port: int, pipe: Any) -> None:
    faulthandler.dump_traceback_later(job.timeout, exit=False)
    torch.set_num_threads(1)  # a forked process cannot use the parent's OpenMP threads
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        message = pickle.dumps((True, job.run(rank, init_method=f"file://{store}")))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(message)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no exit handlers of the parent's


def _in_threads(job: _Job) -> list[Any]:
    if job.backend is None:
        raise ValueError("launcher='threads' needs a backend: environment variables are one set a process")
    store = c10d.HashStore()
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = job.run(rank, store=store)
        except BaseException:
            errors[rank] = traceback.format_exc()

    deadline = time.monotonic() + job.timeout
    with _world_per_thread():
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(job.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    for rank, error in errors.items():  # the first to fail first
        raise RankFailedError(f"rank {rank} raised:\n{error}")
    missing = [rank for rank in range(job.world_size) if rank not in results]
    if missing:
        raise RankFailedError(f"ranks {missing} did not end within {job.timeout} s")
    return [results[rank] for rank in range(job.world_size)]


@contextmanager
def _world_per_thread() -> Iterator[None]:
    """torch's own way to give every thread a torch.distributed of its own, as its tests do."""
    threaded: Any = import_module("torch.testing._internal.distributed.multi_threaded_pg")

    isolate: Callable[[bool], None] = getattr(c10d, "_set_thread_isolation_mode")  # noqa: B009 - it has no stub
    threaded._install_threaded_pg()
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        threaded._uninstall_threaded_pg()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
