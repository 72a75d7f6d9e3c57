"""Every collective against native gloo, bit for bit, on real processes: world sizes 1 to 4, once 8, and as threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zipccl_core import (
    ConfigError,
    ExponentCodec,
    Statistics,
    TransportError,
    WireFormatError,
    ZipCCLConfig,
    compress,
)
from zipccl_core.codec.frame import Header
from zipccl_core.collective.work import ZipCCLWork
from zipccl_core.testing import run_ranks, same_bits

BF16 = torch.bfloat16
SMALL_CHUNKS = ZipCCLConfig(strategy="always", reduction="gloo", chunk_nbytes=8192)
FP32 = ZipCCLConfig(strategy="always", reduction="fp32", chunk_nbytes=8192)
NUMELS = (0, 1, 5, 1023, 1024, 1025, 20_000, 33_333)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def data(numel: int, *seed: int) -> torch.Tensor:
    """Normal values over several octaves, a few specials, the same for equal seeds."""
    generator = torch.Generator().manual_seed(sum(part * 1009**i for i, part in enumerate(seed, 1)))
    values = torch.randn(numel, generator=generator) * torch.exp2(
        torch.randint(-4, 5, (numel,), generator=generator).float()
    )
    return values.to(BF16)


def specials(numel: int, *seed: int) -> torch.Tensor:
    """Any bits: NaN payloads, infinities, subnormals, -0."""
    generator = torch.Generator().manual_seed(sum(seed))
    return torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int16).view(BF16)


def counters() -> Statistics:
    return dist.group.WORLD.stats()


def native_group() -> Any:
    return dist.new_group(backend="gloo")


def finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if async_op:
        work.wait()
        assert work.is_completed() or not isinstance(work, ZipCCLWork)  # gloo's own say no after a wait


# ---------------------------------------------------------------------- what runs on every rank


def all_gather(rank: int, world_size: int) -> None:
    gloo = native_group()
    for async_op in (False, True):
        for numel in NUMELS:
            for make in (data, specials):
                value = make(numel, rank, numel)
                out, wanted = torch.zeros(numel * world_size, dtype=BF16), torch.zeros(numel * world_size, dtype=BF16)
                dist.all_gather_into_tensor(wanted, value, group=gloo)
                finish(dist.all_gather_into_tensor(out, value, async_op=async_op), async_op)
                assert same_bits(out, wanted), numel
                if hasattr(dist, "all_gather_single"):
                    out.zero_()
                    finish(dist.all_gather_single(out, value, async_op=async_op), async_op)
                    assert same_bits(out, wanted), numel

                in_place = torch.zeros_like(out)  # the input is a part of the output, as DeepSpeed and FSDP2 do
                own = in_place[rank * numel : (rank + 1) * numel]
                own.copy_(value)
                finish(dist.all_gather_into_tensor(in_place, own, async_op=async_op), async_op)
                assert same_bits(in_place, wanted), numel

                outs = [torch.zeros(numel, dtype=BF16) for _ in range(world_size)]
                finish(dist.all_gather(outs, value, async_op=async_op), async_op)
                assert same_bits(torch.cat(outs), wanted), numel
    # an input that is another rank's part of the output
    other = (rank + 1) % world_size
    out = torch.zeros(5000 * world_size, dtype=BF16)
    out[other * 5000 : (other + 1) * 5000] = data(5000, rank)
    dist.all_gather_into_tensor(out, out[other * 5000 : (other + 1) * 5000])
    assert same_bits(out, torch.cat([data(5000, r) for r in range(world_size)]))


def uneven_all_gather(rank: int, world_size: int) -> None:
    """gloo has none; ours is a list of different sizes."""
    outs = [torch.zeros(3000 * r, dtype=BF16) for r in range(world_size)]
    dist.all_gather(outs, data(3000 * rank, rank))
    for r, out in enumerate(outs):
        assert same_bits(out, data(3000 * r, r))


def all_to_all(rank: int, world_size: int) -> None:
    gloo = native_group()
    for async_op in (False, True):
        for numel in NUMELS:
            value = specials(numel * world_size, rank, numel)
            out, wanted = torch.zeros_like(value), torch.zeros_like(value)
            dist.all_to_all_single(wanted, value, group=gloo)
            finish(dist.all_to_all_single(out, value, async_op=async_op), async_op)
            assert same_bits(out, wanted), numel

            rows = torch.randint(
                0, numel // 4 + 2, (world_size, world_size), generator=torch.Generator().manual_seed(numel)
            )
            rows[0, -1] = 0
            rows[-1, :] = 0  # a rank that sends nothing at all
            sends, receives = rows[rank].tolist(), rows[:, rank].tolist()
            value = data(sum(sends) * 6, rank, numel).view(-1, 6)
            out, wanted = torch.zeros(sum(receives), 6, dtype=BF16), torch.zeros(sum(receives), 6, dtype=BF16)
            dist.all_to_all_single(wanted, value, receives, sends, group=gloo)
            finish(dist.all_to_all_single(out, value, receives, sends, async_op=async_op), async_op)
            assert same_bits(out, wanted), numel

            outs = [torch.zeros(n * 6, dtype=BF16) for n in receives]
            finish(
                dist.all_to_all(outs, [part.reshape(-1) for part in value.split(sends)], async_op=async_op), async_op
            )
            assert same_bits(torch.cat(outs), wanted), numel
    in_place = data(4000 * world_size, rank)
    dist.all_to_all_single(wanted := torch.zeros_like(in_place), in_place.clone(), group=gloo)
    dist.all_to_all_single(in_place, in_place)
    assert same_bits(in_place, wanted)


def reductions_like_gloo(rank: int, world_size: int) -> None:
    gloo = native_group()
    for async_op in (False, True):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            for numel in (*NUMELS, 300_000) if world_size <= 4 else (5, 1025, 33_333):
                value = data(numel * world_size, rank, numel)
                out, wanted = torch.zeros(numel, dtype=BF16), torch.zeros(numel, dtype=BF16)
                dist.reduce_scatter_tensor(wanted, value.clone(), op=op, group=gloo)
                finish(dist.reduce_scatter_tensor(out, value.clone(), op=op, async_op=async_op), async_op)
                assert same_bits(out, wanted), (op, numel)
                if hasattr(dist, "reduce_scatter_single"):
                    finish(dist.reduce_scatter_single(out.zero_(), value.clone(), op=op, async_op=async_op), async_op)
                    assert same_bits(out, wanted), (op, numel)

                in_place = value.clone()  # the output is a part of the input, as DeepSpeed does
                own = in_place[rank * numel : (rank + 1) * numel]
                finish(dist.reduce_scatter_tensor(own, in_place, op=op, async_op=async_op), async_op)
                assert same_bits(own, wanted), (op, numel)

                parts = [part.clone() for part in value.view(world_size, -1)] if numel else [value] * world_size
                dist.reduce_scatter(wanted, [part.clone() for part in parts], op=op, group=gloo)
                finish(dist.reduce_scatter(out, parts, op=op, async_op=async_op), async_op)
                assert same_bits(out, wanted), (op, numel)

                summed, wanted_sum = value.clone(), value.clone()
                dist.all_reduce(wanted_sum, op=op, group=gloo)
                finish(dist.all_reduce(summed, op=op, async_op=async_op), async_op)
                assert same_bits(summed, wanted_sum), (op, numel)


def reductions_in_fp32(rank: int, world_size: int) -> None:
    """Against a sum written here: rank order, fp32, one rounding."""
    for average in (False, True):
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        for numel in NUMELS:
            everyone = [data(numel * world_size, r, numel) for r in range(world_size)]
            exact_fp32 = everyone[0].float()
            for values in everyone[1:]:
                exact_fp32 = exact_fp32 + values.float()
            if average:
                exact_fp32 = exact_fp32 / world_size
            wanted = exact_fp32.to(BF16)

            summed = everyone[rank].clone()
            dist.all_reduce(summed, op=op)
            out = torch.zeros(numel, dtype=BF16)
            dist.reduce_scatter_tensor(out, everyone[rank].clone(), op=op)
            if world_size > 1:
                assert same_bits(summed, wanted), numel
                assert same_bits(out, wanted[rank * numel : (rank + 1) * numel]), numel
            gathered: list[Any] = [None] * world_size
            dist.all_gather_object(gathered, summed.view(torch.int16).tolist())
            assert all(other == gathered[0] for other in gathered), "ranks have different bits"


def special_values_in_reductions(rank: int, world_size: int) -> None:
    """Where NaNs meet, their payload is not promised; that they are NaN, and every other bit, is."""
    gloo = native_group()
    value = specials(40_000, rank)
    summed, wanted = value.clone(), value.clone()
    dist.all_reduce(wanted, group=gloo)
    dist.all_reduce(summed)
    nan = wanted.isnan()
    assert torch.equal(summed.isnan(), nan)
    assert same_bits(summed[~nan], wanted[~nan])


def broadcast_and_messages(rank: int, world_size: int) -> None:
    gloo = native_group()
    for async_op in (False, True):
        for src in range(world_size):
            for numel in NUMELS:
                value = specials(numel, rank, numel)
                wanted = value.clone()
                dist.broadcast(wanted, src, group=gloo)
                finish(dist.broadcast(value, src, async_op=async_op), async_op)
                assert same_bits(value, wanted), numel
    if world_size == 1:
        return
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    for numel in NUMELS:
        works = [dist.isend(data(numel, rank, tag), ahead, tag=tag) for tag in (3, 4)]
        first, second = torch.zeros(numel, dtype=BF16), torch.zeros(numel, dtype=BF16)
        receives = [dist.irecv(second, behind, tag=4), dist.irecv(first, behind, tag=3)]  # tags match, not the order
        for work in reversed(works + receives):
            work.wait()
        assert same_bits(first, data(numel, behind, 3))
        assert same_bits(second, data(numel, behind, 4))

        # many under one tag: waits in any order, messages in order
        works = [dist.isend(data(numel, rank, i), ahead) for i in range(4)]
        outs = [torch.zeros(numel, dtype=BF16) for _ in range(4)]
        receives = [dist.irecv(out, behind) for out in outs]
        for work in reversed(receives):
            work.wait()
        for i, out in enumerate(outs):
            assert same_bits(out, data(numel, behind, i))
        for work in works:
            work.wait()

    # from any source, and blocking; under a tag of its own, or a fast rank's later message could be taken for its first
    if rank == 0:
        out = torch.zeros(20_000, dtype=BF16)
        sources = {dist.recv(out, tag=5) for _ in range(world_size - 1)}
        assert sources == set(range(1, world_size))
    else:
        dist.send(data(20_000, rank), 0, tag=5)
    # a polled receive
    dist.isend(data(20_000, rank), ahead, tag=9)  # its work is dropped
    out = torch.zeros(20_000, dtype=BF16)
    work = dist.irecv(out, behind, tag=9)
    while not work.is_completed():
        pass
    assert same_bits(out, data(20_000, behind))
    operations = [dist.P2POp(dist.isend, data(5000, rank), ahead), dist.P2POp(dist.irecv, out[:5000], behind)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert same_bits(out[:5000], data(5000, behind))


def shapes_and_layouts(rank: int, world_size: int) -> None:
    """0-dim, non-contiguous, and views, where native gloo takes them and where it does not."""
    everyone = [data(64 * 48, r) for r in range(world_size)]
    flat_sum = everyone[0].float()
    for values in everyone[1:]:
        flat_sum = flat_sum + values.float()

    transposed = everyone[rank].view(64, 48).t().contiguous().t()
    assert not transposed.is_contiguous()
    dist.all_reduce(transposed)
    assert same_bits(transposed, flat_sum.to(BF16))

    out = torch.zeros(world_size * 48, 64, dtype=BF16)
    dist.all_gather_into_tensor(out, everyone[rank].view(64, 48).t())
    assert same_bits(out, torch.cat([values.view(64, 48).t() for values in everyone]))

    out = torch.zeros(64, world_size * 48, dtype=BF16).t()
    dist.all_gather_into_tensor(out, everyone[rank].view(48, 64))
    assert same_bits(out, torch.cat([values.view(48, 64) for values in everyone]))

    strided = torch.zeros(world_size, 64 * 48, 2, dtype=BF16)
    dist.all_gather([strided[r, :, 0] for r in range(world_size)], everyone[rank])
    assert same_bits(strided[:, :, 0], torch.stack(everyone))
    assert not strided[:, :, 1].any()

    scalar = torch.tensor(1.5 + rank, dtype=BF16)
    dist.all_reduce(scalar)
    assert scalar.item() == sum(1.5 + r for r in range(world_size))
    out = torch.zeros(world_size, dtype=BF16)
    dist.all_gather_into_tensor(out, torch.tensor(1.5 + rank, dtype=BF16))
    assert out.tolist() == [1.5 + r for r in range(world_size)]
    dist.broadcast(scalar, 0)

    if world_size > 1:
        received = torch.zeros(48, 64, dtype=BF16).t()
        works = [
            dist.isend(everyone[rank].view(64, 48).t(), (rank + 1) % world_size),
            dist.irecv(received, (rank - 1) % world_size),
        ]
        for work in works:
            work.wait()
        assert same_bits(received, everyone[(rank - 1) % world_size].view(64, 48).t())


def coalesced(rank: int, world_size: int) -> None:
    gloo = native_group()
    sizes = (3000, 17, 20_000)

    def tensors() -> list[torch.Tensor]:
        return [data(size, rank, size) for size in sizes]

    mine, wanted = tensors(), tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(wanted, group=gloo)
        dist.all_reduce_coalesced(mine)
    assert all(map(same_bits, mine, wanted))

    for async_op in (False, True):
        for operation in ("all_reduce", "all_gather", "reduce_scatter"):
            results: dict[Any, list[torch.Tensor]] = {}
            for group in (dist.group.WORLD, gloo):
                outs = []
                with dist.distributed_c10d._coalescing_manager(group=group, async_ops=async_op) as manager:
                    for size in sizes:
                        value = data(size * world_size, rank, size)
                        if operation == "all_reduce":
                            dist.all_reduce(value, group=group)
                            outs.append(value)
                        elif operation == "all_gather":
                            outs.append(torch.zeros(size * world_size * world_size, dtype=BF16))
                            dist.all_gather_single(outs[-1], value, group=group)
                        else:
                            outs.append(torch.zeros(size, dtype=BF16))
                            dist.reduce_scatter_single(outs[-1], value, group=group)
                if async_op:
                    manager.wait()
                results[group] = outs
            assert all(map(same_bits, *results.values())), operation


def waits_in_any_order(rank: int, world_size: int) -> None:
    """Ranks wait for their asynchronous calls in different orders, native calls in between: nothing hangs, nothing is
    mixed up."""
    values = [data(9000, rank, i) for i in range(12)]
    outs = [torch.zeros(9000 * world_size, dtype=BF16) for _ in values]
    works = []
    for value, out in zip(values, outs, strict=True):
        works.append(dist.all_gather_into_tensor(out, value, async_op=True))
        works.append(dist.all_reduce(value.clone(), async_op=True))
        counter = torch.ones(3)
        dist.all_reduce(counter)
        assert counter[0] == world_size
    dist.all_reduce(data(9000, rank))
    for work in works if rank % 2 else reversed(works):
        work.wait()
    for i, out in enumerate(outs):
        assert same_bits(out, torch.cat([data(9000, r, i) for r in range(world_size)]))


def any_data_any_path(rank: int, world_size: int) -> None:
    """One rank all zeros, one random, one normal: RAW and compressed frames meet in one call."""
    generator = torch.Generator().manual_seed(rank)
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: torch.zeros(30_000 * world_size, dtype=BF16),
        lambda: specials(30_000 * world_size, rank),
        lambda: torch.randn(30_000 * world_size, generator=generator).to(BF16),
    ]
    gloo = native_group()
    for turn in range(3):
        value = kinds[(rank + turn) % 3]()
        out, wanted = (
            torch.zeros(value.numel() * world_size, dtype=BF16),
            torch.zeros(value.numel() * world_size, dtype=BF16),
        )
        dist.all_gather_into_tensor(wanted, value, group=gloo)
        dist.all_gather_into_tensor(out, value)
        assert same_bits(out, wanted)
        exchanged, wanted = torch.zeros_like(value), torch.zeros_like(value)
        dist.all_to_all_single(wanted, value, group=gloo)
        dist.all_to_all_single(exchanged, value)
        assert same_bits(exchanged, wanted)
        dist.reduce_scatter_tensor(exchanged[:30_000], value)
        dist.all_reduce(value)
        dist.broadcast(value, turn % world_size)
    assert world_size == 1 or counters()["all_gather"].frames > counters()["all_gather"].raw_frames >= (rank == 1)


def compressed_at_all(rank: int, world_size: int) -> None:
    """What the tests above compare with native really went compressed."""
    value = torch.randn(60_000, generator=torch.Generator().manual_seed(rank)).to(BF16)
    out = torch.zeros(60_000 * world_size, dtype=BF16)
    dist.all_gather_into_tensor(out, value)
    dist.reduce_scatter_tensor(value.clone(), out)
    dist.all_to_all_single(out.clone(), out)
    dist.all_reduce(value)
    dist.broadcast(value, 0)
    work = dist.isend(value, (rank + 1) % world_size)
    dist.recv(torch.zeros_like(value), (rank - 1) % world_size)
    work.wait()
    for operation in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send_recv"):
        c = counters()[operation]
        assert c.calls == (2 if operation == "send_recv" else 1), operation
        assert c.native_calls == 0, operation
        if operation == "broadcast" and rank != 0:
            continue
        assert c.frames > 0, operation
        assert c.raw_frames == 0, operation
        assert 1.2 < c.ratio < 1.5, operation
    peers = world_size - 1
    frame = compress(torch.randn(60_000, generator=torch.Generator().manual_seed(rank)).to(BF16), ExponentCodec())
    assert counters()["all_gather"].wire_nbytes == peers * frame.numel()
    padding = -Header.read(frame).dynamic_nbytes % 128
    assert counters()["all_gather"].padding_nbytes == peers * padding
    assert counters()["all_gather"].escapes == Header.read(frame).dynamic_nbytes
    assert counters()["all_gather"].raw_nbytes == peers * 120_000
    assert counters()["all_gather"].self_nbytes == 120_000
    assert counters()["all_to_all"].raw_nbytes == peers * 120_000
    assert counters()["reduce_scatter"].self_nbytes == 120_000


def messages_between_some(rank: int, world_size: int) -> None:
    """Ranks that exchange messages and ranks that do not stay in step for the next collective."""
    value = data(20_000, rank)
    if rank == 0:
        dist.send(value, 1)
    elif rank == 1:
        out = torch.zeros_like(value)
        dist.recv(out, 0)
        assert same_bits(out, data(20_000, 0))
    out = torch.zeros(20_000 * world_size, dtype=BF16)
    dist.all_gather_into_tensor(out, value)
    assert same_bits(out, torch.cat([data(20_000, r) for r in range(world_size)]))


def large_messages_from_any_source(rank: int, world_size: int) -> None:
    """Two large messages under one tag, received from any source, posted before and after they are sent."""
    first, second = data(100_000, 1), data(100_000, 2)
    for late in (0, 1):
        if rank == late:
            dist.barrier()
        if rank == 0:
            works = [dist.isend(first, 1), dist.isend(second, 1)]
        else:
            outs = [torch.zeros(100_000, dtype=BF16) for _ in range(2)]
            works = [dist.irecv(out) for out in outs]
        if rank != late:
            dist.barrier()
        for work in works:
            work.wait()
        if rank == 1:
            assert same_bits(outs[0], first)
            assert same_bits(outs[1], second)


def dropped_sends(rank: int, world_size: int) -> None:
    """Nobody waits for them; they arrive, and their memory is given back."""
    for i in range(200):
        dist.isend(data(3000, rank, i), (rank + 1) % world_size)
    out = torch.zeros(3000, dtype=BF16)
    for i in range(200):
        dist.recv(out, (rank - 1) % world_size)
        assert same_bits(out, data(3000, (rank - 1) % world_size, i))
    dist.barrier()
    communicator = dist.group.WORLD.communicator
    communicator._sends.drain()
    assert len(communicator._messages) <= 64


def ended_messages_are_let_go(rank: int, world_size: int) -> None:
    """A receive that is posted early and ends late keeps nothing of the messages in between."""
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    early = torch.zeros(3000, dtype=BF16)
    first = dist.irecv(early, behind, tag=5)
    for i in range(100):
        works = [dist.isend(data(3000, rank, i), ahead), dist.irecv(torch.zeros(3000, dtype=BF16), behind)]
        for work in works:
            work.wait()
    assert len(dist.group.WORLD.communicator._messages) == 1
    dist.send(data(3000, rank), ahead, tag=5)
    first.wait()
    assert same_bits(early, data(3000, behind))


def splits_on_some_ranks(rank: int, world_size: int) -> None:
    """Rank 0 passes no split sizes where the others do: natively that is allowed."""
    splits = None if rank == 0 else [100] * world_size
    value, out = data(100 * world_size, rank), torch.zeros(100 * world_size, dtype=BF16)
    dist.all_to_all_single(out, value, splits, splits)
    wanted = [data(100 * world_size, r)[100 * rank : 100 * (rank + 1)] for r in range(world_size)]
    assert same_bits(out, torch.cat(wanted))


def broadcast_without_contiguity(rank: int, world_size: int) -> None:
    base = data(6000, 7).view(60, 100)
    for make in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[3:7, 5:]):
        for async_op in (False, True):
            whole = (base if rank == 0 else torch.zeros_like(base)).clone()
            finish(dist.broadcast(make(whole), 0, async_op=async_op), async_op)
            assert same_bits(make(whole), make(base))
            if rank == 0:
                assert same_bits(whole, base), "the source's own tensor changed"
    tensors = [data(6000, rank).view(60, 100).t(), data(700, rank)[::7]]
    wanted = [sum(data(6000, r).view(60, 100).t().float() for r in range(world_size)).to(BF16)]
    dist.all_reduce_coalesced(tensors)
    if world_size == 2:
        assert same_bits(tensors[0], wanted[0])


def modes_layouts_dtypes(rank: int, world_size: int) -> None:
    with torch.inference_mode():
        value, out = data(20_000, rank), torch.zeros(20_000 * world_size, dtype=BF16)
        dist.all_gather_into_tensor(out, value, async_op=True).wait()
        assert same_bits(out, torch.cat([data(20_000, r) for r in range(world_size)]))
        dist.all_reduce(value, async_op=True).wait()
    dist.all_gather_into_tensor(out.clone(), specials(20_000, rank))  # memory of before is used again
    needs_grad = data(20_000, rank).requires_grad_()
    dist.all_gather_into_tensor(out.clone().requires_grad_(), needs_grad)
    sparse = data(1000, rank).view(10, 100).to_sparse()
    dist.all_reduce(sparse)
    with pytest.raises(ValueError, match="dtypes differ"):
        dist.all_gather_into_tensor(torch.zeros(20_000 * world_size, dtype=torch.float16), value)
    with pytest.raises(ValueError, match="tag 1073741824 is one of ZipCCL's own"):
        dist.isend(value, (rank + 1) % world_size, tag=1 << 30)


def waits_with_a_timeout(rank: int, world_size: int) -> None:
    if rank == 0:
        work = dist.all_reduce(data(20_000, rank), async_op=True)
        receive = dist.irecv(torch.zeros(20_000, dtype=BF16), 1)
        for pending in (work, receive):
            with pytest.raises(RuntimeError, match="not ended within 0.2 s"):
                pending.wait(timedelta(seconds=0.2))
        dist.barrier()
        work.wait()
        receive.wait()
    else:
        dist.barrier()
        dist.all_reduce(data(20_000, rank))
        dist.send(data(20_000, rank), 0)


def callbacks_that_communicate(rank: int, world_size: int) -> None:
    """torch's PowerSGD hook does this: a callback of one call waits for another call of the group."""
    value, other = data(20_000, rank), data(20_000, rank, 1)

    def then(future: Any) -> torch.Tensor:
        dist.all_reduce(other, async_op=True).get_future().wait()
        dist.all_reduce(other)
        return other

    dist.all_reduce(value, async_op=True).get_future().then(then).wait()


def results_of_functional_collectives(rank: int, world_size: int) -> None:
    import torch.distributed._functional_collectives as functional

    gathered = functional.all_gather_tensor(data(4000, rank), 0, dist.group.WORLD)
    total = torch.zeros(4000 * world_size, dtype=BF16)
    total.copy_(torch.cat([data(4000, r) for r in range(world_size)]))
    dist.broadcast(gathered, 0)
    assert same_bits(torch.as_tensor(gathered).clone(), total)
    dist.all_to_all_single(torch.zeros_like(total), functional.all_gather_tensor(data(4000, rank), 0, dist.group.WORLD))


# ---------------------------------------------------------------------- the tests

TWO_RANKS_AND_MORE = [
    broadcast_without_contiguity,
    callbacks_that_communicate,
    dropped_sends,
    ended_messages_are_let_go,
    messages_between_some,
    modes_layouts_dtypes,
    results_of_functional_collectives,
    splits_on_some_ranks,
]
EVERYWHERE = [
    all_gather,
    uneven_all_gather,
    all_to_all,
    reductions_like_gloo,
    special_values_in_reductions,
    broadcast_and_messages,
    coalesced,
    waits_in_any_order,
    any_data_any_path,
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", EVERYWHERE, ids=lambda case: case.__name__)
def test_like_native_gloo(case: Callable[[int, int], None], world_size: int) -> None:
    if world_size == 1 and case is uneven_all_gather:
        pytest.skip("one rank, one size")
    run_ranks(case, world_size, config=SMALL_CHUNKS, timeout=120)


@pytest.mark.parametrize(
    "case",
    [all_gather, all_to_all, reductions_like_gloo, broadcast_and_messages, coalesced],
    ids=lambda case: case.__name__,
)
def test_eight_ranks(case: Callable[[int, int], None]) -> None:
    run_ranks(case, 8, config=SMALL_CHUNKS, timeout=200)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", TWO_RANKS_AND_MORE, ids=lambda case: case.__name__)
def test_as_natively(case: Callable[[int, int], None], world_size: int) -> None:
    run_ranks(case, world_size, config=FP32, timeout=60)


@pytest.mark.parametrize("case", [large_messages_from_any_source, waits_with_a_timeout], ids=lambda case: case.__name__)
def test_on_two_ranks(case: Callable[[int, int], None]) -> None:
    run_ranks(case, 2, config=FP32, timeout=60)


def test_splits_on_some_ranks_below_the_threshold() -> None:
    run_ranks(splits_on_some_ranks, 3, config=ZipCCLConfig(), timeout=60)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_fp32_reductions(world_size: int) -> None:
    run_ranks(reductions_in_fp32, world_size, config=FP32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shapes_and_layouts(world_size: int) -> None:
    if world_size > 1:
        run_ranks(shapes_and_layouts, world_size, config=FP32)


@pytest.mark.parametrize("world_size", [2, 4])
def test_compressed_frames_are_sent(world_size: int) -> None:
    run_ranks(compressed_at_all, world_size, config=ZipCCLConfig(strategy="always"))


@pytest.mark.parametrize(
    "case", [all_gather, all_to_all, coalesced, waits_in_any_order], ids=lambda case: case.__name__
)
def test_ranks_as_threads(case: Callable[[int, int], None]) -> None:
    run_ranks(case, 3, launcher="threads", config=SMALL_CHUNKS, timeout=120)


def test_with_checksums_and_a_table() -> None:
    codec = ExponentCodec(checksum="crc32c", table=(127, 126, 125, 124, 123, 122, 121))
    run_ranks(any_data_any_path, 3, config=ZipCCLConfig(codec=codec, strategy="always", chunk_nbytes=16384))


def test_the_same_bits_on_every_run() -> None:
    def run(rank: int, world_size: int) -> list[int]:
        value = data(50_000, rank)
        dist.all_reduce(value)
        return value.view(torch.int16).tolist()

    first, second = (run_ranks(run, 3, config=FP32) for _ in range(2))
    assert first == second


# ---------------------------------------------------------------------- errors


def test_wrong_sizes_are_a_value_error() -> None:
    def run(rank: int, world_size: int) -> None:
        value = data(4096, rank)
        group = dist.group.WORLD
        with pytest.raises(ValueError, match="output has size 7"):
            group.communicator.all_gather_into_tensor(torch.zeros(7, dtype=BF16), value)
        with pytest.raises(ValueError, match="split sizes"):
            group.communicator.all_to_all_single(torch.zeros(4096, dtype=BF16), value, [1, 2, 3], [4096, 0])
        with pytest.raises(ValueError, match="sum of input split sizes"):
            group.communicator.all_to_all_single(torch.zeros(4096, dtype=BF16), value, [2048, 2048], [2048, 1])
        dist.all_reduce(value)  # the group still works

    run_ranks(run, 2, config=SMALL_CHUNKS)


def test_a_dead_peer_is_a_clear_error() -> None:
    """Rank 1 leaves: what rank 0 started, and what it starts, raises instead of hanging, and names operation, group
    and peer."""

    def run(rank: int, world_size: int) -> str:
        message = ""
        if rank == 0:
            work = dist.all_reduce(data(60_000, rank), async_op=True)
            with pytest.raises(TransportError, match="all_reduce on rank 0 of group '0'.*rank 1") as caught:
                work.wait()
            with pytest.raises(RuntimeError):
                work.get_future().wait()
            assert isinstance(work.exception(), TransportError)
            assert work.is_completed()
            assert not work.is_success()
            with pytest.raises(TransportError, match="all_gather on rank 0 of group '0'.*rank 1"):
                dist.all_gather_into_tensor(torch.zeros(120_000, dtype=BF16), data(60_000, rank))
            message = str(caught.value)
        dist.destroy_process_group()
        return message

    assert "rank 1" in run_ranks(run, 2, config=SMALL_CHUNKS, timeout=30)[0]


def test_damaged_bytes_are_a_clear_error() -> None:
    """A peer whose bytes are flipped behind its back: with a checksum, the receiver says which frame was damaged."""

    def run(rank: int, world_size: int) -> None:
        communicator = dist.group.WORLD.communicator
        if rank == 1:
            send = communicator.transport.send

            def flip(frame: torch.Tensor, peer: int, tag: int) -> Any:
                frame = frame.clone()
                if frame.numel() > 2000:
                    frame[1500] ^= 4
                return send(frame, peer, tag)

            communicator.transport.send = flip
        out = torch.zeros(40_000 * world_size, dtype=BF16)
        if rank == 1:
            dist.all_gather_into_tensor(out, data(40_000, rank))
        else:
            with pytest.raises(WireFormatError, match=r"all_gather on rank 0 of group .*rank 1.*checksum.*damaged"):
                dist.all_gather_into_tensor(out, data(40_000, rank))

    config = ZipCCLConfig(codec=ExponentCodec(checksum="crc32c"), strategy="always")
    run_ranks(run, 2, config=config, timeout=30)


def test_native_by_configuration() -> None:
    def run(rank: int, world_size: int) -> None:
        value, out = data(60_000, rank), torch.zeros(60_000 * world_size, dtype=BF16)
        dist.all_gather_into_tensor(out, value)
        dist.all_reduce(value)
        dist.all_reduce(torch.ones(60_000))
        assert counters()["all_gather"].native_calls == 0
        assert counters()["all_reduce"].native_calls == 2
        assert counters()["all_reduce"].native_nbytes == 120_000 + 240_000

    run_ranks(run, 2, config=ZipCCLConfig(operations={"all_reduce": {"strategy": "never"}}))
    with pytest.raises(ConfigError, match="strategy"):
        ZipCCLConfig(operations={"all_reduce": {"strategy": "sometimes"}})
