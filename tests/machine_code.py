"""What nvcc makes of cuda/exponent.cu: its machine code, compiled and read back without a GPU.

`compiled` gives the kernels of one architecture and variant. Registers, stack and shared memory are ptxas's own
figures, the instructions are nvdisasm's, each with the source lines that it comes from. `-lineinfo` adds a table and
changes no instruction.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "cuda" / "exponent.cu"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
VARIANTS: dict[str, tuple[str, ...]] = {
    "registers": (),
    "cp_async": ("-DZIPCCL_CP_ASYNC",),
    "ballot": ("-DZIPCCL_BALLOT",),
}
THREADS = 256  # of every launch


class UnavailableError(Exception):
    """A tool is missing here, or does not know the architecture: nothing can be said about the machine code."""


class CompileError(Exception):
    """nvcc refused the source."""


class Limits(NamedTuple):
    """What the thread blocks of one multiprocessor share."""

    warps: int
    thread_blocks: int
    shared_nbytes: int
    registers: int = 65536


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". How registers (256 at a time, for a
# warp, in each of four partitions) and shared memory (128 bytes at a time, and 1 KiB a thread block that is the
# system's) are dealt out is in the toolkit's cuda_occupancy.h.
LIMITS = {
    "sm_80": Limits(64, 32, 164 * 1024),
    "sm_86": Limits(48, 16, 100 * 1024),
    "sm_89": Limits(48, 24, 100 * 1024),
    "sm_90": Limits(64, 32, 228 * 1024),
    "sm_100": Limits(64, 32, 228 * 1024),
}
SYSTEM_SHARED_NBYTES = 1024


class Occupancy(NamedTuple):
    """How many thread blocks and warps a multiprocessor holds at a time, and what does not allow more."""

    thread_blocks: int
    warps: int
    fraction: float
    limit: str


def occupancy(architecture: str, registers: int, shared_nbytes: int, threads: int = THREADS) -> Occupancy:
    """Of a kernel without dynamic shared memory."""
    limits = LIMITS[architecture]
    warps = -(-threads // 32)
    in_a_partition = limits.registers // 4 // (-(-registers * 32 // 256) * 256)
    shared = -(-(shared_nbytes + SYSTEM_SHARED_NBYTES) // 128) * 128
    blocks = {
        "warps": limits.warps // warps,
        "registers": 4 * in_a_partition // warps,
        "shared memory": limits.shared_nbytes // shared,
        "thread blocks": limits.thread_blocks,
    }
    limit = min(blocks, key=lambda name: blocks[name])
    return Occupancy(blocks[limit], blocks[limit] * warps, blocks[limit] * warps / limits.warps, limit)


Line = tuple[str, int]  # name of the file, number of the line


class Instruction(NamedTuple):
    """One machine instruction; `lines` begins with its own line and goes on with those into which that was inlined."""

    address: int
    predicate: str
    opcode: str
    operands: str
    lines: tuple[Line, ...]


@dataclass
class Kernel:
    """The machine code of one `__global__` function."""

    name: str
    architecture: str
    registers: int = 0
    stack_nbytes: int = 0
    spill_nbytes: int = 0
    shared_nbytes: int = 0
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index into code

    def count(self, *opcodes: str) -> int:
        """Instructions whose opcode matches one of these regular expressions from its beginning."""
        return sum(any(re.match(pattern, i.opcode) for pattern in opcodes) for i in self.code)

    @property
    def occupancy(self) -> Occupancy:
        return occupancy(self.architecture, self.registers, self.shared_nbytes)

    @property
    def instructions(self) -> int:
        """All of them, without what only fills up the end."""
        return sum(not is_filler(self, index) for index in range(len(self.code)))

    @property
    def local_accesses(self) -> int:
        return self.count(r"LDL\b", r"STL\b")

    @property
    def generic_accesses(self) -> int:
        """Loads, stores and atomics whose kind of memory the hardware must find out."""
        return self.count(r"LD\b", r"ST\b", r"ATOM\b")


def is_filler(kernel: Kernel, index: int) -> bool:
    """NOP, and the branch to itself, behind a kernel's end."""
    instruction = kernel.code[index]
    if instruction.opcode == "NOP":
        return True
    target = re.search(r"`\((\S+)\)", instruction.operands)
    return instruction.opcode == "BRA" and target is not None and kernel.labels.get(target[1]) == index


# ---- tools ----


def tool(name: str) -> str:
    """The path of nvcc or nvdisasm: on PATH, or from a package of PyPI (nvidia-cuda-nvdisasm)."""
    found = shutil.which(name)
    if found is None:
        try:
            files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = next((str(file.locate()) for file in files if file.name in (name, f"{name}.exe")), None)
    if found is None:
        hint = "CUDA toolkit 12 or newer" if name == "nvcc" else f"pip install nvidia-cuda-{name}"
        raise UnavailableError(f"no {name} ({hint})")
    return found


@functools.cache
def nvcc_version() -> str:
    """Such as 13.0.88."""
    text = subprocess.run([tool("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else "unknown"


def nvcc(source: Path, architecture: str, out: Path, *flags: str) -> str:
    """Compiles, and returns what ptxas says."""
    command = [tool("nvcc"), "-std=c++17", f"-arch={architecture}", "-lineinfo", "-Xptxas", "-v", *flags]
    result = subprocess.run([*command, source, "-o", out], capture_output=True, text=True, check=False)
    if re.search(r"[Uu]nsupported gpu architecture|is not defined for option 'gpu-architecture'", result.stderr):
        raise UnavailableError(f"nvcc {nvcc_version()} does not know {architecture}")
    if result.returncode != 0:
        raise CompileError(result.stderr)
    return result.stderr


@functools.cache
def compiled(architecture: str, variant: str = "registers", source: Path = SOURCE) -> dict[str, Kernel]:
    """The kernels of a source by their names. Cached for this process.

    Raises:
        UnavailableError: nvcc or nvdisasm is missing, or nvcc does not know the architecture.
        CompileError: nvcc refused the source, or warned about it.
    """
    disassembler = tool("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "exponent.cubin"
        report = nvcc(source, architecture, cubin, "-cubin", "-Werror", "all-warnings", *VARIANTS[variant])
        command = [disassembler, "--print-code", "--print-line-info-inline", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = {kernel.name: kernel for kernel in parse(text, architecture)}
    read_resources(report, kernels)
    return kernels


@functools.cache
def ptx(architecture: str = "compute_80", variant: str = "registers") -> str:
    """The kernels in PTX, which drivers compile for devices that nvcc did not know."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "exponent.ptx"
        nvcc(SOURCE, architecture, out, "-ptx", "-Werror", "all-warnings", *VARIANTS[variant])
        return out.read_text()


# ---- reading ----

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;")
LABEL = re.compile(r"([.$\w]+):\s*$")
FRAME = re.compile(r'"([^"]+)", line (\d+)')


def parse(text: str, architecture: str) -> Iterator[Kernel]:
    """The kernels in the output of nvdisasm, without their resources."""
    kernel: Kernel | None = None
    lines: list[Line] = []
    fresh = True
    for row in text.splitlines():
        label = LABEL.match(row)
        if label and label[1].startswith(".text."):
            if kernel is not None:
                yield kernel
            kernel, lines = Kernel(label[1].removeprefix(".text."), architecture), []
        elif row.lstrip().startswith(".section"):
            if kernel is not None:
                yield kernel
            kernel = None
        elif kernel is None:
            continue
        elif label:
            kernel.labels[label[1]] = len(kernel.code)
        elif row.lstrip().startswith("//##"):  # one for each function that was inlined, the innermost first
            lines = [] if fresh else lines
            fresh = False
            file, number = FRAME.findall(row)[0]
            lines.append((Path(file).name, int(number)))
        elif found := INSTRUCTION.match(row):
            address, predicate, opcode, operands = found.groups()
            kernel.code.append(Instruction(int(address, 16), predicate or "", opcode, operands, tuple(lines)))
            fresh = True
    if kernel is not None:
        yield kernel


def read_resources(report: str, kernels: dict[str, Kernel]) -> None:
    """Puts what `ptxas -v` says about each kernel into it."""
    name = ""
    seen = set()
    for row in report.splitlines():
        if found := re.search(r"Function properties for (\S+)", row):
            name = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", row):
            kernels[name].stack_nbytes = int(found[1])
            kernels[name].spill_nbytes = int(found[2]) + int(found[3])
        elif found := re.search(r"Used (\d+) registers", row):
            kernels[name].registers = int(found[1])
            shared = re.search(r"(\d+) bytes smem", row)
            kernels[name].shared_nbytes = int(shared[1]) if shared else 0
            seen.add(name)
    if seen != kernels.keys():
        raise ValueError(f"ptxas reported on {sorted(seen)}, the machine code has {sorted(kernels)}")
