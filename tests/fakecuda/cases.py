"""What tests of the CUDA kernels through PyCUDA encode, and what must come of it."""

from __future__ import annotations

import torch
from fakecuda import harness
from torch import Tensor

from zipccl_core import ExponentCodec, compress
from zipccl_core.codec.reduction import Reduction
from zipccl_core.kernels import FrameKernels, Split, Window, cuda
from zipccl_core.kernels.jobs import static_frame_nbytes

PER_BLOCK = Window()


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def noise(numel: int) -> Tensor:
    """Every pattern equally often: RAW."""
    bits = torch.randint(-(1 << 15), 1 << 15, (numel,), generator=torch.Generator().manual_seed(numel))
    return bits.to(torch.int16).view(torch.bfloat16)


def some_tensors() -> list[Tensor]:
    return [gaussian(0), gaussian(1), gaussian(1000), noise(5000), gaussian(20_001)[1:], gaussian(8192), noise(831)]


def reference(tensor: Tensor, window: Window = PER_BLOCK) -> Tensor:
    frame = compress(tensor, ExponentCodec(table=window.table, kernels="reference"))
    assert window.base is None
    return frame


def buffers_for(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.full((128 + -(-2 * tensor.numel() // 128) * 128,), 0xA5, dtype=torch.uint8) for tensor in tensors]


def split(frame: Tensor, numel: int, came: int | None = None) -> Split:
    at = static_frame_nbytes(numel)
    return Split(frame[:at].clone(), frame[at:][:came].clone())


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def load(variant: str = "registers", index: int = 0) -> tuple[cuda.CudaKernels, harness.Streams]:
    streams = harness.Streams(index)
    return cuda.load(index, variant=variant, streams=streams), streams


def check(kernels: FrameKernels, tensors: list[Tensor], window: Window = PER_BLOCK) -> None:
    """Encodes and decodes, and compares with the reference. The launches must run at once."""
    buffers = buffers_for(tensors)
    sizes = kernels.encode_frames(tensors, buffers, window)
    assert (sizes.dtype, sizes.shape) == (torch.int64, (len(tensors),))
    frames = [reference(tensor, window) for tensor in tensors]
    for tensor, buffer, frame, size in zip(tensors, buffers, frames, sizes.tolist(), strict=True):
        assert torch.equal(buffer[: frame.numel()], frame), f"{tensor.numel()} values"
        assert size == int(frame[40:48].view(torch.int64))
    outs = [torch.zeros_like(tensor) for tensor in tensors]
    parts = [split(frame, tensor.numel()) for frame, tensor in zip(frames, tensors, strict=True)]
    status = kernels.decode_frames(parts, outs)
    assert status.dtype == torch.int32
    assert status.tolist() == [0] * len(tensors)
    for tensor, out in zip(tensors, outs, strict=True):
        assert same(out, tensor)


def check_reduce(kernels: FrameKernels, n_ranks: int, numel: int, average: bool, own: int = 0) -> None:
    values = [gaussian(numel, seed) if seed % 3 else noise(numel) for seed in range(n_ranks)]
    values = [torch.where(value.isfinite(), value, 1) for value in values]  # sums of infinities are test_cuda_kernels'
    wanted = torch.empty(numel, dtype=torch.bfloat16)
    Reduction("fp32", average, numel, 0).reduce(values, wanted)
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    parts: list[Split | Tensor] = [split(reference(value), numel) for value in values]
    parts[own] = values[own]
    for dtype, expected in ((torch.bfloat16, wanted), (torch.float32, total / n_ranks if average else total)):
        out = torch.empty(numel, dtype=dtype)
        status = kernels.decode_reduce(parts, out, n_ranks if average else 1)
        assert status.tolist() == [0] * n_ranks
        assert same(out, expected)
