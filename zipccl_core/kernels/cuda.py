"""The CUDA kernels (cuda/exponent.cu): compiled and launched by PyCUDA on torch's memory and streams. Only this module
imports it, and only when kernels are asked for.

A launch is in the order of torch's current stream, as if torch had launched it, and no function here waits for the
device. `docs/kernels.md` says what the kernels do.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zipccl_core.kernels import Split, Window
from zipccl_core.kernels.compiler import VARIANTS, CudaUnavailableError, Toolchain, images
from zipccl_core.kernels.jobs import (
    BATCH_NBYTES,
    HEADER_NBYTES,
    MAX_JOBS,
    Job,
    align,
    batches_of,
    decode_job,
    explain,
    require,
    static_frame_nbytes,
)
from zipccl_core.kernels.streams import Streams, TorchStreams

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("zipccl")

__all__ = ["CudaKernels", "CudaUnavailableError", "explain", "load", "new_stream", "unavailable"]

_BLOCK = (256, 1, 1)  # threads of every launch
_RAW_THREAD_BLOCKS = 512  # of a launch of zipccl_exponent_raw: enough to fill a device, few enough to be done at once
_REDUCE_VALUES = 8192  # of a thread block of zipccl_exponent_decode_reduce
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream, like torch's own streams
_SMALLEST_STATE, _ZEROS = 4096, 4096  # words


streams_of: Callable[[int], Streams] = TorchStreams
"""Makes the `Streams` of a device by its index."""


class _Companion(NamedTuple):
    """The stream on which kernels are launched for a stream of torch's, for PyCUDA and for torch."""

    stream: Any
    as_torch: Any


class _Device:
    """What the process keeps for one device: primary context, streams, states of the encoder."""

    def __init__(self, index: int, streams: Streams) -> None:
        self.driver = driver = _import_driver()
        self.streams = streams
        try:
            driver.init()
            count = driver.Device.count()
            if index >= count:
                raise CudaUnavailableError(
                    f"there is no device {index}, the driver has {count}: see nvidia-smi and CUDA_VISIBLE_DEVICES"
                )
            device = driver.Device(index)
            self.capability: tuple[int, int] = device.compute_capability()
            self.context = device.retain_primary_context()
        except driver.Error as error:
            raise CudaUnavailableError(
                f"the CUDA driver does not start on device {index} ({error}): see nvidia-smi; a process that was "
                "forked after its parent used CUDA must be spawned instead"
            ) from error
        _keep_forever(self.context)
        self._lock = threading.Lock()
        self._own: dict[int, Any] = {0: None}  # by handle: streams that PyCUDA knows. 0 is the default stream
        self._companions: dict[int, _Companion] = {}
        self._states: dict[int, Tensor] = {}
        self._zeros: dict[int, Tensor] = {}

    def load(self, image: bytes) -> Any:
        """A module of an image: PyCUDA's SourceModule, without what that would compile and cache."""
        from pycuda.compiler import SourceModule

        class Module(SourceModule):  # type: ignore[misc]  # PyCUDA has no types
            def __init__(self, module: Any) -> None:
                self.module = module
                self._bind_module()

        return _keep_forever(Module(self.driver.module_from_buffer(image)))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the primary context this thread's current one, on top of whatever is."""
        self.context.push()
        try:
            yield
        finally:
            self.driver.Context.pop()

    def new_stream(self) -> Any:
        """A PyCUDA stream."""
        with self.active():
            return _keep_forever(self.driver.Stream(_NON_BLOCKING))

    def add_stream(self) -> Any:
        """A stream for torch that PyCUDA knows, too."""
        stream = self.new_stream()
        self._own[stream.handle] = stream
        return self.streams.external(stream.handle)

    def state(self, current: Any, words: int, near: Tensor) -> Tensor:
        """Memory for an encoding in `current`: zero when new, then as the encoding before has left it.

        One a stream, since launches that overlap in time must not share it. A graph gets one of its own for each
        launch, with memory of the graph: its replay may overlap with whatever is launched in the stream that it was
        captured in.
        """
        if self.streams.capturing():
            return near.new_zeros(words, dtype=torch.int64)
        with self._lock:
            kept = self._states.get(current.cuda_stream)
            if kept is None or kept.numel() < words:
                with torch.inference_mode(False):
                    kept = near.new_zeros(max(_SMALLEST_STATE, 2 * words), dtype=torch.int64)
                self._states[current.cuda_stream] = kept
            return kept

    def zeros(self, current: Any, n: int, near: Tensor) -> Tensor:
        """int32, shape (n,), zero in `current`: a piece of some thousands that were cleared together, so that hardly a
        launch needs a memset beside it. In a graph, which may be replayed, each has its own."""
        if self.streams.capturing():
            return near.new_zeros(n, dtype=torch.int32)
        with self._lock:
            left = self._zeros.get(current.cuda_stream)
            if left is None or left.numel() < n:
                with torch.inference_mode(False):
                    left = near.new_zeros(max(_ZEROS, n), dtype=torch.int32)
            self._zeros[current.cuda_stream] = left[n:]
        return left[:n]

    def launch(self, current: Any, launches: Sequence[tuple[Any, int, tuple[Any, ...]]]) -> None:
        """Launches functions with these grids and arguments in the order of a torch stream.

        PyCUDA launches on streams that it has made itself, and on the default stream; there is no way to hand it the
        handle of another. So each stream of torch's has a companion, which waits for it, runs the kernels, and is
        waited for: two events, no host. Memory is as safe as if it had been used in torch's stream.
        """
        handle = current.cuda_stream
        companion = None if handle in self._own else self._companion(handle)
        stream = companion.stream if companion else self._own[handle]
        if companion:
            companion.as_torch.wait_stream(current)
        try:
            # Whatever context torch has made current: in a thread that is new to CUDA it is none, and in one that has
            # used two devices perhaps the other one's.
            with self.active():
                for function, grid, arguments in launches:
                    function.prepared_async_call((grid, 1), _BLOCK, stream, *arguments)
        finally:
            if companion:
                current.wait_stream(companion.as_torch)

    def _companion(self, handle: int) -> _Companion:
        with self._lock:
            companion = self._companions.get(handle)
            if companion is None:
                stream = self.new_stream()
                companion = self._companions[handle] = _Companion(stream, self.streams.external(stream.handle))
            return companion


class CudaKernels:
    """The kernels of one device. Every function may be called from any thread, and is in the order of that thread's
    current stream of the device. Tensors are contiguous and on the device; frames begin at multiples of 8 bytes."""

    name = "cuda"

    def __init__(self, device: _Device, module: Any, variant: str) -> None:
        self.variant = variant
        self._device = device
        self._values_per_thread_block = 8192 * (4 if variant == "cp_async" else 1)

        def function(name: str, *arguments: str) -> Any:
            return module.get_function(f"zipccl_exponent_{name}").prepare([f"{BATCH_NBYTES}s", *arguments])

        self._encode = function("encode", "i", "Q", "P", "P")  # base, table, state, sizes
        self._raw = function("raw", "I")  # thread blocks of a job
        self._decode = function("decode", "P")  # status
        self._decode_reduce = function("decode_reduce", "P", "P", "I", "f", "P")  # initial, out, wide, divisor, status

    def encode_frames(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor], window: Window) -> Tensor:
        """Writes the frames of 16-bit tensors, headers included, to the starts of uint8 buffers, each with room for the
        largest frame of its numel. Enqueues two launches for 64 tensors.

        Returns:
            The frames' dynamic_nbytes: int64, shape (n,), on the device.
        """
        jobs = []
        for tensor, buffer in zip(tensors, buffers, strict=True):
            numel, static = tensor.numel(), static_frame_nbytes(tensor.numel())
            room = max(static, HEADER_NBYTES + align(2 * numel))
            require(tensor, buffer, room)
            jobs.append(Job(tensor.data_ptr(), buffer.data_ptr(), buffer.data_ptr() + static, numel, room - static))
        base = -1 if window.base is None else window.base
        table = 0 if window.table is None else int.from_bytes(bytes(window.table), "little")
        batches = list(batches_of(jobs, self._values_per_thread_block))
        near, current = buffers[0], self._device.streams.current()
        sizes = near.new_empty(len(jobs), dtype=torch.int64)
        state = self._device.state(current, 1 + max(batch.grid for batch in batches), near)
        launches: list[tuple[Any, int, tuple[Any, ...]]] = []
        for batch in batches:
            address = sizes.data_ptr() + 8 * batch.begin
            launches.append((self._encode, batch.grid, (batch.data, base, table, state.data_ptr(), address)))
            each = max(1, min(batch.largest, _RAW_THREAD_BLOCKS // batch.n_jobs))
            launches.append((self._raw, each * batch.n_jobs, (batch.data, each)))
        self._device.launch(current, launches)
        return sizes

    def decode_frames(self, frames: Sequence[Split], outs: Sequence[Tensor]) -> Tensor:
        """Checks frames, RAW or not, whole or not, and fills 16-bit `outs`. Enqueues one launch for 64 frames.

        Returns:
            int32, shape (n,), on the device. 0: decoded; else see `explain`, and the output is unspecified.
        """
        jobs = []
        for frame, out in zip(frames, outs, strict=True):
            require(out, frame.static, static_frame_nbytes(out.numel()))
            jobs.append(decode_job(frame, out.numel(), out.data_ptr()))
        batches = list(batches_of(jobs, self._values_per_thread_block))
        current = self._device.streams.current()
        status = self._device.zeros(current, len(jobs), outs[0])
        address = status.data_ptr()
        launches = [(self._decode, batch.grid, (batch.data, address + 4 * batch.begin)) for batch in batches]
        self._device.launch(current, launches)
        return status

    def decode_reduce(self, parts: Sequence[Split | Tensor], out: Tensor, divisor: int) -> Tensor:
        """Decodes and adds in fp32, in order, divides, and rounds once, to bf16 or fp32 as `out` is. Enqueues one
        launch for 64 parts.

        Args:
            parts: one a rank: its frame, or its bf16 values, which may be the memory of `out`.

        Returns:
            Status as `decode_frames`, one a rank.
        """
        numel, jobs = out.numel(), []
        if out.dtype not in (torch.bfloat16, torch.float32) or not out.is_contiguous():
            raise ValueError(f"a sum must be bfloat16 or float32 and contiguous, not {out.dtype} {out.stride()}")
        for part in parts:
            if isinstance(part, Split):
                require(None, part.static, static_frame_nbytes(numel))
                jobs.append(decode_job(part, numel, 0))
            else:
                require(part, None, 0)
                if part.numel() != numel:
                    raise ValueError(f"a part has {part.numel()} values, the sum {numel}")
                jobs.append(Job(part.data_ptr(), 0, 0, numel, 0))
        current = self._device.streams.current()
        status = self._device.zeros(current, len(jobs), out)
        totals = [out.new_empty(numel, dtype=torch.float32) for _ in range((len(jobs) - 1) // MAX_JOBS)]  # on the way
        launches, grid = [], max(1, -(-numel // _REDUCE_VALUES))
        for i, batch in enumerate(batches_of(jobs, _REDUCE_VALUES)):
            last = i == len(totals)
            target, wide = (out, out.dtype == torch.float32) if last else (totals[i], True)
            initial = totals[i - 1].data_ptr() if i else 0
            address = status.data_ptr() + 4 * batch.begin
            arguments = (batch.data, initial, target.data_ptr(), int(wide), float(divisor if last else 1), address)
            launches.append((self._decode_reduce, grid, arguments))
        self._device.launch(current, launches)
        return status

    def explain(self, status: int) -> str:
        """What a status says, in words."""
        return explain(status)


# ---- once a process ----

_lock = threading.RLock()
_devices: dict[tuple[int, int], _Device] = {}  # by process, since a forked child cannot use them, and device
_kernels: dict[tuple[int, int, str], CudaKernels] = {}
_reasons: dict[tuple[int, int, str], str] = {}


def load(
    index: int = 0, *, variant: str = "registers", streams: Streams | None = None, toolchain: Toolchain | None = None
) -> CudaKernels:
    """The kernels for a device; compiles them where that was not done before. Later calls return the same.

    Args:
        index: torch's and the driver's number of the device.
        variant: one of VARIANTS; all write the same bytes.
        streams: in place of torch.cuda; heeded by the first call for a device.
        toolchain: in place of what is found.

    Raises:
        CudaUnavailableError: they cannot be used.
    """
    key = (os.getpid(), index, variant)
    if (kernels := _kernels.get(key)) is not None:
        return kernels
    with _lock:
        if key in _kernels:
            return _kernels[key]
        if key in _reasons:
            raise CudaUnavailableError(_reasons[key])
        try:
            if variant not in VARIANTS:
                raise CudaUnavailableError(f"unknown variant {variant!r} of the kernels; known: {', '.join(VARIANTS)}")
            device = _device(index, streams)
            _kernels[key] = _load(device, variant, toolchain or Toolchain.find())
        except CudaUnavailableError as error:
            _reasons[key] = str(error)
            raise
        return _kernels[key]


def unavailable(index: int = 0) -> str | None:
    """Why the kernels cannot be used on a device in this process, and what to do; None where they can, and then they
    are loaded."""
    try:
        load(index)
    except CudaUnavailableError as error:
        return str(error)
    return None


def new_stream(index: int = 0) -> Any:
    """A torch stream on which kernels are launched without events. It lives as long as the process.

    Raises:
        CudaUnavailableError: the kernels cannot be used.
    """
    load(index)
    return _devices[os.getpid(), index].add_stream()


def _import_driver() -> Any:
    try:
        import pycuda.driver as driver
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "pycuda":
            raise CudaUnavailableError(f"PyCUDA cannot be imported ({error}): reinstall it") from error
        raise CudaUnavailableError("PyCUDA is not installed: pip install 'zipccl[cuda]'") from error
    except ImportError as error:
        if "libcuda" not in str(error):
            raise CudaUnavailableError(
                f"PyCUDA cannot be imported ({error}): it was built for another Python or CUDA; reinstall it, by "
                "pip install --force-reinstall --no-cache-dir pycuda"
            ) from error
        raise CudaUnavailableError(
            f"there is no CUDA driver ({error}): install NVIDIA's driver, or start the container with its GPUs"
        ) from error
    return driver


def _keep_forever(thing: Any) -> Any:
    """One reference too many, so that it is never destroyed. The interpreter's end clears modules in some order and
    some thread; PyCUDA's destructors would then need contexts, and complain, or find a driver that is gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def _device(index: int, streams: Streams | None) -> _Device:
    key = (os.getpid(), index)
    if key not in _devices:
        _devices[key] = _Device(index, streams or streams_of(index))
    return _devices[key]


def _load(device: _Device, variant: str, toolchain: Toolchain) -> CudaKernels:
    from pycuda.compiler import compile as run_nvcc

    def compile(text: str, options: list[str], arch: str, nvcc: str) -> bytes:
        try:
            cubin: bytes = run_nvcc(text, nvcc, options, no_extern_c=True, arch=arch, cache_dir=False)
        except device.driver.CompileError as error:
            raise RuntimeError(error.stderr or str(error)) from error
        return cubin

    for image in images(toolchain, variant, device.capability, compile):
        try:
            with device.active():
                return CudaKernels(device, device.load(image.data), variant)
        except (device.driver.Error, UnicodeDecodeError) as error:  # the latter from PyCUDA, of a driver's log
            logger.warning("zipccl: the driver does not take the kernels from %s: %s", image.origin, error)
    raise AssertionError("unreachable: images() raises when nothing is left")
