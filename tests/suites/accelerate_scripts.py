"""Runs accelerate's own test scripts on CPU ranks, natively and through ZipCCL.

    python tests/suites/accelerate_scripts.py                      # all that send and can run on CPUs
    python tests/suites/accelerate_scripts.py test_ops test_sync   # some of them, or others

Exits with 1 unless every script ends alike in both and ZipCCL sent frames. In the second run, `ZIPCCL=1` puts ZipCCL in
the place of every gloo group and `ZIPCCL_STRATEGY=always` sends frames wherever the codec can. Nearly all of these
tests use fp32 and integers, so the codec is `raw`, which has frames for them; `exponent` has them for bfloat16 alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outcomes import MODES, Run, environment, read_counters, report

HERE = Path(__file__).parent
PACKAGE = "accelerate.test_utils.scripts"
SCRIPTS = ["test_script", "test_ops", "test_sync"]


def run(mode: str, scripts: list[str], world_size: int, codec: str, timeout: float, logs: Path | None = None) -> Run:
    """Runs scripts one after the other, each on ranks of its own. A script that does not end in time has failed."""
    result = Run()
    with tempfile.TemporaryDirectory() as name:
        environ = environment(mode, Path(name), codec)
        environ["ACCELERATE_USE_CPU"] = "true"
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--standalone"]
        for script in scripts:
            log = (logs or Path(name)) / f"{script}-{mode}.log"
            began = time.monotonic()
            with log.open("w") as file:
                command = [*launcher, str(HERE / "run_script.py"), f"{PACKAGE}.{script}"]
                process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, cwd=name)
                try:
                    passed = process.wait(timeout) == 0
                except subprocess.TimeoutExpired:
                    process.terminate()  # the launcher ends its ranks
                    process.wait()
                    passed = False
            result.outcomes[script] = "passed" if passed else "failed"
            result.seconds += time.monotonic() - began
        result.counters = read_counters(Path(name), mode)
    return result


def main() -> int:
    """Both runs, and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", default=SCRIPTS)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each script")
    parser.add_argument("--logs", type=Path, help="folder for the full output")
    parser.add_argument("--codec", default="raw", help="raw, the default, frames every dtype; exponent only bfloat16")
    arguments = parser.parse_args()
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    logs = arguments.logs.resolve() if arguments.logs else None
    runs = {
        mode: run(mode, arguments.scripts, arguments.world_size, arguments.codec, arguments.timeout, logs)
        for mode in MODES
    }
    return 0 if report(f"accelerate's scripts, {arguments.world_size} ranks", runs) else 1


if __name__ == "__main__":
    sys.exit(main())
