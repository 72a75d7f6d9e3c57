"""Reduce-scatter: an all-to-all of frames, then decode and reduce in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zipccl_core.codec.reduction import Reduction
from zipccl_core.collective.base import Collective, exchange, others
from zipccl_core.collective.device.exchange import Reduce
from zipccl_core.collective.device.patterns import Scatter
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.frame import Frame
    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.collective.wire import Wire


class AllToAllReduceScatter(Collective):
    """Every rank receives the frames of its own part from all others and reduces them in rank order: the same bits on
    every run.

    The output may be this rank's own input: a chunk of it is written after that chunk of the input was read.

    Args:
        reduction: its `total` and `offset` are those of this rank's part.
    """

    operation = Operation.REDUCE_SCATTER

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One input a rank; one output, of as many values as this rank's own input."""
        (output,) = outputs
        own = inputs[wire.rank]
        wire.count(self_nbytes=own.numel() * own.element_size())

        def deliver(first: int, frames: dict[int, Frame]) -> None:
            last = min(first + plan.chunk_numel, own.numel())
            parts = [own[first:last] if rank == wire.rank else frames[rank] for rank in range(wire.world_size)]
            reduction = self.reduction._replace(offset=self.reduction.offset + first)
            wire.decode_reduce(parts, output[first:last], reduction)

        peers = others(wire)
        outgoing = [([peer], inputs[peer]) for peer in peers]
        incoming = {peer: own.numel() for peer in peers}
        exchange(wire, plan.chunk_numel, outgoing, incoming, own.dtype, deliver)

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """All inputs are as large as the output, or, of an all-reduce, about as large."""
        (output,), rank = outputs, link.mover.rank
        step, most = link.device.chunk_numel, max(values.numel() for values in inputs)

        def part(first: int) -> Exchange:
            own, out = inputs[rank][first : first + step], output[first : first + step]
            values = {
                peer: values[first : first + step] for peer, values in enumerate(inputs) if first < values.numel()
            }
            values.pop(rank, None)
            outs = dict.fromkeys((peer for peer in range(len(inputs)) if peer != rank and out.numel()), out)
            reduction = self.reduction._replace(offset=self.reduction.offset + first)
            return Scatter(link, values, outs, reduce=Reduce(own, rank, out, reduction) if out.numel() else None)

        return [part(first) for first in range(0, most, step)]
