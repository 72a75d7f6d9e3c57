"""The torch.distributed backend `zipccl`: names, groups, everything that torch builds on groups, errors and ends."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zipccl_core import Communicator, ConfigError, ZipCCLConfig, ZipCCLProcessGroup
from zipccl_core.testing import run_ranks, same_bits

BF16 = torch.bfloat16
ALWAYS = ZipCCLConfig(strategy="always", reduction="gloo")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about its own deprecated names


def normal(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("backend", ["zipccl", "cpu:zipccl", "cpu:zipccl,cuda:zipccl", "cpu:gloo,cuda:zipccl"])
def test_names(backend: str) -> None:
    def run(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        assert isinstance(group, ZipCCLProcessGroup)
        assert group.name() == "zipccl"
        value = normal(100_000, rank)
        dist.all_reduce(value)
        assert group.stats()["all_reduce"].frames > 0

    run_ranks(run, 2, backend=backend, config=ALWAYS)


def test_configuration_of_groups() -> None:
    """pg_options as a ZipCCLConfig or a mapping; later groups have the default group's; a group can have its own."""

    def run(rank: int, world_size: int) -> None:
        assert dist.group.WORLD.communicator.config == ALWAYS
        assert dist.new_group().communicator.config == ALWAYS
        other = dist.new_group(pg_options={"codec": "raw", "strategy": "always"})
        assert other.communicator.config.codec.id == "raw"
        value = normal(5000, rank)
        dist.all_reduce(value, group=other)
        counters = other.stats()["all_reduce"]
        assert counters.frames == counters.raw_frames > 0
        with pytest.raises(ConfigError, match="unknown key 'kodec'"):
            dist.new_group(pg_options={"kodec": "raw"})

    run_ranks(run, 2, config=ALWAYS)


def test_ranks_that_are_configured_differently() -> None:
    """Said when the group is made, instead of a hang in the first call; how fast a rank computes is its own affair."""

    def run(rank: int, world_size: int) -> None:
        dist.new_group(pg_options=ZipCCLConfig(codec={"id": "exponent", "threads": 1 + rank, "kernels": "auto"}))
        if rank == 0:
            dist.new_group(pg_options=ZipCCLConfig(reduction="fp32"))
        else:
            with pytest.raises(
                ConfigError, match=r"rank 1 of group .* is configured differently from rank 0"
            ) as caught:
                dist.new_group(pg_options=ZipCCLConfig(reduction="gloo"))
            assert '"reduction": "fp32"' in str(caught.value)
        dist.destroy_process_group()

    run_ranks(run, 2, config=ALWAYS)


def test_configuration_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIPCCL_STRATEGY", '{"id": "threshold", "min_nbytes": 4096}')
    monkeypatch.setenv("ZIPCCL_REDUCTION", "gloo")

    def run(rank: int, world_size: int) -> None:
        for numel in (2047, 2048):
            dist.all_reduce(normal(numel, rank))
        counters = dist.group.WORLD.stats()["all_reduce"]
        assert (counters.calls, counters.native_calls) == (2, 1)
        assert dist.group.WORLD.communicator.config.reduction == "gloo"

    run_ranks(run, 2)


def test_sub_groups_and_groups_of_one() -> None:
    def run(rank: int, world_size: int) -> None:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = pairs[rank % 2]
        members = dist.get_process_group_ranks(mine)
        value = normal(20_000, rank)
        out = torch.zeros(40_000, dtype=BF16)
        dist.all_gather_into_tensor(out, value, group=mine)
        assert same_bits(out, torch.cat([normal(20_000, r) for r in members]))
        dist.broadcast(value, members[1], group=mine)
        assert same_bits(value, normal(20_000, members[1]))
        assert dist.get_rank(mine) == members.index(rank)
        alone = [dist.new_group([r]) for r in range(world_size)][rank]
        dist.all_reduce(value, group=alone)
        assert same_bits(value, normal(20_000, members[1]))
        assert alone.stats()["all_reduce"].native_calls == 1
        world = normal(20_000, rank)
        works = [
            dist.all_reduce(world.clone(), async_op=True),
            dist.all_reduce(world.clone(), group=mine, async_op=True),
        ]
        for work in works if rank % 2 else reversed(works):
            work.wait()

    run_ranks(run, 4, config=ALWAYS)


def test_two_groups_from_two_threads() -> None:
    def run(rank: int, world_size: int) -> None:
        groups = [dist.new_group(), dist.new_group()]
        errors: list[BaseException] = []

        def work(which: int) -> None:
            try:
                for step in range(20):
                    value = normal(9000, 100 * which + step + rank)
                    dist.all_reduce(value, group=groups[which], async_op=step % 2 == 0) and None
                    out = torch.zeros(9000 * world_size, dtype=BF16)
                    dist.all_gather_into_tensor(out, normal(9000, rank + which), group=groups[which])
                    assert same_bits(out, torch.cat([normal(9000, r + which) for r in range(world_size)]))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    run_ranks(run, 2, config=ALWAYS)


def test_two_communicators_on_one_group() -> None:
    """An adapter's and a user's own: their calls do not mix, even where ranks interleave them differently."""

    def run(rank: int, world_size: int) -> None:
        pair = [Communicator(dist.group.WORLD, ALWAYS) for _ in range(2)]
        outs = [[torch.zeros(40_000 * world_size, dtype=BF16) for _ in range(6)] for _ in pair]
        works = []
        for step in range(12):
            which = step % 2 if rank else step // 6  # rank 0 makes all calls of the first, then all of the second
            index = step // 2 if rank else step % 6
            value = normal(40_000, 1000 * which + 10 * index + rank)
            works.append(pair[which].all_gather_into_tensor(outs[which][index], value, async_op=True))
        for work in works:
            work.wait()
        for which in range(2):
            for index, out in enumerate(outs[which]):
                wanted = [normal(40_000, 1000 * which + 10 * index + r) for r in range(world_size)]
                assert same_bits(out, torch.cat(wanted))
        for communicator in pair:
            communicator.close()

    run_ranks(run, 2, backend="gloo")


def test_communicators_of_ones_own() -> None:
    """Over a zipccl group, whose own compression stays out of their messages; in any number, if they are closed; and
    where torch makes tensors on another device by default."""

    def run(rank: int, world_size: int) -> None:
        wanted = normal(20_000, 0) + normal(20_000, 1)
        for _ in range(10):
            communicator = Communicator(dist.group.WORLD, ALWAYS)
            value = normal(20_000, rank)
            communicator.all_reduce(value)
            assert same_bits(value, wanted)
            communicator.close()
        value = normal(30_000, rank)
        with torch.device("meta"):
            communicator.all_reduce(value)
            communicator.broadcast(value, 0)
        assert same_bits(value, normal(30_000, 0) + normal(30_000, 1))
        many = [Communicator(dist.group.WORLD, ALWAYS) for _ in range(5)]
        with pytest.raises(ValueError, match="communicators already; close one"):
            Communicator(dist.group.WORLD, ALWAYS)
        assert len(many) == 5

    run_ranks(run, 2, config=ALWAYS)


def test_device_mesh_dtensor_and_functional_collectives() -> None:
    import torch.distributed._functional_collectives as fc
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh["tp"].get_group()
        assert isinstance(group, ZipCCLProcessGroup)
        peers = dist.get_process_group_ranks(group)
        value = normal(8192, rank)
        gathered = fc.all_gather_tensor(value, 0, group)
        assert same_bits(fc.wait_tensor(gathered), torch.cat([normal(8192, r) for r in peers]))
        total = (normal(8192, peers[0]) + normal(8192, peers[1])).to(BF16)
        assert same_bits(fc.wait_tensor(fc.all_reduce(value, "sum", group)), total)
        half = fc.wait_tensor(fc.reduce_scatter_tensor(value, "sum", 0, group))
        assert same_bits(half, total.chunk(2)[peers.index(rank)])
        swapped = fc.wait_tensor(fc.all_to_all_single(value, None, None, group))
        assert same_bits(swapped, torch.cat([normal(8192, r).chunk(2)[peers.index(rank)] for r in peers]))
        assert group.stats()["all_to_all"].frames > 0

        whole = normal(256 * 64, 5).view(256, 64)
        sharded = distribute_tensor(whole, mesh["tp"], [Shard(0)])
        assert same_bits(sharded.full_tensor(), whole)
        assert same_bits(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
        assert same_bits(sharded.redistribute(placements=[Shard(1)]).full_tensor(), whole)

    run_ranks(run, 4, config=ALWAYS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(BF16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def steps(model: nn.Module, rank: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(normal(8 * 64, 10 * step + rank).view(8, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_ddp_and_fsdp2_train_to_the_same_bits() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(rank: int, world_size: int, kind: str) -> tuple[list[str], int]:
        model = Model()
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh) if isinstance(layer, nn.Linear) else None
            fully_shard(model, mesh=mesh)
        losses = [loss.item().hex() for loss in steps(model, rank)]
        group = dist.group.WORLD
        frames = sum(group.stats()[op].frames for op in group.stats()) if isinstance(group, ZipCCLProcessGroup) else 0
        return losses, frames

    for kind in ("ddp", "fsdp2"):
        native = run_ranks(run, 3, kind, backend="gloo")
        zipped = run_ranks(run, 3, kind, config=ALWAYS)
        assert [losses for losses, _ in native] == [losses for losses, _ in zipped], kind
        assert all(frames > 0 for _, frames in zipped), kind


def test_what_stays_native() -> None:
    def run(rank: int, world_size: int) -> None:
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects[-1] == {"rank": world_size - 1}
        value = normal(5000, rank)
        reduced = value.clone()
        dist.reduce(reduced, 0)
        if rank == 0:
            assert same_bits(reduced, normal(5000, 0) + normal(5000, 1))
        parts = [torch.zeros(5000, dtype=BF16) for _ in range(world_size)] if rank == 0 else None
        dist.gather(value, parts, 0)
        if parts is not None:
            assert same_bits(parts[1], normal(5000, 1))
        dist.scatter(value, parts, 0)
        assert same_bits(value, normal(5000, rank))
        for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
            ones = torch.ones(70_000, dtype=dtype)
            dist.all_reduce(ones)
            assert bool((ones == world_size).all())
            out = torch.zeros(70_000 * world_size, dtype=dtype)
            dist.all_gather_into_tensor(out, ones)
            assert bool((out == world_size).all())
        dist.barrier()
        dist.barrier(async_op=True).wait()
        assert dist.group.WORLD.stats()["all_reduce"].native_calls == 4

    run_ranks(run, 2, config=ALWAYS)


def test_end_and_a_new_beginning() -> None:
    """Destroying a group with calls under way waits for them; threads are gone; a new group works."""

    def run(rank: int, world_size: int) -> None:
        store = dist.group.WORLD.get_group_store()
        before = threading.active_count()
        outs = [torch.zeros(50_000 * world_size, dtype=BF16) for _ in range(4)]
        for out in outs:
            dist.all_gather_into_tensor(out, normal(50_000, rank), async_op=True)  # nobody waits
        dist.destroy_process_group()
        for out in outs:
            assert same_bits(out, torch.cat([normal(50_000, r) for r in range(world_size)]))
        assert threading.active_count() <= before
        gc.collect()
        dist.init_process_group("zipccl", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
        value = normal(50_000, rank)
        dist.all_reduce(value)
        assert dist.group.WORLD.stats()["all_reduce"].calls == 1

    run_ranks(run, 2, config=ALWAYS)


def test_an_error_in_a_call_leaves_the_group_usable() -> None:
    def run(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match="not a multiple of the world size"):
            dist.group.WORLD.communicator.all_to_all_single(torch.zeros(3, dtype=BF16), torch.zeros(3, dtype=BF16))
        value = normal(10_000, rank)
        dist.all_reduce(value)
        assert same_bits(value, normal(10_000, 0) + normal(10_000, 1))

    run_ranks(run, 2, config=ALWAYS)


def test_futures() -> None:
    """What DDP's reducer and functional collectives take from a Work."""

    def run(rank: int, world_size: int) -> None:
        value = normal(30_000, rank)
        work = dist.all_reduce(value, async_op=True)
        (result,) = work.get_future().then(lambda future: future.value()).wait()
        assert result.data_ptr() == value.data_ptr()
        assert work.is_success()
        assert work.exception() is None
        assert same_bits(value, normal(30_000, 0) + normal(30_000, 1))
        received = torch.zeros(30_000, dtype=BF16)
        sending = dist.isend(normal(30_000, rank), 1 - rank)
        dist.irecv(received, 1 - rank).get_future().wait()
        assert same_bits(received, normal(30_000, 1 - rank))
        sending.wait()

    run_ranks(run, 2, config=ALWAYS)


def test_debug_level_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def run(rank: int, world_size: int) -> None:
        dist.set_debug_level_from_env()
        dist.new_group()
        value = normal(10_000, rank)
        dist.all_reduce(value)
        assert dist.group.WORLD.stats()["all_reduce"].frames > 0

    run_ranks(run, 2, config=ALWAYS)


def test_a_group_is_not_copied() -> None:
    """DeepSpeed and torch keep groups in structures that are deep-copied; a configuration is."""
    assert copy.deepcopy(ALWAYS) == ALWAYS
