"""Ranks for benchmarks: forked processes on the nodes of a network, which do what they are told."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from network import Network


class Ranks:
    """Processes with a gloo group. A context manager.

    Args:
        network: ranks are spread over its nodes, in order.
        world_size: how many.
        store: a file for their rendezvous, which must not be there.
    """

    def __init__(self, network: Network, world_size: int, store: Path) -> None:
        fork = get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            here, there = fork.Pipe()
            process = fork.Process(target=_serve, args=(network, rank, world_size, store, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.run(dist.barrier)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function returns on each rank; one of a module, which the ranks have, too."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            ended_well, value = pipe.recv()
            if not ended_well:
                raise RuntimeError(f"rank {rank}: {value}")
            answers.append(value)
        return answers


def _serve(network: Network, rank: int, world_size: int, store: Path, pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        network.enter(rank * network.n_nodes // world_size)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        rendezvous: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
        dist.init_process_group("gloo", timeout=timedelta(seconds=120), **rendezvous)
        while True:
            function, arguments = pipe.recv()
            pipe.send((True, function(*arguments)))
    except EOFError:
        pass  # the benchmark has ended
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
