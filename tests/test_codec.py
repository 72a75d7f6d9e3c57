"""Every codec gives every bit back, and all kernels write the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zipccl_core import (
    Codec,
    ConfigError,
    ExponentCodec,
    Frame,
    FrameLayout,
    RawCodec,
    WireFormatError,
    compress,
    decompress,
    kernels,
)
from zipccl_core.codec.frame import align
from zipccl_core.kernels import native
from zipccl_core.testing import bits, check_codec, same_bits, sample_tensors

needs_native = pytest.mark.skipif(native.KERNELS is None, reason="the native kernels were not built")
TABLE = (121, 120, 119, 122, 118, 117, 0)


@pytest.mark.parametrize(
    "codec",
    [
        RawCodec(),
        RawCodec(checksum="crc32c"),
        ExponentCodec(),
        ExponentCodec(kernels="reference"),
        ExponentCodec(checksum="crc32c"),
        ExponentCodec(sigma=0.02),
        ExponentCodec(table=TABLE),
        ExponentCodec(threads=3),
    ],
    ids=repr,
)
def test_contract(codec: Codec) -> None:
    check_codec(codec)


@needs_native
@pytest.mark.parametrize("options", [{}, {"sigma": 0.02}, {"table": TABLE}], ids=str)
def test_kernels_write_the_same_bytes(options: dict) -> None:
    for name, tensor in sample_tensors(torch.bfloat16, seed=3):
        by_reference = compress(tensor, ExponentCodec(kernels="reference", **options))
        by_native = compress(tensor, ExponentCodec(kernels="native", threads=2, **options))
        assert torch.equal(by_reference, by_native), name


@needs_native
def test_bytes_do_not_depend_on_threads() -> None:
    # enough values that several threads really share the work
    tensor = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)).bfloat16()
    one = compress(tensor, ExponentCodec(threads=1))
    assert torch.equal(one, compress(tensor, ExponentCodec(threads=2)))
    assert torch.equal(one, compress(tensor, ExponentCodec(threads=5)))
    out = torch.empty_like(tensor)
    ExponentCodec(threads=4).read(
        Frame(one, tensor.numel(), tensor.dtype, ExponentCodec().layout(tensor.numel(), tensor.dtype)), out
    )
    assert same_bits(out, tensor)


@needs_native
@settings(deadline=None, max_examples=150)
@given(
    numel=st.integers(0, 6000),
    seed=st.integers(0, 2**31),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=12),
    zeros=st.floats(0, 1),
)
def test_hypothesis_tensors(numel: int, seed: int, exponents: list[int], zeros: float) -> None:
    """Values drawn from a few exponents, with random signs and mantissas, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.tensor(exponents)[torch.randint(0, len(exponents), (numel,), generator=generator)]
    sign_mantissa = torch.randint(0, 256, (numel,), generator=generator)
    word = ((sign_mantissa & 0x80) << 8) | (exponent << 7) | (sign_mantissa & 0x7F)
    word = torch.where(torch.rand(numel, generator=generator) < zeros, 0, word)
    tensor = word.to(torch.int16).view(torch.bfloat16)
    frame = compress(tensor, ExponentCodec(kernels="reference"))
    assert torch.equal(frame, compress(tensor, ExponentCodec(kernels="native")))
    assert same_bits(decompress(frame), tensor)
    assert frame.numel() <= 128 + align(2 * numel)


def test_every_pattern_in_every_place() -> None:
    """All 65,536 patterns, NaN payloads and subnormals included, behind each of the first few positions of a block."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for shift in (0, 1, 7, 8, 255, 256, 1023):
        tensor = torch.cat([torch.ones(shift, dtype=torch.bfloat16), every])
        assert same_bits(decompress(compress(tensor, ExponentCodec())), tensor)


def test_mixed_data_in_one_frame_mixes_modes() -> None:
    """A block of zeros and small values has a window of six and zero; its neighbours keep theirs."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(1024, generator=generator).bfloat16()
    sparse = torch.where(
        torch.rand(1024, generator=generator) < 0.5, 0.0, torch.randn(1024, generator=generator)
    ).bfloat16()
    frame = compress(torch.cat([dense, sparse, dense]), ExponentCodec())
    modes = frame[256 + 1 : 256 + 6 : 2].tolist()  # meta begins behind the header and one line of offsets
    assert modes == [0, 1, 0]
    half_zeros = compress(sparse.repeat(20), ExponentCodec())
    assert half_zeros.numel() * 8 / (20 * 1024) < 11.5


def test_bits_per_value_on_normal_data() -> None:
    tensor = (torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    frame = compress(tensor, ExponentCodec())
    assert 11.17 < frame.numel() * 8 / tensor.numel() < 11.30


def test_random_bytes_are_raw_and_bounded() -> None:
    tensor = torch.randint(
        -(2**15), 2**15, (10_000,), dtype=torch.int16, generator=torch.Generator().manual_seed(0)
    ).view(torch.bfloat16)
    frame = compress(tensor, ExponentCodec())
    header = Frame(frame, 10_000, torch.bfloat16, ExponentCodec().layout(10_000, torch.bfloat16)).header
    assert header.raw
    assert frame.numel() == 128 + align(20_000)


def test_captured_payloads() -> None:
    """What really crossed the wire in training runs: bits come back, all kernels agree, and bytes are saved."""
    payloads = safetensors.torch.load_file(Path(__file__).parent / "data" / "captures.safetensors")
    assert len(payloads) >= 6
    for name, tensor in payloads.items():
        frame = compress(tensor, ExponentCodec())
        assert same_bits(decompress(frame), tensor), name
        assert torch.equal(frame, compress(tensor, ExponentCodec(kernels="reference"))), name
        assert 11 < frame.numel() * 8 / tensor.numel() < 12, name


def test_any_memory_layout() -> None:
    base = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for tensor in (base.t(), base[::3], base[:, 5:77], base.view(-1)[1:], base[0, 0], base.expand(3, 64, 96)):
        assert torch.equal(bits(decompress(compress(tensor, ExponentCodec()))), bits(tensor))


def test_frames_inside_of_other_memory() -> None:
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    frame = compress(tensor, ExponentCodec())
    for offset in (1, 3, 8):
        memory = torch.zeros(frame.numel() + 100, dtype=torch.uint8)
        memory[offset : offset + frame.numel()] = frame
        assert same_bits(decompress(memory[offset:]), tensor)
    assert same_bits(decompress(frame.view(2, -1)), tensor)
    with pytest.raises(TypeError, match="uint8"):
        decompress(frame.view(torch.int16))


def test_an_output_must_fit() -> None:
    for codec in (ExponentCodec(), RawCodec()):
        layout = codec.layout(5000, torch.bfloat16)
        frame = Frame(compress(torch.zeros(5000).bfloat16(), codec), 5000, torch.bfloat16, layout)
        for out in (torch.empty(4000, dtype=torch.bfloat16), torch.empty(5000)):
            with pytest.raises(ValueError, match="frame has 5000"):
                codec.read(frame, out)
        with pytest.raises(ValueError, match="contiguous"):
            codec.read(frame, torch.empty(5000, 2, dtype=torch.bfloat16)[:, 0])
        with pytest.raises(ValueError, match="contiguous"):
            codec.write(torch.empty(5000, 2, dtype=torch.bfloat16)[:, 0], frame.buffer)


def test_layout_is_exact_and_monotone() -> None:
    codec = ExponentCodec()
    last = 0
    for numel in range(0, 6000, 7):
        layout = codec.layout(numel, torch.bfloat16)
        assert layout.frame_nbytes == 128 + align(2 * numel)
        assert layout.static_frame_nbytes <= layout.frame_nbytes
        assert layout.frame_nbytes >= last
        last = layout.frame_nbytes
    with pytest.raises(ValueError, match="fewer than 2\\^32"):
        codec.layout(1 << 32, torch.bfloat16)


def test_unsupported_dtype_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"codec 'exponent' does not support torch\.float32"):
        compress(torch.zeros(3), ExponentCodec())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0.1, "table": TABLE}, "exclude each other"),
        ({"table": (1, 1, 2, 3, 4, 5, 6)}, "seven different"),
        ({"sigma": -1.0}, "greater than 0"),
        ({"kernels": "fpga"}, "reference"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"sigmma": 1.0}, "Extra inputs"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentCodec(**options)


def test_native_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native, "KERNELS", None)
    kernels.select.cache_clear()
    kernels.tell_that_not_built.cache_clear()
    try:
        tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
        for _ in range(3):
            assert same_bits(decompress(compress(tensor, ExponentCodec())), tensor)
        assert [record.message for record in caplog.records if "reference kernels" in record.message].__len__() == 1
        with pytest.raises(ConfigError, match="was not built"):
            compress(tensor, ExponentCodec(kernels="native"))
    finally:
        kernels.select.cache_clear()


# ---------------------------------------------------------------------- the registry


def test_unknown_codec_names_the_known_ones() -> None:
    frame = compress(torch.zeros(5).bfloat16(), RawCodec())
    frame[16] = ord("x")
    with pytest.raises(WireFormatError, match="unknown codec 'xaw'; known: .*exponent, .*raw"):
        decompress(frame)


def test_a_taken_id_is_an_error() -> None:
    with pytest.raises(ConfigError, match="codec id 'raw' of .*Impostor is taken by .*RawCodec"):

        class Impostor(Codec):
            id: Literal["raw"] = "raw"

            def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
                return FrameLayout(0, 0)

            def encode(self, tensor: torch.Tensor, frame: Frame) -> None: ...

            def decode(self, frame: Frame, out: torch.Tensor) -> None: ...


def test_an_id_is_needed() -> None:
    with pytest.raises(ConfigError, match="needs an id"):

        class Nameless(RawCodec):
            id: str = ""


def test_codec_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's codec is found by its id when it is asked for."""
    from zipccl_core import registry

    class FromAPackage:
        name = "packaged"

        def load(self) -> None:
            class Packaged(RawCodec):
                id: Literal["packaged"] = "packaged"  # type: ignore[assignment]

    def entry_points(group: str, name: str | None = None) -> list[FromAPackage]:
        return [FromAPackage()] if group == "zipccl.codecs" and name in (None, "packaged") else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    from zipccl_core.codec.base import codecs

    assert "packaged" in codecs.known()
    assert codecs.resolve("packaged").id == "packaged"
