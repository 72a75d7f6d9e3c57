"""The paper's models in small, by examples/models.py: the same losses and weights with ZipCCL as without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "models.py"
FRAMES_AND_BYTES = ("frames", "raw_frames", "wire_nbytes", "raw_nbytes")


@pytest.mark.parametrize(("model", "ranks"), [("llama3", 2), ("llama3", 4), ("qwen3_moe", 2), ("deepseek_v3", 2)])
def test_losses_and_weights_are_those_of_the_native_run(model: str, ranks: int, tmp_path: Path) -> None:
    steps, output = 4, tmp_path / "output.json"
    arguments = [f"--model={model}", f"--ranks={ranks}", f"--steps={steps}", f"--output={output}"]
    command = [sys.executable, str(EXAMPLE), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "losses equal: True, weights equal: True" in result.stdout

    runs: dict[str, list[dict[str, Any]]] = json.loads(output.read_text())
    native, zipccl = runs["gloo"], runs["zipccl"]
    assert len(native) == len(zipccl) == ranks
    assert len({rank["weights"] for rank in native}) == ranks, "each rank has a shard of its own"
    for wanted, came in zip(native, zipccl, strict=True):
        assert 2e6 < wanted["parameters"] < 5e6
        assert len(wanted["losses"]) == steps
        assert float.fromhex(wanted["losses"][-1]) < float.fromhex(wanted["losses"][0]), "it learns"
        assert came["losses"] == wanted["losses"]
        assert came["weights"] == wanted["weights"]
        assert wanted["counters"] == {}
        for operation in ("all_gather", "reduce_scatter"):
            counters = {name: came["counters"][f"zipccl/{operation}/{name}"] for name in FRAMES_AND_BYTES}
            assert counters["frames"] > counters["raw_frames"]
            assert 0 < counters["wire_nbytes"] < 0.8 * counters["raw_nbytes"]
