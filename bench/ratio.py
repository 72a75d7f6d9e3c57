"""Bits a value of real tensors, all overhead counted, beside what entropy and theory say.

    python bench/ratio.py                              # the sample in tests/data
    python bench/ratio.py run/ step7.safetensors --out ratio.csv

Every bf16 tensor of the safetensors files becomes one frame and one line. `bits` is the whole frame (header, offsets,
meta, planes, escapes) over the number of values. Nothing is timed, so that the output is the same everywhere.

`H(e)+8` is the entropy of the tensor's exponents and the 8 bits of sign and mantissa: the floor for a code of single
exponents with one table a tensor; a code that adapts from block to block, as ours does, can get below it. `H(word)` is
the entropy of whole words, for information. `theory` is what normally distributed values of the tensor's sigma (by its
log-moment) would take, with its fraction of zeros. `escapes` counts values, `mode 1` blocks with a code for zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from report import ROOT, Row, print_head, print_table, write_csv
from safetensors.torch import load_file

from zipccl_core.codec import gaussian
from zipccl_core.codec.base import compress, decompress
from zipccl_core.codec.exponent import ExponentCodec
from zipccl_core.codec.frame import HEADER_NBYTES, Header
from zipccl_core.kernels import sections

SAMPLE = ROOT / "tests" / "data"


class Counted(NamedTuple):
    """What is counted on one tensor, or on all of a file: bits a value, and shares in 0..1."""

    name: str
    numel: int
    n_blocks: int
    bits: float
    exponent_bits: float
    word_bits: float
    theory_bits: float
    zeros: float
    escapes: float
    mode1: float
    wrong: int


def entropy(counts: np.ndarray) -> float:
    """In bits, of the distribution that the counts give."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def theory(exponent_counts: np.ndarray, zeros: float) -> float:
    """Bits a value for normal values of one sigma and a fraction of zeros, in the better of the format's two modes."""
    counts = exponent_counts * (np.arange(256) > 0)
    overhead = gaussian.WIRE_OVERHEAD_BITS
    if counts.sum() == 0:
        return 11.0 + overhead
    sigma = gaussian.sigma_from_log_moment(float(counts @ np.arange(256) / counts.sum()) - gaussian.BF16.bias)
    seven = gaussian.expected_bits(sigma, zeros=zeros, overhead_bits=overhead)
    six = gaussian.expected_bits(sigma, size=6, zeros=zeros, zero_code=True, overhead_bits=overhead)
    return min(seven, six)


def count(name: str, tensor: torch.Tensor, codec: ExponentCodec) -> Counted:
    """Encodes a tensor, decodes it again, and counts."""
    values = tensor.reshape(-1).view(torch.int16)
    words = values.numpy().view(np.uint16)
    frame = compress(tensor, codec)
    wrong = int((decompress(frame).view(torch.int16) != values).sum())
    header = Header.read(frame)
    n_blocks, meta, _ = sections(tensor.numel())
    mode1 = 0.0 if header.raw else float((frame[HEADER_NBYTES + meta :][: 2 * n_blocks].view(-1, 2)[:, 1] == 1).sum())
    by_word = np.bincount(words, minlength=1 << 16)
    by_exponent = by_word.reshape(2, 256, 128).sum(axis=(0, 2))
    zeros = float(by_exponent[0] / words.size)
    return Counted(
        name=name,
        numel=tensor.numel(),
        n_blocks=n_blocks,
        bits=frame.numel() * 8 / tensor.numel(),
        exponent_bits=8 + entropy(by_exponent),
        word_bits=entropy(by_word),
        theory_bits=theory(by_exponent, zeros),
        zeros=zeros,
        escapes=0.0 if header.raw else header.dynamic_nbytes / tensor.numel(),
        mode1=mode1 / n_blocks,
        wrong=wrong,
    )


def total(items: Sequence[Counted]) -> Counted:
    """All tensors of a file: means over values, or over blocks."""
    numel, n_blocks = sum(item.numel for item in items), sum(item.n_blocks for item in items)

    def mean(field: str) -> float:
        return float(sum(getattr(item, field) * item.numel for item in items) / numel)

    fields = ("bits", "exponent_bits", "word_bits", "theory_bits", "zeros", "escapes")
    mode1 = sum(item.mode1 * item.n_blocks for item in items) / n_blocks
    wrong = sum(item.wrong for item in items)
    return Counted("total", numel, n_blocks, mode1=mode1, wrong=wrong, **{field: mean(field) for field in fields})


def files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


COLUMNS = {
    "file": -22,
    "tensor": -28,
    "values": 9,
    "bits": 7,
    "ratio": 6,
    "H(e)+8": 7,
    "H(word)": 7,
    "theory": 7,
    "zeros": 6,
    "escapes": 7,
    "mode 1": 6,
    "#wrong": 6,
}


def line_of(file: str, item: Counted) -> list[object]:
    bits = (item.exponent_bits, item.word_bits, item.theory_bits)
    shares = (f"{item.zeros:.3f}", f"{item.escapes:.4f}", f"{item.mode1:.3f}", item.wrong)
    return [
        file,
        item.name,
        item.numel,
        f"{item.bits:.3f}",
        f"{16 / item.bits:.3f}",
        *(f"{b:.3f}" for b in bits),
        *shares,
    ]


def row_of(file: str, item: Counted) -> Row:
    return {
        "file": file,
        "tensor": item.name,
        "values": item.numel,
        "codec": "exponent",
        "bits_per_value": f"{item.bits:.4f}",
        "ratio": f"{16 / item.bits:.4f}",
        "exponent_entropy_plus_8_bits": f"{item.exponent_bits:.4f}",
        "word_entropy_bits": f"{item.word_bits:.4f}",
        "theory_bits": f"{item.theory_bits:.4f}",
        "zeros_share": f"{item.zeros:.5f}",
        "escapes_share": f"{item.escapes:.5f}",
        "mode1_blocks_share": f"{item.mode1:.5f}",
        "wrong": item.wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[SAMPLE], metavar="PATH", help="safetensors or folders")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the table into this file")
    arguments = parser.parse_args()

    codec = ExponentCodec()
    print_head("bits a value of bf16 tensors, each in one frame")
    rows: list[Row] = []
    for path in files(arguments.paths):
        tensors = sorted(load_file(path).items())
        wanted = {name: t for name, t in tensors if t.dtype == torch.bfloat16 and t.numel()}
        if len(wanted) < len(tensors):
            print(f"# {path.name}: {len(tensors) - len(wanted)} tensors left out, which are empty or not bf16")
        if wanted:
            counted = [count(name, tensor, codec) for name, tensor in wanted.items()]
            counted.append(total(counted))
            print_table(COLUMNS, (line_of(path.name, item) for item in counted))
            rows += (row_of(path.name, item) for item in counted)
    if not rows:
        raise SystemExit("no bf16 tensors found")
    if arguments.out:
        write_csv(arguments.out, rows)
    if any(row["wrong"] for row in rows):
        raise SystemExit("a round trip changed bits")


if __name__ == "__main__":
    main()
