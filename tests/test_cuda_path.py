"""All of the GPU path but the GPU: collectives on recorded streams (test_device_path.py), whose codec launches the CUDA
kernels through PyCUDA over the stand-in driver (test_pycuda.py)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakecuda import harness
from fakecuda.cases import load
from test_device_path import (
    BF16,
    SIZES,
    Caller,
    all_to_alls,
    broadcasts,
    data,
    fp32_reductions,
    gathers,
    on_every_rank,
    reductions,
    several_at_once,
)

from zipccl_core import ExponentCodec, WireFormatError, compress, decompress
from zipccl_core.codec import exponent
from zipccl_core.testing import run_ranks, same_bits

REASON = harness.reason_to_skip()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def take_cuda_kernels() -> list[str]:
    """Lets the codec take the CUDA kernels for tensors of the CPU; each launch adds its name to the returned list."""
    kernels, _ = load()
    used: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            used.append(name)
            return getattr(kernels, name)

    exponent.select_frames = lambda device, wanted: None if wanted == "reference" else Counted()  # type: ignore[assignment]
    return used


def with_cuda_kernels(
    rank: int, world_size: int, driver: str, variables: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(variables)
    ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
    used = take_cuda_kernels()
    fn(rank, world_size, *args)
    needed = "decode_reduce" if fn is fp32_reductions else "decode_frames"
    assert {"encode_frames", needed} <= set(used)


def on_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> None:
    """Runs it on processes that each have a stand-in driver of their own."""
    driver, variables = str(harness.library()), harness.environment()
    run_ranks(with_cuda_kernels, world_size, driver, variables, fn, args, backend="gloo", timeout=90)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "case", [gathers, all_to_alls, reductions, broadcasts, several_at_once], ids=lambda case: case.__name__
)
def test_as_native(case: Callable[[Caller], None], sizes: str) -> None:
    on_ranks(on_every_rank, 2, case, {**SIZES[sizes], "codec": ExponentCodec(threads=1)})


def test_fp32_order_in_one_launch() -> None:
    on_ranks(fp32_reductions, 3)


def damaged(rank: int, world_size: int) -> None:
    """The host has not seen the frame: what the kernel found is raised by the wait, or by a later call."""
    caller = Caller(rank)
    mine, out = caller.computed(data(5000, 3)), torch.zeros(world_size * 5000, dtype=BF16)
    caller.communicator.all_gather_into_tensor(out, mine)
    (path,) = caller.communicator._paths.values()
    all_gather = path.mover.all_gather

    def flip(output: torch.Tensor, message: torch.Tensor) -> None:
        all_gather(output, message)
        if message.numel() > 2000:
            output.view(world_size, -1)[1 - rank][128 + 128 + 1] = 7  # the mode of the first block

    path.mover.all_gather = flip
    with pytest.raises(WireFormatError, match=rf"all_gather on rank {rank} of group .*: from rank {1 - rank}: damaged"):
        caller.communicator.all_gather_into_tensor(out, mine)
        caller.reads(out)
        path.mover.all_gather = all_gather
        caller.communicator.all_gather_into_tensor(out, mine)
    path.mover.all_gather = all_gather
    caller.end()


def test_damage_that_only_the_device_has_seen() -> None:
    on_ranks(damaged, 2)


def test_one_tensor_at_a_time() -> None:
    """`compress` and `decompress`, with what is not in batches: a table, a checksum, damage."""

    def child() -> None:
        used = take_cuda_kernels()
        for codec in (ExponentCodec(), ExponentCodec(table=(121, 120, 119, 122, 118, 0, 255), checksum="crc32c")):
            for tensor in (data(0, 1), data(700, 1), data(5000, 1), data(5000, 4), data(20_001, 3)):
                frame = compress(tensor, codec)
                assert torch.equal(frame, compress(tensor, codec.model_copy(update={"kernels": "reference"})))
                assert same_bits(decompress(frame), tensor)
        assert {"encode_frames", "decode_frames"} <= set(used)
        frame = compress(data(5000, 3), ExponentCodec())
        frame[128 + 128 + 1] = 7
        with pytest.raises(WireFormatError, match="mode"):
            decompress(frame)

    harness.run(child)
