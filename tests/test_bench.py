"""The benchmarks still run: each of them once, on little, in a process of its own."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MACHINE = {"device", "cores", "kernels", "python", "torch", "version", "commit", "date"}


def bench(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, ROOT / "bench" / script, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert result.returncode == 0, f"{script}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() >= MACHINE
    assert str(ROOT) not in path.read_text()
    return rows


def test_codec_measures_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "codec.csv"
    arguments = ("--sizes", "0.1", "0.2", "--threads", "1", "--rounds", "2", "--sample-ms", "0.1", "--out", out)
    printed = bench("codec.py", *arguments)
    rows = read(out)
    assert {row["metric"] for row in rows} == {"throughput", "time_over_memcpy", "size"}
    assert {row["nbytes"] for row in rows} == {"100000", "200000"}
    assert {"memcpy", "zipccl", "zipccl crc32c", "zipccl reference"} <= {row["codec"] for row in rows}
    assert all(row["wrong"] == "0" for row in rows)
    assert all(float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) for row in rows)
    bits = {float(row["p50"]) for row in rows if row["codec"] == "zipccl" and row["metric"] == "size"}
    assert all(11.1 < value < 11.5 for value in bits)
    assert "#wrong" in printed

    pytest.importorskip("matplotlib")
    bench("codec.py", "--plot", "--out", out)
    assert (tmp_path / "codec.png").read_bytes().startswith(b"\x89PNG")


def test_codec_and_ratio_take_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    generator = torch.Generator().manual_seed(0)
    bell = (torch.randn(64, 1024, generator=generator) * 0.02).bfloat16()
    tensors = {"bell": bell, "mostly zeros": torch.nn.functional.dropout(bell, 0.9), "other dtype": bell.float()}
    safetensors.save_file(tensors, tmp_path / "made.safetensors")

    out = tmp_path / "codec.csv"
    bench("codec.py", "--data", tmp_path / "made.safetensors", "--codecs", "zipccl", "--rounds", "1", "--out", out)
    rows = read(out)
    assert {(row["data"], row["nbytes"]) for row in rows} == {("made", str(2 * bell.nbytes))}

    out = tmp_path / "ratio.csv"
    printed = bench("ratio.py", tmp_path, "--out", out)
    by_name = {row["tensor"]: row for row in read(out)}
    assert by_name.keys() == {"bell", "mostly zeros", "total"}
    assert "1 tensors left out" in printed
    assert all(row["wrong"] == "0" for row in by_name.values())
    assert 11.1 < float(by_name["bell"]["bits_per_value"]) < 11.4
    assert float(by_name["bell"]["mode1_blocks_share"]) == 0
    assert float(by_name["mostly zeros"]["mode1_blocks_share"]) == 1
    total = (float(by_name["bell"]["bits_per_value"]) + float(by_name["mostly zeros"]["bits_per_value"])) / 2
    assert float(by_name["total"]["bits_per_value"]) == pytest.approx(total, abs=1e-3)


def test_overhead(tmp_path: Path) -> None:
    out = tmp_path / "overhead.csv"
    printed = bench("overhead.py", "--rounds", "1", "--calls", "2", "--out", out)
    rows = read(out)
    assert {row["group"] for row in rows} == {"gloo", "zipccl native", "zipccl always"}
    assert {row["mode"] for row in rows} == {"sync", "async"}
    assert len({row["operation"] for row in rows}) == 5
    assert "the native path below" in printed


def test_theory_measures_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"made": torch.ones(2048, dtype=torch.bfloat16)}, tmp_path / "made.safetensors")
    assert "made" in bench("theory.py", tmp_path)


@pytest.mark.parametrize("name", ["codec.csv", "overhead.csv", "ratio.csv"])
def test_committed_results_have_the_columns(name: str) -> None:
    rows = read(ROOT / "bench" / "results" / name)
    if name != "ratio.csv":
        assert {"metric", "unit", "p20", "p50", "p80"} <= rows[0].keys()
    assert all(row.get("wrong", "0") == "0" for row in rows)


def shaped() -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import network
    finally:
        sys.path.remove(str(ROOT / "bench"))
    reason = network.missing()
    if reason:
        pytest.skip(reason)


def test_links(tmp_path: Path) -> None:
    """All plans over a shaped link: the same bits, fewer bytes, and a table of regret."""
    shaped()
    out = tmp_path / "links.csv"
    arguments = ("--ranks", "2", "--rates", "1000", "--sizes", "16", "--iterations", "2", "--output", out)
    printed = bench("links.py", *arguments)
    rows = read(out)
    assert len(rows) == 5 * 5
    assert all(row["bits"] == "equal" for row in rows)
    sent = {(row["operation"], row["plan"]): float(row["sent_mib"]) for row in rows}
    for operation in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"):
        assert sent[operation, "pipelined"] < 0.8 * sent[operation, "raw"]
    assert "over native" in printed

    pytest.importorskip("matplotlib")
    bench("links.py", "--plot", "--output", out)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_links_of_a_late_rank_and_of_a_slow_codec(tmp_path: Path) -> None:
    shaped()
    out = tmp_path / "late.csv"
    bench("link_late.py", "--mib", "0.5", "--iterations", "1", "--turns", "1", "--output", out)
    assert [row["late_ms"] for row in read(out)] == ["0.0", "100.0"]
    out = tmp_path / "knob.csv"
    bench("link_knob.py", "--mib", "1", "--ratios", "1", "50", "--iterations", "1", "--output", out)
    assert [row["codec_to_wire"] for row in read(out)] == ["1.0", "50.0"]


def test_training_steps(tmp_path: Path) -> None:
    shaped()
    pytest.importorskip("deepspeed")
    out = tmp_path / "train.csv"
    small = ("--hidden", "64", "--layers", "1", "--steps", "1", "--turns", "1")
    bench("train.py", *small, "--output", out)
    assert [(row["model"], row["losses"]) for row in read(out)] == [("zero3", "equal"), ("moe", "equal")]


def test_a_bench_that_needs_root_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    for script in ("links.py", "link_late.py", "link_knob.py", "train.py"):
        command = [sys.executable, ROOT / "bench" / script]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)
        assert result.returncode == 0, result.stderr
        assert "skipped: there is no `ip`" in result.stdout
