"""Counters for each operation, as a table and as flat floats."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from zipccl_core.strategy.operation import Operation


@dataclass
class OperationStatistics:
    """What one operation did on this rank. Bytes are of compressed calls and count what this rank sent, unless they say
    otherwise.

    Attributes:
        calls: all calls, native ones too.
        native_calls: calls that went native.
        native_nbytes: bytes of the tensors of native calls.
        raw_nbytes: what the sent frames would have been uncompressed, each peer counted.
        wire_nbytes: what was sent: headers, static parts, dynamic parts, padding.
        padding_nbytes: part of `wire_nbytes`: bytes that only fill a frame's parts up to 128.
        self_nbytes: bytes that a rank keeps for itself; they never travel.
        frames: frames encoded.
        raw_frames: part of `frames`: values as they are, which did not compress or go to a rank of the same node.
        escapes: bytes of the dynamic parts of compressed frames; for the exponent codec its escapes.
        encode_s: seconds that the host spent encoding; 0 on GPUs, as the two below. All three are sums over the lanes
            of a call, which may be at work side by side.
        decode_s: seconds spent decoding and reducing.
        wait_s: seconds spent waiting for peers and the wire.
    """

    calls: int = 0
    native_calls: int = 0
    native_nbytes: int = 0
    raw_nbytes: int = 0
    wire_nbytes: int = 0
    padding_nbytes: int = 0
    self_nbytes: int = 0
    frames: int = 0
    raw_frames: int = 0
    escapes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Raw bytes / wire bytes; 1.0 where nothing was sent."""
        return self.raw_nbytes / self.wire_nbytes if self.wire_nbytes else 1.0


class Statistics:
    """The counters of one communicator, or a sum of several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[Operation, OperationStatistics] = {}

    def add(self, operation: Operation, **increments: float) -> None:
        """Adds to counters by name. Thread-safe."""
        with self._lock:
            counters = self._operations.setdefault(operation, OperationStatistics())
            for name, increment in increments.items():
                setattr(counters, name, getattr(counters, name) + increment)

    def __getitem__(self, operation: Operation | str) -> OperationStatistics:
        """The counters of one operation; zeros where it was never called."""
        return self._operations.get(Operation(operation), OperationStatistics())

    def __iter__(self) -> Iterator[Operation]:
        """The operations that were called, in the order of `Operation`."""
        return (operation for operation in Operation if operation in self._operations)

    @classmethod
    def sum(cls, many: Iterable[Statistics]) -> Statistics:
        """All counters added up."""
        total = cls()
        for statistics in many:
            total.merge(statistics)
        return total

    def merge(self, other: Statistics) -> None:
        """Adds the counters of another."""
        for operation in list(other):
            counters = other[operation]
            self.add(operation, **{field.name: getattr(counters, field.name) for field in fields(counters)})

    def clear(self) -> None:
        """Back to nothing; in a forked child, too, where a thread of the parent's may have held the lock."""
        self._lock, self._operations = threading.Lock(), {}

    def flat(self, prefix: str = "zipccl") -> dict[str, float]:
        """Every counter, and the ratio, as a float under `zipccl/<operation>/<counter>`: what trackers take."""
        values = {}
        for operation in self:
            counters = self[operation]
            for field in fields(counters):
                values[f"{prefix}/{operation}/{field.name}"] = float(getattr(counters, field.name))
            values[f"{prefix}/{operation}/ratio"] = counters.ratio
        return values

    def table(self) -> str:
        """A table in plain text, a row an operation; sizes in MB (1e6 bytes), times in seconds.

        `calls` has the native ones in it; `native MB` is theirs, `raw MB` and `wire MB` are the others'.
        """
        rows: list[tuple[str, ...]] = [
            ("operation", "calls", "native", "native MB", "raw MB", "wire MB", "ratio", "escapes")
        ]
        rows[0] += ("encode s", "decode s", "wait s")
        for operation in self:
            c = self[operation]
            calls = (str(operation), str(c.calls), str(c.native_calls), f"{c.native_nbytes / 1e6:.2f}")
            ratio = f"{c.ratio:.3f}" if c.wire_nbytes else "-"
            sizes = (f"{c.raw_nbytes / 1e6:.2f}", f"{c.wire_nbytes / 1e6:.2f}", ratio, str(c.escapes))
            rows.append((*calls, *sizes, f"{c.encode_s:.3f}", f"{c.decode_s:.3f}", f"{c.wait_s:.3f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *cells in rows:
            right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return "\n".join(lines)

    __str__ = table
