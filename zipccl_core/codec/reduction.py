"""Reductions with a fixed order of additions, so that their bits are the same on every run and every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from zipccl_core import kernels

if TYPE_CHECKING:
    from torch import Tensor

GLOO_SEGMENT_NBYTES = 1 << 20
"""gloo's largest segment in its ring all-reduce (gloo/allreduce.cc)."""


_empty = torch.empty  # bound now: `deepspeed.zero.Init` replaces it by one that makes fp32 tensors bf16

REDUCIBLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that are reduced here; others are reduced natively."""


class Reduction(NamedTuple):
    """How one tensor per rank becomes one.

    Attributes:
        order: `fp32`: in rank order, accumulated in fp32, rounded once. `gloo`: in the order of gloo's ring, rounded
            at every step, bit for bit what a native gloo all_reduce or reduce_scatter gives.
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
        """Reduces contiguous tensors, one a rank in rank order, into contiguous `out` of the same numel.

        `out` may be one of them.
        """
        add = _Adder(out.dtype, out.device, self.threads)
        flat, result = [part.reshape(-1) for part in parts], out.reshape(-1)
        if self.order == "fp32":
            add(flat, result, len(parts) if self.average else 1)
            return
        world_size = len(parts)
        chunk = gloo_chunk_numel(self.total, out.element_size(), world_size)
        partial = torch.empty_like(result)
        for owner in range(world_size):
            begin = max(owner * chunk - self.offset, 0)
            end = min((owner + 1) * chunk - self.offset, result.numel())
            if begin < end:
                # gloo's ring: ((x[owner-1] + x[owner-2]) + ...) + x[owner], ranks modulo the world size
                add([flat[owner - 1][begin:end], flat[owner - 2][begin:end]], partial[begin:end], 1)
                for step in range(3, world_size + 1):
                    add([partial[begin:end], flat[owner - step][begin:end]], partial[begin:end], 1)
        if self.average:
            partial.div_(world_size)
        result.copy_(partial)


def premultiplied(tensors: Sequence[Tensor], op: Any, in_place: bool = False) -> tuple[list[Tensor], Any]:
    """The tensors times the factor of a PREMUL_SUM, and SUM; other reductions as they are.

    As NCCL does it, with the factor rounded to the tensors' dtype. gloo has no PREMUL_SUM.

    Args:
        tensors: of floating-point numbers; others are left to the native operation, with its error.
        op: a `ReduceOp`.
        in_place: multiply the tensors themselves.
    """
    tensors = list(tensors)
    if not op == ReduceOp.PREMUL_SUM or not all(tensor.is_floating_point() for tensor in tensors):  # noqa: SIM201
        return tensors, op
    if isinstance(op.factor, float) and op.factor == 1:
        return tensors, ReduceOp.SUM
    with torch.no_grad():
        factors = [torch.as_tensor(op.factor, device=tensor.device).reshape(()).to(tensor.dtype) for tensor in tensors]
        pairs = zip(tensors, factors, strict=True)
        return [tensor.mul_(factor) if in_place else tensor * factor for tensor, factor in pairs], ReduceOp.SUM


class _Adder:
    """Adds flat tensors of one dtype in fp32 (fp64 for fp64), divides, and rounds once."""

    BLOCK = 1 << 17
    """Values at a time, so that the sums stay in a core's cache."""

    def __init__(self, dtype: torch.dtype, device: torch.device, threads: int) -> None:
        self._kernel = kernels.select(device) if dtype == torch.bfloat16 else None
        self._threads = threads
        if self._kernel is not None:
            self._total = _empty(self.BLOCK, dtype=torch.float32, device=device)

    def __call__(self, addends: Sequence[Tensor], out: Tensor, divisor: int) -> None:
        if self._kernel is None:
            wide = torch.promote_types(out.dtype, torch.float32)
            total = addends[0].to(wide)
            for addend in addends[1:]:
                total = total + addend
            out.copy_(total / divisor if divisor != 1 else total)
            return
        words, result = [addend.view(torch.int16) for addend in addends], out.view(torch.int16)
        for begin in range(0, out.numel(), self.BLOCK):
            end = min(begin + self.BLOCK, out.numel())
            total = self._total[: end - begin]
            for i, word in enumerate(words):
                self._kernel.accumulate(word[begin:end], total, i == 0, self._threads)
            self._kernel.round(total, divisor, result[begin:end], self._threads)


def gloo_chunk_numel(numel: int, itemsize: int, world_size: int) -> int:
    """Values in the part of a tensor that one rank of gloo's ring reduces last (gloo/allreduce.cc, algorithm RING)."""
    nbytes = numel * itemsize
    n_segments = max(-(-nbytes // GLOO_SEGMENT_NBYTES), 2 * world_size)
    n_segments = -(-n_segments // world_size) * world_size
    segment_numel = -(-nbytes // (n_segments * itemsize))
    return n_segments // world_size * segment_numel
