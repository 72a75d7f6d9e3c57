"""The simulator finds mistakes (tests/cusim), and finds none in the kernels: no race, no access outside of a buffer,
nothing undefined."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_cases import check_cases
from cuda_simulator import SANITIZERS, VARIANTS, build

MISTAKES = {
    "half of the threads reach a barrier": (0, "nothing moves any more: thread block 0, thread 0 at __syncthreads"),
    "different collectives": (1, "thread block 0, thread 1: lanes of a warp meet at __ballot_sync and __syncwarp"),
    "nobody comes": (2, "nothing moves any more: thread block 0, thread 0 at __nanosleep"),
    "a misaligned copy": (3, "thread block 0, thread 0: an asynchronous copy is of 4, 8 or 16 bytes, aligned to that"),
}
RACES = {
    "no barrier": (4, "thread block 0, thread 32 writes shared memory that thread block 0, thread 0 has read"),
    "no __syncwarp": (5, "thread block 0, thread 31 reads shared memory that thread block 0, thread 30 has written"),
    "read, then written": (6, "thread block 0, thread 33 writes shared memory that thread block 0, thread 0 has read"),
    "two thread blocks": (7, "thread block 1, thread 0 writes global memory that thread block 0, thread 0 has written"),
    "misaligned": (8, "thread block 0, thread 0 uses misaligned global memory"),
    "a barrier": (9, ""),
    "__syncwarp": (10, ""),
}


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler (g++)")
    return found


@pytest.fixture(scope="module")
def cases() -> bytes:
    return check_cases()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cusim")


@pytest.mark.parametrize("mode", ["plain", "race"])
def test_mistakes_are_seen(compiler: str, directory: Path, mode: str) -> None:
    library = ctypes.CDLL(str(build(compiler, directory, mode=mode)))
    for what, (which, message) in {**MISTAKES, **(RACES if mode == "race" else {})}.items():
        error = ctypes.create_string_buffer(1000)
        assert library.cusim_mistake(which, error, len(error)) == (message != ""), what
        assert error.value.decode().startswith(message), what


def run(program: Path, cases: bytes) -> None:
    result = subprocess.run([program], input=cases, capture_output=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    assert int(result.stdout.split()[0]) > 50


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_thread_races_with_another(compiler: str, directory: Path, cases: bytes, variant: str) -> None:
    run(build(compiler, directory, mode="race", variant=variant, program=True), cases)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_read_or_written_outside(compiler: str, directory: Path, cases: bytes, variant: str) -> None:
    """Under the address and undefined-behaviour sanitizers, in buffers of exact sizes, damaged frames included; in the
    form for compute capability 9.0, where the other tests have the one for 8.0."""
    empty = directory / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = [compiler, *SANITIZERS, empty, "-o", directory / "empty"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} has no runtime of the address and undefined-behaviour sanitizers")
    options = ["-D__CUDA_ARCH__=900"]
    run(build(compiler, directory, mode="sanitizers", variant=variant, program=True, options=options), cases)
