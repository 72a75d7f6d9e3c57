"""Reductions with a fixed order of additions, so that their bits are the same on every run and every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zipccl_core import kernels

if TYPE_CHECKING:
    from torch import Tensor

GLOO_SEGMENT_NBYTES = 1 << 20
"""gloo's largest segment in its ring all-reduce (gloo/allreduce.cc)."""


REDUCIBLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that are reduced here; others are reduced natively."""


class Reduction(NamedTuple):
    """How one tensor per rank becomes one.

    Attributes:
        order: `fp32`: in rank order, accumulated in fp32, rounded once. `gloo`: in the order of gloo's ring, rounded at every step, bit for bit what a native
            gloo all_reduce or reduce_scatter gives.
        average: divide by the number of ranks.
        total: numel of the whole tensor that is reduced over all ranks; gloo's order depends on it.
        offset: where in it the reduced part begins.
        threads: for the fp32 order's native kernels.
    """

    order: str
    average: bool
    total: int
    offset: int
    threads: int = 1

    def reduce(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduces contiguous tensors, one a rank in rank order, into contiguous `out` of the same numel. `out` may be one of them."""
        if self.order == "gloo":
            self._gloo(parts, out)
        else:
            self._fp32(parts, out)

    def _fp32(self, parts: Sequence[Tensor], out: Tensor) -> None:
        if out.dtype != torch.bfloat16:
            sums = parts[0].reshape(-1).to(torch.promote_types(out.dtype, torch.float32))
            for part in parts[1:]:
                sums = sums + part.reshape(-1)
            out.reshape(-1).copy_(sums / len(parts) if self.average else sums)
            return
        kernel = kernels.select(out.device)
        total = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        for rank, part in enumerate(parts):
            kernel.accumulate(part.reshape(-1).view(torch.int16), total, rank == 0, self.threads)
        kernel.round(total, len(parts) if self.average else 1, out.reshape(-1).view(torch.int16), self.threads)

    def _gloo(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Chunk `c` of gloo's ring is `((x[c-1] + x[c-2]) + ...) + x[c]`, ranks modulo the world size."""
        world_size = len(parts)
        flat = [part.reshape(-1) for part in parts]
        result = torch.empty_like(flat[0])
        chunk = gloo_chunk_numel(self.total, out.element_size(), world_size)
        for owner in range(world_size):
            begin = max(owner * chunk - self.offset, 0)
            end = min((owner + 1) * chunk - self.offset, out.numel())
            if begin >= end:
                continue
            partial = flat[(owner - 1) % world_size][begin:end]
            for step in range(2, world_size + 1):
                partial = _add_like_gloo(flat[(owner - step) % world_size][begin:end], partial)
            result[begin:end] = partial
        if self.average:
            result.div_(world_size)
        out.reshape(-1).copy_(result)


def gloo_chunk_numel(numel: int, itemsize: int, world_size: int) -> int:
    """Values in the part of a tensor that one rank of gloo's ring reduces last (gloo/allreduce.cc, algorithm RING)."""
    nbytes = numel * itemsize
    n_segments = max(-(-nbytes // GLOO_SEGMENT_NBYTES), 2 * world_size)
    n_segments = -(-n_segments // world_size) * world_size
    segment_nbytes = -(-(-(-nbytes // n_segments)) // itemsize) * itemsize
    return n_segments // world_size * segment_nbytes // itemsize


def _add_like_gloo(a: Tensor, b: Tensor) -> Tensor:
    """A sum in the tensors' own dtype. gloo adds scalars, whose NaN is 0x7FC0 in bf16; torch's vectorised sum gives others."""
    result = a + b
    if result.dtype == torch.bfloat16:
        result.view(torch.int16).masked_fill_(result.isnan(), 0x7FC0)
    return result
