"""DeepSpeed training steps over a shaped link, natively and with ZipCCL in turn.

    python bench/train.py                       # ZeRO-3 and a mixture of experts, 2 ranks, 1 Gbit/s
    python bench/train.py --mbit 500 --models zero3

Two sets of ranks, one native, one with ZipCCL, take turns on the same network namespaces (as in bench/links.py), some
steps each; the other set waits. Both train the model from the same seed on the same text, and must have the same
losses. `share` is what communication takes of a native step: 1 minus the time of a native step without shaping over
that with it. What time could be won by sending fewer bytes follows from it by Amdahl's law: `allowed` is
1 / (1 - share + share / r), r the ratio of bytes that the interfaces sent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import network
import torch
import torch.distributed as dist
from forked import Ranks
from report import RESULTS, ROOT, Row, expect, print_head, print_table, write_csv
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

import zipccl_deepspeed

sys.path.insert(0, str(ROOT / "examples"))
from deepspeed_moe import MoEForCausalLM
from training import VOCABULARY, batches

COLUMNS = {
    "model": -7, "ranks": 5, "Mbit/s": 7, "native ms": 10, "zipccl ms": 10, "faster": 7, "bytes": 6, "share": 6,
    "allowed": 8, "losses": -7,
}  # fmt: skip
SECTION = {"reduction": "gloo", "strategy": "adaptive"}


class State:
    """Of this rank."""

    engine: Any
    data: Any


class Steps(NamedTuple):
    """Some steps on one rank: spans on the machine's clock, bytes by the interface, losses as bits."""

    spans: list[tuple[float, float]]
    sent_nbytes: int
    losses: list[str]


def build(model: str, section: dict[str, Any] | None, arguments: argparse.Namespace) -> int:
    """Makes the engine of this rank; returns the number of its model's parameters."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or DeepSpeed compiles it, for minutes
    zipccl_deepspeed.install()
    torch.manual_seed(0)
    common = {
        "vocab_size": VOCABULARY, "hidden_size": arguments.hidden, "num_hidden_layers": arguments.layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": arguments.sequence,
        "attn_implementation": "eager", "use_cache": False,
    }  # fmt: skip
    module: Any
    if model == "zero3":
        module = LlamaForCausalLM(LlamaConfig(intermediate_size=arguments.hidden * 8 // 3, **common))
    else:
        moe = {"moe_intermediate_size": arguments.hidden, "num_experts": 2, "num_experts_per_tok": 1}
        module = MoEForCausalLM(Qwen3MoeConfig(head_dim=arguments.hidden // 4, **moe, **common), ep_size=2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3 if model == "zero3" else 2},
        "steps_per_print": 10**9,
    }
    if section is not None:
        config["zipccl"] = section
    numel = sum(parameter.numel() for parameter in module.parameters())
    State.engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    State.data = batches(1, arguments.sequence, seed=1 + dist.get_rank())
    return numel


def steps(n_steps: int) -> Steps:
    """Trains."""
    spans, losses, before = [], [], network.sent_nbytes()
    for _ in range(n_steps):
        tokens = next(State.data)
        dist.barrier()
        begin = time.monotonic()
        loss = State.engine(input_ids=tokens, labels=tokens).loss
        State.engine.backward(loss)
        State.engine.step()
        spans.append((begin, time.monotonic()))
        losses.append(loss.item().hex())
    dist.barrier()
    return Steps(spans, network.sent_nbytes() - before, losses)


def counters() -> str:
    """What ZipCCL sent."""
    return zipccl_deepspeed.stats().table()


def main() -> None:
    """Trains, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["zero3", "moe"], default=["zero3", "moe"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a sample; a rank has one")
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS / "train.csv")
    arguments = parser.parse_args()
    if network.skips("bench/train.py"):
        return
    print_head("training steps over a shaped link", "faster: native over zipccl. bytes: native over zipccl, sent")
    rows = [train(model, arguments) for model in arguments.models]
    print_table(COLUMNS, [list(row.values())[: len(COLUMNS)] for row in rows])
    for row in rows:
        faster, allowed = float(str(row["faster"])), float(str(row["allowed"]))
        expect(faster >= 1.2, f"{row['model']}: at least 1.2 times faster")
        expect(faster >= 0.95 * allowed, f"{row['model']}: at least 95 % of what the share allows")
        print(row["statistics"])
    write_csv(arguments.output, [{name: row[name] for name in row if name != "statistics"} for row in rows])


def train(model: str, arguments: argparse.Namespace) -> Row:
    """One model's row."""
    n_ranks = arguments.ranks
    with (
        tempfile.TemporaryDirectory() as folder,
        network.Network(n_ranks) as net,
        Ranks(net, n_ranks, Path(folder, "native")) as native,
        Ranks(net, n_ranks, Path(folder, "zipccl")) as ours,
    ):
        native.run(build, model, None, arguments)
        numel = ours.run(build, model, SECTION, arguments)[0]
        sets = {"native": native, "zipccl": ours}
        net.shape(arguments.mbit)
        losses = {name: [each.losses for each in ranks.run(steps, 2)] for name, ranks in sets.items()}
        seconds: dict[str, list[float]] = {"native": [], "zipccl": [], "unshaped": []}
        sent = {"native": 0, "zipccl": 0}
        for _ in range(arguments.turns):
            for name, ranks in sets.items():
                done: list[Steps] = ranks.run(steps, arguments.steps)
                seconds[name] += times_of(done)
                sent[name] += sum(each.sent_nbytes for each in done)
                losses[name] += [each.losses for each in done]
        net.shape(None)
        for _ in range(arguments.turns):
            seconds["unshaped"] += times_of(native.run(steps, arguments.steps))
        table = ours.run(counters)[0]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    share, ratio = 1 - medians["unshaped"] / medians["native"], sent["native"] / sent["zipccl"]
    return {
        "model": model,
        "ranks": n_ranks,
        "mbit_per_s": arguments.mbit,
        "native_ms": f"{medians['native'] * 1e3:.4g}",
        "zipccl_ms": f"{medians['zipccl'] * 1e3:.4g}",
        "faster": f"{medians['native'] / medians['zipccl']:.3f}",
        "bytes_ratio": f"{ratio:.3f}",
        "share": f"{share:.3f}",
        "allowed": f"{1 / (1 - share + share / ratio):.3f}",
        "losses": "equal" if losses["native"] == losses["zipccl"] else "DIFFER",
        "million_parameters": f"{numel / 1e6:.1f}",
        "sequence": arguments.sequence,
        "statistics": table,
    }


def times_of(ranks: list[Steps]) -> list[float]:
    """Seconds of each step, from the last start to the last end."""
    return [
        max(end for _, end in spans) - max(begin for begin, _ in spans)
        for spans in zip(*(each.spans for each in ranks), strict=True)
    ]


if __name__ == "__main__":
    main()
