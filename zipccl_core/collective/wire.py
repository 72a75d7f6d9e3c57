"""Wire: frames of one call in and out, over a transport, with their memory, tags, times and counts."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from zipccl_core.codec.frame import HEADER_NBYTES, Frame, Header
from zipccl_core.collective.memory import SCRATCH
from zipccl_core.collective.transport import COLLECTIVE_TAG, Handle, Transport
from zipccl_core.errors import WireFormatError

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.base import Codec
    from zipccl_core.codec.reduction import Reduction
    from zipccl_core.observe.statistics import Statistics
    from zipccl_core.strategy.operation import Operation

_CALLS, _CHUNKS = 1 << 12, 1 << 15


def chunk_tag(call: int, chunk: int) -> int:
    """The tag of chunk number `chunk` of call number `call` of a group."""
    return COLLECTIVE_TAG | (call % _CALLS) << 15 | chunk % _CHUNKS


class Wire:
    """The frames of one call. Counts and times go to the statistics of its operation when the call is `close`d.

    A frame is one message: the receiver posts as much memory as the layout allows, which follows from numel alone,
    and the sender sends what the frame really has. So nobody exchanges sizes (docs/adr/002).
    """

    def __init__(
        self, transport: Transport, statistics: Statistics, operation: Operation, codec: Codec, call: int = 0
    ) -> None:
        self.transport, self.codec, self.call = transport, codec, call
        self.rank, self.world_size = transport.rank, transport.world_size
        self._statistics, self._operation = statistics, operation
        self._sends: deque[tuple[int, list[Handle], Tensor]] = deque()
        self._counts: dict[str, float] = {}

    def lane(self, codec: Codec | None = None) -> Wire:
        """Another wire of the same call, for a thread of its own, or frames of another codec."""
        return Wire(self.transport, self._statistics, self._operation, codec or self.codec, self.call)

    def count(self, **increments: float) -> None:
        """Adds to this call's counters."""
        for name, increment in increments.items():
            self._counts[name] = self._counts.get(name, 0) + increment

    def encode(self, tensor: Tensor) -> tuple[Frame, Header]:
        """Encodes contiguous values into a frame in scratch memory."""
        begin = perf_counter()
        nbytes = self.codec.layout(tensor.numel(), tensor.dtype).frame_nbytes
        frame = self.codec.write(tensor, SCRATCH.take(nbytes))
        self.count(encode_s=perf_counter() - begin)
        header = frame.header
        self.count(frames=1, raw_frames=header.raw, escapes=0 if header.raw else header.dynamic_nbytes)
        return frame, header

    def send(self, frame: Frame, header: Header, peers: list[int], tag: int, chunk: int = 0) -> None:
        """Puts a frame on its way to some peers. Its memory goes back to the scratch when it has been sent.

        Args:
            frame: encoded here, or received and passed on.
            header: of the frame.
            peers: to whom.
            tag: of the message.
            chunk: for `settle`.
        """
        nbytes = header.frame_nbytes
        message = frame.buffer[:nbytes]
        self._sends.append((chunk, [self.transport.send(message, peer, tag) for peer in peers], frame.buffer))
        padding = 0 if header.raw else nbytes - HEADER_NBYTES - header.static_nbytes - header.dynamic_nbytes
        n_peers, raw_nbytes = len(peers), frame.numel * frame.dtype.itemsize
        self.count(raw_nbytes=n_peers * raw_nbytes, wire_nbytes=n_peers * nbytes, padding_nbytes=n_peers * padding)

    def expect(self, numel: int, dtype: torch.dtype, peer: int | None, tag: int) -> Arriving:
        """Gets ready for a frame: posts its receive, from any rank where `peer` is None."""
        layout = self.codec.layout(numel, dtype)
        frame = Frame(SCRATCH.take(layout.frame_nbytes), numel, dtype, layout)
        return Arriving(self, frame, self.transport.recv(frame.buffer[: layout.frame_nbytes], peer, tag), peer)

    def decode(self, frame: Frame, out: Tensor, peer: int) -> Header:
        """Decodes a frame that has arrived from a peer into contiguous values.

        Raises:
            WireFormatError: it is not the frame that was expected; the message names the peer.
        """
        begin = perf_counter()
        try:
            header = self.codec.read(frame, out)
        except WireFormatError as error:
            raise WireFormatError(f"from rank {peer}: {error}") from error
        self.count(decode_s=perf_counter() - begin)
        return header

    def decode_reduce(self, frames: list[Frame | Tensor], out: Tensor, reduction: Reduction) -> None:
        """Decodes one frame a rank and reduces them into contiguous values."""
        begin = perf_counter()
        self.codec.decode_reduce(frames, out, reduction)
        self.count(decode_s=perf_counter() - begin)

    def release(self, frame: Frame) -> None:
        """Gives a received frame's memory back."""
        SCRATCH.give(frame.buffer)

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
            SCRATCH.give(buffer)

    def close(self) -> None:
        """Hands the counts over."""
        self._statistics.add(self._operation, **self._counts)
        self._counts = {}


class Arriving:
    """A frame on its way to this rank."""

    def __init__(self, wire: Wire, frame: Frame, handle: Handle, peer: int | None) -> None:
        self._wire, self._frame, self._handle = wire, frame, handle
        self._peer = peer

    def wait(self) -> tuple[Frame, int]:
        """Waits for the frame; returns it and the rank that it came from."""
        self._wire.wait(self._handle)
        return self._frame, self._handle.source() if self._peer is None else self._peer
