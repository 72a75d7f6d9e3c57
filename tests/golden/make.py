"""Writes the golden files: inputs and frames of wire format version 1. Run it for new cases only; a changed byte in an old one is a new version.

    python tests/golden/make.py
"""

from pathlib import Path

import torch

from zipccl_core import Codec, ExponentCodec, RawCodec, compress

HERE = Path(__file__).parent


def cases() -> dict[str, tuple[Codec, torch.Tensor]]:
    """Codec and input of every golden file."""
    generator = torch.Generator().manual_seed(20261130)

    def normal(numel: int, sigma: float) -> torch.Tensor:
        return (torch.randn(numel, generator=generator) * sigma).bfloat16()

    reference = ExponentCodec(kernels="reference")
    sparse = torch.where(torch.rand(3000, generator=generator) < 0.6, 0.0, normal(3000, 1e-3)).bfloat16()
    scales = torch.exp2(torch.arange(4.0) * 5 - 18).repeat_interleave(1024)[:4000]
    return {
        "empty": (reference, torch.empty(0).bfloat16()),
        "one": (reference, torch.tensor([-0.0]).bfloat16()),
        "normal_1023": (reference, normal(1023, 0.02)),
        "normal_1024": (reference, normal(1024, 0.02)),
        "normal_1025": (reference, normal(1025, 0.02)),
        "normal_5000": (reference, normal(5000, 1.0)),
        "scale_per_block": (reference, (torch.randn(4000, generator=generator) * scales).bfloat16()),
        "sparse": (reference, sparse),
        "zeros": (reference, torch.zeros(2048).bfloat16()),
        "every_eighth_pattern": (reference, torch.arange(0, 65536, 8, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)),
        "sigma": (ExponentCodec(kernels="reference", sigma=0.02), normal(2500, 0.02)),
        "table": (ExponentCodec(kernels="reference", table=(121, 120, 119, 122, 118, 117, 0)), normal(2500, 0.02)),
        "checksum": (ExponentCodec(kernels="reference", checksum="crc32c"), normal(1500, 0.02)),
        "raw": (RawCodec(), normal(100, 0.02)),
    }


if __name__ == "__main__":
    for name, (codec, tensor) in cases().items():
        (HERE / f"{name}.input").write_bytes(bytes(tensor.view(torch.uint8).tolist()))
        (HERE / f"{name}.frame").write_bytes(bytes(compress(tensor, codec).tolist()))
