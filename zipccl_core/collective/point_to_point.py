"""Send and receive: self-describing frames under the user's own tag. Bits as natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zipccl_core.collective.wire import Arriving, Wire, sequence_tag

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.strategy.base import Plan

SEQUENCES = (1 << 29) - 1


class Send:
    """A tensor on its way to one peer: everything leaves at once.

    Static parts travel under the user's tag, so that tags, their order, and receives from any source mean what they mean natively. A dynamic part
    travels under a tag made from a number in its header, so that two messages under one tag cannot be mixed up.
    """

    def __init__(self, values: Tensor, peer: int, tag: int, wire: Wire, plan: Plan, first_sequence: int) -> None:
        self._wire = wire
        for chunk, first in enumerate(range(0, values.numel(), plan.chunk_numel)):
            sequence = 1 + (first_sequence + chunk) % SEQUENCES
            frame = wire.encode(values[first : first + plan.chunk_numel], sequence)
            wire.send(frame, [peer], tag, sequence_tag(sequence))
        wire.close()

    def finish(self) -> None:
        """Waits until the message has left."""
        self._wire.settle()
        self._wire.close()

    def is_completed(self) -> bool:
        """Whether the message has left."""
        return self._wire.is_settled()


class Recv:
    """A tensor on its way from one peer, or from any (`peer` None): receives of all static parts are posted at once, so that receives match sends in order."""

    def __init__(self, values: Tensor, peer: int | None, tag: int, wire: Wire, plan: Plan) -> None:
        self._wire, self._tag = wire, tag
        starts = range(0, values.numel(), plan.chunk_numel)
        self._parts = [values[first : first + plan.chunk_numel] for first in starts]
        self._arriving: list[Arriving] = []
        self.source = peer
        if peer is not None:
            self._post(self._parts)
        else:  # the first frame tells whose message this is; its other frames are taken from that rank only
            self._post(self._parts[:1])

    def _post(self, parts: list[Tensor]) -> None:
        for part in parts:
            self._arriving.append(self._wire.expect(part.numel(), part.dtype, self.source, self._tag, by_sequence=True))

    def finish(self) -> None:
        """Receives the rest and decodes."""
        for chunk, part in enumerate(self._parts):
            arriving = self._arriving[chunk]
            arriving.static_arrived()
            if self.source is None:
                self.source = arriving.peer
                self._post(self._parts[1:])
            frame = arriving.arrived()
            self._wire.decode(frame, part)
            self._wire.release(frame)
        self._wire.close()

    def is_completed(self) -> bool:
        """Whether `finish` would not wait for the peer."""
        return len(self._arriving) == len(self._parts) and all(arriving.is_completed() for arriving in self._arriving)
