"""One rank late: are the blocks of an all-to-all between early ranks ready as if nobody were?

    python bench/link_late.py                    # 4 ranks, the last 100 ms late, 1 Gbit/s
    python bench/link_late.py --mbit 0 --mib 4   # unshaped

Ranks are processes in network namespaces, as in bench/links.py. Both cases take turns in one run. A block is ready when
its last value is decoded; the time is from the last early rank's start to the last of the early blocks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import network
from forked import Ranks
from link_ranks import blocks
from report import RESULTS, Row, expect, print_head, print_table, write_csv

COLUMNS = {"late ms": 8, "early blocks ms": 16, "min": 8, "all blocks ms": 14}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--mib", type=float, default=4)
    parser.add_argument("--late", type=float, default=0.1, help="seconds")
    parser.add_argument("--iterations", type=int, default=5, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "link_late.csv")
    arguments = parser.parse_args()
    if network.skips("bench/link_late.py"):
        return
    print_head(f"all-to-all of {arguments.mib:g} MiB, {arguments.ranks} ranks, {arguments.mbit:g} Mbit/s")
    late_rank, nbytes = arguments.ranks - 1, int(arguments.mib * (1 << 20))
    early: dict[float, list[float]] = {0.0: [], arguments.late: []}
    every: dict[float, list[float]] = {0.0: [], arguments.late: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        network.Network(arguments.ranks) as net,
        Ranks(net, arguments.ranks, Path(folder, "store")) as ranks,
    ):
        net.shape(arguments.mbit or None)
        for _ in range(arguments.turns):
            for late_s in early:
                seen = ranks.run(blocks, nbytes, late_rank if late_s else None, late_s, arguments.iterations)
                early[late_s] += [ready_s(iteration, late_rank) for iteration in zip(*seen, strict=True)]
                every[late_s] += [ready_s(iteration, None) for iteration in zip(*seen, strict=True)]
    rows: list[Row] = [
        {
            "ranks": arguments.ranks,
            "mbit_per_s": arguments.mbit,
            "mib": arguments.mib,
            "late_ms": late_s * 1e3,
            "early_blocks_ms": f"{statistics.median(early[late_s]) * 1e3:.4g}",
            "early_blocks_min_ms": f"{min(early[late_s]) * 1e3:.4g}",
            "all_blocks_ms": f"{statistics.median(every[late_s]) * 1e3:.4g}",
        }
        for late_s in early
    ]
    print_table(COLUMNS, [list(row.values())[3:] for row in rows])
    slower = statistics.median(early[arguments.late]) / statistics.median(early[0.0])
    expect(slower <= 1.1, f"early blocks at most 10 % later where a rank is late (here {100 * (slower - 1):+.0f} %)")
    write_csv(arguments.output, rows)


def ready_s(iteration: Sequence[tuple[float, dict[int, float]]], without: int | None) -> float:
    """Seconds from the last start to the last block, among all ranks but one."""
    ranks = [rank for rank in range(len(iteration)) if rank != without]
    begin = max(iteration[rank][0] for rank in ranks)
    return max(iteration[rank][1][peer] for rank in ranks for peer in ranks if peer != rank) - begin


if __name__ == "__main__":
    main()
