"""Builds the kernels of cuda/ for a CPU (tests/cusim) and calls them as functions on numpy arrays."""

from __future__ import annotations

import ctypes
import itertools
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from zipccl_core import ExponentCodec
from zipccl_core.codec.frame import HEADER_NBYTES
from zipccl_core.codec.gaussian import window_start

CUSIM = Path(__file__).parent / "cusim"
CUDA = Path(__file__).parent.parent / "cuda"
FLAGS = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-parentheses", "-Wno-unknown-pragmas"]
VARIANTS = {"registers": [], "cp_async": ["-DZIPCCL_CP_ASYNC"], "ballot": ["-DZIPCCL_BALLOT"]}
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RACE = ["-g", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1"]  # only to compile, see cusim.h
THREADS = 256
MAX_JOBS = 64
GUARD = 256
FILL = 0xA5


def source_text() -> str:
    """The kernels in one text, as a host hands them to a compiler."""
    return (CUDA / "exponent.cu").read_text().replace('#include "exponent.cuh"', (CUDA / "exponent.cuh").read_text())


_lock = threading.Lock()


def build(
    compiler: str,
    directory: Path,
    *,
    mode: str = "plain",
    variant: str = "registers",
    program: bool = False,
    kernels: Path = CUDA / "exponent.cu",
    options: Sequence[str] = (),
) -> Path:
    """A library with the kernels or, with tests/cusim/check.cpp, a program.

    Args:
        directory: where objects go; those that do not depend on `kernels` are kept for the next call.
        mode: `plain`, `sanitizers` (address and undefined behaviour) or `race` (see cusim.h).
        kernels: another text in their place.
        options: for the kernels.
    """
    linked = {"plain": [], "race": ["-DCUSIM_RACE"], "sanitizers": SANITIZERS}[mode]
    command, of_variant = [compiler, *FLAGS, "-O1", *linked], VARIANTS[variant]

    def kept(source: str, name: str, *more: str) -> Path:
        made = directory / f"{name}_{mode}.o"
        with _lock:
            if not made.exists():
                subprocess.run([*command, *more, "-c", CUSIM / source, "-o", made], check=True)
        return made

    objects = [kept("cusim.cpp", "cusim")]
    if program:
        objects.append(kept("check.cpp", f"check_{variant}", "-Wno-unused-function", *of_variant))
    result = directory / f"{kernels.stem}_{mode}_{variant}{'' if program else '.so'}"
    instrumented = RACE if mode == "race" else []
    compiled = [*command, *instrumented, *of_variant, f'-DKERNELS="{kernels}"', *options]
    subprocess.run([*compiled, "-c", CUSIM / "exponent.cpp", "-o", f"{result}.o"], check=True)
    kind = [] if program else ["-shared"]
    subprocess.run([*command, *kind, f"{result}.o", *objects, "-o", result], check=True)
    return result


def coding(codec: ExponentCodec) -> tuple[int, int]:
    """`base` and `table` as the encoder takes them."""
    table = 0 if codec.table is None else int.from_bytes(bytes(codec.table), "little")
    return -1 if codec.sigma is None else window_start(codec.sigma), table


def misplaced(nbytes: int, offset: int) -> np.ndarray:
    """uint8, `offset` bytes behind a multiple of 16."""
    memory = np.full(nbytes + 32, FILL, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + nbytes]


class Parts(NamedTuple):
    """A frame in two pieces."""

    static: np.ndarray
    """Header and static part."""
    dynamic: np.ndarray
    """What there is of the dynamic part."""

    def whole(self) -> np.ndarray:
        """The frame: of the dynamic part, what its header says."""
        used = int.from_bytes(self.static[40:48].tobytes(), "little")
        return np.concatenate([self.static, self.dynamic[: -(-used // 128) * 128]])


def static_end(numel: int) -> int:
    """Where the dynamic part begins."""
    return HEADER_NBYTES + -(-ExponentCodec().layout(numel, torch.bfloat16).static_nbytes // 128) * 128


def split(frame: np.ndarray, numel: int) -> Parts:
    """The two pieces of a frame, each in memory of its own."""
    end = static_end(numel)
    return Parts(frame[:end].copy(), frame[end:].copy())


class Simulator:
    """The kernels as functions on numpy arrays. What they leave around the arrays given is checked."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.values_per_thread_block = ctypes.c_uint.in_dll(self.library, "cusim_values_per_thread_block").value
        self.state = np.zeros(1 + 64, np.uint64)  # never cleared: each encoding leaves it as the next one needs it

    def launch(self, kernel: str, parameters: bytes, grid: int, *, resident: int = 3, backwards: bool = True) -> None:
        error = ctypes.create_string_buffer(1000)
        self.library.cusim_configure(resident, backwards)
        function = getattr(self.library, f"zipccl_exponent_{kernel}__cusim")
        assert function(parameters, grid, THREADS, error, len(error)) == 0, error.value.decode()

    def batch(self, jobs: Sequence[tuple[int, int, int, int, int]]) -> tuple[bytes, int]:
        """Jobs (values, frame, dynamic, numel, dynamic_room) as the kernels take them, and the grid."""
        blocks = [max(1, -(-job[3] // self.values_per_thread_block)) for job in jobs]
        first = [0, *itertools.accumulate(blocks)]
        packed = b"".join(struct.pack("<QQQQQII", *job, begin, 0) for job, begin in zip(jobs, first, strict=False))
        return packed.ljust(48 * MAX_JOBS, b"\xff") + struct.pack("<II", len(jobs), 0), first[-1]

    def encode_batch(
        self,
        tensors: Sequence[torch.Tensor],
        codec: ExponentCodec | None = None,
        *,
        offset: int = 0,
        apart: bool = True,
        sizes: bool = True,
        **schedule: int,
    ) -> list[Parts]:
        """The frames of one launch; their two parts are neighbours or apart. Values begin behind `offset`."""
        base, table = coding(codec or ExponentCodec())
        jobs, results, inputs, guards = [], [], [], []
        for tensor in tensors:
            numel, end = tensor.numel(), static_end(tensor.numel())
            room = HEADER_NBYTES + max(end - HEADER_NBYTES, -(-2 * numel // 128) * 128)
            values = misplaced(2 * numel, offset)
            values[:] = tensor.view(torch.uint8).numpy()
            gap = GUARD if apart else 0
            memory = misplaced(room + gap + GUARD, 0)
            static, dynamic = memory[:end], memory[end + gap : room + gap]
            jobs.append((values.ctypes.data, static.ctypes.data, static.ctypes.data + end + gap, numel, 0))
            results.append(Parts(static, dynamic))
            inputs.append(values)  # to keep them alive
            guards += [memory[end : end + gap], memory[room + gap :]]
        packed, grid = self.batch(jobs)
        if self.state.size < 1 + grid:
            self.state = np.concatenate([self.state, np.zeros(1 + grid - self.state.size, np.uint64)])
        written = np.full(len(jobs) + 1, FILL, np.uint64)
        out = written.ctypes.data if sizes else 0
        self.launch(
            "encode", packed + struct.pack("<iIQQQ", base, 0, table, self.state.ctypes.data, out), grid, **schedule
        )
        self.launch("raw", packed + struct.pack("<I", 2), 2 * len(jobs), **schedule)
        assert all((guard == FILL).all() for guard in guards)
        assert written[-1] == FILL
        if sizes:
            told = [int.from_bytes(parts.static[40:48].tobytes(), "little") for parts in results]
            assert written[:-1].tolist() == told
        return results

    def decode_batch(
        self, frames: Sequence[Parts], numels: Sequence[int], *, offset: int = 0, **schedule: int
    ) -> tuple[list[int], list[np.ndarray]]:
        """Status words and values."""
        outs = [misplaced(2 * numel + GUARD, offset) for numel in numels]
        jobs = [
            (out.ctypes.data, parts.static.ctypes.data, parts.dynamic.ctypes.data, numel, parts.dynamic.size)
            for parts, numel, out in zip(frames, numels, outs, strict=True)
        ]
        packed, grid = self.batch(jobs)
        status = np.zeros(len(jobs), np.uint32)
        self.launch("decode", packed + struct.pack("<Q", status.ctypes.data), grid, **schedule)
        for out, numel in zip(outs, numels, strict=True):
            assert (out[2 * numel :] == FILL).all()
        return status.tolist(), [out[: 2 * numel] for out, numel in zip(outs, numels, strict=True)]

    def encode(self, tensor: torch.Tensor, codec: ExponentCodec | None = None, **options: int) -> np.ndarray:
        """The frame of one tensor, its parts neighbours."""
        return self.encode_batch([tensor], codec, apart=False, **options)[0].whole()

    def decode(self, frame: np.ndarray, numel: int, **options: int) -> tuple[int, np.ndarray]:
        """Status and values of a whole frame."""
        end = static_end(numel)
        status, values = self.decode_batch([Parts(frame[:end], frame[end:])], [numel], **options)
        return status[0], values[0]

    def decode_reduce(
        self,
        ranks: Sequence[Parts | np.ndarray],
        numel: int,
        *,
        out: np.ndarray | None = None,
        initial: np.ndarray | None = None,
        wide: bool = False,
        divisor: float = 1,
        offset: int = 0,
        **schedule: int,
    ) -> tuple[list[int], np.ndarray]:
        """Status words and the result; a rank contributes a frame or the bytes of its values."""
        jobs = [
            (0, rank.static.ctypes.data, rank.dynamic.ctypes.data, numel, rank.dynamic.size)
            if isinstance(rank, Parts)
            else (rank.ctypes.data, 0, 0, numel, 0)
            for rank in ranks
        ]
        nbytes = (4 if wide else 2) * numel
        memory = misplaced(nbytes + GUARD, offset)
        target = memory[:nbytes] if out is None else out
        status = np.zeros(len(jobs), np.uint32)
        packed = self.batch(jobs)[0] + struct.pack(
            "<QQIfQ",
            0 if initial is None else initial.ctypes.data,
            target.ctypes.data,
            wide,
            divisor,
            status.ctypes.data,
        )
        self.launch("decode_reduce", packed, max(1, -(-numel // 8192)), **schedule)
        assert (memory[nbytes:] == FILL).all()
        return status.tolist(), target
