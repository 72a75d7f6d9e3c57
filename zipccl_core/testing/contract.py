"""The contract that every codec must keep, as a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zipccl_core.codec.base import Codec, compress, decompress
from zipccl_core.codec.frame import DTYPE_CODES, HEADER_NBYTES, Frame
from zipccl_core.codec.reduction import REDUCIBLE, Reduction
from zipccl_core.errors import WireFormatError
from zipccl_core.testing.compare import same_bits


def sample_tensors(dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that have broken codecs, each with a name: every length around a block, every pattern, special values,
    data of all entropies."""
    generator = torch.Generator().manual_seed(seed)
    itemsize = dtype.itemsize

    def random(numel: int) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.randint(0, 2, (numel,), generator=generator, dtype=torch.uint8).view(dtype)
        return torch.randint(0, 256, (numel * itemsize,), generator=generator, dtype=torch.uint8).view(dtype)

    def normal(numel: int, sigma: float) -> torch.Tensor:
        if not dtype.is_floating_point:
            return random(numel)
        return (torch.randn(numel, generator=generator) * sigma).to(dtype)

    for numel in (0, 1, 2, 7, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 5000, 70_001):
        yield f"normal, numel {numel}", normal(numel, 0.02)
        yield f"random bytes, numel {numel}", random(numel)
    for sigma in (1e-40, 1e-30, 1e-3, 1.0, 1e4, 1e30, 3e38):
        yield f"normal, sigma {sigma}", normal(4096, sigma)
    yield "zeros", torch.zeros(3000, dtype=dtype)
    if itemsize == 2:
        yield "every pattern", torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    for share in (0.1, 0.5, 0.62, 0.9, 0.99):
        mask = torch.rand(8192, generator=generator) < share
        yield f"{share:.0%} zeros", torch.where(mask, torch.zeros((), dtype=dtype), normal(8192, 1e-3))
    if dtype.is_floating_point:
        specials = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0]).to(dtype)
        yield "special values", specials.repeat(500)
        scales = torch.exp2(torch.arange(8, dtype=torch.float32) * 4 - 20).repeat_interleave(1024)
        yield "a scale per block", (torch.randn(8192, generator=generator) * scales).to(dtype)
        yield (
            "outliers",
            torch.where(torch.rand(8192, generator=generator) < 1e-2, normal(8192, 1e4), normal(8192, 1e-3)),
        )


def check_codec(codec: Codec) -> None:
    """The contract that every codec must keep, for all dtypes that it supports, on the CPU.

    1. It is a value: its configuration survives a round trip through JSON, and equal configurations are equal codecs.
    2. Its layout depends on numel and dtype only, and no frame exceeds it.
    3. Every bit comes back, whatever the tensor.
    4. Equal tensors give equal bytes, whatever was in the memory before; nothing outside the frame is written.
    5. A frame names its codec, dtype and numel; damaged headers and truncated frames are a `WireFormatError`, and
       with a checksum every flipped bit is.
    6. `decode_reduce` gives the bits of decoding first and reducing then.

    Raises:
        AssertionError: a rule is broken; the message names the tensor.
    """
    copy = type(codec).model_validate_json(codec.model_dump_json())
    assert copy == codec, f"configuration changes in a round trip through JSON: {codec!r} -> {copy!r}"
    dtypes = [dtype for dtype in DTYPE_CODES if codec.supports(dtype)]
    assert dtypes, "codec supports no dtype"
    for dtype in dtypes:
        for name, tensor in sample_tensors(dtype):
            try:
                _check_tensor(codec, f"{dtype}, {name}", tensor)
            except Exception as error:
                if isinstance(error, AssertionError):
                    raise
                raise AssertionError(f"{dtype}, {name}: {type(error).__name__}: {error}") from error
        _check_damage(codec, dtype)
        if dtype in REDUCIBLE:
            _check_reduce(codec, dtype)


def _check_tensor(codec: Codec, name: str, tensor: torch.Tensor) -> None:
    layout = codec.layout(tensor.numel(), tensor.dtype)
    assert layout == codec.layout(tensor.numel(), tensor.dtype), f"{name}: layout changes from call to call"
    frames = []
    for fill in (0x00, 0xA5):
        memory = torch.full((layout.frame_nbytes + 256,), fill, dtype=torch.uint8)
        frame = codec.write(tensor, memory)  # a larger buffer than the layout asks for is allowed
        assert bool((memory[layout.frame_nbytes :] == fill).all()), f"{name}: encode writes behind its frame"
        frames.append(frame.data.clone())
    assert torch.equal(frames[0], frames[1]), f"{name}: bytes depend on what was in the memory before"

    frame = Frame(frames[0], tensor.numel(), tensor.dtype, layout)
    for fill in (0x00, 0xA5):
        memory = torch.full((tensor.numel() * tensor.element_size() + 256,), fill, dtype=torch.uint8)
        end = tensor.numel() * tensor.element_size()
        codec.read(frame, memory[:end].view(tensor.dtype))
        assert torch.equal(memory[:end], tensor.view(torch.uint8)), f"{name}: bits change on the way"
        assert bool((memory[end:] == fill).all()), f"{name}: decode writes behind its output"
    header = frame.header
    assert (header.codec_id, header.numel) == (codec.id, tensor.numel()), (
        f"{name}: header names {header.codec_id}, {header.numel}"
    )
    assert header.frame_nbytes == frames[0].numel(), f"{name}: frame length"


def _check_damage(codec: Codec, dtype: torch.dtype) -> None:
    tensor = next(tensor for name, tensor in sample_tensors(dtype) if name == "normal, numel 5000")
    frame = compress(tensor, codec)
    numel, layout = tensor.numel(), codec.layout(tensor.numel(), dtype)

    def rejects(data: torch.Tensor, what: str, by_itself: bool = True) -> None:
        readers: list[Callable[[], object]] = [
            lambda: codec.read(Frame(data, numel, dtype, layout), torch.empty(numel, dtype=dtype))
        ]
        if by_itself:
            readers.append(lambda: decompress(data))
        for read in readers:
            try:
                read()
            except WireFormatError:
                continue
            raise AssertionError(f"{dtype}: {what} is not a WireFormatError")

    for nbytes in {0, 1, HEADER_NBYTES - 1, HEADER_NBYTES, frame.numel() // 2, frame.numel() - 1}:
        rejects(frame[:nbytes].clone(), f"a frame truncated to {nbytes} of {frame.numel()} bytes")
    # magic, version, dtype, flags, checksum kind, codec, numel, dynamic size, static size
    for position in (0, 3, 4, 5, 6, 7, 16, 32, 46, 48, 55, 60, 127):
        damaged = frame.clone()
        damaged[position] ^= 0x40
        # a frame alone cannot tell a wrong numel of as many blocks; who expects a numel can
        rejects(damaged, f"a header with byte {position} damaged", by_itself=position != 32)
    if codec.checksum != "none":
        for position in range(0, frame.numel(), max(1, frame.numel() // 400)):
            damaged = frame.clone()
            damaged[position] ^= 1 << (position % 8)
            if position >= 64:
                rejects(damaged, f"a flipped bit in byte {position}")


def _check_reduce(codec: Codec, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(5000, generator=generator).to(dtype) for _ in range(3)]
    layout = codec.layout(5000, dtype)
    frames = [codec.write(part, torch.empty(layout.frame_nbytes, dtype=torch.uint8)) for part in parts]
    for order in ("fp32", "gloo"):
        reduction = Reduction(order, average=True, total=15_000, offset=5000)
        wanted, came = torch.empty(5000, dtype=dtype), torch.empty(5000, dtype=dtype)
        reduction.reduce(parts, wanted)
        codec.decode_reduce([frames[0], parts[1], frames[2]], came, reduction)
        assert same_bits(wanted, came), f"{dtype}: decode_reduce differs from decode, then reduce ({order})"
