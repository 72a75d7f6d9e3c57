"""The native CPU kernels: against an oracle, under sanitizers, on another architecture; the reduction against torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native import oracle

HERE = Path(__file__).parent
KERNELS = HERE.parent / "zipccl_core" / "kernels" / "native"
SOURCES = sorted(str(path) for path in KERNELS.glob("*.c") if path.name != "module.c")
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
CROSS_COMPILER = "aarch64-linux-gnu-gcc"


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(map(str, command))}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def build(compiler: str, driver: str, program: Path, *flags: str) -> Path:
    """Compiles a driver of tests/native with the kernels, threads on from 1024 values."""
    source = HERE / "native" / driver
    options = [*WARNINGS, "-DZIPCCL_VALUES_PER_THREAD=1024", "-pthread", f"-I{KERNELS}", *flags]
    run(compiler, *options, source, *SOURCES, "-o", program)
    return program


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler (gcc or clang)")
    return found


@pytest.fixture(params=["auto", "portable"])
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    module = pytest.importorskip("zipccl_core.kernels._native", reason="the native kernels are not built")
    module.force_target(request.param)
    yield module
    module.force_target("auto")


# ---- encode and decode ----


def bell(numel: int, sigma: float, seed: int) -> np.ndarray:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * sigma
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def sparse(numel: int, zeros: float, seed: int) -> np.ndarray:
    values = bell(numel, 0.02, seed)
    return np.where(np.random.default_rng(seed).random(numel) < zeros, values & 0x8000, values)


def few_exponents(numel: int, low: int, high: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    exponents = rng.integers(low, high + 1, numel)
    return (rng.integers(0, 2, numel) << 15 | exponents << 7 | rng.integers(0, 128, numel)).astype(np.uint16)


DATA = {
    "empty": np.zeros(0, np.uint16),
    "one": np.array([0xBF80], np.uint16),
    "zeros": np.zeros(1500, np.uint16),
    "minus zeros": np.full(1025, 0x8000, np.uint16),
    "all patterns": np.arange(65536, dtype=np.uint16),
    "all patterns, shuffled": np.random.default_rng(1).permutation(65536).astype(np.uint16)[:5001],
    "nans and infinities": np.resize(np.array([0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0x3F80], np.uint16), 2100),
    "bell, two blocks": bell(2048, 0.02, 2),
    "bell, tail of 1": bell(3073, 1.0, 3),
    "bell, tail of 9": bell(1033, 1e-30, 4),
    "bell, tail of 1023": bell(1023, 1e30, 5),
    "subnormal": bell(1024, 3e-38, 6),
    "0.1 zeros": sparse(2500, 0.1, 7),
    "0.5 zeros": sparse(2500, 0.5, 8),
    "0.95 zeros": sparse(2500, 0.95, 9),
    "exponents 0 to 9": few_exponents(2100, 0, 9, 10),
    "exponents 1 and 2": few_exponents(1100, 1, 2, 11),
    "exponents 253 to 255": few_exponents(1100, 253, 255, 13),
    "exponents 246 to 255": few_exponents(2100, 246, 255, 13),
    "zeros, 250 to 255": few_exponents(1100, 250, 255, 14) * np.resize([0, 1, 1], 1100).astype(np.uint16),
    "a step in a block": np.concatenate([bell(1500, 1.0, 15), bell(1500, 1e-6, 16)]),
}
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "base 0": {"base": 0},
    "base 121": {"base": 121},
    "base 249": {"base": 249},
    "table": {"table": (121, 0, 120, 255, 119, 1, 122)},
}


def guarded(n: int) -> np.ndarray:
    """n bytes to write, and 64 behind them that nobody may."""
    return np.full(n + 64, 0xA5, np.uint8)


def encode(
    native: Any, values: np.ndarray, capacity: int, base: int | None = None, table: tuple[int, ...] | None = None
) -> tuple[int, np.ndarray, np.ndarray]:
    static, dynamic = guarded(oracle.static_nbytes(len(values))), guarded(capacity)
    n_escapes = native.encode(
        values.ctypes.data,
        len(values),
        static.ctypes.data,
        dynamic.ctypes.data if capacity else 0,
        capacity,
        -1 if base is None else base,
        None if table is None else bytes(table),
        2,
    )
    assert (static[-64:] == 0xA5).all()
    assert (dynamic[-64:] == 0xA5).all()
    return n_escapes, static[:-64], dynamic[:-64]


def decode(
    native: Any, static: np.ndarray, escapes: np.ndarray, numel: int, table: tuple[int, ...] | None = None
) -> tuple[int, np.ndarray]:
    out = guarded(2 * numel)
    params = np.array([] if table is None else table, np.uint8)
    address = 0 if table is None else params.ctypes.data
    code = native.decode(static.ctypes.data, escapes.ctypes.data, len(escapes), numel, address, out.ctypes.data, 2)
    assert (out[-64:] == 0xA5).all()
    return code, out[:-64].view(np.uint16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("data", DATA)
def test_bytes_are_those_of_the_oracle(native: Any, data: str, way: str) -> None:
    values = DATA[data]
    if len(values) > 10_000 and way != "auto":
        values = values[::7].copy()  # the oracle takes its time
    static, escapes = oracle.encode(values, **WAYS[way])
    capacity = oracle.align(len(escapes))

    n_escapes, native_static, dynamic = encode(native, values, capacity, **WAYS[way])
    assert n_escapes == len(escapes)
    assert native_static.tobytes() == static
    assert dynamic.tobytes() == escapes.ljust(capacity, b"\0")

    code, decoded = decode(native, native_static, dynamic[:n_escapes], len(values), WAYS[way].get("table"))
    assert code == 0
    assert decoded.tobytes() == values.tobytes()

    if capacity:
        assert encode(native, values, capacity - 128, **WAYS[way])[0] == -1


def test_data_covers_both_modes_and_the_ends_of_their_bases() -> None:
    """Mode 1 allows base 1, but the rule never has it: the window of seven at 0 covers the same values and zero."""
    chosen = set()
    for values in DATA.values():
        if len(values) <= 10_000:
            static, _ = oracle.encode(values)
            n_blocks = -(-len(values) // 1024)
            meta = static[oracle.align(4 * n_blocks) :]
            chosen |= {(meta[2 * b + 1], meta[2 * b]) for b in range(n_blocks)}
    assert {(0, 0), (0, 248), (1, 2), (1, 250)} <= chosen


@pytest.mark.parametrize("numel", [2_000_003, 3 * 512 * 1024])
def test_threads_do_not_change_the_bytes(native: Any, numel: int) -> None:
    values = np.resize(np.concatenate([bell(100_000, 0.02, 17), sparse(30_000, 0.6, 18)]), numel)
    frames = []
    for threads in (1, 2, 3):
        static, dynamic = guarded(oracle.static_nbytes(numel)), guarded(oracle.align(numel // 8))
        arguments = (values.ctypes.data, numel, static.ctypes.data, dynamic.ctypes.data)
        n_escapes = native.encode(*arguments, len(dynamic) - 64, -1, None, threads)
        assert n_escapes > 0
        frames.append((static.tobytes(), dynamic[:n_escapes].tobytes()))
        out = np.zeros(numel, np.uint16)
        assert native.decode(*arguments[2:], n_escapes, numel, 0, out.ctypes.data, threads) == 0
        assert out.tobytes() == values.tobytes()
        assert native.encode(*arguments, n_escapes // 128 * 128, -1, None, threads) == -1
    assert frames[0] == frames[1] == frames[2]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 1, "offset of a block is out of order or beyond the escapes"),
        (7, 1, "offset of a block is out of order or beyond the escapes"),
        (129, 3, "mode of a block is reserved"),
        (128, 250, "base of a block is not allowed in its mode"),
        (4, 10, "escape count of a block does not match its planes"),
        (256 + 2 * 1408 + 1023, 1, "last block is not filled up with sign-mantissa byte 0 and code 7"),
        (256 + 3 * 1408 - 1, 0x7F, "last block is not filled up with sign-mantissa byte 0 and code 7"),
    ],
)
def test_damage_has_a_message(native: Any, at: int, value: int, message: str) -> None:
    values = bell(2500, 0.02, 19)
    n_escapes, static, dynamic = encode(native, values, 1280)
    assert n_escapes > 0
    static[at] = value
    code, _ = decode(native, static, dynamic[:n_escapes], 2500)
    assert native.message(code) == message


def test_escapes_before_the_first_block_are_refused(native: Any) -> None:
    n_escapes, static, dynamic = encode(native, bell(1024, 0.02, 20), 1024)
    static[0] = 1
    code, _ = decode(native, static, np.roll(dynamic, 1)[: n_escapes + 1], 1024)
    assert native.message(code) == "offset of a block is out of order or beyond the escapes"


def test_mode_of_a_table_is_checked(native: Any) -> None:
    table = (121, 120, 119, 118, 122, 117, 123)
    n_escapes, static, dynamic = encode(native, bell(1024, 0.02, 20), 1024, table=table)
    code, _ = decode(native, static, dynamic[:n_escapes], 1024)
    assert native.message(code) == "mode of a block needs a table, and the frame has none"
    static[128] = 1
    code, _ = decode(native, static, dynamic[:n_escapes], 1024, table)
    assert native.message(code) == "base of a block is not allowed in its mode"


def test_arguments_are_checked(native: Any) -> None:
    assert native.target() in ("avx2", "portable")
    with pytest.raises(TypeError, match="encode takes 8 arguments, got 1"):
        native.encode(0)
    with pytest.raises(ValueError, match="numel is 4294967296"):
        native.encode(0, 2**32, 0, 0, 0, -1, None, 1)
    with pytest.raises(ValueError, match="dynamic_capacity is 100"):
        native.encode(0, 0, 0, 0, 100, -1, None, 1)
    with pytest.raises(ValueError, match="fixed_base is 250"):
        native.encode(0, 0, 0, 0, 0, 250, None, 1)
    with pytest.raises(ValueError, match="table has 6 exponents"):
        native.encode(0, 0, 0, 0, 0, -1, bytes(6), 1)
    with pytest.raises(TypeError):
        native.decode("0", 0, 0, 0, 0, 0, 1)
    with pytest.raises(ValueError, match="target 'sse9' is not available"):
        native.force_target("sse9")


# ---- the reduction ----


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bits are equal, except that a NaN need only be one: torch's payloads depend on its vectorisation."""
    integers = torch.int32 if ours.dtype == torch.float32 else torch.int16
    nan = theirs.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.view(integers)[~nan], theirs.view(integers)[~nan])


def accumulate(native: Any, operands: list[torch.Tensor], threads: int = 2) -> torch.Tensor:
    total = torch.full(operands[0].shape, 123.0)
    for i, operand in enumerate(operands):
        native.accumulate(operand.data_ptr(), operand.numel(), total.data_ptr(), i == 0, threads)
    return total


def round_(native: Any, total: torch.Tensor, divisor: float = 1, threads: int = 2) -> torch.Tensor:
    out = torch.zeros(total.shape, dtype=torch.bfloat16)
    native.round_(total.data_ptr(), total.numel(), divisor, out.data_ptr(), threads)
    return out


def test_the_first_operand_is_copied_exactly(native: Any) -> None:
    operand = all_bf16()
    expected = (operand.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    assert torch.equal(accumulate(native, [operand]).view(torch.int32), expected.view(torch.int32))


def test_accumulate_is_torchs_sum(native: Any) -> None:
    generator = torch.Generator().manual_seed(21)
    operands = [all_bf16()] + [all_bf16()[torch.randperm(65536, generator=generator)] for _ in range(3)]
    expected = operands[0].float()
    for operand in operands[1:]:
        expected = expected + operand.float()
    same_bits(accumulate(native, operands), expected)


def test_round_is_torchs(native: Any) -> None:
    high = torch.arange(65536, dtype=torch.int32) << 16
    for low in (
        0,
        1,
        0x7FFF,
        0x8000,
        0x8001,
        0xFFFF,
    ):  # ties and their neighbours, at every exponent, with NaNs and subnormals
        total = (high | low).view(torch.float32)
        rounded = round_(native, total)
        same_bits(rounded, total.to(torch.bfloat16))
        nan = total.isnan()
        assert nan.any()
        assert (rounded.view(torch.int16)[nan] == 0x7FC0).all()
        for divisor in (2.0, 3.0, 7.0):
            same_bits(round_(native, total, divisor), (total / divisor).to(torch.bfloat16))


def test_reduction_with_threads_and_an_odd_size(native: Any) -> None:
    generator = torch.Generator().manual_seed(22)
    operands = [torch.randn(1_500_001, generator=generator).bfloat16() for _ in range(2)]
    expected = operands[0].float() + operands[1].float()
    for threads in (1, 3):
        total = accumulate(native, operands, threads)
        same_bits(total, expected)
        same_bits(round_(native, total, 2.0, threads), (expected / 2).bfloat16())


# ---- C drivers ----


def test_round_trips_and_damaged_frames_under_sanitizers(compiler: str, tmp_path: Path) -> None:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    probe = subprocess.run([compiler, *sanitizers, empty, "-o", tmp_path / "empty"], capture_output=True, check=False)
    if probe.returncode != 0 or subprocess.run([tmp_path / "empty"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} has no runtime of the address and undefined-behaviour sanitizers")
    fuzz = build(compiler, "fuzz.c", tmp_path / "fuzz", "-O1", "-g", *sanitizers)
    run(fuzz, "500", "20000", "1")


def test_target_does_not_change_the_bytes(compiler: str, tmp_path: Path) -> None:
    checksum = build(compiler, "checksum.c", tmp_path / "checksum", "-O3")
    assert run(checksum, "auto") == run(checksum, "portable")


def test_aarch64_gives_the_same_bytes(compiler: str, tmp_path: Path) -> None:
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"no cross compiler ({CROSS_COMPILER})")
    program = build(CROSS_COMPILER, "checksum.c", tmp_path / "checksum-aarch64", "-O3", "-static")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("compiled for aarch64, but no emulator to run it (qemu-aarch64)")
    assert run(emulator, program) == run(build(compiler, "checksum.c", tmp_path / "checksum", "-O3"))
