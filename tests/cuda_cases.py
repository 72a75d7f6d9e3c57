"""Tensors that the kernels of cuda/ are tested on, and their frames from the reference kernels."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from cuda_simulator import coding

from zipccl_core import ExponentCodec, compress
from zipccl_core.testing import sample_tensors

CODECS = {
    "auto": ExponentCodec(),
    "sigma": ExponentCodec(sigma=0.02),
    "table": ExponentCodec(table=(121, 120, 119, 122, 118, 0, 255)),
    "smallest base": ExponentCodec(sigma=1e-38),
    "largest base": ExponentCodec(sigma=3e38),
}


def normal(numel: int, sigma: float = 0.02, seed: int = 0) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * sigma).bfloat16()


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield from sample_tensors(torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    for numel in (831, 832, 833, 1536, 1537, 2240, 2241, 8191, 8192, 8193, 8200):  # where RAW and thread blocks begin
        yield f"around {numel}", (torch.randn(numel, generator=generator) * 1e-3).bfloat16()
    for low, high in ((0, 1), (0, 9), (1, 2), (3, 14), (244, 255), (253, 255)):  # the ends of all windows
        for zeros in (0.0, 0.3):
            exponents = torch.randint(low, high + 1, (3000,), generator=generator)
            zero = torch.rand(3000, generator=generator) < zeros
            bits = torch.where(zero, 0, exponents << 7 | torch.randint(0, 128, (3000,), generator=generator))
            yield f"exponents {low} to {high}, {zeros:.0%} zeros", bits.to(torch.int16).view(torch.bfloat16)
    yield "a tie", a_tie()
    sparse = (torch.arange(8192) % 16 // 8 * 120 << 7).to(torch.int16)  # zeros and 120, all else escapes
    sparse[1::16] = (torch.arange(512) % 256 << 7).to(torch.int16)
    yield "zeros and escapes", sparse.view(torch.bfloat16)


def a_tie() -> torch.Tensor:
    """Windows at start - 1 and start + 1 cover equally many, and more than the one at start."""
    exponents = torch.tensor([119, 124, 127, 124]).repeat_interleave(8).repeat(64)
    return (exponents << 7).to(torch.int16).view(torch.bfloat16)


def patterns() -> torch.Tensor:
    """Every bf16 pattern, in an order in which blocks compress."""
    bits = torch.arange(65536, dtype=torch.int32)
    return (bits >> 1 | (bits & 1) << 15).to(torch.int16).view(torch.bfloat16)


def specials(numel: int, seed: int = 0) -> torch.Tensor:
    """NaNs with and without payload, infinities, zeros of both signs, subnormals and numbers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor([0x7FC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x8001, 0x7F, 0x807F, 0x7F7F, 0xFF7F])
    bits = chosen[torch.randint(0, chosen.numel(), (numel,), generator=generator)]
    any_bits = torch.randint(0, 65536, (numel,), generator=generator)
    return (
        torch.where(torch.rand(numel, generator=generator) < 0.5, bits, any_bits).to(torch.int16).view(torch.bfloat16)
    )


def reference(tensor: torch.Tensor, codec: ExponentCodec | None = None) -> np.ndarray:
    codec = codec or ExponentCodec()
    return compress(tensor, codec.model_copy(update={"kernels": "reference"})).numpy()


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def packed(cases: Iterable[tuple[torch.Tensor, ExponentCodec, int]]) -> bytes:
    """Tensors, codecs and offsets of the values, as tests/cusim/check.cpp reads them."""
    parts = []
    for tensor, codec, offset in cases:
        frame = reference(tensor, codec)
        base, table = coding(codec)
        parts.append(struct.pack("<iIQQQ", base, offset, table, tensor.numel(), frame.size))
        parts += [as_bytes(tensor), frame.tobytes()]
    return b"".join(parts)


def check_cases() -> bytes:
    """A choice that reaches every branch of the kernels and takes little time."""
    small = [tensor for _, tensor in tensors() if tensor.numel() < 9000]
    cases = [(tensor, CODECS["auto"], 2 * (index % 2)) for index, tensor in enumerate(small[::2])]
    several = [normal(20_000, seed=1), normal(20_000, seed=2), specials(5000), specials(5000, 1), normal(5000)]
    cases += [(tensor, CODECS["auto"], 0) for tensor in several]
    cases.append((normal(40 * 8192 - 100, seed=3), CODECS["auto"], 0))
    for codec in ("table", "sigma"):
        cases += [(tensor, CODECS[codec], 0) for tensor in [*small[1::9], normal(20_000, seed=4)]]
    return packed(cases)
