"""What the CUDA kernels need of torch's streams."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What is needed of torch.cuda for one device. Tests bring their own."""

    def current(self) -> Any:
        """torch.cuda.current_stream of the device."""

    def external(self, handle: int) -> Any:
        """A stream that torch did not make, as torch's."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""


class TorchStreams:
    """torch.cuda's."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def current(self) -> Any:
        """The current stream of this thread on the device."""
        return torch.cuda.current_stream(self._device)

    def external(self, handle: int) -> Any:
        """By torch.cuda.ExternalStream."""
        return torch.cuda.ExternalStream(handle, device=self._device)  # type: ignore[no-untyped-call]

    def capturing(self) -> bool:
        """By torch, which asks about the current device."""
        if torch.cuda.current_device() == self._device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()
