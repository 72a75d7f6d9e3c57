"""ExponentCodec: the paper's. A bf16 exponent becomes a 3-bit code in a window of seven; the rest are escapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from zipccl_core.codec.base import Codec
from zipccl_core.codec.frame import Frame, FrameLayout, align
from zipccl_core.codec.gaussian import window_start
from zipccl_core.errors import ConfigError, WireFormatError
from zipccl_core.kernels import BLOCK, Split, Window, select, select_frames, static_nbytes, why_no_cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

    from zipccl_core.codec.reduction import Reduction
    from zipccl_core.kernels import FrameKernels

Exponent = Annotated[int, Field(ge=0, le=255)]


class ExponentCodec(Codec):
    """Lossless for every bf16 bit pattern; wire format `exponent` (docs/wire-format.md, section 3).

    Sign and mantissa stay as they are (8 bits), the exponent becomes a 3-bit code, and an exponent outside of the
    window an escape of a byte: about 11.2 bits a value for what is normally distributed. By default every block of
    1024 values has a window of its own, placed by the mean of its exponents.

    Args:
        sigma: the standard deviation of the values, for one window placed by theory (docs/theory.md, section 2)
            instead.
        table: seven different biased exponents in descending order of use, for an arbitrary table instead of a
            window.
        kernels: which implementation does it. `auto` takes the fastest there is for the tensor's device. All write
            the same bytes.
        threads: CPU threads of the native kernel; by default as many as torch's intra-op setting
            (`torch.get_num_threads()`).
        checksum: `crc32c` puts a checksum over header and body of every frame.
    """

    id: Literal["exponent"] = "exponent"
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    table: tuple[Exponent, ...] | None = None
    kernels: Literal["auto", "reference", "native", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None

    block_size: ClassVar[int] = BLOCK

    @model_validator(mode="after")
    def _one_way_to_choose(self) -> Self:
        if self.sigma is not None and self.table is not None:
            raise ConfigError("sigma and table exclude each other: give one of them, or neither for a window per block")
        if self.table is not None and not len(self.table) == len(set(self.table)) == 7:
            raise ConfigError(f"table needs seven different exponents, got {list(self.table)}")
        return self

    def supports(self, dtype: torch.dtype) -> bool:
        """bfloat16 only, in version 1 of the wire format."""
        return dtype == torch.bfloat16

    def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
        """Sizes by section 3 of the wire format; never more than the tensor's bytes rounded up to 128.

        Raises:
            ValueError: 2^32 values or more.
        """
        if numel >= 1 << 32:
            raise ValueError(f"{numel} values in one frame; the format allows fewer than 2^32: send it in chunks")
        static, raw = static_nbytes(numel), numel * dtype.itemsize
        if static >= align(raw):
            return FrameLayout(raw, align(raw), always_raw=True)
        return FrameLayout(static, align(raw))

    def encode(self, tensor: Tensor, frame: Frame) -> None:
        """Writes offsets, meta, blocks and escapes, or a RAW frame where the escapes would not fit."""
        frames = select_frames(tensor.device, self.kernels)
        if frames is not None:
            frames.encode_frames([tensor], [frame.buffer], self._window)
            return
        values = tensor.reshape(-1).view(torch.int16)
        dynamic, window = frame.dynamic, self._window
        if self.table is not None:
            frame.params[:7] = torch.tensor(self.table, dtype=torch.uint8, device=tensor.device)
        count = frame.dynamic_nbytes
        kernel = select(tensor.device, self.kernels)
        kernel.encode(values, frame.static, dynamic, count, window, self.threads or torch.get_num_threads())
        if int(count) > dynamic.numel():
            frame.write_raw(tensor)

    def decode(self, frame: Frame, out: Tensor) -> None:
        """Restores every bit. Raises WireFormatError where the body contradicts itself."""
        frames = select_frames(out.device, self.kernels)
        if frames is not None:
            (status,) = frames.decode_frames([_split(frame)], [out]).tolist()
            if status:
                raise WireFormatError(self.explain(status))
            return
        kernel = select(out.device, self.kernels)
        n_escapes = int(frame.dynamic_nbytes)
        values = out.reshape(-1).view(torch.int16)
        kernel.decode(
            frame.static, frame.dynamic[:n_escapes], values, frame.params, self.threads or torch.get_num_threads()
        )

    # On a GPU all frames of a call are one launch, and the host waits for nothing.

    def unavailable(self, device: torch.device) -> str | None:
        """The CUDA kernels need PyCUDA, a driver, and nvcc or a wheel that ships them compiled."""
        if device.type == "cpu" or self.kernels == "reference":
            return None
        if self.kernels == "native":
            return "the native kernels run on a CPU; allowed on a GPU: auto, cuda, reference"
        return why_no_cuda(device) if device.type == "cuda" else f"no kernels for {device.type}"

    def write_all(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> Tensor:
        """As the base's; one launch on a GPU, unless there are checksums, which are the host's to compute."""
        frames = self._whole_frames(tensors)
        if frames is None:
            return super().write_all(tensors, buffers)
        return frames.encode_frames(tensors, buffers, self._window)

    def read_all(self, frames: Sequence[Frame], outs: Sequence[Tensor]) -> Tensor:
        """As the base's; one launch on a GPU."""
        kernels = self._whole_frames(outs)
        if kernels is None:
            return super().read_all(frames, outs)
        return kernels.decode_frames([_split(frame) for frame in frames], outs)

    def reduce_all(self, frames: Sequence[Frame | Tensor], out: Tensor, reduction: Reduction) -> Tensor:
        """As the base's; on a GPU, and in fp32 order, one launch that decodes and adds in registers."""
        kernels = self._whole_frames([out]) if reduction.order == "fp32" else None
        if kernels is None:
            return super().reduce_all(frames, out, reduction)
        parts = [_split(frame) if isinstance(frame, Frame) else frame for frame in frames]
        return kernels.decode_reduce(parts, out, len(parts) if reduction.average else 1)

    def explain(self, status: int) -> str:
        """What the CUDA kernels have found."""
        from zipccl_core.kernels import cuda

        return f"damaged frame: {cuda.explain(status)}"

    def _whole_frames(self, tensors: Sequence[Tensor]) -> FrameKernels | None:
        if not tensors or self.checksum != "none":
            return None
        return select_frames(tensors[0].device, self.kernels)

    @property
    def _window(self) -> Window:
        base = None if self.sigma is None else window_start(self.sigma)
        return Window(base, self.table)


def _split(frame: Frame) -> Split:
    return Split(frame.buffer[: frame.layout.static_frame_nbytes], frame.dynamic)
