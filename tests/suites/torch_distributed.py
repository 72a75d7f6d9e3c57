"""Runs torch's own distributed tests, and parity tests on its test classes, natively and through ZipCCL.

    python tests/suites/torch_distributed.py                            # torch's own tests, some minutes
    python tests/suites/torch_distributed.py -k all_gather -k reduce    # some of them
    python tests/suites/torch_distributed.py --suite fsdp2 functional   # parity tests on torch's test classes

Exits with 1 unless every test ends alike in both and ZipCCL sent frames. In the second run, `ZIPCCL=1` puts ZipCCL in
the place of every gloo group and `ZIPCCL_STRATEGY=always` sends frames wherever the codec can. Nearly all of these
tests use fp32 and integers, so the codec is `raw`, which has frames for them; `exponent` has them for bfloat16 alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outcomes import MODES, Run, environment, read_counters, report

HERE = Path(__file__).parent
SUITES = {"distributed": "cases_distributed", "fsdp2": "cases_fsdp2", "functional": "cases_functional"}


def run(
    mode: str,
    suites: list[str],
    world_size: int,
    patterns: list[str],
    codec: str,
    timeout: float,
    log: Path | None = None,
) -> Run:
    """Runs suites in a process of their own. A run that does not end in time fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = environment(mode, folder, codec)
        environ.update(
            BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR=name, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60"
        )
        command = [
            sys.executable,
            str(HERE / "run_cases.py"),
            str(folder / "result.json"),
            *(SUITES[suite] for suite in suites),
        ]
        for pattern in patterns:
            command += ["-k", pattern]
        began = time.monotonic()
        output = folder / "log" if log is None else log
        with output.open("w") as file:
            process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, cwd=name, start_new_session=True)
            try:
                code = process.wait(timeout)
            finally:
                with contextlib.suppress(ProcessLookupError):  # ranks that are left
                    os.killpg(process.pid, signal.SIGKILL)
        seconds = time.monotonic() - began
        if code:
            raise RuntimeError(f"the {mode} run of {suites} ended with {code}:\n{output.read_text()[-4000:]}")
        outcomes = json.loads((folder / "result.json").read_text())
        return Run(outcomes, read_counters(folder, mode), seconds)


def main() -> int:
    """Both runs, and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=["distributed"])
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("-k", dest="patterns", action="append", default=[], help="only tests with this in their name")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each of the two runs")
    parser.add_argument("--logs", type=Path, help="folder for the full output of both runs")
    parser.add_argument("--codec", default="raw", help="raw, the default, frames every dtype; exponent only bfloat16")
    arguments = parser.parse_args()
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    runs = {}
    for mode in MODES:
        log = arguments.logs.resolve() / f"{'-'.join(arguments.suite)}-{mode}.log" if arguments.logs else None
        runs[mode] = run(
            mode, arguments.suite, arguments.world_size, arguments.patterns, arguments.codec, arguments.timeout, log
        )
    equal = report(f"{' and '.join(arguments.suite)}, {arguments.world_size} ranks", runs)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
