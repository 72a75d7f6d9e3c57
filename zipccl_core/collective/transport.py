"""Transport: moves bytes between the ranks of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from zipccl_core.errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


COLLECTIVE_TAG = 1 << 30
"""Set in the tags of messages of collectives; bits 0 to 26 tell them apart. Users' own tags are small numbers."""
_SPACE_SHIFT, _SPACES = 27, 8
FIRST_FREE_SPACE = 3
"""Spaces below it belong to the process group `zipccl` (0), to adapters (1) and to hooks (2)."""


_HINT = " (Is zipccl installed on all ranks, and are they configured alike?)"


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

    def close(self) -> None:
        """No more messages will be sent or received."""


class ProcessGroupTransport:
    """A transport over the point-to-point operations of a torch ProcessGroup, or of a backend.

    gloo keeps point-to-point messages apart from its collectives, and by tag from each other, so that one group
    serves both; it takes a message that is shorter than the memory that was posted for it. Transports that share a
    group need different `space`s, in which their tags lie; without one, each gets the next, so that all ranks must make
    them in the same order.
    """

    _spaces: ClassVar[WeakKeyDictionary[Any, set[int]]] = WeakKeyDictionary()

    def __init__(self, group: ProcessGroup, name: str = "", space: int | None = None) -> None:
        self._group = getattr(group, "plain", group)  # below a zipccl group, which would compress frames
        self._name = name or str(getattr(group, "group_name", ""))
        self.rank, self.world_size = group.rank(), group.size()
        taken = self._spaces.setdefault(self._group, set())
        if space is None:
            space = min(set(range(FIRST_FREE_SPACE, _SPACES)) - taken, default=_SPACES)
        if space >= _SPACES:
            raise ValueError(f"group {self._name!r} has {len(taken)} communicators already; close one")
        taken.add(space)
        self.space = space

    def close(self) -> None:
        """Gives the space of its tags back."""
        self._spaces.get(self._group, set()).discard(self.space)

    def _tag(self, tag: int) -> int:
        return tag | self.space << _SPACE_SHIFT if tag & COLLECTIVE_TAG else tag

    def send(self, data: Tensor, peer: int, tag: int) -> Handle:
        """Sends contiguous bytes."""
        post = partial(self._group.send, [data], peer, self._tag(tag))
        return _Message(post, f"send of {data.numel()} bytes to rank {peer}", self._name)

    def recv(self, data: Tensor, peer: int | None, tag: int) -> Handle:
        """Receives bytes."""
        if peer is None:
            post = partial(self._group.recv_anysource, [data], self._tag(tag))
        else:
            post = partial(self._group.recv, [data], peer, self._tag(tag))
        source = "any rank" if peer is None else f"rank {peer}"
        return _Message(post, f"receive of up to {data.numel()} bytes from {source}", self._name)


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
            hint = _HINT if "timed out" in str(error).lower() else ""
            raise TransportError(f"{self._what} in group {self._group!r} failed: {error}{hint}") from error
