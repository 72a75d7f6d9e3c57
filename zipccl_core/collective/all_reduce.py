"""All-reduce: reduce-scatter, then all-gather, both of frames. Equal bits on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from zipccl_core.codec.reduction import Reduction
from zipccl_core.collective.all_gather import AllGather
from zipccl_core.collective.base import Collective
from zipccl_core.collective.reduce_scatter import AllToAllReduceScatter
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.device.exchange import Exchange, Link
    from zipccl_core.collective.wire import Wire

BLOCK = 1024
"""Parts are whole multiples of this many values, so that no part but the last ends inside a codec's block."""


class AllReduce(Collective):
    """Each rank reduces one part of the tensor and gathers the others'. The output may be the input.

    Args:
        order: `fp32` or `gloo`.
        average: divide by the number of ranks.
        threads: for the reduction.
        gather: of the reduced parts.
    """

    operation = Operation.ALL_REDUCE

    def __init__(self, order: str, average: bool, threads: int, gather: AllGather | None = None) -> None:
        self.order, self.average, self.threads = order, average, threads
        self.gather = gather or AllGather()

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One output and one input of the same numel."""
        (output,), (values,) = outputs, inputs
        parts, results, reduction = self._cut(values, output, wire.rank, wire.world_size)
        AllToAllReduceScatter(reduction).run([results[wire.rank]], parts, wire, plan)
        wire.call += 1
        self.gather.run(results, [results[wire.rank]], wire, plan)

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """One output and one input of the same numel."""
        (output,), (values,), mover = outputs, inputs, link.mover
        parts, results, reduction = self._cut(values, output, mover.rank, mover.world_size)
        return [
            *AllToAllReduceScatter(reduction).exchanges([results[mover.rank]], parts, link, plan),
            *self.gather.exchanges(results, [results[mover.rank]], link, plan),
        ]

    def _cut(
        self, values: Tensor, output: Tensor, rank: int, world_size: int
    ) -> tuple[list[Tensor], list[Tensor], Reduction]:
        numel = values.numel()
        part_numel = -(-numel // (world_size * BLOCK)) * BLOCK
        bounds = [min(rank * part_numel, numel) for rank in range(world_size + 1)]
        parts = [values[begin:end] for begin, end in pairwise(bounds)]
        results = [output[begin:end] for begin, end in pairwise(bounds)]
        return parts, results, Reduction(self.order, self.average, numel, bounds[rank], self.threads)
