"""Send and receive: one self-describing frame a message, under the user's own tag. Bits as natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.wire import Wire


class Send:
    """A tensor on its way to one peer, as one message under the user's tag.

    So tags, the order of messages under one tag, and receives from any source mean what they mean natively. With more
    than one frame they would not: a second receive from any source could take the second frame of the first message.
    """

    def __init__(self, values: Tensor, peer: int, tag: int, wire: Wire) -> None:
        self._wire = wire
        wire.send(*wire.encode(values), [peer], tag)
        wire.close()

    def finish(self) -> None:
        """Waits until the message has left."""
        self._wire.settle()
        self._wire.close()


class Recv:
    """A tensor on its way from one peer, or from any (`peer` None); its receive is posted at once."""

    def __init__(self, values: Tensor, peer: int | None, tag: int, wire: Wire) -> None:
        self._wire, self._values = wire, values
        self._arriving = wire.expect(values.numel(), values.dtype, peer, tag)

    def finish(self) -> int:
        """Receives and decodes; returns the rank that it came from."""
        frame, source = self._arriving.wait()
        self._wire.decode(frame, self._values, source)
        self._wire.release(frame)
        self._wire.close()
        return source
