"""What `pip install .` builds: with a compiler, and without one; torch is in neither build environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecuda import harness

from zipccl_core.kernels import compiler

ROOT = Path(__file__).parent.parent


def build(
    tmp_path: Path, prepare: Callable[[Path], None] = lambda source: None, **environ: str
) -> tuple[list[str], str]:
    """The names in a wheel built from a clean copy of the tree, and its metadata."""
    source = tmp_path / "source"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
        if not name.startswith(("tests/", "bench/", "docs/", "examples/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    prepare(source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environ})
    if "No matching distribution found for setuptools" in process.stderr + process.stdout:
        pytest.skip("no package index to take setuptools from")
    assert process.returncode == 0, process.stderr
    (wheel,) = tmp_path.glob("zipccl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
        return names, archive.read(metadata).decode() + archive.read(entry_points).decode()


def test_a_wheel_with_native_kernels(tmp_path: Path) -> None:
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    names, metadata = build(tmp_path)
    assert "zipccl_core/kernels/_native.abi3.so" in names
    for name in ("zipccl_core/py.typed", "zipccl_deepspeed/py.typed", "zipccl_accelerate/py.typed"):
        assert name in names
    in_cuda = {"README.md", "exponent.cu", "exponent.cuh"}
    assert {name for name in names if "/cuda/" in name} == {f"zipccl_core/cuda/{name}" for name in in_cuda}
    assert not [name for name in names if name.endswith((".c", ".h")) or "tests" in name or name.startswith("cuda")]
    for extra in ("deepspeed", "accelerate", "cuda", "cli", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "zipccl_core._autoload:autoload" in metadata
    assert "zipccl_deepspeed._autoload:autoload" in metadata


def test_without_a_compiler_it_installs_all_the_same(tmp_path: Path) -> None:
    names, _ = build(tmp_path, CC="/bin/false")
    assert "zipccl_core/kernels/native.py" in names
    assert not [name for name in names if "_native" in name and name.endswith(".so")]


LOADS = """
import torch, zipccl_core
from fakecuda import harness
from zipccl_core.kernels import Window, compiler, cuda
cuda.streams_of = harness.Streams
print(zipccl_core.__file__, compiler.Toolchain.find().nvcc)
sizes = cuda.load(0).encode_frames([torch.ones(3000).bfloat16()], [torch.empty(7000, dtype=torch.uint8)], Window())
print(sizes.tolist())
"""


def test_a_wheel_with_cuda_kernels_that_were_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make wheel`, with the stand-in nvcc; what was compiled is found and used where there is no nvcc."""
    if reason := harness.reason_to_skip():
        pytest.skip(reason)
    variables = harness.environment(ZIPCCL_NVCC="", ZIPCCL_CACHE_DIR=str(tmp_path / "cache"))
    monkeypatch.setenv("FAKENVCC_STORE", variables["FAKENVCC_STORE"])
    names, _ = build(
        tmp_path, lambda source: compiler.compile_ahead(source / "cuda" / "exponent.fatbin", str(harness.NVCC))
    )
    assert {"zipccl_core/cuda/exponent.fatbin", "zipccl_core/cuda/exponent.fatbin.sha256"} <= set(names)
    (wheel,) = tmp_path.glob("zipccl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    variables |= {"PYTHONPATH": f"{tmp_path / 'installed'}:{ROOT / 'tests'}"}
    variables |= {"LD_LIBRARY_PATH": str(harness.library().parent)}
    process = subprocess.run(
        [sys.executable, "-c", LOADS],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, **variables},
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [f"{tmp_path / 'installed' / 'zipccl_core' / '__init__.py'} None", "[0]"]


def test_kernels_compiled_ahead_are_for_all_devices(tmp_path: Path) -> None:
    """The real nvcc's."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    fatbin = tmp_path / "exponent.fatbin"
    compiler.compile_ahead(fatbin, nvcc)
    assert fatbin.read_bytes()[:4] == bytes.fromhex("50ed55ba")
    assert (tmp_path / "exponent.fatbin.sha256").read_text().strip() == compiler.source_hash()
    cuobjdump = [path for path in Path(sys.prefix).rglob("cuobjdump") if path.is_file() and os.access(path, os.X_OK)]
    if cuobjdump:
        command = [str(cuobjdump[0]), "--list-elf", "--list-ptx", str(fatbin)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for arch in compiler.AHEAD["sm"]:
            assert f"sm_{arch}.cubin" in listed
        for arch in compiler.AHEAD["compute"]:
            assert f"sm_{arch}.ptx" in listed
