"""Trains a few models twice on two processes, natively and with ZipCCL: the losses are the same, the bytes are fewer.

    make demo            (or: python examples/demo.py --steps 10)

The configurations are those of examples/configs, but for one key: `"reduction": "gloo"` repeats the order and roundings
of native gloo's additions, so that gradients, losses and weights must be equal bit for bit on any number of ranks. The
default, `"fp32"`, adds in fp32 and rounds once: deterministic and more accurate, so not always equal to gloo.

Exit code: 0 if everything is equal and something was compressed, 1 if not, 2 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
RANKS = 2
TIMEOUT_S = 200


class Configuration(NamedTuple):
    title: str
    script: str
    config: str


CONFIGURATIONS = (
    Configuration("Llama, ZeRO-3", "deepspeed_llama.py", "llama_zero3.json"),
    Configuration("Llama, ZeRO-1", "deepspeed_llama.py", "llama_zero1.json"),
    Configuration("Qwen3-MoE, ZeRO-2", "deepspeed_moe.py", "moe_zero2.json"),
)


class Run(NamedTuple):
    """What one training run reported.

    Attributes:
        losses: one list a rank, of hexadecimal floats: bits, not roundings.
        weights: a hash of the final weights for each rank.
        counters: statistics by operation and counter, summed over the ranks.
        step_s: median of rank 0's steps.
    """

    losses: list[list[str]]
    weights: list[str]
    counters: dict[str, dict[str, float]]
    step_s: float


class RunError(Exception):
    """A training run failed; the text is what it printed."""


def train(configuration: Configuration, steps: int, native: bool, on_step: Callable[[], None]) -> Run:
    """Runs an example under torchrun; calls `on_step` after each of its steps.

    Raises:
        RunError: it ended with an error or took longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((EXAMPLES / "configs" / configuration.config).read_text())
        config["zipccl"]["reduction"] = "gloo"
        config_file, output_file = Path(folder, "config.json"), Path(folder, "output.jsonl")
        config_file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += [str(EXAMPLES / configuration.script), f"--deepspeed_config={config_file}", f"--steps={steps}"]
        command += [f"--output={output_file}", *(["--native"] if native else [])]
        _run(command, on_step)
        *records, summary = [json.loads(line) for line in output_file.read_text().splitlines()]

    counters: dict[str, dict[str, float]] = {}
    for name, value in summary["statistics"].items():
        _, operation, counter = name.split("/")
        counters.setdefault(operation, {})[counter] = value
    step_s = statistics.median(record["seconds"] for record in records)
    return Run(summary["losses"], summary["weights"], counters, step_s)


def _run(command: list[str], on_step: Callable[[], None]) -> None:
    """Runs a command to its end; what it prints is shown only where it fails."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // RANKS)))
    environ = {**os.environ, "OMP_NUM_THREADS": threads}
    pipe, printed = subprocess.PIPE, []
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        timer = threading.Timer(TIMEOUT_S, process.terminate)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(line)
                if line.startswith("step "):
                    on_step()
            process.wait()
        finally:
            timer.cancel()
            process.terminate()
    if process.returncode:
        raise RunError("".join(printed))


def compare(configuration: Configuration, steps: int, console: Console, progress: Progress | None) -> tuple[Run, Run]:
    """The native run and the one with ZipCCL."""

    def run(native: bool) -> Run:
        name = f"{configuration.title}, {'native' if native else 'zipccl'}"
        if progress:
            task = progress.add_task(name, total=steps)
            return train(configuration, steps, native, lambda: progress.advance(task))
        start = time.perf_counter()
        result = train(configuration, steps, native, lambda: None)
        console.print(f"{name}: {steps} steps, {time.perf_counter() - start:.0f} s with start-up")
        return result

    return run(native=True), run(native=False)


def loss_table(native: Run, zipccl: Run) -> Table:
    """Rank 0's losses, as decimals and exactly; "equal" looks at all ranks."""
    table = Table(
        "step",
        "loss native",
        "exactly",
        "loss zipccl",
        "exactly",
        "equal",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    native_steps, zipccl_steps = zip(*native.losses, strict=True), zip(*zipccl.losses, strict=True)
    for step, (wanted, came) in enumerate(zip(native_steps, zipccl_steps, strict=True), start=1):
        losses = [text for loss in (wanted[0], came[0]) for text in (f"{float.fromhex(loss):.6f}", loss)]
        table.add_row(str(step), *losses, yes_or_no(wanted == came))
    return table


def operation_table(run: Run) -> Table:
    """What the ranks together sent, by operation."""
    names = ("native\nMB", "raw\nMB", "wire\nMB", "ratio", "escapes\n(1000s)")
    head = ("operation", "calls", "native\ncalls", *names, "encode\ns", "decode\ns")
    table = Table(*head, box=None, pad_edge=False, collapse_padding=True)  # narrow enough for a terminal of 80 columns
    for column in table.columns[1:]:
        column.justify = "right"
    for operation, c in run.counters.items():
        calls = (f"{c['calls']:.0f}", f"{c['native_calls']:.0f}", f"{c['native_nbytes'] / 1e6:.1f}")
        ratio = f"{c['raw_nbytes'] / c['wire_nbytes']:.3f}" if c["wire_nbytes"] else "-"
        sizes = (f"{c['raw_nbytes'] / 1e6:.1f}", f"{c['wire_nbytes'] / 1e6:.1f}", ratio, f"{c['escapes'] / 1e3:.0f}")
        table.add_row(operation, *calls, *sizes, f"{c['encode_s']:.3f}", f"{c['decode_s']:.3f}")
    return table


def yes_or_no(good: bool) -> str:
    return "[green]yes[/]" if good else "[bold red]NO[/]"


def verdict(native_runs: list[Run], zipccl_runs: list[Run], console: Console) -> int:
    """Prints the last line; returns the exit code."""

    def total(counter: str) -> float:
        return sum(counters[counter] for run in zipccl_runs for counters in run.counters.values())

    if total("frames") == total("raw_frames"):
        console.print(
            "[bold red]No frame was compressed.[/] The section takes effect where zipccl is installed: pip install ."
        )
        return 1
    equal = [run[:2] for run in native_runs] == [run[:2] for run in zipccl_runs]
    fewer = 100 * (1 - total("wire_nbytes") / total("raw_nbytes"))
    console.print(
        f"[bold]{fewer:.1f} % fewer bytes in compressed calls; all losses and weights equal: {yes_or_no(equal)}"
    )
    return 0 if equal else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps

    console = Console(highlight=False)
    progress = None
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
        progress = Progress("{task.description}", *columns, console=console)
    else:
        console.width = 120  # what reads a pipe has no width; tables need this much

    start = time.perf_counter()
    console.print(f'Each model trains twice on {RANKS} processes: natively, and with a "zipccl" section in its JSON.')
    console.print('("reduction": "gloo" repeats native additions bit for bit; the default, "fp32", rounds once.)\n')
    native_runs, zipccl_runs = [], []
    with progress or nullcontext():
        for configuration in CONFIGURATIONS:
            try:
                native, zipccl = compare(configuration, steps, console, progress)
            except RunError as error:
                console.print(f"{configuration.title} failed:\n{error}", markup=False)
                return 2
            native_runs.append(native)
            zipccl_runs.append(zipccl)

    for configuration, native, zipccl in zip(CONFIGURATIONS, native_runs, zipccl_runs, strict=True):
        console.print(f"\n[bold]{configuration.title}[/]\n", loss_table(native, zipccl), sep="")
        console.print(f"final weights equal: {yes_or_no(native.weights == zipccl.weights)}\n")
        console.print(operation_table(zipccl))
        console.print(f"median step: native {native.step_s * 1e3:.0f} ms, zipccl {zipccl.step_s * 1e3:.0f} ms")

    console.print("\nCounters are sums over ranks. Small calls, and those of dtypes without a codec, are native.")
    console.print("Raw MB is what the compressed calls would have sent natively, wire MB what they sent.")
    console.print("The ranks share one machine and its memory, so that step times say nothing about a network.")
    console.print(f"Took {time.perf_counter() - start:.0f} s.\n")
    return verdict(native_runs, zipccl_runs, console)


if __name__ == "__main__":
    sys.exit(main())
