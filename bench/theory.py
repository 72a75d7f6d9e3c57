"""Prints the theory's numbers, and holds them against tensors: exponents predicted by sigma, exponents measured.

    python bench/theory.py                                # the sample in tests/data
    python bench/theory.py run/*.safetensors --plot theory.png

Every bfloat16 tensor of the safetensors files becomes a line of the table and a panel of the plot; values beyond the
last full block of 1024 are left out. Everything is counted or computed, nothing is timed, so that the output is the
same everywhere.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from zipccl_core.codec import gaussian
from zipccl_core.codec.gaussian import BF16, FORMATS

BLOCK = 1024
SAMPLE = Path(__file__).parent.parent / "tests" / "data"
OUTLIERS, OUTLIER_SIGMAS = 1e-4, 1000.0


def octave(function: Callable[[float], float], low: float = 4.0, steps: int = 1024) -> tuple[float, float, float]:
    """Least, mean and greatest value of `function(sigma)` over the octave of sigma from `low` on."""
    values = [function(low * 2.0 ** (i / steps)) for i in range(steps)]
    return min(values), math.fsum(values) / steps, max(values)


def print_formats() -> None:
    print("# Predicted for normally distributed values; sigma over the octave 4..8; ratio = raw / mean compressed bits")
    print("# 3-bit window of seven, raw exponents as escapes | entropy-coded exponent | entropy of the whole word")
    head = ("format", "coverage", "window bits", "ratio", "H(e) bits", "ratio", "floor bits", "ratio")
    print("{:<14} {:>15} {:>15} {:>6} {:>11} {:>6} {:>11} {:>6}".format(*head))
    for fmt in FORMATS.values():
        cover = octave(partial(gaussian.coverage, fmt=fmt))
        bits = octave(partial(gaussian.expected_bits, fmt=fmt))
        exponent = octave(partial(gaussian.exponent_entropy, fmt=fmt))
        floor = octave(partial(gaussian.entropy_floor, fmt=fmt), steps=8)
        print(
            f"{fmt.name:<14} {cover[0]:>7.4f}..{cover[2]:.4f} {bits[0]:>7.3f}..{bits[2]:.3f} {fmt.bits / bits[1]:>6.3f}"
            f" {exponent[1]:>11.3f} {fmt.bits / (1 + fmt.mantissa_bits + exponent[1]):>6.3f}"
            f" {floor[1]:>11.3f} {fmt.bits / floor[1]:>6.3f}"
        )
    bits = octave(lambda s: gaussian.expected_bits(s, overhead_bits=gaussian.WIRE_OVERHEAD_BITS))
    print(f"# bfloat16 with the wire format's {gaussian.WIRE_OVERHEAD_BITS:.3f} bits of offsets and meta: ", end="")
    print(f"{bits[0]:.3f}..{bits[2]:.3f} bits, {16 / bits[2]:.3f}..{16 / bits[0]:.3f}")


def print_constants() -> None:
    rule, before = gaussian.window_rule(7, BF16.mantissa_bits), gaussian.window_rule(7)
    print("\n# Where the best window of seven begins: 127 + shift + floor(log2(sigma) + offset)")
    print(f"shift {rule.shift}, offset {rule.offset:.4f} in bfloat16, {before.offset:.4f} before rounding;", end=" ")
    print(f"u* = {2.0 ** (before.shift + before.offset - 1):.5f}, peak at u = {math.sqrt(2 * math.log(2) / 3):.3f}")

    mean = -gaussian.MEAN_LOG2_OFFSET - 0.5
    shift = -math.log2(BF16.rounding_factor)
    wave = octave(lambda s: gaussian.log_moment(s) - math.log2(s) - mean - shift)
    print("\n# Mean of floor(log2|x|), octaves, less log2(sigma)")
    print(f"E[log2|X|] {-gaussian.MEAN_LOG2_OFFSET:.4f}, floored {mean:.4f}, in bfloat16 {mean + shift:.4f};", end=" ")
    print(f"periodic term {wave[0]:.1e}..{wave[2]:.1e}")

    def loss(sigma: float, distance: float) -> float:
        start = math.floor(BF16.bias + gaussian.log_moment(sigma) - distance)
        return gaussian.coverage(sigma) - gaussian.coverage(sigma, start=start)

    def differs(sigma: float, distance: float) -> float:
        return float(loss(sigma, distance) > 0.0)

    print(
        "\n# Window at floor(mean exponent - distance): coverage lost against the best window, over an octave of sigma"
    )
    print(f"{'distance':>10} {'sigmas off':>10} {'mean loss':>10} {'worst loss':>10} {'worst bits':>10}")
    for distance in (819 / 256, mean + shift - rule.shift - rule.offset):
        _, average, worst = octave(partial(loss, distance=distance))
        off = octave(partial(differs, distance=distance))[1]
        print(f"{distance:>10.4f} {off:>10.3f} {average:>10.5f} {worst:>10.5f} {8 * worst:>10.4f}")


def print_fragility() -> None:
    """What outliers do to a sigma from the standard deviation and to one from the log-moment, at sigma 0.02."""
    sigma = 0.02
    std = sigma * math.sqrt(1.0 - OUTLIERS + OUTLIERS * OUTLIER_SIGMAS**2)
    log_mean = gaussian.log_moment(sigma) + OUTLIERS * math.log2(OUTLIER_SIGMAS)
    print(f"\n# Normal values of sigma {sigma}, a fraction {OUTLIERS} of them {OUTLIER_SIGMAS:.0f} times larger")
    for name, estimate in (("standard deviation", std), ("log-moment", gaussian.sigma_from_log_moment(log_mean))):
        start = gaussian.window_start(estimate)
        covered = gaussian.coverage(sigma, start=start)
        print(f"sigma by {name}: {estimate:.5f}, window from {start}, coverage {covered:.3f}")


def print_zeros() -> None:
    print("\n# Zeros among normally distributed values: ratio of bfloat16 (mean bits over an octave)")
    print(f"{'zeros':>10} {'mode 0: window of seven':>24} {'mode 1: six and zero':>24}")
    for zeros in (0.0, 0.1, 0.25, 0.5, 0.61, 0.62, 0.75, 0.9):
        seven = octave(partial(gaussian.expected_bits, zeros=zeros), steps=64)[1]
        six = octave(partial(gaussian.expected_bits, size=6, zeros=zeros, zero_code=True), steps=64)[1]
        print(f"{zeros:>10.2f} {16 / seven:>24.3f} {16 / six:>24.3f}")


class Measured:
    """The exponents of one tensor, and the normal distributions that its log-moments predict."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        bits = tensor.flatten().view(torch.int16).numpy().view(np.uint16)
        exponents = ((bits[: bits.size // BLOCK * BLOCK] >> 7) & 255).reshape(-1, BLOCK)
        self.name = name
        self.n_blocks = len(exponents)
        self.by_block = np.stack([np.bincount(block, minlength=256) for block in exponents])
        self.frequency = self.by_block.sum(axis=0) / exponents.size
        self.zeros = float(self.frequency[0])
        self.sigma = self._sigma(self.by_block.sum(axis=0))
        self.block_sigmas = [self._sigma(counts) for counts in self.by_block]

    @staticmethod
    def _sigma(counts: np.ndarray) -> float | None:
        """By the log-moment of what is not zero; None where all is."""
        counts = counts.astype(float) * (np.arange(256) > 0)
        if counts.sum() == 0:
            return None
        return gaussian.sigma_from_log_moment(float(counts @ np.arange(256) / counts.sum()) - BF16.bias)

    @property
    def predicted(self) -> np.ndarray:
        """Frequencies by one sigma and the fraction of zeros."""
        zero = np.arange(256) == 0
        normal = np.array(gaussian.exponent_distribution(self.sigma or 1.0))
        return np.asarray(self.zeros * zero + (1.0 - self.zeros) * normal)

    @property
    def predicted_by_block(self) -> np.ndarray:
        """Frequencies by a sigma for each block and its fraction of zeros."""
        total = np.zeros(256)
        for counts, sigma in zip(self.by_block, self.block_sigmas, strict=True):
            zeros = counts[0] / BLOCK
            total[0] += zeros
            if sigma is not None:
                total += (1.0 - zeros) * np.array(gaussian.exponent_distribution(sigma))
        return total / self.n_blocks

    @staticmethod
    def _covered(counts: np.ndarray, size: int) -> np.ndarray:
        """How many values each window of `size`, by its start, holds; blocks are rows."""
        sums = np.concatenate([np.zeros((len(counts), 1), dtype=np.int64), np.cumsum(counts, axis=1)], axis=1)
        return np.asarray(sums[:, size:] - sums[:, :-size])

    def bits(self) -> dict[str, float]:
        """Bits a value, all overhead but the frame's header counted, by who chooses the window."""
        seven, six = self._covered(self.by_block, 7), self._covered(self.by_block, 6)
        whole = seven.sum(axis=0)
        by_theory = [0 if s is None else gaussian.window_start(s) for s in self.block_sigmas]
        with_zero = six[:, 1:].max(axis=1) + self.by_block[:, 0]
        covered = {
            "one, theory": int(whole[gaussian.window_start(self.sigma or 1.0)]),
            "one, best": int(whole.max()),
            "block, theory": int(seven[np.arange(self.n_blocks), by_theory].sum()),
            "block, best": int(seven.max(axis=1).sum()),
            "and mode 1": int(np.maximum(seven.max(axis=1), with_zero).sum()),
        }
        n = self.n_blocks * BLOCK
        return {name: 11.0 + gaussian.WIRE_OVERHEAD_BITS + 8.0 * (1.0 - c / n) for name, c in covered.items()}

    def spread(self) -> float:
        """How far the sigmas of blocks lie apart, in octaves: from the 5th to the 95th percentile."""
        logs = [math.log2(s) for s in self.block_sigmas if s is not None]
        return float(np.percentile(logs, 95) - np.percentile(logs, 5)) if logs else 0.0


def tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """A seeded normal tensor to compare with, then the bfloat16 tensors of the files, of folders all their files."""
    yield "seeded normal values", (torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    for path in paths:
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            for name, tensor in sorted(load_file(file).items()):
                if tensor.dtype is torch.bfloat16 and tensor.numel() >= BLOCK:
                    yield name, tensor


def print_measured(measured: list[Measured]) -> None:
    columns = list(measured[0].bits())
    print("\n# Measured; TV = total variation distance of measured from predicted frequencies; sigma by log-moment")
    print("# bits a value with offsets and meta; one window for the tensor or one a block, by theory or best of all")
    head = ("tensor", "values", "zeros", "sigma", "spread", "H(e)", "TV one", "TV block")
    print("{:<22} {:>8} {:>6} {:>9} {:>6} {:>6} {:>7} {:>8}".format(*head), *(f"{c:>13}" for c in columns))
    for m in measured:
        p = m.frequency[m.frequency > 0]
        one, block = (np.abs(m.frequency - q).sum() / 2 for q in (m.predicted, m.predicted_by_block))
        print(
            f"{m.name:<22} {m.n_blocks * BLOCK:>8} {m.zeros:>6.3f} {m.sigma or 0.0:>9.2e} {m.spread():>6.2f}"
            f" {-(p * np.log2(p)).sum():>6.3f} {one:>7.3f} {block:>8.3f}",
            *(f"{b:>13.3f}" for b in m.bits().values()),
        )


def plot(measured: list[Measured], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MultipleLocator

    n_rows = math.ceil(len(measured) / 2)
    size = (11.0, 2.5 * n_rows + 0.8)
    figure, axes = plt.subplots(n_rows, 2, figsize=size, squeeze=False, layout="constrained")
    for axis, m in zip(axes.flat, measured, strict=False):
        sigma = m.sigma or 1.0
        start = gaussian.window_start(sigma)
        fields = np.arange(max(start - 8, 1), min(start + 14, 255))
        axis.bar(fields, m.frequency[fields], color="#8fb3d9", width=0.85, label="measured")
        one = {"color": "#b03a2e", "marker": "o", "ms": 3.5, "lw": 1.4, "label": "predicted, one sigma for the tensor"}
        block = {"color": "#1e6b3a", "marker": "s", "ms": 3.0, "lw": 1.2, "label": "predicted, a sigma for each block"}
        axis.plot(fields, m.predicted[fields], "-", **one)
        axis.plot(fields, m.predicted_by_block[fields], "--", **block)
        axis.axvspan(start - 0.5, start + 6.5, color="#f3e3b5", zorder=0, label="window of seven at the tensor's sigma")
        zeros = f", {100 * m.zeros:.0f} % zeros" if m.zeros >= 0.005 else ""
        axis.set_title(f"{m.name} (sigma {sigma:.1e}{zeros})", fontsize=10)
        axis.set_xlim(fields[0] - 0.6, fields[-1] + 0.6)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MultipleLocator(2))
    for axis in list(axes.flat)[len(measured) :]:
        axis.set_axis_off()
    figure.supxlabel("exponent field of bfloat16 (127 is 2^0; zeros are in field 0, not shown)", fontsize=11)
    figure.supylabel("fraction of values", fontsize=11)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[SAMPLE], metavar="PATH", help="safetensors files or folders of them"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw measured and predicted frequencies into this file"
    )
    arguments = parser.parse_args()
    print_formats()
    print_constants()
    print_fragility()
    print_zeros()
    measured = [Measured(name, tensor) for name, tensor in tensors(arguments.paths)]
    print_measured(measured)
    if arguments.plot:
        plot(measured, arguments.plot)


if __name__ == "__main__":
    main()
