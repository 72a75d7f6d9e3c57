"""Transport: moves bytes between the ranks of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from zipccl_core.errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


class Handle(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Blocks until the message has left or arrived.

        Raises:
            TransportError: it did not; the message names the peer and the group.
        """

    def source(self) -> int:
        """The rank that a completed receive came from."""


class Transport(Protocol):
    """Bytes between the ranks of one group: over a ProcessGroup, or simulated. Ranks are ranks in the group.

    Both calls return at once; the caller keeps the memory alive and unchanged until the handle is done. Messages
    between two ranks under one tag arrive in order. A message may be shorter than the memory that receives it, never
    longer.
    """

    rank: int
    world_size: int

    def send(self, data: Tensor, peer: int, tag: int) -> Handle:
        """Sends contiguous bytes."""

    def recv(self, data: Tensor, peer: int | None, tag: int) -> Handle:
        """Receives a message of at most `data.numel()` bytes, from any rank where `peer` is None."""


class ProcessGroupTransport:
    """A transport over the point-to-point operations of a torch ProcessGroup, or of a backend.

    gloo keeps point-to-point messages apart from its collectives, and by tag from each other, so that one group
    serves both; it takes a message that is shorter than the memory that was posted for it.
    """

    def __init__(self, group: ProcessGroup, name: str = "") -> None:
        self._group = group
        self._name = name or str(getattr(group, "group_name", ""))
        self.rank, self.world_size = group.rank(), group.size()

    def send(self, data: Tensor, peer: int, tag: int) -> Handle:
        """Sends contiguous bytes."""
        return _Message(
            partial(self._group.send, [data], peer, tag), f"send of {data.numel()} bytes to rank {peer}", self._name
        )

    def recv(self, data: Tensor, peer: int | None, tag: int) -> Handle:
        """Receives bytes."""
        if peer is None:
            post = partial(self._group.recv_anysource, [data], tag)
            return _Message(post, f"receive of up to {data.numel()} bytes from any rank", self._name)
        post = partial(self._group.recv, [data], peer, tag)
        return _Message(post, f"receive of up to {data.numel()} bytes from rank {peer}", self._name)


class _Message:
    """A message that is posted when this is made; both posting it and waiting for it can find the peer gone."""

    __slots__ = ("_group", "_what", "_work")

    def __init__(self, post: Callable[[], Work], what: str, group: str) -> None:
        self._what, self._group = what, group
        with self._named():
            self._work = post()

    def wait(self) -> None:
        with self._named():
            self._work.wait()

    def source(self) -> int:
        return int(self._work._source_rank())

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TransportError(f"{self._what} in group {self._group!r} failed: {error}") from error
