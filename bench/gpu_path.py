"""Section `path` of bench/gpu.py: a collective on a GPU without a network: the cost of streams, events, host reads.

A group of one rank gathers from itself, by the same steps as a group of many: its own frame is the one that comes in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_codec import Clock
from gpu_machine import Machine, different, gaussian, row
from report import Row

from zipccl_core import ExponentCodec
from zipccl_core.collective.device.exchange import Link
from zipccl_core.collective.device.layer import CudaDevice
from zipccl_core.collective.device.mover import mover_of
from zipccl_core.collective.device.path import DeviceCall, DevicePath, DeviceWork
from zipccl_core.collective.device.patterns import Gather
from zipccl_core.collective.transport import ProcessGroupTransport
from zipccl_core.collective.wire import Wire
from zipccl_core.collective.worker import Worker
from zipccl_core.observe.statistics import Statistics
from zipccl_core.strategy.operation import Operation

CAP = 0.08
MODES: dict[str, tuple[float | None, bool]] = {
    "exact": (None, False),
    "exact async": (None, True),
    "capped": (CAP, False),
    "capped async": (CAP, True),
}
"""By name: the cap, and whether the host may not wait while the call is started."""
TOO_SMALL_A_CAP = 0.001


class Loop:
    """All-gathers of a group of one."""

    def __init__(self, machine: Machine, group: Any) -> None:
        device = machine.devices.get(machine.device) or CudaDevice(machine.device)
        self.machine, self.group = machine, group
        self.path = DevicePath(device, mover_of(group, machine.device))
        self._transport, self._statistics, self._worker = ProcessGroupTransport(group), Statistics(), Worker("loop")

    def gather(self, values: torch.Tensor, out: torch.Tensor, cap: float | None, in_background: bool) -> DeviceWork:
        """Starts one."""
        path, codec = self.path, ExponentCodec()
        link = Link(path.device, path.mover, self.machine.device, codec, cap)
        step, numel = path.device.chunk_numel, values.numel()

        def exchanges() -> list[Gather]:
            parts = [(values[first : first + step], out[first : first + step]) for first in range(0, numel, step)]
            return [Gather(link, own, {0: target}, (own, own), [own.numel()]) for own, target in parts]

        wire = Wire(self._transport, self._statistics, Operation.ALL_GATHER, codec)
        call = DeviceCall(path, exchanges, [], [], [values, out], wire, "all_gather")
        return path.run(call, [out], self._worker, in_background)

    def close(self) -> None:
        self._worker.stop()
        self.path.close()
        self._transport.close()


def measure(machine: Machine, group: Any, nbytes: int, clock: Clock) -> Iterator[Row]:
    """Interleaved rounds of native calls and ours; the current stream is the caller's."""
    loop, values = Loop(machine, group), gaussian(nbytes // 2, machine.device)
    out = torch.zeros_like(values)

    def ours(cap: float | None, in_background: bool) -> Callable[[], Any]:
        return lambda: loop.gather(values, out, cap, in_background)

    starts = {"native": lambda: dist.all_gather_single(out, values, group=group, async_op=True)}
    starts |= {name: ours(*mode) for name, mode in MODES.items()}
    wrong = {name: _wrong(machine, start, values, out) for name, start in starts.items()}
    wrong["exact"] += _wrong(machine, ours(TOO_SMALL_A_CAP, False), values, out)  # all of the rest follows
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(clock.rounds + 1):
        for name, start in starts.items():
            returned, waited = 0.0, 0.0

            def call(start: Callable[[], Any] = start) -> None:
                nonlocal returned, waited
                begin = time.perf_counter()
                work = start()
                returned += time.perf_counter() - begin
                work.wait()
                waited += time.perf_counter() - begin

            n_calls = 8
            seconds = machine.seconds(call, n_calls)
            if number:
                samples.setdefault((name, "time"), []).append(seconds * 1e6)
                samples.setdefault((name, "host_time_to_return"), []).append(returned / n_calls * 1e6)
                samples.setdefault((name, "host_time_to_waited"), []).append(waited / n_calls * 1e6)
        if number >= 3 and time.monotonic() > clock.deadline:
            break
    machine.synchronize()
    loop.close()
    for (name, metric), taken in samples.items():
        yield row("path", "all_gather", name, nbytes, metric, "us", taken, wrong[name])


def _wrong(machine: Machine, start: Callable[[], Any], values: torch.Tensor, out: torch.Tensor) -> int:
    out.zero_()
    machine.synchronize()
    start().wait()
    machine.synchronize()
    return different(out, values)


COLUMNS = {"size": 11, "call": -13, "us": 9, "p20..p80": -17, "returns us": 10, "waited us": 10, "#wrong": 7}


def table_of(rows: Sequence[Row]) -> Iterator[list[object]]:
    """A line a mode, of the rows of one size."""
    by_mode: dict[object, dict[object, Row]] = {}
    for one in rows:
        by_mode.setdefault(one["contender"], {})[one["metric"]] = one
    for mode, metrics in by_mode.items():
        taken = metrics["time"]
        host = [metrics[f"host_time_to_{moment}"]["p50"] for moment in ("return", "waited")]
        yield [taken["nbytes"], mode, taken["p50"], f"{taken['p20']}..{taken['p80']}", *host, taken["wrong"]]
