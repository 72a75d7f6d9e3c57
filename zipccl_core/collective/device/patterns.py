"""The patterns of exchanges on a device: from each to all, from each to each, from one to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zipccl_core.codec.frame import align
from zipccl_core.collective.device.exchange import Exchange, Incoming, Link, Outgoing, copy

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.device.exchange import Reduce


class Gather(Exchange):
    """One frame from each rank to all, by an all-gather of messages that are as long as the longest.

    Args:
        numels: of the ranks' tensors.
    """

    def __init__(
        self,
        link: Link,
        values: Tensor,
        outs: Mapping[int, Tensor],
        own: tuple[Tensor, Tensor],
        numels: Iterable[int],
    ) -> None:
        super().__init__(link, [values], outs, own)
        self._nbytes = max(link.message_nbytes(numel, values.dtype) for numel in set(numels))
        self._moved_twice = False

    def _going(self, values: Tensor) -> Outgoing:
        return Outgoing(values, self._link, self._nbytes)

    def _move(self) -> dict[int, Incoming]:
        device, mover = self._link.device, self._link.mover
        (out,), nbytes = self.outgoing, self._nbytes
        gathered = self._link.bytes(mover.world_size * nbytes)
        device.enqueue(lambda: mover.all_gather(gathered, out.message))
        return {
            rank: Incoming(gathered[rank * nbytes : (rank + 1) * nbytes], like, self._link)
            for rank, like in self._outs.items()
        }

    def _complete(self) -> None:
        """All ranks know all sizes, and take part."""
        device, mover = self._link.device, self._link.mover
        (out,), nbytes = self.outgoing, self._largest
        gathered = self._link.bytes(mover.world_size * nbytes)
        dynamic = out.dynamic(nbytes)
        if dynamic.numel() < nbytes:  # a frame so small that it has no room for as much as the largest sends
            dynamic = self._link.bytes(nbytes)
            device.enqueue(lambda: copy(dynamic[: out.dynamic(nbytes).numel()], out.dynamic(nbytes)))
        device.enqueue(lambda: mover.all_gather(gathered, dynamic))
        for rank, one in self.incoming.items():
            one.bring(gathered[rank * nbytes : rank * nbytes + align(self.in_sizes[rank])])
        self._moved_twice = True

    @property
    def _largest(self) -> int:
        return max(align(size) for size in [*self.in_sizes.values(), *self.out_sizes])

    @property
    def _n_peers(self) -> int:
        return self._link.mover.world_size - 1

    def _second_nbytes(self, one: Outgoing, size: int) -> int:
        return self._largest if self._moved_twice else 0


class Scatter(Exchange):
    """A frame from each rank to each other, by an all-to-all.

    Args:
        values: what goes to which rank.
    """

    def __init__(
        self,
        link: Link,
        values: Mapping[int, Tensor],
        outs: Mapping[int, Tensor],
        own: tuple[Tensor, Tensor] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        super().__init__(link, list(values.values()), outs, own, reduce)
        self._to = list(values)

    def _move(self) -> dict[int, Incoming]:
        device, mover, link = self._link.device, self._link.mover, self._link
        messages = dict(zip(self._to, (one.message for one in self.outgoing), strict=True))
        received = {peer: link.bytes(link.message_nbytes(out.numel(), out.dtype)) for peer, out in self._outs.items()}
        nothing = link.bytes(0)
        ranks = range(mover.world_size)
        ins, outs = [received.get(r, nothing) for r in ranks], [messages.get(r, nothing) for r in ranks]
        device.enqueue(lambda: mover.all_to_all(ins, outs))
        return {peer: Incoming(received[peer], out, link) for peer, out in self._outs.items()}

    def _complete(self) -> None:
        """Between the pairs that have something left."""
        device, mover = self._link.device, self._link.mover
        received = {
            peer: self._link.bytes(align(size))
            for peer, size in self.in_sizes.items()
            if self.incoming[peer].lacks(size)
        }
        messages = {
            peer: one.dynamic(align(size))
            for peer, one, size in zip(self._to, self.outgoing, self.out_sizes, strict=True)
            if one.lacks(size)
        }
        device.enqueue(lambda: mover.exchange(received, messages))
        for peer, dynamic in received.items():
            self.incoming[peer].bring(dynamic)


class Spread(Exchange):
    """A frame from one rank to all, by a broadcast."""

    def __init__(self, link: Link, values: Tensor, source: int) -> None:
        self._source, here = source, link.mover.rank == source
        super().__init__(link, [values] if here else [], {} if here else {source: values})
        self._like = values

    def _move(self) -> dict[int, Incoming]:
        link = self._link
        nbytes = link.message_nbytes(self._like.numel(), self._like.dtype)
        message = self.outgoing[0].message if self.outgoing else link.bytes(nbytes)
        link.device.enqueue(lambda: link.mover.broadcast(message, self._source))
        return {peer: Incoming(message, out, link) for peer, out in self._outs.items()}

    def _complete(self) -> None:
        """All ranks know the size."""
        (size,) = self.out_sizes or self.in_sizes.values()
        dynamic = self.outgoing[0].dynamic(align(size)) if self.outgoing else self._link.bytes(align(size))
        self._link.device.enqueue(lambda: self._link.mover.broadcast(dynamic, self._source))
        for one in self.incoming.values():
            one.bring(dynamic)

    @property
    def _n_peers(self) -> int:
        return self._link.mover.world_size - 1
