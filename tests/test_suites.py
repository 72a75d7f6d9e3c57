"""Other projects' own tests end alike natively and through ZipCCL. Here a part that takes seconds; the whole is a
command, see docs/compatibility.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITES = Path(__file__).parent / "suites"


def run_suite(script: str, *arguments: str) -> str:
    """What a runner prints; it has to say that both runs were equal."""
    command = [sys.executable, str(SUITES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TORCHS_OWN = [
    "all_gather_full_group",
    "all_gather_object_default_pg",
    "all_reduce_sum",
    "broadcast",
    "ddp_logging_data_cpu",
    "get_backend",
    "monitored_barrier_gloo_subgroup",
    "scatter_object_list",
    "send_recv_any_source",
]


def test_torchs_own_distributed_tests():
    """Some that send, and those that ask for the name of the backend."""
    pytest.importorskip("expecttest", reason="torch's test classes need it")
    report = run_suite("torch_distributed.py", *(part for name in TORCHS_OWN for part in ("-k", f"*.test_{name}")))
    assert report.count(f"{len(TORCHS_OWN):5d} passed      0 failed      0 skipped") == 2


def test_on_torchs_test_classes():
    """FSDP2 and functional collectives."""
    pytest.importorskip("expecttest", reason="torch's test classes need it")
    report = run_suite("torch_distributed.py", "--suite", "fsdp2", "functional", "--world-size", "2")
    assert report.count(" 0 failed      0 skipped") == 2


def test_accelerates_own_operations():
    pytest.importorskip("accelerate")
    report = run_suite("accelerate_scripts.py", "test_ops")
    assert report.count("    1 passed      0 failed") == 2


def test_a_difference_is_an_error():
    sys.path.insert(0, str(SUITES))
    try:
        from outcomes import Run, report
    finally:
        sys.path.remove(str(SUITES))
    counted = {"frames": 3, "calls": 3}
    good = {"native": Run({"a": "passed"}), "zipccl": Run({"a": "passed"})}
    good["zipccl"].counters.update(counted)
    assert report("alike", good)
    assert not report("nothing was sent", {**good, "zipccl": Run({"a": "passed"})})
    failed = Run({"a": "failed"})
    failed.counters.update(counted)
    assert not report("one fails", {**good, "zipccl": failed})
    missing = Run({})
    missing.counters.update(counted)
    assert not report("one is missing", {**good, "zipccl": missing})
    assert not report("the native run was not", {"native": good["zipccl"], "zipccl": good["zipccl"]})
