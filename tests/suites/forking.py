"""How ranks of torch's test classes start and end here."""

from __future__ import annotations

from typing import Any

import counting
import torch


class Forking:
    """Ranks are forked, which takes milliseconds instead of seconds, and write their counters."""

    def _spawn_processes(self) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # type: ignore[attr-defined]

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """As the base class, on one rank."""
        torch.set_num_threads(1)
        try:
            super().run_test(test_name, parent_pipe)  # type: ignore[misc]
        finally:
            counting.write()
