"""Jobs of a launch of the CUDA kernels, as cuda/exponent.cuh has them, and what their status says."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zipccl_core.kernels import OVERFLOW, Split, static_nbytes

if TYPE_CHECKING:
    from torch import Tensor

MAX_JOBS = 64
"""Tensors in a launch; for more there are several launches."""
HEADER_NBYTES = 128
_JOB = struct.Struct("=QQQQQII")  # values, frame, dynamic, numel, dynamic_room, first, reserved
BATCH_NBYTES = _JOB.size * MAX_JOBS + 8
_COUNT = struct.Struct("=II")

FAULTS = {
    1: "the header is not that of a frame of this codec and numel",
    2: "the dynamic part has more bytes than such a frame can have",
    4: "offsets of escapes are not in order",
    8: "a block has an unknown mode",
    16: "a block has a window base that is not allowed",
    32: "the number of escapes does not match the planes",
    64: "fillers of the last block are not fillers",
    OVERFLOW: "not all of the dynamic part is there",
}


def explain(status: int) -> str:
    """What a status says, in words."""
    named = [text for bit, text in FAULTS.items() if status & bit]
    unknown = status & ~sum(FAULTS)
    return "; ".join(named + ([f"unknown status {unknown:#x}"] if unknown else [])) or "nothing is wrong"


class Job(NamedTuple):
    """Addresses and sizes of one tensor and its frame."""

    values: int
    frame: int
    dynamic: int
    numel: int
    dynamic_room: int


class Batch(NamedTuple):
    """Jobs of one launch, packed as its first argument.

    Attributes:
        data: the argument.
        begin: the first job's place among all.
        n_jobs: how many.
        grid: thread blocks of all of them together.
        largest: thread blocks of the largest one.
    """

    data: bytes
    begin: int
    n_jobs: int
    grid: int
    largest: int


def batches_of(jobs: Sequence[Job], values_per_thread_block: int) -> Iterator[Batch]:
    """Jobs as a launch takes them."""
    if not jobs:
        raise ValueError("no tensors")
    for begin in range(0, len(jobs), MAX_JOBS):
        part = jobs[begin : begin + MAX_JOBS]
        data = bytearray(BATCH_NBYTES)
        first = largest = 0
        for i, job in enumerate(part):
            _JOB.pack_into(data, _JOB.size * i, *job, first, 0)
            n = max(1, -(-job.numel // values_per_thread_block))
            first, largest = first + n, max(largest, n)
        _COUNT.pack_into(data, _JOB.size * MAX_JOBS, len(part), 0)
        yield Batch(bytes(data), begin, len(part), first, largest)


def decode_job(frame: Split, numel: int, values: int) -> Job:
    """A frame that is read."""
    return Job(values, frame.static.data_ptr(), frame.dynamic.data_ptr(), numel, frame.dynamic.numel())


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 128."""
    return -(-nbytes // 128) * 128


@functools.lru_cache(maxsize=1024)
def static_frame_nbytes(numel: int) -> int:
    """Header and static part, to where the dynamic part begins."""
    if numel >= 1 << 32:
        raise ValueError(f"{numel} values in one frame; the format allows fewer than 2^32")
    static, raw = static_nbytes(numel), 2 * numel
    return HEADER_NBYTES + (align(raw) if static >= align(raw) else align(static))


def require(values: Tensor | None, frame: Tensor | None, nbytes: int) -> None:
    """Kernels write where they are told: better an exception here than somebody else's memory."""
    if values is not None and not (values.is_contiguous() and values.element_size() == 2):
        raise ValueError(f"values must be 16-bit and contiguous, not {values.dtype} with strides {values.stride()}")
    if frame is None:
        return
    if frame.dtype != torch.uint8 or not frame.is_contiguous() or frame.data_ptr() % 8:
        raise ValueError(f"a frame must be contiguous uint8 and begin at a multiple of 8, not {frame.dtype}")
    if frame.numel() < nbytes:
        raise ValueError(f"a frame has {frame.numel()} bytes of memory, it needs {nbytes}")
