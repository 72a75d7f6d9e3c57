"""Operation: the names of what has a compressed path."""

from __future__ import annotations

from enum import Enum


class Name(str, Enum):
    """Names that are written and printed as they are."""

    def __str__(self) -> str:
        return str(self.value)


class Operation(Name):
    """The operations that have a compressed path, by the names that configuration and statistics use."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"
