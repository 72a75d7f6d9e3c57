"""The frame: what a tensor is on the wire. `docs/wire-format.md` is the normative text; this is the same in code."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, NamedTuple

import crc32c
import torch

from zipccl_core.errors import WireFormatError

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"ZCCL"
VERSION = 1
HEADER_NBYTES = 128
ALIGNMENT = 128
FLAG_RAW = 1
CHECKSUM_KINDS = {"none": 0, "crc32c": 1}

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 4,
    torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6,
    torch.uint8: 7,
    torch.int8: 8,
    torch.int16: 9,
    torch.int32: 10,
    torch.int64: 11,
    torch.bool: 12,
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

_HEADER = struct.Struct("<4sBBBBII16sQqQQ16sQQ32s")
assert _HEADER.size == HEADER_NBYTES
_FLAGS_AT, _CHECKSUM_AT, _DYNAMIC_NBYTES_AT, _PARAMS_AT = 6, 8, 40, 64


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 128."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class FrameLayout(NamedTuple):
    """What a codec needs for a tensor, known from its numel and dtype alone and therefore equal on all ranks.

    Attributes:
        static_nbytes: bytes of the static part, exactly.
        capacity_nbytes: static part (aligned) and the largest dynamic part that a tensor of this numel can need.
        always_raw: the codec has nothing to gain at this numel; its frames are RAW.
    """

    static_nbytes: int
    capacity_nbytes: int
    always_raw: bool = False

    @property
    def frame_nbytes(self) -> int:
        """The largest frame with this layout: the size of the buffer that the caller brings."""
        return HEADER_NBYTES + max(align(self.static_nbytes), align(self.capacity_nbytes))

    @property
    def static_frame_nbytes(self) -> int:
        """Header and static part: the offset of the dynamic part."""
        return HEADER_NBYTES + align(self.static_nbytes)


class Header(NamedTuple):
    """The 128 bytes in front of every frame; field by field as in the wire format."""

    magic: bytes
    version: int
    dtype: int
    flags: int
    checksum_kind: int
    checksum: int
    block_size: int
    codec: bytes
    numel: int
    dynamic_nbytes: int
    static_nbytes: int
    reserved0: int
    params: bytes
    encode_ns: int
    decode_ns: int
    reserved1: bytes

    @classmethod
    def read(cls, buffer: Tensor) -> Header:
        """Reads the header at the start of a uint8 buffer and checks what holds for every frame.

        Raises:
            WireFormatError: the buffer is shorter than a header, or magic, version, dtype, flags, checksum kind,
                dynamic size or a reserved field is not what version 1 allows.
        """
        if buffer.numel() < HEADER_NBYTES:
            raise WireFormatError(f"truncated frame: {buffer.numel()} bytes, a header alone has {HEADER_NBYTES}")
        header = cls._make(_HEADER.unpack(read_bytes(buffer, 0, HEADER_NBYTES)))
        if header.magic != MAGIC:
            raise WireFormatError(f"not a ZipCCL frame: magic is {header.magic!r}, wanted {MAGIC!r}")
        if header.version != VERSION:
            raise WireFormatError(
                f"frame has wire format version {header.version}; this ZipCCL reads version {VERSION}"
            )
        if header.dtype not in DTYPES:
            raise WireFormatError(f"unknown dtype code {header.dtype}")
        if header.flags & ~FLAG_RAW:
            raise WireFormatError(f"unknown flags {header.flags:#x}")
        if header.checksum_kind not in CHECKSUM_KINDS.values():
            raise WireFormatError(f"unknown checksum kind {header.checksum_kind}")
        if header.checksum_kind == 0 and header.checksum != 0:
            raise WireFormatError(f"checksum {header.checksum:#x} without a checksum kind")
        if header.dynamic_nbytes < 0:
            raise WireFormatError(f"negative dynamic size {header.dynamic_nbytes}")
        if header.reserved0 or any(header.reserved1):
            raise WireFormatError("reserved header bytes are not zero")
        return header

    @property
    def raw(self) -> bool:
        """Whether the frame holds the tensor's own bytes."""
        return bool(self.flags & FLAG_RAW)

    @property
    def codec_id(self) -> str:
        """The codec's id."""
        return self.codec.rstrip(b"\0").decode("ascii", "replace")

    @property
    def frame_nbytes(self) -> int:
        """The length of the whole frame in bytes."""
        return HEADER_NBYTES + align(self.static_nbytes) + align(self.dynamic_nbytes)


class Frame:
    """A view over one uint8 tensor: `header | static | dynamic`. It owns no memory and copies none.

    A codec writes `static` and `dynamic` and, where it has a dynamic part, `dynamic_nbytes`; a codec with a static
    part only touches nothing else. All views live on the buffer's device, so that a kernel can write the count where
    it stands.

    A frame that came in two messages is *split*: `buffer` has header and static part, and `apart` what has arrived of
    the dynamic part.
    """

    __slots__ = ("apart", "buffer", "dtype", "layout", "numel")

    def __init__(
        self, buffer: Tensor, numel: int, dtype: torch.dtype, layout: FrameLayout, apart: Tensor | None = None
    ) -> None:
        self.buffer, self.numel, self.dtype, self.layout = buffer, numel, dtype, layout
        self.apart = apart

    @property
    def static(self) -> Tensor:
        """uint8, shape (layout.static_nbytes,)."""
        return self.buffer[HEADER_NBYTES : HEADER_NBYTES + self.layout.static_nbytes]

    @property
    def dynamic(self) -> Tensor:
        """uint8: room for the dynamic part, as much as the layout allows, whatever the buffer; of a split frame,
        what has arrived."""
        if self.apart is not None:
            return self.apart
        return self.buffer[self.layout.static_frame_nbytes : self.layout.frame_nbytes]

    @property
    def dynamic_nbytes(self) -> Tensor:
        """int64, shape (1,): how many bytes of `dynamic` the codec used."""
        return self.buffer[_DYNAMIC_NBYTES_AT : _DYNAMIC_NBYTES_AT + 8].view(torch.int64)

    @property
    def params(self) -> Tensor:
        """uint8, shape (16,): the codec's own field in the header."""
        return self.buffer[_PARAMS_AT : _PARAMS_AT + 16]

    @property
    def header(self) -> Header:
        """The header as it stands in the buffer, read to the host and checked."""
        return Header.read(self.buffer)

    @property
    def data(self) -> Tensor:
        """uint8: exactly the bytes of this frame, a copy where it is split. Reads the header."""
        return self._first_bytes(self.header.frame_nbytes)

    def is_here(self, header: Header) -> bool:
        """Whether all bytes that the header claims have arrived."""
        if self.apart is None:
            return header.frame_nbytes <= self.buffer.numel()
        return align(header.dynamic_nbytes) <= self.apart.numel()

    def _first_bytes(self, nbytes: int) -> Tensor:
        if self.apart is None:
            return self.buffer[:nbytes]
        static_nbytes = self.layout.static_frame_nbytes
        parts = [self.buffer[: min(nbytes, static_nbytes)], self.apart[: max(0, nbytes - static_nbytes)]]
        return torch.cat(parts) if parts[1].numel() else parts[0]

    def begin(self, codec_id: str, block_size: int) -> None:
        """First step of the sender: a fresh header, nothing set yet, and zeros behind the static part."""
        fields = (MAGIC, VERSION, DTYPE_CODES[self.dtype], 0, 0, 0, block_size, codec_id.encode("ascii"), self.numel, 0)
        write_bytes(self.buffer, 0, _HEADER.pack(*fields, self.layout.static_nbytes, 0, b"", 0, 0, b""))
        static_end = HEADER_NBYTES + self.layout.static_nbytes
        if padding := -static_end % ALIGNMENT:
            write_bytes(self.buffer, static_end, bytes(padding))

    def write_raw(self, tensor: Tensor) -> None:
        """Makes this a RAW frame of a contiguous tensor: its own bytes, whatever the codec wrote before."""
        raw = tensor.reshape(-1).view(torch.uint8)
        body = self.buffer[HEADER_NBYTES:]
        body[: raw.numel()].copy_(raw)
        body[raw.numel() : max(align(raw.numel()), align(self.layout.static_nbytes))].zero_()
        dynamic_nbytes = max(0, raw.numel() - align(self.layout.static_nbytes))
        write_bytes(self.buffer, _DYNAMIC_NBYTES_AT, struct.pack("<q", dynamic_nbytes))
        write_bytes(self.buffer, _FLAGS_AT, bytes([FLAG_RAW]))
        write_bytes(self.buffer, _PARAMS_AT, bytes(16))

    def read_raw(self, out: Tensor) -> None:
        """Copies the tensor of a RAW frame into contiguous `out`."""
        raw = out.reshape(-1).view(torch.uint8)
        raw.copy_(self._first_bytes(HEADER_NBYTES + raw.numel())[HEADER_NBYTES:])

    def seal(self, checksum: str) -> None:
        """Last step of the sender: zeros behind the dynamic part, then the checksum over everything.

        On a device, a codec with a dynamic part fills that up to 128 itself; and the host waits for a checksum.
        """
        if self.buffer.device.type == "cpu":
            (dynamic_nbytes,) = struct.unpack("<q", read_bytes(self.buffer, _DYNAMIC_NBYTES_AT, 8))
            if padding := -dynamic_nbytes % ALIGNMENT:
                write_bytes(self.buffer, self.layout.static_frame_nbytes + dynamic_nbytes, bytes(padding))
        if checksum != "none":
            write_bytes(self.buffer, _CHECKSUM_AT - 1, bytes([CHECKSUM_KINDS[checksum]]))
            write_bytes(self.buffer, _CHECKSUM_AT, struct.pack("<I", _checksum(self.data)))

    def check(self, header: Header, codec_id: str, block_size: int) -> None:
        """First step of the receiver: compares a header with what this frame must be.

        Raises:
            WireFormatError: a field differs, or the buffer does not hold the frame.
        """
        came = (DTYPES[header.dtype], header.numel, header.codec_id, header.block_size, header.static_nbytes)
        wanted = (self.dtype, self.numel, codec_id, block_size, self.layout.static_nbytes)
        if came != wanted:
            for field, one, other in zip(
                ("dtype", "numel", "codec", "block_size", "static_nbytes"), came, wanted, strict=True
            ):
                if one != other:
                    raise WireFormatError(f"frame has {field} {one}, wanted {other}")
        if header.frame_nbytes > self.layout.frame_nbytes:
            raise WireFormatError(
                f"frame claims {header.frame_nbytes} bytes, {self.numel} values need {self.layout.frame_nbytes} at most"
            )
        if not self.is_here(header):
            came_nbytes = self.buffer.numel() + (0 if self.apart is None else self.apart.numel())
            raise WireFormatError(f"truncated frame: {came_nbytes} bytes of {header.frame_nbytes}")
        if header.raw:
            raw_nbytes = max(0, self.numel * self.dtype.itemsize - align(self.layout.static_nbytes))
            if header.dynamic_nbytes != raw_nbytes:
                raise WireFormatError(f"RAW frame has {header.dynamic_nbytes} dynamic bytes, wanted {raw_nbytes}")
        elif self.layout.always_raw:
            raise WireFormatError(f"frame of {self.numel} values is not RAW")

    def check_sum(self, header: Header) -> None:
        """Second step of the receiver, when the whole frame is there: compares the checksum, where there is one.

        Raises:
            WireFormatError: the checksum is wrong.
        """
        if header.checksum_kind and (came := _checksum(self._first_bytes(header.frame_nbytes))) != header.checksum:
            raise WireFormatError(
                f"checksum is {header.checksum:#010x}, the frame has {came:#010x}: it was damaged on its way"
            )


def read_bytes(buffer: Tensor, offset: int, nbytes: int) -> bytes:
    """Copies a few bytes of a contiguous uint8 tensor to the host (blocks on a device)."""
    if buffer.device.type == "cpu":
        return ctypes.string_at(buffer.data_ptr() + offset, nbytes)
    return bytes(buffer[offset : offset + nbytes].tolist())


def write_bytes(buffer: Tensor, offset: int, data: bytes) -> None:
    """Writes a few bytes into a contiguous uint8 tensor, in stream order on a device."""
    if buffer.device.type == "cpu":
        ctypes.memmove(buffer.data_ptr() + offset, data, len(data))
    else:
        buffer[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _checksum(data: Tensor) -> int:
    """CRC32C of a whole frame, the field `checksum` taken as zero. The arithmetic is the crc32c package's."""
    array = data.cpu().numpy()
    value = crc32c.crc32c(array[:_CHECKSUM_AT])
    value = crc32c.crc32c(bytes(4), value)
    return int(crc32c.crc32c(array[_CHECKSUM_AT + 4 :], value))
