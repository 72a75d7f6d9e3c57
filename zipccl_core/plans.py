"""Plans: which way each call of a group goes, by its configuration and, where a strategy measures, by what all ranks
know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zipccl_core.strategy.adaptive import AdaptiveStrategy
from zipccl_core.strategy.base import Call, Known, Plan
from zipccl_core.strategy.operation import Operation
from zipccl_core.strategy.switcher import Switcher

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zipccl_core.config import ZipCCLConfig
    from zipccl_core.strategy.switcher import Peers

_MOST = 4096


class Plans:
    """The plans of one group under one configuration, kept by operation, dtype and size.

    Args:
        config: of the group.
        peers: the group, for strategies that measure.
        before_measuring: called before a call that does; the group must be doing nothing else.
    """

    def __init__(self, config: ZipCCLConfig, peers: Peers, before_measuring: Callable[[], None]) -> None:
        self._config, self._world_size, self._before_measuring = config, peers.world_size, before_measuring
        self._plans: dict[tuple[Operation, torch.dtype, int | None, bool], Plan] = {}
        self._calls: dict[tuple[Operation, torch.dtype, int | None], Call | None] = {}
        made: dict[AdaptiveStrategy, Switcher] = {}
        self._switchers: dict[Operation, Switcher] = {}
        for operation in Operation:
            strategy = config.strategy_of(operation)
            if isinstance(strategy, AdaptiveStrategy) and operation != Operation.SEND_RECV:
                self._switchers[operation] = made.setdefault(strategy, Switcher(strategy, peers))

    def of(
        self, operation: Operation, tensor: Tensor, numel: int | None, own_numel: int, has_values: bool, on_cpu: bool
    ) -> Plan:
        """The plan of the next call. Every rank of the group asks for it.

        Args:
            operation: of the call.
            tensor: one of those that this rank contributes.
            numel: of all of them, where every rank contributes as many; else None.
            own_numel: of all of them, here.
            has_values: whether the tensor has values before the call.
            on_cpu: whether it is on a CPU; on others nothing is measured.
        """
        known = None
        if on_cpu and (switcher := self._switchers.get(operation)) is not None:
            nbytes = own_numel * tensor.element_size()
            known = self._known(switcher, operation, tensor.dtype, numel, nbytes, tensor if has_values else None)
        key = (operation, tensor.dtype, numel, on_cpu)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST:  # sizes that change from step to step
                self._plans.clear()
            plan = self._plans[key] = self._config.plan(operation, tensor.dtype, numel, self._world_size, known)
        return plan

    def settle(self) -> None:
        """Waits for what other ranks have sent; before another configuration, which all take after the same call."""
        for switcher in self._switchers.values():
            switcher.settle()

    def abandon(self) -> None:
        """At the end of the group, where nobody may be waited for."""
        for switcher in self._switchers.values():
            switcher.abandon()

    def _known(
        self,
        switcher: Switcher,
        operation: Operation,
        dtype: torch.dtype,
        numel: int | None,
        nbytes: int,
        values: Tensor | None,
    ) -> Known | None:
        """What all ranks know for the next call of an operation. It may wait for them, and measure."""
        key = (operation, dtype, numel)
        if key not in self._calls:
            if len(self._calls) >= _MOST:
                self._calls.clear()
            call = self._config.call(operation, dtype, numel, self._world_size)
            self._calls[key] = call if call is not None and switcher.measures(call) else None
        call = self._calls[key]
        if call is None:
            return None
        if not switcher.has_measured(operation):
            self._before_measuring()
        known, changed = switcher.known(call, nbytes, values)
        if changed:
            self._plans.clear()
        return known
