"""From cuda/exponent.cu to something that a driver loads: by nvcc, once a machine, or compiled ahead in the wheel.

No module of this package imports PyCUDA but `cuda`; it hands in the function that compiles.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from zipccl_core.errors import ConfigError

logger = logging.getLogger("zipccl")

VARIANTS: dict[str, tuple[str, ...]] = {
    "registers": (),
    "cp_async": ("-DZIPCCL_CP_ASYNC",),
    "ballot": ("-DZIPCCL_BALLOT",),
}
"""Ways to write the same bytes, and the macros that choose them."""
OPTIONS = ("-std=c++17", "-O3", "-w")
AHEAD = {"sm": (80, 86, 89, 90, 100), "compute": (80, 90)}
"""What a fatbin is made for: machine code, and PTX for devices that are newer."""
LOWEST = (8, 0)
"""The lowest compute capability that has all the instructions."""

_MAGIC = b"zipccl kernels 1\n"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)

Compile = Callable[[str, list[str], str, str], bytes]
"""(source, options, architecture, nvcc) -> cubin. Raises RuntimeError with what nvcc said."""


class CudaUnavailableError(ConfigError):
    """The CUDA kernels cannot be used here: the message says why, and what to do."""


class Image(NamedTuple):
    """Machine code, or PTX, of all kernels."""

    origin: str
    data: bytes


class Toolchain(NamedTuple):
    """What there is to make an image with.

    Attributes:
        nvcc: the compiler.
        cache: the folder where compiled kernels are kept.
        fatbin: kernels that were compiled ahead (`make fatbin`), with the hash of their source beside them.
    """

    nvcc: str | None
    cache: Path | None
    fatbin: Path | None

    @classmethod
    def find(cls) -> Toolchain:
        """nvcc by $ZIPCCL_NVCC (empty: none), on the path, or in the usual places; the cache in $ZIPCCL_CACHE_DIR,
        $XDG_CACHE_HOME/zipccl or ~/.cache/zipccl."""
        return cls(_find_nvcc(), _find_cache(), source_folder() / "exponent.fatbin")


def _find_nvcc() -> str | None:
    if (wanted := os.environ.get("ZIPCCL_NVCC")) is not None:
        return wanted or None
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = ["nvcc", *(str(Path(root) / "bin" / "nvcc") for root in roots if root)]
    return next(filter(None, map(shutil.which, places)), None)


def _find_cache() -> Path | None:
    if wanted := os.environ.get("ZIPCCL_CACHE_DIR"):
        return Path(wanted).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zipccl"
    except RuntimeError:  # a user without a home
        return None


def source_folder() -> Path:
    """Where exponent.cu is: package data in an installed wheel, the folder `cuda` of the repository otherwise."""
    package = Path(__file__).parent.parent
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "exponent.cu").exists():
            return folder
    raise CudaUnavailableError("exponent.cu is missing: this installation of zipccl is not whole; reinstall it")


@functools.cache
def source() -> str:
    """The kernels' source in one piece, for a compiler that runs in another folder."""
    folder = source_folder()

    def inlined(match: re.Match[str]) -> str:
        return (folder / match[1]).read_text(encoding="utf-8")

    return _INCLUDE.sub(inlined, (folder / "exponent.cu").read_text(encoding="utf-8"))


def source_hash() -> str:
    """What a fatbin is compared by: kernels and this package must agree about their arguments."""
    return hashlib.sha256(source().encode()).hexdigest()


def images(toolchain: Toolchain, variant: str, capability: tuple[int, int], compile: Compile) -> Iterator[Image]:
    """What could be loaded on a device, the best first: compiled for it, else what is in the wheel.

    Raises:
        CudaUnavailableError: nothing is left.
    """
    arch = f"sm_{capability[0]}{capability[1]}"
    if capability < LOWEST:
        raise CudaUnavailableError(
            f"the device has compute capability {capability[0]}.{capability[1]}, the kernels need "
            f"{LOWEST[0]}.{LOWEST[1]} or higher; on this device use the codec with kernels='reference', or none"
        )
    options = [*OPTIONS, *VARIANTS[variant]]
    code = hashlib.sha256("\0".join([source(), *options, arch]).encode()).hexdigest()[:24]
    name = f"exponent-{variant}-{arch}-{code}"
    problems = []
    if toolchain.nvcc is None:
        problems.append("there is no nvcc")
        entries = toolchain.cache.glob(f"{name}-*.cubin") if toolchain.cache else ()
        for entry in sorted(entries):  # another environment of this machine has an nvcc
            if data := _read_entry(entry):
                yield Image(str(entry), data)
    else:
        try:
            version = nvcc_version(toolchain.nvcc)
            entry_name = f"{name}-{hashlib.sha256(version.encode()).hexdigest()[:12]}.cubin"
            known = _read_entry(toolchain.cache / entry_name) if toolchain.cache else None
            if known is None:
                known = compile(source(), options, arch, toolchain.nvcc)
                _write_entry(toolchain.cache, entry_name, known)
            yield Image("nvcc", known)
            problems.append(f"the driver does not load what {toolchain.nvcc} compiles; it is older than the toolkit")
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            problems.append(_explain_nvcc(toolchain.nvcc, arch, str(error)))
            logger.warning("zipccl: %s", problems[-1])
    yield from _ahead(toolchain.fatbin, variant, problems)
    raise CudaUnavailableError(
        f"no kernels for {arch} (variant {variant!r}): {'; '.join(problems)}. Install a CUDA toolkit that knows the "
        "device and put its nvcc on the PATH, or install a wheel of zipccl that ships compiled kernels (make wheel)"
    )


def _ahead(fatbin: Path | None, variant: str, problems: list[str]) -> Iterator[Image]:
    if variant != "registers":
        problems.append(f"variant {variant!r} is never compiled ahead")
    elif fatbin is None or not fatbin.exists():
        problems.append("none were compiled ahead")
    else:
        hash_file = fatbin.with_name(fatbin.name + ".sha256")
        if not hash_file.exists() or hash_file.read_text().strip() != source_hash():
            problems.append(f"{fatbin} was compiled from another version of the source (make fatbin)")
            return
        logger.info("zipccl: using the kernels that were compiled ahead, since %s", "; ".join(problems))
        yield Image(str(fatbin), fatbin.read_bytes())
        problems.append(f"the driver does not load {fatbin}: it has no code for this device")


def compile_ahead(target: Path, nvcc: str) -> None:
    """Makes a fatbin, and beside it the hash of its source, for installations without nvcc.

    Raises:
        RuntimeError: nvcc failed, and said why.
    """
    known = _run([nvcc, "--list-gpu-arch"]).split()
    flags = [
        f"-gencode=arch=compute_{arch},code={kind}_{arch}"
        for kind, architectures in AHEAD.items()
        for arch in architectures
        if f"compute_{arch}" in known
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "exponent.cu").write_text(source(), encoding="utf-8")
        made = Path(folder) / "exponent.fatbin"
        _run([nvcc, "--fatbin", *OPTIONS, *flags, "-o", str(made), str(Path(folder) / "exponent.cu")])
        target.write_bytes(made.read_bytes())
    target.with_name(target.name + ".sha256").write_text(source_hash() + "\n")


def _run(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if process.returncode or (not process.stdout and "--version" in command):
        raise RuntimeError(process.stderr.strip() or f"{' '.join(command)} ended with {process.returncode}")
    return process.stdout


def nvcc_version(nvcc: str) -> str:
    """All that nvcc says about its version. Raises RuntimeError where it says nothing."""
    return _run([nvcc, "--version"])


def _explain_nvcc(nvcc: str, arch: str, said: str) -> str:
    if "gpu-architecture" in said or "Unsupported gpu architecture" in said:
        return f"{nvcc} does not know {arch}: the device is newer than this CUDA toolkit ({said.strip()})"
    return f"{nvcc} failed: {said.strip()}"


# ---- the cache: an entry is _MAGIC, SHA-256 of the image, image ----


def _read_entry(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _tell_about_cache(path.parent, str(error))
        return None
    digest, data = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    if content.startswith(_MAGIC) and hashlib.sha256(data).digest() == digest:
        return data
    logger.warning("zipccl: %s is damaged and takes no part; the kernels are compiled again", path)
    return None


def _write_entry(folder: Path | None, name: str, data: bytes) -> None:
    """Under another name first: ranks start at the same time, and none may see half an entry."""
    if folder is None:
        return
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(_MAGIC + hashlib.sha256(data).digest() + data)
        temporary.chmod(0o644)  # a cache may be shared by several users
        temporary.replace(folder / name)
    except OSError as error:
        _tell_about_cache(folder, str(error))
        if temporary is not None:
            temporary.unlink(missing_ok=True)


_told: set[Path] = set()


def _tell_about_cache(folder: Path, error: str) -> None:
    if folder in _told:
        return
    _told.add(folder)
    logger.warning(
        "zipccl: compiled kernels cannot be kept in %s, so each process compiles them anew (%s); ZIPCCL_CACHE_DIR "
        "names another folder",
        folder,
        error,
    )


def _main() -> None:
    toolchain = Toolchain.find()
    if toolchain.nvcc is None:
        raise SystemExit("there is no nvcc: install a CUDA toolkit and put its nvcc on the PATH")
    compile_ahead(Path(sys.argv[1]), toolchain.nvcc)
    print(sys.argv[1])


if __name__ == "__main__":
    _main()
