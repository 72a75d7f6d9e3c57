"""All-gather: every rank's frames go to every other rank. Bits as natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zipccl_core.collective.base import Collective, exchange, others
from zipccl_core.collective.device.patterns import Gather
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.frame import Frame
    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.collective.wire import Wire


class AllGather(Collective):
    """Encodes once, sends to all. The input may be this rank's own output."""

    operation = Operation.ALL_GATHER

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One input; one output a rank, of as many values as that rank's input, which ranks may have differently."""
        (values,) = inputs
        own = outputs[wire.rank]
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)
        wire.count(self_nbytes=values.numel() * values.element_size())

        def deliver(first: int, frames: dict[int, Frame]) -> None:
            for peer, frame in frames.items():
                wire.decode(frame, outputs[peer][first : first + frame.numel], peer)

        peers = others(wire)
        incoming = {peer: outputs[peer].numel() for peer in peers}
        exchange(wire, plan.chunk_numel, [(peers, values)], incoming, values.dtype, deliver)

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """As in `run`."""
        (values,), rank, step = inputs, link.mover.rank, link.device.chunk_numel
        most = max(output.numel() for output in outputs)

        def part(first: int) -> Exchange:
            parts = {peer: output[first : first + step] for peer, output in enumerate(outputs)}
            own, numels = values[first : first + step], [part.numel() for part in parts.values()]
            return Gather(link, own, parts, (parts.pop(rank), own), numels)

        return [part(first) for first in range(0, most, step)]
