"""Groups at their edges: of one, of some, overlapping, many, ended and made again, in the middle of an exception; and
what they leave behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zipccl_core import Communicator, ZipCCLConfig, ZipCCLProcessGroup
from zipccl_core.testing import RankFailedError, run_ranks, same_bits

BF16 = torch.bfloat16
ALWAYS = ZipCCLConfig(strategy="always", reduction="gloo", chunk_nbytes=8192)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about its own deprecated names


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def frames(group: Any) -> int:
    """Compressed frames that this rank has sent in a group."""
    statistics = group.stats()
    return sum(statistics[operation].frames - statistics[operation].raw_frames for operation in statistics)


# ---------------------------------------------------------------------- shapes


def odd_shapes(rank: int, world_size: int) -> None:
    """Splits along the first of several dimensions, parts of nothing, layouts that are not contiguous, on a group that
    is a part of the world and numbers its ranks anew."""
    members = [world_size - 1, 0]  # sorted by torch
    groups = [dist.new_group(members, backend=backend) for backend in ("zipccl", "gloo")]
    if rank not in members:
        assert all(group is dist.GroupMember.NON_GROUP_MEMBER for group in groups)
        return
    zipped, gloo = groups
    me = dist.get_rank(zipped)
    assert dist.get_process_group_ranks(zipped) == [0, world_size - 1]

    rows = torch.tensor([[300, 900], [0, 555]])
    for width in (1, 17, 0):
        results = []
        for group in (zipped, gloo):
            value = normal(int(rows[me].sum()), width, 1, seed=rank)
            out = torch.full((int(rows[:, me].sum()), width, 1), 9, dtype=BF16)
            dist.all_to_all_single(out, value, rows[:, me].numpy(), rows[me].numpy(), group=group)
            results.append(out)
        assert same_bits(*results), width

    outs = [torch.full((n, 20), 9, dtype=BF16)[:, ::2] for n in (0, 800)]  # what gloo does not have: uneven, strided
    dist.all_gather(outs, normal(20, (0, 800)[me], seed=4).t()[:, ::2], group=zipped)
    assert same_bits(outs[1], normal(20, 800, seed=4).t()[:, ::2])

    outs = [torch.full((40, 30), 9, dtype=BF16).t() for _ in range(2)]
    dist.all_to_all(outs, [normal(40, 30, seed=10 * me + to).t() for to in range(2)], group=zipped)
    for source in range(2):
        assert same_bits(outs[source], normal(40, 30, seed=10 * source + me).t())

    empty = torch.zeros(0, 5, dtype=BF16)
    for work in (
        dist.all_gather_into_tensor(empty, empty, group=zipped, async_op=True),
        dist.reduce_scatter_tensor(empty, empty, group=zipped, async_op=True),
        dist.all_to_all_single(empty, empty, group=zipped, async_op=True),
        dist.all_reduce(empty, group=zipped, async_op=True),
        dist.broadcast(empty, 0, group=zipped, async_op=True),
        dist.all_gather([empty, empty], empty, group=zipped, async_op=True),
    ):
        work.wait()
    total = torch.tensor(1.5 + me, dtype=BF16)  # no dimension at all
    dist.all_reduce(total, group=zipped)
    assert total.item() == 4.0
    assert frames(zipped) > 0


def test_odd_shapes() -> None:
    run_ranks(odd_shapes, 3, config=ALWAYS)


# ---------------------------------------------------------------------- groups


def alone(rank: int, world_size: int) -> None:
    """Every operation of a group of one rank leaves the values as they are; no thread is made, no frame is sent."""
    group = [dist.new_group([r]) for r in range(world_size)][rank]
    threads = threading.active_count()
    value = normal(3000, 4, seed=rank)

    def zeros() -> torch.Tensor:
        return torch.zeros_like(value)

    for async_op in (False, True):
        outs = [zeros() for _ in range(6)]
        outs[4].copy_(value)
        outs[5].copy_(value)
        works = [
            dist.all_gather_into_tensor(outs[0], value, group=group, async_op=async_op),
            dist.reduce_scatter_tensor(outs[1], value.clone(), group=group, async_op=async_op),
            dist.all_to_all_single(outs[2], value, group=group, async_op=async_op),
            dist.all_gather([outs[3]], value, group=group, async_op=async_op),
            dist.all_reduce(outs[4], op=dist.ReduceOp.AVG, group=group, async_op=async_op),
            dist.broadcast(outs[5], rank, group=group, async_op=async_op),
        ]
        for work in works:
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
        assert all(same_bits(out, value) for out in outs)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, rank, group=group)
    assert objects == [rank]
    dist.barrier(group)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
    model = fully_shard(nn.Linear(64, 64).to(BF16), mesh=mesh["tp"])
    model(normal(4, 64, seed=0)).sum().backward()
    assert threading.active_count() == threads
    assert frames(group) == 0
    assert group.stats()["all_gather"].calls == group.stats()["all_gather"].native_calls >= 4


def test_groups_of_one() -> None:
    run_ranks(alone, 2, config=ALWAYS)
    run_ranks(alone, 1, config=ALWAYS)


def overlapping(rank: int, world_size: int) -> None:
    """A rank in several groups, made with and without the others; its calls in them are under way at once, and waited
    for in an order of its own."""
    triples = [[r for r in range(world_size) if r != out] for out in range(world_size)]
    groups = [dist.new_group(members) for members in triples]
    pairs = [dist.new_group([r, r ^ 1], use_local_synchronization=True) for r in (rank,)]  # the others make none
    mine = [group for group, members in zip(groups, triples, strict=True) if rank in members] + pairs
    works, outs, wanted = [], [], []
    for step in range(6):
        for i, group in enumerate(mine):
            members = dist.get_process_group_ranks(group)
            out = torch.zeros(6000 * len(members), dtype=BF16)
            outs.append(out)
            works.append(dist.all_gather_into_tensor(out, normal(6000, seed=100 * step + rank), group, async_op=True))
            wanted.append(torch.cat([normal(6000, seed=100 * step + r) for r in members]))
            total = normal(6000, seed=rank)
            if (step + i) % 2 and len(members) == 2:
                outs.append(total)
                works.append(dist.all_reduce(total, group=group, async_op=True))
                wanted.append(normal(6000, seed=members[0]) + normal(6000, seed=members[1]))
    order = torch.randperm(len(works), generator=torch.Generator().manual_seed(rank)).tolist()
    for i in order:
        works[i].wait()
    assert all(same_bits(out, value) for out, value in zip(outs, wanted, strict=True))
    assert all(frames(group) > 0 for group in mine)
    subgroup, _ = dist.new_subgroups(2)
    total = normal(5000, seed=rank)
    dist.all_reduce(total, group=subgroup)
    assert same_bits(total, normal(5000, seed=rank) + normal(5000, seed=rank ^ 1))
    dist.destroy_process_group(mine[0])  # one of them; the others go on
    dist.all_gather_into_tensor(outs[0].zero_().resize_(6000 * world_size), normal(6000, seed=rank))
    assert same_bits(outs[0], torch.cat([normal(6000, seed=r) for r in range(world_size)]))


def test_overlapping_groups() -> None:
    run_ranks(overlapping, 4, config=ALWAYS)


def begun_again(rank: int, world_size: int, folder: Path) -> None:
    """A process that ends its world and begins the next: other rank numbers, other configuration, then natively."""
    dist.destroy_process_group()
    assert not dist.is_initialized()
    for turn, backend in enumerate(("zipccl", "zipccl", "gloo", "cpu:zipccl")):
        number = (rank + turn) % world_size
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/{turn}",
            rank=number,
            world_size=world_size,
            timeout=timedelta(seconds=30),
            pg_options={"strategy": "always", "codec": "raw" if turn == 1 else "exponent"} if turn != 2 else None,
        )
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(BF16))
        model(normal(8, 64, seed=number)).sum().backward()
        wanted = (normal(8, 64, seed=0).float().sum(0) + normal(8, 64, seed=1).float().sum(0)) / 2
        assert torch.allclose(model.module.weight.grad[0].float(), wanted, atol=0.1)
        group = dist.group.WORLD
        if backend == "gloo":
            assert not isinstance(group, ZipCCLProcessGroup)
        else:
            counters = group.stats()["all_reduce"]
            assert counters.frames > 0
            assert (counters.frames == counters.raw_frames) == (turn == 1)
        del model, group
        dist.destroy_process_group()


def test_end_and_begin_again(tmp_path: Path) -> None:
    run_ranks(begun_again, 2, tmp_path, config=ALWAYS)


# ---------------------------------------------------------------------- exceptions


class Failing(nn.Module):
    """Raises in forward while `fails` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)
        self.fails = False
        self.to(BF16)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.fails:
            raise KeyError("in forward")
        return self.second(hidden)


def prepared(kind: str, world_size: int) -> tuple[Failing, nn.Module]:
    inner = Failing()
    if kind == "ddp":
        return inner, nn.parallel.DistributedDataParallel(inner)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (inner.first, inner.second, inner):
        fully_shard(layer, mesh=mesh)
    return inner, inner


def failing_everywhere(rank: int, world_size: int, kind: str) -> tuple[list[torch.Tensor], int]:
    """A step in which every rank raises, before any gradient or after, is caught and left out; training goes on."""
    inner, model = prepared(kind, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        inner.fails = step == 1
        try:
            loss = model(normal(16, 64, seed=10 * step + rank)).float().square().mean()
            if step == 3:
                raise KeyError("after forward")
            loss.backward()
        except KeyError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert len(losses) == 3
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    group = dist.group.WORLD
    sent = frames(group) if isinstance(group, ZipCCLProcessGroup) else 0
    return [*losses, *(parameter.detach().clone() for parameter in parameters)], sent


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_goes_on_after_an_exception_on_all_ranks(kind: str) -> None:
    native = run_ranks(failing_everywhere, 2, kind, backend="gloo")
    zipped = run_ranks(failing_everywhere, 2, kind, config=ALWAYS)
    for (wanted, _), (results, sent) in zip(native, zipped, strict=True):
        assert all(same_bits(a, b) for a, b in zip(wanted, results, strict=True))
        assert sent > 0


def failing_on_one(rank: int, world_size: int, kind: str) -> str:
    """Rank 1 leaves in the middle of a step; what rank 0 waits for is an error, and its group can be ended."""
    inner, model = prepared(kind, world_size)
    model(normal(16, 64, seed=rank)).float().square().mean().backward()
    assert frames(dist.group.WORLD) > 0
    inner.fails = rank == 1
    caught = ""
    try:
        model(normal(16, 64, seed=rank)).float().square().mean().backward()
        dist.all_reduce(torch.ones(5000, dtype=BF16))
    except (RuntimeError, KeyError) as error:
        caught = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return caught


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_exception_on_one_rank_ends_all(kind: str) -> None:
    """No rank hangs, whether the exception is caught, and the group ended, or ends the process."""
    first, second = run_ranks(failing_on_one, 2, kind, config=ALWAYS, timeout=40)
    assert "rank 1" in first, first
    assert second.startswith("KeyError"), second

    def uncaught(rank: int, world_size: int) -> None:
        inner, model = prepared(kind, world_size)
        inner.fails = rank == 1
        model(normal(16, 64, seed=rank)).float().square().mean().backward()

    with pytest.raises(RankFailedError, match="rank 1 raised.*|rank 0 raised.*rank 1"):
        run_ranks(uncaught, 2, config=ALWAYS, timeout=40)


def raising_between(rank: int, world_size: int) -> None:
    """An exception passes by calls that are under way, in a coalescing block too: they end, and the group goes on."""
    outs = [torch.zeros(20_000 * world_size, dtype=BF16) for _ in range(3)]
    with pytest.raises(KeyError):
        for out in outs:
            dist.all_gather_into_tensor(out, normal(20_000, seed=rank), async_op=True)
        raise KeyError
    total = normal(20_000, seed=rank)
    dist.all_reduce(total)
    assert same_bits(total, normal(20_000, seed=0) + normal(20_000, seed=1))
    for out in outs:  # a synchronous call waits for those before it
        assert same_bits(out, torch.cat([normal(20_000, seed=r) for r in range(world_size)]))
    with pytest.raises(ValueError, match="world size"):
        dist.all_gather_into_tensor(torch.zeros(7, dtype=BF16), total, async_op=True)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    assert frames(dist.group.WORLD) > 0


def test_exceptions_between_calls() -> None:
    run_ranks(raising_between, 2, config=ALWAYS)


# ---------------------------------------------------------------------- what groups leave behind


def used(group: Any, rank: int, world_size: int) -> None:
    """One group's life: synchronous and asynchronous calls, messages, futures; some that nobody waits for."""
    out = torch.zeros(6000 * world_size, dtype=BF16)
    dist.all_gather_into_tensor(out, normal(6000, seed=rank), group=group)
    dist.all_reduce(out, group=group, async_op=True).get_future().wait()
    dist.reduce_scatter_tensor(torch.zeros(6000, dtype=BF16), out, group=group, async_op=True)
    sending = dist.isend(out, 1 - rank, group=group)
    dist.recv(torch.zeros_like(out), 1 - rank, group=group)
    sending.wait()
    assert frames(group) > 0


def bytes_of_tensors() -> int:
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})


def nothing_left(rank: int, world_size: int, life: Callable[[int, int], Any]) -> None:
    def counted() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/task").iterdir())), bytes_of_tensors()

    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(3):
        life(rank, world_size)
    dist.barrier()
    before, files_before = counted(), files()
    ended = [weakref.ref(life(rank, world_size)) for _ in range(20)]
    dist.barrier()
    assert counted() == before
    assert files() <= files_before
    assert not [reference for reference in ended if reference() is not None]


def group_of_torch(rank: int, world_size: int) -> Any:
    group = dist.new_group()
    used(group, rank, world_size)
    dist.destroy_process_group(group)
    return group.communicator


def default_group(rank: int, world_size: int) -> Any:
    """The world itself, made again over a store of its own, and left as it was found."""
    store = dist.group.WORLD.get_group_store()
    communicator = dist.group.WORLD.communicator
    used(dist.group.WORLD, rank, world_size)
    number = store.add(f"again {rank}", 1)
    dist.destroy_process_group()
    store = dist.PrefixStore(f"again {number}", store)
    dist.init_process_group("zipccl", store=store, rank=rank, world_size=world_size, pg_options=ALWAYS)
    return communicator


def communicator_of_ones_own(rank: int, world_size: int) -> Any:
    communicator = Communicator(dist.group.WORLD, ALWAYS)
    total = normal(6000, seed=rank)
    communicator.all_reduce(total, async_op=True).wait()
    assert same_bits(total, normal(6000, seed=0) + normal(6000, seed=1))
    assert frames(communicator) > 0
    communicator.close()
    return communicator


@pytest.mark.parametrize("life", [group_of_torch, default_group, communicator_of_ones_own], ids=lambda f: f.__name__)
def test_groups_leave_nothing_behind(life: Callable[[int, int], Any]) -> None:
    run_ranks(nothing_left, 2, life, config=ALWAYS)
