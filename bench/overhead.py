"""What a call costs that ZipCCL leaves native: small messages over the backend `zipccl` beside plain gloo.

    python bench/overhead.py
    python bench/overhead.py --ranks 4 --rounds 100

Ranks are processes of this machine over gloo's loopback, each on a core of its own where there are enough. Every rank
has three groups: `gloo`, `zipccl` (threshold of 64 KiB, so that these messages go native) and, for information,
`zipccl` with strategy `always`, which compresses them. A round takes each operation once over each group, in an order
that turns from round to round; a sample is the median of some calls one after another, on the slower rank. `+us` is
the median over the rounds of the difference to gloo in the same round; `+p20 us`, the difference of the p20 of both,
moves less where the machine has other work. Message sizes are what a rank contributes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from report import RESULTS, Row, expect, measurement, percentiles, print_head, print_table, write_csv

from zipccl_core import AlwaysStrategy, ThresholdStrategy, ZipCCLConfig, process_group, register

LIMIT_US = 60.0
GROUPS = ("gloo", "zipccl native", "zipccl always")
MESSAGES = ((torch.bfloat16, 1 << 10), (torch.bfloat16, 1 << 14), (torch.int64, 1 << 10))


class Case(NamedTuple):
    operation: str
    dtype: torch.dtype
    nbytes: int
    is_async: bool


CASES = [
    Case(operation, dtype, nbytes, is_async)
    for operation in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast")
    for dtype, nbytes in MESSAGES
    for is_async in (False, True)
]


def call_of(case: Case, group: dist.ProcessGroup, world_size: int) -> Callable[[], Any]:
    """One call, its tensors made: torch 2.13's names, whose older ones warn at every call."""
    numel = case.nbytes // case.dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    input, gathered = (
        torch.randn(numel, generator=generator).to(case.dtype),
        torch.empty(numel * world_size, dtype=case.dtype),
    )
    summed = torch.zeros_like(input)  # in place, over and over
    output, part = torch.empty_like(input), torch.empty(numel // world_size, dtype=case.dtype)
    arguments: dict[str, Any] = {"group": group, "async_op": case.is_async}
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_into_tensor": lambda: dist.all_gather_single(gathered, input, **arguments),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_single(part, input, **arguments),
        "all_to_all_single": lambda: dist.all_to_all_single(output, input, **arguments),
        "all_reduce": lambda: dist.all_reduce(summed, **arguments),
        "broadcast": lambda: dist.broadcast(input, src=0, **arguments),
    }
    call = calls[case.operation]
    return (lambda: call().wait()) if case.is_async else call


def sample_us(call: Callable[[], Any], n_calls: int) -> float:
    """The median of some calls one after another: a mean would count every time slice that other processes took."""
    times = []
    for _ in range(n_calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


# an all-to-all is compressed whatever its size, unless it is told not to be
NATIVE_HERE = ZipCCLConfig(strategy=ThresholdStrategy(), operations={"all_to_all": {"strategy": "never"}})


def run_rank(rank: int, world_size: int, store: Path, rounds: int, n_calls: int, result: Connection) -> None:
    """One rank. Rank 0 sends a tensor of us, shape (rounds, cases, groups): of the slowest rank."""
    cores = sorted(os.sched_getaffinity(0))
    if world_size <= len(cores):  # a rank that shares its core waits for the scheduler more than for its peers
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    groups = [
        dist.new_group(backend="gloo"),
        dist.new_group(backend="zipccl", pg_options=NATIVE_HERE),
        dist.new_group(backend="zipccl", pg_options=ZipCCLConfig(strategy=AlwaysStrategy())),
    ]
    calls = [[call_of(case, group, world_size) for group in groups] for case in CASES]
    times = torch.zeros(rounds, len(CASES), len(groups))
    for call in itertools.chain.from_iterable(calls):
        sample_us(call, 3)
    for number in range(rounds):
        for case, of_groups in enumerate(calls):
            for step in range(len(groups)):
                group = (number + step) % len(groups)
                of_groups[group]()  # ranks meet again before the clock starts
                times[number, case, group] = sample_us(of_groups[group], n_calls)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    native = groups[1].stats()
    assert all(native[operation].native_calls == native[operation].calls > 0 for operation in native)
    compressed = groups[2].stats()
    assert all(0 < compressed[operation].native_calls < compressed[operation].calls for operation in compressed)
    if rank == 0:
        result.send(times.tolist())
    result.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int, rounds: int, n_calls: int) -> torch.Tensor:
    """Forks the ranks and waits for their times."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, Path(folder) / "store", rounds, n_calls, sender)
        ranks = [fork.Process(target=run_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        sender.close()
        try:
            times = torch.tensor(receiver.recv())
        except EOFError:
            raise SystemExit("a rank failed; its error is above") from None
        finally:
            for process in ranks:
                process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; its error is above")
    return times


def rows_of(times: torch.Tensor, world_size: int, n_calls: int) -> Iterator[Row]:
    for index, case in enumerate(CASES):
        for number, group in enumerate(GROUPS):
            key: Row = {
                "operation": case.operation,
                "ranks": world_size,
                "dtype": str(case.dtype).removeprefix("torch."),
                "nbytes": case.nbytes,
                "mode": "async" if case.is_async else "sync",
                "group": group,
            }
            mine = times[:, index, number]
            tail = {"rounds": len(mine), "calls_per_round": n_calls}
            yield {**key, **measurement("time", "us", mine.tolist()), **tail}
            if number:
                difference = (mine - times[:, index, 0]).tolist()
                yield {**key, **measurement("time_over_gloo", "us", difference), **tail}


COLUMNS = {
    "operation": -23,
    "type": -9,
    "size": 6,
    "mode": -6,
    "gloo us": 9,
    "native us": 9,
    "+us": 7,
    "p20..p80": -14,
    "+p20 us": 7,
    "always us": 9,
    "+us ": 7,
}


def table_of(times: torch.Tensor) -> Iterator[list[object]]:
    for index, case in enumerate(CASES):
        gloo, native, always = times[:, index].unbind(1)
        low, middle, high = percentiles((native - gloo).tolist())
        best = percentiles(native.tolist())[0] - percentiles(gloo.tolist())[0]
        dtype, mode = str(case.dtype).removeprefix("torch."), "async" if case.is_async else "sync"
        medians = [f"{percentiles(of_group.tolist())[1]:.1f}" for of_group in (gloo, native, always)]
        cost = f"{percentiles((always - gloo).tolist())[1]:.1f}" if case.dtype == torch.bfloat16 else "-"
        compressed = medians[2] if case.dtype == torch.bfloat16 else "-"
        spread = f"{low:.1f}..{high:.1f}"
        yield [
            case.operation,
            dtype,
            case.nbytes,
            mode,
            *medians[:2],
            f"{middle:.1f}",
            spread,
            f"{best:.1f}",
            compressed,
            cost,
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=20, help="calls of a sample")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.csv", metavar="CSV")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    register()
    assert process_group  # imported before the fork
    print_head(
        f"small messages between {arguments.ranks} ranks on one machine; medians of interleaved rounds",
        f"rounds: {arguments.rounds}; calls of a sample: {arguments.calls}; +us: over gloo in the same round",
    )
    times = measure(arguments.ranks, arguments.rounds, arguments.calls)
    print_table(COLUMNS, table_of(times))
    added = [percentiles(case.tolist())[1] for case in (times[:, :, 1] - times[:, :, 0]).unbind(1)]
    measured = f"measured {statistics.median(added):.1f} in the median case, {max(added):.1f} at most"
    expect(max(added) < LIMIT_US, f"the native path below {LIMIT_US:.0f} us more than gloo, {measured}")
    write_csv(arguments.out, list(rows_of(times, arguments.ranks, arguments.calls)))


if __name__ == "__main__":
    main()
