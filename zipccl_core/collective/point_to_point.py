"""Send and receive: self-describing frames under the user's own tag. Bits as natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.wire import Arriving, Wire
    from zipccl_core.strategy.base import Plan


class Send:
    """A tensor on its way to one peer: all of its frames leave at once, under the user's tag.

    So tags, the order of messages under one tag, and receives from any source mean what they mean natively.
    """

    def __init__(self, values: Tensor, peer: int, tag: int, wire: Wire, plan: Plan) -> None:
        self._wire = wire
        for first in range(0, values.numel(), plan.chunk_numel):
            wire.send(*wire.encode(values[first : first + plan.chunk_numel]), [peer], tag)
        wire.close()

    def finish(self) -> None:
        """Waits until the message has left."""
        self._wire.settle()
        self._wire.close()


class Recv:
    """A tensor on its way from one peer, or from any (`peer` None): all receives are posted at once, so that they match
    sends in order."""

    def __init__(self, values: Tensor, peer: int | None, tag: int, wire: Wire, plan: Plan) -> None:
        self._wire, self._tag = wire, tag
        starts = range(0, values.numel(), plan.chunk_numel)
        self._parts = [values[first : first + plan.chunk_numel] for first in starts]
        self._arriving: list[Arriving] = []
        self.source = peer
        # from any source, the first frame tells whose message this is; the others are taken from that rank only
        self._post(self._parts if peer is not None else self._parts[:1])

    def _post(self, parts: list[Tensor]) -> None:
        for part in parts:
            self._arriving.append(self._wire.expect(part.numel(), part.dtype, self.source, self._tag))

    def finish(self) -> None:
        """Receives and decodes."""
        for chunk, part in enumerate(self._parts):
            frame, peer = self._arriving[chunk].wait()
            if self.source is None:
                self.source = peer
                self._post(self._parts[1:])
            self._wire.decode(frame, part, peer)
            self._wire.release(frame)
        self._wire.close()
