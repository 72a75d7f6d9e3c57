"""How a codec reaches the silicon: one table of functions a backend, the same bytes from each."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from zipccl_core.errors import ConfigError

if TYPE_CHECKING:
    import torch
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
    """The kernels for a device: `native` on a CPU where it was built, `reference` (torch operations) anywhere.

    Raises:
        ConfigError: kernels were asked for by name that this device or installation does not have.
    """
    from zipccl_core.kernels import native, reference

    if wanted == "reference":
        return reference.KERNELS
    if device.type == "cpu" and native.KERNELS is not None:
        return native.KERNELS
    if wanted == "native":
        reason = (
            "the extension was not built (install a C compiler and reinstall zipccl)"
            if device.type == "cpu"
            else f"they run on a CPU, not on {device}"
        )
        raise ConfigError(f"kernels='native' cannot be used: {reason}; allowed here: auto, reference")
    if device.type == "cpu":
        tell_that_not_built()
    return reference.KERNELS


@functools.cache
def tell_that_not_built() -> None:
    """Says once a process that the fast kernels are missing, and what to do."""
    logger.warning(
        "zipccl: the native kernels were not built, and the reference kernels give the same bytes 100 times slower, "
        "too slow to save time on most networks; install a C compiler and reinstall zipccl"
    )
