"""The comm backend: DeepSpeed's own TorchBackend, whose collectives go through a Communicator a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zipccl_core import Communicator, ConfigError, Statistics, ZipCCLConfig, ZipCCLProcessGroup
from zipccl_core.agreement import check_agreement
from zipccl_core.collective.work import JoinedWork
from zipccl_core.groups import GroupCommunicators

if TYPE_CHECKING:
    from torch import Tensor

SUM = dist.ReduceOp.SUM
PATIENCE = timedelta(seconds=30)
"""How long a rank waits for rank 0's section, to compare."""
ADAPTER_SPACE = 1
"""Of message tags; users' own communicators on the same group have others."""


class Communicators:
    """The communicators of this process under deepspeed.comm, one a torch group, configured by the `"zipccl"` section.

    Groups may also be destroyed behind deepspeed.comm's back, by torch.distributed; that is noticed at the next call.
    """

    def __init__(self) -> None:
        self.config: ZipCCLConfig | None = None
        self._groups = GroupCommunicators(ADAPTER_SPACE, checks=False)
        self._world: Any = None
        """The default group in which the section was read."""
        self._worlds = 0

    def configure(self, config: ZipCCLConfig) -> None:
        """Takes the section of an engine.

        Raises:
            ConfigError: another engine of this process has a different one; they share deepspeed.comm, so they must
                agree. Or rank 0 has a different one.
        """
        self._drop_destroyed()
        if self.config is not None and self.config != config:
            raise ConfigError(
                "two engines in one process have different 'zipccl' sections, but share deepspeed.comm; "
                "give both the same.\n"
                f"first: {self.config.model_dump_json()}\nsecond: {config.model_dump_json()}"
            )
        is_first = self.config is None
        self.config, self._world = config, dist.group.WORLD
        if is_first and self._world is not None and self._world.size() > 1:
            self._worlds += 1
            store = c10d.PrefixStore(f"zipccl/section of world {self._worlds}", c10d._get_default_store())
            check_agreement(store, dist.get_rank(), config.agreement(), "world", PATIENCE)

    def of(self, group: Any) -> Communicator | None:
        """The communicator of a group; None where calls are DeepSpeed's own: no section, a group that this rank is not
        in, or a group of one."""
        if self.config is None or not self.config.enabled:
            return None
        group = dist.group.WORLD if group is None else group
        if group not in self._groups:
            self._drop_destroyed()
            if self.config is None or not isinstance(group, dist.ProcessGroup) or group.size() == 1:
                return None
        communicator = self._groups.of(group, self.config)
        # a zipccl group compresses by itself; its communicator is here for its configuration and counters only
        return None if isinstance(group, ZipCCLProcessGroup) else communicator

    def _drop_destroyed(self) -> None:
        self._groups.drop_destroyed()
        if self._world is not None and self._world not in c10d._world.pg_map:
            self.config, self._world = None, None  # the section was that of a world that is no more

    def end(self, group: Any = None) -> None:
        """Ends the communicator of a group; without one, all, and the configuration with them. Counters stay."""
        if group is not None:
            self._groups.end(group)
        else:
            self._groups.end_all()
            self.config, self._world = None, None

    def stats(self) -> Statistics:
        """The counters of all groups, added up; groups of the backend `zipccl` count without a section, too."""
        return self._groups.stats()


COMMUNICATORS = Communicators()


def stats() -> Statistics:
    """What deepspeed.comm sent compressed in this process so far, in destroyed groups too: counters, `.table()`, and
    `.flat()` for a monitor."""
    return COMMUNICATORS.stats()


class ZipCCLBackendMixin:
    """Overrides of a DeepSpeed comm backend. Ranks in arguments are global ranks. What has no compressed path is the
    base's, as if this class were not there."""

    _reduce_op: Callable[[Any], Any]

    def stats(self) -> Statistics:
        """Same as `zipccl_deepspeed.stats()`."""
        return stats()

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """As DeepSpeed's."""
        native = partial(super().all_gather_into_tensor, output_tensor, input_tensor, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.all_gather_into_tensor(output_tensor, input_tensor, async_op, native)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """As DeepSpeed's."""
        native = partial(super().all_gather, tensor_list, tensor, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.all_gather(tensor_list, tensor, async_op, native)

    def all_gather_coalesced(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As DeepSpeed's on a GPU; on a CPU, one all-gather after another."""
        on_cpu = all(tensor.device.type == "cpu" for tensor in input_tensors)
        if COMMUNICATORS.of(group) is None or not on_cpu:
            return super().all_gather_coalesced(output_tensors, input_tensors, group, async_op)  # type: ignore[misc]
        pairs = zip(output_tensors, input_tensors, strict=True)
        works = [self.all_gather_into_tensor(output, input, group, async_op) for output, input in pairs]
        return JoinedWork(works, list(output_tensors)) if async_op else None

    def reduce_scatter_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """As DeepSpeed's."""
        native = partial(super().reduce_scatter_tensor, output_tensor, input_tensor, op, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.reduce_scatter_tensor(output_tensor, input_tensor, self._reduce_op(op), async_op, native)

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """As DeepSpeed's."""
        native = partial(super().reduce_scatter, output, input_list, op, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.reduce_scatter(output, input_list, self._reduce_op(op), async_op, native)

    def all_reduce(self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False) -> Any:
        """As DeepSpeed's."""
        native = partial(super().all_reduce, tensor, op, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.all_reduce(tensor, self._reduce_op(op), async_op, native)

    def all_reduce_coalesced(
        self, tensors: list[Tensor], op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """As DeepSpeed's."""
        native = partial(super().all_reduce_coalesced, tensors, op, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.all_reduce_coalesced(tensors, self._reduce_op(op), async_op, native)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As DeepSpeed's."""
        tensors_and_splits = (output, input, output_split_sizes, input_split_sizes)
        native = partial(super().all_to_all_single, *tensors_and_splits, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.all_to_all_single(*tensors_and_splits, async_op, native)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As DeepSpeed's."""
        native = partial(super().all_to_all, output_tensor_list, input_tensor_list, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.all_to_all(output_tensor_list, input_tensor_list, async_op, native)

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        """As DeepSpeed's."""
        native = partial(super().broadcast, tensor, src, group, async_op)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.broadcast(tensor, _in_group(group, src), async_op, native)

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """As DeepSpeed's."""
        native = partial(super().isend, tensor, dst, group, tag)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.isend(tensor, _in_group(group, dst), tag, native)

    def irecv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """As DeepSpeed's."""
        native = partial(super().irecv, tensor, src, group, tag)  # type: ignore[misc]
        if (communicator := COMMUNICATORS.of(group)) is None:
            return native()
        return communicator.irecv(tensor, None if src is None else _in_group(group, src), tag, native)

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """As DeepSpeed's."""
        if COMMUNICATORS.of(group) is None:
            return super().send(tensor, dst, group, tag)  # type: ignore[misc]
        self.isend(tensor, dst, group, tag).wait()
        return None

    def recv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """As DeepSpeed's; returns the global rank of the sender."""
        if COMMUNICATORS.of(group) is None:
            return super().recv(tensor, src, group, tag)  # type: ignore[misc]
        work = self.irecv(tensor, src, group, tag)
        work.wait()
        if src is not None:
            return src
        world: Any = dist.group.WORLD
        return dist.get_global_rank(group or world, work._source_rank())

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> Any:
        """As DeepSpeed's; where a group is compressed, its messages one after another. Those between GPUs are native,
        and NCCL needs them in one batch: two ranks that both send first would wait for each other."""
        on_gpus = any(operation.tensor.device.type != "cpu" for operation in p2p_op_list)
        if on_gpus or not any(COMMUNICATORS.of(operation.group) for operation in p2p_op_list):
            return super().batch_isend_irecv(p2p_op_list)  # type: ignore[misc]
        return [
            getattr(self, operation.op)(operation.tensor, operation.peer, operation.group, operation.tag)
            for operation in p2p_op_list
        ]

    def destroy_process_group(self, group: Any = None) -> Any:
        """Ends the group's communicator, then the group."""
        COMMUNICATORS.end(None if group is None or group is dist.group.WORLD else group)
        return super().destroy_process_group(group)  # type: ignore[misc]


def _in_group(group: Any, global_rank: int) -> int:
    group = dist.group.WORLD if group is None else group
    return dist.get_group_rank(group, global_rank)
