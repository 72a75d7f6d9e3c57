"""Compressors that bench/gpu.py compares with: nvCOMP's Python package and dietgpu, on the same tensors and the same
stream, between the same copies. Memory is made before, and nothing is read by the host, where their interfaces let."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from gpu_codec import Operation, Payload
from gpu_machine import different

DIETGPU_LIBRARY = "DIETGPU_LIBRARY"
"""Environment: libdietgpu.so, built from its repository."""


class MissingError(Exception):
    """A package is not here; the message says what would bring it."""


class Peer(ABC):
    """A compressor on the tensors of a payload.

    Raises:
        MissingError: when it is made where it is not installed.
    """

    label: ClassVar[str]

    def __init__(self, payload: Payload, stream_handle: int) -> None:
        self.payload, self.stream_handle = payload, stream_handle
        self.values, self.out = payload.values, payload.out
        self.name = self.label

    @abstractmethod
    def encode(self) -> object: ...

    @abstractmethod
    def decode(self) -> object: ...

    @property
    @abstractmethod
    def wire_nbytes(self) -> int:
        """Of what `encode` has made."""

    def operations(self) -> Iterator[Operation]:
        """After a first round trip, which is checked like all others."""
        self.encode()
        self.out.zero_()
        self.decode()
        nbytes, moved = self.payload.nbytes, self.payload.nbytes + self.wire_nbytes
        if wrong := different(self.out, self.values):
            raise RuntimeError(f"{wrong} values do not come back")
        clear, n_wrong = self.out.zero_, partial(different, self.out, self.values)
        yield Operation("encode", self.name, self.encode, nbytes, moved, clear, self._n_wrong)
        yield Operation("decode", self.name, self.decode, nbytes, moved, clear, n_wrong)

    def _n_wrong(self) -> int:
        self.decode()
        return different(self.out, self.values)


class NvComp(Peer):
    """nvCOMP 6: configured once, into memory of its own arrays, which are reused."""

    algorithm: ClassVar[dict[str, Any]]

    def __init__(self, payload: Payload, stream_handle: int) -> None:
        super().__init__(payload, stream_handle)
        try:
            from nvidia import nvcomp
        except ImportError as error:
            raise MissingError(f"{error} (pip install nvidia-nvcomp-cu13, or -cu12 for CUDA 12)") from error
        self.name = f"{self.label} {nvcomp.__version__}"
        index = payload.values.device.index or 0
        self.codec = nvcomp.Codec(**self.algorithm, device_id=index, cuda_stream=stream_handle)
        self.source = nvcomp.as_array(self.values.view(torch.uint8), cuda_stream=stream_handle)
        self.target = nvcomp.as_array(self.out.view(torch.uint8), cuda_stream=stream_handle)
        self.encoded = self.codec.encode(self.source)
        self._nbytes = int(self.encoded.buffer_size)
        self.encoding = self.codec.compression_config(payload.nbytes)
        self.decoding = self.codec.decompression_config(self.encoding)

    def encode(self) -> object:
        self.encoded = self.codec.encode(self.source, out=self.encoded, compression_config=self.encoding)
        return self.encoded

    def decode(self) -> object:
        return self.codec.decode(self.encoded, out=self.target, decompression_config=self.decoding)

    @property
    def wire_nbytes(self) -> int:
        return self._nbytes


class NvCompAns(NvComp):
    label = "nvcomp ANS |u1"
    algorithm: ClassVar[dict[str, Any]] = {"algorithm": "ANS", "data_type": "|u1"}


class NvCompAnsHalf(NvComp):
    label = "nvcomp ANS <f2"
    algorithm: ClassVar[dict[str, Any]] = {"algorithm": "ANS", "data_type": "<f2"}


class NvCompBitcomp(NvComp):
    label = "nvcomp Bitcomp <u2"
    algorithm: ClassVar[dict[str, Any]] = {"algorithm": "Bitcomp", "data_type": "<u2"}


class DietGpu(Peer):
    """As its benchmark.py does: the float codec, with scratch, output and sizes brought along."""

    label = "dietgpu"
    SCRATCH_NBYTES = 384 << 20  # its benchmark's, for tensors of 128 MiB

    def __init__(self, payload: Payload, stream_handle: int) -> None:
        super().__init__(payload, stream_handle)
        self.ops = _dietgpu()
        device, scratch_nbytes = self.values.device, max(self.SCRATCH_NBYTES, 3 * payload.nbytes)
        self.scratch = torch.empty(scratch_nbytes, dtype=torch.uint8, device=device)
        rows, columns = self.ops.max_float_compressed_output_size([self.values])
        self.compressed = torch.empty(rows, columns, dtype=torch.uint8, device=device)
        self.sizes = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.empty(1, dtype=torch.uint8, device=device)
        self.numels = torch.empty(1, dtype=torch.int32, device=device)

    def encode(self) -> object:
        return self.ops.compress_data(True, [self.values], self.scratch, self.compressed, self.sizes)

    def decode(self) -> object:
        frames = [self.compressed[0]]
        return self.ops.decompress_data(True, frames, [self.out], self.scratch, self.status, self.numels)

    @property
    def wire_nbytes(self) -> int:
        return int(self.sizes)


def _dietgpu() -> Any:
    """torch.ops.dietgpu, where its library is."""
    if not hasattr(torch.ops.dietgpu, "compress_data"):
        path = os.environ.get(DIETGPU_LIBRARY)
        if not path:
            raise MissingError(
                f"{DIETGPU_LIBRARY} does not name its libdietgpu.so (github.com/facebookresearch/dietgpu)"
            )
        torch.ops.load_library(path)
    return torch.ops.dietgpu


PEERS: tuple[type[Peer], ...] = (NvCompAns, NvCompAnsHalf, NvCompBitcomp, DietGpu)


def operations(payload: Payload, stream_handle: int) -> tuple[list[Operation], list[str]]:
    """What can be measured here, and why the rest cannot: a peer that is not installed, or raises, is named."""
    found: list[Operation] = []
    without: list[str] = []
    for kind in PEERS:
        try:
            found += kind(payload, stream_handle).operations()
        except MissingError as error:
            without.append(f"{kind.label} is not installed: {error}")
        except Exception as error:
            without.append(f"{kind.label} failed: {type(error).__name__}: {error}")
    return found, without
