"""What the benchmarks share: the machine in words, percentiles, committed CSV files and tables."""

from __future__ import annotations

import csv
import datetime
import functools
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from zipccl_core.kernels import select

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

Row = dict[str, object]


@functools.cache
def machine() -> dict[str, str]:
    """The columns that every row of a CSV ends with: device, versions, date."""
    return {
        "device": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "kernels": _kernels(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "version": package_version("zipccl") or "not installed",
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _cpu_model() -> str:
    """The kernel's name for the processor, with its numbers where a hypervisor has taken the name away."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields and not any(character.isdigit() for character in name):
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def _kernels() -> str:
    """Which kernels `auto` takes on a CPU, and for which instruction set."""
    name = select(torch.device("cpu")).name
    if name == "native":
        from zipccl_core.kernels import _native

        return f"native {_native.target()}"
    return name


def _commit() -> str:
    """The commit of this checkout, `+` where the measured package differs from it, empty where there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "zipccl_core") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def package_version(name: str) -> str:
    """The version of an installed distribution, empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def print_head(title: str, *notes: str) -> None:
    """The comment lines above a table."""
    print(f"# {title}")
    print("# " + ", ".join(f"{key}: {value}" for key, value in machine().items()))
    for note in notes:
        print(f"# {note}")


def print_table(columns: Mapping[str, int], rows: Iterable[Sequence[object]]) -> None:
    """Rows under their heads: columns by width, negative for text that stands left; long text pushes."""

    def line(cells: Sequence[object]) -> str:
        parts = (
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
            for cell, width in zip(map(str, cells), columns.values(), strict=True)
        )
        return " ".join(parts).rstrip()

    print(line(list(columns)))
    for row in rows:
        print(line(row), flush=True)


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80, linear between neighbours."""
    ordered = sorted(values)

    def at(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return at(0.2), at(0.5), at(0.8)


def measurement(metric: str, unit: str, values: Sequence[float]) -> Row:
    """The columns of one measured quantity."""
    p20, p50, p80 = percentiles(values)
    return {"metric": metric, "unit": unit, "p20": f"{p20:.4g}", "p50": f"{p50:.4g}", "p80": f"{p80:.4g}"}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows of equal columns and, behind them, those of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *machine()], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **machine()} for row in rows)
    print(f"# written: {os.path.relpath(path)}")


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a committed CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def expect(holds: bool, what: str) -> None:
    """Says whether an expectation holds on this machine."""
    print(f"# expected {what}: {'holds' if holds else 'DOES NOT HOLD'}")
