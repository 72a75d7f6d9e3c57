"""The interface `Codec`, the registry of codecs, and `compress` / `decompress`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict

from zipccl_core.codec.frame import DTYPE_CODES, DTYPES, HEADER_NBYTES, Frame, FrameLayout, Header, align
from zipccl_core.errors import ConfigError, WireFormatError
from zipccl_core.kernels import OVERFLOW
from zipccl_core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.codec.reduction import Reduction


class Codec(BaseModel, ABC):
    """Turns a tensor into a self-describing frame and back, bit for bit.

    A subclass gives its `id` as a `Literal` field with a default, and three methods. Defining it registers it. The id
    names the *wire format*: a change of the bytes that it writes needs a new id, since a frame outlives the code that
    wrote it.

    The memory is always the caller's: `encode` writes into a frame, `decode` into `out`, on the tensor's device and
    current stream, and neither waits for the device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    checksum: Literal["none", "crc32c"] = "none"
    """A checksum over header and body of every frame. It costs a pass over the frame on each side."""

    block_size: ClassVar[int] = 0
    """Values in a block, written into the header; 0 for a codec without blocks."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Registers the subclass under its id."""
        super().__pydantic_init_subclass__(**kwargs)
        if inspect.isabstract(cls):
            return
        id_ = cls.model_fields["id"].default
        if not (isinstance(id_, str) and id_.isascii() and 0 < len(id_) <= 16):
            raise ConfigError(
                f'{cls.__qualname__} needs an id of 1 to 16 ASCII characters: id: Literal["name"] = "name"; got {id_!r}'
            )
        codecs.register(id_, cls)

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded; equal on all ranks. Any dtype of the wire format, unless a
        codec says otherwise."""
        return dtype in DTYPE_CODES

    @abstractmethod
    def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
        """The sizes of a frame: exact, from numel and dtype alone, so that ranks agree on them without a message."""

    @abstractmethod
    def encode(self, tensor: Tensor, frame: Frame) -> None:
        """Writes a contiguous tensor into `frame.static` and, with `frame.dynamic_nbytes`, into `frame.dynamic`."""

    @abstractmethod
    def decode(self, frame: Frame, out: Tensor) -> None:
        """Writes the tensor of a frame that is not RAW into contiguous `out`.

        Raises:
            WireFormatError: the body contradicts itself.
        """

    def decode_reduce(self, frames: Sequence[Frame | Tensor], out: Tensor, reduction: Reduction) -> None:
        """Decodes one frame a rank, in rank order, and reduces them into `out`.

        A member of `frames` that is a tensor already (the rank's own contribution) is taken as it is. This default
        decodes, then adds; a codec with a fused kernel overrides it and keeps the bits.
        """
        parts = []
        for rank, item in enumerate(frames):
            if not isinstance(item, Frame):
                parts.append(item)
                continue
            parts.append(torch.empty_like(out))
            try:
                self.read(item, parts[-1])
            except WireFormatError as error:
                raise WireFormatError(f"from rank {rank}: {error}") from error
        reduction.reduce(parts, out)

    def unavailable(self, device: torch.device) -> str | None:
        """Why this codec cannot be used for tensors on a device in this process, and what to do; None where it can."""
        return None

    # Several frames at a time, for collectives on a device. A codec with kernels for whole frames overrides them.

    def write_all(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> Tensor:
        """`write`, for several tensors of one device. The frame of a tensor stands at the start of its buffer.

        Returns:
            The frames' dynamic_nbytes: int64, shape (n,), on the device.
        """
        frames = [self.write(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True)]
        return torch.cat([frame.dynamic_nbytes for frame in frames])

    def read_all(self, frames: Sequence[Frame], outs: Sequence[Tensor]) -> Tensor:
        """`read`, for several frames of one device, of which some may not have arrived whole.

        Returns:
            What became of each: int32, shape (n,), on the device. 0: it was decoded. OVERFLOW: more of its dynamic
            part has to come, and its output is not written yet. Anything else: it is damaged, as `explain` tells.

        Raises:
            WireFormatError: a frame is damaged, and the host has seen it; its `frame` is the frame's index.
        """
        status = []
        for index, (frame, out) in enumerate(zip(frames, outs, strict=True)):
            try:
                if not frame.is_here(frame.header):
                    status.append(OVERFLOW)
                    continue
                self.read(frame, out)
            except WireFormatError as error:
                error.frame = index
                raise
            status.append(0)
        return torch.tensor(status, dtype=torch.int32, device=outs[0].device if outs else None)

    def reduce_all(self, frames: Sequence[Frame | Tensor], out: Tensor, reduction: Reduction) -> Tensor:
        """`decode_reduce`, for frames of which some may not have arrived whole. Returns a status as `read_all`."""
        status = []
        for rank, frame in enumerate(frames):
            try:
                status.append(OVERFLOW if isinstance(frame, Frame) and not frame.is_here(frame.header) else 0)
            except WireFormatError as error:
                raise WireFormatError(f"from rank {rank}: {error}") from error
        if not any(status):
            self.decode_reduce(frames, out, reduction)
        return torch.tensor(status, dtype=torch.int32, device=out.device)

    def explain(self, status: int) -> str:
        """What a status of `read_all` or `reduce_all` says is wrong with a frame."""
        return f"damaged frame (status {status:#x})"

    # What follows is the same for every codec and final.

    def write(self, tensor: Tensor, buffer: Tensor) -> Frame:
        """Encodes a tensor into a frame at the start of a caller's buffer: header, body, checksum.

        Args:
            tensor: contiguous, of a supported dtype, any shape.
            buffer: uint8, contiguous, at least `layout(...).frame_nbytes` long, its start aligned to 8 bytes, on the
                tensor's device.
        """
        frame = Frame(buffer, tensor.numel(), tensor.dtype, self.layout(tensor.numel(), tensor.dtype))
        if not (tensor.is_contiguous() and buffer.is_contiguous()):
            raise ValueError("tensor and buffer must be contiguous: what is written is their memory")
        if buffer.numel() < frame.layout.frame_nbytes:
            raise ValueError(
                f"buffer has {buffer.numel()} bytes; a frame of {tensor.numel()} values needs "
                f"{frame.layout.frame_nbytes}"
            )
        frame.begin(self.id, self.block_size)
        if frame.layout.always_raw:
            frame.write_raw(tensor)
        else:
            self.encode(tensor, frame)
        frame.seal(self.checksum)
        return frame

    def read(self, frame: Frame, out: Tensor) -> Header:
        """Checks a frame that came over the wire and decodes it into contiguous `out`; returns its header.

        Raises:
            ValueError: `out` has another dtype or numel than the frame.
            WireFormatError: anything about the frame is not as it must be.
        """
        if not out.is_contiguous():
            raise ValueError("the output must be contiguous: what is written is its memory")
        if (out.numel(), out.dtype) != (frame.numel, frame.dtype):
            raise ValueError(f"frame has {frame.numel} {frame.dtype}, the output {out.numel()} {out.dtype}")
        header = frame.header
        frame.check(header, self.id, self.block_size)
        frame.check_sum(header)
        if header.raw:
            frame.read_raw(out)
        else:
            self.decode(frame, out)
        return header


codecs: Registry[Codec] = Registry("codec", "zipccl.codecs")


def compress(tensor: Tensor, codec: Codec) -> Tensor:
    """Encodes a tensor into a new frame.

    Args:
        tensor: any shape and memory layout; its dtype must be supported by the codec. The shape is not kept, its
            numel is.
        codec: for example `ExponentCodec()`.

    Returns:
        uint8, shape (frame length,), on the tensor's device.

    Raises:
        TypeError: the codec does not support the dtype.
    """
    if not codec.supports(tensor.dtype):
        raise TypeError(f"codec {codec.id!r} does not support {tensor.dtype}")
    layout = codec.layout(tensor.numel(), tensor.dtype)
    buffer = torch.empty(layout.frame_nbytes, dtype=torch.uint8, device=tensor.device)
    return codec.write(tensor.detach().contiguous(), buffer).data


def decompress(frame: Tensor) -> Tensor:
    """Decodes a frame, by the codec that its header names, with default options, into a new tensor of shape (numel,).

    Args:
        frame: uint8; bytes behind the end of the frame are ignored.

    Raises:
        TypeError: it is not uint8.
        WireFormatError: the bytes are not a frame, or a damaged one.
    """
    if frame.dtype != torch.uint8:
        raise TypeError(f"a frame is a uint8 tensor, not {frame.dtype}")
    frame = frame.contiguous().view(-1)
    if frame.data_ptr() % 8:  # a slice of a larger buffer: the header has 64-bit fields
        frame = frame.clone()
    header = Header.read(frame)
    dtype = DTYPES[header.dtype]
    try:
        codec: Codec = codecs.resolve(header.codec_id)
    except ConfigError as error:
        raise WireFormatError(str(error)) from None
    if not codec.supports(dtype):
        raise WireFormatError(f"frame of codec {codec.id!r} has dtype {dtype}, which that codec does not know")
    # Before memory is allocated for what the header claims, the claim must fit the bytes that are there.
    if HEADER_NBYTES + align(header.static_nbytes) > frame.numel():
        raise WireFormatError(f"truncated frame: {frame.numel()} bytes, static part alone has {header.static_nbytes}")
    try:
        layout = codec.layout(header.numel, dtype)
    except ValueError as error:
        raise WireFormatError(f"frame claims {header.numel} values: {error}") from None
    view = Frame(frame, header.numel, dtype, layout)
    view.check(header, codec.id, codec.block_size)
    out = torch.empty(header.numel, dtype=dtype, device=frame.device)
    codec.read(view, out)
    return out
