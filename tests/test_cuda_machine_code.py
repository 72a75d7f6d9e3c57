"""What the machine code of the CUDA kernels promises, checked without a GPU. docs/kernels.md has the figures."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import machine_code
import pytest
from common_path import a_value, common_path
from line_coverage import Coverage, coverage
from machine_code import ARCHITECTURES, ROOT, SOURCE, VARIANTS, CompileError, Kernel, UnavailableError, occupancy

ENCODE, RAW, DECODE, DECODE_REDUCE = KERNELS = tuple(
    f"zipccl_exponent_{name}" for name in ("encode", "raw", "decode", "decode_reduce")
)
# What `__launch_bounds__` says: registers a thread, and thread blocks that a multiprocessor holds.
BOUNDS = {ENCODE: (64, 4), DECODE: (64, 4), DECODE_REDUCE: (128, 2)}
# Machine instructions a value of the default variant without escapes; of encode with a base given, and with one chosen
# for each block.
BUDGET = {(ENCODE, "given"): 11.0, (ENCODE, "chosen"): 11.0, (DECODE, "chosen"): 11.0}
WIDE_LOAD, WIDE_STORE = r"LDG\..*\b128\b", r"STG\..*\b128\b"


@contextmanager
def or_skip() -> Iterator[None]:
    try:
        yield
    except UnavailableError as error:
        pytest.skip(str(error))


class Machine:
    """Compiles every architecture and variant once, two at a time."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.results: dict[tuple[str, str], Future[dict[str, Kernel]]] = {
            (architecture, variant): self.pool.submit(machine_code.compiled, architecture, variant)
            for variant in VARIANTS
            for architecture in ARCHITECTURES
        }

    def kernels(self, architecture: str, variant: str = "registers") -> dict[str, Kernel]:
        with or_skip():
            return self.results[architecture, variant].result()


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    found = Machine()
    yield found
    found.pool.shutdown(cancel_futures=True)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def broken_promises(kernel: Kernel) -> list[str]:
    """What every variant promises and this one does not keep, in words."""
    broken = []
    if kernel.stack_nbytes or kernel.spill_nbytes or kernel.local_accesses:
        broken.append(f"spills: {kernel.stack_nbytes} bytes of stack, {kernel.local_accesses} local accesses")
    if kernel.generic_accesses:
        broken.append(f"{kernel.generic_accesses} generic accesses")
    if kernel.name in BOUNDS and kernel.registers > BOUNDS[kernel.name][0]:
        broken.append(f"{kernel.registers} registers")
    return broken


def broken_promises_of_the_default(kernel: Kernel) -> list[str]:
    broken = broken_promises(kernel)
    if kernel.name == RAW:
        return broken
    if kernel.occupancy.thread_blocks < BOUNDS[kernel.name][1]:
        broken.append(f"{kernel.occupancy.thread_blocks} thread blocks a multiprocessor")
    if kernel.name in (ENCODE, DECODE) and kernel.occupancy.fraction < 0.5:
        broken.append(f"occupancy {kernel.occupancy.fraction:.0%}")
    path = common_path(kernel, coverage("registers", kernel.architecture))
    if kernel.name == ENCODE and path.count(WIDE_LOAD) < 4:  # four times 8 values
        broken.append("no 128-bit loads on the common path")
    if kernel.name != ENCODE and path.count(WIDE_STORE) < 4:
        broken.append("no 128-bit stores on the common path")
    return broken


# ---- the kernels ----


def test_the_default_keeps_its_promises(machine: Machine, architecture: str) -> None:
    kernels = machine.kernels(architecture)
    assert set(kernels) == set(KERNELS)
    with or_skip():
        broken = {name: broken_promises_of_the_default(kernel) for name, kernel in kernels.items()}
    assert broken == {name: [] for name in KERNELS}


@pytest.mark.parametrize(("name", "case"), BUDGET)
def test_instructions_a_value(machine: Machine, architecture: str, name: str, case: str) -> None:
    kernel = machine.kernels(architecture)[name]
    with or_skip():
        count = a_value(kernel, "registers", case)
        with_escapes = a_value(kernel, "registers", "escapes")
    assert 5 < count <= BUDGET[name, case]
    assert count + 1 < with_escapes < kernel.instructions / 32


def test_variants_keep_theirs_and_are_what_their_names_say(machine: Machine, architecture: str, variant: str) -> None:
    kernels = machine.kernels(architecture, variant)
    assert {name: broken_promises(kernel) for name, kernel in kernels.items()} == {name: [] for name in KERNELS}
    for name in (ENCODE, DECODE, DECODE_REDUCE):
        assert bool(kernels[name].count("LDGSTS")) is (variant == "cp_async"), name
    wide = r"LDGSTS\..*\b128\b" if variant == "cp_async" else WIDE_LOAD
    assert kernels[ENCODE].count(wide) >= 4
    assert kernels[DECODE].count(WIDE_STORE) >= 4
    assert (kernels[ENCODE].count("VOTE") >= 3 * 32) is (variant == "ballot")


def test_ptx(variant: str) -> None:
    """For devices that this nvcc does not know. A generic access is one that names no kind of memory."""
    with or_skip():
        text = machine_code.ptx("compute_80", variant)
    assert sorted(re.findall(r"\.entry (\w+)", text)) == sorted(KERNELS)
    accesses = re.findall(r"^\s*(?:@!?%p\d+ )?((?:ld|st|atom|red)\.\S+)", text, re.MULTILINE)
    assert any("global" in access and "v4" in access for access in accesses)
    assert [access for access in accesses if not re.search(r"\.(global|shared|param|const)\b", access)] == []


# ---- the gate ----


def test_occupancy() -> None:
    """By hand: 65536 registers are 32 warps of 64 registers a lane, of 64 warps or of 48 that there may be."""
    assert occupancy("sm_90", 64, 0) == (4, 32, 0.5, "registers")
    assert occupancy("sm_86", 64, 0) == (4, 32, 32 / 48, "registers")
    assert occupancy("sm_90", 32, 0) == (8, 64, 1.0, "warps")
    assert occupancy("sm_80", 32, 40 * 1024) == (4, 32, 0.5, "shared memory")  # 41 of 164 KiB each
    assert occupancy("sm_90", 65, 0) == (3, 24, 0.375, "registers")  # counted as 72
    assert occupancy("sm_86", 16, 0, threads=32) == (16, 16, 16 / 48, "thread blocks")


MISTAKES = {
    "spills": (ENCODE, r"\(THREADS, 4\)(\s+zipccl_exponent_encode)", r"(THREADS, 8)\1"),
    "thread blocks a multiprocessor": (ENCODE, r"(__shared__ uint2 blocks\[\w+)\]", r"\1 + 5500]"),
    "no 128-bit loads": (ENCODE, r"aligned\((\w+), 16\)", r"(aligned(\1, 16) && false)"),
    "no 128-bit stores": (DECODE, r"aligned\((\w+), 16\)", r"(aligned(\1, 16) && false)"),
    # The compiler follows pointers out of the parameters to global memory by itself, but not through this.
    "generic accesses": (ENCODE, r"__builtin_assume\(__isGlobal\((\w+)\)\);", r'asm("mov.u64 %0, %0;" : "+l"(\1));'),
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_the_gate_refuses(expected: str, tmp_path: Path) -> None:
    name, pattern, instead = MISTAKES[expected]
    changed = 0
    for path in SOURCE.parent.glob("*.cu*"):
        text, n = re.subn(pattern, instead, path.read_text())
        (tmp_path / path.name).write_text(text)
        changed += n
    assert changed, f"not in the source any more: {pattern}"
    with or_skip():
        kernel = machine_code.compiled("sm_80", source=tmp_path / SOURCE.name)[name]
        broken = broken_promises_of_the_default(kernel)
    assert any(expected in promise for promise in broken), broken


def test_the_gate_refuses_what_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "exponent.cu"
    source.write_text("__global__ void kernel() { int unused; }\n")
    with or_skip():
        machine_code.tool("nvcc")
        machine_code.tool("nvdisasm")
    with pytest.raises(CompileError, match="unused"):
        machine_code.compiled("sm_80", source=source)
    with pytest.raises(UnavailableError, match="does not know sm_12"):
        machine_code.compiled("sm_12", source=source)


KERNEL = """\
extern "C" __global__ void kernel(volatile unsigned *values, unsigned n) {
    unsigned value = values[threadIdx.x];
    if (n == 7) {
        for (unsigned i = 0; i < value; i++)
            values[i] += value;
    }
    if (threadIdx.x == 0)
        value = __brev(value) ^ values[n];
    values[threadIdx.x] = value;
}
"""


def test_the_common_path_leaves_rare_lines_out(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "small.cu").write_text(KERNEL)
    with or_skip():
        kernel = machine_code.compiled(architecture, source=tmp_path / "small.cu")["kernel"]
    every = frozenset(("small.cu", line) for line in range(1, 11))
    rare = frozenset(("small.cu", line) for line in (4, 5))

    def on_lines(indices: Iterable[int], *lines: int) -> int:
        return sum(("small.cu", line) in kernel.code[index].lines for index in indices for line in lines)

    path = common_path(kernel, Coverage(every, every - rare)).indices
    whole = range(len(kernel.code))
    assert on_lines(whole, 5) > 4
    assert on_lines(path, 5) == 0
    for line in (2, 8, 9):
        assert on_lines(path, line) == on_lines(whole, line) > 0
    with pytest.raises(ValueError, match=r"kernel: how many rounds has the loop at .*small.cu:[45]"):
        common_path(kernel, Coverage(every, every))


# ---- the benchmark ----


def test_the_benchmark_prints_the_tables(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, since all has been compiled; and the committed figures are those of the source, if nvcc is the same."""
    kernels = machine.kernels("sm_90")
    out = tmp_path / "kernels.csv"
    arguments = ["--architectures", "sm_90", "--variants", "registers", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])
    monkeypatch.syspath_prepend(ROOT / "bench")
    with or_skip():
        coverage("registers", "sm_90")
    runpy.run_path(str(ROOT / "bench" / "kernels.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"^sm_90 +registers +decode, escapes", printed, re.MULTILINE)
    assert re.search(r"^H200 SXM +decode ", printed, re.MULTILINE)

    def read(path: Path) -> dict[str, dict[str, str]]:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return {row["kernel"]: row for row in rows if row["architecture"] == "sm_90" and row["variant"] == "registers"}

    fresh, committed = read(out), read(ROOT / "bench" / "results" / "kernels.csv")
    assert fresh.keys() == committed.keys()
    assert int(fresh["decode"]["registers"]) == kernels[DECODE].registers
    for name, row in fresh.items():
        if row["nvcc"] == committed[name]["nvcc"]:
            counted = ("registers", "shared_nbytes", "instructions_in_all")
            same = [row[column] == committed[name][column] for column in counted]
            assert all(same), "run `python bench/kernels.py --docs` and commit what it writes"
