"""What the DeepSpeed examples share: the command line, the training loop, and the report at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from training import VOCABULARY, batches, leave

warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # names that DeepSpeed uses and torch renamed

__all__ = ["VOCABULARY", "load_config", "parse_arguments", "report", "skip_op_builds", "train"]


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes of text in a sample")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--native", action="store_true", help='leave the "zipccl" section of the configuration out')
    parser.add_argument("--output", type=Path, help="write a line of JSON a step, and one at the end, here")
    parser.add_argument("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.deepspeed_config:
        parser.error("--deepspeed_config is missing; examples/configs has some")
    return arguments


def load_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed configuration, without its "zipccl" section if a native run was asked for."""
    config: dict[str, Any] = json.loads(Path(arguments.deepspeed_config).read_text())
    if arguments.native:
        config.pop("zipccl", None)
    return config


def skip_op_builds() -> None:
    """Keeps DeepSpeed on a CPU from compiling an extension, for minutes, when communication starts.

    The extension is for inference inside one machine (`inference_all_reduce`), training never calls it. This is about
    DeepSpeed on CPUs, not about ZipCCL: on a GPU it changes nothing. DeepSpeed has no setting for it. For the optimizer
    it has one: `"torch_adam": true` in the configurations here.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(engine: Any, arguments: argparse.Namespace) -> list[float]:
    """Trains for some steps, every rank on data of its own. Returns this rank's losses, one a step."""
    rank = dist.get_rank()
    log = arguments.output.open("w") if arguments.output and rank == 0 else None
    losses = []
    data = batches(engine.train_micro_batch_size_per_gpu(), arguments.sequence, seed=arguments.seed + 1 + rank)
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        tokens = next(data).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if log:
            seconds = time.perf_counter() - start
            print(json.dumps({"step": step, "loss": losses[-1].hex(), "seconds": seconds}), file=log, flush=True)
        if rank == 0:
            print(f"step {step:3}  loss {losses[-1]:.6f}", flush=True)
    if log:
        log.close()
    return losses


def report(engine: Any, arguments: argparse.Namespace, losses: list[float], statistics: Any = None) -> None:
    """Prints rank 0's statistics; the output gets all ranks' losses and weights, as bits, and their summed counters."""
    counters = statistics.flat() if statistics else {}
    mine = {"losses": [loss.hex() for loss in losses], "weights": _fingerprint(engine.module), "statistics": counters}
    ranks: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        if statistics:
            print(f"\nrank 0 of {len(ranks)} sent:\n{statistics.table()}", flush=True)
        if arguments.output:
            summary: dict[str, Any] = {name: [rank[name] for rank in ranks] for name in ("losses", "weights")}
            summary["statistics"] = total = Counter[str]()
            for rank in ranks:
                total.update(rank["statistics"])
            with arguments.output.open("a") as log:
                print(json.dumps(summary), file=log)
    leave()


def _fingerprint(module: Any) -> str:
    """A hash of the bits of this rank's parameters; under ZeRO-3 of the parts that it keeps."""
    digest = hashlib.sha256()
    for _, parameter in sorted(module.named_parameters()):
        kept = parameter.detach().flatten()
        if hasattr(parameter, "ds_tensor"):
            part = parameter.ds_tensor.detach().flatten()
            kept = part[: max(0, parameter.ds_numel - dist.get_rank() * part.numel())]  # behind it is padding
        digest.update(kept.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
