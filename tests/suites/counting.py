"""Counts what all groups of a process did, destroyed ones too, and appends that to a file for the whole run."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from outcomes import COUNTED

import zipccl_core.process_group  # noqa: F401 - once, and not in every rank that is forked
from zipccl_core.observe.statistics import Statistics

_counted: Counter[str] = Counter()
_add = Statistics.add


def _counting_add(self: Statistics, operation: Any, **increments: float) -> None:
    for name in COUNTED:
        if name in increments:
            _counted[name] += int(increments[name])
    _add(self, operation, **increments)


def start() -> None:
    """From here on, and in processes that are forked, everything is counted."""
    Statistics.add = _counting_add  # type: ignore[method-assign]


def write() -> None:
    """Appends the counters of this process, and begins anew."""
    line = json.dumps(_counted) + "\n"
    _counted.clear()
    descriptor = os.open(os.environ["SUITE_COUNTERS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
