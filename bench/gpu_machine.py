"""What bench/gpu.py needs of a GPU: kernels, streams, a clock, graphs. Tests bring a machine without one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import report
import torch

from zipccl_core.collective.device.layer import Device
from zipccl_core.kernels import FrameKernels, Split
from zipccl_core.kernels.jobs import static_frame_nbytes

MB = 1_000_000


class Machine(Protocol):
    """One device. What is done to tensors is in the order of the current stream."""

    device: torch.device
    devices: Mapping[torch.device, Device]
    """For a Communicator: devices that it does not find by itself."""

    def kernels(self, variant: str) -> FrameKernels:
        """One of compiler.VARIANTS."""

    def streams(self) -> dict[str, Any]:
        """Streams on which the kernels are launched in different ways: `default`, `torch` (a stream that torch made),
        `own` (one that the kernels know)."""

    def new_stream(self) -> Any:
        """A stream of torch's beside all others."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream this thread's current one."""

    def keep_busy(self) -> None:
        """Gives the current stream a millisecond of work, so that what comes next is late."""

    def synchronize(self) -> None:
        """Blocks the host until the device is done."""

    def seconds(self, call: Callable[[], object], n_calls: int) -> float:
        """Seconds a call of the current stream's time, the mean of some calls one after another."""

    def capture(self, call: Callable[[], object], stream: Any) -> Callable[[], None]:
        """Captures a call in a graph, in a stream that is not the default one; returns its replay."""


class Gpu:
    """A GPU, by torch.cuda."""

    devices: Mapping[torch.device, Device] = {}

    def __init__(self, index: int = 0) -> None:
        self.index, self.device = index, torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._streams: dict[str, Any] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def kernels(self, variant: str) -> FrameKernels:
        from zipccl_core.kernels import cuda

        return cuda.load(self.index, variant=variant)

    def streams(self) -> dict[str, Any]:
        if not self._streams:
            from zipccl_core.kernels import cuda

            default = torch.cuda.default_stream(self.device)
            self._streams = {"default": default, "torch": self.new_stream(), "own": cuda.new_stream(self.index)}
        return self._streams

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def keep_busy(self) -> None:
        torch.cuda._sleep(2_000_000)  # clock cycles

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], n_calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n_calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / n_calls

    def capture(self, call: Callable[[], object], stream: Any) -> Callable[[], None]:
        with self.on(stream):
            call()  # what is made when it is first used cannot be made in a capture
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        self._graphs.append(graph)
        return graph.replay

    def description(self) -> dict[str, str]:
        """The columns of a CSV that say what was measured."""
        return {
            "device": torch.cuda.get_device_name(self.device),
            "kernels": "cuda",
            "capability": ".".join(map(str, torch.cuda.get_device_capability(self.device))),
            "driver": _said_by(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={self.index}"
            ),
            "cuda": str(torch.version.cuda),
            "nvcc": _said_by("nvcc", "--version").rpartition("release ")[2].partition(",")[0],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "",
            "pycuda": report.package_version("pycuda"),
        }


def _said_by(*command: str) -> str:
    """What a program prints, empty where there is no such program."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def describe(columns: Mapping[str, str]) -> None:
    """Every row that is written, and the head of what is printed, names the GPU instead of the CPU."""
    report.machine().update(columns)


def row(
    section: str,
    operation: str,
    contender: str,
    nbytes: int,
    metric: str,
    unit: str,
    values: list[float],
    wrong: int = 0,
) -> report.Row:
    """A row of the CSV: the same columns in all sections.

    Args:
        section: `checks`, `codec`, ...
        operation: what was done.
        contender: by whom, or how.
        nbytes: of bf16 input.
        metric, unit, values: what was measured, once a round.
        wrong: how many values, or bytes of frames, were not what they must be.
    """
    key = {"section": section, "operation": operation, "contender": contender, "nbytes": nbytes}
    return {**key, **report.measurement(metric, unit, values), "rounds": len(values), "wrong": wrong}


def gaussian(numel: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Seeded normal values of sigma 0.02, which is what weights look like, made where they are needed."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(numel, dtype=torch.bfloat16, device=device)
    for begin in range(0, numel, 1 << 24):
        part = values[begin : begin + (1 << 24)]
        part.copy_(torch.randn(part.numel(), generator=generator, device=device) * 0.02)
    return values


def different(came: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many bit patterns of equal numel differ."""
    assert came.dtype == wanted.dtype
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[came.element_size()]
    total = 0
    for begin in range(0, came.numel(), 1 << 26):  # a comparison needs memory of its own
        end = begin + (1 << 26)
        total += int((came[begin:end].view(integers) != wanted[begin:end].view(integers)).sum())
    return total


def parts_of(frame: torch.Tensor, numel: int, room: int | None = None) -> Split:
    """A whole frame as the two parts of which it consists; of the dynamic part, `room` bytes."""
    at = static_frame_nbytes(numel)
    return Split(frame[:at], frame[at:] if room is None else frame[at : at + room])
