"""Exchanges of frames on a device: who sends what to whom, in at most two movements of bytes (docs/adr/005)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zipccl_core.codec.frame import Frame, align
from zipccl_core.collective.memory import empty, empty_flat
from zipccl_core.errors import WireFormatError
from zipccl_core.kernels import OVERFLOW

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.base import Codec
    from zipccl_core.codec.reduction import Reduction
    from zipccl_core.collective.device import Device, HostCopy
    from zipccl_core.collective.mover import Mover


class Link(NamedTuple):
    """What the exchanges of one call have in common.

    Attributes:
        device, mover: streams and bytes of the group.
        memory: where tensors lie.
        codec: of the frames.
        cap: bytes of the dynamic part, for each value, that the first movement has room for. None: no room, and exact
            sizes afterwards.
    """

    device: Device
    mover: Mover
    memory: torch.device
    codec: Codec
    cap: float | None

    def message_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of a frame's first message: header, static part, and room for some of the dynamic part."""
        layout = self.codec.layout(numel, dtype)
        most = layout.frame_nbytes - layout.static_frame_nbytes
        cap = 0 if self.cap is None else align(int(numel * self.cap))
        return layout.static_frame_nbytes + min(cap, most)

    def bytes(self, nbytes: int) -> Tensor:
        """New memory on the device."""
        return empty(nbytes, dtype=torch.uint8, device=self.memory)


class Verdict(NamedTuple):
    """What became of the frames of an exchange: a status for each, on its way to the host.

    Attributes:
        peers: the ranks that they came from.
        status: as `Codec.read_all` returns it.
        codec: explains it.
    """

    peers: list[int]
    status: HostCopy
    codec: Codec

    def check(self) -> None:
        """Raises a WireFormatError that names the peer of a damaged frame; blocks the host until it is known."""
        for peer, status in zip(self.peers, self.status.get(), strict=True):
            if status & ~OVERFLOW:
                raise WireFormatError(f"from rank {peer}: {self.codec.explain(status)}")


class Outgoing:
    """A tensor, memory for the largest frame that it can become, and its first message, which may be longer than it
    needs."""

    def __init__(self, values: Tensor, link: Link, message_nbytes: int | None = None) -> None:
        self.values, self.layout = values, link.codec.layout(values.numel(), values.dtype)
        nbytes = link.message_nbytes(values.numel(), values.dtype) if message_nbytes is None else message_nbytes
        self.buffer = link.bytes(max(self.layout.frame_nbytes, nbytes))
        self.message = self.buffer[:nbytes]

    def lacks(self, dynamic_nbytes: int) -> bool:
        """Whether a dynamic part of this size is not in the first message."""
        return align(dynamic_nbytes) > self.message.numel() - self.layout.static_frame_nbytes

    def dynamic(self, nbytes: int) -> Tensor:
        """The start of the dynamic part."""
        begin = self.layout.static_frame_nbytes
        return self.buffer[begin : begin + nbytes]


class Incoming:
    """A frame that comes from a peer, for values like those of `out`."""

    def __init__(self, message: Tensor, out: Tensor, link: Link) -> None:
        self.out, self.layout = out, link.codec.layout(out.numel(), out.dtype)
        self._static = message[: self.layout.static_frame_nbytes]
        self._dynamic = message[self.layout.static_frame_nbytes :]

    @property
    def frame(self) -> Frame:
        """What has arrived so far."""
        return Frame(self._static, self.out.numel(), self.out.dtype, self.layout, self._dynamic)

    def lacks(self, dynamic_nbytes: int) -> bool:
        """Whether a dynamic part of this size has not arrived whole."""
        return align(dynamic_nbytes) > self._dynamic.numel()

    def bring(self, dynamic: Tensor) -> None:
        """Takes the dynamic part from the second movement."""
        self._dynamic = dynamic


class Exchange(ABC):
    """Frames out and in.

    1. `begin`: all outgoing tensors are encoded, and the first messages move.
    2. `lacks` tells the host, when they have, whether there are dynamic parts that did not fit.
    3. `complete`: if there are, they move, at their exact sizes.
    4. `deliver`: decodes. Without 2 and 3 it may meet frames that are not whole, says so in its status, and is done
       again after them.

    Args:
        link: of the call.
        outgoing: the tensors to encode.
        outs: a tensor for the values of each peer. Where they are reduced, they only say how many those are.
        own: an output and an input that is copied there.
        reduce: instead of decoding into `outs`.
    """

    settles_first = False
    """Whether what is delivered is needed whole by the next exchange of the call."""

    def __init__(
        self,
        link: Link,
        outgoing: Sequence[Tensor],
        outs: Mapping[int, Tensor],
        own: tuple[Tensor, Tensor] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        self._link, self._own, self._reduce = link, own, reduce
        self._values, self._outs = outgoing, outs
        self.verdict: Verdict | None = None

    def begin(self) -> None:
        """Encodes, moves the first messages, and asks for the sizes."""
        device, link = self._link.device, self._link
        self.outgoing = [self._going(values) for values in self._values]
        buffers = [one.buffer for one in self.outgoing]
        if self._own is not None:
            output, own = self._own
            if output.data_ptr() != own.data_ptr():
                device.enqueue(lambda: _copy(output, own))
        if self._reduce is not None and link.cap is not None:
            self._reduce.keep_own(device)

        def encode() -> None:
            self._written = (
                link.codec.write_all(self._values, buffers)
                if buffers
                else torch.empty(0, dtype=torch.int64, device=link.memory)
            )

        device.enqueue(encode)
        self.incoming = self._move()
        self._sizes = device.read(self._all_sizes)

    def lacks(self) -> bool:
        """Whether dynamic parts have to come that this rank sends or receives; blocks the host until it knows.

        Raises:
            WireFormatError: a peer's header claims a size that cannot be.
        """
        sizes = self._sizes.get()
        self.in_sizes = dict(zip(self.incoming, sizes, strict=False))
        self.out_sizes = sizes[len(self.incoming) :]
        for peer, size in self.in_sizes.items():
            layout = self.incoming[peer].layout
            most = layout.frame_nbytes - layout.static_frame_nbytes
            if not 0 <= size <= most:
                raise WireFormatError(f"from rank {peer}: frame claims {size} dynamic bytes, of {most} at most")
        return any(self.incoming[peer].lacks(size) for peer, size in self.in_sizes.items()) or any(
            one.lacks(size) for one, size in zip(self.outgoing, self.out_sizes, strict=True)
        )

    @abstractmethod
    def complete(self) -> None:
        """Moves dynamic parts that did not fit; sizes are known."""

    def deliver(self) -> None:
        """Decodes or reduces what has arrived, and asks for the status."""
        frames = {peer: one.frame for peer, one in self.incoming.items()}
        outs = [one.out for one in self.incoming.values()]

        def status() -> Tensor:
            try:
                if self._reduce is not None:
                    return self._reduce(self._link.codec, frames)
                return self._link.codec.read_all(list(frames.values()), outs)
            except WireFormatError as error:
                if error.frame is None:
                    raise
                raise WireFormatError(f"from rank {list(frames)[error.frame]}: {error}") from error

        if frames:
            peers = list(frames) if self._reduce is None else list(range(self._link.mover.world_size))
            self.verdict = Verdict(peers, self._link.device.read(status), self._link.codec)

    @abstractmethod
    def _move(self) -> dict[int, Incoming]:
        """Moves the first messages; returns what is on its way, by peer."""

    def _going(self, values: Tensor) -> Outgoing:
        return Outgoing(values, self._link)

    def _all_sizes(self) -> Tensor:
        sizes = [one.frame.dynamic_nbytes for one in self.incoming.values()]
        return torch.cat([*sizes, self._written])

    @property
    def sent(self) -> list[tuple[Outgoing, int, int]]:
        """Each frame, its dynamic_nbytes and the number of peers that it went to, once they are known."""
        return [(one, size, 1) for one, size in zip(self.outgoing, self.out_sizes, strict=True)]

    def wire_nbytes(self, one: Outgoing, size: int) -> int:
        """Bytes that went to a peer for a frame."""
        return one.message.numel() + (align(size) if one.lacks(size) else 0)


class Gather(Exchange):
    """One frame from each rank to all, by an all-gather of messages that are as long as the largest.

    Args:
        largest: numel of the largest tensor of a rank.
    """

    def __init__(
        self, link: Link, values: Tensor, outs: Mapping[int, Tensor], own: tuple[Tensor, Tensor], largest: int
    ) -> None:
        super().__init__(link, [values], outs, own)
        self._nbytes = link.message_nbytes(largest, values.dtype)

    def _going(self, values: Tensor) -> Outgoing:
        return Outgoing(values, self._link, self._nbytes)

    def _move(self) -> dict[int, Incoming]:
        device, mover = self._link.device, self._link.mover
        (out,) = self.outgoing
        nbytes = self._nbytes
        gathered = self._link.bytes(mover.world_size * nbytes)
        device.enqueue(lambda: mover.all_gather(gathered, out.message))
        return {
            rank: Incoming(gathered[rank * nbytes : (rank + 1) * nbytes], like, self._link)
            for rank, like in self._outs.items()
        }

    def complete(self) -> None:
        """All ranks know all sizes, and take part."""
        device, mover = self._link.device, self._link.mover
        (out,) = self.outgoing
        nbytes = max(align(size) for size in [*self.in_sizes.values(), *self.out_sizes])
        gathered = self._link.bytes(mover.world_size * nbytes)
        dynamic = out.dynamic(nbytes)
        if dynamic.numel() < nbytes:  # a frame so small that it has no room for as much as the largest sends
            dynamic = self._link.bytes(nbytes)
            device.enqueue(lambda: _copy(dynamic[: out.dynamic(nbytes).numel()], out.dynamic(nbytes)))
        device.enqueue(lambda: mover.all_gather(gathered, dynamic))
        for rank, one in self.incoming.items():
            one.bring(gathered[rank * nbytes : rank * nbytes + align(self.in_sizes[rank])])

    @property
    def sent(self) -> list[tuple[Outgoing, int, int]]:
        """The rank's frame, at the largest size."""
        (out,) = self.outgoing
        return [(out, max([*self.in_sizes.values(), *self.out_sizes]), len(self.incoming))]


class Scatter(Exchange):
    """A frame from each rank to each other, by an all-to-all.

    Args:
        to: for each outgoing tensor, the rank that it goes to.
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

    def complete(self) -> None:
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

    def complete(self) -> None:
        """All ranks know the size."""
        (size,) = self.out_sizes or self.in_sizes.values()
        dynamic = self.outgoing[0].dynamic(align(size)) if self.outgoing else self._link.bytes(align(size))
        self._link.device.enqueue(lambda: self._link.mover.broadcast(dynamic, self._source))
        for one in self.incoming.values():
            one.bring(dynamic)

    @property
    def sent(self) -> list[tuple[Outgoing, int, int]]:
        """The source's frame."""
        return [(one, size, self._link.mover.world_size - 1) for one, size, _ in super().sent]


class Reduce:
    """Reduces a frame from each peer and this rank's own values, in rank order.

    Args:
        own: this rank's values; may be the memory of `out`.
        rank: where among the frames they stand.
        out: the result.
        reduction: order and divisor.
    """

    def __init__(self, own: Tensor, rank: int, out: Tensor, reduction: Reduction) -> None:
        self._own, self._rank, self._out, self._reduction = own, rank, out, reduction

    def keep_own(self, device: Device) -> None:
        """Sees to it that the reduction can be done again, though it overwrites its own values."""
        if self._own.data_ptr() == self._out.data_ptr():
            own, kept = self._own, empty_flat(self._own)
            device.enqueue(lambda: _copy(kept, own))
            self._own = kept

    def __call__(self, codec: Codec, frames: Mapping[int, Frame]) -> Tensor:
        """Reduces; returns a status for each rank."""
        parts: list[Frame | Tensor] = [
            self._own if rank == self._rank else frames[rank] for rank in range(len(frames) + 1)
        ]
        return codec.reduce_all(parts, self._out, self._reduction)


def _copy(output: Tensor, values: Tensor) -> None:
    output.copy_(values)
