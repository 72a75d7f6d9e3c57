"""Groups of ranks: forked processes, or threads of this one."""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zipccl_core._autoload import register
from zipccl_core.config import ZipCCLConfig

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
    launch = _run_processes if launcher == "processes" else _run_threads
    return launch(fn, world_size, args, backend, config, timeout)


def _run_processes(
    fn: Callable[..., Result],
    world_size: int,
    args: tuple[Any, ...],
    backend: str | None,
    config: ZipCCLConfig | None,
    timeout: float,
) -> list[Result]:
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        pipes, processes = [], []
        for rank in range(world_size):
            parent, child = context.Pipe(duplex=False)
            target_args = (fn, rank, world_size, args, backend, config, timeout, Path(folder, "store"), port, child)
            process = context.Process(target=_child, args=target_args, daemon=True)
            process.start()
            child.close()
            pipes.append(parent)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill() if process.is_alive() else None
                process.join()


def _collect(pipes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready: list[Any] = connection.wait(waiting, timeout)
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
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


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    backend: str | None,
    config: ZipCCLConfig | None,
    timeout: float,
    store: Path,
    port: int,
    pipe: Any,
) -> None:
    faulthandler.dump_traceback_later(timeout, exit=False)
    torch.set_num_threads(1)  # a forked process cannot use the parent's OpenMP threads
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                pg_options=config,
            )
        outcome = (True, fn(rank, world_size, *args))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    os._exit(0)  # no exit handlers of the parent's


def _run_threads(
    fn: Callable[..., Result],
    world_size: int,
    args: tuple[Any, ...],
    backend: str | None,
    config: ZipCCLConfig | None,
    timeout: float,
) -> list[Result]:
    if backend is None:
        raise ValueError("launcher='threads' needs a backend: environment variables are one set a process")
    store = c10d.HashStore()
    results: dict[int, Result] = {}
    errors: dict[int, str] = {}

    def body(rank: int) -> None:
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                pg_options=config,
            )
            results[rank] = fn(rank, world_size, *args)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            errors[rank] = traceback.format_exc()

    with _world_per_thread():
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
    for rank, error in errors.items():  # the first to fail first
        raise RankFailedError(f"rank {rank} raised:\n{error}")
    if len(results) < world_size:
        raise RankFailedError(f"ranks {sorted(set(range(world_size)) - set(results))} did not end within {timeout} s")
    return [results[rank] for rank in range(world_size)]


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
