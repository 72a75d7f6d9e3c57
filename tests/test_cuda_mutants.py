"""Bugs planted in the kernels: each must be found by tests/cusim/check.cpp in the mode that is named, or the tests of
the kernels would not find it either."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_cases import check_cases
from cuda_simulator import build, source_text


class Mutant(NamedTuple):
    mode: str
    """Of tests/cuda_simulator.py: what finds it."""
    old: str
    """Text that the kernels have exactly once."""
    new: str
    message: str = ""
    """What the report must contain."""
    variant: str = "registers"


RACE, PLAIN, SANITIZERS = "race", "plain", "sanitizers"
MUTANTS = {
    # barriers
    "no barrier before the scan": Mutant(
        RACE,
        "    __syncthreads();\n    if (warp == 0) {\n        static_assert(",
        "    if (warp == 0) {\n        static_assert(",
        "shared memory",
    ),
    "no barrier behind the scan": Mutant(
        RACE,
        "    __syncthreads();\n\n#pragma unroll\n    for (u32 turn",
        "#pragma unroll\n    for (u32 turn",
        "shared memory",
    ),
    "no barrier behind the table's clear": Mutant(
        RACE, "distances[threadIdx.x] = 7;\n        __syncthreads();", "distances[threadIdx.x] = 7;", "shared memory"
    ),
    "no barrier behind the table": Mutant(
        RACE, "= (u8)threadIdx.x;\n        __syncthreads();", "= (u8)threadIdx.x;", "shared memory"
    ),
    "no barrier behind the header's check": Mutant(
        RACE, "    __syncthreads();\n    if (wrong != 0)", "    if (wrong != 0)", "shared memory"
    ),
    "no barrier behind the check of the ranks' headers": Mutant(
        RACE,
        "    __syncthreads();\n    const u32 block = blockIdx.x",
        "    const u32 block = blockIdx.x",
        "shared memory",
    ),
    "no __syncwarp before ballots": Mutant(
        RACE, "    __syncwarp();\n#pragma unroll", "#pragma unroll", "shared memory", "ballot"
    ),
    "two warps count into the same word": Mutant(
        RACE,
        "blocks[turn * WARPS + warp] = make_uint2",
        "blocks[turn * WARPS + warp / 2] = make_uint2",
        "shared memory",
    ),
    # bounds and alignment
    "reads behind the values": Mutant(
        SANITIZERS,
        "words[k][p] = (i < n ? block[i] : 0u) | (i + 1 < n ? block[i + 1] : 0u) << 16;",
        "words[k][p] = block[i] | (u32)block[i + 1] << 16;",
        "heap-buffer-overflow",
    ),
    "writes behind the values": Mutant(
        SANITIZERS,
        "            if (i < n)\n                block[i] = (u16)words[k][p];",
        "            block[i] = (u16)words[k][p];",
        "heap-buffer-overflow",
    ),
    "writes behind the fp32 sums": Mutant(
        SANITIZERS,
        "            if (i + r < n)\n                block[i + r] = numbers",
        "            block[i + r] = numbers",
        "heap-buffer-overflow",
    ),
    "more escapes than there is room": Mutant(
        SANITIZERS, "            if (at < capacity(layout))\n", "", "heap-buffer-overflow"
    ),
    "reads escapes that are not there": Mutant(
        SANITIZERS,
        "    return align(dynamic_nbytes) > dynamic_room ? (u32)OVERFLOW : 0;",
        "    return 0;",
        "heap-buffer-overflow",
    ),
    "no alignment of values asked for": Mutant(
        RACE, "if (whole && aligned(block, 16)) {", "if (whole) {", "misaligned global memory"
    ),
    "no alignment of results asked for": Mutant(
        RACE,
        "const u32 (&words)[4][4]) {\n    if (n == BLOCK && aligned(block, 16)) {",
        "const u32 (&words)[4][4]) {\n    if (n == BLOCK) {",
        "misaligned global memory",
    ),
    # one pass
    "the look-back steps too short": Mutant(PLAIN, ";; end -= 32) {", ";; end -= 31) {"),
    "the epoch stays": Mutant(PLAIN, "        *epoch = (*epoch + 1) & 0x3fffffff;\n", ""),
    "words of earlier launches count": Mutant(PLAIN, "(u32)(word >> 34) != epoch || (word", "(word"),
    "the look-back begins before the job": Mutant(PLAIN, "look_back(state, first, own", "look_back(state, 0, own"),
    "a RAW job does not finish": Mutant(
        PLAIN, "        if (threadIdx.x == 0)\n            finish(state);\n        return;", "        return;"
    ),
    "nobody publishes a prefix": Mutant(
        PLAIN,
        "        words[me] = published(epoch, me == first ? PREFIX : OWN_SUM, own);",
        "        words[me] = published(epoch, NOTHING, own);",
        "nothing moves any more",
    ),
    "a collective that not all lanes reach": Mutant(
        PLAIN,
        "const u32 total = __shfl_sync(ALL, up_to_here, 31);",
        "const u32 total = own == 0 ? 0 : __shfl_sync(ALL, up_to_here, 31);",
        "lanes of a warp meet",
    ),
    # asynchronous copies
    "no wait for a copy, encode": Mutant(
        PLAIN, "        __pipeline_wait_prior(1);\n#endif\n        u32 mask", "#endif\n        u32 mask", "", "cp_async"
    ),
    "no wait for a copy, decode": Mutant(
        PLAIN,
        "            __pipeline_wait_prior(1);\n            const Part part = take_part(ahead[turn",
        "            const Part part = take_part(ahead[turn",
        "",
        "cp_async",
    ),
    "waits for the copy before": Mutant(
        PLAIN,
        "        __pipeline_wait_prior(1);\n#endif\n        if (wrong",
        "        __pipeline_wait_prior(2);\n#endif\n        if (wrong",
        "",
        "cp_async",
    ),
    "the other buffer": Mutant(
        PLAIN,
        "const uint4 quad = ahead[turn % 2][warp][k][lane];",
        "const uint4 quad = ahead[(turn + 1) % 2][warp][k][lane];",
        "",
        "cp_async",
    ),
    "one buffer": Mutant(
        PLAIN,
        "bring_part(ahead[turn % 2][warp], line_at",
        "bring_part(ahead[0][warp], line_at",
        "",
        "cp_async",
    ),
    # what a decoder checks
    "offsets are not checked": Mutant(
        PLAIN, "if (begin > end || end > n_escapes || (block == 0 && begin != 0))", "if (block == 0 && begin != 0)"
    ),
    "escapes are not counted": Mutant(PLAIN, "else if (end - begin != total)", "else if (false)"),
    "fillers are not checked": Mutant(PLAIN, "        faults |= BAD_FILLER;\n", "        ;\n"),
    "modes are not checked": Mutant(PLAIN, "if (mode > TABLE || (mode", "if ((mode"),
    "one lane's header words are not checked": Mutant(PLAIN, "(16 <= lane && lane < 24)", "(12 <= lane && lane < 24)"),
    # bytes
    "fillers are left as they are": Mutant(
        PLAIN, "                    planes[j] |= fillers;\n", "                    ;\n"
    ),
    "the last line's rest is not zero": Mutant(PLAIN, "        dynamic[at] = 0;\n", "        ;\n"),
    "a tie goes to the window above": Mutant(PLAIN, "if (above > max(below, 0))", "if (above >= max(below, 0))"),
    "a window above the highest": Mutant(PLAIN, "start < 248 ? 0x0100ff00 : 0)", "0x0100ff00)"),
    "zeros are taken for others": Mutant(PLAIN, "    if (__any_sync(ALL, zero))", "    if (false)"),
    "the rest of a RAW body is behind the static part": Mutant(
        PLAIN, "dynamic + (at - in_static)", "frame + HEADER_NBYTES + at"
    ),
    "sizes are not written": Mutant(PLAIN, "        *size = dynamic_nbytes;\n", "        ;\n"),
    # sums
    "the last rank first": Mutant(
        PLAIN,
        "#pragma unroll 1\n    for (u32 rank = 0; rank < batch.n_jobs; rank++) {",
        "    for (u32 rank = batch.n_jobs; rank-- > 0;) {",
    ),
    "NaN is rounded like a number": Mutant(PLAIN, "(bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : ", ""),
    "sums begin with +0": Mutant(PLAIN, "totals[i] = -0.0f;", "totals[i] = 0.0f;"),
    "sums are cut, not rounded": Mutant(PLAIN, "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16"),
    "halves are rounded up": Mutant(PLAIN, "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "(bits + 0x8000) >> 16"),
    "nothing is divided": Mutant(PLAIN, "if (divisor != 1) {", "if (false) {"),
}


def find(directory: Path, cases: Path, compiler: str, name: str) -> str:
    """What check.cpp says about a mutant; nothing if it does not find it."""
    mutant, text = MUTANTS[name], source_text()
    if (count := text.count(mutant.old)) != 1:
        raise AssertionError(f"the text to replace is there {count} times")
    source = directory / f"mutant_{list(MUTANTS).index(name)}.cu"
    source.write_text(text.replace(mutant.old, mutant.new))
    options = ["-w", "-O0"] if mutant.mode == SANITIZERS else ["-w"]
    program = build(
        compiler, directory, mode=mutant.mode, variant=mutant.variant, program=True, kernels=source, options=options
    )
    with cases.open("rb") as file:
        result = subprocess.run([program], stdin=file, capture_output=True, check=False, timeout=120)
    return "" if result.returncode == 0 else result.stderr.decode() or f"exit status {result.returncode}"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """All of them, two at a time."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++)")
    directory = tmp_path_factory.mktemp("mutants")
    cases = directory / "cases"
    cases.write_bytes(check_cases())
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        yield {name: pool.submit(find, directory, cases, compiler, name) for name in MUTANTS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(reports: dict[str, Future[str]], name: str) -> None:
    report = reports[name].result()
    assert report, "not found"
    assert MUTANTS[name].message in report
