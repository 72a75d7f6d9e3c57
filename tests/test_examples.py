"""The examples as a newcomer runs them: on real processes, natively and with ZipCCL."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zipccl_core.config import ZipCCLConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.json"))


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where zipccl is not installed, lets the processes find the checkout and what an installation would register."""
    if any(entry.name == "zipccl" for entry in importlib.metadata.entry_points(group="torch.backends")):
        return
    metadata = tmp_path / "zipccl-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zipccl\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\n"
        "zipccl = zipccl_core._autoload:autoload\nzipccl_deepspeed = zipccl_deepspeed._autoload:autoload\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    ("script", "config", "operations"),
    [
        ("deepspeed_llama.py", "llama_zero0.json", {"all_reduce"}),
        ("deepspeed_llama.py", "llama_zero1.json", {"all_reduce", "all_gather"}),
        ("deepspeed_llama.py", "llama_zero3.json", {"all_gather", "reduce_scatter"}),
        ("deepspeed_moe.py", "moe_zero2.json", {"all_reduce", "all_gather", "all_to_all"}),
    ],
)
def test_losses_and_weights_are_those_of_the_native_run(
    script: str, config: str, operations: set[str], demo: ModuleType, installed: None
) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    configuration, shown = demo.Configuration(config, script, config), []
    native = demo.train(configuration, 2, native=True, on_step=lambda: shown.append("native"))
    zipccl = demo.train(configuration, 2, native=False, on_step=lambda: shown.append("zipccl"))

    assert shown == ["native"] * 2 + ["zipccl"] * 2
    assert [len(losses) for losses in native.losses] == [2, 2]
    assert zipccl.losses == native.losses
    assert zipccl.weights == native.weights
    assert native.counters == {}
    compressed = {name for name, c in zipccl.counters.items() if c["frames"] > c["raw_frames"]}
    assert compressed >= operations
    for operation in operations:
        assert zipccl.counters[operation]["wire_nbytes"] < 0.8 * zipccl.counters[operation]["raw_nbytes"]


def test_a_failed_run_says_what_it_printed(demo: ModuleType) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(demo.RunError, match="no_such_example"):
        demo.train(
            demo.Configuration("-", "no_such_example.py", "llama_zero0.json"), 1, native=True, on_step=lambda: None
        )


def test_verdict_of_the_demo(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(loss: float, frames: float) -> object:
        counters = {"all_gather": {"frames": frames, "raw_frames": 1.0, "raw_nbytes": 200.0, "wire_nbytes": 140.0}}
        return demo.Run([[loss.hex()], [loss.hex()]], ["a", "b"], counters, 1.0)

    console = demo.Console(width=120)
    assert demo.verdict([run(0.5, 3)], [run(0.5, 3)], console) == 0
    assert "30.0 % fewer bytes" in capsys.readouterr().out
    assert demo.verdict([run(0.5, 3)], [run(0.25, 3)], console) == 1
    assert "NO" in capsys.readouterr().out
    assert demo.verdict([run(0.5, 1)], [run(0.5, 1)], console) == 1
    assert "No frame was compressed" in capsys.readouterr().out


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_configurations_are_valid(file: Path) -> None:
    config = json.loads(file.read_text())
    assert config["optimizer"]["params"]["torch_adam"], "DeepSpeed would compile its own Adam, for minutes"
    assert ZipCCLConfig(**config["zipccl"]).enabled


def test_all_configurations_are_there() -> None:
    assert [file.stem for file in CONFIGS] == [*(f"llama_zero{stage}" for stage in range(4)), "moe_zero2"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_the_targets() -> None:
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    targets = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("  make ")}
    assert targets >= {"help", "venv", "demo", "test", "lint", "types", "bench", "ci"}


def run_example(*arguments: str | Path, ranks: int = 0) -> str:
    """What an example prints, run by python, or on some ranks by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    script, *rest = map(str, arguments)
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *rest]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def small_run(output: Path, *arguments: str, ranks: int = 2) -> dict[str, Any]:
    """The summary of three steps of an example that takes these arguments."""
    sizes = ("--steps=3", "--hidden=192", "--layers=2", "--sequence=64")
    printed = run_example(*arguments, *sizes, f"--output={output}", ranks=ranks)
    summary: dict[str, Any] = json.loads(output.read_text())
    assert [len(losses) for losses in summary["losses"]] == [3] * ranks
    assert f"step   3  loss {float.fromhex(summary['losses'][0][-1]):.6f}" in printed
    assert summary["weights"][0] in printed
    return summary


def assert_equal_and_compressed(native: dict[str, Any], zipccl: dict[str, Any], operations: set[str]) -> None:
    assert native["counters"] == {}
    assert zipccl["losses"] == native["losses"]
    assert zipccl["weights"] == native["weights"]
    for operation in operations:
        counters = {
            name.rsplit("/", 1)[1]: value
            for name, value in zipccl["counters"].items()
            if name.startswith(f"zipccl/{operation}/")
        }
        assert counters["frames"] > counters["raw_frames"]
        assert 0 < counters["wire_nbytes"] < 0.8 * counters["raw_nbytes"]


def test_fsdp2_by_backend_and_by_hooks(installed: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    runs = {
        comm: small_run(tmp_path / f"{comm}.json", "fsdp2_train.py", f"--comm={comm}", "--reduction=gloo")
        for comm in ("native", "zipccl", "hooks")
    }
    for comm in ("zipccl", "hooks"):
        assert_equal_and_compressed(runs["native"], runs[comm], {"all_gather", "reduce_scatter"})


@pytest.mark.parametrize(
    ("parallel", "operations"), [("ddp", {"all_reduce"}), ("fsdp2", {"all_gather", "reduce_scatter"})]
)
def test_accelerate_with_and_without_the_plugin(
    parallel: str, operations: set[str], installed: None, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    arguments = ("accelerate_train.py", f"--parallel={parallel}", "--reduction=gloo")
    native = small_run(tmp_path / "native.json", *arguments, "--native")
    zipccl = small_run(tmp_path / "zipccl.json", *arguments)
    assert_equal_and_compressed(native, zipccl, operations)


def test_a_codec_of_ones_own(installed: None) -> None:
    printed = run_example("custom_codec.py", "--steps", "3")
    assert "check_codec: every bit comes back" in printed
    assert "losses and weights are those of native gloo, bit for bit" in printed
