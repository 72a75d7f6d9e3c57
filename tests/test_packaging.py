"""What `pip install .` builds: with a compiler, and without one; torch is in neither build environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(tmp_path: Path, **environ: str) -> tuple[list[str], str]:
    """The names in a wheel built from a clean copy of the tree, and its metadata."""
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if not name.startswith(("tests/", "bench/", "docs/", "examples/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
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
    assert {"zipccl_core/cuda/README.md", "zipccl_core/cuda/exponent.cu"} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".h")) or "tests" in name or name.startswith("cuda")]
    for extra in ("deepspeed", "accelerate", "cuda", "cli", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "zipccl_core._autoload:autoload" in metadata
    assert "zipccl_deepspeed._autoload:autoload" in metadata


def test_without_a_compiler_it_installs_all_the_same(tmp_path: Path) -> None:
    names, _ = build(tmp_path, CC="/bin/false")
    assert "zipccl_core/kernels/native.py" in names
    assert not [name for name in names if "_native" in name and name.endswith(".so")]
