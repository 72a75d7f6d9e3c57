"""Section `collectives` of bench/gpu.py: two processes that share the GPU, over gloo: bytes move through host memory.

It says little about a network, but runs every collective on a GPU from end to end: agreement, streams, kernels,
movements, second movements. Bits are native gloo's, which adds on the CPU.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_machine import Machine, different, gaussian, row
from report import Row

from zipccl_core import Communicator, ZipCCLConfig
from zipccl_core.codec.reduction import Reduction
from zipccl_core.strategy.operation import Operation

BF16 = torch.bfloat16
TIMEOUT_S = 120
CONFIGS: dict[str, dict[str, Any]] = {
    "exact": {"dynamic_sizes": "exact"},
    "capped": {"dynamic_sizes": "capped"},
    "capped too small": {"dynamic_sizes": "capped", "dynamic_cap": 0.005},
}
"""The last one: everything is moved, and decoded, twice."""
STAGED = "gloo, staged"


class Case(NamedTuple):
    """A collective.

    Attributes:
        operation: for the counters.
        make: new (output, input) of a rank on the device; they are the same tensor where it works in place.
        native: by torch.distributed, on CPU tensors.
        ours: by a communicator, on the device.
    """

    operation: Operation
    make: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    native: Callable[[torch.Tensor, torch.Tensor], Any]
    ours: Callable[[Communicator, torch.Tensor, torch.Tensor], Any]


def in_place(values: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = values.clone()
    return tensor, tensor


CASES = {
    "all_gather_into_tensor": Case(
        Operation.ALL_GATHER,
        lambda values, world_size: (values.new_zeros(world_size * values.numel()), values.clone()),
        lambda output, input: dist.all_gather_single(output, input),
        lambda communicator, output, input: communicator.all_gather_into_tensor(output, input),
    ),
    "reduce_scatter_tensor": Case(
        Operation.REDUCE_SCATTER,
        lambda values, world_size: (values.new_zeros(values.numel() // world_size), values.clone()),
        lambda output, input: dist.reduce_scatter_single(output, input),
        lambda communicator, output, input: communicator.reduce_scatter_tensor(output, input),
    ),
    "all_reduce": Case(
        Operation.ALL_REDUCE,
        in_place,
        lambda output, input: dist.all_reduce(output),
        lambda communicator, output, input: communicator.all_reduce(output),
    ),
    "all_to_all_single": Case(
        Operation.ALL_TO_ALL,
        lambda values, world_size: (torch.zeros_like(values), values.clone()),
        lambda output, input: dist.all_to_all_single(output, input),
        lambda communicator, output, input: communicator.all_to_all_single(output, input),
    ),
    "broadcast": Case(
        Operation.BROADCAST,
        in_place,
        lambda output, input: dist.broadcast(output, src=0),
        lambda communicator, output, input: communicator.broadcast(output, src=0),
    ),
}


class Rank:
    """One rank, all cases."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def communicator(self, **config: Any) -> Communicator:
        config = {"strategy": "always", "reduction": "gloo", **config}
        return Communicator(dist.group.WORLD, ZipCCLConfig(**config), devices=self.machine.devices)

    def wanted(self, case: Case, values: torch.Tensor) -> torch.Tensor:
        """What native gloo makes of copies on the CPU."""
        output, input = case.make(values.to("cpu", copy=True), self.world_size)
        case.native(output, input)
        return output

    def ours(self, case: Case, communicator: Communicator, values: torch.Tensor) -> torch.Tensor:
        output, input = case.make(values, self.world_size)
        case.ours(communicator, output, input)
        self.machine.synchronize()
        return output

    def staged(self, case: Case, values: torch.Tensor) -> torch.Tensor:
        """What one would do without ZipCCL: the same way through host memory."""
        output = self.wanted(case, values).to(self.machine.device)
        self.machine.synchronize()
        return output

    def checked(self, name: str, values: torch.Tensor) -> dict[str, int]:
        """Values that are wrong, by configuration, on this rank."""
        case, wrong = CASES[name], {STAGED: 0}
        wanted = self.wanted(case, values)
        for label, config in CONFIGS.items():
            communicator = self.communicator(**config)
            wrong[label] = different(self.ours(case, communicator, values).cpu(), wanted)
            if communicator.stats()[case.operation].native_calls:
                raise RuntimeError(f"{name}, {label}: the call was native")
            communicator.close()
        return wrong

    def fp32(self, numel: int) -> int:
        """Sums in fp32, which the kernels add in registers; wrong values of a reduce-scatter and an all-reduce."""
        every = [gaussian(numel, torch.device("cpu"), rank) for rank in range(self.world_size)]
        total = torch.empty_like(every[0])
        Reduction("fp32", False, numel, 0).reduce(every, total)
        communicator, mine = self.communicator(reduction="fp32"), every[self.rank].to(self.machine.device)
        part = self.ours(CASES["reduce_scatter_tensor"], communicator, mine).cpu()
        whole = self.ours(CASES["all_reduce"], communicator, mine).cpu()
        communicator.close()
        size = numel // self.world_size
        own = total[self.rank * size : (self.rank + 1) * size]
        return different(part, own) + different(whole, total)

    def times(self, name: str, values: torch.Tensor, rounds: int) -> torch.Tensor:
        """Microseconds, shape (contenders, rounds): staged gloo, then exact and capped. Of the slowest rank."""
        case = CASES[name]
        communicators = [self.communicator(**CONFIGS[label]) for label in ("exact", "capped")]
        calls: list[Callable[[], Any]] = [lambda: self.staged(case, values)]
        calls += [lambda one=one: self.ours(case, one, values) for one in communicators]  # type: ignore[misc]
        taken = torch.zeros(len(calls), rounds)
        for number in range(-1, rounds):  # a first round does not count
            for index, call in enumerate(calls):
                dist.barrier()
                begin = time.perf_counter()
                call()
                if number >= 0:
                    taken[index, number] = (time.perf_counter() - begin) * 1e6
        for communicator in communicators:
            communicator.close()
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken


def run_rank(
    rank: int,
    world_size: int,
    store: str,
    nbytes: Sequence[int],
    rounds: int,
    make_machine: Callable[[], Machine],
    result: Connection,
) -> None:
    """One process. Rank 0 sends the rows."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    one, rows = Rank(make_machine()), []
    for size in nbytes:
        numel = size // 2 // (2 * world_size) * 2 * world_size
        values = gaussian(numel, torch.device("cpu"), rank).to(one.machine.device)
        for name in CASES:
            wrong = one.checked(name, values)
            counts = torch.tensor([wrong[label] for label in (STAGED, *CONFIGS)])
            dist.all_reduce(counts)
            taken = one.times(name, values, rounds)
            for label, samples in zip((STAGED, "exact", "capped"), taken.tolist(), strict=True):
                n_wrong = int(counts[[STAGED, *CONFIGS].index(label)])
                rows.append(row("collectives", name, label, 2 * numel, "time", "us", samples, n_wrong))
            for label in ("capped too small",):
                n_wrong = int(counts[[STAGED, *CONFIGS].index(label)])
                rows.append(row("collectives", name, label, 2 * numel, "compared", "count", [numel], n_wrong))
        n_wrong = torch.tensor([one.fp32(numel)])
        dist.all_reduce(n_wrong)
        rows.append(row("collectives", "fp32 sums", "exact", 2 * numel, "compared", "count", [numel], int(n_wrong)))
    if rank == 0:
        result.send(rows)
    result.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(make_machine: Callable[[], Machine], nbytes: Sequence[int], rounds: int, world_size: int = 2) -> list[Row]:
    """Spawns the ranks, since a forked process cannot use CUDA, and waits for their rows.

    Raises:
        RuntimeError: a rank failed; its error is above.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, str(Path(folder) / "store"), list(nbytes), rounds, make_machine, sender)
        ranks = [spawn.Process(target=run_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        sender.close()
        try:
            rows: list[Row] = receiver.recv() if receiver.poll(TIMEOUT_S) else []
        except EOFError:
            rows = []
        finally:
            for process in ranks:
                process.join(10 if rows else 0.5)
                process.kill()
                process.join()
    if not rows or any(process.exitcode for process in ranks):
        codes = [process.exitcode for process in ranks]
        raise RuntimeError(f"ranks ended with {codes}, or not within {TIMEOUT_S} s; their errors are above")
    return rows


COLUMNS = {"operation": -23, "size": 11, "by": -17, "us": 10, "p20..p80": -19, "#wrong": 7}


def table_of(rows: Sequence[Row]) -> Iterator[list[object]]:
    for one in rows:
        timed = one["metric"] == "time"
        spread = [one["p50"], f"{one['p20']}..{one['p80']}"] if timed else ["-", "bits only"]
        yield [one["operation"], one["nbytes"], one["contender"], *spread, one["wrong"]]
