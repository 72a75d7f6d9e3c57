"""Trains a small Llama with Accelerate, by DDP or FSDP2; the plugin in `Accelerator(...)` is all that ZipCCL needs.

    torchrun --nproc-per-node 2 examples/accelerate_train.py --parallel ddp
    torchrun --nproc-per-node 2 examples/accelerate_train.py --parallel fsdp2

Add `--native` for the same run without the plugin: the losses are the same; on three ranks and more only with
`--reduction gloo`, since the default adds in another order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from fsdp2_train import llama
from torch.utils.data import DataLoader
from training import batches, leave, report

from zipccl_accelerate import ZipCCLPlugin

BATCH = 4


def fsdp2() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )


def allow_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Accelerate 1.15 chooses FSDP on accelerators only, though its FSDP2 runs on CPUs. Not about ZipCCL: a GPU needs
    none of this."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    plugin.set_mixed_precision(accelerator.mixed_precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--native", action="store_true", help="leave the plugin out")
    parser.add_argument("--reduction", choices=("fp32", "gloo"), default="fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes of text in a sample")
    parser.add_argument("--output", type=Path, help="write losses, hashes of weights and counters here, as JSON")
    arguments = parser.parse_args()

    zipccl = None if arguments.native else ZipCCLPlugin(reduction=arguments.reduction)
    fsdp_plugin = fsdp2() if arguments.parallel == "fsdp2" else None
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if fsdp_plugin else "no",
        fsdp_plugin=fsdp_plugin,
        kwargs_handlers=[zipccl] if zipccl else None,
    )
    if fsdp_plugin and accelerator.device.type == "cpu":
        allow_fsdp_on_cpu(accelerator, fsdp_plugin)

    set_seed(1234)
    model = llama(arguments.hidden, arguments.layers, arguments.sequence)
    if arguments.parallel == "ddp":
        model.to(torch.bfloat16)  # DDP reduces gradients in the dtype of the weights; under autocast that is fp32
    samples = next(batches(BATCH * arguments.steps * accelerator.num_processes, arguments.sequence, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=BATCH))

    losses = []
    for step, tokens in enumerate(data, start=1):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {step:3}  loss {losses[-1]:.6f}", flush=True)
    report(losses, model, zipccl.stats() if zipccl else {}, arguments.output)
    leave()


if __name__ == "__main__":
    main()
