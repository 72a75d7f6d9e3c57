"""bench/gpu.py without a GPU: its sections with PyCUDA over the stand-in driver (tests/fakecuda), recorded streams, and
the CPU's clock."""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from fakecuda import harness
from recorded_device import RecordedDevice

from zipccl_core.kernels import compiler, cuda
from zipccl_core.testing import run_ranks

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "bench"))

import gpu
import gpu_cases
import gpu_checks
import gpu_codec
import gpu_path
import gpu_peers
import gpu_ranks
import report
from gpu_codec import Clock, Payload
from gpu_machine import different, gaussian

CPU = torch.device("cpu")
REASON = harness.reason_to_skip()
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
needs_pycuda = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CLOCK = Clock(rounds=2, sample_s=0.0, launches=3)
SMALL = gpu_cases.Extent(large=(70_001,), damaged=97, thread_blocks=(1, 4), reduced=(1, 8193), threads=3, calls=2)


class CpuClock:
    """What all stand-ins have in common: nothing is late, and time is the host's."""

    device = CPU
    devices: ClassVar[Any] = {}

    def keep_busy(self) -> None:
        """There is no device that could be."""

    def synchronize(self) -> None:
        """Everything has happened."""

    def seconds(self, call: Callable[[], object], n_calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(n_calls):
            call()
        self.synchronize()
        return (time.perf_counter() - begin) / n_calls


class StandIn(CpuClock):
    """Kernels and streams over the stand-in driver, in a child of the harness."""

    def __init__(self) -> None:
        self._torch = harness.Streams(0)
        self._streams: dict[str, Any] = {}

    def kernels(self, variant: str) -> Any:
        return cuda.load(0, variant=variant, streams=self._torch)

    def streams(self) -> dict[str, Any]:
        if not self._streams:
            self.kernels("registers")
            default = harness.Stream(0, 0)
            self._streams = {"default": default, "torch": self.new_stream(), "own": cuda.new_stream(0)}
        return self._streams

    def new_stream(self) -> Any:
        return harness.Stream(0)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self._torch.current()
        self._torch.set(stream)
        try:
            yield
        finally:
            self._torch.set(before)

    def capture(self, call: Callable[[], object], stream: Any) -> Callable[[], None]:
        """Nothing is captured; a replay does it again, as the kernels are told in a capture."""

        def replay() -> None:
            self._torch.is_capturing = True
            try:
                with self.on(stream):
                    call()
            finally:
                self._torch.is_capturing = False

        replay()
        return replay


class Recorded(CpuClock):
    """Collectives on a recorded device, by the CPU's codec."""

    def __init__(self) -> None:
        self.recorded = RecordedDevice(0)
        self.devices = {CPU: self.recorded}

    def synchronize(self) -> None:
        self.recorded.run_all()


class Skewed:
    """Kernels that do one thing wrong."""

    def __init__(self, kernels: Any, wrong: str) -> None:
        self._kernels, self._wrong = kernels, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def encode_frames(self, tensors: Any, buffers: Any, window: Any) -> Any:
        sizes = self._kernels.encode_frames(tensors, buffers, window)
        if self._wrong == "encode":
            buffers[-1][127] ^= 1
        return sizes

    def decode_frames(self, frames: Any, outs: Any) -> Any:
        status = self._kernels.decode_frames(frames, outs)
        if self._wrong == "decode" and outs[-1].numel():
            outs[-1].view(torch.int16)[-1] ^= 1
        return torch.zeros_like(status) if self._wrong == "status" else status

    def decode_reduce(self, parts: Any, out: Any, divisor: int) -> Any:
        return self._kernels.decode_reduce(parts, out, 1 if self._wrong == "divisor" else divisor)


# ---------------------------------------------------------------------- checks and codec


@needs_pycuda
def test_all_checks_hold() -> None:
    def child() -> None:
        rows = gpu.checks(StandIn(), list(compiler.VARIANTS), SMALL)
        found = {(row["contender"], row["operation"]): row for row in rows}
        wanted = {"frames, auto", "frames, sigma=0.02", "frames, table", "batch of 64", "batch of 100"}
        wanted |= {"damaged frames", "sums", "split frames", "streams", "threads", "graphs"}
        assert found.keys() == {(variant, check) for variant in compiler.VARIANTS for check in wanted}
        assert all(float(str(row["p50"])) > 0 and row["wrong"] == 0 for row in rows)

    harness.run(child)


@needs_pycuda
@pytest.mark.parametrize(
    ("wrong", "checks"),
    [
        ("encode", {"frames, auto", "frames, table", "graphs", "streams", "threads"}),
        ("decode", {"frames, auto", "split frames", "graphs", "streams", "threads"}),
        ("status", {"damaged frames", "split frames"}),
        ("divisor", {"sums", "graphs"}),
    ],
)
def test_checks_notice(wrong: str, checks: set[str], capfd: pytest.CaptureFixture[str]) -> None:
    def child() -> None:
        machine = StandIn()
        machine.kernels = lambda variant: Skewed(StandIn.kernels(machine, variant), wrong)  # type: ignore[method-assign]
        tally = gpu_checks.run(machine, ["registers"], SMALL._replace(large=(), thread_blocks=(1,), reduced=(700,)))
        noticed = {check for (_, check), count in tally.wrong.items() if count}
        assert checks <= noticed, noticed
        with pytest.raises(SystemExit) as ended:
            gpu.run({"checks": lambda: gpu.checks(machine, ["registers"], SMALL._replace(large=()))}, ["checks"])
        assert ended.value.code == 1

    harness.run(child)
    assert "nothing is measured" in capfd.readouterr().out


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@needs_pycuda
def test_codec_measures_and_draws(tmp_path: Path) -> None:
    def child() -> None:
        out, machine, variants = tmp_path / "gpu.csv", StandIn(), ["registers", "cp_async"]
        gpu.describe({"device": "a stand-in", "driver": "none"})
        sections = {"codec": lambda: gpu.codec(machine, variants, [0.02, 0.05], CLOCK, 0.02)}
        rows, failed = gpu.run(sections, ["codec"])
        assert not failed
        report.write_csv(out, rows)
        written = read(out)
        assert {row["device"] for row in written} == {"a stand-in"}
        assert {row["driver"] for row in written} == {"none"}
        assert all(row["wrong"] == "0" for row in written)
        operations = {row["operation"] for row in written}
        assert operations == {"copy", "encode", "decode", "encode x64", "decode x64", "decode + reduce 4"}
        metrics = {"throughput", "time", "moved", "floor", "size", "host_time", "eager_time", "replay_time"}
        assert {row["metric"] for row in written} == metrics
        assert {row["contender"] for row in written if row["operation"] == "copy"} == {"torch copy_"}
        hosts = {row["contender"] for row in written if row["metric"] == "host_time"}
        assert hosts == {f"{variant}, {name} stream" for variant in variants for name in ("default", "torch", "own")}
        if importlib_matplotlib():
            gpu.plot(out, tmp_path / "gpu.png")

    harness.run(child)
    if importlib_matplotlib():
        assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def importlib_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@needs_pycuda
def test_bytes_that_are_moved() -> None:
    def child() -> None:
        payload = Payload(StandIn(), 102_400)
        kernels = StandIn().kernels("registers")
        by_name = {one.name: one for one in payload.of("x", kernels)}
        frame = payload.frame.numel()
        assert 102_400 * 0.68 < frame < 102_400 * 0.75
        assert by_name["encode"].moved_nbytes == by_name["decode"].moved_nbytes == 102_400 + frame
        assert by_name["decode + reduce 4"].moved_nbytes == 3 * frame + 2 * 102_400
        assert by_name["decode + reduce 4"].input_nbytes == 4 * 102_400
        timed = gpu_codec.Timed(by_name["encode"])
        timed.seconds, timed.copy_gbs = [2e-6, 1e-6], [(102_400 + frame) / 1e3, (102_400 + frame) / 1e3]
        assert timed.floor == pytest.approx([0.5, 1.0])
        assert timed.throughput == pytest.approx([51.2, 102.4])

    harness.run(child)


def timed_as(name: str, nbytes: int, gbs: float, copy_gbs: float, moved: int) -> gpu_codec.Timed:
    nothing: Callable[[], int] = lambda: 0  # noqa: E731
    item = gpu_codec.Timed(gpu_codec.Operation(name, "registers", nothing, nbytes, moved, nothing, nothing))
    item.seconds, item.copy_gbs = [nbytes / gbs / 1e9], [copy_gbs]
    return item


def test_expectations(capsys: pytest.CaptureFixture[str]) -> None:
    nbytes = 256_000_000
    timed = [timed_as(name, nbytes, 2200, 4300, nbytes * 17 // 10) for name in ("encode", "decode", "encode x64")]
    gpu_codec.print_expectations(nbytes, timed, "registers")
    printed = capsys.readouterr().out
    assert printed.count("holds") == 4
    assert "encode of 256 MB above 613 GB/s (SplitZip as published, on other hardware), measured 2200" in printed
    gpu_codec.print_expectations(nbytes, [timed_as("decode", nbytes, 1900, 4300, nbytes * 17 // 10)], "registers")
    assert capsys.readouterr().out.count("DOES NOT HOLD") == 2
    gpu_codec.print_expectations(16_000_000, timed, "registers")
    assert not capsys.readouterr().out


# ---------------------------------------------------------------------- peers


class FakeNvComp(types.ModuleType):
    """nvCOMP's interface as far as it is used; what it calls compressed is a copy."""

    __version__ = "6"

    class Array:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.buffer_size = tensor, tensor.numel()

    class Codec:
        def __init__(self, **options: Any) -> None:
            self.options = options
            if options["algorithm"] == "Bitcomp":
                raise ValueError("no Bitcomp today")

        def compression_config(self, nbytes: int) -> int:
            return nbytes

        def decompression_config(self, config: int) -> int:
            return config

        def encode(self, source: Any, out: Any = None, compression_config: int | None = None) -> Any:
            out = FakeNvComp.Array(torch.empty_like(source.tensor)) if out is None else out
            out.tensor.copy_(source.tensor)
            return out

        def decode(self, source: Any, out: Any, decompression_config: int) -> Any:
            out.tensor.copy_(source.tensor)
            return out

    def as_array(self, tensor: torch.Tensor, cuda_stream: int) -> Array:
        return self.Array(tensor)


class FakeDietGpu:
    def max_float_compressed_output_size(self, tensors: list[torch.Tensor]) -> tuple[int, int]:
        return 1, tensors[0].nbytes + 64

    def compress_data(
        self, as_float: bool, tensors: Any, scratch: Any, compressed: Any, sizes: Any
    ) -> tuple[Any, Any, int]:
        compressed[0][: tensors[0].nbytes].copy_(tensors[0].view(torch.uint8))
        sizes[0] = tensors[0].nbytes
        return compressed, sizes, 0

    def decompress_data(self, as_float: bool, frames: Any, outs: Any, scratch: Any, status: Any, numels: Any) -> int:
        outs[0].view(torch.uint8).copy_(frames[0][: outs[0].nbytes])
        return 0


@needs_pycuda
def test_peers_are_measured_or_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def child() -> None:
        machine = StandIn()
        monkeypatch.delenv(gpu_peers.DIETGPU_LIBRARY, raising=False)
        monkeypatch.setitem(sys.modules, "nvidia", None)
        rows = gpu.peers(machine, [0.1], CLOCK)
        assert {row["contender"] for row in rows} == {"torch copy_", "registers"}

        package = types.ModuleType("nvidia")
        package.nvcomp = FakeNvComp("nvcomp")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nvidia", package)
        monkeypatch.setattr(gpu_peers, "_dietgpu", FakeDietGpu)
        monkeypatch.setattr(gpu_peers.DietGpu, "SCRATCH_NBYTES", 64)
        rows = gpu.peers(machine, [0.1], CLOCK)
        peers = {"nvcomp ANS |u1 6", "nvcomp ANS <f2 6", "dietgpu"}
        assert {row["contender"] for row in rows} == {"torch copy_", "registers", *peers}
        assert not any(row["wrong"] for row in rows)
        bits = {row["contender"]: row["p50"] for row in rows if row["metric"] == "size"}
        assert bits.keys() == {"registers", *peers}
        assert {bits[name] for name in peers} == {"16"}

    harness.run(child)
    printed = capfd.readouterr().out
    assert "nvcomp ANS |u1 is not installed" in printed
    assert "dietgpu is not installed: DIETGPU_LIBRARY" in printed
    assert "nvcomp Bitcomp <u2 failed: ValueError: no Bitcomp today" in printed
    assert "expected encode of 0 MB ahead of dietgpu" in printed


# ---------------------------------------------------------------------- collectives


def loops(rank: int, world_size: int) -> list[report.Row]:
    return gpu.path(Recorded(), dist.group.WORLD, [0.05, 0.1], CLOCK)


def test_path(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (rows,) = run_ranks(loops, 1, backend="gloo")
    assert {row["contender"] for row in rows} == {"native", *gpu_path.MODES}
    assert {row["metric"] for row in rows} == {"time", "host_time_to_return", "host_time_to_waited"}
    assert len({row["nbytes"] for row in rows}) == 2
    assert not any(row["wrong"] for row in rows)
    assert "capped async" in capfd.readouterr().out


def lost_path(rank: int, world_size: int) -> int:
    machine = Recorded()
    values = gaussian(20_000, CPU)
    loop, out = gpu_path.Loop(machine, dist.group.WORLD), torch.zeros_like(values)
    n_wrong = gpu_path._wrong(machine, lambda: loop.gather(values, torch.empty_like(out), None, False), values, out)
    loop.close()
    return n_wrong


def test_path_notices_what_did_not_arrive() -> None:
    assert run_ranks(lost_path, 1, backend="gloo")[0] > 19_000


@pytest.mark.parametrize("make_machine", [CpuClock, Recorded])
def test_collectives(make_machine: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    """In spawned processes, as on a GPU."""
    rows = gpu.collectives(make_machine, [0.05], 2)
    wanted = {(name, label) for name in gpu_ranks.CASES for label in (gpu_ranks.STAGED, *gpu_ranks.CONFIGS)}
    assert {(row["operation"], row["contender"]) for row in rows} == {*wanted, ("fp32 sums", "exact")}
    assert not any(row["wrong"] for row in rows)
    assert "all_to_all_single" in capfd.readouterr().out


def broken_machine() -> Any:
    raise OSError("no such device")


def test_a_rank_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    sections = {"collectives": partial(gpu.collectives, broken_machine, [0.05], 1), "path": list}
    rows, failed = gpu.run(sections, ["collectives", "path"])
    assert (rows, failed) == ([], ["collectives"])
    out, err = capfd.readouterr()
    assert "collectives FAILED: RuntimeError: ranks ended with" in out
    assert "no such device" in err


def native_only(rank: int, world_size: int) -> str:
    one = gpu_ranks.Rank(CpuClock())
    one.communicator = partial(type(one).communicator, one, strategy="never")  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        one.checked("all_gather_into_tensor", gaussian(1000, CPU))
    return str(caught.value)


def test_native_calls_are_not_taken_for_ours() -> None:
    said = run_ranks(native_only, 2, backend="gloo")
    assert said == ["all_gather_into_tensor, exact: the call was native"] * 2


# ---------------------------------------------------------------------- the script


def script(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "bench" / "gpu.py", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=variables, timeout=110)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    process = script()
    assert process.returncode == 0, process.stderr
    first, *others = process.stdout.splitlines()
    assert first.startswith("# no GPU: torch")
    assert len(others) == 1
    assert "are the reference's, and decoded" in others[0] or "left out" in others[0]
    process = script(PATH="")
    assert (process.returncode, process.stdout.count("left out")) == (0, 1)


def test_unknown_sections() -> None:
    process = script("--only", "checks,speed")
    assert process.returncode == 2
    assert "unknown sections: speed; known: checks, codec, peers, path, collectives" in process.stderr


def test_different_counts_bits() -> None:
    values = torch.tensor([0.0, -0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    assert different(values, values.clone()) == 0
    assert different(values, torch.tensor([-0.0, -0.0, float("nan"), 1.0], dtype=torch.bfloat16)) == 1


@needs_pycuda
def test_main_writes_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine whose only fault is that it has no NCCL."""

    def child() -> None:
        class Described(StandIn):
            def __init__(self, index: int) -> None:
                super().__init__()
                self.index = index

            def description(self) -> dict[str, str]:
                return {"device": f"stand-in {self.index}", "cuda": "none"}

        extent = SMALL._replace(large=(), thread_blocks=(), reduced=(700,), damaged=997)
        monkeypatch.setattr(gpu, "Gpu", Described)
        monkeypatch.setattr(gpu, "why_no_cuda", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu_cases, "Extent", lambda: extent)
        arguments = ["--only", "checks,path", "--device", "1", "--sizes", "0.1", "--out", str(tmp_path / "gpu.csv")]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        with pytest.raises(SystemExit, match="failed: path"):
            gpu.main()
        rows = read(tmp_path / "gpu.csv")
        assert {(row["section"], row["device"], row["cuda"]) for row in rows} == {("checks", "stand-in 1", "none")}

        monkeypatch.setattr(gpu, "why_no_cuda", lambda device: f"no kernels for {device}")
        with pytest.raises(SystemExit, match="the CUDA kernels cannot be used: no kernels for cuda:1"):
            gpu.main()

    harness.run(child)
