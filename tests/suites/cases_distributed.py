"""torch's own tests of torch.distributed, which are part of its wheel: ranks are forked instead of spawned.

Some also look for gloo's events in torch's profiler (`gloo:all_reduce`), by the name that `get_backend()` gives. A call
that ZipCCL sends as frames has none. That one check is off, natively too; all that these tests check of results is on.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("BACKEND", "gloo")
for _name in ("barrier", "test_dir"):
    Path(os.environ["TEMP_DIR"], _name).mkdir(parents=True, exist_ok=True)

from forking import Forking
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

for _allowed in (
    distributed_test.PROFILING_SUPPORTED_BACKENDS,
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
):
    _allowed.clear()


class TestDistBackendWithFork(Forking, TestDistBackend, DistributedTest._DistTestBase):
    """All of them, on the backend in BACKEND."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
