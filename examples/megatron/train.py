"""Trains a small GPT of megatron-core on CPUs: tensor parallel, data parallel or a mixture of experts.

    torchrun --nproc_per_node 2 examples/megatron/train.py                       # gloo
    ZIPCCL=1 torchrun --nproc_per_node 2 examples/megatron/train.py              # the same through ZipCCL
    ZIPCCL=1 torchrun --nproc_per_node 2 examples/megatron/train.py --experts 4

There is nothing about ZipCCL in what trains; the last lines print its statistics where there are any. Model, optimizer
and data parallelism are megatron-core's; `cuda_on_cpu.py` lets it run where there is no GPU. With
`ZIPCCL_REDUCTION=gloo`, additions are done in gloo's order and losses are those of gloo, bit for bit.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from cuda_on_cpu import use_cpu
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

BF16 = torch.bfloat16
VOCABULARY = 256  # a token is a byte
TEXT = torch.tensor(list("".join(topics.values()).encode()), dtype=torch.long)  # Python's own reference manual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["gloo", "nccl", "zipccl"], default="gloo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--tensor-parallel", type=int, default=None, help="all ranks, or 1 with experts")
    parser.add_argument("--experts", type=int, default=0, help="in every layer, spread over all ranks")
    arguments = parser.parse_args()

    use_cpu()
    dist.init_process_group(arguments.backend)
    model, optimizer = build(arguments)
    replica = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(replica)
    for step in range(arguments.steps):
        loss = train_step(model, optimizer, batch(arguments.sequence, generator))
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        if dist.get_rank() == 0:
            mean = loss.item() / parallel_state.get_data_parallel_world_size()
            print(f"step {step}: loss {mean:.4f} ({mean.hex()})", flush=True)
    report()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(arguments: argparse.Namespace) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Megatron's groups, the model in bf16 in Megatron's DDP, and its distributed Adam."""
    world_size = dist.get_world_size()
    tensor_ranks = arguments.tensor_parallel or (1 if arguments.experts else world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks,
        expert_model_parallel_size=world_size if arguments.experts else 1,
        expert_tensor_parallel_size=1 if arguments.experts else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)

    experts = arguments.experts or None
    config = TransformerConfig(
        num_layers=2,
        hidden_size=arguments.hidden,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor_ranks,
        num_moe_experts=experts,
        expert_model_parallel_size=world_size if experts else 1,
        expert_tensor_parallel_size=1 if experts else None,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none" if experts else "aux_loss",
        use_cpu_initialization=True,
        params_dtype=BF16,
        bf16=True,
        pipeline_dtype=BF16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        add_bias_linear=not experts,
    )
    torch.manual_seed(1)  # of parameters; the same on all ranks, which cut their parts out
    network = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts),
        vocab_size=VOCABULARY,
        max_sequence_length=arguments.sequence,
        parallel_output=True,
    ).to(BF16)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(config, ddp, network)
    model.broadcast_params()
    options = OptimizerConfig(
        optimizer="adam", lr=2e-3, bf16=True, params_dtype=BF16, clip_grad=1.0, use_distributed_optimizer=True
    )
    return model, get_megatron_optimizer(options, [model])


def train_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, tokens: Tensor) -> Tensor:
    """Returns the loss, shape ()."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.size(1)
    positions = torch.arange(length).expand_as(inputs)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # true where attention is forbidden
    loss = model(inputs, positions, mask, labels=labels).float().mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    return loss.detach()


def batch(length: int, generator: torch.Generator, size: int = 4) -> Tensor:
    starts = torch.randint(len(TEXT) - length - 1, (size,), generator=generator)
    return torch.stack([TEXT[start : start + length + 1] for start in starts.tolist()])


def report() -> None:
    """Prints what rank 0 sent through ZipCCL, if it is there and on."""
    try:
        from zipccl_core.groups import stats
    except ImportError:
        return
    statistics = stats()
    for operation in statistics if dist.get_rank() == 0 else ():
        one = statistics[operation]
        print(
            f"{operation}: {one.calls} calls, {one.native_calls} of them native; "
            f"{one.raw_nbytes} B as {one.wire_nbytes} B, {one.frames} frames"
        )


if __name__ == "__main__":
    main()
