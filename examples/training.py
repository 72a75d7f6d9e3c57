"""What examples need beside the library that they show: a text to train on, and a report at the end."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

VOCABULARY = 256  # a token is a byte


def batches(size: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Random samples, shape (size, length), of the text that every Python carries: its own reference manual."""
    text = torch.tensor(list("".join(topics.values()).encode()), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length, (size,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts.tolist()])


def fingerprint(module: torch.nn.Module) -> str:
    """A hash of the bits of this rank's parameters; of sharded ones, of its shards."""
    digest = hashlib.sha256()
    for _, parameter in sorted(module.named_parameters()):
        mine = parameter.detach()
        mine = mine.to_local() if isinstance(mine, DTensor) else mine
        digest.update(mine.flatten().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def report(losses: list[float], module: torch.nn.Module, counters: Mapping[str, float], output: Path | None) -> None:
    """Prints a hash of rank 0's weights, and the bytes that all ranks sent.

    The output gets the losses, as bits, the hashes and the counters of all ranks, as JSON.
    """
    mine = {"losses": [loss.hex() for loss in losses], "weights": fingerprint(module), "counters": dict(counters)}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        total = Counter[str]()
        for rank in ranks:
            total.update(rank["counters"])
        print(f"weights of rank 0: {ranks[0]['weights']}")
        for name in total:
            if name.endswith("/raw_nbytes"):
                operation = name.split("/")[1]
                wire_mb, raw_mb = total[name.replace("raw_nbytes", "wire_nbytes")] / 1e6, total[name] / 1e6
                n_native = round(total[name.replace("raw_nbytes", "native_calls")])
                compressed = f"{wire_mb:.2f} MB sent instead of {raw_mb:.2f}" if raw_mb else "nothing compressed"
                print(f"{operation}, all ranks: {compressed}; {n_native} native calls")
        if output:
            summary = {name: [rank[name] for rank in ranks] for name in ("losses", "weights")}
            output.write_text(json.dumps({**summary, "counters": total}))


def leave() -> None:
    """Ends the process at once, when all ranks are done.

    A thread of gloo's that still gives a tensor back while the interpreter closes aborts the process: with plain torch
    2.13 on a CPU, about one exit in thirty where something keeps a reference to a group, as DeepSpeed does.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
