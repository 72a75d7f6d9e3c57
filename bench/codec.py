"""Speed of the codec on a CPU, beside memcpy and other compressors.

    python bench/codec.py                              # 1, 16 and 256 MB of Gaussian bf16, 1 and 2 threads
    python bench/codec.py --data run.safetensors       # its bf16 tensors, one after another
    python bench/codec.py --plot                       # redraw the plot from the CSV; measures nothing

GB = 1e9 bytes of bf16 input, in both directions. A round takes every contender once, one after another, so that what
else the machine does falls on all of them; a sample is the mean of enough calls for some milliseconds. `/memcpy` is a
contender's time over that of `torch.Tensor.copy_` (one thread, input to output), measured right before it. `#wrong`
counts the values whose bits did not come back. zipccl's frames and outputs are the caller's, as its interface wants
it; the other compressors return new memory, as theirs do (blosc2 decodes into the caller's).
"""

from __future__ import annotations

import argparse
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from report import (
    RESULTS,
    Row,
    expect,
    measurement,
    package_version,
    percentiles,
    print_head,
    print_table,
    read_csv,
    write_csv,
)

from zipccl_core.codec.exponent import ExponentCodec

MB = 1_000_000
SLOW_S = 0.1
"""Calls that take longer are measured in a few of the rounds only."""


class Contender(ABC):
    """One way to encode and decode, on memory that is there before the clock starts."""

    name: ClassVar[str]
    package: ClassVar[str] = ""
    """What must be importable."""
    one_thread_only: ClassVar[bool] = False
    most_nbytes: ClassVar[int | None] = None

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        self.values, self.out, self.threads = values, out, threads
        self.raw: Any = values.view(torch.uint8).numpy()
        self.label = self.name

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """What must happen before every encoding and is not timed."""

    @abstractmethod
    def encode(self) -> None: ...

    @abstractmethod
    def decode(self) -> None: ...

    @property
    @abstractmethod
    def wire_nbytes(self) -> int: ...

    def decoded(self) -> torch.Tensor:
        """The values that came back, as int16."""
        return self.out.view(torch.int16)


class Memcpy(Contender):
    """The bound: as many bytes read as there are, and written."""

    name = "memcpy"
    one_thread_only = True

    def encode(self) -> None:
        self.out.copy_(self.values)

    decode = encode

    @property
    def wire_nbytes(self) -> int:
        return self.values.nbytes


class ZipCCL(Contender):
    name = "zipccl"
    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        super().__init__(values, out, threads)
        self.codec = ExponentCodec(threads=threads, **self.fields)
        layout = self.codec.layout(values.numel(), values.dtype)
        self.frame_buffer = torch.empty(layout.frame_nbytes, dtype=torch.uint8)

    def encode(self) -> None:
        self.frame = self.codec.write(self.values, self.frame_buffer)

    def decode(self) -> None:
        self.codec.read(self.frame, self.out)

    @property
    def wire_nbytes(self) -> int:
        return self.frame.header.frame_nbytes


class ZipCCLChecksum(ZipCCL):
    name = "zipccl crc32c"
    fields: ClassVar[dict[str, Any]] = {"checksum": "crc32c"}


class ZipCCLReference(ZipCCL):
    name = "zipccl reference"
    fields: ClassVar[dict[str, Any]] = {"kernels": "reference"}
    one_thread_only = True
    most_nbytes = MB


class Peer(Contender):
    """A compressor that returns bytes."""

    frame: Any
    back: Any

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        super().__init__(values, out, threads)
        self.label = f"{self.name} {package_version(self.package)}"

    @property
    def wire_nbytes(self) -> int:
        return len(self.frame)

    def decoded(self) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(self.back, np.int16).copy())


class ZipNN(Peer):
    """Bytes of bf16, as its README has it. It reorders its *input* in place, which is restored before every call."""

    name = package = "zipnn"

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        super().__init__(values, out, threads)
        module = importlib.import_module("zipnn")
        self.zipnn = module.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=threads)
        self.input = bytearray(self.raw.nbytes)

    def prepare(self) -> None:
        self.input[:] = memoryview(self.raw)

    def encode(self) -> None:
        self.frame = self.zipnn.compress(self.input)

    def decode(self) -> None:
        self.back = self.zipnn.decompress(self.frame)


class Zstd(Peer):
    """Level 1 on the words as they are; its threads only compress."""

    name, package = "zstd-1", "zstandard"

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        super().__init__(values, out, threads)
        module = importlib.import_module("zstandard")
        self.compressor = module.ZstdCompressor(level=1, threads=threads if threads > 1 else 0)
        self.decompressor = module.ZstdDecompressor()

    def encode(self) -> None:
        self.frame = self.compressor.compress(self.raw)

    def decode(self) -> None:
        self.back = self.decompressor.decompress(self.frame)


class Lz4(Peer):
    """One block, fast mode."""

    name = package = "lz4"
    one_thread_only = True

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        super().__init__(values, out, threads)
        self.block = importlib.import_module("lz4.block")

    def encode(self) -> None:
        self.frame = self.block.compress(self.raw)

    def decode(self) -> None:
        self.back = self.block.decompress(self.frame)


class Blosc2(Peer):
    """Bytes of the words apart (shuffle), then zstd level 1: the usual choice for bf16 of these libraries."""

    name, package = "blosc2", "blosc2"

    def __init__(self, values: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        super().__init__(values, out, threads)
        self.blosc2 = importlib.import_module("blosc2")
        filters, codec = [self.blosc2.Filter.SHUFFLE], self.blosc2.Codec.ZSTD
        self.parameters = {"codec": codec, "clevel": 1, "filters": filters, "typesize": 2, "nthreads": threads}
        self.label = f"blosc2 shuffle+zstd-1 {package_version('blosc2')}"

    def encode(self) -> None:
        self.frame = self.blosc2.compress2(self.raw, **self.parameters)

    def decode(self) -> None:
        self.blosc2.decompress2(self.frame, dst=self.out.view(torch.uint8).numpy(), nthreads=self.threads)

    def decoded(self) -> torch.Tensor:
        return Contender.decoded(self)


CONTENDERS: tuple[type[Contender], ...] = (ZipCCL, ZipCCLChecksum, ZipCCLReference, ZipNN, Blosc2, Zstd, Lz4)


class Timed:
    """The samples of one contender, in seconds a call."""

    def __init__(self, contender: Contender, rounds: int, sample_s: float) -> None:
        self.contender = contender
        self.samples: dict[str, list[float]] = {"encode": [], "decode": []}
        self.over_memcpy: dict[str, list[float]] = {"encode": [], "decode": []}
        self._once()  # the first touch of all memory
        self.n_wrong = self._count_wrong()
        calls_s = self._once()
        self.is_slow = calls_s > 2 * SLOW_S
        self.n_calls = 1 if self.is_slow else max(2, min(64, round(2 * sample_s / calls_s)))
        self.stride = max(1, rounds // 5) if self.is_slow else 1

    def _once(self) -> float:
        self.contender.prepare()
        return _time(self.contender.encode) + _time(self.contender.decode)

    def _count_wrong(self) -> int:
        return int((self.contender.decoded() != self.contender.values.view(torch.int16)).sum())

    def sample(self, direction: str) -> float:
        """Seconds a call, the mean of a few; a first one, in the caches as they were left, does not count."""
        call = self.contender.encode if direction == "encode" else self.contender.decode
        total = 0.0
        for number in range(-1 if not self.is_slow else 0, self.n_calls):
            if direction == "encode":
                self.contender.prepare()
            seconds = _time(call)
            total += seconds if number >= 0 else 0.0
        self.samples[direction].append(total / self.n_calls)
        return self.samples[direction][-1]

    def check(self) -> None:
        """Decodes once more into memory that holds something else, and counts."""
        self.contender.out.zero_()
        self._once()
        self.n_wrong += self._count_wrong()


def _time(call: Callable[[], None]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) * 1e-9


def gaussian(nbytes: int) -> torch.Tensor:
    """Seeded normal values of sigma 0.02, which is what weights look like."""
    generator, values = torch.Generator().manual_seed(0), torch.empty(nbytes // 2, dtype=torch.bfloat16)
    for begin in range(0, values.numel(), 1 << 22):
        part = values[begin : begin + (1 << 22)]
        part.copy_(torch.randn(part.numel(), generator=generator) * 0.02)
    return values


def payload(path: Path) -> torch.Tensor:
    """All bf16 values of a file, in the order of the names."""
    from safetensors.torch import load_file

    tensors = [tensor.reshape(-1) for _, tensor in sorted(load_file(path).items()) if tensor.dtype == torch.bfloat16]
    if not tensors:
        raise SystemExit(f"{path} has no bf16 tensors")
    return torch.cat(tensors)


def contenders(values: torch.Tensor, out: torch.Tensor, threads: list[int], chosen: list[str]) -> Iterator[Contender]:
    """What can be measured here: importable, chosen, and not too slow for so many values."""
    for kind in CONTENDERS:
        if not _importable(kind) or not any(name in kind.name for name in chosen):
            continue
        if kind.most_nbytes is not None and values.nbytes > kind.most_nbytes:
            continue
        for n_threads in [1] if kind.one_thread_only else threads:
            yield kind(values, out, n_threads)


def _importable(kind: type[Contender]) -> bool:
    try:
        return not kind.package or importlib.import_module(kind.package) is not None
    except ImportError:
        return False


def measure(values: torch.Tensor, threads: list[int], rounds: int, sample_s: float, chosen: list[str]) -> list[Timed]:
    """Interleaved rounds of all contenders on one payload, each sample behind one of memcpy."""
    out = torch.empty_like(values)
    memcpy = Timed(Memcpy(values, out, 1), rounds, sample_s)
    timed = [Timed(contender, rounds, sample_s) for contender in contenders(values, out, threads, chosen)]
    for number in range(rounds):
        for item in timed:
            if number % item.stride == 0:
                for direction, over_memcpy in item.over_memcpy.items():
                    memcpy_s = memcpy.sample(direction)
                    over_memcpy.append(item.sample(direction) / memcpy_s)
    for item in timed:
        item.check()
    memcpy.over_memcpy = {direction: [1.0] for direction in memcpy.samples}
    return [memcpy, *timed]


def rows_of(data: str, timed: list[Timed]) -> Iterator[Row]:
    for item in timed:
        contender, nbytes = item.contender, item.contender.values.nbytes
        key = {"data": data, "nbytes": nbytes, "codec": contender.label, "threads": contender.threads}
        bits = contender.wire_nbytes * 8 / contender.values.numel()
        for direction, samples in item.samples.items():
            for metric in (
                measurement("throughput", "GB/s", [nbytes / seconds / 1e9 for seconds in samples]),
                measurement("time_over_memcpy", "ratio", item.over_memcpy[direction]),
                measurement("size", "bits/value", [bits]),
            ):
                yield {**key, "direction": direction, **metric, "rounds": len(samples), "wrong": item.n_wrong}


COLUMNS = {
    "size": 10,
    "codec": -30,
    "threads": 7,
    "bits": 7,
    "ratio": 6,
    "enc us": 10,
    "GB/s": 7,
    "p20..p80": -13,
    "/memcpy": 8,
    "dec us": 10,
    "GB/s ": 7,
    "p20..p80 ": -13,
    "/memcpy ": 8,
    "#wrong": 7,
}


def table_of(timed: list[Timed]) -> Iterator[list[object]]:
    for item in timed:
        contender, nbytes = item.contender, item.contender.values.nbytes
        bits = contender.wire_nbytes * 8 / contender.values.numel()
        line: list[object] = [nbytes, contender.label, contender.threads, f"{bits:.3f}", f"{16 / bits:.3f}"]
        for direction, samples in item.samples.items():
            low, middle, high = percentiles([nbytes / seconds / 1e9 for seconds in samples])
            over = percentiles(item.over_memcpy[direction])[1]
            line += [f"{nbytes / middle / 1e3:.1f}", f"{middle:.2f}", f"{low:.2f}..{high:.2f}", f"{over:.2f}"]
        yield [*line, item.n_wrong]


def print_expectations(timed: list[Timed]) -> None:
    """On 16 MB, one thread."""
    by_name = {item.contender.name: item for item in timed if item.contender.threads == 1}
    if "zipccl" not in by_name:
        return
    ours = by_name["zipccl"]
    for direction, ratios in ours.over_memcpy.items():
        middle = percentiles(ratios)[1]
        expect(middle <= 1.6, f"{direction} within 1.6 times memcpy's time (16 MB, 1 thread), measured {middle:.2f}")
    if "zipnn" in by_name:
        theirs = percentiles(by_name["zipnn"].samples["encode"])[1]
        faster = theirs / percentiles(ours.samples["encode"])[1]
        expect(faster > 10, f"encode more than 10 times as fast as zipnn (16 MB, 1 thread), measured {faster:.1f}")


def plot(source: Path, target: Path) -> None:
    """Draws the throughputs of a CSV: a panel a payload, a pair of bars a contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = read_csv(source)
    panels = list(dict.fromkeys((row["data"], int(row["nbytes"])) for row in rows))
    tallest = max(len({(row["codec"], row["threads"]) for row in rows if int(row["nbytes"]) == n}) for _, n in panels)
    size = (4.3 * len(panels) + 1.5, 0.36 * tallest + 1.7)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    colors = {"encode": "#1f5f99", "decode": "#8fb3d9"}
    for axis, (data, nbytes) in zip(axes.flat, panels, strict=True):
        mine = [row for row in rows if (row["data"], int(row["nbytes"])) == (data, nbytes)]
        names = list(dict.fromkeys((row["codec"], row["threads"]) for row in mine))
        bits = {(row["codec"], row["threads"]): float(row["p50"]) for row in mine if row["metric"] == "size"}
        for row in mine:
            if row["metric"] != "throughput":
                continue
            low, middle, high = (float(row[p]) for p in ("p20", "p50", "p80"))
            place = names.index((row["codec"], row["threads"])) + (0.2 if row["direction"] == "decode" else -0.2)
            error = [[middle - low], [high - middle]]
            axis.barh(place, middle, 0.38, xerr=error, color=colors[row["direction"]], error_kw={"lw": 0.8})
            axis.text(high * 1.06, place, f"{middle:.3g}", va="center", fontsize=7)
        labels = [f"{name}, {n} thread{'s' if n != '1' else ''}\n{bits[name, n]:.2f} bits" for name, n in names]
        axis.set_yticks(range(len(names)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.margins(x=0.14)
        axis.set_title(f"{data}, {nbytes / MB:.4g} MB", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("GB/s of bf16 (logarithmic), median; whiskers p20 to p80", fontsize=9)
    handles = [Patch(color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, metadata={"Software": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 256], metavar="MB", help="of Gaussian data")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=25, help="those of slow contenders are a fifth of it at most")
    parser.add_argument("--sample-ms", type=float, default=3.0, help="calls are repeated for so long in a sample")
    parser.add_argument("--codecs", nargs="+", default=[""], metavar="NAME", help="contenders with this in the name")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="safetensors files instead")
    parser.add_argument("--quick", action="store_true", help="1 and 16 MB, 5 rounds")
    parser.add_argument("--out", type=Path, default=RESULTS / "codec.csv", metavar="CSV")
    parser.add_argument("--plot", action="store_true", help="only redraw the plot beside the CSV, from the CSV")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.out, arguments.out.with_suffix(".png"))
        return

    torch.set_num_threads(1)
    sizes, rounds = ([1, 16], 5) if arguments.quick else (arguments.sizes, arguments.rounds)
    missing = [kind.package for kind in CONTENDERS if not _importable(kind)]
    print_head(
        "codec, bf16; time, GB/s and ratio to memcpy are medians of interleaved rounds",
        f"rounds: {rounds}; not installed: {', '.join(missing) or 'none of the compared packages'}",
    )
    makers: list[tuple[str, Callable[[], torch.Tensor]]]
    if arguments.data:
        makers = [(path.stem, partial(payload, path)) for path in arguments.data]
    else:
        makers = [("gaussian", partial(gaussian, int(mb * MB) // 2 * 2)) for mb in sizes]
    rows: list[Row] = []
    for data, make in makers:
        timed = measure(make(), arguments.threads, rounds, arguments.sample_ms / 1e3, arguments.codecs)
        print(f"# {data}")
        print_table(COLUMNS, table_of(timed))
        rows += rows_of(data, timed)
        if timed[0].contender.values.nbytes == 16 * MB:
            print_expectations(timed)
    write_csv(arguments.out, rows)
    if any(row["wrong"] for row in rows):
        raise SystemExit("a round trip changed bits")


if __name__ == "__main__":
    main()
