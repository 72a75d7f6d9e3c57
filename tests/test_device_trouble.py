"""The collectives' path on a device (test_device_path.py) in trouble: damage, odd calls, several communicators."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from recorded_device import RecordedDevice
from test_device_path import BF16, CPU, SIZES, Caller, data

from zipccl_core import Codec, Communicator, ExponentCodec, FrameLayout, TransportError, WireFormatError, ZipCCLConfig
from zipccl_core.collective.device import exchange
from zipccl_core.collective.device.patterns import Gather
from zipccl_core.kernels import OVERFLOW
from zipccl_core.strategy.operation import Operation
from zipccl_core.testing import run_ranks, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def gathered(world_size: int, *seed: int) -> torch.Tensor:
    return torch.cat([data(5000, r, *seed) for r in range(world_size)])


def outputs(world_size: int) -> torch.Tensor:
    return torch.zeros(world_size * 5000, dtype=BF16)


# ---------------------------------------------------------------------- order of calls


def async_then_message(rank: int, world_size: int) -> None:
    """An asynchronous call returns before the others have begun it: they may first wait for a message from here."""
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        caller.communicator.all_reduce(data(5000, rank, 5))
        mine, small = caller.computed(data(5000, rank, 5 - rank)), torch.ones(4)
        if rank == 0:
            work = caller.communicator.all_reduce(mine, async_op=True)
            dist.send(small, 1)
        else:
            dist.recv(small, 0)
            work = caller.communicator.all_reduce(mine, async_op=True)
        work.wait()
        (seen,) = caller.reads(mine)
        wanted = data(5000, 0, 5) + data(5000, 1, 4)
        assert same_bits(seen, wanted)
        caller.end()


def native_in_between(rank: int, world_size: int) -> None:
    """One rank waits before a native call, the other after it, also where something has to follow."""
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        out, count = outputs(world_size), torch.ones(4, dtype=torch.int64)
        work = caller.communicator.all_gather_into_tensor(out, caller.computed(data(5000, rank, 2)), async_op=True)
        if rank == 1:
            work.wait()
            caller.device.record().synchronize()
        with caller.device.progress():
            caller.communicator.all_reduce(count)
        work.wait()
        (seen,) = caller.reads(out)
        assert same_bits(seen, gathered(world_size, 2))
        caller.end()


def two_communicators(rank: int, world_size: int) -> None:
    """On one group: their messages are kept apart."""
    devices = [RecordedDevice(rank), RecordedDevice(rank + 7)]
    communicators = [
        Communicator(dist.group.WORLD, ZipCCLConfig(strategy="always"), devices={CPU: device}) for device in devices
    ]
    with devices[0].progress(), devices[1].progress():
        for step in range(10):
            started = []
            for i in range(2):
                numel = 5000 + 4000 * i
                every = [data(numel, r, step + i) for r in range(world_size)]
                out = torch.zeros(world_size * numel, dtype=BF16)
                work = communicators[i].all_gather_into_tensor(out, every[rank], async_op=True)
                started.append((work, devices[i], out, torch.cat(every)))
            for work, device, out, wanted in started[:: 1 if rank else -1]:
                work.wait()
                device.record().synchronize()
                assert same_bits(out, wanted)
    for communicator in communicators:
        communicator.close()


def polled(rank: int, world_size: int) -> None:
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        out = outputs(world_size)
        work = caller.communicator.all_gather_into_tensor(out, caller.computed(data(5000, rank)), async_op=True)
        while not work.is_completed():
            caller.device.run_all()
        assert work.is_success()
        assert same_bits(out, gathered(world_size))
        caller.end()


@pytest.mark.parametrize(
    "case", [async_then_message, native_in_between, two_communicators, polled], ids=lambda case: case.__name__
)
def test_order_of_calls(case: Any) -> None:
    run_ranks(case, 2, backend="gloo")


# ---------------------------------------------------------------------- odd tensors and codecs


def overlapping_reduction(rank: int, world_size: int) -> None:
    """The output lies across this rank's part of the input, or is a strided view of it."""
    numel = 5000
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        values, wanted = data(world_size * numel, rank, 15 - rank), torch.zeros(numel, dtype=BF16)
        dist.reduce_scatter_tensor(wanted, values.clone())
        for strided in (False, True):
            memory = torch.zeros(world_size * numel + 64, dtype=BF16)
            mine = memory[: world_size * numel]
            caller.device.enqueue(lambda mine=mine: mine.copy_(values))
            out = mine[rank * numel : (rank + 1) * numel].view(50, 100).t()
            if not strided:
                out = memory[rank * numel + 16 : (rank + 1) * numel + 16]
            caller.communicator.reduce_scatter_tensor(out, mine)
            (seen,) = caller.reads(out)
            assert same_bits(seen.reshape(-1), wanted)
        caller.end()


class LumpyCodec(Codec):
    """Its layout is not monotonic in numel."""

    id: Literal["lumpy"] = "lumpy"

    def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
        nbytes = numel * dtype.itemsize
        if numel < 4096:
            return FrameLayout(nbytes, nbytes, always_raw=True)
        return FrameLayout(nbytes // 2, nbytes + 256)

    def encode(self, tensor: torch.Tensor, frame: Any) -> None:
        raw, half = tensor.reshape(-1).view(torch.uint8), frame.layout.static_nbytes
        frame.static.copy_(raw[:half])
        frame.dynamic[: raw.numel() - half].copy_(raw[half:])
        frame.dynamic_nbytes.fill_(raw.numel() - half)

    def decode(self, frame: Any, out: torch.Tensor) -> None:
        raw, half = out.reshape(-1).view(torch.uint8), frame.layout.static_nbytes
        raw[:half].copy_(frame.static)
        raw[half:].copy_(frame.dynamic[: raw.numel() - half])


def uneven_gather_with_a_lumpy_codec(rank: int, world_size: int) -> None:
    for sizes in SIZES.values():
        caller = Caller(rank, codec=LumpyCodec(), **sizes)
        every = [data(4095 + r, r) for r in range(world_size)]
        outs = [torch.zeros_like(values) for values in every]
        caller.communicator.all_gather(outs, caller.computed(every[rank]))
        for seen, wanted in zip(caller.reads(*outs), every, strict=True):
            assert same_bits(seen, wanted)
        caller.end()


def inference_mode(rank: int, world_size: int) -> None:
    """Begun in inference mode, waited for outside; strided, so that there is a copy at the end."""
    for sizes in SIZES.values():
        caller = Caller(rank, codec=ExponentCodec(kernels="reference"), **sizes)
        with torch.inference_mode():
            out = torch.zeros(5000, world_size, dtype=BF16).t()
            work = caller.communicator.all_gather_into_tensor(out, data(5000, rank), async_op=True)
        work.wait()
        with torch.inference_mode():
            caller.device.run_all()
            assert same_bits(out.reshape(-1), gathered(world_size))
        caller.end()


@pytest.mark.parametrize(
    "case",
    [overlapping_reduction, uneven_gather_with_a_lumpy_codec, inference_mode],
    ids=lambda case: case.__name__,
)
def test_odd_tensors(case: Any) -> None:
    run_ranks(case, 2, backend="gloo")


# ---------------------------------------------------------------------- damage


def damage_of(caller: Caller, at: int) -> Any:
    """Damages a byte of the peer's message in the next all-gather's first movement."""
    (path,) = caller.communicator._paths.values()
    all_gather = path.mover.all_gather

    def flip(output: torch.Tensor, message: torch.Tensor) -> None:
        path.mover.all_gather = all_gather
        all_gather(output, message)
        output.view(caller.world_size, -1)[1 - caller.rank][at] ^= 0x40

    path.mover.all_gather = flip


@pytest.mark.parametrize(("at", "message"), [(0, "not a ZipCCL frame"), (2000, "checksum"), (45, "dynamic bytes")])
def test_damage_is_named(at: int, message: str) -> None:
    def on_each(rank: int, world_size: int) -> None:
        for sizes in SIZES.values():
            caller = Caller(rank, codec=ExponentCodec(checksum="crc32c"), **sizes)
            out = outputs(world_size)
            caller.communicator.all_gather_into_tensor(out, data(5000, 3))
            caller.device.run_all()
            damage_of(caller, at)
            with pytest.raises(WireFormatError, match=rf"from rank {1 - rank}: .*{message}"):
                caller.communicator.all_gather_into_tensor(out, data(5000, 3))
                caller.reads(out)
            caller.communicator._worker.drain()
            # the streams have steps left that will not do: no end()

    run_ranks(on_each, 2, backend="gloo")


class SuspiciousCodec(ExponentCodec):
    """Finds, as a kernel would, on the device and not at once, that a frame is damaged."""

    id: Literal["suspicious"] = "suspicious"  # type: ignore[assignment]

    def read_all(self, frames: Any, outs: Any) -> torch.Tensor:
        status = super().read_all(frames, outs)
        return status + (4 if SUSPECT.is_set() else 0)

    def explain(self, status: int) -> str:
        return f"it looks like {status}"


SUSPECT = threading.Event()


def found_on_the_device(rank: int, world_size: int) -> None:
    """Only rank 0 meets damage; the call says so when its wait comes late enough, or else the next wait. All take part
    in later calls."""
    for late in (True, False):
        caller = Caller(rank, codec=SuspiciousCodec())
        out, mine = outputs(world_size), data(5000, rank)
        if rank == 0:
            SUSPECT.set()
        work = caller.communicator.all_gather_into_tensor(out, mine, async_op=True)
        caller.communicator._worker.drain()
        if late:
            caller.device.run_all()
        for _ in range(2):
            if late and rank == 0:
                with pytest.raises(WireFormatError, match="all_gather on rank 0 of .*from rank 1: it looks like 4"):
                    work.wait()
            else:
                work.wait()
        caller.device.run_all()
        SUSPECT.clear()
        following = caller.communicator.all_gather_into_tensor(out, mine, async_op=True)
        if rank == 0 and not late:
            with pytest.raises(WireFormatError, match="all_gather on rank 0 of .*from rank 1: it looks like 4"):
                following.wait()
        following.wait()  # it has been told
        (seen,) = caller.reads(out)
        assert same_bits(seen, gathered(world_size))
        (path,) = caller.communicator._paths.values()
        caller.communicator.all_gather_into_tensor(out, mine)
        assert len(path._under_way) == 1  # nothing is left of the others
        caller.end()


def test_damage_that_the_device_finds() -> None:
    run_ranks(found_on_the_device, 2, backend="gloo")


def suspected(caller: Caller, async_op: bool = True) -> Any:
    """A call in which this rank finds damage, when the device comes there."""
    SUSPECT.set()
    work = caller.communicator.all_gather_into_tensor(
        outputs(caller.world_size), data(5000, caller.rank), async_op=async_op
    )
    caller.communicator._worker.drain()
    return work


def told_once(rank: int, world_size: int) -> None:
    """The call after a damaged one is begun before anybody waits: each says what became of itself."""
    caller = Caller(rank, codec=SuspiciousCodec())
    first = suspected(caller)
    caller.device.run_all()
    SUSPECT.clear()
    second = caller.communicator.all_gather_into_tensor(outputs(world_size), data(5000, rank), async_op=True)
    with pytest.raises(WireFormatError, match="it looks like 4"):
        first.wait()
    second.wait()
    caller.end()


def told_by_a_future(rank: int, world_size: int) -> None:
    """Nobody waits for works, as in DDP. (torch makes a RuntimeError of what a callback raises.)"""
    caller = Caller(rank, codec=SuspiciousCodec())
    with pytest.raises(RuntimeError, match="it looks like 4"):
        suspected(caller).get_future().wait()
    suspected(caller)
    caller.device.run_all()
    SUSPECT.clear()
    following = caller.communicator.all_gather_into_tensor(outputs(world_size), data(5000, rank), async_op=True)
    with pytest.raises(RuntimeError, match="it looks like 4"):
        following.get_future().wait()
    caller.end()


def told_at_the_end(rank: int, world_size: int) -> None:
    """There is no later call: the log has it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zipccl").addHandler(handler)
    caller = Caller(rank, codec=SuspiciousCodec())
    suspected(caller, async_op=False)
    with caller.device.progress():
        caller.communicator.close()
    assert any("from rank" in line and "it looks like 4" in line for line in said)


@pytest.mark.parametrize("case", [told_once, told_by_a_future, told_at_the_end], ids=lambda case: case.__name__)
def test_who_is_told_of_damage(case: Any) -> None:
    run_ranks(case, 2, backend="gloo")


class ForgetfulCodec(ExponentCodec):
    """Says, when all has come, that something is missing still."""

    id: Literal["forgetful"] = "forgetful"  # type: ignore[assignment]

    def read_all(self, frames: Any, outs: Any) -> torch.Tensor:
        return torch.full_like(super().read_all(frames, outs), OVERFLOW)


def never_decoded(rank: int, world_size: int) -> None:
    """A frame that is left undecoded in the end is an error, and not taken for one that is still coming."""
    for sizes in SIZES.values():
        caller = Caller(rank, codec=ForgetfulCodec(), **sizes)
        work = caller.communicator.all_gather_into_tensor(outputs(world_size), data(5000, rank), async_op=True)
        caller.communicator._worker.drain()
        caller.device.run_all()
        with pytest.raises(WireFormatError, match="from rank .*: damaged frame: not all of the dynamic part is there"):
            work.wait()
        caller.end()


def test_a_frame_that_is_never_decoded() -> None:
    run_ranks(never_decoded, 2, backend="gloo")


def half_way(rank: int, world_size: int) -> None:
    """One rank fails between the movements: it sends nothing more, which the other would take for what is missing."""
    caller = Caller(rank)
    out = outputs(world_size)
    caller.communicator.all_gather_into_tensor(out, data(5000, rank))
    caller.device.run_all()
    if rank == 0:
        complete = Gather._complete
        Gather._complete = lambda self: (_ for _ in ()).throw(MemoryError("no memory left"))  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            caller.communicator.all_gather_into_tensor(out, data(5000, rank))
        Gather._complete = complete  # type: ignore[method-assign]
        with pytest.raises(TransportError, match="an earlier call ended half way on this rank.*no memory left"):
            caller.communicator.all_gather_into_tensor(out, data(5000, rank), async_op=True).wait()
        dist.destroy_process_group()
    else:
        caller.communicator.all_gather_into_tensor(out, data(5000, rank))
        with pytest.raises(TransportError, match="moving bytes failed"):
            caller.reads(out)
        dist.destroy_process_group()


def test_a_call_that_ends_half_way() -> None:
    run_ranks(half_way, 2, backend="gloo")


def a_peer_that_dies(rank: int, world_size: int) -> None:
    caller = Caller(rank)
    out = outputs(world_size)
    caller.communicator.all_gather_into_tensor(out, data(5000, rank))
    caller.device.run_all()
    if rank == 0:  # the other leaves
        with pytest.raises(TransportError, match="all_gather on rank 0 of group .*: moving bytes failed"):
            caller.communicator.all_gather_into_tensor(out, data(5000, rank), async_op=True).wait()
    dist.destroy_process_group()


def test_a_peer_that_dies() -> None:
    run_ranks(a_peer_that_dies, 2, backend="gloo")


class SpeechlessCodec(ExponentCodec):
    id: Literal["speechless"] = "speechless"  # type: ignore[assignment]

    def unavailable(self, device: torch.device) -> str | None:
        raise OSError("no space left")


def a_rank_that_cannot_say(rank: int, world_size: int) -> None:
    caller = Caller(rank, codec=SpeechlessCodec() if rank == 0 else ExponentCodec())
    out = outputs(world_size)
    caller.communicator.all_gather_into_tensor(out, data(5000, rank))
    assert caller.communicator.stats()[Operation.ALL_GATHER].native_calls == 1
    assert same_bits(out, gathered(world_size))
    caller.end()


def test_a_rank_that_cannot_say_whether_it_can() -> None:
    run_ranks(a_rank_that_cannot_say, 2, backend="gloo")


def scratch(rank: int, world_size: int) -> None:
    """Of a call of many chunks, the frames of one are held at a time."""
    for sizes in SIZES.values():
        caller = Caller(rank, chunk_numel=4096, **sizes)
        alive: list[weakref.ref[torch.Tensor]] = []
        most = 0
        allocate = exchange.empty

        def counted(*args: Any, allocate: Any = allocate, **kwargs: Any) -> torch.Tensor:
            nonlocal most
            tensor = allocate(*args, **kwargs)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            return tensor

        exchange.empty = counted
        caller.communicator.all_gather_into_tensor(
            torch.zeros(world_size * 64 * 4096, dtype=BF16), caller.computed(data(64 * 4096, rank))
        )
        exchange.empty = allocate
        assert len(alive) >= 128
        assert most <= 8
        caller.end()


def test_memory_of_many_chunks() -> None:
    run_ranks(scratch, 2, backend="gloo")
