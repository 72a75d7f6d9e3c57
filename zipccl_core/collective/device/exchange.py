"""Exchanges of frames on a device: who sends what to whom, in at most two movements of bytes (docs/adr/005)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zipccl_core.codec.frame import HEADER_NBYTES, Frame, align
from zipccl_core.collective.memory import empty, empty_flat
from zipccl_core.errors import WireFormatError

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.base import Codec
    from zipccl_core.codec.reduction import Reduction
    from zipccl_core.collective.device.layer import Device, HostCopy
    from zipccl_core.collective.device.mover import Mover


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
    """What became of the frames of an exchange in the end: a status for each, on its way to the host.

    Attributes:
        peers: the ranks that they came from.
        status: as `Codec.read_all` returns it.
        codec: explains it.
    """

    peers: list[int]
    status: HostCopy
    codec: Codec

    def check(self) -> None:
        """Raises a WireFormatError that names the peer of a frame that was not decoded; blocks the host until it is
        known."""
        for peer, status in zip(self.peers, self.status.get(), strict=True):
            if status:
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
    """Frames out and in, on the communication stream. `run` does all of it:

    1. All outgoing tensors are encoded, and the first messages move.
    2. With a cap, what has arrived is decoded.
    3. The host reads how large dynamic parts are.
    4. Those that did not fit, without a cap all, move at their exact sizes.
    5. What has arrived is decoded, if it is not yet.

    Args:
        link: of the call.
        outgoing: the tensors to encode.
        outs: a tensor for the values of each peer. Where they are reduced, they only say how many those are.
        own: an output and an input that is copied there.
        reduce: instead of decoding into `outs`.
    """

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
        self.outgoing: list[Outgoing] = []
        self.incoming: dict[int, Incoming] = {}

    def run(self, count: Callable[..., None]) -> Verdict | None:
        """Puts all steps on the stream. The host waits for the first movement, and for nothing else.

        Args:
            count: called with increments of the call's counters.

        Raises:
            WireFormatError: a peer's header claims a size that cannot be.
        """
        capped = self._link.cap is not None
        try:
            self._begin()
            verdict = self._deliver() if capped else None
            lacks = self._read_sizes()
            if lacks:
                self._complete()
            if lacks or not capped:
                verdict = self._deliver()
            self._count(count)
        finally:
            # The memory may be used again by what comes next on this stream; a call of many exchanges, or somebody who
            # keeps an error, is not to hold all of it.
            self.outgoing, self.incoming = [], {}
        return verdict

    def _begin(self) -> None:
        device, link = self._link.device, self._link
        self.outgoing = [self._going(values) for values in self._values]
        buffers = [one.buffer for one in self.outgoing]
        if self._own is not None:
            output, own = self._own
            if output.data_ptr() != own.data_ptr():
                device.enqueue(lambda: copy(output, own))
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
        incoming = list(self.incoming.values())
        self._sizes = device.read(lambda: torch.cat([one.frame.dynamic_nbytes for one in incoming] + [self._written]))

    def _read_sizes(self) -> bool:
        """Whether dynamic parts have to come that this rank sends or receives; blocks the host until it knows."""
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

    def _deliver(self) -> Verdict | None:
        """Decodes or reduces what has arrived."""
        if not self.incoming:
            return None
        frames, codec, reduce = {peer: one.frame for peer, one in self.incoming.items()}, self._link.codec, self._reduce
        outs = [one.out for one in self.incoming.values()]

        def status() -> Tensor:
            try:
                return reduce(codec, frames) if reduce is not None else codec.read_all(list(frames.values()), outs)
            except WireFormatError as error:
                if error.frame is None:
                    raise
                raise WireFormatError(f"from rank {list(frames)[error.frame]}: {error}") from error

        peers = list(frames) if reduce is None else list(range(self._link.mover.world_size))
        return Verdict(peers, self._link.device.read(status), codec)

    @abstractmethod
    def _move(self) -> dict[int, Incoming]:
        """Moves the first messages; returns what is on its way, by peer."""

    @abstractmethod
    def _complete(self) -> None:
        """Moves dynamic parts that did not fit; sizes are known."""

    def _going(self, values: Tensor) -> Outgoing:
        return Outgoing(values, self._link)

    @property
    def _n_peers(self) -> int:
        """To how many each frame goes."""
        return 1

    def _second_nbytes(self, one: Outgoing, size: int) -> int:
        """Bytes of a frame in the second movement."""
        return align(size) if one.lacks(size) else 0

    def _count(self, count: Callable[..., None]) -> None:
        own = self._own[1] if self._own is not None else self._reduce.own if self._reduce is not None else None
        count(self_nbytes=0 if own is None else own.numel() * own.element_size())
        for one, size in zip(self.outgoing, self.out_sizes, strict=True):
            raw_nbytes = one.values.numel() * one.values.element_size()
            raw = size >= raw_nbytes - align(one.layout.static_nbytes)  # as many as a RAW frame has
            wire_nbytes = one.message.numel() + self._second_nbytes(one, size)
            used = HEADER_NBYTES + (raw_nbytes if raw else one.layout.static_nbytes + size)
            count(frames=1, raw_frames=int(raw), escapes=0 if raw else size)
            count(
                raw_nbytes=self._n_peers * raw_nbytes,
                wire_nbytes=self._n_peers * wire_nbytes,
                padding_nbytes=self._n_peers * max(0, wire_nbytes - used),
            )


class Reduce:
    """Reduces a frame from each peer and this rank's own values, in rank order.

    Args:
        own: this rank's values; may be the memory of `out`.
        rank: where among the frames they stand.
        out: the result.
        reduction: order and divisor.
    """

    def __init__(self, own: Tensor, rank: int, out: Tensor, reduction: Reduction) -> None:
        self.own, self._rank, self._out, self._reduction = own, rank, out, reduction

    def keep_own(self, device: Device) -> None:
        """Sees to it that the reduction can be done again, though it overwrites its own values."""
        if self.own.data_ptr() == self._out.data_ptr():
            own, kept = self.own, empty_flat(self.own)
            device.enqueue(lambda: copy(kept, own))
            self.own = kept

    def __call__(self, codec: Codec, frames: Mapping[int, Frame]) -> Tensor:
        """Reduces; returns a status for each rank."""
        parts: list[Frame | Tensor] = [
            self.own if rank == self._rank else frames[rank] for rank in range(len(frames) + 1)
        ]
        return codec.reduce_all(parts, self._out, self._reduction)


def copy(output: Tensor, values: Tensor) -> None:
    """As a step."""
    output.copy_(values)
