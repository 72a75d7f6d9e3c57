"""Tests with PyCUDA over the stand-in driver, and streams like torch's over it, for torch's CPU build."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from fakecuda import build

NVCC = Path(__file__).parent / "nvcc"
CHILD_SECONDS = 100


def reason_to_skip() -> str | None:
    """What is missing on this machine."""
    if importlib.util.find_spec("pycuda") is None:
        return "PyCUDA is not installed (make venv installs it where there is nvcc)"
    if not shutil.which("g++"):
        return "no g++"
    return build.missing()


@functools.cache
def library() -> Path:
    """The stand-in driver, built once for all tests."""
    return build.build(Path(_folder().name) / "driver")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fakecuda")


def environment(**more: str) -> dict[str, str]:
    """Variables for tests, by default with the stand-in nvcc and a cache that all of them share."""
    store = Path(_folder().name) / "store"
    store.mkdir(exist_ok=True)
    cache = Path(_folder().name) / "cache"
    return {"ZIPCCL_NVCC": str(NVCC), "ZIPCCL_CACHE_DIR": str(cache), "FAKENVCC_STORE": str(store), **more}


def start(function: Callable[[], None], **environ: str) -> Callable[[], None]:
    """Runs a function in a forked child that has the stand-in driver, so that PyCUDA stays out of this process.

    Returns a function that waits for it and raises what it raised.
    """
    driver, variables = library(), environment(**environ)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        code = 1
        try:
            signal.alarm(CHILD_SECONDS)
            os.environ.update(variables)
            torch.set_num_threads(1)  # the parent's pool is lost; two threads that make a new one may collide
            ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)  # PyCUDA asks for it by its SONAME
            function()
            code = 0
        except BaseException:
            os.write(write_end, traceback.format_exc().encode()[-60000:])
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(write_end)

    def wait() -> None:
        with os.fdopen(read_end, "rb") as pipe:
            text = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        if status:
            raise AssertionError(f"child ended with {status:#x}\n{text}")

    return wait


def run(function: Callable[[], None], **environ: str) -> None:
    """`start`, and waits."""
    start(function, **environ)()


# ---- in the child ----


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    status = getattr(driver(), name)(*arguments)
    assert status == 0, f"{name} returned {status}"


def current_context() -> int | None:
    """The calling thread's, as the driver has it."""
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


@functools.cache
def primary_context(index: int) -> ctypes.c_void_p:
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
    return context


@contextmanager
def active(index: int):
    call("cuCtxPushCurrent_v2", primary_context(index))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", None)


class Stream:
    """Like torch.cuda.Stream: a stream of the driver's that PyCUDA does not know."""

    def __init__(self, index: int, handle: int | None = None) -> None:
        self.index = index
        if handle is None:
            made = ctypes.c_void_p()
            with active(index):
                call("cuStreamCreate", ctypes.byref(made), 1)
            handle = made.value
        self.cuda_stream = handle

    @property
    def handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def record_event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        with active(self.index):
            call("cuEventCreate", ctypes.byref(event), 0)
            call("cuEventRecord", event, self.handle)
        return event

    def wait_event(self, event: ctypes.c_void_p) -> None:
        with active(self.index):
            call("cuStreamWaitEvent", self.handle, event, 0)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """What torch would do to tensors in this stream."""
        nbytes = to.numel() * to.element_size()
        assert nbytes == source.numel() * source.element_size()
        with active(self.index):
            pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (to, source)]
            call("cuMemcpyDtoDAsync_v2", *pointers, ctypes.c_size_t(nbytes), self.handle)

    def synchronize(self) -> None:
        with active(self.index):
            call("cuStreamSynchronize", self.handle)


class Streams:
    """Like torch.cuda for one device: each thread has a current stream, at first the default one."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.is_capturing = False
        self._thread = threading.local()

    def current(self) -> Stream:
        return getattr(self._thread, "stream", None) or Stream(self.index, 0)

    def set(self, stream: Stream) -> None:
        self._thread.stream = stream

    def external(self, handle: int) -> Stream:
        return Stream(self.index, handle)

    def capturing(self) -> bool:
        return self.is_capturing
