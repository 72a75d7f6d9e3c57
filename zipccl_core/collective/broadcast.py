"""Broadcast: the source's frames go down a binomial tree as they are; only the source encodes. Bits as natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zipccl_core.collective.base import DEPTH, Collective
from zipccl_core.collective.device.patterns import Spread
from zipccl_core.collective.wire import Arriving, chunk_tag
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.collective.wire import Wire


class TreeBroadcast(Collective):
    """log2(world size) steps; every rank passes a frame on before it decodes it.

    Args:
        source: the rank in the group whose values all get.
    """

    operation = Operation.BROADCAST

    def __init__(self, source: int) -> None:
        self.source = source

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One tensor: an input at the source, an output elsewhere."""
        (values,) = inputs or outputs
        parent, children = tree(wire.rank, self.source, wire.world_size)
        starts = range(0, values.numel(), plan.chunk_numel)
        parts = [values[first : first + plan.chunk_numel] for first in starts]

        def post(chunk: int) -> Arriving:
            return wire.expect(parts[chunk].numel(), values.dtype, parent, chunk_tag(wire.call, chunk))

        arriving = [post(chunk) for chunk in range(min(DEPTH, len(parts)))] if parent is not None else []
        for chunk, part in enumerate(parts):
            wire.settle(before_chunk=chunk - DEPTH + 1)
            tag = chunk_tag(wire.call, chunk)
            if parent is None:
                wire.send(*wire.encode(part), children, tag, chunk)
                continue
            frame, peer = arriving[chunk].wait()
            if chunk + DEPTH < len(parts):
                arriving.append(post(chunk + DEPTH))
            wire.send(frame, frame.header, children, tag, chunk)
            wire.decode(frame, part, peer)
        wire.settle()

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """One tensor, as in `run`. The tree is the backend's."""
        (values,) = inputs or outputs
        step = link.device.chunk_numel
        return [Spread(link, values[first : first + step], self.source) for first in range(0, values.numel(), step)]


def tree(rank: int, source: int, world_size: int) -> tuple[int | None, list[int]]:
    """Parent (None at the source) and children of a rank in the binomial tree, largest subtrees first."""
    position = (rank - source) % world_size
    lowest = position & -position if position else 1 << (world_size - 1).bit_length()
    parent = None if position == 0 else (position - lowest + source) % world_size
    children, step = [], lowest >> 1
    while step:
        if position + step < world_size:
            children.append((position + step + source) % world_size)
        step >>= 1
    return parent, children
