"""Collectives over links of a known rate: native, raw and compressed on ZipCCL's schedule, in one run.

    python bench/links.py                                      # the whole sweep, about half an hour
    python bench/links.py --ranks 2 --rates 500 1000 --sizes 16 --operations all_gather
    python bench/links.py --plot                               # draws the committed results again

Ranks are forked processes in network namespaces, a node each (bench/network.py); links are shaped by tc. It needs root
and says so where it cannot run. Every iteration takes each plan once behind a barrier, in random order; a time
is from the last start to the last end on the one clock. Results are compared by their bits. Bytes are the interface's
counters. Intervals are of the ratio of medians, by bootstrap over iterations, 90 %.

Rows that are no evidence are marked: `load` where other programs had more than 0.2 cores, `line` where the raw
schedule did not reach 85 % of the line's rate, so that not the line was measured but the processors.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import network
from forked import Ranks
from link_ranks import OPERATIONS, PLANS, Sample, measure, program_s
from report import RESULTS, Row, expect, print_head, print_table, read_csv, write_csv

MIB = 1 << 20
COLUMNS = {
    "ranks": 5, "Mbit/s": 7, "operation": -14, "MiB": 6, "plan": -13, "ms": 8, "sent": 7, "raw/": 6, "native/": 8,
    "interval": -15, "line": 5, "": -10,
}  # fmt: skip


def main() -> None:
    """Sweeps, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[500, 1000, 2500, 5000, 10000, 0], help="Mbit/s; 0 unshaped"
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.0625, 1, 4, 16, 64], help="MiB")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument(
        "--iterations", type=int, default=9, help="of cells above 1 MiB; smaller ones have 4 times as many"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "links.csv")
    parser.add_argument("--plot", action="store_true", help="draw --output's rows, without measuring")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(arguments.output)
        return
    if network.skips("bench/links.py"):
        return
    print_head("collectives over shaped links", "MiB: of the largest tensor of a rank. sent: MiB by a rank's interface")
    rows: list[Row] = []
    print_table(COLUMNS, (line_of(row) for row in sweep(arguments, rows)))
    if {"native", "adaptive"} <= set(arguments.plans):
        print_regret(rows)
    write_csv(arguments.output, rows)


def sweep(arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Row]:
    """All rows, as they come; they are kept in `rows`, too."""
    plans = {name: PLANS[name] for name in arguments.plans}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in arguments.ranks:
            with (
                network.Network(world_size) as net,
                Ranks(net, world_size, Path(folder, f"store{world_size}")) as ranks,
            ):
                for rate, operation, size in itertools.product(arguments.rates, arguments.operations, arguments.sizes):
                    net.shape(rate or None)
                    made = cell(
                        ranks, world_size, rate, operation, size, plans, arguments.iterations * (4 if size <= 1 else 1)
                    )
                    rows += made
                    yield from made


def cell(
    ranks: Ranks, world_size: int, rate: float, operation: str, size: float, plans: dict[str, Any], iterations: int
) -> list[Row]:
    """The rows of one operation and size at one rate."""
    nbytes = int(size * MIB)
    own, busy, began = program_s() + sum(ranks.run(program_s)), _busy_s(), time.monotonic()
    by_rank: list[dict[str, Sample]] = ranks.run(measure, operation, nbytes, plans, iterations)
    busy, took = _busy_s() - busy, time.monotonic() - began
    own = program_s() + sum(ranks.run(program_s)) - own
    foreign = max(0.0, busy - own) / took
    times = {name: times_of([samples[name].spans for samples in by_rank]) for name in plans}
    sent = {name: max(samples[name].sent_nbytes for samples in by_rank) for name in plans}
    wrong = _different([{name: samples[name].digest for name in plans} for samples in by_rank], operation)
    line_s = _line_nbytes(operation, nbytes, world_size) * 8 / (rate * 1e6) if rate else 0.0
    rows = []
    for name in plans:
        median = statistics.median(times[name])
        row: Row = {
            "ranks": world_size,
            "mbit_per_s": rate or "",
            "operation": operation,
            "mib": size,
            "plan": name,
            "median_ms": f"{median * 1e3:.4g}",
            "min_ms": f"{min(times[name]) * 1e3:.4g}",
            "sent_mib": f"{sent[name] / MIB:.4g}",
            "line": f"{line_s / statistics.median(times['raw']):.3f}" if "raw" in plans and rate else "",
            "foreign_cores": f"{foreign:.2f}",
            "bits": "differ" if name in wrong else "equal",
        }
        for base in ("raw", "native"):
            if base in plans:
                row[f"{base}_over_this"] = f"{statistics.median(times[base]) / median:.4g}"
                low, high = bootstrap(times[base], times[name])
                row[f"{base}_low"], row[f"{base}_high"] = f"{low:.4g}", f"{high:.4g}"
        marks = ["load"] if foreign > 0.2 else []
        if rate and "raw" in plans and line_s / statistics.median(times["raw"]) < 0.85:
            marks.append("line")
        row["marks"] = " ".join(marks)
        rows.append(row)
    return rows


def line_of(row: Row) -> tuple[object, ...]:
    """A row in the table."""
    interval = f"[{row['raw_low']}, {row['raw_high']}]" if "raw_low" in row else ""
    marks = [str(row["marks"]), "BITS DIFFER" if row["bits"] == "differ" else ""]
    return (
        row["ranks"], row["mbit_per_s"] or "-", row["operation"], row["mib"], row["plan"], row["median_ms"],
        row["sent_mib"], row.get("raw_over_this", ""), row.get("native_over_this", ""), interval, row["line"],
        " ".join(filter(None, marks)),
    )  # fmt: skip


def print_regret(rows: Sequence[Row]) -> None:
    """The adaptive strategy's time over the best fixed plan's, and over native, in every cell."""
    cells: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("ranks", "mbit_per_s", "operation", "mib"))
        cells.setdefault(key, {})[str(row["plan"])] = float(str(row["median_ms"]))
    lines, regrets, over_native = [], [], []
    for key, times in cells.items():
        best = min((plan for plan in times if plan != "adaptive"), key=lambda plan: times[plan])
        regret, over = times["adaptive"] / times[best], times["adaptive"] / times["native"]
        regrets.append(regret)
        over_native.append(over)
        lines.append((*key, best, f"{regret:.3f}", f"{over:.3f}"))
    print("# regret of the adaptive strategy")
    print_table({**dict(list(COLUMNS.items())[:4]), "best fixed": -13, "over best": 9, "over native": 11}, lines)
    within = sum(regret <= 1.05 for regret in regrets)
    expect(within == len(regrets), f"at most 1.05 of the best fixed plan (in {within} of {len(regrets)} cells)")
    within = sum(over <= 1.10 for over in over_native)
    expect(within == len(over_native), f"at most 1.10 of native (in {within} of {len(over_native)} cells)")


def bootstrap(base: Sequence[float], other: Sequence[float], n: int = 1000) -> tuple[float, float]:
    """The 90 % interval of the ratio of medians, over iterations drawn anew."""
    generator, ratios = random.Random(0), []
    for _ in range(n):
        drawn = [generator.randrange(len(base)) for _ in base]
        ratios.append(statistics.median(base[i] for i in drawn) / statistics.median(other[i] for i in drawn))
    ratios.sort()
    return ratios[n // 20], ratios[-n // 20]


def draw(path: Path) -> None:
    """Draws the speed-up over the raw schedule at each rate, for 16 MiB, beside the CSV."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in read_csv(path) if row["mib"] == "16.0" and row["mbit_per_s"]]
    operations = [operation for operation in OPERATIONS if any(row["operation"] == operation for row in rows)]
    figure, axes = plt.subplots(1, len(operations), figsize=(3.2 * len(operations), 3.4), sharey=True, squeeze=False)
    for axis, operation in zip(axes[0], operations, strict=True):
        for color, plan in enumerate(("native", "one-shot", "pipelined", "adaptive")):
            for world_size, style in (("2", "-"), ("4", ":")):
                chosen = [
                    row
                    for row in rows
                    if (row["operation"], row["plan"], row["ranks"]) == (operation, plan, world_size)
                ]
                rates = [float(row["mbit_per_s"]) for row in chosen]
                gains = [float(row["raw_over_this"]) for row in chosen]
                axis.plot(
                    rates, gains, style, color=f"C{color}", marker="o", markersize=3, label=f"{plan}, {world_size}"
                )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(title=operation, xlabel="Mbit/s", xscale="log")
    axes[0][0].set_ylabel("times as fast as raw, 16 MiB")
    axes[0][-1].legend(fontsize=6, title="plan, ranks", title_fontsize=6)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    print(f"# drawn: {os.path.relpath(path.with_suffix('.png'))}")


def times_of(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each iteration, from the last start to the last end, of the spans of all ranks."""
    return [max(end for _, end in ranks) - max(begin for begin, _ in ranks) for ranks in zip(*spans, strict=True)]


def _line_nbytes(operation: str, nbytes: int, world_size: int) -> float:
    """What the busiest link has to carry at least, in one direction."""
    share = nbytes * (world_size - 1) / world_size
    return {"all_reduce": 2 * share, "broadcast": float(nbytes)}.get(operation, share)


def _different(digests: Sequence[dict[str, str]], operation: str) -> set[str]:
    """Plans whose result is not the native one's; a reduce-scatter's may be that of the raw schedule, whose order of
    additions is ZipCCL's."""
    bases = ("native", "raw") if operation == "reduce_scatter" else ("native",)
    return {
        name
        for rank in digests
        for name, digest in rank.items()
        if "native" in rank and digest not in [rank[base] for base in bases if base in rank]
    }


def _busy_s() -> float:
    """Time of all programs on processors so far; not the kernel's, which carries this benchmark's packets."""
    user, nice = map(int, Path("/proc/stat").read_text().split(maxsplit=3)[1:3])
    return (user + nice) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
