"""Device: streams, events and host copies of one GPU, as few of them as the collectives need.

The order of a collective's steps (docs/adr/005) is written against this interface, so that it can be tested without a
GPU, by a device whose streams are recorded and run in any order that the events allow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zipccl_core import kernels
from zipccl_core.collective.memory import empty

if TYPE_CHECKING:
    from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before it has been carried out."""

    def synchronize(self) -> None:
        """Blocks the host until it has."""


class HostCopy(Protocol):
    """Numbers on their way from the device to the host."""

    def get(self) -> list[int]:
        """Blocks the host until they are there."""


class Device(Protocol):
    """One device. Work is put on the current stream of the calling thread, and carried out in the order of that."""

    chunk_numel: int
    """Values in a frame at most; it bounds the memory of a call, and there is nothing to be overlapped within one."""

    future_devices: list[int | str | torch.device]
    """For torch's futures, which then know of the device's streams; none where it is no device of torch's."""

    def current(self) -> Any:
        """The current stream of this thread."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream the current one, for work and for the memory that is allocated."""

    def new_stream(self) -> Any:
        """A stream beside all others."""

    def side_stream(self) -> Any:
        """Some stream that no long work is waiting in."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, in which the host can read nothing."""

    def enqueue(self, step: Callable[[], None]) -> None:
        """Puts what a step does to tensors on the current stream. A step may block the host where its communication
        does."""

    def record(self) -> Event:
        """An event at the end of the current stream."""

    def wait(self, event: Event) -> None:
        """Lets the current stream, and not the host, wait for an event."""

    def read(self, numbers: Callable[[], Tensor]) -> HostCopy:
        """Copies integers to the host when the current stream has come here; `numbers` is a step that makes them."""


class CudaDevice:
    """A GPU, by torch.cuda. A step is carried out at once: what it launches is already in stream order."""

    chunk_numel = 1 << 26

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.future_devices: list[int | str | torch.device] = [device]

    def current(self) -> Any:
        """torch's current stream."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """`torch.cuda.stream`."""
        return torch.cuda.stream(stream)

    def new_stream(self) -> Any:
        """One on which the CUDA kernels can be launched directly."""
        return kernels.communication_stream(self._device)

    def side_stream(self) -> Any:
        """One of torch's pool."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def capturing(self) -> bool:
        """By torch, which asks about the current device."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def enqueue(self, step: Callable[[], None]) -> None:
        """Does it now."""
        step()

    def record(self) -> Event:
        """A torch event."""
        return _CudaEvent(self.current().record_event())

    def wait(self, event: Event) -> None:
        """`Stream.wait_event`."""
        assert isinstance(event, _CudaEvent)
        self.current().wait_event(event.event)

    def read(self, numbers: Callable[[], Tensor]) -> HostCopy:
        """Into pinned memory, without blocking."""
        source = numbers()
        target = empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        target.copy_(source, non_blocking=True)
        return _PinnedCopy(target, self.record())


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class _PinnedCopy:
    def __init__(self, target: Tensor, event: Event) -> None:
        self._target, self._event = target, event

    def get(self) -> list[int]:
        self._event.synchronize()
        numbers: list[int] = self._target.tolist()
        return numbers
