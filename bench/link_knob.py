"""A codec of any speed on one link: where compression stops to pay, and where the adaptive strategy thinks it does.

    python bench/link_knob.py                                    # all-gather, 2 ranks, 16 MiB, 500 Mbit/s
    python bench/link_knob.py --operation reduce_scatter --ratios 1 2 4 8 16

A fast codec on a slow link is to it what a GPU's is to a fast network. The codec is slowed down by idling; `codec:wire`
is its speed, of encoding and of decoding alone, over the link's. Ranks are processes in network namespaces, as in
bench/links.py, which says how times are taken.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import network
from forked import Ranks
from link_ranks import CHUNK, OPERATIONS, measure
from links import MIB, times_of
from report import RESULTS, Row, expect, print_head, print_table, write_csv

COLUMNS = {"codec:wire": 10, "native ms": 10, "raw": 8, "one-shot": 9, "pipelined": 10, "adaptive": 9, "goes": -12}
UNCOMPRESSED, COMPRESSED = ("native", "raw"), ("one-shot", "pipelined")


def main() -> None:
    """Sweeps the codec's speed, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=500)
    parser.add_argument("--mib", type=float, default=16)
    parser.add_argument("--operation", choices=OPERATIONS, default="all_gather")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 1.5, 2, 2.5, 3, 4, 6, 10, 20, 50])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "link_knob.csv")
    arguments = parser.parse_args()
    if network.skips("bench/link_knob.py"):
        return
    head = f"{arguments.operation} of {arguments.mib:g} MiB, {arguments.ranks} ranks, {arguments.mbit:g} Mbit/s"
    print_head(head, "milliseconds; goes: by the bytes that the adaptive strategy sent")
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        network.Network(arguments.ranks) as net,
        Ranks(net, arguments.ranks, Path(folder, "store")) as ranks,
    ):
        net.shape(arguments.mbit)
        print_table(COLUMNS, (line_of(row) for row in sweep(ranks, arguments, rows)))
    even, switch = (crossing(rows, name) for name in ("gain", "compressed"))
    print(f"# measured break-even at codec:wire {even:.3g}; the adaptive strategy compresses from {switch:.3g} on")
    expect(1 / 1.5 <= switch / even <= 1.5, "the switch within a factor of 1.5 of the break-even")
    write_csv(arguments.output, rows)


def sweep(ranks: Ranks, arguments: argparse.Namespace, rows: list[Row]) -> Any:
    """A row for each speed."""
    for ratio in arguments.ratios:
        codec = {"id": "slow_exponent", "gbyte_per_s": ratio * arguments.mbit / 8e3}
        plans = {
            "native": None,
            "raw": {"codec": "raw", "chunk_nbytes": CHUNK},
            "one-shot": {"codec": codec, "chunk_nbytes": 16 << 20},
            "pipelined": {"codec": codec, "chunk_nbytes": CHUNK},
            "adaptive": {"codec": codec, "strategy": "adaptive"},
        }
        by_rank = ranks.run(measure, arguments.operation, int(arguments.mib * MIB), plans, arguments.iterations)
        medians = {
            name: statistics.median(times_of([samples[name].spans for samples in by_rank])) * 1e3 for name in plans
        }
        sent = {name: by_rank[0][name].sent_nbytes for name in plans}
        compressed = sent["adaptive"] < 0.85 * sent["raw"]
        row: Row = {
            "ranks": arguments.ranks,
            "mbit_per_s": arguments.mbit,
            "operation": arguments.operation,
            "mib": arguments.mib,
            "codec_to_wire": ratio,
            **{f"{name}_ms": f"{median:.4g}" for name, median in medians.items()},
            "gain": f"{min(medians[n] for n in UNCOMPRESSED) / min(medians[n] for n in COMPRESSED) - 1:.4f}",
            "compressed": 1 if compressed else -1,
        }
        rows.append(row)
        yield row


def line_of(row: Row) -> list[object]:
    """A row in the table."""
    times = [row[f"{name}_ms"] for name in ("native", "raw", "one-shot", "pipelined", "adaptive")]
    return [row["codec_to_wire"], *times, "compressed" if row["compressed"] == 1 else "uncompressed"]


def crossing(rows: list[Row], column: str) -> float:
    """The codec:wire at which a column turns positive: between two rows, on a logarithmic scale."""
    points = [(float(str(row["codec_to_wire"])), float(str(row[column]))) for row in rows]
    if points[0][1] > 0:
        return points[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 <= 0 < y1:
            return math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * -y0 / (y1 - y0))
    return math.inf


if __name__ == "__main__":
    main()
