"""What a run of somebody else's tests gave, natively and through ZipCCL, and whether the two are equal."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MODES = ("native", "zipccl")
COUNTED = ("calls", "native_calls", "frames", "wire_nbytes")


@dataclass
class Run:
    """Outcomes by test (`passed`, `failed`, `skipped`), and what ZipCCL counted in all processes together."""

    outcomes: dict[str, str] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def row(self) -> str:
        """The counts of the outcomes."""
        counts = Counter(self.outcomes.values())
        return "  ".join(f"{counts[outcome]:5d} {outcome}" for outcome in ("passed", "failed", "skipped"))


def environment(mode: str, folder: Path, codec: str) -> dict[str, str]:
    """The environment of a run: that of this process, with ZipCCL in place of every native group or without it, and the
    file to which counters go."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ZIPCCL")}
    environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", SUITE_COUNTERS=str(folder / f"{mode}.counters"))
    if mode == "zipccl":
        environ.update(ZIPCCL="1", ZIPCCL_STRATEGY="always", ZIPCCL_CODEC=codec)
    return environ


def read_counters(folder: Path, mode: str) -> Counter[str]:
    """The counters that the processes of a run wrote, added up."""
    total: Counter[str] = Counter()
    path = folder / f"{mode}.counters"
    if path.exists():
        for line in path.read_text().splitlines():
            total.update(json.loads(line))
    return total


def report(title: str, runs: dict[str, Run]) -> bool:
    """Prints both runs and what differs. True where every test ended alike and ZipCCL sent frames, natively none."""
    print(f"# {title}")
    for mode in MODES:
        run = runs[mode]
        counters = "  ".join(f"{name} {run.counters[name]}" for name in COUNTED) if mode == "zipccl" else ""
        print(f"{mode:7s} {run.row()}  {run.seconds:6.0f} s  {counters}".rstrip())
    native, ours = (runs[mode].outcomes for mode in MODES)
    differing = [name for name in sorted({*native, *ours}) if native.get(name) != ours.get(name)]
    for name in differing:
        print(f"differs: {name}: native {native.get(name)}, zipccl {ours.get(name)}")
    for name in sorted(name for name in ours if ours[name] == native.get(name) == "failed"):
        print(f"fails in both: {name}")
    frames = {mode: runs[mode].counters["frames"] for mode in MODES}
    if not frames["zipccl"]:
        print("ZipCCL sent no frames")
    if runs["native"].counters["calls"]:
        print("the native run went through ZipCCL")
    if "passed" not in native.values():
        print("nothing passed natively")
    alike = not differing and "passed" in native.values()
    return alike and bool(frames["zipccl"]) and not runs["native"].counters["calls"]
