"""Megatron-core's released package over groups of ZipCCL: the same bits as over gloo, and frames were sent.

Megatron-core is not modified. Some parts of it name CUDA where none is needed; for those `cuda_on_cpu.use_cpu()` maps
`torch.cuda` to the CPU in the forked ranks (`on_cpu=True` below). The others run as they are.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zipccl_core import ZipCCLConfig
from zipccl_core.groups import stats
from zipccl_core.testing import run_ranks, same_bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about extensions that are not installed
    pytest.importorskip("megatron.core.parallel_state")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "megatron"
    sys.path.insert(0, str(EXAMPLE))
    example = importlib.import_module("train")
    from cuda_on_cpu import use_cpu

    sys.path.remove(str(EXAMPLE))

BF16 = torch.bfloat16
ALWAYS = ZipCCLConfig(strategy="always", reduction="gloo")
HIDDEN, TOKENS = 128, 96

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's and torch's, about their own deprecated names

Scenario = Callable[[int, int], list[Tensor]]


def sent() -> set[str]:
    """The operations of which this process has sent compressed frames, in any group; but for broadcasts, which only the
    ranks send that are their source."""
    total = stats()
    compressed = {str(operation) for operation in total if total[operation].frames > total[operation].raw_frames}
    return compressed - {"broadcast"}


def results(scenario: Scenario, world_size: int, backend: str, on_cpu: bool) -> list[tuple[list[Tensor], set[str]]]:
    """What every rank returned, and what it sent compressed."""

    def run(rank: int, world_size: int) -> tuple[list[Tensor], set[str]]:
        if on_cpu:
            use_cpu()
        torch.manual_seed(1)
        tensors = [tensor.detach().clone() for tensor in scenario(rank, world_size)]
        operations = sent()
        parallel_state.destroy_model_parallel()
        return tensors, operations

    return run_ranks(run, world_size, backend=backend, config=ALWAYS if backend == "zipccl" else None)


def check(scenario: Scenario, world_size: int, operations: set[str], on_cpu: bool = False) -> None:
    """The same bits through ZipCCL as through gloo on every rank, with compressed frames of these operations."""
    native = results(scenario, world_size, "gloo", on_cpu)
    compressed = results(scenario, world_size, "zipccl", on_cpu)
    for (expected, nothing), (got, used) in zip(native, compressed, strict=True):
        assert nothing == set()
        assert used == operations
        assert len(got) == len(expected) > 0
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()


def forward_backward(function: Callable[[Tensor], Tensor], input: Tensor) -> list[Tensor]:
    """Output and input gradient; the gradient that comes in differs from value to value and from rank to rank."""
    output = function(input)
    output.backward(normal(*output.shape, seed=100 + dist.get_rank()).detach())
    assert input.grad is not None
    return [output, input.grad]


# ---------------------------------------------------------------------- what runs without a shim


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("copy_to", {"all_reduce"}),
        ("reduce_from", {"all_reduce"}),
        ("scatter_to", {"all_gather"}),
        ("gather_from", {"all_gather"}),
    ],
)
def test_tensor_parallel_mappings(name: str, operations: set[str], world_size: int) -> None:
    on_cpu = name in ("scatter_to", "gather_from")  # their results are allocated on the current CUDA device

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        mapping = getattr(mappings, f"{name}_tensor_model_parallel_region")
        return forward_backward(lambda x: mapping(x * 1), normal(TOKENS, 2 * HIDDEN, seed=rank))

    check(run, world_size, operations, on_cpu)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("gather_output", [False, True])
def test_column_parallel_linear(gather_output: bool, world_size: int) -> None:
    def run(rank: int, world_size: int) -> list[Tensor]:
        layer = linear(tensor_parallel.ColumnParallelLinear, world_size, gather_output=gather_output)
        return trained(layer, normal(TOKENS, 2, HIDDEN))

    operations = {"all_reduce", "all_gather"} if gather_output else {"all_reduce"}
    check(run, world_size, operations, on_cpu=gather_output)


@pytest.mark.parametrize("world_size", [2, 4])
def test_row_parallel_linear(world_size: int) -> None:
    def run(rank: int, world_size: int) -> list[Tensor]:
        layer = linear(tensor_parallel.RowParallelLinear, world_size, input_is_parallel=True, skip_bias_add=False)
        return trained(layer, normal(TOKENS, 2, HIDDEN // world_size, seed=rank))

    check(run, world_size, {"all_reduce"})


@pytest.mark.parametrize("world_size", [2, 4])
def test_vocabulary(world_size: int) -> None:
    """Embedding and cross entropy over a vocabulary in parts. The latter reduces fp32, by MAX and SUM: native."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        config = parallel_config(world_size)
        embedding = tensor_parallel.VocabParallelEmbedding(64, HIDDEN, init_method=init, config=config)
        tokens = torch.randint(64, (4, TOKENS), generator=torch.Generator().manual_seed(5))
        hidden = embedding(tokens)
        logits = hidden @ embedding.weight.T
        loss = tensor_parallel.vocab_parallel_cross_entropy(logits, tokens.roll(1, 1))
        loss.mean().backward()
        return [hidden, logits, loss, embedding.weight.grad]

    check(run, world_size, {"all_reduce"})


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_to_all_with_uneven_splits(world_size: int) -> None:
    """Rank r sends 7 (r + 1) (s + 1) rows to rank s, and none to itself."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
        rows = [[7 * (r + 1) * (s + 1) * (r != s) for s in range(world_size)] for r in range(world_size)]
        splits = rows[rank]
        received = [row[rank] for row in rows]
        group = parallel_state.get_expert_model_parallel_group()
        return forward_backward(
            lambda x: mappings.all_to_all(group, x, received, splits), normal(sum(splits), HIDDEN, seed=rank)
        )

    check(run, world_size, {"all_to_all"}, on_cpu=True)


# ---------------------------------------------------------------------- what names CUDA


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("scatter_to_sequence_parallel_region", {"all_gather"}),
        ("gather_from_sequence_parallel_region", {"all_gather", "reduce_scatter"}),
        ("reduce_scatter_to_sequence_parallel_region", {"all_gather", "reduce_scatter"}),
        ("all_gather_last_dim_from_tensor_parallel_region", {"all_gather", "reduce_scatter"}),
        ("reduce_scatter_last_dim_to_tensor_parallel_region", {"all_gather", "reduce_scatter"}),
        ("all_to_all_sp2hp", {"all_to_all"}),
        ("all_to_all_hp2sp", {"all_to_all"}),
    ],
)
def test_sequence_parallel_mappings(name: str, operations: set[str], world_size: int) -> None:
    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        return forward_backward(getattr(mappings, name), normal(TOKENS, 2 * HIDDEN, seed=rank))

    check(run, world_size, operations, on_cpu=True)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel_layers(world_size: int) -> None:
    """A column- and a row-parallel layer with sequence parallelism: asynchronous all-gathers and reduce-scatters."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        first = linear(tensor_parallel.ColumnParallelLinear, world_size, sequence=True, gather_output=False)
        second = linear(
            tensor_parallel.RowParallelLinear, None, sequence=True, input_is_parallel=True, skip_bias_add=False
        )
        model = nn.ModuleList([first, second])
        x = normal(TOKENS, 2, HIDDEN, seed=rank)
        hidden, _ = first(x)
        output, _ = second(hidden[..., : HIDDEN // world_size].contiguous())
        output.backward(normal(*output.shape, seed=rank + 9).detach())
        assert x.grad is not None
        return [output, x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    check(run, world_size, {"all_gather", "reduce_scatter"}, on_cpu=True)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_moe_token_dispatcher(kind: str, world_size: int) -> None:
    """Dispatch and combine, forward and backward. Experts get uneven numbers of tokens, the last one none."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size, expert_tensor_parallel_size=1)
        n_experts = 2 * world_size
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            num_moe_experts=n_experts,
            expert_model_parallel_size=world_size,
            moe_router_topk=2,
            moe_token_dispatcher_type=kind,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        groups = ProcessGroupCollection()
        groups.ep = parallel_state.get_expert_model_parallel_group()
        groups.expt_tp = parallel_state.get_expert_tensor_parallel_group()
        groups.tp_ep = parallel_state.get_expert_tensor_and_model_parallel_group()
        dispatcher_type = MoEAlltoAllTokenDispatcher if kind == "alltoall" else MoEAllGatherTokenDispatcher
        dispatcher = dispatcher_type(2, [2 * rank, 2 * rank + 1], config, groups)

        hidden = normal(TOKENS, 1, HIDDEN, seed=rank)
        scores = normal(TOKENS, n_experts, seed=50 + rank).detach() + torch.arange(n_experts) % 3
        scores[:, -1] = -torch.inf
        weights, experts = scores.softmax(-1).topk(2)
        routing = torch.zeros(TOKENS, n_experts, dtype=torch.bool).scatter_(1, experts, True)
        weights = torch.zeros(TOKENS, n_experts, dtype=BF16).scatter(1, experts, weights.to(BF16))

        tokens, probabilities = dispatcher.dispatch_preprocess(hidden, routing, weights)
        tokens, probabilities = dispatcher.token_dispatch(tokens, probabilities)
        tokens, counts, probabilities = dispatcher.dispatch_postprocess(tokens, probabilities)
        output = dispatcher.combine_preprocess(tokens * probabilities.unsqueeze(-1))
        output = dispatcher.combine_postprocess(dispatcher.token_combine(output))
        output.backward(normal(*output.shape, seed=70 + rank).detach())
        assert hidden.grad is not None
        return [tokens, probabilities, torch.as_tensor(counts), output, hidden.grad]

    operations = {"all_to_all"} if kind == "alltoall" else {"all_gather", "reduce_scatter"}
    check(run, world_size, operations, on_cpu=True)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_data_parallel_training(distributed: bool, overlap: bool, world_size: int) -> None:
    """Three steps of Megatron's DDP with Adam, clipped gradients in bf16; with its distributed optimizer, gradients are
    reduce-scattered and parameters all-gathered."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel()
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, use_cpu_initialization=True, params_dtype=BF16
        )
        network = nn.Sequential(nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN)).to(BF16)
        gather = overlap and distributed
        options = {"use_distributed_optimizer": distributed, "overlap_param_gather": gather}
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=4000, **options)
        model = DistributedDataParallel(config, ddp, network)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, params_dtype=BF16, clip_grad=1.0, **options), [model]
        )
        norms, losses = [], []
        for step in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            x = normal(TOKENS, HIDDEN, seed=10 * step + rank).detach()
            loss = (model(x) - x).square().mean()
            loss.backward()
            model.finish_grad_sync()
            _, norm, _ = optimizer.step()
            norms.append(norm)
            losses.append(loss.detach())
        if gather:
            model.disable_forward_pre_hook()
        return [*losses, torch.tensor(norms), *network.parameters()]

    operations = {"reduce_scatter", "all_gather"} if distributed else {"all_reduce"}
    check(run, world_size, operations, on_cpu=True)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("batch", [False, True], ids=["isend", "batch_isend_irecv"])
@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable_lengths"])
def test_pipeline_messages(variable: bool, batch: bool, world_size: int) -> None:
    """Activations from the first stage to the last, each stage adding its rank."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
        config = ModelParallelConfig(
            pipeline_model_parallel_size=world_size,
            pipeline_dtype=BF16,
            variable_seq_lengths=variable,
            batch_p2p_comm=batch,
            batch_p2p_sync=batch,
        )
        messages = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
        shape, last = (TOKENS, 2, HIDDEN), rank == world_size - 1
        activation = normal(*shape).detach() if rank == 0 else messages.recv_forward(shape, False)
        if not last:
            messages.send_forward(activation + rank, last)
        gradient = normal(*shape, seed=1).detach() if last else messages.recv_backward(shape, last)
        if rank > 0:
            messages.send_backward(gradient * 0.5, False)
        return [activation, gradient]

    check(run, world_size, {"send_recv"}, on_cpu=True)


@pytest.mark.parametrize("world_size", [2, 4])
def test_pipeline_schedule(world_size: int) -> None:
    """1F1B, one stage a rank, six microbatches."""

    class Stage(nn.Module):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__()
            self.layer = nn.Linear(HIDDEN, HIDDEN, dtype=BF16)
            self.config, self.vp_stage, self.model_type = config, None, ModelType.encoder_or_decoder
            self.input: Tensor | None = None

        def set_input_tensor(self, input: Any) -> None:
            self.input = input[0] if isinstance(input, list) else input

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.layer(x if self.input is None else self.input)
            return hidden.tanh()

    def run(rank: int, world_size: int) -> list[Tensor]:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
        config = TransformerConfig(
            num_layers=world_size,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            use_cpu_initialization=True,
            pipeline_model_parallel_size=world_size,
            pipeline_dtype=BF16,
            params_dtype=BF16,
        )
        stage = Stage(config)
        batches = iter([normal(TOKENS, 1, HIDDEN, seed=i).detach() for i in range(6)])

        def step(iterator: Any, model: nn.Module) -> Any:
            return model(next(iterator)), lambda output: (
                output.float().square().mean(),
                {"loss": output.float().sum()},
            )

        reported = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches,
            model=[stage],
            num_microbatches=6,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )
        assert len(reported) == (6 if rank == world_size - 1 else 0)
        gradients = [parameter.grad for parameter in stage.parameters()]
        return [*(one["loss"] for one in reported), *(g for g in gradients if g is not None)]

    check(run, world_size, {"send_recv"}, on_cpu=True)


# ---------------------------------------------------------------------- all of it together


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("layout", "operations"),
    [
        ({"tensor_parallel": 2}, {"all_reduce"}),
        ({"tensor_parallel": 1}, set()),
        ({"tensor_parallel": 1, "experts": 4}, {"all_to_all"}),
    ],
    ids=["tensor", "data", "expert"],
)
def test_gpt(layout: dict[str, int], operations: set[str], world_size: int) -> None:
    """What examples/megatron/train.py trains: the same losses and weights. Of 4 ranks and tensor parallelism over 2,
    data parallelism takes the other factor."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        arguments = argparse.Namespace(**{"hidden": HIDDEN, "sequence": 64, "experts": 0, **layout})
        model, optimizer = example.build(arguments)
        generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
        losses = [example.train_step(model, optimizer, example.batch(64, generator)) for _ in range(3)]
        assert losses[2] < losses[0]
        return [*losses, *model.parameters()]

    replicas = {"all_gather", "reduce_scatter"}  # of Megatron's DDP and distributed optimizer
    check(run, world_size, operations | (replicas if layout["tensor_parallel"] < world_size else set()), on_cpu=True)


def test_drop_in() -> None:
    """The example, started by torchrun as its README says: with `ZIPCCL=1` it prints what it prints over gloo, by
    either of the names that Megatron's `--distributed-backend` takes."""
    settings = {"ZIPCCL": "1", "ZIPCCL_STRATEGY": "always", "ZIPCCL_REDUCTION": "gloo"}
    native = train_example({})
    losses = [line for line in native if line.startswith("step ")]
    assert len(losses) == 2
    assert not any("frames" in line for line in native)
    for backend in ("gloo", "nccl"):
        compressed = train_example(settings, "--backend", backend)
        assert [line for line in compressed if line.startswith("step ")] == losses
        for operation in ("all_to_all", "all_gather", "reduce_scatter"):
            assert any(re.match(rf"{operation}: .* [1-9]\d* frames$", line) for line in compressed)


def train_example(environment: dict[str, str], *more: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(EXAMPLE / "train.py"), "--steps", "2", "--experts", "4", *more]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ZIPCCL")}
    environ.update(environment, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---------------------------------------------------------------------- helpers


def init(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.02)


def parallel_config(world_size: int, sequence: bool = False) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=world_size,
        sequence_parallel=sequence,
        use_cpu_initialization=True,
        params_dtype=BF16,
        gradient_accumulation_fusion=False,
    )


def linear(kind: Any, world_size: int | None, sequence: bool = False, **more: Any) -> nn.Module:
    """A parallel layer of HIDDEN by HIDDEN; makes the groups too, unless they are there (`world_size=None`)."""
    if world_size is not None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = parallel_config(dist.get_world_size(), sequence)
    layer: nn.Module = kind(HIDDEN, HIDDEN, config=config, init_method=init, bias=True, **more)
    return layer


def trained(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    found = forward_backward(lambda value: layer(value)[0], x)
    return [*found, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]
