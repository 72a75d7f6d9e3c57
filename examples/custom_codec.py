"""A codec of your own: written, checked, and used to train on two ranks.

    python examples/custom_codec.py

The model is a table: the two bytes before a byte choose the row with the odds of what follows. A step sees few of the
rows, so the gradient of all others is zero, on every rank. `NonzeroCodec` sends a bit a value, and only the values that
are not zero. DDP's all-reduce goes through it unchanged, and the losses and the weights are those of a run without it.
"""

from __future__ import annotations

import argparse
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import VOCABULARY, batches, fingerprint

from zipccl_core import Codec, FrameLayout, ZipCCLConfig
from zipccl_core.testing import check_codec, run_ranks

RANKS = 2
ROWS = 4096
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NonzeroCodec(Codec):
    id: Literal["nonzero"] = "nonzero"

    def layout(self, numel, dtype):
        return FrameLayout(static_nbytes=-(-numel // 8), capacity_nbytes=numel // 8 + 128 + numel * dtype.itemsize)

    def encode(self, tensor, frame):
        bits = tensor.reshape(-1).view(INTEGER[tensor.dtype.itemsize])  # as integers: -0.0 is not zero
        values = bits[bits != 0].view(torch.uint8)
        frame.static.copy_(torch.from_numpy(np.packbits(bits != 0)))
        frame.dynamic[: len(values)].copy_(values)
        frame.dynamic_nbytes.fill_(len(values))

    def decode(self, frame, out):
        nonzero = torch.from_numpy(np.unpackbits(frame.static.numpy(), count=frame.numel).astype(bool))
        values = frame.dynamic[: frame.dynamic_nbytes.item()].view(INTEGER[frame.dtype.itemsize])
        out.view(-1).view(values.dtype).zero_().masked_scatter_(nonzero, values)


class Result(NamedTuple):
    losses: list[float]
    weights: str
    statistics: dict[str, float]


class Table(torch.nn.Module):
    """Odds of the next byte, a row for each pair of bytes (some pairs share one)."""

    def __init__(self) -> None:
        super().__init__()
        self.odds = torch.nn.Embedding(ROWS, VOCABULARY)
        torch.nn.init.zeros_(self.odds.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = (tokens[:, :-2] * 251 + tokens[:, 1:-1]) % ROWS
        return torch.nn.functional.cross_entropy(self.odds(rows).flatten(0, 1), tokens[:, 2:].flatten())


def train(rank: int, world_size: int, steps: int) -> Result:
    model = DistributedDataParallel(Table())
    optimizer = torch.optim.SGD(model.parameters(), lr=500.0)
    losses, data = [], batches(size=4, length=128, seed=rank)
    for _ in range(steps):
        loss = model(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = getattr(dist.group.WORLD, "stats", None)
    return Result(losses, fingerprint(model), stats().flat() if stats else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    check_codec(NonzeroCodec())
    print("check_codec: every bit comes back")

    native = run_ranks(train, RANKS, steps, backend="gloo")
    config = ZipCCLConfig(codec="nonzero", reduction="gloo")  # "gloo": rounds as native gloo does, to compare bits
    zipccl = run_ranks(train, RANKS, steps, config=config)

    for rank, (wanted, came) in enumerate(zip(native, zipccl, strict=True)):
        raw_mb = came.statistics["zipccl/all_reduce/raw_nbytes"] / 1e6
        wire_mb = came.statistics["zipccl/all_reduce/wire_nbytes"] / 1e6
        print(
            f"rank {rank}: loss {came.losses[0]:.4f} to {came.losses[-1]:.4f}, sent {wire_mb:.2f} MB for {raw_mb:.2f}"
        )
        assert came.losses == wanted.losses, "losses differ"
        assert came.weights == wanted.weights, "weights differ"
        assert wire_mb < raw_mb, "nothing was saved"
    print("losses and weights are those of native gloo, bit for bit")


if __name__ == "__main__":
    main()
