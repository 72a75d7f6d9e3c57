"""The public test helpers do what they say, and notice what they should."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from zipccl_core import Codec, ExponentCodec, Frame, FrameLayout, ZipCCLConfig
from zipccl_core.testing import RankFailedError, bits, check_codec, run_ranks, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("launcher", ["processes", "threads"])
@pytest.mark.parametrize("backend", ["zipccl", "gloo"])
def test_ranks(launcher: Any, backend: str) -> None:
    def run(rank: int, world_size: int, factor: float) -> tuple[int, float, str]:
        value = torch.full((1000,), factor * (rank + 1))
        dist.all_reduce(value)
        assert dist.get_rank() == rank
        return os.getpid(), value[0].item(), dist.get_backend()

    results = run_ranks(run, 3, 2.0, backend=backend, launcher=launcher)
    assert [(value, name) for _, value, name in results] == [(12.0, backend)] * 3
    assert len({pid for pid, _, _ in results}) == (3 if launcher == "processes" else 1)


def test_results_may_be_tensors() -> None:
    results = run_ranks(lambda rank, world_size: torch.full((3,), rank), 2)
    assert [result.tolist() for result in results] == [[0, 0, 0], [1, 1, 1]]


def test_without_a_backend_the_environment_is_set() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        assert not dist.is_initialized()
        return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]

    assert run_ranks(run, 2, backend=None) == [["0", "0", "2", "127.0.0.1"], ["1", "1", "2", "127.0.0.1"]]
    with pytest.raises(ValueError, match="needs a backend"):
        run_ranks(run, 2, backend=None, launcher="threads")


@pytest.mark.parametrize("launcher", ["processes", "threads"])
def test_a_rank_that_raises(launcher: Any) -> None:
    def run(rank: int, world_size: int) -> None:
        if rank == 1:
            raise KeyError("what rank 1 says")
        dist.barrier()

    with pytest.raises(RankFailedError, match=r"rank 1 raised:\n[\s\S]*what rank 1 says"):
        run_ranks(run, 2, launcher=launcher, timeout=10)


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankFailedError, match="rank 1 died without a word"):
        run_ranks(lambda rank, world_size: os._exit(3) if rank else 0, 2, backend=None, timeout=20)


def test_a_rank_that_never_ends(capfd: pytest.CaptureFixture[str]) -> None:
    def run(rank: int, world_size: int) -> None:
        while rank == 1:
            pass

    with pytest.raises(RankFailedError, match=r"ranks \[.*1\] did not end within 1 s"):
        run_ranks(run, 2, timeout=1)


def test_bits() -> None:
    zeros = torch.tensor([0.0, -0.0]).bfloat16()
    assert bits(zeros).tolist() == [0, -32768]
    assert not same_bits(zeros[:1], zeros[1:])
    assert torch.equal(zeros[:1], zeros[1:])
    assert not same_bits(torch.zeros(2), torch.zeros(2).double())
    assert bits(torch.tensor([True, False])).tolist() == [1, 0]


class Broken(Codec):
    """A codec with a switch for each way to be wrong."""

    id: Literal["broken"] = "broken"
    how: str = ""

    def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
        nbytes = numel * dtype.itemsize
        return FrameLayout(nbytes, nbytes)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and self.how != "nothing"

    def encode(self, tensor: torch.Tensor, frame: Frame) -> None:
        data = tensor.reshape(-1).view(torch.uint8)
        frame.static.copy_(data)
        if self.how == "drops -0":
            frame.static.copy_((tensor + 0.0).reshape(-1).view(torch.uint8))
        if self.how == "skips a byte" and len(data):
            frame.buffer[128] = frame.buffer[-1]  # whatever was there
        if self.how == "writes behind" and frame.buffer.numel() > frame.layout.frame_nbytes:
            frame.buffer[frame.layout.frame_nbytes] ^= 0xFF

    def decode(self, frame: Frame, out: torch.Tensor) -> None:
        out.reshape(-1).view(torch.uint8).copy_(frame.static)


def test_the_contract_passes_a_right_codec() -> None:
    class Right(Broken):
        id: Literal["right"] = "right"  # type: ignore[assignment]

        def encode(self, tensor: torch.Tensor, frame: Frame) -> None:
            frame.static.copy_(tensor.reshape(-1).view(torch.uint8))

    check_codec(Right())


@pytest.mark.parametrize("how", ["drops -0", "skips a byte", "writes behind", "nothing"])
def test_the_contract_catches(how: str) -> None:
    with pytest.raises(AssertionError):
        check_codec(Broken(how=how))


def test_a_codec_travels() -> None:
    """A user's codec, named in the configuration, carries a collective."""

    def run(rank: int, world_size: int) -> int:
        value = torch.randn(5000, generator=torch.Generator().manual_seed(rank)).bfloat16()
        out = torch.zeros(10_000).bfloat16()
        dist.all_gather_into_tensor(out, value)
        expected = [torch.randn(5000, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(2)]
        assert same_bits(out, torch.cat(expected))
        return dist.group.WORLD.stats()["all_gather"].frames

    assert run_ranks(run, 2, config=ZipCCLConfig(codec=Broken(), strategy="always")) == [1, 1]
    assert ExponentCodec().supports(torch.bfloat16)
