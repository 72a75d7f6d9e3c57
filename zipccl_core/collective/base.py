"""The interface `Collective`, and the exchange of chunked frames that most of them are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from zipccl_core.collective.wire import Arriving, Wire, chunk_tag

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zipccl_core.codec.frame import Frame
    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

DEPTH = 3
"""Chunks on their way at a time: one being encoded, one on the wire, one being decoded."""


class Collective(ABC):
    """One way to carry out one operation with frames.

    `run` returns when the output is there and the input may be changed. It may wait for peers, but for nothing that a
    peer does only in a later call; an asynchronous call runs it on the communicator's worker (docs/adr/001).
    """

    operation: ClassVar[Operation]
    flattens: ClassVar[bool] = False
    """On a device, whether several tensors are handed over as one flat one."""

    @abstractmethod
    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """Carries the operation out.

        Args:
            outputs: contiguous, flat.
            inputs: contiguous, flat, not overlapping outputs unless the operation says so.
            wire: where frames go in and out.
            plan: chunk size and order of reduction; the codec is the wire's.
        """

    @abstractmethod
    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """The same on a device: exchanges that are carried out one after another. Takes what `run` takes."""


def exchange(
    wire: Wire,
    chunk_numel: int,
    outgoing: Sequence[tuple[list[int], Tensor]],
    incoming: Mapping[int, int],
    dtype: torch.dtype,
    deliver: Callable[[int, dict[int, Frame]], None],
) -> None:
    """Sends values to peers and receives theirs, in chunks: while one is encoded, others are on the wire, and one is
    decoded.

    1. Receives for the frames of the first `DEPTH` chunks are posted before anything is sent.
    2. Chunk after chunk is encoded and sent.
    3. `DEPTH - 1` chunks behind, frames are awaited and the chunk delivered.

    A chunk's number of frames follows from the numel between two ranks, which both know; nothing else is agreed upon.

    Args:
        wire: of this call.
        chunk_numel: values in a frame.
        outgoing: who gets which flat values; what several peers get is encoded once.
        incoming: how many values come from which peer.
        dtype: of all values.
        deliver: called with a chunk's first value's index and its frames by peer, chunks in order. The frames' memory
            is reused afterwards.
    """

    def chunks(numel: int) -> int:
        return -(-numel // chunk_numel)

    def post(chunk: int) -> None:
        first = chunk * chunk_numel
        posted[chunk] = {
            peer: wire.expect(min(chunk_numel, numel - first), dtype, peer, chunk_tag(wire.call, chunk))
            for peer, numel in incoming.items()
            if first < numel
        }

    def finish(chunk: int) -> None:
        frames = {peer: arriving.wait()[0] for peer, arriving in posted.pop(chunk).items()}
        if frames:
            deliver(chunk * chunk_numel, frames)
        for frame in frames.values():
            wire.release(frame)

    n_chunks = max(
        [chunks(values.numel()) for _, values in outgoing] + [chunks(numel) for numel in incoming.values()], default=0
    )
    posted: dict[int, dict[int, Arriving]] = {}
    for chunk in range(min(DEPTH, n_chunks)):
        post(chunk)
    for chunk in range(n_chunks):
        wire.settle(before_chunk=chunk - DEPTH + 1)
        for peers, values in outgoing:
            part = values[chunk * chunk_numel : (chunk + 1) * chunk_numel]
            if part.numel() and peers:
                wire.send(*wire.encode(part), peers, chunk_tag(wire.call, chunk), chunk)
        if chunk >= DEPTH - 1:
            finish(chunk - DEPTH + 1)
            if chunk + 1 < n_chunks:
                post(chunk + 1)
    for chunk in sorted(posted):
        finish(chunk)
    wire.settle()


def others(wire: Wire) -> list[int]:
    """All ranks but this one, beginning with the next, so that not everybody sends to the same rank first."""
    return [(wire.rank + step) % wire.world_size for step in range(1, wire.world_size)]
