"""The hooks for users who keep their own process group: DDP and FSDP2 train to the same bits, and frames are sent."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zipccl_core import ConfigError, ZipCCLConfig, hooks
from zipccl_core.hooks import CommunicatorState, CompressedAllGather, CompressedReduceScatter, ddp_comm_hook
from zipccl_core.testing import run_ranks, same_bits

BF16 = torch.bfloat16
EXACT = ZipCCLConfig(strategy="always", reduction="gloo")
FP32 = ZipCCLConfig(strategy="always")


def network(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96)).to(dtype)


def train(model: nn.Module, rank: int, dtype: torch.dtype = BF16, steps: int = 3) -> tuple[list[float], torch.Tensor]:
    """Losses, and the weights that this rank has in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 96, generator=generator).to(dtype)
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parts = [getattr(p, "_local_tensor", p).detach().reshape(-1) for p in model.parameters()]
    return losses, torch.cat(parts)


def ddp(rank: int, world_size: int, config: ZipCCLConfig | None) -> Any:
    model = DistributedDataParallel(network())
    if config:
        model.register_comm_hook(CommunicatorState(None, config), ddp_comm_hook)
    return *train(model, rank), hooks.stats()["all_reduce"].frames


def fsdp2(rank: int, world_size: int, config: ZipCCLConfig | None) -> Any:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
        if config:
            layer.set_custom_all_gather(CompressedAllGather(config))
            layer.set_custom_reduce_scatter(CompressedReduceScatter(config))
    frames = lambda: min(hooks.stats()[name].frames for name in ("all_gather", "reduce_scatter"))  # noqa: E731
    return *train(model, rank), frames()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("job", [ddp, fsdp2])
def test_training_has_the_same_bits(job: Callable[..., Any], world_size: int) -> None:
    native = run_ranks(job, world_size, None, backend="gloo")
    compressed = run_ranks(job, world_size, EXACT, backend="gloo")
    for (losses, weights, none), (others, other_weights, frames) in zip(native, compressed, strict=True):
        assert losses == others
        assert same_bits(weights, other_weights)
        assert (none, frames > 0) == (0, True)


@pytest.mark.parametrize("job", [ddp, fsdp2])
def test_in_a_zipccl_group_the_group_compresses(job: Callable[..., Any]) -> None:
    """A hook there changes nothing: no frame is made twice."""
    without = run_ranks(job, 2, None, config=EXACT)
    hooked = run_ranks(job, 2, EXACT, config=EXACT)
    for (losses, weights, frames), (others, other_weights, other_frames) in zip(without, hooked, strict=True):
        assert losses == others
        assert same_bits(weights, other_weights)
        assert frames == other_frames > 0


def test_reductions_in_fp32_equal_a_reference() -> None:
    """One step of DDP: the gradients are those of every rank times 1 / world size, added in fp32, rounded once."""

    def gradients(rank: int) -> list[torch.Tensor]:
        model = network()
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(rank)).to(BF16)
        (model(x).float() - x.float()).square().mean().backward()
        return [p.grad for p in model.parameters()]

    def body(rank: int, world_size: int) -> bool:
        parts = [gradients(r) for r in range(world_size)]  # before DDP, on every rank
        model = DistributedDataParallel(network())
        model.register_comm_hook(CommunicatorState(None, FP32), ddp_comm_hook)
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(rank)).to(BF16)
        (model(x).float() - x.float()).square().mean().backward()
        wanted = []
        for of_ranks in zip(*parts, strict=True):
            scaled = [part.mul(1 / world_size).float() for part in of_ranks]
            total = scaled[0]
            for part in scaled[1:]:
                total = total + part
            wanted.append(total.to(BF16))
        return all(same_bits(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))

    assert run_ranks(body, 3, backend="gloo") == [True] * 3


def test_dtypes_without_a_codec_stay_native() -> None:
    def body(rank: int, world_size: int, hooked: bool) -> Any:
        model = DistributedDataParallel(network(torch.float32))
        if hooked:
            model.register_comm_hook(CommunicatorState(None, EXACT), ddp_comm_hook)
        losses, weights = train(model, rank, torch.float32)
        counters = hooks.stats()["all_reduce"]
        return losses, weights, counters.frames, counters.native_calls

    for plain, hooked in zip(
        run_ranks(body, 2, False, backend="gloo"), run_ranks(body, 2, True, backend="gloo"), strict=True
    ):
        assert plain[0] == hooked[0]
        assert same_bits(plain[1], hooked[1])
        assert hooked[2] == 0
        assert hooked[3] > 0


def test_fsdp2_with_mixed_precision_and_prefetch() -> None:
    """Parameters in fp32 travel in bf16; gradients come back in fp32, natively."""

    def body(rank: int, world_size: int, hooked: bool) -> Any:
        model = network(torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
            if hooked:
                layer.set_custom_all_gather(CompressedAllGather(EXACT))
                layer.set_custom_reduce_scatter(CompressedReduceScatter(EXACT))
        model[0].set_modules_to_forward_prefetch([model[2]])
        losses, weights = train(model, rank, torch.float32)
        counters = hooks.stats()
        return losses, weights, counters["all_gather"].frames, counters["reduce_scatter"].native_calls

    for plain, hooked in zip(
        run_ranks(body, 2, False, backend="gloo"), run_ranks(body, 2, True, backend="gloo"), strict=True
    ):
        assert plain[0] == hooked[0]
        assert same_bits(plain[1], hooked[1])
        assert hooked[2] > 0
        assert hooked[3] > 0


def test_groups_that_come_and_go() -> None:
    """Counters of destroyed groups stay, and their communicators end."""

    def body(rank: int, world_size: int) -> list[int]:
        counts = []
        gather = CompressedAllGather(EXACT)
        for _ in range(3):
            group = dist.new_group([0, 1])
            part = torch.full((3000,), float(rank + 1), dtype=BF16)
            out = gather.allocate([6000], dtype=BF16, device=part.device)
            work = gather(out, part, group, async_op=True)
            work.wait()
            assert out[0] == 1
            assert out[-1] == 2
            counts.append(hooks.stats()["all_gather"].calls)
            dist.destroy_process_group(group)
        return counts

    assert run_ranks(body, 2, backend="gloo") == [[1, 2, 3]] * 2


def test_ranks_and_hooks_that_are_configured_differently() -> None:
    """An error on the spot, where it would be a hang, or a sum that nobody asked for."""

    def body(rank: int, world_size: int) -> str:
        part, out = torch.ones(3000, dtype=BF16), torch.zeros(6000, dtype=BF16)
        subgroup = dist.new_group([0, 1])
        CompressedAllGather(EXACT)(out, part, subgroup)
        with pytest.raises(ConfigError, match="another configuration already"):
            CompressedReduceScatter(FP32)(part, out, subgroup, dist.ReduceOp.SUM)
        if rank == 0:  # whose word counts
            hooks._COMMUNICATORS.of(dist.group.WORLD, EXACT)
            return ""
        with pytest.raises(ConfigError, match="rank 1 of group .* is configured differently from rank 0"):
            CompressedAllGather({"strategy": "always", "chunk_nbytes": 4096})(out, part, dist.group.WORLD)
        return "told"

    assert run_ranks(body, 2, backend="gloo") == ["", "told"]


def test_a_model_with_a_hook_is_copied_and_pickled() -> None:
    def body(rank: int, world_size: int) -> tuple[bool, int]:
        model = DistributedDataParallel(network())
        model.register_comm_hook(CommunicatorState(dist.group.WORLD, EXACT), ddp_comm_hook)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        results = [train(each, rank) for each in (model, *twins)]
        same = all(same_bits(results[0][1], weights) for _, weights in results)
        return same, hooks.stats()["all_reduce"].calls

    # torch does not register hooks of copies
    assert run_ranks(body, 2, backend="gloo") == [(True, 3)] * 2


@pytest.mark.filterwarnings("ignore")  # torch's, about gradients that it looks at
def test_a_compiled_training_step() -> None:
    def body(rank: int, world_size: int, config: ZipCCLConfig | None) -> Any:
        model = DistributedDataParallel(network())
        if config:
            model.register_comm_hook(CommunicatorState(None, config), ddp_comm_hook)

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x).float() - x.float()).square().mean()
            loss.backward()
            return loss.detach()

        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(rank)).to(BF16)
        losses = [step(x).item() for _ in range(2)]
        grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        return losses, grads, hooks.stats()["all_reduce"].frames

    native, hooked = (run_ranks(body, 2, config, backend="gloo") for config in (None, EXACT))
    for plain, other in zip(native, hooked, strict=True):
        assert plain[0] == other[0]
        assert same_bits(plain[1], other[1])
        assert (plain[2], other[2] > 0) == (0, True)


def test_threads_share_a_groups_communicator() -> None:
    def body(rank: int, world_size: int) -> int:
        found: list[Any] = []
        ready = threading.Barrier(8)

        def ask() -> None:
            ready.wait()
            found.append(hooks._COMMUNICATORS.of(dist.group.WORLD, EXACT))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(set(map(id, found)))

    assert run_ranks(body, 2, backend="gloo") == [1, 1]


def test_a_forked_child_starts_anew() -> None:
    """It has none of the parent's threads, so it must not end what the parent has, nor count it."""

    def gather(rank: int, world_size: int) -> tuple[float, int]:
        part, out = torch.full((3000,), rank + 1.0, dtype=BF16), torch.zeros(6000, dtype=BF16)
        CompressedAllGather(EXACT)(out, part, dist.group.WORLD)
        return out.float().sum().item(), hooks.stats()["all_gather"].calls

    threads = run_ranks(gather, 2, backend="gloo", launcher="threads")
    assert [total for total, _ in threads] == [9000.0] * 2
    assert run_ranks(gather, 2, backend="gloo") == [(9000.0, 1)] * 2


def test_a_group_of_one_and_a_wrong_configuration() -> None:
    def body(rank: int, world_size: int) -> int:
        part, out = torch.ones(3000, dtype=BF16), torch.zeros(3000, dtype=BF16)
        CompressedAllGather(EXACT)(out, part, dist.group.WORLD)
        assert same_bits(part, out)
        return hooks.stats()["all_gather"].calls

    assert run_ranks(body, 1, backend="gloo") == [0]
    with pytest.raises(ConfigError, match="reduction"):
        CompressedAllGather({"reduction": "none"})
