"""How the CUDA kernels are compiled, kept and loaded, and what is said where they cannot be."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecuda import harness
from fakecuda.cases import check, gaussian, load

from zipccl_core.kernels import compiler, cuda

ROOT = Path(__file__).parent.parent
REASON = harness.reason_to_skip()
needs_pycuda = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def loads(expected: str | None = None, capability: str = "9.0", records: list[str] | None = None) -> Callable[[], None]:
    """Loads, and encodes something; or expects an error with these words. Logged warnings must be expected, too."""

    def child() -> None:
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("zipccl").addHandler(handler)
        if expected is None:
            kernels, _ = load()
            check(kernels, [gaussian(1000)])
        else:
            with pytest.raises(cuda.CudaUnavailableError) as caught:
                load()
            for word in expected.split("|"):
                assert word in str(caught.value)
            assert cuda.unavailable(0) == str(caught.value)
        assert len(said) == len(records or []), said
        for message, words in zip(said, records or [], strict=True):
            assert words in message

    return child


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, str]:
    return {"ZIPCCL_CACHE_DIR": str(tmp_path / "cache"), "FAKENVCC_LOG": str(tmp_path / "log")}


def compilations(folder: dict[str, str]) -> int:
    log = Path(folder["FAKENVCC_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


@needs_pycuda
def test_it_is_compiled_once_a_machine(folder: dict[str, str]) -> None:
    for _ in range(2):
        harness.run(loads(), **folder)
        assert compilations(folder) == 1
    (entry,) = Path(folder["ZIPCCL_CACHE_DIR"]).iterdir()
    assert entry.name.startswith("exponent-registers-sm_90-")
    harness.run(loads(), ZIPCCL_NVCC="", **folder)  # what nvcc has left is good without it
    harness.run(loads(), FAKECUDA_CAPABILITY="8.0", **folder)
    assert compilations(folder) == 2
    harness.run(loads(), FAKENVCC_VERSION="13.1", **folder)
    assert compilations(folder) == 3
    assert len(list(Path(folder["ZIPCCL_CACHE_DIR"]).iterdir())) == 3


@needs_pycuda
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("variant", ["registers", "cp_async"])
def test_the_real_nvcc_by_way_of_pycuda(tmp_path: Path, variant: str) -> None:
    """What it compiles is kept; only a GPU can run it."""

    def child() -> None:
        with pytest.raises(cuda.CudaUnavailableError, match=r"the driver does not load what .*nvcc compiles"):
            load(variant)

    harness.run(child, ZIPCCL_NVCC=str(shutil.which("nvcc")), ZIPCCL_CACHE_DIR=str(tmp_path))
    (entry,) = tmp_path.iterdir()
    cubin = compiler._read_entry(entry)
    assert cubin is not None
    assert (cubin[:4], int.from_bytes(cubin[18:20], "little")) == (b"\x7fELF", 190)  # EM_CUDA


@needs_pycuda
def test_processes_that_start_at_the_same_time(folder: dict[str, str]) -> None:
    waits = [harness.start(loads(), **folder) for _ in range(4)]
    for wait in waits:
        wait()
    (entry,) = Path(folder["ZIPCCL_CACHE_DIR"]).iterdir()
    assert compiler._read_entry(entry)
    assert 1 <= compilations(folder) <= 4


@needs_pycuda
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: data[:20], lambda data: b"", lambda data: data[:-9] + b"x" + data[-8:]],
)
def test_a_damaged_entry_is_compiled_again(folder: dict[str, str], damage: Callable[[bytes], bytes]) -> None:
    harness.run(loads(), **folder)
    (entry,) = Path(folder["ZIPCCL_CACHE_DIR"]).iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    harness.run(loads(records=["is damaged"]), **folder)
    assert compilations(folder) == 2
    assert entry.read_bytes() == whole


@needs_pycuda
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    harness.run(loads(records=["cannot be kept in"]), ZIPCCL_CACHE_DIR=str(tmp_path / "file" / "cache"))


@pytest.fixture(autouse=True)
def without_fatbin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that `make fatbin` may have left in the repository."""
    found = compiler.Toolchain.find
    monkeypatch.setattr(compiler.Toolchain, "find", lambda: found()._replace(fatbin=None))


def made_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in's "fatbin"; loaded kernels are found there, in the children too."""
    fatbin = tmp_path / "exponent.fatbin"
    monkeypatch.setenv("FAKENVCC_STORE", harness.environment()["FAKENVCC_STORE"])
    compiler.compile_ahead(fatbin, str(harness.NVCC))
    monkeypatch.setattr(
        compiler.Toolchain, "find", lambda: compiler.Toolchain(compiler._find_nvcc(), compiler._find_cache(), fatbin)
    )
    return fatbin


@needs_pycuda
def test_kernels_that_were_compiled_ahead(
    tmp_path: Path, folder: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fatbin = made_ahead(tmp_path, monkeypatch)
    harness.run(loads(), ZIPCCL_NVCC="", **folder)
    text = "Unsupported gpu architecture"
    harness.run(loads(records=[text]), FAKECUDA_CAPABILITY="12.1", **folder)
    harness.run(loads(records=["failed: no space"]), FAKENVCC_FAIL="no space", **folder)

    def other_variant() -> None:
        with pytest.raises(cuda.CudaUnavailableError, match="variant 'ballot' is never compiled ahead"):
            load("ballot")

    harness.run(other_variant, ZIPCCL_NVCC="", **folder)
    hash_file = fatbin.with_name("exponent.fatbin.sha256")
    hash_file.write_text("0" * 64)
    harness.run(loads("there is no nvcc|another version of the source (make fatbin)"), ZIPCCL_NVCC="", **folder)
    hash_file.write_text(compiler.source_hash())
    fatbin.write_bytes(b"nonsense" * 10)
    records = ["does not take the kernels from"]
    harness.run(loads("it has no code for this device", records=records), ZIPCCL_NVCC="", **folder)


@needs_pycuda
@pytest.mark.parametrize(
    ("expected", "records", "environ"),
    [
        ("there is no nvcc|none were compiled ahead|put its nvcc on the PATH", [], {"ZIPCCL_NVCC": ""}),
        ("line 7: error", ["failed: line 7"], {"FAKENVCC_FAIL": "line 7: error"}),
        ("does not know sm_121|newer than this CUDA toolkit", ["sm_121"], {"FAKECUDA_CAPABILITY": "12.1"}),
        ("compute capability 7.5|8.0 or higher|reference", [], {"FAKECUDA_CAPABILITY": "7.5"}),
        ("driver does not start|no CUDA-capable device|nvidia-smi", [], {"FAKECUDA_INIT": "100"}),
        ("No such file", ["No such file"], {"ZIPCCL_NVCC": "/nowhere/nvcc"}),
    ],
)
def test_what_is_missing_is_said(
    folder: dict[str, str], expected: str, records: list[str], environ: dict[str, str]
) -> None:
    harness.run(loads(expected, records=records), **{**folder, **environ})


@needs_pycuda
def test_a_device_that_is_not_there(folder: dict[str, str]) -> None:
    def child() -> None:
        with pytest.raises(cuda.CudaUnavailableError, match="no device 2, the driver has 2"):
            load(index=2)
        with pytest.raises(
            cuda.CudaUnavailableError, match="unknown variant 'fast' of the kernels; known: registers, cp_async, ballot"
        ):
            load("fast")

    harness.run(child, **folder)


@needs_pycuda
def test_a_fatbin_of_an_older_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks what that nvcc does not know."""
    for name, value in harness.environment(FAKENVCC_LOG=str(tmp_path / "log"), FAKENVCC_HIGHEST="90").items():
        monkeypatch.setenv(name, value)
    compiler.compile_ahead(tmp_path / "exponent.fatbin", str(harness.NVCC))
    (line,) = (tmp_path / "log").read_text().splitlines()
    codes = [word.split("=")[-1] for word in line.split() if word.startswith("-gencode")]
    assert codes == ["sm_80", "sm_86", "sm_89", "sm_90", "compute_80", "compute_90"]
    monkeypatch.setenv("FAKENVCC_FAIL", "disk is full")
    with pytest.raises(RuntimeError, match="disk is full"):
        compiler.compile_ahead(tmp_path / "other.fatbin", str(harness.NVCC))
    assert not (tmp_path / "other.fatbin").exists()


def test_where_things_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZIPCCL_NVCC", "ZIPCCL_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler._find_cache() == tmp_path / ".cache" / "zipccl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler._find_cache() == tmp_path / "xdg" / "zipccl"
    monkeypatch.setenv("ZIPCCL_CACHE_DIR", "~/mine")
    assert compiler._find_cache() == tmp_path / "mine"

    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert compiler._find_nvcc() == str(nvcc)
    monkeypatch.setenv("ZIPCCL_NVCC", "/another/nvcc")
    assert compiler._find_nvcc() == "/another/nvcc"
    monkeypatch.setenv("ZIPCCL_NVCC", "")
    assert compiler._find_nvcc() is None


def test_the_source_is_in_one_piece() -> None:
    assert '#include "' not in compiler.source()
    assert compiler.source().count("zipccl_exponent_encode(") == 1
    assert compiler.source().isascii()


# ---- whole processes ----


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **environ}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


ENCODES = """
import threading, torch
from fakecuda import harness
from zipccl_core.kernels import cuda, Window
cuda.streams_of = harness.Streams
def work():
    kernels = cuda.load(1)
    kernels.encode_frames([torch.ones(3000).bfloat16()], [torch.zeros(7000, dtype=torch.uint8)], Window())
thread = threading.Thread(target=work)
thread.start()
thread.join()
work()
stream = cuda.new_stream(1)
print("done")
"""


@needs_pycuda
def test_a_process_ends_well(tmp_path: Path) -> None:
    environ = harness.environment(LD_LIBRARY_PATH=str(harness.library().parent), FAKECUDA_LOG=str(tmp_path / "log"))
    process = python(ENCODES, **environ)
    assert (process.returncode, process.stdout, process.stderr) == (0, "done\n", "")
    log = (tmp_path / "log").read_text()
    assert log.count(" push ") == log.count(" pop ") > 0
    assert "release" not in log  # nothing is taken apart while others may still use it
    assert "destroy" not in log


WITHOUT = """
import sys
sys.modules["pycuda"] = None
import torch
from zipccl_core import ExponentCodec, compress, decompress
from zipccl_core.kernels import cuda
tensor = torch.arange(3000).bfloat16()
assert torch.equal(decompress(compress(tensor, ExponentCodec())), tensor)
print(cuda.unavailable(0))
try:
    cuda.load(0)
except cuda.CudaUnavailableError as error:
    print(isinstance(error, ValueError), error)
"""


def test_without_pycuda() -> None:
    process = python(WITHOUT)
    assert process.returncode == 0, process.stderr
    text = "PyCUDA is not installed: pip install 'zipccl[cuda]'"
    assert process.stdout.splitlines() == [text, f"True {text}"]


@needs_pycuda
def test_without_a_driver(tmp_path: Path) -> None:
    process = python("from zipccl_core.kernels import cuda; print(cuda.unavailable(0))", LD_LIBRARY_PATH="")
    assert process.returncode == 0, process.stderr
    if process.stdout.startswith("None"):
        pytest.skip("there is a driver")
    assert "there is no CUDA driver (libcuda.so.1" in process.stdout
