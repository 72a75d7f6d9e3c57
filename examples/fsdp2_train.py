"""Trains a small Llama from transformers with FSDP2, natively and with ZipCCL in two ways.

    torchrun --nproc-per-node 2 examples/fsdp2_train.py --comm native
    torchrun --nproc-per-node 2 examples/fsdp2_train.py --comm zipccl
    torchrun --nproc-per-node 2 examples/fsdp2_train.py --comm hooks

`zipccl` names the backend when the process group is made. `hooks` leaves the group as it is, and gives FSDP2 the
all-gather and the reduce-scatter that it should call. The losses are those of the native run; on three ranks and more
only with `--reduction gloo`, since the default adds in another order.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from training import VOCABULARY, batches, leave, report
from transformers import LlamaConfig, LlamaForCausalLM

from zipccl_core import ZipCCLConfig, hooks


def llama(hidden: int = 384, layers: int = 4, sequence: int = 128) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=6,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """FSDP2 over all ranks: weights are kept in fp32, and are gathered, as their gradients are reduced, in bf16."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model.to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(
    model: torch.nn.Module, data: Iterable[torch.Tensor], steps: int, device: torch.device, quiet: bool = False
) -> list[float]:
    """Trains for some steps. Returns this rank's losses, one a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, batch in enumerate(islice(data, steps), start=1):
        tokens = batch.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and not quiet:
            print(f"step {step:3}  loss {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comm", choices=("native", "zipccl", "hooks"), default="zipccl")
    parser.add_argument("--reduction", choices=("fp32", "gloo"), default="fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes of text in a sample")
    parser.add_argument("--output", type=Path, help="write losses, hashes of weights and counters here, as JSON")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    config = ZipCCLConfig(reduction=arguments.reduction)
    if arguments.comm == "zipccl":
        dist.init_process_group("zipccl", pg_options=config)
    else:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")

    torch.manual_seed(1234)
    model = shard(llama(arguments.hidden, arguments.layers, arguments.sequence), device)
    if arguments.comm == "hooks":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(hooks.CompressedAllGather(config))
                module.set_custom_reduce_scatter(hooks.CompressedReduceScatter(config))
    data = batches(size=4, length=arguments.sequence, seed=dist.get_rank())
    losses = train(model, data, arguments.steps, device)
    report(losses, model, {} if arguments.comm == "native" else hooks.stats().flat(), arguments.output)
    leave()


if __name__ == "__main__":
    main()
