"""The CUDA kernels on a CPU (tests/cusim), in each variant: their frames are those of the reference kernels, byte for
byte."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_cases import CODECS, as_bytes, normal, patterns, reference, specials, tensors
from cuda_simulator import MAX_JOBS, VARIANTS, Parts, Simulator, build, split, static_end
from hypothesis import given, settings
from hypothesis import strategies as st

from zipccl_core import ExponentCodec, Frame, compress
from zipccl_core.codec.frame import HEADER_NBYTES
from zipccl_core.kernels import Window
from zipccl_core.kernels.reference import KERNELS

HERE = Path(__file__).parent
GOLDEN = {
    name: (codec, tensor)
    for name, (codec, tensor) in runpy.run_path(str(HERE / "golden" / "make.py"))["cases"]().items()
    if isinstance(codec, ExponentCodec) and codec.checksum == "none"
}
BAD_HEADER, BAD_SIZE, BAD_OFFSET, BAD_MODE, BAD_BASE, BAD_ESCAPE_COUNT, BAD_FILLER, OVERFLOW = (
    1 << bit for bit in range(8)
)


@pytest.fixture(scope="module", params=VARIANTS)
def simulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++)")
    return Simulator(build(compiler, tmp_path_factory.mktemp("cusim"), variant=request.param))


# ---- bytes ----


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_file(simulator: Simulator, name: str) -> None:
    codec, tensor = GOLDEN[name]
    frame = np.fromfile(HERE / "golden" / f"{name}.frame", np.uint8)
    assert simulator.encode(tensor, codec).tobytes() == frame.tobytes()
    status, values = simulator.decode(frame, tensor.numel())
    assert (status, values.tobytes()) == (0, as_bytes(tensor))


def test_a_frame_with_a_checksum_is_decoded(simulator: Simulator) -> None:
    frame = np.fromfile(HERE / "golden" / "checksum.frame", np.uint8)
    values = np.fromfile(HERE / "golden" / "checksum.input", np.uint8)
    status, decoded = simulator.decode(frame, values.size // 2)
    assert (status, decoded.tobytes()) == (0, values.tobytes())


@pytest.mark.parametrize("way", CODECS)
def test_bytes_are_the_references_and_all_bits_come_back(simulator: Simulator, way: str) -> None:
    raw, modes = 0, set()
    for name, tensor in [*tensors(), ("every pattern, compressible", patterns())]:
        wanted = reference(tensor, CODECS[way])
        assert np.array_equal(simulator.encode(tensor, CODECS[way]), wanted), name
        status, values = simulator.decode(wanted, tensor.numel())
        assert (status, values.tobytes()) == (0, as_bytes(tensor)), name
        raw += wanted[6]
        if not wanted[6]:
            n_blocks = -(-tensor.numel() // 1024)
            meta = HEADER_NBYTES + -(-4 * n_blocks // 128) * 128
            modes |= set(wanted[meta + 1 : meta + 2 * n_blocks : 2].tolist())
    assert raw > 20
    assert modes == {"auto": {0, 1}, "table": {2}}.get(way, {0})


def test_captured_payloads(simulator: Simulator) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    payloads = safetensors.load_file(HERE / "data" / "captures.safetensors")
    for name in ("grads_all_reduce", "moe_forward_dispatch"):
        tensor = payloads[name][:50_000]
        wanted = compress(tensor, ExponentCodec()).numpy()
        assert np.array_equal(simulator.encode(tensor), wanted), name
        status, values = simulator.decode(wanted, tensor.numel())
        assert (status, values.tobytes()) == (0, as_bytes(tensor)), name


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(0, 5000),
    seed=st.integers(0, 2**32 - 1),
    low=st.integers(0, 255),
    width=st.integers(1, 40),
    strangers=st.sampled_from([0.0, 0.01, 0.3]),
    zeros=st.sampled_from([0.0, 0.01, 0.5]),
    offset=st.sampled_from([0, 2, 6, 8]),
)
def test_any_tensor(
    simulator: Simulator,
    numel: int,
    seed: int,
    low: int,
    width: int,
    strangers: float,
    zeros: float,
    offset: int,
) -> None:
    """Exponents of a window, and others, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponents = low + torch.randint(0, width, (numel,), generator=generator).clamp(max=255 - low)
    strange = torch.rand(numel, generator=generator) < strangers
    exponents = torch.where(strange, torch.randint(0, 256, (numel,), generator=generator), exponents)
    exponents[torch.rand(numel, generator=generator) < zeros] = 0
    rest = torch.randint(0, 256, (numel,), generator=generator)
    tensor = (exponents << 7 | (rest & 0x80) << 8 | rest & 0x7F).to(torch.int16).view(torch.bfloat16)
    wanted = compress(tensor, ExponentCodec()).numpy()
    assert np.array_equal(simulator.encode(tensor, offset=offset), wanted)
    status, values = simulator.decode(wanted, numel, offset=offset)
    assert (status, values.tobytes()) == (0, as_bytes(tensor))


@pytest.mark.parametrize("offset", [2, 4, 8, 14])
def test_values_are_aligned_to_two_bytes(simulator: Simulator, offset: int) -> None:
    for numel in (3000, 4096):
        for sigma in (0.02, 1e-39):
            tensor = normal(numel, sigma)
            wanted = reference(tensor)
            assert np.array_equal(simulator.encode(tensor, offset=offset), wanted)
            status, values = simulator.decode(wanted, numel, offset=offset)
            assert (status, values.tobytes()) == (0, as_bytes(tensor))


def test_more_escapes_than_fit_make_a_raw_frame(simulator: Simulator) -> None:
    """At the limit, and one escape beyond: 4096 values leave room for 2304 escapes."""
    tensor = torch.ones(4096).bfloat16()
    for n_escapes, raw in ((2304, False), (2305, True)):
        bits = tensor.view(torch.int16).clone()
        stranger = torch.arange(4096) % 8 != 0  # no sampled value
        bits[stranger.nonzero()[:n_escapes, 0]] = 0x10 << 7
        frame = simulator.encode(bits.view(torch.bfloat16))
        assert np.array_equal(frame, reference(bits.view(torch.bfloat16)))
        assert bool(frame[6]) is raw


# ---- batches, frames in two pieces ----


def jobs_of_all_kinds() -> list[torch.Tensor]:
    """Short and long, RAW and not, none with thread blocks in multiples of another's."""
    numels = (0, 1, 5000, 832, 833, 33_000, 2048, 0, 8192, 8193, 40_000, 70)
    return [
        *(normal(numel, seed=index) for index, numel in enumerate(numels)),
        specials(3000),
        torch.arange(4096, dtype=torch.int16).mul(37).view(torch.bfloat16),
        specials(9000, 1),
    ]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("way", ["auto", "table"])
def test_a_batch_of_different_jobs(simulator: Simulator, apart: bool, way: str) -> None:
    jobs, codec = jobs_of_all_kinds(), CODECS[way]
    wanted = [reference(job, codec) for job in jobs]
    numels = [job.numel() for job in jobs]
    for offset, resident, backwards in ((0, 1, False), (2, 3, True), (6, 64, True), (8, 2, False)):
        schedule = {"offset": offset, "resident": resident, "backwards": backwards}
        encoded = simulator.encode_batch(jobs, codec, apart=apart, sizes=backwards, **schedule)
        for frame, expected in zip(encoded, wanted, strict=True):
            assert np.array_equal(frame.whole(), expected)
        frames = [split(frame, numel) for frame, numel in zip(wanted, numels, strict=True)]
        status, values = simulator.decode_batch(frames, numels, **schedule)
        assert status == [0] * len(jobs)
        assert [each.tobytes() for each in values] == [as_bytes(job) for job in jobs]


def test_a_full_batch(simulator: Simulator) -> None:
    jobs = [normal(500 + 37 * index, seed=index) for index in range(MAX_JOBS)]
    wanted = [reference(job) for job in jobs]
    for frame, expected in zip(simulator.encode_batch(jobs), wanted, strict=True):
        assert np.array_equal(frame.whole(), expected)
    numels = [job.numel() for job in jobs]
    status, values = simulator.decode_batch(
        [split(frame, numel) for frame, numel in zip(wanted, numels, strict=True)], numels
    )
    assert status == [0] * MAX_JOBS
    assert [each.tobytes() for each in values] == [as_bytes(job) for job in jobs]


def test_each_job_of_a_batch_has_its_own_status(simulator: Simulator) -> None:
    jobs = [normal(3000, seed=index) for index in range(4)]
    frames = [split(reference(job), 3000) for job in jobs]
    frames[1].static[0] = 0
    frames[2].static[128] = 1
    frames[3] = Parts(frames[3].static, frames[3].dynamic[:0])
    status, values = simulator.decode_batch(frames, [3000] * 4)
    assert status == [0, BAD_HEADER, BAD_OFFSET, OVERFLOW]
    assert values[0].tobytes() == as_bytes(jobs[0])


def test_a_part_of_the_dynamic_part_is_an_overflow(simulator: Simulator) -> None:
    """Of an escape's frame and of a RAW one; with the rest it is decoded."""
    for tensor, raw in ((normal(20_000), False), (specials(9000), True)):
        frame = split(reference(tensor), tensor.numel())
        assert bool(frame.static[6]) is raw
        assert frame.dynamic.size > 0
        for room in (0, 1, frame.dynamic.size - 128, frame.dynamic.size - 1):
            part = Parts(frame.static, frame.dynamic[:room].copy())
            assert simulator.decode_batch([part], [tensor.numel()])[0] == [OVERFLOW]
        status, values = simulator.decode_batch([frame], [tensor.numel()])
        assert (status, values[0].tobytes()) == ([0], as_bytes(tensor))


# ---- one pass, any order ----


def test_the_order_of_threads_and_blocks_does_not_change_the_bytes(simulator: Simulator) -> None:
    """And neither do earlier launches: nothing is cleared between them, and their sizes differ. 40 thread blocks look
    back further than one warp sees at once."""
    large, small = normal(40 * simulator.values_per_thread_block - 100, seed=3), normal(20_000)
    wanted = {large: compress(large, ExponentCodec()).numpy(), small: reference(small)}
    epoch = int(simulator.state[0])
    runs = [(large, 40, True), (small, 3, True), (large, 7, False), (small, 1, False), (small, 3, True)]
    for tensor, resident, backwards in runs:
        assert np.array_equal(simulator.encode(tensor, resident=resident, backwards=backwards), wanted[tensor])
    assert int(simulator.state[0]) == epoch + len(runs)


def test_the_epoch_starts_again(simulator: Simulator) -> None:
    tensor = normal(20_000, seed=4)
    simulator.state[0] = (1 << 30) - 1
    for _ in range(2):
        assert np.array_equal(simulator.encode(tensor), reference(tensor))
    assert int(simulator.state[0]) == 1


def test_a_raw_frame_gives_way_to_one_that_is_not(simulator: Simulator) -> None:
    """A launch leaves nothing behind that the next one into the same memory, as in a replayed graph, would see."""
    tensors = [torch.randn(4096).bfloat16(), torch.arange(4096, dtype=torch.int16).mul(37).view(torch.bfloat16)] * 2
    frames = [simulator.encode(tensor) for tensor in tensors]
    assert [int(frame[6]) for frame in frames] == [0, 1, 0, 1]
    for frame, tensor in zip(frames, tensors, strict=True):
        assert np.array_equal(frame, reference(tensor))


# ---- damage ----


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [
        (0, 0, BAD_HEADER),
        (4, 2, BAD_HEADER),
        (6, 2, BAD_HEADER),
        (6, 1, BAD_SIZE),
        (7, 2, BAD_HEADER),
        (8, 1, BAD_HEADER),
        (23, 0, BAD_HEADER),
        (32, 0, BAD_HEADER),
        (36, 1, BAD_HEADER),
        (41, 0x70, BAD_SIZE),
        (47, 0x80, BAD_SIZE),
        (48, 0, BAD_HEADER),
        (56, 1, BAD_HEADER),
        (127, 1, BAD_HEADER),
        (128, 1, BAD_OFFSET),
        (128 + 7, 1, BAD_OFFSET),
        (128 + 4, 10, BAD_ESCAPE_COUNT),
        (128 + 128, 250, BAD_BASE),
        (128 + 129, 3, BAD_MODE),
        (128 + 129, 2, BAD_MODE),
        (128 + 256 + 2 * 1408 + 1023, 1, BAD_FILLER),
        (128 + 256 + 3 * 1408 - 1, 0x7F, BAD_FILLER | BAD_ESCAPE_COUNT),
        (128 + 256 + 3 * 1408 - 129, 0x7F, BAD_FILLER),
    ],
)
def test_damage_is_found(simulator: Simulator, at: int, value: int, fault: int) -> None:
    frame = reference(normal(2500, seed=19)).copy()
    assert simulator.decode(frame, 2500)[0] == 0
    frame[at] = value
    for backwards in (False, True):
        status, _ = simulator.decode(frame, 2500, backwards=backwards)
        assert status & fault, f"status {status:#x}"
        reduced, _ = simulator.decode_reduce([split(frame, 2500)], 2500, backwards=backwards)
        assert reduced == [status]


def test_bases_of_modes_are_checked(simulator: Simulator) -> None:
    for codec, wrong in ((CODECS["table"], 1), (CODECS["auto"], 0), (CODECS["auto"], 251)):
        sparse = normal(2048, seed=5)
        sparse[torch.rand(2048, generator=torch.Generator().manual_seed(6)) < 0.5] = 0
        frame = reference(sparse, codec).copy()
        assert frame[128 + 129] in (1, 2)
        frame[128 + 128] = wrong
        assert simulator.decode(frame, 2048)[0] == BAD_BASE


def test_the_largest_base_is_decoded(simulator: Simulator) -> None:
    """249 is allowed in mode 0, though no encoder chooses it: exponents 249 to 255."""
    exponents = torch.randint(249, 256, (2048,), generator=torch.Generator().manual_seed(8))
    tensor = (exponents << 7).to(torch.int16).view(torch.bfloat16)
    frame = compress(tensor, ExponentCodec(kernels="reference")).clone()
    layout = ExponentCodec().layout(2048, torch.bfloat16)
    parts = Frame(torch.zeros(layout.frame_nbytes, dtype=torch.uint8), 2048, torch.bfloat16, layout)
    parts.buffer[:HEADER_NBYTES] = frame[:HEADER_NBYTES]
    KERNELS.encode(tensor.view(torch.int16), parts.static, parts.dynamic, parts.dynamic_nbytes, Window(base=249), 1)
    assert int(parts.dynamic_nbytes) == 0
    status, values = simulator.decode(parts.data.numpy(), 2048)
    assert (status, values.tobytes()) == (0, as_bytes(tensor))


def test_a_size_near_two_to_the_64_is_refused(simulator: Simulator) -> None:
    frame = reference(torch.zeros(2048).bfloat16()).copy()
    frame[40:48] = 0xFF
    assert simulator.decode(frame, 2048)[0] == BAD_SIZE


def test_truncated_frames_are_refused(simulator: Simulator) -> None:
    """Header and static part are there, as a caller must make sure; escapes are missing."""
    frame = reference(normal(2500, seed=7))
    for nbytes in (static_end(2500), frame.size - 128, frame.size - 1):
        assert simulator.decode(frame[:nbytes].copy(), 2500)[0] == OVERFLOW
