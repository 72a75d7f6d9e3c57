"""The CUDA kernels and the collectives on a GPU: bits first, then speed.

    python bench/gpu.py                                # everything, meant for 5 minutes on an H200
    python bench/gpu.py --only checks                  # bits only
    python bench/gpu.py --only codec --sizes 256 1000
    python bench/gpu.py --plot                         # redraw the plot from the CSV; measures nothing

checks       every bit of what the kernels do, on streams, in threads and in graphs. Where one differs, it ends here
codec        encode, decode, decode + reduce, alone and in batches, beside `torch.Tensor.copy_` in the GPU's memory
peers        nvCOMP and dietgpu on the same tensors, where they are installed
path         what a collective's streams, events and host reads cost: one rank, over NCCL
collectives  two processes that share the GPU, over gloo: bits are native gloo's, and times

GB = 1e9 bytes of bf16 *input*, in both directions; all that a sum reads counts. Times are the device's, by CUDA
events, medians of interleaved rounds, each sample behind one of a copy of the same size. `moved` is what has to be read
and written once; `of floor` is the time that the copy's speed would need for it, over the time taken. `#wrong` counts
values whose bits did not come back, and bytes of frames that are not the reference's. Without a GPU the kernels are run
on the CPU, a little (tests/cusim).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_checks
import gpu_codec
import gpu_path
import gpu_peers
import gpu_ranks
import torch
import torch.distributed as dist
from gpu_codec import Clock, Payload
from gpu_machine import MB, Gpu, Machine, describe
from report import RESULTS, ROOT, Row, expect, percentiles, print_head, print_table, read_csv, write_csv

from zipccl_core import ExponentCodec, compress
from zipccl_core.kernels import compiler, why_no_cuda
from zipccl_core.testing import sample_tensors

DEFAULT = "registers"
"""The variant that is used unless another is asked for."""
PEER_SIZES, PATH_SIZES, COLLECTIVE_SIZES = (16, 256), (1, 16, 256), (1, 16)


def checks(machine: Machine, variants: list[str], extent: gpu_cases.Extent) -> list[Row]:
    tally = gpu_checks.run(machine, variants, extent)
    print("# checks: bits against the reference on the CPU")
    print_table(gpu_cases.COLUMNS, gpu_cases.table_of(tally))
    for line in tally.shown[: gpu_cases.MOST_SHOWN]:
        print(f"# WRONG: {line}")
    if tally.shown:
        print(f"# {len(tally.shown)} of {tally.compared.total()} comparisons failed: nothing is measured")
        raise SystemExit(1)
    return list(gpu_cases.rows_of(tally))


def codec(machine: Machine, variants: list[str], sizes: Iterable[float], clock: Clock, small: float = 1.0) -> list[Row]:
    """`small`: MB of the tensors by which launches and graphs are measured."""
    rows: list[Row] = []
    print("# codec")
    with machine.on(machine.streams()["own"]):
        for megabytes in sizes:
            payload = Payload(machine, gpu_codec.payload_nbytes(megabytes))
            operations = [one for variant in variants for one in payload.of(variant, machine.kernels(variant))]
            timed = gpu_codec.measure(machine, payload.copy(), operations, clock)
            print_table(gpu_codec.COLUMNS, gpu_codec.table_of(payload.nbytes, timed))
            gpu_codec.print_expectations(payload.nbytes, timed, DEFAULT)
            rows += gpu_codec.rows_of("codec", payload.nbytes, timed)
            del payload, operations, timed
    nbytes = gpu_codec.payload_nbytes(small)
    print(f"# the host's time for a call of {nbytes / MB:.2f} MB")
    launched = list(gpu_codec.launches(machine, variants, nbytes, clock))
    print_table(
        gpu_codec.LAUNCH_COLUMNS,
        ([one["operation"], one["contender"], one["p50"], f"{one['p20']}..{one['p80']}"] for one in launched),
    )
    print(f"# the device's time for a call of {nbytes / MB:.2f} MB, eager and in a graph of ten")
    replayed = list(gpu_codec.graphs(machine, variants, nbytes, clock))
    pairs = zip(replayed[::2], replayed[1::2], strict=True)
    print_table(
        gpu_codec.GRAPH_COLUMNS,
        ([eager["operation"], eager["contender"], eager["p50"], graph["p50"]] for eager, graph in pairs),
    )
    return [*rows, *launched, *replayed]


def peers(machine: Machine, sizes: Iterable[float], clock: Clock) -> list[Row]:
    rows: list[Row] = []
    print("# peers")
    stream = machine.streams()["own"]
    with machine.on(stream):
        for megabytes in sizes:
            payload = Payload(machine, gpu_codec.payload_nbytes(megabytes))
            ours = list(payload.round_trip(DEFAULT, machine.kernels(DEFAULT)))
            theirs, without = gpu_peers.operations(payload, stream.cuda_stream)
            timed = gpu_codec.measure(machine, payload.copy(), [*ours, *theirs], clock)
            print_table(gpu_codec.COLUMNS, gpu_codec.table_of(payload.nbytes, timed))
            for line in without:
                print(f"# {line}")
            for name in ("encode", "decode"):
                mine, others = _split([item for item in timed if item.operation.name == name])
                for item in others:
                    faster = percentiles(item.seconds)[1] / percentiles(mine.seconds)[1]
                    what = f"{name} of {payload.nbytes / MB:.0f} MB ahead of {item.operation.contender}"
                    expect(faster > 1, f"{what}, measured {faster:.2f} times as fast")
            rows += gpu_codec.rows_of("peers", payload.nbytes, timed)
            del payload, ours, theirs, timed
    return rows


def _split(timed: list[gpu_codec.Timed]) -> tuple[gpu_codec.Timed, list[gpu_codec.Timed]]:
    (mine,) = [item for item in timed if item.operation.contender == DEFAULT]
    return mine, [item for item in timed if item is not mine]


def path(machine: Machine, group: Any, sizes: Iterable[float], clock: Clock) -> list[Row]:
    rows: list[Row] = []
    print("# path: an all-gather of one rank; us are the device's, the host goes on after `returns`, or `waited`")
    for megabytes in sizes:
        rows += gpu_path.measure(machine, group, gpu_codec.payload_nbytes(megabytes), clock)
        print_table(gpu_path.COLUMNS, gpu_path.table_of([one for one in rows if one["nbytes"] == rows[-1]["nbytes"]]))
    return rows


def path_over_nccl(machine: Machine, sizes: Iterable[float], clock: Clock) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=machine.device)
        try:
            return path(machine, dist.group.WORLD, sizes, clock)
        finally:
            dist.destroy_process_group()


def collectives(make_machine: Callable[[], Machine], sizes: Iterable[float], rounds: int) -> list[Row]:
    print("# collectives: two processes share the device; bytes go through host memory, by gloo")
    nbytes = [gpu_codec.payload_nbytes(megabytes) for megabytes in sizes]
    rows = gpu_ranks.measure(make_machine, nbytes, rounds)
    print_table(gpu_ranks.COLUMNS, gpu_ranks.table_of(rows))
    return rows


# ---------------------------------------------------------------------- without a GPU


def simulate() -> bool:
    """Frames that the kernels make on this CPU, against the reference. Returns whether all are equal."""
    compiler_path, tests = shutil.which("g++"), ROOT / "tests"
    if compiler_path is None or not (tests / "cuda_simulator.py").exists():
        print("# simulated checks need g++ and the repository's tests: left out")
        return True
    sys.path.append(str(tests))
    import cuda_simulator

    n_frames, wrong = 0, []
    named = [(name, values) for name, values in sample_tensors(torch.bfloat16) if 0 < values.numel() < 10_000]
    with tempfile.TemporaryDirectory() as folder:
        for variant in compiler.VARIANTS:
            simulator = cuda_simulator.Simulator(cuda_simulator.build(compiler_path, Path(folder), variant=variant))
            for name, values in named[::4]:
                wanted = compress(values, ExponentCodec(kernels="reference"))
                came = torch.from_numpy(simulator.encode(values))
                status, back = simulator.decode(wanted.numpy(), values.numel())
                good = torch.equal(came, wanted) and status == 0
                good = good and torch.equal(torch.from_numpy(back.copy()), values.view(torch.uint8))
                n_frames += 1
                wrong += [] if good else [f"{variant}: {name}"]
    what = f"frames of {len(named[::4])} tensors by {len(compiler.VARIANTS)} variants of the kernels"
    print(f"# simulated on this CPU: {what}: {n_frames - len(wrong)} of {n_frames} are the reference's, and decoded")
    for line in wrong:
        print(f"# WRONG: {line}")
    return not wrong


# ---------------------------------------------------------------------- plot


def plot(source: Path, target: Path) -> None:
    """Draws the throughputs of a CSV over the sizes: a panel an operation, a line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [one for one in read_csv(source) if one["metric"] == "throughput" and one["section"] in ("codec", "peers")]
    if not rows:
        raise SystemExit(f"{source} has no throughputs: run the section codec or peers first")
    panels = [name for name in dict.fromkeys(one["operation"] for one in rows) if name != "copy"]
    columns = min(3, len(panels))
    n_rows = -(-len(panels) // columns)
    size = (4 * columns, 3.2 * n_rows + 0.8)
    figure, axes = plt.subplots(n_rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    names = list(dict.fromkeys(one["contender"] for one in rows))
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    ticks = sorted({int(one["nbytes"]) / MB for one in rows})
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name in names:
            # a peer's section measures our default again; the codec's own rows are enough where there are any
            drawn: dict[int, dict[str, str]] = {}
            for one in sorted(rows, key=lambda one: one["section"], reverse=True):
                if one["contender"] == name and one["operation"] in (panel, "copy"):
                    drawn[int(one["nbytes"])] = one
            if drawn:
                sizes = sorted(drawn)
                low, middle, high = ([float(drawn[size][p]) for size in sizes] for p in ("p20", "p50", "p80"))
                style = {"color": colors.get(name), "label": name, "marker": "o", "markersize": 3}
                axis.plot([size / MB for size in sizes], middle, linestyle="--" if "copy" in name else "-", **style)
                axis.fill_between([size / MB for size in sizes], low, high, color=colors.get(name), alpha=0.2, lw=0)
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(panel, fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"MB of bf16 on {rows[0]['device']}", fontsize=9)
    figure.supylabel("GB/s of bf16, median; bands p20 to p80", fontsize=9)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, metadata={"Software": ""})


# ---------------------------------------------------------------------- main

SECTIONS = ("checks", "codec", "peers", "path", "collectives")


def sections_of(arguments: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    """What is run, by name, in this order."""
    machine, variants = Gpu(arguments.device), list(compiler.VARIANTS)
    clock = Clock(arguments.rounds, arguments.sample_ms / 1e3, time.monotonic() + arguments.seconds)

    def within(wanted: Iterable[float]) -> list[float]:
        return [size for size in wanted if size <= max(arguments.sizes)] or [min(arguments.sizes)]

    return {
        "checks": lambda: checks(machine, variants, gpu_cases.Extent()),
        "codec": lambda: codec(machine, variants, arguments.sizes, clock),
        "peers": lambda: peers(machine, within(PEER_SIZES), clock),
        "path": lambda: path_over_nccl(machine, within(PATH_SIZES), clock),
        "collectives": lambda: collectives(partial(Gpu, arguments.device), within(COLLECTIVE_SIZES), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="A,B", help="of " + ", ".join(SECTIONS))
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64, 256, 1000], metavar="MB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sample-ms", type=float, default=3.0, help="calls are repeated for so long in a sample")
    parser.add_argument("--seconds", type=float, default=300, help="then three rounds are enough")
    parser.add_argument("--device", type=int, default=0, help="torch's number of the GPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.csv", metavar="CSV")
    parser.add_argument("--plot", action="store_true", help="only redraw the plot beside the CSV, from the CSV")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    if arguments.plot:
        plot(arguments.out, arguments.out.with_suffix(".png"))
        return
    if not torch.cuda.is_available():
        print(f"# no GPU: torch {torch.__version__} finds none, so nothing can be measured")
        if not simulate():
            raise SystemExit(1)
        return
    if reason := why_no_cuda(torch.device("cuda", arguments.device)):
        raise SystemExit(f"the CUDA kernels cannot be used: {reason}")
    describe(Gpu(arguments.device).description())
    print_head("CUDA kernels and collectives on a GPU, bf16", f"rounds: {arguments.rounds}; sections: {arguments.only}")
    rows, failed = run(sections_of(arguments), chosen)
    if rows:
        write_csv(arguments.out, rows)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(sections: dict[str, Callable[[], list[Row]]], chosen: list[str]) -> tuple[list[Row], list[str]]:
    """Rows of the chosen sections, and what failed: one that raises does not keep the others from being measured."""
    rows: list[Row] = []
    failed: list[str] = []
    for name, section in sections.items():
        if name not in chosen:
            continue
        begin = time.monotonic()
        try:
            found = section()
        except Exception as error:
            print(f"# {name} FAILED: {type(error).__name__}: {error}")
            if name == "checks":
                raise SystemExit(1) from error
            failed.append(name)
            found = []
        rows += found
        if n_wrong := sum(bool(one["wrong"]) for one in found):
            failed.append(f"{name} ({n_wrong} rows with wrong bits)")
        print(f"# {name} took {time.monotonic() - begin:.1f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the processes of the next section
    return rows, failed


if __name__ == "__main__":
    main()
