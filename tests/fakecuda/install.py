"""Installs what the tests of the CUDA kernels need, where there is nvcc: `install.py [FLAGS OF pip install]`.

That is PyCUDA and NVIDIA's disassemblers; a GPU or its driver is not needed. PyCUDA comes as source only. It is built
against a libcuda that is only there to link with (build.py), without cuRAND, and without optimisation, which would take
three times as long. Without nvcc nothing is done, and the tests are skipped.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import build

DISASSEMBLERS = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")


def pip(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, *arguments], check=True)


def is_installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))


def install_pycuda(flags: list[str]) -> None:
    """From its archive: its set-up reads a file beside it, and pip keeps no build of a folder for others to find."""
    (requirement,) = [line for line in importlib.metadata.requires("zipccl") or [] if line.startswith("pycuda")]
    requirement = requirement.split(";")[0].strip()
    root = build.toolkit()
    assert root is not None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pip("download", *flags, "--no-binary", "pycuda", "--no-deps", "--dest", temporary, requirement)
        (archive,) = folder.glob("pycuda-*.tar.gz")
        shutil.unpack_archive(archive, folder)
        source = folder / archive.name.removesuffix(".tar.gz")
        options = {
            "CUDA_ROOT": str(root),
            "CUDADRV_LIB_DIR": [str(build.build(folder / "stub", link_only=True).parent)],
            "CUDA_ENABLE_CURAND": False,
            "CXXFLAGS": ["-O0", "-g0", "-w"],
        }
        (source / "siteconf.py").write_text("".join(f"{key} = {value!r}\n" for key, value in options.items()))
        pip("install", *flags, str(source))


def main(flags: list[str]) -> int:
    reason = build.missing() if shutil.which("nvcc") else "no nvcc"
    if reason:
        print(f"the tests of the CUDA kernels that need PyCUDA or machine code are skipped: {reason}")
        return 0
    try:
        if not is_installed("pycuda"):
            install_pycuda(flags)
        if missing := [name for name in DISASSEMBLERS if not is_installed(name)]:
            pip("install", *flags, *missing)
    except (OSError, subprocess.CalledProcessError, shutil.ReadError, ValueError) as error:
        print(f"PyCUDA or the disassemblers could not be installed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
