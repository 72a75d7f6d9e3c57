"""Registers, occupancy and instructions of the CUDA kernels, and what bounds them on some devices, by arithmetic.

    python bench/kernels.py           # writes bench/results/kernels.csv
    python bench/kernels.py --docs    # and the tables of docs/kernels.md

Nothing runs on a GPU and nothing is timed: the figures are counted in the machine code that nvcc makes of
cuda/exponent.cu. Needs nvcc, nvdisasm (pip install nvidia-cuda-nvdisasm) and g++ with gcov. docs/kernels.md says what
they mean.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import report

sys.path.insert(0, str(report.ROOT / "tests"))  # the tests hold these figures to their budgets
from common_path import a_value, rounds_of_escapes
from line_coverage import ESCAPES, RANKS
from machine_code import ARCHITECTURES, VARIANTS, Kernel, UnavailableError, compiled, nvcc_version

STATIC_NBYTES = (1408 + 4 + 2) / 1024  # a value: block, offset and meta
DOCS = report.ROOT / "docs" / "kernels.md"
T = TypeVar("T")

COPY = 0.9  # of the published bandwidth; a large copy on a device seldom gets more
# Units that do shifts, logic, comparisons and byte permutations: 64 results a clock and multiprocessor from 8.0 to 9.0
# (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"), and taken to be as many on 10.0.
ALU = r"LOP3|PRMT|SHF|SHL|SHR|LEA|IADD|VIADD|I?MNMX|VIMNMX|HMNMX2|ISETP|PLOP3|SEL|BMSK|SGXT|IABS|VABSDIFF"
ALU_LANES = 64

# What is counted: a name, the kernel, and the case.
COUNTED = (
    ("encode, base given", "zipccl_exponent_encode", "given"),
    ("encode, base chosen", "zipccl_exponent_encode", "chosen"),
    ("encode, escapes", "zipccl_exponent_encode", "escapes"),
    ("decode", "zipccl_exponent_decode", "chosen"),
    ("decode, escapes", "zipccl_exponent_decode", "escapes"),
    (f"decode_reduce, {RANKS} ranks", "zipccl_exponent_decode_reduce", "chosen"),
    (f"decode_reduce, {RANKS} ranks, escapes", "zipccl_exponent_decode_reduce", "escapes"),
)


class Device(NamedTuple):
    """Inputs of the bounds. The clock is the highest; a device under load can be below it."""

    name: str
    architecture: str
    multiprocessors: int
    clock_ghz: float
    memory_gbs: float
    source: str


DEVICES = (
    Device("A100 SXM 80 GB", "sm_80", 108, 1.41, 2039, "NVIDIA A100 datasheet; clock: Ampere architecture whitepaper"),
    Device("GeForce RTX 3090", "sm_86", 82, 1.695, 936, "NVIDIA Ampere GA102 whitepaper"),
    Device("GeForce RTX 4090", "sm_89", 128, 2.52, 1008, "NVIDIA Ada architecture whitepaper"),
    Device("H100 SXM", "sm_90", 132, 1.98, 3350, "NVIDIA H100 datasheet; clock: from its 67 TFLOPS of fp32"),
    Device("H200 SXM", "sm_90", 132, 1.98, 4800, "NVIDIA H200 datasheet; clock: from its 67 TFLOPS of fp32"),
    Device("B200", "sm_100", 148, 1.98, 8000, "NVIDIA DGX B200 datasheet; the others: third parties' lists"),
)


def memory_nbytes(name: str) -> float:
    """Bytes that a value moves: read and written once."""
    compressed = STATIC_NBYTES + (ESCAPES if "escapes" in name else 0)  # one byte each
    return (RANKS if "reduce" in name else 1) * compressed + 2


class Bounds(NamedTuple):
    """Values a second (1e12) that memory, instruction issue and integer units allow."""

    memory: float
    issue: float
    integer: float


def bounds(device: Device, name: str, instructions: float, integer: float) -> Bounds:
    clocks = device.multiprocessors * device.clock_ghz / 1e3  # of all multiprocessors, 1e12 a second
    return Bounds(
        memory=COPY * device.memory_gbs / 1e3 / memory_nbytes(name),
        issue=clocks * 4 * 32 / instructions,  # four schedulers, each an instruction of a warp a clock
        integer=clocks * ALU_LANES / integer,
    )


def counted(architecture: str, variant: str) -> Iterator[tuple[str, Kernel, float, float]]:
    """Name, kernel, instructions a value, and those for integer units."""
    kernels = compiled(architecture, variant)
    for name, kernel, case in COUNTED:
        figures = (a_value(kernels[kernel], variant, case, opcodes) for opcodes in ("", ALU))
        yield name, kernels[kernel], *figures


def row(architecture: str, variant: str, name: str, kernel: Kernel, instructions: float, integer: float) -> report.Row:
    return {
        "architecture": architecture,
        "variant": variant,
        "kernel": name,
        "registers": kernel.registers,
        "spill_nbytes": kernel.spill_nbytes,
        "shared_nbytes": kernel.shared_nbytes,
        "thread_blocks": kernel.occupancy.thread_blocks,
        "occupancy": f"{kernel.occupancy.fraction:.3f}",
        "occupancy_limit": kernel.occupancy.limit,
        "ldg_128": kernel.count(r"LDG\..*\b128\b"),
        "stg_128": kernel.count(r"STG\..*\b128\b"),
        "ldg_64": kernel.count(r"LDG\..*\b64\b"),
        "stg_64": kernel.count(r"STG\..*\b64\b"),
        "ldgsts": kernel.count("LDGSTS"),
        "vote": kernel.count("VOTE"),
        "shfl": kernel.count("SHFL"),
        "instructions_a_value": f"{instructions:.2f}",
        "integer_a_value": f"{integer:.2f}",
        "instructions_in_all": kernel.instructions,
        "nvcc": nvcc_version(),
    }


def print_kernels(rows: list[report.Row]) -> None:
    print(f"# Machine code of cuda/exponent.cu by nvcc {nvcc_version()}; nothing here ran on a GPU")
    print("# What is the same in several variants is printed once")
    print("# a value: instructions of a lane on the common path, by its values; integer: shifts, logic, comparisons")
    print(f"# escapes: {ESCAPES} of the values, {rounds_of_escapes():.2f} in the lane for which the warp waits")
    columns = {
        "architecture": -12,
        "variant": -9,
        "kernel": -31,
        "registers": 9,
        "shared": 6,
        "blocks": 6,
        "occupancy": 9,
        "by": -13,
        "LDG.128": 7,
        "STG.128": 7,
        "a value": 7,
        "integer": 7,
        "in all": 6,
    }
    keys = ("architecture", "variant", "kernel", "registers", "shared_nbytes", "thread_blocks", "occupancy")
    keys += ("occupancy_limit", "ldg_128", "stg_128", "instructions_a_value", "integer_a_value", "instructions_in_all")
    shown: dict[tuple[object, ...], list[object]] = {}  # variants that differ from the default
    for row in rows:
        cells = [row[key] for key in keys]
        shown.setdefault((cells[0], *cells[2:]), cells)
    report.print_table(columns, shown.values())


def print_bounds(figures: dict[tuple[str, str], tuple[float, float]]) -> None:
    print(f"# Bounds of the default variant, TB/s of bf16 values; memory at {COPY:.0%} of what is published")
    print("# first: the lowest bound; room: how many times higher the next one is")
    columns = {"device": -16, "kernel": -31, "memory": 7, "issue": 7, "integer": 7, "first": -7, "room": 5}
    lines = []
    for device in DEVICES:
        for name, _, _ in COUNTED:
            if (device.architecture, name) in figures:
                found = bounds(device, name, *figures[device.architecture, name])
                ordered = sorted(zip(found, Bounds._fields, strict=True))
                shown = (f"{2 * value:.2f}" for value in found)
                lines.append((device.name, name, *shown, ordered[0][1], f"{ordered[1][0] / ordered[0][0]:.2f}"))
    report.print_table(columns, lines)
    for device in DEVICES:
        print(
            f"# {device.name}: {device.multiprocessors} multiprocessors, {device.clock_ghz} GHz,"
            f" {device.memory_gbs} GB/s ({device.source})"
        )


def text_of(printing: Callable[[T], None], what: T) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        printing(what)
    return text.getvalue()


def write_docs(tables: dict[str, str]) -> None:
    """Puts each table between its markers."""
    text = DOCS.read_text()
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, n = re.subn(pattern, lambda m, t=table: f"{m[1]}```\n{t}```\n{m[2]}", text, flags=re.DOTALL)
        if n != 1:
            sys.exit(f"{DOCS.name} has {n} places for the table `{name}`")
    DOCS.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--docs", action="store_true", help="also writes the tables of docs/kernels.md")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "kernels.csv")
    options = parser.parse_args()
    rows: list[report.Row] = []
    figures = {}
    for variant in options.variants:
        for architecture in options.architectures:
            try:
                for name, kernel, instructions, integer in counted(architecture, variant):
                    rows.append(row(architecture, variant, name, kernel, instructions, integer))
                    if variant == "registers":
                        figures[architecture, name] = instructions, integer
            except UnavailableError as error:
                print(f"# {architecture}, {variant}: left out, {error}")
    if not rows:
        sys.exit("nothing could be compiled")
    tables = {"machine code": text_of(print_kernels, rows), "bounds": text_of(print_bounds, figures)}
    print("\n".join(tables.values()))
    report.write_csv(options.out, rows)
    if options.docs:
        write_docs(tables)


if __name__ == "__main__":
    main()
