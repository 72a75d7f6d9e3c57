"""Strategies that need no measurement: always, never, and by size."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zipccl_core.strategy.base import NATIVE, Call, Plan, Strategy


class AlwaysStrategy(Strategy):
    """Compresses every call that has a compressed path, however small."""

    id: Literal["always"] = "always"

    def choose(self, call: Call) -> Plan:
        """The compressed plan."""
        return call.compressed


class NeverStrategy(Strategy):
    """Leaves every call native: ZipCCL is there, and does nothing."""

    id: Literal["never"] = "never"

    def choose(self, call: Call) -> Plan:
        """The native plan."""
        return NATIVE


class ThresholdStrategy(Strategy):
    """Compresses calls of at least `min_nbytes`; smaller ones cost more time than their bytes are worth.

    Args:
        min_nbytes: bytes that a rank contributes. Calls whose size ranks may not share (all-to-all) are
            always compressed.
    """

    id: Literal["threshold"] = "threshold"
    min_nbytes: Annotated[int, Field(ge=0)] = 64 * 1024

    def choose(self, call: Call) -> Plan:
        """Native below the threshold."""
        if call.numel is not None and call.numel * call.dtype.itemsize < self.min_nbytes:
            return NATIVE
        return call.compressed
