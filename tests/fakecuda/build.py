"""Builds a libcuda.so.1 for machines without a CUDA driver: `build.py [--link-only] FOLDER`.

All entry points of the driver are in it, so that PyCUDA links and loads. With --link-only each returns an error;
otherwise driver.c adds those that PyCUDA needs, and kernels run on the CPU (tests/cusim). Needs a C compiler and the
toolkit's cuda.h.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


def toolkit() -> Path | None:
    """The CUDA toolkit: the folder that has include/cuda.h. An nvcc on the path may be a wrapper elsewhere."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_ROOT", "CUDA_PATH")]
    candidates += [nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda", "/usr"]
    for candidate in candidates:
        if candidate and (Path(candidate) / "include" / "cuda.h").exists():
            return Path(candidate)
    return None


def missing() -> str | None:
    """What the build would need and this machine does not have."""
    if not any(map(shutil.which, COMPILERS)):
        return "no C compiler"
    return None if toolkit() else "no CUDA toolkit (cuda.h)"


def build(folder: Path, link_only: bool = False) -> Path:
    """Builds FOLDER/libcuda.so.1 and the link name libcuda.so; returns the former."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    root = toolkit()
    assert root is not None, missing()
    folder.mkdir(parents=True, exist_ok=True)
    include = ["-I", str(root / "include")]
    command = [compiler, "-E", "-P", *include, "-include", "cuda.h", "-include", "cudaProfiler.h", "-x", "c", "-"]
    header = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
    names = sorted(set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", header)))
    stubs = folder / "stubs.c"
    stubs.write_text(
        "".join(f"__attribute__((weak)) int {name}(void) {{ return {NOT_SUPPORTED}; }}\n" for name in names)
    )
    library = folder / "libcuda.so.1"
    sources = [stubs] if link_only else [stubs, HERE / "driver.c"]
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, *include, *map(str, sources), "-o", str(library), "-ldl"], check=True)
    link_name = folder / "libcuda.so"
    link_name.unlink(missing_ok=True)
    link_name.symlink_to(library.name)
    return library


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--link-only"]
    print(build(Path(arguments[0]), link_only="--link-only" in sys.argv))
