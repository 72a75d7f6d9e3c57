"""What torch builds on groups, through `zipccl` and through gloo, to the same bits: functional collectives, compiled
programs, DTensor, tensor, sharded and pipeline parallelism, checkpoints, objects."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.backends.debugging  # here once, and not in every rank
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint as checkpoint_of
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from zipccl_core import Statistics, ZipCCLConfig, ZipCCLProcessGroup
from zipccl_core.testing import run_ranks, same_bits

BF16 = torch.bfloat16
ALWAYS = ZipCCLConfig(strategy="always", reduction="gloo")
OPS = torch.ops._c10d_functional

Case = Callable[..., list[torch.Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about its own deprecated names


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def like_gloo(case: Case, world_size: int, sent: str, *args: Any, timeout: float = 60) -> None:
    """Runs a case, which returns tensors, on ranks with either backend.

    All ranks must have the same bits from both, and ranks must have sent frames, and compressed ones, in the operations
    `sent`, summed over all groups of the world.
    """

    def run(rank: int, world_size: int) -> tuple[list[torch.Tensor], dict[str, int]]:
        results = [tensor.detach().clone() for tensor in case(rank, world_size, *args)]
        groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, ZipCCLProcessGroup)]
        total = Statistics.sum(group.stats() for group in groups)
        return results, {str(operation): total[operation].frames - total[operation].raw_frames for operation in total}

    native = run_ranks(run, world_size, backend="gloo", timeout=timeout)
    zipped = run_ranks(run, world_size, config=ALWAYS, timeout=timeout)
    for rank, ((wanted, _), (results, _)) in enumerate(zip(native, zipped, strict=True)):
        assert len(wanted) > 0
        for i, (a, b) in enumerate(zip(wanted, results, strict=True)):
            assert same_bits(a, b), f"rank {rank}, tensor {i}"
    for operation in sent.split():
        assert sum(frames.get(operation, 0) for _, frames in zipped) > 0, f"no frames of {operation}"
    assert all(not frames for _, frames in native)


# ---------------------------------------------------------------------- functional collectives


def operators(rank: int, world_size: int) -> list[torch.Tensor]:
    """torch.ops._c10d_functional, as compiled programs call it: results are waited for in another order."""
    name, n = dist.group.WORLD.group_name, world_size
    value, whole = normal(3000, 8, seed=rank), normal(1000 * n, 8, seed=10 + rank)
    sends = [100 * (r + 1) * (r != rank) for r in range(n)]
    receives = [100 * (rank + 1) * (r != rank) for r in range(n)]
    pending = [
        OPS.all_gather_into_tensor(value, n, name),
        OPS.reduce_scatter_tensor(whole, "sum", n, name),
        OPS.reduce_scatter_tensor(whole, "avg", n, name),
        OPS.all_to_all_single(normal(sum(sends), 8, seed=20 + rank), receives, sends, name),
        OPS.all_reduce(value, "sum", name),
        OPS.all_reduce(value, "max", name),  # native
        OPS.broadcast(value, n - 1, name),
        OPS.all_reduce_(value.clone(), "avg", name),
        OPS.broadcast_(value.clone(), 0, name),
        OPS.all_gather_into_tensor_out(value, n, name, out=torch.empty(3000 * n, 8, dtype=BF16)),
        *OPS.all_gather_into_tensor_coalesced([value, whole, value[:7]], n, name),
        *OPS.reduce_scatter_tensor_coalesced([whole, whole * 3], "sum", n, name),
        *OPS.all_reduce_coalesced([value, whole], "sum", name),
        *OPS.all_reduce_coalesced_([value.clone(), whole.clone()], "avg", name),
    ]
    results: list[torch.Tensor] = [None] * len(pending)
    for i in reversed(range(len(pending))):
        results[i] = OPS.wait_tensor(pending[i])
    assert same_bits(value, normal(3000, 8, seed=rank)), "an input changed"
    return results


def functions(rank: int, world_size: int) -> list[torch.Tensor]:
    """torch.distributed._functional_collectives, whose results wait when they are used; groups in every form."""
    everyone = list(range(world_size))
    mesh = init_device_mesh("cpu", (world_size,))
    value = normal(64 * world_size, 96, seed=rank)
    columns = funcol.all_gather_tensor(value, 1, everyone)
    rows = funcol.reduce_scatter_tensor(columns, "avg", 1, mesh)  # of a result that has not been waited for
    moved = funcol.permute_tensor(value.flatten(), [(r + 1) % world_size for r in everyone], everyone)
    scattered = funcol.reduce_scatter_tensor_coalesced([value, value * 2], "sum", [0, 0], (mesh, 0))
    gathered = funcol.all_gather_into_tensor_coalesced([value, value[:5]], dist.group.WORLD)
    totals = funcol.all_reduce_coalesced([value, value * 3], "sum", dist.group.WORLD)
    sliced = funcol.all_reduce(value.t(), "sum", dist.group.WORLD)[3:7]
    source = funcol.broadcast(value.t()[::2], 0, dist.group.WORLD)
    nothing = funcol.all_gather_tensor(value[:0], 0, dist.group.WORLD)
    return [
        columns + 0,
        rows + rows,
        moved * 1,
        *(part + 0 for part in [*scattered, *gathered, *totals]),
        sliced + 0,
        source + 0,
        nothing + 0,
    ]


def gradients(rank: int, world_size: int) -> list[torch.Tensor]:
    """Through the differentiable variants of both modules."""
    world, n = dist.group.WORLD, world_size
    x = normal(60 * n, 100, seed=rank).requires_grad_()
    w = normal(60 * n, 100, seed=50)
    splits = [20 * (r + 1) for r in range(n)]
    send = normal(sum(splits), 100, seed=30 + rank).requires_grad_()
    receives = [20 * (rank + 1)] * n

    results = []
    for output, leaf in (
        (funcol.all_gather_tensor_autograd(x, 0, world), x),
        (funcol.reduce_scatter_tensor_autograd(x * w, "sum", 0, world), x),
        (funcol.all_to_all_single_autograd(send, receives, splits, world), send),
        (torch.cat(differentiable.all_gather(x * w)), x),
        (differentiable.reduce_scatter(torch.empty(60, 100, dtype=BF16), list((x * w).chunk(n))), x),
        (differentiable.all_reduce(x * w), x),
        (differentiable.broadcast(x * w, n - 1), x),
        (torch.cat(differentiable.all_to_all([torch.empty(60, 100, dtype=BF16) for _ in range(n)], x.chunk(n))), x),
        (
            differentiable.all_to_all_single(
                torch.empty(sum(receives), 100, dtype=BF16), send, output_split_sizes=receives, input_split_sizes=splits
            ),
            send,
        ),
        (differentiable.reduce(x * w, 0) if rank == 0 else differentiable.reduce(x * w, 0) * 0, x),
    ):
        output = output + 0
        (gradient,) = torch.autograd.grad(output.float().square().sum(), leaf)
        results += [output, gradient]
    return results


def kept(rank: int, world_size: int) -> list[torch.Tensor]:
    """Selective checkpointing keeps outputs of collectives, and raises where one has changed since it was returned."""
    operators = [OPS.all_gather_into_tensor, OPS.reduce_scatter_tensor, OPS.all_to_all_single]
    contexts = partial(create_selective_checkpoint_contexts, [operator.default for operator in operators])
    group = dist.group.WORLD

    def block(x: torch.Tensor) -> torch.Tensor:
        everything = funcol.all_gather_tensor_autograd(x * 2, 0, group).sin()
        mine = funcol.reduce_scatter_tensor_autograd(everything, "sum", 0, group).sin()
        return funcol.all_to_all_single_autograd(mine, None, None, group).sin()

    x = normal(64 * world_size, 32, seed=rank).requires_grad_()
    output = checkpoint_of(block, x, use_reentrant=False, context_fn=contexts)
    output.backward(normal(*output.shape, seed=9 + rank))
    assert x.grad is not None
    return [output, x.grad]


def test_operators() -> None:
    like_gloo(operators, 3, "all_gather reduce_scatter all_to_all all_reduce broadcast")


def test_functions() -> None:
    like_gloo(functions, 3, "all_gather reduce_scatter all_to_all all_reduce broadcast")


def test_selective_checkpoints() -> None:
    like_gloo(kept, 2, "all_gather reduce_scatter all_to_all")


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients(world_size: int) -> None:
    like_gloo(gradients, world_size, "all_gather reduce_scatter all_to_all all_reduce broadcast")


# ---------------------------------------------------------------------- compiled


def compiled(program: Any, **options: Any) -> Any:
    """Compiled on zipccl; gloo has the same program as it is."""
    return torch.compile(program, **options) if isinstance(dist.group.WORLD, ZipCCLProcessGroup) else program


def compiled_collectives(rank: int, world_size: int, backend: str) -> list[torch.Tensor]:
    world = dist.group.WORLD

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor(w, 0, world)
        y = x @ gathered
        y = funcol.reduce_scatter_tensor(y, "sum", 0, world)
        y = funcol.all_to_all_single(torch.relu(y), None, None, world)
        total = torch.zeros_like(y) + y
        dist.all_reduce(total)  # which compilation turns into its functional form
        return total * 0.5 + y

    x, w = normal(64 * world_size**2, 32 * world_size, seed=rank), normal(32, 96, seed=40 + rank)
    return [compiled(program, backend=backend, fullgraph=True)(x, w)]


def broken_graphs(rank: int, world_size: int) -> list[torch.Tensor]:
    """A compiled function with collectives that no graph holds: torch runs them between graphs, as they are."""
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        z = torch.relu(x)
        work.wait()
        gathered = [torch.zeros_like(z) for _ in range(world_size)]
        dist.all_gather(gathered, z + y)
        received = torch.zeros_like(z)
        sending = dist.isend(z - y, ahead)
        dist.irecv(received, behind).wait()
        sending.wait()
        dist.broadcast(received, 0)
        return [y, z + 1, received * 3, *gathered]

    return compiled(program, backend="aot_eager")(normal(100, 80, seed=rank))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width), nn.LayerNorm(width))
        filled(self.to(BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


def trained(model: nn.Module, inputs: Callable[[int], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """The losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(inputs(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(whole(parameter) for parameter in model.parameters())]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compiled_model(rank: int, world_size: int, kind: str, backend: str) -> list[torch.Tensor]:
    model: nn.Module = Model()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (world_size,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        parallelize_module(model.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = compiled(model, backend=backend)
    return trained(model, lambda step: normal(32, 64, seed=10 * step + (rank if kind != "tp" else 0)))


def test_compiled_collectives() -> None:
    like_gloo(compiled_collectives, 2, "all_gather reduce_scatter all_to_all all_reduce", "aot_eager")


def test_compiled_around_collectives() -> None:
    like_gloo(broken_graphs, 2, "all_gather all_reduce broadcast send_recv")


@pytest.mark.parametrize(
    ("kind", "sent"), [("ddp", "all_reduce broadcast"), ("fsdp2", "all_gather reduce_scatter"), ("tp", "all_reduce")]
)
def test_compiled_models(kind: str, sent: str) -> None:
    like_gloo(compiled_model, 2, sent, kind, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its wrapper code calls the operators itself, in place and out of place, with memory that it uses again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    like_gloo(compiled_collectives, 2, "all_gather reduce_scatter all_to_all all_reduce", "inductor", timeout=200)


# ---------------------------------------------------------------------- DTensor, tensor and sharded parallelism


def redistributed(rank: int, world_size: int) -> list[torch.Tensor]:
    """Every pair of placements, also where dimensions do not divide by the world size. On a CPU, torch makes
    an all-gather of shard to shard."""
    mesh = init_device_mesh("cpu", (world_size,))
    results = []
    for shape in ((96, 120), (101, 99), (2, 5000)):
        value = normal(*shape, seed=shape[0])
        for source in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(value, mesh, [source])
            for target in (Shard(0), Shard(1), Replicate()):
                results.append(tensor.redistribute(placements=[target]).to_local())
            results.append(tensor.full_tensor())
        partial = DTensor.from_local(normal(*shape, seed=shape[0] + rank), mesh, [Partial()])
        results += [partial.redistribute(placements=[target]).to_local() for target in (Shard(0), Shard(1))]
        results.append(partial.full_tensor())
        average = DTensor.from_local(normal(*shape, seed=shape[0] + rank), mesh, [Partial("avg")])
        results.append(average.redistribute(placements=[Replicate()]).to_local())
    a = distribute_tensor(normal(48, 96, seed=1).requires_grad_(), mesh, [Shard(1)])
    b = distribute_tensor(normal(96, 60, seed=2).requires_grad_(), mesh, [Shard(0)])
    product = (a @ b).redistribute(placements=[Shard(0)])
    product.to_local().float().square().sum().backward()
    return [*results, product.to_local(), a.grad.full_tensor(), b.grad.full_tensor()]


class Block(nn.Module):
    """Tokens, a norm, a gated perceptron, logits."""

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x) * torch.sigmoid(self.gate(x)))

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(96, 48), nn.LayerNorm(48)
        self.inner, self.out = self.Perceptron(), nn.Linear(48, 96, bias=False)
        filled(self.to(BF16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        return self.out(hidden + self.inner(self.norm(hidden)))


def tensor_parallel(rank: int, world_size: int) -> list[torch.Tensor]:
    """Sequence parallel between column and row parallel layers; the loss over sharded logits."""
    model = Block()
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "inner": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "inner.up": ColwiseParallel(),
        "inner.gate": ColwiseParallel(),
        "inner.down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens = torch.randint(96, (2, 32 * world_size), generator=torch.Generator().manual_seed(step))
        with loss_parallel():
            logits = model(tokens).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss))
    return [*losses, *(whole(parameter) for parameter in model.parameters())]


def hybrid(rank: int, world_size: int) -> list[torch.Tensor]:
    """FSDP2 over a mesh of replicas and shards."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    for layer in (model.layers[0], model.layers[2], model):
        fully_shard(layer, mesh=mesh)
    return trained(model, lambda step: normal(32, 64, seed=10 * step + rank))


def two_dimensions(rank: int, world_size: int) -> list[torch.Tensor]:
    """FSDP2 over one dimension of a mesh, tensor parallel over the other; gradients clipped by their norm."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    parallelize_module(model.layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(normal(32, 64, seed=mesh["dp"].get_local_rank())).float().square().mean().backward()
    linear = [layer for layer in model.layers if isinstance(layer, nn.Linear)]
    norms = [whole(nn.utils.clip_grad_norm_(layer.parameters(), 0.01)) for layer in linear]
    gradients = [whole(parameter.grad) for parameter in model.parameters()]
    return [*norms, *gradients, *trained(model, lambda step: normal(32, 64, seed=step + mesh["dp"].get_local_rank()))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_redistribution(world_size: int) -> None:
    like_gloo(redistributed, world_size, "all_gather reduce_scatter all_reduce")


def test_tensor_parallel() -> None:
    like_gloo(tensor_parallel, 2, "all_gather reduce_scatter")


def test_hybrid_sharding() -> None:
    like_gloo(hybrid, 4, "all_gather reduce_scatter all_reduce")


def test_sharded_and_tensor_parallel() -> None:
    like_gloo(two_dimensions, 4, "all_gather reduce_scatter all_reduce")


# ---------------------------------------------------------------------- pipelines


def pipeline(rank: int, world_size: int, schedule: str) -> list[torch.Tensor]:
    from torch.distributed import pipelining

    kind = getattr(pipelining, schedule)
    rounds = 2 if issubclass(kind, pipelining.schedules.PipelineScheduleMulti) else 1
    stages = []
    for index in range(rank, rounds * world_size, world_size):
        stages.append(pipelining.PipelineStage(Model(), index, rounds * world_size, torch.device("cpu")))
    last = stages[-1].stage_index == rounds * world_size - 1
    runs = kind(
        stages if rounds > 1 else stages[0],
        n_microbatches=4,
        loss_fn=lambda y, wanted: (y - wanted).float().square().mean(),
    )
    results = []
    for step in range(2):
        losses: list[torch.Tensor] = []
        given = (normal(256, 64, seed=step),) if rank == 0 else ()
        output = runs.step(*given, **({"target": normal(256, 64, seed=9), "losses": losses} if last else {}))
        results += [*losses, *([output] if last else [])]
    return results + [parameter.grad for stage in stages for parameter in stage.submod.parameters()]


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelines(schedule: str) -> None:
    like_gloo(pipeline, 2 if "Interleaved" in schedule else 3, "send_recv", schedule)


def messages(rank: int, world_size: int) -> list[torch.Tensor]:
    """A ring by batch_isend_irecv, with messages both ways."""
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    outs = [torch.zeros(5000, dtype=BF16), torch.zeros(50, 33, dtype=BF16), torch.zeros(4000)]
    operations = [
        dist.P2POp(dist.isend, normal(5000, seed=rank), ahead),
        dist.P2POp(dist.irecv, outs[0], behind),
        dist.P2POp(dist.irecv, outs[1], ahead, tag=1),
        dist.P2POp(dist.isend, normal(50, 33, seed=rank), behind, tag=1),
        dist.P2POp(dist.isend, normal(4000, seed=rank).float(), ahead, tag=2),  # native
        dist.P2POp(dist.irecv, outs[2], behind, tag=2),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return outs


def test_batches_of_messages() -> None:
    like_gloo(messages, 3, "send_recv")


# ---------------------------------------------------------------------- checkpoints and objects


def checkpoint(rank: int, world_size: int, folder: Path) -> list[torch.Tensor]:
    """Sharded training state through files, written synchronously and in the background; then a state that rank 0 alone
    has."""
    import torch.distributed.checkpoint as dcp

    folder = folder / dist.group.WORLD.name()
    mesh = init_device_mesh("cpu", (world_size,))

    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(Model(), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        model(normal(32, 64, seed=seed + rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        parts = checkpoint_state.get_state_dict(model, optimizer)
        return {"model": parts[0], "optimizer": parts[1]}

    model, optimizer = sharded()
    step(model, optimizer, 0)
    dcp.save(state(model, optimizer), checkpoint_id=folder / "now")
    dcp.async_save(state(model, optimizer), checkpoint_id=folder / "background").result()
    step(model, optimizer, 10)
    wanted = [whole(parameter) for parameter in model.parameters()]
    for which in ("now", "background"):
        model, optimizer = sharded()
        loaded = state(model, optimizer)
        dcp.load(loaded, checkpoint_id=folder / which)
        checkpoint_state.set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        step(model, optimizer, 10)
        for parameter, value in zip(model.parameters(), wanted, strict=True):
            assert same_bits(whole(parameter), value), which

    full = {name: normal(*value.shape, seed=7) for name, value in Model().state_dict().items()} if rank == 0 else {}
    options = checkpoint_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    checkpoint_state.set_model_state_dict(model, full, options=options)
    everywhere = checkpoint_state.get_model_state_dict(
        model, options=checkpoint_state.StateDictOptions(full_state_dict=True)
    )
    return [*wanted, *everywhere.values()]


def objects(rank: int, world_size: int) -> list[torch.Tensor]:
    """Objects with tensors in them; large and of different sizes."""
    mine = {"rank": rank, "values": normal(2000 * (rank + 1), seed=rank), "text": "x" * 70_000 * rank}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    assert [each["rank"] for each in gathered] == list(range(world_size))
    assert [len(each["text"]) for each in gathered] == [70_000 * r for r in range(world_size)]
    shared = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, 1)
    assert shared[1] == 1
    own: list[Any] = [None]
    dist.scatter_object_list(own, [normal(3000, seed=r) for r in range(world_size)] if rank == 0 else None, 0)
    collected: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(mine["values"], collected, 0)
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([mine], 1)
    elif rank == 1:
        dist.recv_object_list(received, 0)
        assert received[0]["rank"] == 0
    dist.broadcast(mine["values"][:2000], 0)  # a frame among them
    return [*(each["values"] for each in gathered), shared[0]["values"], own[0], *(collected or []), mine["values"]]


def test_checkpoints(tmp_path: Path) -> None:
    like_gloo(checkpoint, 2, "all_gather reduce_scatter", tmp_path)


def test_objects() -> None:
    like_gloo(objects, 3, "broadcast")
