"""How a codec reaches the silicon: one table of functions a backend, the same bytes from each."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from zipccl_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("zipccl")

BLOCK = 1024
"""Values in a block."""
BLOCK_NBYTES = 1408
"""Bytes of a block in the static part: 1024 sign-mantissa bytes and three planes of 128."""


class Window(NamedTuple):
    """How exponents become codes: a base for all blocks, a table of seven exponents, or (neither) a base per block."""

    base: int | None = None
    table: tuple[int, ...] | None = None


class Kernels(Protocol):
    """The kernels of the exponent codec. Values are bf16 bit patterns as int16, contiguous, shape (numel,); parts of a
    frame are uint8."""

    name: str

    def encode(
        self, values: Tensor, static: Tensor, dynamic: Tensor, count: Tensor, window: Window, threads: int
    ) -> None:
        """Writes the static part, the escapes and their number into `count` (int64, shape (1,)).

        Where there are more escapes than bytes in `dynamic`, only a larger `count` is written for certain and the
        caller makes the frame RAW.
        """

    def decode(self, static: Tensor, escapes: Tensor, values: Tensor, params: Tensor, threads: int) -> None:
        """Fills `values`.

        Raises:
            WireFormatError: offsets, modes, bases, escape counts or fillers contradict the wire format.
        """

    def accumulate(self, values: Tensor, total: Tensor, first: bool, threads: int) -> None:
        """total += float(values), in fp32; where `first`, total = float(values), which keeps -0."""

    def round(self, total: Tensor, divisor: float, values: Tensor, threads: int) -> None:
        """values = bf16(total / divisor), rounded to nearest even, once."""


class Split(NamedTuple):
    """A frame in memory: header and static part, and what has arrived of the dynamic part. uint8."""

    static: Tensor
    dynamic: Tensor


OVERFLOW = 128
"""In a status: more of the frame's dynamic part has to come; it was not decoded."""


@runtime_checkable
class FrameKernels(Protocol):
    """Kernels of the exponent codec that write and read whole frames, several in a launch, in the order of the device's
    current stream. The host does not wait. All tensors are on one device; values are 16-bit and contiguous."""

    name: str

    def encode_frames(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor], window: Window) -> Tensor:
        """Writes a frame, header included, to the start of each buffer; returns their dynamic_nbytes (int64, (n,))."""

    def decode_frames(self, frames: Sequence[Split], outs: Sequence[Tensor]) -> Tensor:
        """Checks frames and fills `outs`; returns status (int32, (n,)): 0, OVERFLOW, or what is wrong."""

    def decode_reduce(self, parts: Sequence[Split | Tensor], out: Tensor, divisor: int) -> Tensor:
        """Decodes and adds in fp32, in order, divides, and rounds once; a tensor is taken as it is. Status as above."""

    def explain(self, status: int) -> str:
        """What is wrong, in words."""


def sections(numel: int) -> tuple[int, int, int]:
    """Number of blocks, and where meta and blocks begin in the static part (offsets begin at 0)."""
    n_blocks = -(-numel // BLOCK)
    meta = -(-4 * n_blocks // 128) * 128
    return n_blocks, meta, meta + -(-2 * n_blocks // 128) * 128


def static_nbytes(numel: int) -> int:
    """Bytes of the static part."""
    n_blocks, _, blocks = sections(numel)
    return blocks + BLOCK_NBYTES * n_blocks


@functools.lru_cache(maxsize=64)
def select(device: torch.device, wanted: str = "auto") -> Kernels:
    """The kernels for a device that work on parts of a frame: `native` on a CPU where it was built, `reference` (torch
    operations) anywhere.

    Raises:
        ConfigError: kernels were asked for by name that this device or installation does not have.
    """
    from zipccl_core.kernels import native, reference

    on_cpu = device.type == "cpu"
    if wanted == "reference":
        return reference.KERNELS
    if wanted == "cuda" and device.type != "cuda":
        raise ConfigError(f"kernels='cuda' cannot be used: they run on a GPU, not on {device}; allowed here: {_OTHERS}")
    if on_cpu and native.KERNELS is not None:
        return native.KERNELS
    if wanted == "native":
        reason = (
            "the extension was not built (install a C compiler and reinstall zipccl)"
            if on_cpu
            else f"they run on a CPU, not on {device}"
        )
        raise ConfigError(f"kernels='native' cannot be used: {reason}; allowed here: auto, reference")
    if on_cpu:
        tell_that_not_built()
    return reference.KERNELS


_OTHERS = "auto, native, reference"


@functools.lru_cache(maxsize=64)
def select_frames(device: torch.device, wanted: str = "auto") -> FrameKernels | None:
    """The kernels for a device that work on whole frames: `cuda` on a GPU, where it can be used. None means `select`'s.

    Raises:
        ConfigError: `cuda` was asked for by name, and cannot be used; the message says why.
    """
    if device.type != "cuda" or wanted not in ("auto", "cuda"):
        return None
    reason = why_no_cuda(device)
    if reason is None:
        from zipccl_core.kernels import cuda

        return cuda.load(_index(device))
    if wanted == "cuda":
        raise ConfigError(f"kernels='cuda' cannot be used on {device}: {reason}")
    logger.warning(
        "zipccl: on %s the reference kernels do the work, slowly, since the CUDA kernels cannot be used: %s",
        device,
        reason,
    )
    return None


def why_no_cuda(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot be used on a GPU in this process, and what to do; None where they can."""
    from zipccl_core.kernels import cuda

    return cuda.unavailable(_index(device))


def communication_stream(device: torch.device) -> Any:
    """A new stream of a GPU; where the CUDA kernels can be used, one on which they are launched directly."""
    if why_no_cuda(device) is None:
        from zipccl_core.kernels import cuda

        return cuda.new_stream(_index(device))
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def tell_that_not_built() -> None:
    """Says once a process that the fast kernels are missing, and what to do."""
    logger.warning(
        "zipccl: the native kernels were not built, and the reference kernels give the same bytes 100 times slower, "
        "too slow to save time on most networks; install a C compiler and reinstall zipccl"
    )
