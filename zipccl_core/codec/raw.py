"""RawCodec: the identity. A frame of a tensor's own bytes, to compare with and for what does not compress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from zipccl_core.codec.base import Codec
from zipccl_core.codec.frame import Frame, FrameLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class RawCodec(Codec):
    """Carries a tensor as it is. Wire format `raw`: every frame has the flag RAW, so the core writes and reads it."""

    id: Literal["raw"] = "raw"

    def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
        """The tensor's own bytes."""
        nbytes = numel * dtype.itemsize
        return FrameLayout(nbytes, nbytes, always_raw=True)

    def encode(self, tensor: Tensor, frame: Frame) -> None:
        """Writes the tensor's bytes."""
        frame.write_raw(tensor)

    def decode(self, frame: Frame, out: Tensor) -> None:
        """Copies the tensor's bytes out."""
        frame.read_raw(out)
