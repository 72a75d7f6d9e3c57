"""What the README shows runs, and prints what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zipccl_core import ZipCCLConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", README, re.S)


@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=[code.split("\n", 1)[0] for code, _ in BLOCKS])
def test_python_block(code: str, output: str) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout == output


def test_a_codec_takes_fewer_than_fifteen_lines() -> None:
    (code,) = [code for code, _ in BLOCKS if "class ShuffleCodec" in code]
    body = code[code.index("class ShuffleCodec") : code.index("check_codec(Shuffle")]
    assert len([line for line in body.splitlines() if line.strip()]) < 15


def test_json_block() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.S)
    ZipCCLConfig(**json.loads(block)["zipccl"])


def test_links_and_keys() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
    for field in ZipCCLConfig.model_fields:
        assert f"| `{field}` |" in README, f"README's table lacks {field}"
