"""The CUDA kernels on a CPU (tests/cusim): their frames are those of the reference kernels, byte for byte."""

from __future__ import annotations

import ctypes
import runpy
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from zipccl_core import ExponentCodec, Frame, compress
from zipccl_core.codec.frame import HEADER_NBYTES
from zipccl_core.codec.gaussian import window_start
from zipccl_core.kernels import Window
from zipccl_core.kernels.reference import KERNELS
from zipccl_core.testing import sample_tensors

HERE = Path(__file__).parent
SOURCE = HERE.parent / "cuda" / "exponent.cu"
SOURCES = [HERE / "cusim" / "exponent.cpp", HERE / "cusim" / "cusim.cpp"]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-parentheses", "-Wno-unknown-pragmas"]  # "#pragma unroll"
GOLDEN = {
    name: (codec, tensor)
    for name, (codec, tensor) in runpy.run_path(str(HERE / "golden" / "make.py"))["cases"]().items()
    if isinstance(codec, ExponentCodec) and codec.checksum == "none"
}
BAD_HEADER, BAD_SIZE, BAD_OFFSET, BAD_MODE, BAD_BASE, BAD_ESCAPE_COUNT, BAD_FILLER = (1 << bit for bit in range(7))
GUARD = 256


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield from sample_tensors(torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    for numel in (831, 832, 833, 1536, 1537, 2240, 2241, 8191, 8192, 8193, 8200):  # where RAW and thread blocks begin
        yield f"around {numel}", (torch.randn(numel, generator=generator) * 1e-3).bfloat16()
    for low, high in ((0, 1), (0, 9), (1, 2), (3, 14), (244, 255), (253, 255)):  # the ends of all windows
        exponents = torch.randint(low, high + 1, (3000,), generator=generator)
        zero = torch.rand(3000, generator=generator) < 0.3
        bits = torch.where(zero, 0, exponents << 7 | torch.randint(0, 128, (3000,), generator=generator))
        yield f"exponents {low} to {high}", bits.to(torch.int16).view(torch.bfloat16)
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


def reference(tensor: torch.Tensor, codec: ExponentCodec | None = None) -> np.ndarray:
    codec = codec or ExponentCodec()
    return compress(tensor, codec.model_copy(update={"kernels": "reference"})).numpy()


def coding(codec: ExponentCodec) -> tuple[int, int]:
    """`base` and `table` as the kernel takes them."""
    table = 0 if codec.table is None else int.from_bytes(bytes(codec.table), "little")
    return -1 if codec.sigma is None else window_start(codec.sigma), table


def misplaced(nbytes: int, offset: int) -> np.ndarray:
    """uint8, `offset` bytes behind a multiple of 16."""
    memory = np.full(nbytes + 32, 0xA5, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + nbytes]


class Simulator:
    """The kernels as functions on numpy arrays."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.state = np.zeros(1 + 64, np.uint64)  # never cleared: each encoding leaves it as the next one needs it

    def encode(
        self,
        tensor: torch.Tensor,
        codec: ExponentCodec | None = None,
        resident: int = 3,
        backwards: bool = True,
        offset: int = 0,
    ) -> np.ndarray:
        """The frame; checks that nothing is written behind the memory that the layout asks for."""
        codec, numel = codec or ExponentCodec(), tensor.numel()
        values = misplaced(2 * numel, offset)
        values[:] = tensor.view(torch.uint8).numpy()
        layout = codec.layout(numel, torch.bfloat16)
        buffer = np.full(layout.frame_nbytes + GUARD, 0xA5, np.uint8)
        base, table = coding(codec)
        failed = self.library.cusim_encode(
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_uint64(numel),
            ctypes.c_void_p(buffer.ctypes.data),
            base,
            ctypes.c_uint64(table),
            ctypes.c_void_p(self.state.ctypes.data),
            resident,
            backwards,
        )
        assert not failed
        assert (buffer[-GUARD:] == 0xA5).all()
        return Frame(torch.from_numpy(buffer), numel, torch.bfloat16, layout).data.numpy()

    def decode(self, frame: np.ndarray, numel: int, offset: int = 0, backwards: bool = True) -> tuple[int, np.ndarray]:
        """Status and values; checks that nothing is written behind them."""
        buffer, status = misplaced(2 * numel + GUARD, offset), ctypes.c_uint32(0)
        failed = self.library.cusim_decode(
            ctypes.c_void_p(frame.ctypes.data),
            ctypes.c_uint64(frame.size),
            ctypes.c_void_p(buffer.ctypes.data),
            ctypes.c_uint64(numel),
            ctypes.byref(status),
            backwards,
        )
        assert not failed
        assert (buffer[2 * numel :] == 0xA5).all()
        return status.value, buffer[: 2 * numel]


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler (g++)")
    return found


@pytest.fixture(scope="module")
def simulator(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    library = tmp_path_factory.mktemp("cusim") / "exponent.so"
    subprocess.run([compiler, *FLAGS, "-O2", "-shared", "-fPIC", *SOURCES, "-o", library], check=True)
    return Simulator(library)


# ---- bytes ----


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_file(simulator: Simulator, name: str) -> None:
    codec, tensor = GOLDEN[name]
    frame = np.fromfile(HERE / "golden" / f"{name}.frame", np.uint8)
    assert simulator.encode(tensor, codec).tobytes() == frame.tobytes()
    status, values = simulator.decode(frame, tensor.numel())
    assert status == 0
    assert values.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_a_frame_with_a_checksum_is_decoded(simulator: Simulator) -> None:
    frame = np.fromfile(HERE / "golden" / "checksum.frame", np.uint8)
    values = np.fromfile(HERE / "golden" / "checksum.input", np.uint8)
    status, decoded = simulator.decode(frame, values.size // 2)
    assert (status, decoded.tobytes()) == (0, values.tobytes())


WAYS = {
    "auto": ExponentCodec(),
    "sigma": ExponentCodec(sigma=0.02),
    "table": ExponentCodec(table=(121, 120, 119, 122, 118, 0, 255)),
    "smallest base": ExponentCodec(sigma=1e-38),
    "largest base": ExponentCodec(sigma=3e38),
}


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_the_references_and_all_bits_come_back(simulator: Simulator, way: str) -> None:
    raw, modes = 0, set()
    for name, tensor in [*tensors(), ("every pattern, compressible", patterns())]:
        wanted = reference(tensor, WAYS[way])
        assert np.array_equal(simulator.encode(tensor, WAYS[way]), wanted), name
        status, values = simulator.decode(wanted, tensor.numel())
        assert status == 0, name
        assert values.tobytes() == tensor.view(torch.uint8).numpy().tobytes(), name
        raw += wanted[6]
        if not wanted[6]:
            n_blocks = -(-tensor.numel() // 1024)
            meta = HEADER_NBYTES + -(-4 * n_blocks // 128) * 128
            modes |= set(wanted[meta + 1 : meta + 2 * n_blocks : 2].tolist())
    assert raw > 20
    assert modes == {"auto": {0, 1}, "table": {2}}.get(way, {0})


@pytest.mark.parametrize("offset", [2, 4, 8, 14])
def test_values_are_aligned_to_two_bytes(simulator: Simulator, offset: int) -> None:
    for numel in (3000, 4096):
        for sigma in (0.02, 1e-39):
            tensor = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * sigma).bfloat16()
            wanted = reference(tensor)
            assert np.array_equal(simulator.encode(tensor, offset=offset), wanted)
            status, values = simulator.decode(wanted, numel, offset=offset)
            assert status == 0
            assert values.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


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


# ---- one pass, any order ----


def test_the_order_of_threads_and_blocks_does_not_change_the_bytes(simulator: Simulator) -> None:
    """And neither do earlier launches: nothing is cleared between them, and their sizes differ. 40 thread blocks look
    back further than one warp sees at once."""
    generator = torch.Generator().manual_seed(3)
    large = (torch.randn(40 * 8192 - 100, generator=generator) * 0.02).bfloat16()
    small = (torch.randn(20_000, generator=generator) * 0.02).bfloat16()
    wanted = {large: reference(large), small: reference(small)}
    epoch = int(simulator.state[0])
    runs = [(large, 40, True), (small, 3, True), (large, 7, False), (small, 1, False), (small, 3, True)]
    for tensor, resident, backwards in runs:
        assert np.array_equal(simulator.encode(tensor, resident=resident, backwards=backwards), wanted[tensor])
    assert int(simulator.state[0]) == epoch + len(runs)


def test_the_epoch_starts_again(simulator: Simulator) -> None:
    tensor = (torch.randn(20_000, generator=torch.Generator().manual_seed(4)) * 0.02).bfloat16()
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
    tensor = (torch.randn(2500, generator=torch.Generator().manual_seed(19)) * 0.02).bfloat16()
    frame = reference(tensor).copy()
    assert simulator.decode(frame, 2500)[0] == 0
    frame[at] = value
    status, _ = simulator.decode(frame, 2500)
    assert status & fault, f"status {status:#x}"


def test_bases_of_modes_are_checked(simulator: Simulator) -> None:
    for codec, wrong in ((WAYS["table"], 1), (WAYS["auto"], 0), (WAYS["auto"], 251)):
        sparse = (torch.randn(2048, generator=torch.Generator().manual_seed(5)) * 0.02).bfloat16()
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
    assert status == 0
    assert values.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_a_size_near_two_to_the_64_is_refused(simulator: Simulator) -> None:
    frame = reference(torch.zeros(2048).bfloat16()).copy()
    frame[40:48] = 0xFF
    assert simulator.decode(frame, 2048)[0] == BAD_SIZE


def test_truncated_frames_are_refused(simulator: Simulator) -> None:
    tensor = (torch.randn(2500, generator=torch.Generator().manual_seed(7)) * 0.02).bfloat16()
    frame = reference(tensor)
    for nbytes in (0, 127, 128, 1000, frame.size - 1):
        assert simulator.decode(frame[:nbytes].copy(), 2500)[0] == BAD_SIZE


# ---- tools ----


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, "nothing moves any more: thread block 0, thread 0 at __syncthreads"),
        (1, "thread block 0, thread 1: lanes of a warp meet at __ballot_sync and __syncwarp"),
        (2, "nothing moves any more: thread block 0, thread 0 at __nanosleep"),
    ],
)
def test_the_simulator_sees_mistakes(
    simulator: Simulator, which: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert simulator.library.cusim_mistake(which) == 1
    assert message in capfd.readouterr().err


def test_nothing_is_read_or_written_outside(compiler: str, tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers, in buffers of exact sizes, damaged frames included; in the
    variant for compute capability 9.0, where the other tests have the one for 8.0."""
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = subprocess.run([compiler, *sanitizers, empty, "-o", tmp_path / "empty"], capture_output=True, check=False)
    if probe.returncode != 0 or subprocess.run([tmp_path / "empty"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} has no runtime of the address and undefined-behaviour sanitizers")
    program = tmp_path / "exponent"
    subprocess.run(
        [compiler, *FLAGS, "-O1", "-g", "-DPROGRAM", "-D__CUDA_ARCH__=900", *sanitizers, *SOURCES, "-o", program],
        check=True,
    )
    cases, n_cases = [], 0
    for way in ("auto", "table"):
        for index, (_, tensor) in enumerate(tensors()):
            if tensor.numel() < 10_000 and (way == "auto" or index % 3 == 0):
                frame = reference(tensor, WAYS[way])
                base, table = coding(WAYS[way])
                cases.append(struct.pack("<iIQQQ", base, 2 * (index % 2), table, tensor.numel(), frame.size))
                cases += [tensor.view(torch.uint8).numpy().tobytes(), frame.tobytes()]
                n_cases += 1
    result = subprocess.run([program], input=b"".join(cases), capture_output=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout == f"{n_cases} cases\n".encode()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_compiles_it_without_spills(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [nvcc, "-std=c++17", f"-arch={architecture}", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
    result = subprocess.run(
        [*command, SOURCE, "-o", tmp_path / "exponent.cubin"], capture_output=True, text=True, check=False
    )
    if "Unsupported gpu architecture" in result.stderr:
        pytest.skip(f"this nvcc does not know {architecture}")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("Compiling entry function") == 3
    assert result.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 3, result.stderr
