"""All-to-all, equal and uneven: frames go to the rank they are for. Bits as natively."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from zipccl_core.collective.base import Collective, exchange, others
from zipccl_core.collective.device.patterns import Scatter
from zipccl_core.collective.lanes import run_lanes
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.frame import Frame
    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.collective.wire import Wire


class AllToAll(Collective):
    """A frame leaves as soon as it is encoded; what it may need at most is known from the splits, so no sizes are
    exchanged. Empty splits send nothing. Every peer has a lane of its own: blocks of early ranks are exchanged and
    decoded while late ones are still computing.
    """

    operation = Operation.ALL_TO_ALL

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One input and one output a rank; output `r` here has as many values as input `rank` there."""
        outputs[wire.rank].copy_(inputs[wire.rank])
        wire.count(self_nbytes=inputs[wire.rank].numel() * inputs[wire.rank].element_size())

        run_lanes([partial(self._exchange, peer, outputs[peer], inputs[peer], wire, plan) for peer in others(wire)])

    def _exchange(self, peer: int, output: Tensor, values: Tensor, call: Wire, plan: Plan) -> None:
        """All that goes to one peer and comes from it."""
        with closing(call.lane()) as wire:

            def deliver(first: int, frames: dict[int, Frame]) -> None:
                wire.decode(frames[peer], output[first : first + frames[peer].numel], peer)

            exchange(wire, plan.chunk_numel, [([peer], values)], {peer: output.numel()}, values.dtype, deliver)

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """In one piece: ranks know of no more than their own splits, so they could not agree on a number of pieces."""
        rank = link.mover.rank
        values = {peer: part for peer, part in enumerate(inputs) if peer != rank and part.numel()}
        outs = {peer: part for peer, part in enumerate(outputs) if peer != rank and part.numel()}
        return [Scatter(link, values, outs, own=(outputs[rank], inputs[rank]))]
