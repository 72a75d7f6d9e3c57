"""The models of the ZipCCL paper in small: Llama 3, Qwen3-MoE and DeepSeek-V3, trained natively and with ZipCCL.

    python examples/models.py --model llama3 --steps 20

The architectures are those of transformers, with a few million parameters. Each is trained twice on two ranks, by FSDP2
over the backends gloo and zipccl, in bf16, on the same text. The losses and the weights must be equal bit for bit, and
the bytes fewer.

Exit code: 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from fsdp2_train import shard, train
from training import VOCABULARY, batches, fingerprint

from zipccl_core import ZipCCLConfig
from zipccl_core.testing import run_ranks

SEQUENCE = 64
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "use_cache": False}


def llama3() -> torch.nn.Module:
    """Grouped-query attention and rope as in Llama 3."""
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        rope_theta=500_000.0,
        **COMMON,
    )
    return transformers.LlamaForCausalLM(config)


def qwen3_moe() -> torch.nn.Module:
    """8 experts a layer, of which a token goes to 2; norms of queries and keys."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        **COMMON,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> torch.nn.Module:
    """Latent attention; one dense layer, then 8 routed experts in 2 groups and a shared one."""
    config = transformers.DeepseekV3Config(
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        **COMMON,
    )
    return transformers.DeepseekV3ForCausalLM(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama3": llama3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
}


class Result(NamedTuple):
    """What one rank of a run came to."""

    parameters: int
    losses: list[str]
    weights: str
    counters: dict[str, float]


def train_rank(rank: int, world_size: int, name: str, steps: int) -> Result:
    torch.manual_seed(1234)
    model = MODELS[name]()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch.device("cpu")
    data = batches(size=4, length=SEQUENCE, seed=rank)
    losses = train(shard(model, device), data, steps, device, quiet=True)
    group = dist.group.WORLD
    counters = group.stats().flat() if dist.get_backend() == "zipccl" else {}
    return Result(parameters, [loss.hex() for loss in losses], fingerprint(model), counters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write losses, hashes of weights and counters here, as JSON")
    arguments = parser.parse_args()

    runs: dict[str, list[Result]] = {}
    for backend in ("gloo", "zipccl"):
        start = time.perf_counter()
        config = ZipCCLConfig(reduction="gloo") if backend == "zipccl" else None  # adds in gloo's order
        job = (arguments.model, arguments.steps)
        runs[backend] = run_ranks(train_rank, arguments.ranks, *job, backend=backend, config=config, timeout=1800)
        print(f"{backend}: {arguments.steps} steps took {time.perf_counter() - start:.0f} s", flush=True)

    native, zipccl = runs["gloo"], runs["zipccl"]
    print(f"\n{arguments.model}, {native[0].parameters / 1e6:.1f} million parameters, losses of rank 0:")
    print("step  native    zipccl    equal on all ranks")
    for step in range(arguments.steps):
        wanted, came = ([rank.losses[step] for rank in run] for run in (native, zipccl))
        values = f"{float.fromhex(wanted[0]):.6f}  {float.fromhex(came[0]):.6f}"
        print(f"{step + 1:4}  {values}  {'yes' if wanted == came else 'NO'}")

    def sent(counter: str) -> float:
        return sum(n for rank in zipccl for name, n in rank.counters.items() if name.endswith(f"/{counter}"))

    losses, weights = ([rank._asdict()[what] for rank in zipccl] for what in ("losses", "weights"))
    same_losses = losses == [rank.losses for rank in native]
    same_weights = weights == [rank.weights for rank in native]
    print(f"losses equal: {same_losses}, weights equal: {same_weights}")
    print(f"sent by all ranks: {sent('wire_nbytes') / 1e6:.1f} MB, instead of {sent('raw_nbytes') / 1e6:.1f} MB")
    if arguments.output:
        result = {backend: [rank._asdict() for rank in run] for backend, run in runs.items()}
        arguments.output.write_text(json.dumps(result))
    fewer = sent("frames") > sent("raw_frames") and sent("wire_nbytes") < sent("raw_nbytes")
    return 0 if same_losses and same_weights and fewer else 1


if __name__ == "__main__":
    sys.exit(main())
