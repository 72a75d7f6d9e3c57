"""All-to-all, equal and uneven: frames go to the rank they are for. Bits as natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zipccl_core.collective.base import Collective, exchange, others
from zipccl_core.collective.device.patterns import Scatter
from zipccl_core.strategy.base import Operation, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.frame import Frame
    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.collective.wire import Wire


class AllToAll(Collective):
    """A frame leaves as soon as it is encoded; what it may need at most is known from the splits, so no sizes are
    exchanged. Empty splits send nothing."""

    operation = Operation.ALL_TO_ALL

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One input and one output a rank; output `r` here has as many values as input `rank` there."""
        outputs[wire.rank].copy_(inputs[wire.rank])
        wire.count(self_nbytes=inputs[wire.rank].numel() * inputs[wire.rank].element_size())

        def deliver(first: int, frames: dict[int, Frame]) -> None:
            for peer, frame in frames.items():
                wire.decode(frame, outputs[peer][first : first + frame.numel], peer)

        peers = others(wire)
        outgoing = [([peer], inputs[peer]) for peer in peers]
        incoming = {peer: outputs[peer].numel() for peer in peers}
        exchange(wire, plan.chunk_numel, outgoing, incoming, inputs[0].dtype, deliver)

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """In one piece: ranks know of no more than their own splits, so they could not agree on a number of pieces."""
        rank = link.mover.rank
        values = {peer: part for peer, part in enumerate(inputs) if peer != rank and part.numel()}
        outs = {peer: part for peer, part in enumerate(outputs) if peer != rank and part.numel()}
        return [Scatter(link, values, outs, own=(outputs[rank], inputs[rank]))]
