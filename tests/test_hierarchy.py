"""Groups over several nodes of several ranks: the same bits, and between nodes once for a node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zipccl_core import ZipCCLConfig
from zipccl_core.collective.hierarchical import Place, place_of
from zipccl_core.testing import run_ranks

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("nodes", "place"),
    [
        ([0, 0, 1, 1], Place([1], [2])),
        ([0, 1, 0, 1], Place([2], [1])),
        ([7, 7, 7, 2, 2, 2, 5, 5, 5], Place([1, 2], [3, 6])),
        ([0, 0, 0, 0], None),
        ([0, 1, 2, 3], None),
        ([0, 0, 0, 1], None),
    ],
)
def test_place(nodes: list[int], place: Place | None) -> None:
    assert place_of(0, nodes) == place


def test_mates_and_neighbours_are_mutual() -> None:
    nodes = [0, 1, 2, 2, 1, 0]
    places = [place_of(rank, nodes) for rank in range(6)]
    for rank, place in enumerate(places):
        assert place is not None
        assert all(rank in places[other].mates for other in place.mates)  # type: ignore[union-attr]
        assert all(rank in places[other].near for other in place.near)  # type: ignore[union-attr]


def gathers(rank: int, world_size: int) -> tuple[list[bytes], dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)

    def values(numel: int) -> torch.Tensor:
        return (torch.randn(numel, generator=generator) * 0.02).to(BF16)

    found = []
    for numel in (5000, 1, 70_001):
        output = torch.empty(world_size * numel, dtype=BF16)
        dist.all_gather_single(output, values(numel))
        found.append(output)
        outputs = [torch.empty(numel, dtype=BF16) for _ in range(world_size)]
        work = dist.all_gather(outputs, values(numel), async_op=True)
        assert work is not None
        reduced = values(numel)
        work.wait()
        found += outputs
        dist.all_reduce(reduced)
        found.append(reduced)
    group: Any = dist.group.WORLD
    counters = group.stats().flat() if hasattr(group, "stats") else {}
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in found], counters


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (6, 2), (6, 3), (8, 4), (5, 2)])
def test_bits_are_native(world_size: int, ranks_per_node: int) -> None:
    """On five ranks, where nodes are of two, two and one, the flat way is taken."""
    native = run_ranks(gathers, world_size, backend="gloo", timeout=100)
    config = ZipCCLConfig(strategy="always", reduction="gloo", chunk_nbytes=8192, ranks_per_node=ranks_per_node)
    ours = run_ranks(gathers, world_size, config=config, timeout=100)
    for (wanted, _), (came, counters) in zip(native, ours, strict=True):
        assert came == wanted
        assert counters["zipccl/all_gather/frames"] > counters["zipccl/all_gather/raw_frames"]


def one_gather(rank: int, world_size: int) -> tuple[int, int]:
    values = torch.full((4096,), float(rank), dtype=BF16)
    dist.all_gather_single(torch.empty(world_size * 4096, dtype=BF16), values)
    group: Any = dist.group.WORLD
    stats = group.stats()["all_gather"]
    return stats.frames, stats.raw_nbytes


def test_what_passes_between_nodes_passes_once() -> None:
    """A rank of two nodes of three sends its frame to one mate, itself and its mate's frame to two neighbours."""
    config = ZipCCLConfig(strategy="always", ranks_per_node=3)
    assert run_ranks(one_gather, 6, config=config) == [(2, (1 + 2 + 2) * 8192)] * 6
    assert run_ranks(one_gather, 6, config=ZipCCLConfig(strategy="always")) == [(1, 5 * 8192)] * 6


def test_uneven_and_empty_parts() -> None:
    def run(rank: int, world_size: int) -> list[list[float]]:
        sizes = [3000, 0, 1, 5000]
        outputs = [torch.empty(size, dtype=BF16) for size in sizes]
        dist.all_gather(outputs, torch.full((sizes[rank],), float(rank + 1), dtype=BF16))
        return [output.unique().tolist() for output in outputs]

    config = ZipCCLConfig(strategy="always", ranks_per_node=2, chunk_nbytes=2048)
    assert run_ranks(run, 4, config=config) == [[[1.0], [], [3.0], [4.0]]] * 4
