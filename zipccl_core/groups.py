"""GroupCommunicators: an adapter's communicators, one for each torch group that it meets."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed import distributed_c10d as c10d

from zipccl_core.agreement import check_agreement
from zipccl_core.communicator import Communicator
from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import ConfigError
from zipccl_core.observe.statistics import Statistics
from zipccl_core.process_group import ENDED, ZipCCLProcessGroup


class _Entry(NamedTuple):
    communicator: Communicator
    alive: Mapping[Any, Any]
    """torch's groups, of this rank: with simulated ranks, there are several such mappings in a process."""


class GroupCommunicators:
    """The communicators of one adapter in this process. A communicator is made at the first call of its group.

    Groups may be destroyed behind the adapter's back, by torch.distributed; that is noticed when a new group comes, or
    when somebody asks for statistics. There is one for an adapter, as long as the process lives. Thread-safe.

    Args:
        space: of the adapter's message tags, see `ProcessGroupTransport`.
        checks: whether a new communicator compares its configuration with rank 0's, as nobody else does.
    """

    def __init__(self, space: int, *, checks: bool) -> None:
        self._space, self._checks = space, checks
        self._entries: dict[Any, _Entry] = {}
        self._made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._ended = Statistics()
        self._lock = threading.RLock()
        _ADAPTERS.append(self)

    def __contains__(self, group: Any) -> bool:
        return group in self._entries

    def of(self, group: Any, config: ZipCCLConfig) -> Communicator:
        """The communicator of a group, made with `config` where it is new. That of a group of the backend `zipccl` is
        its own, and takes the configuration.

        Raises:
            ConfigError: it has another configuration, or another than rank 0's.
        """
        entry = self._entries.get(group)
        communicator = self._new(group, config) if entry is None else entry.communicator
        if communicator.config is not config and communicator.config != config:
            raise ConfigError(
                f"group {communicator.name!r} is compressed with another configuration already.\n"
                f"first: {communicator.config.model_dump_json()}\nnow:   {config.model_dump_json()}"
            )
        return communicator

    def _new(self, group: Any, config: ZipCCLConfig) -> Communicator:
        self.drop_destroyed()
        with self._lock:
            if group in self._entries:  # by another thread
                return self._entries[group].communicator
            if isinstance(group, ZipCCLProcessGroup):
                communicator = group.communicator
                communicator.configure(config)
            else:
                communicator = Communicator(group, config, space=self._space)
            alive = c10d._world.pg_map
            self._entries[group] = _Entry(communicator, alive)
            number = self._made[group] = self._made.get(group, 0) + 1
        if self._checks and not isinstance(group, ZipCCLProcessGroup):
            store = c10d.PrefixStore(f"zipccl/{self._space}/{number}", alive[group][1])
            try:  # without the lock: it waits for rank 0
                check_agreement(store, communicator.rank, config.agreement(), communicator.name)
            except ConfigError:
                self.end(group)
                raise
        return communicator

    def drop_destroyed(self) -> None:
        """Ends the communicators of groups that torch.distributed does not know any more."""
        for group, entry in list(self._entries.items()):
            if group not in entry.alive:
                self.end(group)

    def end(self, group: Any) -> None:
        """Ends the communicator of a group, where there is one; its counters stay."""
        with self._lock:
            entry = self._entries.pop(group, None)
        if entry is not None:
            entry.communicator.close()
            if not isinstance(group, ZipCCLProcessGroup):  # which counts on, or was counted at its own end
                self._ended.merge(entry.communicator.stats())

    def end_all(self) -> None:
        """Ends all communicators."""
        for group in list(self._entries):
            self.end(group)

    def let_go(self) -> None:
        """Drops all references without waiting for anything, at the end of the process: a destroyed group that lives on
        until the interpreter clears its modules may find gloo's threads gone, and abort."""
        self._entries.clear()

    def stats(self) -> Statistics:
        """The counters of all its groups added up, and those of the backend `zipccl`, which need no adapter."""
        return _sum([self])

    def _after_fork(self) -> None:
        """In the child, which has none of the parent's threads: nothing may be ended, nor destroyed, for that waits for
        them."""
        _ABANDONED.append(self._entries)
        self._entries, self._ended, self._lock = {}, Statistics(), threading.RLock()


def stats() -> Statistics:
    """The counters of this process: of all adapters, and of the groups of the backend `zipccl`."""
    return _sum(_ADAPTERS)


_ADAPTERS: list[GroupCommunicators] = []
_ABANDONED: list[Any] = []


def _sum(adapters: list[GroupCommunicators]) -> Statistics:
    for adapter in adapters:
        adapter.drop_destroyed()
    communicators = {group.communicator for group in zipccl_groups()}
    for adapter in adapters:
        entries = list(adapter._entries.items())
        communicators.update(each.communicator for group, each in entries if not isinstance(group, ZipCCLProcessGroup))
    return Statistics.sum([ENDED, *(each._ended for each in adapters), *(each.stats() for each in communicators)])


def zipccl_groups() -> Iterator[ZipCCLProcessGroup]:
    """The groups of the backend `zipccl` that this rank is in."""
    groups = (group for group in list(c10d._world.pg_map) if isinstance(group, ZipCCLProcessGroup))
    return (group for group in groups if not group.is_shut_down)


def _after_fork() -> None:
    ENDED.clear()
    for adapter in _ADAPTERS:
        adapter._after_fork()


os.register_at_fork(after_in_child=_after_fork)
