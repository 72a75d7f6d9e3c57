"""Which lines of the CUDA kernels full, aligned blocks execute, as gcov counts them under the simulator (tests/cusim).

Once with few thread blocks and once with many: a line is common where the number of thread blocks makes a difference.
So what happens once a launch or a frame, and what happens never, is not.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

from machine_code import ROOT, SOURCE, THREADS, VARIANTS, Instruction, Line, UnavailableError

CUSIM = ROOT / "tests" / "cusim"
BLOCKS_PER_WARP = {"registers": 1, "cp_async": 4, "ballot": 1}
RANKS = 3  # of decode_reduce
WARPS = THREADS // 32

# What is encoded: with which base (negative: one is chosen for each block), and whether values are normal, which have
# escapes.
CASES = {"given": (120, False), "chosen": (-1, False), "escapes": (-1, True)}
ESCAPES = 0.025  # of normal values, between 0.021 and 0.030: docs/theory.md, section 3


@dataclass(frozen=True)
class Coverage:
    """Lines of the source that gcov knows, and those among them that are common."""

    known: frozenset[Line]
    common: frozenset[Line]

    def is_rare(self, instruction: Instruction, first_warp: bool = True) -> bool:
        """Whether it, or a call into which it was inlined, is on a line that is not common, or not so in most warps."""
        return any(
            (line in self.known and line not in self.common) or (not first_warp and line in lines_of_one_warp())
            for line in instruction.lines
        )


def coverage(variant: str, architecture: str, case: str = "chosen") -> Coverage:
    """Of one of CASES."""
    cuda_arch = 10 * int(architecture.removeprefix("sm_"))
    return _coverages(variant, 900 if cuda_arch >= 900 else 800)[case]  # the source asks for no more than this


@functools.cache
def _coverages(variant: str, cuda_arch: int) -> dict[str, Coverage]:
    compiler, gcov = shutil.which("g++"), shutil.which("gcov")
    if compiler is None or gcov is None:
        raise UnavailableError("no g++ with gcov, which find out what is on the common path")
    few, many = 8, 16
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "exponent.so"
        flags = ["-std=c++17", "-O0", "-w", "--coverage", "-shared", "-fPIC", f"-D__CUDA_ARCH__={cuda_arch}"]
        sources = [CUSIM / "exponent.cpp", CUSIM / "cusim.cpp"]
        subprocess.run([compiler, *flags, *VARIANTS[variant], *sources, "-o", library], cwd=folder, check=True)
        for case in CASES:
            counts = []
            for n_thread_blocks in (few, many):
                command = [sys.executable, __file__, str(library), variant, case, str(n_thread_blocks)]
                run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                if run.returncode != 0:
                    raise RuntimeError(f"the simulated kernels failed: {run.stdout}{run.stderr}")
                counts.append(_count_lines(gcov, Path(folder)))
            common = (line for line in counts[0] if counts[1][line] - counts[0][line] >= many - few)
            result[case] = Coverage(frozenset(counts[0]), frozenset(common))
    return result


@functools.cache
def lines_of_one_warp() -> frozenset[Line]:
    """What stands under `if (warp == 0` or `if (threadIdx.x == 0`: one warp of a thread block does it."""
    found: set[Line] = set()
    inside: int | None = None  # the indentation of that `if`
    for (file, number), text in source_lines().items():
        indentation = len(text) - len(text.lstrip())
        if number == 1 or (inside is not None and text.strip() and indentation <= inside):
            inside = None
        if inside is not None:
            found.add((file, number))
        elif re.match(r"\s*(\} else )?if \((warp|threadIdx\.x) == 0\b", text):
            inside = indentation
    return frozenset(found)


def _count_lines(gcov: str, folder: Path) -> Counter[Line]:
    """How often each line of cuda/ was executed, since the last call."""
    counts: Counter[Line] = Counter()
    for data in folder.glob("*.gcda"):
        command = [gcov, "--json-format", "--stdout", data.name]
        text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        for row in filter(None, text.splitlines()):
            for file in json.loads(row)["files"]:
                if Path(os.path.normpath(folder / file["file"])).parent == SOURCE.parent:
                    for line in file["lines"]:
                        counts[Path(file["file"]).name, line["line_number"]] += line["count"]
        data.unlink()
    return counts


@functools.cache
def source_lines() -> dict[Line, str]:
    """The text of every line of cuda/."""
    return {
        (path.name, number): line
        for path in SOURCE.parent.glob("*.cu*")
        for number, line in enumerate(path.read_text().splitlines(), 1)
    }


# ---- what gcov watches, in a process of its own ----


def _aligned(nbytes: int) -> ctypes.Array[ctypes.c_char]:
    memory = ctypes.create_string_buffer(nbytes + 256)
    return (ctypes.c_char * nbytes).from_buffer(memory, -ctypes.addressof(memory) % 256)


def _values(numel: int, normal: bool) -> bytes:
    """Normal values, or values whose exponents a window holds."""
    if normal:
        random = Random(1)
        floats = struct.pack(f"<{numel}f", *(random.gauss(0, 0.02) for _ in range(numel)))
        words = bytearray(2 * numel)
        words[0::2], words[1::2] = floats[2::4], floats[3::4]
        return bytes(words)
    exponents = (121, 122, 123, 124, 125, 126)
    return struct.pack(f"<{numel}H", *(exponents[i // 8 % 6] << 7 | i % 128 | i // 128 % 2 << 15 for i in range(numel)))


def _run(library: str, variant: str, case: str, n_thread_blocks: int) -> None:
    """Encodes values that fill so many thread blocks, decodes them, and adds three of them up."""
    simulated = ctypes.CDLL(library)
    base, normal = CASES[case]
    numel = n_thread_blocks * BLOCKS_PER_WARP[variant] * WARPS * 1024
    n_blocks = numel // 1024
    assert 2 * n_blocks % 128 == 0, "no section has padding"
    static_nbytes = (4 + 2 + 1408) * n_blocks
    values, decoded = _aligned(2 * numel), _aligned(2 * numel)
    frame, state, status = _aligned(128 + 2 * numel), _aligned(8 + 8 * n_thread_blocks), _aligned(4 * RANKS)
    values[:] = _values(numel, normal)

    def batch(*pointers: tuple[int, int]) -> bytes:
        """Jobs that read or write `values` (the first of a pair) and a frame (the second)."""
        jobs = b"".join(
            struct.pack("<QQQQQII", v, f, f and f + 128 + static_nbytes, numel, 2 * numel - static_nbytes, 0, 0)
            for v, f in pointers
        )
        return jobs.ljust(48 * 64, b"\0") + struct.pack("<II", len(pointers), 0)

    def launch(kernel: str, arguments: bytes, grid: int) -> None:
        error = ctypes.create_string_buffer(1000)
        if getattr(simulated, f"{kernel}__cusim")(arguments, grid, 256, error, len(error)):
            raise RuntimeError(f"{kernel}: {error.value.decode()}")

    def pointer(array: ctypes.Array[ctypes.c_char]) -> int:
        return ctypes.addressof(array)

    one = batch((pointer(values), pointer(frame)))
    launch("zipccl_exponent_encode", one + struct.pack("<i4xQQQ", base, 0, pointer(state), 0), n_thread_blocks)
    assert frame[6] == b"\0", "RAW"
    n_escapes = int.from_bytes(frame[40:48], "little")
    assert abs(n_escapes / numel - ESCAPES) < 0.005 if normal else n_escapes == 0, f"{n_escapes} escapes"
    one = batch((pointer(decoded), pointer(frame)))
    launch("zipccl_exponent_decode", one + struct.pack("<Q", pointer(status)), n_thread_blocks)
    assert bytes(decoded) == bytes(values)
    several = batch(*[(0, pointer(frame))] * RANKS)
    arguments = several + struct.pack("<QQIfQ", 0, pointer(decoded), 0, 1.0, pointer(status))
    launch("zipccl_exponent_decode_reduce", arguments, n_blocks // WARPS)
    assert bytes(status) == bytes(4 * RANKS), "faults"


if __name__ == "__main__":
    _run(*sys.argv[1:4], int(sys.argv[4]))
