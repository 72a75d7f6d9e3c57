"""What section `checks` of bench/gpu.py works on, how much of it, and what came of it."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gpu_machine import row
from report import Row

from zipccl_core import ExponentCodec, compress
from zipccl_core.testing import sample_tensors

BF16 = torch.bfloat16
CODINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "sigma=0.02": {"sigma": 0.02},
    "table": {"table": (120, 119, 121, 118, 122, 0, 255)},
}
MOST_SHOWN = 20


class Extent(NamedTuple):
    """How much is checked.

    Attributes:
        large: numels of the largest tensors.
        damaged: every how manieth byte of a frame's body is damaged.
        thread_blocks: around as many thread blocks there are sizes.
        reduced: numels of sums.
        threads, calls: that many threads, and calls of each.
    """

    large: Sequence[int] = (3_000_001, 1 << 22, 5_242_881)
    damaged: int = 7
    thread_blocks: Sequence[int] = (1, 2, 3, 4, 8, 13)
    reduced: Sequence[int] = (1, 700, 8192, 8193, 100_001)
    threads: int = 4
    calls: int = 25


class Tally:
    """How many comparisons were made, by kind, and what differed."""

    def __init__(self) -> None:
        self.compared: Counter[tuple[str, str]] = Counter()
        self.wrong: Counter[tuple[str, str]] = Counter()
        self.shown: list[str] = []
        self._lock = threading.Lock()

    def holds(self, variant: str, check: str, what: str, good: bool) -> None:
        with self._lock:
            self.compared[variant, check] += 1
            if not good:
                self.wrong[variant, check] += 1
                self.shown.append(f"{variant}, {check}: {what}")


class Case(NamedTuple):
    """A tensor on the CPU, where its memory begins on the device, and its frames by coding."""

    name: str
    values: torch.Tensor
    offset: int
    frames: Mapping[str, torch.Tensor]


def outliers(numel: int, seed: int) -> torch.Tensor:
    """Normal values of which some are far away: many escapes, unequal from block to block."""
    generator = torch.Generator().manual_seed(seed)
    far = torch.rand(numel, generator=generator) < torch.linspace(0, 0.1, numel)
    return (torch.randn(numel, generator=generator) * torch.where(far, 100.0, 0.02)).to(BF16)


def patterns(numel: int, seed: int) -> torch.Tensor:
    """Every 16-bit pattern equally often: RAW."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator).to(torch.int16).view(BF16)


def reference(values: torch.Tensor, coding: str = "auto") -> torch.Tensor:
    return compress(values, ExponentCodec(kernels="reference", **CODINGS[coding]))


def cases(extent: Extent) -> list[Case]:
    """What is encoded and decoded: computed once for all variants."""
    named = list(sample_tensors(BF16))
    for blocks, more in itertools.product(extent.thread_blocks, (-1025, -1, 0, 1, 1023)):
        numel = 8192 * blocks + more
        named.append((f"around {blocks} thread blocks, numel {numel}", outliers(numel, numel)))
    for numel in extent.large:
        named += [(f"outliers, numel {numel}", outliers(numel, 1)), (f"patterns, numel {numel}", patterns(numel, 2))]
    return [
        Case(name, values, number % 9, {coding: reference(values, coding) for coding in CODINGS})
        for number, (name, values) in enumerate(named)
    ]


COLUMNS = {"variant": -10, "check": -20, "compared": 9, "#wrong": 7}


def table_of(tally: Tally) -> Iterator[list[object]]:
    for (variant, check), compared in tally.compared.items():
        yield [variant, check, compared, tally.wrong[variant, check]]


def rows_of(tally: Tally) -> Iterator[Row]:
    for (variant, check), compared in tally.compared.items():
        yield row("checks", check, variant, 0, "compared", "count", [compared], tally.wrong[variant, check])
