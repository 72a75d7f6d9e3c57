"""Mover: the bytes of device collectives, by the operations of a torch ProcessGroup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from zipccl_core.collective.memory import empty
from zipccl_core.collective.transport import COLLECTIVE_TAG
from zipccl_core.errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor


_BYTES, _AGREEMENT = 0, 1


class Mover(Protocol):
    """Moves bytes (uint8 tensors) between the devices of one group, in the order of the current stream."""

    rank: int
    world_size: int

    def all_gather(self, output: Tensor, message: Tensor) -> None:
        """All messages, of equal size, in rank order, into `output`."""

    def all_to_all(self, received: Sequence[Tensor], messages: Sequence[Tensor]) -> None:
        """`messages[r]` to rank r; every rank calls it, messages may be empty."""

    def exchange(self, received: Mapping[int, Tensor], messages: Mapping[int, Tensor]) -> None:
        """Messages between some pairs of ranks. Only those call it."""

    def broadcast(self, message: Tensor, source: int) -> None:
        """The source's bytes to all."""

    def close(self) -> None:
        """No more bytes will be moved."""

    def abort(self) -> None:
        """Ends what is under way."""


_generations: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def mover_of(group: Any, device: torch.device, store: Any = None, space: int = 0) -> Mover:
    """The way of moving a device's bytes in a group: by NCCL where the group has it for that device, else (gloo)
    through host memory. All ranks must make the movers of a group in the same order.

    NCCL gets a communicator of ZipCCL's own. The group's carries what others enqueue, in an order that must be the same
    on all ranks, so nothing may come in between from a worker, or when something did not fit.

    Args:
        group: of the ranks.
        device: of the bytes.
        store: for the rendezvous of the communicator; by default the group's.
        space: of the tags of messages over gloo: the transport's.
    """
    plain = getattr(group, "plain", group)
    if not _has_nccl(plain, device):
        return _StagedMover(plain, space) if device.type == "cuda" else _GlooMover(plain, space)
    if store is None:
        store = group.get_group_store() if plain is not group else distributed_c10d._world.pg_map[group][1]
    generation = _generations[plain] = (
        _generations.get(plain, -1) + 1
    )  # an id in the store serves one communicator only
    rank, size = plain.rank(), plain.size()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = plain._get_backend(device).options._timeout
    backend = dist.ProcessGroupNCCL(c10d.PrefixStore(f"zipccl/{generation}", store), rank, size, options)
    own = dist.ProcessGroup(store, rank, size)
    own._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    own._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return _NcclMover(own, device)


def all_agree(group: Any, device: torch.device, yes: Sequence[bool], space: int = 0) -> list[bool]:
    """To which of some questions all ranks of a group say yes. All must ask; blocks the host."""
    group = getattr(group, "plain", group)
    on_gpu = _has_nccl(group, device)
    own = torch.tensor(yes, dtype=torch.uint8, device=device if on_gpu else "cpu")
    every = torch.zeros(group.size() * len(yes), dtype=torch.uint8, device=own.device)
    (_NcclMover(group, device) if on_gpu else _GlooMover(group, space, _AGREEMENT)).all_gather(every, own)
    return every.view(group.size(), -1).cpu().bool().all(0).tolist()


def _has_nccl(group: Any, device: torch.device) -> bool:
    return device.type == "cuda" and "nccl" in group._get_backend(device).name()


class _GroupMover:
    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()


class _NcclMover(_GroupMover):
    """NCCL enqueues; `Work.wait` lets the current stream wait, not the host."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group)
        self._device = device

    def all_gather(self, output: Tensor, message: Tensor) -> None:
        with _as_transport_error():
            self._group._allgather_base(output, message).wait()

    def all_to_all(self, received: Sequence[Tensor], messages: Sequence[Tensor]) -> None:
        with _as_transport_error():
            self._group.alltoall(list(received), list(messages), c10d.AllToAllOptions()).wait()

    def exchange(self, received: Mapping[int, Tensor], messages: Mapping[int, Tensor]) -> None:
        # Inside of one NCCL group: outside, two ranks that both send first would wait for each other.
        with _as_transport_error():
            self._group._start_coalescing(self._device)
            for peer, message in messages.items():
                self._group.send([message], peer, 0)
            for peer, into in received.items():
                self._group.recv([into], peer, 0)
            self._group._end_coalescing(self._device).wait()

    def broadcast(self, message: Tensor, source: int) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = source
        with _as_transport_error():
            self._group.broadcast([message], options).wait()

    def close(self) -> None:
        """Ends the communicator."""
        self._group.shutdown()

    def abort(self) -> None:
        """Ends the communicator and what it is doing."""
        self._group.abort()


class _GlooMover(_GroupMover):
    """gloo, on memory that the host can read: by messages between pairs, which it keeps apart, by their tag, from all
    else that the group does."""

    def __init__(self, group: Any, space: int, purpose: int = _BYTES) -> None:
        super().__init__(group)
        # Users' own tags are small numbers, those of frames have the bit above.
        self._tag = COLLECTIVE_TAG - 1 - 2 * space - purpose

    def all_gather(self, output: Tensor, message: Tensor) -> None:
        parts = output.view(self.world_size, -1)
        parts[self.rank].copy_(message)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.exchange({peer: parts[peer] for peer in others}, dict.fromkeys(others, message))

    def all_to_all(self, received: Sequence[Tensor], messages: Sequence[Tensor]) -> None:
        self.exchange(
            {peer: into for peer, into in enumerate(received) if into.numel()},
            {peer: message for peer, message in enumerate(messages) if message.numel()},
        )

    def exchange(self, received: Mapping[int, Tensor], messages: Mapping[int, Tensor]) -> None:
        with _as_transport_error():
            works = [self._group.recv([into], peer, self._tag) for peer, into in received.items()]
            works += [self._group.send([message], peer, self._tag) for peer, message in messages.items()]
            for work in works:
                work.wait()

    def broadcast(self, message: Tensor, source: int) -> None:
        others = [rank for rank in range(self.world_size) if rank != source]
        if self.rank == source:
            self.exchange({}, dict.fromkeys(others, message))
        else:
            self.exchange({source: message}, {})

    def close(self) -> None:
        """Nothing to give back."""

    def abort(self) -> None:
        """The group's own abort does it."""


class _StagedMover:
    """gloo through host memory. The host waits for the stream, and for peers."""

    def __init__(self, group: Any, space: int) -> None:
        self._gloo = _GlooMover(group, space)
        self.rank, self.world_size = self._gloo.rank, self._gloo.world_size

    def all_gather(self, output: Tensor, message: Tensor) -> None:
        here = _on_host(output)
        self._gloo.all_gather(here, message.cpu())
        output.copy_(here)

    def all_to_all(self, received: Sequence[Tensor], messages: Sequence[Tensor]) -> None:
        here = [_on_host(into) for into in received]
        self._gloo.all_to_all(here, [message.cpu() for message in messages])
        for into, host in zip(received, here, strict=True):
            into.copy_(host)

    def exchange(self, received: Mapping[int, Tensor], messages: Mapping[int, Tensor]) -> None:
        here = {peer: _on_host(into) for peer, into in received.items()}
        self._gloo.exchange(here, {peer: message.cpu() for peer, message in messages.items()})
        for peer, into in received.items():
            into.copy_(here[peer])

    def broadcast(self, message: Tensor, source: int) -> None:
        here = message.cpu()
        self._gloo.broadcast(here, source)
        if source != self.rank:
            message.copy_(here)

    def close(self) -> None:
        """Nothing to give back."""

    def abort(self) -> None:
        """The group's own abort does it."""


@contextmanager
def _as_transport_error() -> Iterator[None]:
    """What gloo and NCCL raise when a peer is gone, or too late."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"moving bytes failed: {error}") from error


def _on_host(tensor: Tensor) -> Tensor:
    return empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
