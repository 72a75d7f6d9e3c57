"""Tensors as flat memory: parts, sizes, overlaps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


empty = torch.empty
"""Bound when zipccl is imported: `deepspeed.zero.Init` replaces torch.empty by one that changes dtype and device."""


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Parts of a flat tensor, one after another."""
    parts, begin = [], 0
    for size in sizes:
        parts.append(flat[begin : begin + size])
        begin += size
    return parts


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is memory with strides, and not sparse, or a subclass that stands for something else."""
    dispatch = type(tensor).__torch_dispatch__
    return tensor.layout == torch.strided and dispatch in (torch.Tensor.__torch_dispatch__, _NO_DISPATCH)


def empty_flat(tensor: Tensor) -> Tensor:
    """New flat memory for the values of a tensor."""
    return empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


def unversioned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory as tensors whose changes autograd does not count.

    Native collectives write by pointer, when they like. What remembers the count of an output that is not there yet
    (selective checkpointing does, of functional collectives) would take a counted write for a change by the program.
    """
    return [tensor.data for tensor in tensors]


def flat_copy(tensors: Sequence[Tensor], steps: list[Callable[[], None]]) -> Tensor:
    """New flat memory for the values of some tensors, one after another, and a step that copies them there."""
    numel = sum(tensor.numel() for tensor in tensors)
    flat = empty(numel, dtype=tensors[0].dtype, device=tensors[0].device)

    def copy() -> None:
        for part, tensor in zip(cut(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
            part.copy_(tensor.reshape(-1))

    steps.append(copy)
    return flat


def uncopy(flat: Tensor, tensors: Sequence[Tensor], steps: list[Callable[[], None]]) -> None:
    """Adds a step that copies flat memory back to the tensors."""

    def copy() -> None:
        for part, tensor in zip(cut(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))

    steps.append(copy)


def collides(outputs: Sequence[Tensor], inputs: Sequence[Tensor], in_place: Collection[tuple[int, int]]) -> bool:
    """Whether an output shares memory with an input, other than the pairs that may be the same."""

    def span(tensor: Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()

    out_spans, in_spans = [span(tensor) for tensor in outputs], [span(tensor) for tensor in inputs]
    for i, (out_begin, out_end) in enumerate(out_spans):
        for j, (in_begin, in_end) in enumerate(in_spans):
            same = (i, j) in in_place and (out_begin, out_end) == (in_begin, in_end)
            if out_begin < in_end and in_begin < out_end and not same:
                return True
    return False


def split_numels(tensor: Tensor, sizes: Sequence[int] | None, world_size: int, what: str) -> list[int]:
    """Numel of each rank's part of a tensor that is cut along its first dimension. Sizes may be a NumPy array."""
    sizes = [] if sizes is None else [int(size) for size in sizes]
    if not sizes:
        if tensor.numel() and tensor.size(0) % world_size:
            raise ValueError(
                f"all_to_all_single: {what} has {tensor.size(0)} rows, not a multiple of the world size {world_size}"
            )
        return [tensor.numel() // world_size] * world_size
    require_equal(f"all_to_all_single: {what} split sizes", len(sizes), "world size", world_size)
    rows = tensor.size(0) if tensor.dim() else 1
    require_equal(f"all_to_all_single: sum of {what} split sizes", sum(sizes), f"rows of {what}", rows)
    row_numel = tensor.numel() // rows if rows else 0
    return [size * row_numel for size in sizes]


def require_equal(what: str, came: int, wanted_what: str, wanted: int) -> None:
    """Raises a ValueError that says both sizes where they differ."""
    if came != wanted:
        raise ValueError(f"{what} has size {came}, but {wanted_what} is {wanted}")


_PAGE = 4096


class Scratch:
    """Reusable byte buffers: fresh memory costs a page fault for every 4 KiB, as much time as encoding does.
    Thread-safe.

    Sizes are rounded up to powers of two and a page, so that calls of similar size share buffers, and values of 4 MiB
    with their header do not take 8; what is free beyond `keep_nbytes` is given up.
    """

    def __init__(self, keep_nbytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._free_nbytes, self._keep_nbytes = 0, keep_nbytes

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of at least `nbytes`; its content is undefined."""
        size = _PAGE + (1 << max(nbytes - _PAGE - 1, 0).bit_length())
        with self._lock:
            buffers = self._free.get(size)
            if buffers:
                self._free_nbytes -= size
                return buffers.pop()
        with torch.inference_mode(False):  # normal calls will reuse it
            return empty(size, dtype=torch.uint8, device="cpu")

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer for reuse."""
        size = buffer.numel()
        with self._lock:
            if self._free_nbytes + size <= self._keep_nbytes:
                self._free.setdefault(size, []).append(buffer)
                self._free_nbytes += size


SCRATCH = Scratch()
"""Of all communicators of this process."""
