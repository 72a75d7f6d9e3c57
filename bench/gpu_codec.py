"""Sections `codec` and `peers` of bench/gpu.py: speed beside a copy in the GPU's memory, what a launch costs the host,
and what a graph saves."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from gpu_machine import MB, Machine, different, gaussian, parts_of, row
from report import Row, expect, percentiles

from zipccl_core import ExponentCodec, compress
from zipccl_core.kernels import FrameKernels, Split, Window

BATCH, PARTS = 64, 4
UNIT = 8 * BATCH
"""Values in a payload are a multiple of it, so that all tensors of a batch begin at multiples of 16 bytes."""
SPLITZIP_GBS = {"encode": 613, "decode": 2182}
"""What SplitZip's authors publish, measured on other hardware than whatever this runs on."""
FLOOR_FROM, FLOOR = 256 * MB, 0.8
"""Smaller tensors stay in caches, and the floor is that of the memory."""


class Operation(NamedTuple):
    """Something that is timed.

    Attributes:
        name: `encode`, ...
        contender: who does it.
        call: does it once.
        input_nbytes: of bf16 values that are encoded, or decoded to.
        moved_nbytes: through memory: what must be read and written once.
        clear: overwrites what the call writes.
        n_wrong: after a call, how many values or bytes of frames are not what they must be.
    """

    name: str
    contender: str
    call: Callable[[], object]
    input_nbytes: int
    moved_nbytes: int
    clear: Callable[[], object]
    n_wrong: Callable[[], int]

    def check(self, machine: Machine) -> int:
        """Does it once more, into memory that holds something else, and counts what is wrong."""
        self.clear()
        self.call()
        machine.synchronize()
        return self.n_wrong()


class Timed:
    """The samples of one operation, each with that of a copy right before it."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.seconds: list[float] = []
        self.copy_gbs: list[float] = []
        self.n_wrong = 0

    @property
    def throughput(self) -> list[float]:
        """GB/s of input."""
        return [self.operation.input_nbytes / seconds / 1e9 for seconds in self.seconds]

    @property
    def floor(self) -> list[float]:
        """The time that the bytes moved would take at the copy's speed, over the time taken."""
        moved = self.operation.moved_nbytes / 1e9
        return [moved / gbs / seconds for gbs, seconds in zip(self.copy_gbs, self.seconds, strict=True)]


class Clock(NamedTuple):
    """How long is measured.

    Attributes:
        rounds: each takes every operation once.
        sample_s: an operation is repeated for so long in a round.
        deadline: on time.monotonic's scale; after it there are three rounds at most.
        launches: calls one after another, where the host's time for one is measured. Fewer than a stream has room for.
    """

    rounds: int
    sample_s: float
    deadline: float = float("inf")
    launches: int = 50


class Payload:
    """Tensors and frames of one size on the device, in memory that is there before anything is timed."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        self.machine, self.nbytes = machine, nbytes
        self.numel = nbytes // 2
        self.values = gaussian(self.numel, machine.device)
        self.out = torch.zeros_like(self.values)
        self.buffer = self._room(self.numel)
        self.frame = compress(self.values.cpu(), ExponentCodec()).to(machine.device)  # by the CPU's kernels

    def _room(self, numel: int) -> torch.Tensor:
        nbytes = ExponentCodec().layout(numel, torch.bfloat16).frame_nbytes
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.machine.device)

    def copy(self) -> Operation:
        return self._to_out("copy", "torch copy_", partial(self.out.copy_, self.values), 2 * self.nbytes)

    def _to_out(self, name: str, label: str, call: Callable[[], object], moved_nbytes: int) -> Operation:
        """An operation that makes the payload's values again."""
        n_wrong = partial(different, self.out, self.values)
        return Operation(name, label, call, self.nbytes, moved_nbytes, self.out.zero_, n_wrong)

    def round_trip(self, label: str, kernels: FrameKernels) -> Iterator[Operation]:
        """Encode, and decode of the reference's frame."""
        moved, part = self.nbytes + self.frame.numel(), parts_of(self.frame, self.numel)
        encode = partial(kernels.encode_frames, [self.values], [self.buffer], Window())
        n_wrong = partial(different, self.buffer[: self.frame.numel()], self.frame)
        yield Operation("encode", label, encode, self.nbytes, moved, self.buffer.zero_, n_wrong)
        yield self._to_out("decode", label, partial(kernels.decode_frames, [part], [self.out]), moved)

    @functools.cached_property
    def _batch(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Frames of parts of equal size, and memory for them."""
        parts = self.values.split(self.numel // BATCH)
        frames = [compress(one.cpu(), ExponentCodec()).to(self.machine.device) for one in parts]
        return [(frame, self._room(self.numel // BATCH)) for frame in frames]

    def batched(self, label: str, kernels: FrameKernels) -> Iterator[Operation]:
        """The same for parts of equal size, as an all-to-all has them."""
        numel, batch = self.numel // BATCH, self._batch
        values, outs, buffers = self.values.split(numel), self.out.split(numel), [buffer for _, buffer in batch]
        moved = self.nbytes + sum(frame.numel() for frame, _ in batch)

        def clear() -> None:
            for buffer in buffers:
                buffer.zero_()

        def n_wrong() -> int:
            return sum(different(buffer[: frame.numel()], frame) for frame, buffer in batch)

        encode = partial(kernels.encode_frames, values, buffers, Window())
        yield Operation(f"encode x{BATCH}", label, encode, self.nbytes, moved, clear, n_wrong)
        parts = [parts_of(frame, numel) for frame, _ in batch]
        yield self._to_out(f"decode x{BATCH}", label, partial(kernels.decode_frames, parts, outs), moved)

    @functools.cached_property
    def _others(self) -> list[Split]:
        """Frames of all ranks but one: equal, but each in memory of its own."""
        return [parts_of(self.frame.clone(), self.numel) for _ in range(PARTS - 1)]

    def reduced(self, label: str, kernels: FrameKernels) -> Iterator[Operation]:
        """Decode and add: frames of all ranks but one, and that one's own values."""
        moved = (PARTS - 1) * self.frame.numel() + 2 * self.nbytes
        call = partial(kernels.decode_reduce, [self.values, *self._others], self.out, 1)

        def n_wrong() -> int:
            return different(self.out, (self.values.float() * PARTS).to(torch.bfloat16))

        name = f"decode + reduce {PARTS}"
        yield Operation(name, label, call, PARTS * self.nbytes, moved, self.out.zero_, n_wrong)

    def of(self, label: str, kernels: FrameKernels) -> list[Operation]:
        return [*self.round_trip(label, kernels), *self.batched(label, kernels), *self.reduced(label, kernels)]


def measure(machine: Machine, copy: Operation, operations: Sequence[Operation], clock: Clock) -> list[Timed]:
    """Interleaved rounds of all operations, each sample behind one of the copy."""

    def repeated(operation: Operation) -> tuple[Callable[[], object], int]:
        operation.call()
        seconds = machine.seconds(operation.call, 2)
        return operation.call, max(2, min(200, round(clock.sample_s / max(seconds, 1e-9))))

    timed, calls = [Timed(operation) for operation in operations], [repeated(one) for one in operations]
    of_copy, base = Timed(copy), repeated(copy)
    for number in range(clock.rounds):
        if number >= 3 and time.monotonic() > clock.deadline:
            break
        for item, (call, n_calls) in zip(timed, calls, strict=True):
            of_copy.seconds.append(machine.seconds(*base))
            item.copy_gbs.append(copy.moved_nbytes / of_copy.seconds[-1] / 1e9)
            item.seconds.append(machine.seconds(call, n_calls))
    of_copy.copy_gbs = [copy.moved_nbytes / seconds / 1e9 for seconds in of_copy.seconds]
    for item in [of_copy, *timed]:
        item.n_wrong = item.operation.check(machine)
    return [of_copy, *timed]


def bits_of(operation: Operation) -> float | None:
    """Bits a value of what is encoded, or decoded, alone: what is moved beside the values."""
    if operation.name not in ("encode", "decode"):
        return None
    return (operation.moved_nbytes - operation.input_nbytes) * 16 / operation.input_nbytes


def rows_of(section: str, nbytes: int, timed: Sequence[Timed]) -> Iterator[Row]:
    for item in timed:
        operation = item.operation
        key = (section, operation.name, operation.contender, nbytes)
        yield row(*key, "throughput", "GB/s", item.throughput, item.n_wrong)
        yield row(*key, "time", "us", [seconds * 1e6 for seconds in item.seconds], item.n_wrong)
        yield row(*key, "moved", "bytes", [operation.moved_nbytes], item.n_wrong)
        yield row(*key, "floor", "ratio", item.floor, item.n_wrong)
        bits = bits_of(operation)
        if bits is not None:
            yield row(*key, "size", "bits/value", [bits], item.n_wrong)


COLUMNS = {
    "size": 11,
    "operation": -17,
    "contender": -27,
    "bits": 7,
    "us": 10,
    "GB/s": 8,
    "p20..p80": -17,
    "moved MB": 9,
    "of floor": 8,
    "#wrong": 7,
}


def table_of(nbytes: int, timed: Sequence[Timed]) -> Iterator[list[object]]:
    for item in timed:
        low, middle, high = percentiles(item.throughput)
        bits = bits_of(item.operation)
        yield [
            nbytes,
            item.operation.name,
            item.operation.contender,
            "-" if bits is None else f"{bits:.3f}",
            f"{percentiles(item.seconds)[1] * 1e6:.1f}",
            f"{middle:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{item.operation.moved_nbytes / MB:.2f}",
            f"{percentiles(item.floor)[1]:.3f}",
            item.n_wrong,
        ]


def payload_nbytes(megabytes: float) -> int:
    return max(1, int(megabytes * MB) // (2 * UNIT)) * 2 * UNIT


def print_expectations(nbytes: int, timed: Sequence[Timed], contender: str) -> None:
    """Of the kernels that are used by default."""
    for item in timed:
        name = item.operation.name
        if item.operation.contender != contender or name not in SPLITZIP_GBS or nbytes < FLOOR_FROM * 0.99:
            continue
        floor, gbs = percentiles(item.floor)[1], percentiles(item.throughput)[1]
        size = f"{nbytes / MB:.0f} MB"
        expect(floor >= FLOOR, f"{name} of {size} at {FLOOR:.0%} of the copy's speed or more, measured {floor:.1%}")
        published = SPLITZIP_GBS[name]
        what = f"{name} of {size} above {published} GB/s (SplitZip as published, on other hardware), measured {gbs:.0f}"
        expect(gbs > published, what)


# ---------------------------------------------------------------------- launches

LAUNCH_COLUMNS = {"call": -8, "variant, stream": -26, "host us": 9, "p20..p80": -17}


def launches(machine: Machine, variants: Sequence[str], nbytes: int, clock: Clock) -> Iterator[Row]:
    """Microseconds of the host for a call, by the stream on which it is: of several one after another, for none of
    which it waits."""
    payload = Payload(machine, nbytes)
    for variant in variants:
        for operation in payload.round_trip(variant, machine.kernels(variant)):
            for name, stream in machine.streams().items():
                samples = []
                with machine.on(stream):
                    for _ in range(clock.rounds + 1):
                        machine.synchronize()
                        begin = time.perf_counter()
                        for _ in range(clock.launches):
                            operation.call()
                        samples.append((time.perf_counter() - begin) / clock.launches * 1e6)
                machine.synchronize()
                wrong = operation.check(machine)
                contender = f"{variant}, {name} stream"
                yield row("codec", operation.name, contender, nbytes, "host_time", "us", samples[1:], wrong)


GRAPH_COLUMNS = {"call": -8, "variant, stream": -26, "eager us": 9, "replay us": 9}


def graphs(machine: Machine, variants: Sequence[str], nbytes: int, clock: Clock) -> Iterator[Row]:
    """Microseconds of the device for a call, eager and replayed, interleaved. A graph has ten calls, so that what is
    compared is not the launch of the graph."""
    payload = Payload(machine, nbytes)
    for variant in variants:
        for operation in payload.round_trip(variant, machine.kernels(variant)):
            for name, stream in machine.streams().items():
                if name == "default":
                    continue
                held: list[object] = []  # memory of the graph's that kernels write to

                def ten_calls(operation: Operation = operation, held: list[object] = held) -> None:
                    held[:] = [operation.call() for _ in range(10)]

                replay = machine.capture(ten_calls, stream)
                samples: dict[str, list[float]] = {"eager_time": [], "replay_time": []}
                with machine.on(stream):
                    for _ in range(clock.rounds + 1):
                        samples["eager_time"].append(machine.seconds(ten_calls, 3) * 1e5)
                        samples["replay_time"].append(machine.seconds(replay, 3) * 1e5)
                machine.synchronize()
                wrong = operation.check(machine)
                for metric, values in samples.items():
                    contender = f"{variant}, {name} stream"
                    yield row("codec", operation.name, contender, nbytes, metric, "us", values[1:], wrong)
