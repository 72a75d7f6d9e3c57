"""Wire: frames of one call in and out, over a transport, with their memory, tags, times and counts."""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from zipccl_core.codec.frame import HEADER_NBYTES, Frame, Header, align
from zipccl_core.collective.transport import Handle, Transport

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.base import Codec
    from zipccl_core.codec.reduction import Reduction
    from zipccl_core.observe.statistics import Statistics
    from zipccl_core.strategy.base import Operation

# Tags of messages. Users' own tags are small numbers; ours have bit 30 set, and bit 29 tells a dynamic part that is found through its
# header's sequence number (point-to-point) from the messages of collectives.
_OURS, _BY_SEQUENCE = 1 << 30, 1 << 29
_CALLS, _CHUNKS = 1 << 13, 1 << 15


def static_tag(call: int, chunk: int) -> int:
    """The tag of chunk number `chunk` (its header and static part) of call number `call` of a group."""
    return _OURS | (call % _CALLS) << 16 | (chunk % _CHUNKS) << 1


class Scratch:
    """Reusable byte buffers: fresh memory costs a page fault for every 4 KiB, as much time as encoding does. Thread-safe.

    Sizes are rounded up to powers of two, so that calls of similar size share buffers; what is free beyond `keep_nbytes` is given up.
    """

    def __init__(self, keep_nbytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._free_nbytes, self._keep_nbytes = 0, keep_nbytes

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of at least `nbytes`; its content is undefined."""
        size = max(4096, 1 << (nbytes - 1).bit_length())
        with self._lock:
            buffers = self._free.get(size)
            if buffers:
                self._free_nbytes -= size
                return buffers.pop()
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer for reuse."""
        size = buffer.numel()
        with self._lock:
            if self._free_nbytes + size <= self._keep_nbytes:
                self._free.setdefault(size, []).append(buffer)
                self._free_nbytes += size


class Wire:
    """The frames of one call. Counts and times go to the statistics of its operation when the call is `close`d."""

    def __init__(self, transport: Transport, scratch: Scratch, statistics: Statistics, operation: Operation, codec: Codec, call: int) -> None:
        self.transport, self.codec, self.call = transport, codec, call
        self.rank, self.world_size = transport.rank, transport.world_size
        self._scratch, self._statistics, self._operation = scratch, statistics, operation
        self._sends: deque[tuple[int, list[Handle], Tensor | None]] = deque()
        self._counts: dict[str, float] = {}

    def count(self, **increments: float) -> None:
        """Adds to this call's counters."""
        for name, increment in increments.items():
            self._counts[name] = self._counts.get(name, 0) + increment

    def encode(self, tensor: Tensor, sequence: int = 0) -> Frame:
        """Encodes contiguous values into a frame in scratch memory."""
        begin = perf_counter()
        nbytes = self.codec.layout(tensor.numel(), tensor.dtype).frame_nbytes
        frame = self.codec.write(tensor, self._scratch.take(nbytes), sequence)
        self.count(encode_s=perf_counter() - begin, frames=1)
        header = frame.header
        self.count(raw_frames=1) if header.raw else self.count(escapes=header.dynamic_nbytes)
        return frame

    def send(self, frame: Frame, peers: list[int], tag: int, dynamic_tag: int | None = None, chunk: int = 0, own: bool = True) -> None:
        """Puts a frame on its way to some peers: header and static part, then, if there is one, the dynamic part.

        Args:
            frame: encoded here, or received whole and passed on.
            peers: to whom.
            tag: of header and static part; the dynamic part has the next tag, or `dynamic_tag`.
            chunk: for `settle`.
            own: the frame's memory goes back to the scratch once it has been sent.
        """
        header, static_nbytes = frame.header, frame.layout.static_frame_nbytes
        handles = []
        for peer in peers:
            handles.append(self.transport.send(frame.buffer[:static_nbytes], peer, tag))
            if header.dynamic_nbytes:
                dynamic = frame.buffer[static_nbytes : header.frame_nbytes]
                handles.append(self.transport.send(dynamic, peer, tag + 1 if dynamic_tag is None else dynamic_tag))
        self._sends.append((chunk, handles, frame.buffer if own else None))
        body = header.static_nbytes + header.dynamic_nbytes
        self.count(
            raw_nbytes=len(peers) * frame.numel * frame.dtype.itemsize,
            wire_nbytes=len(peers) * header.frame_nbytes,
            padding_nbytes=len(peers) * (header.frame_nbytes - HEADER_NBYTES - body),
        )

    def expect(self, numel: int, dtype: torch.dtype, peer: int | None, tag: int, by_sequence: bool = False) -> Arriving:
        """Gets ready for a frame: its memory, and the receive of header and static part."""
        layout = self.codec.layout(numel, dtype)
        frame = Frame(self._scratch.take(layout.frame_nbytes), numel, dtype, layout)
        handle = self.transport.recv(frame.buffer[: layout.static_frame_nbytes], peer, tag)
        return Arriving(self, frame, handle, peer, None if by_sequence else tag + 1)

    def decode(self, frame: Frame, out: Tensor) -> None:
        """Decodes a frame that has arrived into contiguous values."""
        begin = perf_counter()
        self.codec.read(frame, out)
        self.count(decode_s=perf_counter() - begin)

    def decode_reduce(self, frames: list[Frame | Tensor], out: Tensor, reduction: Reduction) -> None:
        """Decodes one frame a rank and reduces them into contiguous values."""
        begin = perf_counter()
        self.codec.decode_reduce(frames, out, reduction)
        self.count(decode_s=perf_counter() - begin)

    def release(self, frame: Frame) -> None:
        """Gives a received frame's memory back."""
        self._scratch.give(frame.buffer)

    def wait(self, handle: Handle) -> None:
        """Waits for a message and counts the time."""
        begin = perf_counter()
        handle.wait()
        self.count(wait_s=perf_counter() - begin)

    def settle(self, before_chunk: int | None = None) -> None:
        """Waits for sends, of all chunks or of those below a number, and takes their memory back."""
        while self._sends and (before_chunk is None or self._sends[0][0] < before_chunk):
            _, handles, buffer = self._sends.popleft()
            for handle in handles:
                self.wait(handle)
            if buffer is not None:
                self._scratch.give(buffer)

    def is_settled(self) -> bool:
        """Whether all sends have left."""
        return all(handle.is_completed() for _, handles, _ in self._sends for handle in handles)

    def close(self) -> None:
        """Hands the counts over."""
        self._statistics.add(self._operation, **self._counts)
        self._counts = {}


class Arriving:
    """A frame whose header and static part are on their way to this rank."""

    def __init__(self, wire: Wire, frame: Frame, handle: Handle, peer: int | None, dynamic_tag: int | None) -> None:
        self.frame = frame
        self.peer = peer
        self._wire, self._handle, self._dynamic_tag = wire, handle, dynamic_tag
        self._dynamic: Handle | None = None

    def is_completed(self) -> bool:
        """Whether header and static part have arrived."""
        return self._handle.is_completed()

    def static_arrived(self) -> Header:
        """Waits for header and static part, checks their sizes, and posts the receive of the dynamic part: nobody exchanges sizes.

        Raises:
            WireFormatError: the header is not that of the expected frame.
        """
        self._wire.wait(self._handle)
        if self.peer is None:
            self.peer = self._handle.source()
        header, layout = self.frame.header, self.frame.layout
        self.frame.check(header, self._wire.codec.id, self._wire.codec.block_size)
        if header.dynamic_nbytes:
            tag = _OURS | _BY_SEQUENCE | header.sequence if self._dynamic_tag is None else self._dynamic_tag
            begin = layout.static_frame_nbytes
            self._dynamic = self._wire.transport.recv(self.frame.buffer[begin : begin + align(header.dynamic_nbytes)], self.peer, tag)
        return header

    def arrived(self) -> Frame:
        """Waits for the rest; `static_arrived` comes first."""
        if self._dynamic is not None:
            self._wire.wait(self._dynamic)
        return self.frame


def sequence_tag(sequence: int) -> int:
    """The tag of a dynamic part whose header carries this sequence number (1 to 2^29 - 1)."""
    return _OURS | _BY_SEQUENCE | sequence
