"""The wire format: golden files, an oracle of its own, and frames that are not what they should be."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from native import oracle

from zipccl_core import Codec, ExponentCodec, Frame, RawCodec, WireFormatError, compress, decompress
from zipccl_core.codec.frame import Header
from zipccl_core.kernels import native
from zipccl_core.testing import same_bits

GOLDEN = Path(__file__).parent / "golden"
CASES = runpy.run_path(str(GOLDEN / "make.py"))["cases"]()


def read(path: Path) -> torch.Tensor:
    return torch.tensor(list(path.read_bytes()), dtype=torch.uint8)


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.frame")))
def test_golden_file(name: str) -> None:
    frame, tensor = read(GOLDEN / f"{name}.frame"), read(GOLDEN / f"{name}.input").view(torch.bfloat16)
    codec = CASES[name][0]
    assert same_bits(decompress(frame), tensor)
    assert torch.equal(compress(tensor, codec), frame)
    if native.KERNELS is not None and isinstance(codec, ExponentCodec):
        assert torch.equal(compress(tensor, codec.model_copy(update={"kernels": "native"})), frame)


def test_every_case_has_a_golden_file() -> None:
    assert sorted(CASES) == sorted(path.stem for path in GOLDEN.glob("*.frame"))


def frame_of(codec: Codec, numel: int = 5000) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = (torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    return tensor, compress(tensor, codec)


def test_header_field_by_field() -> None:
    """The first 128 bytes against the table in docs/wire-format.md, read by numpy and not by the code under test."""
    _, frame = frame_of(ExponentCodec())
    raw = frame.numpy()
    assert raw[:4].tobytes() == b"ZCCL"
    assert raw[4:8].tolist() == [1, 1, 0, 0]
    assert raw[8:16].view("<u4").tolist() == [0, 1024]
    assert raw[16:32].tobytes() == b"exponent".ljust(16, b"\0")
    numel, dynamic_nbytes, static_nbytes = raw[32:56].view("<u8").tolist()
    assert (numel, static_nbytes) == (5000, 128 + 128 + 5 * 1408)
    assert not raw[56:128].any()
    assert frame.numel() == 128 + static_nbytes + -(-dynamic_nbytes // 128) * 128
    assert not raw[128 + static_nbytes + dynamic_nbytes :].any()


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 0x5B, "not a ZipCCL frame"),
        (4, 2, "wire format version 2; this ZipCCL reads version 1"),
        (5, 3, r"dtype torch\.float32"),
        (5, 99, "unknown dtype code 99"),
        (6, 2, "unknown flags"),
        (7, 9, "unknown checksum kind 9"),
        (8, 1, "without a checksum kind"),
        (12, 1, "block_size"),
        (16, ord("f"), "codec"),
        (33, 1, "numel|dynamic|static"),
        (44, 1, "bytes"),
        (47, 0x80, "negative dynamic size"),
        (49, 1, "static_nbytes|truncated"),
        (60, 1, "reserved"),
        (100, 1, "reserved"),
        (6, 1, "RAW frame has"),
    ],
)
def test_damaged_header(position: int, value: int, message: str) -> None:
    tensor, frame = frame_of(ExponentCodec())
    frame[position] = value
    codec = ExponentCodec()
    layout = codec.layout(tensor.numel(), tensor.dtype)
    with pytest.raises(WireFormatError, match=message):
        codec.read(Frame(frame, tensor.numel(), tensor.dtype, layout), torch.empty_like(tensor))


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_damaged_body(kernels: str) -> None:
    """What contradicts itself in offsets, modes, bases, planes and fillers is found without a checksum."""
    if kernels == "native" and native.KERNELS is None:
        pytest.skip("the native kernels were not built")
    codec = ExponentCodec(kernels=kernels)
    tensor, good = frame_of(codec)
    layout = codec.layout(tensor.numel(), tensor.dtype)
    blocks = 128 + 256
    last = blocks + 4 * 1408
    damages = {
        "first offset": (128, 1),
        "second offset": (132, 1),
        "mode": (256 + 1, 7),
        "base": (256, 255),
        "plane": (blocks + 1024 + 5, None),
        "filler's sign and mantissa": (last + 1023, 1),
        "filler's code": (last + 1024 + 127, 0),
        "number of escapes": (40, None),
    }
    for what, (position, value) in damages.items():
        frame = good.clone()
        if what == "plane":  # turn a block's first codes into escapes
            for plane in range(3):
                frame[position + 128 * plane] = 0
        else:
            frame[position] = value if value is not None else int(frame[position]) ^ 1
        with pytest.raises(WireFormatError):
            codec.read(Frame(frame, tensor.numel(), tensor.dtype, layout), torch.empty_like(tensor))
            pytest.fail(f"{what} was not noticed")


def test_checksum_finds_every_flipped_bit() -> None:
    tensor, good = frame_of(ExponentCodec(checksum="crc32c"), numel=1500)
    codec = ExponentCodec()
    layout = codec.layout(tensor.numel(), tensor.dtype)
    out = torch.empty_like(tensor)
    generator = torch.Generator().manual_seed(0)
    for position in torch.randperm(good.numel(), generator=generator)[:1500].tolist() + list(range(128)):
        frame = good.clone()
        frame[position] ^= 1 << (position % 8)
        with pytest.raises(WireFormatError):
            codec.read(Frame(frame, tensor.numel(), tensor.dtype, layout), out)


def test_checksum_is_crc32c_over_header_and_body() -> None:
    """Against the definition: polynomial 0x82F63B78 bit by bit, the field itself taken as zero."""
    _, frame = frame_of(RawCodec(checksum="crc32c"), numel=40)
    wanted = int.from_bytes(bytes(frame[8:12].tolist()), "little")
    data = bytes(frame[:8].tolist()) + bytes(4) + bytes(frame[12:].tolist())
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc ^ 0xFFFFFFFF == wanted


def test_claims_of_a_header_allocate_nothing() -> None:
    """A frame of 128 bytes that claims 2^31 values is refused for its length, before memory is taken for it."""
    frame = compress(torch.zeros(4).bfloat16(), ExponentCodec())
    frame[32:40] = torch.tensor([1 << 31]).view(torch.uint8)
    with pytest.raises(WireFormatError):
        decompress(frame)
    frame[32:40] = torch.tensor([1 << 40]).view(torch.uint8)
    with pytest.raises(WireFormatError, match="claims"):
        decompress(frame)


def test_oracle_agrees_with_the_header() -> None:
    """The numpy oracle, which shares no code with the kernels, writes the same static part and escapes."""
    tensor, frame = frame_of(ExponentCodec())
    values = tensor.view(torch.int16).numpy().view(np.uint16)
    static, escapes = oracle.encode(values)[:2]
    header = Header.read(frame)
    assert frame[128 : 128 + header.static_nbytes].numpy().tobytes() == bytes(static)
    assert frame[128 + header.static_nbytes :][: header.dynamic_nbytes].numpy().tobytes() == bytes(escapes)
