"""GroupCommunicators: an adapter's communicators, one for each torch group that it meets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d as c10d

from zipccl_core.communicator import Communicator
from zipccl_core.config import ZipCCLConfig
from zipccl_core.observe.statistics import Statistics
from zipccl_core.process_group import ZipCCLProcessGroup


class GroupCommunicators:
    """The communicators of one adapter in this process. A communicator is made at the first call of its group.

    Groups may be destroyed behind the adapter's back, by torch.distributed; that is noticed when a new group comes.

    There is one for an adapter, as long as the process lives.

    Args:
        space: of the adapter's message tags, see `ProcessGroupTransport`.
    """

    def __init__(self, space: int) -> None:
        self._space = space
        self._by_group: dict[Any, Communicator] = {}
        self._ended = Statistics()
        _ADAPTERS.append(self)

    def __contains__(self, group: Any) -> bool:
        return group in self._by_group

    def of(self, group: Any, config: ZipCCLConfig) -> Communicator:
        """The communicator of a group, made with `config` where it is new. That of a group of the backend `zipccl` is
        its own, and takes the configuration."""
        communicator = self._by_group.get(group)
        if communicator is None:
            self.drop_destroyed()
            if isinstance(group, ZipCCLProcessGroup):
                communicator = group.communicator
                communicator.configure(config)
            else:
                communicator = Communicator(group, config, space=self._space)
            self._by_group[group] = communicator
        return communicator

    def drop_destroyed(self) -> None:
        """Ends the communicators of groups that torch.distributed does not know any more."""
        for group in [group for group in self._by_group if group not in c10d._world.pg_map]:
            self.end(group)

    def end(self, group: Any) -> None:
        """Ends the communicator of a group, where there is one; its counters stay."""
        communicator = self._by_group.pop(group, None)
        if communicator is not None:
            communicator.close()
            self._ended = Statistics.sum([self._ended, communicator.stats()])

    def forget(self) -> None:
        """Ends all communicators, and drops all counters."""
        for group in list(self._by_group):
            self.end(group)
        self._ended = Statistics()

    def let_go(self) -> None:
        """Drops all references without waiting for anything, at the end of the process: a destroyed group that lives on
        until the interpreter clears its modules may find gloo's threads gone, and abort."""
        self._by_group.clear()

    def stats(self) -> Statistics:
        """The counters of all its groups added up, and those of the backend `zipccl`, which need no adapter."""
        return _sum([self])


def stats() -> Statistics:
    """The counters of this process: of all adapters, and of the groups of the backend `zipccl`."""
    return _sum(_ADAPTERS)


_ADAPTERS: list[GroupCommunicators] = []


def _sum(adapters: list[GroupCommunicators]) -> Statistics:
    communicators = {group.communicator for group in zipccl_groups()}
    communicators.update(*(adapter._by_group.values() for adapter in adapters))
    return Statistics.sum([adapter._ended for adapter in adapters] + [each.stats() for each in communicators])


def zipccl_groups() -> Iterator[ZipCCLProcessGroup]:
    """The groups of the backend `zipccl` that this rank is in."""
    return (group for group in list(c10d._world.pg_map) if isinstance(group, ZipCCLProcessGroup))
